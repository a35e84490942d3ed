"""The door for ONNX files: what is let in, and what is turned away with which words."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from trt_engine.errors import ModelError
from trt_engine.graph import load
from trt_engine.graph.inspect import inspect_model
from trt_engine.graph.operators import onnxruntime_version_gap
from trt_engine.graph.opset import raise_opset
from trt_engine.graph.walk import index_of

from . import models


def refused(path: Path) -> ModelError:
    with pytest.raises(ModelError) as caught:
        load.open_model(path)
    assert caught.value.hint, "every refusal says what to do"
    assert caught.value.exit_code == 4
    return caught.value


def test_a_whole_model_is_described_as_it_is(tmp_path: Path) -> None:
    path = models.save(models.detector(), tmp_path)
    model = load.open_model(path)
    images, scores = model.signature.inputs[0], model.signature.outputs[0]
    assert [spec.name for spec in model.signature.inputs] == ["images"], "initializers are no inputs"
    assert (images.dtype, images.shape, images.symbols) == ("float32", (-1, 3, 32, 32), ("batch", None, None, None))
    assert scores.shape == (-1, 10)
    assert (model.opsets, model.ir_version, model.name) == ({"": 20}, 10, "model")
    assert model.nbytes == path.stat().st_size


def test_initializers_that_are_also_listed_as_inputs_are_not_asked_for(tmp_path: Path) -> None:
    proto = models.detector()
    proto.graph.input.append(models.value("w", [8, 3, 3, 3]))
    assert len(load.open_model(models.save(proto, tmp_path)).signature.inputs) == 1


def test_the_digest_follows_every_byte(tmp_path: Path) -> None:
    one = load.open_model(models.save(models.detector(), tmp_path, "a.onnx")).digest
    changed = models.detector()
    changed.graph.initializer[0].raw_data = bytes(8 * 3 * 3 * 3 * 4)
    assert load.open_model(models.save(changed, tmp_path, "b.onnx")).digest != one


# ------------------------------------------------------------------------------------------------ no model


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"just a line of text\n" * 20, "is text"),
        ("text with ümläuts and 漢字 ".encode() * 400, "is text"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"PK\x03\x04" + bytes(100), "ZIP archive"),
        (b"\x1f\x8b" + bytes(100), "gzip"),
        (b"ftrt" + bytes(20), "begins as a plan of TensorRT and ends after 24 bytes"),
        (b"ftrt" + bytes(20) + bytes([10, 16, 1, 11]) + bytes(100), "is a plan of TensorRT 10.16.1.11 "),
        (b"vtrt" + bytes(20), "begins as a plan of TensorRT-RTX and ends after 24 bytes"),
        (b"vtrt" + bytes(20) + bytes([1, 7, 1, 116]) + bytes(100), "is a plan of TensorRT-RTX 1.7.1.116 "),
        (bytes(range(256)) * 8, "not an ONNX protobuf"),
        (b"\x08\x0a", "truncated"),
    ],
)
def test_what_is_no_model_is_said_by_its_name(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    assert re.search(words, refused(path).message)


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    models.save(models.detector(), tmp_path, "real.onnx")
    error = refused(tmp_path / "absent.onnx")
    assert "no such file" in error.message
    assert "real.onnx" in (error.hint or "")


def test_a_folder_is_refused_with_the_file_inside(tmp_path: Path) -> None:
    models.save(models.detector(), tmp_path, "inside.onnx")
    error = refused(tmp_path)
    assert "folder" in error.message
    assert "inside.onnx" in (error.hint or "")


def test_every_truncation_of_a_model_is_refused(tmp_path: Path) -> None:
    whole = models.detector().SerializeToString()
    for end in range(0, len(whole) - 1, 37):
        path = tmp_path / "model.onnx"
        path.write_bytes(whole[:end])
        refused(path)


@pytest.mark.parametrize("missing", ["graph", "opset_import"])
def test_a_protobuf_without_its_parts_is_refused(tmp_path: Path, missing: str) -> None:
    proto = models.detector()
    proto.ClearField(missing)
    refused(models.save(proto, tmp_path))


@pytest.mark.parametrize("kind", ["sequence", "optional", "map", "sparse tensor"])
def test_inputs_that_are_no_tensors_are_refused(tmp_path: Path, kind: str) -> None:
    tensor = helper.make_tensor_type_proto(TensorProto.FLOAT, [1])
    made = {
        "sequence": lambda: helper.make_sequence_type_proto(tensor),
        "optional": lambda: helper.make_optional_type_proto(tensor),
        "map": lambda: helper.make_map_type_proto(TensorProto.INT64, tensor),
        "sparse tensor": lambda: helper.make_sparse_tensor_type_proto(TensorProto.FLOAT, [1]),
    }[kind]()
    proto = models.detector()
    proto.graph.input.append(helper.make_value_info("odd", made))
    error = refused(models.save(proto, tmp_path))
    assert f"`odd` of kind {kind}" in error.message


def test_an_unknown_element_type_is_refused(tmp_path: Path) -> None:
    proto = models.detector()
    proto.graph.input[0].type.tensor_type.elem_type = 99
    assert "element type 99" in refused(models.save(proto, tmp_path)).message


@pytest.mark.parametrize("scalar", [False, True])
def test_an_output_without_a_shape_or_with_that_of_a_scalar_gets_the_inferred_one(tmp_path: Path, scalar: bool) -> None:
    proto = models.detector()
    declared = proto.graph.output[0].type.tensor_type
    declared.ClearField("shape")
    if scalar:
        declared.shape.SetInParent()
    assert load.open_model(models.save(proto, tmp_path)).signature.outputs[0].shape == (-1, 10)
    proto.opset_import[0].version = 11
    raise_opset(proto, 17)
    assert not scalar or len(proto.graph.output[0].type.tensor_type.shape.dim) == 2


# ------------------------------------------------------------------------------------------------ external data


def outside(**entries: str) -> onnx.ModelProto:
    return models.external(models.detector(), "w", **entries)


NBYTES = 8 * 3 * 3 * 3 * 4


def test_external_data_counts_in_size_and_digest(tmp_path: Path) -> None:
    path = models.save(outside(location="w.bin", offset="0", length=str(NBYTES)), tmp_path)
    (tmp_path / "w.bin").write_bytes(bytes(NBYTES))
    first = load.open_model(path)
    assert [item.location for item in first.external] == ["w.bin"]
    assert first.nbytes == path.stat().st_size + NBYTES
    (tmp_path / "w.bin").write_bytes(bytes(NBYTES - 1) + b"x")
    assert load.open_model(path).digest != first.digest


def test_a_missing_external_file_is_named(tmp_path: Path) -> None:
    error = refused(models.save(outside(location="weights/w.bin"), tmp_path))
    assert "weights/w.bin" in error.message


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "w.bin", "offset": "0", "length": str(NBYTES + 4)},
        {"location": "w.bin", "offset": "4"},
        {"location": "w.bin", "offset": "0", "length": "10"},
        {"location": "w.bin", "offset": "-4"},
        {"location": "w.bin", "offset": "many"},
        {"location": "w.bin", "offset": str(1 << 70)},
    ],
)
def test_external_data_that_does_not_hold_its_tensor_is_refused(tmp_path: Path, entries: dict[str, str]) -> None:
    (tmp_path / "w.bin").write_bytes(bytes(NBYTES))
    assert "w.bin" in refused(models.save(outside(**entries), tmp_path)).message


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "w.bin").write_bytes(bytes(NBYTES))
    (folder / "w.bin").symlink_to(tmp_path / "w.bin")
    path = models.save(outside(location="w.bin"), folder)
    assert "link" in refused(path).message
    (folder / "w.bin").unlink()
    (folder / "real.bin").write_bytes(bytes(NBYTES))
    (folder / "w.bin").symlink_to("real.bin")
    assert load.open_model(path).external[0].nbytes == NBYTES


def test_weights_are_loaded_only_when_asked_for(tmp_path: Path) -> None:
    path = models.save(outside(location="w.bin"), tmp_path)
    (tmp_path / "w.bin").write_bytes(np.ones(NBYTES // 4, np.float32).tobytes())
    assert not load.read_proto(path).graph.initializer[0].raw_data
    loaded = load.read_proto(path, weights=True).graph.initializer[0]
    assert onnx.numpy_helper.to_array(loaded).sum() == NBYTES // 4


@pytest.mark.slow
def test_three_gigabytes_of_external_data_are_digested_and_not_loaded(tmp_path: Path) -> None:
    import resource

    elements = 3 * (1 << 30) // 4
    proto = models.model(
        [models.node("MatMul", ["x", "w"], ["y"])],
        [models.value("x", ["batch", 1 << 15])],
        [models.value("y", ["batch", elements >> 15])],
    )
    proto.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[1 << 15, elements >> 15])
    models.external(proto, "w", location="w.bin", offset="0", length=str(elements * 4))
    path = models.save(proto, tmp_path)
    with (tmp_path / "w.bin").open("wb") as file:
        file.write(bytes(32 << 20))  # 1 % of it: what is all holes is refused
        file.truncate(elements * 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = inspect_model(path)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert report.parameters == report.macs == elements
    assert report.nbytes > 3 << 30
    assert grown_kib < 512 << 10


# ------------------------------------------------------------------------------------------------ operators


def checked(proto: onnx.ModelProto, folder: Path) -> None:
    path = models.save(proto, folder)
    load.check_operators(index_of(load.read_proto(path)), path)


@pytest.mark.parametrize(
    ("op", "domain"),
    [("Relu", ""), ("Gelu", "com.microsoft"), ("EfficientNMS_TRT", ""), ("TRT_MXFP8DequantizeLinear", "trt")],
)
def test_known_operators_pass_the_check(tmp_path: Path, op: str, domain: str) -> None:
    checked(models.unpicked(op, domain), tmp_path)


@pytest.mark.parametrize(
    ("op", "domain", "opset", "words"),
    [
        ("Reluu", "", 20, ("Reluu", "ai.onnx", "opset 20", "the_node")),
        ("Gelu", "", 17, ("Gelu", "opset 17", "the_node")),
        ("Scatter", "", 20, ("Scatter",)),
        ("Geluu", "com.microsoft", 20, ("Geluu", "com.microsoft", "the_node")),
        ("Magic", "my.company", 20, ("Magic", "my.company", "the_node")),
    ],
)
def test_an_unknown_operator_is_named_with_domain_opset_and_node(
    tmp_path: Path, op: str, domain: str, opset: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(ModelError) as caught:
        checked(models.unpicked(op, domain, opset=opset), tmp_path)
    assert all(word in caught.value.message for word in words)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (models.node("Cast", ["x"], ["y"]), "Required attribute 'to'"),
        (models.node("Relu", ["x"], ["y"], alpha=1.0), "alpha"),
        (models.node("Relu", ["x", "x"], ["y"]), "input size 2"),
        (models.node("Relu", ["nobody"], ["y"]), "reads `nobody`"),
        (models.node("Relu", ["x"], ["elsewhere"]), "no node produces the output `y`"),
    ],
)
def test_a_node_that_breaks_its_schema_is_refused(tmp_path: Path, bad: onnx.NodeProto, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        checked(models.model([bad], [models.value("x", [4])], [models.value("y", [4])]), tmp_path)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("op", "domain", "spelled"),
    [
        ("EfficientNMS_TRT", "", "EfficientNMS_TRT"),
        ("MultiscaleDeformableAttnPlugin_TRT", "", "MultiscaleDeformableAttnPlugin_TRT"),
        ("EfficientNMS_TRT", "TRT", "TRT::EfficientNMS_TRT"),
        ("TRT_FP4DynamicQuantize", "trt", "trt::TRT_FP4DynamicQuantize"),
        ("QuantizeLinear", "trt", "trt::QuantizeLinear"),
        ("Anything", "trt.plugins", "trt.plugins::Anything"),
        ("PillarScatterPlugin", "", "PillarScatterPlugin"),
    ],
)
def test_tensorrt_only_operators_are_recognised_and_kept_from_onnxruntime(
    tmp_path: Path, op: str, domain: str, spelled: str
) -> None:
    proto = models.unpicked(op, domain)
    assert load.trt_only(index_of(proto)) == (spelled,)
    with pytest.raises(ModelError) as caught:
        load.check_onnxruntime(load.open_model(models.save(proto, tmp_path)))
    assert spelled in caught.value.message
    assert "TensorRT" in (caught.value.hint or "")


def test_beyond_onnxruntime_agrees_with_onnxruntime_itself(tmp_path: Path) -> None:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for opset, ir in ((20, 10), (23, 11), (26, 13), (27, 13), (28, 14), (20, 14), (40, 40)):
        proto = models.detector()
        proto.opset_import[0].version, proto.ir_version = opset, ir
        path = models.save(proto, tmp_path)
        try:
            onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            loads = True
        except Exception:  # ONNX Runtime's errors share no other base
            loads = False
        assert bool(onnxruntime_version_gap(opset, ir)) != loads, (opset, ir)


def test_a_model_beyond_onnxruntime_is_refused_with_the_limit(tmp_path: Path) -> None:
    proto = models.detector()
    proto.opset_import[0].version, proto.ir_version = 40, 30
    with pytest.raises(ModelError, match="opset 40") as caught:
        load.check_onnxruntime(load.open_model(models.save(proto, tmp_path)))
    assert "IR version 30" in caught.value.message


# ------------------------------------------------------------------------------------------------ damage

STRUCTURE = models.detector()
for _tensor in STRUCTURE.graph.initializer:
    _tensor.ClearField("raw_data")  # so that the edits hit names, sizes and types

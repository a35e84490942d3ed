"""Two engines are compared layer by layer, whoever wrote down their layers and whatever the layers are called."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine.errors import EngineError, TrtEngineError, UsageError
from trt_engine.profiling.engine_structure import Structure, StructureLayer
from trt_engine.records.compare import EngineDiff, LayerChange
from trt_engine.reporting.compare import structure_blocks
from trt_engine.verbs.diff.run import diff, diff_structures

Write = Callable[[str, Any], Path]


def nodes(*names: str) -> str:
    return "\x1e".join(f"[ONNX Layer: {name}]" for name in names)


def ten(name: str, text: str, dims: tuple[int, ...] = (1, 64, 80, 80)) -> dict[str, Any]:
    return {"Name": name, "Location": "Device", "Dimensions": list(dims), "Format/Datatype": text}


def eleven(name: str, kind: str, dims: tuple[int, ...] = (1, 64, 80, 80)) -> dict[str, Any]:
    return {"Name": name, "Dimensions": list(dims), "Format": "Row major linear", "DataType": kind}


def layer(
    name: str, kind: str, made_of: tuple[str, ...], tensor: dict[str, Any], tactic: str = "0x1"
) -> dict[str, Any]:
    return {
        "Name": name, "LayerType": kind, "Inputs": [tensor], "Outputs": [tensor], "TacticName": tactic,
        "Metadata": nodes(*made_of), "ParameterType": kind,
    }  # fmt: skip


FP32 = ten("t", "Row major linear FP32")
BEFORE = [
    layer("conv1", "CaskConvolution", ("/c1",), FP32, "sm80_xmma_fprop_f32"),
    layer("sigmoid", "PointWise", ("/s",), FP32),
    layer("mul", "PointWise", ("/m",), FP32),
    layer("conv2", "CaskConvolution", ("/c2", "/relu"), FP32, "sm80_a"),
    layer("head", "CaskGemmMatrixMultiply", ("/fc",), FP32, "sm80_g"),
    layer("fromFuture", "HyperDimensionalFold", ("/new",), FP32),
]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(name: str, document: Any) -> Path:
        path = tmp_path / name
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    return written


def only(report: EngineDiff, change: str) -> LayerChange:
    found = [item for item in report.changes if item.change == change]
    assert len(found) == 1, report.changes
    return found[0]


def test_an_engine_does_not_differ_from_itself(write: Write) -> None:
    path = write("layers.json", {"Layers": BEFORE})
    report = diff(path, path)
    assert (report.changes, report.unchanged) == ((), len(BEFORE))
    assert report.sources == ("tensorrt 10 inspector",) * 2
    assert report.unknown_kinds == ("HyperDimensionalFold",)


def test_what_was_fused_split_retyped_and_given_another_kernel_is_told(write: Write) -> None:
    half = eleven("t", "Half")
    after = [
        {"Name": "Reformatting CopyNode for Input Tensor 0 to conv1", "LayerType": "Reformat",
         "Inputs": [eleven("i", "Float")], "Outputs": [half], "ParameterType": "Reformat", "Metadata": ""},
        layer("conv1", "CaskConvolution", ("/c1",), half, "sm90_xmma_fprop_f16"),
        layer("__myl_SigMul", "kgen", ("/s", "/m"), half),
        layer("conv2", "CaskConvolution", ("/c2",), FP32, "sm80_a"),
        layer("relu", "PointWise", ("/relu",), FP32),
        layer("head", "CaskGemmMatrixMultiply", ("/fc",), FP32, "sm90_g"),
        layer("fromFuture", "HyperDimensionalFold", ("/new",), FP32),
    ]  # fmt: skip
    report = diff(write("a.json", {"Layers": BEFORE}), write("b.json", {"Layers": after}))
    assert report.sources == ("tensorrt 10 inspector", "tensorrt 10 inspector")
    assert only(report, "type").before == ("conv1",)
    assert "fp32 -> fp16" in only(report, "type").text
    assert "sm80_xmma_fprop_f32 -> sm90_xmma_fprop_f16" in only(report, "type").text
    fused = only(report, "fused")
    assert (fused.before, fused.after, set(fused.onnx_nodes)) == (("sigmoid", "mul"), ("__myl_SigMul",), {"/s", "/m"})
    assert (only(report, "split").before, only(report, "split").after) == (("conv2",), ("conv2", "relu"))
    assert only(report, "tactic").text == "sm80_g -> sm90_g"
    assert only(report, "reformat").before == () and report.unchanged == 1
    counts = {row.name: (row.before, row.after) for row in report.counts}
    assert counts["layers"] == (6, 7) and counts["reformat"] == (0, 1)


def test_both_inspectors_are_read_and_said(write: Write) -> None:
    after = [layer(item["Name"], item["LayerType"], (), eleven("t", "Half")) for item in BEFORE]
    for item, other in zip(after, BEFORE, strict=True):
        item["Metadata"] = other["Metadata"]
    report = diff(write("a.json", {"Layers": BEFORE}), write("b.json", after))
    assert report.sources == ("tensorrt 10 inspector", "tensorrt 11 inspector")
    assert {item.change for item in report.changes} == {"type"}


def test_engines_that_tell_names_alone_are_matched_by_name_and_it_is_said(write: Write) -> None:
    report = diff(write("a.json", ["conv1", "mul_12", "gone"]), write("b.json", ["conv1", "mul_97", "new"]))
    assert report.unchanged == 3  # `gone` and `new` stand alone in the same place
    assert all("only the names of 3 of its 3 layers" in text for text in report.warnings)
    report = diff(write("a.json", ["conv1", "gone", "also gone"]), write("b.json", ["conv1", "new"]))
    assert [(item.change, item.before or item.after) for item in report.changes] == [
        ("removed", ("gone",)), ("removed", ("also gone",)), ("added", ("new",)),
    ]  # fmt: skip


def test_times_put_what_costs_most_first(write: Write) -> None:
    after = copy.deepcopy(BEFORE)
    after[0]["TacticName"], after[4]["TacticName"] = f"sm90_{'x' * 200}", "sm90_h"
    slow = [{"name": item["Name"], "timeMs": ms, "averageMs": ms, "medianMs": ms, "percentage": 1.0}
            for item, ms in zip(BEFORE, (1.0, 0.2, 0.2, 2.0, 5.0, 0.1), strict=True)]  # fmt: skip
    fast = copy.deepcopy(slow)
    fast[3] |= {"averageMs": 1.0, "medianMs": 1.0}
    fast[4] |= {"averageMs": 3.0, "medianMs": 3.0}
    fast[1] |= {"medianMs": 0.2004}  # within what changes from run to run
    report = diff(
        write("a.json", {"Layers": BEFORE}), write("b.json", {"Layers": after}),
        layer_times=(write("ta.json", [{"count": 10}, *slow]), write("tb.json", [{"count": 10}, *fast])),
    )  # fmt: skip
    assert [(item.change, item.before_ms, item.after_ms) for item in report.changes] == [
        ("tactic", 5.0, 3.0), ("time", 2.0, 1.0), ("tactic", 1.0, 1.0),
    ]  # fmt: skip
    assert "-> sm90_xxxxxxxxxxx…" in str(table := [*structure_blocks(report, 9)][-1]) and len(str(table)) < 700


def test_times_of_another_engine_are_refused(write: Write) -> None:
    path = write("a.json", {"Layers": BEFORE})
    other = write(
        "t.json", [{"count": 1}, {"name": "x", "timeMs": 1, "averageMs": 1, "medianMs": 1, "percentage": 100}]
    )
    with pytest.raises(UsageError, match=r"no layer of .* is in the times"):
        diff(path, path, layer_times=(other, other))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """x -> Sigmoid, Mul (x sigmoid(x), which ONNX Runtime fuses) -> MatMul."""
    return save(
        tmp_path / "net.onnx",
        [
            node("Sigmoid", "x", "s", name="/act/Sigmoid"),
            node("Mul", "x s", "m", name="/act/Mul"),
            node("MatMul", "m w", "y", name="/fc/MatMul"),
        ],
        {"x": (FLOAT, ["n", 8])},
        {"y": (FLOAT, ["n", 8])},
        {"w": helper.make_tensor("w", TensorProto.FLOAT, (8, 8), [0.5] * 64)},
        opset=18,
    )


def test_an_engine_of_onnxruntime_is_held_against_its_model(model: Path, tmp_path: Path) -> None:
    engine = te.build(model, out=tmp_path / "net.engine.onnx")
    report = te.diff(model, engine.path)
    assert report.sources == ("onnx model", "onnxruntime graph")
    fused = only(report, "fused")
    assert (fused.before, fused.text) == (("/act/Sigmoid", "/act/Mul"), "Sigmoid + Mul -> QuickGelu")
    assert report.unchanged == 1
    again = te.diff(engine.path, model)
    assert only(again, "split").after == ("/act/Sigmoid", "/act/Mul")


def test_two_precisions_of_a_model_differ_in_types(model: Path, tmp_path: Path) -> None:
    te.cast(model, "fp16", out=tmp_path / "half.onnx")
    report = diff(model, tmp_path / "half.onnx")
    assert {item.text for item in report.changes if item.change == "type"} == {"fp32 -> fp16"}
    counts = {row.name: (row.before, row.after) for row in report.counts}
    assert counts["in fp16"] == (0, 3)
    assert counts["in fp32"] == (3, 0)


PROFILED = '{"schema": "trt-engine/profile", "schema_version": %s, "layers": %s, "instruments": []}'


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "", "is not JSON"),
        ("a.json", "[]", "contains no layer"),
        ("a.json", '{"Layers": 5}', "contains no layer"),
        ("a.json", '{"x": 1}', "has no layers in it"),
        ("a.json", "7", "has no layers in it"),
        ("a.json", '{"Layers":[' + "[" * 5000, "nested too deeply"),
        ("a.json", '[{"count": 10}, {"name": "conv", "averageMs": 1.0}]', "has times of layers and no structure"),
        ("a.json", PROFILED % (1, 5), "is not what `profile` writes"),
        ("a.json", PROFILED % (1, "null"), "has no layers: this profiler"),
        ("a.json", PROFILED % (2, "null"), "has schema version 2, this tool reads 1"),
        (
            "a.json",
            '{"schema": "trt-engine/bench", "layers": null, "instruments": []}',
            "is not a `trt-engine/profile` document",
        ),
        ("a.txt", "hello", "is not a file whose layers"),
    ],
)
def test_what_has_no_layers_is_refused_with_what_would_do(write: Write, name: str, content: str, told: str) -> None:
    path = write(name, content)
    with pytest.raises(TrtEngineError, match=told) as caught:
        diff(path, path)
    assert isinstance(caught.value, UsageError | EngineError)
    assert caught.value.hint


def test_a_model_to_trace_by_that_is_none_is_refused_whatever_the_sides_are(model: Path, tmp_path: Path) -> None:
    (tmp_path / "junk.onnx.txt").write_text("hello")
    for wrong in (tmp_path / "no.onnx", tmp_path / "junk.onnx.txt", tmp_path):
        with pytest.raises(UsageError, match="is not an ONNX model"):
            diff(model, model, model=wrong)


def test_what_is_no_path_is_a_wrong_call(model: Path) -> None:
    wrong: Any
    for wrong in (None, 5, b"x", ["x"]):
        with pytest.raises(UsageError, match="expected a path"):
            diff(wrong, model)
    for wrong in (5, ("x",), ("x", "y", "z")):
        with pytest.raises(UsageError, match="expected two files"):
            diff(model, model, layer_times=wrong)


names = st.text("abcmyl_0123/#", min_size=0, max_size=6)
parts = st.builds(
    StructureLayer,
    name=names,
    kind=st.sampled_from(("", "Conv", "Reformat", "kgen", "Unheard")),
    category=st.sampled_from(("matrix", "reformat", "other", "copy")),
    precision=st.sampled_from((None, "fp32", "fp16")),
    dtypes=st.sampled_from(((), ("float32",), ("float16", "int64"))),
    shapes=st.sampled_from(((), ((1, 2),), ((1,), ()))),
    tactic=st.sampled_from((None, "a", "b")),
    onnx_nodes=st.lists(st.sampled_from("ABCDE"), max_size=3, unique=True).map(tuple),
    ms=st.sampled_from((None, 0.0, 1.0)),
)
structures = st.lists(parts, max_size=8).map(lambda found: Structure("s", "test", tuple(found)))


@pytest.mark.slow
@given(structures, structures)
def test_every_layer_is_accounted_for_once_on_its_side(before: Structure, after: Structure) -> None:
    report = diff_structures(before, after)
    told = [sum(len(getattr(item, side)) for item in report.changes) for side in ("before", "after")]
    assert told[0] <= len(before.layers)
    assert told[1] <= len(after.layers)
    assert (len(before.layers) - told[0] > 0) == (
        len(after.layers) - told[1] > 0
    )  # what is the same is so on both sides
    back = diff_structures(after, before)
    assert back.unchanged == report.unchanged
    assert len(back.changes) == len(report.changes)

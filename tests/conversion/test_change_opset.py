"""To another opset: what is rewritten, what is refused by name, and that the result is run before it is believed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from onnx_models import FLOAT, HALF, node, save
from trt_engine.conversion import change_opset as change_opset_module
from trt_engine.conversion.change_opset import change_opset
from trt_engine.errors import AccuracyError, ModelError, UsageError
from trt_engine.graph import external_data, opset
from trt_engine.graph.load import ENGINE_MAGIC, open_model
from trt_engine.graph.opset import raise_opset


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


STORED = {
    "s": weights(8), "b": weights(8, seed=1), "one": np.array([1]), "two": np.array([3, 5]), "sizes": np.array([1, 2, 2]),
    "big": weights(8, 8192), "back": weights(8192, 8, seed=2), "scales": np.array([1, 1, 2, 2], np.float32),
    "grid": weights(2, 3, 3, 2), "zeros": np.zeros(8, np.float32), "ones": np.ones(8, np.float32),
    "pads": np.array([0, 1, 0, 1]), "computed": np.array([0]), "eight": np.array([2, 4]),
}  # fmt: skip


def model(
    path: Path, nodes: list[onnx.NodeProto], opset: int, *, shape: list[Any] | None = None, out: list[Any] | None = None,
    kind: int = FLOAT, **more: Any,
) -> Path:  # fmt: skip
    """`x` through these nodes to `y`."""
    read = {name for item in nodes for name in item.input}
    stored = {name: value for name, value in STORED.items() if name in read}
    return save(path, nodes, {"x": (kind, shape or ["batch", 8])}, {"y": (kind, out)}, stored, opset=opset, **more)


def run(path: Path, x: np.ndarray) -> np.ndarray:
    made: np.ndarray = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    return made


CASES = {
    "elementwise": ([node("Relu", "x", "a"), node("Add", "a a", "y")], 20, 7, {}),
    "normalisation": ([node("LayerNormalization", "x s b", "y", axis=-1)], 20, 13, {}),
    "gelu": ([node("Gelu", "x", "y")], 20, 17, {}),
    "gelu to 11": ([node("Gelu", "x", "y", approximate="tanh")], 20, 11, {}),
    "rms": ([node("RMSNormalization", "x s", "y")], 23, 17, {}),
    "swish": ([node("Swish", "x", "y")], 24, 13, {}),
    "reduce": ([node("ReduceMean", "x one", "m", keepdims=1), node("Sub", "x m", "y")], 20, 13, {}),
    "reduce all": ([node("ReduceMax", "x", "y")], 20, 13, {}),
    "reduce up": ([node("ReduceMean", "x", "m", axes=[1]), node("Sub", "x m", "y")], 13, 20, {}),
    "reduce from 9": ([node("ReduceMean", "x", "m", axes=[1]), node("Sub", "x m", "y")], 9, 20, {}),
    "squeeze": ([node("Unsqueeze", "x one", "u"), node("Squeeze", "u one", "y")], 20, 11, {}),
    "split": ([node("Split", "x two", "a b2", axis=1), node("Concat", "b2 a", "y", axis=1)], 18, 11, {}),
    "split evenly": ([node("Split", "x", "a b2", axis=1, num_outputs=2), node("Add", "a b2", "y")], 18, 13, {}),
    "softmax": ([node("Softmax", "x", "y")], 18, 9, {}),
    "groups": ([node("GroupNormalization", "x s b", "y", num_groups=2)], 21, 18, {"shape": ["batch", 8, 4]}),
    "resize": (
        [node("Resize", "x  scales", "y", mode="nearest")], 19, 11, {"shape": ["batch", 3, 4, 4]},
    ),
    "grid sample": (
        [node("GridSample", "x grid", "y", mode="linear")], 20, 16, {"shape": [2, 3, 4, 4]},
    ),
    "grid sample up": (
        [node("GridSample", "x grid", "y", mode="bilinear")], 16, 20, {"shape": [2, 3, 4, 4]},
    ),
    "average": (
        [node("AveragePool", "x", "y", kernel_shape=[2, 2])], 19, 11, {"shape": ["batch", 3, 4, 4]},
    ),
    "batch normalisation": (
        [node("BatchNormalization", "x s b zeros ones", "y")], 20, 9, {"shape": ["batch", 8, 4]},
    ),
    "pad": ([node("Pad", "x pads", "y")], 20, 11, {}),
    "half": ([node("MatMul", "x half", "y")], 20, 13, {"kind": HALF}),
    "a part of the shape": (
        [node("Shape", "x", "rows", start=0, end=1), node("Concat", "rows eight", "t", axis=0),
         node("Shape", "x", "columns", start=-1), node("Reshape", "x t", "r"),
         node("Cast", "columns", "scale", to=FLOAT), node("Mul", "r scale", "y")], 20, 13, {"out": ["batch", 2, 4]},
    ),
    "the newest": ([node("Softmax", "x", "y")], 18, 25, {}),
    "the same": ([node("Softmax", "x", "y")], 18, 18, {}),
    "another domain": (
        [node("Gelu", "x", "g", domain="com.microsoft"), node("Relu", "g", "y")], 20, 11,
        {"domains": {"com.microsoft": 1}, "out": ["batch", 8]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_model_computes_the_same_at_another_opset(tmp_path: Path, name: str) -> None:
    nodes, have, to, more = CASES[name]
    nodes = [onnx.NodeProto.FromString(item.SerializeToString()) for item in nodes]
    if name == "resize":
        del nodes[0].input[:]
        nodes[0].input.extend(["x", "", "scales"])
    STORED["half"] = weights(8, 8).astype(np.float16)
    source = model(tmp_path / "m.onnx", nodes, have, **more)
    report = change_opset(source, tmp_path / "out.onnx", to)
    opened, before = open_model(tmp_path / "out.onnx"), open_model(source)
    assert report.opset == (have, to) and opened.opsets[""] == to
    assert opened.signature.inputs == before.signature.inputs
    assert report.max_rel is not None and report.max_rel <= report.tolerance
    assert len(report.shapes) == 2
    shape = tuple(3 if size < 0 else size for size in before.signature.inputs[0].shape)
    x = weights(*shape, seed=5).astype(np.float16 if more.get("kind") == HALF else np.float32)
    np.testing.assert_allclose(
        run(tmp_path / "out.onnx", x), run(source, x), rtol=2e-3, atol=2e-3 if "kind" in more else 1e-5
    )
    onnx.checker.check_model(str(tmp_path / "out.onnx"), full_check="domains" not in more)


def test_the_report_says_what_changed_in_each_operator(tmp_path: Path) -> None:
    nodes, have, to, _ = CASES["reduce"]
    report = change_opset(model(tmp_path / "m.onnx", nodes, have), tmp_path / "out.onnx", to)
    assert report.operators_changed["ReduceMean"].startswith("without the attribute `noop_with_empty_axes`, with")
    assert any("`axes` is an attribute now" in note for note in report.notes)
    assert (report.nodes_before, report.nodes_after) == (2, 2)


REFUSED = {
    "too new": ([node("BitwiseNot", "x", "y")], 20, 15, {}, "`BitwiseNot` .* came with opset 18"),
    "einsum": ([node("Einsum", "x", "y", equation="ij->ij")], 20, 11, {}, "`Einsum` .* came with opset 12"),
    "axes computed": (
        [node("Shape", "x", "shape"), node("Gather", "shape computed", "rows"), node("Sub", "rows rows", "axes"),
         node("ReduceSum", "x axes", "y")], 20, 11, {}, "`ReduceSum` .* computes `axes`",
    ),
    "antialias": (
        [node("Resize", "x", "y", antialias=1, mode="linear")], 19, 13, {"shape": ["batch", 3, 4, 4]},
        "`Resize` .* has `antialias=1`",
    ),
    "softmax inside": (
        [node("Softmax", "x", "y", axis=1)], 20, 11, {"shape": ["batch", 4, 8]}, "`Softmax` .* works along axis 1",
    ),
    "dilated pool": (
        [node("AveragePool", "x", "y", kernel_shape=[2, 2], dilations=[2, 2])], 19, 11,
        {"shape": ["batch", 3, 8, 8]}, "`AveragePool` .* has `dilations=",
    ),
    "gone": ([node("Upsample", "x scales", "y")], 9, 13, {"shape": ["batch", 3, 4, 4]}, "`Upsample` .* deprecated"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_by_name_with_what_changed(tmp_path: Path, name: str) -> None:
    nodes, have, to, more, said = REFUSED[name]
    nodes = [onnx.NodeProto.FromString(item.SerializeToString()) for item in nodes]
    if name == "antialias":
        del nodes[0].input[:]
        nodes[0].input.extend(["x", "", "scales"])
    source = model(tmp_path / "m.onnx", nodes, have, **more)
    with pytest.raises(ModelError, match=f"opset {have} to {to}: {said}") as caught:
        change_opset(source, tmp_path / "out.onnx", to)
    assert caught.value.hint
    assert not (tmp_path / "out.onnx").exists()


def test_a_conversion_that_computes_something_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(proto: onnx.ModelProto, to: int, types: object) -> tuple[str, ...]:
        said = opset.lower_opset(proto, to, types)  # type: ignore[arg-type]
        proto.graph.node[0].op_type = "Neg"
        return said

    monkeypatch.setattr(change_opset_module, "lower_opset", wrong)
    source = model(tmp_path / "m.onnx", [node("Relu", "x", "y")], 20)
    with pytest.raises(AccuracyError, match=r"not the same at opset 13: `y` is off by"):
        change_opset(source, tmp_path / "out.onnx", 13)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("opset", [0, 6, 999])
def test_opsets_nobody_reads_are_refused(tmp_path: Path, opset: int) -> None:
    with pytest.raises(UsageError, match=f"opset {opset} is not supported"):
        change_opset(model(tmp_path / "m.onnx", [node("Relu", "x", "y")], 20), tmp_path / "out.onnx", opset)


def test_an_opset_beyond_the_installed_onnx_runtime_is_refused(tmp_path: Path) -> None:
    newest = onnx.defs.onnx_opset_version()
    source = model(tmp_path / "m.onnx", [node("Relu", "x", "y")], 20)
    from trt_engine.graph.operators import onnxruntime_version_gap

    if not onnxruntime_version_gap(newest, 10):
        pytest.skip("this ONNX Runtime takes every opset of this onnx")
    with pytest.raises(UsageError, match="takes up to"):
        change_opset(source, tmp_path / "out.onnx", newest)


def test_local_functions_are_written_out_as_they_have_opsets_of_their_own(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", [node("Twice", "x", "y", domain="mine")], 20, domains={"mine": 1})
    proto = onnx.load(path)
    proto.functions.append(
        helper.make_function("mine", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 20)])
    )
    proto.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, ["batch", 8]))
    onnx.save(proto, path)
    report = change_opset(path, tmp_path / "out.onnx", 13)
    made = onnx.load(tmp_path / "out.onnx")
    assert report.functions_inlined == 1 and not made.functions
    assert [item.op_type for item in made.graph.node] == ["Add"]


def test_bodies_of_control_flow_are_converted_too(tmp_path: Path) -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", FLOAT, None)
        return helper.make_graph([node(op, "x one", f"{name}_out", keepdims=1)], name, [], [out])

    nodes = [
        node("ReduceSum", "x", "total", keepdims=0), node("Greater", "total limit", "cond"),
        helper.make_node("If", ["cond"], ["y"], then_branch=branch("a", "ReduceMax"), else_branch=branch("b", "ReduceMin")),
    ]  # fmt: skip
    path = save(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 8])}, {"y": (FLOAT, ["n", 1])},
        {"limit": np.float32(0), "one": np.array([1])},
    )  # fmt: skip
    change_opset(path, tmp_path / "out.onnx", 13)
    made = onnx.load(tmp_path / "out.onnx")
    inner = [item.g.node[0] for item in made.graph.node[-1].attribute]
    assert all(len(item.input) == 1 for item in inner)
    for sign in (1, -1):
        x = sign * np.abs(weights(2, 8))
        np.testing.assert_array_equal(run(tmp_path / "out.onnx", x), run(path, x))


def test_weights_stay_out_of_the_converters_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = opset.version_converter.convert_version

    def convert(proto: onnx.ModelProto, to: int) -> onnx.ModelProto:
        seen.append(proto.ByteSize())
        return real(proto, to)

    monkeypatch.setattr(opset.version_converter, "convert_version", convert)
    nodes = [node("MatMul", "x big", "h"), node("MatMul", "h back", "y")]
    source = model(tmp_path / "m.onnx", nodes, 9, location="m.data", ir_version=4)
    report = change_opset(source, tmp_path / "out.onnx", 20)
    assert report.artifacts["weights"] == str(tmp_path / "out.onnx.data")
    assert (tmp_path / "out.onnx").stat().st_size < 10_000
    x = weights(2, 8)
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x), run(source, x), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(external_data, "MAX_INLINE_NBYTES", 1000)
    inside = model(tmp_path / "inside.onnx", nodes, 9, ir_version=4)
    assert "weights" in change_opset(inside, tmp_path / "out2.onnx", 20).artifacts
    assert len(seen) == 2 and max(seen) < 10_000


def test_node_names_and_what_the_exporter_wrote_about_itself_stay(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", [node("Relu", "x", "y", name="layer/relu")], 9, ir_version=4)
    proto = onnx.load(path)
    proto.metadata_props.add(key="classes", value="a,b")
    proto.producer_name = "pytorch"
    onnx.save(proto, path)
    change_opset(path, tmp_path / "out.onnx", 20)
    made = onnx.load(tmp_path / "out.onnx")
    assert made.graph.node[0].name == "layer/relu"
    assert (made.producer_name, made.metadata_props[0].value) == ("pytorch", "a,b")


def test_what_cannot_be_run_here_is_converted_and_said_to_be_unchecked(tmp_path: Path) -> None:
    nodes = [node("Relu", "x", "a"), node("Mine_TRT", "a", "y")]
    source = model(tmp_path / "m.onnx", nodes, 20, out=["batch", 8])
    report = change_opset(source, tmp_path / "out.onnx", 17)
    assert report.max_rel is None and any(re.match("not compared: ", note) for note in report.notes)
    assert open_model(tmp_path / "out.onnx").opsets[""] == 17


def test_a_graph_that_onnx_runtime_wrote_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx", [node("Relu", "x", "y")], 20)
    proto = onnx.load(path)
    proto.metadata_props.add(key=ENGINE_MAGIC, value="1")
    onnx.save(proto, path)
    with pytest.raises(ModelError, match="optimised by ONNX Runtime"):
        change_opset(path, tmp_path / "out.onnx", 17)


def test_constants_written_as_nodes_are_found_when_they_become_attributes(tmp_path: Path) -> None:
    nodes = [
        node("Constant", "", "axes", value=numpy_helper.from_array(np.array([1]))),
        node("Constant", "", "axes2", value_ints=[0]), node("ReduceMean", "x axes", "m", keepdims=1),
        node("Unsqueeze", "m axes2", "y"),
    ]  # fmt: skip
    source = model(tmp_path / "m.onnx", nodes, 20)
    change_opset(source, tmp_path / "out.onnx", 12)
    x = weights(3, 8)
    np.testing.assert_array_equal(run(tmp_path / "out.onnx", x), run(source, x))


OLD: dict[str, tuple[range, list[onnx.NodeProto], dict[str, np.ndarray]]] = {
    "softmax": (range(7, 13), [node("Softmax", "x", "y", axis=1)], {}),
    "log softmax": (range(7, 13), [node("LogSoftmax", "x", "y")], {}),
    "reduce, squeeze": (range(7, 13), [node("ReduceSum", "x", "r", axes=[1]), node("Squeeze", "r", "y", axes=[1])], {}),
    "unsqueeze": (range(7, 13), [node("Unsqueeze", "x", "y", axes=[0, 3])], {}),
    "split": (range(7, 13), [node("Split", "x", "z y", axis=1, split=[1, 3])], {}),
    "slice": (range(7, 10), [node("Slice", "x", "y", axes=[2, 3], starts=[1, -4], ends=[5, 99])], {}),
    "top k": (range(7, 10), [node("TopK", "x", "y i", k=3)], {}),
    "clip": (range(7, 11), [node("Clip", "x", "y", min=0.0)], {}),
    "pad": (range(7, 11), [node("Pad", "x", "y", pads=[0, 0, 1, 1, 0, 0, 1, 1], value=0.5)], {}),
    "pad by reflection": (range(7, 11), [node("Pad", "x", "y", pads=[0, 0, 1, 1, 0, 0, 1, 1], mode="reflect")], {}),
    "dropout": (range(7, 12), [node("Dropout", "x", "d", ratio=0.5), node("Relu", "d", "y")], {}),
    "upsample": (range(7, 9), [node("Upsample", "x", "y", mode="linear", scales=[1.0, 1.0, 2.0, 3.0])], {}),
    "resize": (range(10, 11), [node("Resize", "x scales", "y", mode="linear")], {"scales": np.float32([1, 1, 1.5, 2])}),
    "resize to less": (range(10, 11), [node("Resize", "x scales", "y")], {"scales": np.float32([1, 1, 0.7, 0.6])}),
    "scatter": (range(9, 11), [node("Scatter", "x at new", "y", axis=3)],
                {"at": np.zeros((2, 4, 6, 1), np.int64), "new": np.ones((2, 4, 6, 1), np.float32)}),
    "large weight": (range(7, 13), [node("MatMul", "x big", "y")], {"big": weights(8, 4096)}),
}  # fmt: skip


@pytest.mark.parametrize("name", OLD)
def test_a_model_below_opset_13_is_raised_and_computes_the_same(tmp_path: Path, name: str) -> None:
    versions, nodes, stored = OLD[name]
    feeds = {"x": weights(2, 4, 6, 8)}
    for have in versions:
        source = save(
            tmp_path / "n.onnx",
            nodes,
            {"x": (FLOAT, ["n", 4, 6, 8])},
            {"y": (FLOAT, None)},
            stored,
            opset=have,
            ir_version=6,
        )
        wanted = ort.InferenceSession(source).run(["y"], feeds)[0]
        for to in (13, 21):
            raised = onnx.load(source)
            assert raise_opset(raised, to)[0] == f"opset raised from {have} to {to}"
            found = ort.InferenceSession(raised.SerializeToString()).run(["y"], feeds)[0]
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_sizes_of_minus_one_that_old_exporters_declared_are_unknown_after_raising_too(tmp_path: Path) -> None:
    nodes = [node("Dropout", "x", "d", ratio=0.5), node("Relu", "d", "y")]
    proto = onnx.load(model(tmp_path / "n.onnx", nodes, 10, shape=["n", 4]))
    proto.graph.value_info.append(helper.make_tensor_value_info("d", FLOAT, [-1, 4]))
    raise_opset(proto, 13)
    given = weights(2, 4)
    found = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": given})[0]
    np.testing.assert_array_equal(found, np.maximum(given, 0))


def test_an_old_operator_whose_meaning_the_converter_loses_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path / "n.onnx", [node("Hardmax", "x", "y", name="pick", axis=1)], 11, shape=[2, 4, 6])
    with pytest.raises(ModelError, match="`pick`"):
        raise_opset(onnx.load(source), 13)

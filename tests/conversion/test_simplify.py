"""Simplifying: what goes, what must stay, and that nothing is believed before it was run."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_models import FLOAT, INT64, node, save
from trt_engine.conversion import rewrite
from trt_engine.conversion import simplify as simplifying
from trt_engine.conversion.simplify import simplify
from trt_engine.graph import external_data
from trt_engine.graph.load import open_model, read_proto

HAS_ONNXSLIM = importlib.util.find_spec("onnxslim") is not None
_ABSENT = pytest.mark.skipif(not HAS_ONNXSLIM, reason="onnxslim is not installed here: the full environment has it")


def needs_onnxslim(test: Any) -> Any:
    return pytest.mark.full(_ABSENT(test))


@pytest.fixture(params=["own", pytest.param("onnxslim", marks=[_ABSENT, pytest.mark.full])])
def tool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With onnxslim, where it is installed, and without it."""
    if request.param == "own":
        monkeypatch.setattr(simplifying, "find_spec", lambda name: None)
    return str(request.param)


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def operators(path: Path) -> Counter[str]:
    return Counter(item.op_type for item in onnx.load(path, load_external_data=False).graph.node)


def run(path: Path, **feeds: np.ndarray) -> list[Any]:
    return list(ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds))


def constant(name: str, value: Any) -> onnx.NodeProto:
    return node("Constant", "", name, value=numpy_helper.from_array(np.asarray(value)))


def exporters_graph(path: Path, **more: Any) -> Path:
    """What exporters write: sizes taken apart and put together, equal branches, a transposed weight, a dead end."""
    nodes = [
        node("Shape", "x", "s"), constant("zero", 0), constant("one", 1), node("Gather", "s zero", "b"),
        node("Gather", "s one", "t"), constant("front", [0]), node("Unsqueeze", "b front", "b1"),
        node("Unsqueeze", "t front", "t1"), node("Concat", "b1 t1 heads", "target", axis=0), node("MatMul", "x w", "h"),
        node("Reshape", "h target", "r"), node("Transpose", "w2", "wt", perm=[1, 0]), node("MatMul", "h wt", "h2"),
        node("MatMul", "h wt", "h3"), node("Add", "h2 h3", "h4"), node("Identity", "h4", "h5"),
        node("Relu", "h5", "dead"), node("Reshape", "h5 target", "r2"), node("Add", "r r2", "y"),
    ]  # fmt: skip
    return save(
        path, nodes, {"x": (FLOAT, ["batch", "time", 8])}, {"y": (FLOAT, ["batch", "time", 2, 4])},
        {"w": weights(8, 8), "w2": weights(8, 8), "heads": np.array([2, 4])}, **more,
    )  # fmt: skip


def test_what_exporters_write_around_a_reshape_goes_and_the_sizes_stay_open(tmp_path: Path, tool: str) -> None:
    source = exporters_graph(tmp_path / "m.onnx")
    report = simplify(source, tmp_path / "small.onnx")
    assert report.simplifier is not None
    assert operators(tmp_path / "small.onnx") == {"MatMul": 2, "Reshape": 2, "Add": 2}
    assert (report.nodes_before, report.nodes_after) == (19, 6)
    assert report.operators_removed["Gather"] == 2 and not report.operators_added
    assert report.nodes_deduplicated and report.constants_folded and report.weights_deduplicated == 1
    assert report.max_rel is not None and report.max_rel <= 1e-5
    first, second = (shapes["x"] for shapes in report.shapes)
    assert first[0] != second[0] and first[1] != second[1]
    assert open_model(tmp_path / "small.onnx").signature == open_model(source).signature
    x = weights(5, 9, 8, seed=3)
    np.testing.assert_allclose(run(tmp_path / "small.onnx", x=x)[0], run(source, x=x)[0], rtol=1e-5, atol=1e-5)


def test_shapes_are_inferred_into_the_file_with_the_symbols_of_the_inputs(tmp_path: Path, tool: str) -> None:
    simplify(exporters_graph(tmp_path / "m.onnx"), tmp_path / "small.onnx")
    inferred = {item.name: item.type.tensor_type.shape for item in onnx.load(tmp_path / "small.onnx").graph.value_info}
    assert [dim.dim_param or dim.dim_value for dim in inferred["h"].dim] == ["batch", "time", 8]


def test_a_simplified_model_is_not_changed_by_simplifying_it_again(tmp_path: Path, tool: str) -> None:
    simplify(exporters_graph(tmp_path / "m.onnx"), tmp_path / "one.onnx")
    report = simplify(tmp_path / "one.onnx", tmp_path / "two.onnx")
    assert not report.operators_removed and not report.operators_added
    assert (tmp_path / "one.onnx").read_bytes() == (tmp_path / "two.onnx").read_bytes()


# ------------------------------------------------------------------------------------------------ what must stay


def quantised(path: Path, *, transposed: bool = False) -> Path:
    """A MatMul whose weight and input are quantised, the weight stored in FP32 behind Q/DQ or in INT8 behind DQ."""
    nodes = [
        node("QuantizeLinear", "x sx zero", "xq"), node("DequantizeLinear", "xq sx zero", "xd"),
        *([node("Transpose", "w", "wt", perm=[1, 0])] if transposed else []),
        node("QuantizeLinear", f"{'wt' if transposed else 'w'} sw zero", "wq"),
        node("DequantizeLinear", "wq sw zero", "wd"), node("DequantizeLinear", "w8 sw zero", "wd2"),
        node("MatMul", "xd wd", "h"), node("MatMul", "h wd2", "y"),
    ]  # fmt: skip
    return save(
        path, nodes, {"x": (FLOAT, ["batch", 8])}, {"y": (FLOAT, ["batch", 8])},
        {"w": weights(8, 8), "w8": np.arange(64, dtype=np.int8).reshape(8, 8), "sx": np.float32(0.01),
         "sw": np.float32(0.02), "zero": np.int8(0)},
    )  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
def test_a_quantised_model_keeps_every_quantize_and_dequantize(tmp_path: Path, tool: str, transposed: bool) -> None:
    source = quantised(tmp_path / "q.onnx", transposed=transposed)
    report = simplify(source, tmp_path / "small.onnx")
    found = operators(tmp_path / "small.onnx")
    assert (found["QuantizeLinear"], found["DequantizeLinear"]) == (2, 3)
    assert report.simplifier is not None and report.max_rel is not None
    stored = {item.name: item.data_type for item in onnx.load(tmp_path / "small.onnx").graph.initializer}
    assert TensorProto.INT8 in stored.values()


def test_equal_quantize_nodes_stay_two_as_a_builder_fuses_each(tmp_path: Path, tool: str) -> None:
    nodes = [
        node("QuantizeLinear", "x s z", "q1"), node("DequantizeLinear", "q1 s z", "d1"),
        node("QuantizeLinear", "x s z", "q2"), node("DequantizeLinear", "q2 s z", "d2"),
        node("MatMul", "d1 w", "a"), node("MatMul", "d2 v", "b"), node("Add", "a b", "y"),
    ]  # fmt: skip
    path = save(
        tmp_path / "q.onnx", nodes, {"x": (FLOAT, ["n", 8])}, {"y": (FLOAT, ["n", 8])},
        {"w": weights(8, 8), "v": weights(8, 8, seed=1), "s": np.float32(0.01), "z": np.int8(0)},
    )  # fmt: skip
    simplify(path, tmp_path / "small.onnx")
    assert operators(tmp_path / "small.onnx") == operators(path)


def test_random_numbers_are_drawn_anew_after_simplifying(tmp_path: Path, tool: str) -> None:
    nodes = [
        node("RandomNormal", "", "noise", shape=[8]), node("Identity", "x", "i"), node("Add", "i noise", "noisy"),
        node("MatMul", "x w", "plain"),
    ]  # fmt: skip
    path = save(
        tmp_path / "r.onnx", nodes, {"x": (FLOAT, ["n", 8])},
        {"noisy": (FLOAT, ["n", 8]), "plain": (FLOAT, ["n", 8])}, {"w": weights(8, 8)},
    )  # fmt: skip
    report = simplify(path, tmp_path / "small.onnx")
    assert report.simplifier == "trt-engine" and report.unchecked == ("noisy",)
    assert operators(tmp_path / "small.onnx") == {"RandomNormal": 1, "Add": 1, "MatMul": 1}
    loaded = ort.InferenceSession(str(tmp_path / "small.onnx"), providers=["CPUExecutionProvider"])
    x = weights(1, 8)
    one, two = (loaded.run(["noisy"], {"x": x})[0] for _ in range(2))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize("training", [False, True])
def test_a_dropout_goes_unless_it_drops(tmp_path: Path, tool: str, training: bool) -> None:
    nodes = [node("Dropout", "x ratio training", "d"), node("Relu", "d", "y")]
    path = save(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 8])}, {"y": (FLOAT, ["n", 8])},
        {"ratio": np.float32(0.5), "training": np.array(training)},
    )  # fmt: skip
    report = simplify(path, tmp_path / "small.onnx")
    assert report.simplifier == "trt-engine" and report.unchecked == (("y",) if training else ())
    assert ("Dropout" in operators(tmp_path / "small.onnx")) == training


def test_an_input_that_nothing_reads_stays_an_input(tmp_path: Path, tool: str) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Relu", "x", "a"), node("Identity", "a", "y")],
        {"x": (FLOAT, ["n", 3]), "unused": (INT64, ["n"])}, {"y": (FLOAT, ["n", 3])},
    )  # fmt: skip
    simplify(path, tmp_path / "small.onnx")
    assert [spec.name for spec in open_model(tmp_path / "small.onnx").signature.inputs] == ["x", "unused"]
    assert operators(tmp_path / "small.onnx") == {"Relu": 1}


def test_what_a_body_reads_from_around_it_stays(tmp_path: Path, tool: str) -> None:
    def branch(name: str, op: str) -> onnx.GraphProto:
        out = helper.make_tensor_value_info(f"{name}_out", FLOAT, None)
        return helper.make_graph([node(op, "h same", f"{name}_out")], name, [], [out])

    nodes = [
        node("Identity", "x", "h"), node("Relu", "w", "same0"), node("Identity", "same0", "same"),
        node("ReduceSum", "x", "total", keepdims=0), node("Greater", "total limit", "cond"),
        helper.make_node("If", ["cond"], ["y"], then_branch=branch("a", "Add"), else_branch=branch("b", "Mul")),
    ]  # fmt: skip
    path = save(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 4])}, {"y": (FLOAT, ["n", 4])},
        {"w": weights(4), "limit": np.float32(9)},
    )  # fmt: skip
    report = simplify(path, tmp_path / "small.onnx")
    assert report.simplifier is not None and "Identity" not in operators(tmp_path / "small.onnx")
    for scale in (0.01, 100):
        x = np.full((2, 4), scale, np.float32)
        np.testing.assert_allclose(run(tmp_path / "small.onnx", x=x)[0], run(path, x=x)[0], rtol=1e-6)


def test_local_functions_are_written_out(tmp_path: Path, tool: str) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Twice", "x", "y", domain="mine")], {"x": (FLOAT, ["n", 3])}, {"y": (FLOAT, ["n", 3])},
        domains={"mine": 1},
    )  # fmt: skip
    proto = onnx.load(path)
    proto.functions.append(
        helper.make_function("mine", "Twice", ["a"], ["b"], [node("Add", "a a", "b")], [helper.make_opsetid("", 20)])
    )
    onnx.save(proto, path)
    report = simplify(path, tmp_path / "small.onnx")
    assert report.functions_inlined == 1 and operators(tmp_path / "small.onnx") == {"Add": 1}
    assert not onnx.load(tmp_path / "small.onnx").functions


def test_a_batch_that_only_might_equal_another_size_is_not_taken_for_it(tmp_path: Path, tool: str) -> None:
    nodes = [
        node("Shape", "a", "sa"), constant("at", [0]), node("Gather", "sa at", "na"),
        node("Concat", "na rest", "target", axis=0), node("Reshape", "b target", "y"),
    ]  # fmt: skip
    path = save(
        tmp_path / "m.onnx", nodes, {"a": (FLOAT, ["n", 2]), "b": (FLOAT, ["m", 6])}, {"y": (FLOAT, None)},
        {"rest": np.array([3, -1])},
    )  # fmt: skip
    report = simplify(path, tmp_path / "small.onnx", inputs={"a": (2, 2), "b": (4, 6)})
    assert report.simplifier is not None
    a, b = weights(2, 2), weights(4, 6)
    assert run(tmp_path / "small.onnx", a=a, b=b)[0].shape == (2, 3, 4)


# ------------------------------------------------------------------------------------------------ nothing is believed


def damaged(monkeypatch: pytest.MonkeyPatch, harm: Any) -> None:
    """Our own pass with a fault in it, and no onnxslim."""
    real = rewrite.rewrite

    def faulty(proto: onnx.ModelProto, *args: Any, **more: Any) -> rewrite.RewriteCounts:
        counts = real(proto, *args, **more)
        harm(proto)
        return counts

    monkeypatch.setattr(rewrite, "rewrite", faulty)
    monkeypatch.setattr(simplifying, "find_spec", lambda name: None)


def scaled(proto: onnx.ModelProto) -> None:
    for tensor in proto.graph.initializer:
        if tensor.name == "w":
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) * np.float32(1.001), "w"))


def frozen(proto: onnx.ModelProto) -> None:
    for tensor in proto.graph.initializer:
        if tensor.name == "r_target":
            tensor.CopyFrom(numpy_helper.from_array(np.array([2, -1, 2, 4]), tensor.name))


def without_output(proto: onnx.ModelProto) -> None:
    del proto.graph.output[:]


def stopped(proto: onnx.ModelProto) -> None:
    proto.graph.node[0].op_type = "NoSuchOperator"


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (scaled, "is off by"),
        (frozen, "does not run at|and was"),
        (without_output, "its outputs are"),
        (stopped, "NoSuch"),
    ],
)
def test_a_wrong_simplification_leaves_the_model_as_it_was_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Any, said: str
) -> None:
    source = exporters_graph(tmp_path / "m.onnx")
    damaged(monkeypatch, harm)
    report = simplify(source, tmp_path / "out.onnx")
    assert report.simplifier is None and report.max_rel is None and report.nodes_after == report.nodes_before
    assert any("discarded" in note for note in report.notes)
    import re

    assert re.search(said, " ".join(report.notes))
    assert open_model(tmp_path / "out.onnx").signature == open_model(source).signature
    assert operators(tmp_path / "out.onnx") == operators(source)


RUBBISH = "open(__import__('sys').argv[2], 'w').write('no')"


@pytest.mark.slow
@pytest.mark.parametrize("program", ["raise SystemExit('boom')", "import time; time.sleep(60)", RUBBISH])
def test_an_onnxslim_that_fails_hangs_or_writes_rubbish_leaves_our_own_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    child = tmp_path / "child.py"
    child.write_text(program)
    monkeypatch.setattr(simplifying, "_WORKER", child)
    monkeypatch.setattr(simplifying, "find_spec", lambda name: object())
    report = simplify(exporters_graph(tmp_path / "m.onnx"), tmp_path / "out.onnx", timeout_s=2)
    assert report.simplifier == "trt-engine" and report.nodes_after == 6
    assert any("onnxslim" in note for note in report.notes)


def test_a_wrong_onnxslim_is_found_out_and_our_own_pass_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child.py"
    child.write_text(
        "import sys, onnx\n"
        "model = onnx.load(sys.argv[1])\n"
        "del model.graph.node[-1]\n"
        "model.graph.node[-1].output[0] = 'y'\n"
        "del model.graph.value_info[:]\n"
        "onnx.save(model, sys.argv[2])\n"
    )
    monkeypatch.setattr(simplifying, "_WORKER", child)
    monkeypatch.setattr(simplifying, "find_spec", lambda name: object())
    report = simplify(exporters_graph(tmp_path / "m.onnx"), tmp_path / "out.onnx")
    assert report.simplifier == "trt-engine"
    assert any("the result of onnxslim was discarded" in note and "is off by" in note for note in report.notes)


def test_a_model_that_cannot_be_run_here_stays_as_it_was(tmp_path: Path, tool: str) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Identity", "x", "a"), node("EfficientNMS_TRT", "a", "y")],
        {"x": (FLOAT, ["n", 4])}, {"y": (FLOAT, ["n", 4])},
    )  # fmt: skip
    report = simplify(path, tmp_path / "out.onnx")
    assert report.simplifier is None and "does not run the model" in report.notes[0]
    assert operators(tmp_path / "out.onnx") == operators(path)


def test_sizes_that_cannot_be_guessed_are_asked_for_and_can_be_given(tmp_path: Path, tool: str) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Identity", "x", "i"), node("Reshape", "i t", "y")],
        {"x": (FLOAT, ["n", "k"])}, {"y": (FLOAT, None)}, {"t": np.array([-1, 77])},
    )  # fmt: skip
    assert "--input" in simplify(path, tmp_path / "out.onnx").notes[0]
    report = simplify(path, tmp_path / "out.onnx", inputs={"x": (2, 77)})
    assert report.simplifier is not None and report.shapes[0] == {"x": (2, 77)} and report.shapes[1]["x"][0] != 2
    array = np.ones((3, 77), np.float32)
    assert simplify(path, tmp_path / "out.onnx", inputs={"x": array}).shapes[0] == {"x": (3, 77)}


def test_a_model_that_runs_at_one_size_alone_is_compared_on_two_feeds(tmp_path: Path, tool: str) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Identity", "x", "i"), node("Add", "i w", "y")], {"x": (FLOAT, [2, 3])},
        {"y": (FLOAT, [2, 3])}, {"w": weights(2, 3)},
    )  # fmt: skip
    assert simplify(path, tmp_path / "out.onnx").shapes == ({"x": (2, 3)}, {"x": (2, 3)})


def test_a_batch_that_is_fixed_without_saying_so_is_compared_at_1(tmp_path: Path, tool: str) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Identity", "x", "i"), node("Reshape", "i t", "y")],
        {"x": (FLOAT, ["batch", 4])}, {"y": (FLOAT, None)}, {"t": np.array([1, 4])},
    )  # fmt: skip
    assert simplify(path, tmp_path / "out.onnx").shapes[0] == {"x": (1, 4)}


def test_a_constant_that_would_grow_the_file_is_not_folded(tmp_path: Path, tool: str) -> None:
    path = save(
        tmp_path / "m.onnx", [node("Expand", "one size", "wide"), node("Mul", "x wide", "y")],
        {"x": (FLOAT, ["n", 1 << 20])}, {"y": (FLOAT, ["n", 1 << 20])},
        {"one": np.float32(2), "size": np.array([1, 1 << 20])},
    )  # fmt: skip
    report = simplify(path, tmp_path / "out.onnx")
    assert report.nbytes_after < 1 << 16 or report.simplifier == "onnxslim"


@needs_onnxslim
def test_onnxslim_fuses_a_batch_normalization_into_its_convolution(tmp_path: Path) -> None:
    nodes = [node("Conv", "x w", "c"), node("BatchNormalization", "c g b m v", "y")]
    path = save(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["batch", 3, "height", "width"])},
        {"y": (FLOAT, ["batch", 4, None, None])},
        {"w": weights(4, 3, 3, 3), "g": weights(4), "b": weights(4), "m": weights(4), "v": np.ones(4, np.float32)},
    )  # fmt: skip
    report = simplify(path, tmp_path / "out.onnx")
    assert report.simplifier == "onnxslim" and operators(tmp_path / "out.onnx") == {"Conv": 1}
    assert report.operators_removed == {"BatchNormalization": 1}
    assert report.max_rel is not None and 0 < report.max_rel <= 1e-5
    assert "onnxslim" not in sys.modules


# ------------------------------------------------------------------------------------------------ weights outside


def test_weights_that_lay_outside_lie_outside_again_under_a_name_of_their_own(tmp_path: Path, tool: str) -> None:
    source = exporters_graph(tmp_path / "m.onnx", location="m.data")
    taken = tmp_path / "out.onnx.data"
    taken.write_bytes(b"somebody's")
    report = simplify(source, tmp_path / "out.onnx")
    assert taken.read_bytes() == b"somebody's"
    made = read_proto(tmp_path / "out.onnx")
    places = {
        item.value for tensor in made.graph.initializer for item in tensor.external_data if item.key == "location"
    }
    assert places <= {"out.onnx.2.data"} and str(tmp_path) not in str(made)
    assert report.nbytes_after == open_model(tmp_path / "out.onnx").nbytes
    assert (tmp_path / "m.data").exists()
    again = simplify(source, tmp_path / "out.onnx")
    assert again.simplifier == report.simplifier and taken.exists()


def test_the_weights_of_the_model_before_go_with_it_unless_somebody_reads_them(tmp_path: Path) -> None:
    def big(name: str, location: str) -> Path:
        return save(
            tmp_path / name, [node("MatMul", "x w", "h"), node("Identity", "h", "y")], {"x": (FLOAT, ["n", 32])},
            {"y": (FLOAT, ["n", 32])}, {"w": weights(32, 32)}, location=location,
        )  # fmt: skip

    source = big("m.onnx", "m.data")
    simplify(source, tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx.data").exists()
    simplify(source, tmp_path / "out.onnx")
    assert sorted(item.name for item in tmp_path.glob("out*")) == ["out.onnx", "out.onnx.2.data"]
    reader = tmp_path / "reader.onnx"
    reader.write_bytes((tmp_path / "out.onnx").read_bytes())
    simplify(reader, tmp_path / "out.onnx")
    assert sorted(item.name for item in tmp_path.glob("out*")) == ["out.onnx", "out.onnx.2.data", "out.onnx.data"]
    assert open_model(reader).external[0].location == "out.onnx.2.data"


def test_weights_too_many_for_one_message_are_never_read_into_it(
    tmp_path: Path, tool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        node("Identity", "x", "i"), node("MatMul", "i big", "a"), node("MatMul", "a big2", "b"),
        node("MatMul", "b equal", "c"), node("Add", "c folded", "y"), node("Neg", "little", "folded"),
    ]  # fmt: skip
    nodes = [nodes[0], nodes[5], *nodes[1:5]]
    stored = {"big": weights(200, 200), "big2": weights(200, 200, seed=1), "equal": weights(200, 200)}
    path = save(
        tmp_path / "m.onnx", nodes, {"x": (FLOAT, ["n", 200])}, {"y": (FLOAT, ["n", 200])},
        {**stored, "little": weights(200)}, location="m.data",
    )  # fmt: skip
    monkeypatch.setattr(external_data, "MAX_INLINE_NBYTES", 100_000)
    read: list[str] = []
    real = external_data.external_data_helper.load_external_data_for_tensor
    monkeypatch.setattr(
        external_data.external_data_helper, "load_external_data_for_tensor",
        lambda tensor, folder: (read.append(tensor.name), real(tensor, folder))[1],
    )  # fmt: skip
    report = simplify(path, tmp_path / "out.onnx")
    assert report.simplifier is not None and report.weights_deduplicated == 1 and read == ["little"]
    assert operators(tmp_path / "out.onnx") == {"MatMul": 3, "Add": 1}
    assert (tmp_path / "out.onnx").stat().st_size < 10_000
    assert report.nbytes_after < report.nbytes_before - 100_000
    x = weights(2, 200)
    np.testing.assert_allclose(run(tmp_path / "out.onnx", x=x)[0], run(path, x=x)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_of_more_than_two_gibibytes_is_simplified_with_its_weights_in_their_file(tmp_path: Path) -> None:
    import resource
    import shutil

    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("less than 12 GiB of disk are free")
    rows, columns, count = 8192, 12288, 6  # 384 MiB each, 2.25 GiB together
    nbytes = rows * columns * 4
    with (tmp_path / "m.data").open("wb") as file:
        file.truncate(count * nbytes)
        for at in range(count):  # the first row alone is no zeros; two and two are equal
            file.seek(at * nbytes)
            file.write(np.arange(at % 3, at % 3 + columns, dtype=np.float32).tobytes())
            file.write(bytes(5 << 20))  # with the others 1 % of the file: what is all holes is refused
    tensors = []
    for at in range(count):
        tensor = TensorProto(name=f"w{at}", data_type=FLOAT, dims=[rows, columns], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "m.data"), ("offset", at * nbytes), ("length", nbytes)):
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
    nodes = [node("Identity", "at", "i"), *(node("Gather", f"w{at} i", f"g{at}") for at in range(count))]
    nodes.append(node("Sum", " ".join(f"g{at}" for at in range(count)), "y"))
    graph = helper.make_graph(
        nodes, "big", [helper.make_tensor_value_info("at", INT64, ["n"])],
        [helper.make_tensor_value_info("y", FLOAT, ["n", columns])], tensors,
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    report = simplify(tmp_path / "m.onnx", tmp_path / "out.onnx")
    assert report.simplifier is not None and report.weights_deduplicated == 3
    assert report.nbytes_after < report.nbytes_before * 0.51 and (tmp_path / "out.onnx").stat().st_size < 10_000
    assert (tmp_path / "out.onnx.data").stat().st_blocks * 512 < 64 << 20, "a sparse file stays one"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 12 << 20
    got = run(tmp_path / "out.onnx", at=np.array([0, 1]))[0]
    np.testing.assert_array_equal(got[:, :3], [[6, 12, 18], [0, 0, 0]])

"""Switches: inputs that a graph compares with constants get values that run, and every branch that runs is checked."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.errors import AccuracyError
from trt_engine.graph.load import open_model
from trt_engine.runtime.feeds import random_feeds
from trt_engine.store import Store

F32, I64, BOOL, TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING
COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
ROUTES: dict[str, tuple[list[tuple[str, list[str], dict[str, Any]]], Any]] = {
    "direct": ([], 16000),
    "Identity": ([("Identity", ["k"], {})], 16000),
    "Cast": ([("Cast", ["k"], {"to": F32})], np.float32(16000)),
    "Reshape": ([("Reshape", ["k", "one"], {})], 16000),
    "arithmetic": ([("Mul", ["k", "two"], {}), ("Add", ["t0", "one"], {})], 32001),
    "subtrahend": ([("Sub", ["two", "k"], {})], -15998),
}
"""Nodes from the switch to the comparison, and the constant that is 16000 there."""


def output(name: str) -> onnx.ValueInfoProto:
    return helper.make_value_info(name, helper.make_tensor_type_proto(F32, None))


def branches(nodes: list[NodeProto], condition: str, fits: bool, *, outer: str = "y") -> None:
    """An If of a branch that runs and of one that does not; `fits` says whether the first does."""
    good = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["g"])], "good", [], [output("g")])
    bad = helper.make_graph([helper.make_node("Reshape", ["x", "seven"], ["b"])], "bad", [], [output("b")])
    pair = (good, bad) if fits else (bad, good)
    nodes.append(helper.make_node("If", [condition], [outer], then_branch=pair[0], else_branch=pair[1]))


def saved(path: Path, nodes: list[NodeProto], kind: int, shape: list[int | str], *stored: TensorProto) -> Path:
    numbers = (numpy_helper.from_array(np.array([at]), name) for name, at in (("one", 1), ("two", 2), ("seven", 7)))
    weights = numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), "w")
    inputs = [helper.make_tensor_value_info("x", F32, [2, 4]), helper.make_tensor_value_info("k", kind, shape)]
    graph = helper.make_graph(nodes, "g", inputs, [output("y")], [*stored, *numbers, weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def compared(path: Path, comparison: str, route: str, *, fits: bool, swapped: bool, inside: bool) -> Path:
    """A model that runs on one side of the comparison alone, which stands in a branch if `inside`."""
    steps, constant = ROUTES[route]
    nodes = [helper.make_node(op, reads, [f"t{at}"], **given) for at, (op, reads, given) in enumerate(steps)]
    last = f"t{len(steps) - 1}" if steps else "k"
    deciding = [
        helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array([constant]))),
        helper.make_node(comparison, ["c", last] if swapped else [last, "c"], ["is"]),
    ]
    branches(deciding, "is", fits, outer="inner" if inside else "y")
    if inside:
        body = helper.make_graph(deciding, "body", [], [output("inner")])
        other = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["o"])], "other", [], [output("o")])
        nodes += [helper.make_node("Size", ["x"], ["n"]), helper.make_node("Equal", ["n", "seven"], ["never"])]
        deciding = [helper.make_node("If", ["never"], ["y"], then_branch=other, else_branch=body)]
    return saved(path, nodes + deciding, I64, [1])


def runs(path: Path, value: Any) -> bool:
    model = open_model(path)
    inputs = tuple(replace(spec, choices=(value,)) if spec.name == "k" else spec for spec in model.signature.inputs)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    shapes = {spec.name: tuple(max(size, 2) if size < 0 else size for size in spec.shape) for spec in inputs}
    try:
        session.run(None, random_feeds(replace(model.signature, inputs=inputs), shapes))
    except Exception:
        return False
    return True


def choices(path: Path) -> tuple[Any, ...]:
    return open_model(path).signature.input("k").choices


@pytest.mark.parametrize("route", ROUTES)
def test_one_of_the_values_that_are_tried_takes_the_branch_that_runs(tmp_path: Path, route: str) -> None:
    draw = random.Random(route)
    for comparison in COMPARISONS:
        fits, swapped, inside = (draw.random() < 0.5 for _ in range(3))
        path = compared(tmp_path / "m.onnx", comparison, route, fits=fits, swapped=swapped, inside=inside)
        assert any(runs(path, value) for value in choices(path)), (comparison, fits, swapped, inside)


@pytest.mark.parametrize(
    ("kind", "constant", "wanted"),
    [
        (TEXT, b"fast", ("fast", "")),
        (BOOL, True, (True, False)),
        (TensorProto.UINT8, 0, (0, 1)),
        (F32, 0.5, (0.5, 0.25)),
    ],
)
def test_texts_flags_and_numbers_are_tried_in_their_type(
    tmp_path: Path, kind: int, constant: Any, wanted: tuple[Any, ...]
) -> None:
    nodes = [helper.make_node("Equal", ["k", "c"], ["is"])]
    branches(nodes, "is", True)
    path = saved(tmp_path / "m.onnx", nodes, kind, [], helper.make_tensor("c", kind, [], [constant]))
    assert choices(path) == wanted


def test_a_tensor_that_decides_a_branch_is_random_first_and_one_that_is_data_always(tmp_path: Path) -> None:
    zero = helper.make_tensor("zero", I64, [], [0])
    same = [helper.make_node("Equal", ["k", "zero"], ["same"])]
    data = [helper.make_node("Cast", ["same"], ["f"], to=F32), helper.make_node("ReduceSum", ["f"], ["y"])]
    assert choices(saved(tmp_path / "data.onnx", same + data, I64, ["n"], zero)) == ()
    deciding = [
        helper.make_node("Cast", ["same"], ["f"], to=F32),
        helper.make_node("ReduceMin", ["f"], ["least"], keepdims=0),
        helper.make_node("Cast", ["least"], ["all"], to=BOOL),
    ]
    branches(deciding, "all", True)
    assert choices(saved(tmp_path / "mask.onnx", same + deciding, I64, ["n"], zero)) == (None, 0, 1)


def both_run(path: Path) -> Path:
    """16000 multiplies, any other number adds, and both give numbers."""
    nodes = [helper.make_node("Equal", ["k", "rate"], ["is"])]
    pair = [
        helper.make_graph([helper.make_node(op, reads, [name])], name, [], [output(name)])
        for op, reads, name in (("MatMul", ["x", "w"], "one_way"), ("Add", ["x", "x"], "other_way"))
    ]
    nodes.append(helper.make_node("If", ["is"], ["y"], then_branch=pair[0], else_branch=pair[1]))
    return saved(path, nodes, I64, [], helper.make_tensor("rate", I64, [], [16000]))


def test_an_engine_has_the_values_that_run_and_generated_inputs_the_first(tmp_path: Path) -> None:
    path = compared(tmp_path / "m.onnx", "Equal", "direct", fits=True, swapped=False, inside=True)
    engine = te.build(path, store=Store(tmp_path / "store"))
    assert engine.passport.parity is not None
    assert te.Engine.open(engine.path).signature.input("k").choices == (16000,)
    with te.load(engine) as runner:
        runner.warmup()
    model = open_model(path)
    assert random_inputs(path, model.signature, {"x": (2, 4), "k": (1,)})["k"].tolist() == [16000]


def test_parity_tries_every_branch_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = te.build(both_run(tmp_path / "m.onnx"), store=Store(tmp_path / "store"))
    assert engine.signature.input("k").choices == (16000, 0)
    assert engine.passport.parity is not None
    assert engine.passport.parity.inputs.count("`k` is") == 2
    infer = te.InferenceEngine.infer

    def wrong_elsewhere(self: te.InferenceEngine, feeds: Any, **given: Any) -> Any:
        outputs = infer(self, feeds, **given)
        return outputs if feeds["k"] == 16000 else {name: value + 1 for name, value in outputs.items()}

    monkeypatch.setattr(te.InferenceEngine, "infer", wrong_elsewhere)
    with pytest.raises(AccuracyError, match=r"`k` is 0\)"):
        te.build(tmp_path / "m.onnx", store=Store(tmp_path / "other"))

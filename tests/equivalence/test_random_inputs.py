"""Random inputs of models whose integers decide sizes, steps or divisors: values that can be, no crash of the caller."""

import os
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

import trt_engine as te
from programs import run_python
from trt_engine.equivalence import random_inputs as module
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.graph.load import open_model
from trt_engine.runtime.feeds import random_feeds
from trt_engine.store import Store

I64, F32 = TensorProto.INT64, TensorProto.FLOAT


def saved(folder: Path, nodes: list[NodeProto], inputs: dict[str, tuple[int, list[int]]], *, opset: int = 20) -> Path:
    """A model of these nodes; its output is `y`, of floats of any rank."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()],
        [helper.make_value_info("y", helper.make_tensor_type_proto(F32, None))],
    )
    path = folder / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9), path)
    return path


def stft(folder: Path, *, length: str = "n") -> Path:
    """A spectrogram whose step and length are inputs; `length="zero"` makes it 0 whatever is fed: ONNX Runtime divides."""
    nodes = [helper.make_node("Sub", ["n", "n"], ["zero"]), helper.make_node("STFT", ["x", "step", "", length], ["y"])]
    return saved(folder, nodes, {"x": (F32, [1, 128, 1]), "step": (I64, []), "n": (I64, [])})


@pytest.mark.parametrize(
    ("node", "kind", "shape", "wanted"),
    [
        (helper.make_node("STFT", ["x", "k", "", "n"], ["y"]), I64, [], 1),
        (helper.make_node("Range", ["a", "b", "k"], ["y"]), I64, [], 1),
        (helper.make_node("Range", ["k", "b", "c"], ["y"]), I64, [], 0),
        (helper.make_node("Slice", ["x", "a", "b", "c", "k"], ["y"]), I64, [2], [1, 1]),
        (helper.make_node("Slice", ["x", "a", "b", "k", "d"], ["y"]), I64, [2], [0, 1]),
        (helper.make_node("Reshape", ["x", "k"], ["y"]), I64, [3], [-1, 1, 1]),
        (helper.make_node("Expand", ["x", "k"], ["y"]), I64, [3], [1, 1, 1]),
        (helper.make_node("ConstantOfShape", ["k"], ["y"]), I64, [2], [4, 4]),
        (helper.make_node("TopK", ["x", "k"], ["y", "i"]), I64, [1], [1]),
        (helper.make_node("RoiAlign", ["x", "r", "k"], ["y"]), I64, [2], [0, 0]),
        (helper.make_node("Resize", ["x", "", "k"], ["y"]), F32, [4], [1, 1, 1, 1]),
    ],
    ids=lambda value: value.op_type if isinstance(value, NodeProto) else "",
)
def test_an_input_that_decides_sizes_is_fed_what_can_be(
    tmp_path: Path, node: NodeProto, kind: int, shape: list[int], wanted: object
) -> None:
    model = open_model(saved(tmp_path, [node], {"k": (kind, shape)}))
    for seed in range(3):
        drawn = random_feeds(model.signature, {"k": tuple(shape)}, seed)["k"]
        assert drawn.shape == tuple(shape)
        assert drawn.tolist() == wanted


@pytest.mark.parametrize("op", ["Div", "Mod"])
@pytest.mark.parametrize("kind", [TensorProto.INT8, TensorProto.UINT8, TensorProto.INT32, I64])
def test_no_divisor_of_integers_is_0(tmp_path: Path, op: str, kind: int) -> None:
    nodes = [
        helper.make_node("Unsqueeze", ["k", "axis"], ["row"]),
        helper.make_node(op, ["x", "row"], ["z"]),
        helper.make_node("Cast", ["z"], ["y"], to=F32),
    ]
    model = open_model(saved(tmp_path, nodes, {"x": (kind, [512]), "k": (kind, [512]), "axis": (I64, [1])}))
    drawn = random_feeds(model.signature, {spec.name: spec.shape for spec in model.signature.inputs}, 0)
    assert drawn["k"].min() > 0
    assert drawn["x"].min() == 0, "a dividend may be"


def test_indices_masks_and_divisors_of_floats_are_drawn_as_ever(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Gather", ["x", "ids"], ["rows"]),
        helper.make_node("Cast", ["mask"], ["m"], to=F32),
        helper.make_node("Div", ["rows", "m"], ["y"]),
    ]
    model = open_model(saved(tmp_path, nodes, {"x": (F32, [8, 8]), "ids": (I64, [64]), "mask": (I64, [64, 1])}))
    assert [spec.role for spec in model.signature.inputs] == [None, None, None]


def test_a_size_is_found_through_arithmetic_and_in_the_body_of_a_loop(tmp_path: Path) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Add", ["carried", "carried"], ["twice"]),
            helper.make_node("STFT", ["x", "twice", "", "n"], ["piece"]),
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Identity", ["carried"], ["kept"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", I64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", I64, []),
        ],
        [
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("kept", I64, []),
            helper.make_tensor_value_info("piece", F32, None),
        ],
    )
    nodes = [helper.make_node("Loop", ["times", "", "step"], ["last", "y"], body=body)]
    inputs = {"x": (F32, [1, 64, 1]), "n": (I64, []), "times": (I64, []), "step": (I64, [])}
    roles = {spec.name: spec.role for spec in open_model(saved(tmp_path, nodes, inputs)).signature.inputs}
    assert roles == {"x": "data", "n": "size", "times": "size", "step": "positive"}


@pytest.mark.slow
def test_a_spectrogram_whose_step_is_an_input_builds_and_agrees(tmp_path: Path) -> None:
    engine = te.build(stft(tmp_path), store=Store(tmp_path / "store"))
    assert engine.passport.parity is not None
    assert engine.passport.parity.passed
    report = te.ranges(tmp_path / "m.onnx")
    assert report.batches
    assert te.cast(tmp_path / "m.onnx", "fp16", out=tmp_path / "half.onnx").parity is not None


CALLER = """
import sys, trt_engine as te
from trt_engine.errors import TrtEngineError
from trt_engine.store import Store
try:
    print(eval(sys.argv[1]))
except TrtEngineError as error:
    print(error.exit_code, error.message)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("te.build('m.onnx', store=Store('store')).passport.build.notes['parity']", "parity was not judged"),
        ("te.ranges('m.onnx')", "4 "),
        ("te.cast('m.onnx', 'fp16', out='half.onnx').parity.note", "not judged"),
    ],
    ids=["build", "ranges", "cast"],
)
def test_a_graph_that_crashes_on_random_inputs_does_not_end_the_caller(tmp_path: Path, call: str, said: str) -> None:
    stft(tmp_path, length="zero")
    done = run_python("-c", CALLER, call, cwd=tmp_path, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "ONNX Runtime crashes (SIGFPE) on random inputs" in done.stdout
    assert not list(tmp_path.rglob("*.tmp"))


def test_only_inputs_that_decide_something_cost_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[object] = []
    monkeypatch.setattr(module, "_run_trial", lambda request: tried.append(request) or {})
    plain = open_model(saved(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], {"x": (F32, [2, 2])}))
    random_inputs(plain.path, plain.signature, {"x": (2, 2)})
    assert not tried
    risky = open_model(stft(tmp_path))
    random_inputs(risky.path, risky.signature, {"x": (1, 128, 1), "step": (), "n": ()})
    assert len(tried) == 1


def test_an_engine_keeps_what_its_inputs_decide(tmp_path: Path) -> None:
    engine = te.build(stft(tmp_path), store=Store(tmp_path / "store"))
    assert [spec.role for spec in te.Engine.open(engine.path).signature.inputs] == ["data", "one", "size"]
    with te.load(engine) as runner:
        runner.warmup(2)
        outputs = runner.infer(random_feeds(runner.signature, {"x": (1, 128, 1), "step": (), "n": ()}))
    assert np.isfinite(outputs["y"]).all()


@pytest.mark.parametrize("table", ["input", "weights", "dequantised weights"])
@pytest.mark.parametrize("operator", ["Gather", "GatherElements", "ScatterElements"])
def test_indices_into_what_is_computed_are_zero_and_into_a_table_of_weights_vary(
    table: str, operator: str, tmp_path: Path
) -> None:
    weights = helper.make_node("ConstantOfShape", ["size"], ["w"])
    size = helper.make_node("Constant", [], ["size"], value_ints=[8, 8])
    nodes = {
        "input": [helper.make_node("Relu", ["x"], ["t"])],
        "weights": [size, helper.make_node("ConstantOfShape", ["size"], ["t"])],
        "dequantised weights": [size, weights, helper.make_node("Abs", ["w"], ["t"])],
    }[table]
    update = ["e"] if operator == "ScatterElements" else []
    nodes.append(helper.make_node(operator, ["t", "i", *update], ["y"], axis=0))
    shape = [1, 8] if operator != "Gather" else [8]
    path = saved(tmp_path, nodes, {"x": (F32, [1, 8]), "i": (I64, shape), "e": (F32, [1, 8])})
    signature = open_model(path).signature
    values = random_feeds(signature, {spec.name: spec.shape for spec in signature.inputs})["i"]
    assert set(values.flat) == ({0} if table == "input" else {0, 1})

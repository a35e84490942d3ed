"""Multiply-adds and operations, against figures worked out by hand; bytes from shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

from trt_engine.graph.cost import Cost, model_cost, traffic_nbytes
from trt_engine.graph.shape_inference import trace

from . import models
from .models import graph, ints, model, node, value, weight


def single(
    made: NodeProto, inputs: dict[str, list[int]], out: list[int] | None, *stored: TensorProto, **more: Any
) -> Cost:
    outputs = [value(made.output[0], out)]
    return model_cost(model([made], [value(name, shape) for name, shape in inputs.items()], outputs, stored, **more))


CASES = {
    # out 8x14x14, each 3x3x3 products; bias adds one each
    "conv": (
        node("Conv", ["x", "w", "b"], ["y"], pads=[0, 0, 0, 0]),
        {"x": [1, 3, 16, 16]}, (weight("w", 8, 3, 3, 3), weight("b", 8)),
        8 * 14 * 14 * 27, 2 * 8 * 14 * 14 * 27 + 8 * 14 * 14,
    ),
    "conv in groups with strides": (
        node("Conv", ["x", "w"], ["y"], group=4, strides=[2, 2], pads=[1, 1, 1, 1]),
        {"x": [2, 4, 8, 8]}, (weight("w", 4, 1, 3, 3),),
        2 * 4 * 4 * 4 * 9, 2 * 2 * 4 * 4 * 4 * 9,
    ),
    # every input element meets 6 x 2 x 2 weights
    "transposed conv": (
        node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2]),
        {"x": [1, 5, 4, 4]}, (weight("w", 5, 6, 2, 2),),
        5 * 16 * 24, 2 * 5 * 16 * 24,
    ),
    "gemm": (
        node("Gemm", ["x", "w", "b"], ["y"], transB=1),
        {"x": [3, 7]}, (weight("w", 5, 7), weight("b", 5)), 3 * 7 * 5, 2 * 3 * 7 * 5 + 15,
    ),
    "gemm, first factor transposed": (
        node("Gemm", ["x", "w"], ["y"], transA=1), {"x": [7, 3]}, (weight("w", 7, 5),), 105, 210,
    ),
    "batched product": (
        node("MatMul", ["x", "z"], ["y"]), {"x": [2, 4, 3, 7], "z": [4, 7, 5]}, (), 2 * 4 * 3 * 7 * 5, 2 * 840,
    ),
    "vector product": (node("MatMul", ["x", "z"], ["y"]), {"x": [9], "z": [9]}, (), 9, 18),
    "einsum": (
        node("Einsum", ["x", "z"], ["y"], equation="bij,bjk->bik"),
        {"x": [2, 3, 4], "z": [2, 4, 5]}, (), 2 * 3 * 4 * 5, 240,
    ),
    "einsum with dots": (
        node("Einsum", ["x", "z"], ["y"], equation="...ij,jk->...ik"),
        {"x": [2, 6, 3, 4], "z": [4, 5]}, (), 2 * 6 * 3 * 4 * 5, 2 * 720,
    ),
    "einsum that only multiplies": (
        node("Einsum", ["x", "z"], ["y"], equation="i,j->ij"), {"x": [3], "z": [4]}, (), 0, 12,
    ),
    # 5 steps, batch 2, 4 gates of 6, each over 3 inputs and 6 states; 24 operations in a cell's unit
    "lstm": (
        node("LSTM", ["x", "w", "r"], ["y"], hidden_size=6),
        {"x": [5, 2, 3]}, (weight("w", 1, 24, 3), weight("r", 1, 24, 6)),
        5 * 2 * 24 * 9, 2 * 5 * 2 * 24 * 9 + 5 * 2 * 6 * 24,
    ),
    "gru in both directions": (
        node("GRU", ["x", "w", "r"], ["y"], hidden_size=4, direction="bidirectional"),
        {"x": [5, 1, 3]}, (weight("w", 2, 12, 3), weight("r", 2, 12, 4)),
        5 * 2 * 12 * 7, 2 * 5 * 2 * 12 * 7 + 5 * 2 * 4 * 20,
    ),
    "relu": (node("Relu", ["x"], ["y"]), {"x": [4, 5]}, (), 0, 20),
    "sigmoid": (node("Sigmoid", ["x"], ["y"]), {"x": [4, 5]}, (), 0, 80),
    "softmax": (node("Softmax", ["x"], ["y"]), {"x": [4, 5]}, (), 0, 100),
    "add with broadcast": (node("Add", ["x", "z"], ["y"]), {"x": [4, 5], "z": [5]}, (), 0, 20),
    "layer norm": (
        node("LayerNormalization", ["x", "w"], ["y"]), {"x": [4, 5]}, (weight("w", 5),), 0, 140,
    ),
    "max pool": (
        node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2]), {"x": [1, 3, 8, 8]}, (), 0, 3 * 16 * 3,
    ),
    "average pool": (
        node("AveragePool", ["x"], ["y"], kernel_shape=[2, 2], strides=[2, 2]), {"x": [1, 3, 8, 8]}, (), 0, 3 * 16 * 4,
    ),
    "global pool": (node("GlobalAveragePool", ["x"], ["y"]), {"x": [1, 3, 8, 8]}, (), 0, 192),
    "mean": (node("ReduceMean", ["x"], ["y"]), {"x": [6, 8]}, (), 0, 48),
    "bilinear resize": (
        node("Resize", ["x", "", "s"], ["y"], mode="linear"),
        {"x": [1, 3, 4, 4]}, (numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s"),), 0, 3 * 64 * 8,
    ),
    "nearest resize": (
        node("Resize", ["x", "", "s"], ["y"], mode="nearest"),
        {"x": [1, 3, 4, 4]}, (numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s"),), 0, 0,
    ),
    "reshape": (node("Reshape", ["x", "s"], ["y"]), {"x": [4, 6]}, (ints("s", 3, -1),), 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_count_is_the_one_by_hand(case: str) -> None:
    made, inputs, stored, macs, flops = CASES[case]
    cost = single(made, inputs, None, *stored)
    assert (cost.macs, cost.flops, cost.exact) == (macs, flops, True), cost.uncounted


def test_microsofts_attention_counts_its_projections() -> None:
    made = helper.make_node("Attention", ["x", "w", "b"], ["y"], domain="com.microsoft", num_heads=4)
    cost = single(
        made, {"x": [1, 10, 16]}, [1, 10, 16], weight("w", 16, 48), weight("b", 48), domains={"com.microsoft": 1}
    )
    assert (cost.macs, cost.exact) == (10 * 16 * 48 + 4 * 10 * 10 * 8, True)


def test_quantized_operators_are_counted_as_what_they_compute() -> None:
    scale = numpy_helper.from_array(np.array(0.1, np.float32), "s")
    zero = numpy_helper.from_array(np.array(0, np.int8), "z")
    weights = numpy_helper.from_array(np.ones((8, 3, 3, 3), np.int8), "w")
    proto = model(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            node("QLinearConv", ["q", "s", "z", "w", "s", "z", "s", "z"], ["y"]),
        ],
        [value("x", [1, 3, 8, 8])],
        [value("y", [1, 8, 6, 6], TensorProto.INT8)],
        [scale, zero, weights],
    )
    cost = model_cost(proto)
    assert (cost.macs, cost.exact) == (8 * 36 * 27, True)


def test_onnxruntimes_blocked_layout_counts_as_the_plain_convolution() -> None:
    made = helper.make_node(
        "Conv", ["x", "w"], ["y"], domain="com.microsoft.nchwc", activation="Relu", pads=[1, 1, 1, 1]
    )
    cost = single(made, {"x": [1, 16, 8, 8]}, None, weight("w", 32, 16, 3, 3), domains={"com.microsoft.nchwc": 1})
    assert (cost.macs, cost.exact) == (32 * 64 * 16 * 9, True)


# ------------------------------------------------------------------------------------------------ shapes on the way


def test_shapes_computed_from_shapes_are_followed() -> None:
    """What torch writes for `x.reshape(x.shape[0], x.shape[1] // 2, -1)`."""
    proto = model(
        [
            node("Shape", ["x"], ["sx"]),
            node("Gather", ["sx", "zero"], ["n"]),
            node("Gather", ["sx", "one"], ["c"]),
            node("Div", ["c", "two"], ["half"]),
            node("Concat", ["n", "half", "rest"], ["target"], axis=0),
            node("Reshape", ["x", "target"], ["r"]),
            node("MatMul", ["r", "w"], ["y"]),
        ],
        [value("x", ["batch", 6, 4])],
        [value("y", ["batch", 3, 5])],
        [ints("zero", 0), ints("one", 1), ints("two", 2), ints("rest", -1), weight("w", 8, 5)],
    )
    cost = model_cost(proto, {"x": (2, 6, 4)})
    assert (cost.macs, cost.exact) == (2 * 3 * 8 * 5, True)


def test_open_sizes_are_counted_at_the_sizes_given() -> None:
    proto = models.detector()
    assert model_cost(proto, {"images": (4, 3, 32, 32)}).macs == 4 * model_cost(proto, {"images": (1, 3, 32, 32)}).macs


def test_what_is_worked_out_from_constants_is_free() -> None:
    proto = model(
        [node("Mul", ["a", "a"], ["b"]), node("Add", ["x", "b"], ["y"])],
        [value("x", [4])], [value("y", [4])], [weight("a", 4)],
    )  # fmt: skip
    assert model_cost(proto).flops == 4


def test_an_operator_nobody_knows_makes_the_count_inexact_and_is_named() -> None:
    cost = model_cost(models.unpicked("Magic", "my.company"), {"images": (1, 3, 8, 8)})
    assert (cost.exact, cost.uncounted) == (False, {"my.company::Magic": 1})


# ------------------------------------------------------------------------------------------------ bodies, functions


def dense(name: str, out: str, weights: str, size: int) -> onnx.GraphProto:
    return graph([node("MatMul", ["x", weights], [out], name=name)], [], [value(out, [2, size])])


def branches(small: int, large: int) -> onnx.ModelProto:
    return model(
        [
            node("If", ["cond"], ["y"], then_branch=dense("t", "a", "w1", small), else_branch=dense("e", "b", "w2", large)),
        ],
        [value("cond", [], TensorProto.BOOL), value("x", [2, 4])],
        [value("y", [2, None])],
        [weight("w1", 4, small), weight("w2", 4, large)],
    )  # fmt: skip


def test_of_an_if_the_costlier_branch_counts() -> None:
    cost = model_cost(branches(3, 9))
    assert (cost.macs, cost.exact) == (2 * 4 * 9, False)


def test_a_condition_that_is_known_leaves_one_branch() -> None:
    proto = branches(3, 9)
    del proto.graph.input[0]
    proto.graph.initializer.append(numpy_helper.from_array(np.array(True), "cond"))
    cost = model_cost(proto)
    assert (cost.macs, cost.exact) == (2 * 4 * 3, True)


def looped(trips: TensorProto | None, *, stops: bool = False) -> onnx.ModelProto:
    goes_on = node("Identity", ["cond_in"], ["cond_out"])
    if stops:
        goes_on = node("Less", ["i", "limit"], ["cond_out"])
    body = graph(
        [goes_on, node("MatMul", ["state", "w"], ["next"])],
        [value("i", [], TensorProto.INT64), value("cond_in", [], TensorProto.BOOL), value("state", [2, 4])],
        [value("cond_out", [], TensorProto.BOOL), value("next", [2, 4])],
    )
    stored = [weight("w", 4, 4), numpy_helper.from_array(np.array(3, np.int64), "limit")]
    inputs = [value("x", [2, 4])]
    if trips is None:
        inputs.append(value("trips", [], TensorProto.INT64))
    else:
        stored.append(trips)
    return model([node("Loop", ["trips", "", "x"], ["y"], body=body)], inputs, [value("y", [2, 4])], stored)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    cost = model_cost(looped(numpy_helper.from_array(np.array(7, np.int64), "trips")))
    assert (cost.macs, cost.exact) == (7 * 2 * 4 * 4, True)


@pytest.mark.parametrize(
    "proto", [looped(None), looped(numpy_helper.from_array(np.array(7, np.int64), "trips"), stops=True)]
)
def test_a_loop_whose_trips_depend_on_data_is_counted_once_and_said(proto: onnx.ModelProto) -> None:
    cost = model_cost(proto)
    assert (cost.macs, cost.exact) == (2 * 4 * 4, False)
    assert cost.uncounted == {"Loop (trips)": 1}


def test_a_scan_counts_for_every_slice() -> None:
    body = graph(
        [
            node("MatMul", ["row", "w"], ["m"]),
            node("Add", ["state", "m"], ["next"]),
            node("Identity", ["next"], ["out"]),
        ],
        [value("state", [2, 4]), value("row", [2, 4])],
        [value("next", [2, 4]), value("out", [2, 4])],
    )
    proto = model(
        [node("Scan", ["s", "x"], ["last", "all"], body=body, num_scan_inputs=1), node("Relu", ["all"], ["y"])],
        [value("s", [2, 4]), value("x", [6, 2, 4])],
        [value("last", [2, 4]), value("y", [6, 2, 4])],
        [weight("w", 4, 4)],
    )
    cost = model_cost(proto)
    assert (cost.macs, cost.exact) == (6 * 2 * 4 * 4, True)
    assert cost.flops == 2 * cost.macs + 6 * 8 + 48


def test_a_local_function_counts_at_every_call() -> None:
    twice = helper.make_function(
        "my.company", "Twice", ["a"], ["b"],
        [node("MatMul", ["a", "a"], ["m"]), node("Add", ["m", "m"], ["b"])], [helper.make_opsetid("", 20)],
    )  # fmt: skip
    calls = [
        helper.make_node("Twice", ["x"], ["h"], domain="my.company"),
        helper.make_node("Twice", ["h"], ["y"], domain="my.company"),
    ]
    cost = model_cost(
        model(calls, [value("x", [4, 4])], [value("y", [4, 4])], domains={"my.company": 1}, functions=[twice])
    )
    assert (cost.macs, cost.exact) == (2 * 64, True)


def test_resnet_50_has_the_multiply_adds_everyone_counts() -> None:
    from pathlib import Path

    path = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
    if not path.exists():
        pytest.skip("this onnx distribution brings no light models")
    cost = model_cost(onnx.load(path))
    assert cost.exact
    assert round(cost.macs / 1e9, 2) == 4.09


def test_standard_attention_is_scores_and_weighted_sum() -> None:
    made = node("Attention", ["q", "k", "v"], ["y"])
    cost = single(made, {"q": [2, 4, 10, 8], "k": [2, 4, 12, 8], "v": [2, 4, 12, 6]}, None, opset=23)
    scores = 2 * 4 * 10 * 12
    assert (cost.macs, cost.exact) == (scores * (8 + 6), True)
    assert cost.flops == 2 * cost.macs + 6 * scores


def traffic(*nodes: Any, elem: int = TensorProto.FLOAT, shape: list[Any] | None = None, opset: int = 20) -> list[Any]:
    """Of each node of a graph from `x`, with `w` (6 x 5) and `rows` (2 indices) beside it."""
    graph = helper.make_graph(
        list(nodes), "g", [helper.make_tensor_value_info("x", elem, shape or [4, 6])],
        [helper.make_tensor_value_info(nodes[-1].output[0], elem, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, [6, 5], [0.0] * 30),
         helper.make_tensor("rows", TensorProto.INT64, [2], [0, 1])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return [traffic_nbytes(step) for step in trace(onnx.load_from_string(model.SerializeToString()), {}).nodes]


def test_inputs_weights_and_outputs_are_counted_each_once() -> None:
    assert traffic(helper.make_node("MatMul", ["x", "w"], ["y"])) == [4 * (24 + 30 + 20)]
    assert traffic(helper.make_node("Relu", ["x"], ["y"]), elem=TensorProto.FLOAT16) == [2 * 48]


@pytest.mark.parametrize(("elem", "nbytes"), [(TensorProto.INT4, 24), (TensorProto.BFLOAT16, 96)])
def test_small_types_are_counted_as_they_are_packed(elem: int, nbytes: int) -> None:
    assert traffic(helper.make_node("Transpose", ["x"], ["y"]), elem=elem, opset=21) == [nbytes]


def test_an_unknown_size_is_no_number() -> None:
    assert traffic(helper.make_node("Relu", ["x"], ["y"]), shape=["n", 6]) == [None]

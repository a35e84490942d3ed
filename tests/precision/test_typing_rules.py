"""Each planted fault is found under its code; its clean twin is silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

import onnx_models
from graph import models
from trt_engine.graph.typing_rules import check_strong_typing

FLOAT, HALF, BRAIN, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.INT64
node, value, weight = models.node, models.value, models.weight


def codes(proto: ModelProto) -> set[str]:
    found = check_strong_typing(proto)
    assert all(item.message and item.hint for item in found)
    return {item.code for item in found}


def stored(name: str, numbers: Any, kind: Any = np.float32) -> TensorProto:
    return numpy_helper.from_array(np.asarray(numbers).astype(kind), name)


def int4(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.zeros(shape, ml_dtypes.int4), name)


# ------------------------------------------------------------------------------------------------ operands


def mixed(op: str, second: int, **given: Any) -> ModelProto:
    shape = [1, 3, 4, 4] if op == "Conv" else [4, 4]
    kind = {FLOAT: np.float32, HALF: np.float16}[second]
    other = stored("w", np.ones((3, 3, 1, 1) if op == "Conv" else (4, 4)), kind)
    return models.model([node(op, ["x", "w"], ["y"], **given)], [value("x", shape)], [value("y", None)], [other])


@pytest.mark.parametrize(
    ("op", "given"),
    [("Add", {}), ("Mul", {}), ("MatMul", {}), ("Gemm", {}), ("Conv", {}), ("Concat", {"axis": 0}), ("Pow", {}),
     ("Max", {}), ("PRelu", {})],
)  # fmt: skip
def test_operands_of_two_types_are_found(op: str, given: dict[str, Any]) -> None:
    assert codes(mixed(op, HALF, **given)) == {"types-differ"}
    assert codes(mixed(op, FLOAT, **given)) == set()


def chosen(kind: int) -> ModelProto:
    other = stored("w", np.ones(4), {FLOAT: np.float32, HALF: np.float16}[kind])
    return models.model(
        [node("Where", ["c", "x", "w"], ["y"])],
        [value("c", [4], TensorProto.BOOL), value("x", [4])], [value("y", [4])], [other],
    )  # fmt: skip


def test_a_type_the_operator_does_not_take_at_its_opset_is_found() -> None:
    def pooled(opset: int) -> ModelProto:
        return models.model(
            [node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2])],
            [value("x", [1, 3, 4, 4], BRAIN)], [value("y", [1, 3, 3, 3], BRAIN)], opset=opset,
        )  # fmt: skip

    assert codes(pooled(20)) == {"type-not-taken"}
    assert codes(pooled(22)) == set()


def test_an_output_of_another_type_than_stated_is_found() -> None:
    proto = models.model([node("Relu", ["x"], ["y"])], [value("x", [4])], [value("y", [4], HALF)])
    assert codes(proto) == {"output-type-differs"}


@pytest.mark.parametrize(
    ("kind", "code"),
    [(TensorProto.DOUBLE, "float64"), (TensorProto.UINT16, "type-unknown-to-tensorrt"),
     (TensorProto.STRING, "type-unknown-to-tensorrt"), (TensorProto.INT32, None), (HALF, None)],
)  # fmt: skip
def test_types_tensorrt_does_not_have_are_found(kind: int, code: str | None) -> None:
    proto = models.model([node("Identity", ["x"], ["y"])], [value("x", [4], kind)], [value("y", [4], kind)])
    assert codes(proto) == ({code} if code else set())


def test_uint8_is_a_type_of_inputs_and_outputs_alone() -> None:
    def image(*between: onnx.NodeProto) -> ModelProto:
        return models.model(
            [*between, node("Cast", ["u"], ["y"], to=FLOAT)],
            [value("x", [4, 4], TensorProto.UINT8)], [value("y", [4, 4])],
        )  # fmt: skip

    clean = models.model(
        [node("Cast", ["x"], ["y"], to=FLOAT)], [value("x", [4], TensorProto.UINT8)], [value("y", [4])]
    )
    assert codes(clean) == set()
    assert codes(image(node("Transpose", ["x"], ["u"]))) == {"uint8-inside"}


# ------------------------------------------------------------------------------------------------ Q and DQ


def pair(**changes: Any) -> ModelProto:
    """A convolution between quantised activations and weights; `changes` plant the fault."""
    asked = {"zero": 0, "scale": 0.02, "weight_axis": 0, "weights": 8, "kind": np.int8} | changes
    scales = np.full(asked["weights"], 0.01) if asked["weights"] else 0.01
    return models.model(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
            node("DequantizeLinear", ["q", "s2" if "scale2" in asked else "s", "z"], ["d"], name="dq"),
            node("DequantizeLinear", ["w", "sw"], ["wd"], axis=asked["weight_axis"], name="wdq"),
            node("Conv", ["d", "wd"], ["y"], name="conv"),
        ],
        [value("x", [1, 8, 4, 4])], [value("y", [1, 8, 4, 4])],
        [
            stored("s", asked["scale"]), stored("z", asked["zero"], asked["kind"]), stored("s2", asked.get("scale2", 1)),
            stored("w", np.ones((8, 8, 1, 1)), np.int8), stored("sw", scales),
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, None),
        ({"weights": 0}, None),
        ({"zero": 3}, "asymmetric-zero-point"),
        ({"kind": np.uint8}, "quantized-type"),
        ({"kind": np.uint8, "zero": 128}, "asymmetric-zero-point"),
        ({"scale": 0.0}, "scale-not-positive"),
        ({"scale": -0.1}, "scale-not-positive"),
        ({"scale": np.nan}, "scale-not-positive"),
        ({"scale2": 0.5}, "pair-scales-differ"),
        ({"weight_axis": 1}, "axis-not-output-channels"),
        ({"weight_axis": 9}, "axis-out-of-range"),
        ({"weights": 5}, "scale-length"),
    ],
)
def test_faults_of_quantised_pairs_are_found(changes: dict[str, Any], code: str | None) -> None:
    found = codes(pair(**changes))
    assert (code in found) if code else not found


def test_a_scale_of_another_type_than_its_data_is_found() -> None:
    def proto(opset: int, kind: Any) -> ModelProto:
        return models.model(
            [
                node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=TensorProto.INT8),
                node("DequantizeLinear", ["q", "s"], ["y"], output_dtype=FLOAT),
            ],
            [value("x", [4])], [value("y", [4])], [stored("s", 0.1, kind)], opset=opset,
        )  # fmt: skip

    assert codes(proto(23, np.float16)) == {"scale-type-differs"}
    assert codes(proto(23, np.float32)) == set()


def test_computed_scales_and_zero_points_are_found() -> None:
    proto = models.model(
        [
            node("ReduceMax", ["x"], ["s"], keepdims=0),
            node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ],
        [value("x", [4]), value("z", [], TensorProto.INT8)], [value("y", [4])],
    )  # fmt: skip
    assert codes(proto) == {"scale-not-constant", "zero-point-not-constant"}


def test_an_activation_has_one_scale() -> None:
    proto = models.model(
        [node("QuantizeLinear", ["x", "s", "z"], ["q"], axis=1), node("DequantizeLinear", ["q", "s", "z"], ["y"], axis=1)],
        [value("x", [1, 4])], [value("y", [1, 4])], [stored("s", np.ones(4)), stored("z", np.zeros(4), np.int8)],
    )  # fmt: skip
    assert codes(proto) == {"per-channel-activation"}


def test_a_pair_along_two_axes_is_found() -> None:
    def proto(second: int) -> ModelProto:
        return models.model(
            [
                node("QuantizeLinear", ["w", "s", "z"], ["q"], axis=1),
                node("DequantizeLinear", ["q", "s", "z"], ["d"], axis=second),
                node("MatMul", ["x", "d"], ["y"]),
            ],
            [value("x", [1, 4])], [value("y", [1, 4])],
            [weight("w", 4, 4), stored("s", np.ones(4)), stored("z", np.zeros(4), np.int8)],
        )  # fmt: skip

    assert "pair-axes-differ" in codes(proto(0))
    assert codes(proto(1)) == set()


def blocked(
    op: str = "MatMul", shape: tuple[int, ...] = (64, 16), *, axis: int = 0, block: int = 32, **given: Any
) -> ModelProto:
    scale = list(shape)
    scale[axis % len(shape)] = -(-shape[axis] // block) if block else 2
    attributes = {"axis": axis} | ({"block_size": block} if block else {})
    turned = bool(given.get("transB"))
    rows = shape[-1] if turned else shape[-2]
    return models.model(
        [node("DequantizeLinear", ["w", "s"], ["d"], **attributes), node(op, ["x", "d"], ["y"], **given)],
        [value("x", [2, rows])], [value("y", None)], [int4("w", *shape), stored("s", np.ones(scale))], opset=21,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: blocked(), None),
        (lambda: blocked("Gemm"), None),
        (lambda: blocked("Gemm", (16, 64), axis=1, transB=1), None),
        (lambda: blocked("Gemm", (64, 64), axis=0, transB=1), "int4-gemm-transb"),
        (lambda: blocked(axis=1, shape=(64, 32)), "block-not-along-sum"),
        (lambda: blocked(shape=(48, 16)), "block-does-not-divide"),
        (lambda: blocked(block=0), "block-size-missing"),
        (lambda: blocked(shape=(3, 64, 16), axis=0, block=3), "block-axis"),
        (lambda: blocked(shape=(3, 64, 16), axis=1), "block-rank"),
    ],
)
def test_faults_of_blocks_are_found(make: Callable[[], ModelProto], code: str | None) -> None:
    found = codes(make())
    assert (code in found) if code else not found


def test_scales_along_the_sum_under_the_axis_of_the_rows_are_found() -> None:
    """What AWQ wrote for `Gemm(transB=1)`: scales along K, axis 0."""
    proto = blocked("Gemm", (64, 32), axis=0, transB=1)
    scale = next(item for item in proto.graph.initializer if item.name == "s")
    scale.CopyFrom(stored("s", np.ones((64, 1))))
    assert {"int4-gemm-transb", "block-scale-shape"} <= codes(proto)


def detector(scale: float, *, apart: bool) -> ModelProto:
    """Boxes up to 480 and scores up to 1, joined; quantised as one, or each for itself."""
    ends = (
        [
            node("QuantizeLinear", ["boxes", "s", "z"], ["qb"]), node("DequantizeLinear", ["qb", "s", "z"], ["db"]),
            node("QuantizeLinear", ["scores", "s1", "z"], ["qs"]), node("DequantizeLinear", ["qs", "s1", "z"], ["ds"]),
            node("Concat", ["db", "ds"], ["y"], axis=1),
        ]
        if apart
        else [
            node("Concat", ["boxes", "scores"], ["joined"], axis=1),
            node("Transpose", ["joined"], ["turned"]),
            node("QuantizeLinear", ["turned", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"]),
        ]
    )  # fmt: skip
    return models.model(
        [node("Mul", ["x", "strides"], ["boxes"]), node("Sigmoid", ["x"], ["scores"]), *ends],
        [value("x", [1, 4])], [value("y", None)],
        [stored("strides", 480.0), stored("s", scale), stored("s1", 1 / 127), stored("z", 0, np.int8)],
    )  # fmt: skip


def test_boxes_and_scores_under_one_scale_are_found() -> None:
    assert codes(detector(480 / 127, apart=False)) == {"scores-share-a-scale"}
    assert codes(detector(480 / 127, apart=True)) == set()
    assert codes(detector(1 / 127, apart=False)) == set()


def test_scores_that_were_ranked_and_gathered_are_still_scores() -> None:
    """A detector without NMS: the best of the scores, and the boxes at their places, behind a long way of layout."""
    nodes = [
        node("Mul", ["x", "strides"], ["boxes"]), node("Sigmoid", ["x"], ["scores"]),
        node("TopK", ["scores", "k"], ["best", "places"], axis=1),
        node("GatherElements", ["boxes", "places"], ["chosen"], axis=1),
    ]  # fmt: skip
    last = "best"
    for step in range(16):
        nodes.append(node("Identity", [last], [f"laid{step}"]))
        last = f"laid{step}"
    nodes += [
        node("Concat", ["chosen", last], ["joined"], axis=1),
        node("QuantizeLinear", ["joined", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]  # fmt: skip
    constants = [models.ints("k", 2), stored("strides", 480.0), stored("s", 480 / 127), stored("z", 0, np.int8)]
    found = codes(models.model(nodes, [value("x", [1, 4])], [value("y", None)], constants))
    assert found == {"scores-share-a-scale"}


# ------------------------------------------------------------------------------------------------ clean models


@pytest.mark.parametrize("make", [onnx_models.conv_net, onnx_models.int8_qdq, onnx_models.two_inputs])
def test_clean_models_are_silent(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert check_strong_typing(onnx.load(make(tmp_path / "net.onnx"))) == ()


def test_operators_of_tensorrt_are_left_to_tensorrt() -> None:
    """NVFP4 activations: block scales made by the dynamic operator, two DequantizeLinear behind it."""
    proto = models.model(
        [
            helper.make_node("TRT_FP4DynamicQuantize", ["x", "s"], ["q", "sb"], domain="trt", axis=-1, block_size=16),
            node("DequantizeLinear", ["sb", "s"], ["sd"]),
            node("DequantizeLinear", ["q", "sd"], ["y"], axis=-1, block_size=16),
        ],
        [value("x", [2, 32])], [value("y", [2, 32])], [stored("s", 0.1)], opset=23, domains={"trt": 1},
    )  # fmt: skip
    assert codes(proto) == set()


def branching(second: int) -> ModelProto:
    then = models.graph([node("Relu", ["x"], ["t"])], [], [value("t", None)])
    other = models.graph([node("Cast", ["x"], ["e"], to=second)], [], [value("e", None, second)])
    return models.model(
        [node("If", ["c"], ["y"], then_branch=then, else_branch=other)],
        [value("c", [], TensorProto.BOOL), value("x", [4])], [value("y", [4])],
    )  # fmt: skip


def looping(end: int) -> ModelProto:
    body = models.graph(
        [node("Identity", ["go"], ["on"]), node("Cast", ["s"], ["n"], to=end)],
        [value("i", [], INT64), value("go", [], TensorProto.BOOL), value("s", [4])],
        [value("on", [], TensorProto.BOOL), value("n", [4], end)],
    )
    return models.model(
        [node("Loop", ["trips", "", "x"], ["y"], body=body)], [value("x", [4])], [value("y", [4])],
        [numpy_helper.from_array(np.int64(2), "trips")],
    )  # fmt: skip


def test_what_a_loop_carries_in_two_types_is_found() -> None:
    assert codes(looping(HALF)) == {"loop-types-differ"}
    assert codes(looping(FLOAT)) == set()


def test_branches_of_two_types_are_found() -> None:
    assert "branches-differ" in codes(branching(HALF))
    assert codes(branching(FLOAT)) == set()

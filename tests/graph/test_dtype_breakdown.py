"""What a graph computes in, by data type."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_engine.graph.dtype_breakdown import compute_layers, count_parameters, dtype_shares, main_precision
from trt_engine.graph.walk import index_of
from trt_engine.records.passport import Precision

from . import models
from .models import model, node, value, weight

FLOAT = TensorProto.FLOAT
NUMBERS = {
    "int8": TensorProto.INT8,
    "uint8": TensorProto.UINT8,
    "fp8": TensorProto.FLOAT8E4M3FN,
    "int4": TensorProto.INT4,
}


def stored(name: str, kind: int, *shape: int) -> TensorProto:
    """A tensor of ones or zeros of any type, packed as the format says."""
    if kind in (TensorProto.INT4, TensorProto.FLOAT4E2M1):
        return helper.make_tensor(name, kind, shape, bytes((int(np.prod(shape)) + 1) // 2), raw=True)
    bits = {TensorProto.FLOAT8E4M3FN: 1, 24: 1, TensorProto.INT8: 1, TensorProto.UINT8: 1, FLOAT: 4}[kind]
    return helper.make_tensor(name, kind, shape, bytes(int(np.prod(shape)) * bits), raw=True)


def quantized(kind: int, *, weights_only: bool = False, through: bool = False, scale: int = FLOAT) -> onnx.ModelProto:
    """Conv-free Q/DQ as quantizers write it: DequantizeLinear on both factors of a MatMul.

    With block scales `x` is quantized already: an input of that type.
    """
    blocks = {"block_size": 32, "axis": -1}
    nodes = [] if weights_only else [node("DequantizeLinear", ["x", "s"], ["xd"], **blocks)] if scale != FLOAT else [
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
        node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
    ]  # fmt: skip
    nodes.append(
        node("DequantizeLinear", ["w", "ws"], ["wd"], **({} if scale == FLOAT else {"block_size": 32, "axis": 0}))
    )
    factor = "wd"
    if through:
        nodes.append(node("Transpose", ["wd"], ["wt"]))
        factor = "wt"
    nodes.append(node("MatMul", ["x" if weights_only else "xd", factor], ["y"]))
    zero = [stored("s", scale, 1, 2)] if scale != FLOAT else [stored("s", FLOAT), stored("z", kind)]
    return model(
        nodes,
        [value("x", [1, 64], kind) if scale != FLOAT else value("x", ["batch", 64])],
        [value("y", ["batch", 64])],
        [
            *([] if weights_only else zero),
            stored("w", kind, 64, 64),
            stored("ws", scale, *((2, 64) if scale != FLOAT else ())),
        ],
        opset=24 if scale != FLOAT or kind == TensorProto.FLOAT4E2M1 else 21,
    )


@pytest.mark.parametrize(("kind", "name"), [("float32", "fp32"), ("float16", "fp16"), ("float64", "fp64")])
def test_a_plain_graph_computes_in_its_own_type(kind: str, name: str) -> None:
    elem = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    proto = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", ["batch", 4], elem)], [value("y", ["batch", 4], elem)], [weight("w", 4, 4, kind=kind)],
    )  # fmt: skip
    assert list(dtype_shares(index_of(proto))) == [name]
    assert main_precision(index_of(proto)) == name


@pytest.mark.parametrize(("kind", "name"), [("int8", "int8"), ("uint8", "int8"), ("fp8", "fp8"), ("int4", "int4")])
@pytest.mark.parametrize("through", [False, True])
def test_an_operator_behind_dequantize_counts_as_the_quantized_type(kind: str, name: str, through: bool) -> None:
    proto = quantized(NUMBERS[kind], through=through)
    found = dtype_shares(index_of(proto))
    assert found[name].macs == 1.0
    assert main_precision(index_of(proto)) == name


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_weights_of_eight_bits_alone_leave_the_layer_in_floating_point(kind: str) -> None:
    proto = quantized(NUMBERS[kind], weights_only=True)
    found = dtype_shares(index_of(proto))
    assert found["fp32"].macs == 1.0
    assert (found[kind].macs, found[kind].parameters) == (0.0, 1.0)
    assert [layer.mixed_dtype for layer in compute_layers(proto)] == [f"only its second input is {kind}"]


def test_a_pair_in_front_of_another_operator_does_not_quantize_what_follows() -> None:
    proto = quantized(NUMBERS["int8"])
    at = len(proto.graph.node) - 1
    proto.graph.node.insert(at, node("Sigmoid", ["xd"], ["after"]))
    proto.graph.node[-1].input[0] = "after"
    kinds = {layer.step.node.op_type: layer.dtype for layer in compute_layers(proto)}
    assert kinds == {"Sigmoid": "int8", "MatMul": "fp32"}


@pytest.mark.parametrize("op", ["Transpose", "Identity", "Slice"])
def test_a_pair_in_front_of_what_changes_no_value_quantizes_what_follows(op: str) -> None:
    proto = quantized(NUMBERS["int8"])
    at = len(proto.graph.node) - 1
    ends = ["start", "end"] if op == "Slice" else []
    proto.graph.initializer.extend(numpy_helper.from_array(np.array([64 * at]), end) for at, end in enumerate(ends))
    proto.graph.node.insert(at, node(op, ["xd", *ends], ["after"], **({"perm": [0, 1]} if op == "Transpose" else {})))
    proto.graph.node[-1].input[0] = "after"
    assert {layer.step.node.op_type: layer.dtype for layer in compute_layers(proto)}["MatMul"] == "int8"


@pytest.mark.parametrize(("kind", "computes"), [("int8", "fp32"), ("fp8", "fp32"), ("int4", "int4")])
def test_a_graph_taken_at_its_word_computes_in_what_dequantize_gives(kind: str, computes: str) -> None:
    found = dtype_shares(index_of(quantized(NUMBERS[kind], weights_only=kind == "int4")), literal=True)
    assert Precision(None, found).main_dtype == computes
    assert found[kind].parameters == 1.0, "what is stored stays told"
    assert list(Precision(None, found).compute_shares) == [computes], (
        "four bits are weights' own: nothing computes in them"
    )


def test_block_scales_in_e8m0_are_mxfp8_and_four_bit_floats_nvfp4() -> None:
    assert main_precision(index_of(quantized(NUMBERS["fp8"], scale=24))) == "mxfp8"
    assert main_precision(index_of(quantized(TensorProto.FLOAT4E2M1))) == "nvfp4"


def test_tensorrts_own_dequantize_is_recognised() -> None:
    proto = model(
        [
            helper.make_node("TRT_MXFP8DynamicQuantize", ["x"], ["xq", "xs"], domain="trt"),
            helper.make_node("TRT_MXFP8DequantizeLinear", ["xq", "xs"], ["xd"], domain="trt"),
            helper.make_node("TRT_MXFP8DequantizeLinear", ["w", "s"], ["wd"], domain="trt"),
            node("MatMul", ["xd", "wd"], ["y"]),
        ],
        [value("x", ["batch", 64])],
        [value("y", ["batch", 64])],
        [stored("w", NUMBERS["fp8"], 64, 64), stored("s", TensorProto.UINT8, 64, 2)],
        domains={"trt": 1},
    )
    assert main_precision(index_of(proto)) == "mxfp8"


def test_a_mixed_graph_is_split_by_what_its_layers_do() -> None:
    proto = quantized(NUMBERS["int8"])
    proto.graph.node[-1].output[0] = "h"
    proto.graph.node.extend([node("MatMul", ["h", "w2"], ["p"]), node("Relu", ["p"], ["y"])])
    proto.graph.initializer.append(weight("w2", 64, 64))
    found = dtype_shares(index_of(proto))
    assert found["int8"].macs == found["fp32"].macs == 0.5
    assert round(found["int8"].layers, 3) == round(1 / 3, 3)
    assert found["int8"].parameters == 0.5


def test_shape_arithmetic_and_casts_are_no_layers() -> None:
    proto = models.detector()
    proto.graph.node.extend([node("Shape", ["images"], ["sh"]), node("Cast", ["sh"], ["shf"], to=FLOAT)])
    assert dtype_shares(index_of(proto))["fp32"].layers == 1.0
    empty = model([node("Shape", ["x"], ["y"])], [value("x", ["batch", 4])], [value("y", [2], TensorProto.INT64)])
    assert dtype_shares(index_of(empty)) == {}
    assert main_precision(index_of(empty)) is None


# ------------------------------------------------------------------------------------------------ parameters


def test_parameters_are_the_weights_and_not_the_shapes() -> None:
    proto = models.detector()
    proto.graph.initializer.append(models.ints("target", 1, 2, 3))
    held = count_parameters(index_of(proto))
    assert held.count == 8 * 27 + 8 + 80 + 10
    assert held.nbytes == held.count * 4


def test_a_shared_weight_counts_once() -> None:
    proto = model(
        [node("MatMul", ["x", "w"], ["h"]), node("MatMul", ["h", "w"], ["y"])],
        [value("x", ["batch", 8])], [value("y", ["batch", 8])], [weight("w", 8, 8)],
    )  # fmt: skip
    assert count_parameters(index_of(proto)).count == 64
    assert dtype_shares(index_of(proto))["fp32"].macs == 1.0


def test_weights_in_constant_nodes_and_bodies_are_counted() -> None:
    inner = models.graph([node("MatMul", ["x", "inner"], ["a"])], [], [value("a", [2, 4])], [weight("inner", 4, 4)])
    other = models.graph([node("Relu", ["x"], ["b"])], [], [value("b", [2, 4])])
    proto = model(
        [
            node("If", ["c"], ["h"], then_branch=inner, else_branch=other),
            node("Constant", [], ["k"], value=numpy_helper.from_array(np.ones(5, np.float32))),
            node("Identity", ["h"], ["y"]),
        ],
        [value("c", [], TensorProto.BOOL), value("x", [2, 4])],
        [value("y", [2, 4])],
    )
    assert count_parameters(index_of(proto)).count == 16 + 5


def test_matrix_operators_of_fp32_count_as_tf32_where_the_device_computes_so() -> None:
    proto = model(
        [node("MatMul", ["x", "w"], ["m"]), node("Relu", ["m"], ["y"])],
        [value("x", ["batch", 64])],
        [value("y", ["batch", 64])],
        [stored("w", FLOAT, 64, 64)],
    )
    found = dtype_shares(index_of(proto), tf32=True)
    assert (found["tf32"].macs, found["tf32"].layers, found["tf32"].parameters) == (1.0, 0.5, 0.0)
    assert (found["fp32"].macs, found["fp32"].layers, found["fp32"].parameters) == (0.0, 0.5, 1.0)
    assert next(iter(found)) == "tf32"
    half = model(
        [node("MatMul", ["x", "w"], ["y"])],
        [value("x", ["batch", 64], TensorProto.FLOAT16)],
        [value("y", ["batch", 64], TensorProto.FLOAT16)],
        [numpy_helper.from_array(np.zeros((64, 64), np.float16), "w")],
    )
    assert list(dtype_shares(index_of(half), tf32=True)) == ["fp16"]

"""Which number formats a graph holds, and where."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from trt_engine.graph.dtype_breakdown import data_types, first_float32_matmul


def model(nodes: list[Any], stored: tuple[Any, ...] = (), kind: int = TensorProto.FLOAT) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, kind, [4, 4]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], list(stored))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("trt", 1)])


def test_formats_are_found_in_tensors_types_casts_and_tensorrts_own_operators() -> None:
    assert data_types(model([helper.make_node("Relu", ["x"], ["y"])])) == {}
    assert data_types(model([helper.make_node("Relu", ["x"], ["y"])], kind=TensorProto.BFLOAT16)) == {"bf16": "x"}
    cast = helper.make_node("Cast", ["x"], ["c"], name="narrow", to=TensorProto.FLOAT16)
    assert data_types(model([cast])) == {"fp16": "narrow"}
    quantize = helper.make_node("QuantizeLinear", ["x", "s"], ["q"], output_dtype=TensorProto.FLOAT8E4M3FN)
    assert data_types(model([quantize])) == {"fp8": "q"}
    zero = helper.make_tensor("z", TensorProto.FLOAT4E2M1, [], [0])
    assert data_types(model([helper.make_node("Relu", ["x"], ["y"])], (zero,))) == {"nvfp4": "z"}
    own = helper.make_node("TRT_MXFP8DynamicQuantize", ["x"], ["q", "s"], name="blocks", domain="trt")
    assert data_types(model([own])) == {"mxfp8": "blocks", "fp8": "blocks"}
    assert set(data_types(model([helper.make_node("TRT_FP4DynamicQuantize", ["x"], ["q", "s"], domain="trt")]))) == {
        "nvfp4",
        "fp8",
    }


def test_formats_inside_a_body_count() -> None:
    half = numpy_helper.from_array(np.ones(3, np.float16), "h")
    body = helper.make_graph([], "b", [], [helper.make_tensor_value_info("h", TensorProto.FLOAT16, [3])], [half])
    branch = helper.make_node("If", ["x"], ["y"], then_branch=body, else_branch=body)
    assert data_types(model([branch])) == {"fp16": "h"}


def test_a_product_in_fp32_is_named_and_one_of_constants_is_none() -> None:
    weights = numpy_helper.from_array(np.ones((4, 4), np.float32), "w")
    product = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
    assert first_float32_matmul(model([product], (weights,))) == "product"
    assert first_float32_matmul(model([product], (), TensorProto.FLOAT16)) is None
    folded = [helper.make_node("MatMul", ["w", "w"], ["c"]), helper.make_node("Add", ["x", "c"], ["y"])]
    assert first_float32_matmul(model(folded, (weights,))) is None

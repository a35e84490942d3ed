"""Bytes of nodes from their shapes: what is read and written, and what only renames memory."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from trt_engine.graph.cost import traffic_nbytes
from trt_engine.graph.shape_inference import trace


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

"""Means in FP16 that ONNX Runtime's CUDA provider would add in FP16."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from trt_engine.backends.onnxruntime.build import widen_half_means


def graph(
    shape: Sequence[int | str], axes: Sequence[int] | None, keepdims: int, opset: int, kind: int
) -> onnx.ModelProto:
    given = [numpy_helper.from_array(np.array(axes, np.int64), "axes")] if axes is not None and opset >= 18 else []
    node = helper.make_node("ReduceMean", ["x", *(item.name for item in given)], ["y"], keepdims=keepdims)
    if axes is not None and opset < 18:
        node.attribute.append(helper.make_attribute("axes", axes))
    ends = [helper.make_tensor_value_info("x", kind, shape)], [helper.make_tensor_value_info("y", kind, None)]
    made = helper.make_graph([node], "means", *ends, given)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("opset", [13, 18])
@pytest.mark.parametrize(
    ("shape", "axes", "keepdims", "operators"),
    [
        (["n", 4, 64, 64], [2, 3], 1, ["GlobalAveragePool"]),
        ([2, 4, "h", "w"], [-1, -2], 1, ["GlobalAveragePool"]),
        ([2, 4, 64, 64], [2, 3], 0, ["Cast", "ReduceMean", "Cast"]),
        ([2, 4, 4096], [-1], 1, ["Cast", "ReduceMean", "Cast"]),
        ([4096, 4], [0], 0, ["Cast", "ReduceMean", "Cast"]),
        ([64, 64], None, 0, ["Cast", "ReduceMean", "Cast"]),
        ([2, 4, 16], [2], 1, ["ReduceMean"]),
    ],
)
def test_a_mean_of_many_values_is_not_added_in_fp16(
    shape: list[int | str], axes: list[int] | None, keepdims: int, operators: list[str], opset: int
) -> None:
    plain, made = (graph(shape, axes, keepdims, opset, TensorProto.FLOAT16) for _ in range(2))
    count = widen_half_means(made)
    assert [node.op_type for node in made.graph.node] == operators and count == (operators != ["ReduceMean"])
    sizes = [{"n": 2, "h": 48, "w": 64}.get(str(size), size) for size in shape]
    x = np.random.default_rng(0).uniform(50, 60, sizes).astype(np.float16)
    ours, theirs = (
        ort.InferenceSession(item.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for item in (made, plain)
    )
    assert ours.shape == theirs.shape and ours.dtype == np.float16
    np.testing.assert_allclose(
        ours, x.astype(np.float64).mean(None if axes is None else tuple(axes), keepdims=bool(keepdims)), rtol=2e-3
    )


def test_other_types_stay_as_they_are() -> None:
    assert widen_half_means(graph([2, 4096], [1], 1, 18, TensorProto.FLOAT)) == 0

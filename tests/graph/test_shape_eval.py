"""Values that shapes are computed from: the same as the ONNX reference evaluator gives, and never large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from trt_engine.graph import walk
from trt_engine.graph.shape_eval import MAX_ELEMENTS, fold_node
from trt_engine.graph.shape_inference import TensorInfo


def known(array: Any) -> TensorInfo:
    value = np.asarray(array)
    return TensorInfo(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, value)


A = np.arange(24, dtype=np.int64).reshape(2, 3, 4)
F = np.linspace(-2.5, 2.5, 6, dtype=np.float32)
ARR = np.array
CASES: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("Gather", [A, ARR([2, 0])], {"axis": 1}),
    ("Gather", [A, ARR(-1)], {}),
    ("Concat", [A, A], {"axis": -1}),
    ("Slice", [A, ARR([1]), ARR([9]), ARR([2]), ARR([2])], {}),
    ("Slice", [A, ARR([-1]), ARR([-9]), ARR([1]), ARR([-1])], {}),
    ("Slice", [A, ARR([0, 1]), ARR([1, 3])], {}),
    ("Unsqueeze", [A, ARR([0, 4])], {}),
    ("Squeeze", [A[:1], ARR([0])], {}),
    ("Squeeze", [A[:1, :1]], {}),
    ("Cast", [F], {"to": TensorProto.INT64}),
    ("Div", [ARR([7, -7, 6]), ARR([2, 2, 3])], {}),
    ("Div", [F, F[::-1].copy()], {}),
    ("Mod", [ARR([7, -7]), ARR([3, 3])], {}),
    ("Mod", [ARR([7, -7]), ARR([3, 3])], {"fmod": 1}),
    ("Add", [A, ARR([1])], {}),
    ("Floor", [F], {}),
    ("Ceil", [F], {}),
    ("Round", [F], {}),
    ("Pow", [ARR([2, 3]), ARR([3, 2])], {}),
    ("Min", [A, ARR([5])], {}),
    ("Max", [A, ARR([5]), ARR([9])], {}),
    ("Equal", [A, ARR([5])], {}),
    ("Where", [A > 4, A, ARR([0])], {}),
    ("Range", [ARR(2), ARR(9), ARR(3)], {}),
    ("Reshape", [A, ARR([0, -1])], {}),
    ("Expand", [ARR([[1], [2]]), ARR([1, 3])], {}),
    ("Expand", [ARR([[1, 2, 3]]), ARR([2, 1])], {}),
    ("Tile", [ARR([1, 2]), ARR([3])], {}),
    ("Transpose", [A], {"perm": [2, 0, 1]}),
    ("Transpose", [A], {}),
    ("NonZero", [ARR([0, 3, 0, 4])], {}),
    ("ReduceProd", [A[0, :, 1:]], {"keepdims": 0}),
    ("ReduceSum", [A, ARR([1])], {}),
    ("ReduceMax", [A, ARR([0, 2])], {"keepdims": 0}),
    ("CumSum", [ARR([1, 2, 3]), ARR(0)], {}),
    ("ScatterND", [ARR([1, 2, 3]), ARR([[0], [2]]), ARR([8, 9])], {}),
    ("ConstantOfShape", [ARR([2, 3])], {"value": helper.make_tensor("v", TensorProto.INT64, [1], [7])}),
]


@pytest.mark.parametrize(("op", "inputs", "given"), CASES, ids=[f"{at}-{case[0]}" for at, case in enumerate(CASES)])
def test_a_value_is_what_the_reference_gives(op: str, inputs: list[Any], given: dict[str, Any]) -> None:
    names = [f"i{at}" for at in range(len(inputs))]
    node = helper.make_node(op, names, ["y"], **given)
    typed = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.asarray(array).dtype), None)
        for name, array in zip(names, inputs, strict=True)
    ]
    graph = helper.make_graph([node], "g", typed, [helper.make_tensor_value_info("y", 0, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    expected = ReferenceEvaluator(model).run(None, dict(zip(names, map(np.asarray, inputs), strict=True)))[0]
    made = fold_node(op, walk.attributes(node), [known(item) for item in inputs], 1)
    assert made is not None
    np.testing.assert_array_equal(made[0], expected)
    assert made[0].dtype == expected.dtype


def test_split_gives_every_part() -> None:
    parts = fold_node("Split", {"axis": 1}, [known(A), known([1, 2])], 2)
    assert parts is not None
    assert [part.shape for part in parts] == [(2, 1, 4), (2, 2, 4)]


def test_shape_and_size_need_no_value() -> None:
    unseen = TensorInfo(TensorProto.FLOAT, (2, 3, 5))
    assert [item.tolist() for item in fold_node("Shape", {"start": 1}, [unseen], 1) or []] == [[3, 5]]
    assert [int(item) for item in fold_node("Size", {}, [unseen], 1) or []] == [30]
    assert fold_node("Shape", {}, [TensorInfo(TensorProto.FLOAT, (-1, 3))], 1) is None


LARGE = MAX_ELEMENTS + 1


@pytest.mark.parametrize(
    ("op", "inputs"),
    [
        ("Expand", [ARR([1]), ARR([LARGE])]),
        ("ConstantOfShape", [ARR([1 << 40])]),
        ("Tile", [ARR([1, 2]), ARR([1 << 40])]),
        ("Range", [ARR(0), ARR(1 << 50), ARR(1)]),
        ("Add", [np.zeros((4096, 1)), np.zeros((1, 4096))]),
        ("Gather", [np.zeros((2, 4096)), np.zeros(4096, np.int64)]),
        ("Div", [ARR([1]), ARR([0])]),
        ("Reshape", [A, ARR([5, 5])]),
        ("Range", [ARR(0), ARR(9), ARR(0)]),
    ],
)
def test_what_is_large_or_makes_no_sense_is_not_followed(op: str, inputs: list[Any]) -> None:
    assert fold_node(op, {}, [known(item) for item in inputs], 1) is None

"""Shape arithmetic on Python numbers and SymInts: the operators whose inputs are all `Scalars`, and `Shape`.

Numbers alone are computed as ONNX does (`graph.shape_eval`), in their dtype. Where a size has no number yet, its element is
moved as it is, or PyTorch's symbolic arithmetic computes with it.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnx import helper

from trt_engine.backends.inductor import onnx_module
from trt_engine.graph.shape_eval import FOLDABLE_OPS, MOVING, fold_elements, fold_node, object_array
from trt_engine.graph.shape_inference import TensorInfo

Array = Any


def fold(call: onnx_module.Call) -> onnx_module.Scalars | list[onnx_module.Scalars] | None:
    """The result of a node on numbers; None for a node that computes on tensors, or on what has no number."""
    op = call.node.op_type
    if op in ("Shape", "Size"):
        return _shape(call)
    given = [value for value in call.values if value is not None]
    if op not in FOLDABLE_OPS or not given or not all(isinstance(value, onnx_module.Scalars) for value in given):
        return None
    if op == "Cast" and not _can_cast(call.attribute("to"), given[0].values.flat):
        return None
    symbolic = any(not _are_numbers(value) for value in given)
    try:
        made = (_fold_symbols if symbolic else _fold_numbers)(call, op)
    except (ArithmeticError, ValueError):  # Python raises where tensors hold an infinity or no number
        return None
    if made is None or any(part.values.size > onnx_module._SMALL for part in made):
        return None
    if any(isinstance(item, float) and math.isnan(item) for part in made for item in part.values.ravel().tolist()):
        return None
    return made if op == "Split" else made[0]


def _are_numbers(value: onnx_module.Scalars) -> bool:
    return all(isinstance(item, int | float) for item in value.values.flat)


def _can_cast(kind: int, items: Sequence[Any]) -> bool:
    """Whether numbers of that type are kept as Python numbers: not those of 4 bits and FP8, nor integers of no number."""
    to = onnx_module.torch_dtype(kind)
    if kind in onnx_module.NIBBLES or (to.is_floating_point and to.itemsize == 1):
        return False
    return to.is_floating_point or all(not isinstance(item, float) or math.isfinite(item) for item in items)


def _fold_numbers(call: onnx_module.Call, op: str) -> list[onnx_module.Scalars] | None:
    inputs = [None if value is None else _info(_typed(value)) for value in call.values]
    made = fold_node(op, call.attributes, inputs, len(call.node.output))
    if made is None:
        return None
    return [
        onnx_module.Scalars(
            part.astype(object), onnx_module.torch_dtype(int(helper.np_dtype_to_tensor_dtype(part.dtype)))
        )
        for part in made
    ]


def _fold_symbols(call: onnx_module.Call, op: str) -> list[onnx_module.Scalars] | None:
    values: list[onnx_module.Scalars] = [value for value in call.values if value is not None]
    if op in _REDUCTIONS:
        made = _reduce(call, _REDUCTIONS[op])
    elif op in MOVING and op != "Concat" and not all(map(_are_numbers, values[1:])):
        return None
    else:
        typed = op in MOVING and op != "Concat"
        inputs = [
            None if value is None else _info(_typed(value) if typed and at else value.values)
            for at, value in enumerate(call.values)
        ]
        attributes = call.attributes
        rules = _ELEMENTS | {"Cast": _cast(attributes.get("to", 0)), "Mod": _remainder(attributes.get("fmod"))}
        made = fold_elements(op, attributes, inputs, len(call.node.output), rules)
    kind = values[1 if op == "Where" else 0].dtype
    kind = onnx_module.torch_dtype(call.attribute("to")) if op == "Cast" else torch.bool if op in _COMPARISONS else kind
    return None if made is None else [onnx_module.Scalars(part, kind) for part in made]


def _info(array: Array) -> TensorInfo:
    return TensorInfo(shape=array.shape, value=array)


def _typed(value: onnx_module.Scalars) -> Array:
    """Numbers as an array of their dtype."""
    return value.values.astype(helper.tensor_dtype_to_np_dtype(onnx_module.onnx_type(value.dtype)))


def _shape(call: onnx_module.Call) -> onnx_module.Scalars:
    value: Any = call.values[0]
    shape = list(value.values.shape if isinstance(value, onnx_module.Scalars) else value.shape)
    if call.node.op_type == "Size":
        return onnx_module.Scalars(object_array([math.prod(shape)], ()), torch.int64)
    shape = shape[call.attribute("start", 0) : call.attribute("end")]
    return onnx_module.Scalars(object_array(shape, (len(shape),)), torch.int64)


# ------------------------------------------------------------------------------------------------ symbols


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, float | torch.SymFloat) or isinstance(b, float | torch.SymFloat):
        return a / b
    if isinstance(a, int) and isinstance(b, int):
        return int(math.copysign(abs(a) // abs(b), a * b)) if b else 0
    return a // b  # sizes are not negative


def _remainder(fmod: Any) -> Callable[[Any, Any], Any]:
    if not fmod:
        return operator.mod
    return lambda a, b: math.fmod(a, b) if isinstance(a, float) else a - b * _divide(a, b)


def _to_int(value: Any) -> Any:
    value = known(value) if isinstance(value, torch.SymBool) else value
    if isinstance(value, torch.SymFloat):
        return torch.sym_int(value)
    return value if isinstance(value, torch.SymInt) else int(value)


def known(test: Any) -> bool:
    """The value of a test of sizes. PyTorch answers tests of a size that varies as if it were never 1, without a word."""
    if isinstance(test, torch.SymBool):
        expression = test.node.expr
        if bool(expression.subs(dict.fromkeys(expression.free_symbols, 1))) != bool(test):
            raise onnx_module.Unsupported("it depends on whether a size that varies is 1")
    return bool(test)


def _cast(kind: int) -> Callable[[Any], Any]:
    to = onnx_module.torch_dtype(kind) if kind else torch.int64
    return bool if to is torch.bool else torch.sym_float if to.is_floating_point else _to_int


def _reduce(call: onnx_module.Call, function: Callable[[Any, Any], Any]) -> list[Array] | None:
    """A reduction over all elements of a vector; None for any other."""
    data = call.scalars(0)
    axes = tuple(call.numbers(1)) if call.has(1) else ()
    if not axes and call.attribute("noop_with_empty_axes"):
        return None
    if data.ndim != 1 or not data.size or axes not in ((), (0,), (-1,)):
        return None
    return [object_array([functools.reduce(function, data)], (1,) if call.attribute("keepdims") else ())]


_COMPARISONS: dict[str, Callable[..., Any]] = {
    "Equal": operator.eq, "Less": operator.lt, "LessOrEqual": operator.le, "Greater": operator.gt,
    "GreaterOrEqual": operator.ge, "And": lambda a, b: known(a) and known(b), "Or": lambda a, b: known(a) or known(b),
    "Not": lambda a: not known(a),
}  # fmt: skip
_ELEMENTS = _COMPARISONS | {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divide, "Neg": operator.neg, "Abs": abs,
    "Min": lambda *a: functools.reduce(torch.sym_min, a), "Max": lambda *a: functools.reduce(torch.sym_max, a),
    "Sqrt": torch.sym_sqrt, "Pow": operator.pow,
    "Floor": lambda a: torch.sym_float(math.floor(a)), "Ceil": lambda a: torch.sym_float(math.ceil(a)),
    "Reciprocal": lambda a: 1.0 / a, "Where": lambda c, a, b: a if known(c) else b,
}  # fmt: skip
_REDUCTIONS = {
    "ReduceProd": operator.mul, "ReduceSum": operator.add, "ReduceMax": torch.sym_max, "ReduceMin": torch.sym_min,
}  # fmt: skip


_MAX_ROUNDS = 256
"""Most rounds of a Loop, which are written out."""


def branch(call: onnx_module.Call) -> list[onnx_module.Value]:
    return call.run("then_branch" if _condition(call.values[0]) else "else_branch")


def loop(call: onnx_module.Call) -> list[onnx_module.Value]:
    """Rounds one after the other; what they give a row of is stacked."""
    count: Any = call.number(0) if call.has(0) else _MAX_ROUNDS + 1
    if not isinstance(count, int):
        raise onnx_module.Unsupported("its number of rounds varies")
    runs = _condition(call.values[1]) if call.has(1) else True
    carried, at = list(call.values[2:]), 0
    rows: list[list[onnx_module.Value]] = [[] for _ in range(len(call.node.output) - len(carried))]
    while runs and at < count:
        if at == _MAX_ROUNDS:
            raise onnx_module.Unsupported(f"more than {_MAX_ROUNDS} rounds")
        index = onnx_module.Scalars(np.array(at, object), torch.int64)
        goes_on, *found = call.run("body", index, onnx_module.Scalars(np.array(runs, object), torch.bool), *carried)
        carried, given = found[: len(carried)], found[len(carried) :]
        for row, value in zip(rows, given, strict=True):
            row.append(value.tensor(call.device) if isinstance(value, onnx_module.Scalars) else value)
        runs, at = _condition(goes_on), at + 1
    if not all(rows):
        raise onnx_module.Unsupported("no round, whose rows have no known shape")
    return [*carried, *(torch.stack(row) for row in rows)]


def _condition(value: onnx_module.Value | None) -> bool:
    if not isinstance(value, onnx_module.Scalars):
        raise onnx_module.Unsupported("its condition depends on the data")
    return known(value.values.reshape(-1)[0])

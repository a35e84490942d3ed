"""Shape arithmetic on Python numbers and SymInts: the operators whose inputs are all `Scalars`, and `Shape`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch

from trt_engine.backends.inductor.onnx_module import _SMALL, NIBBLES, Call, Scalars, Unsupported, torch_dtype

Array = Any


def fold(call: Call) -> Scalars | list[Scalars] | None:
    """The result of a node on numbers; None for a node that computes on tensors, or whose attributes a rule here does not
    look at."""
    op = call.node.op_type
    if op in ("Shape", "Size"):
        return _shape(call)
    rule = _RULES.get(op)
    given = [value for value in call.values if value is not None]
    if rule is None or not given or not all(isinstance(value, Scalars) for value in given):
        return None
    if any(isinstance(item, float) and math.isnan(item) for value in given for item in value.values.flat):
        return None
    try:
        found = rule(call)
    except (ArithmeticError, ValueError):  # Python raises where tensors hold an infinity or no number
        return None
    if found is None or call.attributes.keys() - call.read:
        return None
    parts = [
        item if isinstance(item, np.ndarray) else _array(item)
        for item in (found if isinstance(found, list) else [found])
    ]
    if any(part.size > _SMALL for part in parts):
        return None
    kind = _dtype(call, op)
    if any(isinstance(item, float) and math.isnan(item) for part in parts for item in part.flat):
        return None
    made = [Scalars(_wrapped(part, kind), kind) for part in parts]
    return made if isinstance(found, list) else made[0]


_ROUND: dict[torch.dtype, Callable[[float], Any]] = {
    torch.float16: np.float16, torch.bfloat16: ml_dtypes.bfloat16, torch.float32: np.float32,
}  # fmt: skip


def _wrapped(values: Array, kind: torch.dtype) -> Array:
    """Numbers as the dtype holds them; SymInts as they are."""
    out = np.empty(values.shape, object)
    for at in np.ndindex(values.shape):
        item = values[at]
        if isinstance(item, float) and kind in _ROUND:
            item = float(_ROUND[kind](item))
        elif isinstance(item, bool | int) and kind is torch.bool:
            item = bool(item)
        elif isinstance(item, bool | int) and not kind.is_floating_point:
            limits = torch.iinfo(kind)
            item = (int(item) - limits.min) % (limits.max - limits.min + 1) + limits.min
        out[at] = item
    return out


def _dtype(call: Call, op: str) -> torch.dtype:
    if op == "Cast":
        return torch_dtype(call.attribute("to"))
    if op in _COMPARISONS:
        return torch.bool
    if op == "ConstantOfShape":
        value = call.attribute("value")
        return torch.float32 if value is None else torch_dtype(value.data_type)
    first = call.values[1 if op == "Where" else 0]
    assert isinstance(first, Scalars)
    return first.dtype


def _shape(call: Call) -> Scalars:
    value: Any = call.values[0]
    shape = list(value.values.shape if isinstance(value, Scalars) else value.shape)
    if call.node.op_type == "Size":
        return Scalars(_array(math.prod(shape)), torch.int64)
    rank = len(shape)
    start, end = (
        min(max(at + rank if at < 0 else at, 0), rank)
        for at in (call.attribute("start", 0), call.attribute("end", rank))
    )
    return Scalars(_array(shape[start:end]), torch.int64)


def _array(values: Any) -> Array:
    """An object array of numbers, which numpy does not look into."""
    made: Array = np.empty(len(values) if isinstance(values, list) else (), object)
    if not isinstance(values, list):
        made[()] = values
        return made
    for at, value in enumerate(values):
        made[at] = value
    return made


def _each(function: Callable[..., Any]) -> Callable[[Call], Array]:
    def rule(call: Call) -> Array:
        arrays = np.broadcast_arrays(*(call.scalars(at) for at in range(len(call.values)) if call.has(at)))
        out = np.empty(arrays[0].shape, object)
        for at in np.ndindex(out.shape):
            out[at] = function(*(array[at] for array in arrays))
        return out

    return rule


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, float | torch.SymFloat) or isinstance(b, float | torch.SymFloat):
        return a / b
    if isinstance(a, int) and isinstance(b, int):
        return int(math.copysign(abs(a) // abs(b), a * b)) if b else 0
    return a // b  # sizes are not negative


def _remainder(call: Call) -> Array:
    if not call.attribute("fmod"):
        return _each(operator.mod)(call)
    return _each(lambda a, b: math.fmod(a, b) if isinstance(a, float) else a - b * _divide(a, b))(call)


def _to_int(value: Any) -> Any:
    value = known(value) if isinstance(value, torch.SymBool) else value
    return torch.sym_int(value) if isinstance(value, torch.SymFloat) else value if _is_int(value) else int(value)


def known(test: Any) -> bool:
    """The value of a test of sizes. PyTorch answers tests of a size that varies as if it were never 1, without a word."""
    if isinstance(test, torch.SymBool):
        expression = test.node.expr
        if bool(expression.subs(dict.fromkeys(expression.free_symbols, 1))) != bool(test):
            raise Unsupported("it depends on whether a size that varies is 1")
    return bool(test)


def _is_int(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _cast(call: Call) -> Array | None:
    kind = torch_dtype(call.attribute("to"))
    call.read.add("saturate")  # of FP8
    if call.attribute("to") in NIBBLES or (kind.is_floating_point and kind.itemsize == 1):
        return None
    if kind is torch.bool:
        return _each(bool)(call)
    if kind.is_floating_point:
        return _each(lambda value: torch.sym_float(value))(call)
    return _each(_to_int)(call)


def _gather(call: Call) -> Array:
    return np.take(call.scalars(0), call.scalars(1).astype(np.int64), axis=call.attribute("axis"))


def _slice(call: Call) -> Array:
    data = call.scalars(0)
    starts, ends = call.numbers(1), call.numbers(2)
    axes = call.numbers(3) if call.has(3) else range(len(starts))
    steps = call.numbers(4) if call.has(4) else [1] * len(starts)
    cut = [slice(None)] * data.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        cut[axis] = cut_of(start, end, step, data.shape[axis])
    return data[tuple(cut)]


def cut_of(start: int, end: int, step: int, size: int) -> slice:
    """Python's slice for one of ONNX, whose starts and ends are clamped to the size."""
    start, end = (at + size if at < 0 else at for at in (start, end))
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step) if start > end else slice(0, 0)


def _power(call: Call) -> Array | None:
    if any(isinstance(item, int) and item < 0 for item in call.numbers(1)):
        return None
    return _each(operator.pow)(call)


def _reshape(call: Call) -> Array | None:
    sizes = call.numbers(1)
    if 0 in sizes or not all(isinstance(size, int) for size in sizes):
        return None
    call.read.add("allowzero")
    return call.scalars(0).reshape(sizes)


def _squeeze(call: Call) -> Array:
    return np.squeeze(call.scalars(0), tuple(call.numbers(1)) if call.has(1) else None)


def _range(call: Call) -> Array | None:
    start, limit, delta = (call.number(at) for at in range(3))
    if not all(isinstance(item, int | float) for item in (start, limit, delta)):
        return None
    count = max(math.ceil((limit - start) / delta), 0)
    return _array([start + at * delta for at in range(count)]) if count <= _SMALL else None


def _full(shape: list[Any], value: Any) -> Array | None:
    if not all(isinstance(size, int) for size in shape) or math.prod(shape) > _SMALL:
        return None
    out = np.empty(shape, object)
    out[...] = value
    return out


def _constant_of_shape(call: Call) -> Array | None:
    from onnx import numpy_helper

    given = call.attribute("value")
    return _full(call.numbers(0), 0.0 if given is None else numpy_helper.to_array(given).reshape(-1)[0].item())


def _expand(call: Call) -> Array | None:
    shape = call.numbers(1)
    if not all(isinstance(size, int) for size in shape) or math.prod(shape) > _SMALL:
        return None
    data = call.scalars(0)
    return np.broadcast_to(data, np.broadcast_shapes(data.shape, tuple(shape))).copy()


def _reduce(function: Callable[[Any, Any], Any]) -> Callable[[Call], Array | None]:
    def rule(call: Call) -> Array | None:
        data = call.scalars(0)
        axes = tuple(call.numbers(1)) if call.has(1) else ()
        if not axes and call.attribute("noop_with_empty_axes"):
            return None
        axes = axes or tuple(range(data.ndim))
        if data.ndim != 1 or axes not in ((0,), (-1,)):
            return None
        keep = call.attribute("keepdims")
        if not data.size:
            return None
        found = functools.reduce(function, data)
        return _array([found] if keep else found)

    return rule


def _split(call: Call) -> list[Array]:
    data, axis = call.scalars(0), call.attribute("axis")
    count = call.attribute("num_outputs") or len(call.node.output)
    sizes = call.numbers(1) if call.has(1) else equal_parts(data.shape[axis], count)
    return [np.array(part) for part in np.split(data, np.cumsum(sizes)[:-1].astype(int).tolist(), axis)]


def equal_parts(size: Any, count: int) -> list[Any]:
    """The sizes of that many parts, the last one smaller where they cannot be equal."""
    part = (size + count - 1) // count
    return [part] * (count - 1) + [size - part * (count - 1)]


_COMPARISONS = {
    "Equal": operator.eq, "Less": operator.lt, "LessOrEqual": operator.le, "Greater": operator.gt,
    "GreaterOrEqual": operator.ge, "And": lambda a, b: known(a) and known(b), "Or": lambda a, b: known(a) or known(b),
    "Not": lambda a: not known(a),
}  # fmt: skip
_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Sub": operator.sub, "Mul": operator.mul, "Div": _divide, "Neg": operator.neg, "Abs": abs,
    "Min": lambda *a: functools.reduce(torch.sym_min, a), "Max": lambda *a: functools.reduce(torch.sym_max, a),
    "Sqrt": torch.sym_sqrt,
    "Floor": lambda a: torch.sym_float(math.floor(a)), "Ceil": lambda a: torch.sym_float(math.ceil(a)),
    "Reciprocal": lambda a: 1.0 / a, "Where": lambda c, a, b: a if known(c) else b,
} | _COMPARISONS  # fmt: skip
_RULES: dict[str, Callable[[Call], Any]] = {name: _each(function) for name, function in _ELEMENTWISE.items()} | {
    "Cast": _cast, "Mod": _remainder, "Pow": _power, "Gather": _gather, "Slice": _slice, "Squeeze": _squeeze,
    "Range": _range, "Split": _split,
    "Identity": lambda call: call.scalars(0), "Expand": _expand, "ConstantOfShape": _constant_of_shape,
    "Unsqueeze": lambda call: np.expand_dims(call.scalars(0), tuple(call.numbers(1))),
    "Concat": lambda call: np.concatenate(
        [call.scalars(at) for at in range(len(call.values))], axis=call.attribute("axis")
    ),
    "Reshape": _reshape, "ReduceProd": _reduce(operator.mul), "ReduceSum": _reduce(operator.add),
    "ReduceMax": _reduce(torch.sym_max), "ReduceMin": _reduce(torch.sym_min),
}  # fmt: skip

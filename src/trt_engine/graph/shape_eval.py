"""Evaluates shape arithmetic on small values: what exporters write between Shape and Reshape."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from trt_engine.arrayfiles import Array

MAX_ELEMENTS = 8192
"""Maximum elements of a tensor whose value is propagated."""
CONSTANT_DTYPES = {
    "value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32,
}  # fmt: skip
"""Numeric attributes of Constant other than `value`."""


class KnownTensor(Protocol):
    """What `fold_node` reads of an input."""

    @property
    def shape(self) -> tuple[int, ...] | None: ...
    @property
    def value(self) -> Array | None:
        """The values, in the tensor's shape and dtype; None if unknown."""

    @property
    def is_static(self) -> bool: ...


def fold_node(
    op: str, attrs: Mapping[str, Any], inputs: Sequence[KnownTensor | None], count: int
) -> list[Array] | None:
    """Values of the outputs, in the shapes and dtypes that ONNX defines; None if unknown or too large."""
    if op == "Constant":
        return _constant(attrs)
    if op in ("Shape", "Size"):
        return _shape_or_size(op, attrs, inputs)
    rule = _RULES.get(op)
    if rule is None or any(item is not None and item.value is None for item in inputs):
        return None
    values = [None if item is None else item.value for item in inputs]
    try:
        with np.errstate(all="ignore"):
            if op in _BROADCAST:
                _check_size(math.prod(np.broadcast_shapes(*(value.shape for value in values if value is not None))))
            made = rule(values, attrs, count)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError):
        return None  # a damaged graph is reported elsewhere
    results = [np.asarray(item) for item in (made if isinstance(made, list) else [made])]
    return None if any(item.size > MAX_ELEMENTS for item in results) else results


def fold_elements(
    op: str,
    attrs: Mapping[str, Any],
    inputs: Sequence[KnownTensor | None],
    count: int,
    compute: Mapping[str, Callable[..., Any]],
) -> list[Array] | None:
    """`fold_node` for arrays of dtype object, as shapes are where some sizes have no number: elements are moved whatever
    they are, and `compute` has what operators do with single ones. Indices, axes and sizes must be numbers."""
    if op in compute:
        wide = np.broadcast_arrays(*(item.value for item in inputs if item is not None and item.value is not None))
        rows = zip(*(item.reshape(-1).tolist() for item in wide), strict=True)
        return [object_array([compute[op](*row) for row in rows], wide[0].shape)]
    return fold_node(op, attrs, inputs, count) if op in MOVING else None


def object_array(items: Sequence[Any], shape: tuple[int, ...]) -> Array:
    """An array of this shape and of dtype object; numpy does not look into its items."""
    made = np.empty(len(items), object)
    for at, item in enumerate(items):
        made[at] = item
    return made.reshape(shape)


def _constant(attrs: Mapping[str, Any]) -> list[Array] | None:
    tensor = attrs.get("value")
    try:
        for name, kind in CONSTANT_DTYPES.items():
            if name in attrs:
                array = np.array(attrs[name], kind)
                return [array] if array.size <= MAX_ELEMENTS else None
        if not isinstance(tensor, TensorProto) or tensor.data_location == TensorProto.EXTERNAL:
            return None
        if math.prod(tuple(tensor.dims)) > MAX_ELEMENTS:
            return None
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError, RuntimeError, OverflowError):
        return None
    return None if array.dtype == object else [array]


def _shape_or_size(op: str, attrs: Mapping[str, Any], inputs: Sequence[KnownTensor | None]) -> list[Array] | None:
    if not inputs or inputs[0] is None or inputs[0].shape is None or not inputs[0].is_static:
        return None
    shape = inputs[0].shape
    if any(size >= 1 << 62 for size in shape):
        return None
    if op == "Size":
        total = math.prod(shape)
        return [np.array(total, np.int64)] if total < 1 << 62 else None
    return [np.array(shape[attrs.get("start", 0) : attrs.get("end")], np.int64)]


def _check_size(elements: int) -> None:
    if elements > MAX_ELEMENTS:
        raise ValueError("larger than what is followed")


def _axes(values: Sequence[Any], attrs: Mapping[str, Any], at: int = 1) -> tuple[int, ...] | None:
    if len(values) > at and values[at] is not None:
        return tuple(int(axis) for axis in values[at].reshape(-1))
    return tuple(attrs["axes"]) if "axes" in attrs else None


def _gather(values: Sequence[Any], attrs: Mapping[str, Any], _: int) -> Array:
    data, indices, axis = values[0], values[1], attrs.get("axis", 0)
    _check_size(indices.size * data.size // max(data.shape[axis], 1))
    return np.asarray(np.take(data, indices, axis=axis))


def _concat(values: Sequence[Any], attrs: Mapping[str, Any], _: int) -> Array:
    _check_size(sum(value.size for value in values))
    return np.concatenate(values, axis=attrs.get("axis", 0))


def _slice(values: Sequence[Any], attrs: Mapping[str, Any], _: int) -> Array:
    data: Array = values[0]
    if len(values) > 1:
        starts, ends = values[1].tolist(), values[2].tolist()
        axes = values[3].tolist() if len(values) > 3 and values[3] is not None else list(range(len(starts)))
        steps = values[4].tolist() if len(values) > 4 and values[4] is not None else [1] * len(starts)
    else:
        starts, ends = list(attrs["starts"]), list(attrs["ends"])
        axes, steps = list(attrs.get("axes", range(len(starts)))), [1] * len(starts)
    cut: list[Any] = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0 and end < -data.shape[axis]:
            end = None  # includes the first element
        cut[axis] = slice(start, end, step)
    return np.asarray(data[tuple(cut)])


def _divide(values: Sequence[Any], _: Mapping[str, Any], __: int) -> Array:
    a, b = values
    if np.issubdtype(a.dtype, np.integer):
        if not np.all(b):
            raise ZeroDivisionError
        quotient = a // b
        return np.asarray(quotient + ((quotient < 0) & (quotient * b != a)))  # towards zero
    return np.asarray(a / b)


def _range(values: Sequence[Any], _: Mapping[str, Any], __: int) -> Array:
    start, stop, step = (value.reshape(-1)[0].item() for value in values)
    _check_size(int(abs((stop - start) / step)) + 1)
    return np.arange(start, stop, step, dtype=values[0].dtype)


def _constant_of_shape(values: Sequence[Any], attrs: Mapping[str, Any], _: int) -> Array:
    sizes = [int(size) for size in values[0]]
    _check_size(math.prod(sizes))
    fill = numpy_helper.to_array(attrs["value"]) if "value" in attrs else np.zeros(1, np.float32)
    return np.full(sizes, fill.reshape(-1)[0], fill.dtype)


def _reshape(values: Sequence[Any], attrs: Mapping[str, Any], _: int) -> Array:
    data, wanted = values[0], [int(size) for size in values[1]]
    if not attrs.get("allowzero"):
        wanted = [data.shape[at] if size == 0 else size for at, size in enumerate(wanted)]
    return np.asarray(data.reshape(wanted))


def _expand(values: Sequence[Any], _: Mapping[str, Any], __: int) -> Array:
    shape = np.broadcast_shapes(values[0].shape, tuple(int(size) for size in values[1]))
    _check_size(math.prod(shape))
    return np.broadcast_to(values[0], shape).copy()


def _tile(values: Sequence[Any], _: Mapping[str, Any], __: int) -> Array:
    _check_size(values[0].size * math.prod(values[1].tolist()))
    return np.tile(values[0], values[1])


def _reduce(function: Callable[..., Any]) -> Callable[[Sequence[Any], Mapping[str, Any], int], Array]:
    def rule(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
        axes = _axes(values, given)
        if not axes and given.get("noop_with_empty_axes"):
            return np.asarray(values[0])
        made = function(values[0], axis=axes or None, keepdims=bool(given.get("keepdims", 1)))
        return np.asarray(made).astype(values[0].dtype)

    return rule


def _split(values: Sequence[Any], attrs: Mapping[str, Any], count: int) -> list[Array]:
    data, axis = values[0], attrs.get("axis", 0)
    sizes = values[1].tolist() if len(values) > 1 and values[1] is not None else list(attrs.get("split", ()))
    if sizes:
        return list(np.split(data, np.cumsum(sizes)[:-1].tolist(), axis))
    each = -(-data.shape[axis] // count)
    return list(np.split(data, [each * at for at in range(1, count)], axis))


def _scatter_nd(values: Sequence[Any], attrs: Mapping[str, Any], _: int) -> Array:
    if attrs.get("reduction", b"none") not in (b"none", "none"):
        raise ValueError("a reduction is not followed")
    made: Array = values[0].copy()
    for at in np.ndindex(*values[1].shape[:-1]):
        made[tuple(values[1][at])] = values[2][at]
    return made


def _cumulative_sum(values: Sequence[Any], attrs: Mapping[str, Any], _: int) -> Array:
    if attrs.get("exclusive") or attrs.get("reverse"):
        raise ValueError("not followed")
    return np.asarray(np.cumsum(values[0], int(values[1].reshape(-1)[0])).astype(values[0].dtype))


def _binary(function: Callable[[Any, Any], Any]) -> Callable[[Sequence[Any], Mapping[str, Any], int], Array]:
    return lambda values, given, count: np.asarray(function(values[0], values[1]))


def _unary(function: Callable[[Any], Any]) -> Callable[[Sequence[Any], Mapping[str, Any], int], Array]:
    return lambda values, given, count: np.asarray(function(values[0]))


_RULES: dict[str, Callable[[Sequence[Any], Mapping[str, Any], int], Array | list[Array]]] = {
    "Identity": _unary(np.asarray),
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "Unsqueeze": lambda v, given, _: np.expand_dims(v[0], _axes(v, given) or ()),
    "Squeeze": lambda v, given, _: np.squeeze(v[0], _axes(v, given)),
    "Cast": lambda v, given, _: np.asarray(v[0]).astype(helper.tensor_dtype_to_np_dtype(given["to"])),
    "Add": _binary(operator.add),
    "Sub": _binary(operator.sub),
    "Mul": _binary(operator.mul),
    "Div": _divide,
    "Mod": lambda v, given, _: np.fmod(*v) if given.get("fmod") else np.mod(*v),
    "Neg": _unary(operator.neg),
    "Abs": _unary(np.abs),
    "Floor": _unary(np.floor),
    "Ceil": _unary(np.ceil),
    "Round": _unary(np.round),
    "Sqrt": _unary(np.sqrt),
    "Reciprocal": _unary(lambda a: 1 / a),
    "Pow": lambda v, given, _: np.asarray(np.power(v[0], v[1])).astype(v[0].dtype),
    "Min": lambda v, given, _: np.asarray(functools.reduce(np.minimum, v)),
    "Max": lambda v, given, _: np.asarray(functools.reduce(np.maximum, v)),
    "Equal": _binary(operator.eq),
    "Less": _binary(operator.lt),
    "Greater": _binary(operator.gt),
    "LessOrEqual": _binary(operator.le),
    "GreaterOrEqual": _binary(operator.ge),
    "And": _binary(np.logical_and),
    "Or": _binary(np.logical_or),
    "Not": _unary(np.logical_not),
    "Where": lambda v, given, _: np.where(v[0], v[1], v[2]),
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Reshape": _reshape,
    "Expand": _expand,
    "Tile": _tile,
    "Transpose": lambda v, given, _: np.transpose(v[0], given.get("perm")),
    "NonZero": lambda v, given, _: np.array(np.nonzero(v[0]), np.int64),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "CumSum": _cumulative_sum,
    "Split": _split,
    "ScatterND": _scatter_nd,
}
FOLDABLE_OPS = frozenset((*_RULES, "Constant", "Shape", "Size"))
"""The operators that `fold_node` evaluates."""
MOVING = frozenset("Identity Gather Slice Concat Squeeze Unsqueeze Reshape Split Expand Tile Transpose".split())
"""Operators that move the elements of their first input (Concat: of all), whatever these are."""
_BROADCAST = frozenset(
    "Add Sub Mul Div Mod Pow Min Max Equal Less Greater LessOrEqual GreaterOrEqual And Or Where".split()
)

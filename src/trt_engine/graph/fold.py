"""The arithmetic that shapes are computed with, on small values: what an exporter writes between Shape and Reshape."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, helper, numpy_helper

__all__ = ["LARGEST", "fold"]

LARGEST = 8192
"""Elements of the largest tensor whose value is followed."""

Array = npt.NDArray[Any]


class Known(Protocol):
    """What fold reads of an input."""

    @property
    def shape(self) -> tuple[int, ...] | None: ...
    @property
    def value(self) -> Array | None: ...
    @property
    def sized(self) -> bool: ...


def fold(op: str, given: Mapping[str, Any], inputs: Sequence[Known | None], count: int) -> list[Array] | None:
    """The outputs' values, or None when they are not known or not small."""
    if op == "Constant":
        return _constant(given)
    if op in ("Shape", "Size"):
        return _measure(op, given, inputs)
    rule = _RULES.get(op)
    if rule is None or any(item is not None and item.value is None for item in inputs):
        return None
    values = [None if item is None else item.value for item in inputs]
    try:
        with np.errstate(all="ignore"):
            if op in _BROADCAST:
                _bounded(math.prod(np.broadcast_shapes(*(value.shape for value in values if value is not None))))
            made = rule(values, given, count)
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, ZeroDivisionError, AttributeError):
        return None  # a damaged graph: it is not this function that reports it
    results = [np.asarray(item) for item in (made if isinstance(made, list) else [made])]
    return None if any(item.size > LARGEST for item in results) else results


def _constant(given: Mapping[str, Any]) -> list[Array] | None:
    for name, kind in (("value_int", np.int64), ("value_float", np.float32)):
        if name in given:
            return [np.array(given[name], kind)]
    for name, kind in (("value_ints", np.int64), ("value_floats", np.float32)):
        if name in given and len(given[name]) <= LARGEST:
            return [np.array(list(given[name]), kind)]
    tensor = given.get("value")
    if not isinstance(tensor, TensorProto) or tensor.data_location == TensorProto.EXTERNAL:
        return None
    if math.prod(tuple(tensor.dims)) > LARGEST:
        return None
    try:
        array = numpy_helper.to_array(tensor)
    except (ValueError, TypeError, KeyError):
        return None
    return None if array.dtype == object else [array]


def _measure(op: str, given: Mapping[str, Any], inputs: Sequence[Known | None]) -> list[Array] | None:
    if not inputs or inputs[0] is None or inputs[0].shape is None or not inputs[0].sized:
        return None
    shape = inputs[0].shape
    if any(size >= 1 << 62 for size in shape):
        return None
    if op == "Size":
        total = math.prod(shape)
        return [np.array(total, np.int64)] if total < 1 << 62 else None
    return [np.array(shape[given.get("start", 0) : given.get("end")], np.int64)]


def _bounded(elements: int) -> None:
    if elements > LARGEST:
        raise ValueError("larger than what is followed")


def _axes(values: Sequence[Any], given: Mapping[str, Any], at: int = 1) -> tuple[int, ...] | None:
    if len(values) > at and values[at] is not None:
        return tuple(int(axis) for axis in values[at].reshape(-1))
    return tuple(given["axes"]) if "axes" in given else None


def _gather(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    data, indices, axis = values[0], values[1], given.get("axis", 0)
    _bounded(indices.size * data.size // max(data.shape[axis], 1))
    return np.asarray(np.take(data, indices, axis=axis))


def _slice(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    data: Array = values[0]
    if len(values) > 1:
        starts, ends = values[1].tolist(), values[2].tolist()
        axes = values[3].tolist() if len(values) > 3 and values[3] is not None else list(range(len(starts)))
        steps = values[4].tolist() if len(values) > 4 and values[4] is not None else [1] * len(starts)
    else:
        starts, ends = list(given["starts"]), list(given["ends"])
        axes, steps = list(given.get("axes", range(len(starts)))), [1] * len(starts)
    cut: list[Any] = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 0 and end < -data.shape[axis]:
            end = None  # down to and with the first element
        cut[axis] = slice(start, end, step)
    return np.asarray(data[tuple(cut)])


def _unsqueeze(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    axes = _axes(values, given) or ()
    return np.expand_dims(values[0], tuple(axes))


def _squeeze(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    return np.asarray(np.squeeze(values[0], _axes(values, given)))


def _cast(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    return np.asarray(values[0]).astype(helper.tensor_dtype_to_np_dtype(given["to"]))


def _divide(values: Sequence[Any], _: Mapping[str, Any], __: int) -> Array:
    a, b = values
    if np.issubdtype(a.dtype, np.integer):
        if not np.all(b):
            raise ZeroDivisionError
        return np.asarray(np.trunc(a / b).astype(a.dtype))
    return np.asarray(a / b)


def _mod(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    return np.asarray(np.fmod(*values) if given.get("fmod") else np.mod(*values))


def _range(values: Sequence[Any], _: Mapping[str, Any], __: int) -> Array:
    start, stop, step = (value.reshape(-1)[0] for value in values)
    _bounded(int(abs((stop - start) / step)) + 1)
    return np.arange(start, stop, step, dtype=values[0].dtype)


def _filled(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    sizes = [int(size) for size in values[0]]
    _bounded(math.prod(sizes))
    fill = numpy_helper.to_array(given["value"]) if "value" in given else np.zeros(1, np.float32)
    return np.full(sizes, fill.reshape(-1)[0], fill.dtype)


def _reshape(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    data, wanted = values[0], [int(size) for size in values[1]]
    if not given.get("allowzero"):
        wanted = [data.shape[at] if size == 0 else size for at, size in enumerate(wanted)]
    return np.asarray(data.reshape(wanted))


def _expand(values: Sequence[Any], _: Mapping[str, Any], __: int) -> Array:
    shape = np.broadcast_shapes(values[0].shape, tuple(int(size) for size in values[1]))
    _bounded(math.prod(shape))
    return np.broadcast_to(values[0], shape).copy()


def _tile(values: Sequence[Any], _: Mapping[str, Any], __: int) -> Array:
    _bounded(values[0].size * math.prod(values[1]))
    return np.tile(values[0], values[1])


def _reduce(function: Callable[..., Any]) -> Callable[[Sequence[Any], Mapping[str, Any], int], Array]:
    def rule(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
        axes = _axes(values, given)
        if not axes and given.get("noop_with_empty_axes"):
            return np.asarray(values[0])
        made = function(values[0], axis=axes or None, keepdims=bool(given.get("keepdims", 1)))
        return np.asarray(made).astype(values[0].dtype)

    return rule


def _split(values: Sequence[Any], given: Mapping[str, Any], count: int) -> list[Array]:
    data, axis = values[0], given.get("axis", 0)
    sizes = values[1].tolist() if len(values) > 1 and values[1] is not None else list(given.get("split", ()))
    if sizes:
        return list(np.split(data, np.cumsum(sizes)[:-1].tolist(), axis))
    each = -(-data.shape[axis] // count)
    return list(np.split(data, [each * at for at in range(1, count)], axis))


def _scatter_nd(values: Sequence[Any], given: Mapping[str, Any], _: int) -> Array:
    if given.get("reduction", b"none") not in (b"none", "none"):
        raise ValueError("a reduction is not followed")
    made: Array = values[0].copy()
    for at in np.ndindex(*values[1].shape[:-1]):
        made[tuple(values[1][at])] = values[2][at]
    return made


def _two(function: Callable[[Any, Any], Any]) -> Callable[[Sequence[Any], Mapping[str, Any], int], Array]:
    return lambda values, given, count: np.asarray(function(values[0], values[1]))


def _one(function: Callable[[Any], Any]) -> Callable[[Sequence[Any], Mapping[str, Any], int], Array]:
    return lambda values, given, count: np.asarray(function(values[0]))


_RULES: dict[str, Callable[[Sequence[Any], Mapping[str, Any], int], Array | list[Array]]] = {
    "Identity": _one(np.asarray),
    "Gather": _gather,
    "Concat": lambda v, given, _: np.concatenate(v, axis=given.get("axis", 0)),
    "Slice": _slice,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Cast": _cast,
    "Add": _two(operator.add),
    "Sub": _two(operator.sub),
    "Mul": _two(operator.mul),
    "Div": _divide,
    "Mod": _mod,
    "Neg": _one(operator.neg),
    "Abs": _one(np.abs),
    "Floor": _one(np.floor),
    "Ceil": _one(np.ceil),
    "Round": _one(np.round),
    "Sqrt": _one(np.sqrt),
    "Pow": lambda v, given, _: np.asarray(np.power(v[0], v[1])).astype(v[0].dtype),
    "Min": lambda v, given, _: np.asarray(np.minimum.reduce(np.broadcast_arrays(*v))),
    "Max": lambda v, given, _: np.asarray(np.maximum.reduce(np.broadcast_arrays(*v))),
    "Equal": _two(operator.eq),
    "Less": _two(operator.lt),
    "Greater": _two(operator.gt),
    "LessOrEqual": _two(operator.le),
    "GreaterOrEqual": _two(operator.ge),
    "And": _two(np.logical_and),
    "Or": _two(np.logical_or),
    "Not": _one(np.logical_not),
    "Where": lambda v, given, _: np.where(v[0], v[1], v[2]),
    "Range": _range,
    "ConstantOfShape": _filled,
    "Reshape": _reshape,
    "Expand": _expand,
    "Tile": _tile,
    "Transpose": lambda v, given, _: np.transpose(v[0], given.get("perm")),
    "NonZero": lambda v, given, _: np.array(np.nonzero(v[0]), np.int64),
    "ReduceProd": _reduce(np.prod),
    "ReduceSum": _reduce(np.sum),
    "ReduceMax": _reduce(np.max),
    "ReduceMin": _reduce(np.min),
    "CumSum": lambda v, given, _: (
        np.cumsum(v[0], int(v[1].reshape(-1)[0])).astype(v[0].dtype)
        if not given.get("exclusive") and not given.get("reverse")
        else _refuse()
    ),
    "Split": _split,
    "ScatterND": _scatter_nd,
}

_BROADCAST = frozenset(
    "Add Sub Mul Div Mod Pow Min Max Equal Less Greater LessOrEqual GreaterOrEqual And Or Where".split()
)


def _refuse() -> Array:
    raise ValueError("not followed")

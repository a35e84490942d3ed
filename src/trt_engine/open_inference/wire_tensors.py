"""Tensors as the Open Inference Protocol sends them: little-endian bytes, or lists of values."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.errors import FeedError, UsageError
from trt_engine.tensors import DTYPES, Shape, TensorSpec

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    item.kserve_name: np.dtype(ml_dtypes.bfloat16 if item.name == "bfloat16" else item.name)
    for item in DTYPES.values()
    if item.kserve_name is not None and item.name != "string"
}
"""numpy's dtype by protocol name; `BYTES` is not one of them."""
_PROTOCOL_NAMES = {item.name: item.kserve_name for item in DTYPES.values()}
_ALIGNMENT = 64
_MAX_NBYTES = 2**63 - 1
_LENGTH = struct.Struct("<I")
_MAX_VALUES = 1 << 22
"""Values of an output in JSON: each takes some fifty bytes until it is sent."""
PART = 1 << 14
"""Values that are encoded at once, while other threads wait."""
_MAX_STRINGS, _MAX_TEXT = 1 << 21, 1 << 26
"""Strings of a tensor, and their bytes: in memory each takes some hundred bytes, or four for each letter."""


def protocol_dtype(spec: TensorSpec) -> str:
    """The protocol's name of a tensor's dtype; `UsageError` for one that the protocol does not have."""
    name = _PROTOCOL_NAMES[spec.dtype]
    if name is None:
        raise UsageError(
            f"`{spec.name}` is {spec.dtype}, which the protocol cannot send", hint="an engine with a cast at its ends"
        )
    return name


def aligned_buffer(nbytes: int, header: int = 0) -> memoryview:
    """Memory for `nbytes`, placed so that what follows the first `header` bytes is aligned to 64 bytes."""
    raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -(raw.__array_interface__["data"][0] + header) % _ALIGNMENT
    return raw[start : start + nbytes].data


def check_sizes(name: str, shape: Sequence[int], rank: int) -> None:
    """`FeedError` for a client's shape with another number of dimensions, a negative size or more than 2^63 bytes in all.

    Stands before everything that computes with the sizes or prints them.
    """
    if len(shape) != rank:
        raise FeedError(f"input `{name}` has {len(shape)} dimensions, expected {rank}")
    if any(size < 0 for size in shape):
        raise FeedError(f"input `{name}` has a negative size", hint="sizes of 0 or more")
    if any(size > _MAX_NBYTES for size in shape) or math.prod(max(size, 1) for size in shape) > _MAX_NBYTES // 16:
        raise FeedError(f"input `{name}` has a shape of more than 2^63 bytes", hint="smaller sizes")


def decode_tensor(name: str, datatype: str, shape: Shape, data: Any) -> Array:
    """The tensor of these bytes, in place where they are aligned; `FeedError` unless they are exactly its bytes."""
    if datatype == "BYTES":
        return _decode_strings(name, math.prod(shape), memoryview(data)).reshape(shape)
    check_nbytes(name, datatype, shape, len(data))
    array = np.frombuffer(data, NUMPY_DTYPES[datatype])
    if not array.flags.aligned:
        array = array.copy()
    return array.reshape(shape)


def check_nbytes(name: str, datatype: str, shape: Shape, nbytes: int) -> None:
    """`FeedError` unless a tensor of numbers has this many bytes."""
    expected = math.prod(shape) * NUMPY_DTYPES[datatype].itemsize
    if nbytes != expected:
        raise FeedError(
            f"input `{name}` has {nbytes} bytes, expected {expected}", hint=f"{datatype} of the shape {[*shape]}"
        )


def _decode_strings(name: str, count: int, data: memoryview) -> Array:
    if count > _MAX_STRINGS or len(data) > _MAX_TEXT:
        raise FeedError(
            f"input `{name}` has {count} strings of {len(data)} bytes, {_MAX_STRINGS} of {_MAX_TEXT} are allowed",
            hint="smaller requests",
        )
    if len(data) < 4 * count:
        raise FeedError(
            f"input `{name}` has {len(data)} bytes for {count} strings", hint="each has a length of 4 bytes"
        )
    found, position = np.empty(count, object), 0
    for index in range(count):
        end = position + 4
        if end <= len(data):
            end += _LENGTH.unpack_from(data, position)[0]
        if end > len(data) or end < position + 4:
            raise FeedError(f"input `{name}` ends inside string {index} of {count}", hint="a length, then its bytes")
        found[index] = decode_text(name, data[position + 4 : end])
        position = end
    if position != len(data):
        raise FeedError(
            f"input `{name}` has {len(data) - position} bytes after its last string", hint=f"{count} strings"
        )
    return found


def decode_text(name: str, raw: Any) -> str:
    """The text of these bytes; `FeedError` unless they are UTF-8, as engines expect."""
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise FeedError(f"input `{name}` has a string that is not UTF-8", hint="encode text as UTF-8") from None


def encode_tensor(array: Array, datatype: str) -> memoryview | bytes:
    """The bytes of a tensor: a view of its memory, without a copy where it is contiguous."""
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(raw)) + raw for raw in map(encode_text, array.reshape(-1).tolist()))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def encode_text(value: Any) -> bytes:
    """A string element as bytes."""
    return value if isinstance(value, bytes) else str(value).encode()


_RANGES = {name: np.iinfo(dtype) for name, dtype in NUMPY_DTYPES.items() if dtype.kind in "iu"}


def from_values(name: str, datatype: str, shape: Shape, values: Sequence[Any]) -> Array:
    """The tensor of a flat list of values that have the right kind; `FeedError` for a wrong number or range."""
    count = math.prod(shape)
    if len(values) != count:
        raise FeedError(f"input `{name}` has {len(values)} values, expected {count}", hint=f"its shape is {[*shape]}")
    if datatype == "BYTES":
        array = np.empty(count, object)
        array[:] = [value if isinstance(value, str) else decode_text(name, value) for value in values]
        return array.reshape(shape)
    limits = _RANGES.get(datatype)
    if limits is not None and count and not (min(values) >= limits.min and max(values) <= limits.max):
        raise FeedError(f"input `{name}` has a value outside {datatype}", hint=f"{limits.min} to {limits.max}")
    try:
        with np.errstate(over="raise"):
            return np.array(values, NUMPY_DTYPES[datatype]).reshape(shape)
    except FloatingPointError:
        raise FeedError(f"input `{name}` has a value outside {datatype}", hint="a smaller one, or FP64") from None


def to_values(name: str, array: Array, datatype: str) -> Iterator[list[Any]]:
    """The values of a tensor in row-major order, for JSON, in parts; `UsageError` for a type without a JSON form."""
    if datatype in ("FP16", "BF16"):
        raise UsageError(
            f"output `{name}` is {datatype}, which has no JSON form", hint="ask for it with `binary_data`: true"
        )
    if array.size > _MAX_VALUES:
        raise UsageError(
            f"output `{name}` has {array.size} values, {_MAX_VALUES} are sent as JSON", hint="`binary_data`: true"
        )
    flat = array.reshape(-1)
    parts = (flat[start : start + PART].tolist() for start in range(0, flat.size, PART))
    return ([*map(_as_text, part)] for part in parts) if datatype == "BYTES" else parts


def _as_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def flatten(values: Iterable[Any], depth: int) -> Iterable[Any]:
    """The elements of lists nested `depth` deep."""
    for _ in range(depth - 1):
        values = [item for row in values for item in row]
    return values

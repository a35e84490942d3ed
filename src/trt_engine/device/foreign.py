"""Reads CUDA arrays of torch and CuPy without a DLPack capsule, and the handles of other libraries' streams.

A capsule with its stream objects and events takes torch some 60 us for each call; the same facts are four of its fields.
Nothing is kept between two calls: torch can change a tensor in place (`resize_`, `set_`, `.data =`), and Python reuses
ids. No library is imported here; a type is known only once its library is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from trt_engine.errors import UsageError

Reader: TypeAlias = Callable[[Any], int | None]
"""The address of an array, once the stream is ordered after its owner's current one. None for an array that only a capsule
describes: on another GPU, strided, or one the library refuses to export."""


@dataclass(frozen=True, slots=True)
class ArrayLibrary:
    """How the arrays of a library are read."""

    reader: Callable[[int, Callable[[int], None]], Reader]
    """For a GPU's index, and a function that orders a stream after another one, given by its handle. The arrays are on a
    GPU (`index_of`)."""
    index_of: Callable[[Any], int]
    """The index of the array's GPU; negative for one on the host."""
    address_of: Callable[[Any], Callable[[], int]]
    """For an array, a function that returns its address now."""
    current_stream: Callable[[int], int]
    """The handle of the library's current stream on a GPU."""


_libraries: dict[type, ArrayLibrary] = {}


def library_of(kind: type) -> ArrayLibrary | None:
    """The library of arrays of exactly this type; None for types that are read through DLPack."""
    found = _libraries.get(kind)
    if found is not None:
        return found
    if (torch := sys.modules.get("torch")) is not None and kind is getattr(torch, "Tensor", None):
        found = _torch(torch)
    elif (cupy := sys.modules.get("cupy")) is not None and kind is getattr(cupy, "ndarray", None):
        found = _cupy(cupy)
    if found is not None:
        _libraries[kind] = found
    return found


def _torch(torch: Any) -> ArrayLibrary:
    # torch's own function beneath `torch.cuda.current_stream`, which makes an object of 2 us
    current = getattr(torch._C, "_cuda_getCurrentRawStream", None) or (
        lambda index: torch.cuda.current_stream(index).cuda_stream
    )

    def reader(index: int, order_after: Callable[[int], None]) -> Reader:
        def read(tensor: Any) -> int | None:
            if tensor.requires_grad or tensor.is_neg() or tensor.is_complex():
                return None
            try:
                if not tensor.is_contiguous() or tensor.get_device() != index:
                    return None
                pointer: int = tensor.data_ptr()
            except RuntimeError:  # sparse, or without storage
                return None
            order_after(current(index))
            return pointer

        return read

    def index_of(tensor: Any) -> int:
        return tensor.get_device() if tensor.is_cuda else -1

    return ArrayLibrary(reader, index_of, lambda tensor: tensor.data_ptr, current)


def _cupy(cupy: Any) -> ArrayLibrary:
    stream_on = cupy.cuda.get_current_stream

    def current(index: int) -> int:
        return stream_on(index).ptr  # type: ignore[no-any-return]

    def reader(index: int, order_after: Callable[[int], None]) -> Reader:
        def read(array: Any) -> int | None:
            memory = array.data
            if not array.flags.c_contiguous or memory.device_id != index:
                return None
            order_after(stream_on(index).ptr)
            return memory.ptr  # type: ignore[no-any-return]

        return read

    return ArrayLibrary(reader, lambda array: array.data.device_id, lambda array: lambda: array.data.ptr, current)


def stream_handle(stream: Any) -> int:
    """The `cudaStream_t` of a stream of torch, CuPy, this package or another library, or of its integer.

    Raises `UsageError` for anything else.
    """
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    if hasattr(stream, "__cuda_stream__"):
        described = stream.__cuda_stream__
        return int((described() if callable(described) else described)[1])
    for name in ("cuda_stream", "ptr", "handle"):  # torch, CuPy, this package's other devices
        if isinstance(found := getattr(stream, name, None), int):
            return found
    raise UsageError(
        f"a {type(stream).__name__} is not a stream",
        hint="expected a stream of torch or CuPy, an object with `__cuda_stream__`, or a `cudaStream_t` as an integer",
    )

"""CUDA device and pinned host buffers, and their views."""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trt_engine.device import dlpack
from trt_engine.device.host import BufferOwner, Bytes, check_range, view_as
from trt_engine.errors import UsageError

if TYPE_CHECKING:
    from trt_engine.device.cuda.device import CudaDevice
    from trt_engine.device.cuda.stream import CudaStream


DroppedBuffer: TypeAlias = tuple[bool, int, int]
"""A buffer dropped without `close`: whether it is pinned, its address and its size."""


class CudaBuffer:
    """GPU memory."""

    on_host = False
    # defaults of the class: buffers are made in each request
    _closed = False
    _parent: CudaBuffer | None = None
    _finalizer: weakref.finalize[..., CudaBuffer] | None = None

    def __init__(self, device: CudaDevice, pointer: int, nbytes: int, stream: CudaStream | None = None) -> None:
        self.device = device
        self.stream = stream
        self._nbytes = nbytes
        self._pointer = pointer
        self.external_streams: set[int] = set()

    def register_finalizer(self) -> None:
        """Free the memory with this buffer: on close, or some time after it is dropped."""
        self._exported: list[bool] = []
        self._finalizer = weakref.finalize(
            self, self.device._on_drop, (self.on_host, self._pointer, self._nbytes), self._exported
        )
        self._finalizer.atexit = False

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def pointer(self) -> int:
        if self._closed or (self._parent is not None and self._parent.closed):
            raise UsageError("a freed buffer was used", hint="keep it open until the stream is done with it")
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._closed or (self._parent is not None and self._parent.closed)

    def view(self, offset: int, nbytes: int) -> CudaBuffer:
        if not 0 <= offset <= offset + nbytes <= self._nbytes:
            check_range(offset, nbytes, self._nbytes)
        return CudaView(self, offset, nbytes)

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Any:
        _ = self.pointer
        self.mark_exported()
        if self.on_host:
            raw = (ctypes.c_uint8 * max(self._nbytes, 1)).from_address(self._pointer)
            memory: Bytes = np.ctypeslib.as_array(raw)[: self._nbytes]
            return view_as(np.asarray(BufferOwner(self, memory)), dtype, shape)
        return dlpack.device_array(self, dtype, shape, dlpack.CUDA, self.device.number)

    def mark_exported(self) -> None:
        """Mark as exported: dropping it with its arrays is not a leak."""
        if self._finalizer is not None and not self._exported:
            self._exported.append(True)

    def close(self) -> None:
        self._closed = True
        if self._finalizer is not None and self._finalizer.detach() is not None:
            self.device._free(self)


class CudaHostBuffer(CudaBuffer):
    """Pinned host memory."""

    on_host = True

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = super().array(dtype, shape)
        return array


class CudaView(CudaBuffer):
    """A slice of a buffer, valid as long as it."""

    def __init__(self, parent: CudaBuffer, offset: int, nbytes: int) -> None:
        self.device, self.stream, self.on_host = parent.device, parent.stream, parent.on_host
        if parent._closed or parent._parent is not None:
            _ = parent.pointer  # raises for freed memory
        self._pointer, self._nbytes = parent._pointer + offset, nbytes
        self.external_streams = parent.external_streams
        self._parent: CudaBuffer = parent

    def mark_exported(self) -> None:
        self._parent.mark_exported()

    def close(self) -> None:
        self._closed = True


class BorrowedBuffer(CudaBuffer):
    """Another library's memory, kept alive until `close`."""

    def __init__(self, device: CudaDevice, pointer: int, nbytes: int, lender: Any) -> None:
        super().__init__(device, pointer, nbytes)
        self._lender = lender

    def close(self) -> None:
        self._closed = True
        self._lender = None

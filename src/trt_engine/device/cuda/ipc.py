"""GPU memory of other processes on this host, opened by its IPC handle (`cudaIpcGetMemHandle`)."""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import TYPE_CHECKING, Any

from trt_engine.device.cuda.driver_calls import RelaxedCapture, Result, status_text
from trt_engine.device.cuda.memory import CudaBuffer
from trt_engine.errors import SetupError, UsageError

if TYPE_CHECKING:
    from trt_engine.device.cuda.device import CudaDevice

log = logging.getLogger(__name__)

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which calls take by value; cuda.bindings exposes its bytes under names that changed."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class SharedBuffer(CudaBuffer):
    """Memory that another process allocated. It is unmapped once this buffer, its views and their arrays are dropped."""

    def __init__(self, device: CudaDevice, library: Any, pointer: int, nbytes: int) -> None:
        super().__init__(device, pointer, nbytes)
        self._finalizer = weakref.finalize(self, _unmap, device, library, pointer)
        self._finalizer.atexit = False

    def mark_exported(self) -> None:
        """Dropping it, with arrays or without, leaks nothing."""

    def close(self) -> None:
        """Unmap it now: nothing may use it any more."""
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()


def open_shared(device: CudaDevice, handle: bytes, nbytes: int) -> SharedBuffer:
    """The first `nbytes` of the allocation with this handle, of another process.

    Raises `UsageError` for a handle the driver refuses (this process's own, an allocation that was freed, another GPU's),
    and where the allocation is smaller.
    """
    if len(handle) != HANDLE_BYTES:
        raise UsageError(f"the handle has {len(handle)} bytes, expected {HANDLE_BYTES}", hint="a `cudaIpcMemHandle_t`")
    library = _library()
    pointer, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
    with device.activate(), RelaxedCapture():
        status = library.cuIpcOpenMemHandle_v2(
            ctypes.byref(pointer), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        if status:
            raise UsageError(
                f"the handle cannot be opened on `{device.name}`: {_text(status)}",
                hint="of memory that another process on this host allocated there with `cudaMalloc` and still has",
            )
        buffer = SharedBuffer(device, library, pointer.value, nbytes)
        status = library.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), pointer)
    there = 0 if status else base.value + size.value - pointer.value
    if nbytes > there:
        buffer.close()
        raise UsageError(f"the region has {nbytes} bytes, the allocation {there}", hint="a smaller `byte_size`")
    return buffer


def _library() -> Any:
    try:
        library = ctypes.CDLL("libcuda.so.1")
        _ = library.cuIpcOpenMemHandle_v2, library.cuIpcCloseMemHandle, library.cuMemGetAddressRange_v2
    except (OSError, AttributeError) as error:
        raise SetupError(f"the NVIDIA driver has no IPC: {error}", hint="`trt-engine doctor`") from error
    return library


def _text(status: int) -> str:
    try:
        return status_text(Result(status))
    except ValueError:  # newer than cuda.bindings
        return f"CUDA error {status}"


def _unmap(device: CudaDevice, library: Any, pointer: int) -> None:
    """Never raises: a finalizer."""
    try:
        with device.activate(allow_lost=True), RelaxedCapture():
            if status := library.cuIpcCloseMemHandle(ctypes.c_uint64(pointer)):
                log.debug("shared memory on `%s` could not be unmapped: %s", device.name, _text(status))
    except Exception as error:
        log.debug("shared memory on `%s` could not be unmapped: %s", device.name, error)

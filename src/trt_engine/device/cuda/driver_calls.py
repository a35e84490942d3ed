"""Calls of the CUDA driver: status codes as errors, relaxed capture, prebound calls."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cuda.bindings import driver

from trt_engine.errors import SetupError, TrtEngineError

if TYPE_CHECKING:
    from trt_engine.device.cuda.device import CudaDevice


Result = driver.CUresult
SUCCESS = Result.CUDA_SUCCESS
OUT_OF_MEMORY = Result.CUDA_ERROR_OUT_OF_MEMORY


# cuda.h: sticky errors, returned by every later call of the process
FATAL = frozenset(
    getattr(Result, f"CUDA_ERROR_{name}")
    for name in (
        "ILLEGAL_ADDRESS LAUNCH_FAILED HARDWARE_STACK_ERROR ILLEGAL_INSTRUCTION MISALIGNED_ADDRESS INVALID_ADDRESS_SPACE "
        "INVALID_PC ASSERT LAUNCH_TIMEOUT ECC_UNCORRECTABLE NVLINK_UNCORRECTABLE CONTEXT_IS_DESTROYED DEVICE_UNAVAILABLE "
        "DEVICE_NOT_LICENSED EXTERNAL_DEVICE DEINITIALIZED CONTAINED UNKNOWN"
    ).split()
    if hasattr(Result, f"CUDA_ERROR_{name}")
)
CAPTURE_ERROR_PREFIX = "CUDA_ERROR_STREAM_CAPTURE"
RELAXED_MODE = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED


def device_count() -> int:
    """The number of visible GPUs; `SetupError` without a driver."""
    try:
        (status,) = driver.cuInit(0)
        if status == Result.CUDA_ERROR_NO_DEVICE:
            return 0
        if status == SUCCESS:
            status, count = driver.cuDeviceGetCount()
    except RuntimeError as error:  # cuda.pathfinder's DynamicLibNotFoundError, or a symbol the driver lacks
        raise SetupError(
            f"no NVIDIA driver was found: {error}",
            hint="install one (`nvidia-smi` then answers), in a container start it with `--gpus all`; or `--device cpu`",
        ) from error
    if status != SUCCESS:
        raise SetupError(
            f"the NVIDIA driver does not start: {status_text(status)}",
            hint="`nvidia-smi` shows driver and GPUs; a driver older than cuda-bindings needs an older `cuda-bindings`",
        )
    return int(count)


def status_text(status: Any) -> str:
    """As `an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS)`."""
    failed, described = driver.cuGetErrorString(status)
    text = described.decode() if failed == SUCCESS and described else "unknown error"
    return f"{text} ({getattr(status, 'name', status)})"


class ContextGuard:
    """Makes the device's context current and restores the previous one; translates CUDA errors."""

    __slots__ = ("_device", "_pushed")

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._pushed = False

    def __enter__(self) -> None:
        _, current = driver.cuCtxGetCurrent()
        if int(current) != self._device._context_handle:
            (status,) = driver.cuCtxPushCurrent(self._device._context)
            if status != SUCCESS:
                raise self._device._translate_status(status)
            self._pushed = True

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._pushed:
            driver.cuCtxPopCurrent()
        if not isinstance(error, Exception) or isinstance(error, TrtEngineError):
            return
        if found := re.search(r"CUDA_ERROR_\w+", str(error)):  # cuda.core's errors have no public class
            raise self._device._translate_status(getattr(Result, found[0], found[0])) from error


class RelaxedCapture:
    """Relaxed capture mode for the calling thread. Otherwise its waits, allocations and event queries would invalidate
    captures of other threads in "global" mode, which torch and ONNX Runtime use (seen on an H200).
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        _, self._before = driver.cuThreadExchangeStreamCaptureMode(RELAXED_MODE)

    def __exit__(self, *_: object) -> None:
        if self._before is not None:  # None if the driver refused
            driver.cuThreadExchangeStreamCaptureMode(self._before)


def _unavailable(*_: Any) -> int:
    return -1


def _load(library: str, name: str, *types: Any) -> Callable[..., int]:
    """A driver call through ctypes that returns a status, 0 for success; -1 always without the library.

    Through cuda.bindings, with context and capture mode, a call of the hot path takes up to six calls of 1 us or more. On
    another status the caller falls back to cuda.bindings. Calls that may wait release the GIL.
    """
    try:
        found = getattr((ctypes.CDLL if name in _MAY_WAIT else ctypes.PyDLL)(library), name)
    except (OSError, AttributeError):
        return _unavailable
    found.argtypes = types
    return found  # type: ignore[no-any-return]


_MAY_WAIT = ("cuStreamSynchronize", "cuMemcpyAsync", "cuMemcpyBatchAsync", "cuGraphLaunch")
_LIBRARY, _ADDRESS = "libcuda.so.1", ctypes.c_void_p

exchange_mode = _load(_LIBRARY, "cuThreadExchangeStreamCaptureMode", _ADDRESS)
"""Exchanges the capture mode of this thread for that of a `ctypes.c_int`, given by reference."""
synchronize_stream = _load(_LIBRARY, "cuStreamSynchronize", _ADDRESS)
copy_async = _load(_LIBRARY, "cuMemcpyAsync", _ADDRESS, _ADDRESS, ctypes.c_size_t, _ADDRESS)
"""Target, source, bytes, stream; the driver may refuse in a thread with no or another context."""
_copy_batch = _load(
    _LIBRARY, "cuMemcpyBatchAsync", *[_ADDRESS] * 3, ctypes.c_size_t, *[_ADDRESS] * 2, ctypes.c_size_t, *[_ADDRESS] * 2
)
launch_graph = _load(_LIBRARY, "cuGraphLaunch", _ADDRESS, _ADDRESS)
"""Graph, stream."""
record_event = _load(_LIBRARY, "cuEventRecord", _ADDRESS, _ADDRESS)
"""Event, stream."""
wait_event = _load(_LIBRARY, "cuStreamWaitEvent", _ADDRESS, _ADDRESS, ctypes.c_uint)
"""Stream, event, 0."""


class _CopyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: access to the sources, hints of places, flags."""

    _fields_ = (("order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


_READ_DURING_CALL = ctypes.byref(_CopyAttributes(order=2))
_FROM_FIRST = ctypes.byref(ctypes.c_size_t(0))


def copy_all(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int) -> int:
    """Copies of these sizes in bytes, in any order among themselves, in one call, which reads host memory before it returns.

    The status: 0 for success, -1 for a driver before CUDA 12.8, which has no such call.
    """
    count, failed = len(sizes), ctypes.c_size_t()
    addresses, lengths = _ADDRESS * count, ctypes.c_size_t * count
    return _copy_batch(
        addresses(*targets), addresses(*sources), lengths(*sizes), count,
        _READ_DURING_CALL, _FROM_FIRST, 1, ctypes.byref(failed), stream,
    )  # fmt: skip

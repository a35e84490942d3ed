"""NVIDIA's driver, queried before TensorRT: without a driver, some of TensorRT's objects crash when used.

Calls `libcuda` alone, through ctypes: needs no CUDA toolkit and no other package.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trt_engine.device import parse_device
from trt_engine.errors import MemoryExhausted, SetupError, UsageError

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, cuda.h
_ERROR_REASONS = {  # CUresult, cuda.h
    3: ("the driver shuts down", "start the program again"),
    34: ("the driver is a stub", "a link-time stub of libcuda is on the loader path: take `.../stubs` out of it"),
    35: ("the driver is older than the CUDA it serves", "install a newer driver; `trt-engine doctor` names the oldest"),
    46: ("the device is unavailable now", "another process holds it exclusively: `nvidia-smi`"),
    100: (
        "no GPU was found",
        "`nvidia-smi` must list one; in a container: `--gpus all`; `CUDA_VISIBLE_DEVICES` hides them",
    ),
    101: ("the GPU does not exist", "`nvidia-smi` lists the GPUs; `CUDA_VISIBLE_DEVICES` hides some"),
    802: ("the system is not initialised", "start NVIDIA's fabric manager: `systemctl start nvidia-fabricmanager`"),
    803: (
        "the driver and its user-space library are of different versions",
        "reboot after a driver update, or take `cuda-compat` off the loader path",
    ),
    804: ("forward compatibility is not supported on this GPU", "take `cuda-compat` off the loader path"),
    999: ("an unknown error", "`nvidia-smi` and `dmesg` may show more; a reboot helps after a driver update"),
}


@dataclass(frozen=True, slots=True)
class TargetGpu:
    """The GPU a build is for, as reported by the driver."""

    index: int
    name: str
    compute_capability: str
    """As `9.0`; empty for the fake device."""
    memory_bytes: int

    @property
    def architecture(self) -> str:
        """`sm_90`; `fake` for the fake device."""
        return f"sm_{self.compute_capability.replace('.', '')}" if self.compute_capability else "fake"


def find_gpu(device: str) -> TargetGpu:
    """The GPU behind `cuda:0`; `SetupError` where driver or GPU are missing. `fake:0` needs neither."""
    kind, number = parse_device(device)
    if kind == "fake":
        return TargetGpu(number, "fake", "", 0)
    if kind != "cuda":
        raise UsageError(f"TensorRT does not build for `{device}`", hint="`--device cuda:0`")
    return _read_gpu(number)


@functools.cache
def _read_gpu(number: int) -> TargetGpu:
    driver = _driver()
    count = ctypes.c_int()
    _check(driver.cuDeviceGetCount(ctypes.byref(count)), "counting the GPUs")
    if number >= count.value:
        raise SetupError(
            f"the GPU `cuda:{number}` does not exist, this process sees {count.value}",
            hint="`nvidia-smi` lists them; `CUDA_VISIBLE_DEVICES` hides some",
        )
    handle, name = _device(driver, number), ctypes.create_string_buffer(256)
    _check(driver.cuDeviceGetName(name, len(name), handle), "reading the GPU's name")
    major, minor, nbytes = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    _check(driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle), "reading the compute capability")
    _check(driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle), "reading the compute capability")
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), handle), "reading the GPU's memory")
    return TargetGpu(number, name.value.decode(errors="replace"), f"{major.value}.{minor.value}", nbytes.value)


@contextlib.contextmanager
def current_device(device: str) -> Iterator[None]:
    """Makes `device` this thread's GPU inside: TensorRT uses the calling thread's current one."""
    kind, number = parse_device(device)
    if kind != "cuda":
        yield
        return
    driver, before = _driver(), ctypes.c_void_p()
    _check(driver.cuCtxPushCurrent_v2(_primary_context(number)), f"choosing `{device}`")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(before))


def call_on_device(device: str, call: Callable[[int], bool]) -> Callable[[int], bool]:
    """Wraps `call` to run with `device` as this thread's GPU; costs one driver query if it already is.

    Without it TensorRT would enqueue on the calling thread's GPU instead of the stream's.
    """
    kind, number = parse_device(device)
    if kind != "cuda":
        return call
    context, driver = _primary_context(number), _driver()
    quick = ctypes.PyDLL(driver._name, handle=driver._handle)  # keeps the GIL: these calls take nanoseconds
    home, look, push, pop = context.value, quick.cuCtxGetCurrent, quick.cuCtxPushCurrent_v2, quick.cuCtxPopCurrent_v2

    def there(handle: int) -> bool:
        now = ctypes.c_void_p()
        if look(ctypes.byref(now)) == 0 and now.value == home:
            return call(handle)
        _check(push(context), f"choosing `{device}`")
        try:
            return call(handle)
        finally:
            pop(ctypes.byref(now))

    return there


def synchronize(stream: int) -> None:
    """Wait for a stream of the current device, given by its handle."""
    _check(_driver().cuStreamSynchronize(ctypes.c_void_p(stream)), "waiting for a stream")


class DriverMemory:
    """A GPU's memory, allocated and freed directly by the driver, as in TensorRT's own allocator.

    The builder chooses tactics by free memory, which a caching pool would reduce.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> _DriverAllocation:
        pointer, driver = ctypes.c_uint64(), _driver()
        with current_device(self.device):
            status = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        if status == _OUT_OF_MEMORY:
            raise MemoryExhausted(
                f"`{self.device}` has no {nbytes} bytes left", hint="`nvidia-smi` shows who has them; a smaller profile"
            )
        _check(status, f"allocating {nbytes} bytes")
        return _DriverAllocation(self.device, pointer.value)


@dataclass
class _DriverAllocation:
    device: str
    pointer: int

    def close(self) -> None:
        """Free it; the driver waits for work that uses it. Idempotent."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            with current_device(self.device):
                _check(_driver().cuMemFree_v2(ctypes.c_uint64(pointer)), "giving memory back")


# ------------------------------------------------------------------------------------------------ libcuda

_OUT_OF_MEMORY = 2  # CUresult, cuda.h
_LOCK = threading.Lock()
_LOADED: list[Any] = []


def _driver() -> Any:
    """The initialized libcuda; `SetupError` with the reason otherwise. Failures are not cached."""
    with _LOCK:
        if _LOADED:
            return _LOADED[0]
        library = _library()
        _check(library.cuInit(0), "starting NVIDIA's driver")
        _LOADED.append(library)
        return library


def _library() -> Any:
    said = ""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            said = said or str(error)
    raise SetupError(
        f"NVIDIA's driver is not installed: {said}",
        hint="install the driver, or give the container the GPU (`--gpus all`); `trt-engine doctor` looks for the rest",
    )


@functools.cache
def _primary_context(number: int) -> ctypes.c_void_p:
    """The GPU's primary context, shared with the CUDA runtime; retained for the life of the process."""
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), _device(driver, number)), f"opening `cuda:{number}`")
    return context


def _device(driver: Any, number: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(handle), number), f"opening `cuda:{number}`")
    return handle


def _check(result: int, action: str) -> None:
    if result == 0:
        return
    why, hint = _ERROR_REASONS.get(
        result, (f"CUDA error {result}", "`nvidia-smi` and `trt-engine doctor` may show more")
    )
    raise SetupError(f"{action} failed: {why} (CUDA error {result})", hint=hint)

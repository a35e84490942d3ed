"""NVIDIA's driver, queried before TensorRT: without a driver, some of TensorRT's objects crash when used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass

from trt_engine.device import parse_device
from trt_engine.device.cuda.libcuda import Driver
from trt_engine.errors import SetupError, UsageError

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, cuda.h
_driver = functools.cache(Driver)  # a failure is not kept


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
    driver, count = _driver(), c_int()
    driver.call("cuDeviceGetCount", byref(count), action="counting the GPUs")
    if number >= count.value:
        raise SetupError(
            f"the GPU `cuda:{number}` does not exist, this process sees {count.value}",
            hint="`nvidia-smi` lists them; `CUDA_VISIBLE_DEVICES` hides some",
        )
    handle, name = driver.device(number), ctypes.create_string_buffer(256)
    driver.call("cuDeviceGetName", name, len(name), handle, action="reading the GPU's name")
    parts = major, minor = c_int(), c_int()
    for part, attribute in zip(parts, (_MAJOR, _MINOR), strict=True):
        driver.call("cuDeviceGetAttribute", byref(part), attribute, handle, action="reading the compute capability")
    nbytes = c_size_t()
    driver.call("cuDeviceTotalMem_v2", byref(nbytes), handle, action="reading the GPU's memory")
    return TargetGpu(number, name.value.decode(errors="replace"), f"{major.value}.{minor.value}", nbytes.value)


@contextlib.contextmanager
def current_device(device: str) -> Iterator[None]:
    """Makes `device` this thread's GPU inside: TensorRT uses the calling thread's current one."""
    kind, number = parse_device(device)
    with _driver().current(_primary_context(number)) if kind == "cuda" else contextlib.nullcontext():
        yield


def call_on_device(device: str, call: Callable[[int], bool]) -> Callable[[int], bool]:
    """Wraps `call` to run with `device` as this thread's GPU; costs one driver query if it already is.

    Without it TensorRT would enqueue on the calling thread's GPU instead of the stream's.
    """
    kind, number = parse_device(device)
    if kind != "cuda":
        return call
    context, driver = _primary_context(number), _driver()
    quick = ctypes.PyDLL(driver.library._name, handle=driver.library._handle)  # keeps the GIL: nanoseconds
    home, look = context.value, quick.cuCtxGetCurrent

    def there(handle: int) -> bool:
        now = c_void_p()
        if look(byref(now)) == 0 and now.value == home:
            return call(handle)
        with driver.current(context):
            return call(handle)

    return there


def synchronize(stream: int) -> None:
    """Wait for a stream of the current device, given by its handle."""
    _driver().call("cuStreamSynchronize", c_void_p(stream), action="waiting for a stream")


class DriverMemory:
    """A GPU's memory, allocated and freed directly by the driver, as in TensorRT's own allocator.

    The builder chooses tactics by free memory, which a caching pool would reduce.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> _DriverAllocation:
        pointer, action = c_uint64(), f"allocating {nbytes} bytes on `{self.device}`"
        with current_device(self.device):
            _driver().call("cuMemAlloc_v2", byref(pointer), c_size_t(nbytes), action=action)
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
                _driver().call("cuMemFree_v2", c_uint64(pointer), action="giving memory back")


@functools.cache
def _primary_context(number: int) -> c_void_p:
    """The GPU's primary context; retained for the life of the process."""
    return _driver().primary_context(number)

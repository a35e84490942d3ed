"""NVIDIA's driver, asked before TensorRT is: without one, some of TensorRT's objects look whole and crash when used.

Only `libcuda` itself is called, through ctypes: no CUDA toolkit and no other package is needed to give an answer.
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

__all__ = ["Board", "Memory", "board", "check_driver", "current", "on_device", "synchronize"]

_LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR, cuda.h
_WHY = {  # CUresult, cuda.h
    3: ("the driver shuts down", "start the program again"),
    34: ("the driver is a stub", "a link-time stub of libcuda lies on the loader path: take `.../stubs` out of it"),
    35: ("the driver is older than the CUDA it serves", "install a newer driver; `trt-engine doctor` names the oldest"),
    46: ("the device cannot be had now", "another process holds it exclusively: `nvidia-smi`"),
    100: (
        "there is no GPU",
        "`nvidia-smi` must list one; in a container: `--gpus all`; `CUDA_VISIBLE_DEVICES` hides them",
    ),
    101: ("there is no such GPU", "`nvidia-smi` lists those there are; `CUDA_VISIBLE_DEVICES` hides some"),
    802: ("the system is not initialised", "start NVIDIA's fabric manager: `systemctl start nvidia-fabricmanager`"),
    803: (
        "the driver and its user-space library are of different versions",
        "reboot after a driver update, or take `cuda-compat` off the loader path",
    ),
    804: ("forward compatibility is not supported on this GPU", "take `cuda-compat` off the loader path"),
    999: ("an unknown error", "`nvidia-smi` and `dmesg` may say more; a reboot helps after a driver update"),
}


@dataclass(frozen=True, slots=True)
class Board:
    """The GPU a build is for, as the driver tells it."""

    index: int
    name: str
    compute_capability: str
    """As `9.0`; empty for the fake device."""
    memory_bytes: int

    @property
    def architecture(self) -> str:
        """`sm_90`; `fake` for the fake device."""
        return f"sm_{self.compute_capability.replace('.', '')}" if self.compute_capability else "fake"


def check_driver(device: str) -> None:
    """`SetupError` with what to do, unless the driver answers and has this device. Nothing is asked for `fake:`."""
    board(device)


def board(device: str) -> Board:
    """The GPU behind `cuda:0`; `SetupError` where driver or GPU are missing. `fake:0` is no GPU and needs none."""
    kind, number = parse_device(device)
    if kind == "fake":
        return Board(number, "fake", "", 0)
    if kind != "cuda":
        raise UsageError(f"TensorRT does not build for `{device}`", hint="`--device cuda:0`")
    return _board(number)


@functools.cache
def _board(number: int) -> Board:
    driver = _driver()
    count = ctypes.c_int()
    _check(driver.cuDeviceGetCount(ctypes.byref(count)), "counting the GPUs")
    if number >= count.value:
        raise SetupError(
            f"there is no GPU `cuda:{number}`, this process sees {count.value}",
            hint="`nvidia-smi` lists them; `CUDA_VISIBLE_DEVICES` hides some",
        )
    handle, name = _device(driver, number), ctypes.create_string_buffer(256)
    _check(driver.cuDeviceGetName(name, len(name), handle), "asking the GPU's name")
    major, minor, nbytes = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    _check(driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, handle), "asking the compute capability")
    _check(driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, handle), "asking the compute capability")
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(nbytes), handle), "asking the GPU's memory")
    return Board(number, name.value.decode(errors="replace"), f"{major.value}.{minor.value}", nbytes.value)


@contextlib.contextmanager
def current(device: str) -> Iterator[None]:
    """This thread's GPU is `device` inside: TensorRT works on the one current in the thread that calls it."""
    kind, number = parse_device(device)
    if kind != "cuda":
        yield
        return
    driver, before = _driver(), ctypes.c_void_p()
    _check(driver.cuCtxPushCurrent_v2(_primary(number)), f"choosing `{device}`")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(before))


def on_device(device: str, call: Callable[[int], bool]) -> Callable[[int], bool]:
    """`call` with this thread's GPU being `device`: at the cost of one look where it is that already.

    Threads of callers have their own GPU, or none: TensorRT would enqueue on another one than the stream's.
    """
    kind, number = parse_device(device)
    if kind != "cuda":
        return call
    context, driver = _primary(number), _driver()
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


class Memory:
    """A GPU's memory, taken from the driver and given back to it at once, as TensorRT's own allocator does.

    A builder looks at what is free to choose tactics: a pool that keeps what was freed would cost it some.
    """

    def __init__(self, device: str) -> None:
        self.device = device

    def allocate(self, nbytes: int) -> _Block:
        pointer, driver = ctypes.c_uint64(), _driver()
        with current(self.device):
            status = driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        if status == _OUT_OF_MEMORY:
            raise MemoryExhausted(
                f"`{self.device}` has no {nbytes} bytes left", hint="`nvidia-smi` shows who has them; a smaller profile"
            )
        _check(status, f"allocating {nbytes} bytes")
        return _Block(self.device, pointer.value)


@dataclass
class _Block:
    device: str
    pointer: int

    def close(self) -> None:
        """Give it back; the driver waits for the work that uses it. A second time does nothing."""
        pointer, self.pointer = self.pointer, 0
        if pointer:
            with current(self.device):
                _check(_driver().cuMemFree_v2(ctypes.c_uint64(pointer)), "giving memory back")


# ------------------------------------------------------------------------------------------------ libcuda

_OUT_OF_MEMORY = 2  # CUresult, cuda.h
_LOCK = threading.Lock()
_OPEN: list[Any] = []


def _driver() -> Any:
    """libcuda, initialised; `SetupError` saying why where it cannot be. A failure is asked again, not remembered."""
    with _LOCK:
        if _OPEN:
            return _OPEN[0]
        library = _library()
        _check(library.cuInit(0), "starting NVIDIA's driver")
        _OPEN.append(library)
        return library


def _library() -> Any:
    said = ""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            said = said or str(error)
    raise SetupError(
        f"NVIDIA's driver is not here: {said}",
        hint="install the driver, or give the container the GPU (`--gpus all`); `trt-engine doctor` looks for the rest",
    )


@functools.cache
def _primary(number: int) -> ctypes.c_void_p:
    """The context CUDA's runtime shares on that GPU; it is kept as long as the process."""
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), _device(driver, number)), f"opening `cuda:{number}`")
    return context


def _device(driver: Any, number: int) -> ctypes.c_int:
    handle = ctypes.c_int()
    _check(driver.cuDeviceGet(ctypes.byref(handle), number), f"opening `cuda:{number}`")
    return handle


def _check(result: int, doing: str) -> None:
    if result == 0:
        return
    why, hint = _WHY.get(result, (f"CUDA error {result}", "`nvidia-smi` and `trt-engine doctor` may say more"))
    raise SetupError(f"{doing} failed: {why} (CUDA error {result})", hint=hint)

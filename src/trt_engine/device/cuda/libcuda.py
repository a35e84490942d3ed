"""NVIDIA's driver through ctypes: needs no CUDA toolkit and no other package. Failed calls are errors with the way out.

`open_cuda_device` opens a CUDA device, or explains what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_uint, c_void_p
from importlib import metadata, util
from typing import TYPE_CHECKING, Any

from trt_engine.errors import DeviceLost, MemoryExhausted, SetupError, UsageError

if TYPE_CHECKING:
    from trt_engine.device.cuda.device import CudaDevice

LIBRARIES = ("libcuda.so.1", "libcuda.so", "nvcuda.dll")
CONTEXT_LOST = re.compile(
    "ILLEGAL|MISALIGNED|LAUNCH_FAILED|LAUNCH_TIMEOUT|HARDWARE|ECC|INVALID_PC|illegal|misaligned|unspecified launch"
)
"""Sticky CUDA errors, by name or text: every later call of the process fails too."""
_OUT_OF_MEMORY = 2  # CUresult, cuda.h
_REASONS = {  # CUresult, cuda.h
    3: ("the driver shuts down", "start the program again"),
    34: ("the driver is a stub", "a link-time stub of libcuda is on the loader path: take `.../stubs` out of it"),
    35: ("the driver is older than the CUDA it serves", "install a newer driver; `trt-engine doctor` names the oldest"),
    46: ("the device is unavailable now", "another process holds it exclusively: `nvidia-smi`"),
    100: (
        "no GPU was found",
        "`nvidia-smi` must list one; in a container: `docker run --gpus all`; `CUDA_VISIBLE_DEVICES` hides them",
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


class Driver:
    """The initialized driver; `SetupError` with the reason where it is not installed or does not start."""

    def __init__(self, libraries: Sequence[str] = LIBRARIES) -> None:
        self.library = _load(libraries)
        self.call("cuInit", c_uint(0), action="starting NVIDIA's driver")

    def call(self, name: str, *arguments: Any, action: str = "") -> None:
        """One call; `MemoryExhausted`, `DeviceLost` or `SetupError` if it fails, by what it was for (`action`)."""
        function = getattr(self.library, name, None)
        if function is None:
            raise SetupError(f"the NVIDIA driver has no `{name}`", hint="install a newer driver")
        if status := function(*arguments):
            raise self._error(status, action or f"`{name}`")

    def _error(self, status: int, action: str) -> SetupError | MemoryExhausted | DeviceLost:
        text = c_char_p()
        self.library.cuGetErrorName(c_int(status), byref(text))
        name = (text.value or b"").decode() or f"CUDA error {status}"
        if status == _OUT_OF_MEMORY:
            return MemoryExhausted(
                f"{action} failed for lack of memory ({name})",
                hint="`nvidia-smi` shows who has it; a smaller profile",
            )
        if CONTEXT_LOST.search(name):
            return DeviceLost(
                f"the GPU is lost: {action} failed ({name})",
                hint="start the process again; `nvidia-smi` shows the GPU",
            )
        why, hint = _REASONS.get(status, (name, "`nvidia-smi` and `trt-engine doctor` may show more"))
        return SetupError(f"{action} failed: {why} ({name})", hint=hint)

    def device(self, number: int) -> c_int:
        """The handle of `cuda:<number>`."""
        handle = c_int()
        self.call("cuDeviceGet", byref(handle), c_int(number), action=f"opening `cuda:{number}`")
        return handle

    def primary_context(self, number: int) -> c_void_p:
        """The GPU's primary context, shared with the CUDA runtime: retained until it is released."""
        context, handle = c_void_p(), self.device(number)
        self.call("cuDevicePrimaryCtxRetain", byref(context), handle, action=f"opening `cuda:{number}`")
        return context

    @contextlib.contextmanager
    def current(self, context: c_void_p) -> Iterator[None]:
        """Makes the context current in this thread; the previous one is restored on exit."""
        self.call("cuCtxPushCurrent_v2", context, action="choosing the GPU")
        try:
            yield
        finally:
            self.library.cuCtxPopCurrent_v2(byref(c_void_p()))


def _load(libraries: Sequence[str]) -> Any:
    reasons = []
    for name in libraries:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise SetupError(
        f"no NVIDIA driver was found: {reasons[0]}",
        hint="install it, or give the container the GPU (`--gpus all`); `trt-engine doctor` lists what is missing",
    )


_PACKAGES = {"cuda.core": "cuda-core>=0.5,<2", "cuda.bindings": "cuda-bindings>=12.9,<14"}


def open_cuda_device(number: int, limit_bytes: int | None = None) -> CudaDevice:
    """Open `cuda:<number>`; `SetupError` without packages, driver or GPU, `UsageError` for an index out of range."""
    if missing := [name for name in _PACKAGES if not _is_importable(name)]:
        packages = " ".join(f'"{_PACKAGES[name]}"' for name in missing)
        raise SetupError(
            f"memory on `cuda:{number}` needs {' and '.join(f'`{name}`' for name in missing)}, which "
            f"{'is' if len(missing) == 1 else 'are'} not installed",
            hint=f'`pip install "trt-engine[gpu]"`, or `{sys.executable} -m pip install {packages}`',
        )
    try:
        from trt_engine.device.cuda import device, driver_calls
    except (
        ImportError,
        RuntimeError,
        AttributeError,
    ) as error:  # an incompatible version, or a library that does not load
        raise SetupError(
            f"cuda-core {_version('cuda-core')} with cuda-bindings {_version('cuda-bindings')} does not load: {error}",
            hint="`pip install -U " + " ".join(f'"{need}"' for need in _PACKAGES.values()) + "`",
        ) from error
    count = driver_calls.device_count()
    if not count:
        raise SetupError(
            "the NVIDIA driver shows no GPU to this process",
            hint="`nvidia-smi -L` lists them; `CUDA_VISIBLE_DEVICES` hides them; in a container: `docker run --gpus all`",
        )
    if number >= count:
        here = ", ".join(f"`cuda:{index}`" for index in range(count))
        raise UsageError(
            f"there is no device `cuda:{number}`, available: {here}",
            hint="`nvidia-smi -L` lists them; they count from 0",
        )
    return device.CudaDevice(number, limit_bytes=limit_bytes)


def _is_importable(name: str) -> bool:
    try:
        return util.find_spec(name) is not None
    except ModuleNotFoundError:  # no package `cuda`
        return False


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(of unknown version)"

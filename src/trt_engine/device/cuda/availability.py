"""`open_cuda_device`: opens a CUDA device, or explains what is missing."""

from __future__ import annotations

import sys
from importlib import metadata, util
from typing import TYPE_CHECKING

from trt_engine.errors import SetupError, UsageError

if TYPE_CHECKING:
    from trt_engine.device.cuda.device import CudaDevice

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
            hint="`nvidia-smi -L` lists them; `CUDA_VISIBLE_DEVICES` hides them; in a container: `--gpus all`",
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

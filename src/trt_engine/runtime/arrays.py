"""Arrays as callers give them: numpy and DLPack on the host are read in place, those on the device are bound as they lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_engine.device import Device
from trt_engine.errors import FeedError

__all__ = ["admitted", "is_foreign"]

_ON_HOST = (1, 3)
"""DLPack's device types kDLCPU and kDLCUDAHost (dlpack.h)."""


def admitted(name: str, value: Any, device: Device | None) -> Any:
    """The value as a numpy array, or as it is where it lies on a device and there is one; nothing is copied or converted.

    `FeedError` where that cannot be.
    """
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if is_foreign(value):
        if device is None:
            raise FeedError(
                f"input `{name}` lies on a device, and cannot be read in place",
                hint="give it on the host: `.detach().cpu()`",
            )
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise FeedError(
                f"input `{name}` is a {type(value).__name__} without shape and type",
                hint="an array of torch, cupy, jax",
            )
        return value
    if not hasattr(value, "__dlpack__"):
        raise FeedError(
            f"input `{name}` is a {type(value).__name__}, expected an array",
            hint="`numpy.asarray(value, dtype=...)`: types are not guessed",
        )
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise FeedError(
            f"input `{name}` cannot be read in place: {error}", hint="give it on the host: `.detach().cpu()`"
        ) from error


def is_foreign(value: Any) -> bool:
    """Whether an array lies on a device of its own, by what it says of itself."""
    if isinstance(value, np.ndarray):
        return False
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) not in _ON_HOST
    return hasattr(value, "__cuda_array_interface__")

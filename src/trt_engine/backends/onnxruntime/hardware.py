"""What an optimised graph owes to the processor and the GPU it was made on."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from trt_engine.device import info, parse_device

__all__ = ["BLOCKED_DOMAIN", "architecture", "blocked_layout", "board", "layout_features"]

BLOCKED_DOMAIN = "com.microsoft.nchwc"
"""Convolutions whose weights were stored in blocks of channels."""


def blocked_layout() -> str:
    """The block ONNX Runtime's convolutions use here: `nchwc16` with AVX-512, `nchwc8` with AVX.

    A graph with weights in blocks of 8 is wrong, not slow, where 16 are read: more features do not help.
    Source: the choice of `NchwcBlockSize` in MLAS (onnxruntime/core/mlas/lib/platform.cpp of the public repository).
    """
    features = info.cpu().features
    if platform.machine() in ("x86_64", "AMD64"):
        return "nchwc16" if "avx512f" in features else "nchwc8" if "avx" in features else "nchw"
    return f"nchwc-{platform.machine()}"


def layout_features() -> tuple[str, ...]:
    """The instruction sets behind `blocked_layout`."""
    return {"nchwc16": ("avx512f",), "nchwc8": ("avx",)}.get(blocked_layout(), ())


def board(device: str, boards: Sequence[info.Gpu] | None = None) -> info.Gpu | None:
    """The GPU behind `cuda:0`; None for a CPU, and where NVML is not there to tell."""
    kind, number = parse_device(device)
    if kind != "cuda":
        return None
    return info.gpu(number, boards)


def architecture(found: info.Gpu | None) -> str:
    """`sm_90`; `sm_unknown` where NVML is not there to tell."""
    return f"sm_{found.compute_capability.replace('.', '')}" if found else "sm_unknown"

"""Hardware dependencies of an optimised graph: CPU layouts and GPU architecture."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from trt_engine.device import info, parse_device

BLOCKED_DOMAIN = "com.microsoft.nchwc"
"""Operator domain of convolutions with blocked weights."""


def blocked_layout() -> str:
    """The blocked layout of ONNX Runtime's convolutions here: `nchwc16` with AVX-512, `nchwc8` with AVX.

    A graph with another block size gives wrong results.
    Source: the choice of `NchwcBlockSize` in MLAS (onnxruntime/core/mlas/lib/platform.cpp of the public repository).
    """
    features = info.cpu().features
    if platform.machine() in ("x86_64", "AMD64"):
        return "nchwc16" if "avx512f" in features else "nchwc8" if "avx" in features else "nchw"
    return f"nchwc-{platform.machine()}"


def layout_features() -> tuple[str, ...]:
    """Instruction sets required by `blocked_layout`."""
    return {"nchwc16": ("avx512f",), "nchwc8": ("avx",)}.get(blocked_layout(), ())


def gpu_info(device: str, gpus: Sequence[info.Gpu] | None = None) -> info.Gpu | None:
    """The GPU of `cuda:0`; None for a CPU or without NVML."""
    kind, number = parse_device(device)
    if kind != "cuda":
        return None
    return info.gpu(number, gpus)


def sm_architecture(gpu: info.Gpu | None) -> str:
    """`sm_90`; `sm_unknown` without NVML."""
    return f"sm_{gpu.compute_capability.replace('.', '')}" if gpu else "sm_unknown"

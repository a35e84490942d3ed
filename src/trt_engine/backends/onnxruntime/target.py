"""Names of providers, and the quantisation target they come to: read without ONNX Runtime itself."""

from __future__ import annotations

from trt_engine.config import BuildConfig
from trt_engine.device import parse_device

__all__ = ["quant_target", "short_name"]

_ALIASES = {"trt": "tensorrt", "gpu": "cuda"}


def short_name(name: str) -> str:
    """Our name: `CUDAExecutionProvider` -> `cuda`."""
    low = name.strip().lower().removesuffix("executionprovider")
    return _ALIASES.get(low, low)


def quant_target(config: BuildConfig) -> str:
    """The quantisation target of the provider that is asked first; another one than these leaves it to the CPU's kernels."""
    first = short_name(config.providers[0]) if config.providers else parse_device(config.device)[0]
    return f"onnxruntime-{first if first in ('cuda', 'tensorrt') else 'cpu'}"

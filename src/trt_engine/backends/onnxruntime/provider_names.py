"""Provider names and their quantisation target, without importing ONNX Runtime."""

from __future__ import annotations

from trt_engine.config.build import BuildConfig
from trt_engine.device import parse_device

_ALIASES = {"trt": "tensorrt", "gpu": "cuda"} | dict.fromkeys(
    ("nvtensorrtrtx", "nv-tensorrt-rtx", "nv_tensorrt_rtx", "tensorrt_rtx", "trt-rtx", "rtx"), "tensorrt-rtx"
)


def short_name(name: str) -> str:
    """The short name: `CUDAExecutionProvider` -> `cuda`."""
    low = name.strip().lower().removesuffix("executionprovider")
    return _ALIASES.get(low, low)


def quant_target(config: BuildConfig) -> str:
    """The quantisation target of the first provider; `onnxruntime-cpu` for unknown providers."""
    first = short_name(config.providers[0]) if config.providers else parse_device(config.device)[0]
    kind = {"cuda": "cuda", "tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt"}.get(first, "cpu")
    return f"onnxruntime-{kind}"

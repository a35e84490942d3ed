"""The libraries that run a quantised graph, and what each wants of its Q/DQ pairs.

Explicit quantisation is one notation with several dialects: TensorRT takes signed, symmetric pairs at the inputs of its
layers; ONNX Runtime's CPU kernels take unsigned activations and fuse a layer only where its result is quantised too. A graph
placed for one of them runs on the other, but mostly in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.config import QUANT_TARGETS
from trt_engine.errors import UsageError
from trt_engine.tensors import closest

__all__ = ["METADATA_KEY", "QuantTarget", "quant_target"]

METADATA_KEY = "trt_engine.quant_target"
"""The key of `ModelProto.metadata_props` under which `quantize` writes the name of the target."""


ALL_FORMATS = ("int8", "fp8", "int4", "nvfp4", "mxfp8")
_OPERATORS_OF_ONNX = ("int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class QuantTarget:
    """What one library's INT8 kernels want of a graph."""

    name: str
    title: str
    """As in sentences: `ONNX Runtime's CPU provider`."""
    symmetric: bool
    """Zero points must be zeros."""
    results: bool
    """A layer is fused only where its result is quantised too."""
    formats: tuple[str, ...] = ALL_FORMATS
    """What `quantize` writes for it."""
    dynamic: bool = False
    """It has kernels that quantise activations to INT8 while running."""
    strong_typing: bool = True
    """The rules of TensorRT's strongly typed networks hold for its graphs."""


_TARGETS = {
    target.name: target
    for target in (
        QuantTarget("tensorrt", "TensorRT", symmetric=True, results=False),
        QuantTarget("tensorrt-rtx", "TensorRT-RTX", symmetric=True, results=False),
        QuantTarget(
            "onnxruntime-cpu", "ONNX Runtime's CPU provider", symmetric=False, results=True,
            formats=("int8", "int4"), dynamic=True, strong_typing=False,
        ),
        QuantTarget(
            "onnxruntime-cuda", "ONNX Runtime's CUDA provider", symmetric=True, results=False,
            formats=("int4",), strong_typing=False,
        ),
        QuantTarget(
            "onnxruntime-tensorrt", "ONNX Runtime's TensorRT provider", symmetric=True, results=False,
            formats=_OPERATORS_OF_ONNX,
        ),
    )
}  # fmt: skip
assert tuple(_TARGETS) == QUANT_TARGETS


def quant_target(name: str) -> QuantTarget:
    """The target of that name; `UsageError` naming the nearest one otherwise."""
    if name not in _TARGETS:
        raise UsageError(f"unknown quantisation target `{name}`", hint=closest(name, list(_TARGETS)))
    return _TARGETS[name]

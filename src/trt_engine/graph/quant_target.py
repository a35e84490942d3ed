"""Libraries that run a quantised graph, and the Q/DQ style each requires.

TensorRT takes signed, symmetric pairs at layer inputs; ONNX Runtime's CPU kernels take unsigned activations and fuse a
layer only if its result is quantised too. A graph placed for one runs on the other mostly in FP32.
"""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.config.precision import QUANT_TARGETS, QUANTIZED_PRECISIONS
from trt_engine.errors import UsageError
from trt_engine.tensors import suggest

METADATA_KEY = "trt_engine.quant_target"
"""Key of `ModelProto.metadata_props` that stores the target of `quantize`."""
_OPERATORS_OF_ONNX = ("int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class QuantTarget:
    """Requirements of a library's INT8 kernels."""

    name: str
    title: str
    """Name in messages: `ONNX Runtime's CPU provider`."""
    symmetric: bool
    """Zero points must be 0."""
    results: bool
    """A layer is fused only if its result is quantised too."""
    formats: tuple[str, ...] = QUANTIZED_PRECISIONS
    """Formats that `quantize` writes for it."""
    dynamic: bool = False
    """It has kernels that quantise activations to INT8 at run time."""
    strong_typing: bool = True
    """TensorRT's strong typing rules apply to its graphs."""


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
    """The target with that name; `UsageError` suggesting the nearest name otherwise."""
    if name not in _TARGETS:
        raise UsageError(f"unknown quantisation target `{name}`", hint=suggest(name, list(_TARGETS)))
    return _TARGETS[name]

"""The operators of our own that fusions put into a graph: linear layers, convolutions with Relu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn

from trt_engine.backends.inductor import onnx_module
from trt_engine.backends.inductor.linear import (
    ACTIVATIONS,
    BIAS,
    FACTORS,
    OUT_SCALE,
    RELU,
    RELU_OF_SUM,
    RESIDUAL,
    WEIGHT,
    X_SCALE,
    X,
)
from trt_engine.backends.inductor.onnx_module import Call, torch_dtype
from trt_engine.backends.inductor.window_rules import convolve

_APPLY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x, nn.gelu, lambda x: nn.gelu(x, approximate="tanh"), torch.relu, lambda x: x,
)  # fmt: skip


def quantized(x: Tensor, scale: float, kind: torch.dtype) -> Tensor:
    """x / scale in a quantized type, rounded to nearest and saturated."""
    found = x.to(torch.float32) / scale
    if kind.is_floating_point:
        limit = torch.finfo(kind).max
        return found.clamp(-limit, limit).to(kind)
    limits = torch.iinfo(kind)
    return torch.round(found).clamp(limits.min, limits.max).to(kind)


def close_gelu(x: Tensor) -> Tensor:
    """Gelu in FP32 without erf, for results in 16 bits and less: off by at most 9e-5, where the tanh form is by 5e-4.

    The normal distribution function as 1/2 + u P(u^2), u within +-4.2, P of degree 7 by a minimax fit with the limit 1. erf
    takes 40 instructions, twice the time of reading and writing the values on an H200.
    """
    x = x.to(torch.float32).clamp(min=-4.2)  # from where it is 0, but for the error
    u = x.clamp(max=4.2)
    square = u * u
    found: float | Tensor = 0.0
    for term in _GELU_TERMS:
        found = found * square + term
    return x * (0.5 + u * found)


_GELU_TERMS = (
    -9.0175001e-10, 7.9413168e-08, -3.0379252e-06, 6.6890601e-05, -9.5065672e-04, 9.2982259e-03, -6.5528195e-02,
    3.98465868e-01,
)  # fmt: skip
"""The highest power first; the same in `triton_linear`."""


def linear(call: Call) -> Tensor:
    """The layer by the kernel that was chosen for it, else by PyTorch's operators."""
    x, weight, bias, residual = call.tensor(X), call.tensor(WEIGHT), call.optional(BIAS), call.optional(RESIDUAL)
    factors, kind = call.optional(FACTORS), x.dtype
    if call.has(X_SCALE):
        x = quantized(x, float(call.number(X_SCALE)), weight.dtype)
    elif factors is not None:
        kind = torch_dtype(call.attribute("computes_in"))
    shape = [*x.shape[:-1], weight.shape[1]]
    late = residual if residual is not None and not _same(residual.shape, shape) else None
    within = None if residual is None or late is not None else residual.reshape(-1, weight.shape[1])
    activation = ACTIVATIONS.index(call.attribute("activation", "none"))
    out_scale = float(call.number(OUT_SCALE)) if call.has(OUT_SCALE) else 0.0
    flat = x.reshape(-1, weight.shape[0])
    run = call.kernels.linear(call.node.output[0])
    found = run(flat, weight, bias, factors, within, activation, out_scale, kind)
    found = found.reshape(shape)
    return found if late is None else found + late


def plain_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, factors: Tensor | None, residual: Tensor | None, activation: int,
    out_scale: float, kind: torch.dtype,
) -> Tensor:  # fmt: skip
    """x (rows x K) by PyTorch's operators; a quantized product on the values of its integers, in FP32."""
    if factors is not None:
        found = torch.mm(x.to(torch.float32), weight.to(torch.float32)) * factors
        found = (found if bias is None else found + bias).to(kind)
    else:
        found = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
    return finished(found, residual, activation, out_scale, x.dtype)


def finished(found: Tensor, residual: Tensor | None, activation: int, out_scale: float, kind: torch.dtype) -> Tensor:
    """A product with its activation and its residual, quantized to `kind` where there is a scale for it."""
    found = _APPLY[activation](found)
    found = found if residual is None else found + residual
    found = torch.relu(found) if activation == RELU_OF_SUM else found
    return quantized(found, out_scale, kind) if out_scale else found


def _same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """True where all sizes are known to be equal, without a guard on a symbol."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(first) == len(second) and all(statically_known_true(a == b) for a, b in zip(first, second, strict=True))


def convolution(call: Call) -> Tensor:
    """activation(conv(x) + residual): on a GPU by cuDNN's fused convolution, or as the product chosen for a 1x1 one."""
    x, weight, bias, residual = call.tensor(0), call.tensor(1), call.optional(2), call.optional(3)
    strides, dilations = list(call.attribute("strides", [1, 1])), list(call.attribute("dilations", [1, 1]))
    pads, activation = list(call.attribute("pads", [0] * 4))[:2], ACTIVATIONS.index(call.attribute("activation"))
    sizes = [
        (size + 2 * pad - step * (tap - 1) - 1) // stride + 1
        for size, tap, stride, pad, step in zip(x.shape[2:], weight.shape[2:], strides, pads, dilations, strict=True)
    ]
    fits = residual is None or _same(residual.shape, [x.shape[0], weight.shape[0], *sizes])  # cuDNN broadcasts none
    if onnx_module.on_gpu(x.device) and fits:
        x = x.contiguous(memory_format=torch.channels_last)
        if residual is not None:
            residual = residual.contiguous(memory_format=torch.channels_last)
        # an input of another layout would be copied for a product
        if call.attribute("follows") and list(weight.shape[2:]) == [1, 1] == strides and not any(pads):
            applied = RELU_OF_SUM if activation == RELU and residual is not None else activation
            product = call.kernels.pointwise(call.node.output[0], x, weight, bias, residual, applied)
            if product is not None:
                return _pointwise(product, x, weight, bias, residual, applied)
        if activation == RELU:
            return cudnn_conv_relu(x, weight, bias, residual, strides, pads, dilations)
    found = convolve(call, x, weight, bias, strides, pads, dilations)
    return _APPLY[activation](found if residual is None else found + residual)


def _pointwise(
    product: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: int,
) -> Tensor:
    """A 1x1 convolution of channels-last tensors as the product of its positions."""
    outputs, channels = weight.shape[:2]
    rows = None if residual is None else residual.permute(0, 2, 3, 1).reshape(-1, outputs)
    matrix = weight.reshape(outputs, channels).t()
    found = product(x.permute(0, 2, 3, 1).reshape(-1, channels), matrix, bias, None, rows, activation, 0.0, x.dtype)
    return found.reshape(x.shape[0], *x.shape[2:], outputs).permute(0, 3, 1, 2)


def cudnn_conv_relu(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, strides: list[int], pads: list[int],
    dilations: list[int],
) -> Tensor:  # fmt: skip
    """cuDNN's fused convolution of channels-last tensors."""
    fused = torch.ops.aten
    if residual is None:
        return fused.cudnn_convolution_relu(x, weight, bias, strides, pads, dilations, 1)
    return fused.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, strides, pads, dilations, 1)


def patches(call: Call) -> Tensor:
    """Windows side by side, as rows of their values; what is left at the edges is not read."""
    x, (high, wide) = call.tensor(0), call.attribute("kernel_shape")
    count, channels, rows, columns = x.shape[0], x.shape[1], x.shape[2] // high, x.shape[3] // wide
    x = x[:, :, : rows * high, : columns * wide].reshape(count, channels, rows, high, columns, wide)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(count, rows, columns, channels * high * wide)


def register_shapes() -> None:
    """Shapes of cuDNN's convolutions, which PyTorch has none for: those of a plain one, channels last. Its compiler keeps
    the layouts of their inputs."""
    from torch._inductor.lowering import constrain_to_fx_strides, make_fallback

    def shape(x: Tensor, weight: Tensor, strides: Any, pads: Any, dilations: Any, groups: Any) -> Tensor:
        plain = torch.ops.aten.convolution(x, weight, None, strides, pads, dilations, False, [0, 0], groups)
        return plain.contiguous(memory_format=torch.channels_last)

    def of_plain(x: Tensor, weight: Tensor, pads: Any, strides: Any, dilations: Any, groups: Any, *more: Any) -> Tensor:
        return shape(x, weight, strides, pads, dilations, groups)

    def of_relu(x: Tensor, weight: Tensor, bias: Any, *sizes: Any) -> Tensor:
        return shape(x, weight, *sizes)

    def of_add_relu(x: Tensor, weight: Tensor, residual: Tensor, alpha: Any, bias: Any, *sizes: Any) -> Tensor:
        return shape(x, weight, *sizes)

    for name, function in (("", of_plain), ("_relu", of_relu), ("_add_relu", of_add_relu)):
        torch.library.register_fake(f"aten::cudnn_convolution{name}", function)
        operator = getattr(torch.ops.aten, f"cudnn_convolution{name}").default
        make_fallback(operator, layout_constraint=constrain_to_fx_strides, warn=False)

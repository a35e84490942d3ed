"""Convolutions and pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as nn

from trt_engine.backends.inductor import onnx_module
from trt_engine.backends.inductor.onnx_module import Call, Unsupported


def _spatial(call: Call, name: str, rank: int) -> list[int]:
    return [int(item) for item in call.attribute(name, [1] * rank)]


def _pads(call: Call, sizes: Sequence[Any], kernel: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Begin and end pads of the spatial axes: begins first, as ONNX writes them."""
    rank, auto = len(kernel), call.attribute("auto_pad")
    if auto == "NOTSET":
        return [int(item) for item in call.attribute("pads", [0] * 2 * rank)]
    if auto == "VALID":
        return [0] * 2 * rank
    dilations = _spatial(call, "dilations", rank)
    if call.node.op_type != "Conv" and any(item != 1 for item in dilations):
        raise Unsupported(f"dilations with `{auto}`, which ONNX leaves open")
    begins, ends = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = (math.ceil(size / stride) - 1) * stride + (width - 1) * dilation + 1 - size
        if total + (auto == "SAME_LOWER") < -1:  # ONNX Runtime begins inside of the input, or does not run
            raise Unsupported(f"`{auto}` with strides wider than the kernel, which leave elements out on both sides")
        total = max(total, 0)
        small, large = total // 2, total - total // 2
        begins.append(small if auto == "SAME_UPPER" else large)
        ends.append(large if auto == "SAME_UPPER" else small)
    return begins + ends


def _apply_pads(x: Tensor, pads: Sequence[int], value: float) -> tuple[Tensor, list[int]]:
    """Symmetric pads for the operator itself; others are written out first."""
    rank = len(pads) // 2
    if list(pads[:rank]) == list(pads[rank:]):
        return x, list(pads[:rank])
    flat = [pads[at + side * rank] for at in reversed(range(rank)) for side in (0, 1)]
    return nn.pad(x, flat, value=value), [0] * rank


_CONVOLUTIONS = {1: nn.conv1d, 2: nn.conv2d, 3: nn.conv3d}


def conv(call: Call) -> Tensor:
    x, weight = call.tensor(0), call.tensor(1)
    rank = weight.ndim - 2
    strides, kernel = _spatial(call, "strides", rank), list(weight.shape[2:])
    x, pads = _apply_pads(x, _pads(call, x.shape[2:], kernel, strides), 0.0)
    return convolve(
        call, x, weight, call.optional(2), strides, pads, _spatial(call, "dilations", rank), call.attribute("group")
    )


def convolve(
    call: Call, x: Tensor, weight: Tensor, bias: Tensor | None, strides: list[int], pads: list[int],
    dilations: list[int], groups: int = 1,
) -> Tensor:  # fmt: skip
    """A convolution whose output has the layout that the compiler takes it for.

    For a GPU `torch.export` (2.11) notes channels first for any `conv2d`, where cuDNN gives channels last if its input or
    its weights are so: AOTInductor's code read the one as the other, in DenseNet-121, HGNetV2, ConvNeXtV2 and MobileNetV3
    on an H200. So in a graph with layers of ours cuDNN is called by its own name, on channels last, as `register_shapes`
    states; every other convolution reads channels first.
    """
    if onnx_module.on_gpu(x.device):
        # a tensor of one channel is in either layout
        if call.fused and x.ndim == 4 and x.dtype in (torch.float16, torch.bfloat16) and x.shape[1] > 1:
            x, weight = (item.contiguous(memory_format=torch.channels_last) for item in (x, weight))
            found = torch.ops.aten.cudnn_convolution(x, weight, pads, strides, dilations, groups, False, False, True)
            return found if bias is None else found + bias.reshape(-1, 1, 1)
        x, weight = x.contiguous(), weight.contiguous()
    function: Callable[..., Tensor] = _CONVOLUTIONS[weight.ndim - 2]
    return function(x, weight, bias, strides, pads, dilations, groups)


_TRANSPOSED = {1: nn.conv_transpose1d, 2: nn.conv_transpose2d, 3: nn.conv_transpose3d}


def conv_transpose(call: Call) -> Tensor:
    """With unequal pads: all of the result, of which the pads are cut off."""
    x, weight, bias = call.tensor(0), call.tensor(1), call.optional(2)
    x = x.contiguous() if onnx_module.on_gpu(x.device) else x  # as in `convolve`
    rank = weight.ndim - 2
    strides, dilations = _spatial(call, "strides", rank), _spatial(call, "dilations", rank)
    more = [int(item) for item in call.attribute("output_padding", [0] * rank)]
    pads, auto = [int(item) for item in call.attribute("pads", [0] * 2 * rank)], call.attribute("auto_pad")
    sizes = call.attribute("output_shape")
    sizes = None if sizes is None else list(sizes)[-rank:]
    whole = [
        stride * (size - 1) + extra + (width - 1) * dilation + 1
        for size, stride, width, dilation, extra in zip(
            x.shape[2:], strides, weight.shape[2:], dilations, more, strict=True
        )
    ]
    if sizes is None and auto.startswith("SAME"):
        sizes = [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
        if any(size < wanted for size, wanted in zip(whole, sizes, strict=True)):
            raise Unsupported(f"`{auto}` with strides wider than the kernel, which ONNX and ONNX Runtime read apart")
    if sizes is not None:
        over = [max(size - wanted, 0) for size, wanted in zip(whole, sizes, strict=True)]
        begins = [item // 2 if auto == "SAME_UPPER" else item - item // 2 for item in over]
        pads = begins + [item - begin for item, begin in zip(over, begins, strict=True)]
    elif auto == "VALID":
        pads = [0] * 2 * rank
    else:
        sizes = [size - pads[at] - pads[rank + at] for at, size in enumerate(whole)]
    function: Callable[..., Tensor] = _TRANSPOSED[rank]
    group, begins = call.attribute("group"), pads[:rank]
    fits = all(extra < max(stride, dilation) for extra, stride, dilation in zip(more, strides, dilations, strict=True))
    if begins == pads[rank:] and fits and call.attribute("output_shape") is None:
        return function(x, weight, bias, strides, begins, more, group, dilations)
    found = function(x, weight, None, strides, 0, 0, group, dilations)
    flat: list[Any] = []
    for at, (begin, size) in enumerate(zip(begins, sizes or whole, strict=True), 2):
        short = max(begin + size - found.shape[at], 0)
        found = found.narrow(at, begin, size - short)
        flat = [0, short, *flat]
    found = nn.pad(found, flat) if any(flat) else found
    return found if bias is None else found + bias.reshape(-1, *[1] * rank)


def max_pool(call: Call) -> Tensor:
    x, kernel = call.tensor(0), list(call.attribute("kernel_shape"))
    rank = len(kernel)
    strides, ceil = _spatial(call, "strides", rank), bool(call.attribute("ceil_mode"))
    given, sizes = _pads(call, x.shape[2:], kernel, strides), x.shape[2:]
    x, pads = _apply_pads(x, given, -math.inf)
    pool: Callable[..., Tensor] = {1: nn.max_pool1d, 2: nn.max_pool2d, 3: nn.max_pool3d}[rank]
    found = pool(x, kernel, strides, pads, _spatial(call, "dilations", rank), ceil)
    for at in range(rank if ceil and given[:rank] != given[rank:] else 0):  # no window begins in the pad behind
        found = found.narrow(at + 2, 0, min(found.shape[at + 2], -(-(sizes[at] + given[at]) // strides[at])))
    return found


def average_pool(call: Call) -> Tensor:
    x, kernel = call.tensor(0), list(call.attribute("kernel_shape"))
    rank = len(kernel)
    strides = _spatial(call, "strides", rank)
    pads = _pads(call, x.shape[2:], kernel, strides)
    if pads[:rank] != pads[rank:] or any(item != 1 for item in _spatial(call, "dilations", rank)):
        raise Unsupported("pads that differ at both ends, or dilations")
    pool: Callable[..., Tensor] = {1: nn.avg_pool1d, 2: nn.avg_pool2d, 3: nn.avg_pool3d}[rank]
    return pool(
        x, kernel, strides, pads[:rank], bool(call.attribute("ceil_mode")), bool(call.attribute("count_include_pad"))
    )  # fmt: skip

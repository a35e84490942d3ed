"""The operators on tensors, each by the ATen functions with the same meaning (ONNX operators, opset 18 to 23)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx import numpy_helper
from torch import Tensor
from torch.nn import functional as nn

from trt_engine.backends.inductor.attention import ATTENTION
from trt_engine.backends.inductor.convolution import CONVOLUTION, PATCHES
from trt_engine.backends.inductor.fused_rules import convolution, linear, patches
from trt_engine.backends.inductor.linear import LINEAR
from trt_engine.backends.inductor.onnx_module import Call, Rule, Scalars, Unsupported, to_tensor, torch_dtype
from trt_engine.graph.constants import constant_tensor


def _unary(function: Callable[[Tensor], Any]) -> Rule:
    return lambda call: function(call.tensor(0))


def _binary(function: Callable[[Tensor, Tensor], Any]) -> Rule:
    return lambda call: function(call.tensor(0), call.tensor(1))


def _fold(function: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    def rule(call: Call) -> Tensor:
        found = call.tensor(0)
        for at in range(1, len(call.values)):
            found = function(found, call.tensor(at))
        return found

    return rule


def _dropout(call: Call) -> Tensor:
    if call.number(2, False):
        raise Unsupported("its training mode")
    return call.tensor(0)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


def _mod(call: Call) -> Tensor:
    function = torch.fmod if call.attribute("fmod", 0) else torch.remainder
    return function(call.tensor(0), call.tensor(1))


def _pow(call: Call) -> Tensor:
    base = call.tensor(0)
    exponent = call.values[1]
    if isinstance(exponent, Scalars) and exponent.values.size == 1 and exponent.values.ndim <= base.ndim:
        return torch.pow(base, exponent.values.reshape(-1)[0]).to(base.dtype)
    return torch.pow(base, call.tensor(1)).to(base.dtype)


def _clip(call: Call) -> Tensor:
    found = call.tensor(0)
    if (low := call.optional(1)) is not None:
        found = torch.maximum(found, low)
    if (high := call.optional(2)) is not None:
        found = torch.minimum(found, high)
    return found


def _gelu(call: Call) -> Tensor:
    return nn.gelu(call.tensor(0), approximate=call.attribute("approximate", "none"))


# ------------------------------------------------------------------------------------------------ products


def _gemm(call: Call) -> Tensor:
    a, b, c = call.tensor(0), call.tensor(1), call.optional(2)
    a = a.t() if call.attribute("transA", 0) else a
    b = b.t() if call.attribute("transB", 0) else b
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    if c is not None and a.dtype.is_floating_point:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    found = torch.mm(a, b) if alpha == 1 else torch.mm(a, b) * alpha
    return found if c is None else found + c * beta


def _einsum(call: Call) -> Tensor:
    return torch.einsum(call.attribute("equation"), *(call.tensor(at) for at in range(len(call.values))))


def _attention(call: Call) -> Tensor:
    q, k, v, mask = call.tensor(0), call.tensor(1).transpose(-2, -1), call.tensor(2), call.optional(3)
    scale = call.attribute("scale")
    if mask is not None:
        mask = mask.to(q.dtype)
        while mask.ndim < 2:
            mask = mask.unsqueeze(0)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        scores = torch.matmul(q, k.transpose(-2, -1)) * scale
        return torch.matmul(torch.softmax(scores if mask is None else scores + mask, -1), v)
    return nn.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _spatial(call: Call, name: str, rank: int) -> list[int]:
    return [int(item) for item in call.attribute(name, [1] * rank)]


def _pads(call: Call, sizes: Sequence[Any], kernel: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Begin and end pads of the spatial axes: begins first, as ONNX writes them."""
    rank, auto = len(kernel), call.attribute("auto_pad", "NOTSET")
    if auto == "NOTSET":
        return [int(item) for item in call.attribute("pads", [0] * 2 * rank)]
    if auto == "VALID":
        return [0] * 2 * rank
    dilations = _spatial(call, "dilations", rank)
    begins, ends = [], []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
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


def _conv(call: Call) -> Tensor:
    x, weight = call.tensor(0), call.tensor(1)
    rank = weight.ndim - 2
    strides, kernel = _spatial(call, "strides", rank), list(weight.shape[2:])
    x, pads = _apply_pads(x, _pads(call, x.shape[2:], kernel, strides), 0.0)
    function: Callable[..., Tensor] = _CONVOLUTIONS[rank]
    return function(
        x, weight, call.optional(2), strides, pads, _spatial(call, "dilations", rank), call.attribute("group", 1)
    )


def _max_pool(call: Call) -> Tensor:
    x, kernel = call.tensor(0), list(call.attribute("kernel_shape"))
    rank = len(kernel)
    strides = _spatial(call, "strides", rank)
    x, pads = _apply_pads(x, _pads(call, x.shape[2:], kernel, strides), -math.inf)
    pool: Callable[..., Tensor] = {1: nn.max_pool1d, 2: nn.max_pool2d, 3: nn.max_pool3d}[rank]
    return pool(x, kernel, strides, pads, _spatial(call, "dilations", rank), bool(call.attribute("ceil_mode", 0)))


def _average_pool(call: Call) -> Tensor:
    x, kernel = call.tensor(0), list(call.attribute("kernel_shape"))
    rank = len(kernel)
    strides = _spatial(call, "strides", rank)
    pads = _pads(call, x.shape[2:], kernel, strides)
    if pads[:rank] != pads[rank:] or any(item != 1 for item in _spatial(call, "dilations", rank)):
        raise Unsupported("pads that differ at both ends, or dilations")
    pool: Callable[..., Tensor] = {1: nn.avg_pool1d, 2: nn.avg_pool2d, 3: nn.avg_pool3d}[rank]
    return pool(
        x, kernel, strides, pads[:rank], bool(call.attribute("ceil_mode", 0)),
        bool(call.attribute("count_include_pad", 0)),
    )  # fmt: skip


def _spatial_axes(x: Tensor) -> list[int]:
    return list(range(2, x.ndim))


# ------------------------------------------------------------------------------------------------ normalisation


def _layer_norm(call: Call) -> Tensor:
    x = call.tensor(0)
    axis = call.attribute("axis", -1) % x.ndim
    shape = list(x.shape[axis:])
    weight, bias = call.tensor(1).expand(shape), call.optional(2)
    return nn.layer_norm(
        x, shape, weight, None if bias is None else bias.expand(shape), call.attribute("epsilon", 1e-5)
    )


def _batch_norm(call: Call) -> Tensor:
    if call.attribute("training_mode", 0):
        raise Unsupported("its training mode")
    x, scale, bias, mean, variance = (call.tensor(at) for at in range(5))
    return nn.batch_norm(x, mean, variance, scale, bias, False, 0.0, call.attribute("epsilon", 1e-5))


def _instance_norm(call: Call) -> Tensor:
    return nn.instance_norm(
        call.tensor(0), weight=call.tensor(1), bias=call.tensor(2), eps=call.attribute("epsilon", 1e-5)
    )


# ------------------------------------------------------------------------------------------------ quantisation


def _along(scale: Tensor, x: Tensor, axis: int, block: int) -> Tensor:
    """A scale or zero point in the shape that broadcasts over `x`: one value, one per channel, one per block."""
    if block:
        return scale.repeat_interleave(block, dim=axis).narrow(axis, 0, x.shape[axis])
    if scale.ndim == 0 or (scale.ndim == 1 and scale.shape[0] == 1):
        return scale.reshape(())
    return scale.reshape([-1 if at == axis % x.ndim else 1 for at in range(x.ndim)])


def _dequantize(call: Call) -> Tensor:
    x, scale, zero = call.tensor(0), call.tensor(1), call.optional(2)
    axis, block = call.attribute("axis", 1), call.attribute("block_size", 0)
    found = x.to(torch.float32)
    if zero is not None:
        found = found - _along(zero.to(torch.float32), x, axis, block)
    return (found * _along(scale.to(torch.float32), x, axis, block)).to(scale.dtype)


def _quantize(call: Call) -> Tensor:
    x, scale, zero = call.tensor(0), call.tensor(1), call.optional(2)
    axis, block = call.attribute("axis", 1), call.attribute("block_size", 0)
    named = call.attribute("output_dtype", 0)
    kind = zero.dtype if zero is not None else torch_dtype(named) if named else torch.uint8
    found = x.to(torch.float32) / _along(scale.to(torch.float32), x, axis, block)
    if kind.is_floating_point:
        limit = torch.finfo(kind).max
        return found.clamp(-limit, limit).to(kind)
    found = torch.round(found)
    if zero is not None:
        found = found + _along(zero.to(torch.float32), x, axis, block)
    return found.clamp(torch.iinfo(kind).min, torch.iinfo(kind).max).to(kind)


# ------------------------------------------------------------------------------------------------ shapes


def _reshape(call: Call) -> Tensor:
    x, sizes = call.tensor(0), call.numbers(1)
    if not call.attribute("allowzero", 0):
        sizes = [x.shape[at] if isinstance(size, int) and size == 0 else size for at, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis", 1)
    axis = axis if axis >= 0 else axis + x.ndim
    if axis == 0:
        return x.reshape(1, -1)
    return x.reshape(math.prod(x.shape[:axis]), -1) if axis > 1 else x.flatten(1) if x.ndim > 1 else x.reshape(-1, 1)


def _transpose(call: Call) -> Tensor:
    x = call.tensor(0)
    return x.permute(list(call.attribute("perm", list(reversed(range(x.ndim))))))


def _squeeze(call: Call) -> Tensor:
    x = call.tensor(0)
    axes = (
        call.numbers(1)
        if call.has(1)
        else [at for at, size in enumerate(x.shape) if isinstance(size, int) and size == 1]
    )
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.squeeze(axis)
    return x


def _unsqueeze(call: Call) -> Tensor:
    x, axes = call.tensor(0), call.numbers(1)
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _split(call: Call) -> list[Tensor]:
    x, axis = call.tensor(0), call.attribute("axis", 0)
    if call.has(1):
        return list(torch.split(x, call.numbers(1), axis))
    return list(torch.chunk(x, len(call.node.output), axis))


def _slice(call: Call) -> Tensor:
    x = call.tensor(0)
    starts, ends = call.numbers(1), call.numbers(2)
    axes = call.numbers(3) if call.has(3) else list(range(len(starts)))
    steps = call.numbers(4) if call.has(4) else [1] * len(starts)
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step > 0:
            end = min(end, (1 << 63) - 1) if isinstance(end, int) else end
            x = torch.ops.aten.slice.Tensor(x, axis, start, end, step)
            continue
        size = x.shape[axis]
        first = min(start, size - 1) if isinstance(size, int) else size - 1 if start >= 0 else size + start
        if isinstance(size, int):
            stop = max(end if end >= 0 else end + size, -1)
            first = first if first >= 0 else first + size
        elif start in (-1, (1 << 63) - 1) and end <= -(1 << 31):
            first, stop = size - 1, -1
        else:
            raise Unsupported("a negative step over a dynamic dimension, other than all of it")
        x = x.index_select(axis, torch.arange(first, stop, step, device=x.device))
    return x


def _pad(call: Call) -> Tensor:
    x, pads, mode = call.tensor(0), call.numbers(1), call.attribute("mode", "constant")
    axes = call.numbers(3) if call.has(3) else list(range(x.ndim))
    count = len(axes)
    begins, ends = [0] * x.ndim, [0] * x.ndim
    for at, axis in enumerate(axes):
        begins[axis], ends[axis] = pads[at], pads[count + at]
    while len(begins) > 1 and begins[0] == 0 and ends[0] == 0 and mode != "constant" and len(begins) > x.ndim - 3:
        begins, ends = begins[1:], ends[1:]
    flat = [item for pair in zip(reversed(begins), reversed(ends), strict=True) for item in pair]
    if mode == "constant":
        value = call.number(2, 0)
        return nn.pad(x, flat, value=value)
    return nn.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])


def _expand(call: Call) -> Tensor:
    x, shape = call.tensor(0), call.numbers(1)
    rank = max(x.ndim, len(shape))
    have = [1] * (rank - x.ndim) + list(x.shape)
    want = [1] * (rank - len(shape)) + list(shape)
    one = [isinstance(size, int) and size == 1 for size in have]
    return x.expand([target if single else size for size, target, single in zip(have, want, one, strict=True)])


def _range(call: Call) -> Tensor:
    first = call.values[0]
    kind = first.dtype if first is not None else None
    return torch.arange(call.number(0), call.number(1), call.number(2), dtype=kind, device=call.device)


def _constant_of_shape(call: Call) -> Tensor:
    given = call.attributes.get("value")
    value = torch.zeros(()) if given is None else to_tensor(numpy_helper.to_array(given), given.data_type).reshape(())
    return torch.full(call.numbers(0), value.item(), dtype=value.dtype, device=call.device)


def _constant(call: Call) -> Tensor:
    """A Constant that is an output of the graph; the others are initializers."""
    if (stored := constant_tensor(call.node)) is None:
        raise Unsupported("its strings or sparse values")
    return to_tensor(numpy_helper.to_array(stored), stored.data_type).to(call.device)


def _resize(call: Call) -> Tensor:
    x, mode = call.tensor(0), call.attribute("mode", "nearest")
    where = call.attribute("coordinate_transformation_mode", "half_pixel")
    if call.attribute("axes") is not None or call.attribute("antialias", 0) or x.ndim != 4:
        raise Unsupported("axes, antialiasing, or an input that is not N x C x H x W")
    if call.attribute("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise Unsupported("its policy for the aspect ratio")
    scales = call.numbers(2)[2:] if call.has(2) and call.scalars(2).size else None
    whole = scales is not None and all(float(scale).is_integer() for scale in scales)
    if scales is None:
        sizes = call.numbers(3)[2:]
    elif whole:
        sizes = [size * int(scale) for size, scale in zip(x.shape[2:], scales, strict=True)]
    else:
        sizes = [size * scale for size, scale in zip(x.shape[2:], scales, strict=True)]
        if not all(isinstance(size, float) and size.is_integer() for size in sizes):
            raise Unsupported("scales that give no whole size")
        sizes = [int(size) for size in sizes]
    if mode == "nearest":
        rounding = call.attribute("nearest_mode", "round_prefer_floor")
        if not (where == "asymmetric" and rounding == "floor") and not (whole and where == "half_pixel"):
            raise Unsupported(f"nearest with `{where}` and `{rounding}`")
        return nn.interpolate(x, size=sizes, mode="nearest")
    kind = {"linear": "bilinear", "cubic": "bicubic"}.get(mode)
    if kind is None or where not in ("half_pixel", "pytorch_half_pixel", "align_corners") or 1 in sizes:
        raise Unsupported(f"mode `{mode}` with `{where}`")
    if kind == "bicubic" and call.attribute("cubic_coeff_a", -0.75) != -0.75:
        raise Unsupported("its cubic coefficient")
    return nn.interpolate(x, size=sizes, mode=kind, align_corners=where == "align_corners")


# ------------------------------------------------------------------------------------------------ picking


def _index(call: Call, at: int, size: Any) -> Tensor:
    """Indices with negative ones counted from the end."""
    found = call.tensor(at)
    value = call.values[at]
    if isinstance(value, Scalars) and all(isinstance(item, int) and item >= 0 for item in value.values.reshape(-1)):
        return found
    return torch.where(found < 0, found + size, found)


def _gather(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis", 0)
    axis = axis % x.ndim
    if isinstance(call.values[1], Scalars) and call.scalars(1).ndim == 0:
        return x.select(axis, call.number(1))
    index = _index(call, 1, x.shape[axis])
    found = x.index_select(axis, index.reshape(-1))
    return found.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]) if index.ndim != 1 else found


def _gather_elements(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis", 0)
    return torch.gather(x, axis, _index(call, 1, x.shape[axis]).to(torch.int64))


def _gather_nd(call: Call) -> Tensor:
    x, index = call.tensor(0), call.tensor(1)
    if call.attribute("batch_dims", 0):
        raise Unsupported("batch dimensions")
    return x[tuple(index.unbind(-1))]


def _top_k(call: Call) -> tuple[Tensor, Tensor]:
    values, index = torch.topk(
        call.tensor(0), call.number(1), call.attribute("axis", -1), bool(call.attribute("largest", 1)),
        bool(call.attribute("sorted", 1)),
    )  # fmt: skip
    return values, index


def _arg(function: Callable[..., Tensor]) -> Rule:
    def rule(call: Call) -> Tensor:
        if call.attribute("select_last_index", 0):
            raise Unsupported("the last of equal values")
        return function(call.tensor(0), call.attribute("axis", 0), bool(call.attribute("keepdims", 1)))

    return rule


def _grid_sample(call: Call) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(given := call.attribute("mode", "linear"), given)
    return nn.grid_sample(
        call.tensor(0), call.tensor(1), mode, call.attribute("padding_mode", "zeros"),
        bool(call.attribute("align_corners", 0)),
    )  # fmt: skip


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Rule:
    def rule(call: Call) -> Tensor:
        x = call.tensor(0)
        axes = [int(axis) % x.ndim for axis in call.numbers(1)] if call.has(1) else []
        if not axes:
            if call.attribute("noop_with_empty_axes", 0):
                return x
            axes = list(range(x.ndim))
        return function(x, axes, bool(call.attribute("keepdims", 1)))

    return rule


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keep)
    return x


def _lstm(call: Call) -> list[Tensor]:
    """One or two directions, gates in ONNX's order i, o, f, c (PyTorch's: i, f, c, o)."""
    x, w, r, bias = call.tensor(0), call.tensor(1), call.tensor(2), call.optional(3)
    hidden, directions = call.attribute("hidden_size"), w.shape[0]
    way = call.attribute("direction", "forward")
    if way == "reverse" or call.has(4) or call.has(7) or call.attribute("layout", 0) or call.attribute("activations"):
        raise Unsupported("its direction, sequence lengths, peepholes, layout or activations")
    order = torch.tensor([0, 2, 3, 1], device=x.device)

    def gates(item: Tensor) -> Tensor:
        return item.reshape(4, hidden, -1).index_select(0, order).reshape(4 * hidden, -1)

    flat: list[Tensor] = []
    for at in range(directions):
        halves = bias[at].reshape(2, 4 * hidden) if bias is not None else x.new_zeros(2, 4 * hidden)
        flat += [gates(w[at]), gates(r[at]), gates(halves[0]).reshape(-1), gates(halves[1]).reshape(-1)]
    zero = x.new_zeros(directions, x.shape[1], hidden)
    state = [call.tensor(5) if call.has(5) else zero, call.tensor(6) if call.has(6) else zero]
    y, h, c = torch.lstm(x, state, flat, True, 1, 0.0, False, directions == 2, False)
    return [y.reshape(y.shape[0], y.shape[1], directions, hidden).permute(0, 2, 1, 3), h, c]


_UNARY: dict[str, Callable[[Tensor], Any]] = {
    "Abs": torch.abs, "Ceil": torch.ceil, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "GlobalAveragePool": lambda x: x.mean(_spatial_axes(x), True), "HardSwish": nn.hardswish, "Identity": lambda x: x,
    "GlobalMaxPool": lambda x: x.amax(_spatial_axes(x), True), "IsNaN": torch.isnan, "Log": torch.log,
    "Neg": torch.neg, "NonZero": lambda x: torch.nonzero(x).t().contiguous(), "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Softplus": lambda x: nn.softplus(x), "Sqrt": torch.sqrt, "Tanh": torch.tanh,
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "Add": torch.add, "And": torch.logical_and, "Div": _divide, "Equal": torch.eq, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le, "MatMul": torch.matmul, "Mul": torch.mul,
    "Or": torch.logical_or, "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x), "Sub": torch.sub,
}  # fmt: skip
RULES: dict[str, Rule] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _binary(function) for name, function in _BINARY.items()},
    ATTENTION: _attention, LINEAR: linear, CONVOLUTION: convolution, PATCHES: patches,
    "ArgMax": _arg(torch.argmax), "ArgMin": _arg(torch.argmin), "AveragePool": _average_pool,
    "BatchNormalization": _batch_norm, "Cast": lambda call: call.tensor(0).to(torch_dtype(call.attributes["to"])),
    "CastLike": lambda call: call.tensor(0).to(call.tensor(1).dtype), "Clip": _clip,
    "Concat": lambda call: torch.cat([call.tensor(at) for at in range(len(call.values))], call.attribute("axis")),
    "Constant": _constant, "ConstantOfShape": _constant_of_shape, "Conv": _conv, "DequantizeLinear": _dequantize,
    "Dropout": _dropout, "Einsum": _einsum,
    "Elu": lambda call: nn.elu(call.tensor(0), call.attribute("alpha", 1.0)), "Expand": _expand, "Flatten": _flatten,
    "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd, "Gelu": _gelu, "Gemm": _gemm,
    "GridSample": _grid_sample,
    "HardSigmoid": lambda call: torch.clamp(
        call.tensor(0) * call.attribute("alpha", 0.2) + call.attribute("beta", 0.5), 0, 1
    ),
    "InstanceNormalization": _instance_norm, "LSTM": _lstm, "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda call: nn.leaky_relu(call.tensor(0), call.attribute("alpha", 0.01)),
    "LogSoftmax": lambda call: torch.log_softmax(call.tensor(0), call.attribute("axis", -1)),
    "Max": _fold(torch.maximum), "MaxPool": _max_pool, "Min": _fold(torch.minimum), "Mod": _mod, "Pad": _pad,
    "Pow": _pow, "QuantizeLinear": _quantize, "Range": _range,
    "ReduceL2": _reduce(lambda x, axes, keep: (x * x).sum(axes, keep).sqrt()), "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean), "ReduceMin": _reduce(torch.amin), "ReduceProd": _reduce(_product),
    "ReduceSum": _reduce(lambda x, axes, keep: torch.sum(x, axes, keep, dtype=x.dtype)), "Reshape": _reshape,
    "Resize": _resize, "Slice": _slice,
    "Softmax": lambda call: torch.softmax(call.tensor(0), call.attribute("axis", -1)), "Split": _split,
    "Squeeze": _squeeze, "Sum": _fold(torch.add), "Tile": lambda call: call.tensor(0).repeat(call.numbers(1)),
    "TopK": _top_k, "Transpose": _transpose, "Unsqueeze": _unsqueeze,
    "Where": lambda call: torch.where(call.tensor(0), call.tensor(1), call.tensor(2)),
}  # fmt: skip

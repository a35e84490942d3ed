"""The operators on tensors, each by the ATen functions with the same meaning (ONNX operators, opset 18 to 23)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor
from torch.nn import functional as nn

from trt_engine.backends.inductor.attention import ATTENTION
from trt_engine.backends.inductor.convolution import CONVOLUTION, PATCHES
from trt_engine.backends.inductor.fused_rules import convolution, linear, patches
from trt_engine.backends.inductor.linear import LINEAR
from trt_engine.backends.inductor.onnx_module import (
    Call,
    Rule,
    Scalars,
    Unsupported,
    onnx_type,
    to_tensor,
    torch_dtype,
)
from trt_engine.backends.inductor.recurrent_rules import gru, lstm, rnn
from trt_engine.backends.inductor.resize_rules import resize
from trt_engine.backends.inductor.scalar_rules import branch, loop
from trt_engine.backends.inductor.window_rules import average_pool, conv, conv_transpose, max_pool
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
    if call.number(2, False) and call.number(1, 0.5):
        raise Unsupported("its training mode")
    return call.tensor(0)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.dtype.is_floating_point else torch.div(a, b, rounding_mode="trunc")


def _mod(call: Call) -> Tensor:
    function = torch.fmod if call.attribute("fmod") else torch.remainder
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
    a = a.t() if call.attribute("transA") else a
    b = b.t() if call.attribute("transB") else b
    alpha, beta = call.attribute("alpha"), call.attribute("beta")
    if c is not None and a.dtype.is_floating_point:
        return torch.addmm(c, a, b, beta=beta, alpha=alpha)
    if not a.dtype.is_floating_point and {alpha, beta} != {1.0}:
        raise Unsupported("factors of integers")
    found = torch.mm(a, b) if alpha == 1 else torch.mm(a, b) * alpha
    return found if c is None else found + c


def _einsum(call: Call) -> Tensor:
    return torch.einsum(call.attribute("equation"), *(call.tensor(at) for at in range(len(call.values))))


def _attention(call: Call) -> Tensor:
    """PyTorch's attention, which gives zeros for rows whose keys are all masked by -inf."""
    q, k, v, mask = call.tensor(0), call.tensor(1).transpose(-2, -1), call.tensor(2), call.optional(3)
    scale, axis, rank = call.attribute("scale"), call.attribute("axis"), max(q.ndim, k.ndim)
    in_one_kernel = axis % rank == rank - 1 and q.ndim == k.ndim == v.ndim == 4 and q.dtype == v.dtype
    if mask is not None:
        if in_one_kernel or not call.attribute("wide"):
            mask = _as_bias(mask, q.dtype)
        while mask.ndim < 2:
            mask = mask.unsqueeze(0)
    if in_one_kernel and (mask is None or mask.ndim <= 4):
        return nn.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale
    scores = scores.float() if call.attribute("wide") else scores
    weights = torch.softmax(scores if mask is None else scores + mask, axis)
    if call.attribute("guard"):
        weights = torch.where(weights.isnan(), 0.0, weights)
    return torch.matmul(weights.to(v.dtype), v)


def _as_bias(mask: Tensor, kind: torch.dtype) -> Tensor:
    """The mask in the type of q; numbers that it cannot hold as its largest, which hide a key as well."""
    if mask.dtype == kind:
        return mask
    largest = torch.finfo(kind).max
    return torch.where(mask.isinf(), mask, mask.clamp(-largest, largest)).to(kind)


def _spatial_axes(x: Tensor) -> list[int]:
    return list(range(2, x.ndim))


# ------------------------------------------------------------------------------------------------ normalisation


def _layer_norm(call: Call) -> Tensor:
    x = call.tensor(0)
    axis = call.attribute("axis") % x.ndim
    shape = list(x.shape[axis:])
    weight, bias = call.tensor(1).expand(shape), call.optional(2)
    return nn.layer_norm(x, shape, weight, None if bias is None else bias.expand(shape), call.attribute("epsilon"))


def _batch_norm(call: Call) -> Tensor:
    x, scale, bias, mean, variance = (call.tensor(at) for at in range(5))
    return nn.batch_norm(x, mean, variance, scale, bias, False, 0.0, call.attribute("epsilon"))


def _instance_norm(call: Call) -> Tensor:
    return nn.instance_norm(call.tensor(0), weight=call.tensor(1), bias=call.tensor(2), eps=call.attribute("epsilon"))


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
    axis, block = call.attribute("axis"), call.attribute("block_size")
    found = x.to(torch.float32)
    if zero is not None:
        found = found - _along(zero.to(torch.float32), x, axis, block)
    named = call.attribute("output_dtype", 0)
    return (found * _along(scale.to(torch.float32), x, axis, block)).to(torch_dtype(named) if named else scale.dtype)


def _quantize(call: Call) -> Tensor:
    x, scale, zero = call.tensor(0), call.tensor(1), call.optional(2)
    axis, block = call.attribute("axis"), call.attribute("block_size")
    named = call.kind(2) if zero is not None else call.attribute("output_dtype", 0)
    kind = zero.dtype if zero is not None else torch_dtype(named) if named else torch.uint8
    found = x.to(torch.float32) / _along(scale.to(torch.float32), x, axis, block)
    if kind.is_floating_point:
        return _to_float8(found, kind, saturates=call.attribute("saturate", 1))
    found = torch.round(found)
    if zero is not None:
        found = found + _along(zero.to(torch.float32), x, axis, block)
    low, high = _NIBBLES.get(named, (torch.iinfo(kind).min, torch.iinfo(kind).max))
    return found.clamp(low, high).to(kind)


_NIBBLES: dict[int, tuple[int, int]] = {TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15)}


def _to_float8(x: Tensor, kind: torch.dtype, *, saturates: bool) -> Tensor:
    """Rounded to nearest; beyond the largest value that, or without saturation what the type has: infinity, or no number."""
    if kind is torch.float8_e8m0fnu:
        raise Unsupported("rounding to powers of two")
    limit = torch.finfo(kind).max
    if saturates:
        return x.to(torch.float32).clamp(-limit, limit).to(kind)
    if kind is not torch.float8_e5m2:  # PyTorch's conversion saturates some of them
        wide = x.to(torch.float32)
        step = 2.0 ** (math.floor(math.log2(limit)) - (3 if kind is not torch.float8_e5m2fnuz else 2))
        return torch.where(wide.abs() > limit + step / 2, math.nan, wide.clamp(-limit, limit)).to(kind)
    return x.to(torch.float32).to(kind)


def _cast_to(x: Tensor, kind: int, call: Call) -> Tensor:
    wanted = torch_dtype(kind)
    if kind in _NIBBLES:
        if x.dtype.is_floating_point:
            x = torch.round(x.to(torch.float32)).to(torch.int32)
        x = torch.bitwise_and(x.to(torch.int32), 15)
        return (torch.where(x > 7, x - 16, x) if kind == TensorProto.INT4 else x).to(wanted)
    if wanted.is_floating_point and wanted.itemsize == 1:
        return _to_float8(x, wanted, saturates=call.attribute("saturate", 1))
    return x.to(wanted)


def _cast_like(call: Call) -> Tensor:
    kind = call.kind(1) if call.has(1) else 0
    return _cast_to(call.tensor(0), kind or onnx_type(call.tensor(1).dtype), call)


# ------------------------------------------------------------------------------------------------ shapes


def _reshape(call: Call) -> Tensor:
    x, sizes = call.tensor(0), call.numbers(1)
    if not call.attribute("allowzero"):
        sizes = [x.shape[at] if isinstance(size, int) and size == 0 else size for at, size in enumerate(sizes)]
    return x.reshape(sizes)


def _flatten(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis")
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


def _equal_parts(size: Any, count: int) -> list[Any]:
    """The sizes of that many parts, the last one smaller where they cannot be equal."""
    part = (size + count - 1) // count
    return [part] * (count - 1) + [size - part * (count - 1)]


def _split(call: Call) -> list[Tensor]:
    x, axis = call.tensor(0), call.attribute("axis")
    if call.has(1):
        return list(torch.split(x, call.numbers(1), axis))
    return list(
        torch.split(x, _equal_parts(x.shape[axis], call.attribute("num_outputs") or len(call.node.output)), axis)
    )


def _cut_of(start: int, end: int, step: int, size: int) -> slice:
    """Python's slice for one of ONNX, whose starts and ends are clamped to the size."""
    start, end = (at + size if at < 0 else at for at in (start, end))
    if step > 0:
        return slice(min(max(start, 0), size), min(max(end, 0), size), step)
    start, end = min(max(start, 0), size - 1), min(max(end, -1), size - 1)
    return slice(start, None if end < 0 else end, step) if start > end else slice(0, 0)


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
        if isinstance(size, int):
            index = torch.tensor(list(range(size)[_cut_of(start, end, step, size)]), dtype=torch.int64)
        elif start in (-1, (1 << 63) - 1) and end <= -(1 << 31):
            index = torch.arange(size - 1, -1, step, device=x.device)
        else:
            raise Unsupported("a negative step over a dynamic dimension, other than all of it")
        x = x.index_select(axis, index.to(x.device))
    return x


def _pad(call: Call) -> Tensor:
    x, pads, mode = call.tensor(0), call.numbers(1), call.attribute("mode")
    axes = call.numbers(3) if call.has(3) else list(range(x.ndim))
    count = len(axes)
    begins, ends = [0] * x.ndim, [0] * x.ndim
    for at, axis in enumerate(axes):
        begins[axis], ends[axis] = pads[at], pads[count + at]
    if mode == "constant":
        flat = [item for pair in zip(reversed(begins), reversed(ends), strict=True) for item in pair]
        if not call.has(2) or isinstance(call.values[2], Scalars):
            return nn.pad(x, flat, value=call.number(2, 0))
        inside = nn.pad(torch.ones(x.shape, dtype=torch.bool, device=x.device), flat)
        return torch.where(inside, nn.pad(x, flat), call.tensor(2).reshape(()))
    padded = [axis for axis in range(x.ndim) if (begins[axis], ends[axis]) != (0, 0)]
    if any(isinstance(size, int) and size < 0 for size in (*begins, *ends)):
        raise Unsupported(f"negative pads with `{mode}`")
    if padded and min(padded) >= 2 and x.ndim <= 5:
        flat = [item for axis in reversed(range(2, x.ndim)) for item in (begins[axis], ends[axis])]
        return nn.pad(x, flat, mode={"edge": "replicate", "reflect": "reflect", "wrap": "circular"}[mode])
    for axis in padded:
        size = x.shape[axis]
        at = torch.arange(-begins[axis], size + ends[axis], device=x.device)
        at = {
            "edge": lambda at, last: at.clamp(min=0).clamp(max=last),
            "reflect": lambda at, last: last - (last - at.abs()).abs(),
            "wrap": lambda at, last: at.remainder(last + 1),
        }[mode](at, size - 1)  # fmt: skip
        x = x.index_select(axis, at)
    return x


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
    given = call.attribute("value")
    value = torch.zeros(()) if given is None else to_tensor(numpy_helper.to_array(given), given.data_type).reshape(())
    return torch.full(call.numbers(0), value.item(), dtype=value.dtype, device=call.device)


def _constant(call: Call) -> Tensor:
    """A Constant that is an output of the graph; the others are initializers."""
    if (stored := constant_tensor(call.node)) is None:
        raise Unsupported("its strings or sparse values")
    return to_tensor(numpy_helper.to_array(stored), stored.data_type).to(call.device)


# ------------------------------------------------------------------------------------------------ picking


def _index(call: Call, at: int, size: Any) -> Tensor:
    """Indices with negative ones counted from the end."""
    found = call.tensor(at)
    value = call.values[at]
    if isinstance(value, Scalars) and all(isinstance(item, int) and item >= 0 for item in value.values.reshape(-1)):
        return found
    return torch.where(found < 0, found + size, found)


def _gather(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis")
    axis = axis % x.ndim
    if isinstance(call.values[1], Scalars) and call.scalars(1).ndim == 0:
        return x.select(axis, call.number(1))
    index = _index(call, 1, x.shape[axis])
    found = x.index_select(axis, index.reshape(-1))
    return found.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]]) if index.ndim != 1 else found


def _gather_elements(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.attribute("axis")
    return torch.gather(x, axis, _index(call, 1, x.shape[axis]).to(torch.int64))


def _gather_nd(call: Call) -> Tensor:
    x, index = call.tensor(0), call.tensor(1)
    if call.attribute("batch_dims"):
        raise Unsupported("batch dimensions")
    return x[tuple(index.unbind(-1))]


def _top_k(call: Call) -> tuple[Tensor, Tensor]:
    values, index = torch.topk(
        call.tensor(0), call.number(1), call.attribute("axis"), bool(call.attribute("largest")),
        bool(call.attribute("sorted")),
    )  # fmt: skip
    return values, index


def _arg(function: Callable[..., Tensor]) -> Rule:
    def rule(call: Call) -> Tensor:
        x, axis, keep = call.tensor(0), call.attribute("axis"), bool(call.attribute("keepdims"))
        if not call.attribute("select_last_index"):
            return function(x, axis, keep)
        return x.shape[axis] - 1 - function(x.flip(axis), axis, keep)

    return rule


def _depth_to_space(call: Call) -> Tensor:
    x, size = call.tensor(0), call.attribute("blocksize")
    count, channels, rows, columns = x.shape
    if call.attribute("mode") == "CRD":
        return nn.pixel_shuffle(x, size)
    blocks = x.reshape(count, size, size, channels // (size * size), rows, columns)
    return blocks.permute(0, 3, 4, 1, 5, 2).reshape(count, channels // (size * size), rows * size, columns * size)


def _space_to_depth(call: Call) -> Tensor:
    x, size = call.tensor(0), call.attribute("blocksize")
    count, channels, rows, columns = x.shape
    blocks = x.reshape(count, channels, rows // size, size, columns // size, size)
    return blocks.permute(0, 3, 5, 1, 2, 4).reshape(count, channels * size * size, rows // size, columns // size)


def _trilu(call: Call) -> Tensor:
    return (torch.triu if call.attribute("upper") else torch.tril)(call.tensor(0), call.number(1, 0))


def _cum_sum(call: Call) -> Tensor:
    x, axis = call.tensor(0), call.number(1)
    x = x.flip(axis) if call.attribute("reverse") else x
    found = torch.cumsum(x, axis, dtype=x.dtype)
    found = found - x if call.attribute("exclusive") else found
    return found.flip(axis) if call.attribute("reverse") else found


def _scatter_elements(call: Call) -> Tensor:
    x, updates, axis, how = call.tensor(0), call.tensor(2), call.attribute("axis"), call.attribute("reduction")
    index = _index(call, 1, x.shape[axis]).to(torch.int64)
    if how == "none":
        return x.scatter(axis, index, updates)
    named = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}[how]
    return x.scatter_reduce(axis, index, updates, named)


def _scatter_nd(call: Call) -> Tensor:
    if (how := call.attribute("reduction")) not in ("none", "add"):
        raise Unsupported(f"its reduction `{how}`")
    x, index = call.tensor(0), call.tensor(1)
    return x.index_put(tuple(index.unbind(-1)), call.tensor(2), accumulate=how == "add")


def _group_norm(call: Call) -> Tensor:
    return nn.group_norm(
        call.tensor(0), call.attribute("num_groups"), call.tensor(1), call.tensor(2), call.attribute("epsilon")
    )


def _rms_norm(call: Call) -> Tensor:
    x, scale = call.tensor(0), call.tensor(1)
    axes = list(range(call.attribute("axis") % x.ndim, x.ndim))
    wide = x.to(torch.float32) if x.dtype.itemsize < 4 else x
    found = wide * torch.rsqrt((wide * wide).mean(axes, True) + call.attribute("epsilon"))
    return found.to(x.dtype) * scale


def _is_inf(call: Call) -> Tensor:
    x = call.tensor(0)
    found = torch.isinf(x)
    found = found if call.attribute("detect_positive") else found & (x < 0)
    return found if call.attribute("detect_negative") else found & (x > 0)


def _one_hot(call: Call) -> Tensor:
    index, values, depth = call.tensor(0), call.tensor(2), call.number(1)
    index = torch.where(index < 0, index + depth, index).to(torch.int64)
    steps = torch.arange(depth, device=index.device)
    hot = torch.where(index.unsqueeze(-1) == steps, values[1], values[0])
    return hot.movedim(-1, call.attribute("axis"))


def _grid_sample(call: Call) -> Tensor:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(given := call.attribute("mode"), given)
    return nn.grid_sample(
        call.tensor(0), call.tensor(1), mode, call.attribute("padding_mode"), bool(call.attribute("align_corners"))
    )


def _reduce(function: Callable[[Tensor, list[int], bool], Tensor]) -> Rule:
    def rule(call: Call) -> Tensor:
        x = call.tensor(0)
        axes = [int(axis) % x.ndim for axis in call.numbers(1)] if call.has(1) else []
        if not axes:
            if call.attribute("noop_with_empty_axes"):
                if call.node.op_type not in _PLAIN_REDUCTIONS:
                    raise Unsupported("no axes with `noop_with_empty_axes`, which releases of ONNX Runtime read apart")
                return x
            axes = list(range(x.ndim))
        return function(x, axes, bool(call.attribute("keepdims"))).to(x.dtype)

    return rule


_PLAIN_REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")
"""Those whose result over no axis is their input."""


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keep)
    return x


_UNARY: dict[str, Callable[[Tensor], Any]] = {
    "Abs": torch.abs, "Ceil": torch.ceil, "Cos": torch.cos, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor,
    "GlobalAveragePool": lambda x: x.mean(_spatial_axes(x), True), "HardSwish": nn.hardswish, "Identity": lambda x: x,
    "GlobalMaxPool": lambda x: x.amax(_spatial_axes(x), True), "IsNaN": torch.isnan, "Log": torch.log,
    "Neg": torch.neg, "NonZero": lambda x: torch.nonzero(x).t().contiguous(), "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Acos": torch.acos, "Asin": torch.asin, "Atan": torch.atan, "Cosh": torch.cosh,
    "Mish": nn.mish, "Sinh": torch.sinh, "Softsign": nn.softsign, "Tan": torch.tan,
    "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Softplus": lambda x: nn.softplus(x), "Sqrt": torch.sqrt, "Tanh": torch.tanh,
}  # fmt: skip
_BINARY: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "Add": torch.add, "And": torch.logical_and, "Div": _divide, "Equal": torch.eq, "Greater": torch.gt,
    "GreaterOrEqual": torch.ge, "Less": torch.lt, "LessOrEqual": torch.le, "MatMul": torch.matmul, "Mul": torch.mul,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "PRelu": lambda x, slope: torch.where(x < 0, x * slope, x),
    "Sub": torch.sub,
}  # fmt: skip
RULES: dict[str, Rule] = {
    **{name: _unary(function) for name, function in _UNARY.items()},
    **{name: _binary(function) for name, function in _BINARY.items()},
    ATTENTION: _attention, LINEAR: linear, CONVOLUTION: convolution, PATCHES: patches,
    "ArgMax": _arg(torch.argmax), "ArgMin": _arg(torch.argmin), "AveragePool": average_pool,
    "BatchNormalization": _batch_norm, "CastLike": _cast_like, "Clip": _clip,
    "Cast": lambda call: _cast_to(call.tensor(0), call.attribute("to"), call),
    "Concat": lambda call: torch.cat([call.tensor(at) for at in range(len(call.values))], call.attribute("axis")),
    "Constant": _constant, "ConstantOfShape": _constant_of_shape, "Conv": conv,
    "Celu": lambda call: nn.celu(call.tensor(0), call.attribute("alpha")), "CumSum": _cum_sum,
    "DepthToSpace": _depth_to_space, "GroupNormalization": _group_norm, "IsInf": _is_inf, "OneHot": _one_hot,
    "RMSNormalization": _rms_norm, "ScatterElements": _scatter_elements, "ScatterND": _scatter_nd,
    "Selu": lambda call: call.attribute("gamma") * nn.elu(call.tensor(0), call.attribute("alpha")),
    "SpaceToDepth": _space_to_depth, "Trilu": _trilu,
    "Swish": lambda call: call.tensor(0) * torch.sigmoid(call.attribute("alpha") * call.tensor(0)),
    "ThresholdedRelu": lambda call: torch.where(call.tensor(0) > call.attribute("alpha"), call.tensor(0), 0.0),
    "Mean": lambda call: _fold(torch.add)(call) / len(call.values),
    "ConvTranspose": conv_transpose, "DequantizeLinear": _dequantize,
    "Dropout": _dropout, "Einsum": _einsum,
    "Elu": lambda call: nn.elu(call.tensor(0), call.attribute("alpha")), "Expand": _expand, "Flatten": _flatten,
    "Gather": _gather, "GatherElements": _gather_elements, "GatherND": _gather_nd, "Gelu": _gelu, "Gemm": _gemm,
    "GridSample": _grid_sample,
    "HardSigmoid": lambda call: torch.clamp(call.tensor(0) * call.attribute("alpha") + call.attribute("beta"), 0, 1),
    "If": branch, "Loop": loop, "LSTM": lstm, "GRU": gru, "RNN": rnn,
    "InstanceNormalization": _instance_norm, "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda call: nn.leaky_relu(call.tensor(0), call.attribute("alpha")),
    "LogSoftmax": lambda call: torch.log_softmax(call.tensor(0), call.attribute("axis")),
    "Max": _fold(torch.maximum), "MaxPool": max_pool, "Min": _fold(torch.minimum), "Mod": _mod, "Pad": _pad,
    "Pow": _pow, "QuantizeLinear": _quantize, "Range": _range,
    "ReduceL1": _reduce(lambda x, axes, keep: x.abs().sum(axes, keep)),
    "ReduceLogSum": _reduce(lambda x, axes, keep: x.sum(axes, keep).log()), "ReduceLogSumExp": _reduce(torch.logsumexp),
    "ReduceSumSquare": _reduce(lambda x, axes, keep: (x * x).sum(axes, keep)),
    "ReduceL2": _reduce(lambda x, axes, keep: (x * x).sum(axes, keep).sqrt()), "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean), "ReduceMin": _reduce(torch.amin), "ReduceProd": _reduce(_product),
    "ReduceSum": _reduce(lambda x, axes, keep: torch.sum(x, axes, keep, dtype=x.dtype)), "Reshape": _reshape,
    "Resize": resize, "Slice": _slice,
    "Softmax": lambda call: torch.softmax(call.tensor(0), call.attribute("axis")), "Split": _split,
    "Squeeze": _squeeze, "Sum": _fold(torch.add), "Tile": lambda call: call.tensor(0).repeat(call.numbers(1)),
    "TopK": _top_k, "Transpose": _transpose, "Unsqueeze": _unsqueeze,
    "Where": lambda call: torch.where(call.tensor(0), call.tensor(1), call.tensor(2)),
}  # fmt: skip

"""Type rules of QuantizeLinear and DequantizeLinear: scales, zero points, axes and blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.edit_graph import inline_value
from trt_engine.graph.lint_rules.model_view import error, warning
from trt_engine.graph.operators import is_trt_only
from trt_engine.graph.typed_graph import ModelView, Op, Tensor, type_label
from trt_engine.records.base import Finding

_E8M0, _FP8, _FP4, _INT4 = (f"tensor({name})" for name in ("float8e8m0", "float8e4m3fn", "float4e2m1", "int4"))
_QUANTIZED_TYPES = frozenset(("tensor(int8)", _FP8, _INT4, _FP4))
_LAYOUT_OPS = frozenset(
    "Transpose Reshape Squeeze Unsqueeze Flatten Identity Slice Split Expand Gather GatherElements GatherND Concat Cast "
    "TopK ReduceMax Max MaxPool Where".split()
)
_UNIT_RANGE_OPS = frozenset("Sigmoid Softmax HardSigmoid".split())
_MIN_LEVELS = 32
"""Minimum integer levels between 0 and 1 for scores to be distinguishable."""
_BLOCK_SIZES = {_FP4: 16, _E8M0: 32}
FLOAT_TYPES = frozenset(f"tensor({name})" for name in ("float", "float16", "bfloat16", "double"))


def _qdq_ops(seen: ModelView) -> Iterator[tuple[Op, bool]]:
    """Yield QuantizeLinear (True) and DequantizeLinear (False) nodes of the standard and of ONNX Runtime."""
    for op in seen.ops:
        if op.node.op_type in ("QuantizeLinear", "DequantizeLinear") and not is_trt_only(op.node):
            yield op, op.node.op_type == "QuantizeLinear"


def _constant_value(tensor: Tensor | None) -> npt.NDArray[np.float32] | None:
    """The value of an inline constant, else None."""
    return inline_value(tensor.value if tensor is not None else None)


def _is_build_constant(tensor: Tensor | None, depth: int = 8) -> bool:
    """True if the tensor is known at build time."""
    if tensor is None or tensor.value is not None:
        return tensor is not None
    op = tensor.producer
    if op is None or depth == 0:
        return tensor.scope.owner is None and op is None and tensor not in tensor.scope.inputs
    return op.node.op_type == "Constant" or (
        bool(op.inputs) and all(item is None or _is_build_constant(item, depth - 1) for item in op.inputs)
    )


def _is_tensorrt_scale(tensor: Tensor | None, depth: int = 4) -> bool:
    """True for scales computed by a TensorRT operator."""
    op = tensor.producer if tensor is not None else None
    if op is None or depth == 0:
        return False
    return is_trt_only(op.node) or any(_is_tensorrt_scale(item, depth - 1) for item in op.inputs)


def check_zero_points(seen: ModelView) -> Iterator[Finding]:
    for op, _ in _qdq_ops(seen):
        zero = op.input(2)
        if zero is None:
            continue
        value = _constant_value(zero)
        if value is None and not _is_build_constant(zero):
            yield error(
                "zero-point-not-constant",
                f"the zero point `{zero.name}` is computed; TensorRT takes none, or zeros known when the engine is built",
                op.label,
                "quantize symmetrically, with constant zero points of 0",
            )
        elif value is not None and np.any(value != 0):
            yield error(
                "asymmetric-zero-point",
                f"the zero point `{zero.name}` is {value.reshape(-1)[value.reshape(-1) != 0][0]:g}; "
                "TensorRT quantizes symmetrically, zero points are 0",
                op.label,
                "quantize again with symmetric activations and weights: `trt-engine quantize` does",
            )


def check_quantized_types(seen: ModelView) -> Iterator[Finding]:
    for op, quantizes in _qdq_ops(seen):
        tensor = op.output(0) if quantizes else op.input(0)
        kind = tensor.type_str if tensor is not None else ""
        if tensor is None or not kind or kind in _QUANTIZED_TYPES or kind == _E8M0:
            continue
        yield error(
            "quantized-type",
            f"`{op.node.op_type}` works on {type_label(kind)}; TensorRT quantizes to int8, fp8 (E4M3), int4 and fp4",
            op.label,
            "quantize again to one of them: `trt-engine quantize` does",
        )


def check_scales(seen: ModelView) -> Iterator[Finding]:
    for op, quantizes in _qdq_ops(seen):
        scale = op.input(1)
        if scale is None:
            continue
        value = _constant_value(scale)
        if value is not None and scale.type_str != _E8M0 and not (np.isfinite(value).all() and (value > 0).all()):
            bad = value.reshape(-1)[~((value.reshape(-1) > 0) & np.isfinite(value.reshape(-1)))][0]
            yield error(
                "scale-not-positive",
                f"the scale `{scale.name}` holds {bad:g}; scales are positive and finite",
                op.label,
                "calibrate again with data that reaches this tensor, or leave it in high precision",
            )
        if not _is_build_constant(scale) and not _is_tensorrt_scale(scale):
            yield error(
                "scale-not-constant",
                f"the scale `{scale.name}` is computed from data; TensorRT wants it when the engine is built",
                op.label,
                "quantize statically, from calibration data",
            )
        high = op.input(0) if quantizes else op.output(0)
        if (
            high is not None
            and high.type_str in FLOAT_TYPES
            and scale.type_str in FLOAT_TYPES
            and high.type_str != scale.type_str
        ):  # fmt: skip
            yield error(
                "scale-type-differs",
                f"the scale `{scale.name}` is {type_label(scale.type_str)} and the high-precision side `{high.name}` is "
                f"{type_label(high.type_str)}",
                op.label,
                "store the scale in the type of what is quantized",
            )


def check_channel_axes(seen: ModelView) -> Iterator[Finding]:
    """Per-channel scales must be on weights, one for each output channel."""
    for op, quantizes in _qdq_ops(seen):
        shape, scale = seen.shape(op.input(0)), seen.shape(op.input(1))
        given = walk.attributes(op.node)
        if scale is None or len(scale) != 1 or (scale == (1,) and (shape is None or len(shape) == 0)):
            continue
        axis = int(given.get("axis", 1))
        if shape is None:
            continue
        if not -len(shape) <= axis < len(shape):
            if math.prod(scale) > 1:
                yield error(
                    "axis-out-of-range",
                    f"the scale of `{op.label}` is along axis {axis}, and `{_data_name(op)}` has {len(shape)} dimensions",
                    op.label,
                    "quantize again, or set the axis of the output channels",
                )
            continue
        if scale == (1,):
            continue
        size = shape[axis]
        if size >= 0 and scale[0] >= 0 and size != scale[0]:
            yield error(
                "scale-length",
                f"`{_data_name(op)}` has {size} channels along axis {axis} and {scale[0]} scales",
                op.label,
                "set the axis the scales were computed along",
            )
            continue
        if not _is_build_constant(op.input(0)) and not _quantized_constant(op):
            yield error(
                "per-channel-activation",
                f"`{_data_name(op)}` is an activation with {scale[0]} scales; TensorRT takes one for each activation tensor",
                op.label,
                "quantize activations per tensor, weights per channel",
            )
            continue
        if quantizes:
            continue
        for user, right in _weight_axes(op, len(shape)):
            if axis % len(shape) != right:
                yield error(
                    "axis-not-output-channels",
                    f"the scales of the weights `{_data_name(op)}` are along axis {axis}; the output channels of "
                    f"`{user.node.op_type}` are along axis {right}",
                    op.label,
                    f"quantize along axis {right}",
                )


def _data_name(op: Op) -> str:
    tensor = op.input(0)
    return tensor.name if tensor is not None else op.label


def _quantized_constant(op: Op) -> bool:
    """True for a DequantizeLinear of a quantized constant."""
    source = op.input(0)
    maker = source.producer if source is not None else None
    return maker is not None and is_quantize(maker.node) and _is_build_constant(maker.input(0))


def _weight_axes(op: Op, rank: int) -> Iterator[tuple[Op, int]]:
    """The layers that read a DequantizeLinear as their weights, and their output channel axis."""
    made = op.output(0)
    for user, position in _consumers(made):
        kind = user.node.op_type
        if position != 1 or walk.domain_of(user.node):
            continue
        if kind == "Conv":
            yield user, 0
        elif kind == "ConvTranspose" and walk.attributes(user.node).get("group", 1) == 1:
            yield user, 1
        elif kind == "Gemm":
            yield user, 0 if walk.attributes(user.node).get("transB") else 1
        elif kind == "MatMul" and rank >= 2:
            yield user, rank - 1


def _consumers(tensor: Tensor | None) -> Iterator[tuple[Op, int]]:
    """Consumers of a tensor, through Casts and Identities."""
    for user, position in tensor.consumers if tensor is not None else ():
        if user.node.op_type in ("Cast", "Identity") and not walk.domain_of(user.node):
            yield from _consumers(user.outputs[0])
        else:
            yield user, position


def check_blocks(seen: ModelView) -> Iterator[Finding]:
    """Block scales must have the input's rank and divide one of its last two axes."""
    for op, _ in _qdq_ops(seen):
        shape, scale = seen.shape(op.input(0)), seen.shape(op.input(1))
        given = walk.attributes(op.node)
        block, axis = int(given.get("block_size", 0)), int(given.get("axis", 1))
        if scale is None or (len(scale) < 2 and not block):
            continue
        if not block:
            yield error(
                "block-size-missing",
                f"the scale of `{op.label}` has {len(scale)} dimensions and no `block_size` is given",
                op.label,
                "set `block_size`, or give one scale or one for each channel",
            )
        elif shape is None:
            continue
        elif len(scale) != len(shape):
            yield error(
                "block-scale-rank",
                f"block scales have the rank of what they scale: `{_data_name(op)}` has {len(shape)} dimensions, its scale "
                f"{len(scale)}",
                op.label,
                "store one scale for each block, in the shape of the tensor",
            )
        elif not -len(shape) <= axis < len(shape):
            yield error(
                "axis-out-of-range",
                f"the blocks of `{op.label}` are along axis {axis}, and `{_data_name(op)}` has {len(shape)} dimensions",
                op.label,
                "use the last axis or the one before it",
            )
        else:
            axis %= len(shape)
            yield from _check_block_type(op, axis, len(shape), block)
            yield from _check_block_count(op, axis, shape[axis], scale[axis], block)
            yield from _check_block_axis(op, axis, len(shape))


def _check_block_type(op: Op, axis: int, rank: int, block: int) -> Iterator[Finding]:
    """TensorRT's limits on axis, rank and block size, by the quantized type."""
    source = op.input(0)
    kind = source.type_str if source is not None and not is_quantize(op.node) else ""
    kind = kind or (made.type_str if (made := op.output(0)) else "")
    if axis < rank - 2:
        yield error(
            "block-axis",
            f"the blocks of `{_data_name(op)}` are along axis {axis} of {rank}; TensorRT supports only the last two axes",
            op.label,
            "quantize along one of them",
        )
    if kind == _INT4 and rank != 2:
        yield error(
            "block-rank",
            f"`{_data_name(op)}` holds int4 in blocks and has {rank} dimensions; TensorRT takes two",
            op.label,
            "quantize weights of MatMul and Gemm in blocks, others not",
        )
    scale_kind = (op.input(1) or source).type_str if source is not None else ""
    wanted = _BLOCK_SIZES.get(scale_kind) or _BLOCK_SIZES.get(kind)
    if wanted and block != wanted:
        yield error(
            "block-size",
            f"`{op.label}` has blocks of {block}; {type_label(kind)} goes with blocks of {wanted}",
            op.label,
            f"quantize with `block_size={wanted}`",
        )


def _check_block_count(op: Op, axis: int, size: int, scales: int, block: int) -> Iterator[Finding]:
    """Blocks must divide the axis, and there must be a scale for each."""
    if size >= 0 and size % block:
        yield error(
            "block-does-not-divide",
            f"`{_data_name(op)}` has {size} elements along axis {axis}, which blocks of {block} do not divide",
            op.label,
            "choose a block size that divides it, pad the weights, or leave this layer out",
        )
    elif size >= 0 and scales >= 0 and scales != size // block:
        yield error(
            "block-scale-shape",
            f"`{_data_name(op)}` has {size // block} blocks along axis {axis} and {scales} scales there",
            op.label,
            "the axis or the block size is not the one the scales were computed with",
        )


def _check_block_axis(op: Op, axis: int, rank: int) -> Iterator[Finding]:
    """Blocks must be along the reduction axis of the product."""
    made = op.output(0)
    for user, position in _consumers(made):
        kind = user.node.op_type
        if position != 1 or kind not in ("Gemm", "MatMul") or walk.domain_of(user.node) or rank < 2:
            continue
        turned = kind == "Gemm" and bool(walk.attributes(user.node).get("transB"))
        right = rank - 1 if turned else rank - 2
        if axis == right:
            continue
        if turned:
            yield error(
                "int4-gemm-transb",
                f"the weights `{_data_name(op)}` are blocked along axis {axis}, and `Gemm(transB=1)` sums over axis "
                f"{right}: the known fault of quantizers with this form of Gemm",
                user.label,
                f"set `axis={right}` if the scales were computed along it, else quantize this layer again as MatMul + Add",
            )
        else:
            yield warning(
                "block-not-along-sum",
                f"the weights `{_data_name(op)}` are blocked along axis {axis}, and `{kind}` sums over axis {right}: "
                "no kernel reads that",
                op.label,
                f"quantize along axis {right}",
            )


def check_pairs(seen: ModelView) -> Iterator[Finding]:
    """A Q/DQ pair must share scale and axis."""
    for op, quantizes in _qdq_ops(seen):
        source = op.input(0)
        maker = source.producer if source is not None else None
        if quantizes or maker is None or maker.node.op_type != "QuantizeLinear":
            continue
        one, other = maker.input(1), op.input(1)
        first, second = _constant_value(one), _constant_value(other)
        if one is not other and first is not None and second is not None and not np.array_equal(first, second):
            yield error(
                "pair-scales-differ",
                f"`{maker.label}` writes `{_data_name(op)}` with the scale `{one.name if one else ''}` and "
                f"`{op.label}` reads it with `{other.name if other else ''}`, which has other values",
                op.label,
                "give both the same scale",
            )
        rank = len(seen.shape(source) or ())
        axes = [int(walk.attributes(item.node).get("axis", 1)) for item in (maker, op)]
        channels = first is not None and first.size > 1
        if channels and (axes[0] % rank != axes[1] % rank if rank else axes[0] != axes[1]):
            yield error(
                "pair-axes-differ",
                f"`{maker.label}` quantizes along axis {axes[0]} and `{op.label}` reads back along axis {axes[1]}",
                op.label,
                "give both the same axis",
            )


def check_score_scales(seen: ModelView) -> Iterator[Finding]:
    """Scores in [0, 1] must not share the scale of much larger values."""
    for op, quantizes in _qdq_ops(seen):
        made = op.output(0)
        if not quantizes or made is None or made.type_str not in ("tensor(int8)", "tensor(uint8)", "tensor(int4)"):
            continue
        scale = _constant_value(op.input(1))
        if scale is None or scale.size != 1 or not scale.reshape(-1)[0] > 0:
            continue
        levels = 1 / float(scale.reshape(-1)[0])
        scores = _score_source(op.input(0))
        if scores is None or levels >= _MIN_LEVELS:
            continue
        yield error(
            "scores-share-a-scale",
            f"`{_data_name(op)}` holds scores between 0 and 1 (from `{scores.label}`) under a scale of "
            f"{float(scale.reshape(-1)[0]):.3g}: {levels:.1f} steps for all of them",
            op.label,
            "boxes and scores share one scale: leave the Concat of a detector's head unquantized",
        )


def _score_source(tensor: Tensor | None, depth: int = 64) -> Op | None:
    """The Sigmoid or Softmax upstream of a tensor, through layout ops, Concat and Q/DQ."""
    op = tensor.producer if tensor is not None else None
    if op is None or depth == 0:
        return None
    if op.node.op_type in _UNIT_RANGE_OPS:
        return op
    if op.node.op_type in _LAYOUT_OPS or is_quantize(op.node) or is_dequantize(op.node):
        inputs = op.inputs if op.node.op_type == "Concat" else op.inputs[:1]
        return next((found for item in inputs if (found := _score_source(item, depth - 1)) is not None), None)
    return None

"""Output shapes of ONNX Runtime's contrib operators, as exporters and its optimiser write them, and of standard operators
where ONNX's inference is not what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.edit_graph import retain_items
from trt_engine.graph.shape_inference import TensorInfo, schema_of
from trt_engine.tensors import Shape

MATMUL_INPUTS = {  # positions of the two factors
    "FusedMatMul": (0, 1),
    "TransposeMatMul": (0, 1),
    "GemmFastGelu": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "DynamicQuantizeMatMul": (0, 1),
    "MatMulInteger16": (0, 1),
}
_AS_CONV = {"FusedConv": 3, "Conv": 3}
_AS_IS = ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")
_SAME_SHAPE = frozenset(
    "Gelu FastGelu QuickGelu BiasGelu BiasAdd ScaledSiLU GroupNorm SkipGroupNorm SkipLayerNormalization "
    "SkipSimplifiedLayerNormalization SimplifiedLayerNormalization LayerNormalization EmbedLayerNormalization BiasSoftmax "
    "QLinearSigmoid QLinearLeakyRelu QLinearSoftmax RotaryEmbedding GemmaRotaryEmbedding Inverse ReorderInput".split()
)

IN_DEFAULT_DOMAIN = ("SimplifiedLayerNormalization", "LayerNormalization")
"""Operators that ONNX Runtime adds to the standard's domain; LayerNormalization below opset 17."""
_WITH_SUM = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
"""Operators whose fourth output is the sum that they normalize."""


def infer_contrib_outputs(
    tracer: Any, node: NodeProto, domain: str, inputs: Sequence[TensorInfo | None]
) -> tuple[TensorInfo, ...] | None:
    """Inferred outputs of a non-standard operator, and of a standard one that ONNX infers otherwise; None for any other."""
    op = node.op_type
    if domain == "" and op in _CORRECTIONS:
        return _corrected(tracer, node, inputs)
    if domain == "" and (op not in IN_DEFAULT_DOMAIN or schema_of(op, "", tracer.opsets.get("", 0)) is not None):
        return None
    if not inputs or inputs[0] is None:
        return None
    if domain == "com.ms.internal.nhwc":
        return _infer_nhwc(tracer, node, inputs)
    first, given = inputs[0], walk.attributes(node)
    if domain == "trt":
        return _tensorrt_outputs(op, first, given, len(node.output))
    rest = tuple(TensorInfo(first.elem) for _ in node.output[1:])
    if op in _AS_CONV:
        return _infer_as_standard(tracer, node, "Conv", inputs, 3) + rest
    if op in _AS_IS and domain == "com.microsoft.nchwc":
        return _infer_as_standard(tracer, node, op, inputs, 1) + rest
    if op == "FusedGemm":
        return _infer_as_standard(tracer, node, "Gemm", inputs, 3) + rest
    if op in _SAME_SHAPE:
        same = TensorInfo(first.elem, first.shape)
        return (same, *rest[:2], *[same] * len(rest[2:])) if op in _WITH_SUM else (same, *rest)
    rule = _matmul if op in MATMUL_INPUTS else _RULES.get(op)
    if rule is None or first.shape is None:
        return None
    try:
        made = rule(first, inputs, given)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        return None
    return None if made is None else (made, *rest)


def _corrected(tracer: Any, node: NodeProto, inputs: Sequence[TensorInfo | None]) -> tuple[TensorInfo, ...]:
    found: tuple[TensorInfo, ...] = tracer.by_schema(node, "", inputs)
    shape = found[0].shape if found else None
    if shape is None or not inputs or inputs[0] is None or inputs[0].shape is None:
        return found
    try:
        made = _CORRECTIONS[node.op_type](shape, inputs, walk.attributes(node))
    except (IndexError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        return found
    return tuple(TensorInfo(item.elem, made) if item.shape == shape else item for item in found)


def _stft(shape: Shape, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> Shape:
    """`onesided` is 1 unless it is stated, which ONNX's inference takes for 0."""
    return shape if "onesided" in attrs or shape[2] < 0 else (*shape[:2], shape[2] // 2 + 1, *shape[3:])


def _nonzero(shape: Shape, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> Shape:
    """A scalar has one axis there."""
    return (max(shape[0], 1), *shape[1:])


def _pool(shape: Shape, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> Shape:
    """No window begins behind the data (`ceil_mode`), and the padding of SAME does not know `dilations`."""
    data, kernel = _sizes(inputs[0])[2:], attrs["kernel_shape"]
    rank = len(kernel)
    pads = attrs.get("pads") or [0] * (2 * rank)
    strides, dilations = attrs.get("strides") or [1] * rank, attrs.get("dilations") or [1] * rank
    padding, ceil = bytes(attrs.get("auto_pad", b"")), bool(attrs.get("ceil_mode"))
    made = list(shape)
    for at, size in enumerate(data):
        if made[2 + at] < 0 or size < 0:
            continue
        stride, before = strides[at], pads[at]
        if padding.startswith(b"SAME"):
            missing = max((-(-size // stride) - 1) * stride + kernel[at] - size, 0)
            before = (missing + 1) // 2 if padding == b"SAME_LOWER" else missing // 2
            steps = size + missing - dilations[at] * (kernel[at] - 1) - 1
            made[2 + at] = (-(-steps // stride) if ceil else steps // stride) + 1
        if ceil and (made[2 + at] - 1) * stride >= size + before:
            made[2 + at] -= 1
    return tuple(made)


def _transposed_conv(shape: Shape, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> Shape:
    """With the padding of SAME, `output_padding` counts before the padding."""
    extra = attrs.get("output_padding")
    if not extra or attrs.get("output_shape") or not bytes(attrs.get("auto_pad", b"")).startswith(b"SAME"):
        return shape
    data, kernel = _sizes(inputs[0])[2:], attrs.get("kernel_shape") or _sizes(inputs[1])[2:]
    strides, dilations = attrs.get("strides") or [1] * len(data), attrs.get("dilations") or [1] * len(data)
    return (
        *shape[:2],
        *(
            min((size - 1) * stride + more + dilation * (width - 1) + 1, size * stride) if size >= 0 else -1
            for size, stride, dilation, width, more in zip(data, strides, dilations, kernel, extra, strict=True)
        ),
    )


_CORRECTIONS: dict[str, Callable[[Shape, Sequence[TensorInfo | None], dict[str, Any]], Shape]] = {
    "STFT": _stft,
    "NonZero": _nonzero,
    "MaxPool": _pool,
    "AveragePool": _pool,
    "LpPool": _pool,
    "ConvTranspose": _transposed_conv,
}


def _tensorrt_outputs(op: str, first: TensorInfo, attrs: dict[str, Any], count: int) -> tuple[TensorInfo, ...] | None:
    """TensorRT's own quantisation operators (source: importers of the public onnx-tensorrt parser)."""
    if op in ("TRT_FP8QuantizeLinear", "TRT_INT4QuantizeLinear"):
        return (TensorInfo(TensorProto.FLOAT8E4M3FN if "FP8" in op else TensorProto.INT4, first.shape),)
    if op == "TRT_MXFP8DequantizeLinear":
        return (TensorInfo(attrs.get("output_dtype") or TensorProto.FLOAT, first.shape),)
    if op == "TRT_FP4DynamicQuantize":
        kinds, axis, size = (TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN), attrs.get("axis", 1), 16
    elif op == "TRT_MXFP8DynamicQuantize":
        kinds, axis, size = (TensorProto.FLOAT8E4M3FN, TensorProto.UINT8), attrs.get("axis", -1), 32
    else:
        return None
    scales = None
    if first.shape is not None and -len(first.shape) <= axis < len(first.shape):
        sizes = list(first.shape)
        sizes[axis] = sizes[axis] // size if sizes[axis] >= 0 else -1
        scales = tuple(sizes)
    return (TensorInfo(kinds[0], first.shape), TensorInfo(kinds[1], scales))[:count]


def _infer_as_standard(
    tracer: Any, node: NodeProto, op: str, inputs: Sequence[TensorInfo | None], take: int
) -> tuple[TensorInfo, ...]:
    """Infer as the standard operator it extends, without its extra inputs and attributes."""
    extra = ("activation", "activation_params", "activation_alpha", "activation_beta", "activation_gamma")
    plain = deepcopy(node)
    plain.op_type, plain.domain = op, ""
    retain_items(plain.attribute, lambda item: item.name not in extra)
    del plain.input[take:]
    del plain.output[1:]
    found: tuple[TensorInfo, ...] = tracer.by_schema(plain, "", inputs[:take])
    return found


def _infer_nhwc(tracer: Any, node: NodeProto, inputs: Sequence[TensorInfo | None]) -> tuple[TensorInfo, ...] | None:
    """Infer as the standard operator on `[N, C, ...]`, whose other inputs are as they are here."""
    first = inputs[0]
    if first is None or first.shape is None or len(first.shape) < 3:
        return None
    batch, *sizes, channels = first.shape
    moved = TensorInfo(first.elem, (batch, channels, *sizes))
    found = _infer_as_standard(tracer, node, node.op_type, (moved, *inputs[1:]), len(inputs))
    return tuple(
        TensorInfo(item.elem, (item.shape[0], *item.shape[2:], item.shape[1]))
        if item.shape is not None and len(item.shape) == len(first.shape)
        else item
        for item in found
    )


_Rule = Callable[[TensorInfo, Sequence[TensorInfo | None], dict[str, Any]], TensorInfo | None]
"""Rule for a node's first output, from its first input, all inputs and its attributes; it may raise `ValueError`."""


def _sizes(fact: TensorInfo | None) -> Shape:
    if fact is None or not fact.shape:
        raise ValueError("unknown shape, or none")
    return fact.shape


def _matmul(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    a, b = _sizes(first), _sizes(inputs[1])
    if len(b) < 2 or len(a) < 2:
        return None
    rows = a[-1] if attrs.get("transA") else a[-2]
    columns = b[-2] if attrs.get("transB") else b[-1]
    lead = a[:-2] if len(a) >= len(b) else b[:-2]
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    elem = next((item.elem for item in inputs if item is not None and item.elem in floats), TensorProto.INT32)
    return TensorInfo(elem, (*lead, rows, columns))


def _replace_last_axis(size: str) -> _Rule:
    return lambda first, inputs, attrs: TensorInfo(first.elem, (*_sizes(first)[:-1], int(attrs[size])))


def _attention(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    sizes, packed = attrs.get("qkv_hidden_sizes"), _sizes(inputs[1])[-1]
    return TensorInfo(first.elem, (*_sizes(first)[:-1], int(sizes[2]) if sizes else packed // 3))


def _multi_head(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    query, value = _sizes(first), inputs[2] if len(inputs) > 2 else None
    if len(query) == 5:  # packed: batch, sequence, heads, 3, head size
        return TensorInfo(first.elem, (*query[:2], query[2] * query[4]))
    hidden = query[-1]
    if value is not None and value.shape is not None:
        hidden = value.shape[-1] if len(value.shape) == 3 else value.shape[1] * value.shape[3]
    return TensorInfo(first.elem, (*query[:-1], hidden))


def _group_query(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    query, packed = _sizes(first), len(inputs) < 2 or inputs[1] is None
    heads, shared = int(attrs["num_heads"]), int(attrs["kv_num_heads"])
    hidden = query[-1] * heads // (heads + 2 * shared) if packed else query[-1]
    return TensorInfo(first.elem, (*query[:-1], hidden))


def _quantize(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    zero = inputs[2] if len(inputs) > 2 else None
    return TensorInfo(zero.elem if zero is not None else TensorProto.UINT8, first.shape)


def _dequantize(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    scale = inputs[1]
    return None if scale is None else TensorInfo(scale.elem, first.shape)


def _cast_to(elem: int) -> _Rule:
    return lambda first, inputs, attrs: TensorInfo(elem, first.shape)


def _broadcast(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    b = inputs[3]
    if b is None or first.shape is None or b.shape is None or not (first.is_static and b.is_static):
        return None
    return TensorInfo(first.elem, np.broadcast_shapes(first.shape, b.shape))


def _quantized_conv(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    """QLinearConv with channels last, as ONNX Runtime's optimiser writes it; weights are OIHW."""
    kernel = _sizes(inputs[3])
    zero = inputs[7] if len(inputs) > 7 else None
    return _windows(first, kernel[2:], kernel[0], zero.elem if zero is not None else first.elem, attrs)


def _windows(first: TensorInfo, kernel: Shape, channels: int, elem: int, attrs: dict[str, Any]) -> TensorInfo | None:
    """The output of windows that move over `[N, C, ...]`, or `[N, ..., C]` with `channels_last`."""
    x, rank, last = _sizes(first), len(kernel), bool(attrs.get("channels_last"))
    if attrs.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    pads = attrs.get("pads") or [0] * (2 * rank)
    strides, dilations = attrs.get("strides") or [1] * rank, attrs.get("dilations") or [1] * rank
    more = [stride - 1 if attrs.get("ceil_mode") else 0 for stride in strides]
    out = tuple(
        (size + pads[i] + pads[i + rank] - dilations[i] * (kernel[i] - 1) - 1 + more[i]) // strides[i] + 1
        if size >= 0
        else -1
        for i, size in enumerate(x[1:-1] if last else x[2:])
    )
    return TensorInfo(elem, (x[0], *out, channels) if last else (x[0], channels, *out))


def _quantized_pool(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    x, last = _sizes(first), bool(attrs.get("channels_last"))
    kernel = attrs.get("kernel_shape")
    if kernel is None:  # over everything
        ones = (1,) * (len(x) - 2)
        return TensorInfo(first.elem, (x[0], *ones, x[-1]) if last else (*x[:2], *ones))
    return _windows(first, tuple(kernel), x[-1] if last else x[1], first.elem, attrs)


def _quantized_gemm(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    a, b = _sizes(first), _sizes(inputs[3])
    zero = inputs[8] if len(inputs) > 8 else None
    made = (a[1 if attrs.get("transA") else 0], b[0 if attrs.get("transB") else 1])
    return TensorInfo(zero.elem if zero is not None else TensorProto.FLOAT, made)


def _quantized_concat(
    first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]
) -> TensorInfo | None:
    """Its inputs are the output's scale and zero point, then data, scale and zero point of each part."""
    parts, zero = [_sizes(item) for item in inputs[2::3]], inputs[1]
    sizes, axis = list(parts[0]), int(attrs["axis"])
    along = [part[axis] for part in parts]
    sizes[axis] = sum(along) if min(along) >= 0 else -1
    return None if zero is None else TensorInfo(zero.elem, tuple(sizes))


def _channels(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    sizes = list(_sizes(first))
    sizes[-1 if attrs.get("channels_last") else 1] = int(attrs["channels"])
    return TensorInfo(first.elem, tuple(sizes))


def _upsample(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    pairs = zip(_sizes(first), attrs["scales"], strict=True)
    return TensorInfo(first.elem, tuple(size * int(scale) for size, scale in pairs))


def _gather_blocks(first: TensorInfo, inputs: Sequence[TensorInfo | None], attrs: dict[str, Any]) -> TensorInfo | None:
    """Two packed values of 4 bits are one uint8 of the last axis."""
    sizes, at, scales = list(_sizes(first)), int(attrs.get("gather_axis", 0)), inputs[2]
    if first.elem == TensorProto.UINT8 and attrs.get("bits", 4) == 4:
        sizes[-1] *= 2 if sizes[-1] >= 0 else 1
    sizes[at : at + 1 or None] = _sizes(inputs[1])
    return None if scales is None else TensorInfo(scales.elem, tuple(sizes))


_RULES: dict[str, _Rule] = {
    "GatherBlockQuantized": _gather_blocks,
    "MatMulNBits": _replace_last_axis("N"),
    "MatMulBnb4": _replace_last_axis("N"),
    "Attention": _attention,
    "QAttention": _attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _group_query,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "TRT_MXFP8DequantizeLinear": _cast_to(TensorProto.FLOAT),
    "TRT_FP8DequantizeLinear": _cast_to(TensorProto.FLOAT),
    "TRT_FP8QuantizeLinear": _cast_to(TensorProto.FLOAT8E4M3FN),
    "QLinearAdd": _broadcast,
    "QLinearMul": _broadcast,
    "QLinearConv": _quantized_conv,
    "QLinearConcat": _quantized_concat,
    **dict.fromkeys(("QLinearAveragePool", "QLinearGlobalAveragePool"), _quantized_pool),
    "NhwcMaxPool": lambda first, inputs, attrs: _quantized_pool(first, inputs, {**attrs, "channels_last": 1}),
    "QGemm": _quantized_gemm,
    "ReorderOutput": _channels,
    "Upsample": _upsample,
}

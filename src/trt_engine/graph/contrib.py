"""Output shapes of the operators ONNX Runtime adds to the standard, as far as exporters and its optimiser write them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx import NodeProto, TensorProto

from trt_engine.graph.trace import Fact, attributes

__all__ = ["MATMUL_INPUTS", "outputs_of"]

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
    "SkipSimplifiedLayerNormalization SimplifiedLayerNormalization EmbedLayerNormalization BiasSoftmax "
    "QLinearSigmoid QLinearLeakyRelu QLinearSoftmax RotaryEmbedding GemmaRotaryEmbedding Inverse ReorderInput".split()
)


def outputs_of(tracer: Any, node: NodeProto, domain: str, inputs: Sequence[Fact | None]) -> tuple[Fact, ...] | None:
    """The outputs' facts of an operator beyond the standard, None for one this module does not know."""
    op = node.op_type
    if domain == "" and op not in ("SimplifiedLayerNormalization",):
        return None
    if domain == "com.ms.internal.nhwc" or not inputs or inputs[0] is None:
        return None
    first, given = inputs[0], attributes(node)
    if domain == "trt":
        return _tensorrt(op, first, given, len(node.output))
    rest = tuple(Fact(first.elem) for _ in node.output[1:])
    if op in _AS_CONV:
        return _standard(tracer, node, "Conv", inputs, 3) + rest
    if op in _AS_IS and domain == "com.microsoft.nchwc":
        return _standard(tracer, node, op, inputs, 1) + rest
    if op == "FusedGemm":
        return _standard(tracer, node, "Gemm", inputs, 3) + rest
    if op in _SAME_SHAPE:
        return (Fact(first.elem, first.shape), *rest)
    rule = _RULES.get(op)
    if op in MATMUL_INPUTS:
        rule = _matmul
    if rule is None or first.shape is None:
        return None
    try:
        made = rule(inputs, given)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError):
        return None
    return None if made is None else (made, *rest)


def _tensorrt(op: str, first: Fact, given: dict[str, Any], count: int) -> tuple[Fact, ...] | None:
    """TensorRT's own quantisation (source: the importers of the public onnx-tensorrt parser)."""
    if op in ("TRT_FP8QuantizeLinear", "TRT_INT4QuantizeLinear"):
        return (Fact(TensorProto.FLOAT8E4M3FN if "FP8" in op else TensorProto.INT4, first.shape),)
    if op == "TRT_MXFP8DequantizeLinear":
        return (Fact(given.get("output_dtype") or TensorProto.FLOAT, first.shape),)
    if op == "TRT_FP4DynamicQuantize":
        kinds, axis, size = (TensorProto.FLOAT4E2M1, TensorProto.FLOAT8E4M3FN), given.get("axis", 1), 16
    elif op == "TRT_MXFP8DynamicQuantize":
        kinds, axis, size = (TensorProto.FLOAT8E4M3FN, TensorProto.UINT8), given.get("axis", -1), 32
    else:
        return None
    scales = None
    if first.shape is not None and -len(first.shape) <= axis < len(first.shape):
        sizes = list(first.shape)
        sizes[axis] = sizes[axis] // size if sizes[axis] >= 0 else -1
        scales = tuple(sizes)
    return (Fact(kinds[0], first.shape), Fact(kinds[1], scales))[:count]


def _standard(tracer: Any, node: NodeProto, op: str, inputs: Sequence[Fact | None], take: int) -> tuple[Fact, ...]:
    """As the standard operator it extends: its extra inputs and attributes left out."""
    extra = ("activation", "activation_params", "activation_alpha", "activation_beta", "activation_gamma")
    plain = NodeProto()
    plain.CopyFrom(node)
    plain.op_type, plain.domain = op, ""
    del plain.attribute[:]
    plain.attribute.extend(item for item in node.attribute if item.name not in extra)
    del plain.input[take:]
    del plain.output[1:]
    found: tuple[Fact, ...] = tracer.by_schema(plain, "", inputs[:take])
    return found


def _matmul(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    a, b = inputs[0], inputs[1]
    if a is None or b is None or not a.shape or not b.shape or len(b.shape) < 2 or len(a.shape) < 2:
        return None
    rows = a.shape[-1] if given.get("transA") else a.shape[-2]
    columns = b.shape[-2] if given.get("transB") else b.shape[-1]
    lead = a.shape[:-2] if len(a.shape) >= len(b.shape) else b.shape[:-2]
    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
    elem = next((item.elem for item in inputs if item is not None and item.elem in floats), TensorProto.INT32)
    return Fact(elem, (*lead, rows, columns))


def _last(size: str) -> Callable[[Sequence[Fact | None], dict[str, Any]], Fact | None]:
    def rule(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
        first = inputs[0]
        return None if first is None or not first.shape else Fact(first.elem, (*first.shape[:-1], int(given[size])))

    return rule


def _attention(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    x, weights = inputs[0], inputs[1]
    if x is None or weights is None or not x.shape or not weights.shape:
        return None
    sizes = given.get("qkv_hidden_sizes")
    return Fact(x.elem, (*x.shape[:-1], int(sizes[2]) if sizes else weights.shape[-1] // 3))


def _multi_head(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    query = inputs[0]
    value = inputs[2] if len(inputs) > 2 else None
    if query is None or not query.shape:
        return None
    if len(query.shape) == 5:  # packed: batch, sequence, heads, 3, head size
        return Fact(query.elem, (*query.shape[:2], query.shape[2] * query.shape[4]))
    hidden = query.shape[-1]
    if value is not None and value.shape is not None:
        hidden = value.shape[-1] if len(value.shape) == 3 else value.shape[1] * value.shape[3]
    return Fact(query.elem, (*query.shape[:-1], hidden))


def _group_query(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    query = inputs[0]
    if query is None or not query.shape:
        return None
    packed = len(inputs) < 2 or inputs[1] is None
    heads, shared = int(given["num_heads"]), int(given["kv_num_heads"])
    hidden = query.shape[-1] * heads // (heads + 2 * shared) if packed else query.shape[-1]
    return Fact(query.elem, (*query.shape[:-1], hidden))


def _quantize(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    first, zero = inputs[0], inputs[2] if len(inputs) > 2 else None
    return None if first is None else Fact(zero.elem if zero is not None else TensorProto.UINT8, first.shape)


def _dequantize(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    first, scale = inputs[0], inputs[1]
    return None if first is None or scale is None else Fact(scale.elem, first.shape)


def _to(elem: int) -> Callable[[Sequence[Fact | None], dict[str, Any]], Fact | None]:
    def rule(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
        first = inputs[0]
        return None if first is None else Fact(elem, first.shape)

    return rule


def _broadcast(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    import numpy as np

    a, b = inputs[0], inputs[3]
    if a is None or b is None or a.shape is None or b.shape is None or not (a.sized and b.sized):
        return None
    return Fact(a.elem, np.broadcast_shapes(a.shape, b.shape))


def _quantized_conv(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    """The standard's QLinearConv with the channels last, as ONNX Runtime's optimiser writes it; the weights are OIHW."""
    x, kernel = inputs[0], inputs[3]
    if x is None or kernel is None or not x.shape or not kernel.shape or given.get("auto_pad", b"NOTSET") != b"NOTSET":
        return None
    rank = len(kernel.shape) - 2
    last = bool(given.get("channels_last"))
    sizes = x.shape[1:-1] if last else x.shape[2:]
    pads = given.get("pads") or [0] * (2 * rank)
    strides, dilations = given.get("strides") or [1] * rank, given.get("dilations") or [1] * rank
    out = tuple(
        (size + pads[i] + pads[i + rank] - dilations[i] * (kernel.shape[2 + i] - 1) - 1) // strides[i] + 1
        for i, size in enumerate(sizes)
    )
    zero = inputs[7] if len(inputs) > 7 else None
    made = (x.shape[0], *out, kernel.shape[0]) if last else (x.shape[0], kernel.shape[0], *out)
    return Fact(zero.elem if zero is not None else x.elem, made)


def _channels(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    first = inputs[0]
    if first is None or not first.shape:
        return None
    sizes = list(first.shape)
    sizes[-1 if given.get("channels_last") else 1] = int(given["channels"])
    return Fact(first.elem, tuple(sizes))


def _upsample(inputs: Sequence[Fact | None], given: dict[str, Any]) -> Fact | None:
    first, scales = inputs[0], given["scales"]
    if first is None or not first.shape:
        return None
    return Fact(first.elem, tuple(size * int(scale) for size, scale in zip(first.shape, scales, strict=True)))


_RULES: dict[str, Callable[[Sequence[Fact | None], dict[str, Any]], Fact | None]] = {
    "MatMulNBits": _last("N"),
    "MatMulBnb4": _last("N"),
    "Attention": _attention,
    "QAttention": _attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _group_query,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "TRT_MXFP8DequantizeLinear": _to(TensorProto.FLOAT),
    "TRT_FP8DequantizeLinear": _to(TensorProto.FLOAT),
    "TRT_FP8QuantizeLinear": _to(TensorProto.FLOAT8E4M3FN),
    "QLinearAdd": _broadcast,
    "QLinearMul": _broadcast,
    "QLinearConv": _quantized_conv,
    "ReorderOutput": _channels,
    "Upsample": _upsample,
}

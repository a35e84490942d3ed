"""Multiply-adds and floating-point operations of a model at given input shapes.

Counted, for one inference:

- multiply-adds of convolutions, matrix products, einsum, recurrent cells and attention: `macs`;
- operations: two for each multiply-add, and for the rest the arithmetic of the textbook formula, each operation as one
  whatever it costs on a device (an exponential is one, a Sigmoid is four: negate, exponential, add, divide). Biases are
  counted, data movement (Reshape, Transpose, Gather, Concat, Cast, comparisons) is not.
- a Loop or Scan body as often as it runs; of an If the costlier branch.

What is worked out from constants before the first inference is not counted. Where a shape, a trip count or an operator is
not known, `exact` is False and `uncounted` names the operators.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx import ModelProto

from trt_engine.graph import walk
from trt_engine.graph.shape_inference import TensorInfo, Trace, TracedNode, flatten, trace
from trt_engine.tensors import DTYPES, Shape


@dataclass(frozen=True, slots=True)
class Cost:
    """Count of a model or a node."""

    macs: int = 0
    flops: int = 0
    exact: bool = True
    uncounted: dict[str, int] = field(default_factory=dict)
    """Number of uncounted nodes by operator."""
    per_node: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(multiply-adds, operations) by node key in the trace; nodes of bodies are multiplied by the trip count."""
    trace: Trace | None = None

    def macs_by_node(self) -> dict[str, int]:
        """Multiply-adds by node name, or `node_of_` and the first output, as TensorRT's ONNX parser names nodes."""
        named: Counter[str] = Counter()
        for step in flatten(self.trace.nodes) if self.trace is not None else ():
            if macs := self.per_node.get(step.key, (0, 0))[0]:
                named[step.node.name or f"node_of_{step.node.output[0]}"] += macs
        return dict(named)


def model_cost(proto: ModelProto, shapes: Mapping[str, Shape] | None = None, *, traced: Trace | None = None) -> Cost:
    """Cost of one inference; `shapes` are those of inputs with dynamic sizes, the others are declared in the model."""
    traced = traced if traced is not None else trace(proto, shapes or {})
    tally = _CostCounter()
    macs, flops = tally.steps(traced.nodes, 1)
    return Cost(macs, flops, tally.exact, dict(tally.uncounted), tally.per_node, traced)


class _CostCounter:
    def __init__(self) -> None:
        self.exact = True
        self.uncounted: Counter[str] = Counter()
        self.per_node: dict[str, tuple[int, int]] = {}

    def steps(self, steps: Sequence[TracedNode], times: int) -> tuple[int, int]:
        macs = flops = 0
        for step in steps:
            own = self.bodies(step, times) if step.bodies else self.node(step, times)
            macs, flops = macs + own[0], flops + own[1]
        return macs, flops

    def node(self, step: TracedNode, times: int) -> tuple[int, int]:
        if step.folded:
            return 0, 0
        found = node_cost(step)
        if found is None:
            self.exact = False
            self.uncounted[walk.qualified_name(step.node)] += 1
            return 0, 0
        own = found[0] * times, found[1] * times
        if own[1]:
            self.per_node[step.key] = own
        return own

    def bodies(self, step: TracedNode, times: int) -> tuple[int, int]:
        if step.node.op_type == "If":
            options = [self.steps(body, times) for body in step.bodies]
            self.exact &= len(set(options)) == 1
            return max(options)
        trips = step.trip_count
        if trips is None:  # at least one iteration
            self.exact, trips = False, 1
            self.uncounted[f"{step.node.op_type} (trips)"] += 1
        return self.steps(step.bodies[0], times * trips)


def node_cost(step: TracedNode) -> tuple[int, int] | None:
    """Multiply-adds and operations of one node; None if unknown."""
    op, domain = step.node.op_type, walk.domain_of(step.node)
    if domain == "" and op in _DATA_MOVEMENT:
        return 0, 0
    first = step.outputs[0] if step.outputs else TensorInfo()
    if first.is_static and first.elem in _INDEX_TYPES and op not in _INTEGER_MATH:
        return 0, 0  # shape and index arithmetic
    rule = _RULES.get(op)
    if rule is not None and domain in _DOMAINS:
        try:
            return rule(step, walk.attributes(step.node))
        except (_UnknownSize, AttributeError, IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
            return None
    if op in _PER_ELEMENT and domain in _DOMAINS:
        return (0, first.num_elements * _PER_ELEMENT[op]) if first.is_static else None
    return None


_DOMAINS = ("", "com.microsoft", "com.microsoft.nchwc", "com.ms.internal.nhwc")
_INDEX_TYPES = (6, 7, 9, 12, 13)  # int32, int64, bool, uint32, uint64
_INTEGER_MATH = frozenset("ConvInteger MatMulInteger MatMulInteger16 QLinearConv QLinearMatMul".split())


class _UnknownSize(Exception):
    """A size is not known."""


def _known_shape(fact: TensorInfo | None) -> Shape:
    if fact is None or fact.shape is None or not fact.is_static:
        raise _UnknownSize
    return fact.shape


def _size(fact: TensorInfo | None) -> int:
    return math.prod(_known_shape(fact))


Rule = Callable[[TracedNode, dict[str, Any]], tuple[int, int]]


def _has_input(step: TracedNode, position: int) -> bool:
    return len(step.inputs) > position and step.inputs[position] is not None


def _conv(weight: int, bias: int) -> Rule:
    def rule(step: TracedNode, given: dict[str, Any]) -> tuple[int, int]:
        kernel = _known_shape(step.inputs[weight])
        out = _size(step.outputs[0])
        macs = out * math.prod(kernel[1:])
        return macs, 2 * macs + (out if _has_input(step, bias) else 0)

    return rule


def _conv_transpose(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    macs = _size(step.inputs[0]) * math.prod(_known_shape(step.inputs[1])[1:])
    return macs, 2 * macs + (_size(step.outputs[0]) if _has_input(step, 2) else 0)


def _deform_conv(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    kernel, out = _known_shape(step.inputs[1]), _known_shape(step.outputs[0])
    macs = math.prod(out) * math.prod(kernel[1:])
    sampled = _known_shape(step.inputs[0])[1] * math.prod(kernel[2:]) * math.prod(out[2:]) * out[0]
    return macs, 2 * macs + 8 * sampled + (math.prod(out) if _has_input(step, 3) else 0)


def _gemm(bias: int) -> Rule:
    def rule(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
        a = _known_shape(step.inputs[0])
        depth = a[0] if attrs.get("transA") else a[1]
        out = _size(step.outputs[0])
        return out * depth, 2 * out * depth + (out if _has_input(step, bias) else 0)

    return rule


def _matmul(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    shape = _known_shape(step.inputs[0])
    macs = _size(step.outputs[0]) * (shape[-2] if attrs.get("transA") and len(shape) > 1 else shape[-1])
    return macs, 2 * macs


def _einsum(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    equation = attrs["equation"].decode().replace(" ", "")
    left, _, right = equation.partition("->")
    terms = left.split(",")
    if not right and "->" not in equation:
        letters = left.replace(",", "")
        right = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1 and letter != "."))
    sizes: dict[str, int] = {}
    rest = 1
    for term, fact in zip(terms, step.inputs, strict=True):
        shape = list(_known_shape(fact))
        before, dots, after = term.partition("...")
        named = list(before) + list(after)
        extra = len(shape) - len(named)
        if dots:
            rest = max(rest, math.prod(shape[len(before) : len(before) + extra]))
        sized = shape[: len(before)] + shape[len(before) + extra :]
        sizes.update({letter: max(size, sizes.get(letter, 1)) for letter, size in zip(named, sized, strict=True)})
    everything = rest * math.prod(sizes.values())
    if len(terms) == 1:
        return 0, everything if any(letter not in right for letter in sizes) else 0
    summed = any(letter not in right for letter in sizes)
    macs = everything * (len(terms) - 1)
    return (macs, 2 * macs) if summed else (0, macs)  # an outer or elementwise product has no reduction


def _recurrent(gates: int, elementwise: int) -> Rule:
    def rule(step: TracedNode, given: dict[str, Any]) -> tuple[int, int]:
        x, weights = _known_shape(step.inputs[0]), _known_shape(step.inputs[1])
        directions, hidden = weights[0], weights[1] // gates
        cells = x[0] * x[1] * directions
        macs = cells * gates * hidden * (x[2] + hidden)
        return macs, 2 * macs + cells * hidden * elementwise

    return rule


def _attention(batch: int, heads: int, rows: int, columns: int, key: int, value: int) -> tuple[int, int]:
    """Scores, softmax (five operations each) and the weighted sum."""
    scores = batch * heads * rows * columns
    macs = scores * (key + value)
    return macs, 2 * macs + 5 * scores + scores


def _standard_attention(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    """`Attention` of the standard (opset 23): query, key and value are 3-D with head counts, or 4-D."""
    if walk.domain_of(step.node) == "com.microsoft":
        return _microsoft_attention(step, attrs)
    query, key, value = (_known_shape(step.inputs[at]) for at in range(3))
    past = _known_shape(step.inputs[4])[-2] if _has_input(step, 4) else 0
    if len(query) == 4:
        batch, heads, rows, size = query
        columns, wide = key[2] + past, value[3]
    else:
        heads, shared = int(attrs["q_num_heads"]), int(attrs["kv_num_heads"])
        batch, rows, size = query[0], query[1], query[2] // heads
        columns, wide = key[1] + past, value[2] // shared
    return _attention(batch, heads, rows, columns, size, wide)


def _microsoft_attention(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    """`com.microsoft.Attention` and `QAttention`, projections included."""
    batch, rows, hidden = _known_shape(step.inputs[0])[:3]
    weights, heads = _known_shape(step.inputs[1]), int(attrs["num_heads"])
    sizes = attrs.get("qkv_hidden_sizes") or [weights[-1] // 3] * 3
    projections = batch * rows * hidden * weights[-1]
    macs, flops = _attention(batch, heads, rows, rows, sizes[0] // heads, sizes[2] // heads)
    return macs + projections, flops + 2 * projections + batch * rows * weights[-1]


def _multi_head(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    query, heads = _known_shape(step.inputs[0]), int(attrs["num_heads"])
    out = _known_shape(step.outputs[0])
    batch, rows = query[0], query[1]
    if len(query) == 5 or not _has_input(step, 1):
        columns, size = rows, (query[4] if len(query) == 5 else out[-1] // heads)
    else:
        key = _known_shape(step.inputs[1])
        columns = key[1] if len(key) in (3, 5) else key[2]
        size = query[-1] // heads
    return _attention(batch, heads, rows, columns, size, out[-1] // heads)


def _group_query(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    out, heads = _known_shape(step.outputs[0]), int(attrs["num_heads"])
    past = _known_shape(step.inputs[3]) if _has_input(step, 3) else None
    columns = out[1] + (past[2] if past is not None else 0)
    return _attention(out[0], heads, out[1], columns, out[2] // heads, out[2] // heads)


def _bits(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    macs = _size(step.outputs[0]) * int(attrs["K"])
    return macs, 2 * macs


def _per_input_element(each: int) -> Rule:
    return lambda step, given: (0, each * _size(step.inputs[0]))


def _pool(extra: int) -> Rule:
    return lambda step, given: (0, _size(step.outputs[0]) * (math.prod(given["kernel_shape"]) + extra))


_INTERPOLATION = {"nearest": 0, "linear": 2, "cubic": 4}


def _resize(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    mode = attrs.get("mode", b"nearest").decode()
    moved = sum(a != b for a, b in zip(_known_shape(step.inputs[0]), _known_shape(step.outputs[0]), strict=True))
    points = _INTERPOLATION[mode] ** moved if moved else 0
    return 0, 2 * points * _size(step.outputs[0])


def _grid_sample(step: TracedNode, attrs: dict[str, Any]) -> tuple[int, int]:
    mode = attrs.get("mode", b"linear").decode()
    points = {"nearest": 0, "bicubic": 4, "cubic": 4}.get(mode, 2)
    axes = len(_known_shape(step.inputs[0])) - 2
    return 0, 2 * (points**axes if points else 0) * _size(step.outputs[0])


_RULES: dict[str, Rule] = {
    "Conv": _conv(1, 2),
    "FusedConv": _conv(1, 2),
    "ConvInteger": _conv(1, 9),
    "QLinearConv": _conv(3, 8),
    "ConvTranspose": _conv_transpose,
    "DeformConv": _deform_conv,
    "Gemm": _gemm(2),
    "FusedGemm": _gemm(2),
    "QGemm": _gemm(6),
    **dict.fromkeys(
        "MatMul FusedMatMul TransposeMatMul GemmFastGelu MatMulInteger MatMulInteger16 MatMulIntegerToFloat "
        "DynamicQuantizeMatMul QLinearMatMul".split(),
        _matmul,
    ),
    "MatMulNBits": _bits,
    "MatMulBnb4": _bits,
    "Einsum": _einsum,
    "LSTM": _recurrent(4, 24),
    "GRU": _recurrent(3, 20),
    "RNN": _recurrent(1, 5),
    "Attention": _standard_attention,
    "QAttention": _microsoft_attention,
    "MultiHeadAttention": _multi_head,
    "GroupQueryAttention": _group_query,
    **dict.fromkeys(("MaxPool", "NhwcMaxPool"), _pool(-1)),
    "LpPool": _pool(2),
    "AveragePool": _pool(0),
    **dict.fromkeys(
        "GlobalAveragePool GlobalMaxPool QLinearGlobalAveragePool ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd "
        "ReduceLogSum CumSum ArgMax ArgMin".split(),
        _per_input_element(1),
    ),
    **dict.fromkeys("ReduceSumSquare ReduceL1 ReduceL2 ReduceLogSumExp".split(), _per_input_element(2)),
    "Resize": _resize,
    "Upsample": _resize,
    "GridSample": _grid_sample,
    "RoiAlign": lambda step, given: (0, 8 * max(given.get("sampling_ratio", 0), 1) ** 2 * _size(step.outputs[0])),
    **dict.fromkeys(
        "Sum Mean Max Min".split(),
        lambda step, given: (0, max(len(step.inputs) - 1, 0) * _size(step.outputs[0])),
    ),
    "Clip": lambda step, given: (0, 2 * _size(step.outputs[0])),
}
_PER_ELEMENT = {  # operations per output element
    **dict.fromkeys(
        "Add Sub Mul Div Pow Mod Neg Abs Sqrt Reciprocal Exp Log Sin Cos Tan Asin Acos Atan Sinh Cosh Asinh Acosh Atanh "
        "Erf Floor Ceil Round Sign Relu ThresholdedRelu BitShift Det QLinearAdd QLinearMul".split(),
        1,
    ),
    **dict.fromkeys("LeakyRelu PRelu QuantizeLinear DequantizeLinear BatchNormalization BiasAdd Shrink".split(), 2),
    **dict.fromkeys("Elu Celu Selu HardSigmoid Softplus Softsign QLinearLeakyRelu".split(), 3),
    **dict.fromkeys("Sigmoid Tanh HardSwish DynamicQuantizeLinear QLinearSigmoid RotaryEmbedding".split(), 4),
    **dict.fromkeys(
        "Softmax LogSoftmax Hardmax Swish QuickGelu BiasSoftmax QLinearSoftmax LRN LpNormalization".split(), 5
    ),
    **dict.fromkeys("Mish RMSNormalization SimplifiedLayerNormalization SkipSimplifiedLayerNormalization".split(), 6),
    **dict.fromkeys(
        "LayerNormalization InstanceNormalization GroupNormalization MeanVarianceNormalization GroupNorm "
        "SkipLayerNormalization SkipGroupNorm".split(),
        7,
    ),
    **dict.fromkeys("Gelu FastGelu BiasGelu".split(), 8),
    **dict.fromkeys("ReorderInput ReorderOutput".split(), 0),  # ONNX Runtime's blocked layouts
}
_DATA_MOVEMENT = frozenset(  # moves, compares or selects data
    "Identity Reshape Transpose Concat Split Slice Gather GatherElements GatherND Scatter ScatterElements ScatterND "
    "Squeeze Unsqueeze Flatten Expand Tile Pad Cast CastLike Shape Size Constant ConstantOfShape Range Where Equal Less "
    "LessOrEqual Greater GreaterOrEqual And Or Not Xor IsNaN IsInf TopK NonZero NonMaxSuppression OneHot DepthToSpace "
    "SpaceToDepth Dropout EyeLike Trilu Unique ReverseSequence Compress CenterCropPad Col2Im MaxUnpool TensorScatter "
    "RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli BitCast BitwiseAnd BitwiseOr "
    "BitwiseNot BitwiseXor SequenceConstruct SequenceEmpty SequenceAt SequenceInsert SequenceErase SequenceLength "
    "SplitToSequence ConcatFromSequence Optional OptionalHasElement OptionalGetElement AffineGrid".split()
)
_BITS = {item.onnx: item.bits for item in DTYPES.values() if item.name != "string"}
_NO_TRAFFIC = frozenset(
    "Reshape Squeeze Unsqueeze Flatten Identity Dropout Shape Size Constant ConstantOfShape Range If Loop Scan".split()
)
"""Operators that move no data (reshapes, size queries); for control flow the bodies move it."""
_GATHERS = frozenset("Gather GatherElements GatherND Slice".split())
"""Operators that read as much of their data as they write."""


def traffic_nbytes(step: TracedNode) -> int | None:
    """Bytes moved by one run of a node: inputs, weights, outputs; None if a size or type is unknown."""
    if step.folded or (walk.domain_of(step.node) == "" and step.node.op_type in _NO_TRAFFIC):
        return 0
    written = [tensor_nbytes(fact) for name, fact in zip(step.node.output, step.outputs, strict=False) if name]
    inputs = [fact for fact in step.inputs if fact is not None]
    if walk.domain_of(step.node) == "" and step.node.op_type in _GATHERS:
        read = [*written, *(tensor_nbytes(fact) for fact in inputs[1:])]
    else:
        read = [tensor_nbytes(fact) for fact in inputs]
    sizes = [size for size in (*written, *read) if size is not None]
    return sum(sizes) if len(sizes) == len(written) + len(read) else None


def tensor_nbytes(fact: TensorInfo) -> int | None:
    """Bytes of a tensor; None if its size or type is unknown."""
    if not fact.is_static or fact.elem not in _BITS:
        return None
    return (fact.num_elements * _BITS[fact.elem] + 7) // 8

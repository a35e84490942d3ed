"""Breaks a graph down by data type: fraction of layers, parameters and multiply-adds.

An operator that reads DequantizeLinear counts as the quantized type, which a backend computes in after fusing the pair;
a matrix operator needs both inputs quantized, as no kernel multiplies a quantized matrix by a floating-point one.
Weights of at most four bits count alone. With `literal`, for graphs whose pairs were fused already, such an operator
computes in floating point. Names are those of `config.PRECISIONS`, plus `fp64` and `int2`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnx import AttributeProto, ModelProto, NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.cost import Cost, model_cost
from trt_engine.graph.shape_inference import TracedNode, declared_shape, flatten, trace
from trt_engine.model import GraphIndex
from trt_engine.records.passport import DtypeShare, Precision
from trt_engine.tensors import dtype

_NAMES = {
    TensorProto.FLOAT: "fp32",
    TensorProto.DOUBLE: "fp64",
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.INT8: "int8",
    TensorProto.UINT8: "int8",
    TensorProto.INT16: "int16",
    TensorProto.UINT16: "int16",
    TensorProto.FLOAT8E4M3FN: "fp8",
    TensorProto.FLOAT8E4M3FNUZ: "fp8",
    TensorProto.FLOAT8E5M2: "fp8",
    TensorProto.FLOAT8E5M2FNUZ: "fp8",
    TensorProto.FLOAT4E2M1: "nvfp4",
    TensorProto.INT4: "int4",
    TensorProto.UINT4: "int4",
    25: "int2",  # UINT2 and INT2: missing in the oldest supported onnx
    26: "int2",
}
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_WEIGHT_ONLY = ("int4", "int2")
"""Weight-only types: nothing computes in them, and a layer with such weights is counted under them."""
_E8M0 = 24
"""FLOAT8E8M0 of ONNX 1.20: missing in the oldest supported onnx."""
_LAYOUT = frozenset("Transpose Reshape Squeeze Unsqueeze Flatten Identity Cast Expand Slice Split MaxPool".split())
"""Operators that leave quantized values unchanged: builders move the Q/DQ pair behind them."""
_LINEAR = frozenset(
    "Conv ConvTranspose Gemm MatMul FusedConv FusedMatMul FusedGemm Einsum DeformConv Attention".split()
)
_MULTIPLIES = re.compile("Conv|Gemm|MatMul|Einsum|Attention|LSTM|GRU|RNN|MoE|RelativePositionBias")
_NOT_LAYERS = frozenset(
    "Constant ConstantOfShape Shape Size Identity Cast CastLike QuantizeLinear DequantizeLinear DynamicQuantizeLinear "
    "Reshape Squeeze Unsqueeze Flatten Range Dropout ReorderInput ReorderOutput".split()
)
_INTEGER_OPS = frozenset(
    "ConvInteger MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QGemm QAttention".split()
)
_WEIGHT_OPS = {"GemmFloat8": "fp8", "MatMulBlockQuantizedFp8Weight": "fp8", "MatMulBlockQuantizedFp4Weight": "nvfp4",
               "MatMulBnb4": "int4", "MatMulInteger16": "int16"}  # fmt: skip


def is_quantize(node: NodeProto) -> bool:
    """True for QuantizeLinear in any domain, and TensorRT's dynamic ones."""
    op = node.op_type
    return op in ("QuantizeLinear", "DynamicQuantizeLinear") or (
        op.startswith("TRT_") and op.endswith(("QuantizeLinear", "DynamicQuantize")) and "Dequantize" not in op
    )


def is_dequantize(node: NodeProto) -> bool:
    """True for DequantizeLinear in any domain, and TensorRT's own."""
    op = node.op_type
    return op == "DequantizeLinear" or (op.startswith("TRT_") and "DequantizeLinear" in op)


def dtype_shares(
    graph: GraphIndex, cost: Cost | None = None, *, tf32: bool = False, literal: bool = False
) -> dict[str, DtypeShare]:
    """Shares by data type, largest first; empty for a graph that computes on no floating-point or quantized data.

    `cost` is the graph's count at the shapes to weigh by (default: declared shapes, batch 1). With `tf32`, FP32 matrix
    operators count as `tf32`. `literal` as in `compute_layers`. A type used only for storing weights has parameters and no
    layers.
    """
    return shares_by_dtype(compute_layers(graph.proto, cost, tf32=tf32, literal=literal), count_parameters(graph))


def shares_by_dtype(counted_layers: Iterable[Layer], weights: Parameters) -> dict[str, DtypeShare]:
    """Like `dtype_shares`, for layers and weights that were already listed."""
    layers: Counter[str] = Counter()
    macs: Counter[str] = Counter()
    for layer in counted_layers:
        layers[layer.dtype] += 1
        macs[layer.dtype] += layer.macs
    held = weights.by_type
    all_layers, all_held, all_macs = sum(layers.values()), sum(held.values()), sum(macs.values())
    shares = {
        kind: DtypeShare(
            layers=layers.get(kind, 0) / all_layers if all_layers else 0.0,
            parameters=held.get(kind, 0) / all_held if all_held else 0.0,
            macs=macs.get(kind, 0) / all_macs if all_macs else None,
        )
        for kind in {**layers, **held}
    }
    return dict(sorted(shares.items(), key=lambda item: (-(item[1].macs or 0), -item[1].layers, item[0])))


class Layer(NamedTuple):
    """A compute node, the type it computes in, and its multiply-adds."""

    step: TracedNode
    dtype: str
    macs: int
    mixed_dtype: str | None = None
    """Quantized input of a floating-point layer: `only its second input is int8`."""

    @property
    def is_fp32_product(self) -> bool:
        """Whether the node multiplies matrices or convolves in FP32, dequantised weights and products inside of contributed
        operators included; also where its type is not known."""
        op = self.step.node.op_type
        if not _MULTIPLIES.search(op) or op in _INTEGER_OPS - {"QAttention"} or op.startswith("QLinear"):
            return False
        if self.dtype in ("fp16", "bf16", "fp64"):
            return False
        kinds = [item.elem for item in (*self.step.inputs, *self.step.outputs) if item is not None]
        return self.dtype in ("fp32", "tf32") or 0 in kinds or TensorProto.FLOAT in kinds


def compute_layers(
    proto: ModelProto, cost: Cost | None = None, *, tf32: bool = False, literal: bool = False
) -> Iterator[Layer]:
    """The compute layers of a graph, in order.

    With `literal`, an operator that reads DequantizeLinear computes in floating point, as in a backend that has fused
    its pairs already. Weights of at most four bits still name their layers: no backend computes in those.
    """
    if cost is None:  # at batch 1; other dynamic sizes stay dynamic
        stated = {item.name: declared_shape(item.type.tensor_type) for item in proto.graph.input}
        cost = model_cost(proto, {name: (1, *shape[1:]) for name, shape in stated.items() if shape and shape[0] < 0})
    steps = [] if cost.trace is None else flatten(cost.trace.nodes)
    pairs = any(is_dequantize(step.node) for step in steps)  # unused without a trace
    makers = {name: step for step in steps for name in step.node.output if name} if pairs else {}
    for step in steps:
        kind = _classify_node(step, makers, literal)
        if tf32 and kind == "fp32" and step.node.op_type in _LINEAR:
            kind = "tf32"
        if kind is not None:
            partly = _mixed_dtype(step, kind, makers) if pairs and not literal else None
            yield Layer(step, kind, cost.per_node.get(step.key, (0, 0))[0], partly)


def main_precision(graph: GraphIndex) -> str | None:
    """The type most of the graph computes in (`fp32`, `fp16`, `int8`); None for a graph without arithmetic."""
    return Precision(None, dtype_shares(graph)).main_dtype


def _classify_node(step: TracedNode, makers: Mapping[str, TracedNode], literal: bool) -> str | None:
    """The type a node computes in; None for constants, shapes, casts and Q/DQ nodes."""
    node, op = step.node, step.node.op_type
    if step.folded or step.bodies or op in _NOT_LAYERS or is_quantize(node) or is_dequantize(node):
        return None
    if op in _WEIGHT_OPS:
        return _WEIGHT_OPS[op]
    if op == "MatMulNBits":
        return f"int{walk.attributes(node).get('bits', 4)}"
    if op in _INTEGER_OPS or op.startswith("QLinear"):
        return "int8"
    linear = op in _LINEAR
    if linear:
        factors = _factor_dtypes(step, makers)
        alone = next((kind for kind in factors if kind in _WEIGHT_ONLY), None)
        if all(factors) and not literal:
            return factors[0]
        if alone is not None:
            return alone
    elif makers:
        read = [
            kind
            for name, fact in zip(node.input, step.inputs, strict=True)
            if fact is not None and not fact.is_constant
            if (kind := _quantized_source(name, makers)) is not None or fact.elem in _FLOATS
        ]
        if read and all(read) and (not literal or read[0] in _WEIGHT_ONLY):
            return read[0]
    elem = next((item.elem for item in step.outputs if item.elem in _FLOATS), 0)
    elem = elem or next((item.elem for item in step.inputs if item is not None and item.elem in _FLOATS), 0)
    return _NAMES.get(elem) if elem else None


def _factor_dtypes(step: TracedNode, makers: Mapping[str, TracedNode]) -> list[str | None]:
    """Quantized types of the two inputs of a matrix operator."""
    return [_quantized_source(name, makers) for name in step.node.input[:2]]


def _mixed_dtype(step: TracedNode, kind: str, makers: Mapping[str, TracedNode]) -> str | None:
    if step.node.op_type not in _LINEAR or len(step.node.input) < 2:
        return None
    first, second = _factor_dtypes(step, makers)
    if (first is None) == (second is None) or kind in (first, second):
        return None
    return f"only its {'second' if first is None else 'first'} input is {first or second}"


def _quantized_source(name: str, makers: Mapping[str, TracedNode]) -> str | None:
    """Quantized type behind a tensor, through operators that change no value."""
    for _ in range(16):
        step = makers.get(name)
        if step is None:
            return None
        if is_dequantize(step.node):
            return _quantized_type(step)
        if step.node.op_type not in _LAYOUT or not step.node.input:
            return None
        name = step.node.input[0]
    return None


def _quantized_type(step: TracedNode) -> str | None:
    op = step.node.op_type
    if op.startswith("TRT_"):
        return next((kinds[0] for name, kinds in _OPERATOR_FORMATS.items() if name in op and name != "INT4"), "int8")
    first = step.inputs[0] if step.inputs else None
    scale = step.inputs[1] if len(step.inputs) > 1 else None
    if first is not None and scale is not None and scale.elem == _E8M0:
        return "mxfp8"
    return _NAMES.get(first.elem) if first is not None else None


# ------------------------------------------------------------------------------------------------ parameters


class Parameters:
    """Number, bytes and types of a model's weights. Constants used only for shapes do not count."""

    def __init__(self, tensors: Sequence[TensorProto]) -> None:
        self.count = 0
        self.nbytes = 0
        self.by_type: dict[str, int] = {}
        for tensor in tensors:
            kind = _NAMES.get(tensor.data_type)
            if kind is None or any(size < 0 for size in tensor.dims):
                continue
            elements = math.prod(tensor.dims)
            self.count += elements
            self.nbytes += dtype(tensor.data_type).nbytes(tensor.dims)
            self.by_type[kind] = self.by_type.get(kind, 0) + elements


def count_parameters(graph: GraphIndex) -> Parameters:
    """Stored floating-point and quantized tensors (initializers and Constant nodes), each counted once; Q/DQ scales and
    zero points are excluded."""
    left_out: set[str] = set()
    stored: list[TensorProto] = []
    for body in graph.graphs:
        stored.extend(body.initializer)
        stored.extend(sparse.values for sparse in body.sparse_initializer)
    for node, *_ in graph.nodes:
        if is_quantize(node) or is_dequantize(node):
            left_out.update(node.input[1:])
        if node.op_type == "Constant" and not walk.domain_of(node):
            for item in node.attribute:
                if item.type == AttributeProto.TENSOR and math.prod(item.t.dims) > 1:
                    stored.append(item.t)
    return Parameters([tensor for tensor in stored if tensor.name not in left_out])


_FORMATS: dict[int, str] = {
    TensorProto.FLOAT16: "fp16",
    TensorProto.BFLOAT16: "bf16",
    TensorProto.FLOAT8E4M3FN: "fp8",
    TensorProto.FLOAT4E2M1: "nvfp4",
    TensorProto.INT4: "int4",
    TensorProto.UINT4: "int4",
    _E8M0: "mxfp8",
}
_PRODUCTS = frozenset({"MatMul", "Gemm", "Einsum", "LSTM", "GRU", "RNN", "Attention"})


def data_types(proto: ModelProto) -> dict[str, str]:
    """Formats the graph uses, each with the first tensor or node that has it: stored tensors, declared types, targets
    of Cast and QuantizeLinear, and the types of TensorRT's own operators. INT8 is excluded: every GPU supports it."""
    found: dict[str, str] = {}
    for elem, name in _declared_types(proto):
        if (kind := _FORMATS.get(elem)) is not None:
            found.setdefault(kind, name)
    for node in walk.all_nodes(proto):  # `TRT_FP8QuantizeLinear`
        names = [name for name in _OPERATOR_FORMATS if name in node.op_type] if node.op_type.startswith("TRT_") else []
        for kind in _OPERATOR_FORMATS[names[0]] if names else ():
            found.setdefault(kind, walk.label(node))
    return found


def first_float32_matmul(proto: ModelProto) -> str | None:
    """First node that multiplies matrices in FP32 (Conv is excluded); None without one."""
    for step in flatten(trace(proto, {}).nodes):
        known = [item for item in step.inputs if item is not None]
        if step.node.op_type not in _PRODUCTS or step.folded or all(item.is_constant for item in known):
            continue
        if known[0].elem == TensorProto.FLOAT:
            return walk.label(step.node)
    return None


def _declared_types(proto: ModelProto) -> Iterator[tuple[int, str]]:
    for graph in walk.graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            yield value.type.tensor_type.elem_type, value.name
    for tensor in walk.tensors(proto):
        yield tensor.data_type, tensor.name
    for node in walk.all_nodes(proto):
        for item in node.attribute:
            if item.name in ("to", "output_dtype") and item.type == AttributeProto.INT:
                yield item.i, walk.label(node)


_OPERATOR_FORMATS = {"MXFP8": ("mxfp8", "fp8"), "FP4": ("nvfp4", "fp8"), "FP8": ("fp8",), "INT4": ("int4",)}
"""Formats by what the name of a TensorRT operator contains, first match first."""

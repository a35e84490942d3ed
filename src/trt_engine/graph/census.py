"""What a graph computes in: the share of layers, of parameters and of multiply-adds that each data type holds.

An operator that reads DequantizeLinear counts as the quantized type: that is how a quantized graph is written, and what
a backend that fuses the pair computes in. A matrix operator needs both its inputs from there: no kernel multiplies a
quantized matrix by a floating-point one. Weights of four bits and fewer count alone. A graph whose pairs were fused already
is read `literal`ly: there such an operator computes in floating point. Names are those of `config.PRECISIONS`, and `fp64`,
`int2` beyond them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import AttributeProto, ModelProto, NodeProto, TensorProto

from trt_engine.engine import Precision, Share
from trt_engine.graph import walk
from trt_engine.graph.flops import Cost, count
from trt_engine.graph.trace import Step, attributes, flatten

__all__ = ["Layer", "Parameters", "census", "is_dequantize", "is_quantize", "layers_of", "parameters", "precision_of"]

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
    25: "int2",  # UINT2 and INT2: newer than the oldest onnx we allow
    26: "int2",
}
_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_WEIGHTS_ALONE = ("int4", "int2")
"""Types that nothing computes in: they are weights' own, and a layer with such weights is told by them."""
_E8M0 = 24
_LAYOUT = frozenset("Transpose Reshape Squeeze Unsqueeze Flatten Identity Cast Expand Slice Split MaxPool".split())
"""What leaves every value a quantized one: builders move the pair behind it."""
_LINEAR = frozenset(
    "Conv ConvTranspose Gemm MatMul FusedConv FusedMatMul FusedGemm Einsum DeformConv Attention".split()
)
_NO_LAYER = frozenset(
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
    return node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear") or (
        node.op_type.startswith("TRT_") and node.op_type.endswith(("QuantizeLinear", "DynamicQuantize"))
        and "Dequantize" not in node.op_type
    )  # fmt: skip


def is_dequantize(node: NodeProto) -> bool:
    """True for DequantizeLinear in any domain, and TensorRT's own."""
    return node.op_type == "DequantizeLinear" or (
        node.op_type.startswith("TRT_") and "DequantizeLinear" in node.op_type
    )


def census(
    proto: ModelProto, cost: Cost | None = None, *, tf32: bool = False, literal: bool = False
) -> dict[str, Share]:
    """The shares by data type, largest first; empty for a graph that computes on no floating-point or quantized data.

    `cost` is the graph's count at the shapes to weigh by (default: counted at the sizes the model states, batch 1). With
    `tf32` the matrix operators of FP32 data count as `tf32`: that is what the device makes of them. `literal` as in
    `layers_of`: what the kernels compute in. A type that only weights are stored in has parameters, and no layers.
    """
    shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for layer in layers_of(proto, cost, tf32=tf32, literal=literal):
        shares[layer.kind][0] += 1
        shares[layer.kind][1] += layer.macs
    layers = {kind: share[0] for kind, share in shares.items()}
    macs = {kind: share[1] for kind, share in shares.items()}
    held = parameters(proto).by_type
    all_layers, all_held, all_macs = sum(layers.values()), sum(held.values()), sum(macs.values())
    found = {
        kind: Share(
            layers=layers.get(kind, 0) / all_layers if all_layers else 0.0,
            parameters=held.get(kind, 0) / all_held if all_held else 0.0,
            macs=macs.get(kind, 0) / all_macs if all_macs else None,
        )
        for kind in {**layers, **held}
    }
    return dict(sorted(found.items(), key=lambda item: (-(item[1].macs or 0), -item[1].layers, item[0])))


@dataclass(frozen=True, slots=True)
class Layer:
    """One node that computes, the type it computes in, and its multiply-adds."""

    step: Step
    kind: str
    macs: int
    partly: str | None = None
    """What of a floating-point layer is quantized all the same: `only its second input is int8`."""


def layers_of(
    proto: ModelProto, cost: Cost | None = None, *, tf32: bool = False, literal: bool = False
) -> Iterator[Layer]:
    """The layers `census` counts, in order.

    `literal` takes each operator at its word: one that reads DequantizeLinear computes in floating point, which is what a
    backend does that has fused its pairs already. Weights of four bits and fewer still name their layers: nothing computes
    in those, on any backend.
    """
    cost = cost if cost is not None else count(proto, _smallest(proto))
    steps = [] if cost.trace is None else flatten(cost.trace.steps)
    makers = {name: step for step in steps for name in step.node.output if name}
    for step in steps:
        kind = _layer(step, makers, literal)
        if tf32 and kind == "fp32" and step.node.op_type in _LINEAR:
            kind = "tf32"
        if kind is not None:
            partly = None if literal else _partly(step, kind, makers)
            yield Layer(step, kind, cost.per_node.get(step.key, (0, 0))[0], partly)


def precision_of(proto: ModelProto, cost: Cost | None = None) -> str | None:
    """The type most of the graph computes in, as `fp32`, `fp16`, `int8`; None for a graph without arithmetic."""
    return Precision(None, census(proto, cost)).main


def _smallest(proto: ModelProto) -> dict[str, tuple[int, ...]]:
    """Input shapes with batch 1 where the batch is open; other open sizes stay open."""
    shapes = {}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        sizes = [dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else -1 for dim in dims]
        if sizes and sizes[0] < 0:
            shapes[value.name] = (1, *sizes[1:])
    return shapes


def _layer(step: Step, makers: Mapping[str, Step], literal: bool) -> str | None:
    """The type one node computes in; None for what is no layer: constants, shapes, casts, the Q/DQ nodes themselves."""
    node, op = step.node, step.node.op_type
    if step.folded or step.inside or op in _NO_LAYER or is_quantize(node) or is_dequantize(node):
        return None
    if op in _WEIGHT_OPS:
        return _WEIGHT_OPS[op]
    if op == "MatMulNBits":
        return f"int{attributes(node).get('bits', 4)}"
    if op in _INTEGER_OPS or op.startswith("QLinear"):
        return "int8"
    linear = op in _LINEAR
    if linear:
        factors = _factors(step, makers)
        alone = next((kind for kind in factors if kind in _WEIGHTS_ALONE), None)
        if all(factors) and not literal:
            return factors[0]
        if alone is not None:
            return alone
    else:
        read = [
            kind
            for name, fact in zip(node.input, step.inputs, strict=True)
            if fact is not None and not fact.stored
            if (kind := _dequantized(name, makers)) is not None or fact.elem in _FLOATS
        ]
        if read and all(read) and (not literal or read[0] in _WEIGHTS_ALONE):
            return read[0]
    elem = next((item.elem for item in step.outputs if item.elem in _FLOATS), 0)
    elem = elem or next((item.elem for item in step.inputs if item is not None and item.elem in _FLOATS), 0)
    return _NAMES.get(elem) if elem else None


def _factors(step: Step, makers: Mapping[str, Step]) -> list[str | None]:
    """The quantized types behind the two inputs of a matrix operator."""
    return [_dequantized(name, makers) for name in step.node.input[:2]]


def _partly(step: Step, kind: str, makers: Mapping[str, Step]) -> str | None:
    if step.node.op_type not in _LINEAR or len(step.node.input) < 2:
        return None
    first, second = _factors(step, makers)
    if (first is None) == (second is None) or kind in (first, second):
        return None
    return f"only its {'second' if first is None else 'first'} input is {first or second}"


def _dequantized(name: str, makers: Mapping[str, Step]) -> str | None:
    """The quantized type behind a tensor, through what changes no value."""
    for _ in range(16):
        step = makers.get(name)
        if step is None:
            return None
        if is_dequantize(step.node):
            return _quantized_type(step, makers)
        if step.node.op_type not in _LAYOUT or not step.node.input:
            return None
        name = step.node.input[0]
    return None


def _quantized_type(step: Step, makers: Mapping[str, Step]) -> str | None:
    op = step.node.op_type
    if op.startswith("TRT_"):
        return "mxfp8" if "MXFP8" in op else "nvfp4" if "FP4" in op else "fp8" if "FP8" in op else "int8"
    first = step.inputs[0] if step.inputs else None
    scale = step.inputs[1] if len(step.inputs) > 1 else None
    if first is not None and scale is not None and scale.elem == _E8M0:
        return "mxfp8"
    return _NAMES.get(first.elem) if first is not None else None


# ------------------------------------------------------------------------------------------------ parameters


class Parameters:
    """The weights of a model: how many, how many bytes, of which types. Constants that only shape data do not count."""

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
            self.nbytes += (elements * _BITS[tensor.data_type] + 7) // 8
            self.by_type[kind] = self.by_type.get(kind, 0) + elements


_BITS = {
    TensorProto.FLOAT: 32, TensorProto.DOUBLE: 64, TensorProto.FLOAT16: 16, TensorProto.BFLOAT16: 16,
    TensorProto.INT8: 8, TensorProto.UINT8: 8, TensorProto.INT16: 16, TensorProto.UINT16: 16,
    TensorProto.FLOAT8E4M3FN: 8, TensorProto.FLOAT8E4M3FNUZ: 8, TensorProto.FLOAT8E5M2: 8,
    TensorProto.FLOAT8E5M2FNUZ: 8, TensorProto.FLOAT4E2M1: 4, TensorProto.INT4: 4, TensorProto.UINT4: 4, 25: 2, 26: 2,
}  # fmt: skip


def parameters(proto: ModelProto) -> Parameters:
    """The stored floating-point and quantized tensors: initializers and Constant nodes, each once however often it is
    read; scales and zero points of Q/DQ nodes left out."""
    left_out: set[str] = set()
    stored: list[TensorProto] = []
    for graph in walk.graphs(proto):
        stored.extend(graph.initializer)
        stored.extend(sparse.values for sparse in graph.sparse_initializer)
    for place in walk.nodes(proto):
        node = place.node
        if is_quantize(node) or is_dequantize(node):
            left_out.update(node.input[1:])
        if node.op_type == "Constant" and not walk.domain_of(node):
            for item in node.attribute:
                if item.type == AttributeProto.TENSOR and math.prod(item.t.dims) > 1:
                    stored.append(item.t)
    return Parameters([tensor for tensor in stored if tensor.name not in left_out])

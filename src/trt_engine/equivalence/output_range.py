"""Outputs whose rounding has a size of its own (Sigmoid, Softplus): that of the range, or of 1, in the tails too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from trt_engine.errors import TrtEngineError
from trt_engine.graph import walk

_BOUNDED = frozenset("Sigmoid HardSigmoid Softmax Tanh Erf Softsign Sin Cos LpNormalization".split())
_BESIDE_ONE = frozenset("Softplus LogSoftmax Elu Celu Selu Gelu Mish".split())
"""Not bounded, but sums and differences of a 1 are inside: log(exp(x) + 1), exp(x) - 1, 1 + erf(x)."""
_GUARDS = frozenset("Add Max Clip Expand Sqrt Identity Cast Unsqueeze Reshape".split())
"""What stands between a sum over values and the division by it: an epsilon, a limit, a shape."""
_NORMALISATIONS = frozenset("LayerNormalization InstanceNormalization GroupNormalization RMSNormalization".split())
_SAME_VALUES = frozenset(
    """Reshape Transpose Squeeze Unsqueeze Flatten Identity Cast Slice Split Gather GatherElements GatherND Expand Tile Pad
    Resize Upsample DepthToSpace SpaceToDepth Dropout MaxPool AveragePool GlobalAveragePool GlobalMaxPool ReduceMax
    ReduceMin ReduceMean Clip Relu Neg Abs TopK Compress""".split()
)  # fmt: skip
_MAX_CONSTANT = 1 << 20


def output_ranges(proto: ModelProto) -> dict[str, float]:
    """The outputs of bounded functions, with the largest magnitude of these; followed through layout and selection, constant
    factors, the branches of If and Concat, where the smallest counts."""
    graphs = list(walk.graphs(proto))
    stored = {item.name: item for graph in graphs for item in graph.initializer}
    found: dict[str, float] = {}
    constants: dict[str, npt.NDArray[Any]] = {}
    producers = {name: node for graph in graphs for node in graph.node for name in node.output if name}

    def largest(name: str) -> float | None:
        if name not in constants and name in stored:
            item = stored[name]
            if item.data_location == TensorProto.EXTERNAL or np.prod(item.dims) > _MAX_CONSTANT:
                return None
            try:
                constants[name] = numpy_helper.to_array(item)
            except (ValueError, TypeError, TrtEngineError):
                return None
        array = constants.get(name)
        return None if array is None or not array.size else float(np.abs(array.astype(np.float64)).max())

    def visit(graph: GraphProto) -> None:
        for node in graph.node:
            if walk.domain_of(node):
                continue
            branches = [body for _, body in walk.bodies(node)] if node.op_type == "If" else []
            if node.op_type == "Constant":
                tensor = next((item.t for item in node.attribute if item.name == "value"), None)
                if tensor is not None and tensor.data_type != TensorProto.STRING:
                    stored[node.output[0]] = tensor
            elif branches:
                for body in branches:
                    visit(body)
                for at, name in enumerate(node.output):
                    sizes = [found[end] for body in branches if (end := body.output[at].name) in found]
                    found.update({name: max(sizes)} if sizes else {})
            elif size := _range(node, found, largest) or _written_out(node, producers, largest):
                found.update((name, size) for name in node.output if name)

    visit(proto.graph)
    return {item.name: found[item.name] for item in proto.graph.output if item.name in found}


def _range(node: NodeProto, found: dict[str, float], largest: Any) -> float | None:
    inputs = list(node.input)
    if node.op_type in _BOUNDED or node.op_type in _BESIDE_ONE:
        return 1.0
    if node.op_type in _NORMALISATIONS:
        return sum(largest(name) or 0.0 for name in inputs[1:3]) or 1.0
    if not inputs:
        return None
    if node.op_type in _SAME_VALUES:
        return found.get(inputs[0])
    if node.op_type == "Concat":
        return min((found[name] for name in inputs if name in found), default=None)
    if node.op_type == "Where":
        inputs = inputs[1:]
    if node.op_type in ("Mul", "Div", "Add", "Sub", "Where", "Max", "Min"):
        sizes = [found.get(name, largest(name)) for name in inputs]
        if len(sizes) != 2 or None in sizes or not any(name in found for name in inputs):
            return None
        one, two = sizes
        if node.op_type == "Mul":
            return float(one * two)
        if node.op_type == "Div":
            return float(one / two) if two and inputs[1] not in found else None
        return float(max(sizes))
    return None


def _written_out(node: NodeProto, producers: dict[str, NodeProto], largest: Any) -> float | None:
    """The range of a quotient that cannot exceed it: k / (c + exp(x)), exp(x) / sum(exp(x)), x / ||x||."""
    if node.op_type not in ("Div", "Reciprocal"):
        return None
    above = node.input[0] if node.op_type == "Div" else ""
    below = producers.get(node.input[-1])
    numerator = largest(above) if above else 1.0
    if below is not None and below.op_type == "Add" and numerator:
        for constant, other in (below.input, reversed(below.input)):
            size, source = largest(constant), producers.get(other)
            if size and source is not None and source.op_type == "Exp":
                return float(numerator / size)
    rooted = False
    while below is not None and below.op_type in _GUARDS and below.input:
        rooted = rooted or below.op_type == "Sqrt"
        below = next((found for name in below.input if (found := producers.get(name)) is not None), None)
    if below is None or not above or not below.input:
        return None
    summed = producers.get(below.input[0])
    if below.op_type == "ReduceSum":
        exponential = producers.get(above)
        if below.input[0] == above and exponential is not None and exponential.op_type == "Exp":
            return 1.0
        if (
            rooted
            and summed is not None
            and (
                (summed.op_type == "Mul" and list(summed.input) == [above, above])
                or (summed.op_type == "Pow" and summed.input[0] == above and largest(summed.input[1]) == 2)
            )
        ):
            return 1.0
    norm = below.op_type == "ReduceL2" or (rooted and below.op_type == "ReduceSumSquare")
    return 1.0 if norm and below.input[0] == above else None

"""Outputs of functions with a bounded range (Sigmoid, Softmax): kernels round relative to the range, in the tails too."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trt_engine.errors import TrtEngineError
from trt_engine.graph import walk

_BOUNDED = frozenset("Sigmoid HardSigmoid Softmax Tanh Erf Softsign Sin Cos".split())
_NORMALISATIONS = frozenset("LayerNormalization InstanceNormalization GroupNormalization RMSNormalization".split())
_SAME_VALUES = frozenset(
    """Reshape Transpose Squeeze Unsqueeze Flatten Identity Cast Slice Split Gather GatherElements GatherND Expand Tile Pad
    Resize Upsample DepthToSpace SpaceToDepth Dropout MaxPool AveragePool GlobalAveragePool GlobalMaxPool ReduceMax
    ReduceMin ReduceMean Clip Relu Neg Abs TopK Compress""".split()
)  # fmt: skip
_MAX_CONSTANT = 1 << 20


def output_ranges(proto: ModelProto) -> dict[str, float]:
    """The outputs of bounded functions, with the largest magnitude of these; followed through layout and selection, constant
    factors and Concat, where the smallest counts."""
    stored = {item.name: item for item in proto.graph.initializer}
    found: dict[str, float] = {}
    constants: dict[str, npt.NDArray[Any]] = {}

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

    for node in proto.graph.node:
        if node.op_type == "Constant" and not walk.domain_of(node):
            tensor = next((item.t for item in node.attribute if item.name == "value"), None)
            if tensor is not None and tensor.data_type != TensorProto.STRING:
                stored[node.output[0]] = tensor
        elif not walk.domain_of(node) and (size := _range(node, found, largest)):
            found.update((name, size) for name in node.output if name)
    return {item.name: found[item.name] for item in proto.graph.output if item.name in found}


def _range(node: NodeProto, found: dict[str, float], largest: Any) -> float | None:
    inputs = list(node.input)
    if node.op_type in _BOUNDED:
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

"""BatchNormalization folded into the convolution in front of it: a pair between the two would keep them apart."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.trace import attributes
from trt_engine.precision.surgery import Names, Weights, drop_unused, tensor

__all__ = ["fold_batch_norms"]


def fold_batch_norms(proto: ModelProto, weights: Weights) -> int:
    """Fold what can be folded, in place; how many were. The convolution then gives the tensor that the norm gave."""
    graph = proto.graph
    readers: dict[str, list[NodeProto]] = {}
    for place in walk.nodes(proto):
        for name in place.node.input:
            readers.setdefault(name, []).append(place.node)
    outputs = {item.name for item in graph.output}
    convolutions = {node.output[0]: node for node in graph.node if node.op_type == "Conv" and not walk.domain_of(node)}
    names = Names(proto)
    gone: set[str] = set()
    replaced: list[str] = []
    for norm in graph.node:
        conv = convolutions.get(norm.input[0]) if norm.op_type == "BatchNormalization" else None
        if conv is None or len(readers[norm.input[0]]) != 1 or norm.input[0] in outputs:
            continue
        if len(norm.output) > 1 or attributes(norm).get("training_mode") or not _stored(conv, norm, weights):
            continue
        scale, shift, mean, variance = (weights.read(name).astype(np.float64) for name in norm.input[1:5])
        factor = scale / np.sqrt(variance + attributes(norm).get("epsilon", 1e-5))
        values = weights.read(conv.input[1])
        bias = weights.read(conv.input[2]) if len(conv.input) > 2 and conv.input[2] else np.zeros(len(values))
        folded = values * factor.reshape(-1, *[1] * (values.ndim - 1)).astype(np.float32)
        made = {"weight": folded, "bias": ((bias - mean) * factor + shift).astype(np.float32)}
        replaced += [*conv.input[1:], *norm.input[1:]]
        del conv.input[1:]
        for part, array in made.items():
            name = names.fresh(f"{conv.output[0]}_{part}_folded")
            graph.initializer.append(tensor(np.ascontiguousarray(array.astype(np.float32)), name))
            conv.input.append(name)
        conv.output[0] = norm.output[0]
        gone.add(norm.output[0])
    for at in reversed(range(len(graph.node))):
        if graph.node[at].op_type == "BatchNormalization" and graph.node[at].output[0] in gone:
            del graph.node[at]
    drop_unused(proto, dict.fromkeys(replaced))
    return len(gone)


def _stored(conv: NodeProto, norm: NodeProto, weights: Weights) -> bool:
    names = [name for name in (*conv.input[1:], *norm.input[1:5]) if name]
    return all(name in weights and weights.elem(name) == TensorProto.FLOAT for name in names)

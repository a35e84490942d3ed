"""Constants of a graph: stored tensors, `Constant` nodes, random and quantised ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from copy import deepcopy

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from trt_engine.graph import walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.edit_graph import retain_items
from trt_engine.graph.shape_eval import CONSTANT_DTYPES

RANDOM_OPS = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli".split())


def initializer_names(proto: ModelProto) -> set[str]:
    """Names of the main graph's stored tensors, sparse ones included."""
    graph = proto.graph
    return {item.name for item in graph.initializer} | {item.values.name for item in graph.sparse_initializer}


def drop_initializer_inputs(proto: ModelProto) -> None:
    """Remove initializers from the graph inputs, where IR version 3 lists them."""
    stored = initializer_names(proto)
    retain_items(proto.graph.input, lambda item: item.name not in stored)
    proto.ir_version = max(proto.ir_version, 4)


def constants_as_initializers(proto: ModelProto, *, bodies: bool = False) -> None:
    """Turn Constant nodes of the main graph, on request of its bodies too, into initializers, in place; outputs of a graph
    stay nodes."""
    for graph in list(walk.graphs(proto)) if bodies else [proto.graph]:
        outputs = {item.name for item in graph.output}
        gone = set()
        for node in graph.node:
            if node.op_type != "Constant" or walk.domain_of(node) or not node.output or node.output[0] in outputs:
                continue
            tensor = constant_tensor(node)
            if tensor is not None:
                tensor.name = node.output[0]
                graph.initializer.append(tensor)
                gone.add(node.output[0])
        retain_items(graph.node, lambda node: node.op_type != "Constant" or node.output[0] not in gone)  # noqa: B023


def constant_tensor(node: NodeProto) -> TensorProto | None:
    """A copy of the tensor of a Constant node; None for strings and sparse tensors, which stay nodes."""
    given = walk.attributes(node)
    if isinstance(value := given.get("value"), TensorProto):
        return deepcopy(value)
    names = (name for name in CONSTANT_DTYPES if name in given)
    return next((numpy_helper.from_array(np.array(given[name], CONSTANT_DTYPES[name])) for name in names), None)


def is_random(node: NodeProto, off: Collection[str] = ()) -> bool:
    """True for a node whose results differ from run to run. `off` names false constants, which disable Dropout."""
    if walk.domain_of(node):
        return False
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        return node.input[2] not in off
    return node.op_type in RANDOM_OPS or any(
        is_random(inner, off) for _, body in walk.bodies(node) for inner in body.node
    )


def stored_constants(graph: GraphProto) -> Iterator[tuple[str, TensorProto]]:
    """Initializers and Constant nodes of a graph, by tensor name; bodies are not entered."""
    yield from ((item.name, item) for item in graph.initializer)
    for node in graph.node:
        if node.op_type == "Constant" and node.output and (tensor := constant_tensor(node)) is not None:
            yield node.output[0], tensor


def false_constants(proto: ModelProto) -> set[str]:
    """Names of stored booleans that are false."""
    found = set()
    for graph in walk.graphs(proto):
        for name, tensor in stored_constants(graph):
            inside = tensor.data_type == TensorProto.BOOL and tensor.data_location != TensorProto.EXTERNAL
            if inside and not numpy_helper.to_array(tensor).any():
                found.add(name)
    return found


def quantised_weights(proto: ModelProto) -> set[str]:
    """Initializers that reach a Q/DQ node through constant nodes only: folding would undo their quantisation."""
    graph = proto.graph
    leaves: dict[str, set[str]] = {item.name: {item.name} for item in graph.initializer}
    found: set[str] = set()
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if (is_quantize(node) or is_dequantize(node)) and inputs and inputs[0] in leaves:
            found |= leaves[inputs[0]]
        if inputs and all(name in leaves for name in inputs):
            union = set().union(*(leaves[name] for name in inputs))
            leaves.update((name, union) for name in node.output if name)
    return found

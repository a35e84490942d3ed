"""Folds the arithmetic of sizes that a build fixes: `Shape` and what follows from it become constants.

Sizes that vary stay as they are. (`static_shapes` fixes every size, and writes a file.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, numpy_helper

from trt_engine.graph import walk
from trt_engine.graph.edit_graph import replace_items
from trt_engine.graph.shape_eval import MOVING, fold_node
from trt_engine.graph.shape_inference import TensorInfo, trace
from trt_engine.tensors import Shape

Array = npt.NDArray[Any]
_ROUNDS = 8
"""Traces at most: each finds what follows from parts of shapes that the one before found."""
_MOVED = MOVING | {"Cast"}
"""A size that is not known stays at its place."""
_TYPES = ("int64", "int32", "bool", "float32", "float64")


def fold_fixed_sizes(proto: ModelProto, shapes: Mapping[str, Shape]) -> int:
    """Fix the inputs' sizes (-1 for one that varies) in place and fold what follows from them; returns how many nodes.

    Bodies of If, Loop and Scan stay, and nodes that compute an output of the graph.
    """
    if not any(node.op_type in ("Shape", "Size") for node in proto.graph.node):
        return 0
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, shapes.get(value.name, ()), strict=False):
            if size >= 0:
                dim.dim_value = size
    outputs, count = {value.name for value in proto.graph.output}, 0
    for _ in range(_ROUNDS):
        found = _fixed_values(proto)
        nodes = [node for node in proto.graph.node if _is_open(node, found, outputs)]
        if len(nodes) == len(proto.graph.node):
            break
        count += len(proto.graph.node) - len(nodes)
        made = {name for node in nodes for name in node.output}
        read = {name for node in nodes for name in walk.names_read(node)} - made
        replace_items(proto.graph.node, nodes)
        constants = [numpy_helper.from_array(value, name) for name, value in found.items() if name in read]
        proto.graph.initializer.extend(constants)
    return count


def _is_open(node: NodeProto, found: Mapping[str, Array], outputs: set[str]) -> bool:
    names = [name for name in node.output if name]
    return not names or any(name in outputs or name not in found for name in names)


def _fixed_values(proto: ModelProto) -> dict[str, Array]:
    """Values that follow from sizes, by tensor of the main graph."""
    facts, parts, found = trace(proto, {}).tensors, dict[str, Array](), dict[str, Array]()
    for node in proto.graph.node:
        if (moved := _moved_sizes(node, facts, parts)) is not None:
            parts[node.output[0]] = moved
        for name in node.output:
            fact = facts.get(name, TensorInfo())
            value = None if fact.is_constant else fact.value
            if value is None and moved is not None and np.all(moved >= 0):
                value = moved
            if value is not None and value.dtype.name in _TYPES:
                found[name] = np.ascontiguousarray(value).reshape(value.shape)
    return found


def _moved_sizes(node: NodeProto, facts: Mapping[str, TensorInfo], parts: Mapping[str, Array]) -> Array | None:
    """The sizes that a node moves, -1 for one that is not known."""
    if walk.domain_of(node) != "" or not node.input or len(node.output) != 1:
        return None
    given = [facts.get(name, TensorInfo()) if name else None for name in node.input]
    attributes = walk.attributes(node)
    if node.op_type == "Shape":
        shape = given[0].shape if given[0] is not None else None
        return None if shape is None else np.array(shape[attributes.get("start", 0) : attributes.get("end")], np.int64)
    movable: Sequence[str] = node.input if node.op_type == "Concat" else node.input[:1]
    if node.op_type not in _MOVED or not any(name in parts for name in movable):
        return None
    known = [
        TensorInfo(shape=parts[name].shape, value=parts[name]) if name in parts and name in movable else fact
        for name, fact in zip(node.input, given, strict=True)
    ]
    made = fold_node(node.op_type, attributes, known, 1)
    return None if made is None or made[0].dtype.name not in ("int64", "int32") else made[0]

"""Weights that are computed from constants alone (cast, scaled, joined, filled) become stored ones."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.backends.onnxruntime import session
from trt_engine.graph import walk
from trt_engine.graph.constants import is_random
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.edit_graph import (
    NameAllocator,
    Weights,
    count_reads,
    make_initializer,
    outer_scope_reads,
    retain_items,
)
from trt_engine.graph.shape_inference import trace
from trt_engine.precision.layer_selection import LINEAR_OPS

log = logging.getLogger(__name__)

_PARAMETERS = dict.fromkeys(LINEAR_OPS, (1, 2)) | {"BatchNormalization": (1, 2, 3, 4)}
_FOLDED = (TensorProto.FLOAT, TensorProto.FLOAT16)


def fold_weights(proto: ModelProto, weights: Weights) -> int:
    """Store the computed weights and biases of the main graph's layers, in place, and return their number.

    None where ONNX Runtime does not compute them.
    """
    graph = proto.graph
    makers = _constant_nodes(proto)
    reads = [
        (node, at)
        for node in graph.node
        if not walk.domain_of(node)
        for at in _PARAMETERS.get(node.op_type, ())
        if at < len(node.input) and node.input[at] in makers and node.input[at] not in weights
    ]
    if not reads:
        return 0
    facts = trace(proto, {}).tensors
    types = {node.input[at]: facts[node.input[at]].elem for node, at in reads if node.input[at] in facts}
    types = {name: elem for name, elem in types.items() if elem in _FOLDED}
    try:
        values = _compute(proto, makers, types, weights)
    except session.ERRORS as error:
        log.debug("computed weights stay: %s", error)
        return 0
    names = NameAllocator(proto)
    stored = {name: names.fresh(f"{name}_folded") for name in values}
    graph.initializer.extend(make_initializer(values[name], new) for name, new in stored.items())
    for node, at in reads:
        node.input[at] = stored.get(node.input[at], node.input[at])
    _drop_unread(proto, makers)
    return len(stored)


def _constant_nodes(proto: ModelProto) -> dict[str, NodeProto]:
    """The nodes of the main graph that compute from stored tensors alone, by the names of their outputs."""
    known = {item.name for item in proto.graph.initializer}
    found: dict[str, NodeProto] = {}
    for node in proto.graph.node:
        inputs = [name for name in node.input if name]
        fixed = known.issuperset(inputs) and (inputs or node.op_type == "Constant")
        odd = walk.domain_of(node) or is_random(node) or is_quantize(node) or is_dequantize(node)
        if fixed and not odd and not any(True for _ in walk.bodies(node)):
            known.update(node.output)
            found.update((name, node) for name in node.output if name)
    return found


def _compute(
    proto: ModelProto, makers: Mapping[str, NodeProto], types: Mapping[str, int], weights: Weights
) -> dict[str, npt.NDArray[Any]]:
    """The values of the tensors in `types`, by name; in the dtypes and shapes that their nodes give them."""
    needed: set[str] = set()
    left = list(types)
    while left:
        name = left.pop()
        if name not in needed:
            needed.add(name)
            left += [read for read in makers[name].input if read] if name in makers else []
    nodes = [node for node in proto.graph.node if not needed.isdisjoint(name for name in node.output if name in makers)]
    graph = helper.make_graph(
        nodes, "weights", [],
        [helper.make_tensor_value_info(name, elem, None) for name, elem in types.items()],
        [make_initializer(weights.read(item.name), item.name) for item in proto.graph.initializer if item.name in needed],
    )  # fmt: skip
    part = helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=min(proto.ir_version, 10))
    ran: Sequence[Any] = session.create_plain(part.SerializeToString(), threads=1).run(list(types), {})
    return dict(zip(types, ran, strict=True))


def _drop_unread(proto: ModelProto, makers: Mapping[str, NodeProto]) -> None:
    """Remove the nodes of `makers` that nothing reads any longer."""
    graph = proto.graph
    fixed = set(makers)
    while True:
        read = {*count_reads(proto), *outer_scope_reads(graph), *(item.name for item in graph.output)}
        before = len(graph.node)
        retain_items(graph.node, lambda node: not fixed.issuperset(node.output) or not read.isdisjoint(node.output))  # noqa: B023
        if len(graph.node) == before:
            return

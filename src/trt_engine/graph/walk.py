"""Going through a graph: every node and tensor of a model, bodies of If, Loop and Scan and local functions included."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

__all__ = ["DEFAULT_DOMAINS", "Place", "bodies", "domain_of", "graphs", "label", "nodes", "opsets_of", "tensors"]

DEFAULT_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True, slots=True)
class Place:
    """One node and where it stands."""

    node: NodeProto
    owner: GraphProto | FunctionProto
    opsets: dict[str, int]
    """The operator sets in force there: a local function has its own."""


def domain_of(node: NodeProto) -> str:
    """The node's domain; the default one is `""` however it is spelled."""
    return "" if node.domain in DEFAULT_DOMAINS else node.domain


def opsets_of(proto: ModelProto | FunctionProto) -> dict[str, int]:
    """Version by operator-set domain; the default domain is `""`."""
    return {"" if item.domain in DEFAULT_DOMAINS else item.domain: item.version for item in proto.opset_import}


def bodies(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """The graphs a node carries, by attribute name."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.name, attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            for graph in attribute.graphs:
                yield attribute.name, graph


def _in_order(owner: GraphProto | FunctionProto, opsets: dict[str, int]) -> Iterator[Place]:
    for node in owner.node:
        yield Place(node, owner, opsets)
        for _, body in bodies(node):
            yield from _in_order(body, opsets)


def nodes(proto: ModelProto) -> Iterator[Place]:
    """Every node of the model as it is written: a function's body once, however often it is called."""
    yield from _in_order(proto.graph, opsets_of(proto))
    for function in proto.functions:
        yield from _in_order(function, opsets_of(function))


def graphs(proto: ModelProto) -> Iterator[GraphProto]:
    """The main graph and every body under it, functions' bodies included."""
    yield proto.graph
    for place in nodes(proto):
        for _, body in bodies(place.node):
            yield body


def tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every stored tensor: initializers (dense and sparse) and attributes of nodes."""
    for graph in graphs(proto):
        yield from _stored(graph)
    for place in nodes(proto):
        yield from _attributes(place.node)
    for training in proto.training_info:
        for graph in (training.initialization, training.algorithm):
            yield from _stored(graph)
            for inner in _in_order(graph, {}):
                yield from _attributes(inner.node)
                for _, body in bodies(inner.node):
                    yield from _stored(body)


def _stored(graph: GraphProto) -> Iterator[TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices


def _attributes(node: NodeProto) -> Iterator[TensorProto]:
    for attribute in node.attribute:
        if attribute.type == AttributeProto.TENSOR:
            yield attribute.t
        elif attribute.type == AttributeProto.TENSORS:
            yield from attribute.tensors
        elif attribute.type == AttributeProto.SPARSE_TENSOR:
            yield attribute.sparse_tensor.values
            yield attribute.sparse_tensor.indices
        elif attribute.type == AttributeProto.SPARSE_TENSORS:
            for sparse in attribute.sparse_tensors:
                yield sparse.values
                yield sparse.indices


def label(node: NodeProto) -> str:
    """What a person finds the node by: its name, or its first output."""
    return node.name or next((name for name in node.output if name), node.op_type)

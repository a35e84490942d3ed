"""Iterates over nodes, graphs and tensors of a model, including bodies of If, Loop and Scan and local functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from trt_engine.model import GraphIndex, NodeLocation

DEFAULT_DOMAINS = ("", "ai.onnx")


def domain_of(node: NodeProto) -> str:
    """The node's domain; `""` for the default one."""
    return "" if node.domain in DEFAULT_DOMAINS else node.domain


def opsets_of(proto: ModelProto | FunctionProto) -> dict[str, int]:
    """Version by operator-set domain; `""` for the default one."""
    return {"" if item.domain in DEFAULT_DOMAINS else item.domain: item.version for item in proto.opset_import}


def bodies(node: NodeProto) -> Iterator[tuple[str, GraphProto]]:
    """The graphs of a node by attribute name, whatever type the attribute declares."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.name, attribute.g
        for graph in attribute.graphs:
            yield attribute.name, graph


def attributes(node: NodeProto) -> dict[str, Any]:
    """The node's attributes as Python values, without graphs."""
    kinds = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    return {
        item.name: helper.get_attribute_value(item)
        for item in node.attribute
        if item.type not in kinds and item.type != AttributeProto.UNDEFINED and not item.ref_attr_name
    }


def qualified_name(node: NodeProto) -> str:
    """Operator name, with its domain unless standard, as `com.microsoft::Gelu`."""
    return f"{node.domain}::{node.op_type}" if domain_of(node) else node.op_type


def names_read(node: NodeProto) -> Iterator[str]:
    """Names a node reads: its inputs, and what its bodies capture."""
    yield from (name for name in node.input if name)
    for _, body in bodies(node) if node.attribute else ():
        yield from outer_scope_names(body)


def outer_scope_names(body: GraphProto) -> Iterator[str]:
    """Names a body reads and does not define."""
    made = {item.name for item in (*body.input, *body.initializer)}
    made |= {item.values.name for item in body.sparse_initializer}
    made |= {name for node in body.node for name in node.output}
    for node in body.node:
        yield from (name for name in names_read(node) if name not in made)
    yield from (item.name for item in body.output if item.name not in made)


def kept_names(graph: GraphProto) -> set[str]:
    """Names that a rewrite of a graph's nodes leaves as they are: its outputs, and what bodies of its nodes read."""
    captured = (name for node in graph.node for _, body in bodies(node) for name in outer_scope_names(body))
    return {item.name for item in graph.output} | {*captured}


def _located_nodes(owner: GraphProto | FunctionProto, opsets: dict[str, int]) -> Iterator[NodeLocation]:
    for node in owner.node:
        yield NodeLocation(node, owner, opsets)
        if node.attribute:  # most nodes have none: this loop dominates on large models
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    yield from _located_nodes(attribute.g, opsets)
                for graph in attribute.graphs:
                    yield from _located_nodes(graph, opsets)


def _graphs_in(owner: GraphProto | FunctionProto) -> Iterator[GraphProto]:
    """Bodies under a graph or function, outer ones first."""
    for node in owner.node:
        if node.attribute:
            for _, body in bodies(node):
                yield body
                yield from _graphs_in(body)


def index_of(proto: ModelProto) -> GraphIndex:
    """The model's graphs, nodes and tensors, for callers that read them more than once."""
    functions = frozenset(
        ("" if item.domain in DEFAULT_DOMAINS else item.domain, item.name) for item in proto.functions
    )
    return GraphIndex(
        proto, tuple(graphs(proto)), tuple(nodes(proto)), tuple(tensors(proto)), opsets_of(proto), functions
    )


def nodes(proto: ModelProto) -> Iterator[NodeLocation]:
    """Every node as written: a function's body once, however often it is called."""
    yield from _located_nodes(proto.graph, opsets_of(proto))
    for function in proto.functions:
        yield from _located_nodes(function, opsets_of(function))


def all_nodes(proto: ModelProto) -> list[NodeProto]:
    """The nodes of `nodes` in the same order, twice as fast."""
    found: list[NodeProto] = []
    for owner in (proto.graph, *proto.functions):
        _collect_nodes(owner, found)
    return found


def _collect_nodes(owner: GraphProto | FunctionProto, found: list[NodeProto]) -> None:
    for node in owner.node:
        found.append(node)
        if held := node.attribute:
            for attribute in held:
                if attribute.HasField("g"):
                    _collect_nodes(attribute.g, found)
                for graph in attribute.graphs:
                    _collect_nodes(graph, found)


def graphs(proto: ModelProto) -> Iterator[GraphProto]:
    """The main graph and every body, including those of functions."""
    yield proto.graph
    yield from _graphs_in(proto.graph)
    for function in proto.functions:
        yield from _graphs_in(function)


def tensors(proto: ModelProto) -> Iterator[TensorProto]:
    """Every stored tensor: initializers (dense and sparse), node attributes, default attributes of functions."""
    yield from _graph_tensors(proto.graph)
    for function in proto.functions:
        for default in function.attribute_proto:
            yield from _attribute_tensors(default)
            for graph in (*([default.g] if default.HasField("g") else ()), *default.graphs):
                yield from _graph_tensors(graph)
        yield from _node_tensors(function)
    for training in proto.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: GraphProto) -> Iterator[TensorProto]:
    """Tensors of a graph and its bodies."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    yield from _node_tensors(graph)


def _node_tensors(owner: GraphProto | FunctionProto) -> Iterator[TensorProto]:
    for node in owner.node:
        if node.attribute:
            for attribute in node.attribute:
                yield from _attribute_tensors(attribute)
            for _, body in bodies(node):
                yield from _graph_tensors(body)


def _attribute_tensors(attribute: AttributeProto) -> Iterator[TensorProto]:
    """Tensors of an attribute, whatever type it declares: readers differ in what they trust."""
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    if attribute.HasField("sparse_tensor"):
        yield attribute.sparse_tensor.values
        yield attribute.sparse_tensor.indices
    for sparse in attribute.sparse_tensors:
        yield sparse.values
        yield sparse.indices


def label(node: NodeProto) -> str:
    """Name of a node, or its first output."""
    return node.name or next((name for name in node.output if name), node.op_type)

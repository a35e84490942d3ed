"""A raw export made presentable: its users' names on inputs, sizes and weights, and no paths of the exporting machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto, NodeProto

from trt_engine.graph import walk
from trt_engine.graph.load import read_proto

__all__ = ["name_outputs", "tidy", "without_traces"]

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def tidy(path: Path, symbols: Mapping[str, Mapping[int, str]], prefix: str = "source") -> None:
    """Rewrite the graph at `path`: `prefix.` off its names, and the symbols asked for at the axes of its inputs.

    Weights are not touched, wherever they lie.
    """
    proto = read_proto(path)
    _strip(proto, (f"{prefix}.", f"/{prefix}/"))
    _name_sizes(proto, symbols)
    path.write_bytes(proto.SerializeToString())


def _strip(proto: ModelProto, prefixes: tuple[str, str]) -> None:
    """Names without what our wrapper around the source put before them; left alone where that would make two of one."""
    taken: set[str] = set()
    for graph in walk.graphs(proto):
        taken.update(item.name for item in (*graph.input, *graph.output, *graph.initializer))
    for place in walk.nodes(proto):
        taken.update((*place.node.output, *place.node.input))

    def plain(name: str) -> str:
        for prefix in prefixes:
            if name.startswith(prefix):
                shorter = name.removeprefix(prefix) if prefix.endswith(".") else "/" + name.removeprefix(prefix)
                return name if shorter in taken or not shorter.strip("/") else shorter
        return name

    for graph in walk.graphs(proto):
        for tensor in graph.initializer:
            tensor.name = plain(tensor.name)
        for value in (*graph.value_info, *graph.input, *graph.output):
            value.name = plain(value.name)
    for place in walk.nodes(proto):
        node = place.node
        node.name = plain(node.name)
        for names in (node.input, node.output):
            for at, name in enumerate(names):
                names[at] = plain(name)


def _name_sizes(proto: ModelProto, symbols: Mapping[str, Mapping[int, str]]) -> None:
    renamed: dict[str, str] = {}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        for at, symbol in symbols.get(value.name, {}).items():
            if at < len(dims) and not dims[at].HasField("dim_value"):
                if dims[at].dim_param:
                    renamed.setdefault(dims[at].dim_param, symbol)
                else:
                    dims[at].dim_param = symbol

    def named(text: str) -> str:
        if text in renamed:
            return renamed[text]
        return _IDENTIFIER.sub(lambda match: renamed.get(match[0], match[0]), text)

    for graph in walk.graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = named(dim.dim_param)


def name_outputs(proto: ModelProto, symbols: Mapping[str, Mapping[int, str | None]]) -> tuple[str, ...]:
    """Write the symbol at every axis of an output that was seen to be it; what was corrected, in words.

    An axis that moves and is no symbol itself keeps the exporter's expression, or gets a name of its own.
    """
    said = []
    for value in proto.graph.output:
        dims = value.type.tensor_type.shape.dim
        for at, symbol in symbols.get(value.name, {}).items():
            if at >= len(dims):
                continue
            dim = dims[at]
            stated = str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param
            wanted = symbol or (
                dim.dim_param if dim.dim_param and not dim.HasField("dim_value") else f"{value.name}_{at}"
            )
            if stated != wanted:
                if dim.HasField("dim_value"):
                    said.append(f"axis {at} of the output `{value.name}` was stated as {stated} and is `{wanted}`")
                dim.dim_param = wanted
    return tuple(said)


def without_traces(proto: ModelProto) -> None:
    """Take out what the exporter noted for debugging: stacks with paths of this machine, once for every node."""
    for place in walk.nodes(proto):
        _clear(place.node)
    for graph in walk.graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del value.metadata_props[:]
        del graph.metadata_props[:]
    proto.doc_string = ""
    proto.graph.doc_string = ""


def _clear(node: NodeProto) -> None:
    del node.metadata_props[:]
    node.doc_string = ""

"""Cleans up a raw export: user-defined names for inputs, sizes and weights, no paths of the exporting machine."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from onnx import ModelProto, NodeProto

from trt_engine.graph import walk
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import KEY, name_module

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = frozenset("Min Max floor ceil ceiling".split())
_STEP = re.compile(r"(\d+)\*([A-Za-z_]\w*)")
_PRODUCT = re.compile(r"(?:(\d+)\*)?([A-Za-z_]\w*(?:\*[A-Za-z_]\w*)*)")


def clean_export(
    path: Path,
    symbols: Mapping[str, Mapping[int, str]],
    roots: Mapping[str, tuple[str, int]] | None = None,
    *,
    prefix: str = "source",
    modules: Collection[str] = (),
) -> None:
    """Rewrite the graph at `path`: remove `prefix.` from names, record the module of each node (one of `modules`), and
    write the requested symbols wherever their sizes occur.

    `roots` maps the exporter's symbols. Weights are not touched.
    """
    proto = read_proto(path)
    _strip(proto, (f"{prefix}.", f"/{prefix}/"))
    for place in walk.nodes(proto):
        name_module(place.node, prefix, modules)
    _name_sizes(proto, symbols, roots or {})
    path.write_bytes(proto.SerializeToString())


def _strip(proto: ModelProto, prefixes: tuple[str, str]) -> None:
    """Remove the wrapper's prefixes from names, unless two names would collide."""
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


def _name_sizes(
    proto: ModelProto, symbols: Mapping[str, Mapping[int, str]], roots: Mapping[str, tuple[str, int]]
) -> None:
    renamed = {root: symbol for root, (symbol, step) in roots.items() if step == 1}
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        for at, symbol in symbols.get(value.name, {}).items():
            if at < len(dims) and not dims[at].HasField("dim_value"):
                if dims[at].dim_param:
                    renamed.setdefault(dims[at].dim_param, symbol)
                else:
                    dims[at].dim_param = symbol

    steps = {root: size for root, size in roots.items() if size[1] > 1}  # an axis with a step: `time` is `8*s86`
    for text, symbol in renamed.items():
        if (match := _STEP.fullmatch(text)) is not None:
            steps[match[2]] = (symbol, int(match[1]))

    def named(text: str) -> str:
        if text in renamed:
            return renamed[text]
        if (match := _PRODUCT.fullmatch(text)) is not None:
            return _product(int(match[1] or 1), match[2].split("*"), renamed, steps)
        return _IDENTIFIER.sub(lambda match: _size(match[0], renamed, steps), text)

    for graph in walk.graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = named(dim.dim_param)
    _rename_foreign_sizes(proto, {symbol for axes in symbols.values() for symbol in axes.values()})


def _rename_foreign_sizes(proto: ModelProto, known: set[str]) -> None:
    """Sizes the exporter named (`s7`, `u0`): outputs get readable names, other tensors none."""
    names: dict[str, str] = {}

    def foreign(text: str) -> bool:
        return any(name not in known and name not in _FUNCTIONS for name in _IDENTIFIER.findall(text))

    for value in proto.graph.output:
        for at, dim in enumerate(value.type.tensor_type.shape.dim):
            if foreign(dim.dim_param):
                dim.dim_param = names.setdefault(dim.dim_param, f"{value.name}_{at}")
    for graph in walk.graphs(proto):
        for value in (*graph.value_info, *(graph.output if graph is not proto.graph else ())):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param and dim.dim_param in names:
                    dim.dim_param = names[dim.dim_param]
                elif foreign(dim.dim_param) and dim.dim_param not in names.values():
                    dim.Clear()


def _size(name: str, renamed: Mapping[str, str], steps: Mapping[str, tuple[str, int]]) -> str:
    if name in steps:
        symbol, step = steps[name]
        return f"({symbol}//{step})"
    return renamed.get(name, name)


def _product(
    factor: int, names: list[str], renamed: Mapping[str, str], steps: Mapping[str, tuple[str, int]]
) -> str:  # fmt: skip
    """`16*s34*s56` in the user's symbols: `height*width//64`. A divided size is a multiple of the divisor."""
    divisor = math.prod(steps[name][1] for name in names if name in steps)
    shared = math.gcd(factor, divisor)
    factor, divisor = factor // shared, divisor // shared
    symbols = [steps[name][0] if name in steps else renamed.get(name, name) for name in names]
    text = "*".join([*([str(factor)] if factor > 1 else []), *symbols])
    return f"{text}//{divisor}" if divisor > 1 else text


def name_outputs(
    proto: ModelProto, symbols: Mapping[str, Mapping[int, str | None]], sizes: Mapping[str, Mapping[int, int]]
) -> tuple[str, ...]:
    """Write the symbol of every dynamic output axis, and the size of every constant one, in place; returns corrections.

    A computed dynamic size keeps the exporter's expression, or gets a new name.
    """
    said = []
    inputs = {dim.dim_param for value in proto.graph.input for dim in value.type.tensor_type.shape.dim}
    for value in proto.graph.output:
        dims = value.type.tensor_type.shape.dim
        for at, symbol in symbols.get(value.name, {}).items():
            if at >= len(dims):
                continue
            dim = dims[at]
            if (
                _IDENTIFIER.fullmatch(dim.dim_param) is None
                and _IDENTIFIER.search(dim.dim_param) is not None
                and inputs.issuperset(set(_IDENTIFIER.findall(dim.dim_param)) - _FUNCTIONS)
            ):
                continue  # an expression: observed sizes may agree with the symbol where all of them share a divisor
            stated = str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param
            wanted = symbol or (
                dim.dim_param if dim.dim_param and not dim.HasField("dim_value") else f"{value.name}_{at}"
            )
            if stated != wanted:
                if dim.HasField("dim_value"):
                    said.append(f"axis {at} of the output `{value.name}` was declared as {stated} and is `{wanted}`")
                dim.dim_param = wanted
        for at, size in sizes.get(value.name, {}).items():
            if at < len(dims) and not dims[at].HasField("dim_value"):
                dims[at].dim_value = size
    return tuple(said)


def strip_stack_traces(proto: ModelProto) -> None:
    """Remove the exporter's debug metadata (stack traces with local paths); module paths stay."""
    for place in walk.nodes(proto):
        _clear_metadata(place.node)
    for graph in walk.graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            del value.metadata_props[:]
        del graph.metadata_props[:]
    proto.doc_string = ""
    proto.graph.doc_string = ""


def _clear_metadata(node: NodeProto) -> None:
    name_module(node)
    kept = [item.value for item in node.metadata_props if item.key == KEY]
    del node.metadata_props[:]
    for value in kept:
        node.metadata_props.add(key=KEY, value=value)
    node.doc_string = ""

"""Lint rules: names, node order, unused and duplicate parts, image inputs in NHWC."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from onnx import GraphProto, NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.lint_rules.model_view import ModelView, format_shapes, info, warning
from trt_engine.graph.shape_inference import TracedNode, flatten, typed_attributes
from trt_engine.records.base import Finding

_AWKWARD = frozenset('/\\*?"<>|,')


def check_names(view: ModelView) -> Iterator[Finding]:
    signature = view.model.signature
    ends = [spec.name for spec in (*signature.inputs, *signature.outputs)]
    for name in dict.fromkeys(ends):
        signs = sorted(set(name) & _AWKWARD)
        reason = (
            f"has {' '.join(signs)} in it" if signs
            else "is empty" if not name
            else "has blanks or unprintable characters" if not name.isprintable() or name != "".join(name.split())
            else "begins with a dash" if name.startswith("-")
            else "is a path to a parent folder" if name in (".", "..")
            else f"has {len(name)} characters" if len(name) > 120
            else ""
        )  # fmt: skip
        if reason:
            yield warning(
                "awkward-name",
                f"the name {name[:80]!r} of an input or output {reason}: command lines (`--shapes NAME:1x3`) or file "
                "names made of it break",
                name[:200],
                "rename it at export (`input_names=`, `output_names=`)",
            )
    folded: dict[str, str] = {}
    for name in dict.fromkeys(ends):
        other = folded.setdefault(name.casefold(), name)
        if other != name:
            yield warning(
                "names-differ-by-case",
                f"`{other}` and `{name}` differ only in case: files named after them collide on some systems",
                name,
                "rename one of them at export",
            )
    graphs = view.model.graph.graphs
    repeated = Counter[str]()
    for graph in graphs:  # two branches may share a name
        repeated |= Counter(node.name for node in graph.node if node.name)
    again = [name for name, count in repeated.items() if count > 1]
    if again:
        yield warning(
            "duplicate-node-name",
            f"{len(again)} node names are used more than once, `{again[0]}` {repeated[again[0]]} times: settings by layer "
            "name (`--exclude-node`, layer precisions) and profiles cannot distinguish them",
            again[0],
            "export again; `trt-engine convert MODEL.onnx -o OUT.onnx` renames nodes",
        )
    odd = next(
        (
            node.name
            for graph in graphs
            for node in graph.node
            if not node.name.isprintable() or ".." in node.name.split("/")
        ),
        None,
    )
    if odd is not None:
        yield warning(
            "unprintable-name",
            f"the node name {odd[:80]!r} has unprintable characters or a `..`: logs and files named after it break",
            odd[:200],
            "export again with plain names",
        )


def check_node_order(view: ModelView) -> Iterator[Finding]:
    for graph in view.model.graph.graphs:
        if (finding := _first_unsorted(graph)) is not None:
            yield finding
            return


def _first_unsorted(graph: GraphProto) -> Finding | None:
    made_later = {name for node in graph.node for name in node.output if name}
    for node in graph.node:
        early = next((name for name in node.input if name in made_later), None)
        if early is not None:
            return warning(
                "not-sorted",
                f"`{walk.label(node)}` ({node.op_type}) reads `{early}` before it is produced: the standard requires "
                "sorted nodes, and some readers refuse others",
                walk.label(node),
                "`trt-engine convert MODEL.onnx -o OUT.onnx` sorts them",
            )
        made_later.difference_update(node.output)
    return None


def _live_names(graph: GraphProto) -> tuple[set[str], list[NodeProto]]:
    """Names that some output depends on, and nodes that no output depends on."""
    nodes = list(graph.node)
    makers = {name: node for node in nodes for name in node.output if name}
    live, queue, needed = set[str](), [item.name for item in graph.output], set[int]()
    while queue:
        name = queue.pop()
        if name in live:
            continue
        live.add(name)
        node = makers.get(name)
        if node is not None and id(node) not in needed:
            needed.add(id(node))
            queue += walk.names_read(node)
    return live, [node for node in nodes if id(node) not in needed]


def check_unused(view: ModelView) -> Iterator[Finding]:
    graph = view.model.proto.graph
    live, dead = _live_names(graph)
    for spec in view.model.signature.inputs:
        if spec.name not in live:
            yield warning(
                "unused-input",
                f"no output depends on the input `{spec.name}`: it was folded at export, or is unused",
                spec.name,
                "check that the example inputs of the export were not constants (`trt-engine convert` compares with the "
                "source), or leave it out",
            )
    if dead:
        counts = ", ".join(f"{count} {op}" for op, count in Counter(node.op_type for node in dead).most_common(4))
        yield info(
            "dead-nodes",
            f"{len(dead)} nodes contribute to no output ({counts})",
            walk.label(dead[0]),
            "`trt-engine convert MODEL.onnx -o SMALLER.onnx` takes them out",
        )
    unread = [item for item in graph.initializer if item.name not in live]
    nbytes = sum(_stored_nbytes(item) for item in unread)
    if unread:
        yield Finding(
            "unused-initializer",
            "warning" if nbytes >= 1 << 20 else "info",
            f"{len(unread)} stored tensors ({nbytes:,} bytes) are not used by any output",
            unread[0].name,
            "`trt-engine convert MODEL.onnx -o SMALLER.onnx` takes them out",
        )


def check_outputs(view: ModelView) -> Iterator[Finding]:
    graph = view.model.proto.graph
    inputs = {spec.name for spec in view.model.signature.inputs}
    fed = set(inputs)
    for _ in range(2):  # two passes: nodes may be out of order
        for node in graph.node:
            if any(name in fed for name in walk.names_read(node)) or node.op_type.startswith("Random"):
                fed.update(node.output)
        if all(item.name in fed for item in graph.output):
            break
    for item in graph.output:
        if inputs and item.name not in fed:
            yield warning(
                "constant-output",
                f"the output `{item.name}` does not depend on any input: it is the same for every image",
                item.name,
                "leave it out of the export, or find what froze it: `trt-engine convert` compares with the source",
            )
            continue
        name, node = item.name, view.makers.get(item.name)
        while node is not None and node.op_type == "Identity" and node.input:
            name, node = node.input[0], view.makers.get(node.input[0])
        if name in inputs:
            yield info(
                "passthrough-output",
                f"the output `{item.name}` is the input `{name}`, unchanged",
                item.name,
                "leave it out of the export: it costs a copy",
            )


def _stored_nbytes(tensor: TensorProto) -> int:
    if tensor.raw_data:
        return len(tensor.raw_data)
    width: dict[int, int] = {TensorProto.DOUBLE: 8, TensorProto.INT64: 8, TensorProto.FLOAT: 4, TensorProto.INT32: 4}
    return int(math.prod(tensor.dims)) * width.get(tensor.data_type, 2)


def check_duplicates(view: ModelView) -> Iterator[Finding]:
    """Constants of 64 KiB or more stored more than once; external ones are compared by location."""
    same: dict[tuple[Any, ...], list[TensorProto]] = defaultdict(list)
    for tensor in walk.tensors(view.model.proto):
        if _stored_nbytes(tensor) < 1 << 16:
            continue
        shape = (tensor.data_type, tuple(tensor.dims))
        if tensor.data_location == TensorProto.EXTERNAL:
            continue  # comparing gigabytes by content is too slow
        raw = tensor.raw_data or tensor.SerializeToString(deterministic=True)
        same[(*shape, hashlib.sha256(raw).digest())].append(tensor)
    again = [items for items in same.values() if len(items) > 1]
    wasted = sum(_stored_nbytes(items[0]) * (len(items) - 1) for items in again)
    if again:
        largest = max(again, key=lambda items: _stored_nbytes(items[0]) * (len(items) - 1))
        names = ", ".join(f"`{item.name or 'a Constant node'}`" for item in largest[:3])
        yield Finding(
            "duplicate-constant",
            "warning" if wasted >= 1 << 24 else "info",
            f"{wasted:,} bytes of constants are stored more than once ({names}{' and more' if len(largest) > 3 else ''})",
            largest[1].name or None,
            "`trt-engine convert MODEL.onnx -o SMALLER.onnx` keeps one of each",
        )


_TO_FIRST = ((0, 3, 1, 2), (0, 4, 1, 2, 3))
_TO_LAST = ((0, 2, 3, 1), (0, 2, 3, 4, 1))
_CONVOLUTIONS = frozenset(
    "Conv ConvTranspose FusedConv QLinearConv MaxPool AveragePool GlobalAveragePool DepthToSpace Resize".split()
)


def check_layout(view: ModelView) -> Iterator[Finding]:
    first: list[TracedNode] = []
    last: list[TracedNode] = []
    inputs = {spec.name for spec in view.model.signature.inputs}
    for step in flatten(view.trace.nodes):
        if (
            step.node.op_type == "Transpose"
            and not step.folded
            and not all(item and item.is_constant for item in step.inputs)
        ):
            perm = tuple(typed_attributes(step.node).get("perm", ()))
            if perm in _TO_FIRST and any(n.op_type in _CONVOLUTIONS for n in view.downstream_nodes(step.node, 8)):
                first.append(step)
            elif perm in _TO_LAST:
                last.append(step)
    if not first:
        return
    moved = sum(step.outputs[0].num_elements for step in (*first, *last))
    where = walk.label(first[0].node)
    if len(first) + len(last) == 1 and first[0].node.input[0] in inputs:
        yield info(
            "nhwc-input",
            f"the input `{first[0].node.input[0]}` has its channels last, converted by one Transpose "
            f"({moved:,} elements an image)",
            where,
            "feed NCHW: `--inputs-as-nchw` of tf2onnx, or keep the one copy",
        )
        return
    yield warning(
        "nhwc-layout",
        f"{len(first) + len(last)} Transposes surround convolutions (channels-last leftovers) and move {moved:,} "
        f"elements an inference at {format_shapes(view.shapes)}, computing nothing",
        where,
        "`trt-engine convert MODEL.onnx -o NCHW.onnx` cancels adjacent pairs, `--inputs-as-nchw` of tf2onnx turns inputs; "
        "what stands between two (a LayerNorm over channels) can be written channels-first in the source",
    )

"""Lint rules: names, node order, unused and duplicate parts, image inputs in NHWC; operators and graph patterns that a
runtime lacks, changes or runs slowly."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto

from trt_engine.graph import operators, walk
from trt_engine.graph.constants import RANDOM_OPS
from trt_engine.graph.lint_rules.model_view import ModelView, error, format_shapes, info, warning
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


def check_tensorrt_only(view: ModelView) -> Iterator[Finding]:
    if names := operators.trt_only(view.model.graph):
        shown = ", ".join(f"`{name}`" for name in names)
        where = next(walk.label(node) for node in view.nodes if operators.is_trt_only(node))
        yield warning(
            "tensorrt-only-operator",
            f"only TensorRT runs {shown}; ONNX Runtime does not",
            where,
            "build it where TensorRT has the plugins (an image of TensorRT that brings them, or `-O plugins=a.so`), or "
            "export (quantize) again from the plain ONNX model",
        )


def check_unknown_operators(view: ModelView) -> Iterator[Finding]:
    for item in operators.unknown_operators(view.model.graph):
        fault = item.error()
        yield error("unknown-operator", f"`{view.model.path.name}` {fault.message}", item.node, fault.hint)


def check_optimised_graph(view: ModelView) -> Iterator[Finding]:
    if view.model.optimised is not None:
        yield warning(
            "optimised-graph",
            f"a graph ONNX Runtime optimised for one machine, without a passport ({view.model.optimised})",
            hint="an engine lost its passport: copy `X.onnx.json` along with it, or build again from the exporter's model",
        )


def check_onnxruntime_version(view: ModelView) -> Iterator[Finding]:
    beyond = operators.onnxruntime_version_gap(view.model.opsets.get(""), view.model.ir_version)
    hint = "export again with opset 20 and IR version 10, which everything takes, or upgrade ONNX Runtime"
    for code, found, word in (
        ("opset-beyond-onnxruntime", beyond.opset, "opset"),
        ("ir-beyond-onnxruntime", beyond.ir, "IR version"),
    ):
        if found is not None:
            yield warning(
                code,
                f"{word} {found[0]}: ONNX Runtime {beyond.runtime} takes up to {found[1]} and refuses the model",
                hint=hint,
            )


def check_deformable_attention(view: ModelView) -> Iterator[Finding]:
    kinds = [op for op in view.counts if re.search(r"ms_?deform|multi_?scale_?deformable", op, re.I)]
    named = next((node for node in view.nodes if node.op_type in kinds), None) if kinds else None
    written_out = view.counts["GridSample"] >= 2 and view.counts["Softmax"] >= 1
    if named is not None or written_out:
        yield warning(
            "deformable-attention",
            "deformable attention"
            + ("" if named is not None else " written out with GridSample")
            + ": TensorRT needs a workspace of 32 GiB for it at batch 64, 8 GiB end in `insufficient workspace`, and its "
            "compiler may be silent for 5 to 10 minutes",
            walk.label(named) if named is not None else view.first("GridSample"),
            "`--workspace 32GiB` (the default here); do not lower the optimization level before that",
        )


def check_attention(view: ModelView) -> Iterator[Finding]:
    kinds = {op for op in view.counts if re.search(r"attention", op, re.I)}
    fused = [node for node in view.nodes if node.op_type in kinds] if kinds else []
    written_out = [
        node
        for node in (view.nodes if view.counts["Softmax"] else ())
        if node.op_type == "Softmax"
        and any(after.op_type in ("MatMul", "Einsum", "FusedMatMul") for after in view.downstream_nodes(node, 4))
        and _is_fed_by(view, node, ("MatMul", "Einsum", "FusedMatMul"))
    ]
    if fused or written_out:
        yield info(
            "transformer",
            f"attention ({len(fused) + len(written_out)} blocks): a dynamic TensorRT engine can be much slower at odd batch "
            "sizes (17 to 19 is documented)",
            walk.label((fused + written_out)[0]),
            "look for them with `trt-engine size --scan`, and prefer powers of two",
        )


def _is_fed_by(view: ModelView, node: NodeProto, kinds: tuple[str, ...]) -> bool:
    """True if one of these operators produces the node's input within a few steps."""
    front = list(node.input[:1])
    for _ in range(5):
        front = [name for made in (view.makers.get(name) for name in front) if made is not None for name in made.input]
        if any((made := view.makers.get(name)) is not None and made.op_type in kinds for name in front):
            return True
    return any((made := view.makers.get(name)) is not None and made.op_type in kinds for name in node.input[:1])


_DATA_DEPENDENT = "NonZero Unique Compress StringNormalizer SequenceConstruct".split()


def check_control_flow(view: ModelView) -> Iterator[Finding]:
    kinds = [kind for kind in ("If", "Loop", "Scan", "SequenceMap") if view.counts[kind]]
    if kinds:
        counted = ", ".join(f"{view.counts[kind]} {kind}" for kind in kinds)
        yield warning(
            "control-flow",
            f"control flow ({counted}): TensorRT cannot fuse across it, and shapes inside may depend on data",
            view.first(*kinds),
            "export again with example inputs that let the exporter unroll it (dynamo does), or fold it with `onnxslim`",
        )
    open_shapes = [kind for kind in _DATA_DEPENDENT if view.counts[kind]]
    if open_shapes:
        yield warning(
            "data-dependent-shape",
            f"{', '.join(open_shapes)}: sizes are known only after it has run, which costs a synchronization, keeps CUDA "
            "graphs out and needs TensorRT 8.5 or newer",
            view.first(*open_shapes),
            "a fixed number of results (TopK) keeps the shapes known",
        )


def check_nms(view: ModelView) -> Iterator[Finding]:
    if view.counts["NonMaxSuppression"]:
        yield warning(
            "nms-inside",
            "NonMaxSuppression inside: the number of detections and the latency depend on the image",
            view.first("NonMaxSuppression"),
            "export without it (`nms=False`) and let DeepStream cluster, or take an NMS-free head, or TensorRT's "
            "`EfficientNMS_TRT` with a fixed maximum",
        )


def check_external_data(view: ModelView) -> Iterator[Finding]:
    if view.model.external:
        names = ", ".join(f"`{item.location}`" for item in view.model.external[:3])
        more = len(view.model.external) - 3
        yield info(
            "external-data",
            f"the weights are in external files: {names}{f' and {more} more files' if more > 0 else ''}",
            hint="copy them together with the model; the digest covers them",
        )


def check_training_mode(view: ModelView) -> Iterator[Finding]:
    if where := view.first(*RANDOM_OPS):
        yield warning(
            "random-operator",
            "the graph draws random numbers: two runs of one input differ, and so does every comparison",
            where,
            "export in evaluation mode (`model.eval()`), or feed the noise as an input",
        )
    for node in view.nodes:
        if node.op_type not in ("BatchNormalization", "Dropout"):
            continue
        training = node.op_type == "BatchNormalization" and (
            walk.attributes(node).get("training_mode") or len(node.output) > 1
        )
        if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
            fact = view.facts.get(node.input[2])
            training = fact is None or fact.value is None or bool(np.any(fact.value))
        if training:
            yield warning(
                "training-mode",
                f"{node.op_type} is in training mode: results depend on the rest of the batch",
                walk.label(node),
                "export after `model.eval()`",
            )
            return

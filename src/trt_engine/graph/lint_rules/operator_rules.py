"""Lint rules: operators and graph patterns that a runtime lacks, changes or runs slowly."""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from onnx import NodeProto

from trt_engine.graph import operators, walk
from trt_engine.graph.constants import RANDOM_OPS
from trt_engine.graph.lint_rules.model_view import ModelView, error, info, warning
from trt_engine.records.base import Finding


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

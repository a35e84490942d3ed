"""`lint`: what is worth changing in a model before anyone builds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, get_args

from trt_engine.api.inspecting import placed_elsewhere, typing_findings
from trt_engine.config import parse_shapes, profile_for
from trt_engine.environment import version_of
from trt_engine.errors import UsageError
from trt_engine.files import path_of
from trt_engine.graph import walk
from trt_engine.graph.findings import ordered
from trt_engine.graph.lint import Target
from trt_engine.graph.lint import lint as lint_graph
from trt_engine.graph.load import legible, open_model, read_proto
from trt_engine.graph.quant_placement import PlacedGraph
from trt_engine.records import Finding, LintReport
from trt_engine.tensors import Shape, Signature, closest

__all__ = ["LINT_TARGETS", "lint"]

LintTarget = Literal["all", "onnxruntime", "tensorrt", "tensorrt-rtx", "onnxruntime-cpu", "onnxruntime-cuda",
                     "onnxruntime-tensorrt"]  # fmt: skip
LINT_TARGETS: tuple[str, ...] = get_args(LintTarget)


def lint(
    path: Path | str,
    *,
    shapes: Mapping[str, Shape] | str | None = None,
    target: LintTarget = "all",
    tensorrt: str | None = None,
) -> LintReport:
    """The findings about an ONNX model, errors first, and who runs which of its operators.

    `shapes` are where its graph is traced; sizes nobody gave are tried out. `target` leaves out what concerns the other
    runtime alone (`onnxruntime` is its CPU provider where Q/DQ pairs are judged), `tensorrt` is the release to judge for
    (default: the installed one, else the newest known). Raises `ModelError` for a file that is no whole model, `UsageError`
    for shapes, targets and releases that cannot be.
    """
    path = path_of(path, "`path`")
    if target not in LINT_TARGETS:
        raise UsageError(f"there is no target `{target}`", hint=closest(str(target), list(LINT_TARGETS)))
    runtime: Target = "tensorrt" if target.startswith("tensorrt") else "all" if target == "all" else "onnxruntime"
    sizes = parse_shapes(shapes)
    model = open_model(path)
    for name, shape in sizes.items():
        profile_for(Signature((model.signature.input(name),), ()), shapes={name: shape})  # says what does not fit
    proto = read_proto(path)
    with legible(path):
        found = lint_graph(model, proto, shapes=sizes, target=runtime, tensorrt=tensorrt)
        placed = PlacedGraph(proto)
        seen, typed = list(found.findings), []
        if target == "all" and placed_elsewhere(placed.report()):  # one finding says what TensorRT does not take
            seen = [item for item in seen if not (item.code == "limited-in-tensorrt" and item.where in placed.pairs)]
        elif runtime != "onnxruntime":
            typed = typing_findings(proto, path, {item.code for item in seen})
        findings = ordered([*seen, *typed, *_placement(placed, target)])
        counts = Counter(item.severity for item in findings)
        return LintReport(
            path=str(path),
            name=model.name,
            digest=model.digest,
            target=target,
            tensorrt=found.tensorrt,
            onnxruntime=version_of("onnxruntime") or version_of("onnxruntime-gpu"),
            opset=model.opsets.get(""),
            ir_version=model.ir_version,
            nodes=sum(1 for _ in walk.nodes(proto)),
            shapes=found.shapes,
            assumed=found.assumed,
            findings=findings,
            counts={severity: counts[severity] for severity in ("error", "warning", "info")},
            operators=found.operators,
        )


def _placement(placed: PlacedGraph, target: LintTarget) -> Iterator[Finding]:
    """Quantised layers that the target's kernels do not take; of no target in particular, what each of the usual two would
    not, as a fact where one of all takes them."""
    if not placed or placed.weights_alone:
        return
    if target == "all":
        severity: Literal["info", "warning"] = "info" if placed.report().targets else "warning"
        found = [placed.finding(name, severity) for name in ("tensorrt", "onnxruntime-cpu")]
    else:
        name = "onnxruntime-cpu" if target == "onnxruntime" else target
        found = [placed.finding(name, "error" if target.startswith("tensorrt") else "warning")]
    yield from (item for item in found if item is not None)

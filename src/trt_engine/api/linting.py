"""`lint`: what is worth changing in a model before anyone builds it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from trt_engine.api.inspecting import typing_findings
from trt_engine.config import parse_shapes, profile_for
from trt_engine.environment import version_of
from trt_engine.errors import UsageError
from trt_engine.files import path_of
from trt_engine.graph import walk
from trt_engine.graph.findings import ordered
from trt_engine.graph.lint import TARGETS, Target
from trt_engine.graph.lint import lint as lint_graph
from trt_engine.graph.load import legible, open_model, read_proto
from trt_engine.records import LintReport
from trt_engine.tensors import Shape, Signature, closest

__all__ = ["lint"]


def lint(
    path: Path | str,
    *,
    shapes: Mapping[str, Shape] | str | None = None,
    target: Target = "all",
    tensorrt: str | None = None,
) -> LintReport:
    """The findings about an ONNX model, errors first, and who runs which of its operators.

    `shapes` are where its graph is traced; sizes nobody gave are tried out. `target` leaves out what concerns the other
    runtime alone, `tensorrt` is the release to judge for (default: the installed one, else the newest known). Raises
    `ModelError` for a file that is no whole model, `UsageError` for shapes, targets and releases that cannot be.
    """
    path = path_of(path, "`path`")
    if target not in TARGETS:
        raise UsageError(f"there is no target `{target}`", hint=closest(str(target), list(TARGETS)))
    sizes = parse_shapes(shapes)
    model = open_model(path)
    for name, shape in sizes.items():
        profile_for(Signature((model.signature.input(name),), ()), shapes={name: shape})  # says what does not fit
    proto = read_proto(path)
    with legible(path):
        found = lint_graph(model, proto, shapes=sizes, target=target, tensorrt=tensorrt)
        known = {item.code for item in found.findings}
        typed = [] if target == "onnxruntime" else typing_findings(proto, path, known)
        findings = ordered([*found.findings, *typed])
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

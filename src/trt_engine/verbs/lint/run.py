"""`lint`: findings worth fixing before a build."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from trt_engine.atomic_io import as_path
from trt_engine.backends.tensorrt.parser_check import Library
from trt_engine.config.parse import parse_shapes
from trt_engine.config.profiles import profile_for
from trt_engine.environment import distribution_version
from trt_engine.errors import SetupError, TrtEngineError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.lint import LintResult
from trt_engine.graph.lint import lint_model as lint_graph
from trt_engine.graph.lint_rules.model_view import sort_findings
from trt_engine.graph.load import OpenedModel, open_graph, parse_errors
from trt_engine.graph.quant_placement import QuantizedGraph
from trt_engine.graph.tensorrt_operators import RTX_RELEASE
from trt_engine.public_function import public_function
from trt_engine.records.base import Finding
from trt_engine.records.lint import LintReport, ReducedModel
from trt_engine.runtime.feeds import random_feeds
from trt_engine.tensors import Shape, Signature, suggest
from trt_engine.trt.gpu_targets import rtx_targets
from trt_engine.verbs.given_model import AnyModel, takes_model
from trt_engine.verbs.inspect.run import targets_other_library, typing_findings
from trt_engine.verbs.lint.parser import ParserReport, check_with_parser, libraries_for
from trt_engine.verbs.lint.reduce_model import check_output, reduce_model
from trt_engine.vision.spec import declared_shapes

LintTarget = Literal["all", "onnxruntime", "tensorrt", "tensorrt-rtx", "onnxruntime-cpu", "onnxruntime-cuda",
                     "onnxruntime-tensorrt"]  # fmt: skip
LINT_TARGETS: tuple[str, ...] = get_args(LintTarget)
LintSupportSource = Literal["auto", "parser", "static"]
LINT_SUPPORT_SOURCES: tuple[str, ...] = get_args(LintSupportSource)

log = logging.getLogger(__name__)


@public_function
@takes_model("path")
def lint(
    path: AnyModel,
    *,
    shapes: Mapping[str, Shape] | str | None = None,
    target: LintTarget = "all",
    tensorrt: str | None = None,
    support_from: LintSupportSource = "auto",
    reduce: Path | str | None = None,
    gpus: Sequence[str] | str = (),
    overwrite: bool = False,
) -> LintReport:
    """Findings about an ONNX model, errors first, and operator support by runtime.

    `shapes` are where its graph is traced; missing sizes are tried out. `target` leaves out what concerns the other
    runtime alone (`onnxruntime` is its CPU provider where Q/DQ pairs are checked), `tensorrt` is the release to check for
    (default: the installed one, else the newest known).

    For `tensorrt` and `tensorrt-rtx` the installed library's own ONNX parser checks the model in a child process;
    `support_from` is `static` for lists and rules alone, `parser` where they are not enough. `reduce` is a file for the
    smallest part of the model that this parser, or else its builder for `gpus` (`sm89`, `8.9`, `RTX 4090`), refuses. Raises
    `ModelError` for a damaged model, `UsageError` for shapes, targets and releases that cannot be, for a `reduce` file that
    exists (without `overwrite`), and where nothing is refused that could be reduced, `SetupError` where a parser is needed
    and not installed.
    """
    path = as_path(path, "`path`")
    for what, value, known in (
        ("target", target, LINT_TARGETS), ("source of support", support_from, LINT_SUPPORT_SOURCES),
    ):  # fmt: skip
        if value not in known:
            raise UsageError(f"unknown {what} `{value}`", hint=suggest(str(value), list(known)))
    libraries = _find_libraries(target, tensorrt, support_from)
    reducers = _reducing_libraries(target) if reduce is not None else ()
    built_for = _gpus(gpus, reducers)
    sizes = parse_shapes(shapes)
    opened = open_graph(path)
    for name, shape in sizes.items():
        profile_for(
            Signature((opened.model.signature.input(name),), ()), shapes={name: shape}
        )  # reports what does not fit
    sizes |= declared_shapes(opened.model, sizes)
    place = check_output(as_path(reduce, "`reduce`"), opened, overwrite=overwrite) if reduce is not None else None
    with parse_errors(path):
        fixed = sizes if all(spec.name in sizes for spec in opened.model.signature.inputs if spec.dynamic) else {}
        library, checked = _run_checker(opened, libraries, target, support_from, fixed)
        found = lint_graph(
            opened,
            shapes=sizes,
            target="tensorrt" if target.startswith("tensorrt") else "all" if target == "all" else "onnxruntime",
            tensorrt=RTX_RELEASE if library == "tensorrt-rtx" else tensorrt,
            rtx=target == "tensorrt-rtx",
            parser_result=checked.status if checked is not None else None,
        )
        found = _without_false_conflicts(opened, found)
        placed = QuantizedGraph(opened.model.graph)
        seen = _typed_findings(opened, placed, found.findings, target, checked)
        findings = sort_findings([*seen, *_placement_findings(placed, target)])
        reduced = None
        if place is not None:
            suspects = {item.location for item in seen if item.location and "tensorrt" in item.code}
            reduced = _reduce(opened, reducers, place, target, found.shapes, built_for, suspects)
        return _make_report(opened, target, found, findings, checked, reduced)


def _without_false_conflicts(opened: OpenedModel, found: LintResult) -> LintResult:
    """Without the conflicts that ONNX's inference alone has: plain ONNX Runtime runs the model at these shapes."""
    kept = tuple(item for item in found.findings if item.code != "shape-conflict")
    if len(kept) == len(found.findings):
        return found
    from trt_engine.backends.onnxruntime.host_session import reference_session
    from trt_engine.equivalence.random_inputs import runnable_signature

    path = opened.model.path
    try:
        signature = runnable_signature(path, opened.model.signature, found.shapes)
        with contextlib.closing(reference_session(path, signature)) as session:
            session.run(random_feeds(signature, found.shapes))
    except TrtEngineError as error:
        log.debug("plain ONNX Runtime does not run it either: %s", error.message)
        return found
    return replace(found, findings=kept)


def _make_report(
    opened: OpenedModel, target: LintTarget, found: LintResult, findings: tuple[Finding, ...],
    checked: ParserReport | None, reduced: ReducedModel | None,
) -> LintReport:  # fmt: skip
    model, counts = opened.model, Counter(item.severity for item in findings)
    return LintReport(
        path=str(model.path),
        name=model.name,
        digest=model.digest,
        target=target,
        tensorrt=found.tensorrt,
        onnxruntime=distribution_version("onnxruntime") or distribution_version("onnxruntime-gpu"),
        opset=model.opsets.get(""),
        ir_version=model.ir_version,
        nodes=len(model.graph.nodes),
        shapes=found.shapes,
        shapes_assumed=found.assumed_shapes,
        findings=findings,
        counts={severity: counts[severity] for severity in ("error", "warning", "info")},
        operators=found.operators,
        checked_by=checked.name if checked is not None else "static tables",
        subgraphs=checked.subgraphs if checked is not None else (),
        reduced=reduced,
    )


def _typed_findings(
    opened: OpenedModel, placed: QuantizedGraph, found: Sequence[Finding], target: LintTarget,
    checked: ParserReport | None,
) -> list[Finding]:  # fmt: skip
    """The rules' findings with those of strong typing and of the parser, each fact once."""
    seen, typed = list(found), list[Finding]()
    if target == "all" and targets_other_library(placed.report()):  # one finding covers what TensorRT does not support
        seen = [item for item in seen if not (item.code in _DTYPE_RULES and item.location in placed.pairs)]
    elif not target.startswith("onnxruntime"):
        typed = typing_findings(opened.model.proto, opened.model.path, {item.code for item in seen})
    if checked is not None:
        proved = {walk.label(gap.node) for gap in checked.status.rejected}
        typed = [item for item in typed if item.code != "types-differ" or item.location not in proved]
        seen += checked.findings
    return [*seen, *typed]


_DTYPE_RULES = ("limited-in-tensorrt", "type-not-in-tensorrt")


def _find_libraries(target: LintTarget, tensorrt: str | None, support_from: LintSupportSource) -> tuple[Library, ...]:
    """The libraries whose parsers may check the model; `SetupError` if one is required and none is installed."""
    if support_from == "parser" and not target.startswith("tensorrt"):
        raise UsageError(
            f"`--support-from parser` is for TensorRT, not for `--target {target}`", hint="`--target tensorrt-rtx`"
        )
    found = libraries_for(target, tensorrt) if support_from != "static" else ()
    if support_from == "parser" and not found:
        release = f" of TensorRT {tensorrt}" if tensorrt is not None else ""
        raise SetupError(
            f"no ONNX parser for `--target {target}`{release} is installed",
            hint=f"{_INSTALL}, or `--support-from static`",
        )
    return found


_INSTALL = "`pip install 'trt-engine[rtx]'` (x86-64 Linux, no GPU needed)"


def _run_checker(
    opened: OpenedModel, libraries: Sequence[Library], target: LintTarget, support_from: LintSupportSource,
    shapes: Mapping[str, Shape],
) -> tuple[Library | None, ParserReport | None]:  # fmt: skip
    """The first library that can check on this machine, and its report."""
    for library in libraries:
        checked = check_with_parser(opened, library, target, shapes)
        if not isinstance(checked, str):
            return library, checked
        log.warning("the parser of %s cannot check the model here: %s", library, checked)
        if support_from == "parser" and library == libraries[-1]:
            raise SetupError(
                f"the parser cannot check the model here: {checked}",
                hint="`trt-engine doctor`, or `--support-from static`",
            )
    return None, None


def _reducing_libraries(target: LintTarget) -> tuple[Library, ...]:
    """The libraries that may reject parts of the model."""
    if target.startswith("onnxruntime"):
        raise UsageError(f"`--reduce` uses TensorRT's parser, not `{target}`", hint="`--target tensorrt-rtx`")
    found = libraries_for(target if target != "all" else "tensorrt", None)
    if not found:
        raise SetupError("`--reduce` needs a real ONNX parser, and none is installed for this target", hint=_INSTALL)
    return found


def _reduce(
    opened: OpenedModel, libraries: Sequence[Library], place: Path, target: LintTarget, shapes: Mapping[str, Shape],
    gpus: tuple[str, ...], suspects: Collection[str],
) -> ReducedModel:  # fmt: skip
    """The smallest rejected part, by the first library that can check on this machine."""
    *others, last = libraries

    def by(library: Library) -> ReducedModel:
        stands_in = target != "tensorrt-rtx" and library == "tensorrt-rtx"
        return reduce_model(
            opened, library, place, shapes=shapes, gpus=gpus, gpu_substitutes=stands_in, suspects=suspects
        )

    for library in others:
        with contextlib.suppress(SetupError):
            return by(library)
    return by(last)


def _gpus(gpus: Sequence[str] | str, reducers: Sequence[Library]) -> tuple[str, ...]:
    names = [item for item in gpus.split(",") if item.strip()] if isinstance(gpus, str) else list(gpus)
    if names and tuple(reducers) != ("tensorrt-rtx",):
        raise UsageError(
            "`--gpus` is of `--reduce` with TensorRT-RTX",
            hint="leave it out, or add `--target tensorrt-rtx --reduce OUT.onnx`",
        )
    return rtx_targets(names)


def _placement_findings(graph: QuantizedGraph, target: LintTarget) -> Iterator[Finding]:
    """Quantised layers that the target's kernels do not take; of no target in particular, what each of the usual two would
    not, as a fact where one of all takes them."""
    if not graph or graph.weights_alone:
        return
    if target == "all":
        severity: Literal["info", "warning"] = "info" if graph.report().targets else "warning"
        found = [graph.finding(name, severity) for name in ("tensorrt", "onnxruntime-cpu")]
    else:
        name = "onnxruntime-cpu" if target == "onnxruntime" else target
        found = [graph.finding(name, "error" if target.startswith("tensorrt") else "warning")]
    yield from (item for item in found if item is not None)

"""`lint`: findings worth fixing before a build, and with `--reduce` the smallest part that TensorRT still rejects."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from onnx import ModelProto

from trt_engine.atomic_io import as_path
from trt_engine.backends.tensorrt.parser_check import Library, ParserCheck, ParserProcess, installed_version
from trt_engine.config.parse import parse_shapes
from trt_engine.config.profiles import profile_for
from trt_engine.environment import distribution_version
from trt_engine.errors import Interrupted, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.graph import external_data, walk
from trt_engine.graph.lint import LintResult
from trt_engine.graph.lint import lint_model as lint_graph
from trt_engine.graph.lint_rules.model_view import sort_findings
from trt_engine.graph.load import OpenedModel, open_graph, parse_errors
from trt_engine.graph.quant_placement import QuantizedGraph
from trt_engine.graph.reduce import Reduction, extract_subgraph
from trt_engine.graph.shape_inference import trace
from trt_engine.graph.tensorrt_operators import RTX_ABSENT, RTX_RELEASE
from trt_engine.public_function import public_function
from trt_engine.records.base import Finding
from trt_engine.records.lint import LintReport, ReducedModel
from trt_engine.runtime.feeds import random_feeds
from trt_engine.tensors import Shape, Signature, suggest
from trt_engine.trt.failure_causes import extract_node
from trt_engine.trt.gpu_targets import rtx_targets
from trt_engine.trt.parser_messages import ParserError, failed_operator, format_parser_error, parser_error_reason
from trt_engine.verbs.given_model import AnyModel, takes_model
from trt_engine.verbs.inspect.run import targets_other_library, typing_findings
from trt_engine.verbs.lint.parser import ParserReport, PartWriter, check_with_parser, find_rejected_node, libraries_for
from trt_engine.vision.spec import declared_shapes
from trt_engine.workers.process import extend_shutdown

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


_MAX_PARSED, _MAX_BUILT, _MAX_HUNG = 400, 150, 20
"""Most parts that are parsed, that are built, and that are tried where the library gives no answer in time."""
_WRITE_S = 30.0


@dataclass(frozen=True, slots=True)
class _TargetFailure:
    """The failure that parts must reproduce."""

    rejected_by: str
    reason: str
    key: tuple[str, ...]
    named_nodes: tuple[int, ...]
    """Indices of the nodes it names."""
    builds: bool
    max_candidates: int
    at_shapes: bool = False
    """It occurs at the given sizes alone."""


def check_output(out: Path, opened: OpenedModel, *, overwrite: bool) -> Path:
    """Output path of the part; `UsageError` for a folder, the model, its weights, or a file not to be overwritten."""
    try:
        target = external_data.check_target(out, opened.model)
    except UsageError as error:
        raise UsageError(error.message, hint="name a new file: `--reduce reduced.onnx`") from error
    if target.exists() and target.resolve() == opened.model.path.resolve():
        raise UsageError(f"`{out}` is the model itself", hint="name another file for `--reduce`")
    if target.exists() and not overwrite:
        raise UsageError(f"`{out}` exists", hint="`--overwrite` overwrites it, or name another file for `--reduce`")
    return target


def reduce_model(
    opened: OpenedModel,
    library: Library,
    target: Path,
    *,
    shapes: Mapping[str, Shape],
    gpus: tuple[str, ...],
    gpu_substitutes: bool,
    suspects: Collection[str] = (),
) -> ReducedModel:
    """Write the smallest part of the model that the library rejects for the same reason as the full model.

    The parser comes first; where it takes the model, the builder, for `gpus` and at the sizes of `shapes`. With
    `stands_in` what TensorRT-RTX alone lacks is not looked for; nodes labelled as `suspects` are tried first. Raises
    `UsageError` where nothing is refused, `SetupError` where the library does not work here, `Interrupted` after Ctrl-C:
    the smallest part found until then is written.
    """
    with ParserProcess(library) as process, PartWriter(opened) as parts:
        proto = parts.prepare()
        wanted = _find_failure(opened, process, parts, shapes, gpus, gpu_substitutes)

        def refused(part: ModelProto) -> bool:
            path = parts.write(part)
            if wanted.builds:
                return wanted.key in _build_keys(process.build(path, gpus, weights_beside=parts.beside))
            return wanted.key in _parse_keys(process.check(path, weights_beside=parts.beside), process)

        search = Reduction(
            proto,
            refused,
            shapes=shapes if wanted.builds or wanted.at_shapes else None,
            max_candidates=wanted.max_candidates,
        )
        try:
            nodes = proto.graph.node
            best = search.run(
                wanted.named_nodes or [at for at, node in enumerate(nodes) if walk.label(node) in suspects]
            )
        except KeyboardInterrupt:
            raise _save_interrupted(search, parts, opened, target) from None
        if best is None:
            raise ModelError(
                f"{wanted.rejected_by} refuses `{opened.model.path}`, but no part of it: {wanted.reason}",
                hint="the reason is in what surrounds the nodes: inputs, outputs, the file itself",
            )
        _save_part(best, parts, opened, target)
        return ReducedModel(
            str(target), search.nodes, search.of, tuple(dict.fromkeys(node.op_type for node in walk.all_nodes(best))),
            wanted.rejected_by, wanted.reason, search.probes, search.complete,
        )  # fmt: skip


def _save_part(best: ModelProto, parts: PartWriter, opened: OpenedModel, target: Path) -> None:
    external_data.save_model(parts.with_weights(best), target, opened.model, external=False, check=lambda _: None)


def _save_interrupted(search: Reduction, parts: PartWriter, opened: OpenedModel, target: Path) -> Interrupted:
    if search.best is None or search.nodes >= search.of:
        return Interrupted("interrupted before a smaller part was found: nothing was written")
    extend_shutdown(_WRITE_S)
    _save_part(search.best, parts, opened, target)
    return Interrupted(
        f"interrupted: `{target}` is the smallest part found until then, {search.nodes} of {search.of} nodes",
        hint=f"the same command on `{target}` goes on from there",
    )


# ------------------------------------------------------------------------------------------------ the refusal


def _find_failure(
    opened: OpenedModel,
    process: ParserProcess,
    parts: PartWriter,
    shapes: Mapping[str, Shape],
    gpus: tuple[str, ...],
    stands_in: bool,
) -> _TargetFailure:
    path, product = opened.model.path, process.binding.product
    checked = process.check(path)
    if checked.unavailable:
        raise SetupError(f"{product} cannot parse here: {checked.unavailable}", hint="`trt-engine doctor`")
    name = f"{process.library} {checked.version or installed_version(process.library)}"
    if checked.exit_status:
        most = _MAX_HUNG if checked.exit_status.startswith("no ") else _MAX_PARSED
        return _TargetFailure(
            f"{name} parser", _exit_text(checked.exit_status), ("ended", checked.exit_status), (), False, most
        )
    looked_for = [
        item for item in checked.errors if not (stands_in and failed_operator(item) in RTX_ABSENT)
    ]  # fmt: skip
    if looked_for:
        first = looked_for[0]
        named = _named_nodes(first, parts.proto)
        reason = format_parser_error(first, product)
        return _TargetFailure(f"{name} parser", reason, _failure_key(first, product), named, False, _MAX_PARSED)
    if not checked.parsed:
        raise UsageError(
            f"{product} refuses in `{path}` only operators that TensorRT has: there is nothing to reduce",
            hint="`--target tensorrt-rtx` reduces that",
        )
    return _build_failure(opened, process, parts, shapes, gpus, name)


def _build_failure(
    opened: OpenedModel,
    process: ParserProcess,
    parts: PartWriter,
    shapes: Mapping[str, Shape],
    gpus: tuple[str, ...],
    name: str,
) -> _TargetFailure:
    proto = parts.proto
    fixed = extract_subgraph(proto, range(len(proto.graph.node)), trace(proto, shapes).tensors, shapes=shapes)
    where = f" for {', '.join(gpus)}" if gpus else ""
    built = process.build(parts.write(fixed), gpus, weights_beside=parts.beside) if fixed is not None else None
    if built is not None and built.errors:
        first = built.errors[0]
        key, reason = _failure_key(first, process.binding.product), format_parser_error(first, process.binding.product)
        return _TargetFailure(f"{name} parser", reason, key, _named_nodes(first, proto), False, _MAX_PARSED, True)
    if built is None or built.built or not (built.exit_status or built.parsed):
        raise UsageError(
            f"nothing to reduce: the parser of {name} takes `{opened.model.path}`, and its builder builds it{where}",
            hint="`--gpus` names other GPUs, `--shapes` other sizes",
        )
    text = _exit_text(built.exit_status) if built.exit_status else built.message
    most = _MAX_HUNG if built.exit_status.startswith("no ") else _MAX_BUILT
    layer = extract_node(text)
    named = tuple(at for at, node in enumerate(proto.graph.node) if layer and walk.label(node) == layer)
    return _TargetFailure(f"{name} builder{where}", text, next(iter(_build_keys(built))), named, True, most)


def _named_nodes(refusal: ParserError, proto: ModelProto) -> tuple[int, ...]:
    if refusal.function == "importInput":
        return tuple(at for at, node in enumerate(proto.graph.node) if refusal.file in walk.names_read(node))[:1]
    place = find_rejected_node(refusal, proto)
    return (place,) if place is not None else ()


def _exit_text(ended: str) -> str:
    return ended if ended.startswith("no ") else f"it crashes ({ended})"


def _parse_keys(checked: ParserCheck, process: ParserProcess) -> set[tuple[str, ...]]:
    if checked.exit_status:
        return {("ended", checked.exit_status)}
    return {_failure_key(item, process.binding.product) for item in checked.errors}


def _build_keys(checked: ParserCheck) -> set[tuple[str, ...]]:
    if checked.exit_status:
        return {("ended", checked.exit_status)}
    return {("build", checked.cause, _normalize_message(checked.message))} if checked.built is False else set()


def _failure_key(refusal: ParserError, product: str) -> tuple[str, ...]:
    """The part of a rejection that is equal in the full graph and in a part: without indices and sizes."""
    reason = parser_error_reason(refusal, product).partition("; ")[0]
    edge = refusal.file if refusal.function == "importInput" else ""
    return refusal.code, refusal.function, failed_operator(refusal), edge, _normalize_message(reason)


_CHANGING: Iterable[tuple[str, str]] = (
    (r"\{ForeignNode\[[^\]]*\]\}", "a region"),
    (r"0x[0-9a-f]+|\d+", "#"),
    (r"\s+", " "),
)


def _normalize_message(text: str) -> str:
    """The first line without numbers and names of regions, which a smaller graph changes."""
    line = text.strip().partition("\n")[0]
    for pattern, word in _CHANGING:
        line = re.sub(pattern, word, line)
    return line[:200]

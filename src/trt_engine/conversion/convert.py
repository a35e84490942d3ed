"""`convert`: any source to a verified, simplified and linted ONNX file."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trt_engine import atomic_io
from trt_engine.config.convert import EXPORTERS, ConvertConfig
from trt_engine.config.parse import parse_options
from trt_engine.conversion import reference_runs
from trt_engine.conversion.axes import Axes, parse_dynamic, symbols_of
from trt_engine.conversion.examples import Example, parse_inputs, split_fixed
from trt_engine.conversion.exported import Exported
from trt_engine.conversion.simplify import clean_export, name_outputs, strip_stack_traces
from trt_engine.conversion.sources import Source, detect_source
from trt_engine.conversion.tensorflow import tensorflow_source
from trt_engine.conversion.verify_export import TOLERANCE, ExportVerification, check_deterministic, verify
from trt_engine.environment import Environment
from trt_engine.errors import AccuracyError, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.graph import external_data as external_data_module
from trt_engine.graph import walk
from trt_engine.graph.lint import lint_model
from trt_engine.graph.load import open_graph, open_model, read_proto
from trt_engine.graph.tensorrt_operators import tensorrt_opsets, tensorrt_version
from trt_engine.model import Model
from trt_engine.records.convert import ConvertReport, DynamicAxis, ExportAttempt
from trt_engine.tensors import Shape, suggest

log = logging.getLogger(__name__)

_OPSET = 20
"""Supported by ONNX Runtime, TensorRT 10 and 11, and both PyTorch exporters."""
_TORCH = ("torch-module", "torchscript", "exported-program", "state-dict", "huggingface", "timm")
_TENSORFLOW = ("saved-model", "frozen-graph", "keras", "tflite")
_REQUIREMENTS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(
        ("torch-module", "torchscript", "exported-program", "state-dict"), (("torch", "onnxscript"), "torch")
    ),
    "huggingface": (("torch", "onnxscript", "transformers"), "hub"),
    "timm": (("torch", "onnxscript", "timm"), "hub"),
}


@dataclass(frozen=True)
class _ConvertRequest:
    """The parsed request."""

    source: Source
    config: ConvertConfig
    out: Path
    inputs: list[Example]
    fixed: dict[str, Any]
    """Arguments that are not tensors."""
    dynamic: Axes | None
    opset: int
    exporters: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class _VerifiedExport:
    """An export that matches its source, in the staging folder."""

    exported: Exported
    references: reference_runs.ReferenceRuns
    verification: ExportVerification | None
    attempts: tuple[ExportAttempt, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    batch_dependent: tuple[str, ...] = ()
    """Outputs whose rows depend on other rows of the batch."""


@atomic_io.all_or_nothing()
def convert(source: Path | str, config: ConvertConfig, *, dry_run: bool = False) -> ConvertReport:
    """Convert any source to ONNX; `te.convert` has the details."""
    started = time.monotonic()
    found = detect_source(source, trust_source=config.trust_source)
    _reject_engine(found)
    asked = _parse_request(found, config, dry_run=dry_run)
    log.info("`%s` is a %s source: %s", found.text, found.kind, found.evidence)
    if dry_run:
        return _plan_report(asked, started)
    _check_dependencies(found)
    with atomic_io.staging_folder(asked.out) as staging:
        staging = staging.absolute()
        made = _convert_source(asked, staging)
        try:
            return _finish(asked, made, staging, started)
        finally:
            made.exported.close()


# ------------------------------------------------------------------------------------------------ request


def _reject_engine(source: Source) -> None:
    if source.kind == "tensorrt-plan":
        raise ModelError(
            f"`{source.text}` is a compiled engine ({source.evidence}), from which no network can be recovered",
            hint=f"convert what it was built from; `trt-engine inspect {source.text}` shows what that was",
        )


def _parse_request(source: Source, config: ConvertConfig, *, dry_run: bool) -> _ConvertRequest:
    exporters = config.exporter
    if isinstance(exporters, str):
        exporters = EXPORTERS if exporters == "auto" else (exporters,)
    for name in exporters:
        if name not in EXPORTERS:
            raise UsageError(f"unknown exporter `{name}`", hint=suggest(name, EXPORTERS))
    if not exporters:
        raise UsageError("no exporter is named", hint="`--exporter dynamo`")
    if config.factory is not None and source.kind != "state-dict":
        raise UsageError(
            f"`--factory` is for a state dict, and `{source.text}` is a {source.kind} source", hint="leave it out"
        )
    if config.python is not None and source.kind not in _TENSORFLOW:
        raise UsageError(
            f"`--python` is for TensorFlow sources, and `{source.text}` is a {source.kind}", hint="leave it out"
        )
    goal = config.out or _default_output(source)
    if not dry_run:
        _check_target(goal, source, overwrite=config.overwrite)
    given = config.options or {}
    examples, fixed = split_fixed(config.inputs)
    if fixed and source.kind not in ("torch-module", "torchscript", "state-dict", "huggingface", "timm"):
        name, value = next(iter(fixed.items()))
        raise UsageError(
            f"`{name}={value}` is an argument of a PyTorch module, and `{source.text}` is a {source.kind}",
            hint=f"a tensor of one number is `--input {name}:scalar:int64@{value}..{value}`"
            if source.kind != "exported-program"
            else "such arguments are part of the program",
        )
    newest = _OPSET if config.target == "onnxruntime" else min(_OPSET, tensorrt_opsets(tensorrt_version())[1])
    return _ConvertRequest(
        source=source,
        config=config,
        out=goal,
        inputs=parse_inputs(examples),
        fixed=fixed,
        dynamic=None if config.dynamic is None else parse_dynamic(config.dynamic),
        opset=newest if config.opset is None else config.opset,
        exporters=tuple(exporters),
        options=dict(given) if isinstance(given, Mapping) else parse_options(given),
    )


def _default_output(source: Source) -> Path:
    stem = source.path.stem if source.path is not None else str(source.name).rsplit("/", 1)[-1]
    return Path(f"{stem}.onnx")


def _check_target(out: Path, source: Source, *, overwrite: bool) -> None:
    if out.is_dir():
        raise UsageError(f"`{out}` is a folder, expected a file", hint=f"`-o {out / 'model.onnx'}`")
    if source.path is not None and out.exists() and out.resolve() == source.path.resolve():
        raise UsageError(f"`{out}` is the source itself", hint="name another `-o`")
    if out.exists() and not overwrite:
        raise UsageError(f"`{out}` exists", hint="`--overwrite` overwrites it, or name another `-o`")


def _check_dependencies(source: Source) -> None:
    """`SetupError` naming the extra for a missing library; libraries are located, not imported."""
    modules, extra = _REQUIREMENTS.get(source.kind, ((), ""))
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        what = {"torch": "PyTorch"}.get(lacking[0], lacking[0])
        raise SetupError(
            f"`{source.text}` is a {source.kind} source, and {what} is not installed",
            hint=f"`pip install 'trt-engine[{extra}]'`",
        )


# ------------------------------------------------------------------------------------------------ exporting


def _convert_source(request: _ConvertRequest, staging: Path) -> _VerifiedExport:
    if request.source.kind == "onnx":
        return _from_onnx(request)
    if request.source.kind in _TENSORFLOW:
        return _from_tensorflow(request, staging)
    return _from_torch(request, staging)


def _from_torch(request: _ConvertRequest, staging: Path) -> _VerifiedExport:
    from trt_engine.conversion.torch import bound_module, torch_export, torch_loading
    from trt_engine.conversion.torch.loaded_module import fix_arguments

    source = request.source
    loaded = torch_loading.load_torch(
        source, factory=request.config.factory, options=request.options, offline=request.config.offline,
        cache=request.config.cache, trust_source=request.config.trust_source,
    )  # fmt: skip
    if request.fixed:
        loaded = fix_arguments(loaded, request.fixed)
    call = bound_module.bind_inputs(
        loaded, request.inputs, request.dynamic, text=source.text, all_outputs=request.config.all_outputs
    )
    attempts: list[ExportAttempt] = []
    refused: list[TrtEngineError] = []
    given: reference_runs.ReferenceRuns | None = None
    mixed: tuple[str, ...] = ()
    warnings: list[str] = []
    for name in request.exporters:
        log.info("exporting with the %s exporter", name)
        started = time.monotonic()
        try:
            if name == "torchscript" and (reads := torch_export.frozen_values(call)):  # a trace records one branch
                if not request.config.allow_frozen_branches:
                    raise torch_export.ExportFailed("; ".join(map(str, reads[:_MAX_SHOWN_READS])), reads[0])
                warnings += [str(read).replace("would keep", "keeps") for read in reads]
            exported = torch_export.export_torch(call, name, request.opset, staging)
        except torch_export.ExportFailed as error:
            attempts.append(ExportAttempt(name, time.monotonic() - started, str(error)))
            log.info("the %s exporter failed: %s", name, error)
            if error.read is not None:
                refused.append(AccuracyError(str(error), hint=_hint_for_values(request)))
            continue
        seconds = time.monotonic() - started
        clean_export(exported.path, exported.symbols, exported.roots, modules=exported.modules)
        check_deterministic(exported.path)
        if given is None:
            given = reference_runs.run_references(exported)
            mixed = _check_batch_mixing(exported, given)
        log.info("comparing with the source at %d sets of shapes", len(given))
        try:
            agreement = verify(exported.path, exported, given, request.config.tolerance, what=f"the {name} export")
        except (AccuracyError, ModelError) as error:  # wrong, or invalid ONNX: another exporter may do better
            refused.append(error)
            attempts.append(ExportAttempt(name, seconds, error.message))
            log.info("the %s export was rejected: %s", name, error.message)
            continue
        return _VerifiedExport(
            exported, given, agreement, (*attempts, ExportAttempt(name, seconds)), (), tuple(warnings), mixed
        )
    raise _no_exporter(source, attempts, refused, bound_module.find_recipe(call))


_MAX_SHOWN_READS = 3


def _hint_for_values(request: _ConvertRequest) -> str:
    both = "`torch.where` (or `torch.cond`) keeps both branches"
    if "torchscript" not in request.exporters:
        return both
    return f"{both}; `--allow-frozen-branches` keeps what the example decides, with a warning"


def _no_exporter(
    source: Source, attempts: list[ExportAttempt], refused: list[TrtEngineError], recipe: str | None
) -> TrtEngineError:
    """Error if every exporter failed: the first accuracy error, which names what froze, else all reasons."""
    others = [f"{item.exporter}: {item.reason}" for item in attempts]
    if refused:
        first = refused[0]
        rest = [text for text in others if first.message not in text]
        tail = f" (also tried: {'; '.join(rest)})" if rest else ""
        hint = first.hint if recipe is None else f"`{recipe}` converts this architecture; else {first.hint}"
        return type(first)(first.message + tail, hint=hint)
    hint = "`-vv` shows the exporter's own messages"
    if source.kind == "exported-program":
        hint = "convert the module itself (`file.py:factory`), or export it again with plain `torch.export.Dim`s"
    elif any("grouped_mm" in reason for reason in others):
        hint = (
            "ONNX has no grouped matrix product: give the mixture of experts of transformers "
            '`experts_implementation="batched_mm"` (of `from_pretrained` and of the configuration)'
        )
    return ModelError(f"no exporter takes `{source.text}`: {'; '.join(others)}", hint=hint)


def _from_tensorflow(request: _ConvertRequest, staging: Path) -> _VerifiedExport:

    log.info("reading the source and exporting with tf2onnx in a separate process")
    started = time.monotonic()
    exported = tensorflow_source.export_tensorflow(
        request.source,
        request.inputs,
        request.dynamic,
        request.opset,
        staging,
        options=request.options,
        python=request.config.python,
        trust_source=request.config.trust_source,
    )
    seconds = time.monotonic() - started
    try:
        check_deterministic(exported.path)
        given = reference_runs.run_references(exported)
        mixed = _check_batch_mixing(exported, given)
        log.info("comparing with the source at %d sets of shapes", len(given))
        agreement = verify(exported.path, exported, given, request.config.tolerance, what="the tf2onnx export")
    except BaseException:
        exported.close()
        raise
    return _VerifiedExport(
        exported, given, agreement, (ExportAttempt(exported.exporter, seconds),), batch_dependent=mixed
    )


def _check_batch_mixing(exported: Exported, given: reference_runs.ReferenceRuns) -> tuple[str, ...]:
    """Outputs whose rows depend on each other; `ModelError` if batch statistics cause it."""
    mixed = reference_runs.batch_dependent_outputs(exported, given)
    if mixed and exported.batch_statistics is not None:
        raise ModelError(
            f"the source has a BatchNormalization in training mode at {exported.batch_statistics}: row 0 of "
            f"`{mixed[0]}` changes with the other rows of its batch",
            hint="export what inference needs alone: `training=self.training` for functional batch_norm",
        )
    return mixed


def _from_onnx(request: _ConvertRequest) -> _VerifiedExport:
    """An ONNX file is its own reference; only simplification and opset change remain."""
    if request.options:
        raise UsageError("`-O` is for what a factory or a name makes, and the source is ONNX", hint="leave it out")
    if request.dynamic is not None:
        option, does = ("--dynamic", "opens axes") if request.dynamic else ("--static", "closes axes")
        raise UsageError(
            f"`{option}` {does} while a source is exported, and this one is ONNX already",
            hint=f"export it again from its source with `{option}`",
        )
    from trt_engine.conversion.onnx_source import wrap_onnx_model

    assert request.source.path is not None
    exported, why = wrap_onnx_model(request.source.path, request.inputs)
    given: reference_runs.ReferenceRuns = []
    agreement = None
    if why is None:
        given = reference_runs.run_references(exported)
        agreement = verify(exported.path, exported, given, request.config.tolerance, what="the model")
    notes = () if why is None else (f"not compared: {why}",)
    return _VerifiedExport(exported, given, agreement, (ExportAttempt("onnx", 0.0),), notes)


# ------------------------------------------------------------------------------------------------ finishing


def _finish(request: _ConvertRequest, export: _VerifiedExport, staging: Path, started: float) -> ConvertReport:
    """Simplify, change the opset, compare the written file again, and publish it."""
    notes = [*export.exported.notes, *export.notes]
    path = export.exported.path
    raw = read_proto(path)
    before = sum(1 for _ in walk.nodes(raw))
    gone: dict[str, int] = {}
    if request.config.simplify:
        path, gone = _simplify(path, export, staging, notes)
    have = walk.opsets_of(read_proto(path)).get("", 1)
    wanted = have if request.source.kind == "onnx" and request.config.opset is None else request.opset
    if have != wanted:
        path = _change_opset(path, export, staging, wanted, notes)
    proto = read_proto(path)
    strip_stack_traces(proto)
    if export.verification is not None:
        notes += export.verification.notes
        notes += name_outputs(proto, export.verification.symbols, export.verification.sizes)
    final: ExportVerification | None = None

    def prove(draft: Path) -> None:
        nonlocal final
        if export.verification is not None:
            final = verify(
                draft, export.exported, export.references, request.config.tolerance, what="the simplified graph"
            )
            notes.extend(final.notes)

    target = atomic_io.resolve_link(request.out)
    nbytes, beside = external_data_module.save_model(
        proto, target, open_model(path), external=request.config.external_data, check=prove
    )
    model = open_model(request.out)
    fallbacks = (f"the {item.exporter} exporter failed: {item.reason}" for item in export.attempts if item.reason)
    warnings = [*fallbacks, *export.warnings, *_limits(export)]
    known = _shapes_of(export)
    shapes = {spec.name: known[spec.name] for spec in model.signature.inputs if spec.name in known}
    findings = lint_model(open_graph(model.path), shapes=shapes or None, target=request.config.target).findings
    warnings += [item.full_message for item in findings if item.severity == "error" or item.code == "batch-lost"]
    return replace(
        _report(request, export, model, final, started),
        nodes_before=before,
        operators_removed=gone,
        nbytes=nbytes,
        artifacts={"model": str(request.out)} | ({"weights": str(beside)} if beside is not None else {}),
        findings=findings,
        notes=tuple(dict.fromkeys(notes)),
        warnings=tuple(warnings),
    )


def _simplify(path: Path, export: _VerifiedExport, staging: Path, notes: list[str]) -> tuple[Path, dict[str, int]]:
    from trt_engine.conversion.simplify import simplify

    log.info("simplifying")
    goal = staging / "simplified" / path.name
    goal.parent.mkdir(exist_ok=True)
    found = simplify(path, goal, inputs=_shapes_of(export))
    notes += found.notes
    return goal, found.operators_removed


def _shapes_of(export: _VerifiedExport) -> dict[str, Shape]:
    return {name: array.shape for name, array in export.exported.example.items()}


def _change_opset(path: Path, export: _VerifiedExport, staging: Path, opset: int, notes: list[str]) -> Path:
    from trt_engine.conversion.change_opset import change_opset

    log.info("moving to opset %d", opset)
    goal = staging / "opset" / path.name
    goal.parent.mkdir(exist_ok=True)
    have = walk.opsets_of(read_proto(path)).get("", 1)
    change_opset(path, goal, opset, inputs=_shapes_of(export))
    notes.append(f"the exporter wrote opset {have}; moved to {opset}")
    return goal


def _limits(export: _VerifiedExport) -> list[str]:
    """Warnings for sizes at which the source itself fails, and for outputs that depend on the batch."""
    said = []
    for symbol, size, why in dict.fromkeys(item for answer in export.references for item in answer.failed):
        least = reference_runs.compared_sizes(export.references, symbol)[0]
        rest = (
            f"the smallest size that was compared is {least}"
            if size < least
            else f"compared at {', '.join(map(str, reference_runs.compared_sizes(export.references, symbol)))}"
        )
        said.append(f"the source does not run at {symbol} {size}: {why}; {rest}")
    batch = next((positions[0] for positions in export.exported.symbols.values() if 0 in positions), None)
    symbols = export.verification.symbols if export.verification is not None else {}
    mixed = [
        name for name in export.batch_dependent if batch not in [s for at, s in symbols.get(name, {}).items() if at]
    ]
    if mixed:
        names = ", ".join(f"`{name}`" for name in mixed)
        said.append(
            f"row 0 of {names} changes with the other rows of its batch: requests that share one are not independent"
        )
    return said


def _report(
    request: _ConvertRequest, made: _VerifiedExport, model: Model, final: ExportVerification | None, started: float
) -> ConvertReport:
    """The report without what `_finish` counted and noted on the way."""
    operators = Counter(place.node.op_type for place in walk.nodes(model.proto))
    return replace(
        _plan_report(request, started),
        out=str(request.out),
        exporter=made.exported.exporter,
        attempts=made.attempts,
        opset=model.opsets.get(""),
        ir_version=model.ir_version,
        signature=model.signature,
        dynamic=_dynamic_axes(reference_runs.axes_of(made.exported), made.references),
        verification=final.shapes if final is not None else (),
        max_rel=final.max_error if final is not None else None,
        nodes=operators.total(),
        operators=dict(operators.most_common()),
        digest=model.digest,
        versions=made.exported.versions,
        export_s=made.attempts[-1].seconds,
        environment=Environment.detect(),
        dry_run=False,
    )


def _dynamic_axes(axes: Axes, given: reference_runs.ReferenceRuns) -> tuple[DynamicAxis, ...]:
    return tuple(
        DynamicAxis(
            symbol,
            {
                name: tuple(at for at, axis in positions.items() if axis.symbol == symbol)
                for name, positions in axes.items()
                if any(axis.symbol == symbol for axis in positions.values())
            },
            _lower_bound(symbol, limits.low, given),
            limits.high,
            limits.step,
            reference_runs.compared_sizes(given, symbol) if given else (),
        )
        for symbol, limits in symbols_of(axes).items()
    )


def _lower_bound(symbol: str, low: int, given: reference_runs.ReferenceRuns) -> int:
    """Lower end of the range, or the smallest compared size if the source fails at that end."""
    failed = {size for answer in given for name, size, _ in answer.failed if name == symbol}
    return reference_runs.compared_sizes(given, symbol)[0] if low in failed else low


def _plan_report(request: _ConvertRequest, started: float) -> ConvertReport:
    return ConvertReport(
        source=request.source.text,
        kind=request.source.kind,
        detected_by=request.source.evidence,
        out=None,
        exporter=request.exporters[0] if request.source.kind in _TORCH else None,
        attempts=(),
        opset=request.opset,
        ir_version=None,
        signature=None,
        dynamic=_dynamic_axes(request.dynamic or {}, []),
        verification=(),
        max_rel=None,
        tolerance=request.config.tolerance if request.config.tolerance is not None else TOLERANCE,
        nodes_before=None,
        nodes=None,
        operators={},
        operators_removed={},
        nbytes=None,
        digest=None,
        findings=(),
        notes=(f"would write `{request.out}`",),
        versions={},
        export_s=None,
        seconds=time.monotonic() - started,
        environment=None,
        dry_run=True,
        trust_source=request.config.trust_source,
        embedded_code=request.source.code,
    )

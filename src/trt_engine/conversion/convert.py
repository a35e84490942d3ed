"""`convert` whole: any source to an ONNX file that was compared with it, simplified, and looked through."""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trt_engine import files
from trt_engine.conversion import outside
from trt_engine.conversion.agreement import TOLERANCE, Agreement, agree, must_be_deterministic
from trt_engine.conversion.axes import Axes, parse_dynamic, symbols_of
from trt_engine.conversion.examples import Example, parse_inputs
from trt_engine.conversion.exporting import Exported
from trt_engine.conversion.source_runs import Answers, answers, axes_of, mixes_rows, tried_sizes
from trt_engine.conversion.sources import Source, detect
from trt_engine.conversion.tidy import name_outputs, tidy, without_traces
from trt_engine.environment import Environment
from trt_engine.errors import AccuracyError, ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.coverage import tensorrt_opsets, tensorrt_version
from trt_engine.graph.lint import lint
from trt_engine.graph.load import open_model, read_proto
from trt_engine.model import Model
from trt_engine.records import ConvertReport, DynamicAxis, ExportAttempt, Finding
from trt_engine.tensors import Shape, closest

__all__ = ["EXPORTERS", "TARGETS", "Target", "convert"]

log = logging.getLogger(__name__)

Target = Literal["all", "tensorrt", "onnxruntime"]
TARGETS: tuple[Target, ...] = get_args(Target)
EXPORTERS = ("dynamo", "torchscript")

_OPSET = 20
"""What ONNX Runtime, TensorRT 10 and 11 and both exporters of PyTorch have in common."""
_LOWEST, _HIGHEST = 9, 26
_TORCH = ("torch-module", "torchscript", "exported-program", "state-dict", "huggingface", "timm")
_TENSORFLOW = ("saved-model", "frozen-graph", "keras", "tflite")
_NEEDS: dict[str, tuple[tuple[str, ...], str]] = {
    **dict.fromkeys(
        ("torch-module", "torchscript", "exported-program", "state-dict"), (("torch", "onnxscript"), "torch")
    ),
    "huggingface": (("torch", "onnxscript", "transformers"), "hub"),
    "timm": (("torch", "onnxscript", "timm"), "hub"),
}


@dataclass(frozen=True)
class _Asked:
    """What was asked for, read once."""

    source: Source
    out: Path
    inputs: list[Example]
    dynamic: Axes | None
    opset: int
    opset_given: bool
    target: Target
    simplify: bool
    exporters: tuple[str, ...]
    options: dict[str, Any]
    factory: str | None
    tolerance: float | None
    offline: bool
    cache: Path | None
    external_data: bool
    python: str | None
    allow_frozen_branches: bool
    all_outputs: bool


@dataclass(frozen=True)
class _Made:
    """An export that agrees with its source, in the staging folder."""

    exported: Exported
    answers: Answers
    agreement: Agreement | None
    attempts: tuple[ExportAttempt, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    mixed: tuple[str, ...] = ()
    """Outputs whose rows depend on the other rows of the batch."""


def convert(
    source: Path | str,
    *,
    out: Path | str | None = None,
    inputs: Any = None,
    dynamic: Any = None,
    opset: int | None = None,
    target: Target = "all",
    simplify: bool = True,
    exporter: str | Sequence[str] = EXPORTERS,
    options: Mapping[str, Any] | None = None,
    factory: str | None = None,
    tolerance: float | None = None,
    offline: bool = False,
    cache: Path | str | None = None,
    external_data: bool = False,
    python: str | None = None,
    allow_frozen_branches: bool = False,
    all_outputs: bool = False,
    yes: bool = False,
    dry_run: bool = False,
) -> ConvertReport:
    """Any source as ONNX at `out`, equal to its source at every shape that was compared.

    `inputs` are examples: `{"images": (2, 3, 640, 640)}`, arrays, `"images:2x3x640x640"`, or .npy and .npz files.
    `dynamic` names the axes that stay open: `{"images": {0: "batch@1..64", 2: "height"}}`, or as `--dynamic` spells it;
    None opens the first axis of every input as `batch`, `{}` none. Factories run in this process. With
    `allow_frozen_branches` a Python `if` on values of tensors keeps the branch of the example, with a warning;
    `all_outputs` keeps outputs that only training needs.

    Raises `AccuracyError` for a graph that is not its source, with what froze and where it entered; `ModelError` for a
    source that fails; `SetupError` naming the extra for a library that is not installed. Nothing is half-written.
    """
    started = time.monotonic()
    found = detect(source)
    _refuse_plan(found)
    asked = _asked(
        found, out, inputs, dynamic, opset, target, simplify, exporter, options, factory, tolerance, offline, cache,
        external_data, python, allow_frozen_branches, all_outputs, yes=yes, dry_run=dry_run,
    )  # fmt: skip
    log.info("`%s` is a %s source: %s", found.text, found.kind, found.seen)
    if dry_run:
        return _plan(asked, started)
    _installed(found)
    with files.staging_folder(asked.out) as staging:
        staging = staging.absolute()
        made = _from_any(asked, staging)
        try:
            return _finished(asked, made, staging, started)
        finally:
            made.exported.close()


# ------------------------------------------------------------------------------------------------ what was asked


def _refuse_plan(source: Source) -> None:
    if source.kind == "tensorrt-plan":
        raise ModelError(
            f"`{source.text}` is a TensorRT plan: a compiled engine, from which no network can be had back",
            hint=f"convert what it was built from; `trt-engine inspect {source.text}` says what that was",
        )


def _asked(
    source: Source, out: Any, inputs: Any, dynamic: Any, opset: int | None, target: Target, simplify: bool, exporter: Any,
    options: Mapping[str, Any] | None, factory: str | None, tolerance: float | None, offline: bool, cache: Any,
    external_data: bool, python: str | None, allow_frozen_branches: bool, all_outputs: bool, *,
    yes: bool, dry_run: bool,
) -> _Asked:  # fmt: skip
    if target not in TARGETS:
        raise UsageError(f"there is no target `{target}`", hint=closest(str(target), TARGETS))
    exporters = (exporter,) if isinstance(exporter, str) else tuple(exporter)
    for name in exporters:
        if name not in EXPORTERS:
            raise UsageError(f"there is no exporter `{name}`", hint=closest(name, EXPORTERS))
    if not exporters:
        raise UsageError("no exporter is named", hint="`--exporter dynamo`")
    if opset is not None and not _LOWEST <= opset <= _HIGHEST:
        raise UsageError(f"the opset {opset} is not within {_LOWEST} to {_HIGHEST}", hint="`--opset 20`")
    if tolerance is not None and not 0 < tolerance < math.inf:
        raise UsageError(f"the tolerance is {tolerance:g}, expected a number above 0", hint="`--tolerance 1e-4`")
    if factory is not None and source.kind != "state-dict":
        raise UsageError(
            f"`--factory` is for a state dict, and `{source.text}` is a {source.kind} source", hint="leave it out"
        )
    if python is not None and source.kind not in _TENSORFLOW:
        raise UsageError(
            f"`--python` is for TensorFlow sources, and `{source.text}` is a {source.kind}", hint="leave it out"
        )
    goal = files.path_of(out, "`out`") if out is not None else _beside(source)
    if not dry_run:
        _refuse_target(goal, source, yes=yes)
    return _Asked(
        source=source,
        out=goal,
        inputs=parse_inputs(inputs),
        dynamic=None if dynamic is None else parse_dynamic(dynamic),
        opset=opset if opset is not None else _opset_for(target),
        opset_given=opset is not None,
        target=target,
        simplify=simplify,
        exporters=exporters,
        options=dict(options or {}),
        factory=factory,
        tolerance=tolerance,
        offline=offline,
        cache=None if cache is None else files.path_of(cache, "`cache`"),
        external_data=external_data,
        python=python,
        allow_frozen_branches=allow_frozen_branches,
        all_outputs=all_outputs,
    )


def _opset_for(target: Target) -> int:
    return _OPSET if target == "onnxruntime" else min(_OPSET, tensorrt_opsets(tensorrt_version())[1])


def _beside(source: Source) -> Path:
    stem = source.path.stem if source.path is not None else str(source.name).rsplit("/", 1)[-1]
    return Path(f"{stem}.onnx")


def _refuse_target(out: Path, source: Source, *, yes: bool) -> None:
    if out.is_dir():
        raise UsageError(f"`{out}` is a folder, expected a file", hint=f"`-o {out / 'model.onnx'}`")
    if source.path is not None and out.exists() and out.resolve() == source.path.resolve():
        raise UsageError(f"`{out}` is the source itself", hint="name another `-o`")
    if out.exists() and not yes:
        raise UsageError(f"`{out}` exists", hint="`--yes` overwrites it, or name another `-o`")


def _installed(source: Source) -> None:
    """`SetupError` naming the extra where a library is not there; libraries are looked for, not imported."""
    modules, extra = _NEEDS.get(source.kind, ((), ""))
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    if lacking:
        what = {"torch": "PyTorch"}.get(lacking[0], lacking[0])
        raise SetupError(
            f"`{source.text}` is a {source.kind} source, and {what} is not installed",
            hint=f"`pip install 'trt-engine[{extra}]'`",
        )


# ------------------------------------------------------------------------------------------------ exporting


def _from_any(asked: _Asked, staging: Path) -> _Made:
    if asked.source.kind == "onnx":
        return _from_onnx(asked)
    if asked.source.kind in _TENSORFLOW:
        return _from_tensorflow(asked, staging)
    return _from_torch(asked, staging)


def _from_torch(asked: _Asked, staging: Path) -> _Made:
    from trt_engine.conversion import torch_export, torch_loading

    source = asked.source
    loaded = torch_loading.load(
        source, factory=asked.factory, options=asked.options, offline=asked.offline, cache=asked.cache
    )
    call = torch_export.bound(loaded, asked.inputs, asked.dynamic, text=source.text, all_outputs=asked.all_outputs)
    attempts: list[ExportAttempt] = []
    refused: list[TrtEngineError] = []
    given: Answers | None = None
    mixed: tuple[str, ...] = ()
    warnings: list[str] = []
    for name in asked.exporters:
        log.info("exporting with the %s exporter", name)
        started = time.monotonic()
        try:
            if name == "torchscript" and (reads := torch_export.frozen_values(call)):  # a trace follows one branch
                if not asked.allow_frozen_branches:
                    raise torch_export.ExportFailed("; ".join(map(str, reads[:_SHOWN_READS])), reads[0])
                warnings += [str(read).replace("would keep", "keeps") for read in reads]
            exported = torch_export.export(call, name, asked.opset, staging)
        except torch_export.ExportFailed as error:
            attempts.append(ExportAttempt(name, time.monotonic() - started, str(error)))
            log.info("the %s exporter failed: %s", name, error)
            if error.read is not None:
                refused.append(AccuracyError(str(error), hint=_hint_for_values(asked)))
            continue
        seconds = time.monotonic() - started
        tidy(exported.path, exported.symbols, exported.roots, modules=exported.modules)
        must_be_deterministic(exported.path)
        if given is None:
            given = answers(exported)
            mixed = _mixed(exported, given)
        log.info("comparing with the source at %d sets of shapes", len(given))
        try:
            agreement = agree(exported.path, exported, given, asked.tolerance, what=f"the {name} export")
        except (AccuracyError, ModelError) as error:  # wrong, or no valid ONNX: another exporter may do better
            refused.append(error)
            attempts.append(ExportAttempt(name, seconds, error.message))
            log.info("the %s export was refused: %s", name, error.message)
            continue
        return _Made(exported, given, agreement, (*attempts, ExportAttempt(name, seconds)), (), tuple(warnings), mixed)
    raise _no_exporter(source, attempts, refused, torch_export.recipe_of(call))


_SHOWN_READS = 3


def _hint_for_values(asked: _Asked) -> str:
    both = "`torch.where` (or `torch.cond`) keeps both branches"
    if "torchscript" not in asked.exporters:
        return both
    return f"{both}; `--allow-frozen-branches` keeps what the example decides, with a warning"


def _no_exporter(
    source: Source, attempts: list[ExportAttempt], refused: list[TrtEngineError], recipe: str | None
) -> TrtEngineError:
    """The error of a source that no exporter took: the first refusal, since it names what froze, else every reason."""
    others = [f"{item.exporter}: {item.reason}" for item in attempts]
    if refused:
        first = refused[0]
        rest = [text for text in others if first.message not in text]
        tail = f" (tried too: {'; '.join(rest)})" if rest else ""
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


def _from_tensorflow(asked: _Asked, staging: Path) -> _Made:
    from trt_engine.conversion import tensorflow

    log.info("reading the source and exporting with tf2onnx, in a process of its own")
    started = time.monotonic()
    exported = tensorflow.export(
        asked.source, asked.inputs, asked.dynamic, asked.opset, staging, options=asked.options, python=asked.python
    )
    seconds = time.monotonic() - started
    try:
        must_be_deterministic(exported.path)
        given = answers(exported)
        mixed = _mixed(exported, given)
        log.info("comparing with the source at %d sets of shapes", len(given))
        agreement = agree(exported.path, exported, given, asked.tolerance, what="the tf2onnx export")
    except BaseException:
        exported.close()
        raise
    return _Made(exported, given, agreement, (ExportAttempt(exported.exporter, seconds),), mixed=mixed)


def _mixed(exported: Exported, given: Answers) -> tuple[str, ...]:
    """The outputs whose rows depend on each other; `ModelError` where that comes from statistics of the batch at hand."""
    mixed = mixes_rows(exported, given)
    if mixed and exported.batch_statistics is not None:
        raise ModelError(
            f"the source has a BatchNormalization in training mode at {exported.batch_statistics}: row 0 of "
            f"`{mixed[0]}` changes with the other rows of its batch",
            hint="export what inference needs alone: `training=self.training` for functional batch_norm",
        )
    return mixed


def _from_onnx(asked: _Asked) -> _Made:
    """An ONNX file is its own reference: what is left is to simplify it and to move its opset."""
    if asked.options:
        raise UsageError("`-O` is for what a factory or a name makes, and the source is ONNX", hint="leave it out")
    if asked.dynamic is not None:
        option, does = ("--dynamic", "opens axes") if asked.dynamic else ("--fixed", "closes axes")
        raise UsageError(
            f"`{option}` {does} while a source is exported, and this one is ONNX already",
            hint=f"export it again from its source with `{option}`",
        )
    from trt_engine.conversion.onnx_source import exported_as_it_is

    assert asked.source.path is not None
    exported, why = exported_as_it_is(asked.source.path, asked.inputs)
    given: Answers = []
    agreement = None
    if why is None:
        given = answers(exported)
        agreement = agree(exported.path, exported, given, asked.tolerance, what="the model")
    notes = () if why is None else (f"not compared by us: {why}",)
    return _Made(exported, given, agreement, (ExportAttempt("onnx", 0.0),), notes)


# ------------------------------------------------------------------------------------------------ finishing


def _finished(asked: _Asked, made: _Made, staging: Path, started: float) -> ConvertReport:
    """The export simplified, at the opset asked for, compared once more as it was written, and in its place."""
    warnings: list[str] = []
    notes = [*made.exported.notes, *made.notes]
    path = made.exported.path
    raw = read_proto(path)
    before = sum(1 for _ in walk.nodes(raw))
    gone: dict[str, int] = {}
    if asked.simplify:
        path, gone = _simplified(path, made, staging, notes)
    have = walk.opsets_of(read_proto(path)).get("", 1)
    wanted = have if asked.source.kind == "onnx" and not asked.opset_given else asked.opset
    if have != wanted:
        path = _moved(path, made, staging, wanted, notes)
    proto = read_proto(path)
    without_traces(proto)
    if made.agreement is not None:
        notes += made.agreement.notes
        notes += name_outputs(proto, made.agreement.symbols, made.agreement.sizes)
    final: Agreement | None = None

    def prove(draft: Path) -> None:
        nonlocal final
        if made.agreement is not None:
            final = agree(draft, made.exported, made.answers, asked.tolerance, what="the simplified graph")
            notes.extend(final.notes)

    target = files.end_of_links(asked.out)
    nbytes, beside = outside.save(proto, target, open_model(path), outside=asked.external_data, prove=prove)
    model = open_model(asked.out)
    warnings += [*_fallback(made), *made.warnings, *_limits(made)]
    findings = _findings(model, asked, made)
    warnings += [item.text for item in findings if item.severity == "error" or item.code == "batch-lost"]
    return _report(asked, made, model, final, findings, notes, warnings, before, gone, nbytes, beside, started)


def _simplified(path: Path, made: _Made, staging: Path, notes: list[str]) -> tuple[Path, dict[str, int]]:
    from trt_engine.conversion.simplify import simplify

    log.info("simplifying")
    goal = staging / "simplified" / path.name
    goal.parent.mkdir(exist_ok=True)
    found = simplify(path, goal, inputs=_shapes_of(made))
    notes += found.notes
    return goal, found.operators_gone


def _shapes_of(made: _Made) -> dict[str, Shape]:
    return {name: array.shape for name, array in made.exported.example.items()}


def _moved(path: Path, made: _Made, staging: Path, opset: int, notes: list[str]) -> Path:
    from trt_engine.conversion.opsets import to_opset

    log.info("moving to opset %d", opset)
    goal = staging / "opset" / path.name
    goal.parent.mkdir(exist_ok=True)
    have = walk.opsets_of(read_proto(path)).get("", 1)
    to_opset(path, goal, opset, inputs=_shapes_of(made))
    notes.append(f"the exporter wrote opset {have}; moved to {opset}")
    return goal


def _fallback(made: _Made) -> list[str]:
    """What is to be said of an export that a first exporter did not give."""
    return [f"the {item.exporter} exporter was left: {item.reason}" for item in made.attempts if item.reason]


def _limits(made: _Made) -> list[str]:
    """The sizes the source itself does not run at, and outputs that batching changes."""
    said = []
    for symbol, size, why in dict.fromkeys(item for answer in made.answers for item in answer.failed):
        least = tried_sizes(made.answers, symbol)[0]
        rest = (
            f"the smallest size that was compared is {least}" if size < least else f"compared at {_tried(made, symbol)}"
        )
        said.append(f"the source itself does not run at {symbol} {size}: {why}; {rest}")
    batch = next((positions[0] for positions in made.exported.symbols.values() if 0 in positions), None)
    symbols = made.agreement.symbols if made.agreement is not None else {}
    mixed = [name for name in made.mixed if batch not in [s for at, s in symbols.get(name, {}).items() if at]]
    if mixed:
        names = ", ".join(f"`{name}`" for name in mixed)
        said.append(
            f"row 0 of {names} changes with the other rows of its batch: requests that share one are not independent"
        )
    return said


def _tried(made: _Made, symbol: str) -> str:
    return ", ".join(map(str, tried_sizes(made.answers, symbol)))


def _findings(model: Model, asked: _Asked, made: _Made) -> tuple[Finding, ...]:
    known = _shapes_of(made)
    shapes = {spec.name: known[spec.name] for spec in model.signature.inputs if spec.name in known}
    return lint(model, read_proto(model.path), shapes=shapes or None, target=asked.target).findings


def _report(
    asked: _Asked, made: _Made, model: Model, final: Agreement | None, findings: tuple[Finding, ...], notes: list[str],
    warnings: list[str], before: int, gone: dict[str, int], nbytes: int, beside: Path | None, started: float,
) -> ConvertReport:  # fmt: skip
    operators = Counter(place.node.op_type for place in walk.nodes(read_proto(model.path)))
    artifacts = {"model": str(asked.out)}
    if beside is not None:
        artifacts["weights"] = str(beside)
    return ConvertReport(
        source=asked.source.text,
        kind=asked.source.kind,
        seen=asked.source.seen,
        out=str(asked.out),
        exporter=made.exported.exporter,
        attempts=made.attempts,
        opset=model.opsets.get(""),
        ir_version=model.ir_version,
        signature=model.signature,
        dynamic=_dynamic(axes_of(made.exported), made.answers),
        agreement=final.shapes if final is not None else (),
        worst=final.worst if final is not None else None,
        tolerance=asked.tolerance if asked.tolerance is not None else TOLERANCE,
        nodes_before=before,
        nodes=operators.total(),
        operators=dict(operators.most_common()),
        operators_gone=gone,
        nbytes=nbytes,
        digest=model.digest,
        findings=findings,
        notes=tuple(dict.fromkeys(notes)),
        versions=made.exported.versions,
        export_s=made.attempts[-1].seconds,
        seconds=time.monotonic() - started,
        environment=Environment.here(),
        artifacts=artifacts,
        warnings=tuple(warnings),
    )


def _dynamic(axes: Axes, given: Answers) -> tuple[DynamicAxis, ...]:
    return tuple(
        DynamicAxis(
            symbol,
            {
                name: tuple(at for at, axis in positions.items() if axis.symbol == symbol)
                for name, positions in axes.items()
                if any(axis.symbol == symbol for axis in positions.values())
            },
            _low(symbol, limits.low, given),
            limits.high,
            limits.step,
            tried_sizes(given, symbol) if given else (),
        )
        for symbol, limits in symbols_of(axes).items()
    )


def _low(symbol: str, low: int, given: Answers) -> int:
    """The range's own end, or the smallest size compared where the source does not run at that end."""
    failed = {size for answer in given for name, size, _ in answer.failed if name == symbol}
    return tried_sizes(given, symbol)[0] if low in failed else low


def _plan(asked: _Asked, started: float) -> ConvertReport:
    return ConvertReport(
        source=asked.source.text,
        kind=asked.source.kind,
        seen=asked.source.seen,
        out=None,
        exporter=asked.exporters[0] if asked.source.kind in _TORCH else None,
        attempts=(),
        opset=asked.opset,
        ir_version=None,
        signature=None,
        dynamic=_dynamic(asked.dynamic or {}, []),
        agreement=(),
        worst=None,
        tolerance=asked.tolerance if asked.tolerance is not None else TOLERANCE,
        nodes_before=None,
        nodes=None,
        operators={},
        operators_gone={},
        nbytes=None,
        digest=None,
        findings=(),
        notes=(f"would write `{asked.out}`",),
        versions={},
        export_s=None,
        seconds=time.monotonic() - started,
        environment=None,
        dry_run=True,
    )

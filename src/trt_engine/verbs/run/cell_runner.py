"""Runs one cell: convert, build, bench, evaluate, profile; the results of completed steps are retained on failure."""

from __future__ import annotations

import contextlib
import logging
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from trt_engine import atomic_io, errors
from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.backend import get_backend
from trt_engine.config.bench import BenchConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.caller_language import in_plan
from trt_engine.config.evaluate import EvaluateConfig
from trt_engine.config.precision import QuantizeConfig, is_preset
from trt_engine.config.profiles import parse_profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import from_values, to_argv
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine
from trt_engine.environment import source_digest
from trt_engine.graph.load import open_model
from trt_engine.graph.operators import trt_only
from trt_engine.model import Model
from trt_engine.profiling.instruments import ncu, nsys
from trt_engine.records.base import StepTime, verb_document
from trt_engine.records.bench import BenchRecord, BenchReport
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.profile import ProfileReport
from trt_engine.records.sweep import CellResult, CellSpec
from trt_engine.verbs.bench.run import bench
from trt_engine.verbs.build import run as build
from trt_engine.verbs.build.precision import preprocess_digest
from trt_engine.verbs.build.run import BuildPlan
from trt_engine.verbs.cast.run import cast
from trt_engine.verbs.load import merge_run_settings
from trt_engine.verbs.profile.run import profile
from trt_engine.verbs.quantize.run import quantize_untimed
from trt_engine.verbs.run.plan_file import AS_IS, PROFILE_MODES
from trt_engine.verbs.run.sweep_folder import skip_warning

log = logging.getLogger(__name__)

BENCHMARK, ENGINES, LOGS, MODELS = "benchmark", "engines", "logs", "models"
NSIGHT_SYSTEMS, NSIGHT_COMPUTE, PROFILES = "nsight-systems", "nsight-compute", "profiles"
_NCU_KERNELS = 3
"""Number of kernels profiled by the mode `ncu`, by total time."""
_CAST = ("fp16", "bf16")
_UNCONVERTED = (AS_IS, "fp32", "tf32")
_TENSORRT_ONLY_OPERATORS = {"mxfp8": "trt::TRT_MXFP8DequantizeLinear", "nvfp4": "trt::TRT_FP4DynamicQuantize"}
"""Formats for which `quantize` writes an operator that only TensorRT supports."""


@dataclass(frozen=True, slots=True)
class CellJob:
    """A cell, its folders, and its baseline."""

    spec: CellSpec
    plan_folder: str
    """Folder of the plan."""
    run_folder: str
    """Absolute path of the run folder."""
    display_folder: str
    """The run folder as named by the user."""
    baseline: str = ""
    """Label of the baseline cell for `max_drop`; empty without a gate and for the baseline itself."""
    baseline_metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the baseline; empty if not yet measured."""
    log_level: int = logging.INFO


class SkipCell(Exception):
    """The cell cannot run on this machine and is skipped, not failed."""

    def __init__(self, error: errors.TrtEngineError) -> None:
        super().__init__(error.message)
        self.error = error


def failure_reason(error: errors.TrtEngineError, job: CellJob) -> str:
    """The reason stored in a result: the message, then `hint: ` and the hint, with paths relative to the plan."""
    message, hint = error.translated(in_plan)
    said = f"{message}\nhint: {hint}" if hint else message
    return atomic_io.replace_surrogates(said.replace(f"{job.run_folder}/", "").replace(f"{job.plan_folder}/", ""))


@dataclass
class _CellContext:
    """State of a running cell."""

    job: CellJob
    on_step: Callable[[str], None]
    result: CellResult
    engine: Engine | None = None

    @property
    def spec(self) -> CellSpec:
        return self.job.spec

    @property
    def run_folder(self) -> Path:
        return Path(self.job.run_folder)

    def setting(self, name: str, default: Any = None) -> Any:
        return self.spec.settings.get(name, default)

    def resolve_path(self, text: str | None) -> Path | None:
        """Resolve a path relative to the plan."""
        return None if text is None else Path(self.job.plan_folder) / text

    def update(self, **known: Any) -> None:
        self.result = replace(self.result, **known)

    def warn(self, text: str) -> None:
        if text not in self.result.warnings:
            self.update(warnings=(*self.result.warnings, text))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time and report a step."""
        self.on_step(name)
        log.info("%s", name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.update(steps=(*self.result.steps, StepTime(name, round(time.monotonic() - began, 3))))


def run_cell(job: CellJob, on_step: Callable[[str], None] = lambda step: None) -> CellResult:
    """Run the cell and return its result, also for a failure; `on_step` is called with the name of each step.

    Raises only `Interrupted`, whose `partial` is the result so far."""
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    cell = _CellContext(job, on_step, CellResult(job.spec, "done", started=started))

    def ended(**known: Any) -> CellResult:
        return replace(cell.result, seconds=round(time.monotonic() - began, 3), **known)

    try:
        _run_steps(cell)
    except SkipCell as refused:
        return ended(state="skipped", reason=failure_reason(refused.error, job))
    except errors.Interrupted as stop:
        if isinstance(stop.partial, BenchRecord):
            cell.update(bench=replace(stop.partial, engine=str(cell.result.engine)))
        stop.partial = ended(state="interrupted", reason="interrupted", exit_code=stop.exit_code)
        raise
    except KeyboardInterrupt:
        partial = ended(state="interrupted", reason="interrupted", exit_code=errors.Interrupted.exit_code)
        raise errors.Interrupted("interrupted", partial=partial) from None
    except errors.TrtEngineError as error:
        return ended(state="failed", reason=failure_reason(error, job), exit_code=error.exit_code)
    except MemoryError:
        short = errors.MemoryExhausted("out of memory", hint="use a smaller batch")
        return ended(state="failed", reason=failure_reason(short, job), exit_code=short.exit_code)
    except Exception as error:  # any error fails this cell only
        log.exception("unexpected")
        cause = errors.TrtEngineError(
            f"unexpected {type(error).__name__}: {error}", hint=f"see `{LOGS}/{job.spec.label}.log`"
        )
        return ended(state="failed", reason=failure_reason(cause, job), exit_code=cause.exit_code)
    return ended()


def _run_steps(cell: _CellContext) -> None:
    spec = cell.spec
    for mode, why in spec.skipped_modes.items():
        cell.warn(skip_warning(mode, why))
    with cell.step("look"):
        model = _check_model(cell)
    if spec.prequantized or spec.precision in _UNCONVERTED:
        source = model.path
    else:
        with cell.step("cast" if spec.precision in _CAST else "quantize"):
            source = _make_variant(cell, model)
        if "onnxruntime" in get_backend(spec.backend).modules:
            _reject_trt_only_operators(spec, open_model(source))
    with cell.step("build"):
        _build(cell, source)
    if "bench" in spec.modes:
        with cell.step("bench"):
            _bench(cell)
    if "evaluate" in spec.modes:
        with _warn_if_unavailable(cell, "evaluate"), cell.step("evaluate"):
            _evaluate(cell)
    if PROFILE_MODES & set(spec.modes):
        with _warn_if_unavailable(cell, "profile"), cell.step("profile"):
            _profile(cell)


@contextlib.contextmanager
def _warn_if_unavailable(cell: _CellContext, step: str) -> Iterator[None]:
    """Turn a `SetupError` of an optional step into a warning."""
    try:
        yield
    except errors.DeviceLost:
        raise
    except errors.SetupError as error:
        cell.warn(skip_warning(step, failure_reason(error, cell.job)))


# ------------------------------------------------------------------------------------------------ before


def _check_model(cell: _CellContext) -> Model:
    """Open the model; raises `SkipCell` if the cell cannot run on this machine."""
    spec = cell.spec
    source = cell.resolve_path(spec.source)
    assert source is not None
    if (lacking := missing_requirements(spec)) is not None:
        raise SkipCell(lacking)
    model = open_model(source)
    if "onnxruntime" in get_backend(spec.backend).modules:
        _reject_trt_only_operators(spec, model)
    try:  # before casting or calibration: check that this backend can build
        _plan_build(cell, model.path, replace(_build_config(cell), precision=None))
    except errors.SetupError as error:
        if error.machine_specific:
            raise SkipCell(error) from error
        raise
    return model


_ALTERNATIVES = {"evaluate": "`dataset:` in the plan"} | dict.fromkeys(
    ("bench", "profile"), "`--modes build` builds the engine; `trt-engine validate` checks it on the target GPU"
)
_ALTERNATIVES |= dict.fromkeys(("nsys", "ncu"), "`--modes profile` works on any device")
"""Hint for an inapplicable mode."""


def missing_requirements(spec: CellSpec) -> errors.TrtEngineError | None:
    """Why the cell cannot run on this machine, checked without opening its model; None if it can."""
    if not spec.modes:
        nothing = "; ".join(f"{mode}: {why}" for mode, why in spec.skipped_modes.items())
        return errors.UsageError(
            f"none of the requested modes apply ({nothing})", hint=_ALTERNATIVES[next(iter(spec.skipped_modes))]
        )
    backend_spec = get_backend(spec.backend)
    kind, number = parse_device(spec.device)
    boards = info.gpus() if kind == "cuda" else ()
    if kind == "cpu" and spec.precision == "tf32":
        said = "tf32 needs an NVIDIA GPU, but the device is `cpu`"
        return errors.PrecisionError(said, hint="exclude `tf32` with `precisions` of the CPU's backend")
    if boards and number >= len(boards):
        said = f"no device `{spec.device}`: {len(boards)} GPU{'s' if len(boards) > 1 else ''} visible"
        return errors.SetupError(said, hint="`nvidia-smi -L` lists the GPUs, starting at 0")
    if missing := backend_spec.missing_modules("builder"):
        names = ", ".join(f"`{name}`" for name in missing)
        return errors.SetupError(
            f"the backend `{spec.backend}` needs {names}, not installed", hint=backend_spec.install
        )
    return None


def _reject_trt_only_operators(spec: CellSpec, model: Model) -> None:
    """Raise `SkipCell` for a model with operators that ONNX Runtime does not support."""
    only = trt_only(model.graph)
    weights_alone = bool(spec.settings.get("quantize", {}).get("weights_only")) and spec.precision == "nvfp4"
    if not only and not spec.prequantized and spec.precision in _TENSORRT_ONLY_OPERATORS and not weights_alone:
        only = (_TENSORRT_ONLY_OPERATORS[spec.precision],)
    if only:
        names = ", ".join(f"`{name}`" for name in only)
        raise SkipCell(
            errors.ModelError(
                f"the model has operators that only TensorRT supports ({names})",
                hint="add `tensorrt` to the plan's `backends`, with the library of a plugin operator "
                "(`options: {plugins: lib.so}`, or an image with the plugins), or quantize again from the original ONNX",
            )
        )


def _make_variant(cell: _CellContext, model: Model) -> Path:
    """Path of the model in the cell's precision, converted once for all cells that share it."""
    spec = cell.spec
    quantise: dict[str, Any] = cell.setting("quantize", {})
    whom = f"-{quantise['target']}" if "target" in quantise else ""
    target = cell.run_folder / MODELS / f"{spec.model}-{spec.precision}{whom}.onnx"
    receipt = target.with_suffix(".json")
    data, preprocess = cell.setting("calib_data"), _preprocess_source(cell, "calib_preprocess")
    inputs = cell.setting("inputs")
    seen = None if data is None else [_data_fingerprint(cell, data), preprocess_digest(preprocess)]
    rules = source_digest("graph", "precision")
    given = [] if inputs is None else [_data_fingerprint(cell, inputs)]
    made_of = msgspec.json.encode(
        [model.digest, spec.precision, quantise, seen, *given, rules], order="sorted"
    ).decode()
    if _is_current(target, receipt, made_of):
        log.info("using `%s` of an earlier cell", target.name)
        return target
    receipt.unlink(missing_ok=True)
    atomic_io.ensure_folder(target.parent)
    to: Any = spec.precision
    report = (
        cast(model.path, to, out=target, overwrite=True, inputs=cell.resolve_path(inputs))
        if spec.precision in _CAST
        else _quantize_model(cell, model, target, quantise, data, preprocess)
    )
    stated = {"of": made_of, "digest": open_model(target).digest, "report": msgspec.to_builtins(report)}
    atomic_io.write_atomic(receipt, msgspec.json.encode(stated))
    for text in report.warnings:
        cell.warn(text)
    return target


def _data_fingerprint(cell: _CellContext, data: str) -> str:
    """Fingerprint of the data: names, sizes and modification times."""
    place = cell.resolve_path(data)
    if data == "random" or place is None or not place.exists():
        return data
    found = [place] if place.is_file() else sorted(item for item in place.rglob("*") if item.is_file())
    return atomic_io.replace_surrogates(
        str([(str(item.relative_to(place)), item.stat().st_size, item.stat().st_mtime_ns) for item in found])
    )


def _is_current(target: Path, receipt: Path, made_of: str) -> bool:
    try:
        stated = decode_json(read_bounded(receipt))
        return bool(stated["of"] == made_of and stated["digest"] == open_model(target).digest)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, errors.TrtEngineError):
        return False


def _preprocess_source(cell: _CellContext, setting: str) -> str | None:
    """Name of a preset, or path of a file."""
    named = cell.setting(setting)
    return named if named is None or is_preset(named) else str(cell.resolve_path(named))


def _quantize_model(
    cell: _CellContext, model: Model, target: Path, settings: dict[str, Any], data: str | None, preprocess: str | None
) -> Any:
    place = "random" if data == "random" else None if data is None else str(cell.resolve_path(data))
    if place is not None and place != "random" and not Path(place).exists():
        raise errors.UsageError(f"calibration data `{data}` not found", hint="`calib_data:` is relative to the plan")
    config = replace(
        from_values(QuantizeConfig, settings), calib_data=place, preprocess=preprocess,
        inputs=cell.resolve_path(cell.setting("inputs")),
    )  # fmt: skip
    return quantize_untimed(model, cell.spec.precision, out=target, config=config, overwrite=True)


# ------------------------------------------------------------------------------------------------ the build


def _build(cell: _CellContext, source: Path) -> None:
    spec, as_asked = cell.spec, True
    try:
        config = _build_config(cell)
        try:
            made = build.execute(_plan_build(cell, source, config))
        except errors.PrecisionError as error:
            if not _accepts_other_precision(spec):
                raise
            log.warning("%s", error.message)
            said = error.message.removeprefix(f"requested {spec.precision}").lstrip(":, ")
            cell.warn(f"the graph is {spec.precision}, but the engine runs in another precision: {said}")
            as_asked = False
            made = build.execute(_plan_build(cell, source, replace(config, precision=None)))
    except (errors.SetupError, errors.ModelError) as error:
        if error.machine_specific:  # a missing provider, plugin or kernel; a full disk is a failure
            raise SkipCell(error) from error
        raise
    cell.engine = _add_accuracy_command(cell, made.engine)
    passport = cell.engine.passport
    cell.update(
        engine=str(_engine_path(cell).relative_to(cell.run_folder)),
        engine_bytes=sum(item.nbytes for item in passport.payload),
        build_seconds=passport.build.seconds,
        dtype_shares={name: share.layers for name, share in passport.precision.compute_shares.items()},
        compute_dtype=None
        if as_asked or passport.precision.main_dtype == spec.precision
        else passport.precision.main_dtype,
        not_fused=passport.build.not_fused,
        parity=passport.parity,
        validation=made.engine.validation,
    )
    for text in made.warnings:
        if as_asked or passport.build.not_fused is None or passport.build.not_fused not in text:  # already reported
            cell.warn(text)


def _add_accuracy_command(cell: _CellContext, engine: Engine) -> Engine:
    """The engine, with the evaluation command for its target GPU in the passport."""
    validation, dataset = engine.passport.validation, cell.setting("dataset")
    deferred = validation is not None and validation.state == "deferred"
    if validation is None or not deferred or dataset is None or "evaluate" not in cell.spec.skipped_modes:
        return engine
    words = ["trt-engine", "evaluate", engine.path.name, "--dataset", dataset]
    for name in ("max_samples", "seed"):
        if (value := cell.setting(name)) is not None:
            words.append(f"--{name.replace('_', '-')}={value}")
    validation = replace(validation, accuracy_command=shlex.join(words))
    return Engine.seal(engine.path, replace(engine.passport, validation=validation))


def _engine_path(cell: _CellContext) -> Path:
    suffix = get_backend(cell.spec.backend).payload_suffix
    return cell.run_folder / ENGINES / f"{cell.spec.label}.engine{'' if suffix == '.engine' else suffix}"


def _plan_build(cell: _CellContext, source: Path, config: BuildConfig) -> BuildPlan:
    return build.plan(source, out=_engine_path(cell), config=config, overwrite=True)


def _build_config(cell: _CellContext) -> BuildConfig:
    spec = cell.spec
    values: dict[str, Any] = {
        **cell.setting("build", {}),
        "backend": spec.backend,
        "device": spec.device,
        "precision": None if spec.precision == AS_IS else spec.precision,
        "providers": spec.providers,
        "allow_fallback": cell.setting("allow_fallback", False),
        "gpus": tuple(cell.setting("gpus", ())),
        "options": {name: _resolve_option_paths(cell, text) for name, text in cell.setting("options", {}).items()},
        "shapes": cell.setting("shapes", {}),
        "inputs": cell.resolve_path(cell.setting("inputs")),
    }
    if "timing_cache" in values:
        values["timing_cache"] = cell.resolve_path(values["timing_cache"])
    if "profiles" in values:
        given = values["profiles"]
        values["profiles"] = tuple(parse_profile(one) for one in ([given] if isinstance(given, str | dict) else given))
    elif not cell.setting("fixed_batch"):
        values["batch"] = (1, spec.batch, spec.batch)
    made: BuildConfig = from_values(BuildConfig, values)
    return made


def _resolve_option_paths(cell: _CellContext, text: str) -> str:
    """Option value with absolute paths of files relative to the plan, such as plugin libraries."""
    parts = text.split(",")
    beside = [Path(cell.job.plan_folder) / part.strip() for part in parts]
    return ",".join(str(path) if path.is_file() else part for part, path in zip(parts, beside, strict=True))


def _accepts_other_precision(spec: CellSpec) -> bool:
    """Whether to measure an engine that computes in another dtype than its graph: FP16 on a CPU, or Q/DQ pairs that ONNX
    Runtime does not fuse. The cell then shows accuracy, size and the actual dtype."""
    if spec.precision in _UNCONVERTED:
        return False
    if parse_device(spec.device)[0] == "cpu":
        return True
    compiled = any(name.lower().startswith(("tensorrt", "trt", "nvtensorrt", "rtx")) for name in spec.providers)
    return "onnxruntime" in get_backend(spec.backend).modules and not compiled and spec.precision not in _CAST


# ------------------------------------------------------------------------------------------------ after it


def _run_options(cell: _CellContext) -> dict[str, Any]:
    return {
        "batch": None if cell.setting("fixed_batch") else cell.spec.batch,
        "allow_fallback": cell.setting("allow_fallback", False),
        "inputs": cell.resolve_path(cell.setting("inputs")),
    }


def _command(cell: _CellContext, verb: str, values: dict[str, Any], *words: str) -> str:
    """The command that does a step alone."""
    config, runtime, _ = merge_run_settings(values, None, None, BenchConfig())
    return shlex.join(["trt-engine", verb, str(cell.result.engine), *words, *to_argv(config), *to_argv(runtime)])


def _bench(cell: _CellContext) -> None:
    assert cell.engine is not None
    spec = cell.spec
    values = {**cell.setting("bench", {}), **_run_options(cell)}
    record = bench(cell.engine, isolate=True, **values)
    record = replace(record, engine=str(cell.result.engine))
    cell.update(bench=record)
    name = f"{BENCHMARK}/{spec.label}.json"
    report = BenchReport.of(record, {"record": name})
    command = _command(cell, "bench", values, "--isolate")
    atomic_io.write_json(cell.run_folder / name, verb_document("bench", report, command=command))
    cell.update(files={**cell.result.files, "record": name})


def _evaluate(cell: _CellContext) -> None:
    from trt_engine.verbs.evaluate import run as evaluate  # needs optional dependencies

    assert cell.engine is not None
    dataset = cell.resolve_path(cell.setting("dataset"))
    assert dataset is not None
    report = evaluate.run(
        cell.engine,
        dataset,
        EvaluateConfig(
            batch=cell.spec.batch,
            max_samples=cell.setting("max_samples"),
            seed=cell.setting("seed"),
            preprocess=_preprocess_source(cell, "preprocess"),
        ),
        RuntimeConfig(allow_fallback=cell.setting("allow_fallback", False)),
        BuildConfig(),
    )
    report = replace(report, engine=str(cell.result.engine), dataset=str(cell.setting("dataset")))
    cell.update(evaluation=report, images_digest=report.dataset_digest)
    cell.result, error = check_accuracy(cell.result, cell.job.baseline, cell.job.baseline_metrics)
    if error is not None:
        raise error


_NOT_APPLIED = "`max_drop` was not applied"


def check_accuracy(
    result: CellResult, baseline: str, baseline_metrics: Mapping[str, float]
) -> tuple[CellResult, errors.AccuracyError | None]:
    """Compare the result with the metrics of the cell `baseline`; returns it with an error if the drop exceeds `max_drop`.

    If either metric is missing, the gate is not applied and the result has a warning.
    """
    report, limit = result.evaluation, result.spec.settings.get("max_drop")
    if report is None or limit is None or not baseline:
        return result, None
    main = MAIN_METRIC[report.task]
    before, now = baseline_metrics.get(main), report.metrics.get(main)
    others = tuple(text for text in result.warnings if not text.startswith(_NOT_APPLIED))
    if before is None or now is None or before < 0 or now < 0:
        whose = f"the baseline `{baseline}` has" if before is None or before < 0 else "this cell has"
        said = f"{_NOT_APPLIED}: {whose} no `{main}`"
        report = replace(report, max_drop=None, passed=None)
        return replace(result, evaluation=report, warnings=(*others, said)), None
    drop = before - now
    result = replace(result, evaluation=replace(report, max_drop=limit, passed=drop <= limit), warnings=others)
    if drop <= limit:
        return result, None
    return result, errors.AccuracyError(
        f"{main} is {now:.4f}, baseline {before:.4f}: a drop of {drop:.4f}, allowed is {limit:g}",
        hint="raise `accuracy: {max_drop: ...}`; `trt-engine search` finds the layers to exclude",
    )


def _profile(cell: _CellContext) -> None:
    """Profile the engine and move the raw Nsight files to their folders in the run."""
    assert cell.engine is not None
    spec = cell.spec
    place = cell.run_folder / PROFILES / spec.label
    inferences, counted = cell.setting("inferences", 20), _NCU_KERNELS if "ncu" in spec.modes else 0
    values = _run_options(cell)
    asked = ["--inferences", str(inferences), *(["--ncu", str(counted)] if counted else [])]
    report = profile(
        cell.engine,
        out=place,
        inferences=inferences,
        ncu=counted,
        overwrite=True,
        command=_command(cell, "profile", values, *asked),
        **values,
    )
    moved = move_raw_files(place, cell.run_folder / NSIGHT_SYSTEMS / spec.label, (nsys.REPORT, nsys.DATABASE, nsys.LOG))
    moved |= move_raw_files(place, cell.run_folder / NSIGHT_COMPUTE / spec.label, (ncu.REPORT, ncu.OUTPUT, ncu.LOG))
    places = {kind: moved.get(Path(text), Path(text)) for kind, text in report.files.items()}
    names = {
        kind: str(path.relative_to(cell.run_folder))
        for kind, path in places.items()
        if path.is_relative_to(cell.run_folder)
        and kind not in ("records", "log")  # the cell has its own record and log
    }
    opens = {
        kind: said.replace(report.files[kind], str(Path(cell.job.display_folder) / names[kind]))
        for kind, said in report.open_commands.items()
        if kind in names
    }
    report = replace(report, engine=str(cell.result.engine), files=names, open_commands=opens)
    cell.update(
        profile=report, files={**names, **cell.result.files}, open_commands={**cell.result.open_commands, **opens}
    )
    for text in missing_tool_warnings(report, spec.modes):
        cell.warn(text)


def missing_tool_warnings(report: ProfileReport, modes: Sequence[str]) -> Iterator[str]:
    """A warning for each Nsight tool in `modes` that was unavailable."""
    for rung in report.instruments:
        if rung.name in ("nsys", "ncu") and rung.name in modes and not rung.used:
            yield skip_warning(rung.name, f"{rung.reason}\nhint: {rung.fix}" if rung.fix else rung.reason)


def move_raw_files(source: Path, folder: Path, names: Sequence[str]) -> dict[Path, Path]:
    """Move raw files of a profiler to `folder`; returns new path by old path."""
    there = [source / name for name in names if (source / name).is_file()]
    if there:
        atomic_io.ensure_folder(folder)
    return {path: path.replace(folder / path.name) for path in there}

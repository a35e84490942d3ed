"""What is done with one cell: prepared, built, measured, evaluated, profiled; a step is kept whatever comes after."""

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

from trt_engine import files
from trt_engine.api import building
from trt_engine.api.building import BuildPlan
from trt_engine.api.calibrating import quantize
from trt_engine.api.casting import cast
from trt_engine.api.measuring import bench, settled
from trt_engine.api.preparing import preprocess_digest
from trt_engine.api.profiling import profile
from trt_engine.backend import backend
from trt_engine.cells import CellResult, CellSpec
from trt_engine.config import BuildConfig, QuantizeConfig, from_values, is_preset, parse_profile, words
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine
from trt_engine.errors import (
    AccuracyError,
    DeviceLost,
    Interrupted,
    MemoryExhausted,
    ModelError,
    PrecisionError,
    SetupError,
    TrtEngineError,
    UsageError,
)
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.operators import trt_only
from trt_engine.matrix.parts import said_left_out
from trt_engine.matrix.plan import AS_IS, PROFILED
from trt_engine.model import Model
from trt_engine.precision.calibrate import RULES
from trt_engine.profiling import ncu, nsys
from trt_engine.records import MAIN_FIGURE, BenchRecord, BenchReport, Step, document
from trt_engine.traces import ProfileReport

__all__ = [
    "BENCHMARK",
    "COMPUTE",
    "ENGINES",
    "LOGS",
    "MODELS",
    "PROFILES",
    "SYSTEMS",
    "Job",
    "carry_out",
    "judged",
    "lacking_here",
    "passed_over",
    "raw_files_moved",
    "reason_of",
]

log = logging.getLogger(__name__)

BENCHMARK, ENGINES, LOGS, MODELS = "benchmark", "engines", "logs", "models"
SYSTEMS, COMPUTE, PROFILES = "nsight-systems", "nsight-compute", "profiles"
_COUNTED = 3
"""Kernels whose counters the mode `ncu` measures: those with most of the time."""
_CAST = ("fp16", "bf16")
_AS_GIVEN = (AS_IS, "fp32", "tf32")
_ONLY_TENSORRT = {"mxfp8": "trt::TRT_MXFP8DequantizeLinear", "nvfp4": "trt::TRT_FP4DynamicQuantize"}
"""Formats whose graphs, as we write them, hold an operator that TensorRT alone runs."""


@dataclass(frozen=True, slots=True)
class Job:
    """A cell, where its files lie, and what it is held against."""

    spec: CellSpec
    base: str
    """The plan's folder."""
    run: str
    """The run's folder, from the root."""
    shown: str
    """The same as the user named it."""
    held_against: str = ""
    """Label of the cell whose figures `max_drop` gates by; empty where nothing is gated, as of that cell itself."""
    reference: dict[str, float] = field(default_factory=dict)
    """Those figures; empty while there are none."""
    log_level: int = logging.INFO


class Refused(Exception):
    """The cell cannot run here, and that is no failure: its reason and remedy."""

    def __init__(self, error: TrtEngineError) -> None:
        super().__init__(error.message)
        self.error = error


def reason_of(error: TrtEngineError, job: Job) -> str:
    """The reason a result keeps: what was found, and the remedy after `hint: `, paths as the plan has them."""
    return files.printable(str(error).replace(f"{job.run}/", "").replace(f"{job.base}/", ""))


@dataclass
class _Cell:
    """One cell at work: what is known of it so far."""

    job: Job
    tell: Callable[[str], None]
    result: CellResult
    engine: Engine | None = None

    @property
    def spec(self) -> CellSpec:
        return self.job.spec

    @property
    def run(self) -> Path:
        return Path(self.job.run)

    def asked(self, name: str, default: Any = None) -> Any:
        return self.spec.settings.get(name, default)

    def path(self, text: str | None) -> Path | None:
        """A path of the plan, from the plan's folder."""
        return None if text is None else Path(self.job.base) / text

    def learn(self, **known: Any) -> None:
        self.result = replace(self.result, **known)

    def warn(self, text: str) -> None:
        if text not in self.result.warnings:
            self.learn(warnings=(*self.result.warnings, text))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A step of the cell, timed and told."""
        self.tell(name)
        log.info("%s", name)
        began = time.monotonic()
        try:
            yield
        finally:
            self.learn(steps=(*self.result.steps, Step(name, round(time.monotonic() - began, 3))))


def carry_out(job: Job, tell: Callable[[str], None] = lambda step: None) -> CellResult:
    """Do the cell; its result says what became of it. Only an interruption leaves by the way errors go, and its `partial` is
    the result until then. `tell` hears the name of each step as it begins."""
    started, began = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    cell = _Cell(job, tell, CellResult(job.spec, "done", started=started))

    def ended(**known: Any) -> CellResult:
        return replace(cell.result, seconds=round(time.monotonic() - began, 3), **known)

    try:
        _all_steps(cell)
    except Refused as refused:
        return ended(state="skipped", reason=reason_of(refused.error, job))
    except Interrupted as stop:
        if isinstance(stop.partial, BenchRecord):
            cell.learn(bench=replace(stop.partial, engine=str(cell.result.engine)))
        stop.partial = ended(state="interrupted", reason="interrupted", exit_code=stop.exit_code)
        raise
    except KeyboardInterrupt:
        partial = ended(state="interrupted", reason="interrupted", exit_code=Interrupted.exit_code)
        raise Interrupted("interrupted", partial=partial) from None
    except TrtEngineError as error:
        return ended(state="failed", reason=reason_of(error, job), exit_code=error.exit_code)
    except MemoryError:
        short = MemoryExhausted("out of memory", hint="a smaller batch")
        return ended(state="failed", reason=reason_of(short, job), exit_code=short.exit_code)
    except Exception as error:  # one cell must not take the others down: whatever it was, it is this cell's result
        log.exception("unexpected")
        told = TrtEngineError(
            f"unexpected {type(error).__name__}: {error}", hint=f"`{LOGS}/{job.spec.label}.log` shows where"
        )
        return ended(state="failed", reason=reason_of(told, job), exit_code=told.exit_code)
    return ended()


def _all_steps(cell: _Cell) -> None:
    spec = cell.spec
    for mode, why in spec.left_out.items():
        cell.warn(said_left_out(mode, why))
    with cell.step("look"):
        model = _looked_at(cell)
    if spec.own_file or spec.precision in _AS_GIVEN:
        source = model.path
    else:
        with cell.step("cast" if spec.precision in _CAST else "quantize"):
            source = _variant(cell, model)
        if "onnxruntime" in backend(spec.backend).modules:
            _keep_from_onnxruntime(spec, open_model(source))
    with cell.step("build"):
        _build(cell, source)
    if "bench" in spec.modes:
        with cell.step("bench"):
            _bench(cell)
    if "evaluate" in spec.modes:
        with _lacking_is_told(cell, "evaluate"), cell.step("evaluate"):
            _evaluate(cell)
    if PROFILED & set(spec.modes):
        with _lacking_is_told(cell, "profile"), cell.step("profile"):
            _profile(cell)


@contextlib.contextmanager
def _lacking_is_told(cell: _Cell, what: str) -> Iterator[None]:
    """What the machine lacks for a later step is a warning: what was measured before it stands."""
    try:
        yield
    except DeviceLost:
        raise
    except SetupError as error:
        cell.warn(said_left_out(what, reason_of(error, cell.job)))


# ------------------------------------------------------------------------------------------------ before


def _looked_at(cell: _Cell) -> Model:
    """The model, known to be there, whole, and not to be sent where it cannot run."""
    spec = cell.spec
    source = cell.path(spec.source)
    assert source is not None
    if (lacking := lacking_here(spec)) is not None:
        raise Refused(lacking)
    model = open_model(source)
    if "onnxruntime" in backend(spec.backend).modules:
        _keep_from_onnxruntime(spec, model)
    try:  # before anything is cast or calibrated: can this backend build here at all?
        _planned(cell, model.path, replace(_build_config(cell), precision=None))
    except SetupError as error:
        if error.not_here:
            raise Refused(error) from error
        raise
    return model


_INSTEAD = {"evaluate": "`dataset:` in the plan"} | dict.fromkeys(
    ("nsys", "ncu"), "`--modes profile` looks inside on any device"
)
"""What there is in place of a mode that has nothing to do."""


def lacking_here(spec: CellSpec) -> TrtEngineError | None:
    """Why the cell cannot run on this machine, as far as that is known without its model; None where nothing is."""
    if not spec.modes:
        nothing = "; ".join(f"{mode}: {why}" for mode, why in spec.left_out.items())
        return UsageError(
            f"nothing that was asked for can be done here ({nothing})", hint=_INSTEAD[next(iter(spec.left_out))]
        )
    card = backend(spec.backend)
    kind, number = parse_device(spec.device)
    boards = info.gpus() if kind == "cuda" else ()
    if kind == "cpu" and spec.precision == "tf32":
        said = "tf32 is a way of NVIDIA's GPUs to compute, and the device is `cpu`"
        return PrecisionError(said, hint="leave `tf32` out for the CPU: `precisions` of a backend chooses")
    if boards and number >= len(boards):
        said = f"there is no device `{spec.device}` here: {len(boards)} GPU{'s' if len(boards) > 1 else ''} can be seen"
        return SetupError(said, hint="`nvidia-smi -L` lists the GPUs; they count from 0")
    if missing := card.missing("builder"):
        names = ", ".join(f"`{name}`" for name in missing)
        return SetupError(f"the backend `{spec.backend}` needs {names}, not installed here", hint=card.install)
    return None


def _keep_from_onnxruntime(spec: CellSpec, model: Model) -> None:
    """Operators that only TensorRT runs are never sent to ONNX Runtime."""
    only = trt_only(read_proto(model.path))
    weights_alone = bool(spec.settings.get("quantize", {}).get("weights_only")) and spec.precision == "nvfp4"
    if not only and not spec.own_file and spec.precision in _ONLY_TENSORRT and not weights_alone:
        only = (_ONLY_TENSORRT[spec.precision],)
    if only:
        names = ", ".join(f"`{name}`" for name in only)
        raise Refused(
            ModelError(
                f"the model has operators that only TensorRT runs ({names}): it is not sent to ONNX Runtime",
                hint="add `tensorrt` to the plan's `backends`, with the plugin library where the operator is a plugin's "
                "(`options: {plugins: lib.so}`, or an image that has the plugins), or quantise again from the plain ONNX",
            )
        )


def _variant(cell: _Cell, model: Model) -> Path:
    """The model in the cell's precision, made once for all cells that share it."""
    spec = cell.spec
    quantise: dict[str, Any] = cell.asked("quantize", {})
    whom = f"-{quantise['target']}" if "target" in quantise else ""
    target = cell.run / MODELS / f"{spec.model}-{spec.precision}{whom}.onnx"
    receipt = target.with_suffix(".json")
    data, preprocess = cell.asked("calibrate"), _preprocess(cell, "calibrate_preprocess")
    seen = None if data is None else [_listing(cell, data), preprocess_digest(preprocess), RULES]
    made_of = msgspec.json.encode([model.digest, spec.precision, quantise, seen], order="sorted").decode()
    if _is_made(target, receipt, made_of):
        log.info("`%s` is there from an earlier cell", target.name)
        return target
    receipt.unlink(missing_ok=True)
    files.ensure_folder(target.parent)
    report = (
        _cast(model, spec, target)
        if spec.precision in _CAST
        else _quantised(cell, model, target, quantise, data, preprocess)
    )
    told = {"of": made_of, "digest": open_model(target).digest, "report": msgspec.to_builtins(report)}
    files.write_whole(receipt, msgspec.json.encode(told))
    for text in report.warnings:
        cell.warn(text)
    return target


def _listing(cell: _Cell, data: str) -> str:
    """What the data is, cheaply: whoever changed a picture in place changed its time."""
    place = cell.path(data)
    if data == "random" or place is None or not place.exists():
        return data
    found = [place] if place.is_file() else sorted(item for item in place.rglob("*") if item.is_file())
    return files.printable(
        str([(str(item.relative_to(place)), item.stat().st_size, item.stat().st_mtime_ns) for item in found])
    )


def _is_made(target: Path, receipt: Path, made_of: str) -> bool:
    try:
        told = msgspec.json.decode(receipt.read_bytes())
        return bool(told["of"] == made_of and told["digest"] == open_model(target).digest)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, TrtEngineError):
        return False


def _cast(model: Model, spec: CellSpec, target: Path) -> Any:
    return cast(model.path, spec.precision, out=target, yes=True)


def _preprocess(cell: _Cell, setting: str) -> str | None:
    """A preset's name, or the path of a file."""
    named = cell.asked(setting)
    return named if named is None or is_preset(named) else str(cell.path(named))


def _quantised(
    cell: _Cell, model: Model, target: Path, settings: dict[str, Any], data: str | None, preprocess: str | None
) -> Any:
    place = "random" if data == "random" else None if data is None else str(cell.path(data))
    if place is not None and place != "random" and not Path(place).exists():
        raise UsageError(f"no such calibration data `{data}`", hint="`calibrate:` in the plan is relative to the plan")
    return quantize(
        model,
        cell.spec.precision,
        out=target,
        data=place,
        preprocess=preprocess,
        config=from_values(QuantizeConfig, settings),
        yes=True,
    )


# ------------------------------------------------------------------------------------------------ the build


def _build(cell: _Cell, source: Path) -> None:
    spec, as_asked = cell.spec, True
    try:
        config = _build_config(cell)
        try:
            made = building.carry_out(_planned(cell, source, config))
        except PrecisionError as error:
            if not _measured_anyway(spec):
                raise
            log.warning("%s", error.message)
            said = error.message.removeprefix(f"asked for {spec.precision}").lstrip(":, ")
            cell.warn(f"{spec.precision} is in the graph and is not what runs: {said}")
            as_asked = False
            made = building.carry_out(_planned(cell, source, replace(config, precision=None)))
    except (SetupError, ModelError) as error:
        if error.not_here:  # a provider, a plugin, a kernel; a disk that is full is a failure
            raise Refused(error) from error
        raise
    cell.engine = made.engine
    passport = made.engine.passport
    cell.learn(
        engine=str(_payload(cell).relative_to(cell.run)),
        engine_bytes=sum(item.nbytes for item in passport.payload),
        build_seconds=passport.build.seconds,
        found={name: share.layers for name, share in passport.precision.running.items()},
        ran_in=None if as_asked or passport.precision.main == spec.precision else passport.precision.main,
        not_fused=passport.build.not_fused,
        parity=passport.parity,
    )
    for text in made.warnings:
        if as_asked or passport.build.not_fused is None or passport.build.not_fused not in text:  # told already
            cell.warn(text)


def _payload(cell: _Cell) -> Path:
    suffix = backend(cell.spec.backend).payload_suffix
    return cell.run / ENGINES / f"{cell.spec.label}.engine{'' if suffix == '.engine' else suffix}"


def _planned(cell: _Cell, source: Path, config: BuildConfig) -> BuildPlan:
    return building.plan(source, out=_payload(cell), config=config, yes=True)


def _build_config(cell: _Cell) -> BuildConfig:
    spec = cell.spec
    values: dict[str, Any] = {
        **cell.asked("build", {}),
        "backend": spec.backend,
        "device": spec.device,
        "precision": None if spec.precision == AS_IS else spec.precision,
        "providers": spec.providers,
        "allow_fallback": cell.asked("allow_fallback", False),
        "options": {name: _from_plan(cell, text) for name, text in cell.asked("options", {}).items()},
        "shapes": cell.asked("shapes", {}),
    }
    if "timing_cache" in values:
        values["timing_cache"] = cell.path(values["timing_cache"])
    if "profiles" in values:
        given = values["profiles"]
        values["profiles"] = tuple(parse_profile(one) for one in ([given] if isinstance(given, str | dict) else given))
    elif not cell.asked("fixed_batch"):
        values["batch"] = (1, spec.batch, spec.batch)
    made: BuildConfig = from_values(BuildConfig, values)
    return made


def _from_plan(cell: _Cell, text: str) -> str:
    """An option's text, with what names files beside the plan (plugin libraries) as their whole paths."""
    parts = text.split(",")
    beside = [Path(cell.job.base) / part.strip() for part in parts]
    return ",".join(str(path) if path.is_file() else part for part, path in zip(parts, beside, strict=True))


def _measured_anyway(spec: CellSpec) -> bool:
    """Whether an engine that computes in another type than its graph is measured, as of FP16 on a CPU and of pairs that ONNX
    Runtime does not fuse: the cell shows accuracy and size, and says what ran. Elsewhere it is not what it was to be."""
    if spec.precision in _AS_GIVEN:
        return False
    if parse_device(spec.device)[0] == "cpu":
        return True
    compiled = any(name.lower().startswith(("tensorrt", "trt")) for name in spec.providers)
    return "onnxruntime" in backend(spec.backend).modules and not compiled and spec.precision not in _CAST


# ------------------------------------------------------------------------------------------------ after it


def _how_to_run(cell: _Cell) -> dict[str, Any]:
    return {
        "batch": None if cell.asked("fixed_batch") else cell.spec.batch,
        "allow_fallback": cell.asked("allow_fallback", False),
    }


def _bench(cell: _Cell) -> None:
    assert cell.engine is not None
    spec = cell.spec
    values = {**cell.asked("bench", {}), **_how_to_run(cell)}
    record = bench(cell.engine, isolate=True, **values)
    record = replace(record, engine=str(cell.result.engine))
    cell.learn(bench=record)
    place = cell.run / BENCHMARK / f"{spec.label}.json"
    report = BenchReport.of(record, {"record": f"{BENCHMARK}/{spec.label}.json"})
    config, runtime, _, _ = settled(None, None, None, values)
    asked = [*words(config), *words(runtime), "--isolate"]
    command = shlex.join(["trt-engine", "bench", str(cell.result.engine), *asked])
    raw = msgspec.json.format(msgspec.json.encode(document("bench", report, command=command)), indent=2)
    files.write_whole(place, raw + b"\n")
    cell.learn(files={**cell.result.files, "record": f"{BENCHMARK}/{spec.label}.json"})


def _evaluate(cell: _Cell) -> None:
    from trt_engine.api import evaluating  # needs what the core package lacks

    assert cell.engine is not None
    dataset = cell.path(cell.asked("dataset"))
    assert dataset is not None
    report = evaluating.run(
        cell.engine,
        dataset,
        batch=cell.spec.batch,
        limit=cell.asked("limit"),
        seed=cell.asked("seed"),
        preprocess=_preprocess(cell, "preprocess"),
        allow_fallback=cell.asked("allow_fallback", False),
    )
    report = replace(report, engine=str(cell.result.engine), dataset=str(cell.asked("dataset")))
    cell.learn(evaluated=report, images_digest=report.dataset_digest)
    cell.result, error = judged(cell.result, cell.job.held_against, cell.job.reference)
    if error is not None:
        raise error


_NOT_APPLIED = "`max_drop` was not applied"


def judged(result: CellResult, against: str, reference: Mapping[str, float]) -> tuple[CellResult, AccuracyError | None]:
    """The result held against the figures of the cell `against`, by its `max_drop`, and the error where it lost more.

    Where one of the two has no figure nothing is judged, and a warning says so.
    """
    report, limit = result.evaluated, result.spec.settings.get("max_drop")
    if report is None or limit is None or not against:
        return result, None
    main = MAIN_FIGURE[report.task]
    before, now = reference.get(main), report.metrics.get(main)
    others = tuple(text for text in result.warnings if not text.startswith(_NOT_APPLIED))
    if before is None or now is None or before < 0 or now < 0:
        whose = f"the baseline `{against}` has" if before is None or before < 0 else "this cell has"
        said = f"{_NOT_APPLIED}: {whose} no figure `{main}`"
        report = replace(report, max_drop=None, passed=None)
        return replace(result, evaluated=report, warnings=(*others, said)), None
    drop = before - now
    result = replace(result, evaluated=replace(report, max_drop=limit, passed=drop <= limit), warnings=others)
    if drop <= limit:
        return result, None
    return result, AccuracyError(
        f"{main} is {now:.4f}, the baseline's is {before:.4f}: a drop of {drop:.4f}, allowed is {limit:g}",
        hint="`accuracy: {max_drop: ...}` allows more; `trt-engine search` finds the layers to leave out",
    )


def _profile(cell: _Cell) -> None:
    """The ladder of `te.profile`; raw files of Nsight go where a run keeps them."""
    assert cell.engine is not None
    spec = cell.spec
    place = cell.run / PROFILES / spec.label
    inferences, counted = cell.asked("inferences", 20), _COUNTED if "ncu" in spec.modes else 0
    values = _how_to_run(cell)
    config, runtime, _, _ = settled(None, None, None, dict(values))
    asked = ["--inferences", str(inferences), *(["--ncu", str(counted)] if counted else [])]
    asked += [*words(config), *words(runtime)]
    report = profile(
        cell.engine,
        out=place,
        inferences=inferences,
        ncu=counted,
        yes=True,
        command=shlex.join(["trt-engine", "profile", str(cell.result.engine), *asked]),
        **values,
    )
    moved = raw_files_moved(place, cell.run / SYSTEMS / spec.label, (nsys.REPORT, nsys.DATABASE, nsys.LOG))
    moved |= raw_files_moved(place, cell.run / COMPUTE / spec.label, (ncu.REPORT, ncu.OUTPUT, ncu.LOG))
    places = {kind: moved.get(Path(text), Path(text)) for kind, text in report.files.items()}
    names = {
        kind: str(path.relative_to(cell.run))
        for kind, path in places.items()
        if path.is_relative_to(cell.run) and kind not in ("records", "log")  # the cell has its own
    }
    opens = {
        kind: said.replace(report.files[kind], str(Path(cell.job.shown) / names[kind]))
        for kind, said in report.opens.items()
        if kind in names
    }
    report = replace(report, engine=str(cell.result.engine), files=names, opens=opens)
    cell.learn(profile=report, files={**names, **cell.result.files}, opens={**cell.result.opens, **opens})
    for text in passed_over(report, spec.modes):
        cell.warn(text)


def passed_over(report: ProfileReport, modes: Sequence[str]) -> Iterator[str]:
    """A warning for each of Nsight's tools that is among the modes and was not to be had."""
    for rung in report.rungs:
        if rung.name in ("nsys", "ncu") and rung.name in modes and not rung.used:
            yield said_left_out(rung.name, f"{rung.reason}\nhint: {rung.fix}" if rung.fix else rung.reason)


def raw_files_moved(place: Path, folder: Path, names: Sequence[str]) -> dict[Path, Path]:
    """Raw files of an instrument put where a run keeps them: where each was, and is."""
    there = [place / name for name in names if (place / name).is_file()]
    if there:
        files.ensure_folder(folder)
    return {path: path.replace(folder / path.name) for path in there}

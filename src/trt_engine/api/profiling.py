"""`profile`: where the time of an engine goes, by the best instrument that is to be had, and what to try next.

A plain measurement comes first, with no profiler near it: its figures are what everything else is held against. Then the
ladder: Nsight Systems, CUPTI, PyTorch's profiler, the backend's own layer times, the host's clock. A rung that is passed
over has its reason in the report. What was measured under a profiler is never mixed into the benchmark's figures.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import shlex
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import msgspec

from trt_engine.api.loading import admit
from trt_engine.api.measuring import LOG, RECORDS, keep, kept_if_used, sealed, settled
from trt_engine.backend import Backend, backends, runner_of
from trt_engine.backend import settled as on_device
from trt_engine.benchmark.loop import Parts, batch_of, feeds_for, in_force, measure, parts, ready
from trt_engine.config import BenchConfig, BuildConfig, RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine, is_bare_model
from trt_engine.errors import (
    DeviceLost,
    Interrupted,
    MemoryExhausted,
    ProfileError,
    SetupError,
    ShapeError,
    TrtEngineError,
    UsageError,
)
from trt_engine.figures import figure, in_ms, percent
from trt_engine.files import json_bytes, path_of, write_whole
from trt_engine.profiling import ncu as nsight_compute
from trt_engine.profiling import nsight, nsys
from trt_engine.profiling.attribution import Attribution, attribute, carried_over, onnxruntime_spans
from trt_engine.profiling.capture import Capture, capture, hear_ranges, instruments
from trt_engine.profiling.ceilings import ceilings as device_ceilings
from trt_engine.profiling.kernels import category_shares, kernel_rows, split
from trt_engine.profiling.layers import layer_profile, layer_shares, precision_shares, work_of
from trt_engine.profiling.timeline import write_timeline
from trt_engine.profiling.verdict import verdict
from trt_engine.records import BenchRecord, Ceilings, document, summarize
from trt_engine.runfiles import PROFILE
from trt_engine.runtime.feeds import shapes_of
from trt_engine.tensors import Shape, closest
from trt_engine.traces import CategoryShare, Counters, KernelRow, LayerProfile, ProfileReport, Rung, RungName, TimeSplit

__all__ = ["RUNGS", "TIMELINE", "device_of_model", "profile", "run_folder", "targets"]

log = logging.getLogger(__name__)

TIMELINE = "timeline.json"
"""In `out`, beside the document `--json` prints: the timeline that ui.perfetto.dev opens."""
RUNGS: tuple[RungName, ...] = get_args(RungName)
_IN_PROCESS: tuple[RungName, ...] = ("cupti", "torch")
_DURATION_S, _WARMUP_S = 2.0, 0.5
"""Of the measurement without a profiler, unless told otherwise."""
_LEAST_TOLD = 0.6
"""Of an inference: where the layers' times make up less, a reader must know."""

OnStage = Callable[[str], None]
"""Told what is done next, in words."""


def profile(
    engine: Engine | Path | str,
    *,
    out: Path | str | None = None,
    rung: RungName | None = None,
    inferences: int = 50,
    warmup: int = 10,
    ncu: int = 0,
    ceilings: bool = False,
    yes: bool = False,
    command: str = "",
    config: BenchConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    on_stage: OnStage | None = None,
    **values: Any,
) -> ProfileReport:
    """Where the time of an engine (or of an `.onnx` model, built into the store first) goes.

    `values` are settings of `BenchConfig` (`batch=`, `shapes=`, `inputs=`), `RuntimeConfig` (`device=`) and, for a model,
    `BuildConfig`. `inferences` are profiled after `warmup`; `rung` takes that instrument or none; `ncu` measures the
    counters of that many kernels; `ceilings` has the device's ceilings measured where none are kept. Everything goes to the
    folder `out`, one of its own under `runs/` by default. Out of memory halves the batch, and says so.

    Raises `UsageError` where the folder holds a profile (`yes` overwrites it), `SetupError` where the rung asked for is not
    to be had, `MemoryExhausted` where half the batch is none, `Interrupted` after Ctrl-C: its `partial` is the report of
    what was found until then, which is written too.
    """
    _check(rung, inferences, warmup, ncu)
    config, runtime, build, named = settled(config, runtime, build, values)
    if config.duration_s is None:
        config = dataclasses.replace(config, duration_s=_DURATION_S)
    if config.warmup_s is None:
        config = dataclasses.replace(config, warmup_s=_WARMUP_S)
    source = engine.path if isinstance(engine, Engine) else path_of(engine, "`engine`")
    folder = run_folder(source) if out is None else path_of(out, "`out`")
    targets(folder, yes=yes)
    if rung in (None, "cupti") and _watched_here(engine, runtime, build, rung):
        hear_ranges()  # before a library looks for who listens: it looks once
    said: list[str] = []
    stage = on_stage or (lambda text: None)
    with kept_if_used(folder):
        while True:
            opened: Engine | None = None
            work: _Profiling | None = None
            try:
                opened = sealed(engine, config, runtime, build, named)
                opened.verify()
                work = _Profiling(opened, config, runtime, folder, rung, inferences, warmup, ncu, ceilings, stage, said)
                if is_bare_model(engine):
                    work.typed = work.model = str(source)
                work.settings = {**build.options, **runtime.options}
                return work.run(command)
            except (MemoryExhausted, MemoryError) as error:
                told = error.message if isinstance(error, MemoryExhausted) else "this machine has no more"
                smaller = _halved(opened, config)
                if smaller is None:
                    if isinstance(error, MemoryExhausted):
                        raise
                    raise MemoryExhausted(f"out of memory: {told}", hint="a smaller `--batch`") from error
                config, batch, half = smaller
                said.append(f"out of memory at batch {batch} ({told}): profiled at {half}")
                log.warning("%s", said[-1])
                work = None  # its feeds go before others are made


def _watched_here(engine: Engine | Path | str, runtime: RuntimeConfig, build: BuildConfig, rung: str | None) -> bool:
    """Whether this process is what a profiler will watch: not where a processor, or a process of its own, does the work."""
    if is_bare_model(engine):
        name, device = build.backend, device_of_model(runtime, build)
    else:
        passport = (engine if isinstance(engine, Engine) else Engine.open(engine)).passport
        name, device = passport.backend, runtime.device or passport.device
    card = backends().get(name)
    if card is None or parse_device(device)[0] == "cpu":
        return False
    if (runner := runner_of(card)) is card and runner.has("measure"):
        return False
    if rung is None:
        with contextlib.suppress(SetupError):
            return not nsight.find("nsys")
    return True


def device_of_model(runtime: RuntimeConfig, build: BuildConfig) -> str:
    """The device a model is built for, and profiled on: the one named, else the first of the backend's."""
    return on_device(build if runtime.device is None else dataclasses.replace(build, device=runtime.device)).device


def targets(folder: Path, *, yes: bool) -> tuple[Path, ...]:
    """The files a profile writes into that folder; `UsageError` where a profile is in it and may not be overwritten."""
    for name in (PROFILE, TIMELINE):
        if (folder / name).exists() and not yes:
            raise UsageError(
                f"`{folder / name}` exists", hint="`--yes` overwrites it, or name another folder with `-o`"
            )
    return tuple(folder / name for name in (PROFILE, TIMELINE, RECORDS, LOG))


def run_folder(source: Path) -> Path:
    """Where a profile goes when nobody names a folder: `runs/YYYYMMDD_HHMMSS_NAME_profile`."""
    name = re.sub(r"[^\w.-]", "_", source.name.partition(".")[0])[:100] or "engine"
    stamp = time.strftime("%Y%m%d_%H%M%S")
    found, number = Path("runs") / f"{stamp}_{name}_profile", 1
    while found.exists():
        number += 1
        found = Path("runs") / f"{stamp}_{name}_profile_{number}"
    return found


def _check(rung: str | None, inferences: int, warmup: int, ncu: int) -> None:
    if rung is not None and rung not in RUNGS:
        raise UsageError(f"there is no rung `{rung}`", hint=closest(str(rung), RUNGS))
    for name, value, least in (("inferences", inferences, 1), ("warmup", warmup, 0), ("ncu", ncu, 0)):
        if not isinstance(value, int) or value < least:
            raise UsageError(f"`{name}` is {value!r}, expected {least} or more", hint=f"`--{name} {max(least, 10)}`")


def _halved(engine: Engine | None, config: BenchConfig) -> tuple[BenchConfig, int, int] | None:
    """The settings with half the batch, and both; None where the batch cannot be made smaller."""
    if engine is None:  # a model that could not be built
        if config.batch is None or config.batch < 2:
            return None
        half = config.batch // 2
        shapes = {
            name: (half, *shape[1:]) if shape and shape[0] == config.batch else shape
            for name, shape in config.shapes.items()
        }
        return dataclasses.replace(config, batch=half, shapes=shapes), config.batch, half
    if config.inputs is not None or not engine.signature.batch_axis:
        return None
    given = _shapes_of(engine, config)
    if given is None:
        return None
    batch = batch_of(engine.signature, given)
    half = batch // 2
    if half < 1:
        return None
    smaller = {name: (half, *shape[1:]) if shape and shape[0] == batch else shape for name, shape in given.items()}
    changed = dataclasses.replace(config, batch=half, shapes=smaller)
    return None if _shapes_of(engine, changed) is None else (changed, batch, half)


def _shapes_of(engine: Engine, config: BenchConfig) -> dict[str, Shape] | None:
    """The shapes that would be asked for, without making the inputs, which may be what did not fit; None for none."""
    for ranges in engine.passport.profiles or (None,):
        with contextlib.suppress(ProfileError, ShapeError):
            return shapes_of(engine.signature, ranges, batch=config.batch, overrides=config.shapes)
    return None


# ------------------------------------------------------------------------------------------------ the work


class _Profiling:
    """One engine under one ladder, and what was found until now. Made, run once, and let go."""

    def __init__(
        self,
        engine: Engine,
        config: BenchConfig,
        runtime: RuntimeConfig,
        folder: Path,
        wanted: RungName | None,
        inferences: int,
        warmup: int,
        ncu: int,
        ceilings: bool,
        stage: OnStage,
        said: list[str],
    ) -> None:
        self.engine, self.config, self.runtime, self.folder = engine, config, runtime, folder
        self.typed = str(engine.path)
        """What the commands of the verdict name: the engine, or the model somebody gave."""
        source = engine.passport.model.file
        self.model = source if source and Path(source).is_file() else "MODEL.onnx"
        self.settings: dict[str, str] = {}
        """The `-O` that were given, which those commands repeat."""
        self.wanted, self.inferences, self.warmup = wanted, inferences, warmup
        self.ncu, self.measure_ceilings, self.stage = ncu, ceilings, stage
        self.began = time.time()
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.card: Backend = admit(engine, runtime)
        self.runner: Backend = runner_of(self.card)
        self.apart = self.runner is self.card and self.card.has("measure")
        """The backend measures in a process of its own: nothing in this one sees its work."""
        self.feeds, self.inputs = feeds_for(engine, config)
        self.shapes: dict[str, Shape] = {
            name: tuple(int(size) for size in value.shape) for name, value in self.feeds.items()
        }
        self.batch = batch_of(engine.signature, self.shapes)
        self.device = runtime.device or engine.passport.device
        self.record: BenchRecord | None = None
        self.parts: tuple[Parts, ...] = ()
        self.rungs: dict[str, Rung] = {}
        self.trying = ""
        """The rung that is at work."""
        self.capture: Capture | None = None
        self.layers: LayerProfile | None = None
        self.attribution: Attribution | None = None
        self.counters: tuple[Counters, ...] = ()
        self.ceilings: Ceilings | None = None
        self.files: dict[str, str] = {}
        self.warnings: list[str] = said

    def run(self, command: str) -> ProfileReport:
        """The whole ladder; the report is written before it is returned, or before `Interrupted` is raised."""
        self._refuse_early()
        try:
            self._measure()
            self._ceilings()  # before an instrument is in the process: a launch costs more with one
            self._watch()
            self._layers()
            self._attribute()
            self._counters()
        except (KeyboardInterrupt, Interrupted) as stop:
            partial = getattr(stop, "partial", None)
            if isinstance(partial, BenchRecord):
                self.record = partial
                keep(partial, None, self.folder)
            elif isinstance(partial, Capture):
                self.capture = partial
                self._use(self.trying, f"{partial.instrument}: interrupted after {len(partial.inferences)} inferences")
                self.warnings += partial.warnings
            elif isinstance(partial, tuple):
                self.counters = partial
                self._use("ncu", f"interrupted after the counters of {len(partial)} kernels")
            if self.record is None:
                raise Interrupted(
                    "interrupted before anything was measured", hint="the same command profiles again"
                ) from None
            for name in RUNGS:
                if name not in self.rungs:
                    self._pass(name, "interrupted before its turn")
            report = self._written(command, complete=False)
            raise Interrupted(
                f"interrupted; what was found until then is in `{self.folder / PROFILE}`",
                hint="the same command with `--yes` profiles again",
                partial=report,
            ) from None
        return self._written(command, complete=True)

    # -------------------------------------------------------------------------------- the ladder

    def _refuse_early(self) -> None:
        """`SetupError` for a rung that is known not to be had, before minutes are spent."""
        if self.wanted in ("nsys", *_IN_PROCESS) and (why := self._no_device_work(self.wanted)) is not None:
            raise _unavailable(self.wanted, why, None)
        if self.wanted == "layers" and not self.runner.has("profile"):
            raise _unavailable("layers", f"the backend `{self.runner.name}` tells no layer times", None)
        if self.wanted in _IN_PROCESS:
            found = next((item for item in instruments() if item.name == self.wanted), None)
            if found is not None and not found.used:
                raise _unavailable(self.wanted, found.reason, found.fix)

    def _no_device_work(self, rung: str) -> str | None:
        """Why that rung would see nothing of this engine's work."""
        if parse_device(self.device)[0] == "cpu":
            return f"there is no GPU to watch: `{self.device}` runs the engine"
        if self.apart and rung in _IN_PROCESS:
            return f"the backend `{self.card.name}` runs in a process of its own"
        return None

    def _measure(self) -> None:
        """The figures everything is held against, with no profiler near."""
        self.stage("measuring without a profiler")
        if self.apart:
            self.record = self.card.call("measure")(self.engine, self.config, self.runtime)
        else:
            session = self.runner.half("runtime")().load(self.engine, self.runtime)
            try:
                self.device, protocol = in_force(session, self.config)
                self.record = measure(session, self.engine, self.config)
                self.parts = parts(
                    session, self.engine, self.feeds, protocol, queries=self.inferences, warmup=self.warmup
                )
            finally:
                session.close()
        assert self.record is not None
        keep(self.record, None, self.folder)

    def _watch(self) -> None:
        """The device's own activities, by the first instrument that can tell them."""
        for name in ("nsys", *_IN_PROCESS):
            if self.wanted is not None and self.wanted != name:
                self._pass(name, f"`--rung {self.wanted}` was asked for")
            elif self.capture is not None:
                self._pass(name, "not needed: a rung above was to be had")
            elif (why := self._no_device_work(name)) is not None:
                self._pass(name, why)
            else:
                self._try(name)

    def _try(self, name: str) -> None:
        self.stage(f"profiling with {name}")
        self.trying = name
        try:
            found = self._by_nsys() if name == "nsys" else self._in_process(name)
        except (MemoryExhausted, DeviceLost):
            raise
        except SetupError as error:
            if self.wanted == name:
                raise _unavailable(name, error.message, error.hint) from error
            self._pass(name, error.message, error.hint)
            log.info("%s is passed over: %s", name, error.message)
            return
        self.capture = found
        kernels = sum(item.kind == "kernel" for item in found.activities)
        self._use(name, f"{found.instrument}: {kernels} kernels in {len(found.inferences)} inferences")
        self.warnings += found.warnings

    def _by_nsys(self) -> Capture:
        return nsys.collect(
            self.engine.path,
            self.folder,
            config=self.config,
            device=self.device,
            inferences=self.inferences,
            warmup=self.warmup,
            runtime=self.runtime,
        )

    def _in_process(self, name: str) -> Capture:
        """One inference for each call of a session of its own, watched from inside this process."""
        found = next(item for item in instruments() if item.name == name)
        if not found.used:  # before an engine is loaded for it
            raise SetupError(found.reason, hint=found.fix)
        session = self.runner.half("runtime")().load(self.engine, self.runtime)
        try:
            _, protocol = in_force(session, self.config, events=False)
            with ready(session, self.engine, self.feeds, protocol, []) as query:
                assert query.call is not None
                return capture(query.call, inferences=self.inferences, warmup=self.warmup, rung=name)  # type: ignore[arg-type]
        finally:
            session.close()

    def _layers(self) -> None:
        """The backend's own layer times: a table of their own above, the rung itself where nothing above was to be had."""
        if self.wanted == "host":
            self._pass("layers", "`--rung host` was asked for")
        elif not self.runner.has("profile"):
            self._pass("layers", f"the backend `{self.runner.name}` tells no layer times")
        else:
            self.stage("asking the backend for its layers' times")
            try:
                self.layers = layer_profile(
                    self.runner,
                    self.engine,
                    self.feeds,
                    self.runtime,
                    inferences=self.inferences,
                    warmup=self.warmup,
                    keep=self.folder,
                )
            except (MemoryExhausted, DeviceLost, Interrupted):
                raise
            except TrtEngineError as error:
                if self.wanted == "layers":
                    raise
                self._pass("layers", error.message, error.hint)
                log.warning("no layer times: %s", error.message)
            else:
                self._use("layers", f"{self.layers.instrument}: {len(self.layers.rows)} layers")
                self.warnings += self.layers.notes
        told = self.capture is not None or (self.layers is not None and self.layers.clock != "launch")
        if told and self.wanted != "host":
            self._pass("host", "not needed: a rung above was to be had")
        else:
            self._use("host", "the host's clock around whole inferences")

    def _attribute(self) -> None:
        """Which layer launched which kernel: by names and ranges, else by a capture with the nodes' trace."""
        if self.capture is None:
            return
        self.attribution = found = attribute(self.capture, layers=self.layers)
        if not found.layers and self.runner.has("traced"):
            self.stage("profiling once more with the nodes' names, to tell whose kernels they are")
            self.attribution = found = self._by_trace(self.capture) or found
        if found.note:
            self.warnings.append(f"layers of kernels: {found.note}")

    def _by_trace(self, seen: Capture) -> Attribution | None:
        """From a second capture, in which the backend writes its nodes down; None, said, where that is not to be had."""
        trace = self.folder / "nodes.json"
        try:
            with self.runner.call("traced")(self.engine, self.feeds, self.runtime, trace=trace) as infer:
                named = capture(infer, inferences=min(5, self.inferences), warmup=self.warmup, rung=self._watched_by)
            spans = onnxruntime_spans(trace, named.inferences, named.launches)
            return carried_over(named, attribute(named, spans=spans), seen)
        except (MemoryExhausted, DeviceLost, Interrupted):
            raise
        except TrtEngineError as error:
            log.info("no layers of kernels by the nodes' trace: %s", error.message)
            return None
        finally:
            trace.unlink(missing_ok=True)

    @property
    def _watched_by(self) -> RungName | None:
        """The instrument that has watched this process: another is refused."""
        return next((name for name in _IN_PROCESS if name in self.rungs and self.rungs[name].used), None)

    def _counters(self) -> None:
        """Nsight Compute's counters of the kernels that take most of the time."""
        if not self.ncu:
            return
        if (why := self._no_device_work("ncu")) is not None:
            self._pass("ncu", why)
            return
        if self.capture is None:
            self._pass("ncu", "no rung told which kernels run: there are no names to ask for")
            return
        self.stage(f"measuring the counters of {self.ncu} kernels with Nsight Compute")
        rows = kernel_rows(self.capture.activities, len(self.capture.inferences))
        try:
            self.counters = nsight_compute.counters(
                self.engine.path,
                self.folder,
                kernels=[row.name for row in rows[: self.ncu]],
                config=self.config,
                device=self.device,
                warmup=self.warmup,
                runtime=self.runtime,
                rules=True,
            )
        except (MemoryExhausted, DeviceLost):
            raise
        except SetupError as error:
            self._pass("ncu", error.message, error.hint)
            log.warning("no counters: %s", error.message)
        else:
            self._use("ncu", f"counters of {len(self.counters)} kernels")

    def _ceilings(self) -> None:
        if self.measure_ceilings:
            self.stage("measuring what the device can do at most, unless that is kept")
        try:
            self.ceilings = device_ceilings(self.device, measure=self.measure_ceilings)
        except TrtEngineError as error:
            self.warnings.append(f"the ceilings of `{self.device}` are not known: {error.message}")
            log.warning("%s", self.warnings[-1])

    def _use(self, name: str, reason: str) -> None:
        self.rungs[name] = Rung(name, True, reason)  # type: ignore[arg-type]

    def _pass(self, name: str, reason: str, fix: str | None = None) -> None:
        self.rungs[name] = Rung(name, False, reason, fix)  # type: ignore[arg-type]

    # -------------------------------------------------------------------------------- the report

    def _written(self, command: str, *, complete: bool) -> ProfileReport:
        """The report, with the timeline and `profile.json` in the folder."""
        self._timeline()
        self._raw_files()
        report = self._report(complete=complete)
        again = command or f"trt-engine profile {shlex.quote(self.typed)}"
        raw = msgspec.json.format(json_bytes(document("profile", report, command=again)), indent=2)
        write_whole(self.folder / PROFILE, raw + b"\n")
        return report

    def _timeline(self) -> None:
        if self.capture is None and (self.layers is None or self.layers.clock == "launch"):
            (self.folder / TIMELINE).unlink(missing_ok=True)  # that of the profile this one takes the place of
            return
        seen = self.capture
        path = write_timeline(
            self.folder / TIMELINE,
            activities=seen.activities if seen is not None else (),
            layers=self.layers if self.layers is not None and self.layers.clock != "launch" else None,
            windows=seen.inferences if seen is not None else (),
            launches=seen.launches if seen is not None else (),
            layers_of=self.attribution.layers if self.attribution is not None else None,
            title=f"{self.engine.path.name} on {self.device}, batch {self.batch}",
        )
        self.files["timeline"] = str(path)

    def _raw_files(self) -> None:
        """What instruments left in the folder, by what it is."""
        for kind, suffix in (("nsys", ".nsys-rep"), ("ncu", ".ncu-rep")):
            # what lay in the folder before is of another profile; a file's clock may be a tick behind
            found = [one for one in sorted(self.folder.rglob(f"*{suffix}")) if one.stat().st_mtime > self.began - 0.1]
            if found:
                self.files[kind] = str(found[-1])
        if self.layers is not None and self.layers.raw is not None:
            self.files[self.runner.name] = self.layers.raw
        self.files |= {"records": str(self.folder / RECORDS), "log": str(self.folder / LOG)}
        self.files["profile"] = str(self.folder / PROFILE)

    def _opens(self) -> dict[str, str]:
        opens: dict[str, Callable[[Path], str]] = {
            "nsys": nsys.opens, "ncu": nsight_compute.opens, "timeline": _in_perfetto, "onnxruntime": _in_perfetto,
        }  # fmt: skip
        return {name: opens[name](Path(place)) for name, place in self.files.items() if name in opens}

    def _report(self, *, complete: bool) -> ProfileReport:
        record = self.record
        assert record is not None
        seen, layers = self.capture, self.layers
        parts_ms = self._split(record)
        kernels: tuple[KernelRow, ...] = ()
        categories: tuple[CategoryShare, ...] = ()
        if seen is not None:
            known = self.attribution
            kernels = kernel_rows(seen.activities, len(seen.inferences), known.layers if known is not None else None)
            categories = category_shares(kernels, len(seen.inferences))
        elif layers is not None and layers.clock != "launch":
            categories = layer_shares(layers)
            self.warnings += _far_apart(layers, parts_ms.wall_ms)
        work = work_of(self.engine, self.shapes, layers)
        self.warnings += work.notes
        precision = record.facts.get("precision") or self.engine.passport.precision.main or "unknown"
        facts = dict(record.facts)
        if work.flops is not None:
            facts["flops"] = str(work.flops)
            facts["flops_from"] = work.source
        if work.nbytes is not None:
            facts["nbytes"] = str(work.nbytes)
        facts["inputs"] = self.inputs
        if self.attribution is not None and self.attribution.layers:
            facts["layers_of_kernels"] = (
                f"by {self.attribution.how}: {percent(self.attribution.share)} of the kernels' time"
            )
        return ProfileReport(
            engine=str(self.engine.path),
            model=self.engine.passport.model.name,
            backend=self.engine.passport.backend,
            device=self.device,
            batch=self.batch,
            shapes=self.shapes,
            precision=precision,
            environment=record.environment,
            protocol=record.protocol,
            compute_ms=summarize(record.compute_ms, record.protocol.percentile_rule),
            split=parts_ms,
            rungs=tuple(self.rungs.values()),
            layers=layers,
            kernels=kernels,
            categories=categories,
            verdict=verdict(
                split=parts_ms,
                layers=layers,
                kernels=kernels,
                ceilings=self.ceilings,
                flops=work.flops,
                nbytes=work.nbytes,
                batch=self.batch,
                device=self.device,
                precision=precision,
                engine=self.typed,
                model=self.model,
                settings=self.settings,
                most_batch=self._most_batch(),
                fixed_batch=bool(self.engine.signature.inputs) and not self.engine.signature.batch_axis,
            ),
            counters=self.counters,
            ceilings=self.ceilings,
            inferences=len(seen.inferences) if seen is not None else layers.inferences if layers is not None else 0,
            files=dict(self.files),
            opens=self._opens(),
            warnings=tuple(dict.fromkeys((*self.warnings, *record.warnings, *record.instability))),
            facts=facts,
            started=self.started,
            complete=complete and record.complete,
            precisions=precision_shares(layers) if layers is not None and layers.clock != "launch" else {},
            wall_s=record.wall_s,
        )

    def _most_batch(self) -> int | None:
        """The largest batch the commands of the verdict may ask for; None where a model is built anew for each."""
        if self.typed == self.model:
            return None
        rows = [
            min(span.max[0] for span in profile.ranges.values() if span.max)
            for profile in self.engine.passport.profiles
            if any(span.max for span in profile.ranges.values())
        ]
        return max(rows, default=None)

    def _split(self, record: BenchRecord) -> TimeSplit:
        """One inference by where its time goes, as far as this run measured it."""
        compute = statistics.median(record.compute_ms) if record.compute_ms else 0.0
        by_events = record.protocol.clock == "device events"
        wall = record.wall_s * 1e3 / record.queries if by_events and record.queries else compute
        h2d, d2h, gpu = _median(self.parts, "h2d_ms"), _median(self.parts, "d2h_ms"), None
        if self.parts:
            gpu = _median(self.parts, "compute_ms")
        elif by_events:  # a process of its own measured, with events
            gpu = compute
            h2d = statistics.median(record.h2d_ms) if record.h2d_ms else None
            d2h = statistics.median(record.d2h_ms) if record.d2h_ms else None
        if self.capture is not None:
            return split(self.capture, wall_ms=wall, gpu_ms=gpu, h2d_ms=h2d, d2h_ms=d2h)
        on_cpu = parse_device(self.device)[0] == "cpu"
        return TimeSplit(
            wall_ms=wall,
            h2d_ms=h2d,
            compute_ms=gpu if gpu is not None else compute if on_cpu else None,
            d2h_ms=d2h,
            gpu_ms=gpu,
        )


def _far_apart(layers: LayerProfile, wall_ms: float) -> Iterator[str]:
    """Why the layers' medians do not add up to an inference, where they are far from it."""
    medians, means = (sum(getattr(row, name) for row in layers.rows) for name in ("median_ms", "mean_ms"))
    if not layers.rows or medians >= _LEAST_TOLD * wall_ms:
        return
    held_up = means >= _LEAST_TOLD * (layers.wall_ms or wall_ms)
    yield f"the layers' medians add up to {figure(medians)} of {in_ms(wall_ms)}: " + (
        f"single layers were held up now and then (their means add up to {in_ms(means)}); is the machine busy?"
        if held_up
        else "the rest passes outside the layers"
    )


def _in_perfetto(trace: Path) -> str:
    return f"https://ui.perfetto.dev, `Open trace file`: {trace}"


def _median(found: tuple[Parts, ...], name: str) -> float | None:
    return statistics.median(getattr(item, name) for item in found) if found else None


def _unavailable(rung: str, reason: str, fix: str | None) -> SetupError:
    return SetupError(
        f"the rung `{rung}` is not to be had here: {reason}",
        hint=fix or "leave `--rung` out: the next one that is to be had is taken",
    )

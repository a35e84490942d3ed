"""`size`: from an ONNX file to the number of video streams it sustains (A1-A9, A12)."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import filelock
import msgspec

from trt_engine.api import building
from trt_engine.api.speed_check import speed_text
from trt_engine.backend import Backend, backend, settled
from trt_engine.benchmark.child import measure_in_child
from trt_engine.benchmark.log import render
from trt_engine.config import BenchConfig, BuildConfig, RuntimeConfig, SizeConfig, from_values, settings, words
from trt_engine.device import parse_device
from trt_engine.engine import Build, Engine, passport_path
from trt_engine.environment import Environment
from trt_engine.errors import (
    CapacityError,
    Interrupted,
    MemoryExhausted,
    ModelError,
    SetupError,
    TrtEngineError,
    UnstableError,
    UsageError,
)
from trt_engine.files import ensure_folder, explain, write_whole
from trt_engine.graph.census import precision_of
from trt_engine.graph.inspect import inspect_model
from trt_engine.graph.load import open_model, read_proto
from trt_engine.model import Model
from trt_engine.records import (
    BatchResult,
    BenchRecord,
    Check,
    CliffPoint,
    Finding,
    Protocol,
    SizeReport,
    Step,
    append,
    document,
)
from trt_engine.reporting.write import write_reports
from trt_engine.sizing import cliffs
from trt_engine.sizing.deepstream import NO_PICTURES, Nvinfer, benchmark_data, nvinfer
from trt_engine.sizing.doubling import Doubling, images_per_s, peak_streams, queries_per_s
from trt_engine.sizing.layout import Layout, layout_for
from trt_engine.sizing.preflight import Preflight, check_model_path, largest_batches
from trt_engine.vision.declaration import vision_of

__all__ = ["Plan", "gate", "plan", "run", "size"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a run is decided by, before anything is spent."""

    model: Model
    layout: Layout
    config: SizeConfig
    build: BuildConfig
    runtime: RuntimeConfig
    card: Backend
    batches: tuple[int, ...]
    """Every N the doubling may come to; the one fixed batch of a model that is not dynamic."""
    dynamic: bool
    command: str
    """The command line that repeats the run."""
    yes: bool = False
    """Overwrite what no run of ours has written."""
    stamps: tuple[tuple[int, int, int], ...] = ()
    """What the model's files looked like when they were digested."""
    precision_chosen: bool = False
    """Nobody asked for the precision: it is what a GPU is usually sized with."""

    def build_config(self, batch: int, largest: int | None = None) -> BuildConfig:
        """One dynamic engine: min 1, opt = max = N; `largest` is the maximum of the scan's engine."""
        build = self.build
        if self.card.builds_log and build.timing_cache is None:
            build = replace(build, timing_cache=self.layout.timing_cache)
        return replace(build, batch=(1, batch, largest or batch)) if self.dynamic else build

    def to_build(self, batch: int, largest: int | None = None, log_file: Path | None = None) -> building.BuildPlan:
        """What building that engine would do: refuses wrong settings, shapes nobody gave, a file in the way."""
        return self._planned(
            self.build_config(batch, largest), self.layout.engine(largest or batch, dynamic=self.dynamic), log_file
        )

    def to_build_alone(self, batch: int, log_file: Path | None = None) -> building.BuildPlan:
        """The engine of one batch and no other, for a graph whose shapes the ladder had to fix."""
        config = replace(self.build_config(batch), batch=(batch,) * 3)
        return self._planned(config, self.layout.engine(batch, dynamic=False), log_file)

    def _planned(self, config: BuildConfig, out: Path, log_file: Path | None) -> building.BuildPlan:
        if _stamps(self.model) != self.stamps:
            raise ModelError(
                f"`{self.model.path}` was changed while it was sized",
                hint="run it again when the model no longer changes",
            )
        return building.plan(
            self.model,
            out=out,
            config=config,
            yes=self.yes,
            log_file=log_file,
        )

    def bench_config(self, batch: int, *, short: bool = False) -> BenchConfig:
        """Compute only, never transfers; `short` is a measurement of the scan."""
        duration_s, warmup_s = self.config.duration_s, self.config.warmup_s
        if short:
            duration_s, warmup_s = min(duration_s, max(0.2, duration_s / 10)), min(warmup_s, 0.2)
        return BenchConfig(
            protocol=self.config.protocol,
            batch=batch if self.dynamic else None,
            duration_s=duration_s,
            warmup_s=warmup_s,
            transfers=False,
        )


def size(
    model: Path | str,
    *,
    out: Path | str | None = None,
    config: SizeConfig | None = None,
    build: BuildConfig | None = None,
    runtime: RuntimeConfig | None = None,
    yes: bool = False,
    **values: Any,
) -> SizeReport:
    """How many video streams a model sustains: inspected, built, measured, doubled, reported.

    Settings of `SizeConfig` and `BuildConfig` may be given by name: `te.size("model.onnx", max_batch=8)`. Everything is in
    the run folder (`artifacts` of the report) before an error of a gate (`strict`, `need_streams`) is raised.
    """
    chosen, built = _settings(config or SizeConfig(), build or BuildConfig(), values)
    made = plan(model, out=out, config=chosen, build=built, runtime=runtime, yes=yes)
    report = run(made)
    gate(report, made.config)
    return report


def _settings(config: SizeConfig, build: BuildConfig, values: Mapping[str, Any]) -> tuple[SizeConfig, BuildConfig]:
    """Both configs with the values put in place by name; a name of neither is refused."""
    own = {item.name for item in settings(BuildConfig)} - {item.name for item in settings(SizeConfig)}
    given: dict[type, dict[str, Any]] = {SizeConfig: {}, BuildConfig: {}}
    for name, value in values.items():
        given[BuildConfig if name in own else SizeConfig][name] = value
    changed = {kind: from_values(kind, part) for kind, part in given.items()}
    return (
        replace(config, **{name: getattr(changed[SizeConfig], name) for name in given[SizeConfig]}),
        replace(build, **{name: getattr(changed[BuildConfig], name) for name in given[BuildConfig]}),
    )


def plan(
    model: Path | str,
    *,
    out: Path | str | None = None,
    config: SizeConfig | None = None,
    build: BuildConfig | None = None,
    runtime: RuntimeConfig | None = None,
    yes: bool = False,
    command: str | None = None,
) -> Plan:
    """The run that would be made; raises for a wrong setting, a model that is none, and shapes nobody gave."""
    config, build = config or SizeConfig(), settled(build or BuildConfig())
    _check_settings(build)
    path = Path(model)
    card = backend(build.backend)
    check_model_path(path)
    stamps = _stamps(opened := open_model(path))
    if not opened.signature.inputs:
        raise UsageError(f"`{path}` has no inputs: there is no batch to size", hint=f"`trt-engine inspect {path}`")
    dynamic = any(spec.shape and spec.shape[0] < 0 for spec in opened.signature.inputs)
    batches = largest_batches(config) if dynamic else (_fixed_batch(opened),)
    layout = layout_for(path, Path(out) if out is not None else None, card.payload_suffix)
    build, chosen = _usual_precision(opened, build)
    made = Plan(
        model=opened,
        layout=layout,
        config=config,
        build=build,
        runtime=runtime or RuntimeConfig(allow_fallback=build.allow_fallback),  # the rest is in the passport
        card=card,
        batches=batches,
        dynamic=dynamic,
        command=command or _spelled(path, out, config, build),
        yes=yes,
        stamps=stamps,
        precision_chosen=chosen,
    )
    layout.check(yes=yes)
    made.to_build(batches[0])
    return made


def _check_settings(build: BuildConfig) -> None:
    if build.batch or build.profiles:
        raise UsageError(
            "`size` chooses the batch of its engines itself: min 1, opt = max = N",
            hint="`--start-batch` and `--max-batch` bound N, `--shapes` gives other dynamic sizes",
        )


def _usual_precision(model: Model, build: BuildConfig) -> tuple[BuildConfig, bool]:
    """FP16 on a GPU for an FP32 graph when nobody asked for a precision, and whether that was chosen here."""
    if build.precision is not None or parse_device(build.device)[0] != "cuda":
        return build, False
    if precision_of(read_proto(model.path)) != "fp32":
        return build, False
    return replace(build, precision="fp16"), True


def _stamps(model: Model) -> tuple[tuple[int, int, int], ...]:
    """Inode, size and time of change of the model's files: as long as they stay, so does its digest."""
    try:
        found = [path.stat() for path in (model.path, *(item.path for item in model.external))]
    except OSError as error:
        raise explain(error, model.path, "read") from error
    return tuple((item.st_ino, item.st_size, item.st_mtime_ns) for item in found)


def _fixed_batch(model: Model) -> int:
    return next((spec.shape[0] for spec in model.signature.inputs if spec.shape), 1)


def _spelled(path: Path, out: Path | str | None, config: SizeConfig, build: BuildConfig) -> str:
    """The command line of a run that was started from Python."""
    given = ["-o", str(out)] if out is not None else []
    return shlex.join(["trt-engine", "size", str(path), *given, *words(config), *words(build)])


# ------------------------------------------------------------------------------------------------ the run


def run(plan: Plan) -> SizeReport:
    """Carry the plan out. Interrupted or failed, what was known is in `size.json`, and the error is raised."""
    sizing = _Run(plan)
    try:
        return sizing.go()
    except (KeyboardInterrupt, Interrupted) as error:
        partial = getattr(error, "partial", None)
        where = sizing.save_partial("interrupted", partial if isinstance(partial, BenchRecord) else None)
        raise Interrupted(
            f"interrupted during {sizing.doing}", hint=f"{where}`{plan.command}` runs it again"
        ) from error
    except Exception as error:
        if sizing.spent:
            sizing.save_partial("failed", None, error)
        raise


@dataclass
class _Run:
    """One run: its steps, what it has measured, what it writes."""

    plan: Plan
    steps: list[Step] = field(default_factory=list)
    checks: tuple[Check, ...] = ()
    findings: tuple[Finding, ...] = ()
    protocol: Protocol | None = None
    points: tuple[CliffPoint, ...] = ()
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    artifacts: dict[str, str] = field(default_factory=dict)
    doing: str = "preflight"
    spent: bool = False
    """True once the folder holds something of this run."""
    results: dict[int, tuple[BenchRecord, BatchResult]] = field(default_factory=dict)
    """By the record's `id`, which the record kept here holds on to."""
    scanning: bool = False
    scan_engines: int = 0
    scan_measurements: int = 0

    def __post_init__(self) -> None:
        self.doubling: Doubling[Engine] = Doubling(self.build, self.measure, self.plan.config.fps)

    def go(self) -> SizeReport:
        plan, layout = self.plan, self.plan.layout
        with self.step("preflight"):
            checks = Preflight(plan.model, layout, plan.config, plan.build, plan.card, plan.batches)
            try:
                self.checks = checks.run()
            finally:
                self.checks = tuple(checks.checks)
        with self.step("inspect"):
            self.inspect()
        ensure_folder(layout.folder)
        with _alone(layout):
            self.spent = True
            layout.clear()
            self.artifacts["folder"] = str(layout.folder)
            if plan.dynamic:
                self.doubling.run(plan.config.start_batch, plan.config.max_batch)
            else:
                self.fixed()
            self.tell_precision()
            self.tell_best()
            self.tell_pictures()
            if plan.config.scan:
                with self.step("scan", nested=True):
                    self.scanning = True
                    self.scan()
            with self.step("report"):
                self.write()
            report = self.report()
            self.write_size(report)
            return report

    @contextlib.contextmanager
    def step(self, name: str, *, nested: bool = False) -> Iterator[None]:
        """Time a step by name; the steps inside a nested one are part of it."""
        self.doing = name
        count, started = len(self.steps), time.perf_counter()
        log.info("%s", name)
        try:
            yield
        finally:
            if nested:
                del self.steps[count:]
            self.steps.append(Step(name, round(time.perf_counter() - started, 6)))

    def inspect(self) -> None:
        profile = self.plan.build_config(self.plan.batches[0]).resolve(self.plan.model.signature)[0]
        found = inspect_model(self.plan.model, shapes={name: span.min for name, span in profile.ranges.items()})
        self.findings = found.findings
        for spec in self.plan.model.signature.inputs:
            log.info("input %s, output %s", spec, ", ".join(map(str, self.plan.model.signature.outputs)))
        for finding in found.findings:
            if finding.severity != "info":
                log.warning("%s%s", finding.message, f" ({finding.hint})" if finding.hint else "")
                self.warnings.append(finding.message)
        if not self.plan.dynamic:
            self.notes.append(
                f"the model's batch is fixed at {self.plan.batches[0]}: measured at that batch only, nothing to double; "
                "an export with a dynamic batch can be sized"
            )
            log.warning("%s", self.notes[-1])

    # -------------------------------------------------------------------------------------------- build and measure

    def build(self, batch: int, largest: int | None = None) -> Engine:
        """The engine of `batch`, in the folder, with its log; a larger `largest` makes it the scan's."""
        plan, layout = self.plan, self.plan.layout
        ensure_folder(layout.folder / "engines")
        top = largest or batch
        target = layout.engine(top, dynamic=plan.dynamic)
        first = self.doubling.engines == 0 and not self.doubling.exhausted and largest is None
        log_path = layout.build_log(None if first else top)
        with self.step(f"build b{top}"):
            planned = plan.to_build(batch, largest, log_path)
            return self.carry_out(planned, target, log_path, top, "build_log" if first else f"build_log_b{top}")

    def build_alone(self, batch: int) -> Engine:
        """The engine of one batch, where the ladder fixed the shapes of the one that takes all."""
        plan, layout = self.plan, self.plan.layout
        target, log_path = layout.engine(batch, dynamic=False), layout.build_log(batch)
        with self.step(f"build b{batch} alone", nested=True):
            engine = self.carry_out(
                plan.to_build_alone(batch, log_path), target, log_path, batch, f"build_log_b{batch}"
            )
        self.doubling.engines += 1
        self.notes.append(f"batch {batch} has an engine of its own: the ladder fixed the shapes of the other")
        return engine

    def carry_out(self, planned: building.BuildPlan, target: Path, log_path: Path, batch: int, log_name: str) -> Engine:
        """Build what was planned, with its log and its warnings on disk."""
        plan = self.plan
        log.info("building `%s`: %s", target.name, " ".join(map(str, planned.profiles)))
        built: building.Built | None = None
        failure: BaseException | None = None
        try:
            built = building.carry_out(planned)
        except BaseException as error:
            failure = error
            raise
        finally:
            if not log_path.exists():  # the builder's own words are left as they are
                text = _build_log(plan, planned, target, built, failure)
                with contextlib.suppress(SetupError) if failure else contextlib.nullcontext():
                    write_whole(log_path, text)
            self.artifacts[log_name] = str(log_path)
        engine = built.engine
        self.artifacts[f"engine_b{batch}"] = str(engine.path)
        if built.cached:
            before = engine.passport.build.seconds
            self.notes.append(
                f"the engine of b{batch} came from the store, where it was built in {before:.1f} s before"
            )
        for warning in built.warnings:
            self.warn(f"build b{batch}: {warning}")
        return engine

    def measure(self, engine: Engine, batch: int) -> BenchRecord:
        """One measurement in a process of its own; its record and its log are on disk when this returns."""
        if not _takes(engine, batch) and self.plan.dynamic:
            engine = self.build_alone(batch)
        with self.step(f"measure b{batch}"):
            record = self.measured(engine, self.plan.bench_config(batch))
            path = self.plan.layout.bench_log(record.batch)
            write_whole(path, render(record))
            self.artifacts[f"log_b{record.batch}"] = str(path)
            done = self.result(record)
            log.info(
                "batch %d: %.2f QPS, %.1f images/s, mean %.3f ms, p99 %.3f ms on %s",
                record.batch, done.qps, done.images_per_s, done.compute_ms.mean, done.compute_ms.p99, record.device,
            )  # fmt: skip
            for reason in record.instability:
                log.warning("batch %d is not stable: %s", record.batch, reason)
            for warning in record.warnings:
                self.warn(warning)
        return record

    def measured(self, engine: Engine, config: BenchConfig) -> BenchRecord:
        if self.plan.card.has("measure"):
            record: BenchRecord = self.plan.card.call("measure")(engine, config, self.plan.runtime)
        else:
            record = measure_in_child(engine, config, self.plan.runtime, memory_limit=self.plan.config.memory_limit)
        self.keep(record)
        return record

    def keep(self, record: BenchRecord) -> None:
        """On disk at once, the scan's apart from those the count rests on."""
        path = self.plan.layout.scan_records if self.scanning else self.plan.layout.records
        append(path, record)
        self.artifacts["scan_records" if self.scanning else "records"] = str(path)
        self.protocol = self.protocol or record.protocol

    def fixed(self) -> None:
        """A model whose batch is fixed: one engine, one measurement, no doubling."""
        batch = self.plan.batches[0]
        engine = self.build(batch)
        self.doubling.engines += 1
        record = self.measure(engine, batch)
        self.doubling.measurements += 1
        self.doubling.good.append((engine, record))

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            log.warning("%s", text)

    def tell_precision(self) -> None:
        engine, _ = self.doubling.good[-1]
        found, asked = engine.passport.precision.main, self.plan.build.precision
        main = (found or asked or "fp32").upper()
        if self.plan.precision_chosen:
            why = "what a GPU is usually sized with; `--precision fp32` takes the graph as it is"
        elif asked is not None:
            why = f"{asked.upper()} was asked for"
        elif (written := engine.passport.build.written) is not None:
            here = "CPU" if parse_device(self.plan.build.device)[0] == "cpu" else "GPU"
            why = f"the graph is {written.upper()}; this {here} runs it in {main}"
        elif parse_device(self.plan.build.device)[0] == "cuda":
            why = "as the graph is"
        else:
            why = "as the graph is, on a CPU; engines for a GPU are usually FP16"
        self.notes.append(f"precision {main}: {why}")
        if engine.passport.speed is not None:
            self.notes.append(f"{main} is {speed_text(engine.passport.speed)}")
        self.notes.extend(_steps(engine.passport.build))

    def tell_best(self) -> None:
        """Say so when a smaller batch, batch 1 among them, delivered more than the one the count rests on."""
        tried, latency = [record for _, record in self.doubling.good], self.doubling.latency
        last = tried[-1]
        best = max(tried if latency is None else [*tried, latency], key=images_per_s)
        if images_per_s(best) > images_per_s(last):
            self.notes.append(
                f"batch {best.batch} delivered more: {float(images_per_s(best)):.1f} images/s, "
                f"{peak_streams(best, self.plan.config.fps)} streams"
            )

    def tell_pictures(self) -> None:
        """Say so when nothing the model takes can be a frame of video."""
        if not self.nvinfer(self.doubling.good[-1][1]).keys:
            self.notes.append(NO_PICTURES)

    # -------------------------------------------------------------------------------------------- scan

    def scan(self) -> None:
        """Measure N +- width: sizes up to N on the final engine, larger ones on one engine built for them."""
        if not self.plan.dynamic:
            self.notes.append("no scan: the model's batch is fixed")
            return
        engine, record = self.doubling.good[-1]
        top = record.batch
        sizes = cliffs.window(top, self.plan.config.scan_width)
        log.info("scanning batch %d to %d; sizes above %d need an engine of their own", sizes[0], sizes[-1], top)
        larger: Engine | None = None
        try:
            larger = self.build(top, sizes[-1])
            self.scan_engines += 1
        except MemoryExhausted as error:
            self.warn(f"the scan ends at batch {top}: {error.message}")
        by_size = {batch: engine if batch <= top else larger for batch in sizes}

        def measure(batch: int) -> float | None:
            chosen = by_size[batch]
            if chosen is None:
                return None
            self.doing = f"scan b{batch}"
            try:
                short = self.measured(chosen, self.plan.bench_config(batch, short=True))
            except MemoryExhausted as error:
                self.warn(f"the scan leaves batch {batch} out: {error.message}")
                return None
            self.scan_measurements += 1
            rate = float(images_per_s(short))
            log.info("scan: batch %d, %.1f images/s", batch, rate)
            return rate

        found = cliffs.find(sizes, measure)
        self.points = tuple(replace(point, engine=_name(by_size[point.batch])) for point in found)
        log.info("%s", cliffs.advice(self.points))
        if any(point.cliff for point in self.points):
            self.warn(cliffs.advice(self.points))

    # -------------------------------------------------------------------------------------------- what is written

    def result(self, record: BenchRecord) -> BatchResult:
        """A record in the terms of A6, worked out once: it may hold a million samples."""
        if id(record) not in self.results:
            self.results[id(record)] = record, _result(record)
        return self.results[id(record)][1]

    def report(self, stopped: str | None = None, error: Exception | None = None) -> SizeReport:
        """What is known now; complete unless it says why it stopped."""
        plan, doubling = self.plan, self.doubling
        engine, last = doubling.good[-1] if doubling.good else (None, None)
        tried = [record for _, record in doubling.good]
        first = [doubling.latency] if doubling.latency is not None and doubling.latency not in tried[-1:] else []
        results = [self.result(record) for record in (*first, *tried[-1:])]
        rates = [float(images_per_s(record)) for record in tried[-1:]]
        final = {"engine": str(engine.path), "passport": str(passport_path(engine.path))} if engine else {}
        video = self.nvinfer(last) if last else Nvinfer({})
        return SizeReport(
            model=str(plan.model.path),
            engine=str(engine.path) if engine else None,
            device=last.device if last else plan.build.device,
            backend=plan.build.backend,
            precision=(engine.passport.precision.main if engine else None) or plan.build.precision or "as the graph is",
            peak_streams=peak_streams(last, plan.config.fps) if last else None,
            images_per_s=rates[0] if rates else None,
            fps=plan.config.fps,
            batches=tuple(results),
            stopped_because=stopped or doubling.stopped_because or "static_batch",  # type: ignore[arg-type]
            engines_built=doubling.engines + self.scan_engines,
            measurements=doubling.measurements + self.scan_measurements,
            steps=tuple(self.steps),
            protocol=self.protocol,
            environment=last.environment if last else Environment.here(),
            artifacts=self.artifacts | final,
            tried=tuple(map(self.result, tried)),
            cliffs=self.points,
            complete=stopped is None,
            model_name=plan.layout.model_name,
            out_of_memory=tuple(doubling.exhausted),
            scan_engines=self.scan_engines,
            scan_measurements=self.scan_measurements,
            avoid=tuple(point.batch for point in self.points if point.cliff),
            preflight=self.checks,
            findings=self.findings,
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
            nvinfer=video.keys,
            nvinfer_notes=video.notes,
            error=_told(error) if error else None,
        )

    def nvinfer(self, last: BenchRecord) -> Nvinfer:
        """The keys for the engine measured, or for the one TensorRT would build under the same name."""
        layout, peak = self.plan.layout, peak_streams(last, self.plan.config.fps)
        on_gpu = last.device.startswith("cuda")
        measured = self.doubling.good[-1][0]
        profiles = measured.passport.profiles
        main = measured.passport.build.written or measured.passport.precision.main  # TensorRT's types are the graph's
        engine = replace(layout, suffix=".engine").engine(last.batch, dynamic=self.plan.dynamic)
        return nvinfer(
            measured.signature,
            {name: span.opt for name, span in profiles[0].ranges.items()} if profiles else {},
            vision_of(measured),
            onnx_file=_seen_from(layout.folder, self.plan.model.path),
            engine_file=f"engines/{engine.name}",
            batch=max(1, min(peak, last.batch)) if on_gpu and self.plan.dynamic else last.batch,
            precision=(main if on_gpu and main else None) or self.plan.build.precision or "fp16",
        )

    def write_size(self, report: SizeReport) -> None:
        made = document("size", report, command=self.plan.command)
        write_whole(self.plan.layout.size_json, msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n")

    def write(self) -> None:
        """`benchmark_data.json`, `size.json` and the reports made from it."""
        layout = self.plan.layout
        data = msgspec.json.format(msgspec.json.encode(benchmark_data(self.report())), indent=2)
        write_whole(layout.benchmark_data, data + b"\n")
        self.artifacts |= {"size": str(layout.size_json), "benchmark_data": str(layout.benchmark_data)}
        self.write_size(self.report())
        for path in write_reports(layout.folder).values():
            self.artifacts[path.name.replace(".", "_")] = str(path)

    def save_partial(self, why: str, measured: BenchRecord | None, error: Exception | None = None) -> str:
        """`size.json` of a run that did not end; an earlier run's stays when this one had not begun to build."""
        layout = self.plan.layout
        if not self.spent and layout.earlier() is not None:
            return ""
        try:
            if measured is not None:
                self.keep(measured)
            self.artifacts |= {"folder": str(layout.folder), "size": str(layout.size_json)}
            self.write_size(self.report(why, error))
        except TrtEngineError as broken:
            log.warning("the partial record could not be written: %s", broken.message)
            return ""
        return f"what is known is in `{layout.size_json}`; "


def _result(record: BenchRecord) -> BatchResult:
    """A record in the terms of A6."""
    times = record.compute()
    if times is None:
        raise UnstableError(f"batch {record.batch} gave no sample", hint="a longer `--duration`")
    return BatchResult(
        batch=record.batch,
        qps=float(queries_per_s(record)),
        images_per_s=float(images_per_s(record)),
        per_image_ms=times.mean / record.batch,
        compute_ms=times,
        engine=record.engine,
        stable=record.stable,
        instability=record.instability,
    )


def _told(error: Exception) -> str:
    return error.message if isinstance(error, TrtEngineError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _takes(engine: Engine, batch: int) -> bool:
    """Whether a profile of the engine reaches that batch."""
    return not engine.passport.profiles or any(
        all(not span.min or span.min[0] <= batch <= span.max[0] for span in profile.ranges.values())
        for profile in engine.passport.profiles
    )


def _name(engine: Engine | None) -> str:
    return engine.path.name if engine else ""


def _seen_from(folder: Path, path: Path) -> str:
    """A path as nvinfer wants it: relative to the folder of its configuration."""
    return os.path.relpath(path.absolute(), folder.absolute())


def _build_log(
    plan: Plan,
    planned: building.BuildPlan,
    target: Path,
    built: building.Built | None,
    failure: BaseException | None,
) -> str:
    """What was built, how, and what came of it."""
    lines = [
        f"command: {plan.command}",
        f"build command: {planned.command}",
        f"model: {plan.model.path} ({plan.model.digest})",
        f"engine: {target.name}",
        f"builder: {planned.identity}",
        f"profile: {' '.join(map(str, planned.profiles))}",
        *(f"{name}: {value}" for name, value in planned.config.key().items() if name not in ("profiles", "batch")),
    ]
    if built is not None:
        passport = built.engine.passport
        nbytes = sum(item.nbytes for item in passport.payload)
        lines += [
            *(f"{name}: {value}" for name, value in passport.build.notes.items()),
            *_steps(passport.build),
            *(f"warning: {warning}" for warning in built.warnings),
            *(["taken from the store; what follows was said when it was built"] if built.cached else []),
            f"Engine built in {passport.build.seconds:.3f} sec.",
            f"Created engine with size: {nbytes / (1 << 20):.3f} MiB",
        ]
        if passport.parity is not None:
            lines.append(
                f"parity: {'passed' if passport.parity.passed else 'failed'} against {passport.parity.reference}"
            )
    elif isinstance(failure, Exception):
        hint = getattr(failure, "hint", None)
        lines += [f"error: {_told(failure)}", *([f"hint: {hint}"] if hint else [])]
    else:
        lines.append("interrupted")
    return "\n".join(lines) + "\n"


def _steps(build: Build) -> list[str]:
    """What was done to get this engine: the graph prepared for the precision, the ladder climbed."""
    prepared = build.notes.get("prepared")
    return [f"{'before the build' if step == prepared else 'after a known failure'}: {step}" for step in build.ladder]


@contextlib.contextmanager
def _alone(layout: Layout) -> Iterator[None]:
    """Only one run writes into a folder at a time."""
    path = layout.folder / ".size.lock"
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        raise SetupError(
            f"another `size` is writing to `{layout.folder}`", hint="wait for it, or name another folder with `-o`"
        ) from None
    except OSError as error:
        raise explain(error, layout.folder) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: after that it may be another run's
        lock.release()


# ------------------------------------------------------------------------------------------------ gates


def gate(report: SizeReport, config: SizeConfig) -> None:
    """`UnstableError` under `strict`, `CapacityError` below `need_streams`; everything is written by then."""
    if config.strict and (moved := [result for result in report.batches if not result.stable]):
        reasons = "; ".join(f"batch {result.batch}: {', '.join(result.instability)}" for result in moved)
        raise UnstableError(
            f"the measurement is not stable: {reasons}", hint="close other programs, or a longer `--duration`"
        )
    if config.need_streams is not None and (report.peak_streams or 0) < config.need_streams:
        raise CapacityError(
            f"{report.peak_streams} streams at {report.fps:g} fps, {config.need_streams} are needed",
            hint="a smaller model, a lower precision, or more devices",
        )

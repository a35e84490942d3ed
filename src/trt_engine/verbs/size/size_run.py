"""Runs a sizing: builds, measurements, doubling, resumption."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import ensure_folder, file_lock, write_atomic, write_json
from trt_engine.benchmark.isolated import measure_isolated
from trt_engine.benchmark.stability import advice
from trt_engine.benchmark.trtexec_style_log import render_log
from trt_engine.config.bench import BenchConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine, passport_path
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, MemoryExhausted, ModelError, SetupError, TrtEngineError, UnstableError
from trt_engine.graph.inspect import inspect_model
from trt_engine.progress import progress_counter
from trt_engine.records.base import Finding, StepTime, append_record, write_document
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.passport import BuildInfo
from trt_engine.records.size import BatchResult, CliffPoint, PreflightCheck, SizeReport
from trt_engine.records.streams import StreamCapacity, VideoCapacity
from trt_engine.reporting.report import write_reports
from trt_engine.verbs.build import run as build_module
from trt_engine.verbs.nvinfer_keys import NO_IMAGE_INPUT, NvinferConfig, nvinfer_config
from trt_engine.verbs.size import curve
from trt_engine.verbs.size.doubling import Doubling, images_per_s, peak_streams, queries_per_s
from trt_engine.verbs.size.output_layout import OutputLayout
from trt_engine.verbs.size.preflight import Preflight
from trt_engine.verbs.size.size_plan import SizeJob, accepts_batch
from trt_engine.verbs.size.stream_run import find_cameras, find_streams
from trt_engine.vision.spec import vision_of

log = logging.getLogger(__name__)


def execute(plan: SizeJob) -> SizeReport:
    """Run the plan. On an interrupt or error, partial results are in `size.json` and the error is raised."""
    if plan.second is not None:
        log.info("first the model of `--then`: `%s`", plan.second.model.path)
        execute(plan.second)
        plan = replace(plan, config=replace(plan.config, then=plan.second.layout.folder))
    sizing = _SizeRun(plan)
    try:
        return sizing.execute()
    except KeyboardInterrupt as error:
        partial = getattr(error, "partial", None)
        where = sizing.save_partial("interrupted", partial if isinstance(partial, BenchRecord) else None)
        raise Interrupted(
            f"interrupted during {sizing.current_step}", hint=f"{where}run again with `{plan.command}`"
        ) from error
    except Exception as error:
        if sizing.started:
            sizing.save_partial("failed", None, error)
        raise


@dataclass
class _SizeRun:
    """State of one run."""

    plan: SizeJob
    steps: list[StepTime] = field(default_factory=list)
    checks: tuple[PreflightCheck, ...] = ()
    findings: tuple[Finding, ...] = ()
    protocol: Protocol | None = None
    scan_points: tuple[CliffPoint, ...] = ()
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    artifacts: dict[str, str] = field(default_factory=dict)
    current_step: str = "preflight"
    started: bool = False
    """True once this run has written to the folder."""
    results: dict[int, tuple[BenchRecord, BatchResult]] = field(default_factory=dict)
    """By `id` of the record, which is referenced here to keep the id valid."""
    advice_logged: bool = False
    """The advice on stability has been logged."""
    scanning: bool = False
    scan_engines: int = 0
    scan_measurements: int = 0
    capacity: StreamCapacity | None = None
    video: VideoCapacity | None = None

    def __post_init__(self) -> None:
        self.doubling: Doubling[Engine] = Doubling(self.build, self.measure, self.plan.config.fps)

    def execute(self) -> SizeReport:
        plan, layout = self.plan, self.plan.layout
        with self.step("preflight"):
            checks = Preflight(plan.model, layout, plan.config, plan.build, plan.backend_spec, plan.batches)
            try:
                self.checks = checks.run()
            finally:
                self.checks = tuple(checks.checks)
        with self.step("inspect"):
            self.inspect()
        ensure_folder(layout.folder)
        with _lock_folder(layout):
            self.started = True
            layout.clear()
            self.artifacts["folder"] = str(layout.folder)
            if plan.dynamic:
                self.doubling.run(plan.config.start_batch, plan.config.max_batch)
            else:
                self.measure_static()
            self.note_precision()
            self.note_best_batch()
            if not self.nvinfer_config(self.doubling.succeeded[-1][1]).keys:
                self.notes.append(NO_IMAGE_INPUT)
            if plan.config.scan:
                with self.step("scan", nested=True):
                    self.scanning = True
                    self.scan()
            if plan.config.deadline_ms is not None:
                engine, record = self.doubling.succeeded[-1]
                self.capacity = find_streams(plan, engine, record, self.step)
                self.artifacts["curve"] = str(layout.curve)
                if plan.config.then is not None:
                    self.artifacts["then"] = str(plan.config.then)
                if plan.clips:
                    with self.step("video"):
                        self.video = find_cameras(plan, engine, self.capacity)
            with self.step("report"):
                self.write_files()
            report = self.report()
            self.write_size(report)
            return report

    @contextlib.contextmanager
    def step(self, name: str, *, nested: bool = False) -> Iterator[None]:
        """Time a step; `nested` includes the steps inside it."""
        self.current_step = name
        count, started = len(self.steps), time.perf_counter()
        log.info("%s", name)
        try:
            yield
        finally:
            if nested:
                del self.steps[count:]
            self.steps.append(StepTime(name, round(time.perf_counter() - started, 6)))

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
                f"the model's batch is fixed at {self.plan.batches[0]}: measured at that batch only; "
                "export with a dynamic batch to size it"
            )
            log.warning("%s", self.notes[-1])

    # -------------------------------------------------------------------------------------------- build and measure

    def build(self, batch: int, largest: int | None = None) -> Engine:
        """Build the engine for `batch` with its log; a larger `largest` for the scan."""
        plan, layout = self.plan, self.plan.layout
        ensure_folder(layout.folder / "engines")
        top = largest or batch
        target = layout.engine(top, dynamic=plan.dynamic)
        first = self.doubling.engines == 0 and not self.doubling.oom_batches and largest is None
        log_path = layout.build_log(None if first else top)
        with self.step(f"build b{top}"):
            planned = plan.plan_build(batch, largest, log_path)
            return self.build_planned(planned, target, log_path, top, "build_log" if first else f"build_log_b{top}")

    def build_single_batch(self, batch: int) -> Engine:
        """Build an engine for one batch, if a build retry made the shapes of the dynamic one static."""
        plan, layout = self.plan, self.plan.layout
        target, log_path = layout.engine(batch, dynamic=False), layout.build_log(batch)
        with self.step(f"build b{batch} alone", nested=True):
            engine = self.build_planned(
                plan.plan_single_batch_build(batch, log_path), target, log_path, batch, f"build_log_b{batch}"
            )
        self.doubling.engines += 1
        self.notes.append(f"batch {batch} has a separate engine: a build retry made the shapes of the other static")
        return engine

    def build_planned(
        self, planned: build_module.BuildPlan, target: Path, log_path: Path, batch: int, log_name: str
    ) -> Engine:
        """Build an engine, write its log and record its warnings."""
        plan = self.plan
        log.info("building `%s`: %s", target.name, " ".join(map(str, planned.profiles)))
        built: build_module.BuildResult | None = None
        failure: BaseException | None = None
        try:
            built = build_module.execute(planned)
        except BaseException as error:
            failure = error
            raise
        finally:
            if not log_path.exists():  # keep a log written by the builder
                text = _engine_build_log(plan, planned, target, built, failure)
                with contextlib.suppress(SetupError) if failure else contextlib.nullcontext():
                    write_atomic(log_path, text)
            self.artifacts[log_name] = str(log_path)
        engine = built.engine
        self.artifacts[f"engine_b{batch}"] = str(engine.path)
        if built.cached:
            before = engine.passport.build.seconds
            self.notes.append(f"the engine of b{batch} is from the store (built in {before:.1f} s)")
        for warning in built.warnings:
            self.warn(f"build b{batch}: {warning}")
        return engine

    def measure(self, engine: Engine, batch: int) -> BenchRecord:
        """Measure in a separate process and write the record and its log; `ModelError` where frames have no own result."""
        if batch > 1 and (reason := engine.signature.row_dependence) is not None:
            raise ModelError(
                f"batch {batch} does not have a result for each frame: {reason}",
                hint="`--max-batch 1` sizes it one frame at a time"
                if self.plan.dynamic
                else "export it with a batch of 1",
            )
        if not accepts_batch(engine, batch) and self.plan.dynamic:
            engine = self.build_single_batch(batch)
        with self.step(f"measure b{batch}"):
            record = self.measure_and_record(engine, self.plan.bench_config(batch))
            path = self.plan.layout.bench_log(record.batch)
            write_atomic(path, render_log(record))
            self.artifacts[f"log_b{record.batch}"] = str(path)
            done = self.batch_result(record)
            log.info(
                "batch %d: %.2f QPS, %.1f images/s, mean %.3f ms, p99 %.3f ms on %s",
                record.batch, done.qps, done.images_per_s, done.compute_ms.mean, done.compute_ms.p99, record.device,
            )  # fmt: skip
            for reason in record.instability:
                log.warning("batch %d is not stable: %s", record.batch, reason)
            if record.instability and not self.advice_logged:
                self.advice_logged = True
                log.warning("for a stable measurement: %s", advice(record))
            for warning in record.warnings:
                self.warn(warning)
        return record

    def measure_and_record(self, engine: Engine, config: BenchConfig) -> BenchRecord:
        if self.plan.backend_spec.provides("measure"):
            record: BenchRecord = self.plan.backend_spec.load_function("measure")(engine, config, self.plan.runtime)
        else:
            record = measure_isolated(
                engine, config, self.plan.runtime, memory_limit=self.plan.config.memory_limit,
                on_progress=progress_counter("measuring", "s"),
            )  # fmt: skip
        self.append_record(record)
        return record

    def append_record(self, record: BenchRecord) -> None:
        """Append the record to the records file, or to that of the scan."""
        path = self.plan.layout.scan_records if self.scanning else self.plan.layout.records
        append_record(path, record)
        self.artifacts["scan_records" if self.scanning else "records"] = str(path)
        self.protocol = self.protocol or record.protocol

    def measure_static(self) -> None:
        """Build and measure a model with a fixed batch once."""
        batch = self.plan.batches[0]
        engine = self.build(batch)
        self.doubling.engines += 1
        record = self.measure(engine, batch)
        self.doubling.measurements += 1
        self.doubling.succeeded.append((engine, record))

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)
            log.warning("%s", text)

    def note_precision(self) -> None:
        engine, _ = self.doubling.succeeded[-1]
        found, asked = engine.passport.precision.main_dtype, self.plan.build.precision
        main = (found or asked or "fp32").upper()
        if self.plan.precision_defaulted:
            why = "default on a GPU; `--precision fp32` keeps the graph's"
        elif asked is not None:
            why = f"{asked.upper()} was requested"
        elif (written := engine.passport.build.graph_dtype) is not None:
            here = "CPU" if parse_device(self.plan.build.device)[0] == "cpu" else "GPU"
            why = f"the graph is {written.upper()}; this {here} runs it in {main}"
        elif parse_device(self.plan.build.device)[0] == "cuda":
            why = "the graph's"
        else:
            why = "the graph's, on a CPU; engines for a GPU are usually FP16"
        self.notes.append(f"precision {main}: {why}")
        if engine.passport.speed is not None:
            self.notes.append(f"{main} is {engine.passport.speed.summary}")
        self.notes.extend(_build_steps(engine.passport.build))

    def note_best_batch(self) -> None:
        """Add a note if a smaller batch had a higher throughput than N."""
        tried, latency = [record for _, record in self.doubling.succeeded], self.doubling.batch1_record
        last = tried[-1]
        best = max(tried if latency is None else [*tried, latency], key=images_per_s)
        if images_per_s(best) > images_per_s(last):
            self.notes.append(
                f"batch {best.batch} delivered more: {float(images_per_s(best)):.1f} images/s, "
                f"{peak_streams(best, self.plan.config.fps)} streams"
            )

    # -------------------------------------------------------------------------------------------- scan

    def scan(self) -> None:
        """Measure N +- width: sizes up to N on the final engine, larger ones on an engine built for them."""
        if not self.plan.dynamic:
            self.notes.append("no scan: the model's batch is fixed")
            return
        engine, record = self.doubling.succeeded[-1]
        top = record.batch
        sizes = curve.scan_sizes(top, self.plan.config.scan_width)
        log.info("scanning batch %d to %d; sizes above %d need a separate engine", sizes[0], sizes[-1], top)
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
            self.current_step = f"scan b{batch}"
            try:
                short = self.measure_and_record(chosen, self.plan.bench_config(batch, short=True))
            except MemoryExhausted as error:
                self.warn(f"the scan skips batch {batch}: {error.message}")
                return None
            self.scan_measurements += 1
            rate = float(images_per_s(short))
            log.info("scan: batch %d, %.1f images/s", batch, rate)
            return rate

        found = curve.find_cliffs(sizes, measure)
        self.scan_points = tuple(
            replace(point, engine=used.path.name if (used := by_size[point.batch]) else "") for point in found
        )
        log.info("%s", curve.advice(self.scan_points))
        if any(point.cliff for point in self.scan_points):
            self.warn(curve.advice(self.scan_points))

    # -------------------------------------------------------------------------------------------- output

    def batch_result(self, record: BenchRecord) -> BatchResult:
        """The `BatchResult` of a record, cached: a record may have a million samples."""
        if id(record) not in self.results:
            self.results[id(record)] = record, _batch_result(record)
        return self.results[id(record)][1]

    def report(self, stopped: str | None = None, error: Exception | None = None) -> SizeReport:
        """Report of the current state; incomplete if `stopped` is given."""
        plan, doubling = self.plan, self.doubling
        engine, last = doubling.succeeded[-1] if doubling.succeeded else (None, None)
        tried = [record for _, record in doubling.succeeded]
        first = (
            [doubling.batch1_record]
            if doubling.batch1_record is not None and doubling.batch1_record not in tried[-1:]
            else []
        )
        results = [self.batch_result(record) for record in (*first, *tried[-1:])]
        rates = [float(images_per_s(record)) for record in tried[-1:]]
        final = {"engine": str(engine.path), "passport": str(passport_path(engine.path))} if engine else {}
        video = self.nvinfer_config(last) if last else NvinferConfig({})
        return SizeReport(
            model=str(plan.model.path),
            engine=str(engine.path) if engine else None,
            device=last.device if last else plan.build.device,
            backend=engine.passport.backend if engine else plan.build.backend,
            precision=(engine.passport.precision.main_dtype if engine else None)
            or plan.build.precision
            or "as the graph is",
            peak_streams=peak_streams(last, plan.config.fps) if last else None,
            images_per_s=rates[0] if rates else None,
            fps=plan.config.fps,
            batches=tuple(results),
            stop_reason=stopped or doubling.stop_reason or "static_batch",  # type: ignore[arg-type]
            engines_built=doubling.engines + self.scan_engines,
            measurements=doubling.measurements + self.scan_measurements,
            steps=tuple(self.steps),
            protocol=self.protocol,
            environment=last.environment if last else Environment.detect(),
            artifacts=self.artifacts | final,
            all_batches=tuple(map(self.batch_result, tried)),
            cliffs=self.scan_points,
            complete=stopped is None,
            model_name=plan.layout.model_name,
            out_of_memory=tuple(doubling.oom_batches),
            scan_engines=self.scan_engines,
            scan_measurements=self.scan_measurements,
            slow_batches=tuple(point.batch for point in self.scan_points if point.cliff),
            preflight=self.checks,
            findings=self.findings,
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
            nvinfer=video.keys,
            nvinfer_notes=video.notes,
            error=_error_text(error) if error else None,
            capacity=self.capacity,
            video=self.video,
        )

    def nvinfer_config(self, last: BenchRecord) -> NvinferConfig:
        """nvinfer keys for the measured engine, or for the TensorRT engine of the same name."""
        layout, peak = self.plan.layout, peak_streams(last, self.plan.config.fps)
        on_gpu = last.device.startswith("cuda")
        measured = self.doubling.succeeded[-1][0]
        profiles = measured.passport.profiles
        main = (
            measured.passport.build.graph_dtype or measured.passport.precision.main_dtype
        )  # TensorRT uses the graph's dtypes
        engine = replace(layout, suffix=".engine").engine(last.batch, dynamic=self.plan.dynamic)
        return nvinfer_config(
            measured.signature,
            {name: span.opt for name, span in profiles[0].ranges.items()} if profiles else {},
            vision_of(measured),
            onnx_file=os.path.relpath(self.plan.model.path.absolute(), layout.folder.absolute()),
            engine_file=f"engines/{engine.name}",
            batch=max(1, min(peak, last.batch)) if on_gpu and self.plan.dynamic else last.batch,
            precision=(main if on_gpu and main else None) or self.plan.build.precision or "fp16",
        )

    def write_size(self, report: SizeReport) -> None:
        write_document(self.plan.layout.size_json, "size", report, command=self.plan.command)

    def write_files(self) -> None:
        """Write `benchmark_data.json`, `size.json` and the reports."""
        layout = self.plan.layout
        write_json(layout.benchmark_data, benchmark_data(self.report()))
        self.artifacts |= {"size": str(layout.size_json), "benchmark_data": str(layout.benchmark_data)}
        self.write_size(self.report())
        for path in write_reports(layout.folder).values():
            self.artifacts[path.name.replace(".", "_")] = str(path)

    def save_partial(self, why: str, measured: BenchRecord | None, error: Exception | None = None) -> str:
        """Write `size.json` of an unfinished run, unless it would replace an earlier run's before the first build."""
        layout = self.plan.layout
        if not self.started and layout.previous_document() is not None:
            return ""
        try:
            if measured is not None:
                self.append_record(measured)
            self.artifacts |= {"folder": str(layout.folder), "size": str(layout.size_json)}
            self.write_size(self.report(why, error))
        except TrtEngineError as broken:
            log.warning("the partial record could not be written: %s", broken.message)
            return ""
        return f"partial results are in `{layout.size_json}`; "


def _batch_result(record: BenchRecord) -> BatchResult:
    """The `BatchResult` of a record."""
    times = record.compute_summary()
    if times is None:
        raise UnstableError(f"batch {record.batch} has no samples", hint="use a longer `--duration`")
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


def _error_text(error: Exception) -> str:
    return error.message if isinstance(error, TrtEngineError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _engine_build_log(
    plan: SizeJob,
    planned: build_module.BuildPlan,
    target: Path,
    built: build_module.BuildResult | None,
    failure: BaseException | None,
) -> str:
    """Text of a build log: command, settings, outcome."""
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
            *_build_steps(passport.build),
            *(f"warning: {warning}" for warning in built.warnings),
            *(["from the store; the following is from the original build"] if built.cached else []),
            f"Engine built in {passport.build.seconds:.3f} sec.",
            f"Created engine with size: {nbytes / (1 << 20):.3f} MiB",
        ]
        if passport.parity is not None:
            lines.append(
                f"parity: {'passed' if passport.parity.passed else 'failed'} against {passport.parity.reference}"
            )
    elif isinstance(failure, Exception):
        hint = getattr(failure, "hint", None)
        lines += [f"error: {_error_text(failure)}", *([f"hint: {hint}"] if hint else [])]
    else:
        lines.append("interrupted")
    return "\n".join(lines) + "\n"


def _build_steps(build: BuildInfo) -> list[str]:
    """Changes made to build this engine: graph preparation and build retries."""
    prepared = build.notes.get("prepared")
    return [f"{'before the build' if step == prepared else 'after a known failure'}: {step}" for step in build.retries]


@contextlib.contextmanager
def _lock_folder(layout: OutputLayout) -> Iterator[None]:
    """Lock the folder; `SetupError` if another run has it."""
    path = layout.folder / ".size.lock"
    busy = SetupError(
        f"another `size` is writing to `{layout.folder}`", hint="wait for it, or name another folder with `-o`"
    )
    with file_lock(path, busy=busy):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # before the release: after it another run may have it


def benchmark_data(report: SizeReport) -> dict[str, Any]:
    """`benchmark_data.json`. Keys `gpu_*` are null for a CPU, whose values are in `cpu_*`."""
    gpu = report.device.startswith("cuda")
    first, last = report.batches[0], report.batches[-1]
    bs1: dict[str, Any] = {"qps": first.qps} | _mean_ms(first, gpu)
    bsmax = {"qps": last.qps} | _mean_ms(last, gpu)
    bsmax |= {"p99_ms": last.compute_ms.p99, "imgs_per_sec": last.images_per_s}
    made: dict[str, Any] = {
        "model_name": report.model_name,
        "engine": report.engine,
        "max_bs": last.batch,
        "device": report.device,
        "trtexec": {"bs1": bs1, "bsmax": bsmax},
        "peak_gpu_streams": report.peak_streams,
        "deepstream": {"run1": None, "run2": None},
    }
    if gpu and report.protocol is not None and report.protocol.clock == "host":
        made["note"] = "gpu_mean_ms is host clock time around a synchronized run" + (
            ", its copies included" if report.protocol.transfers else ", without copies"
        )
    if not gpu:
        made["note"] = "measured on a CPU: gpu_mean_ms is null, cpu_mean_ms and peak_gpu_streams are the CPU's"
    return made


def _mean_ms(result: BatchResult, gpu: bool) -> dict[str, float | None]:
    mean = result.compute_ms.mean
    return {"gpu_mean_ms": mean} if gpu else {"gpu_mean_ms": None, "cpu_mean_ms": mean}

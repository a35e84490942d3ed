"""One profiling run: measure, capture, attribute, report."""

from __future__ import annotations

import logging
import shlex
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from trt_engine.atomic_io import all_or_nothing
from trt_engine.backend import BackendSpec, runtime_backend
from trt_engine.benchmark.bench_inputs import batch_of, feeds_for
from trt_engine.benchmark.closed_loop import StageTimes, effective_protocol, measure, prepare_query, stage_times
from trt_engine.benchmark.stability import advice
from trt_engine.config.bench import PROFILERS, BenchConfig, ProfileConfig, ProfilerName
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.errors import DeviceLost, Interrupted, MemoryExhausted, SetupError, TrtEngineError
from trt_engine.format import format_ms, format_number, format_percent
from trt_engine.graph.load import open_model
from trt_engine.profiling import attribution
from trt_engine.profiling.bottleneck import find_bottleneck
from trt_engine.profiling.instruments import ncu as nsight_compute
from trt_engine.profiling.instruments import nsys
from trt_engine.profiling.instruments.capture import Capture, capture, instrument_status
from trt_engine.profiling.kernel_categories import category_shares, kernel_rows, time_breakdown
from trt_engine.profiling.peaks.cache import device_peaks
from trt_engine.profiling.roofline import ProfileFacts, describe_above_peak
from trt_engine.profiling.timeline import write_timeline
from trt_engine.records.base import write_document
from trt_engine.records.bench import BenchRecord
from trt_engine.records.percentiles import summarize
from trt_engine.records.profile import (
    CategoryShare,
    Counters,
    DevicePeaks,
    InstrumentStatus,
    KernelRow,
    LayerProfile,
    ProfileReport,
    TimeBreakdown,
)
from trt_engine.reporting.report import REPORT_FILES, write_reports
from trt_engine.run_folder import PROFILE, RECORDS
from trt_engine.tensors import Shape
from trt_engine.verbs.bench.run import LOG, write_record
from trt_engine.verbs.load import check_loadable

log = logging.getLogger(__name__)

TIMELINE = "timeline.json"
"""In `out`, beside the document `--json` prints: the timeline that ui.perfetto.dev opens."""
_IN_PROCESS_PROFILERS: tuple[ProfilerName, ...] = ("cupti", "torch")
_MIN_COVERED_SHARE = 0.6
"""Fraction of the inference time below which the layers' sum gets a warning."""


class ProfileRun:
    """One profiling run of an engine and its results so far. Created, run once, discarded."""

    def __init__(
        self,
        engine: Engine,
        config: BenchConfig,
        options: ProfileConfig,
        runtime: RuntimeConfig,
        folder: Path,
        messages: list[str],
    ) -> None:
        self.engine, self.config, self.runtime, self.folder = engine, config, runtime, folder
        self.options = options
        self.typed = str(engine.path)
        """Path for suggested commands: the engine, or the given model."""
        self.model = "MODEL.onnx" if engine.model_path is None else engine.passport.model.file
        self.settings: dict[str, str] = {}
        """The `-O` that were given, which those commands repeat."""
        self.began = time.time()
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.backend_spec: BackendSpec = check_loadable(engine, runtime)
        self.runner: BackendSpec = runtime_backend(self.backend_spec)
        self.apart = self.runner is self.backend_spec and self.backend_spec.provides("measure")
        """The backend measures in a separate process, invisible to profilers in this one."""
        self.feeds, self.inputs = feeds_for(engine, config)
        self.shapes: dict[str, Shape] = {
            name: tuple(int(size) for size in value.shape) for name, value in self.feeds.items()
        }
        self.batch = batch_of(engine.signature, self.shapes)
        self.device = runtime.device or engine.passport.device
        self.record: BenchRecord | None = None
        self.parts: tuple[StageTimes, ...] = ()
        self.instruments: dict[str, InstrumentStatus] = {}
        self.trying = ""
        """The active profiler."""
        self.capture: Capture | None = None
        self.layers: LayerProfile | None = None
        self.attribution: attribution.Attribution | None = None
        self.counters: tuple[Counters, ...] = ()
        self.peaks: DevicePeaks | None = None
        self.files: dict[str, str] = {}
        self.warnings: list[str] = messages

    def run(self, command: str) -> ProfileReport:
        """All profilers in order; the report is written before it is returned, or before `Interrupted` is raised."""
        self._check_profiler_available()
        try:
            self._measure()
            self._measure_peaks()  # before an instrument is in the process: a launch costs more with one
            self._capture_activities()
            self._profile_layers()
            self._attribute_kernels()
            self._collect_counters()
            self._remeasure_peaks()
        except KeyboardInterrupt as stop:
            partial = getattr(stop, "partial", None)
            if isinstance(partial, BenchRecord):
                self.record = partial
                write_record(partial, self.folder)
            elif isinstance(partial, Capture):
                self.capture = partial
                self._mark_used(
                    self.trying, f"{partial.instrument}: interrupted after {len(partial.inferences)} inferences"
                )
                self.warnings += partial.warnings
            elif isinstance(partial, tuple):
                self.counters = partial
                self._mark_used("ncu", f"interrupted after the counters of {len(partial)} kernels")
            if self.record is None:
                raise Interrupted(
                    "interrupted before anything was measured", hint="the same command profiles again"
                ) from None
            for name in PROFILERS:
                if name not in self.instruments:
                    self._mark_skipped(name, "interrupted before its turn")
            report = self._write_report(command, complete=False)
            raise Interrupted(
                f"interrupted; what was found until then is in `{self.folder / PROFILE}`",
                hint="the same command with `--overwrite` profiles again",
                partial=report,
            ) from None
        return self._write_report(command, complete=True)

    # -------------------------------------------------------------------------------- the profilers

    def _check_profiler_available(self) -> None:
        """`SetupError` for a profiler known to be unavailable, before minutes are spent."""
        if (
            self.options.profiler in ("nsys", *_IN_PROCESS_PROFILERS)
            and (why := self._no_device_work_reason(self.options.profiler)) is not None
        ):
            raise _unavailable_error(self.options.profiler, why, None)
        if self.options.profiler == "layers" and not self.runner.provides("profile"):
            raise _unavailable_error("layers", f"the backend `{self.runner.name}` reports no layer times", None)
        if self.options.profiler in _IN_PROCESS_PROFILERS:
            found = next((item for item in instrument_status() if item.name == self.options.profiler), None)
            if found is not None and not found.used:
                raise _unavailable_error(self.options.profiler, found.reason, found.fix)

    def _no_device_work_reason(self, profiler: str) -> str | None:
        """Why that profiler would see nothing of this engine's work."""
        if parse_device(self.device)[0] == "cpu":
            return f"no GPU to profile: `{self.device}` runs the engine"
        if self.apart and profiler in _IN_PROCESS_PROFILERS:
            return f"the backend `{self.backend_spec.name}` runs in a separate process"
        return None

    def _measure(self) -> None:
        """The reference figures, without a profiler."""
        log.info("measuring without a profiler")
        if self.apart:
            self.record = self.backend_spec.load_function("measure")(self.engine, self.config, self.runtime)
        else:
            session = self.runner.load_component("runtime")().load(self.engine, self.runtime)
            try:
                self.device, protocol = effective_protocol(session, self.config)
                self.record = measure(session, self.engine, self.config)
                self.parts = stage_times(
                    session,
                    self.engine,
                    self.feeds,
                    protocol,
                    queries=self.options.inferences,
                    warmup=self.options.warmup,
                )
            finally:
                session.close()
        assert self.record is not None
        write_record(self.record, self.folder)

    def _capture_activities(self) -> None:
        """The device's activities, by the first available profiler."""
        for name in ("nsys", *_IN_PROCESS_PROFILERS):
            if self.options.profiler is not None and self.options.profiler != name:
                self._mark_skipped(name, f"`--profiler {self.options.profiler}` was requested")
            elif self.capture is not None:
                self._mark_skipped(name, "not needed: a preferred profiler was available")
            elif (why := self._no_device_work_reason(name)) is not None:
                self._mark_skipped(name, why)
            else:
                self._try_profiler(name)

    def _try_profiler(self, name: ProfilerName) -> None:
        log.info(f"profiling with {name}")
        self.trying = name
        try:
            found = self._capture_with_nsys() if name == "nsys" else self._capture_in_process(name)
        except (MemoryExhausted, DeviceLost):
            raise
        except SetupError as error:
            if self.options.profiler == name:
                raise _unavailable_error(name, error.message, error.hint) from error
            self._mark_skipped(name, error.message, error.hint)
            log.info("%s is passed over: %s", name, error.message)
            return
        self.capture = found
        kernels = sum(item.kind == "kernel" for item in found.activities)
        self._mark_used(name, f"{found.instrument}: {kernels} kernels in {len(found.inferences)} inferences")
        self.warnings += found.warnings

    def _capture_with_nsys(self) -> Capture:
        return nsys.collect_capture(
            self.engine.path,
            self.folder,
            config=self.config,
            inferences=self.options.inferences,
            warmup=self.options.warmup,
            runtime=self.runtime,
        )

    def _capture_in_process(self, name: ProfilerName) -> Capture:
        """One inference for each call of a separate session, captured from inside this process."""
        found = next(item for item in instrument_status() if item.name == name)
        if not found.used:  # before an engine is loaded for it
            raise SetupError(found.reason, hint=found.fix)
        session = self.runner.load_component("runtime")().load(self.engine, self.runtime)
        try:
            _, protocol = effective_protocol(session, self.config, events=False)
            with prepare_query(session, self.engine, self.feeds, protocol, []) as query:
                assert query.call is not None
                return capture(
                    query.call, inferences=self.options.inferences, warmup=self.options.warmup, instrument=name
                )
        finally:
            session.close()

    def _profile_layers(self) -> None:
        """The backend's layer times: an extra table, or the result itself where no preferred profiler was available."""
        if self.options.profiler == "host":
            self._mark_skipped("layers", "`--profiler host` was requested")
        elif not self.runner.provides("profile"):
            self._mark_skipped("layers", f"the backend `{self.runner.name}` reports no layer times")
        else:
            log.info("measuring the backend's layer times")
            try:
                self.layers = attribution.profile_layers(
                    self.runner,
                    self.engine,
                    self.feeds,
                    self.runtime,
                    inferences=self.options.inferences,
                    warmup=self.options.warmup,
                    keep=self.folder,
                )
            except (MemoryExhausted, DeviceLost):
                raise
            except TrtEngineError as error:
                if self.options.profiler == "layers":
                    raise
                self._mark_skipped("layers", error.message, error.hint)
                log.warning("no layer times: %s", error.message)
            else:
                self._mark_used("layers", f"{self.layers.instrument}: {len(self.layers.rows)} layers")
                self.warnings += self.layers.notes
        has_layers = self.capture is not None or (self.layers is not None and self.layers.clock != "launch")
        if has_layers and self.options.profiler != "host":
            self._mark_skipped("host", "not needed: a preferred profiler was available")
        else:
            self._mark_used("host", "the host's clock around whole inferences")

    def _attribute_kernels(self) -> None:
        """Which layer launched which kernel: by names and ranges, else by a capture with the nodes' trace."""
        if self.capture is None:
            return
        self.attribution = found = attribution.attribute(self.capture, layers=self.layers)
        if not found.layers and self.runner.provides("trace_nodes"):
            log.info("profiling once more with node names, to attribute kernels")
            self.attribution = found = self._attribute_by_trace(self.capture) or found
        if found.note:
            self.warnings.append(f"layers of kernels: {found.note}")

    def _attribute_by_trace(self, trace_capture: Capture) -> attribution.Attribution | None:
        """From a second capture, in which the backend traces its nodes; None with a warning where that is not available."""
        trace = self.folder / "nodes.json"
        try:
            with self.runner.load_function("trace_nodes")(self.engine, self.feeds, self.runtime, trace=trace) as infer:
                named = capture(
                    infer,
                    inferences=min(5, self.options.inferences),
                    warmup=self.options.warmup,
                    instrument=self._active_profiler,
                )
            spans = attribution.onnxruntime_node_spans(trace, named.inferences, named.launches)
            return attribution.transfer_attribution(named, attribution.attribute(named, spans=spans), trace_capture)
        except (MemoryExhausted, DeviceLost):
            raise
        except TrtEngineError as error:
            log.info("no layers of kernels by the nodes' trace: %s", error.message)
            return None
        finally:
            trace.unlink(missing_ok=True)

    @property
    def _active_profiler(self) -> ProfilerName | None:
        """The profiler already active in this process: another is not allowed."""
        used = {name for name, item in self.instruments.items() if item.used}
        return next((name for name in _IN_PROCESS_PROFILERS if name in used), None)

    def _collect_counters(self) -> None:
        """Nsight Compute's counters of the kernels that take most of the time."""
        if not self.options.ncu:
            return
        if (why := self._no_device_work_reason("ncu")) is not None:
            self._mark_skipped("ncu", why)
            return
        if self.capture is None:
            self._mark_skipped("ncu", "no profiler listed the kernels: no names to request")
            return
        log.info(f"measuring the counters of {self.options.ncu} kernels with Nsight Compute")
        rows = kernel_rows(self.capture.activities, len(self.capture.inferences))
        try:
            self.counters = nsight_compute.collect_counters(
                self.engine.path,
                self.folder,
                kernels=[row.name for row in rows[: self.options.ncu]],
                config=self.config,
                warmup=self.options.warmup,
                runtime=self.runtime,
                rules=True,
            )
        except (MemoryExhausted, DeviceLost):
            raise
        except SetupError as error:
            self._mark_skipped("ncu", error.message, error.hint)
            log.warning("no counters: %s", error.message)
        else:
            self._mark_used("ncu", f"counters of {len(self.counters)} kernels")

    def _measure_peaks(self) -> None:
        if self.options.peaks:
            log.info("measuring what the device can do at most, unless that is kept")
        try:
            self.peaks = device_peaks(self.device, measure=self.options.peaks)
        except TrtEngineError as error:
            self.warnings.append(f"the peaks of `{self.device}` are not known: {error.message}")
            log.warning("%s", self.warnings[-1])

    def _remeasure_peaks(self) -> None:
        """Measure the peaks once more where a layer is faster than the kept one, which a busy machine had made too low."""
        layers = self.layers if self.layers is not None and self.layers.clock != "launch" else None
        kernels = kernel_rows(self.capture.activities, len(self.capture.inferences)) if self.capture is not None else ()
        why = describe_above_peak(layers, kernels, self.peaks, self._compute_dtype, self.device)
        if why is None:
            return
        log.warning("%s: the peaks of `%s` are measured again", why, self.device)
        log.info("measuring the peaks of the device again: a layer was faster than what is kept")
        try:
            self.peaks = device_peaks(self.device, measure=True, remeasure=True, at_least=self.peaks)
        except TrtEngineError as error:
            self.warnings.append(f"{why}, and the peaks could not be measured again: {error.message}")

    @property
    def _compute_dtype(self) -> str:
        """Compute dtype of the engine."""
        known = self.record.runtime_info.get("precision") if self.record is not None else None
        return known or self.engine.passport.precision.main_dtype or "unknown"

    def _mark_used(self, name: str, reason: str) -> None:
        self.instruments[name] = InstrumentStatus(name, True, reason)  # type: ignore[arg-type]

    def _mark_skipped(self, name: str, reason: str, fix: str | None = None) -> None:
        self.instruments[name] = InstrumentStatus(name, False, reason, fix)  # type: ignore[arg-type]

    # -------------------------------------------------------------------------------- the report

    @all_or_nothing()
    def _write_report(self, command: str, *, complete: bool) -> ProfileReport:
        """The report, with the timeline, `profile.json` and the pages made from it in the folder."""
        self._write_timeline()
        self._list_raw_files()
        report = self._make_report(complete=complete)
        again = command or f"trt-engine profile {shlex.quote(self.typed)}"
        write_document(self.folder / PROFILE, "profile", report, command=again)
        write_reports(self.folder)
        return report

    def _write_timeline(self) -> None:
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

    def _list_raw_files(self) -> None:
        """Raw files of the profilers, by kind."""
        for kind, suffix in (("nsys", ".nsys-rep"), ("ncu", ".ncu-rep")):
            # what lay in the folder before is of another profile; a file's clock may be a tick behind
            found = [one for one in sorted(self.folder.rglob(f"*{suffix}")) if one.stat().st_mtime > self.began - 0.1]
            if found:
                self.files[kind] = str(found[-1])
        if self.layers is not None and self.layers.raw is not None:
            self.files[self.runner.name] = self.layers.raw
        self.files |= {"records": str(self.folder / RECORDS), "log": str(self.folder / LOG)}
        self.files["profile"] = str(self.folder / PROFILE)
        self.files |= {name.replace(".", "_"): str(self.folder / name) for name in REPORT_FILES}

    def _open_commands(self) -> dict[str, str]:
        opens: dict[str, Callable[[Path], str]] = {
            "nsys": nsys.open_command, "ncu": nsight_compute.open_command, "timeline": _perfetto_hint,
            "onnxruntime": _perfetto_hint,
        }  # fmt: skip
        return {name: opens[name](Path(place)) for name, place in self.files.items() if name in opens}

    def _make_report(self, *, complete: bool) -> ProfileReport:
        record = self.record
        assert record is not None
        seen, layers = self.capture, self.layers
        parts_ms = self._break_down_time(record)
        kernels, categories = tuple[KernelRow, ...](), tuple[CategoryShare, ...]()
        if seen is not None:
            launched_by = self.attribution.layers if self.attribution is not None else None
            kernels = kernel_rows(seen.activities, len(seen.inferences), launched_by)
            categories = category_shares(kernels, len(seen.inferences))
        elif layers is not None and layers.clock != "launch":
            categories = attribution.layer_shares(layers)
            self.warnings += _layer_sum_warning(layers, parts_ms.wall_ms)
        work = attribution.count_work(self.engine, self.shapes, layers)
        self.warnings += work.notes
        precision = self._compute_dtype
        measured = ProfileFacts(
            split=parts_ms, layers=layers, kernels=kernels, device_peaks=self.peaks, flops=work.flops, nbytes=work.nbytes,
            batch=self.batch, device=self.device, precision=precision, engine=self.typed, model=self.model,
            settings=self.settings, sizes=self._model_sizes(), max_batch=self._max_batch(),
            fixed_batch=bool(self.engine.signature.inputs) and not self.engine.signature.batch_axis,
        )  # fmt: skip
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
            time_breakdown=parts_ms,
            instruments=tuple(self.instruments.values()),
            layers=layers,
            kernels=kernels,
            categories=categories,
            bottleneck=find_bottleneck(measured),
            counters=self.counters,
            peaks=self.peaks,
            inferences=len(seen.inferences) if seen is not None else layers.inferences if layers is not None else 0,
            files=dict(self.files),
            open_commands=self._open_commands(),
            warnings=tuple(dict.fromkeys((*self.warnings, *record.warnings, *_instability(record)))),
            runtime_info=dict(record.runtime_info) | self._runtime_facts(work),
            started=self.started,
            complete=complete and record.complete,
            precisions=attribution.precision_shares(layers) if layers is not None and layers.clock != "launch" else {},
            wall_s=record.wall_s,
        )

    def _runtime_facts(self, work: attribution.ModelWork) -> dict[str, str]:
        """The work of an inference, the inputs, and how kernels were attributed to layers."""
        facts = {} if work.flops is None else {"flops": str(work.flops), "flops_from": work.source}
        if work.nbytes is not None:
            facts["nbytes"] = str(work.nbytes)
        facts["inputs"] = self.inputs
        if self.attribution is not None and self.attribution.layers:
            share = format_percent(self.attribution.share)
            facts["layers_of_kernels"] = f"by {self.attribution.method}: {share} of the kernels' time"
        return facts

    def _model_sizes(self) -> dict[str, Shape]:
        """Shapes of the inputs that have more open sizes than a batch in the model, as it is named in suggested commands."""
        try:
            signature = open_model(self.engine.model_path or Path()).signature
        except TrtEngineError:  # the file is gone, or has become another
            return {}
        moving = [spec.name for spec in signature.inputs if set(spec.dynamic) - set(signature.batch_axes(spec))]
        return {name: shape for name, shape in self.shapes.items() if name in moving}

    def _max_batch(self) -> int | None:
        """The largest batch the suggested commands may use; None where a model is rebuilt for each."""
        if self.typed == self.model:
            return None
        rows = [
            min(span.max[0] for span in profile.ranges.values() if span.max)
            for profile in self.engine.passport.profiles
            if any(span.max for span in profile.ranges.values())
        ]
        return max(rows, default=None)

    def _break_down_time(self, record: BenchRecord) -> TimeBreakdown:
        """One inference by where its time goes, as far as this run measured it."""
        compute = statistics.median(record.compute_ms) if record.compute_ms else 0.0
        by_events = record.protocol.clock == "device events"
        wall = record.wall_s * 1e3 / record.queries if by_events and record.queries else compute
        h2d, d2h, gpu = _counter_median(self.parts, "h2d_ms"), _counter_median(self.parts, "d2h_ms"), None
        if self.parts:
            gpu = _counter_median(self.parts, "compute_ms")
        elif by_events:  # measured in a separate process, with events
            gpu = compute
            h2d = statistics.median(record.h2d_ms) if record.h2d_ms else None
            d2h = statistics.median(record.d2h_ms) if record.d2h_ms else None
        if self.capture is not None:
            return time_breakdown(self.capture, wall_ms=wall, gpu_ms=gpu, h2d_ms=h2d, d2h_ms=d2h)
        on_cpu = parse_device(self.device)[0] == "cpu"
        return TimeBreakdown(
            wall_ms=wall,
            h2d_ms=h2d,
            compute_ms=gpu if gpu is not None else compute if on_cpu else None,
            d2h_ms=d2h,
            gpu_ms=gpu,
        )


def _instability(record: BenchRecord) -> tuple[str, ...]:
    return (*record.instability, f"for a stable measurement: {advice(record)}") if record.instability else ()


def _layer_sum_warning(layers: LayerProfile, wall_ms: float) -> Iterator[str]:
    """Why the layers' medians do not add up to an inference, where they are far from it."""
    medians, means = (sum(getattr(row, name) for row in layers.rows) for name in ("median_ms", "mean_ms"))
    if not layers.rows or medians >= _MIN_COVERED_SHARE * wall_ms:
        return
    held_up = means >= _MIN_COVERED_SHARE * (layers.wall_ms or wall_ms)
    yield f"the layers' medians add up to {format_number(medians)} of {format_ms(wall_ms)}: " + (
        f"single layers were held up now and then (their means add up to {format_ms(means)}); is the machine busy?"
        if held_up
        else "the rest passes outside the layers"
    )


def _perfetto_hint(trace: Path) -> str:
    return f"https://ui.perfetto.dev, `Open trace file`: {trace}"


def _counter_median(found: tuple[StageTimes, ...], name: str) -> float | None:
    return statistics.median(getattr(item, name) for item in found) if found else None


def _unavailable_error(profiler: str, reason: str, fix: str | None) -> SetupError:
    return SetupError(
        f"the profiler `{profiler}` is not available here: {reason}",
        hint=fix or "leave `--profiler` out: the next available one is used",
    )

"""Closed-loop measurement: `measure` runs queries back to back on a `Session` and records every time.

A `DirectSession` (ONNX Runtime) is timed by the host clock around the call; a `ResidentSession` on a GPU around a
synchronized run without copies. A session with contexts is timed by events around H2D, compute and D2H, by trtexec's
definitions (samples/common/sampleInference.cpp and sampleReporting.cpp of TensorRT): latency is the sum of the three,
throughput is queries over the time from first start to last end, warm-up queries are those that started during warm-up.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_engine.benchmark.bench_inputs import profile_index
from trt_engine.benchmark.measured_engine import (
    MeasuredEngine,
    ignored_option_warnings,
    machine_warnings,
    sample_warnings,
)
from trt_engine.benchmark.measurement_protocols import resolve_protocol
from trt_engine.benchmark.query_trace import Progress, ProgressMonitor, QueryTrace, to_ns
from trt_engine.config.bench import BenchConfig
from trt_engine.device import Buffer, Device, Event, Graph, Stream, parse_device
from trt_engine.device.info import clocks
from trt_engine.engine import Engine
from trt_engine.errors import Interrupted, MemoryExhausted, TrtEngineError
from trt_engine.format import library_reason
from trt_engine.protocols import Context, Session
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.tensors import Shape, Tensors

PROGRESS_INTERVAL_NS = 100_000_000
"""Interval of progress reports and stop checks."""


def measure(
    session: Session,
    engine: Engine,
    config: BenchConfig,
    *,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> BenchRecord:
    """Measure a loaded engine; the record has every sample.

    Raises `ProfileError` for shapes outside the engine's profiles before anything runs. When `should_stop` returns True, the
    partial record is returned with `complete=False`. Ctrl-C raises `Interrupted` with it as `partial`, None without samples.
    """
    device, protocol = effective_protocol(session, config)
    measured = MeasuredEngine(engine, config, device, protocol)
    watch = ProgressMonitor(protocol, on_progress, should_stop)
    trace = QueryTrace(protocol)
    warnings = ignored_option_warnings(config, protocol, device)
    load = clocks().load_average
    interrupted = False
    with prepare_query(session, engine, measured.feeds, protocol, warnings) as query:
        protocol = query.protocol
        loop = query.loop(protocol, trace, watch)
        with gc_paused():
            try:
                loop()
            except KeyboardInterrupt:
                interrupted = True
            except TrtEngineError:
                if should_stop is None or not should_stop():
                    raise
                watch.stopped = True  # the running query was aborted
    measured.finish()
    trace.compute_times()
    warnings += machine_warnings(measured.before, measured.after, measured.gpu, load)
    record = measured.record(
        protocol,
        trace.compute_ms,
        **{name: tuple(getattr(trace, name)) for name in ("latency_ms", "enqueue_ms", "h2d_ms", "d2h_ms")},
        wall_s=trace.wall_s,
        warmup_queries=trace.warmup_queries,
        runtime_info=session.runtime_info(),
        warnings=(*warnings, *sample_warnings(trace, protocol, config)),
        complete=not (interrupted or watch.stopped),
    )
    if interrupted:
        raise Interrupted(
            f"interrupted after {record.queries} queries",
            hint="the same command measures again",
            partial=record if record.queries else None,
        )
    return record


def effective_protocol(session: Session, config: BenchConfig, *, events: bool | None = None) -> tuple[str, Protocol]:
    """The device of a session and the effective protocol on it; `events=False` forces the host clock."""
    direct = session.runs_host_arrays
    device = session.runtime_info().get("device", session.device.name)  # GPU providers have host buffers
    by_events = not direct if events is None else events and not direct
    return device, resolve_protocol(config, device, events=by_events, resident=not direct or session.binds_resident)


@dataclass(frozen=True, slots=True)
class QueryBurst:
    """Times of consecutive queries, and wall time from first start to last end."""

    samples_ms: tuple[float, ...]
    wall_s: float


@dataclass(frozen=True, slots=True)
class PreparedQuery:
    """A repeatable query: a host call or streams to enqueue on, and its effective protocol."""

    protocol: Protocol
    call: Callable[[], Any] | None
    streams: list[_QueryStream]

    def loop(self, protocol: Protocol, trace: QueryTrace, watch: ProgressMonitor) -> Callable[[], None]:
        """The measuring loop, which writes to `trace`."""
        if self.call is not None:
            return _host_loop(self.call, protocol, trace, watch)
        return _event_loop(self.streams, protocol, trace, watch)

    def measure_burst(self, duration_s: float, queries: int, warmup: int = 1) -> QueryBurst:
        """Measure at least `queries` queries and `duration_s`, after `warmup` discarded ones."""
        rules = dataclasses.replace(
            self.protocol, warmup_s=0.0, duration_s=duration_s, min_iterations=queries, min_warmup=warmup
        )
        trace = QueryTrace(rules, capacity=1 << 10)
        self.loop(rules, trace, ProgressMonitor(rules, None, None))()
        trace.compute_times()
        return QueryBurst(tuple(trace.compute_ms), trace.wall_s)


@contextlib.contextmanager
def prepare_query(
    session: Session, engine: Engine, feeds: Tensors, protocol: Protocol, warnings: list[str]
) -> Iterator[PreparedQuery]:
    """Prepare a query: upload feeds, capture the graph where the protocol has one; add a warning where that fails.

    Contexts timed by the host clock run synchronized on one stream.
    """
    with contextlib.ExitStack() as stack:
        if session.runs_host_arrays:
            call, protocol = _host_query(session, feeds, protocol, warnings)
            yield PreparedQuery(protocol, call, [])
            return
        query_streams = [
            stack.enter_context(_open_query_stream(session, engine, feeds, protocol)) for _ in range(protocol.streams)
        ]
        if session.compiles_at_first_use:  # a protocol without warm-up would measure it
            for query_stream in query_streams:
                query_stream.compute()
                query_stream.stream.synchronize()
        protocol = _capture_graphs(query_streams, protocol, warnings)
        yield PreparedQuery(
            protocol, query_streams[0].run_synchronized if protocol.clock == "host" else None, query_streams
        )


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Device-event times of one query, in ms."""

    h2d_ms: float
    compute_ms: float
    d2h_ms: float


def stage_times(
    session: Session, engine: Engine, feeds: Tensors, protocol: Protocol, *, queries: int, warmup: int
) -> tuple[StageTimes, ...]:
    """H2D, compute and D2H times of single synchronized queries; empty for a session without device events.

    Sessions called with host arrays are timed too where they have contexts on a device.
    """
    if parse_device(session.device.name)[0] == "cpu":
        return ()
    found = []
    with _open_query_stream(session, engine, feeds, dataclasses.replace(protocol, transfers=True)) as query_stream:
        _capture_graphs([query_stream], protocol, [])
        for _ in range(warmup + queries):
            begun, uploaded, computed, ended, _ = query_stream.enqueue()
            query_stream.stream.synchronize()
            found.append(
                StageTimes(uploaded.elapsed_ms(begun), computed.elapsed_ms(uploaded), ended.elapsed_ms(computed))
            )
    return tuple(found[warmup:])


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Collect garbage, then disable collection in the block."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _host_query(
    session: Session, feeds: Tensors, protocol: Protocol, warnings: list[str]
) -> tuple[Callable[[], Any], Protocol]:
    """The call for one query and its effective protocol; a warning where graph capture fails."""
    if protocol.transfers or not session.binds_resident:
        return functools.partial(session.run, feeds), protocol
    if protocol.graph:
        try:
            return session.bind_resident(feeds, graph=True), protocol
        except MemoryExhausted:
            raise
        except TrtEngineError as error:
            protocol = _without_graph(protocol, error.message, warnings)
    return session.bind_resident(feeds), protocol


def _host_loop(
    run: Callable[[], Any], protocol: Protocol, trace: QueryTrace, watch: ProgressMonitor
) -> Callable[[], None]:
    """The loop over synchronous calls."""
    clock, sleep = time.perf_counter_ns, time.sleep
    warm_ns, full_ns = to_ns(protocol.warmup_s), to_ns(protocol.warmup_s + protocol.duration_s)
    least, idle_s = protocol.min_iterations, protocol.idle_s
    skipped, lasting_ns = protocol.min_warmup, to_ns(protocol.duration_s) if protocol.min_warmup else 0

    def loop() -> None:
        count, room = 0, trace.capacity
        starts, ends = trace.starts_ns.values, trace.ends_ns.values
        trace.origin_ns = origin = clock()
        warm, full, tick = origin + warm_ns, origin + full_ns, origin + PROGRESS_INTERVAL_NS
        try:
            while True:
                start = clock()
                outputs = run()
                end = clock()
                del outputs  # released outside the measured time
                starts[count] = start
                ends[count] = end
                count += 1
                if count == room:
                    trace.starts_ns.grow()
                    trace.ends_ns.grow()
                    room *= 2
                if end >= tick:
                    if watch.poll((end - origin) / 1e9):
                        break
                    tick = end + PROGRESS_INTERVAL_NS
                if end >= full:
                    first = max(bisect.bisect_left(starts, warm, 0, count), skipped)
                    if count - first >= least and end - starts[first] >= lasting_ns:
                        break
                if idle_s and start >= warm:
                    sleep(idle_s)
        finally:
            trace.count = count

    return loop


@dataclass(slots=True)
class _QueryStream:
    """One query at a time on one stream: context, buffers, and the captured graph."""

    device: Device
    context: Context
    stream: Stream
    uploads: list[tuple[Any, Buffer]]
    downloads: list[tuple[Buffer, Any]]
    transfers: bool
    graph: Graph | None = None

    def upload(self) -> None:
        for host, buffer in self.uploads:
            self.device.upload(host, buffer, self.stream)

    def compute(self) -> None:
        if self.graph is not None:
            self.graph.replay(self.stream)
        else:
            self.context.enqueue(self.stream)

    def run_synchronized(self) -> None:
        """Run one query and wait for it."""
        if self.transfers:
            self.upload()
        self.compute()
        if self.transfers:
            self.download()
        self.stream.synchronize()

    def download(self) -> None:
        for buffer, host in self.downloads:
            self.device.download(buffer, host, self.stream)

    def enqueue(self) -> tuple[Event, Event, Event, Event, int]:
        """Enqueue one query; returns the events around H2D, compute and D2H, and the enqueue time in ns."""
        stream = self.stream
        begun = uploaded = stream.record()
        if self.transfers:
            self.upload()
            uploaded = stream.record()
        start = time.perf_counter_ns()
        self.compute()
        enqueue_ns = time.perf_counter_ns() - start
        computed = ended = stream.record()
        if self.transfers:
            self.download()
            ended = stream.record()
        return begun, uploaded, computed, ended, enqueue_ns


@contextlib.contextmanager
def _open_query_stream(session: Session, engine: Engine, feeds: Tensors, protocol: Protocol) -> Iterator[_QueryStream]:
    """A stream with the inputs uploaded; everything is released on exit."""
    with contextlib.ExitStack() as stack:
        device = session.device
        context = session.create_context(profile_index(engine.passport.profiles, feeds))
        stack.callback(context.close)
        found = context.prepare({name: tuple(value.shape) for name, value in feeds.items()})
        buffers: dict[str, Buffer] = {}

        def buffer(name: str, kind: str, shape: Shape) -> Buffer:
            buffers[name] = made = device.allocate(max(1, math.prod(shape) * numpy_dtype(kind).itemsize))
            stack.callback(made.close)
            return made

        hosts = {name: np.ascontiguousarray(value).reshape(value.shape) for name, value in feeds.items()}
        uploads = [
            (hosts[spec.name], buffer(spec.name, spec.dtype, hosts[spec.name].shape))
            for spec in session.signature.inputs
        ]
        downloads = [
            (buffer(spec.name, spec.dtype, found[spec.name]), np.empty(found[spec.name], numpy_dtype(spec.dtype)))
            for spec in session.signature.outputs
            if all(size >= 0 for size in found[spec.name])
        ]
        context.bind(buffers)
        stream = device.stream()
        stack.callback(stream.close)
        query_stream = _QueryStream(device, context, stream, uploads, downloads, protocol.transfers)
        stack.callback(lambda: query_stream.graph.close() if query_stream.graph is not None else None)
        query_stream.upload()
        stream.synchronize()
        try:
            yield query_stream
        finally:
            stream.synchronize()  # after Ctrl-C too: buffers must not be freed while in use


def _capture_graphs(query_streams: list[_QueryStream], protocol: Protocol, warnings: list[str]) -> Protocol:
    """Capture a graph per stream where the protocol has one; on failure add a warning and return a protocol without."""
    if not protocol.graph:
        return protocol
    try:
        for query_stream in query_streams:
            query_stream.context.enqueue(
                query_stream.stream
            )  # once before capture: the first run allocates, and capture forbids that
            query_stream.stream.synchronize()
            if reason := query_stream.context.no_graph:
                raise TrtEngineError(reason)
            query_stream.graph = query_stream.stream.capture(query_stream.context.enqueue)
    except Exception as error:  # any library error: capture is optional
        for query_stream in query_streams:
            if query_stream.graph is not None:
                query_stream.graph.close()
                query_stream.graph = None
        return _without_graph(protocol, library_reason(error), warnings)
    return protocol


def _without_graph(protocol: Protocol, reason: str, warnings: list[str]) -> Protocol:
    warnings.append(f"the graph could not be captured ({reason}); measured without one")
    return dataclasses.replace(protocol, graph=False, not_applicable=(*protocol.not_applicable, "graph"))


def _event_loop(
    query_streams: list[_QueryStream], protocol: Protocol, trace: QueryTrace, watch: ProgressMonitor
) -> Callable[[], None]:
    """The loop over streams: enqueue query i, then wait for query i - 1, so that the device never idles."""
    warm_ms, full_ms = protocol.warmup_s * 1e3, (protocol.warmup_s + protocol.duration_s) * 1e3
    least, idle_s = protocol.min_iterations * len(query_streams), protocol.idle_s
    skipped, lasting_ms = (
        protocol.min_warmup * len(query_streams),
        protocol.duration_s * 1e3 if protocol.min_warmup else 0.0,
    )

    def loop() -> None:
        origins = [query_stream.stream.record() for query_stream in query_streams]
        for query_stream in query_streams:
            query_stream.stream.synchronize()
        late_ms = [origin.elapsed_ms(origins[0]) for origin in origins]
        flying: list[tuple[Event, Event, Event, Event, int] | None] = [None] * len(query_streams)
        parts = trace.event_times
        kept, now_ms, tick_ms = 0, 0.0, PROGRESS_INTERVAL_NS / 1e6
        first_ms = 0.0 if not skipped else math.inf  # start of the first measured query

        def land(index: int) -> tuple[float, bool]:
            """Wait for the stream's query and record it; returns its end time and whether it is measured."""
            query = flying[index]
            flying[index] = None
            if query is None:
                return 0.0, False
            begun, uploaded, computed, ended, enqueue_ns = query
            compute_ms = computed.elapsed_ms(uploaded)
            h2d_ms = uploaded.elapsed_ms(begun) if uploaded is not begun else 0.0
            d2h_ms = ended.elapsed_ms(computed) if ended is not computed else 0.0
            start_ms = begun.elapsed_ms(origins[index]) + late_ms[index]
            end_ms = ended.elapsed_ms(origins[index]) + late_ms[index]
            parts.append((start_ms, end_ms, h2d_ms, compute_ms, d2h_ms, enqueue_ns / 1e6))
            return end_ms, start_ms + h2d_ms >= warm_ms and len(parts) > skipped

        while not (now_ms >= full_ms and kept >= least and now_ms - first_ms >= lasting_ms):
            for index, query_stream in enumerate(query_streams):
                query = query_stream.enqueue()
                end_ms, counts = land(index)
                flying[index] = query
                now_ms = max(now_ms, end_ms)
                first_ms = min(first_ms, end_ms) if counts else first_ms
                kept += counts
            if now_ms >= tick_ms:
                tick_ms = now_ms + PROGRESS_INTERVAL_NS / 1e6
                if watch.poll(now_ms / 1e3):
                    break
            if idle_s and now_ms >= warm_ms:
                time.sleep(idle_s)
        for index in range(len(query_streams)):
            land(index)

    return loop

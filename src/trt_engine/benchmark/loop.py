"""The closed loop: `measure` runs one query after another over a `Session` and keeps every time.

A `DirectSession` (ONNX Runtime) is timed by the host's clock around the call; on a GPU around a synchronised run whose
feeds and outputs stay there, where the session can do that (`ResidentSession`). A session with contexts is timed by events
around upload, computation and download, by trtexec's definitions (samples/common/sampleInference.cpp and
sampleReporting.cpp of the public TensorRT repository): latency is the sum of the three parts of one query, throughput is
queries over the time from the first start to the last end, and warm-up queries are those that started before its end.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import dataclasses
import datetime
import functools
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from trt_engine.benchmark.protocols import resolve
from trt_engine.benchmark.stability import instability
from trt_engine.config import BenchConfig, first_fitting
from trt_engine.device import Buffer, Device, Event, Graph, Stream, parse_device
from trt_engine.device.info import Clocks, clocks, cpu
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import Interrupted, MemoryExhausted, ProfileError, TrtEngineError, UsageError
from trt_engine.protocols import Context, DirectSession, ResidentSession, Session
from trt_engine.records import BenchRecord, Protocol, percentile
from trt_engine.runtime.feeds import numpy_dtype, random_feeds, read_feeds, shapes_of
from trt_engine.tensors import Shape, Signature, Tensors, format_shape

__all__ = ["Parts", "Query", "Turn", "batch_of", "feeds_for", "in_force", "measure", "parts", "quiet", "ready"]

Progress = Callable[[float, float], None]
"""Seconds done and seconds planned, warm-up included; called between queries, a few times a second."""

log = logging.getLogger(__name__)

_TICK_NS = 100_000_000
"""How often the loop looks up from its work: progress, and whether to stop."""


def measure(
    session: Session,
    engine: Engine,
    config: BenchConfig,
    *,
    on_progress: Progress | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> BenchRecord:
    """Measure an engine that is loaded; the record has every sample.

    Raises `ProfileError` for shapes outside the engine's profiles before anything runs. When `should_stop` says so the
    record of what was measured until then comes back with `complete=False`; Ctrl-C raises `Interrupted` with that record
    as its `partial`, None when no query was kept.
    """
    feeds, inputs = feeds_for(engine, config)
    shapes = {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()}
    device, protocol = in_force(session, config)
    kind, number = parse_device(device)
    gpu = number if kind == "cuda" else None
    batch = batch_of(engine.signature, shapes)
    log.info(
        "measuring `%s` at batch %d on %s: warm-up: %g s, then %g s, protocol %s",
        engine.path.name, batch, device, protocol.warmup_s, protocol.duration_s, protocol.name,
    )  # fmt: skip
    watch = _Watch(protocol, on_progress, should_stop)
    trace = _Trace(protocol)
    warnings = _asked_in_vain(config, protocol, device)
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    before, load = clocks(gpu), clocks().load_average
    stopped = False
    with ready(session, engine, feeds, protocol, warnings) as query:
        protocol = query.protocol
        loop = query.loop(protocol, trace, watch)
        with quiet():
            try:
                loop()
            except KeyboardInterrupt:
                stopped = True
    after = clocks(gpu)
    trace.finish()
    reasons = instability(trace.compute_ms, protocol, (*before.throttled, *after.throttled))
    record = BenchRecord(
        engine=str(engine.path),
        backend=engine.passport.backend,
        device=device,
        batch=batch,
        shapes=shapes,
        protocol=protocol,
        environment=Environment.here(gpu),
        compute_ms=tuple(trace.compute_ms),
        wall_s=trace.wall_s,
        started=started,
        queries=len(trace.compute_ms),
        warmup_queries=trace.warmup_queries,
        latency_ms=tuple(trace.latency_ms),
        enqueue_ms=tuple(trace.enqueue_ms),
        h2d_ms=tuple(trace.h2d_ms),
        d2h_ms=tuple(trace.d2h_ms),
        clocks=(before, after),
        facts=session.facts(),
        stable=not reasons,
        instability=reasons,
        warnings=(
            *warnings,
            *about_the_machine(before, after, gpu, load),
            *_about_the_samples(trace, protocol, config),
        ),
        complete=not (stopped or watch.stopped),
        percentiles=config.percentiles,
        inputs=inputs,
    )
    if stopped:
        raise Interrupted(
            f"interrupted after {record.queries} queries",
            hint="the same command measures again",
            partial=record if record.queries else None,
        )
    return record


# ------------------------------------------------------------------------------------------------ ready to be measured


def in_force(session: Session, config: BenchConfig, *, events: bool | None = None) -> tuple[str, Protocol]:
    """The device a session runs on, and the protocol in force there; with `events=False` by the host's clock."""
    direct = hasattr(session, "run")
    device = session.facts().get("device", session.device.name)  # a provider on a GPU keeps its buffers on the host
    by_events = not direct if events is None else events and not direct
    return device, resolve(config, device, events=by_events, resident=not direct or hasattr(session, "resident"))


@dataclass(frozen=True, slots=True)
class Turn:
    """Some queries in a row: their times, and the time from the first start to the last end."""

    samples_ms: tuple[float, ...]
    wall_s: float


@dataclass(frozen=True, slots=True)
class Query:
    """One query of an engine, ready to be repeated: what is called or enqueued, and the protocol as it came true."""

    protocol: Protocol
    call: Callable[[], Any] | None
    lanes: list[_Lane]

    def loop(self, protocol: Protocol, trace: _Trace, watch: _Watch) -> Callable[[], None]:
        """The loop that keeps its times in `trace`."""
        if self.call is not None:
            return _direct(self.call, protocol, trace, watch)
        return _by_events(self.lanes, protocol, trace, watch)

    def turn(self, duration_s: float, queries: int, warmup: int = 1) -> Turn:
        """At least so many queries over at least that long, after `warmup` that are left out."""
        rules = dataclasses.replace(
            self.protocol, warmup_s=0.0, duration_s=duration_s, min_iterations=queries, min_warmup=warmup
        )
        trace = _Trace(rules, room=1 << 10)
        self.loop(rules, trace, _Watch(rules, None, None))()
        trace.finish()
        return Turn(tuple(trace.compute_ms), trace.wall_s)


@contextlib.contextmanager
def ready(session: Session, engine: Engine, feeds: Tensors, protocol: Protocol, warnings: list[str]) -> Iterator[Query]:
    """One query with its feeds in place, its graph captured where the protocol has one; what is not to be had is said.

    A session with contexts under a protocol by the host's clock is a synchronised run of one of them.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(session, "run"):
            call, protocol = _call(session, feeds, protocol, warnings)  # type: ignore[arg-type]
            yield Query(protocol, call, [])
            return
        lanes = [stack.enter_context(_lane(session, engine, feeds, protocol)) for _ in range(protocol.streams)]
        protocol = _captured(lanes, protocol, warnings)
        yield Query(protocol, lanes[0].synchronised if protocol.clock == "host" else None, lanes)


@dataclass(frozen=True, slots=True)
class Parts:
    """One query by the device's events, in ms."""

    h2d_ms: float
    compute_ms: float
    d2h_ms: float


def parts(
    session: Session, engine: Engine, feeds: Tensors, protocol: Protocol, *, queries: int, warmup: int
) -> tuple[Parts, ...]:
    """Upload, computation and download of single queries, each waited for; empty for a session without a device's events.

    Sessions that are called with host arrays are timed here too where they have contexts on a device.
    """
    if parse_device(session.device.name)[0] == "cpu":
        return ()
    found = []
    with _lane(session, engine, feeds, dataclasses.replace(protocol, transfers=True)) as lane:
        _captured([lane], protocol, [])
        for _ in range(warmup + queries):
            begun, uploaded, computed, ended, _ = lane.issue()
            lane.stream.synchronize()
            found.append(Parts(uploaded.elapsed_ms(begun), computed.elapsed_ms(uploaded), ended.elapsed_ms(computed)))
    return tuple(found[warmup:])


# ------------------------------------------------------------------------------------------------ inputs


def feeds_for(engine: Engine, config: BenchConfig) -> tuple[dict[str, Any], str]:
    """The inputs to measure with, and where they came from; inside one of the engine's profiles, or `ProfileError`."""
    signature, profiles = engine.signature, engine.passport.profiles
    if config.inputs is not None:
        feeds = read_feeds(config.inputs, signature)
        shapes = {name: tuple(value.shape) for name, value in feeds.items()}
        for name, shape in config.shapes.items():
            signature.input(name)
            if shapes[name] != shape:
                raise UsageError(
                    f"`--shapes` says `{name}` is {format_shape(shape)}, `{config.inputs}` has {format_shape(shapes[name])}",
                    hint="leave `--shapes` out: the file says it",
                )
        if config.batch is not None and config.batch != (found := batch_of(signature, shapes)):
            raise UsageError(
                f"`--batch` is {config.batch}, `{config.inputs}` has {found} rows", hint="leave `--batch` out"
            )
        _inside(profiles, feeds)
        return feeds, config.inputs.name
    shapes = _shapes(engine, config)
    return random_feeds(signature, shapes, config.seed), f"seeded random, seed {config.seed}"


def _shapes(engine: Engine, config: BenchConfig) -> dict[str, Shape]:
    """The shapes asked for, in the first profile that holds them."""
    refused: ProfileError | None = None
    for profile in engine.passport.profiles or (None,):
        try:
            return shapes_of(engine.signature, profile, batch=config.batch, overrides=config.shapes)
        except ProfileError as error:
            refused = refused or error
    raise refused or UsageError("the engine has no inputs to shape", hint="trt-engine inspect")


def _inside(profiles: tuple[Any, ...], feeds: Tensors) -> int:
    """The number of the first profile that holds the feeds; its `ProfileError` when none does."""
    return first_fitting(profiles, lambda profile, index: profile.check(feeds, index))


def batch_of(signature: Signature, shapes: Mapping[str, Shape]) -> int:
    """Rows in one query: the moving first dimension, or the one all inputs share; 1 where there is none."""
    if signature.batch_axis:
        return shapes[signature.inputs[0].name][0]
    first = {shapes[spec.name][0] if len(spec.shape) > 1 else 1 for spec in signature.inputs}
    return first.pop() if len(first) == 1 else 1


# ------------------------------------------------------------------------------------------------ what is kept


class _Watch:
    """Looks up between queries: tells the progress, asks whether to stop."""

    def __init__(
        self, protocol: Protocol, on_progress: Progress | None, should_stop: Callable[[], bool] | None
    ) -> None:
        self.planned_s = protocol.warmup_s + protocol.duration_s
        self.on_progress = on_progress
        self.should_stop = should_stop
        self.stopped = False

    def look(self, done_s: float) -> bool:
        """True when the loop must end."""
        if self.on_progress is not None:
            self.on_progress(done_s, self.planned_s)
        if self.should_stop is not None and self.should_stop():
            self.stopped = True
        return self.stopped


class _Column:
    """Numbers of one kind, room made before they come."""

    def __init__(self, kind: str, room: int) -> None:
        self.values = array.array(kind, bytes(room * array.array(kind).itemsize))

    def grow(self) -> None:
        self.values.frombytes(bytes(len(self.values) * self.values.itemsize))


@dataclass(slots=True)
class _Trace:
    """The queries of one loop, and from `finish` on the figures of those that count."""

    protocol: Protocol
    room: int = 1 << 14
    count: int = 0
    starts_ns: _Column = field(init=False)
    ends_ns: _Column = field(init=False)
    parts: list[tuple[float, float, float, float, float, float]] = field(default_factory=list)
    """By events: start, end, h2d, compute, d2h, enqueue in ms."""
    compute_ms: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    enqueue_ms: list[float] = field(default_factory=list)
    h2d_ms: list[float] = field(default_factory=list)
    d2h_ms: list[float] = field(default_factory=list)
    warmup_queries: int = 0
    wall_s: float = 0.0
    origin_ns: int = 0

    def __post_init__(self) -> None:
        self.starts_ns, self.ends_ns = _Column("q", self.room), _Column("q", self.room)

    def finish(self) -> None:
        """Work out the figures; what started before the warm-up's end is left out."""
        if self.count:
            starts, ends = self.starts_ns.values, self.ends_ns.values
            first = bisect.bisect_left(starts, self.origin_ns + _ns(self.protocol.warmup_s), 0, self.count)
            first = min(max(first, self.protocol.min_warmup), self.count)
            self.warmup_queries = first
            self.compute_ms = [(ends[index] - starts[index]) / 1e6 for index in range(first, self.count)]
            if first < self.count:
                self.wall_s = (ends[self.count - 1] - starts[first]) / 1e9
        elif self.parts:
            self.parts.sort(key=lambda part: part[0])  # streams side by side end in any order
            warm_ms = self.protocol.warmup_s * 1e3
            first = next((i for i, part in enumerate(self.parts) if part[0] + part[2] >= warm_ms), len(self.parts))
            first = min(max(first, self.protocol.min_warmup * self.protocol.streams), len(self.parts))
            self.warmup_queries = first
            kept = self.parts[first:]
            self.compute_ms = [part[3] for part in kept]
            if kept:
                self.wall_s = (max(part[1] for part in kept) - kept[0][0]) / 1e3
            if self.protocol.clock == "device events":
                self.enqueue_ms = [part[5] for part in kept]
                self.latency_ms = [part[2] + part[3] + part[4] for part in kept]
                if self.protocol.transfers:
                    self.h2d_ms = [part[2] for part in kept]
                    self.d2h_ms = [part[4] for part in kept]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while it lasts; what is garbage already is collected before."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# ------------------------------------------------------------------------------------------------ by the host's clock


def _call(
    session: DirectSession, feeds: Tensors, protocol: Protocol, warnings: list[str]
) -> tuple[Callable[[], Any], Protocol]:
    """What one query is, and the protocol as it came true: a graph that cannot be captured is said, and left out."""
    if protocol.transfers or not hasattr(session, "resident"):
        return functools.partial(session.run, feeds), protocol
    resident = cast(ResidentSession, session).resident
    if protocol.graph:
        try:
            return resident(feeds, graph=True), protocol
        except MemoryExhausted:
            raise
        except TrtEngineError as error:
            protocol = _without_graph(protocol, error.message, warnings)
    return resident(feeds), protocol


def _direct(run: Callable[[], Any], protocol: Protocol, trace: _Trace, watch: _Watch) -> Callable[[], None]:
    """The loop over calls that return when the work is done."""
    clock, sleep = time.perf_counter_ns, time.sleep
    warm_ns, full_ns = _ns(protocol.warmup_s), _ns(protocol.warmup_s + protocol.duration_s)
    least, idle_s = protocol.min_iterations, protocol.idle_s
    skipped, lasting_ns = protocol.min_warmup, _ns(protocol.duration_s) if protocol.min_warmup else 0

    def loop() -> None:
        count, room = 0, trace.room
        starts, ends = trace.starts_ns.values, trace.ends_ns.values
        trace.origin_ns = origin = clock()
        warm, full, tick = origin + warm_ns, origin + full_ns, origin + _TICK_NS
        try:
            while True:
                start = clock()
                outputs = run()
                end = clock()
                del outputs  # given back outside the measured time
                starts[count] = start
                ends[count] = end
                count += 1
                if count == room:
                    trace.starts_ns.grow()
                    trace.ends_ns.grow()
                    room *= 2
                if end >= tick:
                    if watch.look((end - origin) / 1e9):
                        break
                    tick = end + _TICK_NS
                if end >= full:
                    first = max(bisect.bisect_left(starts, warm, 0, count), skipped)
                    if count - first >= least and end - starts[first] >= lasting_ns:
                        break
                if idle_s and start >= warm:
                    sleep(idle_s)
        finally:
            trace.count = count

    return loop


# ------------------------------------------------------------------------------------------------ by events


@dataclass(slots=True)
class _Lane:
    """One query at a time on one stream: context, buffers, and the graph once it is captured."""

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

    def synchronised(self) -> None:
        """One query from its start to its end, as the host sees it."""
        if self.transfers:
            self.upload()
        self.compute()
        if self.transfers:
            self.fetch()
        self.stream.synchronize()

    def fetch(self) -> None:
        for buffer, host in self.downloads:
            self.device.download(buffer, host, self.stream)

    def issue(self) -> tuple[Event, Event, Event, Event, int]:
        """Put one query on the stream: the events around its parts, and the host's time to enqueue it."""
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
            self.fetch()
            ended = stream.record()
        return begun, uploaded, computed, ended, enqueue_ns


@contextlib.contextmanager
def _lane(session: Session, engine: Engine, feeds: Tensors, protocol: Protocol) -> Iterator[_Lane]:
    """A lane with its inputs on the device; everything is given back in the end."""
    with contextlib.ExitStack() as stack:
        device = session.device
        context = session.context(_inside(engine.passport.profiles, feeds))
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
        lane = _Lane(device, context, stream, uploads, downloads, protocol.transfers)
        stack.callback(lambda: lane.graph.close() if lane.graph is not None else None)
        lane.upload()
        stream.synchronize()
        try:
            yield lane
        finally:
            stream.synchronize()  # after Ctrl-C too: nothing is freed under a device at work


def _captured(lanes: list[_Lane], protocol: Protocol, warnings: list[str]) -> Protocol:
    """Capture a graph in each lane where the protocol has one; a failure is said, and the protocol tells the truth."""
    if not protocol.graph:
        return protocol
    try:
        for lane in lanes:
            lane.context.enqueue(lane.stream)  # once before capture: the first run allocates, and capture forbids that
            lane.stream.synchronize()
            lane.graph = lane.stream.capture(lane.context.enqueue)
    except Exception as error:  # whatever the library raises: capture is a wish, the measurement is not
        for lane in lanes:
            if lane.graph is not None:
                lane.graph.close()
                lane.graph = None
        return _without_graph(protocol, str(error).partition("\n")[0], warnings)
    return protocol


def _without_graph(protocol: Protocol, reason: str, warnings: list[str]) -> Protocol:
    warnings.append(f"the graph could not be captured ({reason}); measured without one")
    return dataclasses.replace(protocol, graph=False, not_applicable=(*protocol.not_applicable, "graph"))


def _by_events(lanes: list[_Lane], protocol: Protocol, trace: _Trace, watch: _Watch) -> Callable[[], None]:
    """The loop over contexts: query i is enqueued, then query i - 1 waited for, so that the device never idles."""
    warm_ms, full_ms = protocol.warmup_s * 1e3, (protocol.warmup_s + protocol.duration_s) * 1e3
    least, idle_s = protocol.min_iterations * len(lanes), protocol.idle_s
    skipped, lasting_ms = protocol.min_warmup * len(lanes), protocol.duration_s * 1e3 if protocol.min_warmup else 0.0

    def loop() -> None:
        origins = [lane.stream.record() for lane in lanes]
        for lane in lanes:
            lane.stream.synchronize()
        late_ms = [origin.elapsed_ms(origins[0]) for origin in origins]
        flying: list[tuple[Event, Event, Event, Event, int] | None] = [None] * len(lanes)
        parts = trace.parts
        kept, now_ms, tick_ms = 0, 0.0, _TICK_NS / 1e6
        first_ms = 0.0 if not skipped else math.inf  # start of the first query that counts

        def land(index: int) -> tuple[float, bool]:
            """Wait for the lane's query and keep its times; the time of its end and whether it counts."""
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
            for index, lane in enumerate(lanes):
                query = lane.issue()
                end_ms, counts = land(index)
                flying[index] = query
                now_ms = max(now_ms, end_ms)
                first_ms = min(first_ms, end_ms) if counts else first_ms
                kept += counts
            if now_ms >= tick_ms:
                tick_ms = now_ms + _TICK_NS / 1e6
                if watch.look(now_ms / 1e3):
                    break
            if idle_s and now_ms >= warm_ms:
                time.sleep(idle_s)
        for index in range(len(lanes)):
            land(index)

    return loop


# ------------------------------------------------------------------------------------------------ what is said


def _asked_in_vain(config: BenchConfig, protocol: Protocol, device: str) -> list[str]:
    """What was asked for by an option and is not in force."""
    said = []
    for name in ("transfers", "graph", "spin"):
        if getattr(config, name) and not getattr(protocol, name):
            said.append(f"`--{name}` has no effect on `{device}`")
    if config.streams != protocol.streams:
        said.append(f"`--streams {config.streams}` has no effect on `{device}`: one query at a time")
    if "compute only" in protocol.not_applicable:
        said.append(f"times on `{device}` are the host's clock around a call: the copies it makes are inside")
    return said


def about_the_machine(before: Clocks, after: Clocks, gpu: int | None, load: float | None) -> list[str]:
    """Warnings about clocks that were held down or free to move, and about a machine that was busy before."""
    said = []
    if held := sorted({*before.throttled, *after.throttled}):
        said.append(f"GPU clocks were held down: {', '.join(held)}")
    if gpu is not None and before.sm_mhz and after.sm_mhz and before.sm_mhz != after.sm_mhz:
        said.append(
            f"GPU clocks are not locked ({before.sm_mhz} MHz before, {after.sm_mhz} MHz after); to lock them: "
            f"`sudo nvidia-smi -i {gpu} -lgc {after.sm_mhz}` (never run by this tool)"
        )
    if load is not None and load > (cores := cpu().cores):
        said.append(f"the machine was busy before the measurement: load average {load:g} on {cores} cores")
    return said


def _about_the_samples(trace: _Trace, protocol: Protocol, config: BenchConfig) -> list[str]:
    count = len(trace.compute_ms)
    said = []
    highest = max(config.percentiles, default=0.0)
    if count and highest < 100 and percentile(range(count), highest) == count - 1:
        said.append(f"{count} queries are too few for the {highest:g} % percentile: it is the largest value")
    if protocol.clock == "device events" and count and protocol.streams == 1:
        compute = float(np.median(trace.compute_ms))
        for name, values in (("enqueue", trace.enqueue_ms), ("h2d", trace.h2d_ms), ("d2h", trace.d2h_ms)):
            limit = 0.8 * compute if name == "enqueue" else compute
            if values and float(np.median(values)) > limit:
                said.append(_BOUND[name])
    if protocol.streams > 1:
        said.append("several streams run side by side: throughput counts, the times of single queries overlap")
    return said


_BOUND = {
    "enqueue": "the host takes longer to enqueue than 80 % of the compute time: the device waits for it (try `--graph`)",
    "h2d": "copying inputs takes longer than computing (try `--no-transfers`)",
    "d2h": "copying outputs takes longer than computing (try `--no-transfers`)",
}

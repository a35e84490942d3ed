"""Node times by ONNX Runtime's profiler in a separate session.

The trace has one event per node (`NAME_kernel_time`, category `Node`) inside one `model_run` per inference. A Loop's event
includes its body, which is subtracted. On a GPU node times are launch times, because providers are asynchronous.
"""

from __future__ import annotations

import itertools
import logging
import math
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import onnxruntime as ort
from onnx import ModelProto

from trt_engine.atomic_io import decode_json, ensure_folder, read_bounded
from trt_engine.backends.onnxruntime import provider_names, providers, session
from trt_engine.backends.onnxruntime.host_session import OnnxRuntimeGpuSession, OnnxRuntimeSession
from trt_engine.backends.onnxruntime.node_mapping import map_nodes
from trt_engine.backends.onnxruntime.ort_values import is_numpy_dtype
from trt_engine.backends.onnxruntime.run import session_settings
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, TrtEngineError
from trt_engine.graph.cost import Cost, model_cost, node_cost, traffic_nbytes
from trt_engine.graph.dtype_breakdown import compute_layers
from trt_engine.graph.load import read_proto
from trt_engine.graph.shape_inference import TracedNode, flatten
from trt_engine.records.profile import LayerProfile, LayerRow
from trt_engine.tensors import DTYPES, Tensors

log = logging.getLogger(__name__)

TRACE = "onnxruntime.json"
_MOST_EVENTS = 100_000
"""Maximum events: each is about 800 bytes of JSON, and ONNX Runtime drops those beyond a million."""
_UNKNOWN_TRIPS = 50
_NODE = "_kernel_time"
_RUN = "model_run"
_TYPES = {"float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}


def profile(
    engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None
) -> LayerProfile:
    """Node times over `inferences` runs after `warmup` runs; writes the trace to `keep`.

    Runs are reduced, with a note, if the trace would be too long.
    """
    built = read_proto(engine.path)
    cost = model_cost(built, {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()})
    steps = flatten(cost.trace.nodes) if cost.trace is not None else []
    notes = []
    fits = max(1, _MOST_EVENTS // max(1, _estimate_events(cost)))
    if fits < inferences + warmup:
        warmup = min(warmup, max(1, fits // 10))
        fewer = max(1, min(inferences, fits - warmup))
        if fewer < inferences:
            notes.append(f"{fewer} of {inferences} inferences were profiled: the trace of more would be too long")
        inferences = fewer
    times = []
    with tempfile.TemporaryDirectory(prefix="trt-engine-trace-") as place:
        trace = (ensure_folder(keep) if keep is not None else Path(place)) / TRACE
        try:
            with trace_nodes(engine, feeds, config, trace=trace) as infer:
                for _ in range(warmup):
                    infer()
                for _ in range(inferences):
                    started = time.perf_counter()
                    infer()
                    times.append((time.perf_counter() - started) * 1e3)
        except BaseException:
            trace.unlink(missing_ok=True)
            raise
        runs = split_runs(read_trace(trace))
    if len(runs) < warmup + inferences:
        notes.append(f"the trace holds {len(runs)} of {warmup + inferences} runs: ONNX Runtime's profiler ran full")
        kept = runs[warmup:] or runs
    else:
        kept = runs[-inferences:]
    if not kept:
        raise EngineError(
            f"ONNX Runtime's trace of `{engine.path.name}` contains no run",
            hint="profile again; `-v` shows its log",
        )
    last = [event for event, _ in kept[-1]]
    if any(one.thread != other.thread and other.start_us < one.end_us for one, other in itertools.pairwise(last)):
        notes.append("nodes ran in parallel on several threads: their times add up to more than an inference")
    on_gpu = any(event.provider and not event.provider.startswith("CPU") for event, _ in kept[0])
    if on_gpu:
        notes.append("times of GPU nodes are host launch times: see the kernel table for GPU times")
    return LayerProfile(
        rows=_rows(kept, built, cost, steps, engine, config.device or engine.passport.device),
        inferences=len(kept),
        instrument=f"onnxruntime profiler {ort.__version__}",
        wall_ms=statistics.median(times),
        raw=str(trace) if keep is not None else None,
        notes=tuple(notes),
        clock="launch" if on_gpu else "host",
    )


@contextmanager
def trace_nodes(
    engine: Engine, feeds: Tensors, config: RuntimeConfig, *, trace: Path
) -> Iterator[Callable[[], object]]:
    """Yields a callable that runs one profiled inference; writes `trace` on exit.

    On a GPU the feeds are resident and no graph is used.
    """
    with tempfile.TemporaryDirectory(prefix="trt-engine-trace-") as place:
        loaded, choice = _create_profiled_session(engine, config, Path(place))
        plain = all(is_numpy_dtype(spec.dtype) and spec.dtype != "string" for spec in engine.signature)
        runner: OnnxRuntimeSession | None = None
        try:
            if choice.on_gpu and plain:
                runner = on_gpu = OnnxRuntimeGpuSession(
                    loaded, engine.signature, profiles=engine.passport.profiles, runtime_info={}, device=choice.device,
                    create_graph_session=lambda: loaded,
                )  # fmt: skip
                yield on_gpu.bind_resident(feeds)
            else:
                runner = direct = OnnxRuntimeSession(loaded, engine.signature, engine.passport.profiles, {})
                yield lambda: direct.run(feeds)
        finally:
            if runner is not None:
                runner.close()
            written = Path(loaded.end_profiling())
            shutil.move(written, trace)


def _create_profiled_session(
    engine: Engine, config: RuntimeConfig, folder: Path
) -> tuple[ort.InferenceSession, providers.ProviderSelection]:
    """The engine's session with profiling enabled."""
    options, level, choice = session_settings(engine, config)
    made = session.session_options(options, level=level)
    made.enable_profiling = True
    made.profile_file_prefix = str(folder / "onnxruntime")
    try:
        loaded = session.create_session(engine.path, made, choice)
    except session.ERRORS as error:
        raise session.translate_load_error(error, engine.path, choice) from error
    return loaded, providers.verify_active(loaded, choice, allow_fallback=config.allow_fallback)


def _estimate_events(cost: Cost) -> int:
    """Estimated events per run."""

    def within(steps: Sequence[TracedNode], times: int) -> int:
        total = 0
        for step in steps:
            trips = _UNKNOWN_TRIPS if step.trip_count is None else max(1, step.trip_count)
            total += times + sum(within(body, times * trips) for body in step.bodies)
        return total

    return within(cost.trace.nodes, 1) if cost.trace is not None else 0


# ------------------------------------------------------------------------------------------------ the trace


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One run of a node or of the model; times in us."""

    name: str
    start_us: float
    us: float
    thread: int = 0
    op: str = ""
    provider: str = ""
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Types and shapes."""
    outputs: tuple[tuple[str, tuple[int, ...]], ...] = ()

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def read_trace(path: Path) -> list[TraceEvent]:
    """Node and run events of a trace, sorted by start; a truncated trace is read as far as possible.

    `EngineError` if there are none.
    """
    try:
        text = read_bounded(path, error=EngineError)
    except OSError as error:
        raise _trace_error(path, (error.strerror or str(error)).lower()) from error
    try:
        items = decode_json(text)
    except msgspec.DecodeError:
        items = list(_line_by_line(text))
        log.warning("`%s` is truncated: reading the valid part", path.name)
    if not isinstance(items, list):
        raise _trace_error(path, "it is not a list of events")
    events = [event for item in items if isinstance(item, Mapping) and (event := _parse_event(item)) is not None]
    if not events:
        raise _trace_error(path, "there is no run in it")
    return sorted(events, key=lambda event: (event.start_us, -event.us))


def _line_by_line(text: bytes) -> Iterable[Any]:
    """The events of a truncated trace, one per line."""
    for line in text.splitlines():
        try:
            yield decode_json(line.strip().strip(b",[]"))
        except msgspec.DecodeError:
            continue


def _parse_event(item: Mapping[str, Any]) -> TraceEvent | None:
    name, category = item.get("name"), item.get("cat")
    is_node = category == "Node" and isinstance(name, str) and name.endswith(_NODE)
    if not isinstance(name, str) or not (is_node or (category == "Session" and name == _RUN)):
        return None
    args = item.get("args")
    args = args if isinstance(args, Mapping) else {}
    try:
        start, us = float(item["ts"]), float(item["dur"])
    except (KeyError, TypeError, ValueError):
        return None
    if not (math.isfinite(start) and us >= 0):
        return None
    thread = item.get("tid")
    return TraceEvent(
        name=name.removesuffix(_NODE) if is_node else name,
        start_us=start,
        us=us,
        thread=thread if isinstance(thread, int) else 0,
        op=str(args.get("op_name") or "") if is_node else "",
        provider=str(args.get("provider") or ""),
        inputs=_parse_types(args.get("input_type_shape")),
        outputs=_parse_types(args.get("output_type_shape")),
    )


def _parse_types(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Dtypes and shapes of `[{"float": [2, 16, 80, 80]}]`."""
    found = []
    for item in value if isinstance(value, list) else ():
        for kind, shape in item.items() if isinstance(item, Mapping) else ():
            if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
                found.append((_TYPES.get(str(kind), str(kind)), tuple(shape)))
    return tuple(found)


def _trace_error(path: Path, reason: str) -> EngineError:
    return EngineError(f"`{path}` is not a trace of ONNX Runtime: {reason}", hint="profile again")


def split_runs(events: Sequence[TraceEvent]) -> list[list[tuple[TraceEvent, float]]]:
    """Nodes of each complete run by start, each with its self time (nested nodes subtracted)."""
    runs = [event for event in events if event.name == _RUN and not event.op]
    nodes = [event for event in events if event.op or event.name != _RUN]
    found: list[list[tuple[TraceEvent, float]]] = []
    at = 0
    for run in runs:
        inside = []
        while at < len(nodes) and nodes[at].start_us < run.start_us:
            at += 1
        while at < len(nodes) and nodes[at].start_us <= run.end_us:
            inside.append(nodes[at])
            at += 1
        found.append(_self_times(inside))
    return found


def _self_times(events: Sequence[TraceEvent]) -> list[tuple[TraceEvent, float]]:
    """Each event with its self time: minus directly nested events of its thread."""
    own = [event.us for event in events]
    open_now: dict[int, list[int]] = defaultdict(list)
    for index, event in enumerate(events):
        stack = open_now[event.thread]
        while stack and events[stack[-1]].end_us < event.end_us:
            stack.pop()
        if stack and events[stack[-1]].us > 0:
            own[stack[-1]] -= event.us
        stack.append(index)
    return [(event, max(0.0, us)) for event, us in zip(events, own, strict=True)]


# ------------------------------------------------------------------------------------------------ the rows


@dataclass(slots=True)
class _NodeTimes:
    """One node over all runs."""

    event: TraceEvent
    calls: int
    us: list[float]
    """In each run."""


def _rows(
    runs: Sequence[Sequence[tuple[TraceEvent, float]]],
    built: ModelProto,
    cost: Cost,
    steps: Sequence[TracedNode],
    engine: Engine,
    device: str,
) -> tuple[LayerRow, ...]:
    seen: dict[tuple[str, str], _NodeTimes] = {}
    for index, run in enumerate(runs):
        for event, us in run:
            key = (event.name, event.op)
            if key not in seen:
                seen[key] = _NodeTimes(event, 0, [0.0] * len(runs))
            seen[key].calls += 1
            seen[key].us[index] += us
    known = _steps_by_name(steps)
    made_of = map_nodes(built, _source(engine))
    kinds = _node_dtypes(built, cost, engine)
    whole = sum(statistics.median(item.us) for item in seen.values())
    rows = []
    for (name, op), item in seen.items():
        event, calls = item.event, item.calls / len(runs)
        step = known.get((name, op))
        rows.append(
            LayerRow(
                name=name,
                kind=op,
                category="other",
                mean_ms=statistics.fmean(item.us) / 1e3,
                median_ms=statistics.median(item.us) / 1e3,
                share=statistics.median(item.us) / whole if whole else 0.0,
                calls=calls,
                device="cpu" if event.provider.startswith("CPU") else device,
                provider=provider_names.short_name(event.provider) if event.provider else "",
                dtypes=tuple(kind for kind, _ in event.outputs),
                shapes=tuple(shape for _, shape in event.outputs),
                onnx_nodes=made_of.get(next(filter(None, step.node.output), step.node.name), ()) if step else (),
                flops=_flops(step, calls),
                nbytes=_nbytes(step, event, calls),
                precision=kinds.get(step.key, "") if step is not None else "",
            )
        )
    return tuple(rows)


def _steps_by_name(steps: Sequence[TracedNode]) -> dict[tuple[str, str], TracedNode]:
    """Traced nodes by the profiler's name: node name, or operator and position."""
    found: dict[tuple[str, str], TracedNode] = {}
    for index, step in enumerate(steps):
        op = step.node.op_type
        found.setdefault((step.node.name or f"{op}_{index}", op), step)
    return found


def _source(engine: Engine) -> ModelProto | None:
    """The model the engine was built from, if the file still exists."""
    try:
        return read_proto(Path(engine.passport.model.file))
    except TrtEngineError:
        return None


def _node_dtypes(built: ModelProto, cost: Cost, engine: Engine) -> dict[str, str]:
    """The dtype of each node by trace key, taken literally from the graph as in the precision check."""
    tf32 = "tf32" in engine.passport.precision.shares
    return {layer.step.key: layer.dtype for layer in compute_layers(built, cost, tf32=tf32, literal=True)}


def _flops(step: TracedNode | None, calls: float) -> int | None:
    if step is None or step.bodies:
        return None if step is None else 0  # nodes with subgraphs compute nothing themselves
    found = (0, 0) if step.folded else node_cost(step)
    return None if found is None else round(found[1] * calls)


def _nbytes(step: TracedNode | None, event: TraceEvent, calls: float) -> int | None:
    found = traffic_nbytes(step) if step is not None else None
    if found is None:
        sizes = [DTYPES[kind].nbytes(shape) for kind, shape in (*event.inputs, *event.outputs) if kind in DTYPES]
        if len(sizes) < len(event.inputs) + len(event.outputs) or not event.outputs:
            return None
        found = sum(sizes)
    return round(found * calls)

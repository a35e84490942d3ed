"""ONNX Runtime's own times, node by node: its profiler in a session of its own, and the trace that it writes.

The trace is one event for each node that ran (`NAME_kernel_time`, category `Node`) inside one `model_run` for each
inference. A Loop's event holds those of its body, which are taken out of it. On a GPU a node's time is that of launching it:
a provider that computes asynchronously returns before the device is done.
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

from trt_engine.backends.onnxruntime import providers, session
from trt_engine.backends.onnxruntime.origins import origins
from trt_engine.backends.onnxruntime.run import OnnxRuntimeGpuSession, OnnxRuntimeSession, asked, in_numpy
from trt_engine.config import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import EngineError, TrtEngineError
from trt_engine.files import ensure_folder
from trt_engine.graph.census import layers_of
from trt_engine.graph.flops import Cost, cost_of, count
from trt_engine.graph.load import read_proto
from trt_engine.graph.trace import Step, flatten
from trt_engine.graph.traffic import bytes_of
from trt_engine.tensors import DTYPES, Tensors
from trt_engine.traces import LayerProfile, LayerRow

__all__ = ["TRACE", "Event", "profile", "read_trace", "runs_of", "traced"]

log = logging.getLogger(__name__)

TRACE = "onnxruntime.json"
_MOST_EVENTS = 100_000
"""Events are about 800 bytes of JSON each, and ONNX Runtime drops those beyond a million."""
_UNKNOWN_TRIPS = 50
_NODE = "_kernel_time"
_RUN = "model_run"
_TYPES = {"float": "float32", "double": "float64", "float8e4m3fn": "float8_e4m3fn", "float8e5m2": "float8_e5m2"}


def profile(
    engine: Engine, feeds: Tensors, config: RuntimeConfig, *, inferences: int, warmup: int, keep: Path | None
) -> LayerProfile:
    """The times of the engine's nodes in `inferences` runs, the `warmup` before them left out; the trace goes to `keep`.

    Fewer runs are made where their trace would be too long; a note says so.
    """
    built = read_proto(engine.path)
    cost = count(built, {name: tuple(int(size) for size in value.shape) for name, value in feeds.items()})
    steps = flatten(cost.trace.steps) if cost.trace is not None else []
    notes = []
    fits = max(1, _MOST_EVENTS // max(1, _events(cost)))
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
            with traced(engine, feeds, config, trace=trace) as infer:
                for _ in range(warmup):
                    infer()
                for _ in range(inferences):
                    started = time.perf_counter()
                    infer()
                    times.append((time.perf_counter() - started) * 1e3)
        except BaseException:
            trace.unlink(missing_ok=True)
            raise
        runs = runs_of(read_trace(trace))
    if len(runs) < warmup + inferences:
        notes.append(f"the trace holds {len(runs)} of {warmup + inferences} runs: ONNX Runtime's profiler ran full")
        kept = runs[warmup:] or runs
    else:
        kept = runs[-inferences:]
    if not kept:
        raise EngineError(
            f"ONNX Runtime's trace of `{engine.path.name}` tells of no run",
            hint="profile again; `-v` shows what it says",
        )
    if _side_by_side([event for event, _ in kept[-1]]):
        notes.append("nodes ran side by side, on several threads: their times add up to more than an inference")
    on_gpu = any(event.provider and not event.provider.startswith("CPU") for event, _ in kept[0])
    if on_gpu:
        notes.append(
            "times of nodes on the GPU are the host's time to launch them: the kernel table tells what the GPU did"
        )
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
def traced(engine: Engine, feeds: Tensors, config: RuntimeConfig, *, trace: Path) -> Iterator[Callable[[], object]]:
    """One inference for each call while ONNX Runtime writes down its nodes; the file `trace` is there when this ends.

    On a GPU the feeds lie there already, and no graph is replayed: nodes are launched one by one.
    """
    with tempfile.TemporaryDirectory(prefix="trt-engine-trace-") as place:
        loaded, choice = _opened(engine, config, Path(place))
        plain = all(in_numpy(spec.dtype) and spec.dtype != "string" for spec in engine.signature)
        runner: OnnxRuntimeSession | None = None
        try:
            if choice.on_gpu and plain:
                runner = on_gpu = OnnxRuntimeGpuSession(
                    loaded, engine.signature, engine.passport.profiles, {}, choice.device, lambda: loaded
                )
                yield on_gpu.resident(feeds)
            else:
                runner = direct = OnnxRuntimeSession(loaded, engine.signature, engine.passport.profiles, {})
                yield lambda: direct.run(feeds)
        finally:
            if runner is not None:
                runner.close()
            written = Path(loaded.end_profiling())
            shutil.move(written, trace)


def _opened(engine: Engine, config: RuntimeConfig, folder: Path) -> tuple[ort.InferenceSession, providers.Choice]:
    """A session as the engine's own, with the profiler on."""
    options, level, choice = asked(engine, config)
    made = session.session_options(options, level=level)
    made.enable_profiling = True
    made.profile_file_prefix = str(folder / "onnxruntime")
    try:
        loaded = session.create(engine.path, made, choice)
    except session.ERRORS as error:
        raise session.on_load(error, engine.path, choice) from error
    return loaded, providers.read_back(loaded, choice, allow_fallback=config.allow_fallback)


def _events(cost: Cost) -> int:
    """How many events one run will leave, about."""

    def within(steps: Sequence[Step], times: int) -> int:
        total = 0
        for step in steps:
            trips = _UNKNOWN_TRIPS if step.times is None else max(1, step.times)
            total += times + sum(within(body, times * trips) for body in step.inside)
        return total

    return within(cost.trace.steps, 1) if cost.trace is not None else 0


# ------------------------------------------------------------------------------------------------ the trace


@dataclass(frozen=True, slots=True)
class Event:
    """One run of one node, or of the model. Times in microseconds of the trace."""

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


def read_trace(path: Path) -> list[Event]:
    """The nodes' and runs' events of a trace, by their start; one that was cut is read as far as it goes.

    `EngineError` for a file that holds none.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise _damaged(path, (error.strerror or str(error)).lower()) from error
    try:
        items = msgspec.json.decode(text)
    except msgspec.DecodeError:
        items = list(_line_by_line(text))
        log.warning("`%s` is not whole: what can be read of it is", path.name)
    if not isinstance(items, list):
        raise _damaged(path, "it is no list of events")
    events = [event for item in items if isinstance(item, Mapping) and (event := _event(item)) is not None]
    if not events:
        raise _damaged(path, "there is no run in it")
    return sorted(events, key=lambda event: (event.start_us, -event.us))


def _line_by_line(text: bytes) -> Iterable[Any]:
    """ONNX Runtime writes an event a line."""
    for line in text.splitlines():
        try:
            yield msgspec.json.decode(line.strip().strip(b",[]"))
        except msgspec.DecodeError:
            continue


def _event(item: Mapping[str, Any]) -> Event | None:
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
    return Event(
        name=name.removesuffix(_NODE) if is_node else name,
        start_us=start,
        us=us,
        thread=thread if isinstance(thread, int) else 0,
        op=str(args.get("op_name") or "") if is_node else "",
        provider=str(args.get("provider") or ""),
        inputs=_typed(args.get("input_type_shape")),
        outputs=_typed(args.get("output_type_shape")),
    )


def _typed(value: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """`[{"float": [2, 16, 80, 80]}]`, by our names."""
    found = []
    for item in value if isinstance(value, list) else ():
        for kind, shape in item.items() if isinstance(item, Mapping) else ():
            if isinstance(shape, list) and all(isinstance(size, int) for size in shape):
                found.append((_TYPES.get(str(kind), str(kind)), tuple(shape)))
    return tuple(found)


def _damaged(path: Path, what: str) -> EngineError:
    return EngineError(f"`{path}` is no trace of ONNX Runtime: {what}", hint="profile again")


def runs_of(events: Sequence[Event]) -> list[list[tuple[Event, float]]]:
    """The nodes of each run in the order they began, each with its own time: what lies inside another is taken out of it.

    A run that was not finished is left out.
    """
    runs = [event for event in events if event.name == _RUN and not event.op]
    nodes = [event for event in events if event.op or event.name != _RUN]
    found: list[list[tuple[Event, float]]] = []
    at = 0
    for run in runs:
        inside = []
        while at < len(nodes) and nodes[at].start_us < run.start_us:
            at += 1
        while at < len(nodes) and nodes[at].start_us <= run.end_us:
            inside.append(nodes[at])
            at += 1
        found.append(_own_times(inside))
    return found


def _own_times(events: Sequence[Event]) -> list[tuple[Event, float]]:
    """Each event with its time less that of the events directly inside it, on the same thread."""
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


def _side_by_side(events: Sequence[Event]) -> bool:
    """Whether two nodes of different threads ran at the same time."""
    return any(
        before.thread != event.thread and event.start_us < before.end_us for before, event in itertools.pairwise(events)
    )


# ------------------------------------------------------------------------------------------------ the rows


@dataclass(slots=True)
class _Seen:
    """One node over all runs."""

    event: Event
    calls: int
    us: list[float]
    """In each run."""


def _rows(
    runs: Sequence[Sequence[tuple[Event, float]]],
    built: ModelProto,
    cost: Cost,
    steps: Sequence[Step],
    engine: Engine,
    device: str,
) -> tuple[LayerRow, ...]:
    seen: dict[tuple[str, str], _Seen] = {}
    for index, run in enumerate(runs):
        for event, us in run:
            key = (event.name, event.op)
            if key not in seen:
                seen[key] = _Seen(event, 0, [0.0] * len(runs))
            seen[key].calls += 1
            seen[key].us[index] += us
    known = _steps_by_name(steps)
    made_of = origins(built, _source(engine))
    kinds = _kinds(built, cost, engine)
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
                provider=providers.short_name(event.provider) if event.provider else "",
                dtypes=tuple(kind for kind, _ in event.outputs),
                shapes=tuple(shape for _, shape in event.outputs),
                onnx_nodes=made_of.get(_first_output(step), ()) if step is not None else (),
                flops=_flops(step, calls),
                nbytes=_nbytes(step, event, calls),
                precision=kinds.get(step.key, "") if step is not None else "",
            )
        )
    return tuple(rows)


def _steps_by_name(steps: Sequence[Step]) -> dict[tuple[str, str], Step]:
    """The traced nodes as the profiler calls them: by name, or by operator and position where there is none."""
    found: dict[tuple[str, str], Step] = {}
    for index, step in enumerate(steps):
        op = step.node.op_type
        found.setdefault((step.node.name or f"{op}_{index}", op), step)
    return found


def _first_output(step: Step) -> str:
    return next((name for name in step.node.output if name), step.node.name)


def _source(engine: Engine) -> ModelProto | None:
    """The model the engine was built from, where it still lies there."""
    try:
        return read_proto(Path(engine.passport.model.file))
    except TrtEngineError:
        return None


def _kinds(built: ModelProto, cost: Cost, engine: Engine) -> dict[str, str]:
    """What each node computes in, by its key in the trace; the graph is taken at its word, as the contract does."""
    tf32 = "tf32" in engine.passport.precision.found
    return {layer.step.key: layer.kind for layer in layers_of(built, cost, tf32=tf32, literal=True)}


def _flops(step: Step | None, calls: float) -> int | None:
    if step is None or step.inside:
        return None if step is None else 0  # what has bodies computes nothing itself
    found = (0, 0) if step.folded else cost_of(step)
    return None if found is None else round(found[1] * calls)


def _nbytes(step: Step | None, event: Event, calls: float) -> int | None:
    found = bytes_of(step) if step is not None else None
    if found is None:
        sizes = [DTYPES[kind].nbytes(shape) for kind, shape in (*event.inputs, *event.outputs) if kind in DTYPES]
        if len(sizes) < len(event.inputs) + len(event.outputs) or not event.outputs:
            return None
        found = sum(sizes)
    return round(found * calls)

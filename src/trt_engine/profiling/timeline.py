"""A timeline that ui.perfetto.dev and chrome://tracing open: trace-event JSON.

One process for each device with a track for each stream, one for the host's threads, one for the inferences, and one for
mean layer times, drawn in sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import encode_json, write_atomic
from trt_engine.format import node_label
from trt_engine.profiling.instruments.capture import Launch
from trt_engine.profiling.kernel_categories import kernel_category, short_name
from trt_engine.records.profile import Activity, LayerProfile

Event = dict[str, Any]

_INFERENCES, _HOST, _LAYERS, _DEVICES = 1, 2, 3, 10
"""Process ids; devices count up from the last one."""
_MAX_TRACKS = 1000
"""Track ids reserved for each stream or thread."""


def write_timeline(
    path: Path,
    *,
    activities: Sequence[Activity] = (),
    layers: LayerProfile | None = None,
    windows: Sequence[tuple[int, int]] = (),
    launches: Iterable[Launch] = (),
    layers_of: Mapping[int, str] | None = None,
    title: str = "",
) -> Path:
    """Write the timeline to `path` atomically. `layers_of` names the layer of an activity by its index."""
    asked = tuple(launches)
    starts = (item.start_ns for item in activities), (item.start_ns for item in asked), (start for start, _ in windows)
    base = min(chain(*starts), default=0)
    sheet = _TraceEvents(base)
    _add_windows(sheet, windows)
    _add_host(sheet, asked)
    label = lru_cache(layers.layer_label) if layers is not None else str
    _add_devices(sheet, activities, {index: label(name) for index, name in (layers_of or {}).items()})
    _add_flows(sheet, activities, asked)
    if layers is not None:
        _add_layers(sheet, layers, min((start for start, _ in windows), default=base))
    # one event per line: readable for line-based tools
    body = b",\n".join(encode_json(event) for event in sheet.events)
    head = encode_json({"displayTimeUnit": "ns", "otherData": {"title": title, "base_ns": str(base)}})
    return write_atomic(path, head[:-1] + b',"traceEvents":[\n' + body + b"\n]}\n")


@dataclass(frozen=True, slots=True)
class _Slice:
    start_ns: int
    end_ns: int
    name: str
    cat: str
    args: dict[str, Any]
    key: tuple[str, int] | None = None
    """The key for arrows."""


class _TraceEvents:
    """The events so far, and the positions of slices that arrows may point to."""

    def __init__(self, base: int) -> None:
        self.events: list[Event] = []
        self.slice_positions: dict[tuple[str, int], tuple[int, int]] = {}
        self._base = base

    def to_us(self, moment_ns: int) -> float:
        return (moment_ns - self._base) / 1000  # a double represents ns of about 100 days

    def process(self, pid: int, name: str, order: int) -> None:
        self._meta(pid, 0, "process_name", name=name)
        self._meta(pid, 0, "process_sort_index", sort_index=order)

    def track(self, pid: int, first: int, name: str, slices: Iterable[_Slice]) -> None:
        """Place the slices on the fewest tracks on which they nest: kernels of one stream may overlap."""
        lanes: list[list[int]] = []  # per track, the ends of open slices
        for item in sorted(slices, key=lambda item: (item.start_ns, -item.end_ns)):
            number = next((number for number, ends in enumerate(lanes) if _can_nest(item, ends)), len(lanes))
            tid = first + number
            if number == len(lanes):
                lanes.append([])
                self._meta(pid, tid, "thread_name", name=name if not number else f"{name} ({number + 1})")
                self._meta(pid, tid, "thread_sort_index", sort_index=tid)
            lanes[number].append(item.end_ns)
            if item.key:
                self.slice_positions[item.key] = pid, tid
            self.events.append({
                "ph": "X", "pid": pid, "tid": tid, "ts": self.to_us(item.start_ns),
                "dur": (item.end_ns - item.start_ns) / 1000, "name": item.name, "cat": item.cat,
                "args": {key: value for key, value in item.args.items() if value not in (None, "")},
            })  # fmt: skip

    def _meta(self, pid: int, tid: int, what: str, **args: Any) -> None:
        self.events.append({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})


def _can_nest(item: _Slice, ends: list[int]) -> bool:
    """Whether it fits on the track: after all earlier slices, or nested in an open one."""
    while ends and ends[-1] <= item.start_ns:
        ends.pop()
    return not ends or item.end_ns <= ends[-1]


# ------------------------------------------------------------------------------------------------ tracks


def _add_windows(sheet: _TraceEvents, windows: Sequence[tuple[int, int]]) -> None:
    if windows:
        sheet.process(_INFERENCES, "inferences", 0)
        slices = (
            _Slice(start, end, f"inference {number}", "inference", {}) for number, (start, end) in enumerate(windows)
        )
        sheet.track(_INFERENCES, 1, "inferences", slices)


def _add_host(sheet: _TraceEvents, launches: Sequence[Launch]) -> None:
    if not launches:
        return
    sheet.process(_HOST, "host: calls into CUDA", 1)
    by_thread: defaultdict[int, list[_Slice]] = defaultdict(list)
    for index, call in enumerate(launches):
        stated = {"correlation": call.correlation}
        made = _Slice(call.start_ns, call.end_ns, call.name, "launch", stated, ("launch", index))
        by_thread[call.thread].append(made)
    for number, (thread, slices) in enumerate(sorted(by_thread.items())):
        sheet.track(_HOST, 1 + number * _MAX_TRACKS, f"thread {thread}", slices)


def _add_devices(sheet: _TraceEvents, activities: Sequence[Activity], layers_of: Mapping[int, str]) -> None:
    by_device: defaultdict[int, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, item in enumerate(activities):
        by_device[item.device][item.stream].append(index)
    for order, (device, streams) in enumerate(sorted(by_device.items())):
        pid = _DEVICES + order
        sheet.process(pid, f"GPU {device}", 3 + order)
        for number, (stream, own) in enumerate(sorted(streams.items())):
            first = 1 + 2 * number * _MAX_TRACKS
            if any(index in layers_of for index in own):
                sheet.track(pid, first, f"layers of stream {stream}", _layer_slices(own, activities, layers_of))
            slices = (_activity_slice(activities[index], index, layers_of.get(index)) for index in own)
            sheet.track(pid, first + _MAX_TRACKS, f"stream {stream}", slices)


def _activity_slice(item: Activity, index: int, layer: str | None) -> _Slice:
    stated: dict[str, Any] = {"layer": layer, "launched in": item.range, "correlation": item.correlation or None,
            "graph node": item.graph_node or None}  # fmt: skip
    key = ("activity", index)
    if item.kind == "kernel":
        stated |= {"kernel": item.name, "grid": item.grid, "block": item.block, "registers": item.registers,
                 "shared memory bytes": item.shared_bytes}  # fmt: skip
        return _Slice(item.start_ns, item.end_ns, short_name(item.name), kernel_category(item.name), stated, key)
    length = item.end_ns - item.start_ns
    stated |= {"bytes": item.nbytes, "GB/s": round(item.nbytes / length, 2) if length else None}
    name = f"copy {item.name}" if item.kind == "copy" else item.name
    return _Slice(item.start_ns, item.end_ns, name, item.kind, stated, key)


def _layer_slices(own: Sequence[int], activities: Sequence[Activity], layers_of: Mapping[int, str]) -> Iterator[_Slice]:
    """Consecutive activities of one layer, merged."""
    for layer, run in groupby(sorted(own, key=lambda index: activities[index].start_ns), key=layers_of.get):
        items = [activities[index] for index in run]
        if layer is not None:
            end = max(item.end_ns for item in items)
            yield _Slice(items[0].start_ns, end, layer, "layer", {"kernels": len(items)})


def _add_layers(sheet: _TraceEvents, layers: LayerProfile, start_ns: int) -> None:
    """Mean layer times in execution order, in sequence from the first inference on."""
    sheet.process(_LAYERS, f"layers, mean times in a row ({layers.instrument})", 2)
    slices, reached = [], start_ns
    for row in layers.rows:
        end = reached + max(0, round(row.mean_ms * 1e6))
        stated = {"kind": row.kind, "share": round(row.share, 4), "calls": row.calls, "device": row.device,
                "provider": row.provider, "ONNX nodes": list(row.onnx_nodes) or None, "module": row.module}  # fmt: skip
        slices.append(_Slice(reached, end, node_label(row.name, row.module), row.category, stated))
        reached = end
    sheet.track(_LAYERS, 1, "layers", slices)


def _add_flows(sheet: _TraceEvents, activities: Sequence[Activity], launches: Sequence[Launch]) -> None:
    """Arrows from each call to its first activity: a graph launch has hundreds."""
    first: dict[int, int] = {}
    for index, item in enumerate(activities):
        known = first.get(item.correlation)
        if item.correlation and (known is None or item.start_ns < activities[known].start_ns):
            first[item.correlation] = index
    for number, call in enumerate(launches):
        target = first.get(call.correlation)
        if target is None or activities[target].start_ns < call.start_ns:
            continue
        shared = {"cat": "launch", "name": "launch", "id": call.correlation}
        pid, tid = sheet.slice_positions["launch", number]
        sheet.events.append({"ph": "s", **shared, "pid": pid, "tid": tid, "ts": sheet.to_us(call.start_ns)})
        pid, tid = sheet.slice_positions["activity", target]
        moment = sheet.to_us(activities[target].start_ns)
        sheet.events.append({"ph": "f", "bp": "e", **shared, "pid": pid, "tid": tid, "ts": moment})

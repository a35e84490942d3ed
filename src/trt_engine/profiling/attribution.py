"""The layer of each kernel: by NVTX range, by the operator that launched it, by the order of layers; else unknown.

A kernel without evidence gets no layer; the attributed share of the time is reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.atomic_io import decode_json, read_bounded
from trt_engine.errors import EngineError
from trt_engine.profiling.instruments.capture import Capture, HostSpan, IntervalSet, Launch, SpanIndex
from trt_engine.profiling.kernel_categories import kernel_category, short_name
from trt_engine.profiling.kernels import split_by_inference
from trt_engine.records.profile import Activity, LayerProfile, LayerRow


@dataclass(frozen=True, slots=True)
class Attribution:
    """The known layers of activities, and the method used."""

    layers: dict[int, str]
    """By index into the capture's activities."""
    method: str
    """`ranges`, `host spans`, `order`; empty if none applies."""
    share: float
    """Fraction of the kernels' time that has a layer."""
    note: str
    """Why some have none; empty if all have one."""


def attribute(capture: Capture, *, layers: LayerProfile | None = None, spans: Iterable[HostSpan] = ()) -> Attribution:
    """The layers of the capture's kernels.

    Evidence in this order: `spans` of host operators around launches; recorded NVTX ranges; the order of `layers`, if each
    runs one kernel and Myelin's names do not contradict it.
    """
    known = {row.name for row in layers.rows} if layers else set()
    rows = layers.rows if layers else ()
    if found := _match_spans(capture, spans):
        return _attribution(capture, found, "host spans")
    if found := _match_ranges(capture.activities, known):
        return _attribution(capture, found, "ranges")
    if found := _match_order(capture, rows):
        return _attribution(capture, found, "order")
    return Attribution({}, "", 0.0, _no_attribution(capture, layers))


def _attribution(capture: Capture, found: dict[int, str], how: str) -> Attribution:
    spent = {
        index: item.end_ns - item.start_ns for index, item in enumerate(capture.activities) if item.kind == "kernel"
    }
    whole = sum(spent.values())
    share = sum(ns for index, ns in spent.items() if index in found) / whole if whole else 0.0
    rest = sum(index not in found for index in spent)
    note = f"{rest} of {len(spent)} kernels were launched where no {how.removesuffix('s')} was" if rest else ""
    return Attribution(found, how, share, note)


def _no_attribution(capture: Capture, layers: LayerProfile | None) -> str:
    if not any(item.kind == "kernel" for item in capture.activities):
        return "the capture has no kernels"
    if layers is None or not layers.rows:
        return "neither the capture nor the backend reports layers"
    return "kernels carry no layer's name, and layers and kernels do not pair one to one"


def _match_spans(capture: Capture, spans: Iterable[HostSpan]) -> dict[int, str]:
    innermost = SpanIndex(spans)
    calls = {launch.correlation: launch for launch in capture.launches}
    found = {}
    for index, item in enumerate(capture.activities):
        call = calls.get(item.correlation)
        if call and (name := innermost.innermost(call.start_ns, call.thread)):
            found[index] = name
    return found


def _match_ranges(activities: Sequence[Activity], known: set[str]) -> dict[int, str]:
    """With known layers, only ranges with their names count: others mark calls, not layers."""
    return {
        index: item.range
        for index, item in enumerate(activities)
        if item.range is not None and (not known or item.range in known)
    }


_MYELIN = re.compile(r"^_*(?:myl|mye)_?([A-Za-z]+)(?=_|$)")


def _match_order(capture: Capture, rows: Sequence[LayerRow]) -> dict[int, str]:
    """If each layer launches one kernel per inference, the n-th kernel belongs to the n-th layer."""
    rows = [row for row in rows if row.calls == 1 and row.category != "control" and row.mean_ms > 0]
    if not rows:
        return {}
    places = {id(item): index for index, item in enumerate(capture.activities)}
    found: dict[int, str] = {}
    for items in split_by_inference(capture):
        kernels = [item for item in items if item.kind == "kernel"]
        if len(kernels) != len(rows) or not all(map(_is_plausible, kernels, rows)):
            return {}
        found.update((places[id(item)], row.name) for item, row in zip(kernels, rows, strict=True))
    return found


def _is_plausible(item: Activity, row: LayerRow) -> bool:
    """Whether the names do not contradict it."""
    mine, theirs = _MYELIN.match(item.name), _MYELIN.match(row.name)
    if mine or theirs:
        return bool(mine and theirs and mine[1] == theirs[1])
    kind = kernel_category(item.name)
    return kind == row.category or "other" in (kind, row.category) or {kind, row.category} <= {"copy", "reformat"}


# ------------------------------------------------------------------------------------------------ ONNX Runtime


_KERNEL_TIME = "_kernel_time"
_SPREAD_NS = 200_000
"""Maximum clock drift between inferences, in ns."""
_SEARCH_NS, _STEP_NS = 60_000, 1_000
"""Search range and step of a run's offset from the middle of its window."""


def onnxruntime_node_spans(
    profile: Path | Sequence[Any], windows: Sequence[tuple[int, int]], launches: Sequence[Launch] = ()
) -> tuple[HostSpan, ...]:
    """The nodes of an ONNX Runtime profile on the clock of a capture that ran at the same time.

    The profile has its own time origin, so its runs (`model_run`) are aligned with the inference windows, then shifted to
    maximize the launches inside nodes; empty if runs and windows do not pair one to one. `EngineError` for another file.
    """
    events = _read_events(profile) if isinstance(profile, Path) else profile
    events = [event for event in events if isinstance(event, Mapping) and "ts" in event]
    runs = sorted(_to_interval(event) for event in events if event.get("name") == "model_run")
    offset = _clock_offset(runs, sorted(windows))
    if offset is None:
        return ()
    nodes = [
        HostSpan(name.removesuffix(_KERNEL_TIME), *_to_interval(event))
        for event in events
        if event.get("cat") == "Node" and (name := str(event.get("name", ""))).endswith(_KERNEL_TIME)
    ]
    offset += _refine_offset(nodes, [call.start_ns - offset for call in launches])
    found = (HostSpan(span.name, span.start_ns + offset, span.end_ns + offset) for span in nodes)
    return tuple(sorted(found, key=lambda span: (span.start_ns, -span.end_ns)))


def _read_events(path: Path) -> Sequence[Any]:
    try:
        found = decode_json(read_bounded(path))
    except (msgspec.DecodeError, OSError) as error:
        raise EngineError(
            f"`{path}` is not an ONNX Runtime profile: {error}", hint="it is complete once its session ended profiling"
        ) from error
    if not isinstance(found, list):
        raise EngineError(f"`{path}` is not an ONNX Runtime profile", hint="expected a list of events")
    return found


def _to_interval(event: Mapping[str, Any]) -> tuple[int, int]:
    """Interval in ns; the profile truncates to microseconds, so the end is rounded up."""
    start = int(event["ts"]) * 1000
    return start, start + int(event.get("dur", 0)) * 1000 + 1000


def _clock_offset(runs: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]]) -> int | None:
    """Offset to add to the profile's times. The captured runs are its last: warm-up came before."""
    if not windows or len(runs) < len(windows):
        return None
    runs = runs[-len(windows) :]
    # every run is within its window; a delayed run widens its own window only
    pairs = list(zip(runs, windows, strict=True))
    least = max(window[0] - run[0] for run, window in pairs)
    most = min(window[1] - run[1] for run, window in pairs)
    return None if least - most > _SPREAD_NS else (least + most) // 2


def _refine_offset(nodes: Sequence[HostSpan], launches: Sequence[int]) -> int:
    """The middle of the shifts that leave the fewest launches outside of every node."""
    if not launches:
        return 0
    covered = IntervalSet((span.start_ns, span.end_ns) for span in nodes)
    counts = {
        shift: sum(covered.contains(moment - shift) for moment in launches)
        for shift in range(-_SEARCH_NS, _SEARCH_NS + 1, _STEP_NS)
    }
    best = max(counts.values())
    shifts = [shift for shift, count in counts.items() if count == best]
    near = min(shifts, key=abs)  # of equally good stretches, the nearest
    last = first = near
    while first - _STEP_NS in counts and counts[first - _STEP_NS] == best:
        first -= _STEP_NS
    while last + _STEP_NS in counts and counts[last + _STEP_NS] == best:
        last += _STEP_NS
    return (first + last) // 2


# ------------------------------------------------------------------------------------------------ from run to run


def transfer_attribution(source: Capture, attribution: Attribution, target: Capture) -> Attribution:
    """Layers found in one capture, applied to another of the same engine if both run the same kernels in the same order.

    ONNX Runtime's profiler slows inference, so kernels are timed without it and named with it. Short names are compared:
    instruments write types differently.
    """
    pattern = _inference_pattern(source, attribution)
    if not pattern:
        return Attribution({}, "", 0.0, attribution.note or "the layers of the first capture are unknown")
    places = {id(item): index for index, item in enumerate(target.activities)}
    layers: dict[int, str] = {}
    for items in split_by_inference(target):
        kernels = _launch_order(target, items)
        if [short_name(item.name) for item in kernels] != [name for name, _ in pattern]:
            return Attribution({}, "", 0.0, "the two captures do not run the same kernels in the same order")
        layers.update(
            (places[id(item)], layer) for item, (_, layer) in zip(kernels, pattern, strict=True) if layer is not None
        )
    return _attribution(target, layers, attribution.method)


def _inference_pattern(capture: Capture, found: Attribution) -> list[tuple[str, str | None]]:
    """Kernel and layer, in the order of one inference; empty if inferences run different kernels.

    A kernel with one known layer in any inference gets it; with two different ones it gets none.
    """
    places = {id(item): index for index, item in enumerate(capture.activities)}
    orders = [_launch_order(capture, items) for items in split_by_inference(capture)]
    if not found.layers or not orders or any([i.name for i in one] != [i.name for i in orders[0]] for one in orders):
        return []
    pattern: list[tuple[str, str | None]] = []
    for items in zip(*orders, strict=True):
        layers = {found.layers[places[id(item)]] for item in items if places[id(item)] in found.layers}
        pattern.append((short_name(items[0].name), layers.pop() if len(layers) == 1 else None))
    return pattern


def _launch_order(capture: Capture, items: Iterable[Activity]) -> list[Activity]:
    """Kernels in launch order, which concurrent streams do not change; by start within one graph launch."""
    launched = {launch.correlation: launch.start_ns for launch in capture.launches}
    return sorted(
        (item for item in items if item.kind == "kernel"),
        key=lambda item: (launched.get(item.correlation, item.start_ns), item.start_ns),
    )

"""Which layer a kernel belongs to: by range, by the operator that launched it, by the order of layers; else unknown.

Nothing is guessed: a kernel without evidence has no layer, and the share of the time that has one is told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.errors import EngineError
from trt_engine.profiling.capture import Capture, Covered, HostSpan, Innermost, Launch
from trt_engine.profiling.categories import of_kernel, short
from trt_engine.profiling.kernels import inferences_of
from trt_engine.traces import Activity, LayerProfile, LayerRow

__all__ = ["Attribution", "HostSpan", "attribute", "carried_over", "onnxruntime_spans"]


@dataclass(frozen=True, slots=True)
class Attribution:
    """The layer of each activity that one is known of, and how it was found."""

    layers: dict[int, str]
    """By index into the capture's activities."""
    how: str
    """`ranges`, `host spans`, `order`; empty where nothing tells."""
    share: float
    """Of the kernels' time that has a layer."""
    note: str
    """Why not all have one; empty where all have."""


def attribute(capture: Capture, *, layers: LayerProfile | None = None, spans: Iterable[HostSpan] = ()) -> Attribution:
    """The layers of the capture's kernels, where something tells.

    In this order: `spans`, what the host was at as it launched; ranges the instrument heard; the order of `layers`, where
    each of them runs one kernel and the names of Myelin's do not contradict.
    """
    known = {row.name for row in layers.rows} if layers else set()
    rows = layers.rows if layers else ()
    if found := _by_spans(capture, spans):
        return _told(capture, found, "host spans")
    if found := _by_ranges(capture.activities, known):
        return _told(capture, found, "ranges")
    if found := _by_order(capture, rows):
        return _told(capture, found, "order")
    return Attribution({}, "", 0.0, _why_not(capture, layers))


def _told(capture: Capture, found: dict[int, str], how: str) -> Attribution:
    spent = {
        index: item.end_ns - item.start_ns for index, item in enumerate(capture.activities) if item.kind == "kernel"
    }
    whole = sum(spent.values())
    share = sum(ns for index, ns in spent.items() if index in found) / whole if whole else 0.0
    rest = sum(index not in found for index in spent)
    note = f"{rest} of {len(spent)} kernels were launched where no {how.removesuffix('s')} was" if rest else ""
    return Attribution(found, how, share, note)


def _why_not(capture: Capture, layers: LayerProfile | None) -> str:
    if not any(item.kind == "kernel" for item in capture.activities):
        return "there are no kernels"
    if layers is None or not layers.rows:
        return "neither the capture nor the backend tells layers"
    return "kernels carry no layer's name, and layers and kernels do not pair one to one"


def _by_spans(capture: Capture, spans: Iterable[HostSpan]) -> dict[int, str]:
    innermost = Innermost(spans)
    calls = {launch.correlation: launch for launch in capture.launches}
    found = {}
    for index, item in enumerate(capture.activities):
        call = calls.get(item.correlation)
        if call and (name := innermost.at(call.start_ns, call.thread)):
            found[index] = name
    return found


def _by_ranges(activities: Sequence[Activity], known: set[str]) -> dict[int, str]:
    """With layers known, only ranges named as one of them count: others mark calls, not layers."""
    return {
        index: item.range
        for index, item in enumerate(activities)
        if item.range is not None and (not known or item.range in known)
    }


_MYELIN = re.compile(r"^_*(?:myl|mye)_?([A-Za-z]+)(?=_|$)")


def _by_order(capture: Capture, rows: Sequence[LayerRow]) -> dict[int, str]:
    """Where each layer launches one kernel in each inference: the n-th kernel is the n-th layer's."""
    rows = [row for row in rows if row.calls == 1 and row.category != "control" and row.mean_ms > 0]
    if not rows:
        return {}
    places = {id(item): index for index, item in enumerate(capture.activities)}
    found: dict[int, str] = {}
    for items in inferences_of(capture):
        kernels = [item for item in items if item.kind == "kernel"]
        if len(kernels) != len(rows) or not all(map(_fits, kernels, rows)):
            return {}
        found.update((places[id(item)], row.name) for item, row in zip(kernels, rows, strict=True))
    return found


def _fits(item: Activity, row: LayerRow) -> bool:
    """Whether nothing in the names speaks against it."""
    mine, theirs = _MYELIN.match(item.name), _MYELIN.match(row.name)
    if mine or theirs:
        return bool(mine and theirs and mine[1] == theirs[1])
    kind = of_kernel(item.name)
    return kind == row.category or "other" in (kind, row.category) or {kind, row.category} <= {"copy", "reformat"}


# ------------------------------------------------------------------------------------------------ ONNX Runtime


_KERNEL_TIME = "_kernel_time"
_SPREAD_NS = 200_000
"""How far the clocks may wander from inference to inference before they are not believed."""
_REACH_NS, _STEP_NS = 60_000, 1_000
"""How far a run may lie from the middle of its window, and how finely that is looked for."""


def onnxruntime_spans(
    profile: Path | Sequence[Any], windows: Sequence[tuple[int, int]], launches: Sequence[Launch] = ()
) -> tuple[HostSpan, ...]:
    """The nodes of an ONNX Runtime profile on the clock of a capture that ran at the same time.

    The profile counts from a start of its own, so that its runs (`model_run`) are laid onto the windows of the inferences,
    and then moved until as many launches as can be lie in a node; empty where runs and windows do not pair one by one.
    `EngineError` for a file that is no such profile.
    """
    events = _events(profile) if isinstance(profile, Path) else profile
    events = [event for event in events if isinstance(event, Mapping) and "ts" in event]
    runs = sorted(_interval(event) for event in events if event.get("name") == "model_run")
    offset = _offset(runs, sorted(windows))
    if offset is None:
        return ()
    nodes = [
        HostSpan(name.removesuffix(_KERNEL_TIME), *_interval(event))
        for event in events
        if event.get("cat") == "Node" and (name := str(event.get("name", ""))).endswith(_KERNEL_TIME)
    ]
    offset += _finer(nodes, [call.start_ns - offset for call in launches])
    found = (HostSpan(span.name, span.start_ns + offset, span.end_ns + offset) for span in nodes)
    return tuple(sorted(found, key=lambda span: (span.start_ns, -span.end_ns)))


def _events(path: Path) -> Sequence[Any]:
    try:
        found = msgspec.json.decode(path.read_bytes(), strict=False)
    except (msgspec.DecodeError, OSError) as error:
        raise EngineError(
            f"`{path}` is no profile of ONNX Runtime: {error}", hint="it is whole once its session ended profiling"
        ) from error
    if not isinstance(found, list):
        raise EngineError(f"`{path}` is no profile of ONNX Runtime", hint="expected a list of events")
    return found


def _interval(event: Mapping[str, Any]) -> tuple[int, int]:
    """In ns, of the microseconds the profile counts in; a microsecond more at the end, which was cut off."""
    start = int(event["ts"]) * 1000
    return start, start + int(event.get("dur", 0)) * 1000 + 1000


def _offset(runs: Sequence[tuple[int, int]], windows: Sequence[tuple[int, int]]) -> int | None:
    """What to add to the profile's times. The capture saw the last of the runs: warm-up came before."""
    if not windows or len(runs) < len(windows):
        return None
    runs = runs[-len(windows) :]
    # every run lies within its window; one that was held up makes its own window wider, not that of the others
    pairs = list(zip(runs, windows, strict=True))
    least = max(window[0] - run[0] for run, window in pairs)
    most = min(window[1] - run[1] for run, window in pairs)
    return None if least - most > _SPREAD_NS else (least + most) // 2


def _finer(nodes: Sequence[HostSpan], launches: Sequence[int]) -> int:
    """The middle of the shifts that leave the fewest launches outside of every node."""
    if not launches:
        return 0
    covered = Covered((span.start_ns, span.end_ns) for span in nodes)
    counts = {
        shift: sum(covered.at(moment - shift) for moment in launches)
        for shift in range(-_REACH_NS, _REACH_NS + 1, _STEP_NS)
    }
    best = max(counts.values())
    shifts = [shift for shift, count in counts.items() if count == best]
    near = min(shifts, key=abs)  # of several stretches as good, the one where the runs lie best
    last = first = near
    while first - _STEP_NS in counts and counts[first - _STEP_NS] == best:
        first -= _STEP_NS
    while last + _STEP_NS in counts and counts[last + _STEP_NS] == best:
        last += _STEP_NS
    return (first + last) // 2


# ------------------------------------------------------------------------------------------------ from run to run


def carried_over(known: Capture, found: Attribution, other: Capture) -> Attribution:
    """The layers found in one capture, for another of the same engine: where both run the same kernels in the same order.

    A profile of ONNX Runtime's slows what it watches; kernels are timed without it and named with it. Names are compared
    short: instruments write types in different ways.
    """
    pattern = _pattern(known, found)
    if not pattern:
        return Attribution({}, "", 0.0, found.note or "nothing tells the layers of the first capture")
    places = {id(item): index for index, item in enumerate(other.activities)}
    layers: dict[int, str] = {}
    for items in inferences_of(other):
        kernels = _in_order(other, items)
        if [short(item.name) for item in kernels] != [name for name, _ in pattern]:
            return Attribution({}, "", 0.0, "the two captures do not run the same kernels in the same order")
        layers.update(
            (places[id(item)], layer) for item, (_, layer) in zip(kernels, pattern, strict=True) if layer is not None
        )
    return _told(other, layers, found.how)


def _pattern(capture: Capture, found: Attribution) -> list[tuple[str, str | None]]:
    """Kernel and layer, in the order of one inference; empty where inferences run other kernels.

    A kernel that one inference found a layer of and another none has that layer; one of two layers has none.
    """
    places = {id(item): index for index, item in enumerate(capture.activities)}
    orders = [_in_order(capture, items) for items in inferences_of(capture)]
    if not found.layers or not orders or any([i.name for i in one] != [i.name for i in orders[0]] for one in orders):
        return []
    pattern: list[tuple[str, str | None]] = []
    for items in zip(*orders, strict=True):
        layers = {found.layers[places[id(item)]] for item in items if places[id(item)] in found.layers}
        pattern.append((short(items[0].name), layers.pop() if len(layers) == 1 else None))
    return pattern


def _in_order(capture: Capture, items: Iterable[Activity]) -> list[Activity]:
    """Kernels by launch, which streams side by side cannot turn round; by start within one launch of a graph."""
    launched = {launch.correlation: launch.start_ns for launch in capture.launches}
    return sorted(
        (item for item in items if item.kind == "kernel"),
        key=lambda item: (launched.get(item.correlation, item.start_ns), item.start_ns),
    )

"""Kernels by name, and the time of an inference by where it goes."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from trt_engine.profiling.capture import Capture, window_of
from trt_engine.profiling.categories import of_kernel, short
from trt_engine.traces import CATEGORIES, FROM_DEVICE, TO_DEVICE, Activity, CategoryShare, KernelRow, TimeSplit

__all__ = ["busy_ns", "category_shares", "inferences_of", "kernel_rows", "split", "union_ns"]

_NS_PER_MS = 1e6
T = TypeVar("T")


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """How many ns at least one of the intervals covers."""
    total = 0
    reached: int | None = None
    for start, end in sorted(intervals):
        if reached is None or start > reached:
            total += max(0, end - start)
            reached = max(start, end)
        elif end > reached:
            total += end - reached
            reached = end
    return total


def busy_ns(activities: Iterable[Activity]) -> int:
    """How long devices were at work: the union of the intervals of each device, summed over devices."""
    by_device: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for item in activities:
        by_device[item.device].append((item.start_ns, item.end_ns))
    return sum(union_ns(intervals) for intervals in by_device.values())


def inferences_of(capture: Capture) -> tuple[tuple[Activity, ...], ...]:
    """The activities of each inference: those its window's launches asked for."""
    launched = {launch.correlation: launch.start_ns for launch in capture.launches}
    found: list[list[Activity]] = [[] for _ in capture.inferences]
    windows = sorted(capture.inferences)
    for item in capture.activities:
        number = window_of(windows, launched.get(item.correlation, item.start_ns))
        if number is not None:
            found[number].append(item)
    return tuple(tuple(items) for items in found)


# ------------------------------------------------------------------------------------------------ rows


def kernel_rows(
    activities: Sequence[Activity], inferences: int, layers: Mapping[int, str] | None = None
) -> tuple[KernelRow, ...]:
    """The kernels by total time, longest first; `layers` names the layer of an activity by its index in `activities`.

    Grid, block, registers and shared memory are told where all launches of a kernel have the same.
    """
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(activities):
        if item.kind == "kernel":
            groups[item.name].append(index)
    spent = {
        name: sum(activities[index].end_ns - activities[index].start_ns for index in indices)
        for name, indices in groups.items()
    }
    whole = sum(spent.values())
    return tuple(
        _row(name, [activities[index] for index in groups[name]], spent[name] / whole if whole else 0.0, inferences,
             _by_time(activities, groups[name], layers or {}))
        for name in sorted(groups, key=lambda name: (-spent[name], name))
    )  # fmt: skip


def _row(name: str, items: Sequence[Activity], share: float, inferences: int, layers: tuple[str, ...]) -> KernelRow:
    lengths_us = [(item.end_ns - item.start_ns) / 1e3 for item in items]
    return KernelRow(
        name=name,
        short=short(name),
        category=of_kernel(name),
        calls=len(items),
        per_inference=len(items) / inferences if inferences else 0.0,
        total_ms=sum(item.end_ns - item.start_ns for item in items) / _NS_PER_MS,
        mean_us=statistics.fmean(lengths_us),
        median_us=statistics.median(lengths_us),
        min_us=min(lengths_us),
        max_us=max(lengths_us),
        share=share,
        layers=layers,
        grid=_common(item.grid for item in items),
        block=_common(item.block for item in items),
        registers=_common(item.registers for item in items),
        shared_bytes=_common(item.shared_bytes for item in items),
    )


def _common(values: Iterable[T]) -> T | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _by_time(activities: Sequence[Activity], indices: Sequence[int], layers: Mapping[int, str]) -> tuple[str, ...]:
    """The layers of these launches, those with most of their time first."""
    spent: Counter[str] = Counter()
    for index in indices:
        if index in layers:
            spent[layers[index]] += activities[index].end_ns - activities[index].start_ns
    return tuple(sorted(spent, key=lambda name: (-spent[name], name)))


def category_shares(rows: Sequence[KernelRow], inferences: int) -> tuple[CategoryShare, ...]:
    """The time of one inference by what its kernels do, most first; categories without a kernel are left out."""
    if not inferences:
        return ()
    spent = {name: sum(row.total_ms for row in rows if row.category == name) for name in CATEGORIES}
    whole = sum(spent.values())
    return tuple(
        CategoryShare(
            category=name,
            ms=spent[name] / inferences,
            share=spent[name] / whole if whole else 0.0,
            count=max(1, round(sum(row.calls for row in rows if row.category == name) / inferences)),
        )
        for name in sorted(CATEGORIES, key=lambda name: -spent[name])
        if any(row.category == name for row in rows)
    )


# ------------------------------------------------------------------------------------------------ where time goes


def split(
    capture: Capture,
    *,
    wall_ms: float,
    gpu_ms: float | None = None,
    h2d_ms: float | None = None,
    d2h_ms: float | None = None,
) -> TimeSplit:
    """One inference by where its time goes. What was measured without a profiler is handed in and goes before what the
    capture shows: `compute_ms` is `gpu_ms` where there is one, else the union of all but copies from and to the host.

    Idle is what passes from the first activity of an inference to the first of the next with nothing on the device; the
    last inference has no next and counts for its busy time alone. Of several devices the times are summed.
    """
    count = len(capture.inferences)
    if not count:
        return TimeSplit(wall_ms=wall_ms, compute_ms=gpu_ms, gpu_ms=gpu_ms, h2d_ms=h2d_ms, d2h_ms=d2h_ms)
    items = capture.activities
    busy = busy_ns(items)
    total = sum(item.end_ns - item.start_ns for item in items)
    here = [item for item in items if item.kind != "copy" or item.name not in (*TO_DEVICE, *FROM_DEVICE)]

    def each(ns: float) -> float:
        return ns / count / _NS_PER_MS

    def copied(ways: tuple[str, ...]) -> float:
        return each(busy_ns(item for item in items if item.kind == "copy" and item.name in ways))

    working = each(busy_ns(here))
    return TimeSplit(
        wall_ms=wall_ms,
        h2d_ms=copied(TO_DEVICE) if h2d_ms is None else h2d_ms,
        compute_ms=working if gpu_ms is None else gpu_ms,
        d2h_ms=copied(FROM_DEVICE) if d2h_ms is None else d2h_ms,
        busy_ms=each(busy),
        idle_ms=_idle_ns(capture) / _NS_PER_MS,
        launch_ms=None if capture.launch_ns is None else each(capture.launch_ns),
        kernels=sum(item.kind == "kernel" for item in items) / count,
        overlap_ms=each(total - busy),
        gpu_ms=gpu_ms,
        working_ms=working,
    )


def _idle_ns(capture: Capture) -> float:
    """Of one inference, with the pause until the next; within the one where there is but one."""
    by_device: defaultdict[int, list[list[Activity]]] = defaultdict(list)
    for items in inferences_of(capture):
        for device in {item.device for item in items}:
            by_device[device].append([item for item in items if item.device == device])
    total = 0.0
    for runs in by_device.values():
        first = min(item.start_ns for item in runs[0])
        if len(runs) == 1:
            span = max(item.end_ns for item in runs[0]) - first
            total += span - busy_ns(runs[0])
            continue
        last = min(item.start_ns for item in runs[-1])
        until_last = [(item.start_ns, min(item.end_ns, last)) for run in runs for item in run if item.start_ns < last]
        total += (last - first - union_ns(until_last)) / (len(runs) - 1)
    return total

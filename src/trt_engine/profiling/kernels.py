"""Kernels by name, and the time breakdown of an inference."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from trt_engine.profiling.instruments.capture import Capture, window_of
from trt_engine.profiling.kernel_categories import kernel_category, short_name
from trt_engine.records.profile import (
    CATEGORIES,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    Activity,
    Category,
    CategoryShare,
    KernelRow,
    TimeBreakdown,
)

_NS_PER_MS = 1e6
T = TypeVar("T")


def union_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the intervals' union, in ns."""
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
    """Busy time in ns: the union of each device's intervals, summed over devices."""
    by_device: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for item in activities:
        by_device[item.device].append((item.start_ns, item.end_ns))
    return sum(union_ns(intervals) for intervals in by_device.values())


def split_by_inference(capture: Capture) -> tuple[tuple[Activity, ...], ...]:
    """The activities of each inference: those launched in its window."""
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

    Grid, block, registers and shared memory are set if equal in all launches of a kernel.
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
        _kernel_row(name, [activities[index] for index in groups[name]], spent[name] / whole if whole else 0.0, inferences,
             _layers_by_time(activities, groups[name], layers or {}))
        for name in sorted(groups, key=lambda name: (-spent[name], name))
    )  # fmt: skip


def _kernel_row(
    name: str, items: Sequence[Activity], share: float, inferences: int, layers: tuple[str, ...]
) -> KernelRow:
    lengths_us = [(item.end_ns - item.start_ns) / 1e3 for item in items]
    return KernelRow(
        name=name,
        short_name=short_name(name),
        category=kernel_category(name),
        calls=len(items),
        per_inference=len(items) / inferences if inferences else 0.0,
        total_ms=sum(item.end_ns - item.start_ns for item in items) / _NS_PER_MS,
        mean_us=statistics.fmean(lengths_us),
        median_us=statistics.median(lengths_us),
        min_us=min(lengths_us),
        max_us=max(lengths_us),
        share=share,
        layers=layers,
        grid=_common_value(item.grid for item in items),
        block=_common_value(item.block for item in items),
        registers=_common_value(item.registers for item in items),
        shared_bytes=_common_value(item.shared_bytes for item in items),
    )


def _common_value(values: Iterable[T]) -> T | None:
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _layers_by_time(
    activities: Sequence[Activity], indices: Sequence[int], layers: Mapping[int, str]
) -> tuple[str, ...]:
    """The layers of these launches, longest time first."""
    spent: Counter[str] = Counter()
    for index in indices:
        if index in layers:
            spent[layers[index]] += activities[index].end_ns - activities[index].start_ns
    return tuple(sorted(spent, key=lambda name: (-spent[name], name)))


def category_shares(rows: Sequence[KernelRow], inferences: int) -> tuple[CategoryShare, ...]:
    """The time of one inference by kernel category, longest first; without empty categories."""
    return share_by_category(((row.category, row.total_ms, row.calls) for row in rows), inferences)


def share_by_category(times: Iterable[tuple[Category, float, float]], inferences: int) -> tuple[CategoryShare, ...]:
    """The shares of one inference from the category, time in ms and calls of each row of `inferences`."""
    spent: defaultdict[Category, float] = defaultdict(float)
    called: defaultdict[Category, float] = defaultdict(float)
    for category, ms, calls in times:
        spent[category] += ms
        called[category] += calls
    whole = sum(spent.get(name, 0.0) for name in CATEGORIES)
    return tuple(
        CategoryShare(name, ms / inferences, ms / whole if whole else 0.0, max(1, round(called[name] / inferences)))
        for name, ms in sorted(spent.items(), key=lambda item: (-item[1], CATEGORIES.index(item[0])))
        if inferences
    )


# ------------------------------------------------------------------------------------------------ where time goes


def time_breakdown(
    capture: Capture,
    *,
    wall_ms: float,
    gpu_ms: float | None = None,
    h2d_ms: float | None = None,
    d2h_ms: float | None = None,
) -> TimeBreakdown:
    """The time breakdown of one inference. Values measured without a profiler are passed in and override what the
    capture shows: `compute_ms` is `gpu_ms` if given, else the union of all but host copies.

    Idle time is without activity from the first activity of an inference to the first of the next; the last inference
    counts its busy time alone. Times of several devices are summed.
    """
    count = len(capture.inferences)
    if not count:
        return TimeBreakdown(wall_ms=wall_ms, compute_ms=gpu_ms, gpu_ms=gpu_ms, h2d_ms=h2d_ms, d2h_ms=d2h_ms)
    items = capture.activities
    busy = busy_ns(items)
    total = sum(item.end_ns - item.start_ns for item in items)
    here = [item for item in items if item.kind != "copy" or item.name not in (*HOST_TO_DEVICE, *DEVICE_TO_HOST)]

    def each(ns: float) -> float:
        return ns / count / _NS_PER_MS

    def copied(ways: tuple[str, ...]) -> float:
        return each(busy_ns(item for item in items if item.kind == "copy" and item.name in ways))

    working = each(busy_ns(here))
    return TimeBreakdown(
        wall_ms=wall_ms,
        h2d_ms=copied(HOST_TO_DEVICE) if h2d_ms is None else h2d_ms,
        compute_ms=working if gpu_ms is None else gpu_ms,
        d2h_ms=copied(DEVICE_TO_HOST) if d2h_ms is None else d2h_ms,
        busy_ms=each(busy),
        idle_ms=_idle_ns(capture) / _NS_PER_MS,
        launch_ms=None if capture.launch_ns is None else each(capture.launch_ns),
        kernels=sum(item.kind == "kernel" for item in items) / count,
        overlap_ms=each(total - busy),
        gpu_ms=gpu_ms,
        working_ms=working,
    )


def _idle_ns(capture: Capture) -> float:
    """Idle ns per inference, including the gap to the next; within it if there is only one."""
    by_device: defaultdict[int, list[list[Activity]]] = defaultdict(list)
    for items in split_by_inference(capture):
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

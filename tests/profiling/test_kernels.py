"""Kernels by name and where the time goes: intervals that overlap count once, shares add up, nothing is put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.profiling.instruments.capture import Capture, Launch
from trt_engine.profiling.kernel_categories import (
    category_shares,
    kernel_rows,
    split_by_inference,
    time_breakdown,
    union_ns,
)
from trt_engine.records.profile import Activity

MS = 1_000_000


def kernel(name: str, start: float, end: float, **more: object) -> Activity:
    """Times in ms."""
    return Activity("kernel", name, round(start * MS), round(end * MS), **more)  # type: ignore[arg-type]


def copy(way: str, start: float, end: float, **more: object) -> Activity:
    return Activity("copy", way, round(start * MS), round(end * MS), **more)  # type: ignore[arg-type]


def captured(*activities: Activity, windows: tuple[tuple[float, float], ...], **more: object) -> Capture:
    ordered = tuple(sorted(activities, key=lambda item: item.start_ns))
    inferences = tuple((round(start * MS), round(end * MS)) for start, end in windows)
    return Capture(ordered, more.pop("launch_ns", None), inferences, "scripted", **more)  # type: ignore[arg-type]


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=25
)


@given(intervals)
def test_the_union_is_what_counting_every_nanosecond_finds(found: list[tuple[int, int]]) -> None:
    covered = {moment for start, end in found for moment in range(start, end)}
    assert union_ns(found) == len(covered)


def test_rows_are_sorted_by_time_and_tell_of_one_inference() -> None:
    items = (
        kernel("void ns::small<int>(int)", 0, 1, grid=(1, 1, 1), registers=32),
        kernel("void ns::small<int>(int)", 1, 3, grid=(2, 1, 1), registers=32),
        copy("Host-to-Device", 4, 9, nbytes=8),
        kernel("sm90_xmma_gemm_f16", 9, 33, shared_bytes=1024),
        kernel("void ns::small<int>(int)", 40, 45, grid=(2, 1, 1), registers=32),
    )
    gemm, small = kernel_rows(items, 2, {0: "a", 1: "a", 3: "c", 4: "b"})
    assert (gemm.name, gemm.category, gemm.calls, gemm.per_inference) == ("sm90_xmma_gemm_f16", "matrix", 1, 0.5)
    assert (small.short_name, small.calls, small.total_ms) == ("small", 3, 8.0)
    assert small.mean_us == pytest.approx(8000 / 3)
    assert (small.median_us, small.min_us, small.max_us) == (2000.0, 1000.0, 5000.0)
    assert gemm.share == 0.75 and small.share == 0.25
    assert small.layers == ("b", "a") and gemm.layers == ("c",)
    assert small.grid is None and small.registers == 32 and gemm.shared_bytes == 1024


def test_no_kernels_are_no_rows_and_no_shares() -> None:
    assert kernel_rows((copy("Host-to-Device", 0, 1),), 1) == ()
    assert category_shares((), 3) == () and category_shares((), 0) == ()


@given(
    st.lists(st.sampled_from(["a_gemm", "softmax_warp", "elementwise_kernel", "who_knows"]), min_size=1, max_size=30)
)
def test_shares_add_up(names: list[str]) -> None:
    items = [kernel(name, index, index + 0.5) for index, name in enumerate(names)]
    rows = kernel_rows(items, 1)
    shares = category_shares(rows, 1)
    assert sum(row.share for row in rows) == pytest.approx(1.0)
    assert sum(share.share for share in shares) == pytest.approx(1.0)
    assert sum(share.ms for share in shares) == pytest.approx(len(names) * 0.5)
    assert sum(share.count for share in shares) == len(names)
    assert [share.ms for share in shares] == sorted((share.ms for share in shares), reverse=True)


def test_an_activity_belongs_to_the_inference_that_launched_it_however_late_it_starts() -> None:
    found = captured(
        kernel("first", 1, 2, correlation=7),
        kernel("late", 12, 13, correlation=8),
        windows=((0, 9), (10, 19)),
        launches=(Launch("cudaLaunchKernel", 0, MS // 2, 7), Launch("cudaLaunchKernel", 8 * MS, 8 * MS + 9, 8)),
    )
    assert [[item.name for item in items] for items in split_by_inference(found)] == [["first", "late"], []]


@given(intervals, st.integers(1, 4))
def test_busy_and_idle_fill_the_time_from_first_to_next(found: list[tuple[int, int]], count: int) -> None:
    found = [(start, end) for start, end in found if end > start]
    if not found:
        return
    first = min(start for start, _ in found)
    period = max(end for _, end in found) - first + 5
    items = [
        Activity("kernel", "k", 1 + start - first + turn * period, 1 + end - first + turn * period)
        for turn in range(count)
        for start, end in found
    ]
    windows = tuple((1 + turn * period, (turn + 1) * period) for turn in range(count))
    parted = time_breakdown(
        Capture(tuple(sorted(items, key=lambda item: item.start_ns)), None, windows, "s"), wall_ms=1
    )
    assert parted.busy_ms is not None and parted.idle_ms is not None
    whole = period if count > 1 else period - 5
    assert (parted.busy_ms + parted.idle_ms) * MS == pytest.approx(whole)

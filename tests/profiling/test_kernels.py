"""Kernels by name and where the time goes: intervals that overlap count once, shares add up, nothing is put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.profiling.instruments.capture import Capture, Launch
from trt_engine.profiling.kernels import (
    busy_ns,
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


@given(intervals, st.randoms())
def test_the_union_does_not_depend_on_the_order(found: list[tuple[int, int]], random: object) -> None:
    turned = list(found)
    random.shuffle(turned)  # type: ignore[attr-defined]
    assert union_ns(iter(turned)) == union_ns(found)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 9)), max_size=20))
def test_devices_are_busy_each_for_itself(found: list[tuple[int, int, int]]) -> None:
    items = [Activity("kernel", "k", start, start + length, device=device) for device, start, length in found]
    covered = {(item.device, moment) for item in items for moment in range(item.start_ns, item.end_ns)}
    assert busy_ns(items) == len(covered)


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


def test_a_kernel_that_took_no_time_divides_nothing_by_zero() -> None:
    (row,) = kernel_rows((kernel("k", 1, 1),), 1)
    assert row.share == 0.0 and category_shares((row,), 1)[0].share == 0.0


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


def test_a_category_that_is_there_has_one_kernel_at_least() -> None:
    (only,) = category_shares(kernel_rows((kernel("ampere_sgemm", 0, 3), kernel("ampere_sgemm", 4, 5)), 10), 10)
    assert only.count == 1


def test_an_activity_belongs_to_the_inference_that_launched_it_however_late_it_starts() -> None:
    found = captured(
        kernel("first", 1, 2, correlation=7),
        kernel("late", 12, 13, correlation=8),
        windows=((0, 9), (10, 19)),
        launches=(Launch("cudaLaunchKernel", 0, MS // 2, 7), Launch("cudaLaunchKernel", 8 * MS, 8 * MS + 9, 8)),
    )
    assert [[item.name for item in items] for items in split_by_inference(found)] == [["first", "late"], []]


def test_the_split_of_two_inferences() -> None:
    # each: 1 ms copy in, 4 ms and 3 ms of kernels of which 2 ms overlap, a gap of 1 ms, 1 ms copy out; every 12 ms
    def one(at: float) -> tuple[Activity, ...]:
        return (
            copy("Host-to-Device", at, at + 1),
            kernel("a", at + 1, at + 5, stream=1),
            kernel("b", at + 3, at + 6, stream=2),
            copy("Device-to-Host", at + 7, at + 8),
        )

    found = captured(*one(0), *one(12), windows=((0, 9), (11.5, 21)), launch_ns=600_000)
    parted = time_breakdown(found, wall_ms=9.0)
    assert (parted.h2d_ms, parted.compute_ms, parted.d2h_ms) == (1.0, 5.0, 1.0)
    assert (parted.busy_ms, parted.overlap_ms, parted.kernels) == (7.0, 2.0, 2.0)
    assert parted.working_ms == 5.0
    assert time_breakdown(found, wall_ms=9.0, gpu_ms=8.0).working_ms == 5.0  # whatever the events say
    assert parted.idle_ms == 5.0  # 1 ms within, 4 ms until the next
    assert parted.launch_ms == 0.3 and parted.gpu_ms is None and parted.wall_ms == 9.0


def test_work_that_reaches_into_the_last_inference_is_not_taken_from_the_pause_twice() -> None:
    # a side stream of the first inference is busy until 1 ms after the second has begun
    found = captured(
        kernel("a", 0, 2, correlation=1), kernel("side", 1, 11, correlation=2, stream=2), kernel("a", 10, 12, correlation=3),
        windows=((0, 5), (9.5, 12)),
        launches=(Launch("l", 0, 1, 1), Launch("l", MS, MS + 1, 2), Launch("l", 10 * MS - 9, 10 * MS - 8, 3)),
    )  # fmt: skip
    assert time_breakdown(found, wall_ms=5.0).idle_ms == 0.0


def test_what_was_measured_without_a_profiler_goes_first() -> None:
    found = captured(kernel("a", 0, 2), copy("Host-to-Device", 2, 3), windows=((0, 4),))
    parted = time_breakdown(found, wall_ms=3.0, gpu_ms=1.9, h2d_ms=0.7, d2h_ms=0.0)
    assert (parted.compute_ms, parted.gpu_ms, parted.h2d_ms, parted.d2h_ms) == (1.9, 1.9, 0.7, 0.0)
    assert parted.busy_ms == 3.0


def test_nothing_captured_is_nothing_told() -> None:
    empty = time_breakdown(captured(windows=()), wall_ms=2.0, gpu_ms=1.0)
    assert (empty.busy_ms, empty.idle_ms, empty.kernels, empty.h2d_ms) == (None, None, None, None)
    assert time_breakdown(captured(kernel("a", 0, 1), windows=((0, 1),)), wall_ms=1.0).launch_ms is None


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

"""Ceilings are measured once and kept: by key, whole or not there, by one process at a time, and what failed is said."""

from __future__ import annotations

import json
import logging
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from patience import HANG_S
from trt_engine.device.info import Gpu
from trt_engine.environment import Environment
from trt_engine.errors import DeviceLost, MemoryExhausted, SetupError
from trt_engine.profiling.peaks import cpu
from trt_engine.profiling.peaks.cache import PeakCache, _merge_highest, datasheet_peaks, device_peaks
from trt_engine.profiling.peaks.cpu import CpuTime
from trt_engine.profiling.peaks.probe import PeakProbe, TimedWork
from trt_engine.records.profile import DevicePeak, DevicePeaks

H200 = Gpu(0, "NVIDIA H200", "GPU-1", 143771, "9.0", "580.159.04")


def some(key: str = "key", value: float = 1.5) -> DevicePeaks:
    item = DevicePeak("fp32_matrix", value, "TFLOP/s", "measured", "planted")
    return DevicePeaks("planted", key, (item,), "2026-01-01T00:00:00Z", Environment.detect())


def never() -> DevicePeaks:
    raise AssertionError("nothing was to be measured")


# ------------------------------------------------------------------------------------------------ one ceiling


class Scripted:
    """Work whose runs take the seconds that are planted; allocations above `room` fail."""

    def __init__(self, seconds_of: Callable[[int], float], room: float = float("inf")) -> None:
        self.seconds_of, self.room = seconds_of, room
        self.open = 0
        self.clock_s = 0.0
        self.ran: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.clock_s

    def make(self, size: int) -> TimedWork:
        if size > self.room:
            raise MemoryExhausted(f"{size} does not fit")
        self.open += 1

        def seconds(runs: int) -> Sequence[float]:
            self.ran.append((size, runs))
            self.clock_s += runs * self.seconds_of(size)
            return [self.seconds_of(size) * (1 + index % 2) for index in range(runs)]

        def close() -> None:
            self.open -= 1

        return TimedWork(seconds, close)


def taken(scripted: Scripted, sizes: Sequence[int] = (10, 100, 1000), **more: float) -> PeakProbe:
    gauge = PeakProbe(more.pop("budget_s", 100.0), clock=scripted.clock, **more)
    gauge.measure_rate(
        "memory_copy", "GB/s", sizes, scripted.make, lambda size: size * 1e9, lambda size: f"{size} planted"
    )
    return gauge


def test_a_rate_is_that_of_the_shortest_run_of_the_largest_size() -> None:
    gauge = taken(Scripted(lambda size: size / 8000))
    (item,) = gauge.peaks
    assert item.value == pytest.approx(8000)
    assert (item.unit, item.source) == ("GB/s", "measured")
    assert item.method == "1000 planted, best of 6"


def test_where_no_size_fits_it_is_skipped_with_the_reason_and_the_next_one_has_its_turn() -> None:
    scripted = Scripted(lambda size: size / 5000, room=5)
    gauge = taken(scripted)
    gauge.measure_cost("launch", 10, Scripted(lambda count: count * 2e-6).make, "planted")
    assert gauge.skipped == ["memory_copy: 10 does not fit"]
    assert [(item.name, item.value, item.unit) for item in gauge.peaks] == [("launch", pytest.approx(2.0), "us")]


def test_work_that_fails_is_closed_and_skipped_with_the_reason() -> None:
    closed = []

    def fails(runs: int) -> Sequence[float]:
        raise SetupError("this GPU has no FP8")

    gauge = PeakProbe(10.0)
    gauge.measure_rate(
        "fp8_matrix", "TFLOP/s", (8,), lambda size: TimedWork(fails, lambda: closed.append(1)), float, str
    )
    assert gauge.skipped == ["fp8_matrix: this GPU has no FP8"]
    assert closed == [1]


def test_a_lost_device_ends_the_measurement_instead_of_being_one_more_thing_skipped() -> None:
    def lost(runs: int) -> Sequence[float]:
        raise DeviceLost("the GPU is lost")

    with pytest.raises(DeviceLost):
        PeakProbe(10.0).measure_rate("memory_read", "GB/s", (8,), lambda size: TimedWork(lost), float, str)


def test_what_has_not_begun_when_the_time_is_over_is_skipped_and_said() -> None:
    scripted = Scripted(lambda size: 60.0)
    gauge = taken(scripted, budget_s=100.0)
    gauge.measure_rate("memory_read", "GB/s", (10,), scripted.make, float, str)
    assert [item.name for item in gauge.peaks] == ["memory_copy"]
    assert gauge.skipped == ["memory_read: the 100 s for all peaks were over"]


# ------------------------------------------------------------------------------------------------ kept


def test_they_are_measured_once_and_kept(tmp_path: Path) -> None:
    kept = PeakCache(tmp_path / "a" / "b")
    assert kept.get("key") is None
    assert kept.get_or_measure(["key"], some) == some()
    assert kept.get_or_measure(["key"], never) == some() == kept.get("key")


def test_what_another_process_kept_between_the_look_and_the_lock_is_taken(tmp_path: Path) -> None:
    class HeldUp(PeakCache):
        def get(self, key: str) -> DevicePeaks | None:
            found = super().get(key)
            if found is None:
                PeakCache(tmp_path).get_or_measure([key], some)  # somebody else, while we are held up here
            return found

    assert HeldUp(tmp_path).get_or_measure(["key"], never) == some()


def test_measured_again_the_higher_rate_and_the_lower_cost_stay() -> None:
    def found(rate: float, cost: float, key: str = "key") -> DevicePeaks:
        items = (
            DevicePeak("fp32_matrix", rate, "TFLOP/s", "measured", "planted"),
            DevicePeak("launch", cost, "us", "measured", "planted"),
        )
        return DevicePeaks("planted", key, items, "", Environment.detect())

    busy, idle = found(0.06, 9.0), found(0.2, 4.0)
    assert _merge_highest(idle, busy) == _merge_highest(busy, idle) == idle
    assert _merge_highest(busy, found(0.2, 4.0, "other")) == busy and _merge_highest(busy, None) == busy


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[: len(raw) // 2],
        lambda raw: b"",
        lambda raw: b"\xff\xfe not json",
        lambda raw: b"[]",
        lambda raw: raw.replace(b'"value": 1.5', b'"value": -1.5'),
        lambda raw: raw.replace(b'"value": 1.5', b'"value": "fast"'),
        lambda raw: raw.replace(b'"schema": 1', b'"schema": 99'),
        lambda raw: raw.replace(b'"key": "key"', b'"key": "of another device"'),
    ],
    ids=["cut", "empty", "not text", "not ours", "negative", "not a number", "of another schema", "of another device"],
)
def test_a_damaged_file_is_said_and_measured_again(
    tmp_path: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    kept = PeakCache(tmp_path)
    kept.get_or_measure(["key"], some)
    raw = kept.path("key").read_bytes()
    kept.path("key").write_bytes(damage(raw))
    assert kept.path("key").read_bytes() != raw
    with caplog.at_level(logging.WARNING, "trt_engine"):
        assert kept.get("key") is None
    assert "are damaged and ignored" in caplog.text
    assert kept.get_or_measure(["key"], lambda: some(value=3.0)).peaks[0].value == 3.0
    assert kept.get("key") == some(value=3.0)


def test_where_nothing_can_be_written_they_are_measured_and_it_is_said_that_they_are_not_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with caplog.at_level(logging.WARNING, "trt_engine"):
        assert PeakCache(in_the_way / "ceilings").get_or_measure(["key"], some) == some()
    assert "will not be cached" in caplog.text and "a file is in the way of a folder" in caplog.text


def _measure_slowly(folder: str, log: str) -> None:
    def measure() -> DevicePeaks:
        with Path(log).open("a") as file:
            file.write("measured\n")
        time.sleep(0.3)
        return some()

    PeakCache(Path(folder)).get_or_measure(["key"], measure)


@pytest.mark.slow
def test_of_several_processes_one_measures_and_the_others_take_what_it_found(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    several = [
        context.Process(target=_measure_slowly, args=(str(tmp_path / "kept"), str(log)), daemon=True) for _ in range(3)
    ]
    for one in several:
        one.start()
    for one in several:
        one.join(HANG_S)
    assert [one.exitcode for one in several] == [0, 0, 0]
    assert log.read_text() == "measured\n"


# ------------------------------------------------------------------------------------------------ devices


def test_where_nothing_was_measured_the_data_sheet_stands_in_and_is_named(tmp_path: Path) -> None:
    found = device_peaks("cuda:0", cache=PeakCache(tmp_path), gpus=[H200])
    assert found is not None
    assert {item.source for item in found.peaks} == {"datasheet"}
    assert all("data sheet by NVIDIA" in item.method for item in found.peaks)
    assert "trt-engine doctor --peaks --device cuda:0" in found.notes[0]
    assert found.measured_at == ""


def test_what_was_measured_wins_over_the_data_sheet_item_by_item(tmp_path: Path) -> None:
    kept = PeakCache(tmp_path)
    empty = device_peaks("cuda:0", cache=kept, gpus=[H200])
    assert empty is not None
    measured = DevicePeak("fp16_matrix", 764.0, "TFLOP/s", "measured", "planted")
    had = DevicePeaks("NVIDIA H200", empty.key, (measured,), "2026-01-01T00:00:00Z", Environment.detect())
    kept.get_or_measure([empty.key], lambda: had)
    found = device_peaks("cuda:0", cache=kept, gpus=[H200])
    assert found is not None
    assert found.get("fp16_matrix") == measured
    assert [item.name for item in found.peaks].count("fp16_matrix") == 1
    sheet = found.get("fp8_matrix")
    assert sheet is not None and sheet.source == "datasheet"


def test_another_driver_has_other_ceilings(tmp_path: Path) -> None:
    newer = Gpu(0, "NVIDIA H200", "GPU-1", 143771, "9.0", "999.1")
    first, second = (device_peaks("cuda:0", cache=PeakCache(tmp_path), gpus=[board]) for board in (H200, newer))
    assert first is not None and second is not None
    assert first.key != second.key


def test_data_sheets_state_dense_rates_that_fit_together() -> None:
    by_name = {item.name: item.value for item in datasheet_peaks("NVIDIA H200")}
    assert by_name["fp16_matrix"] == pytest.approx(2 * by_name["tf32_matrix"], rel=0.01)
    assert by_name["fp8_matrix"] == pytest.approx(2 * by_name["fp16_matrix"])
    assert datasheet_peaks("NVIDIA Nobody 9000") == ()


# ------------------------------------------------------------------------------------------------ the processor


@pytest.mark.parametrize("dtype", ["fp32", "int8", "int8-qdq"])
def test_products_by_onnx_runtime_run_in_the_type_they_name(dtype: str) -> None:
    work = cpu.OnnxRuntimeMatmul(1).matmul(dtype, 64)
    assert len(work.run_seconds(3)) == 3
    assert min(work.run_seconds(3)) > 0
    work.close()


def test_what_others_do_counts_and_what_this_process_does_is_left_out() -> None:
    def share(busy_s: float, own_s: float) -> float:
        """Of four processors within ten seconds, on a machine that has been up for long."""
        readings = iter((CpuTime(1000.0, 300.0, 50.0), CpuTime(1040.0, 300.0 + busy_s, 50.0 + own_s)))
        return cpu.watch_other_load(lambda: next(readings))()

    assert share(busy_s=0.0, own_s=0.0) == 0.0
    assert share(busy_s=10.0, own_s=10.0) == 0.0
    assert share(busy_s=30.0, own_s=10.0) == 0.5
    assert share(busy_s=40.0, own_s=0.0) == 1.0
    assert share(busy_s=9.99, own_s=10.0) == 0.0, "clocks that tick apart are nobody's work"


def test_the_processors_tell_what_was_done_on_them() -> None:
    before = CpuTime.now()
    while (after := CpuTime.now()).process_s < before.process_s + 0.05:
        sum(range(10_000))
    assert after.total_s > before.total_s
    assert before.busy_s <= after.busy_s <= after.total_s


@pytest.mark.slow
def test_this_processor_has_all_its_ceilings_and_doctor_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path))
    words = [sys.executable, "-m", "trt_engine", "doctor", "--peaks", "--device", "cpu", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    (found,) = json.loads(done.stdout)["peaks"]
    names = {item["name"] for item in found["peaks"]} | {text.partition(":")[0] for text in found["skipped"]}
    assert names == {
        "fp32_matrix", "fp32_matrix_blas", "int8_matrix", "int8_matrix_qdq", "memory_read", "memory_copy", "call", "node",
    }  # fmt: skip
    assert "measuring the peaks of" in done.stderr and " s, once" in done.stderr
    again = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S)
    assert json.loads(again.stdout)["peaks"] == [found]
    assert "measuring" not in again.stderr
    kept = device_peaks("cpu")
    assert kept is not None and kept.key == found["key"]

"""What only a GPU shows of a capture: kernels and copies as they ran, side by side, from graphs; who else is watching."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.ptx import SPIN
from trt_engine.config.bench import ProfilerName
from trt_engine.profiling.instruments.capture import Capture, ProfilerUnavailable, capture, instrument_status
from trt_engine.profiling.kernel_categories import busy_ns, kernel_rows, split_by_inference, time_breakdown
from trt_engine.profiling.timeline import write_timeline

pytestmark = pytest.mark.gpu

MIB = 1 << 20
MS = 1_000_000


ASKED = "TRT_ENGINE_TEST_RUNG"
"""Names the rung under test; a process has one, and CUPTI is this one's."""


@pytest.fixture
def rung() -> ProfilerName:
    name = os.environ.get(ASKED, "cupti")
    found = next(item for item in instrument_status() if item.name == name)
    if not found.used:
        pytest.skip(f"{found.name}: {found.reason}")
    return name  # type: ignore[return-value]


@pytest.fixture
def cupti(rung: ProfilerName) -> ProfilerName:
    if rung != "cupti":
        pytest.skip("about CUPTI alone")
    return rung


def test_pytorchs_profiler_keeps_the_same_promises_in_a_process_of_its_own() -> None:
    if ASKED in os.environ:
        pytest.skip("this is that process")
    found = next(item for item in instrument_status() if item.name == "torch")
    if not found.used:
        pytest.skip(f"torch: {found.reason}")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(Path(__file__).parents[2]), "-q", "-rs",
               "-p", "no:cacheprovider", __file__]  # fmt: skip
    done = subprocess.run(command, env=os.environ | {ASKED: "torch"}, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def spin(device: Any) -> Callable[[Any, float], None]:
    """Keeps the GPU at it for so many ms, on one multiprocessor of it."""
    from cuda.bindings import driver

    with device.activate():
        (module,) = device.check_status(driver.cuModuleLoadData(SPIN + b"\0"))
        (function,) = device.check_status(driver.cuModuleGetFunction(module, b"spin"))

    def launch(stream: Any, ms: float) -> None:
        values, types = (int(ms * 1e6),), (ctypes.c_uint64,)
        with device.activate():
            device.check_status(
                driver.cuLaunchKernel(function, 2, 3, 1, 32, 2, 1, 0, stream.handle, (values, types), 0)
            )

    return launch


def lengths_ms(found: Capture) -> list[float]:
    return [(item.end_ns - item.start_ns) / MS for item in found.activities if item.kind == "kernel"]


def test_kernels_of_known_length_are_found_in_the_inference_that_launched_them(
    rung: ProfilerName, device: Any, spin: Callable[[Any, float], None]
) -> None:
    stream, number = device.stream(), 0

    def run() -> None:
        nonlocal number
        number += 1
        for ms in (1.0, 3.0):
            spin(stream, ms)
        stream.synchronize()

    found = capture(run, inferences=4, warmup=2, instrument=rung)
    assert number >= 6
    assert [len(items) for items in split_by_inference(found)] == [2] * 4
    assert all(long >= 3.0 and short >= 1.0 for short, long in zip(*[iter(lengths_ms(found))] * 2, strict=True))
    assert found.warnings == ()
    (row,) = kernel_rows(found.activities, 4)
    assert (row.name, row.per_inference, row.grid, row.block) == ("spin", 2.0, (2, 3, 1), (32, 2, 1))
    parted = time_breakdown(found, wall_ms=4.0)
    assert parted.busy_ms is not None and 4.0 <= parted.busy_ms < 4.2
    assert parted.launch_ms is not None and 0 < parted.launch_ms < 4.0
    assert all(launch.start_ns <= launch.end_ns for launch in found.launches)
    starts = {launch.correlation: launch.start_ns for launch in found.launches}
    assert all(starts[item.correlation] <= item.start_ns for item in found.activities)


def test_copies_and_fills_tell_their_bytes_and_direction(rung: ProfilerName, device: Any) -> None:
    stream, pinned, buffer = device.stream(), device.pinned(MIB), device.allocate(MIB)
    array = pinned.array()
    array[:] = 0

    def run() -> None:
        device.upload(array, buffer, stream)
        device.download(buffer, array, stream)
        stream.synchronize()

    found = capture(run, inferences=2, warmup=1, instrument=rung)
    assert [(item.name, item.nbytes) for item in found.activities] == [
        ("Host-to-Device", MIB), ("Device-to-Host", MIB)
    ] * 2  # fmt: skip
    parted = time_breakdown(found, wall_ms=1.0)
    assert parted.h2d_ms and parted.d2h_ms and parted.kernels == 0
    for item in (pinned, buffer):
        item.close()


def test_work_side_by_side_is_counted_once(rung: ProfilerName, device: Any, spin: Callable[[Any, float], None]) -> None:
    streams = [device.stream(), device.stream()]

    def run() -> None:
        for stream in streams:
            spin(stream, 5.0)
        for stream in streams:
            stream.synchronize()

    found = capture(run, inferences=3, warmup=1, instrument=rung)
    assert len({item.stream for item in found.activities}) == 2
    assert sum(lengths_ms(found)) >= 30.0 and 15.0 <= busy_ns(found.activities) / MS < 24.0
    parted = time_breakdown(found, wall_ms=5.0)
    assert parted.overlap_ms is not None and parted.overlap_ms > 2.0


def test_the_kernels_inside_a_graph_are_seen(
    rung: ProfilerName, device: Any, spin: Callable[[Any, float], None]
) -> None:
    stream = device.stream()
    graph = stream.capture(lambda stream: [spin(stream, 1.0) for _ in range(5)])

    def run() -> None:
        graph.replay(stream)
        stream.synchronize()

    found = capture(run, inferences=2, warmup=1, instrument=rung)
    assert [len(items) for items in split_by_inference(found)] == [5, 5]
    assert len({item.correlation for item in found.activities}) == 2
    assert {launch.name for launch in found.launches if launch.correlation in {i.correlation for i in found.activities}} <= {
        "cuGraphLaunch", "cudaGraphLaunch"
    }  # fmt: skip
    graph.close()


def test_an_inference_that_fails_leaves_the_instrument_free(
    rung: ProfilerName, device: Any, spin: Callable[[Any, float], None]
) -> None:
    stream, calls = device.stream(), 0

    def run() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise ValueError("the inference's own")
        spin(stream, 0.5)
        stream.synchronize()

    with pytest.raises(ValueError, match="the inference's own"):
        capture(run, inferences=3, warmup=0, instrument=rung)
    assert len(capture(run, inferences=3, warmup=0, instrument=rung).activities) == 3


def test_the_union_of_intervals_agrees_with_the_devices_events(
    rung: ProfilerName, device: Any, spin: Callable[[Any, float], None]
) -> None:
    stream = device.stream()

    def work() -> None:
        for _ in range(20):
            spin(stream, 0.5)

    def run() -> None:
        work()
        stream.synchronize()

    run()
    before = stream.record()
    work()
    after = stream.record()
    after.synchronize()
    events_ms = after.elapsed_ms(before)
    found = capture(run, inferences=5, warmup=1, instrument=rung)
    unions = sorted(busy_ns(items) / MS for items in split_by_inference(found))
    print(f"\n{found.instrument}: union {unions[2]:.3f} ms, events {events_ms:.3f} ms")
    assert abs(unions[2] / events_ms - 1) < 0.05


def test_a_timeline_of_a_real_capture_opens(
    rung: ProfilerName, device: Any, spin: Callable[[Any, float], None], tmp_path: Path
) -> None:
    stream = device.stream()

    def run() -> None:
        spin(stream, 0.2)
        stream.synchronize()

    found = capture(run, inferences=2, warmup=1, instrument=rung)
    path = write_timeline(
        tmp_path / "t.json", activities=found.activities, windows=found.inferences, launches=found.launches
    )
    events = json.loads(path.read_text())["traceEvents"]
    assert sum(event.get("name") == "spin" for event in events) == 2
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}


def test_another_profiler_in_the_process_is_named_as_the_reason(
    cupti: ProfilerName, device: Any, spin: Callable[[Any, float], None]
) -> None:
    from cupti import cupti as api

    holder = api.subscribe(lambda *given: None, None)
    try:
        with pytest.raises(ProfilerUnavailable, match="another profiler"):
            capture(lambda: None, inferences=1, warmup=0, instrument=cupti)
    finally:
        api.unsubscribe(holder)
    with contextlib.closing(device.stream()) as stream:

        def run() -> None:
            spin(stream, 0.2)
            stream.synchronize()

        assert len(capture(run, inferences=1, warmup=0, instrument=cupti).activities) == 1


def test_mangled_names_come_out_as_cxx_writes_them(cupti: ProfilerName) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed")
    import torch

    if not torch.cuda.is_available():
        pytest.skip("PyTorch does not see a GPU")
    x = torch.ones(1024, 1024, device="cuda")

    def run() -> None:
        (x + x).relu()
        torch.cuda.synchronize()

    rows = kernel_rows(capture(run, inferences=2, warmup=1, instrument=cupti).activities, 2)
    assert rows and all("at::native::" in row.name and not row.name.startswith("_Z") for row in rows)
    assert {row.category for row in rows} == {"element-wise"}
    assert np.isfinite(float(x.sum()))

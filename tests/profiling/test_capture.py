"""A capture holds what belongs to its inferences, says what is missing, and gives way to another profiler."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patience import HANG_S
from programs import run_python
from trt_engine.errors import UsageError
from trt_engine.profiling.instruments.capture import (
    IntervalSet,
    Launch,
    ProfilerUnavailable,
    assemble,
    capture,
    instrument_status,
    is_async_launch,
    window_of,
)
from trt_engine.profiling.instruments.kineto import read_trace
from trt_engine.profiling.kernel_categories import split_by_inference
from trt_engine.records.profile import Activity

HERE = Path(__file__).parent
SCRIPTED = HERE / "scripted_cupti"


def kernel(start: int, end: int, correlation: int = 0, **more: Any) -> Activity:
    return Activity("kernel", "k", start, end, correlation=correlation, **more)


# ------------------------------------------------------------------------------------------------ putting together


def test_what_was_launched_before_the_first_inference_does_not_count_however_late_it_runs() -> None:
    calls = [Launch("cudaLaunchKernel", 5, 8, 1), Launch("cudaLaunchKernel", 12, 15, 2)]
    found = assemble([kernel(20, 30, 1), kernel(30, 40, 2)], calls, [(10, 50)], "s")
    assert [item.correlation for item in found.activities] == [2] and len(found.launches) == 1


def test_dropped_records_and_work_that_outlives_its_call_are_said() -> None:
    found = assemble([kernel(12, 90)], [], [(10, 50)], "s", dropped=17, warnings=["first"])
    assert found.warnings[0] == "first" and found.warnings[1].startswith("17 records were dropped")
    assert found.warnings[2] == "1 activities ended after their launching call had returned"


def test_a_driver_call_inside_one_of_the_runtime_is_not_counted_twice() -> None:
    calls = [
        Launch("cuLaunchKernel", 12, 18, 2, thread=1),
        Launch("cudaLaunchKernel", 10, 20, 1, thread=1),
        Launch("cudaLaunchKernel", 15, 25, 3, thread=2),
        Launch("cudaStreamSynchronize", 30, 90, 4, thread=1),
        Launch("cudaGetDevice", 91, 92, 5, thread=1),
    ]
    found = assemble([kernel(40, 41, 1)], calls, [(5, 95)], "s")
    assert found.launch_ns == 20
    assert [call.correlation for call in found.launches] == [1, 2, 3, 4]  # what waits is told, what asks nothing is not


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("cudaLaunchKernel", True), ("cudaLaunchKernelExC", True), ("cuLaunchKernelEx", True), ("cudaGraphLaunch", True),
        ("cuGraphLaunch", True), ("cudaMemcpyAsync", True), ("cuMemcpyHtoDAsync_v2", True), ("cudaMemsetAsync", True),
        ("cuMemsetD8Async", True), ("cuLaunchKernel_ptsz", True), ("cudaLaunchCooperativeKernel", True),
        ("cudaMemcpy", False), ("cudaStreamSynchronize", False), ("cudaLaunchHostFunc", False), ("cuMemAllocAsync", False),
        ("cudaEventRecord", False),
    ],
)  # fmt: skip
def test_a_call_launches_work_or_it_does_not(name: str, launches: bool) -> None:
    assert is_async_launch(name) is launches


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 9)), max_size=12, unique_by=lambda pair: pair[0]),
    st.integers(0, 60),
)
def test_a_moment_lies_in_the_intervals_that_cover_it(found: list[tuple[int, int]], moment: int) -> None:
    intervals = [(start, start + length) for start, length in found]
    assert IntervalSet(intervals).contains(moment) == any(start <= moment <= end for start, end in intervals)
    apart = sorted((start * 20, start * 20 + length) for start, length in found)
    expected = [number for number, (start, end) in enumerate(apart) if start <= moment * 10 <= end]
    assert window_of(apart, moment * 10) == (expected[0] if expected else None)


# ------------------------------------------------------------------------------------------------ CUPTI, scripted


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module for CUPTI over the scripted library, and the machine of its script."""
    monkeypatch.syspath_prepend(SCRIPTED)
    ours = ("cupti", "cupti.cupti", "trt_engine.profiling.instruments.cupti")
    for name in ours:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("trt_engine.profiling.instruments.cupti")
    yield module
    for name in ours:
        sys.modules.pop(name, None)


def script(machine: Any) -> None:
    """One inference: a copy in, two kernels of which one is named in a range, a fill, a copy out."""
    machine.copy(1, 4096, 300)
    machine.launch("_Z4gemmIiEvT_", 1000)
    opened = machine.open("head")
    machine.launch("plain_name", 50)
    machine.shut(opened)
    machine.fill(64)
    machine.copy(2, 128, 200)
    machine.wait()


def test_what_cupti_tells_comes_out_whole_and_in_order(cupti: Any) -> None:
    machine = cupti.api.machine
    found = cupti.capture(lambda: script(machine), 3)
    assert len(found.inferences) == 3 and found.warnings == ()
    assert [len(items) for items in split_by_inference(found)] == [5, 5, 5]
    first = found.activities[:5]
    assert [(item.kind, item.name, item.nbytes) for item in first] == [
        ("copy", "Host-to-Device", 4096), ("kernel", "void gemm<int>(int)", 0), ("kernel", "plain_name", 0),
        ("memset", "memset", 64), ("copy", "Device-to-Host", 128),
    ]  # fmt: skip
    assert first[1].end_ns - first[1].start_ns == 1000 and first[1].shared_bytes == 24
    assert (first[1].grid, first[1].block, first[1].stream) == ((4, 2, 1), (128, 1, 1), 7)
    assert [item.range for item in first] == [None, None, "head", None, None]
    assert found.launch_ns == 3 * 5 * 100
    assert {call.name for call in found.launches} == {
        "cudaLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaStreamSynchronize"
    }  # fmt: skip
    assert found.instrument.startswith("cupti")


def test_buffers_that_fill_up_lose_nothing(cupti: Any) -> None:
    machine = cupti.api.machine
    found = cupti.capture(lambda: [machine.launch("k", 10) for _ in range(200)], 2)
    assert [len(items) for items in split_by_inference(found)] == [200, 200] and found.warnings == ()


def test_a_record_of_a_kind_nobody_knows_spoils_no_other(cupti: Any) -> None:
    machine = cupti.api.machine
    machine.unreadable = True
    found = cupti.capture(lambda: machine.launch("k", 10), 2)
    assert len(found.activities) == 2
    assert any("could not be read" in warning for warning in found.warnings)


@pytest.mark.parametrize("failing", [1, 3])
def test_an_inference_that_fails_leaves_cupti_to_the_next(cupti: Any, failing: int) -> None:
    machine, calls = cupti.api.machine, []

    def run() -> None:
        calls.append(1)
        if len(calls) == failing:
            raise KeyboardInterrupt
        machine.launch("k", 10)

    with pytest.raises(KeyboardInterrupt):
        cupti.capture(run, 2)
    assert machine.subscribers == 0 and machine.enabled == set() and machine.buffer is None
    assert len(cupti.capture(run, 2).activities) == 2


def test_who_holds_cupti_already_is_the_reason(cupti: Any) -> None:
    cupti.api.subscribe(None, None)
    with pytest.raises(ProfilerUnavailable, match="another profiler holds CUPTI") as caught:
        cupti.capture(lambda: None, 1)
    assert "torch.profiler" in (caught.value.hint or "")
    assert cupti.api.machine.subscribers == 1  # the other one's is left alone


@pytest.mark.parametrize(
    ("status", "says", "helps"),
    [
        ("ERROR_INSUFFICIENT_PRIVILEGES", "ERR_NVGPUCTRPERM", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("ERROR_NOT_COMPATIBLE", "do not fit together", "nvidia-smi"),
        ("ERROR_HARDWARE_BUSY", "another profiler", "end the other one"),
        ("ERROR_UNKNOWN", "ERROR_UNKNOWN", "doctor"),
    ],
)
def test_what_cupti_refuses_becomes_a_reason_and_a_remedy(cupti: Any, status: str, says: str, helps: str) -> None:
    cupti.api.machine.refused[10] = cupti.api.Result[status]
    with pytest.raises(ProfilerUnavailable, match=says) as caught:
        cupti.capture(lambda: None, 1)
    assert helps in (caught.value.hint or "")
    assert cupti.api.machine.subscribers == 0 and cupti.api.machine.enabled == set()


def test_copies_between_gpus_and_ranges_may_be_missing(cupti: Any) -> None:
    machine = cupti.api.machine
    machine.refused |= {22: cupti.api.Result.ERROR_INVALID_KIND, 12: cupti.api.Result.ERROR_INVALID_KIND}
    found = cupti.capture(lambda: script(machine), 1)
    assert len(found.activities) == 5 and {item.range for item in found.activities} == {None}


def test_somebody_elses_listener_of_ranges_stays(cupti: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tools/libToolsInjection64.so")
    assert cupti.subscribe_nvtx() is False
    assert os.environ["NVTX_INJECTION64_PATH"] == "/opt/tools/libToolsInjection64.so"


def test_ranges_are_heard_in_this_process_and_those_it_starts_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "cuda").mkdir()
    (tmp_path / "cuda" / "pathfinder.py").write_text(
        "import types\nload_nvidia_dynamic_lib = lambda name: types.SimpleNamespace(abs_path=f'/lib/lib{name}.so.13')\n"
    )
    found = child(tmp_path, """
        import ctypes, json, os
        from trt_engine.profiling.instruments.capture import subscribe_nvtx
        heard = [subscribe_nvtx(), subscribe_nvtx()]
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        print(json.dumps([heard, getenv(b"NVTX_INJECTION64_PATH").decode(), "NVTX_INJECTION64_PATH" in os.environ]))
    """, SCRIPTED, tmp_path)  # fmt: skip
    assert found == [[True, True], "/lib/libcupti.so.13", False]


# ------------------------------------------------------------------------------------------------ PyTorch's trace


def trace() -> dict[str, Any]:
    """As PyTorch 2.11 writes it: two inferences of a matrix product, an activation and a copy back; one before them."""
    return json.loads((HERE / "kineto-2.11.json").read_text())  # type: ignore[no-any-return]


def test_a_trace_of_pytorchs_profiler_on_a_gpu() -> None:
    found = read_trace(trace(), "torch.profiler 2.11.0")
    assert [[item.kind for item in items] for items in split_by_inference(found)] == [
        ["kernel", "kernel", "kernel", "copy"]
    ] * 2
    gemm, copy = found.activities[0], found.activities[3]
    assert gemm.name.startswith("sm80_xmma_gemm_f32f32") and gemm.end_ns - gemm.start_ns == 10_015
    assert (gemm.grid, gemm.block, gemm.registers, gemm.shared_bytes) == ((8, 8, 4), (128, 1, 1), 121, 12672)
    assert gemm.range == "aten::mm" and gemm.stream == 7
    assert (copy.name, copy.nbytes) == ("Device-to-Host", 1 << 20)
    calls = {call.correlation: call for call in found.launches}
    assert all(calls[item.correlation].start_ns < item.start_ns for item in found.activities)
    assert found.launch_ns and found.warnings == ()
    assert str(found.inferences[0][0]).startswith("17953143")  # seconds since 1970


# ------------------------------------------------------------------------------------------------ in-process profilers


def test_a_rung_that_cannot_be_had_says_why_and_what_helps() -> None:
    assert [rung.name for rung in instrument_status()] == ["cupti", "torch"]
    for rung in instrument_status():
        if not rung.used:
            assert rung.reason and rung.fix
            with pytest.raises(ProfilerUnavailable) as caught:
                capture(lambda: None, inferences=1, warmup=0, instrument=rung.name)  # type: ignore[arg-type]
            assert (caught.value.message, caught.value.hint) == (rung.reason, rung.fix)
            assert caught.value.exit_code == 3


@pytest.mark.parametrize(("inferences", "rung"), [(0, None), (-1, "cupti"), (1, "nsys"), (1, "layers")])
def test_a_capture_that_makes_no_sense_is_the_callers_mistake(inferences: int, rung: Any) -> None:
    with pytest.raises(UsageError):
        capture(lambda: None, inferences=inferences, warmup=0, instrument=rung)


def test_one_capture_at_a_time() -> None:
    inside, leave = threading.Event(), threading.Event()

    def run() -> None:
        inside.set()
        leave.wait(HANG_S)

    def first() -> None:
        with pytest.raises(ProfilerUnavailable):  # its own: no rung works here
            capture(run, inferences=1, warmup=1)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(HANG_S)
    try:
        with pytest.raises(ProfilerUnavailable, match="another capture is under way"):
            capture(lambda: None, inferences=1, warmup=0)
    finally:
        leave.set()
        thread.join()


def child(tmp_path: Path, text: str, *paths: Path) -> dict[str, Any]:
    """What a Python says that finds a driver (a library of that name) and the packages at these paths."""
    library = next(Path("/lib").glob("*/libm.so.6"), None) or next(Path("/usr/lib").glob("**/libm.so.6"))
    shutil.copy(library, tmp_path / "libcuda.so.1")
    environment = dict(os.environ, LD_LIBRARY_PATH=str(tmp_path), PYTHONPATH=os.pathsep.join(map(str, paths)))
    done = run_python("-c", textwrap.dedent(text), env=environment, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_the_ladder_takes_cupti_where_it_works(tmp_path: Path) -> None:
    found = child(tmp_path, """
        import json
        from cupti.cupti import machine
        from trt_engine.profiling.instruments.capture import capture, instrument_status
        made = capture(lambda: machine.launch("k", 10), inferences=2, warmup=3)
        used = [status.used for status in instrument_status()]
        print(json.dumps([used, made.instrument, len(made.activities), made.warnings]))
    """, SCRIPTED)  # fmt: skip
    assert found == [[True, False], "cupti", 2, []]


def test_a_pytorch_without_cuda_is_no_rung_and_nothing_of_it_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    version = tmp_path / "torch" / "version.py"
    text = """
        import json
        from trt_engine.profiling.instruments.capture import instrument_status
        rung = instrument_status()[1]
        print(json.dumps([rung.used, rung.reason]))
    """
    version.write_text("__version__ = '2.14.0+cpu'\ncuda: Optional[str] = None\n")
    assert child(tmp_path, text, tmp_path) == [False, "the PyTorch that is installed is built without CUDA"]
    version.write_text("__version__ = '2.14.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n")
    assert child(tmp_path, text, tmp_path) == [True, "torch 2.14.0+cu130"]


def test_a_rung_that_fails_as_it_starts_is_passed_over_and_that_is_said(tmp_path: Path) -> None:
    found = child(tmp_path, """
        import json
        from cupti import cupti
        from trt_engine.profiling.instruments.capture import ProfilerUnavailable, capture
        cupti.subscribe(None, None)
        try:
            capture(lambda: None, inferences=1, warmup=0)
        except ProfilerUnavailable as error:
            print(json.dumps([error.message, error.hint]))
    """, SCRIPTED)  # fmt: skip
    assert found[0] == (
        "no profiler is available for the GPU: another profiler holds CUPTI in this process; PyTorch is not installed"
    )
    assert "end the other one" in found[1]


def test_a_process_that_one_instrument_has_watched_is_not_given_to_another(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text("__version__ = '2.14.0'\ncuda = '13.0'\n")
    found = child(tmp_path, """
        import json
        from cupti.cupti import machine
        from trt_engine.profiling.instruments.capture import ProfilerUnavailable, capture
        run = lambda: machine.launch("k", 10)
        broken = lambda: (run(), 1 / 0)
        try:
            capture(broken, inferences=1, warmup=0)
        except ZeroDivisionError:
            pass
        try:
            capture(run, inferences=1, warmup=0, instrument="torch")
        except ProfilerUnavailable as error:
            again = capture(run, inferences=2, warmup=0)
            print(json.dumps([error.message, len(again.activities)]))
    """, SCRIPTED, tmp_path)  # fmt: skip
    assert found == ["cupti has profiled this process already, and two profilers in one process conflict", 2]

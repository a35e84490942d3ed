"""An engine under a program that behaves as nsys: what comes back, and what is said when it misbehaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import onnx_models as models
from nsight_tools.stand_in import write_tool
from nsight_tools.tool import KERNELS
from patience import HANG_S, text_of, until
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import ProfileError, UsageError
from trt_engine.profiling.instruments import nsys
from trt_engine.profiling.instruments.capture import Capture, ProfilerUnavailable
from trt_engine.verbs.build.run import build

Tool = Callable[..., Path]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts an nsys of a behaviour where ours finds it."""

    def put(**behaviour: Any) -> Path:
        path = write_tool(tmp_path / "bin", "nsys", **behaviour)
        monkeypatch.setenv("TRT_ENGINE_NSYS", str(path))
        return path

    return put


def calls(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.with_name("calls.jsonl").read_text().splitlines()]


def collect(engine: Path, out: Path, **more: Any) -> Capture:
    return nsys.collect_capture(engine, out, **({"inferences": 3, "warmup": 1} | more))


# ------------------------------------------------------------------------------------------------ what comes back


def test_every_kernel_of_every_inference_comes_back_on_one_clock(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    found = collect(engine, tmp_path / "out")
    assert found.instrument == "nsys 2024.6.2" and found.warnings == ()
    assert len(found.inferences) == 3
    kernels = [item for item in found.activities if item.kind == "kernel"]
    assert [item.name for item in kernels] == [name for name, *_ in KERNELS] * 3
    assert [item.end_ns - item.start_ns for item in kernels] == [length for *_, length in KERNELS] * 3
    first = kernels[0]
    assert (first.grid, first.block, first.registers, first.shared_bytes) == ((8, 4, 1), (128, 1, 1), 40, 1048)
    for index, (start, end) in enumerate(found.inferences):
        assert all(start <= item.start_ns <= end for item in kernels[4 * index : 4 * index + 4])
    copies = [item for item in found.activities if item.kind == "copy"]
    assert [(item.name, item.nbytes) for item in copies] == [("Host-to-Device", 4096)] * 3
    launched = [item for item in found.launches if item.name == "cudaLaunchKernel"]
    assert [item.correlation for item in launched] == [item.correlation for item in kernels]
    assert found.launch_ns == sum(item.end_ns - item.start_ns for item in found.launches)


@pytest.mark.slow
def test_report_export_and_what_was_said_are_kept_and_the_range_alone_is_recorded(
    engine: Path, tmp_path: Path, tool: Tool
) -> None:
    path = tool()
    out = tmp_path / "100% new" / "out"
    collect(engine, out)
    assert {nsys.REPORT, nsys.DATABASE, nsys.LOG} <= {item.name for item in out.iterdir()}
    log = (out / nsys.LOG).read_text()
    assert f" && {path} profile -t cuda,nvtx -s none " in log.splitlines()[0] and "Generated:" in log
    recorded = next(call for call in calls(path) if call["arguments"][0] == "profile" and len(call["arguments"]) > 2)
    words = recorded["arguments"]
    for option in ("--cpuctxsw=none", "--kill=none", "--capture-range-end=stop", "--cuda-graph-trace=node"):
        assert option in words
    assert words[words.index("-c") + 1] == "cudaProfilerApi" and words[words.index("-f") + 1] == "true"
    assert recorded["environment"] == {"LC_ALL": "C", "LANGUAGE": None, "LANG": None}
    told = json.loads((out / "nsys.run.json").read_text())
    assert (told["stage"], told["inferences"], told["complete"], told["ranges"]) == ("done", 3, True, "nvtx")
    assert nsys.open_command(out / nsys.REPORT) == f"nsys-ui {out / nsys.REPORT}"


@pytest.mark.slow
def test_a_second_run_into_the_same_folder_reads_nothing_of_the_first(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    collect(engine, tmp_path / "out", inferences=4)
    assert len(collect(engine, tmp_path / "out", inferences=2).inferences) == 2
    tool(fails="no_report")
    with pytest.raises(ProfilerUnavailable, match="wrote no report"):
        collect(engine, tmp_path / "out")
    assert not (tmp_path / "out" / nsys.REPORT).exists() and not (tmp_path / "out" / nsys.DATABASE).exists()


@pytest.mark.slow
def test_ranges_of_layers_name_what_was_launched_in_them(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool(layer_ranges=True)
    found = collect(engine, tmp_path / "out", inferences=2)
    kernels = [item for item in found.activities if item.kind == "kernel"]
    assert [item.range for item in kernels] == ["layer0", "layer1", "layer2", "layer3"] * 2
    assert [item.range for item in found.activities if item.kind == "copy"] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("clock", ["of the session", "of the first launch"])
def test_without_nvtx_inferences_are_told_apart_by_the_process_s_own_times(
    clock: str, engine: Path, tmp_path: Path, tool: Tool
) -> None:
    tool(no_ranges=True, no_session_start=clock == "of the first launch")
    found = collect(engine, tmp_path / "out")
    assert len(found.inferences) == 3 and found.warnings == ()
    assert sum(item.kind == "kernel" for item in found.activities) == 12


@pytest.mark.slow
def test_what_the_profiler_lost_is_in_the_warnings_once(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool(dropped=True)
    assert collect(engine, tmp_path / "out").warnings == ("nsys: 12 events were dropped.",)


@pytest.mark.slow
def test_a_version_without_wished_options_is_used_without_them(engine: Path, tmp_path: Path, tool: Tool) -> None:
    path = tool(lacks=["--cpuctxsw", "--cuda-graph-trace"])
    found = collect(engine, tmp_path / "out")
    assert len(found.inferences) == 3
    assert found.warnings == (
        "nsys 2024.6.2 does not know `--cuda-graph-trace=node`: kernels of CUDA graphs may be missing",
    )
    assert not any("cpuctxsw" in word for call in calls(path) for word in call["arguments"])


@pytest.mark.slow
def test_shapes_and_settings_reach_the_process(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    collect(engine, tmp_path / "out", runtime=RuntimeConfig(), config=BenchConfig(graph=False, batch=3))
    asked = json.loads((tmp_path / "out" / "nsys.request.json").read_text())
    assert asked["config"]["batch"] == 3 and asked["config"]["graph"] is False
    assert asked["runtime"]["device"].startswith("fake") and asked["engine"] == str(engine)


# ------------------------------------------------------------------------------------------------ this rung is not to be had

REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "no report": ({"fails": "no_report"}, "wrote no report: its capture range never started", "nsys.log"),
    "a range nobody heard": ({"hears_nothing": True}, "its capture range never started, though cuda.bindings", "cuda-bind"),
    "a range that cannot start": ({"start_answers": 100}, "cudaProfilerStart of cuda.bindings answered 100", "doctor"),
    "no importer": ({"fails": "only_raw"}, "could not make a report of", "host part"),
    "export": ({"fails": "export"}, "could not export.*Failed to export", "newer nsys"),
    "the disk": ({"fails": "disk"}, "the disk is full", "TMPDIR"),
    "another profiler": ({"fails": "another"}, "another profiler holds", "dcgmi profile --pause"),
    "it starts nothing": ({"fails": "at_start"}, "did not start the program.*Operation not permitted", "nsys.log"),
    "killed": ({"dies_by": signal.SIGKILL}, r"was killed \(SIGKILL\) before the capture range began", "dmesg"),
    "crashed": ({"dies_by": signal.SIGSEGV}, "died by SIGSEGV before the capture range began", "trt-engine bench"),
    "too old": ({"lacks": ["--capture-range-end"]}, "too old: it does not know `--capture-range-end`", "newer"),
    "too old, found late": (
        {"lacks": ["--kill"], "version": (2020, 1, 0), "silent_help": True}, "2020.1.0 is too old.*`--kill`", "newer",
    ),
    "graphs alone": ({"as_whole_graphs": True}, "recorded 12 CUDA graph launches as a whole", "nsys-ui"),
    "no kernels": ({"no_kernels": True}, "recorded no kernels of", "nsys-ui"),
    "a launcher of nothing": ({"is_launcher": True}, "does not start as nsys does", "install Nsight Systems"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_each_way_to_fail_has_a_reason_and_a_fix(name: str, engine: Path, tmp_path: Path, tool: Tool) -> None:
    behaviour, reason, fix = REFUSALS[name]
    tool(**behaviour)
    with pytest.raises(ProfilerUnavailable, match=f"(?s){reason}") as refused:
        collect(engine, tmp_path / "out")
    assert refused.value.exit_code == 3 and refused.value.hint is not None and fix in refused.value.hint


@pytest.mark.slow
def test_a_shape_outside_the_profile_is_said_before_a_process_is_started(
    engine: Path, tmp_path: Path, tool: Tool
) -> None:
    path = tool()
    with pytest.raises(ProfileError, match="9"):
        collect(engine, tmp_path / "out", config=BenchConfig(batch=9))
    with pytest.raises(UsageError, match="cannot profile 0 inferences"):
        collect(engine, tmp_path / "out", inferences=0)
    assert not path.with_name("calls.jsonl").exists() and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_an_engine_on_the_cpu_has_nothing_for_nsight(tmp_path: Path, tool: Tool) -> None:
    tool()
    net = build(models.conv_net(tmp_path / "net.onnx", width=4), out=tmp_path / "net.ort.onnx", parity=False)
    with pytest.raises(ProfilerUnavailable, match="runs on `cpu`, and Nsight watches GPUs"):
        collect(net.path, tmp_path / "out")


@pytest.mark.slow
def test_a_tool_that_hangs_is_ended_with_all_it_started(engine: Path, tmp_path: Path, tool: Tool) -> None:
    path = tool(hangs=True)
    with pytest.raises(ProfilerUnavailable, match="did not end within 10 s"):
        nsight_quick(lambda: collect(engine, tmp_path / "out", timeout_s=10.0))
    assert not psutil.pid_exists(calls(path)[-1]["pid"])


def nsight_quick(work: Callable[[], object]) -> None:
    """With the patience of a test."""
    from trt_engine.profiling.instruments import nsight_run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nsight_run, "_GRACE_S", 0.2)
        patch.setattr(nsight_run, "_END_S", 0.5)
        work()


# ------------------------------------------------------------------------------------------------ Ctrl-C

PROGRAM = """
import sys
from pathlib import Path
from trt_engine.errors import Interrupted
from trt_engine.profiling.instruments import nsys

try:
    nsys.collect_capture(Path(sys.argv[1]), Path(sys.argv[2]), inferences=1_000_000, warmup=1)
except Interrupted as stop:
    found = stop.partial
    kernels = sum(item.kind == "kernel" for item in found.activities)
    print(len(found.inferences), kernels, found.warnings[-1])
    print(stop.message)
"""


@pytest.mark.slow
def test_ctrl_c_keeps_the_report_of_the_inferences_until_then(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(engine), str(out)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: "capturing" in text_of(out / "nsys.run.json"), "it captures")
    events = next((tmp_path / "bin").glob("events-*.jsonl"))
    until(lambda: text_of(events).count("pop") >= 3, "three inferences are done")
    os.kill(process.pid, signal.SIGINT)
    said, _ = process.communicate(timeout=HANG_S)
    counts, message = said.splitlines()
    inferences, kernels, *warning = counts.split(maxsplit=2)
    assert int(inferences) >= 3 and int(kernels) == 4 * int(inferences)
    assert warning == [f"the run was stopped after {inferences} inferences"]
    assert message == f"interrupted; `{out / nsys.REPORT}` has the {inferences} inferences until then"
    assert (out / nsys.REPORT).is_file()


@pytest.mark.slow
def test_the_watched_process_ends_with_whoever_asked_for_it(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(engine), str(out)], start_new_session=True)
    until(lambda: "capturing" in text_of(out / "nsys.run.json"), "it captures")
    child = psutil.Process(json.loads((out / "nsys.run.json").read_text())["pid"])
    process.kill()
    process.wait()
    child.wait(HANG_S)


@pytest.mark.slow
def test_the_command_in_the_log_can_be_typed_again(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    collect(engine, tmp_path / "out")
    found = Engine.open(engine)
    request = json.loads((tmp_path / "out" / "nsys.request.json").read_text())
    assert request["engine"] == str(found.path)
    command = (tmp_path / "out" / nsys.LOG).read_text().splitlines()[0].removeprefix("# ")
    (tmp_path / "out" / nsys.REPORT).unlink()
    request["parent"] = 0
    (tmp_path / "out" / "nsys.request.json").write_text(json.dumps(request))
    assert subprocess.run(command, shell=True, check=False, stdout=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "out" / nsys.REPORT).is_file()

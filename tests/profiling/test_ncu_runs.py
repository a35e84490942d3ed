"""An engine under a program that behaves as ncu: what comes back, and what is said when it misbehaves."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from nsight_tools.stand_in import write_tool
from patience import HANG_S, text_of, until
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import MemoryExhausted
from trt_engine.profiling.instruments import ncu, nsight_tools
from trt_engine.profiling.instruments.capture import ProfilerUnavailable
from trt_engine.profiling.instruments.nsight_tools import Permission
from trt_engine.records.profile import Counters

Tool = Callable[..., Path]

GEMM = "void (anonymous namespace)::gemm<float, 4>(const float *, float *)"
RELU = "void relu<4>(float*)"
SOFTMAX = "softmax_forward"


@pytest.fixture(autouse=True)
def permitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine's driver allows."""
    monkeypatch.setattr(nsight_tools, "read_permission", lambda: Permission(restricted=None, privileged=False))


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Puts an ncu of a behaviour where ours finds it."""

    def put(**behaviour: Any) -> Path:
        path = write_tool(tmp_path / "bin", "ncu", **behaviour)
        monkeypatch.setenv("TRT_ENGINE_NCU", str(path))
        return path

    return put


def words(path: Path) -> list[str]:
    """Of the call that measured."""
    calls = [json.loads(line)["arguments"] for line in path.with_name("calls.jsonl").read_text().splitlines()]
    found: list[str] = next(call for call in calls if "--launch-count" in call)
    return found


def counters(engine: Path, out: Path, *kernels: str, **more: Any) -> tuple[Counters, ...]:
    return ncu.collect_counters(engine, out, kernels=kernels, warmup=1, **more)


# ------------------------------------------------------------------------------------------------ what comes back


def test_the_kernels_asked_for_come_back_in_that_order_with_exact_figures(
    engine: Path, tmp_path: Path, tool: Tool
) -> None:
    path = tool()
    relu, gemm = counters(engine, tmp_path / "out", RELU, GEMM)
    assert (relu.kernel, relu.launches, relu.duration_us) == (RELU, 1, 50.0)
    assert (relu.compute_pct, relu.memory_pct, relu.dram_pct, relu.occupancy_pct) == (5.0, 5.0, 5.0, 28.5)
    assert relu.metrics["dram__bytes_read.sum"] == 50 * 4321 and relu.units["dram__bytes_read.sum"] == "byte"
    # two grids: durations are means, shares are weighted by duration
    assert (gemm.kernel, gemm.launches, gemm.duration_us) == (GEMM, 2, 200.0)
    assert gemm.compute_pct == pytest.approx((30 * 300 + 10 * 100) / 400)
    assert gemm.instrument == "ncu 2025.3.1, clocks as they are, caches flushed"
    given = words(path)
    assert given[given.index("--kernel-name") + 1] == "regex:^(relu|gemm)$"
    for option, value in (
        ("--clock-control", "none"),
        ("--profile-from-start", "off"),
        ("--target-processes", "all"),
        ("--print-units", "base"),
        ("--filter-mode", "per-launch-config"),
        ("--launch-count", "2"),
    ):
        assert given[given.index(option) + 1] == value


def test_a_value_that_is_not_to_be_had_is_no_zero(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    (found,) = counters(engine, tmp_path / "out", SOFTMAX)
    assert found.occupancy_pct is None and found.duration_us == 20.0


@pytest.mark.slow
def test_without_names_every_kernel_is_measured(engine: Path, tmp_path: Path, tool: Tool) -> None:
    path = tool()
    assert [ncu.base_name(item.kernel) for item in counters(engine, tmp_path / "out")] == [
        "gemm", "relu", "softmax_forward",
    ]  # fmt: skip
    assert "--kernel-name" not in words(path)


@pytest.mark.slow
def test_rules_bring_the_tool_s_advice(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    gemm, softmax = counters(engine, tmp_path / "out", GEMM, SOFTMAX, rules=True)
    assert gemm.advice == ("The grid of 8 is small.", "The grid of 2 is small.")
    assert softmax.advice == ("The grid of 4 is small.",) and softmax.launches == 1 and softmax.duration_us == 20.0


@pytest.mark.slow
def test_report_table_and_what_was_said_are_kept(engine: Path, tmp_path: Path, tool: Tool) -> None:
    path = tool()
    out = tmp_path / "50% off"
    counters(engine, out, GEMM)
    assert {ncu.REPORT, ncu.OUTPUT, ncu.LOG, "ncu.request.json", "ncu.run.json"} <= {
        item.name for item in out.iterdir()
    }
    assert (out / ncu.LOG).read_text().startswith(f"# cd '{out}' && {path} --csv --page raw")
    assert json.loads((out / "ncu.run.json").read_text())["inferences"] == 1
    assert ncu.open_command(out / ncu.REPORT) == f"ncu-ui {out / ncu.REPORT}"


@pytest.mark.slow
def test_a_version_without_wished_options_counts_launches_of_all_kernels_together(
    engine: Path, tmp_path: Path, tool: Tool
) -> None:
    path = tool(lacks=["--filter-mode", "--clock-control"])
    gemm, relu = counters(engine, tmp_path / "out", GEMM, RELU)
    assert gemm.launches == 2 and relu.launches == 1
    given = words(path)
    assert given[given.index("--launch-count") + 1] == "4" and "--clock-control" not in given


@pytest.mark.slow
def test_a_kernel_that_was_not_measured_is_said_and_left_out(
    engine: Path, tmp_path: Path, tool: Tool, caplog: pytest.LogCaptureFixture
) -> None:
    tool()
    with caplog.at_level(logging.WARNING):
        found = counters(engine, tmp_path / "out", SOFTMAX, "void never<int>(int)")
    assert [item.kernel for item in found] == [SOFTMAX]
    assert "measured no launch of `never`" in caplog.text


# ------------------------------------------------------------------------------------------------ not to be had

REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "permission": ({"fails": "permission"}, "administrators alone.*ERR_NVGPUCTRPERM", "AdminUsers=0"),
    "busy": ({"fails": "busy"}, "driver resource is unavailable.*DCGM", "dcgmi profile --pause"),
    "sandbox": ({"fails": "not_loaded"}, "driver's part of the profiler cannot be loaded", "--gpus all"),
    "metric": ({"fails": "metric"}, "has no metric `launch__occupancy_limit_warps`", "--query-metrics"),
    "nothing said": ({"fails": "empty"}, "output of ncu is empty", "--page raw"),
    "garbage": ({"fails": "garbage"}, "no table of ncu was found; the text begins with", "--page raw"),
    "cut": ({"fails": "cut"}, "output of ncu is cut: line .* ends inside a value", "--page raw"),
    "no range": ({"hears_nothing": True}, "profiled no kernels: inside the capture range none is named `gemm`", "ncu.log"),
    "a range that cannot start": ({"start_answers": 100}, "the capture range of ncu 2025.3.1 never started", "doctor"),
    "killed": ({"dies_by": signal.SIGKILL}, r"was killed \(SIGKILL\) before the capture range began", "dmesg"),
    "crashed": ({"dies_by": signal.SIGSEGV}, "died by SIGSEGV", "trt-engine bench"),
    "too old": ({"lacks": ["--profile-from-start"]}, "too old: it does not know `--profile-from-start`", "newer"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_each_way_to_fail_has_a_reason_and_a_fix(name: str, engine: Path, tmp_path: Path, tool: Tool) -> None:
    behaviour, reason, fix = REFUSALS[name]
    tool(**behaviour)
    with pytest.raises(ProfilerUnavailable, match=f"(?s){reason}") as refused:
        counters(engine, tmp_path / "out", GEMM)
    assert refused.value.exit_code == 3 and refused.value.hint is not None and fix in refused.value.hint


@pytest.mark.slow
def test_names_that_never_run_are_told_with_those_that_do(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    with pytest.raises(ProfilerUnavailable, match="profiled no kernels: none of those that ran is `never`") as refused:
        counters(engine, tmp_path / "out", "never<3>(int)")
    assert refused.value.hint == "there were: `gemm`, `relu`, `softmax_forward`"


@pytest.mark.slow
def test_out_of_memory_is_the_engine_s_own_error(engine: Path, tmp_path: Path, tool: Tool) -> None:
    tool()
    with pytest.raises(MemoryExhausted, match="out of memory while"):
        counters(engine, tmp_path / "out", GEMM, runtime=RuntimeConfig(options={"memory": "1KiB"}))


@pytest.mark.slow
def test_a_refusal_that_is_known_beforehand_costs_no_load(
    engine: Path, tmp_path: Path, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tool()
    monkeypatch.setattr(nsight_tools, "read_permission", lambda: Permission(restricted=True, privileged=False))
    with pytest.raises(ProfilerUnavailable, match=r"RmProfilingAdminOnly is 1"):
        counters(engine, tmp_path / "out", GEMM)
    assert "--launch-count" not in path.with_name("calls.jsonl").read_text()


PROGRAM = """
import sys
from pathlib import Path
from trt_engine.errors import Interrupted
from trt_engine.profiling.instruments import ncu, nsight_run, nsight_tools

nsight_tools.read_permission = lambda: nsight_tools.Permission(None, False)
nsight_run._GRACE_S = nsight_run._END_S = 0.2  # the stand-in does not listen
try:
    ncu.collect_counters(Path(sys.argv[1]), Path(sys.argv[2]), kernels=())
except Interrupted as stop:
    print(stop.exit_code, stop.message)
"""


@pytest.mark.slow
def test_ctrl_c_ends_a_tool_that_does_not_listen_and_all_it_started(engine: Path, tmp_path: Path, tool: Tool) -> None:
    path = tool(hangs=True)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(engine), str(tmp_path / "out")], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    log = tmp_path / "out" / ncu.LOG  # what it says stands there once somebody listens to it
    until(lambda: "it hangs" in text_of(log).splitlines(), "it hangs, and is listened to")
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=HANG_S)
    assert said == "130 interrupted before a kernel was measured\n"
    calls = [json.loads(line) for line in path.with_name("calls.jsonl").read_text().splitlines()]
    assert not psutil.pid_exists(calls[-1]["pid"])

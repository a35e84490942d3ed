"""trtexec's logs: five public ones parse to what stands in them, and no cut, mix or paste is believed or fatal."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trt_engine.benchmark.trtexec_style_log import read_log
from trt_engine.cli.main import run
from trt_engine.trt.trtexec_log import layer_times, missing_success_signs, parse, parse_pools

LOGS = sorted((Path(__file__).parent / "logs").glob("*.log"))
MARKER = "# --- log follows; a parser is fed only what is below this line ---\n"


def text_of(log: Path) -> str:
    return log.read_text().partition(MARKER)[2]


def expected_of(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(log.with_name(f"{log.stem}.expected.json").read_text())
    return found


def report_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(parse(text).report)
    return found


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_public_log_parses_to_what_stands_in_it(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.log").write_text(text_of(log))
    assert run(["bench", "--parse-log", str(tmp_path / "x.log"), "--json"]) == 0
    found, wanted = json.loads(capsys.readouterr().out), expected_of(log)
    for name in ("log", "source"):
        wanted.pop(name)
    telling = wanted.pop("error_text_contains")
    assert {name: found[name] for name in wanted} == wanted
    assert (telling is None) is (found["error_text"] is None)
    assert telling is None or telling in found["error_text"]
    assert set(found) & {"error_node", "requested_bytes", "unknown_options"} == set(wanted) & {
        "error_node", "requested_bytes", "unknown_options"
    }  # fmt: skip


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_log_redirected_by_powershell_is_read(encoding: str, tmp_path: Path) -> None:
    text = text_of(LOGS[3]).replace("\n", "\r\n")
    (tmp_path / "x.log").write_bytes(text.encode(encoding))
    assert read_log(tmp_path / "x.log") == replace(parse(text_of(LOGS[3])).report, log=str(tmp_path / "x.log"))


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_log_cut_after_any_line_is_failed_and_tells_no_figure_it_does_not_show(log: Path) -> None:
    lines = text_of(log).splitlines(keepends=True)
    whole = report_of("".join(lines))
    end = max(at for at, line in enumerate(lines) if line.startswith("&&&& "))
    for count in range(end + 1):
        found = report_of("".join(lines[:count]))
        assert found["status"] == "failed", count
        for name in ("throughput_qps", "engine_built_s", "gpu", "cuda_graph", "latency_ms", "command", "layer_profile"):
            assert found[name] in (None, whole[name]), (count, name)
    for count in range(end + 1, len(lines) + 1):
        assert report_of("".join(lines[:count])) == whole


@pytest.mark.slow
@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_line_of_stderr_in_the_middle_of_another_makes_no_other_figure(log: Path) -> None:
    lines, whole = text_of(log).splitlines(), report_of(text_of(log))
    noise = "[06/05/2025-11:05:37] [W] [TRT] a warning on the other stream"
    telling = [at for at, line in enumerate(lines) if re.search(r"\d (qps|ms|s|MiB)\b|&&&&|\d sec\.", line)]
    for at in telling[:3] + telling[-24:]:
        for cut in range(0, len(lines[at]), 7):
            broken = [*lines[:at], lines[at][:cut] + noise, lines[at][cut:], *lines[at + 1 :]]
            found = report_of("\n".join(broken))
            for name, value in whole.items():
                if isinstance(value, dict):
                    parts = found[name] or {}
                    assert all(part in (None, value[key]) for key, part in parts.items() if key in value), (name, cut)
                elif isinstance(value, float):
                    assert found.get(name) in (None, value), (name, lines[at], cut)


# ------------------------------------------------------------------------------------------------ made-up logs

RUNNING = "&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11] # trtexec --onnx=m.onnx --saveEngine=m.engine"
PASSED = RUNNING.replace("RUNNING", "PASSED")
FAILED = RUNNING.replace("RUNNING", "FAILED")


def log(*lines: str) -> str:
    return "\n".join(line if line[:1] != "[" else f"[06/05/2026-11:05:37] {line}" for line in lines) + "\n"


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (["[E] Unknown option: --fp16 ", "[E] Unknown option: --best "], "unknown_option"),
        (["[E] Error[2]: Error Code 2: OutOfMemory (Requested size was 4294967296 bytes.)"], "out_of_memory"),
        (["Cuda failure at cuda.h:12: out of memory"], "out_of_memory"),
        (["[E] Error[9]: x: could not find any supported formats consistent with input/output data types"],
         "plugin_format_unsupported"),
        (["[E] [TRT] IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization assertion "
          "stdVersionRead == kSERIALIZATION_VERSION failed.)", "[E] Engine deserialization failed"],
         "engine_incompatible"),
        (["[E] Error[1]: Target GPU SM 70 is not supported by this TensorRT release."], "gpu_not_supported"),
        (["[E] Error[3]: IExecutionContext: Static dimension mismatch while setting input shape for x."],
         "shape_mismatch"),
        (["[E] Static model does not take explicit shapes since the shape of inference tensors will be determined by "
          "the model itself"], "static_model_given_shapes"),
        (["[E] [TRT] CUDA initialization failure with error: 35", "[E] Builder creation failed"], "cuda_unavailable"),
        (["[E] Builder creation failed"], "builder_creation_failed"),
        (["Cannot find any available devices (GPUs)!"], "cuda_unavailable"),
        (["[E] Accuracy validation FAILED: one or more tensors exceeded the threshold."], "accuracy_failed"),
        (["[E] In node 3 with name: /a/b and operator: Foo (parse): UNSUPPORTED_NODE: x",
          "[E] Failed to parse onnx file"], "onnx_parse_error"),
        (["[E] Error[10]: Could not find any implementation for node {ForeignNode[/a.b...c]} due to insufficient "
          "workspace. See verbose log for requested sizes."], "no_implementation"),
    ],
)  # fmt: skip
def test_each_failure_has_its_name(lines: list[str], name: str) -> None:
    found = report_of(log(RUNNING, *lines, FAILED))
    assert (found["status"], found["error_class"]) == ("failed", name)


def test_a_killed_run_is_aborted_and_a_cause_still_counts() -> None:
    found = report_of(log(RUNNING, "[I] Start parsing network model."))
    assert (found["status"], found["end_marker"], found["error_class"]) == ("failed", None, "aborted")
    found = report_of(log(RUNNING, "[E] [TRT] Requested amount of GPU memory (99 bytes) could not be allocated."))
    assert (found["error_class"], found["requested_bytes"]) == ("out_of_memory", 99)


def test_an_engine_of_no_bytes_behind_engine_built_is_no_success() -> None:
    text = log(
        RUNNING,
        "[E] Error[10]: Internal Error (Could not find any implementation for node conv.)",
        "[I] Created engine with size: 0 MiB",
        "[I] Engine built in 12.5 sec.",
        '[E] Assertion failure: false && "Attempting to access an empty engine!"',
    )
    found = report_of(text)
    assert (found["status"], found["error_class"], found["error_node"]) == ("failed", "no_implementation", "conv")
    only = report_of(log(RUNNING, "[I] Created engine with size: 0 MiB", PASSED))
    assert (only["status"], only["end_marker"]) == ("failed", "PASSED")


def test_passed_behind_an_engine_that_could_not_be_loaded_is_failed() -> None:
    text = log(RUNNING, "[E] Engine deserialization failed", "[I] Skipped inference phase since --skipInference is added.",
               PASSED)  # fmt: skip
    found = report_of(text)
    assert (found["status"], found["end_marker"], found["error_class"]) == ("failed", "PASSED", "engine_incompatible")


def test_skipped_tactics_alone_fail_nothing() -> None:
    text = log(RUNNING, "[E] Error[9]: Skipping tactic 0x0 due to exception Assertion failure: x", PASSED)
    found = report_of(text)
    assert (found["status"], found["error_lines"], found["error_text"]) == ("passed", 1, None)


def test_a_measurement_without_throughput_is_failed_unless_the_log_says_why() -> None:
    assert report_of(log(RUNNING, "[I] Starting inference", PASSED))["status"] == "failed"
    why = "[I] The e2e network timing is not reported since it is inaccurate due to the extra synchronizations"
    assert report_of(log(RUNNING, "[I] Starting inference", why, PASSED))["status"] == "passed"


def test_a_figure_is_trtexecs_own_and_a_count_is_a_number() -> None:
    told = ("[I] Engine built in 2 sec.", "[I] [TRT] Engine built in 3 sec.", "[V] Engine built in 4 sec.")
    assert report_of(log(RUNNING, *told, PASSED))["engine_built_s"] == 2.0
    assert report_of(log(RUNNING, "[I] Timing trace has inf queries over 1 s", PASSED))["timed_queries"] is None


def test_the_markers_of_a_tuners_tasks_are_not_the_runs() -> None:
    text = log(
        RUNNING,
        "&&&& TASK_BEGIN [iter=0] BuildRoute = '-a=1'",
        RUNNING,
        "[I] Throughput: 5 qps",
        "[E] Error[10]: Could not find any implementation for node q.",
        FAILED,
        "&&&& TASK_ABORT [iter=0] BuildRoute = '-a=1'",
        "&&&& TASK_BEGIN [iter=1] BuildRoute = '-a=2'",
        PASSED,
    )
    assert report_of(text)["end_marker"] is None
    whole = report_of(text + log("&&&& TASK_END [iter=1] BuildRoute = '-a=2'", PASSED))
    assert (whole["status"], whole["end_marker"], whole["throughput_qps"]) == ("passed", "PASSED", None)


def test_of_several_runs_in_one_file_the_last_one_counts() -> None:
    first = log(RUNNING, "[I] Selected Device: A", "[W] w", "[E] Error[2]: Error Code 2: OutOfMemory (x)", FAILED)
    second = log(RUNNING.replace("m.onnx", "n.onnx"), "[I] Engine built in 2 sec.", PASSED)
    for attempts in (first + second, "# command\n" + first + "# command\n" + second):
        found = report_of(attempts)
        assert (found["status"], found["error_class"], found["engine_built_s"]) == ("passed", None, 2.0)
        assert (found["gpu"], found["warning_lines"], found["error_lines"]) == (None, 0, 0)
        assert "n.onnx" in found["command"]
    assert report_of(second + first)["error_class"] == "out_of_memory"
    assert report_of(first + log(RUNNING))["error_class"] == "aborted"


def test_the_workspace_is_read_as_trtexec_read_it() -> None:
    rest = ", dlaSRAM: default, dlaLocalDRAM: default, dlaGlobalDRAM: default, tacticSharedMem: default"
    assert parse_pools(f"Memory Pools: workspace: 32768 MiB{rest}") == {"workspace": 32768.0}
    assert parse_pools(f"Memory Pools: workspace: default{rest}") == {}
    assert parse_pools("Memory Pools: workspace: 8 MiB, tacticSharedMem: 48 KiB")["tacticSharedMem"] == 48 / 1024
    found = report_of(log(RUNNING, f"[I] Memory Pools: workspace: 0.03125 MiB{rest}", PASSED))
    assert found["workspace_mib"] == 0.03125
    assert "workspace_mib" not in report_of(log(RUNNING, f"[I] Memory Pools: workspace: default{rest}", PASSED))


def test_the_table_of_8_5_has_the_layer_first() -> None:
    text = log(
        RUNNING,
        "[I] === Profile (12 iterations ) ===",
        "[I]                 Layer   Time (ms)   Avg. Time (ms)   Median Time (ms)   Time %",
        "[I]   conv1 + relu 2        1.20           0.1000             0.0900     60.0",
        "[I]   fc                    0.80           0.0667             0.0600     40.0",
        "[I]   Total                 2.00           0.1667             0.1500    100.0",
        PASSED,
    )
    assert report_of(text)["layer_profile"] == {
        "iterations": 12, "layers": 2, "first_layer": "conv1 + relu 2", "first_layer_time_ms": 1.2,
        "total_time_ms": 2.0, "total_avg_ms": 0.1667, "total_median_ms": 0.15,
    }  # fmt: skip
    assert [row.name for row in layer_times(text)] == ["conv1 + relu 2", "fc"]
    cut = "\n".join(text.splitlines()[:-2])
    assert report_of(cut)["layer_profile"] is None


def test_the_five_signs_are_asked_one_by_one(tmp_path: Path) -> None:
    plan, empty, other = tmp_path / "a.engine", tmp_path / "b.engine", tmp_path / "c.engine"
    plan.write_bytes(b"ftrt" + bytes(20) + bytes([10, 16, 1, 11]) + bytes(8))
    empty.touch()
    other.write_bytes(b"not a plan" * 8)
    good = parse(log(RUNNING, "[I] Starting inference", "[I] Throughput: 5 qps", PASSED))
    assert missing_success_signs(good, exit_code=0, engine=plan, measured=True) == ()
    assert "exit code 1" in missing_success_signs(good, exit_code=1)[0]
    assert "empty" in missing_success_signs(good, exit_code=0, engine=empty)[0]
    assert "no engine" in missing_success_signs(good, exit_code=0, engine=tmp_path / "absent")[0]
    assert "does not begin" in missing_success_signs(good, exit_code=0, engine=other)[0]
    silent = parse(log(RUNNING, PASSED))
    assert "throughput" in missing_success_signs(silent, exit_code=0, measured=True)[0]
    assert "no marker" in missing_success_signs(parse(log(RUNNING)), exit_code=0)[0]
    assert "PASSED after" in missing_success_signs(parse(log(RUNNING, "[E] bad", PASSED)), exit_code=0)[0]

"""Logs of failed runs: node, plugin, bytes, options and cause, as the log of each kind of failure has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trt_engine.cli.main import run
from trt_engine.trt.failure_causes import find_cause, make_error
from trt_engine.trt.trtexec_log import missing_success_signs, parse

FOLDER = Path(__file__).parent / "logs" / "failures"
LOGS = sorted(FOLDER.glob("*.log"))
MARKER = "# --- log follows; a parser is fed only what is below this line ---\n"


def text_of(log: Path) -> str:
    return log.read_text().partition(MARKER)[2]


def named(part: str) -> str:
    return text_of(next(log for log in LOGS if part in log.name))


def expected_of(log: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(log.with_name(f"{log.stem}.expected.json").read_text())
    found.pop("log")
    return found


def report_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(parse(text).report)
    return found


DETAILS = {"error_node", "error_plugin", "requested_bytes", "unknown_options"}


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_failed_log_names_its_cause(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.log").write_text(text_of(log))
    assert run(["bench", "--parse-log", str(tmp_path / "x.log"), "--json"]) == 0
    found, wanted = json.loads(capsys.readouterr().out), expected_of(log)
    telling, lacking = wanted.pop("error_text_contains"), wanted.pop("error_text_lacks", None)
    assert {name: found[name] for name in wanted} == wanted
    assert set(found) & DETAILS == set(wanted) & DETAILS
    assert all(part in found["error_text"] for part in telling)
    assert lacking is None or lacking not in found["error_text"]


@pytest.mark.parametrize("log", LOGS, ids=lambda log: log.stem)
def test_a_failed_log_cut_anywhere_stays_failed(log: Path) -> None:
    lines = text_of(log).splitlines(keepends=True)
    for count in range(len(lines) + 1):
        assert report_of("".join(lines[:count]))["status"] == "failed", count


RUNNING = "&&&& RUNNING TensorRT.trtexec [TensorRT v101601] [b11] # trtexec --onnx=m.onnx"
FAILED = RUNNING.replace("RUNNING", "FAILED")
PASSED = RUNNING.replace("RUNNING", "PASSED")


def test_of_an_unknown_failure_the_first_specific_error_is_shown_with_its_node() -> None:
    first = "Error[2]: [shape.cpp::check::12] Error Code 2: Internal Error (/neck/up.0/Resize_1: scales are negative)"
    found = report_of("\n".join([RUNNING, f"[E] {first}", "[E] Building engine failed", FAILED]))
    assert (found["error_class"], found["error_text"], found["error_node"]) == (None, first, "/neck/up.0/Resize_1")
    chain = ["[E] Engine could not be created from network", f"[E] {first}", "[E] Engine set up failed"]
    assert report_of("\n".join([RUNNING, *chain, FAILED]))["error_text"] == first


def test_a_run_that_died_before_its_banner_behind_one_that_passed_is_the_one_that_counts() -> None:
    text = "\n".join([RUNNING, "[I] Throughput: 5 qps", PASSED]) + "\n" + named("before-the-banner-library")
    found = report_of(text)
    assert (found["status"], found["error_class"], found["throughput_qps"]) == ("failed", "library_not_found", None)


@pytest.mark.parametrize(
    ("log", "exit_code", "shown"),
    [
        ("memory-behind-no-implementation", 11, ("14.4 GiB (15485030400 bytes)", "/1/Constant_36_output_0.../1/Slice_4")),
        ("requested-size", 11, ("3.2 GiB (3395289088 bytes)",)),
        ("plugin-creator", 4, ("`LeakyCustom`", "`/backbone/stem.0/LeakyRelu_2`")),
        ("tile-shape-tensor", 4, ("/model/decoder/layers.0/Tile_1",)),
        ("foreign-node", 5, ("(Unnamed Layer* 21) [Shuffle]",)),
        ("assertion-before-abort", 5, ("Assertion `status == myelinSuccess' failed.",)),
        ("unknown-option", 3, ("--fp17, --skipInferenec",)),
        ("banner-library", 3, ("libnvinfer.so.10",)),
        ("banner-glibc", 3, ("GLIBC_2.38",)),
        ("banner-driver", 3, ("CUDA driver version is insufficient",)),
    ],
)  # fmt: skip
def test_the_error_of_a_failed_build_shows_what_the_log_has(log: str, exit_code: int, shown: tuple[str, ...]) -> None:
    cause = parse(named(log)).cause
    assert cause is not None
    error = make_error(cause, "the build of `m.onnx`")
    assert error.exit_code == exit_code and error.hint
    assert all(part in error.message for part in shown), error.message
    assert "secret" not in error.message and "GPU" not in (error.hint if log == "banner-library" else "")


def test_the_text_of_a_log_shows_node_plugin_and_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for log, shown in (
        ("plugin-creator", ("LeakyCustom", "/backbone/stem.0/LeakyRelu_2")),
        ("requested-size", ("3.2 GiB (3395289088 bytes)",)),
        ("unknown-option", ("--fp17", "--skipInferenec")),
    ):
        (tmp_path / "x.log").write_text(named(log))
        assert run(["bench", "--parse-log", str(tmp_path / "x.log")]) == 0
        found = capsys.readouterr().out
        assert all(part in found for part in shown), found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Error Code 1: Myelin ([tactic.cpp:1676: enumerate_tactics] Tactic Selection: no tactics to implement the "
         "operation within workspace limit. Consider increase the allowed workspace size if applicable.)",
         "insufficient_workspace"),
        ("Error Code 4: Internal Error (kOPT values for profile 0 violate shape constraints: IShuffleLayer rs: reshaping "
         "failed for tensor: x reshape would change volume 12 to 16)", "shape_mismatch"),
        ("Error Code 4: API Usage Error (Network has dynamic or shape inputs, but no optimization profile has been "
         "defined. In validate at network.cpp:4023)", "shape_mismatch"),
        ("Error Code 1: Myelin ([pass.cpp:1500: run_passes] Cannot compile for target(s) sm80, because the model contains "
         "HW-specific datatypes: fp8_e4m3.)", "gpu_not_supported"),
        ("[tacticSupply.cpp::getSupportedFormats::48] Error Code 2: Internal Error (Assertion !layerImpls.empty() failed. "
         "nonmaxsuppression_0 has no runners that implement it In getSupportedFormats)", "no_implementation"),
        ("Error Code 6: API Usage Error (Unable to load library: libnvinfer_lean.so.1: libnvinfer_lean.so.1: cannot open "
         "shared object file: No such file or directory In Impl)", "library_not_found"),
    ],
)  # fmt: skip
def test_messages_of_a_real_builder_have_their_cause(text: str, name: str) -> None:
    found = find_cause([f"[E] IBuilder::buildSerializedNetwork: {text}", "[E] (cudaError 35: no matter)"])
    assert found is not None and found.name == name and found.hint
    assert name != "no_implementation" or found.node == "nonmaxsuppression_0"


def test_a_process_ended_by_a_signal_says_which() -> None:
    assert any("SIGABRT" in text for text in missing_success_signs(parse(RUNNING), exit_code=-6))

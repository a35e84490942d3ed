"""`trt-engine bench`: the result on stdout, the talk on stderr, exit codes, and a partial record after Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save
from patience import HANG_S
from trt_engine.cli.main import run

QUICK = ["--duration", "0", "--warmup", "0", "--iterations", "12"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, its engine, and a store."""
    folder = tmp_path_factory.mktemp("bench")
    save(
        folder / "m.onnx",
        [node("Relu", "x", "y")],
        {"x": (FLOAT, ["batch", 3, 8, 8])},
        {"y": (FLOAT, ["batch", 3, 8, 8])},
    )
    te.build(folder / "m.onnx", out=folder / "m.engine.onnx", batch=(1, 2, 8), store=te.Store(folder / "store"))
    return folder


@pytest.fixture(autouse=True)
def store_of_its_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRT_ENGINE_STORE", str(place / "store"))


def bench(*args: str | Path, json_too: bool = True) -> int:
    return run(["bench", *map(str, args), *(["--json"] if json_too else [])])


def test_the_document_has_the_common_keys_and_the_figures(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(place / "m.engine.onnx", *QUICK, "--batch", "8", "-o", place / "out") == 0
    told = capsys.readouterr()
    doc = json.loads(told.out)
    assert {"schema", "schema_version", "tool", "command", "warnings"} <= set(doc)
    assert (doc["schema"], doc["device"], doc["backend"], doc["batch"]) == ("trt-engine/bench", "cpu", "onnxruntime", 8)
    assert set(doc["compute_ms"]) == {"min", "max", "mean", "median", "p90", "p95", "p99", "cv_pct"}
    assert len(doc["samples_ms"]) == doc["queries"] == 12
    assert doc["images_per_s"] == pytest.approx(8 * doc["qps"])
    assert doc["per_image_ms"] == pytest.approx(doc["compute_ms"]["mean"] / 8)
    assert doc["protocol"]["name"] == "trt-engine"
    assert "transfers" in doc["protocol"]["not_applicable"]
    assert doc["environment"]["cpu"] and doc["runtime_info"] and len(doc["clocks"]) == 2
    assert {name: Path(path).exists() for name, path in doc["artifacts"].items()} == {"records": True, "log": True}
    assert not {"latency_ms", "h2d_ms", "d2h_ms", "enqueue_ms"} & set(doc)
    assert not any("gpu_compute" in key for key in doc)
    assert "measuring `m.engine.onnx`" in told.err


def test_the_text_names_the_device_first(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(place / "m.engine.onnx", *QUICK, json_too=False) == 0
    out = capsys.readouterr().out
    assert out.startswith("# device: cpu (")
    assert "GPU Compute" not in out
    assert "queries/s" in out


def test_a_model_is_built_first_and_that_is_said(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(place / "m.onnx", *QUICK, "--batch", "3") == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["batch"] == 3
    assert "is a model" in told.err


@pytest.mark.parametrize(
    ("typed", "warned"), [("200", True), ("45.5", True), ("200s", False), ("200ms", False), ("30", False)]
)
def test_a_long_warm_up_without_a_unit_draws_a_warning(
    typed: str, warned: bool, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(place / "m.engine.onnx", "--warmup", typed, "--dry-run") == 0
    told = capsys.readouterr()
    assert (f"`--warmup {typed}` is {typed} seconds" in told.err) is warned
    assert told.err.count("seconds; trtexec's") == warned


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_precision_the_engine_does_not_have_ends_with_6(
    place: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(place / "m.engine.onnx", *QUICK, "--precision", "fp16", *more) == 6
    told = capsys.readouterr().err
    assert "requested fp16, found fp32 100 %" in told and "hint: leave `--precision` out" in told
    assert bench(place / "m.engine.onnx", *QUICK, "--precision", "fp32", *more) == 0


def test_out_of_memory_in_a_child_is_exit_code_11(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--isolate", "--memory-limit", "30M", "--batch", "50000"]
    assert bench(place / "m.onnx", *QUICK, *args) == 11
    assert "out of memory within 30 MiB" in capsys.readouterr().err


TALKATIVE = """
from trt_engine import progress
from trt_engine.cli import main
progress.LOG_EVERY_S = 0.0  # as soon as something is measured, and not after ten seconds
main.main()
"""


@pytest.mark.parametrize("isolate", [[], ["--isolate"]])
def test_ctrl_c_leaves_a_partial_record_and_exit_code_130(place: Path, tmp_path: Path, isolate: list[str]) -> None:
    command = [sys.executable, "-c", TALKATIVE, "bench", str(place / "m.engine.onnx"), "--json", "--warmup", "0"]
    command += ["--duration", "600", "-o", str(tmp_path), *isolate]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:  # fmt: skip
        assert process.stderr is not None
        while "measuring: " not in process.stderr.readline():
            assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, err
    doc: dict[str, Any] = json.loads(out)
    assert doc["complete"] is False
    assert doc["queries"] > 0
    (line,) = (tmp_path / "records.jsonl").read_text().splitlines()
    assert json.loads(line)["complete"] is False
    assert "interrupted" in err and "Traceback" not in err


def test_a_log_is_read_and_answered_whatever_it_says(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "trtexec.log"
    log.write_text(
        "&&&& RUNNING TensorRT.trtexec [TensorRT v110100] [b106] # trtexec --onnx=m.onnx\n"
        "[08/27/2026-12:19:38] [E] Engine set up failed\n"
        "&&&& FAILED TensorRT.trtexec [TensorRT v110100] [b106] # trtexec --onnx=m.onnx\n"
    )
    assert bench("--parse-log", log) == 0
    doc = json.loads(capsys.readouterr().out)
    assert (doc["schema"], doc["status"], doc["trt_version"]) == ("trt-engine/bench-log", "failed", "11.1.0")
    assert (doc["throughput_qps"], doc["error_lines"]) == (None, 1)


def test_a_log_of_ours_says_what_the_record_says(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = place / "m.engine.onnx"
    bench(engine, *QUICK, "-o", tmp_path)
    record = json.loads(capsys.readouterr().out)
    assert (
        run(["bench", str(engine), "--duration", "50ms", "--warmup", "0", "--log-format", "trtexec", "--dumpProfile"])
        == 0
    )
    out, err = capsys.readouterr()
    assert re.search(r"Throughput: [0-9.]+ qps", out) and "`--dumpProfile`: `trt-engine profile" in err
    assert bench("--parse-log", tmp_path / "bench.log") == 0
    log = json.loads(capsys.readouterr().out)
    assert log["throughput_qps"] == pytest.approx(record["qps"], rel=1e-5)
    assert log["compute_ms"]["p99"] == pytest.approx(record["compute_ms"]["p99"], rel=1e-5)
    assert log["gpu_compute_ms"] is None

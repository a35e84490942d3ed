"""The command: what it prints and writes, its exit codes, Ctrl-C, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

import trt_engine as te
from load_testing.v2_server import V2Server
from onnx_models import conv_net
from trt_engine.cli.main import run
from trt_engine.reporting.run_records import RunRecords

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
BRIEF = ("--warmup", "0s", "--duration", "200ms")


@pytest.fixture
def server():
    with V2Server() as server:
        yield server


def document(capsys: pytest.CaptureFixture[str]) -> dict:
    found = json.loads(capsys.readouterr().out)
    name = found["schema"].removeprefix("trt-engine/")
    jsonschema.validate(found, json.loads((SCHEMAS / f"{name}.json").read_text()))
    return found


def test_the_text_has_rate_latency_and_failures(server: V2Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["loadtest", server.url, *BRIEF, "--concurrency", "2", "--percentile", "50,99.5"]) == 0
    text = capsys.readouterr().out
    for part in (
        f"target:    {server.url}/v2/models/net (small 7)", "closed loop, 2 in flight", "requests/s", "p99.5 ", " 0 failed",
    ):  # fmt: skip
        assert part in text


def test_the_document_has_every_sample(server: V2Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["loadtest", server.url, *BRIEF, "--rate", "200", "--arrivals", "constant", "-o", str(tmp_path), "--json"]
    assert run(args) == 0
    found = document(capsys)
    assert found["figures"]["requests"] == len(found["latency_ms"]) == len(found["sent_s"]) == 40
    assert found["artifacts"]["records"] == str(tmp_path / "loadtest.jsonl") and found["lag_ms"]["median"] >= 0
    (record,) = RunRecords.open(tmp_path).loads
    assert list(record.latency_ms) == found["latency_ms"]


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--fail-if", "p99:10s"], 0),
        (["--fail-if", "p99:1us"], 8),
        (["--fail-if", "rate:1e"], 2),
        (["--rate", "5", "--replay", "x"], 2),
        (["--model", "absent"], 2),
        (["--find-rate", "max:1us", "--rate", "200"], 12),
    ],
)
def test_exit_codes(server: V2Server, args: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["loadtest", server.url, *BRIEF, *args]) == code
    out = capsys.readouterr().out
    assert ("requests/s" in out) is (code in (0, 8, 12)), "a gate fails after the result is printed"


def test_the_report_shows_load_tests(
    server: V2Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trt_engine.verbs.loadtest.run.MAX_STEPS", 4)  # rates that a busy machine keeps, too
    te.loadtest(server.url, warmup_s=0.0, duration_s=0.2, out=tmp_path)
    te.loadtest(server.url, find_rate="p99:10s", rate=50, warmup_s=0.0, duration_s=0.5, out=tmp_path)
    run_records = RunRecords.open(tmp_path)
    assert [bool(record.steps) for record in run_records.loads] == [False, True]  # the steps are in the result
    page = (tmp_path / "report.html").read_text()
    for part in ("Load tests", "Rates tried", "Latency over time", "Requests sent from"):
        assert part in page
    assert "no GPU figures" not in page
    text = te.report(tmp_path)
    assert "closed loop, 1 in flight" in text and "highest that keeps p99:10000ms" in text
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["measurements"][0]["engine"] == "net"
    archive = tmp_path / "run.tar.gz"
    assert run(["pack", str(tmp_path), "-o", str(archive)]) == 0
    assert "load test" in te.report(archive)


def test_a_damaged_record_is_named(server: V2Server, tmp_path: Path) -> None:
    te.loadtest(server.url, warmup_s=0.0, duration_s=0.05, out=tmp_path)
    records = tmp_path / "loadtest.jsonl"
    whole = json.loads(records.read_text())
    records.write_text(json.dumps(whole | {"latency_ms": [-1.0] * len(whole["latency_ms"])}) + "\n" + json.dumps(whole))
    found = RunRecords.open(tmp_path)
    assert len(found.loads) == 1 and "times that no clock gives" in found.skipped[0]
    records.write_text("{}\n" + json.dumps(whole))
    with pytest.raises(te.TrtEngineError, match=r"line 1 of .*loadtest\.jsonl` is not a measurement"):
        RunRecords.open(tmp_path)


def test_a_terminal_has_a_live_line() -> None:
    master, slave = os.openpty()
    with V2Server() as server:
        child = subprocess.Popen(
            [sys.executable, "-m", "trt_engine", "loadtest", server.url, "--duration", "1200ms", "--warmup", "0s"],
            stdout=subprocess.DEVNULL, stderr=slave, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"},
        )  # fmt: skip
        os.close(slave)
        shown = b""
        while True:
            try:
                part = os.read(master, 4096)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            shown += part
        assert child.wait() == 0
    os.close(master)
    text = shown.decode()
    assert "\r\x1b[Kload: " in text and "requests/s, p50 " in text and text.rstrip("\r\n").endswith("\x1b[K")


def test_a_dry_run_sends_nothing(server: V2Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    args = ["loadtest", server.url, "--dry-run", "--json", "-o", str(tmp_path / "out")]
    assert run([*args, "--rate", "5"]) == 0
    found = document(capsys)
    assert "Poisson arrivals at 5 requests/s" in found["does"] and found["settings"]["request_bytes"] > 0
    assert run(["loadtest", server.url, "--dry-run", "--find-rate", "p99:9ms"]) == 0
    assert "search for the highest rate within p99:9ms" in capsys.readouterr().out
    model = conv_net(tmp_path / "net.onnx")
    assert run(["loadtest", str(model), "--dry-run"]) == 0
    assert f"would build the engine of {model}" in capsys.readouterr().out
    assert not server.requests and not (tmp_path / "out").exists()

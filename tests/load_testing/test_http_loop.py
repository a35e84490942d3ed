"""Load over HTTP on a real server: what is sent, what is counted, what arriving requests see of a server that stops."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import trt_engine as te
from load_testing.v2_server import CERTIFICATE, METADATA, Request, V2Server, answer
from patience import until
from trt_engine.errors import (
    DeadlineExpired,
    EngineError,
    Overloaded,
    SetupError,
    TrtEngineError,
    UsageError,
)
from trt_engine.records.loadtest import LoadtestRecord
from trt_engine.verbs.loadtest.generator import arrival_times

BRIEF = {"warmup_s": 0.0, "duration_s": 0.1}


def test_a_closed_loop_keeps_its_requests_in_flight_on_kept_connections() -> None:
    with V2Server() as server:
        record = te.loadtest(server.url, concurrency=3, warmup_s=0.0, duration_s=1.0)
    assert len(server.requests) == record.requests + record.warmup_requests > 3
    assert server.connections == 3 + 4  # and one for each question: index, server, model; one to find the address
    assert record.errors == {} and record.complete and record.loop == "closed" and record.rate is None
    assert (record.model, record.server, record.version) == ("net", "small 7", "1")
    assert record.runtime_info == {"platform": "onnxruntime_onnx", "provider": "cpu"}
    assert all(value > 0 for value in record.latency_ms) and list(record.sent_s) == sorted(record.sent_s)
    assert record.requests_per_s == pytest.approx(record.requests / record.wall_s)


def test_the_binary_request_holds_the_inputs() -> None:
    with V2Server() as server:
        te.loadtest(server.url, batch=2, **BRIEF)
    request = server.requests[0]
    size = int(request.headers["inference-header-content-length"])
    head = json.loads(request.body[:size])
    assert head["parameters"] == {"binary_data_output": True}
    assert head["inputs"] == [
        {"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}
    ]
    values = np.frombuffer(request.body[size:], "<f4")
    assert values.shape == (8,) and ((values >= 0) & (values < 1)).all()
    assert all(one.body == request.body for one in server.requests)


def test_a_server_without_the_binary_extension_gets_json(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(8, dtype=np.float32).reshape(2, 4))
    with V2Server(extensions=()) as server:
        record = te.loadtest(
            f"{server.url}/v2/models/net/versions/1", inputs=tmp_path / "x.npy", deadline_ms=250, **BRIEF
        )
    assert json.loads(server.requests[0].body) == {
        "inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [0, 1, 2, 3, 4, 5, 6, 7]}],
        "parameters": {"timeout": 250_000},
    }
    assert server.requests[0].path == "/v2/models/net/versions/1/infer"
    assert (record.inputs, record.batch, record.version) == ("x.npy", 2, "1")


async def _chunked(request: Request) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


async def _closing(request: Request) -> bytes:
    return answer(b"x", "200 OK", "connection: close")


async def _large(request: Request) -> bytes:
    return answer(b"y" * 300_000)


async def _numbered(request: Request) -> bytes:
    return answer(b"z" * (request.number % 50), "200 OK", f"x-request: {request.number}")


@pytest.mark.parametrize("on_infer", [_chunked, _closing, _large, _numbered])
@pytest.mark.parametrize("rate", [None, 200.0])
def test_answers_of_every_framing_are_counted_once(on_infer, rate: float | None) -> None:
    with V2Server(on_infer=on_infer) as server:
        record = te.loadtest(server.url, rate=rate, **({} if rate else {"concurrency": 2}), **BRIEF)
    assert record.requests == len(server.requests) and not record.errors


@pytest.mark.parametrize("rate", [None, 100.0])
def test_tls_with_a_trusted_certificate(rate: float | None) -> None:
    with V2Server(tls=True, on_infer=_large) as server:
        record = te.loadtest(server.url, ca_file=CERTIFICATE, rate=rate, **BRIEF)
        assert record.requests == len(server.requests) > 0 and not record.errors
        with pytest.raises(SetupError, match="certificate"):
            te.loadtest(server.url, **BRIEF)


def test_a_token_goes_with_every_request_and_into_no_record(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with V2Server(token="s3cret") as server:
        record = te.loadtest(server.url, token_file=tmp_path / "token", out=tmp_path / "out", **BRIEF)
        with pytest.raises(UsageError, match="401") as caught:
            te.loadtest(server.url, **BRIEF)
    assert "--token-file" in str(caught.value.hint) and record.requests
    assert all(b"s3cret" not in file.read_bytes() for file in (tmp_path / "out").iterdir())


# -------------------------------------------------------------------------------------------------- open loop


def test_an_open_loop_sends_at_its_rate_however_long_answers_take() -> None:
    async def slow(request: Request) -> bytes:
        await asyncio.sleep(0.15)
        return answer()

    with V2Server(on_infer=slow) as server:
        record = te.loadtest(server.url, rate=100, arrivals="constant", warmup_s=0.0, duration_s=0.4)
    assert record.requests == len(server.requests) == 40 and record.loop == "open"
    assert np.diff(record.sent_s) == pytest.approx(0.01)
    assert min(record.latency_ms) >= 150 and record.lag_ms is not None


def stalling(at: int, stall_s: float):
    """A server that stops as a whole before its answer number `at`."""

    async def on_infer(request: Request) -> bytes:
        if request.number == at:
            time.sleep(stall_s)
        return answer()

    return on_infer


def test_a_server_that_pauses_for_a_second_shows_it_in_p99() -> None:
    """Requests that arrive in the pause wait for its end: of 150, the first waits a second, the others less."""
    with V2Server(on_infer=stalling(20, 1.0)) as server:
        record = te.loadtest(server.url, rate=100, arrivals="constant", warmup_s=0.0, duration_s=1.5)
    assert record.requests == 150 and not record.errors
    percentile = record.latency_percentile(99)
    assert percentile is not None and percentile >= 950
    assert sum(value >= 500 for value in record.latency_ms) >= 50  # half of the second


def test_a_closed_loop_says_that_a_pause_is_missing_from_its_percentiles() -> None:
    with V2Server(on_infer=stalling(5, 2.0)) as server:
        record = te.loadtest(server.url, warmup_s=0.0, duration_s=1.0)
    assert max(record.latency_ms) >= 2000
    assert any("a closed loop sends nothing meanwhile" in text for text in record.warnings)


@pytest.mark.slow
def test_only_a_server_that_answers_less_than_was_sent_does_not_keep_up() -> None:
    with V2Server() as server:
        settings = {"rate": 10.0, "duration_s": 1.0, "warmup_s": 0.0}
        few = next(seed for seed in range(99) if 3 < arrival_times("poisson", 10, 1, seed=seed).size < 8)
        record = te.loadtest(server.url, seed=few, **settings)  # type: ignore[arg-type]
        assert record.requests < 8 and not any("keep up" in text for text in record.warnings)
        server.on_infer = lambda request: asyncio.sleep(2.0, answer())
        record = te.loadtest(server.url, **settings)  # type: ignore[arg-type]
        assert any("keep up" in text for text in record.warnings)


@pytest.mark.slow
def test_a_stopped_process_shows_in_p99() -> None:
    """It stops itself before an answer, however long the test took to begin."""
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("v2_server.py")), "100"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        found: list[LoadtestRecord] = []
        test = threading.Thread(
            target=lambda: found.append(te.loadtest(url, rate=200, arrivals="constant", warmup_s=0.2, duration_s=3.0))
        )
        test.start()
        until(lambda: psutil.Process(server.pid).status() == psutil.STATUS_STOPPED, "the server has stopped")
        time.sleep(1.0)
        server.send_signal(signal.SIGCONT)
        test.join()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()  # type: ignore[union-attr]
    assert found[0].requests == 600 and not found[0].errors
    assert found[0].latency_percentile(99) >= 900  # type: ignore[operator]


def test_a_recording_is_sent_at_its_times(tmp_path: Path) -> None:
    (tmp_path / "times.txt").write_text("10\n10.05\n10.05\n10.2\n")
    with V2Server() as server:
        record = te.loadtest(server.url, replay=tmp_path / "times.txt")
        again = te.loadtest(server.url, replay=tmp_path / "times.txt", duration_s=0.1)
    assert record.sent_s == (0.0, 0.05, 0.05, 0.2) and again.sent_s == (0.0, 0.05, 0.05)
    assert record.load == "arrivals of times.txt"


# -------------------------------------------------------------------------------------------------- failures


def failing(every: int, raw: bytes | None):
    async def on_infer(request: Request) -> bytes | None:
        return raw if request.number % every == 1 else answer()

    return on_infer


@pytest.mark.parametrize(
    ("raw", "kind", "text"),
    [
        (answer(b'{"error": "queue is full"}', "503 Service Unavailable"), "status 503", "queue is full"),
        (answer(b"no", "400 Bad Request", "connection: close"), "status 400", "no"),
        (None, "connection", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "connection", "closed the connection after"),
        (b"SMTP ready\r\n", "connection", "expected the head of a response"),
    ],
)
@pytest.mark.parametrize("rate", [None, 200.0])
def test_failures_are_counted_by_kind_beside_the_answers(raw, kind: str, text: str, rate: float | None) -> None:
    duration_s = 0.1 if rate else 1.0  # a closed loop has to come to its second request
    with V2Server(on_infer=failing(5, raw)) as server:
        record = te.loadtest(server.url, rate=rate, warmup_s=0.0, duration_s=duration_s)
    assert set(record.errors) == {kind} and text in record.error_messages[kind]
    assert record.requests + record.failed == len(server.requests)
    assert record.failed == len([one for one in server.requests if one.number % 5 == 1])
    assert any(text.startswith(f"{record.failed} of ") for text in record.warnings)


@pytest.mark.parametrize("rate", [None, 50.0])
def test_an_answer_that_does_not_come_is_a_timeout(rate: float | None) -> None:
    async def silent(request: Request) -> bytes:
        await asyncio.sleep(60)
        return answer()

    with V2Server(on_infer=silent) as server, pytest.raises(DeadlineExpired) as caught:
        te.loadtest(server.url, rate=rate, timeout_s=0.1, **BRIEF)
    assert "timeout" in caught.value.message


def test_late_answers_are_counted_and_gated() -> None:
    async def late(request: Request) -> bytes:
        await asyncio.sleep(0.03)
        return answer()

    with V2Server(on_infer=late) as server:
        record = te.loadtest(server.url, deadline_ms=1, fail_if=["late:100%", "errors:0%"], **BRIEF)
        assert record.late == record.requests > 0 and not record.errors
        assert [gate.passed for gate in record.gates] == [True, True]
        with pytest.raises(te.TrtEngineError, match="late:50%"):
            te.loadtest(server.url, deadline_ms=1, fail_if=["late:50%"], **BRIEF)


@pytest.mark.parametrize(
    ("status", "error"),
    [("503 Service Unavailable", Overloaded), ("400 Bad Request", UsageError), ("500 Internal Error", SetupError)],
)
def test_a_test_without_one_answer_is_the_error_of_its_failures(tmp_path: Path, status: str, error: type) -> None:
    with V2Server(on_infer=failing(1, None)) as server:
        server.on_infer = lambda request: asyncio.sleep(0, answer(b"why", status))
        with pytest.raises(error) as caught:
            te.loadtest(server.url, out=tmp_path, **BRIEF)
    assert type(caught.value) is error and "why" in caught.value.message
    assert (tmp_path / "loadtest.jsonl").read_text().count("\n") == 1  # written all the same


# -------------------------------------------------------------------------------------------------- before it starts


def test_no_server_is_an_error_of_the_setup() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens
        with pytest.raises(SetupError, match=r"no answer from 127\.0\.0\.1"):
            te.loadtest(f"http://127.0.0.1:{taken.getsockname()[1]}", model="net")


def test_a_model_is_chosen_only_where_the_server_has_one() -> None:
    with V2Server(models=("net", "other")) as server:
        with pytest.raises(UsageError, match="has 2 models") as caught:
            te.loadtest(server.url)
        assert "`net`, `other`" in str(caught.value.hint)
        with pytest.raises(UsageError, match="404"):
            te.loadtest(server.url, model="nothing")
        assert te.loadtest(server.url, model="net", **BRIEF).model == "net"


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"name": "net"},
        {"name": "net", "inputs": [{"name": "x"}]},
        [],
        METADATA | {"inputs": [{"name": "x", "datatype": "FP1", "shape": [1]}]},
    ],
)
def test_a_server_of_another_protocol_is_named(metadata) -> None:
    with V2Server(metadata=metadata) as server, pytest.raises(EngineError):
        te.loadtest(server.url)


def test_an_open_dimension_is_asked_for_and_given() -> None:
    metadata = METADATA | {"inputs": [{"name": "x", "datatype": "FP16", "shape": [-1, -1]}]}
    with V2Server(metadata=metadata) as server:
        with pytest.raises(te.TrtEngineError, match="dynamic dimensions must be given"):
            te.loadtest(server.url)
        record = te.loadtest(server.url, shapes="x:3x5", **BRIEF)
        assert record.shapes == {"x": (3, 5)} and record.batch == 3
        with pytest.raises(UsageError, match="JSON does not have"):
            te.loadtest(server.url, shapes="x:3x5", binary=False)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rate": 5, "concurrency": 2}, "two kinds of load"),
        ({"find_rate": "p99:5ms", "replay": "x"}, "chooses the rate itself"),
        ({"processes": 3, "concurrency": 2}, "3 processes for 2"),
        ({"device": "cpu"}, "is for an engine"),
        ({"precision": "fp16"}, "is for an engine"),
        ({"rate": 0}, "expected more than 0"),
        ({"ratee": 5}, "no argument `ratee`"),
        ({"fail_if": "fast"}, "cannot read the rule"),
    ],
)
def test_settings_that_make_no_load_are_refused_before_anything_is_sent(settings: dict, words: str) -> None:
    with V2Server() as server, pytest.raises(UsageError, match=words):
        te.loadtest(server.url, **settings)
    assert not server.requests


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"concurrency": 2**32}, "--concurrency"), ({"rate": 5, "connections": 2**33, "processes": 2}, "--connections")],
)
def test_more_connections_than_open_files_are_refused_before_anything_is_sent(settings: dict, flag: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with V2Server() as server, pytest.raises(UsageError) as caught:
        te.loadtest(server.url, **settings)
    assert not server.connections and resource.getrlimit(resource.RLIMIT_NOFILE) == limits
    assert f"{2**32} connections of a process need" in caught.value.message
    assert f"the limit is {limits[1]} (hard; soft: {limits[0]})" in caught.value.message
    assert caught.value.hint is not None and f"`{flag} " in caught.value.hint and "ulimit -n" in caught.value.hint


@pytest.mark.parametrize("processes", [1, 2])
def test_the_soft_limit_of_open_files_is_raised_while_it_is_needed(processes: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = len([*Path("/proc/self/fd").iterdir()]) + 100
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        with V2Server() as server:
            record = te.loadtest(
                server.url, concurrency=(low + 50) * processes, processes=processes, warmup_s=0.0, duration_s=1.0
            )
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (low, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert record.requests and not record.errors and server.connections > (low + 50) * processes


@pytest.mark.parametrize(
    "settings", [{"concurrency": 4, "processes": 2}, {"rate": 300.0, "processes": 2, "arrivals": "constant"}]
)
def test_several_processes_share_the_load(settings: dict) -> None:
    with V2Server() as server:
        record = te.loadtest(server.url, warmup_s=0.1, duration_s=0.4, **settings)
    assert record.requests + record.warmup_requests == len(server.requests) and not record.errors
    assert list(record.sent_s) == sorted(record.sent_s) and record.processes == 2
    if "rate" in settings:
        assert record.requests == 120 and np.diff(record.sent_s) == pytest.approx(1 / 300, abs=1e-5)


def test_what_fails_in_a_process_is_raised_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with V2Server() as server:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(
            "trt_engine.verbs.loadtest.subjects.Path.write_bytes", lambda self, data: None, raising=False
        )
        with pytest.raises(TrtEngineError):
            te.loadtest(server.url, concurrency=2, processes=2, **BRIEF)


def test_progress_tells_the_rate_and_latency_of_the_moment() -> None:
    heard: list[te.Progress] = []
    with V2Server() as server:
        te.loadtest(server.url, warmup_s=0.0, duration_s=1.2, progress=heard.append)
    counted = [one for one in heard if one.done is not None]
    assert counted and counted[-1].unit == "s" and counted[-1].total == pytest.approx(1.2)
    assert "requests/s, p50" in counted[-1].text
    assert os.linesep not in counted[-1].text


def test_a_large_request_arrives_whole() -> None:
    metadata = METADATA | {"inputs": [{"name": "x", "datatype": "UINT8", "shape": [-1, 4_000_000]}]}
    with V2Server(metadata=metadata) as server:
        record = te.loadtest(server.url, concurrency=2, **BRIEF)
    assert record.requests and not record.errors
    assert {len(one.body) for one in server.requests} == {len(server.requests[0].body)}
    assert len(server.requests[0].body) > 4_000_000


def test_a_server_that_goes_away_is_counted_as_refused() -> None:
    with V2Server(stop_after=4) as server:
        record = te.loadtest(server.url, warmup_s=0.0, duration_s=1.0)
    assert record.requests == 4 and record.errors["refused"] >= 1
    assert record.failed < 50, "it tries again after a pause"

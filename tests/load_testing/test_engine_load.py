"""Load on an engine in this process, and the threads and futures that make it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import trt_engine as te
from onnx_models import conv_net
from trt_engine.errors import CapacityError, Overloaded, UsageError
from trt_engine.verbs.loadtest.generator import LoadWindow, SampleArrays, Samples
from trt_engine.verbs.loadtest.threaded_loop import FutureLoop, RequestFailed, ThreadedLoop

BRIEF = {"warmup_s": 0.0, "duration_s": 0.15}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return conv_net(tmp_path_factory.mktemp("model") / "net.onnx")


def test_an_engine_is_loaded_by_threads_and_one_that_joins_by_futures(model: Path) -> None:
    record = te.loadtest(model, concurrency=2, contexts=2, **BRIEF)
    assert record.requests > 2 and not record.errors and record.interface == "engine"
    assert record.server == "onnxruntime" and record.runtime_info and record.request_bytes > 0
    engine = te.build(model, batch=(1, 2, 8))
    joined = te.loadtest(
        engine, concurrency=16, deadline_ms=6e4, runtime=te.RuntimeConfig(batching=te.Batching()), **BRIEF
    )
    assert joined.requests > 16 and not joined.errors
    again = te.loadtest(engine, rate=100, arrivals="constant", **BRIEF)
    assert again.requests == 15 and again.loop == "open"


def test_the_highest_rate_is_found_and_every_step_is_written(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trt_engine.verbs.loadtest.run.MAX_STEPS", 4)  # rates that a busy machine keeps, too
    record = te.loadtest(model, find_rate="max:10s", rate=50, duration_s=0.5, warmup_s=0.0, out=tmp_path)
    assert record.bound == "p100:10000ms" and record.steps and record.complete
    best = max(step.rate for step in record.steps if step.passed)
    assert record.rate == best
    assert (tmp_path / "loadtest.jsonl").read_text().count("\n") == len(record.steps) + 1
    with pytest.raises(CapacityError, match="no rate keeps"):
        te.loadtest(model, find_rate="max:1us", rate=200, duration_s=0.2, warmup_s=0.0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"processes": 2, "concurrency": 2}, "`--processes` is for a server"),
        ({"model": "x"}, "`--model` is for a server"),
        ({"binary": True}, "`--binary` is for a server"),
        ({"token_file": "x"}, "`--token-file` is for a server"),
    ],
)
def test_settings_of_a_server_do_not_go_with_an_engine(model: Path, settings: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        te.loadtest(model, **settings)


def window(duration_s: float) -> LoadWindow:
    return LoadWindow.beginning(time.perf_counter_ns(), 0.0, duration_s)


def future_loop(call: Callable[[], None], *, threads: int, timeout_s: float) -> FutureLoop:
    pool = ThreadPoolExecutor(threads)
    return FutureLoop(lambda: pool.submit(call), limit=threads, timeout_s=timeout_s)


either = pytest.mark.parametrize("kind", [ThreadedLoop, future_loop])


@either
def test_a_request_waits_for_a_place_and_its_wait_counts(kind: Any) -> None:
    loop = kind(lambda: time.sleep(0.05), threads=1, timeout_s=5.0)
    start = time.perf_counter_ns()
    loop.run(LoadWindow.beginning(start, 0.0, 0.1), [start] * 4, lambda *_: None)
    found = loop.collect()
    latency_ms = (found.ends - found.intended) / 1e6
    assert len(latency_ms) == 4 and latency_ms.max() >= 200 and sorted(latency_ms)[0] >= 50


@either
def test_a_request_that_waits_too_long_is_given_up(kind: Any) -> None:
    loop = kind(lambda: None, threads=1, timeout_s=60.0)
    start = time.perf_counter_ns()
    loop.run(LoadWindow.beginning(start, 0.0, 0.1), [start - round(100e9), start], lambda *_: None)
    assert len(loop.collect().ends) == 1 and loop.collect().count_errors() == {"timeout": 1}


@either
def test_what_a_call_raises_unexpectedly_ends_the_test(kind: Any) -> None:
    def call() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        kind(call, threads=2, timeout_s=1.0).run(window(60.0), None, lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "error", "name"),
    [(ThreadedLoop, RequestFailed("refused", "away"), "refused"), (future_loop, Overloaded("full"), "Overloaded")],
)
def test_a_closed_loop_pauses_after_a_failure(kind: Any, error: Exception, name: str) -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        raise error

    loop = kind(call, threads=1, timeout_s=1.0)
    loop.run(window(1.0), None, lambda *_: None)
    assert 1 <= len(calls) <= 21 and loop.collect().count_errors() == {name: len(calls)}


@either
def test_an_interruption_leaves_the_samples_and_no_thread(kind: Any) -> None:
    def tick(now: int, *samples: Samples) -> None:
        if any(len(part.ends) for part in samples):
            raise KeyboardInterrupt

    loop = kind(lambda: time.sleep(0.01), threads=3, timeout_s=1.0)
    with pytest.raises(KeyboardInterrupt):
        loop.run(window(60.0), None, tick)
    assert len(loop.collect().ends) > 0
    assert not [one for one in threading.enumerate() if one.name == "load"]


def test_samples_survive_the_way_from_a_process() -> None:
    samples = Samples()
    for at in (3, 1, 2):
        for times in (samples.intended, samples.sent, samples.ends):
            times.append(at)
    samples.fail(5, "timeout", "too late")
    samples.fail(0, "status 503")
    samples.request_waits = 4
    found = SampleArrays.join([SampleArrays.from_bytes(samples.pack().to_bytes()), Samples().pack()])
    assert found.intended.tolist() == found.ends.tolist() == [1, 2, 3]
    assert found.count_errors() == {"timeout": 1, "status 503": 1} and found.texts["timeout"] == "too late"
    later = found.since(2)
    assert later.intended.tolist() == [2, 3] and later.count_errors() == {"timeout": 1} and later.request_waits == 4

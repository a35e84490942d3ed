"""Limits on who may wait, on the backend that takes all callers at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from trt_engine.errors import DeadlineExpired, Overloaded

FEEDS = {"images": np.ones((2, 3, 8, 8), np.float32)}


@pytest.fixture
def engine(tmp_path: Path) -> te.Engine:
    return te.build(models.conv_net(tmp_path / "net.onnx"), batch=(1, 2, 4), store=te.Store(tmp_path / "store"))


@contextlib.contextmanager
def busy(runner: te.InferenceEngine) -> Iterator[None]:
    """Occupy the only context."""
    queue, taken, enough = runner.runner._wait_queue, threading.Event(), threading.Event()

    def keep() -> None:
        executor = queue.acquire(FEEDS)
        taken.set()
        enough.wait()
        queue.release(executor)

    keeper = threading.Thread(target=keep)
    keeper.start()
    taken.wait()
    try:
        yield
    finally:
        enough.set()
        keeper.join()


def test_callers_beyond_the_limit_are_refused_on_a_cpu_too(engine: te.Engine) -> None:
    with te.load(engine, contexts=1, max_waiting=1) as runner:
        with busy(runner):
            waiting = runner.infer_async(FEEDS)
            while not runner.stats().pool.waiting:
                threading.Event().wait(0.001)
            with pytest.raises(Overloaded, match="the limit is 1"):
                runner.infer(FEEDS)
        assert waiting.result()["scores"].shape == (2, 16)
        assert runner.stats().pool.rejected == 1


def test_who_waits_too_long_is_told_on_a_cpu_too(engine: te.Engine) -> None:
    with te.load(engine, wait_timeout_s=0.01) as runner:
        with busy(runner), pytest.raises(DeadlineExpired):
            runner.infer(FEEDS)
        assert runner.stats().pool.timeouts == 1


def test_with_limits_the_answers_are_those_without(engine: te.Engine) -> None:
    with te.load(engine) as free, te.load(engine, contexts=2, max_waiting=8) as limited:
        assert free.stats().pool is None and limited.stats().pool.contexts == 2
        for rows in (1, 4, 2):
            feeds = {"images": np.random.default_rng(rows).standard_normal((rows, 3, 8, 8), np.float32)}
            expected, found = free.infer(feeds), limited.infer(feeds)
            assert all(np.array_equal(expected[name], found[name]) for name in expected)


def test_graphs_where_there_are_none_are_said(engine: te.Engine) -> None:
    with te.load(engine, graphs=True) as runner, te.load(engine) as plain:
        assert runner.runtime_info["graphs"].startswith("none") and "graphs" not in plain.runtime_info

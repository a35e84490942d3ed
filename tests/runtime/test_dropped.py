"""What is dropped without `close` is freed: no thread keeps its owner alive."""

from __future__ import annotations

import ast
import gc
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from patience import HANG_S
from trt_engine.errors import DeadlineExpired
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.batcher import Batcher
from trt_engine.tensors import Signature, TensorSpec

SOURCES = Path(te.__file__).parent
ENDS_ITSELF = {
    "verbs/loadtest/threaded_loop.py",  # the call that starts them joins them
    "verbs/serve/execution.py",
    "video/pipeline.py",  # they end with the call that plays the clips
    "video/stream.py",
    "verbs/serve/server.py",  # a server runs until it is closed
}
FEEDS = {"x": np.ones((1, 3), np.float32)}


class Doubler(RunnerBase):
    width = 2

    def __init__(self) -> None:
        spec = TensorSpec("x", "float32", (-1, 3), ("batch", None))
        self.signature = Signature((spec,), (TensorSpec("y", "float32", (-1, 3), ("batch", None)),))

    def run(self, feeds: Any) -> dict[str, Any]:
        return {"y": feeds["x"] * 2}

    def close(self) -> None: ...


def threads_that_stay(make: Callable[[], object]) -> set[threading.Thread]:
    """Threads that `make` started and that run although its result was dropped."""
    before = set(threading.enumerate())
    made = make()
    started = set(threading.enumerate()) - before
    del made
    gc.collect()
    end_s = time.monotonic() + HANG_S
    while any(thread.is_alive() for thread in started) and time.monotonic() < end_s:
        time.sleep(0.01)
    assert started
    return {thread for thread in started if thread.is_alive()}


def used() -> Batcher:
    batcher = Batcher(Doubler(), max_batch=4)
    batcher.run(FEEDS)
    with pytest.raises(DeadlineExpired):  # its thread for rejections runs
        batcher.submit(FEEDS, deadline_ms=-1).result(HANG_S)
    return batcher


def test_a_batcher_that_is_dropped_frees_its_threads_with_a_warning() -> None:
    with pytest.warns(ResourceWarning, match="dropped without `close`"):
        assert not threads_that_stay(lambda: Batcher(Doubler(), max_batch=4))
    with pytest.warns(ResourceWarning, match="dropped without `close`"):
        assert not threads_that_stay(used)


def test_requests_of_a_dropped_batcher_are_answered() -> None:
    answers = []

    def ask() -> None:
        futures = [Batcher(Doubler(), max_batch=4, max_wait_ms=100).submit(FEEDS) for _ in range(3)]
        gc.collect()
        answers.extend(future.result(HANG_S)["y"][0, 0] for future in futures)

    with pytest.warns(ResourceWarning, match="dropped without `close`"):
        assert not threads_that_stay(lambda: ask() or object())
    assert answers == [2.0] * 3


def test_no_thread_runs_a_method_of_an_object_that_its_user_may_drop() -> None:
    found = set()
    for path in SOURCES.rglob("*.py"):
        source = path.read_text("utf-8")
        for node in ast.walk(ast.parse(source)) if "Thread(" in source else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread"):
                target = next((item.value for item in node.keywords if item.arg == "target"), None)
                if target is not None and ast.unparse(target).startswith("self."):
                    found.add(path.relative_to(SOURCES).as_posix())
    assert found <= ENDS_ITSELF

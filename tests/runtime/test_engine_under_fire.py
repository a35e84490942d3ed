"""What callers do to an `InferenceEngine` that nobody would: leave its threads, close it from a callback, press Ctrl-C."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patience import HANG_S
from trt_engine.runtime.context_pool import ContextPool
from trt_engine.runtime.inference_engine import InferenceEngine

Load = Callable[..., InferenceEngine]
X = np.ones((1, 3), np.float32)


def busy(engine: InferenceEngine) -> Callable[[], None]:
    """The only context is taken; the answer gives it back."""
    pool = engine.runner
    assert isinstance(pool, ContextPool)
    lane = pool._wait_queue.acquire({"x": X}, unlimited=True)
    return lambda: pool._wait_queue.release(lane)


def ends(call: Callable[[], object]) -> bool:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HANG_S)
    return not thread.is_alive()


def test_a_callback_that_ends_its_thread_costs_nobody_an_answer(load: Load, double: Path) -> None:
    engine = load(double, contexts=1)
    free = busy(engine)
    future = engine.infer_async(X)

    def leaves(_: Future[Any]) -> None:
        raise SystemExit

    future.add_done_callback(leaves)
    free()
    assert future.result(HANG_S)
    assert np.array_equal(engine.infer_async(X).result(HANG_S)["y"], 2 * X)


def test_a_callback_of_a_cancelled_future_may_close(load: Load, double: Path) -> None:
    engine = load(double, contexts=1)
    free = busy(engine)
    futures = [engine.infer_async(X) for _ in range(3)]
    for future in futures:
        future.add_done_callback(lambda _: engine.close() if threading.current_thread().name == "closes" else None)

    def closes() -> None:
        threading.current_thread().name = "closes"
        engine.close(cancel=True)

    threading.Timer(0.05, free).start()
    assert ends(closes)
    assert all(future.done() for future in futures)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # an interrupt in a finaliser is swallowed
@pytest.mark.skipif(sys.platform == "win32", reason="interrupts are sent by an interval timer")
def test_close_ends_though_callers_were_interrupted_between_any_two_steps(load: Load, double: Path) -> None:
    engine = load(double, contexts=1)
    engine._run = lambda feeds: {}  # no work: interrupts fall around it
    draw = random.Random(2)

    def raises(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, raises)
    try:
        for _ in range(400):
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(2e-6, 4e-4))
                gives_up_s = time.monotonic() + 1  # an interrupt in a finaliser is swallowed there
                while time.monotonic() < gives_up_s:
                    engine.infer({"x": X})
            except KeyboardInterrupt:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert ends(engine.close)

"""Ctrl-C in a caller, at any instant: whatever it had taken is there for the next one."""

from __future__ import annotations

import contextlib
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patience import until
from trt_engine.errors import DeadlineExpired, UsageError
from trt_engine.runtime.instance import InferenceEngine
from trt_engine.runtime.pool import ContextPool

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="interrupts are sent by an interval timer"),
    # one may fall into a finaliser, where Python swallows it and says so
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
X = np.ones((1, 3), np.float32)


@pytest.fixture
def interrupts() -> Iterator[Callable[[Callable[[], object], float], None]]:
    """`interrupts(call, seconds)`: call it again and again until a KeyboardInterrupt comes, that late."""

    def raises(*_: object) -> None:
        raise KeyboardInterrupt

    def interrupted(call: Callable[[], object], seconds: float) -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            gives_up_s = time.monotonic() + 1  # an interrupt in a finaliser is swallowed there
            while time.monotonic() < gives_up_s:
                call()
        except KeyboardInterrupt:
            pass

    before = signal.signal(signal.SIGALRM, raises)
    yield interrupted
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Quick:
    """A lane whose work takes no time, so that interrupts fall between the steps around it."""

    def key(self, feeds: object, size: int | None = None) -> int:
        return 0

    def ready(self, key: int) -> bool:
        return False

    def run(self, *_: object) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


def pool_of(engine: InferenceEngine) -> ContextPool:
    assert isinstance(engine.runner, ContextPool)
    return engine.runner


def quick(pool: ContextPool) -> None:
    """Put lanes that do nothing in the place of the pool's own."""
    for lane in pool._lanes:
        lane.close()
    pool._lanes = [Quick() for _ in pool._lanes]  # type: ignore[misc]
    pool._line.open(pool._lanes)


def test_no_context_is_lost_though_callers_are_interrupted_between_any_two_steps(
    load: Callable[..., InferenceEngine], double: Path, interrupts: Callable[..., None]
) -> None:
    engine = load(double, contexts=2)
    pool = pool_of(engine)
    quick(pool)
    draw = random.Random(0)
    for _ in range(400):
        interrupts(lambda: pool.run({"x": X}), draw.uniform(2e-6, 4e-4))
    pool.run({"x": X})
    assert pool.stats().busy == 0


def test_no_context_is_lost_though_callers_are_interrupted_in_line(
    load: Callable[..., InferenceEngine], double: Path, interrupts: Callable[..., None]
) -> None:
    engine = load(double, contexts=1)
    pool = pool_of(engine)
    quick(pool)
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            pool.run({"x": X})

    others = [threading.Thread(target=ask) for _ in range(2)]
    for thread in others:
        thread.start()
    draw = random.Random(1)
    for _ in range(200):
        interrupts(lambda: pool.run({"x": X}), draw.uniform(2e-6, 4e-3))
    over.set()
    pool.run({"x": X})
    for thread in others:
        thread.join(30)
        assert not thread.is_alive(), "it waits for a context nobody has"
    assert (pool.stats().busy, pool.stats().waiting) == (0, 0)


def test_close_finds_what_an_interrupted_caller_has_left_and_answers_who_waits_for_it(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1)
    pool = pool_of(engine)
    entered, over = threading.Event(), threading.Event()

    def loses() -> None:
        pool._line.enter({"x": X})  # and never gives it back
        entered.set()
        over.wait(30)

    taken = threading.Thread(target=loses)  # kept, or the next thread may have its number and with it the context
    taken.start()
    assert entered.wait(30)
    future: Future[Any] = engine.infer_async(X)
    ends_s = time.monotonic() + 30
    while not pool.stats().waiting:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    assert np.array_equal(future.result(30)["y"], 2 * X)
    closing.join(30)
    over.set()
    taken.join()
    assert not closing.is_alive()


def test_a_caller_inside_a_context_may_ask_again(load: Callable[..., InferenceEngine], double: Path) -> None:
    """What it holds already is not taken for lost: the second request gets a context of its own."""
    engine = load(double, contexts=2)
    pool = pool_of(engine)
    lanes, inner = pool._lanes, []
    first = lanes[0].run

    def asks(*given: Any) -> dict[str, Any]:
        lanes[0].run = first  # type: ignore[method-assign]
        assert pool.stats().busy == 1
        inner.append(pool.run({"x": 3 * X}))
        assert pool.stats().busy == 1
        return first(*given)

    lanes[0].run = asks  # type: ignore[method-assign]
    assert np.array_equal(engine.infer(X)["y"], 2 * X)
    assert np.array_equal(inner[0]["y"], 6 * X)
    assert pool.stats().busy == 0


def test_who_has_every_context_and_asks_for_another_is_told_so(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1)
    pool, said = pool_of(engine), []
    lane = pool._lanes[0]
    first = lane.run

    def asks(*given: Any) -> dict[str, Any]:
        with pytest.raises(UsageError, match="from inside its own inference") as caught:
            pool.run({"x": X})
        said.append(caught.value.hint)
        return first(*given)

    lane.run = asks  # type: ignore[method-assign]
    assert np.array_equal(engine.infer(X)["y"], 2 * X)
    assert "contexts" in said[0] and pool.stats().busy == 0


def test_a_wait_longer_than_the_platform_can_wait_is_as_long_as_it_can(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1, wait_timeout_s=1e12)
    pool = pool_of(engine)
    lane = pool._line.enter({"x": X}, patient=True)
    future = engine.infer_async(X)
    ends_s = time.monotonic() + 30
    while not (pool.stats().waiting or future.done()):
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    pool._line.leave(lane)
    assert np.array_equal(future.result(30)["y"], 2 * X)


class GivenBackMeanwhile(deque):
    """A queue whose first caller comes when the context is held, and stands in it when it has been given back."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__()
        self._leave: list[Callable[[], None]] = [leave]

    def append(self, caller: Any) -> None:
        if self._leave:
            self._leave.pop()()
        super().append(caller)


def test_a_context_given_back_just_before_a_caller_stands_in_line_is_his(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1)
    line = pool_of(engine)._line
    lane = line.enter({"x": X}, patient=True)
    line._callers = GivenBackMeanwhile(lambda: line.leave(lane))
    assert np.array_equal(engine.infer_async(X).result(30)["y"], 2 * X)
    assert (pool_of(engine).stats().busy, pool_of(engine).stats().waiting) == (0, 0)


class TakenMeanwhile(dict):
    """Who holds which context, where somebody else is quicker once."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self._others = [other]

    def setdefault(self, number: int, thread: int) -> int:
        if self._others:
            super().setdefault(number, self._others.pop())
        return super().setdefault(number, thread)


def test_of_two_who_see_a_context_free_one_gets_it_and_the_other_waits_for_it(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1)
    line = pool_of(engine)._line
    line._held = TakenMeanwhile(-1)  # no thread has this number
    future = engine.infer_async(X)
    until(lambda: pool_of(engine).stats().waiting == 1, "it waits")
    assert not future.done() and line._held == {0: -1}
    line.leave(pool_of(engine)._lanes[0])
    assert np.array_equal(future.result(30)["y"], 2 * X)


def test_a_context_taken_while_the_pool_closes_is_given_back(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1)
    pool = pool_of(engine)
    line = pool._line

    class ClosedMeanwhile(dict):
        def setdefault(self, number: int, thread: int) -> int:
            line._closed = True
            return super().setdefault(number, thread)

    line._held = ClosedMeanwhile()
    with pytest.raises(UsageError, match="closed"):
        pool.run({"x": X})
    assert line._held == {}
    pool.close()


class OfferedWhileTaken(dict):
    """Who holds which context, where a quicker one takes it while it is offered, and the one it was offered to gives up."""

    def __init__(self, offered: Callable[[int], bool], quicker: int, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._offered, self._quicker, self._meanwhile = offered, quicker, meanwhile

    def setdefault(self, number: int, thread: int) -> int:
        if self._offered(thread):
            super().setdefault(number, self._quicker)
            self._meanwhile()
        return super().setdefault(number, thread)


def test_who_runs_out_of_patience_while_he_is_offered_what_a_quicker_one_gets_is_told_so(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1, wait_timeout_s=0.05)
    pool = pool_of(engine)
    line, gone = pool._line, threading.Event()
    lane = line.enter({"x": X}, patient=True)
    mine = threading.get_ident()
    step_out = line._step_out

    def gives_up(caller: Any) -> bool:
        gone.set()
        return step_out(caller)

    line._step_out = gives_up  # type: ignore[method-assign]
    line._held = OfferedWhileTaken(lambda thread: thread != mine, -1, lambda: gone.wait(30) and None)
    line._held[0] = mine
    future = engine.infer_async(X)
    until(lambda: line._callers or gone.is_set(), "it stands in line")
    line.leave(lane)
    with pytest.raises(DeadlineExpired):
        future.result(30)
    assert line._held == {0: -1} and not line._callers
    line.leave(lane)
    assert np.array_equal(engine.infer(X)["y"], 2 * X)


def test_who_is_turned_away_as_his_patience_ends_is_told_that_it_is_closed(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1, wait_timeout_s=0.01)
    line = pool_of(engine)._line
    lane, step_out = line.enter({"x": X}, patient=True), line._step_out

    def turned_away_first(caller: Any) -> bool:
        line.turn_away()
        return step_out(caller)

    line._step_out = turned_away_first  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="closed before its turn"):
        engine.infer_async(X).result(30)
    line.leave(lane)


class InterruptedOnce(dict):
    """Who holds which context; Ctrl-C falls right behind one call."""

    armed = ""

    def _called(self, name: str, got: Any) -> Any:
        if self.armed == name:
            self.armed = ""
            raise KeyboardInterrupt
        return got

    def setdefault(self, *given: Any) -> Any:
        return self._called("setdefault", super().setdefault(*given))

    def get(self, *given: Any) -> Any:
        return self._called("get", super().get(*given))

    def pop(self, *given: Any) -> Any:
        return self._called("pop", super().pop(*given))


@pytest.mark.parametrize("call", ["setdefault", "get", "pop"])
def test_ctrl_c_while_a_context_is_handed_on_leaves_nobody_waiting_for_ever(
    load: Callable[..., InferenceEngine], double: Path, call: str
) -> None:
    engine = load(double, contexts=1)
    line = pool_of(engine)._line
    line._held = held = InterruptedOnce()
    lane = line.enter({"x": X}, patient=True)
    future = engine.infer_async(X)
    until(lambda: line._callers, "it stands in line")
    held.armed = call
    with contextlib.suppress(KeyboardInterrupt):
        line.leave(lane)
    assert np.array_equal(engine.infer(X)["y"], 2 * X)  # whoever comes next sees to those in line
    assert np.array_equal(future.result(30)["y"], 2 * X)
    assert not held


def test_who_lost_the_only_context_to_ctrl_c_may_warm_up(load: Callable[..., InferenceEngine], double: Path) -> None:
    engine = load(double, contexts=1)
    done: list[bool] = []

    def loses_and_warms() -> None:
        pool_of(engine)._line.enter({"x": X})  # and never gives it back
        engine.warmup()
        done.append(True)

    thread = threading.Thread(target=loses_and_warms, daemon=True)
    thread.start()
    thread.join(30)
    assert done, "it waits for itself"


def test_callers_turned_away_are_told_though_ctrl_c_falls_in_between(
    load: Callable[..., InferenceEngine], double: Path, interrupts: Callable[..., None]
) -> None:
    engine = load(double, contexts=1)
    line, draw = pool_of(engine)._line, random.Random(2)
    for _ in range(100):
        lane = line.enter({"x": X}, patient=True)
        futures = [engine.infer_async(X) for _ in range(2)]
        until(lambda: line._callers, "one stands in line", pause_s=0)
        interrupts(line.turn_away, draw.uniform(2e-6, 1e-4))
        line.turn_away()
        line.leave(lane)
        for future in futures:
            assert future.exception(30) is None or isinstance(future.exception(30), UsageError)
    assert (pool_of(engine).stats().busy, pool_of(engine).stats().waiting) == (0, 0)

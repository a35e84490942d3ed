"""Ctrl-C in a caller, at any instant: whatever it had taken is there for the next one."""

from __future__ import annotations

import dis
import itertools
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

import trt_engine
from patience import HANG_S
from trt_engine.errors import UsageError
from trt_engine.runtime.context_pool import ContextPool, Slot
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.runtime.prepared_context import PreparedContext

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
            while True:  # `while condition:` jumps back outside the `try` on Python 3.13
                call()
                if time.monotonic() >= gives_up_s:
                    break
        except KeyboardInterrupt:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, raises)
    yield interrupted
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class Quick:
    """An executor whose work takes no time, so that interrupts fall between the steps around it."""

    replayed = 0

    def key(self, feeds: object, size: int | None = None) -> int:
        return 0

    def is_prepared(self, key: int) -> bool:
        return False

    def run(self, *_: object) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


HARMLESS = {"runtime/batcher.py", "backends/trtexec/program.py"}
"""Files where such a jump leaves only an `except` that does not concern interrupts."""


def functions_of(code: CodeType) -> Iterator[CodeType]:
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from functions_of(item)


@pytest.mark.skipif(sys.version_info[:2] != (3, 13), reason="other versions cover the whole loop")
@pytest.mark.parametrize("part", ["runtime", "device", "backends", "benchmark"])
def test_an_interrupt_at_the_end_of_a_turn_of_a_loop_reaches_its_cleanup(part: str) -> None:
    """Python 3.13.0 leaves the jump back of `while condition` out of the `with` or `try` around the loop."""
    package, lost = Path(trt_engine.__file__).parent, list[str]()
    for file in sorted((package / part).rglob("*.py")):
        for code in functions_of(compile(file.read_text(), str(file), "exec")):
            covered = [range(entry.start, entry.end) for entry in dis.Bytecode(code).exception_entries]
            for before, step in itertools.pairwise(dis.get_instructions(code)):
                places = (before.offset, step.argval, step.offset) if step.opname == "JUMP_BACKWARD" else ()
                if [any(at in entry for entry in covered) for at in places] == [True, True, False]:
                    lost.append(f"{file.relative_to(package)}: {code.co_name}")
    assert [item for item in lost if item.partition(":")[0] not in HARMLESS] == []


def pool_of(engine: InferenceEngine) -> ContextPool:
    assert isinstance(engine.runner, ContextPool)
    return engine.runner


def quick(pool: ContextPool) -> None:
    """Put lanes that do nothing in the place of the pool's own."""
    for lane in pool._executors:
        lane.close()
    pool._executors = [Quick() for _ in pool._executors]  # type: ignore[misc]
    pool._wait_queue.open(pool._executors)


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


def test_close_finds_what_an_interrupted_caller_has_left_and_answers_who_waits_for_it(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1)
    pool = pool_of(engine)
    entered, over = threading.Event(), threading.Event()

    def loses() -> None:
        pool._wait_queue.acquire({"x": X})  # and never gives it back
        entered.set()
        over.wait(HANG_S)

    taken = threading.Thread(target=loses)  # kept, or the next thread may have its number and with it the context
    taken.start()
    assert entered.wait(HANG_S)
    future: Future[Any] = engine.infer_async(X)
    ends_s = time.monotonic() + HANG_S
    while not pool.stats().waiting:
        assert time.monotonic() < ends_s
        time.sleep(0.001)
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    assert np.array_equal(future.result(HANG_S)["y"], 2 * X)
    closing.join(HANG_S)
    over.set()
    taken.join()
    assert not closing.is_alive()


def test_a_caller_inside_a_context_may_ask_again(load: Callable[..., InferenceEngine], double: Path) -> None:
    """What it holds already is not taken for lost: the second request gets a context of its own."""
    engine = load(double, contexts=2)
    pool = pool_of(engine)
    lanes, inner = pool._executors, []
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
    lane = pool._executors[0]
    first = lane.run

    def asks(*given: Any) -> dict[str, Any]:
        with pytest.raises(UsageError, match="a nested inference needs a free context") as caught:
            pool.run({"x": X})
        said.append(caught.value.hint)
        return first(*given)

    lane.run = asks  # type: ignore[method-assign]
    assert np.array_equal(engine.infer(X)["y"], 2 * X)
    assert "contexts" in said[0] and pool.stats().busy == 0


def test_who_is_turned_away_as_his_patience_ends_is_told_that_it_is_closed(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1, wait_timeout_s=0.01)
    line = pool_of(engine)._wait_queue
    lane, step_out = line.acquire({"x": X}, unlimited=True), line._remove

    def turned_away_first(caller: Any) -> bool:
        line.reject_waiting()
        return step_out(caller)

    line._remove = turned_away_first  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="closed while the request waited"):
        engine.infer_async(X).result(HANG_S)
    line.release(lane)


def test_a_request_whose_context_was_closed_meanwhile_is_told_so(
    load: Callable[..., InferenceEngine], double: Path
) -> None:
    engine = load(double, contexts=1)
    pool = pool_of(engine)
    grant = pool._wait_queue.acquire

    def slow(*given: Any, **how: Any) -> Slot:
        slot = grant(*given, **how)
        pool.close()
        return slot

    pool._wait_queue.acquire = slow  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="closed"):
        pool.run({"x": X})


def test_an_interrupt_inside_a_capture_leaves_no_context_open(
    load: Callable[..., InferenceEngine], double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(double, contexts=1, graphs=True)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PreparedContext, "capture", interrupted)
        for _ in range(4):
            engine.infer(X)
    for _ in range(4):
        assert np.array_equal(engine.infer(X)["y"], 2 * X)
    assert pool_of(engine).stats().graphs.captured == 1
    engine.close()  # the session refuses to close with a context open

"""What `Batcher` promises of single requests: when a batch goes, who goes first, what is copied, what is refused."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from patience import HANG_S
from trt_engine.config.profiles import Profile, ShapeRange
from trt_engine.errors import DeadlineExpired, FeedError, Overloaded, TrtEngineError, UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.stats import Histogram
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.verbs.serve.execution import DirectQueue

X = TensorSpec("x", "float32", (-1, 3), ("batch", None))
Y = TensorSpec("y", "float32", (-1, 3), ("batch", None))


class Engine(RunnerBase):
    """A runner that doubles, keeps what it was given, and can be held."""

    def __init__(self, signature: Signature | None = None, width: int = 1) -> None:
        self.signature, self.width = signature or Signature((X,), (Y,)), width
        self.given: list[Any] = []
        self.entered, self.free = threading.Semaphore(0), threading.Event()
        self.free.set()

    def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        self.given.append(feeds["x"])
        self.entered.release()
        assert self.free.wait(HANG_S)
        self.gave = {"y": feeds["x"] * 2}
        return self.gave

    def close(self) -> None: ...


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Engine, Batcher]]]:
    made: list[tuple[Engine, Batcher]] = []

    def batched(signature: Signature | None = None, *, width: int = 1, **settings: Any) -> tuple[Engine, Batcher]:
        engine = Engine(signature, width)
        made.append((engine, Batcher(engine, **settings)))
        return made[-1]

    yield batched
    for engine, batcher in made:
        engine.free.set()
        batcher.close()


def rows(count: int, value: float = 1.0) -> dict[str, np.ndarray]:
    return {"x": np.full((count, 3), value, np.float32)}


def held(engine: Engine, batcher: Batcher) -> Future[Any]:
    """The engine is at work on one row, and stays there."""
    engine.free.clear()
    first = batcher.submit(rows(1, -5))
    assert engine.entered.acquire(timeout=HANG_S)
    return first


def test_rows_are_counted_not_requests(make: Callable[..., Any]) -> None:
    engine, batcher = make(max_batch=8, max_wait_ms=0)
    held(engine, batcher)
    asked = [batcher.submit(rows(count, count)) for count in (3, 4, 2, 6, 8)]
    engine.free.set()
    for count, future in zip((3, 4, 2, 6, 8), asked, strict=True):
        assert np.array_equal(future.result(HANG_S)["y"], 2 * rows(count, count)["x"])
    assert [len(x) for x in engine.given] == [1, 7, 8, 8]


def test_a_batch_of_one_is_neither_copied_nor_sliced(make: Callable[..., Any]) -> None:
    engine, batcher = make(max_batch=8, max_wait_ms=0)
    feeds = rows(3)
    outputs = batcher.run(feeds)
    assert engine.given[0] is feeds["x"]
    assert outputs["y"] is engine.gave["y"]


def test_the_wait_is_counted_from_arrival(make: Callable[..., Any]) -> None:
    """What has waited behind a long run waits no longer for company."""
    _, batcher = make(max_batch=8, max_wait_ms=60_000)
    now = [0.0]
    batcher._clock = lambda: now[0]
    late = batcher.submit(rows(1))
    with pytest.raises(TimeoutError):
        late.result(0.05)
    now[0] = 61.0
    batcher._inbox.put("look")
    assert late.result(HANG_S)["y"].shape == (1, 3)


def test_shapes_wait_in_queues_of_their_own(make: Callable[..., Any]) -> None:
    """A full batch of one shape goes though another shape is waiting for company."""
    wide = TensorSpec("x", "float32", (-1, -1), ("batch", "width"))
    _, batcher = make(
        Signature((wide,), (TensorSpec("y", "float32", (-1, -1), ("batch", "width")),)), max_batch=4, max_wait_ms=60_000
    )
    lonely = batcher.submit({"x": np.ones((1, 5), np.float32)})
    full = [batcher.submit(rows(2)) for _ in range(2)]
    assert all(future.result(HANG_S)["y"].shape == (2, 3) for future in full)
    assert not lonely.done()


def test_a_higher_priority_goes_first(make: Callable[..., Any]) -> None:
    engine, batcher = make(max_batch=2, max_wait_ms=0, clock=lambda: 0.0)  # whoever comes later has no time against it
    held(engine, batcher)
    asked = [batcher.submit(rows(2, number), priority=number) for number in range(3)]
    engine.free.set()
    for future in asked:
        future.result(HANG_S)
    assert [float(x[0, 0]) for x in engine.given] == [-5, 2, 1, 0]


def test_the_departed_are_dropped_first_and_make_room(make: Callable[..., Any]) -> None:
    engine, batcher = make(max_batch=4, max_wait_ms=0, max_rows_waiting=4)
    held(engine, batcher)
    gone, stays = batcher.submit(rows(2, 1)), batcher.submit(rows(2, 2))
    with pytest.raises(Overloaded, match=r"4 rows are waiting, .* limit of 4"):
        batcher.submit(rows(1))
    assert gone.cancel()
    last = batcher.submit(rows(2, 3))
    engine.free.set()
    assert stays.result(HANG_S) and last.result(HANG_S)
    assert [x[:, 0].tolist() for x in engine.given[1:]] == [[2, 2, 3, 3]]
    stats = batcher.stats()
    assert (stats.cancelled, stats.rejected, stats.answered) == (1, 1, 3)


def test_bytes_can_be_the_limit_and_what_is_larger_than_all_room_goes_alone(make: Callable[..., Any]) -> None:
    engine, batcher = make(max_batch=64, max_wait_ms=0, max_bytes_waiting=24)
    held(engine, batcher)
    large = batcher.submit(rows(10))
    with pytest.raises(Overloaded, match=r"120 bytes are waiting, .* limit of 24"):
        batcher.submit(rows(1))
    engine.free.set()
    assert large.result(HANG_S)["y"].shape == (10, 3)


def test_batches_are_filled_up_to_buckets_and_the_padding_is_counted(make: Callable[..., Any]) -> None:
    engine, batcher = make(max_batch=8, max_wait_ms=0, buckets=(4, 8))
    assert batcher.run(rows(3, 7))["y"].shape == (3, 3)
    assert engine.given[0].shape == (4, 3)
    assert (batcher.stats().padded_rows, batcher.stats().mean_batch) == (1, 3.0)


@pytest.mark.parametrize("output", [(), (3,), (1, 3)])
def test_an_engine_whose_outputs_are_not_rows_is_refused_before_anything_waits(output: tuple[int, ...]) -> None:
    engine = Engine(Signature((X,), (TensorSpec("y", "float32", output, (None,) * len(output)),)))
    with pytest.raises(UsageError, match="cannot be batched"):
        Batcher(engine)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batcher")]


def test_an_engine_that_gives_other_rows_than_it_should_fails_its_callers_with_an_error(
    make: Callable[..., Any],
) -> None:
    engine, batcher = make(max_batch=8, max_wait_ms=0)
    held(engine, batcher)
    asked = [batcher.submit(rows(1)) for _ in range(2)]
    engine.run = lambda feeds: {"y": feeds["x"][:1]}
    engine.free.set()
    for future in asked:
        future.result(HANG_S)  # alone each of them is right
    assert batcher.stats().retries == 1


def test_close_answers_what_waits_and_cancel_does_not(make: Callable[..., Any]) -> None:
    for cancel in (False, True):
        engine, batcher = make(max_batch=4, max_wait_ms=60_000)
        engine.free.clear()
        first = batcher.submit(rows(4))
        assert engine.entered.acquire(timeout=HANG_S)
        waits = batcher.submit(rows(1))
        engine.free.set()
        batcher.close(cancel=cancel)
        assert first.result(0)
        assert waits.cancelled() is cancel
        with pytest.raises(UsageError, match="closed"):
            batcher.submit(rows(1))


def test_a_fault_of_ours_is_told_and_the_batcher_goes_on(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, batcher = make(max_batch=4, max_wait_ms=0)
    take = batcher._queue.take_batch

    def fails(*_: object, **__: object) -> None:
        monkeypatch.setattr(batcher._queue, "take_batch", take)
        raise ZeroDivisionError

    monkeypatch.setattr(batcher._queue, "take_batch", fails)
    assert isinstance(batcher.submit(rows(1)).exception(HANG_S), TrtEngineError)
    assert batcher.submit(rows(1)).result(HANG_S)
    batcher.close()
    stats = batcher.stats()
    assert (stats.requests, stats.failed, stats.answered, stats.waiting) == (2, 1, 1, 0)


def test_a_run_that_waited_too_long_for_a_context_has_failed_and_runs_no_more(make: Callable[..., Any]) -> None:
    """`expired` is for requests that were not run; the counts still add up."""
    engine, batcher = make(max_batch=8, max_wait_ms=0)

    def no_context(_: object) -> None:
        raise DeadlineExpired("no context was free", hint="wait")

    engine.run = no_context
    with pytest.raises(DeadlineExpired):
        batcher.run(rows(1))
    stats = batcher.stats()
    assert (stats.failed, stats.expired, stats.running, stats.waiting) == (1, 0, 0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"priority": float("nan")}, {"priority": float("inf")}, {"priority": 10**400}, {"priority": "1"},
        {"priority": None}, {"deadline_ms": float("nan")}, {"deadline_ms": "5"}, {"deadline_ms": 10**400},
    ],
)  # fmt: skip
def test_priorities_and_deadlines_that_are_no_numbers_are_refused(make: Callable[..., Any], wrong: Any) -> None:
    _, batcher = make(max_batch=8, max_wait_ms=0)
    with pytest.raises(UsageError, match="expected numbers"):
        batcher.submit(rows(1), **wrong)
    assert batcher.stats().requests == 0
    assert batcher.submit(rows(1), deadline_ms=float("inf")).result(HANG_S)


def no_more_threads(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    start, started = threading.Thread.start, [0]

    def starts(thread: threading.Thread) -> None:
        if started[0] == after:
            raise RuntimeError("can't start new thread")
        started[0] += 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)


@pytest.mark.parametrize("make", [Batcher, partial(DirectQueue, max_waiting=1)], ids=["batcher", "direct"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_queue_without_its_threads_leaves_none(monkeypatch: pytest.MonkeyPatch, after: int, make: Any) -> None:
    before = set(threading.enumerate())
    no_more_threads(monkeypatch, after)
    with pytest.raises(TrtEngineError, match="threads"):
        make(Engine(width=3))
    assert set(threading.enumerate()) <= before


class Forgetful(Engine):
    """Keeps nothing of what it is given."""

    def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        self.entered.release()
        assert self.free.wait(HANG_S)
        return {"y": feeds["x"] * 2}


def test_arrays_are_their_callers_again_once_they_are_answered_or_cancelled() -> None:
    """Also while the futures are kept, and while others of the queue still wait."""
    engine = Forgetful()
    with Batcher(engine, max_batch=2, max_wait_ms=0) as batcher:
        engine.free.clear()
        first = batcher.submit(rows(2, 1))
        assert engine.entered.acquire(timeout=HANG_S)
        feeds = [rows(2, number) for number in range(3)]
        kept = [weakref.ref(one["x"]) for one in feeds]
        futures = [batcher.submit(one, deadline_ms=60_000) for one in feeds]
        requests = list(batcher._admission._requests.values())
        del feeds
        assert futures[1].cancel()
        assert [array() is None for array in kept] == [False, True, False]
        engine.free.set()
        assert first.result(HANG_S) and futures[0].result(HANG_S) and futures[2].result(HANG_S)
        assert [array() is None for array in kept] == [True, True, True]
        assert [request.feeds for request in requests] == [None] * 3


@pytest.mark.skipif(sys.platform == "win32", reason="the interrupt is sent by an interval timer")
def test_nobody_runs_what_an_interrupted_caller_was_waiting_for(make: Callable[..., Any]) -> None:
    engine, batcher = make(max_batch=1, max_wait_ms=0)
    held(engine, batcher)
    submit, heard = batcher.submit, []

    def raises(*_: object) -> None:
        heard.append(signal.setitimer(signal.ITIMER_REAL, 0))
        if len(heard) == 1:
            raise KeyboardInterrupt

    def watched(*given: Any) -> Future[Any]:
        future = submit(*given)
        result = future.result

        def waits(timeout: float | None = None) -> Any:
            # from here on it waits; again and again, for one that another thread takes wakes nobody
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            return result(timeout)

        future.result = waits  # type: ignore[method-assign]
        return future

    batcher.submit = watched
    before = signal.signal(signal.SIGALRM, raises)
    try:
        with pytest.raises(KeyboardInterrupt):
            batcher.run(rows(1, 7))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    engine.free.set()
    batcher.close()
    assert [float(x[0, 0]) for x in engine.given] == [-5]
    assert batcher.stats().cancelled == 1


def test_the_times_tell_the_median_and_the_longest() -> None:
    times = Histogram()
    for milliseconds in (9, 1, 1, 5, 5, 5, 2):
        times.add(milliseconds / 1e3)
    read = times.summary()
    assert (read.count, read.max_ms) == (7, pytest.approx(9))
    assert read.p50_ms == pytest.approx(5, rel=0.05)
    assert read.mean_ms == pytest.approx(4)


def test_fewer_rows_than_the_engine_takes_are_filled_up() -> None:
    engine = Engine()
    profile = Profile({"x": ShapeRange((4, 3), (4, 3), (8, 3))})
    with Batcher(engine, profiles=[profile], max_wait_ms=0) as batcher:
        assert batcher.run(rows(1))["y"].shape == (1, 3)
        assert batcher.batching.max_batch == 8
        with pytest.raises(FeedError, match="a request has 9 rows, the engine takes 8"):
            batcher.submit(rows(9))
    assert engine.given[0].shape == (4, 3)

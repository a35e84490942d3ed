"""Schedules nobody thought of: callers come, cancel, run out of time, the engine raises, everything is closed; at any point.

Each schedule runs on real threads over the fake device. Runs are let through one by one, and batchers read a clock that the
schedule moves, so that the same schedule means the same thing every time.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patience import HANG_S
from trt_engine.backends.fake.run import FakeContext, FakeSession
from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.device.fake import FakeDevice
from trt_engine.engine import Engine
from trt_engine.errors import DeadlineExpired, DeviceLost, MemoryExhausted, Overloaded, UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.context_pool import ContextPool
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.runtime.replicas import Replicas

BATCH = 6
POISON = np.float32(-1)

schedule = settings(max_examples=60, deadline=None, derandomize=True, database=None)


class Poisoned(RuntimeError):
    """What the engine raises for these rows, every time."""


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """y = x + x over rows of any width, as an engine of the fake backend."""
    import onnx
    from onnx import TensorProto, helper

    import trt_engine as te
    from trt_engine.store import Store

    folder = tmp_path_factory.mktemp("engine")
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "double",
        [value("x", TensorProto.FLOAT, ["batch", "width"])],
        [value("y", TensorProto.FLOAT, ["batch", "width"])],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), folder / "double.onnx"
    )
    return te.build(
        folder / "double.onnx",
        backend="fake",
        device="fake",
        profiles=(f"x:1x2,2x2,{BATCH}x4",),
        store=Store(folder / "store"),
    )


def session_over(engine: Engine, number: int = 0, memory_bytes: int = 1 << 20) -> FakeSession:
    import onnx

    from trt_engine.backends.fake.build import MAGIC

    proto = onnx.load_from_string(engine.path.read_bytes()[len(MAGIC) :])
    device = FakeDevice(number, memory_bytes=memory_bytes)
    return FakeSession(proto, engine.signature, engine.passport.profiles, device)


def pool_over(engine: Engine, number: int = 0, memory_bytes: int = 1 << 20, **config: Any) -> ContextPool:
    return ContextPool(session_over(engine, number, memory_bytes), engine.passport.profiles, RuntimeConfig(**config))


def feed(number: int, rows: int, width: int = 2) -> np.ndarray:
    """Rows that nobody else has."""
    return np.repeat(np.arange(number * 16, number * 16 + rows, dtype=np.float32)[:, None], width, axis=1)


def until(true: Callable[[], bool], what: str) -> None:
    ends_s = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < ends_s, f"never: {what}"
        time.sleep(0.0002)


class Gate:
    """Lets runs through one by one, or all."""

    def __init__(self) -> None:
        self._turns = threading.Semaphore(0)
        self._open = False

    def wait(self) -> None:
        if not self._open:
            assert self._turns.acquire(timeout=HANG_S)
            if self._open:
                self._turns.release()

    def let_through(self) -> None:
        self._turns.release()

    def open(self) -> None:
        self._open = True
        self._turns.release()


class Watched(RunnerBase):
    """A Runner over a pool: waits at a gate, notes every run's rows, and raises for poisoned ones."""

    can_batch = True

    def __init__(self, pool: ContextPool) -> None:
        self.pool, self.signature, self.width = pool, pool.signature, pool.width
        self.gate = Gate()
        self.runs: list[tuple[bool, list[float]]] = []

    def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        return self._through([feeds], lambda: self.pool.run(feeds))

    def run_batched(self, parts: Any, size: int | None = None) -> dict[str, Any]:
        return self._through(parts, lambda: self.pool.run_batched(parts, size))

    def _through(self, parts: list[dict[str, Any]], call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        self.gate.wait()
        rows = [float(value) for part in parts for value in part["x"][:, 0]]
        poisoned = any((part["x"] == POISON).any() for part in parts)
        self.runs.append((not poisoned, rows))
        if poisoned:
            raise Poisoned(str(rows))
        return call()

    def close(self) -> None:
        self.pool.close()


# ------------------------------------------------------------------------------------------------ the batcher


submissions = st.tuples(
    st.just("submit"),
    st.integers(1, BATCH),  # rows
    st.sampled_from((2, 2, 2, 4)),  # width
    st.sampled_from((False, False, False, False, True)),  # poisoned
    st.sampled_from((0, 0, 1)),  # priority
    st.sampled_from((None, None, None, 0.0, 3.0)),  # deadline, ms
)
operations = st.one_of(
    submissions,
    submissions,
    submissions,
    st.tuples(st.just("cancel"), st.integers(0, 100)),
    st.tuples(st.just("tick"), st.sampled_from((0.5, 2.0, 5.0))),
    st.tuples(st.just("let through")),
)


@schedule
@given(plan=st.lists(operations, max_size=24), contexts=st.integers(1, 2), cancel=st.booleans(), buckets=st.booleans())
def test_every_request_ends_once_with_what_it_earned_and_with_its_own_rows(
    sealed: Engine, plan: list[tuple[Any, ...]], contexts: int, cancel: bool, buckets: bool
) -> None:
    now_s = [100.0]
    watched = Watched(pool_over(sealed, contexts=contexts))
    batcher = Batcher(
        watched,
        Batching(max_batch=BATCH, max_wait_ms=2.0, max_rows_waiting=30, buckets=(2, 4) if buckets else ()),
        profiles=sealed.passport.profiles,
        clock=lambda: now_s[0],
    )
    asked: dict[int, tuple[Future[Any], np.ndarray, bool, float | None]] = {}
    cancelled: set[int] = set()
    refused = 0
    for step in plan:
        match step:
            case ("submit", rows, width, poisoned, priority, deadline_ms):
                number = len(asked) + refused
                x = feed(number, rows, width)
                if poisoned:
                    x[-1] = POISON
                try:
                    future = batcher.submit({"x": x}, priority=priority, deadline_ms=deadline_ms)
                except Overloaded:
                    refused += 1
                    continue
                over_s = None if deadline_ms is None else now_s[0] + deadline_ms / 1e3
                asked[number] = (future, x, poisoned, over_s)
            case ("cancel", which):
                if asked:
                    number = list(asked)[which % len(asked)]
                    if asked[number][0].cancel():
                        cancelled.add(number)
            case ("tick", milliseconds):
                now_s[0] += milliseconds / 1e3
            case _:
                watched.gate.let_through()
    watched.gate.open()
    batcher.close(cancel=cancel)

    ends: Counter[str] = Counter()
    for number, (future, x, poisoned, over_s) in asked.items():
        assert future.done(), "lost"
        mine = [float(value) for value in x[:, 0] if value != POISON]
        ran_well = sum(well and set(mine) <= set(rows) for well, rows in watched.runs if mine)
        try:
            outputs = future.result(0)
        except CancelledError:
            ends["dropped"] += 1
            assert number in cancelled or cancel
            assert not any(set(mine) & set(rows) for _, rows in watched.runs), "a cancelled request was run"
        except DeadlineExpired:
            ends["expired"] += 1
            assert over_s is not None
            assert over_s <= now_s[0]
            assert not any(set(mine) & set(rows) for _, rows in watched.runs), "an expired request was run"
        except Poisoned:
            ends["failed"] += 1
            assert poisoned, "a neighbour got the error"
        else:
            ends["answered"] += 1
            assert not poisoned
            assert number not in cancelled
            assert np.array_equal(outputs["y"], 2 * x)
            assert ran_well == 1, "rows were lost or run twice"
    stats = batcher.stats()
    assert all(len(rows) <= BATCH for _, rows in watched.runs)
    assert (stats.answered, stats.failed, stats.cancelled, stats.expired) == (
        ends["answered"], ends["failed"], ends["dropped"], ends["expired"],
    )  # fmt: skip
    assert (stats.requests, stats.rejected) == (len(asked), refused)
    assert (stats.waiting, stats.running, stats.rows_waiting) == (0, 0, 0)
    assert stats.batches == len(watched.runs)
    assert stats.queue.count == stats.answered + stats.failed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(f"batcher-{id(batcher):x}")]
    assert watched.pool.device.allocated_count == 0  # type: ignore[attr-defined]


@schedule
@given(
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=10),
    bad=st.sets(st.integers(0, 9), min_size=1, max_size=3),
    contexts=st.integers(1, 2),
)
def test_bad_rows_in_the_middle_of_a_batch_reach_their_caller_alone(
    sealed: Engine, sizes: list[int], bad: set[int], contexts: int
) -> None:
    watched = Watched(pool_over(sealed, contexts=contexts))
    watched.gate.open()
    batcher = Batcher(watched, max_batch=BATCH, max_wait_ms=5.0, profiles=sealed.passport.profiles)
    with batcher:
        asked = []
        for number, rows in enumerate(sizes):
            x = feed(number, rows)
            if number in bad:
                x[0] = POISON
            asked.append((number, x, batcher.submit({"x": x})))
        for number, x, future in asked:
            if number in bad:
                assert isinstance(future.exception(HANG_S), Poisoned)
            else:
                assert np.array_equal(future.result(HANG_S)["y"], 2 * x)


@schedule
@given(sizes=st.lists(st.integers(1, BATCH), min_size=1, max_size=8), fits=st.integers(1, BATCH))
def test_memory_for_less_than_a_batch_answers_whoever_fits(sealed: Engine, sizes: list[int], fits: int) -> None:
    """A batch that does not fit is run in halves; only requests that do not fit by themselves are told so."""
    room = fits * 2 * 2 * 4  # x and y, two floats a row
    watched = Watched(pool_over(sealed, memory_bytes=room))
    watched.gate.open()
    with Batcher(watched, max_batch=BATCH, max_wait_ms=5.0, profiles=sealed.passport.profiles) as batcher:
        asked = [(feed(number, rows), rows) for number, rows in enumerate(sizes)]
        futures = [batcher.submit({"x": x}) for x, _ in asked]
        for (x, rows), future in zip(asked, futures, strict=True):
            if rows > fits:
                assert isinstance(future.exception(HANG_S), MemoryExhausted)
            else:
                assert np.array_equal(future.result(HANG_S)["y"], 2 * x)


@schedule
@given(before=st.integers(0, 6), after=st.integers(1, 6), batched=st.booleans())
def test_a_lost_device_is_told_to_everybody_and_still_closes(
    sealed: Engine, before: int, after: int, batched: bool
) -> None:
    pool = pool_over(sealed, contexts=2)
    runner = Batcher(pool, max_batch=BATCH, max_wait_ms=1.0, profiles=sealed.passport.profiles) if batched else pool
    engine = InferenceEngine(runner, sealed)
    for number in range(before):
        assert np.array_equal(engine.infer(feed(number, 1))["y"], 2 * feed(number, 1))
    assert isinstance(pool.device, FakeDevice)
    pool.device.lose()
    futures = [engine.infer_async(feed(number, 1)) for number in range(after)]
    for future in futures:
        assert isinstance(future.exception(HANG_S), DeviceLost)
    assert (engine.stats().requests, engine.stats().failures) == (before + after, after)
    engine.close()
    if batched:
        assert engine.stats().batching is not None
        assert engine.stats().batching.retries == 0, "half a batch is as lost as the whole"  # type: ignore[union-attr]


@pytest.mark.slow
@schedule
@given(
    lost=st.sets(st.integers(0, 2), min_size=1, max_size=2),
    before=st.integers(0, 5),
    balance=st.sampled_from(("round robin", "least busy", "by use")),
    batched=st.booleans(),
)
def test_a_lost_gpu_leaves_the_others_serving_and_is_said(
    sealed: Engine, lost: set[int], before: int, balance: str, batched: bool
) -> None:
    pools = [pool_over(sealed, number) for number in range(3)]
    names = [pool.device.name for pool in pools]
    replicas = Replicas(pools, devices=names, balance=balance, pause_s=1000.0)
    runner = (
        Batcher(replicas, max_batch=BATCH, max_wait_ms=1.0, profiles=sealed.passport.profiles) if batched else replicas
    )
    with InferenceEngine(runner, sealed) as engine:
        for number in range(before):
            engine.infer(feed(number, 2))
        for number in lost:
            pools[number].device.lose()  # type: ignore[attr-defined]
        lonely = 0
        for number in range(12):
            try:
                assert np.array_equal(engine.infer(feed(number, 2))["y"], 2 * feed(number, 2))
            except DeviceLost:  # its replica and the one that was asked next had both just been lost
                lonely += 1
        assert lonely <= (len(lost) - 1), "more callers than had to met the loss"
        told = engine.stats().replicas
        assert {number for number, one in enumerate(told) if not one.serving} == lost
        assert all(names[number] in engine.runtime_info["not serving"] for number in lost)


# ------------------------------------------------------------------------------------------------ the pool


class Caller:
    """A thread inside `run`, and how it ended."""

    def __init__(self, pool: ContextPool, number: int) -> None:
        self.number, self.x = number, feed(number, 1 + number % 3)
        self.outputs: dict[str, Any] | None = None
        self.error: BaseException | None = None
        self._pool = pool
        self.thread = threading.Thread(target=self._ask)
        self.thread.start()

    def _ask(self) -> None:
        try:
            self.outputs = self._pool.run({"x": self.x})
        except BaseException as error:
            self.error = error

    def answered(self) -> bool:
        return self.outputs is not None and np.array_equal(self.outputs["y"], 2 * self.x)


class Doors(dict[float, tuple[threading.Event, list[BaseException]]]):
    """One door for each inference: it waits inside its context until somebody opens, or throws something in."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[float] = []

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        enqueue = FakeContext.enqueue
        doors = self

        def waits(context: FakeContext, stream: Any) -> None:
            if not stream.capturing:
                stream.synchronize()  # the upload has happened: the rows say who this is
                assert context._bound is not None
                mine = float(context._bound["x"].memory()[:4].view(np.float32)[0])
                event, thrown = doors.setdefault(mine, (threading.Event(), []))
                doors.entered.append(mine)
                assert event.wait(HANG_S)
                if thrown:
                    raise thrown[0]
            enqueue(context, stream)

        FakeContext.enqueue = waits  # type: ignore[method-assign]
        try:
            yield
        finally:
            FakeContext.enqueue = enqueue  # type: ignore[method-assign]

    def open(self, caller: Caller, thrown: BaseException | None = None) -> None:
        event, things = self.setdefault(float(caller.x[0, 0]), (threading.Event(), []))
        if thrown is not None:
            things.append(thrown)
        event.set()


@schedule
@given(
    plan=st.lists(
        st.one_of(
            st.just(("come",)),
            st.just(("come",)),
            st.tuples(st.just("finish"), st.integers(0, 9), st.sampled_from((False, False, True))),
        ),
        max_size=18,
    ),
    contexts=st.integers(1, 3),
    end=st.sampled_from(("drain", "turn away")),
)
def test_contexts_go_to_callers_in_the_order_they_came(
    sealed: Engine, plan: list[tuple[Any, ...]], contexts: int, end: str
) -> None:
    """The pool does after every step what a queue on paper does."""
    doors, most_waiting = Doors(), 3
    pool = pool_over(sealed, contexts=contexts, max_waiting=most_waiting)
    inside: list[Caller] = []
    in_line: list[Caller] = []
    everybody: list[Caller] = []
    refused, faulted = [], []
    with doors.installed():
        for step in plan:
            if step[0] == "come":
                caller = Caller(pool, len(everybody))
                everybody.append(caller)
                if len(inside) < contexts:
                    inside.append(caller)
                elif len(in_line) < most_waiting:
                    in_line.append(caller)
                else:
                    refused.append(caller)
                    caller.thread.join(HANG_S)
            elif inside:
                caller = inside.pop(step[1] % len(inside))
                thrown = RuntimeError("the engine raised") if step[2] else None
                doors.open(caller, thrown)
                caller.thread.join(HANG_S)
                if thrown is not None:
                    faulted.append(caller)
                    assert caller.error is thrown
                if in_line:
                    inside.append(in_line.pop(0))
            wanted = (len(inside), len(in_line))
            until(lambda wanted=wanted: (pool.stats().busy, pool.stats().waiting) == wanted, f"{wanted}")
            there = {float(caller.x[0, 0]) for caller in inside}
            until(lambda there=there: there <= set(doors.entered), "the longest in line got the context")
            assert len(doors.entered) == len(everybody) - len(in_line) - len(refused), "somebody was passed"
        turned_away = []
        if end == "turn away":
            turned_away = in_line[:]
            pool.reject_waiting()
        for caller in everybody:
            doors.open(caller)
        for caller in everybody:
            caller.thread.join(HANG_S)
        pool.close()
    for caller in everybody:
        assert not caller.thread.is_alive(), "lost"
        if caller in refused:
            assert isinstance(caller.error, Overloaded)
        elif caller in turned_away:
            assert isinstance(caller.error, UsageError)
        elif caller not in faulted:
            assert caller.answered(), caller.error
    stats = pool.stats()
    assert (stats.busy, stats.waiting, stats.rejected, stats.timeouts) == (0, 0, len(refused), 0)
    assert stats.wait.count == len(everybody) - len(refused)
    assert pool.device.allocated_count == 0  # type: ignore[attr-defined]


@schedule
@given(
    waiting=st.integers(1, 4),
    patience_ms=st.sampled_from((1, 3)),
    slow=st.booleans(),
)
def test_who_waits_too_long_is_told_and_leaves_the_line_intact(
    sealed: Engine, waiting: int, patience_ms: int, slow: bool
) -> None:
    doors = Doors()
    pool = pool_over(sealed, wait_timeout_s=patience_ms / 1e3)
    with doors.installed():
        first = Caller(pool, 0)
        until(lambda: bool(doors.entered), "the first is inside")
        others = [Caller(pool, 1 + number) for number in range(waiting)]
        if slow:
            for caller in others:
                caller.thread.join(HANG_S)
        for caller in (first, *others):  # some get in at the last moment, some do not: each is told the truth
            doors.open(caller)
        for caller in (first, *others):
            caller.thread.join(HANG_S)
        assert first.answered()
        late = [caller for caller in others if caller.error is not None]
        assert all(isinstance(caller.error, DeadlineExpired) for caller in late)
        assert all(caller.answered() for caller in others if caller not in late)
        assert len(late) == waiting or not slow
        again = Caller(pool, 9)
        doors.open(again)
        again.thread.join(HANG_S)
        assert again.answered(), "the line still works"
    assert (pool.stats().timeouts, pool.stats().waiting) == (len(late), 0)
    pool.close()


# ------------------------------------------------------------------------------------------------ the whole


def stack(kind: str, engine: Engine) -> InferenceEngine:
    profiles = engine.passport.profiles
    if kind == "pool":
        return InferenceEngine(pool_over(engine, contexts=2, streams=1, graphs=True), engine)
    if kind == "replicas":
        return InferenceEngine(Replicas([pool_over(engine, 0), pool_over(engine, 1)]), engine)
    pool = pool_over(engine, contexts=2)
    return InferenceEngine(Batcher(pool, max_batch=BATCH, max_wait_ms=0.5, profiles=profiles), engine)


@settings(max_examples=36, deadline=None, derandomize=True, database=None)
@given(
    kind=st.sampled_from(("pool", "replicas", "batcher")),
    answers=st.integers(0, 12),
    cancel=st.booleans(),
    asynchronous=st.integers(0, 3),
    twice=st.booleans(),
)
def test_close_at_any_point_ends_every_request_and_leaves_nothing(
    sealed: Engine, kind: str, answers: int, cancel: bool, asynchronous: int, twice: bool
) -> None:
    threads = set(threading.enumerate())
    engine = stack(kind, sealed)
    ends: Counter[str] = Counter()
    lock = threading.Lock()

    def ask(number: int) -> None:
        for turn in itertools.count():
            x = feed(number * 4 + turn % 4, 1 + turn % 3)
            try:
                call = engine.infer_async(x).result if number < asynchronous else lambda x=x: engine.infer(x)
                how = "answered" if np.array_equal(call()["y"], 2 * x) else "wrong"
            except CancelledError:
                how = "cancelled"
            except UsageError as error:
                how = "closed" if "closed" in error.message else repr(error)
            except BaseException as error:
                how = repr(error)
            with lock:
                ends[how] += 1
            if how != "answered":
                return

    crowd = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in crowd:
        thread.start()
    until(lambda: ends["answered"] >= answers, "answers")
    other = threading.Thread(target=engine.close)
    if twice:
        other.start()
    engine.close(cancel=cancel)
    if twice:
        other.join(HANG_S)
    for thread in crowd:
        thread.join(HANG_S)
    assert set(ends) <= {"answered", "closed"} | ({"cancelled"} if asynchronous and cancel else set())
    assert ends["closed"] + ends["cancelled"] == len(crowd)
    stats = engine.stats()
    assert stats.in_flight == 0
    assert stats.requests - stats.failures == ends["answered"]
    assert set(threading.enumerate()) <= threads
    pools = engine._pools() or [engine._batcher.runner]  # type: ignore[union-attr]
    assert [pool.device.allocated_count for pool in pools] == [0] * len(pools)  # type: ignore[union-attr]

"""`InferenceEngine` over contexts, buffers and streams of the fake device."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from patience import HANG_S
from trt_engine.device.fake import FakeDevice
from trt_engine.errors import FeedError, MemoryExhausted, ProfileError, TrtEngineError, UsageError
from trt_engine.runtime.context_pool import ContextPool
from trt_engine.runtime.inference_engine import InferenceEngine, InferenceResult, Stats

Load = Callable[..., InferenceEngine]


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return (np.arange(count * 3, dtype=np.float32) + np.float32(start)).reshape(count, 3)


def device_of(engine: InferenceEngine) -> FakeDevice:
    assert engine._pool is not None
    device = engine._pool.device
    assert isinstance(device, FakeDevice)
    return device


# ------------------------------------------------------------------------------------------------ answers


class Exported:
    """An array of another library: DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **how: object) -> object:
        return self._array.__dlpack__(**how)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def test_an_array_of_another_library_is_read_in_place(load: Load, double: Path) -> None:
    assert np.array_equal(load(double).infer({"x": Exported(rows(2))})["y"], 2 * rows(2))


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("feeds", "says"),
    [
        ({"z": rows(1)}, "unknown input `z`"),
        ({}, "`x` is not fed"),
        ({"x": rows(1), "y": rows(1)}, "unknown input `y`"),
        ({"x": rows(1).astype(np.float64)}, "is float64, expected float32"),
        ({"x": rows(1).astype(">f4")}, "byte order"),
        ({"x": rows(1).astype(ml_dtypes.bfloat16)}, "is bfloat16"),
        ({"x": rows(1)[0]}, "has 1 dimensions"),
        ({"x": np.zeros((1, 4), np.float32)}, "dimension 1 is fixed at 3"),
        ({"x": [[1.0, 2.0, 3.0]]}, "is a list, expected an array"),
        ({"x": None}, "is a NoneType"),
        ([[1.0, 2.0, 3.0]], "is a list"),
        ("x", "is a str"),
    ],
)
def test_a_feed_that_does_not_fit_is_refused_every_time(load: Load, double: Path, feeds: object, says: str) -> None:
    engine = load(double)
    for _ in range(2):  # what was refused once must not be remembered as accepted
        with pytest.raises(FeedError, match=says):
            engine.infer(feeds)
    assert np.array_equal(engine.infer(rows(1))["y"], 2 * rows(1))


def test_each_of_several_profiles_takes_its_feeds(load: Load, double: Path) -> None:
    from trt_engine.config.profiles import parse_profile

    profiles = (parse_profile("x:1x3,1x3,2x3"), parse_profile("x:4x3,6x3,8x3"))
    engine = load(double, profiles=profiles, batch=None)
    for count in (1, 8, 2, 4):
        assert np.array_equal(engine.infer(rows(count))["y"], 2 * rows(count))
    with pytest.raises(ProfileError):
        engine.infer(rows(3))


# ------------------------------------------------------------------------------------------------ results, statistics


def test_a_result_carries_time_and_success(load: Load, double: Path) -> None:
    result = load(double).infer(rows(1), result=True)
    assert result.success
    assert result.message == ""
    assert result.latency_ms > 0
    assert np.array_equal(result.outputs["y"], 2 * rows(1))


@pytest.mark.parametrize("feeds", [rows(9), {"z": rows(1)}])
def test_a_result_tells_a_failure_instead_of_raising_it(load: Load, double: Path, feeds: object) -> None:
    result = load(double).infer(feeds, result=True)
    assert not result.success
    assert result.outputs == {}
    assert "hint: " in result.message


def test_requests_and_failures_are_counted_and_warm_up_is_not(load: Load, double: Path) -> None:
    engine = load(double)
    assert dataclasses.replace(engine.stats(), pool=None) == Stats(0, 0, 0, 0.0)
    engine.warmup(3)
    engine.infer(rows(1))
    engine.infer(rows(1), result=True)
    engine.infer(rows(9), result=True)
    with pytest.raises(FeedError):
        engine.infer({})
    stats = engine.stats()
    assert (stats.requests, stats.failures, stats.in_flight) == (4, 2, 0)
    assert stats.seconds > 0


def test_the_count_is_exact_with_many_threads_and_many_readers(load: Load, double: Path) -> None:
    engine = load(double, contexts=2)
    feeds = {"x": rows(1)}
    with ThreadPoolExecutor(6) as threads:
        for _ in threads.map(lambda _: (engine.infer(feeds), engine.stats()), range(300)):
            pass
    assert engine.stats().requests == 300
    assert engine.stats().in_flight == 0


def test_feeds_like_some_accepted_before_are_not_looked_at_again(load: Load, double: Path) -> None:
    engine, looked = load(double), []
    check = engine._check
    engine._check = lambda arrays: (looked.append(1), check(arrays))
    for count in (1, 1, 2, 1, 2):
        engine.infer(rows(count))
        engine.infer({"x": rows(count)})
    assert len(looked) == 2


# ------------------------------------------------------------------------------------------------ threads


def test_no_thread_is_started_before_the_first_future(load: Load, double: Path) -> None:
    before = set(threading.enumerate())  # some of an earlier test may end meanwhile
    engine = load(double)
    engine.warmup(1)
    engine.infer(rows(1))
    assert set(threading.enumerate()) <= before
    assert np.array_equal(engine.infer_async(rows(1)).result()["y"], 2 * rows(1))
    assert len(set(threading.enumerate()) - before) == 1
    engine.close()
    assert set(threading.enumerate()) <= before


def test_a_future_carries_the_error(load: Load, double: Path) -> None:
    engine = load(double)
    with pytest.raises(ProfileError):
        engine.infer_async(rows(9)).result()
    told = engine.infer_async(rows(9), result=True).result()
    assert isinstance(told, InferenceResult)
    assert not told.success


class Gate:
    """Holds every inference of an engine until it is opened."""

    def __init__(self, engine: InferenceEngine) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        assert engine._pool is not None

        def gated(call: Callable[..., object]) -> Callable[..., object]:
            def waits(feeds: object) -> object:
                self.entered.set()
                assert self.open.wait(HANG_S)
                return call(feeds)

            return waits

        engine._run, engine._pool.warm_up = gated(engine._run), gated(engine._pool.warm_up)


def test_close_waits_for_what_is_in_flight_and_answers_what_is_queued(load: Load, double: Path) -> None:
    engine = load(double)
    gate = Gate(engine)
    futures = [engine.infer_async(rows(1, start=number)) for number in range(3)]
    assert gate.entered.wait(HANG_S)
    closer = threading.Thread(target=engine.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    gate.open.set()
    closer.join(HANG_S)
    for number, future in enumerate(futures):
        assert np.array_equal(future.result(0)["y"], 2 * rows(1, start=number))


def test_a_cancelled_future_costs_nothing(load: Load, double: Path) -> None:
    engine = load(double)
    gate = Gate(engine)
    first, second, third = (engine.infer_async(rows(1)) for _ in range(3))
    assert gate.entered.wait(HANG_S)
    assert second.cancel()
    gate.open.set()
    first.result(HANG_S), third.result(HANG_S)
    engine.close()
    assert engine.stats().requests == 2


def test_close_from_inside_a_request_is_refused_and_does_not_hang(load: Load, double: Path) -> None:
    engine = load(double)
    gate, told = Gate(engine), []

    def close(_: object) -> None:
        try:
            engine.close()
        except UsageError as error:
            told.append(error.message)

    future = engine.infer_async(rows(1))
    future.add_done_callback(close)
    gate.open.set()
    future.result(HANG_S)
    engine.close()
    assert told == ["`close` was called from inside a request"]


# ------------------------------------------------------------------------------------------------ the end


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.infer(rows(1)),
        lambda engine: engine.run({"x": rows(1)}),
        lambda engine: engine.infer_async(rows(1)),
        lambda engine: engine.warmup(1),
    ],
)
def test_a_closed_engine_says_so(load: Load, double: Path, use: Callable[[InferenceEngine], object]) -> None:
    engine = load(double)
    engine.infer(rows(1))
    engine.close()
    with pytest.raises(UsageError, match="the engine is closed"):
        use(engine)
    assert not engine.infer(rows(1), result=True).success


def test_what_it_is_can_still_be_read_after_close(load: Load, double: Path) -> None:
    engine = load(double)
    engine.close()
    assert [spec.name for spec in engine.inputs] == ["x"]
    assert [spec.name for spec in engine.outputs] == ["y"]
    assert engine.runtime_info["device"] == "fake:0"
    assert engine.runtime_info["backend"] == "fake"
    assert engine.profiles[0].ranges["x"].max == (4, 3)
    assert "double.fake" in repr(engine)


# ------------------------------------------------------------------------------------------------ memory


def test_memory_that_does_not_suffice_is_said_and_smaller_requests_go_on(load: Load, double: Path) -> None:
    engine = load(double, memory="60B")  # two buffers of two rows fit, two of four do not
    with pytest.raises(MemoryExhausted, match="cannot allocate 48 bytes"):
        engine.infer(rows(4))
    assert np.array_equal(engine.infer(rows(2))["y"], 2 * rows(2))
    engine.close()
    assert device_of(engine).allocated_bytes == 0


def test_a_failed_start_leaves_nothing_behind(load: Load, double: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trt_engine.backends.fake.run import FakeSession

    made: list[FakeSession] = []
    context = FakeSession.create_context

    def second_fails(self: FakeSession, profile: int = 0) -> object:
        if made:
            raise MemoryExhausted("no room for a second context")
        made.append(self)
        return context(self, profile)

    monkeypatch.setattr(FakeSession, "create_context", second_fails)
    with pytest.raises(MemoryExhausted):
        load(double, contexts=2)
    made[0].close()  # would refuse if the first context were still open


def test_an_inference_that_fails_on_the_device_leaves_the_next_one_clean(
    load: Load, double: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trt_engine.backends.fake.run import FakeContext

    engine = load(double)
    engine.infer(rows(1))
    compute = FakeContext._compute

    def fail(*_: object) -> None:
        raise TrtEngineError("illegal address")

    monkeypatch.setattr(FakeContext, "_compute", fail)
    with pytest.raises(TrtEngineError, match="illegal address"):
        engine.infer(rows(1))
    monkeypatch.setattr(FakeContext, "_compute", compute)
    assert np.array_equal(engine.infer(rows(1, start=5))["y"], 2 * rows(1, start=5))


def test_warm_up_reaches_every_context(load: Load, double: Path) -> None:
    engine = load(double, contexts=3)
    engine.warmup(1, batch=4)
    assert device_of(engine).allocated_count == 6


def test_parts_run_as_the_batch_asked_for_and_give_only_their_own_rows(load: Load, double: Path) -> None:
    pool = load(double, contexts=2, batch=(1, 4, 8)).runner
    assert isinstance(pool, ContextPool)
    found = pool.run_batched([{"x": np.full((1, 3), 1, np.float32)}, {"x": np.full((2, 3), 2, np.float32)}], 8)
    assert found["y"].tolist() == [[2, 2, 2], [4, 4, 4], [4, 4, 4]]
    assert [lane.is_prepared(((8, 3),)) for lane in pool._executors].count(True) == 1


def test_a_lane_that_ran_a_batch_of_that_size_last_is_chosen_for_the_next(load: Load, double: Path) -> None:
    pool = load(double, contexts=2, batch=(1, 4, 8)).runner
    assert isinstance(pool, ContextPool)
    one = {"x": np.ones((1, 3), np.float32)}
    for size in (8, 4, 8, 4, 8):
        pool.run_batched([one, one], size)
        assert sum(lane.is_prepared(((size, 3),)) for lane in pool._executors) == 1
    assert sorted(lane._last_key for lane in pool._executors if lane._last_key) == [((4, 3),), ((8, 3),)]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda engine: engine.warmup(runs="x"), "`runs` is 'x', expected a whole number"),
        (lambda engine: engine.warmup(0), "`runs` is 0"),
        (lambda engine: engine.warmup(1, batch="a"), "`batch` is 'a'"),
        (lambda engine: engine.infer({1: np.ones((1, 3), np.float32)}), "unknown input `1`"),
    ],
)
def test_what_is_no_number_and_no_name_is_told_in_our_words(
    load: Load, double: Path, wrong: Callable[[InferenceEngine], object], told: str
) -> None:
    with pytest.raises(TrtEngineError, match=told):
        wrong(load(double))


def test_a_bare_array_is_not_enough_for_two_inputs(load: Load, weighted: Path) -> None:
    with pytest.raises(FeedError, match="2 inputs"):
        load(weighted).infer(np.zeros((1, 2), np.float32))

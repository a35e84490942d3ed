"""`Replicas`: who is asked, who is left out, who comes back; and what they say of it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from patience import HANG_S
from trt_engine.errors import DeadlineExpired, DeviceLost, FeedError, Overloaded, UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.replicas import Replicas, ReplicaState, UtilizationMonitor, resolve_strategy
from trt_engine.tensors import Signature, TensorSpec

SPEC = TensorSpec("x", "float32", (-1, 3), ("batch", None))
FEEDS = {"x": np.ones((1, 3), np.float32)}


class Gpu(RunnerBase):
    """A runner that says who answered, or fails."""

    width = 2

    def __init__(self, number: int) -> None:
        self.signature = Signature((SPEC,), (SPEC,))
        self.number, self.asked, self.closed = number, 0, 0
        self.error: Exception | None = None

    def run(self, feeds: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return {"y": self.number}

    def close(self) -> None:
        self.closed += 1


def of(count: int, **settings: Any) -> tuple[list[Gpu], Replicas]:
    gpus = [Gpu(number) for number in range(count)]
    return gpus, Replicas(gpus, devices=[f"fake:{number}" for number in range(count)], **settings)


def seen(*in_flight: int, use: Sequence[float | None] = ()) -> list[ReplicaState]:
    return [
        ReplicaState(number, f"fake:{number}", busy, use[number] if use else None)
        for number, busy in enumerate(in_flight)
    ]


def test_round_robin_asks_each_in_turn() -> None:
    gpus, replicas = of(3, balance="round robin")
    assert [replicas.run(FEEDS)["y"] for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [gpu.asked for gpu in gpus] == [2, 2, 2]


def test_least_busy_asks_the_one_with_the_fewest_in_flight_and_among_equals_each_in_turn() -> None:
    choose = resolve_strategy("least-busy")
    assert choose(seen(2, 0, 1)) == 1
    assert {choose(seen(1, 1, 1)) for _ in range(3)} == {0, 1, 2}


def test_by_use_asks_the_least_used_gpu_and_does_not_chase_small_differences() -> None:
    choose = resolve_strategy("by use")
    assert choose(seen(0, 0, 0, use=(0.9, 0.2, 0.8))) == 1
    assert choose(seen(4, 1, 0, use=(0.51, 0.55, 0.9))) == 1
    assert choose(seen(1, 0)) == 1, "where nobody can tell, the one with fewer requests"


def test_one_that_fails_is_left_out_said_and_tried_again_twice_as_late_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    gpus, replicas = of(2, balance="round robin", pause_s=1.0, clock=lambda: now[0])
    gpus[0].error = RuntimeError("ECC error")
    with caplog.at_level(logging.WARNING, "trt_engine"):
        assert all(replicas.run(FEEDS)["y"] == 1 for _ in range(5))
        assert gpus[0].asked == 1
        assert "`fake:0` failed and is suspended: ECC error" in caplog.text
        assert replicas.runtime_info()["not serving"] == "fake:0: ECC error"
        for at, asked in ((1.1, 2), (2.9, 2), (3.2, 3), (7.0, 3), (7.3, 4)):
            now[0] = at
            assert all(replicas.run(FEEDS)["y"] == 1 for _ in range(3))
            assert gpus[0].asked == asked, at
        assert caplog.text.count("is suspended") == 1
        gpus[0].error = None
        now[0] = 100.0
        assert {replicas.run(FEEDS)["y"] for _ in range(4)} == {0, 1}
        assert "`fake:0` is in use again" in caplog.text
    assert [one.serving for one in replicas.stats()] == [True, True]


def test_a_request_that_fails_everywhere_gets_its_error_and_nobody_is_left_out() -> None:
    gpus, replicas = of(3)
    for gpu in gpus:
        gpu.error = ValueError("these rows cannot be computed")
    with pytest.raises(ValueError, match="these rows"):
        replicas.run(FEEDS)
    assert sum(gpu.asked for gpu in gpus) == 2
    assert all(one.serving for one in replicas.stats())


def test_an_error_of_the_callers_is_not_tried_on_another() -> None:
    gpus, replicas = of(2)
    for gpu in gpus:
        gpu.error = FeedError("one row too many")
    with pytest.raises(FeedError):
        replicas.run(FEEDS)
    assert sum(gpu.asked for gpu in gpus) == 1


def test_when_all_are_lost_the_error_says_so_and_the_first_that_is_due_is_asked() -> None:
    now = [0.0]
    gpus, replicas = of(2, pause_s=1.0, clock=lambda: now[0])
    for gpu in gpus:
        gpu.error = DeviceLost("the GPU has fallen off the bus")
    for _ in range(3):
        with pytest.raises(DeviceLost):
            replicas.run(FEEDS)
    assert [one.serving for one in replicas.stats()] == [False, False]
    gpus[1].error = None
    assert replicas.run(FEEDS)["y"] == 1


def test_closing_closes_every_one_though_one_cannot(caplog: pytest.LogCaptureFixture) -> None:
    gpus, replicas = of(3)

    def fails() -> None:
        raise DeviceLost("gone")

    gpus[0].close = fails  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING, "trt_engine"):
        replicas.close()
        replicas.close()
    assert [gpu.closed for gpu in gpus[1:]] == [1, 1]
    assert "`fake:0` did not close: gone" in caplog.text


def test_use_is_sampled_by_a_thread_that_survives_a_gpu_that_does_not_answer() -> None:
    asked = threading.Semaphore(0)
    answers = iter([0.25, RuntimeError("no answer"), 0.75])

    def sample(number: int) -> float:
        asked.release()
        answer = next(answers, 0.75)
        if isinstance(answer, Exception):
            raise answer
        return answer

    use = UtilizationMonitor(["cuda:3", "cpu"], interval_s=0.001, sample=sample)
    for _ in range(5):
        assert asked.acquire(timeout=HANG_S)
    assert use.current == (0.75, None)
    use.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("use-")]


@pytest.mark.parametrize("error", [Overloaded("full", hint="later"), DeadlineExpired("late", hint="more")])
def test_a_replica_that_is_full_is_no_reason_to_ask_another(error: Exception) -> None:
    gpus, replicas = of(2, balance="round robin")
    gpus[0].error = error
    with pytest.raises(type(error)):
        replicas.run(FEEDS)
    assert [one.requests for one in replicas.stats()] == [1, 0]
    assert all(one.serving for one in replicas.stats())


def test_a_strategy_of_your_own_is_a_function() -> None:
    _, replicas = of(3, balance=lambda replicas: replicas[-1].number)
    assert [replicas.run(FEEDS)["y"] for _ in range(3)] == [2, 2, 2]
    _, counted = of(2, balance=lambda replicas: np.float64(1.0))
    assert counted.run(FEEDS)["y"] == 1
    _, wrong = of(2, balance=lambda replicas: 7)
    with pytest.raises(UsageError, match=r"chose replica 7 of \[0, 1\]"):
        wrong.run(FEEDS)
    with pytest.raises(UsageError, match="unknown load balancing strategy `random`"):
        of(2, balance="random")

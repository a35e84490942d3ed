"""Requests of coroutines: futures that can be awaited, in several event loops, cancelled and timed out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from patience import HANG_S
from trt_engine.errors import FeedError, UsageError

X = {"x": np.ones((1, 3), np.float32)}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "contexts": {"contexts": 2}, "batching": {"batching": te.Batching(max_batch=4, max_wait_ms=1)},
}  # fmt: skip


@pytest.fixture(params=SETTINGS)
def runner(request: pytest.FixtureRequest, load: Callable[..., te.InferenceEngine], double: Path) -> te.InferenceEngine:
    return load(double, **SETTINGS[request.param])


def test_an_engine_is_called_like_a_function(runner: te.InferenceEngine) -> None:
    assert (runner(X)["y"] == 2).all()
    assert (runner(X["x"])["y"] == 2).all()
    assert runner(X, result=True).success


def test_a_request_is_awaited_and_is_still_a_future(runner: te.InferenceEngine) -> None:
    async def ask() -> list[dict[str, Any]]:
        future = runner.infer_async(X)
        answers = await asyncio.gather(*(as_task(runner) for _ in range(16)))
        return [await future, future.result(0), (await runner.infer_async(X, result=True)).outputs, *answers]

    async def as_task(runner: te.InferenceEngine) -> dict[str, Any]:
        return await runner.infer_async(X)

    assert all((answer["y"] == 2).all() for answer in asyncio.run(asyncio.wait_for(ask(), HANG_S)))


def test_what_the_request_raises_is_raised_where_it_is_awaited(runner: te.InferenceEngine) -> None:
    async def ask() -> None:
        await runner.infer_async({"x": np.ones((1, 4), np.float32)})

    with pytest.raises((FeedError, UsageError)):
        asyncio.run(ask())


def test_several_event_loops_share_an_engine_and_a_future(runner: te.InferenceEngine) -> None:
    shared, answers = runner.infer_async(X), list[bool]()

    async def ask() -> bool:
        return bool((await shared)["y"][0, 0] == (await runner.infer_async(X))["y"][0, 0] == 2)

    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(ask()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert answers == [True] * 4


@pytest.mark.parametrize("kind", ["contexts", "batching"])
def test_a_timeout_cancels_a_request_that_waits_and_nothing_else(
    kind: str, load: Callable[..., te.InferenceEngine], double: Path
) -> None:
    runner = load(double, **{"contexts": {}, "batching": {"batching": te.Batching(max_batch=4, max_wait_ms=0)}}[kind])
    entered, go = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        entered.set()
        go.wait(0 if threading.current_thread() is threading.main_thread() else HANG_S)

    held = runner.infer_async(X)
    held.add_done_callback(hold)  # its thread does not come back before `go`
    assert entered.wait(HANG_S) or held.done()

    async def ask() -> Any:
        waiting = runner.infer_async(X)
        try:
            await asyncio.wait_for(as_coroutine(waiting), 0.05)
        except TimeoutError:
            return waiting
        return None

    async def as_coroutine(future: Any) -> Any:
        return await future

    waiting = asyncio.run(ask())
    go.set()
    if waiting is not None:  # the callback ran in the engine's thread, as it does unless the request was done before
        assert waiting.cancelled()
    assert (runner.infer(X)["y"] == 2).all()

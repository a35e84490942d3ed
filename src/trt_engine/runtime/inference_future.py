"""`InferenceFuture`: a future of `concurrent.futures` that can be awaited."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class InferenceFuture(Future[T]):
    """The outputs of a request: `result()`, `add_done_callback(...)`, or `await` in a coroutine of any event loop.

    Cancelling a task that awaits it, as a timeout does, cancels a request that has not started.
    """

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # who awaits has it already; others start faster without

        return asyncio.wrap_future(self).__await__()

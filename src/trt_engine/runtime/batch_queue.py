"""Queue of requests waiting for a batch, owned by the batcher thread; its limits in rows and bytes. Times are passed in.

`InferenceFuture` is what a caller gets for one of them.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Generator, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from trt_engine.errors import Overloaded, UsageError


@dataclass(slots=True, eq=False)
class Request:
    """Feeds and the future of their outputs."""

    feeds: dict[str, Any] | None
    """None after cancellation or completion."""
    rows: int
    nbytes: int
    key: Hashable
    """Requests with equal keys can share a batch: same inputs, dtypes and shapes except rows."""
    future: InferenceFuture[Any]
    arrived_s: float
    due_s: float
    """When it is dispatched even in a partial batch."""
    deadline_s: float = math.inf
    """When it expires."""
    rank: float = 0.0
    """Arrival time minus the priority bonus; lowest first."""
    is_waiting: bool = field(default=True)

    @property
    def cancelled(self) -> bool:
        return self.future.cancelled()


class BatchQueue:
    """One queue per key. `take` returns a batch of the queue whose oldest request was due first.

    Within a queue the lowest rank goes first; smaller requests do not overtake. Ranks are times, so no request starves.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._queues: dict[Hashable, _Queue] = {}
        self._deadlines: list[tuple[float, int, Request]] = []
        self._number = itertools.count().__next__

    def __len__(self) -> int:
        return sum(len(queue.entries) for queue in self._queues.values())

    def add(self, request: Request) -> None:
        queue = self._queues.get(request.key)
        if queue is None:
            queue = self._queues[request.key] = _Queue()
        number = self._number()
        queue.add(request, number)
        if request.deadline_s < math.inf:
            heapq.heappush(self._deadlines, (request.deadline_s, number, request))
            _compact(self._deadlines, len(self))

    def take_batch(self, now_s: float, *, flush: bool = False) -> list[Request]:
        """The next full or due batch (any with `flush`), or an empty list; includes cancelled requests, uncounted."""
        while True:
            ready = [
                queue
                for queue in self._queues.values()
                if flush or queue.rows >= self._max_batch or queue.due_s() <= now_s
            ]
            if not ready:
                return []
            queue = min(ready, key=_Queue.due_s)
            batch = queue.take_batch(self._max_batch)
            self._drop_empty(queue)
            if batch:
                return batch

    def remove_expired(self, now_s: float) -> list[Request]:
        """Remove and return requests past their deadline."""
        over = set()
        while self._deadlines and (self._deadlines[0][0] <= now_s or not self._deadlines[0][2].is_waiting):
            over.add(heapq.heappop(self._deadlines)[2])
        return self._filter(over.__contains__) if over else []

    def remove_cancelled(self) -> list[Request]:
        """Remove and return cancelled requests."""
        return self._filter(lambda request: request.cancelled)

    def remove_all(self) -> list[Request]:
        return self._filter(lambda request: True)

    def next_event_s(self) -> float:
        """The next time a request is due or expires."""
        first = min((queue.due_s() for queue in self._queues.values()), default=math.inf)
        return min(first, self.next_deadline_s())

    def next_deadline_s(self) -> float:
        """The next deadline."""
        while self._deadlines and not self._deadlines[0][2].is_waiting:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _filter(self, predicate: Callable[[Request], bool]) -> list[Request]:
        found = []
        for queue in list(self._queues.values()):
            found += queue.filter(predicate)
            self._drop_empty(queue)
        return found

    def _drop_empty(self, queue: _Queue) -> None:
        if not queue.entries:
            self._queues = {key: other for key, other in self._queues.items() if other is not queue}


class _Queue:
    """Requests of one key, by rank and by due time."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, Request]] = []
        self.due_times: list[tuple[float, int, Request]] = []
        self.rows = 0

    def add(self, request: Request, number: int) -> None:
        heapq.heappush(self.entries, (request.rank, number, request))
        heapq.heappush(self.due_times, (request.due_s, number, request))
        self.rows += request.rows
        _compact(self.due_times, len(self.entries))

    def due_s(self) -> float:
        while self.due_times and not self.due_times[0][2].is_waiting:
            heapq.heappop(self.due_times)
        return self.due_times[0][0] if self.due_times else math.inf

    def take_batch(self, max_rows: int) -> list[Request]:
        """Pop the first requests up to `max_rows`; a larger request is a batch by itself."""
        batch: list[Request] = []
        rows = 0
        while self.entries:
            request = self.entries[0][2]
            if batch and not request.cancelled and rows + request.rows > max_rows:
                break
            heapq.heappop(self.entries)
            request.is_waiting = False
            self.rows -= request.rows
            batch.append(request)
            if not request.cancelled:
                rows += request.rows
        return batch

    def filter(self, predicate: Callable[[Request], bool]) -> list[Request]:
        gone = [entry[2] for entry in self.entries if predicate(entry[2])]
        if gone:
            for request in gone:
                request.is_waiting = False
                self.rows -= request.rows
            self.entries = [entry for entry in self.entries if entry[2].is_waiting]
            heapq.heapify(self.entries)
        return gone


def _compact(heap: list[tuple[float, int, Request]], waiting: int) -> None:
    """Drop finished requests, which hold callers' arrays."""
    if len(heap) > 64 + 2 * waiting:
        heap[:] = [entry for entry in heap if entry[2].is_waiting]
        heapq.heapify(heap)


# ------------------------------------------------------------------------------------------------ limits

WORKER_FREE = "free"
CHECK_QUEUE = "look"
CLOSE = "close"


class AdmissionControl:
    """Limits the queue by rows and bytes; shared by submitting threads and the owner thread.

    Admitted requests are kept until the owner takes them. One wakes it only if a worker is free or the request has a
    deadline, and once until it takes them: each wake costs the submitting thread its place at the interpreter.
    """

    def __init__(self, max_rows: int, max_bytes: int | None, inbox: SimpleQueue[str]) -> None:
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._inbox = inbox
        self._lock = threading.Lock()
        self._requests: dict[Future[Any], Request] = {}
        self._pending: list[Request] = []
        self._wakes, self._woken = True, False
        self._rows = self._bytes = 0
        self._rejected = self._admitted = self._cancellations = 0
        self._closed = False

    def admit(self, request: Request) -> None:
        """Queue the request. Raises `Overloaded` at the limit of rows or bytes, `UsageError` once closed."""
        with self._lock:
            if self._closed:
                raise UsageError("the batcher is closed", hint="load the engine again")
            rows, nbytes = self._rows + request.rows, self._bytes + request.nbytes
            # a request above the limit is admitted to an empty queue
            if self._requests and rows > self._max_rows:
                self._rejected += 1
                raise Overloaded(
                    f"{self._rows} rows are waiting, {request.rows} more exceed the limit of {self._max_rows}",
                    hint="retry later; `max_rows_waiting` (`serve`: `--max-queue`) sets the limit",
                )
            if self._requests and self._max_bytes is not None and nbytes > self._max_bytes:
                self._rejected += 1
                raise Overloaded(
                    f"{self._bytes} bytes are waiting, {request.nbytes} more exceed the limit of {self._max_bytes}",
                    hint="retry later; `max_bytes_waiting` sets the limit",
                )
            self._admitted += 1
            self._rows, self._bytes = rows, nbytes
            self._requests[request.future] = request
            self._pending.append(request)  # under the lock, so that nothing follows `CLOSE`
            if not self._woken and (self._wakes or request.deadline_s < math.inf):
                self._woken = True
                self._inbox.put(CHECK_QUEUE)

    def wake_for_requests(self, wakes: bool) -> bool:
        """Set whether a request without a deadline wakes the owner; whether it has to take some at once."""
        with self._lock:
            self._wakes = wakes
            return wakes and bool(self._pending)

    def take_requests(self) -> list[Request]:
        """The requests admitted since the last call, for the owner's queue."""
        with self._lock:
            found, self._pending, self._woken = self._pending, [], False
            return found

    def release(self, request: Request) -> None:
        with self._lock:
            self._remove(request.future)

    def cancel(self, future: Future[Any]) -> None:
        """Remove a cancelled request; notify the owner thread once until it checks."""
        with self._lock:
            request = self._remove(future)
            if request is not None:
                request.feeds = None
                self._cancellations += 1
                if self._cancellations == 1:
                    self._inbox.put(CHECK_QUEUE)

    def _remove(self, future: Future[Any]) -> Request | None:
        request = self._requests.pop(future, None)
        if request is not None:
            self._rows -= request.rows
            self._bytes -= request.nbytes
        return request

    def take_cancellations(self) -> int:
        with self._lock:
            found, self._cancellations = self._cancellations, 0
            return found

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._inbox.put(CLOSE)

    def futures(self) -> list[Future[Any]]:
        with self._lock:
            return list(self._requests)

    def counts(self) -> tuple[int, int, int, int]:
        """Requests admitted, rejected, waiting; rows waiting."""
        with self._lock:
            return self._admitted, self._rejected, len(self._requests), self._rows


T = TypeVar("T")


class InferenceFuture(Future[T]):
    """The outputs of a request: `result()`, `add_done_callback(...)`, or `await` in a coroutine of any event loop.

    Cancelling a task that awaits it, as a timeout does, cancels a request that has not started.
    """

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # who awaits has it already; others start faster without

        return asyncio.wrap_future(self).__await__()

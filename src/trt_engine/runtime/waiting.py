"""The requests that wait to be joined to batches: plain data, the time is given. The batcher's one thread owns it."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Request", "Waiting"]


@dataclass(slots=True, eq=False)
class Request:
    """One caller's feeds and the future of its answer."""

    feeds: dict[str, Any] | None
    """None once its caller has cancelled it: the arrays are the caller's again."""
    rows: int
    nbytes: int
    key: Hashable
    """Requests of one key can be joined: same inputs, same types, same sizes but for the rows."""
    future: Future[Any]
    arrived_s: float
    due_s: float
    """When it goes in whatever company it has."""
    deadline_s: float = math.inf
    """When nobody wants its answer any more."""
    rank: float = 0.0
    """The lowest goes first: the arrival, less a head start for its priority."""
    waits: bool = field(default=True)

    @property
    def departed(self) -> bool:
        return self.future.cancelled()


class Waiting:
    """Who waits, in a queue for each key. `take` gives the next batch: of the queue whose oldest request was due first.

    Within a queue the lowest rank goes first and nobody is overtaken by a smaller request. A rank is a time, so whoever
    comes later has, at some time, the higher one: nobody waits for ever.
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
            _forget_gone(self._deadlines, len(self))

    def take(self, now_s: float, *, flush: bool = False) -> list[Request]:
        """The next batch that is full or due (any at all with `flush`); empty where there is none.

        A request that was cancelled is in it and takes no room.
        """
        while True:
            ready = [
                queue
                for queue in self._queues.values()
                if flush or queue.rows >= self._max_batch or queue.due_s() <= now_s
            ]
            if not ready:
                return []
            queue = min(ready, key=_Queue.due_s)
            batch = queue.take(self._max_batch)
            self._forget_empty(queue)
            if batch:
                return batch

    def expired(self, now_s: float) -> list[Request]:
        """Those whose deadline is over; they wait no longer."""
        over = set()
        while self._deadlines and (self._deadlines[0][0] <= now_s or not self._deadlines[0][2].waits):
            over.add(heapq.heappop(self._deadlines)[2])
        return self._filter(over.__contains__) if over else []

    def remove_departed(self) -> list[Request]:
        """Those whose callers have cancelled them; they wait no longer."""
        return self._filter(lambda request: request.departed)

    def remove_all(self) -> list[Request]:
        return self._filter(lambda request: True)

    def wakes_s(self) -> float:
        """When there is something to do, if nobody comes: a request is due, or expires."""
        first = min((queue.due_s() for queue in self._queues.values()), default=math.inf)
        return min(first, self.expires_s())

    def expires_s(self) -> float:
        """When the next deadline is over."""
        while self._deadlines and not self._deadlines[0][2].waits:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _filter(self, leaves: Callable[[Request], bool]) -> list[Request]:
        found = []
        for queue in list(self._queues.values()):
            found += queue.filter(leaves)
            self._forget_empty(queue)
        return found

    def _forget_empty(self, queue: _Queue) -> None:
        if not queue.entries:
            self._queues = {key: other for key, other in self._queues.items() if other is not queue}


class _Queue:
    """The requests of one key: by rank, and by the time they are due."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, Request]] = []
        self.dues: list[tuple[float, int, Request]] = []
        self.rows = 0

    def add(self, request: Request, number: int) -> None:
        heapq.heappush(self.entries, (request.rank, number, request))
        heapq.heappush(self.dues, (request.due_s, number, request))
        self.rows += request.rows
        _forget_gone(self.dues, len(self.entries))

    def due_s(self) -> float:
        while self.dues and not self.dues[0][2].waits:
            heapq.heappop(self.dues)
        return self.dues[0][0] if self.dues else math.inf

    def take(self, max_rows: int) -> list[Request]:
        """The first of them, as many as fit; one that is larger than a batch goes alone."""
        batch: list[Request] = []
        rows = 0
        while self.entries:
            request = self.entries[0][2]
            if batch and not request.departed and rows + request.rows > max_rows:
                break
            heapq.heappop(self.entries)
            request.waits = False
            self.rows -= request.rows
            batch.append(request)
            if not request.departed:
                rows += request.rows
        return batch

    def filter(self, leaves: Callable[[Request], bool]) -> list[Request]:
        gone = [entry[2] for entry in self.entries if leaves(entry[2])]
        if gone:
            for request in gone:
                request.waits = False
                self.rows -= request.rows
            self.entries = [entry for entry in self.entries if entry[2].waits]
            heapq.heapify(self.entries)
        return gone


def _forget_gone(heap: list[tuple[float, int, Request]], waiting: int) -> None:
    """Let go of requests that were answered long ago: they hold their callers' arrays."""
    if len(heap) > 64 + 2 * waiting:
        heap[:] = [entry for entry in heap if entry[2].waits]
        heapq.heapify(heap)

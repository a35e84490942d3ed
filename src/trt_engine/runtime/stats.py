"""Statistics across threads: a lock-free request counter and a latency histogram."""

from __future__ import annotations

import itertools
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

FOLD_MASK = 0x7FF
"""Every 2048th request folds the results of the others."""


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """A latency distribution. Quantiles are within 5 %; mean and maximum are exact."""

    count: int = 0
    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


class Histogram:
    """Times in logarithmic buckets, each 1/12 wider than the previous, in constant memory. For one thread at a time."""

    _PER_OCTAVE = 8
    _MIN_S = 1e-7

    def __init__(self) -> None:
        self._counts = [0] * (self._PER_OCTAVE * 44)  # 0.1 us to three weeks
        self._count = 0
        self._sum_s = self._max_s = 0.0

    def add(self, seconds: float) -> None:
        place = int(math.log2(max(seconds, self._MIN_S) / self._MIN_S) * self._PER_OCTAVE)
        self._counts[min(place, len(self._counts) - 1)] += 1
        self._count += 1
        self._sum_s += seconds
        self._max_s = max(self._max_s, seconds)

    def summary(self, zero_count: int = 0) -> LatencySummary:
        """The summary, including `zeros` samples of 0 s counted elsewhere."""
        count = self._count + zero_count
        if not count:
            return LatencySummary()
        p50, p99 = (self._quantile_s(share, zero_count) * 1e3 for share in (0.5, 0.99))
        return LatencySummary(count, self._sum_s / count * 1e3, p50, p99, self._max_s * 1e3)

    def _quantile_s(self, share: float, zeros: int) -> float:
        wanted, seen = share * (self._count + zeros), zeros
        if seen >= wanted:
            return min(self._MIN_S, self._max_s)
        for place, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return min(self._MIN_S * 2 ** ((place + 0.5) / self._PER_OCTAVE), self._max_s)
        return self._max_s


class RequestCounter:
    """Counts requests of many threads without a lock in the hot path.

    A request takes a number when it begins and appends its time when it ends, both atomic operations. Readers add up the
    times under a lock.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, bool]] = deque()
        self.begin: Callable[[], int] = itertools.count().__next__
        """Returns the request's number; the caller calls `fold` once per `FOLD` + 1 requests to bound memory."""
        self.end: Callable[[tuple[float, bool]], None] = self._ended.append
        """Takes (seconds, failed)."""
        self._reads = 0
        self._read_lock = threading.Lock()
        self._requests = self._failures = 0
        self._seconds = 0.0

    def totals(self) -> tuple[int, int, int, float]:
        """Finished requests, failures among them, requests in flight, seconds spent."""
        with self._read_lock:
            self._fold_ended()  # before `begin`: requests in flight may be overestimated, never underestimated
            begun = self.begin() - self._reads
            self._reads += 1
            return self._requests, self._failures, begun - self._requests, self._seconds

    def fold(self) -> None:
        with self._read_lock:
            self._fold_ended()

    def _fold_ended(self) -> None:
        for _ in range(len(self._ended)):
            seconds, failed = self._ended.popleft()
            self._requests += 1
            self._failures += failed
            self._seconds += seconds

"""What many threads did, counted: requests in flight without a lock on their way, times without keeping every one."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FOLD", "ONE_AT_A_TIME", "Histogram", "Tally", "Times"]

ONE_AT_A_TIME = getattr(sys, "_is_gil_enabled", lambda: True)()
"""Whether one thread at a time runs Python, and sees all that others did before."""

FOLD = 0x7FF
"""Every 2048th request adds up what the others left."""


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one kind. The quantiles are right within 5 %; mean and maximum are exact."""

    count: int = 0
    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


class Histogram:
    """Times by size, in buckets that grow by a twelfth of their size: a few hundred numbers, however many were added.

    For one thread at a time.
    """

    _PER_OCTAVE = 8
    _LEAST_S = 1e-7

    def __init__(self) -> None:
        self._counts = [0] * (self._PER_OCTAVE * 44)  # 0.1 us to three weeks
        self._count = 0
        self._sum_s = self._max_s = 0.0

    def add(self, seconds: float) -> None:
        place = int(math.log2(max(seconds, self._LEAST_S) / self._LEAST_S) * self._PER_OCTAVE)
        self._counts[min(place, len(self._counts) - 1)] += 1
        self._count += 1
        self._sum_s += seconds
        self._max_s = max(self._max_s, seconds)

    def read(self, zeros: int = 0) -> Times:
        """All of them, and so many times of nothing that somebody else has counted."""
        count = self._count + zeros
        if not count:
            return Times()
        p50, p99 = (self._quantile_s(share, zeros) * 1e3 for share in (0.5, 0.99))
        return Times(count, self._sum_s / count * 1e3, p50, p99, self._max_s * 1e3)

    def _quantile_s(self, share: float, zeros: int) -> float:
        wanted, seen = share * (self._count + zeros), zeros
        if seen >= wanted:
            return min(self._LEAST_S, self._max_s)
        for place, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return min(self._LEAST_S * 2 ** ((place + 0.5) / self._PER_OCTAVE), self._max_s)
        return self._max_s


class Tally:
    """Counts of what many threads do, without a lock on their way.

    A request takes a number when it begins and leaves its seconds when it ends; both are single operations the
    interpreter does not interrupt. Whoever reads adds up what was left, under the lock of the readers.
    """

    def __init__(self) -> None:
        self._ended: deque[tuple[float, bool]] = deque()
        self.begin: Callable[[], int] = itertools.count().__next__
        """The request's number. Every so often (`FOLD`) who got it calls `fold`, so that nothing piles up."""
        self.end: Callable[[tuple[float, bool]], None] = self._ended.append
        """Takes the seconds, and whether it failed."""
        self._looks = 0
        self._reading = threading.Lock()
        self._requests = self._failures = 0
        self._seconds = 0.0

    def read(self) -> tuple[int, int, int, float]:
        """Requests answered, failures among them, requests in flight, seconds spent."""
        with self._reading:
            self._add_up()  # before `begin`: what is in flight may be told too high, never too low
            begun = self.begin() - self._looks
            self._looks += 1
            return self._requests, self._failures, begun - self._requests, self._seconds

    def fold(self) -> None:
        with self._reading:
            self._add_up()

    def _add_up(self) -> None:
        for _ in range(len(self._ended)):
            seconds, failed = self._ended.popleft()
            self._requests += 1
            self._failures += failed
            self._seconds += seconds

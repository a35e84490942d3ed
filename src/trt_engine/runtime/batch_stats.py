"""Counters of a batcher: sizes, waits, padding, expired requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from trt_engine.errors import DeadlineExpired
from trt_engine.runtime.batch_queue import AdmissionControl, Request
from trt_engine.runtime.stats import Histogram, LatencySummary


@dataclass(frozen=True, slots=True)
class BatchStats:
    """Batcher statistics: `requests` is the sum of `answered`, `failed`, `dropped`, `expired`, `waiting`, `running`."""

    requests: int = 0
    """Accepted requests; excludes `refused`."""
    rows: int = 0
    """Rows of the requests that were run."""
    batches: int = 0
    """Runs of the engine, retries of a failed batch included."""
    mean_batch: float = 0.0
    """Mean rows per run."""
    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    """Requests cancelled before they started."""
    expired: int = 0
    """Requests not run because their deadline had passed."""
    rejected: int = 0
    """Requests rejected because the queue was full."""
    waiting: int = 0
    rows_waiting: int = 0
    running: int = 0
    padded_rows: int = 0
    """Padding rows that were run."""
    retries: int = 0
    """Failed batches that were bisected."""
    queue: LatencySummary = field(default_factory=LatencySummary)
    """Time from arrival to start of the batch."""
    latency: LatencySummary = field(default_factory=LatencySummary)
    """Time from arrival to result."""
    run: LatencySummary = field(default_factory=LatencySummary)
    """Time of one run, including concatenation of its inputs."""


class BatchCounters:
    """Counters written by owner and worker threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue, self._wait, self._run = Histogram(), Histogram(), Histogram()
        self._recent_s: deque[float] = deque(maxlen=16)
        self._rows = self._batches = self._padded_rows = self._retries = self._run_rows = 0
        self._started = self._finished = self._answered = self._failed = self._cancelled = self._expired = 0
        self.recent_max_run_s = 0.0
        """The longest recent run in s; requests with a deadline are dispatched earlier by it."""

    def count_started(self, batch: Sequence[Request], now_s: float) -> None:
        with self._lock:
            self._started += len(batch)
            for request in batch:
                self._rows += request.rows
                self._queue.add(now_s - request.arrived_s)

    def count_run(self, rows: int, padded: int, seconds: float) -> None:
        with self._lock:
            self._batches += 1
            self._run_rows += rows
            self._padded_rows += padded - rows
            self._run.add(seconds)
            self._recent_s.append(seconds)
            self.recent_max_run_s = max(self._recent_s)

    def count_retry(self) -> None:
        with self._lock:
            self._retries += 1

    def count_cancelled(self) -> None:
        with self._lock:
            self._cancelled += 1

    def count_finished(self, request: Request, result: object, now_s: float, *, ran: bool) -> None:
        with self._lock:
            self._finished += ran
            if isinstance(result, DeadlineExpired) and not ran:
                self._expired += 1
            elif isinstance(result, BaseException):
                self._failed += 1
            else:
                self._answered += 1
            self._wait.add(now_s - request.arrived_s)

    def stats(self, admission: AdmissionControl) -> BatchStats:
        with self._lock:
            entered, refused, _, rows_waiting = admission.counts()
            running = self._started - self._finished
            return BatchStats(
                requests=entered,
                rows=self._rows,
                batches=self._batches,
                mean_batch=self._run_rows / self._batches if self._batches else 0.0,
                answered=self._answered,
                failed=self._failed,
                cancelled=self._cancelled,
                expired=self._expired,
                rejected=refused,
                waiting=entered - self._answered - self._failed - self._cancelled - self._expired - running,
                rows_waiting=rows_waiting,
                running=running,
                padded_rows=self._padded_rows,
                retries=self._retries,
                queue=self._queue.summary(),
                latency=self._wait.summary(),
                run=self._run.summary(),
            )

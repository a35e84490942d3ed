"""Counts and durations of one served version. Written by the event loop alone, except for runs."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from trt_engine.errors import DeadlineExpired, Overloaded, TrtEngineError, UsageError

LATENCY_BOUNDS_S = (
    50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FAILURES = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Reasons of failed requests, as dashboards know them."""


class Histogram:
    """Counts of observations by upper bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, the last one `+Inf`."""
        found, count = [], 0
        for bound, more in zip((*map(_bound_text, self._bounds), "+Inf"), self._counts, strict=True):
            count += more
            found.append((bound, float(count)))
        return found


def _bound_text(bound: float) -> str:
    return repr(float(bound))


@dataclass(slots=True)
class Timing:
    """Points in time of one request, `time.perf_counter_ns`."""

    arrived_ns: int
    """The request was complete."""
    submitted_ns: int = 0
    """Its inputs were decoded."""
    started_ns: int = 0
    """The run that answered it began."""
    ended_ns: int = 0
    batch_wait_ns: int = 0
    """Part of the wait in which a context was free: the request waited for others."""
    rows: int = 0


@dataclass(slots=True)
class Duration:
    """A count of events and their total time."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def as_dict(self) -> dict[str, int]:
        return {"count": self.count, "ns": self.ns}


@dataclass(slots=True)
class RunCounts:
    """Runs of the engine at one number of rows."""

    count: int = 0
    ns: int = 0


class VersionStatistics:
    """What a version has done since it was loaded."""

    def __init__(self) -> None:
        self.success, self.fail, self.queue = Duration(), Duration(), Duration()
        self.compute_input, self.compute_infer, self.compute_output = Duration(), Duration(), Duration()
        self.failures = dict.fromkeys(FAILURES, 0)
        self.deadline_misses = 0
        self.inferences = 0
        """Rows of answered requests."""
        self.last_inference_ms = 0
        """Time of the last answer, ms since 1970."""
        self.queue_s, self.batch_wait_s = Histogram(LATENCY_BOUNDS_S), Histogram(LATENCY_BOUNDS_S)
        self.execute_s, self.total_s = Histogram(LATENCY_BOUNDS_S), Histogram(LATENCY_BOUNDS_S)
        self._runs_lock = threading.Lock()
        self._runs: dict[int, RunCounts] = {}
        self._batch_rows = Histogram(BATCH_BOUNDS)

    def count_success(self, timing: Timing) -> None:
        now_ns = time.perf_counter_ns()
        total_ns, queue_ns = now_ns - timing.arrived_ns, timing.started_ns - timing.submitted_ns
        self.success.add(total_ns)
        self.queue.add(queue_ns)
        self.compute_input.add(timing.submitted_ns - timing.arrived_ns)
        self.compute_infer.add(timing.ended_ns - timing.started_ns)
        self.compute_output.add(now_ns - timing.ended_ns)
        self.inferences += timing.rows
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.queue_s.add(queue_ns * 1e-9)
        self.batch_wait_s.add(timing.batch_wait_ns * 1e-9)
        self.execute_s.add((timing.ended_ns - timing.started_ns) * 1e-9)
        self.total_s.add(total_ns * 1e-9)

    def count_failure(self, error: BaseException, arrived_ns: int) -> None:
        self.fail.add(time.perf_counter_ns() - arrived_ns)
        self.failures[failure_reason(error)] += 1
        self.deadline_misses += isinstance(error, DeadlineExpired)

    def count_run(self, rows: int, ns: int) -> None:
        """From the threads that run batches."""
        with self._runs_lock:
            run = self._runs.setdefault(rows, RunCounts())
            run.count += 1
            run.ns += ns
            self._batch_rows.add(rows)

    def runs(self) -> dict[int, tuple[int, int]]:
        """Runs as (count, ns) by number of rows."""
        with self._runs_lock:
            return {rows: (run.count, run.ns) for rows, run in sorted(self._runs.items())}

    def batch_rows(self) -> tuple[list[tuple[str, float]], float]:
        """Buckets and sum of the rows of a run."""
        with self._runs_lock:
            return self._batch_rows.buckets(), self._batch_rows.total

    def as_dict(self) -> dict[str, Any]:
        """The statistics extension's fields of a version."""
        runs, none = self.runs(), Duration().as_dict()
        return {
            "last_inference": self.last_inference_ms,
            "inference_count": self.inferences,
            "execution_count": sum(count for count, _ in runs.values()),
            "inference_stats": {
                "success": self.success.as_dict(),
                "fail": self.fail.as_dict(),
                "queue": self.queue.as_dict(),
                "compute_input": self.compute_input.as_dict(),
                "compute_infer": self.compute_infer.as_dict(),
                "compute_output": self.compute_output.as_dict(),
                "cache_hit": none,
                "cache_miss": none,
            },
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": none,
                    "compute_infer": {"count": count, "ns": ns},
                    "compute_output": none,
                }
                for rows, (count, ns) in runs.items()
            ],
        }


def failure_reason(error: BaseException) -> str:
    """The reason label of a failed request."""
    if isinstance(error, Overloaded | DeadlineExpired):
        return "REJECTED"
    if isinstance(error, UsageError):
        return "OTHER"
    return "BACKEND" if isinstance(error, TrtEngineError) else "CANCELED"

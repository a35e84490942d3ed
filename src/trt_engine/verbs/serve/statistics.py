"""Counts and durations of a version, over all times that it was loaded. Written by the event loop alone, except for runs."""

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

    __slots__ = ("_bounds", "_counts", "_limits", "_unit", "sum")

    def __init__(self, bounds: tuple[float, ...], unit: float = 1) -> None:
        """Observations are in `unit` of the bounds'."""
        self._bounds, self._unit = bounds, unit
        self._limits = [bound / unit for bound in bounds]
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0

    def add(self, value: int) -> None:
        self._counts[bisect_left(self._limits, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def total(self) -> float:
        """Sum of the observations, in the unit of the bounds."""
        return self.sum * self._unit

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, the last one `+Inf`."""
        found, count = [], 0
        for bound, more in zip((*(repr(float(bound)) for bound in self._bounds), "+Inf"), self._counts, strict=True):
            count += more
            found.append((bound, float(count)))
        return found


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
    delivered_ns: int = 0
    """The event loop took up its outputs."""
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


class VersionStatistics:
    """What a version has done since it was loaded first."""

    def __init__(self) -> None:
        self.fail = Duration()
        self.compute_input_ns = self.compute_output_ns = 0
        """Times of answered requests."""
        self.failures = dict.fromkeys(FAILURES, 0)
        self.deadline_misses = 0
        self.inferences = 0
        """Rows of answered requests."""
        self.last_inference_ms = 0
        """Time of the last answer, ms since 1970."""
        self.queue, self.batch_wait, self.execute, self.total = (Histogram(LATENCY_BOUNDS_S, 1e-9) for _ in range(4))
        """Times of answered requests, added in ns."""
        self.padding_rows = 0
        self._runs_lock = threading.Lock()
        self._runs: dict[int, Duration] = {}
        self._batch_rows = Histogram(BATCH_BOUNDS)

    def count_success(self, timing: Timing) -> None:
        now_ns = time.perf_counter_ns()
        self.compute_input_ns += timing.submitted_ns - timing.arrived_ns
        self.compute_output_ns += now_ns - timing.delivered_ns
        self.inferences += timing.rows
        self.last_inference_ms = time.time_ns() // 1_000_000
        self.queue.add(timing.started_ns - timing.submitted_ns + timing.delivered_ns - timing.ended_ns)
        self.batch_wait.add(timing.batch_wait_ns)
        self.execute.add(timing.ended_ns - timing.started_ns)
        self.total.add(now_ns - timing.arrived_ns)

    def count_failure(self, error: BaseException, arrived_ns: int) -> None:
        self.fail.add(time.perf_counter_ns() - arrived_ns)
        self.failures[failure_reason(error)] += 1
        self.deadline_misses += isinstance(error, DeadlineExpired)

    def count_run(self, rows: int, ns: int, padding: int = 0) -> None:
        """From the threads that run batches; `padding` are those of the rows that no request has."""
        with self._runs_lock:
            self.padding_rows += padding
            self._runs.setdefault(rows, Duration()).add(ns)
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
        runs, none, answered = self.runs(), _duration(0, 0), self.total.count
        return {
            "last_inference": self.last_inference_ms,
            "inference_count": self.inferences,
            "execution_count": sum(count for count, _ in runs.values()),
            "inference_stats": {
                "success": _duration(answered, self.total.sum),
                "fail": _duration(self.fail.count, self.fail.ns),
                "queue": _duration(answered, self.queue.sum),
                "compute_input": _duration(answered, self.compute_input_ns),
                "compute_infer": _duration(answered, self.execute.sum),
                "compute_output": _duration(answered, self.compute_output_ns),
                "cache_hit": none,
                "cache_miss": none,
            },
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": none,
                    "compute_infer": _duration(count, ns),
                    "compute_output": none,
                }
                for rows, (count, ns) in runs.items()
            ],
        }


def _duration(count: int, ns: int) -> dict[str, int]:
    """As the statistics extension has it."""
    return {"count": count, "ns": ns}


def failure_reason(error: BaseException) -> str:
    """The reason label of a failed request."""
    if isinstance(error, Overloaded | DeadlineExpired):
        return "REJECTED"
    if isinstance(error, UsageError):
        return "OTHER"
    return "BACKEND" if isinstance(error, TrtEngineError) else "CANCELED"

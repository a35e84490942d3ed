"""The highest rate within a latency bound: doubled until it fails, then halved in between, on a log scale."""

from __future__ import annotations

import math
from collections.abc import Callable

from trt_engine.records.loadtest import LoadtestRecord, RateStep
from trt_engine.verbs.loadtest.config import LatencyBound

RESOLUTION = 1.05
"""The search ends when the lowest rate that failed is at most this many times the highest that passed."""
MAX_STEPS = 32
_KEEPS_UP = 0.9
LEAST_REQUESTS = 20
"""A rate with fewer requests in its step is too low to be measured."""


def find_rate(
    try_rate: Callable[[float], LoadtestRecord],
    first: float,
    bound: LatencyBound,
    *,
    lowest: float,
    on_step: Callable[[RateStep], None],
) -> LoadtestRecord | None:
    """The record of the highest rate that keeps the bound without an error, None where even `lowest` does not.

    A rate that fails though the server keeps up is tried once more: one disturbance does not end the search. Ends early
    at a record that is not complete.
    """
    best: LoadtestRecord | None = None
    passed, failed, rate, again = 0.0, math.inf, max(first, lowest), False
    for _ in range(MAX_STEPS):
        record = try_rate(rate)
        step = rate_step(record, rate, bound)
        on_step(step)
        if not record.complete:
            break
        again = not step.passed and not again and keeps_up(record)
        if again:
            continue
        if step.passed:
            passed, best = rate, record
        else:
            failed = rate
        if failed <= lowest or failed <= passed * RESOLUTION:
            break
        if math.isinf(failed):
            rate = passed * 2
        elif not passed:
            rate = max(failed / 2, lowest)
        else:
            rate = math.sqrt(passed * failed)
    return best


def keeps_up(record: LoadtestRecord) -> bool:
    """Whether the last answer came soon after the last request: an answer's usual time and a tenth of the test."""
    usual_ms = record.latency_percentile(10) or 0.0
    return record.wall_s <= record.duration_s / _KEEPS_UP + usual_ms / 1e3


def rate_step(record: LoadtestRecord, rate: float, bound: LatencyBound) -> RateStep:
    """Whether the record of a rate keeps the bound, and the server kept up: with a wide bound a queue may just grow."""
    measured = record.latency_percentile(bound.percent)
    passed = measured is not None and measured <= bound.limit_ms and not record.errors and keeps_up(record)
    return RateStep(rate, record.requests_per_s, measured, record.failed, passed)

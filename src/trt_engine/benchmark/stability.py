"""When a measurement cannot be trusted, and why, in words with figures.

Two rules, each where it says something:

- **by spread of single queries** (times from device events): the coefficient of variation of the compute time is above
  2.5 %, trtexec's own threshold from 10.13.2 on. A GPU left alone is far below it.
- **by means over time** (our protocol, and every host clock): single queries on a CPU always jitter, so the question is
  whether the *mean* can be repeated. The series is cut into blocks of equal time. It is unstable when the half-width of
  the 95 % interval of the mean over blocks is above 5 % of the mean, or when the last third differs from the first by
  more than 5 % (without the slowest twentieth of each, so that one interruption is no drift).

Fewer than 10 queries, and clocks held down by heat or by the power supply, are unstable by themselves. A power cap is not:
it is the usual state of a busy GPU, and is said as a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from trt_engine.records import Protocol, summarize

__all__ = [
    "CV_LIMIT_PCT",
    "DRIFT_LIMIT_PCT",
    "INTERVAL_LIMIT_PCT",
    "LEAST_QUERIES",
    "drift_pct",
    "instability",
    "interval_pct",
]

CV_LIMIT_PCT = 2.5
"""trtexec 10.13.2 and later (1.0 before): samples/common/sampleReporting.cpp."""
INTERVAL_LIMIT_PCT = 5.0
DRIFT_LIMIT_PCT = 5.0
LEAST_QUERIES = 10

# Student's t, 97.5 %, by degrees of freedom
_T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_HARMFUL = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})


def instability(samples_ms: Sequence[float], protocol: Protocol, throttled: Sequence[str] = ()) -> tuple[str, ...]:
    """The reasons why these compute times, in the order measured, are not stable; none when they are."""
    if len(samples_ms) < LEAST_QUERIES:
        return (f"{len(samples_ms)} queries were measured, expected at least {LEAST_QUERIES}",)
    reasons = []
    by_events = protocol.clock == "device events"
    summary = summarize(samples_ms, protocol.percentile_rule)
    if by_events and summary is not None and summary.cv_pct > CV_LIMIT_PCT:
        reasons.append(
            f"compute time varies from query to query: coefficient of variation {summary.cv_pct:.1f} %, "
            f"the limit is {CV_LIMIT_PCT:g} %"
        )
    if not by_events or protocol.name == "trt-engine":
        drift = drift_pct(samples_ms)
        if abs(drift) > DRIFT_LIMIT_PCT:
            way = "slower" if drift > 0 else "faster"
            reasons.append(
                f"the last third ran {abs(drift):.1f} % {way} than the first, the limit is {DRIFT_LIMIT_PCT:g} %"
            )
        width = interval_pct(samples_ms)
        if width > INTERVAL_LIMIT_PCT:
            reasons.append(
                f"the mean is known to ±{width:.1f} % only (95 % interval over blocks of time), "
                f"the limit is {INTERVAL_LIMIT_PCT:g} %"
            )
    if held := held_down(throttled):
        reasons.append(f"the GPU clocks were held down: {', '.join(held)}")
    return tuple(reasons)


def held_down(throttled: Iterable[str]) -> list[str]:
    """The reasons that slow a GPU down, of all those it gave for its clocks."""
    return sorted(_HARMFUL & set(throttled))


def drift_pct(samples_ms: Sequence[float]) -> float:
    """How much slower the last third of the queries is than the first, in per cent; negative is faster."""
    third = len(samples_ms) // 3
    if not third:
        return 0.0
    first, last = _settled_mean(samples_ms[:third]), _settled_mean(samples_ms[-third:])
    return 100 * (last - first) / first if first else 0.0


def _settled_mean(samples_ms: Sequence[float]) -> float:
    """The mean without the slowest twentieth."""
    kept = sorted(samples_ms)[: max(1, len(samples_ms) - math.ceil(len(samples_ms) / 20))]
    return math.fsum(kept) / len(kept)


def interval_pct(samples_ms: Sequence[float]) -> float:
    """Half-width of the 95 % interval of the mean over blocks of equal time, in per cent of the mean."""
    means = _block_means(samples_ms, min(10, max(3, len(samples_ms) // 4)))
    count = len(means)
    if count < 3:
        return math.inf if count else 0.0  # one query took most of the time: nothing is known of the mean
    mean = math.fsum(means) / count
    variance = math.fsum((value - mean) ** 2 for value in means) / (count - 1)
    return 100 * _T[count - 1] * math.sqrt(variance / count) / mean if mean else 0.0


def _block_means(samples_ms: Sequence[float], blocks: int) -> list[float]:
    """Mean of each block; a query belongs to the block its middle falls in, by the time spent computing until then."""
    total = math.fsum(samples_ms)
    if total <= 0:
        return []
    sums, counts = [0.0] * blocks, [0] * blocks
    spent = 0.0
    for value in samples_ms:
        block = min(int((spent + value / 2) / total * blocks), blocks - 1)
        sums[block] += value
        counts[block] += 1
        spent += value
    return [part / count for part, count in zip(sums, counts, strict=True) if count]

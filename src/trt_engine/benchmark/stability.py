"""Stability of a measurement, with the reasons where it is unstable.

Two rules:

- **by spread of single queries** (times from device events): the coefficient of variation of the compute time is above
  2.5 %, trtexec's own threshold from 10.13.2 on. An idle GPU is far below it.
- **by means over time** (the trt-engine protocol, and every host clock): single CPU queries always jitter, so the *mean*
  must be repeatable. The series is split into blocks of equal time. It is unstable when the half-width of
  the 95 % interval of the mean over blocks is above 5 % of the mean, or when the last third differs from the first by
  more than 5 % (without the slowest twentieth of each, so that one interruption does not count as drift).

Fewer than 10 queries, and clocks throttled by heat or by the power supply, are always unstable. A power cap is normal on a
busy GPU and only a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.percentiles import summarize

CV_LIMIT_PCT = 2.5
"""trtexec 10.13.2 and later (1.0 before): samples/common/sampleReporting.cpp."""
INTERVAL_LIMIT_PCT = 5.0
DRIFT_LIMIT_PCT = 5.0
MIN_QUERIES = 10

# Student's t, 97.5 %, by degrees of freedom
_STUDENT_T = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
_SLOWING_REASONS = frozenset({"hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown"})


def instability(samples_ms: Sequence[float], protocol: Protocol, throttled: Sequence[str] = ()) -> tuple[str, ...]:
    """Reasons why compute times in ms, in measured order, are unstable; empty when stable."""
    if len(samples_ms) < MIN_QUERIES:
        return (f"{len(samples_ms)} queries were measured, expected at least {MIN_QUERIES}",)
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
                f"the mean is only known to ±{width:.1f} % (95 % interval over blocks of time), "
                f"the limit is {INTERVAL_LIMIT_PCT:g} %"
            )
    if held := throttle_reasons(throttled):
        reasons.append(f"the GPU clocks were held down: {', '.join(held)}")
    return tuple(reasons)


def advice(record: BenchRecord) -> str:
    """How to stabilize a measurement, by the observed clocks and load: a sentence with commands."""
    load = max((state.load_average for state in record.clocks if state.load_average is not None), default=None)
    cores = record.environment.cpu_cores
    steps = []
    if held := throttle_reasons(reason for state in record.clocks for reason in state.throttled):
        steps.append(f"let the GPU cool down or raise its limit, as its clocks were held down ({', '.join(held)})")
    elif record.device.startswith("cuda") and len({state.sm_mhz for state in record.clocks} - {None}) > 1:
        steps.append("lock the GPU clocks, which changed during the run: `sudo nvidia-smi -lgc MHZ` (`-rgc` undoes it)")
    if record.device == "cpu":
        if load is not None and cores and load > cores / 2:
            steps.append(f"stop other programs (load average {load:g} on {cores} cores)")
        if record.backend == "onnxruntime" and record.runtime_info.get("threads") != "1":
            steps.append("use one thread, `-O intra_op_threads=1`, pinned to one core by `taskset -c 0`")
        else:
            steps.append("pin it to one core with `taskset -c 0`")
    if len(record.compute_ms) < MIN_QUERIES or not steps or not held:
        steps.append("measure longer: `--duration 30s`")
    return "; or ".join(steps)


def throttle_reasons(reasons: Iterable[str]) -> list[str]:
    """The throttle reasons that slow a GPU down, sorted."""
    return sorted(_SLOWING_REASONS & set(reasons))


def drift_pct(samples_ms: Sequence[float]) -> float:
    """Slowdown of the last third of the queries against the first, in percent."""
    third = len(samples_ms) // 3
    if not third:
        return 0.0
    first, last = _mean_without_slowest(samples_ms[:third]), _mean_without_slowest(samples_ms[-third:])
    return 100 * (last - first) / first if first else 0.0


def _mean_without_slowest(samples_ms: Sequence[float]) -> float:
    """Mean without the slowest 5 %."""
    kept = sorted(samples_ms)[: max(1, len(samples_ms) - math.ceil(len(samples_ms) / 20))]
    return math.fsum(kept) / len(kept)


def interval_pct(samples_ms: Sequence[float]) -> float:
    """Half-width of the 95 % interval of the mean over blocks of equal time, in percent of the mean."""
    means = _block_means(samples_ms, min(10, max(3, len(samples_ms) // 4)))
    count = len(means)
    if count < 3:
        return math.inf if count else 0.0  # one query took most of the time: the mean is unknown
    mean = math.fsum(means) / count
    variance = math.fsum((value - mean) ** 2 for value in means) / (count - 1)
    return 100 * _STUDENT_T[count - 1] * math.sqrt(variance / count) / mean if mean else 0.0


def _block_means(samples_ms: Sequence[float], blocks: int) -> list[float]:
    """Mean of each block; a query belongs to the block that contains its midpoint in compute time."""
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

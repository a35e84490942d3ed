"""Quick speed check: a quantised and an FP32 engine, run alternately for about a second."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

from trt_engine.format import format_ms
from trt_engine.records.parity import SpeedCheck

_SECONDS = 1.0
_MAX_SECONDS = 10.0
"""A model with fewer than `_MIN_PAIRS` pairs in this time is not judged."""
_MIN_PAIRS = 6
"""Fewer values give no 95 % interval of their median."""
_MAX_PAIRS = 500
_WARMUP_RUNS = 2


def measure_alternating(
    quantised: Callable[[], object],
    baseline: Callable[[], object],
    *,
    baseline_name: str,
    shapes: dict[str, tuple[int, ...]],
    clock: Callable[[], float] = time.perf_counter,
) -> SpeedCheck | None:
    """Both run alternately, the order reversed in every other pair; None for a model too slow for a result in seconds."""
    sides = (quantised, baseline)
    for run in sides * _WARMUP_RUNS:
        run()
    times: tuple[list[float], list[float]] = ([], [])
    began = clock()
    while (spent := clock() - began) < _MAX_SECONDS and len(times[0]) < _MAX_PAIRS:
        if spent >= _SECONDS and len(times[0]) >= _MIN_PAIRS:
            break
        for side in (0, 1) if len(times[0]) % 2 else (1, 0):
            started = clock()
            sides[side]()
            times[side].append(clock() - started)
    ratios = [one / other for one, other in zip(*times, strict=True) if other > 0]
    if len(ratios) < _MIN_PAIRS:
        return None
    low, high = median_interval(ratios)
    return SpeedCheck(
        baseline=baseline_name,
        protocol=f"whole calls in one process, run alternately for about {_SECONDS:g} s "
        f"after {_WARMUP_RUNS} warm-up runs each; "
        "one load of each: an indication, `trt-engine compare` measures",
        shapes=shapes,
        pairs=len(ratios),
        quantized_ms=statistics.median(times[0]) * 1e3,
        baseline_ms=statistics.median(times[1]) * 1e3,
        ratio=statistics.median(ratios),
        low=low,
        high=high,
    )


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median by order statistics: no assumption but independence."""
    ordered, count, tail, cut = sorted(values), len(values), 0.0, 0
    while (tail := tail + math.comb(count, cut) / 2**count) <= 0.025:
        cut += 1
    return ordered[max(cut - 1, 0)], ordered[count - max(cut, 1)]


def slowdown_text(precision: str, check: SpeedCheck, reason: str | None) -> str | None:
    """`int8 is 45 % slower than fp32 here (24.8 ms, 17.1 ms): ...`, `int8 is no faster than ...`; None if it is faster."""
    if check.is_faster:
        return None
    why = f": {reason}" if reason else ""
    pace = f"{100 * (check.ratio - 1):.0f} % slower" if check.is_slower else "no faster"
    return (
        f"{precision} is {pace} than fp32 here ({format_ms(check.quantized_ms)} and "
        f"{format_ms(check.baseline_ms)} in {check.pairs} alternating runs){why}"
    )

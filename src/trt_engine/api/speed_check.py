"""A quantised engine beside an FP32 one, alternately for about a second: is it faster at all?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

from trt_engine.engine import SpeedCheck
from trt_engine.figures import in_ms

__all__ = ["alternate", "median_interval", "slower_text", "speed_text"]

_SECONDS = 1.0
_MOST_SECONDS = 10.0
"""A model with fewer than `_LEAST_PAIRS` pairs in this time is not judged."""
_LEAST_PAIRS = 6
"""Fewer values give no 95 % interval of their median."""
_MOST_PAIRS = 500
_WARM_UP = 2


def alternate(
    quantised: Callable[[], object],
    plain: Callable[[], object],
    *,
    against: str,
    shapes: dict[str, tuple[int, ...]],
    clock: Callable[[], float] = time.perf_counter,
) -> SpeedCheck | None:
    """Both run in turns, the order reversed in every other pair; None for a model too slow to say anything in seconds."""
    sides = (quantised, plain)
    for run in sides * _WARM_UP:
        run()
    times: tuple[list[float], list[float]] = ([], [])
    began = clock()
    while (spent := clock() - began) < _MOST_SECONDS and len(times[0]) < _MOST_PAIRS:
        if spent >= _SECONDS and len(times[0]) >= _LEAST_PAIRS:
            break
        for side in (0, 1) if len(times[0]) % 2 else (1, 0):
            started = clock()
            sides[side]()
            times[side].append(clock() - started)
    ratios = [one / other for one, other in zip(*times, strict=True) if other > 0]
    if len(ratios) < _LEAST_PAIRS:
        return None
    low, high = median_interval(ratios)
    return SpeedCheck(
        against=against,
        protocol=f"whole calls in one process, run alternately for about {_SECONDS:g} s after {_WARM_UP} warm-up runs each; "
        "one load of each: an indication, `trt-engine compare` measures",
        shapes=shapes,
        pairs=len(ratios),
        quantised_ms=statistics.median(times[0]) * 1e3,
        float_ms=statistics.median(times[1]) * 1e3,
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


def speed_text(check: SpeedCheck) -> str:
    """`1.8 x as fast as fp32 (2.10 ms and 3.78 ms in 170 alternating runs, an indication)`."""
    pace = (
        f"{1 / check.ratio:.2g} x as fast as" if check.high < 1
        else f"{100 * (check.ratio - 1):.0f} % slower than" if check.low > 1
        else "no difference found from"
    )  # fmt: skip
    times = f"{in_ms(check.quantised_ms)} and {in_ms(check.float_ms)} in {check.pairs} alternating runs"
    return f"{pace} fp32 ({times}, an indication)"


def slower_text(precision: str, check: SpeedCheck, reason: str | None) -> str:
    """`int8 is 45 % slower than fp32 here (24.8 ms, 17.1 ms): ...`."""
    why = f": {reason}" if reason else ""
    return (
        f"{precision} is {100 * (check.ratio - 1):.0f} % slower than fp32 here ({in_ms(check.quantised_ms)} and "
        f"{in_ms(check.float_ms)} in {check.pairs} alternating runs){why}"
    )

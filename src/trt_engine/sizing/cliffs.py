"""Batch cliffs: sizes near N at which the engine is much slower than its neighbours say it should be.

Two things are true of an engine without cliffs: a larger batch gives at least as many images/s as a smaller one, and a
smaller batch takes no longer than a larger one. So every neighbour suggests a throughput: a smaller one its own, a larger
one its own times the ratio of the sizes. The second highest suggestion (the highest, below three) is what a size is held
against, so that one lucky measurement accuses nobody. A size below `THRESHOLD` of it is suspected, measured a second
time, and called a cliff if its better measurement falls short again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from trt_engine.records import CliffPoint

__all__ = ["THRESHOLD", "advice", "expected", "find", "window"]

THRESHOLD = 0.8
"""A size that delivers less than this share of what its neighbours suggest, twice, is a cliff."""
log = logging.getLogger(__name__)


def window(batch: int, width: int) -> tuple[int, ...]:
    """The sizes to look at: `batch - width` to `batch + width`, from 1 on."""
    return tuple(range(max(1, batch - width), batch + width + 1))


def expected(batch: int, images_per_s: Mapping[int, float]) -> float | None:
    """The throughput the other sizes suggest for `batch`; None when there is no other."""
    suggestions = sorted(
        (rate if other < batch else rate * batch / other for other, rate in images_per_s.items() if other != batch),
        reverse=True,
    )
    if not suggestions:
        return None
    return suggestions[1] if len(suggestions) > 2 else suggestions[0]


def find(sizes: Sequence[int], measure: Callable[[int], float | None]) -> tuple[CliffPoint, ...]:
    """Measure every size once, every suspected one twice, and say which are cliffs.

    `measure` gives images/s, or None for a size that cannot be measured (out of memory), which is left out.
    """
    rates: dict[int, float] = {}
    for size in sizes:
        rate = measure(size)
        if rate is not None:
            rates[size] = rate
    times = dict.fromkeys(rates, 1)
    for size in [size for size in rates if _short(size, rates)]:
        log.info("batch %d delivers %.1f images/s, its neighbours suggest more: measuring it again", size, rates[size])
        again = measure(size)
        if again is not None:
            times[size] += 1
            rates[size] = max(rates[size], again)
    return tuple(
        CliffPoint(
            batch=size,
            images_per_s=rates[size],
            expected_images_per_s=expected(size, rates),
            cliff=times[size] > 1 and _short(size, rates),
            measured=times[size],
        )
        for size in rates
    )


def _short(size: int, rates: Mapping[int, float]) -> bool:
    suggested = expected(size, rates)
    return suggested is not None and rates[size] < THRESHOLD * suggested


def advice(points: Sequence[CliffPoint]) -> str:
    """One sentence for a person: which sizes to avoid, which to prefer."""
    good = [point.batch for point in points if not point.cliff and point.batch & (point.batch - 1) == 0]
    prefer = f"prefer powers of two ({', '.join(map(str, good))})" if good else "prefer powers of two"
    cliffs = [point.batch for point in points if point.cliff]
    if not points:
        return "the scan measured nothing"
    if not cliffs:
        return f"no cliff from batch {points[0].batch} to {points[-1].batch}; {prefer}"
    return f"avoid batch {_ranges(cliffs)}; {prefer}"


def _ranges(sizes: Sequence[int]) -> str:
    """`17-19, 23`."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

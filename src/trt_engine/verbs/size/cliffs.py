"""Batch cliffs: batch sizes near N that are much slower than neighbouring sizes predict.

Without cliffs, a larger batch gives at least as many images/s as a smaller one, and a smaller batch takes no longer than a
larger one. Each neighbour thus predicts a throughput: a smaller one its own, a larger one its own times the ratio of the
sizes. The expected throughput is the second highest prediction (the highest of fewer than three), so one outlier does not
matter. A size below `THRESHOLD` times the expected throughput is measured again, and is a cliff if its better measurement
is still below.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from trt_engine.records.size import CliffPoint

THRESHOLD = 0.8
"""Fraction of the expected throughput below which a size, measured twice, is a cliff."""
log = logging.getLogger(__name__)


def scan_sizes(batch: int, width: int) -> tuple[int, ...]:
    """The batch sizes to scan: `batch - width` to `batch + width`, at least 1."""
    return tuple(range(max(1, batch - width), batch + width + 1))


def expected_rate(batch: int, images_per_s: Mapping[int, float]) -> float | None:
    """Throughput (images/s) predicted by the other sizes; None without others."""
    suggestions = sorted(
        (rate if other < batch else rate * batch / other for other, rate in images_per_s.items() if other != batch),
        reverse=True,
    )
    if not suggestions:
        return None
    return suggestions[1] if len(suggestions) > 2 else suggestions[0]


def find_cliffs(sizes: Sequence[int], measure: Callable[[int], float | None]) -> tuple[CliffPoint, ...]:
    """Measure every size once, slow ones twice, and mark the cliffs.

    `measure` returns images/s, or None for a size that is out of memory, which is omitted.
    """
    rates = {size: rate for size in sizes if (rate := measure(size)) is not None}
    times = dict.fromkeys(rates, 1)
    for size in [size for size in rates if _is_slow(size, rates)]:
        log.info("batch %d delivers %.1f images/s, less than expected: measuring it again", size, rates[size])
        again = measure(size)
        if again is not None:
            times[size] += 1
            rates[size] = max(rates[size], again)
    return tuple(
        CliffPoint(
            batch=size,
            images_per_s=rates[size],
            expected_images_per_s=expected_rate(size, rates),
            cliff=times[size] > 1 and _is_slow(size, rates),
            measured=times[size],
        )
        for size in rates
    )


def _is_slow(size: int, rates: Mapping[int, float]) -> bool:
    suggested = expected_rate(size, rates)
    return suggested is not None and rates[size] < THRESHOLD * suggested


def advice(points: Sequence[CliffPoint]) -> str:
    """One sentence: which sizes to avoid, which to prefer."""
    good = [point.batch for point in points if not point.cliff and point.batch & (point.batch - 1) == 0]
    prefer = f"prefer powers of two ({', '.join(map(str, good))})" if good else "prefer powers of two"
    cliffs = [point.batch for point in points if point.cliff]
    if not points:
        return "the scan measured nothing"
    if not cliffs:
        return f"no cliff from batch {points[0].batch} to {points[-1].batch}; {prefer}"
    return f"avoid batch {_format_ranges(cliffs)}; {prefer}"


def _format_ranges(sizes: Sequence[int]) -> str:
    """`17-19, 23`."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and size == runs[-1][-1] + 1:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)

"""Percentiles and means of samples, by the rule of each protocol."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PercentileRule = Literal["trtexec", "linear"]


def percentile(ascending: Sequence[float], percent: float, rule: PercentileRule = "trtexec") -> float:
    """The `percent`-th percentile of ascending values.

    `trtexec`: `v[max(n - 1 - int((1 - p/100) * n), 0)]` in single precision, no interpolation, so that p99 of 100 values is
    the largest (source: `findPercentile` in samples/common/sampleReporting.cpp of the public TensorRT repository).
    `linear`: interpolation between the two neighbours, numpy's default.
    """
    count = len(ascending)
    if not count:
        return math.nan
    if rule == "trtexec":
        exclude = int(_f32(_f32(1.0 - _f32(_f32(percent) / 100.0)) * count))
        return ascending[max(count - 1 - exclude, 0)]
    position = (count - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, count - 1)
    return ascending[low] + (ascending[high] - ascending[low]) * (position - low)


def _f32(value: float) -> float:
    """The nearest single-precision number."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True, slots=True)
class Summary:
    """One metric of one measurement, in ms."""

    min: float
    max: float
    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    cv_pct: float
    """Coefficient of variation: population standard deviation over the mean, in per cent."""


def summarize(samples_ms: Sequence[float], rule: PercentileRule = "trtexec") -> Summary | None:
    """The summary of samples in ms; None for none."""
    if not len(samples_ms):
        return None
    ascending = sorted(samples_ms)
    count = len(ascending)
    mean = math.fsum(ascending) / count
    middle = count // 2
    median = ascending[middle] if count % 2 else (ascending[middle - 1] + ascending[middle]) / 2
    variance = math.fsum((value - mean) ** 2 for value in ascending) / count
    return Summary(
        min=ascending[0],
        max=ascending[-1],
        mean=mean,
        median=median,
        p90=percentile(ascending, 90, rule),
        p95=percentile(ascending, 95, rule),
        p99=percentile(ascending, 99, rule),
        cv_pct=100 * math.sqrt(variance) / mean if mean else 0.0,
    )

"""Interleaved measurement of engines, and confidence intervals of their speed difference.

**Interleaving.** All engines are loaded and measured in rounds: one burst of queries each, in random order, so that machine
noise (another program, a falling clock) affects all alike and cancels within a round. The first queries of a burst are
discarded: they find the caches of another engine. A **restart** reloads all engines in rotated random order and discards
its first round. Memory placement biases an engine until it is reloaded, so a comparison without restarts takes that bias
for a difference, however long it runs.

**Interval.** A restart gives one difference: the median over rounds of the log ratio of burst medians. Restarts are the
bootstrap blocks, which keeps correlated samples together. The estimate is their 20 % trimmed mean; the interval is the
symmetric percentile-t with winsorized standard error (simulated in docs/compare.md: plain percentile and BCa intervals of
a dozen restarts have two to four times the nominal false-positive rate).

**p99**: restarts are grouped until each group has a hundred queries of each side; fewer than six groups give no interval,
but a warning.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from trt_engine.benchmark.closed_loop import QueryBurst
from trt_engine.records.compare import Interval, MetricDifference

MIN_RESTARTS = 6
"""Fewer blocks do not estimate their scatter."""
P99_GROUP_QUERIES = 100
"""Queries of each side for one p99."""
METHOD = (
    "paired in rounds; mean without the highest and lowest fifth of one log ratio for each load; symmetric percentile-t "
    "bootstrap over loads"
)
UNPAIRED_METHOD = (
    "not paired: each side's own blocks; mean of their logs without the highest and lowest fifth; symmetric percentile-t "
    "bootstrap of both sides"
)
_RESAMPLES = 2000
_TRIM = 0.2
_POWER = 0.8
Metric = Literal["median", "mean", "p99", "throughput"]
Array = npt.NDArray[np.float64]
Restart = tuple[tuple[QueryBurst, ...], ...]
"""Bursts of one restart, by round, then by side."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of one metric from the base, with its interval, p-value and detectable effect."""

    metric: Metric
    base: float
    other: float
    value: float
    """Log ratio, positive when slower."""
    std_error: float
    """Standard error of `value`."""
    resample_shifts: Array
    """Deviation of each resample from `value`."""
    resample_errors: Array
    """The standard error of each resample."""

    @property
    def resample_t(self) -> Array:
        """`|t|` of the resamples with nonzero scatter."""
        scattered = self.resample_errors > 1e-12 * np.median(self.resample_errors)
        found: Array = np.abs(self.resample_shifts[scattered]) / self.resample_errors[scattered]
        return found if found.size else np.zeros(1)

    def interval(self) -> Interval:
        """Confidence interval of 95 %, in percent."""
        reach = float(np.quantile(self.resample_t, 0.95)) * self.std_error if self.std_error else 0.0
        return Interval(_pct(self.value - reach), _pct(self.value), _pct(self.value + reach), 0.95)

    def p_value(self, threshold_pct: float) -> float:
        """Two-sided p-value of the hypothesis that it is slower by at most `threshold_pct`."""
        above = self.value - math.log1p(threshold_pct / 100)
        if above <= 0:
            return 1.0
        if self.std_error == 0:
            return 0.0
        return float(np.mean(self.resample_t >= above / self.std_error))

    def detectable_pct(self) -> float:
        """Minimum detectable effect at 80 % power, in percent, from the resamples' values and scatter."""
        if not self.std_error:
            return 0.0
        reach = float(np.quantile(self.resample_t, 0.95))
        return _pct(float(np.quantile(reach * self.resample_errors - self.resample_shifts, _POWER)))

    def to_record(self) -> MetricDifference:
        """The report record, judged by its own 95 % interval."""
        found = self.interval()
        return MetricDifference(
            metric=self.metric,
            baseline=self.base,
            other=self.other,
            unit="images/s" if self.metric == "throughput" else "ms",
            slower_pct=found,
            verdict="slower" if found.low > 0 else "faster" if found.high < 0 else "no difference found",
            min_detectable_pct=self.detectable_pct(),
        )


def paired_differences(
    restarts: Sequence[Restart], other: int, *, base: int = 0, batch: int = 1, least: int = MIN_RESTARTS
) -> tuple[list[Difference], list[str]]:
    """Differences of side `other` from `base` by metric, and warnings for metrics without one.

    `least` restarts are enough, two or more; fewer than `MIN_RESTARTS` have Student's interval.
    """
    if len(restarts) < least:
        return [], [f"{len(restarts)} loads are too few for an interval, expected at least {least}"]
    pairs = [(_samples(load, base), _samples(load, other)) for load in restarts]
    rows = {
        "median": [_median_of_rounds(load, base, other) for load in restarts],
        "mean": [_log_ratio(_mean(mine), _mean(its)) for its, mine in pairs],
        "throughput": [_log_ratio(_throughput(load, base), _throughput(load, other)) for load in restarts],
    }
    all_base, all_other = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    values = _values(all_base, all_other)
    values["throughput"] = tuple(
        batch * _throughput([turns for load in restarts for turns in load], side) for side in (base, other)
    )
    groups = _p99_groups([min(len(its), len(mine)) for its, mine in pairs])
    warnings = []
    if len(groups) >= MIN_RESTARTS:
        rows["p99"] = [
            _log_ratio(*(_p99(np.concatenate([pairs[index][side] for index in group])) for side in (1, 0)))
            for group in groups
        ]
    else:
        warnings.append(_too_few_queries(min(len(all_base), len(all_other)), len(groups)))
    found = [
        _paired_difference(metric, values[metric], np.array(rows[metric])) for metric in _METRICS if metric in rows
    ]
    return found, warnings


def unpaired_differences(
    base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]
) -> tuple[list[Difference], list[str]]:
    """Differences of two separately measured series of blocks of times in ms; no throughput."""
    if min(len(base), len(other)) < MIN_RESTARTS:
        return [], [
            f"{min(len(base), len(other))} blocks are too few for an interval, expected at least {MIN_RESTARTS} on each side"
        ]
    both = [[np.asarray(block, np.float64) for block in side] for side in (base, other)]
    values = _values(np.concatenate(both[0]), np.concatenate(both[1]))
    rows = {
        metric: [_logs([measure(block) for block in side]) for side in both]
        for metric, measure in (("median", _median), ("mean", _mean))
    }
    groups = [_p99_groups([len(block) for block in side]) for side in both]
    warnings = []
    if min(map(len, groups)) >= MIN_RESTARTS:
        rows["p99"] = [
            _logs([_p99(np.concatenate([side[i] for i in group])) for group in of])
            for side, of in zip(both, groups, strict=True)
        ]
    else:
        warnings.append(
            _too_few_queries(min(sum(len(block) for block in side) for side in both), min(map(len, groups)))
        )
    found = [_unpaired_difference(metric, values[metric], *rows[metric]) for metric in _METRICS if metric in rows]
    return found, warnings


def split_blocks(samples_ms: Sequence[float], count: int = 12) -> list[Sequence[float]]:
    """Split a series into blocks of consecutive queries."""
    edges = np.linspace(0, len(samples_ms), count + 1).astype(int)
    return [samples_ms[a:b] for a, b in itertools.pairwise(edges) if b > a]


def holm_correction(p_values: Sequence[float]) -> list[bool]:
    """Which p-values are significant at family-wise error rate 5 % (Holm 1979)."""
    answers = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > 0.05 / (len(p_values) - rank):
            break
        answers[index] = True
    return answers


_METRICS: tuple[Metric, ...] = ("median", "mean", "p99", "throughput")
_MAX_LOG_RATIO = math.log1p(1e4)
"""Largest reported log ratio, 1,000,000 %: few scattered restarts give unbounded intervals."""
_MIN_MS = 1e-6


def _pct(log_ratio: float) -> float:
    return 100 * math.expm1(min(log_ratio, _MAX_LOG_RATIO))


def _logs(values: Sequence[float]) -> Array:
    found: Array = np.log(np.maximum(values, _MIN_MS))
    return found


def _log_ratio(over: float, under: float) -> float:
    """Log ratio of two times, each at least the clock resolution."""
    return math.log(max(over, _MIN_MS) / max(under, _MIN_MS))


def _samples(load: Restart, side: int) -> Array:
    return np.concatenate([turns[side].samples_ms for turns in load]).astype(np.float64)


def _median(samples: Array) -> float:
    return float(np.median(samples))


def _mean(samples: Array) -> float:
    return float(np.mean(samples))


def _p99(samples: Array) -> float:
    return float(np.quantile(samples, 0.99))


def _throughput(rounds: Sequence[Sequence[QueryBurst]], side: int) -> float:
    """Queries per second."""
    wall_s = sum(turns[side].wall_s for turns in rounds)
    return sum(len(turns[side].samples_ms) for turns in rounds) / max(wall_s, _MIN_MS / 1e3)


def _median_of_rounds(load: Restart, base: int, other: int) -> float:
    medians = [[float(np.median(turns[side].samples_ms)) for turns in load] for side in (base, other)]
    return float(np.median([_log_ratio(mine, its) for its, mine in zip(*medians, strict=True)]))


def _values(base: Array, other: Array) -> dict[str, tuple[float, ...]]:
    return {
        "median": (_median(base), _median(other)),
        "mean": (_mean(base), _mean(other)),
        "p99": (_p99(base), _p99(other)),
    }


def _p99_groups(counts: Sequence[int]) -> list[list[int]]:
    """Group consecutive blocks until each group has enough queries for a p99; the rest joins the last."""
    groups: list[list[int]] = [[]]
    have = 0
    for index, count in enumerate(counts):
        if have >= P99_GROUP_QUERIES:
            groups.append([])
            have = 0
        groups[-1].append(index)
        have += count
    if have < P99_GROUP_QUERIES:
        last = groups.pop()
        if groups:
            groups[-1] += last
    return groups


def _too_few_queries(queries: int, groups: int) -> str:
    return (
        f"too few queries for an interval of p99: {queries} per side make {groups} groups of {P99_GROUP_QUERIES}, expected "
        f"at least {MIN_RESTARTS} (a longer `--duration`)"
    )


def _trimmed_mean(rows: Array) -> tuple[Array, Array]:
    """Trimmed mean and standard error of each row [..., N]."""
    count = rows.shape[-1]
    cut = int(_TRIM * count)  # at each end
    ordered = np.sort(rows, axis=-1)
    kept = ordered[..., cut : count - cut]
    winsorised = np.clip(ordered, kept[..., :1], kept[..., -1:])
    error = winsorised.std(axis=-1, ddof=1) / ((1 - 2 * cut / count) * math.sqrt(count))
    return kept.mean(axis=-1), error


@cache
def _resample_indices(count: int, seed: int = 0) -> npt.NDArray[np.intp]:
    return np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))


def _paired_difference(metric: Metric, values: tuple[float, ...], differences: Array) -> Difference:
    if len(differences) < MIN_RESTARTS:
        return _few_difference(metric, values, differences)
    mean, error = _trimmed_mean(differences)
    moved, errors = _resample(differences)
    return Difference(metric, values[0], values[1], float(mean), float(error), moved, errors)


def _few_difference(metric: Metric, values: tuple[float, ...], differences: Array) -> Difference:
    """The mean with Student's t, where blocks are too few to trim or resample; exact for normal ones."""
    count = len(differences)
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    moved: Array = error * _t_samples(count - 1)
    return Difference(
        metric, values[0], values[1], float(differences.mean()), error, moved, np.full(moved.shape, error)
    )


def _resample(rows: Array, seed: int = 0) -> tuple[Array, Array]:
    """Deviations of the resample means from the sample mean, and their standard errors.

    A resample of n has (n - 1) / n of the variance of n new blocks. Intervals need only the ratio of the two; the
    detectable effect needs their size, which is too small without this correction.
    """
    count = len(rows)
    fresh = math.sqrt(count / (count - 1))
    means, errors = _trimmed_mean(rows[_resample_indices(count, seed)])
    moved: Array = fresh * (means - _trimmed_mean(rows)[0])
    return moved, fresh * errors


@cache
def _t_samples(freedom: int) -> Array:
    return np.random.default_rng(0).standard_t(freedom, 50 * _RESAMPLES)


def _unpaired_difference(metric: Metric, values: tuple[float, ...], base: Array, other: Array) -> Difference:
    (mine, my_error), (its, its_error) = _trimmed_mean(other), _trimmed_mean(base)
    (my_moves, my_errors), (its_moves, its_errors) = _resample(other), _resample(base, 1)
    return Difference(
        metric,
        values[0],
        values[1],
        float(mine - its),
        float(np.hypot(my_error, its_error)),
        my_moves - its_moves,
        np.hypot(my_errors, its_errors),
    )

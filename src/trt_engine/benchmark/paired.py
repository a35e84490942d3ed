"""Engines measured in turns, and how much slower one is than another, with an interval.

**Turns.** Every engine is loaded, all side by side, and called in turns: a round is one turn of each, in an order drawn
anew. What the machine does meanwhile (another program, a clock that falls) meets all of them alike, so that what counts is
the difference within a round. A turn begins with queries that are left out: the first ones find the caches of the engine
before. A **load** is some rounds after everything was loaded anew, in an order that is drawn and rotated too; its first
round is dropped. Two loads of one engine differ for as long as they last, by where their memory came to lie: a comparison
that loads once can be as long as it likes and still takes that for a difference of the engines.

**The interval.** A load gives one difference: the median over its rounds of the log ratio of the turns' medians. Loads are
the blocks of a bootstrap: whatever is correlated within a load stays together. The estimate is their mean without the
highest and the lowest fifth; the interval is the symmetric percentile-t one, by the winsorised standard error
(docs/compare.md has the simulation it was chosen by; plain percentile and BCa intervals of a dozen loads raise two to four
times the alarms they promise).

**p99** needs queries beyond it: loads are taken together until each group has a hundred of each side, and with fewer than
six groups there is no interval and it is said.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from trt_engine.benchmark.loop import Turn, quiet, ready
from trt_engine.comparisons import Interval, MetricDifference
from trt_engine.engine import Engine
from trt_engine.errors import SetupError
from trt_engine.protocols import Session
from trt_engine.records import Protocol
from trt_engine.tensors import Tensors

__all__ = [
    "LEAST_LOADS",
    "METHOD",
    "P99_GROUP",
    "UNPAIRED",
    "Difference",
    "Load",
    "Metric",
    "Opened",
    "Schedule",
    "TakeTurn",
    "blocks_of",
    "holm",
    "interleave",
    "loaded",
    "paired",
    "unpaired",
]

LEAST_LOADS = 6
"""Fewer blocks say nothing of their own scatter."""
P99_GROUP = 100
"""Queries of each side that one p99 is made from."""
METHOD = (
    "paired in rounds; mean without the highest and lowest fifth of one log ratio for each load; symmetric percentile-t "
    "bootstrap over loads"
)
UNPAIRED = (
    "not paired: each side's own blocks; mean of their logs without the highest and lowest fifth; symmetric percentile-t "
    "bootstrap of both sides"
)

_RESAMPLES = 2000
_TRIM = 0.2
_POWER = 0.8

Metric = Literal["median", "mean", "p99", "throughput"]
Array = npt.NDArray[np.float64]

TakeTurn = Callable[[float, int, int], Turn]
"""Seconds, queries, and queries left out before: one turn of an engine that is loaded."""
Opened = Callable[[], AbstractContextManager[TakeTurn]]
"""Loads an engine for as long as the context lasts."""
Load = tuple[tuple[Turn, ...], ...]
"""By round, then by side."""


# ------------------------------------------------------------------------------------------------ turns


@dataclass(frozen=True, slots=True)
class Schedule:
    """How turns are dealt."""

    duration_s: float
    """For everything, loading too; passed where the fewest rounds take longer."""
    loads: int = 12
    queries: int = 2
    """In one turn, at least; fewer where a query takes longer than a turn may."""
    seed: int = 0
    rounds: int = 2
    """Kept of each load, at least."""
    alone: bool = False
    """Each turn is a process of its own: nothing to warm up, and one round is a load."""


@contextlib.contextmanager
def loaded(
    load: Callable[[], Session], engine: Engine, feeds: Tensors, protocol: Protocol, warnings: list[str]
) -> Iterator[TakeTurn]:
    """An engine in this process, loaded for as long as this lasts, measured as the closed loop measures."""
    session = load()
    try:
        with ready(session, engine, feeds, protocol, warnings) as query:
            if query.protocol != protocol:
                raise SetupError(
                    f"`{engine.path.name}` was loaded again and runs by other rules: {'; '.join(warnings)}",
                    hint="`--no-graph` measures all without one",
                )
            yield query.turn
    finally:
        session.close()


def interleave(
    sides: Sequence[Opened],
    schedule: Schedule,
    *,
    on_progress: Callable[[float, float], None] | None = None,
    kept: list[Load] | None = None,
) -> list[Load]:
    """The turns of all loads. `kept` is filled as they come: what an interruption leaves of them."""
    loads = [] if kept is None else kept
    rng = random.Random(schedule.seed)
    began = time.perf_counter()
    share_s = schedule.duration_s / schedule.loads
    order: list[int] = []
    with quiet():
        for number in range(schedule.loads):
            order = _next_order(order, number, len(sides), rng)
            until = began + share_s * (number + 1)
            loads.append(_one_load(sides, schedule, order, share_s, until, rng))
            if on_progress is not None:
                on_progress(time.perf_counter() - began, schedule.duration_s)
    return loads


def _next_order(before: list[int], number: int, count: int, rng: random.Random) -> list[int]:
    """Who is loaded first: every engine equally often at every place, beginning anywhere."""
    if number % count == 0:
        return rng.sample(range(count), count)
    return [*before[1:], before[0]]


def _one_load(
    sides: Sequence[Opened], schedule: Schedule, order: Sequence[int], share_s: float, until: float, rng: random.Random
) -> Load:
    with contextlib.ExitStack() as stack:
        turns: dict[int, TakeTurn] = {index: stack.enter_context(sides[index]()) for index in order}
        if schedule.alone:
            taken = {
                index: turns[index](share_s / len(sides), 1, 0) for index in rng.sample(range(len(sides)), len(sides))
            }
            return (tuple(taken[index] for index in range(len(sides))),)
        slowest_s = max(_settle(turns[index], share_s) for index in order)
        turn = _turn_length(share_s / len(sides), slowest_s, schedule)
        rounds: list[tuple[Turn, ...]] = []
        while len(rounds) <= schedule.rounds or time.perf_counter() < until:
            taken = {index: turns[index](*turn) for index in rng.sample(range(len(sides)), len(sides))}
            rounds.append(tuple(taken[index] for index in range(len(sides))))
        return tuple(rounds[1:])


_SETTLE = 0.04
"""Part of a load's time that each engine is run before the first round."""
_LONGEST_TURN_S = 0.2
_ROUNDS_WANTED = 24


def _settle(turn: TakeTurn, share_s: float) -> float:
    """Seconds of one query, after the first one."""
    return float(np.median(turn(_SETTLE * share_s, 1, 1).samples_ms)) / 1e3


def _turn_length(side_s: float, query_s: float, schedule: Schedule) -> tuple[float, int, int]:
    """Seconds, queries and queries left out of one turn: two dozen rounds of a load where `queries` fit into them, else
    fewer rounds, then fewer queries; where not even one and one before it fit, caches are nothing to a query so long."""
    most_s = side_s / (schedule.rounds + 2)
    fitting = int(most_s / query_s) if query_s > 0 else schedule.queries + 1
    turn_s = min(side_s / _ROUNDS_WANTED, _LONGEST_TURN_S)
    return turn_s, max(1, min(schedule.queries, fitting - 1)), 1 if fitting > 1 else 0


# ------------------------------------------------------------------------------------------------ what they tell


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric of the other side against the base: the estimate with all that a gate asks of it."""

    metric: Metric
    base: float
    other: float
    value: float
    """Log ratio, above zero for slower."""
    error: float
    """Standard error of it."""
    moved: Array
    """How far each resample's value lies from this one."""
    errors: Array
    """The standard error of each resample."""

    @property
    def resampled(self) -> Array:
        """`|t|` of the resamples that have a scatter."""
        scattered = self.errors > 1e-12 * np.median(self.errors)
        found: Array = np.abs(self.moved[scattered]) / self.errors[scattered]
        return found if found.size else np.zeros(1)

    def interval(self, level: float = 0.95) -> Interval:
        """In per cent."""
        reach = self._reach(level)
        return Interval(_pct(self.value - reach), _pct(self.value), _pct(self.value + reach), level)

    def p_value(self, threshold_pct: float) -> float:
        """How likely as much would be seen if it were slower by no more than `threshold_pct`; two-sided, as the interval."""
        above = self.value - math.log1p(threshold_pct / 100)
        if above <= 0:
            return 1.0
        if self.error == 0:
            return 0.0
        return float(np.mean(self.resampled >= above / self.error))

    def detectable_pct(self, level: float = 0.95) -> float:
        """The difference that four resamples out of five would have found: their scatter differs as well as their value."""
        if not self.error:
            return 0.0
        reach = float(np.quantile(self.resampled, level))
        return _pct(float(np.quantile(reach * self.errors - self.moved, _POWER)))

    def record(self) -> MetricDifference:
        """As it is told, by its own interval alone."""
        found = self.interval()
        return MetricDifference(
            metric=self.metric,
            base=self.base,
            other=self.other,
            unit="images/s" if self.metric == "throughput" else "ms",
            slower_pct=found,
            verdict="slower" if found.low > 0 else "faster" if found.high < 0 else "no difference found",
            detectable_pct=self.detectable_pct(),
        )

    def _reach(self, level: float) -> float:
        return float(np.quantile(self.resampled, level)) * self.error if self.error else 0.0


def paired(loads: Sequence[Load], other: int, *, base: int = 0, batch: int = 1) -> tuple[list[Difference], list[str]]:
    """What the turns tell of side `other` against `base`, and what they do not."""
    if len(loads) < LEAST_LOADS:
        return [], [f"{len(loads)} loads are too few for an interval, expected at least {LEAST_LOADS}"]
    pairs = [(_samples(load, base), _samples(load, other)) for load in loads]
    rows = {
        "median": [_median_of_rounds(load, base, other) for load in loads],
        "mean": [_ratio(_mean(mine), _mean(its)) for its, mine in pairs],
        "throughput": [_ratio(_rate(load, base), _rate(load, other)) for load in loads],
    }
    all_base, all_other = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    values = _values(all_base, all_other)
    values["throughput"] = tuple(
        batch * _rate([turns for load in loads for turns in load], side) for side in (base, other)
    )
    groups = _groups([min(len(its), len(mine)) for its, mine in pairs])
    said = []
    if len(groups) >= LEAST_LOADS:
        rows["p99"] = [
            _ratio(*(_p99(np.concatenate([pairs[index][side] for index in group])) for side in (1, 0)))
            for group in groups
        ]
    else:
        said.append(_too_few(min(len(all_base), len(all_other)), len(groups)))
    found = [_located(metric, values[metric], np.array(rows[metric])) for metric in _METRICS if metric in rows]
    return found, said


def unpaired(base: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[list[Difference], list[str]]:
    """The same of two series that were measured apart, each in blocks: times in ms, without a throughput."""
    if min(len(base), len(other)) < LEAST_LOADS:
        return [], [
            f"{min(len(base), len(other))} blocks are too few for an interval, expected at least {LEAST_LOADS} on each side"
        ]
    both = [[np.asarray(block, np.float64) for block in side] for side in (base, other)]
    values = _values(np.concatenate(both[0]), np.concatenate(both[1]))
    rows = {
        metric: [_logs([measure(block) for block in side]) for side in both]
        for metric, measure in (("median", _median), ("mean", _mean))
    }
    groups = [_groups([len(block) for block in side]) for side in both]
    said = []
    if min(map(len, groups)) >= LEAST_LOADS:
        rows["p99"] = [
            _logs([_p99(np.concatenate([side[i] for i in group])) for group in of])
            for side, of in zip(both, groups, strict=True)
        ]
    else:
        said.append(_too_few(min(sum(len(block) for block in side) for side in both), min(map(len, groups))))
    found = [_apart(metric, values[metric], *rows[metric]) for metric in _METRICS if metric in rows]
    return found, said


def blocks_of(samples_ms: Sequence[float], count: int = 12) -> list[Sequence[float]]:
    """A series in blocks of consecutive queries."""
    edges = np.linspace(0, len(samples_ms), count + 1).astype(int)
    return [samples_ms[a:b] for a, b in itertools.pairwise(edges) if b > a]


def holm(p_values: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several questions are answered with yes, so that a false yes among them is as rare as in one (Holm 1979)."""
    answers = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        answers[index] = True
    return answers


# ------------------------------------------------------------------------------------------------ figures

_METRICS: tuple[Metric, ...] = ("median", "mean", "p99", "throughput")
_MOST = 300.0
"""e to this is still a number."""
_LEAST_MS = 1e-6


def _pct(log_ratio: float) -> float:
    return 100 * math.expm1(min(log_ratio, _MOST))


def _logs(values: Sequence[float]) -> Array:
    found: Array = np.log(np.maximum(values, _LEAST_MS))
    return found


def _ratio(over: float, under: float) -> float:
    """Its log; a time too short for the clock is its shortest."""
    return math.log(max(over, _LEAST_MS) / max(under, _LEAST_MS))


def _samples(load: Load, side: int) -> Array:
    return np.concatenate([turns[side].samples_ms for turns in load]).astype(np.float64)


def _median(samples: Array) -> float:
    return float(np.median(samples))


def _mean(samples: Array) -> float:
    return float(np.mean(samples))


def _p99(samples: Array) -> float:
    return float(np.quantile(samples, 0.99))


def _rate(rounds: Sequence[Sequence[Turn]], side: int) -> float:
    """Queries per second."""
    wall_s = sum(turns[side].wall_s for turns in rounds)
    return sum(len(turns[side].samples_ms) for turns in rounds) / max(wall_s, _LEAST_MS / 1e3)


def _median_of_rounds(load: Load, base: int, other: int) -> float:
    medians = [[float(np.median(turns[side].samples_ms)) for turns in load] for side in (base, other)]
    return float(np.median([_ratio(mine, its) for its, mine in zip(*medians, strict=True)]))


def _values(base: Array, other: Array) -> dict[str, tuple[float, ...]]:
    return {
        "median": (_median(base), _median(other)),
        "mean": (_mean(base), _mean(other)),
        "p99": (_p99(base), _p99(other)),
    }


def _groups(counts: Sequence[int]) -> list[list[int]]:
    """Neighbours taken together until each group has queries enough for a p99; what is left over goes to the last."""
    groups: list[list[int]] = [[]]
    have = 0
    for index, count in enumerate(counts):
        if have >= P99_GROUP:
            groups.append([])
            have = 0
        groups[-1].append(index)
        have += count
    if have < P99_GROUP:
        last = groups.pop()
        if groups:
            groups[-1] += last
    return groups


def _too_few(queries: int, groups: int) -> str:
    return (
        f"too few queries for an interval of p99: {queries} of each side make {groups} groups of {P99_GROUP}, expected at "
        f"least {LEAST_LOADS} (a longer `--duration`)"
    )


# ------------------------------------------------------------------------------------------------ the interval


def _cut(count: int) -> int:
    """How many blocks are left out at each end."""
    return int(_TRIM * count)


def _trimmed(rows: Array) -> tuple[Array, Array]:
    """Trimmed mean and its standard error, of each row."""
    count = rows.shape[-1]
    cut = _cut(count)
    ordered = np.sort(rows, axis=-1)
    kept = ordered[..., cut : count - cut]
    winsorised = np.clip(ordered, kept[..., :1], kept[..., -1:])
    error = winsorised.std(axis=-1, ddof=1) / ((1 - 2 * cut / count) * math.sqrt(count))
    return kept.mean(axis=-1), error


@cache
def _draws(count: int, seed: int = 0) -> npt.NDArray[np.intp]:
    return np.random.default_rng(seed).integers(0, count, (_RESAMPLES, count))


def _located(metric: Metric, values: tuple[float, ...], differences: Array) -> Difference:
    mean, error = _trimmed(differences)
    moved, errors = _resampled(differences)
    return Difference(metric, values[0], values[1], float(mean), float(error), moved, errors)


def _resampled(rows: Array, seed: int = 0) -> tuple[Array, Array]:
    """How far the resamples' means lie from this one, and their standard errors.

    A resample of n has (n - 1) / n of the variance of n new blocks. An interval asks for the ratio of the two alone; what a
    next comparison would find is told by their size, and was told too well without this.
    """
    count = len(rows)
    fresh = math.sqrt(count / (count - 1))
    means, errors = _trimmed(rows[_draws(count, seed)])
    moved: Array = fresh * (means - _trimmed(rows)[0])
    return moved, fresh * errors


def _apart(metric: Metric, values: tuple[float, ...], base: Array, other: Array) -> Difference:
    (mine, my_error), (its, its_error) = _trimmed(other), _trimmed(base)
    (my_moves, my_errors), (its_moves, its_errors) = _resampled(other), _resampled(base, 1)
    return Difference(
        metric,
        values[0],
        values[1],
        float(mine - its),
        float(np.hypot(my_error, its_error)),
        my_moves - its_moves,
        np.hypot(my_errors, its_errors),
    )

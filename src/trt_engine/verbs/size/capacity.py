"""The largest number of sources within a deadline: late shares by simulation, search of the policy, bootstrap interval."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from trt_engine.config.streams import BatchPolicy
from trt_engine.records.streams import GpuCount
from trt_engine.verbs.size.arrivals import Sources, Times
from trt_engine.verbs.size.simulation import ServiceTimes, simulate

CONFIDENCE = 0.9
_REPLICATES = (3, 12)
"""Fewest and most simulations of one late share, each with other phases: fewer where one has many frames."""
_SITES, _SITE_FRAMES = 20, 60_000.0
"""Draws of phases of which one in ten is beyond the quantile; 5,000 frames in each."""
_BOOTSTRAPS = 40
_MOST_DEVIATION = 10.0
"""Limit of the scale of a curve drawn again, in standard deviations: two turns may give any number."""
_WIDEST = 100
"""Multiple of the number found at which its interval ends: turns that differ a lot draw times of next to nothing."""
_SPAN_BATCHES = 100
"""Batches, with the time to fill them, of the longest deadline that lengthens a simulation: its queue is soon stationary."""
_WAIT_SHARES = (0.0, 0.03, 0.1, 0.2, 0.35, 0.5)
"""Waits the search tries, as shares of the deadline."""
_SEED = 2026

TurnTimes = Mapping[tuple[int, int], Sequence[Sequence[float]]]
"""By (batch, busy contexts): the times in ms of each turn of the measurement."""


@dataclass
class StreamModel:
    """Late shares of a mix of sources on one device."""

    service: ServiceTimes
    mix: Sources
    deadline_s: float
    late: float
    """Allowed share of late frames."""
    seed: int = _SEED

    def late_share(self, count: int, policy: BatchPolicy) -> float:
        """Predicted share of late frames of `count` sources; 1 where more frames arrive than are served.

        The mean over phases: each replicate draws other ones. The same seed gives all policies the same arrivals.
        """
        return self.late_share_of(self.mix.scaled(count), policy)

    def allowed(self, count: int, policy: BatchPolicy) -> bool:
        """Whether the late share of `count` sources is allowed; stops once it cannot be."""
        return self.late_share_of(self.mix.scaled(count), policy, decide=True) <= self.late

    def late_share_of(self, sources: Sources, policy: BatchPolicy, *, decide: bool = False) -> float:
        """The late share of these sources; with `decide` only exact where it is allowed."""
        rate = sources.frames_per_s
        if rate == 0:
            return 0.0
        if rate >= self.service.rows_per_s(policy):
            return 1.0
        least, most = _REPLICATES
        frames = min(400_000.0, max(20_000.0, 40 / self.late if self.late else 400_000.0))
        late = total = 0
        for number, (more, size) in enumerate(islice(self._phases(sources, policy, frames), most), 1):
            late, total = late + more, total + size
            if (number >= least and total >= frames) or (decide and late > self.late * size * most):
                break
        return late / total if total else 0.0

    def worst_phases(self, streams: int, policy: BatchPolicy) -> float:
        """The late share that nine sites of ten stay within, each with phases of its own, which it keeps."""
        sources = self.mix.scaled(streams)
        if not 0 < sources.frames_per_s < self.service.rows_per_s(policy):
            return self.late_share(streams, policy)
        draws = islice(self._phases(sources, policy, _SITE_FRAMES), _SITES)
        return float(np.quantile([late / max(1, total) for late, total in draws], 0.9))

    def _phases(self, sources: Sources, policy: BatchPolicy, frames: float) -> Iterator[tuple[int, int]]:
        """Late and all frames of one draw of phases after the other, `frames` in the longest allowed number of draws."""
        rate = sources.frames_per_s
        batch_s = self.service.mean_s(policy.max_batch, policy.contexts)
        fill_s = min(policy.max_wait_ms / 1e3, policy.max_batch / rate)
        span_s = self.deadline_s
        if not sources.gaps:  # the bursts of a trace may be long
            span_s = min(span_s, _SPAN_BATCHES * (batch_s + fill_s))
        warm_up_s = max(sources.longest_period_s, 2 * span_s, 10 * batch_s)
        measured_s = max(frames / rate / _REPLICATES[1], 2 * sources.longest_period_s, 4 * span_s, 20 * batch_s)
        for draw in count():
            rng = np.random.default_rng((self.seed, draw))
            times = sources.arrivals(warm_up_s + measured_s, rng)
            done = simulate(times, policy, self.service, rng).latencies_s[np.searchsorted(times, warm_up_s) :]
            yield int(np.count_nonzero(done > self.deadline_s)), done.size

    def upper_bound(self, policy: BatchPolicy) -> int:
        """Sources whose frames the policy serves at all, whatever their latency."""
        per_source = self.mix.frames_per_s / self.mix.count
        return max(0, math.ceil(self.service.rows_per_s(policy) / per_source) - 1)

    def largest(self, policy: BatchPolicy, low: int = 0, high: int | None = None) -> int:
        """The largest number of sources with an allowed late share, from `low` to `high`; `low` is taken to be allowed."""
        most = self.upper_bound(policy) if high is None else high
        return largest_allowed(lambda count: self.allowed(count, policy), low, max(low, most))


def largest_allowed(allowed: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` that is allowed, by bisection; `low` is not tried."""
    return low + bisect_left(range(low + 1, high + 1), True, key=lambda count: not allowed(count))


def candidate_policies(service: ServiceTimes, deadline_s: float) -> Iterator[BatchPolicy]:
    """Policies to try: measured batches and contexts, waits up to half the deadline."""
    waits = sorted({float(f"{share * deadline_s * 1e3:.2g}") for share in _WAIT_SHARES})
    for contexts in service.contexts:
        for batch in service.batches:
            if batch == service.batches[0] or service.mean_s(batch, contexts) < deadline_s:
                yield from (BatchPolicy(batch, wait, contexts) for wait in (waits if batch > 1 else [0.0]))


def best_policy(model: StreamModel, policies: Iterable[BatchPolicy]) -> tuple[BatchPolicy, int]:
    """The policy that serves the most sources, and their number; among equals the lowest late share.

    A policy is searched only if it serves one source more than the best before it.
    """
    ordered = sorted(policies, key=model.upper_bound, reverse=True)
    best, most, share = ordered[0], 0, math.inf
    for policy in ordered:
        bound = model.upper_bound(policy)
        if bound < max(1, most):
            continue
        if bound > most and model.allowed(most + 1, policy):
            best, most, share = policy, model.largest(policy, most + 1, bound), math.inf
        if most:
            share = model.late_share(most, best) if share == math.inf else share
            own = model.late_share(most, policy)
            if own < share:
                best, share = policy, own
    if not most:
        best = min(ordered, key=lambda policy: model.late_share(1, policy))
    return best, most


def bootstrap_interval(
    draw: Callable[[np.random.Generator], ServiceTimes],
    model: StreamModel,
    policy: BatchPolicy,
    streams: int,
) -> tuple[int, int]:
    """90 % interval of the largest number that a later run serves: the curve drawn again (`resample`), with other phases."""
    rng = np.random.default_rng(model.seed)
    found = []
    for repeat in range(_BOOTSTRAPS):
        again = StreamModel(draw(rng), model.mix, model.deadline_s, model.late, seed=model.seed + 1 + repeat)
        found.append(_largest_near(again, policy, streams))
    low, high = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], method="weibull")  # unbiased coverage
    return min(streams, math.floor(low)), max(streams, math.ceil(high))


def _largest_near(model: StreamModel, policy: BatchPolicy, guess: int) -> int:
    """As `model.largest`, with steps that grow from `guess`."""
    bound = min(model.upper_bound(policy), _WIDEST * (guess + 1))
    low, high, step = 0, bound, max(1, round(0.02 * guess))
    count = min(guess, bound)
    while low < count <= high:
        if model.allowed(count, policy):
            low, count = count, count + step
        else:
            high, count = count - 1, count - step
        step *= 2
        if low and high < bound:
            break
    return model.largest(policy, low, high)


def resample(turns: TurnTimes, rng: np.random.Generator, *, padded: bool = False) -> ServiceTimes:
    """A curve as a later run of the same engine may be: the samples of each turn drawn in blocks, and all times scaled.

    The scale is that of one more turn: its logarithm has Student's t distribution, with the spread of the turns' means
    within a point of the curve. With few turns, or turns that differ, it is wide.
    """
    deviation = rng.standard_t(max(1, min(map(len, turns.values())) - 1))
    scale = math.exp(_turn_spread(turns) * min(max(deviation, -_MOST_DEVIATION), _MOST_DEVIATION))
    return ServiceTimes(
        {
            key: scale * np.concatenate([_draw_blocks(np.asarray(turn), rng) for turn in found])
            for key, found in turns.items()
        },
        padded=padded,
    )


def _turn_spread(turns: TurnTimes) -> float:
    """Standard deviation of a later turn's mean beside the mean of these turns, as a share; 0 for single turns."""
    logs = [np.log([np.mean(turn) for turn in found]) for found in turns.values() if len(found) > 1]
    return math.sqrt(np.mean([one.var(ddof=1) * (1 + 1 / one.size) for one in logs])) if logs else 0.0


def _draw_blocks(times: Times, rng: np.random.Generator) -> Times:
    """As many times in consecutive blocks, cyclic; neighbours are not independent."""
    length = max(1, round(times.size ** (1 / 3)))
    starts = rng.integers(0, times.size, math.ceil(times.size / length))
    indices = (starts[:, None] + np.arange(length)).ravel()[: times.size]
    drawn: Times = times.take(indices, mode="wrap")
    return drawn


def gpus_for(model: StreamModel, sources: Sources, policy: BatchPolicy, spare: int) -> GpuCount | None:
    """The fewest GPUs that carry the sources, spread evenly, and `spare` more; None if one source is too many for one."""

    def share(gpus: int) -> float:
        return model.late_share_of(sources.share_of(gpus), policy)

    if share(sources.count) > model.late:
        return None
    needed = sources.count - largest_allowed(
        lambda fewer: share(sources.count - fewer) <= model.late, 0, sources.count - 1
    )
    return GpuCount(sources.groups, needed, spare, needed + spare, share(needed))

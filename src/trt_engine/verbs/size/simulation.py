"""Discrete-event simulation of the batcher: arrivals, the dispatch rule of `runtime.batcher`, measured batch times.

The rule: a batch is dispatched when it is full or its oldest frame has waited `max_wait_ms`, and a worker is free; it takes
the oldest frames up to `max_batch`. With several contexts each running batch progresses at the speed measured for the
number of busy contexts (processor sharing). Events are batches, not frames.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.config.streams import BatchPolicy
from trt_engine.errors import UsageError
from trt_engine.verbs.size.arrivals import Times

_MOST_DRAWS = 1 << 16
"""Random draws before they repeat."""
_MOST_QUANTILES = 8192
_RowTimes = list[list[float]]
"""By rows of a batch (index 0 is unused): equally likely times in s."""


class ServiceTimes:
    """Times of a batch in s, by rows and busy contexts, from measured samples.

    Between measured batch sizes and context counts each quantile is interpolated linearly; `padded` batches take the time of
    the next measured size. Batches below the smallest measured one take its time (a fixed batch is padded).
    """

    padded = False

    def __init__(self, samples_ms: Mapping[tuple[int, int], npt.ArrayLike], *, padded: bool = False) -> None:
        """`samples_ms`: by (batch, busy contexts), each one or more times in ms."""
        self.padded = padded
        arrays = {key: np.sort(np.asarray(values, np.float64)) / 1e3 for key, values in samples_ms.items()}
        if not arrays or any(not values.size or values[0] < 0 for values in arrays.values()):
            raise UsageError("the latency curve has no samples", hint="measure it again")
        self.contexts = sorted({contexts for _, contexts in arrays})
        self.batches = sorted({batch for batch, _ in arrays})
        count = min(_MOST_QUANTILES, max(values.size for values in arrays.values()))
        at = (np.arange(count) + 0.5) / count
        self._quantiles = {key: np.quantile(values, at, method="inverted_cdf") for key, values in arrays.items()}
        self._rows: dict[tuple[int, int], _RowTimes] = {}

    def mean_s(self, rows: int, busy: int = 1) -> float:
        return float(self._times(rows, busy).mean())

    def rows_per_s(self, policy: BatchPolicy) -> float:
        """Largest rows/s of batches up to `max_batch` with all contexts busy."""
        sizes = {policy.max_batch, *(batch for batch in self.batches if batch <= policy.max_batch)}
        return max(policy.contexts * rows / self.mean_s(rows, policy.contexts) for rows in sizes)

    def covers(self, policy: BatchPolicy) -> bool:
        """Whether the policy is within the measured batches and contexts."""
        return policy.max_batch <= self.batches[-1] and policy.contexts <= self.contexts[-1]

    def table(self, max_batch: int, busy: int) -> _RowTimes:
        """Equally likely times in s by rows, as lists: the loops below read single values."""
        if max_batch > self.batches[-1] or busy > self.contexts[-1]:
            raise UsageError(
                f"the curve ends at batch {self.batches[-1]} and {self.contexts[-1]} contexts, the policy has "
                f"{max_batch} and {busy}",
                hint="measure a larger curve: `--max-batch`, `--contexts`",
            )
        key = (max_batch, busy)
        if key not in self._rows:
            self._rows[key] = [[], *(self._times(rows, busy).tolist() for rows in range(1, max_batch + 1))]
        return self._rows[key]

    def _times(self, rows: int, busy: int) -> Times:
        low, high, share = _neighbours(self.contexts, busy)
        return (1 - share) * self._at_contexts(rows, low) + share * self._at_contexts(rows, high)

    def _at_contexts(self, rows: int, contexts: int) -> Times:
        sizes = sorted(batch for batch, busy in self._quantiles if busy == contexts)
        if self.padded:
            rows = next((size for size in sizes if size >= rows), rows)
        low, high, share = _neighbours(sizes, rows)
        return (1 - share) * self._quantiles[low, contexts] + share * self._quantiles[high, contexts]


class ChainedTimes(ServiceTimes):
    """Times of a batch and of the second model on its crops, on one device: one after the other, by one worker.

    The crops of a batch run in batches of the second model's largest measured size, and a smaller last one. Its times are
    those of as many busy contexts, drawn independently of the first model's.
    """

    def __init__(self, first: ServiceTimes, second: ServiceTimes, crops: int) -> None:
        """`crops`: rows of the second model for each row of the first."""
        if second.contexts[-1] < first.contexts[-1]:
            raise UsageError(
                f"the curve of the crops has {second.contexts[-1]} contexts, that of the frames {first.contexts[-1]}",
                hint=f"`--contexts {','.join(map(str, second.contexts))}`",
            )
        self.contexts, self.batches = first.contexts, first.batches
        self._first, self._second, self._crops = first, second, crops
        self._rows: dict[tuple[int, int], _RowTimes] = {}

    def _times(self, rows: int, busy: int) -> Times:
        times = self._first._times(rows, busy)
        most = self._second.batches[-1]
        full, rest = divmod(rows * self._crops, most)
        rng = np.random.default_rng((rows, busy))
        for size in (*[most] * full, *[rest] * bool(rest)):
            added = self._second._times(size, busy)
            count = max(times.size, added.size)
            times = np.resize(times, count) + rng.permutation(np.resize(added, count))
        return times


def _neighbours(known: Sequence[int], wanted: int) -> tuple[int, int, float]:
    """The measured values around `wanted` and its place between them, 0 to 1; the ends are extended."""
    if wanted <= known[0]:
        return known[0], known[0], 0.0
    if wanted >= known[-1]:
        return known[-1], known[-1], 0.0
    index = bisect_right(known, wanted)
    low, high = known[index - 1], known[index]
    return low, high, (wanted - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Simulated:
    """Result of one simulation."""

    latencies_s: Times
    """By frame in order of arrival: arrival to the end of its batch."""
    batch_rows: npt.NDArray[np.int64]
    """Rows of each batch in order of dispatch."""

    def late_share(self, deadline_s: float, warm_up: int = 0) -> float:
        """Share of frames later than the deadline, without the first `warm_up`; 0 without frames."""
        kept = self.latencies_s[warm_up:]
        return float(np.count_nonzero(kept > deadline_s) / kept.size) if kept.size else 0.0


def simulate(arrivals_s: Times, policy: BatchPolicy, service: ServiceTimes, rng: np.random.Generator) -> Simulated:
    """Run sorted arrivals (s) through the batcher; the queue is not limited."""
    if not arrivals_s.size:
        return Simulated(np.empty(0), np.empty(0, np.int64))
    if policy.contexts > 1:
        ends, done = _simulate_shared(arrivals_s, policy, service, rng)
    elif policy.max_batch == 1:
        return _simulate_single_rows(arrivals_s, service, rng)
    else:
        ends, done = _simulate_one_worker(arrivals_s, policy, service, rng)
    last = np.array(ends, np.int64)
    rows = last - np.concatenate([[0], last[:-1]])
    return Simulated(np.repeat(np.array(done), rows) - arrivals_s, rows)


def _simulate_single_rows(arrivals_s: Times, service: ServiceTimes, rng: np.random.Generator) -> Simulated:
    """Batches of one row and one worker: Lindley's recursion, which is a running maximum."""
    times = rng.choice(np.array(service.table(1, 1)[1]), arrivals_s.size)
    total = np.cumsum(times)
    done = total + np.maximum.accumulate(arrivals_s - (total - times))
    return Simulated(done - arrivals_s, np.ones(arrivals_s.size, np.int64))


def _draws(rng: np.random.Generator, values: int, batches: int) -> tuple[list[int], int]:
    """Random indices below `values`, as many as batches or the most; a mask that repeats them."""
    size = min(_MOST_DRAWS, 1 << max(0, batches - 1).bit_length())
    return rng.integers(0, values, size).tolist(), size - 1


def _simulate_one_worker(
    arrivals_s: Times, policy: BatchPolicy, service: ServiceTimes, rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """For each batch: index after its last frame, and its end in s."""
    times = arrivals_s.data
    most, wait_s, count = policy.max_batch, policy.max_wait_ms / 1e3, len(times)
    table = service.table(most, 1)
    draws, mask = _draws(rng, len(table[1]), count)
    ends: list[int] = []
    done: list[float] = []
    first, free_s, number = 0, -math.inf, 0
    while first < count:
        full = first + most
        if full <= count and times[full - 1] <= free_s:  # full before the worker is free
            end, start_s = full, free_s
        else:
            start_s = times[first] + wait_s
            if full <= count and times[full - 1] < start_s:
                start_s = times[full - 1]
            if start_s < free_s:
                start_s = free_s
            end = bisect_right(times, start_s, first + 1, full if full < count else count)
        free_s = start_s + table[end - first][draws[number & mask]]
        number += 1
        ends.append(end)
        done.append(free_s)
        first = end
    return ends, done


def _simulate_shared(
    arrivals_s: Times, policy: BatchPolicy, service: ServiceTimes, rng: np.random.Generator
) -> tuple[list[int], list[float]]:
    """As `_simulate_one_worker`, for several contexts that share the device."""
    times = arrivals_s.data
    most, wait_s, count = policy.max_batch, policy.max_wait_ms / 1e3, len(times)
    tables = [service.table(most, 1), *(service.table(most, busy) for busy in range(1, policy.contexts + 1))]
    draws, mask = _draws(rng, len(tables[1][1]), count)
    ends: list[int] = []
    done: list[float] = []
    running: list[list[Any]] = []  # number of the batch, rows, draw, share left
    first, now_s = 0, -math.inf
    while first < count or running:
        table = tables[len(running)]
        end_s = math.inf
        for batch in running:
            left_s = batch[3] * table[batch[1]][batch[2]]
            if now_s + left_s < end_s:
                end_s, ending = now_s + left_s, batch
        start_s = math.inf
        if first < count and len(running) < policy.contexts:
            full = first + most
            start_s = times[first] + wait_s
            if full <= count and times[full - 1] < start_s:
                start_s = times[full - 1]
            if start_s < now_s:
                start_s = now_s
        next_s = end_s if end_s <= start_s else start_s
        if running and next_s > now_s:
            for batch in running:
                time_s = table[batch[1]][batch[2]]
                batch[3] -= (next_s - now_s) / time_s if time_s > 0 else batch[3]
        now_s = next_s
        if end_s <= start_s:
            running.remove(ending)
            done[ending[0]] = now_s
            continue
        full = first + most
        end = bisect_right(times, now_s, first + 1, full if full < count else count)
        running.append([len(ends), end - first, draws[len(ends) & mask], 1.0])
        ends.append(end)
        done.append(math.nan)
        first = end
    return ends, done

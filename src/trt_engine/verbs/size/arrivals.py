"""Arrival times of the frames of many sources: periodic with random phases, with jitter, or after a measured trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trt_engine.atomic_io import read_bounded
from trt_engine.config.streams import SourceGroup
from trt_engine.errors import UsageError

Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Sources:
    """Groups of sources; of each source every `interval + 1`-th frame is inferred.

    Without a trace the frames of a source are periodic from a random phase, each moved by a uniform random time within
    +-`jitter_ms`. With a trace each source repeats its gaps from a random place, scaled to the source's frame rate.
    """

    groups: tuple[SourceGroup, ...]
    jitter_ms: float = 0.0
    interval: int = 0
    gaps: tuple[float, ...] = ()
    """Times between frames of the trace, scaled to a mean of 1."""

    @property
    def count(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def frames_per_s(self) -> float:
        """Inferred frames per second of all sources."""
        return sum(group.count * group.fps for group in self.groups) / (self.interval + 1)

    @property
    def longest_period_s(self) -> float:
        return max(((self.interval + 1) / group.fps for group in self.groups if group.count), default=0.0)

    def scaled(self, count: int) -> Sources:
        """`count` sources in the proportion of the groups, by largest remainder."""
        total = self.count
        exact = [group.count * count / total for group in self.groups]
        whole = [math.floor(share) for share in exact]
        by_rest = sorted(range(len(exact)), key=lambda index: whole[index] - exact[index])
        for index in by_rest[: count - sum(whole)]:
            whole[index] += 1
        groups = (SourceGroup(many, group.fps) for many, group in zip(whole, self.groups, strict=True))
        return replace(self, groups=tuple(groups))

    def share_of(self, gpus: int) -> Sources:
        """The sources of the fullest of `gpus` GPUs, when each group is spread evenly."""
        return replace(
            self, groups=tuple(SourceGroup(math.ceil(group.count / gpus), group.fps) for group in self.groups)
        )

    def arrivals(self, duration_s: float, rng: np.random.Generator) -> Times:
        """Sorted arrival times in s, in [0, duration_s), of all inferred frames."""
        parts = [self._group_arrivals(group, duration_s, rng) for group in self.groups if group.count]
        if len(parts) == 1 and not (self.jitter_ms or self.gaps):
            return parts[0]
        return np.sort(np.concatenate([np.empty(0), *parts]), kind="stable")

    def _group_arrivals(self, group: SourceGroup, duration_s: float, rng: np.random.Generator) -> Times:
        period = (self.interval + 1) / group.fps
        if self.gaps:
            return self._trace_arrivals(group, duration_s, rng)
        phases = np.sort(rng.random(group.count) * period)
        ticks = np.arange(math.ceil(duration_s / period)) * period
        times = (ticks[:, None] + phases[None, :]).ravel()
        if self.jitter_ms:
            times += rng.uniform(-self.jitter_ms / 1e3, self.jitter_ms / 1e3, times.size)
            times = np.abs(times)
            return times[times < duration_s]
        return times[: np.searchsorted(times, duration_s)]

    def _trace_arrivals(self, group: SourceGroup, duration_s: float, rng: np.random.Generator) -> Times:
        gaps, found = np.asarray(self.gaps), []
        needed = math.ceil(duration_s * group.fps) + len(gaps)
        looped = np.concatenate([[0.0], np.cumsum(np.tile(gaps, needed // len(gaps) + 2))]) / group.fps
        for start in rng.integers(0, len(gaps), group.count):
            first = looped[start] + rng.random() * (looped[start + 1] - looped[start])
            last = np.searchsorted(looped, first + duration_s)
            times = looped[start + 1 : last : self.interval + 1] - first
            found.append(times[times < duration_s])
        return np.concatenate(found)


def read_trace(path: Path) -> tuple[float, ...]:
    """Gaps between the frames of one measured source, scaled to a mean of 1.

    The file has one arrival time in seconds per line. `UsageError` for fewer than 2 times or times that do not ascend.
    """
    try:
        times = np.array([float(word) for word in read_bounded(path).split()], np.float64)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read the arrival times in `{path}`: {error}", hint="one time in seconds per line"
        ) from error
    gaps = np.diff(times)
    if times.size < 2 or not np.isfinite(times).all() or gaps.min() < 0 or gaps.sum() <= 0:
        raise UsageError(
            f"`{path}` has {times.size} arrival times, expected 2 or more in ascending order",
            hint="one time in seconds per line",
        )
    return tuple((gaps / gaps.mean()).tolist())


def mix_text(groups: Sequence[SourceGroup]) -> str:
    """`200@25,50@30`."""
    return ",".join(map(str, groups))

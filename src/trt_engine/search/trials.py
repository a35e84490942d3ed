"""The log of a search: each measurement is a line of trials.jsonl as soon as it is made, and is never made twice."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from trt_engine.files import json_bytes
from trt_engine.records import SearchTrial, append
from trt_engine.search.selection import Group, Part, Stage

__all__ = ["Judge", "Outcome", "Trials", "digest_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one mixture of layers was measured to be."""

    metric: float
    images: int
    nbytes: int
    batch: int
    samples_ms: tuple[float, ...]
    """One time for each query; empty where no kernel computes the format."""
    measured_on: Literal["model", "kernels", "emulation"]


class Judge(Protocol):
    """Quantises these nodes and no other, and measures on so many pictures (None: all)."""

    def __call__(self, nodes: Collection[str], images: int | None) -> Outcome: ...


class Trials:
    """A `Measure` that remembers: what stands in the log under this search's digest is taken from there."""

    def __init__(self, path: Path, search: str, judge: Judge, *, subset: int, images: int, expected: int) -> None:
        self.path = path
        self.made: list[SearchTrial] = []
        """Those of this search that were asked for, in order, each once."""
        self.measured = 0
        """How many of them were measured now, not read."""
        self._search = search
        self._judge = judge
        self._pictures: dict[Part, int | None] = {"subset": subset if subset < images else None, "whole": None}
        self._expected = expected
        self._known = {trial.key: trial for trial in _read(path)}
        self._asked: dict[str, SearchTrial] = {}
        self._spent: list[float] = []
        self._base: dict[int | None, float] = {}

    def __call__(self, groups: Sequence[Group], part: Part, stage: Stage) -> float:
        return self.trial(groups, part, stage).metric

    def trial(self, groups: Sequence[Group], part: Part, stage: Stage) -> SearchTrial:
        """The measurement, from the log or made now."""
        nodes = sorted({name for group in groups for name in group.nodes})
        images = self._pictures[part]
        key = digest_of([self._search, images, nodes])
        if key in self._asked:
            return self._asked[key]
        found = self._known.get(key)
        if found is None:
            began = time.monotonic()
            outcome = self._judge(nodes, images)
            found = SearchTrial(
                key=key,
                search=self._search,
                stage=stage,
                nodes=tuple(nodes),
                macs=sum(group.macs for group in groups),
                metric=outcome.metric,
                images=outcome.images,
                nbytes=outcome.nbytes,
                batch=outcome.batch,
                samples_ms=outcome.samples_ms,
                measured_on=outcome.measured_on,
                seconds=time.monotonic() - began,
            )
            append(self.path, found)
            self.measured += 1
        self._asked[key] = found
        self.made.append(found)
        self._spent.append(found.seconds)
        if not nodes:
            self._base[images] = found.metric
        self._say(found, groups, images)
        return found

    def _say(self, trial: SearchTrial, groups: Sequence[Group], images: int | None) -> None:
        what = groups[0].nodes[0] if trial.stage == "alone" else f"{len(trial.nodes)} layers"
        base = self._base.get(images)
        drop = f" ({trial.metric - base:+.4f})" if base is not None and trial.nodes else ""
        left = max(self._expected - len(self.made), 0)
        # the last few say more than the first, which were over the whole dataset
        recent = self._spent[-5:]
        wait = f"; about {_duration(left * sum(recent) / len(recent))} left" if left else ""
        log.info(
            "[%d of at most about %d] %s, %s on %d pictures: %.4f%s, %.1f s%s",
            len(self.made), max(self._expected, len(self.made)), trial.stage, what, trial.images, trial.metric, drop,
            trial.seconds, wait,
        )  # fmt: skip


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _read(path: Path) -> list[SearchTrial]:
    """The whole lines of the log; a line that a killed run left half is passed over, and measured again."""
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(line, type=SearchTrial))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if line.strip():
                log.warning("line %d of `%s` is no trial and is passed over", number, path)
    return found


def digest_of(value: Any) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(json_bytes(value)).hexdigest()[:16]

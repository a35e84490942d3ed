"""The log of a search: each measurement is appended to trials.jsonl at once and never repeated."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from trt_engine.atomic_io import decode_json, encode_json, read_bounded, write_atomic
from trt_engine.records.base import append_record
from trt_engine.records.search import SearchTrial, TrialResult
from trt_engine.verbs.search.selection import DataPart, LayerGroup, Stage

log = logging.getLogger(__name__)


class RunTrial(Protocol):
    """Quantizes only these nodes and measures on that many images (None: all)."""

    def __call__(self, nodes: Collection[str], images: int | None) -> TrialResult: ...


class TrialLog:
    """A `Measure` that reuses the measurements logged under this search's digest."""

    def __init__(
        self, path: Path, search: str, run_trial: RunTrial, *, subset: int, images: int, expected: int
    ) -> None:
        self.path = path
        self.trials: list[SearchTrial] = []
        """The measurements requested by this search, in order, each once."""
        self.measured = 0
        """Number of new measurements."""
        self._search = search
        self._run_trial = run_trial
        self._image_counts: dict[DataPart, int | None] = {"subset": subset if subset < images else None, "whole": None}
        self._expected = expected
        self._known = {trial.key: trial for trial in _read_trials(path)}
        self._by_key: dict[str, SearchTrial] = {}
        self._durations: list[float] = []
        self._base: dict[int | None, float] = {}

    def __call__(self, groups: Sequence[LayerGroup], part: DataPart, stage: Stage) -> float:
        return self.trial(groups, part, stage).metric

    def trial(self, groups: Sequence[LayerGroup], part: DataPart, stage: Stage) -> SearchTrial:
        """Return the measurement, from the log or newly measured."""
        nodes = sorted({name for group in groups for name in group.nodes})
        images = self._image_counts[part]
        key = json_digest([self._search, images, nodes])
        if key in self._by_key:
            return self._by_key[key]
        found = self._known.get(key)
        if found is None:
            began = time.monotonic()
            outcome = self._run_trial(nodes, images)
            found = SearchTrial(
                key=key,
                search=self._search,
                stage=stage,
                nodes=tuple(nodes),
                macs=sum(group.macs for group in groups),
                seconds=time.monotonic() - began,
                **dataclasses.asdict(outcome),
            )
            append_record(self.path, found)
            self.measured += 1
        self._by_key[key] = found
        self.trials.append(found)
        self._durations.append(found.seconds)
        if not nodes:
            self._base[images] = found.metric
        self._log_trial(found, groups, images)
        return found

    def _log_trial(self, trial: SearchTrial, groups: Sequence[LayerGroup], images: int | None) -> None:
        what = groups[0].nodes[0] if trial.stage == "alone" else f"{len(trial.nodes)} layers"
        base = self._base.get(images)
        drop = f" (drop {base - trial.metric:+.4f})" if base is not None and trial.nodes else ""
        left = max(self._expected - len(self.trials), 0)
        # the last few predict better than the first, which ran the whole dataset
        recent = self._durations[-5:]
        left_s = left * sum(recent) / len(recent)
        remaining = f"{left_s:.0f} s" if left_s < 120 else f"{left_s / 60:.0f} min"
        wait = f"; at most about {remaining} left" if left else ""
        log.info(
            "[%d of at most about %d] %s, %s on %d images: %.4f%s, %.1f s%s",
            len(self.trials), max(self._expected, len(self.trials)), trial.stage, what, trial.images, trial.metric, drop,
            trial.seconds, wait,
        )  # fmt: skip


def _read_trials(path: Path) -> list[SearchTrial]:
    """Read the complete lines of the log; an incomplete line is removed and measured again."""
    if not path.exists():
        return []
    found, lines = [], read_bounded(path).splitlines()
    kept = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(decode_json(line, SearchTrial))
            kept.append(line + b"\n")
        except (msgspec.MsgspecError, UnicodeDecodeError):
            if line.strip():
                log.warning("line %d of `%s` is not a trial and is removed", number, path)
    if len(kept) < len(lines):
        write_atomic(path, b"".join(kept))
    return found


def json_digest(value: Any) -> str:
    """A short digest of a JSON value."""
    return hashlib.sha256(encode_json(value)).hexdigest()[:16]

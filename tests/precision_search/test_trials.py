"""The log of a search: what was measured once is never measured again."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection
from pathlib import Path

import pytest

from trt_engine.records.search import TrialResult
from trt_engine.verbs.search.selection import LayerGroup, select
from trt_engine.verbs.search.trial import TrialLog

GROUPS = [LayerGroup((f"layer{index}",), 0.125) for index in range(8)]


class Judge:
    """Layer 5 ruins accuracy; stops after `lives` measurements as a killed run does."""

    def __init__(self, lives: int = 1000) -> None:
        self.lives = lives
        self.asked: list[tuple[tuple[str, ...], int | None]] = []

    def __call__(self, nodes: Collection[str], images: int | None) -> TrialResult:
        if len(self.asked) == self.lives:
            raise KeyboardInterrupt
        self.asked.append((tuple(nodes), images))
        metric = 0.9 - 0.4 * ("layer5" in nodes)
        return TrialResult(metric, images or 100, 1000 - 10 * len(nodes), 8, (1.0, 1.1), "kernels")


def trials(path: Path, judge: Judge, *, search: str = "s", subset: int = 20, images: int = 100) -> TrialLog:
    return TrialLog(path, search, judge, subset=subset, images=images, expected=20)


def test_a_killed_search_started_again_makes_only_the_measurements_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    uninterrupted = Judge()
    expected = select(GROUPS, trials(tmp_path / "other.jsonl", uninterrupted), 0.01)
    first, second = Judge(lives=5), Judge()
    with pytest.raises(KeyboardInterrupt):
        select(GROUPS, trials(path, first), 0.01)
    again = trials(path, second)
    assert select(GROUPS, again, 0.01) == expected
    assert first.asked + second.asked == uninterrupted.asked
    assert again.measured == len(second.asked) == len(uninterrupted.asked) - 5
    assert len(again.trials) == len(uninterrupted.asked)


def test_a_line_that_was_cut_off_is_said_and_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trials.jsonl"
    select(GROUPS, trials(path, Judge()), 0.01)
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b'"metric"')])
    caplog.set_level(logging.WARNING, "trt_engine")
    select(GROUPS, trials(path, judge := Judge()), 0.01)
    assert len(judge.asked) == 1
    assert "is not a trial" in caplog.text
    assert len([json.loads(line) for line in path.read_bytes().splitlines()]) == len(whole.splitlines())
    select(GROUPS, trials(path, idle := Judge()), 0.01)
    assert idle.asked == []


@pytest.mark.parametrize("change", [{"search": "another"}, {"subset": 30}])
def test_what_was_measured_under_other_settings_does_not_count(tmp_path: Path, change: dict[str, str | int]) -> None:
    path = tmp_path / "trials.jsonl"
    trials(path, Judge()).trial(GROUPS[:1], "subset", "alone")
    given = {"search": "s", "subset": 20} | change
    other = trials(path, judge := Judge(), search=str(given["search"]), subset=int(given["subset"]))
    other.trial(GROUPS[:1], "subset", "alone")
    assert len(judge.asked) == 1


def test_a_subset_as_large_as_the_data_is_the_data(tmp_path: Path) -> None:
    made = trials(tmp_path / "trials.jsonl", judge := Judge(), subset=100)
    made.trial(GROUPS[:1], "subset", "alone")
    made.trial(GROUPS[:1], "whole", "verified")
    assert judge.asked == [(("layer0",), None)]


def test_progress_says_what_was_measured_and_how_much_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trt_engine")
    made = trials(tmp_path / "trials.jsonl", Judge())
    made.trial((), "subset", "baseline")
    made.trial(GROUPS[5:6], "subset", "alone")
    assert "[2 of at most about 20] alone, layer5 on 20 images: 0.5000 (drop +0.4000)" in caplog.text
    assert "left" in caplog.text

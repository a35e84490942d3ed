"""Arrivals of an open loop: at the rate, by the seed, or as recorded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trt_engine.errors import UsageError
from trt_engine.verbs.loadtest.config import LoadtestConfig
from trt_engine.verbs.loadtest.generator import arrival_times, read_arrivals
from trt_engine.verbs.loadtest.run import load_timing


@pytest.mark.parametrize("kind", ["poisson", "constant", "bursts"])
def test_arrivals_come_at_the_rate_in_order_within_the_time(kind) -> None:
    times = arrival_times(kind, 1000.0, 20.0, seed=1)
    assert len(times) == pytest.approx(20_000, rel=0.05)
    assert np.all(np.diff(times) >= 0) and times[0] >= 0 and times[-1] < 20


def test_poisson_gaps_have_the_spread_of_independent_clients() -> None:
    gaps = np.diff(arrival_times("poisson", 500.0, 60.0, seed=3))
    assert np.std(gaps) / np.mean(gaps) == pytest.approx(1, abs=0.05)  # exponential: deviation equals mean


def test_bursts_come_together() -> None:
    times = arrival_times("bursts", 100.0, 10.0, seed=2, burst=8)
    assert len(times) % 8 == 0 and set(np.unique(times, return_counts=True)[1]) == {8}


@pytest.mark.parametrize("kind", ["poisson", "bursts"])
def test_equal_seeds_give_equal_arrivals(kind) -> None:
    first, again, other = (arrival_times(kind, 100.0, 5.0, seed=seed) for seed in (7, 7, 8))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_more_requests_than_memory_are_refused() -> None:
    with pytest.raises(UsageError, match="more than"):
        arrival_times("constant", 1e9, 3600.0)


def test_a_recording_begins_with_its_first_arrival(tmp_path: Path) -> None:
    text = tmp_path / "times.txt"
    text.write_text("# seconds\n1700000001.5\n1700000000.0  # the first\n\n1700000004\n")
    assert read_arrivals(text).tolist() == [0, 1.5, 4]
    records = tmp_path / "loadtest.jsonl"
    records.write_text("".join(json.dumps({"sent_s": times}) + "\n" for times in ([5.0], [0.5, 1.0])))
    assert read_arrivals(records).tolist() == [0, 0.5]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.txt", "soon\n"),
        ("a.txt", ""),
        ("a.txt", "1\nnan\n"),
        ("a.txt", "0\n1e300\n"),
        ("a.txt", "0\n1e10\n"),
        ("a.jsonl", "{}\n"),
        ("a.jsonl", "["),
        ("a.jsonl", ""),
    ],
)
def test_what_is_not_a_recording_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError):
        read_arrivals(tmp_path / name)


def test_the_first_seconds_of_a_recording_can_be_its_warmup(tmp_path: Path) -> None:
    text = tmp_path / "times.txt"
    text.write_text("".join(f"{second}\n" for second in range(10)))

    def timing(**settings: float) -> tuple[float, float, int]:
        found = load_timing(LoadtestConfig(replay=text, **settings), None)  # type: ignore[arg-type]
        assert found.arrivals_s is not None
        return found.warmup_s, found.duration_s, len(found.arrivals_s)

    assert timing() == (0, 9, 10) and timing(duration_s=5) == (0, 5, 5)
    assert timing(warmup_s=4) == (4, 5, 10) and timing(warmup_s=4, duration_s=2) == (4, 2, 6)
    for settings in ({"warmup_s": 9.5}, {"warmup_s": 4.5, "duration_s": 0.2}):
        with pytest.raises(UsageError, match="no request between"):
            timing(**settings)

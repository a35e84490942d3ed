"""What the cliff scan promises, over planted throughputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.verbs.size.curve import THRESHOLD, advice, find_cliffs, scan_sizes


def curve(peak: float, half: float) -> Callable[[int], float]:
    """Throughput that rises with the batch towards `peak`."""
    return lambda batch: peak * batch / (batch + half)


def cliffs(rates: Callable[[int], float | None], batch: int = 24, width: int = 8) -> list[int]:
    return [point.batch for point in find_cliffs(scan_sizes(batch, width), rates) if point.cliff]


@pytest.mark.parametrize("bad", [(17, 18, 19), (16,), (23, 24, 25), (32,), (30, 31, 32), (16, 17, 18, 19)])
def test_sizes_that_lose_half_are_found_wherever_they_lie(bad: tuple[int, ...]) -> None:
    smooth = curve(3000, 20)
    assert cliffs(lambda batch: smooth(batch) * (0.5 if batch in bad else 1)) == list(bad)


def test_the_documented_cliff_is_told_with_what_to_use_instead() -> None:
    points = find_cliffs(scan_sizes(24, 8), lambda batch: 100.0 if batch in (17, 18, 19) else 1000.0)
    assert advice(points) == "avoid batch 17-19; prefer powers of two (16, 32)"


def test_a_slow_moment_is_no_cliff_because_it_is_measured_a_second_time() -> None:
    seen: list[int] = []

    def measure(batch: int) -> float:
        seen.append(batch)
        return 10.0 if batch == 20 and seen.count(20) == 1 else 1000.0

    points = {point.batch: point for point in find_cliffs(scan_sizes(24, 8), measure)}
    assert seen.count(20) == 2
    assert (points[20].cliff, points[20].measured, points[20].images_per_s) == (False, 2, 1000.0)
    assert all(seen.count(batch) == 1 for batch in points if batch != 20)


def test_one_lucky_size_accuses_nobody() -> None:
    assert cliffs(lambda batch: 5000.0 if batch == 20 else 1000.0) == []


@given(share=st.floats(THRESHOLD + 0.01, 1.0))
def test_a_shortfall_above_the_threshold_is_tolerated(share: float) -> None:
    assert cliffs(lambda batch: 1000.0 * (share if batch == 24 else 1)) == []

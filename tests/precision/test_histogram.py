"""Streaming histograms give the thresholds that ONNX Runtime's calibrators take from all activations at once."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnxruntime.quantization.calibrate import HistogramCollector

from trt_engine.precision.histogram import (
    Extremes,
    Histogram,
    MagnitudeHistogram,
    entropy_threshold,
    percentile_threshold,
)


def activations(kind: str, seed: int = 0, count: int = 6, size: int = 3000) -> list[Any]:
    rng = np.random.default_rng(seed)
    drawn = {
        "normal": lambda: rng.normal(size=size),
        "relu": lambda: np.maximum(rng.normal(size=size), 0),
        "heavy": lambda: rng.standard_t(2, size=size),
        "shifted": lambda: rng.normal(3, 0.5, size=size),
        "negative": lambda: -np.abs(rng.normal(size=size)) - 1,
        "growing": lambda: rng.normal(size=size) * rng.uniform(1, 1.6),
        "sparse": lambda: np.where(rng.random(size) < 0.02, rng.normal(size=size), 0),
    }[kind]
    return [drawn().astype(np.float32) for _ in range(count)]


def onnxruntime(
    method: str, calls: list[Any], *, bins: int = 2048, symmetric: bool = False, percentile: float = 99.999
) -> tuple[float, float]:
    """Its threshold, and the width of one of its bins; `calls` is what each of its `collect` calls is given."""
    collector = HistogramCollector(
        method=method,
        symmetric=symmetric,
        num_bins=bins,
        num_quantized_bins=128,
        percentile=percentile,
        scenario="same",
    )
    with contextlib.redirect_stdout(io.StringIO()):
        for call in calls:
            collector.collect({"x": call})
        low, high = collector.compute_collection_result()["x"][:2]
    edges = collector.histogram_dict["x"][1]
    return max(abs(float(low)), abs(float(high))), float(edges[1] - edges[0])


# its search takes seconds with 2048 bins, so most kinds have fewer
BINS = {"normal": 2048, "relu": 2048}
KINDS = ["normal", "relu", "heavy", "shifted", "negative", "growing", "sparse"]


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_with_a_known_range_equals_onnxruntime_on_all_activations_at_once(kind: str) -> None:
    arrays, bins = activations(kind), BINS.get(kind, 512)
    theirs, _ = onnxruntime("entropy", [arrays], bins=bins)
    ours = Histogram(bins, limit=max(float(np.abs(array).max()) for array in arrays))
    for array in arrays:
        ours.add(array)
    assert entropy_threshold(ours) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_of_a_widened_histogram_equals_onnxruntime_fed_batch_by_batch(kind: str) -> None:
    arrays = activations(kind, seed=1)
    theirs, bin_width = onnxruntime("entropy", [[array] for array in arrays], bins=512)
    ours = Histogram(512)
    for array in arrays:
        ours.add(array)
    assert abs(entropy_threshold(ours) - theirs) <= bin_width


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99, 99.999, 100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_percentiles_with_a_known_range_equal_onnxruntime_on_all_activations_at_once(
    kind: str, percentile: float
) -> None:
    arrays = activations(kind, seed=2)
    theirs, _ = onnxruntime("percentile", [arrays], symmetric=True, percentile=percentile)
    seen = Extremes()
    for array in arrays:
        seen.add(array, magnitudes=True)
    ours = MagnitudeHistogram(2048, span=(seen.closest, seen.absmax))
    for array in arrays:
        ours.add(array)
    assert percentile_threshold(ours, percentile) == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_percentiles_of_a_widened_histogram_lie_within_a_bin_of_onnxruntime_fed_batch_by_batch(kind: str) -> None:
    arrays = activations(kind, seed=3)
    theirs, bin_width = onnxruntime("percentile", [[array] for array in arrays], symmetric=True, percentile=99.9)
    ours = MagnitudeHistogram(2048)
    for array in arrays:
        ours.add(array)
    assert abs(percentile_threshold(ours, 99.9) - theirs) <= bin_width * 1.01


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=8), st.sampled_from([Histogram, MagnitudeHistogram]))
@settings(max_examples=60, deadline=None)
def test_a_histogram_that_widens_loses_no_value_and_stays_small(sizes: list[float], kind: type[Any]) -> None:
    ours, rng = kind(64), np.random.default_rng(0)
    total = 0
    for size in sizes:
        array = (rng.normal(size=50) * size).astype(np.float32)
        ours.add(array)
        total += array.size
        assert len(ours.counts) <= 16 * 64 + 4
    counted = int(ours.counts.sum())
    assert counted >= total - 1 and counted <= total  # a value on a rounded edge may fall out at most
    assert ours.seen.elements == total
    assert float(ours.edges()[-1]) >= ours.seen.absmax * (1 - 1e-5)


def test_a_first_batch_of_zeros_is_widened_like_any_other() -> None:
    for kind in (Histogram, MagnitudeHistogram):
        ours = kind(64)
        ours.add(np.zeros(10, np.float32))
        ours.add(np.ones(10, np.float32))
        assert int(ours.counts.sum()) == 20
        assert float(ours.edges()[-1]) == pytest.approx(1.0)


def test_nothing_but_zeros_has_the_threshold_zero() -> None:
    values, magnitudes = Histogram(2048), MagnitudeHistogram(2048)
    values.add(np.zeros(100, np.float32))
    magnitudes.add(np.zeros(100, np.float32))
    assert entropy_threshold(values) == 0 and percentile_threshold(magnitudes) == 0
    assert entropy_threshold(Histogram(2048)) == 0 and percentile_threshold(MagnitudeHistogram(2048)) == 0


@pytest.mark.parametrize("kind", [Histogram, MagnitudeHistogram])
def test_a_histogram_goes_on_from_its_state_as_if_never_stopped(kind: type[Any]) -> None:
    arrays = activations("growing", seed=4)
    whole, first, second = kind(256), kind(256), kind(256)
    for array in arrays:
        whole.add(array)
    for array in arrays[:3]:
        first.add(array)
    second.restore({name: np.array(value) for name, value in first.state().items()})
    for array in arrays[3:]:
        second.add(array)
    np.testing.assert_array_equal(second.counts, whole.counts)
    np.testing.assert_array_equal(second.edges(), whole.edges())
    assert second.seen.absmax == whole.seen.absmax


def test_the_entropy_threshold_never_leaves_the_values_seen() -> None:
    ours = Histogram(2048, limit=10.0)
    ours.add(np.array([-0.5, 0.25] * 50, np.float32))
    assert entropy_threshold(ours) <= 0.5

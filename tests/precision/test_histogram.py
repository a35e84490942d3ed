"""Streaming histograms give the thresholds of ONNX Runtime's and ModelOpt's calibrators, or the least squared error."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnxruntime.quantization.calibrate import HistogramCollector

from trt_engine.precision import calibrators

KINDS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "normal": lambda rng, size: rng.normal(size=size),
    "relu": lambda rng, size: np.maximum(rng.normal(size=size), 0),
    "heavy": lambda rng, size: rng.standard_t(2, size=size),
    "shifted": lambda rng, size: rng.normal(3, 0.5, size=size),
    "negative": lambda rng, size: -np.abs(rng.normal(size=size)) - 1,
    "growing": lambda rng, size: rng.normal(size=size) * rng.uniform(1, 1.6),
    "sparse": lambda rng, size: np.where(rng.random(size) < 0.02, rng.normal(size=size), 0),
    "relu6": lambda rng, size: np.clip(3 * rng.normal(size=size), 0, 6),
}
THRESHOLDS = (calibrators.entropy_threshold, calibrators.mse_threshold, calibrators.percentile_threshold)


def activations(kind: str, seed: int = 0, count: int = 6, size: int = 3000) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [KINDS[kind](rng, size).astype(np.float32) for _ in range(count)]


def counted(arrays: list[Any], bins: int = 2048) -> calibrators.Histogram:
    """All of them over a range that is known."""
    ours = calibrators.Histogram(bins, limit=max(float(np.abs(array).max()) for array in arrays))
    for array in arrays:
        ours.add(array)
    return ours


def onnxruntime(calls: list[Any], percentile: float) -> tuple[float, float]:
    """Its symmetric percentile, and the width of one of its bins; `calls` is what each of its `collect` calls is given."""
    collector = HistogramCollector(
        method="percentile",
        symmetric=True,
        num_bins=2048,
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


def squared_error(array: Any, reach: float) -> float:
    """Of rounding to INT8 over that range."""
    step = reach / 127
    rounded = np.clip(np.rint(array.astype(np.float64) / step), -127, 127) * step
    return float(np.mean((array - rounded) ** 2))


def published_entropy(counts: Any, edges: Any, levels: int = 128) -> float:
    """TensorRT's rule one bin after the other, after ModelOpt's `_compute_amax_entropy`."""
    bins = counts.astype(np.float64)
    bins[0] = bins[1]
    found = []
    for reach in range(levels, len(bins) + 1):
        level = np.digitize(np.arange(reach), np.linspace(0, reach, levels + 1)) - 1
        filled = bins[:reach] > 0
        mass = np.bincount(level[filled], bins[:reach][filled], levels)
        told = np.where(filled, (mass / np.maximum(np.bincount(level[filled], minlength=levels), 1))[level], 0)
        true = bins[:reach].copy()
        true[-1] += bins[reach:].sum()
        if told.sum() == 0 or (told[true > 0] == 0).any():
            found.append(math.inf)
            continue
        p, q = true[true > 0] / true.sum(), told[true > 0] / told.sum()
        found.append(float(np.sum(p * np.log(p / q))))
    return float(edges[levels + len(found) - 1 - int(np.argmin(found[::-1]))])


@pytest.mark.parametrize("kind", KINDS)
def test_entropy_is_the_published_rule_worked_out_bin_by_bin(kind: str) -> None:
    widened = calibrators.Histogram(256)
    for array in activations(kind):
        widened.add(array)
    for ours in (counted(activations(kind), bins=512), widened):
        edge = min(published_entropy(ours.counts, ours.edges()), ours.min_max.absmax)
        assert calibrators.entropy_threshold(ours) == pytest.approx(edge, rel=1e-9)


@pytest.mark.parametrize("kind", ["relu", "relu6", "sparse"])
def test_entropy_does_not_let_exact_zeros_cut_a_relus_range(kind: str) -> None:
    arrays = activations(kind, size=30_000)
    reach, largest = calibrators.entropy_threshold(counted(arrays)), max(float(array.max()) for array in arrays)
    whole = np.concatenate(arrays)
    assert reach > 0.7 * largest
    assert squared_error(whole, reach) < 2 * squared_error(whole, largest)


@pytest.mark.parametrize("kind", KINDS)
def test_mse_is_within_a_fifth_of_the_least_squared_error_of_any_range(kind: str) -> None:
    arrays = activations(kind, seed=5, size=10_000)
    whole, largest = np.concatenate(arrays), max(float(np.abs(array).max()) for array in arrays)
    least = min(squared_error(whole, largest * share) for share in np.linspace(0.02, 1, 200))
    assert squared_error(whole, calibrators.mse_threshold(counted(arrays))) <= 1.2 * least


@pytest.mark.parametrize("percentile", [99.0, 99.9, 99.99, 99.999, 100.0])
@pytest.mark.parametrize("kind", KINDS)
def test_percentiles_are_within_a_bin_of_onnxruntimes_on_all_activations_at_once(kind: str, percentile: float) -> None:
    arrays = activations(kind, seed=2)
    theirs, _ = onnxruntime([arrays], percentile)
    ours = counted(arrays)
    assert abs(calibrators.percentile_threshold(ours, percentile) - theirs) <= ours.edges()[1] * 1.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threshold", [calibrators.mse_threshold, calibrators.percentile_threshold])
def test_a_widened_histogram_comes_within_5_per_cent_of_a_known_range(kind: str, threshold: Any) -> None:
    arrays = activations(kind, seed=3, size=20_000)
    ours = calibrators.Histogram(2048)
    for array in arrays:
        ours.add(array)
    assert threshold(ours) == pytest.approx(threshold(counted(arrays)), rel=0.05)


@given(st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=8))
def test_a_histogram_that_widens_loses_no_value_and_stays_small(sizes: list[float]) -> None:
    ours, rng = calibrators.Histogram(64), np.random.default_rng(0)
    for size in sizes:
        ours.add((rng.normal(size=50) * size).astype(np.float32))
        assert len(ours.counts) <= 16 * 64 + 1
    assert int(ours.counts.sum()) == ours.min_max.elements == 50 * len(sizes)
    assert float(ours.edges()[-1]) >= ours.min_max.absmax * (1 - 1e-12)


def test_a_first_batch_of_zeros_is_widened_like_any_other() -> None:
    ours = calibrators.Histogram(64)
    ours.add(np.zeros(10, np.float32))
    ours.add(np.ones(10, np.float32))
    assert (ours.counts[0], ours.counts[-1], ours.counts.sum()) == (10, 10, 20)
    assert float(ours.edges()[-1]) == 1.0


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_nothing_and_nothing_but_zeros_have_the_threshold_zero(threshold: Any) -> None:
    zeros = calibrators.Histogram(2048)
    zeros.add(np.zeros(100, np.float32))
    assert threshold(zeros) == 0 and threshold(calibrators.Histogram(2048)) == 0
    empty = calibrators.Histogram(2048, limit=0.0)
    empty.add(np.zeros((0, 3), np.float32))
    assert threshold(empty) == 0


@pytest.mark.parametrize("value", [1e-45, -2e-40, 3e-3, -7.0, 3e38])
@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_one_value_alone_is_its_own_range_denormals_too(threshold: Any, value: float) -> None:
    array = np.full(50, value, np.float32)
    for ours in (counted([array]), calibrators.Histogram(2048)):
        ours.add(array)
        assert threshold(ours) == pytest.approx(abs(float(array[0])), rel=1e-3)

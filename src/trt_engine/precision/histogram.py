"""Streaming histograms of magnitudes in bounded memory, and the thresholds read from them.

A histogram is fed batch by batch, over a range that an earlier pass found, or one that is widened as larger values come.
`entropy_threshold` and `percentile_threshold` follow NVIDIA ModelOpt's published calibrators
(modelopt/torch/quantization/calib/histogram.py, 0.47), which are TensorRT's; `mse_threshold` is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Extremes", "Histogram", "entropy_threshold", "mse_threshold", "percentile_threshold"]

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]
_MOST = 16
"""A histogram that widens holds at most this many times the bins it began with; then neighbours are merged."""
_CUT_OFF = 2
"""Times that the squared error of what is cut off counts beside that of rounding."""
_CHUNK = 1 << 18
"""Values binned at once: an activation is not copied whole."""


class Extremes:
    """Least and greatest value of what has passed."""

    __slots__ = ("elements", "greatest", "least")

    def __init__(self) -> None:
        self.least, self.greatest = math.inf, -math.inf
        self.elements = 0

    def add(self, array: Array) -> None:
        """Take in an array without NaN."""
        if not array.size:
            return
        self.elements += array.size
        self.least = min(self.least, float(array.min()))
        self.greatest = max(self.greatest, float(array.max()))

    @property
    def absmax(self) -> float:
        """Largest magnitude; 0 when nothing passed."""
        return max(abs(self.least), abs(self.greatest)) if self.elements else 0.0

    def state(self) -> dict[str, Array]:
        """What `restore` takes."""
        return {"extremes": np.array([self.least, self.greatest, self.elements], np.float64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from an earlier `state`."""
        self.least, self.greatest, elements = (float(value) for value in state["extremes"])
        self.elements = int(elements)


class Histogram:
    """Counts of magnitudes over `[0, limit]` in equal bins; the limit is given, or the first array's and widened."""

    def __init__(self, bins: int = 2048, limit: float | None = None) -> None:
        self.bins = bins
        self.fixed = limit is not None
        self.limit = float(limit or 0)
        self.counts: Counts = np.zeros(bins, np.int64)
        self.seen = Extremes()

    def add(self, array: Array) -> None:
        """Count an array without NaN or infinities."""
        if not array.size:
            return
        self.seen.add(array)
        if not self.fixed and self.seen.absmax > self.limit:
            self._widen(self.seen.absmax)
        data, last = array.reshape(-1), len(self.counts) - 1
        if self.limit == 0:
            self.counts[0] += data.size
            return
        for start in range(0, data.size, _CHUNK):
            # a quotient, not a factor: the number of bins over a denormal limit is infinite
            places = np.abs(data[start : start + _CHUNK].astype(np.float64)) / self.limit * (last + 1)
            self.counts += np.bincount(np.minimum(places.astype(np.int64), last), minlength=last + 1)

    def _widen(self, to: float) -> None:
        """More bins of the same width above, at least up to `to`; wider ones when they would be too many."""
        if self.limit == 0:  # nothing but zeros so far: they are in the lowest bin, and stay there
            self.limit = to
            return
        while len(self.counts) * (to / self.limit) > _MOST * self.bins:
            self.counts = np.pad(self.counts, (0, len(self.counts))).reshape(-1, 2).sum(axis=1)
            self.limit *= 2
        if to > self.limit:
            width = self.limit / len(self.counts)
            more = math.ceil((to - self.limit) / width)
            self.counts = np.pad(self.counts, (0, more))
            self.limit += more * width

    def edges(self) -> npt.NDArray[np.float64]:
        """One more edge than bins."""
        return np.linspace(0, self.limit, len(self.counts) + 1)

    def state(self) -> dict[str, Array]:
        """What `restore` takes."""
        limits = np.array([self.limit, self.fixed], np.float64)
        return self.seen.state() | {"counts": self.counts, "limit": limits}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from an earlier `state`."""
        self.seen.restore(state)
        self.counts = np.array(state["counts"], np.int64)
        self.limit, self.fixed = float(state["limit"][0]), bool(state["limit"][1])


# ------------------------------------------------------------------------------------------------ thresholds


def percentile_threshold(histogram: Histogram, percentile: float = 99.999) -> float:
    """The edge of the bin that this share of the magnitudes reaches into, and never more than the largest magnitude."""
    total = int(histogram.counts.sum())
    if not total:
        return 0.0
    shares = np.cumsum(histogram.counts / total)
    at = int(np.searchsorted(shares, percentile / 100))
    return min(float(histogram.edges()[at]), histogram.seen.absmax)


def entropy_threshold(histogram: Histogram, quantized_bins: int = 128) -> float:
    """The range whose `quantized_bins` levels differ least from the values, by the Kullback-Leibler divergence.

    TensorRT's rule as ModelOpt publishes it: the bin of zeros counts as many as its neighbour (else exact zeros, which any
    range represents, decide alone), every range from `quantized_bins` bins to all of them is tried, and of equal ones the
    widest is taken. What is outside a range counts in its last bin, what is inside is merged into levels and spread over
    the bins that were filled (S. Migacz, "8-bit Inference with TensorRT", GTC 2017).
    """
    counts = histogram.counts.astype(np.float64)
    if histogram.seen.absmax == 0:
        return 0.0
    counts[0] = counts[1]
    divergences = np.concatenate(
        [
            _divergences(counts, tried, quantized_bins)
            for tried in np.array_split(np.arange(quantized_bins, len(counts) + 1), max(1, len(counts) // 1024))
        ]
    )
    widest = len(divergences) - 1 - int(np.argmin(divergences[::-1]))
    return min(float(histogram.edges()[quantized_bins + widest]), histogram.seen.absmax)


def _divergences(counts: Array, tried: Array, levels: int) -> Array:
    """Of the values cut at each of these numbers of bins, from the same in `levels` levels; infinite where not defined."""
    below = np.concatenate([[0], np.cumsum(counts)])
    filled = np.concatenate([[0], np.cumsum(counts > 0)])
    total = below[-1]
    if total == 0:
        return np.full(len(tried), math.inf)
    starts = -(-np.arange(levels + 1) * tried[:, None] // levels)
    mass, places = np.diff(below[starts], axis=1), np.diff(filled[starts], axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        own = np.concatenate([[0], np.cumsum(np.where(counts > 0, counts * np.log(counts), 0))])
        spread = np.log(mass / places / below[tried][:, None])
        last = counts[tried - 1]
        cut = last + total - below[tried]
        mass[:, -1] += total - below[tried]
        true = own[tried - 1] + np.where(cut > 0, cut * np.log(cut), 0)
        told = np.where(mass > 0, mass * spread, 0).sum(axis=1)
        found = (true - told) / total - np.log(total)
    return np.where(np.isfinite(found) & ((last > 0) | (cut == 0)), found, math.inf)


def mse_threshold(histogram: Histogram, *, asymmetric: bool = False) -> float:
    """The range whose 127 equal steps from zero have the least squared error, that of what is cut off counted twice.

    `asymmetric` has 255 steps from the least to the greatest value within the range, as unsigned types with a zero point do.

    Rounding errs to both sides and averages out in the sums of a layer, cutting off errs to one. With twice, squared errors
    of eight distributions stay within 1.15 of the least, the logits of the trained examples within 1.09 of the best of max,
    entropy and percentile; once is 1.10 of it for the ViT, four times 1.18 of the best squared error of a ReLU's values
    (benchmarks/calibration.py). Ranges from 1/256 of the largest magnitude up to it are tried, each about 2 % wider than the
    one before. Values count as spread evenly over their bin, so that a bin has an integral for its error wherever steps are.
    """
    if histogram.seen.absmax == 0:
        return 0.0
    tried = histogram.seen.absmax * 2.0 ** (-np.arange(257) / 32)
    edges, counts = histogram.edges(), histogram.counts
    below, above = max(-histogram.seen.least, 0.0), max(histogram.seen.greatest, 0.0)

    def error(reach: float) -> float:
        step = (min(below, reach) + min(above, reach)) / reach / 255 if asymmetric else 1 / 127
        return float(np.diff(_squared_error(edges / reach, step)) @ counts) * reach**2

    return float(min(tried, key=error))


def _squared_error(upto: npt.NDArray[np.float64], step: float) -> npt.NDArray[np.float64]:
    """Integral of the squared error from 0 to there, of values and steps in units of the range."""
    inside = np.minimum(upto, 1)
    near = np.rint(inside / step)
    rounded: npt.NDArray[np.float64] = near * step**3 / 12 + (inside - near * step) ** 3 / 3
    return rounded + _CUT_OFF * np.maximum(upto - 1, 0) ** 3 / 3

"""Streaming histograms in bounded memory, and the thresholds read from them.

The rules are those of ONNX Runtime's calibrators (onnxruntime/quantization/calibrate.py, 1.31), so that thresholds agree:
a histogram over `[-limit, limit]` for entropy, one over magnitudes for percentiles. Theirs are made of all activations at
once; these are fed batch by batch, with a range known from an earlier pass, or widened as larger values come.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Extremes", "Histogram", "MagnitudeHistogram", "entropy_threshold", "percentile_threshold"]

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]
_MOST = 16
"""A histogram that widens holds at most this many times the bins it began with; then neighbours are merged."""


def _span(low: np.float32, high: np.float32) -> Any:
    """The ends as single-precision numbers: numpy then lays its edges out in single precision."""
    return low, high


class Extremes:
    """Least and greatest value and least magnitude of what has passed."""

    __slots__ = ("closest", "elements", "greatest", "least")

    def __init__(self) -> None:
        self.least, self.greatest, self.closest = math.inf, -math.inf, math.inf
        self.elements = 0

    def add(self, array: Array, *, magnitudes: bool = False) -> None:
        """Take in an array without NaN; `closest` is kept with `magnitudes` alone."""
        if not array.size:
            return
        self.elements += array.size
        self.least = min(self.least, float(array.min()))
        self.greatest = max(self.greatest, float(array.max()))
        if magnitudes:
            self.closest = min(self.closest, float(np.abs(array).min()))

    @property
    def absmax(self) -> float:
        """Largest magnitude; 0 when nothing passed."""
        return max(abs(self.least), abs(self.greatest)) if self.elements else 0.0

    def state(self) -> dict[str, Array]:
        """What `restore` takes."""
        return {"extremes": np.array([self.least, self.greatest, self.closest, self.elements], np.float64)}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from an earlier `state`."""
        self.least, self.greatest, self.closest, elements = (float(value) for value in state["extremes"])
        self.elements = int(elements)


class Histogram:
    """Counts of values over `[-limit, limit]` in equal bins; the limit is given, or the first array's and widened."""

    def __init__(self, bins: int = 2048, limit: float | None = None) -> None:
        self.bins = bins
        self.fixed = limit is not None
        self.limit = np.float32(limit if limit is not None else 0)
        self.counts: Counts = np.zeros(bins, np.int64)
        self.seen = Extremes()

    def add(self, array: Array) -> None:
        """Count an array without NaN or infinities."""
        data = array.reshape(-1).astype(np.float32, copy=False)
        if not data.size:
            return
        first = not self.seen.elements
        self.seen.add(data)
        if not self.fixed:
            own = np.float32(max(abs(float(data.min())), abs(float(data.max()))))
            if first:
                self.limit = own
            elif own > self.limit:
                self._widen(own)
        inside = np.histogram(data, len(self.counts), range=_span(-self.limit, self.limit))[0]
        self.counts += inside

    def _widen(self, to: np.float32) -> None:
        """More bins of the same width on both sides, at least up to `to`."""
        if self.limit == 0:  # only zeros so far, in the middle bin; it stays the middle one
            self.limit = to
            return
        width = 2 * self.limit / len(self.counts)
        while len(self.counts) + 2 * (float(to) - float(self.limit)) / float(width) > _MOST * self.bins:
            width = self._merge()
        more = int((to - self.limit) // width + 1)
        self.counts = np.pad(self.counts, more)
        self.limit = np.float32(more * width + self.limit)

    def _merge(self) -> np.float32:
        """Half as many bins of twice the width, laid about zero as before; the new width."""
        width = 2 * self.limit / len(self.counts)
        if len(self.counts) <= self.bins:  # so few that merging would lose the shape: wider first, then half as many
            extra = len(self.counts) // 2
            self.counts = np.pad(self.counts, extra)
            self.limit = np.float32(self.limit + extra * width)
        if len(self.counts) % 4:  # an even number on each side
            self.counts = np.pad(self.counts, 1)
            self.limit = np.float32(self.limit + width)
        self.counts = self.counts.reshape(-1, 2).sum(axis=1)
        return np.float32(2 * self.limit / len(self.counts))

    def edges(self) -> npt.NDArray[np.float32]:
        """One more edge than bins."""
        made = np.histogram_bin_edges(np.zeros(1, np.float32), len(self.counts), range=_span(-self.limit, self.limit))
        return made.astype(np.float32)

    def state(self) -> dict[str, Array]:
        """What `restore` takes."""
        limits = np.array([self.limit, self.fixed], np.float64)
        return self.seen.state() | {"counts": self.counts, "limit": limits}

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from an earlier `state`."""
        self.seen.restore(state)
        self.counts = np.array(state["counts"], np.int64)
        self.limit, self.fixed = np.float32(state["limit"][0]), bool(state["limit"][1])


class MagnitudeHistogram:
    """Counts of magnitudes in equal bins between two edges: given ones, or the first array's, the upper one widened."""

    def __init__(self, bins: int = 2048, span: tuple[float, float] | None = None) -> None:
        self.bins = bins
        self.fixed = span is not None
        self.low, self.high = (np.float32(0), np.float32(0)) if span is None else map(np.float32, span)
        self.counts: Counts = np.zeros(bins, np.int64)
        self.seen = Extremes()

    def add(self, array: Array) -> None:
        """Count an array without NaN or infinities."""
        data = np.abs(array.reshape(-1).astype(np.float32, copy=False))
        if not data.size:
            return
        first = not self.seen.elements
        self.seen.add(array)
        if not self.fixed:
            least, most = np.float32(data.min()), np.float32(data.max())
            if first:
                self.low, self.high = least, most
            elif most > self.high:
                self._widen(most)
            data = np.maximum(data, self.low)  # what is smaller than the first array's least counts in the lowest bin
        inside = np.histogram(data, len(self.counts), range=self._range())[0]
        self.counts += inside

    def _range(self) -> Any:
        """As numpy takes it when both ends are one: half a unit to each side."""
        if self.low == self.high:
            return self.low - np.float32(0.5), self.high + np.float32(0.5)
        return self.low, self.high

    def _widen(self, to: np.float32) -> None:
        low, high = self._range()
        if self.low == self.high:  # one value so far: all its counts belong to the bin it falls in now
            total = int(self.counts.sum())
            self.high = to
            self.counts = np.histogram(np.array([self.low]), len(self.counts), range=_span(self.low, to))[0] * total
            return
        width = (high - low) / len(self.counts)
        while len(self.counts) + (float(to) - float(self.high)) / float(width) > _MOST * self.bins:
            self.counts = np.pad(self.counts, (0, len(self.counts)))
            self.high = np.float32(self.high + width * (len(self.counts) // 2))
            self.counts = self.counts.reshape(-1, 2).sum(axis=1)
            width = (self.high - self.low) / len(self.counts)
        if to > self.high:
            more = math.ceil((to - self.high) / width)
            self.counts = np.pad(self.counts, (0, more))
            self.high = np.float32(self.high + more * width)

    def edges(self) -> npt.NDArray[np.float32]:
        """One more edge than bins."""
        return np.histogram_bin_edges(np.zeros(1, np.float32), len(self.counts), range=self._range()).astype(np.float32)

    def state(self) -> dict[str, Array]:
        """What `restore` takes."""
        return self.seen.state() | {
            "counts": self.counts,
            "span": np.array([self.low, self.high, self.fixed], np.float64),
        }

    def restore(self, state: Mapping[str, Array]) -> None:
        """Go on from an earlier `state`."""
        self.seen.restore(state)
        self.counts = np.array(state["counts"], np.int64)
        self.low, self.high = np.float32(state["span"][0]), np.float32(state["span"][1])
        self.fixed = bool(state["span"][2])


# ------------------------------------------------------------------------------------------------ thresholds


def percentile_threshold(histogram: MagnitudeHistogram, percentile: float = 99.999) -> float:
    """The edge below which at least that share of the magnitudes lies, and never more than the largest magnitude."""
    total = int(histogram.counts.sum())
    if not total:
        return 0.0
    shares = np.cumsum(histogram.counts / total)
    at = int(np.searchsorted(shares, percentile / 100))
    edge = float(histogram.edges()[min(at, len(histogram.counts))])
    return min(edge, histogram.seen.absmax)


def entropy_threshold(histogram: Histogram, quantized_bins: int = 128) -> float:
    """The range whose `quantized_bins` levels tell least wrong about the values, by the Kullback-Leibler divergence.

    Every range symmetric about zero from `quantized_bins` bins to all of them is tried: what lies outside counts in its last
    bins, what lies inside is merged into levels and spread out again, and the two are compared
    (S. Migacz, "8-bit Inference with TensorRT", GTC 2017). Rounding is that of ONNX Runtime's calibrator: spread counts are
    whole numbers, and bins left over after equal levels count in the last level but are not spread.
    """
    counts = histogram.counts
    if not histogram.seen.elements or histogram.seen.absmax == 0:
        return 0.0
    middle, half = len(counts) // 2, quantized_bins // 2
    below = np.concatenate([[0], np.cumsum(counts)])  # below[i]: counts in front of bin i
    edges, total = histogram.edges(), int(below[-1])
    best, least = len(edges) - 1, math.inf
    left = 0
    for reach in range(half, middle + 1):
        start, end = middle - reach, min(middle + reach + 1, len(counts))
        divergence = _divergence(counts, below, total, start, end, quantized_bins)
        if divergence < least:
            left, best, least = start, end, divergence
    low, high = float(edges[left]), float(edges[best])
    low, high = max(low, histogram.seen.least), min(high, histogram.seen.greatest)
    return max(abs(low), abs(high))


def _divergence(counts: Counts, below: Counts, total: int, start: int, end: int, levels: int) -> float:
    """Of the values as they are, cut at this range, from the values as `levels` levels tell them."""
    true = counts[start:end].copy()
    true[0] += below[start]
    true[-1] += total - below[end]
    each = len(true) // levels
    steps = below[start + each * np.arange(levels + 1)]
    sums = np.diff(steps)
    sums[-1] += below[end] - steps[-1]  # what equal levels leave over
    filled = (true[: each * levels] != 0).reshape(levels, each).sum(axis=1)
    spread = np.zeros(levels, np.int64)
    np.floor_divide(sums, filled, out=spread, where=filled != 0)
    told = np.zeros(len(true), np.int64)
    told[: each * levels] = np.repeat(spread, each)
    p, q = _smoothed(true), _smoothed(told)
    if p is None or q is None:
        return math.inf
    p = p / np.sum(p)
    q = q / np.sum(q)
    return float(np.sum(p * np.log(p / q)))


def _smoothed(counts: Counts, eps: float = 0.0001) -> npt.NDArray[np.float32] | None:
    """Counts with a little taken from the filled bins and put into the empty ones; None when that cannot be done."""
    empty = counts == 0
    filled = counts.size - int(np.count_nonzero(empty))
    if not filled:
        return None
    taken = eps * (counts.size - filled) / filled
    if taken >= 1:
        return None
    made = counts.astype(np.float32)
    made += np.where(empty, np.float32(eps), np.float32(-taken))
    return made

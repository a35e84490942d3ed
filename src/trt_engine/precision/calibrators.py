"""Calibrators: the range of a tensor by max, percentile, entropy or squared error, from histograms in bounded memory.

A histogram has the range of an earlier pass, or widens as larger values arrive.
`entropy_threshold` and `percentile_threshold` follow NVIDIA ModelOpt's published calibrators
(modelopt/torch/quantization/calib/histogram.py, 0.47), which are TensorRT's; `mse_threshold` is computed here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from trt_engine.environment import source_digest
from trt_engine.errors import UsageError

Array = npt.NDArray[Any]


class Calibrator(Protocol):
    """Observes every activation and returns the range of each tensor.

    `name` and `settings` are optional and compared by the cache; the default name is the class name.
    """

    def observe(self, name: str, array: Array) -> None:
        """Observe one batch of a tensor, of any shape in a floating-point dtype; the array is finite and must be copied to
        be kept.
        """

    def threshold(self, name: str) -> float:
        """Return the largest magnitude to represent, in units of the tensor; larger values saturate."""


@runtime_checkable
class MultiPassCalibrator(Protocol):
    """A calibrator that needs several passes, if the data is repeatable."""

    passes: int

    def start_pass(self, index: int, total: int) -> None:
        """Called before each pass; `total` is 1 if the data is not repeatable. Pass 0 resets the state."""


class MinMaxCalibrator:
    """The largest observed magnitude: nothing saturates."""

    name = "minmax"
    passes = 1

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self._min_max: dict[str, MinMax] = {}

    def start_pass(self, index: int, total: int) -> None:
        self._min_max = {}

    def observe(self, name: str, array: Array) -> None:
        """Widen the range of a tensor by an array of any shape in a floating-point dtype."""
        self._min_max.setdefault(name, MinMax()).add(array)

    def threshold(self, name: str) -> float:
        """Largest magnitude seen, in units of the tensor; 0 without data."""
        return self._min_max[name].absmax if name in self._min_max else 0.0


class HistogramCalibrator:
    """A range found in a histogram of the magnitudes: pass 0 finds the largest, pass 1 counts up to them.

    `rule` is `mse` (least squared 8-bit error, clipping counted twice; `asymmetric` for types with a zero point), `entropy`
    (least Kullback-Leibler divergence, by TensorRT's rule) or `percentile` (of the magnitudes). Data that allows one pass is
    counted in histograms that widen.
    """

    passes = 2

    def __init__(
        self,
        rule: Literal["mse", "entropy", "percentile"],
        *,
        bins: int = 2048,
        asymmetric: bool = False,
        quantized_bins: int = 128,
        percentile: float = 99.999,
    ) -> None:
        """`percentile` is in per cent.

        Raises `UsageError` for fewer than 2 bins, more levels than bins, or a percentile out of range.
        """
        if bins < 2:
            raise UsageError(f"{bins} bins make no histogram", hint="2048 are usual")
        if rule == "entropy" and not 2 <= quantized_bins <= bins:
            raise UsageError(f"{bins} bins make no {quantized_bins} levels", hint="2048 bins for 128 levels are usual")
        if not 0 < percentile <= 100:
            raise UsageError(f"the percentile is {percentile:g}", hint="expected above 0 and up to 100, as 99.999")
        self.name, self.bins = rule, bins
        own: dict[str, dict[str, Any]] = {
            "mse": {"asymmetric": True} if asymmetric else {},
            "entropy": {"quantized_bins": quantized_bins},
            "percentile": {"percentile": percentile},
        }
        self.settings = {"bins": bins, "version": source_digest("precision/calibrators.py")} | own[rule]
        rules: dict[str, Callable[[Histogram], float]] = {
            "mse": functools.partial(mse_threshold, asymmetric=asymmetric),
            "entropy": lambda histogram: entropy_threshold(histogram, quantized_bins),
            "percentile": lambda histogram: percentile_threshold(histogram, percentile),
        }
        self._find_threshold = rules[rule]
        self._min_max: dict[str, MinMax] = {}
        self._histograms: dict[str, Histogram] = {}
        self._in_min_max_pass = False

    def start_pass(self, index: int, total: int) -> None:
        self._in_min_max_pass = total > 1 and index == 0
        if index == 0:
            self._min_max, self._histograms = {}, {}
        else:
            self._histograms = {name: Histogram(self.bins, seen.absmax) for name, seen in self._min_max.items()}

    def observe(self, name: str, array: Array) -> None:
        """Count an array of any shape in a floating-point dtype; the first pass finds its range."""
        if self._in_min_max_pass:
            self._min_max.setdefault(name, MinMax()).add(array)
        else:
            self._histograms.setdefault(name, Histogram(self.bins)).add(array)

    def threshold(self, name: str) -> float:
        """Magnitude that the rule selects, in units of the tensor; 0 without data."""
        return self._find_threshold(self._histograms[name]) if name in self._histograms else 0.0


CALIBRATORS: dict[str, Callable[[], Calibrator]] = {
    "entropy": functools.partial(HistogramCalibrator, "entropy"),
    "minmax": MinMaxCalibrator,
    "mse": functools.partial(HistogramCalibrator, "mse"),
    "percentile": functools.partial(HistogramCalibrator, "percentile"),
}


Counts = npt.NDArray[np.int64]
_MAX_GROWTH = 16
"""Maximum growth of a widening histogram, in multiples of its initial bins; then neighbours are merged."""
_CLIPPING_WEIGHT = 2
"""Weight of the squared clipping error relative to the rounding error."""
_CHUNK = 1 << 18
"""Values binned at once, to avoid copying a whole activation."""


class MinMax:
    """Running minimum and maximum."""

    __slots__ = ("elements", "maximum", "minimum")

    def __init__(self) -> None:
        self.minimum, self.maximum = math.inf, -math.inf
        self.elements = 0

    def add(self, array: Array) -> None:
        """Add an array without NaN, of any shape in a floating-point dtype."""
        if not array.size:
            return
        self.elements += array.size
        self.minimum = min(self.minimum, float(array.min()))
        self.maximum = max(self.maximum, float(array.max()))

    @property
    def absmax(self) -> float:
        """Largest magnitude, in units of the tensor; 0 without data."""
        return max(abs(self.minimum), abs(self.maximum)) if self.elements else 0.0


class Histogram:
    """Counts of magnitudes over `[0, limit]` in equal bins; a limit that is not given widens with the data."""

    def __init__(self, bins: int = 2048, limit: float | None = None) -> None:
        """`limit` is in units of the tensor."""
        self.bins = bins
        self.fixed_limit = limit is not None
        self.limit = float(limit or 0)
        self.counts: Counts = np.zeros(bins, np.int64)
        self.min_max = MinMax()

    def add(self, array: Array) -> None:
        """Count an array without NaN or infinities, of any shape in a floating-point dtype."""
        if not array.size:
            return
        self.min_max.add(array)
        if not self.fixed_limit and self.min_max.absmax > self.limit:
            self._widen(self.min_max.absmax)
        data, last = array.reshape(-1), len(self.counts) - 1
        if self.limit == 0:
            self.counts[0] += data.size
            return
        for start in range(0, data.size, _CHUNK):
            # a quotient, not a factor: the number of bins over a denormal limit is infinite
            places = np.abs(data[start : start + _CHUNK].astype(np.float64)) / self.limit * (last + 1)
            self.counts += np.bincount(np.minimum(places.astype(np.int64), last), minlength=last + 1)

    def _widen(self, to: float) -> None:
        """Extend the range to at least `to` with bins of the same width, or with wider ones above the maximum count."""
        if self.limit == 0:  # only zeros so far, in the lowest bin
            self.limit = to
            return
        while len(self.counts) * (to / self.limit) > _MAX_GROWTH * self.bins:
            self.counts = np.pad(self.counts, (0, len(self.counts))).reshape(-1, 2).sum(axis=1)
            self.limit *= 2
        if to > self.limit:
            width = self.limit / len(self.counts)
            more = math.ceil((to - self.limit) / width)
            self.counts = np.pad(self.counts, (0, more))
            self.limit += more * width

    def edges(self) -> npt.NDArray[np.float64]:
        """Bin edges, float64 `[bins + 1]`, in units of the tensor."""
        return np.linspace(0, self.limit, len(self.counts) + 1)


# ------------------------------------------------------------------------------------------------ thresholds


def percentile_threshold(histogram: Histogram, percentile: float = 99.999) -> float:
    """The bin edge at this percentile of the magnitudes, at most the largest magnitude."""
    total = int(histogram.counts.sum())
    if not total:
        return 0.0
    shares = np.cumsum(histogram.counts / total)
    at = int(np.searchsorted(shares, percentile / 100))
    return min(float(histogram.edges()[at]), histogram.min_max.absmax)


def entropy_threshold(histogram: Histogram, quantized_bins: int = 128) -> float:
    """The range whose `quantized_bins` levels differ least from the values, by the Kullback-Leibler divergence.

    TensorRT's rule as ModelOpt publishes it: the bin of zeros counts as many as its neighbour (else exact zeros, which any
    range represents, decide alone), every range from `quantized_bins` bins to all of them is tried, and of equal ones the
    widest is taken. What is outside a range counts in its last bin, what is inside is merged into levels and spread over
    the bins that were filled (S. Migacz, "8-bit Inference with TensorRT", GTC 2017).
    """
    counts = histogram.counts.astype(np.float64)
    if histogram.min_max.absmax == 0:
        return 0.0
    counts[0] = counts[1]
    divergences = np.concatenate(
        [
            _divergences(counts, tried, quantized_bins)
            for tried in np.array_split(np.arange(quantized_bins, len(counts) + 1), max(1, len(counts) // 1024))
        ]
    )
    widest = len(divergences) - 1 - int(np.argmin(divergences[::-1]))
    return min(float(histogram.edges()[quantized_bins + widest]), histogram.min_max.absmax)


def _divergences(counts: Array, tried: Array, levels: int) -> Array:
    """KL divergence between the values clipped at each bin count and the same in `levels` levels; infinite if undefined."""
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
        stated = np.where(mass > 0, mass * spread, 0).sum(axis=1)
        found = (true - stated) / total - np.log(total)
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
    if histogram.min_max.absmax == 0:
        return 0.0
    tried = histogram.min_max.absmax * 2.0 ** (-np.arange(257) / 32)
    edges, counts = histogram.edges(), histogram.counts
    below, above = max(-histogram.min_max.minimum, 0.0), max(histogram.min_max.maximum, 0.0)

    def error(reach: float) -> float:
        step = (min(below, reach) + min(above, reach)) / reach / 255 if asymmetric else 1 / 127
        return float(np.diff(_squared_error(edges / reach, step)) @ counts) * reach**2

    return float(min(tried, key=error))


def _squared_error(upto: npt.NDArray[np.float64], step: float) -> npt.NDArray[np.float64]:
    """Integral of the squared error from 0 to `upto`; values and steps in units of the range."""
    inside = np.minimum(upto, 1)
    near = np.rint(inside / step)
    off, cut = inside - near * step, np.maximum(upto - 1, 0)  # a product takes a twentieth of a power's time
    rounded: npt.NDArray[np.float64] = near * step**3 / 12 + off * off * off / 3
    return rounded + _CLIPPING_WEIGHT * (cut * cut * cut) / 3

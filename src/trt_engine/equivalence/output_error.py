"""Output differences of two models, per channel.

Boxes in pixels stand beside scores up to 1 in one tensor, so a difference is judged by the scale of its channel: an index of
any axis but the first. docs/compare.md ("How outputs are compared") has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.records.parity import Channel, OutputError

NOT_COMPARABLE = OutputError(math.inf, math.inf, math.inf, 0.0, math.inf, math.inf, 1.0)
_EQUAL = OutputError(0.0, 0.0, 0.0, 1.0, 0.0, 0.0)
_SCALE_GAP = 8.0
"""Channels whose scales are further apart than this measure different things (boxes, scores)."""
_FEW_CHANNELS = 16
"""Fewest values of a channel for a statistic; channels with fewer are judged by group."""
_MIN_SCALE = 1e-4
"""Least scale of a channel, as a fraction of the output's largest value."""
_SCORE_RANGE, _TAIL_RATIO = 0.05, 16.0
"""A channel of values in [0, 1] that stays far below `_SCORE_RANGE` is the tail of a sigmoid or softmax, whose relative
error is the absolute one of its logit: it is judged at up to `_TAIL_RATIO` times its scale, and its variation by the
logarithms where these vary more."""
_MIN_STD = 0.02
"""Least standard deviation of a channel, as a fraction of its scale."""
_LARGE, _SLACK, _EPSILONS = 0.125, 4.0, 32


def compare_output(
    output: Any, reference: Any, rounding: dict[int, float] | None = None, *, floor: float = 0.0, rows: bool = False
) -> OutputError:
    """Difference of one output from the reference; infinite when shapes or special values differ.

    Differences up to `floor` are rounding: `max_abs` and `mean_abs` have them, the other figures do not. `rows`: axis 1
    has rows that were matched by value (a box and its score); rows of fewer than 16 values have one RMS.

    `rounding` is for graphs that compute the same in FP32: the largest difference of the channels of the output's own scale,
    over its largest value, by axis. It grows over calls, and up to `_SLACK` times as much in a small channel (a sum of large
    numbers that cancel) is not a difference.
    """
    got, want = np.asarray(output), np.asarray(reference)
    if got.shape != want.shape:
        return NOT_COMPARABLE
    if want.dtype.kind in "OUS":
        return _EQUAL if np.array_equal(got.astype(str), want.astype(str)) else NOT_COMPARABLE
    if not want.size:
        return _EQUAL
    exact = want.dtype.kind in "iub"
    flushed = float(np.finfo(want.dtype).tiny) if want.dtype in (np.float32, np.float64) else 0.0
    least = _EPSILONS * float(ml_dtypes.finfo(want.dtype).eps) if want.dtype.kind == "f" else 0.0  # type: ignore[no-untyped-call]
    got, want = _as_float64(got), _as_float64(want)
    odd = ~np.isfinite(want)
    if odd.any() or not np.isfinite(got).all():
        if not np.array_equal(got[odd], want[odd], equal_nan=True) or not np.isfinite(got[~odd]).all():
            return NOT_COMPARABLE
        got, want = np.where(odd, 0.0, got), np.where(odd, 0.0, want)
    apart = got - want
    apart = np.where(np.abs(apart) < flushed, 0.0, apart)  # libraries differ in whether they keep denormal numbers
    raw, apart = np.abs(apart), np.where(np.abs(apart) <= floor, 0.0, apart)
    worst, largest = float(np.abs(apart).max()), float(np.abs(want).max())
    deviation = max(float(want.std()), _MIN_STD * largest)
    whole = OutputError(
        max_abs=float(raw.max()),
        mean_abs=float(raw.sum() / max(1, want.size - int(odd.sum()))),
        max_rel=_safe_ratio(worst, largest),
        cosine=_cosine(want + apart, want),
        rms_rel=_safe_ratio(_rms(apart), largest),
        noise=0.0 if exact else _safe_ratio(_rms(apart), deviation),
        far_share=max(int(np.count_nonzero(np.abs(apart) > deviation / 2)) - 1, 0) / want.size,
    )
    if exact:  # numbers of classes and places have no scale: the share that is another counts
        other = float(np.mean(apart != 0))
        return replace(whole, rms_rel=min(other, whole.max_rel))
    if not worst or want.ndim < 2 or not largest:
        return whole
    return _channel_errors(whole, apart, want, largest, least, rounding, rows=rows)


def worst_errors(errors: Sequence[OutputError], weights: Sequence[int]) -> OutputError:
    """The largest differences of several comparisons of one output; the mean over all."""
    by_scale = max(errors, key=lambda item: _nan_to_inf(item.max_rel))
    by_noise = max(errors, key=lambda item: _nan_to_inf(item.noise))
    by_variation = min(errors, key=lambda item: item.std_ratio)
    return OutputError(
        max_abs=max(item.max_abs for item in errors),
        mean_abs=float(np.average([item.mean_abs for item in errors], weights=weights)),
        max_rel=_nan_to_inf(by_scale.max_rel),
        cosine=min(item.cosine for item in errors),
        rms_rel=max(_nan_to_inf(item.rms_rel) for item in errors),
        noise=_nan_to_inf(by_noise.noise),
        far_share=float(np.average([item.far_share for item in errors], weights=weights)),
        std_ratio=by_variation.std_ratio,
        channel=by_scale.channel,
        noise_channel=by_noise.noise_channel,
        std_ratio_channel=by_variation.std_ratio_channel,
        rows_moved=sum(item.rows_moved for item in errors),
        rows_skipped=sum(item.rows_skipped for item in errors),
    )


def _nan_to_inf(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


# ------------------------------------------------------------------------------------------------ channels


@dataclass(frozen=True)
class _AxisErrors:
    """The channels of one axis: figures of each."""

    axis: int
    worst: Array
    scale: Array
    """What `worst` and `rms` are judged by."""
    rms: Array
    group_rms: Array
    """RMS of the group where channels have too few values for one of their own."""
    noise: Array
    variation: Array

    def channel(self, index: int) -> Channel:
        return Channel(self.axis, index, len(self.worst), float(self.worst[index]))


def _channel_errors(
    whole: OutputError,
    difference: Array,
    reference: Array,
    largest: float,
    least: float,
    rounding: dict[int, float] | None,
    *,
    rows: bool,
) -> OutputError:
    found = replace(whole, noise=0.0)
    axes = [at for at in range(1, reference.ndim) if reference.shape[at] > 1]
    if reference.ndim == 4 and len(axes) == 2 and 2 in axes:  # rows and columns of a map of one channel
        return whole
    for at in axes:
        axis = _axis_errors(at, difference, reference, largest)
        if rounding is not None:
            axis = _ignore_rounding(axis, reference, largest, least, rounding)
        relative = axis.worst / axis.scale
        first, second, third = int(relative.argmax()), int(axis.noise.argmax()), int(axis.variation.argmin())
        if relative[first] > found.max_rel:
            found = replace(found, max_rel=float(relative[first]), channel=axis.channel(first))
        if axis.noise[second] > (found.noise or 0.0):
            found = replace(found, noise=float(axis.noise[second]), noise_channel=axis.channel(second))
        if axis.variation[third] < found.std_ratio:
            found = replace(found, std_ratio=float(axis.variation[third]), std_ratio_channel=axis.channel(third))
        rms = axis.group_rms if rows and at == 1 else axis.rms
        found = replace(found, rms_rel=max(found.rms_rel or 0.0, float((rms / axis.scale).max())))
    return found


def _axis_errors(at: int, difference: Array, reference: Array, largest: float) -> _AxisErrors:
    others = tuple(axis for axis in range(reference.ndim) if axis != at)
    count = reference.size // reference.shape[at]
    sizes = np.abs(reference).max(axis=others)
    squares, means, deviations = (
        np.square(difference).mean(axis=others),
        reference.mean(axis=others),
        reference.std(axis=others),
    )
    scale, deviation = np.empty_like(sizes), np.empty_like(sizes)
    power = squares.copy()
    low = reference.min(axis=others)
    for group in _scale_groups(sizes, deviations, count):
        top = float(sizes[group].max())
        scores = low[group].min() >= 0 and top <= 1
        live = group[sizes[group] > 0] if top else group
        own = np.maximum(sizes[group], np.median(sizes[live]))
        varies = np.maximum(deviations[group], np.median(deviations[live]))
        if count < _FEW_CHANNELS:
            varies = np.sqrt(np.mean(deviations[group] ** 2) + means[group].var())
            power[group] = squares[group].mean()
        if scores:
            own = (
                np.full(len(group), top)
                if count < _FEW_CHANNELS
                else np.maximum(own, np.minimum(_SCORE_RANGE, _TAIL_RATIO * own))
            )
        own = np.maximum(own, _MIN_SCALE * largest)
        scale[group], deviation[group] = own, np.maximum(varies, _MIN_STD * own)
    varies_now = (reference + difference).std(axis=others)
    judged = (deviations > _MIN_STD * scale) & (count >= _FEW_CHANNELS)
    variation = np.where(judged, varies_now / np.where(judged, deviations, 1.0), 1.0)
    tails = np.flatnonzero(judged & (variation < 1) & (low >= 0) & (sizes < _SCORE_RANGE) & (sizes < scale))
    if tails.size:
        least = (_MIN_SCALE * sizes[tails]).reshape([-1 if axis == at else 1 for axis in range(reference.ndim)])
        before, change = reference.take(tails, at), difference.take(tails, at)
        spread, spread_now = (np.log(np.maximum(x, least)).std(axis=others) for x in (before, before + change))
        variation[tails] = np.maximum(variation[tails], spread_now / spread)
    rms, group_rms = np.sqrt(squares), np.sqrt(power)
    return _AxisErrors(at, np.abs(difference).max(axis=others), scale, rms, group_rms, group_rms / deviation, variation)


def _scale_groups(sizes: Array, deviations: Array, count: int) -> list[Array]:
    """Groups of channels with scales of one order, split at a gap with enough values below it.

    A channel that varies as the larger ones do is one of them whose mean is near 0; one of zeros has the next scale.
    """
    order = np.argsort(sizes, kind="stable")
    zeros, start, found = int(np.count_nonzero(sizes == 0)), 0, []
    for at in range(zeros + 1, len(order)):
        below = order[max(start, zeros) : at]
        if sizes[order[at]] <= _SCALE_GAP * sizes[below[-1]] or len(below) * count < _FEW_CHANNELS:
            continue
        varies = np.median(deviations[order[at:]])
        if not 0 < varies <= _SCALE_GAP * np.median(deviations[below]):
            found.append(order[start:at])
            start = at
    return [*found, order[start:]]


def _ignore_rounding(
    axis: _AxisErrors, reference: Array, largest: float, least: float, rounding: dict[int, float]
) -> _AxisErrors:
    """The same where differences within the rounding of the large channels are none, and these have the output's scale."""
    others = tuple(at for at in range(reference.ndim) if at != axis.axis)
    sizes = np.abs(reference).max(axis=others)
    large = sizes >= _LARGE * largest
    rounding[axis.axis] = max(rounding.get(axis.axis, 0.0), float(axis.worst[large].max()) / largest)
    counts = large | (axis.worst > max(_SLACK * rounding[axis.axis], least) * largest)
    own = np.where(large, largest, np.maximum(sizes, np.finfo(np.float64).tiny))
    return replace(axis, worst=np.where(counts, axis.worst, 0.0), scale=own)


# ------------------------------------------------------------------------------------------------ figures


def _as_float64(array: Array) -> Array:
    """As 64-bit reals; a complex number is two."""
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    return array.astype(np.float64)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def _safe_ratio(value: float, over: float) -> float:
    if value == 0:
        return 0.0
    return value / over if over else math.inf


def _cosine(got: Array, want: Array) -> float:
    lengths = float(np.linalg.norm(got) * np.linalg.norm(want))
    if lengths == 0:
        return 1.0 if not got.any() and not want.any() else 0.0
    return min(1.0, float(np.vdot(got, want)) / lengths)

"""How far the outputs of two models are apart, channel by channel.

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
import numpy.typing as npt

from trt_engine.engine import Channel, OutputError

__all__ = ["NOT_COMPARABLE", "compare", "worst_of"]

Array = npt.NDArray[Any]

NOT_COMPARABLE = OutputError(math.inf, math.inf, math.inf, 0.0, math.inf, math.inf)
_EQUAL = OutputError(0.0, 0.0, 0.0, 1.0, 0.0, 0.0)

_GAP = 8.0
"""Channels whose scales are further apart than this measure different things (boxes, scores)."""
_FEW = 16
"""Values: fewer of a channel are no statistic, and its group is judged as one."""
_LEAST_SCALE = 1e-4
"""Of the output's largest value: the scale of a channel that is zero but for noise."""
_SCORES, _TAIL = 0.05, 16.0
"""A channel of values in [0, 1] that stays far below `_SCORES` is the tail of a sigmoid or softmax, whose relative error is
the absolute one of its logit: it is judged at up to `_TAIL` times its scale."""
_LEAST_DEVIATION = 0.02
"""Of the scale: what a channel that hardly varies is taken to vary by."""
_LARGE, _SLACK, _EPSILONS = 0.125, 4.0, 32


def compare(output: Any, reference: Any, rounding: dict[int, float] | None = None) -> OutputError:
    """How far one output is from the reference; infinitely far when shapes or special values differ.

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
    got, want = _real(got), _real(want)
    odd = ~np.isfinite(want)
    if odd.any() or not np.isfinite(got).all():
        if not np.array_equal(got[odd], want[odd], equal_nan=True) or not np.isfinite(got[~odd]).all():
            return NOT_COMPARABLE
        got, want = np.where(odd, 0.0, got), np.where(odd, 0.0, want)
    apart = got - want
    apart = np.where(np.abs(apart) < flushed, 0.0, apart)  # libraries differ in whether they keep denormal numbers
    worst, largest = float(np.abs(apart).max()), float(np.abs(want).max())
    whole = OutputError(
        max_abs=worst,
        mean_abs=float(np.abs(apart).sum() / max(1, want.size - int(odd.sum()))),
        max_rel=_ratio(worst, largest),
        cosine=_cosine(got, want),
        rms_rel=_ratio(_rms(apart), largest),
        noise=0.0 if exact else _ratio(_rms(apart), max(float(want.std()), _LEAST_DEVIATION * largest)),
    )
    if exact:  # numbers of classes and places have no scale: the share that is another counts
        other = float(np.mean(apart != 0))
        return OutputError(whole.max_abs, whole.mean_abs, whole.max_rel, whole.cosine, min(other, whole.max_rel), 0.0)
    if not worst or want.ndim < 2 or not largest:
        return whole
    return _by_channel(whole, apart, want, largest, least, rounding)


def worst_of(errors: Sequence[OutputError], weights: Sequence[int]) -> OutputError:
    """The largest differences of several comparisons of one output; the mean over all."""
    by_scale = max(errors, key=lambda item: _or_infinite(item.max_rel))
    by_noise = max(errors, key=lambda item: _or_infinite(item.noise))
    by_variation = min(errors, key=lambda item: item.variation)
    return OutputError(
        max_abs=max(item.max_abs for item in errors),
        mean_abs=float(np.average([item.mean_abs for item in errors], weights=weights)),
        max_rel=_or_infinite(by_scale.max_rel),
        cosine=min(item.cosine for item in errors),
        rms_rel=max(_or_infinite(item.rms_rel) for item in errors),
        noise=_or_infinite(by_noise.noise),
        variation=by_variation.variation,
        channel=by_scale.channel,
        noise_channel=by_noise.noise_channel,
        dead_channel=by_variation.dead_channel,
        rows_moved=sum(item.rows_moved for item in errors),
        rows_left_out=sum(item.rows_left_out for item in errors),
    )


def _or_infinite(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


# ------------------------------------------------------------------------------------------------ channels


@dataclass(frozen=True)
class _Axis:
    """The channels of one axis: figures of each."""

    at: int
    worst: Array
    scale: Array
    """What `worst` and `rms` are judged by."""
    rms: Array
    noise: Array
    variation: Array

    def channel(self, index: int) -> Channel:
        return Channel(self.at, index, len(self.worst), float(self.worst[index]))


def _by_channel(
    whole: OutputError, apart: Array, want: Array, largest: float, least: float, rounding: dict[int, float] | None
) -> OutputError:
    found = replace(whole, noise=0.0)
    for at in range(1, want.ndim):
        if want.shape[at] == 1:
            continue
        axis = _axis(at, apart, want, largest)
        if rounding is not None:
            axis = _but_for_rounding(axis, want, largest, least, rounding)
        relative = axis.worst / axis.scale
        first, second, third = int(relative.argmax()), int(axis.noise.argmax()), int(axis.variation.argmin())
        if relative[first] > found.max_rel:
            found = replace(found, max_rel=float(relative[first]), channel=axis.channel(first))
        if axis.noise[second] > (found.noise or 0.0):
            found = replace(found, noise=float(axis.noise[second]), noise_channel=axis.channel(second))
        if axis.variation[third] < found.variation:
            found = replace(found, variation=float(axis.variation[third]), dead_channel=axis.channel(third))
        found = replace(found, rms_rel=max(found.rms_rel or 0.0, float((axis.rms / axis.scale).max())))
    return found


def _axis(at: int, apart: Array, want: Array, largest: float) -> _Axis:
    others = tuple(axis for axis in range(want.ndim) if axis != at)
    count = want.size // want.shape[at]
    sizes = np.abs(want).max(axis=others)
    squares, means, deviations = np.square(apart).mean(axis=others), want.mean(axis=others), want.std(axis=others)
    scale, deviation = np.empty_like(sizes), np.empty_like(sizes)
    power = squares.copy()
    low = want.min(axis=others)
    for group in _groups(sizes, count):
        top = float(sizes[group].max())
        scores = low[group].min() >= 0 and top <= 1
        own = np.maximum(sizes[group], np.median(sizes[group]))
        varies = np.maximum(deviations[group], np.median(deviations[group]))
        if count < _FEW:
            varies = np.sqrt(np.mean(deviations[group] ** 2) + means[group].var())
            power[group] = squares[group].mean()
        if scores:
            own = np.full(len(group), top) if count < _FEW else np.maximum(own, np.minimum(_SCORES, _TAIL * own))
        own = np.maximum(own, _LEAST_SCALE * largest)
        scale[group], deviation[group] = own, np.maximum(varies, _LEAST_DEVIATION * own)
    varies_now = (want + apart).std(axis=others)
    judged = (deviations > _LEAST_DEVIATION * scale) & (count >= _FEW)
    variation = np.where(judged, varies_now / np.where(judged, deviations, 1.0), 1.0)
    return _Axis(at, np.abs(apart).max(axis=others), scale, np.sqrt(squares), np.sqrt(power) / deviation, variation)


def _groups(sizes: Array, count: int) -> list[Array]:
    """The channels whose scales are of one order: parted where there is a gap, and enough values below it."""
    order = np.argsort(sizes, kind="stable")
    found, start = [], 0
    for at in range(1, len(order)):
        if sizes[order[at]] > _GAP * sizes[order[at - 1]] and (at - start) * count >= _FEW:
            found.append(order[start:at])
            start = at
    return [*found, order[start:]]


def _but_for_rounding(axis: _Axis, want: Array, largest: float, least: float, rounding: dict[int, float]) -> _Axis:
    """The same where differences within the rounding of the large channels are none, and these have the output's scale."""
    others = tuple(at for at in range(want.ndim) if at != axis.at)
    sizes = np.abs(want).max(axis=others)
    large = sizes >= _LARGE * largest
    rounding[axis.at] = max(rounding.get(axis.at, 0.0), float(axis.worst[large].max()) / largest)
    counts = large | (axis.worst > max(_SLACK * rounding[axis.at], least) * largest)
    own = np.where(large, largest, np.maximum(sizes, np.finfo(np.float64).tiny))
    return replace(axis, worst=np.where(counts, axis.worst, 0.0), scale=own)


# ------------------------------------------------------------------------------------------------ figures


def _real(array: Array) -> Array:
    """As 64-bit reals; a complex number is two."""
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    return array.astype(np.float64)


def _rms(array: Array) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def _ratio(value: float, over: float) -> float:
    if value == 0:
        return 0.0
    return value / over if over else math.inf


def _cosine(got: Array, want: Array) -> float:
    lengths = float(np.linalg.norm(got) * np.linalg.norm(want))
    if lengths == 0:
        return 1.0 if not got.any() and not want.any() else 0.0
    return min(1.0, float(np.vdot(got, want)) / lengths)

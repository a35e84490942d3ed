"""Activation-aware weight quantisation: which inputs of a weight matter is seen in data, and ranges and scales follow it.

The idea is AWQ's (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023): errors of a weight count as much as what
they are multiplied with, so salient inputs are scaled up before rounding and down again in the activation, and a few large
values are clipped where that serves the rest.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.errors import FeedError
from trt_engine.graph.load import check_onnxruntime, read_proto
from trt_engine.model import Model
from trt_engine.precision.formats import Format, quantize
from trt_engine.precision.observe import Probe, inputs_are_finite
from trt_engine.precision.samples import Samples

__all__ = ["Moments", "collect", "input_scale"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
_ROWS = 512
"""Rows of each activation that are kept to judge scales with."""
_STEPS = 20
_WORTH = 0.98
"""Scaling stays out unless it takes at least this much off the error: it costs a multiplication."""


@dataclass(slots=True)
class Moments:
    """What is known of one activation's channels, the last axis."""

    mean_square: npt.NDArray[np.float64]
    mean_magnitude: npt.NDArray[np.float64]
    rows: Floats
    """A sample of its rows."""
    count: int


class _Gathering:
    """The moments of one tensor as batches pass; the rows kept are a fair sample of all (reservoir sampling)."""

    def __init__(self) -> None:
        self.squares: npt.NDArray[np.float64] | None = None
        self.magnitudes: npt.NDArray[np.float64] | None = None
        self.kept: Floats | None = None
        self.count = 0
        self.rng = np.random.default_rng(0)

    def add(self, array: Array) -> None:
        rows = array.reshape(-1, array.shape[-1]).astype(np.float32)
        if not len(rows):
            return
        if self.squares is None or self.magnitudes is None or self.kept is None:
            self.squares = np.zeros(rows.shape[1])
            self.magnitudes = np.zeros(rows.shape[1])
            self.kept = np.zeros((0, rows.shape[1]), np.float32)
        self.squares += np.square(rows, dtype=np.float64).sum(axis=0)
        self.magnitudes += np.abs(rows).sum(axis=0, dtype=np.float64)
        room = _ROWS - len(self.kept)
        self.kept = np.concatenate([self.kept, rows[:room]])
        for at in range(room, len(rows)) if room < len(rows) else ():
            place = int(self.rng.integers(0, self.count + at + 1))
            if place < _ROWS:
                self.kept[place] = rows[at]
        self.count += len(rows)

    def moments(self, name: str) -> Moments:
        if self.squares is None or self.magnitudes is None or self.kept is None:
            raise FeedError(f"no values of `{name}` were seen", hint="give more data")
        return Moments(self.squares / self.count, self.magnitudes / self.count, self.kept, self.count)


def collect(model: Model, tensors: Sequence[str], samples: Samples, *, memory_mib: int = 512) -> dict[str, Moments]:
    """The moments of these activations over the data, in one pass."""
    proto = read_proto(model.path)
    check_onnxruntime(model, proto)
    gathered = {name: _Gathering() for name in tensors}
    probe: Probe | None = None
    batches = iter(samples)
    while window := list(itertools.islice(batches, probe.window if probe else 1)):
        for batch in window:
            inputs_are_finite(batch)
        if probe is None:
            probe = Probe(model.path, proto, tensors, window[0], memory_mib=memory_mib)
        for batch, name, array in probe.look(window):
            if not np.isfinite(array).all():
                raise FeedError(
                    f"the tensor `{name}` has values that are not finite for {batch.source}",
                    hint="`trt-engine ranges` shows where they begin",
                )
            gathered[name].add(array)
    found = {name: own.moments(name) for name, own in gathered.items()}
    log.info("activations of %d tensors seen over %s", len(found), samples.describe)
    return found


def input_scale(
    matrices: Sequence[Floats], moments: Moments, form: Format, blocks: Sequence[int | None]
) -> Floats | None:
    """What to multiply the inputs of these weights (each outputs x inputs) with before rounding, for the least error of
    the layers' outputs together; None when no scaling is worth it."""
    magnitude = np.maximum(moments.mean_magnitude, 1e-8)
    rows = moments.rows
    plain = best = _error(matrices, np.ones(rows.shape[1], np.float32), rows, form, blocks)
    chosen: Floats | None = None
    for step in range(1, _STEPS):
        scale = magnitude ** (step / _STEPS)
        scale = (scale / np.sqrt(scale.max() * scale.min())).astype(np.float32)
        error = _error(matrices, scale, rows, form, blocks)
        if error < best:
            best, chosen = error, scale
    return chosen if best < _WORTH * plain else None


def _error(
    matrices: Sequence[Floats], scale: Floats, rows: Floats, form: Format, blocks: Sequence[int | None]
) -> float:
    total = 0.0
    for matrix, block in zip(matrices, blocks, strict=True):
        rounded = quantize(matrix * scale, form, axis=1, block=block).dequantize() / scale
        total += float(np.square(rows @ (rounded - matrix).T, dtype=np.float64).sum())
    return total

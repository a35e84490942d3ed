"""A model and what became of it, on the same few rows: how far apart their outputs are.

A model that sorts (TopK, NonMaxSuppression) is compared by what it sorts: near-equal scores change places for nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.run import run_arrays
from trt_engine.engine import OutputError
from trt_engine.equivalence.compare import compare
from trt_engine.equivalence.parity import open_exposing
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.sorted_outputs import compared_tensors
from trt_engine.equivalence.tolerance import DEAD
from trt_engine.errors import AccuracyError, ModelError, UsageError
from trt_engine.graph.load import read_proto
from trt_engine.model import Model
from trt_engine.precision.samples import Samples
from trt_engine.runtime.feeds import shapes_of
from trt_engine.tensors import Signature

__all__ = ["Comparison", "Measured", "open_batch"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_ROWS = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """How far the one lies from the other."""

    outputs: dict[str, OutputError]
    """By output, or by the tensor that is sorted."""
    inputs: str
    on: Literal["kernels", "emulation"]
    """What computed the one that was changed."""


class Comparison:
    """The model as it was, ready to be compared with what became of it."""

    def __init__(self, model: Model, samples: Samples | None) -> None:
        self.model = model
        self.result: Measured | None = None
        self._tensors = compared_tensors(read_proto(model.path))
        self._feeds, self._described = self._some_feeds(samples)
        self._wanted: dict[str, Array] | None = None

    def _some_feeds(self, samples: Samples | None) -> tuple[dict[str, Array] | None, str]:
        if samples is not None and samples.again:
            batch = next(iter(samples), None)
            if batch is not None:
                return batch.feeds, f"{batch.rows} rows of {samples.describe}"
        signature = self.model.signature
        try:
            shapes = shapes_of(signature, None, batch=open_batch(signature, _ROWS))
            return random_inputs(self.model.path, signature, shapes), "seeded random, seed 0"
        except (UsageError, ModelError) as error:
            log.info("no comparison with the model as it was: %s", error.message)
            return None, ""

    def measure(self, path: Path, on: Literal["kernels", "emulation"], level: str) -> None:
        """Run both: enough to see a graph that is wrong, not to say how accurate it is on a task.

        `AccuracyError` for a channel that no longer varies.
        """
        if self._feeds is None:
            return
        if self._wanted is None:
            self._wanted = self._run(self.model.path, "none")
        got = self._run(path, level)
        errors = {name: compare(got[name], wanted) for name, wanted in self._wanted.items()}
        self.result = Measured(errors, self._described, on)
        for name, error in errors.items():
            if error.variation < DEAD:
                raise AccuracyError(
                    f"{error.dead_channel} of `{name}` is dead in the quantised model: {error.variation:.1%} of its "
                    f"variation is left on {self._described}",
                    hint="calibrate with data like the model's own, or leave the layers before it out (`--exclude-node`); "
                    "`trt-engine search` finds them; `--no-parity` writes the model all the same",
                )

    def _run(self, path: Path, level: str) -> dict[str, Array]:
        assert self._feeds is not None  # `measure` returns before
        loaded = open_exposing(path, self._tensors, level)
        try:
            return dict(zip(self._tensors, run_arrays(loaded, self._tensors, self._feeds), strict=True))
        except session.ERRORS as error:
            raise session.on_run(error) from error


def open_batch(signature: Signature, batch: int) -> int | None:
    """The batch where an input's first dimension is open, None where all are fixed."""
    return batch if any(spec.shape and spec.shape[0] < 0 for spec in signature.inputs) else None

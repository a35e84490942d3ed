"""A model and what became of it, on the same few rows: how far apart their outputs are.

A model that sorts (TopK, NonMaxSuppression) is compared by what it sorts: near-equal scores change places for nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, TensorProto, ValueInfoProto

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.run import run_arrays
from trt_engine.engine import OutputError
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.load import read_proto
from trt_engine.graph.trace import trace
from trt_engine.model import Model
from trt_engine.precision.cast import unique_names
from trt_engine.precision.random_inputs import random_inputs
from trt_engine.precision.samples import Samples
from trt_engine.runtime.feeds import shapes_of
from trt_engine.tensors import Signature

__all__ = ["Comparison", "Measured", "compared_tensors", "difference", "open_batch"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_SORTING = frozenset("TopK NonMaxSuppression".split())
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
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
        self._wanted: list[Array] | None = None

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
        """Run both: enough to see a graph that is wrong, not to say how accurate it is on a task."""
        if self._feeds is None:
            return
        if self._wanted is None:
            self._wanted = _run(self.model.path, self._tensors, self._feeds, "none")
        got = _run(path, self._tensors, self._feeds, level)
        errors = {
            name: difference(mine, other) for name, mine, other in zip(self._tensors, got, self._wanted, strict=True)
        }
        self.result = Measured(errors, self._described, on)


def compared_tensors(proto: ModelProto) -> list[str]:
    """The outputs that are numbers; of a graph that sorts, the numbers that sorting and what follows it read."""
    facts = trace(proto, {}).facts
    after: set[str] = set()
    found: dict[str, None] = {}
    for node in proto.graph.node:
        if (node.op_type in _SORTING and not walk.domain_of(node)) or any(name in after for name in node.input):
            after.update(name for name in node.output if name)
            for name in node.input:
                fact = facts.get(name)
                if name and name not in after and fact is not None and fact.elem in _FLOATS and not fact.stored:
                    found[name] = None
    outputs = [item.name for item in proto.graph.output if item.name not in after]
    return list(dict.fromkeys([*outputs, *found]))


def _run(path: Path, tensors: Sequence[str], feeds: dict[str, Array], level: str) -> list[Array]:
    proto = read_proto(path)
    unique_names(proto)
    stated = {item.name for item in proto.graph.output}
    for name in tensors:
        if name not in stated:
            proto.graph.output.append(ValueInfoProto(name=name))
    made = session.session_options(OnnxRuntimeOptions(arena=False), level=level)
    made.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent.resolve()))
    try:
        raw = proto.SerializeToString()
        loaded = ort.InferenceSession(raw, made, providers=["CPUExecutionProvider"], enable_fallback=0)
    except session.ERRORS as error:
        raise session.on_load(error, path) from error
    try:
        results: list[Array] = run_arrays(loaded, tensors, feeds)
    except session.ERRORS as error:
        raise session.on_run(error) from error
    return results


def difference(output: Any, reference: Any) -> OutputError:
    """How far one tensor lies from the reference; infinitely far where shapes differ or values are not finite."""
    got, want = np.asarray(output), np.asarray(reference)
    if want.dtype.kind not in "fiub" or got.shape != want.shape:
        same = got.shape == want.shape and bool(np.array_equal(got, want))
        return OutputError(0.0, 0.0, 0.0, 1.0) if same else OutputError(math.inf, math.inf, math.inf, 0.0)
    got, want = got.astype(np.float64), want.astype(np.float64)
    if not got.size:
        return OutputError(0.0, 0.0, 0.0, 1.0)
    if not np.isfinite(got).all() or not np.isfinite(want).all():
        return OutputError(math.inf, math.inf, math.inf, 0.0)
    apart, largest = np.abs(got - want), float(np.abs(want).max())
    worst = float(apart.max())
    relative = 0.0 if not worst else worst / largest if largest else math.inf
    lengths = float(np.linalg.norm(got) * np.linalg.norm(want))
    cosine = min(1.0, float(np.vdot(got, want)) / lengths) if lengths else float(not got.any() and not want.any())
    return OutputError(worst, float(apart.mean()), relative, cosine)


def open_batch(signature: Signature, batch: int) -> int | None:
    """The batch where an input's first dimension is open, None where all are fixed."""
    return batch if any(spec.shape and spec.shape[0] < 0 for spec in signature.inputs) else None

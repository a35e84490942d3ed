"""What two engines answered to the same input, and what differs in the engines themselves."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_engine.api.comparing.engines import Contestant
from trt_engine.comparisons import EngineDiff
from trt_engine.engine import Engine
from trt_engine.errors import TrtEngineError
from trt_engine.evaluation.parity import are_sorted, compare_rows, is_sorting
from trt_engine.evaluation.parity import compare as error_of
from trt_engine.graph.load import read_proto
from trt_engine.profiling.diff import diff
from trt_engine.tensors import format_shape

__all__ = ["Outputs", "compared_outputs", "compared_structure"]

_ROWS_REPLACED = 0.01
_ROWS_TIED = 1e-2
"""What `build` allows a model that sorts rows (evaluation/parity.py): near-equal scores change places."""

log = logging.getLogger(__package__)


@dataclass(slots=True)
class Outputs:
    """What two engines answered to the same input."""

    errors: dict[str, Any] = dataclasses.field(default_factory=dict)
    note: str = ""
    differ: bool = False
    """Some output has no figure: another shape, values that are not finite."""
    top1_same: dict[str, float] = dataclasses.field(default_factory=dict)


def compared_outputs(first: Contestant, other: Contestant) -> Outputs:
    """How far the other one's outputs lie from the first one's."""
    if first.outputs is None or other.outputs is None:
        return Outputs(note=first.outputs_note or other.outputs_note, differ=True)
    made, said, remarks = Outputs(), [], []
    sorting = _sorts(first.engine) or _sorts(other.engine)
    for name, want in first.outputs.items():
        if name not in other.outputs:
            said.append(f"`{name}` is no output of `{other.label}`")
            continue
        got, want = np.asarray(other.outputs[name]), np.asarray(want)
        error = error_of(got, want)
        if sorting or (are_sorted(got) and are_sorted(want)):
            matched = compare_rows(got, want, _ROWS_REPLACED, tied=_ROWS_TIED)
            if matched.max_rel < error.max_rel:
                remarks.append(
                    f"rows of `{name}` are matched by value, without the {_ROWS_REPLACED:.0%} that lie worst and those tied "
                    f"with the last: the model sorts them (row by row as they stand, {error.max_abs:.3g})"
                )
                error = matched
        if math.isfinite(error.max_rel) and math.isfinite(error.max_abs):
            made.errors[name] = error
        elif got.shape != want.shape:
            said.append(f"`{name}` is {format_shape(want.shape)} against {format_shape(got.shape)}")
        else:
            said.append(f"`{name}` holds other values that are not finite, or is zero on one side alone")
        if got.shape == want.shape and want.ndim == 2 and want.shape[1] > 1 and want.dtype.kind == "f":
            made.top1_same[name] = float(np.mean(got.argmax(axis=1) == want.argmax(axis=1)))
    said += [f"`{name}` is no output of `{first.label}`" for name in other.outputs if name not in first.outputs]
    made.differ = bool(said)
    made.note = "; ".join([*said, *remarks])
    return made


def _sorts(engine: Engine) -> bool:
    """Whether the model puts rows in an order, of a payload that is an ONNX file."""
    if engine.path.suffix.lower() != ".onnx":
        return False
    try:
        return is_sorting(read_proto(engine.path))
    except TrtEngineError:
        return False


def compared_structure(first: Engine, other: Engine) -> EngineDiff | None:
    """What differs in the engines themselves, where that can be told."""
    try:
        return diff(first.path, other.path)
    except TrtEngineError as error:
        log.info("the engines' structure was not compared: %s", error.message)
        return None

"""What two engines answered to the same input, and what differs in the engines themselves."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_engine.api.comparing.engines import Contestant
from trt_engine.comparisons import EngineDiff
from trt_engine.engine import Engine
from trt_engine.equivalence.sorted_outputs import compare_outputs, look_sorted, sorted_outputs
from trt_engine.equivalence.tolerance import TOLERANCES
from trt_engine.errors import TrtEngineError
from trt_engine.graph.load import read_proto
from trt_engine.profiling.diff import diff
from trt_engine.tensors import format_shape

__all__ = ["Outputs", "compared_outputs", "compared_structure"]

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
    want = {name: np.asarray(array) for name, array in first.outputs.items()}
    got = {name: np.asarray(array) for name, array in other.outputs.items()}
    errors = compare_outputs(got, want, _ranked(first.engine, other.engine, got, want), TOLERANCES["fp16"])
    for name, reference in want.items():
        if name not in got:
            said.append(f"`{name}` is no output of `{other.label}`")
            continue
        error = errors[name]
        if math.isfinite(error.max_rel) and math.isfinite(error.max_abs):
            made.errors[name] = error
        elif got[name].shape != reference.shape:
            said.append(f"`{name}` is {format_shape(reference.shape)} against {format_shape(got[name].shape)}")
        else:
            said.append(f"`{name}` holds other values that are not finite, or is zero on one side alone")
        if error.rows_moved or error.rows_left_out:
            remarks.append(
                f"`{name}` comes out of a sort: {error.rows_moved} rows are compared at another place, "
                f"{error.rows_left_out} of {math.prod(reference.shape[:2])} at the cut are left out"
            )
        if got[name].shape == reference.shape and _has_scores(reference):
            made.top1_same[name] = float(np.mean(got[name].argmax(axis=1) == reference.argmax(axis=1)))
    said += [f"`{name}` is no output of `{first.label}`" for name in got if name not in want]
    made.differ = bool(said)
    made.note = "; ".join([*said, *remarks])
    return made


def _has_scores(output: Any) -> bool:
    """True of rows of scores."""
    return bool(output.ndim == 2 and output.shape[1] > 1 and output.dtype.kind == "f")


def _ranked(first: Engine, other: Engine, got: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """The outputs that a sort comes before; where neither graph can be read, those whose rows look sorted."""
    graphs = [found for engine in (first, other) if (found := _sorted_in(engine)) is not None]
    if graphs:
        return [name for name in want if any(name in found for found in graphs)]
    return [name for name in want if name in got and look_sorted(got[name]) and look_sorted(want[name])]


def _sorted_in(engine: Engine) -> tuple[str, ...] | None:
    """The outputs that a sort comes before, of a payload that is an ONNX file."""
    if engine.path.suffix.lower() != ".onnx":
        return None
    try:
        return sorted_outputs(read_proto(engine.path))
    except TrtEngineError:
        return None


def compared_structure(first: Engine, other: Engine) -> EngineDiff | None:
    """What differs in the engines themselves, where that can be told."""
    try:
        return diff(first.path, other.path)
    except TrtEngineError as error:
        log.info("the engines' structure was not compared: %s", error.message)
        return None

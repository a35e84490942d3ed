"""Parity: an engine's outputs against plain ONNX Runtime's on the same input."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto

from trt_engine.backends.onnxruntime.run import reference
from trt_engine.config import Profile
from trt_engine.engine import OutputError, Parity
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize
from trt_engine.precision.random_inputs import random_inputs
from trt_engine.tensors import Shape, Signature, Tensors, format_shape

__all__ = [
    "BY_ROWS",
    "REFERENCE",
    "are_sorted",
    "compare",
    "compare_rows",
    "is_sorting",
    "parity",
    "rounding",
    "small_shapes",
    "tolerance_for",
    "usual_tolerance",
    "within",
]

log = logging.getLogger(__name__)

REFERENCE = "onnxruntime on the CPU, no graph optimisation"
BY_ROWS = "rows matched by value"
"""In `Parity.inputs` where the figures leave rows out that the tolerance says are tied: they speak of no stricter one."""

Array = npt.NDArray[Any]

# what the model's own rounding allows two right implementations to differ by
_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 1e-2, "bf16": 5e-2, "quantized": 1e-1}
_FLOATS = ("fp32", "tf32", "fp16", "bf16")
_QUANTIZED = ("QLinear", "QGemm", "QAttention", "MatMulNBits", "MatMulInteger", "ConvInteger")
_SORTING = frozenset("TopK NonMaxSuppression Sort ArgSort".split())
_ROWS_REPLACED = {"quantized": 0.10}
_ROWS_REPLACED_ELSE = 0.01
_MOST_ROWS = 4096
"""Rows are matched all against all: more than this would take gigabytes."""


def parity(
    model: Path,
    proto: ModelProto,
    signature: Signature,
    profile: Profile,
    run: Callable[[Tensors], Mapping[str, Any]],
    *,
    tolerance: float | None = None,
    tf32: bool = False,
    values: Mapping[str, Sequence[int]] | None = None,
    engine: Path | None = None,
    seed: int = 0,
) -> Parity:
    """How far `run` lies from plain ONNX Runtime on one seeded input of a small batch; `tf32` when it computes in that.

    `values` are the usual ones of inputs that hold sizes: they fit the profile's usual shapes, which are taken whole then.
    Inputs that could end a process are tried in another first, with the `engine` too where it is a graph. What plain ONNX
    Runtime raises for a model it does not run passes through; nothing is judged then.
    """
    shapes = {name: span.opt for name, span in profile.ranges.items()} if values else small_shapes(signature, profile)
    feeds = random_inputs(model, signature, shapes, seed, values, engine=engine)
    expected = reference(model, signature).run(feeds)
    kind = _with_tf32(rounding(proto), tf32)
    limit = tolerance if tolerance is not None else _TOLERANCE[kind]
    outputs = run(feeds)
    errors = {name: compare(outputs[name], expected[name]) for name in expected}
    how = ""
    if is_sorting(proto) and any(not within(error, limit) for error in errors.values()):
        # equal up to the order in which near-equal scores were put, and to what was cut off last
        replaced = _ROWS_REPLACED.get(kind, _ROWS_REPLACED_ELSE)
        errors = {name: compare_rows(outputs[name], expected[name], replaced, tied=limit) for name in expected}
        how = f", {BY_ROWS} (the model sorts them; {replaced:.0%} and those tied with the last may be others)"
    described = ",".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items())
    described += "".join(f", `{name}` is {format_shape(tuple(given))}" for name, given in (values or {}).items())
    return Parity(
        reference=REFERENCE,
        inputs=f"seeded random, seed {seed}, {described}{how}",
        tolerance=limit,
        passed=all(within(error, limit) for error in errors.values()),
        outputs=errors,
    )


def within(error: OutputError, tolerance: float) -> bool:
    """False for a NaN too."""
    return error.max_rel <= tolerance


def tolerance_for(proto: ModelProto) -> float:
    """What two right implementations of this model may differ by, relative to the largest value."""
    return _TOLERANCE[rounding(proto)]


def usual_tolerance(kind: str, *, tf32: bool = False) -> float:
    """The same for what `rounding` found; `tf32` when FP32 is computed in that."""
    return _TOLERANCE[_with_tf32(kind, tf32)]


def rounding(proto: ModelProto, brought_to: str | None = None) -> str:
    """The coarsest rounding the model itself asks for, or what it is cast or quantised to before it is built."""
    if brought_to not in (None, *_FLOATS) or any(_is_quantized(place.node) for place in walk.nodes(proto)):
        return "quantized"
    values = (*proto.graph.input, *proto.graph.output)
    kinds = {tensor.data_type for tensor in walk.tensors(proto)} | {v.type.tensor_type.elem_type for v in values}
    if 16 in kinds or brought_to == "bf16":
        return "bf16"
    return "fp16" if 10 in kinds or brought_to == "fp16" else "fp32"


def _is_quantized(node: NodeProto) -> bool:
    """True for one half of a Q/DQ pair too: weights stored quantized have no QuantizeLinear."""
    return is_quantize(node) or is_dequantize(node) or node.op_type.startswith(_QUANTIZED)


def _with_tf32(kind: str, tf32: bool) -> str:
    return "tf32" if tf32 and kind == "fp32" else kind


def is_sorting(proto: ModelProto) -> bool:
    """True when the model orders rows by a computed value: near-equal ones may change places."""
    return any(place.node.op_type in _SORTING for place in walk.nodes(proto))


def small_shapes(signature: Signature, profile: Profile) -> dict[str, Shape]:
    """The profile's usual shapes with the smallest batch above one that it allows, else its smallest."""
    shapes = {}
    for spec in signature.inputs:
        span = profile.ranges[spec.name]
        sizes = list(span.opt)
        if sizes and spec.shape[0] < 0:
            sizes[0] = min(max(2, span.min[0]), span.max[0])
        shapes[spec.name] = tuple(sizes)
    return shapes


def compare(output: Any, reference: Any) -> OutputError:
    """How far one output lies from the reference; infinitely far when shapes or special values differ."""
    got, want = np.asarray(output), np.asarray(reference)
    if got.shape != want.shape:
        return OutputError(math.inf, math.inf, math.inf, 0.0)
    if want.dtype.kind in "OUS":
        same = bool(np.array_equal(got.astype(str), want.astype(str)))
        return OutputError(0.0, 0.0, 0.0, 1.0) if same else OutputError(math.inf, math.inf, math.inf, 0.0)
    return _error(_real(got), _real(want))


def _real(array: Array) -> Array:
    """As 64-bit reals; a complex number is two."""
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    return array.astype(np.float64)


def _error(got: Array, want: Array) -> OutputError:
    if not got.size:
        return OutputError(0.0, 0.0, 0.0, 1.0)
    odd = ~np.isfinite(want)
    if not np.array_equal(got[odd], want[odd], equal_nan=True) or not np.isfinite(got[~odd]).all():
        return OutputError(math.inf, math.inf, math.inf, 0.0)
    got, want = got[~odd], want[~odd]
    if not got.size:
        return OutputError(0.0, 0.0, 0.0, 1.0)
    apart = np.abs(got - want)
    largest = float(np.abs(want).max())
    worst = float(apart.max())
    return OutputError(
        max_abs=worst,
        mean_abs=float(apart.mean()),
        max_rel=_relative(worst, largest),
        cosine=_cosine(got, want),
    )


def _relative(worst: float, largest: float) -> float:
    if worst == 0:
        return 0.0
    return worst / largest if largest else math.inf


def _cosine(got: Array, want: Array) -> float:
    lengths = float(np.linalg.norm(got) * np.linalg.norm(want))
    if lengths == 0:
        return 1.0 if not got.any() and not want.any() else 0.0
    return min(1.0, float(np.vdot(got, want)) / lengths)


def compare_rows(
    output: Any, reference: Any, replaced: float = _ROWS_REPLACED["quantized"], *, tied: float | None = None
) -> OutputError:
    """As `compare` for `[N, R, ...]`, each row of an item against the other side's nearest, from both sides (so that no
    row stands for many), the `replaced` worst left out.

    With `tied`, where a column falls from row to row (the score they were sorted by), rows that rounding cannot tell from
    the last one are left out as well, within `tied` of it (relative) and a few times what the two sides' scores differ by:
    which of equals were cut off is nobody's error.
    """
    got, want = np.asarray(output), np.asarray(reference)
    if got.shape != want.shape or want.dtype.kind in "OUS" or want.ndim < 2 or not want.size:
        return compare(output, reference)
    got, want = _real(got), _real(want)
    if want.shape[1] > _MOST_ROWS or not np.isfinite(want).all() or not np.isfinite(got).all():
        return _error(got, want)
    count, rows = want.shape[:2]
    got, want = got.reshape(count, rows, -1), want.reshape(count, rows, -1)
    score = _sorted_by(want) if tied is not None else None
    left, right = [], []
    for mine, other in zip(got, want, strict=True):
        cut = _cut(mine, other, score, tied or 0.0)
        for a, b, own in ((mine, other[_nearest(mine, other)], mine), (mine[_nearest(other, mine)], other, other)):
            judged = _above(own, score, cut)
            apart = np.abs(a - b)[judged].max(axis=1)
            kept = np.argsort(apart, kind="stable")[: max(1, len(apart) - math.ceil(replaced * rows))]
            left.append(a[judged][kept])
            right.append(b[judged][kept])
    return _error(np.concatenate(left), np.concatenate(right))


def are_sorted(output: Any) -> bool:
    """True where the rows of `[N, R, C]` fall by one of their columns in every item; fewer than 16 may do so by chance."""
    rows = np.asarray(output)
    return rows.ndim == 3 and rows.shape[1] >= 16 and rows.dtype.kind == "f" and _sorted_by(rows) is not None


def _sorted_by(rows: Array) -> int | None:
    """The column that falls from row to row in every item: what the rows were sorted by; None where there is none."""
    if rows.shape[1] < 2:
        return None
    falls = (np.diff(rows, axis=1) <= 0).all(axis=(0, 1)) & (rows[:, 0] > rows[:, -1]).any(axis=0)
    return int(np.argmax(falls)) if falls.any() else None


def _cut(mine: Array, other: Array, score: int | None, tied: float) -> float:
    """The score up to which a row may be in or out."""
    if score is None:
        return -math.inf
    last = float(other[-1, score])
    apart = float(np.abs(np.sort(mine[:, score]) - np.sort(other[:, score])).max())
    return last + tied * abs(last) + 4 * apart


def _above(rows: Array, score: int | None, cut: float) -> npt.NDArray[np.intp]:
    """The rows that must be on both sides; all of them where that would be none."""
    every = np.arange(len(rows))
    above = every if score is None else every[rows[:, score] > cut]
    return above if above.size else every


def _nearest(mine: Array, other: Array) -> npt.NDArray[np.intp]:
    """For each of my rows the other's row with the smallest largest difference."""
    found = np.empty(len(mine), np.intp)
    for index, row in enumerate(mine):
        found[index] = np.abs(other - row).max(axis=1).argmin()
    return found

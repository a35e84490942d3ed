"""Masks of attention: what is added to the scores, or put in their place, as one additive bias of rank 4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import FusionGraph, NotFused
from trt_engine.graph.fusion.operator_demands import Names, is_named, require_bias
from trt_engine.graph.symbolic_shapes import Size

_LARGEST_FILL = -1e4
"""A number that takes the place of masked scores must be at most this for an addition to have its effect."""
_NUMPY: dict[int, type] = {TensorProto.FLOAT16: np.float16, TensorProto.FLOAT: np.float32}
LOWEST: dict[int, float] = {elem: float(np.finfo(kind).min) for elem, kind in _NUMPY.items()}
_ABSORBING_FILL = -1e30
"""A number that is the same with a score added to it."""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask of the scores."""

    scores: str
    """The scores before it."""
    tensor: str
    scale: float = 1.0
    """Factor of the scores after the mask."""
    fill: float | None = None
    """For a boolean mask, what replaces masked scores, scaled; None for one that is added."""
    masked_value: bool = False
    """For a boolean mask, the value of masked positions."""
    finite: bool = False
    """True if it cannot be minus infinity."""
    for_all_heads: bool = False
    """True if it is the same for all heads."""
    expanded: bool = False
    """True if its last two dimensions are those of the scores."""


@dataclass(frozen=True, slots=True)
class SequenceLength:
    """Where the number of queries is found: a known size, or a dimension of a tensor."""

    size: Size
    tensor: str
    axis: int


def read_mask(graph: FusionGraph, node: NodeProto, scale: float) -> Mask | None:
    """The mask that a node applies, None if it does not mask; `NotFused` for a form that cannot be fused.

    `scale` is the factor of the mask.
    """
    if walk.domain_of(node) or node.op_type not in ("Add", "Where"):
        return None
    if node.op_type == "Add":
        scores, tensor = node.input if _is_scores(graph, node.input[0]) else reversed(node.input)
        return Mask(scores, tensor, scale, finite=is_finite(graph, tensor))
    condition, yes, no = node.input
    filled = (graph.scalar(yes), graph.scalar(no))
    if (filled[0] is None) == (filled[1] is None):
        infinite = [_is_minus_infinity(graph, name) for name in (yes, no)]
        if infinite[0] == infinite[1]:
            raise NotFused("its scores are chosen from two tensors, expected a number for those that are masked")
        filled = (-math.inf if infinite[0] else None, -math.inf if infinite[1] else None)
    fill = (filled[0] if filled[0] is not None else filled[1] or 0.0) * scale
    if not fill <= _LARGEST_FILL:
        raise NotFused(f"masked scores become {fill:g}, expected {_LARGEST_FILL:g} or less")
    masked = filled[0] is not None
    return Mask(no if masked else yes, condition, 1.0, fill, masked, math.isfinite(fill))


def fit_masks(graph: FusionGraph, masks: Sequence[Mask], scores: Sequence[Names], elem: int) -> tuple[Mask, ...]:
    """The masks, the last to be applied first, as parts of a bias of this type with what each writes; `NotFused` where the
    bias would not give what they give. `scores` are the names of each size: batch, heads, queries, keys."""
    fitted = []
    for mask in masks:
        shape = graph.repeated_shape(mask.tensor)
        if shape is None or len(shape) > 4:
            raise NotFused(f"its mask has rank {'unknown' if shape is None else len(shape)}, expected at most 4")
        require_bias(shape, scores)
        if mask.scale < 0 and not mask.finite:
            raise NotFused("its mask is multiplied by a negative number, which makes minus infinity plus infinity")
        expanded = all(map(is_named, shape[-2:], scores[-2:]))
        fitted.append(replace(mask, for_all_heads=len(shape) < 3 or shape[-3] == 1, expanded=expanded))
    return _with_written_fills(fitted, elem)


def _with_written_fills(masks: Sequence[Mask], elem: int) -> tuple[Mask, ...]:
    """The masks with a fill that acts as a sum as theirs does in the place of scores, also in a row without any key.

    The lowest number takes every score in, but a second mask may meet it: then a fill must do so as it is.
    """
    with np.errstate(over="ignore"):
        written = [None if mask.fill is None else float(_NUMPY[elem](mask.fill)) for mask in masks]
    fills = {fill for fill in written if fill is not None and math.isfinite(fill)}
    same = len(fills) == 1 and None not in written
    if not same and not all(fill <= _ABSORBING_FILL for fill in fills):
        raise NotFused(
            f"one of two masks puts {max(fills):g} in the place of scores, which as a sum would not hide them"
        )
    return tuple(
        replace(
            mask,
            fill=LOWEST[elem] if same and fill in fills else fill,
            finite=mask.finite and (fill is None or math.isfinite(fill)),
        )
        for mask, fill in zip(masks, written, strict=True)
    )


def _is_scores(graph: FusionGraph, name: str, depth: int = 6) -> bool:
    """True for a product of two computed tensors, with scalars and masks behind it."""
    node = graph.producer(name, "MatMul", "Mul", "Div", "Add", "Where", "Cast")
    if node is None or not depth or not graph.is_private(name):
        return False
    if node.op_type == "MatMul":
        return not any(graph.is_constant(item) for item in node.input)
    names = node.input[1:] if node.op_type == "Where" else node.input
    return any(_is_scores(graph, item, depth - 1) for item in names)


def _is_minus_infinity(graph: FusionGraph, name: str) -> bool:
    value = graph.small_value(name)
    return value is not None and value.size == 1 and bool(np.isneginf(value.reshape(-1)[0]))


def is_finite(graph: FusionGraph, name: str, above: float = -math.inf, depth: int = 12) -> bool:
    """True if a tensor is shown to hold no infinity, and nothing up to `above`, on the scale of the scores: a
    choice between such constants, or a multiple of a boolean."""
    if graph.is_constant(name):
        values = graph.read(name).astype(np.float64)
        return bool((np.isfinite(values) & (values > above)).all())
    node = graph.producer(name)
    if node is None or walk.domain_of(node) or not depth:
        return False
    if node.op_type == "Where":
        return all(is_finite(graph, item, above, depth - 1) for item in node.input[1:])
    if node.op_type in ("Reshape", "Expand", "Unsqueeze", "Squeeze", "Slice", "Transpose", "Gather", "Split", "Trilu"):
        return is_finite(graph, node.input[0], above, depth - 1)
    if node.op_type == "Mul":  # a boolean times a finite number
        return all(
            is_finite(graph, item, above, depth - 1)
            or (
                (cast := graph.producer(item, "Cast")) is not None
                and graph.elem_type(cast.input[0]) == TensorProto.BOOL
            )
            for item in node.input
        )
    return False


def attention_bias(graph: FusionGraph, masks: Sequence[Mask], length: SequenceLength, elem: int) -> str:
    """One tensor (batch or 1, heads or 1, queries, keys) to be added to the scores; an empty name without masks."""
    total = ""
    for mask in reversed(masks):
        if mask.fill is not None:  # replaces what is masked before
            total = _rank_four(graph, mask, length, elem, total)
            continue
        added = _rank_four(graph, mask, length, elem)
        total = graph.builder.add("Add", [total, added], "attention_bias") if total else added
    return total


def reachable_bias(graph: FusionGraph, bias: str, elem: int, *, with_lowest: bool) -> tuple[str, str]:
    """The bias without a query whose keys are all masked, by minus infinity or by the lowest number too, and a boolean
    (batch or 1, queries, 1) of those queries. Minus infinity stays beside other numbers: the lowest weighs more."""
    if (bias, "reachable") not in graph.shared:
        builder, kind = graph.builder, _NUMPY[elem]
        lowest = graph.constant(np.array(LOWEST[elem], kind), "lowest")
        largest = graph.with_axes("ReduceMax", bias, [-1], since=18, keepdims=0)
        masked = builder.add("LessOrEqual" if with_lowest else "Less", [largest, lowest], bias)
        graph.shared[bias, "masked"] = builder.add("Transpose", [masked], bias, perm=[0, 2, 1])
        rows = graph.with_axes("Unsqueeze", masked, [-1], since=13)
        graph.shared[bias, "reachable"] = builder.add("Where", [rows, lowest, bias], bias)
    return graph.shared[bias, "reachable"], graph.shared[bias, "masked"]


def _rank_four(graph: FusionGraph, mask: Mask, length: SequenceLength, elem: int, before: str = "") -> str:
    where = length.size if length.size is not None else f"{length.tensor}:{length.axis}"
    key = (mask.tensor, mask.scale, mask.fill, mask.masked_value, elem, "" if mask.expanded else where, before)
    if key not in graph.shared:
        graph.shared[key] = _write_mask(graph, mask, length, elem, before)
    return graph.shared[key]


def _write_mask(graph: FusionGraph, mask: Mask, length: SequenceLength, elem: int, before: str) -> str:
    """The mask as a bias of rank 4; `before` is the bias of that rank that a boolean mask replaces in part."""
    builder, stem = graph.builder, f"{mask.tensor}_bias"
    kind = _NUMPY[elem]
    name = mask.tensor
    if mask.fill is not None:
        fill = graph.constant(np.array(mask.fill, kind), stem)
        kept = before or graph.constant(np.array(0, kind), stem)
        name = builder.add("Where", [name, *((fill, kept) if mask.masked_value else (kept, fill))], stem)
        if before:
            return name
    elif elem == TensorProto.FLOAT and graph.elem_type(name) == TensorProto.FLOAT16:
        name = builder.add("Cast", [name], stem, to=elem)
    elif graph.elem_type(name) != elem:
        lowest = graph.constant(np.array(LOWEST[elem], np.float32), stem)
        name = builder.add("Cast", [builder.add("Max", [name, lowest], stem)], stem, to=elem)
    if mask.scale != 1:
        name = builder.add("Mul", [name, graph.constant(np.array(mask.scale, kind), stem)], stem)
    if missing := 4 - len(graph.shape(mask.tensor) or ()):
        name = graph.with_axes("Unsqueeze", name, list(range(missing)), since=13)
    if mask.expanded:
        return name
    one = graph.constant(np.array([1], np.int64), stem)
    if isinstance(length.size, int):
        size = graph.constant(np.array([length.size], np.int64), stem)
    else:
        size = graph.sizes(length.tensor, length.axis, length.axis + 1)
    target = builder.add("Concat", [one, one, size, one], stem, axis=0)
    return builder.add("Expand", [name, target], stem)

"""Queries, keys and values of attention: where in which tensor their heads are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trt_engine.graph.fusion.fusion_graph import FusionGraph
from trt_engine.graph.fusion.head_view import COLUMNS, Columns, View, ViewStep, apply_view, source_view, view_chain
from trt_engine.graph.fusion.projection import Projection, read_projection

_PATTERNS = {  # axes of an operand by its role: batch, heads, sequence, size
    "query": (("B", "C", "S", "C"), ("BC", "S", "C")),
    "key": (("B", "C", "C", "S"), ("BC", "C", "S")),
    "value": (("B", "C", "S", "C"), ("BC", "S", "C")),
}
_ORDERS = {3: ("BSC", "SBC"), 4: ("BSCC", "BCSC")}


@dataclass(frozen=True, slots=True)
class Heads:
    """Queries, keys or values: the tensor they come from and where in it their heads are."""

    tensor: str
    """The operand of the product."""
    source: str
    order: str
    """Dimensions of `anchor`: `BSC`, `SBC`, `BSCC` or `BCSC`, for batch, sequence and columns."""
    anchor: str
    """A tensor with the batch and the sequence as dimensions: the source, or where that has merged them, what it is of."""
    view: View
    columns: Columns
    """Column of the source by head and position in the head; shape (heads, head size)."""
    width: int
    """Columns of the source."""
    scale: float
    projection: Projection | None = None

    @property
    def merged_rows(self) -> bool:
        """True for a source with batch and sequence in one dimension."""
        return self.projection is not None and self.projection.merged

    @property
    def is_whole(self) -> bool:
        """True if the heads are all columns of the source, in order."""
        flat = self.columns.reshape(-1)
        return self.width == len(flat) and np.array_equal(flat, np.arange(len(flat)))


def read_heads(graph: FusionGraph, name: str, role: str) -> Heads | None:
    """The heads of an operand of a product, traced as far back as they can be; None if they cannot."""
    source, chain, scale = view_chain(graph, name)
    for start in range(len(chain) + 1):
        tensor, factor = source, scale
        if start:
            tensor = chain[start].node.input[0] if start < len(chain) else name
            factor = chain[start].scale if start < len(chain) else 1.0
        shape = graph.repeated_shape(tensor)
        if shape is None:
            continue
        projection = read_projection(graph, tensor) if len(shape) in (2, 3) else None
        anchor = tensor
        if len(shape) == 2:
            if projection is None or not projection.merged or not isinstance(shape[1], int):
                continue
            anchor = projection.source
            shape = [*(graph.repeated_shape(anchor) or [])[:2], shape[1]]
        for order in _ORDERS.get(len(shape), ()):
            view = source_view(shape, order)
            if view is None:
                continue
            width = view.columns.size
            if anchor != tensor:
                view = View((view.axes[0] + view.axes[1], view.axes[2]), view.columns, view.sizes)
            final = _follow(graph, view, chain[start:])
            columns = _head_columns(final, role) if final is not None else None
            if final is not None and columns is not None:
                return Heads(name, tensor, order, anchor, final, columns, width, factor, projection)
    return None


def merged_heads(graph: FusionGraph, name: str, count: int) -> Heads | None:
    """The heads of a tensor (batch, sequence, heads x size)."""
    shape = graph.repeated_shape(name)
    view = source_view(shape, "BSC") if shape is not None else None
    width = view.columns.size if view is not None else 0
    if view is None or count < 1 or width % count:
        return None
    columns = np.arange(width, dtype=np.int64).reshape(count, -1)
    projection = read_projection(graph, name)
    if projection is not None and projection.merged:
        projection = None
    return Heads(name, name, "BSC", name, view, columns, width, 1.0, projection)


def _follow(graph: FusionGraph, view: View | None, chain: Sequence[ViewStep]) -> View | None:
    for step in chain:
        view = apply_view(graph, view, step.node, step.output) if view is not None else None
    return view


def _head_columns(view: View, role: str) -> Columns | None:
    """Columns by head and position, if the axes are those of the role."""
    pattern = next((item for item in _PATTERNS[role] if len(item) == len(view.axes)), None)
    if pattern is None:
        return None
    for wanted, axis in zip(pattern, view.axes, strict=True):
        opaque = tuple(atom for atom in wanted if atom != COLUMNS and view.sizes.get(atom) != 1)
        rest = axis[len(opaque) :]
        if axis[: len(opaque)] != opaque or any(atom != COLUMNS for atom in rest) or (rest and COLUMNS not in wanted):
            return None
    last = pattern.index("C", 1) if len(pattern) == 3 else pattern.index("C", 2)
    return view.columns.reshape(view.count(1 if len(pattern) == 4 else 0), view.count(last))

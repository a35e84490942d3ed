"""Outputs that a graph sorts (TopK, NonMaxSuppression): near-equal scores have no order, so rows may change places without
being wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from trt_engine.engine import OutputError
from trt_engine.equivalence.compare import compare
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.graph import walk
from trt_engine.graph.trace import trace

__all__ = [
    "align_rows",
    "compare_outputs",
    "compared_tensors",
    "in_their_order",
    "look_sorted",
    "sorted_outputs",
]

Array = npt.NDArray[Any]

_SORTING = frozenset("TopK NonMaxSuppression".split())
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_MOST_ROWS = 4096
"""Rows are matched all against all: more than this would take minutes."""
_MOST_AT_CUT = 0.9
"""Where more rows tie with the last than this share, nothing would be left to agree: all are judged."""
_LEAST_ROWS = 16
"""Fewer may fall from row to row by chance."""


# ------------------------------------------------------------------------------------------------ in the graph


def compared_tensors(proto: ModelProto) -> list[str]:
    """The outputs that no sort comes before; of a graph that sorts, the numbers that sorting and what follows it read."""
    facts = trace(proto, {}).facts
    after, found = _after_sorting(proto), dict[str, None]()
    for node in proto.graph.node:
        if _sorts(node) or any(name in after for name in node.input):
            for name in node.input:
                fact = facts.get(name)
                if name and name not in after and fact is not None and fact.elem in _FLOATS and not fact.stored:
                    found[name] = None
    return list(dict.fromkeys([*(item.name for item in proto.graph.output if item.name not in after), *found]))


def sorted_outputs(proto: ModelProto) -> tuple[str, ...]:
    """The outputs that a sort comes before: their rows may change places."""
    after = _after_sorting(proto)
    return tuple(item.name for item in proto.graph.output if item.name in after)


def _after_sorting(proto: ModelProto) -> set[str]:
    after: set[str] = set()
    for node in proto.graph.node:
        if _sorts(node) or not after.isdisjoint(_reads(node)):
            after.update(name for name in node.output if name)
    return after


def _reads(node: NodeProto) -> Iterator[str]:
    yield from node.input
    for _, body in walk.bodies(node):
        yield from _names_in(body)


def _names_in(graph: GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield from _reads(node)
    yield from (item.name for item in graph.output)


def _sorts(node: NodeProto) -> bool:
    if node.op_type in _SORTING and not walk.domain_of(node):
        return True
    return any(_sorts(inner) for _, body in walk.bodies(node) for inner in body.node)


def look_sorted(output: Any) -> bool:
    """True where the rows of `[N, R, C]` fall by one of their columns in every item: what is left to go by where there is no
    graph (a TensorRT plan)."""
    rows = np.asarray(output)
    return rows.ndim == 3 and rows.shape[1] >= _LEAST_ROWS and rows.dtype.kind == "f" and _sorted_by(rows) is not None


# ------------------------------------------------------------------------------------------------ in numbers


def compare_outputs(
    got: Mapping[str, Any], want: Mapping[str, Any], ranked: Collection[str], tolerance: Tolerance
) -> dict[str, OutputError]:
    """How far each output is from the reference; rows of the `ranked` ones (those a sort comes before) are matched by value
    where they are not within `tolerance` as they stand, and what was moved and left out is counted in the figures."""
    errors = {name: compare(got[name], reference) for name, reference in want.items() if name in got}
    if all(tolerance.accepts(errors[name]) for name in ranked if name in errors):
        return errors
    for names, mine, theirs, moved, left_out in align_rows(got, want, ranked, tolerance):
        for name in names:
            fresh = compare(mine[name], theirs[name])
            errors[name] = replace(fresh, rows_moved=moved, rows_left_out=left_out)
    return errors


def align_rows(
    got: Mapping[str, Any], want: Mapping[str, Any], ranked: Collection[str], tolerance: Tolerance
) -> Iterator[tuple[list[str], dict[str, Array], dict[str, Array], int, int]]:
    """Outputs whose rows belong together (a box and its score): their names, what was got and wanted with the rows matched,
    how many changed places, and how many were left out.

    Rows stand on the second axis. Each is matched once. Left out is `tolerance.replaced` of the rows of an item, and what
    rounding cannot tell from the last row's score: which of equals were cut off is not an error. An item of which nearly all
    rows tie with the last leaves none of them out.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for name in ranked:
        if name not in got or name not in want:
            continue
        one, two = np.asarray(got[name]), np.asarray(want[name])
        fits = one.ndim > 1 and one.shape == two.shape and one.dtype.kind in "fiu" and two.dtype.kind in "fiu"
        if fits and 1 < one.shape[1] <= _MOST_ROWS and np.isfinite(one).all() and np.isfinite(two).all():
            together.setdefault(one.shape[:2], []).append(name)
    for names in together.values():
        ours = {name: np.asarray(got[name]) for name in names}
        theirs = {name: np.asarray(want[name]) for name in names}
        columns = _sorted_by(_flat(theirs, None))
        scaled = _flat(ours, theirs), _flat(theirs, theirs)
        rows = [_match(mine, other, columns, tolerance) for mine, other in zip(*scaled, strict=True)]
        kept = [judged for _, judged, _ in rows]
        yield (
            names,
            {name: _taken(ours[name], [taken[judged] for taken, judged, _ in rows]) for name in names},
            {name: _taken(theirs[name], kept) for name in names},
            sum(moved for _, _, moved in rows),
            sum(scaled[1].shape[1] - len(judged) for judged in kept),
        )


def in_their_order(
    got: Mapping[str, Array], want: Mapping[str, Array], ranked: Collection[str], tolerance: Tolerance
) -> tuple[dict[str, Array], int]:
    """What was got with the rows of the `ranked` outputs in the reference's order, none left out, and how many moved."""
    found, most = dict(got), 0
    exact = replace(tolerance, replaced=0.0, ties=False)
    for _, mine, _, moved, _ in align_rows(got, want, ranked, exact):
        found.update(mine)
        most = max(most, moved)
    return found, most


def _taken(array: Array, rows: list[Array]) -> Array:
    """The rows of every item: with the items, where each has as many, else all in one."""
    parts = [array[item, chosen] for item, chosen in enumerate(rows)]
    return np.stack(parts) if len({len(part) for part in parts}) == 1 else np.concatenate(parts)[None]


def _flat(arrays: Mapping[str, Array], reference: Mapping[str, Array] | None) -> Array:
    """The rows of all outputs side by side, as `[N, R, columns]`; every column over its largest value in the reference."""
    parts = []
    for name, array in arrays.items():
        rows = array.astype(np.float64).reshape(*array.shape[:2], -1)
        if reference is not None:
            scale = np.abs(reference[name].astype(np.float64).reshape(rows.shape)).max(axis=(0, 1))
            rows = rows / np.where(scale > 0, scale, 1.0)
        parts.append(rows)
    return np.concatenate(parts, axis=2)


def _sorted_by(rows: Array) -> int | None:
    """The column that falls from row to row in every item: what the rows were sorted by; None where there is none."""
    if rows.shape[1] < 2:
        return None
    falls = (np.diff(rows, axis=1) <= 0).all(axis=(0, 1)) & (rows[:, 0] > rows[:, -1]).any(axis=0)
    return int(np.argmax(falls)) if falls.any() else None


def _match(mine: Array, theirs: Array, score: int | None, tolerance: Tolerance) -> tuple[Array, Array, int]:
    """For each of their rows the one of mine that is it; which of them are judged; how many changed places."""
    taken = np.arange(len(theirs))
    off = np.flatnonzero(np.abs(mine - theirs).max(axis=1) > tolerance.limit)
    found, unmatched = _pair(mine[off], theirs[off], tolerance.limit)
    taken[off] = off[found]
    moved = int((taken[off] != off).sum())
    others = off[unmatched]
    if not others.size:
        return taken, np.arange(len(theirs)), moved
    apart = np.abs(mine[taken[others]] - theirs[others]).max(axis=1)
    at_cut = np.zeros(len(others), bool)
    if score is not None and tolerance.ties:
        last = float(theirs[-1, score])
        off_by = float(np.abs(np.sort(mine[:, score]) - np.sort(theirs[:, score])).max())
        cut = last + tolerance.limit * abs(last) + 4 * off_by
        at_cut = (theirs[others, score] <= cut) & (mine[taken[others], score] <= cut)
        if at_cut.sum() > _MOST_AT_CUT * len(theirs):
            at_cut[:] = False
    above = others[~at_cut]
    allowed = math.ceil(tolerance.replaced * len(theirs))
    worst = above[np.argsort(-apart[~at_cut], kind="stable")[:allowed]]
    judged = np.setdiff1d(np.arange(len(theirs)), [*others[at_cut], *worst])
    return (taken, judged, moved) if judged.size else (np.arange(len(theirs)), np.arange(len(theirs)), 0)


def _pair(mine: Array, theirs: Array, limit: float) -> tuple[Array, Array]:
    """For each of their rows one of mine, each once: the nearest within `limit` first, then the rest; and those beyond."""
    count = len(theirs)
    found = np.full(count, -1)
    free = np.ones(count, bool)
    for within in (True, False):
        for at in np.flatnonzero(found < 0):
            left = np.flatnonzero(free)
            apart = np.abs(mine[left] - theirs[at]).max(axis=1)
            nearest = int(np.argmin(apart))
            if not within or apart[nearest] <= limit:
                found[at] = left[nearest]
                free[found[at]] = False
    apart = np.abs(mine[found] - theirs).max(axis=1) if count else np.zeros(0)
    return found, np.flatnonzero(apart > limit)

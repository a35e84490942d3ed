"""Outputs that a graph sorts (TopK, NonMaxSuppression): near-equal scores have no order, so rows may change places without
being wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_engine.arrayfiles import Array
from trt_engine.equivalence.output_error import compare_output
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import free_name, replace_items, used_names
from trt_engine.graph.shape_inference import trace
from trt_engine.records.parity import OutputError

_SORT_OPS = frozenset("TopK NonMaxSuppression".split())
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
_MAX_ROWS = 4096
"""Rows are matched all against all: more than this would take minutes."""
_MAX_CUT_SHARE = 0.9
"""Where more rows tie with the last than this share, nothing would be left to agree: all are judged."""
_MIN_ROWS = 16
"""Fewer may fall from row to row by chance."""


# ------------------------------------------------------------------------------------------------ in the graph


def comparable_tensors(proto: ModelProto) -> list[str]:
    """The outputs that no sort comes before; of a graph that sorts, the numbers that sorting and what follows it read."""
    facts = trace(proto, {}).tensors
    after, found = _tensors_after_sort(proto), dict[str, None]()
    for node in proto.graph.node:
        if _is_sort(node) or any(name in after for name in node.input):
            for name in node.input:
                fact = facts.get(name)
                if name and name not in after and fact is not None and fact.elem in _FLOATS and not fact.is_constant:
                    found[name] = None
    return list(dict.fromkeys([*(item.name for item in proto.graph.output if item.name not in after), *found]))


def sorted_outputs(proto: ModelProto) -> tuple[str, ...]:
    """The outputs that a sort comes before: their rows may change places."""
    after = _tensors_after_sort(proto)
    return tuple(item.name for item in proto.graph.output if item.name in after)


def _tensors_after_sort(proto: ModelProto) -> set[str]:
    after: set[str] = set()
    for node in proto.graph.node:
        if _is_sort(node) or not after.isdisjoint(_node_inputs(node)):
            after.update(name for name in node.output if name)
    return after


def _node_inputs(node: NodeProto) -> Iterator[str]:
    yield from node.input
    for _, body in walk.bodies(node):
        yield from _tensor_names(body)


def _tensor_names(graph: GraphProto) -> Iterator[str]:
    for node in graph.node:
        yield from _node_inputs(node)
    yield from (item.name for item in graph.output)


def _is_sort(node: NodeProto) -> bool:
    if node.op_type in _SORT_OPS and not walk.domain_of(node):
        return True
    return any(_is_sort(inner) for _, body in walk.bodies(node) for inner in body.node)


def reverse_ties(proto: ModelProto) -> bool:
    """Have every sort of the model, in place, take the last of equal scores first; False where it has none, or an opset
    below 11."""
    if walk.opsets_of(proto).get("", 0) < 11:
        return False
    taken, found = used_names(proto), False
    for graph in walk.graphs(proto):
        nodes = [part for node in graph.node for part in _reversed_sort(node, taken)]
        found |= len(nodes) > len(graph.node)
        replace_items(graph.node, nodes)
    return found


def _reversed_sort(node: NodeProto, taken: set[str]) -> list[NodeProto]:
    """The same sort of the reversed scores (and boxes), and its places counted from the end again."""
    topk = node.op_type == "TopK"
    places = next(iter(node.output[1:] if topk else node.output), "")
    if node.op_type not in _SORT_OPS or walk.domain_of(node) or not places:
        return [node]
    made: list[NodeProto] = []

    def add(op: str, *inputs: Any) -> str:
        """A node that reads tensors by name and numbers as constants."""
        read = [item if isinstance(item, str) else constant(item) for item in inputs]
        made.append(helper.make_node(op, read, [name := free_name(places, taken)]))
        return name

    def constant(value: Any) -> str:
        tensor = numpy_helper.from_array(np.array(value, np.int64))
        made.append(helper.make_node("Constant", [], [name := free_name(places, taken)], value=tensor))
        return name

    axes = [int(walk.attributes(node).get("axis", -1))] if topk else [1, 2]
    last = add("Sub", add("Gather", add("Shape", node.input[0]), axes[0]), 1)
    turned = [
        add("Slice", name, [-1], [np.iinfo(np.int64).min], [axis], [-1])
        for name, axis in zip(node.input, axes, strict=False)
    ]
    sort = deepcopy(node)
    sort.input[: len(turned)] = turned
    sort.output[int(topk)] = free_name(places, taken)
    before = len(made)
    sign, shift = (-1, 1) if topk else ([1, 1, -1], [0, 0, 1])
    add("Add", add("Mul", sort.output[int(topk)], sign), add("Mul", last, shift))
    made[-1].output[0] = places
    return [*made[:before], sort, *made[before:]]


def has_sorted_rows(output: Any) -> bool:
    """True where the rows of `[N, R, C]` fall by one of their columns in every item: what is left to go by where there is no
    graph (a TensorRT plan)."""
    rows = np.asarray(output)
    return rows.ndim == 3 and rows.shape[1] >= _MIN_ROWS and rows.dtype.kind == "f" and _sort_column(rows) is not None


# ------------------------------------------------------------------------------------------------ in numbers


def compare_outputs(
    got: Mapping[str, Any], want: Mapping[str, Any], sorted_names: Collection[str], tolerance: Tolerance
) -> dict[str, OutputError]:
    """Difference of each output from the reference; rows of the outputs `sorted_names` are matched by value
    where they exceed `tolerance` in place; moved and skipped rows are counted."""
    errors = {
        name: compare_output(got[name], reference, floor=tolerance.floor(name))
        for name, reference in want.items()
        if name in got
    }
    if all(tolerance.accepts(errors[name]) for name in sorted_names if name in errors):
        return errors
    for names, mine, theirs, moved, left_out in align_rows(got, want, sorted_names, tolerance):
        for name in names:
            fresh = compare_output(mine[name], theirs[name], floor=tolerance.floor(name), rows=True)
            errors[name] = replace(fresh, rows_moved=moved, rows_skipped=left_out)
    return errors


def align_rows(
    got: Mapping[str, Any], want: Mapping[str, Any], sorted_names: Collection[str], tolerance: Tolerance
) -> Iterator[tuple[list[str], dict[str, Array], dict[str, Array], int, int]]:
    """Outputs whose rows belong together (a box and its score): their names, what was got and wanted with the rows matched,
    how many changed places, and how many were left out.

    Rows are on axis 1. Each is matched once. Left out is `tolerance.max_replaced_rows` of the rows of an item, and rows that
    rounding cannot distinguish from the last row's score: which of several equal rows were cut off is not an error. An
    item of which nearly all rows tie with the last leaves none of them out.
    """
    together: dict[tuple[int, ...], list[str]] = {}
    for name in sorted_names:
        if name not in got or name not in want:
            continue
        one, two = np.asarray(got[name]), np.asarray(want[name])
        fits = one.ndim > 1 and one.shape == two.shape and one.dtype.kind in "fiu" and two.dtype.kind in "fiu"
        if fits and 1 < one.shape[1] <= _MAX_ROWS and np.isfinite(one).all() and np.isfinite(two).all():
            together.setdefault(one.shape[:2], []).append(name)
    for names in together.values():
        ours = {name: np.asarray(got[name]) for name in names}
        theirs = {name: np.asarray(want[name]) for name in names}
        columns = _sort_column(_flatten_rows(theirs, None))
        scaled = _flatten_rows(ours, theirs), _flatten_rows(theirs, theirs)
        rows = [_match_rows(mine, other, columns, tolerance) for mine, other in zip(*scaled, strict=True)]
        kept = [judged for _, judged, _ in rows]
        yield (
            names,
            {name: _take_rows(ours[name], [taken[judged] for taken, judged, _ in rows]) for name in names},
            {name: _take_rows(theirs[name], kept) for name in names},
            sum(moved for _, _, moved in rows),
            sum(scaled[1].shape[1] - len(judged) for judged in kept),
        )


def reorder_rows(
    got: Mapping[str, Array], want: Mapping[str, Array], sorted_names: Collection[str], tolerance: Tolerance
) -> tuple[dict[str, Array], int]:
    """Outputs with the rows of `sorted_names` in the reference's order, none dropped, and how many moved."""
    found, most = dict(got), 0
    exact = replace(tolerance, max_replaced_rows=0.0, allow_ties=False)
    for _, mine, _, moved, _ in align_rows(got, want, sorted_names, exact):
        found.update(mine)
        most = max(most, moved)
    return found, most


def _take_rows(array: Array, rows: list[Array]) -> Array:
    """The rows of every item: with the items, where each has as many, else all in one."""
    parts = [array[item, chosen] for item, chosen in enumerate(rows)]
    return np.stack(parts) if len({len(part) for part in parts}) == 1 else np.concatenate(parts)[None]


def _flatten_rows(arrays: Mapping[str, Array], reference: Mapping[str, Array] | None) -> Array:
    """The rows of all outputs side by side, as `[N, R, columns]`; every column over its largest value in the reference."""
    parts = []
    for name, array in arrays.items():
        rows = array.astype(np.float64).reshape(*array.shape[:2], -1)
        if reference is not None:
            scale = np.abs(reference[name].astype(np.float64).reshape(rows.shape)).max(axis=(0, 1))
            rows = rows / np.where(scale > 0, scale, 1.0)
        parts.append(rows)
    return np.concatenate(parts, axis=2)


def _sort_column(rows: Array) -> int | None:
    """The column by which rows of every item are sorted in descending order; None without one."""
    if rows.shape[1] < 2:
        return None
    falls = (np.diff(rows, axis=1) <= 0).all(axis=(0, 1)) & (rows[:, 0] > rows[:, -1]).any(axis=0)
    return int(np.argmax(falls)) if falls.any() else None


def _match_rows(
    rows: Array, reference_rows: Array, score: int | None, tolerance: Tolerance
) -> tuple[Array, Array, int]:
    """For each of their rows the one of mine that is it; which of them are judged; how many changed places."""
    taken = np.arange(len(reference_rows))
    off = np.flatnonzero(np.abs(rows - reference_rows).max(axis=1) > tolerance.limit)
    found, unmatched = _pair_rows(rows[off], reference_rows[off], tolerance.limit)
    taken[off] = off[found]
    moved = int((taken[off] != off).sum())
    others = off[unmatched]
    if not others.size:
        return taken, np.arange(len(reference_rows)), moved
    apart = np.abs(rows[taken[others]] - reference_rows[others]).max(axis=1)
    at_cut = np.zeros(len(others), bool)
    if score is not None and tolerance.allow_ties:
        last = float(reference_rows[-1, score])
        off_by = float(np.abs(np.sort(rows[:, score]) - np.sort(reference_rows[:, score])).max())
        cut = last + tolerance.limit * abs(last) + 4 * off_by
        at_cut = (reference_rows[others, score] <= cut) & (rows[taken[others], score] <= cut)
        if at_cut.sum() > _MAX_CUT_SHARE * len(reference_rows):
            at_cut[:] = False
    above = others[~at_cut]
    allowed = math.ceil(tolerance.max_replaced_rows * len(reference_rows))
    worst = above[np.argsort(-apart[~at_cut], kind="stable")[:allowed]]
    judged = np.setdiff1d(np.arange(len(reference_rows)), [*others[at_cut], *worst])
    return (
        (taken, judged, moved) if judged.size else (np.arange(len(reference_rows)), np.arange(len(reference_rows)), 0)
    )


def _pair_rows(rows: Array, reference_rows: Array, limit: float) -> tuple[Array, Array]:
    """For each of their rows one of mine, each once: the nearest within `limit` first, then the rest; and those beyond."""
    count = len(reference_rows)
    found = np.full(count, -1)
    free = np.ones(count, bool)
    for within in (True, False):
        for at in np.flatnonzero(found < 0):
            left = np.flatnonzero(free)
            apart = np.abs(rows[left] - reference_rows[at]).max(axis=1)
            nearest = int(np.argmin(apart))
            if not within or apart[nearest] <= limit:
                found[at] = left[nearest]
                free[found[at]] = False
    apart = np.abs(rows[found] - reference_rows).max(axis=1) if count else np.zeros(0)
    return found, np.flatnonzero(apart > limit)

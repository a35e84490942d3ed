"""Fuses rotary position embeddings into `com.microsoft` RotaryEmbedding.

Every form is a sum over the columns of one tensor of heads: column times cosine, plus or minus its partner's times sine. So
a candidate is traced from the heads to its last node, each element as a signed column and a column of what it is multiplied
by, and the result is compared with the rotation of halves and of neighbours (interleaved). Columns behind the rotated ones
may pass through (partial rotation). Cosines and sines that are stored for both partners must be the same for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from trt_engine.arrayfiles import Array
from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import MICROSOFT, FusionGraph, NotFused
from trt_engine.graph.fusion.head_view import COLUMNS, View, apply_view, concat_views, source_view
from trt_engine.graph.symbolic_shapes import Size, may_be_equal

_ORDERS = ("BCSC", "BSCC")
_COLUMN_BITS = 1 << 20
"""Factor of the multiplier's column in a traced element; the heads' column, from 1, and the sign are the rest."""
_MAX_STEPS = 16
_MAX_HEAD_SIZE = 1024
"""Threads of a block, which CUDA's kernel gives to a head."""

Terms = dict[str, View]
"""Views by multiplier, an empty name for none; 0 where an element has no such term."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotation of heads."""

    heads: str
    order: str
    end: NodeProto
    cos: str
    sin: str
    interleaved: bool
    size: int
    """Rotated columns of a head."""


@dataclass(slots=True)
class _Trace:
    """What the elements of tensors are made of, in columns of the heads."""

    graph: FusionGraph
    heads: str
    view: View
    nodes: dict[int, NodeProto] = field(default_factory=dict)
    """Nodes between the heads and what was traced."""
    objection: str = ""
    """Why a product with rotated columns could not be traced."""

    def read(self, name: str, steps: int = _MAX_STEPS) -> Terms | None:
        """The terms of a tensor; None if it is something else."""
        if name == self.heads:
            return {"": self.view}
        node = self.graph.producer(name)
        if node is None or walk.domain_of(node) or not steps:
            return None
        made = self._read_node(node, list(node.output).index(name), steps - 1)
        if made is not None:
            self.nodes[id(node)] = node
        return made

    def _read_node(self, node: NodeProto, output: int, steps: int) -> Terms | None:
        if node.op_type == "Mul" and self.graph.factor(node) is None:
            return self._multiply(node, steps)
        if node.op_type in ("Add", "Sub", "Concat"):
            parts = [self.read(name, steps) for name in node.input]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            return self._concat(node, known) if node.op_type == "Concat" else _add(node.op_type, *known)
        multiplied = self.graph.factor(node)
        sign = -1 if node.op_type == "Neg" else multiplied[1] if multiplied is not None else None
        terms = self.read(multiplied[0] if multiplied is not None else node.input[0], steps)
        if terms is None or sign not in (None, -1, 1):
            return None
        if sign is not None:
            return _scale(terms, int(sign))
        views = {name: apply_view(self.graph, view, node, output) for name, view in terms.items()}
        made = {name: view.merged() for name, view in views.items() if view is not None}
        return made if len(made) == len(terms) else None

    def _multiply(self, node: NodeProto, steps: int) -> Terms | None:
        for name, other in (node.input, reversed(node.input)):
            terms = self.read(name, steps)
            if terms is None or set(terms) != {""}:
                continue
            view, shape = terms[""], self.graph.shape(other)
            if shape is None or not _is_per_row(view, shape):
                if not np.array_equal(view.columns, self.view.columns):
                    self.objection = f"`{other}` has the sizes {shape}, expected a row of columns for each position"
                continue
            inner = view.columns.shape[len(view.columns.shape) - view.axes[-1].count(COLUMNS) :]
            columns = np.arange(view.count(len(view.axes) - 1)).reshape(inner) * _COLUMN_BITS
            values = np.where(view.columns < 0, view.columns - columns, view.columns + columns)
            return {other: View(view.axes, values, view.sizes)}
        return None

    def _concat(self, node: NodeProto, parts: list[Terms]) -> Terms | None:
        axis, made = walk.attributes(node).get("axis", 0), Terms()
        for name in dict.fromkeys(name for part in parts for name in part):
            views = [part.get(name) or _scale(part, 0)[next(iter(part))] for part in parts]
            view = concat_views(views, axis)
            if view is None:
                return None
            made[name] = view
        return made


def _scale(terms: Terms, factor: int) -> Terms:
    return {name: View(view.axes, view.columns * factor, view.sizes) for name, view in terms.items()}


def _add(op: str, first: Terms, second: Terms) -> Terms | None:
    views = [*first.values(), *second.values()]
    same = {view.axes for view in views}, {view.columns.shape for view in views}
    if first.keys() & second.keys() or max(map(len, same)) > 1:
        return None
    return first | _scale(second, -1 if op == "Sub" else 1)


def _is_per_row(view: View, shape: list[Size]) -> bool:
    """Whether a multiplier has a value for each position and column, the same for all heads."""
    if len(shape) > len(view.axes) or len(shape) < 2 or shape[-1] != view.count(len(view.axes) - 1):
        return False
    sizes = [1] * (len(view.axes) - len(shape)) + list(shape)
    for axis, size in zip(view.axes[:-1], sizes[:-1], strict=True):
        if axis == ("S",):
            matches = may_be_equal(size, view.sizes["S"])
        else:
            matches = size == 1 or (axis == ("B",) and size is not None and size == view.sizes["B"])
        if not matches:
            return False
    return all(atom == COLUMNS for atom in view.axes[-1])


# ------------------------------------------------------------------------------------------------ matching


def fuse_rotary(graph: FusionGraph, add: NodeProto) -> None:
    """Replace the rotary embedding that an addition is part of."""
    products = [graph.producer(name, "Mul") for name in add.input]
    if any(node is None or graph.factor(node) is not None for node in products):
        return
    if (rotation := _find(graph, add)) is not None:
        _replace(graph, rotation)


def _find(graph: FusionGraph, add: NodeProto) -> Rotation | None:
    """The rotation that an addition is part of, as far behind it as it goes; None where it adds no columns of heads."""
    ends = [add]
    while len(ends) < 5 and (after := graph.only_consumer(ends[-1].output[0], "Concat", "Unsqueeze", "Reshape")):
        ends.append(after)
    sources, objection = list(dict.fromkeys(_sources(graph, add))), ""
    for end in reversed(ends):
        for heads in sources:
            for order in _ORDERS:
                try:
                    if (rotation := _match(graph, heads, order, end)) is not None:
                        return rotation
                except NotFused as error:
                    objection = objection or str(error)
    if objection:
        raise NotFused(objection)
    return None


def _sources(graph: FusionGraph, add: NodeProto) -> Iterator[str]:
    """Tensors of rank 4 that the sum may be made of."""
    for product in add.input:
        node = graph.producer(product)
        for operand in node.input if node is not None else ():
            name = operand
            for _ in range(6):
                if graph.rank(name) == 4:
                    yield name
                made = graph.producer(name)
                if made is None or made.op_type not in ("Slice", "Split", "Gather", "Squeeze", "Reshape", "Unsqueeze"):
                    break
                name = made.input[0]


def _match(graph: FusionGraph, heads: str, order: str, end: NodeProto) -> Rotation | None:
    shape = graph.shape(heads) or []
    view = source_view(shape, order)
    if view is None or not isinstance(shape[-1], int) or graph.shape(end.output[0]) is None:
        return None
    start = View(view.axes, view.columns + 1, view.sizes)
    trace = _Trace(graph, heads, start)
    terms = trace.read(end.output[0])
    if terms is None and trace.objection:
        raise NotFused(trace.objection)
    if (
        terms is None
        or len(terms) not in (2, 3)
        or any((found.axes, found.columns.shape) != (view.axes, view.columns.shape) for found in terms.values())
    ):
        return None
    if shape[-1] > _MAX_HEAD_SIZE:
        raise NotFused(f"its heads have {shape[-1]} columns, expected at most {_MAX_HEAD_SIZE}")
    values = {name: found.columns.reshape(-1, shape[-1]) for name, found in terms.items()}
    rotation = _compare(
        graph, values, start.columns.reshape(-1, shape[-1]), Rotation(heads, order, end, "", "", False, 0)
    )
    cos, sin = (_row_sizes(graph, name) for name in (rotation.cos, rotation.sin))
    if not all(map(may_be_equal, cos, sin)):
        raise NotFused(f"its cosines and sines have the rows {cos} and {sin}, expected the same")
    graph.require_floats([heads, end.output[0], rotation.cos, rotation.sin])
    if not graph.is_closed(trace.nodes.values(), end):
        raise NotFused("a tensor inside of it is read elsewhere too")
    return rotation


def _compare(graph: FusionGraph, values: dict[str, Array], source: Array, found: Rotation) -> Rotation:
    """The rotation that the traced values (heads, columns) are."""
    passed = values.pop("", np.zeros_like(source))
    multiplied = {name: (np.sign(item), np.abs(item) % _COLUMN_BITS, np.abs(item) // _COLUMN_BITS) for name, item in
                  values.items()}  # fmt: skip
    size = int((passed[0] == 0).sum())
    if len(values) != 2 or size < 2 or size % 2:
        raise NotFused(f"it rotates {size} columns by {len(values)} tensors, expected an even number by two")
    if (
        not np.array_equal(passed[:, size:], source[:, size:])
        or passed[:, :size].any()
        or any(item[:, size:].any() for item in values.values())
    ):
        raise NotFused("columns that are not rotated do not stay behind those that are")
    half, columns = size // 2, np.arange(size)
    reason = "its columns and signs are those of no rotation, of halves or of neighbours"
    for interleaved, partner, sign in (
        (False, (columns + half) % size, np.where(columns < half, -1, 1)),
        (True, columns ^ 1, np.where(columns % 2 == 0, -1, 1)),
    ):
        for cos, sin in (list(values), list(values)[::-1]):
            signed = [multiplied[name][0][:, :size] * multiplied[name][1][:, :size] for name in (cos, sin)]
            if not np.array_equal(signed[0], source[:, :size]):
                continue
            if not np.array_equal(signed[1], (source[:, :size][:, partner]) * sign):
                continue
            used = {name: multiplied[name][2][:, :size] for name in (cos, sin)}
            differs = [name for name in used if not _is_shared_by_partners(graph, name, used[name], interleaved)]
            if not differs:
                return Rotation(found.heads, found.order, found.end, cos, sin, interleaved, size)
            reason = f"`{differs[0]}` is not shown to be the same for both columns of a pair"
    raise NotFused(reason)


def _is_shared_by_partners(graph: FusionGraph, name: str, used: Array, interleaved: bool) -> bool:
    """Whether both partners are multiplied by the same column, of one stored once or of one stored for each."""
    size = used.shape[1]
    first, second = (used[:, ::2], used[:, 1::2]) if interleaved else (used[:, : size // 2], used[:, size // 2 :])
    width = (graph.shape(name) or [0])[-1]
    if width == size // 2:
        return bool((first == np.arange(size // 2)).all() and (second == np.arange(size // 2)).all())
    return width == size and bool((used == np.arange(size)).all()) and _is_repeated(graph, name, interleaved)


def _is_repeated(graph: FusionGraph, name: str, interleaved: bool) -> bool:
    """Whether a tensor's last dimension has every column twice: one half after the other, or as neighbours."""
    for _ in range(_MAX_STEPS):
        if graph.is_constant(name):
            return _has_pairs(graph.read(name), interleaved)
        node, rank = graph.producer(name), graph.rank(name)
        if node is None or walk.domain_of(node) or rank is None:
            return False
        if node.op_type == "Split" and graph.is_constant(node.input[0]):
            return _has_pairs(_split_part(graph, node, name), interleaved)
        if node.op_type == "Concat" and not interleaved and walk.attributes(node)["axis"] in (-1, rank - 1):
            return len(node.input) == 2 and node.input[0] == node.input[1]
        if node.op_type == "Reshape" and interleaved:
            return _repeats_each(graph, node)
        if (multiplied := graph.factor(node)) is not None:
            name = multiplied[0]
        elif node.op_type in ("Cos", "Sin", "Cast", "Identity") or _keeps_columns(graph, node, rank):
            name = node.input[0]
        else:
            return False
    return False


def _has_pairs(value: Array, interleaved: bool) -> bool:
    if value.ndim < 1 or value.shape[-1] % 2:
        return False
    half = value.shape[-1] // 2
    first, second = (value[..., ::2], value[..., 1::2]) if interleaved else (value[..., :half], value[..., half:])
    return np.array_equal(first, second)


def _split_part(graph: FusionGraph, node: NodeProto, name: str) -> Array:
    """A part of a constant."""
    given, value = walk.attributes(node), graph.read(node.input[0])
    parts = given.get("split") or (graph.integers(node.input[1]) if len(node.input) > 1 else None)
    if parts is None:
        axis, count = given.get("axis", 0), len(node.output)
        parts = [math.ceil(value.shape[axis] / count)] * (count - 1)  # the last part may be smaller
    ends = np.cumsum(parts)[: len(node.output) - 1]
    found: Array = np.array_split(value, ends, axis=given.get("axis", 0))[list(node.output).index(name)]
    return found


def _keeps_columns(graph: FusionGraph, node: NodeProto, rank: int) -> bool:
    """Whether a layout operator leaves the last dimension as it is."""
    if node.op_type in ("Unsqueeze", "Squeeze"):
        axes, full = graph.axes(node), rank if node.op_type == "Unsqueeze" else graph.rank(node.input[0])
        return axes is not None and full is not None and not {-1, full - 1} & set(axes)
    return node.op_type == "Gather" and walk.attributes(node).get("axis", 0) == 0 and graph.rank(node.input[0]) == 2


def _repeats_each(graph: FusionGraph, reshape: NodeProto) -> bool:
    """Whether a Reshape merges a last dimension of 2 equal elements."""
    name = reshape.input[0]
    shape, out = graph.shape(name), graph.shape(reshape.output[0])
    if not shape or not out or shape[-1] != 2 or not isinstance(shape[-2], int) or out[-1] != 2 * shape[-2]:
        return False
    node = graph.producer(name, "Expand", "Tile", "Concat")
    if node is None:
        return False
    if node.op_type == "Concat" and (
        walk.attributes(node)["axis"] not in (-1, len(shape) - 1) or len(set(node.input)) > 1
    ):
        return False
    return (graph.shape(node.input[0]) or [0])[-1] == 1


# ------------------------------------------------------------------------------------------------ replacement


def _replace(graph: FusionGraph, found: Rotation) -> None:
    shape, stem = graph.shape(found.heads) or [], walk.label(found.end)
    name, out, elem = found.heads, found.end.output[0], graph.elem_type(found.heads)
    swapped = graph.producer(name, "Transpose") if found.order == "BCSC" else None
    if swapped is not None and list(walk.attributes(swapped).get("perm", ())) == [0, 2, 1, 3]:
        name, shape = swapped.input[0], [shape[at] for at in (0, 2, 1, 3)]
    else:
        swapped = None
    merged = swapped is not None or found.order == "BSCC"  # the operator takes (batch, sequence, heads x size) too
    batch, length, heads, size = shape if merged else (shape[at] for at in (0, 2, 1, 3))
    assert isinstance(heads, int) and isinstance(size, int)
    given = {"num_heads": heads, "rotary_embedding_dim": found.size} if found.size < size else {}
    positions, cos, sin = _caches(graph, found, stem)
    builder = graph.builder
    split = graph.producer(name, "Reshape") if merged and None not in (batch, length) else None
    if split is not None and graph.shape(split.input[0]) == [batch, length, heads * size]:
        name = split.input[0]
    elif merged:
        target = graph.constant(np.array([0, 0, heads * size], np.int64), "rotary_shape")
        name = builder.add("Reshape", [name, target], stem)
    name = builder.add(
        "RotaryEmbedding", [name, positions, cos, sin], f"{stem}/RotaryFusion", out=None if merged else out,
        domain=MICROSOFT,
        interleaved=int(found.interleaved), **given,
    )  # fmt: skip
    if merged:
        graph.declare(name, elem, [batch, length, heads * size])
        target = graph.constant(np.array([0, 0, heads, size], np.int64), "rotary_heads")
        name = builder.add("Reshape", [name, target], stem, out=out if swapped is None else None)
    if swapped is not None:
        graph.declare(name, elem, [batch, length, heads, size])
        builder.add("Transpose", [name], stem, out=out, perm=[0, 2, 1, 3])
    graph.replace("rotary_embedding", [found.end])


def _caches(graph: FusionGraph, found: Rotation, stem: str) -> tuple[str, str, str]:
    """Which rows of the cosines and sines to take, and the two as (rows, half of the rotated columns)."""
    cos, sin = (_cache(graph, found, name, stem) for name in (found.cos, found.sin))
    if _row_sizes(graph, found.cos)[0] == 1:
        return graph.constant(np.array([0], np.int64), "first_row"), cos, sin
    key = ("rotary positions", cos)
    if key not in graph.shared:  # each sequence has rows of its own
        builder = graph.builder
        count = graph.with_axes("Squeeze", graph.sizes(cos, 0, 1), [0], since=13)
        first, step = (graph.constant(np.array(at, np.int64), "row") for at in (0, 1))
        rest = graph.constant(np.array([-1], np.int64), "all_rows")
        target = builder.add("Concat", [graph.sizes(found.cos, 0, 1), rest], stem, axis=0)
        graph.shared[key] = builder.add("Reshape", [builder.add("Range", [first, count, step], stem), target], stem)
    return graph.shared[key], cos, sin


def _cache(graph: FusionGraph, found: Rotation, name: str, stem: str) -> str:
    axis = found.order.index("S")
    length, rows = (graph.shape(found.heads) or [])[axis], _row_sizes(graph, name)[axis]
    key = ("rotary cache", name, found.size, found.interleaved, length or found.heads)
    if key not in graph.shared:
        half, made = found.size // 2, name
        if (graph.shape(name) or [0])[-1] != half:
            ends = (0, found.size, -1, 2) if found.interleaved else (0, half, -1, 1)
            numbers = [graph.constant(np.array([at], np.int64), "half") for at in ends]
            made = graph.builder.add("Slice", [name, *numbers], stem)
        if rows is None or rows != length:  # a row is read for each position, and one might stand for all
            ones = graph.constant(np.ones(3 - axis, np.int64), "ones")
            sizes = graph.builder.add("Concat", [graph.sizes(found.heads, axis, axis + 1), ones], stem, axis=0)
            made = graph.builder.add("Expand", [made, sizes], stem)
        target = graph.constant(np.array([-1, half], np.int64), "cache_shape")
        graph.shared[key] = graph.builder.add("Reshape", [made, target], stem)
    return graph.shared[key]


def _row_sizes(graph: FusionGraph, name: str) -> list[Size]:
    """Sizes of a multiplier but for its columns, as those of a tensor of rank 4."""
    shape = graph.shape(name) or []
    return [1] * (4 - len(shape)) + list(shape[:-1])

"""Traces how a tensor splits another one into attention heads, through any chain of Reshape, Transpose, Split and the like.

A view of a tensor of batch, sequence and columns is a list of axes, each of atoms: `B`, `S`, or `C` for a range of columns.
The columns behind the `C` atoms, in order, are the dimensions of an array of column indices. So a packed product that is
reshaped to (batch, sequence, 3, heads, size), transposed and indexed ends as the columns of the queries, whichever way it
was written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from onnx import NodeProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import FusionGraph
from trt_engine.graph.symbolic_shapes import Size

BATCH, SEQUENCE, COLUMNS = "B", "S", "C"
_MAX_STEPS = 24

Columns = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of its source. Atoms of size 1 are left out."""

    axes: tuple[tuple[str, ...], ...]
    columns: Columns
    """Column indices: one dimension per `C` atom, in the order of the axes."""
    sizes: dict[str, Size]
    """Sizes of `B` and `S`."""

    @property
    def layout(self) -> tuple[str, ...]:
        """The axes as text, runs of columns joined: `B`, `C`, `S`, `C`."""
        return tuple("".join(_joined(axis)) for axis in self.axes)

    def merged(self) -> View:
        """The same view with one `C` for all columns of an axis."""
        counts = [self.count(at) for at, axis in enumerate(self.axes) if COLUMNS in axis]
        axes = tuple(tuple(_joined(axis)) for axis in self.axes)
        return View(axes, self.columns.reshape(counts), self.sizes)

    def count(self, axis: int) -> int:
        """Number of columns along an axis."""
        before = sum(axis_atoms.count(COLUMNS) for axis_atoms in self.axes[:axis])
        return math.prod(self.columns.shape[before : before + self.axes[axis].count(COLUMNS)])


def _joined(axis: Sequence[str]) -> list[str]:
    return [atom for at, atom in enumerate(axis) if not (atom == COLUMNS and at and axis[at - 1] == COLUMNS)]


def source_view(shape: Sequence[Size], order: str) -> View | None:
    """The view of a tensor by itself; `order` names its dimensions, as `BSC`, `SBC`, `BSCC`. Columns have a known size."""
    if len(shape) != len(order):
        return None
    axes: list[tuple[str, ...]] = []
    sizes: dict[str, Size] = {}
    columns: list[int] = []
    for atom, size in zip(order, shape, strict=True):
        if atom == COLUMNS:
            if not isinstance(size, int) or size < 1:
                return None
            if size > 1:
                columns.append(size)
        else:
            sizes[atom] = size
        axes.append(() if size == 1 else (atom,))
    return View(tuple(axes), np.arange(math.prod(columns), dtype=np.int64).reshape(columns), sizes)


@dataclass(frozen=True, slots=True)
class ViewStep:
    """A layout operator on the way to an operand."""

    node: NodeProto
    output: int
    scale: float
    """Product of the scalars that the tensor is multiplied by behind it."""


def view_chain(graph: FusionGraph, name: str) -> tuple[str, list[ViewStep], float]:
    """The tensor behind a chain of layout operators, the chain from it on, and the factor (product of the scalars) on the
    way.
    """
    chain: list[ViewStep] = []
    scale = 1.0
    for _ in range(_MAX_STEPS):
        node = graph.producer(name)
        if node is None:
            break
        if (multiplied := graph.factor(node)) is not None:
            name, scale = multiplied[0], scale * multiplied[1]
        elif node.op_type in _RULES and not walk.domain_of(node):
            chain.insert(0, ViewStep(node, list(node.output).index(name), scale))
            name = node.input[0]
        else:
            break
    return name, chain, scale


def apply_view(graph: FusionGraph, view: View, node: NodeProto, output: int = 0) -> View | None:
    """The view of a layout operator's output; None if it mixes elements or a size is not known."""
    rule = _RULES.get(node.op_type)
    if rule is None or walk.domain_of(node):
        return None
    try:
        return rule(graph, view, node, output)
    except (IndexError, ValueError, KeyError, TypeError):
        return None


def _transpose(graph: FusionGraph, view: View, node: NodeProto, output: int) -> View | None:
    order = list(walk.attributes(node).get("perm") or reversed(range(len(view.axes))))
    if sorted(order) != list(range(len(view.axes))):
        return None
    starts = np.cumsum([0, *(axis.count(COLUMNS) for axis in view.axes)])
    dims = [dim for at in order for dim in range(starts[at], starts[at + 1])]
    return View(tuple(view.axes[at] for at in order), view.columns.transpose(dims), view.sizes)


def _reshape(graph: FusionGraph, view: View, node: NodeProto, output: int) -> View | None:
    target = graph.vectors.get(node.input[1])
    if target is None:
        return None
    copies = not walk.attributes(node).get("allowzero")
    shape = graph.shape(node.output[0]) or []
    wanted: list[Size | tuple[str, int]] = []
    for at, item in enumerate(target):
        if item == 0 and copies:
            wanted.append(("axis", at))
            continue
        known = shape[at] if len(shape) == len(target) else None
        wanted.append(known if isinstance(known, int) and not isinstance(item, str) else item)
    return _regroup(view, wanted, _size_names(graph, view, node.input[0]))


def _size_names(graph: FusionGraph, view: View, name: str) -> dict[str, str]:
    """`B` or `S` by the symbol that shape inference has for its size in this tensor."""
    shape = graph.shape(name)
    if shape is None or len(shape) != len(view.axes):
        return {}
    pairs = zip(shape, view.axes, strict=True)
    return {size: axis[0] for size, axis in pairs if isinstance(size, str) and len(axis) == 1 and axis[0] != COLUMNS}


def _flatten(graph: FusionGraph, view: View, node: NodeProto, output: int) -> View | None:
    axis = walk.attributes(node).get("axis", 1) % len(view.axes)
    parts = (view.axes[:axis], view.axes[axis:])
    return View(tuple(tuple(atom for group in part for atom in group) for part in parts), view.columns, view.sizes)


def _squeeze(graph: FusionGraph, view: View, node: NodeProto, output: int) -> View | None:
    axes = graph.axes(node)
    if axes is None and len(node.input) > 1:
        return None
    gone = [at for at, axis in enumerate(view.axes) if not axis] if axes is None else axes
    gone = [at % len(view.axes) for at in gone]
    if any(view.axes[at] for at in gone):
        return None
    return View(tuple(axis for at, axis in enumerate(view.axes) if at not in gone), view.columns, view.sizes)


def _unsqueeze(graph: FusionGraph, view: View, node: NodeProto, output: int) -> View | None:
    axes = graph.axes(node)
    if axes is None:
        return None
    rank = len(view.axes) + len(axes)
    made = list(view.axes)
    for at in sorted(item % rank for item in axes):
        made.insert(at, ())
    return View(tuple(made), view.columns, view.sizes)


def _split(graph: FusionGraph, view: View, node: NodeProto, output: int) -> View | None:
    given = walk.attributes(node)
    axis = given.get("axis", 0) % len(view.axes)
    parts = given.get("split")
    if parts is None and len(node.input) > 1:
        parts = graph.integers(node.input[1])
        if parts is None and node.input[1]:
            return None
    size = _column_count(view, axis)
    if size is None:
        return None
    if parts is None:
        each = math.ceil(size / len(node.output))
        parts = [min(each, size - each * at) for at in range(len(node.output))]
    start = sum(parts[:output])
    return _select(view, axis, range(start, start + parts[output]), keep=True)


def _slice(graph: FusionGraph, view: View, node: NodeProto, output: int) -> View | None:
    given = walk.attributes(node)
    if "starts" in given:
        starts, ends, axes, steps = given["starts"], given["ends"], given.get("axes"), None
    else:
        values = [graph.integers(name) if name else None for name in node.input[1:]]
        if any(name and value is None for name, value in zip(node.input[1:], values, strict=True)):
            return None
        starts, ends, axes, steps = [*values, None, None][:4]
    if starts is None or ends is None:
        return None
    made: View | None = view
    for at, (start, end) in enumerate(zip(starts, ends, strict=True)):
        axis = (axes[at] if axes is not None else at) % len(view.axes)
        size = _column_count(view, axis)
        step = steps[at] if steps is not None else 1
        if size is None or made is None:
            return None
        made = _select(made, axis, range(size)[start:end:step], keep=True)
    return made


def _gather(graph: FusionGraph, view: View, node: NodeProto, output: int) -> View | None:
    axis = walk.attributes(node).get("axis", 0) % len(view.axes)
    index = graph.small_value(node.input[1])
    size = _column_count(view, axis)
    if index is None or index.ndim > 1 or size is None:
        return None
    return _select(view, axis, [int(item) % size for item in index.reshape(-1)], keep=index.ndim == 1)


def _column_count(view: View, axis: int) -> int | None:
    """Size of an axis of columns alone; None for one that holds batch or sequence."""
    return view.count(axis) if all(atom == COLUMNS for atom in view.axes[axis]) else None


def _select(view: View, axis: int, items: Sequence[int], *, keep: bool) -> View | None:
    if not items or (not keep and len(items) != 1):
        return None
    before = sum(group.count(COLUMNS) for group in view.axes[:axis])
    inside = view.axes[axis].count(COLUMNS)
    shape = view.columns.shape
    flat = view.columns.reshape(*shape[:before], view.count(axis), *shape[before + inside :])
    taken = np.take(flat, list(items), axis=before)
    group: tuple[str, ...] = (COLUMNS,)
    if len(items) == 1:
        taken, group = np.squeeze(taken, before), ()
    axes = [*view.axes[:axis], *([group] if keep else []), *view.axes[axis + 1 :]]
    return View(tuple(axes), taken, view.sizes)


def concat_views(views: Sequence[View], axis: int) -> View | None:
    """The view of tensors put together along an axis of columns; None if they differ in another axis."""
    rank = len(views[0].axes)
    axis %= rank
    if any(len(view.axes) != rank or _column_count(view, axis) is None for view in views):
        return None
    parts = []
    for view in views:
        before = sum(group.count(COLUMNS) for group in view.axes[:axis])
        after = view.columns.shape[before + view.axes[axis].count(COLUMNS) :]
        parts.append(view.columns.reshape(*view.columns.shape[:before], view.count(axis), *after))
    others = {view.axes[:axis] + view.axes[axis + 1 :] for view in views}
    if len(others) > 1 or len({part.shape[:before] + part.shape[before + 1 :] for part in parts}) > 1:
        return None
    axes = (*views[0].axes[:axis], (COLUMNS,), *views[0].axes[axis + 1 :])
    return View(axes, np.concatenate(parts, axis=before), views[0].sizes)


# ---------------------------------------------------------------------------------------------------- reshape

_Atom = tuple[str, Size]


def _regroup(view: View, wanted: Sequence[Size | tuple[str, int]], names: Mapping[str, str]) -> View | None:
    """The view with its atoms grouped to the axes of a Reshape target, columns split where a target is smaller; `names` are
    further symbols of the sizes."""
    numbers = iter(view.columns.shape)
    atoms: list[_Atom] = []
    owned: list[list[_Atom]] = []
    for axis in view.axes:
        group = [(atom, next(numbers) if atom == COLUMNS else view.sizes.get(atom)) for atom in axis]
        owned.append(group)
        atoms += group
    known = {item for item in view.sizes.values() if isinstance(item, str)}
    targets: list[Size | list[_Atom]] = []
    for item in wanted:
        if isinstance(item, tuple):
            targets.append(owned[item[1]])
        elif isinstance(item, str) and item not in known and item in names:
            targets.append([(names[item], view.sizes.get(names[item]))])
        else:
            targets.append(None if item == -1 or (isinstance(item, str) and item not in known) else item)
    opened = [at for at, item in enumerate(targets) if item is None]
    if len(opened) > 1:
        return None
    groups = []
    for target in targets[: opened[0]] if opened else targets:
        taken = _take(atoms, target)
        if taken is None:
            return None
        groups.append(taken[0])
        atoms = taken[1]
    if opened:
        tail: list[list[_Atom]] = []
        backward = list(reversed(atoms))
        for target in reversed(targets[opened[0] + 1 :]):
            taken = _take(backward, list(reversed(target)) if isinstance(target, list) else target)
            if taken is None:
                return None
            tail.insert(0, list(reversed(taken[0])))
            backward = taken[1]
        groups += [list(reversed(backward)), *tail]
    elif atoms:
        return None
    columns = [size for group in groups for atom, size in group if atom == COLUMNS]
    return View(
        tuple(tuple(atom for atom, _ in group) for group in groups),
        view.columns.reshape([size for size in columns if isinstance(size, int)]),
        view.sizes,
    )


def _take(atoms: list[_Atom], wanted: Size | list[_Atom]) -> tuple[list[_Atom], list[_Atom]] | None:
    """The first atoms that make an axis of this size, and the rest."""
    if isinstance(wanted, list):
        return (wanted, atoms[len(wanted) :]) if atoms[: len(wanted)] == wanted else None
    if isinstance(wanted, str):
        return (atoms[:1], atoms[1:]) if atoms and atoms[0][1] == wanted else None
    if not isinstance(wanted, int) or wanted < 1:
        return None
    rest, taken, have = list(atoms), list[_Atom](), 1
    while have < wanted:
        if not rest or not isinstance(rest[0][1], int):
            return None
        atom, size = rest.pop(0)
        assert isinstance(size, int)
        if wanted % (have * size) == 0:
            taken.append((atom, size))
            have *= size
            continue
        part = wanted // have
        if atom != COLUMNS or wanted % have or size % part:
            return None
        taken.append((atom, part))
        rest.insert(0, (atom, size // part))
        have = wanted
    return taken, rest


_RULES = {
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
}

"""Fuses scaled dot-product attention into `com.microsoft` Attention or MultiHeadAttention.

The pattern starts at a Softmax: queries times keys, scalars on any side, an additive or boolean mask, the softmax, times the
values. How the heads are split off is traced by `head_view`. Where queries, keys and values are products of one tensor with
constant weights, the weights are packed and the products become part of the operator (Attention); otherwise they stay
(MultiHeadAttention). Heads that cannot be traced to a tensor of rank 3, as behind a norm or a rotary embedding, are
merged before the operator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.attention_mask import (
    LOWEST,
    Mask,
    SequenceLength,
    attention_bias,
    fit_masks,
    is_finite,
    reachable_bias,
    read_mask,
)
from trt_engine.graph.fusion.fusion_graph import HALF_AND_FLOAT, MICROSOFT, FusionGraph, NotFused
from trt_engine.graph.fusion.head_view import COLUMNS, Columns, View, ViewStep, apply_view, source_view, view_chain
from trt_engine.graph.fusion.operator_demands import require_attention, takes_heads_first
from trt_engine.graph.fusion.projection import Projection, is_read_within, packed_bias, packed_weight, read_projection

_MAX_HEAD_SIZE = 1024
_MAX_PACKED_BYTES = 1 << 30
"""Largest packed weight of one Attention."""


@dataclass(slots=True)
class Scores:
    """The product of queries and keys, and what happens to it before the softmax."""

    product: NodeProto
    scale: float
    masks: list[Mask] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AttentionMatch:
    """One attention: the node that computes its result, and the heads."""

    node: NodeProto
    query: Heads
    key: Heads
    value: Heads
    scale: float
    masks: tuple[Mask, ...] = ()
    causal: bool = False
    zero_rows: bool = False
    """True if the result of a query without a key is 0, and the mask can be minus infinity."""
    rank: int = 4
    """Rank of the result: 4 (batch, heads, queries, size) or 3, where batch and heads, or heads and size are one."""
    heads_merged: bool = False
    """True for a result (batch, queries, heads x size)."""
    scores: str = ""
    """The product of queries and keys, where it is a tensor."""
    lowest_is_masked: bool = False
    """True if rows whose mask is the lowest number have no key either."""
    elem: int = 0
    """Type in which the operator computes."""
    cast: bool = False
    """True if that is not the type of the graph."""

    @property
    def num_heads(self) -> int:
        return int(self.query.columns.shape[0])


def fuse_attention(graph: FusionGraph, softmax: NodeProto, *, pack: bool) -> None:
    """Replace the attention around a softmax; with `pack` the projections become part of the operator where they can."""
    if _is_multiplied(graph, softmax.output[0]):
        replace_attention(graph, match_attention(graph, softmax, wide=not pack), pack=pack)


def match_attention(graph: FusionGraph, softmax: NodeProto, *, wide: bool) -> AttentionMatch:
    """The attention around a softmax whose result is multiplied with values; `wide` computes FP16 in FP32."""
    context, guarded = _context_product(graph, softmax)
    if context is None:
        raise NotFused("its result is used in another way than one product with values")
    rank = graph.rank(context.input[1])
    axis = walk.attributes(softmax).get("axis", -1 if graph.opset >= 13 else 1)
    if rank not in (3, 4) or axis not in (-1, rank - 1):
        raise NotFused(f"its softmax is over dimension {axis} of rank {rank or 'unknown'}, expected the last of 3 or 4")
    scores = _read_scores(graph, softmax)
    operands = {"query": scores.product.input[0], "key": scores.product.input[1], "value": context.input[1]}
    graph.require_floats(operands.values(), [scores.product.output[0], *context.input, context.output[0]])
    found = {role: read_heads(graph, name, role) for role, name in operands.items()}
    heads = [item for item in found.values() if item is not None]
    if len(heads) < 3:
        raise NotFused(
            f"the heads of its {next(role for role, item in found.items() if item is None)} cannot be traced"
        )
    query, key, value = heads
    if query.columns.shape != key.columns.shape or len(query.columns) != len(value.columns):
        found_heads = ", ".join(" x ".join(map(str, item.columns.shape)) for item in heads)
        raise NotFused(f"its queries, keys and values have the heads {found_heads}, expected the same")
    if value.scale != 1:
        raise NotFused(f"its values are multiplied by {value.scale:g}")
    if (size := max(query.columns.shape[1], value.columns.shape[1])) > _MAX_HEAD_SIZE:
        raise NotFused(f"its heads have {size} columns, expected at most {_MAX_HEAD_SIZE}")
    scale = scores.scale * query.scale * key.scale
    match = AttentionMatch(
        context, query, key, value, scale, tuple(scores.masks), zero_rows=guarded, rank=rank,
        scores=scores.product.output[0],
    )  # fmt: skip
    return fit(graph, match, wide=wide)


def fit(graph: FusionGraph, match: AttentionMatch, *, wide: bool) -> AttentionMatch:
    """The match with its masks as parts of a bias, `NotFused` where the operator would not take them; `wide` computes
    masked FP16 in FP32, where a fill takes every score in."""
    batches = [part.view.sizes.get("B") for part in (match.query, match.key, match.value)]
    # the standard's operator repeats no batch either
    require_attention(batches if match.scores else batches[:1], match.scale)
    elem = graph.elem_type(match.query.tensor)
    if not match.masks:
        return replace(match, zero_rows=False, elem=elem)
    match = replace(match, elem=TensorProto.FLOAT if wide else elem, cast=wide and elem != TensorProto.FLOAT)
    if match.rank != 4:
        raise NotFused("it has a mask, and its batch and heads are one dimension")
    lengths = [part.view.sizes.get("S") for part in (match.query, match.key)]
    product = graph.shape(match.scores) if match.scores else None
    own = [batches[0], match.num_heads, *lengths]
    names = [{one, other} for one, other in zip(own, product or own, strict=True)]
    names[0] |= set(batches)
    masks = fit_masks(graph, match.masks, names, match.elem)
    # the sum of two masks is minus infinity where both are the lowest number
    zero_rows = match.zero_rows and (len(masks) > 1 or not masks[0].finite)
    if zero_rows and not all(mask.for_all_heads for mask in masks):
        raise NotFused("rows without a key give 0, and its mask differs between heads")
    return replace(match, masks=masks, zero_rows=zero_rows)


def _is_multiplied(graph: FusionGraph, name: str, steps: int = 4) -> bool:
    """Whether a product of matrices reads a tensor, behind what guards or casts it."""
    readers = graph.consumers(name) if steps else []
    return any(node.op_type == "MatMul" for node in readers) or any(
        _is_multiplied(graph, node.output[0], steps - 1)
        for node in readers
        if node.op_type in ("Cast", "Where", "Mul", "Transpose")
    )


def _context_product(graph: FusionGraph, softmax: NodeProto) -> tuple[NodeProto | None, bool]:
    """The product of probabilities and values, and whether NaN rows are replaced by 0 in between."""
    name, guarded = softmax.output[0], False
    readers = sorted(graph.consumers(name), key=lambda node: node.op_type)
    if [node.op_type for node in readers] == ["IsNaN", "Where"] and name not in graph.outputs:
        test, where = readers
        if graph.only_consumer(test.output[0]) is not where or graph.scalar(where.input[1]) != 0:
            return None, False
        if [where.input[0], where.input[2]] != [test.output[0], name]:
            return None, False
        name, guarded = where.output[0], True
    if (cast := graph.only_consumer(name, "Cast")) is not None:
        name = cast.output[0]
    found = graph.only_consumer(name, "MatMul")
    return (found if found is not None and found.input[0] == name else None), guarded


def _read_scores(graph: FusionGraph, softmax: NodeProto) -> Scores:
    """What is between the first product and the softmax."""
    name, scale, masks = softmax.input[0], 1.0, list[Mask]()
    for _ in range(8):
        if not graph.is_private(name):
            raise NotFused("its scores are used elsewhere too")
        node = graph.producer(name)
        if node is None:
            break
        if node.op_type == "MatMul" and not walk.domain_of(node):
            return Scores(node, scale, masks)
        if (multiplied := graph.factor(node)) is not None:
            name, scale = multiplied[0], scale * multiplied[1]
        elif node.op_type == "Cast" and graph.elem_type(node.input[0]) in HALF_AND_FLOAT:
            name = node.input[0]
        elif (found := read_mask(graph, node, scale)) is not None:
            name = found.scores
            masks.append(found)
        else:
            raise NotFused(f"its scores pass through {walk.qualified_name(node)}")
    raise NotFused("its scores are not a product of two matrices")


# ------------------------------------------------------------------------------------------------ replacement


def replace_attention(graph: FusionGraph, match: AttentionMatch, *, pack: bool = True) -> None:
    """Write the operator, and layout operators around it where they are needed."""
    place = _result_place(graph, match)
    if place is None:
        raise NotFused("its result is not merged to one row of heads")
    target, layout = place
    removed = graph.producer(target)
    assert removed is not None
    stem = walk.label(match.node)
    query = match.query
    length = SequenceLength(query.view.sizes.get("S"), query.anchor, query.order.index("S"))
    elem = match.elem
    bias = attention_bias(graph, match.masks, length, elem)
    bias, masked = (
        reachable_bias(graph, bias, elem, with_lowest=match.lowest_is_masked) if match.zero_rows else (bias, "")
    )
    parts = (query, match.key, match.value)
    projections = _shared_projections(graph, match, removed) if pack else []
    given: dict[str, Any] = {"num_heads": match.num_heads, "scale": match.scale}
    if match.causal:
        given["unidirectional"] = 1
    if projections:
        operator, fusion = "Attention", "attention"
        inputs = _packed_inputs(graph, parts, projections, bias, stem)
        sizes = [int(part.columns.size) for part in parts]
        given |= {} if len(set(sizes)) == 1 else {"qkv_hidden_sizes": sizes}
    else:
        operator, fusion = "MultiHeadAttention", "multi_head_attention"
        inputs = _separate_inputs(graph, parts, bias, stem)
    while not inputs[-1]:
        inputs.pop()
    if match.cast:
        inputs[:3] = [graph.builder.add("Cast", [name], stem, to=elem) for name in inputs[:3]]
    out = graph.builder.add(operator, inputs, stem, domain=MICROSOFT, **given)
    if masked:
        zero = graph.constant(np.zeros((), np.float16 if elem == TensorProto.FLOAT16 else np.float32), "zero")
        out = graph.builder.add("Where", [masked, zero, out], stem)
    if match.cast:
        out = graph.builder.add("Cast", [out], stem, to=graph.elem_type(query.tensor))
    _finish(graph, out, target, layout, match, stem)
    graph.replace(fusion, [removed])


def _shared_projections(graph: FusionGraph, match: AttentionMatch, last: NodeProto) -> list[Projection]:
    """The three products, if they are of one tensor with constant weights and lead nowhere else; otherwise none."""
    parts = (match.query, match.key, match.value)
    found = [part.projection for part in parts if part.projection is not None]
    if len(found) < 3 or len({(item.source, part.order) for item, part in zip(found, parts, strict=True)}) > 1:
        return []
    if any(graph.quantized([item.product.output[0], *item.product.input[:2]]) for item in found):
        return []
    if not all(is_read_within(graph, item.output, (match.node, last)) for item in found):
        return []
    kind = 2 if graph.elem_type(match.query.tensor) == TensorProto.FLOAT16 else 4
    width = sum(int(part.columns.size) for part in parts)
    return found if found[0].depth * width * kind <= _MAX_PACKED_BYTES else []


def _packed_inputs(
    graph: FusionGraph, parts: Sequence[Heads], projections: Sequence[Projection], bias: str, stem: str
) -> list[str]:
    pieces = [(item, part.columns.reshape(-1)) for item, part in zip(projections, parts, strict=True)]
    weight = packed_weight(graph, pieces, f"{stem}_qkv_weight")
    offset = packed_bias(graph, pieces, f"{stem}_qkv_bias")
    return [_batch_first(graph, projections[0].source, parts[0].order, stem), weight, offset, "", "", bias]


def _separate_inputs(graph: FusionGraph, parts: Sequence[Heads], bias: str, stem: str) -> list[str]:
    query, key, value = parts
    first = _merged_heads(graph, query, f"{stem}_query")
    if (
        key.order == value.order == "BCSC"
        and key.is_whole
        and value.is_whole
        and takes_heads_first(key.columns.shape[1], value.columns.shape[1])
    ):
        return [first, key.source, value.source, "", "", bias]  # heads first, as the operator takes them
    return [first, _merged_heads(graph, key, f"{stem}_key"), _merged_heads(graph, value, f"{stem}_value"), "", "", bias]


def _merged_heads(graph: FusionGraph, part: Heads, stem: str) -> str:
    """The heads as a tensor (batch, sequence, heads x size)."""
    name, builder = part.source, graph.builder
    if part.merged_rows:
        target = builder.add(
            "Concat",
            [graph.sizes(part.anchor, 0, 2), graph.constant(np.array([-1], np.int64), "last_size")],
            stem,
            axis=0,
        )
        name = builder.add("Reshape", [name, target], stem)
    if part.order == "BCSC":
        name = builder.add("Transpose", [name], stem, perm=[0, 2, 1, 3])
    name = _batch_first(graph, name, part.order, stem)
    if len(part.order) == 4:
        name = builder.add("Reshape", [name, graph.constant(np.array([0, 0, -1], np.int64), "merged_heads")], stem)
    if part.is_whole:
        return name
    flat = part.columns.reshape(-1)
    if np.array_equal(flat, np.arange(flat[0], flat[0] + len(flat))):
        ends = [graph.constant(np.array([at], np.int64), "columns") for at in (flat[0], flat[0] + len(flat), 2)]
        return builder.add("Slice", [name, *ends], stem)
    return builder.add("Gather", [name, graph.constant(flat, f"{stem}_columns")], stem, axis=2)


def _batch_first(graph: FusionGraph, name: str, order: str, stem: str) -> str:
    if order != "SBC":
        return name
    made = graph.producer(name, "Transpose")
    if made is not None and list(walk.attributes(made).get("perm", ())) == [1, 0, 2]:
        return str(made.input[0])
    return graph.builder.add("Transpose", [name], stem, perm=[1, 0, 2])


_RESULTS: dict[tuple[str, ...], str] = {
    ("B", "S", "C"): "merged",
    ("S", "B", "C"): "sequence first",
    ("BS", "C"): "rows",
    ("SB", "C"): "sequence first rows",
    ("B", "S", "C", "C"): "heads last",
    ("B", "C", "S", "C"): "heads first",
}


_RESULT_VIEWS = frozenset("Transpose Reshape Squeeze Unsqueeze Flatten".split())


def _result_place(graph: FusionGraph, match: AttentionMatch) -> tuple[str, str] | None:
    """The tensor that the operator's result replaces, as far behind the product as its layout is known, and its layout."""
    name = match.node.output[0]
    if match.heads_merged:
        return name, "merged"
    heads, size = match.value.columns.shape
    lengths = match.query.view.sizes
    drop = {atom for atom in ("B", "S") if lengths.get(atom) == 1}
    shape = [item for item in (heads, size) if item > 1]
    head_axis, size_axis = (("C",) if heads > 1 else ()), (("C",) if size > 1 else ())
    batch, rows = ((atom,) if atom not in drop else () for atom in ("B", "S"))
    axes = (batch, head_axis, rows, size_axis) if match.rank == 4 else (batch + head_axis, rows, size_axis)
    view: View | None = View(axes, np.arange(heads * size, dtype=np.int64).reshape(shape), lengths)
    best: tuple[str, str] | None = None
    while view is not None:
        layout, last = _result_layout(view, heads, size, drop), graph.producer(name) or match.node
        if layout is not None and (last is match.node or is_read_within(graph, match.node.output[0], [last])):
            best = (name, layout)
        readers = [node for node in graph.consumers(name) if node.op_type != "Shape"]
        if len(readers) != 1 or name in graph.outputs or readers[0].op_type not in _RESULT_VIEWS:
            break
        view, name = apply_view(graph, view, readers[0]), readers[0].output[0]
    return best


def _result_layout(view: View, heads: int, size: int, drop: set[str]) -> str | None:
    if not np.array_equal(view.columns.reshape(-1), np.arange(heads * size)):
        return None
    for pattern, layout in _RESULTS.items():
        if len(pattern) != len(view.axes):
            continue
        counts = [heads, size] if pattern.count("C") == 2 else [heads * size]
        for wanted, axis, at in zip(pattern, view.axes, range(len(pattern)), strict=True):
            if wanted == "C":
                matches = set(axis) <= {"C"} and view.count(at) == counts.pop(0)
            else:
                matches = axis == tuple(atom for atom in wanted if atom not in drop)
            if not matches:
                break
        else:
            return layout
    return None


def _finish(graph: FusionGraph, out: str, target: str, layout: str, match: AttentionMatch, stem: str) -> None:
    """Bring the result (batch, sequence, heads x size) to the layout that the graph had."""
    builder = graph.builder
    steps: list[tuple[str, list[int]]] = []
    if layout.startswith("sequence first"):
        steps.append(("Transpose", [1, 0, 2]))
    heads, size = (int(item) for item in match.value.columns.shape)
    if layout.endswith("rows"):
        steps.append(("Reshape", [-1, heads * size]))
    elif layout.startswith("heads"):
        steps.append(("Reshape", [0, 0, heads, size]))
        if layout == "heads first":
            steps.append(("Transpose", [0, 2, 1, 3]))
    if not steps:
        builder.nodes[-1].output[0] = target
    for at, (op, values) in enumerate(steps):
        last = target if at == len(steps) - 1 else None
        if op == "Transpose":
            out = builder.add(op, [out], stem, out=last, perm=values)
        else:
            out = builder.add(op, [out, graph.constant(np.array(values, np.int64), "attention_shape")], stem, out=last)


def fuse_standard_attention(graph: FusionGraph, node: NodeProto, *, pack: bool) -> None:
    """Replace a standard Attention; with `pack` the projections become part of the operator where they can."""
    replace_attention(graph, match_standard_attention(graph, node, wide=not pack), pack=pack)


def match_standard_attention(graph: FusionGraph, node: NodeProto, *, wide: bool) -> AttentionMatch:
    """The attention of a node; `wide` computes FP16 in FP32."""
    given, inputs = walk.attributes(node), list(node.input)
    if any(inputs[4:]) or any(node.output[1:]):
        raise NotFused("it has a cache, or more than one output")
    if given.get("softcap") or given.get("softmax_precision", TensorProto.FLOAT) not in HALF_AND_FLOAT:
        raise NotFused("it limits its scores, or has a softmax in another type")
    graph.require_floats(inputs[:3], node.output)
    rank = graph.rank(inputs[0])
    found: list[Heads | None]
    if rank == 3:
        counts = (given.get("q_num_heads", 0), given.get("kv_num_heads", 0), given.get("kv_num_heads", 0))
        found = [merged_heads(graph, name, count) for name, count in zip(inputs[:3], counts, strict=True)]
    else:
        found = [
            read_heads(graph, name, role) for name, role in zip(inputs[:3], ("query", "value", "value"), strict=True)
        ]
    heads = [item for item in found if item is not None]
    if (
        len(heads) < 3
        or heads[0].columns.shape != heads[1].columns.shape
        or len(heads[1].columns) != len(heads[2].columns)
    ):
        raise NotFused("its heads cannot be traced, or queries share keys")
    query, key, value = heads
    if value.scale != 1:
        raise NotFused(f"its values are multiplied by {value.scale:g}")
    lengths = query.view.sizes.get("S"), key.view.sizes.get("S")
    causal = bool(given.get("is_causal"))
    if causal and (lengths[0] is None or lengths[0] != lengths[1]):
        raise NotFused(f"it is causal, and has {lengths[0]} queries and {lengths[1]} keys, which may differ")
    masks: tuple[Mask, ...] = ()
    if len(inputs) > 3 and inputs[3]:
        # ONNX Runtime takes a mask of the lowest number for one of minus infinity
        above, boolean = LOWEST.get(graph.elem_type(inputs[3]), 0.0), graph.elem_type(inputs[3]) == TensorProto.BOOL
        masks = (Mask("", inputs[3], fill=-math.inf if boolean else None, finite=is_finite(graph, inputs[3], above)),)
        if causal and not masks[0].finite:
            raise NotFused("rows without a key give 0, and it is causal")
    scale = given.get("scale", 1 / math.sqrt(query.columns.shape[1]))
    match = AttentionMatch(
        node, query, key, value, scale * query.scale * key.scale, masks, causal=causal, zero_rows=True,
        heads_merged=rank == 3, lowest_is_masked=True,
    )  # fmt: skip
    return fit(graph, match, wide=wide)


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

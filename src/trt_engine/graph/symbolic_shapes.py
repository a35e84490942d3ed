"""Inferred types and sizes of tensors, and shape arithmetic folded where some sizes are numbers and others symbols."""

from __future__ import annotations

import logging
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from trt_engine.arrayfiles import Array
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import retain_items
from trt_engine.graph.resource_estimate import infer_shapes
from trt_engine.graph.shape_eval import MOVING, fold_elements, fold_node
from trt_engine.tensors import dimension_symbol

Size = int | str | None
"""A number, a symbol, or unknown."""
_INDEX_TYPES = (TensorProto.INT64, TensorProto.INT32)
_MOST_PASSES = 32


@dataclass(frozen=True, slots=True)
class _ShapeVector:
    """A small integer tensor of rank 0 or 1 with partly known elements: a number, a size symbol, or None."""

    value: Array
    """int64 if every element is known, else Python objects."""
    elem: int
    is_static = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def known(self) -> bool:
        return self.value.dtype != object

    @property
    def items(self) -> list[Size]:
        return list(self.value.reshape(-1).tolist())


def _vector(items: Sequence[Size], shape: tuple[int, ...], elem: int) -> _ShapeVector:
    known = all(isinstance(item, int) for item in items)
    return _ShapeVector(np.array(items, np.int64 if known else object).reshape(shape), elem)


def may_be_equal(first: Size, second: Size) -> bool:
    """Whether two sizes are equal as far as shape inference can know; sizes that the model names differently are not."""
    if 1 in (first, second) and first != second:
        return False
    return first == second or is_unknown(first) or is_unknown(second)


def is_unknown(size: Size) -> bool:
    """Whether a size has no name of the model's: none at all, one of inference, or an expression of others."""
    return size is None or (isinstance(size, str) and (size.startswith("unk__") or not _NAME.fullmatch(size)))


_NAME = re.compile(r"[\w.:|-]+")


def fold_shapes(proto: ModelProto, types: Mapping[str, TypeProto], keep: Collection[str]) -> int:
    """Fold arithmetic on static sizes to constants, including Reshape targets that only copy sizes."""
    graph = proto.graph
    vectors = _stored_vectors(proto)
    fixed = set(vectors)
    made: dict[str, TensorProto] = {}
    folded = 0
    for node in graph.node:
        if walk.domain_of(node):
            continue
        if node.op_type == "Reshape":
            folded += _fold_reshape_target(node, types, vectors, fixed, made)
            continue
        name = node.output[0] if node.output else ""
        if len(node.output) != 1 or not name:
            continue
        vector = _evaluate_node(node, types, vectors)
        if vector is None:
            continue
        vectors[name] = vector
        if vector.known and name not in keep:
            made[name] = numpy_helper.from_array(
                vector.value.astype(helper.tensor_dtype_to_np_dtype(vector.elem)), name
            )
            fixed.add(name)
    gone = [node for node in graph.node if node.output and node.output[0] in made]
    if made:
        names = {node.output[0] for node in gone}
        retain_items(graph.node, lambda node: not (node.output and node.output[0] in names))
        graph.initializer.extend(made.values())
    return folded + len(gone)


def shape_vectors(proto: ModelProto, types: Mapping[str, TypeProto]) -> dict[str, list[Size]]:
    """Partly known elements of the small integer tensors of the main graph, by name: numbers, size symbols, or None."""
    vectors = _stored_vectors(proto)
    for node in proto.graph.node:
        if len(node.output) == 1 and not walk.domain_of(node):
            vector = _evaluate_node(node, types, vectors)
            if vector is not None:
                vectors[node.output[0]] = vector
    return {name: vector.items for name, vector in vectors.items()}


def _stored_vectors(proto: ModelProto) -> dict[str, _ShapeVector]:
    found: dict[str, _ShapeVector] = {}
    for tensor in proto.graph.initializer:
        small = len(tensor.dims) < 2 and math.prod(tensor.dims) <= 64 and tensor.data_location != TensorProto.EXTERNAL
        if small and tensor.data_type in (*_INDEX_TYPES, TensorProto.BOOL):
            value = numpy_helper.to_array(tensor).astype(np.int64)
            found[tensor.name] = _ShapeVector(value, tensor.data_type)
    return found


def _evaluate_node(
    node: NodeProto, types: Mapping[str, TypeProto], vectors: Mapping[str, _ShapeVector]
) -> _ShapeVector | None:
    given = walk.attributes(node)
    if node.op_type in ("Shape", "Size"):
        sizes = symbolic_shape(types, node.input[0])
        if sizes is None or len(sizes) > 64:
            return None
        if node.op_type == "Shape":
            sizes = sizes[slice(given.get("start", 0), given.get("end"))]
            return _vector(sizes, (len(sizes),), TensorProto.INT64)
        known = [size for size in sizes if isinstance(size, int)]
        total = math.prod(known)
        if len(known) < len(sizes) or _exceeds([total], TensorProto.INT64):
            return None
        return _vector([total], (), TensorProto.INT64)
    if not node.input or any(name and name not in vectors for name in node.input):
        return None
    inputs = [vectors[name] if name else None for name in node.input]
    try:
        made = _fold(node.op_type, inputs, given)
    except (ArithmeticError, ValueError, TypeError, LookupError):  # a damaged graph is reported elsewhere
        return None
    return None if made is None or len(made.shape) > 1 or _exceeds(made.items, made.elem) else made


def _fold(op: str, inputs: Sequence[_ShapeVector | None], attrs: Mapping[str, Any]) -> _ShapeVector | None:
    if op == "Cast" and inputs[0] is not None:
        return _ShapeVector(inputs[0].value, int(attrs["to"])) if int(attrs["to"]) in _INDEX_TYPES else None
    data = inputs[1 if op == "Where" else 0]
    if data is None or (op in _ARITHMETIC and data.elem not in _INDEX_TYPES):
        return None
    if op in MOVING and op != "Concat" and not all(item is None or item.known for item in inputs[1:]):
        return None
    if op == "ConstantOfShape" and data.known:
        made = fold_node(op, attrs, inputs, 1)
        if made is None or made[0].size > 64 or made[0].dtype not in (np.int64, np.int32):
            return None
        elem = int(helper.np_dtype_to_tensor_dtype(made[0].dtype))
    else:
        made, elem = fold_elements(op, attrs, inputs, 1, _ELEMENTS), TensorProto.BOOL if op == "Equal" else data.elem
    return None if made is None else _vector(made[0].reshape(-1).tolist(), made[0].shape, elem)


def _exceeds(items: Sequence[Size], elem: int) -> bool:
    """Whether a known element is beyond the index type."""
    top = (1 << (31 if elem == TensorProto.INT32 else 63)) - 1
    return any(isinstance(item, int) and abs(item) > top for item in items)


def _divide(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)  # raises for 0
    return a if b == 1 else None


def _numbers_or(compute: Callable[[int, int], int], neutral: int) -> Callable[[Size, Size], Size]:
    """An operator on numbers; a size without one stays what it is beside the neutral number."""

    def rule(a: Size, b: Size) -> Size:
        if isinstance(a, int) and isinstance(b, int):
            return compute(a, b)
        return a if b == neutral else b if a == neutral and compute is not operator.sub else None

    return rule


def _equal(a: Size, b: Size) -> Size:
    if isinstance(a, int) and isinstance(b, int):
        return int(a == b)
    below = any(isinstance(x, str) and isinstance(y, int) and y < 0 for x, y in ((a, b), (b, a)))
    return 0 if below else None  # a size is never negative


_ARITHMETIC: dict[str, Callable[[Size, Size], Size]] = {
    "Add": _numbers_or(operator.add, 0),
    "Sub": _numbers_or(operator.sub, 0),
    "Mul": _numbers_or(operator.mul, 1),
    "Div": _divide,
}
_ELEMENTS: dict[str, Callable[..., Size]] = _ARITHMETIC | {
    "Equal": _equal,
    "Where": lambda condition, a, b: None if condition is None else a if condition else b,
}


def _fold_reshape_target(
    node: NodeProto,
    types: Mapping[str, TypeProto],
    vectors: dict[str, _ShapeVector],
    fixed: set[str],
    made: dict[str, TensorProto],
) -> int:
    """Make the target of a Reshape that copies sizes or leaves one open a constant, with 0 for an open one that is that of
    its input; returns 1 if changed."""
    if len(node.input) < 2:
        return 0
    vector = _evaluate_node(node, types, vectors)
    if vector is not None:
        vectors[node.output[0]] = vector
    target = vectors.get(node.input[1])
    if target is None or not target.shape or walk.attributes(node).get("allowzero"):
        return 0
    sizes = symbolic_shape(types, node.input[0]) or []
    wanted: list[int] = []
    for at, item in enumerate(target.items):
        if isinstance(item, int):
            wanted.append(item)
        elif isinstance(item, str) and at < len(sizes) and sizes[at] == item:
            wanted.append(0)
        else:
            wanted.append(-1)
    if wanted.count(-1) == 1 and _copies_open_size(sizes, wanted):
        wanted[wanted.index(-1)] = 0
    if node.input[1] in fixed and wanted == target.items:
        return 0
    if wanted.count(-1) > 1 or (-1 in wanted and 0 in [item for item in target.items if isinstance(item, int)]):
        return 0
    name = f"{node.output[0]}_target"
    if name in vectors or name in types or name in made:
        return 0
    made[name] = numpy_helper.from_array(np.array(wanted, np.int64), name)
    node.input[1] = name
    return 1


def _copies_open_size(sizes: Sequence[Size], wanted: Sequence[int]) -> bool:
    """Whether the size that a Reshape target leaves open is the input's at its place: all others multiply to one number."""
    at = wanted.index(-1)
    if at >= len(sizes) or any(not item and place >= len(sizes) for place, item in enumerate(wanted)):
        return False
    before = [*sizes[:at], *sizes[at + 1 :]]
    after = [item or sizes[place] for place, item in enumerate(wanted) if place != at]
    if None in before or None in after or not isinstance(sizes[at], str):
        return False
    symbols = [sorted(size for size in part if isinstance(size, str)) for part in (before, after)]
    counts = [math.prod(size for size in part if isinstance(size, int)) for part in (before, after)]
    return symbols[0] == symbols[1] and counts[0] == counts[1] > 0


log = logging.getLogger(__name__)


def write_inferred_shapes(proto: ModelProto) -> None:
    """Write inferred shapes into `value_info` and unranked outputs, in place."""
    del proto.graph.value_info[:]
    found = _try_infer(proto)
    proto.graph.value_info.extend(found.graph.value_info)
    for value, known in zip(proto.graph.output, found.graph.output, strict=True):
        if not value.type.tensor_type.HasField("shape"):
            value.CopyFrom(known)


def _try_infer(proto: ModelProto) -> ModelProto:
    """The model with inferred shapes; unchanged if inference fails."""
    try:
        return infer_shapes(proto)
    except Exception as error:  # its errors and the checker's have no common base
        log.info("no shapes inferred: %s", error)
        return proto


def infer_types(proto: ModelProto) -> dict[str, TypeProto]:
    """Inferred type of every tensor; declared intermediate types are ignored."""
    plain = deepcopy(proto)
    del plain.graph.value_info[:]
    for value in plain.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    found = _types_of(_try_infer(plain).graph)
    for _ in range(_MOST_PASSES):  # a block's rank follows from that of the block before it
        ranked = [*_ranks_of_targets(plain, found)]
        if not ranked:
            break
        plain.graph.value_info.extend(ranked)
        found = _types_of(_try_infer(plain).graph)
    return found


def _types_of(graph: GraphProto) -> dict[str, TypeProto]:
    found = {item.name: item.type for item in (*graph.value_info, *graph.output, *graph.input)}
    for tensor in graph.initializer:
        found[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return found


def _ranks_of_targets(proto: ModelProto, types: Mapping[str, TypeProto]) -> Iterator[ValueInfoProto]:
    """Results of a Reshape that ONNX's inference gives no rank: as many sizes as its computed target has elements."""
    outputs = {value.name for value in proto.graph.output}
    for node in proto.graph.node:
        if node.op_type != "Reshape" or walk.domain_of(node) or len(node.input) < 2 or node.output[0] in outputs:
            continue
        length = symbolic_shape(types, node.input[1])
        elem = elem_type(types, node.input[0])
        if symbolic_shape(types, node.output[0]) is None and elem and length and isinstance(length[0], int):
            yield helper.make_tensor_value_info(node.output[0], elem, [None] * length[0])


def elem_type(types: Mapping[str, TypeProto], name: str) -> int:
    return int(types[name].tensor_type.elem_type) if name in types else 0


def symbolic_shape(types: Mapping[str, TypeProto], name: str) -> list[Size] | None:
    """Sizes of a tensor: number, symbol, or None; None if its rank is unknown."""
    if name not in types or not types[name].tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dimension_symbol(dim.dim_param)
        for dim in types[name].tensor_type.shape.dim
    ]


def without_unbound_names(raw: bytes) -> bytes:
    """The model without names of input dimensions that bind nothing: placeholders, and those that stand twice in an input.

    TensorRT requires equal sizes for equal names, ONNX Runtime does not.
    """
    model = ModelProto.FromString(raw)
    unbound = 0
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        names = [dim.dim_param for dim in dims]
        for dim in dims:
            if dim.dim_param and (dimension_symbol(dim.dim_param) is None or names.count(dim.dim_param) > 1):
                dim.ClearField("dim_param")
                unbound += 1
    return model.SerializeToString() if unbound else raw

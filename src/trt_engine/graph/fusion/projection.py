"""Linear layers in front of attention: their weights packed into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import HALF_AND_FLOAT, Array, FusionGraph
from trt_engine.graph.fusion.head_view import Columns

_MAX_FOLLOWED = 64


@dataclass(frozen=True, slots=True)
class Projection:
    """A product with a constant matrix, with or without a bias."""

    output: str
    product: NodeProto
    source: str
    """What is multiplied, of rank 3: batch and sequence in any order, then the depth."""
    weight: str
    depth: int
    transposed: bool = False
    """True for a weight (columns, depth)."""
    bias: str | None = None
    merged: bool = False
    """True where the product is over the rows of `source`, with its first two dimensions merged."""


Piece = tuple[Projection, Columns]
"""A projection and the columns of it that are used, in order."""


def read_projection(graph: FusionGraph, name: str) -> Projection | None:
    """The projection that computes a tensor; None if another node does, or its weights are not constant."""
    add, bias, product = graph.producer(name, "Add"), None, name
    if add is not None:
        bias = next((item for item in add.input if graph.is_constant(item)), None)
        product = next((item for item in add.input if item != bias), "")
        if bias is None or not graph.is_private(product):
            return None
    node = graph.producer(product, "MatMul", "Gemm")
    if node is None or not graph.is_constant(node.input[1]) or graph.elem_type(node.input[1]) not in HALF_AND_FLOAT:
        return None
    shape, given = graph.constants[node.input[1]].dims, walk.attributes(node)
    if len(shape) != 2 or given.get("transA") or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
        return None
    if len(node.input) > 2 and node.input[2]:
        if bias is not None or not graph.is_constant(node.input[2]):
            return None
        bias = node.input[2]
    transposed = bool(given.get("transB"))
    depth, width = (shape[1], shape[0]) if transposed else (shape[0], shape[1])
    if bias is not None and int(np.prod(graph.constants[bias].dims)) != width:
        return None
    source, merged = node.input[0], False
    if graph.rank(source) == 2:
        reshape = graph.producer(source, "Reshape")
        if reshape is None or graph.rank(reshape.input[0]) != 3 or (graph.shape(reshape.input[0]) or [0])[-1] != depth:
            return None
        source, merged = reshape.input[0], True
    elif graph.rank(source) != 3:
        return None
    return Projection(name, node, source, node.input[1], int(depth), transposed, bias, merged)


def is_read_within(graph: FusionGraph, name: str, ends: Sequence[NodeProto]) -> bool:
    """True if everything that reads a tensor leads to the nodes `ends` alone."""
    waiting, seen = [name], {id(node) for node in ends}
    while waiting:
        tensor = waiting.pop()
        if tensor in graph.outputs:
            return False
        for node in graph.consumers(tensor):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if len(seen) > _MAX_FOLLOWED + len(ends):
                return False
            waiting += [item for item in node.output if item]
    return True


def packed_weight(graph: FusionGraph, pieces: Sequence[Piece], stem: str) -> str:
    """The weights (depth, columns of all pieces); the stored one where it is that already."""
    first = pieces[0][0]
    columns = np.concatenate([used for _, used in pieces])
    if (
        all(item.weight == first.weight for item, _ in pieces)
        and not first.transposed
        and len(columns) == graph.constants[first.weight].dims[1]
        and np.array_equal(columns, np.arange(len(columns)))
    ):
        return first.weight
    matrices: dict[str, Array] = {}
    parts = []
    for item, used in pieces:
        matrix = matrices.setdefault(item.weight, graph.read(item.weight))
        parts.append((matrix.T if item.transposed else matrix)[:, used])
    return graph.builder.add_initializer(np.ascontiguousarray(np.concatenate(parts, axis=1)), stem)


def packed_bias(graph: FusionGraph, pieces: Sequence[Piece], stem: str) -> str:
    """The biases of all pieces, zeros where there is none: ONNX Runtime 1.31 crashes on a CPU without any."""
    first = pieces[0][0]
    columns = np.concatenate([used for _, used in pieces])
    if first.bias is not None and all(item.bias == first.bias and item.weight == first.weight for item, _ in pieces):
        dims = list(graph.constants[first.bias].dims)
        if dims == [len(columns)] and np.array_equal(columns, np.arange(len(columns))):
            return first.bias
    kind = graph.read(first.weight).dtype
    parts = [
        np.zeros(len(used), kind) if item.bias is None else graph.read(item.bias).reshape(-1)[used]
        for item, used in pieces
    ]
    return graph.builder.add_initializer(np.concatenate(parts).astype(kind), stem)

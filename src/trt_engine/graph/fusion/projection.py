"""Linear layers in front of attention: their weights packed into one; and patches as a matrix product.

A convolution whose kernels do not overlap (stride = kernel size, no padding) multiplies each patch by one matrix. cuDNN runs
it as a convolution of three channels, which fills no tensor core: for ViT-B/16 in FP16 on an H200 it took 83 of 556 us at
batch 1, and 0.72 of 6.2 ms at batch 64 with its changes of layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from trt_engine.arrayfiles import Array
from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import HALF_AND_FLOAT, FusionGraph, NotFused
from trt_engine.graph.fusion.head_view import Columns
from trt_engine.graph.symbolic_shapes import Size

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


_MIN_DEPTH = 32
"""Smallest number of values in a patch, over its channels; smaller products gain nothing."""


def fuse_patch_embedding(graph: FusionGraph, conv: NodeProto) -> None:
    """Replace such a convolution whose output is read with the channels last: Reshape and Transpose, or Transpose."""
    kernel = (graph.shape(conv.input[1]) or [])[2:]
    if len(kernel) == 2 and kernel != [1, 1] and walk.attributes(conv).get("strides") == kernel:
        end = _end(graph, conv)
        _replace(graph, conv, end, _grid(graph, conv, end))


def _end(graph: FusionGraph, conv: NodeProto) -> NodeProto:
    """The Transpose behind the convolution that gives batch x patches x channels, or batch x rows x columns x channels."""
    end = node = graph.only_consumer(conv.output[0], "Reshape", "Transpose")
    perm = [0, 2, 3, 1]
    if node is not None and node.op_type == "Reshape":
        before, after = graph.shape(conv.output[0]), graph.shape(node.output[0])
        if before and after and len(after) == 3 and after[:2] == before[:2] and node.input[0] == conv.output[0]:
            end, perm = graph.only_consumer(node.output[0], "Transpose"), [0, 2, 1]
    if end is None or end.op_type != "Transpose" or walk.attributes(end).get("perm") != perm:
        raise NotFused("its result is not read with the channels last, and so alone")
    return end


def _grid(graph: FusionGraph, conv: NodeProto, end: NodeProto) -> list[int]:
    """Channels, rows of patches, rows of a patch, columns of patches, columns of a patch."""
    given, (x, weight) = walk.attributes(conv), conv.input[:2]
    shape: list[Size] | None = graph.shape(x)
    if not graph.is_constant(weight) or any(name and not graph.is_constant(name) for name in conv.input[2:]):
        raise NotFused("its kernels or its bias are not constant")
    _, depth, *kernel = graph.constants[weight].dims
    if given.get("group", 1) != 1 or given.get("dilations", [1, 1]) != [1, 1]:
        raise NotFused("it has groups or dilations")
    if any(given.get("pads", [])) or given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
        raise NotFused("it has padding")
    height, width = shape[2:] if shape is not None and len(shape) == 4 and shape[1] == depth else (None, None)
    if not isinstance(height, int) or not isinstance(width, int) or height % kernel[0] or width % kernel[1]:
        raise NotFused(f"its input is {height} x {width}, expected known multiples of {kernel[0]} x {kernel[1]}")
    if (count := depth * math.prod(kernel)) < _MIN_DEPTH:
        raise NotFused(f"its patches have {count} values, expected at least {_MIN_DEPTH}")
    graph.require_floats([name for name in (x, *conv.input[1:], end.output[0]) if name], conv.output)
    return [depth, height // kernel[0], kernel[0], width // kernel[1], kernel[1]]


def _replace(graph: FusionGraph, conv: NodeProto, end: NodeProto, grid: list[int]) -> None:
    depth, rows, height, columns, width = grid
    stem, builder = walk.label(conv), graph.builder
    kernels = graph.read(conv.input[1])
    bias = conv.input[2] if len(conv.input) > 2 else ""
    flat = len(walk.attributes(end)["perm"]) == 3

    def reshaped(name: str, *sizes: int, out: str | None = None) -> str:
        return builder.add("Reshape", [name, graph.constant(np.array([0, *sizes], np.int64), "patches")], stem, out=out)

    patches = builder.add("Transpose", [reshaped(conv.input[0], *grid)], stem, perm=[0, 2, 4, 1, 3, 5])
    matrix = graph.constant(kernels.reshape(len(kernels), -1).T.copy(), stem)
    operands = [reshaped(patches, rows * columns, depth * height * width), matrix]
    if not bias and flat:
        builder.add("MatMul", operands, stem, out=end.output[0])
    else:
        product = builder.add("MatMul", operands, stem)
        if bias:
            product = builder.add("Add", [product, bias], stem, out=end.output[0] if flat else None)
        if not flat:
            reshaped(product, rows, columns, len(kernels), out=end.output[0])
    graph.replace("patch_embedding", [end])

"""Convolutions in a graph for a GPU: Conv, Add of a residual and Relu as one node, which cuDNN computes in one kernel; those
whose windows do not overlap as linear layers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper

from trt_engine.backends.inductor.linear import LINEAR
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import make_initializer, read_tensor

CONV_RELU = "_ConvRelu"
"""Our own operator: Conv's inputs x, weight and bias (or ""), and a residual (or "") that is added before Relu."""
PATCHES = "_Patches"
"""Our own operator: the windows of `kernel_shape` of x (n x c x h x w), one beside the other: n x h' x w' x values."""
_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def fuse_convolution(graph: GraphProto) -> int:
    """Replace Conv and Relu, with an Add between, of half-precision 2-D convolutions, in place; returns how many."""
    outputs = {item.name for item in graph.output}
    constants = {item.name: item for item in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    makers = {name: node for node in graph.node for name in node.output}

    def convolution(name: str) -> NodeProto | None:
        node = makers.get(name)
        if node is None or node.op_type != "Conv" or walk.domain_of(node) or readers[name] != 1 or name in outputs:
            return None
        return node if _is_fusible(node, constants) else None

    fused = 0
    for relu in list(graph.node):
        if relu.op_type != "Relu" or walk.domain_of(relu):
            continue
        conv, residual, added = convolution(relu.input[0]), "", makers.get(relu.input[0])
        if conv is None and added is not None and added.op_type == "Add" and not walk.domain_of(added):
            if readers[added.output[0]] != 1 or added.output[0] in outputs:
                continue
            at = next((at for at in (0, 1) if convolution(added.input[at]) is not None), None)
            if at is None or added.input[0] == added.input[1] or added.input[1 - at] in constants:
                continue
            conv, residual = convolution(added.input[at]), added.input[1 - at]
            graph.node.remove(added)
        if conv is None:
            continue
        inputs = [*conv.input[:2], conv.input[2] if len(conv.input) > 2 else "", residual]
        made = helper.make_node(CONV_RELU, inputs, list(relu.output), name=conv.name)
        made.attribute.extend(conv.attribute)
        graph.node.remove(conv)
        relu.CopyFrom(made)
        makers[relu.output[0]] = relu
        fused += 1
    return fused


def _is_fusible(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    """Stored FP16 or BF16 weights of two spatial axes, no groups, the same pads at both ends."""
    weight, given = constants.get(node.input[1]), walk.attributes(node)
    if weight is None or weight.data_type not in _HALF or len(weight.dims) != 4:
        return False
    pads = list(given.get("pads", [0] * 4))
    return given.get("group", 1) == 1 and given.get("auto_pad", b"NOTSET") == b"NOTSET" and pads[:2] == pads[2:]


def fuse_patches(graph: GraphProto) -> int:
    """Replace convolutions whose windows do not overlap, as of patch embeddings, by `_Patches`, `_Linear` and a Transpose,
    in place; returns how many."""
    constants = {item.name: item for item in graph.initializer}
    fused = 0
    for at, node in reversed(list(enumerate(graph.node))):
        if node.op_type != "Conv" or walk.domain_of(node) or not _is_fusible(node, constants):
            continue
        weight, given = constants[node.input[1]], walk.attributes(node)
        kernel = list(weight.dims[2:])
        if list(given.get("strides", [1, 1])) != kernel or kernel == [1, 1] or any(given.get("pads", [0])):
            continue
        if list(given.get("dilations", [1, 1])) != [1, 1]:
            continue
        stem = node.output[0]
        matrix = read_tensor(weight, Path()).reshape(weight.dims[0], -1).T  # weights are in the graph
        graph.initializer.append(make_initializer(np.ascontiguousarray(matrix), f"{stem}_matrix"))
        names = [f"{stem}_patches", f"{stem}_matrix", *node.input[2:3]]
        made = [
            helper.make_node(PATCHES, [node.input[0]], [names[0]], kernel_shape=kernel),
            helper.make_node(LINEAR, names, [f"{stem}_last"], name=node.name),
            helper.make_node("Transpose", [f"{stem}_last"], [stem], perm=[0, 3, 1, 2]),
        ]
        graph.node.remove(node)
        for new in reversed(made):
            graph.node.insert(at, new)
        fused += 1
    return fused

"""Convolutions in a graph for a GPU: Conv, Add of a residual and Relu as one node, which cuDNN computes in one kernel;
those whose windows do not overlap as linear layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, NodeProto, TensorProto, helper

from trt_engine.backends.inductor.linear import LINEAR, GraphView
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import make_initializer, read_tensor, set_attribute, set_input

CONVOLUTION = "_Convolution"
"""Our own operator: Conv's inputs x, weight and bias (or ""), and a residual (or "") that is added before the attribute
`activation`: `relu`, or `none` of one whose output is a residual. `follows`: its input is the output of another, whose
layout is known."""
PATCHES = "_Patches"
"""Our own operator: the windows of `kernel_shape` of x (n x c x h x w), one beside the other: n x h' x w' x values."""
_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def store_weights(graph: GraphProto) -> int:
    """Replace DequantizeLinear of a stored tensor by its values where only convolutions read it, in place: these compute on
    dequantised values; returns how many."""
    constants = {item.name: item for item in graph.initializer}
    makers = {node.output[0]: node for node in graph.node if node.op_type == "DequantizeLinear"}
    weights = {node.input[1] for node in graph.node if node.op_type == "Conv" and not walk.domain_of(node)}
    others = {
        name for node in graph.node for at, name in enumerate(node.input) if (node.op_type, at) != ("Conv", 1)
    } | walk.kept_names(graph)
    stored = 0
    for name in sorted(weights & makers.keys() - others):
        node = makers[name]
        given, inputs = walk.attributes(node), [constants.get(item) for item in node.input if item]
        written = given.get("block_size", 0) or given.get("output_dtype", 0)
        if walk.domain_of(node) or written or any(item is None for item in inputs):
            continue
        values, scale, *zero = (
            read_tensor(item, Path()) for item in inputs if item is not None
        )  # they are in the graph
        if zero:
            values = values.astype(np.float32) - _along(zero[0], values.ndim, given.get("axis", 1))
        found = values.astype(np.float32) * _along(scale, values.ndim, given.get("axis", 1))
        graph.initializer.append(make_initializer(found.astype(scale.dtype), name))
        graph.node.remove(node)
        stored += 1
    return stored


def _along(values: npt.NDArray[Any], rank: int, axis: int) -> npt.NDArray[np.float32]:
    """A number, or one for each place of an axis of a tensor of this rank."""
    wide: npt.NDArray[np.float32] = values.astype(np.float32)
    return wide.reshape([-1 if at == axis % rank else 1 for at in range(rank)]) if wide.size > 1 else wide.reshape(())


def fuse_convolution(graph: GraphProto) -> int:
    """Replace Conv and Relu, with an Add between, of half-precision 2-D convolutions, in place; returns how many."""
    fuser = _ConvolutionFuser(graph)
    fused = sum(fuser.take(node) for node in list(graph.node) if node.op_type == "Relu" and not walk.domain_of(node))
    made = {node.output[0] for node in graph.node if node.op_type == CONVOLUTION}
    for node in graph.node:
        if node.op_type == CONVOLUTION and node.input[0] in made:
            set_attribute(node, "follows", 1)
    return fused


class _ConvolutionFuser(GraphView):
    """Edits the nodes of a graph."""

    def convolution(self, name: str) -> NodeProto | None:
        """The one that makes a tensor. Of one channel there is none: cuDNN takes such an input for either layout, and may
        give the output in the one that the compiler does not expect."""
        node = self.inner(name, "Conv")
        if node is None or not _is_fusible(node, self.constants):
            return None
        return node if self.constants[node.input[1]].dims[1] > 1 else None

    def take(self, node: NodeProto) -> bool:
        """Relu with the nodes before it."""
        conv, residual, between = self.convolution(node.input[0]), "", []
        if conv is None and (added := self.inner(node.input[0], "Add")) is not None:
            at = next((at for at in (0, 1) if self.convolution(added.input[at]) is not None), None)
            if at is not None and added.input[0] != added.input[1] and added.input[1 - at] not in self.constants:
                conv, residual, between = self.convolution(added.input[at]), added.input[1 - at], [added]
        if conv is None:
            return False
        if (shortcut := self.convolution(residual)) is not None:
            self.take_shortcut(shortcut, conv)
        return self.replace(node, conv, residual, "relu", between)

    def take_shortcut(self, shortcut: NodeProto, conv: NodeProto) -> None:
        """A convolution whose output is the residual of another: its bias is added with the other's."""
        biases = [self.constants.get(item.input[2]) if len(item.input) > 2 else None for item in (conv, shortcut)]
        if any(bias is None and len(item.input) > 2 for bias, item in zip(biases, (conv, shortcut), strict=True)):
            return
        stored = [read_tensor(bias, Path()) for bias in biases if bias is not None]  # weights are in the graph
        if len({tuple(bias.shape) for bias in stored}) > 1 or len({*map(self.width, (conv, shortcut))}) > 1:
            return
        if stored:
            name = f"{conv.output[0]}_bias"
            total = np.sum([bias.astype(np.float32) for bias in stored], axis=0).astype(stored[0].dtype)
            self.graph.initializer.append(make_initializer(total, name))
            set_input(conv, 2, name)
        made = helper.make_node(
            CONVOLUTION, [*shortcut.input[:2], "", ""], list(shortcut.output), name=shortcut.name, activation="none"
        )
        made.attribute.extend(shortcut.attribute)
        shortcut.CopyFrom(made)

    def width(self, conv: NodeProto) -> int:
        return int(self.constants[conv.input[1]].dims[0])

    def replace(
        self, node: NodeProto, conv: NodeProto, residual: str, activation: str, between: Sequence[NodeProto]
    ) -> bool:
        """The convolution in the place of the last node."""
        inputs = [*conv.input[:2], conv.input[2] if len(conv.input) > 2 else "", residual]
        made = helper.make_node(CONVOLUTION, inputs, list(node.output), name=conv.name, activation=activation)
        made.attribute.extend(conv.attribute)
        for gone in (*between, conv):
            self.graph.node.remove(gone)
        node.CopyFrom(made)
        return True


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
        if any(name not in constants for name in node.input[2:3] if name):
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

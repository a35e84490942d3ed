"""Takes the biases of convolutions out of the convolutions of an optimised graph in NHWC layout.

ONNX Runtime's CUDA provider adds the bias of a convolution in a pass of its own, which takes longer than the arithmetic of
most layers (ResNet-50 in FP16 at batch 64 on an H200: 5.5 ms with the biases, 3.0 ms without any). Here a bias becomes a
*shift*: the value of a tensor is what the graph computes plus the shift, a constant for each channel. Shifts pass through
the operators behind the convolution without a pass over the data:

    Relu(x + s) = Max(x, -s) + s            Conv(x + s) = Conv(x) + Conv(s), without padding
    (x + s) + (y + t) = (x + y) + (s + t)   MaxPool(x + s) = MaxPool(x) + s

    Gemm(x + s) = Gemm(x) + Gemm(s)

and are added where any other operator reads the tensor. A convolution with padding would make a constant for each position,
so there the shift is added, or it becomes a channel: the convolution before the Max gets output channels of zeros, which the
Max makes a constant 1, and the padded convolution multiplies that channel, which is 0 in the padding, by `Conv(s)` tap by
tap and adds its own bias at the tap in the middle:

    Conv(Max(Conv(x), -s) + s) + b = Conv'(Max(Conv'(x), [-s, 1, 0...]))

That is a pass less over the data and longer sums: at batch 1 it pays, with many images and few channels it does not.
A shift far larger than the biases that it comes from would cost digits, so it is added early.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, helper

from trt_engine.graph import walk
from trt_engine.graph.edit_graph import (
    Weights,
    consumers_of,
    count_reads,
    drop_unused,
    free_name,
    make_initializer,
    replace_items,
    retain_items,
    set_input,
    used_names,
)
from trt_engine.graph.shape_inference import trace
from trt_engine.tensors import Shape

NHWC_DOMAIN = "com.ms.internal.nhwc"
_MAX_GROWTH = 4.0
"""Largest shift that is carried on, in multiples of the largest bias it comes from."""
_CHANNELS = 8
"""Channels added for a constant one: tensor cores read FP16 in groups of 8."""

Array = npt.NDArray[np.float32]


def separate_conv_biases(proto: ModelProto, folder: Path, *, channels: bool = False) -> int:
    """Rewrite the graph in place; returns the number of convolutions whose bias was taken out.

    With `channels`, shifts before padded convolutions become channels where they can, instead of additions. `folder` holds
    the weights of a graph that keeps them outside. A graph with subgraphs is left as it is.
    """
    if any(True for node in proto.graph.node for _ in walk.bodies(node)):
        return 0
    return _ShiftPass(proto, folder, channels=channels).run()


class _ShiftPass:
    """One pass over the nodes in order; `shifts` holds what is missing from a tensor's value."""

    def __init__(self, proto: ModelProto, folder: Path, *, channels: bool) -> None:
        self.proto, self.channels = proto, channels
        self.weights = Weights(proto, folder)
        self.facts = trace(proto, {}).tensors
        self.taken = used_names(proto)
        self.shifts: dict[str, Array] = {}
        """By tensor, one value for each channel."""
        self.scales: dict[str, float] = {}
        """By tensor: the largest bias that its shift comes from."""
        self.complete: dict[str, str] = {}
        """By tensor: the tensor with its shift added."""
        self.nodes: list[NodeProto] = []
        self.makers: dict[str, NodeProto] = {}
        """New nodes by their tensor, of those that a channel may be added to: Conv and Max."""
        self.reads, self.readers = count_reads(proto), consumers_of(proto.graph.node)
        self.layouts: dict[str, str] = {}
        """By a tensor of one pixel in NCHW: the same in NHWC."""
        self.count = 0

    def run(self) -> int:
        for node in list(self.proto.graph.node):
            rule = _RULES.get((walk.domain_of(node), node.op_type))
            if rule is None or not rule(self, node):
                for at, name in enumerate(node.input):
                    node.input[at] = self.add_shift(name)
                self.nodes.append(node)
        for value in self.proto.graph.output:
            self._complete_output(value.name)
        replace_items(self.proto.graph.node, self.nodes)
        drop_unused(self.proto, [*self.layouts, *(item.name for item in self.proto.graph.initializer)])
        return self.count

    def conv(self, node: NodeProto) -> bool:
        if any(name not in self.weights for name in node.input[1:]):
            return False
        weight = self.weights.read(node.input[1]).astype(np.float32)
        bias = np.zeros(len(weight), np.float32)
        if len(node.input) > 2:
            bias = self.weights.read(node.input[2]).astype(np.float32)
            del node.input[2:]
            self.count += 1
        own = float(np.abs(bias).max(initial=0.0))
        scale = max(own, self.scales.get(node.input[0], 0.0))
        shift = self._convolve_shift(node, weight, bias)
        if shift is None and self.channels and self._carry_as_channel(node, weight, bias):
            self.nodes.append(node)
            return True
        if shift is None or np.abs(shift).max() > _MAX_GROWTH * scale:
            node.input[0], shift, scale = self.add_shift(node.input[0]), bias, own
        self._set_shift(node.output[0], shift, scale)
        self.nodes.append(node)
        self.makers[node.output[0]] = node
        return True

    def relu(self, node: NodeProto) -> bool:
        name, out = node.input[0], node.output[0]
        if name not in self.shifts:
            return False
        least = self._constant(-self.shifts[name], f"{out}_least", name)
        self.makers[out] = helper.make_node("Max", [name, least], [out], name=node.name)
        self.nodes.append(self.makers[out])
        self._set_shift(out, self.shifts[name], self.scales[name])
        return True

    def add(self, node: NodeProto) -> bool:
        shape = self._shape(node.output[0])
        carried = [name for name in node.input if name in self.shifts]
        if not carried or shape[3] < 0 or any(self._shape(name) != shape for name in carried):
            return False
        shift = sum((self.shifts[name] for name in carried), np.zeros(1, np.float32))
        scale = max(self.scales[name] for name in carried)
        if np.abs(shift).max() > _MAX_GROWTH * scale:
            return False
        self._set_shift(node.output[0], shift, scale)
        self.nodes.append(node)
        return True

    def pool(self, node: NodeProto) -> bool:
        """Maximum or mean of a channel: both move with its shift."""
        name = node.input[0]
        if name not in self.shifts or len(node.output) > 1:
            return False
        self._set_shift(node.output[0], self.shifts[name], self.scales[name])
        self.nodes.append(node)
        return True

    def flatten(self, node: NodeProto) -> bool:
        """Flatten behind the change of layout of one pixel, which changes no order: it reads the pixel itself."""
        before = self.layouts.get(node.input[0])
        if before is None or before not in self.shifts:
            return False
        self._set_shift(node.output[0], self.shifts[before], self.scales[before])
        self.nodes.append(helper.make_node("Flatten", [before], list(node.output), name=node.name))
        return True

    def transpose(self, node: NodeProto) -> bool:
        """The change of one pixel to NCHW, if nothing but Flatten at its first axis reads it."""
        name, out = node.input[0], node.output[0]
        if walk.attributes(node).get("perm") != [0, 3, 1, 2] or self._shape(name)[1:3] != (1, 1):
            return False
        readers = [node for node in self.readers.get(out, []) if node.op_type == "Flatten"]
        if len(readers) != self.reads[out] or any(walk.attributes(item).get("axis", 1) != 1 for item in readers):
            return False
        self.layouts[out] = name
        self.nodes.append(node)
        return True

    def gemm(self, node: NodeProto) -> bool:
        """A linear layer: its bias takes the product of the shift."""
        given, (name, *stored) = walk.attributes(node), node.input
        if name not in self.shifts or any(item not in self.weights for item in stored) or given.get("transA", 0):
            return False
        if any(given.get(scale, 1.0) != 1.0 for scale in ("alpha", "beta")):
            return False
        weight = self.weights.read(stored[0]).astype(np.float32)
        bias = self.shifts[name] @ (weight.T if given.get("transB", 0) else weight)
        if len(stored) > 1:
            bias = bias + self.weights.read(stored[1]).astype(np.float32)
        set_input(node, 2, self._constant(bias, f"{node.output[0]}_bias", name))
        self.nodes.append(node)
        return True

    def add_shift(self, name: str) -> str:
        """The tensor with its shift added, by a node of its own."""
        if name not in self.shifts:
            return name
        if name not in self.complete:
            made = self.complete[name] = free_name(f"{name}_shifted", self.taken)
            constant = self._constant(self.shifts[name], f"{name}_shift", name)
            self.nodes.append(helper.make_node("Add", [name, constant], [made], name=made))
        return self.complete[name]

    def _convolve_shift(self, node: NodeProto, weight: Array, bias: Array) -> Array | None:
        """Bias plus the convolution of the input's shift; None where that is not one value for each channel."""
        shift = self.shifts.get(node.input[0])
        if shift is None:
            return bias
        given = walk.attributes(node)
        if any(given.get("pads") or ()) or given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID"):
            return None
        groups = shift.reshape(int(given.get("group", 1)), -1)
        kernel = weight.sum(axis=tuple(range(2, weight.ndim))).reshape(len(groups), -1, groups.shape[1])
        return np.asarray(np.einsum("goi,gi->go", kernel, groups).reshape(-1) + bias, np.float32)

    def _carry_as_channel(self, node: NodeProto, weight: Array, bias: Array) -> bool:
        """Give a padded convolution the shift of its input and its own bias by a channel of ones; False if it cannot be."""
        most = self.makers.get(node.input[0])
        before = self.makers.get(most.input[0]) if most is not None and most.op_type == "Max" else None
        if before is None or before.op_type != "Conv" or most is None or not _is_centred(node, weight.shape):
            return False
        if any(self.reads[name] != 1 for name in (before.output[0], most.output[0])):
            return False
        if any(walk.attributes(conv).get("group", 1) != 1 for conv in (before, node)):
            return False
        wide = self.weights.read(before.input[1])
        before.input[1] = self._store(np.pad(wide, [(0, _CHANNELS)] + [(0, 0)] * (wide.ndim - 1)), before.input[1])
        one = np.zeros(_CHANNELS, np.float32)
        one[0] = 1.0
        shift = self.shifts[most.output[0]]
        most.input[1] = self._constant(np.concatenate([-shift, one]), most.input[1], most.output[0])
        more = np.zeros((len(weight), _CHANNELS, *weight.shape[2:]), np.float32)
        more[:, 0] = np.einsum("oi...,i->o...", weight, shift)
        more[(slice(None), 0, *(size // 2 for size in weight.shape[2:]))] += bias
        node.input[1] = self._store(np.concatenate([weight, more], 1).astype(wide.dtype), node.input[1])
        widened = {before.output[0], most.output[0]}
        retain_items(self.proto.graph.value_info, lambda item: item.name not in widened)
        return True

    def _set_shift(self, name: str, shift: Array, scale: float) -> None:
        """Keep a shift, rounded to the tensor's type as its constants are; nothing for a shift of zero."""
        kind = helper.tensor_dtype_to_np_dtype(self.facts[name].elem)
        rounded = np.asarray(shift, np.float32).astype(kind).astype(np.float32)
        if rounded.any():
            self.shifts[name], self.scales[name] = rounded, scale

    def _shape(self, name: str) -> Shape:
        """Sizes `[N, H, W, C]`, -1 for an open one."""
        shape = self.facts[name].shape if name in self.facts else None
        return shape if shape is not None and len(shape) == 4 else (-1, -1, -1, -1)

    def _constant(self, value: Array, name: str, like: str) -> str:
        """Name of a new initializer of the dtype of the tensor `like`."""
        return self._store(value.astype(helper.tensor_dtype_to_np_dtype(self.facts[like].elem)), name)

    def _store(self, array: npt.NDArray[Any], name: str) -> str:
        """Name of a new initializer."""
        made = free_name(name, self.taken)
        self.proto.graph.initializer.append(make_initializer(array, made))
        return made

    def _complete_output(self, name: str) -> None:
        """Give an output of the graph its true value under its own name."""
        if name not in self.shifts:
            return
        raw = free_name(f"{name}_unshifted", self.taken)
        for node in self.nodes:
            for names in (node.input, node.output):
                for at, other in enumerate(names):
                    names[at] = raw if other == name else other
        constant = self._constant(self.shifts[name], f"{name}_shift", name)
        self.nodes.append(helper.make_node("Add", [raw, constant], [name], name=f"{raw}_add"))


def _is_centred(node: NodeProto, weight: Shape) -> bool:
    """Whether the tap in the middle of the kernel is inside the image at every position."""
    given, kernel = walk.attributes(node), weight[2:]
    if given.get("auto_pad", b"NOTSET") != b"NOTSET" or not all(size % 2 for size in kernel):
        return False
    reach = [size // 2 * step for size, step in zip(kernel, given.get("dilations") or [1] * len(kernel), strict=True)]
    return list(given.get("pads") or ()) == reach * 2


_RULES: dict[tuple[str, str], Callable[[_ShiftPass, NodeProto], bool]] = {
    (NHWC_DOMAIN, "Conv"): _ShiftPass.conv,
    (NHWC_DOMAIN, "MaxPool"): _ShiftPass.pool,
    (NHWC_DOMAIN, "GlobalAveragePool"): _ShiftPass.pool,
    ("", "Relu"): _ShiftPass.relu,
    ("", "Add"): _ShiftPass.add,
    ("", "Transpose"): _ShiftPass.transpose,
    ("", "Flatten"): _ShiftPass.flatten,
    ("", "Gemm"): _ShiftPass.gemm,
}

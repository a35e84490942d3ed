"""Q/DQ as ONNX Runtime's CPU kernels want them: unsigned activations with zero points, signed weights, INT32 biases."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.device import info
from trt_engine.graph import walk
from trt_engine.graph.trace import attributes
from trt_engine.precision.bias import axis_of, correction
from trt_engine.precision.cpu_placement import IntegerGraph
from trt_engine.precision.placement import CONVOLUTIONS, Exclusions, Placement, Site
from trt_engine.precision.qdq import bias_additions
from trt_engine.precision.surgery import Names, Ops, Weights, drop_unused
from trt_engine.records import QuantizedNode

__all__ = ["CpuWriter", "Range", "activation_scale", "weight_bits", "weight_values"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Range = tuple[float, float]
_LARGEST_BIAS = 2**30
"""Of the integers that biases are rounded to: half of INT32, so that sums stay inside."""
_FEW = 64
"""Channels up to which a Softmax over them is written as its parts."""
_UNIT = ("Sigmoid", "HardSigmoid")
"""Operators whose results reach from 0 to 1."""
_NOT_NEGATIVE = frozenset("Relu Sigmoid Softmax HardSigmoid Abs Exp Sqrt".split())


def activation_scale(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """Scale and zero point of 8 unsigned bits over a range; 0 is always one of their values."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32((high - low) / 255)
    if not scale or not np.isfinite(scale):
        return np.float32(1), np.uint8(0)
    return scale, np.uint8(round(-low * 255 / (high - low)))


def weight_bits(reduce_range: str) -> int:
    """8, or 7 where products of 8 bits overflow: x86 without VNNI adds two of them in 16 bits and saturates."""
    if reduce_range != "auto":
        return 7 if reduce_range == "on" else 8
    features = set(info.cpu().features)
    exact = {"avx512_vnni", "avx_vnni", "amx_int8"}
    return 7 if "avx2" in features and not exact & features else 8


def weight_values(values: Array, axis: int, bits: int, least: Array | None = None) -> tuple[Array, Array]:
    """A weight in that many signed bits, one scale for each channel; no scale under its `least`."""
    others = tuple(at for at in range(values.ndim) if at != axis)
    reach = np.abs(values).max(axis=others) if others else np.abs(values)
    largest = 2 ** (bits - 1) - 1
    scales = (reach / largest).astype(np.float32)
    if least is not None:
        scales = np.maximum(scales, least.astype(np.float32))
    scales[scales == 0] = 1
    shape = [-1 if at == axis else 1 for at in range(values.ndim)]
    made = np.clip(np.rint(values / scales.reshape(shape)), -largest, largest).astype(np.int8)
    return made, scales


class CpuWriter:
    """Writes the pairs of one graph, in place."""

    def __init__(
        self,
        proto: ModelProto,
        weights: Weights,
        placement: Placement,
        graph: IntegerGraph,
        bits: int,
        exclude: Exclusions,
    ) -> None:
        self.proto, self.weights, self.placement, self.graph = proto, weights, placement, graph
        self.bits = bits
        """Of weights: 7 where the processor's kernels would overflow with 8."""
        self.exclude = exclude
        self.opset = walk.opsets_of(proto).get("", 0)
        self.ops = Ops(Names(proto))
        self.written: list[QuantizedNode] = []
        self._makers = {name: node for node in proto.graph.node for name in node.output}
        self._additions = bias_additions(proto, weights)
        self._ranges: Mapping[str, Range] = {}
        self._means: Mapping[tuple[str, int], Array] = {}
        self._scales: dict[str, tuple[str, str, np.float32]] = {}
        """Names of scale and zero point, and the scale, by tensor."""
        self._pairs: dict[str, str] = {}
        """What is behind the pair of a tensor that floating-point nodes gave."""
        self._replaced: list[str] = []

    @property
    def activations(self) -> list[str]:
        """The tensors whose ranges must be known."""
        graph = self.graph
        names = (
            *graph.inputs,
            *(name for node in self.proto.graph.node for name in node.output if name in graph.results),
        )
        sources = dict.fromkeys(map(graph.scale_source, names))
        makers = self._makers
        return [
            name for name in sources
            if name not in self.weights and not (name in makers and makers[name].op_type in _UNIT)
        ]  # fmt: skip

    def planned(self) -> list[QuantizedNode]:
        """What would be quantised, before any data is seen."""
        return [
            QuantizedNode(site.label, site.node.op_type, self._described(site), site.activation, None, 0.0)
            for site in self.placement.sites
        ]

    def write(self, ranges: Mapping[str, Range], means: Mapping[tuple[str, int], Array]) -> None:
        """Quantise every site and what stands between them; the graph is whole again afterwards."""
        self._ranges, self._means = ranges, means
        graph = self.graph
        dropped = {node.output[0] for node in graph.absorbed.values()}
        nodes: list[NodeProto] = []
        for node in self.proto.graph.node:
            key = node.output[0] if node.output else ""
            if key in dropped:
                continue
            if key in graph.sites:
                self._site(graph.sites[key])
            elif key in graph.others:
                for at, name in enumerate(node.input):
                    if name in graph.inputs:
                        node.input[at] = self._pair(name)
                node = self._in_integers(node)
            elif node.op_type == "Softmax":
                node = self._in_parts(node)
            nodes.extend(self.ops.taken())
            nodes.append(node)
            if (key in graph.sites or key in graph.others) and node.op_type != "DequantizeLinear":
                self._quantize_results(node)
                nodes.extend(self.ops.taken())
        self.ops.put(self.proto, nodes)
        made = {name for node in graph.absorbed.values() for name in node.input[1:]}
        drop_unused(self.proto, [*(site.weight for site in self.placement.sites), *self._replaced, *made])

    # -------------------------------------------------------------------------------------------- activations

    def _scale(self, name: str) -> tuple[str, str, np.float32]:
        source = self.graph.scale_source(name)
        if source not in self._scales:
            scale, zero = activation_scale(*self._range(source))
            made = self.ops.store(scale, f"{source}_scale"), self.ops.store(zero, f"{source}_zero_point")
            self._scales[source] = (*made, scale)
        return self._scales[source]

    def _range(self, name: str) -> Range:
        if name in self.weights:
            values = self.weights.read(name)
            return float(values.min()), float(values.max())
        maker = self._makers.get(name)
        if maker is not None and maker.op_type in _UNIT:
            return 0.0, 1.0
        low, high = self._ranges[name]
        return (max(low, 0.0), high) if maker is not None and maker.op_type in _NOT_NEGATIVE else (low, high)

    def _pair(self, name: str) -> str:
        """A floating-point tensor after quantisation and back; one pair for all that read it."""
        if name not in self._pairs:
            scale, zero, step = self._scale(name)
            if name in self.weights:
                values = np.rint(self.weights.read(name) / step) + float(activation_scale(*self._range(name))[1])
                stored = np.clip(values, 0, 255).astype(np.uint8)
                quantized = self.ops.store(stored, f"{name}_uint8")
                self._replaced.append(name)
            else:
                quantized = self.ops.add("QuantizeLinear", [name, scale, zero], name)
            self._pairs[name] = self.ops.add("DequantizeLinear", [quantized, scale, zero], name)
        return self._pairs[name]

    def _quantize_results(self, node: NodeProto) -> None:
        """Put the pair behind what an integer node gives: who reads the tensor's name reads it rounded."""
        for at, raw in enumerate(node.output):
            clip = self.graph.absorbed.get(raw)
            name = clip.output[0] if clip is not None else raw
            if name not in self.graph.results:
                continue
            scale, zero, _ = self._scale(name)
            node.output[at] = raw if clip is not None else self.ops.names.fresh(f"{raw}_float")
            quantized = self.ops.add("QuantizeLinear", [node.output[at], scale, zero], name)
            self.ops.add("DequantizeLinear", [quantized, scale, zero], name, out=name)

    def _in_integers(self, node: NodeProto) -> NodeProto:
        """A HardSigmoid or HardSwish as additions and products; any other node as it is.

        HardSigmoid is `alpha * min(max(x + beta / alpha, 0), 1 / alpha)`: the rounding of the sum cuts it off at both ends,
        and the same integers under a scale times `alpha` are the result.
        """
        if node.op_type not in ("HardSigmoid", "HardSwish"):
            return node
        given = attributes(node)
        alpha, beta = (
            (given.get("alpha", 0.2), given.get("beta", 0.5)) if node.op_type == "HardSigmoid" else (1 / 6, 0.5)
        )
        stem, reach = node.output[0], 1 / alpha
        shift = np.float32(beta / alpha)
        step = self.ops.constant(np.float32(abs(shift) / 255) or np.float32(1), "shift_scale")
        zero = self.ops.constant(np.uint8(0 if shift >= 0 else 255), "shift_zero_point")
        stored = self.ops.constant(np.uint8(255 if shift > 0 else 0), "shift_uint8")
        shifted = self.ops.add(
            "Add", [node.input[0], self.ops.add("DequantizeLinear", [stored, step, zero], stem)], stem
        )
        none = self.ops.constant(np.uint8(0), "zero_uint8")
        integers = self.ops.add(
            "QuantizeLinear", [shifted, self.ops.constant(np.float32(reach / 255), "reach_scale"), none], stem
        )
        scale = self.ops.constant(np.float32(1 / 255), "unit_scale")
        if node.op_type == "HardSigmoid":
            self.ops.add("DequantizeLinear", [integers, scale, none], stem, out=stem)
            return self.ops.nodes.pop()
        gate = self.ops.add("DequantizeLinear", [integers, scale, none], stem)
        return helper.make_node("Mul", [node.input[0], gate], [stem], name=node.name)

    def _in_parts(self, node: NodeProto) -> NodeProto:
        """A Softmax over a few channels as its parts: ONNX Runtime's kernel transposes the tensor twice and takes each row
        by itself, three times as long (the box distributions of a detector). Any other node as it is."""
        fact = self.placement.facts.get(node.input[0])
        axis = attributes(node).get("axis", -1)
        if walk.domain_of(node) or fact is None or not fact.shape or fact.elem != TensorProto.FLOAT:
            return node
        axis %= len(fact.shape)
        if axis == len(fact.shape) - 1 or not 0 < fact.shape[axis] <= _FEW or self.exclude.reason(node):
            return node
        ops, read, stem = self.ops, node.input[0], node.output[0]
        axes = ops.constant(np.array([axis]), "softmax_axes")
        if self.opset >= 18:
            largest = ops.add("ReduceMax", [read, axes], stem)
        else:
            largest = ops.add("ReduceMax", [read], stem, axes=[axis])
        powers = ops.add("Exp", [ops.add("Sub", [read, largest], stem)], stem)
        whole = ops.add("ReduceSum", [powers, axes], stem)
        return helper.make_node("Div", [powers, whole], [stem], name=node.name)

    # -------------------------------------------------------------------------------------------- layers

    def _site(self, site: Site) -> None:
        node, read = site.node, site.activation
        values = self.weights.read(site.weight).astype(np.float32)
        step = float(self._scale(read)[2])
        axis = site.channel
        bias = self._bias(site)
        least = np.abs(bias) / (step * _LARGEST_BIAS) if bias is not None else None
        integers, scales = weight_values(values, axis, self.bits, least)
        shape = [-1 if at == axis else 1 for at in range(values.ndim)]
        lost = values - integers.astype(np.float32) * scales.reshape(shape)
        size = float(np.linalg.norm(values))
        mean = self._means.get((read, axis_of(site)))
        added = correction(lost, site, mean) if mean is not None else None
        if added is not None and node.op_type == "MatMul":
            self._correct_addition(node, added)
        elif added is not None:
            bias = added if bias is None else bias + added
        node.input[0] = self._pair(read) if read in self.graph.inputs else read
        stored = self.ops.store(integers, f"{site.weight}_int8")
        scale = self.ops.store(scales, f"{site.weight}_scale")
        zero = self.ops.constant(np.zeros(scales.shape, np.int8), "zero_int8")
        node.input[1] = self.ops.add("DequantizeLinear", [stored, scale, zero], site.weight, axis=axis)
        if bias is not None and node.op_type != "MatMul":
            self._store_bias(node, bias, scales, step)
        low, high = self._range(self.graph.scale_source(read))
        error = float(np.linalg.norm(lost)) / size if size else 0.0
        self.written.append(
            QuantizedNode(walk.label(node), node.op_type, self._described(site), read, max(abs(low), abs(high)), error)
        )

    def _correct_addition(self, node: NodeProto, added: Array) -> None:
        """Let the stored vector behind a MatMul take up what rounding took away."""
        addition = self._additions.get(node.output[0])
        if addition is None:
            return
        at = 1 if addition.input[0] == node.output[0] else 0
        whole = self.weights.read(addition.input[at])
        if whole.shape == added.shape:
            self._replaced.append(addition.input[at])
            addition.input[at] = self.ops.store((whole + added).astype(np.float32), f"{addition.input[at]}_corrected")

    def _bias(self, site: Site) -> Array | None:
        """The layer's bias, one number for each output channel."""
        name = site.node.input[2] if len(site.node.input) > 2 else ""
        if not name or site.node.op_type not in (*CONVOLUTIONS, "Gemm"):
            return None
        self._replaced.append(name)
        return np.asarray(self.weights.read(name), np.float32).reshape(-1)

    def _store_bias(self, node: NodeProto, bias: Array, scales: Array, step: float) -> None:
        """Integers in steps of what the products of activations and weights are steps of."""
        steps = (scales * np.float32(step)).astype(np.float32)
        limit = 2.0**31 - 128
        integers = np.clip(np.rint(bias.astype(np.float64) / steps), -limit, limit).astype(np.int32)
        while len(node.input) < 3:
            node.input.append("")
        stem = f"{node.input[2] or node.output[0]}_bias"
        inputs = [self.ops.store(integers, f"{stem}_int32"), self.ops.store(steps, f"{stem}_scale")]
        node.input[2] = self.ops.add("DequantizeLinear", inputs, stem, axis=0)

    def _described(self, site: Site) -> str:
        bits = "int8" if self.bits == 8 else f"int8 (of {self.bits} bits)"
        return f"{bits}, one scale for each of {site.shape[site.channel]} channels (axis {site.channel})"

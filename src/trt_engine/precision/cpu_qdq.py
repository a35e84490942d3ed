"""Q/DQ for ONNX Runtime's CPU kernels: unsigned activations with zero points, signed weights, INT32 biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_engine.device import info
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import NameAllocator, NodeBuilder, Weights, drop_unused, inline_value, set_input
from trt_engine.model import GraphIndex
from trt_engine.precision.cpu_layer_selection import IntegerGraph
from trt_engine.precision.layer_selection import (
    CONV_OPS,
    Exclusions,
    LayerSelection,
    QuantizableLayer,
)
from trt_engine.precision.qdq import correct_bias_add, find_bias_adds, relative_error
from trt_engine.precision.weight_correction import channel_axis, output_correction
from trt_engine.records.precision import QuantizedNode

Array = npt.NDArray[Any]
Range = tuple[float, float]
_MAX_BIAS = 2**30
"""Largest quantized bias: half of INT32, which leaves headroom for accumulation."""
_MAX_SOFTMAX_CHANNELS = 64
"""Most channels of a Softmax that is expanded."""
_UNIT_RANGE_OPS = ("Sigmoid", "HardSigmoid")
"""Operators with outputs in [0, 1]."""
_NON_NEGATIVE_OPS = frozenset("Relu Sigmoid Softmax HardSigmoid Abs Exp Sqrt".split())


def activation_scale(low: float, high: float) -> tuple[np.float32, np.uint8]:
    """UINT8 scale and zero point of a range; 0 is represented exactly."""
    low, high = min(low, 0.0), max(high, 0.0)
    scale = np.float32((high - low) / 255)
    if not scale or not np.isfinite(scale):
        return np.float32(1), np.uint8(0)
    return scale, np.uint8(round(-low * 255 / (high - low)))


def weight_bits(reduce_range: str) -> int:
    """Return 8, or 7 on x86 without VNNI, which saturates when it adds two 8-bit products in 16 bits."""
    if reduce_range != "auto":
        return 7 if reduce_range == "on" else 8
    features = set(info.cpu().features)
    exact = {"avx512_vnni", "avx_vnni", "amx_int8"}
    without = "avx2" in features and not exact & features
    return 7 if without or _kernels_saturate() else 8


@cache
def _kernels_saturate() -> bool:
    """Whether ONNX Runtime's kernels overflow here; an emulator states the features of its host."""
    weight = numpy_helper.from_array(np.full((64, 32), 127, np.int8), "w")
    x, y = (
        helper.make_tensor_value_info(*io) for io in (("x", TensorProto.UINT8, [1, 64]), ("y", TensorProto.INT32, None))
    )
    graph = helper.make_graph([helper.make_node("MatMulInteger", ["x", "w"], ["y"])], "overflow", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.full((1, 64), 255, np.uint8)})
    return bool(np.any(found != 255 * 127 * 64))


def has_8_bit_weights(graph: GraphIndex) -> bool:
    """Whether signed weights use more than 7 bits; True where they are not stored in the model as integers."""
    stored = [inline_value(item) for item in graph.tensors if item.data_type == TensorProto.INT8 and len(item.dims) > 1]
    return not stored or any(values is None or np.abs(values).max(initial=0) > 64 for values in stored)


def quantize_weight(values: Array, axis: int, bits: int, least: Array | None = None) -> tuple[Array, Array]:
    """Quantize a weight to signed integers with per-channel scales, none below `least`; return int8 values in its shape and
    float32 scales `[channels]`.
    """
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


class CpuQdqWriter:
    """Writes Q/DQ pairs into one graph, in place."""

    def __init__(
        self,
        proto: ModelProto,
        weights: Weights,
        selection: LayerSelection,
        graph: IntegerGraph,
        bits: int,
        exclude: Exclusions,
    ) -> None:
        self.proto, self.weights, self.selection, self.graph = proto, weights, selection, graph
        self.bits = bits
        """Weight bits: 7 where the CPU's kernels would overflow with 8."""
        self.exclude = exclude
        self.opset = walk.opsets_of(proto).get("", 0)
        self.ops = NodeBuilder(NameAllocator(proto))
        self.quantized_nodes: list[QuantizedNode] = []
        self._makers = {name: node for node in proto.graph.node for name in node.output}
        self._bias_adds = find_bias_adds(proto, weights)
        self._ranges: Mapping[str, Range] = {}
        self._means: Mapping[tuple[str, int], Array] = {}
        self._scales: dict[str, tuple[str, str, np.float32]] = {}
        """Names of scale and zero point, and the scale, by tensor."""
        self._dequantized: dict[str, str] = {}
        """Dequantized name by floating-point tensor."""
        self._unused: list[str] = []

    @property
    def range_tensors(self) -> list[str]:
        """The tensors whose ranges are needed."""
        graph = self.graph
        names = (
            *graph.quantized_inputs,
            *(name for node in self.proto.graph.node for name in node.output if name in graph.quantized_outputs),
        )
        sources = dict.fromkeys(map(graph.scale_source, names))
        makers = self._makers
        return [
            name for name in sources
            if name not in self.weights and not (name in makers and makers[name].op_type in _UNIT_RANGE_OPS)
        ]  # fmt: skip

    def plan(self) -> list[QuantizedNode]:
        """The layers to be quantized, before calibration."""
        return [_describe_layer(site, self.bits) for site in self.selection.layers]

    def write(self, ranges: Mapping[str, Range], means: Mapping[tuple[str, int], Array]) -> None:
        """Quantize the layers and the ops between them.

        `means` are those of the inputs by name and axis, float64 `[channels]`.
        """
        self._ranges, self._means = ranges, means
        graph = self.graph
        dropped = {node.output[0] for node in graph.fused_clips.values()}
        nodes: list[NodeProto] = []
        for node in self.proto.graph.node:
            key = node.output[0] if node.output else ""
            if key in dropped:
                continue
            if key in graph.layers:
                self._quantize_layer(graph.layers[key])
            elif key in graph.float_clips:
                node = self._expand_clip(node)
            elif key in graph.others:
                for at, name in enumerate(node.input):
                    if name in graph.quantized_inputs:
                        node.input[at] = self._add_qdq(name)
                node = self._expand_hard_sigmoid(node)
            elif node.op_type == "Softmax":
                node = self._expand_softmax(node)
            nodes.extend(self.ops.take_nodes())
            nodes.append(node)
            if (key in graph.layers or key in graph.others) and node.op_type != "DequantizeLinear":
                self._quantize_results(node)
                nodes.extend(self.ops.take_nodes())
        self.ops.replace_nodes(self.proto, nodes)
        made = {name for node in graph.fused_clips.values() for name in node.input[1:]}
        drop_unused(self.proto, [*(site.weight for site in self.selection.layers), *self._unused, *made])

    # -------------------------------------------------------------------------------------------- activations

    def _scale(self, name: str) -> tuple[str, str, np.float32]:
        source = self.graph.scale_source(name)
        if source not in self._scales:
            scale, zero = activation_scale(*self.range_of(source))
            made = (
                self.ops.add_initializer(scale, f"{source}_scale"),
                self.ops.add_initializer(zero, f"{source}_zero_point"),
            )
            self._scales[source] = (*made, scale)
        return self._scales[source]

    def range_of(self, name: str) -> Range:
        """The range that a tensor is quantized by: its own, or that of the tensor whose scale it shares."""
        return self._range(self.graph.scale_source(name))

    def _range(self, name: str) -> Range:
        if name in self.weights:
            values = self.weights.read(name)
            return float(values.min()), float(values.max())
        maker = self._makers.get(name)
        if maker is not None and maker.op_type in _UNIT_RANGE_OPS:
            return 0.0, 1.0
        low, high = self._ranges[name]
        return (max(low, 0.0), high) if maker is not None and maker.op_type in _NON_NEGATIVE_OPS else (low, high)

    def _add_qdq(self, name: str) -> str:
        """Return the dequantized tensor; all consumers share one pair."""
        if name not in self._dequantized:
            scale, zero, step = self._scale(name)
            if name in self.weights:
                values = np.rint(self.weights.read(name) / step) + float(activation_scale(*self._range(name))[1])
                stored = np.clip(values, 0, 255).astype(np.uint8)
                quantized = self.ops.add_initializer(stored, f"{name}_uint8")
                self._unused.append(name)
            else:
                quantized = self.ops.add("QuantizeLinear", [name, scale, zero], name)
            self._dequantized[name] = self.ops.add("DequantizeLinear", [quantized, scale, zero], name)
        return self._dequantized[name]

    def _quantize_results(self, node: NodeProto) -> None:
        """Add a pair after an integer node's output, keeping the tensor's name for the dequantized value."""
        for at, raw in enumerate(node.output):
            clip = self.graph.fused_clips.get(raw)
            name = clip.output[0] if clip is not None else raw
            if name not in self.graph.quantized_outputs:
                continue
            scale, zero, _ = self._scale(name)
            node.output[at] = raw if clip is not None else self.ops.names.fresh(f"{raw}_float")
            quantized = self.ops.add("QuantizeLinear", [node.output[at], scale, zero], name)
            self.ops.add("DequantizeLinear", [quantized, scale, zero], name, out=name)

    def _expand_hard_sigmoid(self, node: NodeProto) -> NodeProto:
        """Expand HardSigmoid and HardSwish into Add and Mul; return any other node unchanged.

        HardSigmoid is `alpha * min(max(x + beta / alpha, 0), 1 / alpha)`: quantizing the sum clips both ends, and the same
        integers with the scale times `alpha` are the result.
        """
        if node.op_type not in ("HardSigmoid", "HardSwish"):
            return node
        given = walk.attributes(node)
        alpha, beta = (
            (given.get("alpha", 0.2), given.get("beta", 0.5)) if node.op_type == "HardSigmoid" else (1 / 6, 0.5)
        )
        stem, reach = node.output[0], 1 / alpha
        shift = np.float32(beta / alpha)
        step = self.ops.shared_constant(np.float32(abs(shift) / 255) or np.float32(1), "shift_scale")
        zero = self.ops.shared_constant(np.uint8(0 if shift >= 0 else 255), "shift_zero_point")
        stored = self.ops.shared_constant(np.uint8(255 if shift > 0 else 0), "shift_uint8")
        shifted = self.ops.add(
            "Add", [node.input[0], self.ops.add("DequantizeLinear", [stored, step, zero], stem)], stem
        )
        none = self.ops.shared_constant(np.uint8(0), "zero_uint8")
        integers = self.ops.add(
            "QuantizeLinear", [shifted, self.ops.shared_constant(np.float32(reach / 255), "reach_scale"), none], stem
        )
        scale = self.ops.shared_constant(np.float32(1 / 255), "unit_scale")
        if node.op_type == "HardSigmoid":
            self.ops.add("DequantizeLinear", [integers, scale, none], stem, out=stem)
            return self.ops.nodes.pop()
        gate = self.ops.add("DequantizeLinear", [integers, scale, none], stem)
        return helper.make_node("Mul", [node.input[0], gate], [stem], name=node.name)

    def _expand_clip(self, node: NodeProto) -> NodeProto:
        """Write the Relu or Clip of a layer with floating-point output as Max and Min.

        ONNX Runtime looks for a QuantizeLinear behind a Relu or Clip, and leaves the layer in floating point without one.
        """
        if node.op_type == "Relu":
            bounds = [("Max", self.ops.shared_constant(np.float32(0), "zero"))]
        else:
            bounds = [(op, name) for op, name in zip(("Max", "Min"), node.input[1:], strict=False) if name]
        read = node.input[0]
        for op, bound in bounds[:-1]:
            read = self.ops.add(op, [read, bound], node.output[0])
        op, bound = bounds[-1] if bounds else ("Identity", "")
        return helper.make_node(op, [read, bound] if bound else [read], [node.output[0]], name=node.name)

    def _expand_softmax(self, node: NodeProto) -> NodeProto:
        """Expand a Softmax over a few channels (a detector's box distributions): ONNX Runtime's kernel transposes the tensor
        twice and takes three times as long. Return any other node unchanged."""
        fact = self.selection.tensor_info.get(node.input[0])
        axis = walk.attributes(node).get("axis", -1)
        if walk.domain_of(node) or fact is None or not fact.shape or fact.elem != TensorProto.FLOAT:
            return node
        axis %= len(fact.shape)
        if (
            axis == len(fact.shape) - 1
            or not 0 < fact.shape[axis] <= _MAX_SOFTMAX_CHANNELS
            or self.exclude.reason(node)
        ):
            return node
        ops, read, stem = self.ops, node.input[0], node.output[0]
        axes = ops.shared_constant(np.array([axis]), "softmax_axes")
        if self.opset >= 18:
            largest = ops.add("ReduceMax", [read, axes], stem)
        else:
            largest = ops.add("ReduceMax", [read], stem, axes=[axis])
        powers = ops.add("Exp", [ops.add("Sub", [read, largest], stem)], stem)
        whole = ops.add("ReduceSum", [powers, axes], stem)
        return helper.make_node("Div", [powers, whole], [stem], name=node.name)

    # -------------------------------------------------------------------------------------------- layers

    def _quantize_layer(self, site: QuantizableLayer) -> None:
        node, read = site.node, site.activation
        values = self.weights.read(site.weight).astype(np.float32)
        step = float(self._scale(read)[2])
        axis = site.channel_axis
        bias = self._read_bias(site)
        least = np.abs(bias) / (step * _MAX_BIAS) if bias is not None else None
        integers, scales = quantize_weight(values, axis, self.bits, least)
        shape = [-1 if at == axis else 1 for at in range(values.ndim)]
        lost = values - integers.astype(np.float32) * scales.reshape(shape)
        mean = self._means.get((read, channel_axis(site)))
        added = output_correction(lost, site, mean) if mean is not None else None
        if added is not None and node.op_type == "MatMul":
            self._unused += correct_bias_add(self.ops, self.weights, self._bias_adds, node.output[0], added, np.float32)
        elif added is not None:
            bias = added if bias is None else bias + added
        node.input[0] = self._add_qdq(read) if read in self.graph.quantized_inputs else read
        stored = self.ops.add_initializer(integers, f"{site.weight}_int8")
        scale = self.ops.add_initializer(scales, f"{site.weight}_scale")
        zero = self.ops.shared_constant(np.zeros(scales.shape, np.int8), "zero_int8")
        node.input[1] = self.ops.add("DequantizeLinear", [stored, scale, zero], site.weight, axis=axis)
        if bias is not None and node.op_type != "MatMul":
            self._store_bias(node, bias, scales, step)
        low, high = self.range_of(read)
        record = _describe_layer(site, self.bits)
        self.quantized_nodes.append(replace(record, amax=max(abs(low), abs(high)), error=relative_error(lost, values)))

    def _read_bias(self, site: QuantizableLayer) -> Array | None:
        """Read the layer's bias `[outputs]`, or None."""
        name = site.node.input[2] if len(site.node.input) > 2 else ""
        if not name or site.node.op_type not in (*CONV_OPS, "Gemm"):
            return None
        self._unused.append(name)
        return np.asarray(self.weights.read(name), np.float32).reshape(-1)

    def _store_bias(self, node: NodeProto, bias: Array, scales: Array, step: float) -> None:
        """Store the bias as INT32 with scale `activation scale x weight scale`."""
        steps = (scales * np.float32(step)).astype(np.float32)
        limit = 2.0**31 - 128
        integers = np.clip(np.rint(bias.astype(np.float64) / steps), -limit, limit).astype(np.int32)
        stem = f"{(node.input[2] if len(node.input) > 2 else '') or node.output[0]}_bias"
        inputs = [self.ops.add_initializer(integers, f"{stem}_int32"), self.ops.add_initializer(steps, f"{stem}_scale")]
        set_input(node, 2, self.ops.add("DequantizeLinear", inputs, stem, axis=0))


def _describe_layer(site: QuantizableLayer, bits: int, *, dynamic: bool = False) -> QuantizedNode:
    """Record of a layer, before its range and error are known."""
    kind = "int8" if bits == 8 else f"int8 (of {bits} bits)"
    what = "outputs; activations while running" if dynamic else f"channels (axis {site.channel_axis})"
    weight = f"{kind}, one scale for each of {site.weight_shape[site.channel_axis]} {what}"
    return QuantizedNode(site.label, site.node.op_type, weight, site.activation, None, 0.0)


_CONV_REASON = "a dynamically quantised convolution is slower than in FP32"


def select_dynamic_layers(selection: LayerSelection) -> LayerSelection:
    """Remove convolutions: ConvInteger is several times slower than Conv in FP32."""
    return selection.without(lambda site: _CONV_REASON if site.node.op_type in CONV_OPS else None)


class DynamicQuantWriter:
    """Writes dynamic quantization into one graph, in place."""

    range_tensors: tuple[str, ...] = ()

    def __init__(self, proto: ModelProto, weights: Weights, selection: LayerSelection, bits: int) -> None:
        self.proto, self.weights, self.selection, self.bits = proto, weights, selection, bits
        self.ops = NodeBuilder(NameAllocator(proto))
        self.quantized_nodes: list[QuantizedNode] = []
        self._quantized: dict[str, list[str]] = {}

    def plan(self) -> list[QuantizedNode]:
        """The layers to be quantized."""
        return [_describe_layer(site, self.bits, dynamic=True) for site in self.selection.layers]

    def write(self) -> None:
        """Quantize every layer."""
        sites = {site.output_name: site for site in self.selection.layers}
        nodes: list[NodeProto] = []
        for node in self.proto.graph.node:
            key = node.output[0] if node.output else ""
            if key in sites:
                self._quantize_layer(sites[key])
            else:
                self.ops.nodes.append(node)
            nodes.extend(self.ops.take_nodes())
        self.ops.replace_nodes(self.proto, nodes)
        drop_unused(self.proto, [site.weight for site in self.selection.layers])

    def _quantize_layer(self, site: QuantizableLayer) -> None:
        node, ops = site.node, self.ops
        values = self.weights.read(site.weight).astype(np.float32)
        matrix = np.ascontiguousarray(values.T) if site.channel_axis == 0 else values
        integers, scales = quantize_weight(matrix, 1, self.bits)
        if site.activation not in self._quantized:
            self._quantized[site.activation] = ops.add_multi_output(
                "DynamicQuantizeLinear", [site.activation], site.activation, 3
            )
        data, scale, zero = self._quantized[site.activation]
        stored = ops.add_initializer(integers, f"{site.weight}_int8")
        none = ops.shared_constant(np.zeros(scales.shape, np.int8), "zero_int8")
        product = ops.add("MatMulInteger", [data, stored, zero, none], node.output[0])
        ops.nodes[-1].name = walk.label(node)
        steps = ops.add("Mul", [scale, ops.add_initializer(scales, f"{site.weight}_scale")], f"{node.output[0]}_scale")
        bias = node.input[2] if len(node.input) > 2 else ""
        result = ops.add("Cast", [product], node.output[0], to=TensorProto.FLOAT)
        if bias:
            ops.add("Add", [ops.add("Mul", [result, steps], node.output[0]), bias], bias, out=node.output[0])
        else:
            ops.add("Mul", [result, steps], node.output[0], out=node.output[0])
        record = _describe_layer(site, self.bits, dynamic=True)
        self.quantized_nodes.append(replace(record, error=relative_error(matrix - integers * scales, matrix)))

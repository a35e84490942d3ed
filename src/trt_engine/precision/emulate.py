"""Emulate a quantized graph in FP32, to measure its accuracy where no kernels exist.

Weights are dequantized to FP32 and activations rounded by standard operators, bit-exact with `formats`. Supports
QuantizeLinear and DequantizeLinear of any type and TensorRT's operators of domain `trt` (attributes and defaults as in the
importers of the public onnx-tensorrt parser).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.errors import ModelError
from trt_engine.graph import stored_tensors, walk
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.edit_graph import NameAllocator, NodeBuilder, Weights, drop_unused, make_initializer, retain_items
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import carry_module_paths
from trt_engine.graph.operators import is_trt_only
from trt_engine.graph.opset import raise_opset
from trt_engine.graph.shape_inference import TensorInfo, trace
from trt_engine.precision.formats import Format
from trt_engine.precision.formats import emulate as emulate_format
from trt_engine.precision.formats import quantize as to_format
from trt_engine.precision.layer_selection import QuantizableLayer
from trt_engine.tensors import format_shape

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_INTEGER_RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255), TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535), TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15),
}  # fmt: skip


def emulate(model: Path | str, out: Path | str) -> Path:
    """Write the FP32 emulation of a quantized model to `out`; raise `ModelError` for unsupported operators."""
    path, out = Path(model), Path(out)
    proto = emulate_proto(read_proto(path), path.parent)
    carry_module_paths(proto, read_proto(path))
    external = any(item.data_location == TensorProto.EXTERNAL for item in walk.tensors(proto))
    stored_tensors.write_model(
        proto, out, (), path.parent, external=external, validate=lambda made: onnx.checker.check_model(str(made))
    )
    log.info("emulation: `%s`", out)
    return out


def emulate_proto(proto: ModelProto, folder: Path) -> ModelProto:
    """`emulate` on a graph in memory, in place; `folder` contains its external tensors.

    Raises `ModelError` for an operator that only TensorRT runs in a body or a function.
    """
    for place in walk.nodes(proto):
        if place.owner is not proto.graph and is_trt_only(place.node):
            raise ModelError(
                f"`{place.node.op_type}` (node `{walk.label(place.node)}`) is in a body or a function, "
                "where it is not emulated",
                hint="inline local functions with `onnx.inliner` first",
            )
    _Emulator(proto, folder).run()
    return proto


class _Emulator:
    """Emulates one graph."""

    def __init__(self, proto: ModelProto, folder: Path) -> None:
        self.proto = proto
        kinds = {item.data_type for item in walk.tensors(proto)}
        if kinds & {FP8, TensorProto.FLOAT4E2M1} or any(is_trt_only(place.node) for place in walk.nodes(proto)):
            raise_opset(proto, 21)  # casts to FP8 begin at 19, sizes cut out of shapes at 15
        self.weights = Weights(proto, folder)
        self.facts: Mapping[str, TensorInfo] = trace(proto, {}).tensors
        self.ops = NodeBuilder(NameAllocator(proto))
        self.folded: dict[str, Array] = {}
        """Folded constants by name."""
        self.as_fp32: set[str] = set()
        """Tensors of quantized values, now in FP32."""
        self.replaced: list[str] = []

    def run(self) -> None:
        graph = self.proto.graph
        nodes: list[NodeProto] = []
        for node in graph.node:
            rule = self._handler(node)
            if rule is None:
                nodes.append(node)
                if node.op_type != "Cast" and any(name in self.as_fp32 for name in node.input):
                    self.as_fp32.update(node.output)  # a Cast sets its output type
                continue
            self.replaced.extend(node.input)
            rule(node)
            nodes.extend(self.ops.take_nodes())
        self.ops.replace_nodes(self.proto, nodes)
        made = {item.name for item in self.ops.initializers} | self.as_fp32
        retain_items(graph.value_info, lambda item: item.name not in made)
        drop_unused(self.proto, dict.fromkeys(self.replaced))
        retain_items(self.proto.opset_import, lambda item: item.domain != "trt")

    def _handler(self, node: NodeProto) -> Callable[[NodeProto], None] | None:
        if node.op_type == "TRT_FP4DynamicQuantize":
            return self._quantize_nvfp4
        if node.op_type == "TRT_MXFP8DynamicQuantize":
            return self._quantize_mxfp8
        if node.op_type in ("QuantizeLinear", "TRT_FP8QuantizeLinear", "TRT_INT4QuantizeLinear"):
            return self._quantize
        if is_dequantize(node):
            return self._fold_constant if self._is_constant(node.input[0]) else self._dequantize
        if is_trt_only(node) and (is_quantize(node) or node.domain == "trt"):
            raise ModelError(
                f"`{node.op_type}` (node `{walk.label(node)}`) is not emulated",
                hint="quantise again from the plain model",
            )
        return None

    # -------------------------------------------------------------------------------------------- constants

    def _is_constant(self, name: str) -> bool:
        return name in self.folded or name in self.weights

    def _read_constant(self, name: str) -> Array:
        return self.folded[name] if name in self.folded else self.weights.read(name)

    def _read_scale(self, name: str) -> Array:
        """Read a scale as FP32; E8M0 scales may be stored as bytes."""
        scale = self._read_constant(name)
        if scale.dtype == np.uint8:
            scale = scale.view(ml_dtypes.float8_e8m0fnu)
        return scale.astype(np.float32)

    def _fold_constant(self, node: NodeProto) -> None:
        """Dequantize a constant."""
        given = walk.attributes(node)
        values = self._read_constant(node.input[0]).astype(np.float32)
        if len(node.input) > 2 and node.input[2]:
            zero = self._read_constant(node.input[2]).astype(np.float32)
            values = values - _broadcast_to_values(zero, values, given)
        made = values * _broadcast_to_values(self._read_scale(node.input[1]), values, given)
        kind = self._output_type(node, given)
        made = made.astype(helper.tensor_dtype_to_np_dtype(kind))
        self.folded[node.output[0]] = made
        self.ops.initializers.append(make_initializer(made, node.output[0]))

    def _output_type(self, node: NodeProto, given: Mapping[str, Any]) -> int:
        """ONNX element type of a DequantizeLinear's output."""
        if given.get("output_dtype"):
            return int(given["output_dtype"])
        scale = node.input[1]
        if scale in self.weights:
            kind = self.weights.elem_type(scale)
            return kind if kind in (FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16) else FLOAT
        return FLOAT

    # -------------------------------------------------------------------------------------------- activations

    def _as_float(self, name: str, stem: str) -> str:
        fact = self.facts.get(name)
        if name in self.as_fp32 or (fact is not None and fact.elem == FLOAT):
            return name
        return self.ops.add("Cast", [name], stem, to=FLOAT)

    def _quantize(self, node: NodeProto) -> None:
        given, stem = walk.attributes(node), node.output[0]
        if given.get("block_size"):
            raise ModelError(
                f"`QuantizeLinear` in blocks (node `{walk.label(node)}`) is not emulated",
                hint="TensorRT takes dynamic quantisation for activations: quantise again from the plain model",
            )
        kind = self._quantized_type(node, given)
        scaled = self.ops.add(
            "Div", [self._as_float(node.input[0], stem), self._broadcast_scale(node.input[1], node)], stem
        )
        if kind == FP8:
            round_to_format(self.ops, scaled, "fp8", stem, out=node.output[0])
        else:
            rounded = self.ops.add("Round", [scaled], stem)
            if len(node.input) > 2 and node.input[2] and self._read_constant(node.input[2]).any():
                rounded = self.ops.add("Add", [rounded, self._broadcast_scale(node.input[2], node)], stem)
            low, high = (self.ops.shared_constant(np.float32(end), "range") for end in _INTEGER_RANGES[kind])
            self.ops.add("Clip", [rounded, low, high], stem, out=node.output[0])
        self.as_fp32.add(node.output[0])

    def _quantized_type(self, node: NodeProto, given: Mapping[str, Any]) -> int:
        if node.op_type == "TRT_FP8QuantizeLinear":
            return int(FP8)
        if node.op_type == "TRT_INT4QuantizeLinear":
            return int(TensorProto.INT4)
        kind = int(TensorProto.UINT8)
        if len(node.input) > 2 and node.input[2]:
            kind = self.weights.elem_type(node.input[2])
        elif given.get("output_dtype"):
            kind = int(given["output_dtype"])
        if kind != FP8 and kind not in _INTEGER_RANGES:
            raise ModelError(
                f"`QuantizeLinear` to ONNX type {kind} (node `{walk.label(node)}`) is not emulated",
                hint="INT8, INT4 and FP8 (E4M3) are",
            )
        return kind

    def _broadcast_scale(self, name: str, node: NodeProto) -> str:
        """A scale or zero point in FP32, shaped to broadcast over the data."""
        if not self._is_constant(name):
            raise ModelError(
                f"the scale of `{node.op_type}` (node `{walk.label(node)}`) is computed, not stored",
                hint="TensorRT wants build-time constants as well: quantise again",
            )
        scale = self._read_scale(name) if name == node.input[1] else self._read_constant(name).astype(np.float32)
        if scale.ndim == 1 and scale.size > 1:
            fact = self.facts.get(node.input[0])
            rank = len(fact.shape) if fact is not None and fact.shape is not None else 0
            axis = walk.attributes(node).get("axis", 1)
            if not rank and axis >= 0:
                raise ModelError(
                    f"the rank of `{node.input[0]}` is not known (node `{walk.label(node)}`)",
                    hint="run `onnx.shape_inference.infer_shapes` over the model first",
                )
            after = -axis - 1 if axis < 0 else rank - axis - 1
            scale = scale.reshape(-1, *[1] * after)
        return self.ops.shared_constant(scale.reshape(()) if scale.size == 1 else scale, "scale")

    def _dequantize(self, node: NodeProto) -> None:
        given, stem = walk.attributes(node), node.output[0]
        data = self._as_float(node.input[0], stem)
        size, axis = given.get("block_size", 0), given.get("axis", 1)
        if node.op_type == "TRT_MXFP8DequantizeLinear":
            size, axis = given.get("block_size", 32), given.get("axis", -1)
        kind = self._output_type(node, given)
        out = node.output[0] if kind == FLOAT else None
        if size and (node.input[1] in self.as_fp32 or not self._is_constant(node.input[1])):
            made = scale_blocks(self.ops, data, self._as_float(node.input[1], stem), axis, size, stem, out=out)
        elif size:
            raise ModelError(
                f"`{node.op_type}` (node `{walk.label(node)}`) has stored block scales over a computed tensor",
                hint="TensorRT takes block scales of activations from dynamic quantisation alone",
            )
        else:
            if len(node.input) > 2 and node.input[2] and self._read_constant(node.input[2]).astype(np.float32).any():
                data = self.ops.add("Sub", [data, self._broadcast_scale(node.input[2], node)], stem)
            made = self.ops.add("Mul", [data, self._broadcast_scale(node.input[1], node)], stem, out=out)
        if out is None:
            self.ops.add("Cast", [made], stem, out=node.output[0], to=kind)
        else:
            self.as_fp32.add(made)

    def _quantize_nvfp4(self, node: NodeProto) -> None:
        given, stem = walk.attributes(node), node.output[0]
        second = np.float32(self._read_scale(node.input[1]).reshape(()))
        data = self._as_float(node.input[0], stem)
        nvfp4_blocks(self.ops, data, given.get("axis", 1), second, stem, out=list(node.output))
        self.as_fp32.update(node.output)

    def _quantize_mxfp8(self, node: NodeProto) -> None:
        data = self._as_float(node.input[0], node.output[0])
        axis = walk.attributes(node).get("axis", -1)
        mxfp8_blocks(self.ops, data, axis, node.output[0], out=list(node.output))
        self.as_fp32.update(node.output)


def _broadcast_to_values(scale: Array, values: Array, attrs: Mapping[str, Any]) -> Array:
    """Broadcast a scale or zero point to the values as DequantizeLinear does."""
    if scale.size == 1:
        return scale.reshape(())
    axis = attrs.get("axis", 1) % values.ndim
    if scale.ndim == 1 and not (values.ndim == 1 and attrs.get("block_size")):
        shape = [1] * values.ndim
        shape[axis] = -1
        return scale.reshape(shape)
    size = attrs.get("block_size") or values.shape[axis] // scale.shape[axis]
    spread = np.repeat(scale, size, axis)
    return np.take(spread, range(values.shape[axis]), axis) if spread.shape != values.shape else spread


def check_biases(proto: ModelProto, path: object) -> None:
    """Raise `ModelError` if a convolution's stored bias is not `[output channels]`."""
    stored = {item.name: item for graph in walk.graphs(proto) for item in graph.initializer}
    for node in walk.all_nodes(proto):
        if node.op_type not in ("Conv", "ConvTranspose") or walk.domain_of(node) or len(node.input) < 3:
            continue
        weight, bias = stored.get(node.input[1]), stored.get(node.input[2])
        if weight is None or bias is None or len(weight.dims) < 3:
            continue
        groups = int(walk.attributes(node).get("group", 1))
        channels = weight.dims[0] if node.op_type == "Conv" else weight.dims[1] * groups
        if list(bias.dims) != [channels]:
            raise ModelError(
                f"`{path}` is broken: the bias `{bias.name}` of node `{walk.label(node)}` ({node.op_type}) is "
                f"{format_shape(bias.dims)}, expected {channels}, one number for each output channel",
                hint="export the model again",
            )


def emulate_convolutions(
    proto: ModelProto, weights: Weights, form: Format, sites: list[QuantizableLayer], amax: Mapping[str, float] | None
) -> None:
    """Round these convolutions in place: weights along an output channel's inputs, activations along channels, both padded
    with zeros to whole blocks. Without `amax` activations are not rounded.

    `amax` are magnitudes by tensor name. Raises `ModelError` for an opset too old to be raised to 21.
    """
    if not sites:
        return
    raise_opset(proto, 21)
    ops = NodeBuilder(NameAllocator(proto))
    wanted = {site.output_name: site for site in sites}
    read: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for node in proto.graph.node:
        site = wanted.get(node.output[0]) if node.output else None
        if site is not None:
            values = weights.read(site.weight)
            whole = np.moveaxis(values.astype(np.float32), site.channel_axis, 0)
            flat, size = whole.reshape(len(whole), -1), site.block_size or 1
            filled = np.pad(flat, ((0, 0), (0, -flat.shape[1] % size)))
            made = emulate_format(filled, form, axis=1, block=size)[:, : flat.shape[1]].reshape(whole.shape)
            rounded = np.ascontiguousarray(np.moveaxis(made, 0, site.channel_axis)).astype(values.dtype)
            node.input[1] = ops.add_initializer(rounded, f"{site.weight}_{form.name}")
            if amax is not None and not form.weights_only:
                if site.activation not in read:
                    read[site.activation] = _round_conv_activation(ops, form, site, amax)
                node.input[0] = read[site.activation]
        nodes.extend(ops.take_nodes())
        nodes.append(node)
    ops.replace_nodes(proto, nodes)
    drop_unused(proto, [site.weight for site in sites])


def _round_conv_activation(ops: NodeBuilder, form: Format, site: QuantizableLayer, amax: Mapping[str, float]) -> str:
    """Quantize a convolution's activation dynamically in blocks of channels."""
    name, size = site.activation, site.block_size or 1
    groups = 1 if site.node.op_type == "ConvTranspose" else walk.attributes(site.node).get("group", 1)
    channels = site.weight_shape[site.reduction_axis] * groups
    rank, spare = len(site.weight_shape), -channels % size
    data = name if site.elem_type == TensorProto.FLOAT else ops.add("Cast", [name], name, to=TensorProto.FLOAT)
    if spare:
        pads = np.zeros(2 * rank, np.int64)
        pads[rank + 1] = spare
        data = ops.add("Pad", [data, ops.shared_constant(pads, "pads")], name)
    if form.name == "nvfp4":
        second = to_format(np.zeros(16, np.float32), form, amax=amax[name]).tensor_scale
        assert second is not None  # two levels
        values, scales = nvfp4_blocks(ops, data, 1, second, name)
        scales = ops.add("Mul", [scales, ops.shared_constant(second, "scale")], name)
    else:
        values, scales = mxfp8_blocks(ops, data, 1, name)
    made = scale_blocks(ops, values, scales, 1, size, name)
    if spare:
        ends = [ops.shared_constant(np.array([end], np.int64), "slice") for end in (0, channels, 1)]
        made = ops.add("Slice", [made, *ends], name)
    return made if site.elem_type == TensorProto.FLOAT else ops.add("Cast", [made], name, to=site.elem_type)


FP8, FLOAT = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT
_MAX_FLOAT = np.finfo(np.float32).max
_MIN_SCALE, _MAX_SCALE = np.float32(2.0**-9), np.float32(448)


def round_to_format(ops: NodeBuilder, scaled: str, kind: str, stem: str, *, out: str | None = None) -> str:
    """Round scaled values to `fp8` (E4M3) or `fp4` (E2M1), saturating, as FP32."""
    if kind == "fp8":
        cut = _clip(ops, scaled, 448.0, stem)
        return ops.add("Cast", [ops.add("Cast", [cut], stem, to=FP8)], stem, out=out, to=FLOAT)
    cut = _clip(ops, scaled, 6.0, stem)
    size = ops.add("Abs", [cut], stem)
    half, two, four = (ops.shared_constant(np.float32(value), "step") for value in (0.5, 2.0, 4.0))
    # steps of a half up to 2, of one up to 4, of two up to 6; Round takes ties to even, and so even codes win here too
    fine = ops.add("Mul", [ops.add("Round", [ops.add("Mul", [cut, two], stem)], stem), half], stem)
    whole = ops.add("Round", [cut], stem)
    coarse = ops.add("Mul", [ops.add("Round", [ops.add("Mul", [cut, half], stem)], stem), two], stem)
    below_four = ops.add("Where", [ops.add("Less", [size, four], stem), whole, coarse], stem)
    return ops.add("Where", [ops.add("Less", [size, two], stem), fine, below_four], stem, out=out)


def _clip(ops: NodeBuilder, data: str, largest: float, stem: str) -> str:
    ends = [ops.shared_constant(np.float32(end), "range") for end in (-largest, largest)]
    return ops.add("Clip", [data, *ends], stem)


def nvfp4_blocks(
    ops: NodeBuilder,
    data: str,
    axis: int,
    second: np.float32,
    stem: str,
    *,
    out: list[str] | None = None,
) -> list[str]:
    """Dynamic quantization to NVFP4: values and E4M3 block scales, both in FP32."""
    blocks = _split_blocks(ops, data, axis, 16, stem)
    largest = _block_amax(ops, blocks, axis, stem)
    exact = ops.add("Div", [largest, ops.shared_constant(np.float32(6.0) * second, "scale")], stem)
    ends = [ops.shared_constant(end, "range") for end in (_MIN_SCALE, _MAX_SCALE)]
    rounded = ops.add("Cast", [ops.add("Clip", [exact, *ends], stem)], stem, to=FP8)
    scale = _nonzero_scale(ops, largest, ops.add("Cast", [rounded], stem, to=FLOAT), stem)
    effective = ops.add("Mul", [scale, ops.shared_constant(second, "scale")], stem)
    values = round_to_format(ops, ops.add("Div", [blocks, effective], stem), "fp4", stem)
    return _join_outputs(ops, values, scale, data, axis, stem, out)


# 2^-127 to 2^127 by E8M0 code, and the largest value each allows in E4M3; the products are exact
_POWERS = np.ldexp(np.float64(1), np.arange(-127, 128)).astype(np.float32)
with np.errstate(over="ignore"):
    _MAX_VALUES = (_POWERS.astype(np.float64) * 448).astype(np.float32)


def mxfp8_blocks(ops: NodeBuilder, data: str, axis: int, stem: str, *, out: list[str] | None = None) -> list[str]:
    """Dynamic quantization to MXFP8: values and E8M0 block scales, both in FP32.

    The scale is the smallest power of two without saturation: a logarithm gives its table index to within one, exact
    comparisons select the entry.
    """
    blocks = _split_blocks(ops, data, axis, 32, stem)
    largest = _block_amax(ops, blocks, axis, stem)
    bits = ops.add(
        "Mul", [ops.add("Log", [largest], stem), ops.shared_constant(np.float32(1 / np.log(2)), "scale")], stem
    )
    near = ops.add("Add", [ops.add("Floor", [bits], stem), ops.shared_constant(np.float32(119), "bias")], stem)
    ends = [ops.shared_constant(np.float32(end), "range") for end in (1, 253)]
    code = ops.add("Cast", [ops.add("Clip", [near, *ends], stem)], stem, to=TensorProto.INT64)
    powers, holds = ops.shared_constant(_POWERS, "powers"), ops.shared_constant(_MAX_VALUES, "holds")
    chosen = ""
    for step in (1, 0, -1):
        at = code if step == 0 else ops.add("Add", [code, ops.shared_constant(np.int64(step), "step")], stem)
        power = ops.add("Gather", [powers, at], stem)
        if not chosen:
            chosen = power
            continue
        fits = ops.add("LessOrEqual", [largest, ops.add("Gather", [holds, at], stem)], stem)
        chosen = ops.add("Where", [fits, power, chosen], stem)
    scale = _nonzero_scale(ops, largest, chosen, stem)
    values = round_to_format(ops, ops.add("Div", [blocks, scale], stem), "fp8", stem)
    return _join_outputs(ops, values, scale, data, axis, stem, out)


def scale_blocks(
    ops: NodeBuilder, values: str, scales: str, axis: int, size: int, stem: str, *, out: str | None = None
) -> str:
    """Multiply the values by their block scales."""
    at = ops.shared_constant(np.array([_element_axis(axis)], np.int64), "axis")
    spread = ops.add("Unsqueeze", [scales, at], stem)
    return _join_blocks(
        ops, ops.add("Mul", [_split_blocks(ops, values, axis, size, stem), spread], stem), values, stem, out=out
    )


def _element_axis(axis: int) -> int:
    """Axis of a block's elements after the split."""
    return axis if axis < 0 else axis + 1


def _split_blocks(ops: NodeBuilder, data: str, axis: int, size: int, stem: str) -> str:
    """Split one axis into blocks: `[.., K, ..]` to `[.., K / size, size, ..]`, for any rank."""
    parts = []
    if axis != 0:
        parts.append(ops.add("Shape", [data], stem, start=0, end=axis))
    parts.append(ops.shared_constant(np.array([-1, size], np.int64), "blocks"))
    if axis != -1:
        parts.append(ops.add("Shape", [data], stem, start=axis + 1))
    return ops.add("Reshape", [data, ops.add("Concat", parts, stem, axis=0)], stem)


def _join_blocks(ops: NodeBuilder, blocks: str, like: str, stem: str, *, out: str | None = None) -> str:
    return ops.add("Reshape", [blocks, ops.add("Shape", [like], stem)], stem, out=out)


def _block_amax(ops: NodeBuilder, blocks: str, axis: int, stem: str) -> str:
    at = ops.shared_constant(np.array([_element_axis(axis)], np.int64), "axis")
    reach = ops.add("ReduceMax", [ops.add("Abs", [blocks], stem), at], stem, keepdims=1)
    return ops.add("Min", [reach, ops.shared_constant(_MAX_FLOAT, "range")], stem)


def _nonzero_scale(ops: NodeBuilder, largest: str, scale: str, stem: str) -> str:
    """Replace the scale of an all-zero block by 1."""
    filled = ops.add("Greater", [largest, ops.shared_constant(np.float32(0), "range")], stem)
    return ops.add("Where", [filled, scale, ops.shared_constant(np.float32(1), "scale")], stem)


def _join_outputs(
    ops: NodeBuilder, values: str, scale: str, data: str, axis: int, stem: str, out: list[str] | None
) -> list[str]:
    at = ops.shared_constant(np.array([_element_axis(axis)], np.int64), "axis")
    first, second = out or (None, None)
    whole = _join_blocks(ops, values, data, stem, out=first)
    return [whole, ops.add("Squeeze", [scale, at], stem, out=second)]

"""A quantised graph as an FP32 graph that computes the same numbers, so that its accuracy can be measured where no kernel
exists: weights taken back and stored as FP32, activations rounded by plain operators, bit for bit as `formats` does.

It reads what `quantize` writes and what other exporters write: QuantizeLinear and DequantizeLinear of any type, and
TensorRT's operators of domain `trt` (their attributes and defaults: the importers of the public onnx-tensorrt parser).
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
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize
from trt_engine.graph.load import read_proto
from trt_engine.graph.module_paths import carry
from trt_engine.graph.operators import is_trt_only
from trt_engine.graph.trace import Fact, attributes, trace
from trt_engine.precision import stored
from trt_engine.precision.opsets import raise_opset
from trt_engine.precision.surgery import Names, Ops, Weights, drop_unused, tensor

__all__ = ["emulate", "emulated", "mxfp8_blocks", "nvfp4_blocks", "times_blocks", "to_values"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_FP8, _FLOAT = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT
_RANGES: dict[int, tuple[int, int]] = {
    TensorProto.INT8: (-128, 127), TensorProto.UINT8: (0, 255), TensorProto.INT16: (-32768, 32767),
    TensorProto.UINT16: (0, 65535), TensorProto.INT4: (-8, 7), TensorProto.UINT4: (0, 15),
}  # fmt: skip
_LARGEST_FLOAT = np.finfo(np.float32).max
_LEAST_SCALE, _MOST_SCALE = np.float32(2.0**-9), np.float32(448)


def emulate(model: Path | str, out: Path | str) -> Path:
    """Write the FP32 graph that computes what the quantised model would; `ModelError` for operators it does not know."""
    path, out = Path(model), Path(out)
    proto = emulated(read_proto(path), path.parent)
    carry(proto, read_proto(path))
    external = any(item.data_location == TensorProto.EXTERNAL for item in walk.tensors(proto))
    stored.write(proto, out, (), path.parent, external=external, prove=_check)
    log.info("emulation: `%s`", out)
    return out


def _check(path: Path) -> None:
    onnx.checker.check_model(str(path))


def emulated(proto: ModelProto, folder: Path) -> ModelProto:
    """`emulate` on a graph in memory, in place; `folder` is where its external tensors lie."""
    for place in walk.nodes(proto):
        if place.owner is not proto.graph and is_trt_only(place.node):
            raise ModelError(
                f"`{place.node.op_type}` (node `{walk.label(place.node)}`) stands in a body or a function, "
                "where it is not emulated",
                hint="inline local functions with `onnx.inliner` first",
            )
    _Emulation(proto, folder).run()
    return proto


class _Emulation:
    """One graph on its way."""

    def __init__(self, proto: ModelProto, folder: Path) -> None:
        self.proto = proto
        kinds = {item.data_type for item in walk.tensors(proto)}
        if kinds & {_FP8, TensorProto.FLOAT4E2M1} or any(is_trt_only(place.node) for place in walk.nodes(proto)):
            raise_opset(proto, 21)  # casts to FP8 begin at 19, sizes cut out of shapes at 15
        self.weights = Weights(proto, folder)
        self.facts: Mapping[str, Fact] = trace(proto, {}).facts
        self.ops = Ops(Names(proto))
        self.held: dict[str, Array] = {}
        """Constants worked out on the way, by name."""
        self.retyped: set[str] = set()
        """Tensors that hold quantised values, now in FP32."""
        self.replaced: list[str] = []

    def run(self) -> None:
        graph = self.proto.graph
        nodes: list[NodeProto] = []
        for node in graph.node:
            rule = self._rule(node)
            if rule is None:
                nodes.append(node)
                if node.op_type != "Cast" and any(name in self.retyped for name in node.input):
                    self.retyped.update(node.output)  # a Cast states its own type
                continue
            self.replaced.extend(node.input)
            rule(node)
            nodes.extend(self.ops.taken())
        self.ops.put(self.proto, nodes)
        made = {item.name for item in self.ops.initializers} | self.retyped
        for at in reversed(range(len(graph.value_info))):
            if graph.value_info[at].name in made:
                del graph.value_info[at]
        drop_unused(self.proto, dict.fromkeys(self.replaced))
        for at in reversed(range(len(self.proto.opset_import))):
            if self.proto.opset_import[at].domain == "trt":
                del self.proto.opset_import[at]

    def _rule(self, node: NodeProto) -> Callable[[NodeProto], None] | None:
        if node.op_type == "TRT_FP4DynamicQuantize":
            return self._nvfp4
        if node.op_type == "TRT_MXFP8DynamicQuantize":
            return self._mxfp8
        if node.op_type in ("QuantizeLinear", "TRT_FP8QuantizeLinear", "TRT_INT4QuantizeLinear"):
            return self._quantize
        if is_dequantize(node):
            return self._fold if self._constant(node.input[0]) else self._dequantize
        if is_trt_only(node) and (is_quantize(node) or node.domain == "trt"):
            raise ModelError(
                f"there is no emulation of `{node.op_type}` (node `{walk.label(node)}`)",
                hint="quantise again from the plain model",
            )
        return None

    # -------------------------------------------------------------------------------------------- constants

    def _constant(self, name: str) -> bool:
        return name in self.held or name in self.weights

    def _read(self, name: str) -> Array:
        return self.held[name] if name in self.held else self.weights.read(name)

    def _scale(self, name: str) -> Array:
        """A stored scale in FP32; E8M0 ones may come as bytes."""
        scale = self._read(name)
        if scale.dtype == np.uint8:
            scale = scale.view(ml_dtypes.float8_e8m0fnu)
        return scale.astype(np.float32)

    def _fold(self, node: NodeProto) -> None:
        """A stored tensor taken back to floating point once and for all."""
        given = attributes(node)
        values = self._read(node.input[0]).astype(np.float32)
        if len(node.input) > 2 and node.input[2]:
            zero = self._read(node.input[2]).astype(np.float32)
            values = values - _laid_over(zero, values, given)
        made = values * _laid_over(self._scale(node.input[1]), values, given)
        kind = self._output_type(node, given)
        made = made.astype(helper.tensor_dtype_to_np_dtype(kind))
        self.held[node.output[0]] = made
        self.ops.initializers.append(tensor(made, node.output[0]))

    def _output_type(self, node: NodeProto, given: Mapping[str, Any]) -> int:
        """ONNX's number for what a DequantizeLinear gives."""
        if given.get("output_dtype"):
            return int(given["output_dtype"])
        scale = node.input[1]
        if scale in self.weights:
            kind = self.weights.elem(scale)
            return kind if kind in (_FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16) else _FLOAT
        return _FLOAT

    # -------------------------------------------------------------------------------------------- activations

    def _float(self, name: str, stem: str) -> str:
        fact = self.facts.get(name)
        if name in self.retyped or (fact is not None and fact.elem == _FLOAT):
            return name
        return self.ops.add("Cast", [name], stem, to=_FLOAT)

    def _quantize(self, node: NodeProto) -> None:
        given, stem = attributes(node), node.output[0]
        if given.get("block_size"):
            raise ModelError(
                f"`QuantizeLinear` in blocks (node `{walk.label(node)}`) is not emulated",
                hint="TensorRT takes dynamic quantisation for activations: quantise again from the plain model",
            )
        kind = self._quantized_type(node, given)
        scaled = self.ops.add("Div", [self._float(node.input[0], stem), self._spread(node.input[1], node)], stem)
        if kind == _FP8:
            to_values(self.ops, scaled, "fp8", stem, out=node.output[0])
        else:
            rounded = self.ops.add("Round", [scaled], stem)
            if len(node.input) > 2 and node.input[2] and self._read(node.input[2]).any():
                rounded = self.ops.add("Add", [rounded, self._spread(node.input[2], node)], stem)
            low, high = (self.ops.constant(np.float32(end), "range") for end in _RANGES[kind])
            self.ops.add("Clip", [rounded, low, high], stem, out=node.output[0])
        self.retyped.add(node.output[0])

    def _quantized_type(self, node: NodeProto, given: Mapping[str, Any]) -> int:
        if node.op_type == "TRT_FP8QuantizeLinear":
            return int(_FP8)
        if node.op_type == "TRT_INT4QuantizeLinear":
            return int(TensorProto.INT4)
        kind = int(TensorProto.UINT8)
        if len(node.input) > 2 and node.input[2]:
            kind = self.weights.elem(node.input[2])
        elif given.get("output_dtype"):
            kind = int(given["output_dtype"])
        if kind != _FP8 and kind not in _RANGES:
            raise ModelError(
                f"`QuantizeLinear` to ONNX type {kind} (node `{walk.label(node)}`) is not emulated",
                hint="INT8, INT4 and FP8 (E4M3) are",
            )
        return kind

    def _spread(self, name: str, node: NodeProto) -> str:
        """A scale or zero point in FP32, shaped to lie over the data."""
        if not self._constant(name):
            raise ModelError(
                f"the scale of `{node.op_type}` (node `{walk.label(node)}`) is computed, not stored",
                hint="TensorRT wants build-time constants as well: quantise again",
            )
        scale = self._scale(name) if name == node.input[1] else self._read(name).astype(np.float32)
        if scale.ndim == 1 and scale.size > 1:
            fact = self.facts.get(node.input[0])
            rank = len(fact.shape) if fact is not None and fact.shape is not None else 0
            axis = attributes(node).get("axis", 1)
            if not rank and axis >= 0:
                raise ModelError(
                    f"the rank of `{node.input[0]}` is not known (node `{walk.label(node)}`)",
                    hint="run `onnx.shape_inference.infer_shapes` over the model first",
                )
            after = -axis - 1 if axis < 0 else rank - axis - 1
            scale = scale.reshape(-1, *[1] * after)
        return self.ops.constant(scale.reshape(()) if scale.size == 1 else scale, "scale")

    def _dequantize(self, node: NodeProto) -> None:
        given, stem = attributes(node), node.output[0]
        data = self._float(node.input[0], stem)
        size, axis = given.get("block_size", 0), given.get("axis", 1)
        if node.op_type == "TRT_MXFP8DequantizeLinear":
            size, axis = given.get("block_size", 32), given.get("axis", -1)
        kind = self._output_type(node, given)
        out = node.output[0] if kind == _FLOAT else None
        if size and (node.input[1] in self.retyped or not self._constant(node.input[1])):
            made = times_blocks(self.ops, data, self._float(node.input[1], stem), axis, size, stem, out=out)
        elif size:
            raise ModelError(
                f"`{node.op_type}` (node `{walk.label(node)}`) has stored block scales over a computed tensor",
                hint="TensorRT takes block scales of activations from dynamic quantisation alone",
            )
        else:
            if len(node.input) > 2 and node.input[2] and self._read(node.input[2]).astype(np.float32).any():
                data = self.ops.add("Sub", [data, self._spread(node.input[2], node)], stem)
            made = self.ops.add("Mul", [data, self._spread(node.input[1], node)], stem, out=out)
        if out is None:
            self.ops.add("Cast", [made], stem, out=node.output[0], to=kind)
        else:
            self.retyped.add(made)

    def _nvfp4(self, node: NodeProto) -> None:
        given, stem = attributes(node), node.output[0]
        second = np.float32(self._scale(node.input[1]).reshape(()))
        data = self._float(node.input[0], stem)
        nvfp4_blocks(self.ops, data, given.get("axis", 1), second, stem, out=list(node.output))
        self.retyped.update(node.output)

    def _mxfp8(self, node: NodeProto) -> None:
        data = self._float(node.input[0], node.output[0])
        axis = attributes(node).get("axis", -1)
        mxfp8_blocks(self.ops, data, axis, node.output[0], out=list(node.output))
        self.retyped.update(node.output)


def _laid_over(scale: Array, values: Array, given: Mapping[str, Any]) -> Array:
    """A scale or zero point in the shape of the values, as DequantizeLinear lays it over them."""
    if scale.size == 1:
        return scale.reshape(())
    axis = given.get("axis", 1) % values.ndim
    if scale.ndim == 1 and not (values.ndim == 1 and given.get("block_size")):
        shape = [1] * values.ndim
        shape[axis] = -1
        return scale.reshape(shape)
    size = given.get("block_size") or values.shape[axis] // scale.shape[axis]
    spread = np.repeat(scale, size, axis)
    return np.take(spread, range(values.shape[axis]), axis) if spread.shape != values.shape else spread


# ------------------------------------------------------------------------------------------------ rounding in operators


def to_values(ops: Ops, scaled: str, kind: str, stem: str, *, out: str | None = None) -> str:
    """Scaled numbers to the nearest values of `fp8` (E4M3) or `fp4` (E2M1), saturating, as FP32."""
    if kind == "fp8":
        cut = _clip(ops, scaled, 448.0, stem)
        return ops.add("Cast", [ops.add("Cast", [cut], stem, to=_FP8)], stem, out=out, to=_FLOAT)
    cut = _clip(ops, scaled, 6.0, stem)
    size = ops.add("Abs", [cut], stem)
    half, two, four = (ops.constant(np.float32(value), "step") for value in (0.5, 2.0, 4.0))
    # steps of a half up to 2, of one up to 4, of two up to 6; Round takes ties to even, and so even codes win here too
    fine = ops.add("Mul", [ops.add("Round", [ops.add("Mul", [cut, two], stem)], stem), half], stem)
    whole = ops.add("Round", [cut], stem)
    coarse = ops.add("Mul", [ops.add("Round", [ops.add("Mul", [cut, half], stem)], stem), two], stem)
    below_four = ops.add("Where", [ops.add("Less", [size, four], stem), whole, coarse], stem)
    return ops.add("Where", [ops.add("Less", [size, two], stem), fine, below_four], stem, out=out)


def _clip(ops: Ops, data: str, largest: float, stem: str) -> str:
    ends = [ops.constant(np.float32(end), "range") for end in (-largest, largest)]
    return ops.add("Clip", [data, *ends], stem)


def nvfp4_blocks(
    ops: Ops, data: str, axis: int, second: np.float32, stem: str, *, out: list[str] | None = None, size: int = 16
) -> list[str]:
    """Dynamic quantisation to NVFP4: the values and the E4M3 block scales, both as FP32."""
    blocks = _blocked(ops, data, axis, size, stem)
    largest = _largest(ops, blocks, axis, stem)
    exact = ops.add("Div", [largest, ops.constant(np.float32(6.0) * second, "scale")], stem)
    ends = [ops.constant(end, "range") for end in (_LEAST_SCALE, _MOST_SCALE)]
    rounded = ops.add("Cast", [ops.add("Clip", [exact, *ends], stem)], stem, to=_FP8)
    scale = _unless_zero(ops, largest, ops.add("Cast", [rounded], stem, to=_FLOAT), stem)
    effective = ops.add("Mul", [scale, ops.constant(second, "scale")], stem)
    values = to_values(ops, ops.add("Div", [blocks, effective], stem), "fp4", stem)
    return _both(ops, values, scale, data, axis, stem, out)


# 2^-127 to 2^127 by E8M0's code, and what each of them lets E4M3 hold; the products are exact
_POWERS = np.ldexp(np.float64(1), np.arange(-127, 128)).astype(np.float32)
with np.errstate(over="ignore"):
    _HOLDS = (_POWERS.astype(np.float64) * 448).astype(np.float32)


def mxfp8_blocks(
    ops: Ops, data: str, axis: int, stem: str, *, out: list[str] | None = None, size: int = 32
) -> list[str]:
    """Dynamic quantisation to MXFP8: the values and the E8M0 block scales, both as FP32.

    The scale is the least power of two under which nothing saturates. A logarithm says where to look in a table of them,
    good to one place; exact comparisons with the table decide.
    """
    blocks = _blocked(ops, data, axis, size, stem)
    largest = _largest(ops, blocks, axis, stem)
    bits = ops.add("Mul", [ops.add("Log", [largest], stem), ops.constant(np.float32(1 / np.log(2)), "scale")], stem)
    near = ops.add("Add", [ops.add("Floor", [bits], stem), ops.constant(np.float32(119), "bias")], stem)
    ends = [ops.constant(np.float32(end), "range") for end in (1, 253)]
    code = ops.add("Cast", [ops.add("Clip", [near, *ends], stem)], stem, to=TensorProto.INT64)
    powers, holds = ops.constant(_POWERS, "powers"), ops.constant(_HOLDS, "holds")
    chosen = ""
    for step in (1, 0, -1):
        at = code if step == 0 else ops.add("Add", [code, ops.constant(np.int64(step), "step")], stem)
        power = ops.add("Gather", [powers, at], stem)
        if not chosen:
            chosen = power
            continue
        fits = ops.add("LessOrEqual", [largest, ops.add("Gather", [holds, at], stem)], stem)
        chosen = ops.add("Where", [fits, power, chosen], stem)
    scale = _unless_zero(ops, largest, chosen, stem)
    values = to_values(ops, ops.add("Div", [blocks, scale], stem), "fp8", stem)
    return _both(ops, values, scale, data, axis, stem, out)


def times_blocks(ops: Ops, values: str, scales: str, axis: int, size: int, stem: str, *, out: str | None = None) -> str:
    """The values times the scales of their blocks."""
    at = ops.constant(np.array([_inner(axis)], np.int64), "axis")
    spread = ops.add("Unsqueeze", [scales, at], stem)
    return _whole(ops, ops.add("Mul", [_blocked(ops, values, axis, size, stem), spread], stem), values, stem, out=out)


def _inner(axis: int) -> int:
    """Where the elements of a block lie once an axis is cut into blocks."""
    return axis if axis < 0 else axis + 1


def _blocked(ops: Ops, data: str, axis: int, size: int, stem: str) -> str:
    """The tensor with one axis cut into blocks: `[.., K, ..]` as `[.., K / size, size, ..]`, whatever its rank."""
    parts = []
    if axis != 0:
        parts.append(ops.add("Shape", [data], stem, start=0, end=axis))
    parts.append(ops.constant(np.array([-1, size], np.int64), "blocks"))
    if axis != -1:
        parts.append(ops.add("Shape", [data], stem, start=axis + 1))
    return ops.add("Reshape", [data, ops.add("Concat", parts, stem, axis=0)], stem)


def _whole(ops: Ops, blocks: str, like: str, stem: str, *, out: str | None = None) -> str:
    return ops.add("Reshape", [blocks, ops.add("Shape", [like], stem)], stem, out=out)


def _largest(ops: Ops, blocks: str, axis: int, stem: str) -> str:
    at = ops.constant(np.array([_inner(axis)], np.int64), "axis")
    reach = ops.add("ReduceMax", [ops.add("Abs", [blocks], stem), at], stem, keepdims=1)
    return ops.add("Min", [reach, ops.constant(_LARGEST_FLOAT, "range")], stem)


def _unless_zero(ops: Ops, largest: str, scale: str, stem: str) -> str:
    """The scale, or 1 for a block of zeros."""
    filled = ops.add("Greater", [largest, ops.constant(np.float32(0), "range")], stem)
    return ops.add("Where", [filled, scale, ops.constant(np.float32(1), "scale")], stem)


def _both(ops: Ops, values: str, scale: str, data: str, axis: int, stem: str, out: list[str] | None) -> list[str]:
    at = ops.constant(np.array([_inner(axis)], np.int64), "axis")
    first, second = out or (None, None)
    whole = _whole(ops, values, data, stem, out=first)
    return [whole, ops.add("Squeeze", [scale, at], stem, out=second)]

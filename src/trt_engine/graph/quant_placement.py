"""For which libraries' kernels the quantised layers of a graph are placed, whatever tool wrote it, and what others refuse.

TensorRT takes signed, symmetric pairs at the inputs of a layer. ONNX Runtime's CPU provider fuses a convolution only where
its result is quantised too and no activation function is left in between, and on x86 takes signed pairs only where one layer
reads them. The rules for ONNX Runtime are those of release 1.31; the tests compare them with the graphs that it makes.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, inliner, numpy_helper

from trt_engine.config import QUANT_TARGETS
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize, layers_of
from trt_engine.graph.flops import Cost
from trt_engine.graph.quant_target import METADATA_KEY, quant_target
from trt_engine.graph.trace import attributes
from trt_engine.records import Finding, QuantPlacement, TargetFit

__all__ = ["LEAST_TAKEN", "PlacedGraph"]

LEAST_TAKEN = 0.95
"""Fraction of the quantised layers (by multiply-adds) from which a graph is placed for a target."""
_LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_DYNAMIC = ("ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")
_STATIC = ("QLinearConv", "QLinearMatMul", "QGemm", "QAttention")
_BLOCKS_OF_4_BITS = "MatMulNBits"
_MOVED_PAST = frozenset("Reshape Transpose Squeeze Unsqueeze Slice MaxPool Identity Dropout".split())
"""Operators that ONNX Runtime moves Q and DQ past."""
_CLIPPING = ("Relu", "Clip")
_ELEM: dict[int, str] = {
    TensorProto.INT8: "S8", TensorProto.UINT8: "U8", TensorProto.INT16: "S16", TensorProto.UINT16: "U16",
    TensorProto.FLOAT8E4M3FN: "FP8", TensorProto.FLOAT8E5M2: "FP8", TensorProto.FLOAT4E2M1: "FP4",
    TensorProto.INT4: "INT4", TensorProto.UINT4: "INT4", TensorProto.INT32: "S32",
}  # fmt: skip
_BYTES = ("S8", "U8")
_FORMAT = {"FP8": "fp8", "FP4": "nvfp4", "MXFP8": "mxfp8", "INT4": "int4"}
_LIMITS = {"S8": (-128, 127), "U8": (0, 255)}
_FAR = 64


@dataclass(frozen=True, slots=True)
class _Pair:
    """One input of a layer behind DequantizeLinear."""

    kind: str
    """`S8`, `U8`, `FP8`, `INT4`; a TensorRT operator's own: `FP4`, `MXFP8`."""
    dq: NodeProto
    q: NodeProto | None
    """None for a stored tensor."""
    symmetric: bool
    direct: bool
    """Nothing stands between it and the layer but operators that ONNX Runtime moves it past."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer with a quantised input."""

    node: NodeProto
    integer: bool = False
    """It is an integer operator of ONNX Runtime's already."""
    activation: _Pair | None = None
    weight: _Pair | None = None

    @property
    def pairs(self) -> tuple[_Pair, ...]:
        return tuple(pair for pair in (self.activation, self.weight) if pair is not None)

    @property
    def weights_alone(self) -> bool:
        return self.activation is None and not self.integer


@dataclass(slots=True)
class _Graph:
    """A graph with what makes and what reads each tensor."""

    proto: ModelProto
    makers: dict[str, NodeProto] = field(default_factory=dict)
    readers: dict[str, list[NodeProto]] = field(default_factory=dict)
    stored: dict[str, TensorProto] = field(default_factory=dict)
    ends: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for graph in walk.graphs(self.proto):
            self.stored.update({item.name: item for item in graph.initializer})
            self.ends.update(item.name for item in graph.output)
        for place in walk.nodes(self.proto):
            node = place.node
            if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].HasField("t"):
                self.stored[node.output[0]] = node.attribute[0].t
            self.makers.update({name: node for name in node.output if name})
            for name in filter(None, node.input):
                self.readers.setdefault(name, []).append(node)

    def value(self, name: str) -> npt.NDArray[np.float32] | None:
        """The numbers of a stored tensor; None where it is computed, or kept outside the file."""
        tensor = self.stored.get(name)
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            return None
        try:
            return np.asarray(numpy_helper.to_array(tensor)).astype(np.float32)
        except (ValueError, TypeError, KeyError):
            return None

    def dequantized(self, node: NodeProto, at: int) -> _Pair | None:
        """The pair in front of that input of a node; None where there is none."""
        name, direct = node.input[at] if len(node.input) > at else "", True
        for _ in range(_FAR):
            maker = self.makers.get(name)
            if maker is None or not maker.input:
                return None
            if is_dequantize(maker):
                return self._pair(maker, direct)
            if maker.op_type not in (*_MOVED_PAST, "Flatten", "Cast", "Expand"):
                return None
            direct &= maker.op_type in _MOVED_PAST
            name = maker.input[0]
        return None

    def _pair(self, dq: NodeProto, direct: bool) -> _Pair | None:
        if dq.op_type.startswith("TRT_"):
            kind = next((name for name in ("MXFP8", "FP4", "FP8", "INT4") if name in dq.op_type), "S8")
            return _Pair(kind, dq, None, True, direct)
        source = self.makers.get(dq.input[0])
        q = source if source is not None and is_quantize(source) else None
        tensor = self.stored.get(dq.input[0])
        elem = tensor.data_type if tensor is not None else self._elem_of(q) if q is not None else self._elem_of(dq)
        zero = self.value(dq.input[2]) if len(dq.input) > 2 else None
        return _Pair(_ELEM.get(elem, "other"), dq, q, zero is None or not zero.any(), direct)

    def _elem_of(self, node: NodeProto) -> int:
        """The quantised type of Q or DQ by its zero point; UINT8 by the standard where there is none."""
        if len(node.input) > 2 and node.input[2]:
            zero = self.stored.get(node.input[2])
            return zero.data_type if zero is not None else 0
        if node.op_type.startswith("TRT_"):
            return int(TensorProto.FLOAT4E2M1)
        return int(attributes(node).get("output_dtype", 0) or TensorProto.UINT8)


class PlacedGraph:
    """The quantised layers of a graph, and which of them each target takes; false for a graph without any."""

    def __init__(self, proto: ModelProto, cost: Cost | None = None) -> None:
        flat = inliner.inline_local_functions(proto) if proto.functions else proto
        self._graph = _Graph(flat)
        self._stated = next((item.value for item in proto.metadata_props if item.key == METADATA_KEY), None)
        self._cost = cost
        self._x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
        found = list(self._quantized())
        all_alone = all(layer.weights_alone for layer in found)
        self._layers = [layer for layer in found if all_alone or not layer.weights_alone]
        self.weights_alone = bool(found) and all_alone
        """No activation is quantised: layers compute in a floating-point type on every target."""

    @cached_property
    def _macs(self) -> dict[str, int]:
        """Multiply-adds by a layer's first output; counting takes a trace of the whole graph."""
        return {layer.step.node.output[0]: layer.macs for layer in layers_of(self._graph.proto, self._cost)}

    def _work(self, layers: Iterable[_Layer]) -> int:
        return sum(self._macs.get(layer.node.output[0], 0) for layer in layers)

    def __bool__(self) -> bool:
        return bool(self._layers)

    def _quantized(self) -> Iterator[_Layer]:
        for place in walk.nodes(self._graph.proto):
            node = place.node
            if node.op_type in (*_DYNAMIC, *_STATIC, _BLOCKS_OF_4_BITS):
                yield _Layer(node, integer=True)
            elif node.op_type in _LINEAR and not walk.domain_of(node):
                sides = self._graph.dequantized(node, 0), self._graph.dequantized(node, 1)
                if any(sides):
                    yield _Layer(node, False, *sides)

    @property
    def pairs(self) -> frozenset[str]:
        """The labels of all Q and DQ nodes."""
        nodes = (place.node for place in walk.nodes(self._graph.proto))
        return frozenset(walk.label(node) for node in nodes if is_quantize(node) or is_dequantize(node))

    # -------------------------------------------------------------------------------------------- what it says

    def report(self) -> QuantPlacement:
        """The style of the quantisation and the targets it is placed for."""
        fits = tuple(self.fit(name) for name in QUANT_TARGETS)
        return QuantPlacement(
            style=self.style,
            stated=self._stated,
            targets=tuple(item.target for item in fits if item.share >= LEAST_TAKEN),
            fits=fits,
        )

    @property
    def title(self) -> str | None:
        """`TensorRT (S8 symmetric, results in float)`: what the file states, or the first target that takes it; None where
        neither is there."""
        names = [fit.target for fit in map(self.fit, QUANT_TARGETS) if fit.share >= LEAST_TAKEN]
        first = self._stated if self._stated in QUANT_TARGETS else names[0] if names else None
        return None if first is None else f"{quant_target(first).title} ({self.style})"

    @property
    def style(self) -> str:
        """`S8 symmetric, results in float`, `U8 asymmetric, results quantised`, `dynamic`."""
        parts: list[str] = []
        pairs = [layer for layer in self._layers if layer.pairs]
        if pairs:
            parts += self._style_of_pairs(pairs)
        ops = {layer.node.op_type for layer in self._layers if layer.integer}
        if ops & set(_STATIC):
            parts.append("QLinear operators")
        if ops & set(_DYNAMIC):
            parts.append("dynamic: activations quantised at run time")
        if _BLOCKS_OF_4_BITS in ops:
            parts.append("4-bit weights of MatMulNBits")
        return ", ".join(parts)

    def _style_of_pairs(self, layers: list[_Layer]) -> Iterator[str]:
        if self.weights_alone:
            yield f"{_listed(layer.weight.kind for layer in layers if layer.weight is not None)} weights alone"
            return
        sides = [layer.activation for layer in layers if layer.activation is not None]
        kinds = _listed(side.kind for side in sides)
        symmetric = "symmetric" if all(side.symmetric for side in sides) else "asymmetric"
        yield f"{kinds} {symmetric}" if kinds == "S8" else kinds
        closed = sum(self._open_result(layer.node) is None for layer in layers)
        yield "results quantised" if 2 * closed >= len(layers) else "results in float"

    def fit(self, target: str) -> TargetFit:
        """How many of the quantised layers that target's kernels take, and why not the others."""
        refused = [(layer, reason) for layer in self._layers if (reason := self._refusal(layer, target))]
        total, lost = self._work(self._layers), self._work(layer for layer, _ in refused)
        count = len(self._layers)
        if not total:
            total, lost = count, len(refused)
        return TargetFit(
            target=target,
            taken=count - len(refused),
            layers=count,
            what=("convolution" if all("Conv" in layer.node.op_type for layer in self._layers) else "layer")
            + "s" * (count != 1),
            share=(total - lost) / total if total else 0.0,
            reasons=dict(Counter(reason for _, reason in refused).most_common()),
        )

    def refusals(self, target: str) -> dict[str, str]:
        """Why layers are not taken, by the node's label."""
        found = ((walk.label(layer.node), self._refusal(layer, target)) for layer in self._layers)
        return {name: reason for name, reason in found if reason}

    def misfit(self, target: str) -> str | None:
        """The sentence for a graph that a target does not take as it is; None where it does, or where weights alone are
        quantised, which no target computes in."""
        fit = self.fit(target)
        if not self or self.weights_alone or fit.share >= LEAST_TAKEN:
            return None
        title, placed = quant_target(target).title, self.title
        reasons = ", ".join(f"{reason} ({number})" for reason, number in fit.reasons.items())
        subject = "these Q/DQ pairs are" if any(layer.pairs for layer in self._layers) else "this graph is"
        begin = f"{subject} placed for {placed}: {title}" if placed else f"{subject} {self.style}: {title}"
        if target.startswith("tensorrt"):
            return f"{begin} takes {fit.taken} of {fit.layers} {fit.what}: {reasons}"
        rest = "the others" if fit.taken else "them"
        return f"{begin} fuses {fit.taken} of {fit.layers} {fit.what} and runs {rest} in FP32: {reasons}"

    def remedy(self, target: str) -> str:
        """What to type so that a target takes it."""
        if all(reason.startswith("no ") for reason in self.fit(target).reasons):  # another placement would not help
            return f"build for a device that has {self.format} kernels"
        out = f"MODEL.{self.format}.onnx"
        return (
            f"quantise the plain model for it: `trt-engine quantize MODEL.onnx --to {self.format} --target {target} "
            f"--calibrate DATA -o {out}`"
        )

    def finding(self, target: str, severity: Literal["info", "warning", "error"]) -> Finding | None:
        """The finding of a graph that a target does not take as it is."""
        said = self.misfit(target)
        return None if said is None else Finding("quant-placement", severity, said, hint=self.remedy(target))

    @property
    def format(self) -> str:
        """`int8`: what most quantised layers are in."""
        found = Counter(_FORMAT.get(pair.kind, "int8") for layer in self._layers for pair in layer.pairs[:1])
        return found.most_common(1)[0][0] if found else "int8"

    # -------------------------------------------------------------------------------------------- the targets' rules

    def _refusal(self, layer: _Layer, target: str) -> str | None:
        if target == "onnxruntime-cpu":
            return self._not_on_cpu(layer)
        if target == "onnxruntime-cuda":
            four_bits = layer.weights_alone and layer.weight is not None and layer.weight.kind == "INT4"
            if layer.node.op_type == _BLOCKS_OF_4_BITS or (four_bits and layer.node.op_type == "MatMul"):
                return None
            return "no CUDA kernels that take quantised layers"
        return self._not_in_tensorrt(layer, through_onnxruntime=target == "onnxruntime-tensorrt")

    def _not_in_tensorrt(self, layer: _Layer, *, through_onnxruntime: bool) -> str | None:
        if layer.integer:
            return f"{layer.node.op_type} is an operator of ONNX Runtime"
        if (reason := _one_sided(layer)) is not None:
            return reason
        for pair in layer.pairs:
            if pair.kind in ("U8", "S16", "U16", "other"):
                return f"{_spelled(pair.kind)} pairs"
            if through_onnxruntime and pair.dq.op_type.startswith("TRT_"):
                return "operators of TensorRT itself"
            if not pair.symmetric:
                return "zero points other than 0"
        bias = self._graph.dequantized(layer.node, 2)
        return "bias quantised to INT32" if bias is not None and bias.kind == "S32" else None

    def _not_on_cpu(self, layer: _Layer) -> str | None:
        op = layer.node.op_type
        if layer.integer:
            return None
        odd = next((pair.kind for pair in layer.pairs if pair.kind not in _BYTES), None)
        if odd is not None:
            taken = odd == "INT4" and layer.weights_alone and op == "MatMul"
            return None if taken else f"no {_spelled(odd)} kernels"
        if op == "ConvTranspose":
            return "no INT8 kernel for ConvTranspose"
        if (reason := _one_sided(layer)) is not None:
            return reason
        assert layer.activation is not None and layer.weight is not None
        if not layer.activation.direct or (layer.weight.q is None and layer.weight.dq.output[0] != layer.node.input[1]):
            return "other operators between DequantizeLinear and the layer"
        if self._x86 and any(pair.kind == "S8" and not self._read_once(pair.q) for pair in layer.pairs):
            return _SHARED_S8
        if op == "MatMul":
            return None
        reason = self._open_result(layer.node)
        if op == "Gemm":
            biased = len(layer.node.input) > 2 and bool(layer.node.input[2])
            return (
                "bias and result not quantised"
                if biased and reason and not self._graph.dequantized(layer.node, 2)
                else None
            )
        return reason

    def _read_once(self, q: NodeProto | None) -> bool:
        """Whether a signed pair has one reader: only then ONNX Runtime turns it into an unsigned one."""
        if q is None:
            return True
        pairs = self._graph.readers.get(q.output[0], ())
        return len(pairs) == 1 and len(self._graph.readers.get(pairs[0].output[0], ())) < 2

    def _open_result(self, node: NodeProto) -> str | None:
        """Why the result of a layer does not go into one QuantizeLinear alone; None where it does."""
        name, clip = str(node.output[0]), None
        for _ in range(_FAR):
            readers = self._graph.readers.get(name, ())
            quantizers = [reader for reader in readers if is_quantize(reader)]
            if len(readers) != 1 or name in self._graph.ends:
                return "result read in float too" if quantizers else "result not quantised"
            reader = readers[0]
            if quantizers:
                return self._left_over(clip, reader)
            if reader.op_type in _CLIPPING and clip is None:
                clip = reader
            elif reader.op_type not in _MOVED_PAST:
                return "result not quantised"
            name = str(reader.output[0])
        return "result not quantised"

    def _left_over(self, clip: NodeProto | None, q: NodeProto) -> str | None:
        """Why fusing with that QuantizeLinear fails: an activation function that its range does not make superfluous, or a
        signed result with several readers."""
        kind = _ELEM.get(self._graph._elem_of(q), "other")
        if self._x86 and kind == "S8" and not self._read_once(q):
            return _SHARED_S8
        if clip is None or kind not in _LIMITS:
            return None
        zero, scale = (
            self._graph.value(q.input[2]) if len(q.input) > 2 else np.zeros(1, np.float32),
            self._graph.value(q.input[1]),
        )
        if zero is None or scale is None:
            return None
        low, high = ((limit - zero.reshape(-1)[0]) * scale.reshape(-1)[0] for limit in _LIMITS[kind])
        least, most = (0.0, np.inf) if clip.op_type == "Relu" else self._bounds(clip)
        if low >= least and high <= most:
            return None
        return f"{clip.op_type} between the layer and its QuantizeLinear"

    def _bounds(self, clip: NodeProto) -> tuple[float, float]:
        given = attributes(clip)
        found = [given.get("min", -np.inf), given.get("max", np.inf)]
        for at, name in enumerate(clip.input[1:3]):
            value = self._graph.value(name) if name else None
            found[at] = float(value.reshape(-1)[0]) if value is not None and value.size else found[at]
        return float(found[0]), float(found[1])


_SHARED_S8 = "S8 pairs that several layers read (on x86 they have to be U8)"
_SPELLED = {"S8": "INT8", "U8": "UINT8", "S16": "INT16", "U16": "UINT16", "other": "unknown"}


def _spelled(kind: str) -> str:
    return _SPELLED.get(kind, kind)


def _listed(kinds: Iterator[str]) -> str:
    return " and ".join(dict.fromkeys(kinds))


def _one_sided(layer: _Layer) -> str | None:
    """Why a layer with one quantised input computes in floating point; None for both, and for 4-bit weights alone."""
    if layer.weight is None:
        return "weights not quantised"
    if layer.activation is None and layer.weight.kind != "INT4":
        return "input not quantised"
    return None

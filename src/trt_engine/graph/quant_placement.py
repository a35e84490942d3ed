"""Which libraries' kernels the Q/DQ placement of a graph fits, whatever tool wrote it, and why others reject it.

TensorRT takes signed, symmetric pairs at layer inputs. ONNX Runtime's CPU provider fuses a convolution only if its
result is quantised too with no activation function in between, and on x86 takes signed pairs only if one layer reads
them. The rules for ONNX Runtime are those of release 1.31; tests compare them with the graphs it writes.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt
from onnx import NodeProto, TensorProto

from trt_engine.config.precision import QUANT_TARGETS
from trt_engine.format import join_names
from trt_engine.graph import walk
from trt_engine.graph.cost import Cost
from trt_engine.graph.dtype_breakdown import compute_layers, is_dequantize, is_quantize
from trt_engine.graph.edit_graph import consumers_of, inline_functions, inline_value
from trt_engine.graph.quant_target import METADATA_KEY, quant_target
from trt_engine.model import GraphIndex
from trt_engine.records.base import Finding
from trt_engine.records.inspect import QuantPlacement, TargetSupport

MIN_ACCEPTED_SHARE = 0.95
"""Fraction of quantised layers, by multiply-adds, from which a graph counts as placed for a target."""
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
_MAX_NAMES = 3
"""Layers named for one reason."""


@dataclass(frozen=True, slots=True)
class _QdqPair:
    """A layer input behind DequantizeLinear."""

    dtype: str
    """`S8`, `U8`, `FP8`, `INT4`; of TensorRT's operators: `FP4`, `MXFP8`."""
    dq: NodeProto
    q: NodeProto | None
    """None for a stored tensor."""
    symmetric: bool
    direct: bool
    """True if only operators that ONNX Runtime moves the pair past are in between."""


@dataclass(frozen=True, slots=True)
class _QuantizedLayer:
    """A layer with a quantised input."""

    node: NodeProto
    integer: bool = False
    """True for an integer operator of ONNX Runtime."""
    activation: _QdqPair | None = None
    weight: _QdqPair | None = None

    @property
    def pairs(self) -> tuple[_QdqPair, ...]:
        return tuple(pair for pair in (self.activation, self.weight) if pair is not None)

    @property
    def weight_only(self) -> bool:
        return self.activation is None and not self.integer

    @property
    def whole(self) -> bool:
        """True unless only one of its inputs is quantised."""
        return self.integer or (self.activation is not None and self.weight is not None)


class _Connections:
    """A graph with the producer and readers of each tensor."""

    def __init__(self, graph: GraphIndex) -> None:
        self.proto, self.nodes = graph.proto, [place.node for place in graph.nodes]
        self.makers = {name: node for node in self.nodes for name in node.output if name}
        self.readers = consumers_of(self.nodes)
        self.stored = {item.name: item for body in graph.graphs for item in body.initializer}
        self.ends = {item.name for body in graph.graphs for item in body.output}
        for node in self.nodes:
            if node.op_type == "Constant" and len(node.attribute) == 1 and node.attribute[0].HasField("t"):
                self.stored[node.output[0]] = node.attribute[0].t

    def value(self, name: str) -> npt.NDArray[np.float32] | None:
        """Values of a stored tensor; None if it is computed or external."""
        return inline_value(self.stored.get(name))

    def dequantized(self, node: NodeProto, at: int) -> _QdqPair | None:
        """The Q/DQ pair at an input of a node; None without one."""
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

    def _pair(self, dq: NodeProto, direct: bool) -> _QdqPair | None:
        if dq.op_type.startswith("TRT_"):
            kind = next((name for name in ("MXFP8", "FP4", "FP8", "INT4") if name in dq.op_type), "S8")
            return _QdqPair(kind, dq, None, True, direct)
        source = self.makers.get(dq.input[0])
        q = source if source is not None and is_quantize(source) else None
        tensor = self.stored.get(dq.input[0])
        elem = tensor.data_type if tensor is not None else self._elem_of(q) if q is not None else self._elem_of(dq)
        zero = self.value(dq.input[2]) if len(dq.input) > 2 else None
        return _QdqPair(_ELEM.get(elem, "other"), dq, q, zero is None or not zero.any(), direct)

    def _elem_of(self, node: NodeProto) -> int:
        """Quantised type of Q or DQ by its zero point; UINT8 by default."""
        if len(node.input) > 2 and node.input[2]:
            zero = self.stored.get(node.input[2])
            return zero.data_type if zero is not None else 0
        if node.op_type.startswith("TRT_"):
            return int(TensorProto.FLOAT4E2M1)
        return int(walk.attributes(node).get("output_dtype", 0) or TensorProto.UINT8)


class QuantizedGraph:
    """Quantised layers of a graph and which targets accept them; falsy without any."""

    def __init__(self, graph: GraphIndex, cost: Cost | None = None) -> None:
        """Raises `ModelError` if local functions cannot be inlined."""
        self._graph = _Connections(walk.index_of(inline_functions(graph.proto)) if graph.functions else graph)
        self._stated = next((item.value for item in graph.proto.metadata_props if item.key == METADATA_KEY), None)
        self._cost = cost
        self._x86 = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
        found = list(self._quantized())
        whole = [layer for layer in found if layer.whole]  # others beside these were left in floating point
        all_alone = all(layer.weight_only for layer in found)
        self._layers = whole or [layer for layer in found if all_alone or not layer.weight_only]
        self.weights_alone = bool(found) and all_alone
        """No activation is quantised: layers compute in a floating-point type on every target."""

    @cached_property
    def _macs(self) -> dict[str, int]:
        """Multiply-adds by a layer's first output; traces the whole graph."""
        return {layer.step.node.output[0]: layer.macs for layer in compute_layers(self._graph.proto, self._cost)}

    def _work(self, layers: Iterable[_QuantizedLayer]) -> int:
        return sum(self._macs.get(layer.node.output[0], 0) for layer in layers)

    def __bool__(self) -> bool:
        return bool(self._layers)

    def _quantized(self) -> Iterator[_QuantizedLayer]:
        for node in self._graph.nodes:
            if node.op_type in (*_DYNAMIC, *_STATIC, _BLOCKS_OF_4_BITS):
                yield _QuantizedLayer(node, integer=True)
            elif node.op_type in _LINEAR and not walk.domain_of(node):
                sides = self._graph.dequantized(node, 0), self._graph.dequantized(node, 1)
                if any(sides):
                    yield _QuantizedLayer(node, False, *sides)

    @property
    def pairs(self) -> frozenset[str]:
        """Labels of all Q and DQ nodes."""
        return frozenset(walk.label(node) for node in self._graph.nodes if is_quantize(node) or is_dequantize(node))

    # -------------------------------------------------------------------------------------------- reports

    def report(self) -> QuantPlacement:
        """Quantisation style of the graph, and the targets it is placed for."""
        fits = tuple(self.coverage(name) for name in QUANT_TARGETS)
        return QuantPlacement(
            style=self.style,
            declared_target=self._stated,
            targets=tuple(item.target for item in fits if item.share >= MIN_ACCEPTED_SHARE),
            support=fits,
        )

    @property
    def title(self) -> str | None:
        """The declared target, or the first one that accepts the graph: `TensorRT (S8 symmetric, results in float)`;
        None without either."""
        names = [fit.target for fit in map(self.coverage, QUANT_TARGETS) if fit.share >= MIN_ACCEPTED_SHARE]
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

    def _style_of_pairs(self, layers: list[_QuantizedLayer]) -> Iterator[str]:
        if self.weights_alone:
            yield f"{_format_dtypes(layer.weight.dtype for layer in layers if layer.weight is not None)} weights alone"
            return
        sides = [layer.activation for layer in layers if layer.activation is not None]
        kinds = _format_dtypes(side.dtype for side in sides)
        symmetric = "symmetric" if all(side.symmetric for side in sides) else "asymmetric"
        yield f"{kinds} {symmetric}" if kinds == "S8" else kinds
        closed = sum(self._unquantized_result(layer.node) is None for layer in layers)
        yield "results quantised" if 2 * closed >= len(layers) else "results in float"

    def coverage(self, target: str) -> TargetSupport:
        """Number of quantised layers that a target's kernels accept, and the reasons for the others."""
        refused = [(layer, reason) for layer in self._layers if (reason := self._rejection(layer, target))]
        total, lost = self._work(self._layers), self._work(layer for layer, _ in refused)
        count = len(self._layers)
        if not total:
            total, lost = count, len(refused)
        return TargetSupport(
            target=target,
            supported_layers=count - len(refused),
            layers=count,
            layer_kind=("convolution" if all("Conv" in layer.node.op_type for layer in self._layers) else "layer")
            + "s" * (count != 1),
            share=(total - lost) / total if total else 0.0,
            reasons=dict(Counter(reason for _, reason in refused).most_common()),
        )

    def rejections(self, target: str) -> dict[str, str]:
        """Reasons for rejected layers, by node label."""
        found = ((walk.label(layer.node), self._rejection(layer, target)) for layer in self._layers)
        return {name: reason for name, reason in found if reason}

    def mismatch(self, target: str) -> str | None:
        """Message for a graph that a target rejects; None if it accepts it, or if only weights are quantised.

        Raises `UsageError` for an unknown target.
        """
        fit = self.coverage(target)
        if not self or self.weights_alone or fit.share >= MIN_ACCEPTED_SHARE:
            return None
        title, placed = quant_target(target).title, self.title
        layers: dict[str, list[str]] = {reason: [] for reason in fit.reasons}
        for name, reason in self.rejections(target).items():
            layers[reason].append(name)
        reasons = ", ".join(
            f"{reason} ({fit.reasons[reason]}: {join_names(names, _MAX_NAMES)})" for reason, names in layers.items()
        )
        if self._stated == target:
            lost = fit.layers - fit.supported_layers
            return f"{title} runs {lost} of {fit.layers} quantised {fit.layer_kind} in FP32: {reasons}"
        subject = "these Q/DQ pairs are" if any(layer.pairs for layer in self._layers) else "this graph is"
        begin = f"{subject} placed for {placed}: {title}" if placed else f"{subject} {self.style}: {title}"
        if target.startswith("tensorrt"):
            return f"{begin} takes {fit.supported_layers} of {fit.layers} {fit.layer_kind}: {reasons}"
        rest = "the others" if fit.supported_layers else "them"
        return (
            f"{begin} fuses {fit.supported_layers} of {fit.layers} {fit.layer_kind} and runs {rest} in FP32: {reasons}"
        )

    def remedy(self, target: str) -> str:
        """Command that adapts the graph to a target."""
        if all(reason.startswith("no ") for reason in self.coverage(target).reasons):  # placement does not matter
            return f"build for a device that has {self.format} kernels"
        if self._stated == target:
            return "leave these layers out: `trt-engine quantize --exclude-node`"
        out = f"MODEL.{self.format}.onnx"
        return (
            f"quantise the plain model for it: `trt-engine quantize MODEL.onnx --to {self.format} --target {target} "
            f"--calib-data DATA -o {out}`"
        )

    def finding(self, target: str, severity: Literal["info", "warning", "error"]) -> Finding | None:
        """Finding for a graph that a target rejects."""
        said = self.mismatch(target)
        return None if said is None else Finding("quant-placement", severity, said, hint=self.remedy(target))

    @property
    def format(self) -> str:
        """Format of most quantised layers: `int8`."""
        found = Counter(_FORMAT.get(pair.dtype, "int8") for layer in self._layers for pair in layer.pairs[:1])
        return found.most_common(1)[0][0] if found else "int8"

    # -------------------------------------------------------------------------------------------- the targets' rules

    def _rejection(self, layer: _QuantizedLayer, target: str) -> str | None:
        if target == "onnxruntime-cpu":
            return self._cpu_rejection(layer)
        if target == "onnxruntime-cuda":
            four_bits = layer.weight_only and layer.weight is not None and layer.weight.dtype == "INT4"
            if layer.node.op_type == _BLOCKS_OF_4_BITS or (four_bits and layer.node.op_type == "MatMul"):
                return None
            return "no CUDA kernels that take quantised layers"
        return self._tensorrt_rejection(layer, through_onnxruntime=target == "onnxruntime-tensorrt")

    def _tensorrt_rejection(self, layer: _QuantizedLayer, *, through_onnxruntime: bool) -> str | None:
        if layer.integer:
            return f"{layer.node.op_type} is an operator of ONNX Runtime"
        if (reason := _one_quantized_input(layer)) is not None:
            return reason
        for pair in layer.pairs:
            if pair.dtype in ("U8", "S16", "U16", "other"):
                return f"{_format_dtype(pair.dtype)} pairs"
            if through_onnxruntime and pair.dq.op_type.startswith("TRT_"):
                return "operators of TensorRT itself"
            if not pair.symmetric:
                return "zero points other than 0"
        bias = self._graph.dequantized(layer.node, 2)
        return "bias quantised to INT32" if bias is not None and bias.dtype == "S32" else None

    def _cpu_rejection(self, layer: _QuantizedLayer) -> str | None:
        op = layer.node.op_type
        if layer.integer:
            return None
        odd = next((pair.dtype for pair in layer.pairs if pair.dtype not in _BYTES), None)
        if odd is not None:
            taken = odd == "INT4" and layer.weight_only and op == "MatMul"
            return None if taken else f"no {_format_dtype(odd)} kernels"
        if op == "ConvTranspose":
            return "no INT8 kernel for ConvTranspose"
        if (reason := _one_quantized_input(layer)) is not None:
            return reason
        assert layer.activation is not None and layer.weight is not None
        if not layer.activation.direct or (layer.weight.q is None and layer.weight.dq.output[0] != layer.node.input[1]):
            return "other operators between DequantizeLinear and the layer"
        if self._x86 and any(pair.dtype == "S8" and not self._has_one_reader(pair.q) for pair in layer.pairs):
            return _SHARED_S8
        if op in ("MatMul", "Gemm") and (lost := self._lost_clip(layer.node)) is not None:
            return lost
        if op == "MatMul":
            return None
        reason = self._unquantized_result(layer.node)
        if op == "Gemm":
            biased = len(layer.node.input) > 2 and bool(layer.node.input[2])
            return (
                "bias and result not quantised"
                if biased and reason and not self._graph.dequantized(layer.node, 2)
                else None
            )
        return reason

    def _lost_clip(self, node: NodeProto) -> str | None:
        """Why a Relu or Clip, the only reader of a MatMul or Gemm, prevents fusion: ONNX Runtime looks past it for a
        QuantizeLinear whose range makes it superfluous.
        """
        readers = self._graph.readers.get(node.output[0], ())
        if len(readers) != 1 or readers[0].op_type not in _CLIPPING or readers[0].output[0] in self._graph.ends:
            return None
        clip = readers[0]
        behind = self._graph.readers.get(clip.output[0], ())
        if len(behind) != 1:
            return None
        if is_quantize(behind[0]):
            return self._unfused_clip(clip, behind[0])
        return f"{clip.op_type} behind the layer and no QuantizeLinear behind that"

    def _has_one_reader(self, q: NodeProto | None) -> bool:
        """Whether a signed pair has one reader: ONNX Runtime makes only such a pair unsigned."""
        if q is None:
            return True
        pairs = [pair for name in q.output for pair in self._graph.readers.get(name, ())]
        if len(pairs) != 1:
            return False
        return sum(len(self._graph.readers.get(name, ())) for name in pairs[0].output) < 2

    def _unquantized_result(self, node: NodeProto) -> str | None:
        """Why a layer's result does not feed exactly one QuantizeLinear; None if it does."""
        name, clip = str(node.output[0]), None
        for _ in range(_FAR):
            readers = self._graph.readers.get(name, ())
            quantizers = [reader for reader in readers if is_quantize(reader)]
            if len(readers) != 1 or name in self._graph.ends:
                return "result read in float too" if quantizers else "result not quantised"
            reader = readers[0]
            if quantizers:
                return self._unfused_clip(clip, reader)
            if reader.op_type in _CLIPPING and clip is None:
                clip = reader
            elif reader.op_type not in _MOVED_PAST:
                return "result not quantised"
            name = str(reader.output[0])
        return "result not quantised"

    def _unfused_clip(self, clip: NodeProto | None, q: NodeProto) -> str | None:
        """Why fusing with a QuantizeLinear fails: an activation function that its range does not subsume, or a signed
        result with several readers."""
        kind = _ELEM.get(self._graph._elem_of(q), "other")
        if self._x86 and kind == "S8" and not self._has_one_reader(q):
            return _SHARED_S8
        if clip is None or kind not in _LIMITS:
            return None
        zero, scale = (
            self._graph.value(q.input[2]) if len(q.input) > 2 else np.zeros(1, np.float32),
            self._graph.value(q.input[1]),
        )
        if zero is None or scale is None:
            return None
        low, high = ((np.float32(limit) - zero.reshape(-1)[0]) * scale.reshape(-1)[0] for limit in _LIMITS[kind])
        least, most = (0.0, np.inf) if clip.op_type == "Relu" else self._bounds(clip)
        if low >= least and high <= most:
            return None
        return f"{clip.op_type} between the layer and its QuantizeLinear"

    def _bounds(self, clip: NodeProto) -> tuple[float, float]:
        given = walk.attributes(clip)
        found = [given.get("min", -np.inf), given.get("max", np.inf)]
        for at, name in enumerate(clip.input[1:3]):
            value = self._graph.value(name) if name else None
            found[at] = float(value.reshape(-1)[0]) if value is not None and value.size else found[at]
        return float(found[0]), float(found[1])


_SHARED_S8 = "S8 pairs that several layers read (on x86 they have to be U8)"
_DTYPE_NAMES = {"S8": "INT8", "U8": "UINT8", "S16": "INT16", "U16": "UINT16", "other": "unknown"}


def _format_dtype(kind: str) -> str:
    return _DTYPE_NAMES.get(kind, kind)


def _format_dtypes(kinds: Iterator[str]) -> str:
    return " and ".join(dict.fromkeys(kinds))


def _one_quantized_input(layer: _QuantizedLayer) -> str | None:
    """Why a layer with one quantised input computes in floating point; None for both, and for 4-bit weights only."""
    if layer.weight is None:
        return "weights not quantised"
    if layer.activation is None and layer.weight.dtype != "INT4":
        return "input not quantised"
    return None

"""Select the layers that ONNX Runtime's CPU kernels compute in integers, and the operators that stay in 8 bits between them.

ONNX Runtime fuses a node into an integer kernel if DequantizeLinear feeds all of its inputs and QuantizeLinear reads its
only output (core/optimizer/qdq_transformer/selectors_actions in its sources). Tensors between such layers stay in 8 bits
through Add, Mul, Sigmoid, Concat, pooling and data movement; a node without an integer neighbour stays in floating point,
where a Q/DQ pair would only cost time and accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.graph import walk
from trt_engine.graph.edit_graph import Weights, consumers_of, retain_items
from trt_engine.graph.shape_inference import TensorInfo
from trt_engine.precision.layer_selection import (
    CONV_OPS,
    LINEAR_OPS,
    Exclusions,
    LayerSelection,
    QuantizableLayer,
)
from trt_engine.precision.qdq import find_bias_adds

INTEGER_OPS = frozenset("Add Mul Sigmoid LeakyRelu HardSigmoid HardSwish Concat AveragePool GlobalAveragePool".split())
"""Weightless operators with integer kernels, or expressible with them."""
DATA_MOVEMENT_OPS = frozenset(
    "MaxPool Reshape Flatten Squeeze Unsqueeze Transpose Slice Split Gather Resize Expand Tile".split()
)
"""Operators that copy values of their first input, so that both share one scale."""
_VARIADIC = ("Concat", "Add", "Mul")
_PROBABILITY_OPS = ("Sigmoid", "HardSigmoid", "Softmax")
_CLIPPING_OPS = ("Relu", "Clip")


@dataclass(slots=True)
class IntegerGraph:
    """The nodes that compute in 8 bits, and the quantized tensors between them."""

    layers: dict[str, QuantizableLayer]
    """Layers with weights, by their first output."""
    others: dict[str, NodeProto]
    """Nodes without weights, by their first output."""
    fused_clips: dict[str, NodeProto] = field(default_factory=dict)
    """Relu and Clip fused into the quantization of their input, by the input's name."""
    quantized_outputs: set[str] = field(default_factory=set)
    """Outputs of integer nodes that are quantized; of a fused Relu or Clip, its output."""
    quantized_inputs: list[str] = field(default_factory=list)
    """Floating-point tensors, inputs and constants that integer nodes read, in order."""
    shared_scale: dict[str, str] = field(default_factory=dict)
    """Tensor whose scale is shared, by tensor: output to input for data movement, input to output for Concat."""

    float_clips: set[str] = field(default_factory=set)
    """Outputs of each Relu and Clip that alone reads a layer with floating-point output."""

    def scale_source(self, name: str) -> str:
        """The tensor that determines this tensor's scale."""
        while name in self.shared_scale:
            name = self.shared_scale[name]
        return name


def select_cpu_layers(selection: LayerSelection, weights: Weights) -> LayerSelection:
    """Remove the layers that ONNX Runtime's CPU kernels do not support."""
    return selection.without(lambda site: _unsupported_reason(site, weights))


def _unsupported_reason(site: QuantizableLayer, weights: Weights) -> str | None:
    node, given = site.node, walk.attributes(site.node)
    if site.elem_type != TensorProto.FLOAT:
        return "it computes in 16 bits, and integer kernels go with FP32 around them"
    if node.op_type == "ConvTranspose":
        return "ONNX Runtime's CPU provider has no integer kernel for ConvTranspose"
    if len(site.weight_shape) > 2 and node.op_type not in CONV_OPS:
        return "its weight is not a matrix"
    bias = node.input[2] if len(node.input) > 2 else ""
    if bias and bias not in weights:
        return "its bias is computed, not stored"
    if node.op_type == "Gemm":
        if given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
            return "its alpha or beta is not 1"
        if bias and [size for size in weights.shape(bias) or () if size != 1] != [site.weight_shape[site.channel_axis]]:
            return "its bias is not one number for each output"
    return None


def join_biases(proto: ModelProto, selection: LayerSelection, weights: Weights, exclude: Exclusions) -> None:
    """Write each selected MatMul of rank 2 and the Add of its bias as a Gemm, in place: ONNX Runtime makes one of them too,
    but with a bias in FP32, which its integer kernel does not take.
    """
    adds = find_bias_adds(proto, weights)
    gone: set[str] = set()
    for site in selection.layers:
        node, add = site.node, adds.get(site.output_name)
        if node.op_type != "MatMul" or site.activation_rank != 2 or add is None or exclude.reason(add):
            continue
        bias = next(name for name in add.input if name != node.output[0])
        outputs = site.weight_shape[site.channel_axis]
        if weights.shape(bias) in ((outputs,), (1, outputs)) and weights.elem_type(bias) == site.elem_type:
            node.op_type, node.output[0] = "Gemm", add.output[0]
            node.input.append(bias)
            gone.add(add.output[0])
    retain_items(proto.graph.node, lambda node: node.op_type != "Add" or node.output[0] not in gone)


def join_hard_sigmoids(proto: ModelProto, weights: Weights, exclude: Exclusions) -> None:
    """Write each `clip(x + b, 0, c) / c` as a HardSigmoid, in place, also where a product stands before the division, as in
    HardSwish: it takes no node of its own in integers, and the four of it would be computed in floating point."""
    graph = proto.graph
    makers = {name: node for node in graph.node for name in node.output}
    kept, readers = {item.name for item in graph.output}, consumers_of(graph.node)
    kept |= {name for place in walk.nodes(proto) if place.owner is not graph for name in place.node.input}

    def only_reader(name: str) -> NodeProto | None:
        found = list(readers.get(name, ()))
        usual = len(found) == 1 and name not in kept and not walk.domain_of(found[0]) and not exclude.reason(found[0])
        return found[0] if usual else None

    def scaled(node: NodeProto) -> tuple[str, float] | None:
        """What a node reads beside one constant number, and the number: of an Add, or the divisor of a Div or Mul."""
        if node.op_type not in ("Add", "Div", "Mul"):
            return None
        for at in (1, 0) if node.op_type != "Div" else (1,):
            value = _number(weights, node.input[at])
            if value is not None and (value or node.op_type == "Add"):
                return node.input[1 - at], 1 / value if node.op_type == "Mul" else value
        return None

    gone: list[NodeProto] = []
    for clip in list(graph.node):
        if clip.op_type != "Clip" or walk.domain_of(clip) or len(clip.input) < 3 or exclude.reason(clip):
            continue
        low, high = (_number(weights, name) for name in clip.input[1:3])
        add, after = makers.get(clip.input[0]), only_reader(clip.output[0])
        if low != 0 or not high or add is None or add.op_type != "Add" or after is None or exclude.reason(add):
            continue
        is_gate = after.op_type == "Mul" and scaled(after) is None
        end = only_reader(after.output[0]) if is_gate else after
        shifted = scaled(add) if only_reader(clip.input[0]) is not None else None
        divided = scaled(end) if end is not None and end.op_type != "Add" else None
        if end is None or shifted is None or divided is None or not np.isclose(high, divided[1], rtol=1e-5):
            continue
        made = helper.make_node(
            "HardSigmoid", [shifted[0]], [clip.output[0]], name=clip.name, alpha=1 / high, beta=shifted[1] / high
        )
        last = after if is_gate else made
        last.output[0], end.output[0] = end.output[0], last.output[0]
        clip.CopyFrom(made)
        gone += [add, end]
    for node in gone:
        graph.node.remove(node)


def _number(weights: Weights, name: str) -> float | None:
    """The value of a constant with one element; None for any other tensor."""
    return float(weights.read(name).reshape(())) if name and weights.shape(name) in ((), (1,)) else None


def find_integer_graph(
    proto: ModelProto, selection: LayerSelection, weights: Weights, exclude: Exclusions
) -> IntegerGraph:
    """Find the ops that can compute in integers around the selected layers."""
    return _IntegerGraphSearch(proto, selection, weights, exclude).run()


class _IntegerGraphSearch:
    """Finds the largest set of nodes that each read an integer tensor and feed an integer node or a linear layer."""

    def __init__(self, proto: ModelProto, selection: LayerSelection, weights: Weights, exclude: Exclusions) -> None:
        self.proto, self.weights, self.exclude = proto, weights, exclude
        self.facts: Mapping[str, TensorInfo] = selection.tensor_info
        self.opset = walk.opsets_of(proto).get("", 0)
        self.makers = {name: node for node in proto.graph.node for name in node.output if name}
        self.readers = consumers_of(proto.graph.node)
        inner = [place.node for place in walk.nodes(proto) if place.owner is not proto.graph]
        self.read_in_bodies = {name for node in inner for name in node.input}
        self.outputs = {item.name for item in proto.graph.output}
        self.biases = {node.output[0] for node in proto.graph.node if self._is_bias(node)}
        sites = {site.output_name: site for site in selection.layers}
        others = {node.output[0]: node for node in proto.graph.node if self._is_candidate(node)}
        self.graph = IntegerGraph(sites, others)

    def run(self) -> IntegerGraph:
        found = self.graph
        before = -1
        while len(found.others) != before:
            before = len(found.others)
            self._fuse_clips()
            for key in list(found.others):
                node = found.others[key]
                reads = any(self._is_integer(name) for name in self._data_inputs(node))
                if not (reads and any(self._feeds_linear_layer(name) for name in self._visible_outputs(node))):
                    del found.others[key]
        self._fuse_clips()
        self._collect_tensors()
        return found

    # -------------------------------------------------------------------------------------------- nodes

    def _is_candidate(self, node: NodeProto) -> bool:
        if walk.domain_of(node) or node.op_type not in INTEGER_OPS | DATA_MOVEMENT_OPS or self.exclude.reason(node):
            return False
        if node.output[0] in self.biases:
            return False
        data = self._data_inputs(node)
        if not data or not all(self._is_float(name) for name in data):
            return False
        given = walk.attributes(node)
        if node.op_type == "MaxPool":
            return self.opset >= 12 and len(node.output) == 1
        if node.op_type == "Resize":
            return given.get("mode", b"nearest") in (b"nearest", b"linear") and not given.get("antialias")
        if node.op_type == "Split":
            return all(name in self.readers for name in node.output)
        if node.op_type == "Concat":
            return not self._mixes_scores(node)
        if node.op_type == "HardSigmoid":
            return bool(given.get("alpha", 0.2) > 0)
        return True

    def _mixes_scores(self, node: NodeProto) -> bool:
        """True for a Concat of probabilities with other values: a shared scale leaves scores few levels."""
        kinds = set()
        for name in node.input:
            maker = self.makers.get(name)
            while maker is not None and maker.op_type in DATA_MOVEMENT_OPS:
                maker = self.makers.get(maker.input[0])
            kinds.add(maker is not None and maker.op_type in _PROBABILITY_OPS)
        return len(kinds) > 1

    def _is_bias(self, node: NodeProto) -> bool:
        """True for an Add of a constant to a MatMul's output, which is part of that layer."""
        if node.op_type != "Add" or walk.domain_of(node):
            return False
        makers = [self.makers.get(name) for name in node.input]
        return any(maker is not None and maker.op_type == "MatMul" for maker in makers) and any(
            name in self.weights for name in node.input
        )

    def _data_inputs(self, node: NodeProto) -> list[str]:
        """The data inputs, without sizes, axes and indices."""
        return list(node.input) if node.op_type in _VARIADIC else list(node.input[:1])

    def _is_float(self, name: str) -> bool:
        if name in self.weights:
            return self.weights.elem_type(name) == TensorProto.FLOAT and 0 not in (self.weights.shape(name) or ())
        fact = self.facts.get(name)
        return fact is not None and fact.elem == TensorProto.FLOAT and not fact.is_constant

    def _is_integer(self, name: str) -> bool:
        """True for an output of an integer node."""
        maker = self.makers.get(name)
        if maker is None:
            return False
        if maker.op_type in _CLIPPING_OPS and maker.input[0] in self.graph.fused_clips:
            maker = self.makers[maker.input[0]]
        if maker.output[0] not in self.graph.layers:
            return maker.output[0] in self.graph.others
        # MatMul and Gemm output floating point for free: integers pay off only if all consumers are integer
        return maker.op_type in CONV_OPS or self._has_only_integer_readers(name)

    def _has_only_integer_readers(self, name: str) -> bool:
        readers = self.readers.get(name, ())
        return bool(readers) and all(self._takes_integers(reader, name) for reader in readers)

    def _visible_outputs(self, node: NodeProto) -> list[str]:
        """The outputs of a node; of a fused Relu or Clip, its output."""
        return [
            self.graph.fused_clips[name].output[0] if name in self.graph.fused_clips else name
            for name in node.output
            if name
        ]

    def _takes_integers(self, reader: NodeProto, name: str) -> bool:
        """True if the consumer is an integer node that reads the tensor as data."""
        key = reader.output[0] if reader.output else ""
        if key in self.graph.layers:
            return bool(reader.input[0] == name)
        return key in self.graph.others and name in self._data_inputs(reader)

    def _feeds_linear_layer(self, name: str) -> bool:
        """True if an integer node or a linear layer in floating point reads the tensor."""
        return any(
            self._takes_integers(reader, name) or (reader.op_type in LINEAR_OPS and reader.input[1] in self.weights)
            for reader in self.readers.get(name, ())
        )

    def _fuse_clips(self) -> None:
        """Fuse each Relu and Clip that follows an integer node into its quantization range."""
        found = self.graph
        found.fused_clips = {}
        for key in (*found.layers, *found.others):
            maker = self.makers[key]
            readers = self.readers.get(key, ())
            if len(readers) != 1 or key in self.outputs or key in self.read_in_bodies or len(maker.output) != 1:
                continue
            reader = readers[0]
            if reader.op_type not in _CLIPPING_OPS or walk.domain_of(reader) or self.exclude.reason(reader):
                continue
            if maker.op_type in (*DATA_MOVEMENT_OPS, "HardSigmoid") or (  # its quantization clips already
                reader.op_type == "Clip" and not self._has_constant_bounds(reader)
            ):
                continue
            found.fused_clips[key] = reader

    def _has_constant_bounds(self, node: NodeProto) -> bool:
        if self.opset < 11:
            return True
        ends = [self.weights.read(name) if name in self.weights else None for name in node.input[1:] if name]
        if any(end is None for end in ends) or len(node.input) < 2 or not node.input[1]:
            return False
        low = float(np.asarray(ends[0]).reshape(()))
        return low <= 0

    # -------------------------------------------------------------------------------------------- tensors

    def _collect_tensors(self) -> None:
        found = self.graph
        for key, site in found.layers.items():
            name = self._visible_outputs(site.node)[0]
            if site.node.op_type in CONV_OPS or self._has_only_integer_readers(name):
                found.quantized_outputs.add(name)
            else:
                found.fused_clips.pop(key, None)  # the output stays in floating point
                readers = self.readers.get(key, ())
                if len(readers) == 1 and readers[0].op_type in _CLIPPING_OPS and not walk.domain_of(readers[0]):
                    found.float_clips.add(readers[0].output[0])
        wanted: dict[str, None] = {}
        for node in self.proto.graph.node:
            key = node.output[0] if node.output else ""
            if key in found.others:
                found.quantized_outputs.update(self._visible_outputs(node))
                if node.op_type in DATA_MOVEMENT_OPS:
                    found.shared_scale.update(dict.fromkeys(node.output, node.input[0]))
                wanted.update(dict.fromkeys(self._data_inputs(node)))
            elif key in found.layers:
                wanted[node.input[0]] = None
        found.quantized_inputs = [name for name in wanted if name not in found.quantized_outputs]
        for node in found.others.values():
            if node.op_type == "Concat":
                self._share_scale(node)

    def _share_scale(self, node: NodeProto) -> None:
        """Share a Concat's scale with the inputs that it alone reads, so that each is rounded once."""
        found = self.graph
        clipped = {clip.output[0] for clip in found.fused_clips.values()}  # their zero point must stay 0
        for part in node.input:
            source = found.scale_source(part)
            same = {name for name in found.quantized_outputs if found.scale_source(name) == source}
            readers = [reader for name in same for reader in self.readers.get(name, ())]
            moving = [reader for reader in readers if reader is not node]
            if (
                source in found.quantized_outputs
                and source not in clipped
                and not same & (self.outputs | self.read_in_bodies)
                and all(reader.op_type in DATA_MOVEMENT_OPS and reader.output[0] in found.others for reader in moving)
            ):
                found.shared_scale[source] = node.output[0]

"""Where ONNX Runtime's CPU kernels want Q/DQ: layers with weights, and what stands between them.

ONNX Runtime replaces a node by an integer kernel where DequantizeLinear feeds all of its inputs and QuantizeLinear reads its
only result (core/optimizer/qdq_transformer/selectors_actions of its sources). So the tensors between two such layers stay in
8 bits, through additions, products, Sigmoid, Concat, pooling and what only moves data; a node that has no integer kernel
beside it stays in floating point, because a pair in front of it would cost time and accuracy and save nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.trace import Fact, attributes
from trt_engine.precision.placement import CONVOLUTIONS, LINEAR, Exclusions, Left, Placement, Site
from trt_engine.precision.surgery import Weights

__all__ = ["COMPUTED", "MOVED", "IntegerGraph", "fitting_sites", "integer_graph"]

COMPUTED = frozenset("Add Mul Sigmoid LeakyRelu HardSigmoid HardSwish Concat AveragePool GlobalAveragePool".split())
"""Operators without weights that have integer kernels, or can be written with such."""
MOVED = frozenset("MaxPool Reshape Flatten Squeeze Unsqueeze Transpose Slice Split Gather Resize Expand Tile".split())
"""Operators whose results are values of their first input: one scale for both."""
_VARIADIC = ("Concat", "Add", "Mul")
_PROBABILITIES = ("Sigmoid", "HardSigmoid", "Softmax")
_CLIPPING = ("Relu", "Clip")


@dataclass(slots=True)
class IntegerGraph:
    """The nodes that compute in 8 bits, and the tensors that are quantised between them."""

    sites: dict[str, Site]
    """Layers with weights, by their first output."""
    others: dict[str, NodeProto]
    """Nodes without weights, by their first output."""
    absorbed: dict[str, NodeProto] = field(default_factory=dict)
    """Relu and Clip that the rounding of the result in front of them does anyway, by that result's name."""
    results: set[str] = field(default_factory=set)
    """What integer nodes give and QuantizeLinear reads; of an absorbed Relu or Clip, its own output."""
    inputs: list[str] = field(default_factory=list)
    """Tensors of floating-point nodes, inputs and constants that integer nodes read, in order."""
    same_scale: dict[str, str] = field(default_factory=dict)
    """What a moving node gives, to what it reads; what a Concat alone reads, to what it gives."""

    def scale_source(self, name: str) -> str:
        """The tensor whose range gives this one's scale."""
        while name in self.same_scale:
            name = self.same_scale[name]
        return name


def fitting_sites(proto: ModelProto, placement: Placement, weights: Weights) -> Placement:
    """The placement without the layers that ONNX Runtime's CPU kernels do not take."""
    kept: list[Site] = []
    left = list(placement.left)
    for site in placement.sites:
        reason = _misfit(site, weights)
        if reason is None:
            kept.append(site)
        else:
            left.append(Left(site.label, site.node.op_type, reason))
    return Placement(kept, left, placement.facts)


def _misfit(site: Site, weights: Weights) -> str | None:
    node, given = site.node, attributes(site.node)
    if site.elem != TensorProto.FLOAT:
        return "it computes in 16 bits, and integer kernels go with FP32 around them"
    if node.op_type == "ConvTranspose":
        return "ONNX Runtime's CPU provider has no integer kernel for ConvTranspose"
    if len(site.shape) > 2 and node.op_type not in CONVOLUTIONS:
        return "its weight is not a matrix"
    bias = node.input[2] if len(node.input) > 2 else ""
    if bias and bias not in weights:
        return "its bias is computed, not stored"
    if node.op_type == "Gemm":
        if given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
            return "its alpha or beta is not 1"
        if bias and [size for size in weights.shape(bias) or () if size != 1] != [site.shape[site.channel]]:
            return "its bias is not one number for each output"
    return None


def integer_graph(proto: ModelProto, placement: Placement, weights: Weights, exclude: Exclusions) -> IntegerGraph:
    """What computes in integers around the sites of a placement."""
    return _Search(proto, placement, weights, exclude).run()


class _Search:
    """The largest set of nodes of which each reads what is in integers already, for an integer node or a linear layer."""

    def __init__(self, proto: ModelProto, placement: Placement, weights: Weights, exclude: Exclusions) -> None:
        self.proto, self.weights, self.exclude = proto, weights, exclude
        self.facts: Mapping[str, Fact] = placement.facts
        self.opset = walk.opsets_of(proto).get("", 0)
        self.makers = {name: node for node in proto.graph.node for name in node.output if name}
        self.readers: dict[str, list[NodeProto]] = {}
        top = {id(node) for node in proto.graph.node}
        self.inner: set[str] = set()
        for place in walk.nodes(proto):
            for name in dict.fromkeys(place.node.input):
                if id(place.node) in top or place.owner is proto.graph:
                    self.readers.setdefault(name, []).append(place.node)
                else:
                    self.inner.add(name)
        self.outputs = {item.name for item in proto.graph.output}
        self.biases = {node.output[0] for node in proto.graph.node if self._is_bias(node)}
        sites = {site.key: site for site in placement.sites}
        others = {node.output[0]: node for node in proto.graph.node if self._candidate(node)}
        self.found = IntegerGraph(sites, others)

    def run(self) -> IntegerGraph:
        found = self.found
        before = -1
        while len(found.others) != before:
            before = len(found.others)
            self._absorb()
            for key in list(found.others):
                if not self._has_neighbours(found.others[key]):
                    del found.others[key]
        self._absorb()
        self._tensors()
        return found

    # -------------------------------------------------------------------------------------------- nodes

    def _candidate(self, node: NodeProto) -> bool:
        if walk.domain_of(node) or node.op_type not in COMPUTED | MOVED or self.exclude.reason(node):
            return False
        if node.output[0] in self.biases:
            return False
        data = self._data(node)
        if not data or not all(self._is_float(name) for name in data):
            return False
        given = attributes(node)
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
        """True for a Concat of probabilities with anything else: one scale leaves scores a few steps."""
        kinds = set()
        for name in node.input:
            maker = self.makers.get(name)
            while maker is not None and maker.op_type in MOVED:
                maker = self.makers.get(maker.input[0])
            kinds.add(maker is not None and maker.op_type in _PROBABILITIES)
        return len(kinds) > 1

    def _is_bias(self, node: NodeProto) -> bool:
        """True for an Add of a stored vector to what a MatMul gives: part of that layer."""
        if node.op_type != "Add" or walk.domain_of(node):
            return False
        makers = [self.makers.get(name) for name in node.input]
        return any(maker is not None and maker.op_type == "MatMul" for maker in makers) and any(
            name in self.weights for name in node.input
        )

    def _data(self, node: NodeProto) -> list[str]:
        """The inputs that hold what is computed on: the others are sizes, axes and indices."""
        return list(node.input) if node.op_type in _VARIADIC else list(node.input[:1])

    def _is_float(self, name: str) -> bool:
        if name in self.weights:
            return self.weights.elem(name) == TensorProto.FLOAT and 0 not in (self.weights.shape(name) or ())
        fact = self.facts.get(name)
        return fact is not None and fact.elem == TensorProto.FLOAT and not fact.stored

    def _integer(self, name: str) -> bool:
        """True for what an integer node gives."""
        maker = self.makers.get(name)
        if maker is None:
            return False
        if maker.op_type in _CLIPPING and maker.input[0] in self.found.absorbed:
            maker = self.makers[maker.input[0]]
        if maker.output[0] not in self.found.sites:
            return maker.output[0] in self.found.others
        # a MatMul or Gemm gives floating point for nothing: integers pay only where nothing else reads them
        return maker.op_type in CONVOLUTIONS or self._all_integer(name)

    def _all_integer(self, name: str) -> bool:
        readers = self.readers.get(name, ())
        return bool(readers) and all(self._takes_integers(reader, name) for reader in readers)

    def _result(self, node: NodeProto) -> list[str]:
        """What of a node is read by others: behind an absorbed Relu or Clip, its output."""
        return [
            self.found.absorbed[name].output[0] if name in self.found.absorbed else name for name in node.output if name
        ]

    def _takes_integers(self, reader: NodeProto, name: str) -> bool:
        """True when an integer node reads the tensor as its data."""
        key = reader.output[0] if reader.output else ""
        if key in self.found.sites:
            return bool(reader.input[0] == name)
        return key in self.found.others and name in self._data(reader)

    def _leads_on(self, name: str) -> bool:
        """True when an integer node reads the tensor, or a layer with weights that stays in floating point."""
        return any(
            self._takes_integers(reader, name) or (reader.op_type in LINEAR and reader.input[1] in self.weights)
            for reader in self.readers.get(name, ())
        )

    def _has_neighbours(self, node: NodeProto) -> bool:
        return any(self._integer(name) for name in self._data(node)) and any(
            self._leads_on(name) for name in self._result(node)
        )

    def _absorb(self) -> None:
        """Find the Relu and Clip behind integer nodes: 0 is their zero point, or their ends are the range's."""
        found = self.found
        found.absorbed = {}
        for key in (*found.sites, *found.others):
            maker = self.makers[key]
            readers = self.readers.get(key, ())
            if len(readers) != 1 or key in self.outputs or key in self.inner or len(maker.output) != 1:
                continue
            reader = readers[0]
            if reader.op_type not in _CLIPPING or walk.domain_of(reader) or self.exclude.reason(reader):
                continue
            if maker.op_type in MOVED or (reader.op_type == "Clip" and not self._constant_ends(reader)):
                continue
            found.absorbed[key] = reader

    def _constant_ends(self, node: NodeProto) -> bool:
        if self.opset < 11:
            return True
        ends = [self.weights.read(name) if name in self.weights else None for name in node.input[1:] if name]
        if any(end is None for end in ends) or len(node.input) < 2 or not node.input[1]:
            return False
        low = float(np.asarray(ends[0]).reshape(()))
        return low <= 0

    # -------------------------------------------------------------------------------------------- tensors

    def _tensors(self) -> None:
        found = self.found
        for key, site in found.sites.items():
            name = self._result(site.node)[0]
            if site.node.op_type in CONVOLUTIONS or self._all_integer(name):
                found.results.add(name)
            else:
                found.absorbed.pop(key, None)  # the result stays in floating point, and so does what follows
        wanted: dict[str, None] = {}
        for node in self.proto.graph.node:
            key = node.output[0] if node.output else ""
            if key in found.others:
                found.results.update(self._result(node))
                if node.op_type in MOVED:
                    found.same_scale.update(dict.fromkeys(node.output, node.input[0]))
                wanted.update(dict.fromkeys(self._data(node)))
            elif key in found.sites:
                wanted[node.input[0]] = None
        found.inputs = [name for name in wanted if name not in found.results]
        for node in found.others.values():
            if node.op_type == "Concat":
                self._share_scale(node)

    def _share_scale(self, node: NodeProto) -> None:
        """Give a Concat's scale to the parts that nothing else reads: each is rounded once, and copied."""
        found = self.found
        clipped = {clip.output[0] for clip in found.absorbed.values()}  # their zero point must stay 0
        for part in node.input:
            source = found.scale_source(part)
            same = {name for name in found.results if found.scale_source(name) == source}
            readers = [reader for name in same for reader in self.readers.get(name, ())]
            moving = [reader for reader in readers if reader is not node]
            if (
                source in found.results
                and source not in clipped
                and not same & (self.outputs | self.inner)
                and all(reader.op_type in MOVED and reader.output[0] in found.others for reader in moving)
            ):
                found.same_scale[source] = node.output[0]

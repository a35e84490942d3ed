"""Activations quantised while running: DynamicQuantizeLinear and MatMulInteger, which ONNX Runtime's CPU provider fuses."""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.precision.cpu_qdq import weight_values
from trt_engine.precision.placement import CONVOLUTIONS, Left, Placement, Site
from trt_engine.precision.surgery import Names, Ops, Weights, drop_unused
from trt_engine.records import QuantizedNode

__all__ = ["DynamicWriter", "dynamic_sites"]

_NO_CONVOLUTIONS = "a convolution quantised while running is slower than in FP32"


def dynamic_sites(placement: Placement) -> Placement:
    """The placement without convolutions: ConvInteger takes several times as long as a convolution in FP32."""
    kept = [site for site in placement.sites if site.node.op_type not in CONVOLUTIONS]
    left = [
        Left(site.label, site.node.op_type, _NO_CONVOLUTIONS)
        for site in placement.sites
        if site.node.op_type in CONVOLUTIONS
    ]
    return Placement(kept, [*placement.left, *left], placement.facts)


class DynamicWriter:
    """Writes one graph whose activations are quantised while it runs, in place."""

    activations: tuple[str, ...] = ()

    def __init__(self, proto: ModelProto, weights: Weights, placement: Placement, bits: int) -> None:
        self.proto, self.weights, self.placement, self.bits = proto, weights, placement, bits
        self.ops = Ops(Names(proto))
        self.written: list[QuantizedNode] = []
        self._quantized: dict[str, list[str]] = {}

    def planned(self) -> list[QuantizedNode]:
        """What would be quantised."""
        return [self._node(site, 0.0) for site in self.placement.sites]

    def write(self) -> None:
        """Quantise every site; the graph is whole again afterwards."""
        sites = {site.key: site for site in self.placement.sites}
        nodes: list[NodeProto] = []
        for node in self.proto.graph.node:
            key = node.output[0] if node.output else ""
            if key in sites:
                self._site(sites[key])
            else:
                self.ops.nodes.append(node)
            nodes.extend(self.ops.taken())
        self.ops.put(self.proto, nodes)
        drop_unused(self.proto, [site.weight for site in self.placement.sites])

    def _site(self, site: Site) -> None:
        node, ops = site.node, self.ops
        values = self.weights.read(site.weight).astype(np.float32)
        matrix = np.ascontiguousarray(values.T) if site.channel == 0 else values
        integers, scales = weight_values(matrix, 1, self.bits)
        if site.activation not in self._quantized:
            self._quantized[site.activation] = ops.several(
                "DynamicQuantizeLinear", [site.activation], site.activation, 3
            )
        data, scale, zero = self._quantized[site.activation]
        stored = ops.store(integers, f"{site.weight}_int8")
        none = ops.constant(np.zeros(scales.shape, np.int8), "zero_int8")
        product = ops.add("MatMulInteger", [data, stored, zero, none], node.output[0])
        ops.nodes[-1].name = walk.label(node)
        steps = ops.add("Mul", [scale, ops.store(scales, f"{site.weight}_scale")], f"{node.output[0]}_scale")
        bias = node.input[2] if len(node.input) > 2 else ""
        result = ops.add("Cast", [product], node.output[0], to=TensorProto.FLOAT)
        if bias:
            ops.add("Add", [ops.add("Mul", [result, steps], node.output[0]), bias], bias, out=node.output[0])
        else:
            ops.add("Mul", [result, steps], node.output[0], out=node.output[0])
        lost = matrix - integers * scales
        size = float(np.linalg.norm(matrix))
        self.written.append(self._node(site, float(np.linalg.norm(lost)) / size if size else 0.0))

    def _node(self, site: Site, error: float) -> QuantizedNode:
        bits = "int8" if self.bits == 8 else f"int8 (of {self.bits} bits)"
        weight = f"{bits}, one scale for each of {site.shape[site.channel]} outputs; activations while running"
        return QuantizedNode(site.label, site.node.op_type, weight, site.activation, None, error)

"""Graph fusions for ONNX Runtime: attention, rotary embeddings, norms, sums with norms, biases with activations, patches.

Each is a rewrite of the main graph into one of ONNX Runtime's own operators (domain `com.microsoft`), on a copy: a fused
graph is what ONNX Runtime builds from, and no other backend reads those operators. Quantized products are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.attention import fuse_attention
from trt_engine.graph.fusion.bias_gelu import fuse_gelu
from trt_engine.graph.fusion.fusion_graph import FusionGraph, has_valid_arity
from trt_engine.graph.fusion.layer_norm import fuse_layer_norm
from trt_engine.graph.fusion.patch_embedding import fuse_patch_embedding
from trt_engine.graph.fusion.rotary import fuse_rotary
from trt_engine.graph.fusion.skip_layer_norm import fuse_skip_layer_norm
from trt_engine.graph.fusion.standard_attention import fuse_standard_attention

MIN_OPSET = 11
"""The oldest opset whose graphs are fused: the nodes that a fusion adds are not defined before."""

FUSION_VERSION = 4
"""Raised with every change of what is fused: part of an engine's key."""


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A fused copy of a model."""

    proto: ModelProto
    counts: Mapping[str, int]
    """Number of fusions by name: `attention`, `skip_layer_norm`."""
    unfused: Mapping[str, str] = field(default_factory=dict)
    """Why a Softmax is not part of a fused attention, by node."""

    @property
    def summary(self) -> str:
        """`attention 12, bias_gelu 12`."""
        return ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))


def fuse_model(proto: ModelProto, folder: Path, *, on_gpu: bool) -> FusedModel:
    """A copy of a model with every fusion that matches; weights outside the graph are read from `folder`.

    For a CPU, attention, rotary embeddings and norms are fused: ONNX Runtime's CPU kernels of the other operators are
    slower than what they replace, and those that gain its own optimiser fuses. The copy has no fusions (`counts` is
    empty) where nothing matched, the opset is older than 11, or a node has inputs or outputs that its operator does not
    take.
    """
    if walk.opsets_of(proto).get("", 0) < MIN_OPSET or not has_valid_arity(proto):
        return FusedModel(proto, {})
    graph = FusionGraph(proto, folder)
    fuse_rotary(graph)
    unfused = fuse_attention(graph, pack=on_gpu) | fuse_standard_attention(graph, pack=on_gpu)
    fuse_layer_norm(graph)
    if on_gpu:
        fuse_patch_embedding(graph)
        fuse_gelu(graph)
        fuse_skip_layer_norm(graph)
    return FusedModel(graph.result(), dict(graph.fused), unfused)

"""Graph fusions for ONNX Runtime: attention, rotary embeddings, norms, sums with norms, biases with activations, patches.

Each is a rewrite of the main graph into one of ONNX Runtime's own operators (domain `com.microsoft`), on a copy: a fused
graph is what ONNX Runtime builds from, and no other backend reads those operators. Quantized products are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from onnx import ModelProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.attention import fuse_attention, fuse_standard_attention
from trt_engine.graph.fusion.bias_gelu import compose_gelu, fuse_bias_gelu, fuse_quick_gelu
from trt_engine.graph.fusion.fusion_graph import FusionGraph, has_valid_arity
from trt_engine.graph.fusion.layer_norm import NORMS, fuse_layer_norm, fuse_skip_layer_norm
from trt_engine.graph.fusion.projection import fuse_patch_embedding
from trt_engine.graph.fusion.rotary import fuse_rotary
from trt_engine.records.inspect import Unfused

log = logging.getLogger(__name__)

MIN_OPSET = 11
"""The oldest opset whose graphs are fused: the nodes that a fusion adds are not defined before."""


@dataclass(frozen=True, slots=True)
class FusedModel:
    """A fused copy of a model."""

    proto: ModelProto
    counts: Mapping[str, int]
    """Number of fusions by name: `attention`, `skip_layer_norm`."""
    unfused: tuple[Unfused, ...] = ()
    """Nodes with the anchor of a fusion (a Softmax in front of a product) that are not part of one, and why."""
    warnings: tuple[str, ...] = ()
    """Fusions that failed, each with its node: the graph is as it was there."""

    @property
    def summary(self) -> str:
        """`attention 12, bias_gelu 12`."""
        return ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))


def fuse_model(proto: ModelProto, folder: Path, *, on_gpu: bool, left_out: Collection[str] = ()) -> FusedModel:
    """A copy of a model with every fusion that matches, but for those whose names are `left_out`; weights outside the graph
    are read from `folder`.

    For a CPU, attention, rotary embeddings and norms are fused: ONNX Runtime's CPU kernels of the other operators are
    slower than what they replace, and those that gain its own optimiser fuses. The copy has no fusions (`counts` is
    empty) where nothing matched, the opset is older than 11, or a node has inputs or outputs that its operator does not
    take. No fusion raises: one that fails leaves its part of the graph as it is, with a warning.
    """
    if walk.opsets_of(proto).get("", 0) < MIN_OPSET or not has_valid_arity(proto):
        return FusedModel(proto, {})
    try:
        graph = FusionGraph(proto, folder, left_out)
        _rewrite(graph, on_gpu=on_gpu)
        return FusedModel(graph.result(), dict(graph.fused), tuple(graph.unfused), tuple(graph.warnings))
    except Exception as error:  # before or after a single fusion: none is worth a failed build
        log.debug("the graph is not fused", exc_info=True)
        return FusedModel(proto, {}, warnings=(f"the graph is not fused: {type(error).__name__}: {error}",))


def _rewrite(graph: FusionGraph, *, on_gpu: bool) -> None:
    graph.rewrite_each("rotary_embedding", ("Add",), fuse_rotary)
    graph.rewrite_each("attention", ("Softmax",), partial(fuse_attention, pack=on_gpu))
    graph.rewrite_each("attention", ("Attention",), partial(fuse_standard_attention, pack=on_gpu))
    graph.rewrite_each("layer_norm", ("Add",), fuse_layer_norm)
    if not on_gpu:
        return
    graph.rewrite_each("patch_embedding", ("Conv",), fuse_patch_embedding)
    compose_gelu(graph)
    graph.rewrite_each("quick_gelu", ("Sigmoid",), fuse_quick_gelu)
    graph.rewrite_each("bias_gelu", ("Gelu", "com.microsoft::Gelu", "com.microsoft::FastGelu"), fuse_bias_gelu)
    graph.rewrite_each("skip_layer_norm", NORMS, fuse_skip_layer_norm)

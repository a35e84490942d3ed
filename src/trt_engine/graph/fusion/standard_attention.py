"""Turns `Attention` of the standard (opset 23) into ONNX Runtime's own operators, which have faster kernels on a GPU."""

from __future__ import annotations

import math

from onnx import NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.attention import AttentionMatch, fit, replace_attention
from trt_engine.graph.fusion.attention_heads import Heads, merged_heads, read_heads
from trt_engine.graph.fusion.attention_mask import LOWEST, Mask, is_finite
from trt_engine.graph.fusion.fusion_graph import HALF_AND_FLOAT, FusionGraph, NotFused


def fuse_standard_attention(graph: FusionGraph, node: NodeProto, *, pack: bool) -> None:
    """Replace a standard Attention; with `pack` the projections become part of the operator where they can."""
    replace_attention(graph, match_standard_attention(graph, node, wide=not pack), pack=pack)


def match_standard_attention(graph: FusionGraph, node: NodeProto, *, wide: bool) -> AttentionMatch:
    """The attention of a node; `wide` computes FP16 in FP32."""
    given, inputs = walk.attributes(node), list(node.input)
    if any(inputs[4:]) or any(node.output[1:]):
        raise NotFused("it has a cache, or more than one output")
    if given.get("softcap") or given.get("softmax_precision", TensorProto.FLOAT) not in HALF_AND_FLOAT:
        raise NotFused("it limits its scores, or has a softmax in another type")
    graph.require_floats(inputs[:3], node.output)
    rank = graph.rank(inputs[0])
    found: list[Heads | None]
    if rank == 3:
        counts = (given.get("q_num_heads", 0), given.get("kv_num_heads", 0), given.get("kv_num_heads", 0))
        found = [merged_heads(graph, name, count) for name, count in zip(inputs[:3], counts, strict=True)]
    else:
        found = [
            read_heads(graph, name, role) for name, role in zip(inputs[:3], ("query", "value", "value"), strict=True)
        ]
    heads = [item for item in found if item is not None]
    if (
        len(heads) < 3
        or heads[0].columns.shape != heads[1].columns.shape
        or len(heads[1].columns) != len(heads[2].columns)
    ):
        raise NotFused("its heads cannot be traced, or queries share keys")
    query, key, value = heads
    if value.scale != 1:
        raise NotFused(f"its values are multiplied by {value.scale:g}")
    lengths = query.view.sizes.get("S"), key.view.sizes.get("S")
    causal = bool(given.get("is_causal"))
    if causal and (lengths[0] is None or lengths[0] != lengths[1]):
        raise NotFused(f"it is causal, and has {lengths[0]} queries and {lengths[1]} keys, which may differ")
    masks: tuple[Mask, ...] = ()
    if len(inputs) > 3 and inputs[3]:
        # ONNX Runtime takes a mask of the lowest number for one of minus infinity
        above, boolean = LOWEST.get(graph.elem_type(inputs[3]), 0.0), graph.elem_type(inputs[3]) == TensorProto.BOOL
        masks = (Mask("", inputs[3], fill=-math.inf if boolean else None, finite=is_finite(graph, inputs[3], above)),)
        if causal and not masks[0].finite:
            raise NotFused("rows without a key give 0, and it is causal")
    scale = given.get("scale", 1 / math.sqrt(query.columns.shape[1]))
    match = AttentionMatch(
        node, query, key, value, scale * query.scale * key.scale, masks, causal=causal, zero_rows=True,
        heads_merged=rank == 3, lowest_is_masked=True,
    )  # fmt: skip
    return fit(graph, match, wide=wide)

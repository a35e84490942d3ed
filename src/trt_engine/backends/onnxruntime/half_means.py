"""Keeps means in FP16 finite on ONNX Runtime's CUDA provider.

Its ReduceMean adds in FP16 where the last or the first axes are reduced: the mean of 4,096 values of 60 is infinite (ONNX
Runtime 1.31.1 on an H200). GlobalAveragePool and sums in FP32 are right.
"""

from __future__ import annotations

from onnx import ModelProto, NodeProto, TensorProto, helper

from trt_engine.graph import walk
from trt_engine.graph.edit_graph import free_name, replace_items, used_names
from trt_engine.graph.shape_inference import TensorInfo, trace

_SAFE_COUNT = 16
"""The sum of so few values overflows only for values above 4,000."""


def widen_half_means(proto: ModelProto) -> int:
    """Compute each FP16 ReduceMean by GlobalAveragePool where it is one, else in FP32, in place; returns how many."""
    facts, taken, nodes, count = trace(proto, {}).tensors, used_names(proto), list[NodeProto](), 0
    for node in proto.graph.node:
        x = facts.get(node.input[0], TensorInfo()) if node.input else TensorInfo()
        if walk.qualified_name(node) != "ReduceMean" or x.elem != TensorProto.FLOAT16 or _is_short(node, x, facts):
            nodes.append(node)
            continue
        count += 1
        if _is_average_pool(node, x, facts):
            nodes.append(helper.make_node("GlobalAveragePool", node.input[:1], node.output, name=node.name))
            continue
        wide, mean = (free_name(f"{node.output[0]}_{part}", taken) for part in ("wide", "mean"))
        made = NodeProto()
        made.CopyFrom(node)
        made.input[0], made.output[0] = wide, mean
        nodes += [
            helper.make_node("Cast", node.input[:1], [wide], to=TensorProto.FLOAT),
            made,
            helper.make_node("Cast", [mean], node.output, to=TensorProto.FLOAT16),
        ]
    if count:
        replace_items(proto.graph.node, nodes)
    return count


def _axes(node: NodeProto, x: TensorInfo, facts: dict[str, TensorInfo]) -> set[int] | None:
    """Axes that are reduced, from 0; None where they are not known."""
    if x.shape is None:
        return None
    given = walk.attributes(node).get("axes")
    if given is None and len(node.input) > 1 and node.input[1]:
        value = facts.get(node.input[1], TensorInfo()).value
        if value is None:
            return None
        given = value.reshape(-1).tolist()
    if not given:
        return set() if walk.attributes(node).get("noop_with_empty_axes", 0) else set(range(len(x.shape)))
    return {int(axis) % len(x.shape) for axis in given} if x.shape else set()


def _is_short(node: NodeProto, x: TensorInfo, facts: dict[str, TensorInfo]) -> bool:
    axes, count = _axes(node, x, facts), 1
    for axis in axes or ():
        count = count * x.shape[axis] if x.shape is not None and x.shape[axis] >= 0 else _SAFE_COUNT + 1
    return axes is not None and 0 <= count <= _SAFE_COUNT


def _is_average_pool(node: NodeProto, x: TensorInfo, facts: dict[str, TensorInfo]) -> bool:
    kept = walk.attributes(node).get("keepdims", 1)
    return bool(kept) and x.shape is not None and len(x.shape) == 4 and _axes(node, x, facts) == {2, 3}

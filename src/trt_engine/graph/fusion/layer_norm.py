"""Puts norms together that are written in primitive operators: LayerNormalization and SimplifiedLayerNormalization (RMS).

`(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * scale + bias`, or without the means of x, over the last dimension.
The square may be a power or a product, the root a divisor, a reciprocal or a negative power, and FP16 may be computed in
FP32 between two casts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import HALF_AND_FLOAT, FusionGraph, NotFused


@dataclass(slots=True)
class _Norm:
    """A norm while its nodes are collected."""

    source: str
    centred: bool
    epsilon: float
    end: NodeProto
    nodes: list[NodeProto]
    scale: str = ""
    bias: str = ""


def fuse_layer_norm(graph: FusionGraph, add: NodeProto) -> None:
    """Replace the norm in primitive operators whose variance and epsilon are added."""
    for variance, constant in (add.input, reversed(add.input)):
        mean = graph.producer(variance, "ReduceMean")
        square = graph.producer(mean.input[0], "Pow", "Mul") if mean is not None else None
        if mean is None or square is None or not _is_square(graph, square):
            continue
        if graph.is_constant(constant) or graph.scalar(constant) is not None:
            _replace(graph, _read_norm(graph, add, mean, square, constant))
            return


def _is_square(graph: FusionGraph, node: NodeProto) -> bool:
    return node.input[0] == node.input[1] if node.op_type == "Mul" else graph.scalar(node.input[1]) == 2


def _read_norm(graph: FusionGraph, add: NodeProto, mean: NodeProto, square: NodeProto, constant: str) -> _Norm:
    """The norm with the mean of a square, to which `add` adds `constant`."""
    epsilon, centred = graph.scalar(constant), square.input[0]
    if epsilon is None or epsilon < 0:
        raise NotFused(f"its epsilon is {epsilon or 'no scalar constant'}, expected one number that is not negative")
    if not _is_over_last(graph, mean):
        rank = graph.rank(mean.input[0])
        raise NotFused(
            f"its mean is over the axes {graph.axes(mean)} of rank {rank or 'unknown'}, expected the last, kept"
        )
    root = _quotient(graph, add)
    if root is None:
        raise NotFused("its variance is not the root that a difference is divided by")
    if not 0 < (graph.rank(centred) or 0) == graph.rank(root[1].output[0]):
        raise NotFused("its result has more dimensions than its input")
    source, differences = _read_source(graph, centred, root[2])
    norm = _Norm(source, bool(differences), epsilon, root[1], [add, mean, square, *root[0], *differences])
    _read_affine(graph, norm)
    if not graph.is_closed(norm.nodes, norm.end):
        raise NotFused("a tensor inside of it is read elsewhere too")
    if graph.quantized([norm.source, *norm.end.output]):
        raise NotFused("its tensors are quantized")
    return norm


def _is_over_last(graph: FusionGraph, mean: NodeProto) -> bool:
    """Whether a mean is over the last dimension alone, and keeps it."""
    rank, axes = graph.rank(mean.input[0]), graph.axes(mean)
    return walk.attributes(mean).get("keepdims", 1) == 1 and rank is not None and axes in ([-1], [rank - 1])


def _quotient(graph: FusionGraph, add: NodeProto) -> tuple[list[NodeProto], NodeProto, str] | None:
    """The nodes from a variance to the quotient by its root, the quotient, and its numerator."""
    root = graph.only_consumer(add.output[0], "Sqrt", "Pow")
    power = graph.scalar(root.input[1]) if root is not None and root.op_type == "Pow" else 0.5
    if root is None or power not in (0.5, -0.5) or root.input[0] != add.output[0]:
        return None
    nodes, last = [root], graph.only_consumer(root.output[0], "Div", "Reciprocal", "Mul")
    if last is None or (last.op_type == "Mul") != (power == -0.5):
        return None
    nodes.append(last)
    if last.op_type == "Reciprocal" or (last.op_type == "Div" and graph.scalar(last.input[0]) == 1):
        if last.op_type == "Div" and last.input[1] != root.output[0]:
            return None
        inverse, last = last.output[0], graph.only_consumer(last.output[0], "Mul")
        if last is None:
            return None
        nodes.append(last)
    elif last.op_type == "Div":
        return (nodes, last, last.input[0]) if last.input[1] == root.output[0] else None
    else:
        inverse = root.output[0]
    return nodes, last, next((name for name in last.input if name != inverse), "")


def _read_source(graph: FusionGraph, squared: str, numerator: str) -> tuple[str, list[NodeProto]]:
    """What a norm is of, and the nodes that subtract its mean; none of them for a norm of the root mean square.

    Older exporters compute the difference from the mean twice.
    """
    differences = [graph.producer(name, "Sub") for name in dict.fromkeys((squared, numerator))]
    found = [node for node in differences if node is not None]
    mean = graph.producer(found[0].input[1], "ReduceMean") if len(found) == len(differences) else None
    if (
        mean is not None
        and _is_over_last(graph, mean)
        and all(list(node.input) == [mean.input[0], mean.output[0]] for node in found)
    ):
        return mean.input[0], [*found, mean]
    if squared != numerator:
        raise NotFused("what it divides is not what it takes the square of")
    return squared, []


def _read_affine(graph: FusionGraph, norm: _Norm) -> None:
    """Add the casts, the scale and the bias to a norm."""
    cast, source = graph.only_consumer(norm.end.output[0], "Cast"), graph.producer(norm.source, "Cast")
    if source is not None and graph.elem_type(source.input[0]) in HALF_AND_FLOAT:
        before = graph.elem_type(source.input[0])
        after = cast.output[0] if cast is not None else norm.end.output[0]
        if graph.elem_type(after) == before:
            norm.source = source.input[0]
            norm.nodes.append(source)
            if cast is not None:
                norm.end = cast
                norm.nodes.append(cast)
    kind, width = graph.elem_type(norm.end.output[0]), (graph.shape(norm.source) or [None])[-1]
    if kind not in HALF_AND_FLOAT or kind != graph.elem_type(norm.source) or not isinstance(width, int):
        raise NotFused("it is not FLOAT or FLOAT16, from a tensor of that type with a known last dimension")
    for op in ("Mul", "Add"):
        if op == "Add" and not norm.centred:
            break  # the RMS operator has no bias
        node = graph.only_consumer(norm.end.output[0], op)
        if node is None:
            continue
        other = next((name for name in node.input if name != norm.end.output[0]), "")
        if not graph.is_constant(other) or graph.shape(other) != [width] or graph.elem_type(other) != kind:
            continue
        norm.end = node
        norm.nodes.append(node)
        if op == "Mul":
            norm.scale = other
        else:
            norm.bias = other


def _replace(graph: FusionGraph, norm: _Norm) -> None:
    width = (graph.shape(norm.source) or [0])[-1]
    kind = np.float16 if graph.elem_type(norm.source) == HALF_AND_FLOAT[1] else np.float32
    scale = norm.scale or graph.constant(np.ones(int(width or 0), kind), "norm_scale")
    inputs = [norm.source, scale, *([norm.bias] if norm.bias else [])]
    operator = "LayerNormalization" if norm.centred else "SimplifiedLayerNormalization"
    graph.builder.add(
        operator, inputs, walk.label(norm.end), out=norm.end.output[0], axis=-1, epsilon=float(norm.epsilon)
    )
    graph.replace("layer_norm" if norm.centred else "rms_norm", [norm.end])

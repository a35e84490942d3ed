"""Fuses norms: those in primitive operators into LayerNormalization or SimplifiedLayerNormalization (RMS), and the addition
in front of one into `com.microsoft` SkipLayerNormalization or SkipSimplifiedLayerNormalization.

`(x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * scale + bias`, or without the means of x, over the last dimension.
The square may be a power or a product, the root a divisor, a reciprocal or a negative power, and FP16 may be computed in
FP32 between two casts. The sum may have further readers (a residual): the operator gives it as its fourth output. A bias
that one of the addends has just been added to is taken in as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import HALF_AND_FLOAT, MICROSOFT, FusionGraph, NotFused
from trt_engine.graph.fusion.operator_demands import require_skip_norm


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


_SIMPLIFIED = ("SimplifiedLayerNormalization", "RMSNormalization")
NORMS = ("LayerNormalization", *_SIMPLIFIED)


def fuse_skip_layer_norm(graph: FusionGraph, norm: NodeProto) -> None:
    """Replace a norm of a sum of two tensors, and the sum."""
    add = graph.producer(norm.input[0], "Add")
    if add is not None and add.input[0] != add.input[1] and not any(map(graph.is_constant, add.input)):
        _require(graph, norm, add)
        _replace_sum(graph, norm, add)


def _require(graph: FusionGraph, norm: NodeProto, add: NodeProto) -> None:
    """`NotFused` where a norm and its sum cannot be one operator."""
    given = walk.attributes(norm)
    first, second, total = ((graph.repeated_shape(name) or []) for name in (*add.input, norm.input[0]))
    require_skip_norm(first, second)
    if not isinstance(total[-1], int) or given.get("axis", -1) not in (-1, 2) or given.get("stash_type", 1) != 1:
        raise NotFused("it is not over the last of three dimensions, of a known size")
    if any(norm.output[at] for at in range(1, len(norm.output))):
        raise NotFused("its mean is used")
    stored = [name for name in norm.input[1:] if name]
    if not stored or not all(
        graph.is_constant(name) and list(graph.constants[name].dims) == total[-1:] for name in stored
    ):
        raise NotFused(f"its scale and bias are not constants of {total[-1]} elements")
    graph.require_floats([*add.input, *norm.input[:1], *stored], norm.output[:1])


def _replace_sum(graph: FusionGraph, norm: NodeProto, add: NodeProto) -> None:
    addends = list(add.input)
    bias, removed = "", [norm]
    for at, name in enumerate(addends):
        found = _bias_of(graph, name)
        if found is not None:
            addends = [found[0], addends[1 - at]]
            bias = found[1]
            break
    simplified = norm.op_type in _SIMPLIFIED
    inputs = [*addends, norm.input[1]]
    if simplified:
        inputs.append(bias)
    else:
        inputs += [norm.input[2] if len(norm.input) > 2 else "", bias]
    while not inputs[-1]:
        inputs.pop()
    outputs = [norm.output[0]]
    if len(graph.consumers(add.output[0])) > 1 or add.output[0] in graph.outputs:
        outputs += ["", "", add.output[0]]
        removed.append(add)
    operator = "SkipSimplifiedLayerNormalization" if simplified else "SkipLayerNormalization"
    graph.builder.add_multi_output(
        operator, inputs, walk.label(norm), len(outputs), out=outputs, domain=MICROSOFT,
        epsilon=walk.attributes(norm).get("epsilon", 1e-5),
    )  # fmt: skip
    graph.replace("skip_layer_norm", removed)


def _bias_of(graph: FusionGraph, name: str) -> tuple[str, str] | None:
    """The product and the constant bias that make an addend; None if it is another node's result, or used elsewhere."""
    add = graph.producer(name, "Add")
    if add is None or not graph.is_private(name):
        return None
    bias = next((item for item in add.input if graph.is_constant(item)), None)
    other = next((item for item in add.input if item != bias), "")
    shape = graph.shape(other)
    if bias is None or shape is None or len(shape) != 3 or list(graph.constants[bias].dims) != shape[-1:]:
        return None
    if graph.producer(other, "MatMul") is None or not graph.is_private(other):
        return None
    return other, bias

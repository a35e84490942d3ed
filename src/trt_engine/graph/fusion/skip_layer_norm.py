"""Fuses an addition and the norm behind it into `com.microsoft` SkipLayerNormalization or SkipSimplifiedLayerNormalization.

The sum may have further readers (a residual): the operator gives it as its fourth output. A bias that one of the addends
has just been added to is taken in as well.
"""

from __future__ import annotations

from onnx import NodeProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import MICROSOFT, FusionGraph, NotFused
from trt_engine.graph.fusion.operator_demands import require_skip_norm

_SIMPLIFIED = ("SimplifiedLayerNormalization", "RMSNormalization")
NORMS = ("LayerNormalization", *_SIMPLIFIED)


def fuse_skip_layer_norm(graph: FusionGraph, norm: NodeProto) -> None:
    """Replace a norm of a sum of two tensors, and the sum."""
    add = graph.producer(norm.input[0], "Add")
    if add is not None and add.input[0] != add.input[1] and not any(map(graph.is_constant, add.input)):
        _require(graph, norm, add)
        _replace(graph, norm, add)


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


def _replace(graph: FusionGraph, norm: NodeProto, add: NodeProto) -> None:
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

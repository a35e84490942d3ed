"""Fuses the bias of a linear layer and the activation behind it: Gelu and its approximations.

An activation written out is first put together: Gelu as `x * 0.5 * (1 + erf(x / sqrt 2))` in any order, its tanh form, and
`x * sigmoid(alpha x)` (QuickGelu, which takes no bias).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from onnx import NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.fusion.fusion_graph import HALF_AND_FLOAT, MICROSOFT, FusionGraph, NotFused

_TANH_SCALE, _TANH_CUBE = math.sqrt(2 / math.pi), 0.044715
_MAX_FACTORS = 6
_TOLERANCE = 1e-3
"""Relative difference of a stored constant from the formula's, as FP16 rounds it."""


def compose_gelu(graph: FusionGraph) -> None:
    """Replace Gelu that is written out, by its error function or its tanh, with Gelu and FastGelu of ONNX Runtime."""
    graph.rewrite_each("gelu", ("Erf",), _fuse_erf)
    graph.rewrite_each("fast_gelu", ("Tanh",), _fuse_tanh)


def _close(value: float | None, wanted: float) -> bool:
    return value is not None and abs(value - wanted) <= _TOLERANCE * abs(wanted)


def _product_factors(graph: FusionGraph, end: NodeProto, inner: str) -> tuple[float, Counter[str]]:
    """A product as its scalar factor and its other factors, with their powers.

    Products and powers other than `inner` that it alone reads are entered.
    """
    scale, factors = 1.0, Counter[str]()
    waiting = list(end.input)
    while waiting:
        name = waiting.pop()
        made = graph.producer(name, "Mul", "Div", "Pow") if name != inner and graph.is_private(name) else None
        if (value := graph.scalar(name)) is not None:
            scale *= value
        elif made is not None and made.op_type == "Pow" and graph.scalar(made.input[1]) in (2, 3):
            factors[made.input[0]] += int(graph.scalar(made.input[1]) or 0)
        elif made is not None and (multiplied := graph.factor(made)) is not None:
            scale *= multiplied[1]
            waiting.append(multiplied[0])
        elif made is not None and made.op_type == "Mul" and len(waiting) + factors.total() < _MAX_FACTORS:
            waiting += made.input
        else:
            factors[name] += 1
    return scale, factors


def _ends(graph: FusionGraph, name: str) -> Iterator[NodeProto]:
    """The products behind a tensor, nearest first."""
    for _ in range(3):
        node = graph.only_consumer(name, "Mul")
        if node is None:
            return
        yield node
        name = node.output[0]


def _fuse_erf(graph: FusionGraph, erf: NodeProto) -> None:
    """`x * 0.5 * (1 + erf(x / sqrt 2))`."""
    source = graph.producer(erf.input[0])
    scaled = graph.factor(source) if source is not None else None
    if scaled is None or not _close(scaled[1], math.sqrt(0.5)):
        factor = "no constant" if scaled is None else f"{scaled[1]:.6g}"
        raise NotFused(f"its argument is x times {factor}, expected the root of 0.5")
    if not graph.is_private(erf.input[0]):
        raise NotFused("its argument is read elsewhere too")
    _fuse_half_product(graph, erf, scaled[0], "none")


def _fuse_tanh(graph: FusionGraph, tanh: NodeProto) -> None:
    """`x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`, or with x in front of the sum: `x * (1 + 0.044715 x^2)`."""
    source = graph.producer(tanh.input[0], "Mul")
    if source is None:
        return
    scale, factors = _product_factors(graph, source, "")
    for name in factors:
        add = graph.producer(name, "Add")
        if add is None:
            continue
        for first, second in (add.input, reversed(add.input)):
            product = graph.producer(second, "Mul")
            if product is None:
                continue
            cube, powers = _product_factors(graph, product, "")
            x = next(iter(powers), "")
            inside = first == x and factors == Counter({name: 1}) and powers == Counter({x: 3})
            before = graph.scalar(first) == 1 and factors == Counter({name: 1, x: 1}) and powers == Counter({x: 2})
            if not inside and not before:
                continue
            if not _close(scale, _TANH_SCALE) or not _close(cube, _TANH_CUBE):
                raise NotFused(
                    f"its numbers are {scale:.6g} and {cube:.6g}, expected {_TANH_SCALE:.6g} and {_TANH_CUBE:.6g}"
                )
            if not all(map(graph.is_private, (tanh.input[0], name, second))):
                raise NotFused("its argument is read elsewhere too")
            _fuse_half_product(graph, tanh, x, "tanh")
            return


def fuse_quick_gelu(graph: FusionGraph, sigmoid: NodeProto) -> None:
    """`x * sigmoid(alpha x)`."""
    source, gate = graph.producer(sigmoid.input[0]), sigmoid.output[0]
    x, alpha = (graph.factor(source) if source is not None else None) or ("", 0.0)
    end = next((node for node in graph.consumers(gate) if sorted(node.input) == sorted([x, gate])), None)
    if end is None or end.op_type != "Mul":
        return
    if not graph.is_private(sigmoid.input[0]) or not graph.is_private(gate):
        raise NotFused("its argument or its result is read elsewhere too")
    graph.require_floats([x], end.output)
    graph.builder.add("QuickGelu", [x], walk.label(end), out=end.output[0], domain=MICROSOFT, alpha=alpha)
    graph.replace("quick_gelu", [end])


def _fuse_half_product(graph: FusionGraph, inner: NodeProto, x: str, approximate: str) -> None:
    """Replace the product of x, one half and (1 + `inner`)."""
    add = graph.only_consumer(inner.output[0], "Add")
    one = next((name for name in add.input if name != inner.output[0]), "") if add is not None else ""
    if add is None or graph.scalar(one) != 1:
        raise NotFused("its result is not read by a sum with 1 alone")
    if (kind := graph.elem_type(x)) not in HALF_AND_FLOAT:
        raise NotFused(f"its tensors are {TensorProto.DataType.Name(kind)}, expected FLOAT or FLOAT16")
    for end in _ends(graph, add.output[0]):
        half, factors = _product_factors(graph, end, add.output[0])
        same_rank = graph.rank(end.output[0]) == graph.rank(x)  # a constant of more dimensions adds some
        if _close(half, 0.5) and factors == Counter({x: 1, add.output[0]: 1}) and same_rank:
            stem, out = walk.label(end), end.output[0]
            if approximate == "tanh":
                graph.builder.add("FastGelu", [x], stem, out=out, domain=MICROSOFT)
            else:
                graph.builder.add("Gelu", [x], stem, out=out, domain=MICROSOFT)
            graph.replace("fast_gelu" if approximate == "tanh" else "gelu", [end])
            return
    raise NotFused("the sum with 1 is not multiplied by x and 0.5 alone, in the shape of x")


def fuse_bias_gelu(graph: FusionGraph, gelu: NodeProto) -> None:
    """Take in the bias that is added before the activation."""
    add = graph.producer(gelu.input[0], "Add")
    bias = next((name for name in add.input if graph.is_constant(name)), None) if add is not None else None
    if add is None or bias is None or (gelu.op_type == "FastGelu" and len(gelu.input) > 1):
        return
    other = next((name for name in add.input if name != bias), "")
    shape, dims = graph.shape(other), list(graph.constants[bias].dims)
    if not shape or dims != shape[-1:]:
        wanted = shape[-1] if shape and isinstance(shape[-1], int) else "the size of the last dimension, known"
        raise NotFused(f"its bias has the shape {dims}, expected [{wanted}]")
    if not graph.is_private(gelu.input[0]):
        raise NotFused("its sum with the bias is read elsewhere too")
    graph.require_floats([bias, other], [*add.output, *gelu.output])
    tanh = gelu.op_type == "FastGelu" or walk.attributes(gelu).get("approximate", b"none") == b"tanh"
    graph.builder.add(
        "FastGelu" if tanh else "BiasGelu", [other, bias], walk.label(gelu), out=gelu.output[0], domain=MICROSOFT
    )
    graph.replace("bias_gelu", [gelu])

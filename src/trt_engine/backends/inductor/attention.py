"""Attention in a graph: MatMul, scale, mask, Softmax and MatMul as one node."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from trt_engine.backends.inductor.linear import GraphView
from trt_engine.graph import walk

ATTENTION = "_Attention"
"""Our own operator: q, transposed k, v and a mask, with the factor `scale` between the first product and Softmax over
`axis`; with `guard` rows that are not numbers count as zeros; with `wide` mask and Softmax are in FP32."""
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@dataclass(slots=True)
class _Match:
    """The nodes of one attention, from Softmax back to the first product."""

    nodes: list[NodeProto]
    name: str
    """The tensor that is looked at next."""
    mask: str = ""
    scale: float = 1.0
    axis: int = -1
    guard: bool = False
    """With IsNaN and Where, by which exporters make masked rows zero."""
    casts: list[int] = field(default_factory=list)
    """Types that are cast to, from Softmax's end: of a cast network that keeps what overflows in FP32."""

    @property
    def is_computed_in_one_type(self) -> bool:
        """Whether the types between the products are those of the products, or FP32 for all between."""
        return not self.casts or (
            len(self.casts) == 2 and self.casts[0] != TensorProto.FLOAT and self.casts[1] == TensorProto.FLOAT
        )


class _Finder(GraphView):
    """Looks attention up in a graph."""

    def take_cast(self, match: _Match, readers: int = 1) -> bool:
        """Step over a cast between floating-point types."""
        cast = self.inner(match.name, "Cast", readers=readers)
        if cast is None or walk.attributes(cast).get("to") not in _FLOATS:
            return False
        match.nodes.append(cast)
        match.casts.append(walk.attributes(cast)["to"])
        match.name = cast.input[0]
        return True

    def softmax(self, last: NodeProto) -> _Match | None:
        """Softmax before the last product, and what makes masked rows zero."""
        match, readers = _Match([], last.input[0]), 1
        self.take_cast(match)
        if (chosen := self.inner(match.name, "Where")) is not None:
            test, kept = self.makers.get(chosen.input[0]), chosen.input[2]
            if test is None or self.readers[kept] != 2 or self.scalar(chosen.input[1]) != 0.0:
                return None
            if self.readers[chosen.input[0]] != 1 or chosen.input[0] in self.outputs:
                return None
            if test.op_type != "IsNaN" or test.input[0] != kept:
                return None
            match.nodes += [test, chosen]
            match.name, match.guard, readers = kept, True, 2
            readers = 1 if self.take_cast(match, readers) else readers
        node = self.inner(match.name, "Softmax", readers=readers)
        if node is None or (axis := walk.attributes(node).get("axis", -1)) not in (-1, 3):
            return None
        match.nodes.append(node)
        match.name, match.axis = node.input[0], axis
        self.take_cast(match)
        return match

    def take_mask(self, match: _Match) -> bool:
        """Step over the addition of a mask; False where it is not known which side is the mask."""
        added = self.inner(match.name, "Add")
        if added is not None:
            product = next((at for at in (0, 1) if self.is_scores(added.input[at])), None)
            if product is None:
                return False
            match.nodes.append(added)
            match.name, match.mask = added.input[product], added.input[1 - product]
            self.take_cast(match)
        return True

    def is_scores(self, name: str) -> bool:
        """Whether a tensor may be the product of q and k."""
        cast = self.inner(name, "Cast")
        return self.inner(cast.input[0] if cast is not None else name, "MatMul", "Mul", "Div") is not None

    def take_scale(self, match: _Match) -> bool:
        """Step over the product with a factor; False for one that is not a constant number."""
        scaled = self.inner(match.name, "Mul", "Div")
        if scaled is not None:
            factor = next((at for at in (1, 0) if self.scalar(scaled.input[at]) is not None), None)
            number = None if factor is None else self.scalar(scaled.input[factor])
            if factor is None or not number or (scaled.op_type == "Div" and factor == 0):
                return False
            match.nodes.append(scaled)
            match.scale = number if scaled.op_type == "Mul" else 1.0 / number
            match.name = scaled.input[1 - factor]
            self.take_cast(match)
        return True

    def scalar(self, name: str) -> float | None:
        tensor = self.constants.get(name)
        if tensor is None or len(tensor.dims) > 1 or int(np.prod(tensor.dims, dtype=np.int64)) != 1:
            return None
        return float(numpy_helper.to_array(tensor).reshape(-1)[0])


def fuse_attention(graph: GraphProto) -> int:
    """Replace each attention by one node `_Attention`, in place; returns how many.

    PyTorch's attention kernels compute it without writing the scores (Dao et al. 2022).
    """
    finder, fused = _Finder(graph), 0
    for last in list(graph.node):
        if last.op_type != "MatMul" or (match := finder.softmax(last)) is None:
            continue
        if not (finder.take_mask(match) and finder.take_scale(match)):
            continue
        if (scores := finder.inner(match.name, "MatMul")) is None or not match.is_computed_in_one_type:
            continue
        inputs = [*scores.input, last.input[1], match.mask]
        made = helper.make_node(
            ATTENTION, inputs, last.output, name=last.name, scale=match.scale, axis=match.axis, guard=int(match.guard),
            wide=int(bool(match.casts)),
        )  # fmt: skip
        last.CopyFrom(made)
        for node in [*match.nodes, scores]:
            graph.node.remove(node)
        fused += 1
    return fused

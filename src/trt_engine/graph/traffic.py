"""Bytes a node reads and writes, from the shapes of its tensors: what it would move if nothing stayed in a cache."""

from __future__ import annotations

from trt_engine.graph import walk
from trt_engine.graph.trace import Fact, Step
from trt_engine.tensors import DTYPES

__all__ = ["bytes_of", "nbytes"]

_BITS = {item.onnx: item.bits for item in DTYPES.values() if item.name != "string"}
_NOTHING = frozenset(
    "Reshape Squeeze Unsqueeze Flatten Identity Dropout Shape Size Constant ConstantOfShape Range If Loop Scan".split()
)
"""What gives memory another shape or says how large it is; of what has bodies, the bodies move the data."""
_PICKS = frozenset("Gather GatherElements GatherND Slice".split())
"""What reads as much of its data as it writes."""


def bytes_of(step: Step) -> int | None:
    """Bytes of one run of a node: inputs, weights, outputs; None where a size or a type is not known."""
    if step.folded or (walk.domain_of(step.node) == "" and step.node.op_type in _NOTHING):
        return 0
    written = [nbytes(fact) for name, fact in zip(step.node.output, step.outputs, strict=False) if name]
    inputs = [fact for fact in step.inputs if fact is not None]
    if walk.domain_of(step.node) == "" and step.node.op_type in _PICKS:
        read = [*written, *(nbytes(fact) for fact in inputs[1:])]
    else:
        read = [nbytes(fact) for fact in inputs]
    total = 0
    for size in (*written, *read):
        if size is None:
            return None
        total += size
    return total


def nbytes(fact: Fact) -> int | None:
    """Bytes of one tensor as they lie in memory; None where its size or type is not known."""
    if not fact.sized or fact.elem not in _BITS:
        return None
    return (fact.elements * _BITS[fact.elem] + 7) // 8

"""Readers, writers and shapes of a model's tensors, looked up by rules."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnx import NodeProto

from trt_engine.graph import walk
from trt_engine.graph.edit_graph import consumers_of
from trt_engine.graph.operator_support import Target
from trt_engine.graph.shape_inference import TensorInfo, Trace, flatten
from trt_engine.graph.tensorrt_operators import UnsupportedNode
from trt_engine.model import Model
from trt_engine.records.base import Finding
from trt_engine.tensors import Shape, TensorSpec, format_shape

_LAYOUT = frozenset("Unsqueeze Squeeze Reshape Transpose Identity Expand".split())


@dataclass(slots=True)
class ModelView:
    """The model as the rules read it."""

    model: Model
    trace: Trace
    shapes: Mapping[str, Shape]
    """Shapes of the trace; empty if dynamic sizes other than the batch were not given."""
    nodes: list[NodeProto]
    makers: dict[str, NodeProto] = field(default_factory=dict)
    readers: dict[str, list[NodeProto]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    facts: Mapping[str, TensorInfo] = field(default_factory=dict)
    """What the trace knows of each tensor, those of bodies included."""
    target: Target = "all"
    tensorrt: str = ""
    rtx: bool = False
    """True for TensorRT-RTX."""
    assumed_shapes: bool = False
    given: frozenset[str] = frozenset()
    """Inputs whose shapes were given."""
    probes: tuple[Finding, ...] = ()
    """Findings of the shape selection."""
    gaps: Sequence[UnsupportedNode] = ()
    parsed: bool = False
    """True if a real parser checked the whole model."""

    def elem(self, name: str) -> int:
        fact = self.facts.get(name)
        return fact.elem if fact is not None else 0

    def first(self, *kinds: str) -> str | None:
        """Label of the first node of these operators."""
        return next((walk.label(node) for node in self.nodes if node.op_type in kinds), None)

    def producer_past_layout(self, name: str) -> NodeProto | None:
        """The node that produces a tensor, skipping layout operators."""
        for _ in range(16):
            node = self.makers.get(name)
            if node is None or node.op_type not in _LAYOUT or not node.input:
                return node
            name = node.input[0]
        return None

    def downstream_nodes(self, node: NodeProto, most: int = 64) -> Iterator[NodeProto]:
        """Up to `most` nodes that read a node's results, directly or indirectly, nearest first."""
        queue, met = deque(node.output), set[int]()
        while queue and most > 0:
            for reader in self.readers.get(queue.popleft(), ()):
                if id(reader) not in met:
                    met.add(id(reader))
                    most -= 1
                    yield reader
                    queue.extend(reader.output)


Rule = Callable[[ModelView], Iterable[Finding]]


def analyse(model: Model, traced: Trace, shapes: Mapping[str, Shape], **lint: Any) -> ModelView:
    """The model as rules read it; `lint` are the fields that only the rules of `lint` read."""
    nodes = [place.node for place in model.graph.nodes]
    makers = {name: node for node in nodes for name in node.output}
    counts = Counter([node.op_type for node in nodes])
    facts: dict[str, TensorInfo] = {}
    for step in flatten(traced.nodes):
        named = (*zip(step.node.input, step.inputs, strict=False), *zip(step.node.output, step.outputs, strict=False))
        facts |= {name: fact for name, fact in named if fact is not None}
    facts |= traced.tensors
    return ModelView(model, traced, shapes, nodes, makers, consumers_of(nodes), counts, facts, **lint)


def error(code: str, message: str, location: str | None = None, hint: str | None = None) -> Finding:
    return Finding(code, "error", message, location, hint)


def warning(code: str, message: str, location: str | None = None, hint: str | None = None) -> Finding:
    return Finding(code, "warning", message, location, hint)


def info(code: str, message: str, location: str | None = None, hint: str | None = None) -> Finding:
    return Finding(code, "info", message, location, hint)


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Sort findings: errors, then warnings, then infos."""
    order = {"error": 0, "warning": 1, "info": 2}
    return tuple(sorted(findings, key=lambda item: order[item.severity]))


def truncate(findings: Iterable[Finding], max_per_code: int = 10) -> Iterator[Finding]:
    """At most `most` findings of each code; the last one gives the number omitted."""
    findings = list(findings)
    counts = Counter(item.code for item in findings)
    met: Counter[str] = Counter()
    for item in findings:
        met[item.code] += 1
        if met[item.code] == max_per_code < counts[item.code]:
            yield replace(item, message=f"{item.message} (and {counts[item.code] - max_per_code} more like this)")
        elif met[item.code] <= max_per_code:
            yield item


def image_input(inputs: Iterable[TensorSpec]) -> TensorSpec | None:
    """First input that is a batch of images."""
    return next((spec for spec in inputs if spec.image_layout is not None), None)


def format_shapes(shapes: Mapping[str, Shape]) -> str:
    return ", ".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items()) or "the stated sizes"

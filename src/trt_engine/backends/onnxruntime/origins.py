"""Which nodes of the model each node of ONNX Runtime's optimised graph was made of.

A fused node keeps the last tensor's name where its layout is the model's, and a name made from one of its nodes elsewhere:
`Conv_0_nchwc`, `Mul_0/QuickGeluFusion/`. From both, the model's nodes between its inputs and its output are found; what
cannot be told by tensors is told by name alone, and what neither tells stays empty.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from onnx import GraphProto, ModelProto, NodeProto

from trt_engine.graph import walk
from trt_engine.graph.trace import attributes

__all__ = ["base_name", "origins"]

_SUFFIX = re.compile(r"(?:_nchwc|_nhwc|_quant|/\w*Fusion\w*/?|/DuplicateQDQ\w*/?|_token_\d+)+$")
_PREFIX = re.compile(r"^fused[ _]")
_RELAYS = frozenset("ReorderInput ReorderOutput MemcpyToHost MemcpyFromHost".split())
"""What ONNX Runtime puts in: the same values in another place or layout."""
_SUM = 3
"""The input of a blocked convolution that is added to its result."""
_MOST = 200
"""More nodes than this are no fusion: a tensor's name was met again by chance."""


def base_name(name: str) -> str:
    """The name of the model's node that ONNX Runtime made this one from."""
    return _SUFFIX.sub("", _PREFIX.sub("", name))


def origins(built: ModelProto, model: ModelProto | None) -> dict[str, tuple[str, ...]]:
    """The model's nodes, by their labels and in order, for each first output of the optimised graph's main nodes.

    Nodes in bodies are told by name. Without the model a name made from a node's is all there is.
    """
    if model is None:
        return {_key(node): _by_name(node) for graph in walk.graphs(built) for node in graph.node}
    known = _Model(model.graph)
    found: dict[str, tuple[str, ...]] = {}
    for node in built.graph.node:
        found[_key(node)] = known.made_of(node)
    labels = {walk.label(place.node) for place in walk.nodes(model)}
    for graph in list(walk.graphs(built))[1:]:
        for node in graph.node:
            found.setdefault(_key(node), tuple(name for name in _by_name(node) if name in labels))
    return found


def _key(node: NodeProto) -> str:
    return next((name for name in node.output if name), node.name)


def _by_name(node: NodeProto) -> tuple[str, ...]:
    if not node.name or (node.op_type in _RELAYS):
        return ()
    return (base_name(node.name),)


class _Model:
    """The model's main graph, and which of its nodes are spoken for."""

    def __init__(self, graph: GraphProto) -> None:
        self.makers = {name: node for node in graph.node for name in node.output if name}
        self.order = {id(node): index for index, node in enumerate(graph.node)}
        self.by_name = {node.name: node for node in graph.node if node.name}
        self.readers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in set(node.input):
                self.readers.setdefault(name, []).append(node)
        self.counted = Counter(name for node in graph.node for name in node.input)
        self.tensors = {*self.makers, *self.counted, *(value.name for value in graph.input)}
        self.stands_for: dict[str, str] = {}
        """The model's tensor behind a tensor of the optimised graph that has a name of its own."""
        self.taken: set[int] = set()

    def made_of(self, node: NodeProto) -> tuple[str, ...]:
        """The model's nodes behind one node; to be asked in the graph's order."""
        outputs = [name for name in node.output if name]
        inputs = [self.behind(name) for name in node.input if name]
        if node.op_type in _RELAYS:
            if inputs and inputs[0] is not None:
                self.stands_for.update({name: inputs[0] for name in outputs if name not in self.tensors})
            return ()
        ends = [name for name in outputs if name in self.makers]
        maker = None
        if not ends:
            base = base_name(node.name)  # of a node, or of the tensor that a convolution in blocks replaced
            maker = self.by_name.get(base) or self.makers.get(base) or self._only_reader(inputs, node.op_type)
            ends = [name for name in maker.output if name] if maker is not None else []
        stop = {name for name in inputs if name is not None}
        nodes = self._between(ends, stop)
        if maker is not None:
            ends, nodes = self._with_what_follows(node, ends, nodes, stop)
            self.stands_for.update(zip(outputs, ends, strict=False))
        self.taken.update(id(item) for item in nodes)
        return tuple(walk.label(item) for item in nodes)

    def behind(self, name: str) -> str | None:
        return name if name in self.tensors else self.stands_for.get(name)

    def _only_reader(self, inputs: Sequence[str | None], kind: str) -> NodeProto | None:
        """The one node of that kind that reads the first input and is not spoken for; for models without names."""
        first = inputs[0] if inputs else None
        found = [
            node for node in self.readers.get(first or "", ()) if node.op_type == kind and id(node) not in self.taken
        ]
        return found[0] if len(found) == 1 else None

    def _between(self, ends: Iterable[str], stop: set[str]) -> list[NodeProto]:
        """The nodes that make these tensors from those, in the model's order; none that another node was made of."""
        found: dict[int, NodeProto] = {}
        waiting = list(ends)
        while waiting:
            maker = self.makers.get(waiting.pop())
            if maker is None or id(maker) in found or id(maker) in self.taken:
                continue
            if maker.op_type == "Constant":
                continue
            found[id(maker)] = maker
            if len(found) > _MOST:
                return []
            waiting += [name for name in maker.input if name not in stop]
        return sorted(found.values(), key=lambda item: self.order[id(item)])

    def _with_what_follows(
        self, node: NodeProto, ends: list[str], nodes: list[NodeProto], stop: set[str]
    ) -> tuple[list[str], list[NodeProto]]:
        """The sum and the activation that a convolution took in and whose names it does not have."""
        wanted = []
        if len(node.input) > _SUM and node.input[_SUM] and not any(item.op_type == "Add" for item in nodes):
            wanted.append("Add")
        activation = attributes(node).get("activation")
        if isinstance(activation, bytes) and nodes and nodes[-1].op_type != activation.decode(errors="replace"):
            wanted.append(activation.decode(errors="replace"))
        for kind in wanted:
            readers = self.readers.get(ends[0], []) if len(ends) == 1 else []
            if len(readers) != 1 or readers[0].op_type != kind:
                break
            ends = [name for name in readers[0].output if name]
            nodes = self._between(ends, stop)
        return ends, nodes

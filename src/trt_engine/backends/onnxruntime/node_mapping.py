"""Maps nodes of ONNX Runtime's optimised graph to nodes of the model.

A fused node keeps its output tensor's name if the layout is unchanged, else gets a name derived from a node:
`Conv_0_nchwc`, `Mul_0/QuickGeluFusion/`. The model's nodes between its inputs and output are collected; otherwise nodes are
matched by name, or not at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from onnx import GraphProto, ModelProto, NodeProto

from trt_engine.graph import walk

_SUFFIX = re.compile(r"(?:_bn_nchwc|_nchwc|_nhwc|_quant|/(?>\w*?Fusion\w*)/?|/DuplicateQDQ\w*/?|_token_\d+)+$")
_PREFIX = re.compile(r"^fused[ _]")
_MAX_SUFFIX = 512
"""Characters of a name searched for suffixes."""
_LAYOUT_OPS = frozenset("ReorderInput ReorderOutput MemcpyToHost MemcpyFromHost".split())
"""Copy and layout operators inserted by ONNX Runtime."""
_SUM_INPUT = 3
"""Index of the fused Add input of a blocked convolution."""
_MAX_FUSED_NODES = 200
"""Maximum nodes of a fusion; more means an accidental name match."""


def base_name(name: str) -> str:
    """The name of the model's node from which ONNX Runtime derived `name`."""
    name = _PREFIX.sub("", name)
    return name[:-_MAX_SUFFIX] + _SUFFIX.sub("", name[-_MAX_SUFFIX:])


def map_nodes(built: ModelProto, model: ModelProto | None) -> dict[str, tuple[str, ...]]:
    """Labels of the model's nodes by first output of each optimised node, in order.

    Nodes in subgraphs, and all nodes without the model, are matched by name.
    """
    if model is None:
        return {_key(node): _by_name(node) for graph in walk.graphs(built) for node in graph.node}
    known = _SourceGraph(model.graph)
    found: dict[str, tuple[str, ...]] = {}
    for node in built.graph.node:
        found[_key(node)] = known.source_nodes(node)
    labels = {walk.label(place.node) for place in walk.nodes(model)}
    for graph in list(walk.graphs(built))[1:]:
        for node in graph.node:
            found.setdefault(_key(node), tuple(name for name in _by_name(node) if name in labels))
    return found


def _key(node: NodeProto) -> str:
    return next((name for name in node.output if name), node.name)


def _by_name(node: NodeProto) -> tuple[str, ...]:
    if not node.name or (node.op_type in _LAYOUT_OPS):
        return ()
    return (base_name(node.name),)


class _SourceGraph:
    """The model's main graph, and its nodes mapped so far."""

    def __init__(self, graph: GraphProto) -> None:
        self.producers = {name: node for node in graph.node for name in node.output if name}
        self.order = {id(node): index for index, node in enumerate(graph.node)}
        self.by_name = {node.name: node for node in graph.node if node.name}
        self.consumers: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in set(node.input):
                self.consumers.setdefault(name, []).append(node)
        self.use_counts = Counter(name for node in graph.node for name in node.input)
        self.tensors = {*self.producers, *self.use_counts, *(value.name for value in graph.input)}
        self.renamed_tensors: dict[str, str] = {}
        """The model's tensor for a renamed tensor of the optimised graph."""
        self.mapped: set[int] = set()

    def source_nodes(self, node: NodeProto) -> tuple[str, ...]:
        """The model's nodes fused into `node`; call in graph order."""
        outputs = [name for name in node.output if name]
        inputs = [name if name in self.tensors else self.renamed_tensors.get(name) for name in node.input if name]
        if node.op_type in _LAYOUT_OPS:
            if inputs and inputs[0] is not None:
                self.renamed_tensors.update({name: inputs[0] for name in outputs if name not in self.tensors})
            return ()
        ends = [name for name in outputs if name in self.producers]
        maker = None
        if not ends:
            base = base_name(node.name)  # of a node, or of a tensor replaced by a blocked convolution
            maker = self.by_name.get(base) or self.producers.get(base) or self._only_reader(inputs, node.op_type)
            ends = [name for name in maker.output if name] if maker is not None else []
        stop = {name for name in inputs if name is not None}
        nodes = self._nodes_between(ends, stop)
        if maker is not None:
            ends, nodes = self._with_fused_successors(node, ends, nodes, stop)
            self.renamed_tensors.update(zip(outputs, ends, strict=False))
        self.mapped.update(id(item) for item in nodes)
        return tuple(walk.label(item) for item in nodes)

    def _only_reader(self, inputs: Sequence[str | None], kind: str) -> NodeProto | None:
        """The only unmapped reader of the first input with this operator type; for models without names."""
        first = inputs[0] if inputs else None
        found = [
            node for node in self.consumers.get(first or "", ()) if node.op_type == kind and id(node) not in self.mapped
        ]
        return found[0] if len(found) == 1 else None

    def _nodes_between(self, ends: Iterable[str], stop: set[str]) -> list[NodeProto]:
        """Unmapped nodes between `stop` and `ends`, in model order."""
        found: dict[int, NodeProto] = {}
        waiting = list(ends)
        while waiting:
            maker = self.producers.get(waiting.pop())
            if maker is None or id(maker) in found or id(maker) in self.mapped:
                continue
            if maker.op_type == "Constant":
                continue
            found[id(maker)] = maker
            if len(found) > _MAX_FUSED_NODES:
                return []
            waiting += [name for name in maker.input if name not in stop]
        return sorted(found.values(), key=lambda item: self.order[id(item)])

    def _with_fused_successors(
        self, node: NodeProto, ends: list[str], nodes: list[NodeProto], stop: set[str]
    ) -> tuple[list[str], list[NodeProto]]:
        """Extend by the Add and activation fused into a convolution."""
        wanted = []
        if len(node.input) > _SUM_INPUT and node.input[_SUM_INPUT] and not any(item.op_type == "Add" for item in nodes):
            wanted.append("Add")
        activation = walk.attributes(node).get("activation")
        if isinstance(activation, bytes) and nodes and nodes[-1].op_type != activation.decode(errors="replace"):
            wanted.append(activation.decode(errors="replace"))
        for kind in wanted:
            readers = self.consumers.get(ends[0], []) if len(ends) == 1 else []
            if len(readers) != 1 or readers[0].op_type != kind:
                break
            ends = [name for name in readers[0].output if name]
            nodes = self._nodes_between(ends, stop)
        return ends, nodes

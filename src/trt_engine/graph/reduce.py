"""Reduces a rejected graph to its smallest rejected part by delta debugging over nodes.

The method is ddmin (Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002), after cheaper
attempts: the named node, its producers, then halves from both ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from trt_engine.errors import ModelError
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import inline_functions, replace_items
from trt_engine.graph.shape_inference import TensorInfo, flatten, trace
from trt_engine.tensors import Shape

log = logging.getLogger(__name__)

RejectCheck = Callable[[ModelProto], bool]
"""Whether a graph is rejected for the same cause."""


class _CandidateLimit(Exception):
    """The candidate limit is reached."""


@dataclass(frozen=True, slots=True)
class _BaseGraph:
    """The graph that parts are taken from, and its traced tensors."""

    proto: ModelProto
    facts: Mapping[str, TensorInfo]
    shapes: Mapping[str, Shape] | None = None

    def part(self, indices: Sequence[int]) -> ModelProto | None:
        return extract_subgraph(self.proto, indices, self.facts, shapes=self.shapes)


class Reduction:
    """Search for the smallest rejected part of `proto`; `best` is the smallest found so far.

    With `shapes` the graph has these static shapes, else dynamic sizes stay. `rejects` is called at most `max_candidates`
    times.
    """

    def __init__(
        self,
        proto: ModelProto,
        rejects: RejectCheck,
        *,
        shapes: Mapping[str, Shape] | None = None,
        max_candidates: int = 300,
    ) -> None:
        self._rejects = rejects
        self._max_candidates = max_candidates
        self._base = _BaseGraph(proto, trace(proto, shapes or {}).tensors, shapes)
        self._kept: list[int] = list(range(len(proto.graph.node)))
        self._no: set[tuple[int, ...]] = set()
        """Parts of the base that are known not to be refused."""
        self.of = _count(proto)
        """Nodes of the whole model, those of bodies and local functions included."""
        self.probes = 0
        self.complete = False
        """True when no single node can be left out any more, False where the candidates ran out first."""
        self.best: ModelProto | None = None

    @property
    def nodes(self) -> int:
        """Number of nodes of the smallest part found."""
        return _count(self.best) if self.best is not None else self.of

    def run(self, named: Sequence[int] = ()) -> ModelProto | None:
        """The smallest part; None if even the whole graph, written as a part, is not rejected for the same cause.

        `named` are indices of nodes named in the rejection; they are tried first.
        """
        try:
            self._search(named)
            self.complete = True
        except _CandidateLimit:
            log.info("reduce: after %d candidates %d of %d nodes are left", self.probes, self.nodes, self.of)
        return self.best

    def _search(self, named: Sequence[int]) -> None:
        if not any(self._check(part) for part in self._try_neighbors(named)) and not self._check(self._kept):
            return
        while True:
            self._bisect()
            self._kept = _ddmin(self._kept, self._check)
            if not (self._inline() or self._extract_body()):
                break
        self._reduce_bodies()

    # -------------------------------------------------------------------------------- candidates

    def _check(self, indices: Sequence[int]) -> bool:
        """Whether these nodes of the base are rejected; updates `best`."""
        key = tuple(indices)
        if key in self._no:
            return False
        if self._try(self._base, indices):
            self._kept = list(indices)
            return True
        self._no.add(key)
        return False

    def _try(self, base: _BaseGraph, indices: Sequence[int]) -> bool:
        part = base.part(indices) if indices else None
        if part is None:
            return False
        if self.probes >= self._max_candidates:
            raise _CandidateLimit
        self.probes += 1
        if not self._rejects(part):
            return False
        if self.best is None or _count(part) < self.nodes:
            self.best = part
            log.info("reduce: %d of %d nodes are still refused (candidate %d)", self.nodes, self.of, self.probes)
        return True

    def _try_neighbors(self, named: Sequence[int]) -> Iterator[list[int]]:
        """Try the named nodes, then add their producers step by step."""
        nodes = self._base.proto.graph.node
        makers = {name: at for at, node in enumerate(nodes) for name in node.output if name}
        found = {at for at in named if 0 <= at < len(nodes)}
        for _ in range(4):
            if not found or len(found) == len(nodes):
                return
            yield sorted(found)
            found |= {makers[name] for at in found for name in walk.names_read(nodes[at]) if name in makers}

    def _bisect(self) -> None:
        """Bisect away nodes behind the first rejected one, then those before what it needs."""
        for first in (True, False):
            kept, low, high = self._kept, 0, len(self._kept)
            while high - low > 1:
                middle = (low + high) // 2
                if self._check(kept[:middle] if first else kept[len(kept) - middle :]):
                    high = middle
                else:
                    low = middle

    def _inline(self) -> bool:
        """Continue with local functions inlined, if still rejected."""
        if self.best is None or not self.best.functions:
            return False
        try:
            return self._rebase(inline_functions(self.best))
        except ModelError:
            return False

    def _extract_body(self) -> bool:
        """Replace the graph by one of its bodies, if that is rejected too."""
        return self.best is not None and any(
            self._rebase(body) for body in _bodies_as_graphs(self.best, self._base.facts)
        )

    def _rebase(self, proto: ModelProto) -> bool:
        base = _BaseGraph(proto, trace(proto, {}).tensors)
        everything = list(range(len(proto.graph.node)))
        if not self._try(base, everything):
            return False
        self._base, self._kept = base, everything
        self._no.clear()
        return True

    def _reduce_bodies(self) -> None:
        """Remove nodes from bodies: their results become outer inputs."""
        if self.best is None:
            return
        inner = _all_tensor_infos(self.best)
        for at in range(len(self.best.graph.node)):
            for position in range(len(list(walk.bodies(self.best.graph.node[at])))):
                self._reduce_body(self.best, at, position, inner)

    def _reduce_body(self, whole: ModelProto, at: int, position: int, facts: Mapping[str, TensorInfo]) -> None:
        body = list(walk.bodies(whole.graph.node[at]))[position][1]
        ends = {item.name for item in body.output}  # a body outputs its own tensors
        fixed = [index for index, node in enumerate(body.node) if ends & set(node.output)]
        free = [index for index in range(len(body.node)) if index not in fixed]

        def refused(kept: Sequence[int]) -> bool:
            proto = deepcopy(whole)
            _, inner = list(walk.bodies(proto.graph.node[at]))[position]
            replace_items(inner.node, [inner.node[index] for index in sorted((*kept, *fixed))])
            return self._try(_BaseGraph(proto, facts), range(len(proto.graph.node)))

        if free and not refused([]):
            _ddmin(free, refused)


def _count(proto: ModelProto) -> int:
    return len(walk.all_nodes(proto))


def _ddmin(items: Sequence[int], refused: Callable[[Sequence[int]], bool]) -> list[int]:
    """Items left when none can be removed; `refused` is true for `items`."""
    kept, parts = list(items), 2
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            rest = [*kept[:start], *kept[start + size :]]
            if rest and refused(rest):
                kept, parts = rest, max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(kept))
    return kept


# ------------------------------------------------------------------------------------------------ bodies


def _bodies_as_graphs(proto: ModelProto, facts: Mapping[str, TensorInfo]) -> Iterator[ModelProto]:
    """Each body as a graph: captured tensors become inputs, weights or constants."""
    for node in proto.graph.node:
        for _, body in walk.bodies(node):
            graph = deepcopy(body)
            outer = {item.name: item for item in proto.graph.initializer}
            stated = {item.name: item for item in proto.graph.input}
            for place, value in enumerate(graph.input):
                _complete_type(value, node, place, facts)
            for name in dict.fromkeys(walk.outer_scope_names(body)):
                if name in outer:
                    graph.initializer.append(outer[name])
                elif name in stated:
                    graph.input.append(stated[name])
                elif (value := value_info(name, facts.get(name))) is not None:
                    graph.input.append(value)
            found = ModelProto(ir_version=proto.ir_version, producer_name=proto.producer_name, graph=graph)
            found.opset_import.extend(proto.opset_import)
            found.functions.extend(proto.functions)
            yield found


def _complete_type(value: ValueInfoProto, node: NodeProto, place: int, facts: Mapping[str, TensorInfo]) -> None:
    """A body's input with its missing type: a Loop has an iteration number, a condition and the node's inputs."""
    tensor = value.type.tensor_type
    if node.op_type != "Loop" or (tensor.elem_type and tensor.HasField("shape")):
        return
    own = facts.get(node.input[place]) if place < len(node.input) else None
    fact = TensorInfo((TensorProto.INT64, TensorProto.BOOL)[place], ()) if place < 2 else own
    if (known := value_info(value.name, fact)) is not None:
        value.CopyFrom(known)


def _all_tensor_infos(proto: ModelProto) -> dict[str, TensorInfo]:
    """Traced tensors by name, those of bodies included."""
    traced = trace(proto, {})
    found = dict(traced.tensors)
    for step in flatten(traced.nodes):
        for name, fact in (*zip(step.node.input, step.inputs, strict=False),
                           *zip(step.node.output, step.outputs, strict=False)):  # fmt: skip
            if name and fact is not None:
                found.setdefault(name, fact)
    return found


_FROZEN = 4096
"""Elements up to which a traced value becomes a constant of the part."""


def extract_subgraph(
    proto: ModelProto,
    indices: Collection[int],
    facts: Mapping[str, TensorInfo],
    *,
    shapes: Mapping[str, Shape] | None = None,
) -> ModelProto | None:
    """The nodes at the indices `kept` as a model; None if rank or type of an input is unknown.

    `facts` are of a trace. Model inputs keep their declaration, or have the sizes in `shapes`; results of other nodes
    become inputs with the traced sizes, or constants if they depend only on constants. Outputs are results without a
    reader in the part, and the model's own. External weights are neither copied nor changed.
    """
    graph = proto.graph
    nodes = [graph.node[at] for at in sorted(indices)]
    made = {name for node in nodes for name in node.output if name}
    read = dict.fromkeys(name for node in nodes for name in walk.names_read(node))
    stored: dict[str, TensorProto] = {item.name: item for item in graph.initializer}
    sparse = {item.values.name: item for item in graph.sparse_initializer}
    stated = {item.name: item for item in graph.input}
    part = GraphProto(name=graph.name or "part")
    part.node.extend(nodes)
    for name in read:
        if name in made:
            continue
        fact = facts.get(name, TensorInfo())
        if name in stored:
            part.initializer.append(stored[name])
        elif name in sparse:
            part.sparse_initializer.append(sparse[name])
        elif name in stated and name not in (shapes or {}):
            part.input.append(stated[name])
        elif fact.is_constant and fact.value is not None and fact.value.size <= _FROZEN:
            part.initializer.append(numpy_helper.from_array(np.asarray(fact.value), name))
        elif (value := value_info(name, fact, (shapes or {}).get(name))) is not None:
            part.input.append(value)
        else:
            return None
    _add_outputs(part, graph, set(read), facts)
    found = ModelProto(ir_version=proto.ir_version, producer_name="trt-engine", graph=part)
    found.opset_import.extend(proto.opset_import)
    found.functions.extend(_called_functions(nodes, proto.functions))
    return found


def value_info(name: str, fact: TensorInfo | None, shape: Shape | None = None) -> ValueInfoProto | None:
    """Declaration of a tensor as graph input or output; None if its type or rank is unknown."""
    if fact is not None and fact.non_tensor_type is not None:
        return helper.make_value_info(name, fact.non_tensor_type)
    if fact is None or not fact.elem:
        return None
    sizes = shape if shape is not None else fact.shape
    if sizes is None:
        return None
    return helper.make_tensor_value_info(name, fact.elem, [size if size >= 0 else None for size in sizes])


def _add_outputs(part: GraphProto, graph: GraphProto, read: Collection[str], facts: Mapping[str, TensorInfo]) -> None:
    own = {item.name: item for item in graph.output}
    for node in part.node:
        for name in node.output:
            if name in own and own[name].type.tensor_type.HasField("shape"):
                part.output.append(own[name])
            elif name in own or (name and name not in read):
                value = (
                    value_info(name, facts.get(name)) or value_info(name, guess_output(node, facts)) or own.get(name)
                )
                if value is None:  # unknown rank or type: readers infer it
                    elem = facts.get(name, TensorInfo()).elem or TensorProto.FLOAT
                    value = helper.make_tensor_value_info(name, elem, None)
                part.output.append(value)


def guess_output(node: NodeProto, facts: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """The only output of a node that inference does not cover (mismatched types): the broadcast of its inputs."""
    given = [facts.get(name, TensorInfo()) for name in node.input if name]
    shapes = [fact.shape for fact in given if fact.elem and fact.shape is not None]
    if len(node.output) != 1 or len(shapes) < max(len(given), 2):
        return None
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    made = []
    for sizes in zip(*padded, strict=True):
        others = {*sizes} - {1} or {1}
        made.append(max(others) if len(others) == 1 or -1 in others else -1)
    return TensorInfo(given[0].elem, tuple(made))


def _called_functions(nodes: Iterable[NodeProto], functions: Sequence[FunctionProto]) -> list[FunctionProto]:
    """Local functions called by the nodes, including those of bodies and of these functions."""
    known = {(item.domain, item.name): item for item in functions}
    found: dict[tuple[str, str], FunctionProto] = {}
    queue = list(nodes) if known else []
    while queue:
        node = queue.pop()
        key = (node.domain, node.op_type)
        if key in known and key not in found:
            found[key] = known[key]
            queue += known[key].node
        for _, body in walk.bodies(node):
            queue += body.node
    return list(found.values())


def contiguous_ranges(indices: Collection[int], total: int) -> list[range]:
    """The indices as contiguous ranges, longest first."""
    ranges, start = [], None
    for at in range(total + 1):
        inside = at < total and at in indices
        if inside and start is None:
            start = at
        elif not inside and start is not None:
            ranges.append(range(start, at))
            start = None
    return sorted(ranges, key=len, reverse=True)

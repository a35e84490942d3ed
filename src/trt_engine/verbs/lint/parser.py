"""`lint` with the ONNX parser of the installed TensorRT or TensorRT-RTX, in a child process.

The parser stops at the first node it cannot import. Each refused node is taken out, what it made becomes an input of the
graph, and the rest is parsed again, until the parser takes it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from trt_engine.atomic_io import os_errors
from trt_engine.backends.tensorrt.parser_check import Library, ParserCheck, ParserProcess, installed_version
from trt_engine.graph import operators, walk
from trt_engine.graph.load import OpenedModel
from trt_engine.graph.operator_support import ParserResult
from trt_engine.graph.reduce import contiguous_ranges, extract_subgraph, guess_output
from trt_engine.graph.shape_inference import TensorInfo, trace
from trt_engine.graph.tensorrt_operators import RTX_ABSENT, SupportStatus, UnsupportedNode
from trt_engine.records.base import Finding
from trt_engine.records.lint import SupportedSubgraph
from trt_engine.tensors import Shape
from trt_engine.trt.parser_messages import ParserError, failed_operator, parser_error_reason

log = logging.getLogger(__name__)

_MAX_ROUNDS = 60
"""Most parser runs on a graph: rejected nodes appear one at a time."""
_EXTERNAL_MIN_BYTES, _EXTERNAL_MIN_TENSOR_BYTES = 16 << 20, 1 << 16
"""Bytes of weights in a model, and of each tensor, from which parts of it read them from an external file."""
_MAX_SUBGRAPHS = 10


@dataclass(frozen=True, slots=True)
class ParserReport:
    """Result of a TensorRT parser on a model."""

    name: str
    """`tensorrt-rtx 1.7.1.116 parser`."""
    status: ParserResult
    findings: tuple[Finding, ...]
    """Refusals without a node: unread inputs, a crash."""
    subgraphs: tuple[SupportedSubgraph, ...]
    """Unbroken runs of nodes it takes, the longest first; empty where it did not see all of the graph."""


def libraries_for(target: str, tensorrt: str | None) -> tuple[Library, ...]:
    """The installed libraries that can judge for a target of `lint`, the best first.

    TensorRT-RTX's parser stands in for TensorRT's, which needs a driver, unless a release was named.
    """
    rtx: tuple[Library, ...] = ("tensorrt-rtx",) if installed_version("tensorrt-rtx") is not None else ()
    if target == "tensorrt-rtx":
        return rtx
    if target != "tensorrt":
        return ()
    own = installed_version("tensorrt")
    fits = own is not None and (tensorrt is None or own.split(".")[:2] == tensorrt.split(".")[:2])
    return (*(("tensorrt",) if fits else ()), *(rtx if tensorrt is None else ()))


def check_with_parser(
    opened: OpenedModel, library: Library, target: str, shapes: Mapping[str, Shape] | None = None
) -> ParserReport | str:
    """Parser report on the model, or a str with the reason why the library cannot run on this machine.

    `shapes` of all inputs are written into the graph first, as `build` does where its profile has one size alone.
    """
    with ParserProcess(library) as process, PartWriter(opened) as parts:
        return _ParserCheck(opened, process, parts, target, shapes or {}).run()


# ------------------------------------------------------------------------------------------------ parts of a model


class PartWriter:
    """Parts of a model as files, without copies of its large weights: those of the first part are shared by all."""

    def __init__(self, opened: OpenedModel) -> None:
        self.proto = opened.model.proto
        self.beside = opened.model.path
        """The file beside which the weights of `proto` are."""
        self._opened = opened
        self._stack = contextlib.ExitStack()
        self._folder: Path | None = None

    def __enter__(self) -> PartWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def prepare(self) -> ModelProto:
        """The model that parts are extracted from: the opened one, its large weights in an external file."""
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="trt-engine-parts-")))
        graph = self._opened.model.proto.graph
        if self._opened.model.external or sum(len(item.raw_data) for item in graph.initializer) < _EXTERNAL_MIN_BYTES:
            return self.proto
        self.beside = self._folder / "part.onnx"
        slim = GraphProto(name=graph.name)
        for kind in ("node", "input", "output", "value_info", "sparse_initializer"):
            getattr(slim, kind).extend(getattr(graph, kind))
        weights = self._folder / "weights"
        with os_errors(weights), weights.open("wb") as file:
            for item in graph.initializer:
                large = len(item.raw_data) >= _EXTERNAL_MIN_TENSOR_BYTES
                slim.initializer.append(_external_tensor(item, file.tell()) if large else item)
                file.write(item.raw_data if large else b"")
        proto = ModelProto(ir_version=self.proto.ir_version, graph=slim)
        proto.opset_import.extend(self.proto.opset_import)
        proto.functions.extend(self.proto.functions)
        self.proto = proto
        return proto

    def write(self, part: ModelProto) -> Path:
        """The part as a file; the next call replaces it."""
        assert self._folder is not None
        path = self._folder / "part.onnx"
        with os_errors(path):
            path.write_bytes(part.SerializeToString())
        return path

    def with_weights(self, part: ModelProto) -> ModelProto:
        """The part with the weights as the model has them."""
        stored = {item.name: item for item in self._opened.model.proto.graph.initializer}
        for item in part.graph.initializer:
            if item.data_location == TensorProto.EXTERNAL and item.name in stored:
                item.CopyFrom(stored[item.name])
        return part


def _external_tensor(tensor: TensorProto, offset: int) -> TensorProto:
    made = TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    made.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "weights"), ("offset", offset), ("length", len(tensor.raw_data))):
        made.external_data.add(key=key, value=str(value))
    return made


# ------------------------------------------------------------------------------------------------ the judge


class _ParserCheck:
    def __init__(
        self, opened: OpenedModel, process: ParserProcess, parts: PartWriter, target: str, shapes: Mapping[str, Shape]
    ) -> None:
        self.opened, self.process, self.parts, self.shapes = opened, process, parts, shapes
        self.product = process.binding.product
        self.stands_in = target == "tensorrt" and process.library == "tensorrt-rtx"
        self.nodes = list(opened.model.proto.graph.node)
        self.gaps: dict[int, UnsupportedNode] = {}
        self.findings: list[Finding] = []
        self.absent: set[int] = set()
        """Nodes of operators that this library lacks and the target has."""

    def run(self) -> ParserReport | str:
        checked = self._first_check()
        if checked.unavailable:
            return checked.unavailable
        complete = self._remove_rejected(checked)
        version = checked.version or (installed_version(self.process.library) or "")
        name = f"{self.process.library} {version} parser" + (", for TensorRT" if self.stands_in else "")
        unknown = (
            frozenset(RTX_ABSENT) | {self.nodes[at].op_type for at in self.absent} if self.stands_in else frozenset()
        )
        judged = ParserResult(tuple(self.gaps[at] for at in sorted(self.gaps)), complete, unknown)
        return ParserReport(name, judged, tuple(self.findings), self._supported_subgraphs() if complete else ())

    def _first_check(self) -> ParserCheck:
        if self.shapes:
            facts = self.opened.trace_at(self.shapes).tensors
            fixed = extract_subgraph(self.parts.prepare(), range(len(self.nodes)), facts, shapes=self.shapes)
            if fixed is not None:
                return self.process.check(self.parts.write(fixed), weights_beside=self.parts.beside)
        return self.process.check(self.opened.model.path)

    def _remove_rejected(self, checked: ParserCheck) -> bool:
        """Remove rejected nodes until the rest is accepted; True then."""
        kept, proto, facts = list(range(len(self.nodes))), self.opened.model.proto, dict[str, TensorInfo]()
        part, blind = proto, False
        for _ in range(_MAX_ROUNDS):
            if checked.exit_status:
                self._record_crash(checked)
                return False
            if checked.parsed:
                return not blind
            if part is proto:
                proto = self.parts.prepare()
                facts = (
                    dict(self.opened.trace_at(self.shapes).tensors) if self.shapes else open_tensor_info(self.opened)
                )
            places = [(refusal, self._rejected_indices(refusal, part, kept)) for refusal in checked.errors]
            known = len(self.gaps) + len(self.absent) + len(self.findings)
            for refusal, found in places:
                self._record_rejection(refusal, found)
            if len(self.gaps) + len(self.absent) + len(self.findings) == known:
                self._record_unlocated(checked)
                return False
            taken = [at for at in range(len(self.nodes)) if at not in self.gaps and at not in self.absent]
            kept = self._reachable_nodes(taken, facts)
            blind = blind or kept != taken
            if not kept:
                return not blind
            smaller = extract_subgraph(proto, kept, facts, shapes=self.shapes)
            if smaller is None:
                return False
            part = smaller
            _merge_tensor_info(facts, part)
            checked = self.process.check(self.parts.write(part), weights_beside=self.parts.beside)
        log.info("the parser checked %d parts: further refusals are not known", _MAX_ROUNDS)
        return False

    def _reachable_nodes(self, kept: list[int], facts: dict[str, TensorInfo]) -> list[int]:
        """The remaining nodes without unknown inputs: outputs of rejected nodes become inputs of known dtype and rank."""
        lost, left = set[str](), set(kept)
        known: list[int] = []
        for at, node in enumerate(self.nodes):
            inside = at in left
            if not inside and facts.get(next(iter(node.output), ""), _UNKNOWN).shape is None:
                facts.update({node.output[0]: fact} if (fact := guess_output(node, facts)) is not None else {})
            if inside and not lost.intersection(walk.names_read(node)):
                known.append(at)
            else:
                lost.update(
                    name for name in node.output if name and (inside or facts.get(name, _UNKNOWN).shape is None)
                )
        return known

    def _rejected_indices(self, refusal: ParserError, part: ModelProto, kept: list[int]) -> list[int]:
        """The indices of the rejected nodes in the full graph."""
        if refusal.function == "importInput":
            return [at for at in kept if refusal.file in walk.names_read(self.nodes[at])]
        place = find_rejected_node(refusal, part)
        return [kept[place]] if place is not None and place < len(kept) else []

    def _record_rejection(self, refusal: ParserError, places: list[int]) -> None:
        reason = parser_error_reason(refusal, self.product)
        if refusal.function == "importInput":
            reason = f"the input `{refusal.file}`: {reason}"
            if not places:
                self.findings.append(Finding("type-not-in-tensorrt", "error", reason, refusal.file))
        for at in places:
            node = self.nodes[at]
            foreign = bool(walk.domain_of(node)) or operators.is_trt_only(node)
            if self.stands_in and (node.op_type in RTX_ABSENT or (foreign and _lacks_plugin(refusal))):
                self.absent.add(at)
            else:
                inside = (
                    "" if not refusal.operator or refusal.operator == node.op_type else f"{refusal.operator} inside: "
                )
                self.gaps.setdefault(
                    at,
                    UnsupportedNode("tensorrt", _finding_code(refusal, reason), node, inside + reason, confirmed=True),
                )

    def _record_unlocated(self, checked: ParserCheck) -> None:
        reasons = [parser_error_reason(item, self.product) for item in checked.errors] or [
            checked.message or "no reason given"
        ]
        self.findings.append(Finding("limited-in-tensorrt", "error", f"{self.product}'s parser: {reasons[0]}"))

    def _record_crash(self, checked: ParserCheck) -> None:
        how = checked.exit_status if checked.exit_status.startswith("no ") else f"ended by {checked.exit_status}"
        self.findings.append(
            Finding(
                "parser-ended",
                "error",
                f"{self.product}'s parser does not survive this graph ({how}): a build would end the same way",
                hint="`trt-engine lint MODEL --reduce SMALL.onnx` writes the part that does it, for a bug report",
            )
        )

    def _supported_subgraphs(self) -> tuple[SupportedSubgraph, ...]:
        taken = set(range(len(self.nodes))) - set(self.gaps)
        return tuple(
            SupportedSubgraph(
                len(run), walk.label(self.nodes[run[0]]), walk.label(self.nodes[run[-1]]), run[0], run[-1]
            )
            for run in contiguous_ranges(taken, len(self.nodes))[:_MAX_SUBGRAPHS]
        )


_UNKNOWN = TensorInfo()


def open_tensor_info(opened: OpenedModel) -> dict[str, TensorInfo]:
    """Dtype and shape of every tensor, dynamic sizes left open; at the stated sizes where the rank is unknown otherwise."""
    found, stated = dict(trace(opened.model.proto, {}).tensors), opened.trace.tensors
    graph = opened.model.proto.graph
    values = {item.name: item.type.tensor_type for item in (*graph.value_info, *graph.output)}
    for name, fact in found.items():
        if fact.shape is not None or fact.non_tensor_type is not None:
            continue
        if stated.get(name, _UNKNOWN).shape is not None:
            found[name] = stated[name]
        elif name in values and values[name].elem_type and values[name].HasField("shape"):
            sizes = tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in values[name].shape.dim)
            found[name] = TensorInfo(values[name].elem_type, sizes)
    return found


def _merge_tensor_info(facts: dict[str, TensorInfo], part: ModelProto) -> None:
    """Add tensor info that shape inference finds in a part but not in the full model."""
    if any(facts.get(name, _UNKNOWN).shape is None for node in part.graph.node for name in node.output if name):
        for name, fact in trace(part, {}).tensors.items():
            if facts.get(name, _UNKNOWN).shape is None:
                facts[name] = fact


_DTYPE_MESSAGE = re.compile(r"\bdata ?types?\b|\bsame (input )?types?\b|\binput types?\b|\bhas type\b", re.IGNORECASE)


def _lacks_plugin(refusal: ParserError) -> bool:
    return re.search(r"plugin", refusal.description, re.IGNORECASE) is not None


def _finding_code(refusal: ParserError, reason: str) -> SupportStatus:
    if "not have this operator" in reason or "not have the operator" in reason or _lacks_plugin(refusal):
        return "missing"
    return "type" if refusal.code == "UNSUPPORTED_NODE_DATATYPE" or _DTYPE_MESSAGE.search(reason) else "limited"


# ------------------------------------------------------------------------------------------------ where


def find_rejected_node(refusal: ParserError, proto: ModelProto) -> int | None:
    """Index of the rejected node in the main graph, or of the node around it; None if unknown."""
    nodes = proto.graph.node
    at = refusal.node
    here = nodes[at] if 0 <= at < len(nodes) else None
    if here is not None and not refusal.local_functions and _matches(here, refusal):
        return at
    around = [index for index, node in enumerate(nodes) if _contains(node, refusal, proto)]
    if at in around:
        return at
    if around:
        return around[0]
    named = [index for index, node in enumerate(nodes) if node.op_type == failed_operator(refusal)]
    return named[0] if len(named) == 1 else None


def _matches(node: NodeProto, refusal: ParserError) -> bool:
    names = {node.name, *(f"node_of_{name}" for name in node.output)} if not node.name else {node.name}
    operator = failed_operator(refusal)
    return (not operator or node.op_type == operator) and (not refusal.name or refusal.name in names)


def _contains(node: NodeProto, refusal: ParserError, proto: ModelProto) -> bool:
    """Whether it is the node, or calls the outermost local function around it, or has it in a body."""
    if refusal.local_functions:
        name, _, function = refusal.local_functions[0].partition(" (")
        return node.op_type == function.rstrip(")") and name in (
            node.name,
            f"node_of_{next(iter(node.output), '')}",
            "",
        )
    if not refusal.name and not failed_operator(refusal):
        return False
    return (bool(refusal.name) and _matches(node, refusal)) or any(
        _body_contains(body, refusal) for _, body in walk.bodies(node)
    )


def _body_contains(body: GraphProto, refusal: ParserError) -> bool:
    return any(
        _matches(node, refusal) or any(_body_contains(inner, refusal) for _, inner in walk.bodies(node))
        for node in body.node
    )

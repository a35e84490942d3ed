"""The main graph of a model while it is fused: producers, consumers, types, sizes, and nodes replaced in place."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper

from trt_engine.arrayfiles import Array
from trt_engine.graph import edit_graph, symbolic_shapes, walk
from trt_engine.graph.constants import constants_as_initializers, drop_initializer_inputs, false_constants
from trt_engine.graph.dtype_breakdown import is_dequantize, is_quantize
from trt_engine.graph.opset import import_domain
from trt_engine.graph.shape_inference import schema_of
from trt_engine.records.inspect import Unfused

log = logging.getLogger(__name__)

MICROSOFT = "com.microsoft"
HALF_AND_FLOAT = (TensorProto.FLOAT, TensorProto.FLOAT16)
_SMALL_ELEMENTS = 1024
"""Elements up to which a constant is kept where shapes are inferred; larger ones are only declared."""


class NotFused(Exception):
    """A pattern that has the anchor of a fusion stays as it is; the text is what was found, and what the fusion needs."""


class FusionGraph:
    """A copy of a model whose main graph fusions edit; `folder` is where external weights are, `left_out` are names of
    fusions that are not made."""

    def __init__(self, proto: ModelProto, folder: Path, left_out: Collection[str] = ()) -> None:
        self.left_out = left_out
        self.proto = _prepare(proto, folder)
        self.folder = folder
        self.types, self.vectors = _infer(self.proto)
        graph = self.proto.graph
        self.opset = walk.opsets_of(self.proto).get("", 0)
        self.outputs = {item.name for item in graph.output}
        self.constants: dict[str, TensorProto] = {item.name: item for item in graph.initializer}
        self.builder = edit_graph.NodeBuilder(edit_graph.NameAllocator(self.proto))
        self.nodes: dict[int, NodeProto] = {}
        self._producers: dict[str, NodeProto] = {}
        self._consumers: dict[str, list[NodeProto]] = defaultdict(list)
        self.fused: Counter[str] = Counter()
        """Number of fusions by name."""
        self.shared: dict[Any, str] = {}
        """Tensors that several fusions use, by what they are."""
        self.unfused: list[Unfused] = []
        """Nodes that looked like the anchor of a fusion, and are not part of one."""
        self.warnings: list[str] = []
        self._known_constants = 0
        self._add(self._without_same_casts(graph))
        for node in [*self.nodes.values()]:  # folded shape arithmetic leaves some without a reader
            if id(node) in self.nodes and not self._is_read(node):
                self._remove(node)

    def _without_same_casts(self, graph: GraphProto) -> list[NodeProto]:
        """The nodes but for casts to the type that a tensor has already; their readers read the tensor."""
        same = {
            node.output[0]: node.input[0]
            for node in graph.node
            if node.op_type == "Cast"
            and not walk.domain_of(node)
            and node.output[0] not in self.outputs
            and 0 < self.elem_type(node.input[0]) == walk.attributes(node).get("to")
        }
        edit_graph.rename_reads(graph, edit_graph.resolve_renames(same))
        return [node for node in graph.node if not (node.op_type == "Cast" and node.output[0] in same)]

    # ------------------------------------------------------------------------------------------ reading

    def producer(self, name: str, *ops: str) -> NodeProto | None:
        """The node that computes a tensor, if its operator is one of `ops` of the default domain (or any, without)."""
        node = self._producers.get(name)
        if node is None or (ops and (node.op_type not in ops or walk.domain_of(node))):
            return None
        return node

    def consumers(self, name: str) -> list[NodeProto]:
        """Nodes that read a tensor, in their bodies too; one that reads it twice is listed twice."""
        return self._consumers.get(name, [])

    def only_consumer(self, name: str, *ops: str) -> NodeProto | None:
        """The node that alone reads a tensor, if its operator is one of `ops`; None for an output of the graph."""
        found = self.consumers(name)
        if len(found) != 1 or name in self.outputs or walk.domain_of(found[0]):
            return None
        return found[0] if not ops or found[0].op_type in ops else None

    def is_private(self, name: str) -> bool:
        """True for a tensor with one reader that is not an output of the graph."""
        return len(self.consumers(name)) == 1 and name not in self.outputs

    def shape(self, name: str) -> list[symbolic_shapes.Size] | None:
        """Sizes of a tensor: number, symbol, or None; None if its rank is unknown."""
        if name in self.constants:
            return list(self.constants[name].dims)
        return symbolic_shapes.symbolic_shape(self.types, name)

    def repeated_shape(self, name: str, depth: int = 8) -> list[symbolic_shapes.Size] | None:
        """As `shape`, with what shape inference does not follow: Expand to a computed shape, and `a|b` for a size that is
        the larger of two with different names, of which one may be 1 and repeated."""
        shape, node = self.shape(name), self.producer(name)
        if node is None or not depth or shape is None or not any(symbolic_shapes.is_unknown(size) for size in shape):
            return shape
        if node.op_type == "Expand":
            parts = [self.repeated_shape(node.input[0], depth - 1), self.vectors.get(node.input[1])]
        elif node.op_type in _BROADCASTING and not walk.domain_of(node):
            parts = [self.repeated_shape(item, depth - 1) for item in node.input]
        elif node.op_type == "MatMul" and self.rank(node.input[1]) == 2 and self.rank(node.input[0]) == len(shape):
            parts = [[*(self.repeated_shape(node.input[0], depth - 1) or [])[:-1], shape[-1]]]
        elif node.op_type in _SAME_SHAPE and not walk.domain_of(node):
            return self.repeated_shape(node.input[0], depth - 1)
        else:
            return shape
        if any(part is None for part in parts):
            return shape
        made = list(shape)
        for at in range(1, len(shape) + 1):
            sizes = {part[-at] for part in parts if part is not None and len(part) >= at} - {1}
            if not sizes:
                made[-at] = 1
            elif len(sizes) == 1:
                made[-at] = sizes.pop()
            elif not any(symbolic_shapes.is_unknown(size) for size in sizes):
                made[-at] = "|".join(sorted(map(str, sizes)))
        return made

    def rank(self, name: str) -> int | None:
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def elem_type(self, name: str) -> int:
        """ONNX element type; 0 if unknown."""
        return self.constants[name].data_type if name in self.constants else symbolic_shapes.elem_type(self.types, name)

    def is_constant(self, name: str) -> bool:
        return name in self.constants

    def read(self, name: str) -> Array:
        """The values of a constant, in its stored shape and dtype; `ModelError` if it cannot be read."""
        return edit_graph.read_tensor(self.constants[name], self.folder)

    def small_value(self, name: str) -> Array | None:
        """The values of a constant of at most 1024 elements, in its stored shape and dtype; None for any other tensor."""
        tensor = self.constants.get(name)
        return self.read(name) if tensor is not None and math.prod(tensor.dims) <= _SMALL_ELEMENTS else None

    def integers(self, name: str) -> list[int] | None:
        """A constant of whole numbers as a flat list; None for any other tensor."""
        found = self.small_value(name)
        return None if found is None or found.dtype.kind not in "iu" else [int(item) for item in found.reshape(-1)]

    def axes(self, node: NodeProto) -> list[int] | None:
        """The axes of a node, an attribute or its second input; None if they are not given, or not constant."""
        given = walk.attributes(node).get("axes")
        if given is not None or len(node.input) < 2:
            return given
        return self.integers(node.input[1])

    def scalar(self, name: str) -> float | None:
        """The value of a constant with one element (a number of the graph, without unit), or one computed from such (a chain
        of Sqrt, Div, Cast); else None.
        """
        found = self._scalar(name, 8)
        return None if found is None or not math.isfinite(found) else found

    def _scalar(self, name: str, depth: int) -> float | None:
        tensor = self.constants.get(name)
        if tensor is not None:
            return float(self.read(name).reshape(-1)[0]) if math.prod(tensor.dims) == 1 else None
        node = self.producer(name, *_SCALAR_OPS)
        if node is None or not depth:
            return None
        values = [self._scalar(item, depth - 1) for item in node.input]
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        try:
            return float(_SCALAR_OPS[node.op_type](*known))
        except (ValueError, ZeroDivisionError, OverflowError, TypeError):
            return None

    def factor(self, node: NodeProto) -> tuple[str, float] | None:
        """The tensor and the number it is multiplied by, of a Mul or Div with a scalar constant; else None."""
        if node.op_type not in ("Mul", "Div") or walk.domain_of(node):
            return None
        first, second = node.input[:2]
        if (value := self.scalar(second)) is not None and self._keeps_shape(first, second):
            return (first, value) if node.op_type == "Mul" else (first, 1 / value) if value else None
        if node.op_type == "Mul" and (value := self.scalar(first)) is not None and self._keeps_shape(second, first):
            return second, value
        return None

    def _keeps_shape(self, tensor: str, scalar: str) -> bool:
        """Whether the scalar's rank is at most the tensor's: a larger one would add dimensions."""
        rank, other = self.rank(tensor), self.rank(scalar)
        return not other or (rank is not None and rank >= other)

    def is_closed(self, nodes: Iterable[NodeProto], end: NodeProto) -> bool:
        """True if only these nodes read their outputs, but for those of `end`, and none is an output of the graph."""
        inside = {id(node) for node in nodes}
        names = {name for node in nodes if node is not end for name in node.output}
        return not names & self.outputs and all(
            id(reader) in inside for name in names for reader in self.consumers(name)
        )

    def quantized(self, names: Iterable[str]) -> bool:
        """True if one of the tensors is read by a quantize or made by a dequantize node, through layout operators."""
        for name in names:
            if any(is_quantize(node) for node in self.consumers(name)):
                return True
            made = self.producer(name)
            while made is not None and made.op_type in _LAYOUT_OPS and made.input:
                made = self.producer(made.input[0])
            if made is not None and is_dequantize(made):
                return True
        return False

    def require_floats(self, names: Iterable[str], beside: Iterable[str] = ()) -> None:
        """`NotFused` unless these tensors are all FP32 or all FP16, and neither they nor those `beside` are quantized."""
        names = list(names)
        kinds = {self.elem_type(name) for name in names}
        if len(kinds) != 1 or not kinds <= set(HALF_AND_FLOAT):
            found = sorted(TensorProto.DataType.Name(kind) for kind in kinds)
            raise NotFused(f"its tensors are {' and '.join(found)}, expected all FLOAT or all FLOAT16")
        if self.quantized([*names, *beside]):
            raise NotFused("its tensors are quantized")

    # ------------------------------------------------------------------------------------------ editing

    def rewrite_each(
        self, fusion: str, ops: Collection[str], rewrite: Callable[[FusionGraph, NodeProto], None]
    ) -> None:
        """Call `rewrite` for each node whose operator is one of `ops` (`Softmax`, `com.microsoft::Gelu`): it replaces the
        node's pattern, raises `NotFused` for one that is nearly it, and returns from a node without any resemblance.

        Any other exception leaves the graph as it was, with a warning: no fusion is worth a failed build.
        """
        for node in [item for item in self.nodes.values() if walk.qualified_name(item) in ops]:
            if id(node) not in self.nodes:
                continue
            shared, reason = dict(self.shared), ""
            try:
                rewrite(self, node)
            except NotFused as error:
                reason = str(error)
            except Exception as error:  # whatever a matcher did not foresee
                reason = f"the fusion {fusion} failed on it ({type(error).__name__}: {error})"
                self.warnings.append(f"`{walk.label(node)}` ({node.op_type}) is not fused: {reason}")
                log.debug("%s", self.warnings[-1], exc_info=True)
            if reason:
                self.unfused.append(Unfused(fusion, walk.label(node), node.op_type, reason))
                self.builder.take_nodes()
                self.shared = shared

    def replace(self, fusion: str, removed: Sequence[NodeProto]) -> None:
        """Put the builder's new nodes in the place of `removed`, and count one fusion of that name; `NotFused` for one that
        is left out."""
        if fusion in self.left_out:
            raise NotFused(f"the fusion {fusion} is left out")
        self._add(self.builder.take_nodes())
        for tensor in self.builder.initializers[self._known_constants :]:
            self.constants[tensor.name] = tensor
        self._known_constants = len(self.builder.initializers)
        for node in removed:
            self._remove(node)
        self.fused[fusion] += 1

    def with_axes(self, op: str, name: str, axes: list[int], *, since: int, **given: Any) -> str:
        """Add a node whose axes are an input from opset `since` on, an attribute before; returns its output."""
        if self.opset < since:
            return self.builder.add(op, [name], name, axes=axes, **given)
        return self.builder.add(op, [name, self.constant(np.array(axes, np.int64), "axes")], name, **given)

    def sizes(self, name: str, start: int, end: int) -> str:
        """Add nodes that give sizes `start` to `end` of a tensor; returns their output."""
        if self.opset >= 15:
            return self.builder.add("Shape", [name], name, start=start, end=end)
        ends = [self.constant(np.array([at], np.int64), "sizes") for at in (start, end)]
        return self.builder.add("Slice", [self.builder.add("Shape", [name], name), *ends], name)

    def constant(self, value: Any, stem: str) -> str:
        """The name of a constant, shared between equal values."""
        name = self.builder.shared_constant(value, stem)
        self.constants.setdefault(name, next(item for item in self.builder.initializers if item.name == name))
        if value.dtype == np.int64 and value.ndim == 1:
            self.vectors.setdefault(name, value.tolist())
        return name

    def declare(self, name: str, elem: int, shape: Sequence[symbolic_shapes.Size]) -> str:
        """State the type of a tensor that a fusion makes and others look at; returns its name."""
        self.types[name] = helper.make_tensor_type_proto(elem, list(shape))
        return name

    def _add(self, nodes: Iterable[NodeProto]) -> None:
        for node in nodes:
            self.nodes[id(node)] = node
            for name in node.output:
                if name:
                    self._producers[name] = node
            for name in walk.names_read(node):
                self._consumers[name].append(node)

    def _remove(self, node: NodeProto) -> None:
        """Remove a node, and what it alone read."""
        waiting = [node]
        while waiting:
            gone = waiting.pop()
            if self.nodes.pop(id(gone), None) is None:
                continue
            for name in gone.output:
                if self._producers.get(name) is gone:
                    del self._producers[name]
            for name in set(walk.names_read(gone)):
                self._consumers[name] = [item for item in self._consumers[name] if item is not gone]
                made = self._producers.get(name)
                if made is not None and not self._is_read(made):
                    waiting.append(made)

    def _is_read(self, node: NodeProto) -> bool:
        return any(self._consumers.get(out) or out in self.outputs for out in node.output)

    def result(self) -> ModelProto:
        """The fused model: nodes in order, unused constants removed."""
        graph = self.proto.graph
        graph.initializer.extend(self.builder.initializers)
        edit_graph.replace_items(graph.node, _in_order(list(self.nodes.values()), self._producers))
        read = {name for node in graph.node for name in walk.names_read(node)} | self.outputs
        edit_graph.retain_items(graph.initializer, lambda item: item.name in read)
        made = {name for node in graph.node for name in node.output}
        edit_graph.retain_items(graph.value_info, lambda item: item.name in made)
        if any(node.domain == MICROSOFT for node in graph.node):
            import_domain(self.proto, MICROSOFT)
        return self.proto


def has_valid_arity(proto: ModelProto) -> bool:
    """True if every node of the main graph has the numbers of inputs and outputs that its operator takes."""
    opset = walk.opsets_of(proto).get("", 0)
    for node in proto.graph.node:
        schema = None if walk.domain_of(node) else schema_of(node.op_type, "", opset)
        if schema is not None and not (
            schema.min_input <= len(node.input) <= schema.max_input
            and schema.min_output <= len(node.output) <= schema.max_output
        ):
            return False
    return True


_SCALAR_OPS: Mapping[str, Any] = {
    "Sqrt": math.sqrt,
    "Cast": lambda value: value,
    "Identity": lambda value: value,
    "Reciprocal": lambda value: 1 / value,
    "Neg": lambda value: -value,
    "Div": lambda a, b: a / b,
    "Mul": lambda a, b: a * b,
    "Pow": lambda a, b: a**b,
    "Unsqueeze": lambda value, _=None: value,
    "Squeeze": lambda value, _=None: value,
}
_BROADCASTING = frozenset("Where And Or Mul Add Sub Div Pow Max Min".split())
_SAME_SHAPE = frozenset(
    "Not Cast Neg LayerNormalization RMSNormalization SimplifiedLayerNormalization Relu Gelu".split()
)
_LAYOUT_OPS = frozenset("Transpose Reshape Squeeze Unsqueeze Identity Split Slice Gather Flatten".split())


def _prepare(proto: ModelProto, folder: Path) -> ModelProto:
    """A copy with functions inlined, Constant nodes as initializers, no Identity and inference Dropout.

    Small constants are in the graph: ONNX Runtime reads none outside it for the shapes of a graph in memory.
    """
    made = ModelProto()
    made.CopyFrom(edit_graph.inline_functions(proto))
    drop_initializer_inputs(made)
    constants_as_initializers(made)
    off = false_constants(made)
    graph = made.graph
    for item in graph.initializer:
        if item.data_location == TensorProto.EXTERNAL and math.prod(item.dims) <= _SMALL_ELEMENTS:
            item.CopyFrom(edit_graph.make_initializer(edit_graph.read_tensor(item, folder), item.name))
    outputs = {item.name for item in graph.output}
    renamed: dict[str, str] = {}
    kept = []
    for node in graph.node:
        if _passes_through(node, off) and node.output[0] not in outputs:
            renamed[node.output[0]] = node.input[0]
        else:
            kept.append(node)
    if renamed:
        edit_graph.replace_items(graph.node, kept)
        edit_graph.rename_reads(graph, edit_graph.resolve_renames(renamed))
    return made


def _passes_through(node: NodeProto, off: set[str]) -> bool:
    if walk.domain_of(node) or len([name for name in node.output if name]) != 1 or not node.input:
        return False
    if node.op_type == "Identity":
        return True
    return node.op_type == "Dropout" and (len(node.input) < 3 or not node.input[2] or node.input[2] in off)


def _infer(proto: ModelProto) -> tuple[dict[str, Any], dict[str, list[symbolic_shapes.Size]]]:
    """Types of all tensors, and known shape vectors; shape arithmetic on known sizes is folded in `proto`."""
    graph = proto.graph
    keep = {item.name for item in graph.output}
    large = {item.name: item for item in graph.initializer if math.prod(item.dims) > _SMALL_ELEMENTS}
    skeleton = ModelProto(ir_version=proto.ir_version, opset_import=proto.opset_import)
    inner = skeleton.graph
    inner.name = graph.name
    for part in ("node", "output", "sparse_initializer"):
        getattr(inner, part).extend(getattr(graph, part))
    inner.input.extend(graph.input)
    inner.input.extend(
        helper.make_tensor_value_info(name, item.data_type, list(item.dims)) for name, item in large.items()
    )
    inner.initializer.extend(item for item in graph.initializer if item.name not in large)
    types = _with_declared(symbolic_shapes.infer_types(skeleton), graph)
    for _ in range(2):  # folded Reshape targets make more shapes known
        if not symbolic_shapes.fold_shapes(skeleton, types, keep):
            break
        types = _with_declared(symbolic_shapes.infer_types(skeleton), graph)
    vectors = symbolic_shapes.shape_vectors(skeleton, types)
    edit_graph.replace_items(graph.node, inner.node)
    edit_graph.retain_items(graph.initializer, lambda item: item.name in large)
    graph.initializer.extend(inner.initializer)
    return types, vectors


def _with_declared(types: dict[str, TypeProto], graph: GraphProto) -> dict[str, TypeProto]:
    """The inferred types, with declared sizes where inference knows none: exporters name sizes that it cannot relate."""
    for value in graph.value_info:
        stated, found = value.type.tensor_type, types.get(value.name)
        if found is None or not found.tensor_type.HasField("shape"):
            if stated.HasField("shape"):
                types[value.name] = value.type
            continue
        inferred = found.tensor_type.shape.dim
        if len(inferred) != len(stated.shape.dim):
            continue
        for own, other in zip(inferred, stated.shape.dim, strict=True):
            unknown = not own.HasField("dim_value") and (not own.dim_param or own.dim_param.startswith("unk__"))
            if unknown and (other.HasField("dim_value") or other.dim_param):
                own.CopyFrom(other)
    return types


def _in_order(nodes: list[NodeProto], producers: Mapping[str, NodeProto]) -> list[NodeProto]:
    """The nodes, each after those it reads."""
    waiting = {id(node): node for node in nodes}
    placed: set[int] = set()
    made: list[NodeProto] = []
    for first in nodes:
        stack = [first]
        while stack:
            node = stack[-1]
            if id(node) in placed:
                stack.pop()
                continue
            needed = [
                item
                for name in walk.names_read(node)
                if (item := producers.get(name)) is not None and id(item) in waiting and id(item) not in placed
            ]
            if needed:
                stack += needed
                continue
            placed.add(id(node))
            made.append(stack.pop())
    return made

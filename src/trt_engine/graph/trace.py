"""Shapes, types and small values of every tensor at given input shapes: ONNX's rules one node at a time, with the values
that shapes are computed from folded on the way, and If, Loop and Scan followed into their bodies.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper, shape_inference

from trt_engine.graph import walk
from trt_engine.graph.fold import LARGEST, fold
from trt_engine.tensors import Shape

__all__ = ["Fact", "Step", "Trace", "attributes", "flatten", "schema_of", "trace"]

log = logging.getLogger(__name__)
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)


@dataclass(frozen=True, slots=True)
class Fact:
    """What is known of one tensor: element type (0 unknown), shape (None unknown, -1 an unknown size), small value."""

    elem: int = 0
    shape: Shape | None = None
    value: npt.NDArray[Any] | None = None
    other: TypeProto | None = None
    """The type of what is no tensor: a sequence, a map."""
    stored: bool = False
    """True for a constant of the model (initializer, Constant node, or folded from them)."""

    @property
    def sized(self) -> bool:
        """True when every size is known."""
        return self.shape is not None and all(size >= 0 for size in self.shape)

    @property
    def elements(self) -> int:
        """Number of elements; 0 when a size is not known."""
        return math.prod(self.shape) if self.shape is not None and self.sized else 0


@dataclass(frozen=True, slots=True)
class Step:
    """One node as it was traced, with the steps of its bodies."""

    node: NodeProto
    key: str
    """Unique in the trace: the path of the bodies it stands in, and its first output."""
    inputs: tuple[Fact | None, ...]
    outputs: tuple[Fact, ...]
    inside: tuple[tuple[Step, ...], ...] = ()
    """One entry for each body that may run: an If whose condition is not known has two."""
    times: int | None = 1
    """How often the body runs; None when it depends on data."""
    folded: bool = False
    """True for what is worked out before the first inference."""


@dataclass(slots=True)
class Trace:
    """The steps of the main graph in order, and what is known of every tensor of it."""

    steps: tuple[Step, ...]
    facts: dict[str, Fact]
    failures: dict[str, str] = field(default_factory=dict)
    """Why a node's shapes could not be worked out, by node label."""


def attributes(node: NodeProto) -> dict[str, Any]:
    """The attributes as Python values; graphs left out."""
    kinds = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
    return {
        item.name: helper.get_attribute_value(item)
        for item in node.attribute
        if item.type not in kinds and item.type != onnx.AttributeProto.UNDEFINED and not item.ref_attr_name
    }


def flatten(steps: Sequence[Step]) -> list[Step]:
    """The steps and those of their bodies."""
    found = []
    for step in steps:
        found.append(step)
        for body in step.inside:
            found.extend(flatten(body))
    return found


def trace(proto: ModelProto, shapes: Mapping[str, Shape]) -> Trace:
    """The trace of a model at these input shapes; inputs without one have the sizes the model states."""
    if proto.functions:
        proto = _inlined(proto)
    tracer = _Tracer(walk.opsets_of(proto), proto.ir_version)
    facts: dict[str, Fact] = {}
    stored = {item.name for item in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name not in stored:
            facts[value.name] = _stated(value.type, shapes.get(value.name))
    facts, steps = tracer.graph(proto.graph, facts, "")
    return Trace(steps, facts, tracer.failures)


def _inlined(proto: ModelProto) -> ModelProto:
    """The model with its local functions written out where they are called."""
    from onnx import inliner

    try:
        flat: ModelProto = inliner.inline_local_functions(proto)
    except (RuntimeError, ValueError, TypeError) as error:
        log.debug("local functions could not be inlined: %s", error)
        return proto
    return flat


def _stated(kind: TypeProto, shape: Shape | None) -> Fact:
    if kind.WhichOneof("value") != "tensor_type":
        return Fact(other=kind)
    tensor = kind.tensor_type
    if shape is not None:
        return Fact(tensor.elem_type, tuple(shape))
    return Fact(tensor.elem_type, _shape_of(tensor))


def _shape_of(tensor: TypeProto.Tensor) -> Shape | None:
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else -1 for dim in tensor.shape.dim)


@cache
def schema_of(op: str, domain: str, version: int) -> Any:
    """ONNX's definition of an operator at that opset; None for one it does not know."""
    try:
        return onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None


class _Tracer:
    """Goes through one model's graphs."""

    def __init__(self, opsets: dict[str, int], ir_version: int) -> None:
        self.opsets = opsets
        self.ir_version = min(max(ir_version, 3), onnx.IR_VERSION)
        self.imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self.failures: dict[str, str] = {}

    def graph(self, graph: GraphProto, facts: dict[str, Fact], path: str) -> tuple[dict[str, Fact], tuple[Step, ...]]:
        """The facts after the graph, and its steps."""
        for tensor in graph.initializer:
            facts[tensor.name] = _constant(tensor)
        for sparse in graph.sparse_initializer:
            facts[sparse.values.name] = Fact(sparse.values.data_type, tuple(sparse.dims), stored=True)
        steps = []
        for index, node in enumerate(graph.node):
            step = self.node(node, facts, path, index)
            steps.append(step)
            for name, fact in zip(node.output, step.outputs, strict=False):
                if name:
                    facts[name] = fact
        return facts, tuple(steps)

    def node(self, node: NodeProto, facts: dict[str, Fact], path: str, index: int) -> Step:
        first = next((name for name in node.output if name), str(index))
        key = f"{path}{first}"
        inputs = tuple(facts.get(name, Fact()) if name else None for name in node.input)
        domain = walk.domain_of(node)
        if domain == "" and node.op_type in ("If", "Loop", "Scan"):
            return self.control(node, inputs, facts, key)
        if domain == "":
            values = fold(node.op_type, attributes(node), inputs, len(node.output))
            if values is not None:
                stored = all(item is None or item.stored for item in inputs)
                made = tuple(
                    Fact(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, value, stored=stored)
                    for value in values
                )
                return Step(node, key, inputs, made, folded=True)
        return Step(node, key, inputs, self.infer(node, domain, inputs))

    def infer(self, node: NodeProto, domain: str, inputs: Sequence[Fact | None]) -> tuple[Fact, ...]:
        from trt_engine.graph.contrib import outputs_of  # knows Fact, so it stands after this module

        known = outputs_of(self, node, domain, inputs)
        return known if known is not None else self.by_schema(node, domain, inputs)

    def by_schema(self, node: NodeProto, domain: str, inputs: Sequence[Fact | None]) -> tuple[Fact, ...]:
        """The outputs by ONNX's own inference of this one operator."""
        schema = schema_of(node.op_type, domain, self.opsets.get(domain, 1))
        guess = next((item.elem for item in inputs if item is not None and item.elem in _FLOATS), 0)
        if schema is None:
            return tuple(Fact(guess) for _ in node.output)
        types, data = {}, {}
        for name, fact in zip(node.input, inputs, strict=True):
            if fact is None:
                continue
            types[name] = _type_of(fact)
            if fact.value is not None and fact.elem:
                data[name] = numpy_helper.from_array(np.asarray(fact.value), name)
        try:
            found = shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=self.imports, ir_version=self.ir_version
            )
        except Exception as error:  # the inference of one node may fail in many ways; the rest is still counted
            self.failures[walk.label(node)] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            found = {}
        return tuple(_fact_of(found.get(name), guess) for name in node.output)

    # -------------------------------------------------------------------------------------------- bodies

    def control(self, node: NodeProto, inputs: tuple[Fact | None, ...], facts: dict[str, Fact], key: str) -> Step:
        parts = dict(walk.bodies(node))
        path = f"{key}/"
        if node.op_type == "If":
            return self.branch(node, inputs, facts, key, parts)
        body = parts.get("body")
        if body is None:
            return Step(node, key, inputs, tuple(Fact() for _ in node.output))
        if node.op_type == "Loop":
            return self.loop(node, inputs, facts, key, body, path)
        return self.scan(node, inputs, facts, key, body, path)

    def branch(
        self,
        node: NodeProto,
        inputs: tuple[Fact | None, ...],
        facts: dict[str, Fact],
        key: str,
        parts: dict[str, GraphProto],
    ) -> Step:
        condition = inputs[0].value if inputs and inputs[0] is not None else None
        taken = list(parts)
        if condition is not None and condition.size == 1:
            taken = ["then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"]
        results, inside = [], []
        for name in taken:
            if name in parts:
                after, steps = self.graph(parts[name], dict(facts), f"{key}/{name}/")
                results.append([after.get(item.name, Fact()) for item in parts[name].output])
                inside.append(steps)
        made = []
        for position in range(len(node.output)):
            options = [result[position] for result in results if position < len(result)]
            made.append(_agree(options))
        return Step(node, key, inputs, tuple(made), tuple(inside))

    def loop(
        self, node: NodeProto, inputs: tuple[Fact | None, ...], facts: dict[str, Fact], key: str, body: GraphProto,
        path: str,
    ) -> Step:  # fmt: skip
        trips = _number(inputs[0]) if inputs else None
        given = inputs[1] if len(inputs) > 1 else None
        open_ended = given is None or (given.value is not None and bool(np.all(given.value)))
        carried = [_unvalued(item) for item in inputs[2:]]
        inner = dict(facts)
        starts = [Fact(TensorProto.INT64, ())]
        starts.append(Fact(TensorProto.BOOL, (), np.array(True) if open_ended else None))
        for value, fact in zip(body.input, [*starts, *carried], strict=False):
            inner[value.name] = fact
        after, steps = self.graph(body, inner, path)
        ends = [after.get(item.name, Fact()) for item in body.output]
        goes_on = bool(ends) and ends[0].value is not None and bool(np.all(ends[0].value))
        times = trips if trips is not None and open_ended and goes_on else None
        made = []
        for position in range(len(node.output)):
            end = ends[position + 1] if position + 1 < len(ends) else Fact()
            if position < len(carried):
                made.append(_unvalued(_agree([carried[position], end])))
            else:
                made.append(_stacked(end, times if times is not None else -1, 0))
        return Step(node, key, inputs, tuple(made), (steps,), times)

    def scan(
        self, node: NodeProto, inputs: tuple[Fact | None, ...], facts: dict[str, Fact], key: str, body: GraphProto,
        path: str,
    ) -> Step:  # fmt: skip
        given = attributes(node)
        scanned = int(given.get("num_scan_inputs", 1))
        states = len(inputs) - scanned
        axes = list(given.get("scan_input_axes", [0] * scanned))
        inner, length = dict(facts), None
        for position, value in enumerate(body.input):
            fact = inputs[position] if position < len(inputs) else None
            if position < states or fact is None or fact.shape is None:
                inner[value.name] = _unvalued(fact)
                continue
            axis = axes[position - states] if position - states < len(axes) else 0
            if -len(fact.shape) <= axis < len(fact.shape):
                length = fact.shape[axis] if fact.shape[axis] >= 0 else length
                rest = [size for at, size in enumerate(fact.shape) if at != axis % len(fact.shape)]
                inner[value.name] = Fact(fact.elem, tuple(rest))
        after, steps = self.graph(body, inner, path)
        made = []
        for position, name in enumerate(item.name for item in body.output):
            end = after.get(name, Fact())
            made.append(_unvalued(end) if position < states else _stacked(end, -1 if length is None else length, 0))
        return Step(node, key, inputs, tuple(made[: len(node.output)]), (steps,), length)


def _constant(tensor: TensorProto) -> Fact:
    shape = tuple(tensor.dims)
    value = None
    if tensor.data_location != TensorProto.EXTERNAL and math.prod(shape) <= LARGEST:
        try:
            value = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError):  # strings, unknown types, bytes that do not fit
            value = None
    return Fact(tensor.data_type, shape, value, stored=True)


def _type_of(fact: Fact) -> TypeProto:
    if fact.other is not None:
        return fact.other
    made = TypeProto()
    made.tensor_type.elem_type = fact.elem
    if fact.shape is not None:
        made.tensor_type.shape.SetInParent()
        for size in fact.shape:
            dim = made.tensor_type.shape.dim.add()
            if 0 <= size < 1 << 62:
                dim.dim_value = size
    return made


def _fact_of(kind: TypeProto | None, guess: int) -> Fact:
    if kind is None or kind.WhichOneof("value") is None:
        return Fact(guess)
    if kind.WhichOneof("value") != "tensor_type":
        return Fact(other=kind)
    return Fact(kind.tensor_type.elem_type or guess, _shape_of(kind.tensor_type))


def _unvalued(fact: Fact | None) -> Fact:
    return Fact() if fact is None else Fact(fact.elem, fact.shape, other=fact.other)


def _agree(options: Sequence[Fact]) -> Fact:
    """What holds whichever of these it is."""
    if not options:
        return Fact()
    first = options[0]
    if len(options) == 1:
        return first
    elem = first.elem if all(item.elem == first.elem for item in options) else 0
    shape: Shape | None = None
    if first.shape is not None and all(
        item.shape is not None and len(item.shape) == len(first.shape) for item in options
    ):
        shape = tuple(
            sizes[0] if len(set(sizes)) == 1 else -1
            for sizes in zip(*(item.shape or () for item in options), strict=True)
        )
    return Fact(elem, shape)


def _stacked(fact: Fact, length: int, axis: int) -> Fact:
    if fact.shape is None:
        return Fact(fact.elem)
    return Fact(fact.elem, (*fact.shape[:axis], length, *fact.shape[axis:]))


def _number(fact: Fact | None) -> int | None:
    if fact is None or fact.value is None or fact.value.size != 1:
        return None
    return max(int(fact.value.reshape(-1)[0]), 0)

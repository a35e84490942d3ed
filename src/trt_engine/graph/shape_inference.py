"""Shapes, types and small values of every tensor at given input shapes: ONNX's inference node by node, with shape
arithmetic evaluated, and If, Loop and Scan followed into their bodies."""

from __future__ import annotations

import logging
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper, shape_inference

from trt_engine.errors import ModelError
from trt_engine.format import library_reason
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import inline_functions
from trt_engine.graph.shape_eval import FOLDABLE_OPS, MAX_ELEMENTS, fold_node
from trt_engine.tensors import Shape
from trt_engine.units import count_elements

log = logging.getLogger(__name__)

_VALUE_BYTES, _UNCOUNTED_ELEMENTS = 64 << 20, 64
"""Memory for all propagated values in bytes, and elements up to which a value is not counted."""
_KEY_BYTES = 4096
"""Bytes of a node's input values up to which equal nodes are inferred once."""
_PLAIN: dict[int, str] = {
    TensorProto.FLOAT: "<f4",
    TensorProto.INT64: "<i8",
    TensorProto.INT32: "<i4",
    TensorProto.BOOL: "?",
}
_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
_CONTROL = ("If", "Loop", "Scan")
_WITHOUT_VALUES = ("Constant", "Shape", "Size")
"""Operators that are evaluated without known input values."""


class TensorInfo(NamedTuple):
    """A tensor: element type (0 unknown), shape (None unknown, -1 an unknown size), small value."""

    elem: int = 0
    shape: Shape | None = None
    value: npt.NDArray[Any] | None = None
    non_tensor_type: TypeProto | None = None
    """Type of a sequence or map."""
    is_constant: bool = False
    """True for a constant (initializer, Constant node, or computed from them)."""

    @property
    def is_static(self) -> bool:
        """True if every size is known."""
        return self.shape is not None and (not self.shape or min(self.shape) >= 0)

    @property
    def num_elements(self) -> int:
        """Number of elements; 0 if a size is unknown."""
        return count_elements(self.shape) if self.shape is not None and self.is_static else 0


_UNKNOWN = TensorInfo()


class TracedNode(NamedTuple):
    """A traced node, with the steps of its bodies."""

    node: NodeProto
    key: str
    """Unique in the trace: path of enclosing bodies and first output."""
    inputs: tuple[TensorInfo | None, ...]
    outputs: tuple[TensorInfo, ...]
    bodies: tuple[tuple[TracedNode, ...], ...] = ()
    """One entry per body that may run: an If with an unknown condition has two."""
    trip_count: int | None = 1
    """Number of times the body runs; None if it depends on data."""
    folded: bool = False
    """True for a node that is computed before the first inference."""


@dataclass(slots=True)
class Trace:
    """Steps of the main graph in order, and its tensors by name."""

    nodes: tuple[TracedNode, ...]
    tensors: dict[str, TensorInfo]
    failures: dict[str, str] = field(default_factory=dict)
    """Inference errors by node label."""


def flatten(steps: Sequence[TracedNode]) -> list[TracedNode]:
    """The steps, each followed by those of its bodies."""
    found = []
    for step in steps:
        found.append(step)
        for body in step.bodies:
            found.extend(flatten(body))
    return found


def trace(proto: ModelProto, shapes: Mapping[str, Shape]) -> Trace:
    """Trace a model at these input shapes; other inputs have their declared sizes."""
    try:
        proto = inline_functions(proto)
    except ModelError as error:
        log.debug("%s", error.message)
    tracer = _Tracer(walk.opsets_of(proto), proto.ir_version)
    facts: MutableMapping[str, TensorInfo] = {}
    stored = {item.name for item in proto.graph.initializer}
    for value in proto.graph.input:
        if value.name not in stored:
            tensor, given = value.type.tensor_type, shapes.get(value.name)
            facts[value.name] = TensorInfo(
                tensor.elem_type, tuple(given) if given is not None else declared_shape(tensor)
            )
            if value.type.WhichOneof("value") != "tensor_type":
                facts[value.name] = TensorInfo(non_tensor_type=value.type)
    facts, steps = tracer.graph(proto.graph, facts, "")
    return Trace(steps, dict(facts), tracer.failures)


def declared_shape(tensor: TypeProto.Tensor) -> Shape | None:
    """Declared sizes, -1 for a dynamic one; None for an unknown rank."""
    if not tensor.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else -1 for dim in tensor.shape.dim)


def declared_shapes(proto: ModelProto) -> dict[str, Shape]:
    """Declared input shapes, with 1 for every dynamic size."""
    stated = {item.name: declared_shape(item.type.tensor_type) for item in proto.graph.input}
    return {
        name: tuple(1 if size < 0 else size for size in shape) for name, shape in stated.items() if shape is not None
    }


@cache
def schema_of(op: str, domain: str, version: int) -> Any:
    """ONNX's schema of an operator at that opset; None if unknown."""
    try:
        return onnx.defs.get_schema(op, version, domain)
    except (onnx.defs.SchemaError, TypeError):  # unknown operator, or a version beyond 32 bits
        return None


class _Tracer:
    """Traces one model's graphs."""

    def __init__(self, opsets: dict[str, int], ir_version: int) -> None:
        from trt_engine.graph.ort_contrib_shapes import infer_contrib_outputs  # deferred: it imports this module

        self.outputs_of = infer_contrib_outputs
        self.opsets = opsets
        self.ir_version = min(max(ir_version, 3), onnx.IR_VERSION)
        self.imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
        self.failures: dict[str, str] = {}
        self.value_budget = _VALUE_BYTES
        self.known: dict[Any, tuple[tuple[TensorInfo, ...], str]] = {}
        """Results of `by_schema` by everything that determines them: layers of a network repeat."""

    def graph(
        self, graph: GraphProto, facts: MutableMapping[str, TensorInfo], path: str
    ) -> tuple[MutableMapping[str, TensorInfo], tuple[TracedNode, ...]]:
        """Tensors after the graph, and its steps."""
        for tensor in graph.initializer:
            facts[tensor.name] = self.limit_value(_constant(tensor))
        for sparse in graph.sparse_initializer:
            facts[sparse.values.name] = TensorInfo(sparse.values.data_type, tuple(sparse.dims), is_constant=True)
        steps = []
        for index, node in enumerate(graph.node):
            names = list(node.output)
            step = self.node(node, names, facts, path, index)
            steps.append(step)
            for name, fact in zip(names, step.outputs, strict=False):
                if name:
                    facts[name] = fact
        return facts, tuple(steps)

    def limit_value(self, fact: TensorInfo) -> TensorInfo:
        """The fact, without its value if the value budget is exhausted."""
        if fact.value is None or fact.value.size <= _UNCOUNTED_ELEMENTS:
            return fact
        self.value_budget -= fact.value.nbytes
        return fact if self.value_budget > 0 else TensorInfo(fact.elem, fact.shape, is_constant=fact.is_constant)

    def node(
        self, node: NodeProto, outputs: Sequence[str], facts: MutableMapping[str, TensorInfo], path: str, index: int
    ) -> TracedNode:
        first = outputs[0] if outputs and outputs[0] else next((name for name in outputs if name), str(index))
        key = path + first
        inputs = tuple([facts.get(name, _UNKNOWN) if name else None for name in node.input])
        domain, op = walk.domain_of(node), node.op_type
        if domain == "" and op in _CONTROL:
            return self.control(node, inputs, facts, key)
        if (
            domain == ""
            and op in FOLDABLE_OPS
            and (op in _WITHOUT_VALUES or all(item is None or item.value is not None for item in inputs))
        ):
            values = fold_node(op, walk.attributes(node) if node.attribute else {}, inputs, len(outputs))
            if values is not None:
                stored = all(item is None or item.is_constant for item in inputs)
                made = tuple(
                    self.limit_value(
                        TensorInfo(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape, value, is_constant=stored)
                    )
                    for value in values
                )
                return TracedNode(node, key, inputs, made, folded=True)
        return TracedNode(node, key, inputs, self.infer(node, domain, inputs))

    def infer(self, node: NodeProto, domain: str, inputs: Sequence[TensorInfo | None]) -> tuple[TensorInfo, ...]:
        known = self.outputs_of(self, node, domain, inputs)
        return known if known is not None else self.by_schema(node, domain, inputs)

    def by_schema(self, node: NodeProto, domain: str, inputs: Sequence[TensorInfo | None]) -> tuple[TensorInfo, ...]:
        """Outputs by ONNX's inference of this operator."""
        key = _inference_key(node, domain, inputs)
        found = self.known.get(key) if key is not None else None
        if found is None:
            found = self._by_schema(node, domain, inputs)
            if key is not None:
                self.known[key] = found
        made, failure = found
        if failure:
            self.failures[walk.label(node)] = failure
        return made

    def _by_schema(
        self, node: NodeProto, domain: str, inputs: Sequence[TensorInfo | None]
    ) -> tuple[tuple[TensorInfo, ...], str]:
        """Outputs, and the error if inference failed."""
        schema = schema_of(node.op_type, domain, self.opsets.get(domain, 1))
        guess = next((item.elem for item in inputs if item is not None and item.elem in _FLOATS), 0)
        if schema is None:
            return tuple(TensorInfo(guess) for _ in node.output), ""
        types, data = {}, {}
        failure = ""
        try:
            for name, fact in zip(node.input, inputs, strict=True):
                if fact is None:
                    continue
                types[name] = _type_from_info(fact)
                if fact.value is not None and fact.elem:
                    data[name] = numpy_helper.from_array(np.asarray(fact.value), name)
            found = shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=self.imports, ir_version=self.ir_version
            )
        except Exception as error:  # inference of a node may fail in many ways; go on
            failure = library_reason(error)
            found = {}
        return tuple(_info_from_type(found.get(name), guess) for name in node.output), failure

    # -------------------------------------------------------------------------------------------- bodies

    def control(
        self, node: NodeProto, inputs: tuple[TensorInfo | None, ...], facts: MutableMapping[str, TensorInfo], key: str
    ) -> TracedNode:
        parts, step = dict(walk.bodies(node)), TracedNode(node, key, inputs, ())
        if node.op_type == "If":
            return self.branch(step, facts, parts)
        body = parts.get("body")
        if body is None:
            return step._replace(outputs=tuple(TensorInfo() for _ in node.output))
        return (self.loop if node.op_type == "Loop" else self.scan)(step, facts, body)

    def branch(
        self, step: TracedNode, facts: MutableMapping[str, TensorInfo], parts: dict[str, GraphProto]
    ) -> TracedNode:
        condition = step.inputs[0].value if step.inputs and step.inputs[0] is not None else None
        taken = list(parts)
        if condition is not None and condition.size == 1:
            taken = ["then_branch" if bool(condition.reshape(-1)[0]) else "else_branch"]
        results, inside, outer, failures = [], [], self.failures, []
        for name in taken:
            if name in parts:
                self.failures = {}
                failures.append(self.failures)
                after, steps = self.graph(parts[name], _body_scope(facts), f"{step.key}/{name}/")
                results.append([after.get(item.name, _UNKNOWN) for item in parts[name].output])
                inside.append(steps)
        self.failures = outer
        if all(failures):  # which branch runs is not known, and one of them may fit
            for part in failures:
                outer.update(part)
        made = [
            _common_info([result[position] for result in results if position < len(result)])
            for position in range(len(step.node.output))
        ]
        return step._replace(outputs=tuple(made), bodies=tuple(inside))

    def loop(self, step: TracedNode, facts: MutableMapping[str, TensorInfo], body: GraphProto) -> TracedNode:
        inputs, count = step.inputs, step.inputs[0] if step.inputs else None
        given = inputs[1] if len(inputs) > 1 else None
        open_ended = given is None or (given.value is not None and bool(np.all(given.value)))
        carried = [_without_value(item) for item in inputs[2:]]
        inner = _body_scope(facts)
        starts = [TensorInfo(TensorProto.INT64, ())]
        starts.append(TensorInfo(TensorProto.BOOL, (), np.array(True) if open_ended else None))
        inner.update({value.name: fact for value, fact in zip(body.input, [*starts, *carried], strict=False)})
        after, steps = self.graph(body, inner, f"{step.key}/")
        ends = [after.get(item.name, _UNKNOWN) for item in body.output]
        goes_on = bool(ends) and ends[0].value is not None and bool(np.all(ends[0].value))
        times = None
        if count is not None and count.value is not None and count.value.size == 1 and open_ended and goes_on:
            times = max(int(count.value.reshape(-1)[0]), 0)
        made = []
        for position in range(len(step.node.output)):
            end = ends[position + 1] if position + 1 < len(ends) else _UNKNOWN
            if position < len(carried):
                made.append(_without_value(_common_info([carried[position], end])))
            else:
                made.append(_stacked(end, times))
        return step._replace(outputs=tuple(made), bodies=(steps,), trip_count=times)

    def scan(self, step: TracedNode, facts: MutableMapping[str, TensorInfo], body: GraphProto) -> TracedNode:
        if self.opsets.get("", 1) < 9:  # its inputs have a batch, and their lengths come first
            return step._replace(outputs=tuple(TensorInfo() for _ in step.node.output))
        inputs, given = step.inputs, walk.attributes(step.node)
        scanned = int(given.get("num_scan_inputs", 1))
        states = len(inputs) - scanned
        axes = list(given.get("scan_input_axes", [0] * scanned))
        inner, length = _body_scope(facts), None
        for position, value in enumerate(body.input):
            fact = inputs[position] if position < len(inputs) else None
            if position < states or fact is None or fact.shape is None:
                inner[value.name] = _without_value(fact)
                continue
            axis = axes[position - states] if position - states < len(axes) else 0
            if -len(fact.shape) <= axis < len(fact.shape):
                length = fact.shape[axis] if fact.shape[axis] >= 0 else length
                rest = [size for at, size in enumerate(fact.shape) if at != axis % len(fact.shape)]
                inner[value.name] = TensorInfo(fact.elem, tuple(rest))
        after, steps = self.graph(body, inner, f"{step.key}/")
        ends = [after.get(item.name, _UNKNOWN) for item in body.output]
        out_axes = list(given.get("scan_output_axes", []))
        made = [
            _without_value(end)
            if at < states
            else _stacked(end, length, out_axes[at - states] if at - states < len(out_axes) else 0)
            for at, end in enumerate(ends)
        ]
        return step._replace(outputs=tuple(made[: len(step.node.output)]), bodies=(steps,), trip_count=length)


def _inference_key(node: NodeProto, domain: str, inputs: Sequence[TensorInfo | None]) -> Any:
    """Key that is equal for nodes with equal outputs; None for a node that is always inferred."""
    parts: list[tuple[Any, ...] | None] = []
    room = _KEY_BYTES
    for fact in inputs:
        if fact is None:
            parts.append(None)
        elif fact.non_tensor_type is not None:
            return None
        elif fact.value is None:
            parts.append((fact.elem, fact.shape))
        elif fact.value.dtype == object or (room := room - fact.value.nbytes) < 0:
            return None
        else:
            parts.append((fact.elem, fact.shape, fact.value.tobytes()))
    held = node.attribute
    given = tuple([item.SerializeToString() for item in held]) if held else ()
    at = None
    if len(parts) > 1:
        names = list(node.input)
        if len(set(names)) < len(parts):  # a duplicate name
            at = tuple(map(names.index, names))
    return node.op_type, domain, tuple(map(bool, node.output)), given, tuple(parts), at


def _constant(tensor: TensorProto) -> TensorInfo:
    shape = tuple(tensor.dims)
    value = None
    if tensor.data_location != TensorProto.EXTERNAL and count_elements(shape) <= MAX_ELEMENTS:
        try:
            kind = _PLAIN.get(tensor.data_type)
            if kind is not None and tensor.HasField("raw_data"):
                value = np.frombuffer(tensor.raw_data, kind).reshape(shape)
            else:
                value = numpy_helper.to_array(tensor)
        except (ValueError, TypeError, KeyError, RuntimeError):  # strings, unknown types, bytes that do not fit
            value = None
    return TensorInfo(tensor.data_type, shape, value, is_constant=True)


def _type_from_info(fact: TensorInfo) -> TypeProto:
    if fact.non_tensor_type is not None:
        return fact.non_tensor_type
    made = TypeProto()
    made.tensor_type.elem_type = fact.elem
    if fact.shape is not None:
        made.tensor_type.shape.SetInParent()
        for size in fact.shape:
            dim = made.tensor_type.shape.dim.add()
            if 0 <= size < 1 << 62:
                dim.dim_value = size
    return made


def _info_from_type(kind: TypeProto | None, guess: int) -> TensorInfo:
    if kind is None or kind.WhichOneof("value") is None:
        return TensorInfo(guess)
    if kind.WhichOneof("value") != "tensor_type":
        return TensorInfo(non_tensor_type=kind)
    return TensorInfo(kind.tensor_type.elem_type or guess, declared_shape(kind.tensor_type))


def _body_scope(facts: MutableMapping[str, TensorInfo]) -> MutableMapping[str, TensorInfo]:
    """Scope of a body: outer names, and its own, which end with it."""
    return ChainMap({}, *facts.maps) if isinstance(facts, ChainMap) else ChainMap({}, facts)


def _without_value(fact: TensorInfo | None) -> TensorInfo:
    return TensorInfo() if fact is None else TensorInfo(fact.elem, fact.shape, non_tensor_type=fact.non_tensor_type)


def _common_info(options: Sequence[TensorInfo]) -> TensorInfo:
    """What is common to all options."""
    if not options:
        return TensorInfo()
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
    return TensorInfo(elem, shape)


def _stacked(fact: TensorInfo, length: int | None, axis: int = 0) -> TensorInfo:
    """The results of all runs of a body along a new axis."""
    if fact.shape is None:
        return TensorInfo(fact.elem)
    sizes = list(fact.shape)
    sizes.insert(axis if axis >= 0 else len(sizes) + 1 + axis, -1 if length is None else length)
    return TensorInfo(fact.elem, tuple(sizes))


_NAMES: dict[int, str] = {value: name.lower() for name, value in TensorProto.DataType.items() if name != "UNDEFINED"}


def dtype_name(elem: int) -> str:
    """Element type as in ONNX's schemas, or its number if ONNX does not define it."""
    return _NAMES.get(elem, f"type {elem}")


def type_string(elem: int) -> str:
    """Element type as ONNX's schemas write it, `tensor(float16)`; empty if unknown."""
    return f"tensor({_NAMES[elem]})" if elem in _NAMES else ""


def input_of(step: TracedNode, at: int) -> TensorInfo | None:
    return step.inputs[at] if at < len(step.inputs) else None


def shape_of(step: TracedNode, at: int) -> tuple[int, ...] | None:
    item = input_of(step, at)
    return item.shape if item is not None else None


def has_input(step: TracedNode, at: int) -> bool:
    return at < len(step.node.input) and bool(step.node.input[at])


def has_output(step: TracedNode, at: int) -> bool:
    return at < len(step.node.output) and bool(step.node.output[at])


_ATTRIBUTE_TYPES: dict[str, type] = {
    "dilations": list, "activations": list, "axes": list, "perm": list, "axis": int, "p": int, "sorted": int,
    "antialias": int, "is_causal": int, "layout": int, "input_forget": int, "left_window_size": int,
    "right_window_size": int, "training_mode": int, "softmax_precision": int, "num_outputs": int, "fmod": int,
    "q_num_heads": int, "kv_num_heads": int, "output_dtype": int, "softcap": float, "mode": bytes,
    "keep_aspect_ratio_policy": bytes, "reduction": bytes, "coordinate_transformation_mode": bytes, "direction": bytes,
    "equation": bytes,
}  # fmt: skip


def typed_attributes(node: NodeProto) -> dict[str, Any]:
    """The node's attributes that have the expected type; in a damaged file they may have any."""
    found = {name: value if isinstance(value, int | float | bytes) else list(value) if isinstance(value, Sequence) else None
             for name, value in walk.attributes(node).items()}  # fmt: skip
    return {name: value for name, value in found.items() if isinstance(value, _ATTRIBUTE_TYPES.get(name, ()))}


def decode_text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

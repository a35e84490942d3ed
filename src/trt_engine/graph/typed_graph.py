"""The graph with the type of every tensor in every scope, including bodies, which ONNX's type inference skips.

Types are the strings of ONNX's operator schemas (`tensor(float16)`, `seq(tensor(float))`); `""` is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from trt_engine.graph import walk
from trt_engine.graph.ort_contrib_shapes import IN_DEFAULT_DOMAIN
from trt_engine.graph.shape_inference import schema_of, trace, type_string

FLOAT, FLOAT16, BFLOAT16 = "tensor(float)", "tensor(float16)", "tensor(bfloat16)"
_FLOATS = (FLOAT, FLOAT16, BFLOAT16, "tensor(double)")


@dataclass(slots=True, eq=False)
class Tensor:
    """One tensor of one scope."""

    name: str
    scope: Scope
    type_str: str
    producer: Op | None = None
    value: TensorProto | None = None
    """Constant value: an initializer or the tensor of a Constant node."""
    consumers: list[tuple[Op, int]] = field(default_factory=list)
    """Consumers and their input index, including bodies that capture the tensor."""
    output_of: list[Scope] = field(default_factory=list)
    """The scopes it is an output of."""


@dataclass(slots=True, eq=False)
class Op:
    """One node with its tensors; an omitted input or output is None."""

    node: NodeProto
    scope: Scope
    signature: OpSignature | None
    inputs: list[Tensor | None]
    outputs: list[Tensor | None] = field(default_factory=list)
    bodies: dict[str, Scope] = field(default_factory=dict)

    @property
    def qualified_name(self) -> str:
        """Operator name, with its domain unless standard, as `com.microsoft::Gelu`."""
        return walk.qualified_name(self.node)

    @property
    def label(self) -> str:
        return walk.label(self.node)

    def input(self, at: int) -> Tensor | None:
        return self.inputs[at] if at < len(self.inputs) else None

    def output(self, at: int) -> Tensor | None:
        return self.outputs[at] if at < len(self.outputs) else None


@dataclass(slots=True, eq=False)
class Scope:
    """One graph: the main one or a body."""

    graph: GraphProto
    parent: Scope | None = None
    owner: Op | None = None
    """The node whose body this is."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor | None] = field(default_factory=list)
    """None for an output without a producer."""
    ops: list[Op] = field(default_factory=list)

    def find(self, name: str) -> Tensor | None:
        """Find a tensor by name here or in an enclosing scope."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope.parent
        return None

    def all_ops(self) -> Iterator[Op]:
        """Yield the nodes in order, each followed by those of its bodies."""
        for op in self.ops:
            yield op
            for body in op.bodies.values():
                yield from body.all_ops()

    def all_scopes(self) -> Iterator[Scope]:
        """Yield this scope and every body under it."""
        yield self
        for op in self.ops:
            for body in op.bodies.values():
                yield from body.all_scopes()


@dataclass(frozen=True, slots=True)
class OpSignature:
    """Input and output types of an operator at one opset."""

    inputs: tuple[str, ...]
    """A type, or the name of a type variable."""
    outputs: tuple[str, ...]
    variables: dict[str, frozenset[str]]
    """Allowed types of each variable."""

    def input(self, position: int) -> str:
        """Formal input type; the last one is variadic."""
        return self.inputs[min(position, len(self.inputs) - 1)] if self.inputs else ""

    def output(self, position: int) -> str:
        return self.outputs[min(position, len(self.outputs) - 1)] if self.outputs else ""

    def allows(self, formal: str, type_str: str) -> bool:
        """True if the formal parameter allows this type."""
        return type_str in self.variables[formal] if formal in self.variables else type_str == formal


@cache
def op_signature(op: str, domain: str, version: int) -> OpSignature | None:
    """The signature of an operator at that opset, or None if it is not defined there."""
    schema = schema_of(op, domain, version)
    if schema is None:
        return None
    return OpSignature(
        tuple(item.type_str for item in schema.inputs),
        tuple(item.type_str for item in schema.outputs),
        {item.type_param_str: frozenset(item.allowed_type_strs) for item in schema.type_constraints},
    )


def declared_type_str(proto: TypeProto) -> str:
    """The type string of a declared type."""
    which = proto.WhichOneof("value")
    if which == "tensor_type":
        return type_string(proto.tensor_type.elem_type)
    if which == "sequence_type":
        return f"seq({declared_type_str(proto.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({declared_type_str(proto.optional_type.elem_type)})"
    if which == "sparse_tensor_type":
        return f"sparse_{type_string(proto.sparse_tensor_type.elem_type)}"
    return "map()" if which == "map_type" else ""


def build_typed_graph(proto: ModelProto) -> Scope:
    """Build the main scope of a model: every tensor with its type, producer and consumers."""
    main = Scope(proto.graph)
    _TypedGraphBuilder(walk.opsets_of(proto)).add_graph(main, [])
    return main


class _TypedGraphBuilder:
    def __init__(self, opsets: dict[str, int]) -> None:
        self.opsets = opsets

    def add_graph(self, scope: Scope, input_types: list[str]) -> None:
        """Add one graph; `input_types` are those of a body."""
        graph = scope.graph
        stated = {item.name: declared_type_str(item.type) for item in (*graph.value_info, *graph.output)}
        for tensor in graph.initializer:
            scope.tensors[tensor.name] = Tensor(tensor.name, scope, type_string(tensor.data_type), value=tensor)
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            scope.tensors[name] = Tensor(name, scope, type_string(sparse.values.data_type))
        for position, value in enumerate(graph.input):
            if value.name in scope.tensors:
                continue
            kind = declared_type_str(value.type) or (input_types[position] if position < len(input_types) else "")
            made = scope.tensors[value.name] = Tensor(value.name, scope, kind)
            scope.inputs.append(made)
        for node in graph.node:
            self.add_node(node, scope, stated)
        for value in graph.output:
            found = scope.find(value.name)
            scope.outputs.append(found)
            if found is not None:
                found.output_of.append(scope)

    def add_node(self, node: NodeProto, scope: Scope, stated: dict[str, str]) -> None:
        domain = walk.domain_of(node)
        op = Op(
            node,
            scope,
            op_signature(node.op_type, domain, self.opsets[domain]) if domain in self.opsets else None,
            [scope.find(name) if name else None for name in node.input],
        )
        scope.ops.append(op)
        for position, tensor in enumerate(op.inputs):
            if tensor is not None:
                tensor.consumers.append((op, position))
        for name, body in walk.bodies(node):
            inner = op.bodies[name] = Scope(body, scope, op)
            given = [tensor.type_str if tensor is not None else "" for tensor in op.inputs]
            loop = node.op_type == "Loop"  # its body has the iteration number and the condition first
            self.add_graph(inner, ["tensor(int64)", "tensor(bool)", *given[2:]] if loop else given)
        kinds = _output_types(op)
        for position, name in enumerate(node.output):
            if not name:
                op.outputs.append(None)
                continue
            kind = (kinds[position] if position < len(kinds) else "") or stated.get(name, "")
            tensor = scope.tensors[name] = Tensor(name, scope, kind, producer=op)
            if node.op_type == "Constant" and not domain:
                tensor.value = next((item.t for item in node.attribute if item.name == "value"), None)
            op.outputs.append(tensor)


def _input_type(op: Op, position: int) -> str:
    tensor = op.input(position)
    return tensor.type_str if tensor is not None else ""


def _output_types(op: Op) -> list[str]:
    """The types of a node's outputs; `""` if unknown."""
    count = len(op.node.output)
    if op.signature is None:
        return _contrib_output_types(op)
    own = _TYPE_RULES.get(op.node.op_type) if not walk.domain_of(op.node) else None
    if own is not None:
        found = own(op, walk.attributes(op.node))
        if found is not None:
            return found
    bound: dict[str, str] = {}
    for position, tensor in enumerate(op.inputs):
        formal = op.signature.input(position)
        if tensor is not None and tensor.type_str and formal in op.signature.variables:
            bound.setdefault(formal, tensor.type_str)
    kinds = []
    for position in range(count):
        formal = op.signature.output(position)
        allowed = op.signature.variables.get(formal)
        if allowed is None:
            kinds.append(formal)
        else:
            kinds.append(bound.get(formal) or (next(iter(allowed)) if len(allowed) == 1 else ""))
    return kinds


def _contrib_output_types(op: Op) -> list[str]:
    """ONNX Runtime's operators mostly return their input type; others are unknown."""
    name, domain = op.node.op_type, walk.domain_of(op.node)
    if name in ("QuantizeLinear", "DequantizeLinear"):
        return (_quantize_type if name == "QuantizeLinear" else _dequantize_type)(op, walk.attributes(op.node)) or [""]
    if domain.startswith("com.microsoft") or name in IN_DEFAULT_DOMAIN:
        first = next((tensor.type_str for tensor in op.inputs if tensor is not None and tensor.type_str in _FLOATS), "")
        return [first]
    return []


TypeRule = Callable[[Op, dict[str, Any]], list[str] | None]


def _from_attribute(attribute: str, default: int | None) -> TypeRule:
    """Rule for a type set by an attribute, else `default`, else the first input's type."""

    def rule(op: Op, given: dict[str, Any]) -> list[str]:
        chosen = given.get(attribute) or default
        return [type_string(chosen) if chosen else _input_type(op, 0)]

    return rule


def _constant_type(op: Op, attrs: dict[str, Any]) -> list[str]:
    if "value" in attrs:
        return [type_string(attrs["value"].data_type)]
    if "sparse_value" in attrs:
        return [type_string(attrs["sparse_value"].values.data_type)]
    ours = {"value_float": FLOAT, "value_floats": FLOAT, "value_int": "tensor(int64)", "value_ints": "tensor(int64)"}
    return [next((ours[name] for name in attrs if name in ours), "tensor(string)")]


def _quantize_type(op: Op, attrs: dict[str, Any]) -> list[str]:
    return [_input_type(op, 2) or type_string(attrs.get("output_dtype") or TensorProto.UINT8)]


def _dequantize_type(op: Op, attrs: dict[str, Any]) -> list[str]:
    if attrs.get("output_dtype"):
        return [type_string(attrs["output_dtype"])]
    if op.signature is not None and op.signature.outputs[0] not in op.signature.variables:
        return [op.signature.outputs[0]]
    return [_input_type(op, 1) if _input_type(op, 1) in _FLOATS else ""]


def _contained_type(kind: str, word: str) -> str:
    return kind[len(word) + 1 : -1] if kind.startswith(f"{word}(") else ""


def _body_types(op: Op) -> list[str]:
    """The types of the outputs of a Loop's or Scan's body."""
    return [tensor.type_str if tensor else "" for tensor in op.bodies["body"].outputs] if "body" in op.bodies else []


def _if_types(op: Op, attrs: dict[str, Any]) -> list[str]:
    sides = [[tensor.type_str if tensor else "" for tensor in body.outputs] for body in op.bodies.values()]
    count = len(op.node.output)
    return [next((side[at] for side in sides if at < len(side) and side[at]), "") for at in range(count)]


_TYPE_RULES: dict[str, TypeRule] = {
    "Cast": _from_attribute("to", TensorProto.FLOAT),
    "BitCast": _from_attribute("to", None),
    "CastLike": lambda op, given: [_input_type(op, 1)],
    "Constant": _constant_type,
    "ConstantOfShape": lambda op, given: [type_string(given["value"].data_type) if "value" in given else FLOAT],
    **dict.fromkeys(("RandomNormal", "RandomUniform"), _from_attribute("dtype", TensorProto.FLOAT)),
    "Multinomial": _from_attribute("dtype", TensorProto.INT32),
    **dict.fromkeys("RandomNormalLike RandomUniformLike EyeLike Bernoulli".split(), _from_attribute("dtype", None)),
    **dict.fromkeys(
        "HannWindow HammingWindow BlackmanWindow MelWeightMatrix".split(),
        _from_attribute("output_datatype", TensorProto.FLOAT),
    ),
    "QuantizeLinear": _quantize_type,
    "DequantizeLinear": _dequantize_type,
    "LayerNormalization": lambda op, given: (
        [_input_type(op, 0), *[type_string(given.get("stash_type", TensorProto.FLOAT))] * 2]
    ),
    "SequenceEmpty": lambda op, given: [f"seq({type_string(given.get('dtype') or TensorProto.FLOAT)})"],
    "SequenceConstruct": lambda op, given: [f"seq({_input_type(op, 0)})"],
    "SplitToSequence": lambda op, given: [f"seq({_input_type(op, 0)})"],
    "SequenceAt": lambda op, given: [_contained_type(_input_type(op, 0), "seq")],
    "ConcatFromSequence": lambda op, given: [_contained_type(_input_type(op, 0), "seq")],
    "Optional": lambda op, given: [f"optional({_input_type(op, 0)})"] if op.inputs else None,
    "OptionalGetElement": lambda op, given: [_contained_type(_input_type(op, 0), "optional") or _input_type(op, 0)],
    "If": _if_types,
    "Loop": lambda op, given: (
        [_input_type(op, at) for at in range(2, len(op.inputs))] + _body_types(op)[max(len(op.inputs), 2) - 1 :]
    ),
    "Scan": lambda op, given: _body_types(op),
}
_TYPE_LABELS = {
    "tensor(float)": "fp32",
    "tensor(float16)": "fp16",
    "tensor(bfloat16)": "bf16",
    "tensor(double)": "fp64",
}


def type_label(kind: str) -> str:
    """`fp16` for `tensor(float16)`."""
    return _TYPE_LABELS.get(kind) or (kind[7:-1] if kind.startswith("tensor(") else kind)


@dataclass(slots=True)
class ModelView:
    """A typed model with its nodes and shapes."""

    main: Scope
    ops: list[Op]
    proto: ModelProto
    _shapes: dict[str, tuple[int, ...]] | None = field(default=None)

    def shape(self, tensor: Tensor | None) -> tuple[int, ...] | None:
        """The shape of a tensor, -1 for dynamic dimensions; None if the rank is unknown."""
        if tensor is None:
            return None
        if tensor.value is not None:
            return tuple(tensor.value.dims)
        if self._shapes is None:
            facts = trace(self.proto, {}).tensors
            self._shapes = {name: fact.shape for name, fact in facts.items() if fact.shape is not None}
        return self._shapes.get(tensor.name)

"""The element type of every tensor of a model, scope by scope: what ONNX's own inference does not tell inside bodies.

Types are spelled as ONNX's operator schemas spell them (`tensor(float16)`, `seq(tensor(float))`), so that a type can be
held against what an operator allows. `""` is a type that is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, inliner

from trt_engine.errors import ModelError
from trt_engine.graph import walk
from trt_engine.graph.trace import attributes

__all__ = ["BRAIN", "FLOAT", "HALF", "Op", "Scope", "Signature", "Tensor", "inlined", "kind_of", "read", "signature_of"]

FLOAT, HALF, BRAIN = "tensor(float)", "tensor(float16)", "tensor(bfloat16)"
_FLOATS = (FLOAT, HALF, BRAIN, "tensor(double)")


@dataclass(slots=True, eq=False)
class Tensor:
    """One tensor of one scope."""

    name: str
    scope: Scope
    kind: str
    maker: Op | None = None
    stored: TensorProto | None = None
    """Its value: an initializer or the tensor of a Constant node."""
    users: list[tuple[Op, int]] = field(default_factory=list)
    """Who reads it and at which input, bodies that capture it included."""
    leaves: list[Scope] = field(default_factory=list)
    """The scopes that hand it out: those it is an output of."""


@dataclass(slots=True, eq=False)
class Op:
    """One node with its tensors. An input or output that is left out is None."""

    node: NodeProto
    scope: Scope
    signature: Signature | None
    inputs: list[Tensor | None]
    outputs: list[Tensor | None] = field(default_factory=list)
    bodies: dict[str, Scope] = field(default_factory=dict)

    @property
    def type(self) -> str:
        """The operator; another domain's with it, as `com.microsoft::Gelu`."""
        domain = walk.domain_of(self.node)
        return f"{domain}::{self.node.op_type}" if domain else self.node.op_type

    @property
    def label(self) -> str:
        return walk.label(self.node)


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
    """None for an output nobody makes."""
    ops: list[Op] = field(default_factory=list)

    def find(self, name: str) -> Tensor | None:
        """The tensor of that name here or in what stands around."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.tensors:
                return scope.tensors[name]
            scope = scope.parent
        return None

    def all_ops(self) -> Iterator[Op]:
        """The nodes in order, each followed by those of its bodies."""
        for op in self.ops:
            yield op
            for body in op.bodies.values():
                yield from body.all_ops()

    def all_scopes(self) -> Iterator[Scope]:
        """This scope and every body under it."""
        yield self
        for op in self.ops:
            for body in op.bodies.values():
                yield from body.all_scopes()


@dataclass(frozen=True, slots=True)
class Signature:
    """The types an operator takes and gives at one opset."""

    inputs: tuple[str, ...]
    """A type, or the name of a variable that stands for one."""
    outputs: tuple[str, ...]
    variables: dict[str, frozenset[str]]
    """What each variable may stand for."""

    def input(self, position: int) -> str:
        """The last formal input stands for all that follow."""
        return self.inputs[min(position, len(self.inputs) - 1)] if self.inputs else ""

    def output(self, position: int) -> str:
        return self.outputs[min(position, len(self.outputs) - 1)] if self.outputs else ""

    def allows(self, formal: str, kind: str) -> bool:
        """True when a tensor of this type may stand at that place."""
        return kind in self.variables[formal] if formal in self.variables else kind == formal


@cache
def signature_of(op: str, domain: str, version: int) -> Signature | None:
    """The types of an operator of the standard; None for one it does not have at that version."""
    try:
        schema = onnx.defs.get_schema(op, version, domain)
    except onnx.defs.SchemaError:
        return None
    return Signature(
        tuple(item.type_str for item in schema.inputs),
        tuple(item.type_str for item in schema.outputs),
        {item.type_param_str: frozenset(item.allowed_type_strs) for item in schema.type_constraints},
    )


@cache
def _kinds() -> dict[int, str]:
    return {number: f"tensor({name.lower()})" for name, number in TensorProto.DataType.items() if number}


def kind_of(elem: int) -> str:
    """The type of a tensor of this element type."""
    return _kinds().get(elem, "")


def declared(kind: TypeProto) -> str:
    """The type as the file states it."""
    which = kind.WhichOneof("value")
    if which == "tensor_type":
        return kind_of(kind.tensor_type.elem_type)
    if which == "sequence_type":
        return f"seq({declared(kind.sequence_type.elem_type)})"
    if which == "optional_type":
        return f"optional({declared(kind.optional_type.elem_type)})"
    if which == "sparse_tensor_type":
        return f"sparse_{kind_of(kind.sparse_tensor_type.elem_type)}"
    return "map()" if which == "map_type" else ""


def inlined(proto: ModelProto) -> ModelProto:
    """The model with its local functions written out where they are called; `ModelError` when that cannot be done."""
    if not proto.functions:
        return proto
    try:
        flat: ModelProto = inliner.inline_local_functions(proto)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(
            f"the model's local functions cannot be written out: {(str(error).splitlines() or [''])[0]}",
            hint="export the model again without functions (`torch.onnx.export(..., dynamo=True)` writes none)",
        ) from error
    return flat


def read(proto: ModelProto) -> Scope:
    """The main scope of a model, every tensor with its type, makers and users."""
    main = Scope(proto.graph)
    _Reader(walk.opsets_of(proto)).fill(main, [])
    return main


class _Reader:
    def __init__(self, opsets: dict[str, int]) -> None:
        self.opsets = opsets

    def fill(self, scope: Scope, given: list[str]) -> None:
        """Everything of one graph; `given` are the types of a body's inputs, as its node has them."""
        graph = scope.graph
        stated = {item.name: declared(item.type) for item in (*graph.value_info, *graph.output)}
        for tensor in graph.initializer:
            scope.tensors[tensor.name] = Tensor(tensor.name, scope, kind_of(tensor.data_type), stored=tensor)
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            scope.tensors[name] = Tensor(name, scope, kind_of(sparse.values.data_type))
        for position, value in enumerate(graph.input):
            if value.name in scope.tensors:
                continue
            kind = declared(value.type) or (given[position] if position < len(given) else "")
            made = scope.tensors[value.name] = Tensor(value.name, scope, kind)
            scope.inputs.append(made)
        for node in graph.node:
            self.node(node, scope, stated)
        for value in graph.output:
            found = scope.find(value.name)
            scope.outputs.append(found)
            if found is not None:
                found.leaves.append(scope)

    def node(self, node: NodeProto, scope: Scope, stated: dict[str, str]) -> None:
        domain = walk.domain_of(node)
        op = Op(
            node,
            scope,
            signature_of(node.op_type, domain, self.opsets[domain]) if domain in self.opsets else None,
            [scope.find(name) if name else None for name in node.input],
        )
        scope.ops.append(op)
        for position, tensor in enumerate(op.inputs):
            if tensor is not None:
                tensor.users.append((op, position))
        for name, body in walk.bodies(node):
            inner = op.bodies[name] = Scope(body, scope, op)
            self.fill(inner, _given(op))
        kinds = _made(op)
        for position, name in enumerate(node.output):
            if not name:
                op.outputs.append(None)
                continue
            kind = (kinds[position] if position < len(kinds) else "") or stated.get(name, "")
            tensor = scope.tensors[name] = Tensor(name, scope, kind, maker=op)
            if node.op_type == "Constant" and not domain:
                tensor.stored = next((item.t for item in node.attribute if item.name == "value"), None)
            op.outputs.append(tensor)


def _given(op: Op) -> list[str]:
    """The types a body's inputs have by what its node is given."""
    kinds = [tensor.kind if tensor is not None else "" for tensor in op.inputs]
    return ["tensor(int64)", "tensor(bool)", *kinds[2:]] if op.node.op_type == "Loop" else kinds


def _kind(op: Op, position: int) -> str:
    tensor = op.inputs[position] if position < len(op.inputs) else None
    return tensor.kind if tensor is not None else ""


def _made(op: Op) -> list[str]:
    """The types of a node's outputs; `""` for one that is not known."""
    count = len(op.node.output)
    if op.signature is None:
        return _made_by_stranger(op)
    own = _OWN.get(op.node.op_type) if not walk.domain_of(op.node) else None
    if own is not None:
        found = own(op, attributes(op.node))
        if found is not None:
            return found
    bound: dict[str, str] = {}
    for position, tensor in enumerate(op.inputs):
        formal = op.signature.input(position)
        if tensor is not None and tensor.kind and formal in op.signature.variables:
            bound.setdefault(formal, tensor.kind)
    kinds = []
    for position in range(count):
        formal = op.signature.output(position)
        allowed = op.signature.variables.get(formal)
        if allowed is None:
            kinds.append(formal)
        else:
            kinds.append(bound.get(formal) or (next(iter(allowed)) if len(allowed) == 1 else ""))
    return kinds


def _made_by_stranger(op: Op) -> list[str]:
    """ONNX Runtime's operators mostly give the type they take; of others nothing is known."""
    name, domain = op.node.op_type, walk.domain_of(op.node)
    if name in ("QuantizeLinear", "DequantizeLinear"):
        return (_quantized if name == "QuantizeLinear" else _dequantized)(op, attributes(op.node)) or [""]
    if domain.startswith("com.microsoft") or name == "SimplifiedLayerNormalization":
        first = next((tensor.kind for tensor in op.inputs if tensor is not None and tensor.kind in _FLOATS), "")
        return [first]
    return []


Own = Callable[[Op, dict[str, Any]], list[str] | None]


def _by(attribute: str, default: int | None) -> Own:
    """The type stands in an attribute; without it `default`, or the first input's."""

    def rule(op: Op, given: dict[str, Any]) -> list[str]:
        chosen = given.get(attribute) or default
        return [kind_of(chosen) if chosen else _kind(op, 0)]

    return rule


def _constant(op: Op, given: dict[str, Any]) -> list[str]:
    if "value" in given:
        return [kind_of(given["value"].data_type)]
    if "sparse_value" in given:
        return [kind_of(given["sparse_value"].values.data_type)]
    ours = {"value_float": FLOAT, "value_floats": FLOAT, "value_int": "tensor(int64)", "value_ints": "tensor(int64)"}
    return [next((ours[name] for name in given if name in ours), "tensor(string)")]


def _filled(op: Op, given: dict[str, Any]) -> list[str]:
    return [kind_of(given["value"].data_type) if "value" in given else FLOAT]


def _quantized(op: Op, given: dict[str, Any]) -> list[str]:
    return [_kind(op, 2) or kind_of(given.get("output_dtype") or TensorProto.UINT8)]


def _dequantized(op: Op, given: dict[str, Any]) -> list[str]:
    if given.get("output_dtype"):
        return [kind_of(given["output_dtype"])]
    if op.signature is not None and op.signature.outputs[0] not in op.signature.variables:
        return [op.signature.outputs[0]]
    return [_kind(op, 1) if _kind(op, 1) in _FLOATS else ""]


def _normalized(op: Op, given: dict[str, Any]) -> list[str]:
    stash = kind_of(given.get("stash_type", TensorProto.FLOAT))
    return [_kind(op, 0), stash, stash]


def _inside(kind: str, word: str) -> str:
    return kind[len(word) + 1 : -1] if kind.startswith(f"{word}(") else ""


def _branch(op: Op, given: dict[str, Any]) -> list[str]:
    sides = [[tensor.kind if tensor else "" for tensor in body.outputs] for body in op.bodies.values()]
    count = len(op.node.output)
    return [next((side[at] for side in sides if at < len(side) and side[at]), "") for at in range(count)]


def _loop(op: Op, given: dict[str, Any]) -> list[str]:
    carried = [_kind(op, at) for at in range(2, len(op.inputs))]
    body = op.bodies.get("body")
    outputs = [tensor.kind if tensor else "" for tensor in body.outputs[1:]] if body is not None else []
    return [*carried, *outputs[len(carried) :]]


def _scan(op: Op, given: dict[str, Any]) -> list[str]:
    body = op.bodies.get("body")
    return [tensor.kind if tensor else "" for tensor in body.outputs] if body is not None else []


_OWN: dict[str, Own] = {
    "Cast": _by("to", TensorProto.FLOAT),
    "BitCast": _by("to", None),
    "CastLike": lambda op, given: [_kind(op, 1)],
    "Constant": _constant,
    "ConstantOfShape": _filled,
    "RandomNormal": _by("dtype", TensorProto.FLOAT),
    "RandomUniform": _by("dtype", TensorProto.FLOAT),
    "Multinomial": _by("dtype", TensorProto.INT32),
    "RandomNormalLike": _by("dtype", None),
    "RandomUniformLike": _by("dtype", None),
    "EyeLike": _by("dtype", None),
    "Bernoulli": _by("dtype", None),
    "HannWindow": _by("output_datatype", TensorProto.FLOAT),
    "HammingWindow": _by("output_datatype", TensorProto.FLOAT),
    "BlackmanWindow": _by("output_datatype", TensorProto.FLOAT),
    "MelWeightMatrix": _by("output_datatype", TensorProto.FLOAT),
    "QuantizeLinear": _quantized,
    "DequantizeLinear": _dequantized,
    "LayerNormalization": _normalized,
    "SequenceEmpty": lambda op, given: [f"seq({kind_of(given.get('dtype') or TensorProto.FLOAT)})"],
    "SequenceConstruct": lambda op, given: [f"seq({_kind(op, 0)})"],
    "SplitToSequence": lambda op, given: [f"seq({_kind(op, 0)})"],
    "SequenceAt": lambda op, given: [_inside(_kind(op, 0), "seq")],
    "ConcatFromSequence": lambda op, given: [_inside(_kind(op, 0), "seq")],
    "Optional": lambda op, given: [f"optional({_kind(op, 0)})"] if op.inputs else None,
    "OptionalGetElement": lambda op, given: [_inside(_kind(op, 0), "optional") or _kind(op, 0)],
    "If": _branch,
    "Loop": _loop,
    "Scan": _scan,
}

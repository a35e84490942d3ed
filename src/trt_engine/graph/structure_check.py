"""Structural validity of a graph: unique results, no cycles, terminating functions, well-formed tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from graphlib import CycleError, TopologicalSorter

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, defs

from trt_engine.errors import ModelError, UsageError
from trt_engine.graph import walk
from trt_engine.limits import FUNCTION_NODES, MODEL_INPUTS, MODEL_NODES
from trt_engine.model import GraphIndex, NodeLocation
from trt_engine.tensors import dtype, format_shape
from trt_engine.units import count_elements

_EXPANDED = 10
"""Nodes allowed per node of the file when local functions are inlined, beyond the limit."""
_MAX_VERSION = (1 << 31) - 1
_MAX_DIMENSIONS = 64
"""Maximum rank of a numpy array."""
_Key = tuple[str, str, str]
"""Domain, name and overload of a local function."""
_DAMAGED_HINT = "copy or download the file again, and compare its size"


class InvalidModel(ModelError):
    """What is wrong with a model, as "is damaged: ..."; `graph.load.parse_errors` puts the name of the file before it."""


def check_names(graph: GraphIndex) -> None:
    """`InvalidModel` for a name that is not text."""
    if set(map(type, _names(graph))) <= {str}:
        return
    name = next(name for name in _names(graph) if not isinstance(name, str))  # bytes: not valid UTF-8
    raise InvalidModel(f"is damaged: the name {name!r} is not text", hint=_DAMAGED_HINT)


def _names(graph: GraphIndex) -> Iterator[object]:
    """Every string of the model that is used as a key or displayed."""
    proto = graph.proto
    yield from (proto.producer_name, proto.producer_version)
    for item in proto.metadata_props:
        yield from (item.key, item.value)
    for body in graph.graphs:
        for value in (*body.input, *body.output):
            yield value.name
            for dim in value.type.tensor_type.shape.dim:
                yield dim.dim_param
        for tensor in body.initializer:
            yield tensor.name
    for tensor in graph.tensors:
        if tensor.external_data:
            for entry in tensor.external_data:
                yield from (entry.key, entry.value)
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
    for owner in (proto, *proto.functions):
        for opset in owner.opset_import:
            yield opset.domain
    for place in graph.nodes:
        node = place.node
        yield from (node.op_type, node.domain, node.name)
        yield from node.input
        yield from node.output
        for attribute in node.attribute:
            yield attribute.name


def check_structure(graph: GraphIndex) -> None:
    """`InvalidModel` for a tensor whose data does not match its shape and type, a tensor with two producers, a cycle of
    nodes, and local functions that recurse or grow without limit."""
    proto = graph.proto
    for item in (*proto.opset_import, *(entry for function in proto.functions for entry in function.opset_import)):
        if not 0 <= item.version <= _MAX_VERSION:
            raise InvalidModel(
                f"is damaged: version {item.version} of the operator set `{item.domain or 'ai.onnx'}`",
                hint=_DAMAGED_HINT,
            )
    for body in graph.graphs:
        for value in (*body.input, *body.output):
            if len(value.type.tensor_type.shape.dim) > _MAX_DIMENSIONS:
                raise InvalidModel(
                    f"declares {len(value.type.tensor_type.shape.dim)} dimensions for `{value.name}`, expected at "
                    f"most {_MAX_DIMENSIONS}",
                    hint="export the model again",
                )
    for tensor in graph.tensors:
        _check_tensor(tensor)
    for sparse in (item for body in graph.graphs for item in body.sparse_initializer):
        _checked_dims(sparse.values.name, sparse.dims)
    for place in graph.nodes:
        if place.node.attribute:
            _check_attributes(place, graph.functions)
    for body in graph.graphs:
        _check_graph(body, [item.name for item in body.input])
    for function in proto.functions:
        _check_graph(function, function.input)
    _check_functions(graph)


def check_part_limits(proto: ModelProto) -> None:
    """`InvalidModel` for more parts than the limits allow, without looking into them."""
    parts = len(proto.graph.input) + len(proto.graph.output)
    if parts > MODEL_INPUTS.value:
        raise InvalidModel(f"has {parts:,} inputs and outputs, more than {MODEL_INPUTS.value:,}",
                         hint=MODEL_INPUTS.hint)  # fmt: skip
    most, parts = MODEL_NODES.value, len(proto.graph.node) + len(proto.graph.initializer)
    if parts <= most:  # only now are there few enough nodes to search for bodies
        graphs = list(walk.graphs(proto))
        parts = sum(len(owner.node) for owner in (*graphs, *proto.functions))
        parts += sum(len(graph.initializer) for graph in graphs)
    if parts > most:
        raise InvalidModel(f"has {parts:,} nodes and stored tensors, more than the limit of {most:,}",
                         hint=MODEL_NODES.hint)  # fmt: skip


_FIELDS: dict[int, str] = {
    **dict.fromkeys((TensorProto.FLOAT, TensorProto.COMPLEX64), "float_data"),
    **dict.fromkeys((TensorProto.DOUBLE, TensorProto.COMPLEX128), "double_data"),
    **dict.fromkeys((TensorProto.UINT32, TensorProto.UINT64), "uint64_data"),
    TensorProto.INT64: "int64_data",
    TensorProto.STRING: "string_data",
}
"""Data field by type for data that is not raw; all others use `int32_data`."""


def _checked_dims(name: str, stated: Sequence[int]) -> tuple[int, ...]:
    """The sizes of a stored tensor; `InvalidModel` for too many or negative ones."""
    dims = tuple(stated)
    if len(dims) > _MAX_DIMENSIONS or any(size < 0 for size in dims):
        what = f"{len(dims)} dimensions" if len(dims) > _MAX_DIMENSIONS else "a negative size"
        raise InvalidModel(f"has a tensor `{name}` with {what}", hint=_DAMAGED_HINT)
    return dims


def _check_tensor(tensor: TensorProto) -> None:
    """`InvalidModel` unless the stored data matches the tensor's shape and type."""
    dims = _checked_dims(tensor.name, tensor.dims)
    if tensor.HasField("segment"):
        raise InvalidModel(
            f"has only a segment of the tensor `{tensor.name}`, expected all of it", hint="export it again"
        )
    try:
        kind = dtype(tensor.data_type)
    except UsageError as error:
        raise InvalidModel(
            f"has a tensor `{tensor.name}` of the unknown element type {tensor.data_type}",
            hint="export the model again; a newer trt-engine may know the type",
        ) from error
    if tensor.data_location == TensorProto.EXTERNAL:
        return
    elements = count_elements(dims)
    stored = len(getattr(tensor, _FIELDS.get(tensor.data_type, "int32_data")))
    if kind.name != "string" and (tensor.HasField("raw_data") or not (elements or stored)):
        found, needed, unit = len(tensor.raw_data), kind.nbytes(dims), "bytes"
    else:
        found, unit = stored, "elements"
        needed = elements * 2 if kind.name.startswith("complex") else elements
        if kind.bits < 8 and kind.name != "string":
            needed = -(-elements * kind.bits // 8)
    if found != needed:
        raise InvalidModel(
            f"is damaged: its tensor `{tensor.name}` has {found} {unit}, and its shape "
            f"{format_shape(dims)[:60]} and type {kind.name} need {needed}",
            hint=_DAMAGED_HINT,
        )


_VALUE_FIELDS: dict[int, str] = {
    AttributeProto.INT: "i",
    AttributeProto.FLOAT: "f",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
}
"""Field of an attribute's value by its stated type, of those that hold one."""
_OTHER_FIELDS = {kind: tuple(name for other, name in _VALUE_FIELDS.items() if other != kind) for kind in _VALUE_FIELDS}


def _type_name(kind: int) -> str:
    names: dict[int, str] = {value: name for name, value in AttributeProto.AttributeType.items()}
    return names[kind]


def _check_attributes(place: NodeLocation, functions: frozenset[tuple[str, str]]) -> None:
    """`InvalidModel` for an attribute of another type than its operator takes, or with a value of another type than stated:
    each reader would read something else."""
    node, domain = place.node, walk.domain_of(place.node)
    key = (node.op_type, domain, place.opsets.get(domain, 1))
    known = {} if (domain, node.op_type) in functions else _attribute_types(*key)
    for item in node.attribute:
        kind = item.type
        if kind == AttributeProto.UNDEFINED:  # no reader takes it
            continue
        for name in _OTHER_FIELDS.get(kind) or _VALUE_FIELDS.values():
            if item.HasField(name):
                raise InvalidModel(
                    f"is damaged: the attribute `{item.name}` of node `{walk.label(node)}` is stated as {_type_name(kind)} "
                    f"and has a value of another type (`{name}`)",
                    hint=_DAMAGED_HINT,
                )
        if kind == AttributeProto.SPARSE_TENSOR:
            _checked_dims(item.name, item.sparse_tensor.dims)
        if known.get(item.name, kind) != kind:
            raise InvalidModel(
                f"has the attribute `{item.name}` of node `{walk.label(node)}` as {_type_name(kind)}, and the operator "
                f"`{node.op_type}` (opset {key[2]}) takes {_type_name(known[item.name])}",
                hint="export the model again",
            )
        if node.op_type == "ConstantOfShape" and item.HasField("t") and count_elements(item.t.dims) != 1:
            raise InvalidModel(
                f"fills a tensor with {count_elements(item.t.dims)} values (node `{walk.label(node)}`), expected one",
                hint="export the model again",
            )


@cache
def _attribute_types(op: str, domain: str, version: int) -> dict[str, int]:
    """Types of an operator's attributes by name; empty for an operator that ONNX does not define."""
    try:
        schema = defs.get_schema(op, version, domain)
    except defs.SchemaError:
        return {}
    known = dict(AttributeProto.AttributeType.items())
    return {name: known[str(item.type).rpartition(".")[2]] for name, item in schema.attributes.items()}


_MAX_EQUATION_LENGTH = 4096
"""Bytes of an Einsum equation, which has at most 52 different letters."""


def _check_equation(node: NodeProto) -> None:
    """Reject equations with a dot outside of one `...` per term: ONNX's shape inference does not terminate on them."""
    for item in node.attribute:
        if item.name != "equation":
            continue
        terms = item.s.replace(b"->", b",").split(b",")
        if len(item.s) > _MAX_EQUATION_LENGTH or any(term.replace(b"...", b"", 1).count(b".") for term in terms):
            shown = item.s[:40].decode(errors="replace")
            raise InvalidModel(
                f"has an Einsum (node `{walk.label(node)}`) with the equation `{shown}`, expected terms "
                "of letters with at most one `...` each",
                hint="export the model again",
            )


def _check_graph(owner: GraphProto | FunctionProto, inputs: Sequence[str]) -> None:
    makers: dict[str, NodeProto] = {}
    given, early = set(inputs), set[str]()
    if len(given) < len(inputs):
        twice = Counter(inputs).most_common(1)[0][0]
        raise InvalidModel(f"is broken: `{owner.name}` has two inputs `{twice}`", hint=_DAMAGED_HINT)
    for node in owner.node:
        if node.op_type == "Einsum":
            _check_equation(node)
        for name in walk.names_read(node):
            if name not in makers:  # from outside, or of a later node
                early.add(name)
        for name in node.output:
            if name and (name in makers or name in given):
                other = f"node `{walk.label(makers[name])}`" if name in makers else "an input of that name"
                raise InvalidModel(
                    f"is broken: `{name}` is produced twice, by node `{walk.label(node)}` ({node.op_type}) and by "
                    f"{other}",
                    hint="the file was edited; export the model again",
                )
            if name:
                makers[name] = node
    if not early.isdisjoint(makers) and (loop := _find_cycle(owner)):
        raise InvalidModel(
            f"is broken: its nodes form a cycle: {' -> '.join(f'`{name}`' for name in loop)}",
            hint="the file was edited; export the model again",
        )


def _find_cycle(owner: GraphProto | FunctionProto) -> list[str]:
    """Labels of the nodes of a cycle, at most eight; empty without one."""
    makers = {name: at for at, node in enumerate(owner.node) for name in node.output if name}
    above = {
        at: {makers[name] for name in walk.names_read(node) if name in makers} for at, node in enumerate(owner.node)
    }
    try:
        TopologicalSorter(above).prepare()
    except CycleError as error:
        names = [walk.label(owner.node[at]) for at in error.args[1][:-1]]
        return [*names[:8], *(["..."] if len(names) > 8 else []), names[0]]
    return []


def _check_call(node: NodeProto, function: FunctionProto) -> None:
    counts = ("inputs", node.input, function.input), ("outputs", node.output, function.output)
    for what, given, formal in ((name, len(ours), len(theirs)) for name, ours, theirs in counts):
        if given > formal:
            raise InvalidModel(
                f"is broken: node `{walk.label(node)}` has {given} {what}, and its local function "
                f"`{function.name}` has {formal}",
                hint="the file was edited; export the model again",
            )


def _check_functions(graph: GraphIndex) -> None:
    proto = graph.proto
    if not proto.functions:
        return
    bodies = {(item.domain, item.name, item.overload): item for item in proto.functions}
    if len(bodies) < len(proto.functions):
        raise InvalidModel("is broken: two of its local functions have the same name", hint=_DAMAGED_HINT)
    sizes: dict[_Key, int] = {}

    def size(key: _Key, above: tuple[_Key, ...]) -> int:
        if key in above:
            circle = " -> ".join(f"`{name}`" for _, name, _ in (*above[above.index(key) :], key))
            raise InvalidModel(
                f"is broken: its local functions call each other in a cycle: {circle}",
                hint="the file was edited; export the model again",
            )
        if len(above) > 200:
            raise InvalidModel(
                "nests its local functions more than 200 deep",
                hint="export the model again without functions",
            )
        if key not in sizes:
            sizes[key] = _written_out(bodies[key].node, (*above, key))
        return sizes[key]

    def _written_out(nodes: Iterable[NodeProto], above: tuple[_Key, ...]) -> int:
        total = 0
        for node in nodes:
            called = (node.domain, node.op_type, node.overload)
            if called in bodies:
                _check_call(node, bodies[called])
                total += size(called, above)
            else:
                total += 1
            for _, body in walk.bodies(node):
                total += _written_out(body.node, above)
        return total

    for key in bodies:
        size(key, ())
    total = _written_out(proto.graph.node, ())
    in_file = len(graph.nodes)
    most = min(FUNCTION_NODES.value + _EXPANDED * in_file, MODEL_NODES.value)
    if total > most:
        limit = MODEL_NODES if most == MODEL_NODES.value else FUNCTION_NODES
        raise InvalidModel(
            f"has {in_file:,} nodes, and {total:,} once its local functions are inlined, more than the "
            f"limit of {most:,}",
            hint=f"export the model again without nested functions; {limit.hint}",
        )

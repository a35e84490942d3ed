"""Our own simplification: what changes no number. Local functions written out, shape arithmetic and constants folded, equal
nodes and equal weights made one, what nobody reads removed.

It needs nothing beyond the core, and it is what onnxslim starts from.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.conversion import outside
from trt_engine.errors import ModelError
from trt_engine.graph import walk
from trt_engine.graph.census import is_dequantize, is_quantize
from trt_engine.graph.trace import attributes
from trt_engine.precision.elements import inlined

__all__ = [
    "RANDOM",
    "Counts",
    "constants_as_initializers",
    "false_constants",
    "inline",
    "inputs_without_initializers",
    "is_random",
    "quantised_weights",
    "rewrite",
    "share_equal_weights",
    "with_shapes",
]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

RANDOM = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli".split())
_FOLDED_UP_TO = 1 << 20
"""Bytes of a folded result that may be larger than what it is made of."""
_ROUNDS = 10
_FAILED: tuple[type[Exception], ...] = (*session.ERRORS, ModelError)
_INDICES = (TensorProto.INT64, TensorProto.INT32)
_NOT_IN_NUMPY = frozenset({0, TensorProto.STRING, TensorProto.BFLOAT16, *range(17, 64)})


@dataclass(slots=True)
class Counts:
    """What was done to a graph."""

    folded: int = 0
    """Nodes that became constants."""
    shared: int = 0
    """Nodes that were another one's equal."""
    weights_shared: int = 0
    notes: list[str] = field(default_factory=list)


# ------------------------------------------------------------------------------------------------ putting it plainly


def inline(proto: ModelProto) -> tuple[ModelProto, int]:
    """The model with its local functions written out where they are called, and how many there were."""
    return inlined(proto), len(proto.functions)


def inputs_without_initializers(proto: ModelProto) -> None:
    """Initializers are constants: those that are listed as inputs too (as IR version 3 has it) are not listed any more."""
    stored = {item.name for item in proto.graph.initializer}
    _keep(proto.graph.input, lambda item: item.name not in stored)
    proto.ir_version = max(proto.ir_version, 4)


def constants_as_initializers(proto: ModelProto) -> None:
    """Constant nodes of the main graph as initializers, in place; an output of the model stays a node's."""
    graph = proto.graph
    outputs = {item.name for item in graph.output}
    gone = set()
    for node in graph.node:
        if node.op_type != "Constant" or walk.domain_of(node) or not node.output or node.output[0] in outputs:
            continue
        tensor = _constant(node)
        if tensor is not None:
            tensor.name = node.output[0]
            graph.initializer.append(tensor)
            gone.add(node.output[0])
    _keep(graph.node, lambda node: node.op_type != "Constant" or node.output[0] not in gone)


def _constant(node: NodeProto) -> TensorProto | None:
    given = attributes(node)
    made = TensorProto()
    if isinstance(value := given.get("value"), TensorProto):
        made.CopyFrom(value)
        return made
    for name, kind in (("value_int", np.int64), ("value_ints", np.int64), ("value_float", np.float32)):
        if name in given:
            made.CopyFrom(numpy_helper.from_array(np.array(given[name], kind)))
            return made
    if "value_floats" in given:
        made.CopyFrom(numpy_helper.from_array(np.array(given["value_floats"], np.float32)))
        return made
    return None  # strings and sparse tensors stay nodes


def _keep(items: Any, wanted: Any) -> None:
    """Only the wanted ones, in place, each looked at once."""
    kept = [item for item in items if wanted(item)]
    if len(kept) != len(items):
        copies = [type(item).FromString(item.SerializeToString()) for item in kept]
        del items[:]
        items.extend(copies)


def is_random(node: NodeProto, off: Collection[str] = ()) -> bool:
    """True for a node whose results differ from run to run. `off` names constants that are false: what turns Dropout off."""
    if walk.domain_of(node):
        return False
    if node.op_type == "Dropout" and len(node.input) > 2 and node.input[2]:
        return node.input[2] not in off
    return node.op_type in RANDOM or any(is_random(inner, off) for _, body in walk.bodies(node) for inner in body.node)


def false_constants(proto: ModelProto) -> set[str]:
    """Stored booleans that are false."""
    found = set()
    for graph in walk.graphs(proto):
        stored = [(item.name, item) for item in graph.initializer]
        stored += [
            (node.output[0], tensor)
            for node in graph.node
            if node.op_type == "Constant" and node.output and (tensor := _constant(node)) is not None
        ]
        for name, tensor in stored:
            inside = tensor.data_type == TensorProto.BOOL and tensor.data_location != TensorProto.EXTERNAL
            if inside and not numpy_helper.to_array(tensor).any():
                found.add(name)
    return found


def quantised_weights(proto: ModelProto) -> set[str]:
    """Initializers that reach a Q/DQ node through constant nodes alone: folding them would take the quantisation away."""
    graph = proto.graph
    leaves: dict[str, set[str]] = {item.name: {item.name} for item in graph.initializer}
    found: set[str] = set()
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if (is_quantize(node) or is_dequantize(node)) and inputs and inputs[0] in leaves:
            found |= leaves[inputs[0]]
        if inputs and all(name in leaves for name in inputs):
            union = set().union(*(leaves[name] for name in inputs))
            leaves.update((name, union) for name in node.output if name)
    return found


# ------------------------------------------------------------------------------------------------ the passes


def rewrite(proto: ModelProto, folder: Path, keep: Collection[str] = ()) -> Counts:
    """Simplify the main graph in place, without changing a number. `keep` names tensors that are to stay.

    Tensors that are hidden (`outside.hide`) are inputs like any other here. Constant nodes are expected to be
    initializers, local functions to be written out.
    """
    counts = Counts()
    kept = set(keep) | {item.name for item in proto.graph.output}
    counts.weights_shared += share_equal_weights(proto, folder)
    for _ in range(_ROUNDS):
        before = proto.graph.ByteSize(), len(proto.graph.node)
        types = _types(proto)
        _drop_idle(proto, types, kept)
        counts.folded += _fold_shapes(proto, types, kept)
        counts.folded += _fold_constants(proto, types, kept, counts.notes)
        counts.shared += _share_nodes(proto, kept)
        _drop_dead(proto, kept)
        share_equal_weights(proto, folder, small=True)  # constants made here: nobody's weights
        if before == (proto.graph.ByteSize(), len(proto.graph.node)):
            break
    return counts


def with_shapes(proto: ModelProto) -> None:
    """ONNX's shape inference written into `value_info` and into outputs that state no rank, in place; what it cannot do
    stays out."""
    del proto.graph.value_info[:]
    try:
        found = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    except Exception as error:  # its errors and the checker's have no common base
        log.info("no shapes inferred: %s", error)
        return
    proto.graph.value_info.extend(found.graph.value_info)
    for value, known in zip(proto.graph.output, found.graph.output, strict=True):
        if not value.type.tensor_type.HasField("shape"):
            value.CopyFrom(known)


def _types(proto: ModelProto) -> dict[str, TypeProto]:
    """What inference says of every tensor; nothing that the file claims of what lies between inputs and outputs."""
    plain = ModelProto()
    plain.CopyFrom(proto)
    del plain.graph.value_info[:]
    for value in plain.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    try:
        plain = onnx.shape_inference.infer_shapes(plain, data_prop=True)
    except Exception as error:  # its errors and the checker's have no common base
        log.debug("no shapes inferred: %s", error)
    graph = plain.graph
    found = {item.name: item.type for item in (*graph.value_info, *graph.output, *graph.input)}
    for tensor in graph.initializer:
        found[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
    return found


def _elem(types: Mapping[str, TypeProto], name: str) -> int:
    return int(types[name].tensor_type.elem_type) if name in types else 0


_Size = int | str | None


def _sizes(types: Mapping[str, TypeProto], name: str) -> list[_Size] | None:
    """The sizes of a tensor: a number, a symbol, or None; None when its rank is not known."""
    if name not in types or not types[name].tensor_type.HasField("shape"):
        return None
    return [
        dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else dim.dim_param or None
        for dim in types[name].tensor_type.shape.dim
    ]


def _rename(graph: GraphProto, new: Mapping[str, str]) -> None:
    """Every read of a tensor as a read of another, bodies included; a body's own tensor of that name is not meant."""
    for node in graph.node:
        for at, name in enumerate(node.input):
            if name in new:
                node.input[at] = new[name]
        for _, body in walk.bodies(node):
            own = {item.name for item in (*body.input, *body.initializer)}
            own.update(name for inner in body.node for name in inner.output)
            inner_new = {name: to for name, to in new.items() if name not in own}
            if inner_new:
                _rename(body, inner_new)
                for item in body.output:
                    item.name = inner_new.get(item.name, item.name)


def _resolved(new: dict[str, str]) -> dict[str, str]:
    """Renames followed to their end."""
    made = {}
    for name in new:
        end = new[name]
        while end in new:
            end = new[end]
        made[name] = end
    return made


def _reads(proto: ModelProto) -> Counter[str]:
    counted = Counter(name for place in walk.nodes(proto) for name in place.node.input if name)
    counted.update(item.name for inner in walk.graphs(proto) for item in inner.output)
    return counted


# ---- nodes that do nothing


def _drop_idle(proto: ModelProto, types: Mapping[str, TypeProto], kept: Collection[str]) -> None:
    graph = proto.graph
    stored = {item.name: item for item in graph.initializer}
    reads = _reads(proto)
    captured = {name for node in graph.node for _, body in walk.bodies(node) for name in _captures(body)}
    makers = {name: node for node in graph.node for name in node.output if name}
    new: dict[str, str] = {}
    gone: set[str] = set()
    for node in graph.node:
        if not _idle(node, types, stored, reads):
            continue
        source, made = new.get(node.input[0], node.input[0]), node.output[0]
        if made not in kept:
            new[made] = source
            gone.add(made)
            continue
        maker = makers.get(source)  # the output's name moves to the node that makes it
        if maker is None or source in kept or source in captured or made in captured or source in new.values():
            continue
        maker.output[list(maker.output).index(source)] = made
        makers[made] = maker
        new[source] = made
        node.output[0] = f"{made}\n"  # nobody's name, until it is removed below
        gone.add(node.output[0])
    if gone:
        _keep(graph.node, lambda node: not (node.output and node.output[0] in gone))
        _rename(graph, _resolved(new))


def _captures(body: GraphProto) -> set[str]:
    found: set[str] = {item.name for item in body.output}
    for node in body.node:
        found.update(node.input)
        for _, inner in walk.bodies(node):
            found |= _captures(inner)
    return found


def _idle(
    node: NodeProto, types: Mapping[str, TypeProto], stored: Mapping[str, TensorProto], reads: Counter[str]
) -> bool:
    """True when the first output is the first input, and nothing else of the node is read."""
    if walk.domain_of(node) or not node.input or not node.input[0] or not node.output:
        return False
    if any(reads[name] for name in node.output[1:] if name):
        return False
    op, given = node.op_type, attributes(node)
    if op == "Identity":
        return True
    if op == "Dropout":
        if len(node.input) < 3 or not node.input[2]:
            return bool(given.get("is_test", 1))
        mode = stored.get(node.input[2])
        return mode is not None and mode.data_location != TensorProto.EXTERNAL and not numpy_helper.to_array(mode).any()
    if op == "Cast":
        return _elem(types, node.input[0]) == given.get("to")
    if op == "Transpose":
        return "perm" in given and list(given["perm"]) == list(range(len(given["perm"])))
    return op in ("Concat", "Sum", "Max", "Min", "Mean") and len(node.input) == 1


# ---- constants


def _fold_constants(proto: ModelProto, types: Mapping[str, TypeProto], kept: Collection[str], notes: list[str]) -> int:
    """Nodes that read constants alone become constants, worked out by ONNX Runtime in one run."""
    graph = proto.graph
    stored = {item.name: item for item in graph.initializer if item.data_location != TensorProto.EXTERNAL}
    known = {name: outside.nbytes_of(item) for name, item in stored.items()}
    chosen: list[NodeProto] = []
    for node in graph.node:
        inputs = [name for name in node.input if name]
        if not inputs or any(name not in known for name in inputs) or not _foldable(node, kept):
            continue
        sizes = [_bytes(types, name) for name in node.output if name]
        limit = max(_FOLDED_UP_TO, sum(known[name] for name in inputs))
        if any(size is None or size > limit for size in sizes):
            continue
        chosen.append(node)
        known.update((name, size or 0) for name, size in zip([n for n in node.output if n], sizes, strict=True))
    made = _worked_out(proto, chosen, stored, types, notes)
    if not made:
        return 0
    # a chain is folded from its start to where it was worked out: the rest of it is dead then
    done = [node for node in chosen if all(name in made for name in node.output if name)]
    gone = {node.output[0] for node in done}
    _keep(graph.node, lambda node: not (node.output and node.output[0] in gone))
    left = {name for node in graph.node for name in node.input} | kept_names(graph)
    graph.initializer.extend(
        numpy_helper.from_array(np.asarray(value), name) for name, value in made.items() if name in left
    )
    return len(done)


def kept_names(graph: GraphProto) -> set[str]:
    """Names that bodies of the graph read from around them."""
    return {name for node in graph.node for _, body in walk.bodies(node) for name in _captures(body)}


def _foldable(node: NodeProto, kept: Collection[str]) -> bool:
    if walk.domain_of(node) or is_random(node) or is_quantize(node) or is_dequantize(node):
        return False
    if any(True for _ in walk.bodies(node)) or any(name in kept for name in node.output):
        return False
    return node.op_type != "Dropout"


def _bytes(types: Mapping[str, TypeProto], name: str) -> int | None:
    """Bytes of a tensor that numpy can hold; None when that is not known."""
    sizes, elem = _sizes(types, name), _elem(types, name)
    if sizes is None or elem in _NOT_IN_NUMPY:
        return None
    total = 1
    for size in sizes:
        if not isinstance(size, int):
            return None
        total *= size
    return total * int(helper.tensor_dtype_to_np_dtype(elem).itemsize)


def _worked_out(
    proto: ModelProto,
    chosen: Sequence[NodeProto],
    stored: Mapping[str, TensorProto],
    types: Mapping[str, TypeProto],
    notes: list[str],
) -> dict[str, Array]:
    if not chosen:
        return {}
    try:
        return _run(proto, chosen, stored, types)
    except _FAILED as error:
        log.debug("constants are folded one by one: %s", error)
    made: dict[str, Array] = {}
    failed: Counter[str] = Counter()
    for node in chosen:
        have = {name: numpy_helper.from_array(made[name], name) for name in node.input if name in made}
        have.update((name, stored[name]) for name in node.input if name in stored)
        if any(name and name not in have for name in node.input):
            continue
        try:
            made.update(_run(proto, [node], have, types))
        except _FAILED as error:
            log.debug("`%s` is not folded: %s", walk.label(node), error)
            failed[node.op_type] += 1
    notes.extend(f"{number} constant {op} nodes stay: ONNX Runtime does not run them" for op, number in failed.items())
    return made


def _run(
    proto: ModelProto, chosen: Sequence[NodeProto], stored: Mapping[str, TensorProto], types: Mapping[str, TypeProto]
) -> dict[str, Array]:
    names = [name for node in chosen for name in node.output if name]
    read = {name for node in chosen for name in node.input}
    graph = helper.make_graph(
        list(chosen), "constants", [],
        [helper.make_tensor_value_info(name, _elem(types, name), None) for name in names],
        [tensor for name, tensor in stored.items() if name in read],
    )  # fmt: skip
    for at, node in enumerate(graph.node):
        node.name = f"constant_{at}"
    model = helper.make_model(graph, opset_imports=list(proto.opset_import), ir_version=min(proto.ir_version, 10))
    made = session.session_options(OnnxRuntimeOptions(arena=False, intra_op_threads=1), level="none")
    loaded = ort.InferenceSession(
        model.SerializeToString(), made, providers=["CPUExecutionProvider"], enable_fallback=0
    )
    return dict(zip(names, loaded.run(names, {}), strict=True))


# ---- shape arithmetic


@dataclass(frozen=True, slots=True)
class _Vector:
    """A small integer tensor of which some elements are known: a number, the symbol of a size, or None."""

    items: tuple[_Size, ...]
    elem: int
    scalar: bool = False

    @property
    def known(self) -> bool:
        return all(isinstance(item, int) for item in self.items)


def _fold_shapes(proto: ModelProto, types: Mapping[str, TypeProto], kept: Collection[str]) -> int:
    """What is computed from sizes that do not move, as constants; targets of Reshape that only copy sizes, too."""
    graph = proto.graph
    vectors: dict[str, _Vector] = {}
    for tensor in graph.initializer:
        if (vector := _stored_vector(tensor)) is not None:
            vectors[tensor.name] = vector
    fixed = set(vectors)
    made: dict[str, TensorProto] = {}
    folded = 0
    for node in graph.node:
        if walk.domain_of(node):
            continue
        if node.op_type == "Reshape":
            folded += _fold_target(node, types, vectors, fixed, made)
            continue
        name = node.output[0] if node.output else ""
        if len(node.output) != 1 or not name:
            continue
        vector = _vector(node, types, vectors)
        if vector is None:
            continue
        vectors[name] = vector
        if vector.known and name not in kept:
            made[name] = _tensor(vector, name)
            fixed.add(name)
    gone = [node for node in graph.node if node.output and node.output[0] in made]
    if made:
        names = {node.output[0] for node in gone}
        _keep(graph.node, lambda node: not (node.output and node.output[0] in names))
        graph.initializer.extend(made.values())
    return folded + len(gone)


def _tensor(vector: _Vector, name: str) -> TensorProto:
    kind = helper.tensor_dtype_to_np_dtype(vector.elem)
    values = np.array([int(item or 0) for item in vector.items], kind)
    made: TensorProto = numpy_helper.from_array(values.reshape(()) if vector.scalar else values, name)
    return made


def _stored_vector(tensor: TensorProto) -> _Vector | None:
    if tensor.data_location == TensorProto.EXTERNAL or len(tensor.dims) > 1 or math.prod(tensor.dims) > 64:
        return None
    if tensor.data_type not in (*_INDICES, TensorProto.BOOL):
        return None
    values = numpy_helper.to_array(tensor)
    return _Vector(tuple(int(item) for item in values.reshape(-1)), tensor.data_type, scalar=not tensor.dims)


def _vector(node: NodeProto, types: Mapping[str, TypeProto], vectors: Mapping[str, _Vector]) -> _Vector | None:
    given = attributes(node)
    if node.op_type == "Shape":
        sizes = _sizes(types, node.input[0])
        if sizes is None or len(sizes) > 64:
            return None
        return _Vector(tuple(sizes[slice(given.get("start", 0), given.get("end"))]), TensorProto.INT64)
    if node.op_type == "Size":
        sizes = _sizes(types, node.input[0])
        known = [size for size in sizes or () if isinstance(size, int)]
        if sizes is None or len(known) != len(sizes):
            return None
        return _Vector((math.prod(known),), TensorProto.INT64, scalar=True)
    if not node.input or any(name and name not in vectors for name in node.input):
        return None
    inputs = [vectors[name] for name in node.input if name]
    rule = _RULES.get(node.op_type)
    if rule is None:
        return None
    try:
        made: _Vector | None = rule(inputs, given)
        return made
    except (ValueError, TypeError, IndexError, KeyError):  # a damaged graph: it is not this pass that reports it
        return None


def _ints(vector: _Vector) -> list[int]:
    if not vector.known:
        raise ValueError("not known")
    return [int(item or 0) for item in vector.items]


def _gather(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    data, at = inputs
    if data.scalar or given.get("axis", 0) not in (0, -1):
        return None
    return _Vector(tuple(data.items[index] for index in _ints(at)), data.elem, at.scalar)


def _slice(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    data = inputs[0]
    if len(inputs) > 1:
        starts, ends = _ints(inputs[1]), _ints(inputs[2])
        steps = _ints(inputs[4]) if len(inputs) > 4 else [1]
    else:
        starts, ends, steps = list(given["starts"]), list(given["ends"]), [1]
    if data.scalar or len(starts) != 1 or steps != [1]:
        return None
    return _Vector(data.items[slice(starts[0], ends[0])], data.elem)


def _unsqueeze(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    axes = _ints(inputs[1]) if len(inputs) > 1 else list(given["axes"])
    return _Vector(inputs[0].items, inputs[0].elem) if inputs[0].scalar and axes in ([0], [-1]) else None


def _squeeze(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    data = inputs[0]
    return _Vector(data.items, data.elem, scalar=True) if not data.scalar and len(data.items) == 1 else None


def _concat(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    if any(item.scalar for item in inputs):
        return None
    return _Vector(tuple(size for item in inputs for size in item.items), inputs[0].elem)


def _cast(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    data, to = inputs[0], int(given["to"])
    if to not in _INDICES or (to == TensorProto.INT32 and any(abs(_or_0(item)) >= 1 << 31 for item in data.items)):
        return None
    return _Vector(data.items, to, data.scalar)


def _or_0(item: _Size) -> int:
    return item if isinstance(item, int) else 0


def _reshaped(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    target = _ints(inputs[1])
    if target in ([-1], [len(inputs[0].items)]):
        return _Vector(inputs[0].items, inputs[0].elem)
    return _Vector(inputs[0].items, inputs[0].elem, scalar=True) if not target else None


def _pairs(one: _Vector, two: _Vector) -> tuple[list[tuple[_Size, _Size]], bool]:
    length = max(len(one.items), len(two.items))
    if len({len(one.items), len(two.items)} - {1, length}) > 0:
        raise ValueError("these do not go together")
    wide = [item.items * length if len(item.items) == 1 else item.items for item in (one, two)]
    return list(zip(*wide, strict=True)), one.scalar and two.scalar


def _arithmetic(op: str) -> Any:
    def rule(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
        pairs, scalar = _pairs(*inputs)
        items = tuple(_computed(op, a, b) for a, b in pairs)
        top = (1 << (31 if inputs[0].elem == TensorProto.INT32 else 63)) - 1
        if inputs[0].elem not in _INDICES or any(abs(_or_0(item)) > top for item in items):
            return None  # the machine would go round; so does what reads it
        return _Vector(items, inputs[0].elem, scalar)

    return rule


def _computed(op: str, a: _Size, b: _Size) -> _Size:
    if isinstance(a, int) and isinstance(b, int):
        if op == "Div":
            if not b:
                raise ValueError("divided by zero")
            return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return a + b if op == "Add" else a - b if op == "Sub" else a * b
    if op in ("Mul", "Div") and b == 1:
        return a
    if op == "Mul" and a == 1:
        return b
    if op in ("Add", "Sub") and b == 0:
        return a
    return b if op == "Add" and a == 0 else None


def _equal(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    pairs, scalar = _pairs(*inputs)
    items: list[_Size] = []
    for a, b in pairs:
        if isinstance(a, int) and isinstance(b, int):
            items.append(int(a == b))
        else:  # a size is never negative
            below = any(isinstance(x, str) and isinstance(y, int) and y < 0 for x, y in ((a, b), (b, a)))
            items.append(0 if below else None)
    return _Vector(tuple(items), TensorProto.BOOL, scalar)


def _where(inputs: list[_Vector], given: Mapping[str, Any]) -> _Vector | None:
    condition, one, two = inputs
    first, scalar = _pairs(condition, one)
    second, also = _pairs(condition, two)
    if len(first) != len(second):
        return None
    items = tuple(a if c else b for (c, a), (_, b) in zip(first, second, strict=True) if c is not None)
    return _Vector(items, one.elem, scalar and also) if len(items) == len(first) else None


_RULES: dict[str, Any] = {
    "Identity": lambda inputs, given: inputs[0],
    "Gather": _gather,
    "Slice": _slice,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Concat": _concat,
    "Cast": _cast,
    "Reshape": _reshaped,
    "Equal": _equal,
    "Where": _where,
    **{op: _arithmetic(op) for op in ("Add", "Sub", "Mul", "Div")},
}


def _fold_target(
    node: NodeProto,
    types: Mapping[str, TypeProto],
    vectors: dict[str, _Vector],
    fixed: set[str],
    made: dict[str, TensorProto],
) -> int:
    """A Reshape whose target copies sizes of its input, or leaves one open, reads a constant; 1 if it does now."""
    if len(node.input) < 2:
        return 0
    vector = _RULES["Reshape"]([vectors[name] for name in node.input], {}) if all(
        name in vectors for name in node.input
    ) and vectors[node.input[1]].known else None  # fmt: skip
    if vector is not None:
        vectors[node.output[0]] = vector
    target = vectors.get(node.input[1])
    if target is None or target.scalar or node.input[1] in fixed or attributes(node).get("allowzero"):
        return 0
    sizes = _sizes(types, node.input[0]) or []
    wanted: list[int] = []
    for at, item in enumerate(target.items):
        if isinstance(item, int):
            wanted.append(item)
        elif isinstance(item, str) and at < len(sizes) and sizes[at] == item:
            wanted.append(0)
        else:
            wanted.append(-1)
    if wanted.count(-1) > 1 or (-1 in wanted and 0 in [item for item in target.items if isinstance(item, int)]):
        return 0
    name = f"{node.output[0]}_target"
    if name in vectors or name in types or name in made:
        return 0
    made[name] = numpy_helper.from_array(np.array(wanted, np.int64), name)
    node.input[1] = name
    return 1


# ---- equals


def _share_nodes(proto: ModelProto, kept: Collection[str]) -> int:
    """Nodes that compute the same from the same become one; Q/DQ nodes stay where they are, a builder fuses each."""
    graph = proto.graph
    first: dict[bytes, NodeProto] = {}
    new: dict[str, str] = {}
    gone: set[str] = set()
    for node in graph.node:
        for at, name in enumerate(node.input):
            if name in new:
                node.input[at] = new[name]
        if any(True for _ in walk.bodies(node)) or is_random(node) or is_quantize(node) or is_dequantize(node):
            continue
        if any(name in kept for name in node.output) or not any(node.output):
            continue
        key = _key(node)
        twin = first.setdefault(key, node)
        if twin is not node:
            new.update(zip(node.output, twin.output, strict=True))
            gone.add(next(name for name in node.output if name))
    if gone:
        _keep(graph.node, lambda node: not any(name in gone for name in node.output))
        _rename(graph, _resolved({name: to for name, to in new.items() if name}))
    return len(gone)


def _key(node: NodeProto) -> bytes:
    plain = NodeProto()
    plain.CopyFrom(node)
    plain.ClearField("name")
    plain.ClearField("doc_string")
    del plain.metadata_props[:]
    which = [bool(name) for name in node.output]
    del plain.output[:]
    ordered = sorted(plain.attribute, key=lambda item: str(item.name))
    copies = [type(item).FromString(item.SerializeToString()) for item in ordered]
    del plain.attribute[:]
    plain.attribute.extend(copies)
    made: bytes = plain.SerializeToString(deterministic=True)
    return made + bytes(which)


def share_equal_weights(proto: ModelProto, folder: Path, *, small: bool = False) -> int:
    """Initializers of equal type, shape and bytes become one, in place; how many are gone. `small` leaves out what is
    larger than a megabyte, or outside: it was compared before."""
    graph = proto.graph
    outputs = {item.name for item in graph.output}
    sizes: dict[tuple[int, tuple[int, ...]], list[TensorProto]] = {}
    for tensor in graph.initializer:
        if small and (tensor.data_location == TensorProto.EXTERNAL or outside.nbytes_of(tensor) > 1 << 20):
            continue
        if tensor.name not in outputs:
            sizes.setdefault((tensor.data_type, tuple(tensor.dims)), []).append(tensor)
    new: dict[str, str] = {}
    for group in sizes.values():
        if len(group) < 2:
            continue
        first: dict[str, str] = {}
        for tensor in group:
            mark = outside.fingerprint(tensor, folder)
            if mark is not None and (twin := first.setdefault(mark, tensor.name)) != tensor.name:
                new[tensor.name] = twin
    if new:
        _keep(graph.initializer, lambda tensor: tensor.name not in new)
        _rename(graph, new)
    return len(new)


# ---- what nobody reads


def _drop_dead(proto: ModelProto, kept: Iterable[str]) -> None:
    graph = proto.graph
    read = set(kept)
    alive: list[bool] = []
    for node in reversed(graph.node):
        lives = any(name in read for name in node.output if name)
        alive.append(lives)
        if lives:
            read.update(name for name in node.input if name)
            for _, body in walk.bodies(node):
                read |= _captures(body)
    if not all(alive):
        order = iter(reversed(alive))
        _keep(graph.node, lambda _: next(order))
    _keep(graph.initializer, lambda tensor: tensor.name in read)
    _keep(graph.sparse_initializer, lambda tensor: tensor.values.name in read)

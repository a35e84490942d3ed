"""Graph editing: inlined functions, renamed tensors, unique names, new nodes and constants, lazy access to weights.

Bytes of tensors are read and packed here, 4-bit types included.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, inliner, numpy_helper

from trt_engine.arrayfiles import Array
from trt_engine.errors import ModelError, ShapeError
from trt_engine.format import library_reason
from trt_engine.graph import walk
from trt_engine.tensors import Shape, dtype, format_shape


def retain_items(items: Any, wanted: Any) -> None:
    """Keep only the wanted items, in place."""
    gone = [at for at, item in enumerate(items) if not wanted(item)]
    for at in reversed(gone):
        del items[at]


def replace_items(items: Any, new: Iterable[Any]) -> None:
    """Replace the messages of a repeated field; the new ones may be among them."""
    copies = [deepcopy(item) for item in new]
    del items[:]
    items.extend(copies)


def pop_attribute(node: NodeProto, name: str) -> AttributeProto | None:
    """Remove an attribute and return it; None if absent."""
    found = next((deepcopy(item) for item in node.attribute if item.name == name), None)
    retain_items(node.attribute, lambda item: item.name != name)
    return found


def set_attribute(node: NodeProto, name: str, value: Any) -> None:
    """Add an attribute, in place of one of that name."""
    made = helper.make_attribute(name, value)
    for item in node.attribute:
        if item.name == name:
            item.CopyFrom(made)
            return
    node.attribute.append(made)


def set_input(node: NodeProto, at: int, name: str) -> None:
    """Set an input, after omitted ones where the node has fewer."""
    node.input.extend([""] * (at + 1 - len(node.input)))
    node.input[at] = name


def rename_reads(graph: GraphProto, new: Mapping[str, str]) -> None:
    """Redirect reads of a tensor to another, bodies included, except where a body shadows the name."""
    for node in graph.node:
        for at, name in enumerate(node.input):
            if name in new:
                node.input[at] = new[name]
        for _, body in walk.bodies(node):
            own = {item.name for item in (*body.input, *body.initializer)}
            own.update(name for inner in body.node for name in inner.output)
            inner_new = {name: to for name, to in new.items() if name not in own}
            if inner_new:
                rename_reads(body, inner_new)
                for item in body.output:
                    item.name = inner_new.get(item.name, item.name)


def resolve_renames(new: dict[str, str]) -> dict[str, str]:
    """Renames with chains resolved."""
    made = {}
    for name in new:
        end = new[name]
        while end in new:
            end = new[end]
        made[name] = end
    return made


def count_reads(proto: ModelProto) -> Counter[str]:
    counted = Counter(name for place in walk.nodes(proto) for name in place.node.input if name)
    counted.update(item.name for inner in walk.graphs(proto) for item in inner.output)
    return counted


def consumers_of(nodes: Iterable[NodeProto]) -> dict[str, list[NodeProto]]:
    """Nodes that read a tensor, by its name; a node that reads it twice is listed twice."""
    readers: dict[str, list[NodeProto]] = defaultdict(list)
    for node in nodes:
        for name in node.input:
            if name:
                readers[name].append(node)
    return dict(readers)


def used_names(proto: ModelProto) -> set[str]:
    """All tensor and node names in use."""
    names: set[str] = set()
    for graph in walk.graphs(proto):
        names.update(item.name for item in (*graph.input, *graph.output, *graph.value_info, *graph.initializer))
        names.update(item.values.name for item in graph.sparse_initializer)
    for node in walk.all_nodes(proto):
        names.update((node.name, *node.input, *node.output))
    return names


def outer_scope_reads(graph: GraphProto) -> set[str]:
    """Names that bodies of the graph capture."""
    return {name for node in graph.node for _, body in walk.bodies(node) for name in walk.outer_scope_names(body)}


def inline_functions(proto: ModelProto) -> ModelProto:
    """Return the model with its local functions inlined; raise `ModelError` if that fails."""
    if not proto.functions:
        return proto
    try:
        flat: ModelProto = inliner.inline_local_functions(proto)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ModelError(
            f"the model's local functions cannot be inlined: {library_reason(error)}",
            hint="export the model again without functions (`torch.onnx.export(..., dynamo=True)` writes none)",
        ) from error
    return flat


def make_names_unique(proto: ModelProto) -> int:
    """Make node names unique, as ONNX Runtime requires; returns how many were renamed."""
    names = Counter(place.node.name for place in walk.nodes(proto) if place.node.name)
    taken, met = set(names), set()
    renamed = 0
    for place in walk.nodes(proto):
        node = place.node
        if node.name in met:
            node.name = free_name(node.name, taken)
            renamed += 1
        if node.name:
            met.add(node.name)
    return renamed


def free_name(name: str, taken: set[str]) -> str:
    """The name, with a number appended if it is taken."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    taken.add(found)
    return found


def numpy_dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name) if hasattr(ml_dtypes, name) else name)


def pack(values: Array) -> npt.NDArray[np.uint8]:
    """Pack an array of any shape and dtype as `[bytes]` of ONNX raw_data: row order, two 4-bit values per byte, the first in
    the low nibble.

    Raises `UsageError` for an unknown dtype.
    """
    if dtype(values.dtype.name).bits != 4:
        return np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
    nibbles = np.zeros(values.size + values.size % 2, np.uint8)
    nibbles[: values.size] = np.ascontiguousarray(values).reshape(-1).view(np.uint8) & 0xF
    return np.asarray(nibbles[0::2] | nibbles[1::2] << 4, np.uint8)


def unpack(raw: Any, shape: Shape, name: str) -> Array:
    """Unpack an array of that dtype and shape from the bytes of `pack`.

    Raises `UsageError` for an unknown dtype, `ShapeError` for another number of bytes.
    """
    kind = dtype(name)
    data = np.frombuffer(raw, np.uint8) if isinstance(raw, bytes) else np.asarray(raw, np.uint8).reshape(-1)
    if data.size != kind.nbytes(shape):
        raise ShapeError(
            f"{data.size} bytes do not match {format_shape(shape)} of {name}, expected {kind.nbytes(shape)}",
            hint="check the shape",
        )
    if kind.bits != 4:
        return data.view(numpy_dtype_of(name)).reshape(shape).copy()
    both = np.stack([data & 0xF, data >> 4], axis=-1).reshape(-1)[: int(np.prod(shape, dtype=np.int64))]
    if name == "int4":
        made: Array = (((both + np.uint8(8)) & np.uint8(0xF)).astype(np.int8) - np.int8(8)).astype(numpy_dtype_of(name))
    else:
        made = np.ascontiguousarray(both).view(numpy_dtype_of(name))
    return made.reshape(shape)


_ONNX_TYPES: dict[str, int] = {
    "float4_e2m1fn": TensorProto.FLOAT4E2M1,
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "int4": TensorProto.INT4,
    "bfloat16": TensorProto.BFLOAT16,
}


class NameAllocator:
    """Allocates unique names of tensors and nodes in a model."""

    def __init__(self, proto: ModelProto) -> None:
        self._taken = used_names(proto)

    def fresh(self, wanted: str) -> str:
        """Return `wanted`, with a number appended if it is in use."""
        return free_name(wanted, self._taken)


class NodeBuilder:
    """Collects new nodes and constants; methods return the names of outputs and initializers."""

    def __init__(self, names: NameAllocator) -> None:
        self.names = names
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(self, op: str, inputs: Sequence[str], stem: str, *, out: str | None = None, **given: Any) -> str:
        """Add a node with one output, named `out` or after `stem`."""
        return self.add_multi_output(op, inputs, stem, 1, out=[out] if out else None, **given)[0]

    def add_multi_output(
        self, op: str, inputs: Sequence[str], stem: str, count: int, *, out: Sequence[str] | None = None, **given: Any
    ) -> list[str]:
        """Add a node with `count` outputs."""
        made = list(out) if out else [self.names.fresh(f"{stem}_{op}") for _ in range(count)]
        domain = given.pop("domain", "")
        node = helper.make_node(op, list(inputs), made, name=self.names.fresh(f"{stem}_{op}_node"), domain=domain)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())
        self.nodes.append(node)
        return made

    def shared_constant(self, value: Any, stem: str) -> str:
        """Add an initializer, shared between equal values."""
        array = np.asarray(value)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.add_initializer(array, stem)
        return self._constants[key]

    def add_initializer(self, value: Any, stem: str) -> str:
        """Add an initializer."""
        name = self.names.fresh(stem)
        self.initializers.append(make_initializer(np.asarray(value), name))
        return name

    def replace_nodes(self, proto: ModelProto, nodes: Sequence[NodeProto]) -> None:
        """Replace the graph's nodes and add the new constants."""
        replace_items(proto.graph.node, nodes)
        proto.graph.initializer.extend(self.initializers)

    def take_nodes(self) -> list[NodeProto]:
        """Return and clear the nodes added since the last call."""
        made, self.nodes = self.nodes, []
        return made


def make_initializer(array: Array, name: str) -> TensorProto:
    """Make an initializer of any shape and supported dtype; 4-bit values as in `pack`."""
    kind = array.dtype.name
    if kind not in _ONNX_TYPES:
        made: TensorProto = numpy_helper.from_array(array, name)
        return made
    return TensorProto(name=name, data_type=_ONNX_TYPES[kind], dims=array.shape, raw_data=pack(array).tobytes())


class Weights:
    """Constants of a model's main graph, read on demand and not cached."""

    def __init__(self, proto: ModelProto, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, TensorProto] = {item.name: item for item in proto.graph.initializer}
        self._makers: dict[str, NodeProto] = {}
        for node in proto.graph.node:
            if walk.domain_of(node):
                continue
            if node.op_type == "Constant":
                value = walk.attributes(node).get("value")
                if isinstance(value, TensorProto):
                    self._tensors[node.output[0]] = value
            elif node.op_type in ("Transpose", "Identity"):
                self._makers[node.output[0]] = node

    def __contains__(self, name: str) -> bool:
        return self.shape(name) is not None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a constant, through Transpose and Identity; None if computed."""
        if name in self._tensors:
            return tuple(self._tensors[name].dims)
        maker = self._makers.get(name)
        inner = self.shape(maker.input[0]) if maker is not None else None
        if maker is None or inner is None or maker.op_type == "Identity":
            return inner
        order = walk.attributes(maker).get("perm") or list(reversed(range(len(inner))))
        return tuple(inner[at] for at in order)

    def elem_type(self, name: str) -> int:
        """ONNX element type of the constant."""
        while name not in self._tensors:
            name = self._makers[name].input[0]
        return int(self._tensors[name].data_type)

    def read(self, name: str) -> Array:
        """Read the constant, in its stored dtype and the shape of `shape`. Raises `ModelError` if it cannot be read."""
        if name not in self._tensors:
            maker = self._makers[name]
            inner = self.read(maker.input[0])
            return inner if maker.op_type == "Identity" else np.transpose(inner, walk.attributes(maker).get("perm"))
        return read_tensor(self._tensors[name], self._folder)


def read_tensor(stored: TensorProto, folder: Path) -> Array:
    """Read a tensor, inline or external, in its stored dtype and shape, without modifying it.

    Raises `ModelError` if its data is missing or damaged.
    """
    try:  # of a copy: reading external data writes it into the message
        array: Array = numpy_helper.to_array(deepcopy(stored), str(folder))
    except (ValueError, TypeError, OSError) as error:
        raise ModelError(
            f"the tensor `{stored.name}` cannot be read: {error}", hint="export the model again"
        ) from error
    wanted = {value: key for key, value in _ONNX_TYPES.items()}.get(stored.data_type)
    if wanted is not None and array.dtype.name != wanted:
        array = array.view(getattr(ml_dtypes, wanted))
    return array


def inline_value(tensor: TensorProto | None) -> npt.NDArray[np.float32] | None:
    """The values of a tensor as FP32, in its shape; None if it is absent, external or not of numbers."""
    if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
        return None
    try:
        return np.asarray(numpy_helper.to_array(tensor)).astype(np.float32)
    except (ValueError, TypeError, KeyError):
        return None


def drop_unused(proto: ModelProto, candidates: Iterable[str]) -> None:
    """Remove unreferenced candidates: initializers (and inputs of the same name), Constant, Transpose and Identity nodes."""
    graph = proto.graph
    reads = count_reads(proto)
    makers = {node.output[0]: node for node in graph.node if node.op_type in ("Constant", "Transpose", "Identity")}
    stored = {item.name for item in graph.initializer}
    waiting, gone = list(candidates), set[str]()
    while waiting:
        name = waiting.pop()
        if reads[name] or name in gone:
            continue
        if name in makers:
            gone.add(name)
            for read in makers[name].input:
                reads[read] -= 1
                waiting.append(read)
        elif name in stored:
            gone.add(name)
    retain_items(graph.node, lambda node: len(node.output) != 1 or node.output[0] not in gone)
    for field in (graph.initializer, graph.input, graph.value_info):
        retain_items(field, lambda item: item.name not in gone)


def fold_batch_norms(proto: ModelProto, weights: Weights) -> int:
    """Fold BatchNormalization nodes in place and return their number. The convolution takes over the output name."""
    graph = proto.graph
    readers = consumers_of(walk.all_nodes(proto))
    outputs = {item.name for item in graph.output}
    convolutions = {node.output[0]: node for node in graph.node if node.op_type == "Conv" and not walk.domain_of(node)}
    names = NameAllocator(proto)
    gone: set[str] = set()
    replaced: list[str] = []
    for norm in graph.node:
        conv = convolutions.get(norm.input[0]) if norm.op_type == "BatchNormalization" else None
        if conv is None or len(readers[norm.input[0]]) != 1 or norm.input[0] in outputs:
            continue
        stored = [name for name in (*conv.input[1:], *norm.input[1:5]) if name]
        if not all(name in weights and weights.elem_type(name) == TensorProto.FLOAT for name in stored):
            continue
        if len(norm.output) > 1 or walk.attributes(norm).get("training_mode"):
            continue
        scale, shift, mean, variance = (weights.read(name).astype(np.float64) for name in norm.input[1:5])
        factor = scale / np.sqrt(variance + walk.attributes(norm).get("epsilon", 1e-5))
        values = weights.read(conv.input[1])
        bias = weights.read(conv.input[2]) if len(conv.input) > 2 and conv.input[2] else np.zeros(len(values))
        folded = values * factor.reshape(-1, *[1] * (values.ndim - 1)).astype(np.float32)
        made = {"weight": folded, "bias": ((bias - mean) * factor + shift).astype(np.float32)}
        replaced += [*conv.input[1:], *norm.input[1:]]
        del conv.input[1:]
        for part, array in made.items():
            name = names.fresh(f"{conv.output[0]}_{part}_folded")
            graph.initializer.append(make_initializer(np.ascontiguousarray(array.astype(np.float32)), name))
            conv.input.append(name)
        conv.output[0] = norm.output[0]
        gone.add(norm.output[0])
    retain_items(graph.node, lambda node: node.op_type != "BatchNormalization" or node.output[0] not in gone)
    drop_unused(proto, dict.fromkeys(replaced))
    return len(gone)

"""Rewriting a graph: names nobody has, nodes and constants to add, weights read one at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_engine.errors import ModelError
from trt_engine.graph import walk
from trt_engine.graph.trace import attributes

__all__ = ["Names", "Ops", "Weights", "drop_unused", "tensor", "to_array"]

Array = npt.NDArray[Any]
_ONNX_TYPES: dict[str, int] = {
    "float4_e2m1fn": TensorProto.FLOAT4E2M1,
    "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "int4": TensorProto.INT4,
    "bfloat16": TensorProto.BFLOAT16,
}


class Names:
    """Names of a model's tensors and nodes, so that a new one is nobody else's."""

    def __init__(self, proto: ModelProto) -> None:
        self._taken: set[str] = set()
        for graph in walk.graphs(proto):
            self._taken.update(item.name for item in (*graph.input, *graph.output, *graph.initializer))
            self._taken.update(item.values.name for item in graph.sparse_initializer)
        for place in walk.nodes(proto):
            self._taken.update((place.node.name, *place.node.input, *place.node.output))

    def fresh(self, wanted: str) -> str:
        """`wanted`, or with a number behind it when that is taken."""
        name, count = wanted, 1
        while name in self._taken:
            count += 1
            name = f"{wanted}_{count}"
        self._taken.add(name)
        return name


class Ops:
    """Nodes and constants being added: `add` gives the output's name, `constant` the initializer's."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}

    def add(self, op: str, inputs: Sequence[str], stem: str, *, out: str | None = None, **given: Any) -> str:
        """One node with one output, named after `stem`, or with the output name given."""
        return self.several(op, inputs, stem, 1, out=[out] if out else None, **given)[0]

    def several(
        self, op: str, inputs: Sequence[str], stem: str, count: int, *, out: Sequence[str] | None = None, **given: Any
    ) -> list[str]:
        """One node with `count` outputs."""
        made = list(out) if out else [self.names.fresh(f"{stem}_{op}") for _ in range(count)]
        domain = given.pop("domain", "")
        node = helper.make_node(op, list(inputs), made, name=self.names.fresh(f"{stem}_{op}_node"), domain=domain)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in given.items())
        self.nodes.append(node)
        return made

    def constant(self, value: Any, stem: str) -> str:
        """An initializer; equal ones are one."""
        array = np.asarray(value)
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self.store(array, stem)
        return self._constants[key]

    def store(self, value: Any, stem: str) -> str:
        """An initializer of its own."""
        name = self.names.fresh(stem)
        self.initializers.append(tensor(np.asarray(value), name))
        return name

    def put(self, proto: ModelProto, nodes: Sequence[NodeProto]) -> None:
        """These nodes in place of the graph's own, with the constants made so far."""
        copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del proto.graph.node[:]
        proto.graph.node.extend(copies)
        proto.graph.initializer.extend(self.initializers)

    def taken(self) -> list[NodeProto]:
        """The nodes added since the last call."""
        made, self.nodes = self.nodes, []
        return made


def tensor(array: Array, name: str) -> TensorProto:
    """An initializer of any type of ours, 4-bit ones packed two to a byte, the first one low."""
    kind = array.dtype.name
    if kind not in _ONNX_TYPES:
        made: TensorProto = numpy_helper.from_array(array, name)
        return made
    from trt_engine.precision.formats import pack

    return TensorProto(name=name, data_type=_ONNX_TYPES[kind], dims=array.shape, raw_data=pack(array).tobytes())


class Weights:
    """The constants of a model's main graph, read when asked for and not kept."""

    def __init__(self, proto: ModelProto, folder: Path) -> None:
        self._folder = folder
        self._tensors: dict[str, TensorProto] = {item.name: item for item in proto.graph.initializer}
        self._makers: dict[str, NodeProto] = {}
        for node in proto.graph.node:
            if walk.domain_of(node):
                continue
            if node.op_type == "Constant":
                value = attributes(node).get("value")
                if isinstance(value, TensorProto):
                    self._tensors[node.output[0]] = value
            elif node.op_type in ("Transpose", "Identity"):
                self._makers[node.output[0]] = node

    def __contains__(self, name: str) -> bool:
        return self.shape(name) is not None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The constant's shape, through Transpose and Identity; None for what is computed."""
        if name in self._tensors:
            return tuple(self._tensors[name].dims)
        maker = self._makers.get(name)
        inner = self.shape(maker.input[0]) if maker is not None else None
        if maker is None or inner is None or maker.op_type == "Identity":
            return inner
        order = attributes(maker).get("perm") or list(reversed(range(len(inner))))
        return tuple(inner[at] for at in order)

    def elem(self, name: str) -> int:
        """ONNX's number for the constant's type."""
        while name not in self._tensors:
            name = self._makers[name].input[0]
        return int(self._tensors[name].data_type)

    def read(self, name: str) -> Array:
        """The constant's values."""
        if name not in self._tensors:
            maker = self._makers[name]
            inner = self.read(maker.input[0])
            return inner if maker.op_type == "Identity" else np.transpose(inner, attributes(maker).get("perm"))
        return to_array(self._tensors[name], self._folder)


def to_array(stored: TensorProto, folder: Path) -> Array:
    """A tensor's values, from its side file if it has one; the tensor itself stays as it is."""
    own = TensorProto()
    own.CopyFrom(stored)  # reading external data writes it into the message
    try:
        array: Array = numpy_helper.to_array(own, str(folder))
    except (ValueError, TypeError, OSError) as error:
        raise ModelError(
            f"the tensor `{stored.name}` cannot be read: {error}", hint="export the model again"
        ) from error
    wanted = {value: key for key, value in _ONNX_TYPES.items()}.get(stored.data_type)
    if wanted is not None and array.dtype.name != wanted:
        array = array.view(getattr(ml_dtypes, wanted))
    return array


def drop_unused(proto: ModelProto, candidates: Iterable[str]) -> None:
    """Remove those of the candidates nobody reads any more: initializers (and inputs that stood for them), Constant,
    Transpose and Identity nodes."""
    graph = proto.graph
    reads = Counter(name for place in walk.nodes(proto) for name in place.node.input if name)
    reads.update(item.name for inner in walk.graphs(proto) for item in inner.output)
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
    _remove(graph.node, lambda node: len(node.output) == 1 and node.output[0] in gone)
    for field in (graph.initializer, graph.input, graph.value_info):
        _remove(field, lambda item: item.name in gone)


def _remove(field: Any, unwanted: Callable[[Any], bool]) -> None:
    for at in reversed(range(len(field))):
        if unwanted(field[at]):
            del field[at]

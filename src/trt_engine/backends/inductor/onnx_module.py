"""An ONNX graph as a `torch.nn.Module` that `torch.export` traces with dynamic dimensions.

Shape arithmetic stays symbolic: what `Shape` gives, small constants, and what is computed from these are `Scalars` (Python
numbers and SymInts in a numpy object array), never tensors: no size becomes a constant of the traced batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
import torch
from onnx import TensorProto, numpy_helper

from trt_engine.backends.inductor import operators
from trt_engine.backends.inductor.attention import fuse_attention
from trt_engine.backends.inductor.convolution import CONVOLUTION, fuse_convolution, fuse_patches, store_weights
from trt_engine.backends.inductor.linear import LINEAR, WEIGHT, fuse_linear
from trt_engine.errors import ModelError
from trt_engine.format import library_reason
from trt_engine.graph import walk
from trt_engine.graph.constants import constants_as_initializers, drop_initializer_inputs
from trt_engine.graph.edit_graph import set_attribute
from trt_engine.graph.fusion.bias_gelu import compose_gelu
from trt_engine.graph.fusion.fusion_graph import MICROSOFT, FusionGraph
from trt_engine.graph.opset import raise_opset
from trt_engine.tensors import dtype

_SMALL = 64
"""Most elements of constants and results that are kept as Python numbers."""
_WIDE_FLOATS = 8
"""The same for floating-point constants: scales and limits, not weights."""

NIBBLES = (TensorProto.INT4, TensorProto.UINT4)


@dataclass(frozen=True, slots=True)
class Scalars:
    """A small array of Python numbers and SymInts, and the dtype it has as a tensor."""

    values: npt.NDArray[np.object_]
    dtype: torch.dtype

    def tensor(self, device: torch.device) -> torch.Tensor:
        flat = self.values.reshape(-1).tolist()
        if not any(isinstance(item, torch.SymInt | torch.SymFloat | torch.SymBool) for item in flat):
            return torch.tensor(flat, dtype=self.dtype, device=device).reshape(self.values.shape)
        parts = [torch.full((), item, dtype=self.dtype, device=device) for item in flat]
        return torch.stack(parts).reshape(self.values.shape)


Value: TypeAlias = Any
"""A tensor, or `Scalars`."""


class Unsupported(Exception):
    """An operator, or a form of one, that the importer lacks."""


class Call:
    """One node and its inputs, for a rule to compute."""

    def __init__(self, body: Body, at: int, values: dict[str, Value]) -> None:
        self.node, self.attributes = body.nodes[at]
        self.values: list[Value | None] = [values[name] if name else None for name in self.node.input]
        self.device, self.kernels, self.fused = body.module.device, body.module.kernels, body.module.fused
        self._body, self._at, self._outer = body, at, values

    def has(self, at: int) -> bool:
        return at < len(self.values) and self.values[at] is not None

    def tensor(self, at: int) -> torch.Tensor:
        value = self.values[at]
        if value is None:
            raise Unsupported(f"input {at} is missing")
        return value.tensor(self.device) if isinstance(value, Scalars) else value

    def optional(self, at: int) -> torch.Tensor | None:
        return self.tensor(at) if self.has(at) else None

    def scalars(self, at: int) -> npt.NDArray[np.object_]:
        """An input that must be known when the graph is traced: a shape, axes, pads."""
        value = self.values[at]
        if not isinstance(value, Scalars):
            raise Unsupported(f"input {at} (`{self.node.input[at]}`) decides a shape and depends on the data")
        return value.values

    def numbers(self, at: int) -> list[Any]:
        return list(self.scalars(at).reshape(-1))

    def number(self, at: int, default: Any = None) -> Any:
        return self.numbers(at)[0] if self.has(at) else default

    def attribute(self, name: str, default: Any = None) -> Any:
        """The value that is given, else ONNX's default, else `default`."""
        if (known := operators.OPERATORS.get(self.node.op_type)) is not None and name not in known.attributes:
            raise AssertionError(f"`{name}` is read and not declared")
        value = self.attributes.get(name)
        if value is None:
            value = operators.defaults(self.node.op_type, self._body.opset).get(name)
        value = default if value is None else value
        return value.decode() if isinstance(value, bytes) else value

    def kind(self, at: int) -> int:
        """The ONNX element type of a constant input whose dtype is an integer's of 8 bits, which may be one of 4; 0: its
        dtype's."""
        value = self.values[at]
        found = value.dtype if value is not None else None
        if found not in (torch.int8, torch.uint8) or not self._body.module.has_nibbles:
            return 0
        kind = self._body.kind(self.node.input[at])
        if not kind:
            raise Unsupported(f"input {at} (`{self.node.input[at]}`) is computed, in a graph with values of 4 bits")
        return kind

    def check_types(self) -> None:
        """Refuse element types that are not declared for the operator."""
        if (known := operators.OPERATORS.get(self.node.op_type)) is None:
            return
        # axes and sizes beside floating-point data are integers
        for value in self.values if "int64" in known.types else self.values[:1]:
            if value is not None and (name := str(value.dtype).removeprefix("torch.")) not in known.types:
                raise Unsupported(f"its input is {name}")

    def run(self, name: str, *inputs: Value) -> list[Value]:
        """The outputs of a body of If or Loop."""
        return self._body.inner[self._at][name].run(dict(self._outer), inputs)


Rule = Callable[[Call], Any]


class Kernels:
    """What computes a linear layer: PyTorch's operators, where nothing else was chosen."""

    def linear(self, name: str) -> Callable[..., torch.Tensor]:
        """The function of the layer whose output has this name, with the arguments of `plain_linear`."""
        from trt_engine.backends.inductor.fused_rules import plain_linear

        return plain_linear

    def pointwise(
        self, name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        residual: torch.Tensor | None, activation: int,
    ) -> Callable[..., torch.Tensor] | None:  # fmt: skip
        """The function, with the arguments of `plain_linear`, of a 1x1 convolution; None: a convolution."""
        return None


class Body:
    """The nodes of a graph, or of a branch of If or a round of Loop in it, in the order in which they are computed."""

    def __init__(self, graph: onnx.GraphProto, opset: int, module: OnnxModule, outer: Body | None = None) -> None:
        self.module, self.opset, self._outer = module, opset, outer
        self.inputs, self.outputs = [item.name for item in graph.input], [item.name for item in graph.output]
        self.nodes = [(node, walk.attributes(node)) for node in graph.node]
        self.inner = [
            {name: Body(body, opset, module, self) for name, body in walk.bodies(node)} for node in graph.node
        ]
        self._kinds = {item.name: item.data_type for item in graph.initializer}
        self.constants = {item.name: module.store(item) for item in graph.initializer}
        read = [dict.fromkeys(walk.names_read(node)) for node in graph.node]
        last = {name: at for at, names in enumerate(read) for name in names}
        self._last_use = [
            [name for name in names if last[name] == at and name not in self.outputs] for at, names in enumerate(read)
        ]

    def kind(self, name: str) -> int:
        """The ONNX element type of a constant; 0 for another tensor."""
        found = self._kinds.get(name, 0)
        return found or (self._outer.kind(name) if self._outer is not None else 0)

    def run(self, values: dict[str, Value], inputs: Sequence[Value]) -> list[Value]:
        """The outputs, with the values that the nodes around it may read."""
        values |= dict(zip(self.inputs, inputs, strict=True))
        values |= {name: self.module.value(item) for name, item in self.constants.items()}
        for at, ((node, _), unused) in enumerate(zip(self.nodes, self._last_use, strict=True)):
            results = self._compute(Call(self, at, values))
            for name, value in zip(node.output, results, strict=False):
                if name:
                    values[name] = value
            for name in unused:
                values.pop(name, None)
        return [values[name] for name in self.outputs]

    def _compute(self, call: Call) -> Sequence[Value]:
        from trt_engine.backends.inductor.scalar_rules import fold

        node = call.node
        try:
            call.check_types()
            folded = fold(call)
            found = folded if folded is not None else self.module.rules[node.op_type](call)
            results = found if isinstance(found, tuple | list) else (found,)
            if any(node.output[len(results) :]):
                raise Unsupported("its further outputs")
        except ModelError:  # of a node in a body
            raise
        except Exception as error:  # of the rule, and of PyTorch, which names no node
            raise operators.refusal(node, library_reason(error)) from error
        return results


class OnnxModule(torch.nn.Module):  # type: ignore[misc]  # Any where PyTorch is not installed
    """Interprets the nodes of a graph in `forward`; inputs and outputs in the order of the graph's."""

    def __init__(
        self,
        proto: onnx.ModelProto,
        device: torch.device,
        rules: dict[str, Rule],
        kernels: Kernels | None = None,
        *,
        fused: bool = False,
    ) -> None:
        super().__init__()
        operators.check_attributes(proto)
        lacking = next((node for node in walk.all_nodes(proto) if node.op_type not in (*rules, "Shape", "Size")), None)
        if lacking is not None:
            raise operators.refusal(lacking, "no rule computes the operator")
        self.device, self.kernels, self.rules = device, kernels or Kernels(), rules
        self.has_nibbles = _has_nibbles(proto)
        self.fused = fused
        self._windows = {node.input[1] for node in walk.all_nodes(proto) if node.op_type in ("Conv", CONVOLUTION)}
        self._products = {node.input[WEIGHT] for node in proto.graph.node if node.op_type == LINEAR}
        self._body = Body(proto.graph, walk.opsets_of(proto).get("", 1), self)

    def store(self, stored: TensorProto) -> Scalars | str:
        """A constant as numbers, or the name of the buffer that holds it."""
        try:
            found = to_tensor(array := numpy_helper.to_array(stored), stored.data_type)
        except Unsupported as error:
            raise ModelError(
                f"the constant `{stored.name}` is not imported: {error}", hint="`-b onnxruntime` runs it"
            ) from error
        if _is_small(array, found):
            return Scalars(array.astype(object), found.dtype)
        name = f"w{len(list(self.buffers()))}"
        self.register_buffer(name, self._laid_out(found.to(self.device), stored.name))
        return name

    def _laid_out(self, weight: torch.Tensor, name: str) -> torch.Tensor:
        """A constant; in a graph with layers of ours in the layout that its kernels read: columns of linear layers, channels
        last of convolutions in half precision."""
        if not self.fused or not on_gpu(self.device):
            return weight
        if name in self._products and weight.ndim == 2:
            return weight.t().contiguous().t()
        is_half = weight.dtype in (torch.float16, torch.bfloat16)
        if name not in self._windows or weight.ndim != 4 or not is_half:
            return weight
        # strides of nothing else, also where an axis is of size 1: they decide cuDNN's layout for every input
        return torch.empty_like(weight, memory_format=torch.channels_last).copy_(weight)

    def value(self, constant: Scalars | str) -> Value:
        return getattr(self, constant) if isinstance(constant, str) else constant

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = self._body.run({}, inputs)
        tensors = [value.tensor(self.device) if isinstance(value, Scalars) else value for value in found]
        # an output that is an input or a weight, or is there twice, would share its memory
        seen: Counter[int] = Counter(map(id, (*inputs, *self.buffers())))
        for at, value in enumerate(tensors):
            seen[id(value)] += 1
            tensors[at] = value.clone() if seen[id(value)] > 1 else value.contiguous()
        return tuple(tensors)


def _has_nibbles(proto: onnx.ModelProto) -> bool:
    """Whether a graph has integers of 4 bits, which take a byte each here."""
    return any(tensor.data_type in NIBBLES for tensor in walk.tensors(proto)) or any(
        {walk.attributes(node).get("to"), walk.attributes(node).get("output_dtype")} & {*NIBBLES}
        for node in walk.all_nodes(proto)
        if node.op_type in ("Cast", "QuantizeLinear")
    )


def on_gpu(device: torch.device) -> bool:
    """Whether layouts and operators are those of a GPU."""
    return bool(device.type == "cuda")


def _is_small(array: npt.NDArray[Any], stored: torch.Tensor) -> bool:
    if array.ndim > 1 or stored.dtype not in _PYTHON_TYPES:
        return False
    return array.size <= (_WIDE_FLOATS if stored.dtype.is_floating_point else _SMALL)


_PYTHON_TYPES = frozenset(
    (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
     torch.float64)
)  # fmt: skip


def torch_dtype(kind: int) -> torch.dtype:
    """The torch dtype of an ONNX element type; 4-bit integers take a byte each."""
    name = {"int4": "int8", "uint4": "uint8"}.get(found := dtype(kind).name, found)
    made = getattr(torch, name, None)
    if not isinstance(made, torch.dtype):
        raise Unsupported(f"PyTorch has no element type `{found}`")
    return made


def onnx_type(kind: torch.dtype) -> int:
    """The ONNX element type of a torch dtype."""
    return dtype(str(kind).removeprefix("torch.")).onnx


def to_tensor(array: npt.NDArray[Any], kind: int) -> torch.Tensor:
    """A copy of an ONNX constant as a tensor on the host."""
    wanted = torch_dtype(kind)
    if array.dtype.name in ("int4", "uint4"):
        array = array.astype(np.int8 if wanted is torch.int8 else np.uint8)
    array = np.array(array, order="C", copy=True)
    if array.dtype.kind == "V" or array.dtype.name.startswith(("bfloat", "float8")):  # numpy has no name for them
        return torch.from_numpy(array.view(f"i{array.itemsize}")).view(wanted)
    return torch.from_numpy(array)


@dataclass(frozen=True, slots=True)
class ImportedGraph:
    """A graph as the rules read it, and what was fused in it."""

    proto: onnx.ModelProto
    attentions: int


def load_graph(proto: onnx.ModelProto, *, on_gpu: bool = False, quantized_types: Collection[str] = ()) -> ImportedGraph:
    """Functions inlined, constants as initializers, opset raised, attention and linear layers fused, for a GPU with what
    surrounds them."""
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(proto)
    drop_initializer_inputs(proto)
    raise_opset(proto, operators.MIN_OPSET)
    operators.write_out(proto)
    constants_as_initializers(proto, bodies=True)
    if on_gpu:
        proto = _with_gelu(proto)
    attentions = fuse_attention(proto.graph)
    if on_gpu:
        store_weights(proto.graph)
        fuse_convolution(proto.graph)
        fuse_patches(proto.graph)
    fuse_linear(proto.graph, on_gpu=on_gpu, quantized_types=quantized_types)
    return ImportedGraph(proto, attentions)


def _with_gelu(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Gelu that is written out as the operator Gelu."""
    if not any(node.op_type in ("Erf", "Tanh") for node in proto.graph.node):
        return proto
    graph = FusionGraph(proto, Path())  # weights are in the graph
    compose_gelu(graph)
    made = graph.result()
    for node in made.graph.node:
        if node.domain == MICROSOFT and node.op_type in ("Gelu", "FastGelu"):
            if node.op_type == "FastGelu":
                set_attribute(node, "approximate", "tanh")
            node.op_type, node.domain = "Gelu", ""
    return made

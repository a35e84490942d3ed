"""Linear layers in a graph: product and bias as one node, for a GPU with activation, residual and Q/DQ pairs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper

from trt_engine.graph import walk
from trt_engine.graph.constants import constants_as_initializers, drop_initializer_inputs
from trt_engine.graph.edit_graph import make_initializer, read_tensor, retain_items, set_attribute, set_input

LINEAR = "_Linear"
"""Our own operator: x (... x K), a weight (K x N), then at the places below a bias (N) and a residual of the output's shape,
which is added last. A quantized layer, whose weight is stored quantized, has the scale that x is quantized with ("" where it
is quantized already), the factors of the product (N, FP32), and the scale of a quantized output. The attribute `activation`
is applied after the bias, `computes_in` is the output's type where x is quantized already."""
X, WEIGHT, BIAS, RESIDUAL, X_SCALE, FACTORS, OUT_SCALE = range(7)
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "relu", "relu_of_sum")
"""What is applied to a product, before a residual is added; `relu_of_sum` after."""
RELU, RELU_OF_SUM = ACTIVATIONS.index("relu"), ACTIVATIONS.index("relu_of_sum")
_TILE, _DEPTH = 16, 32
"""The width and the depth of a quantized product that tensor cores take are multiples of these."""
_QUANTIZED: dict[int, str] = {TensorProto.INT8: "int8", TensorProto.FLOAT8E4M3FN: "fp8"}


def fuse_linear(graph: GraphProto, *, on_gpu: bool = False, quantized_types: Collection[str] = ()) -> int:
    """Replace MatMul and Add by `_Linear`, then `_Linear` nodes of one input by one and a Split, in place.

    For a GPU also with Gelu, Relu and Add behind them, and products whose input and weight are both quantized in one of
    `quantized_types` (of `int8` and `fp8`). Returns the number of quantized layers that became such a node.
    """
    fuser = _LinearFuser(graph)
    quantized = len(fuser.take_quantized(quantized_types))
    fuser.take_biases()
    fuser.merge()
    if on_gpu:
        fuser.take_activations()
        fuser.take_residuals()
        fuser.take_output_scales()
    fuser.drop_unread()
    return quantized


def quantized_layers(proto: ModelProto, types: Collection[str]) -> set[str]:
    """Outputs of the layers that `fuse_linear` computes in one of the quantized types; weights are in the graph."""
    copied = ModelProto()
    copied.CopyFrom(proto)
    drop_initializer_inputs(copied)
    constants_as_initializers(copied)
    return set(_LinearFuser(copied.graph).take_quantized(types))


_PAIR = ("QuantizeLinear", "DequantizeLinear")


@dataclass(slots=True)
class _Quantized:
    """A tensor behind a Q/DQ pair, or a stored one behind DequantizeLinear."""

    name: str
    scale: str
    kind: int


class GraphView:
    """A graph whose nodes are rewritten: which node makes a tensor, how many read it, and what is stored."""

    def __init__(self, graph: GraphProto) -> None:
        self.graph, self.outputs = graph, walk.kept_names(graph)
        self.constants = {item.name: item for item in graph.initializer}
        self.index()

    def index(self) -> None:
        self.makers = {name: node for node in self.graph.node for name in node.output}
        self.readers = Counter(name for node in self.graph.node for name in node.input)

    def inner(self, name: str, *ops: str, readers: int = 1) -> NodeProto | None:
        """The node that makes a tensor that so many nodes read and no output is, if it is one of these operators."""
        node = self.makers.get(name)
        if node is None or node.op_type not in ops or walk.domain_of(node) or name in self.outputs:
            return None
        return node if self.readers[name] == readers else None


class _LinearFuser(GraphView):
    """Edits the nodes of a graph."""

    def private(self, name: str) -> bool:
        return self.readers[name] == 1 and name not in self.outputs

    def drop_unread(self) -> None:
        """Remove Q/DQ pairs and constants without a reader."""
        for _ in range(2):
            self.index()
            retain_items(self.graph.node, lambda node: node.op_type not in _PAIR or self.is_read(node.output[0]))
        self.index()
        retain_items(self.graph.initializer, lambda item: self.is_read(item.name))

    def is_read(self, name: str) -> bool:
        return bool(self.readers[name]) or name in self.outputs

    # -------------------------------------------------------------------------------------------- products

    def take_biases(self) -> None:
        """MatMul by a stored weight and Add of a stored bias."""
        for added in list(self.graph.node):
            if added.op_type != "Add" or walk.domain_of(added):
                continue
            at = next((at for at in (0, 1) if self.is_product(added.input[at])), None)
            if at is None or not self.private(added.input[at]):
                continue
            product, bias = self.makers[added.input[at]], self.constants.get(added.input[1 - at])
            if bias is None or list(bias.dims) != list(self.constants[product.input[WEIGHT]].dims)[1:]:
                continue
            made = helper.make_node(LINEAR, list(product.input), added.output, name=product.name)
            made.attribute.extend(item for item in product.attribute if product.op_type == LINEAR)
            set_input(made, BIAS, bias.name)
            added.CopyFrom(made)
            self.graph.node.remove(product)
        self.index()

    def is_product(self, name: str) -> bool:
        """A MatMul by a stored matrix, or a quantized layer without bias."""
        node = self.makers.get(name)
        if node is None:
            return False
        if node.op_type == LINEAR:
            return len(node.input) <= BIAS or not node.input[BIAS]
        weight = (
            self.constants.get(node.input[WEIGHT]) if node.op_type == "MatMul" and not walk.domain_of(node) else None
        )
        return weight is not None and len(weight.dims) == 2

    def merge(self) -> None:
        """One product for the layers that read the same tensor, as Q, K and V do."""
        alike: dict[tuple[str, ...], list[NodeProto]] = defaultdict(list)
        for node in self.graph.node:
            if node.op_type == LINEAR and node.input[BIAS:] and node.input[BIAS]:
                scale = node.input[X_SCALE] if len(node.input) > X_SCALE else ""
                kind = self.constants[node.input[WEIGHT]].data_type, self.constants[node.input[BIAS]].data_type
                alike[(node.input[X], scale, *map(str, kind))].append(node)
        for number, nodes in enumerate(item for item in alike.values() if len(item) > 1):
            self.merge_nodes(nodes, f"_merged_{number}")
        self.index()

    def merge_nodes(self, nodes: list[NodeProto], stem: str) -> None:
        widths = [self.constants[node.input[WEIGHT]].dims[1] for node in nodes]
        inputs = [nodes[0].input[X], self.store(f"{stem}_weight", [self.read(node.input[WEIGHT]) for node in nodes], 1)]
        inputs.append(self.store(f"{stem}_bias", [self.read(node.input[BIAS]) for node in nodes], 0))
        if len(nodes[0].input) > X_SCALE:
            factors = self.store(f"{stem}_factors", [self.read(node.input[FACTORS]) for node in nodes], 0)
            inputs += ["", nodes[0].input[X_SCALE], factors]
        sizes = self.store(f"{stem}_sizes", [np.array(widths, np.int64)], 0)
        first = next(at for at, node in enumerate(self.graph.node) if node is nodes[0] or node == nodes[0])
        made = helper.make_node(LINEAR, inputs, [f"{stem}_out"], name=nodes[0].name)
        split = helper.make_node("Split", [f"{stem}_out", sizes], [node.output[0] for node in nodes], axis=-1)
        for node in nodes:
            self.graph.node.remove(node)
        self.graph.node.insert(first, split)
        self.graph.node.insert(first, made)

    def read(self, name: str) -> npt.NDArray[np.generic]:
        return read_tensor(self.constants[name], Path())  # weights are in the graph

    def store(self, name: str, parts: list[npt.NDArray[np.generic]], axis: int) -> str:
        self.constants[name] = made = make_initializer(np.concatenate(parts, axis), name)
        self.graph.initializer.append(made)
        return name

    # -------------------------------------------------------------------------------------------- quantized layers

    def take_quantized(self, types: Collection[str]) -> list[str]:
        """MatMul and Gemm whose inputs both come from symmetric Q/DQ pairs, per tensor (the weight: or per output); gives
        the outputs of those that were taken."""
        taken: list[str] = []
        for node in list(self.graph.node) if types else ():
            if node.op_type not in ("MatMul", "Gemm") or walk.domain_of(node) or len(node.input) < 2:
                continue
            given = walk.attributes(node)
            transposed = bool(given.get("transB", 0))
            if node.op_type == "Gemm" and (
                given.get("transA", 0) or {given.get("alpha", 1.0), given.get("beta", 1.0)} != {1.0}
            ):
                continue
            x, weight = self.activation(node.input[0]), self.weight(node.input[1], transposed=transposed)
            if x is None or weight is None or x.kind != weight.kind or _QUANTIZED[x.kind] not in types:
                continue
            bias = node.input[2] if len(node.input) > 2 else ""
            width = self.constants[weight.name].dims[0 if transposed else 1]
            if bias and (bias not in self.constants or list(self.constants[bias].dims) != [width]):
                continue
            stored = weight.name
            if transposed:
                stored = f"{weight.name}_transposed"
                if stored not in self.constants:
                    self.store(stored, [np.ascontiguousarray(self.read(weight.name).T)], 0)
            scales = self.read(x.scale).astype(np.float32) * self.read(weight.scale).astype(np.float32)
            factors = self.store(f"{node.output[0]}_factors", [np.broadcast_to(scales.reshape(-1), [width])], 0)
            inputs = [x.name, stored, bias, "", x.scale, factors]
            node.CopyFrom(helper.make_node(LINEAR, inputs, list(node.output), name=node.name))
            taken.append(node.output[0])
        self.drop_unread()
        return taken

    def activation(self, name: str) -> _Quantized | None:
        """The tensor before Q and DQ of one scale without zero point."""
        dequantize = self.makers.get(name)
        quantize = self.makers.get(dequantize.input[0]) if dequantize is not None and dequantize.input else None
        if quantize is None or dequantize is None or quantize.op_type != "QuantizeLinear":
            return None
        first, second = self.symmetric(quantize), self.symmetric(dequantize)
        if (
            first is None
            or second is None
            or first.kind != second.kind
            or self.constants[first.scale].dims not in ([], [1])
        ):
            return None
        same = first.scale == second.scale or np.array_equal(self.read(first.scale), self.read(second.scale))
        return (
            first if same and self.constants[first.scale].data_type == self.constants[second.scale].data_type else None
        )

    def weight(self, name: str, *, transposed: bool) -> _Quantized | None:
        """A stored matrix behind DequantizeLinear, with one scale or one of each output."""
        dequantize = self.makers.get(name)
        found = None if dequantize is None else self.symmetric(dequantize)
        stored = None if found is None else self.constants.get(found.name)
        if (
            found is None
            or dequantize is None
            or stored is None
            or len(stored.dims) != 2
            or stored.data_type != found.kind
        ):
            return None
        scale, outputs = list(self.constants[found.scale].dims), 0 if transposed else 1
        if scale not in ([], [1]) and (
            scale != [stored.dims[outputs]] or walk.attributes(dequantize).get("axis", 1) % 2 != outputs
        ):
            return None
        depth, width = stored.dims[1 - outputs], stored.dims[outputs]
        return found if not (depth % _DEPTH or width % _TILE) else None

    def symmetric(self, node: NodeProto) -> _Quantized | None:
        """What Q or DQ reads, its scale and its quantized type; None for a zero point, blocks, or a computed scale."""
        if node.op_type not in _PAIR or walk.domain_of(node) or len(node.input) < 2:
            return None
        given = walk.attributes(node)
        if given.get("block_size", 0) or not given.get("saturate", 1) or node.input[1] not in self.constants:
            return None
        kind = given.get("output_dtype", 0)
        zero = node.input[2] if len(node.input) > 2 else ""
        if zero:
            if zero not in self.constants or np.any(self.read(zero).astype(np.float32)):
                return None
            kind = self.constants[zero].data_type
        elif node.op_type == "DequantizeLinear":
            stored = self.constants.get(node.input[0])
            maker = self.makers.get(node.input[0])
            kind = (
                stored.data_type
                if stored is not None
                else walk.attributes(maker).get("output_dtype", 0)
                if maker
                else 0
            )
            if maker is not None and not kind and (before := self.symmetric(maker)) is not None:
                kind = before.kind
        return _Quantized(node.input[0], node.input[1], kind) if kind in _QUANTIZED else None

    # -------------------------------------------------------------------------------------------- what follows

    def take_activations(self) -> None:
        """Gelu and Relu that alone read a layer."""
        for node in list(self.graph.node):
            if node.op_type not in ("Gelu", "Relu") or walk.domain_of(node) or not self.private(node.input[0]):
                continue
            linear = self.makers.get(node.input[0])
            if linear is None or linear.op_type != LINEAR or "activation" in walk.attributes(linear):
                continue
            kind = "relu"
            if node.op_type == "Gelu":
                kind = "gelu_tanh" if walk.attributes(node).get("approximate", b"none") == b"tanh" else "gelu"
            set_attribute(linear, "activation", kind)
            self.move(linear, node)
        self.index()

    def take_residuals(self) -> None:
        """Add of a layer's output, which it alone reads, to another tensor; the rule adds apart where shapes differ."""
        for node in list(self.graph.node):
            if node.op_type != "Add" or walk.domain_of(node):
                continue
            at = next((at for at in (1, 0) if self.takes_residual(node.input[at])), None)
            if at is None or node.input[1 - at] in self.constants:
                continue
            linear = self.makers[node.input[at]]
            set_input(linear, RESIDUAL, node.input[1 - at])
            self.move(linear, node)
            self.index()

    def take_output_scales(self) -> None:
        """A quantized layer between a layer and its activation and the next: the values between are stored quantized."""
        for node in self.graph.node:
            if (
                node.op_type != LINEAR
                or len(node.input) <= X_SCALE
                or not node.input[X_SCALE]
                or not self.private(node.input[X])
            ):
                continue
            before = self.makers.get(node.input[X])
            if before is None or before.op_type != LINEAR or len(before.input) <= FACTORS:
                continue
            if "activation" not in walk.attributes(before) or before.input[RESIDUAL]:
                continue
            if len({self.constants[item.input[WEIGHT]].data_type for item in (before, node)}) > 1:
                continue
            set_input(before, OUT_SCALE, node.input[X_SCALE])
            set_attribute(node, "computes_in", self.constants[node.input[X_SCALE]].data_type)
            node.input[X_SCALE] = ""

    def takes_residual(self, name: str) -> bool:
        node = self.makers.get(name)
        if node is None or node.op_type != LINEAR or not self.private(name):
            return False
        return "activation" not in walk.attributes(node) and (len(node.input) <= RESIDUAL or not node.input[RESIDUAL])

    def move(self, linear: NodeProto, node: NodeProto) -> None:
        """The layer in the place of a node behind it, with that node's output."""
        made = NodeProto()
        made.CopyFrom(linear)
        made.output[0] = node.output[0]
        node.CopyFrom(made)
        self.graph.node.remove(linear)
        self.makers[node.output[0]] = node

"""Roles of graph inputs: sizes, steps, axes and divisors need valid values, data does not.

ONNX Runtime rejects most invalid values; some end the process (an STFT with frame length 0 divides by it).
Which inputs of four dimensions are images follows from the operators that read them: a KV cache, an attention mask and the
state of a streaming network have four dimensions too.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, MutableMapping, Sequence

from onnx import NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.graph.shape_inference import Trace, TracedNode
from trt_engine.model import GraphIndex
from trt_engine.tensors import Layout, Role, TensorSpec

_SLOTS: dict[str, dict[int, Role]] = {
    "AffineGrid": {1: "size"},
    "Attention": {6: "one"},
    "BlackmanWindow": {0: "size"},
    "CenterCropPad": {1: "size"},
    "Col2Im": {1: "size", 2: "one"},
    "ConstantOfShape": {0: "size"},
    "CumSum": {1: "first"},
    "CumProd": {1: "first"},
    "DFT": {1: "size", 2: "one"},
    "Expand": {1: "one"},
    "GRU": {4: "one"},
    "HammingWindow": {0: "size"},
    "HannWindow": {0: "size"},
    "LSTM": {4: "one"},
    "Loop": {0: "size", 1: "data"},
    "MaxUnpool": {2: "size"},
    "MelWeightMatrix": {0: "size", 1: "size", 2: "size"},
    "NonMaxSuppression": {2: "size"},
    "OneHot": {1: "size"},
    "Pad": {1: "data", 3: "axes"},
    "RNN": {4: "one"},
    "Range": {0: "first", 1: "size", 2: "one"},
    "Reshape": {1: "reshape"},
    "Resize": {1: "data", 2: "one", 3: "size"},
    "ReverseSequence": {1: "one"},
    "RoiAlign": {2: "first"},
    "STFT": {1: "one", 3: "size"},
    "Slice": {1: "first", 2: "size", 3: "axes", 4: "one"},
    "Split": {1: "one"},
    "SplitToSequence": {1: "one"},
    "Squeeze": {1: "axes"},
    "Tile": {1: "positive"},
    "TopK": {1: "one"},
    "Trilu": {1: "data"},
    "Unsqueeze": {1: "axes"},
    "Upsample": {1: "one"},
}
"""Role of an input by standard operator and position."""
_INDEXED = frozenset("Gather GatherElements GatherND ScatterElements ScatterND Scatter".split())
"""Operators whose second input counts along their first: where that is computed (the nodes of a graph network), it may have
one element, and 0 alone is valid. A table of constants (an embedding) has many."""
_CRASHING = frozenset({"STFT"})
"""Operators that can end the process: ONNX Runtime 1.31 divides by an STFT's frame length of 0."""
_DIVISIONS = ("Div", "Mod")
_SAME_VALUES = frozenset("Identity Cast Squeeze Unsqueeze Reshape Flatten".split())
_OF_THE_FIRST = _SAME_VALUES | frozenset("Gather Slice Transpose Expand Tile".split())
_OF_ALL = frozenset("Add Sub Mul Div Mod Neg Abs Min Max Sum Concat Where Ceil Floor Round Clip Pow Sqrt".split())
_INTEGERS = frozenset(
    (TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
     TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64)
)  # fmt: skip

_Flow = tuple[bool, bool]
"""Whether a tensor has the unchanged values of an input, and whether they are still integers."""


def input_roles(graph: GraphIndex) -> dict[str, Role]:
    """Inputs with a role, by name; `data` marks integers that reach an operator ONNX does not define, and all other
    inputs of a graph with an operator that can crash."""
    main = graph.graphs[0]
    flows = {value.name: {value.name: flow} for value in main.input if (flow := _initial_flow(value)) is not None}
    found: dict[str, Role] = {}
    if flows:
        tables = {item.name for item in main.initializer}
        for node in main.node:
            if tables.issuperset(filter(None, node.input)) and not any(True for _ in walk.bodies(node)):
                tables.update(node.output)
        tables |= {value.name for value in main.input if all(d.dim_value > 1 for d in value.type.tensor_type.shape.dim)}
        _propagate(main.node, flows, found, tables)
    if any(node.op_type in _CRASHING and not walk.domain_of(node) for node, *_ in graph.nodes):
        found = {value.name: found.get(value.name, "data") for value in main.input}
    return found


def _initial_flow(value: object) -> _Flow | None:
    """Initial flow of an input: integers, and floating point of the rank of sizes and scales."""
    tensor = value.type.tensor_type  # type: ignore[attr-defined]
    if tensor.elem_type in _INTEGERS or tensor.elem_type == TensorProto.BOOL:
        return True, tensor.elem_type in _INTEGERS
    return (True, False) if tensor.HasField("shape") and len(tensor.shape.dim) <= 1 else None


def _propagate(
    nodes: Iterable[NodeProto], flows: dict[str, dict[str, _Flow]], found: dict[str, Role], tables: Container[str]
) -> None:
    for node in nodes:
        is_indexed = node.op_type in _INDEXED and not node.domain and node.input[0] not in tables
        for at, name in enumerate(node.input):
            for source, flow in flows.get(name, {}).items():
                role = "first" if is_indexed and at == 1 and flow[1] else _role(node, at, flow)
                if role is not None and found.get(source, "data") == "data":
                    found[source] = role
        for _, body in walk.bodies(node) if node.attribute else ():
            skipped = 2 if node.op_type == "Loop" else 0
            for name, inner in zip(node.input[skipped:], body.input[skipped:], strict=False):
                if name in flows:
                    flows[inner.name] = {source: (False, flow[1]) for source, flow in flows[name].items()}
            _propagate(body.node, flows, found, tables)
        passed = dict(_forwarded_inputs(node, flows))
        if passed:
            flows.update({name: passed for name in node.output if name})


def _role(node: NodeProto, at: int, flow: _Flow) -> Role | None:
    same, integer = flow
    if walk.domain_of(node):
        return "data" if integer else None
    role: Role | None = _SLOTS.get(node.op_type, {}).get(at)
    if role is None and at == 1 and (node.op_type.startswith("Reduce")):
        role = "axes"
    if node.op_type in _DIVISIONS and at == 1 and integer:
        role = "positive"
    return role if role is None or same or role == "data" else "positive"


def _forwarded_inputs(node: NodeProto, flows: dict[str, dict[str, _Flow]]) -> Iterator[tuple[str, _Flow]]:
    """Inputs whose values reach the node's outputs."""
    op = node.op_type
    if walk.domain_of(node) or not (op in _OF_THE_FIRST or op in _OF_ALL or op.startswith("Reduce")):
        return
    read = node.input if op in _OF_ALL else node.input[:1]
    whole = next((item.i in _INTEGERS for item in node.attribute if op == "Cast" and item.name == "to"), None)
    for name in read:
        for source, (same, integer) in flows.get(name, {}).items():
            yield source, (same and op in _SAME_VALUES, integer if whole is None else whole)


_IMAGE_OPS = frozenset(
    "Conv ConvInteger QLinearConv ConvTranspose DeformConv FusedConv MaxPool AveragePool LpPool GlobalAveragePool "
    "GlobalMaxPool GlobalLpPool MaxUnpool MaxRoiPool RoiAlign GridSample LRN BatchNormalization InstanceNormalization "
    "GroupNormalization ReorderInput Resize Upsample DepthToSpace SpaceToDepth Unfold".split()
)
"""Operators whose first input is an image or a map of one, in NCHW."""
_NHWC_DOMAIN = "com.ms.internal.nhwc"
_DOMAINS = ("", "com.microsoft", "com.microsoft.nchwc", _NHWC_DOMAIN)
"""Domains of the standard and of ONNX Runtime's optimised graphs."""
_EITHER_LAYOUT = frozenset(("Resize", "Upsample"))
_PRODUCTS = frozenset("MatMul Gemm Einsum MatMulInteger QLinearMatMul FusedMatMul".split())
_KEEPING = frozenset(
    "Identity Cast CastLike Clip Abs Neg Sqrt Exp Log Erf Sigmoid Tanh Relu LeakyRelu PRelu HardSigmoid Floor Ceil Round "
    "Pad QuantizeLinear DequantizeLinear Dropout Slice Split ScatterElements ScatterND TensorScatter Not IsNaN Trilu "
    "LayerNormalization RMSNormalization SimplifiedLayerNormalization".split()
)
"""Operators that keep the axes of their first input."""
_BY_ELEMENT = frozenset("Add Sub Mul Div Pow Min Max Sum Mean Where And Or Mod".split())
_RESHAPING = frozenset("Reshape Expand Tile Squeeze Unsqueeze Flatten ReduceMean ReduceSum ReduceMax ReduceMin".split())

Axes = tuple[int, int, int, int]
"""The input's axis at each position of a tensor."""
_AXES: Axes = (0, 1, 2, 3)
_Flows = Mapping[str, Axes | None]
"""The inputs that a tensor has the values of, with its axes; None after a reshape, and beside computed values."""


def input_layouts(inputs: Iterable[TensorSpec], traced: Trace) -> dict[str, Layout]:
    """Layout of inputs of four dimensions, by name; none for those that no such operator reads.

    `NCHW` and `NHWC` are read by a convolution, a pooling, a normalization of channels or a resize. `other` is a factor of a
    product of computed tensors, or part of attention, of a softmax, or of a concatenation with computed values.
    """
    specs = {spec.name: spec for spec in inputs if len(spec.shape) == 4}
    if not specs:
        return {}
    search = _Search(specs)
    search.nodes(traced.nodes, {name: {name: _AXES} for name in specs}, {spec.name for spec in inputs})
    others: dict[str, Layout] = dict.fromkeys(search.others, "other")
    return others | search.images


class _Search:
    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.specs = specs
        self.images: dict[str, Layout] = {}
        self.others: set[str] = set()

    def nodes(self, steps: Sequence[TracedNode], flows: MutableMapping[str, _Flows], computed: set[str]) -> None:
        """Follow the inputs through these nodes. `computed` names tensors that vary."""
        for step in steps:
            for body in step.bodies:
                self.nodes(body, dict(flows), set(computed))
            node = step.node
            read = [flows.get(name, {}) if name else {} for name in node.input]
            varying = [
                bool(name) and name in computed and (fact is None or (fact.value is None and not fact.is_constant))
                for name, fact in zip(node.input, step.inputs, strict=False)
            ]
            passed = self.node(node, read, varying) if any(read) else {}
            if node.op_type not in ("Shape", "Size") and (any(varying) or not node.input):
                computed.update(name for name in node.output if name)
            for name, fact in zip(node.output, step.outputs, strict=False):
                flat = fact.shape is not None and len(fact.shape) != 4
                flows[name] = dict.fromkeys(passed, None) if flat else passed

    def node(self, node: NodeProto, read: Sequence[_Flows], varying: Sequence[bool]) -> _Flows:
        """Judge the inputs that a node reads; returns those that its outputs have the values of."""
        op, data = node.op_type, read[0]
        if (domain := walk.domain_of(node)) not in _DOMAINS:
            return {}
        if (kind := op.removeprefix("Nhwc")) in _IMAGE_OPS:
            self.other(*read[1:])  # weights, a grid
            self.image(kind, data, nhwc=kind != op or domain == _NHWC_DOMAIN)
            return data if op in _EITHER_LAYOUT else {}
        if (
            "Attention" in op
            or op in ("Softmax", "LogSoftmax", "RotaryEmbedding")
            or (op in _PRODUCTS and sum(varying) > 1)
        ):
            return self.other(*read)
        if op in _PRODUCTS:
            return self.product(read)
        if op == "Concat":
            return self.concat(node, read, varying)
        if op == "Transpose":
            return {name: _moved(axes, node) for name, axes in data.items()}
        if op.startswith("Gather"):
            by_value = any(varying[1:]) and _axis(node) != 0
            return self.other(*read) if by_value else data
        if op in _KEEPING:
            return data
        if op in _BY_ELEMENT:
            mixed = any(varies and not flow for varies, flow in zip(varying, read, strict=True))
            return dict.fromkeys(_merged(read), None) if mixed else _merged(read)
        if op in _RESHAPING:
            return dict.fromkeys(data, None)
        return {}

    def other(self, *flows: _Flows) -> _Flows:
        self.others.update(name for flow in flows for name in flow)
        return {}

    def product(self, read: Sequence[_Flows]) -> _Flows:
        """A product with constants: of the sizes of images, it adds up channels alone."""
        for position, flow in enumerate(read):
            for name, axes in flow.items():
                if axes is not None and self.specs[name].shape[axes[2 if position else 3]] not in (1, 3, 4):
                    self.others.add(name)
        return {}

    def concat(self, node: NodeProto, read: Sequence[_Flows], varying: Sequence[bool]) -> _Flows:
        """Parts of one image, and images side by side as channels, stay images; a part beside computed values, or one that
        another input makes longer, is a state."""
        axis, merged = _axis(node), _merged(read)
        beside = any(varies and not flow for varies, flow in zip(varying, read, strict=True))
        longer = len(merged) > 1 and any(
            axes is not None and -4 <= axis < 4 and axes[axis] not in (0, self.channels(name))
            for name, axes in merged.items()
        )
        return self.other(merged) if beside or longer else merged

    def channels(self, name: str) -> int:
        """Axis of the channels, if it is an image, by the sizes."""
        shape = self.specs[name].shape
        return 3 if shape[3] in (1, 3, 4) and shape[1] not in (1, 3, 4) else 1

    def image(self, op: str, flow: _Flows, *, nhwc: bool) -> None:
        for name, axes in flow.items():
            if axes is None or name in self.images:
                continue
            either = axes == _AXES and op in _EITHER_LAYOUT
            channels = self.channels(name) if either else axes[3] if nhwc else axes[1]
            if channels in (1, 3) and axes[0] == 0:
                self.images[name] = "NCHW" if channels == 1 else "NHWC"


def _merged(read: Sequence[_Flows]) -> dict[str, Axes | None]:
    made: dict[str, Axes | None] = {}
    for flow in read:
        for name, axes in flow.items():
            made[name] = made.get(name) or axes
    return made


def _axis(node: NodeProto) -> int:
    return next((int(item.i) for item in node.attribute if item.name == "axis"), 0)


def _moved(axes: Axes | None, node: NodeProto) -> Axes | None:
    order = next((tuple(item.ints) for item in node.attribute if item.name == "perm"), (3, 2, 1, 0))
    if axes is None or sorted(order) != [0, 1, 2, 3]:
        return None
    return axes[order[0]], axes[order[1]], axes[order[2]], axes[order[3]]

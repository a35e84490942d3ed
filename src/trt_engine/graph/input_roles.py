"""Roles of graph inputs: sizes, steps, axes and divisors need valid values, data does not.

ONNX Runtime rejects most invalid values; some end the process (an STFT with frame length 0 divides by it).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

from onnx import NodeProto, TensorProto

from trt_engine.graph import walk
from trt_engine.model import GraphIndex
from trt_engine.tensors import Role

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

"""Lowering a graph's opset: an operator whose older definition takes this node is merely read by it; where inputs became
attributes or defaults moved, the node is rewritten; anything else is refused with what changed.

What changed is read from ONNX's own schemas. Nothing is inferred from weights, so they may lie anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper

from trt_engine.graph import walk
from trt_engine.graph.trace import attributes

__all__ = ["CannotLower", "lower_opset"]


class CannotLower(Exception):
    """This node has no older form; the text says why."""

    def __init__(self, node: NodeProto, why: str) -> None:
        super().__init__(why)
        self.node = node


def lower_opset(proto: ModelProto, to: int, types: Mapping[str, TypeProto]) -> tuple[str, ...]:
    """Bring the model down to opset `to`, in place; what was rewritten, in words. `CannotLower` for the first node that
    cannot be. `types` are what inference knows of the main graph's tensors."""
    have = walk.opsets_of(proto).get("", 1)
    job = _Lowering(have, to, types, _constants(proto), [])
    for graph in [*walk.graphs(proto)]:
        job.graph(graph)
    for item in proto.opset_import:
        if item.domain in walk.DEFAULT_DOMAINS:
            item.version = to
    return tuple(job.said)


def _constants(proto: ModelProto) -> dict[str, TensorProto]:
    found: dict[str, TensorProto] = {}
    for graph in walk.graphs(proto):
        found.update((item.name, item) for item in graph.initializer)
        for node in graph.node:
            if node.op_type == "Constant" and node.output:
                given = attributes(node)
                if isinstance(given.get("value"), TensorProto):
                    found[node.output[0]] = given["value"]
                elif "value_ints" in given or "value_int" in given:
                    values = np.array(given.get("value_ints", given.get("value_int")), np.int64)
                    found[node.output[0]] = numpy_helper.from_array(values)
    return found


class _Lowering:
    """One model on its way down."""

    def __init__(
        self, have: int, to: int, types: Mapping[str, TypeProto], constants: Mapping[str, TensorProto], said: list[str]
    ) -> None:
        self.have, self.to, self.types, self.constants, self.said = have, to, types, constants, said
        self.made: list[TensorProto] = []
        self.after: list[NodeProto] = []
        """What is to stand behind the node in hand."""

    def graph(self, graph: GraphProto) -> None:
        self.made = []
        at = 0
        while at < len(graph.node):
            self.after = []
            if not walk.domain_of(graph.node[at]):
                self.node(graph.node[at])
            for node in self.after:
                at += 1
                graph.node.insert(at, node)
            at += 1
        graph.initializer.extend(self.made)

    def node(self, node: NodeProto) -> None:
        before, after = _schema(node.op_type, self.have), _schema(node.op_type, self.to)
        if before is None or (after is not None and after.since_version == before.since_version):
            return
        if after is None or after.deprecated:
            raise CannotLower(node, f"is not in opset {self.to}")
        rule = _RULES.get(node.op_type)
        if rule is not None and (what := rule(self, node, before.since_version, after.since_version)):
            self.said.append(f"`{walk.label(node)}` ({node.op_type}): {what}")
        self.attributes(node, before, after)
        self.arity(node, after)
        self.kinds(node, after)

    def attributes(self, node: NodeProto, before: Any, after: Any) -> None:
        """Newer attributes go where they say what was the only way before; a default that moved is stated."""
        for at in reversed(range(len(node.attribute))):
            item = node.attribute[at]
            if item.name in after.attributes or item.ref_attr_name:
                continue
            known = before.attributes.get(item.name)
            if not (_is_default(item, known) or _as_ever(node, item)):
                value = helper.get_attribute_value(item) if item.type != onnx.AttributeProto.GRAPH else "a graph"
                shown = value.decode() if isinstance(value, bytes) else value
                raise CannotLower(node, f"has `{item.name}={shown}`, which opset {self.to} does not know")
            del node.attribute[at]
        stated = {item.name for item in node.attribute}
        for name, known in after.attributes.items():
            other = before.attributes.get(name)
            if name in stated or other is None or not other.default_value.name:
                continue
            if _value(other) != _value(known):
                item = onnx.AttributeProto()
                item.CopyFrom(other.default_value)
                node.attribute.append(item)

    def arity(self, node: NodeProto, after: Any) -> None:
        while node.input and not node.input[-1]:
            del node.input[-1]
        if len(node.input) > after.max_input:
            extra = node.input[after.max_input]
            raise CannotLower(node, f"has the input `{extra}`, for which opset {self.to} has no place")
        if len(node.output) > after.max_output:
            raise CannotLower(node, f"has more outputs than opset {self.to} gives it")

    def kinds(self, node: NodeProto, after: Any) -> None:
        allowed = {item.type_param_str: set(item.allowed_type_strs) for item in after.type_constraints}
        for side, formals in ((node.input, after.inputs), (node.output, after.outputs)):
            for at, name in enumerate(side):
                if not name or not formals:
                    continue
                formal = formals[min(at, len(formals) - 1)]
                kind = self.kind(name)
                takes = allowed.get(formal.type_str, {formal.type_str})
                if kind and kind not in takes:
                    short = kind.removeprefix("tensor(").removesuffix(")")
                    raise CannotLower(node, f"does not take {short} in opset {self.to} (`{name}`)")

    def kind(self, name: str) -> str | None:
        elem = 0
        if name in self.constants:
            elem = self.constants[name].data_type
        elif name in self.types and self.types[name].HasField("tensor_type"):
            elem = self.types[name].tensor_type.elem_type
        if not elem:
            return None
        words = {"FLOAT": "float", "DOUBLE": "double"}
        upper = TensorProto.DataType.Name(elem)
        return f"tensor({words.get(upper, upper.lower())})"

    def values(self, node: NodeProto, at: int, what: str) -> list[int] | None:
        """The constant integers of an input; None where it is not given, `CannotLower` where it is computed."""
        if len(node.input) <= at or not node.input[at]:
            return None
        tensor = self.constants.get(node.input[at])
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            raise CannotLower(node, f"computes `{what}`, which is an attribute in opset {self.to}")
        return [int(item) for item in numpy_helper.to_array(tensor).reshape(-1)]

    def constant(self, node: NodeProto, at: int, values: np.ndarray) -> None:
        name = f"{next(item for item in node.output if item)}_input_{at}_of_opset"
        self.made.append(numpy_helper.from_array(values, name))
        while len(node.input) <= at:
            node.input.append("")
        node.input[at] = name

    def rank(self, name: str) -> int | None:
        if name in self.types and self.types[name].tensor_type.HasField("shape"):
            return len(self.types[name].tensor_type.shape.dim)
        return len(self.constants[name].dims) if name in self.constants else None


def _schema(op: str, version: int) -> Any:
    try:
        return onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return None


def _value(attribute: Any) -> Any:
    return helper.get_attribute_value(attribute.default_value) if attribute.default_value.name else None


def _is_default(item: onnx.AttributeProto, known: Any) -> bool:
    return known is not None and bool(known.default_value.name) and helper.get_attribute_value(item) == _value(known)


def _as_ever(node: NodeProto, item: onnx.AttributeProto) -> bool:
    """An attribute without a default, or with a value, that says what the older operator does anyway."""
    if item.name == "num_outputs":
        return item.i == len(node.output)
    if item.name == "dilations":
        return all(value == 1 for value in item.ints)
    return item.name == "saturate"  # of 8-bit floats alone, and those the older operator does not take


def _crosses(version: int, before: int, after: int) -> bool:
    return after < version <= before


_Rule = Callable[[_Lowering, NodeProto, int, int], str]


def _axes_from(version: int) -> _Rule:
    def rule(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
        if not _crosses(version, before, after):
            return ""
        axes = job.values(node, 1, "axes")
        noop = attributes(node).get("noop_with_empty_axes", 0)
        if noop:
            if not axes:
                raise CannotLower(node, f"reduces nothing without axes, which opset {job.to} cannot say")
            _drop(node, "noop_with_empty_axes")
        del node.input[1:]
        if axes:
            node.attribute.append(helper.make_attribute("axes", axes))
        return "`axes` is an attribute now" if axes else ""

    return rule


def _drop(node: NodeProto, name: str) -> None:
    for at in reversed(range(len(node.attribute))):
        if node.attribute[at].name == name:
            del node.attribute[at]


def _split(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
    if not _crosses(13, before, after):
        return ""
    sizes = job.values(node, 1, "split")
    del node.input[1:]
    if sizes:
        node.attribute.append(helper.make_attribute("split", sizes))
    return "`split` is an attribute now" if sizes else ""


def _dft(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
    if not _crosses(20, before, after):
        return ""
    axis = job.values(node, 2, "axis")
    del node.input[2:]
    node.attribute.append(helper.make_attribute("axis", axis[0] if axis else -2))
    return "`axis` is an attribute now"


def _grid_sample(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
    if not _crosses(20, before, after):
        return ""
    mode = attributes(node).get("mode", b"linear")
    older = {b"linear": b"bilinear", b"cubic": b"bicubic"}.get(mode, mode)
    _drop(node, "mode")
    node.attribute.append(helper.make_attribute("mode", older))
    return f"the mode is called `{older.decode()}` there"


def _softmax(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
    if not _crosses(13, before, after):
        return ""
    axis, rank = attributes(node).get("axis", -1), job.rank(node.input[0])
    if axis != -1 and (rank is None or axis % rank != rank - 1):
        raise CannotLower(node, f"works along axis {axis}, and opset {job.to} flattens what is behind it")
    if axis == -1 and rank is None:
        raise CannotLower(node, "works along the last axis of a tensor of unknown rank")
    _drop(node, "axis")
    node.attribute.append(helper.make_attribute("axis", int(rank or 1) - 1))
    return ""


def _resize(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
    if after < 11:
        raise CannotLower(node, f"takes other coordinates than opset {job.to} does")
    if not _crosses(13, before, after):
        return ""
    for at, name in ((1, "roi"), (2, "scales")):
        if len(node.input) <= at or not node.input[at]:
            job.constant(node, at, np.zeros(0, np.float32))
            job.said.append(f"`{walk.label(node)}` (Resize): `{name}` is stated as empty")
    return ""


def _group_normalization(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
    if _crosses(21, before, after):
        raise CannotLower(node, "has a scale for each channel, and below opset 21 one for each group")
    return ""


def _roi_align(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
    mode = attributes(node).get("coordinate_transformation_mode", b"half_pixel")
    if _crosses(16, before, after):
        if mode != b"output_half_pixel":
            raise CannotLower(node, f"has the coordinates `{mode.decode()}`, which came with opset 16")
        _drop(node, "coordinate_transformation_mode")
    return ""


def _shape(job: _Lowering, node: NodeProto, before: int, after: int) -> str:
    given = attributes(node)
    if not _crosses(15, before, after) or (given.get("end") is None and given.get("start", 0) == 0):
        return ""
    if job.to < 10:
        raise CannotLower(node, "gives a part of the shape, and Slice takes its ends as inputs from opset 10 on")
    for name in ("start", "end"):
        _drop(node, name)
    out = node.output[0]
    node.output[0] = f"{out}_whole_of_opset"
    cut = helper.make_node("Slice", [node.output[0]], [out], name=f"{node.name or out}_slice_of_opset")
    for at, value in ((1, given.get("start", 0)), (2, given.get("end", (1 << 63) - 1))):
        job.constant(cut, at, np.array([value], np.int64))
    job.after.append(cut)
    return "a Slice takes the part of the shape"


_REDUCTIONS = "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare"
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(_REDUCTIONS.split(), _axes_from(18)),
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), _axes_from(13)),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax),
    "Split": _split,
    "DFT": _dft,
    "GridSample": _grid_sample,
    "Resize": _resize,
    "GroupNormalization": _group_normalization,
    "RoiAlign": _roi_align,
    "Shape": _shape,
}

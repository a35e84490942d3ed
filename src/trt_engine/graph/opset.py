"""Raises or lowers a model's opset: rewrites the operators whose definition changed, or fails with the reason.

Runs no shape inference and reads no weights, so external data stays untouched. Changes follow ONNX's operator schemas
(Changelog.md of the ONNX repository lists them by operator and version).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, helper, numpy_helper, version_converter

from trt_engine.errors import ModelError
from trt_engine.format import library_reason
from trt_engine.graph import edit_graph, external_data, walk
from trt_engine.graph.constants import drop_initializer_inputs, stored_constants
from trt_engine.graph.shape_inference import schema_of, type_string
from trt_engine.graph.symbolic_shapes import elem_type

log = logging.getLogger(__name__)

MIN_OPSET = 13
"""First opset with per-axis Q/DQ, and the first that our own rules raise; ONNX's version converter raises older ones."""
_MIN_DETACHED_NBYTES = 1 << 16
_REDUCTIONS = tuple(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare".split()
)
_GRID_MODES = {b"bilinear": b"linear", b"bicubic": b"cubic"}
"""Modes of GridSample below opset 20, and their names from there on."""


def raise_opset(proto: ModelProto, to: int) -> tuple[str, ...]:
    """Raise the model to opset `to` in place if it is lower; return a description of each rewrite.

    Raises `ModelError` when an operator has another meaning there and cannot be rewritten."""
    before = have = walk.opsets_of(proto).get("", 1)
    notes: list[str] = []
    if have < min(MIN_OPSET, to):
        _raise_old_model(proto, have)
        have = MIN_OPSET
    if before < to:
        inner = [body for function in proto.functions for node in function.node for _, body in walk.bodies(node)]
        for graph in [*walk.graphs(proto)]:
            if not any(body is graph for body in inner):  # one in a local function has the function's opset imports
                _raise_graph(graph, have, to, notes)
        for item in proto.opset_import:
            if item.domain in walk.DEFAULT_DOMAINS:
                item.version = max(have, to)
        notes.insert(0, f"opset raised from {before} to {max(have, to)}")
        log.info("%s", "; ".join(notes))
    needed = helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, needed)
    return tuple(notes)


def _raise_old_model(proto: ModelProto, have: int) -> None:
    """Raise a model of an opset below 13 to that, in place, and check that each operator fits there."""
    try:
        work = edit_graph.inline_functions(proto)
        drop_initializer_inputs(work)
        for graph in walk.graphs(work):
            _forget_negative_sizes(graph)
        kinds = [item.type.tensor_type for item in work.graph.output]
        scalars = [kind.HasField("shape") and not kind.shape.dim for kind in kinds]  # or of a rank the exporter lacked
        for kind in itertools.compress(kinds, scalars):
            kind.ClearField("shape")
        done = convert_with_library(work, MIN_OPSET)
        found = onnx.shape_inference.infer_shapes(done, check_type=True, strict_mode=True).graph.output
        for item, known in itertools.compress(zip(done.graph.output, found, strict=True), scalars):
            item.CopyFrom(known)
            item.type.tensor_type.shape.SetInParent()  # which the checker wants
    except Exception as error:  # C++ exceptions of the converter and of the inference
        reason = error.message if isinstance(error, ModelError) else library_reason(error)
        raise ModelError(
            f"the model has opset {have}, and cannot be raised to {MIN_OPSET}: {reason}",
            hint="export it again with `opset_version=20`",
        ) from error
    done.metadata_props.extend(item for item in proto.metadata_props if item not in done.metadata_props)
    done.ir_version = max(done.ir_version, proto.ir_version)
    proto.CopyFrom(done)


def _forget_negative_sizes(graph: GraphProto) -> None:
    """Sizes of -1, as old exporters declared them, are unknown: the converter and inference take them for numbers."""
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("dim_value")


def convert_with_library(proto: ModelProto, to: int) -> ModelProto:
    """The model at another opset by ONNX's version converter, which sees no large weights; names of nodes and imports of
    other domains are kept, and what the converter gets wrong is right (Resize of opset 10 and its Upsample, Hardmax).

    Raises `ModelError` for Hardmax, and what the converter does: any C++ exception.
    """
    have = walk.opsets_of(proto).get("", 1)
    work = ModelProto()
    work.CopyFrom(proto)
    hidden = external_data.detach_weights(work, large_weights(work))
    done: ModelProto = version_converter.convert_version(work, to)
    external_data.attach_weights(done, hidden)
    known = {item.domain for item in done.opset_import}
    done.opset_import.extend(item for item in work.opset_import if item.domain not in known | {*walk.DEFAULT_DOMAINS})
    names = {name: node.name for node in work.graph.node for name in node.output if name}
    for node in done.graph.node:
        if not node.name:
            node.name = next((names[name] for name in node.output if name in names), "")
    edit_graph.make_names_unique(done)
    stored = dict(item for graph in walk.graphs(done) for item in stored_constants(graph))
    scales = {
        name: numpy_helper.to_array(tensor)
        for name, tensor in stored.items()
        if tensor.data_type == TensorProto.FLOAT and len(tensor.dims) == 1 and name not in hidden
    }
    for place in walk.nodes(done):
        if place.node.op_type == "Resize" and have < 11 <= to:
            edit_graph.set_attribute(place.node, "coordinate_transformation_mode", "asymmetric")
            shrinks = any(scale < 1 for scale in scales.get(place.node.input[2], ()))
            edit_graph.set_attribute(
                place.node, "nearest_mode", "ceil" if shrinks else "floor"
            )  # as ONNX Runtime reads opset 10
        if place.node.op_type == "Hardmax" and have < 13 <= to:
            raise ModelError(
                f"`Hardmax` (node `{walk.label(place.node)}`) works along all axes from its own on below opset 13",
                hint=f"export the model again with opset {to}",
            )
    return done


def large_weights(proto: ModelProto) -> set[str]:
    """Weights to keep from the converter, which copies the whole message several times."""
    return {
        tensor.name
        for tensor in proto.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL or external_data.nbytes_of(tensor) >= _MIN_DETACHED_NBYTES
    }


def import_domain(proto: ModelProto, domain: str) -> None:
    """Add an operator set import unless present."""
    if all(item.domain != domain for item in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(domain, 1))


def _raise_graph(graph: GraphProto, have: int, to: int, notes: list[str]) -> None:
    made: list[TensorProto] = []
    for node in graph.node:
        if walk.domain_of(node):
            continue
        before = schema_of(node.op_type, "", have)
        after = schema_of(node.op_type, "", to)
        if before is not None and after is not None and before.since_version == after.since_version:
            continue
        if before is None or after is None or after.deprecated:
            raise ModelError(
                f"the operator `{node.op_type}` (node `{walk.label(node)}`) is not in opset {to}",
                hint=f"export the model again with opset {to}",
            )
        version, rewrite = _UPGRADES.get(node.op_type, (0, None))
        if rewrite is not None and _crosses(version, before, after) and (what := rewrite(node, made)):
            notes.append(f"`{walk.label(node)}` ({node.op_type}): {what}")
        foreign = [item.name for item in node.attribute if item.name not in after.attributes]
        if foreign or len(node.input) > after.max_input or len(node.output) > after.max_output:
            what = f"the attribute `{foreign[0]}`" if foreign else "that many inputs or outputs"
            raise ModelError(
                f"opset {to} does not take {what} of `{node.op_type}` (node `{walk.label(node)}`)",
                hint=f"export the model again with opset {to}",
            )
    graph.initializer.extend(made)


# ------------------------------------------------------------------------------------------------ definitions


def schema_changes(op: str, have: int, opset: int) -> str | None:
    """Differences of an operator's definition between two opsets; None if equal."""
    before, after = schema_of(op, "", have), schema_of(op, "", opset)
    if before is None or (after is not None and after.since_version == before.since_version):
        return None
    if after is None:
        return f"not in opset {opset}"
    parts = []
    gone, new = set(before.attributes) - set(after.attributes), set(after.attributes) - set(before.attributes)
    parts += [f"without the attribute `{name}`" for name in sorted(gone)]
    parts += [f"with the attribute `{name}`" for name in sorted(new)]
    for side, one, two in (("input", before.inputs, after.inputs), ("output", before.outputs, after.outputs)):
        names, others = [item.name for item in one], [item.name for item in two]
        if len(names) != len(others):
            more = others[len(names) :] or names[len(others) :]
            word = "with" if len(others) > len(names) else "without"
            parts += [f"{word} the {side} `{name}`" for name in more]
    types = [
        {kind for item in schema.type_constraints for kind in item.allowed_type_strs} for schema in (before, after)
    ]
    if fewer := sorted(types[0] - types[1]):
        parts.append(f"not of {_format_types(fewer)}")
    if more_types := sorted(types[1] - types[0]):
        parts.append(f"of {_format_types(more_types)} too")
    return ", ".join(parts) or f"another meaning or default (versions {before.since_version} and {after.since_version})"


def _format_types(kinds: list[str]) -> str:
    shown = [kind.removeprefix("tensor(").removesuffix(")") for kind in kinds]
    return ", ".join(shown[:4]) + (f" and {len(shown) - 4} types more" if len(shown) > 4 else "")


def _crosses(version: int, before: Any, after: Any) -> bool:
    """Whether the change of `version` lies between the two definitions, in either direction."""
    low, high = sorted((before.since_version, after.since_version))
    return bool(low < version <= high)


def _set_input(node: NodeProto, at: int, values: np.ndarray, new_constants: list[TensorProto], what: str) -> None:
    """Set input `at` to a new constant, named after the node's output and therefore unique."""
    name = f"{next(item for item in node.output if item)}_{what}_of_opset"
    new_constants.append(numpy_helper.from_array(values, name))
    edit_graph.set_input(node, at, name)


# ------------------------------------------------------------------------------------------------ raising


def _upgrade_reduce(node: NodeProto, new_constants: list[TensorProto]) -> str:
    axes = edit_graph.pop_attribute(node, "axes")
    if axes is None:
        return ""
    _set_input(node, 1, np.array(axes.ints, np.int64), new_constants, "axes")
    return "`axes` is an input now"


def _upgrade_split(node: NodeProto, new_constants: list[TensorProto]) -> str:
    if len(node.input) > 1 and node.input[1]:
        return ""
    edit_graph.set_attribute(node, "num_outputs", len(node.output))
    return "`num_outputs` is stated now"


def _upgrade_dft(node: NodeProto, new_constants: list[TensorProto]) -> str:
    axis = edit_graph.pop_attribute(node, "axis")
    _set_input(node, 2, np.array(axis.i if axis is not None else 1, np.int64), new_constants, "axis")
    return "`axis` is an input now"


def _upgrade_grid_sample(node: NodeProto, new_constants: list[TensorProto]) -> str:
    mode = _GRID_MODES.get(walk.attributes(node).get("mode", b""))
    if mode is None:
        return ""
    edit_graph.set_attribute(node, "mode", mode)
    return f"the mode is called `{mode.decode()}` now"


def _upgrade_roi_align(node: NodeProto, new_constants: list[TensorProto]) -> str:
    if "coordinate_transformation_mode" in walk.attributes(node):
        return ""
    edit_graph.set_attribute(node, "coordinate_transformation_mode", "output_half_pixel")
    return "its old coordinates are stated now"


def _upgrade_group_normalization(node: NodeProto, new_constants: list[TensorProto]) -> str:
    raise ModelError(
        f"`GroupNormalization` (node `{walk.label(node)}`) takes a scale for each channel from opset 21 on, "
        "and this one has a scale for each group",
        hint="export the model again with opset 21 or later",
    )


def _upgrade_batch_normalization(node: NodeProto, new_constants: list[TensorProto]) -> str:
    if len([name for name in node.output if name]) > 1:
        raise ModelError(
            f"`BatchNormalization` (node `{walk.label(node)}`) has training outputs, which opset 14 changed",
            hint="export the model for inference: `model.eval()`",
        )
    return ""


def _upgrade_resize(node: NodeProto, new_constants: list[TensorProto]) -> str:
    if walk.attributes(node).get("coordinate_transformation_mode") == b"tf_half_pixel_for_nn":
        raise ModelError(
            f"`Resize` (node `{walk.label(node)}`) has the mode `tf_half_pixel_for_nn`, which is gone from opset 13 on",
            hint="export the model again with `half_pixel`",
        )
    return ""


_UPGRADES: dict[str, tuple[int, Callable[[NodeProto, list[TensorProto]], str]]] = {
    **dict.fromkeys(_REDUCTIONS, (18, _upgrade_reduce)),
    "Split": (18, _upgrade_split),
    "DFT": (20, _upgrade_dft),
    "GridSample": (20, _upgrade_grid_sample),
    "RoiAlign": (16, _upgrade_roi_align),
    "GroupNormalization": (21, _upgrade_group_normalization),
    "BatchNormalization": (14, _upgrade_batch_normalization),
    "Resize": (18, _upgrade_resize),
}
"""Opset with the change, and the rewrite of a node across it, which returns what it did."""


# ------------------------------------------------------------------------------------------------ lowering


class CannotLower(Exception):
    """A node without an equivalent in the older opset; the message gives the reason."""

    def __init__(self, node: NodeProto, why: str) -> None:
        super().__init__(why)
        self.node = node


def lower_opset(proto: ModelProto, to: int, types: Mapping[str, TypeProto]) -> tuple[str, ...]:
    """Lower the model to opset `to` in place; returns what was rewritten. Raises `CannotLower` for the first node that
    has no older form. `types` are inferred types of the main graph's tensors."""
    have = walk.opsets_of(proto).get("", 1)
    stored = dict(item for graph in walk.graphs(proto) for item in stored_constants(graph))
    job = _Lowering(have, to, types, stored)
    for graph in [*walk.graphs(proto)]:
        job.graph(graph)
    for item in proto.opset_import:
        if item.domain in walk.DEFAULT_DOMAINS:
            item.version = to
    return tuple(job.notes)


class _Lowering:
    """State of lowering one model."""

    def __init__(
        self, have: int, to: int, types: Mapping[str, TypeProto], constants: Mapping[str, TensorProto]
    ) -> None:
        self.have, self.to, self.types, self.constants = have, to, types, constants
        self.notes: list[str] = []
        self.made: list[TensorProto] = []
        self.after: list[NodeProto] = []
        """Nodes to insert behind the current node."""

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
        before, after = schema_of(node.op_type, "", self.have), schema_of(node.op_type, "", self.to)
        if before is None or (after is not None and after.since_version == before.since_version):
            return
        if after is None or after.deprecated:
            raise CannotLower(node, f"is not in opset {self.to}")
        for version, rule in _DOWNGRADES.get(node.op_type, ()):
            if _crosses(version, before, after) and (what := rule(self, node)):
                self.notes.append(f"`{walk.label(node)}` ({node.op_type}): {what}")
        self.attributes(node, before, after)
        self.arity(node, after)
        self.kinds(node, after)

    def attributes(self, node: NodeProto, before: Any, after: Any) -> None:
        """Drop newer attributes that have the older behaviour; write out changed defaults."""
        for at in reversed(range(len(node.attribute))):
            item = node.attribute[at]
            if item.name in after.attributes or item.ref_attr_name:
                continue
            if not _is_older_default(node, item, before.attributes.get(item.name)):
                value = helper.get_attribute_value(item) if item.type != onnx.AttributeProto.GRAPH else "a graph"
                shown = value.decode() if isinstance(value, bytes) else value
                raise CannotLower(node, f"has `{item.name}={shown}`, which opset {self.to} does not know")
            del node.attribute[at]
        stated = {item.name for item in node.attribute}
        for name, known in after.attributes.items():
            other = before.attributes.get(name)
            if name in stated or other is None or not other.default_value.name:
                continue
            if _attribute_value(other) != _attribute_value(known):
                node.attribute.append(other.default_value)

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
        elem = self.constants[name].data_type if name in self.constants else elem_type(self.types, name)
        return type_string(elem) or None

    def values(self, node: NodeProto, at: int, what: str) -> list[int] | None:
        """Constant integers of an input; None if absent, `CannotLower` if computed."""
        if len(node.input) <= at or not node.input[at]:
            return None
        tensor = self.constants.get(node.input[at])
        if tensor is None or tensor.data_location == TensorProto.EXTERNAL:
            raise CannotLower(node, f"computes `{what}`, which is an attribute in opset {self.to}")
        return [int(item) for item in numpy_helper.to_array(tensor).reshape(-1)]

    def rank(self, name: str) -> int | None:
        if name in self.types and self.types[name].tensor_type.HasField("shape"):
            return len(self.types[name].tensor_type.shape.dim)
        return len(self.constants[name].dims) if name in self.constants else None


def _attribute_value(attribute: Any) -> Any:
    return helper.get_attribute_value(attribute.default_value) if attribute.default_value.name else None


def _is_older_default(node: NodeProto, item: onnx.AttributeProto, known: Any) -> bool:
    """Whether an attribute's value is the default, or means the older operator's behaviour."""
    if known is not None and known.default_value.name and helper.get_attribute_value(item) == _attribute_value(known):
        return True
    if item.name == "num_outputs":
        return item.i == len(node.output)
    if item.name == "dilations":
        return all(value == 1 for value in item.ints)
    return item.name == "saturate"  # only affects 8-bit floats, which the older operator does not support


_Rule = Callable[[_Lowering, NodeProto], str]


def _input_to_attribute(version: int, at: int, name: str) -> tuple[tuple[int, _Rule]]:
    """Rule for an input with constant integers that was an attribute before opset `version`."""

    def rule(job: _Lowering, node: NodeProto) -> str:
        values = job.values(node, at, name)
        noop = edit_graph.pop_attribute(node, "noop_with_empty_axes")
        if noop is not None and noop.i and not values:
            raise CannotLower(node, f"reduces nothing without axes, which opset {job.to} cannot express")
        del node.input[at:]
        if values:
            edit_graph.set_attribute(node, name, values)
        return f"`{name}` is an attribute now" if values else ""

    return ((version, rule),)


def _downgrade_dft(job: _Lowering, node: NodeProto) -> str:
    axis = job.values(node, 2, "axis")
    del node.input[2:]
    edit_graph.set_attribute(node, "axis", axis[0] if axis else -2)
    return "`axis` is an attribute now"


def _downgrade_grid_sample(job: _Lowering, node: NodeProto) -> str:
    mode = walk.attributes(node).get("mode", b"linear")
    older = {newer: older for older, newer in _GRID_MODES.items()}.get(mode, mode)
    edit_graph.set_attribute(node, "mode", older)
    return f"the mode is called `{older.decode()}` there"


def _downgrade_softmax(job: _Lowering, node: NodeProto) -> str:
    axis, rank = walk.attributes(node).get("axis", -1), job.rank(node.input[0])
    if axis != -1 and (rank is None or axis % rank != rank - 1):
        raise CannotLower(node, f"works along axis {axis}, and opset {job.to} flattens what is behind it")
    if axis == -1 and rank is None:
        raise CannotLower(node, "works along the last axis of a tensor of unknown rank")
    edit_graph.set_attribute(node, "axis", int(rank or 1) - 1)
    return ""


def _downgrade_resize_coordinates(job: _Lowering, node: NodeProto) -> str:
    raise CannotLower(node, f"takes other coordinates than opset {job.to} does")


def _downgrade_resize(job: _Lowering, node: NodeProto) -> str:
    for at, name in ((1, "roi"), (2, "scales")):
        if len(node.input) <= at or not node.input[at]:
            _set_input(node, at, np.zeros(0, np.float32), job.made, name)
            job.notes.append(f"`{walk.label(node)}` (Resize): `{name}` is stated as empty")
    return ""


def _downgrade_group_normalization(job: _Lowering, node: NodeProto) -> str:
    raise CannotLower(node, "has a scale for each channel, and below opset 21 one for each group")


def _downgrade_roi_align(job: _Lowering, node: NodeProto) -> str:
    mode = walk.attributes(node).get("coordinate_transformation_mode", b"half_pixel")
    if mode != b"output_half_pixel":
        raise CannotLower(node, f"has the coordinates `{mode.decode()}`, which came with opset 16")
    edit_graph.pop_attribute(node, "coordinate_transformation_mode")
    return ""


def _downgrade_shape(job: _Lowering, node: NodeProto) -> str:
    given = walk.attributes(node)
    if given.get("end") is None and given.get("start", 0) == 0:
        return ""
    if job.to < 10:
        raise CannotLower(node, "gives a part of the shape, and Slice takes its ends as inputs from opset 10 on")
    for name in ("start", "end"):
        edit_graph.pop_attribute(node, name)
    out = node.output[0]
    node.output[0] = f"{out}_whole_of_opset"
    cut = helper.make_node("Slice", [node.output[0]], [out], name=f"{node.name or out}_slice_of_opset")
    for at, name, value in ((1, "starts", given.get("start", 0)), (2, "ends", given.get("end", (1 << 63) - 1))):
        _set_input(cut, at, np.array([value], np.int64), job.made, name)
    job.after.append(cut)
    return "a Slice takes the part of the shape"


_DOWNGRADES: dict[str, tuple[tuple[int, _Rule], ...]] = {
    **dict.fromkeys(_REDUCTIONS, _input_to_attribute(18, 1, "axes")),
    **dict.fromkeys(("ReduceSum", "Squeeze", "Unsqueeze"), _input_to_attribute(13, 1, "axes")),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), ((13, _downgrade_softmax),)),
    "Split": _input_to_attribute(13, 1, "split"),
    "DFT": ((20, _downgrade_dft),),
    "GridSample": ((20, _downgrade_grid_sample),),
    "Resize": ((11, _downgrade_resize_coordinates), (13, _downgrade_resize)),
    "GroupNormalization": ((21, _downgrade_group_normalization),),
    "RoiAlign": ((16, _downgrade_roi_align),),
    "Shape": ((15, _downgrade_shape),),
}

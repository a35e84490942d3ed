"""Raising a graph's opset to where a format begins: the operators that changed on the way are rewritten, or the raise is
refused with the reason. Nothing is inferred and no weight is read, so external data of any size stays where it is.

What changed is read from ONNX's own schemas (Changelog.md of the ONNX repository lists it by operator and version).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, helper, numpy_helper

from trt_engine.errors import ModelError
from trt_engine.graph import walk

__all__ = ["LEAST", "import_domain", "raise_opset"]

log = logging.getLogger(__name__)

LEAST = 13
"""Q/DQ with an axis begins here, and so do models we quantise."""

_REDUCTIONS = frozenset(
    "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSumSquare".split()
)


def raise_opset(proto: ModelProto, to: int) -> tuple[str, ...]:
    """Bring the model to opset `to` if it is below, in place; what was rewritten, in words. `ModelError` when an operator
    means something else there and cannot be rewritten."""
    have = walk.opsets_of(proto).get("", 0)
    if have < LEAST:
        raise ModelError(
            f"the model has opset {have}, expected {LEAST} or later",
            hint=f"export it again with `opset_version=20`, or `onnx.version_converter.convert_version(model, {LEAST})`",
        )
    said: list[str] = []
    if have < to:
        for graph in [*walk.graphs(proto)]:
            if not _in_function(proto, graph):
                _raise_graph(graph, have, to, said)
        for item in proto.opset_import:
            if item.domain in walk.DEFAULT_DOMAINS:
                item.version = to
        said.insert(0, f"opset raised from {have} to {to}")
        log.info("%s", "; ".join(said))
    _raise_ir(proto)
    return tuple(said)


def import_domain(proto: ModelProto, domain: str, version: int = 1) -> None:
    """Make the model import that operator set."""
    if all(item.domain != domain for item in proto.opset_import):
        proto.opset_import.append(helper.make_opsetid(domain, version))


def _raise_ir(proto: ModelProto) -> None:
    needed = helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True)
    proto.ir_version = max(proto.ir_version, needed)


def _in_function(proto: ModelProto, graph: GraphProto) -> bool:
    """A body inside a local function follows the function's own operator sets."""
    return any(body is graph for function in proto.functions for node in function.node for _, body in walk.bodies(node))


def _raise_graph(graph: GraphProto, have: int, to: int, said: list[str]) -> None:
    made: list[onnx.TensorProto] = []
    for node in graph.node:
        if walk.domain_of(node):
            continue
        before = _schema(node, have)
        after = _schema(node, to)
        if before is not None and after is not None and before.since_version == after.since_version:
            continue
        if before is None or after is None or after.deprecated:
            raise ModelError(
                f"the operator `{node.op_type}` (node `{walk.label(node)}`) is not in opset {to}",
                hint=f"export the model again with opset {to}",
            )
        rewrite = _RULES.get(node.op_type)
        if rewrite is not None and (what := rewrite(node, before.since_version, after.since_version, made)):
            said.append(f"`{walk.label(node)}` ({node.op_type}): {what}")
        _must_fit(node, after, to)
    graph.initializer.extend(made)


def _schema(node: NodeProto, version: int) -> onnx.defs.OpSchema | None:
    try:
        return onnx.defs.get_schema(node.op_type, version, "")
    except onnx.defs.SchemaError:
        return None


def _must_fit(node: NodeProto, schema: onnx.defs.OpSchema, to: int) -> None:
    foreign = [item.name for item in node.attribute if item.name not in schema.attributes]
    if foreign or len(node.input) > schema.max_input or len(node.output) > schema.max_output:
        what = f"the attribute `{foreign[0]}`" if foreign else "that many inputs or outputs"
        raise ModelError(
            f"opset {to} does not take {what} of `{node.op_type}` (node `{walk.label(node)}`)",
            hint=f"export the model again with opset {to}",
        )


# ------------------------------------------------------------------------------------------------ what changed

_Made = list[onnx.TensorProto]


def _attribute(node: NodeProto, name: str) -> AttributeProto | None:
    return next((item for item in node.attribute if item.name == name), None)


def _take(node: NodeProto, name: str) -> AttributeProto | None:
    found = _attribute(node, name)
    if found is None:
        return None
    taken = AttributeProto()
    taken.CopyFrom(found)
    node.attribute.remove(found)
    return taken


def _input(node: NodeProto, at: int, values: np.ndarray, made: _Made, what: str) -> None:
    """`values` as the node's input number `at`; the name is the node's own, so it is nobody else's."""
    name = f"{next(item for item in node.output if item)}_{what}_of_opset"
    made.append(numpy_helper.from_array(values, name))
    while len(node.input) <= at:
        node.input.append("")
    node.input[at] = name


def _crosses(version: int, before: int, after: int) -> bool:
    return before < version <= after


def _reduce(node: NodeProto, before: int, after: int, made: _Made) -> str:
    axes = _take(node, "axes") if _crosses(18, before, after) else None
    if axes is None:
        return ""
    _input(node, 1, np.array(axes.ints, np.int64), made, "axes")
    return "`axes` is an input now"


def _split(node: NodeProto, before: int, after: int, made: _Made) -> str:
    if not _crosses(18, before, after) or (len(node.input) > 1 and node.input[1]):
        return ""
    node.attribute.append(helper.make_attribute("num_outputs", len(node.output)))
    return "`num_outputs` is stated now"


def _dft(node: NodeProto, before: int, after: int, made: _Made) -> str:
    if not _crosses(20, before, after):
        return ""
    axis = _take(node, "axis")
    _input(node, 2, np.array(axis.i if axis is not None else 1, np.int64), made, "axis")
    return "`axis` is an input now"


def _grid_sample(node: NodeProto, before: int, after: int, made: _Made) -> str:
    mode = _attribute(node, "mode")
    renamed = {b"bilinear": b"linear", b"bicubic": b"cubic"}
    if not _crosses(20, before, after) or mode is None or mode.s not in renamed:
        return ""
    mode.s = renamed[mode.s]
    return f"the mode is called `{mode.s.decode()}` now"


def _roi_align(node: NodeProto, before: int, after: int, made: _Made) -> str:
    if not _crosses(16, before, after) or _attribute(node, "coordinate_transformation_mode"):
        return ""
    node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "output_half_pixel"))
    return "its old coordinates are stated now"


def _group_normalization(node: NodeProto, before: int, after: int, made: _Made) -> str:
    if _crosses(21, before, after):
        raise ModelError(
            f"`GroupNormalization` (node `{walk.label(node)}`) takes a scale for each channel from opset 21 on, "
            "and this one has a scale for each group",
            hint="export the model again with opset 21 or later",
        )
    return ""


def _batch_normalization(node: NodeProto, before: int, after: int, made: _Made) -> str:
    if _crosses(14, before, after) and len([name for name in node.output if name]) > 1:
        raise ModelError(
            f"`BatchNormalization` (node `{walk.label(node)}`) has training outputs, which opset 14 changed",
            hint="export the model for inference: `model.eval()`",
        )
    return ""


def _resize(node: NodeProto, before: int, after: int, made: _Made) -> str:
    mode = _attribute(node, "coordinate_transformation_mode")
    if _crosses(18, before, after) and mode is not None and mode.s == b"tf_half_pixel_for_nn":
        raise ModelError(
            f"`Resize` (node `{walk.label(node)}`) has the mode `tf_half_pixel_for_nn`, which is gone from opset 13 on",
            hint="export the model again with `half_pixel`",
        )
    return ""


_RULES: dict[str, Callable[[NodeProto, int, int, _Made], str]] = {
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "Split": _split,
    "DFT": _dft,
    "GridSample": _grid_sample,
    "RoiAlign": _roi_align,
    "GroupNormalization": _group_normalization,
    "BatchNormalization": _batch_normalization,
    "Resize": _resize,
}

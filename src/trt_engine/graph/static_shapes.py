"""Sets every dynamic size of a model and folds what follows from it to constants.

`fold_fixed_sizes` leaves sizes that vary as they are, and folds the arithmetic of those that a build fixes.
Mask and position subgraphs that depend on sizes only become constants, for compilers that cannot handle them. One model
per set of shapes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, numpy_helper

from trt_engine.arrayfiles import Array
from trt_engine.atomic_io import write_atomic
from trt_engine.errors import ShapeError
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import replace_items
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.module_paths import carry_module_paths
from trt_engine.graph.shape_eval import MOVING, fold_node
from trt_engine.graph.shape_inference import TensorInfo, trace
from trt_engine.model import Model
from trt_engine.tensors import Shape, format_shape

log = logging.getLogger(__name__)

_EXTERNAL_FROM = 1 << 30
"""Model size in bytes from which weights go to a side file: one protobuf ends at 2 GiB."""


def set_static_shapes(model: Model, shapes: Mapping[str, Shape], target: Path) -> Model:
    """The model with its inputs at these shapes, written to `target`; folded if ONNX Runtime can run its constant
    parts.

    `shapes` names every input with a dynamic size. Raises `ShapeError` for a shape the input cannot have.
    """
    proto = read_proto(model.path, weights=True)
    for value in proto.graph.input:
        if value.name not in shapes:
            continue
        dims, sizes = value.type.tensor_type.shape.dim, shapes[value.name]
        if len(dims) != len(sizes) or any(
            dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(dims, sizes, strict=True)
        ):
            had = "x".join(str(dim.dim_value) if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims)
            raise ShapeError(
                f"`{value.name}` is {had} and cannot be {format_shape(sizes)}", hint="give one size for each"
            )
        for dim, size in zip(dims, sizes, strict=True):
            dim.dim_value = size
    del proto.graph.value_info[:]  # inferred symbolic shapes would contradict the new ones
    for value in proto.graph.output:
        for dim in value.type.tensor_type.shape.dim:
            dim.ClearField("dim_param")
    plain = target.with_name(f"{target.stem}.fixed.onnx")
    if model.nbytes < _EXTERNAL_FROM:
        write_atomic(plain, proto.SerializeToString())
    else:
        onnx.save_model(proto, str(plain), save_as_external_data=True, location=f"{plain.stem}.weights")
    if _fold_with_onnxruntime(plain, target, model):
        folded = read_proto(target)
        if carry_module_paths(folded, proto):
            write_atomic(target, folded.SerializeToString())
    else:
        plain.replace(target)
        log.info("`%s` keeps its shape arithmetic: ONNX Runtime cannot fold it", model.path.name)
    return open_model(target)


def _fold_with_onnxruntime(plain: Path, target: Path, model: Model) -> bool:
    """Whether ONNX Runtime's basic optimisation (standard operators only) wrote the folded graph to `target`."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # keep Q/DQ pairs for the next builder
    if model.nbytes >= _EXTERNAL_FROM:
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{target.stem}.weights"
        )
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    try:
        ort.InferenceSession(str(plain), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its exceptions for plugins, types without kernels, opsets
        log.debug("not folded: %s", error)
        target.unlink(missing_ok=True)
        return False
    made, known = ({walk.domain_of(node) for node in walk.all_nodes(read_proto(path))} for path in (target, plain))
    if made - known - {""}:
        target.unlink(missing_ok=True)  # it inserted a contrib operator
        return False
    plain.unlink()
    return True


_ROUNDS = 8
"""Traces at most: each finds what follows from parts of shapes that the one before found."""
_MOVED = MOVING | {"Cast"}
"""A size that is not known stays at its place."""
_TYPES = ("int64", "int32", "bool", "float32", "float64")


def fold_fixed_sizes(proto: ModelProto, shapes: Mapping[str, Shape]) -> int:
    """Fix the inputs' sizes (-1 for one that varies) in place and fold what follows from them; returns how many nodes.

    Bodies of If, Loop and Scan stay, and nodes that compute an output of the graph.
    """
    if not any(node.op_type in ("Shape", "Size") for node in proto.graph.node):
        return 0
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        for dim, size in zip(dims, shapes.get(value.name, ()), strict=False):
            if size >= 0:
                dim.dim_value = size
    outputs, count = {value.name for value in proto.graph.output}, 0
    for _ in range(_ROUNDS):
        found = _fixed_values(proto)
        nodes = [node for node in proto.graph.node if _is_open(node, found, outputs)]
        if len(nodes) == len(proto.graph.node):
            break
        count += len(proto.graph.node) - len(nodes)
        made = {name for node in nodes for name in node.output}
        read = {name for node in nodes for name in walk.names_read(node)} - made
        replace_items(proto.graph.node, nodes)
        constants = [numpy_helper.from_array(value, name) for name, value in found.items() if name in read]
        proto.graph.initializer.extend(constants)
    return count


def _is_open(node: NodeProto, found: Mapping[str, Array], outputs: set[str]) -> bool:
    names = [name for name in node.output if name]
    return not names or any(name in outputs or name not in found for name in names)


def _fixed_values(proto: ModelProto) -> dict[str, Array]:
    """Values that follow from sizes, by tensor of the main graph."""
    facts, parts, found = trace(proto, {}).tensors, dict[str, Array](), dict[str, Array]()
    for node in proto.graph.node:
        if (moved := _moved_sizes(node, facts, parts)) is not None:
            parts[node.output[0]] = moved
        for name in node.output:
            fact = facts.get(name, TensorInfo())
            value = None if fact.is_constant else fact.value
            if value is None and moved is not None and np.all(moved >= 0):
                value = moved
            if value is not None and value.dtype.name in _TYPES:
                found[name] = np.ascontiguousarray(value).reshape(value.shape)
    return found


def _moved_sizes(node: NodeProto, facts: Mapping[str, TensorInfo], parts: Mapping[str, Array]) -> Array | None:
    """The sizes that a node moves, -1 for one that is not known."""
    if walk.domain_of(node) != "" or not node.input or len(node.output) != 1:
        return None
    given = [facts.get(name, TensorInfo()) if name else None for name in node.input]
    attributes = walk.attributes(node)
    if node.op_type == "Shape":
        shape = given[0].shape if given[0] is not None else None
        return None if shape is None else np.array(shape[attributes.get("start", 0) : attributes.get("end")], np.int64)
    movable: Sequence[str] = node.input if node.op_type == "Concat" else node.input[:1]
    if node.op_type not in _MOVED or not any(name in parts for name in movable):
        return None
    known = [
        TensorInfo(shape=parts[name].shape, value=parts[name]) if name in parts and name in movable else fact
        for name, fact in zip(node.input, given, strict=True)
    ]
    made = fold_node(node.op_type, attributes, known, 1)
    return None if made is None or made[0].dtype.name not in ("int64", "int32") else made[0]

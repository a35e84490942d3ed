"""Emulate an FP16 or BF16 graph in FP32 with explicit rounding, where no kernels exist."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_engine.device.host import available_memory
from trt_engine.graph import typed_graph, walk
from trt_engine.graph.edit_graph import free_name, inline_functions, read_tensor, replace_items
from trt_engine.graph.shape_inference import type_string
from trt_engine.graph.typed_graph import BFLOAT16, FLOAT16, Op, Scope, Tensor
from trt_engine.model import Model

_ELEM_TYPES = {FLOAT16: TensorProto.FLOAT16, BFLOAT16: TensorProto.BFLOAT16}
_EXACT_OPS = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Expand Tile Slice Gather GatherElements GatherND Concat Split Identity "
    "Constant ConstantOfShape Relu Neg Abs Max Min MaxPool Where Pad If Loop Scan".split()
)
"""Operators that return input values unchanged, which need no rounding."""
_MAX_BYTES = 900 << 20
"""Bytes of a model whose numbers are emulated: it is twice as large in FP32, and one protobuf ends at 2 GiB."""
_MEMORY_FACTOR = 13
"""Times its bytes that emulating a model takes of memory, at the peak: graphs in FP32 and the sessions of both."""


def exceeds_emulation(model: Model) -> bool:
    """Whether a model is not emulated: beyond one protobuf, or what this machine has free."""
    return model.nbytes > min(_MAX_BYTES, available_memory() // _MEMORY_FACTOR)


def emulate_half_precision(proto: ModelProto, folder: Path) -> ModelProto:
    """Convert every FP16 or BF16 tensor to FP32, rounding each result to its original type.

    Inputs and outputs keep their types. An operator accumulates in FP32. Raises `ModelError` if local functions cannot be
    inlined.
    """
    work = deepcopy(inline_functions(proto))
    main = typed_graph.build_typed_graph(work)
    taken = {name for scope in main.all_scopes() for name in scope.tensors}
    widened = _widen_inputs(main, taken)
    for scope in reversed(list(main.all_scopes())):  # bodies before the nodes that contain them
        _widen_scope(scope, taken, folder, widened if scope is main else [])
    return work


def _widen_inputs(main: Scope, taken: set[str]) -> list[NodeProto]:
    """Cast the model's inputs to FP32 and redirect their consumers."""
    made, renamed = [], {}
    for tensor in main.inputs:
        if tensor.type_str in _ELEM_TYPES:
            renamed[tensor] = free_name(f"{tensor.name}_fp32", taken)
            made.append(helper.make_node("Cast", [tensor.name], [renamed[tensor]], to=TensorProto.FLOAT))
    for tensor, name in renamed.items():
        for op, position in tensor.consumers:
            op.node.input[position] = name
    return made


def _widen_scope(scope: Scope, taken: set[str], folder: Path, new_nodes: list[NodeProto]) -> None:
    graph = scope.graph
    outside = scope.owner is None
    for value in graph.input if not outside else ():
        if scope.tensors[value.name].type_str in _ELEM_TYPES:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for item in graph.initializer:
        if type_string(item.data_type) in _ELEM_TYPES:
            item.CopyFrom(numpy_helper.from_array(read_tensor(item, folder).astype(np.float32), item.name))
    for op in scope.ops:
        new_nodes.extend(_round_outputs(op, taken))
    ends = []
    for value, tensor in zip(graph.output, scope.outputs, strict=True):
        if tensor is None or tensor.type_str not in _ELEM_TYPES:
            continue
        if not outside:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            continue
        ends.append((value.name, tensor))
    for name, tensor in ends:
        new_nodes.extend(_restore_output_type(name, tensor, new_nodes, taken))
    replace_items(graph.node, new_nodes)
    graph.ClearField("value_info")


def _round_outputs(op: Op, taken: set[str]) -> Iterator[NodeProto]:
    node, kinds = op.node, [tensor.type_str if tensor is not None else "" for tensor in op.outputs]
    if not any(kind in _ELEM_TYPES for kind in kinds):
        yield node
        return
    cast = node.op_type in ("Cast", "CastLike")
    for item in node.attribute:
        if item.name in ("dtype", "output_datatype", "output_dtype") and type_string(item.i) in _ELEM_TYPES:
            item.i = TensorProto.FLOAT
        elif item.name == "value" and type_string(item.t.data_type) in _ELEM_TYPES:
            item.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item.t).astype(np.float32), item.t.name))
    if cast:
        node.op_type = "Cast"
        del node.input[1:]
        replace_items(node.attribute, [helper.make_attribute("to", TensorProto.FLOAT)])
    yield node
    if node.op_type in _EXACT_OPS and not walk.domain_of(node):
        return
    for position, kind in enumerate(kinds):
        if kind not in _ELEM_TYPES:
            continue
        name = node.output[position]
        raw, low = free_name(f"{name}_raw", taken), free_name(f"{name}_rounded", taken)
        node.output[position] = raw
        yield helper.make_node("Cast", [raw], [low], to=_ELEM_TYPES[kind])
        yield helper.make_node("Cast", [low], [name], to=TensorProto.FLOAT)


def _restore_output_type(name: str, tensor: Tensor, new_nodes: list[NodeProto], taken: set[str]) -> Iterator[NodeProto]:
    """Cast a graph output back to its original type, renaming the FP32 tensor."""
    if tensor.producer is None and tensor.value is None:
        return  # an input passed through
    wide = free_name(f"{name}_fp32", taken)
    for node in new_nodes:
        for position, output in enumerate(node.output):
            if output == name:
                node.output[position] = wide
        _rename_reads(node, name, wide)
    if tensor.value is not None:
        for item in tensor.scope.graph.initializer:
            if item.name == name:
                item.name = wide
    yield helper.make_node("Cast", [wide], [name], to=_ELEM_TYPES[tensor.type_str])


def _rename_reads(node: NodeProto, name: str, to: str) -> None:
    for position, read in enumerate(node.input):
        if read == name:
            node.input[position] = to
    for _, body in walk.bodies(node):
        for inner in body.node:
            _rename_reads(inner, name, to)

"""A graph in FP16 or BF16 as an FP32 graph that rounds where the other would: its numbers can be had where no kernel is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from trt_engine.graph import walk
from trt_engine.precision import elements, stored
from trt_engine.precision.elements import BRAIN, HALF, Op, Scope, Tensor

__all__ = ["with_rounding"]

_ELEM = {HALF: TensorProto.FLOAT16, BRAIN: TensorProto.BFLOAT16}
_EXACT = frozenset(
    "Reshape Transpose Squeeze Unsqueeze Flatten Expand Tile Slice Gather GatherElements GatherND Concat Split Identity "
    "Constant ConstantOfShape Relu Neg Abs Max Min MaxPool Where Pad If Loop Scan".split()
)
"""Operators that give numbers they were given: nothing to round behind them."""


def with_rounding(proto: ModelProto, folder: Path) -> ModelProto:
    """The model with every FP16 or BF16 tensor held in FP32, each result rounded to the type it had.

    Inputs and outputs keep their types. One operator's inner sums are FP32, as they are in kernels that accumulate in it.
    """
    work = ModelProto()
    work.CopyFrom(elements.inlined(proto))
    main = elements.read(work)
    taken = {name for scope in main.all_scopes() for name in scope.tensors}
    widened = _widen_inputs(main, taken)
    for scope in reversed(list(main.all_scopes())):  # bodies before the nodes they stand in are written anew
        _widen(scope, taken, folder, widened if scope is main else [])
    return work


def _widen_inputs(main: Scope, taken: set[str]) -> list[NodeProto]:
    """Casts behind the model's own inputs, with every reader turned to them."""
    made, renamed = [], {}
    for tensor in main.inputs:
        if tensor.kind in _ELEM:
            renamed[tensor] = _fresh(f"{tensor.name}_fp32", taken)
            made.append(helper.make_node("Cast", [tensor.name], [renamed[tensor]], to=TensorProto.FLOAT))
    for tensor, name in renamed.items():
        for op, position in tensor.users:
            op.node.input[position] = name
    return made


def _widen(scope: Scope, taken: set[str], folder: Path, made: list[NodeProto]) -> None:
    graph = scope.graph
    outside = scope.owner is None
    for value in graph.input if not outside else ():
        if scope.tensors[value.name].kind in _ELEM:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    for item in graph.initializer:
        if elements.kind_of(item.data_type) in _ELEM:
            item.CopyFrom(numpy_helper.from_array(stored.array(item, folder).astype(np.float32), item.name))
    for op in scope.ops:
        made.extend(_rounded(op, taken))
    ends = []
    for value, tensor in zip(graph.output, scope.outputs, strict=True):
        if tensor is None or tensor.kind not in _ELEM:
            continue
        if not outside:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
            continue
        ends.append((value.name, tensor))
    for name, tensor in ends:
        made.extend(_handed_out(name, tensor, made, taken))
    copies = []
    for node in made:
        copy = NodeProto()
        copy.CopyFrom(node)
        copies.append(copy)
    graph.ClearField("node")
    graph.node.extend(copies)
    graph.ClearField("value_info")


def _rounded(op: Op, taken: set[str]) -> Iterator[NodeProto]:
    node, kinds = op.node, [tensor.kind if tensor is not None else "" for tensor in op.outputs]
    if not any(kind in _ELEM for kind in kinds):
        yield node
        return
    cast = node.op_type in ("Cast", "CastLike")
    for item in node.attribute:
        if item.name in ("dtype", "output_datatype", "output_dtype") and elements.kind_of(item.i) in _ELEM:
            item.i = TensorProto.FLOAT
        elif item.name == "value" and elements.kind_of(item.t.data_type) in _ELEM:
            item.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(item.t).astype(np.float32), item.t.name))
    if cast:
        node.op_type = "Cast"
        del node.input[1:]
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("to", TensorProto.FLOAT))
    yield node
    if node.op_type in _EXACT and not walk.domain_of(node):
        return
    for position, kind in enumerate(kinds):
        if kind not in _ELEM:
            continue
        name = node.output[position]
        raw, low = _fresh(f"{name}_raw", taken), _fresh(f"{name}_rounded", taken)
        node.output[position] = raw
        yield helper.make_node("Cast", [raw], [low], to=_ELEM[kind])
        yield helper.make_node("Cast", [low], [name], to=TensorProto.FLOAT)


def _handed_out(name: str, tensor: Tensor, made: list[NodeProto], taken: set[str]) -> Iterator[NodeProto]:
    """A graph output in the type it had: whoever makes it gives it another name."""
    if tensor.maker is None and tensor.stored is None:
        return  # an input handed through
    wide = _fresh(f"{name}_fp32", taken)
    for node in made:
        for position, output in enumerate(node.output):
            if output == name:
                node.output[position] = wide
        _rename_reads(node, name, wide)
    if tensor.stored is not None:
        for item in tensor.scope.graph.initializer:
            if item.name == name:
                item.name = wide
    yield helper.make_node("Cast", [wide], [name], to=_ELEM[tensor.kind])


def _rename_reads(node: NodeProto, name: str, to: str) -> None:
    for position, read in enumerate(node.input):
        if read == name:
            node.input[position] = to
    for _, body in walk.bodies(node):
        for inner in body.node:
            _rename_reads(inner, name, to)


def _fresh(name: str, taken: set[str]) -> str:
    found, number = name, 2
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    taken.add(found)
    return found

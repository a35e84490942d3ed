"""Small ONNX models for the tests, opset 20 and IR 10 unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

OPSET, IR = 20, 10
Size = int | str | None


def value(name: str, shape: Sequence[Size] | None, elem: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def weight(name: str, *shape: int, kind: str = "float32", seed: int = 0) -> TensorProto:
    numbers = np.random.default_rng(seed).standard_normal(shape)
    return numpy_helper.from_array(numbers.astype(kind), name)


def ints(name: str, *numbers: int) -> TensorProto:
    return numpy_helper.from_array(np.array(numbers, np.int64), name)


def node(op: str, inputs: Sequence[str], outputs: Sequence[str], **given: Any) -> NodeProto:
    return helper.make_node(op, list(inputs), list(outputs), name=given.pop("name", f"{op}_{outputs[0]}"), **given)


def graph(
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    stored: Sequence[TensorProto] = (),
) -> GraphProto:
    return helper.make_graph(list(nodes), "g", list(inputs), list(outputs), list(stored))


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    stored: Sequence[TensorProto] = (),
    *,
    opset: int = OPSET,
    ir: int = IR,
    domains: dict[str, int] | None = None,
    functions: Sequence[onnx.FunctionProto] = (),
) -> ModelProto:
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(*item) for item in (domains or {}).items())]
    return helper.make_model(
        graph(nodes, inputs, outputs, stored),
        opset_imports=imports,
        ir_version=ir,
        producer_name="tests",
        functions=list(functions),
    )


def detector(batch: Size = "batch", height: Size = 32, width: Size = 32) -> ModelProto:
    """Images in, a row of scores out: Conv, Relu, pooling, Gemm."""
    return model(
        [
            node("Conv", ["images", "w", "b"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
            node("Relu", ["c"], ["r"]),
            node("GlobalAveragePool", ["r"], ["p"]),
            node("Flatten", ["p"], ["f"]),
            node("Gemm", ["f", "w2", "b2"], ["scores"], transB=1),
        ],
        [value("images", [batch, 3, height, width])],
        [value("scores", [batch, 10])],
        [weight("w", 8, 3, 3, 3), weight("b", 8), weight("w2", 10, 8), weight("b2", 10)],
    )


def save(proto: ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    path = folder / name
    path.write_bytes(proto.SerializeToString())
    return path


def external(proto: ModelProto, tensor: str, **entries: str) -> ModelProto:
    """The model with one initializer moved out of the file, its place as spelled in `entries`."""
    stored = next(item for item in proto.graph.initializer if item.name == tensor)
    stored.ClearField("raw_data")
    stored.data_location = TensorProto.EXTERNAL
    for key, text in entries.items():
        stored.external_data.add(key=key, value=text)
    return proto


def unpicked(op: str, domain: str = "", *, opset: int = OPSET) -> ModelProto:
    """One node of any operator between a dynamic input and output."""
    return model(
        [helper.make_node(op, ["images"], ["out"], name="the_node", domain=domain)],
        [value("images", ["batch", 3, 8, 8])],
        [value("out", ["batch", 3, 8, 8])],
        opset=opset,
        domains={domain: 1} if domain else None,
    )

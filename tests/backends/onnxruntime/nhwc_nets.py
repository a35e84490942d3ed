"""Graphs in NHWC layout, and their outputs on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from trt_engine.backends.onnxruntime.conv_bias import NHWC_DOMAIN


class Net:
    """A graph in NHWC, written operator by operator."""

    def __init__(self, size: int | str = 12, channels: int = 4, *, half: bool = False, scale: float = 0.5) -> None:
        self.random, self.scale = np.random.default_rng(0), scale
        self.dtype = np.float16 if half else np.float32
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self.image: list[int | str] = ["N", size, size, channels]
        self.count = 0

    def op(self, op: str, *inputs: str, domain: str = "", **given: Any) -> str:
        self.count += 1
        out = f"{op.lower()}{self.count}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=out, domain=domain, **given))
        return out

    def constant(self, array: np.ndarray) -> str:
        self.count += 1
        self.stored.append(numpy_helper.from_array(array.astype(self.dtype), f"w{self.count}"))
        return f"w{self.count}"

    def conv(
        self, x: str, before: int, after: int, kernel: int = 1, *, bias: bool = True, group: int = 1, **given: Any
    ) -> str:
        weight = self.random.standard_normal((after, before // group, kernel, kernel)) / np.sqrt(before * kernel**2)
        names = [self.constant(weight)]
        if bias:
            names.append(self.constant(self.random.standard_normal(after) * self.scale))
        pad = {"pads": [kernel // 2] * 4} | given
        return self.op("Conv", x, *names, domain=NHWC_DOMAIN, kernel_shape=[kernel, kernel], group=group, **pad)

    def model(self, *outputs: str) -> onnx.ModelProto:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            self.nodes, "net", [helper.make_tensor_value_info("x", kind, self.image)],
            [helper.make_tensor_value_info(name, kind, None) for name in outputs], self.stored,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 20), helper.make_opsetid(NHWC_DOMAIN, 20)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def run(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """Outputs on the CPU, which has no operator in NHWC: each one between two transpositions."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    nodes = []
    for node in plain.graph.node:
        if node.domain != NHWC_DOMAIN:
            nodes.append(node)
            continue
        name, out = node.input[0], node.output[0]
        node.domain, node.input[0], node.output[0] = "", f"{out}_in", f"{out}_out"
        nodes += [
            helper.make_node("Transpose", [name], [f"{out}_in"], perm=[0, 3, 1, 2]),
            node,
            helper.make_node("Transpose", [f"{out}_out"], [out], perm=[0, 2, 3, 1]),
        ]
    del plain.graph.node[:]
    plain.graph.node.extend(nodes)
    session = ort.InferenceSession(plain.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, {"x": x})
    return found


def count(model: onnx.ModelProto, op: str) -> int:
    return sum(node.op_type == op for node in model.graph.node)

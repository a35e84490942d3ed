"""Small graphs with attention in the forms that exporters write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from trt_engine.graph.fusion import FusedModel, fuse_model

BATCH, TOKENS, HEADS, SIZE = 2, 5, 3, 4
WIDTH = HEADS * SIZE


class Builder:
    """Nodes, weights, inputs and outputs as they are added."""

    def __init__(self, half: bool = False, opset: int = 20) -> None:
        self.kind = np.float16 if half else np.float32
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.inputs: dict[str, tuple[type, list[Any]]] = {}
        self._random = np.random.default_rng(0)
        self._count = 0

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.several(op, 1, *inputs, **attributes)[0]

    def several(self, op: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        self._count += 1
        outs = [f"{op.lower()}_{self._count}_{at}" for at in range(count)]
        self.nodes.append(helper.make_node(op, list(inputs), outs, name=f"{op}_{self._count}", **attributes))
        return outs

    def constant(self, value: Any) -> str:
        self._count += 1
        self.weights.append(numpy_helper.from_array(np.asarray(value), f"c_{self._count}"))
        return f"c_{self._count}"

    def number(self, value: float) -> str:
        return self.constant(np.array(value, self.kind))

    def ints(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def weight(self, *shape: int) -> str:
        return self.constant((self._random.standard_normal(shape) * 0.4).astype(self.kind))

    def given(self, name: str, shape: list[Any], kind: type | None = None) -> str:
        self.inputs[name] = (kind or self.kind, shape)
        return name

    def linear(self, x: str, before: int, after: int, *, bias: bool = True, first: bool = False) -> str:
        product = self.add("MatMul", x, self.weight(before, after))
        if not bias:
            return product
        offset = self.weight(after)
        return self.add("Add", *((offset, product) if first else (product, offset)))

    def heads(self, x: str, perm: tuple[int, ...] = (0, 2, 1, 3), heads: int = HEADS, size: int = SIZE) -> str:
        return self.add("Transpose", self.add("Reshape", x, self.ints(0, 0, heads, size)), perm=perm)

    def merged(self, x: str, width: int = WIDTH) -> str:
        return self.add("Reshape", self.add("Transpose", x, perm=(0, 2, 1, 3)), self.ints(0, 0, width))

    def core(self, q: str, k: str, v: str, edit: Callable[[Builder, str], str] | None = None, axis: int = -1) -> str:
        """Softmax of q times k, times v; k is transposed already, `edit` changes the scores."""
        scores = self.add("MatMul", q, k)
        scores = edit(self, scores) if edit else self.add("Mul", scores, self.number(SIZE**-0.5))
        return self.add("MatMul", self.add("Softmax", scores, axis=axis), v)

    def model(self, *outputs: str) -> onnx.ModelProto:
        kinds = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16, np.bool_: TensorProto.BOOL,
                 np.int64: TensorProto.INT64}  # fmt: skip
        graph = helper.make_graph(
            self.nodes,
            "g",
            [helper.make_tensor_value_info(name, kinds[kind], shape) for name, (kind, shape) in self.inputs.items()],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            self.weights,
        )
        return onnx.shape_inference.infer_shapes(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=9)
        )


def tokens(b: Builder, name: str = "x", length: Any = "tokens", width: int = WIDTH) -> str:
    return b.given(name, ["batch", length, width])


def self_attention(b: Builder, x: str, edit: Callable[[Builder, str], str] | None = None, **linear: Any) -> str:
    q, k, v = (b.linear(x, WIDTH, WIDTH, **linear) for _ in range(3))
    return b.merged(b.core(b.heads(q), b.heads(k, (0, 2, 3, 1)), b.heads(v), edit))


def fuse(model: onnx.ModelProto, *, on_gpu: bool = True) -> FusedModel:
    before = model.SerializeToString()
    fused = fuse_model(model, Path(), on_gpu=on_gpu)
    assert model.SerializeToString() == before, "the model itself was changed"
    onnx.checker.check_model(_as_known(fused.proto))
    return fused


def _as_known(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose norms that ONNX Runtime adds to the standard's domain are in its own, which the checker passes over."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    for node in made.graph.node:
        if node.op_type in ("LayerNormalization", "SimplifiedLayerNormalization"):
            node.domain = "com.microsoft"
    if all(item.domain != "com.microsoft" for item in made.opset_import):
        made.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return made


def operators(fused: FusedModel) -> list[str]:
    return [node.op_type for node in fused.proto.graph.node]


def check_same(
    model: onnx.ModelProto, fused: FusedModel, *, seed: int = 1, feeds: dict[str, np.ndarray] | None = None,
    **sizes: int,
) -> None:  # fmt: skip
    """Both give the same numbers on ONNX Runtime's CPU provider, the unfused one without any optimisation."""
    random, sizes = np.random.default_rng(seed), {"batch": BATCH, "tokens": TOKENS, "keys": 7} | sizes
    given = {}
    for item in model.graph.input:
        shape = [dim.dim_value or sizes[dim.dim_param] for dim in item.type.tensor_type.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(item.type.tensor_type.elem_type)
        values = random.integers(0, 2, shape) if kind == np.bool_ else random.standard_normal(shape)
        given[item.name] = values.astype(kind)
    given |= feeds or {}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    expected, found = (
        ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"]).run(None, given)
        for proto in (model, fused.proto)
    )
    for one, other in zip(expected, found, strict=True):
        half = one.dtype == np.float16
        np.testing.assert_allclose(other, one, rtol=2e-2 if half else 1e-4, atol=2e-2 if half else 1e-5)

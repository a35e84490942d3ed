"""Which layers ONNX Runtime runs in integer kernels on a CPU: read from the graph that it optimised itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime as ort
from onnx import ModelProto

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.graph import walk
from trt_engine.precision.placement import LINEAR, Left
from trt_engine.records import IntegerKernels, LeftNode

__all__ = ["INTEGER_KERNELS", "integer_kernels", "named_layers", "optimized_graph"]

INTEGER_KERNELS = frozenset(
    "QLinearConv QLinearMatMul QGemm MatMulIntegerToFloat DynamicQuantizeMatMul MatMulInteger ConvInteger QLinearAdd "
    "QLinearMul QLinearSigmoid QLinearLeakyRelu QLinearConcat QLinearAveragePool QLinearGlobalAveragePool QLinearSoftmax "
    "QLinearWhere".split()
)
_UNFUSED = "ONNX Runtime computes it in FP32: its pattern of Q/DQ has no integer kernel in this version"


def optimized_graph(path: Path, folder: Path) -> ModelProto:
    """The graph that ONNX Runtime runs on a CPU, without weights; nodes keep their names."""
    target = folder / "optimized.onnx"
    # the level below `all`: layouts are chosen there, and nodes renamed
    options = session.session_options(
        OnnxRuntimeOptions(arena=False), level="extended", save=target, weights="optimized.weights"
    )
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except session.ERRORS as error:
        raise session.on_load(error, path) from error
    return onnx.load(str(target), load_external_data=False)


def integer_kernels(before: Mapping[str, str], optimized: ModelProto, left: Sequence[Left]) -> IntegerKernels:
    """What became of the layers: `before` has the operator of each by the node's label, `left` why some were left."""
    now = {found.node.name: found.node.op_type for found in walk.nodes(optimized)}
    reasons = {item.node: item.reason for item in left}
    layers: dict[str, tuple[int, int]] = {}
    slow: list[LeftNode] = []
    for label, op in before.items():
        fused = now.get(label) in INTEGER_KERNELS
        done, count = layers.get(op, (0, 0))
        layers[op] = done + fused, count + 1
        if not fused:
            slow.append(LeftNode(label, op, reasons.get(label, _UNFUSED)))
    kernels = Counter(op for op in now.values() if op in INTEGER_KERNELS)
    return IntegerKernels(layers, tuple(slow), dict(kernels.most_common()))


def named_layers(proto: ModelProto) -> dict[str, str]:
    """The operator of each linear layer, by its label; nodes without a name get theirs, by which they are found again."""
    found = {}
    for place in walk.nodes(proto):
        node = place.node
        if node.op_type in LINEAR and not walk.domain_of(node):
            node.name = walk.label(node)
            found[node.name] = node.op_type
    return found

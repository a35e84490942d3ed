"""Convolutions in a graph for a GPU: Conv, Add of a residual and Relu as one node, which cuDNN computes in one kernel."""

from __future__ import annotations

from collections import Counter

from onnx import GraphProto, NodeProto, TensorProto, helper

from trt_engine.graph import walk

CONV_RELU = "_ConvRelu"
"""Our own operator: Conv's inputs x, weight and bias (or ""), and a residual (or "") that is added before Relu."""
_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def fuse_convolution(graph: GraphProto) -> int:
    """Replace Conv and Relu, with an Add between, of half-precision 2-D convolutions, in place; returns how many."""
    outputs = {item.name for item in graph.output}
    constants = {item.name: item for item in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    makers = {name: node for node in graph.node for name in node.output}

    def convolution(name: str) -> NodeProto | None:
        node = makers.get(name)
        if node is None or node.op_type != "Conv" or walk.domain_of(node) or readers[name] != 1 or name in outputs:
            return None
        return node if _is_fusible(node, constants) else None

    fused = 0
    for relu in list(graph.node):
        if relu.op_type != "Relu" or walk.domain_of(relu):
            continue
        conv, residual, added = convolution(relu.input[0]), "", makers.get(relu.input[0])
        if conv is None and added is not None and added.op_type == "Add" and not walk.domain_of(added):
            if readers[added.output[0]] != 1 or added.output[0] in outputs:
                continue
            at = next((at for at in (0, 1) if convolution(added.input[at]) is not None), None)
            if at is None or added.input[0] == added.input[1] or added.input[1 - at] in constants:
                continue
            conv, residual = convolution(added.input[at]), added.input[1 - at]
            graph.node.remove(added)
        if conv is None:
            continue
        inputs = [*conv.input[:2], conv.input[2] if len(conv.input) > 2 else "", residual]
        made = helper.make_node(CONV_RELU, inputs, list(relu.output), name=conv.name)
        made.attribute.extend(conv.attribute)
        graph.node.remove(conv)
        relu.CopyFrom(made)
        makers[relu.output[0]] = relu
        fused += 1
    return fused


def _is_fusible(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    """Stored FP16 or BF16 weights of two spatial axes, no groups, the same pads at both ends."""
    weight, given = constants.get(node.input[1]), walk.attributes(node)
    if weight is None or weight.data_type not in _HALF or len(weight.dims) != 4:
        return False
    pads = list(given.get("pads", [0] * 4))
    return given.get("group", 1) == 1 and given.get("auto_pad", b"NOTSET") == b"NOTSET" and pads[:2] == pads[2:]

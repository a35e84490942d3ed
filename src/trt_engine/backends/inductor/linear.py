"""Linear layers in a graph: MatMul with a stored weight and Add of a bias as one node, and those of one input as one."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from trt_engine.graph import walk
from trt_engine.graph.edit_graph import retain_items

LINEAR = "_Linear"
"""Our own operator: x, a weight of inputs x outputs, and a bias; GPU libraries add the bias as they write the product."""


def fuse_linear(graph: GraphProto) -> None:
    """Replace MatMul and Add by `_Linear`, then `_Linear` nodes of one input by one and a Split, in place."""
    outputs = {item.name for item in graph.output}
    constants = {item.name: item for item in graph.initializer}
    readers = Counter(name for node in graph.node for name in node.input)
    products = {node.output[0]: node for node in graph.node if _is_product(node, constants)}
    for added in list(graph.node):
        if added.op_type != "Add" or walk.domain_of(added):
            continue
        at = next((at for at in (0, 1) if added.input[at] in products), None)
        if at is None or readers[name := added.input[at]] != 1 or name in outputs:
            continue
        product, bias = products[name], constants.get(added.input[1 - at])
        if bias is not None and list(bias.dims) == list(constants[product.input[1]].dims)[1:]:
            added.CopyFrom(helper.make_node(LINEAR, [*product.input, bias.name], added.output, name=product.name))
            graph.node.remove(product)
    _merge(graph, constants)
    read = {name for node in graph.node for name in node.input} | outputs
    retain_items(graph.initializer, lambda item: item.name in read)


def _is_product(node: NodeProto, constants: dict[str, TensorProto]) -> bool:
    weight = constants.get(node.input[1]) if node.op_type == "MatMul" and not walk.domain_of(node) else None
    return weight is not None and len(weight.dims) == 2


def _merge(graph: GraphProto, constants: dict[str, TensorProto]) -> None:
    """One product for the layers that read the same tensor, as Q, K and V do."""
    alike: dict[str, list[NodeProto]] = defaultdict(list)
    for node in graph.node:
        if node.op_type == LINEAR:
            alike[node.input[0]].append(node)
    for number, nodes in enumerate(alike.values()):
        kinds = {constants[node.input[1]].data_type for node in nodes}
        if len(nodes) < 2 or len(kinds) != 1:
            continue
        names = [f"_merged_{number}_{part}" for part in ("weight", "bias", "sizes", "out")]
        stored = [
            np.concatenate([numpy_helper.to_array(constants[node.input[at]]) for node in nodes], axis=axis)
            for at, axis in ((1, 1), (2, 0))
        ]
        sizes = np.array([constants[node.input[2]].dims[0] for node in nodes], np.int64)
        graph.initializer.extend(
            numpy_helper.from_array(array, name) for array, name in zip([*stored, sizes], names, strict=False)
        )
        first = next(at for at, node in enumerate(graph.node) if node == nodes[0])
        made = helper.make_node(LINEAR, [nodes[0].input[0], *names[:2]], [names[3]], name=nodes[0].name)
        split = helper.make_node("Split", [names[3], names[2]], [node.output[0] for node in nodes], axis=-1)
        for node in nodes:
            graph.node.remove(node)
        graph.node.insert(first, split)
        graph.node.insert(first, made)

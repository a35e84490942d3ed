"""Judges the nodes that ONNX Runtime placed on the CPU beside a GPU: arithmetic of sizes, or a fallback."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from onnx import AttributeProto, ModelProto, NodeProto

from trt_engine.graph import walk

_SIZES = frozenset(("Shape", "Size"))
_SHOWN = 4

Placed = tuple[str, str, str]
"""A node's name, its operator and its provider, as ONNX Runtime reports it."""


def fallback_nodes(read: Callable[[], ModelProto], placed: Iterable[Placed]) -> list[tuple[str, str]]:
    """Name and operator of the nodes on the CPU that compute on data; `read` reads the graph, if there are any on the CPU.

    A node that depends on nothing but constants and the sizes of tensors (`Shape`, `Size`, and what follows from them) is
    placed on the CPU on purpose: sizes are in host memory, and the kernels that take them read them there. A node with a
    subgraph counts as one that computes on data, and so does one that is not found in the graph; of nodes with equal names,
    one that computes on data is enough.
    """
    on_cpu = [(name, kind) for name, kind, provider in placed if provider == "CPUExecutionProvider"]
    if not on_cpu:
        return []
    of_sizes = _size_nodes(read())
    return [item for item in on_cpu if not of_sizes.get(item, False)]


def _size_nodes(model: ModelProto) -> dict[tuple[str, str], bool]:
    """By name and operator, whether all such nodes depend on constants and sizes alone."""
    found: dict[tuple[str, str], bool] = {}
    for graph in walk.graphs(model):
        known = {tensor.name for tensor in graph.initializer} | {item.values.name for item in graph.sparse_initializer}
        known -= {value.name for value in graph.input}  # the caller may replace them
        for node in graph.node:  # in topological order
            sizes = not _has_subgraph(node) and (
                node.op_type in _SIZES or (not _is_random(node) and all(name in known for name in node.input if name))
            )
            if sizes:
                known.update(name for name in node.output if name)
            key = (node.name, node.op_type)
            found[key] = found.get(key, True) and sizes
    return found


def _has_subgraph(node: NodeProto) -> bool:
    return any(item.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for item in node.attribute)


def _is_random(node: NodeProto) -> bool:
    return node.op_type.startswith(("Random", "Bernoulli", "Multinomial"))


def describe_fallback(nodes: list[tuple[str, str]]) -> str:
    """``3 nodes (Det 2, NonZero 1): `det_0`, `det_1`, `nz` ``, of many the first four."""
    kinds = ", ".join(f"{kind} {count}" for kind, count in Counter(kind for _, kind in nodes).most_common())
    names = ", ".join(f"`{name}`" for name, _ in nodes[:_SHOWN] if name)
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN and names else ""
    return f"{len(nodes)} node{'s' if len(nodes) > 1 else ''} ({kinds}){': ' if names else ''}{names}{more}"

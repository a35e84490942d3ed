"""Names of nodes that no other node has."""

from __future__ import annotations

from collections import Counter

from onnx import ModelProto

from trt_engine.graph import walk

__all__ = ["free_name", "unique_names"]


def unique_names(proto: ModelProto) -> int:
    """Give every node a name of its own, as ONNX Runtime refuses two of one name; how many got a new one."""
    names = Counter(place.node.name for place in walk.nodes(proto) if place.node.name)
    taken, met = set(names), set()
    renamed = 0
    for place in walk.nodes(proto):
        node = place.node
        if node.name in met:
            node.name = free_name(node.name, taken)
            renamed += 1
        if node.name:
            met.add(node.name)
    return renamed


def free_name(name: str, taken: set[str]) -> str:
    """The name, or the name with a number: one that is not taken."""
    found, number = name, 2
    while found in taken:
        found, number = f"{name}_{number}", number + 1
    taken.add(found)
    return found

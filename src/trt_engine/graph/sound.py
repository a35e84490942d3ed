"""Whether a graph can be gone through at all: nothing made twice, nothing that waits for itself, functions that end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from trt_engine.errors import ModelError
from trt_engine.graph import walk

__all__ = ["check_sound"]

_MOST_NODES = 2_000_000
"""Nodes a model may have once its local functions are written out: beyond it is a bomb, not a network."""


def check_sound(proto: ModelProto, path: object) -> None:
    """`ModelError` for a tensor that two nodes make, for nodes that wait for each other, and for local functions that call
    themselves or that grow without measure when written out."""
    for graph in walk.graphs(proto):
        _check_graph(graph, [item.name for item in graph.input], path)
    for function in proto.functions:
        _check_graph(function, function.input, path)
    _check_functions(proto, path)


def _check_graph(owner: GraphProto | FunctionProto, inputs: Iterable[str], path: object) -> None:
    makers: dict[str, NodeProto] = {}
    given = set(inputs)
    for node in owner.node:
        for name in node.output:
            if name and (name in makers or name in given):
                other = f"node `{walk.label(makers[name])}`" if name in makers else "an input of that name"
                raise ModelError(
                    f"`{path}` is broken: `{name}` is made twice, by node `{walk.label(node)}` ({node.op_type}) and by "
                    f"{other}",
                    hint="the file was edited; export the model again",
                )
            if name:
                makers[name] = node
    if not _in_order(owner, makers) and (loop := _cycle(owner, makers)):
        raise ModelError(
            f"`{path}` is broken: its nodes wait for each other in a circle: {' -> '.join(f'`{name}`' for name in loop)}",
            hint="the file was edited; export the model again",
        )


def _in_order(owner: GraphProto | FunctionProto, makers: dict[str, NodeProto]) -> bool:
    made: set[str] = set()
    for node in owner.node:
        if any(name in makers and name not in made for name in _needs(node)):
            return False
        made.update(node.output)
    return True


def _needs(node: NodeProto) -> Iterator[str]:
    """What the node reads, its bodies included; a name a body makes itself may be among it."""
    yield from node.input
    for _, body in walk.bodies(node):
        own = {name for inner in body.node for name in inner.output} | {item.name for item in body.input}
        own |= {item.name for item in body.initializer}
        for inner in body.node:
            yield from (name for name in _needs(inner) if name not in own)
        yield from (item.name for item in body.output if item.name not in own)


def _cycle(owner: GraphProto | FunctionProto, makers: dict[str, NodeProto]) -> list[str]:
    """Labels of the nodes of one circle, at most eight; empty without one."""
    done: set[int] = set()
    for start in owner.node:
        if id(start) in done:
            continue
        trail: list[NodeProto] = [start]
        waiting = [_made_by(start, makers)]
        on_trail = {id(start)}
        while trail:
            following = next(waiting[-1], None)
            if following is None:
                waiting.pop()
                ended = trail.pop()
                on_trail.discard(id(ended))
                done.add(id(ended))
            elif id(following) in on_trail:
                at = next(at for at, node in enumerate(trail) if node is following)
                names = [walk.label(node) for node in reversed(trail[at:])]
                return [*names[:8], *(["..."] if len(names) > 8 else []), names[0]]
            elif id(following) not in done:
                trail.append(following)
                on_trail.add(id(following))
                waiting.append(_made_by(following, makers))
    return []


def _made_by(node: NodeProto, makers: dict[str, NodeProto]) -> Iterator[NodeProto]:
    return (makers[name] for name in _needs(node) if name in makers)


def _check_functions(proto: ModelProto, path: object) -> None:
    if not proto.functions:
        return
    bodies = {(item.domain, item.name): item for item in proto.functions}
    sizes: dict[tuple[str, str], int] = {}

    def size(key: tuple[str, str], above: tuple[tuple[str, str], ...]) -> int:
        if key in above:
            circle = " -> ".join(f"`{name}`" for _, name in (*above[above.index(key) :], key))
            raise ModelError(
                f"`{path}` is broken: its local functions call each other in a circle: {circle}",
                hint="the file was edited; export the model again",
            )
        if len(above) > 200:
            raise ModelError(
                f"`{path}` nests its local functions more than 200 deep",
                hint="export the model again without functions",
            )
        if key not in sizes:
            sizes[key] = _written_out(bodies[key].node, (*above, key))
        return sizes[key]

    def _written_out(nodes: Iterable[NodeProto], above: tuple[tuple[str, str], ...]) -> int:
        total = 0
        for node in nodes:
            called = (node.domain, node.op_type)
            total += size(called, above) if called in bodies else 1
            for _, body in walk.bodies(node):
                total += _written_out(body.node, above)
        return total

    for key in bodies:
        size(key, ())
    total = _written_out(proto.graph.node, ())
    if total > _MOST_NODES:
        raise ModelError(
            f"`{path}` has {total:,} nodes once its local functions are written out, more than the {_MOST_NODES:,} that are "
            "gone through",
            hint="export the model again without nested functions",
        )

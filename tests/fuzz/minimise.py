"""A smaller input that still shows the same fault: fewer files, fewer values, fewer bytes."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.campaign import Watched, replay
from fuzz.inputs import Input

__all__ = ["minimise"]


def minimise(worker: Watched, item: Input, key: str, *, seconds: float = 20.0) -> Input:
    """The smallest input found in that time of which a fault has this key; the input itself where it has none, run alone."""
    until = time.monotonic() + seconds

    def shows(other: Input) -> bool:
        return any(fault.key == key for fault in replay(worker, other))

    if not shows(item):
        return item
    best = item
    changed = True
    while changed and time.monotonic() < until:
        changed = False
        for other in _smaller(best):
            if time.monotonic() > until:
                break
            if shows(other):
                best, changed = other, True
                break
    return best


def _smaller(item: Input) -> Iterator[Input]:
    for name in item.files:
        yield Input(item.target, {key: raw for key, raw in item.files.items() if key != name}, item.calls, item.env)
    for name in item.env:
        yield Input(item.target, item.files, item.calls, {key: value for key, value in item.env.items() if key != name})
    for name in sorted(item.files, key=lambda name: -len(item.files[name])):
        for raw in _smaller_file(name, item.files[name]):
            yield Input(item.target, {**item.files, name: raw}, item.calls, item.env)


def _smaller_file(name: str, raw: bytes) -> Iterator[bytes]:
    if name.endswith(".onnx"):
        yield from _smaller_model(raw)
        return
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        yield from _shorter(raw)
        return
    for tree in _smaller_trees(document):
        yield json.dumps(tree).encode("utf-8", "surrogatepass")


def _shorter(raw: bytes) -> Iterator[bytes]:
    size = len(raw) // 2
    while size:
        for at in range(0, len(raw), size):
            yield raw[:at] + raw[at + size :]
        size //= 2 if size > 64 else size  # whole lines and blocks are enough


def _smaller_trees(document: Any) -> Iterator[Any]:
    """The document without one of its branches, the largest first."""
    places: list[tuple[int, tuple[Any, ...]]] = []

    def walk(value: Any, path: tuple[Any, ...]) -> int:
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        size = 1 + sum(walk(part, (*path, key)) for key, part in inside)
        places.append((size, path))
        return size

    walk(document, ())
    for _, path in sorted(places, key=lambda place: -place[0])[1:400]:
        made = copy.deepcopy(document)
        holder = made
        for key in path[:-1]:
            holder = holder[key]
        del holder[path[-1]]
        yield made


def _smaller_model(raw: bytes) -> Iterator[bytes]:
    """The model without one node, tensor, attribute or value."""
    import onnx

    try:
        model = onnx.ModelProto.FromString(raw)
    except Exception:  # no protobuf any more: as bytes
        yield from _shorter(raw)
        return
    lists: list[Callable[[Any], Any]] = [
        lambda model: model.graph.node, lambda model: model.graph.initializer, lambda model: model.graph.value_info,
        lambda model: model.graph.input, lambda model: model.graph.output, lambda model: model.functions,
        lambda model: model.metadata_props,
    ]  # fmt: skip
    for take in lists:
        for at in range(len(take(model))):
            made = onnx.ModelProto()
            made.CopyFrom(model)
            del take(made)[at]
            yield made.SerializeToString()

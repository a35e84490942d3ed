"""A model run with its intermediate tensors in sight, in bounded memory: a few tensors at a time, never all of them.

Plain ONNX Runtime on the CPU, no graph optimisation, so that every tensor of the file is there. The tensors are taken in
groups that fit the memory given; each group has a session of its own, cut down to the nodes it needs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.run import run_arrays
from trt_engine.errors import FeedError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.trace import trace
from trt_engine.precision.samples import Batch
from trt_engine.tensors import Shape, closest

__all__ = ["Probe", "inputs_are_finite", "visible_tensors"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_READABLE: dict[int, int] = {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.DOUBLE: 8}
_WINDOW = 32
"""Batches kept at once when the sessions of all groups do not fit in memory together."""


def visible_tensors(proto: ModelProto, shapes: dict[str, Shape]) -> dict[str, int]:
    """The floating-point tensors of the main graph that hold data, in its order, with their bytes at these input shapes
    (0 where the shape is not known): inputs and outputs of nodes, no constants."""
    facts = trace(proto, shapes).facts
    stored = {item.name for item in proto.graph.initializer}
    names = [item.name for item in proto.graph.input if item.name not in stored]
    names += [name for node in proto.graph.node for name in node.output if name]
    found = {}
    for name in names:
        fact = facts.get(name)
        if fact is not None and fact.elem in _READABLE and not fact.stored:
            found[name] = fact.elements * _READABLE[fact.elem] if fact.sized else 0
    return found


def inputs_are_finite(batch: Batch) -> None:
    """`FeedError` naming the input and where it came from when a feed holds NaN or an infinity."""
    for name, array in batch.feeds.items():
        if array.dtype.kind == "f" and array.size and not np.isfinite(array).all():
            what = "NaN" if np.isnan(array).any() else "infinite values"
            count = int((~np.isfinite(array)).sum())
            raise FeedError(
                f"input `{name}` has {what} in {batch.source} ({count} of {array.size} values)",
                hint="repair the data or leave that sample out",
            )


@dataclass(slots=True)
class _Group:
    """Some tensors, and the part of the model that makes them."""

    names: list[str]
    model: bytes
    loaded: ort.InferenceSession | None = None


class Probe:
    """Looks at tensors of a model while it runs. Ready for the shapes of the first batch it is given, and for any other."""

    def __init__(
        self, path: Path, proto: ModelProto, tensors: Sequence[str] | None, first: Batch, *, memory_mib: int = 512
    ) -> None:
        self._folder = path.parent
        self._path = path
        shapes = {name: tuple(int(size) for size in array.shape) for name, array in first.feeds.items()}
        visible = visible_tensors(proto, shapes)
        for name in tensors or ():
            if name not in visible:
                raise UsageError(
                    f"`{name}` is no floating-point tensor between the nodes of `{path.name}`",
                    hint=closest(name, list(visible))
                    if len(visible) < 2000
                    else "`trt-engine inspect` shows the names",
                )
        self.tensors = list(visible) if tensors is None else [name for name in visible if name in set(tensors)]
        """What is looked at, in the graph's order."""
        self._inputs = [name for name in self.tensors if name in first.feeds]
        made = [name for name in self.tensors if name not in first.feeds]
        budget = memory_mib << 20
        self._groups = list(_grouped(proto, {name: visible[name] for name in made}, budget // 2))
        self._kept = sum(len(group.model) for group in self._groups) <= budget or len(self._groups) == 1
        self.window = 1 if self._kept else _WINDOW
        """How many batches `look` should be given at once."""
        if len(self._groups) > 1:
            log.debug(
                "%d tensors are looked at in %d groups to stay within %d MiB", len(made), len(self._groups), memory_mib
            )

    def look(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, str, Array]]:
        """Each tensor of each batch once; group by group, the batches in order within a group."""
        for batch in batches:
            for name in self._inputs:
                yield batch, name, batch.feeds[name]
        for group in self._groups:
            loaded = group.loaded or self._load(group)
            if self._kept:
                group.loaded = loaded
            for batch in batches:
                try:
                    outputs = run_arrays(loaded, group.names, batch.feeds)
                except session.ERRORS as error:
                    raise session.on_run(error) from error
                for at, name in enumerate(group.names):
                    yield batch, name, outputs[at]
                    outputs[at] = None  # free it before the next one is worked on

    def _load(self, group: _Group) -> ort.InferenceSession:
        options = OnnxRuntimeOptions(arena=False, memory_pattern=False)
        made = session.session_options(options, level="none")
        made.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self._folder.resolve())
        )
        try:
            loaded = ort.InferenceSession(group.model, made, providers=["CPUExecutionProvider"], enable_fallback=0)
        except session.ERRORS as error:
            raise session.on_load(error, self._path) from error
        if self._kept:
            group.model = b""
        return loaded


# ------------------------------------------------------------------------------------------------ the cut


def _grouped(proto: ModelProto, nbytes: dict[str, int], budget: int) -> Iterator[_Group]:
    """The tensors in the order given, in groups of at most `budget` bytes each (or one tensor)."""
    unknown = max(nbytes.values(), default=0) or budget // 4  # a size nobody knows: as large as the largest one known
    held: list[str] = []
    size = 0
    for name, known in nbytes.items():
        own = known or unknown
        if held and size + own > budget:
            yield _Group(held, _cut(proto, held))
            held, size = [], 0
        held.append(name)
        size += own
    if held:
        yield _Group(held, _cut(proto, held))


def _cut(proto: ModelProto, outputs: Sequence[str]) -> bytes:
    """The model with these outputs, and no node and no weight they do not need."""
    graph = proto.graph
    needed, kept = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(_reads(node))
    whole = ModelProto(ir_version=proto.ir_version, producer_name=proto.producer_name)
    whole.opset_import.extend(proto.opset_import)
    whole.functions.extend(proto.functions)
    cut = whole.graph
    cut.name = graph.name
    cut.node.extend(reversed(kept))
    cut.input.extend(graph.input)
    inputs = {item.name for item in graph.input}
    cut.initializer.extend(item for item in graph.initializer if item.name in needed or item.name in inputs)
    cut.sparse_initializer.extend(graph.sparse_initializer)
    cut.value_info.extend(item for item in graph.value_info if item.name in needed and item.name not in outputs)
    stated = {item.name: item for item in (*graph.value_info, *graph.output)}
    # a type may be missing: ONNX Runtime works it out; a stated shape may be wrong, so it is left out
    for name in outputs:
        value = ValueInfoProto(name=name)
        if name in stated and stated[name].type.tensor_type.elem_type:
            value.type.tensor_type.elem_type = stated[name].type.tensor_type.elem_type
        cut.output.append(value)
    raw: bytes = whole.SerializeToString()
    return raw


def _reads(node: NodeProto) -> Iterator[str]:
    """What a node needs from outside: its inputs, and what its bodies take from the graphs around them."""
    yield from (name for name in node.input if name)
    for _, body in walk.bodies(node):
        yield from _body_reads(body)


def _body_reads(body: GraphProto) -> Iterable[str]:
    inner = itertools.chain.from_iterable(_reads(node) for node in body.node)
    return {*inner, *(item.name for item in body.output)}

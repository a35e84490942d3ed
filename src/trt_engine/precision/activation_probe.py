"""Run a model and read its intermediate tensors in bounded memory, in groups.

ONNX Runtime on the CPU without graph optimization, so that every tensor exists. Each group fits the memory limit and has a
separate session with only the nodes it needs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, TensorProto, ValueInfoProto

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.backends.onnxruntime.ort_values import run_arrays
from trt_engine.errors import FeedError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.shape_inference import trace
from trt_engine.model import Model
from trt_engine.precision.samples import Batch, Samples
from trt_engine.tensors import Shape, suggest

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
_READABLE_BYTES: dict[int, int] = {TensorProto.FLOAT: 4, TensorProto.FLOAT16: 2, TensorProto.DOUBLE: 8}
_WINDOW = 32
"""Batches per group switch when the sessions do not all fit in memory."""


def probed_tensors(proto: ModelProto, shapes: dict[str, Shape]) -> dict[str, int]:
    """Non-constant floating-point tensors of the main graph in order, with their size in bytes at these input shapes
    (0 if the shape is unknown)."""
    facts = trace(proto, shapes).tensors
    stored = {item.name for item in proto.graph.initializer}
    names = [item.name for item in proto.graph.input if item.name not in stored]
    names += [name for node in proto.graph.node for name in node.output if name]
    found = {}
    for name in names:
        fact = facts.get(name)
        if fact is not None and fact.elem in _READABLE_BYTES and not fact.is_constant:
            found[name] = fact.num_elements * _READABLE_BYTES[fact.elem] if fact.is_static else 0
    return found


def check_finite_inputs(batch: Batch) -> None:
    """Raise `FeedError` if a feed contains NaN or infinity."""
    for name, array in batch.feeds.items():
        if array.dtype.kind == "f" and array.size and not np.isfinite(array).all():
            what = "NaN" if np.isnan(array).any() else "infinite values"
            count = int((~np.isfinite(array)).sum())
            raise FeedError(
                f"input `{name}` has {what} in {batch.source} ({count} of {array.size} values)",
                hint="repair the data or leave that sample out",
            )


@dataclass(slots=True)
class _TensorGroup:
    """Some tensors, and the serialized submodel that produces them."""

    names: list[str]
    model: bytes
    session: ort.InferenceSession | None = None


class ActivationProbe:
    """Reads intermediate tensors of a model. Group sizes follow the shapes of the first batch; others work too."""

    def __init__(self, model: Model, tensors: Sequence[str] | None, first: Batch, *, memory_mib: int = 512) -> None:
        """Read these tensors (None: all floating-point ones) in groups within `memory_mib`; `first` gives the input shapes.

        Raises `UsageError` for a tensor that the model does not have.
        """
        self._path = model.path
        shapes = {name: tuple(int(size) for size in array.shape) for name, array in first.feeds.items()}
        visible = probed_tensors(model.proto, shapes)
        for name in tensors or ():
            if name not in visible:
                raise UsageError(
                    f"`{model.path.name}` has no floating-point tensor `{name}`",
                    hint=suggest(name, list(visible))
                    if len(visible) < 2000
                    else "`trt-engine inspect` shows the names",
                )
        self.tensors = list(visible) if tensors is None else [name for name in visible if name in set(tensors)]
        """The tensors read, in graph order."""
        self._inputs = [name for name in self.tensors if name in first.feeds]
        made = [name for name in self.tensors if name not in first.feeds]
        budget = memory_mib << 20
        self._groups = list(_group_tensors(model.proto, {name: visible[name] for name in made}, budget // 2))
        self._keeps_sessions = sum(len(group.model) for group in self._groups) <= budget or len(self._groups) == 1
        self.window = 1 if self._keeps_sessions else _WINDOW
        """Number of batches to pass to `look` at once."""
        if len(self._groups) > 1:
            log.debug(
                "%d tensors are read in %d groups to stay within %d MiB", len(made), len(self._groups), memory_mib
            )

    def read(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, str, Array]]:
        """Yield each tensor of each batch once, by group, then by batch. Dtypes are those of the graph.

        Raises the `TrtEngineError` of an inference that fails.
        """
        for batch in batches:
            for name in self._inputs:
                yield batch, name, batch.feeds[name]
        for group in self._groups:
            loaded = group.session or self._load(group)
            if self._keeps_sessions:
                group.session = loaded
            for batch in batches:
                try:
                    outputs = run_arrays(loaded, group.names, batch.feeds)
                except session.ERRORS as error:
                    raise session.translate_run_error(error) from error
                for at, name in enumerate(group.names):
                    yield batch, name, outputs[at]
                    outputs[at] = None  # free it before the next one is processed

    @classmethod
    def windows(
        cls,
        model: Model,
        tensors: Sequence[str] | None,
        samples: Samples,
        *,
        memory_mib: int = 512,
        probe: ActivationProbe | None = None,
    ) -> Iterator[tuple[ActivationProbe, list[Batch]]]:
        """Yield the data once, as batches to read together, with the probe: that of an earlier pass, or one whose groups
        follow the first batch.

        Raises `FeedError` for inputs that are not finite.
        """
        batches = iter(samples)
        while window := list(itertools.islice(batches, probe.window if probe else 1)):
            probe = probe or cls(model, tensors, window[0], memory_mib=memory_mib)
            for batch in window:
                check_finite_inputs(batch)
            yield probe, window

    @classmethod
    def read_samples(cls, model: Model, tensors: Sequence[str], samples: Samples) -> Iterator[tuple[Batch, str, Array]]:
        """Yield each tensor of each batch, in its dtype, in one pass over the data, as `windows` and `read` do."""
        for probe, window in cls.windows(model, tensors, samples):
            yield from probe.read(window)

    def _load(self, group: _TensorGroup) -> ort.InferenceSession:
        options = OnnxRuntimeOptions(arena=False, memory_pattern=False)
        made = session.session_options(options, level="none")
        made.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self._path.parent.resolve())
        )
        try:
            loaded = ort.InferenceSession(group.model, made, providers=["CPUExecutionProvider"], enable_fallback=0)
        except session.ERRORS as error:
            raise session.translate_load_error(error, self._path) from error
        if self._keeps_sessions:
            group.model = b""
        return loaded


# ------------------------------------------------------------------------------------------------ the cut


def _group_tensors(proto: ModelProto, nbytes: dict[str, int], budget: int) -> Iterator[_TensorGroup]:
    """Group the tensors in order, each group at most `budget` bytes or one tensor."""
    unknown = max(nbytes.values(), default=0) or budget // 4  # an unknown size counts as the largest known one
    held: list[str] = []
    size = 0
    for name, known in nbytes.items():
        own = known or unknown
        if held and size + own > budget:
            yield _TensorGroup(held, _extract_model(proto, held))
            held, size = [], 0
        held.append(name)
        size += own
    if held:
        yield _TensorGroup(held, _extract_model(proto, held))


def _extract_model(proto: ModelProto, outputs: Sequence[str]) -> bytes:
    """Serialize the submodel with these outputs, without unneeded nodes and weights."""
    graph = proto.graph
    needed, kept = set(outputs), []
    for node in reversed(graph.node):
        if needed.intersection(node.output):
            kept.append(node)
            needed.update(walk.names_read(node))
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
    # ONNX Runtime infers a missing type; a declared shape may be wrong, so it is omitted
    for name in outputs:
        value = ValueInfoProto(name=name)
        if name in stated and stated[name].type.tensor_type.elem_type:
            value.type.tensor_type.elem_type = stated[name].type.tensor_type.elem_type
        cut.output.append(value)
    raw: bytes = whole.SerializeToString()
    return raw

"""A rewritten model against the one it was made of: both run in ONNX Runtime, at two sets of sizes, on random feeds.

Sizes nobody gave are looked for: the batch is 2 and then 3, the other open sizes are tried until the model runs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime as ort
from onnx import ModelProto, TensorProto

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.run import run_arrays
from trt_engine.conversion.rewriting import false_constants, inline, is_random
from trt_engine.equivalence.compare import compare
from trt_engine.equivalence.parity import open_exposing
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.sorted_outputs import compared_tensors
from trt_engine.errors import ModelError, ShapeError, TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.load import read_proto
from trt_engine.graph.trace import trace
from trt_engine.model import Model
from trt_engine.tensors import Shape, Signature, TensorSpec, format_shape

__all__ = ["Apart", "Proof", "Prover", "Unprovable", "sorted_tensors"]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_OTHERS = (64, 32, 128, 16, 224, 8, 4, 256, 640, 7, 5, 2, 1)
"""Sizes tried for open dimensions that are no batch."""
_BATCHES = (2, 3)
# What one more rounding may change, by the coarsest type a graph computes in: some units in the last place of it
_COARSE = {
    TensorProto.FLOAT16: 4e-3,
    TensorProto.BFLOAT16: 3e-2,
    TensorProto.INT8: 2e-2,
    TensorProto.UINT8: 2e-2,
}


class Unprovable(Exception):
    """The model cannot be run here, so that nothing can be said of a rewritten one; the text says why."""


class Apart(Exception):
    """The rewritten model is not the same; the text says where."""


@dataclass(frozen=True, slots=True)
class Proof:
    """How far the two lie from each other."""

    largest: float
    """The largest difference of any output, in shares of that output's largest value."""
    tolerance: float
    shapes: tuple[dict[str, Shape], ...]
    """The input shapes both were run at."""
    unchecked: tuple[str, ...]
    """Outputs of which only types and shapes were compared: they are random, or the order of a sort decides."""


class Prover:
    """The model as it was, run once; `measure` runs what became of it on the same feeds."""

    def __init__(self, model: Model, inputs: Mapping[str, Any] | None, tolerance: float) -> None:
        self._path, self._signature = model.path, model.signature
        self._given = _checked(model.signature, inputs or {})
        self._arrays = {name: item for name, item in self._given.items() if isinstance(item, np.ndarray)}
        proto, _ = inline(read_proto(model.path))
        self.tolerance = max(tolerance, _floor(proto))
        self._rounding: dict[str, dict[int, float]] = {}
        off = false_constants(proto)
        self.random = any(is_random(node, off) for node in proto.graph.node)
        outputs = [spec.name for spec in self._signature.outputs]
        self.watched = sorted_tensors(proto)
        after = _loose(proto, off)
        self._exact = [name for name in (*outputs, *self.watched) if name not in after]
        self._loose = [name for name in outputs if name in after]
        loaded = self._loaded(model)
        self._feeds = list(self._sets_that_run(loaded))
        self._wanted = [run_arrays(loaded, [*self._exact, *self._loose], feeds) for feeds in self._feeds]

    @property
    def shapes(self) -> tuple[dict[str, Shape], ...]:
        """The input shapes of the sets of feeds."""
        return tuple({name: tuple(array.shape) for name, array in feeds.items()} for feeds in self._feeds)

    def measure(self, path: Path) -> Proof:
        """How far the model at `path` lies from the first one; `Apart` when it is not the same."""
        names = [*self._exact, *self._loose]
        try:
            loaded = open_exposing(path, names)
        except TrtEngineError as error:
            raise Apart(f"ONNX Runtime does not load it: {error.message}") from error
        largest = 0.0
        for feeds, wanted in zip(self._feeds, self._wanted, strict=True):
            at = ", ".join(f"{name}:{format_shape(array.shape)}" for name, array in feeds.items())
            try:
                got = run_arrays(loaded, names, feeds)
            except session.ERRORS as error:
                raise Apart(f"it does not run at {at}: {session.first_line(error)}") from error
            for name, mine, other in zip(names, got, wanted, strict=True):
                largest = max(largest, self._apart(name, mine, other, at))
        return Proof(largest, self.tolerance, self.shapes, tuple(self._loose))

    def _apart(self, name: str, mine: Any, other: Any, at: str) -> float:
        one, two = np.asarray(mine), np.asarray(other)
        if one.dtype != two.dtype:
            raise Apart(f"`{name}` is {one.dtype} at {at}, and was {two.dtype}")
        if name in self._loose:
            if one.shape != two.shape and not self._free(name):
                raise Apart(f"`{name}` is {format_shape(one.shape)} at {at}, and was {format_shape(two.shape)}")
            return 0.0
        if one.shape != two.shape:
            raise Apart(f"`{name}` is {format_shape(one.shape)} at {at}, and was {format_shape(two.shape)}")
        found = compare(one, two, self._rounding.setdefault(name, {}))
        if not found.max_rel <= self.tolerance:
            where = f" in {found.channel}" if found.channel is not None else ""
            raise Apart(f"`{name}` is off by {found.max_rel:.2g}{where} at {at}, and {self.tolerance:.2g} is allowed")
        return found.max_rel

    def _free(self, name: str) -> bool:
        """True when the output's size follows data (NonMaxSuppression, NonZero): near-equal scores may change it."""
        spec = next(spec for spec in self._signature.outputs if spec.name == name)
        return bool(spec.dynamic)

    # -------------------------------------------------------------------------------------------- sizes

    def _loaded(self, model: Model) -> ort.InferenceSession:
        try:
            return open_exposing(model.path, [*self._exact, *self._loose])
        except TrtEngineError as error:
            raise Unprovable(
                f"ONNX Runtime does not run the model, so nothing can be compared: {error.message}"
            ) from error

    def _sets_that_run(self, loaded: ort.InferenceSession) -> Iterator[dict[str, Array]]:
        """Two sets of feeds, as different as the model allows."""
        said = ""
        outputs = [spec.name for spec in self._signature.outputs]
        first: dict[str, Array] | None = None
        for feeds in self._tries(_BATCHES[0], 0):
            try:
                run_arrays(loaded, outputs, feeds)
            except session.ERRORS as error:
                said = said or session.first_line(error)
                continue
            first = feeds
            break
        if first is None:
            raise Unprovable(
                f"no sizes were found at which the model runs (`--input NAME:SHAPE` gives some): {said or 'none fit'}"
            )
        yield first
        shapes = {name: array.shape for name, array in first.items()}
        # where all sizes stand, or no others run: other numbers
        for feeds in itertools.chain(self._second(shapes), (self._drawn(shapes, 1),)):
            kept = {name: item for name, item in self._arrays.items() if item.shape == feeds[name].shape}
            feeds = {**feeds, **kept}
            try:
                run_arrays(loaded, outputs, feeds)
            except session.ERRORS:
                continue
            yield feeds
            return
        log.info("the model runs at one set of feeds alone")

    def _tries(self, batch: int, seed: int) -> Iterator[dict[str, Array]]:
        for other in _OTHERS:
            yield {**self._drawn(self._shapes(batch, other), seed), **self._arrays}
            if not self._others(self._given):
                return

    def _second(self, first: Mapping[str, Shape]) -> Iterator[dict[str, Array]]:
        """Feeds of other sizes: every open size moved at first, then the batch alone, then the others alone."""
        sizes = self._symbols(first)
        batches = {key for spec in self._signature.inputs for key in self._batch_key(spec)}
        others = [key for key in sizes if key not in batches]
        moved = [{key: sizes[key] + 1 for key in batches}] if batches else []
        choices = []
        for change in _OTHERS if others else ():
            new = {key: change for key in others if sizes[key] != change}
            if new:
                choices.append(new)
        choices += [{key: size * 2 for key, size in sizes.items() if key in others}] if others else []
        for with_batch, other in itertools.chain(
            itertools.product(moved, choices), ((item, {}) for item in moved), (({}, item) for item in choices)
        ):
            shapes = self._at({**sizes, **with_batch, **other})
            yield self._drawn(shapes, 1)

    def _drawn(self, shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
        try:
            return random_inputs(self._path, self._signature, shapes, seed)
        except ModelError as error:
            raise Unprovable(f"{error.message}, so nothing can be compared") from error

    def _batch_key(self, spec: TensorSpec) -> list[str]:
        return [_key(spec, 0)] if spec.shape and spec.shape[0] < 0 else []

    def _others(self, given: Mapping[str, Any]) -> bool:
        return any(axis > 0 for spec in self._signature.inputs if spec.name not in given for axis in spec.dynamic)

    def _symbols(self, shapes: Mapping[str, Shape]) -> dict[str, int]:
        return {
            _key(spec, axis): shapes[spec.name][axis] for spec in self._signature.inputs for axis in spec.dynamic
        }  # fmt: skip

    def _at(self, sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {
            spec.name: tuple(sizes[_key(spec, axis)] if size < 0 else size for axis, size in enumerate(spec.shape))
            for spec in self._signature.inputs
        }

    def _shapes(self, batch: int, other: int) -> dict[str, Shape]:
        sizes: dict[str, int] = {}
        for spec in self._signature.inputs:
            given = self._given.get(spec.name)
            if given is not None:
                shape = given.shape if isinstance(given, np.ndarray) else given
                for axis in spec.dynamic:
                    if sizes.setdefault(_key(spec, axis), shape[axis]) != shape[axis]:
                        raise ShapeError(
                            f"`{_key(spec, axis)}` is {sizes[_key(spec, axis)]} and {shape[axis]}",
                            hint="equal symbols are equal sizes",
                        )
        for spec in self._signature.inputs:
            for axis in spec.dynamic:
                sizes.setdefault(_key(spec, axis), batch if axis == 0 else other)
        return self._at(sizes)


def _key(spec: TensorSpec, axis: int) -> str:
    return (spec.symbols[axis] if spec.symbols else None) or f"{spec.name}[{axis}]"


def _checked(signature: Signature, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The given shapes and arrays, seen to fit the inputs they are for."""
    found: dict[str, Any] = {}
    for name, item in inputs.items():
        spec = signature.input(name)
        if isinstance(item, np.ndarray):
            spec.check(item)
            found[name] = item
            continue
        shape = tuple(int(size) for size in item)
        if len(shape) != len(spec.shape) or any(
            got != want if want >= 0 else got < 0 for got, want in zip(shape, spec.shape, strict=True)
        ):
            raise ShapeError(
                f"the shape {format_shape(shape)} does not fit input `{name}`, which is {spec.describe()}",
                hint="write shapes as `images:2x3x640x640`",
            )
        found[name] = shape
    return found


# ------------------------------------------------------------------------------------------------ what is compared


def sorted_tensors(proto: ModelProto) -> list[str]:
    """What a graph that sorts is compared by: the numbers that sorting reads, made by nodes of the main graph."""
    outputs = {item.name for item in proto.graph.output}
    made = {name for node in proto.graph.node for name in node.output}
    return [name for name in compared_tensors(proto) if name not in outputs and name in made]


def _loose(proto: ModelProto, off: set[str]) -> set[str]:
    """Tensors whose values are not compared: random ones and what follows them, what a sort puts in order."""
    found: set[str] = set()
    for node in proto.graph.node:
        reads = {*node.input, *(name for _, body in walk.bodies(node) for name in _inside(body))}
        if is_random(node, off) or not found.isdisjoint(reads):
            found.update(name for name in node.output if name)
    outputs = {item.name for item in proto.graph.output}
    return found | (outputs - set(compared_tensors(proto)))


def _inside(graph: Any) -> Iterator[str]:
    for node in graph.node:
        yield from node.input
        for _, body in walk.bodies(node):
            yield from _inside(body)


def _floor(proto: ModelProto) -> float:
    kinds = {fact.elem for fact in trace(proto, {}).facts.values()}
    quantised = any(place.node.op_type.endswith("QuantizeLinear") for place in walk.nodes(proto))
    found = [_COARSE[kind] for kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16) if kind in kinds]
    if quantised:
        found.append(_COARSE[TensorProto.INT8])
    return max(found, default=0.0)


# ------------------------------------------------------------------------------------------------ running

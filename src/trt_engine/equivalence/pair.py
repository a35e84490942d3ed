"""Compares a rewritten model with its original in ONNX Runtime, at two sets of shapes with random inputs.

Missing sizes are searched: batch 2 and then 3, other dynamic sizes until the model runs.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto

from trt_engine.arrayfiles import Array
from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.ort_values import run_arrays
from trt_engine.equivalence.output_error import compare_output
from trt_engine.equivalence.output_range import output_ranges
from trt_engine.equivalence.parity import open_with_outputs
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.sorted_outputs import comparable_tensors
from trt_engine.equivalence.tolerance import ROUNDING
from trt_engine.errors import ModelError, ShapeError, TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.constants import false_constants, is_random
from trt_engine.graph.edit_graph import inline_functions
from trt_engine.graph.shape_inference import trace
from trt_engine.model import Model
from trt_engine.tensors import Shape, Signature, TensorSpec, format_shape

log = logging.getLogger(__name__)


_OTHER_SIZES = (64, 32, 128, 16, 224, 8, 4, 256, 640, 7, 5, 2, 1)
"""Candidate sizes of dynamic non-batch dimensions."""
_BATCHES = (2, 3)
# Tolerance for one additional rounding, by the coarsest dtype of a graph: some units in its last place
_DTYPE_TOLERANCES = {
    TensorProto.FLOAT16: 4e-3,
    TensorProto.BFLOAT16: 3e-2,
    TensorProto.INT8: 2e-2,
    TensorProto.UINT8: 2e-2,
}


class CannotRun(Exception):
    """The model cannot be run here, so a rewrite cannot be verified; the message gives the reason."""


class NotEquivalent(Exception):
    """The rewritten model differs; the message locates the difference."""


@dataclass(frozen=True, slots=True)
class EquivalenceResult:
    """Result of a comparison."""

    max_error: float
    """Largest difference of any output, relative to that output's largest value."""
    tolerance: float
    shapes: tuple[dict[str, Shape], ...]
    """Input shapes of both runs."""
    unchecked: tuple[str, ...]
    """Outputs compared only by type and shape, as they are random or order-dependent."""


class EquivalenceChecker:
    """Runs the original model once; `measure` compares rewritten models on the same inputs."""

    def __init__(self, model: Model, inputs: Mapping[str, Any] | None, tolerance: float) -> None:
        self._path, self._signature = model.path, model.signature
        self._given = _check_inputs(model.signature, inputs or {})
        self._arrays = {name: item for name, item in self._given.items() if isinstance(item, np.ndarray)}
        proto = inline_functions(model.proto)
        self.tolerance = max(tolerance, _min_tolerance(proto))
        self._rounding: dict[str, dict[int, float]] = {}
        self._floors = {name: ROUNDING * size for name, size in output_ranges(proto).items()}
        off = false_constants(proto)
        self.random = any(is_random(node, off) for node in proto.graph.node)
        outputs = [spec.name for spec in self._signature.outputs]
        self.internal_tensors = sorted_tensors(proto)
        after = _uncompared_tensors(proto, off)
        self._exact = [name for name in (*outputs, *self.internal_tensors) if name not in after]
        self._loose = [name for name in outputs if name in after]
        loaded = self._open_session(model)
        self._feeds = list(self._runnable_feeds(loaded))
        self._wanted = [run_arrays(loaded, [*self._exact, *self._loose], feeds) for feeds in self._feeds]

    @property
    def shapes(self) -> tuple[dict[str, Shape], ...]:
        """Input shapes of each set of feeds."""
        return tuple({name: tuple(array.shape) for name, array in feeds.items()} for feeds in self._feeds)

    def check(self, path: Path) -> EquivalenceResult:
        """Compare the model at `path` with the original; `NotEquivalent` if it differs."""
        names = [*self._exact, *self._loose]
        try:
            loaded = open_with_outputs(path, names)
        except TrtEngineError as error:
            raise NotEquivalent(f"ONNX Runtime does not load it: {error.message}") from error
        largest = 0.0
        for feeds, wanted in zip(self._feeds, self._wanted, strict=True):
            at = ", ".join(f"{name}:{format_shape(array.shape)}" for name, array in feeds.items())
            try:
                got = run_arrays(loaded, names, feeds)
            except session.ERRORS as error:
                raise NotEquivalent(f"it does not run at {at}: {session.error_summary(error)}") from error
            for name, mine, other in zip(names, got, wanted, strict=True):
                largest = max(largest, self._compare_output(name, mine, other, at))
        return EquivalenceResult(largest, self.tolerance, self.shapes, tuple(self._loose))

    def _compare_output(self, name: str, mine: Any, other: Any, at: str) -> float:
        one, two = np.asarray(mine), np.asarray(other)
        if one.dtype != two.dtype:
            raise NotEquivalent(f"`{name}` is {one.dtype} at {at}, and was {two.dtype}")
        if name in self._loose:
            if one.shape != two.shape and not self._is_data_sized(name):
                raise NotEquivalent(f"`{name}` is {format_shape(one.shape)} at {at}, and was {format_shape(two.shape)}")
            return 0.0
        if one.shape != two.shape:
            raise NotEquivalent(f"`{name}` is {format_shape(one.shape)} at {at}, and was {format_shape(two.shape)}")
        found = compare_output(one, two, self._rounding.setdefault(name, {}), floor=self._floors.get(name, 0.0))
        if not found.max_rel <= self.tolerance:
            where = f" in {found.channel}" if found.channel is not None else ""
            raise NotEquivalent(
                f"`{name}` is off by {found.max_rel:.2g}{where} at {at}, and {self.tolerance:.2g} is allowed"
            )
        return found.max_rel

    def _is_data_sized(self, name: str) -> bool:
        """True if the output's size depends on data (NonMaxSuppression, NonZero): near-equal scores may change it."""
        spec = next(spec for spec in self._signature.outputs if spec.name == name)
        return bool(spec.dynamic)

    # -------------------------------------------------------------------------------------------- sizes

    def _open_session(self, model: Model) -> ort.InferenceSession:
        try:
            return open_with_outputs(model.path, [*self._exact, *self._loose])
        except TrtEngineError as error:
            raise CannotRun(
                f"ONNX Runtime does not run the model, so nothing can be compared: {error.message}"
            ) from error

    def _runnable_feeds(self, loaded: ort.InferenceSession) -> Iterator[dict[str, Array]]:
        """Two sets of feeds, as different as the model allows."""
        said = ""
        outputs = [spec.name for spec in self._signature.outputs]
        first: dict[str, Array] | None = None
        candidates = (feeds for batch in (_BATCHES[0], 1) for feeds in self._candidate_feeds(batch, 0))
        for feeds in candidates:  # of a batch of 1: the export may have fixed it without saying so
            try:
                run_arrays(loaded, outputs, feeds)
            except session.ERRORS as error:
                said = said or session.error_summary(error)
                continue
            first = feeds
            break
        if first is None:
            raise CannotRun(
                f"no sizes were found at which the model runs (`--input NAME:SHAPE` gives some): {said or 'none fit'}"
            )
        yield first
        shapes = {name: array.shape for name, array in first.items()}
        # all sizes static, or no others run: other values
        for feeds in itertools.chain(self._other_size_feeds(shapes), (self._random_feeds(shapes, 1),)):
            kept = {name: item for name, item in self._arrays.items() if item.shape == feeds[name].shape}
            feeds = {**feeds, **kept}
            try:
                run_arrays(loaded, outputs, feeds)
            except session.ERRORS:
                continue
            yield feeds
            return
        log.info("the model runs at only one set of feeds")

    def _candidate_feeds(self, batch: int, seed: int) -> Iterator[dict[str, Array]]:
        for other in _OTHER_SIZES:
            yield {**self._random_feeds(self._candidate_shapes(batch, other), seed), **self._arrays}
            inferred = (spec for spec in self._signature.inputs if spec.name not in self._given)
            if not any(set(spec.dynamic) - set(self._signature.batch_axes(spec)) for spec in inferred):
                return

    def _other_size_feeds(self, first: Mapping[str, Shape]) -> Iterator[dict[str, Array]]:
        """Feeds at other sizes: all dynamic sizes changed, then the batch only, then the others only."""
        sizes = {_key(spec, axis): first[spec.name][axis] for spec in self._signature.inputs for axis in spec.dynamic}
        signature = self._signature
        batches = {_key(spec, axis) for spec in signature.inputs for axis in signature.batch_axes(spec)}
        others = [key for key in sizes if key not in batches]
        moved = [{key: sizes[key] + 1 for key in batches}] if batches else []
        choices = []
        for change in _OTHER_SIZES if others else ():
            new = {key: change for key in others if sizes[key] != change}
            if new:
                choices.append(new)
        choices += [{key: size * 2 for key, size in sizes.items() if key in others}] if others else []
        for with_batch, other in itertools.chain(
            itertools.product(moved, choices), ((item, {}) for item in moved), (({}, item) for item in choices)
        ):
            shapes = self._shapes_at({**sizes, **with_batch, **other})
            yield self._random_feeds(shapes, 1)

    def _random_feeds(self, shapes: Mapping[str, Shape], seed: int) -> dict[str, Array]:
        try:
            return random_inputs(self._path, self._signature, shapes, seed)
        except ModelError as error:
            raise CannotRun(f"{error.message}, so nothing can be compared") from error

    def _shapes_at(self, sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {
            spec.name: tuple(sizes[_key(spec, axis)] if size < 0 else size for axis, size in enumerate(spec.shape))
            for spec in self._signature.inputs
        }

    def _candidate_shapes(self, batch: int, other: int) -> dict[str, Shape]:
        sizes: dict[str, int] = {}
        for spec in self._signature.inputs:
            given = self._given.get(spec.name)
            if given is not None:
                shape = given.shape if isinstance(given, np.ndarray) else given
                for axis in spec.dynamic:
                    key = _key(spec, axis)
                    if sizes.setdefault(key, shape[axis]) != shape[axis] and spec.symbols.count(key) < 2:
                        raise ShapeError(
                            f"`{key}` is {sizes[key]} and {shape[axis]}",
                            hint="equal symbols are equal sizes",
                        )
        for spec in self._signature.inputs:
            for axis in spec.dynamic:
                sizes.setdefault(_key(spec, axis), batch if axis in self._signature.batch_axes(spec) else other)
        given_shapes = {
            name: tuple(item.shape) if isinstance(item, np.ndarray) else item for name, item in self._given.items()
        }
        return self._shapes_at(sizes) | given_shapes


def _key(spec: TensorSpec, axis: int) -> str:
    return (spec.symbols[axis] if spec.symbols else None) or f"{spec.name}[{axis}]"


def _check_inputs(signature: Signature, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The given shapes and arrays, validated against the inputs."""
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
                f"the shape {format_shape(shape)} does not fit input `{name}`, which is {spec.format_symbolic()}",
                hint="write shapes as `images:2x3x640x640`",
            )
        found[name] = shape
    return found


# ------------------------------------------------------------------------------------------------ what is compared


def sorted_tensors(proto: ModelProto) -> list[str]:
    """Values that sorting operators read in the main graph: what a graph that sorts is compared by."""
    outputs = {item.name for item in proto.graph.output}
    made = {name for node in proto.graph.node for name in node.output}
    return [name for name in comparable_tensors(proto) if name not in outputs and name in made]


def _uncompared_tensors(proto: ModelProto, off: set[str]) -> set[str]:
    """Tensors whose values are not compared: random ones and their dependents, and sorted ones."""
    found: set[str] = set()
    for node in proto.graph.node:
        reads = {*node.input, *(name for _, body in walk.bodies(node) for name in _body_inputs(body))}
        if is_random(node, off) or not found.isdisjoint(reads):
            found.update(name for name in node.output if name)
    outputs = {item.name for item in proto.graph.output}
    return found | (outputs - set(comparable_tensors(proto)))


def _body_inputs(graph: Any) -> Iterator[str]:
    for node in graph.node:
        yield from node.input
        for _, body in walk.bodies(node):
            yield from _body_inputs(body)


def _min_tolerance(proto: ModelProto) -> float:
    kinds = {fact.elem for fact in trace(proto, {}).tensors.values()}
    quantised = any(place.node.op_type.endswith("QuantizeLinear") for place in walk.nodes(proto))
    found = [_DTYPE_TOLERANCES[kind] for kind in (TensorProto.FLOAT16, TensorProto.BFLOAT16) if kind in kinds]
    if quantised:
        found.append(_DTYPE_TOLERANCES[TensorProto.INT8])
    return max(found, default=0.0)


# ------------------------------------------------------------------------------------------------ running

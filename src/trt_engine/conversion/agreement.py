"""Whether an exported graph is its source: at the example's sizes, at two of every dynamic axis, at all moved together.

A graph that does not follow a size is refused with the symbol, the node and the constant that froze it, and the line of the
source the node came from where the exporter put that down.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.conversion.exporting import Array, Exported
from trt_engine.conversion.source_runs import Answer, Answers, feeds_at, same, told_sizes
from trt_engine.conversion.tied_scores import tied_scores
from trt_engine.engine import OutputError
from trt_engine.equivalence.compare import compare
from trt_engine.equivalence.sorted_outputs import in_their_order, sorted_outputs
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.errors import AccuracyError, ModelError
from trt_engine.graph import walk
from trt_engine.graph.frozen import describe, entered, misfits
from trt_engine.graph.load import check, open_model, read_proto
from trt_engine.graph.trace import Step, attributes, flatten, trace
from trt_engine.records import ShapeAgreement
from trt_engine.tensors import Shape, format_shape

__all__ = ["Agreement", "agree", "must_be_deterministic"]

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Largest difference over the largest value of the output, and of every channel of it, in FP32."""
_TOLERANCE_16_BIT = 2e-2
_RANDOM = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli".split())


@dataclass(frozen=True)
class Agreement:
    """The comparison at every shape, and which symbol stands at which axis of an output."""

    shapes: tuple[ShapeAgreement, ...]
    symbols: dict[str, dict[int, str | None]]
    """Output -> axis that moves -> the symbol it always equals; None for one that is worked out of others."""
    sizes: dict[str, dict[int, int]]
    """Output -> axis that had one size throughout, though every symbol moved -> that size."""
    tolerance: float
    notes: tuple[str, ...] = ()
    """What is to be said of how it was compared."""

    @property
    def worst(self) -> float:
        """The largest relative error of all."""
        return max((error.max_rel for item in self.shapes for error in item.outputs.values()), default=0.0)


# ------------------------------------------------------------------------------------------------ the graph


def must_be_deterministic(path: Path) -> None:
    """`ModelError` for random operators and for Dropout and BatchNormalization in training mode."""
    proto = read_proto(path)
    constants = {item.name: item for item in proto.graph.initializer}
    for place in walk.nodes(proto):
        node = place.node
        given = attributes(node)
        if node.op_type in _RANDOM:
            what = "a random operator"
        elif node.op_type == "BatchNormalization" and given.get("training_mode"):
            what = "a BatchNormalization in training mode"
        elif node.op_type == "Dropout" and _is_true(node, constants):
            what = "a Dropout in training mode"
        else:
            continue
        raise ModelError(
            f"the graph has {what}, `{walk.label(node)}` ({node.op_type}){_from(node)}",
            hint="export what inference needs alone: `training=self.training` for functional dropout and batch_norm, "
            "no `torch.rand`",
        )


def _is_true(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    from onnx import numpy_helper

    if len(node.input) < 3 or not node.input[2]:
        return False
    tensor = constants.get(node.input[2])
    return tensor is None or bool(np.all(numpy_helper.to_array(tensor)))


def agree(
    path: Path,
    exported: Exported,
    given: Answers,
    tolerance: float | None = None,
    *,
    what: str = "the export",
) -> Agreement:
    """The graph against the source's answers; `AccuracyError` with what froze and where it entered."""
    model = open_model(path)
    proto = read_proto(path)
    check(model, proto)
    _inputs_open(proto, exported, given)
    trial = _Trial(
        _session(path), {spec.name for spec in model.signature.inputs}, sorted_outputs(proto), tolerance, what
    )
    found, notes = [], []
    for at, answer in enumerate(given):
        result = trial.of(answer)
        if isinstance(result, _Wrong) and trial.ranked:
            # a rank that two near-equal results contend for decides all that follows: other inputs have other ranks
            for again in _drawn_again(exported, answer):
                if not isinstance(fresh := trial.of(again), _Wrong):
                    given[at], answer, result = again, again, fresh
                    notes.append(
                        f"other inputs were drawn at {_at(answer)}: on the first ones, near-equal scores contend"
                    )
                    break
        if isinstance(result, _Wrong):
            tied = tied_scores(path, answer.feeds) if trial.ranked and result.failed is None else None
            if tied is not None:
                raise AccuracyError(
                    f"{what} cannot be compared with its source: {tied}, so that the order of its rows is chance, in the "
                    f"source as in any engine ({result.told})",
                    hint="weights that were trained tell the rows apart, and so do random ones without a layer of zeros",
                ) from result.cause
            raise _refused(proto, exported, given, answer, result, what) from result.cause
        errors, moved = result
        if moved:
            outputs = ", ".join(f"`{name}`" for name in trial.ranked)
            why = "the graph sorts, and near-equal scores have no order"
            notes.append(f"{moved} rows of {outputs} changed places at {_at(answer)}: {why}")
        for name, want in answer.outputs.items():
            if want.dtype.kind == "f" and want.size and not np.isfinite(want).any():
                notes.append(f"`{name}` has no finite value at {_at(answer)}: nothing of it was compared")
            elif want.dtype == np.float32 and 0 < np.abs(want).max(initial=0.0) < np.finfo(np.float32).tiny:
                notes.append(f"`{name}` is denormal throughout at {_at(answer)}: nothing of it was compared")
        found.append(
            ShapeAgreement({name: tuple(shape) for name, shape in answer.shapes.items()}, answer.sizes, errors)
        )
    return Agreement(
        tuple(found),
        _symbols(given),
        _sizes(proto, given),
        tolerance if tolerance is not None else TOLERANCE,
        tuple(notes),
    )


@dataclass(frozen=True)
class _Wrong:
    """Why a graph is not its source on one set of inputs."""

    told: str
    output: str | None = None
    failed: str | None = None
    """The node that ONNX Runtime names."""
    cause: Exception | None = None


@dataclass(frozen=True)
class _Trial:
    """One graph to be compared with answers of its source."""

    loaded: ort.InferenceSession
    inputs: set[str]
    ranked: tuple[str, ...]
    """Outputs that come out of a sort."""
    tolerance: float | None
    what: str
    rounding: dict[str, dict[int, float]] = field(default_factory=dict)
    """The rounding seen so far: output -> axis of channels -> what large ones were off, over the output's largest value."""

    def of(self, answer: Answer) -> tuple[dict[str, OutputError], int] | _Wrong:
        """The error of every output and the rows that changed places, or what is wrong."""
        names = list(answer.outputs)
        feeds = {name: array for name, array in answer.feeds.items() if name in self.inputs}
        try:
            got = dict(zip(names, map(np.asarray, self.loaded.run(names, feeds)), strict=True))
        except session.ERRORS as error:
            return _Wrong(session.on_run(error).message, None, _failed_node(error), error)
        result = self._compared(got, answer)
        if isinstance(result, _Wrong) and self.ranked:
            limit = self.tolerance if self.tolerance is not None else max(map(_tolerance, answer.outputs.values()))
            ordered, moved = in_their_order(got, answer.outputs, self.ranked, Tolerance(limit))
            if moved and not isinstance(again := self._compared(ordered, answer), _Wrong):
                return again, moved
        return result if isinstance(result, _Wrong) else (result, 0)

    def _compared(self, results: Mapping[str, Array], answer: Answer) -> dict[str, OutputError] | _Wrong:
        errors = {}
        for name, want in answer.outputs.items():
            got = results[name]
            limit = self.tolerance if self.tolerance is not None else _tolerance(want)
            if got.dtype != want.dtype:
                raise AccuracyError(
                    f"output `{name}` of {self.what} is {got.dtype} and {want.dtype} in the source",
                    hint="report it with the source; the types of outputs are part of a model",
                )
            if got.shape != want.shape:
                there = f"{format_shape(want.shape)} in the source"
                return _Wrong(f"output `{name}` is {format_shape(got.shape)}, and {there}", name)
            errors[name] = error = compare(got, want, self.rounding.setdefault(name, {}))
            if not error.max_rel <= limit:
                place = (
                    "" if error.channel is None else f"channel {error.channel.index} (axis {error.channel.axis}) of "
                )
                apart = f"differs by {error.max_rel:.2g} of its largest value, {limit:g} is allowed"
                return _Wrong(f"{place}output `{name}` {apart}", name)
        return errors


_DRAWS = 3


def _drawn_again(exported: Exported, answer: Answer) -> Iterator[Answer]:
    """The source's answers to other inputs of the same shapes."""
    for seed in range(_DRAWS):
        feeds = feeds_at(exported, answer.shapes, 1000 + seed)
        if all(same(array, answer.feeds[name]) for name, array in feeds.items()):
            return  # they come from a file
        try:
            yield replace(answer, feeds=feeds, outputs=exported.reference(feeds))
        except ModelError as error:
            log.info("the source refuses other inputs: %s", error.message)
            return


def _at(answer: Answer) -> str:
    return ", ".join(f"{name} {size}" for name, size in answer.sizes.items()) or "the example's sizes"


def _tolerance(array: Array) -> float:
    return _TOLERANCE_16_BIT if array.dtype.itemsize == 2 and array.dtype.kind not in "iu" else TOLERANCE


def _session(path: Path) -> ort.InferenceSession:
    made = session.session_options(OnnxRuntimeOptions(arena=False), level="none")
    try:
        return ort.InferenceSession(str(path), made, providers=["CPUExecutionProvider"], enable_fallback=0)
    except session.ERRORS as error:
        raise session.on_load(error, path) from error


def _failed_node(error: Exception) -> str | None:
    match = re.search(r"Name:\s*'([^']+)'", str(error))
    return match[1] if match else None


def _symbols(given: Answers) -> dict[str, dict[int, str | None]]:
    """For every axis of an output that moves: the symbol whose size it has each time."""
    found: dict[str, dict[int, str | None]] = {}
    for name, first in given[0].outputs.items():
        ranks = {answer.outputs[name].ndim for answer in given}
        for at in range(first.ndim if len(ranks) == 1 else 0):
            seen = [answer.outputs[name].shape[at] for answer in given]
            if len(set(seen)) > 1:
                found.setdefault(name, {})[at] = next(
                    (
                        symbol
                        for symbol in given[0].sizes
                        if all(answer.sizes[symbol] == size for answer, size in zip(given, seen, strict=True))
                    ),
                    None,
                )
    return found


_SIZED_BY_VALUES = frozenset("NonZero NonMaxSuppression Unique Compress Loop If".split())


def _sizes(proto: ModelProto, given: Answers) -> dict[str, dict[int, int]]:
    """For every axis of an output that does not move: its size; nothing where values may decide sizes."""
    still = any(len({answer.sizes[symbol] for answer in given}) < 2 for symbol in given[0].sizes)
    if still or any(place.node.op_type in _SIZED_BY_VALUES for place in walk.nodes(proto)):
        return {}
    return {
        name: {
            at: size
            for at, size in enumerate(first.shape)
            if all(answer.outputs[name].shape[at : at + 1] == (size,) for answer in given)
        }
        for name, first in given[0].outputs.items()
    }


# ------------------------------------------------------------------------------------------------ what froze


def _inputs_open(proto: ModelProto, exported: Exported, given: Answers) -> None:
    """`AccuracyError` for an input whose axis was to be dynamic and is a number in the graph."""
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        for at, symbol in exported.symbols.get(value.name, {}).items():
            if at < len(dims) and dims[at].HasField("dim_value"):
                place = exported.specialized()
                where = f"; it entered at {place}" if place else ""
                raise AccuracyError(
                    f"`{symbol}` is frozen at {dims[at].dim_value}: axis {at} of the input `{value.name}` came out of the "
                    f"{exported.exporter} exporter as a number{where}",
                    hint="take the size from the tensor where it is used (`x.shape[0]`, `x.flatten(1)`), not as an `int`; "
                    f"or leave `{symbol}` out of `--dynamic`",
                )


def _refused(
    proto: ModelProto,
    exported: Exported,
    given: Answers,
    answer: Answer,
    wrong: _Wrong,
    what: str,
) -> AccuracyError:
    """The error of a graph that is not its source at these sizes."""
    base, told = given[0], wrong.told
    moved = [name for name in answer.sizes if answer.sizes[name] != base.sizes.get(name)]
    if not moved:
        return AccuracyError(
            f"{what} is not its source, at the very inputs it was exported with: {told}",
            hint="the other exporter may do better: `--exporter torchscript` or `--exporter dynamo`; `-vv` says more",
        )
    symbols = ", ".join(f"`{name}`" for name in moved)
    at = ", ".join(str(base.sizes[name]) for name in moved)
    where = _where(proto, base, answer, wrong.output, wrong.failed)
    return AccuracyError(
        f"{symbols} {'is' if len(moved) == 1 else 'are'} frozen at {at}: with {told_sizes(answer.sizes, moved)}, {told}"
        + (f"; {where}" if where else ""),
        hint="take sizes from the tensor where they are used, not as constants; "
        f"or leave {symbols} out of `--dynamic`, or give {'its' if len(moved) == 1 else 'their'} range",
    )


def _where(proto: ModelProto, base: Answer, answer: Answer, output: str | None, failed: str | None) -> str | None:
    """The node at which the size stops to matter, the constant that does it, and the line of the source."""
    one, two = trace(proto, base.shapes), trace(proto, answer.shapes)
    steps = flatten(one.steps)
    by_label = {walk.label(step.node): step for step in steps}
    step = _first_constant_target(steps, base, answer)
    if step is None and failed is not None:
        step = by_label.get(failed)
    if step is None:
        before, after = misfits(one), misfits(two)
        step = next((item for item in steps if walk.label(item.node) in after.keys() - before.keys()), None)
    if step is None and output is not None:
        step = entered(one, two, output)
    if step is None:
        return None
    constant = _constant_of(step)
    return f"it entered at {describe(step)}{f', whose constant is {constant}' if constant else ''}{_from(step.node)}"


_TARGETS = {"Reshape": 1, "Expand": 1, "Tile": 1}


def _first_constant_target(steps: list[Step], base: Answer, answer: Answer) -> Step | None:
    """The first node that is told a shape by a constant with the frozen size in it, and reads what moves."""
    frozen = {base.sizes[name] for name in answer.sizes if answer.sizes[name] != base.sizes.get(name)}
    for step in steps:
        index = _TARGETS.get(step.node.op_type)
        if index is None or len(step.inputs) <= index:
            continue
        target, data = step.inputs[index], step.inputs[0]
        if target is None or target.value is None or not target.stored or data is None or data.shape is None:
            continue
        told = target.value.reshape(-1).tolist()
        if any(size in frozen and _of_the_data(size, at, data.shape) for at, size in enumerate(told)):
            return step
    return None


def _constant_of(step: Step) -> str | None:
    """The stored tensor among a node's operands: its name, shape and, where it is small, its values."""
    for at, (name, fact) in enumerate(zip(step.node.input, step.inputs, strict=False)):
        if (
            fact is None
            or not fact.stored
            or fact.shape is None
            or (not at and len(step.inputs) > 1 and step.node.op_type in _TARGETS)
        ):
            continue
        shown = f"`{name}`, {format_shape(fact.shape)}"
        if fact.value is not None and fact.value.size <= 8:
            shown += f", {fact.value.reshape(-1).tolist()}"
        return shown
    return None


_TELLING = 8
"""Sizes up to this are common: such a number in a constant means the data's size only where both stand at one axis."""


def _of_the_data(size: int, at: int, shape: Shape) -> bool:
    return (at < len(shape) and shape[at] == size) or (size > _TELLING and size in shape)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_SCRIPT_FRAME = re.compile(r"(\S+\.py)\((\d+)\): (\w+)")


def _from(node: NodeProto) -> str:
    """The line of the source behind a node, as the exporters put it down."""
    for item in node.metadata_props:
        if item.key == "pkg.torch.onnx.stack_trace":
            frames = [
                frame for frame in _FRAME.findall(item.value) if "site-packages" not in frame[0] and "<" not in frame[0]
            ]
            if frames:
                file, line, function = frames[-1]
                return f", from {file}:{line} in `{function}`"
    frames = [frame for frame in _SCRIPT_FRAME.findall(node.doc_string) if "site-packages" not in frame[0]]
    if frames:
        file, line, function = frames[0]  # innermost first
        return f", from {file}:{line} in `{function}`"
    return ""

"""Verifies an exported graph against its source: at the example's sizes, at two sizes of every dynamic axis, and with
all axes changed.

A graph that does not follow a size is rejected with the symbol, the node and the constant that froze it, and the source
line of the node if the exporter recorded it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from trt_engine.arrayfiles import Array
from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.host_session import reference_session
from trt_engine.conversion.exported import Exported
from trt_engine.conversion.reference_runs import ReferenceOutputs, ReferenceRuns, equal_outputs, feeds_at, format_sizes
from trt_engine.equivalence.output_error import compare_output
from trt_engine.equivalence.output_range import output_ranges
from trt_engine.equivalence.parity import measure_sensitivity
from trt_engine.equivalence.sorted_outputs import reorder_rows, sorted_outputs
from trt_engine.equivalence.tolerance import ROUNDING, Tolerance
from trt_engine.errors import AccuracyError, ModelError, TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.lint_rules.shape_rules import describe_node, freeze_point, nonconforming_nodes
from trt_engine.graph.load import check_operators, open_model, read_proto
from trt_engine.graph.shape_inference import TracedNode, flatten, trace
from trt_engine.model import Model
from trt_engine.records.convert import ShapeVerification
from trt_engine.records.parity import OutputError
from trt_engine.tensors import Shape, format_shape

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Maximum difference relative to the largest value of the output, and of each of its channels, in FP32."""
_TOLERANCE_16_BIT = 2e-2
_RANDOM = frozenset("RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli".split())


@dataclass(frozen=True)
class ExportVerification:
    """Comparison at every shape, and the symbol of each dynamic output axis."""

    shapes: tuple[ShapeVerification, ...]
    symbols: dict[str, dict[int, str | None]]
    """Output -> changing axis -> the symbol it always equals; None for a computed size."""
    sizes: dict[str, dict[int, int]]
    """Output -> axis that kept one size although every symbol changed -> that size."""
    tolerance: float
    notes: tuple[str, ...] = ()
    """Remarks on the comparison."""

    @property
    def max_error(self) -> float:
        """Largest relative error of all outputs."""
        return max((error.max_rel for item in self.shapes for error in item.outputs.values()), default=0.0)


# ------------------------------------------------------------------------------------------------ the graph


def check_deterministic(path: Path) -> None:
    """`ModelError` for random operators and for Dropout and BatchNormalization in training mode."""
    proto = read_proto(path)
    constants = {item.name: item for item in proto.graph.initializer}
    for place in walk.nodes(proto):
        node = place.node
        given = walk.attributes(node)
        if node.op_type in _RANDOM:
            what = "a random operator"
        elif node.op_type == "BatchNormalization" and given.get("training_mode"):
            what = "a BatchNormalization in training mode"
        elif node.op_type == "Dropout" and _is_true(node, constants):
            what = "a Dropout in training mode"
        else:
            continue
        raise ModelError(
            f"the graph has {what}, `{walk.label(node)}` ({node.op_type}){_source_line(node)}",
            hint="export what inference needs alone: `training=self.training` for functional dropout and batch_norm, "
            "no `torch.rand`",
        )


def _is_true(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    if len(node.input) < 3 or not node.input[2]:
        return False
    tensor = constants.get(node.input[2])
    return tensor is None or bool(np.all(numpy_helper.to_array(tensor)))


def verify(
    path: Path,
    exported: Exported,
    references: ReferenceRuns,
    tolerance: float | None = None,
    *,
    what: str = "the export",
) -> ExportVerification:
    """Compare the graph with the source's outputs; `AccuracyError` with what froze and where."""
    model = open_model(path)
    proto = model.proto
    check_operators(model.graph, path)
    _check_dynamic_inputs(proto, exported, references)
    try:
        loaded = session.create_plain(path)
    except session.ERRORS as error:
        raise session.translate_load_error(error, path) from error
    trial = _GraphUnderTest(
        loaded,
        {spec.name for spec in model.signature.inputs},
        sorted_outputs(proto),
        tolerance,
        what,
        {name: ROUNDING * size for name, size in output_ranges(proto).items()},
    )
    found, notes = [], []
    for at, answer in enumerate(references):
        result = trial.compare(answer)
        if isinstance(result, _Mismatch) and trial.sorted_outputs:
            # near-equal scores may swap ranks, which changes everything downstream: try other inputs
            for again in _redraw_inputs(exported, answer):
                if not isinstance(fresh := trial.compare(again), _Mismatch):
                    references[at], answer, result = again, again, fresh
                    notes.append(
                        f"other inputs were drawn at {_format_shapes(answer)}: the first ones have near-equal scores"
                    )
                    break
        if isinstance(result, _Mismatch):
            may_tie = trial.sorted_outputs and result.failed_node is None
            if may_tie and _moves_by_itself(model, answer.feeds, tolerance or TOLERANCE):
                raise AccuracyError(
                    f"{what} cannot be compared with its source: scores that it sorts are equal but for rounding, so the "
                    f"order of its rows is arbitrary, in the source as in any engine ({result.message})",
                    hint="use trained weights, or random ones without an all-zero layer",
                ) from result.cause
            raise _mismatch_error(proto, exported, references, answer, result, what) from result.cause
        errors, moved = result
        if moved:
            outputs = ", ".join(f"`{name}`" for name in trial.sorted_outputs)
            why = "the graph sorts, and near-equal scores have no order"
            notes.append(f"{moved} rows of {outputs} changed places at {_format_shapes(answer)}: {why}")
        notes += _uncompared_outputs(answer)
        found.append(
            ShapeVerification({name: tuple(shape) for name, shape in answer.shapes.items()}, answer.sizes, errors)
        )
    return ExportVerification(
        tuple(found),
        _output_symbols(references),
        _constant_output_sizes(proto, references),
        tolerance if tolerance is not None else TOLERANCE,
        tuple(notes),
    )


def _uncompared_outputs(answer: ReferenceOutputs) -> Iterator[str]:
    """A note for each output whose values show nothing."""
    for name, want in answer.outputs.items():
        if want.dtype.kind == "f" and want.size and not np.isfinite(want).any():
            yield f"`{name}` has no finite value at {_format_shapes(answer)}: nothing of it was compared"
        elif want.dtype == np.float32 and 0 < np.abs(want).max(initial=0.0) < np.finfo(np.float32).tiny:
            yield f"`{name}` is denormal throughout at {_format_shapes(answer)}: nothing of it was compared"
        elif _rows_agree(want) and any(
            feed.shape[:1] == want.shape[:1] and not _rows_agree(feed) for feed in answer.feeds.values()
        ):
            value = "the same in every row" if want.any() else "0"
            yield (
                f"`{name}` is {value} at {_format_shapes(answer)}, whatever the input is: what it is computed from was not "
                "compared (trained weights would be)"
            )


def _rows_agree(array: Array) -> bool:
    """Whether the rows differ by less than is compared; False where there are no rows of real numbers."""
    if array.dtype.kind != "f" or array.ndim < 2 or len(array) < 2 or not array.size:
        return False
    numbers = array.astype(np.float64)
    return bool(np.abs(numbers - numbers[:1]).max() <= _tolerance(array) * np.abs(numbers).max())


@dataclass(frozen=True)
class _Mismatch:
    """Why a graph differs from its source on one set of inputs."""

    message: str
    output: str | None = None
    failed_node: str | None = None
    """The node named by ONNX Runtime."""
    cause: Exception | None = None


@dataclass(frozen=True)
class _GraphUnderTest:
    """A graph to compare with its source."""

    loaded: ort.InferenceSession
    inputs: set[str]
    sorted_outputs: tuple[str, ...]
    """Outputs of a sort."""
    tolerance: float | None
    what: str
    floors: dict[str, float]
    """Differences that are rounding of the functions that made the outputs."""
    rounding: dict[str, dict[int, float]] = field(default_factory=dict)
    """Rounding seen so far: output -> channel axis -> error of large channels, relative to the output's largest
    value."""

    def compare(self, answer: ReferenceOutputs) -> tuple[dict[str, OutputError], int] | _Mismatch:
        """Error of every output and the number of reordered rows, or the mismatch."""
        names = list(answer.outputs)
        feeds = {name: array for name, array in answer.feeds.items() if name in self.inputs}
        try:
            got = dict(zip(names, map(np.asarray, self.loaded.run(names, feeds)), strict=True))
        except session.ERRORS as error:
            return _Mismatch(session.translate_run_error(error).message, None, _failed_node(error), error)
        result = self._compare_outputs(got, answer)
        if isinstance(result, _Mismatch) and self.sorted_outputs:
            limit = self.tolerance if self.tolerance is not None else max(map(_tolerance, answer.outputs.values()))
            ordered, moved = reorder_rows(got, answer.outputs, self.sorted_outputs, Tolerance(limit))
            if moved and not isinstance(again := self._compare_outputs(ordered, answer), _Mismatch):
                return again, moved
        return result if isinstance(result, _Mismatch) else (result, 0)

    def _compare_outputs(
        self, results: Mapping[str, Array], answer: ReferenceOutputs
    ) -> dict[str, OutputError] | _Mismatch:
        errors = {}
        for name, want in answer.outputs.items():
            got = results[name]
            limit = self.tolerance if self.tolerance is not None else _tolerance(want)
            if got.dtype != want.dtype:
                raise AccuracyError(
                    f"output `{name}` of {self.what} is {got.dtype} and {want.dtype} in the source",
                    hint="report it with the source; output types are part of a model",
                )
            if got.shape != want.shape:
                there = f"{format_shape(want.shape)} in the source"
                return _Mismatch(f"output `{name}` is {format_shape(got.shape)}, and {there}", name)
            errors[name] = error = compare_output(
                got, want, self.rounding.setdefault(name, {}), floor=self.floors.get(name, 0.0)
            )
            if not error.max_rel <= limit:
                place = (
                    "" if error.channel is None else f"channel {error.channel.index} (axis {error.channel.axis}) of "
                )
                apart = f"differs by {error.max_rel:.2g} of its largest value, {limit:g} is allowed"
                return _Mismatch(f"{place}output `{name}` {apart}", name)
        return errors


_MAX_REDRAWS = 3


def _redraw_inputs(exported: Exported, answer: ReferenceOutputs) -> Iterator[ReferenceOutputs]:
    """Source outputs for other inputs of the same shapes."""
    for seed in range(_MAX_REDRAWS):
        feeds = feeds_at(exported, answer.shapes, 1000 + seed)
        if all(equal_outputs(array, answer.feeds[name]) for name, array in feeds.items()):
            return  # read from a file
        try:
            yield replace(answer, feeds=feeds, outputs=exported.reference(feeds))
        except ModelError as error:
            log.info("the source rejects other inputs: %s", error.message)
            return


def _format_shapes(answer: ReferenceOutputs) -> str:
    return ", ".join(f"{name} {size}" for name, size in answer.sizes.items()) or "the example's sizes"


def _tolerance(array: Array) -> float:
    return _TOLERANCE_16_BIT if array.dtype.itemsize == 2 and array.dtype.kind not in "iu" else TOLERANCE


def _failed_node(error: Exception) -> str | None:
    match = re.search(r"Name:\s*'([^']+)'", str(error))
    return match[1] if match else None


def _output_symbols(references: ReferenceRuns) -> dict[str, dict[int, str | None]]:
    """Symbol of every changing output axis."""
    found: dict[str, dict[int, str | None]] = {}
    for name, first in references[0].outputs.items():
        ranks = {answer.outputs[name].ndim for answer in references}
        for at in range(first.ndim if len(ranks) == 1 else 0):
            seen = [answer.outputs[name].shape[at] for answer in references]
            if len(set(seen)) > 1:
                found.setdefault(name, {})[at] = next(
                    (
                        symbol
                        for symbol in references[0].sizes
                        if all(answer.sizes[symbol] == size for answer, size in zip(references, seen, strict=True))
                    ),
                    None,
                )
    return found


_SIZED_BY_VALUES = frozenset("NonZero NonMaxSuppression Unique Compress Loop If".split())


def _constant_output_sizes(proto: ModelProto, references: ReferenceRuns) -> dict[str, dict[int, int]]:
    """Size of every constant output axis; empty if values may decide sizes."""
    still = any(len({answer.sizes[symbol] for answer in references}) < 2 for symbol in references[0].sizes)
    if still or any(place.node.op_type in _SIZED_BY_VALUES for place in walk.nodes(proto)):
        return {}
    return {
        name: {
            at: size
            for at, size in enumerate(first.shape)
            if all(answer.outputs[name].shape[at : at + 1] == (size,) for answer in references)
        }
        for name, first in references[0].outputs.items()
    }


def _moves_by_itself(model: Model, feeds: Mapping[str, Array], limit: float) -> bool:
    """Whether rounding (a change of the inputs by a sixty-fourth of the limit), or another order of equal scores, moves the
    graph's outputs beyond the limit."""
    ranked = sorted_outputs(model.proto)
    tolerance = Tolerance(limit, max_replaced_rows=0.0, allow_ties=False, roundoff=limit / 64)
    try:
        plain = reference_session(model.path, model.signature)
        own = measure_sensitivity(model, plain.run, feeds, plain.run(feeds), ranked, tolerance)
    except TrtEngineError:
        return False
    return not all(map(tolerance.accepts, own.values()))


# ------------------------------------------------------------------------------------------------ what froze


def _check_dynamic_inputs(proto: ModelProto, exported: Exported, references: ReferenceRuns) -> None:
    """`AccuracyError` for a requested dynamic axis that is static in the graph."""
    for value in proto.graph.input:
        dims = value.type.tensor_type.shape.dim
        for at, symbol in exported.symbols.get(value.name, {}).items():
            if at < len(dims) and dims[at].HasField("dim_value"):
                place = exported.specialized()
                where = f"; it was frozen at {place}" if place else ""
                raise AccuracyError(
                    f"`{symbol}` is frozen at {dims[at].dim_value}: axis {at} of the input `{value.name}` came out of the "
                    f"{exported.exporter} exporter as a number{where}",
                    hint="take the size from the tensor where it is used (`x.shape[0]`, `x.flatten(1)`), not as an `int`; "
                    f"or leave `{symbol}` out of `--dynamic` (`--static` leaves no axis open)",
                )


def _mismatch_error(
    proto: ModelProto,
    exported: Exported,
    references: ReferenceRuns,
    answer: ReferenceOutputs,
    wrong: _Mismatch,
    what: str,
) -> AccuracyError:
    """Error for a graph that differs from its source at these sizes."""
    base, stated = references[0], wrong.message
    moved = [name for name in answer.sizes if answer.sizes[name] != base.sizes.get(name)]
    if not moved:
        hints = {
            "dynamo": "the other exporter may do better: `--exporter torchscript`",
            "torchscript": "the other exporter may do better: `--exporter dynamo`",
            "tf2onnx": "`--tolerance` sets what is accepted: TensorFlow's bicubic resize has a table of 1024 weights, "
            "and TFLite with quantised weights rounds activations too",
        }
        return AccuracyError(
            f"{what} differs from its source on the inputs it was exported with: {stated}",
            hint="; ".join(filter(None, (hints.get(exported.exporter), "`-vv` shows details"))),
        )
    symbols = ", ".join(f"`{name}`" for name in moved)
    at = ", ".join(str(base.sizes[name]) for name in moved)
    where = _locate_mismatch(proto, base, answer, wrong.output, wrong.failed_node)
    return AccuracyError(
        f"{symbols} {'is' if len(moved) == 1 else 'are'} frozen at {at}: with {format_sizes(answer.sizes, moved)}, {stated}"
        + (f"; {where}" if where else ""),
        hint="take sizes from the tensor where they are used, not as constants; "
        f"or leave {symbols} out of `--dynamic`, or give {'its' if len(moved) == 1 else 'their'} range",
    )


def _locate_mismatch(
    proto: ModelProto, base: ReferenceOutputs, answer: ReferenceOutputs, output: str | None, failed: str | None
) -> str | None:
    """The node at which the size was frozen, the constant responsible, and the source line."""
    one, two = trace(proto, base.shapes), trace(proto, answer.shapes)
    steps = flatten(one.nodes)
    by_label = {walk.label(step.node): step for step in steps}
    step = _first_constant_target(steps, base, answer)
    if step is None and failed is not None:
        step = by_label.get(failed)
    if step is None:
        before, after = nonconforming_nodes(one), nonconforming_nodes(two)
        step = next((item for item in steps if walk.label(item.node) in after.keys() - before.keys()), None)
    if step is None and output is not None:
        step = freeze_point(one, two, output)
    if step is None:
        return None
    constant = _constant_of(step)
    whose = f", whose constant is {constant}" if constant else ""
    return f"it was frozen at {describe_node(step)}{whose}{_source_line(step.node)}"


_TARGETS = {"Reshape": 1, "Expand": 1, "Tile": 1}


def _first_constant_target(
    steps: list[TracedNode], base: ReferenceOutputs, answer: ReferenceOutputs
) -> TracedNode | None:
    """First node that takes a shape constant containing the frozen size and reads dynamic data."""
    frozen = {base.sizes[name] for name in answer.sizes if answer.sizes[name] != base.sizes.get(name)}
    for step in steps:
        index = _TARGETS.get(step.node.op_type)
        if index is None or len(step.inputs) <= index:
            continue
        target, data = step.inputs[index], step.inputs[0]
        if target is None or target.value is None or not target.is_constant or data is None or data.shape is None:
            continue
        stated = target.value.reshape(-1).tolist()
        if any(size in frozen and _follows_data(size, at, data.shape) for at, size in enumerate(stated)):
            return step
    return None


def _constant_of(step: TracedNode) -> str | None:
    """Stored operand of a node: name, shape, and values if small."""
    for at, (name, fact) in enumerate(zip(step.node.input, step.inputs, strict=False)):
        if (
            fact is None
            or not fact.is_constant
            or fact.shape is None
            or (not at and len(step.inputs) > 1 and step.node.op_type in _TARGETS)
        ):
            continue
        shown = f"`{name}`, {format_shape(fact.shape)}"
        if fact.value is not None and fact.value.size <= 8:
            shown += f", {fact.value.reshape(-1).tolist()}"
        return shown
    return None


_SHAPE_INPUTS = 8
"""Sizes up to this are common: in a constant, such a number means the data's size only if both are at the same axis."""


def _follows_data(size: int, at: int, shape: Shape) -> bool:
    return (at < len(shape) and shape[at] == size) or (size > _SHAPE_INPUTS and size in shape)


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_SCRIPT_FRAME = re.compile(r"(\S+\.py)\((\d+)\): (\w+)")


def _source_line(node: NodeProto) -> str:
    """Source line of a node, as recorded by the exporters."""
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

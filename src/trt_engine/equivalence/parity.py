"""Parity of an engine or rewritten model with a model in plain ONNX Runtime, on the same input."""

from __future__ import annotations

import logging
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import ModelProto, TensorProto, ValueInfoProto, numpy_helper

from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.host_session import OnnxRuntimeSession, reference_session
from trt_engine.backends.onnxruntime.options import OnnxRuntimeOptions
from trt_engine.config.profiles import Profile
from trt_engine.equivalence.output_error import NOT_COMPARABLE
from trt_engine.equivalence.random_inputs import Values, each_branch, runnable_signature
from trt_engine.equivalence.sorted_outputs import compare_outputs, reverse_ties, sorted_outputs
from trt_engine.equivalence.tolerance import MAX_NOISE, NO_FIGURE, TOLERANCES, Tolerance
from trt_engine.errors import TrtEngineError
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import make_names_unique
from trt_engine.graph.emulate_half import emulate_half_precision, exceeds_emulation
from trt_engine.graph.load import read_proto
from trt_engine.model import Model
from trt_engine.records.parity import OutputError, Parity
from trt_engine.runtime.feeds import at_shapes, complete_shapes, random_feeds, set_values
from trt_engine.tensors import Choice, Shape, Signature, Tensors, format_shape

log = logging.getLogger(__name__)

REFERENCE = "onnxruntime on the CPU, no graph optimisation"


@dataclass(frozen=True, slots=True)
class ParityFeeds:
    """Inputs for parity."""

    feeds: Tensors
    described: str
    """How they were made."""
    others: tuple[tuple[Tensors, str], ...] = ()
    """Inputs of other branches, and how they were made."""
    choices: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    """What switches are set to: the value of `feeds` first."""
    given: bool = False
    """True for values of a file, which stand for what the model takes."""

    drawn: frozenset[str] = frozenset()
    """The inputs that are random in [0, 1)."""

    def closer(self, tolerance: Tolerance, sensitivity: Mapping[str, OutputError]) -> ParityFeeds:
        """Random inputs near 0.5 instead: a model may amplify the rounding of any engine at numbers that it was not made
        for, and computes the same layers here."""
        own = max(tolerance.metric_value(item) or 0.0 for item in sensitivity.values())
        feeds = {
            name: (0.45 + 0.1 * np.asarray(array)).astype(np.asarray(array).dtype) if name in self.drawn else array
            for name, array in self.feeds.items()
        }
        moves = f"{own:.2g} of its scale" if own < NO_FIGURE else "more than its format holds, or its scores tie"
        return replace(
            self,
            feeds=feeds,
            described=f"{self.described}, of 0.45 to 0.55: of 0 to 1 the model itself moves with rounding by {moves}",
        )


def parity_feeds(
    model: Model,
    profile: Profile,
    size_values: Mapping[str, Sequence[int]] | None = None,
    *,
    engine: Path | None = None,
    given: Tensors | None = None,
    named: str = "",
) -> ParityFeeds:
    """Seeded inputs of a small batch: one, and one more for each other branch that plain ONNX Runtime runs.

    `given` are the values of inputs that are not random, `named` where they come from.

    `values` are the usual ones of inputs that hold sizes: they fit the profile's usual shapes, which are taken whole then.
    Inputs that could end a process are tried in another first, with the `engine` too where it is a graph.
    """
    shapes = (
        {name: span.opt for name, span in profile.ranges.items()}
        if size_values
        else small_shapes(model.signature, profile)
    )
    given = given or {}
    if given:
        shapes = given_shapes(model.signature, profile, given)
    values: Values = {**(size_values or {}), **at_shapes(model.signature, given, shapes)}
    signature = set_values(model.signature, given)
    signature = runnable_signature(model.path, signature, shapes, 0, values, engine=engine)
    described = ",".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items() if name not in given)
    described += "".join(f", `{name}` is {format_shape(tuple(item))}" for name, item in (size_values or {}).items())
    if described or not given:
        described = f"seeded random, seed 0, {described}"
    described = "; ".join(filter(None, (named, described)))
    made = [(random_feeds(one, shapes, 0, values), f"{described}{text}") for one, text in each_branch(signature)]
    free = [spec for spec in signature.inputs if not spec.choices and spec.name not in values]
    return ParityFeeds(
        *made[0],
        tuple(made[1:]),
        {spec.name: spec.choices for spec in signature.inputs if spec.choices},
        given=bool(given),
        drawn=frozenset(spec.name for spec in free if spec.dtype.startswith(("float", "bfloat")) and spec.role is None),
    )


_WIDER = {"x5": 5.0, "x100": 100.0, "x1": 1.0}
_EDGES = (0.0, -0.0, 1e-6, -1e-6, 1e6, -1e6)
_WIDER_LIMIT = 4.0
"""Times the usual limit that engines may be off on numbers that no model was made for, which amplify rounding."""


def wider_feeds(feeds: Tensors, signature: Signature, tolerance: Tolerance) -> Iterator[tuple[dict[str, Any], str]]:
    """The same inputs with other real numbers, and other whole ones of 8 bits, and how they were made: with a sign, normal
    x5, x100 and x1, and at edges (0, a millionth, a million; the ends of an 8-bit type).

    None for a model whose real inputs decide sizes, steps or branches. Ids, sizes and switches keep their values. A model in
    FP16, which 65,504 ends, and one in TF32, whose rounding larger numbers amplify (the example detector on an H200: 0.12
    of the scale at x100), get x1 alone.
    """
    real = [spec for spec in signature.inputs if spec.dtype.startswith(("float", "bfloat")) or spec.dtype in _BYTES]
    if not real or any(spec.role or spec.choices for spec in real):
        return
    short = tolerance.half or tolerance.roundoff == TOLERANCES["tf32"].roundoff
    for how in ("x1",) if short else (*list(_WIDER)[:2], "at edges", "x1"):
        made = {name: np.asarray(value) for name, value in feeds.items()}
        for spec in real:
            given = made[spec.name]
            random = np.random.default_rng([zlib.crc32(f"{spec.name} {how}".encode())])
            if spec.dtype in _BYTES:
                ends = (0, 255) if spec.dtype == "uint8" else (-128, 127)
                values = random.choice(ends, given.shape) if how == "at edges" else random.integers(*ends, given.shape)
            elif how == "at edges":
                values = random.choice(_EDGES, given.shape)
            else:
                values = random.standard_normal(given.shape) * _WIDER[how]
            made[spec.name] = values.astype(given.dtype)
        yield made, "at edges" if how == "at edges" else f"normal {how}"


_BYTES = ("uint8", "int8")


def wider_tolerance(tolerance: Tolerance) -> Tolerance:
    """What an engine may be off on `wider_feeds`: more than usual, unless the limit is explicit."""
    if tolerance.explicit:
        return tolerance
    return replace(tolerance, limit=min(_WIDER_LIMIT * tolerance.limit, MAX_NOISE), noise=2 * tolerance.noise)


def measure_wider(
    model: Model, run: Callable[[Tensors], Mapping[str, Any]], feeds: Tensors, tolerance: Tolerance, seconds: float
) -> list[Parity]:
    """Parity on `wider_feeds`, where plain ONNX Runtime takes them and its outputs are finite: on one such input always, on
    more while they take this long together."""
    tolerance = wider_tolerance(tolerance).for_graph(model.proto)
    plain, ranked = reference_session(model.path, model.signature), sorted_outputs(model.proto)
    started, found, taken = time.monotonic(), list[Parity](), 0.0
    for wider, how in wider_feeds(feeds, model.signature, tolerance):
        if found and time.monotonic() - started + taken > seconds:
            log.debug("parity was not measured on more inputs: it takes longer than %.1f s", seconds)
            break
        began = time.monotonic()
        try:
            expected = plain.run(wider)
        except TrtEngineError as error:
            log.debug("plain ONNX Runtime does not take inputs %s: %s", how, error.message)
            continue
        if not all(_is_finite(value) for value in expected.values()):
            continue

        def sensitivity(wider: Tensors = wider, expected: Mapping[str, Any] = expected) -> dict[str, OutputError]:
            return measure_sensitivity(model, plain.run, wider, expected, ranked, tolerance)

        found.append(judge_outputs(run(wider), expected, ranked, f"real inputs {how}", tolerance, sensitivity))
        taken = time.monotonic() - began
    return found


def _is_finite(value: Any) -> bool:
    array = np.asarray(value)
    return array.dtype.kind not in "fV" or bool(np.isfinite(array.astype(np.float64)).all())


def measure_parity(
    model: Model,
    run: Callable[[Tensors], Mapping[str, Any]],
    feeds: Tensors,
    described: str,
    tolerance: Tolerance,
) -> Parity:
    """How far `run` is from plain ONNX Runtime on `feeds`.

    What plain ONNX Runtime raises for a model it does not run passes through; nothing is judged then.
    """
    tolerance = tolerance.for_graph(model.proto)
    plain = reference_session(model.path, model.signature)
    expected, ranked = plain.run(feeds), sorted_outputs(model.proto)

    def sensitivity() -> dict[str, OutputError]:
        return measure_sensitivity(model, plain.run, feeds, expected, ranked, tolerance)

    return judge_outputs(run(feeds), expected, ranked, described, tolerance, sensitivity)


def measure_sensitivity(
    model: Model,
    run: Callable[[Tensors], Mapping[str, Any]],
    feeds: Tensors,
    expected: Mapping[str, Any],
    ranked: Collection[str],
    tolerance: Tolerance,
) -> dict[str, OutputError]:
    """How far `run`, whose outputs on `feeds` are `expected`, moves with the last digit of the input; of a model in FP16
    also how far the rounding of each result and weight moves it, which plain ONNX Runtime leaves out on the CPU: the
    larger of both. Infinite for outputs that depend on the order of equal scores, which is each library's own.
    """
    moved = run(perturb_feeds(feeds, model.signature, tolerance.roundoff))
    found = compare_outputs(moved, expected, ranked, tolerance)
    if ranked and (turned := _run_other_ties(model, feeds)) is not None:
        apart, tied = compare_outputs(turned, expected, ranked, tolerance), replace(NOT_COMPARABLE, rows_moved=1)
        found |= {name: tied for name, error in apart.items() if not tolerance.accepts(error)}
    rounded = _run_rounded(model, feeds, tolerance.roundoff) if tolerance.half else None
    if rounded is None:
        return found
    other = compare_outputs(rounded, expected, ranked, tolerance)
    return {name: _larger(error, other[name]) if name in other else error for name, error in found.items()}


def _larger(one: OutputError, two: OutputError) -> OutputError:
    return replace(
        one,
        max_rel=max(one.max_rel, two.max_rel),
        rms_rel=max((item.rms_rel for item in (one, two) if item.rms_rel is not None), default=None),
        noise=max((item.noise for item in (one, two) if item.noise is not None), default=None),
    )


def _run_other_ties(model: Model, feeds: Tensors) -> dict[str, Any] | None:
    """The outputs where sorts take the last of equal scores first; None where that cannot be."""
    proto = read_proto(model.path)
    try:
        if reverse_ties(proto):
            loaded = _open_edited(proto, model.path)
            return OnnxRuntimeSession(loaded, model.signature, (), {}, interruptible=True).run(feeds)
    except TrtEngineError as error:
        log.debug("the other order of equal scores is not tried: %s", error.message)
    return None


def _run_rounded(model: Model, feeds: Tensors, roundoff: float) -> dict[str, Any] | None:
    """The outputs of a model in FP16 with every result rounded and every FP16 weight changed by up to `roundoff` of itself
    and rounded, as folding a normalisation into it does, computed in FP32; None where that cannot be."""
    if exceeds_emulation(model):
        return None
    try:
        half, rng = read_proto(model.path, weights=True), np.random.default_rng(0)
        for tensor in walk.tensors(half):
            if tensor.data_type == TensorProto.FLOAT16 and len(tensor.dims) > 1:
                array = numpy_helper.to_array(tensor)
                moved = array * (1 + rng.uniform(-roundoff, roundoff, array.shape))
                tensor.CopyFrom(numpy_helper.from_array(moved.astype(np.float16), tensor.name))
        proto = emulate_half_precision(half, model.path.parent)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rounded.onnx"
            path.write_bytes(proto.SerializeToString())
            return reference_session(path, model.signature).run(feeds)
    except TrtEngineError as error:
        log.debug("rounding is not emulated: %s", error.message)
        return None


def judge_outputs(
    got: Mapping[str, Any],
    expected: Mapping[str, Any],
    ranked: Collection[str],
    described: str,
    tolerance: Tolerance,
    sensitivity_of: Callable[[], dict[str, OutputError]],
) -> Parity:
    """Parity of outputs with the reference. `ranked` are outputs that the graph sorts; `sensitivity_of` is called for
    where one is beyond the tolerance: how far the reference moves from itself."""
    errors = compare_outputs(got, expected, ranked, tolerance)
    sensitivity: dict[str, OutputError] = {}
    if not tolerance.explicit and not all(tolerance.accepts(error) for error in errors.values()):
        sensitivity = sensitivity_of()
    passed = all(tolerance.violation(error, sensitivity.get(name)) is None for name, error in errors.items())
    return Parity(
        reference=REFERENCE,
        inputs=described,
        tolerance=tolerance.limit,
        passed=passed and errors.keys() == expected.keys(),
        outputs=errors,
        metric="rms_rel" if tolerance.use_rms else "max_rel",
        sensitivity=sensitivity,
        limits={
            name: limit for name, item in sensitivity.items() if (limit := tolerance.limit_for(item)) > tolerance.limit
        },
    )


def perturb_feeds(feeds: Tensors, signature: Signature, roundoff: float, seed: int = 0) -> dict[str, Any]:
    """The same input with every real number changed by up to `roundoff` of itself; switches keep their values."""
    rng = np.random.default_rng(seed)
    arrays = {name: np.asarray(array) for name, array in feeds.items()}
    fixed = {spec.name for spec in signature.inputs if spec.choices}
    return {
        name: (array * (1 + rng.uniform(-roundoff, roundoff, array.shape))).astype(array.dtype)
        if array.dtype.kind == "f" and name not in fixed
        else array
        for name, array in arrays.items()
    }


def given_shapes(signature: Signature, profile: Profile, given: Tensors, index: int = 0) -> dict[str, Shape]:
    """Shapes within the profile for these values: all of their rows, else as many as the small batch has."""
    usual = small_shapes(signature, profile)
    rows = next((usual[spec.name][axis] for spec in signature.inputs for axis in signature.batch_axes(spec)), None)
    whole, shapes = (complete_shapes(signature, usual, given, batch) for batch in (None, rows))
    inside = all(span.contains(whole[name]) for name, span in profile.ranges.items())
    found = whole if inside else shapes
    profile.check({name: SimpleNamespace(shape=shape) for name, shape in found.items()}, index)
    return found


def small_shapes(signature: Signature, profile: Profile) -> dict[str, Shape]:
    """The profile's usual shapes with the smallest batch above one that it allows, else its smallest."""
    shapes = {}
    for spec in signature.inputs:
        span = profile.ranges[spec.name]
        sizes = list(span.opt)
        for axis in signature.batch_axes(spec):
            sizes[axis] = min(max(2, span.min[axis]), span.max[axis])
        shapes[spec.name] = tuple(sizes)
    return shapes


def open_with_outputs(path: Path, names: Sequence[str], level: str = "none") -> ort.InferenceSession:
    """A session that gives these tensors, outputs or not, weights read from where they are."""
    proto: ModelProto = read_proto(path)
    stated = {item.name for item in proto.graph.output}
    proto.graph.output.extend(ValueInfoProto(name=name) for name in names if name not in stated)
    return _open_edited(proto, path, level)


def _open_edited(proto: ModelProto, path: Path, level: str = "none") -> ort.InferenceSession:
    make_names_unique(proto)
    made = session.session_options(OnnxRuntimeOptions(arena=False), level=level)
    made.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent.resolve()))
    try:
        return ort.InferenceSession(
            proto.SerializeToString(), made, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except session.ERRORS as error:
        raise session.translate_load_error(error, path) from error

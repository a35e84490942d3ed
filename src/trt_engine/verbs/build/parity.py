"""Parity of a built engine with its source model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trt_engine import errors
from trt_engine.backend import BackendSpec, get_backend
from trt_engine.backends.onnxruntime.host_session import reference_session
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile
from trt_engine.config.settings import from_values
from trt_engine.device import parse_device
from trt_engine.engine import Engine, payload_files, reference_path
from trt_engine.equivalence.parity import (
    REFERENCE,
    ParityFeeds,
    measure_parity,
    measure_sensitivity,
    measure_wider,
    parity_feeds,
    wider_tolerance,
)
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.reference_file import MAX_REFERENCE_BYTES, ReferenceData, write_reference
from trt_engine.equivalence.row_independence import BatchAxes, profile_shapes, row_dependence, wrong_rows
from trt_engine.equivalence.sorted_outputs import sorted_outputs
from trt_engine.equivalence.tolerance import Tolerance
from trt_engine.format import format_bytes
from trt_engine.graph.cost import model_cost
from trt_engine.model import GraphIndex, Model
from trt_engine.precision.cpu_qdq import has_8_bit_weights, weight_bits
from trt_engine.precision.precision_check import graph_precision
from trt_engine.precision.samples import open_samples
from trt_engine.records.parity import OutputError, Parity, clip_infinite
from trt_engine.records.passport import NOT_VALIDATED, Validation
from trt_engine.runtime.feeds import at_shapes, set_values
from trt_engine.tensors import Choice, Signature, Tensors, format_shape
from trt_engine.verbs.build.precision import PreparedModel
from trt_engine.verbs.calibration_images import images_as_inputs
from trt_engine.verbs.given_model import without_folder
from trt_engine.verbs.load import load

if TYPE_CHECKING:
    from trt_engine.verbs.build.retry import Attempt
    from trt_engine.verbs.build.run import BuildPlan

log = logging.getLogger(__package__)

Run = Callable[[Tensors], Mapping[str, Any]]

_WIDER_SHARE = 0.5
"""Share of the time that parity took, for more inputs after a first one."""
DOES_NOT_RUN = "engine_does_not_run"
"""The cause of a failure on inputs that plain ONNX Runtime takes, or may take."""
_MAX_ROWS = 8
"""Most rows of calibration data for parity, within the profile."""


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """Result of the parity check of a new engine."""

    parity: Parity | None = None
    validation: Validation | None = None
    """The check deferred to a machine that can load the engine."""
    note: str | None = None
    """Why nothing was judged."""
    row_dependence: str | None = None
    """Why requests must not be joined."""
    choices: dict[str, tuple[Choice, ...]] = field(default_factory=dict)
    """The values of switches that the model runs with."""


def check_parity(engine: Engine, plan: BuildPlan, prepared: PreparedModel, attempt: Attempt) -> ParityCheck:
    """Parity with the model, or why it could not be judged; `AccuracyError` when the engine is wrong.

    It is compared with the graph that was built: a cast or quantised copy, where the precision required one. The
    difference from the model itself is measured too. `attempt` has what the builder was given in the end, where the
    retry changed the graph. An engine that cannot be loaded here gets reference inputs and outputs beside it instead.
    """
    model, config, tolerance = prepared.model, plan.config, plan.tolerance(engine)
    backend_spec = get_backend(config.backend)
    options: dict[str, str] | str = (
        backend_spec.load_function("parity_options")(attempt.model.path, config)
        if backend_spec.provides("parity_options")
        else {}
    )
    if isinstance(options, str):
        return _defer_check(engine, plan, prepared, attempt, options)
    started = time.monotonic()
    with load(engine, verify=False, allow_fallback=config.allow_fallback, options=options) as runner:
        infer: Run = runner.infer

        def run(feeds: Tensors) -> Mapping[str, Any]:
            try:
                return infer(feeds)
            except errors.MemoryExhausted:
                raise
            except errors.TrtEngineError as error:
                raise _EngineFailed(error) from error

        drawn = ParityFeeds({}, "")
        try:
            drawn = _parity_feeds(engine, plan, prepared)
            feeds, described = drawn.feeds, drawn.described
            found = measure_parity(model, run, feeds, described, tolerance)
            if drawn.drawn and _is_undecided(found, tolerance):
                drawn = drawn.closer(tolerance, found.sensitivity)
                feeds, described = drawn.feeds, drawn.described
                log.info("parity is measured on inputs closer together: %s", described)
                found = measure_parity(model, run, feeds, described, tolerance)
            if prepared.steps:
                found = replace(
                    found,
                    reference=_reference_runtime(prepared),
                    source_errors=_source_errors(plan.model, model, feeds, described, tolerance, run),
                )
            others = [measure_parity(model, run, *other, tolerance) for other in drawn.others]
            seconds = _WIDER_SHARE * (time.monotonic() - started)
            wider = [] if drawn.given else measure_wider(model, run, feeds, tolerance, seconds)
        except errors.MemoryExhausted:
            raise
        except _EngineFailed as failed:
            raise errors.BuildError(
                f"the engine was built and does not run: {failed.error.message}",
                hint=failed.error.hint or "`--no-parity` builds without trying it",
                cause=DOES_NOT_RUN,
            ) from failed.error
        except errors.TrtEngineError as error:  # the reference cannot run it: nothing to compare with
            checked = _check_alone(run, drawn.feeds, error, model, given=bool(plan.given.values))
            return replace(checked, row_dependence=_check_profiles(engine, plan, prepared, infer, drawn.feeds))
        milder = safer_option(backend_spec, engine)
        fused = engine.passport.build.fusions is not None
        hint = _overflow_hint(engine, config.device, model.graph) + "`--parity-rtol` allows more"
        hint += f", `-O {milder}` rewrites less" if milder else ""
        hint += ", `--no-fuse` leaves out what the build fused" if fused else ""
        for one in (found, *others):
            require_accuracy(one, tolerance, hint, at=f" ({one.inputs})" if others else "")
        wider = [one for one in wider if not _is_undecided(one, wider_tolerance(tolerance))]
        for one in wider:
            require_accuracy(one, wider_tolerance(tolerance), hint, at=f" (on {one.inputs} alone)")
        found = _with_branches(found, others)
        if wider:
            found = replace(found, inputs="; ".join([found.inputs, *(one.inputs for one in wider)]))
        largest = max((item.max_rel for item in found.outputs.values()), default=0.0)
        log.info("parity with plain ONNX Runtime: largest difference %.2g of the channel's scale", largest)
        dependence = _check_profiles(engine, plan, prepared, infer, feeds)
    return ParityCheck(found, row_dependence=dependence, choices=drawn.choices)


def _is_undecided(found: Parity, tolerance: Tolerance) -> bool:
    """Whether each output that is off cannot be judged: the model itself moves with rounding about as far."""
    off = [
        (error, own)
        for name, error in found.outputs.items()
        if tolerance.violation(error, own := found.sensitivity.get(name)) is not None
    ]
    return bool(off) and all(tolerance.is_undecided(error, own) for error, own in off)


def _with_branches(found: Parity, others: Sequence[Parity]) -> Parity:
    """The parity of the first branch, with each output's differences from the branch where they are largest."""
    for other in others:
        larger = {
            name: error
            for name, error in other.outputs.items()
            if (getattr(error, found.metric) or 0) > (getattr(found.outputs[name], found.metric) or 0)
        }
        found = replace(
            found,
            inputs=f"{found.inputs}; {other.inputs}",
            outputs=found.outputs | larger,
            sensitivity=found.sensitivity
            | {name: other.sensitivity[name] for name in larger if name in other.sensitivity},
            limits=found.limits | {name: other.limits[name] for name in larger if name in other.limits},
        )
    return found


def _check_profiles(engine: Engine, plan: BuildPlan, prepared: PreparedModel, run: Run, feeds: Tensors) -> str | None:
    """One run at the smallest, usual and largest shapes of each profile, and one more at the largest batch, of other rows:
    why rows depend on each other, None where they do not.

    `ModelError` where the model itself does not run there or loses the batch, `BuildError` where the engine alone fails.
    `feeds` are inputs that the engine has run on.
    """
    model, signature, config = prepared.model, engine.signature, plan.config
    if _size_input_values(get_backend(config.backend), config):
        return None  # values that are sizes fit the usual shapes alone
    known = set_values(model.signature, plan.given.values)
    axes, reason = BatchAxes.of(signature), None
    rows, largest, outputs_there = 1, feeds, None
    for profile in engine.passport.profiles:
        ends = profile_shapes(profile)
        batched = any((axes.rows(shapes) or 1) > 1 for shapes in ends)
        for shapes in ends:
            same = shapes == {name: tuple(np.shape(value)) for name, value in feeds.items()}
            if same and not batched:
                continue  # parity ran it
            values = at_shapes(known, plan.given.values, shapes)
            try:
                given = feeds if same else random_inputs(model.path, known, shapes, values=values)
            except errors.ModelError as error:  # tried in a child: random values end it
                log.warning("the engine was not tried at an end of its profile: %s", error.message)
                continue
            try:
                outputs = run(given)
            except errors.MemoryExhausted:
                raise
            except errors.TrtEngineError as error:
                at = ",".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items())
                if (fault := _model_fault(error, model, given, at)) is not None:
                    raise fault from error
                if takes_numbers_alone(signature):
                    raise errors.BuildError(
                        f"the engine was built and does not run at {at}, which is in its profile: {error.message}",
                        hint=error.hint or "`--no-parity` builds without trying it",
                        cause=DOES_NOT_RUN,
                    ) from error
                log.warning("the engine was not tried at %s: random inputs are not valid there (%s)", at, error.message)
                continue
            if batched:
                reason = reason or wrong_rows(signature, shapes, outputs)
            if (size := axes.rows(shapes) or 0) > rows:
                rows, largest, outputs_there = size, given, outputs
    if reason is None and outputs_there is not None:
        ranked = sorted_outputs(model.proto)
        reason = row_dependence(run, signature, largest, outputs_there, ranked, plan.tolerance(engine))
    return reason


def takes_numbers_alone(signature: Signature) -> bool:
    """Whether every input is floating point without a role: no random value is then invalid."""
    return all(
        spec.role is None and not spec.choices and spec.dtype.startswith(("float", "bfloat"))
        for spec in signature.inputs
    )


def _model_fault(error: errors.TrtEngineError, model: Model, feeds: Tensors, at: str) -> errors.ModelError | None:
    """The error of a model that runs nowhere on these inputs, whose values cannot be the reason; None where it may run."""
    if not takes_numbers_alone(model.signature) or _reference_outputs(model, feeds) is not None:
        return None
    return errors.ModelError(
        f"the model does not run at {at}, neither in the engine nor in plain ONNX Runtime: {error.message}",
        hint="`trt-engine lint` names the step; export it again with a dynamic batch, or build it for the sizes that it has",
    )


def require_accuracy(parity: Parity, tolerance: Tolerance, hint: str, *, at: str = "") -> None:
    """`AccuracyError` for outputs that differ by more than is allowed."""
    for name, apart in parity.outputs.items():
        own = parity.sensitivity.get(name)
        if (objection := tolerance.violation(apart, own)) is not None:
            if tolerance.is_undecided(apart, own):
                hint = f"the model itself moves as far here (rounding, equal scores): `--inputs` of real data tells; {hint}"
            raise errors.AccuracyError(
                f"output `{name}` of the engine differs from plain ONNX Runtime{at}: {objection} (largest difference "
                f"{apart.max_abs:.3g}, cosine {apart.cosine:.4f})",
                hint=hint,
            )
    if not parity.passed:
        raise errors.AccuracyError(
            "the engine does not give all outputs of its model", hint="`trt-engine inspect` lists them"
        )


def _reference_runtime(prepared: PreparedModel) -> str:
    return f"{REFERENCE}, of the model {prepared.steps[0].partition(':')[0]}" if prepared.steps else REFERENCE


def _no_reference_reason(error: errors.TrtEngineError, model: Model) -> str:
    """The reason, a copy that was made for the build by its name alone: it will be gone."""
    why = error.message.replace(str(model.path), model.path.name)
    return f"plain ONNX Runtime does not run this model here ({why})"


def _check_alone(run: Run, feeds: Tensors, error: errors.TrtEngineError, model: Model, *, given: bool) -> ParityCheck:
    """The check without a reference: `AccuracyError` for outputs that are not finite. An engine that does not run either is
    not judged where the inputs may be what neither takes, else the model is at fault."""
    why = _no_reference_reason(error, model)
    try:
        outputs = run(feeds) if feeds else {}
    except _EngineFailed as failed:
        log.debug("the engine does not run on these inputs either: %s", failed.error.message)
        at = ",".join(f"{name}:{format_shape(np.shape(value))}" for name, value in feeds.items())
        if (fault := _model_fault(failed.error, model, feeds, at)) is not None:
            raise fault from failed.error
        outputs = {}
    for name, value in outputs.items():
        if wrong := _count_not_finite(np.asarray(value)):
            raise errors.AccuracyError(
                f"{wrong} of {np.size(value)} values of the engine's output `{name}` are not finite, and {why}",
                hint="`--precision fp32` computes in FP32; `--no-parity` builds unchecked, where such outputs are right",
            )
    note = f"parity was not judged: {why}" + ("" if given else "; `--inputs FILE.npz` has values that it runs with")
    log.warning("%s", note)
    return ParityCheck(note=note)


def _count_not_finite(array: np.ndarray[Any, Any]) -> int:
    """Values that are infinite or not a number; none in strings."""
    if array.dtype.kind in "OSU":
        return 0
    return int((~np.isfinite(array if array.dtype.kind == "c" else array.astype(np.float64))).sum())


# ------------------------------------------------------------------------------------------------ deferred


def _defer_check(
    engine: Engine, plan: BuildPlan, prepared: PreparedModel, attempt: Attempt, reason: str
) -> ParityCheck:
    """The check deferred to a machine that can load the engine (`validate`): reference inputs and outputs are written beside
    the engine, and the passport gets all that the judgement needs of the model."""
    counts_layers = get_backend(plan.config.backend).provides("layers")
    asked = plan.config.precision if counts_layers else None
    graph = graph_precision(asked, attempt.model.proto, prepared.excluded) if asked is not None else None
    validation = Validation(
        state="deferred",
        deferred_reason=reason,
        checks=("parity",) if graph is None else ("precision", "parity"),
        tolerance=plan.tolerance(engine).for_graph(prepared.model.proto).to_limits(plan.rounding),
        reference_runtime=_reference_runtime(prepared),
        graph=graph,
    )
    try:
        made, described, ranked, sensitivity = _make_reference(engine, plan, prepared)
    except errors.MemoryExhausted:
        raise
    except errors.TrtEngineError as error:
        validation = replace(validation, deferred_reason=f"{reason}; {_no_reference_reason(error, prepared.model)}")
    else:
        if made.nbytes > MAX_REFERENCE_BYTES:
            limit = format_bytes(MAX_REFERENCE_BYTES)
            large = f"reference inputs and outputs have {format_bytes(made.nbytes)}, more than {limit}"
            validation = replace(validation, deferred_reason=f"{reason}; {large}")
        else:
            if counts_layers:  # at the first profile's optimum, as a builder that loads its own engine counts them
                shapes = {name: span.opt for name, span in engine.passport.profiles[0].ranges.items()}
                made = replace(made, macs=dict(model_cost(attempt.model.proto, shapes).macs_by_node()))
            path = write_reference(reference_path(engine.path), made)
            validation = replace(
                validation,
                reference=payload_files(path)[0],
                inputs=described,
                sorted_outputs=ranked,
                sensitivity=sensitivity,
            )
    try:
        plain = reference_session(prepared.model.path, prepared.model.signature)
    except errors.MemoryExhausted:
        raise
    except errors.TrtEngineError:  # no kernels for it: the note has the reason
        dependence = None
    else:
        dependence = _check_profiles(engine, plan, prepared, plain.run, {})
    after = (
        "`trt-engine validate` checks it there" if validation.reference is not None else "it cannot be checked later"
    )
    note = f"{NOT_VALIDATED}: {validation.deferred_reason}; {after}"
    log.warning("%s", note)
    return ParityCheck(validation=validation, note=note, row_dependence=dependence)


def _make_reference(
    engine: Engine, plan: BuildPlan, prepared: PreparedModel, closer: ParityFeeds | None = None
) -> tuple[ReferenceData, str, tuple[str, ...], dict[str, OutputError]]:
    """Inputs as parity draws them and what plain ONNX Runtime makes of them, how they were made, the outputs that are
    sorted, and the model's own sensitivity. `closer` inputs are used instead where a model cannot be judged at these."""
    model, source, config = prepared.model, plan.model, plan.config
    tolerance = plan.tolerance(engine).for_graph(model.proto)
    plain = reference_session(model.path, model.signature)
    drawn = closer or _parity_feeds(engine, plan, prepared)
    feeds, described = drawn.feeds, drawn.described
    made = ReferenceData(_as_arrays(feeds), _as_arrays(plain.run(feeds)))
    if made.nbytes > MAX_REFERENCE_BYTES and not _size_input_values(get_backend(config.backend), config):
        feeds, described = _min_rows(feeds, engine), f"{described}, the first rows of them"
        made = ReferenceData(_as_arrays(feeds), _as_arrays(plain.run(feeds)))
    ranked = sorted_outputs(model.proto)
    try:
        found = measure_sensitivity(model, plain.run, feeds, made.outputs, ranked, tolerance)
    except errors.MemoryExhausted:
        raise
    except errors.TrtEngineError as error:
        log.debug("the sensitivity of `%s` is not known: %s", model.path.name, error.message)
        found = {}
    if closer is None and drawn.drawn and not all(map(tolerance.can_judge, found.values())):
        return _make_reference(engine, plan, prepared, closer=drawn.closer(tolerance, found))
    sensitivity = clip_infinite(found)
    if (
        prepared.steps
        and _same_interface(source, model)
        and (of_given := _reference_outputs(source, feeds)) is not None
    ):
        whole = replace(made, source_outputs=of_given)
        made = whole if whole.nbytes <= MAX_REFERENCE_BYTES else made
    return made, described, ranked, sensitivity


def _reference_outputs(model: Model, feeds: Tensors) -> dict[str, Any] | None:
    """Outputs of plain ONNX Runtime; None where it fails on the inputs."""
    try:
        return _as_arrays(reference_session(model.path, model.signature).run(feeds))
    except errors.MemoryExhausted:
        raise
    except errors.TrtEngineError as error:
        log.debug("plain ONNX Runtime does not run `%s` on these inputs: %s", model.path.name, error.message)
        return None


def _as_arrays(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value) for name, value in values.items()}


def _min_rows(feeds: Tensors, engine: Engine) -> dict[str, Any]:
    ranges = engine.passport.profiles[0].ranges
    return {
        spec.name: feeds[spec.name][: max(1, ranges[spec.name].min[0])] if 0 in spec.dynamic else feeds[spec.name]
        for spec in engine.signature.inputs
    }


# ------------------------------------------------------------------------------------------------ inputs


def _parity_feeds(engine: Engine, plan: BuildPlan, prepared: PreparedModel) -> ParityFeeds:
    """Rows of the data that the model was calibrated with, where there are some that the profile takes; else random ones."""
    model, config, profiles, given = prepared.model, plan.config, engine.passport.profiles, plan.given
    profile = given.profile(model.signature, profiles)
    backend_spec = get_backend(config.backend)
    values = _size_input_values(backend_spec, config)
    if prepared.steps and config.calib_data not in (None, "random") and not values and not given.values:
        rows = min([_MAX_ROWS, *(span.max[0] for span in profile.ranges.values() if span.max)])
        try:
            data = images_as_inputs(plan.model, config.calib_data, config.preprocess).calib_data
            batch = next(iter(open_samples(data, model.signature, batch=rows, limit=rows, model=model)), None)
            if batch is not None:
                profile.check(batch.feeds)
                return ParityFeeds(batch.feeds, f"{batch.rows} rows of {without_folder(config.calib_data)}", given=True)
        except errors.TrtEngineError as error:
            log.info("parity is measured on random inputs, not on the calibration data: %s", error.message)
    graph = engine.path if backend_spec.payload_suffix == ".onnx" else None
    return parity_feeds(model, profile, values, engine=graph, given=given.values, named=given.named)


def _source_errors(
    source: Model, model: Model, feeds: Tensors, described: str, tolerance: Tolerance, run: Callable[[Tensors], Any]
) -> dict[str, OutputError]:
    """Difference of the engine of a cast or quantised `model` from the given one, on the same input; empty where
    plain ONNX Runtime does not run that, or where it takes other inputs."""
    if not _same_interface(source, model):
        return {}
    try:
        return measure_parity(source, run, feeds, described, tolerance).outputs
    except errors.MemoryExhausted:
        raise
    except errors.TrtEngineError as error:
        log.debug("the engine was not compared with the model as it was given: %s", error.message)
        return {}


def _same_interface(source: Model, model: Model) -> bool:
    """Whether both models take and give tensors of the same names and types."""
    return [(spec.name, spec.dtype) for spec in source.signature] == [
        (spec.name, spec.dtype) for spec in model.signature
    ]


def computes_in_tf32(engine: Engine) -> bool:
    return "tf32" in engine.passport.precision.shares or engine.passport.build.notes.get("tf32") == "on"


def _size_input_values(spec: BackendSpec, config: BuildConfig) -> dict[str, tuple[int, ...]]:
    """The usual values of inputs that hold sizes, by a backend's setting of that name: random numbers are not sizes."""
    if not spec.provides("options"):
        return {}
    given: Profile | None = getattr(
        from_values(spec.load_component("options"), backend_options(spec, config)), "shape_values", None
    )
    return {name: span.opt for name, span in given.ranges.items()} if given is not None else {}


def backend_options(spec: BackendSpec, config: BuildConfig) -> dict[str, str]:
    """The `-O` of the backend itself, without those of the providers under it."""
    return {name: value for name, value in config.options.items() if not (spec.providers and "." in name)}


def _overflow_hint(engine: Engine, device: str, graph: GraphIndex) -> str:
    """What to do where INT8 kernels of this CPU add two products in 16 bits; empty elsewhere, and where `graph` has weights
    of 7 bits already."""
    if (
        parse_device(device)[0] != "cpu"
        or "int8" not in engine.passport.precision.compute_shares
        or weight_bits("auto") == 8
        or not has_8_bit_weights(graph)
    ):
        return ""
    return "INT8 weights of 8 bits overflow on this processor, which has no VNNI: `trt-engine quantize --reduce-range on`; "


def safer_option(spec: BackendSpec, engine: Engine) -> str | None:
    """The `-O` option of a build that rewrites less than this engine's, whose notes have the value used; None for none."""
    notes = engine.passport.build.notes
    named = [setting for setting in spec.safer_options if setting.partition("=")[0] in notes]
    had = [at for at, setting in enumerate(named) if notes[setting.partition("=")[0]] == setting.partition("=")[2]]
    return next(iter(named[had[0] + 1 if had else 0 :]), None)


class _EngineFailed(Exception):
    """The engine, not the reference, raised."""

    def __init__(self, error: errors.TrtEngineError) -> None:
        super().__init__(error.message)
        self.error = error

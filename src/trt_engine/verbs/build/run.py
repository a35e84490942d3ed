"""`build`: from an ONNX file to a verified, sealed and stored engine.

`plan` checks everything and writes nothing; `execute` builds by the plan, or takes the engine from the store.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import msgspec

from trt_engine.atomic_io import ensure_folder, os_error, resolve_link
from trt_engine.backend import BackendSpec, get_backend, resolve_gpu_targets, with_default_device
from trt_engine.benchmark.speed_check import measure_alternating, slowdown_text
from trt_engine.config.build import BuildConfig
from trt_engine.config.profiles import Profile
from trt_engine.config.settings import replace_values
from trt_engine.device import parse_device
from trt_engine.engine import Engine, passport_path, payload_files, reference_path
from trt_engine.environment import Environment
from trt_engine.equivalence.parity import small_shapes
from trt_engine.equivalence.random_inputs import random_inputs, runnable_signature, with_choices
from trt_engine.equivalence.tolerance import Tolerance, coarsest_dtype, select_tolerance
from trt_engine.errors import AccuracyError, BuildError, Interrupted, ModelError, TrtEngineError
from trt_engine.model import Model
from trt_engine.progress import ProgressOption
from trt_engine.protocols import BuildOutcome, BuildPaths
from trt_engine.public_function import public_function
from trt_engine.records.parity import SpeedCheck
from trt_engine.records.passport import PASSPORT_VERSION, QUANT_TARGET, BuildInfo, Passport, Source
from trt_engine.runtime.feeds import at_shapes, complete_shapes, set_values
from trt_engine.store import Store, engine_key
from trt_engine.tensors import Choice, Signature
from trt_engine.verbs.build import precision, request
from trt_engine.verbs.build.candidates import (
    PlannedCandidate,
    plan_candidates,
    resolve_budget,
    unused_settings,
    without_search,
)
from trt_engine.verbs.build.parity import DOES_NOT_RUN, ParityCheck, check_parity, computes_in_tf32, safer_option
from trt_engine.verbs.build.retry import Attempt, build_with_retries, run_builder, without_failing_fusion
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model
from trt_engine.verbs.load import load
from trt_engine.vision.spec import declared_shapes, vision_of_model

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import BuildSettings

log = logging.getLogger(__name__)

_HEARTBEAT_S = 30.0
_FAST_BUILD_MAX_BYTES = 512 << 20
"""Bytes of a model up to which a second engine, in FP32, is built to time a quantised one beside."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A planned build: the model, the resolved settings, the key, the target path."""

    model: Model
    config: BuildConfig
    """Resolved: `profiles` is complete and includes `batch` and `shapes`."""
    identity: str
    key: str
    rounding: str
    """The coarsest rounding of the graph that is built: the default parity tolerance."""
    store: Store
    out: Path | None
    """The requested payload path outside the store, if any."""
    command: str
    warnings: tuple[str, ...] = ()
    target: str | None = None
    """The target whose kernels the quantised layers are for; None for a build without any."""
    log: Path | None = None
    """Where the raw log of a builder that writes one goes, kept whether or not the build succeeds."""
    candidates: tuple[PlannedCandidate, ...] = ()
    """What is built and measured to choose from; empty for one build."""
    source: Path | None = None
    """Where the model came from, when `model` is a staged copy of it that will be gone."""
    given: request.GivenInputs = field(default_factory=request.GivenInputs)
    """The values of inputs that parity takes."""

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return self.config.profiles

    def find_in_store(self) -> Engine | None:
        """The engine, if the store has it and it passes what this build would check."""
        engine = self.store.get(self.key, self.model.digest)
        return self.with_tolerance(engine) if engine is not None and self.rejection_reason(engine) is None else None

    def _chosen(self, engine: Engine) -> BuildPlan | None:
        """The candidate that an engine of this search is; None for one build, and for an engine of another search."""
        tuning = engine.passport.build.tuning
        chosen = self.candidates[tuning.chosen : tuning.chosen + 1] if tuning is not None else ()
        return chosen[0].plan if chosen else None

    def tolerance(self, engine: Engine) -> Tolerance:
        """The tolerance: the chosen limit, else by the rounding of graph and engine."""
        if (chosen := self._chosen(engine)) is not None:
            return chosen.tolerance(engine)
        return select_tolerance(self.rounding, tf32=computes_in_tf32(engine), explicit=self.config.parity_rtol)

    def rejection_reason(self, engine: Engine) -> str | None:
        """Why an engine of this key is not used: an unwanted retry made it, it was not checked as it would be
        now, its search was interrupted, or its error is above the current limit."""
        if self.candidates:
            tuning, chosen = engine.passport.build.tuning, self._chosen(engine)
            if tuning is None or chosen is None or not tuning.complete:
                return "its search was interrupted"
            return chosen.rejection_reason(engine)
        if not self.config.retry and "retry" in engine.passport.build.notes:
            return "a retry made it"
        if not self.config.parity:
            return None
        if self.given.values and engine.passport.build.notes.get("inputs") != self.given.named:
            return f"it was not compared on `{self.config.inputs}`"
        validation = engine.passport.validation
        if validation is not None and validation.state == "failed":
            return f"its validation {validation.summary}"
        if validation is not None and validation.state == "deferred" and self._is_loadable_here():
            return "its check was deferred, and can be made here"
        if "parity" in engine.passport.build.notes:
            return None
        proved, tolerance = engine.passport.parity, self.tolerance(engine)
        if proved is None:
            return "it was never compared with plain ONNX Runtime"
        matched = any(error.rows_moved or error.rows_skipped for error in proved.outputs.values())
        if matched and tolerance.limit < proved.tolerance:
            return f"its rows were compared with {proved.tolerance:g} allowed, {tolerance.limit:g} is allowed now"
        for name, error in proved.outputs.items():
            if (objection := tolerance.violation(error, proved.sensitivity.get(name))) is not None:
                return f"it differs from plain ONNX Runtime in `{name}`: {objection} now"
        return None

    def _is_loadable_here(self) -> bool:
        """Whether an engine of this build can be loaded on this machine."""
        backend_spec = get_backend(self.config.backend)
        return not (
            backend_spec.provides("parity_options")
            and isinstance(backend_spec.load_function("parity_options")(self.model.path, self.config), str)
        )

    def with_tolerance(self, engine: Engine) -> Engine:
        """The same engine, its parity with the current tolerance."""
        if (chosen := self._chosen(engine)) is not None:
            return chosen.with_tolerance(engine)
        proved, validation = engine.passport.parity, engine.passport.validation
        if not self.config.parity:
            return engine
        tolerance = self.tolerance(engine)
        if proved is not None:
            proved = replace(proved, tolerance=tolerance.limit)
        if validation is not None:
            validation = replace(validation, tolerance=tolerance.to_limits(self.rounding))
        return Engine(engine.path, replace(engine.passport, parity=proved, validation=validation))


@dataclass(frozen=True, slots=True)
class BuildResult:
    """An engine and how it came about."""

    engine: Engine
    cached: bool
    """True when the store had it."""
    seconds: float
    key: str
    warnings: tuple[str, ...] = field(default=())


@public_function
@takes_model("model")
def build(
    model: AnyModel,
    *,
    out: Path | str | None = None,
    config: BuildConfig | None = None,
    store: Store | None = None,
    rebuild: bool = False,
    overwrite: bool = False,
    command: str | None = None,
    progress: ProgressOption = False,
    **settings: Unpack[BuildSettings],
) -> Engine:
    """The engine of an ONNX model, from the store or built now; copied to `out` if that is given.

    `settings` are those of `BuildConfig` by name and override `config`. `rebuild` builds although the store has it,
    `overwrite` overwrites a file at `out` that is not an engine, `command` goes into the passport as the build command. With
    `progress=True` steps go to stderr, or to a function that takes `te.Progress`. Raises `ModelError`, `BuildError`,
    `PrecisionError`, `AccuracyError` or `SetupError`; `Interrupted`
    after Ctrl-C in a search, its `partial` the best engine checked until then.
    """
    planned = plan(
        on_disk(model), out=out, config=config, store=store, overwrite=overwrite, command=command, **settings
    )
    return execute(planned, rebuild=rebuild).engine


def build_for_inputs(model: Path, config: BuildConfig, inputs: Path | None) -> Engine:
    """The engine for verbs that run it on `inputs`: one that was compared on others is not built again."""
    if inputs is not None and config.calib_data is None:
        found = plan(model, config=config).find_in_store()
        if found is not None and "parity" not in found.passport.build.notes:
            inputs = None
    return build(model, config=config if inputs is None else replace(config, inputs=inputs))


def plan(
    model: Model | Path | str,
    *,
    out: Path | str | None = None,
    config: BuildConfig | None = None,
    store: Store | None = None,
    overwrite: bool = False,
    command: str | None = None,
    log_file: Path | None = None,
    **settings: Unpack[BuildSettings],
) -> BuildPlan:
    """The plan of `build` with the same arguments, or for an opened model. Reads and checks, writes nothing."""
    asked = replace_values(config or BuildConfig(), settings)
    backend_spec = get_backend(asked.backend)
    asked = with_default_device(asked)
    asked = replace(asked, gpus=resolve_gpu_targets(backend_spec, asked.gpus))
    request.check_device(backend_spec, asked)
    request.check_options(backend_spec, asked)
    model = request.open_source(model)
    target = request.plan_target(out, model, backend_spec, overwrite=overwrite)
    command = command or request.build_command(model.path, asked, target)
    precision.require_calibration_data(model, asked)
    aimed, misplaced = precision.plan_placement(model, asked)
    unused = precision.calibration_warnings(model, asked)
    given = request.read_given(asked.inputs, model.signature)
    shapes = (
        asked.shapes
        | given.shapes(asked)
        | declared_shapes(
            model, {*asked.shapes, *given.values, *(name for one in asked.profiles for name in one.ranges)}
        )
    )
    profiles = replace(asked, shapes=shapes).resolve(model.signature)
    given.check(model.signature, profiles)
    resolved = replace(asked, profiles=profiles, batch=None, shapes={})
    if unused is not None and not asked.precisions:
        resolved = replace(resolved, calib_data=None)
    store = store or Store()
    candidates = plan_candidates(
        model, asked, lambda one: plan(model, config=replace(one, time_budget_s=0), store=store)
    )
    if candidates:
        resolved = resolve_budget(resolved)
        identity = request.search_identity(candidates, resolved)
        unused = None  # a candidate may use the calibration data
    else:
        resolved, identity = without_search(resolved), backend_spec.load_component("builder")().identity(resolved)
    # a model that is quantised for one target makes no engine for another
    made_by = f"{identity} {aimed}" if aimed is not None else identity
    key = engine_key(model.digest, request.key_config(backend_spec, resolved), made_by)
    return BuildPlan(
        model=model,
        config=resolved,
        identity=identity,
        key=key,
        rounding=coarsest_dtype(model.graph, asked.precision),
        store=store,
        out=target,
        command=command,
        warnings=(
            *(text for text in (misplaced, unused, None if candidates else unused_settings(asked)) if text is not None),
            *(request.profile_warnings(resolved.profiles) if backend_spec.profile_sensitive else ()),
        ),
        target=aimed,
        candidates=candidates,
        given=given,
        log=log_file or (store.build_log(key) if backend_spec.writes_log else None),
    )


def execute(plan: BuildPlan, *, rebuild: bool = False) -> BuildResult:
    """Execute the plan. An error, a signal or a killed process leaves no partial file."""
    started = time.monotonic()
    if plan.out is not None:
        ensure_folder(plan.out.parent)  # before hours are spent
    for warning in plan.warnings:
        log.warning("%s", warning)
    engine, built = plan.store.get_or_build(
        plan.key,
        lambda folder: _search_in(folder, plan, rebuild=rebuild) if plan.candidates else _build_in(folder, plan),
        model_digest=plan.model.digest,
        rebuild=rebuild,
        accept=lambda engine: _is_acceptable(engine, plan),
    )
    engine = plan.with_tolerance(engine)
    if built:
        log.info("built in %.1f s", engine.passport.build.seconds)
    else:
        log.info("the store has this engine (%s), built by an equal command; `--rebuild` builds it again", plan.key[:8])
    if plan.out is not None:
        engine = _deliver(engine, plan.out, plan.command)
    tuning = engine.passport.build.tuning
    if built and tuning is not None and not tuning.complete:
        raise Interrupted(
            f"interrupted: the best engine checked until then is `{engine.path}`",
            hint="the same command goes on from there: finished candidates are in the store",
            partial=engine,
        )
    return BuildResult(
        engine=engine,
        cached=not built,
        seconds=time.monotonic() - started,
        key=plan.key,
        warnings=tuple(dict.fromkeys((*plan.warnings, *engine.passport.build.warnings))),
    )


def _is_acceptable(engine: Engine, plan: BuildPlan) -> bool:
    reason = plan.rejection_reason(engine)
    if reason is not None:
        log.info("the engine in the store is built again: %s", reason)
    return reason is None


# ------------------------------------------------------------------------------------------------ the build


def _search_in(folder: Path, plan: BuildPlan, *, rebuild: bool) -> Engine:
    """Build and measure the candidates; a copy of the best in the staging folder, with the whole table."""
    started = time.monotonic()
    from trt_engine.verbs.build.search import Search  # a fifth of the imports, for builds that measure

    engine, tuning = Search(plan, lambda one: execute(one, rebuild=rebuild).engine, rebuild=rebuild).run()
    payload = folder / request.payload_name(plan.model.name, get_backend(engine.passport.backend))
    made = engine.copy_to(payload, command=plan.command)
    build = replace(made.passport.build, tuning=tuning, seconds=time.monotonic() - started)
    return Engine.seal(payload, replace(made.passport, key=plan.key, build=build))


def _build_in(folder: Path, plan: BuildPlan) -> Engine:
    """Build into the staging folder, prove, seal."""
    backend_spec, started = get_backend(plan.config.backend), time.monotonic()
    payload = folder / request.payload_name(plan.model.name, backend_spec)
    log.info("building `%s` with %s", plan.model.path.name, " ".join(plan.identity.split()[:2]))
    scratch = folder / ".prepared"
    with contextlib.ExitStack() as at_end:
        on_status = at_end.enter_context(_log_heartbeat())
        at_end.callback(shutil.rmtree, scratch, ignore_errors=True)
        prepared = precision.prepare(plan.model, plan.config, scratch)
        if backend_spec.writes_log and plan.log is not None:
            plan.log.unlink(missing_ok=True)  # each attempt adds to it
        try:
            attempt, outcome = build_with_retries(
                Attempt(prepared.model, plan.config),
                backend_spec,
                scratch / "retry",
                lambda attempt: run_builder(attempt, prepared, plan, payload, on_status),
                path=plan.source or plan.model.path,
            )
        except ModelError as error:
            raise precision.missing_kernels(error, plan, prepared) from error
        passport = _make_passport(plan, attempt.config, outcome, payload, time.monotonic() - started)
        if not plan.config.parity or not backend_spec.provides("runtime"):
            passport = replace(passport, signature=_settled_signature(passport, prepared.model, {}, plan.given))
        engine = Engine.seal(payload, passport)
        if not plan.config.parity:
            return engine
        if not backend_spec.provides("runtime"):
            log.warning("the backend `%s` only builds: nothing here can run the engine and prove it", backend_spec.name)
            return engine

        def rebuild(less: Attempt) -> tuple[Engine, ParityCheck]:
            """The engine of another attempt in place of this one, and its check."""
            for path in engine.files[1:]:
                path.unlink(missing_ok=True)
            outcome = run_builder(less, prepared, plan, payload, on_status)
            seconds = time.monotonic() - started
            made = Engine.seal(payload, _make_passport(plan, less.config, outcome, payload, seconds))
            return made, check_parity(made, plan, prepared, less)

        try:
            checked = check_parity(engine, plan, prepared, attempt)
        except BuildError as failure:
            engine, checked = _without_failing_fusion(engine, attempt, failure, rebuild)
        except AccuracyError as failure:
            engine, checked = _with_safer_option(engine, attempt, failure, rebuild)
        speed = None
        small = backend_spec.fast_build and not outcome.compiled and plan.model.nbytes <= _FAST_BUILD_MAX_BYTES
        if prepared.notes.get(QUANT_TARGET) and small and checked.validation is None:
            speed = _compare_with_float(engine, plan, backend_spec, scratch / "float")
    build = engine.passport.build
    warnings = [checked.note] if checked.note else []
    if checked.row_dependence is not None and any(map(engine.signature.batch_axes, engine.signature.inputs)):
        warnings.append(f"requests to this engine must not be joined: {checked.row_dependence}")
        log.warning("%s", warnings[-1])
    if speed is not None and (text := slowdown_text(str(plan.config.precision), speed, build.not_fused)) is not None:
        warnings.append(text)
        log.warning("%s", text)
    build = replace(
        build,
        seconds=time.monotonic() - started,
        warnings=(*build.warnings, *warnings),
        notes=build.notes
        | ({"parity": checked.note} if checked.note else {})
        | ({"inputs": plan.given.named} if plan.given.values else {}),
    )
    signature = _settled_signature(engine.passport, prepared.model, checked.choices, plan.given)
    signature = replace(signature, row_dependence=checked.row_dependence)
    made = replace(
        engine.passport,
        signature=signature,
        parity=checked.parity,
        validation=checked.validation,
        speed=speed,
        build=build,
    )
    return Engine.seal(payload, made)


Rebuild = Callable[[Attempt], tuple[Engine, ParityCheck]]


def _without_failing_fusion(
    engine: Engine, attempt: Attempt, failure: BuildError, rebuild: Rebuild
) -> tuple[Engine, ParityCheck]:
    """An engine without the fusion with which it does not run; the failure where that is not a fusion's."""
    fusions = [item.rpartition(" ")[0] for item in (engine.passport.build.fusions or "").split(", ") if item]
    if failure.cause != DOES_NOT_RUN or not fusions or not attempt.config.retry:
        raise failure
    less, made = without_failing_fusion(attempt, failure, fusions, rebuild)
    return _retried(made, less, f"built with {less.change}, because with it {failure.message}")


def _with_safer_option(
    engine: Engine, attempt: Attempt, failure: AccuracyError, rebuild: Rebuild
) -> tuple[Engine, ParityCheck]:
    """An engine whose compiler rewrote less, in place of one that differs from its model; the failure where it differs as
    well, or for a backend that builds fast: there `-O` in the hint is as good as a second build."""
    spec, config = get_backend(engine.passport.backend), attempt.config
    option = None if spec.fast_build or not config.retry else safer_option(spec, engine)
    if option is None:
        raise failure
    name, _, value = option.partition("=")
    less = replace(attempt, config=replace(config, options=config.options | {name: value}), change=f"`-O {option}`")
    log.warning("%s: trying %s", failure.message, less.change)
    try:
        made = rebuild(less)
    except TrtEngineError:
        raise failure from None
    return _retried(made, less, f"built with {less.change}, because without it {failure.message}")


def _retried(made_and_checked: tuple[Engine, ParityCheck], less: Attempt, text: str) -> tuple[Engine, ParityCheck]:
    """The engine of another attempt, whose passport has the reason."""
    made, checked = made_and_checked
    log.warning("%s", text)
    build = made.passport.build
    build = replace(
        build,
        warnings=(*build.warnings, text),
        retries=(*build.retries, text),
        notes=build.notes | {"retry": less.change},
    )
    return Engine.seal(made.path, replace(made.passport, build=build)), checked


def _settled_signature(
    passport: Passport, model: Model, choices: Mapping[str, tuple[Choice, ...]], given: request.GivenInputs
) -> Signature:
    """The engine's signature with the `choices` of switches that the model runs with, tried now where none are known."""
    signature = set_values(model.signature, given.values)
    if choices or not any(spec.choices for spec in signature.inputs):
        return with_choices(passport.signature, choices)
    shapes = complete_shapes(signature, small_shapes(signature, passport.profiles[0]), given.values)
    try:
        tried = runnable_signature(model.path, signature, shapes, values=at_shapes(signature, given.values, shapes))
    except ModelError as error:
        log.debug("the values of switches were not tried: %s", error.message)
        return passport.signature
    return with_choices(passport.signature, {spec.name: spec.choices for spec in tried.inputs})


def _compare_with_float(engine: Engine, plan: BuildPlan, spec: BackendSpec, folder: Path) -> SpeedCheck | None:
    """The engine of a model that was quantised here beside one of the model as it was given, on the usual shapes; None
    where that one does not build or run, or is too slow for a result in seconds."""
    config = replace(plan.config, precision=None, calib_data=None)
    log.info("timing it beside an engine in fp32")
    try:
        folder.mkdir(parents=True)
        payload = folder / request.payload_name(plan.model.name, spec)
        outcome: BuildOutcome = spec.load_component("builder")().build(plan.model, config, BuildPaths(payload))
        plain = Engine.seal(payload, _make_passport(plan, config, outcome, payload, 0.0))
        shapes = {name: span.opt for name, span in engine.passport.profiles[0].ranges.items()}
        graph = engine.path if spec.payload_suffix == ".onnx" else None
        values = at_shapes(engine.signature, plan.given.values, shapes)
        feeds = random_inputs(plan.model.path, engine.signature, shapes, values=values, engine=graph)
        with (
            load(engine, verify=False, allow_fallback=config.allow_fallback) as quantised,
            load(plain, verify=False, allow_fallback=config.allow_fallback) as other,
        ):
            return measure_alternating(
                lambda: quantised.infer(feeds),
                lambda: other.infer(feeds),
                baseline_name=f"an engine of the given model ({plain.passport.precision.main_dtype or 'fp32'}), built alike",
                shapes=shapes,
            )
    except TrtEngineError as error:  # an indication: the engine itself is proved without it
        log.debug("the engine was not timed beside one in FP32: %s", error.message)
        return None


def _make_passport(
    plan: BuildPlan, config: BuildConfig, outcome: BuildOutcome, payload: Path, seconds: float
) -> Passport:
    """The passport; `config` is what the engine was built with, after retries."""
    device = outcome.device or plan.config.device
    kind, number = parse_device(device)
    try:
        declared = vision_of_model(plan.model)
    except ModelError as error:
        log.warning("the declared pre- and post-processing is left out: %s", error.message)
        declared = None
    return Passport(
        schema="trt-engine/passport",
        schema_version=PASSPORT_VERSION,
        backend=plan.config.backend,
        payload=payload_files(payload, outcome.files),
        model=Source(
            plan.model.name, plan.model.digest, plan.model.opsets.get(""), str(plan.source or plan.model.path)
        ),
        signature=outcome.signature,
        profiles=config.profiles,
        precision=outcome.precision,
        device=device,
        build=BuildInfo(
            command=plan.command,
            config=msgspec.json.decode(msgspec.json.encode(config.key())),  # plain, as it is read back
            seconds=seconds,
            identity=plan.identity,
            warnings=outcome.warnings,
            retries=outcome.retries,
            notes=outcome.notes,
        ),
        environment=Environment.detect(number if kind == "cuda" else None),
        requirements=outcome.requirements,
        key=plan.key,
        vision=None if declared is None else declared.as_dict(),
    )


@contextlib.contextmanager
def _log_heartbeat(every_s: float = _HEARTBEAT_S) -> Iterator[Callable[[str], None]]:
    """Log a heartbeat with the builder's current step, set by the yielded function."""
    done, started, at = threading.Event(), time.monotonic(), [""]

    def beat() -> None:
        while not done.wait(every_s):
            log.info("still building (%.0f s)%s", time.monotonic() - started, f": {at[0]}" if at[0] else "")

    def doing(text: str) -> None:
        at[0] = text

    around = contextvars.copy_context()  # for the call's `progress=`
    thread = threading.Thread(target=around.run, args=(beat,), name="build-heartbeat", daemon=True)
    thread.start()
    try:
        yield doing
    finally:
        done.set()
        thread.join()


# ------------------------------------------------------------------------------------------------ after


def _deliver(engine: Engine, out: Path, command: str) -> Engine:
    """A complete copy at `out`; an interrupted copy is removed."""
    out = resolve_link(out)
    users_own = out.stat().st_ino if out.exists() and not passport_path(out).exists() else None
    try:
        copy = engine.copy_to(out, command=command)
    except BaseException as error:
        if not passport_path(out).exists() and not (out.exists() and out.stat().st_ino == users_own):
            beside = (out.with_name(item.file) for item in engine.passport.payload[1:])
            for path in (out, *beside, *([reference_path(out)] if engine.reference is not None else [])):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise os_error(error, out) from error
        raise
    log.info("engine: `%s`", out)
    return copy

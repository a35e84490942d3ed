"""`build`: from an ONNX file to an engine that is proved, sealed and kept.

`plan` looks at everything and writes nothing; `carry_out` builds what the plan says, or takes it from the store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.api.ladder import WORDS_ARE_IN, Attempt, climb
from trt_engine.api.loading import load
from trt_engine.api.parity import computes_in_tf32, own_settings, prove
from trt_engine.api.preparing import (
    Prepared,
    check_calibration,
    check_placement,
    data_digest,
    placed_for,
    prepare,
    preprocess_digest,
    refuse_unpreparable,
)
from trt_engine.api.speed_check import alternate, slower_text
from trt_engine.backend import Backend, backend, settled
from trt_engine.config import BuildConfig, Profile, from_values, words
from trt_engine.config import settings as settings_of
from trt_engine.device import parse_device
from trt_engine.engine import (
    PASSPORT_VERSION,
    QUANT_TARGET,
    Build,
    Engine,
    Needs,
    Passport,
    Precision,
    Source,
    SpeedCheck,
    engine_path,
    passport_path,
    payload_of,
)
from trt_engine.environment import Environment
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.tolerance import Tolerance, coarsest_format, tolerance_of
from trt_engine.errors import (
    BuildError,
    EngineError,
    ModelError,
    PrecisionError,
    TrtEngineError,
    UsageError,
)
from trt_engine.files import end_of_links, ensure_folder, explain, path_of, printable, staged_copy
from trt_engine.graph.load import open_model, read_proto
from trt_engine.graph.quant_placement import PlacedGraph
from trt_engine.graph.quant_target import quant_target
from trt_engine.model import Model
from trt_engine.precision.calibrate import RULES
from trt_engine.precision.contract import prove_engine
from trt_engine.protocols import BuildOutcome, BuildPlaces
from trt_engine.store import Store, engine_key
from trt_engine.vision.declaration import vision_of

__all__ = ["BuildPlan", "Built", "build", "carry_out", "plan"]

log = logging.getLogger(__name__)

_HEARTBEAT_S = 30.0
_QUICKLY_BUILT = 512 << 20
"""Bytes of a model up to which a second engine, in FP32, is built to time a quantised one beside."""
_WIDE = 256
"""A profile whose largest shape has this many times the elements of its smallest is wide."""
_AWAY = 8
"""An optimum with this many times fewer elements than the largest shape is away from it."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What a build would do: the model, the settings with every profile worked out, the key, where it would lie."""

    model: Model
    config: BuildConfig
    """Resolved: `profiles` is complete, `batch` and `shapes` are taken up in it."""
    identity: str
    key: str
    rounding: str
    """The coarsest rounding of the graph that is built: what parity is judged by where nobody chose a limit."""
    store: Store
    out: Path | None
    """The payload's path outside the store, if one was asked for."""
    command: str
    warnings: tuple[str, ...] = ()
    target: str | None = None
    """The target whose kernels the quantised layers are for; None for a build without any."""
    log: Path | None = None
    """Where the builder's raw log goes; None for the store's place, of backends that write one."""
    source: Path | None = None
    """Where the model came from, when `model` is a staged copy of it that will be gone."""

    @property
    def places_log(self) -> Path | None:
        """The builder's raw log, kept whether or not the build succeeds; None for a backend that writes none."""
        if not backend(self.config.backend).builds_log:
            return None
        return self.log or self.store.build_log(self.key)

    @property
    def profiles(self) -> tuple[Profile, ...]:
        return self.config.profiles

    def is_met_by(self, engine: Engine) -> bool:
        """Whether the engine is what this build would make, and passes what this build would check."""
        return engine.passport.key == self.key and self.objection(engine) is None

    def in_store(self) -> Engine | None:
        """The engine, if the store has it and it passes what this build would check."""
        engine = self.store.get(self.key)
        return self.judged(engine) if engine is not None and self.objection(engine) is None else None

    def tolerance(self, engine: Engine) -> Tolerance:
        """What is allowed: the limit that was chosen, else what the rounding of graph and engine comes to."""
        return tolerance_of(self.rounding, tf32=computes_in_tf32(engine), chosen=self.config.parity_rtol)

    def objection(self, engine: Engine) -> str | None:
        """Why an engine of this key is not taken: a ladder nobody wants has made it, or it was not checked as it would be
        now, or lies further off than is allowed now."""
        if not self.config.ladder and "ladder" in engine.passport.build.notes:
            return "the ladder made it"
        if not self.config.parity or "parity" in engine.passport.build.notes:
            return None
        proved, tolerance = engine.passport.parity, self.tolerance(engine)
        if proved is None:
            return "it was never compared with plain ONNX Runtime"
        matched = any(error.rows_moved or error.rows_left_out for error in proved.outputs.values())
        if matched and tolerance.limit < proved.tolerance:
            return f"its rows were compared with {proved.tolerance:g} allowed, {tolerance.limit:g} is allowed now"
        for name, error in proved.outputs.items():
            if (objection := tolerance.objection(error, proved.sensitivity.get(name))) is not None:
                return f"it differs from plain ONNX Runtime in `{name}`: {objection} now"
        return None

    def judged(self, engine: Engine) -> Engine:
        """The same engine, its figures beside the limit they are judged by now."""
        proved = engine.passport.parity
        if not self.config.parity or proved is None:
            return engine
        return Engine(
            engine.path, replace(engine.passport, parity=replace(proved, tolerance=self.tolerance(engine).limit))
        )


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and how it came about."""

    engine: Engine
    cached: bool
    """True when the store had it."""
    seconds: float
    key: str
    warnings: tuple[str, ...] = field(default=())


def build(
    model: Path | str,
    *,
    out: Path | str | None = None,
    config: BuildConfig | None = None,
    store: Store | None = None,
    force: bool = False,
    yes: bool = False,
    command: str | None = None,
    **settings: Any,
) -> Engine:
    """The engine of an ONNX model, from the store or built now; copied to `out` if that is given.

    `settings` are those of `BuildConfig` by name and override `config`. `force` builds although the store has it, `yes`
    overwrites a file at `out` that is no engine, `command` stands in the passport as what repeats the build.
    """
    planned = plan(model, out=out, config=config, store=store, yes=yes, command=command, **settings)
    return carry_out(planned, force=force).engine


def plan(
    model: Model | Path | str,
    *,
    out: Path | str | None = None,
    config: BuildConfig | None = None,
    store: Store | None = None,
    yes: bool = False,
    command: str | None = None,
    log_file: Path | None = None,
    **settings: Any,
) -> BuildPlan:
    """What `build` would do with the same arguments, or with a model that is open. Reads, checks, writes nothing."""
    asked = _config(config or BuildConfig(), settings)
    card = backend(asked.backend)
    asked = settled(asked)
    _check_device(card, asked)
    _check_options(card, asked)
    path = model.path if isinstance(model, Model) else path_of(model, "`model`")
    _refuse_odd_name(path)
    _refuse_engine(path)
    opened = model if isinstance(model, Model) else open_model(path)
    _refuse_optimised(opened)
    target = None
    if out is not None:
        try:
            target = _target(out, opened, card)
            end_of_links(target)
            _may_write(target, opened, yes=yes)
        except OSError as error:  # a name too long, a loop of links
            raise explain(error, Path(out)) from error
    refuse_unpreparable(opened, asked)
    misplaced = check_placement(opened, asked)
    unused = check_calibration(opened, asked)
    aimed = placed_for(opened, asked)
    resolved = replace(asked, profiles=asked.resolve(opened.signature), batch=None, shapes={})
    if unused is not None:
        resolved = replace(resolved, calibrate=None)
    identity = card.half("builder")().identity(resolved)
    return BuildPlan(
        model=opened,
        config=resolved,
        identity=identity,
        # a model that is quantised for one target makes no engine for another
        key=engine_key(opened.digest, _keyed(card, resolved), f"{identity} {aimed}" if aimed is not None else identity),
        rounding=coarsest_format(read_proto(opened.path), asked.precision),
        store=store or Store(),
        out=target,
        command=command or _command(path, asked, target),
        warnings=(
            *(text for text in (misplaced, unused) if text is not None),
            *(_profile_warnings(resolved.profiles) if card.tuned else ()),
        ),
        target=aimed,
        log=log_file,
    )


def carry_out(plan: BuildPlan, *, force: bool = False) -> Built:
    """Do what the plan says. Nothing half-written is left by an error, a signal or a dead process."""
    started = time.monotonic()
    if plan.out is not None:
        ensure_folder(plan.out.parent)  # before hours are spent
    for warning in plan.warnings:
        log.warning("%s", warning)
    engine, built = plan.store.get_or_build(
        plan.key,
        lambda folder: _build_in(folder, plan),
        again=force,
        fits=lambda engine: _fits(engine, plan),
    )
    engine = plan.judged(engine)
    if built:
        log.info("built in %.1f s", engine.passport.build.seconds)
    else:
        log.info("the store has this engine (%s), built by an equal command; `--force` builds it again", plan.key[:8])
    if plan.out is not None:
        engine = _deliver(engine, plan.out, plan.command)
    return Built(
        engine=engine,
        cached=not built,
        seconds=time.monotonic() - started,
        key=plan.key,
        warnings=tuple(dict.fromkeys((*plan.warnings, *engine.passport.build.warnings))),
    )


def _fits(engine: Engine, plan: BuildPlan) -> bool:
    reason = plan.objection(engine)
    if reason is not None:
        log.info("the engine in the store is built again: %s", reason)
    return reason is None


# ------------------------------------------------------------------------------------------------ before


def _config(config: BuildConfig, values: dict[str, Any]) -> BuildConfig:
    given = from_values(BuildConfig, values)
    return replace(config, **{name: getattr(given, name) for name in values})


def _keyed(card: Backend, config: BuildConfig) -> BuildConfig:
    """The settings an engine's key is made of: those of the run alone, and those the backend ignores, make no other one.

    Data counts by its content: the same path may hold other samples tomorrow.
    """
    config = replace(config, **{item.name: item.default for item in settings_of(config) if item.name in card.ignores})
    if (
        config.calibrate is not None
    ):  # what it holds, wherever it is, how it becomes inputs, how ranges are read from it
        made_of = [data_digest(config.calibrate), preprocess_digest(config.preprocess), RULES]
        config = replace(config, calibrate=json.dumps(made_of))
    config = replace(config, preprocess=None)
    if not card.has("options"):
        return config
    of_the_run = {item.name for item in settings_of(card.half("options")) if not item.in_key}
    return replace(config, options={name: value for name, value in config.options.items() if name not in of_the_run})


def _check_device(card: Backend, config: BuildConfig) -> None:
    if parse_device(config.device)[0] not in card.devices:
        raise UsageError(
            f"the backend `{card.name}` cannot build for `{config.device}`",
            hint="expected " + " or ".join(f"`--device {device}`" for device in card.devices),
        )


def _check_options(card: Backend, config: BuildConfig) -> None:
    """`UsageError` for a `-O` the backend does not have."""
    own = own_settings(card, config)
    if card.has("options"):
        from_values(card.half("options"), own)
    elif own:
        raise UsageError(f"the backend `{card.name}` has no settings of its own", hint="leave `-O` out")


def _refuse_odd_name(path: Path) -> None:
    if (name := printable(str(path))) != str(path):
        raise ModelError(f"the name `{name}` is not UTF-8, no builder can be told it", hint="rename the file")


def _refuse_engine(path: Path) -> None:
    if engine_path(path) is not None:
        with contextlib.suppress(EngineError, ModelError):
            Engine.open(path)
            raise UsageError(f"`{path}` is an engine already, expected a model", hint=f"`trt-engine bench {path}`")


def _refuse_optimised(model: Model) -> None:
    """`EngineError` for an engine that lost its passport: an engine of it would be proved against itself."""
    if model.optimised is None:
        return
    beside = passport_path(model.path)
    state = "is damaged" if engine_path(model.path) is not None else "is not there"
    raise EngineError(
        f"`{model.path}` is a graph ONNX Runtime has optimised ({model.optimised}), and its passport "
        f"`{beside.name}` {state}",
        hint=f"copy `{beside.name}` along with the engine, or give the model the engine was built from",
    )


def _target(out: Path | str, model: Model, card: Backend) -> Path:
    """The payload's path; a folder (there, or named with a slash at its end) gets a file named after the model."""
    path = path_of(out, "`out`")
    folder = path.is_dir() or (isinstance(out, str) and out.endswith("/"))
    return path / _payload_name(model, card) if folder else path


def _payload_name(model: Model, card: Backend) -> str:
    """`X.engine.onnx`, `X.engine`: an engine is never taken for its model."""
    suffix = card.payload_suffix
    return model.name + (suffix if suffix == ".engine" else f".engine{suffix}")


def _may_write(target: Path, model: Model, *, yes: bool) -> None:
    taken = {model.path.resolve(), *(item.path.resolve() for item in model.external)}
    if target.resolve() in taken or passport_path(target).resolve() in taken:
        raise UsageError(f"`{target}` is the model itself, an engine cannot take its place", hint="name another `-o`")
    if yes or not (target.exists() or passport_path(target).exists()):
        return
    try:
        Engine.open(target)
    except (EngineError, ModelError) as error:
        there = target if target.exists() else passport_path(target)
        raise UsageError(
            f"`{there}` exists and is no engine of ours", hint="`--yes` overwrites it, or name another `-o`"
        ) from error


def _command(model: Path, config: BuildConfig, out: Path | None) -> str:
    """The command line that repeats a build, made from its settings."""
    return shlex.join(
        ["trt-engine", "build", str(model), *words(config), *(["-o", str(out)] if out is not None else [])]
    )


def _profile_warnings(profiles: tuple[Profile, ...]) -> Iterator[str]:
    for index, profile in enumerate(profiles):
        low, best, high = (
            sum(math.prod(getattr(span, which)) for span in profile.ranges.values()) for which in ("min", "opt", "max")
        )
        if high >= _WIDE * max(low, 1):
            yield (
                f"profile {index} is wide: its largest shapes have {high // max(low, 1)} times the elements of its "
                "smallest; several narrow profiles are faster"
            )
        if high >= _AWAY * max(best, 1):
            yield (
                f"profile {index} is tuned for its optimum, which has {high // max(best, 1)} times fewer elements than "
                "its largest shapes; expect less there"
            )


# ------------------------------------------------------------------------------------------------ the build


def _build_in(folder: Path, plan: BuildPlan) -> Engine:
    """Build into the staging folder, prove, seal."""
    card, started = backend(plan.config.backend), time.monotonic()
    payload = folder / _payload_name(plan.model, card)
    log.info("building `%s` with %s", plan.model.path.name, " ".join(plan.identity.split()[:2]))
    with _heartbeat() as doing, _preparing(plan, folder) as prepared:
        if plan.places_log is not None:
            plan.places_log.unlink(missing_ok=True)  # each attempt adds to it
        attempt, outcome = climb(
            Attempt(prepared.model, plan.config),
            card,
            folder / ".prepared" / "ladder",
            lambda attempt: _built_by(
                card, replace(prepared, model=attempt.model), plan, attempt.config, payload, doing
            ),
            source=plan.source or plan.model.path,
        )
        if attempt.steps:
            outcome = replace(
                outcome,
                ladder=(*outcome.ladder, *attempt.steps),
                notes=outcome.notes | {"ladder": attempt.rung},
                warnings=(*outcome.warnings, *_narrower(plan, attempt)),
            )
        engine = Engine.seal(payload, _passport(plan, attempt.config, outcome, payload, time.monotonic() - started))
        if not plan.config.parity:
            return engine
        if not card.has("runtime"):
            log.warning("the backend `%s` only builds: nothing here can run the engine and prove it", card.name)
            return engine
        checked, note = prove(engine, plan.model, plan.config, plan.tolerance(engine), prepared, attempt.model)
        speed = None
        small = card.builds_in_seconds and not outcome.compiled and plan.model.nbytes <= _QUICKLY_BUILT
        if prepared.notes.get(QUANT_TARGET) and small:
            speed = _beside_float(engine, plan, card, folder / ".prepared" / "float")
    build = engine.passport.build
    told = [note] if note else []
    if speed is not None and speed.slower:
        told.append(slower_text(str(plan.config.precision), speed, build.not_fused))
        log.warning("%s", told[-1])
    build = replace(
        build,
        seconds=time.monotonic() - started,
        warnings=(*build.warnings, *told),
        notes=build.notes | ({"parity": note} if note else {}),
    )
    return Engine.seal(payload, replace(engine.passport, parity=checked, speed=speed, build=build))


def _beside_float(engine: Engine, plan: BuildPlan, card: Backend, folder: Path) -> SpeedCheck | None:
    """The engine of a model that was quantised here beside one of the model as it was given, on the usual shapes; None
    where that one does not build or run, or is too slow to say anything in seconds."""
    config = replace(plan.config, precision=None, calibrate=None)
    log.info("timing it beside an engine in fp32")
    folder.mkdir(parents=True)
    payload = folder / _payload_name(plan.model, card)
    try:
        outcome: BuildOutcome = card.half("builder")().build(plan.model, config, BuildPlaces(payload))
        plain = Engine.seal(payload, _passport(plan, config, outcome, payload, 0.0))
        shapes = {name: span.opt for name, span in engine.passport.profiles[0].ranges.items()}
        graph = engine.path if card.payload_suffix == ".onnx" else None
        feeds = random_inputs(plan.model.path, engine.signature, shapes, engine=graph)
        with (
            load(engine, verify=False, allow_fallback=config.allow_fallback) as quantised,
            load(plain, verify=False, allow_fallback=config.allow_fallback) as other,
        ):
            return alternate(
                lambda: quantised.infer(feeds),
                lambda: other.infer(feeds),
                against=f"an engine of the model as it was given ({outcome.precision.main or 'fp32'}), built alike",
                shapes=shapes,
            )
    except TrtEngineError as error:  # an indication: the engine itself is proved without it
        log.debug("the engine was not timed beside one in FP32: %s", error.message)
        return None


@contextlib.contextmanager
def _preparing(plan: BuildPlan, folder: Path) -> Iterator[Prepared]:
    """The model in the precision asked for; a copy that had to be made is gone afterwards."""
    beside = folder / ".prepared"
    try:
        yield prepare(plan.model, plan.config, beside)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _narrower(plan: BuildPlan, attempt: Attempt) -> Iterator[str]:
    if attempt.config.profiles != plan.profiles:
        yield (
            "the ladder fixed the shapes: this engine takes "
            f"{', '.join(map(str, attempt.config.profiles))} and nothing else; other sizes need an engine of their own"
        )


def _built_by(
    card: Backend,
    prepared: Prepared,
    plan: BuildPlan,
    config: BuildConfig,
    payload: Path,
    doing: Callable[[str], None],
) -> BuildOutcome:
    """What the backend built, with what was done before it; `PrecisionError` when it is not what was asked for."""
    asked = config.precision
    try:
        with _places(card, plan, payload, doing) as places:
            outcome: BuildOutcome = card.half("builder")().build(prepared.model, config, places)
    except PrecisionError:
        if asked is not None and payload.is_file():  # the backend's own count; with its graph the nodes can be named
            _keep_the_contract(
                card, prepared, plan, payload, BuildOutcome(plan.model.signature, Precision(asked), _NO_NEEDS)
            )
        raise
    if not payload.is_file() or not payload.stat().st_size:
        raise BuildError(f"the backend `{card.name}` wrote no payload", hint="`-v` shows its log")
    if asked is not None and (doubt := _keep_the_contract(card, prepared, plan, payload, outcome)):
        log.warning("%s", doubt)
        outcome = replace(outcome, warnings=(*outcome.warnings, doubt))
    return replace(outcome, ladder=(*prepared.steps, *outcome.ladder), notes=outcome.notes | prepared.notes)


@contextlib.contextmanager
def _places(card: Backend, plan: BuildPlan, payload: Path, doing: Callable[[str], None]) -> Iterator[BuildPlaces]:
    """Where the build puts what it makes; an error says where its log lies, and timings found are shared afterwards."""
    if not card.builds_log:
        yield BuildPlaces(payload, doing=doing)
        return
    shared = plan.store.timing_cache(plan.identity)
    named = plan.config.timing_cache or shared
    log_path = plan.places_log
    assert log_path is not None
    for place in (log_path, named, shared):
        ensure_folder(place.parent)
    seeded = named != shared and _copied(shared, named)
    try:
        yield BuildPlaces(payload, log_path, named, doing)
    except TrtEngineError as error:
        if log_path.exists():
            error.hint = f"{error.hint}; " if error.hint else ""
            error.hint += f"{WORDS_ARE_IN}`{log_path}`"
        raise
    if named != shared and (seeded or not shared.exists()):
        _copied(named, shared, again=True)  # what the store had is in it


def _copied(source: Path, target: Path, *, again: bool = False) -> bool:
    """Whether `target` is now a copy of a timing cache; one that is there already is left alone unless `again`."""
    if not source.is_file() or (target.exists() and not again):
        return False
    with contextlib.suppress(OSError), staged_copy(source, target) as copy:
        copy.replace(target)
        return True
    return False


_NO_NEEDS = Needs("", "")


def _keep_the_contract(
    card: Backend, prepared: Prepared, plan: BuildPlan, payload: Path, outcome: BuildOutcome
) -> str | None:
    """`PrecisionError` unless the contract holds; what to say where the engine itself does not tell."""
    asked = plan.config.precision
    assert asked is not None
    readable = card.payload_suffix == ".onnx"
    proof = prove_engine(
        asked,
        read_proto(prepared.model.path),
        read_proto(payload) if readable else None,
        outcome.precision.found,
        providers=_providers(plan, outcome),
        compiled=outcome.compiled,
        excluded=prepared.excluded,
        tf32="tf32" in outcome.precision.found,
        not_fused={} if plan.target is None else PlacedGraph(read_proto(prepared.model.path)).refusals(plan.target),
    )
    for miss in proof.misses if proof.kept else ():
        log.debug("%s: `%s` (%s) is %s", asked, miss.node, miss.op, miss.reason)
    proof.require(_other_than_asked(plan, prepared))
    return None if proof.judged else f"the precision contract could not be proved: {proof.remark}"


def _providers(plan: BuildPlan, outcome: BuildOutcome) -> tuple[str, ...]:
    """As a miss names what computes: the target of a quantised graph, else the providers."""
    if plan.target is not None:
        return (quant_target(plan.target).title,)
    return outcome.needs.providers or plan.config.providers or (parse_device(plan.config.device)[0],)


def _other_than_asked(plan: BuildPlan, prepared: Prepared) -> str:
    """What to type when the engine is not what was asked for."""
    asked, path = plan.config.precision, plan.source or plan.model.path
    if asked in ("fp32", "tf32"):
        return "precision is in the graph: export the model in it, or leave `--precision` out"
    kernels = "leave `--precision` out to build the graph as it is, and the passport says what it runs in"
    if prepared.steps and asked in ("fp16", "bf16"):
        made = shlex.quote(str(path.with_suffix(f".{asked}.onnx")))
        cast = f"`trt-engine cast {shlex.quote(str(path))} --to {asked} -o {made}`"
        return f"build for a device that has {asked} kernels, or {cast} and {kernels}"
    if plan.target is not None:  # kernels are there: it is the graph that they do not take whole
        return kernels
    return f"build for a device that has {asked} kernels, or {kernels}"


def _passport(plan: BuildPlan, config: BuildConfig, outcome: BuildOutcome, payload: Path, seconds: float) -> Passport:
    """The passport; `config` is what the engine was built with, after the ladder."""
    device = outcome.device or plan.config.device
    kind, number = parse_device(device)
    return Passport(
        schema="trt-engine/passport",
        schema_version=PASSPORT_VERSION,
        backend=plan.config.backend,
        payload=payload_of(payload, outcome.files),
        model=Source(
            plan.model.name, plan.model.digest, plan.model.opsets.get(""), str(plan.source or plan.model.path)
        ),
        signature=outcome.signature,
        profiles=config.profiles,
        precision=outcome.precision,
        device=device,
        build=Build(
            command=plan.command,
            config=msgspec.json.decode(msgspec.json.encode(config.key())),  # plain, as it is read back
            seconds=seconds,
            identity=plan.identity,
            warnings=outcome.warnings,
            ladder=outcome.ladder,
            notes=outcome.notes,
        ),
        environment=Environment.here(number if kind == "cuda" else None),
        needs=outcome.needs,
        key=plan.key,
        vision=_declared(plan.model),
    )


def _declared(model: Model) -> dict[str, Any] | None:
    """The pre- and post-processing the model declares; a declaration that cannot be read is said, not fatal."""
    try:
        found = vision_of(model.path)
    except ModelError as error:
        log.warning("the declared pre- and post-processing is left out: %s", error.message)
        return None
    return None if found is None else found.as_dict()


@contextlib.contextmanager
def _heartbeat(every_s: float = _HEARTBEAT_S) -> Iterator[Callable[[str], None]]:
    """Say now and then that a silent builder is alive, and what it is at, which the function given is told."""
    done, started, at = threading.Event(), time.monotonic(), [""]

    def beat() -> None:
        while not done.wait(every_s):
            log.info("still building (%.0f s)%s", time.monotonic() - started, f": {at[0]}" if at[0] else "")

    def doing(text: str) -> None:
        at[0] = text

    thread = threading.Thread(target=beat, name="build-heartbeat", daemon=True)
    thread.start()
    try:
        yield doing
    finally:
        done.set()
        thread.join()


# ------------------------------------------------------------------------------------------------ after


def _deliver(engine: Engine, out: Path, command: str) -> Engine:
    """A whole copy at `out`; a copy that is broken off is taken away again."""
    out = end_of_links(out)
    users_own = out.stat().st_ino if out.exists() and not passport_path(out).exists() else None
    try:
        copy = engine.copy_to(out, command=command)
    except BaseException as error:
        if not passport_path(out).exists() and not (out.exists() and out.stat().st_ino == users_own):
            for path in (out, *(out.with_name(item.file) for item in engine.passport.payload[1:])):
                path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise explain(error, out) from error
        raise
    log.info("engine: `%s`", out)
    return copy

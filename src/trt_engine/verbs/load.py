"""`load`: an engine on disk (or in memory), ready for inference on one or several devices."""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

import msgspec

from trt_engine.atomic_io import open_regular, write_atomic
from trt_engine.backend import BackendSpec, get_backend, list_backends, runtime_backend
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.config.settings import from_values, replace_values, setting_names, take_settings
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine, engine_argument, is_onnx_model, read_passport
from trt_engine.errors import EngineError, UsageError
from trt_engine.format import quoted
from trt_engine.protocols import Session
from trt_engine.public_function import public_function
from trt_engine.records.passport import Passport
from trt_engine.runtime.assemble import assemble
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.runtime.replicas import Strategy, resolve_strategy
from trt_engine.tensors import suggest

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import LoadSettings

log = logging.getLogger(__name__)


@public_function
def load(
    engine: Engine | Path | str | bytes,
    *,
    passport: Passport | dict[str, Any] | bytes | str | None = None,
    config: RuntimeConfig | None = None,
    verify: bool = True,
    devices: Sequence[str | int] | str | None = None,
    balance: Literal["round robin", "least busy", "by use"] | Strategy = "least busy",
    **settings: Unpack[LoadSettings],
) -> InferenceEngine:
    """The engine, ready to answer: an `Engine`, the path of its payload or passport, or its bytes with a `passport`.

    `settings` are those of `RuntimeConfig` (`device=`, `contexts=`, `streams=`, `graphs=`, `batching=`, `providers=`,
    `allow_fallback=`, `options=`) and win over `config`. `devices=["cuda:0", "cuda:1"]` (or `device="cuda:0,1"`) loads the
    engine on each; `balance` selects the device: `round robin`, `least busy`, `by use`, or a function. Digests are checked
    unless `verify=False`. Raises `EngineError` for an engine that was changed, is foreign, or cannot be used here.
    `UsageError` for settings that contradict each other, unknown devices, or an engine in bytes without `passport`.
    """
    values: dict[str, Any] = {**settings}
    named = _resolve_devices(devices, values)
    config = runtime_config(config, values)
    resolve_strategy(balance)
    folder: tempfile.TemporaryDirectory[str] | None = None
    if isinstance(engine, bytes | bytearray | memoryview):
        folder = tempfile.TemporaryDirectory(prefix="trt-engine-")
    elif passport is not None:
        raise UsageError("`passport=` belongs to an engine given as bytes", hint="leave it out: it is beside the file")
    try:
        opened = _unpack(bytes(engine), passport, Path(folder.name)) if folder else open_engine(engine)  # type: ignore[arg-type]
        if verify:
            opened.verify()
        sessions = _load_sessions(opened, config, named)
        runner = assemble(sessions, opened.passport.profiles, config, devices=named, balance=balance)
        try:
            again = functools.partial(load, config=config, verify=verify, devices=named, balance=balance)
            reload = functools.partial(_reload, opened, again, in_bytes=folder is not None)
            return InferenceEngine(runner, opened, on_close=folder.cleanup if folder else None, reload=reload)
        except BaseException:
            runner.close()
            raise
    except BaseException:
        if folder is not None:
            folder.cleanup()
        raise


def _reload(engine: Engine, again: functools.partial[InferenceEngine], *, in_bytes: bool) -> tuple[Any, ...]:
    """How another process loads the engine: from its path, or from its bytes where it was given as those."""
    if in_bytes:
        with open_regular(engine.path, error=EngineError) as file:
            return functools.partial(again, passport=engine.passport), (file.read(),)
    return again, (engine.path.absolute(),)


def _load_sessions(engine: Engine, config: RuntimeConfig, devices: Sequence[str] | None) -> list[Session]:
    """The engine loaded on each device; where one cannot, the others are closed again."""
    sessions: list[Session] = []
    try:
        wanted_on: Sequence[str | None] = devices or [config.device]
        for device in wanted_on:
            wanted = dataclasses.replace(config, device=device)
            backend_spec = runtime_backend(check_loadable(engine, wanted))
            sessions.append(backend_spec.load_component("runtime")().load(engine, wanted))
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions


def _resolve_devices(devices: Sequence[str | int] | str | None, settings: dict[str, Any]) -> list[str] | None:
    """The devices of `devices=` or of `device="cuda:0,1"`, each once and known to be there; None where one is enough."""
    device = settings.get("device")
    if devices is not None and device is not None:
        raise UsageError("both `device` and `devices` are given", hint="leave one of them out")
    if devices is None:
        if not isinstance(device, str) or "," not in device:
            return None
        devices = device
        del settings["device"]
    given = devices.split(",") if isinstance(devices, str) else list(devices)
    if not given:
        raise UsageError("`devices` is empty", hint="as `devices=[0, 1]`")
    found: list[str] = []
    usual = "cuda"
    for item in given:
        if isinstance(item, str) and item.strip().isdecimal():
            item = f"{usual}:{item.strip()}"  # `fake:0,1`: the second has the first one's type
        try:
            kind, number = parse_device(item if isinstance(item, str) else operator.index(item))
        except TypeError:
            raise UsageError(
                f"unknown device {item!r}", hint="expected names or numbers, as `devices=[0, 1]`"
            ) from None
        usual = kind
        name = kind if kind == "cpu" else f"{kind}:{number}"
        if name in found:
            raise UsageError(f"`{name}` is named twice", hint="`contexts=2` runs two inferences at once on one device")
        found.append(name)
    _check_devices_exist(found)
    return found


def _check_devices_exist(devices: Sequence[str]) -> None:
    there = len(info.gpus())
    for device in devices:
        kind, number = parse_device(device)
        if kind == "cuda" and there and number >= there:  # none: NVML is not available, and the backend checks
            raise UsageError(
                f"no device `{device}` here: {there} GPU{'s' if there > 1 else ''} can be seen",
                hint="`nvidia-smi -L` lists the GPUs; they count from 0",
            )


def merge_run_settings(
    values: Mapping[str, Any], runtime: RuntimeConfig | None, build: BuildConfig | None, *own: Any
) -> tuple[Any, ...]:
    """The configs with the named settings in place, `own` first; what running and building share goes to both."""
    known, rest = setting_names(RuntimeConfig, BuildConfig, *own), dict(values)
    if unknown := [name for name in values if name not in known]:
        raise UsageError(f"unknown setting `{unknown[0]}`", hint=suggest(unknown[0], sorted(known)))
    made = [replace_values(config, take_settings(rest, config)) for config in own]
    building = replace_values(build or BuildConfig(), take_settings(dict(rest), BuildConfig))
    get_backend(building.backend)  # an unknown one is refused for an engine too
    return (*made, runtime_config(runtime, take_settings(rest, RuntimeConfig)), building)


def build_for_runtime(build: BuildConfig, runtime: RuntimeConfig) -> BuildConfig:
    """The build settings for the device and providers that will run the engine, where those are named."""
    named = {name: value for name in ("device", "providers") if (value := getattr(runtime, name))}
    return dataclasses.replace(build, **named)


def runtime_config(config: RuntimeConfig | None, settings: dict[str, Any]) -> RuntimeConfig:
    """`config` with the named settings in place; a device number is a CUDA device."""
    batching = settings.get("batching")
    if batching is not None and not isinstance(batching, Batching):
        if not isinstance(batching, Mapping):
            raise UsageError(
                f"`batching` is a {type(batching).__name__}", hint="as `batching=te.Batching(max_batch=32)`"
            )
        settings = settings | {"batching": from_values(Batching, batching)}
    given: RuntimeConfig = from_values(RuntimeConfig, settings)
    return given if config is None else dataclasses.replace(config, **{name: getattr(given, name) for name in settings})


def open_engine(engine: Engine | Path | str, name: str = "engine") -> Engine:
    """The engine of a caller's argument `name`; the error for a model has the command that builds it, its sizes included."""
    given = engine_argument(engine, name)
    if is_onnx_model(given):
        raise EngineError(f"`{given}` is a model, expected an engine", hint=f"{build_command(Path(given))} makes one")
    return given if isinstance(given, Engine) else Engine.open(given)


def build_command(model: Path) -> str:
    """The command that builds an engine of the model, with the sizes that it needs, in backticks."""
    from trt_engine.reporting.tables import batch_option

    return f"`trt-engine build {quoted(model)}{batch_option(str(model))}`"


def _unpack(payload: bytes, passport: Any, folder: Path) -> Engine:
    """The engine of these bytes, in a temporary folder for as long as it is loaded."""
    if passport is None:
        raise UsageError("an engine given as bytes needs `passport=`", hint="`passport=Path('X.json').read_bytes()`")
    if isinstance(passport, str):
        passport = passport.encode()
    if not isinstance(passport, Passport):
        passport = read_passport(
            passport if isinstance(passport, bytes) else msgspec.json.encode(passport), "passport="
        )
    if len(passport.payload) != 1:
        files = ", ".join(f"`{item.file}`" for item in passport.payload[1:])
        raise EngineError(f"the engine has side files ({files}) and cannot be loaded from bytes", hint="give its path")
    return Engine(write_atomic(folder / Path(passport.payload[0].file).name, payload), passport)


def check_loadable(engine: Engine, config: RuntimeConfig) -> BackendSpec:
    """The spec of the engine's backend; raises unless this engine can be used here.

    Reads the passport alone. Raises `EngineError` where it cannot, `UsageError` for a device the backend does not have.
    """
    backend_spec = _backend_spec(engine)
    _check_device(backend_spec, engine, config)
    _check_compatibility(backend_spec, engine, config)
    _warn_unvalidated(engine)
    return backend_spec


_warned_engines: set[str] = set()
"""Digests of payloads that this process has warned of."""


def _warn_unvalidated(engine: Engine) -> None:
    """Warn once of an engine that nothing was compared with yet, or that failed its check."""
    validation, digest = engine.passport.validation, engine.passport.payload[0].digest
    if validation is None or validation.state == "passed" or digest in _warned_engines:
        return
    _warned_engines.add(digest)
    after = f"`trt-engine validate {shlex.quote(str(engine.path))}` checks it"
    failed = "its validation " if validation.state == "failed" else ""
    log.warning("`%s`: %s%s; %s", engine.path.name, failed, validation.summary, after)


def _backend_spec(engine: Engine) -> BackendSpec:
    backend_spec = list_backends().get(engine.passport.backend)
    if backend_spec is None:
        raise EngineError(
            f"`{engine.path}` was built by the backend `{engine.passport.backend}`, which is not here",
            hint="`trt-engine doctor` lists the backends that are",
        )
    return backend_spec


def _check_device(spec: BackendSpec, engine: Engine, config: RuntimeConfig) -> None:
    wanted = config.device or engine.passport.device
    kind, _ = parse_device(wanted)
    if kind not in spec.devices:
        raise UsageError(
            f"the backend `{spec.name}` cannot run on `{wanted}`",
            hint="expected " + " or ".join(f"`{device}`" for device in spec.devices),
        )


def _check_compatibility(spec: BackendSpec, engine: Engine, config: RuntimeConfig) -> None:
    if not spec.provides("compatibility"):
        return
    compatibility = spec.load_function("compatibility")(engine, config)
    if compatibility.status in ("refuse", "rebuild"):
        raise EngineError(f"`{engine.path}`: {compatibility.reason}", hint=compatibility.command or "build it again")
    if compatibility.status == "unknown":
        log.info("whether `%s` loads here is not known: %s", engine.path.name, compatibility.reason)
    if compatibility.status == "penalty":
        log.warning("`%s` loads with a penalty: %s", engine.path.name, compatibility.reason)

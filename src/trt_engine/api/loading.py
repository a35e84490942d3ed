"""`load`: from an engine on disk (or in memory) to one that answers, on one device or on several."""

from __future__ import annotations

import dataclasses
import logging
import operator
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.backend import Backend, backends, runner_of
from trt_engine.config import Batching, RuntimeConfig, from_values
from trt_engine.device import info, parse_device
from trt_engine.engine import Engine, Passport, read_passport
from trt_engine.errors import EngineError, UsageError
from trt_engine.files import path_of, write_whole
from trt_engine.protocols import Session
from trt_engine.runtime.assembly import assemble
from trt_engine.runtime.balance import Strategy, strategy
from trt_engine.runtime.instance import InferenceEngine

__all__ = ["admit", "load", "runtime_config"]

log = logging.getLogger(__name__)


def load(
    engine: Engine | Path | str | bytes,
    *,
    passport: Passport | dict[str, Any] | bytes | str | None = None,
    config: RuntimeConfig | None = None,
    verify: bool = True,
    devices: Sequence[str | int] | str | None = None,
    balance: str | Strategy = "least busy",
    **settings: Any,
) -> InferenceEngine:
    """The engine, ready to answer: an `Engine`, the path of its payload or passport, or its bytes with a `passport`.

    `settings` are those of `RuntimeConfig` (`device=`, `contexts=`, `streams=`, `graphs=`, `batching=`, `providers=`,
    `allow_fallback=`, `options=`) and win over `config`. `devices=["cuda:0", "cuda:1"]` (or `device="cuda:0,1"`) loads the
    engine on each; `balance` says who answers: `round robin`, `least busy`, `by use`, or a function. The files' digests are
    checked unless `verify=False`. Raises `EngineError` for an engine that was changed, is foreign, or cannot be used here.
    """
    named = _devices(devices, settings)
    config = runtime_config(config, settings)
    strategy(balance)
    folder: tempfile.TemporaryDirectory[str] | None = None
    if isinstance(engine, bytes | bytearray | memoryview):
        folder = tempfile.TemporaryDirectory(prefix="trt-engine-")
    elif passport is not None:
        raise UsageError(
            "`passport=` belongs to an engine given as bytes", hint="leave it out: it lies beside the file"
        )
    try:
        opened = _unpacked(bytes(engine), passport, Path(folder.name)) if folder else _opened(engine)  # type: ignore[arg-type]
        if verify:
            opened.verify()
        sessions = _sessions(opened, config, named)
        runner = assemble(sessions, opened.passport.profiles, config, devices=named, balance=balance)
        try:
            return InferenceEngine(runner, opened, on_close=folder.cleanup if folder else None)
        except BaseException:
            runner.close()
            raise
    except BaseException:
        if folder is not None:
            folder.cleanup()
        raise


def _sessions(engine: Engine, config: RuntimeConfig, devices: Sequence[str] | None) -> list[Session]:
    """The engine loaded on each device; where one cannot, the others are closed again."""
    sessions: list[Session] = []
    try:
        wanted_on: Sequence[str | None] = devices or [config.device]
        for device in wanted_on:
            wanted = dataclasses.replace(config, device=device)
            card = runner_of(admit(engine, wanted))
            sessions.append(card.half("runtime")().load(engine, wanted))
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions


def _devices(devices: Sequence[str | int] | str | None, settings: dict[str, Any]) -> list[str] | None:
    """The devices of `devices=` or of `device="cuda:0,1"`, each once and known to be there; None where one is enough."""
    device = settings.get("device")
    if devices is not None and device is not None:
        raise UsageError("both `device` and `devices` are given", hint="leave one of them out")
    if devices is None:
        if not isinstance(device, str) or "," not in device:
            return None
        devices = device
        del settings["device"]
    try:
        given = devices.split(",") if isinstance(devices, str) else list(devices)
    except TypeError:
        raise UsageError(f"`devices` is {devices!r}, expected several", hint="as `devices=[0, 1]`") from None
    if not given:
        raise UsageError("`devices` is empty", hint="as `devices=[0, 1]`")
    found: list[str] = []
    usual = "cuda"
    for item in given:
        if isinstance(item, str) and item.strip().isdecimal():
            item = f"{usual}:{item.strip()}"  # `fake:0,1`: the second is of the kind of the first
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
    _check_there(found)
    return found


def _check_there(devices: Sequence[str]) -> None:
    there = len(info.gpus())
    for device in devices:
        kind, number = parse_device(device)
        if kind == "cuda" and there and number >= there:  # none: NVML is not there to tell, and the backend will
            raise UsageError(
                f"there is no device `{device}` here: {there} GPU{'s' if there > 1 else ''} can be seen",
                hint="`nvidia-smi -L` lists the GPUs; they count from 0",
            )


def runtime_config(config: RuntimeConfig | None, settings: dict[str, Any]) -> RuntimeConfig:
    """`config` with the named settings in place; a device number is a CUDA device."""
    if config is not None and not isinstance(config, RuntimeConfig):
        raise UsageError(f"`config` is a {type(config).__name__}", hint="as `config=RuntimeConfig(contexts=2)`")
    batching = settings.get("batching")
    if batching is not None and not isinstance(batching, Batching):
        if not isinstance(batching, Mapping):
            raise UsageError(
                f"`batching` is a {type(batching).__name__}", hint="as `batching=te.Batching(max_batch=32)`"
            )
        settings = settings | {"batching": from_values(Batching, batching)}
    given: RuntimeConfig = from_values(RuntimeConfig, settings)
    return given if config is None else dataclasses.replace(config, **{name: getattr(given, name) for name in settings})


def _opened(engine: Engine | Path | str) -> Engine:
    return engine if isinstance(engine, Engine) else Engine.open(path_of(engine, "`engine`"))


def _unpacked(payload: bytes, passport: Any, folder: Path) -> Engine:
    """The engine of these bytes, in a folder of its own for as long as it is loaded."""
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
    return Engine(write_whole(folder / Path(passport.payload[0].file).name, payload), passport)


def admit(engine: Engine, config: RuntimeConfig) -> Backend:
    """The card of the engine's backend, after it was asked whether this engine can be used here.

    Reads the passport alone. Raises `EngineError` where it cannot, `UsageError` for a device the backend does not have.
    """
    card = _card(engine)
    _check_device(card, engine, config)
    _judge(card, engine, config)
    return card


def _card(engine: Engine) -> Backend:
    card = backends().get(engine.passport.backend)
    if card is None:
        raise EngineError(
            f"`{engine.path}` was built by the backend `{engine.passport.backend}`, which is not here",
            hint="`trt-engine doctor` lists the backends that are",
        )
    return card


def _check_device(card: Backend, engine: Engine, config: RuntimeConfig) -> None:
    wanted = config.device or engine.passport.device
    kind, _ = parse_device(wanted)
    if kind not in card.devices:
        raise UsageError(
            f"the backend `{card.name}` cannot run on `{wanted}`",
            hint="expected " + " or ".join(f"`{device}`" for device in card.devices),
        )


def _judge(card: Backend, engine: Engine, config: RuntimeConfig) -> None:
    if not card.has("verdict"):
        return
    verdict = card.call("verdict")(engine, config)
    if verdict.verdict in ("refuse", "rebuild"):
        raise EngineError(f"`{engine.path}`: {verdict.reason}", hint=verdict.command or "build it again")
    if verdict.verdict == "penalty":
        log.warning("`%s` loads with a penalty: %s", engine.path.name, verdict.reason)

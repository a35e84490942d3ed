"""A bundle on its way: components built one by one, the report written before and after each."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import filelock
import msgspec

from trt_engine.api import building
from trt_engine.api.chaining import name_it, try_out
from trt_engine.bundling import contracts
from trt_engine.bundling.logs import BuildLog
from trt_engine.bundling.plan import REPORT, TIMING_CACHE, BundlePlan, Planned
from trt_engine.bundling.report import artifacts, component, connections, facts, failure, head, inside, with_engine
from trt_engine.bundling.staging import stage
from trt_engine.config import RuntimeConfig
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import EngineError, MemoryExhausted, ModelError, TrtEngineError
from trt_engine.files import copy_whole, explain, json_bytes, staging_folder, write_whole
from trt_engine.records import BundleComponent, BundleConnection, BundleFailure, BundleReport, BundleStep, document

__all__ = ["STAGED", "Work", "side_files"]

log = logging.getLogger(__name__)

STAGED = "staged"


@dataclass(slots=True)
class Work:
    """What is known of each component so far, and what is done about it.

    A component that fails leaves the others; its error is kept. Whatever ends the process, the report in the folder is true:
    it is complete only when everything is.
    """

    plan: BundlePlan
    force: bool
    started: float = field(default_factory=time.monotonic)
    since: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    components: dict[str, BundleComponent] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    connections: tuple[BundleConnection, ...] = ()
    chain: tuple[BundleStep, ...] = ()
    errors: list[TrtEngineError] = field(default_factory=list)
    whole: TrtEngineError | None = None
    """What is wrong with no component alone."""
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.components = {item.name: component(item, "pending") for item in self.plan.components}
        self.connections = connections(self.plan)
        self.warnings += self.plan.warnings

    def done(self, *, run: bool) -> BundleReport:
        """All of it, and the report; with `run` the engines are tried, alone and together."""
        self.warnings += self._left_over()
        for warning in self.warnings:
            log.warning("%s", warning)
        for item in self.plan.components:
            self._one(item)
        self._keep_timing_cache()
        self._prove()
        if run and not self.errors:
            self._try()
        return self.write(end=True)

    # -------------------------------------------------------------------------------------------- one component

    def kept(self, item: Planned) -> Engine | None:
        """The engine in the folder, when it is whole, of this key, and was proved as it would be now."""
        try:
            engine = Engine.open(item.target)
            if not item.build.is_met_by(engine):
                return None
            engine.verify()
        except (EngineError, ModelError, OSError):
            return None
        return engine

    def _one(self, item: Planned) -> None:
        started, made = time.monotonic(), self.components[item.name]
        if not self.force and (engine := self.kept(item)) is not None:
            log.info("%s: `%s` is there already, of this model and these settings", item.name, item.target.name)
            self._has(item, engine, "kept", started)
            return
        self.components[item.name] = replace(made, status="building")
        self.write()
        book = BuildLog(item.log, head(item, self.plan))
        try:
            with book.open():
                try:
                    engine, cached = self._build(item)
                except BaseException as error:
                    book.add(f"failed: {str(error) or type(error).__name__}")
                    raise
                if cached:
                    book.add("taken from the store, where an equal command had put it")
                for line in facts(engine):
                    book.add(line)
            self._has(item, engine, "stored" if cached else "built", started)
        except (TrtEngineError, MemoryError, OSError) as error:
            self._failed(item, error, started)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            why = BundleFailure(type(error).__name__, str(error) or "interrupted", None, 130 if stopped else 1)
            self.components[item.name] = replace(
                made,
                status="interrupted" if stopped else "failed",
                seconds=time.monotonic() - started,
                log=inside(item.log, self.plan.folder),
                error=why,
            )
            self.write()
            raise

    def _build(self, item: Planned) -> tuple[Engine, bool]:
        """The engine, copied into the folder; True when the store had it."""
        old = side_files(item.target)
        if not self.force and item.build.in_store() is not None:  # nothing to stage
            built = building.carry_out(replace(item.build, source=item.model.path))
        else:
            with staging_folder(self.plan.folder / STAGED) as beside:
                model = stage(item.model, beside / item.name)
                files = ", ".join((model.path.name, *(file.location for file in model.external)))
                log.info("%s: staged %s", item.name, files)
                staged = replace(item.build, model=model, source=item.model.path)
                try:
                    built = building.carry_out(staged, force=self.force)
                except TrtEngineError as error:  # the staged copy will be gone when this is read
                    _say_instead(error, str(model.path.parent), str(item.model.path.parent))
                    raise
        in_use = {name for other in self.plan.components for name in side_files(other.target)}
        for name in old - in_use:
            (self.plan.folder / name).unlink(missing_ok=True)
        return built.engine, built.cached

    def _has(self, item: Planned, engine: Engine, status: Any, started: float) -> None:
        self.engines[item.name] = engine
        made = replace(component(item, status), seconds=time.monotonic() - started)
        self.components[item.name] = with_engine(made, engine, item, self.plan.folder)
        self.write()

    def _failed(self, item: Planned, error: Exception, started: float) -> None:
        told = _told(error, self.plan.folder)
        name_it(told, item.name)
        self.errors.append(told)
        log.error("%s", told.message)
        stale = item.target.exists()
        self.components[item.name] = replace(
            component(item, "failed"),
            seconds=time.monotonic() - started,
            log=inside(item.log, self.plan.folder),
            error=failure(told),
            warnings=(f"`{item.target.name}` in the folder is of an earlier build",) if stale else (),
        )
        self.write()

    # -------------------------------------------------------------------------------------------- the whole

    def _left_over(self) -> list[str]:
        """Engines of an earlier bundle in this folder that are of no component any more."""
        try:
            before = msgspec.json.decode((self.plan.folder / REPORT).read_bytes(), type=BundleReport)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, TrtEngineError):
            return []
        names = {item.engine for item in before.components if item.engine} - {
            item.target.name for item in self.plan.components
        }
        return [
            f"`{name}` in the folder is of an earlier bundle, and of no component of this one"
            for name in sorted(names)
            if Path(name).name == name and (self.plan.folder / name).exists()
        ]

    def _prove(self) -> None:
        """The connections again, between the engines' own signatures."""
        signatures = {name: engine.signature for name, engine in self.engines.items()}
        resolved = {item.name: item.resolved for item in self.plan.components}
        checked = []
        for link, made in zip(self.plan.links, self.connections, strict=True):
            held = None
            if {link.producer, link.consumer} <= set(signatures):
                held = True
                try:
                    contracts.check(self.plan.meta, [link], signatures, resolved, of="engines")
                except TrtEngineError as error:
                    held = False
                    self._wrong(error)
            checked.append(replace(made, held=held))
        self.connections = tuple(checked)

    def _try(self) -> None:
        """Every engine alone, then all in a chain."""
        fills = {item.name: item.resolved.fills for item in self.plan.components}
        config = RuntimeConfig(allow_fallback=self.plan.config.allow_fallback)
        try:
            smokes, self.chain = try_out(self.engines, self.connections, fills, config=config)
        except (TrtEngineError, MemoryError) as error:
            self._wrong(_told(error, self.plan.folder))
            return
        for name, smoke in smokes.items():
            self.components[name] = replace(self.components[name], smoke=smoke)

    def _wrong(self, error: TrtEngineError) -> None:
        self.errors.append(error)
        self.whole = self.whole or error
        log.error("%s", error.message)

    def _keep_timing_cache(self) -> None:
        """The folder has the timings its engines were built with, wherever they were kept while building."""
        target, named = self.plan.folder / TIMING_CACHE, self.plan.config.timing_cache
        if not self.plan.card.builds_log:
            return
        with contextlib.suppress(OSError, filelock.Timeout):  # the builder's lock is of no use to who gets the folder
            path = target.with_name(f"{target.name}.lock")
            if path.is_file():
                with filelock.FileLock(path, timeout=0):
                    path.unlink()
        if named is not None and named != target and named.is_file():
            copy_whole(named, target)
        if target.is_file():
            return
        for item in self.plan.components:  # nothing was built here: all engines were there or in the store
            kept = self.plan.store.timing_cache(item.build.identity)
            if kept.is_file():
                copy_whole(kept, target)
                return

    # -------------------------------------------------------------------------------------------- the report

    def report(self, *, end: bool = False) -> BundleReport:
        plan = self.plan
        kind, number = parse_device(plan.config.device)
        made = tuple(self.components.values())
        timings = [TIMING_CACHE] if (plan.folder / TIMING_CACHE).is_file() else []
        told = [*self.warnings, *(f"{item.name}: {text}" for item in made for text in item.warnings)]
        return BundleReport(
            meta=str(plan.meta.path),
            meta_digest=plan.meta.digest,
            name=plan.meta.name,
            version=plan.version,
            model_version=plan.meta.version,
            folder=str(plan.folder),
            backend=plan.config.backend,
            device=plan.config.device,
            complete=end and not self.errors and all(item.name in self.engines for item in plan.components),
            components=made,
            connections=self.connections,
            environment=Environment.here(number if kind == "cuda" else None),
            started=self.since,
            seconds=time.monotonic() - self.started,
            artifacts=artifacts(plan.folder, made, *timings) | {"report": str(plan.folder / REPORT)},
            chain=self.chain,
            error=failure(self.whole) if self.whole else None,
            warnings=tuple(dict.fromkeys(told)),
        )

    def write(self, *, end: bool = False) -> BundleReport:
        report = self.report(end=end)
        told = document("bundle", report, command=self.plan.command)
        write_whole(self.plan.folder / REPORT, msgspec.json.format(json_bytes(told), indent=2) + b"\n")
        return report


def _told(error: Exception, folder: Path) -> TrtEngineError:
    if isinstance(error, TrtEngineError):
        return error
    if isinstance(error, OSError):
        return explain(error, folder)
    return MemoryExhausted("out of memory", hint="a narrower range, as `--dim T=16:64:256`")


def _say_instead(error: TrtEngineError, path: str, other: str) -> None:
    error.message = error.message.replace(path, other)
    error.hint = error.hint.replace(path, other) if error.hint else error.hint
    error.args = (error.message,)


def side_files(target: Path) -> set[str]:
    """The side files of the engine at `target`; none where there is no whole one."""
    try:
        return {item.file for item in Engine.open(target).passport.payload[1:]}
    except (EngineError, ModelError, OSError):
        return set()

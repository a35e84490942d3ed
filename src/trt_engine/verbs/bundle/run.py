"""`bundle`: builds all engines of a multi-component model into one folder, with logs and one report.

`plan` (in `bundle_plan`) validates and writes nothing; `execute` builds changed components.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import time
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import filelock
import msgspec

from trt_engine import atomic_io
from trt_engine.config.build import BuildConfig, BundleConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import replace_values, take_settings
from trt_engine.device import parse_device
from trt_engine.engine import Engine
from trt_engine.environment import Environment
from trt_engine.errors import EngineError, MemoryExhausted, ModelError, TrtEngineError
from trt_engine.model import Model
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.base import Failure, write_document
from trt_engine.records.bundle import BundleComponent, BundleConnection, BundleReport, BundleStep
from trt_engine.store import Store
from trt_engine.verbs.build import run as build
from trt_engine.verbs.bundle import bundle_plan as connections_module
from trt_engine.verbs.bundle import bundle_report
from trt_engine.verbs.bundle.bundle_plan import LOGS, REPORT, TIMING_CACHE, BundlePlan, PlannedComponent, plan
from trt_engine.verbs.bundle_chain import prefix_error, run_chain

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import BundleSettings


@dataclass(frozen=True, slots=True)
class BundleResult:
    """The report, and the first error or None."""

    report: BundleReport
    error: TrtEngineError | None = None


@public_function
def bundle(
    meta: Path | str,
    out: Path | str,
    *,
    bundle: BundleConfig | None = None,
    config: BuildConfig | None = None,
    store: Store | None = None,
    progress: ProgressOption = False,
    **settings: Unpack[BundleSettings],
) -> BundleReport:
    """Build all engines of the model described by `meta` (a `model_meta.json`) into the folder `out`; returns the report.

    `settings` are those of `BundleConfig` and `BuildConfig`: `dims` are ranges of dimensions
    (`{"T": (16, 64, 512), "joint.T": 8}`), `profiles` shape ranges of one input
    (`"encoder:audio_signal:1x128x16,1x128x64,1x128x512"`), `onnx_dir` is the folder of the ONNX files if not that of
    `meta`, `run` runs every engine and the chain. After a failed component the others are still built; then its error is
    raised, and the report in the folder has it.
    """
    given: dict[str, Any] = {**settings}
    bundle = replace_values(bundle or BundleConfig(), take_settings(given, BundleConfig))
    made = execute(plan(meta, out, bundle, replace_values(config or BuildConfig(), given), store=store))
    if made.error is not None:
        raise made.error
    return made.report


def execute(plan: BundlePlan) -> BundleResult:
    """Build the components of the plan; after a failed one the others are still built.

    Raises only for an interrupt or a folder that cannot be written; the report is written even then.
    """
    atomic_io.ensure_folder(plan.folder)
    atomic_io.ensure_folder(plan.folder / LOGS)
    busy = f"waiting for another process that builds into `{plan.folder}`"
    with atomic_io.file_lock(_lock_file(plan), busy=busy, by="TRT_ENGINE_STORE"):
        _remove_leftovers(plan)
        work = BundleRun(plan)
        report = work.execute()
        return BundleResult(report, work.errors[0] if work.errors else None)


def planned_report(plan: BundlePlan) -> BundleReport:
    """Dry-run report, with the engines that exist in the folder or the store."""
    work = BundleRun(plan)
    components = []
    for item in plan.components:
        there = None if plan.options.rebuild else work.existing_engine(item) or item.build.find_in_store()
        made = bundle_report.component_record(item, "planned")
        components.append(bundle_report.add_engine(made, there, item, plan.folder) if there else made)
    return replace(work.report(), components=tuple(components), dry_run=True, complete=False)


def _remove_leftovers(plan: BundlePlan) -> None:
    """Remove staged files and unused weights of a killed bundle; the folder is locked."""
    for folder in (plan.folder, plan.folder / LOGS):
        atomic_io.sweep_staged(folder)
    names = "|".join(re.escape(item.name) for item in plan.components)
    weights = re.compile(rf"({names})\.engine\.[0-9a-f]+\.weights")
    used = {name for path in plan.folder.glob("*.json") for name in side_files(path.with_suffix(""))}
    for path in plan.folder.iterdir():
        if weights.fullmatch(path.name) and path.name not in used:
            with contextlib.suppress(OSError):
                path.unlink()


def _lock_file(plan: BundlePlan) -> Path:
    """The lock file of the folder: in the store, not in the delivered folder."""
    where = hashlib.sha256(str(plan.folder.resolve()).encode(errors="surrogateescape")).hexdigest()[:32]
    return atomic_io.ensure_folder(plan.store.folder / "locks", by="TRT_ENGINE_STORE") / f"bundle-{where}.lock"


log = logging.getLogger(__name__)

_STAGING_FOLDER = "staged"


@dataclass(slots=True)
class BundleRun:
    """State of a bundle run.

    After a failed component the others are still built; errors are collected. The report in the folder is always valid, and
    `complete` only at the end of a run without errors.
    """

    plan: BundlePlan
    started: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    components: dict[str, BundleComponent] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    connections: tuple[BundleConnection, ...] = ()
    chain: tuple[BundleStep, ...] = ()
    errors: list[TrtEngineError] = field(default_factory=list)
    bundle_error: TrtEngineError | None = None
    """First error that concerns no single component."""
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.components = {item.name: bundle_report.component_record(item, "pending") for item in self.plan.components}
        self.connections = bundle_report.connection_records(self.plan)
        self.warnings += self.plan.warnings

    def execute(self) -> BundleReport:
        """Build all components; with `--run` also run the engines, alone and chained. Returns the report."""
        self.warnings += self._leftover_warnings()
        for warning in self.warnings:
            log.warning("%s", warning)
        for item in self.plan.components:
            self._build_component(item)
        self._copy_timing_cache()
        self._check_engine_connections()
        if self.plan.options.run and not self.errors:
            self._smoke_run()
        return self.write(end=True)

    # -------------------------------------------------------------------------------------------- one component

    def existing_engine(self, item: PlannedComponent) -> Engine | None:
        """The engine in the folder, if it is intact, has this key and passed the same checks."""
        try:
            engine = Engine.open(item.target)
            if engine.passport.key != item.build.key or item.build.rejection_reason(engine) is not None:
                return None
            engine.verify()
            if engine.reference is not None:
                engine.verify_reference()
        except (EngineError, ModelError, OSError):
            return None
        return engine

    def _build_component(self, item: PlannedComponent) -> None:
        started, made = time.monotonic(), self.components[item.name]
        if not self.plan.options.rebuild and (engine := self.existing_engine(item)) is not None:
            log.info("%s: `%s` exists, with this model and these settings", item.name, item.target.name)
            self._set_engine(item, engine, "kept", started)
            return
        self.components[item.name] = replace(made, status="building")
        self.write()
        book = bundle_report.BuildLog(item.log, bundle_report.log_header(item, self.plan))
        try:
            with book.open():
                try:
                    engine, cached = self._build_engine(item)
                except BaseException as error:
                    book.add(f"failed: {str(error) or type(error).__name__}")
                    raise
                if cached:
                    book.add("from the store, built by an earlier command")
                for line in bundle_report.log_footer(engine):
                    book.add(line)
            self._set_engine(item, engine, "stored" if cached else "built", started)
        except (TrtEngineError, MemoryError, OSError) as error:
            self._set_failed(item, error, started)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            why = Failure(type(error).__name__, str(error) or "interrupted", None, 130 if stopped else 1)
            self.components[item.name] = replace(
                made,
                status="interrupted" if stopped else "failed",
                seconds=time.monotonic() - started,
                log=bundle_report.relative_name(item.log, self.plan.folder),
                error=why,
            )
            self.write()
            raise

    def _build_engine(self, item: PlannedComponent) -> tuple[Engine, bool]:
        """Build the engine into the folder; True if it came from the store."""
        old = side_files(item.target)
        if not self.plan.options.rebuild and item.build.find_in_store() is not None:  # nothing to stage
            built = build.execute(replace(item.build, source=item.model.path))
        else:
            with atomic_io.staging_folder(self.plan.folder / _STAGING_FOLDER) as beside:
                model = stage_model(item.model, beside / item.name)
                files = ", ".join((model.path.name, *(file.location for file in model.external)))
                log.info("%s: staged %s", item.name, files)
                staged = replace(item.build, model=model, source=item.model.path)
                try:
                    built = build.execute(staged, rebuild=self.plan.options.rebuild)
                except TrtEngineError as error:  # the staged copy is temporary
                    _replace_path(error, str(model.path.parent), str(item.model.path.parent))
                    raise
        in_use = {name for other in self.plan.components for name in side_files(other.target)}
        for name in old - in_use:
            (self.plan.folder / name).unlink(missing_ok=True)
        return built.engine, built.cached

    def _set_engine(self, item: PlannedComponent, engine: Engine, status: Any, started: float) -> None:
        self.engines[item.name] = engine
        made = replace(bundle_report.component_record(item, status), seconds=time.monotonic() - started)
        self.components[item.name] = bundle_report.add_engine(made, engine, item, self.plan.folder)
        self.write()

    def _set_failed(self, item: PlannedComponent, error: Exception, started: float) -> None:
        stated = _as_error(error, self.plan.folder)
        prefix_error(stated, item.name)
        self.errors.append(stated)
        log.error("%s", stated.message)
        stale = item.target.exists()
        self.components[item.name] = replace(
            bundle_report.component_record(item, "failed"),
            seconds=time.monotonic() - started,
            log=bundle_report.relative_name(item.log, self.plan.folder),
            error=Failure.of(stated),
            warnings=(f"`{item.target.name}` in the folder is from an earlier build",) if stale else (),
        )
        self.write()

    # -------------------------------------------------------------------------------------------- the whole

    def _leftover_warnings(self) -> list[str]:
        """Warnings about engines of an earlier bundle that belong to no component."""
        try:
            before = atomic_io.decode_json(atomic_io.read_bounded(self.plan.folder / REPORT), BundleReport)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, TrtEngineError):
            return []
        names = {item.engine for item in before.components if item.engine} - {
            item.target.name for item in self.plan.components
        }
        return [
            f"`{name}` in the folder is from an earlier bundle and belongs to no component"
            for name in sorted(names)
            if Path(name).name == name and (self.plan.folder / name).exists()
        ]

    def _check_engine_connections(self) -> None:
        """Check the connections again with the engines' signatures."""
        signatures = {name: engine.signature for name, engine in self.engines.items()}
        resolved = {item.name: item.resolved for item in self.plan.components}
        checked = []
        for link, made in zip(self.plan.links, self.connections, strict=True):
            held = None
            if {link.producer, link.consumer} <= set(signatures):
                held = True
                try:
                    connections_module.check_connections(self.plan.meta, [link], signatures, resolved, what="engines")
                except TrtEngineError as error:
                    held = False
                    self._add_error(error)
            checked.append(replace(made, matches=held))
        self.connections = tuple(checked)

    def _smoke_run(self) -> None:
        """Run every engine alone, then all in a chain."""
        fills = {item.name: item.resolved.fills for item in self.plan.components}
        config = RuntimeConfig(allow_fallback=self.plan.config.allow_fallback)
        try:
            smokes, self.chain = run_chain(self.engines, self.connections, fills, config=config)
        except (TrtEngineError, MemoryError) as error:
            self._add_error(_as_error(error, self.plan.folder))
            return
        for name, smoke in smokes.items():
            self.components[name] = replace(self.components[name], smoke_run=smoke)

    def _add_error(self, error: TrtEngineError) -> None:
        self.errors.append(error)
        self.bundle_error = self.bundle_error or error
        log.error("%s", error.message)

    def _copy_timing_cache(self) -> None:
        """Copy the timing cache used for the build into the folder."""
        target, named = self.plan.folder / TIMING_CACHE, self.plan.config.timing_cache
        if not self.plan.backend_spec.writes_log:
            return
        with contextlib.suppress(OSError, filelock.Timeout):  # remove the builder's lock file from the delivered folder
            path = target.with_name(f"{target.name}.lock")
            if path.is_file():
                with filelock.FileLock(path, timeout=0):
                    path.unlink()
        if named is not None and named != target and named.is_file():
            atomic_io.copy_atomic(named, target)
        if target.is_file():
            return
        for item in self.plan.components:  # no engine was built in this run
            kept = self.plan.store.timing_cache(item.build.identity)
            if kept.is_file():
                atomic_io.copy_atomic(kept, target)
                return

    # -------------------------------------------------------------------------------------------- the report

    def report(self, *, end: bool = False) -> BundleReport:
        plan = self.plan
        kind, number = parse_device(plan.config.device)
        made = tuple(self.components.values())
        timings = [TIMING_CACHE] if (plan.folder / TIMING_CACHE).is_file() else []
        stated = [*self.warnings, *(f"{item.name}: {text}" for item in made for text in item.warnings)]
        return BundleReport(
            meta=str(plan.meta.path),
            name=plan.meta.name,
            version=plan.version,
            model_version=plan.meta.version,
            folder=str(plan.folder),
            backend=plan.config.backend,
            device=plan.config.device,
            complete=end and not self.errors and all(item.name in self.engines for item in plan.components),
            components=made,
            connections=self.connections,
            environment=Environment.detect(number if kind == "cuda" else None),
            started=self.started_at,
            seconds=time.monotonic() - self.started,
            artifacts=bundle_report.artifact_paths(plan.folder, made, *timings) | {"report": str(plan.folder / REPORT)},
            chain=self.chain,
            error=Failure.of(self.bundle_error) if self.bundle_error else None,
            warnings=tuple(dict.fromkeys(stated)),
        )

    def write(self, *, end: bool = False) -> BundleReport:
        report = self.report(end=end)
        write_document(self.plan.folder / REPORT, "bundle", report, command=self.plan.command)
        return report


def _as_error(error: Exception, folder: Path) -> TrtEngineError:
    if isinstance(error, TrtEngineError):
        return error
    if isinstance(error, OSError):
        return atomic_io.os_error(error, folder)
    return MemoryExhausted("out of memory", hint="use a narrower range, as `--dim T=16:64:256`")


def _replace_path(error: TrtEngineError, path: str, other: str) -> None:
    error.message = error.message.replace(path, other)
    error.hint = error.hint.replace(path, other) if error.hint else error.hint
    error.args = (error.message,)


def side_files(target: Path) -> set[str]:
    """Names of the side files of the engine at `target`; empty without an intact engine."""
    try:
        return {item.file for item in Engine.open(target).passport.payload[1:]}
    except (EngineError, ModelError, OSError):
        return set()


_COPY_CHUNK = 1 << 30


def stage_model(model: Model, folder: Path) -> Model:
    """Copy the model to `folder`, which is created.

    `open_model` has validated the side files (`graph.load.external_files`). They are copied because onnx and ONNX Runtime
    refuse linked weights, even hard links. `ModelError` if the model has changed.
    """
    target = folder / model.path.name
    _copy_file(model.path, target)
    side = []
    for item in model.external:
        goal = folder / item.location
        _copy_file(item.path, goal)
        side.append(replace(item, path=goal))
    if atomic_io.file_digest(target, *(item.path for item in side)) != model.digest:
        raise ModelError(
            f"`{model.path}` or its weights changed while being read",
            hint="run the same command again when the exporter has finished",
        )
    return replace(model, path=target, external=tuple(side))


def _copy_file(source: Path, target: Path) -> None:
    """Copy a file, sharing blocks if the file system can."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as old, target.open("wb") as new:
            try:
                while os.copy_file_range(old.fileno(), new.fileno(), _COPY_CHUNK):
                    pass
            except OSError:  # not supported by the file systems: copy the rest
                old.seek(new.seek(0, os.SEEK_END))
                shutil.copyfileobj(old, new, 1 << 20)
    except FileNotFoundError as error:
        raise ModelError(f"`{source}` no longer exists", hint="export it again") from error
    except OSError as error:
        raise atomic_io.os_error(error, target) from error

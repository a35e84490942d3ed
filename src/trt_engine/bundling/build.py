"""`bundle`: all engines of a model of several components in one folder, with their logs and one report.

`plan` (in `bundling.plan`) reads and checks everything and writes nothing; `carry_out` builds what changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import filelock

from trt_engine.bundling.plan import LOGS, REPORT, TIMING_CACHE, BundlePlan, plan
from trt_engine.bundling.report import component, with_engine
from trt_engine.bundling.work import STAGED, Work, side_files
from trt_engine.config import BuildConfig
from trt_engine.errors import TrtEngineError
from trt_engine.files import ensure_folder, explain
from trt_engine.records import BundleReport
from trt_engine.store import Store

__all__ = ["BundlePlan", "Bundled", "bundle", "carry_out", "plan", "planned_report"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bundled:
    """The report, and the first thing that went wrong; None when all is well."""

    report: BundleReport
    error: TrtEngineError | None = None


def bundle(
    meta: Path | str,
    out: Path | str,
    *,
    config: BuildConfig | None = None,
    dims: Mapping[str, object] | Iterable[str] = (),
    profiles: Iterable[str] = (),
    onnx_dir: Path | str | None = None,
    store: Store | None = None,
    run: bool = False,
    force: bool = False,
    yes: bool = False,
    command: str | None = None,
    **settings: Any,
) -> BundleReport:
    """All engines of the model that `meta` (a `model_meta.json`) describes, in the folder `out`; its report.

    `dims` are ranges of dimensions (`{"T": (16, 64, 512), "joint.T": 8}`), `profiles` whole ranges of one input
    (`"encoder:audio_signal:1x128x16,1x128x64,1x128x512"`), `onnx_dir` is where the ONNX files lie when not beside the file.
    `run` tries every engine and the whole chain. `settings` are those of `BuildConfig`. A component that fails leaves the
    others; its error is raised when they are done, and the report in the folder says it.
    """
    planned = plan(
        meta, out, config=config, dims=dims, profiles=profiles, onnx_dir=onnx_dir, store=store, yes=yes,
        command=command, **settings,
    )  # fmt: skip
    made = carry_out(planned, run=run, force=force)
    if made.error is not None:
        raise made.error
    return made.report


def carry_out(plan: BundlePlan, *, run: bool = False, force: bool = False) -> Bundled:
    """Do what the plan says; a component that fails leaves the others.

    Raises only what ends the whole: an interruption, a folder that cannot be written. The report is there all the same.
    """
    ensure_folder(plan.folder)
    ensure_folder(plan.folder / LOGS)
    with _alone(plan):
        _sweep(plan)
        work = Work(plan, force)
        report = work.done(run=run)
        return Bundled(report, work.errors[0] if work.errors else None)


def planned_report(plan: BundlePlan, *, force: bool = False) -> BundleReport:
    """The report of what would be done: what is in the folder or the store already is said."""
    work = Work(plan, force)
    components = []
    for item in plan.components:
        there = None if force else work.kept(item) or item.build.in_store()
        made = component(item, "planned")
        components.append(with_engine(made, there, item, plan.folder) if there else made)
    return replace(work.report(), components=tuple(components), dry_run=True, complete=False)


def _sweep(plan: BundlePlan) -> None:
    """Take away what a bundle that was killed left: staged models, files that were never renamed, weights of no engine.

    No other bundle lives beside us, so nobody needs them.
    """
    for folder in plan.folder.glob(f".{STAGED}.*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)
    names = "|".join(re.escape(item.name) for item in plan.components)
    unsealed = re.compile(
        rf"\.(({names})\.(engine|log)\b.*|{re.escape(REPORT)}|{re.escape(TIMING_CACHE)})\.\d+\.\d+\.tmp"
    )
    weights = re.compile(rf"({names})\.engine\.[0-9a-f]+\.weights")
    used = {name for path in plan.folder.glob("*.json") for name in side_files(path.with_suffix(""))}
    for path in [*plan.folder.iterdir(), *(plan.folder / LOGS).iterdir()]:
        if unsealed.fullmatch(path.name) or (weights.fullmatch(path.name) and path.name not in used):
            with contextlib.suppress(OSError):
                path.unlink()


@contextlib.contextmanager
def _alone(plan: BundlePlan) -> Iterator[None]:
    """One command at a time in one folder; the lock lies in the store, not in what is delivered."""
    where = hashlib.sha256(str(plan.folder.resolve()).encode(errors="surrogateescape")).hexdigest()[:32]
    path = ensure_folder(plan.store.folder / "locks", by="TRT_ENGINE_STORE") / f"bundle-{where}.lock"
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        log.info("another process builds into `%s`; waiting for it", plan.folder)
        lock.acquire()
    except OSError as error:
        raise explain(error, path, by="TRT_ENGINE_STORE") from error
    try:
        yield
    finally:
        lock.release()

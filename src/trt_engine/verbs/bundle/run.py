"""`bundle`: builds all engines of a multi-component model into one folder, with logs and one report.

`plan` (in `bundle_plan`) validates and writes nothing; `execute` builds changed components.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from trt_engine.atomic_io import ensure_folder, file_lock, sweep_staged
from trt_engine.config.build import BuildConfig, BundleConfig
from trt_engine.config.settings import replace_values, take_settings
from trt_engine.errors import TrtEngineError
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.bundle import BundleReport
from trt_engine.store import Store
from trt_engine.verbs.bundle.bundle_plan import LOGS, BundlePlan, plan
from trt_engine.verbs.bundle.bundle_report import add_engine, component_record
from trt_engine.verbs.bundle.bundle_run import BundleRun, side_files

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
    ensure_folder(plan.folder)
    ensure_folder(plan.folder / LOGS)
    busy = f"waiting for another process that builds into `{plan.folder}`"
    with file_lock(_lock_file(plan), busy=busy, by="TRT_ENGINE_STORE"):
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
        made = component_record(item, "planned")
        components.append(add_engine(made, there, item, plan.folder) if there else made)
    return replace(work.report(), components=tuple(components), dry_run=True, complete=False)


def _remove_leftovers(plan: BundlePlan) -> None:
    """Remove staged files and unused weights of a killed bundle; the folder is locked."""
    for folder in (plan.folder, plan.folder / LOGS):
        sweep_staged(folder)
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
    return ensure_folder(plan.store.folder / "locks", by="TRT_ENGINE_STORE") / f"bundle-{where}.lock"

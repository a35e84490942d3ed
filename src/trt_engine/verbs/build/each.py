"""`build --each-gpu`: one engine file for each of several GPUs, all in one report.

Everything is planned before anything is built: a wrong name or a file in the way ends it with nothing written. What one
GPU's build ends with leaves the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trt_engine.atomic_io import os_error, resolve_link
from trt_engine.backend import BackendSpec, get_backend, resolve_gpu_targets
from trt_engine.config.build import BuildConfig
from trt_engine.errors import MemoryExhausted, ModelError, TrtEngineError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.records.base import Failure
from trt_engine.records.build import BuildEachReport, TargetBuild
from trt_engine.trt.gpu_targets import sm_label
from trt_engine.verbs.build.report import build_report, planned_report
from trt_engine.verbs.build.request import resolve_target
from trt_engine.verbs.build.run import BuildPlan, execute, plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetPlan:
    """The build for one GPU, or the error that its plan ended with."""

    gpu: str
    plan: BuildPlan | None = None
    error: TrtEngineError | None = None

    @property
    def label(self) -> str:
        return sm_label(self.gpu)


def plan_builds(
    path: Path, gpus: Sequence[str], *, config: BuildConfig, out: Path | str | None = None, overwrite: bool = False
) -> tuple[TargetPlan, ...]:
    """A build for each of the GPUs, in their order, each once. Raises `UsageError` and `ModelError`, which are of the call;
    what a backend cannot build for one of them is that one's error."""
    backend_spec = get_backend(config.backend)
    if config.gpus:
        raise UsageError(
            "`--gpus` and `--each-gpu` are both given", hint="`--gpus` makes one engine for all, drop one of them"
        )
    targets = resolve_gpu_targets(backend_spec, gpus, flag="--each-gpu")
    if not targets:
        raise UsageError("`--each-gpu` names no GPU", hint="`--each-gpu sm89,sm120`")
    model = open_model(path)
    return tuple(_plan_target(model, gpu, backend_spec, config, out, overwrite) for gpu in targets)


def _plan_target(
    model: Model, gpu: str, spec: BackendSpec, config: BuildConfig, out: Path | str | None, overwrite: bool
) -> TargetPlan:
    target = None
    if out is not None:
        whole = resolve_target(out, model, spec)
        resolve_link(whole)  # a device or a stream cannot hold several files
        target = _labelled_path(whole, spec, sm_label(gpu))
    try:
        return TargetPlan(gpu, plan(model, out=target, config=replace(config, gpus=(gpu,)), overwrite=overwrite))
    except (UsageError, ModelError):
        raise
    except TrtEngineError as error:
        return TargetPlan(gpu, error=error)


def _labelled_path(path: Path, spec: BackendSpec, label: str) -> Path:
    """`model.sm89.engine` for `model.engine`."""
    endings = (f".engine{spec.payload_suffix}", spec.payload_suffix, path.suffix)
    ending = next(item for item in endings if path.name.endswith(item) and path.name != item)
    return path.with_name(f"{path.name.removesuffix(ending)}.{label}{ending}")


def execute_builds(path: Path, targets: Sequence[TargetPlan], *, rebuild: bool = False) -> BuildEachReport:
    """Build what is planned, one after another; the report has every result."""
    started = time.monotonic()
    results = tuple(_execute_target(target, rebuild) for target in targets)
    return _build_report(path, targets, results, time.monotonic() - started)


def _execute_target(target: TargetPlan, rebuild: bool) -> TargetBuild:
    error = target.error
    if target.plan is not None:
        log.info("%s: building", target.label)
        try:
            return TargetBuild(target.gpu, build_report(target.plan, execute(target.plan, rebuild=rebuild)))
        except TrtEngineError as failed:
            error = failed
        except MemoryError:
            error = MemoryExhausted("out of memory", hint="a smaller profile")
        except OSError as failed:
            error = os_error(failed, target.plan.out or target.plan.store.folder)
    assert error is not None
    log.error("%s: %s", target.label, error.message)
    return TargetBuild(target.gpu, error=Failure.of(error))


def planned_builds_report(path: Path, targets: Sequence[TargetPlan], *, rebuild: bool = False) -> BuildEachReport:
    """The report of what would be done."""
    results = [
        TargetBuild(
            item.gpu,
            planned_report(item.plan, rebuild=rebuild) if item.plan is not None else None,
            Failure.of(item.error) if item.error is not None else None,
        )
        for item in targets
    ]
    return replace(_build_report(path, targets, results, 0.0), dry_run=True)


def _build_report(
    path: Path, targets: Sequence[TargetPlan], results: Sequence[TargetBuild], seconds: float
) -> BuildEachReport:
    backends = [item.plan.config.backend for item in targets if item.plan is not None]
    return BuildEachReport(
        model=str(path),
        backend=backends[0] if backends else "",
        targets=tuple(results),
        built=sum(item.report is not None and item.report.engine is not None for item in results),
        failed=sum(item.error is not None for item in results),
        seconds=seconds,
        artifacts={
            f"{sm_label(item.gpu)}_{name}": place
            for item in results
            if item.report is not None
            for name, place in item.report.artifacts.items()
        },
        warnings=tuple(
            f"{sm_label(item.gpu)}: {text}" for item in results if item.report for text in item.report.warnings
        ),
    )


def exit_code(report: BuildEachReport) -> int:
    """0 where every engine is there; else the code of those that failed, 1 where theirs differ."""
    codes = {item.error.exit_code for item in report.targets if item.error is not None}
    return 0 if not codes else codes.pop() if len(codes) == 1 else 1

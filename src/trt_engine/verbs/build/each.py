"""The report of a build, done or planned, and `build --each-gpu`: one engine file for each of several GPUs in one report.

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
from trt_engine.config.settings import followed
from trt_engine.engine import passport_path
from trt_engine.environment import Environment
from trt_engine.errors import MemoryExhausted, ModelError, TrtEngineError, UsageError
from trt_engine.format import quoted
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.records.base import Failure
from trt_engine.records.build import BuildEachReport, BuildReport, TargetBuild
from trt_engine.records.passport import Precision
from trt_engine.trt.gpu_targets import sm_label
from trt_engine.verbs.build.request import resolve_target
from trt_engine.verbs.build.run import BuildPlan, BuildResult, execute, plan

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


KEPT = ("backend", "device", "profiles", "batch", "shapes", "inputs", "gpus", "providers", "fuse", "options")
"""Settings of a build that do not ask for a precision."""


def build_report(planned: BuildPlan, built: BuildResult) -> BuildReport:
    """The report of what was done."""
    engine = built.engine
    passport, speed = engine.passport, engine.passport.speed
    original = f"trt-engine build {quoted(planned.model.path)}{followed(planned.config, *KEPT)}"
    names = ("engine", *(f"side_file_{index}" for index in range(1, len(engine.files))))
    return BuildReport(
        model=str(planned.model.path),
        engine=str(engine.path),
        payload_bytes=sum(item.nbytes for item in passport.payload),
        digest=passport.payload[0].digest,
        backend=passport.backend,
        device=passport.device,
        identity=planned.identity,
        key=built.key,
        cached=built.cached,
        seconds=built.seconds,
        precision=passport.precision,
        profiles=passport.profiles,
        parity=passport.parity,
        environment=passport.environment,
        notes=passport.build.notes | ({"original": original} if speed is not None and not speed.is_faster else {}),
        quant_target=planned.target,
        speed=speed,
        tuning=passport.build.tuning,
        validation=passport.validation,
        artifacts={name: str(path) for name, path in zip(names, engine.files, strict=True)}
        | {"passport": str(passport_path(engine.path))}
        | ({"reference": str(engine.reference)} if engine.reference is not None else {}),
        warnings=built.warnings,
    )


def planned_report(planned: BuildPlan, *, rebuild: bool) -> BuildReport:
    """The report of what would be done."""
    for warning in planned.warnings:
        log.warning("%s", warning)
    there = None if rebuild else planned.find_in_store()
    return BuildReport(
        model=str(planned.model.path),
        engine=str(there.path) if there else None,
        payload_bytes=sum(item.nbytes for item in there.passport.payload) if there else None,
        digest=there.passport.payload[0].digest if there else None,
        backend=planned.config.backend,
        device=there.passport.device if there else planned.config.device,
        identity=planned.identity,
        key=planned.key,
        cached=there is not None,
        seconds=0.0,
        precision=there.passport.precision if there else Precision(requested=planned.config.precision),
        profiles=planned.profiles,
        parity=there.passport.parity if there else None,
        environment=there.passport.environment if there else Environment.detect(),
        notes=there.passport.build.notes if there else {},
        quant_target=planned.target,
        speed=there.passport.speed if there else None,
        tuning=there.passport.build.tuning if there else None,
        validation=there.passport.validation if there else None,
        artifacts={"engine": str(planned.out)} if planned.out else {},
        dry_run=True,
        warnings=planned.warnings,
    )

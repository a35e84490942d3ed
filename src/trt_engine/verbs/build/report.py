"""The report of a build, done or planned."""

from __future__ import annotations

import logging

from trt_engine.config.settings import followed
from trt_engine.engine import passport_path
from trt_engine.environment import Environment
from trt_engine.format import quoted
from trt_engine.records.build import BuildReport
from trt_engine.records.passport import Precision
from trt_engine.verbs.build.run import BuildPlan, BuildResult

KEPT = ("backend", "device", "profiles", "batch", "shapes", "inputs", "gpus", "providers", "fuse", "options")
"""Settings of a build that do not ask for a precision."""

log = logging.getLogger(__name__)


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

"""Engines sealed by hand, without the verb `build`: no store, no parity."""

from __future__ import annotations

from pathlib import Path

from trt_engine.backend import get_backend
from trt_engine.config.build import BuildConfig
from trt_engine.engine import Engine, payload_files
from trt_engine.environment import Environment
from trt_engine.graph.load import open_model
from trt_engine.protocols import BuildPaths
from trt_engine.records.passport import BuildInfo, Passport, Source


def seal_model(path: Path, payload: Path, config: BuildConfig) -> Engine:
    """What the builder of the configuration's backend makes of a model."""
    model, builder = open_model(path), get_backend(config.backend).load_component("builder")()
    payload.parent.mkdir(parents=True, exist_ok=True)
    outcome = builder.build(model, config, BuildPaths(payload))
    passport = Passport(
        schema="trt-engine/passport",
        schema_version=1,
        backend=config.backend,
        payload=payload_files(payload, outcome.files),
        model=Source(model.name, model.digest, model.opsets.get(""), path.name),
        signature=outcome.signature,
        profiles=config.resolve(model.signature),
        precision=outcome.precision,
        device=outcome.device or str(config.device),
        build=BuildInfo(f"trt-engine build {path.name} --backend {config.backend}", {}, 0.1, builder.identity(config)),
        environment=Environment.detect(),
        requirements=outcome.requirements,
    )
    return Engine.seal(payload, passport)

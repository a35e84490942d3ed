"""A backend that fails as TensorRT does, over ONNX Runtime, which builds what is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import plain_backend
from trt_engine.backend import BackendSpec, list_backends
from trt_engine.backends.onnxruntime.build import OnnxRuntimeBuilder
from trt_engine.config.build import BuildConfig
from trt_engine.errors import BuildError
from trt_engine.model import Model

FOREIGN = "{ForeignNode[/decoder/Where.../decoder/Add]}"
Fails = Callable[[Model, BuildConfig], BuildError | None]


@dataclass
class Tried:
    """What a builder was asked for, and when it fails."""

    fails: Fails
    seen: list[tuple[int, str | None, bool]]
    """Workspace, optimisation level, and whether the graph was fixed, of each try."""


backend_spec = BackendSpec(
    "brittle", "fails as TensorRT does", ".onnx", (), "", builder=f"{__name__}:Brittle", runtime="plain_backend:Runs",
    options="trt_engine.trt.settings:PlanSettings", writes_log=True,
)  # fmt: skip


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make processes that are started from here know the backend, as an installed distribution makes it known."""
    plain_backend.installed("brittle", folder, monkeypatch)


def brittle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fails], Tried]:
    """A backend `brittle` that fails as it is told."""

    def make(fails: Fails) -> Tried:
        tried = Tried(fails, [])

        class Brittle(OnnxRuntimeBuilder):
            def identity(self, config):
                return super().identity(replace(config, options={}))

            def build(self, model, config, places):
                fixed = not any(spec.dynamic for spec in model.signature.inputs)
                tried.seen.append((config.workspace_mib, config.options.get("optimization_level"), fixed))
                if (error := tried.fails(model, config)) is not None:
                    assert places.log is not None
                    places.log.write_text(f"[E] {error.message}\n")
                    raise error
                return super().build(model, replace(config, options={}), places)

        monkeypatch.setitem(globals(), "Brittle", Brittle)
        monkeypatch.setitem(list_backends(), "brittle", backend_spec)
        return tried

    return make


def wants(mib: int) -> Fails:
    """Fails for want of workspace below `mib`."""
    text = "Could not find any implementation for node /attn/MatMul due to insufficient workspace"
    return lambda model, config: (
        BuildError(text, cause="insufficient_workspace", node="/attn/MatMul") if config.workspace_mib < mib else None
    )


def foreign(but: Callable[[Model, BuildConfig], bool]) -> Fails:
    text = f"Could not find any implementation for node {FOREIGN}."
    return lambda model, config: (
        None if but(model, config) else BuildError(text, cause="no_implementation", node=FOREIGN)
    )

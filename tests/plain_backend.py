"""What the backends of the tests share: ONNX Runtime under another name, known as an installed distribution is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from trt_engine.backends.onnxruntime.run import OnnxRuntime
from trt_engine.engine import Engine


class Runs(OnnxRuntime):
    """Knows nothing of the options an engine was built with."""

    def load(self, engine, config):
        build = engine.passport.build
        build = replace(build, config=build.config | {"options": {}})
        return super().load(Engine(engine.path, replace(engine.passport, build=build)), config)


def installed(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the `backend_spec` of the module `name`, beside this one, known to the processes that are started from here."""
    about = folder / f"{name}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[trt_engine.backends]\n{name} = {name}:backend_spec\n")
    paths = (str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))

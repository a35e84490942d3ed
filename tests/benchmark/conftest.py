"""Engines to measure: a small network, built by hand through a backend's own halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from onnx_models import FLOAT, node, save
from sealed import seal_model
from trt_engine.backend import get_backend
from trt_engine.config.build import BuildConfig
from trt_engine.engine import Engine
from trt_engine.graph.load import open_model


def write_model(path: Path, *, width: int = 8) -> Path:
    """`x` of batch x 3 x 16 x 16 through a convolution and a mean: `y` of batch x width."""
    rng = np.random.default_rng(0)
    return save(
        path,
        [node("Conv", "x w", "c", pads=[1, 1, 1, 1]), node("ReduceMean", "c axes", "y", keepdims=0)],
        {"x": (FLOAT, ["batch", 3, 16, 16])},
        {"y": (FLOAT, ["batch", width])},
        {"w": rng.random((width, 3, 3, 3), dtype=np.float32), "axes": np.array([2, 3], np.int64)},
    )


def build_engine(
    model: Path, folder: Path, name: str, *, device: str, batch: tuple[int, int, int] = (1, 2, 4)
) -> Engine:
    """The engine of a model by one backend, sealed in `folder`."""
    profiles = BuildConfig(backend=name, device=device, batch=batch).resolve(open_model(model).signature)
    payload = folder / f"{model.stem}{get_backend(name).payload_suffix}"
    return seal_model(model, payload, BuildConfig(backend=name, device=device, profiles=profiles))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Engine]:
    """The small engine of a backend, built once."""
    folder = tmp_path_factory.mktemp("engines")
    model = write_model(folder / "small.onnx")
    engines: dict[str, Engine] = {}

    def engine(name: str) -> Engine:
        if name not in engines:
            device = "fake:0" if name == "fake" else "cpu"
            engines[name] = build_engine(model, folder / name, name, device=device)
        return engines[name]

    return engine

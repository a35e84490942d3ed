"""Engines to measure: a small network, built by hand through a backend's own halves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sealed import seal_model
from trt_engine.backend import get_backend
from trt_engine.config.build import BuildConfig
from trt_engine.engine import Engine
from trt_engine.graph.load import open_model


def write_model(path: Path, *, width: int = 8) -> Path:
    """`x` of batch x 3 x 16 x 16 through a convolution and a mean: `y` of batch x width."""
    rng = np.random.default_rng(0)
    weights = numpy_helper.from_array(rng.random((width, 3, 3, 3), dtype=np.float32), "w")
    axes = numpy_helper.from_array(np.array([2, 3], np.int64), "axes")
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("ReduceMean", ["c", "axes"], ["y"], keepdims=0),
        ],
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", width])],
        [weights, axes],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


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

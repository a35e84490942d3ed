"""CUDA graphs of served models, over the fake device: the sizes that requests are joined to, unless set otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save
from serving.conftest import double_model
from trt_engine.engine import Engine
from trt_engine.errors import MemoryExhausted
from trt_engine.runtime.cuda_graph_policy import GraphStats
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.verbs.serve import served_model
from trt_engine.verbs.serve.model_config import ModelSettings, read_config, server_settings
from trt_engine.verbs.serve.served_model import ServedVersion, load_version
from trt_engine.verbs.serve.statistics import VersionStatistics

BASE = server_settings(te.ServeConfig(), te.RuntimeConfig())
JOINED = "max_batch_size: 6 dynamic_batching {}"


def configured(text: str) -> ModelSettings:
    return read_config(text.encode(), "m", BASE)


def build(model: Path, device: str = "fake:0") -> Engine:
    return te.build(
        model, out=model.with_suffix(".engine"), backend="fake", device=device, batch=(1, 2, 6), parity=False,
        store=te.Store(model.parent / "store"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return build(double_model(tmp_path_factory.mktemp("graphs") / "double.onnx"))


def graphs(served: ServedVersion) -> GraphStats:
    pool = served.runner.stats().pool
    assert pool is not None
    return pool.graphs


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        (BASE, (1, 2, 3, 4, 6)),
        (configured(JOINED), (1, 2, 3, 4, 6)),
        (configured(JOINED + "optimization { cuda { graphs: true } }"), (1, 2, 3, 4, 6)),
        (configured("max_batch_size: 6 dynamic_batching { preferred_batch_size: 3 }"), (1, 2, 3)),
        (configured(JOINED + "optimization { cuda { graphs: false } }"), False),
        (configured("max_batch_size: 6"), None),
        (configured("max_batch_size: 6 optimization { cuda { graphs: true } }"), True),
        (server_settings(te.ServeConfig(), te.RuntimeConfig(graphs=False)), False),
        (server_settings(te.ServeConfig(), te.RuntimeConfig(graphs=(2, 6))), (2, 6)),
        (server_settings(te.ServeConfig(max_batch=1), te.RuntimeConfig()), None),
    ],
)
def test_joined_requests_have_graphs_unless_the_configuration_declines(
    engine: Engine, settings: ModelSettings, sizes: bool | tuple[int, ...] | None
) -> None:
    served = load_version("m", "1", engine, settings, VersionStatistics(), verify=True)
    try:
        assert served.settings.runtime.graphs == sizes
        assert served.truth.as_dict().get("graphs", "") == ("on" if sizes else "")
        if isinstance(sizes, tuple):
            assert graphs(served).captured == len(sizes), "each before it is ready"
        for rows in (1, 3, 2):
            y = served.queue.submit({"x": np.full((rows, 4), rows, np.float32)}).result()["y"]
            assert y.shape == (rows, 4) and (y == 2 * rows).all()
        if isinstance(sizes, tuple):
            assert (graphs(served).replayed, graphs(served).evicted) == (3, 0)
    finally:
        served.close()


def test_a_size_that_is_out_of_memory_is_left_out_of_the_warm_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = InferenceEngine.warmup

    def warmup(self: InferenceEngine, runs: int = 1, *, batch: int | None = None, **more: Any) -> None:
        if batch == 6:
            raise MemoryExhausted("out of memory", hint="a smaller batch")
        original(self, runs, batch=batch, **more)

    monkeypatch.setattr(InferenceEngine, "warmup", warmup)
    served = load_version("m", "1", engine, BASE, VersionStatistics(), verify=True)
    try:
        assert graphs(served).captured == 4 and "batch 6 is out of memory" in caplog.text
    finally:
        served.close()


def test_shapes_that_clients_choose_have_no_graphs_by_default(tmp_path: Path) -> None:
    open_rows = {"x": (FLOAT, ["batch", "length"])}, {"y": (FLOAT, ["batch", "length"])}
    model = save(tmp_path / "open.onnx", [node("Neg", "x", "y")], *open_rows)
    engine = te.build(
        model, out=tmp_path / "open.engine", backend="fake", device="fake:0", parity=False,
        profiles="x:1x1,2x4,6x8", store=te.Store(tmp_path / "store"),
    )  # fmt: skip
    served = load_version("m", "1", engine, BASE, VersionStatistics(), verify=True)
    assert served.settings.runtime.graphs is None
    served.close()


def test_what_takes_too_long_to_capture_is_captured_by_its_first_batch(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest size is always captured before: later ones do not move its buffers."""
    monkeypatch.setattr(served_model, "_WARM_UP_S", 0.0)
    served = load_version("m", "1", engine, replace(BASE, max_batch=4), VersionStatistics(), verify=True)
    try:
        assert graphs(served).captured == 1 and served.runner.is_captured({"x": np.ones((4, 4), np.float32)})
        for rows in (1, 2, 4):
            served.queue.submit({"x": np.ones((rows, 4), np.float32)}).result()
        assert (graphs(served).captured, graphs(served).evicted) == (3, 0)
    finally:
        served.close()

"""Every verb that puts rows together, on an engine whose rows depend on each other: one row at a time, or the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trt_engine as te
from deployment.conftest import as_plan
from onnx_models import FLOAT, node, save
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import TrtEngineError
from trt_engine.evaluation.evaluate_runner import batch_range
from trt_engine.verbs.deploy.triton import _max_batch
from trt_engine.verbs.serve.config import ServeConfig
from trt_engine.verbs.serve.model_config import read_config, server_settings
from trt_engine.verbs.serve.served_model import load_version
from trt_engine.verbs.serve.statistics import VersionStatistics
from trt_engine.vision.spec import Postprocess, Preprocess, Vision

VISION = Vision(Preprocess(size=(16, 16)), Postprocess("classify"))
REASON = "depends on the other rows"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> te.Engine:
    """`images` [batch, 3, 16, 16], less their mean over the batch, to `scores`."""
    folder = tmp_path_factory.mktemp("dependent")
    model = save(
        folder / "net.onnx",
        [node("ReduceMean", "images first", "mean"), node("Sub", "images mean", "rest"),
         node("Conv", "rest weight", "maps"), node("GlobalMaxPool", "maps", "pooled"), node("Flatten", "pooled", "scores")],
        {"images": (FLOAT, ["batch", 3, 16, 16])}, {"scores": (FLOAT, ["batch", 3])},
        {"first": np.array([0], np.int64), "weight": np.linspace(-1, 1, 81, dtype=np.float32).reshape(3, 3, 3, 3)},
    )  # fmt: skip
    made = te.build(model, out=folder / "net.engine.onnx", batch=(1, 2, 4), store=te.Store(folder / "store"))
    assert REASON in (made.signature.row_dependence or "")
    return made


def batched(engine: te.Engine, folder: Path) -> Any:
    return te.load(engine, batching=te.Batching(max_batch=4))


def served(engine: te.Engine, folder: Path) -> Any:
    config = read_config(
        b"max_batch_size: 4 dynamic_batching {}", "net", server_settings(ServeConfig(), RuntimeConfig())
    )
    return load_version("net", "1", engine, config, VersionStatistics(), verify=True)


def run_on_arrays(engine: te.Engine, folder: Path) -> Any:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from trt_engine.verbs.batch.part_runner import _batch_size

    with te.load(engine) as runner:
        return _batch_size(runner, 4)


def evaluated(engine: te.Engine, folder: Path) -> Any:
    images, labels = np.zeros((5, 16, 16, 3), np.uint8), np.zeros(5, np.int64)
    np.savez(folder / "data.npz", images=images, labels=labels)
    return te.evaluate(engine, folder / "data.npz", batch=4, preprocess="imagenet:16")


JOINS: dict[str, Callable[[te.Engine, Path], Any]] = {
    "te.load": batched, "serve": served, "batch": run_on_arrays, "evaluate": evaluated,
}  # fmt: skip


@pytest.mark.parametrize("verb", JOINS)
def test_a_verb_that_would_join_dependent_rows_gives_the_reason(verb: str, engine: te.Engine, tmp_path: Path) -> None:
    with pytest.raises(TrtEngineError, match=REASON):
        JOINS[verb](engine, tmp_path)


def test_dependent_rows_run_one_at_a_time(engine: te.Engine, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(3, 3, 16, 16)).astype(np.float32)
    with te.load(engine) as runner:
        alone = [runner.infer({"images": row[None]})["scores"] for row in rows]
        assert batch_range(runner, VISION) == (1, 1)
    with te.load(engine, batching=te.Batching(max_batch=1, max_wait_ms=50)) as runner:
        futures = [runner.infer_async({"images": row[None]}) for row in rows]
        np.testing.assert_array_equal([future.result()["scores"] for future in futures], alone)
    assert _max_batch(engine)[0] == 0, "Triton's batcher is off"
    plan = as_plan(engine.path, tmp_path / "net.engine")
    report = te.deploy("deepstream", plan, tmp_path / "out", streams=4)
    (item,) = [item for item in report.models[0].settings if item.name == "batch-size"]
    assert item.value == "1" and REASON in item.reason


MEASURES: dict[str, Callable[..., Any]] = {
    "bench": lambda engine, batch: te.bench(engine, batch=batch, duration_s=0.02, warmup_s=0.0),
    "loadtest": lambda engine, batch: te.loadtest(engine, batch=batch, duration_s=0.05, warmup_s=0.0),
    "compare": lambda engine, batch: te.compare(engine, engine, batch=batch, duration_s=0.05, warmup_s=0.0),
}


@pytest.mark.parametrize("verb", MEASURES)
def test_a_measurement_warns_that_rows_of_a_batch_have_no_result_each(verb: str, engine: te.Engine) -> None:
    texts = {batch: MEASURES[verb](engine, batch).warnings for batch in (1, 4)}
    assert [sum(REASON in text for text in texts[batch]) for batch in (1, 4)] == [0, 1]

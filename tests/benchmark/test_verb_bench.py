"""`te.bench`: engines and models measured, and the record kept before anything is raised."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trt_engine as te
from trt_engine.backend import BackendSpec
from trt_engine.config.bench import BenchConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine
from trt_engine.errors import ModelError, SetupError, UnstableError, UsageError
from trt_engine.verbs import load
from trt_engine.verbs.bench import run as bench

from .conftest import write_model

Made = Callable[[str], Engine]
SHORT: dict[str, Any] = {"duration_s": 0.0, "warmup_s": 0.0, "iterations": 12}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / bench.RECORDS).read_text().splitlines()]


@pytest.mark.parametrize("isolate", [False, True])
def test_an_engine_is_measured_and_the_record_kept(made: Made, tmp_path: Path, isolate: bool) -> None:
    record = te.bench(made("onnxruntime"), out=tmp_path / "out", batch=4, isolate=isolate, **SHORT)
    assert (record.batch, record.queries) == (4, 12)
    assert lines(tmp_path / "out")[0]["compute_ms"] == list(record.compute_ms)
    assert (tmp_path / "out" / bench.LOG).read_text().startswith("# device: cpu (")


def test_a_bare_model_is_built_into_the_store_and_that_is_said(
    own_store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_model(tmp_path / "small.onnx")
    with caplog.at_level(logging.INFO, "trt_engine"):
        record = te.bench(model, batch=3, **SHORT)
    assert record.batch == 3
    assert Path(record.engine).is_relative_to(own_store)
    assert any("is a model" in text for text in caplog.messages)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.onnx"]


def test_a_bare_model_is_built_for_the_shapes_of_the_inputs_file(tmp_path: Path) -> None:
    import numpy as np

    model = write_model(tmp_path / "small.onnx")
    np.save(tmp_path / "five.npy", np.zeros((5, 3, 16, 16), np.float32))
    record = te.bench(model, inputs=tmp_path / "five.npy", **SHORT)
    assert (record.shapes, record.inputs) == ({"x": (5, 3, 16, 16)}, "five.npy")


def test_an_unstable_measurement_is_raised_with_strict_and_written_first(made: Made, tmp_path: Path) -> None:
    few = {"duration_s": 0.0, "warmup_s": 0.0, "iterations": 3}
    record = te.bench(made("onnxruntime"), out=tmp_path, **few)
    assert not record.stable
    with pytest.raises(UnstableError, match="3 queries were measured, expected at least 10") as caught:
        te.bench(made("onnxruntime"), out=tmp_path, strict=True, **few)
    assert caught.value.exit_code == 9
    assert len(lines(tmp_path)) == 2


def test_named_settings_win_over_the_config(made: Made) -> None:
    config = BenchConfig(batch=1, iterations=5, duration_s=0.0, warmup_s=0.0)
    record = te.bench(made("onnxruntime"), config=config, batch=2)
    assert (record.batch, record.queries) == (2, 5)


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"duratoin_s": 1.0}, UsageError),
        ({"backend": "fake"}, UsageError),
        ({"device": "fake:0"}, UsageError),
        ({"protocol": "trtexec12"}, UsageError),
        ({"batch": 99}, UsageError),
        ({"shapes": "nope:1x3"}, UsageError),
    ],
)
def test_a_wrong_setting_is_refused_and_nothing_is_written(
    made: Made, tmp_path: Path, values: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        te.bench(made("onnxruntime"), out=tmp_path / "out", **values)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    assert not list((tmp_path / "out").glob("*"))


def test_a_folder_that_cannot_be_written_is_found_before_measuring(made: Made, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SetupError):
        te.bench(made("onnxruntime"), out=tmp_path / "file", duration_s=600.0)


def test_a_bench_that_came_to_nothing_leaves_no_folder(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"no model")
    with pytest.raises(ModelError):
        te.bench(tmp_path / "net.onnx", out=tmp_path / "new" / "run")
    assert [item.name for item in tmp_path.iterdir()] == ["net.onnx"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelError):
        te.bench(tmp_path / "net.onnx", out=tmp_path / "mine")
    assert (tmp_path / "mine").is_dir()


def test_a_backend_that_measures_itself_is_asked_to(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    record = te.bench(made("fake"), **SHORT)
    asked: list[tuple[Engine, BenchConfig, RuntimeConfig]] = []

    def own_way(engine: Engine, config: BenchConfig, runtime: RuntimeConfig) -> Any:
        asked.append((engine, config, runtime))
        return record

    monkeypatch.setattr(bench, "own_way", own_way, raising=False)
    backend_spec = BackendSpec(
        name="fake", summary="", payload_suffix=".fake", modules=(), install="", builder=None, runtime=None,
        devices=("fake",), measure="trt_engine.verbs.bench.run:own_way",
    )  # fmt: skip
    monkeypatch.setattr(load, "_backend_spec", lambda engine: backend_spec)
    assert te.bench(made("fake"), iterations=77, device="fake:1") is record
    assert asked[0][1].iterations == 77 and asked[0][2].device == "fake:1"

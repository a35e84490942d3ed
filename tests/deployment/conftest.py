"""Engines and `size` runs that the tests of `deploy` share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, INT64, node, save
from reporting import sample_runs
from trt_engine.config.streams import BatchPolicy, SourceGroup
from trt_engine.engine import payload_files
from trt_engine.records.streams import StreamCapacity


def image_model(path: Path) -> Path:
    """`images` [batch, 3, 16, 16] to `scores` [batch, 3]."""
    return save(
        path, [node("GlobalAveragePool", "images", "pooled"), node("Flatten", "pooled", "scores")],
        {"images": (FLOAT, ["batch", 3, 16, 16])}, {"scores": (FLOAT, ["batch", 3])},
    )  # fmt: skip


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Engines of ONNX Runtime by name: dynamic and fixed batches, two inputs, none that is a batch, a scalar."""
    folder = tmp_path_factory.mktemp("engines")
    store = te.Store(folder / "store")
    double = [node("Mul", "x two", "y")]
    two = {"two": np.float32(2)}
    models = {
        "images": image_model(folder / "images.onnx"),
        "fixed": save(folder / "fixed.onnx", double, {"x": (FLOAT, [4, 3])}, {"y": (FLOAT, [4, 3])}, two),
        "flat": save(folder / "flat.onnx", double, {"x": (FLOAT, ["batch"])}, {"y": (FLOAT, ["batch"])}, two),
        "scalar": save(folder / "scalar.onnx", double, {"x": (FLOAT, [])}, {"y": (FLOAT, [])}, two),
        "tokens": save(
            folder / "tokens.onnx", [node("Gather", "table ids", "rows")], {"ids": (INT64, ["batch", "length"])},
            {"rows": (FLOAT, ["batch", "length", 2])}, {"table": np.ones((9, 2), np.float32)},
        ),
    }  # fmt: skip
    options = {"images": {"batch": (1, 4, 8)}, "tokens": {"profiles": ["ids:1x1,2x4,8x16"]}}
    return {
        name: te.build(
            model, out=folder / f"{name}.engine.onnx", parity=False, store=store, **options.get(name, {})
        ).path
        for name, model in models.items()
    }


def as_plan(engine: Path, target: Path, backend: str = "tensorrt") -> Path:
    """The engine as a plan of TensorRT by its passport; the payload is no plan."""
    passport = te.Engine.open(engine).passport
    target.write_bytes(b"not a plan")
    needs = replace(passport.requirements, library="tensorrt", version="10.16.1.11", compute_capability="8.9")
    made = replace(
        passport, backend=backend, device="cuda:0", payload=payload_files(target), requirements=needs, validation=None
    )
    return te.Engine.seal(target, made).path


CAPACITY = StreamCapacity(
    deadline_ms=40, late=0.001, frames="host", mix=(SourceGroup(1, 30.0),), interval=1, streams=50, low=45, high=55,
    confidence=0.95, policy=BatchPolicy(4, 3.5, 2), late_share=0.0005, late_share_p90=0.001,
    limit="deadline", limit_reason="",
    upper_bound=90, policies=(), curve=(),
    deepstream={"batch-size": "4", "batched-push-timeout": "3500", "interval": "1"}, batching="",
)  # fmt: skip


def size_run(folder: Path, engine: Path, *, deadline: bool = True) -> Path:
    """A run of `size` that built and measured the engine: batch 4 delivers most, 50 streams within 40 ms."""
    records = [sample_runs.record(1, 2.0), sample_runs.record(4, 4.0), sample_runs.record(8, 9.0)]
    report = sample_runs.size_report(
        records, artifacts={"engine_b8": str(folder / "engines" / "model.engine.onnx")}, engine=None
    )
    sample_runs.write(folder, replace(report, capacity=CAPACITY) if deadline else report, records)
    te.Engine.open(engine).copy_to(folder / "engines" / "model.engine.onnx")
    return folder

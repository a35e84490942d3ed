"""`trt-engine infer`: files in, files out, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save

Told = tuple[int, str, str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    nodes = [node("Neg", "x", "minus"), node("Log", "x", "log")]
    row = (FLOAT, ["batch", 3])
    return save(tmp_path / "two.onnx", nodes, {"x": row}, {"minus": row, "log": row})


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Path:
    return te.build(model, batch=(1, 2, 4), out=tmp_path / "two.engine.onnx").path


@pytest.fixture
def x(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", np.array([[1, 0, 1]], np.float32))
    return tmp_path / "x.npy"


def test_an_array_in_and_arrays_out(infer: Callable[..., Told], engine: Path, x: Path, tmp_path: Path) -> None:
    code, out, _ = infer(engine, "--input", x, "-o", tmp_path / "y.npz")
    assert code == 0
    with np.load(tmp_path / "y.npz") as outputs:
        assert outputs["minus"].tolist() == [[-1, 0, -1]]
        assert outputs["log"].tolist() == [[0, -np.inf, 0]]
    assert "input:     x 1x3 (x.npy)" in out
    assert "output:    minus 1x3 float32, min -1, max 0, mean -0.666667" in out
    assert "           log 1x3 float32, min 0, max 0, mean 0, 1 values are NaN or infinite" in out
    assert f"written:   {tmp_path / 'y.npz'}" in out


def test_one_output_goes_to_an_npy(infer: Callable[..., Told], engine: Path, x: Path, tmp_path: Path) -> None:
    code, out, _ = infer(engine, "--input", x, "--output", "minus", "-o", tmp_path / "y.npy")
    assert code == 0
    assert "log" not in out
    assert np.load(tmp_path / "y.npy").tolist() == [[-1, 0, -1]]


def test_random_inputs_are_seeded(infer: Callable[..., Told], engine: Path, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert infer(engine, "--random", "--batch", "3", "--seed", seed, "-o", tmp_path / f"{name}.npz")[0] == 0
    a, b, c = (np.load(tmp_path / f"{name}.npz")["minus"] for name in "abc")
    assert a.shape == (3, 3)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)

"""`trt-engine infer`: files in, files out, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from onnx_models import FLOAT, node
from onnx_models import save as save_model

Told = tuple[int, str, str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    nodes = [node("Neg", "x", "minus"), node("Log", "x", "log")]
    row = (FLOAT, ["batch", 3])
    return save_model(tmp_path / "two.onnx", nodes, {"x": row}, {"minus": row, "log": row})


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


def save(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        ([], 2, "no inputs are given"),
        (["--input", "x.npy", "--random"], 2, "both `--input` and `--random`"),
        (["--input", "x.npy", "--batch", "2"], 2, "`--batch` needs `--random`"),
        (["--input", "x.npy", "--shapes", "x:1x3"], 2, "`--shapes` needs `--random`"),
        (["--input", "none.npy"], 2, "cannot read the inputs `none.npy`: no such file"),
        (["--input", "text.npy"], 2, "neither .npy nor .npz"),
        (["--input", "wide.npy"], 2, "dimension 1 is fixed at 3"),
        (["--input", "double.npy"], 2, "is float64, expected float32"),
        (["--input", "many.npy"], 2, "profile 0 spans 1x3 to 4x3"),
        (["--input", "named.npz"], 2, "contains `z`, which is not an input"),
        (["--random", "--batch", "9"], 2, "profile 0 spans 1x3 to 4x3"),
        (["--random", "--batch", "0"], 2, "0"),
        (["--random", "--repeat", "0"], 2, "0"),
        (["--random", "--output", "mins"], 2, "did you mean `minus`"),
        (["--random", "-o", "y.npy"], 2, "can hold one array, there are 2"),
        (["--random", "-o", "y.csv"], 2, "ends in .npz or .npy"),
        (["--random", "-o", "x.npy/y.npz"], 3, "a file is in the way"),
        (["--random", "--device", "tpu"], 2, "unknown device `tpu`"),
        (["--random", "--precision", "fp16"], 2, "is already built: `--precision` cannot change it"),
        (["--random", "-O", "nonsense=1"], 2, "nonsense"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence_and_a_hint(
    infer: Callable[..., Told],
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    code: int,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "x.npy", np.ones((1, 3), np.float32))
    save(tmp_path / "wide.npy", np.ones((1, 4), np.float32))
    save(tmp_path / "double.npy", np.ones((1, 3), np.float64))
    save(tmp_path / "many.npy", np.ones((5, 3), np.float32))
    (tmp_path / "text.npy").write_text("1 2 3")
    np.savez(tmp_path / "named.npz", z=np.ones((1, 3), np.float32))
    before = sorted(tmp_path.iterdir())
    found, out, err = infer(engine, *args)
    assert found == code
    assert out == ""
    assert says in err
    assert "hint: " in err
    assert "Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before

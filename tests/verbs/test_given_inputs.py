"""`--inputs`: the values of inputs, in every verb that runs a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx_models as models
import trt_engine as te
from onnx_models import FLOAT, INT64, node, save
from trt_engine.cli.main import run
from trt_engine.errors import FeedError, ProfileError
from trt_engine.records.parity import Parity

RUN_A_MODEL = (
    "build bench compare profile size infer evaluate serve loadtest cast quantize ranges search convert".split()
)
"""Verbs that run a model on inputs that nobody gave them; `batch`, `validate` and `bundle` have inputs of their own."""


@pytest.fixture
def recogniser(tmp_path: Path) -> Path:
    """A model with a state and a rate; it runs at the rate 16000 alone, and nothing in its graph says so."""
    return save(
        tmp_path / "recogniser.onnx",
        [
            node("Div", "rate k", "quotient"),
            node("Sub", "quotient two", "index"),
            node("Gather", "scales index", "scale"),
            node("MatMul", "x w", "h"),
            node("Mul", "h scale", "scaled"),
            node("Transpose", "state", "rows", perm=[1, 0, 2]),
            node("ReduceSum", "rows axes", "summed", keepdims=0),
            node("Add", "scaled summed", "y"),
        ],
        {"x": (FLOAT, ["batch", 16]), "state": (FLOAT, [2, "batch", 16]), "rate": (INT64, [])},
        {"y": (FLOAT, ["batch", 16])},
        {
            "k": np.array(8000),
            "two": np.array(2),
            "axes": np.array([1], np.int64),
            "scales": np.array([0.5], np.float32),
            "w": np.random.default_rng(0).standard_normal((16, 16), np.float32),
        },
        opset=17,
    )


@pytest.fixture
def given(tmp_path: Path) -> Path:
    np.savez(tmp_path / "given.npz", rate=np.array(16000), state=np.zeros((2, 1, 16), np.float32))
    return tmp_path / "given.npz"


@pytest.mark.parametrize("verb", RUN_A_MODEL)
def test_every_verb_that_runs_a_model_takes_inputs(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    assert "--inputs" in capsys.readouterr().out


def parity_of(engine: te.Engine) -> Parity:
    assert engine.passport.parity is not None
    return engine.passport.parity


def test_a_build_is_judged_on_the_given_values_and_its_engine_runs_on_them_alone(recogniser: Path, given: Path) -> None:
    engine = te.build(recogniser, inputs=given, batch=(1, 2, 4))
    assert "given.npz (sha256:" in parity_of(engine).inputs
    assert "`x`" not in parity_of(engine).inputs and "seeded random" in parity_of(engine).inputs
    again = te.bench(engine, duration_s=0.001, warmup_s=0, batch=3)
    assert again.shapes["state"] == (2, 3, 16)


def test_an_engine_that_was_not_judged_is_judged_once_values_are_given(recogniser: Path, given: Path) -> None:
    assert te.build(recogniser).passport.parity is None
    assert parity_of(te.build(recogniser, inputs=given)).passed
    assert te.build(recogniser, inputs=given).passport.build.notes["inputs"].startswith("given.npz")


def test_rows_of_the_file_are_repeated_for_a_larger_batch(tmp_path: Path) -> None:
    model = models.conv_net(tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", np.random.default_rng(0).random((1, 3, 8, 8), np.float32))
    record = te.bench(model, inputs=tmp_path / "x.npy", batch=4, duration_s=0.001, warmup_s=0)
    assert (record.shapes, record.inputs) == ({"images": (4, 3, 8, 8)}, "x.npy")


def test_casts_and_ranges_run_on_the_given_values(recogniser: Path, given: Path, tmp_path: Path) -> None:
    report = te.cast(recogniser, "fp16", out=tmp_path / "h.onnx", inputs=given)
    assert report.parity is not None and report.parity.outputs and report.parity.inputs.startswith("given.npz")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).random((6, 16), np.float32))
    assert te.ranges(recogniser, tmp_path / "data.npz", inputs=given, batch=2).rows == 6


def test_calibration_takes_what_the_data_lacks_from_the_given_values(
    recogniser: Path, given: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).random((6, 16), np.float32))
    with pytest.raises(FeedError, match="does not hold the input `state`") as refused:
        te.quantize(recogniser, "int8", out=tmp_path / "q.onnx", calib_data=tmp_path / "data.npz")
    assert "--inputs FILE.npz" in str(refused.value.hint)
    report = te.quantize(
        recogniser, "int8", out=tmp_path / "q.onnx", calib_data=tmp_path / "data.npz", inputs=given, overwrite=True
    )
    assert report.calibration is not None and report.parity is not None


def test_values_outside_of_every_profile_are_refused(tmp_path: Path) -> None:
    model = models.conv_net(tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", np.zeros((2, 3, 9, 8), np.float32))
    with pytest.raises((FeedError, ProfileError)):
        te.build(model, inputs=tmp_path / "x.npy")

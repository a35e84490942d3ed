"""Dimensions as people name them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import onnx_models as models
from trt_engine.config.profiles import profile_for
from trt_engine.errors import ShapeError
from trt_engine.graph.load import open_model


@pytest.mark.parametrize("name", ["?", "-1", "None", "unk__12", "unk", "dyn", " ", "*", "unknown_3", "dynamic", "??"])
def test_a_placeholder_names_no_dimension(name: str, tmp_path: Path):
    path = models.save(
        tmp_path / "net.onnx", [models.node("Relu", "x", "y")],
        {"x": (models.FLOAT, [name, 3, name, name])}, {"y": (models.FLOAT, [name, 3, name, name])},
    )  # fmt: skip
    signature = open_model(path).signature
    assert signature.inputs[0].symbols == (None,) * 4
    signature.check({"x": np.zeros((2, 3, 48, 192), np.float32)})


@pytest.mark.parametrize("name", ["N", "batch", "h", "height_1", "unk_rate", "s0", "dynamic_batch", "2*n", "nonempty"])
def test_a_symbol_is_kept(name: str, tmp_path: Path):
    path = models.save(
        tmp_path / "net.onnx", [models.node("Relu", "x", "y")],
        {"x": (models.FLOAT, [name])}, {"y": (models.FLOAT, [name])},
    )  # fmt: skip
    assert open_model(path).signature.inputs[0].symbols == (name,)


def test_a_name_that_stands_twice_in_one_input_binds_nothing_as_in_onnxruntime(tmp_path: Path):
    shape = ["batch", 3, "size", "size"]
    path = models.save(
        tmp_path / "net.onnx", [models.node("Relu", "x", "y")],
        {"x": (models.FLOAT, shape)}, {"y": (models.FLOAT, shape)},
    )  # fmt: skip
    open_model(path).signature.check({"x": np.zeros((1, 3, 48, 192), np.float32)})


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("past_key_values.0.key", ["batch", "heads", "past", 64]),
        ("input", ["batch_size", 3, "frames", 160]),
        ("log_mel", ["batch", 1, "n", 80]),
        ("x", ["batch", 1, "time_steps", "freq"]),
    ],
)
def test_a_cache_and_a_spectrogram_of_four_dimensions_are_asked_for_no_height(
    name: str, shape: list[str | int], tmp_path: Path
):
    path = models.save(
        tmp_path / "net.onnx", [models.node("Relu", name, "y")], {name: (models.FLOAT, shape)}, {"y": (models.FLOAT, shape)},
    )  # fmt: skip
    with pytest.raises(ShapeError) as error:
        profile_for(open_model(path).signature, batch=(1, 2, 4))
    assert "height" not in error.value.message and "640" not in (error.value.hint or "")

"""Pictures are calibration data in every verb that takes data, by what the model declares."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import onnx_models as models
from trt_engine.cli import main

Say = Callable[..., tuple[int, str, str]]
EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits" / "model.onnx"
VAL = EXAMPLES / "digits" / "val"
VIT = EXAMPLES / "classifiers" / "vit.onnx"
ROWS = EXAMPLES / "classifiers" / "val.npz"


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Say]:
    """Exit code, stdout and stderr of a verb in a folder with four pictures in `imgs`, and a store of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    (tmp_path / "imgs").mkdir()
    for picture in sorted((VAL / "images").iterdir())[:4]:
        shutil.copy(picture, tmp_path / "imgs")
    logger = logging.getLogger("trt_engine")
    before = logger.handlers, logger.propagate, logger.level

    def verb(*args: object) -> tuple[int, str, str]:
        code = main.run([str(item) for item in args])
        return code, *capfd.readouterr()

    yield verb
    logger.handlers, logger.propagate = before[:2]
    logger.setLevel(before[2])


def test_ranges_sees_pictures(say: Say) -> None:
    code, out, _ = say("ranges", DIGITS, "--data", "imgs", "--json")
    told = json.loads(out)
    assert code == 0 and (told["rows"], told["random"], told["data"]) == (4, False, "4 files of `imgs`")
    largest = {item["name"]: item["absmax"] for item in told["tensors"]}
    assert 0.5 < largest["images"] <= 1  # scaled as declared, not 0 to 255


def test_cast_sees_pictures(say: Say) -> None:
    code, out, _ = say("cast", DIGITS, "--to", "fp16", "--auto", "--data", "imgs", "-o", "c.onnx", "--json")
    assert code == 0 and ".jpg" in json.loads(out)["parity"]["inputs"]


def test_build_and_size_see_pictures(say: Say, tmp_path: Path) -> None:
    asked = ("--precision", "int8", "--calibrate", "imgs")
    code, out, err = say("build", VIT, *asked, "-o", "v.engine.onnx", "--json")
    assert code == 0, err
    assert json.loads(out)["precision"]["asked"] == "int8" and "4 samples of 4 files of `imgs`" in err
    quick = ("--duration", "100ms", "--warmup", "0", "--max-batch", "1")
    code, _, err = say("size", VIT, *asked, *quick, "-o", "sized")
    assert code == 0, err


@pytest.mark.parametrize(
    ("model", "data", "count"),
    [(DIGITS, "imgs", 4), (DIGITS, VAL, 6), (DIGITS, VAL / "annotations.json", 6), (VIT, ROWS, 6)],
    ids=["pictures", "COCO folder", "annotations", "labelled arrays"],
)
def test_quantize_takes_what_evaluate_takes_and_its_cache_needs_no_data(
    say: Say, tmp_path: Path, model: Path, data: object, count: int
) -> None:
    shared = ("quantize", model, "--to", "int8", "--calibrator", "minmax", "--samples", "6", "--cache", "c.json")
    code, out, err = say(*shared, "--calibrate", data, "-o", "a.onnx", "--json")
    assert code == 0, err
    assert json.loads(out)["calibration"]["samples"] == count
    code, out, err = say(*shared, "-o", "b.onnx", "--json")
    assert code == 0, err
    assert json.loads(out)["calibration"]["cached"]
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()


def test_labelled_arrays_are_preprocessed_as_pictures_of_the_same_pixels_are(say: Say, tmp_path: Path) -> None:
    with np.load(ROWS) as archive:
        images = archive["images"][:3]
    (tmp_path / "same").mkdir()
    for index, pixels in enumerate(images):
        Image.fromarray(pixels).save(tmp_path / "same" / f"{index}.png")
    np.savez(tmp_path / "same.npz", images=images, labels=np.arange(3))
    found = []
    for data in ("same", "same.npz"):
        code, out, err = say("ranges", VIT, "--data", data, "--json")
        assert code == 0, err
        found.append(json.loads(out)["tensors"])
    assert found[0] == found[1] and found[0]


def test_damaged_pictures_of_a_dataset_are_counted_and_not_one_readable_is_refused(say: Say, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        (tmp_path / "classes" / name / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    code, _, err = say("ranges", VIT, "--data", "classes")
    assert code == 2 and "not one of 2 pictures could be read" in err
    shutil.copy(tmp_path / "imgs" / "val_0_0000.jpg", tmp_path / "classes" / "b")
    code, out, _ = say("ranges", VIT, "--data", "classes", "--json")
    assert code == 0 and json.loads(out)["rows"] == 1 and len(json.loads(out)["skipped"]) == 2


@pytest.mark.parametrize(
    "verb",
    [
        ("ranges", "net.onnx", "--data", "imgs"),
        ("cast", "net.onnx", "--to", "fp16", "--auto", "--data", "imgs", "-o", "c.onnx"),
        ("build", "net.onnx", "--precision", "int8", "--calibrate", "imgs", "-o", "e.onnx"),
        ("quantize", "net.onnx", "--to", "int8", "--calibrate", "imgs", "-o", "q.onnx"),
        ("quantize", "net.onnx", "--to", "int8", "--calibrate", VAL, "-o", "q.onnx"),
    ],
    ids=lambda verb: f"{verb[0]} {Path(verb[-3]).name}",
)
def test_pictures_for_a_model_that_declares_nothing_are_refused_in_words_of_the_command_line(
    say: Say, tmp_path: Path, verb: tuple[object, ...]
) -> None:
    models.conv_net(tmp_path / "net.onnx")
    code, out, err = say(*verb)
    assert code == 2 and not out and "does not declare how they become inputs" in err
    assert ".npy" in err and "preprocess=" not in err and "trt_engine." not in err

"""Pictures are calibration data in every verb that takes data, by what the model declares."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import onnx_models as models
import trt_engine as te
from trt_engine.vision import spec

Say = Callable[..., tuple[int, str, str]]
EXAMPLES = Path(__file__).parents[2] / "examples"
DIGITS = EXAMPLES / "digits" / "model.onnx"
VAL = EXAMPLES / "digits" / "val"
VIT = EXAMPLES / "classifiers" / "vit.onnx"
ROWS = EXAMPLES / "classifiers" / "val.npz"


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Say) -> Say:
    """A verb in a folder with four pictures in `imgs`, and a store of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRT_ENGINE_STORE", str(tmp_path / "store"))
    (tmp_path / "imgs").mkdir()
    for picture in sorted((VAL / "images").iterdir())[:4]:
        shutil.copy(picture, tmp_path / "imgs")
    return call


def test_ranges_sees_pictures(say: Say) -> None:
    code, out, _ = say("ranges", DIGITS, "--calib-data", "imgs", "--json")
    told = json.loads(out)
    assert code == 0 and (told["rows"], told["random"], told["calib_data"]) == (4, False, "4 files of `imgs`")
    largest = {item["name"]: item["absmax"] for item in told["tensors"]}
    assert 0.5 < largest["images"] <= 1  # scaled as declared, not 0 to 255


@pytest.mark.slow
def test_build_and_size_see_pictures(say: Say, tmp_path: Path) -> None:
    asked = ("--precision", "int8", "--calib-data", "imgs")
    code, out, err = say("build", VIT, *asked, "-o", "v.engine.onnx", "--json")
    assert code == 0, err
    assert json.loads(out)["precision"]["requested"] == "int8" and "4 samples of 4 files of `imgs`" in err
    quick = ("--duration", "100ms", "--warmup", "0", "--max-batch", "1")
    code, _, err = say("size", VIT, *asked, *quick, "-o", "sized")
    assert code == 0, err


@pytest.mark.parametrize(
    ("model", "data", "count"),
    [
        pytest.param(DIGITS, "imgs", 4, id="pictures", marks=pytest.mark.slow),
        pytest.param(DIGITS, VAL, 6, id="COCO folder"),
        pytest.param(DIGITS, VAL / "annotations.json", 6, id="annotations", marks=pytest.mark.slow),
        pytest.param(VIT, ROWS, 6, id="labelled arrays", marks=pytest.mark.slow),
    ],
)
def test_quantize_takes_what_evaluate_takes_and_its_cache_needs_no_data(
    say: Say, tmp_path: Path, model: Path, data: object, count: int
) -> None:
    shared = ("quantize", model, "--to", "int8", "--calibrator", "minmax", "--max-samples", "6", "--cache", "c.json")
    code, out, err = say(*shared, "--calib-data", data, "-o", "a.onnx", "--json")
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
        code, out, err = say("ranges", VIT, "--calib-data", data, "--json")
        assert code == 0, err
        found.append(json.loads(out)["tensors"])
    assert found[0] == found[1] and found[0]


def test_damaged_pictures_of_a_dataset_are_counted_and_not_one_readable_is_refused(say: Say, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "classes" / name).mkdir(parents=True)
        (tmp_path / "classes" / name / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno more")
    code, _, err = say("ranges", VIT, "--calib-data", "classes")
    assert code == 2 and "none of 2 images could be read" in err
    shutil.copy(tmp_path / "imgs" / "val_0_0000.jpg", tmp_path / "classes" / "b")
    code, out, _ = say("ranges", VIT, "--calib-data", "classes", "--json")
    assert code == 0 and json.loads(out)["rows"] == 1 and len(json.loads(out)["skipped"]) == 2


@pytest.mark.parametrize(
    "verb",
    [
        ("ranges", "net.onnx", "--calib-data", "imgs"),
        ("cast", "net.onnx", "--to", "fp16", "--auto-exclude", "--calib-data", "imgs", "-o", "c.onnx"),
        ("build", "net.onnx", "--precision", "int8", "--calib-data", "imgs", "-o", "e.onnx"),
        ("quantize", "net.onnx", "--to", "int8", "--calib-data", "imgs", "-o", "q.onnx"),
        ("quantize", "net.onnx", "--to", "int8", "--calib-data", VAL, "-o", "q.onnx"),
    ],
    ids=lambda verb: f"{verb[0]} {Path(verb[-3]).name}",
)
def test_pictures_for_a_model_that_declares_nothing_are_refused_in_words_of_the_command_line(
    say: Say, tmp_path: Path, verb: tuple[object, ...]
) -> None:
    models.conv_net(tmp_path / "net.onnx")
    code, out, err = say(*verb)
    assert code == 2 and not out and "does not declare how they become inputs" in err
    assert (
        "`--preprocess imagenet|yolo|rtdetr|FILE.json`" in err
        and ".npy" in err
        and "preprocess=" not in err
        and "trt_engine." not in err
    )


def dense_net(path: Path) -> Path:
    """`images` (batch x 3 x 8 x 8) through two products to `scores`."""
    rng = np.random.default_rng(0)
    weights = {
        name: (rng.normal(size=size) / 8).astype(np.float32) for name, size in (("w", (192, 64)), ("v", (64, 16)))
    }
    nodes = [
        models.node("Flatten", "images", "flat"),
        models.node("MatMul", "flat w", "wide", name="wide"),
        models.node("Relu", "wide", "kept"),
        models.node("MatMul", "kept v", "scores", name="last"),
    ]
    sides = {"images": (models.FLOAT, ["batch", 3, 8, 8])}, {"scores": (models.FLOAT, ["batch", 16])}
    return models.save(path, nodes, *sides, weights)


CALIBRATING = {
    "ranges": ("ranges", "net.onnx", "--calib-data", "imgs"),
    "cast": ("cast", "net.onnx", "--to", "fp16", "--auto-exclude", "--calib-data", "imgs", "-o", "c.onnx"),
    "quantize": ("quantize", "net.onnx", "--to", "int8", "--calib-data", "imgs", "-o", "q.onnx"),
    "build": ("build", "net.onnx", "--precision", "int8", "--calib-data", "imgs", "-o", "e.onnx"),
}


@pytest.mark.parametrize("verb", ["ranges", "cast", "quantize"])
def test_a_model_that_declares_nothing_sees_pictures_by_a_preset_and_the_report_records_it(
    say: Say, tmp_path: Path, verb: str
) -> None:
    dense_net(tmp_path / "net.onnx")
    code, out, err = say(*CALIBRATING[verb], "--preprocess", "imagenet", "--json")
    assert code == 0, err
    told = json.loads(out)
    found = told["calibration"]["preprocess"] if verb == "quantize" else told["preprocess"]
    assert (found["source"], found["size"], found["resize"]) == ("imagenet", [8, 8], "center-crop")
    assert found["mean"] == [0.485, 0.456, 0.406]


def test_a_given_file_wins_over_what_is_declared_and_changes_the_ranges(say: Say, tmp_path: Path) -> None:
    (tmp_path / "raw.json").write_text('{"preprocess": {"size": [32, 32], "channels": "L", "scale": 1.0}}')
    largest = []
    for more in ((), ("--preprocess", "raw.json")):
        code, out, err = say("ranges", VIT, "--calib-data", "imgs", *more, "--json")
        assert code == 0, err
        told = json.loads(out)
        largest.append(next(item["absmax"] for item in told["tensors"] if item["name"] == "images"))
        assert told["preprocess"]["source"] == (more[1] if more else "declared")
    assert largest[0] <= 1 < 100 < largest[1]


def test_a_preset_makes_the_numbers_that_python_makes_of_it(say: Say, tmp_path: Path) -> None:
    dense_net(tmp_path / "net.onnx")
    code, out, err = say("ranges", "net.onnx", "--calib-data", "imgs", "--preprocess", "yolo", "--json")
    assert code == 0, err
    shell = {item["name"]: item["absmax"] for item in json.loads(out)["tensors"]}
    for given in ("yolo", spec.Preprocess(size=(8, 8))):
        found = te.ranges(tmp_path / "net.onnx", tmp_path / "imgs", preprocess=given)
        assert {item.name: item.absmax for item in found.tensors} == shell
    made = te.calibrate(tmp_path / "net.onnx", tmp_path / "imgs", "minmax", preprocess="yolo")
    assert made.amax["images"] == shell["images"]
    report = te.quantize(
        tmp_path / "net.onnx", "int8", out=tmp_path / "q.onnx", calib_data=tmp_path / "imgs", preprocess="yolo"
    )
    assert report.calibration is not None and report.calibration["preprocess"]["source"] == "yolo"


@pytest.mark.parametrize("verb", CALIBRATING)
@pytest.mark.parametrize(
    ("given", "said", "hint"),
    [
        ("nowhere.json", "cannot read `nowhere.json`", "`imagenet`"),
        ("yolo:16", "declared image is 3x16x16", "size"),
        ("broken.json", "is not a declaration", "minimum"),
    ],
)
def test_preprocessing_that_does_not_fit_is_refused_by_every_verb(
    say: Say, tmp_path: Path, verb: str, given: str, said: str, hint: str
) -> None:
    dense_net(tmp_path / "net.onnx")
    (tmp_path / "broken.json").write_text("{")
    before = sorted(item.name for item in tmp_path.iterdir())
    code, out, err = say(*CALIBRATING[verb], "--preprocess", given)
    assert code == 2 and not out and said in err and hint in err
    assert sorted(item.name for item in tmp_path.iterdir() if item.name != "store") == before


def test_preprocessing_without_pictures_is_an_error_or_a_warning(say: Say, tmp_path: Path) -> None:
    dense_net(tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", np.zeros((4, 3, 8, 8), np.float32))
    for verb in (("ranges", "net.onnx"), ("cast", "net.onnx", "--to", "fp16", "-o", "c.onnx")):
        code, _, err = say(*verb, "--preprocess", "yolo")
        assert code == 2 and "needs images" in err
        code, _, err = say(*verb, "--preprocess", "yolo", "--calib-data", "x.npy")
        assert code == 0 and "`--preprocess yolo` is not used: the data is not images" in err
    code, _, err = say("build", "net.onnx", "--preprocess", "yolo", "--dry-run")
    assert code == 0 and "`--preprocess yolo` is not used without `--calib-data`" in err


def test_another_preprocessing_is_another_cache_and_another_engine(say: Say, tmp_path: Path) -> None:
    dense_net(tmp_path / "net.onnx")
    shared = ("quantize", "net.onnx", "--to", "int8", "--cache", "c.json", "--overwrite", "-o", "q.onnx")
    assert say(*shared, "--calib-data", "imgs", "--preprocess", "yolo")[0] == 0
    assert say(*shared, "--preprocess", "yolo")[0] == 0
    code, _, err = say(*shared, "--preprocess", "imagenet")
    assert code == 2 and "its inputs were preprocessed otherwise" in err
    keys = set()
    (tmp_path / "p.json").write_text('{"preprocess": {"size": [8, 8]}}')
    for given in ("yolo", "imagenet", "p.json"):
        code, out, _ = say(*CALIBRATING["build"][:6], "--preprocess", given, "--dry-run", "--json")
        assert code == 0
        keys.add(json.loads(out)["key"])
    (tmp_path / "p.json").write_text('{"preprocess": {"size": [8, 8], "resize": "stretch"}}')
    keys.add(json.loads(say(*CALIBRATING["build"][:6], "--preprocess", "p.json", "--dry-run", "--json")[1])["key"])
    plain = {
        json.loads(say("build", "net.onnx", *more, "--dry-run", "--json")[1])["key"]
        for more in ((), ("--preprocess", "yolo"))
    }
    assert len(keys) == 4 and len(plain) == 1

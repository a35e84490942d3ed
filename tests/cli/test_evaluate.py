"""`trt-engine evaluate` and `trt-engine infer --image`: what is typed, printed, written and refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import onnx
import pytest

import trt_engine as te
from onnx_models import FLOAT, node, save
from trt_engine.cli.main import run

pytest.importorskip("PIL", reason="pillow reads the pictures")
pytest.importorskip("faster_coco_eval", reason="faster-coco-eval works out COCO's figures")

from PIL import Image

from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

pytestmark = pytest.mark.usefixtures("kept_engines")

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
PICTURE = DIGITS / "val" / "images" / "val_0_0004.jpg"
Told = tuple[int, str, str]


@pytest.fixture(autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "evaluate-cli-store"  # one for this file: its engines are equal
    monkeypatch.setenv("TRT_ENGINE_STORE", str(folder))
    return folder


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Told]:
    monkeypatch.chdir(tmp_path)

    def say(*args: object) -> Told:
        words = [str(arg) for arg in args]
        monkeypatch.setattr(sys, "argv", ["trt-engine", *words])
        capsys.readouterr()
        code = run(words)
        told = capsys.readouterr()
        return code, told.out, told.err

    return say


def fits_its_schema(text: str) -> dict[str, object]:
    told: dict[str, object] = json.loads(text)
    name = str(told["schema"]).removeprefix("trt-engine/")
    schema = json.loads((ROOT / "docs" / "schemas" / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(told)
    return told


def brightness(path: Path, *, gain: float = 1.0, declared: bool = True, batch: int | str = "batch") -> Path:
    """Scores red, green and blue by the mean of each channel."""
    save(
        path,
        [node("GlobalAveragePool", "images", "m"), node("Flatten", "m", "f"), node("Mul", "f gain", "scores")],
        {"images": (FLOAT, [batch, 3, 8, 8])},
        {"scores": (FLOAT, [batch, 3])},
        {"gain": np.float32([gain])},
    )
    if declared:
        classes = Postprocess("classify", classes=("red", "green", "blue"), activation="softmax")
        declare(path, Vision(Preprocess((8, 8)), classes), path)
    return path


def data(folder: Path) -> Path:
    for name, colour in (("red", (250, 0, 0)), ("green", (0, 250, 0))):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (9, 7), colour).save(folder / name / "x.png")
    return folder


# ------------------------------------------------------------------------------------------------ evaluate


def test_the_figures_are_printed_in_cocos_order_and_written(call: Callable[..., Told], tmp_path: Path) -> None:
    code, out, err = call(
        "evaluate", DIGITS / "model.onnx", "--dataset", DIGITS / "val", "--max-samples", 8, "-o", "run",
        "--save-predictions", "p.json",
    )  # fmt: skip
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    start = names.index("AP")
    assert names[start : start + 12] == "AP AP50 AP75 APs APm APl AR1 AR10 AR100 ARs ARm ARl".split()
    assert "is a model: its engine is built into the store first" in err
    assert "written:   run/metrics.json" in out
    written = fits_its_schema((tmp_path / "run" / "metrics.json").read_text())
    assert written["command"].startswith("trt-engine evaluate")  # type: ignore[attr-defined]
    assert json.loads((tmp_path / "p.json").read_text())


def test_json_is_one_document_that_fits_its_schema_also_when_the_gate_fails(
    call: Callable[..., Told], tmp_path: Path
) -> None:
    good, bad = brightness(tmp_path / "good.onnx"), brightness(tmp_path / "bad.onnx", gain=-1)
    args = ("evaluate", bad, "--dataset", data(tmp_path / "data"), "--baseline", good, "--max-drop", "0.01", "--json")
    code, out, err = call(*args, "-o", "run")
    assert code == 7
    told = fits_its_schema(out)
    assert told["passed"] is False
    assert told["metrics"] == {"top1": 0.0, "top5": 1.0}
    written = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert told == written
    assert "a drop of 1.0000, allowed is 0.01\nhint: " in err
    code, out, _ = call(*args[:-1])
    assert code == 7
    assert "gate:      FAILED" in out
    assert ["top1", "0.0000", "1.0000", "+1.0000"] in [line.split() for line in out.splitlines()]


@pytest.mark.parametrize(
    ("module", "says"), [("PIL", "pillow"), ("faster_coco_eval", "faster-coco-eval"), ("httptools", "`httptools`")]
)
def test_without_the_extra_its_name_is_said_before_anything_is_built(tmp_path: Path, module: str, says: str) -> None:
    script = f"import sys; sys.modules['{module}'] = None; from trt_engine.cli.main import main; main()"
    verb = ["serve", "--build-models"] if module == "httptools" else ["evaluate", "--dataset", str(DIGITS / "val")]
    environment = os.environ | {"TRT_ENGINE_STORE": str(tmp_path / "store")}
    words = [sys.executable, "-c", script, *verb, str(DIGITS / "model.onnx")]
    told = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert told.returncode == 3
    assert re.search(rf"{says}, which is not installed\nhint: `pip install '\S+\[(eval|serve)\]'`", told.stderr)
    assert not (tmp_path / "store").exists()


def test_a_model_goes_by_the_name_that_was_typed_whoever_was_stored_first(
    call: Callable[..., Told], tmp_path: Path
) -> None:
    first = brightness(tmp_path / "first.onnx")
    (tmp_path / "second.onnx").write_bytes(first.read_bytes())
    asked = ("--dataset", data(tmp_path / "data"), "--json")
    assert fits_its_schema(call("evaluate", "first.onnx", *asked)[1])["engine"] == "first.onnx"
    told = fits_its_schema(call("evaluate", "second.onnx", "--baseline", "first.onnx", *asked)[1])
    assert told["engine"] == "second.onnx"
    assert told["baseline"]["engine"] == "first.onnx"  # type: ignore[index]
    engine = te.build(first, out=tmp_path / "e.engine.onnx")
    assert fits_its_schema(call("evaluate", engine.path, *asked)[1])["engine"] == str(engine.path)


def test_an_engine_cannot_be_given_build_settings(call: Callable[..., Told], tmp_path: Path) -> None:
    engine = te.build(brightness(tmp_path / "net.onnx"), out=tmp_path / "net.engine.onnx")
    code, _, err = call("evaluate", engine.path, "--dataset", data(tmp_path / "data"), "--precision", "fp16")
    assert code == 2
    assert "is already built: `--precision` cannot change it" in err


# ------------------------------------------------------------------------------------------------ infer --image


def test_a_picture_in_and_boxes_out_in_its_own_pixels(call: Callable[..., Told], tmp_path: Path) -> None:
    code, out, _ = call("infer", DIGITS / "model.onnx", "--image", PICTURE, "-o", "out.json", "--draw", "out.png")
    assert code == 0
    told = fits_its_schema((tmp_path / "out.json").read_text())
    found = told["detections"]
    assert isinstance(found, list) and len(found) >= 5
    assert set(found[0]) == {"box", "score", "class", "name"}
    assert [item["score"] for item in found] == sorted((item["score"] for item in found), reverse=True)
    assert min(item["score"] for item in found) >= 0.25
    truth = json.loads((DIGITS / "val" / "annotations.json").read_text())
    (image,) = (item for item in truth["images"] if item["file_name"] == PICTURE.name)
    assert told["image_size"] == [image["width"], image["height"]]
    x, y, wide, tall = next(
        item["bbox"]
        for item in truth["annotations"]
        if item["image_id"] == image["id"] and item["category_id"] == found[0]["class"]
    )
    np.testing.assert_allclose(found[0]["box"], [x, y, x + wide, y + tall], atol=4)
    with Image.open(tmp_path / "out.png") as drawn, Image.open(PICTURE) as given:
        assert drawn.size == given.size
        assert drawn.tobytes() != given.tobytes()
    assert f"found:     {found[0]['name']} {found[0]['score']:.4f} at " in out


@pytest.mark.parametrize("batch", ["batch", 4])
def test_a_picture_in_and_classes_out(call: Callable[..., Told], tmp_path: Path, batch: int | str) -> None:
    picture = data(tmp_path / "data") / "green" / "x.png"
    model = brightness(tmp_path / "net.onnx", batch=batch)
    code, out, _ = call("infer", model, "--image", picture, "--top", 2, "--draw", "x.jpg", "--json")
    told = fits_its_schema(out)
    assert code == 0
    assert told["classes"][0]["name"] == "green"  # type: ignore[index]
    assert len(told["classes"]) == 2  # type: ignore[arg-type]
    assert (tmp_path / "x.jpg").is_file()


def test_a_model_that_declares_nothing_says_how_to_declare(call: Callable[..., Told], tmp_path: Path) -> None:
    model = brightness(tmp_path / "net.onnx", declared=False)
    Image.new("RGB", (4, 4), (0, 0, 255)).save(tmp_path / "x.png")
    code, _, err = call("infer", model, "--image", "x.png")
    assert code == 2
    assert "does not declare how images become its inputs" in err
    assert "`--preprocess imagenet`" in err
    given = {"preprocess": {"size": [8, 8]}, "postprocess": {"decode": "classify", "classes": ["r", "g", "b"]}}
    (tmp_path / "vision.json").write_text(json.dumps(given))
    code, out, _ = call("infer", model, "--image", "x.png", "--preprocess", "vision.json")
    assert code == 0
    assert out.index("class:     b") < out.index("           r")
    assert not onnx.load(model).metadata_props

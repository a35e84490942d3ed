"""`trt-engine evaluate` and `trt-engine infer --image`: what is typed, printed, written and refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import trt_engine as te
from documents import document
from onnx_models import FLOAT, node, save
from programs import load_program
from trt_engine.errors import ShapeError, UsageError

pytest.importorskip("PIL", reason="pillow reads the pictures")
pytest.importorskip("faster_coco_eval", reason="faster-coco-eval works out COCO's figures")

from PIL import Image

from trt_engine.verbs.evaluate.run import evaluate
from trt_engine.vision.spec import Postprocess, Preprocess, Vision, declare

pytestmark = pytest.mark.usefixtures("kept_engines")

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits"
PICTURE = DIGITS / "val" / "images" / "val_0_0004.jpg"
COLOURS = {"blue": (10, 20, 250), "green": (10, 250, 20), "red": (250, 10, 20)}
Told = tuple[int, str, str]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.getbasetemp() / "evaluate-cli-store"  # one for this file: its engines are equal
    monkeypatch.setenv("TRT_ENGINE_STORE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def colour_net(
    path: Path, *, batch: int | str = "batch", gain: float = 1.0, sides: tuple[Any, Any] = (8, 8), declared: bool = True
) -> Path:
    """Scores red, green and blue by the mean of each channel; `gain` below 0 turns its answers round."""
    plain = save(
        path,
        [
            node("GlobalAveragePool", "images", "mean"),
            node("Flatten", "mean", "flat"),
            node("Mul", "flat gain", "scores"),
        ],
        {"images": (FLOAT, [batch, 3, *sides])},
        {"scores": (FLOAT, [batch, 3])},
        {"gain": np.float32([gain])},
    )
    if not declared:
        return plain
    vision = Vision(Preprocess((8, 8)), Postprocess("classify", classes=("red", "green", "blue"), activation="softmax"))
    return declare(plain, vision, plain)


def colours(folder: Path, each: int = 3) -> Path:
    rng = np.random.default_rng(0)
    for name, colour in COLOURS.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            sides = tuple(int(side) for side in rng.integers(5, 30, 2))
            Image.new("RGB", sides, colour).save(folder / name / f"{number}.png")
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
    written = document((tmp_path / "run" / "metrics.json").read_text())
    assert written["command"].startswith("trt-engine evaluate")
    assert json.loads((tmp_path / "p.json").read_text())


def test_json_is_one_document_that_fits_its_schema_also_when_the_gate_fails(
    call: Callable[..., Told], tmp_path: Path
) -> None:
    good, bad = colour_net(tmp_path / "good.onnx"), colour_net(tmp_path / "bad.onnx", gain=-1)
    folder = colours(tmp_path / "data")
    args = ("evaluate", bad, "--dataset", folder, "--baseline", good, "--max-drop", "0.01", "--json")
    code, out, err = call(*args, "-o", "run")
    assert code == 7
    told = document(out)
    assert told["passed"] is False
    assert told["metrics"] == {"top1": 0.0, "top5": 1.0} and told["metric_drop"]["top1"] == 1
    assert told["parity"]["scores"]["cosine"] == pytest.approx(-1)
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
    first = colour_net(tmp_path / "first.onnx")
    (tmp_path / "second.onnx").write_bytes(first.read_bytes())
    asked = ("--dataset", colours(tmp_path / "data"), "--json")
    assert document(call("evaluate", "first.onnx", *asked)[1])["engine"] == "first.onnx"
    told = document(call("evaluate", "second.onnx", "--baseline", "first.onnx", *asked)[1])
    assert told["engine"] == "second.onnx"
    assert told["baseline"]["engine"] == "first.onnx"
    engine = te.build(first, out=tmp_path / "e.engine.onnx")
    assert document(call("evaluate", engine.path, *asked)[1])["engine"] == str(engine.path)


def test_an_engine_cannot_be_given_build_settings(call: Callable[..., Told], tmp_path: Path) -> None:
    engine = te.build(colour_net(tmp_path / "net.onnx"), out=tmp_path / "net.engine.onnx")
    code, _, err = call("evaluate", engine.path, "--dataset", colours(tmp_path / "data"), "--precision", "fp16")
    assert code == 2
    assert "is already built: `--precision` cannot change it" in err


# ------------------------------------------------------------------------------------------------ infer --image


def test_a_picture_in_and_boxes_out_in_its_own_pixels(call: Callable[..., Told], tmp_path: Path) -> None:
    code, out, _ = call("infer", DIGITS / "model.onnx", "--image", PICTURE, "-o", "out.json", "--draw", "out.png")
    assert code == 0
    told = document((tmp_path / "out.json").read_text())
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
    picture = colours(tmp_path / "data") / "green" / "0.png"
    model = colour_net(tmp_path / "net.onnx", batch=batch)
    code, out, _ = call("infer", model, "--image", picture, "--top", 2, "--draw", "x.jpg", "--json")
    told = document(out)
    assert code == 0
    assert told["classes"][0]["name"] == "green"
    assert len(told["classes"]) == 2
    assert (tmp_path / "x.jpg").is_file()


def test_a_model_that_declares_nothing_says_how_to_declare(call: Callable[..., Told], tmp_path: Path) -> None:
    model = colour_net(tmp_path / "net.onnx", declared=False)
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


# ------------------------------------------------------------------------------------------------ in Python


def detect() -> Any:
    return load_program(DIGITS / "detect.py", "digits_detect_here")


# ------------------------------------------------------------------------------------------------ detectors


@pytest.mark.slow
def test_the_ap_of_the_digits_is_that_of_the_examples_own_script(tmp_path: Path) -> None:
    example = detect()
    expected = example.average_precision(example.onnx_detector(DIGITS / "model.onnx"), DIGITS / "val")
    found = evaluate(DIGITS / "model.onnx", DIGITS / "val", out=tmp_path, save_predictions=tmp_path / "p.json")
    assert found.metrics["AP"] == pytest.approx(expected.ap50_95, abs=1e-6)
    assert found.metrics["AP50"] == pytest.approx(expected.ap50, abs=1e-6)
    assert found.metrics["AP75"] == pytest.approx(expected.ap75, abs=1e-6)
    assert (found.images, found.skipped, found.task, found.batch) == (64, 0, "detect", 8)
    assert found.latency_ms is not None and len(found.samples_ms) == 8
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["schema"] == "trt-engine/evaluate"
    assert written["metrics"] == found.metrics
    assert written["dataset_digest"] == found.dataset_digest
    rows = json.loads((tmp_path / "p.json").read_text())
    assert len(rows) == found.predictions
    assert set(rows[0]) == {"image_id", "category_id", "bbox", "score"}


@pytest.mark.slow
def test_a_subset_counts_only_its_own_pictures_and_annotations() -> None:
    first = evaluate(DIGITS / "model.onnx", DIGITS / "val", max_samples=8)
    some = evaluate(DIGITS / "model.onnx", DIGITS / "val" / "annotations.json", max_samples=8, seed=3)
    assert first.images == some.images == 8
    assert first.metrics["AP"] > 0.8
    assert first.dataset_digest != some.dataset_digest
    assert (
        some.dataset_digest
        == evaluate(DIGITS / "model.onnx", DIGITS / "val", max_samples=8, seed=3, batch=3).dataset_digest
    )


def test_one_damaged_picture_is_left_out_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(DIGITS / "val", tmp_path / "val")
    broken = tmp_path / "val" / "images" / "val_0_0003.jpg"
    broken.write_bytes(broken.read_bytes()[:700])
    found = evaluate(DIGITS / "model.onnx", tmp_path / "val", max_samples=10)
    assert (found.images, found.skipped) == (9, 1)
    assert found.skipped_images[0].name == "val_0_0003.jpg"
    assert any("1 images are left out (`val_0_0003.jpg`" in text for text in found.warnings)
    assert "are left out" in caplog.text
    without = json.loads((DIGITS / "val" / "annotations.json").read_text())
    without["images"] = [item for item in without["images"][:10] if item["id"] != 4]
    kept = {item["id"] for item in without["images"]}
    without["annotations"] = [item for item in without["annotations"] if item["image_id"] in kept]
    (tmp_path / "val" / "annotations.json").write_text(json.dumps(without))
    assert evaluate(DIGITS / "model.onnx", tmp_path / "val").metrics == found.metrics


def test_categories_of_other_names_are_refused_before_anything_runs(tmp_path: Path) -> None:
    shutil.copytree(DIGITS / "val", tmp_path / "val")
    truth = json.loads((tmp_path / "val" / "annotations.json").read_text())
    for item in truth["categories"]:
        item["name"] = f"animal {item['name']}"
    (tmp_path / "val" / "annotations.json").write_text(json.dumps(truth))
    with pytest.raises(UsageError, match="no class of the model matches a category of the dataset"):
        evaluate(DIGITS / "model.onnx", tmp_path / "val", out=tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists()


# ------------------------------------------------------------------------------------------------ classifiers


@pytest.mark.parametrize("backend", ["onnxruntime", "fake"])
def test_a_folder_for_each_class_gives_top_1_and_top_5_on_any_backend(tmp_path: Path, backend: str) -> None:
    device = "fake:0" if backend == "fake" else "cpu"
    found = evaluate(colour_net(tmp_path / "net.onnx"), colours(tmp_path / "data"), backend=backend, device=device)
    assert found.metrics == {"top1": 1.0, "top5": 1.0}
    assert (found.images, found.task, found.backend, found.dataset_kind) == (9, "classify", backend, "folders")
    assert found.vision["source"] == "declared"


def test_an_npz_of_images_and_labels(tmp_path: Path) -> None:
    images = np.zeros((5, 9, 9, 3), np.uint8)
    labels = np.array([0, 1, 2, 2, 1])
    images[np.arange(5), :, :, labels] = 200
    labels[4] = 0  # one label is wrong
    np.savez(tmp_path / "x.npz", images=images, labels=labels)
    found = evaluate(colour_net(tmp_path / "net.onnx"), tmp_path / "x.npz", batch=2)
    assert found.metrics == {"top1": 0.8, "top5": 1.0}
    assert len(found.samples_ms) == 2  # the last batch is not whole, and not timed
    np.savez(tmp_path / "y.npz", images=images, labels=labels + 5)
    with pytest.raises(UsageError, match="the model scores 3 classes"):
        evaluate(tmp_path / "net.onnx", tmp_path / "y.npz")


def test_an_engine_of_a_fixed_batch_gets_its_last_batch_filled_up(tmp_path: Path) -> None:
    data = colours(tmp_path / "data")
    engine = te.build(colour_net(tmp_path / "net.onnx", batch=4), out=tmp_path / "net.engine.onnx")
    found = evaluate(engine, data)
    assert (found.batch, found.images, len(found.samples_ms)) == (4, 9, 3)
    assert found.metrics["top1"] == 1.0
    with pytest.raises(ShapeError, match="takes batches of 4 only") as refused:
        evaluate(engine, data, batch=3)
    assert refused.value.hint == "`--batch 4`"


def test_a_model_of_open_height_and_width_is_built_for_the_declared_size(tmp_path: Path) -> None:
    model = colour_net(tmp_path / "net.onnx", sides=("height", "width"))
    assert evaluate(model, colours(tmp_path / "data")).metrics["top1"] == 1.0


# ------------------------------------------------------------------------------------------------ a baseline


def test_a_gate_with_nothing_to_gate_by_fails_after_everything_is_written(tmp_path: Path) -> None:
    data = tmp_path / "val"
    shutil.copytree(DIGITS / "val" / "images", data / "images")
    listed = json.loads((DIGITS / "val" / "annotations.json").read_text())
    (data / "annotations.json").write_text(json.dumps(listed | {"annotations": []}))
    with pytest.raises(UsageError, match="no AP to gate by"):
        evaluate(
            DIGITS / "model.onnx",
            data,
            baseline=DIGITS / "model.onnx",
            max_drop=0.01,
            max_samples=4,
            out=tmp_path / "run",
        )
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["passed"] is None


def test_a_baseline_of_another_batch_runs_the_same_pictures_in_pieces(tmp_path: Path) -> None:
    data, model = colours(tmp_path / "data"), colour_net(tmp_path / "net.onnx")
    fixed = te.build(colour_net(tmp_path / "fixed.onnx", batch=3), out=tmp_path / "fixed.engine.onnx")
    found = evaluate(model, data, baseline=fixed, batch=8)
    assert found.baseline is not None
    assert (found.batch, found.baseline.batch) == (8, 3)
    assert found.baseline.metrics == found.metrics == {"top1": 1.0, "top5": 1.0}
    assert found.parity is not None and found.parity["scores"].max_abs == 0
    assert len(found.baseline.samples_ms) == 4  # 3 + 3 + 2 filled up, and the last one alone filled up


def test_pictures_without_labels_are_enough_for_parity(tmp_path: Path) -> None:
    pictures = colours(tmp_path / "data") / "red"
    model, half = colour_net(tmp_path / "net.onnx"), colour_net(tmp_path / "half.onnx", gain=0.5)
    found = evaluate(half, pictures, baseline=model)
    assert found.metrics == {}
    assert found.dataset_kind == "pictures"
    assert found.parity is not None and found.parity["scores"].max_rel == pytest.approx(0.5)
    for more, says in (({}, "without labels"), ({"baseline": model, "max_drop": 0.1}, "no labels to gate by")):
        with pytest.raises(UsageError, match=says):
            evaluate(half, pictures, **more)


# ------------------------------------------------------------------------------------------------ refusals


def test_folders_in_another_order_than_the_classes_are_suspected(tmp_path: Path) -> None:
    """Without declared names the folders are the classes in the order of their names."""
    data = tmp_path / "data"
    for name, colour in (("a-blue", (0, 0, 250)), ("b-red", (250, 0, 0)), ("c-green", (0, 250, 0))):
        (data / name).mkdir(parents=True)
        Image.new("RGB", (9, 7), colour).save(data / name / "x.png")
    net = colour_net(tmp_path / "net.onnx")
    found = Vision(Preprocess((8, 8)), Postprocess("classify", activation="softmax"))
    report = evaluate(declare(net, found, tmp_path / "other.onnx"), data)
    assert report.metrics["top1"] == 0.0
    assert any("below chance (1 of 3)" in text and "0 `a-blue`, 1 `b-red`" in text for text in report.warnings)

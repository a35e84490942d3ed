"""What examples/digits promises: a small NMS-free detector, scenes it never saw, and its quality on them."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from programs import load_program

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
MODEL = DIGITS / "model.onnx"
PLAIN_OPERATORS = {
    "Add", "Cast", "Concat", "Conv", "Div", "Expand", "GatherElements", "MaxPool", "Mul", "ReduceSum", "Reshape",
    "Resize", "Sigmoid", "Softmax", "Split", "Sub", "TopK", "Transpose", "Unsqueeze",
}  # fmt: skip


def example(name: str) -> ModuleType:
    """A script of the example as a module, under a name of its own: `scenes` alone could meet another."""
    return load_program(DIGITS / f"{name}.py", f"digits_{name}")


@pytest.fixture(scope="module")
def scenes() -> ModuleType:
    pytest.importorskip("sklearn", reason="scikit-learn holds the digits and the photographs")
    pytest.importorskip("PIL", reason="pillow composes the scenes")
    return example("scenes")


@pytest.fixture(scope="module")
def annotations() -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((DIGITS / "val" / "annotations.json").read_text())
    return parsed


def overlap(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])


def test_the_model_takes_any_batch_of_images_and_answers_with_300_rows_each() -> None:
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(MODEL).graph

    def shape(value: Any) -> list[str | int]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert [(value.name, shape(value)) for value in graph.input] == [("images", ["batch", 3, 160, 160])]
    assert [(value.name, shape(value)) for value in graph.output] == [("output0", ["batch", 300, 6])]
    elements = {value.type.tensor_type.elem_type for value in (*graph.input, *graph.output)}
    assert elements == {onnx.TensorProto.FLOAT}


def test_the_model_asks_for_no_new_format_and_no_rare_operator() -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(MODEL)
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version <= 10
    assert [(opset.domain, opset.version <= 20) for opset in model.opset_import] == [("", True)]
    assert {node.op_type for node in model.graph.node} <= PLAIN_OPERATORS
    names = [node.name for node in model.graph.node]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_rows_are_sorted_by_score_and_do_not_depend_on_the_batch(batch: int) -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("PIL")
    detect = example("detect")
    images = np.random.default_rng(0).random((batch, 3, 160, 160), np.float32)
    infer = detect.onnx_detector(MODEL)
    rows = infer(images)
    assert rows.shape == (batch, 300, 6)
    assert (np.diff(rows[..., 4], axis=1) <= 0).all()
    assert set(np.unique(rows[..., 5])) <= set(range(10))
    np.testing.assert_allclose(rows[0, :20], infer(images[:1])[0, :20], atol=1e-3)


def test_the_validation_set_is_64_annotated_images_of_varied_size(annotations: dict[str, Any]) -> None:
    on_disk = {path.name for path in (DIGITS / "val" / "images").iterdir()}
    assert {image["file_name"] for image in annotations["images"]} == on_disk
    assert len(on_disk) == 64
    assert {row["image_id"] for row in annotations["annotations"]} == {image["id"] for image in annotations["images"]}
    assert len({(image["width"], image["height"]) for image in annotations["images"]}) > 30
    assert sum(path.stat().st_size for path in (DIGITS / "val").rglob("*") if path.is_file()) < 1_500_000


def test_every_box_lies_inside_its_image_and_names_a_class_of_the_model(annotations: dict[str, Any]) -> None:
    sizes = {image["id"]: (image["width"], image["height"]) for image in annotations["images"]}
    assert [(row["id"], row["name"]) for row in annotations["categories"]] == [(n, str(n)) for n in range(10)]
    for row in annotations["annotations"]:
        x, y, wide, tall = row["bbox"]
        width, height = sizes[row["image_id"]]
        assert wide > 0
        assert tall > 0
        assert x >= 0
        assert x + wide <= width
        assert y >= 0
        assert y + tall <= height
        assert row["area"] == wide * tall
        assert row["category_id"] in range(10)


def test_no_validation_digit_was_trained_on(scenes: ModuleType, annotations: dict[str, Any]) -> None:
    train, val = set(scenes.digit_indices("train")), set(scenes.digit_indices("val"))
    used = {row["digit_index"] for row in annotations["annotations"]}
    assert not train & val
    assert used <= val
    assert not used & train


@pytest.mark.slow
def test_no_validation_scene_shows_a_piece_of_a_photograph_trained_on(
    scenes: ModuleType, annotations: dict[str, Any]
) -> None:
    for image in annotations["images"]:
        photo, rect = image["source"]["photo"], image["source"]["rect"]
        assert not overlap(tuple(rect), scenes.PHOTO_RECTS["train"][photo])
    for index in range(50):
        item = scenes.scene("train", 5, index)
        assert not overlap(item.rect, scenes.PHOTO_RECTS["val"][item.photo])
        assert {digit.index for digit in item.digits} <= set(scenes.digit_indices("train"))


@pytest.mark.slow
def test_the_same_seed_writes_the_same_scenes_in_another_process(scenes: ModuleType, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    scenes.write("val", 3, 4, here)
    options = ["--split", "val", "--count", "4", "--seed", "3", "-o", str(there)]
    subprocess.run([sys.executable, str(DIGITS / "scenes.py"), *options], check=True)
    files = sorted(path.relative_to(here) for path in here.rglob("*") if path.is_file())
    assert len(files) == 5
    assert all((here / path).read_bytes() == (there / path).read_bytes() for path in files)
    scenes.write("val", 4, 1, tmp_path / "other")
    assert (tmp_path / "other" / "images" / "val_4_0000.jpg").read_bytes() != (
        here / "images" / "val_3_0000.jpg"
    ).read_bytes()


def test_a_box_comes_back_from_the_letterbox_where_it_was() -> None:
    np = pytest.importorskip("numpy")
    image = pytest.importorskip("PIL.Image")
    detect = example("detect")
    picture = image.new("RGB", (300, 141), (10, 20, 30))
    pixels, way = detect.letterbox(picture)
    assert pixels.shape == (3, 160, 160)
    np.testing.assert_allclose(pixels[:, 0, 0], 114 / 255, rtol=1e-6)
    inside = np.array([[0, way.top_px, 160, way.top_px + 75]], np.float32)
    np.testing.assert_allclose(way.back(inside), [[0, 0, 300, 141]], atol=1e-3)


def test_the_committed_model_reaches_half_of_perfect_on_scenes_it_never_saw() -> None:
    pytest.importorskip("PIL", reason="pillow reads the validation images")
    pytest.importorskip("onnxruntime", reason="onnxruntime runs the model")
    pytest.importorskip("faster_coco_eval", reason="faster-coco-eval computes the average precision")
    detect = example("detect")
    scores = detect.average_precision(detect.onnx_detector(MODEL), DIGITS / "val")
    assert scores.ap50_95 >= 0.50
    assert scores.ap50 >= scores.ap75 >= scores.ap50_95 * 0.8

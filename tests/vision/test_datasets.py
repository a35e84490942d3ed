"""Datasets: what is found, what is left out and why, and that order and digest are the same everywhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trt_engine.errors import UsageError
from trt_engine.vision.spec import Preprocess

pytest.importorskip("PIL", reason="pillow reads the pictures")
from PIL import Image

from trt_engine.vision.datasets import DatasetReader, open_dataset
from trt_engine.vision.preprocess import Preprocessor

SMALL = Preprocessor(Preprocess(size=(8, 8)), "float32")


def picture(path: Path, size: tuple[int, int] = (12, 10), value: int = 50) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)
    return path


def annotations(**changed: Any) -> dict[str, Any]:
    images = [{"id": n + 1, "file_name": f"{n}.jpg", "width": 12, "height": 10} for n in range(3)]
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 4, 4], "area": 16, "iscrowd": 0}]
    return {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]} | changed


def coco(folder: Path, inside: str = "images", **changed: Any) -> Path:
    for number in range(3):
        picture(folder / inside / f"{number}.jpg", value=number * 50)
    (folder / "annotations.json").write_text(json.dumps(annotations(**changed)))
    return folder


def read(path: Path, batch: int = 2) -> tuple[DatasetReader, list[list[str]]]:
    reader = DatasetReader(open_dataset(path), SMALL, batch)
    return reader, [[item.name for item in group.items] for group in reader]


@pytest.mark.parametrize("images", ["images", ""])
@pytest.mark.parametrize("name", ["", "annotations.json"])
def test_annotations_are_found_with_their_pictures_beside_them_or_in_images(
    tmp_path: Path, images: str, name: str
) -> None:
    found = open_dataset(coco(tmp_path, images) / name)
    assert found.kind == "coco"
    assert [item.image_id for item in found.items] == [1, 2, 3]
    assert found.ground_truth[0].bbox == (1, 1, 4, 4)


def test_cocos_own_folders_are_understood(tmp_path: Path) -> None:
    coco(tmp_path, "val2017")
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations.json").rename(tmp_path / "annotations" / "instances_val2017.json")
    assert len(open_dataset(tmp_path / "annotations" / "instances_val2017.json").items) == 3


def test_batches_are_whole_and_in_order_and_the_digest_is_that_of_the_pictures(tmp_path: Path) -> None:
    coco(tmp_path / "a")
    reader, names = read(tmp_path / "a")
    assert names == [["0.jpg", "1.jpg"], ["2.jpg"]]
    assert reader.skipped == []
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert read(tmp_path / "b", 3)[0].digest == reader.digest
    picture(tmp_path / "b" / "images" / "1.jpg", value=51)
    assert read(tmp_path / "b")[0].digest != reader.digest


def test_one_damaged_picture_among_many_is_left_out_and_batches_stay_whole(tmp_path: Path) -> None:
    for number in range(30):
        picture(tmp_path / "cat" / f"{number:02}.png")
    broken = tmp_path / "cat" / "07.png"
    broken.write_bytes(broken.read_bytes()[:40])
    reader, names = read(tmp_path, 10)
    assert [len(group) for group in names] == [10, 10, 9]
    assert [item.name for item in reader.skipped] == ["cat/07.png"]
    assert reader.images == 29


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"images": []}, "lists no images"),
        ({"categories": []}, "has no categories"),
        ({"images": [{"id": 1, "file_name": "x"}, {"id": 1, "file_name": "y"}]}, "the same id"),
        ({"categories": [{"id": 1, "name": "a"}, {"id": 1, "name": "b"}]}, "the same id"),
        ({"annotations": [{"image_id": 1, "category_id": 5, "bbox": [0, 0, 1, 1]}]}, "category 5, which is not listed"),
        ({"annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, -1, 1]}]}, "expected x, y, width, height"),
        (
            {"annotations": [{"image_id": 1, "category_id": 1, "bbox": [-1e308, 0, 1, 1]}]},
            "expected x, y, width, height",
        ),
        ({"annotations": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 1]}]}, "$.annotations[0].bbox"),
        ({"annotations": [{"image_id": 1, "category_id": 1}]}, "missing required field `bbox`"),
        ({"images": [{"id": "one", "file_name": "x"}]}, "$.images[0].id"),
        ({"images": [{"id": 1, "file_name": "../x.jpg"}]}, "none of which exists"),
        ({"images": [{"id": 1, "file_name": "/etc/passwd"}]}, "none of which exists"),
        ({"images": [{"id": 1, "file_name": "elsewhere.jpg"}]}, "searched"),
    ],
)
def test_annotations_that_cannot_be_used_are_refused_with_the_place(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    coco(tmp_path, **changed)
    with pytest.raises(UsageError) as refused:
        open_dataset(tmp_path)
    assert says in refused.value.message
    assert refused.value.hint


def test_folders_are_classes_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("dog", "cat", "ant"):
        picture(tmp_path / name / "b.jpg")
        picture(tmp_path / name / "a.PNG")
    found = open_dataset(tmp_path)
    assert found.kind == "folders"
    assert found.labels == ("ant", "cat", "dog")
    assert [(item.name, item.label) for item in found.items][:3] == [
        ("ant/a.PNG", 0),
        ("ant/b.jpg", 0),
        ("cat/a.PNG", 1),
    ]


def test_a_subset_by_seed_is_the_same_everywhere_and_keeps_the_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=np.zeros((50, 8, 8), np.uint8), labels=np.arange(50))
    found = open_dataset(tmp_path / "x.npz")
    assert [item.label for item in found.subset(3).items] == [0, 1, 2]
    chosen = [item.label for item in found.subset(5, seed=7).items]
    assert chosen == sorted(chosen)  # type: ignore[type-var]
    assert chosen == [item.label for item in open_dataset(tmp_path / "x.npz").subset(5, seed=7).items]
    assert chosen != [item.label for item in found.subset(5, seed=8).items]
    assert found.subset(99) is found


@pytest.mark.parametrize("shape", [(2, 8, 8), (2, 8, 8, 1), (2, 8, 8, 3), (2, 20, 30, 3)])
def test_arrays_of_bytes_are_pictures(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.savez(tmp_path / "x.npz", images=np.full(shape, 255, np.uint8), labels=np.zeros(2, int))
    reader = DatasetReader(open_dataset(tmp_path / "x.npz"), SMALL, 4)
    (group,) = reader
    assert group.pixels.shape == (2, 3, 8, 8)
    assert group.pixels[:, :, 4, 4].tolist() == [[1.0] * 3] * 2


def test_arrays_of_numbers_are_the_input_itself_and_rows_with_nan_are_left_out(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((3, 3, 8, 8))
    images[1, 0, 0, 0] = np.nan
    np.savez(tmp_path / "x.npz", images=images, labels=np.arange(3))
    reader = DatasetReader(open_dataset(tmp_path / "x.npz"), SMALL, 4)
    (group,) = reader
    np.testing.assert_array_equal(group.pixels, images[[0, 2]].astype(np.float32))
    assert [(item.name, item.reason) for item in reader.skipped] == [("row 1", "it contains NaN or Inf")]


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"images": np.zeros((2, 8, 8))}, "holds `images`, expected `images` and `labels`"),
        ({"images": np.zeros((2, 8)), "labels": np.zeros(2, int)}, "is 2x8"),
        ({"images": np.zeros((0, 8, 8)), "labels": np.zeros(0, int)}, "is 0x8x8"),
        ({"images": np.zeros((2, 8, 8)), "labels": np.zeros(3, int)}, "for 2 images"),
        ({"images": np.zeros((2, 8, 8)), "labels": np.zeros(2)}, "is float64"),
        ({"images": np.array([{}, {}], object), "labels": np.zeros(2, int)}, "holds pickled objects"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused(tmp_path: Path, arrays: dict[str, Any], says: str) -> None:
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(UsageError) as refused:
        open_dataset(tmp_path / "x.npz")
    assert says in refused.value.message


def test_what_is_no_dataset_is_said(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "hollow" / "cat").mkdir(parents=True)
    (tmp_path / "x.txt").write_text("x")
    (tmp_path / "x.npz").write_text("x")
    (tmp_path / "x.json").write_text("{")
    (tmp_path / "two").mkdir()
    for name in "ab":
        (tmp_path / "two" / f"{name}.json").write_text("{}")
    for name, says in {
        "none": "no such dataset",
        "empty": "contains no images",
        "hollow": "contains no images",
        "x.txt": "is not a dataset",
        "x.npz": "neither .npy nor .npz",
        "x.json": "not a COCO annotations file",
        "two": "several annotation files: `a.json`, `b.json`",
    }.items():
        with pytest.raises(UsageError, match=says) as refused:
            open_dataset(tmp_path / name)
        assert refused.value.hint

"""COCO's figures are pycocotools' own, on anything; and classes are categories by name, checked."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trt_engine.errors import UsageError

pytest.importorskip("faster_coco_eval", reason="faster-coco-eval works out COCO's figures")
pytest.importorskip("PIL", reason="datasets are read with pillow")

from trt_engine.evaluation.coco_metrics import METRICS, category_ids, coco_metrics, coco_results, save_predictions
from trt_engine.vision.datasets import Category, GroundTruth
from trt_engine.vision.decode import Detections
from trt_engine.vision.masks import encode_mask

Rows = list[dict[str, Any]]


def pycocotools_figures(
    truth: list[GroundTruth], categories: list[Category], ids: list[int], results: Rows
) -> list[float]:
    """The reference, fed with the same values."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        expected, found = COCO(), COCO()
        images = [{"id": number} for number in ids]
        names = [{"id": item.id, "name": item.name} for item in categories]
        expected.dataset = {
            "images": images,
            "categories": names,
            "annotations": [
                {
                    "id": number, "image_id": item.image_id, "category_id": item.category_id, "bbox": list(item.bbox),
                    "area": item.area if item.area is not None else item.bbox[2] * item.bbox[3],
                    "iscrowd": int(item.iscrowd),
                }
                for number, item in enumerate((item for item in truth if item.image_id in ids), 1)
            ],
        }  # fmt: skip
        rows = [
            {**row, "id": number, "area": row["bbox"][2] * row["bbox"][3], "iscrowd": 0}
            for number, row in enumerate((row for row in results if row["image_id"] in ids), 1)
        ]
        found.dataset = {"images": images, "categories": names, "annotations": rows}
        expected.createIndex()
        found.createIndex()
        evaluation = COCOeval(expected, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(value) for value in evaluation.stats]


def scene(seed: int, images: int, objects: int, extra: int, crowds: float, spread: float) -> tuple[Any, ...]:
    """Annotations of all sizes, some of them crowds, and detections that hit some of them and miss others."""
    rng = np.random.default_rng(seed)
    categories = [Category(3, "cat"), Category(7, "dog"), Category(90, "cow")]
    ids = list(range(10, 10 + images))
    truth, results = [], []

    def box() -> list[float]:
        sides = np.exp(rng.uniform(np.log(4), np.log(300), 2))  # small, medium and large
        return [float(value) for value in (*rng.uniform(0, 400, 2), *sides)]

    def found(image: int, category: int, where: list[float]) -> dict[str, Any]:
        score = float(rng.integers(1, 8)) / 8 if rng.random() < 0.5 else float(rng.random())  # some are equal
        return {"image_id": image, "category_id": category, "bbox": where, "score": score}

    for image in ids:
        if rng.random() < 0.25:  # an empty picture
            continue
        for _ in range(rng.integers(0, objects + 1)):
            where, category = box(), categories[rng.integers(3)].id
            crowd = int(rng.random() < crowds)
            area = None if rng.random() < 0.3 else where[2] * where[3] * float(rng.uniform(0.3, 1))
            truth.append(GroundTruth(image, category, (where[0], where[1], where[2], where[3]), area, crowd))
            for _ in range(rng.integers(0, 3)):
                moved = [
                    value + float(rng.normal(0, spread)) * side
                    for value, side in zip(where, where[2:] * 2, strict=True)
                ]
                results.append(found(image, category, [*moved[:2], abs(moved[2]), abs(moved[3])]))
    for _ in range(rng.integers(0, extra + 1)):
        results.append(found(int(rng.choice(ids)), categories[rng.integers(3)].id, box()))
    return truth, categories, ids, results


@given(
    seed=st.integers(0, 2**32), images=st.integers(1, 6), objects=st.integers(0, 8),
    extra=st.sampled_from([0, 5, 150]), crowds=st.sampled_from([0.0, 0.3, 1.0]), spread=st.sampled_from([0.0, 0.05, 0.3]),
)  # fmt: skip
def test_all_twelve_figures_are_those_of_pycocotools(
    seed: int, images: int, objects: int, extra: int, crowds: float, spread: float
) -> None:
    pytest.importorskip("pycocotools", reason="pycocotools is what the figures are compared with")
    truth, categories, ids, results = scene(seed, images, objects, extra, crowds, spread)
    found = coco_metrics(truth, categories, ids, results)
    assert list(found) == list(METRICS)
    np.testing.assert_allclose(
        list(found.values()), pycocotools_figures(truth, categories, ids, results), rtol=0, atol=1e-6
    )


def test_pictures_that_were_not_evaluated_do_not_count() -> None:
    truth, categories, ids, results = scene(1, 6, 8, 0, 0.0, 0.05)
    some = ids[:3]
    inside = [row for row in results if row["image_id"] in some]
    assert coco_metrics(truth, categories, some, results) == coco_metrics(truth, categories, some, inside)
    assert coco_metrics(truth, categories, some, inside) != coco_metrics(truth, categories, ids, inside)


def test_figures_of_which_there_is_nothing_are_cocos_minus_one() -> None:
    cat = [Category(1, "cat")]
    empty = coco_metrics([], cat, [1, 2], [])
    assert set(empty.values()) == {-1.0}
    small = coco_metrics(
        [GroundTruth(1, 1, (0, 0, 5, 5))],
        cat,
        [1],
        [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 5, 5], "score": 1.0}],
    )
    assert small["AP"] == small["APs"] == pytest.approx(1)
    assert small["APm"] == small["APl"] == -1


# ------------------------------------------------------------------------------------------------ categories

ANIMALS = [Category(17, "cat"), Category(18, "dog"), Category(21, "cow")]


def test_a_class_is_the_category_of_its_name(caplog: pytest.LogCaptureFixture) -> None:
    assert category_ids(["dog", "Cat", "cow"], ANIMALS) == {0: 18, 1: 17, 2: 21}
    assert category_ids(["traffic_light", "x"], [Category(5, "traffic light")]) == {0: 5}
    assert not caplog.records
    assert category_ids(["dog"], ANIMALS) == {0: 18}
    assert "no class for 2 categories (`cat`, `cow`): their AP is 0" in caplog.text


def test_without_names_the_number_is_the_category_if_it_can_be() -> None:
    digits = [Category(number, str(number)) for number in (1, 0, 2)]
    assert category_ids([], digits) == {0: 0, 1: 1, 2: 2}
    with pytest.raises(UsageError, match="do not count from 0") as refused:
        category_ids([], ANIMALS)
    assert "declare the names" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("classes", "categories", "says"),
    [
        (["car", "bus"], ANIMALS, "the model has `car`, `bus`, the dataset `cat`, `dog`, `cow`"),
        (["cat"], [Category(1, "cat"), Category(2, "Cat")], "two categories named `Cat`"),
    ],
)
def test_categories_that_do_not_match_are_refused_with_both_lists(
    classes: list[str], categories: list[Category], says: str
) -> None:
    with pytest.raises(UsageError) as refused:
        category_ids(classes, categories)
    assert says in refused.value.message
    assert refused.value.hint


def test_predictions_are_saved_as_cocos_tools_read_them(tmp_path: Path) -> None:
    found = Detections(np.array([[1.5, 2, 11.5, 7], [0, 0, 1, 1]]), np.array([0.5, 0.4]), np.array([0, 4]))
    rows = coco_results(found, 42, {0: 17})
    assert rows == [{"image_id": 42, "category_id": 17, "bbox": [1.5, 2, 10, 5], "score": 0.5}]
    assert json.loads(save_predictions(rows, tmp_path / "p.json").read_text()) == rows
    mask = encode_mask(np.ones((5, 4), bool), (1, 2), (20, 20))
    whole = dataclasses.replace(found, masks=(mask, mask), keypoints=np.array([[[1.0, 2.0]], [[3.0, 4.0]]]))
    (row,) = coco_results(whole, 42, {0: 17})
    assert row["segmentation"] == {"size": [20, 20], "counts": mask.counts} and row["keypoints"] == [1, 2, 1]
    truth = [GroundTruth(42, 17, (1.5, 2, 10, 5))]
    assert coco_metrics(truth, [Category(17, "cat")], [42], [row]) == coco_metrics(
        truth, [Category(17, "cat")], [42], rows
    )


def test_a_crowd_is_a_crowd_by_any_number_but_zero() -> None:
    cat, found = [Category(1, "cat")], [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 4], "score": 0.5}]
    scores = [
        coco_metrics([GroundTruth(1, 1, (0, 0, 4, 4), 16.0, crowd)], cat, [1], found)
        for crowd in (1, True, 1 << 31, -1)
    ]
    assert scores[1:] == scores[:1] * 3
    assert coco_metrics([GroundTruth(1, 1, (0, 0, 4, 4), 16.0, 0)], cat, [1], found) != scores[0]

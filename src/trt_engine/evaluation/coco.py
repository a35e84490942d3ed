"""COCO's twelve figures of a detector, and which category each of its classes is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.errors import SetupError, UsageError
from trt_engine.files import write_whole
from trt_engine.vision.datasets import Category, Truth
from trt_engine.vision.decode import Detections

try:
    from faster_coco_eval import COCO, COCOeval_faster
except ImportError as error:
    raise SetupError(
        "COCO's figures are worked out with faster-coco-eval, which is not installed",
        hint="`pip install 'trt-engine[eval]'`",
    ) from error

__all__ = ["FIGURES", "Result", "category_ids", "figures", "results_of", "save_predictions"]

log = logging.getLogger(__name__)

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""COCO's names, in its order; -1 stands for a figure nothing in the dataset belongs to."""

Result = dict[str, Any]
"""One detection in COCO's result form: image_id, category_id, bbox (x, y, width, height), score."""


def category_ids(classes: Sequence[str], categories: Sequence[Category]) -> dict[int, int]:
    """The category of each class: by name where the model declares names, else the class's number itself.

    `UsageError` when no name is common to both, or when numbers cannot be meant.
    """
    if not classes:
        ids = sorted(item.id for item in categories)
        if ids != list(range(len(ids))):
            raise UsageError(
                f"the model declares no class names, and the dataset's category ids ({_some(ids)}) do not count from 0",
                hint="declare the names of the `classes`, in their order, so that they can be matched",
            )
        return {index: index for index in ids}
    by_name: dict[str, int] = {}
    for item in categories:
        name = _plain(item.name)
        if name in by_name:
            raise UsageError(f"the dataset has two categories named `{item.name}`", hint="names must be unique")
        by_name[name] = item.id
    found = {index: by_name[_plain(name)] for index, name in enumerate(classes) if _plain(name) in by_name}
    if not found:
        names = [item.name for item in categories]
        raise UsageError(
            f"no class of the model is a category of the dataset: the model knows {_some(classes)}, "
            f"the dataset {_some(names)}",
            hint="evaluate on the dataset the model was made for, or declare its `classes` by the dataset's names",
        )
    without = [item.name for item in categories if item.id not in found.values()]
    if without:
        log.warning("the model has no class for %d categories (%s): their AP is 0", len(without), _some(without))
    foreign = [name for index, name in enumerate(classes) if index not in found]
    if foreign:
        log.info("%d classes of the model are no category here (%s) and do not count", len(foreign), _some(foreign))
    return found


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


def _some(items: Sequence[Any]) -> str:
    shown = ", ".join(f"`{item}`" for item in items[:5])
    return f"{shown} and {len(items) - 5} more" if len(items) > 5 else shown


def results_of(found: Detections, image_id: int, categories: Mapping[int, int]) -> list[Result]:
    """The detections of one picture in COCO's result form; classes that are no category are left out."""
    rows = []
    for (x0, y0, x1, y1), score, label in zip(
        found.boxes_xyxy.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True
    ):
        if label in categories:
            box = [x0, y0, x1 - x0, y1 - y0]
            rows.append({"image_id": image_id, "category_id": categories[label], "bbox": box, "score": score})
    return rows


def figures(
    truth: Iterable[Truth], categories: Sequence[Category], image_ids: Sequence[int], results: Sequence[Result]
) -> dict[str, float]:
    """The twelve figures over these pictures; annotations of other pictures do not count."""
    wanted = set(image_ids)
    annotations = [
        {
            "id": number,
            "image_id": item.image_id,
            "category_id": item.category_id,
            "bbox": list(item.bbox),
            "area": item.bbox[2] * item.bbox[3] if item.area is None else item.area,
            "iscrowd": int(item.iscrowd),
        }
        for number, item in enumerate((item for item in truth if item.image_id in wanted), start=1)
    ]
    expected = COCO(
        {
            "images": [{"id": number} for number in image_ids],
            "annotations": annotations,
            "categories": [{"id": item.id, "name": item.name} for item in categories],
        }
    )
    found = expected.loadRes([dict(row) for row in results if row["image_id"] in wanted])
    evaluation = COCOeval_faster(expected, found, "bbox", print_function=log.debug)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return dict(zip(FIGURES, (float(value) for value in evaluation.stats), strict=True))


def save_predictions(results: Sequence[Result], path: Path) -> Path:
    """Write detections as COCO's tools read them."""
    return write_whole(path, msgspec.json.encode(results) + b"\n")

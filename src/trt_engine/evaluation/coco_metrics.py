"""COCO's twelve detection metrics, and the mapping of classes to categories."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trt_engine.atomic_io import write_atomic
from trt_engine.errors import SetupError, UsageError
from trt_engine.vision.datasets import Category, GroundTruth
from trt_engine.vision.decode import Detections

try:
    from faster_coco_eval import COCO, COCOeval_faster
except ImportError as error:
    raise SetupError(
        "COCO metrics need faster-coco-eval, which is not installed",
        hint="`pip install 'trt-engine[eval]'`",
    ) from error

log = logging.getLogger(__name__)

METRICS = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
"""COCO's metric names, in its order; -1 is a metric without objects in the dataset."""

Result = dict[str, Any]
"""One detection in COCO's results format: image_id, category_id, bbox (x, y, width, height), score, and of networks with
them segmentation and keypoints."""


def category_ids(classes: Sequence[str], categories: Sequence[Category]) -> dict[int, int]:
    """Category id of each class index: by name where the model declares names, else the index itself.

    Raises `UsageError` when no name matches, or when the ids do not count from 0.
    """
    if not classes:
        ids = sorted(item.id for item in categories)
        if ids != list(range(len(ids))):
            raise UsageError(
                f"the model declares no class names, and the dataset's category ids ({_truncate(ids)}) do not count from 0",
                hint="declare the names of the `classes`, in their order, so that they can be matched",
            )
        return {index: index for index in ids}
    by_name: dict[str, int] = {}
    for item in categories:
        name = _normalize_name(item.name)
        if name in by_name:
            raise UsageError(f"the dataset has two categories named `{item.name}`", hint="names must be unique")
        by_name[name] = item.id
    found = {
        index: by_name[_normalize_name(name)] for index, name in enumerate(classes) if _normalize_name(name) in by_name
    }
    if not found:
        names = [item.name for item in categories]
        raise UsageError(
            f"no class of the model matches a category of the dataset: the model has {_truncate(classes)}, "
            f"the dataset {_truncate(names)}",
            hint="evaluate on the dataset the model was made for, or declare its `classes` by the dataset's names",
        )
    without = [item.name for item in categories if item.id not in found.values()]
    if without:
        log.warning("the model has no class for %d %s (%s): their AP is 0",
            len(without), "category" if len(without) == 1 else "categories", _truncate(without),
        )  # fmt: skip
    foreign = [name for index, name in enumerate(classes) if index not in found]
    if foreign:
        log.info("%d classes of the model match no category (%s) and are ignored", len(foreign), _truncate(foreign))
    return found


def _normalize_name(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").split())


def _truncate(items: Sequence[Any]) -> str:
    shown = ", ".join(f"`{item}`" for item in items[:5])
    return f"{shown} and {len(items) - 5} more" if len(items) > 5 else shown


def coco_results(found: Detections, image_id: int, categories: Mapping[int, int]) -> list[Result]:
    """Detections of one image in COCO's results format, without unmatched classes; masks and keypoints where found."""
    rows = []
    for index, ((x0, y0, x1, y1), score, label) in enumerate(
        zip(found.boxes_xyxy.tolist(), found.scores.tolist(), found.classes.tolist(), strict=True)
    ):
        if label not in categories:
            continue
        box = [x0, y0, x1 - x0, y1 - y0]
        row: Result = {"image_id": image_id, "category_id": categories[label], "bbox": box, "score": score}
        if found.masks is not None:
            mask = found.masks[index]
            row["segmentation"] = {"size": list(mask.size), "counts": mask.counts}
        if found.keypoints is not None:
            scored = [[*point, 1.0][:3] for point in found.keypoints[index].tolist()]
            row["keypoints"] = [value for point in scored for value in point]
        rows.append(row)
    return rows


def coco_metrics(
    truth: Iterable[GroundTruth], categories: Sequence[Category], image_ids: Sequence[int], results: Sequence[Result]
) -> dict[str, float]:
    """The twelve metrics over these images alone."""
    wanted = set(image_ids)
    annotations = [
        {
            "id": number,
            "image_id": item.image_id,
            "category_id": item.category_id,
            "bbox": list(item.bbox),
            "area": item.bbox[2] * item.bbox[3] if item.area is None else item.area,
            "iscrowd": int(item.iscrowd != 0),
        }
        for number, item in enumerate((item for item in truth if item.image_id in wanted), start=1)
    ]
    described = {
        "images": [{"id": number} for number in image_ids],
        "categories": [{"id": item.id, "name": item.name} for item in categories],
    }
    boxes = ("image_id", "category_id", "bbox", "score")
    expected = COCO(described | {"annotations": annotations})
    rows = [{name: row[name] for name in boxes} for row in results if row["image_id"] in wanted]
    # `loadRes` of releases before 1.8 fails for a detector that finds nothing
    found = expected.loadRes(rows) if rows else COCO(described | {"annotations": []})
    evaluation = COCOeval_faster(expected, found, "bbox", print_function=log.debug)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return dict(zip(METRICS, (float(value) for value in evaluation.stats), strict=True))


def save_predictions(results: Sequence[Result], path: Path) -> Path:
    """Write a COCO results file."""
    return write_atomic(path, msgspec.json.encode(results) + b"\n")

"""Decode outputs to detections in image pixels (NMS, inverse resize, clipping) and to classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_engine.errors import ModelError
from trt_engine.tensors import format_shape
from trt_engine.vision.spec import Postprocess

Array = npt.NDArray[Any]
_MAX_CANDIDATES = 30_000
"""Candidates per image before NMS: a low threshold passes hundreds of thousands."""


class BoxTransform(Protocol):
    """Maps boxes from network input to image pixels, as `Placement` does."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    def to_image(self, boxes_xyxy: Array) -> Array: ...


@dataclass(frozen=True, slots=True)
class Detections:
    """Detections in one image, best score first; boxes [N, 4] are x1, y1, x2, y2 in image pixels."""

    boxes_xyxy: Array
    scores: Array
    classes: Array
    not_finite: int = 0
    """Rows dropped for NaN or Inf."""

    def __len__(self) -> int:
        return len(self.scores)

    def with_min_score(self, score: float) -> Detections:
        kept = self.scores >= score
        return Detections(self.boxes_xyxy[kept], self.scores[kept], self.classes[kept], self.not_finite)


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Score of one class."""

    index: int
    score: float


def decode_detections(output: Array, postprocess: Postprocess, placements: Sequence[BoxTransform]) -> list[Detections]:
    """Detections of each image of a batch, clipped to the image. Raises `ModelError` for a wrong output shape."""
    batch = np.asarray(output)
    batch = batch.astype(np.float64) if batch.dtype != np.float32 else batch
    if batch.ndim != 3 or len(batch) < len(placements):
        raise ModelError(
            f"the output is {format_shape(batch.shape)} for {len(placements)} images, `{postprocess.decode}` expects one "
            "rank-2 entry per image",
            hint="declare the right `output` or another `decode`",
        )
    take = _decode_yolov10 if postprocess.decode == "yolov10" else _decode_yolo
    found = []
    for rows, place in zip(batch, placements, strict=False):
        boxes, scores, classes, not_finite = take(rows, postprocess)
        boxes = np.clip(place.to_image(boxes), 0, np.array([place.width, place.height] * 2, np.float64))
        found.append(Detections(boxes, scores.astype(np.float64), classes, not_finite))
    return found


def _decode_yolov10(rows: Array, postprocess: Postprocess) -> tuple[Array, Array, Array, int]:
    """Decode [R, 6]: x1, y1, x2, y2, score, class; NMS is in the model."""
    if rows.shape[1] != 6:
        raise ModelError(
            f"each row of the output has {rows.shape[1]} values, `yolov10` expects 6: x1, y1, x2, y2, score, class",
            hint="declare `yolo` for an output of 4 + classes values",
        )
    scores = _scores(rows[:, 4], postprocess)
    with np.errstate(invalid="ignore"):
        wanted = ~(scores < postprocess.min_score)  # a NaN passes, and is counted below
    finite = np.isfinite(rows).all(axis=1)
    kept = np.flatnonzero(wanted & finite)
    order = kept[np.argsort(-scores[kept], kind="stable")][: postprocess.max_detections]
    return rows[order, :4], scores[order], rows[order, 5].astype(np.int64), int((wanted & ~finite).sum())


def _decode_yolo(values: Array, postprocess: Postprocess) -> tuple[Array, Array, Array, int]:
    """Decode [4 + C, anchors]: center, size, class scores; multi-label, with NMS."""
    count = len(values) - 4
    if count < 1 or (postprocess.classes and count != len(postprocess.classes)):
        wanted = f"4 + {len(postprocess.classes)}" if postprocess.classes else "4 + classes"
        raise ModelError(
            f"the output has {len(values)} values for each anchor, `yolo` expects {wanted}",
            hint="declare all `classes`, or another `decode`; outputs with an objectness score are not supported",
        )
    finite = np.isfinite(values).all(axis=0)
    scores_CA = _scores(values[4:], postprocess)
    classes, anchors = np.nonzero((scores_CA >= postprocess.min_score) & finite)
    scores = scores_CA[classes, anchors]
    if len(scores) > _MAX_CANDIDATES:
        best = np.sort(np.argpartition(-scores, _MAX_CANDIDATES)[:_MAX_CANDIDATES])
        classes, anchors, scores = classes[best], anchors[best], scores[best]
    middle, half = values[:2, anchors].T, values[2:4, anchors].T / 2
    boxes = np.concatenate([middle - half, middle + half], axis=1)
    kept = nms(boxes, scores, classes, postprocess.iou, postprocess.max_detections)
    return boxes[kept], scores[kept], classes[kept], int((~finite).sum())


def _scores(raw: Array, postprocess: Postprocess) -> Array:
    if postprocess.activation != "sigmoid":
        return raw
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-raw))


def nms(boxes_xyxy: Array, scores: Array, classes: Array, iou: float, limit: int) -> npt.NDArray[np.intp]:
    """Indices of the boxes that survive per-class NMS, best first; ties keep the input order."""
    order = np.argsort(-scores, kind="stable")
    boxes, labels = boxes_xyxy[order], classes[order]
    areas = (boxes[:, 2] - boxes[:, 0]).clip(0) * (boxes[:, 3] - boxes[:, 1]).clip(0)
    alive = np.ones(len(boxes), bool)
    kept: list[int] = []
    for index in range(len(boxes)):
        if not alive[index]:
            continue
        kept.append(index)
        if len(kept) == limit:
            break
        rest = index + 1 + np.flatnonzero(alive[index + 1 :] & (labels[index + 1 :] == labels[index]))
        low, high = np.maximum(boxes[index, :2], boxes[rest, :2]), np.minimum(boxes[index, 2:], boxes[rest, 2:])
        shared = (high - low).clip(0).prod(axis=1)
        # as a product: avoids division by zero for boxes without area
        alive[rest[shared > iou * (areas[index] + areas[rest] - shared)]] = False
    return order[np.array(kept, np.intp)]


# ------------------------------------------------------------------------------------------------ classes


def probabilities(output: Array, postprocess: Postprocess) -> Array:
    """Class scores [N, C] after the declared activation, in FP64."""
    scores = np.asarray(output).astype(np.float64)
    scores = scores.reshape(len(scores), -1) if scores.ndim > 2 and scores[0].size == scores.shape[1] else scores
    if scores.ndim != 2 or (postprocess.classes and scores.shape[1] != len(postprocess.classes)):
        expected = len(postprocess.classes) or "classes"
        raise ModelError(
            f"the output is {format_shape(scores.shape)}, `classify` expects batch x {expected}",
            hint="declare the right `output` and all `classes`",
        )
    if postprocess.activation == "sigmoid":
        return _scores(scores, postprocess)
    if postprocess.activation == "softmax":
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))
    return scores


def top_classes(scores: Array, count: int) -> list[ClassScore]:
    """The `count` best classes of scores [C]; ties by index, NaN last."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")[:count]
    return [ClassScore(int(index), float(scores[index])) for index in order]

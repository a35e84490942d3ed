"""Outputs to detections in pixels of the picture, and to classes: decoding, suppression, the way back, clipping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from trt_engine.errors import ModelError
from trt_engine.tensors import format_shape
from trt_engine.vision.declaration import Postprocess

__all__ = ["Detections", "Ranked", "decode_detections", "nms", "probabilities", "top_classes"]

Array = npt.NDArray[Any]
_MOST_CANDIDATES = 30_000
"""Of one picture before suppression, the best ones: a low threshold lets hundreds of thousands through."""


class Back(Protocol):
    """What knows the way from the network's input to the picture: `Placement` is one."""

    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    def back(self, boxes_xyxy: Array) -> Array: ...


@dataclass(frozen=True, slots=True)
class Detections:
    """What was found in one picture, best score first: x1, y1, x2, y2 in its pixels."""

    boxes_xyxy: Array
    scores: Array
    classes: Array
    not_finite: int = 0
    """Rows that held NaN or infinities and were dropped."""

    def __len__(self) -> int:
        return len(self.scores)

    def above(self, score: float) -> Detections:
        kept = self.scores >= score
        return Detections(self.boxes_xyxy[kept], self.scores[kept], self.classes[kept], self.not_finite)


@dataclass(frozen=True, slots=True)
class Ranked:
    """One class of one picture."""

    index: int
    score: float


def decode_detections(output: Array, declared: Postprocess, places: Sequence[Back]) -> list[Detections]:
    """The detections of each picture of a batch, clipped to the picture."""
    batch = np.asarray(output)
    batch = batch.astype(np.float64) if batch.dtype != np.float32 else batch
    if batch.ndim != 3 or len(batch) < len(places):
        raise ModelError(
            f"the output is {format_shape(batch.shape)} for {len(places)} pictures, `{declared.decode}` expects one entry "
            "of rank 2 for each",
            hint="declare the right `output` or another `decode`",
        )
    take = _end_to_end if declared.decode == "yolov10" else _classic
    return [_in_picture(*take(rows, declared), place) for rows, place in zip(batch, places, strict=False)]


def _end_to_end(rows: Array, declared: Postprocess) -> tuple[Array, Array, Array, int]:
    """[R, 6]: x1, y1, x2, y2, score, class; nothing overlaps any more."""
    if rows.shape[1] != 6:
        raise ModelError(
            f"each row of the output has {rows.shape[1]} values, `yolov10` expects 6: x1, y1, x2, y2, score, class",
            hint="declare `yolo` for an output of 4 + classes values",
        )
    scores = _scores(rows[:, 4], declared)
    with np.errstate(invalid="ignore"):
        wanted = ~(scores < declared.min_score)  # a NaN passes, and is counted below
    finite = np.isfinite(rows).all(axis=1)
    kept = np.flatnonzero(wanted & finite)
    order = kept[np.argsort(-scores[kept], kind="stable")][: declared.max_detections]
    return rows[order, :4], scores[order], rows[order, 5].astype(np.int64), int((wanted & ~finite).sum())


def _classic(values: Array, declared: Postprocess) -> tuple[Array, Array, Array, int]:
    """[4 + C, anchors]: centre and size, then a score for each class; each box counts for every class it scores in."""
    count = len(values) - 4
    if count < 1 or (declared.classes and count != len(declared.classes)):
        wanted = f"4 + {len(declared.classes)}" if declared.classes else "4 + classes"
        raise ModelError(
            f"the output has {len(values)} values for each anchor, `yolo` expects {wanted}",
            hint="declare all `classes`, or another `decode`; an output with an objectness score is not known",
        )
    finite = np.isfinite(values).all(axis=0)
    scores_CA = _scores(values[4:], declared)
    classes, anchors = np.nonzero((scores_CA >= declared.min_score) & finite)
    scores = scores_CA[classes, anchors]
    if len(scores) > _MOST_CANDIDATES:
        best = np.sort(np.argpartition(-scores, _MOST_CANDIDATES)[:_MOST_CANDIDATES])
        classes, anchors, scores = classes[best], anchors[best], scores[best]
    middle, half = values[:2, anchors].T, values[2:4, anchors].T / 2
    boxes = np.concatenate([middle - half, middle + half], axis=1)
    kept = nms(boxes, scores, classes, declared.iou, declared.max_detections)
    return boxes[kept], scores[kept], classes[kept], int((~finite).sum())


def _scores(raw: Array, declared: Postprocess) -> Array:
    if declared.activation != "sigmoid":
        return raw
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-raw))


def nms(boxes_xyxy: Array, scores: Array, classes: Array, iou: float, limit: int) -> npt.NDArray[np.intp]:
    """Which boxes stay, best first: each suppresses those of its class that overlap it by more than `iou`.

    Of equal scores the first in the list wins.
    """
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
        # as a product: two boxes without area do not divide by zero
        alive[rest[shared > iou * (areas[index] + areas[rest] - shared)]] = False
    return order[np.array(kept, np.intp)]


def _in_picture(boxes: Array, scores: Array, classes: Array, not_finite: int, place: Back) -> Detections:
    limit = np.array([place.width, place.height] * 2, np.float64)
    return Detections(np.clip(place.back(boxes), 0, limit), scores.astype(np.float64), classes, not_finite)


# ------------------------------------------------------------------------------------------------ classes


def probabilities(output: Array, declared: Postprocess) -> Array:
    """[N, C] class scores with the declared activation, in double precision."""
    scores = np.asarray(output).astype(np.float64)
    scores = scores.reshape(len(scores), -1) if scores.ndim > 2 and scores[0].size == scores.shape[1] else scores
    if scores.ndim != 2 or (declared.classes and scores.shape[1] != len(declared.classes)):
        raise ModelError(
            f"the output is {format_shape(scores.shape)}, `classify` expects batch x {len(declared.classes) or 'classes'}",
            hint="declare the right `output` and all `classes`",
        )
    if declared.activation == "sigmoid":
        return _scores(scores, declared)
    if declared.activation == "softmax":
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))
    return scores


def top_classes(scores: Array, count: int) -> list[Ranked]:
    """The best classes of one picture; of equal scores the lower index first, NaN last."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")[:count]
    return [Ranked(int(index), float(scores[index])) for index in order]

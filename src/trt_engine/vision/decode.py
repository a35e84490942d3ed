"""Decode outputs to detections in image pixels (NMS, inverse resize, clipping) and to classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trt_engine.arrayfiles import Array
from trt_engine.errors import ModelError, UsageError
from trt_engine.records.infer import Mask
from trt_engine.tensors import TensorSpec, format_shape
from trt_engine.vision.masks import assemble_masks
from trt_engine.vision.spec import Postprocess, Vision

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
    keypoints: Array | None = None
    """[N, K, 2 or 3]: x, y in image pixels, and a score where the network gives one; None of a network without."""
    masks: tuple[Mask, ...] | None = None
    """One for each detection; None of a network without."""

    def __len__(self) -> int:
        return len(self.scores)


@dataclass(frozen=True, slots=True)
class ClassScore:
    """Score of one class."""

    index: int
    score: float


@dataclass(frozen=True, slots=True)
class _Found:
    """Detections of one image in pixels of the input; `extra` [N, E] are the values after the classes."""

    boxes: Array
    scores: Array
    classes: Array
    not_finite: int = 0
    extra: Array | None = None


def decode_outputs(
    outputs: Mapping[str, Array], vision: Vision, placements: Sequence[BoxTransform], *,
    min_score: float = 0.0, multi_label: bool = True,
) -> list[Detections]:  # fmt: skip
    """Detections of each image of a batch from the engine's outputs, clipped to the image.

    `min_score` replaces a lower declared one. An anchor gives one detection for each class above it, or without
    `multi_label` one of its best class: the first is how COCO metrics are computed, the second what YOLO's own programs
    draw. Raises `ModelError` for outputs of other shapes than declared.
    """
    declared = replace(vision.postprocess, min_score=max(min_score, vision.postprocess.min_score))
    arrays = {name: np.asarray(value) for name, value in outputs.items()}
    specs = [TensorSpec(name, value.dtype.name, value.shape) for name, value in arrays.items()]
    try:
        found = {role: _as_float(arrays[spec.name]) for role, spec in declared.roles(specs).items()}
    except UsageError as error:
        raise ModelError(error.message, hint=error.hint) from error
    size = (vision.preprocess.size[1], vision.preprocess.size[0])
    images = []
    for index, place in enumerate(placements):
        one = _decode_image(found, index, declared, size, len(placements), multi_label)
        images.append(_place(one, declared, place, size, found["protos"][index] if "protos" in found else None))
    return images


def _as_float(array: Array) -> Array:
    return array if array.dtype == np.float32 or array.dtype.kind in "iu" else array.astype(np.float64)


def _decode_image(
    found: Mapping[str, Array], index: int, declared: Postprocess, size: tuple[int, int], images: int, multi_label: bool
) -> _Found:  # fmt: skip
    """Decode one image of the batch: rows of its detections, best first, boxes as corners in pixels of the input."""
    if declared.decode == "detr":
        one = _decode_detr(_entry(found, index, images, declared), declared)
    elif declared.decode == "nms":
        one = _decode_suppressed(found, index, images, declared)
    else:
        rows = _entry(found, index, images, declared)["rows"]
        coefficients = found["protos"].shape[1] if "protos" in found else 0
        if declared.decode == "yolov10":
            one = _decode_yolov10(rows, declared, coefficients)
        else:
            one = _decode_anchors(rows, declared, coefficients, multi_label)
    usual = ("cxcywh", True) if declared.decode == "detr" else ("xyxy", False)
    if declared.decode in ("yolo", "yolov5"):
        usual = ("cxcywh", False)
    boxes = _corners(one.boxes, declared.box_format or usual[0])
    if declared.normalized if declared.normalized is not None else usual[1]:
        boxes = boxes * np.array(size * 2, np.float64)
    if declared.suppressed:
        order = nms(boxes, one.scores, one.classes, declared.iou, declared.max_detections)
    else:
        order = np.argsort(-one.scores, kind="stable")[: declared.max_detections]
    extra = None if one.extra is None else one.extra[order]
    return replace(one, boxes=boxes[order], scores=one.scores[order], classes=one.classes[order], extra=extra)


def _place(
    one: _Found, declared: Postprocess, place: BoxTransform, size: tuple[int, int], protos: Array | None
) -> Detections:
    """Map to pixels of the image, and clip boxes to it."""
    limits = np.array([place.width, place.height] * 2, np.float64)
    boxes = np.clip(place.to_image(one.boxes), 0, limits)
    points = masks = None
    if one.extra is not None and declared.keypoints is not None:
        raw = one.extra[:, -int(np.prod(declared.keypoints)) :]
        points = np.array(raw.reshape(len(raw), *declared.keypoints), np.float64)
        points[..., :2] = np.clip(place.to_image(np.tile(points[..., :2], 2))[..., :2], 0, limits[:2])
    if one.extra is not None and protos is not None:
        corners = place.to_image(np.array([0.0, 0.0, *size]))
        masks = assemble_masks(one.extra[:, : len(protos)], protos, boxes, (place.width, place.height), corners)
    return Detections(boxes, one.scores.astype(np.float64), one.classes, one.not_finite, points, masks)


def _entry(found: Mapping[str, Array], index: int, images: int, declared: Postprocess) -> dict[str, Array]:
    """One image's part of each output."""
    for array in found.values():
        if array.ndim < 3 or len(array) < images:
            raise ModelError(
                f"the output is {format_shape(array.shape)} for {images} images, `{declared.decode}` expects one "
                "rank-2 entry per image",
                hint="declare the right `output` or another `decode`",
            )
    return {role: array[index] for role, array in found.items()}


def _corners(boxes: Array, order: str) -> Array:
    if order == "cxcywh":
        half = boxes[:, 2:4] / 2
        return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)
    return boxes[:, [1, 0, 3, 2]] if order == "yxyx" else boxes[:, :4]


def _decode_yolov10(rows: Array, declared: Postprocess, coefficients: int) -> _Found:
    """Decode [R, 6 + E]: x1, y1, x2, y2, score, class; NMS is in the model."""
    expected = 6 + coefficients + int(np.prod(declared.keypoints or (0,)))
    if rows.shape[1] != expected:
        raise ModelError(
            f"each row of the output has {rows.shape[1]} values, `yolov10` expects {expected}: x1, y1, x2, y2, score, class"
            + (", and those of masks and keypoints" if expected > 6 else ""),
            hint="declare `yolo` for an output of 4 + classes values",
        )
    scores = _scores(rows[:, 4], declared)
    with np.errstate(invalid="ignore"):
        wanted = ~(scores < declared.min_score)  # a NaN passes, and is counted below
    finite = np.isfinite(rows).all(axis=1)
    kept = np.flatnonzero(wanted & finite)
    lost = int((wanted & ~finite).sum())
    return _Found(rows[kept, :4], scores[kept], rows[kept, 5].astype(np.int64), lost, rows[kept, 6:])


def _decode_anchors(values: Array, declared: Postprocess, coefficients: int, multi_label: bool) -> _Found:
    """Decode [4 + C + E, anchors], in either order of dimensions, or with an objectness score."""
    extra = coefficients + int(np.prod(declared.keypoints or (0,)))
    first = 4 + (declared.decode == "yolov5")
    expected = first + len(declared.classes) + extra if declared.classes else None
    fits = [side == expected for side in values.shape] if expected is not None else [False, False]
    anchors_first = declared.decode == "yolov5" or values.shape[0] > values.shape[1] > 4
    if fits == [False, True] or (fits != [True, False] and anchors_first):
        values = values.T
    count = len(values) - first - extra
    if count < 1 or (expected is not None and len(values) != expected):
        wanted = f"{first} + {expected - first}" if expected is not None else f"{first} + classes"
        raise ModelError(
            f"the output has {len(values)} values for each anchor, `{declared.decode}` expects {wanted}",
            hint="declare all `classes`, or another `decode`: `yolov5` for outputs with an objectness score",
        )
    finite = np.isfinite(values).all(axis=0)
    scores_CA = _scores(values[first : first + count], declared)
    if first == 5:
        scores_CA = scores_CA * _scores(values[4], declared)
    if multi_label:
        classes, anchors = np.nonzero((scores_CA >= declared.min_score) & finite)
    else:
        best = scores_CA.argmax(axis=0)
        anchors = np.flatnonzero((scores_CA.max(axis=0) >= declared.min_score) & finite)
        classes = best[anchors]
    scores = scores_CA[classes, anchors]
    if len(scores) > _MAX_CANDIDATES:
        best = np.sort(np.argpartition(-scores, _MAX_CANDIDATES)[:_MAX_CANDIDATES])
        classes, anchors, scores = classes[best], anchors[best], scores[best]
    boxes = values[:4, anchors].T
    return _Found(boxes, scores, classes, int((~finite).sum()), values[first + count :, anchors].T)


def _decode_detr(one: Mapping[str, Array], declared: Postprocess) -> _Found:
    """Decode boxes [Q, 4] and class scores [Q, C].

    `softmax`: the best class of each query, without the last column (no object). Otherwise the best of all scores, as many
    as there are queries; of one output [Q, 4 + C] the best class of each query. That is what Hugging Face's
    post-processing of DETR and of RT-DETR does, and Ultralytics' for its own RT-DETR.
    """
    joint = "rows" in one
    boxes, raw = (one["rows"][:, :4], one["rows"][:, 4:]) if joint else (one["boxes"], one["scores"])
    if boxes.shape[1] != 4 or len(boxes) != len(raw) or raw.shape[1] < 1:
        raise ModelError(
            f"the outputs are {format_shape(boxes.shape)} boxes and {format_shape(raw.shape)} scores, `detr` expects "
            "queries x 4 and queries x classes",
            hint='declare `"outputs": {"boxes": NAME, "scores": NAME}`',
        )
    finite = np.isfinite(np.concatenate([boxes, raw], axis=1)).all(axis=1)
    raw = np.where(finite[:, None], raw, -np.inf if declared.activation == "sigmoid" else 0.0)
    if declared.activation == "softmax":
        scores = _softmax(raw)[:, :-1]
    else:
        scores = _scores(raw, declared)
        if declared.activation == "none" and scores.size and not (scores.min() >= 0 and scores.max() <= 1):
            raise ModelError(
                f"the scores are {scores.min():.3g} to {scores.max():.3g}, probabilities are 0 to 1",
                hint='declare `"activation": "sigmoid"` (RT-DETR), or `softmax` where the last class is no object (DETR)',
            )
    if joint or declared.activation == "softmax" or declared.suppress:
        if declared.suppress:
            queries, classes = np.nonzero(scores >= declared.min_score)
        else:
            queries, classes = np.arange(len(scores)), scores.argmax(axis=1)
    else:
        best = np.argsort(-scores, axis=None, kind="stable")[: len(scores)]
        queries, classes = np.divmod(best, scores.shape[1])
    values = scores[queries, classes]
    kept = (values >= declared.min_score) & finite[queries]
    return _Found(boxes[queries[kept]], values[kept], classes[kept].astype(np.int64), int((~finite).sum()))


def _decode_suppressed(found: Mapping[str, Array], index: int, images: int, declared: Postprocess) -> _Found:
    """Decode the results of a suppression inside the graph, in any of the forms that `Postprocess` lists."""
    if "rows" in found:
        rows = found["rows"]
        if rows.ndim != 2 or rows.shape[1] != 7:
            raise ModelError(
                f"the output is {format_shape(rows.shape)}, `nms` expects rows of image, x1, y1, x2, y2, class, score",
                hint="declare the `outputs`, or another `decode`",
            )
        rows = rows[rows[:, 0] == index]
        boxes, scores, classes = rows[:, 1:5], rows[:, 6], rows[:, 5]
    elif "indices" in found:
        chosen = found["indices"].astype(np.int64)
        chosen = chosen[chosen[:, 0] == index]
        boxes = found["boxes"][index][chosen[:, 2]]
        scores, classes = found["scores"][index][chosen[:, 1], chosen[:, 2]], chosen[:, 1]
    else:
        boxes, scores, classes = _counted(found, index, images)
    finite = np.isfinite(np.concatenate([boxes, scores[:, None]], axis=1)).all(axis=1)
    values = _scores(np.where(finite, scores, 0.0), declared)
    kept = finite & (values >= declared.min_score)
    return _Found(
        boxes[kept, :4], values[kept], classes[kept].astype(np.int64) - declared.first_class, int((~finite).sum())
    )


def _counted(found: Mapping[str, Array], index: int, images: int) -> tuple[Array, Array, Array]:
    """Boxes, scores and classes of one image, up to its count; without a batch for a network of one image."""
    if missing := {"boxes", "classes"} - found.keys():
        raise ModelError(
            f"`nms` found no output with the {missing.pop()}", hint='declare `"outputs": {"boxes": NAME, ...}`'
        )
    boxes, classes, given = found["boxes"], found["classes"], found.get("scores")
    if boxes.ndim == 2 and images != 1:
        raise ModelError(f"boxes without a batch dimension for {images} images", hint="one image at a time")
    if boxes.ndim == 3:
        if len(boxes) < images:
            raise ModelError(f"boxes are {format_shape(boxes.shape)} for {images} images", hint="another `decode`")
        boxes, classes, given = boxes[index], classes[index], None if given is None else given[index]
    count = len(boxes) if "count" not in found else int(found["count"].reshape(-1)[index])
    if given is None and boxes.shape[1] != 5:
        raise ModelError("`nms` found no output with the scores", hint='declare `"outputs": {"scores": NAME, ...}`')
    scores = boxes[:count, 4] if given is None else given.reshape(-1)[:count]
    boxes, classes = boxes[:count], classes.reshape(-1)[:count]
    real = classes >= 0  # -1 fills the rows of TensorRT's and other plugins
    return boxes[real, :4], scores[real], classes[real]


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
    return _softmax(scores) if postprocess.activation == "softmax" else scores


def _softmax(scores: Array) -> Array:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


def top_classes(scores: Array, count: int) -> list[ClassScore]:
    """The `count` best classes of scores [C]; ties by index, NaN last."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")[:count]
    return [ClassScore(int(index), float(scores[index])) for index in order]

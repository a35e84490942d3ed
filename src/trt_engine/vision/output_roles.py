"""Which output of a network is what (boxes, scores, classes, prototypes of masks), and how unnamed outputs are decoded.

What a model declares comes first, then the names that exporters use, then shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trt_engine.errors import UsageError
from trt_engine.tensors import Shape, TensorSpec, suggest

ROLES: dict[str, tuple[str, ...]] = {
    "boxes": ("pred_boxes", "boxes", "dets", "det_boxes", "detection_boxes", "nmsed_boxes", "bboxes"),
    "scores": ("logits", "pred_logits", "scores", "det_scores", "detection_scores", "nmsed_scores", "confs"),
    "classes": ("classes", "det_classes", "detection_classes", "nmsed_classes", "class_ids", "labels"),
    "count": ("num", "num_dets", "num_detections", "count"),
    "indices": ("selected_indices", "indices", "selected"),
    "protos": ("protos", "proto", "output1"),
    "rows": ("output0", "output", "detections"),
}
"""Roles, and the names that exporters of Hugging Face, RF-DETR, TensorRT's NMS plugins, TensorFlow and Ultralytics give."""
_LOGITS = ("logits", "pred_logits")
_MOST_FINAL_ROWS = 1000
"""More rows than this are anchors, not final detections."""
_COCO_IDS = 91
"""Classes of a DETR trained on COCO, by category id; one more column is its no-object class."""


def output_roles(decode: str, declared: Mapping[str, str], outputs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """The outputs by role. `UsageError` where a declared one does not exist, or what is needed cannot be distinguished."""
    by_name = {spec.name: spec for spec in outputs}
    for name in declared.values():
        if name not in by_name:
            raise UsageError(f"the declared output `{name}` does not exist", hint=suggest(name, list(by_name)))
    found = {role: by_name[name] for role, name in declared.items()}
    if decode in ("detr", "nms") and "rows" not in found:
        rest = [spec for spec in outputs if spec not in found.values()]
        found |= _by_name(rest, found, decode) if len(outputs) > 1 else {"rows": outputs[0]}
        return found if len(outputs) == 1 or decode == "nms" else _pair(found, outputs)
    if "rows" not in found:
        rest = [spec for spec in outputs if spec not in found.values() and len(spec.shape) != 4]
        named = [spec for spec in rest if spec.name in ROLES["rows"]]
        if len(rest) != 1 and len(named) != 1:
            listed = ", ".join(f"`{spec.name}`" for spec in outputs)
            raise UsageError(f"the model has {len(outputs)} outputs: {listed}", hint="declare the `output`")
        found["rows"] = (rest if len(rest) == 1 else named)[0]
    return found


def prototypes(found: Mapping[str, TensorSpec], outputs: Sequence[TensorSpec]) -> TensorSpec:
    """The prototypes of masks [N, M, h, w]: the declared ones, else the only output of four dimensions."""
    if "protos" in found:
        return found["protos"]
    chosen = [spec for spec in outputs if len(spec.shape) == 4]
    if len(chosen) != 1:
        raise UsageError(
            f"{len(chosen)} of the model's outputs have four dimensions, `masks` needs the one of the prototypes",
            hint='declare it: `"outputs": {"protos": NAME}`',
        )
    return chosen[0]


def _by_name(rest: Sequence[TensorSpec], found: Mapping[str, Any], decode: str) -> dict[str, TensorSpec]:
    """Roles by the names exporters give; class scores named `labels` have three dimensions."""
    roles: dict[str, TensorSpec] = {}
    for spec in rest:
        name = spec.name.rsplit("/", 1)[-1].partition(":")[0].lower()
        for role in ("boxes", "scores", "classes", "count", "indices"):
            if name in ROLES[role] and role not in found:
                scores = role == "classes" and decode == "detr" and len(spec.shape) == 3
                roles.setdefault("scores" if scores else role, spec)
    if decode == "nms" and "boxes" not in {**found, **roles}:
        boxes = [spec for spec in rest if len(spec.shape) >= 2 and spec.shape[-1] in (4, 5)]
        roles |= {"boxes": boxes[0]} if len(boxes) == 1 else {}
    return roles


def _pair(found: dict[str, TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, TensorSpec]:
    """Boxes [N, Q, 4] and scores [N, Q, C], by shape where the names do not tell."""
    rank3 = [spec for spec in outputs if len(spec.shape) == 3 and spec not in found.values()]
    for role in ("boxes", "scores"):
        if role not in found:
            fits = [spec for spec in rank3 if role == "scores" or spec.shape[2] in (4, -1)]
            other = found.get("boxes")
            if role == "scores" and other is not None and len(fits) > 1:
                fits = [spec for spec in fits if spec.shape[1] == other.shape[1] and "hidden" not in spec.name]
            if len(fits) != 1:
                listed = ", ".join(f"`{spec.name}` {spec.format_symbolic()}" for spec in outputs)
                raise UsageError(
                    f"`detr` cannot tell which output is the {role}: {listed}",
                    hint='declare `"outputs": {"boxes": NAME, "scores": NAME}`',
                )
            found[role] = fits[0]
            rank3.remove(fits[0])
    return found


# ------------------------------------------------------------------------------------------------ unnamed outputs


def recognise(
    outputs: Sequence[TensorSpec], *, classes: int = 0, extra: int = 0, objectness: bool | None = None,
) -> tuple[dict[str, Any], str]:  # fmt: skip
    """Settings of `Postprocess` from the outputs, and what was assumed.

    `classes` is the number of classes and `extra` that of values after them (coefficients of masks, keypoints), 0 where
    unknown; `objectness` states whether anchors have such a score. Raises `UsageError` where nothing fits.
    """
    named = _by_name(outputs, {}, "detr")
    logits = named.get("scores")
    if logits is not None and len(logits.shape) == 3 and "boxes" in named and len(named["boxes"].shape) == 3:
        return _recognise_pair(named["boxes"], logits, classes)
    named = _by_name(outputs, {}, "nms")
    if {"boxes", "scores", "indices"} <= named.keys():
        return {"decode": "nms"}, "boxes selected by NonMaxSuppression, as corners in pixels of the input"
    if "boxes" in named and ("classes" in named):
        unit = "pixels of the input"
        if named["boxes"].name.rpartition("/")[2].startswith("detection_boxes") and "count" not in named:
            unit = "pixels of the input (TensorFlow's own order is y1, x1, y2, x2, as shares)"
        return {"decode": "nms"}, f"boxes after suppression, as corners in {unit}"
    rows = [spec for spec in outputs if len(spec.shape) in (2, 3)]
    if not rows:
        listed = ", ".join(f"`{spec.name}` {spec.format_symbolic()}" for spec in outputs)
        raise UsageError(f"the meaning of the outputs is not known: {listed}", hint="declare a `decode`")
    spec = rows[0]
    made: dict[str, Any] = {"output": spec.name}
    if len(spec.shape) == 2:
        if spec.shape[1] == 7 and classes != 7:
            return made | {"decode": "nms"}, "rows of image, corners, class, score"
        return made | {"decode": "classify"}, "class scores"
    decode, assumed = _recognise_rows(spec.shape, classes, extra, objectness)
    if decode == "detr":
        made |= {"box_format": "cxcywh", "normalized": True}
    elif decode == "yolov10" and spec.shape[1] > _MOST_FINAL_ROWS:
        made |= {"suppress": True}
        assumed += ", not suppressed yet"
    return made | {"decode": decode}, assumed


def _recognise_pair(boxes: TensorSpec, scores: TensorSpec, classes: int) -> tuple[dict[str, Any], str]:
    named = {"outputs": {"boxes": boxes.name, "scores": scores.name}}
    columns = scores.shape[2]
    if boxes.shape[1] > _MOST_FINAL_ROWS and scores.name not in _LOGITS:
        settings = {"decode": "detr", "box_format": "xyxy", "normalized": False, "suppress": True}
        return named | settings, "boxes of anchors as corners in pixels, class probabilities, not suppressed yet"
    softmax = columns == (classes or _COCO_IDS) + 1
    kind = "softmax with a no-object class" if softmax else "sigmoid of each class"
    return named | {"decode": "detr", "activation": "softmax" if softmax else "sigmoid"}, f"centre boxes, {kind}"


def _recognise_rows(shape: Shape, classes: int, extra: int, objectness: bool | None) -> tuple[str, str]:
    """Decode of [N, a, b], and its description."""
    _, first, last = shape
    final = last == 6 + extra and first <= _MOST_FINAL_ROWS
    anchors = "class scores without an objectness score"
    if final and objectness is not True:
        return "yolov10", "rows of corners, score and class"
    if classes and objectness is not True and first == 4 + classes + extra:
        return "yolo", anchors
    if classes and objectness is not False and 5 + classes + extra in (first, last):
        return "yolov5", "class scores after an objectness score"
    if classes and last == 4 + classes + extra:
        if 0 < first <= _MOST_FINAL_ROWS:
            return "detr", "centre boxes as shares of the input, class probabilities"
        return "yolo", anchors
    if last == 6 + extra:
        return "yolov10", "rows of corners, score and class"
    if 0 < last < first and not classes:
        return "yolov5", "class scores after an objectness score"
    return "yolo", anchors

"""Answers of Ultralytics and Hugging Face on seeded outputs: `python make_answers.py` writes `answers.json`.

Needs ultralytics (8.4.190 was used) and transformers (5.24.0). The tests need the functions of the first half, numpy alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray
SIDE, IMAGE = 64, (80, 60)
"""The network's input, and width and height of the image that is letterboxed or stretched into it."""
CLASSES, MIN_SCORE, IOU, KEYPOINTS = 5, 0.5, 0.6, (3, 3)
ANSWERS = Path(__file__).with_name("answers.json")


def anchors(seed: int, extra: int = 0, objectness: bool = False) -> Array:
    """[1, 4 + C + E, 60]: boxes that overlap, few high scores; with an objectness score [1, 60, 5 + C + E]."""
    draw = np.random.default_rng(seed)
    centres, sides = draw.uniform(4, 60, (2, 12)), draw.uniform(8, 30, (2, 12))
    which = draw.integers(0, 12, 60)
    boxes = np.concatenate([centres[:, which], sides[:, which]]) + draw.normal(0, 1.5, (4, 60))
    scores = draw.beta(0.3, 2.5, (CLASSES, 60))
    parts = [boxes, *([draw.beta(3, 1, (1, 60))] if objectness else []), scores]
    if extra:
        parts.append(draw.normal(0, 1, (extra, 60)))
    values = np.concatenate(parts)[None].astype(np.float32)
    return values.transpose(0, 2, 1) if objectness else values


def with_keypoints(values: Array) -> Array:
    """The last nine values of each anchor as keypoints near its centre."""
    made = values.copy()
    made[:, -9:] = made[:, -9:] * 4 + np.tile(np.concatenate([made[:, :2], made[:, :1] * 0], axis=1), (1, 3, 1))
    made[:, -7::3] = 1 / (1 + np.exp(-made[:, -7::3]))
    return made


def prototypes(seed: int) -> Array:
    """[1, 4, 16, 16] smooth enough that a mask has an edge to interpolate."""
    waves = np.random.default_rng(seed).normal(0, 1, (1, 4, 5, 5))
    return waves.repeat(4, axis=2).repeat(4, axis=3)[:, :, :16, :16].astype(np.float32)


def queries(seed: int, classes: int) -> tuple[Array, Array]:
    """Logits [1, 20, classes] and boxes [1, 20, 4]: centre and size as shares."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(-1, 2, (1, 20, classes)).astype(np.float32)
    boxes = np.concatenate([draw.uniform(0.1, 0.9, (1, 20, 2)), draw.uniform(0.05, 0.5, (1, 20, 2))], axis=2)
    return logits, boxes.astype(np.float32)


# ------------------------------------------------------------------------------------------------ the libraries


def main() -> None:
    answers: dict[str, Any] = {}
    plain, segment = anchors(1), anchors(2, extra=4)
    pose = with_keypoints(anchors(3, extra=9))
    answers["multi_label"] = suppressed(plain, multi_label=True)
    answers["best_class"] = suppressed(plain, multi_label=False)
    answers["segment"] = suppressed(segment, multi_label=False, protos=prototypes(2))
    answers["pose"] = suppressed(pose, multi_label=False, keypoints=True)
    objectness = anchors(4, objectness=True).transpose(0, 2, 1)  # as YOLOv5: the product of both scores
    product = np.concatenate([objectness[:, :4], objectness[:, 5:] * objectness[:, 4:5]], axis=1)
    answers["objectness"] = suppressed(product, multi_label=True)
    answers["softmax"] = hugging_face(queries(5, CLASSES + 1), "DetrImageProcessor")
    answers["sigmoid"] = hugging_face(queries(6, CLASSES), "RTDetrImageProcessor")
    ANSWERS.write_text(json.dumps(answers, separators=(",", ":")) + "\n")


def rounded(array: Any) -> Any:
    return np.asarray(array, np.float64).round(3).tolist()


def suppressed(values: Array, *, multi_label: bool, protos: Array | None = None, keypoints: bool = False) -> Any:
    import torch
    from ultralytics.utils import ops
    from ultralytics.utils.nms import non_max_suppression

    width, height = IMAGE
    (rows,) = non_max_suppression(torch.tensor(values), MIN_SCORE, IOU, multi_label=multi_label, nc=CLASSES)
    rows[:, :4] = ops.scale_boxes((SIDE, SIDE), rows[:, :4], (height, width))
    found: dict[str, Any] = {
        "boxes": rounded(rows[:, :4]),
        "scores": rounded(rows[:, 4]),
        "classes": rounded(rows[:, 5]),
    }
    if protos is not None:
        masks = ops.process_mask_native(torch.tensor(protos[0]), rows[:, 6:], rows[:, :4], (height, width))
        found["masks"] = [
            "".join(f"{byte:02x}" for byte in np.packbits(mask)) for mask in masks[:6].numpy().astype(bool)
        ]
    if keypoints:
        points = rows[:, 6:].view(len(rows), *KEYPOINTS)
        found["keypoints"] = rounded(ops.scale_coords((SIDE, SIDE), points, (height, width)))
    return found


def hugging_face(outputs: tuple[Array, Array], processor: str) -> Any:
    import torch
    import transformers
    from transformers.models.detr.modeling_detr import DetrObjectDetectionOutput

    logits, boxes = map(torch.tensor, outputs)
    made = DetrObjectDetectionOutput(logits=logits, pred_boxes=boxes)
    process = getattr(transformers, processor)().post_process_object_detection
    (found,) = process(made, threshold=MIN_SCORE, target_sizes=[IMAGE[::-1]])
    order = torch.argsort(-found["scores"], stable=True)
    limits = torch.tensor([*IMAGE, *IMAGE])
    kept = found["boxes"][order].clip(torch.zeros(4), limits)
    return {
        "boxes": rounded(kept), "scores": rounded(found["scores"][order]), "classes": rounded(found["labels"][order])
    }  # fmt: skip


if __name__ == "__main__":
    main()

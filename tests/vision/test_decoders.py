"""Outputs of detectors decoded as the libraries that export them do; their answers are recorded by `make_answers.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trt_engine.errors import ModelError, UsageError
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.vision.decode import Detections, decode_outputs
from trt_engine.vision.masks import decode_mask, encode_mask
from trt_engine.vision.output_roles import recognise
from trt_engine.vision.preprocess import Placement
from trt_engine.vision.spec import Postprocess, Preprocess, Vision
from vision.decoder_answers.make_answers import (
    ANSWERS,
    CLASSES,
    IMAGE,
    IOU,
    KEYPOINTS,
    MIN_SCORE,
    SIDE,
    anchors,
    prototypes,
    queries,
    with_keypoints,
)

NAMES = tuple("abcde")
LETTERBOX = Placement(*IMAGE, SIDE / 80, SIDE / 80, 0, (SIDE - 48) / 2)
STRETCH = Placement(*IMAGE, SIDE / IMAGE[0], SIDE / IMAGE[1])


def decoded(outputs: Mapping[str, Any], declared: Postprocess, place: Placement = LETTERBOX, **how: Any) -> Detections:
    vision = Vision(Preprocess(size=(SIDE, SIDE)), declared)
    (found,) = decode_outputs(outputs, vision, [place], min_score=MIN_SCORE, **how)
    return found


def yolo(decode: Any = "yolo", **settings: Any) -> Postprocess:
    return Postprocess(decode, classes=NAMES, iou=IOU, **settings)


def detr(activation: Any) -> Postprocess:
    return Postprocess("detr", classes=NAMES, activation=activation)


def pair(logits: Any, boxes: Any) -> dict[str, Any]:
    hidden = np.zeros((1, boxes.shape[1], 8), np.float32)
    return {"logits": logits, "pred_boxes": boxes, "last_hidden_state": hidden}


@pytest.mark.parametrize(
    ("name", "outputs", "declared", "multi_label"),
    [
        ("multi_label", {"y": anchors(1)}, yolo(), True),
        ("multi_label", {"y": anchors(1).transpose(0, 2, 1)}, yolo(), True),
        ("best_class", {"y": anchors(1)}, yolo(), False),
        ("segment", {"y": anchors(2, extra=4), "p": prototypes(2)}, yolo(masks=True), False),
        ("pose", {"y": with_keypoints(anchors(3, extra=9))}, yolo(keypoints=KEYPOINTS), False),
        ("objectness", {"y": anchors(4, objectness=True)}, yolo("yolov5"), True),
        ("softmax", pair(*queries(5, CLASSES + 1)), detr("softmax"), True),
        ("sigmoid", pair(*queries(6, CLASSES)), detr("sigmoid"), True),
    ],
)
def test_detections_are_those_of_the_library_that_made_the_export(
    name: str, outputs: Any, declared: Postprocess, multi_label: bool
) -> None:
    answer = json.loads(ANSWERS.read_text())[name]
    found = decoded(outputs, declared, STRETCH if declared.decode == "detr" else LETTERBOX, multi_label=multi_label)
    assert found.classes.tolist() == answer["classes"]
    np.testing.assert_allclose(found.scores, answer["scores"], atol=6e-4)
    np.testing.assert_allclose(found.boxes_xyxy, answer["boxes"], atol=6e-4)
    if declared.keypoints is not None:
        np.testing.assert_allclose(found.keypoints, answer["keypoints"], atol=6e-4)
    for mask, packed in zip(found.masks or (), answer.get("masks", ()), strict=False):
        pixels = np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8)).reshape(IMAGE[::-1]).astype(bool)
        assert (decode_mask(mask) ^ pixels).mean() < 0.01  # their interpolation has two steps


def final_rows(found: Detections) -> np.ndarray[Any, Any]:
    """What a network with its own suppression gives: corners in pixels of the input, score, class."""
    parts = [LETTERBOX.to_input(found.boxes_xyxy), found.scores[:, None], found.classes[:, None]]
    return np.concatenate(parts, axis=1)[None].astype(np.float32)


def forms(rows: np.ndarray[Any, Any]) -> dict[str, tuple[dict[str, Any], Postprocess]]:
    """The same detections in every form of output that a suppression inside a graph takes."""
    boxes, scores, classes = rows[..., :4], rows[..., 4], rows[..., 5]
    count = rows.shape[1]
    padded = [
        np.pad(part, ((0, 0), (0, 7), *([(0, 0)] if part.ndim == 3 else []))) for part in (boxes, scores, classes)
    ]
    by_class = np.zeros((1, CLASSES, count), np.float32)
    by_class[0, classes[0].astype(int), np.arange(count)] = scores[0]
    chosen = np.stack([np.zeros(count), classes[0], np.arange(count)], axis=1).astype(np.int64)
    plugin = {"num_dets": np.array([[count]], np.int32), "det_boxes": padded[0], "det_scores": padded[1]}
    middle = np.concatenate([boxes[..., :2] + boxes[..., 2:], boxes[..., 2:] - boxes[..., :2]], -1) / [2, 2, 1, 1]
    tf_boxes, nms = boxes[..., [1, 0, 3, 2]] / SIDE, Postprocess("nms", classes=NAMES)
    return {
        "rows": ({"output0": rows}, yolo("yolov10")),
        "anchors": ({"output": rows[:, ::-1]}, yolo("yolov10", suppress=True)),
        "EfficientNMS_TRT": ({**plugin, "det_classes": padded[2].astype(np.int32)}, nms),
        "TensorFlow": (
            {"detection_boxes": tf_boxes, "detection_scores": scores, "detection_classes": classes + 1,
             "num_detections": np.array([count], np.float32)},
            replace(nms, box_format="yxyx", normalized=True, first_class=1),
        ),
        "NonMaxSuppression": ({"boxes": boxes, "scores": by_class, "selected_indices": chosen}, nms),
        "rows with their image": (
            {"output": np.concatenate([np.zeros((count, 1)), boxes[0], classes.T, scores.T], axis=1)}, nms,
        ),
        "torchvision": ({"boxes": boxes[0], "labels": classes[0].astype(np.int64), "scores": scores[0]}, nms),
        "mmdetection": ({"dets": np.concatenate([boxes, scores[..., None]], -1), "labels": classes.astype(np.int64)}, nms),
        "Ultralytics RT-DETR": (
            {"output0": np.concatenate([middle / SIDE, rows[..., 4:]], -1)},
            yolo("yolov10", box_format="cxcywh", normalized=True),
        ),
        "RT-DETR of 2024": (
            {"output0": np.concatenate([middle / SIDE, by_class.transpose(0, 2, 1)], -1)}, detr("none"),
        ),
        "YOLO-NAS": (
            {"boxes": boxes, "scores": by_class.transpose(0, 2, 1)},
            replace(detr("none"), box_format="xyxy", normalized=False, suppress=True),
        ),
    }  # fmt: skip


FINAL = decoded({"y": anchors(1)}, yolo(), multi_label=False)
FORMS = forms(final_rows(FINAL))


@pytest.mark.parametrize("name", FORMS)
def test_detections_are_the_same_in_every_form_that_a_graph_gives_them(name: str) -> None:
    outputs, declared = FORMS[name]
    found = decoded(outputs, declared)
    assert found.classes.tolist() == FINAL.classes.tolist()
    np.testing.assert_allclose(found.scores, FINAL.scores, rtol=1e-6)
    np.testing.assert_allclose(found.boxes_xyxy, FINAL.boxes_xyxy, atol=1e-3)


@pytest.mark.parametrize(
    ("outputs", "known", "wanted"),
    [
        ({"output0": (1, 84, 8400)}, {}, {"decode": "yolo"}),
        ({"output0": (1, 8400, 84)}, {"classes": 80}, {"decode": "yolo"}),
        ({"output0": (1, 25200, 85)}, {}, {"decode": "yolov5"}),
        ({"output": (1, 25200, 6)}, {"classes": 1}, {"decode": "yolov5"}),
        ({"output0": (1, 300, 6)}, {"classes": 80}, {"decode": "yolov10"}),
        ({"output0": (1, 300, 6)}, {"classes": 2}, {"decode": "yolov10"}),
        ({"output": (1, 8400, 6)}, {"classes": 80}, {"decode": "yolov10", "suppress": True}),
        ({"output0": (1, 300, 84)}, {"classes": 80}, {"decode": "detr", "normalized": True}),
        ({"output0": (1, 116, 8400)}, {"classes": 80, "extra": 32}, {"decode": "yolo"}),
        ({"output0": (1, 300, 38)}, {"classes": 80, "extra": 32}, {"decode": "yolov10"}),
        ({"logits": (1, 100, 92), "pred_boxes": (1, 100, 4)}, {}, {"decode": "detr", "activation": "softmax"}),
        ({"logits": (1, 300, 80), "pred_boxes": (1, 300, 4)}, {}, {"decode": "detr", "activation": "sigmoid"}),
        ({"logits": (1, 300, 7), "pred_boxes": (1, 300, 4)}, {"classes": 6}, {"decode": "detr", "activation": "softmax"}),
        ({"dets": (1, 300, 4), "labels": (1, 300, 91)}, {}, {"decode": "detr", "activation": "sigmoid"}),
        ({"boxes": (1, 8400, 4), "scores": (1, 8400, 80)}, {}, {"decode": "detr", "suppress": True}),
        ({"num_dets": (1, 1), "det_boxes": (1, 9, 4), "det_scores": (1, 9), "det_classes": (1, 9)}, {}, {"decode": "nms"}),
        ({"output": (-1, 7)}, {}, {"decode": "nms"}),
        ({"logits": (1, 1000)}, {}, {"decode": "classify"}),
    ],
)  # fmt: skip
def test_outputs_without_a_declaration_are_recognised_by_names_and_shapes(
    outputs: Any, known: Any, wanted: Any
) -> None:
    found, assumed = recognise([TensorSpec(name, "float32", shape) for name, shape in outputs.items()], **known)
    assert found | wanted == found and assumed


@pytest.mark.parametrize(
    ("outputs", "declared", "says"),
    [
        (pair(*queries(6, 5)), detr("none"), "probabilities are 0 to 1"),
        (
            {"a": np.zeros((1, 9, 4)), "b": np.zeros((1, 9, 4))},
            detr("sigmoid"),
            "cannot tell which output is the boxes",
        ),
        ({"x": np.zeros((1, 9, 6)), "y": np.zeros((1, 9, 8))}, yolo("yolov10"), "the model has 2 outputs"),
        ({"y": anchors(2, extra=4)}, yolo(masks=True), "needs the one of the prototypes"),
        ({"y": anchors(1)}, yolo(keypoints=(3, 3)), "expects 4 + 14"),
        ({"boxes": np.zeros((1, 9, 4)), "scores": np.zeros((1, 9))}, Postprocess("nms"), "no output with the classes"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_with_what_to_declare(outputs: Any, declared: Any, says: str) -> None:
    with pytest.raises((ModelError, UsageError)) as refused:
        decoded(outputs, declared)
    assert says in refused.value.message and refused.value.hint


def test_a_declaration_of_masks_keypoints_and_outputs_comes_back_and_is_checked() -> None:
    outputs = (TensorSpec("y", "float32", (1, 13, 60)), TensorSpec("p", "float32", (1, 4, 16, 16)))
    signature = Signature((TensorSpec("x", "float32", (1, 3, SIDE, SIDE)),), outputs)
    vision = Vision(Preprocess((SIDE, SIDE)), yolo(masks=True, outputs={"protos": "p"}))
    vision.check(signature)
    assert Vision.parse(vision.to_json(), "x") == vision
    for settings, says in (
        ({"decode": "detr", "masks": True}, "decodes no masks"),
        ({"decode": "yolo", "keypoints": [17, 4]}, "expected their number and 2 or 3"),
        ({"decode": "nms", "outputs": {"boxs": "y"}}, "not a role"),
    ):
        with pytest.raises(UsageError, match=says):
            Vision.parse({"preprocess": {"size": [8, 8]}, "postprocess": settings}, "x")


def test_run_lengths_of_a_mask_are_cocos_and_come_back() -> None:
    draw = np.random.default_rng(0)
    mask_library = pytest.importorskip("faster_coco_eval").mask
    for corner, shape in (
        ((0, 0), (60, 80)),
        ((3, 0), (60, 5)),
        ((7, 9), (13, 11)),
        ((0, 59), (1, 80)),
        ((5, 5), (0, 0)),
    ):
        part = draw.random(shape) < 0.6
        whole = np.zeros((60, 80), bool)
        whole[corner[1] : corner[1] + shape[0], corner[0] : corner[0] + shape[1]] = part
        mask = encode_mask(part, corner, (80, 60))
        np.testing.assert_array_equal(decode_mask(mask), whole)
        theirs = mask_library.decode({"size": list(mask.size), "counts": mask.counts.encode()})
        np.testing.assert_array_equal(theirs.astype(bool), whole)

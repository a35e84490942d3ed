"""Digits found in pictures by the ONNX model, and how well: letterbox, detections, COCO's average precision.

`python detect.py model.onnx val` prints AP50-95, AP50 and AP75 of an ONNX file over a folder of scenes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE_PX = 160  # of the network's input
GREY = 114
MIN_SCORE = 0.001  # COCO wants the long tail; a person looking at boxes wants 0.25 or more

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Letterbox:
    """How a picture was put into the square: square = picture * scale + (left_px, top_px)."""

    scale_x: float
    scale_y: float
    left_px: int
    top_px: int

    def back(self, boxes_xyxy: Floats) -> Floats:
        """Boxes [..., 4] in pixels of the square, as pixels of the picture."""
        offset = np.array([self.left_px, self.top_px] * 2, np.float32)
        scale = np.array([self.scale_x, self.scale_y] * 2, np.float32)
        return (boxes_xyxy - offset) / scale


@dataclass(frozen=True)
class Scores:
    """COCO's average precision, 0 to 1."""

    ap50_95: float
    ap50: float
    ap75: float


def letterbox(picture: Image.Image, side_px: int = SIDE_PX) -> tuple[Floats, Letterbox]:
    """The network's input for an RGB picture, float32 [3, side, side] from 0 to 1, and the way back."""
    factor = side_px / max(picture.size)
    width, height = (max(1, round(side * factor)) for side in picture.size)
    left, top = (side_px - width) // 2, (side_px - height) // 2
    square = Image.new("RGB", (side_px, side_px), (GREY, GREY, GREY))
    square.paste(picture.resize((width, height), Image.Resampling.BILINEAR), (left, top))
    image_CHW = np.asarray(square, np.float32).transpose(2, 0, 1) / 255
    return np.ascontiguousarray(image_CHW), Letterbox(width / picture.width, height / picture.height, left, top)


def average_precision(detect: Callable[[Floats], Floats], folder: Path, batch: int = 8) -> Scores:
    """COCO scores over `folder`/images of a function from [n, 3, side, side] to [n, 300, 6]."""
    from faster_coco_eval import COCO, COCOeval_faster  # pictures can be boxed without it

    truth_path = folder / "annotations.json"
    images = json.loads(truth_path.read_text())["images"]
    results: list[dict[str, object]] = []
    for start in range(0, len(images), batch):
        results += _results(detect, folder, images[start : start + batch])

    with contextlib.redirect_stdout(io.StringIO()):  # the library reports on stdout, which is ours
        truth = COCO(str(truth_path))
        evaluation = COCOeval_faster(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return Scores(*(float(value) for value in evaluation.stats[:3]))


def onnx_detector(path: Path, threads: int = 1) -> Callable[[Floats], Floats]:
    """The model in ONNX Runtime on the CPU, as a function from images to detections."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["output0"], {"images": images})[0]


def _results(
    detect: Callable[[Floats], Floats], folder: Path, images: Sequence[dict[str, object]]
) -> list[dict[str, object]]:
    pictures = [Image.open(folder / "images" / str(image["file_name"])).convert("RGB") for image in images]
    squares, ways_back = zip(*(letterbox(picture) for picture in pictures), strict=True)
    found: list[dict[str, object]] = []
    for image, picture, back, rows in zip(images, pictures, ways_back, detect(np.stack(squares)), strict=True):
        rows = rows[rows[:, 4] >= MIN_SCORE]
        limit = np.array([*picture.size, *picture.size], np.float32)
        for (x0, y0, x1, y1), row in zip(np.clip(back.back(rows[:, :4]), 0, limit), rows, strict=True):
            box = [float(x0), float(y0), float(x1 - x0), float(y1 - y0)]
            found.append({"image_id": image["id"], "category_id": int(row[5]), "bbox": box, "score": float(row[4])})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="COCO average precision of an ONNX file over a folder of scenes")
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path, help="has images/ and annotations.json, as scenes.py writes them")
    args = parser.parse_args()
    scores = average_precision(onnx_detector(args.model), args.folder)
    print(f"AP50-95 {scores.ap50_95:.4f}  AP50 {scores.ap50:.4f}  AP75 {scores.ap75:.4f}")


if __name__ == "__main__":
    main()

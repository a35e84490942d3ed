"""Scenes of handwritten digits over photographs, the same ones for the same seed and versions.

`scene(split, seed, index)` is one scene with its boxes; `python scenes.py` writes many as JPEG files and
COCO annotations. Training and validation share no digit and no piece of a photograph.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits, load_sample_image

Split = Literal["train", "val"]
Rect = tuple[int, int, int, int]

SPLITS: tuple[Split, ...] = ("train", "val")
CLASSES = tuple("0123456789")

# left, top, right, bottom in pixels of scikit-learn's sample photographs, each 640 x 427
PHOTO_RECTS: dict[Split, dict[str, Rect]] = {
    "train": {"china.jpg": (0, 0, 428, 427), "flower.jpg": (212, 0, 640, 427)},
    "val": {"china.jpg": (428, 0, 640, 427), "flower.jpg": (0, 0, 212, 427)},
}

SIDE_PX = (140, 320)  # of a scene
DIGIT_SHARE = (0.12, 0.36)  # a digit's height as a share of the scene's longer side
MAX_DIGITS = 8
INK_EDGE = 0.30  # ink at least this opaque counts as the digit when its box is drawn


@dataclass(frozen=True)
class Digit:
    """One digit of a scene: its class, its tight box (left, top, right, bottom in pixels), its origin."""

    label: int
    box: tuple[int, int, int, int]
    index: int  # of the digit in load_digits()


@dataclass(frozen=True)
class Scene:
    """One picture, uint8 [height, width, 3] in RGB, with what is in it and where it came from."""

    image: NDArray[np.uint8]
    digits: tuple[Digit, ...]
    photo: str
    rect: Rect  # the piece of the photograph behind the digits


@dataclass(frozen=True)
class _Ink:
    """Opacity from 0 to 1, float32 [rows, columns, 1], and where it lies in its scene."""

    opacity: NDArray[np.float32]
    rows: slice
    columns: slice


@cache
def digit_indices(split: Split) -> tuple[int, ...]:
    """The digits of load_digits() that this split may use: 70 in 100 of each class train, the rest validate."""
    target = load_digits().target
    rng = np.random.default_rng(1797)
    chosen: list[int] = []
    for label in range(len(CLASSES)):
        of_class = rng.permutation(np.flatnonzero(target == label))
        cut = round(0.7 * len(of_class))
        chosen += of_class[:cut].tolist() if split == "train" else of_class[cut:].tolist()
    return tuple(sorted(chosen))


def scene(split: Split, seed: int, index: int) -> Scene:
    """Scene number `index` of a seed; it does not depend on the scenes before it."""
    rng = np.random.default_rng([seed, index, SPLITS.index(split)])
    width, height = (int(side) for side in rng.integers(SIDE_PX[0], SIDE_PX[1] + 1, 2))
    photo = str(rng.choice(sorted(PHOTO_RECTS[split])))
    rect = _crop(rng, PHOTO_RECTS[split][photo], width / height)
    canvas = _background(rng, photo, rect, width, height)

    digits: list[Digit] = []
    inks: list[_Ink] = []
    allowed = digit_indices(split)
    for _ in range(int(rng.integers(1, MAX_DIGITS + 1))):
        source = allowed[rng.integers(len(allowed))]
        opacity = _opacity(rng, source, max(width, height), min(width, height))
        place = _free_place(rng, opacity, width, height, digits)
        if place is None:
            continue
        left, top = place
        x0, y0, x1, y1 = _tight(opacity)
        box = (left + x0, top + y0, left + x1, top + y1)
        digits.append(Digit(int(_sources()[1][source]), box, source))
        inks.append(_clip(opacity, left, top, width, height))

    for ink in inks:  # every paper before any ink: a paper must not hide a neighbour's digit
        if rng.random() < 0.33:
            _lay_paper(rng, canvas, ink)
    for ink in inks:
        _lay_ink(rng, canvas, ink)
    canvas += rng.uniform(0.0, 5.0) * rng.standard_normal(canvas.shape, np.float32)
    return Scene(np.clip(canvas, 0, 255).astype(np.uint8), tuple(digits), photo, rect)


def coco(scenes: list[Scene], names: list[str]) -> dict[str, object]:
    """COCO annotations for scenes under these file names; a `category_id` is the model's class id."""
    images: list[dict[str, object]] = []
    annotations: list[dict[str, object]] = []
    for number, (item, name) in enumerate(zip(scenes, names, strict=True), start=1):
        height, width = item.image.shape[:2]
        source = {"photo": item.photo, "rect": list(item.rect)}
        images.append({"id": number, "file_name": name, "width": width, "height": height, "source": source})
        for digit in item.digits:
            x0, y0, x1, y1 = digit.box
            annotations.append({
                "id": len(annotations) + 1, "image_id": number, "category_id": digit.label,
                "bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0,
                "digit_index": digit.index,
            })  # fmt: skip
    categories = [{"id": number, "name": name} for number, name in enumerate(CLASSES)]
    info = {"description": "handwritten digits over photographs; category_id is the model's class id, 0 to 9"}
    return {"info": info, "images": images, "annotations": annotations, "categories": categories}


def write(split: Split, seed: int, count: int, folder: Path) -> None:
    """Put `count` scenes under `folder`: images/*.jpg and annotations.json."""
    scenes = [scene(split, seed, index) for index in range(count)]
    names = [f"{split}_{seed}_{index:04d}.jpg" for index in range(count)]
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for item, name in zip(scenes, names, strict=True):
        Image.fromarray(item.image).save(folder / "images" / name, quality=90)
    text = json.dumps(coco(scenes, names), separators=(",", ":"))
    (folder / "annotations.json").write_text(text + "\n")


@cache
def _sources() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The digits as ink from 0 to 1, float32 [1797, 8, 8], and their classes."""
    digits = load_digits()
    return (digits.images / 16).astype(np.float32), digits.target


@cache
def _photo(name: str) -> Image.Image:
    return Image.fromarray(load_sample_image(name))


def _crop(rng: np.random.Generator, region: Rect, aspect: float) -> Rect:
    """A piece of the region with about this width / height, between 0.45 and 1 of the largest that fits."""
    left, top, right, bottom = region
    widest = min(right - left, (bottom - top) * aspect)
    width = max(8, int(widest * rng.uniform(0.45, 1.0)))
    height = min(bottom - top, max(8, int(width / aspect)))
    x = int(rng.integers(left, right - width + 1))
    y = int(rng.integers(top, bottom - height + 1))
    return x, y, x + width, y + height


def _background(rng: np.random.Generator, photo: str, rect: Rect, width: int, height: int) -> NDArray[np.float32]:
    piece = _photo(photo).crop(rect).resize((width, height), Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        piece = piece.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    gain = (rng.uniform(0.6, 1.2) * rng.uniform(0.9, 1.1, 3)).astype(np.float32)
    canvas: NDArray[np.float32] = np.asarray(piece) * gain + np.float32(rng.uniform(-20, 40))
    return canvas.clip(0, 255)


def _opacity(rng: np.random.Generator, source: int, long_px: int, short_px: int) -> NDArray[np.float32]:
    """The digit enlarged, stretched and turned a little, as opacity from 0 to 1, [height, width]."""
    low, high = np.log(DIGIT_SHARE)
    tall = min(np.exp(rng.uniform(low, high)) * long_px, 0.85 * short_px)
    wide = tall * rng.uniform(0.8, 1.15)
    small = Image.fromarray(np.pad(_sources()[0][source], 1))
    # ten cells for the eight of the digit: the margin lets the strokes fade out and turn
    large = small.resize((round(wide * 1.25), round(tall * 1.25)), Image.Resampling.BICUBIC)
    turned = large.rotate(rng.uniform(-14, 14), Image.Resampling.BICUBIC, expand=True)
    start = rng.uniform(0.15, 0.3)
    ramp = np.clip((np.asarray(turned) - start) / rng.uniform(0.25, 0.5), 0, 1).astype(np.float32)
    return ramp * ramp * (3 - 2 * ramp)


def _tight(opacity: NDArray[np.float32]) -> tuple[int, int, int, int]:
    rows = np.flatnonzero((opacity >= INK_EDGE).any(axis=1))
    columns = np.flatnonzero((opacity >= INK_EDGE).any(axis=0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def _free_place(
    rng: np.random.Generator, opacity: NDArray[np.float32], width: int, height: int, taken: list[Digit]
) -> tuple[int, int] | None:
    """Where the array may start so that the digit's box is inside the scene and hardly over another."""
    x0, y0, x1, y1 = _tight(opacity)
    if x1 - x0 > width or y1 - y0 > height:
        return None
    for _ in range(12):
        left = int(rng.integers(-x0, width - x1 + 1))
        top = int(rng.integers(-y0, height - y1 + 1))
        box = (left + x0, top + y0, left + x1, top + y1)
        if all(_overlap(box, other.box) <= 0.06 for other in taken):
            return left, top
    return None


def _overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> float:
    """The shared area as a part of the smaller box."""
    wide = min(a[2], b[2]) - max(a[0], b[0])
    tall = min(a[3], b[3]) - max(a[1], b[1])
    if wide <= 0 or tall <= 0:
        return 0.0
    return wide * tall / min((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]))


def _clip(opacity: NDArray[np.float32], left: int, top: int, width: int, height: int) -> _Ink:
    x0, y0 = max(left, 0), max(top, 0)
    x1, y1 = min(left + opacity.shape[1], width), min(top + opacity.shape[0], height)
    return _Ink(opacity[y0 - top : y1 - top, x0 - left : x1 - left, None], slice(y0, y1), slice(x0, x1))


def _lay_paper(rng: np.random.Generator, canvas: NDArray[np.float32], ink: _Ink) -> None:
    under = canvas[ink.rows, ink.columns]
    paper = (rng.uniform(0, 255) + rng.uniform(-25, 25, 3)).astype(np.float32)
    under += rng.uniform(0.3, 0.8) * (paper - under)


def _lay_ink(rng: np.random.Generator, canvas: NDArray[np.float32], ink: _Ink) -> None:
    under = canvas[ink.rows, ink.columns]
    mean = under.mean(axis=(0, 1))
    colour = rng.uniform(0, 255, 3)
    # ink too like what is under it cannot be read by anyone: push it towards black or white
    if abs(float((colour - mean).mean())) < 60:
        colour = mean + (90 if mean.mean() < 128 else -90) + rng.uniform(-25, 25, 3)
    under += ink.opacity * rng.uniform(0.7, 1.0) * (np.clip(colour, 0, 255).astype(np.float32) - under)


def main() -> None:
    parser = argparse.ArgumentParser(description="write scenes and their COCO annotations")
    parser.add_argument("--split", choices=SPLITS, default="val")
    parser.add_argument("--count", type=int, default=64, help="how many scenes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for images/ and annotations.json")
    args = parser.parse_args()
    write(args.split, args.seed, args.count, args.out)


if __name__ == "__main__":
    main()

"""scikit-learn's handwritten digits as 32 x 32 pictures: the split, the pictures, the network's input.

`python data.py` writes one side of the split as .npz: bytes with labels to evaluate on, or with `--inputs` the
network's inputs to calibrate with. Training and validation share no digit, here and with examples/digits.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

Split = Literal["train", "val"]

SPLITS: tuple[Split, ...] = ("train", "val")
CLASSES = tuple("0123456789")
SIDE_PX = 32
INK = 16  # the darkest ink of load_digits()


def digit_indices(split: Split) -> tuple[int, ...]:
    """The digits of load_digits() on this side: those of the detector's scenes, 70 in 100 of each class train."""
    return _digit_indices(split)


def pictures(split: Split) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Bright digits on black, uint8 [n, SIDE_PX, SIDE_PX], and their labels, in the order of `digit_indices`."""
    digits = load_digits()
    indices = list(digit_indices(split))
    cells = np.rint(digits.images[indices] * (255 / INK)).astype(np.uint8)
    return np.stack([enlarged(Image.fromarray(cell)) for cell in cells]), digits.target[indices].astype(np.int64)


def enlarged(picture: Image.Image) -> NDArray[np.uint8]:
    """A picture of any size as uint8 [SIDE_PX, SIDE_PX], stretched by Pillow's bilinear filter."""
    return np.asarray(picture.convert("L").resize((SIDE_PX, SIDE_PX), Image.Resampling.BILINEAR))


def inputs(images: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What the networks take, float32 [n, 1, SIDE_PX, SIDE_PX] from 0 to 1, of bytes [n, SIDE_PX, SIDE_PX]."""
    return (images[:, None] / 255).astype(np.float32)


def write(split: Split, path: Path, count: int | None = None, as_inputs: bool = False) -> None:
    """Write `images` and `labels`, or only `images` as the network's inputs; the first `count` of a fixed shuffle."""
    images, labels = pictures(split)
    if count is not None:
        chosen = np.sort(np.random.default_rng(0).permutation(len(images))[:count])
        images, labels = images[chosen], labels[chosen]
    arrays = {"images": inputs(images)} if as_inputs else {"images": images, "labels": labels}
    np.savez_compressed(path, **arrays)


@cache
def _digit_indices(split: Split) -> tuple[int, ...]:
    """The split is said once, in examples/digits/scenes.py; loaded by its path, as the two folders are no package."""
    path = Path(__file__).resolve().parents[1] / "digits" / "scenes.py"
    spec = importlib.util.spec_from_file_location("digits_scenes_of_classifiers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    chosen: tuple[int, ...] = module.digit_indices(split)
    return chosen


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description="write one side of the split as .npz")
    parser.add_argument("--split", choices=SPLITS, default="val")
    parser.add_argument("--count", type=int, help="only so many, chosen by a fixed seed")
    parser.add_argument("--inputs", action="store_true", help="the network's float inputs alone, to calibrate with")
    parser.add_argument("-o", "--out", type=Path, default=here / "val.npz")
    args = parser.parse_args()
    write(args.split, args.out, args.count, args.inputs)


if __name__ == "__main__":
    main()

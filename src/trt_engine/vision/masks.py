"""Masks of instances: from prototypes and coefficients, as COCO's run lengths, and back to pixels."""

from __future__ import annotations

import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.errors import UsageError
from trt_engine.records.infer import Mask


def assemble_masks(
    coefficients: Array, protos: Array, boxes_xyxy: Array, size: tuple[int, int], corners: Array
) -> tuple[Mask, ...]:
    """Masks in pixels of the image: `coefficients` [N, M] times `protos` [M, h, w], interpolated, above 0, inside the box.

    `size` is width and height of the image, `corners` [4] the corners of the network input in pixels of the image. Formula:
    that of Ultralytics' "retina masks", which interpolate twice (to the input, to the image), this once.
    """
    width, height = size
    _, tall, wide = protos.shape
    columns = _sampling(width, corners[0], corners[2], wide)
    rows = _sampling(height, corners[1], corners[3], tall)
    made = []
    for weights, (x0, y0, x1, y1) in zip(coefficients, boxes_xyxy, strict=True):
        left, top, right, bottom = (int(np.ceil(value)) for value in (x0, y0, x1, y1))
        right, bottom = min(max(right, left), width), min(max(bottom, top), height)
        small = np.tensordot(weights, protos, axes=1)
        low, high, share = (part[left:right] for part in columns)
        across = small[:, low] * (1 - share) + small[:, high] * share
        low, high, share = (part[top:bottom] for part in rows)
        values = across[low] * (1 - share[:, None]) + across[high] * share[:, None]
        made.append(encode_mask(values > 0, (left, top), size))
    return tuple(made)


def _sampling(side: int, start: float, end: float, goal: int) -> tuple[Array, Array, Array]:
    """Neighbouring prototype pixels of the centre of each pixel of the image, and the second one's share."""
    place = ((np.arange(side) + 0.5 - start) * goal / (end - start) - 0.5).clip(0, goal - 1)
    low = np.floor(place).astype(np.int64)
    return low, np.minimum(low + 1, goal - 1), place - low


def encode_mask(part: Array, corner: tuple[int, int], size: tuple[int, int]) -> Mask:
    """Run lengths of a mask that is the boolean `part` [h, w] at `corner` (x, y) and false elsewhere.

    Format: `rleToString` of cocoapi's maskApi.c; runs go down the columns, the first one is of zeros.
    """
    width, height = size
    padded = np.zeros((part.shape[0] + 2, part.shape[1]), np.int8)
    padded[1:-1] = part
    changes = np.diff(padded, axis=0).T  # [columns, rows + 1]
    column, row = np.nonzero(changes)
    places = (column + corner[0]) * height + row + corner[1]
    if len(places) > 2:  # a run that goes on in the next column
        joined = np.flatnonzero(places[1:-1:2] == places[2::2])
        places = np.delete(places, np.concatenate([2 * joined + 1, 2 * joined + 2]))
    counts = np.diff(np.concatenate([[0], places, [width * height]]))
    return Mask((height, width), _compress(counts.tolist()))


def decode_mask(mask: Mask) -> Array:
    """The mask as booleans [H, W]. Raises `UsageError` for counts that are not run lengths of its size."""
    height, width = mask.size
    counts = _expand(mask.counts)
    if sum(counts) != height * width or min(counts, default=0) < 0:
        raise UsageError(
            f"the run lengths of a mask add up to {sum(counts)} pixels, expected {height * width}", hint="COCO's form"
        )
    values = np.repeat(np.arange(len(counts)) % 2 == 1, counts)
    return values.reshape(width, height).T


def _compress(counts: list[int]) -> str:
    letters = []
    for index, count in enumerate(counts):
        value = count - counts[index - 2] if index > 2 else count
        while True:
            low = value & 31
            value >>= 5
            more = value != (-1 if low & 16 else 0)
            letters.append(chr((low | (32 if more else 0)) + 48))
            if not more:
                break
    return "".join(letters)


def _expand(text: str) -> list[int]:
    counts: list[int] = []
    value = shift = 0
    for letter in text:
        low = ord(letter) - 48
        value |= (low & 31) << shift
        shift += 5
        if not low & 32:
            value -= (1 << shift) if low & 16 else 0
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    return counts

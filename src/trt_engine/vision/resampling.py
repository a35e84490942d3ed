"""Pillow's `resize` and FFmpeg's colours as tables of integers, for frames that are prepared on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trt_engine.vision.preprocess import Preprocessor

Ints = npt.NDArray[np.int32]


def _bicubic(x: float) -> float:
    a, x = -0.5, abs(x)
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


_FILTERS: dict[str, tuple[Callable[[float], float], float]] = {
    "bilinear": (lambda x: max(0.0, 1.0 - abs(x)), 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (lambda x: float(np.sinc(x) * np.sinc(x / 3)) if abs(x) < 3 else 0.0, 3.0),
}
"""Function and reach of each filter (Pillow, `Resample.c`)."""
_WEIGHT_BITS = 22


def axis_table(source: int, resized: int, offset: int, size: int, interpolation: str) -> Ints:
    """For `size` output pixels of one axis: first source pixels, counts, then `[size, taps]` weights of 22 bits.

    The axis of `source` pixels is resized to `resized` and starts at `offset`, negative where it is cropped; pixels beside
    it have a count of 0.
    """
    scale = source / resized
    taps: list[tuple[int, list[int]]] = []
    for place in range(-offset, size - offset):
        if not 0 <= place < resized:
            taps.append((0, []))
        elif interpolation == "nearest":
            taps.append((min(source - 1, int((place + 0.5) * scale)), [1 << _WEIGHT_BITS]))
        else:
            taps.append(_filter_taps(place, source, scale, *_FILTERS[interpolation]))
    most = max(len(weights) for _, weights in taps)
    firsts, counts = [first for first, _ in taps], [len(weights) for _, weights in taps]
    padded = [weights + [0] * (most - len(weights)) for _, weights in taps]
    return np.concatenate([np.array(part, np.int32).ravel() for part in (firsts, counts, padded)])


def _filter_taps(
    place: int, source: int, scale: float, weigh: Callable[[float], float], reach: float
) -> tuple[int, list[int]]:
    """First source pixel and weights of an output pixel; a filter is as wide as the pixels it joins."""
    wide, centre = max(scale, 1.0), (place + 0.5) * scale
    first, end = max(0, int(centre - reach * wide + 0.5)), min(source, int(centre + reach * wide + 0.5))
    weights = [weigh((pixel - centre + 0.5) / wide) for pixel in range(first, end)]
    whole = sum(weights)
    return first, [int(math.copysign(0.5, weight) + weight / whole * (1 << _WEIGHT_BITS)) for weight in weights]


_LUMA = {1: (0.2126, 0.0722), 4: (0.30, 0.11), 7: (0.212, 0.087), 9: (0.2627, 0.0593), 10: (0.2627, 0.0593)}
"""Shares of red and blue in luma by the number of the colour space (ITU-T H.273); BT.601 where none is stated."""


def colour_numbers(space: int, full_range: bool) -> list[int]:
    """Factors of luma, of V in red, of U and V in green, of U in blue in units of 1 / 8192, and the luma of black."""
    red, blue = _LUMA.get(space, (0.299, 0.114))
    green, chroma = 1 - red - blue, 1.0 if full_range else 255 / 224
    factors = (
        1.0 if full_range else 255 / 219,
        2 * (1 - red) * chroma,
        -2 * (1 - blue) * blue / green * chroma,
        -2 * (1 - red) * red / green * chroma,
        2 * (1 - blue) * chroma,
    )
    return [*(round(8192 * factor) for factor in factors), 0 if full_range else 16]


def frame_plan(preprocessor: Preprocessor, width: int, height: int, colours: list[int]) -> Ints:
    """What `prepare_frames.cu` needs to know of frames of this size and these `colour_numbers`."""
    wide, tall, placement = preprocessor.place(width, height)
    size, how = preprocessor.spec.size, preprocessor.spec.interpolation
    x = axis_table(width, wide, int(placement.left), size[1], how)
    y = axis_table(height, tall, int(placement.top), size[0], how)
    head = [*colours, width, height, len(x) // size[1] - 2, len(y) // size[0] - 2]
    return np.concatenate([np.array(head, np.int32), x, y])


def kernel_settings(preprocessor: Preprocessor) -> dict[str, str]:
    """The macros that `prepare_frames.cu` is compiled with for this declaration."""
    spec = preprocessor.spec
    width = preprocessor.dtype.itemsize
    pad = ", ".join(map(str, spec.pad_value))
    made = {
        "VALUE": {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}[width],
        "TALL": str(spec.size[0]),
        "WIDE": str(spec.size[1]),
        "CHANNELS": str(spec.channel_count),
        "PAD": "{" + pad + "}",
    }
    flags = {"LAST": spec.layout == "NHWC", "BGR": spec.channels == "BGR", "GREY": spec.channels == "L"}
    return made | {name: "1" for name, applies in flags.items() if applies}

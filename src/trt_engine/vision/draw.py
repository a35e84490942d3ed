"""Boxes with labels on a picture."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Sequence
from pathlib import Path

from trt_engine.errors import SetupError, UsageError
from trt_engine.files import write_whole
from trt_engine.vision.decode import Detections

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise SetupError(
        "pictures are drawn with pillow, which is not installed", hint="`pip install 'trt-engine[eval]'`"
    ) from error

__all__ = ["FORMATS", "colour_of", "draw", "save"]

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""What a drawing can be written as, by suffix."""


def draw(picture: Image.Image, found: Detections, names: Sequence[str]) -> Image.Image:
    """A copy of the picture with a box and a label for each detection, worst first so that the best lies on top.

    `names` has one entry for each detection.
    """
    canvas = picture.convert("RGB")
    pen = ImageDraw.Draw(canvas)
    size = max(10, round(min(canvas.size) / 28))
    line = max(1, size // 8)
    font = ImageFont.load_default(size)
    for index in reversed(range(len(found))):
        x0, y0, x1, y1 = (float(value) for value in found.boxes_xyxy[index])
        colour = colour_of(int(found.classes[index]))
        pen.rectangle((x0, y0, x1, y1), outline=colour, width=line)
        text = f"{names[index]} {found.scores[index]:.2f}"
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        high, wide = bottom - top + 2 * line, right - left + 2 * line
        corner_y = y0 - high if y0 >= high else y0  # above the box where there is room
        corner_x = max(0.0, min(x0, canvas.width - wide))
        pen.rectangle((corner_x, corner_y, corner_x + wide, corner_y + high), fill=colour)
        pen.text((corner_x + line - left, corner_y + line - top), text, fill=_ink(colour), font=font)
    return canvas


def colour_of(index: int) -> tuple[int, int, int]:
    """The colour of a class, the same in every picture; neighbours differ."""
    red, green, blue = colorsys.hsv_to_rgb((index * 0.61803398875) % 1.0, 0.85, 0.95)  # the golden ratio spreads hues
    return round(red * 255), round(green * 255), round(blue * 255)


def _ink(paper: tuple[int, int, int]) -> tuple[int, int, int]:
    """Black or white, whichever reads better on the colour (ITU-R BT.601 luma)."""
    return (0, 0, 0) if 0.299 * paper[0] + 0.587 * paper[1] + 0.114 * paper[2] > 140 else (255, 255, 255)


def save(picture: Image.Image, path: Path) -> Path:
    """Write the drawing whole, in the format of its suffix."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"a drawing cannot be written to `{path}`", hint="end the name in .png, .jpg or .webp")
    buffer = io.BytesIO()
    picture.save(buffer, kind)
    return write_whole(path, buffer.getvalue())

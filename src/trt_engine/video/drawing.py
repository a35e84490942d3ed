"""What is drawn on frames besides boxes: the counts of a frame, and a sheet of several frames."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence

with contextlib.suppress(ImportError):  # who draws has read a clip
    from PIL import Image, ImageDraw, ImageFont

_COLUMNS = 4
_CELL_PX = 320
_GAP_PX = 4


def draw_counts(image: Image.Image, counts: Mapping[str, int]) -> None:
    """Draw the number of objects of each class in the top left corner of the RGB image."""
    total = sum(counts.values())
    lines = [
        f"{total} object{'' if total == 1 else 's'}",
        *(f"{name} {count}" for name, count in sorted(counts.items())),
    ]
    pen = ImageDraw.Draw(image, "RGBA")
    font = ImageFont.load_default(max(10, round(min(image.size) / 28)))
    text = "\n".join(lines)
    left, top, right, bottom = pen.multiline_textbbox((6, 6), text, font=font)
    pen.rectangle((left - 4, top - 4, right + 4, bottom + 4), fill=(0, 0, 0, 150))
    pen.multiline_text((6, 6), text, fill=(255, 255, 255, 255), font=font)


def contact_sheet(frames: Sequence[tuple[float, Image.Image]]) -> Image.Image:
    """A sheet of images with their times in s, four in a row, each in a cell of the first one's proportions."""
    width, height = frames[0][1].size
    cell = min(_CELL_PX, width)
    size = cell, max(1, round(cell * height / width))
    columns = min(_COLUMNS, len(frames))
    rows = -(-len(frames) // columns)
    sheet = Image.new("RGB", (columns * (size[0] + _GAP_PX) - _GAP_PX, rows * (size[1] + _GAP_PX) - _GAP_PX), "white")
    font = ImageFont.load_default(12)
    for number, (time_s, image) in enumerate(frames):
        row, column = divmod(number, columns)
        place = column * (size[0] + _GAP_PX), row * (size[1] + _GAP_PX)
        sheet.paste(image.resize(size), place)
        pen = ImageDraw.Draw(sheet)
        corner = place[0] + size[0] - 4, place[1] + size[1] - 4
        pen.text(corner, f"{time_s:.1f} s", fill="white", font=font, anchor="rs", stroke_width=2, stroke_fill="black")
    return sheet

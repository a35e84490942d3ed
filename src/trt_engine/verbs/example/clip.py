"""The clip of `example --video`: the discs of the scene move, each with a digit that `examples/digits` reads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from trt_engine.atomic_io import open_regular
from trt_engine.video.writer import VideoWriter

FPS, FRAMES = 25, 100
_SIZE = 320, 240
_RADIUS = 40
_OBJECTS = ((2.0, (220, 40, 40), "2"), (-3.0, (40, 220, 40), "4"), (4.0, (40, 40, 220), "5"))
"""Pixels a frame, colour, digit. Each keeps to a third of the image: none covers another."""


def clip_frames() -> Iterator[Image.Image]:
    """The frames, 320x240 RGB."""
    noise = np.random.RandomState(1).randint(90, 120, (_SIZE[1], _SIZE[0], 1)).astype(np.uint8)
    wall = Image.fromarray(np.repeat(noise, 3, axis=2))
    font = ImageFont.load_default(52)
    for number in range(FRAMES):
        image = wall.copy()
        pen = ImageDraw.Draw(image)
        for index, (step, colour, digit) in enumerate(_OBJECTS):
            lane = _SIZE[0] / len(_OBJECTS)
            x, y = (
                index * lane + _bounce(lane / 2 + number * step / 8, lane),
                _bounce(_SIZE[1] / 2 + number * step, _SIZE[1]),
            )
            pen.ellipse((x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS), fill=colour)
            pen.text((x, y), digit, fill="white", font=font, anchor="mm", stroke_width=2, stroke_fill="white")
        yield image


def _bounce(place: float, side: float) -> float:
    """The place, reflected where a disc would leave a side of that many pixels."""
    room = side - 2 * _RADIUS
    return _RADIUS + room - abs((place - _RADIUS) % (2 * room) - room)


def clip_mp4() -> bytes:
    """`clip_frames` as an MP4 file. Raises `SetupError` without PyAV."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        with VideoWriter(path, fps=FPS) as writer:
            for number, image in enumerate(clip_frames()):
                writer.write(image, number / FPS)
        with open_regular(path) as file:
            return file.read()

"""Clips of every kind, made with PyAV: a red square moves over grey."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np


def write_clip(
    path: Path,
    *,
    frames: int = 20,
    size: tuple[int, int] = (160, 120),
    codec: str = "libx264",
    pixels: str = "yuv420p",
    times_s: Iterable[float] | None = None,
) -> Path:
    """A clip at 10 frames a second, or with frames at these times."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = *size, pixels
        stream.codec_context.time_base = Fraction(1, 1000)
        for index, time_s in enumerate(times_s or [index / 10 for index in range(frames)]):
            frame = av.VideoFrame.from_ndarray(square(index, size), format="rgb24")
            frame.pts, frame.time_base = round(1000 * time_s), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def square(index: int, size: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Frame `index`: 40 pixels of red, in the top left corner of frame 0."""
    width, height = size
    image_HWC = np.full((height, width, 3), 100, np.uint8)
    left = 2 * index % (width - 40)
    image_HWC[:40, left : left + 40] = (220, 40, 40)
    return image_HWC


def write_sound(path: Path) -> Path:
    """A file with sound alone."""
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def turn(path: Path) -> Path:
    """The MP4 as a phone held upright writes it: its track's matrix turns the frames by a quarter, clockwise."""
    data = path.read_bytes()
    straight = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    quarter = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    track = data.index(b"tkhd")
    path.write_bytes(data[:track] + data[track:].replace(straight, quarter, 1))
    return path

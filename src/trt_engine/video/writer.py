"""Writes a clip: H.264 where FFmpeg has its encoder, the times of the frames as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from trt_engine.closing import Closing
from trt_engine.errors import SetupError
from trt_engine.video.decoder import require_video

with contextlib.suppress(ImportError):  # `require_video` has the error
    import av
    from av.video.reformatter import VideoReformatter
    from PIL import Image

_CODECS = ("libx264", "mpeg4")
_TIME_BASE = Fraction(1, 90_000)


class VideoWriter(Closing):
    """A clip of the size of its first image, for one thread. A clip that is not closed is not readable."""

    def __init__(self, path: Path, *, fps: float) -> None:
        """`fps` is the rate that the container states. Raises `SetupError` for a path that cannot be written."""
        require_video()
        self._fps = Fraction(fps).limit_denominator(1001)
        self._last = -1
        self._stream: Any = None
        self._reformatter = VideoReformatter()
        self.size = (0, 0)
        """Width and height in pixels, even: the codec needs that."""
        try:
            self._container: Any = av.open(str(path), "w")
        except (av.FFmpegError, OSError, ValueError) as error:
            raise SetupError(f"cannot write `{path}`: {error}", hint="name another file with `-o`") from error

    def write(self, image: Image.Image, time_s: float) -> None:
        """Add an RGB image at its time from the first frame on; one of another size is scaled."""
        if self._stream is None:
            self._open(image.size)
        if image.size != self.size:
            even = _even(image.size)
            image = image.crop((0, 0, *even)) if even == self.size else image.resize(self.size)
        pixels = av.VideoFrame.from_ndarray(np.asarray(image.convert("RGB")), format="rgb24")
        frame = self._reformatter.reformat(pixels, format="yuv420p", threads=1)
        self._last = frame.pts = max(self._last + 1, round(time_s / _TIME_BASE))
        frame.time_base = _TIME_BASE
        self._container.mux(self._stream.encode(frame))

    def _open(self, size: Sequence[int]) -> None:
        codec = next(name for name in _CODECS if name in av.codecs_available)
        self._stream = self._container.add_stream(codec, rate=self._fps)
        self.size = _even(size)
        self._stream.width, self._stream.height = self.size
        self._stream.pix_fmt = "yuv420p"
        self._stream.codec_context.time_base = _TIME_BASE
        if codec == "libx264":
            self._stream.options = {"preset": "veryfast", "crf": "20"}

    def close(self) -> None:
        """Write what is left. Idempotent."""
        if self._container is None:
            return
        container, self._container = self._container, None
        try:
            if self._stream is not None:
                container.mux(self._stream.encode(None))
        finally:
            container.close()


def _even(size: Sequence[int]) -> tuple[int, int]:
    """The size with one more column or row where it is odd."""
    return size[0] + size[0] % 2, size[1] + size[1] % 2

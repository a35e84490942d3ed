"""Pictures to the network's input, as declared: decode, resize, place, scale; and the way back for boxes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.errors import SetupError, UsageError
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.vision.declaration import Preprocess

try:
    from PIL import Image, ImageOps, UnidentifiedImageError
except ImportError as error:
    raise SetupError(
        "pictures are read with pillow, which is not installed", hint="`pip install 'trt-engine[eval]'`"
    ) from error

__all__ = ["BadImage", "Placement", "Preprocessor", "open_image", "read_image"]

Array = npt.NDArray[Any]
_FILTERS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


class BadImage(Exception):
    """A picture that cannot be read; the message says why, and the caller names it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """How a picture was put into the network's input: input = picture * scale + offset, in pixels."""

    width: int
    """Of the picture, as is `height`."""
    height: int
    scale_x: float = 1.0
    scale_y: float = 1.0
    left: float = 0.0
    """Of the picture's left edge in the input; negative where it was cut."""
    top: float = 0.0

    def into(self, boxes_xyxy: Array) -> Array:
        """Boxes [..., 4] of the picture, in pixels of the input."""
        return np.asarray(boxes_xyxy, np.float64) * self._scale + self._offset

    def back(self, boxes_xyxy: Array) -> Array:
        """Boxes [..., 4] in pixels of the input, in pixels of the picture; not clipped."""
        return (np.asarray(boxes_xyxy, np.float64) - self._offset) / self._scale

    @property
    def _scale(self) -> Array:
        return np.array([self.scale_x, self.scale_y] * 2)

    @property
    def _offset(self) -> Array:
        return np.array([self.left, self.top] * 2)


class Preprocessor:
    """Pictures to arrays, by one declaration; `dtype` is that of the network's input. Safe from many threads."""

    def __init__(self, declared: Preprocess, dtype: str) -> None:
        self.declared = declared
        self.dtype = numpy_dtype(dtype)
        self._filter = _FILTERS[declared.interpolation]
        levels = np.arange(256, dtype=np.float64)
        # every pixel has one of 256 values: what becomes of each is worked out once, in double precision
        self._tables = [
            self._as_input((levels * declared.scale - mean) / std)
            for mean, std in zip(declared.mean, declared.std, strict=True)
        ]
        pad = declared.pad_value[::-1] if declared.channels == "BGR" else declared.pad_value
        self._pad = pad[0] if declared.channels == "L" else pad
        self._mode = "L" if declared.channels == "L" else "RGB"

    def __call__(self, picture: Image.Image) -> tuple[Array, Placement]:
        """The network's input for one picture, without the batch dimension, and where the picture lies in it."""
        placed, placement = self._placed(picture if picture.mode == self._mode else picture.convert(self._mode))
        pixels_HWC = np.asarray(placed)
        if pixels_HWC.ndim == 2:
            pixels_HWC = pixels_HWC[..., None]
        if self.declared.channels == "BGR":
            pixels_HWC = pixels_HWC[..., ::-1]
        pixels_CHW: Array = np.empty((pixels_HWC.shape[2], *pixels_HWC.shape[:2]), self.dtype)
        for channel, table in enumerate(self._tables):
            # `mode` is what makes it ten times as fast as an index: no entry is looked up twice to be checked
            np.take(table, pixels_HWC[..., channel], out=pixels_CHW[channel], mode="clip")
        if self.declared.layout == "NHWC":
            return np.ascontiguousarray(np.moveaxis(pixels_CHW, 0, -1)), placement
        return pixels_CHW, placement

    def _as_input(self, values: Array) -> Array:
        if self.dtype.kind not in "iu":
            return values.astype(self.dtype)
        limits = np.iinfo(self.dtype)
        return np.clip(np.rint(values), limits.min, limits.max).astype(self.dtype)

    def _placed(self, picture: Image.Image) -> tuple[Image.Image, Placement]:
        height, width = self.declared.size
        if self.declared.resize == "stretch":
            resized = self._resized(picture, width, height)
            return resized, Placement(*picture.size, width / picture.width, height / picture.height)
        if self.declared.resize == "center-crop":
            return self._cropped(picture, width, height)
        factor = min(width / picture.width, height / picture.height)
        wide, tall = (max(1, round(side * factor)) for side in picture.size)
        left, top = 0, 0
        if self.declared.pad_placement == "center":
            left, top = (width - wide) // 2, (height - tall) // 2
        square = Image.new(self._mode, (width, height), self._pad)
        square.paste(self._resized(picture, wide, tall), (left, top))
        return square, Placement(*picture.size, wide / picture.width, tall / picture.height, left, top)

    def _cropped(self, picture: Image.Image, width: int, height: int) -> tuple[Image.Image, Placement]:
        """Resized until the wanted part of it has the size, and that part cut out of the middle.

        As torchvision's `Resize` and `CenterCrop`: the side that fits is rounded, the other one cut to whole pixels.
        """
        wide, tall = (round(side / self.declared.crop_share) for side in (width, height))
        if wide * picture.height >= tall * picture.width:
            tall = max(tall, wide * picture.height // picture.width)
        else:
            wide = max(wide, tall * picture.width // picture.height)
        left, top = round((wide - width) / 2), round((tall - height) / 2)
        part = self._resized(picture, wide, tall).crop((left, top, left + width, top + height))
        return part, Placement(*picture.size, wide / picture.width, tall / picture.height, -left, -top)

    def _resized(self, picture: Image.Image, width: int, height: int) -> Image.Image:
        return picture if picture.size == (width, height) else picture.resize((width, height), self._filter)


def read_image(raw: bytes) -> Image.Image:
    """The picture in the bytes of a file, turned as its EXIF says, as 8-bit RGB or grey; `BadImage` when it is damaged."""
    try:
        with Image.open(io.BytesIO(raw)) as opened:
            opened.load()
            picture = ImageOps.exif_transpose(opened)
    except (OSError, SyntaxError, ValueError, IndexError, OverflowError, MemoryError, *_BOMBS) as error:
        raise BadImage(_reason(error)) from error
    if picture.mode in ("I", "I;16", "I;16B", "I;16L"):  # 16 bits a pixel: `convert` would cut them off at 255
        return Image.fromarray((np.asarray(picture).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return picture if picture.mode in ("RGB", "L") else picture.convert("RGB")


_BOMBS = (Image.DecompressionBombError, Image.DecompressionBombWarning)


def _reason(error: Exception) -> str:
    """What pillow says; not the address of the buffer it was read from."""
    if isinstance(error, UnidentifiedImageError):
        return "no known picture format"
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__


def open_image(path: Path) -> Image.Image:
    """The picture in a file; `UsageError` when it is missing or damaged."""
    try:
        return read_image(path.read_bytes())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read the picture `{path}`: {reason}", hint="give a JPEG or PNG file") from error
    except BadImage as error:
        raise UsageError(f"`{path}` is no picture that can be read: {error}", hint="give a JPEG or PNG file") from error

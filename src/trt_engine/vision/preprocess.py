"""Declared pre-processing: decode, resize, pad or crop, scale; inverse mapping for boxes."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.atomic_io import failed_download, read_bounded
from trt_engine.errors import SetupError, UsageError
from trt_engine.format import library_reason
from trt_engine.limits import IMAGE_PIXELS
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.vision.spec import Preprocess

with contextlib.suppress(ImportError):  # `require_pillow` has the error
    from PIL import Image, ImageOps, UnidentifiedImageError

_PIXEL_BYTES = 15
"""Memory of a decoded pixel: four bytes in Pillow, as many for a turned or converted copy, and parts of more."""


def require_pillow() -> None:
    """Raise `SetupError` where images cannot be read: `infer`, `search` and others run without pillow on arrays."""
    if importlib.util.find_spec("PIL") is None:
        raise SetupError("reading images needs pillow, which is not installed", hint="`pip install 'trt-engine[eval]'`")


class BadImage(Exception):
    """An unreadable image; the message is the reason, without the name."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Mapping of an image into the network input: input = image * scale + offset, in pixels."""

    width: int
    """Image width; `height` likewise."""
    height: int
    scale_x: float = 1.0
    scale_y: float = 1.0
    left: float = 0.0
    """Left edge of the image in the input; negative where it was cropped."""
    top: float = 0.0

    def to_input(self, boxes_xyxy: Array) -> Array:
        """Map boxes [..., 4] from image to input pixels."""
        return np.asarray(boxes_xyxy, np.float64) * self._scale + self._offset

    def to_image(self, boxes_xyxy: Array) -> Array:
        """Map boxes [..., 4] from input to image pixels, unclipped."""
        return (np.asarray(boxes_xyxy, np.float64) - self._offset) / self._scale

    @property
    def _scale(self) -> Array:
        return np.array([self.scale_x, self.scale_y] * 2)

    @property
    def _offset(self) -> Array:
        return np.array([self.left, self.top] * 2)


class Preprocessor:
    """Converts images to input arrays of `dtype` by one declaration. Thread-safe."""

    def __init__(self, spec: Preprocess, dtype: str) -> None:
        require_pillow()
        self.spec = spec
        self.dtype = numpy_dtype(dtype)
        self._filter = Image.Resampling[spec.interpolation.upper()]
        levels = np.arange(256, dtype=np.float64)
        self.levels = [
            self._to_input_dtype((levels * spec.scale - mean) / std)
            for mean, std in zip(spec.mean, spec.std, strict=True)
        ]
        """The value of the input for each of the 256 pixel values, by channel; computed in FP64."""
        pad = spec.pad_value[::-1] if spec.channels == "BGR" else spec.pad_value
        self._pad = pad[0] if spec.channels == "L" else pad
        self._mode = "L" if spec.channels == "L" else "RGB"

    def __call__(self, image: Image.Image) -> tuple[Array, Placement]:
        """The input for one image, without the batch dimension, and the placement of the image in it."""
        placed, placement = self._fit(image if image.mode == self._mode else image.convert(self._mode))
        pixels_HWC = np.asarray(placed)
        if pixels_HWC.ndim == 2:
            pixels_HWC = pixels_HWC[..., None]
        if self.spec.channels == "BGR":
            pixels_HWC = pixels_HWC[..., ::-1]
        pixels_CHW: Array = np.empty((pixels_HWC.shape[2], *pixels_HWC.shape[:2]), self.dtype)
        for channel, table in enumerate(self.levels):
            # `mode` skips bounds checks: ten times as fast as indexing
            np.take(table, pixels_HWC[..., channel], out=pixels_CHW[channel], mode="clip")
        if self.spec.layout == "NHWC":
            return np.ascontiguousarray(np.moveaxis(pixels_CHW, 0, -1)), placement
        return pixels_CHW, placement

    def _to_input_dtype(self, values: Array) -> Array:
        if self.dtype.kind not in "iu":
            return values.astype(self.dtype)
        limits = np.iinfo(self.dtype)
        return np.clip(np.rint(values), limits.min, limits.max).astype(self.dtype)

    def place(self, width: int, height: int) -> tuple[int, int, Placement]:
        """Width and height that an image of this size is resized to, and its place in the input then.

        A center crop is as torchvision's `Resize` and `CenterCrop`: the matched side is rounded, the other one truncated.
        """
        tall, wide = self.spec.size
        if self.spec.resize == "stretch":
            return wide, tall, Placement(width, height, wide / width, tall / height)
        left = top = 0
        if self.spec.resize == "center-crop":
            cut_wide, cut_tall = wide, tall
            wide, tall = (round(side / self.spec.crop_share) for side in (wide, tall))
            if wide * height >= tall * width:
                tall = max(tall, wide * height // width)
            else:
                wide = max(wide, tall * width // height)
            left, top = -round((wide - cut_wide) / 2), -round((tall - cut_tall) / 2)
        else:
            within_wide, within_tall = wide, tall
            factor = min(wide / width, tall / height)
            wide, tall = (max(1, round(side * factor)) for side in (width, height))
            if self.spec.pad_placement == "center":
                left, top = (within_wide - wide) // 2, (within_tall - tall) // 2
        return wide, tall, Placement(width, height, wide / width, tall / height, left, top)

    def _fit(self, image: Image.Image) -> tuple[Image.Image, Placement]:
        height, width = self.spec.size
        wide, tall, placement = self.place(*image.size)
        resized = image if image.size == (wide, tall) else image.resize((wide, tall), self._filter)
        left, top = int(placement.left), int(placement.top)
        if self.spec.resize != "letterbox":
            return resized.crop((-left, -top, width - left, height - top)), placement
        square = Image.new(self._mode, (width, height), self._pad)
        square.paste(resized, (left, top))
        return square, placement


_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
"""Formats that pillow decodes itself: others start programs (EPS) or do not occur in datasets."""


def decoded_nbytes(raw: bytes) -> int:
    """The most bytes of memory that `read_image` and a `Preprocessor` take, by the file's header. Raises `BadImage`."""
    with _opened(raw) as image:
        return image.width * image.height * _PIXEL_BYTES


def read_image(raw: bytes) -> Image.Image:
    """Decode file bytes to an 8-bit RGB or grey image, rotated by EXIF. Raises `BadImage`."""
    with _opened(raw) as opened:
        opened.load()
        picture = ImageOps.exif_transpose(opened)
    if picture.mode in ("I", "I;16", "I;16B", "I;16L"):  # 16 bits a pixel: `convert` would clip them at 255
        return Image.fromarray((np.asarray(picture) >> 8).clip(0, 255).astype(np.uint8))
    return picture if picture.mode in ("RGB", "L") else picture.convert("RGB")


@contextlib.contextmanager
def _opened(raw: bytes) -> Iterator[Image.Image]:
    """The image with its header read; `BadImage` for what is wrong with it, or in the block."""
    require_pillow()
    try:
        with Image.open(io.BytesIO(raw), formats=_FORMATS) as opened:
            if (pixels := opened.width * opened.height) > IMAGE_PIXELS.value:
                raise BadImage(f"it has {pixels} pixels; {IMAGE_PIXELS.hint}")
            yield opened
    except BadImage:
        raise
    except Exception as error:  # a damaged file may raise anything in a decoder
        reason = library_reason(error)
        if isinstance(error, UnidentifiedImageError):  # its message has the buffer's address
            other = failed_download(raw[:64])
            reason = f"it is {other[0]}" if other is not None else "unknown image format"
        raise BadImage(reason) from error


def image_from_array(pixels: Array) -> Image.Image:
    """An image of uint8 pixels [H, W] or [H, W, 3]."""
    return Image.fromarray(pixels)


def open_image(path: Path) -> Image.Image:
    """Decode an image file. Raises `UsageError` when it is missing or damaged."""
    try:
        return read_image(read_bounded(path))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"cannot read the image `{path}`: {reason}", hint="give a JPEG or PNG file") from error
    except BadImage as error:
        raise UsageError(f"`{path}` is not a readable image: {error}", hint="give a JPEG or PNG file") from error

"""Run one image through an engine: feeds, decoded result, drawing of labelled boxes."""

from __future__ import annotations

import colorsys
import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.atomic_io import write_atomic
from trt_engine.errors import UsageError
from trt_engine.records.infer import Detection
from trt_engine.tensors import Signature
from trt_engine.vision.decode import Detections, decode_detections, probabilities, top_classes
from trt_engine.vision.preprocess import BadImage, Placement, Preprocessor, decoded_nbytes, open_image, read_image
from trt_engine.vision.spec import Vision

with contextlib.suppress(ImportError):  # who draws has read an image
    from PIL import Image, ImageDraw, ImageFont


@dataclass(frozen=True, slots=True)
class ImageResult:
    """The decoded outputs for one image."""

    fields: dict[str, Any]
    """Report fields: `detections` or `classes`, and `image_size`."""
    detections: Detections | None


@dataclass(frozen=True, slots=True)
class ImageRunner:
    """An image and its engine feeds."""

    image: Image.Image
    vision: Vision
    feeds: dict[str, npt.NDArray[Any]]
    placement: Placement
    output: str

    @classmethod
    def read(cls, path: Path, vision: Vision, signature: Signature) -> ImageRunner:
        """`parse` of an image file."""
        return cls._prepare(open_image(path), vision, signature)

    @staticmethod
    def decoded_nbytes(raw: bytes) -> int:
        """The most bytes of memory that `parse` takes, by the file's header. Raises `UsageError` for no image."""
        with _readable():
            return decoded_nbytes(raw)

    @classmethod
    def parse(cls, raw: bytes, vision: Vision, signature: Signature) -> ImageRunner:
        """Preprocess a file's bytes to engine feeds, repeated for a fixed batch. Raises `UsageError` for no image."""
        with _readable():
            image = read_image(raw)
        return cls._prepare(image, vision, signature)

    @classmethod
    def _prepare(cls, image: Image.Image, vision: Vision, signature: Signature) -> ImageRunner:
        spec, output = vision.input_spec(signature), vision.output_spec(signature)
        if len(signature.inputs) > 1:
            raise UsageError(
                f"the engine has {len(signature.inputs)} inputs, an image fills one",
                hint="`--input X.npz` with all of them",
            )
        pixels, place = Preprocessor(vision.preprocess, spec.dtype)(image)
        rows = max(spec.shape[0], 1)
        return cls(image, vision, {spec.name: np.repeat(pixels[None], rows, axis=0)}, place, output.name)

    def decode(self, outputs: Mapping[str, Any], min_score: float, top: int) -> ImageResult:
        """Decode outputs to detections with a score of at least `min_score`, or to the `top` classes."""
        declared, output = self.vision.postprocess, np.asarray(outputs[self.output])[:1]
        size = {"image_size": self.image.size}
        if declared.task == "classify":
            best = top_classes(probabilities(output, declared)[0], top)
            classes = tuple(Detection(item.index, declared.name(item.index), item.score) for item in best)
            return ImageResult({"classes": classes, **size}, None)
        found = decode_detections(output, declared, [self.placement])[0].with_min_score(min_score)
        rows = zip(found.classes.tolist(), found.scores.tolist(), found.boxes_xyxy.tolist(), strict=True)
        detections = tuple(Detection(index, declared.name(index), score, tuple(box)) for index, score, box in rows)
        return ImageResult({"detections": detections, **size}, found)

    def draw(self, result: ImageResult, path: Path) -> Path:
        """Write the image with its boxes, or for a classifier with its best class in a corner."""
        declared = self.vision.postprocess
        if result.detections is not None:
            names = [declared.name(index) for index in result.detections.classes.tolist()]
            return save_image(draw_detections(self.image, result.detections, names), path)
        best: Detection = result.fields["classes"][0]
        whole = np.array([[0.0, 0.0, self.image.width - 1.0, self.image.height - 1.0]])
        corner = Detections(whole, np.array([best.score]), np.array([best.index]))
        return save_image(draw_detections(self.image, corner, [best.name]), path)


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except BadImage as error:
        raise UsageError(f"this is not a readable image: {error}", hint="send a JPEG or PNG file") from error


FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""Output formats by suffix."""


def draw_detections(image: Image.Image, detections: Detections, names: Sequence[str]) -> Image.Image:
    """A copy of the image with a box and a label per detection, the best drawn last; `names` has one entry per detection."""
    canvas = image.convert("RGB")
    pen = ImageDraw.Draw(canvas)
    size = max(10, round(min(canvas.size) / 28))
    line = max(1, size // 8)
    font = ImageFont.load_default(size)
    for index in reversed(range(len(detections))):
        x0, y0, x1, y1 = (float(value) for value in detections.boxes_xyxy[index])
        colour = class_colour(int(detections.classes[index]))
        pen.rectangle((x0, y0, x1, y1), outline=colour, width=line)
        text = f"{names[index]} {detections.scores[index]:.2f}"
        left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
        high, wide = bottom - top + 2 * line, right - left + 2 * line
        corner_y = y0 - high if y0 >= high else y0  # above the box where it fits
        corner_x = max(0.0, min(x0, canvas.width - wide))
        pen.rectangle((corner_x, corner_y, corner_x + wide, corner_y + high), fill=colour)
        # black or white, the better contrast (ITU-R BT.601 luma)
        ink = (0, 0, 0) if 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140 else (255, 255, 255)
        pen.text((corner_x + line - left, corner_y + line - top), text, fill=ink, font=font)
    return canvas


def class_colour(index: int) -> tuple[int, int, int]:
    """RGB colour of a class index, the same in every image."""
    red, green, blue = colorsys.hsv_to_rgb((index * 0.61803398875) % 1.0, 0.85, 0.95)  # the golden ratio spreads hues
    return round(red * 255), round(green * 255), round(blue * 255)


def save_image(image: Image.Image, path: Path) -> Path:
    """Write the image atomically, in the format of its suffix."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UsageError(f"a drawing cannot be written to `{path}`", hint="end the name in .png, .jpg or .webp")
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return write_atomic(path, buffer.getvalue())

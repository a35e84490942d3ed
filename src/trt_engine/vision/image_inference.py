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
from trt_engine.vision.decode import Detections, decode_outputs, probabilities, top_classes
from trt_engine.vision.masks import decode_mask
from trt_engine.vision.preprocess import BadImage, Placement, Preprocessor, decoded_nbytes, open_image, read_image
from trt_engine.vision.spec import Postprocess, Vision

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

    image: Image.Image | None
    """None where the pixels are elsewhere: `drawn` is given them."""
    vision: Vision
    feeds: dict[str, npt.NDArray[Any]]
    placement: Placement
    output: str

    @classmethod
    def read(cls, path: Path, vision: Vision, signature: Signature) -> ImageRunner:
        """`parse` of an image file."""
        return cls.prepare(open_image(path), vision, signature)

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
        return cls.prepare(image, vision, signature)

    @classmethod
    def prepare(
        cls,
        image: Image.Image,
        vision: Vision,
        signature: Signature,
        *,
        preprocessor: Preprocessor | None = None,
        rows: int | None = None,
    ) -> ImageRunner:
        """Feeds of a decoded RGB or grey image, `rows` times: as often as the engine's batch has it, once if it is dynamic.

        A `preprocessor` of the same declaration may be passed on from image to image. Raises `UsageError` for an engine
        with several inputs.
        """
        spec, output = vision.input_spec(signature), vision.output_spec(signature)
        if len(signature.inputs) > 1:
            raise UsageError(
                f"the engine has {len(signature.inputs)} inputs, an image fills one",
                hint="`--input X.npz` with all of them",
            )
        pixels, place = (preprocessor or Preprocessor(vision.preprocess, spec.dtype))(image)
        feeds = {spec.name: np.repeat(pixels[None], rows or max(spec.shape[0], 1), axis=0)}
        return cls(image, vision, feeds, place, output.name)

    def decode(self, outputs: Mapping[str, Any], min_score: float, top: int) -> ImageResult:
        """Decode outputs to detections with a score of at least `min_score`, or to the `top` classes."""
        declared = self.vision.postprocess
        size = {"image_size": (self.placement.width, self.placement.height)}
        if declared.task == "classify":
            best = top_classes(probabilities(np.asarray(outputs[self.output])[:1], declared)[0], top)
            classes = tuple(Detection(item.index, declared.name(item.index), item.score) for item in best)
            return ImageResult({"classes": classes, **size}, None)
        (found,) = decode_outputs(outputs, self.vision, [self.placement], min_score=min_score, multi_label=False)
        return ImageResult({"detections": detection_records(found, declared), **size}, found)

    def draw(self, result: ImageResult, path: Path) -> Path:
        """Write the image with its boxes, or for a classifier with its best class in a corner."""
        return save_image(self.drawn(result), path)

    def drawn(self, result: ImageResult, image: Image.Image | None = None) -> Image.Image:
        """The image that `draw` writes; `image` is the one to draw on where it is not here."""
        declared, image = self.vision.postprocess, self.image or image
        assert image is not None
        if result.detections is not None:
            names = [declared.name(index) for index in result.detections.classes.tolist()]
            return draw_detections(image, result.detections, names)
        best: Detection = result.fields["classes"][0]
        whole = np.array([[0.0, 0.0, image.width - 1.0, image.height - 1.0]])
        corner = Detections(whole, np.array([best.score]), np.array([best.index]))
        return draw_detections(image, corner, [best.name])


def detection_records(found: Detections, declared: Postprocess) -> tuple[Detection, ...]:
    """The detections of one image as records, best first."""
    points = None if found.keypoints is None else found.keypoints.tolist()
    return tuple(
        Detection(
            label, declared.name(label), score, tuple(box),
            None if found.masks is None else found.masks[index],
            None if points is None else tuple(map(tuple, points[index])),
        )
        for index, (label, score, box) in enumerate(
            zip(found.classes.tolist(), found.scores.tolist(), found.boxes_xyxy.tolist(), strict=True)
        )
    )  # fmt: skip


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except BadImage as error:
        raise UsageError(f"this is not a readable image: {error}", hint="send a JPEG or PNG file") from error


FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP"}
"""Output formats by suffix."""
_MASK_OPACITY = 110
"""Shade of a mask, of 255."""
_KEYPOINT_SCORE = 0.5
"""Keypoints with less are not drawn: their place is a guess."""


def draw_detections(image: Image.Image, detections: Detections, names: Sequence[str]) -> Image.Image:
    """A copy of the image with a box and a label per detection, the best drawn last; `names` has one entry per detection."""
    canvas = image.convert("RGB")
    for index, mask in enumerate(detections.masks or ()):
        shade = Image.fromarray(decode_mask(mask).astype(np.uint8) * _MASK_OPACITY)
        canvas.paste(class_colour(int(detections.classes[index])), mask=shade)
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
        for x, y, *score in [] if detections.keypoints is None else detections.keypoints[index].tolist():
            if not score or score[0] >= _KEYPOINT_SCORE:
                pen.ellipse((x - line, y - line, x + line, y + line), fill=colour, outline=ink)
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

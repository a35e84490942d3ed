"""One picture through an engine: its feeds, what was found in it, and the drawing of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_engine.errors import UsageError
from trt_engine.records import Detected
from trt_engine.tensors import Signature
from trt_engine.vision.declaration import Vision
from trt_engine.vision.decode import Detections, decode_detections, probabilities, top_classes
from trt_engine.vision.draw import draw, save
from trt_engine.vision.preprocess import Placement, Preprocessor, open_image

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Picture", "Seen"]


@dataclass(frozen=True, slots=True)
class Seen:
    """What an engine said of one picture."""

    fields: dict[str, Any]
    """Of the report: `detections` or `classes`, and `image_size`."""
    detections: Detections | None


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture and how it goes into an engine."""

    image: Image.Image
    vision: Vision
    feeds: dict[str, npt.NDArray[Any]]
    place: Placement
    output: str

    @classmethod
    def read(cls, path: Path, vision: Vision, signature: Signature) -> Picture:
        """The picture in a file as feeds of an engine; an engine of a fixed batch gets it that many times."""
        spec, output = vision.input_of(signature), vision.output_of(signature)
        if len(signature.inputs) > 1:
            raise UsageError(
                f"the engine has {len(signature.inputs)} inputs, a picture is one",
                hint="`--input X.npz` with all of them",
            )
        image = open_image(path)
        pixels, place = Preprocessor(vision.preprocess, spec.dtype)(image)
        rows = max(spec.shape[0], 1)
        return cls(image, vision, {spec.name: np.repeat(pixels[None], rows, axis=0)}, place, output.name)

    def look(self, outputs: Mapping[str, Any], min_score: float, top: int) -> Seen:
        """What the engine's outputs say: detections from `min_score` on, or the `top` classes."""
        declared, output = self.vision.postprocess, np.asarray(outputs[self.output])[:1]
        size = {"image_size": self.image.size}
        if declared.task == "classify":
            best = top_classes(probabilities(output, declared)[0], top)
            classes = tuple(Detected(item.index, declared.name(item.index), item.score) for item in best)
            return Seen({"classes": classes, **size}, None)
        found = decode_detections(output, declared, [self.place])[0].above(min_score)
        rows = zip(found.classes.tolist(), found.scores.tolist(), found.boxes_xyxy.tolist(), strict=True)
        detections = tuple(Detected(index, declared.name(index), score, tuple(box)) for index, score, box in rows)
        return Seen({"detections": detections, **size}, found)

    def draw(self, seen: Seen, path: Path) -> Path:
        """Write the picture with its boxes; of a classifier, the picture with its best class in a corner."""
        declared = self.vision.postprocess
        if seen.detections is not None:
            names = [declared.name(index) for index in seen.detections.classes.tolist()]
            return save(draw(self.image, seen.detections, names), path)
        best: Detected = seen.fields["classes"][0]
        whole = np.array([[0.0, 0.0, self.image.width - 1.0, self.image.height - 1.0]])
        corner = Detections(whole, np.array([best.score]), np.array([best.index]))
        return save(draw(self.image, corner, [best.name]), path)

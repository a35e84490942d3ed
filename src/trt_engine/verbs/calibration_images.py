"""Images as calibration data for every verb, preprocessed as the model declares or as given.

A folder or file of images, and what `evaluate` takes: COCO annotations, a folder for each class, an `.npz` of `images` and
`labels`. Labels are ignored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from trt_engine.arrayfiles import ArrayFileError, open_arrays
from trt_engine.atomic_io import read_bounded
from trt_engine.config.precision import PREPROCESS_PRESETS
from trt_engine.errors import FeedError, ModelError, UsageError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.precision import samples
from trt_engine.vision.spec import Preprocess, Vision, resolve_preprocess, vision_of_model

if TYPE_CHECKING:
    from trt_engine.vision.datasets import Dataset
    from trt_engine.vision.preprocess import Preprocessor

log = logging.getLogger(__name__)

VisionSource = Vision | Preprocess | Path | str
"""Preprocessing of images: a value, the name of a preset, or a JSON file."""
_PREFETCH = 8


@dataclass(frozen=True, slots=True)
class CalibrationInputs:
    """Calibration data, and how it was made from images."""

    calib_data: Any
    """For `open_samples`: what was given, or the rows made of its images."""
    preprocessing: Any = ""
    """For the cache: what makes (or may have made) inputs of images, as plain values, else nothing."""
    provenance: dict[str, Any] | None = None
    """For reports: the same where images were used, its origin under `source`."""


def images_as_inputs(
    model: Model | Path | str, calib_data: Any, preprocess: VisionSource | None = None
) -> CalibrationInputs:
    """The data as the model's inputs; data without images stays as it is.

    Without data the preprocessing is the declared one: a cache may have been made from images. `preprocess` replaces
    what the model declares: a value, a preset's name, a JSON file. Raises `UsageError` for images where nothing
    declares how they become inputs.
    """
    if calib_data is None:
        return CalibrationInputs(None, _require_no_preprocess(model, preprocess))
    named = preprocess if isinstance(preprocess, str | Path) else None
    if not isinstance(calib_data, str | Path) or str(calib_data) == "random" or not Path(calib_data).exists():
        return _pass_through(calib_data, named)
    path = Path(calib_data)
    opened = model if isinstance(model, Model) else open_model(model)
    if _is_folder_with(path, samples.ARRAY_SUFFIXES | samples.RAW_SUFFIXES) or not (
        _contains_images(path) or _is_dataset(path, opened)
    ):
        return _pass_through(calib_data, named)
    if preprocess is not None:
        pixels, source = resolve_preprocess(preprocess, opened.signature), str(named or "given")
    elif (vision := vision_of_model(opened)) is not None:
        pixels, source = vision.preprocess, vision.source
    else:
        raise UsageError(
            f"`{path}` holds images, and `{opened.path}` does not declare how they become inputs",
            hint=f"add `--preprocess {'|'.join(PREPROCESS_PRESETS)}|FILE.json` (`trt-engine docs vision`), "
            "or give the inputs themselves as .npy or .npz files",
        )
    spec = pixels.input_spec(opened.signature)
    samples.require_single_input(opened.signature, f"an image of `{path.name}`")
    from trt_engine.vision.preprocess import Preprocessor

    made = Preprocessor(pixels, spec.dtype)
    if _contains_images(path):
        rows = samples.open_rows(path, opened.signature, lambda file: _read_image(file, made))
    else:
        rows = _dataset_rows(path, spec.name, made)
    return CalibrationInputs(rows, pixels.as_dict(), {"source": source} | pixels.as_dict())


def _pass_through(calib_data: Any, named: Path | str | None) -> CalibrationInputs:
    if named is not None:
        log.warning("`--preprocess %s` is not used: the data is not images, but the inputs themselves", named)
    return CalibrationInputs(calib_data)


def _require_no_preprocess(model: Model | Path | str, preprocess: VisionSource | None) -> Any:
    if preprocess is not None:
        opened = model if isinstance(model, Model) else open_model(model)
        return resolve_preprocess(preprocess, opened.signature).as_dict()
    try:
        vision = vision_of_model(model if isinstance(model, Model) else open_model(model))
    except ModelError:  # reported where the model is opened, or irrelevant
        return ""
    return vision.preprocess.as_dict() if vision is not None else ""


def _is_folder_with(path: Path, suffixes: frozenset[str]) -> bool:
    """A folder that holds such files itself, and no images beside them."""
    if not path.is_dir():
        return False
    found = {item.suffix.lower() for item in path.iterdir() if not item.name.startswith(".")}
    return bool(found & suffixes) and not found & samples.IMAGE_SUFFIXES


def _contains_images(path: Path) -> bool:
    files = path.iterdir() if path.is_dir() else [path]
    return any(item.suffix.lower() in samples.IMAGE_SUFFIXES and not item.name.startswith(".") for item in files)


def _is_dataset(path: Path, model: Model) -> bool:
    """Annotations, folders of images, or arrays with labels that are not an input of the model."""
    if path.is_dir():
        return any(
            item.suffix.lower() == ".json" or item.is_dir() for item in path.iterdir() if not item.name.startswith(".")
        )
    if path.suffix.lower() == ".json":
        return True
    if path.suffix.lower() != ".npz":
        return False
    try:
        with open_arrays(path) as file:
            names = set(file.headers)
    except (OSError, ArrayFileError):
        return False  # reported where the file is read
    return {"images", "labels"} <= names and "labels" not in [spec.name for spec in model.signature.inputs]


def _read_image(file: Path, made: Preprocessor) -> npt.NDArray[Any]:
    from trt_engine.vision.preprocess import BadImage, read_image

    try:
        return made(read_image(read_bounded(file, error=FeedError)))[0]
    except BadImage as error:  # a damaged image is skipped, counted and reported
        raise ValueError(str(error)) from error


def _dataset_rows(path: Path, name: str, made: Preprocessor) -> samples.RowSource:
    from trt_engine.vision.datasets import open_dataset

    dataset = open_dataset(path)

    def make(skipped: dict[str, str]) -> Iterator[tuple[dict[str, npt.NDArray[Any]], str]]:
        yield from _iter_images(dataset, name, made, skipped)

    return samples.RowSource(f"{len(dataset.items)} images of `{path.name}`", make, len(dataset.items))


def _iter_images(
    dataset: Dataset, name: str, made: Preprocessor, skipped: dict[str, str]
) -> Iterator[tuple[dict[str, npt.NDArray[Any]], str]]:
    from trt_engine.vision.datasets import DatasetReader

    reader = DatasetReader(dataset, made, _PREFETCH)
    for batch in reader:
        skipped.update({item.name: item.reason for item in reader.skipped})
        for row, item in enumerate(batch.items):
            yield {name: batch.pixels[row : row + 1]}, item.name
    skipped.update({item.name: item.reason for item in reader.skipped})
    if not reader.images:
        first, why = next(iter(skipped.items()))
        raise FeedError(
            f"none of {len(skipped)} images could be read; the first, `{first}`: {why}",
            hint="check the files that the dataset names",
        )


def calibration_inputs(
    model: Model | Path | str, calib_data: Any, preprocess: VisionSource | samples.PreprocessFunction | None
) -> tuple[CalibrationInputs, samples.PreprocessFunction | None]:
    """The inputs made of images; a `preprocess` function is returned unchanged."""
    if callable(preprocess):
        return CalibrationInputs(calib_data), preprocess
    return images_as_inputs(model, calib_data, preprocess), None

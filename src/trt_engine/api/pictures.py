"""Pictures as calibration data: what a model declares, or what is given instead, makes its inputs of them, in every verb.

A folder or file of pictures, and what `evaluate` takes: COCO annotations, a folder for each class, an `.npz` of `images` and
`labels`. Labels are not looked at.
"""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trt_engine.config import PREPROCESS_PRESETS
from trt_engine.errors import FeedError, ModelError, UsageError
from trt_engine.graph.load import open_model, read_proto
from trt_engine.model import Model
from trt_engine.precision.samples import ARRAYS, IMAGES, RAW, Rows, rows_of, single_input
from trt_engine.vision.declaration import Preprocess, Vision, of_proto, preprocess_from

if TYPE_CHECKING:
    from trt_engine.vision.datasets import Dataset
    from trt_engine.vision.preprocess import Preprocessor

__all__ = ["CalibrationInputs", "Given", "inputs_of"]

log = logging.getLogger(__name__)

Given = Vision | Preprocess | Path | str
"""What says how pictures become inputs: a value, the name of a preset, or a JSON file."""
_READ_AHEAD = 8


@dataclass(frozen=True, slots=True)
class CalibrationInputs:
    """What calibration goes through, and how it was made of pictures."""

    data: Any
    """For `open_samples`: what was given, or the rows made of its pictures."""
    preprocessing: Any = ""
    """For the cache: what makes (or may have made) inputs of pictures, as plain values, else nothing."""
    recorded: dict[str, Any] | None = None
    """For reports: the same where pictures were made into inputs, and under `source` who says so."""


def inputs_of(model: Model | Path | str, data: Any, preprocess: Given | None = None) -> CalibrationInputs:
    """The data as the model's inputs; what holds no pictures stays as it is.

    Without data the preprocessing is the declared one: a cache may have been made of pictures. `preprocess` is in force in
    place of what the model declares: a value, a preset's name, a JSON file. Raises `UsageError` for pictures where nothing
    says how they become inputs.
    """
    if data is None:
        return CalibrationInputs(None, _without_data(model, preprocess))
    named = preprocess if isinstance(preprocess, str | Path) else None
    if not isinstance(data, str | Path) or str(data) == "random" or not Path(data).exists():
        return _as_they_are(data, named)
    path = Path(data)
    opened = model if isinstance(model, Model) else open_model(model)
    if _is_folder_of(path, ARRAYS | RAW) or not (_holds_pictures(path) or _is_dataset(path, opened)):
        return _as_they_are(data, named)
    if preprocess is not None:
        pixels, source = preprocess_from(preprocess, opened.signature), str(named or "given")
    elif (vision := of_proto(read_proto(opened.path), opened.path)) is not None:
        pixels, source = vision.preprocess, vision.source
    else:
        raise UsageError(
            f"`{path}` holds pictures, and `{opened.path}` does not declare how they become inputs",
            hint=f"say it: `--preprocess {'|'.join(PREPROCESS_PRESETS)}|FILE.json` (docs/vision.md), "
            "or give the inputs themselves as .npy or .npz files",
        )
    spec = pixels.input_of(opened.signature)
    single_input(opened.signature, f"a picture of `{path.name}`")
    from trt_engine.vision.preprocess import Preprocessor

    made = Preprocessor(pixels, spec.dtype)
    if _holds_pictures(path):
        rows = rows_of(path, opened.signature, lambda file: _picture(file, made))
    else:
        rows = _rows_of_dataset(path, spec.name, made)
    return CalibrationInputs(rows, pixels.as_dict(), {"source": source} | pixels.as_dict())


def _as_they_are(data: Any, named: Path | str | None) -> CalibrationInputs:
    if named is not None:
        log.warning("`--preprocess %s` is not used: the data is not pictures, but the inputs themselves", named)
    return CalibrationInputs(data)


def _without_data(model: Model | Path | str, preprocess: Given | None) -> Any:
    if preprocess is not None:
        opened = model if isinstance(model, Model) else open_model(model)
        return preprocess_from(preprocess, opened.signature).as_dict()
    path = model.path if isinstance(model, Model) else Path(model)
    try:
        vision = of_proto(read_proto(path), path)
    except ModelError:  # it is told where the model is opened, or does not matter
        return ""
    return vision.preprocess.as_dict() if vision is not None else ""


# ------------------------------------------------------------------------------------------------ what it is


def _is_folder_of(path: Path, suffixes: frozenset[str]) -> bool:
    """A folder that holds such files itself, and no pictures beside them."""
    if not path.is_dir():
        return False
    found = {item.suffix.lower() for item in path.iterdir() if not item.name.startswith(".")}
    return bool(found & suffixes) and not found & IMAGES


def _holds_pictures(path: Path) -> bool:
    files = path.iterdir() if path.is_dir() else [path]
    return any(item.suffix.lower() in IMAGES and not item.name.startswith(".") for item in files)


def _is_dataset(path: Path, model: Model) -> bool:
    """Annotations, folders of pictures, or arrays with labels that are no input of the model."""
    if path.is_dir():
        return any(
            item.suffix.lower() == ".json" or item.is_dir() for item in path.iterdir() if not item.name.startswith(".")
        )
    if path.suffix.lower() == ".json":
        return True
    if path.suffix.lower() != ".npz":
        return False
    try:
        with np.load(path, allow_pickle=False) as archive:
            names = set(archive.files)
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        return False  # it is told where the file is read
    return {"images", "labels"} <= names and "labels" not in [spec.name for spec in model.signature.inputs]


# ------------------------------------------------------------------------------------------------ the rows


def _picture(file: Path, made: Preprocessor) -> npt.NDArray[Any]:
    from trt_engine.vision.preprocess import BadImage, read_image

    try:
        return made(read_image(file.read_bytes()))[0]
    except BadImage as error:  # one damaged picture is left out, counted and said
        raise ValueError(str(error)) from error


def _rows_of_dataset(path: Path, name: str, made: Preprocessor) -> Rows:
    from trt_engine.vision.datasets import open_dataset

    dataset = open_dataset(path)

    def make(skipped: dict[str, str]) -> Iterator[tuple[dict[str, npt.NDArray[Any]], str]]:
        yield from _read(dataset, name, made, skipped)

    return Rows(f"{len(dataset.items)} pictures of `{path.name}`", make, len(dataset.items))


def _read(
    dataset: Dataset, name: str, made: Preprocessor, skipped: dict[str, str]
) -> Iterator[tuple[dict[str, npt.NDArray[Any]], str]]:
    from trt_engine.vision.datasets import Reader

    reader = Reader(dataset, made, _READ_AHEAD)
    for batch in reader:
        skipped.update({item.name: item.reason for item in reader.skipped})
        for row, item in enumerate(batch.items):
            yield {name: batch.pixels[row : row + 1]}, item.name
    skipped.update({item.name: item.reason for item in reader.skipped})
    if not reader.images:
        first, why = next(iter(skipped.items()))
        raise FeedError(
            f"not one of {len(skipped)} pictures could be read; the first, `{first}`: {why}",
            hint="check the files that the dataset names",
        )

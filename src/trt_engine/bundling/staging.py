"""A model and every one of its side files in a clean folder: what a builder finds beside the graph is what belongs to it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from trt_engine.errors import ModelError
from trt_engine.files import digest, explain
from trt_engine.model import Model

__all__ = ["stage"]

_CHUNK = 1 << 30


def stage(model: Model, folder: Path) -> Model:
    """The same model in `folder`, which is made.

    The model was opened, so its side files are known, whole, and inside its folder (`graph.load.external_files`). They are
    copies: onnx and ONNX Runtime refuse weights behind links, hard ones too. `ModelError` when the model is another by now.
    """
    target = folder / model.path.name
    _copy(model.path, target)
    side = []
    for item in model.external:
        goal = folder / item.location
        _copy(item.path, goal)
        side.append(replace(item, path=goal))
    if digest(target, *(item.path for item in side)) != model.digest:
        raise ModelError(
            f"`{model.path}` or its weights changed while they were read",
            hint="wait until the exporter is done, then run the same command again",
        )
    return replace(model, path=target, external=tuple(side))


def _copy(source: Path, target: Path) -> None:
    """A copy, which shares its blocks with the source where the file system can."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with source.open("rb") as old, target.open("wb") as new:
            try:
                while os.copy_file_range(old.fileno(), new.fileno(), _CHUNK):
                    pass
            except OSError:  # between file systems that cannot: the plain way, from where the quick one stopped
                old.seek(new.seek(0, os.SEEK_END))
                shutil.copyfileobj(old, new, 1 << 20)
    except FileNotFoundError as error:
        raise ModelError(f"`{source}` is gone", hint="export it again, or run the command when it is there") from error
    except OSError as error:
        raise explain(error, target) from error

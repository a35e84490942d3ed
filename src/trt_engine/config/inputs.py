"""The `--inputs` option, which every verb that runs a model has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trt_engine.config.settings import opt


def inputs_option(help: str = "values of inputs, a .npz by name or a .npy of one [default: seeded random]") -> Any:
    """The setting `inputs`: a file with the values of some inputs or of all."""
    return opt(None, help, flags="--inputs", parse=Path, metavar="FILE", group="Input", in_key=False)

"""Settings of `convert`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trt_engine.config.settings import Config, check_limits, opt
from trt_engine.errors import UsageError

ConvertTarget = Literal["all", "tensorrt", "onnxruntime"]
EXPORTERS = ("dynamo", "torchscript")
_LOWEST_OPSET, _HIGHEST_OPSET = 9, 26


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig(Config):
    """Settings of `convert`: example inputs, dynamic axes, export, what is written."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.opset is not None and not _LOWEST_OPSET <= self.opset <= _HIGHEST_OPSET:
            raise UsageError(
                f"the opset {self.opset} is not within {_LOWEST_OPSET} to {_HIGHEST_OPSET}", hint="`--opset 20`"
            )
        if self.tolerance is not None and not 0 < self.tolerance < math.inf:
            raise UsageError(
                f"the tolerance is {self.tolerance:g}, expected a number above 0", hint="`--tolerance 1e-4`"
            )

    out: Path | None = opt(None, "the .onnx file to write", flags="-o --out", parse=Path, group="Output")
    inputs: Any = opt(
        None, "an example input: images:2x3x640x640, ids:2x128:int64@0..30521, .npy, .npz (repeatable)",
        flags="--input --inputs", multiple=True, metavar="SPEC|FILE",
    )  # fmt: skip
    dynamic: Any = opt(
        None, "dynamic axes: images:0=batch@1..64,2=height@64..640/32 [default: 0=batch]", multiple=True, metavar="SPEC"
    )
    opset: int | None = opt(None, "ONNX opset [default: 20, or the highest that `--target` takes]")
    target: ConvertTarget = opt("all", "the runtime", choices=get_args(ConvertTarget))
    exporter: Any = opt(
        "auto", "PyTorch's exporter [default: dynamo, then torchscript]", choices=("auto", *EXPORTERS),
        accepts="str | Sequence[str]",
    )  # fmt: skip
    options: Any = opt(
        None, "an argument of the factory or loader", flags="-O", multiple=True, metavar="NAME=VALUE",
        accepts="Mapping[str, Any] | Sequence[str] | None",
    )  # fmt: skip
    allow_frozen_branches: bool = opt(False, "trace a Python `if` on values by the example, with a warning")
    all_outputs: bool = opt(False, "keep training-only outputs of detectors")
    factory: str | None = opt(None, "function that creates the module of a state dict: file.py:factory", metavar="REF")
    simplify: bool = opt(True, "fold constants and deduplicate, verified [default: yes]")
    tolerance: float | None = opt(None, "largest difference over the largest value [default: 1e-4]")
    offline: bool = opt(False, "load hub names only from the cache")
    cache: Path | None = opt(None, "cache folder of hub names", parse=Path, metavar="DIR")
    external_data: bool = opt(False, "write weights to a separate file")
    python: str | None = opt(None, "Python interpreter with TensorFlow", metavar="PATH")
    trust_source: bool = opt(False, "open a source with code, which runs with your permissions")
    overwrite: bool = opt(False, "overwrite existing files", group="Output")

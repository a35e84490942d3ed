"""`quantize`: a model with Q/DQ pairs from calibration data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trt_engine.config.precision import QuantizeConfig
from trt_engine.config.settings import replace_values
from trt_engine.model import Model
from trt_engine.precision import quantize_model as quantisation
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.precision import QuantizeReport
from trt_engine.verbs.calibration_images import calibration_inputs

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import QuantizeSettings


@public_function
def quantize(
    model: Model | Path | str,
    to: str,
    *,
    out: Path | str | None = None,
    config: QuantizeConfig | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: ProgressOption = False,
    **settings: Unpack[QuantizeSettings],
) -> QuantizeReport:
    """Write the model in `to`: int8, fp8, int4, nvfp4 or mxfp8.

    `calib_data` is what calibration sees: a folder or file of images or arrays, an iterable of feeds, or `"random"`, which
    is recorded as such. `preprocess` turns images into inputs instead of the model's declaration: `"imagenet"`, `"yolo"`, a
    JSON file, a `Vision`, or a function of a path, which a `cache` knows by `preprocessing` (any JSON value). `ranges` are
    ranges known already, in place of data. `emulate` is where an FP32 graph goes that computes the same on any CPU.
    `settings` are those of `QuantizeConfig`, by name. Raises `ModelError` when nothing can be quantised. `UsageError` for an
    unknown format or one that `cast` writes, and for `shapes` beside data.
    """
    config = replace_values(config or QuantizeConfig(), settings)
    inputs, function = calibration_inputs(model, config.calib_data, config.preprocess)
    config = replace(
        config, calib_data=inputs.calib_data, preprocess=function,
        preprocessing=config.preprocessing or inputs.preprocessing,
    )  # fmt: skip
    report = quantisation.quantize(model, to, out=out, config=config, overwrite=overwrite, dry_run=dry_run)
    if inputs.provenance is None or report.calibration is None:
        return report
    return replace(report, calibration=report.calibration | {"preprocess": inputs.provenance})

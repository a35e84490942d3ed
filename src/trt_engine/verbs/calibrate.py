"""`calibrate`: ranges of a model's tensors from data, written as a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from trt_engine.config.precision import CalibrateConfig
from trt_engine.config.settings import replace_values
from trt_engine.model import Model
from trt_engine.precision import calibration
from trt_engine.precision.calibration import CalibrationResult
from trt_engine.precision.calibrators import Calibrator
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.verbs.calibration_images import calibration_inputs
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import CalibrateSettings


@public_function
@takes_model("model")
def calibrate(
    model: Model | AnyModel,
    calib_data: Any = None,
    calibrator: Calibrator | str = "mse",
    *,
    config: CalibrateConfig | None = None,
    progress: ProgressOption = False,
    **settings: Unpack[CalibrateSettings],
) -> CalibrationResult:
    """The range of each tensor over the data, for `quantize(ranges=...)`.

    `calib_data` is that of `quantize`, `settings` are those of `CalibrateConfig`. With `cache` a later call for the same
    model, preprocessing, calibrator and tensors needs no data, and one for others is refused. `progress=True` writes the
    batches done to stderr, or gives them to a function that takes a `te.Progress`. Raises `UsageError` without data, and for
    a `cache` with a function as `preprocess` and no `preprocessing`.
    """
    config = replace_values(config or CalibrateConfig(), settings)
    inputs, function = calibration_inputs(on_disk(model), calib_data, config.preprocess)
    config = replace(config, preprocess=function, preprocessing=config.preprocessing or inputs.preprocessing)
    return calibration.calibrate(on_disk(model), inputs.calib_data, calibrator, config=config)

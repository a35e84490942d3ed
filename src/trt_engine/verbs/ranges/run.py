"""`te.ranges`: the range of every tensor, on calibration data."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from trt_engine.config.precision import RangesConfig
from trt_engine.config.settings import replace_values
from trt_engine.model import Model
from trt_engine.precision import tensor_ranges
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.precision import RangesReport
from trt_engine.verbs.calibration_images import calibration_inputs
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import RangesSettings


@public_function
@takes_model("model")
def ranges(
    model: Model | AnyModel,
    calib_data: Any = None,
    *,
    config: RangesConfig | None = None,
    progress: ProgressOption = False,
    **settings: Unpack[RangesSettings],
) -> RangesReport:
    """The range of every floating-point tensor and constant of a model, and what of it FP16, BF16 and FP8 cannot hold.

    Without `calib_data` a few random batches run, and report and log warn of it. `settings` are those of
    `RangesConfig`. A tensor that comes within `headroom` of FP16's largest number is reported as well, and kept out of
    FP16.
    """
    config = replace_values(config or RangesConfig(), settings)
    data = config.calib_data if calib_data is None else calib_data
    inputs, function = calibration_inputs(on_disk(model), data, config.preprocess)
    report = tensor_ranges.ranges(on_disk(model), inputs.calib_data, preprocess=function, config=config)
    return replace(report, preprocess=inputs.provenance)

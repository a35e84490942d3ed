"""`quantize`, `ranges` and `calibrate` over pictures as well: by what the model declares, or by `preprocess`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_engine.api.pictures import CalibrationInputs, Given, inputs_of
from trt_engine.config import QuantizeConfig
from trt_engine.model import Model
from trt_engine.precision import calibrate as calibration
from trt_engine.precision import quantize as quantisation
from trt_engine.precision import ranges as forecast
from trt_engine.precision.calibrate import CalibrationResult, Calibrator
from trt_engine.precision.samples import Preprocess
from trt_engine.records import QuantizeReport, RangesReport
from trt_engine.tensors import Shape

__all__ = ["calibrate", "quantize", "ranges"]


def quantize(
    model: Model | Path | str,
    to: str,
    *,
    out: Path | str | None = None,
    data: Any = None,
    calibrator: Calibrator | str | None = None,
    ranges: CalibrationResult | Mapping[str, float] | None = None,
    cache: Path | str | None = None,
    preprocess: Given | Preprocess | None = None,
    preprocessing: Any = "",
    emulate: Path | str | None = None,
    config: QuantizeConfig | None = None,
    yes: bool = False,
    dry_run: bool = False,
    **settings: Any,
) -> QuantizeReport:
    """Write the model in `to`: int8, fp8, int4, nvfp4 or mxfp8.

    `data` is what calibration sees: a folder or file of pictures or arrays, an iterable of feeds, or `"random"`, which is
    recorded as such. `preprocess` makes inputs of pictures where the model does not declare it, or in place of that:
    `"imagenet"`, `"yolo"`, a JSON file, a `Vision`, or a function of a path, which a `cache` knows by `preprocessing` (any
    JSON value). `ranges` are ranges known already, in place of data. `emulate` is where an FP32 graph goes that computes the
    same on any CPU. `settings` are those of `QuantizeConfig`, by name. Raises `ModelError` when nothing can be quantised.
    """
    inputs, function = _inputs(model, data, preprocess)
    report = quantisation.quantize(
        model, to, out=out, data=inputs.data, calibrator=calibrator, ranges=ranges, cache=cache, preprocess=function,
        preprocessing=preprocessing or inputs.preprocessing, emulate=emulate, config=config, yes=yes, dry_run=dry_run,
        **settings,
    )  # fmt: skip
    if inputs.recorded is None or report.calibration is None:
        return report
    return replace(report, calibration=report.calibration | {"preprocess": inputs.recorded})


def ranges(
    model: Model | Path | str,
    data: Any = None,
    *,
    preprocess: Given | Preprocess | None = None,
    batch: int = 1,
    limit: int | None = None,
    shapes: Mapping[str, Shape] | None = None,
    margin: float = 2.0,
    memory_mib: int = 512,
    seed: int = 0,
) -> RangesReport:
    """The range of every floating-point tensor and constant of a model, and what of it FP16, BF16 and FP8 cannot hold.

    `data` and `preprocess` are those of `quantize`; without data a few random batches run, which says little about real
    values; report and log say so. `margin` is how many times larger than here values may become in use: a tensor that comes
    that close to FP16's largest number is reported as well, and kept out of FP16.
    """
    inputs, function = _inputs(model, data, preprocess)
    report = forecast.ranges(
        model, inputs.data, preprocess=function, batch=batch, limit=limit, shapes=shapes, margin=margin,
        memory_mib=memory_mib, seed=seed,
    )  # fmt: skip
    return replace(report, preprocess=inputs.recorded)


def calibrate(
    model: Model | Path | str,
    data: Any = None,
    calibrator: Calibrator | str = "mse",
    *,
    tensors: Sequence[str] | None = None,
    preprocess: Given | Preprocess | None = None,
    preprocessing: Any = "",
    batch: int = 1,
    limit: int | None = None,
    cache: Path | None = None,
    every: int = 16,
    memory_mib: int = 512,
    progress: Callable[[int, int | None], None] | None = None,
) -> CalibrationResult:
    """The range of each tensor over the data, for `quantize(ranges=...)`.

    `data`, `preprocess` and `preprocessing` are those of `quantize`, `tensors` the activations wanted (None: all
    floating-point ones of the main graph). With `cache` a later call for the same model, preprocessing, calibrator and
    tensors needs no data, and one for others is refused. While it works, the state is beside the cache, written every
    `every` batches, and a call that finds it resumes there. `progress` is called with batches done and planned.
    """
    inputs, function = _inputs(model, data, preprocess)
    return calibration.calibrate(
        model, inputs.data, calibrator, tensors=tensors, preprocess=function,
        preprocessing=preprocessing or inputs.preprocessing, batch=batch, limit=limit, cache=cache, every=every,
        memory_mib=memory_mib, progress=progress,
    )  # fmt: skip


def _inputs(
    model: Model | Path | str, data: Any, preprocess: Given | Preprocess | None
) -> tuple[CalibrationInputs, Preprocess | None]:
    """The inputs made of pictures; a function stays for what reads the files."""
    if callable(preprocess):
        return CalibrationInputs(data), preprocess
    return inputs_of(model, data, preprocess), None

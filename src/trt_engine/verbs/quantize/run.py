"""`quantize`: a model with Q/DQ pairs from calibration data."""

from __future__ import annotations

import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from trt_engine.atomic_io import all_or_nothing
from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.ort_values import run_arrays
from trt_engine.benchmark.speed_check import measure_alternating, slowdown_text
from trt_engine.config.precision import QuantizeConfig
from trt_engine.config.settings import followed, replace_values
from trt_engine.equivalence.parity import open_with_outputs
from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.equivalence.tolerance import lost_text
from trt_engine.errors import TrtEngineError
from trt_engine.graph.load import open_model
from trt_engine.model import Model
from trt_engine.precision import quantize_model as quantisation
from trt_engine.precision.quantize_checks import random_shapes
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.parity import SpeedCheck
from trt_engine.records.precision import QuantizeReport
from trt_engine.reporting.tables import batch_option
from trt_engine.verbs.calibration_images import calibration_inputs
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import QuantizeSettings

log = logging.getLogger(__name__)

_MAX_TIMED_BYTES = 512 << 20


@public_function
@takes_model("model")
@all_or_nothing()
def quantize(
    model: Model | AnyModel,
    to: Literal["int8", "fp8", "int4", "nvfp4", "mxfp8"],
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
    report = quantize_untimed(on_disk(model), to, out=out, config=config, overwrite=overwrite, dry_run=dry_run)
    return report if report.out is None else _judge(report, config)


def quantize_untimed(
    model: Model | Path | str,
    to: str,
    *,
    out: Path | str | None = None,
    config: QuantizeConfig,
    overwrite: bool = False,
    dry_run: bool = False,
) -> QuantizeReport:
    """The same without timing the result beside the model."""
    inputs, function = calibration_inputs(model, config.calib_data, config.preprocess)
    config = replace(
        config, calib_data=inputs.calib_data, preprocess=function,
        preprocessing=config.preprocessing or inputs.preprocessing,
    )  # fmt: skip
    report = quantisation.quantize(model, to, out=out, config=config, overwrite=overwrite, dry_run=dry_run)
    if inputs.provenance is not None and report.calibration is not None:
        report = replace(report, calibration=report.calibration | {"preprocess": inputs.provenance})
    return report


def _judge(report: QuantizeReport, config: QuantizeConfig) -> QuantizeReport:
    """The report with what to do about a result that no longer matches the model, or is not faster where it can be timed."""
    lost = any(lost_text(error) for error in (report.parity or {}).values())
    report = replace(report, next_command=_next_command(report, config, lost))
    speed = _time(report, config) if config.parity and report.integer_kernels is not None else None
    text = slowdown_text(report.to, speed, None) if speed is not None else None
    if text is None:
        return replace(report, speed=speed)
    log.warning("%s", text)
    given = followed(config, "shapes", "inputs") or batch_option(report.model, batch=False, data=config.calib_data)
    following = report.next_command if lost else f"trt-engine build {shlex.quote(report.model)}{given}"
    return replace(report, speed=speed, warnings=(*report.warnings, text), next_command=following)


def _next_command(report: QuantizeReport, config: QuantizeConfig, lost: bool) -> str | None:
    """What finds the layers to leave out, the build where no dataset of images can judge; None for a plain `evaluate`."""
    source, sizes = shlex.quote(report.model), followed(config, "shapes", "inputs")
    written = shlex.quote(report.artifacts.get("emulation") or str(report.out))
    images = any(spec.image_layout for spec in open_model(Path(report.model)).signature.inputs)
    if lost and images and report.to in ("int8", "fp8"):  # what `search` tries
        excluded = ("exclude_nodes", "exclude_types", "exclude_patterns")
        given = followed(config, "calib_data", "inputs", "preprocess", "target", "dynamic", "calibrator", *excluded)
        return f"trt-engine search {source} --to {report.to} --dataset DATASET{given}"
    if lost:
        return f"trt-engine build {source}{sizes or batch_option(report.model, batch=False, data=config.calib_data)}"
    if report.to in ("nvfp4", "mxfp8"):
        return f"trt-engine build {written} --backend tensorrt{sizes}" if sizes else None
    if images:
        vision = followed(config, "preprocess", "inputs")
        return f"trt-engine evaluate {written} --dataset DATASET{vision}" if vision else None
    return f"trt-engine build {written}{sizes or batch_option(str(report.out), data=config.calib_data)}"


def _time(report: QuantizeReport, config: QuantizeConfig) -> SpeedCheck | None:
    """Both models in ONNX Runtime on this processor; None where that is not possible in seconds."""
    assert report.out is not None
    if report.nbytes_before > _MAX_TIMED_BYTES:
        return None
    try:
        model = open_model(report.model)
        feeds = random_inputs(model.path, model.signature, random_shapes(model.signature, 1, config.shapes))
        names = [spec.name for spec in model.signature.outputs]
        sessions = [open_with_outputs(path, names, "all") for path in (Path(report.out), model.path)]
        quantised, plain = (lambda loaded=loaded: run_arrays(loaded, names, feeds) for loaded in sessions)
        return measure_alternating(
            quantised, plain, baseline_name="the model as it was",
            shapes={name: tuple(value.shape) for name, value in feeds.items()},
        )  # fmt: skip
    except TrtEngineError as error:  # an indication: the model itself was compared
        reason: Exception = error
    except session.ERRORS as error:
        reason = error
    log.debug("the quantised model was not timed: %s", reason)
    return None

"""`size`: the number of video streams that an ONNX model sustains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.config.settings import replace_values, take_settings
from trt_engine.errors import CapacityError, UnstableError
from trt_engine.progress import ProgressOption
from trt_engine.public_function import public_function
from trt_engine.records.size import SizeReport
from trt_engine.verbs.given_model import AnyModel, on_disk, takes_model
from trt_engine.verbs.size.config import SizeConfig
from trt_engine.verbs.size.size_plan import plan
from trt_engine.verbs.size.size_run import execute

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import SizeSettings


@public_function
@takes_model("model")
def size(
    model: AnyModel,
    *,
    config: SizeConfig | None = None,
    build: BuildConfig | None = None,
    runtime: RuntimeConfig | None = None,
    progress: ProgressOption = False,
    **values: Unpack[SizeSettings],
) -> SizeReport:
    """Number of video streams a model sustains: inspects, builds, measures, doubles the batch, reports.

    Settings of `SizeConfig` and `BuildConfig` may be given by name: `te.size("model.onnx", max_batch=8)`. All files are in
    the run folder (`artifacts` of the report) before a gate (`strict`, `min_streams`) raises. Raises `UsageError` for
    settings that contradict each other, `CapacityError` for fewer streams than `min_streams`, `UnstableError` for an
    unstable measurement with `strict=True`, `Interrupted` after Ctrl-C.
    """
    given: dict[str, Any] = {**values}
    config = replace_values(config or SizeConfig(), take_settings(given, SizeConfig))
    made = plan(on_disk(model), config, replace_values(build or BuildConfig(), given), runtime)
    report = execute(made)
    gate(report, made.config)
    return report


def gate(report: SizeReport, config: SizeConfig) -> None:
    """Raise `UnstableError` under `strict`, `CapacityError` below `min_streams`."""
    if config.strict and (moved := [result for result in report.batches if not result.stable]):
        reasons = "; ".join(f"batch {result.batch}: {', '.join(result.instability)}" for result in moved)
        raise UnstableError(
            f"the measurement is not stable: {reasons}",
            hint="`-O intra_op_threads=1` and `taskset -c 0` on a CPU, locked clocks on a GPU, or a longer `--duration`",
        )
    if report.video is not None:
        streams, at = report.video.streams, f"from video within {report.video.deadline_ms:g} ms"
    elif report.capacity is None:
        streams, at = report.peak_streams or 0, f"at {report.fps:g} fps"
    else:
        streams, at = report.capacity.streams, f"within {report.capacity.deadline_ms:g} ms"
    if config.min_streams is not None and streams < config.min_streams:
        raise CapacityError(
            f"{streams} streams {at}, {config.min_streams} required",
            hint="a smaller model, a lower precision, or more devices",
        )

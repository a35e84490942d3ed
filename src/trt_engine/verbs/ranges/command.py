"""`trt-engine ranges MODEL --calib-data DATA`: tensors outside the range of FP16, BF16 or FP8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.config.precision import RangesConfig
from trt_engine.errors import UsageError


@options.verb(dry_run=True)
@click.argument("model", type=options.FILE)
@options.config_options(RangesConfig)
@options.out_option("Also write the JSON document to this file.")
@options.overwrite_option
def command(model: Path, out: Path | None, overwrite: bool, dry_run: bool, **values: Any) -> Any:
    """Find tensors of MODEL outside the range of FP16, BF16 or FP8, and the nodes to keep in FP32.

    One FP32 pass over the data, in bounded memory: activations, constants such as -1e9, sums of squares. The
    exit code is 0 for any finding.
    """
    if out is not None and out.exists() and not overwrite:
        raise UsageError(f"`{out}` exists", hint="another name with `-o`, or `--overwrite` to overwrite it")
    config: RangesConfig = options.config_from(RangesConfig, values)
    calib_data = config.calib_data
    if config.preprocess is not None and calib_data is None:
        raise UsageError("`--preprocess` needs images", hint="`--calib-data IMAGES`")
    if config.shapes and calib_data is not None:
        raise UsageError("`--shapes` is for random inputs, and `--calib-data` has its own shapes", hint="leave one out")

    from trt_engine.graph.load import open_model
    from trt_engine.precision.samples import open_samples
    from trt_engine.records.base import write_document
    from trt_engine.records.dry_run import DryRun
    from trt_engine.verbs.calibration_images import images_as_inputs
    from trt_engine.verbs.ranges.run import ranges

    opened = open_model(model)
    if dry_run:
        if calib_data is not None:
            open_samples(
                images_as_inputs(opened, calib_data, config.preprocess).calib_data,
                opened.signature,
                batch=config.batch,
                limit=config.max_samples,
            )
        return DryRun(does=f"run {model} over {calib_data or 'random inputs'}", writes=(str(out),) if out else ())
    report = ranges(opened, config=config)
    if out is not None:
        write_document(out, "ranges", report, command=options.command_line())
    return report

"""`trt-engine cast`: a model in FP16 or BF16, with FP32 where needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.config.precision import CastConfig
from trt_engine.errors import UsageError


@options.verb(dry_run=True)
@click.argument("model", metavar="MODEL", type=options.FILE)
@click.option("--to", type=click.Choice(("fp16", "bf16")), required=True, help="The type to cast to.")
@options.out_option("The .onnx file to write.")
@options.config_options(CastConfig)
@options.overwrite_option
def command(model: Path, to: Any, out: Path | None, dry_run: bool, **values: Any) -> Any:
    """Cast MODEL to FP16 or BF16 with consistent types, and list what stayed in FP32 and why.

    \b
      trt-engine cast model.onnx --to fp16 -o model.fp16.onnx
      trt-engine cast model.onnx --to fp16 --auto-exclude --calib-data images/ --exclude-type Softmax -o model.fp16.onnx
    """
    if out is None and not dry_run:
        raise UsageError("no output file is given", hint=f"`-o {model.with_suffix(f'.{to}.onnx').name}`")
    config: CastConfig = options.config_from(CastConfig, values)
    if config.autocast and dry_run:
        raise UsageError("`--autocast` has no dry run", hint="leave `--dry-run` out")
    if config.preprocess is not None and config.calib_data is None:
        raise UsageError("`--preprocess` needs images", hint="`--calib-data IMAGES`")

    from trt_engine.verbs.cast.run import cast

    return cast(model, to, out=out, config=config, dry_run=dry_run, **values)

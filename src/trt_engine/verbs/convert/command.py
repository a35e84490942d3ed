"""`trt-engine convert`: convert any source to ONNX, verify, simplify and lint it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.config.convert import ConvertConfig
from trt_engine.errors import Interrupted, UsageError


@options.verb(dry_run=True)
@click.argument("source", metavar="SRC")
@click.option("--static", is_flag=True, help="Make all axes static.")
@options.config_options(ConvertConfig)
def command(source: str, static: bool, dry_run: bool, **values: Any) -> Any:
    """Convert SRC to ONNX, and reject a result that differs: frozen batch, hard-coded size, wrong values.

    SRC is a file or folder (ONNX, TorchScript, torch.export, state dict, SavedModel, frozen graph, Keras, TFLite, Hugging
    Face), a Python factory, or a name on a hub. A factory is Python code that is executed.

    \b
      trt-engine convert net.py:build --input images:2x3x640x640 -o net.onnx
      trt-engine convert net.py:build --input images:2x3x640x640 --dynamic images:0=batch@1..64 -O depth=50 -o net.onnx
      trt-engine convert weights.pt --factory net.py:build --input images:2x3x224x224 -o net.onnx
      trt-engine convert org/name --offline -o net.onnx
    """
    if values["out"] is None and not dry_run:
        raise UsageError("no output file is given", hint="`-o model.onnx`")
    config: ConvertConfig = options.config_from(ConvertConfig, values)
    if static and config.dynamic:
        raise UsageError("`--static` and `--dynamic` contradict each other", hint="leave one of them out")
    if static:
        config = replace(config, dynamic={})

    from trt_engine.conversion.convert import convert

    try:
        return convert(source, config, dry_run=dry_run)
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted: the file was written whole, or not at all", hint="the same command converts from the start"
        ) from None

"""`trt-engine quantize`: a model in INT8, FP8, INT4, NVFP4 or MXFP8 with explicit Q/DQ nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.config.precision import QUANTIZED_PRECISIONS, QuantizeConfig


@options.verb(dry_run=True)
@click.argument("model", type=options.FILE, metavar="MODEL")
@click.option("--to", type=click.Choice(QUANTIZED_PRECISIONS), required=True, help="The format.")
@options.config_options(QuantizeConfig)
@options.out_option("The quantised model file.")
@options.overwrite_option
def command(model: Path, to: Any, **values: Any) -> Any:
    """Quantise MODEL for the library that will run it: TensorRT 10 (strongly typed) and 11, or ONNX Runtime.

    \b
      trt-engine quantize model.onnx --to int8 --calib-data images/ -o model.int8.onnx
      trt-engine quantize model.onnx --to int8 --target onnxruntime-cpu --calib-data images/ -o model.cpu.onnx
      trt-engine quantize bert.onnx --to int8 --target onnxruntime-cpu --dynamic -o bert.cpu.onnx
      trt-engine quantize vit.onnx --to int4 --method awq --calib-data data.npz -o vit.int4.onnx
      trt-engine quantize vit.onnx --to nvfp4 --calib-data data.npz --emulate vit.emulated.onnx -o vit.nvfp4.onnx
    """
    config = options.config_from(QuantizeConfig, values)

    from trt_engine.verbs.quantize.run import quantize

    return quantize(model, to, config=config, **values)

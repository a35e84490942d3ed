"""`trt-engine diff BEFORE AFTER`: how two engines differ in structure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_engine.cli import options, verb_command
from trt_engine.cli.output import OutputOptions, print_result

if TYPE_CHECKING:
    pass


@verb_command.verb("diff", short_help="Compare engines: fusions, kernels, types, reformats, time per layer.")
@click.argument("before", metavar="BEFORE", type=options.FILE)
@click.argument("after", metavar="AFTER", type=options.FILE)
@click.option(
    "--layer-times",
    nargs=2,
    type=options.FILE,
    metavar="BEFORE AFTER",
    help="Layer times: two `profile.json` or --exportProfile files of trtexec.",
)
@click.option(
    "--model",
    type=options.FILE,
    metavar="MODEL",
    help="The source ONNX model, to trace ONNX Runtime's nodes.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=20,
    metavar="N",
    help="Print N changes; --json has all [default: 20].",
)
@options.common
def command(
    output_options: OutputOptions,
    before: Path,
    after: Path,
    layer_times: tuple[Path, Path] | None,
    model: Path | None,
    top: int,
) -> int:
    """Compare two engines: fused and split layers, changed types, kernels, shapes and times.

    Each is an engine of TensorRT or ONNX Runtime, an ONNX model, an inspector's JSON (trtexec --exportLayerInfo), or a
    profile.json. Layers are matched by their ONNX nodes, else by name. The exit code is 0 for any difference.

    \b
      trt-engine diff model.onnx model.engine.onnx
      trt-engine diff fp32.engine fp16.engine --layer-times fp32/profile.json fp16/profile.json
    """
    from trt_engine.profiling.diff import diff

    report = diff(before, after, layer_times=layer_times or (None, None), model=model)
    print_result(output_options, "diff", report, top=top)
    return 0

"""`trt-engine diff BEFORE AFTER`: how two engines differ in structure."""

from __future__ import annotations

from pathlib import Path

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result


@options.verb()
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
def command(before: Path, after: Path, layer_times: tuple[Path, Path] | None, model: Path | None, top: int) -> None:
    """Compare two engines: fused and split layers, changed types, kernels, shapes and times.

    Each is an engine of TensorRT or ONNX Runtime, an ONNX model, an inspector's JSON (trtexec --exportLayerInfo), or a
    profile.json. Layers are matched by their ONNX nodes, else by name. The exit code is 0 for any difference.

    \b
      trt-engine diff model.onnx model.engine.onnx
      trt-engine diff fp32.engine fp16.engine --layer-times fp32/profile.json fp16/profile.json
    """
    from trt_engine.verbs.diff.run import diff

    print_result(diff(before, after, layer_times=layer_times or (None, None), model=model), top=top)

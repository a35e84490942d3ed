"""`trt-engine example`: a small detector and an image to try every verb with."""

from __future__ import annotations

import shlex
from pathlib import Path

from trt_engine.cli import options, verb_command
from trt_engine.cli.output import OutputOptions, document, emit


@verb_command.verb("example", short_help="A small detector and an image to try every verb with.")
@options.out_option("The folder [default: example].", hint="name a folder, as `-o example`")
@options.overwrite_option
@options.common
def command(output_options: OutputOptions, out: Path | None, overwrite: bool) -> None:
    """Write detector.onnx, which finds red, green and blue objects, and scene.png, an image with three of them.

    \b
      trt-engine example
      trt-engine size example/detector.onnx
    """
    from trt_engine.verbs.example import IMAGE, example

    model = example(out or Path("example"), overwrite=overwrite)
    image = model.with_name(IMAGE)
    following = shlex.join(["trt-engine", "size", str(model)])
    body = {"model": str(model), "image": str(image), "next_command": following}
    lines = [f"model       {model}", f"image       {image}", f"next        {following}"]
    emit(output_options, document("example", body, command=options.command_line()), "\n".join(lines))

"""`trt-engine example`: a small detector and an image to try every verb with."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import document, emit


@options.verb()
@options.out_option("The folder [default: example].", hint="name a folder, as `-o example`")
@click.option("--video", is_flag=True, help="Also clip.mp4, in which they move.")
@options.overwrite_option
def command(out: Path | None, video: bool, overwrite: bool) -> None:
    """Write detector.onnx, which finds red, green and blue objects, and scene.png, an image with three of them.

    \b
      trt-engine example
      trt-engine size example/detector.onnx
    """
    from trt_engine.verbs.example.run import CLIP, IMAGE, example

    model = example(out or Path("example"), overwrite=overwrite, video=video)
    image = model.with_name(IMAGE)
    following = shlex.join(["trt-engine", "size", str(model)])
    body = {"model": str(model), "image": str(image), "next_command": following}
    lines = [f"model       {model}", f"image       {image}", f"next        {following}"]
    if video:
        clip = body["video"] = str(model.with_name(CLIP))
        lines.insert(2, f"video       {clip}")
    emit(document("example", body), "\n".join(lines))

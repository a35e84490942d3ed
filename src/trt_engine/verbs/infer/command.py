"""`trt-engine infer`: inference from files, an image, a video, or seeded random inputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.config.evaluate import InferConfig
from trt_engine.errors import UsageError


@options.verb(dry_run=True)
@click.argument("path", metavar="ENGINE|MODEL", type=options.FILE)
@click.option("--input", "--inputs", "source", type=options.FILE, metavar="FILE", help=".npy (one input) or .npz.")
@click.option("--random", "random", is_flag=True, help="Seeded random inputs instead of a file.")
@options.config_options(InferConfig)
@options.engine_options(leave_out=("inputs", "batch", "shapes", "workspace_mib", "parity", "parity_rtol", "preprocess"))
def command(path: Path, source: Path | None, random: bool, dry_run: bool, **values: Any) -> Any:
    """Run an ENGINE (or a MODEL, built into the store first) once, or on every frame of a video.

    \b
      trt-engine infer model.engine.onnx --input images.npy -o boxes.npz
      trt-engine infer model.engine.onnx --image photo.jpg -o out.json --draw out.png
      trt-engine infer model.onnx --video clip.mp4 -o drawn.mp4
      trt-engine infer model.onnx --random --batch 4 --repeat 20 --json
    """
    config: InferConfig = options.config_from(InferConfig, values)
    sources = (("--input", source), ("--image", config.image), ("--video", config.video), ("--random", random))
    given = [flag for flag, is_given in sources if is_given]
    if len(given) != 1:
        found = " and ".join(f"`{flag}`" for flag in given)
        found = f"{'both ' if len(given) == 2 else ''}{found} are" if given else "no inputs are"
        hint = "`--input X.npz`, `--image X.jpg`, `--video X.mp4`, or `--random` for seeded random inputs"
        raise UsageError(f"{found} given", hint=hint)
    runtime, build, _ = options.engine_configs(values)

    from trt_engine.verbs.infer import run as infer

    job = infer.plan(path, source, config, runtime, build)
    return job.plan if dry_run else infer.run(job, command=options.command_line())

"""`trt-engine infer`: one inference from files, from an image, or from seeded random inputs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, output, verb_command
from trt_engine.config.evaluate import InferConfig
from trt_engine.errors import UsageError

if TYPE_CHECKING:
    pass


@verb_command.verb()
@click.argument("path", metavar="ENGINE|MODEL", type=options.FILE)
@click.option("--input", "--inputs", "source", type=options.FILE, metavar="FILE", help=".npy (one input) or .npz.")
@click.option("--random", "random", is_flag=True, help="Seeded random inputs instead of a file.")
@options.config_options(InferConfig)
@options.engine_options(leave_out=("inputs", "batch", "shapes", "workspace_mib", "parity", "parity_rtol", "preprocess"))
@options.dry_run_option
@options.common
def command(
    output_options: output.OutputOptions,
    path: Path,
    source: Path | None,
    random: bool,
    dry_run: bool,
    **values: Any,
) -> None:
    """Run an ENGINE once (or a MODEL, built into the store first).

    \b
      trt-engine infer model.engine.onnx --input images.npy -o boxes.npz
      trt-engine infer model.engine.onnx --image photo.jpg -o out.json --draw out.png
      trt-engine infer model.onnx --random --batch 4 --repeat 20 --json
    """
    config: InferConfig = options.config_from(InferConfig, values)
    sources = (("--input", source), ("--image", config.image), ("--random", random))
    given = [flag for flag, is_given in sources if is_given]
    if len(given) != 1:
        found = " and ".join(f"`{flag}`" for flag in given)
        found = f"{'both ' if len(given) == 2 else ''}{found} are" if given else "no inputs are"
        raise UsageError(
            f"{found} given", hint="`--input X.npz`, `--image X.jpg`, or `--random` for seeded random inputs"
        )
    runtime, build, _ = options.engine_configs(values)

    from trt_engine.verbs import infer

    job = infer.plan(path, source, config, runtime, build)
    typed = options.command_line()
    if dry_run:
        output.print_result(output_options, "infer", job.plan)
        return
    report = infer.run(job, command=typed)
    output.print_result(output_options, "infer", report)

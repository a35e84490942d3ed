"""`trt-engine batch ENGINE|MODEL INPUT... -o DIR`: an engine over many rows, into Parquet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options, output
from trt_engine.errors import UsageError
from trt_engine.verbs.batch.config import BatchConfig


@options.verb(dry_run=True)
@click.argument("path", metavar="ENGINE|MODEL", type=options.FILE)
@click.argument("inputs", metavar="INPUT...", nargs=-1, required=True, type=options.FILE)
@options.config_options(BatchConfig)
@options.engine_options(leave_out=("inputs", "batch", "shapes", "workspace_mib", "parity", "parity_rtol", "preprocess"))
@options.out_option("The folder to write.", hint="name a folder, as `-o results`")
def command(path: Path, inputs: tuple[Path, ...], out: Path | None, dry_run: bool, **values: Any) -> None:
    """Run ENGINE over every row of the INPUTs into Parquet (a MODEL is built where the workers are).

    INPUT: images, .npy, .npz, .parquet, .tar of WebDataset, or folders of them. Each input row is one output row, in order;
    one that fails has its reason in the column `error`, and the exit code is 2. The same command resumes.

    \b
      trt-engine batch detector.engine photos -o results
      trt-engine batch ranker.engine.onnx rows.parquet -o results --workers 4
    """
    if out is None:
        raise UsageError("no output folder is given", hint="`trt-engine batch ENGINE INPUT... -o DIR`")
    config: BatchConfig = options.config_from(BatchConfig, values)
    runtime, build, _ = options.engine_configs(values)

    from trt_engine.verbs.batch import run as batch

    job = batch.plan(path, inputs, out, config, runtime, build)
    if dry_run:
        output.print_result(job.plan)
        return
    report = batch.run(job, command=options.command_line())
    output.print_result(report)
    batch.gate(report)

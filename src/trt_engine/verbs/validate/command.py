"""`trt-engine validate ENGINE`: the deferred check of an engine, on a machine that can load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options, output
from trt_engine.config.runtime import RuntimeConfig


@options.verb(dry_run=True)
@click.argument("engine", metavar="ENGINE", type=options.FILE)
@options.config_options(RuntimeConfig, leave_out=("contexts", "streams"))
def command(engine: Path, dry_run: bool, **values: Any) -> None:
    """Compare ENGINE with the reference outputs saved by its build, and write the result into its passport.

    The check of an engine built for a GPU that the build machine lacks is deferred to this command, on a machine with that
    GPU. It needs the engine, its passport (ENGINE.json) and ENGINE.reference.npz, not the model. The exit code is 6 or 7
    for a failure in precision or accuracy, 10 for an engine that cannot be loaded.

    \b
      trt-engine build model.onnx --backend tensorrt-rtx --gpus sm89 -o model.engine
      trt-engine validate model.engine
    """
    from trt_engine.verbs.validate.run import plan_validation, run_validation

    config: RuntimeConfig = options.config_from(RuntimeConfig, values)
    if dry_run:
        output.print_result(plan_validation(engine, config))
        return
    done = run_validation(engine, config)
    output.print_result(done.report)
    if done.error is not None:
        raise done.error

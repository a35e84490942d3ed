"""`trt-engine run PLAN.yaml`: models x precisions x backends x batches in one resumable folder."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.errors import Interrupted, UsageError
from trt_engine.verbs.run.config import RunConfig

log = logging.getLogger("trt_engine.verbs.run.command")


@options.verb(dry_run=True)
@click.argument("plan", metavar="PLAN", type=options.FILE)
@options.config_options(RunConfig)
@click.option("--benchmark", is_flag=True, hidden=True)  # flags of scripts that plans replace
@click.option("--build", is_flag=True, hidden=True)
@click.option("--nsys", is_flag=True, hidden=True)
@click.option("--ncu", is_flag=True, hidden=True)
@click.option("--container-facts", metavar="JSON", hidden=True)
@options.out_option(
    "The run folder; an existing run is resumed [default: runs/YYYYMMDD_HHMMSS].",
    hint="name a folder, as `-o run`",
)
@options.overwrite_option
def command(
    plan: Path, out: Path | None, container_facts: str | None, overwrite: bool, dry_run: bool, **values: Any
) -> int:
    """Build, measure, evaluate and profile every cell of PLAN into one folder, with one report.

    PLAN is a YAML file: `trt-engine docs run` has every key of it.
    A failed cell is reported with its reason, and the others continue. Repeated with the same folder, it does only what is
    missing or has changed, and adds other modes. Exit code: 0 when every cell is done or skipped, 3 when all are skipped,
    the failed cells' code where they agree, else 1.

    \b
      trt-engine run examples/digits/plan.yaml -o run
      trt-engine run plan.yaml -o run --cells '*-int8-*' --modes bench,evaluate
      trt-engine run plan.yaml -o run --container nvcr.io/nvidia/pytorch:25.06-py3
    """
    config = options.config_from(RunConfig, values)
    if spelled := [mode for mode, given in values.items() if given]:  # flags of scripts that plans replace
        if config.modes:
            raise UsageError(f"`--{spelled[0]}` and `--modes` are both given", hint="leave one out")
        config = replace(config, modes=tuple(spelled))

    from trt_engine.verbs.run import run

    typed = options.command_line()
    job = run.prepare(plan, out, config, overwrite=overwrite, container_facts=_container_facts(container_facts))
    if dry_run:
        print_result(run.preview(job))
        return 0
    try:
        summary = run.execute(job, command=typed)
    except Interrupted as stop:
        if stop.partial is None:
            raise
        log.error("%s; %s", stop.message, stop.hint)
        print_result(stop.partial)
        return stop.exit_code
    print_result(summary)
    return run.exit_code(summary.results)


def _container_facts(text: str | None) -> dict[str, str]:
    """Parse the host facts passed into a container."""
    if text is None:
        return {}
    try:
        stated = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`--container-facts` is not JSON: {error}", hint="`--container` sets it") from error
    if not isinstance(stated, dict) or not all(isinstance(value, str) for value in stated.values()):
        raise UsageError("`--container-facts` is not a mapping of strings", hint="`--container` sets it")
    return stated

"""`trt-engine run PLAN.yaml`: models x precisions x backends x batches in one folder, gone on with whatever stops it."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit
from trt_engine.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from trt_engine.cells import CellResult, RunOutlook, RunSummary

__all__ = ["command"]

log = logging.getLogger("trt_engine.cli.run")


@click.command("run", short_help="A plan of many cells in one run folder.")
@click.argument("plan", metavar="PLAN", type=options.FILE)
@click.option(
    "--only", multiple=True, metavar="LABEL", help="Only cells whose label fits, as 'digits-*-b8' (repeatable)."
)
@click.option(
    "--modes", "--mode", "modes", multiple=True, metavar="A,B",
    help="build, bench (or benchmark), evaluate, profile, nsys, ncu, all [the plan's].",
)  # fmt: skip
@click.option("--benchmark", is_flag=True, hidden=True)  # the words of the scripts a plan takes the place of
@click.option("--build", is_flag=True, hidden=True)
@click.option("--nsys", is_flag=True, hidden=True)
@click.option("--ncu", is_flag=True, hidden=True)
@click.option("--fail-fast/--keep-going", default=False, help="Stop at the first cell that fails [--keep-going].")
@click.option("--force", is_flag=True, help="Do all that is asked for again, what is done too.")
@click.option(
    "--container", metavar="IMAGE", help="Run inside this image, with docker or podman; `none` for none [the plan's]."
)
@click.option("--container-facts", metavar="JSON", hidden=True)
@options.out_option(
    "The run's folder; one with a run in it is gone on with [runs/YYYYMMDD_HHMMSS].",
    instead="name a folder, as `-o run`",
)
@options.yes_option
@options.dry_run_option
@options.common
def command(
    talk: Talk,
    plan: Path,
    only: tuple[str, ...],
    modes: tuple[str, ...],
    benchmark: bool,
    build: bool,
    nsys: bool,
    ncu: bool,
    fail_fast: bool,
    force: bool,
    container: str | None,
    container_facts: str | None,
    out: Path | None,
    yes: bool,
    dry_run: bool,
) -> int:
    """Build, measure, evaluate and profile every cell of PLAN (a YAML file, docs/run.md) into one folder, with one report.

    A cell that fails is in the report with its reason, and the others go on. Started again with the same folder it does
    only what is missing or has changed, and adds other modes to what is there. Exit code: 0 when every cell is done or was
    skipped with a reason, the failed cells' own code where they agree, else 1.

    \b
      trt-engine run examples/digits/plan.yaml -o run
      trt-engine run plan.yaml -o run --only '*-int8-*' --modes bench,evaluate
      trt-engine run plan.yaml -o run --container nvcr.io/nvidia/pytorch:25.06-py3
    """
    words = [word.strip() for text in modes for word in text.split(",") if word.strip()]
    given = {"benchmark": benchmark, "build": build, "nsys": nsys, "ncu": ncu}
    if spelled := [word for word, asked in given.items() if asked]:
        if words:
            raise UsageError(f"`--{spelled[0]}` and `--modes` are both given", hint="leave one out")
        words = spelled
    if modes and not words:
        raise UsageError("`--modes` names no mode", hint="`--modes bench,evaluate`")

    from trt_engine.matrix import run

    typed = options.spelled_command()
    if dry_run:
        told = run.outlook(
            plan, out, only=only, modes=words, fail_fast=fail_fast, force=force, yes=yes, in_container=container
        )
        emit(talk, document("run", told, command=typed, warnings=told.warnings), _outlook_text(told))
        return 0
    try:
        summary = run.run_plan(
            plan, out, only=only, modes=words, fail_fast=fail_fast, force=force, yes=yes, in_container=container,
            command=typed, facts=_facts(container_facts),
        )  # fmt: skip
    except Interrupted as stop:
        if stop.partial is None:
            raise
        log.error("%s; %s", stop.message, stop.hint)
        _tell(talk, stop.partial, typed)  # type: ignore[arg-type]
        return stop.exit_code
    _tell(talk, summary, typed)
    return run.exit_code(summary.results)


def _facts(text: str | None) -> dict[str, str]:
    """What the outside of a container tells the inside."""
    if text is None:
        return {}
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"`--container-facts` is no JSON: {error}", hint="`--container` sets it by itself") from error
    if not isinstance(told, dict) or not all(isinstance(value, str) for value in told.values()):
        raise UsageError("`--container-facts` is no mapping of texts", hint="`--container` sets it by itself")
    return told


# ------------------------------------------------------------------------------------------------ for a person


def _tell(talk: Talk, summary: RunSummary, typed: str) -> None:
    emit(talk, document("run", summary, command=typed), _text(summary))


def _text(summary: RunSummary) -> str:
    """One line for each cell, the counts, where everything lies."""
    lines = [f"run         {summary.manifest.title or summary.manifest.name}"]
    if summary.manifest.container:
        lines.append(
            f"container   {summary.manifest.container.get('image')} ({summary.manifest.container.get('digest')})"
        )
    width = max((len(result.spec.label) for result in summary.results), default=0)
    lines += [f"  {result.spec.label:<{width}}  {_line(result)}" for result in summary.results]
    counts = [f"{summary.done} done"]
    counts += [f"{count} {what}" for count, what in ((summary.failed, "FAILED"), (summary.skipped, "skipped")) if count]
    waiting = sum(result.state in ("waiting", "interrupted") for result in summary.results)
    counts += [f"{waiting} not done"] if waiting else []
    counts += [f"{summary.reused} of them there already"] if summary.reused else []
    lines.append(f"cells       {', '.join(counts)}")
    lines.append(f"folder      {summary.folder}")
    lines += [f"{'report' if name != 'run' else 'manifest':<11} {place}" for name, place in summary.artifacts.items()]
    opens = {text: None for result in summary.results for text in result.opens.values()}
    lines += [f"open        {text}" for text in list(opens)[:4]]
    lines += [f"warning     {text}" for text in summary.warnings]
    lines.append(f"next        trt-engine report {shlex.quote(summary.folder)}")
    return "\n".join(lines)


def _line(result: CellResult) -> str:
    from trt_engine.matrix.run import told_of

    if result.state == "done":
        return told_of(result)
    reason, _, hint = (result.reason or "").partition("\nhint: ")
    state = "FAILED" if result.state == "failed" else "not done" if result.state == "waiting" else result.state
    return f"{state}{f': {reason}' if reason and reason != state else ''}{f' ({hint})' if hint else ''}"


def _outlook_text(told: RunOutlook) -> str:
    lines = [f"would run {told.plan} in {told.folder}"]
    width = max((len(cell.spec.label) for cell in told.cells), default=0)
    for cell in told.cells:
        took = f", about {cell.seconds:.0f} s" if cell.seconds is not None else ""
        does = {"run": ", ".join(cell.spec.modes), "keep": "kept", "leave": "left out", "skip": "skipped"}[cell.does]
        target = cell.spec.settings.get("quantize", {}).get("target")
        placed = f", quantised for {target}" if target is not None else ""
        lines.append(f"  {cell.spec.label:<{width}}  {does} ({cell.reason}{placed}{took})")
    if told.seconds is not None:
        lines.append(f"about {told.seconds:.0f} s in all, by earlier records")
    lines += [f"warning: {text}" for text in told.warnings]
    if told.starts:
        lines.append(f"would start {shlex.join(told.starts)}")
    return "\n".join(lines)

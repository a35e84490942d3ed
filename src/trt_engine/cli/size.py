"""`trt-engine size MODEL`: how many video streams a model sustains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options
from trt_engine.cli.output import Talk, document, emit
from trt_engine.config import BuildConfig, SizeConfig

if TYPE_CHECKING:
    from trt_engine.records import SizePlan
    from trt_engine.sizing.streams import Plan

__all__ = ["command"]


@click.command("size", short_help="How many video streams a model sustains.")
@click.argument("model", type=options.FILE)
@options.out_option("Put the tree directly into this folder (default: beside the model, or a run folder under runs/).")
@options.of(SizeConfig)
@options.of(BuildConfig, leave_out=("profiles", "batch"))
@options.yes_option
@options.dry_run_option
@options.common
def command(talk: Talk, model: Path, out: Path | None, yes: bool, dry_run: bool, **values: Any) -> int:
    """How many video streams MODEL sustains: inspect, build, measure, double, report.

    One engine for batch 1 to N (64 first) is built and measured at batch 1 and at N. While more streams would fit than N
    holds, N is doubled, built and measured again. The answer is PEAK_GPU_STREAMS = floor(images/s / fps), an upper bound.

    \b
    models/NAME/model/X.onnx writes to models/NAME/benchmarks/,
    any other MODEL to runs/YYYYMMDD_HHMMSS_X/; -o DIR to DIR.
    """
    config = options.config_from(SizeConfig, values)
    build = options.config_from(BuildConfig, values)

    from trt_engine.sizing import streams, summary

    typed = options.spelled_command()
    plan = streams.plan(model, out=out, config=config, build=build, yes=yes, command=typed)
    if dry_run:
        would = _would_do(plan)
        emit(talk, document("size", would, command=typed), _plan_text(would))
        return 0
    report = streams.run(plan)
    emit(talk, document("size", report, command=typed), summary.text(report))
    streams.gate(report, plan.config)
    return 0


def _would_do(plan: Plan) -> SizePlan:
    """The pre-flight, and every engine and measurement the run may come to; nothing is written."""
    from trt_engine.records import SizePlan
    from trt_engine.sizing.preflight import Preflight

    checks = Preflight(plan.model, plan.layout, plan.config, plan.build, plan.card, plan.batches).run()
    return SizePlan(
        model=str(plan.model.path),
        folder=str(plan.layout.folder),
        engines=tuple(str(plan.layout.engine(batch, dynamic=plan.dynamic)) for batch in plan.batches),
        batches=plan.batches,
        measurements=tuple(sorted({*plan.batches, 1} if plan.dynamic else plan.batches)),
        preflight=checks,
    )


def _plan_text(would: SizePlan) -> str:
    first, *more = would.engines
    lines = [f"would write to: {would.folder}", f"first engine:   {first}"]
    lines += [f"if doubled:     {engine}" for engine in more]
    measured = ", ".join(map(str, would.measurements[:2]))
    lines.append(f"measurements:   batch {measured}" + (", and one for each doubling" if more else ""))
    return "\n".join(lines)

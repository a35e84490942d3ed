"""`trt-engine size MODEL`: how many video streams a model sustains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.config.build import BuildConfig
from trt_engine.verbs.size.config import SizeConfig

if TYPE_CHECKING:
    from trt_engine.records.dry_run import DryRun
    from trt_engine.verbs.size.size_plan import SizeJob


@options.verb(dry_run=True)
@click.argument("model", type=options.FILE)
@options.config_options(SizeConfig)
@options.config_options(BuildConfig, leave_out=("profiles", "batch", "max_p99_ms"))
def command(model: Path, dry_run: bool, **values: Any) -> DryRun | None:
    """Find the number of video streams MODEL sustains: inspect, build, measure, double, report.

    Builds one engine for batch 1 to N (64 first) and measures it at batch 1 and N. While more streams than N are
    sustained, N is doubled. The result is PEAK_GPU_STREAMS = floor(images/s / fps), an upper bound.

    With --deadline-ms also the streams whose frames are inferred in time, the best batching policy, and GPUs for --sources.

    \b
    models/NAME/model/X.onnx writes to models/NAME/benchmarks/,
    any other MODEL to runs/YYYYMMDD_HHMMSS_X/; -o DIR to DIR.
    """
    config = options.config_from(SizeConfig, values)
    build = options.config_from(BuildConfig, values)

    from trt_engine.verbs.size import run as size
    from trt_engine.verbs.size import size_plan, size_run

    typed = options.command_line()
    plan = size_plan.plan(model, config, build, command=typed)
    if dry_run:
        return _plan_record(plan)
    report = size_run.execute(plan)
    print_result(report)
    size.gate(report, plan.config)
    return None


def _plan_record(plan: SizeJob) -> DryRun:
    """The pre-flight checks, and all engines and measurements the run may need."""
    from trt_engine.records.dry_run import DryRun
    from trt_engine.verbs.size.preflight import Preflight

    checks = Preflight(plan.model, plan.layout, plan.config, plan.build, plan.backend_spec, plan.batches).run()
    engines = [str(plan.layout.engine(batch, dynamic=plan.dynamic)) for batch in plan.batches]
    return DryRun(
        does=f"build {engines[0]} and measure it, and one more engine for each doubling of its batch of {plan.batches[0]}",
        writes=(str(plan.layout.folder),),
        settings={
            "engines": engines,
            "batches": plan.batches,
            "measurements": sorted({*plan.batches, 1} if plan.dynamic else plan.batches),
            "preflight": checks,
        }
        | ({"then": str(plan.second.layout.folder)} if plan.second is not None else {}),
    )

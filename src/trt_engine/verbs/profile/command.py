"""`trt-engine profile ENGINE|MODEL`: where the time goes, and what to try next."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options
from trt_engine.command_line.output import print_result
from trt_engine.config.bench import BenchConfig, ProfileConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import Interrupted
from trt_engine.records.dry_run import DryRun

if TYPE_CHECKING:
    from trt_engine.records.profile import ProfileReport

log = logging.getLogger("trt_engine.verbs.profile.command")


@options.verb(dry_run=True)
@click.argument("path", metavar="ENGINE|MODEL", type=options.FILE)
@options.config_options(ProfileConfig)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    metavar="N",
    help="Rows of the printed table [default: 10].",
)
@options.bench_options(
    leave_out=("warmup_s", "warmup_iterations", "iterations", "idle_s", "percentiles", "streams", "strict")
)
def command(path: Path, top: int, dry_run: bool, **values: Any) -> Any:
    """Profile an ENGINE (a MODEL is built into the store first).

    Measures without a profiler, then with the best available one: Nsight Systems, CUPTI, PyTorch's profiler, the backend's
    layer times, or the host clock. Prints the bottleneck and the next experiment.

    \b
      trt-engine profile model.engine.onnx --batch 8 -o profile
      trt-engine profile model.onnx --profiler layers --json
      trt-engine profile model.engine --ncu 3 --peaks
    """
    own: ProfileConfig = options.config_from(ProfileConfig, values)
    config: BenchConfig = options.config_from(BenchConfig, values)
    runtime, build, named = options.engine_configs(values)
    if dry_run:
        return _plan(path, (own, config, runtime, build), named)

    from trt_engine.verbs.profile.run import profile

    try:
        report = profile(
            path, config=config, profile=own, runtime=runtime, build=build, command=options.command_line(), **named
        )
    except Interrupted as stop:
        if stop.partial is None:
            raise
        log.error("%s; it follows", stop.message)
        _print_report(stop.partial, top)  # type: ignore[arg-type]
        return stop.exit_code
    _print_report(report, top)
    return 0


def _print_report(report: ProfileReport, top: int) -> None:
    print_result(report, warnings=report.warnings, top=top)


def _plan(
    path: Path, configs: tuple[ProfileConfig, BenchConfig, RuntimeConfig, BuildConfig], named: Container[str]
) -> DryRun:
    """`--dry-run`: what would be profiled and written, with all checks before measuring."""
    from trt_engine.engine import is_onnx_model
    from trt_engine.verbs.bench.run import planned_inputs
    from trt_engine.verbs.profile.run import default_device, default_run_folder, output_files

    own, config, runtime, build = configs
    bare, shapes = is_onnx_model(path), dict(config.shapes)
    writes = [str(place) for place in output_files(own.out or default_run_folder(path), overwrite=own.overwrite)]
    if bare:
        device = default_device(runtime, build)
    else:
        device, shapes = planned_inputs(path, config, runtime, build, named)
    return DryRun(
        does=f"profile {path} on {device} with {own.profiler or 'the best available profiler'}",
        builds=(str(path),) if bare else (),
        writes=tuple(writes),
        settings={"device": device, "shapes": shapes, "profiler": own.profiler},
    )

"""`trt-engine compare A B ...`: speed difference with an interval, output difference, gates with exit codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from trt_engine.command_line import options, output
from trt_engine.config.bench import BenchConfig, CompareConfig
from trt_engine.errors import Interrupted


@options.verb(dry_run=True)
@click.argument("engines", metavar="ENGINE|MODEL|RECORDS...", nargs=-1, required=True, type=options.FILE)
@options.config_options(CompareConfig)
@options.bench_options(
    leave_out=("warmup_s", "warmup_iterations", "percentiles", "streams"),
    helps={
        "duration_s": "total time for all engines [default: 20s]",
        "iterations": "minimum of queries per burst [default: 2]",
        "seed": "seed of the random inputs and of the measuring order",
    },
)
def command(engines: tuple[Path, ...], dry_run: bool, **values: Any) -> None:
    """Measure engines interleaved and compare them with the first one.

    MODELs are built into the store first. Two records.jsonl of `bench` compare earlier measurements.

    \b
      trt-engine compare fp32.engine.onnx int8.engine.onnx
      trt-engine compare old.engine new.engine --fail-if slower:3% --fail-if error:1e-3
      trt-engine compare new.engine --baseline main.baseline.json --fail-if slower:5%
    """
    own: CompareConfig = options.config_from(CompareConfig, values)
    config: BenchConfig = options.config_from(BenchConfig, values)
    runtime, build, named = options.engine_configs(values)

    from trt_engine.verbs.compare import run as compare
    from trt_engine.verbs.compare.request import parse_request

    typed, request = options.command_line(), parse_request(engines, own, config, runtime, build)
    if dry_run:
        output.print_result(compare.plan(request, named=named))
        return
    try:
        report = compare.run(request, named=named, command=typed)
    except Interrupted as stop:
        if stop.partial is not None:
            output.print_result(stop.partial)
        raise
    output.print_result(report)
    compare.gate(report, strict=config.strict)

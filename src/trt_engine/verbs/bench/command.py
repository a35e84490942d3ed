"""`trt-engine bench`: latency and throughput of an engine under a named protocol, or the values in a log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.command_line import options, output
from trt_engine.config.bench import BenchConfig, BenchRunConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from trt_engine.records.bench import BenchRecord
    from trt_engine.records.dry_run import DryRun

log = logging.getLogger("trt_engine.verbs.bench.command")


@options.verb(dry_run=True)
@click.argument("path", metavar="ENGINE|MODEL", required=False, type=options.FILE)
@options.bench_options()
@options.config_options(BenchRunConfig)
@click.option(
    "--parse-log", "log_file", type=options.FILE, metavar="FILE", help="Parse a log of trtexec or bench instead."
)
@click.option(
    "--log-format", type=click.Choice(["trtexec"]), help="Print the log that scripts read, in trtexec's format."
)
def command(path: Path | None, log_file: Path | None, log_format: str | None, dry_run: bool, **values: Any) -> Any:
    """Measure an ENGINE, or a MODEL that is built into the store first.

    \b
    Closed loop, every sample recorded. Examples:
      trt-engine bench model.engine.onnx --batch 8 --duration 5s -o results
      trt-engine bench model.onnx --protocol trtexec11 --json
      trt-engine bench --parse-log trtexec.log --json
    """
    if log_file is not None:
        return _print_log(log_file, path)
    if path is None:
        raise UsageError("no engine, model or log is given", hint="`trt-engine bench model.onnx`")
    where: BenchRunConfig = options.config_from(BenchRunConfig, values)
    out = where.out
    config: BenchConfig = options.config_from(BenchConfig, values)
    if config.streams > 1:
        log.warning(
            "`--streams %d` seldom helps (2 %% more throughput where 4 were tried): one stream fills the device",
            config.streams,
        )
    runtime, build, named = options.engine_configs(values)
    if dry_run:
        return _plan(path, config, runtime, build, set(named), out)

    from trt_engine.verbs.bench.run import bench

    try:
        record = bench(path, config=config, run=where, runtime=runtime, build=build, **named)
    except Interrupted as stop:
        if stop.partial is None:
            raise
        log.error("%s; what was measured until then follows", stop.message)
        _print_report(stop.partial, out, log_format)  # type: ignore[arg-type]
        return stop.exit_code
    _print_report(record, out, log_format)
    return 0


# ------------------------------------------------------------------------------------------------ text output


def _print_report(record: BenchRecord, out: Path | None, log_format: str | None) -> None:
    from trt_engine.benchmark.trtexec_style_log import render_log
    from trt_engine.records.bench import BenchReport
    from trt_engine.run_folder import RECORDS
    from trt_engine.verbs.bench.run import LOG

    artifacts = {} if out is None else {"records": str(out / RECORDS), "log": str(out / LOG)}
    doc = output.document("bench", BenchReport.of(record, artifacts), warnings=record.warnings)
    output.emit(doc, render_log(record) if log_format else output.result_text(record, artifacts=artifacts))


def _print_log(log_file: Path, path: Path | None) -> int:
    """`--parse-log FILE`: exit code 0 for any parsed log."""
    if path is not None:
        raise UsageError("`--parse-log` reads a log and measures nothing", hint=f"leave `{path}` out")
    from trt_engine.benchmark.trtexec_style_log import read_log

    report, typed = read_log(log_file), options.command_line()
    doc = output.document("bench-log", report, command=typed) | {"invocation": typed}
    if report.producer == "trtexec":
        doc["command"] = report.command  # readers of trtexec's logs expect the banner's name
    output.emit(doc, output.result_text(report))
    return 0


def _plan(
    path: Path, config: BenchConfig, runtime: RuntimeConfig, build: BuildConfig, named: set[str], out: Path | None
) -> DryRun:
    """`--dry-run`: what would be measured and written, with all checks before measuring."""
    from trt_engine.atomic_io import ensure_folder
    from trt_engine.benchmark.measurement_protocols import resolve_protocol
    from trt_engine.engine import is_onnx_model
    from trt_engine.records.dry_run import DryRun
    from trt_engine.run_folder import RECORDS
    from trt_engine.verbs.bench.run import LOG, bench_build_config, planned_inputs
    from trt_engine.verbs.build.run import plan

    shapes: Mapping[str, tuple[int, ...]] = config.shapes
    bare = is_onnx_model(path)
    device = runtime.device or "cpu"
    if bare:
        for text in plan(path, config=bench_build_config(path, config, runtime, build)).warnings:
            log.warning("%s", text)
    else:
        device, shapes = planned_inputs(path, config, runtime, build, named)
    protocol = resolve_protocol(config, device)
    if out is not None:
        ensure_folder(out, dry=True)
    writes = [] if out is None else [str(out / RECORDS), str(out / LOG)]
    return DryRun(
        does=f"measure {path} on {device}, protocol {protocol.name}",
        builds=(str(path),) if bare else (),
        writes=tuple(writes),
        settings={"device": device, "shapes": dict(shapes), "protocol": protocol},
    )

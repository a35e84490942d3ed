"""`trt-engine loadtest`: load on a server or an engine, with a live line on a terminal."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trt_engine.cli import options, output, verb_command
from trt_engine.config.loadtest import LoadtestConfig
from trt_engine.config.settings import setting_names

if TYPE_CHECKING:
    from trt_engine.config.build import BuildConfig
    from trt_engine.config.runtime import RuntimeConfig
    from trt_engine.progress import Progress
    from trt_engine.records.loadtest import LoadtestRecord

_CLEAR = "\r\x1b[K"


@verb_command.verb()
@click.argument("target", metavar="URL|ENGINE|MODEL")
@options.config_options(LoadtestConfig)
@options.engine_options(leave_out={*setting_names(LoadtestConfig), "parity", "parity_rtol", "max_p99_ms"})
@options.dry_run_option
@options.common
def command(output_options: output.OutputOptions, target: str, dry_run: bool, **values: Any) -> None:
    """Load a server of the Open Inference Protocol v2 (http, https, grpc, grpcs), an ENGINE, or a MODEL built first.

    Without `--rate` the loop is closed: a request is sent when one is answered. With it, latency counts from the time
    a request was meant to be sent, so that a server that stops for a second shows it.

    \b
      trt-engine loadtest http://localhost:8000/v2/models/digits --concurrency 8
      trt-engine loadtest grpc://localhost:8001 --model digits --rate 500 --fail-if p99:20ms
      trt-engine loadtest http://localhost:8000 --find-rate p99:20ms -o results
      trt-engine loadtest model.engine.onnx --replay arrivals.txt
    """
    explicit = {name for name, value in values.items() if value is not None and value != ()}
    config: LoadtestConfig = options.config_from(LoadtestConfig, values)
    runtime, build, _ = options.engine_configs(values)

    from trt_engine.load_testing import loadtest
    from trt_engine.load_testing.target import is_url

    place = target if is_url(target) else Path(target)
    if dry_run:
        output.print_result(output_options, "loadtest", loadtest.plan(place, config, runtime, build, explicit))
        return
    record = _run(output_options, place, config, runtime, build, explicit)
    _print_record(output_options, record, config.out)
    loadtest.raise_for_result(record)


def _run(
    output_options: output.OutputOptions,
    target: Path | str,
    config: LoadtestConfig,
    runtime: RuntimeConfig,
    build: BuildConfig,
    explicit: set[str],
) -> LoadtestRecord:
    from trt_engine.load_testing.loadtest import run
    from trt_engine.progress import report_progress

    with _live_line(quiet=output_options.verbosity < 0) as show, report_progress(show or False):
        return run(target, config, runtime, build, explicit)


@contextlib.contextmanager
def _live_line(*, quiet: bool) -> Iterator[Any]:
    """A function that shows the counters of `Progress` on one line of a terminal; None where stderr is none."""
    if quiet or sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return

    def write(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()

    def show(progress: Progress) -> None:
        if progress.done is not None:
            width = shutil.get_terminal_size().columns - 1
            write(_CLEAR + (progress.text[:width] if progress.done < (progress.total or 0) else ""))

    try:
        yield show
    finally:
        write(_CLEAR)


def _print_record(output_options: output.OutputOptions, record: LoadtestRecord, out: Path | None) -> None:
    from trt_engine.records.loadtest import LoadtestReport
    from trt_engine.reporting.report import REPORT_FILES
    from trt_engine.run_folder import LOADTEST

    names = {} if out is None else {"records": LOADTEST, "report": REPORT_FILES[1]}
    artifacts = {name: str((out or Path()) / file) for name, file in names.items()}
    doc = output.document(
        "loadtest", LoadtestReport.of(record, artifacts), command=options.command_line(), warnings=record.warnings
    )
    output.emit(output_options, doc, output.result_text(record, artifacts=artifacts))

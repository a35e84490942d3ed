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

from trt_engine.command_line import options, output
from trt_engine.config.settings import setting_names
from trt_engine.verbs.loadtest.config import LoadtestConfig

if TYPE_CHECKING:
    from trt_engine.progress import Progress
    from trt_engine.records.loadtest import LoadtestRecord

_CLEAR = "\r\x1b[K"


@options.verb(dry_run=True)
@click.argument("target", metavar="URL|ENGINE|MODEL")
@options.config_options(LoadtestConfig)
@options.engine_options(leave_out={*setting_names(LoadtestConfig), "parity", "parity_rtol", "max_p99_ms"})
def command(target: str, dry_run: bool, **values: Any) -> None:
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

    from trt_engine.progress import report_progress
    from trt_engine.verbs.loadtest import run as loadtest
    from trt_engine.verbs.loadtest.target import is_url

    place = target if is_url(target) else Path(target)
    if dry_run:
        output.print_result(loadtest.plan(place, config, runtime, build, explicit))
        return
    with _live_line() as show, report_progress(show or False):
        record = loadtest.run(place, config, runtime, build, explicit)
    _print_record(record, config.out)
    loadtest.raise_for_result(record)


@contextlib.contextmanager
def _live_line() -> Iterator[Any]:
    """A function that shows the counters of `Progress` on one line of a terminal; None where stderr is none."""
    if output.is_quiet() or sys.stderr is None or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
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


def _print_record(record: LoadtestRecord, out: Path | None) -> None:
    from trt_engine.records.loadtest import LoadtestReport
    from trt_engine.reporting.report import REPORT_FILES
    from trt_engine.run_folder import LOADTEST

    names = {} if out is None else {"records": LOADTEST, "report": REPORT_FILES[1]}
    artifacts = {name: str((out or Path()) / file) for name, file in names.items()}
    doc = output.document("loadtest", LoadtestReport.of(record, artifacts), warnings=record.warnings)
    output.emit(doc, output.result_text(record, artifacts=artifacts))

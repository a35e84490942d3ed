"""`compare`: interleaved measurement of engines, their outputs on the same input, and the differences."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from trt_engine.atomic_io import all_or_nothing, ensure_folder
from trt_engine.config.bench import BenchConfig, CompareConfig
from trt_engine.config.build import BuildConfig
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.engine import Engine, is_onnx_model
from trt_engine.errors import AccuracyError, Interrupted, SpeedError, UnstableError
from trt_engine.graph.load import open_model
from trt_engine.progress import ProgressOption, progress_counter
from trt_engine.public_function import public_function
from trt_engine.records.base import write_document
from trt_engine.records.compare import CompareReport, CompareSide
from trt_engine.records.dry_run import DryRun
from trt_engine.reporting.report import REPORT_FILES, write_reports
from trt_engine.verbs.bench.run import open_or_build
from trt_engine.verbs.compare.baseline import compare_records, read_baseline, write_baseline
from trt_engine.verbs.compare.interleave import measure_candidates
from trt_engine.verbs.compare.report import make_report
from trt_engine.verbs.compare.request import CompareRequest, parse_request
from trt_engine.verbs.given_model import takes_model
from trt_engine.verbs.load import merge_run_settings

if TYPE_CHECKING:
    from trt_engine.verbs.settings_types import CompareSettings

log = logging.getLogger(__name__)


@public_function
@takes_model("engines")
def compare(
    *engines: Engine | Path | str,
    compare: CompareConfig | None = None,
    config: BenchConfig | None = None,
    runtime: RuntimeConfig | None = None,
    build: BuildConfig | None = None,
    progress: ProgressOption = False,
    **values: Unpack[CompareSettings],
) -> CompareReport:
    """Compare engines with the first one: speed difference with a confidence interval, and output differences.

    Engines (or bare models, which are built into the store first) are measured interleaved, on the same input. `values`
    are settings of `CompareConfig` (`fail_if=["slower:3%", "p99-slower:5%", "maybe-slower:3%", "error:1e-3"]`,
    `baseline`, a file that `save_baseline` wrote, in place of the first engine, ...), `BenchConfig`, `RuntimeConfig`
    and (for models) `BuildConfig`; `duration_s` is for everything together. Paths of two `records.jsonl` compare
    earlier measurements, which are unpaired.

    Raises `AccuracyError` or `SpeedError` when a rule fails and `UnstableError` with `strict=True`, after everything is
    written; `UsageError` for measurements under different protocols or conditions. `Interrupted` after Ctrl-C has the
    incomplete report as `partial`.
    """
    settings = merge_run_settings(values, runtime, build, compare or CompareConfig(), config or BenchConfig())
    report = run(parse_request(engines, *settings), named=values)
    gate(report, strict=settings[1].strict)
    return report


def run(request: CompareRequest, *, named: Container[str] = (), command: str = "") -> CompareReport:
    """The same without the gates; `named` are the explicit settings, which an engine must match."""
    for name, target in request.writes.items():  # tried before minutes are spent
        ensure_folder(target.parent, by="--save-baseline" if name == "baseline" else "-o")
    if any(request.from_records):
        measured = compare_records(request)
    else:
        for item in request.engines:
            if isinstance(item, Path) and not item.exists():
                Engine.open(item)  # raises before minutes are spent on building the others
        opened = [
            open_or_build(item, request.config, request.runtime, request.build, named) for item in request.engines
        ]
        for engine in opened:
            engine.verify()
        measured = measure_candidates(request, opened, _read_base(request), progress_counter("comparing", "s"))
    report = dataclasses.replace(make_report(request, measured), artifacts=_artifact_paths(request))
    with all_or_nothing():
        if (place := request.writes.get("baseline")) is not None and report.complete:
            write_baseline(place, measured.sides[0], report)
        if (place := request.writes.get("compare")) is not None:
            write_document(place, "compare", report, command=command)
            write_reports(place.parent)
    for text in report.warnings:
        log.warning("%s", text)
    if not report.complete:
        raise Interrupted(
            f"interrupted after {report.blocks} turns of each engine",
            hint="the same command compares again",
            partial=report,
        )
    return report


def _artifact_paths(request: CompareRequest) -> dict[str, str]:
    """The files that are written, by what they are."""
    place = request.writes.get("compare")
    pages = {} if place is None else {name.replace(".", "_"): str(place.with_name(name)) for name in REPORT_FILES}
    return {name: str(path) for name, path in request.writes.items()} | pages


def _read_base(request: CompareRequest) -> CompareSide | None:
    return None if request.options.baseline is None else read_baseline(request.options.baseline)


def plan(request: CompareRequest) -> DryRun:
    """The plan of `run`; raises its early errors. Writes and measures nothing."""
    _read_base(request)
    builds = []
    if any(request.from_records):
        compare_records(request)
    else:
        builds = [str(item) for item in request.engines if is_onnx_model(item)]
        for item in request.engines:
            if isinstance(item, Engine):
                continue
            if is_onnx_model(item):
                open_model(item)
            else:
                Engine.open(item)
    base = request.options.baseline
    named = ", ".join([*([] if base is None else [str(base)]), *request.labels])
    return DryRun(
        does=f"compare {named}: {request.duration_s:g} s in all, reloaded {request.options.restarts} times",
        builds=tuple(builds),
        writes=tuple(_artifact_paths(request).values()),
        settings={"rules": [rule.text for rule in request.rules], "restarts": request.options.restarts},
    )


def gate(report: CompareReport, *, strict: bool = False) -> None:
    """Raise the error of a failed rule: `AccuracyError` before `SpeedError`; `UnstableError` with `strict`."""
    failed = [item for item in report.gates if item.failed]
    outputs = [item.text for item in failed if item.rule.startswith("error")]
    if outputs:
        raise AccuracyError("; ".join(outputs), hint="`trt-engine evaluate` measures the effect on the task's metric")
    if failed:
        raise SpeedError(
            "; ".join(item.text for item in failed),
            hint="`trt-engine profile` of both engines shows where the time goes",
        )
    if strict and not report.stable:
        raise UnstableError(
            f"the comparison is not stable: {'; '.join(report.instability)}",
            hint=next((text for text in report.warnings if text.startswith("for a stable")), "a longer `--duration`"),
        )

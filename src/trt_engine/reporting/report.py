"""`te.report`, and the report files of a run folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from trt_engine.atomic_io import all_or_nothing, open_regular, write_atomic
from trt_engine.errors import UsageError
from trt_engine.public_function import public_function
from trt_engine.records.bench import BenchRecord
from trt_engine.records.profile import ProfileReport
from trt_engine.records.sweep import CellResult
from trt_engine.reporting import html, markdown, text
from trt_engine.reporting.page import build_document
from trt_engine.reporting.run_records import RunRecords
from trt_engine.reporting.speedup import Speedup, Speedups
from trt_engine.run_folder import REPORT
from trt_engine.tensors import suggest

Format = Literal["text", "md", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
REPORT_FILES = ("report.md", "report.html")
"""Report files of every run folder."""
_RENDERERS = {"text": text.render, "md": markdown.render, "html": html.render}


@public_function
def report(folder: Path | str, format: Format = "text") -> str:
    """Render the report of a run folder or archive as text, markdown (`md`) or one HTML page (`html`).

    Raises `UsageError` for an unknown format.
    """
    if format not in FORMATS:
        raise UsageError(f"unknown report format `{format}`", hint=suggest(str(format), FORMATS))
    return render(RunRecords.open(folder), format)


def render(run: RunRecords, format: Format, base: Path | None = None) -> str:
    """Render the report of an opened run; links are relative to `base`, the report's folder."""
    return _RENDERERS[format](build_document(run, base))


@all_or_nothing()
def write_reports(folder: Path) -> dict[str, Path]:
    """Write or replace `report.md` and `report.html` in a run folder; return the paths by name.

    A run of many cells also gets `REPORT.txt`.
    """
    run = RunRecords.open(folder)
    written = {"report.md": render(run, "md"), "report.html": render(run, "html")}
    if run.manifest is not None:
        written[REPORT] = render(run, "text")
    return {name: write_atomic(folder / name, made) for name, made in written.items()}


def check_overwrite(folder: Path, *, overwrite: bool) -> None:
    """Raise `UsageError` if a report would replace another file, unless `overwrite`."""
    for name in REPORT_FILES:
        check_own_file(folder / name, is_own_report, overwrite=overwrite)


def check_own_file(path: Path, is_own: Callable[[Path], bool], *, overwrite: bool) -> None:
    """Raise `UsageError` if a file would be replaced that trt-engine did not write, unless `overwrite`."""
    if path.exists() and not overwrite and not is_own(path):
        raise UsageError(
            f"`{path}` exists and was not written by trt-engine",
            hint="another name with `-o`, or `--overwrite` to overwrite it",
        )


def is_own_report(path: Path) -> bool:
    """True if trt-engine wrote the report, which may then be overwritten."""
    try:
        with open_regular(path) as file:
            head = file.read(4096).decode(errors="replace")
    except OSError:
        return False
    return (
        head.startswith((text.MARK, markdown.MARK))
        or html.MARK in head
        or (head.startswith("{") and '"schema": "trt-engine/report"' in head)
    )


def summarize_run(run: RunRecords) -> dict[str, Any]:
    """The run as JSON data, samples summarized."""
    size = run.size
    stated: dict[str, Any] = {"complete": run.complete, "skipped": list(run.skipped)}
    if size is not None:
        stated |= _pick(
            size, "model engine device backend precision peak_streams images_per_s fps stop_reason batches cliffs"
        )
    stated["measurements"] = [_summarize_bench(record) for record in run.measurements]
    if run.cells:
        stated["cells"] = [_summarize_cell(cell) for cell in run.cells]
        found = Speedups(run.cells, run.manifest.baseline if run.manifest is not None else None)
        stated["speedups"] = [_summarize_speedup(item) for item in found.explanations]
    if run.profile is not None:
        stated["profile"] = _summarize_profile(run.profile)
    if run.comparison is not None:
        stated["compare"] = {
            "sides": [side.label for side in run.comparison.sides],
            "against": [{"label": other.label, "speed": other.speed} for other in run.comparison.comparisons],
            "gates": run.comparison.gates,
            "stable": run.comparison.stable,
            "complete": run.comparison.complete,
        }
    if run.upgrade is not None:
        stated["upgrade"] = _pick(run.upgrade, "old new versions verdict reason exit_code gates")
    return stated


def _summarize_bench(record: BenchRecord) -> dict[str, Any]:
    names = "engine backend device batch queries qps images_per_s stable instability warnings complete started"
    return _pick(record, names) | {"protocol": record.protocol.name, "compute_ms": record.compute_summary()}


def _summarize_cell(cell: CellResult) -> dict[str, Any]:
    stated = _pick(cell.spec, "label model precision backend batch device")
    names = "state reason exit_code engine engine_bytes build_seconds compute_dtype requested_batch images_digest"
    stated |= _pick(cell, names)
    stated["measurement"] = _summarize_bench(cell.bench) if cell.bench is not None else None
    stated["metrics"] = cell.evaluation.metrics if cell.evaluation is not None else None
    stated["profile"] = _summarize_profile(cell.profile) if cell.profile is not None else None
    return stated


def _summarize_speedup(item: Speedup) -> dict[str, Any]:
    steps = [
        {"aspects": stage.aspects, "before": stage.base.spec.label, "after": stage.other.spec.label,
         "factor": stage.factor}
        for stage in item.steps
    ]  # fmt: skip
    ends = {"baseline": item.base.spec.label, "cell": item.other.spec.label}
    return ends | {"factor": item.factor, "doubtful": item.unreliable, "steps": steps}


def _summarize_profile(profile: ProfileReport) -> dict[str, Any]:
    names = "engine backend device batch precision time_breakdown categories bottleneck instruments complete"
    return _pick(profile, names)


def _pick(record: Any, names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names.split()}

"""`te.report`, and the two reports that lie in a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from trt_engine.cells import CellResult
from trt_engine.errors import UsageError
from trt_engine.files import write_whole
from trt_engine.records import BenchRecord
from trt_engine.reporting import html, markdown, text
from trt_engine.reporting.run import Run
from trt_engine.reporting.sections import contents_of
from trt_engine.reporting.speedup import Explained, Speedups
from trt_engine.runfiles import REPORT
from trt_engine.tensors import closest
from trt_engine.traces import ProfileReport

__all__ = ["FORMATS", "Format", "is_ours", "render", "report", "summary", "write_reports"]

Format = Literal["text", "md", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
_FORMS = {"text": text.render, "md": markdown.render, "html": html.render}


def report(folder: Path | str, format: Format = "text") -> str:
    """The report of the run in `folder`, or in an archive of it, as text, markdown (`md`) or one HTML page (`html`)."""
    if format not in FORMATS:
        raise UsageError(f"there is no report format `{format}`", hint=closest(str(format), FORMATS))
    return render(Run.open(folder), format)


def render(run: Run, format: Format, base: Path | None = None) -> str:
    """The report of an opened run; its links lead from `base`, the folder the report will lie in."""
    return _FORMS[format](contents_of(run, base))


def write_reports(folder: Path) -> dict[str, Path]:
    """Write `report.md` and `report.html` into a run's folder, over older ones; the paths by name.

    A run of many cells gets `REPORT.txt` too.
    """
    run = Run.open(folder)
    written = {"report.md": render(run, "md"), "report.html": render(run, "html")}
    if run.manifest is not None:
        written[REPORT] = render(run, "text")
    return {name: write_whole(folder / name, made) for name, made in written.items()}


def is_ours(path: Path) -> bool:
    """True when the file is a report of ours, which may be made anew without asking."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).decode(errors="replace")
    except OSError:
        return False
    return (
        head.startswith((text.MARK, markdown.MARK))
        or html.MARK in head
        or (head.startswith("{") and '"schema": "trt-engine/report"' in head)
    )


def summary(run: Run) -> dict[str, Any]:
    """The run in the keys of the verbs that wrote it, samples summarised, for a program to read."""
    size = run.size
    told: dict[str, Any] = {"complete": run.complete, "skipped": list(run.skipped)}
    if size is not None:
        names = "model engine device backend precision peak_streams images_per_s fps stopped_because batches cliffs"
        told |= {name: getattr(size, name) for name in names.split()}
    told["measurements"] = [_measured(record) for record in run.measurements]
    if run.cells:
        told["cells"] = [_cell(cell) for cell in run.cells]
        found = Speedups(run.cells, run.manifest.baseline if run.manifest is not None else None)
        told["speedups"] = [_speedup(item) for item in found.explained]
    if run.profile is not None:
        told["profile"] = _profiled(run.profile)
    if run.comparison is not None:
        told["compare"] = {
            "sides": [side.label for side in run.comparison.sides],
            "against": [{"label": other.label, "speed": other.speed} for other in run.comparison.against],
            "gates": run.comparison.gates,
            "stable": run.comparison.stable,
            "complete": run.comparison.complete,
        }
    return told


def _measured(record: BenchRecord) -> dict[str, Any]:
    names = "engine backend device batch queries qps images_per_s stable instability warnings complete started"
    told = {name: getattr(record, name) for name in names.split()}
    return told | {"protocol": record.protocol.name, "compute_ms": record.compute()}


def _cell(cell: CellResult) -> dict[str, Any]:
    names = "label model precision backend batch device"
    told: dict[str, Any] = {name: getattr(cell.spec, name) for name in names.split()}
    names = "state reason exit_code engine engine_bytes build_seconds ran_in asked_batch images_digest"
    told |= {name: getattr(cell, name) for name in names.split()}
    told["measurement"] = _measured(cell.bench) if cell.bench is not None else None
    told["metrics"] = cell.evaluated.metrics if cell.evaluated is not None else None
    told["profile"] = _profiled(cell.profile) if cell.profile is not None else None
    return told


def _speedup(item: Explained) -> dict[str, Any]:
    steps = [
        {"aspects": stage.aspects, "before": stage.before.spec.label, "after": stage.after.spec.label,
         "factor": stage.factor}
        for stage in item.stages
    ]  # fmt: skip
    ends = {"baseline": item.base.spec.label, "cell": item.other.spec.label}
    return ends | {"factor": item.factor, "doubtful": item.doubtful, "steps": steps}


def _profiled(profile: ProfileReport) -> dict[str, Any]:
    names = "engine backend device batch precision split categories verdict rungs complete"
    return {name: getattr(profile, name) for name in names.split()}

"""`te.report`, and the two reports that lie in a run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

from trt_engine.errors import UsageError
from trt_engine.files import write_whole
from trt_engine.records import BenchRecord
from trt_engine.reporting import html, markdown, text
from trt_engine.reporting.run import Run
from trt_engine.reporting.sections import contents_of
from trt_engine.tensors import closest

__all__ = ["FORMATS", "Format", "is_ours", "render", "report", "summary", "write_reports"]

Format = Literal["text", "md", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
_FORMS = {"text": text.render, "md": markdown.render, "html": html.render}


def report(folder: Path | str, format: Format = "text") -> str:
    """The report of the run in `folder` as text, markdown (`md`) or one self-contained HTML page (`html`)."""
    if format not in _FORMS:
        raise UsageError(f"there is no report format `{format}`", hint=closest(format, FORMATS))
    return render(Run.open(folder), format)


def render(run: Run, format: Format, base: Path | None = None) -> str:
    """The report of an opened run; its links lead from `base`, the folder the report will lie in."""
    return _FORMS[format](contents_of(run, base))


def write_reports(folder: Path) -> dict[str, Path]:
    """Write `report.md` and `report.html` into a run's folder, over older ones; the paths by name."""
    run = Run.open(folder)
    written = {"report.md": render(run, "md"), "report.html": render(run, "html")}
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
    """The run in the keys of `size` and `bench`, samples summarised, for a program to read."""
    size = run.size
    told: dict[str, Any] = {"complete": run.complete, "skipped": list(run.skipped)}
    if size is not None:
        names = "model engine device backend precision peak_streams images_per_s fps stopped_because batches cliffs"
        told |= {name: getattr(size, name) for name in names.split()}
    told["measurements"] = [_measured(record) for record in run.measurements]
    return told


def _measured(record: BenchRecord) -> dict[str, Any]:
    names = "engine backend device batch queries qps images_per_s stable instability warnings complete started"
    told = {name: getattr(record, name) for name in names.split()}
    return told | {"protocol": record.protocol.name, "compute_ms": record.compute()}

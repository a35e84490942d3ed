"""Results of `deploy`."""

from __future__ import annotations

from collections.abc import Iterator

from trt_engine.records.deploy import DeployReport
from trt_engine.reporting.document import Block, Fact, make_facts
from trt_engine.reporting.results.common import sized


def deploy_report(report: DeployReport) -> Iterator[Block]:
    """Models with their decisions, notes, files, next command."""
    rows: list[Fact] = [("target", report.target), ("folder", report.folder)]
    for model in report.models:
        lines = [f"{model.source} ({model.backend or 'built where it runs'})"]
        lines += [f"{item.name} {item.value}: {item.reason}" for item in model.settings]
        rows.append((model.name, [*lines, *(f"note: {note}" for note in model.notes)]))
    rows += [("note", note) for note in report.notes]
    files = sized(len(report.files), sum(report.files.values()))
    rows += [("would write" if report.dry_run else "files", files), ("next", report.next_command)]
    yield make_facts(*rows)

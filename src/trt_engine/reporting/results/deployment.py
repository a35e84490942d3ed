"""Results of `deploy` and `batch`."""

from __future__ import annotations

from collections.abc import Iterator

from trt_engine.records.batch import BatchPlan, BatchReport
from trt_engine.records.deploy import DeployReport, PreprocessDifference
from trt_engine.reporting.document import Block, Fact, make_facts
from trt_engine.reporting.results.common import sized


def deploy_report(report: DeployReport) -> Iterator[Block]:
    """Models with their decisions, notes, files, next command."""
    rows: list[Fact] = [("target", report.target), ("folder", report.folder)]
    for model in report.models:
        lines = [f"{model.source} ({model.backend or 'built where it runs'})"]
        lines += [f"{item.name} {item.value}: {item.reason}" for item in model.settings]
        rows.append((model.name, [*lines, *(f"note: {note}" for note in model.notes)]))
    rows += [(f"compared with {item.file}", _difference_lines(item)) for item in report.preprocessing]
    rows += [("note", note) for note in report.notes]
    files = sized(len(report.files), sum(report.files.values()))
    rows += [("would write" if report.dry_run else "files", files), ("next", report.next_command)]
    yield make_facts(*rows)


def _difference_lines(item: PreprocessDifference) -> list[str]:
    """What differs, then the numbers."""
    lines = [f"DIFFERS: {text}" for text in item.findings] or ["only the resizing filter differs"]
    if item.mean_levels is not None and item.content_levels is not None:
        lines.append(
            f"mean difference {item.mean_levels:.3g} levels of 255 ({item.content_levels:.3g} inside the image), "
            f"{item.image}"
        )
    return lines


def batch_plan(plan: BatchPlan) -> Iterator[Block]:
    """Rows and parts, and what is done already."""
    yield make_facts(
        ("engine", f"{plan.engine} (a model: built where the workers are)" if plan.needs_build else plan.engine),
        ("rows", f"{plan.rows} of {plan.files} files"),
        ("parts", f"{plan.parts}, {plan.done_parts} done before"),
        ("would write", plan.out),
    )


def batch_report(report: BatchReport) -> Iterator[Block]:
    """Rows in and out, failures, rate, where the rows are."""
    rows: list[Fact] = [
        ("engine", report.engine),
        ("rows", f"{report.rows} of {report.files} files, {report.failed} failed"),
        ("parts", f"{report.parts}, {report.resumed_parts} done before"),
    ]
    if report.rows_per_s is not None:
        rows.append(("rate", f"{report.rows_per_s:.4g} rows/s, {report.workers} workers on {report.nodes} nodes"))
    if report.failures:
        rows.append(("failed", [f"{item.id}: {item.reason}" for item in report.failures]))
    rows.append(("out", report.out))
    yield make_facts(*rows)

"""The page of an upgrade check: verdict, gates, speed, every engine in both versions."""

from __future__ import annotations

from collections.abc import Iterator

from trt_engine.format import MIB, format_or_dash, format_percent
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.upgrade import UpgradeEngine, UpgradeReport
from trt_engine.reporting.document import Block, KeyFigure, Paragraph, Section
from trt_engine.reporting.sections.compare_sections import gates_table, interval_charts, key_figure, speed_table
from trt_engine.reporting.sections.section_helpers import make_table, text_table, to_sentence, varying_columns


def summarize(report: UpgradeReport | None) -> str:
    """`do not upgrade: slower:3%: ...`."""
    return "" if report is None else to_sentence(f"{report.verdict.capitalize()}: {report.reason}")


def key_figures(report: UpgradeReport) -> Iterator[KeyFigure]:
    yield KeyFigure("verdict", report.verdict, f"exit code {report.exit_code}")
    for item in report.items[:2]:
        yield from key_figure(item.comparison)


def upgrade_section(report: UpgradeReport) -> Section:
    """Everything but the layers."""
    blocks: list[Block] = []
    versions = [(name, one or "-", other or "-") for name, (one, other) in report.versions.items()]
    if versions:
        blocks.append(text_table("Versions that differ", ("", "old", "new"), versions))
    blocks.append(gates_table(report.gates))
    comparisons = [item.comparison for item in report.items]
    if charts := tuple(interval_charts("old", comparisons, report.gates)):
        blocks.append(charts)
    blocks += speed_table("old", comparisons)
    if any(comparison.speed for comparison in comparisons):
        blocks.append(Paragraph(to_sentence(report.method)))
    blocks.append(_engine_table(report))
    return Section("upgrade", "Upgrade check", tuple(blocks))


def _engine_table(report: UpgradeReport) -> Block:
    rows = [(item, name, side) for item in report.items for name, side in (("old", item.old), ("new", item.new))]
    columns = [
        ("engine", [item.label for item, _, _ in rows]),
        ("", [name for _, name, _ in rows]),
        ("library", [side.library for _, _, side in rows]),
        ("state", [side.state for _, _, side in rows]),
        ("runs in", [_shares(side) for _, _, side in rows]),
        ("fused", [side.fusions or "-" for _, _, side in rows]),
        ("accuracy", [_accuracy(side) for _, _, side in rows]),
        ("old plan", ["-" if name == "old" else item.compatibility.status for item, name, _ in rows]),
        ("MiB", [format_or_dash(None if (n := side.engine_bytes) is None else n / MIB) for _, _, side in rows]),
        ("median ms", [format_or_dash(side.median_ms) for _, _, side in rows]),
        ("restarts", [str(side.restarts) for _, _, side in rows]),
    ]
    shown = [*columns[:2], *varying_columns(columns[2:])]
    numbers = ("MiB", "median ms", "restarts")
    return make_table("The engines", shown, also=[title for title, _ in shown if title not in numbers])


def _shares(side: UpgradeEngine) -> str:
    ordered = sorted(side.dtype_shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{name} {format_percent(share)}" for name, share in ordered[:3]) or "-"


def _accuracy(side: UpgradeEngine) -> str:
    """The metric, or the largest difference from plain ONNX Runtime."""
    name = next((name for name in MAIN_METRIC.values() if name in side.metrics), None)
    if name is not None:
        return f"{name} {side.metrics[name]:.4f}"
    if side.parity is None or not side.parity.outputs:
        return "-"
    return f"{max(error.max_rel for error in side.parity.outputs.values()):.2g} of the scale"

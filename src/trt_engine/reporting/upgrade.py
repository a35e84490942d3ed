"""`upgrade-check`: its result and its page: verdict, gates, speed, every engine in both versions."""

from __future__ import annotations

from collections.abc import Iterator

from trt_engine.format import MIB, format_or_dash, format_percent
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.upgrade import UpgradeEngine, UpgradeReport
from trt_engine.reporting.compare import gates_table, interval_charts, key_figure, speed_table, structure_section
from trt_engine.reporting.document import Block, KeyFigure, Paragraph, Section, make_facts
from trt_engine.reporting.tables import Columns, make_table, text_table, to_sentence, varying_columns


def upgrade_report(report: UpgradeReport) -> Iterator[Block | Section]:
    """The page of an upgrade check."""
    yield Paragraph(summarize(report))
    yield from upgrade_section(report).blocks
    structure = structure_section([item.comparison for item in report.items])
    yield from [structure] if structure is not None else []
    yield make_facts(("warning", report.warnings), *report.artifacts.items())


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
    sides = [side for _, _, side in rows]
    sizes = [None if side.engine_bytes is None else side.engine_bytes / MIB for side in sides]
    words: Columns = [
        ("library", [side.library for side in sides]),
        ("state", [side.state for side in sides]),
        ("runs in", list(map(_shares, sides))),
        ("fused", [side.fusions or "-" for side in sides]),
        ("accuracy", list(map(_accuracy, sides))),
        ("old plan", ["-" if name == "old" else item.compatibility.status for item, name, _ in rows]),
    ]
    numbers: Columns = [
        ("MiB", list(map(format_or_dash, sizes))),
        ("median ms", [format_or_dash(side.median_ms) for side in sides]),
        ("restarts", [str(side.restarts) for side in sides]),
    ]
    lead = [("engine", [item.label for item, _, _ in rows]), ("", [name for _, name, _ in rows])]
    shown = [*lead, *varying_columns(words)]
    return make_table("The engines", [*shown, *varying_columns(numbers)], words=len(shown))


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

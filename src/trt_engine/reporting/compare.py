"""`compare`, `upgrade-check`, `diff`: results and sections of differences with intervals, outputs, sizes, layers, gates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from trt_engine.config.profiles import Profile
from trt_engine.format import MIB, format_column, format_difference, format_or_dash, format_percent, join_names
from trt_engine.records import compare
from trt_engine.records.evaluate import MAIN_METRIC
from trt_engine.records.upgrade import UpgradeEngine, UpgradeReport
from trt_engine.reporting.bench import make_boxes, stability_fact
from trt_engine.reporting.charts import Chart, GateLimit, Interval, IntervalChart
from trt_engine.reporting.context import ReportContext
from trt_engine.reporting.document import Block, KeyFigure, Notice, Paragraph, Section, Table, make_facts
from trt_engine.reporting.run_records import RunRecords
from trt_engine.reporting.tables import (
    Columns,
    group_by,
    known_columns,
    make_table,
    plural,
    shorten_label,
    text_table,
    to_sentence,
    varying_columns,
)

_MAX_SPANS = 24  # in one chart
_MAX_CHANGES = 25


def compare_report(report: compare.CompareReport) -> Iterator[Block | Section]:
    """The sections of a report on one comparison."""
    context = ReportContext(RunRecords(Path(), comparison=report))
    yield from (Paragraph(sentence) for sentence in [summarize(report)] if sentence)
    yield from compare_section(context, report).blocks
    yield from [section] if (section := structure_section(report.comparisons)) is not None else []
    written = ((name, place) for name, place in report.artifacts.items() if name != "compare")
    ended = None if report.complete else "interrupted"
    yield make_facts(stability_fact(report.stable, report.instability), *written, ("incomplete", ended))


def engine_diff(diff: compare.EngineDiff, top: int = 20) -> Iterator[Block]:
    yield make_facts(
        ("before", f"{diff.before} ({diff.sources[0]})"),
        ("after", f"{diff.after} ({diff.sources[1]})"),
        ("warning", diff.warnings),
        *((name, f"{_build_value(one)} -> {_build_value(other)}") for name, (one, other) in diff.build.items()),
    )
    yield from structure_blocks(diff, top)
    yield make_facts(("layer types not known here, matched by name", ", ".join(diff.unknown_kinds) or None))


def _build_value(value: object) -> str:
    """A setting of a build; profiles as they are typed."""
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "yes", False: "no"}[value]
    try:
        return "; ".join(map(str, msgspec.convert(value, tuple[Profile, ...]))) or "none"
    except msgspec.ValidationError:
        if isinstance(value, dict):
            return ", ".join(f"{name} {_build_value(item)}" for name, item in value.items())
        return ", ".join(map(_build_value, value)) if isinstance(value, list | tuple) else str(value)


# ------------------------------------------------------------------------------------------------ the report


def key_figures(report: compare.CompareReport) -> Iterator[KeyFigure]:
    for other in report.comparisons[:3]:
        yield from key_figure(other)


def key_figure(other: compare.Comparison) -> Iterator[KeyFigure]:
    """Its speed by the median, or by the metric there is."""
    metric = next((metric for metric in other.speed if metric.metric == "median"), next(iter(other.speed), None))
    if metric is None:
        return
    span, found = metric.slower_pct, metric.verdict != "no difference found"
    value, low, high = map(format_difference, (span.value, span.low, span.high))
    estimate = f"{value} % ({low} to {high} %, {format_percent(span.level)})"
    yield KeyFigure(
        f"{other.label}, by {metric.metric}",
        f"{metric.factor:.2f}× {metric.verdict}" if found else metric.verdict,
        estimate if found else f"{estimate}; {metric.verdict}",
    )


def summarize(report: compare.CompareReport | None) -> str:
    """One sentence per engine compared with the first."""
    if report is None or not report.sides:
        return ""
    return " ".join(text for other in report.comparisons[:3] if (text := compare.headline(report, other)))


def notices(report: compare.CompareReport) -> Iterator[Notice]:
    if not report.complete:
        yield Notice("The comparison was interrupted; what was measured until then stands below.")
    yield from (Notice(f"Gate {gate.rule}: {gate.text}") for gate in report.gates if gate.failed)
    if not report.stable:
        yield Notice(f"The comparison is not stable: {'; '.join(report.instability) or 'the samples moved'}")


def compare_section(context: ReportContext, report: compare.CompareReport) -> Section:
    base = report.sides[0] if report.sides else None
    name = base.label if base else "the first engine"
    blocks: list[Block] = [Paragraph(_verdict_sentence(name, other)) for other in report.comparisons[:_MAX_SPANS]]
    charts: list[Chart] = list(interval_charts(name, report.comparisons, report.gates))
    samples = [(s.label, s.record.compute_ms) for s in report.sides if s.record is not None and s.record.compute_ms]
    if len(samples) > 1:
        charts.append(make_boxes("compare-boxes", samples))
    if charts:
        blocks.append(tuple(charts))
    blocks += speed_table(name, report.comparisons)
    kept = f" The base was read from {report.baseline}." if report.baseline else ""
    method = f"{to_sentence(report.method)} {plural(report.blocks, 'block')} each, {report.order}.{kept}"
    blocks.append(Paragraph(method))
    if report.gates:
        blocks.append(gates_table(report.gates))
    blocks += _engine_table(context, report)
    blocks += _output_blocks(report)
    return Section("compare", "Comparison", tuple(blocks))


def speed_table(base: str, comparisons: Sequence[compare.Comparison]) -> Iterator[Table]:
    """Every metric against the base, with its interval."""
    rows = [_metric_row(other.label, metric) for other in comparisons for metric in other.speed]
    if rows:
        caption = f"Against {base}, per cent of it with the interval: more than zero is slower, of throughput too"
        columns = ("engine", "", shorten_label(base, 24), "this", "slower %", "from", "to", "would find %", "verdict")
        yield Table(caption, columns, tuple(rows), frozenset((0, 1, 8)))


def _metric_row(label: str, metric: compare.MetricDifference) -> tuple[str, ...]:
    span = metric.slower_pct
    values = (f"{format_or_dash(value)} {metric.unit}" for value in (metric.baseline, metric.other))
    interval = (format_difference(value, 2) for value in (span.value, span.low, span.high))
    return (label, metric.metric, *values, *interval, format_or_dash(metric.min_detectable_pct), metric.verdict)


def gates_table(gates: Sequence[compare.GateResult]) -> Table:
    """The gates, and what was found; those that did not hold are marked."""
    states = ["failed" if gate.failed else "held" if gate.evaluated else "not judged" for gate in gates]
    rows = [(gate.rule, state, gate.text) for gate, state in zip(gates, states, strict=True)]
    return text_table("Gates", ("gate", "", "found"), rows, [at for at, state in enumerate(states) if state != "held"])


def _verdict_sentence(base: str, other: compare.Comparison) -> str:
    label = other.label
    if not other.speed:
        return f"{label} was not timed against {base}."
    parts = []
    for metric in other.speed:
        span = metric.slower_pct
        if metric.verdict == "no difference found":
            least = metric.min_detectable_pct
            would = f", where one of {format_or_dash(least)} % would be" if least else ""
            parts.append(f"{metric.metric}: no difference found{would}")
        else:
            low, high = sorted((abs(span.low), abs(span.high)))
            amount = f"{format_or_dash(abs(span.value))} % ({format_or_dash(low)} to {format_or_dash(high)} %)"
            parts.append(f"{metric.metric}: {amount} {metric.verdict}")
    return f"{label} against {base}: {'; '.join(parts)}."


def interval_charts(
    base: str, comparisons: Sequence[compare.Comparison], gates: Sequence[compare.GateResult]
) -> Iterator[IntervalChart]:
    """The intervals of every metric, with the limits of the gates."""
    found = [(other.label, metric) for other in comparisons for metric in other.speed][:_MAX_SPANS]
    if not found:
        return
    spans = []
    for label, metric in found:
        by, name = metric.slower_pct, f"{label}: {metric.metric}" if len(comparisons) > 1 else metric.metric
        spans.append(Interval(name, by.low, by.value, by.high, by.excludes_zero))
    metrics = [metric.metric for _, metric in found]
    limits = [  # a gate such as `slower:3%` is a line beside the intervals of its metric
        GateLimit(gate.rule, gate.limit, tuple(at for at, metric in enumerate(metrics) if metric == gate.metric))
        for gate in gates
        if gate.limit is not None and gate.metric in metrics
    ]
    level = found[0][1].slower_pct.level
    yield IntervalChart(
        "intervals",
        f"Difference from {base}, with {format_percent(level)} intervals",
        "← faster · % of the base · slower →",
        "%",
        tuple(spans),
        tuple(dict.fromkeys(limits)),
    )


def _engine_table(context: ReportContext, report: compare.CompareReport) -> Iterator[Block]:
    sides = report.sides
    if not sides:
        return
    graphs = [side.graph_dtype or side.precision for side in sides]
    columns: Columns = [
        ("engine", [side.label for side in sides]),
        ("runs in", [side.precision for side in sides]),
        *([("graph", graphs)] if any(side.graph_dtype for side in sides) else []),
        ("file", [context.display_path(side.engine)[0] for side in sides]),
        ("backend", [side.backend for side in sides]),
        ("device", [side.device for side in sides]),
    ]
    sizes: list[tuple[str, list[float | None]]] = []
    for what in ("engine", "weights", "memory"):
        values = [getattr(side, f"{what}_bytes") for side in sides]
        sizes.append((f"{what} MiB", [None if n is None else n / MIB for n in values]))
    yield make_table("The engines", [*columns, *known_columns(sizes)], words=len(columns))


def _output_blocks(report: compare.CompareReport) -> Iterator[Block]:
    rows = [
        (other, other.output_names[index] if index < len(other.output_names) else str(index), error)
        for other in report.comparisons
        for index, error in enumerate(other.outputs)
    ]
    if rows:
        names = [other.label for other, _, _ in rows]
        worst = ["" if error.channel is None else str(error.channel) for _, _, error in rows]
        columns: Columns = [
            *varying_columns([("engine", names)]),
            ("output", [name for _, name, _ in rows]),
            *([("worst channel", worst)] if any(worst) else []),
            ("max abs", [f"{error.max_abs:.3g}" for _, _, error in rows]),
            ("mean abs", [f"{error.mean_abs:.3g}" for _, _, error in rows]),
            ("of channel's scale", [f"{error.max_rel:.3g}" for _, _, error in rows]),
            ("cosine", [f"{error.cosine:.6f}" for _, _, error in rows]),
        ]
        lead = len(columns) - 4
        if any(other.top1_agreement for other in report.comparisons):
            same = [
                100 * share if (share := other.top1_agreement.get(name)) is not None else None
                for other, name, _ in rows
            ]
            columns.append(("best class same %", format_column(same)))
        yield make_table("Output differences", columns, words=lead)
    for other in report.comparisons:
        if other.outputs_note:
            yield Notice(f"Outputs of {other.label}: {other.outputs_note}", "info")


def structure_section(comparisons: Sequence[compare.Comparison]) -> Section | None:
    """Structural differences of the engines."""
    found = [(other.label, other.structure) for other in comparisons if other.structure is not None]
    blocks = [block for label, diff in found for block in structure_blocks(diff, _MAX_CHANGES, f"{label}: ")]
    return Section("structure", "What changed inside", tuple(blocks)) if blocks else None


def structure_blocks(diff: compare.EngineDiff, most: int, label: str = "") -> Iterator[Block]:
    """Counts before and after, and the changes, those alike in one row."""
    counts = tuple(
        (item.name, f"{item.before:,}", f"{item.after:,}", format_difference(item.after - item.before, 0))
        for item in diff.counts
        if not label or item.before != item.after
    )
    if counts:
        columns = ("of", "before", "after", "difference")
        yield Table(f"{label}counts before and after", columns, counts, frozenset((0,)))
    alike = group_by(diff.changes, lambda change: (change.change, change.text))
    shown = list(alike.values())[:most]
    more = f"; the first {len(shown)} of {len(alike)} kinds, `--json` has all" if len(alike) > len(shown) else ""
    caption = f"{label}{len(diff.changes)} changed, {plural(diff.unchanged, 'layer')} the same{more}"
    if not shown:
        yield Paragraph(f"{caption}.")
        return
    before = [_total_ms(change.before_ms for change in group) for group in shown]
    after = [_total_ms(change.after_ms for change in group) for group in shown]
    yield make_table(
        caption,
        [
            ("times", [str(len(group)) for group in shown]),
            ("change", [group[0].change for group in shown]),
            ("what", [" ".join(shorten_label(word, 32) for word in group[0].text.split()) for group in shown]),
            ("layer", [_changed_layers(group) for group in shown]),
            *known_columns([("before ms", before), ("after ms", after)]),
        ],
        also=("change", "what", "layer"),
    )
    yield from (Notice(to_sentence(text), "info") for text in diff.warnings if label)


def _changed_layers(changes: Sequence[compare.LayerChange]) -> str:
    """The layer names, of the first of several equal changes."""
    first = changes[0]
    one, other = (_layer_names(names) for names in (first.before, first.after))
    layers = one or other if one == other or not one or not other else f"{one} -> {other}"
    return f"{f'{first.module}: ' if first.module else ''}{layers}{', ...' if len(changes) > 1 else ''}"


def _total_ms(times: Iterable[float | None]) -> float | None:
    known = [ms for ms in times if ms is not None]
    return sum(known) if known else None


def _layer_names(names: Sequence[str]) -> str:
    text = join_names([f"`{name}`" for name in names], 3)
    return text if len(text) <= 100 else f"{text[:60]}…{text[-39:]}"


# ------------------------------------------------------------------------------------------------ upgrade-check


def upgrade_report(report: UpgradeReport) -> Iterator[Block | Section]:
    """The page of an upgrade check."""
    yield Paragraph(summarize_upgrade(report))
    yield from upgrade_section(report).blocks
    structure = structure_section([item.comparison for item in report.items])
    yield from [structure] if structure is not None else []
    yield make_facts(("warning", report.warnings), *report.artifacts.items())


def summarize_upgrade(report: UpgradeReport | None) -> str:
    """`do not upgrade: slower:3%: ...`."""
    return "" if report is None else to_sentence(f"{report.verdict.capitalize()}: {report.reason}")


def upgrade_figures(report: UpgradeReport) -> Iterator[KeyFigure]:
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
    blocks.append(_table_of_engines(report))
    return Section("upgrade", "Upgrade check", tuple(blocks))


def _table_of_engines(report: UpgradeReport) -> Block:
    rows = [(item, name, side) for item in report.items for name, side in (("old", item.old), ("new", item.new))]
    sides = [side for _, _, side in rows]
    sizes = [None if side.engine_bytes is None else side.engine_bytes / MIB for side in sides]
    words: Columns = [
        ("library", [side.library for side in sides]),
        ("state", [side.state for side in sides]),
        ("runs in", list(map(_dtype_shares, sides))),
        ("fused", [side.fusions or "-" for side in sides]),
        ("accuracy", list(map(_side_accuracy, sides))),
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


def _dtype_shares(side: UpgradeEngine) -> str:
    ordered = sorted(side.dtype_shares.items(), key=lambda share: -share[1])
    return ", ".join(f"{name} {format_percent(share)}" for name, share in ordered[:3]) or "-"


def _side_accuracy(side: UpgradeEngine) -> str:
    """The metric, or the largest difference from plain ONNX Runtime."""
    name = next((name for name in MAIN_METRIC.values() if name in side.metrics), None)
    if name is not None:
        return f"{name} {side.metrics[name]:.4f}"
    if side.parity is None or not side.parity.outputs:
        return "-"
    return f"{max(error.max_rel for error in side.parity.outputs.values()):.2g} of the scale"

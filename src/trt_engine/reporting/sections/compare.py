"""One engine against others: differences with their intervals, outputs, sizes, structure, gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trt_engine.comparisons import Compared, CompareReport, CompareSide, Gate, MetricDifference
from trt_engine.figures import MIB, percent
from trt_engine.reporting.charts import Chart, Forest, Limit, Span
from trt_engine.reporting.contents import Block, Figure, Notice, Paragraph, Section, clean
from trt_engine.reporting.figures import column, number
from trt_engine.reporting.sections.measured import boxes_of
from trt_engine.reporting.sections.parts import brief, difference, plural, sentence, table, told, varying, words
from trt_engine.reporting.sections.scene import Scene

__all__ = ["compared", "figures", "notices", "structure"]

_SPANS = 24  # in one chart
_CHANGES = 25


def figures(report: CompareReport) -> Iterator[Figure]:
    for other in report.against[:3]:
        median = next((metric for metric in other.speed if metric.metric == "median"), None)
        metric = median or next(iter(other.speed), None)
        if metric is not None:
            yield Figure(clean(f"{other.label}, {metric.metric}"), _worded(metric), _interval(metric))


def notices(report: CompareReport) -> Iterator[Notice]:
    if not report.complete:
        yield Notice("The comparison was interrupted; what was measured until then stands below.")
    yield from (Notice(clean(f"{other.quantised_slower}.")) for other in report.against if other.quantised_slower)
    yield from (Notice(clean(f"Gate {gate.rule}: {gate.text}")) for gate in report.gates if gate.failed)
    if not report.stable:
        yield Notice(clean(f"The comparison is not stable: {'; '.join(report.instability) or 'the samples moved'}"))


def compared(scene: Scene, report: CompareReport) -> Section:
    base = report.sides[0] if report.sides else None
    name = clean(base.label) if base else "the first engine"
    blocks: list[Block] = [
        Paragraph(f"{_verdict(name, other)} ") for other in report.against[:_SPANS]
    ]  # the sentence first, its figures after
    charts: list[Chart] = []
    if (chart := _forest(name, report)) is not None:
        charts.append(chart)
    samples = [(clean(side.label), side.record.compute_ms) for side in report.sides if side.record is not None]
    samples = [(label, times) for label, times in samples if times]
    if len(samples) > 1:
        charts.append(boxes_of("compare-boxes", samples))
    if charts:
        blocks.append(tuple(charts))
    rows = [(other.label, metric) for other in report.against for metric in other.speed]
    if rows:
        blocks.append(
            table(
                clean(f"Against {name}, per cent of it: more than zero is slower, of throughput too"),
                [
                    ("engine", [clean(label) for label, _ in rows]),
                    ("", [metric.metric for _, metric in rows]),
                    (brief(name, 24), [f"{number(metric.base)} {metric.unit}" for _, metric in rows]),
                    ("this", [f"{number(metric.other)} {metric.unit}" for _, metric in rows]),
                    ("slower %", [difference(metric.slower_pct.value, 2) for _, metric in rows]),
                    ("from", [difference(metric.slower_pct.low, 2) for _, metric in rows]),
                    ("to", [difference(metric.slower_pct.high, 2) for _, metric in rows]),
                    ("would find %", column([metric.detectable_pct for _, metric in rows])),
                    ("verdict", [metric.verdict for _, metric in rows]),
                ],
                words=2,
                also=("verdict",),
            )
        )
    blocks.append(Paragraph(clean(_method(report))))
    if report.gates:
        states = ["failed" if gate.failed else "held" if gate.judged else "not judged" for gate in report.gates]
        gates = [(gate.rule, state, gate.text) for gate, state in zip(report.gates, states, strict=True)]
        marked = [index for index, state in enumerate(states) if state != "held"]
        blocks.append(words("Gates", ("gate", "", "found"), gates, marked))
    blocks += _sides(scene, report)
    blocks += _outputs(report)
    return Section("compare", "Comparison", tuple(blocks))


def _worded(metric: MetricDifference) -> str:
    return f"{difference(metric.slower_pct.value, 1 if abs(metric.slower_pct.value) >= 1 else 2)} %"


def _interval(metric: MetricDifference) -> str:
    span = metric.slower_pct
    return f"{metric.verdict}; {percent(span.level)} interval {difference(span.low, 2)} to {difference(span.high, 2)} %"


def _verdict(base: str, other: Compared) -> str:
    label = clean(other.label)
    if not other.speed:
        return f"{label} was not timed against {base}."
    parts = []
    for metric in other.speed:
        span = metric.slower_pct
        if metric.verdict == "no difference found":
            would = f", where one of {number(metric.detectable_pct)} % would be" if metric.detectable_pct else ""
            parts.append(f"{metric.metric}: no difference found{would}")
        else:
            amount = f"{number(abs(span.value))} % ({number(min(abs(span.low), abs(span.high)))} to "
            amount += f"{number(max(abs(span.low), abs(span.high)))} %)"
            parts.append(f"{metric.metric}: {amount} {metric.verdict}")
    return f"{label} against {base}: {'; '.join(parts)}."


def _method(report: CompareReport) -> str:
    kept = f" The base was read from {report.baseline}." if report.baseline else ""
    return f"{sentence(report.method)} {plural(report.blocks, 'block')} each, {report.order}.{kept}"


def _forest(base: str, report: CompareReport) -> Forest | None:
    spans = [
        Span(
            f"{clean(other.label)}: {metric.metric}" if len(report.against) > 1 else metric.metric,
            metric.slower_pct.low,
            metric.slower_pct.value,
            metric.slower_pct.high,
            metric.slower_pct.excludes_zero,
        )
        for other in report.against
        for metric in other.speed
    ][:_SPANS]
    if not spans:
        return None
    said = (f"{s.label}: {difference(s.value, 2)} % ({difference(s.low, 2)} to {difference(s.high, 2)})" for s in spans)
    metrics = [metric.metric for other in report.against for metric in other.speed][:_SPANS]
    limits = [limit for gate in report.gates if (limit := _limit(gate, metrics)) is not None]
    level = report.against[0].speed[0].slower_pct.level if report.against[0].speed else 0.95
    return Forest(
        "intervals",
        f"Difference from {base}, with {percent(level)} intervals",
        told(said),
        "← faster · % of the base · slower →",
        "%",
        tuple(spans),
        tuple(dict.fromkeys(limits)),
    )


def _limit(gate: Gate, metrics: Sequence[str]) -> Limit | None:
    """Where the gate `slower:3%` stands on the axis, beside the spans of the metric it judges."""
    spans = tuple(index for index, metric in enumerate(metrics) if metric == gate.metric)
    return Limit(clean(gate.rule), gate.limit, spans) if gate.limit is not None and spans else None


def _sides(scene: Scene, report: CompareReport) -> Iterator[Block]:
    sides = report.sides
    if not sides:
        return
    columns: list[tuple[str, Sequence[str]]] = [
        ("engine", [clean(side.label) for side in sides]),
        ("file", [scene.path(side.engine)[0] for side in sides]),
    ]
    columns += varying(
        [
            ("backend", [clean(side.backend) for side in sides]),
            ("device", [clean(side.device) for side in sides]),
            ("precision", [clean(_precision(side)) for side in sides]),
        ]
    )
    lead = len(columns)
    columns.append(("engine MiB", column([side.engine_bytes / MIB for side in sides])))
    for title, values in (
        ("weights MiB", [side.weights_bytes for side in sides]),
        ("memory MiB", [side.memory_bytes for side in sides]),
    ):
        if any(value is not None for value in values):
            columns.append((title, column([None if value is None else value / MIB for value in values])))
    yield table("The engines", columns, words=lead)


def _precision(side: CompareSide) -> str:
    """What it computes in, and what its graph is written in where that is another."""
    return f"{side.precision} (its graph is {side.written})" if side.written else side.precision


def _outputs(report: CompareReport) -> Iterator[Block]:
    rows = [
        (other, other.output_names[index] if index < len(other.output_names) else str(index), error)
        for other in report.against
        for index, error in enumerate(other.outputs)
    ]
    if rows:
        names = [clean(other.label) for other, _, _ in rows]
        worst = ["" if error.channel is None else str(error.channel) for _, _, error in rows]
        columns: list[tuple[str, Sequence[str]]] = [
            *varying([("engine", names)]),
            ("output", [clean(name) for _, name, _ in rows]),
            *([("worst channel", worst)] if any(worst) else []),
            ("max abs", [f"{error.max_abs:.3g}" for _, _, error in rows]),
            ("mean abs", [f"{error.mean_abs:.3g}" for _, _, error in rows]),
            ("of channel's scale", [f"{error.max_rel:.3g}" for _, _, error in rows]),
            ("cosine", [f"{error.cosine:.6f}" for _, _, error in rows]),
        ]
        lead = len(columns) - 4
        if any(other.top1_same for other in report.against):
            same = [other.top1_same.get(name) for other, name, _ in rows]
            columns.append(("best class same %", column([None if share is None else 100 * share for share in same])))
        yield table("How far the outputs lie apart", columns, words=lead)
    for other in report.against:
        if other.outputs_note:
            yield Notice(clean(f"Outputs of {other.label}: {other.outputs_note}"), "info")


def structure(report: CompareReport) -> Section | None:
    """What is not the same in the engines."""
    blocks: list[Block] = []
    for other in report.against:
        diff = other.structure
        if diff is None:
            continue
        label = clean(other.label)
        if diff.counts:
            blocks.append(
                table(
                    f"{label}: counts before and after",
                    [
                        ("of", [clean(item.name) for item in diff.counts]),
                        ("before", [f"{item.before:,}" for item in diff.counts]),
                        ("after", [f"{item.after:,}" for item in diff.counts]),
                        ("difference", [difference(item.after - item.before, 0) for item in diff.counts]),
                    ],
                    words=1,
                )
            )
        shown = diff.changes[:_CHANGES]
        if shown:
            more = f", the first {_CHANGES} of {len(diff.changes)}" if len(diff.changes) > _CHANGES else ""
            timed = any(change.before_ms is not None or change.after_ms is not None for change in shown)
            modules = (
                [clean(change.module or "-") for change in shown] if any(change.module for change in shown) else []
            )
            columns: list[tuple[str, Sequence[str]]] = [
                *([("module", modules)] if modules else []),
                ("layer", [_layer(change.before or change.after) for change in shown]),
                ("change", [change.change for change in shown]),
                ("what", [clean(change.text) for change in shown]),
            ]
            if timed:
                columns += [
                    ("before ms", column([change.before_ms for change in shown])),
                    ("after ms", column([change.after_ms for change in shown])),
                ]
            blocks.append(
                table(
                    f"{label}: {plural(diff.same, 'layer')} the same; changed{more}", columns, words=3 + bool(modules)
                )
            )
        blocks += [Notice(clean(sentence(text)), "info") for text in diff.warnings]
    return Section("structure", "What changed inside", tuple(blocks)) if blocks else None


def _layer(names: Sequence[str]) -> str:
    text = clean(", ".join(names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return text if len(text) <= 100 else f"{text[:60]}…{text[-39:]}"

"""`loadtest`: its result, and the sections of load tests: a table, latency over time and its distribution, rates tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from trt_engine.benchmark.trtexec_style_log import format_float
from trt_engine.format import format_bytes, format_column, format_int, format_ms, format_or_dash
from trt_engine.records.loadtest import LoadFigures, LoadGate, LoadtestRecord
from trt_engine.records.percentiles import percentile
from trt_engine.reporting.charts import Chart, Histogram, Line, LineChart, Point
from trt_engine.reporting.document import Block, KeyFigure, Notice, Paragraph, Section, Table, make_facts
from trt_engine.reporting.tables import group_by, make_table, number_columns, shapes_text, to_sentence

_MAX_DRAWN = 4
_SLICES = 60


def loadtest_record(record: LoadtestRecord, artifacts: Mapping[str, str] | None = None) -> Iterator[Block]:
    figures = LoadFigures.of(record)
    version = f" version {record.version}" if record.version else ""
    lag = record.lag_ms
    rate = f"{format_float(figures.requests_per_s)} requests/s"
    if record.batch > 1:
        rate += f", {format_float(figures.images_per_s)} images/s"
    spans = f"{format_float(record.duration_s)} s after {format_float(record.warmup_s)} s of warm-up"
    yield make_facts(
        ("target", f"{record.target} ({record.server})"),
        ("model", f"{record.model}{version}, {shapes_text(record.shapes)}, {format_bytes(record.request_bytes)}"),
        ("load", f"{record.load}, {spans}"),
        ("rate", rate),
        ("latency", _latency_text(figures)),
        ("requests", f"{record.requests} answered in {format_float(record.wall_s)} s, {record.failed} failed"),
        ("failed", ", ".join(f"{count} {kind}" for kind, count in record.errors.items()) or None),
        ("late", None if figures.late is None else f"{figures.late} after the deadline of {record.deadline_ms:g} ms"),
        ("send lag", None if lag is None else f"median {format_ms(lag.median)}, p99 {format_ms(lag.p99)}"),
        ("rule", map(_gate_text, record.gates)),
        ("incomplete", None if record.complete else "interrupted"),
        *(artifacts or {}).items(),
    )
    if record.steps:
        yield from (Paragraph(""), _steps_table(record))


def _latency_text(figures: LoadFigures) -> str | None:
    """Mean and percentiles in ms."""
    if (summary := figures.latency) is None:
        return None
    named = {"mean": summary.mean} | {f"p{name}": value for name, value in figures.percentiles_ms.items()}
    parts = ", ".join(f"{name} {format_float(value)}" for name, value in named.items())
    return f"{parts} ms (min {format_float(summary.min)}, max {format_float(summary.max)})"


def _gate_text(gate: LoadGate) -> str:
    measured = "nothing" if gate.measured is None else format_float(gate.measured)
    return f"{gate.rule} {'passed' if gate.passed else 'FAILED'}: {measured}"


def _steps_table(record: LoadtestRecord) -> Table:
    """The rates of a search, ascending."""
    steps = sorted(record.steps, key=lambda step: step.rate)
    return make_table(
        "Rates tried",
        [
            ("requests/s", [format_float(step.rate) for step in steps]),
            ("answered/s", [format_float(step.requests_per_s) for step in steps]),
            (
                f"{str(record.bound).partition(':')[0]} ms",
                ["–" if step.bound_ms is None else format_float(step.bound_ms) for step in steps],
            ),
            ("failed", [str(step.errors) for step in steps]),
            (str(record.bound), ["kept" if step.passed else "not kept" for step in steps]),
        ],
        marked=[index for index, step in enumerate(steps) if step.rate == record.rate and step.passed],
    )


# ------------------------------------------------------------------------------------------------ the report


def key_figures(records: Sequence[LoadtestRecord]) -> Iterator[KeyFigure]:
    """Figures of the last test."""
    record = records[-1]
    figures = LoadFigures.of(record)
    what = f"highest that keeps {record.bound}" if any(step.passed for step in record.steps) else record.load
    yield KeyFigure("requests/s", format_or_dash(figures.requests_per_s), what)
    if figures.latency is not None:
        median = f"median {format_or_dash(figures.latency.median)} ms"
        yield KeyFigure("ms p99", format_or_dash(figures.latency.p99), median)
    yield KeyFigure("failed", format_int(record.failed), f"of {format_int(record.failed + record.requests)} requests")


def notices(records: Sequence[LoadtestRecord]) -> Iterator[Notice]:
    for text in dict.fromkeys(text for record in records for text in record.warnings):
        yield Notice(to_sentence(text))


def load_section(records: Sequence[LoadtestRecord]) -> Section:
    """One row for each test, and the rates of each search."""
    columns = [
        ("target", [record.target for record in records]),
        ("load", [record.load for record in records]),
        ("requests/s", format_column([record.requests_per_s for record in records])),
        *number_columns(
            [record.latency_summary() for record in records],
            {name: name for name in ("mean", "median", "p90", "p99", "max")},
        ),
        ("answered", [format_int(record.requests) for record in records]),
        ("failed", [format_int(record.failed) for record in records]),
    ]
    table = make_table("One row for each load test; latency in ms from the intended send time", columns, words=2)
    return Section("load", "Load tests", (table, *(_steps_table(record) for record in records if record.steps)))


def load_charts_section(records: Sequence[LoadtestRecord]) -> Section | None:
    """Latency over time, and its distribution, of the last tests."""
    blocks: list[Block] = []
    for place, record in enumerate([record for record in records if record.latency_ms][-_MAX_DRAWN:]):
        summary = record.latency_summary()
        assert summary is not None  # it has samples
        marks = (("median", summary.median), ("p99", summary.p99))
        charts: list[Chart] = [
            Histogram(f"load-{place}", f"Latency, {record.load}", "ms per request", record.latency_ms, marks)
        ]
        lines = _over_time(record)
        if len(lines[0].points) > 1:
            charts.append(LineChart(f"load-time-{place}", f"Latency over time, {record.load}", "s", "ms", lines))
        blocks.append(tuple(charts))
    return Section("load-latency", "Latency under load", tuple(blocks)) if blocks else None


def _over_time(record: LoadtestRecord) -> tuple[Line, ...]:
    """p99 and median of equal slices of time, by intended send time."""
    width_s = max(record.wall_s / _SLICES, 1e-9)
    slices = group_by(zip(record.sent_s, record.latency_ms, strict=True), lambda pair: int(pair[0] / width_s))
    points = [(round(index * width_s, 3), sorted(ms for _, ms in found)) for index, found in sorted(slices.items())]
    return tuple(
        Line(name, tuple(Point(at, percentile(values, percent), "", "") for at, values in points), "solid")
        for name, percent in (("p99", 99.0), ("median", 50.0))
    )

"""Sections of load tests: a table, latency over time and its distribution, the rates of a search."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from trt_engine.format import format_column, format_int, format_or_dash
from trt_engine.records.loadtest import LoadFigures, LoadtestRecord
from trt_engine.records.summary import percentile
from trt_engine.reporting.charts import Chart, Histogram, Line, LineChart, Point
from trt_engine.reporting.document import Block, KeyFigure, Notice, Section
from trt_engine.reporting.results.load import steps_table
from trt_engine.reporting.sections.section_helpers import make_table, to_sentence

_MAX_DRAWN = 4
_SLICES = 60


def key_figures(records: Sequence[LoadtestRecord]) -> Iterator[KeyFigure]:
    """Of the last test."""
    record = records[-1]
    figures = LoadFigures.of(record)
    what = f"highest that keeps {record.bound}" if record.steps and any(s.passed for s in record.steps) else record.load
    yield KeyFigure("requests/s", format_or_dash(figures.requests_per_s), what)
    if figures.latency is not None:
        yield KeyFigure(
            "ms p99", format_or_dash(figures.latency.p99), f"median {format_or_dash(figures.latency.median)} ms"
        )
    yield KeyFigure("failed", format_int(record.failed), f"of {format_int(record.failed + record.requests)} requests")


def notices(records: Sequence[LoadtestRecord]) -> Iterator[Notice]:
    for text in dict.fromkeys(text for record in records for text in record.warnings):
        yield Notice(to_sentence(text))


def load_section(records: Sequence[LoadtestRecord]) -> Section:
    """One row for each test, and the rates of each search."""
    figures = [LoadFigures.of(record) for record in records]
    columns = [
        ("target", [record.target for record in records]),
        ("load", [record.load for record in records]),
        ("requests/s", format_column([item.requests_per_s for item in figures])),
        *(
            (name, format_column([getattr(item.latency, field) if item.latency else None for item in figures]))
            for name, field in (("mean", "mean"), ("median", "median"), ("p90", "p90"), ("p99", "p99"), ("max", "max"))
        ),
        ("answered", [format_int(item.requests) for item in figures]),
        ("failed", [format_int(item.failed) for item in figures]),
    ]
    table = make_table("One row for each load test; latency in ms from the intended send time", columns, words=2)
    blocks: list[Block] = [table, *(steps_table(record) for record in records if record.steps)]
    return Section("load", "Load tests", tuple(blocks))


def load_charts_section(records: Sequence[LoadtestRecord]) -> Section | None:
    """Latency over time, and its distribution, of the last tests."""
    drawn = [record for record in records if record.latency_ms][-_MAX_DRAWN:]
    if not drawn:
        return None
    blocks: list[Block] = []
    for place, record in enumerate(drawn):
        figures = LoadFigures.of(record)
        assert figures.latency is not None  # it has samples
        marks = (("median", figures.latency.median), ("p99", figures.latency.p99))
        charts: list[Chart] = [
            Histogram(f"load-{place}", f"Latency, {record.load}", "ms per request", record.latency_ms, marks)
        ]
        if len(lines := _over_time(record)[0].points) > 1 and lines:
            charts.append(
                LineChart(f"load-time-{place}", f"Latency over time, {record.load}", "s", "ms", _over_time(record))
            )
        blocks.append(tuple(charts))
    return Section("load-latency", "Latency under load", tuple(blocks))


def _over_time(record: LoadtestRecord) -> tuple[Line, ...]:
    """p99 and median of equal slices of time, by intended send time."""
    width_s = max(record.wall_s / _SLICES, 1e-9)
    slices: dict[int, list[float]] = defaultdict(list)
    for at, value in zip(record.sent_s, record.latency_ms, strict=True):
        slices[int(at / width_s)].append(value)
    points = [(round(index * width_s, 3), sorted(values)) for index, values in sorted(slices.items())]
    return tuple(
        Line(name, tuple(Point(at, percentile(values, percent), "", "") for at, values in points), "solid")
        for name, percent in (("p99", 99.0), ("median", 50.0))
    )

"""Results of `loadtest`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trt_engine.benchmark.log_writer import format_float
from trt_engine.format import format_bytes, format_ms
from trt_engine.records.loadtest import LoadFigures, LoadGate, LoadtestPlan, LoadtestRecord
from trt_engine.reporting.document import Block, Paragraph, Table, make_facts
from trt_engine.reporting.results.common import shapes_text


def loadtest_record(record: LoadtestRecord, artifacts: Mapping[str, str] | None = None) -> Iterator[Block]:
    figures = LoadFigures.of(record)
    version = f" version {record.version}" if record.version else ""
    lag = record.lag_ms
    rate = f"{format_float(figures.requests_per_s)} requests/s"
    if record.batch > 1:
        rate += f", {format_float(figures.images_per_s)} images/s"
    failed = ", ".join(f"{count} {kind}" for kind, count in record.errors.items())
    yield make_facts(
        ("target", f"{record.target} ({record.server})"),
        ("model", f"{record.model}{version}, {shapes_text(record.shapes)}, {format_bytes(record.request_bytes)}"),
        (
            "load",
            f"{record.load}, {format_float(record.duration_s)} s after {format_float(record.warmup_s)} s of warm-up",
        ),
        ("rate", rate),
        ("latency", latency_text(figures)),
        ("requests", f"{record.requests} answered in {format_float(record.wall_s)} s, {record.failed} failed"),
        ("failed", failed or None),
        ("late", None if figures.late is None else f"{figures.late} after the deadline of {record.deadline_ms:g} ms"),
        ("send lag", None if lag is None else f"median {format_ms(lag.median)}, p99 {format_ms(lag.p99)}"),
        ("rule", [_gate_text(gate) for gate in record.gates]),
        ("incomplete", None if record.complete else "interrupted"),
        *(artifacts or {}).items(),
    )
    if record.steps:
        yield Paragraph("")
        yield steps_table(record)


def latency_text(figures: LoadFigures) -> str | None:
    """Mean and percentiles in ms."""
    if (summary := figures.latency) is None:
        return None
    parts = [f"mean {format_float(summary.mean)}"]
    parts += [f"p{name} {format_float(value)}" for name, value in figures.percentiles_ms.items()]
    return f"{', '.join(parts)} ms (min {format_float(summary.min)}, max {format_float(summary.max)})"


def _gate_text(gate: LoadGate) -> str:
    measured = "nothing" if gate.measured is None else format_float(gate.measured)
    return f"{gate.rule} {'passed' if gate.passed else 'FAILED'}: {measured}"


def steps_table(record: LoadtestRecord) -> Table:
    """The rates of a search, ascending."""
    steps = sorted(record.steps, key=lambda step: step.rate)
    rows = tuple(
        (
            format_float(step.rate),
            format_float(step.requests_per_s),
            "–" if step.bound_ms is None else format_float(step.bound_ms),
            str(step.errors),
            "kept" if step.passed else "not kept",
        )
        for step in steps
    )
    best = frozenset(index for index, step in enumerate(steps) if step.rate == record.rate and step.passed)
    name = str(record.bound).partition(":")[0]
    columns = ("requests/s", "answered/s", f"{name} ms", "failed", str(record.bound))
    return Table("Rates tried", columns, rows, marked=best)


def loadtest_plan(plan: LoadtestPlan) -> Iterator[Block]:
    shapes = shapes_text(plan.shapes) or "the profile's optimum"
    size = "" if plan.request_bytes is None else f", {format_bytes(plan.request_bytes)} each"
    yield Paragraph(
        f"would load {plan.target}: {plan.load} for {plan.duration_s:g} s, after {plan.warmup_s:g} s of warm-up"
    )
    yield Paragraph(f"would send {shapes}{size}")
    if plan.needs_build:
        yield Paragraph("would build its engine into the store first")
    yield from (Paragraph(f"would write {place}") for place in plan.writes)

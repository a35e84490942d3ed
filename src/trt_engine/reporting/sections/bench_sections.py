"""Sections of measurements: tables, distributions, protocol, environment, runtime."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from trt_engine.benchmark.stability import MIN_QUERIES, interval_pct
from trt_engine.format import MIB, format_bytes, format_column, format_int, format_or_dash, join_names
from trt_engine.records.bench import BenchRecord, Protocol
from trt_engine.records.summary import percentile
from trt_engine.reporting.charts import Bars, Box, Boxes, Chart, Histogram, Line, LineChart, Point
from trt_engine.reporting.document import Block, Commands, Facts, KeyFigure, Notice, Paragraph, Section, make_facts
from trt_engine.reporting.sections.report_context import ReportContext
from trt_engine.reporting.sections.section_helpers import (
    Columns,
    group_by,
    make_table,
    measurement_columns,
    more_note,
    record_percentile,
    summary_columns,
    varying_columns,
)
from trt_engine.tensors import format_shape

_MAX_HISTOGRAMS = 6  # histograms on one page; the table beside them has every measurement
_MAX_BOXES = 24  # in one chart


def key_figures(records: Sequence[BenchRecord]) -> Iterator[KeyFigure]:
    one_engine = len({record.engine for record in records}) == 1  # figures of different networks have no highest
    if one_engine:
        yield best_throughput(records)
    low = min(records, key=lambda record: record.batch)
    if one_engine and (summary := low.compute_summary()) is not None:
        yield KeyFigure(
            f"ms at batch {low.batch}", format_or_dash(summary.mean), f"mean; p99 {format_or_dash(summary.p99)} ms"
        )
    yield KeyFigure("measurements", format_int(len(records)), f"{format_int(sum(r.queries for r in records))} queries")


def best_throughput(records: Sequence[BenchRecord]) -> KeyFigure:
    most = max(records, key=lambda record: record.images_per_s)
    which = "highest, " if len(records) > 1 else ""
    return KeyFigure("images/s", format_or_dash(most.images_per_s), f"{which}at batch {most.batch}")


def notices(context: ReportContext) -> Iterator[Notice]:
    """Warnings of the measurements and of throttled clocks."""
    batches: dict[str, list[str]] = {}
    for record in context.records:
        in_cell = id(record) in context.cell_of
        held = sorted({reason for state in record.clocks for reason in state.throttled})
        own = record.warnings + (context.cell_of[id(record)].warnings if in_cell else ())
        stated = any("clocks were held down" in text for text in own)
        clocks = [f"the GPU's clocks were held down ({', '.join(held)})"] if held and not stated else []
        where = context.names[id(record)] if in_cell else f"Batch {record.batch}"
        for warning in (*(() if in_cell else record.warnings), *clocks):  # warnings of cells are listed with the cells
            batches.setdefault(warning, []).append(where)
    for warning, named in batches.items():
        which = list(dict.fromkeys(named))
        if all(name.startswith("Batch ") for name in which):
            which = ["Batch " + ", ".join(name.removeprefix("Batch ") for name in which)]
        yield Notice(f"{join_names(which, 4)}: {warning}")
    if len({(record.protocol.name, record.device) for record in context.records}) > 1:
        yield Notice("Measured under several protocols or devices: only rows that agree in both compare.")


def measurements_section(context: ReportContext, records: Sequence[BenchRecord]) -> Section:
    summaries = [context.summaries[id(record)] for record in records]
    blocks: list[Block] = []
    if len({record.batch for record in records}) > 1:
        blocks.append(tuple(_batch_charts(context, records)))
    different = varying_columns(
        (
            ("engine", [context.display_path(record.engine)[0] for record in records]),
            ("backend", [record.backend for record in records]),
            ("device", [record.device for record in records]),
            ("protocol", [record.protocol.name for record in records]),
        )
    )
    columns = [*different, *measurement_columns(records, summaries)]
    caption = f"One row for each measurement; times in ms per query, {context.timing_scope()}"
    blocks.append(make_table(caption, columns, words=len(different)))
    return Section("measurements", "Measurements", tuple(blocks))


def confidence_note(record: BenchRecord | None, stable: bool = True) -> str:
    """Confidence interval of the mean, `±1.2 %` (95 %, over blocks of time), and stability."""
    parts = []
    if record is not None and len(record.compute_ms) >= MIN_QUERIES:
        width = interval_pct(record.compute_ms)
        parts += [f"±{width:.1f} %"] if math.isfinite(width) else []
    return ", ".join([*parts, *([] if stable else ["not stable"])])


def _batch_charts(context: ReportContext, records: Sequence[BenchRecord]) -> Iterator[Chart]:
    """Throughput and time per image by batch: bars, or a line for each backend, device and protocol."""
    times = {id(r): s.mean / r.batch for r in records if (s := context.summaries[id(r)]) is not None}
    rates = {id(r): r.images_per_s for r in records}
    groups = group_by(records, lambda r: f"{r.backend}, {r.device}, {r.protocol.name}")
    single = len(groups) == 1 and len({record.batch for record in records}) == len(records)
    for key, title, unit, values in (
        ("throughput", "Throughput by batch size", "images/s", rates),
        ("per-image", "Time per image by batch size", "ms", times),
    ):
        if single:
            ordered = sorted(records, key=lambda record: record.batch)
            notes = tuple(confidence_note(r, r.stable) for r in ordered)
            bars = tuple((f"batch {r.batch}", values.get(id(r), 0.0)) for r in ordered)
            yield Bars(key, title, unit, bars, notes)
            continue
        lines = [
            points_line(name, [(r.batch, values[id(r)], r.stable) for r in group if id(r) in values], labelled=True)
            for name, group in groups.items()
        ]
        if lines := [line for line in lines if line.points]:
            yield LineChart(key, title, "batch size (log scale)", unit, tuple(lines), log_x=True)


def points_line(name: str, points: Sequence[tuple[int, float, bool]], *, labelled: bool = False) -> Line:
    """A line of (batch, value, stable); only points where a batch was measured twice."""
    marked = tuple(
        Point(x, y, format_or_dash(y) if labelled else "", "" if stable else "unstable") for x, y, stable in points
    )
    return Line(name, marked, "solid" if len({p.x for p in marked}) == len(marked) else "points")


def distribution_section(context: ReportContext) -> Section | None:
    records = [record for record in context.records if record.compute_ms]
    if not records:
        return None
    boxes = [record for record in records if id(record) in context.cell_of]
    charts = _box_charts(context, boxes) if len(boxes) > 1 else []
    panels = () if len(boxes) > 1 and len(records) > _MAX_HISTOGRAMS else _histograms(context, records)
    summaries = [context.summaries[id(record)] for record in records]
    rules = {record.protocol.percentile_rule for record in records}
    asked = sorted({percent for record in records for percent in record.percentiles} - {90.0, 95.0, 99.0})
    by_rule = {
        "trtexec": "Percentiles are trtexec's: a value that was measured, no interpolation.",
        "linear": "Percentiles interpolate between the two nearest values.",
    }
    blocks: list[Block] = [tuple(group) for group in (charts, panels) if group]
    blocks += [
        make_table(
            "Compute time per query from the raw samples, in ms",
            [
                ("measurement", [context.names[id(record)] for record in records]),
                ("queries", [format_int(len(record.compute_ms)) for record in records]),
                ("min", format_column([s.min if s else None for s in summaries])),
                *summary_columns(summaries),
                *(
                    (f"p{percent:g}", format_column([record_percentile(record, percent) for record in records]))
                    for percent in asked
                ),
                ("max", format_column([s.max if s else None for s in summaries])),
                ("spread %", format_column([s.cv_pct if s else None for s in summaries], 2)),
            ],
            words=1,
        ),
        Paragraph(
            " ".join(by_rule[rule] for rule in sorted(rules))
            + " The spread is the standard deviation over the mean."
            + f" Drawn: {_MAX_HISTOGRAMS} of {len(records)} measurements." * (0 < len(panels) < len(records))
            + (f" Drawn: the first {_MAX_HISTOGRAMS} groups of cells." if len(charts) == _MAX_HISTOGRAMS else "")
        ),
    ]
    return Section("distribution", "Distribution of times", tuple(blocks))


def _histograms(context: ReportContext, records: Sequence[BenchRecord]) -> Sequence[Chart]:
    wanted = [result.batch for result in context.size.batches] if context.size else []
    panels = sorted(records, key=lambda record: record.batch not in wanted)[:_MAX_HISTOGRAMS]
    if not context.cell_of:
        panels.sort(key=lambda record: record.batch)
    charts: list[Chart] = []
    for record in panels:
        summary = context.summaries[id(record)]
        assert summary is not None  # it has samples
        key, title = f"distribution-{records.index(record)}", f"Compute time, {context.names[id(record)]}"
        marks = (("median", summary.median), ("p99", summary.p99))
        charts.append(Histogram(key, title, "ms per query", record.compute_ms, marks))
    return charts


def _box_charts(context: ReportContext, records: Sequence[BenchRecord]) -> list[Boxes]:
    """A chart per model and batch; one for all if no two are comparable."""
    models = {cell.spec.model for cell in context.cell_of.values()}
    groups = group_by(
        records, lambda r: f"{f'{context.cell_of[id(r)].spec.model}, ' if len(models) > 1 else ''}batch {r.batch}"
    )
    if all(len(group) == 1 for group in groups.values()):
        groups = {"": list(records)}
    return [
        make_boxes(f"boxes-{place}", [(context.names[id(r)], r.compute_ms) for r in group], name)
        for place, (name, group) in enumerate(list(groups.items())[:_MAX_HISTOGRAMS])
    ]


def make_boxes(key: str, named: Sequence[tuple[str, Sequence[float]]], of: str = "") -> Boxes:
    """Box plots of several measurements."""
    boxes = []
    for name, samples in named[:_MAX_BOXES]:
        ascending = sorted(samples)
        at = {percent: percentile(ascending, percent, "linear") for percent in (1, 25, 50, 75, 99)}
        boxes.append(Box(name, at[1], at[25], at[50], at[75], at[99]))
    title = f"Compute time per query{f', {of}' if of else ''}{more_note(_MAX_BOXES, len(named))}"
    return Boxes(key, title, "ms", tuple(boxes))


# ------------------------------------------------------------------------------------------------ how it was measured


def protocol_section(context: ReportContext) -> Section | None:
    found = list(dict.fromkeys(record.protocol for record in context.records))
    others = [profile.protocol for _, profile, _ in context.profiles]
    others += [context.run.comparison.protocol] if context.run.comparison else []
    found += [rules for rules in dict.fromkeys(others) if rules not in found]
    if context.size is not None and context.size.protocol is not None and context.size.protocol not in found:
        found.insert(0, context.size.protocol)
    if not found:
        return None
    blocks: list[Block] = [Facts(_protocol_rows(rules)) for rules in found]
    return Section("protocol", "Protocol" if len(found) == 1 else "Protocols", tuple(blocks))


def _protocol_rows(protocol: Protocol) -> tuple[tuple[str, str], ...]:
    rows = [
        ("name", protocol.name),
        ("loop", f"{protocol.loop}: the next query starts when the last has ended"),
        ("clock", protocol.clock),
        ("warm-up", _format_span(protocol.warmup_s, protocol.min_warmup)),
        ("measured", f"at least {_format_span(protocol.duration_s, protocol.min_iterations)}"),
        ("pause between queries", f"{protocol.idle_s:g} s"),
        ("streams", str(protocol.streams)),
        ("transfers", "inside the measured part" if protocol.transfers else "left out"),
        ("graph replay", "yes" if protocol.graph else "no"),
        ("spin wait", "yes" if protocol.spin else "no"),
        ("percentiles", protocol.percentile_rule),
    ]
    if protocol.not_applicable:
        rows.append(("unsupported by the device", ", ".join(protocol.not_applicable)))
    return tuple(rows)


def _format_span(seconds: float, queries: int) -> str:
    """Duration, number of queries, or both; zero is omitted."""
    many = f"{queries:,} {'query' if queries == 1 else 'queries'}"
    parts = ([f"{seconds:g} s"] if seconds or not queries else []) + ([many] if queries else [])
    return " and ".join(parts)


def environment_section(context: ReportContext) -> Section:
    here, manifest = context.environment, context.run.manifest
    facts = make_facts(
        ("processor", f"{here.cpu}, {here.cpu_cores} cores in use"),
        ("memory", format_bytes(here.memory_mib * MIB)),
        ("instruction sets", ", ".join(here.cpu_features) or None),
        ("GPU", here.gpu or None),
        ("GPU memory", format_bytes(here.gpu_memory_mib * MIB) if here.gpu_memory_mib else None),
        ("compute capability", here.compute_capability or None),
        ("driver", here.driver or None),
        ("CUDA", here.cuda or None),
        ("container", here.container or None),
        ("system", here.platform),
        ("Python", here.python),
        ("trt-engine", here.tool),
        *sorted(here.libraries.items()),
        *((f"container {name}", value) for name, value in (manifest.container.items() if manifest is not None else ())),
    )
    blocks: list[Block] = [facts]
    elsewhere = [record.environment for record in context.records]
    elsewhere += [profile.environment for _, profile, _ in context.profiles]
    if any(other != here for other in elsewhere):
        blocks.append(Notice("Some measurements were taken in another environment; each record has its own."))
    return Section("environment", "Environment", tuple(blocks))


def runtime_section(context: ReportContext) -> Section | None:
    """Facts reported by the backend, and the clocks before and after."""
    stated = [
        (key, value, context.names[id(record)])
        for record in context.records
        for key, value in (record.runtime_info | ({"inputs": record.inputs} if record.inputs else {})).items()
    ]
    rows = []
    for key, found in group_by(stated, lambda fact: fact[0]).items():
        values = group_by(found, lambda fact: fact[1])
        for value, where in values.items():
            names = join_names([name for _, _, name in where], _MAX_HISTOGRAMS)
            rows.append((key, value if len(values) == 1 else f"{value} ({names})"))
    blocks: list[Block] = [Facts(tuple(rows))] if rows else []
    readings = {
        "CPU MHz": "cpu_mhz", "load": "load_average", "SM MHz": "sm_mhz", "SM max MHz": "sm_max_mhz",
        "memory MHz": "memory_mhz", "°C": "temperature_c", "W": "power_w",
    }  # fmt: skip
    columns: Columns = []
    for title, name in readings.items():
        readout = [getattr(state, name) for record in context.records for state in record.clocks]
        if any(value is not None for value in readout):
            columns.append((title, [_format_reading(value) for value in readout]))
    if columns:
        moments = [
            f"{context.names[id(record)]}, {'before' if index == 0 else 'after'}"
            for record in context.records
            for index, _ in enumerate(record.clocks)
        ]
        columns.insert(0, ("measurement", moments))
        blocks.append(make_table("Clocks and load around each measurement", columns, words=1))
    return Section("ran", "What ran", tuple(blocks)) if blocks else None


def _format_reading(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def repeat_section(context: ReportContext) -> Section | None:
    lines = [context.run.command] if context.run.command else []
    if not lines or (context.size is None and context.run.manifest is None):
        lines += list(dict.fromkeys(_bench_command(record) for record in context.records))
    return Section("repeat", "Repeat it", (Commands(tuple(lines)),)) if lines else None


def _bench_command(record: BenchRecord) -> str:
    rules = record.protocol
    parts = ["trt-engine", "bench", record.engine, "--protocol", rules.name]
    parts += ["--shapes", ",".join(f"{name}:{format_shape(shape)}" for name, shape in record.shapes.items())]
    parts += ["--warmup", f"{rules.warmup_s:g}", "--duration", f"{rules.duration_s:g}"]
    return shlex.join(parts if record.device == "cpu" else [*parts, "--device", record.device])

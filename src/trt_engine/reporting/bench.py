"""`bench`: its result, and the sections of measurements: tables, distributions, protocol, environment, runtime."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence

from msgspec import UNSET

from trt_engine.benchmark.stability import MIN_QUERIES, interval_pct
from trt_engine.benchmark.trtexec_style_log import first_line, format_float
from trt_engine.format import MIB, format_bytes, format_column, format_int, format_or_dash, join_names
from trt_engine.records.bench import BenchRecord, LoggedTimes, LogReport, Protocol
from trt_engine.records.percentiles import Summary, percentile, summarize
from trt_engine.reporting import document, tables
from trt_engine.reporting.charts import Bars, Box, Boxes, Chart, Histogram, Line, LineChart, Point
from trt_engine.reporting.context import ReportContext
from trt_engine.tensors import format_shape

_MAX_HISTOGRAMS = 6  # histograms on one page; the table beside them has every measurement
_MAX_BOXES = 24  # in one chart
_COMMON_PERCENTILES = {90.0, 95.0, 99.0}
_RULES = {
    "linear": "Percentiles interpolate between the two nearest values.",
    "trtexec": "Percentiles are trtexec's: a value that was measured, no interpolation.",
}


def bench_record(record: BenchRecord, artifacts: Mapping[str, str] | None = None) -> Iterator[document.Block]:
    rule, summary = record.protocol, record.compute_summary()
    warmup = _format_span(rule.warmup_s, rule.min_warmup)
    modes = f"transfers {'on' if rule.transfers else 'off'}, graph {'on' if rule.graph else 'off'}"
    yield document.Paragraph(first_line(record))
    yield document.make_facts(
        ("engine", f"{record.engine} ({record.backend})"),
        ("validation", record.validation or None),
        ("protocol", f"{rule.name}: {format_float(rule.duration_s)} s after {warmup} of warm-up, {modes}"),
        ("batch", str(record.batch)),
        ("throughput", f"{format_float(record.qps)} queries/s, {format_float(record.images_per_s)} images/s"),
        ("per image", f"{format_float(summary.mean / record.batch)} ms" if summary is not None else None),
        ("compute", _sample_times(record, record.compute_ms, record.percentiles)),
        *(
            (name, _sample_times(record, getattr(record, f"{name}_ms")))
            for name in ("latency", "enqueue", "h2d", "d2h")
        ),
        (
            "queries",
            f"{record.queries} in {format_float(record.wall_s)} s, {record.warmup_queries} of warm-up left out",
        ),
        stability_fact(record.stable, record.instability),
        ("incomplete", None if record.complete else "interrupted"),
        *(artifacts or {}).items(),
    )


def _sample_times(record: BenchRecord, samples: Sequence[float], percentiles: Sequence[float] = ()) -> str | None:
    rule, ascending = record.protocol.percentile_rule, sorted(samples)
    if (summary := summarize(samples, rule)) is None:
        return None
    known = {f"{percent:g}": percentile(ascending, percent, rule) for percent in percentiles}
    return f"{times_text(summary, known)} (min {format_float(summary.min)}, max {format_float(summary.max)})"


def times_text(times: Summary | LoggedTimes, percentiles: Mapping[str, float]) -> str:
    named = {"mean": times.mean, "median": times.median} | {f"p{name}": value for name, value in percentiles.items()}
    return f"{', '.join(f'{name} {format_float(value)}' for name, value in named.items())} ms"


def stability_fact(stable: bool, instability: Sequence[str]) -> document.Fact:
    return "stable", "yes" if stable else f"no: {'; '.join(instability)}"


def log_report(report: LogReport) -> Iterator[document.Block]:
    """The values of a log."""
    what = f"TensorRT {report.trt_version}" if report.trt_version else report.protocol or "unknown version"
    rate, nbytes = report.throughput_qps, report.requested_bytes
    plugin, node, hint = (
        None if text is UNSET else text for text in (report.error_plugin, report.error_node, report.error_hint)
    )
    times = {
        name.removesuffix("_ms").replace("_", " "): getattr(report, name)
        for name in ("latency_ms", "enqueue_ms", "h2d_ms", "gpu_compute_ms", "compute_ms", "d2h_ms")
    }
    yield document.make_facts(
        ("log", f"{report.log} ({report.producer}, {what})"),
        ("status", report.status),
        ("cause", None if report.error_text is None else f"{report.error_class or 'unknown'}: {report.error_text}"),
        ("plugin", plugin),
        ("node", node),
        ("hint", hint),
        ("requested", f"{format_bytes(nbytes)} ({nbytes} bytes)" if isinstance(nbytes, int) else None),
        ("device", report.gpu or report.device),
        ("throughput", None if rate is None else f"{format_float(rate)} queries/s"),
        *((name, times_text(one, one.by_percent())) for name, one in times.items() if one is not None),
        ("summary", "no performance summary in this log" if rate is None else None),
        ("warning", report.perf_warnings),
    )


# ------------------------------------------------------------------------------------------------ the report


def key_figures(records: Sequence[BenchRecord]) -> Iterator[document.KeyFigure]:
    if len({record.engine for record in records}) == 1:  # figures of different networks have no highest
        yield best_throughput(records)
        low = min(records, key=lambda record: record.batch)
        if (summary := low.compute_summary()) is not None:
            p99 = f"mean; p99 {format_or_dash(summary.p99)} ms"
            yield document.KeyFigure(f"ms at batch {low.batch}", format_or_dash(summary.mean), p99)
    yield document.KeyFigure(
        "measurements", format_int(len(records)), f"{format_int(sum(r.queries for r in records))} queries"
    )


def best_throughput(records: Sequence[BenchRecord]) -> document.KeyFigure:
    most = max(records, key=lambda record: record.images_per_s)
    which = "highest, " if len(records) > 1 else ""
    return document.KeyFigure("images/s", format_or_dash(most.images_per_s), f"{which}at batch {most.batch}")


def notices(context: ReportContext) -> Iterator[document.Notice]:
    """Warnings of the measurements and of throttled clocks."""
    batches: dict[str, list[str]] = {}
    for record in context.records:
        cell = context.cell_of.get(id(record))
        held = sorted({reason for state in record.clocks for reason in state.throttled})
        own = record.warnings if cell is None else ()  # warnings of cells are listed with the cells
        stated = any("clocks were held down" in text for text in (*record.warnings, *(cell.warnings if cell else ())))
        clocks = [f"the GPU's clocks were held down ({', '.join(held)})"] if held and not stated else []
        for warning in (*own, *clocks):
            where = f"Batch {record.batch}" if cell is None else context.names[id(record)]
            batches.setdefault(warning, []).append(where)
    for warning, named in batches.items():
        which = list(dict.fromkeys(named))
        if all(name.startswith("Batch ") for name in which):
            which = ["Batch " + ", ".join(name.removeprefix("Batch ") for name in which)]
        yield document.Notice(f"{join_names(which, 4)}: {warning}")
    if len({(record.protocol.name, record.device) for record in context.records}) > 1:
        yield document.Notice("Measured under several protocols or devices: only rows that agree in both compare.")


def measurements_section(context: ReportContext, records: Sequence[BenchRecord]) -> document.Section:
    summaries = [context.summaries[id(record)] for record in records]
    different = tables.varying_columns(
        (
            ("engine", [context.display_path(record.engine)[0] for record in records]),
            ("backend", [record.backend for record in records]),
            ("device", [record.device for record in records]),
            ("protocol", [record.protocol.name for record in records]),
        )
    )
    columns = [*different, *tables.measurement_columns(records, summaries)]
    caption = f"One row for each measurement; times in ms per query, {context.timing_scope()}"
    blocks: list[document.Block] = [tables.make_table(caption, columns, words=len(different))]
    if len({record.batch for record in records}) > 1:
        blocks.insert(0, tuple(_batch_charts(context, records)))
    return document.Section("measurements", "Measurements", tuple(blocks))


def confidence_note(record: BenchRecord | None, stable: bool = True) -> str:
    """Confidence interval of the mean, `±1.2 %` (95 %, over blocks of time), and stability."""
    width = interval_pct(record.compute_ms) if record and len(record.compute_ms) >= MIN_QUERIES else math.nan
    return ", ".join(filter(None, (f"±{width:.1f} %" if math.isfinite(width) else "", "" if stable else "not stable")))


def _batch_charts(context: ReportContext, records: Sequence[BenchRecord]) -> Iterator[Chart]:
    """Throughput and time per image by batch: bars, or a line for each backend, device and protocol."""
    ordered = sorted(records, key=lambda record: record.batch)
    times = {id(r): s.mean / r.batch for r in records if (s := context.summaries[id(r)]) is not None}
    rates = {id(r): r.images_per_s for r in records}
    groups = tables.group_by(records, lambda r: f"{r.backend}, {r.device}, {r.protocol.name}")
    single = len(groups) == 1 and len({record.batch for record in records}) == len(records)
    for key, title, unit, values in (
        ("throughput", "Throughput by batch size", "images/s", rates),
        ("per-image", "Time per image by batch size", "ms", times),
    ):
        if single:
            bars = tuple((f"batch {r.batch}", values.get(id(r), 0.0)) for r in ordered)
            yield Bars(key, title, unit, bars, tuple(confidence_note(r, r.stable) for r in ordered))
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


def distribution_section(context: ReportContext) -> document.Section | None:
    records = [record for record in context.records if record.compute_ms]
    if not records:
        return None
    boxes = [record for record in records if id(record) in context.cell_of]
    charts = _box_charts(context, boxes) if len(boxes) > 1 else []
    panels = () if len(boxes) > 1 and len(records) > _MAX_HISTOGRAMS else _histograms(context, records)
    summaries = [context.summaries[id(record)] for record in records]
    columns: tables.Columns = [
        ("measurement", [context.names[id(record)] for record in records]),
        ("queries", [format_int(len(record.compute_ms)) for record in records]),
        *tables.number_columns(summaries, {"min": "min"}),
        *tables.summary_columns(summaries),
    ]
    for percent in sorted({percent for record in records for percent in record.percentiles} - _COMMON_PERCENTILES):
        values = [percentile(sorted(r.compute_ms), percent, r.protocol.percentile_rule) for r in records]
        columns.append((f"p{percent:g}", format_column(values)))
    columns += tables.number_columns(summaries, {"max": "max"})
    columns.append(("spread %", format_column([s.cv_pct if s else None for s in summaries], 2)))
    notes = [
        *(text for rule, text in _RULES.items() if any(record.protocol.percentile_rule == rule for record in records)),
        "The spread is the standard deviation over the mean.",
        *([f"Drawn: {_MAX_HISTOGRAMS} of {len(records)} measurements."] if 0 < len(panels) < len(records) else []),
        *([f"Drawn: the first {_MAX_HISTOGRAMS} groups of cells."] if len(charts) == _MAX_HISTOGRAMS else []),
    ]
    table = tables.make_table("Compute time per query from the raw samples, in ms", columns, words=1)
    drawn = [tuple(group) for group in (charts, panels) if group]
    return document.Section(
        "distribution", "Distribution of times", (*drawn, table, document.Paragraph(" ".join(notes)))
    )


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
    several = len({cell.spec.model for cell in context.cell_of.values()}) > 1
    groups = tables.group_by(
        records, lambda r: f"{context.cell_of[id(r)].spec.model}, batch {r.batch}" if several else f"batch {r.batch}"
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
        boxes.append(Box(name, *(percentile(ascending, percent, "linear") for percent in (1, 25, 50, 75, 99))))
    title = f"Compute time per query{f', {of}' if of else ''}{tables.more_note(_MAX_BOXES, len(named))}"
    return Boxes(key, title, "ms", tuple(boxes))


# ------------------------------------------------------------------------------------------------ how it was measured


def protocol_section(context: ReportContext) -> document.Section | None:
    size, comparison = context.size, context.run.comparison
    found = [size.protocol] if size is not None and size.protocol is not None else []
    found += [record.protocol for record in context.records]
    found += [profile.protocol for _, profile, _ in context.profiles]
    found += [comparison.protocol] if comparison else []
    blocks = tuple(_protocol_facts(rules) for rules in dict.fromkeys(found))
    return document.Section("protocol", "Protocol" if len(blocks) == 1 else "Protocols", blocks) if blocks else None


def _protocol_facts(protocol: Protocol) -> document.Facts:
    return document.make_facts(
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
        ("unsupported by the device", ", ".join(protocol.not_applicable) or None),
    )


def _format_span(seconds: float, queries: int) -> str:
    """Duration, number of queries, or both; zero is omitted."""
    many = f"{queries:,} {'query' if queries == 1 else 'queries'}"
    parts = ([f"{seconds:g} s"] if seconds or not queries else []) + ([many] if queries else [])
    return " and ".join(parts)


def environment_section(context: ReportContext) -> document.Section:
    here, manifest = context.environment, context.run.manifest
    facts = document.make_facts(
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
    elsewhere = [record.environment for record in context.records]
    elsewhere += [profile.environment for _, profile, _ in context.profiles]
    text = "Some measurements were taken in another environment; each record has its own."
    other = [document.Notice(text)] if any(one != here for one in elsewhere) else []
    return document.Section("environment", "Environment", (facts, *other))


def runtime_section(context: ReportContext) -> document.Section | None:
    """Facts reported by the backend, and the clocks before and after."""
    stated = [
        (key, value, context.names[id(record)])
        for record in context.records
        for key, value in (record.runtime_info | ({"inputs": record.inputs} if record.inputs else {})).items()
    ]
    rows = []
    for key, found in tables.group_by(stated, lambda fact: fact[0]).items():
        values = tables.group_by(found, lambda fact: fact[1])
        for value, where in values.items():
            names = join_names([name for _, _, name in where], _MAX_HISTOGRAMS)
            rows.append((key, value if len(values) == 1 else f"{value} ({names})"))
    blocks: list[document.Block] = [document.Facts(tuple(rows))] if rows else []
    clocks = [
        (f"{context.names[id(record)]}, {moment}", state)
        for record in context.records
        for moment, state in zip(("before", "after"), record.clocks, strict=False)
    ]
    readings = {
        "CPU MHz": "cpu_mhz", "load": "load_average", "SM MHz": "sm_mhz", "SM max MHz": "sm_max_mhz",
        "memory MHz": "memory_mhz", "°C": "temperature_c", "W": "power_w",
    }  # fmt: skip
    columns: tables.Columns = [("measurement", [moment for moment, _ in clocks])]
    for title, name in readings.items():
        readout = [getattr(state, name) for _, state in clocks]
        if any(value is not None for value in readout):
            columns.append((title, list(map(_format_reading, readout))))
    if len(columns) > 1:
        blocks.append(tables.make_table("Clocks and load around each measurement", columns, words=1))
    return document.Section("ran", "What ran", tuple(blocks)) if blocks else None


def _format_reading(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def repeat_section(context: ReportContext) -> document.Section | None:
    lines = [context.run.command] if context.run.command else []
    if not lines or (context.size is None and context.run.manifest is None):
        lines += list(dict.fromkeys(_bench_command(record) for record in context.records))
    return document.Section("repeat", "Repeat it", (document.Commands(tuple(lines)),)) if lines else None


def _bench_command(record: BenchRecord) -> str:
    rules = record.protocol
    parts = ["trt-engine", "bench", record.engine, "--protocol", rules.name]
    parts += ["--shapes", ",".join(f"{name}:{format_shape(shape)}" for name, shape in record.shapes.items())]
    parts += ["--warmup", f"{rules.warmup_s:g}", "--duration", f"{rules.duration_s:g}"]
    return shlex.join(parts if record.device == "cpu" else [*parts, "--device", record.device])

"""What was measured and how: tables of measurements, distributions from the samples, protocol, environment, what ran."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from trt_engine.figures import MIB, size
from trt_engine.records import BenchRecord, Protocol, percentile
from trt_engine.reporting.charts import Box, Boxes, Chart, Histogram, Line, LineChart
from trt_engine.reporting.contents import Block, Commands, Facts, Figure, Notice, Paragraph, Section, clean
from trt_engine.reporting.figures import column, count, number
from trt_engine.reporting.sections.parts import (
    cleaned,
    percentile_of,
    point,
    state_of,
    summary_columns,
    table,
    told,
    varying,
)
from trt_engine.reporting.sections.scene import Scene
from trt_engine.tensors import format_shape

__all__ = [
    "benched",
    "best",
    "boxes_of",
    "distribution",
    "environment",
    "figures",
    "notices",
    "protocols",
    "repeat",
    "what_ran",
]

_PANELS = 6  # histograms on one page; the table beside them has every measurement
_BOXES = 24  # in one chart


def figures(records: Sequence[BenchRecord]) -> Iterator[Figure]:
    yield best(records)
    low = min(records, key=lambda record: record.batch)
    if (summary := low.compute()) is not None:
        yield Figure(f"ms at batch {low.batch}", number(summary.mean), f"mean; p99 {number(summary.p99)} ms")
    yield Figure("measurements", count(len(records)), f"{count(sum(r.queries for r in records))} queries")


def best(records: Sequence[BenchRecord]) -> Figure:
    most = max(records, key=lambda record: record.images_per_s)
    which = "highest, " if len(records) > 1 else ""
    return Figure("images/s", number(most.images_per_s), f"{which}at batch {most.batch}")


def notices(scene: Scene) -> Iterator[Notice]:
    """What the measurements' own warnings and clocks say."""
    batches: dict[str, list[str]] = {}
    for record in scene.records:
        in_cell = id(record) in scene.cell_of
        held = sorted({reason for state in record.clocks for reason in state.throttled})
        own = record.warnings + (scene.cell_of[id(record)].warnings if in_cell else ())
        told = any("clocks were held down" in text for text in own)
        clocks = [f"the GPU's clocks were held down ({', '.join(held)})"] if held and not told else []
        where = scene.names[id(record)] if in_cell else f"Batch {record.batch}"
        for warning in (*(() if in_cell else record.warnings), *clocks):  # those of cells are told with the cells
            batches.setdefault(warning, []).append(where)
    for warning, named in batches.items():
        which = list(dict.fromkeys(named))
        if all(name.startswith("Batch ") for name in which):
            which = ["Batch " + ", ".join(name.removeprefix("Batch ") for name in which)]
        shown = ", ".join(which[:4]) + (f" and {len(which) - 4} more" if len(which) > 4 else "")
        yield Notice(clean(f"{shown}: {warning}"))
    if len({(record.protocol.name, record.device) for record in scene.records}) > 1:
        yield Notice("Measured under several protocols or devices: only rows that agree in both compare.")


def benched(scene: Scene, records: Sequence[BenchRecord]) -> Section:
    summaries = [scene.summaries[id(record)] for record in records]
    blocks: list[Block] = []
    if len({record.batch for record in records}) > 1:
        blocks.append(_charts(scene, records))
    different = varying(
        (
            ("engine", [scene.path(record.engine)[0] for record in records]),
            ("backend", [clean(record.backend) for record in records]),
            ("device", [clean(record.device) for record in records]),
            ("protocol", [clean(record.protocol.name) for record in records]),
        )
    )
    state = [state_of(record) for record in records]
    columns: list[tuple[str, Sequence[str]]] = [
        *different,
        ("batch", [str(record.batch) for record in records]),
        ("queries/s", column([record.qps for record in records])),
        ("images/s", column([record.images_per_s for record in records])),
        ("ms per image", column([s.mean / r.batch if s else None for r, s in zip(records, summaries, strict=True)])),
        *summary_columns(summaries),
        *([("", state)] if any(state) else []),
    ]
    caption = f"One row for each measurement; times in ms per query, {scene.scope()}"
    blocks.append(table(caption, columns, words=len(different)))
    return Section("measurements", "Measurements", tuple(blocks))


def _charts(scene: Scene, records: Sequence[BenchRecord]) -> tuple[Chart, ...]:
    groups: dict[str, list[BenchRecord]] = {}
    for record in records:
        groups.setdefault(f"{record.backend}, {record.device}, {record.protocol.name}", []).append(record)
    made: list[Chart] = []
    for key, title, unit in (
        ("throughput", "Throughput by batch size", "images/s"),
        ("per-image", "Time per image by batch size", "ms per image"),
    ):
        lines = []
        for name, group in groups.items():
            points = []
            for record in group:
                summary = scene.summaries[id(record)]
                value = record.images_per_s if key == "throughput" else summary.mean / record.batch if summary else None
                if value is not None:
                    points.append(point(record.batch, value, "" if record.stable else "unstable"))
            if points:
                once = len({p.x for p in points}) == len(points)
                lines.append(Line(clean(name), tuple(points), "solid" if once else "points"))
        if lines:
            said = told(f"batch {p.x:g}: {number(p.y)} {unit}" for line in lines for p in line.points)
            made.append(LineChart(key, title, said, "batch size (log scale)", unit, tuple(lines), log_x=True))
    return tuple(made)


def distribution(scene: Scene) -> Section | None:
    records = [record for record in scene.records if record.compute_ms]
    if not records:
        return None
    boxes = [record for record in records if id(record) in scene.cell_of]
    charts = _boxes(scene, boxes) if len(boxes) > 1 else []
    panels = () if len(boxes) > 1 and len(records) > _PANELS else _panels(scene, records)
    summaries = [scene.summaries[id(record)] for record in records]
    rules = {record.protocol.percentile_rule for record in records}
    asked = sorted({percent for record in records for percent in record.percentiles} - {90.0, 95.0, 99.0})
    by_rule = {
        "trtexec": "Percentiles are trtexec's: a value that was measured, no interpolation.",
        "linear": "Percentiles interpolate between the two nearest values.",
    }
    blocks: list[Block] = [tuple(group) for group in (charts, panels) if group]
    blocks += [
        table(
            "Compute time per query from the raw samples, in ms",
            [
                ("measurement", [scene.names[id(record)] for record in records]),
                ("queries", [count(len(record.compute_ms)) for record in records]),
                ("min", column([s.min if s else None for s in summaries])),
                *summary_columns(summaries),
                *(
                    (f"p{percent:g}", column([percentile_of(record, percent) for record in records]))
                    for percent in asked
                ),
                ("max", column([s.max if s else None for s in summaries])),
                ("spread %", column([s.cv_pct if s else None for s in summaries], 2)),
            ],
            words=1,
        ),
        Paragraph(
            " ".join(by_rule[rule] for rule in sorted(rules))
            + " The spread is the standard deviation over the mean."
            + (f" Drawn: {_PANELS} of {len(records)} measurements." if panels and len(records) > _PANELS else "")
            + (f" Drawn: the first {_PANELS} groups of cells." if len(charts) == _PANELS else "")
        ),
    ]
    return Section("distribution", "Distribution of times", tuple(blocks))


def _panels(scene: Scene, records: Sequence[BenchRecord]) -> Sequence[Chart]:
    wanted = [result.batch for result in scene.size.batches] if scene.size else []
    first = [record for record in records if record.batch in wanted]
    panels = (first + [record for record in records if record not in first])[:_PANELS]
    if not scene.cell_of:
        panels.sort(key=lambda record: record.batch)
    charts: list[Chart] = []
    for record in panels:
        summary = scene.summaries[id(record)]
        assert summary is not None  # it has samples
        charts.append(
            Histogram(
                f"distribution-{records.index(record)}",
                f"Compute time, {scene.names[id(record)]}",
                f"{count(len(record.compute_ms))} queries between {number(summary.min)} and {number(summary.max)} ms; "
                f"median {number(summary.median)} ms, p99 {number(summary.p99)} ms.",
                "ms per query",
                record.compute_ms,
                (("median", summary.median), ("p99", summary.p99)),
            )
        )
    return charts


def _boxes(scene: Scene, records: Sequence[BenchRecord]) -> list[Boxes]:
    """A chart for each model and batch, whose times compare; one for all where no two do."""
    groups: dict[str, list[BenchRecord]] = {}
    models = {cell.spec.model for cell in scene.cell_of.values()}
    for record in records:
        of = f"{scene.cell_of[id(record)].spec.model}, " if len(models) > 1 else ""
        groups.setdefault(clean(f"{of}batch {record.batch}"), []).append(record)
    if all(len(group) == 1 for group in groups.values()):
        groups = {"": list(records)}
    return [
        boxes_of(f"boxes-{place}", [(scene.names[id(r)], r.compute_ms) for r in group], name)
        for place, (name, group) in enumerate(list(groups.items())[:_PANELS])
    ]


def boxes_of(key: str, named: Sequence[tuple[str, Sequence[float]]], of: str = "") -> Boxes:
    """The distributions of several measurements, one below the other."""
    boxes = []
    for name, samples in named[:_BOXES]:
        ascending = sorted(samples)
        at = {percent: percentile(ascending, percent, "linear") for percent in (1, 25, 50, 75, 99)}
        boxes.append(Box(name, at[1], at[25], at[50], at[75], at[99]))
    return Boxes(
        key,
        "Compute time per query"
        + (f", {of}" if of else "")
        + (f", the first {_BOXES} of {len(named)}" if len(named) > _BOXES else ""),
        told(f"{box.label}: median {number(box.median)} ms, p99 {number(box.high)} ms" for box in boxes),
        "ms",
        tuple(boxes),
    )


# ------------------------------------------------------------------------------------------------ how it was measured


def protocols(scene: Scene) -> Section | None:
    found = list(dict.fromkeys(record.protocol for record in scene.records))
    others = [profile.protocol for _, profile, _ in scene.profiles]
    others += [scene.run.comparison.protocol] if scene.run.comparison else []
    found += [rules for rules in dict.fromkeys(others) if rules not in found]
    if scene.size is not None and scene.size.protocol is not None and scene.size.protocol not in found:
        found.insert(0, scene.size.protocol)
    if not found:
        return None
    blocks: list[Block] = [Facts(_protocol_rows(rules)) for rules in found]
    return Section("protocol", "Protocol" if len(found) == 1 else "Protocols", tuple(blocks))


def _protocol_rows(protocol: Protocol) -> tuple[tuple[str, str], ...]:
    rows = [
        ("name", protocol.name),
        ("loop", f"{protocol.loop}: the next query starts when the last has ended"),
        ("clock", protocol.clock),
        ("warm-up", _span(protocol.warmup_s, protocol.min_warmup)),
        ("measured", f"at least {_span(protocol.duration_s, protocol.min_iterations)}"),
        ("pause between queries", f"{protocol.idle_s:g} s"),
        ("streams", str(protocol.streams)),
        ("transfers", "inside the measured part" if protocol.transfers else "left out"),
        ("graph replay", "yes" if protocol.graph else "no"),
        ("spin wait", "yes" if protocol.spin else "no"),
        ("percentiles", protocol.percentile_rule),
    ]
    if protocol.not_applicable:
        rows.append(("asked, not on this device", ", ".join(protocol.not_applicable)))
    return cleaned(rows)


def _span(seconds: float, queries: int) -> str:
    """So long, so many queries, or both; a time of nothing is no time."""
    many = f"{queries:,} {'query' if queries == 1 else 'queries'}"
    parts = ([f"{seconds:g} s"] if seconds or not queries else []) + ([many] if queries else [])
    return " and ".join(parts)


def environment(scene: Scene) -> Section:
    here = scene.environment
    rows = [("processor", f"{here.cpu}, {here.cpu_cores} cores in use"), ("memory", size(here.memory_mib * MIB))]
    if here.cpu_features:
        rows.append(("instruction sets", ", ".join(here.cpu_features)))
    if here.gpu:
        rows.append(("GPU", here.gpu))
    for name, value in (
        ("GPU memory", size(here.gpu_memory_mib * MIB) if here.gpu_memory_mib else None),
        ("compute capability", here.compute_capability),
        ("driver", here.driver),
        ("CUDA", here.cuda),
        ("container", here.container),
    ):
        if value:
            rows.append((name, value))
    rows += [("system", here.platform), ("Python", here.python), ("trt-engine", here.tool)]
    rows += sorted(here.libraries.items())
    if scene.run.manifest is not None:
        rows += [(f"container {name}", value) for name, value in scene.run.manifest.container.items()]
    blocks: list[Block] = [Facts(cleaned(rows))]
    elsewhere = [record.environment for record in scene.records]
    elsewhere += [profile.environment for _, profile, _ in scene.profiles]
    if any(other != here for other in elsewhere):
        blocks.append(Notice("Some measurements were taken in another environment; each record has its own."))
    return Section("environment", "Environment", tuple(blocks))


def what_ran(scene: Scene) -> Section | None:
    """What the backend says it used, and the clocks before and after."""
    facts: dict[str, dict[str, list[str]]] = {}
    for record in scene.records:
        inputs = {"inputs": record.inputs} if record.inputs else {}
        for key, value in (record.facts | inputs).items():
            facts.setdefault(key, {}).setdefault(value, []).append(scene.names[id(record)])
    rows = []
    for key, values in facts.items():
        for value, where in values.items():
            shown = ", ".join(where[:_PANELS]) + (f" and {len(where) - _PANELS} more" if len(where) > _PANELS else "")
            rows.append((key, value if len(values) == 1 else f"{value} ({shown})"))
    blocks: list[Block] = [Facts(cleaned(rows))] if rows else []
    clocks = [(record, state) for record in scene.records for state in record.clocks]
    columns: list[tuple[str, Sequence[str]]] = []
    readings: tuple[tuple[str, Sequence[float | None]], ...] = (
        ("CPU MHz", [state.cpu_mhz for _, state in clocks]),
        ("load", [state.load_average for _, state in clocks]),
        ("SM MHz", [state.sm_mhz for _, state in clocks]),
        ("SM max MHz", [state.sm_max_mhz for _, state in clocks]),
        ("memory MHz", [state.memory_mhz for _, state in clocks]),
        ("°C", [state.temperature_c for _, state in clocks]),
        ("W", [state.power_w for _, state in clocks]),
    )
    for title, readout in readings:
        if any(value is not None for value in readout):
            columns.append((title, [_clock(value) for value in readout]))
    if columns:
        moments = [
            f"{scene.names[id(record)]}, {'before' if index == 0 else 'after'}"
            for record in scene.records
            for index, _ in enumerate(record.clocks)
        ]
        blocks.append(table("Clocks and load around each measurement", [("measurement", moments), *columns], words=1))
    return Section("ran", "What ran", tuple(blocks)) if blocks else None


def _clock(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if isinstance(value, float) and value < 100 else f"{value:,.0f}"


def repeat(scene: Scene) -> Section | None:
    lines = [clean(scene.run.command)] if scene.run.command else []
    if not lines or (scene.size is None and scene.run.manifest is None):
        lines += list(dict.fromkeys(clean(_bench_command(record)) for record in scene.records))
    return Section("repeat", "Repeat it", (Commands(tuple(lines)),)) if lines else None


def _bench_command(record: BenchRecord) -> str:
    rules = record.protocol
    parts = ["trt-engine", "bench", record.engine, "--protocol", rules.name]
    parts += ["--shapes", ",".join(f"{name}:{format_shape(shape)}" for name, shape in record.shapes.items())]
    parts += ["--warmup", f"{rules.warmup_s:g}", "--duration", f"{rules.duration_s:g}"]
    return shlex.join(parts if record.device == "cpu" else [*parts, "--device", record.device])

"""`profile`: its result, and the sections of bottleneck, time breakdown, kernels and layers, instruments, device peaks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trt_engine.errors import in_callers_language
from trt_engine.format import (
    format_bytes,
    format_column,
    format_count,
    format_difference,
    format_int,
    format_number,
    format_or_dash,
    format_percent,
    scale_unit,
)
from trt_engine.records.profile import CATEGORIES, DevicePeaks, KernelRow, LayerProfile, LayerRow, ProfileReport
from trt_engine.reporting import tables
from trt_engine.reporting.charts import Bars, Chart, Stack, StackedBars
from trt_engine.reporting.context import ReportContext
from trt_engine.reporting.document import (
    Block,
    Commands,
    Facts,
    KeyFigure,
    Notice,
    Paragraph,
    Section,
    Table,
    make_facts,
)
from trt_engine.reporting.run_records import RunRecords

NamedProfiles = Sequence[tuple[str, ProfileReport]]

_MAX_BARS = 16  # in one chart
_MAX_TABLES = 4  # kernel tables on one page
_MAX_ROWS, _MAX_ROWS_EACH = 25, 10  # rows of a table that stands alone, and of one among several
_MAX_NAME = 180  # letters of a name that another has too
_MAX_CHART_BARS = 15  # bars of layers or kernels
_OTHER_INDEX = len(CATEGORIES)
_EXCESS = 0.05  # fraction of the wall time: a smaller difference between layers and total is noise
_BOUND_LABELS = {
    "launch": "launch-bound",
    "copy": "copy-bound",
    "bandwidth": "bandwidth-bound",
    "compute": "compute-bound",
    "host": "host-bound",
    "unknown": "not known",
}
_CONFIDENCE_LABELS = {
    "measured": "measured",
    "estimated": "estimated from counts of the graph",
    "none": "not shown by any figure",
}


def profile_report(report: ProfileReport, top: int | None = None) -> Iterator[Block | Section]:
    """The sections of a report on one profile."""
    context = ReportContext(RunRecords(Path(), profile=report))
    named = named_profiles(context)
    rule, seconds = report.protocol, report.protocol.duration_s if report.wall_s is None else report.wall_s
    shapes, times = tables.shapes_text(report.shapes), report.compute_ms
    yield from (*verdict_blocks(report), Paragraph(""))
    yield make_facts(
        ("engine", f"{report.engine} ({report.backend} on {report.device}, {report.precision})"),
        ("batch", f"{report.batch} ({shapes})" if shapes else str(report.batch)),
        ("measured", f"{seconds:.3g} s after {rule.warmup_s:g} s of warm-up, protocol {rule.name}"),
        ("compute", f"median {format_number(times.median)}, p99 {format_number(times.p99)} ms" if times else None),
    )
    found = (
        breakdown_section(named),
        kernels_section(named, top),
        layers_section(named, top),
        instruments_section(context, named),
    )
    yield from (section for section in found if section is not None)
    files = [*report.files.items(), *((f"open {name} with", how) for name, how in report.open_commands.items())]
    ended = None if report.complete else "interrupted"
    yield from (Paragraph(""), make_facts(*files, ("warning", report.warnings), ("incomplete", ended)))


def peaks_table(peaks: DevicePeaks) -> Table:
    """Measured and promised rates of a device, with where each comes from."""
    measured = f" (measured {peaks.measured_at})" if peaks.measured_at else ""
    rows = []
    for item in peaks.peaks:
        value, unit = scale_unit(item.value, item.unit)
        source = "" if item.source == "measured" else "not measured: "
        rows.append((item.name, format_number(value), unit, f"{source}{item.method}"))
    columns = ("peak", "value", "unit", "how")
    return Table(f"{peaks.device} can do at most{measured}", columns, tuple(rows), frozenset((0, 2, 3)))


# ------------------------------------------------------------------------------------------------ the report


def key_figures(profile: ProfileReport) -> Iterator[KeyFigure]:
    slowest = _slowest_figure(profile)
    if profile.bottleneck.bound != "unknown" or slowest is None:
        found = profile.bottleneck
        yield KeyFigure("bottleneck", _BOUND_LABELS[found.bound], _CONFIDENCE_LABELS[found.confidence])
    if slowest is not None:
        yield slowest
    yield KeyFigure(
        "ms per inference", format_or_dash(profile.time_breakdown.wall_ms), f"batch {profile.batch}, profiler off"
    )
    if profile.time_breakdown.kernels is not None:
        yield KeyFigure("kernels", format_or_dash(profile.time_breakdown.kernels), "launched in one inference")
    elif profile.layers is not None:
        yield KeyFigure("layers", format_int(len(profile.layers.rows)), "timed by the backend")


def _slowest_figure(profile: ProfileReport) -> KeyFigure | None:
    """The slowest layer or kernel, and its share of the total."""
    found = profile.layers
    if found is not None and found.rows and found.clock != "launch":
        row = max(found.rows, key=lambda row: row.median_ms)
        note = f"{_layer_label(row)}, {format_or_dash(row.median_ms)} ms"
        return KeyFigure("slowest layer", f"{100 * row.share:.1f} %", note)
    if profile.kernels:
        first = max(profile.kernels, key=lambda row: row.share)
        note = f"{_truncate(first.short_name)}, {format_or_dash(first.ms_per_inference)} ms"
        return KeyFigure("slowest kernel", f"{100 * first.share:.1f} %", note)
    return None


def _layer_label(row: LayerRow) -> str:
    """`layer2.0.conv1 (Conv)`: its PyTorch module, else its ONNX node, else its name."""
    made_of = row.onnx_nodes[0] if row.onnx_nodes else row.name
    return _truncate(f"{row.module or made_of} ({row.kind or row.category})")


def notices(named: NamedProfiles) -> Iterator[Notice]:
    for name, profile in named:
        if not profile.complete:
            yield Notice(f"The profile of {name} was interrupted; what it has stands below.")


def bottleneck_section(named: NamedProfiles) -> Section | None:
    """The bottleneck of each engine, with evidence."""
    if not named:
        return None
    if len(named) == 1:
        return Section("verdict", "Verdict", tuple(verdict_blocks(named[0][1])))
    alike = tables.group_by(
        named, lambda pair: (pair[1].bottleneck.bound, pair[1].bottleneck.summary, pair[1].bottleneck.next_step)
    )
    rows = [
        (f"all {len(named)}" if len(group) == len(named) else ", ".join(name for name, _ in group),
         _BOUND_LABELS[bound], summary, following)
        for (bound, summary, following), group in alike.items()
    ]  # fmt: skip
    table = tables.text_table("What holds each engine back", ("engine", "bound", "verdict", "next experiment"), rows)
    commands = [line for (_, p), *_ in alike.values() if (line := p.bottleneck.command)]  # one of those alike
    return Section("verdict", "Verdict", (table, *([Commands(tuple(dict.fromkeys(commands)))] if commands else [])))


def verdict_blocks(profile: ProfileReport) -> Iterator[Block]:
    """The bottleneck with its evidence, and the next experiment."""
    verdict = profile.bottleneck
    yield Paragraph(tables.to_sentence(verdict.summary))
    if verdict.evidence:
        yield Facts(verdict.evidence)
    known = {
        "estimated": f" The verdict is estimated: it rests on {profile.evidence}.",
        "none": " Nothing was measured that a verdict could rest on.",
    }.get(verdict.confidence, "")
    yield Paragraph(f"Next: {tables.to_sentence(verdict.next_step)}{known}")
    if verdict.command:
        yield Commands((in_callers_language(verdict.command),))


def breakdown_section(named: NamedProfiles) -> Section | None:
    """Time of one inference by category, and its breakdown."""
    if not named:
        return None
    blocks: list[Block] = []
    charts = [chart for chart in (_category_chart(named, True), _category_chart(named, False)) if chart is not None]
    if charts:
        blocks.append(tuple(charts))
    categories = [name for name in CATEGORIES if any(_category_ms(profile, name) for _, profile in named)]
    per_image = len({profile.batch for _, profile in named}) > 1
    if categories:
        rows: tables.Columns = []
        for category in categories:
            times = [_category_ms(profile, category) / (profile.batch if per_image else 1) for _, profile in named]
            shares = [format_percent(_category_share(profile, category)) for _, profile in named]
            rows.append((category, [f"{ms} ({share})" for ms, share in zip(format_column(times), shares, strict=True)]))
        counted = ["kernels" if profile.kernels else "layers" for _, profile in named]
        caption = f"Milliseconds per {'image' if per_image else 'inference'} by category, with the share of their sum"
        lead = [("engine", [name for name, _ in named]), *tables.varying_columns([("of", counted)])]
        blocks.append(tables.make_table(caption, [*lead, *rows], words=len(lead)))
    notes = [
        _clock_note(named),
        "A dash means that the profiler used does not measure it.",
        "Shares are of the categories' sum, which kernels that ran side by side may carry beyond the wall time.",
        *(f"{name}: {note}" if len(named) > 1 else note for name, profile in named for note in _time_notes(profile)),
    ]
    return Section("breakdown", "Where the time goes", (*blocks, _breakdown_table(named), Paragraph(" ".join(notes))))


def _time_notes(profile: ProfileReport) -> Iterator[str]:
    """What the figures of one profile mean: time outside of its layers, the cost of their profiler, types."""
    split, layers, categories = profile.time_breakdown, profile.layers, profile.categories
    rest = 0.0 if profile.kernels or not categories else split.wall_ms - sum(item.ms for item in categories)
    if rest > 0:
        yield f"{format_or_dash(rest)} ms are not in the layers' medians: between layers, or layers that were held up."
    elif rest < -_EXCESS * split.wall_ms:
        excess = f"{format_or_dash(-rest)} ms more than the wall time"
        yield f"The layers' medians add up to {excess}: their profiler's time is in them."
    if layers is not None and layers.wall_ms is not None and layers.clock != "launch":
        cost = format_difference(layers.wall_ms - split.wall_ms, 3)
        yield f"With the layers' profiler on, an inference takes {format_or_dash(layers.wall_ms)} ms: {cost} ms, or chance."
    if profile.device == "cpu":
        yield "On a CPU nothing is copied: the computation is the call itself."
    if profile.precisions:
        shares = ", ".join(f"{name} {format_percent(share)}" for name, share in profile.precisions.items())
        yield f"Computes in {shares} of the layers' time."


def _clock_note(named: NamedProfiles) -> str:
    """The clocks of the time breakdown."""
    known = [profile for _, profile in named if profile.time_breakdown.gpu_ms is not None]
    wall = "Wall time is by the host's clock, no profiler"
    profiled = (
        "Busy (something runs on the device), idle (nothing does), launching (the host is inside launch calls) and "
        "side-by-side times come from the profiler and include its overhead."
    )
    if not known:
        return f"{wall}; the device's times come from the profiler, whose own cost is in them."
    if all(profile.protocol.clock == "device events" for profile in known):
        wall = "Wall time is the mean from one end to the next, one inference enqueued ahead, by events, no profiler"
    longer = any(profile.exceeds_total for profile in known)
    replayed = ", in which a graph is replayed" if all(profile.protocol.graph for profile in known) else ""
    beyond = f"; such a computation can be longer than the wall time{replayed}" if longer else ""
    return f"{wall}. Copies and computation are by events, one query at a time, no profiler{beyond}. {profiled}"


def _category_ms(profile: ProfileReport, category: str) -> float:
    return next((item.ms for item in profile.categories if item.category == category), 0.0)


def _category_share(profile: ProfileReport, category: str) -> float:
    total = sum(item.ms for item in profile.categories)
    return _category_ms(profile, category) / total if total else 0.0


def _category_chart(named: NamedProfiles, by_kernel: bool) -> StackedBars | None:
    """Chart of categories by kernel or by layer, which are not comparable."""
    shown = [(name, p) for name, p in named if p.categories and bool(p.kernels) == by_kernel][:_MAX_BARS]
    if not shown:
        return None
    per_image = len({profile.batch for _, profile in shown}) > 1
    what = "kernel" if by_kernel else "layer"
    present = [name for name in CATEGORIES if any(_category_ms(profile, name) for _, profile in shown)]
    walls = [profile.time_breakdown.wall_ms for _, profile in shown]
    outside = [max(0.0, ms - sum(item.ms for item in p.categories)) for ms, (_, p) in zip(walls, shown, strict=True)]
    rest = any(ms > 0.005 * wall for ms, wall in zip(outside, walls, strict=True))
    parts = [(name, CATEGORIES.index(name)) for name in present] + [(f"outside of {what}s", _OTHER_INDEX)] * rest
    stacks = []
    for (name, profile), other in zip(shown, outside, strict=True):
        values = [*(_category_ms(profile, category) for category in present), *([other] * rest)]
        stacks.append(Stack(name, tuple(ms / (profile.batch if per_image else 1) for ms in values)))
    title = f"One {'image' if per_image else 'inference'} by category of {what}"
    return StackedBars(f"categories-{what}s", title, "ms", tuple(parts), tuple(stacks))


def _breakdown_table(named: NamedProfiles) -> Table:
    splits = [profile.time_breakdown for _, profile in named]
    columns: tables.Columns = [("engine", [name for name, _ in named]), ("batch", [str(p.batch) for _, p in named])]
    columns += tables.number_columns(splits, {
        "wall": "wall_ms", "copy in": "h2d_ms", "compute": "compute_ms", "copy out": "d2h_ms", "busy": "busy_ms",
        "idle": "idle_ms", "launching": "launch_ms",
    })  # fmt: skip
    overlaps = [split.overlap_ms for split in splits]  # less than 0.1 µs is the clocks' doing
    columns += tables.known_columns([("side by side", [None if ms is None else round(ms, 4) for ms in overlaps])])
    if any(split.kernels is not None for split in splits):
        columns.append(
            ("kernels", ["–" if split.kernels is None else tables.format_rate(split.kernels) for split in splits])
        )
    return tables.make_table("One inference, in ms", columns, words=1)


def kernels_section(named: NamedProfiles, most: int | None = None) -> Section | None:
    """The slowest kernels of each engine, at most `most`."""
    shown = [(name, profile) for name, profile in named if profile.kernels]
    if not shown:
        return None
    blocks: list[Block] = []
    timed = any(p.layers is not None and p.layers.rows and p.layers.clock != "launch" for _, p in named)
    if len(shown) == 1 and not timed:
        kernels = shown[0][1].kernels
        slowest = [(_truncate(row.short_name or row.name), row.ms_per_inference, row.share) for row in kernels]
        blocks.append((_share_chart("kernels-slowest", "Slowest kernels", slowest),))
    limit = most or (_MAX_ROWS if len(shown) == 1 else _MAX_ROWS_EACH)
    for name, profile in shown[:_MAX_TABLES]:
        rows = profile.kernels[:limit]
        which = "" if len(shown) == 1 else f" of {name}"
        more = tables.more_note(limit, len(profile.kernels), "longest")
        columns: tables.Columns = [
            ("kernel", _unique_kernel_names(rows)),
            ("category", [row.category for row in rows]),
            ("per inference", [tables.format_rate(row.per_inference) for row in rows]),
            ("ms", format_column([row.per_inference * row.mean_us / 1000 for row in rows])),
            ("share %", format_column([100 * row.share for row in rows], 2)),
            *tables.number_columns(rows, {"mean µs": "mean_us", "max µs": "max_us"}),
        ]
        label = profile.layers.layer_label if profile.layers is not None else str
        if any(row.layers for row in rows):
            columns.append(("launched by", [_first_names([label(name) for name in row.layers]) for row in rows]))
        blocks.append(
            tables.make_table(f"Kernels{which}{more}; ms in one inference", columns, words=2, also=("launched by",))
        )
    blocks += _shown_note(len(shown), "kernels")
    counters = [(name, item) for name, profile in named for item in profile.counters]
    if counters:
        items = [item for _, item in counters]
        names = tables.varying_columns([("engine", [name for name, _ in counters])])
        columns = [*names, ("kernel", [_truncate(item.kernel) for item in items])]
        columns.append(("launches", [format_int(item.launches) for item in items]))
        columns += tables.number_columns(items, {
            "µs": "duration_us", "compute % of peak": "compute_pct", "memory % of peak": "memory_pct",
            "DRAM % of peak": "dram_pct", "occupancy %": "occupancy_pct",
        })  # fmt: skip
        caption = "By Nsight Compute, of the first launches of each, one by one and with cold caches"
        blocks.append(tables.make_table(caption, columns, words=1 + len(names)))
        advice = list(dict.fromkeys((_truncate(item.kernel), said) for item in items for said in item.advice))
        if advice:
            blocks.append(tables.text_table("What Nsight Compute advises", ("kernel", "advice"), advice[:_MAX_ROWS]))
    return Section("kernels", "Kernels", tuple(blocks))


def layers_section(named: NamedProfiles, most: int | None = None) -> Section | None:
    """The slowest layers of each engine, at most `most`."""
    shown = [(name, profile, profile.layers) for name, profile in named if profile.layers and profile.layers.rows]
    if not shown:
        return None
    blocks: list[Block] = []
    limit = most or (_MAX_ROWS if len(shown) == 1 else _MAX_ROWS_EACH)
    if len(shown) == 1 and shown[0][2].clock != "launch":
        blocks.append(_layer_charts(shown[0][2]))
    for name, _, found in shown[:_MAX_TABLES]:
        rows = sorted(found.rows, key=lambda row: -row.median_ms)[:limit]  # one slow call decides a mean
        which = "" if len(shown) == 1 else f" of {name}"
        more = tables.more_note(limit, len(found.rows), "longest")
        shares = [("share %", format_column([100 * row.share for row in rows], 2))] if found.clock != "launch" else []
        types = [row.precision or ", ".join(row.dtypes) for row in rows]
        places = [" ".join([row.provider, row.device]).strip() for row in rows]
        nodes = [_first_names([name for name in row.onnx_nodes if name != row.name]) for row in rows]
        columns: tables.Columns = [
            *([("module", [_truncate(row.module or "-") for row in rows])] if any(row.module for row in rows) else []),
            ("layer", [_truncate(row.name) for row in rows]),
            ("kind", [_truncate(row.kind or row.category) for row in rows]),
            *tables.number_columns(rows, {"median ms": "median_ms", "mean ms": "mean_ms"}),
            *shares,
            *_rate_columns(rows, found.clock != "launch"),
            *tables.varying_columns([("calls", [tables.format_rate(row.calls) for row in rows])]),
            *tables.varying_columns([("type", types), ("runs on", places)]),
            *([("ONNX nodes", nodes)] if any(nodes) else []),
        ]
        lead = 2 + (columns[0][0] == "module")
        clock = "the device's clock" if found.clock == "device" else "the host's clock"
        caption = f"Layers{which}{more}, by {found.instrument}, {clock}; ms in one inference"
        blocks.append(tables.make_table(caption, columns, words=lead, also=("type", "runs on", "ONNX nodes")))
        blocks += [Notice(tables.to_sentence(note), "info") for note in found.notes]
    blocks += _shown_note(len(shown), "layers")
    return Section("layers", "Layers", tuple(blocks))


def _shown_note(count: int, what: str) -> list[Block]:
    text = f"Shown: {_MAX_TABLES} of {count} engines; each record has all its {what}."
    return [Paragraph(text)] if count > _MAX_TABLES else []


def _layer_charts(profile: LayerProfile) -> tuple[Chart, ...]:
    """The slowest layers, and the time by layer type."""
    rows = sorted(profile.rows, key=lambda row: -row.median_ms)
    groups = tables.group_by(rows, lambda row: row.kind or row.category)
    kinds = [
        (f"{kind} × {len(group):,}", sum(row.median_ms for row in group), sum(row.share for row in group))
        for kind, group in groups.items()
    ]
    layers = [(_layer_label(row), row.median_ms, row.share) for row in rows]
    by_time = sorted(kinds, key=lambda item: -item[1])
    return (
        _share_chart("layers", "Slowest layers", layers),
        _share_chart("layer-kinds", "Time by layer type", by_time),
    )


def _share_chart(key: str, title: str, items: Sequence[tuple[str, float, float]]) -> Bars:
    """Bars of times with their shares of the total."""
    shown = items[:_MAX_CHART_BARS]
    notes = tuple(f"{100 * share:.1f} %" for _, _, share in shown)
    more = tables.more_note(len(shown), len(items), "longest")
    return Bars(key, f"{title}{more}", "ms", tuple((name, ms) for name, ms, _ in shown), notes)


def _rate_columns(rows: Sequence[LayerRow], timed: bool) -> tables.Columns:
    """Columns of FLOP/s and bytes/s, in a common unit; none without known work."""
    columns: tables.Columns = []
    for name, unit in (("flops", "GFLOP/s"), ("nbytes", "GB/s")):
        rates = [work / row.median_ms / 1e6 if (work := getattr(row, name)) and row.median_ms else None for row in rows]
        most = max(filter(None, rates), default=0.0)
        if timed and most:
            shown, unit = scale_unit(most, unit)
            columns.append((unit, format_column([None if rate is None else rate * shown / most for rate in rates])))
    return columns


def instruments_section(context: ReportContext, named: NamedProfiles) -> Section | None:
    """The profiler used, why others were not, and the device peaks."""
    if not named:
        return None
    blocks: list[Block] = []
    tried = tables.group_by(
        named,
        lambda pair: tuple(
            (one.name, "used" if one.used else "no", tables.with_hint(one.reason, one.fix))
            for one in pair[1].instruments
        ),
    )
    for rows, group in tried.items():
        which = [name for name, _ in group]
        others = " and others" * (len(which) > _MAX_TABLES)
        where = "" if len(tried) == 1 else f": {', '.join(which[:_MAX_TABLES])}{others}"
        marked = [index for index, row in enumerate(rows) if row[1] == "used"]
        if rows:
            blocks.append(tables.text_table(f"Instruments{where}", ("instrument", "", "reason"), rows, marked))
    for found in {profile.peaks.key: profile.peaks for _, profile in named if profile.peaks}.values():
        blocks += [peaks_table(found)] if found.peaks else []
        blocks += [Notice(tables.to_sentence(reason), "info") for reason in (*found.skipped, *found.notes)]
    ran = {fact for record in context.records for fact in (*record.runtime_info.items(), ("inputs", record.inputs))}
    facts = [
        (f"{name}: {key}" if len(named) > 1 else key, value)
        for name, p in named
        for key, value in _readable_facts(p.runtime_info)
        if (key, value) not in ran  # listed under what ran
    ]
    if facts and len(named) <= _MAX_TABLES:
        blocks.append(Facts(tuple(facts)))
    if len(named) == 1:
        blocks.append(Paragraph(f"{tables.plural(named[0][1].inferences, 'inference')} captured with the profiler on."))
    return Section("instruments", "Instruments", tuple(blocks)) if blocks else None


def _readable_facts(facts: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Facts with readable names and units."""
    for key, value in facts.items():
        if key == "flops" and value.isdecimal():
            yield "operations of one inference", f"{format_count(int(value))}FLOP"
        elif key == "flops_from":
            yield "operations counted from", value
        elif key == "nbytes" and value.isdecimal():
            yield "bytes it moves at least", format_bytes(int(value))
        else:
            yield key.replace("_", " ") if key == "layers_of_kernels" else key, value


def _first_names(names: Sequence[str]) -> str:
    return _truncate(", ".join(names[:2])) + (f" and {len(names) - 2:,} more" if len(names) > 2 else "")


def _unique_kernel_names(rows: Sequence[KernelRow]) -> list[str]:
    """Kernel names; equal ones with their template arguments."""
    own = [_truncate(row.short_name or row.name) for row in rows]
    return [_template_name(row.name) if own.count(name) > 1 else name for row, name in zip(rows, own, strict=True)]


def _template_name(name: str) -> str:
    """The full name without return type and parameters."""
    text = name.removeprefix("void ")
    whole = text[: text.index(">(") + 1] if ">(" in text else text
    return whole if len(whole) <= _MAX_NAME else f"{whole[: _MAX_NAME - 40]}…{whole[-39:]}"


def named_profiles(context: ReportContext) -> NamedProfiles:
    """Every profile of the run by name."""
    return [(name, profile) for name, profile, _ in context.profiles]


def _truncate(text: str) -> str:
    """Truncate a name; kernel templates have thousands of characters."""
    return text if len(text) <= 90 else f"{text[:60]}…{text[-29:]}"

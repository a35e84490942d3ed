"""`size`: its result, and the sections of stream count, measured batches, cliffs, steps, checks and next steps."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from trt_engine.backend import list_backends
from trt_engine.format import format_difference, format_or_dash, format_streams
from trt_engine.records.size import BatchResult, SizeReport
from trt_engine.reporting import tables
from trt_engine.reporting.bench import confidence_note
from trt_engine.reporting.charts import Bars, Chart, Line, LineChart, Point
from trt_engine.reporting.context import ReportContext
from trt_engine.reporting.document import Block, Commands, KeyFigure, Notice, Paragraph, Section, make_facts
from trt_engine.reporting.run_records import RunRecords
from trt_engine.reporting.streams import cameras_line, cameras_section, interval_text, streams_section

_MAX_STEPS = 16  # bars in one chart


def size_report(report: SizeReport) -> Iterator[Block | Section]:
    """The sections of a report on a size run; scripts read the last line, the stream count."""
    context = ReportContext(RunRecords(Path(), report))
    serves, rule = next(key_figures(context, report)), report.protocol
    graph = ", CUDA graph" if rule is not None and rule.graph else ""
    spans = None if rule is None else f"{rule.name}, {rule.warmup_s:g} s warm-up, {rule.duration_s:g} s run{graph}"
    yield make_facts(
        ("model", f"{report.model_name} ({report.model})"),
        ("engine", f"{report.engine} ({report.backend}, {report.device}, {report.precision})"),
        ("protocol", spans),
        (serves.label, f"{serves.value} {serves.note}"),
        ("not stable", (f"batch {batch.batch}: {reason}" for batch in report.batches for reason in batch.instability)),
        ("note", [stop_reason(report), *report.notes]),
    )
    yield from (Paragraph(""), Paragraph(explain_count(context)))
    found = (measurements_section(context, report), cliffs_section(report), steps_section(report))
    yield from (section for section in found if section is not None)
    following = f"trt-engine inspect {shlex.quote(report.engine or '')}"
    written = report.artifacts.get("report_html", report.artifacts.get("folder", ""))
    yield from (Paragraph(""), make_facts(("report", written), ("next", following)))
    if (keys := nvinfer_section(report)) is not None:
        yield from (Paragraph(""), keys.blocks[0])
        yield from map(Paragraph, nvinfer_lines(report.nvinfer, report.nvinfer_notes))
    for answer in (streams_section(report), cameras_section(report)):
        if answer is not None:
            yield answer
    how = "GPU-only upper bound" if context.on_gpu else "measured on the CPU, not a GPU"
    at = f"{report.peak_streams} streams @{report.fps:g}fps"
    yield from (Paragraph(""), Paragraph(f"PEAK_GPU_STREAMS: {at} ({how})"))
    if report.video is not None:
        yield Paragraph(cameras_line(report.video))


# ------------------------------------------------------------------------------------------------ the report


def key_figures(context: ReportContext, size: SizeReport) -> Iterator[KeyFigure]:
    where = "" if context.on_gpu else f", on {context.place}"
    if size.video is not None:
        note = (
            f"{interval_text(size.video)}; limit: {size.video.limit}; measured within {size.video.deadline_ms:.4g} ms"
        )
        yield KeyFigure(f"cameras{where}", f"{size.video.streams:,}", note)
    bound = "GPU-only upper bound" if context.on_gpu else "upper bound from compute alone"
    best = size.best if size.peak_streams is not None else None  # of a run that ended early nothing is concluded
    if best is None:
        yield KeyFigure(f"streams at {size.fps:g} fps", "–", f"{bound}{where}")
        yield KeyFigure("images/s", "–", "nothing measured")
    else:
        serves, how = format_streams(best.images_per_s, size.fps)
        yield KeyFigure(f"serves{where}", serves, f"{how}, batch {best.batch}; {bound}")
        yield KeyFigure("images/s", format_or_dash(best.images_per_s), f"at batch {best.batch}")
    if size.capacity is not None:
        found = size.capacity
        span = f"{found.low} to {found.high}; {found.policy}"
        yield KeyFigure(f"streams within {found.deadline_ms:g} ms", f"{found.streams:,}", span)
    if size.batches:
        one, last = size.batches[0], size.batches[-1]
        p99 = f"mean; p99 {format_or_dash(one.compute_ms.p99)} ms"
        yield KeyFigure(f"ms at batch {one.batch}", format_or_dash(one.compute_ms.mean), p99)
        if last.batch != one.batch:
            yield KeyFigure("ms per image", format_or_dash(last.per_image_ms), f"at batch {last.batch}")


def explain_count(context: ReportContext) -> str:
    size = context.size
    if size is None or size.peak_streams is None:
        return ""
    last, fps = size.batches[-1].batch, f"{size.fps:g} fps"
    fewer = "DeepStream typically reaches 10-40 % fewer (NVDEC, mux, GStreamer)"
    parts = [
        f"The count is the GPU-only upper bound at {fps}: {fewer} and starts its first run from this count."
        if context.on_gpu
        else f"The count is an upper bound at {fps} from compute alone on this device, and no GPU figure. The "
        f"same bound measured on a GPU, by `size` with TensorRT there, is where DeepStream starts its first run; {fewer}.",
        f"images/s = queries/s x batch; streams = floor(images/s / {size.fps:g}).",
    ]
    if size.best is not None and size.best.batch != last:
        parts.append(
            f"The stream count ({size.peak_streams}) is of the doubling's last batch, {last}; batch {size.best.batch} "
            "delivers more."
        )
    if size.peak_streams > last:
        parts.append(f"The engine's largest batch is {last}: DeepStream batches at most {last} streams.")
    return " ".join(parts)


def notices(size: SizeReport) -> Iterator[Notice]:
    if size.complete or size.batches:
        yield Notice(stop_reason(size), "info" if size.stop_reason == "peak_within_batch" else "warning")
    yield from (Notice(tables.to_sentence(note), "info") for note in size.notes)


def measurements_section(context: ReportContext, size: SizeReport) -> Section | None:
    results = merge_results(size)
    if not results:
        return None
    final = size.batches[-1].batch if size.batches else None
    counts = (
        f"{tables.plural(size.engines_built, 'engine')} built, {tables.plural(size.measurements, 'measurement')} taken"
    )
    if size.scan_measurements:
        counts += f" ({size.scan_engines} and {size.scan_measurements} of them for the scan)"
    follows = f"The stream count follows from the marked row, batch {final}." if final is not None else ""
    table = tables.make_table(
        f"One row for each engine and batch size; times in ms per query on {context.place}, {context.timing_scope()}",
        tables.measurement_columns(results, [r.compute_ms for r in results]),
        marked=[index for index, r in enumerate(results) if r.batch == final],
    )
    charts = [_batch_charts(context, results, size.fps)] if len(results) > 1 else []
    return Section("measurements", "Measurements", (*charts, table, Paragraph(f"{counts}. {follows}")))


def _batch_charts(context: ReportContext, results: Sequence[BatchResult], fps: float) -> tuple[Chart, ...]:
    known = {(record.batch, record.engine): record for record in context.records}
    names = [f"batch {r.batch}" for r in results]
    widths = [confidence_note(known.get((r.batch, r.engine)), r.stable) for r in results]
    rates, served = [r.images_per_s for r in results], [format_streams(r.images_per_s, fps)[0] for r in results]
    charts = (
        ("throughput", "Throughput by batch size", "images/s", rates, widths),
        ("streams", f"Streams at {fps:g} fps by batch size", "", [rate / fps for rate in rates], served),
        ("per-image", "Time per image by batch size", "ms", [r.per_image_ms for r in results], widths),
    )
    return tuple(
        Bars(key, title, unit, tuple(zip(names, values, strict=True)), tuple(notes))
        for key, title, unit, values, notes in charts
    )


def cliffs_section(size: SizeReport) -> Section | None:
    if not size.cliffs:
        return None
    points = sorted(size.cliffs, key=lambda found: found.batch)
    bad = sorted({*size.slow_batches, *(p.batch for p in points if p.cliff)})
    powers = [p.batch for p in points if not p.cliff and p.batch & (p.batch - 1) == 0]
    said = f"No cliff between batch {points[0].batch} and {points[-1].batch}."
    if bad:
        what = "size" if len(bad) == 1 else "sizes"
        said = f"Avoid batch {what} {', '.join(map(str, bad))}: much slower than the neighbours."
    if powers:
        said += f" Prefer powers of two: {', '.join(map(str, powers))}."
    labels = _group_ranges([p.batch for p in points if p.cliff])
    measured = (Point(p.batch, p.images_per_s, labels.get(p.batch, ""), "cliff" if p.cliff else "") for p in points)
    expected = (Point(p.batch, p.expected_images_per_s) for p in points if p.expected_images_per_s is not None)
    lines = (Line("measured", tuple(measured)), Line("what the neighbours suggest", tuple(expected), "dashed"))
    chart = LineChart("cliffs", "Throughput around the chosen batch size", "batch size", "images/s", lines)
    lost = [100 * (p.images_per_s / p.expected_images_per_s - 1) if p.expected_images_per_s else None for p in points]
    table = tables.make_table(
        "Images per second by batch size",
        [
            ("batch", [str(p.batch) for p in points]),
            ("measured", [format_or_dash(p.images_per_s) for p in points]),
            ("suggested", [format_or_dash(p.expected_images_per_s) for p in points]),
            ("difference %", list(map(format_difference, lost))),
            ("", ["cliff" if p.cliff else "" for p in points]),
        ],
        marked=[index for index, p in enumerate(points) if p.cliff],
    )
    return Section("cliffs", "Batch cliffs", (Paragraph(said), (chart,), table))


def checks_section(size: SizeReport) -> Section | None:
    """The pre-flight checks and the findings about the model."""
    blocks: list[Block] = []
    if size.preflight:
        checks = [(c.name, c.status, tables.with_hint(c.text, c.hint)) for c in size.preflight]
        marked = [index for index, check in enumerate(size.preflight) if check.status != "ok"]
        blocks.append(tables.text_table("Pre-flight", ("checked", "", "found"), checks, marked))
    if size.findings:
        found = [
            (f.code, f.severity, tables.with_hint(f"{f.message} ({f.location})" if f.location else f.message, f.hint))
            for f in size.findings
        ]
        marked = [index for index, finding in enumerate(size.findings) if finding.severity != "info"]
        blocks.append(tables.text_table("Findings about the model", ("finding", "", "what it means"), found, marked))
    return Section("findings", "Checks", tuple(blocks)) if blocks else None


def nvinfer_section(size: SizeReport) -> Section | None:
    """The nvinfer keys for the model."""
    if not size.nvinfer:
        return None
    known = list_backends().get(size.backend)
    when = "." if size.engine and known is not None and known.nvinfer else ", once built with TensorRT."
    lines = Commands(tuple(nvinfer_lines(size.nvinfer, size.nvinfer_notes)))
    return Section("next", "Next", (Paragraph(f"Keys of DeepStream's nvinfer for this model{when}"), lines))


def nvinfer_lines(keys: Mapping[str, str], notes: Iterable[str]) -> list[str]:
    """A `[property]` block for nvinfer's configuration, with the notes as comments."""
    return ["[property]", *(f"{name}={value}" for name, value in keys.items()), *(f"# {note}" for note in notes)]


def steps_section(size: SizeReport) -> Section | None:
    if not size.steps:
        return None
    steps = [(step.name, step.seconds) for step in size.steps]
    total = sum(seconds for _, seconds in steps)
    longest = sorted(range(len(steps)), key=lambda index: -steps[index][1])[:_MAX_STEPS]
    title = f"Time per step{tables.more_note(_MAX_STEPS, len(steps), 'longest')}"
    chart = Bars("steps", title, "s", tuple(steps[index] for index in sorted(longest)))
    names, times = zip(*steps, ("in all", total), strict=True)
    seconds = [f"{value:,.{1 if total >= 100 else 2}f}" for value in times]
    rows = tables.make_table("Seconds by step", [("step", names), ("s", seconds)], words=1, marked=[len(steps)])
    return Section("steps", "Time per step", ((chart,), rows))


def merge_results(size: SizeReport) -> list[BatchResult]:
    """All measured batches, each once, by batch size."""
    found = {(result.batch, result.engine): result for result in (*size.all_batches, *size.batches)}
    return sorted(found.values(), key=lambda result: result.batch)


def _group_ranges(numbers: Sequence[int]) -> dict[int, str]:
    """Merge adjacent numbers into ranges, by the middle number: `{18: "17–19", 23: "23"}`."""
    spans: list[list[int]] = []
    for value in numbers:
        if spans and value == spans[-1][-1] + 1:
            spans[-1].append(value)
        else:
            spans.append([value])
    return {span[len(span) // 2]: f"{span[0]}–{span[-1]}" if len(span) > 1 else str(span[0]) for span in spans}


def stop_reason(size: SizeReport) -> str:
    last = f"batch {size.batches[-1].batch}" if size.batches else None
    beyond = f" at batch {', '.join(map(str, size.out_of_memory))}" if size.out_of_memory else ""
    stands = f"; the last good answer, {last}, stands." if last else "."
    streams = f"{size.peak_streams} streams"
    return {
        "peak_within_batch": f"The doubling ended because {streams} fit within the engine's {last}.",
        "max_batch": f"The doubling ended at the largest batch allowed ({last}) with {streams}: "
        "a larger --max-batch may sustain more.",
        "out_of_memory": f"The doubling ended out of memory{beyond}{stands}",
        "static_batch": f"The model's batch is fixed ({last}): export it with a dynamic batch to try a larger one.",
        "interrupted": f"The doubling was interrupted{stands}",
        "failed": f"The doubling failed{stands}",
    }[size.stop_reason]

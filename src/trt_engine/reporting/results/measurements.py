"""Results of the verbs that run engines, `bench` to `run`, and of `pack`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UnsetType

from trt_engine.benchmark.log_writer import first_line, format_float
from trt_engine.config.profiles import Profile
from trt_engine.format import format_bytes, format_ms, format_number
from trt_engine.records.bench import BenchPlan, BenchRecord, LogReport
from trt_engine.records.compare import ComparePlan, CompareReport, EngineDiff
from trt_engine.records.evaluate import MAIN_METRIC, EvaluatePlan, EvaluateReport, Evaluation
from trt_engine.records.infer import Detection, InferPlan, InferReport
from trt_engine.records.profile import ProfilePlan, ProfileReport
from trt_engine.records.serve import ServedModel, ServeReport
from trt_engine.records.size import SizePlan, SizeReport
from trt_engine.records.summary import percentile, summarize
from trt_engine.records.sweep import CellResult, RunPlan, RunSummary
from trt_engine.records.upgrade import UpgradeReport
from trt_engine.reporting.document import Block, Fact, Paragraph, Section, Table, make_facts
from trt_engine.reporting.pack import PackReport
from trt_engine.reporting.results.common import name_groups, plural, shapes_text, sized
from trt_engine.tensors import format_shape


def bench_record(record: BenchRecord, artifacts: Mapping[str, str] | None = None) -> Iterator[Block]:
    rule, summary = record.protocol, record.compute_summary()
    seconds = [f"{format_float(rule.warmup_s)} s"] if rule.warmup_s or not rule.min_warmup else []
    warmup = " and ".join([*seconds, *([f"{rule.min_warmup} queries"] if rule.min_warmup else [])])
    modes = f"transfers {'on' if rule.transfers else 'off'}, graph {'on' if rule.graph else 'off'}"
    yield Paragraph(first_line(record))
    yield make_facts(
        ("engine", f"{record.engine} ({record.backend})"),
        ("validation", record.validation or None),
        ("protocol", f"{rule.name}: {format_float(rule.duration_s)} s after {warmup} of warm-up, {modes}"),
        ("batch", str(record.batch)),
        ("throughput", f"{format_float(record.qps)} queries/s, {format_float(record.images_per_s)} images/s"),
        ("per image", f"{format_float(summary.mean / record.batch)} ms" if summary is not None else None),
        ("compute", _times(record, record.compute_ms, record.percentiles)),
        *((name, _times(record, getattr(record, f"{name}_ms"))) for name in ("latency", "enqueue", "h2d", "d2h")),
        (
            "queries",
            f"{record.queries} in {format_float(record.wall_s)} s, {record.warmup_queries} of warm-up left out",
        ),
        _stability(record.stable, record.instability),
        ("incomplete", None if record.complete else "interrupted"),
        *(artifacts or {}).items(),
    )


def _times(record: BenchRecord, samples: Sequence[float], percentiles: Sequence[float] = ()) -> str | None:
    rule, ascending = record.protocol.percentile_rule, sorted(samples)
    if (summary := summarize(samples, rule)) is None:
        return None
    parts = [f"mean {format_float(summary.mean)}", f"median {format_float(summary.median)}"]
    parts += [f"p{percent:g} {format_float(percentile(ascending, percent, rule))}" for percent in percentiles]
    return f"{', '.join(parts)} ms (min {format_float(summary.min)}, max {format_float(summary.max)})"


def _stability(stable: bool, instability: Sequence[str]) -> Fact:
    return "stable", "yes" if stable else f"no: {'; '.join(instability)}"


def log_report(report: LogReport) -> Iterator[Block]:
    """The values of a log."""
    what = f"TensorRT {report.trt_version}" if report.trt_version else report.protocol or "unknown version"
    rate, nbytes = report.throughput_qps, report.requested_bytes
    plugin, node, hint = (
        None if isinstance(text, UnsetType) else text
        for text in (report.error_plugin, report.error_node, report.error_hint)
    )
    rows: list[Fact] = [
        ("log", f"{report.log} ({report.producer}, {what})"),
        ("status", report.status),
        ("cause", None if report.error_text is None else f"{report.error_class or 'unknown'}: {report.error_text}"),
        ("plugin", plugin),
        ("node", node),
        ("hint", hint),
        ("requested", None if isinstance(nbytes, UnsetType) else f"{format_bytes(nbytes)} ({nbytes} bytes)"),
        ("device", report.gpu or report.device),
        ("throughput", None if rate is None else f"{format_float(rate)} queries/s"),
    ]
    for name in ("latency_ms", "enqueue_ms", "h2d_ms", "gpu_compute_ms", "compute_ms", "d2h_ms"):
        if (times := getattr(report, name)) is not None:
            parts = [f"mean {format_float(times.mean)}", f"median {format_float(times.median)}"]
            parts += [f"p{percent} {format_float(value)}" for percent, value in times.by_percent().items()]
            rows.append((name.removesuffix("_ms").replace("_", " "), f"{', '.join(parts)} ms"))
    rows.append(("summary", "no performance summary in this log" if rate is None else None))
    yield make_facts(*rows, ("warning", report.perf_warnings))


# ------------------------------------------------------------------------------------------------ plans


def _plan(first: str, needs_build: bool, writes: Sequence[str]) -> Iterator[Block]:
    """What would be done, built and written."""
    lines = [first, *(["would build its engine into the store first"] * needs_build)]
    yield from (Paragraph(line) for line in (*lines, *(f"would write {place}" for place in writes)))


def bench_plan(plan: BenchPlan) -> Iterator[Block]:
    what = f"{plan.engine} on {plan.device} at {_shapes(plan.shapes)}, protocol {plan.protocol.name}"
    return _plan(f"would measure {what}", plan.needs_build, plan.writes)


def profile_plan(plan: ProfilePlan) -> Iterator[Block]:
    profiler = plan.profiler or "the best available profiler"
    what = f"{plan.engine} on {plan.device} at {_shapes(plan.shapes)}, with {profiler}"
    return _plan(f"would profile {what}", plan.needs_build, plan.writes)


def evaluate_plan(plan: EvaluatePlan) -> Iterator[Block]:
    what = f"{plan.engine} over {plan.images} images of {plan.dataset} ({plan.dataset_kind})"
    return _plan(f"would run {what}", plan.needs_build, plan.writes)


def infer_plan(plan: InferPlan) -> Iterator[Block]:
    writes = [f"{', '.join(plan.outputs)} to {' and '.join(plan.writes)}"] if plan.writes else []
    return _plan(f"would run {plan.engine} once on {plan.inputs}", plan.needs_build, writes)


def compare_plan(plan: ComparePlan) -> Iterator[Block]:
    named = ", ".join([*([plan.baseline] if plan.baseline else []), *plan.engines])
    yield Paragraph(f"would compare {named}: {plan.duration_s:g} s in all, reloaded {plan.restarts} times")
    yield from (Paragraph(f"would build the engine of {path} into the store first") for path in plan.builds)
    yield from (Paragraph(f"would write {place}") for place in plan.writes)


def size_plan(plan: SizePlan) -> Iterator[Block]:
    first, *more = plan.engines
    doubling = ", and one for each doubling" if more else ""
    yield make_facts(
        ("would write to", plan.folder),
        ("first engine", first),
        *(("if doubled", engine) for engine in more),
        ("measurements", f"batch {', '.join(map(str, plan.measurements[:2]))}{doubling}"),
    )


def run_plan(plan: RunPlan) -> Iterator[Block]:
    actions = {"keep": "kept", "leave": "left out", "skip": "skipped"}
    rows: list[Fact] = []
    for cell in plan.cells:
        took = f", about {cell.seconds:.0f} s" if cell.seconds is not None else ""
        target = cell.spec.settings.get("quantize", {}).get("target")
        placed = f", quantised for {target}" if target is not None else ""
        does = actions.get(cell.action) or ", ".join(cell.spec.modes)
        rows.append((cell.spec.label, f"{does} ({cell.reason}{placed}{took})"))
    yield Paragraph(f"would run {plan.plan} in {plan.folder}")
    yield make_facts(*rows)
    if plan.seconds is not None:
        yield Paragraph(f"about {plan.seconds:.0f} s in all, by earlier records")
    yield from (Paragraph(f"warning: {text}") for text in plan.warnings)
    if plan.container_command:
        yield Paragraph(f"would start {shlex.join(plan.container_command)}")


def _shapes(shapes: Mapping[str, Sequence[int]]) -> str:
    return shapes_text(shapes) or "the profile's optimum"


# ------------------------------------------------------------------------------------------------ infer, evaluate


def infer_report(report: InferReport) -> Iterator[Block]:
    again = ""
    if report.median_ms is not None:
        again = f", then {format_ms(report.median_ms)} (median of {len(report.samples_ms) - 1})"
    outputs = []
    for item in report.outputs:
        spread = "" if item.mean is None else f", min {item.min:.6g}, max {item.max:.6g}, mean {item.mean:.6g}"
        odd = f", {item.not_finite} values are NaN or infinite" if item.not_finite else ""
        outputs.append(f"{item.name} {format_shape(item.shape)} {item.dtype}{spread}{odd}")
    nothing = "nothing (`--min-score` lets more through)" if report.detections == () else None
    yield make_facts(
        ("engine", f"{report.engine} ({report.backend} on {report.device})"),
        ("input", f"{shapes_text(report.shapes, ' ')} ({report.inputs})"),
        ("latency", f"{format_ms(report.first_ms)} the first time{again}"),
        ("output", outputs),
        ("found", nothing or map(_detection_text, report.detections or ())),
        ("class", map(_detection_text, report.classes or ())),
        ("written", report.artifacts.values()),
    )


def _detection_text(item: Detection) -> str:
    where = "" if not item.box else " at " + ", ".join(f"{value:.1f}" for value in item.box)
    return f"{item.name} {item.score:.4f}{where}"


def serve_report(report: ServeReport) -> Iterator[Block]:
    yield make_facts(
        ("http", report.http),
        ("grpc", report.grpc),
        ("metrics", report.metrics),
        ("model", map(_served_text, report.models)),
    )


def server(server: Any) -> Iterator[Block]:
    """A running server, as `serve` reports it."""
    yield from serve_report(server.report)


def _served_text(model: ServedModel) -> str:
    name = f"{model.name} version {model.version}" if model.version else model.name
    if model.state == "READY":
        return f"{name}: ready ({', '.join(f'{key} {value}' for key, value in model.properties.items())})"
    return f"{name}: not ready{f', {model.reason}' if model.reason else ''}"


def evaluate_report(report: EvaluateReport) -> Iterator[Block]:
    base, skipped = report.baseline, f", {report.skipped} left out" if report.skipped else ""
    images = f"{report.dataset} ({report.dataset_kind}): {report.images} images{skipped}"
    yield make_facts(
        ("engine", _engine_text(report)),
        ("baseline", _engine_text(base) if base else None),
        ("dataset", [images, report.dataset_digest]),
        ("declared", f"{report.vision['postprocess']['decode']} ({report.vision['source']})"),
    )
    columns: list[tuple[str, list[str]]] = [
        ("metric", list(report.metrics)),
        ("engine", list(map(_metric, report.metrics.values()))),
    ]
    if base is not None and report.metric_drop is not None:
        columns.append(("baseline", [_metric(base.metrics[name]) for name in report.metrics]))
        columns.append(("drop", [f"{report.metric_drop[name]:+.4f}" for name in report.metrics]))
    rows = zip(*(values for _, values in columns), strict=True)
    errors = (f"{name}: {error.summary}, mean {error.mean_abs:.3g}" for name, error in (report.parity or {}).items())
    gate = f"{'passed' if report.passed else 'FAILED'}: a drop of {report.max_drop or 0:g} is allowed"
    yield Table("", tuple(title for title, _ in columns), tuple(rows), frozenset((0,)))
    yield make_facts(
        ("latency", [_latency(report), *([f"baseline {_latency(base)}"] if base else [])]),
        ("parity", errors),
        ("gate", None if report.passed is None else gate),
        ("written", report.artifacts.values()),
    )


def _metric(value: float) -> str:
    """-1 is COCO's value for a metric without objects."""
    return "-" if value < 0 else f"{value:.4f}"


def _engine_text(side: EvaluateReport | Evaluation) -> str:
    return f"{side.engine} ({side.backend} on {side.device}, {side.precision.shares_text or 'unknown precision'})"


def _latency(side: EvaluateReport | Evaluation) -> str:
    times = side.latency_ms
    if times is None:
        return "not measured"
    return f"median {format_ms(times.median)}, p99 {format_ms(times.p99)} for a batch of {side.batch}"


# ------------------------------------------------------------------------------------------------ profile, compare


def profile_report(report: ProfileReport, top: int | None = None) -> Iterator[Block | Section]:
    """The sections of a report on one profile."""
    from trt_engine.reporting.run_records import RunRecords
    from trt_engine.reporting.sections import profile_sections as sections
    from trt_engine.reporting.sections.report_context import ReportContext

    context = ReportContext(RunRecords(Path(), None, None, (), (), profile=report))
    named = sections.named_profiles(context)
    rule, seconds = report.protocol, report.protocol.duration_s if report.wall_s is None else report.wall_s
    shapes, times = shapes_text(report.shapes), report.compute_ms
    yield from sections.verdict_blocks(report)
    yield Paragraph("")
    yield make_facts(
        ("engine", f"{report.engine} ({report.backend} on {report.device}, {report.precision})"),
        ("batch", f"{report.batch} ({shapes})" if shapes else str(report.batch)),
        ("measured", f"{seconds:.3g} s after {rule.warmup_s:g} s of warm-up, protocol {rule.name}"),
        (
            "compute",
            None if times is None else f"median {format_number(times.median)}, p99 {format_number(times.p99)} ms",
        ),
    )
    found = (
        sections.breakdown_section(named),
        sections.kernels_section(named, top),
        sections.layers_section(named, top),
        sections.instruments_section(context, named),
    )
    yield from (section for section in found if section is not None)
    files = [*report.files.items(), *((f"open {name} with", how) for name, how in report.open_commands.items())]
    ended = None if report.complete else "interrupted"
    yield from (Paragraph(""), make_facts(*files, ("warning", report.warnings), ("incomplete", ended)))


def compare_report(report: CompareReport) -> Iterator[Block | Section]:
    """The sections of a report on one comparison."""
    from trt_engine.reporting.run_records import RunRecords
    from trt_engine.reporting.sections import compare_sections as sections
    from trt_engine.reporting.sections.report_context import ReportContext

    context = ReportContext(RunRecords(Path(), None, None, (), (), comparison=report))
    yield from (Paragraph(sentence) for sentence in [sections.summarize(report)] if sentence)
    yield from sections.compare_section(context, report).blocks
    yield from [section] if (section := sections.structure_section(report.comparisons)) is not None else []
    written = ((name, place) for name, place in report.artifacts.items() if name != "compare")
    ended = None if report.complete else "interrupted"
    yield make_facts(_stability(report.stable, report.instability), *written, ("incomplete", ended))


def upgrade_report(report: UpgradeReport) -> Iterator[Block | Section]:
    """The page of an upgrade check."""
    from trt_engine.reporting.sections import compare_sections, upgrade_sections

    yield Paragraph(upgrade_sections.summarize(report))
    yield from upgrade_sections.upgrade_section(report).blocks
    structure = compare_sections.structure_section([item.comparison for item in report.items])
    yield from [structure] if structure is not None else []
    yield make_facts(("warning", report.warnings), *report.artifacts.items())


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


def engine_diff(diff: EngineDiff, top: int = 20) -> Iterator[Block]:
    from trt_engine.reporting.sections.compare_sections import structure_blocks

    yield make_facts(
        ("before", f"{diff.before} ({diff.sources[0]})"),
        ("after", f"{diff.after} ({diff.sources[1]})"),
        ("warning", diff.warnings),
        *((name, f"{_build_value(one)} -> {_build_value(other)}") for name, (one, other) in diff.build.items()),
    )
    yield from structure_blocks(diff, top)
    unknown = ", ".join(diff.unknown_kinds)
    yield make_facts(("layer types not known here, matched by name", unknown or None))


def size_report(report: SizeReport) -> Iterator[Block | Section]:
    """The sections of a report on a size run; scripts read the last line, the stream count."""
    from trt_engine.reporting.run_records import RunRecords
    from trt_engine.reporting.sections import size_sections as sections
    from trt_engine.reporting.sections import stream_sections
    from trt_engine.reporting.sections.report_context import ReportContext

    context = ReportContext(RunRecords(Path(), report, None, (), ()))
    serves, rule = next(sections.key_figures(context, report)), report.protocol
    graph = ", CUDA graph" if rule is not None and rule.graph else ""
    unstable = ((f"batch {batch.batch}: {reason}") for batch in report.batches for reason in batch.instability)
    yield make_facts(
        ("model", f"{report.model_name} ({report.model})"),
        ("engine", f"{report.engine} ({report.backend}, {report.device}, {report.precision})"),
        (
            "protocol",
            None if rule is None else f"{rule.name}, {rule.warmup_s:g} s warm-up, {rule.duration_s:g} s run{graph}",
        ),
        (serves.label, f"{serves.value} {serves.note}"),
        ("not stable", unstable),
        ("note", [sections.stop_reason(report), *report.notes]),
    )
    yield from (Paragraph(""), Paragraph(sections.explain_count(context)))
    found = (
        sections.measurements_section(context, report),
        sections.cliffs_section(report),
        sections.steps_section(report),
    )
    yield from (section for section in found if section is not None)
    following = f"trt-engine inspect {shlex.quote(report.engine or '')}"
    written = report.artifacts.get("report_html", report.artifacts.get("folder", ""))
    yield from (Paragraph(""), make_facts(("report", written), ("next", following)))
    if (keys := sections.nvinfer_section(report)) is not None:
        yield Paragraph("")
        yield keys.blocks[0]
        yield from map(Paragraph, sections.nvinfer_lines(report.nvinfer, report.nvinfer_notes))
    if (within := stream_sections.streams_section(report)) is not None:
        yield within
    at = f"{report.peak_streams} streams @{report.fps:g}fps"
    how = "GPU-only upper bound" if context.on_gpu else "measured on the CPU, not a GPU"
    yield from (Paragraph(""), Paragraph(f"PEAK_GPU_STREAMS: {at} ({how})"))


# ------------------------------------------------------------------------------------------------ run, pack


def run_summary(summary: RunSummary) -> Iterator[Block]:
    """One row per cell, the counts, the output files."""
    manifest = summary.manifest
    box = manifest.container
    counts = {
        "done": summary.done,
        "FAILED": summary.failed,
        "skipped": summary.skipped,
        "not done": sum(result.state in ("waiting", "interrupted") for result in summary.results),
        "of them reused": summary.reused,
    }
    opens = list(dict.fromkeys(text for result in summary.results for text in result.open_commands.values()))
    yield make_facts(
        ("run", manifest.title or manifest.name),
        ("container", f"{box.get('image')} ({box.get('digest')})" if box else None),
    )
    yield make_facts(*((result.spec.label, _cell_text(result)) for result in summary.results))
    yield make_facts(
        ("cells", ", ".join(f"{count} {what}" for what, count in counts.items() if count or what == "done")),
        ("folder", summary.folder),
        *(("report" if name != "run" else "manifest", place) for name, place in summary.artifacts.items()),
        ("open", opens[:4]),
        ("warning", summary.warnings),
        ("next", f"trt-engine report {shlex.quote(summary.folder)}"),
    )


def _cell_text(result: CellResult) -> str:
    if result.state == "done":
        return cell_summary(result)
    reason, _, hint = (result.reason or "").partition("\nhint: ")
    state = {"failed": "FAILED", "waiting": "not done"}.get(result.state, result.state)
    return f"{state}{f': {reason}' if reason and reason != state else ''}{f' ({hint})' if hint else ''}"


def cell_summary(result: CellResult) -> str:
    """The main results of a cell on one line."""
    parts: list[str] = []
    if result.bench is not None and (times := result.bench.compute_summary()) is not None:
        speed = f"{format_number(result.bench.images_per_s)} images/s"
        parts.append(f"median {format_ms(times.median)}, p95 {format_ms(times.p95)}, {speed}")
    if result.evaluation is not None:
        main = MAIN_METRIC[result.evaluation.task]
        parts += [f"{main} {_metric(value)}" for value in [result.evaluation.metrics.get(main)] if value is not None]
    parts += [format_bytes(result.engine_bytes)] if result.engine_bytes is not None else []
    return ", ".join(filter(None, [*parts, result.validation, f"{result.seconds:.1f} s"]))


def pack_report(report: PackReport) -> Iterator[Block]:
    verb = "would pack" if report.nbytes is None else "packed"
    total = sum(item.nbytes for item in report.files)
    what = f"{verb} {len(report.files)} files ({format_bytes(total)}) of {report.run}"
    yield Paragraph(f"{what} into {sized(report.archive, report.nbytes)}")
    for reason, names in name_groups(((item.reason, item.path) for item in report.left_out), 6).items():
        yield Paragraph(f"left out, {reason}: {names}")
    if report.redacted:
        yield Paragraph(f"names of home folders became `~` in {plural(len(report.redacted), 'file')}")
    if report.digest is not None:
        following = f"`trt-engine report {report.archive}`"
        yield from (Paragraph(f"digest: {report.digest}"), Paragraph(f"read it with {following}"))

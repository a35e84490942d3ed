"""Results of the verbs that run engines and have no report of their own, of `deploy` and `pack`, and of dry runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trt_engine.format import format_bytes, format_ms, quoted
from trt_engine.records.batch import BatchReport
from trt_engine.records.deploy import DeployReport, PreprocessDifference
from trt_engine.records.dry_run import DryRun
from trt_engine.records.evaluate import EvaluateReport, Evaluation
from trt_engine.records.infer import Detection, InferReport, VideoSummary
from trt_engine.records.serve import ServedModel, ServeReport
from trt_engine.reporting.document import Block, Fact, Paragraph, Picture, make_facts
from trt_engine.reporting.pack import PackReport
from trt_engine.reporting.tables import make_table, metric_text, name_groups, plural, shapes_text, sized
from trt_engine.tensors import format_shape


def dry_run(plan: DryRun) -> Iterator[Block]:
    """The work, its settings that are one line, what would be built and written."""
    yield Paragraph(f"would {plan.does}")
    for name, value in plan.settings.items():
        if isinstance(value, str | int | float):
            yield Paragraph(f"{name.replace('_', ' ')}: {value}")
    if shapes := plan.settings.get("shapes"):
        yield Paragraph(f"shapes: {shapes_text(shapes)}")
    yield from (Paragraph(f"would build the engine of {path} into the store first") for path in plan.builds)
    yield from (Paragraph(f"would write {place}") for place in plan.writes)


def infer_report(report: InferReport) -> Iterator[Block]:
    again = ""
    if report.median_ms is not None:
        again = f", then {format_ms(report.median_ms)} (median of {len(report.samples_ms) - 1})"
    outputs = []
    for item in report.outputs:
        spread = "" if item.mean is None else f", min {item.min:.6g}, max {item.max:.6g}, mean {item.mean:.6g}"
        odd = f", {item.not_finite} values are NaN or infinite" if item.not_finite else ""
        outputs.append(f"{item.name} {format_shape(item.shape)} {item.dtype}{spread}{odd}")
    if report.video is not None:
        yield from _video_report(report, report.video)
        return
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


def _video_report(report: InferReport, video: VideoSummary) -> Iterator[Block]:
    source, expected = video.source, video.source.frames
    of = f" of {expected:,}" if expected is not None and abs(expected - video.frames) > 1 else ""
    batches = f"{len(report.samples_ms):,} batches, median {format_ms(report.median_ms or report.first_ms)}"
    damage = f"{plural(video.damaged_packets, 'packet')} could not be decoded, or gave damaged frames"
    yield make_facts(
        ("engine", f"{report.engine} ({report.backend} on {report.device})"),
        ("video", f"{source.path}: {source.codec}, {source.width}x{source.height}, {source.fps:.4g} fps"),
        ("frames", f"{video.frames:,}{of} in {video.wall_s:.1f} s, {video.frames / video.wall_s:.1f} frames/s"),
        ("inference", batches),
        ("damaged", damage if video.damaged_packets else None),
        ("ended", video.ended),
        ("connected", f"{plural(video.reconnects, 'time')} again" if video.reconnects else None),
        ("found", None if video.objects else "nothing (`--min-score` lets more through)"),
        ("written", report.artifacts.values()),
    )
    if video.objects:
        totals = [total for total, _ in video.objects.values()]
        yield make_table(
            "",
            [
                ("class", list(video.objects)),
                ("objects in all frames", [f"{total:,}" for total in totals]),
                ("in a frame", [f"{total / video.frames:.2f}" for total in totals]),
                ("at most", [str(most) for _, most in video.objects.values()]),
            ],
            words=1,
        )
    if (sheet := report.artifacts.get("contact_sheet")) is not None:
        yield Picture("First frames", sheet)


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
    columns = [("metric", list(report.metrics)), ("engine", list(map(metric_text, report.metrics.values())))]
    if base is not None and report.metric_drop is not None:
        columns.append(("baseline", [metric_text(base.metrics[name]) for name in report.metrics]))
        columns.append(("drop", [f"{report.metric_drop[name]:+.4f}" for name in report.metrics]))
    yield make_table("", columns, words=1)
    gate = f"{'passed' if report.passed else 'FAILED'}: a drop of {report.max_drop or 0:g} is allowed"
    yield make_facts(
        ("latency", [_latency(report), *([f"baseline {_latency(base)}"] if base else [])]),
        ("parity", (f"{name}: {e.summary}, mean {e.mean_abs:.3g}" for name, e in (report.parity or {}).items())),
        ("gate", None if report.passed is None else gate),
        ("written", report.artifacts.values()),
    )


def _engine_text(side: Evaluation) -> str:
    return f"{side.engine} ({side.backend} on {side.device}, {side.precision.shares_text or 'unknown precision'})"


def _latency(side: Evaluation) -> str:
    times = side.latency_ms
    if times is None:
        return "not measured"
    return f"median {format_ms(times.median)}, p99 {format_ms(times.p99)} for a batch of {side.batch}"


def deploy_report(report: DeployReport) -> Iterator[Block]:
    """Models with their decisions, notes, files, next command."""
    rows: list[Fact] = [("target", report.target), ("folder", report.folder)]
    for model in report.models:
        lines = [f"{model.source} ({model.backend or 'built where it runs'})"]
        lines += [f"{item.name} {item.value}: {item.reason}" for item in model.settings]
        rows.append((model.name, [*lines, *(f"note: {note}" for note in model.notes)]))
    files = sized(len(report.files), sum(report.files.values()))
    yield make_facts(
        *rows,
        *((f"compared with {item.file}", _difference_lines(item)) for item in report.preprocessing),
        *(("note", note) for note in report.notes),
        ("would write" if report.dry_run else "files", files),
        ("next", report.next_command),
    )


def _difference_lines(item: PreprocessDifference) -> list[str]:
    """What differs, then the numbers."""
    lines = [f"DIFFERS: {text}" for text in item.findings] or ["only the resizing filter differs"]
    if item.mean_levels is not None and item.content_levels is not None:
        inside = f"({item.content_levels:.3g} inside the image), {item.image}"
        lines.append(f"mean difference {item.mean_levels:.3g} levels of 255 {inside}")
    return lines


def batch_report(report: BatchReport) -> Iterator[Block]:
    """Rows in and out, failures, rate, where the rows are."""
    where, rate = f"{report.workers} workers on {report.nodes} nodes", report.rows_per_s
    yield make_facts(
        ("engine", report.engine),
        ("rows", f"{report.rows} of {report.files} files, {report.failed} failed"),
        ("parts", f"{report.parts}, {report.resumed_parts} done before"),
        ("rate", f"{rate:.4g} rows/s, {where}" if rate is not None else None),
        ("failed", [f"{item.id}: {item.reason}" for item in report.failures]),
        ("out", report.out),
    )


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
        following = f"`trt-engine report {quoted(report.archive)}`"
        yield from (Paragraph(f"digest: {report.digest}"), Paragraph(f"read it with {following}"))

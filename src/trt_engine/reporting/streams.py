"""Sections of `size`: with `--deadline-ms` streams within the deadline, policies, GPUs, verification and settings to paste;
with `--video` the cameras measured, what limits them, the CPU time of the parts, the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trt_engine.config.streams import SourceGroup
from trt_engine.format import format_column, format_or_dash
from trt_engine.records.size import SizeReport
from trt_engine.records.streams import CurveSummary, StreamCapacity, VideoCapacity, VideoRun
from trt_engine.reporting.charts import Line, LineChart, Point
from trt_engine.reporting.document import Block, Commands, Facts, Paragraph, Section, make_facts
from trt_engine.reporting.tables import make_table, plural

_SLOWER = 1.15
"""How many times slower than the latency curve batches must be to be reported."""
_CHART_TOP = 20.0
"""Per cent of late frames beyond which a line of the chart ends."""


def streams_section(size: SizeReport) -> Section | None:
    """The answer for the deadline, with its evidence; None without a deadline."""
    capacity = size.capacity
    if capacity is None:
        return None
    blocks: list[Block] = [Paragraph(headline(capacity)), _facts(capacity)]
    if capacity.streams:
        blocks += [(_share_chart(capacity),)]
    blocks += [_policy_table(capacity), *_verification_table(capacity), _curve_table(capacity.curve)]
    if capacity.crop_curve:
        blocks.append(_curve_table(capacity.crop_curve, "Latency curve of the second model"))
    if capacity.streams:
        blocks += [Paragraph("Settings of the policy:"), Commands(tuple(settings_lines(capacity)))]
    return Section("streams", f"Streams within {capacity.deadline_ms:g} ms", tuple(blocks))


def headline(capacity: StreamCapacity) -> str:
    """`33 streams (32 to 34) within 50 ms, at most 0.1 % late: batch 16, wait 17 ms`."""
    within = f"within {capacity.deadline_ms:g} ms, at most {100 * capacity.late:g} % of the frames late or dropped"
    if not capacity.streams:
        return f"No stream {within}: {capacity.limit_reason}."
    span = f"{capacity.low} to {capacity.high}, {100 * capacity.confidence:g} % interval"
    return f"{plural(capacity.streams, 'stream')} ({span}) {within}, with {capacity.policy}."


def mix_text(groups: tuple[SourceGroup, ...]) -> str:
    return ", ".join(f"{group.count} at {group.fps:g} fps" for group in groups)


def _facts(capacity: StreamCapacity) -> Facts:
    decode, gpus = capacity.decode, capacity.gpus
    late = f"{100 * capacity.late_share:.2g} % predicted, {100 * capacity.late_share_p90:.2g} % at one site in ten"
    return make_facts(
        ("sources", mix_text(capacity.mix) or None),
        ("inferred", f"every frame of {capacity.interval + 1}" if capacity.interval else None),
        ("crops", f"{capacity.crops} of each inferred frame, by a second model" if capacity.crops else None),
        ("limit", f"{capacity.limit}: {capacity.limit_reason}"),
        ("late", late if capacity.streams else None),
        ("upper bound", f"{plural(capacity.upper_bound, 'stream')} from compute alone, whatever the latency"),
        (
            "decoders",
            f"{decode.streams:,} streams of {decode.codec}: {decode.decoders} NVDECs, {decode.frames_per_s:,.0f} frames/s "
            f"({decode.source})"
            if decode
            else None,
        ),
        (
            "GPUs",
            f"{gpus.total} for {mix_text(gpus.sources)}: {gpus.needed} needed"
            + (f", {gpus.spare} spare" if gpus.spare else "")
            if gpus
            else None,
        ),
    )


def _share_chart(capacity: StreamCapacity) -> LineChart:
    lines = []
    for found in capacity.policies:
        shown = [Point(point.streams, 100 * point.late_share) for point in found.points]
        ends = next((index for index, point in enumerate(shown) if point.y > _CHART_TOP), len(shown))
        lines.append(Line(f"{found.label}: {found.policy}", tuple(shown[: max(1, ends)])))
    allowed = 100 * capacity.late
    xs = [point.x for line in lines for point in line.points]
    lines.append(Line("allowed", (Point(min(xs), allowed), Point(max(xs), allowed)), "dashed"))
    return LineChart("late-share", "Late frames by number of streams", "streams", "% late", tuple(lines))


def _policy_table(capacity: StreamCapacity) -> Block:
    chosen = capacity.streams
    others = [found.streams for found in capacity.policies[1:]]
    gains = ["", *(f"{100 * (chosen / other - 1):+.0f}" if other else "-" for other in others)]
    return make_table(
        "Streams by policy",
        [
            ("policy", [found.label for found in capacity.policies]),
            ("settings", [str(found.policy) for found in capacity.policies]),
            ("streams", [f"{found.streams:,}" for found in capacity.policies]),
            ("gained by the chosen %", gains),
        ],
        words=2,
        marked=[0],
    )


def _verification_table(capacity: StreamCapacity) -> Iterator[Block]:
    found = capacity.verification
    if found is None:
        return
    rows: dict[str, tuple[float | None, float | None]] = {
        "late or dropped %": (100 * found.predicted_share, 100 * found.observed_share),
        "median ms": (found.predicted_p50_ms, found.observed_p50_ms),
        "p99 ms": (found.predicted_p99_ms, found.observed_p99_ms),
        "batch ms": (found.predicted_batch_ms, found.observed_batch_ms),
    }
    yield make_table(
        f"Verified: {plural(found.streams, 'paced source')} for {found.duration_s:g} s, {found.frames:,} frames, "
        f"{found.late:,} late, {found.dropped:,} dropped; {'passed' if found.passed else 'FAILED'}",
        [
            ("", list(rows)),
            ("predicted", [format_or_dash(one) for one, _ in rows.values()]),
            ("observed", [format_or_dash(other) for _, other in rows.values()]),
        ],
    )
    if found.observed_batch_ms and found.predicted_batch_ms:
        slower = found.observed_batch_ms / found.predicted_batch_ms
        if slower > _SLOWER:
            yield Paragraph(
                f"The batches took {slower:.2f} times as long as for the latency curve: the machine was slower, or "
                "the paced sources took its cores. Without `curve.jsonl` the curve is measured again."
            )


def _curve_table(points: Sequence[CurveSummary], name: str = "Latency curve") -> Block:
    return make_table(
        f"{name}: full batches, all contexts busy; times in ms",
        [
            ("batch", [str(point.batch) for point in points]),
            ("contexts", [str(point.contexts) for point in points]),
            ("frames on", [point.frames for point in points]),
            ("samples", [f"{point.samples:,}" for point in points]),
            ("median", format_column([point.median_ms for point in points])),
            ("p99", format_column([point.p99_ms for point in points])),
            ("rows/s", format_column([point.rows_per_s for point in points])),
        ],
        also=("frames on",),
    )


def settings_lines(capacity: StreamCapacity) -> list[str]:
    """The policy for DeepStream's muxer and nvinfer, and for `te.load`."""
    keys = capacity.deepstream
    mux = (f"{name}={keys[name]}" for name in ("batch-size", "batched-push-timeout"))
    infer = (f"{name}={keys[name]}" for name in ("batch-size", "interval"))
    return ["[streammux]", *mux, "[primary-gie]", *infer, "# Python", capacity.batching]


def cameras_section(size: SizeReport) -> Section | None:
    """The measured cameras with their evidence; None without clips."""
    video = size.video
    if video is None:
        return None
    runs, allowed = video.runs, 100 * video.late
    nearest = next(run for run in reversed(runs) if run.streams == (video.streams or min(run.streams for run in runs)))
    blocks: list[Block] = [Paragraph(f"{cameras_text(video)}."), _camera_facts(video, nearest)]
    if len({run.streams for run in runs}) > 1:
        points = tuple(Point(run.streams, 100 * run.late_share) for run in sorted(runs, key=lambda run: run.streams))
        line = Line("allowed", (Point(points[0].x, allowed), Point(points[-1].x, allowed)), "dashed")
        title = "Late frames by number of cameras, measured"
        blocks.append((LineChart("cameras", title, "cameras", "% late", (Line("measured", points), line)),))
    parts = make_table(
        f"CPU time of a frame on {plural(video.cores, 'core')}, and the streams that each part alone would carry",
        [
            ("part", [*video.part_streams, "in all"]),
            ("ms", format_column([*(nearest.parts.get(name) for name in video.part_streams), nearest.cpu_ms])),
            ("streams", [*(f"{streams:.1f}" for streams in video.part_streams.values()), ""]),
        ],
        words=1,
        marked=[index for index, name in enumerate(video.part_streams) if name == video.limit],
    )
    return Section("cameras", "Cameras, measured", (*blocks, parts, _runs_table(video)))


def cameras_text(video: VideoCapacity) -> str:
    """`12 cameras (10 to 13, 90 % interval) within 40 ms, at most 1 % of the frames late or dropped`."""
    within = f"within {video.deadline_ms:.4g} ms, at most {100 * video.late:g} % of the frames late or dropped"
    if not video.streams:
        return f"no camera {within}: {video.limit_reason}"
    return f"{plural(video.streams, 'camera')} ({interval_text(video)}) {within}"


def interval_text(video: VideoCapacity) -> str:
    return f"{video.low} to {video.high}, {100 * video.confidence:g} % interval"


def cameras_line(video: VideoCapacity) -> str:
    """The last line, for scripts: `CAMERAS: 12 streams @25fps within 40 ms (10 to 13; limit decoder)`."""
    fps = sum(source.fps for source in video.sources) / len(video.sources)
    span = f"{video.low} to {video.high}; limit {video.limit}"
    return f"CAMERAS: {video.streams} streams @{fps:.4g}fps within {video.deadline_ms:.4g} ms ({span})"


def _camera_facts(video: VideoCapacity, nearest: VideoRun) -> Block:
    sources = (f"{item.path}: {item.codec}, {item.width}x{item.height}, {item.fps:.4g} fps" for item in video.sources)
    latency = f"{format_or_dash(nearest.p50_ms)} ms median, {format_or_dash(nearest.p99_ms)} ms p99"
    return make_facts(
        ("sources", sources),
        ("limit", f"{video.limit}: {video.limit_reason}"),
        ("latency", f"{latency}, from a frame's arrival to its decoded result"),
        ("worst source", f"{100 * nearest.worst_share:.2g} % late or dropped"),
        ("policy", f"{video.policy}{f', in each of {video.processes} processes' if video.processes > 1 else ''}"),
        ("crops", f"{nearest.crops:.1f} of a frame, by the second model" if nearest.crops else None),
    )


def _runs_table(video: VideoCapacity) -> Block:
    runs = video.runs
    return make_table(
        "Runs in the order measured; latencies in ms",
        [
            ("cameras", [str(run.streams) for run in runs]),
            ("frames", [f"{run.frames:,}" for run in runs]),
            ("late", [f"{run.late:,}" for run in runs]),
            ("dropped", [f"{run.dropped:,}" for run in runs]),
            ("%", [f"{100 * run.late_share:.2f}" for run in runs]),
            ("median", format_column([run.p50_ms or 0.0 for run in runs])),
            ("p99", format_column([run.p99_ms or 0.0 for run in runs])),
            ("others' cores", [f"{run.other_cores:.2f}" for run in runs]),
            ("busy cores", [f"{run.busy_cores:.2f}" for run in runs]),
        ],
        marked=[index for index, run in enumerate(runs) if run.streams == video.streams],
    )

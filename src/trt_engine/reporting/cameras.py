"""Sections of `size --video`: the cameras measured, what limits them, the CPU time of the parts, the runs."""

from __future__ import annotations

from trt_engine.format import format_column, format_or_dash
from trt_engine.records.size import SizeReport
from trt_engine.records.streams import VideoCapacity, VideoRun
from trt_engine.reporting.charts import Line, LineChart, Point
from trt_engine.reporting.document import Block, Paragraph, Section, make_facts
from trt_engine.reporting.tables import make_table, plural


def cameras_section(size: SizeReport) -> Section | None:
    """The measured cameras with their evidence; None without clips."""
    video = size.video
    if video is None:
        return None
    runs, allowed = video.runs, 100 * video.late
    nearest = next(run for run in reversed(runs) if run.streams == (video.streams or min(run.streams for run in runs)))
    blocks: list[Block] = [Paragraph(f"{cameras_text(video)}."), _facts(video, nearest)]
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


def _facts(video: VideoCapacity, nearest: VideoRun) -> Block:
    sources = (f"{item.path}: {item.codec}, {item.width}x{item.height}, {item.fps:.4g} fps" for item in video.sources)
    latency = f"{format_or_dash(nearest.p50_ms)} ms median, {format_or_dash(nearest.p99_ms)} ms p99"
    return make_facts(
        ("sources", sources),
        ("limit", f"{video.limit}: {video.limit_reason}"),
        ("latency", f"{latency}, from a frame's arrival to its decoded result"),
        ("worst source", f"{100 * nearest.worst_share:.2g} % late or dropped"),
        ("policy", str(video.policy)),
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

"""The largest number of cameras by measured runs: doubled, bisected, measured again; and what it means."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

from trt_engine.device.info import core_count
from trt_engine.format import format_percent
from trt_engine.records.streams import StreamCapacity, VideoCapacity, VideoLimit, VideoRun
from trt_engine.reporting.tables import plural
from trt_engine.verbs.size.capacity import CONFIDENCE

if TYPE_CHECKING:
    from trt_engine.verbs.size.stream_worker import VideoRequest

_MOST_STREAMS = 1024
"""Each is a thread and a decoder."""
_MOST_RUNS = 24
_FINE = 0.03
"""Numbers of streams closer than this are not distinguished."""
_BUSY = 0.75
"""Share of the cores from which on they are the limit: above it, frames queue for them."""
_OTHERS = 0.2
"""Cores that other programs use from which on they are named."""


def search(measure: Callable[[int, int], VideoRun], late: float, *, start: int) -> Iterator[VideoRun]:
    """The runs of `measure(streams, number)`, numbered from 1, that find the largest number of streams within `late`.

    Doubled from `start`, or halved while that is too many, then bisected to one stream or 3 %; the number found is
    measured again, and counts by all its frames.
    """
    runs: dict[int, list[VideoRun]] = defaultdict(list)
    number = 0
    while number < _MOST_RUNS and (streams := _next_streams(runs, late, start)) is not None:
        number += 1
        run = measure(streams, number)
        runs[streams].append(run)
        yield run


def _next_streams(runs: Mapping[int, Sequence[VideoRun]], late: float, start: int) -> int | None:
    """The number to measure next; None where it is found."""
    if not runs:
        return min(start, _MOST_STREAMS)
    passed, failed = _bracket(runs, late)
    if failed is None:
        return 2 * passed if 2 * passed <= _MOST_STREAMS else None
    if failed - passed > max(1, round(_FINE * passed)):
        return max(1, failed // 2) if not passed else (passed + failed) // 2
    return passed if passed and len(runs[passed]) < 2 else None


def _bracket(runs: Mapping[int, Sequence[VideoRun]], late: float) -> tuple[int, int | None]:
    """The largest number within `late`, 0 for none, and the smallest above it that is not."""
    shares = {streams: pooled_share(found) for streams, found in runs.items()}
    failed = min((streams for streams, share in shares.items() if share > late), default=None)
    passed = max((s for s, share in shares.items() if share <= late and (failed is None or s < failed)), default=0)
    return passed, failed


def largest_passed(runs: Iterable[VideoRun], late: float) -> int:
    """The largest number of streams of these runs within `late`, 0 for none."""
    by_streams: dict[int, list[VideoRun]] = defaultdict(list)
    for run in runs:
        by_streams[run.streams].append(run)
    return _bracket(by_streams, late)[0]


def pooled_share(runs: Iterable[VideoRun]) -> float:
    """Late and dropped frames over all frames of the runs."""
    found = list(runs)
    return sum(run.late + run.dropped for run in found) / max(1, sum(run.frames for run in found))


def conclude(
    request: VideoRequest,
    runs: Sequence[VideoRun],
    simulated: StreamCapacity,
    *,
    on_cpu: bool,
    rates: Mapping[str, float],
    processes: int = 1,
) -> VideoCapacity:
    """The answer of measured runs: the number, its interval, its limit. `rates` are the frames/s of a GPU's parts alone, and
    `processes` played the cameras."""
    by_streams: dict[int, list[VideoRun]] = defaultdict(list)
    for run in runs:
        by_streams[run.streams].append(run)
    streams, failed = _bracket(by_streams, request.late)
    spans = {number: _share_interval(found) for number, found in by_streams.items()}
    certain = [number for number, (_, most) in spans.items() if most <= request.late and number <= streams]
    beyond = [number for number, (least, _) in spans.items() if least > request.late and number > streams]
    cores = core_count()
    nearest = by_streams[streams or min(by_streams)][-1]
    fps = fmean(clip.fps for clip in request.clips)
    part_streams = {name: cores * 1e3 / (fps * cpu_ms) for name, cpu_ms in nearest.parts.items() if cpu_ms > 0}
    if rates:  # the CPU serves the GPU's parts; its own run in Python, one thread of a process at a time
        part_streams = {
            name: streams * processes / cores for name, streams in part_streams.items() if name not in rates
        }
        part_streams = {name: rate / fps for name, rate in rates.items()} | part_streams
    elif not on_cpu:
        part_streams["engine"] = min(part_streams.get("engine", math.inf), simulated.upper_bound)
    limit, reason = _limit(nearest, part_streams, cores, failed, rates)
    return VideoCapacity(
        sources=request.clips,
        deadline_ms=request.deadline_ms,
        late=request.late,
        streams=streams,
        low=max(certain, default=0),
        high=max(streams, min(beyond) - 1 if beyond else (max(by_streams) if failed else streams)),
        confidence=CONFIDENCE,
        policy=request.policy,
        cores=cores,
        processes=processes,
        limit=limit,
        limit_reason=reason,
        part_streams=part_streams,
        runs=tuple(runs),
    )


def _share_interval(runs: Sequence[VideoRun]) -> tuple[float, float]:
    """Interval of the late share: seconds as samples, since late frames come together (Student's t is close to normal
    for ten and more). One more late second stands for what a few seconds cannot show."""
    blocks = [share for run in runs for share in run.late_blocks]
    mean = fmean(blocks) if blocks else 1.0
    width = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * (stdev(blocks) if len(blocks) > 1 else 1.0)
    return mean - width / math.sqrt(max(1, len(blocks))), mean + width / math.sqrt(max(1, len(blocks)))


def _limit(
    run: VideoRun, part_streams: Mapping[str, float], cores: int, failed: int | None, rates: Mapping[str, float]
) -> tuple[VideoLimit, str]:
    others = f", {run.other_cores:.1f} with other programs" if run.other_cores >= _OTHERS else ""
    used = f"{run.busy_cores:.1f} of {cores} cores are busy with {plural(run.streams, 'camera')}{others}"
    if failed is None:
        return "none", f"the search ended at {plural(run.streams, 'camera')}; {used}"
    least = min(part_streams, key=part_streams.__getitem__)
    if least in rates:
        share = f"the {least} alone carries {part_streams[least]:.0f}"
    else:
        share = f"{format_percent(run.parts.get(least, 0.0) / run.cpu_ms)} of that time in the {least}"
    if run.busy_cores >= _BUSY * cores or part_streams[least] < 1.1 * run.streams:
        return least, f"{used}, {share}"  # type: ignore[return-value]
    return "deadline", f"{used}, {share}: frames are late, not unserved"

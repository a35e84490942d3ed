"""Plays clips as cameras through the whole path, in the child process of `size --video`: packets at their times, decoded,
prepared, inferred in batches, decoded to results. On a GPU each part is measured alone before.

The largest number of cameras is found by such runs: doubled, bisected, measured again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from trt_engine.config.runtime import Batching
from trt_engine.device.info import core_count
from trt_engine.errors import UsageError
from trt_engine.format import format_percent
from trt_engine.protocols import RunnerBase
from trt_engine.records.streams import StreamCapacity, VideoCapacity, VideoLimit, VideoRun
from trt_engine.reporting.tables import plural
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.verbs.evaluate.run import resolve_spec
from trt_engine.verbs.load import load
from trt_engine.verbs.size.capacity import CONFIDENCE
from trt_engine.verbs.size.stream_worker import VideoRequest
from trt_engine.video.decoder import Decoder, PyAvDecoder, VideoError, read_frames
from trt_engine.video.device_frames import DeviceFrames, device_frames
from trt_engine.video.nvdec import Surface
from trt_engine.video.pipeline import CROP_PARTS, PARTS, CropStage, FramePipeline, FrameResult
from trt_engine.video.stream import StreamFrame, StreamSettings, VideoStream
from trt_engine.vision.spec import Vision, vision_of

if TYPE_CHECKING:
    from trt_engine.verbs.size.stream_worker import VideoRequest

log = logging.getLogger("trt_engine.verbs.size.video_run")

_SETTLE_S = 0.5
"""From the last source's first frame to the measured window."""
_SPREAD_S = 2.0
"""Sources start within this time: cameras are not in step, and neither are their key frames."""
_START_S = 0.2
"""Time to start the threads of the sources before the first is due."""
_OPENERS = 8
"""Threads that open decoders."""
_FIRST_RUN_S = 2.0
_DECODERS = 16
"""Clips decoded at once to measure the decoders alone: more than a GPU has."""
_SPAN_S = 1.0
_PLAYABLE = "a clip that a player can play to its end"


def measure_clips(engine: InferenceEngine, request: VideoRequest) -> tuple[tuple[VideoRun, ...], dict[str, float]]:
    """All runs of the search for the largest number of cameras, and with a GPU the frames/s of its parts alone."""
    vision = vision_of(engine.engine)
    assert vision is not None  # checked before the build
    engine.warmup(2, batch=request.policy.max_batch)
    cores = core_count()
    fps = sum(clip.fps for clip in request.clips) / len(request.clips)
    with (
        device_frames(engine.runner, vision, [clip.path for clip in request.clips]) as frames,
        Decoders(frames) as opened,
        nullcontext() if request.then is None else load(Path(request.then), verify=False) as second,
    ):
        if second is not None:
            second.warmup(2, batch=request.crops)
        rates = {} if frames is None else part_rates(engine.runner, frames, request)
        play = partial(play_clips, engine, vision, request, decoders=opened, second=second)
        first = play(1, min(_FIRST_RUN_S, request.duration_s), seed=0)
        carried = cores * 1e3 / max(1e-3, first.cpu_ms * fps)
        log.info(
            "one camera takes %.1f ms of CPU time for a frame: %d cameras at most on %d cores",
            first.cpu_ms, carried, cores,
        )  # fmt: skip
        for part, rate in rates.items():
            log.info("the %s alone: %.0f frames/s, %d cameras", part, rate, rate / fps)
            carried = min(carried, 1.6 * rate / fps)  # half of it is tried first, and it is measured, not estimated

        def measure(streams: int, number: int) -> VideoRun:
            run = play(streams, request.duration_s, seed=number)
            log.info("run %d: %s, %.2f %% late or dropped", number, plural(streams, "camera"), 100 * run.late_share)
            return run

        return tuple(search(measure, request.late, start=max(1, int(carried / 2)))), rates


class Decoders(ExitStack):
    """One decoder a camera, opened once for all runs: an NVDEC session takes a tenth of a second."""

    def __init__(self, frames: DeviceFrames | None) -> None:
        """Opened on the GPU of `frames`, or on the CPU."""
        super().__init__()
        self.frames = frames
        self._opened: list[Decoder] = []

    def open(self, sources: Sequence[str]) -> list[_Kept]:
        """Decoders at the start of these sources, of which an earlier call has had the first. Raises `UsageError`."""
        opener = PyAvDecoder if self.frames is None else self.frames.open

        def ready(source: str) -> Decoder:
            try:
                decoder = opener(source)
                self.callback(decoder.close)
                next(read_frames(decoder), None)  # the session is made with the first packet
                decoder.rewind()
            except VideoError as error:
                raise UsageError(f"`{source}`: {error}", hint=_PLAYABLE) from error
            return decoder

        with ThreadPoolExecutor(_OPENERS) as pool:
            self._opened.extend(pool.map(ready, sources[len(self._opened) :]))
        return [_Kept(decoder) for decoder in self._opened[: len(sources)]]


class _Kept:
    """A decoder that a stream leaves open, at its start."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def open(self, source: str, *, threads: int) -> _Kept:
        """Itself, as a stream opens its source."""
        return self

    def close(self) -> None:
        with suppress(VideoError):
            self._decoder.rewind()


def play_clips(
    engine: InferenceEngine,
    vision: Vision,
    request: VideoRequest,
    streams: int,
    duration_s: float,
    *,
    seed: int,
    decoders: Decoders,
    second: InferenceEngine | None = None,
) -> VideoRun:
    """`streams` cameras for `duration_s`, each at a phase drawn with `seed`; `second` takes crops of their frames.

    Raises `UsageError` for a clip that ends.
    """
    policy = request.policy
    batching = Batching(
        max_batch=policy.max_batch, max_wait_ms=policy.max_wait_ms, workers=policy.contexts,
        max_rows_waiting=max(streams, 1) + policy.max_batch,
    )  # fmt: skip
    seen: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
    crops: list[int] = []

    def note(source: int, frame: StreamFrame) -> None:
        answered = frame.result is not None and not isinstance(frame.result, BaseException)
        seen[source].append((frame.arrived_s, time.perf_counter() if answered else None))
        if isinstance(frame.result, FrameResult):
            crops.append(len(frame.result.crops))

    rng = np.random.default_rng([seed, streams])
    settings = StreamSettings(paced=True, loop=True, newest_only=True)
    clips = [request.clips[index % len(request.clips)] for index in range(streams)]
    opened = decoders.open([clip.path for clip in clips])
    then = None if second is None else CropStage(second.runner, resolve_spec(second.engine), request.crops)
    with FramePipeline(engine.runner, vision, batching, frames=decoders.frames, then=then) as pipeline:
        played = [
            VideoStream(clip.path, pipeline, partial(note, index), settings, opener=opened[index].open)
            for index, clip in enumerate(clips)
        ]
        begin_s = time.perf_counter() + _START_S
        spread_s = min([_SPREAD_S, duration_s, *(clip.frames / clip.fps for clip in clips if clip.frames)])
        started: list[VideoStream] = []
        try:
            for stream, phase_s in zip(played, rng.uniform(0, spread_s, streams).tolist(), strict=True):
                started.append(stream.start(begin_s + phase_s))
            from_s = begin_s + spread_s + _SETTLE_S
            time.sleep(max(0.0, from_s - time.perf_counter()))
            before = _cpu_times(pipeline, played)
            psutil.cpu_times_percent()  # counts from here
            time.sleep(max(0.0, from_s + duration_s - time.perf_counter()))
            spent = {name: value - before[name] for name, value in _cpu_times(pipeline, played).items()}
            machine = psutil.cpu_times_percent()
            to_s = time.perf_counter()
            time.sleep(max(0.0, to_s + request.deadline_ms / 1e3 + 0.05 - time.perf_counter()))
        finally:
            for stream in started:
                stream.stop()
            for stream in started:
                stream.join()
    for stream in played:
        if stream.error is not None:
            raise UsageError(f"`{stream.source}`: {stream.error}", hint=_PLAYABLE)
    late_s = request.deadline_ms / 1e3
    rows = [
        (source, float(arrived_s - from_s), ended_s is not None, bool(ended_s is None or ended_s - arrived_s > late_s),
         0.0 if ended_s is None else ended_s - arrived_s)
        for source, clip in enumerate(clips)
        for arrived_s, ended_s in [*seen[source], *_unseen(seen[source], 1 / clip.fps, to_s)]
        if from_s <= arrived_s < to_s
    ]  # fmt: skip
    all_cores = (100 - machine.idle - getattr(machine, "iowait", 0.0)) / 100 * (psutil.cpu_count() or 1)
    record = _run_record(streams, rows, to_s - from_s, spent, all_cores)
    return replace(record, crops=sum(crops) / max(1, len(crops)))


def _unseen(seen: list[tuple[float, float | None]], interval_s: float, to_s: float) -> list[tuple[float, None]]:
    """Arrivals up to `to_s` of frames that a source which is behind has not decoded yet."""
    last_s = max((arrived_s for arrived_s, _ in seen), default=to_s)
    return [(last_s + interval_s * number, None) for number in range(1, int((to_s - last_s) / interval_s - 0.5) + 1)]


def _run_record(
    streams: int,
    rows: list[tuple[int, float, bool, bool, float]],
    wall_s: float,
    spent: dict[str, float],
    all_cores: float,
) -> VideoRun:
    count = max(1, len(rows))
    by_second: dict[int, list[bool]] = defaultdict(list)
    by_source: dict[int, list[bool]] = defaultdict(list)
    for source, arrived_s, _, is_late, _ in rows:
        by_second[int(arrived_s)].append(is_late)
        by_source[source].append(is_late)
    latencies_ms = [1e3 * latency_s for _, _, answered, _, latency_s in rows if answered]
    p50_ms, p99_ms = (float(np.quantile(latencies_ms, q)) if latencies_ms else None for q in (0.5, 0.99))
    process_s, pool_s = spent.pop("process"), spent.pop("pool")
    calls_s = {name: spent[name] for name in ("engine", "second engine") if name in spent}
    for name, seconds in calls_s.items():  # the pools of two engines look alike
        spent[name] += pool_s * (seconds / sum(calls_s.values()) if any(calls_s.values()) else 1 / len(calls_s))
    spent["host"] = max(0.0, process_s - sum(spent.values()))  # the clocks of threads are coarser
    return VideoRun(
        streams=streams,
        frames=len(rows),
        late=sum(answered and is_late for _, _, answered, is_late, _ in rows),
        dropped=sum(not answered for _, _, answered, _, _ in rows),
        late_blocks=tuple(round(float(np.mean(block)), 6) for _, block in sorted(by_second.items())),
        worst_share=max((float(np.mean(block)) for block in by_source.values()), default=1.0),
        p50_ms=p50_ms,
        p99_ms=p99_ms,
        busy_cores=process_s / wall_s,
        other_cores=max(0.0, all_cores - process_s / wall_s),
        parts={name: 1e3 * seconds / count for name, seconds in spent.items()},
    )


def _cpu_times(pipeline: FramePipeline, streams: list[VideoStream]) -> dict[str, float]:
    """CPU seconds so far: by part, of the process, and of threads that Python did not start, the pools of ONNX Runtime."""
    own = {thread.native_id for thread in threading.enumerate()}
    process = psutil.Process()
    pool_s = sum(item.user_time + item.system_time for item in process.threads() if item.id not in own)
    found = dict.fromkeys(PARTS, 0.0)
    then = pipeline.then
    for times in (*pipeline.times, *(stream.times for stream in streams), *([then.times] if then else [])):
        for name, seconds in times.seconds.items():
            found[name] += seconds
    for name, meter in {"engine": pipeline.meter, **({"second engine": then.meter} if then else {})}.items():
        found[name] += sum(cpu_s for _, _, cpu_s in list(meter.batches))
    known = {name: seconds for name, seconds in found.items() if then or name not in CROP_PARTS}
    return known | {"pool": pool_s, "process": time.process_time()}


def part_rates(runner: RunnerBase, frames: DeviceFrames, request: VideoRequest) -> dict[str, float]:
    """Frames/s of the decoder, the preparation, the engine and the copy of its outputs, each without the others.

    Raises `VideoError` for a clip that cannot be decoded.
    """
    name, count, contexts = runner.signature.inputs[0].name, request.policy.max_batch, request.policy.contexts
    device = frames.device
    with ExitStack() as stack:
        decoders = [
            stack.enter_context(closing(frames.open(clip.path))) for clip in islice(cycle(request.clips), _DECODERS)
        ]

        def decode(decoder: Decoder) -> int:
            decoder.rewind()
            return sum(1 for _ in read_frames(decoder))

        rates = {"decoder": _rate([lambda one=one: decode(one) for one in decoders])}  # type: ignore[misc]
        decoders[0].rewind()
        surface: Surface = next(read_frames(decoders[0])).data
        rows = [surface] * count

        def prepare() -> int:
            with frames.batch(rows):
                return count

        rates["pre-processing"] = _rate([prepare] * contexts)
        batch = stack.enter_context(frames.batch(rows))
        nbytes = sum(value.nbytes for value in runner.run({name: batch}).values())

        def infer() -> int:
            runner.run({name: batch})
            return count

        rates["engine"] = _rate([infer] * contexts)
        source, target, stream = device.allocate(nbytes), device.pinned(nbytes), device.stream()
        for item in (stream, source, target):
            stack.callback(item.close)
        array = np.asarray(target.array("uint8"))[:nbytes]

        def copy() -> int:
            device.download(source, array, stream)
            stream.synchronize()
            return count

        return rates | {"copy": _rate([copy])}


def _rate(calls: Sequence[Callable[[], int]]) -> float:
    """What the calls count per second, each repeated in a thread of its own after a first time."""
    gate = threading.Barrier(len(calls))

    def repeat(call: Callable[[], int]) -> float:
        try:
            call()
        except BaseException:
            gate.abort()
            raise
        gate.wait()
        counted, started_s = 0, time.perf_counter()
        while not counted or time.perf_counter() - started_s < _SPAN_S:
            counted += call()
        return counted / (time.perf_counter() - started_s)

    with ThreadPoolExecutor(len(calls)) as pool:
        threads = [pool.submit(repeat, call) for call in calls]
    failures = [error for thread in threads if (error := thread.exception()) is not None]
    for error in failures:
        if not isinstance(error, threading.BrokenBarrierError) or error is failures[-1]:
            raise error
    return sum(thread.result() for thread in threads)


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
) -> VideoCapacity:
    """The answer of measured runs: the number, its interval, its limit. `rates` are the frames/s of a GPU's parts alone."""
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
    if rates:  # the CPU serves the GPU's parts; its own run in Python, one thread at a time
        part_streams = {name: streams / cores for name, streams in part_streams.items() if name not in rates}
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

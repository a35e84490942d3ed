"""Plays clips as cameras through the whole path, in the child process of `size --video`: packets at their times, decoded,
prepared, inferred in batches, decoded to results. On a GPU each part is measured alone before, and where Python's lock
stands in the way of what the GPU carries, the cameras are played by several processes."""

from __future__ import annotations

import logging
import math
import multiprocessing
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from trt_engine import errors
from trt_engine.closing import Closing
from trt_engine.config.runtime import Batching
from trt_engine.device.info import core_count
from trt_engine.errors import EngineError, TrtEngineError, UsageError
from trt_engine.protocols import RunnerBase
from trt_engine.records.infer import VideoSource
from trt_engine.records.streams import VideoRun
from trt_engine.reporting.tables import plural
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.verbs.evaluate.run import resolve_spec
from trt_engine.verbs.load import load
from trt_engine.verbs.size.stream_worker import INTERRUPTED, VideoRequest, WorkerRequest, warm_up
from trt_engine.verbs.size.video_search import largest_passed, search
from trt_engine.video.decoder import Decoder, PyAvDecoder, VideoError, read_frames
from trt_engine.video.device_frames import DeviceFrames, device_frames
from trt_engine.video.nvdec import Surface
from trt_engine.video.pipeline import CROP_PARTS, PARTS, CropStage, FramePipeline, FrameResult
from trt_engine.video.stream import StreamFrame, StreamSettings, VideoStream
from trt_engine.vision.spec import Vision, vision_of
from trt_engine.workers.crash import exit_name, restore_error
from trt_engine.workers.messages import ErrorMessage, error_message
from trt_engine.workers.process import exit_with_parent

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


def measure_clips(
    engine: InferenceEngine, request: WorkerRequest
) -> tuple[tuple[VideoRun, ...], dict[str, float], int]:
    """All runs of the search for the largest number of cameras, with a GPU the frames/s of its parts alone, and how many
    processes played the cameras of each run."""
    video = request.video
    assert video is not None
    cores = core_count()
    fps = sum(clip.fps for clip in video.clips) / len(video.clips)
    with _opened_player(engine, video) as player:
        rates = {} if player.frames is None else part_rates(engine.runner, player.frames, video)
        first = play_clips(player, 1, min(_FIRST_RUN_S, video.duration_s), seed=0)
        carried = cores * 1e3 / max(1e-3, first.cpu_ms * fps)
        log.info(
            "one camera takes %.1f ms of CPU time for a frame: %d cameras at most on %d cores",
            first.cpu_ms, carried, cores,
        )  # fmt: skip
        for part, rate in rates.items():
            log.info("the %s alone: %.0f frames/s, %d cameras", part, rate, rate / fps)
            carried = min(carried, 1.6 * rate / fps)  # half of it is tried first, and it is measured, not estimated

        def measured(start: float, *others: OtherProcess) -> tuple[VideoRun, ...]:
            def measure(streams: int, number: int) -> VideoRun:
                run = play_clips(player, streams, video.duration_s, seed=number, others=others)
                log.info("run %d: %s, %.2f %% late or dropped", number, plural(streams, "camera"), 100 * run.late_share)
                return run

            return tuple(search(measure, video.late, start=max(1, int(start))))

        runs, count = measured(carried / 2), 1
        alone = largest_passed(runs, video.late)
        limit = min(rates.values(), default=0.0) / fps
        if 0 < alone < 0.9 * limit:  # where one camera is too many for a process, others are of no help
            count = min(max(1, cores // 2), math.ceil(limit / alone))
        if count > 1:
            log.info("one process carries %d cameras, the GPU %.0f: %d processes share them", alone, limit, count)
            try:
                with ExitStack() as held:
                    others = [held.enter_context(closing(OtherProcess(request))) for _ in range(count - 1)]
                    for other in others:
                        other.answer()  # it is ready
                    shared = measured(min(0.8 * limit, alone * count), *others)
                if largest_passed(shared, video.late) > alone:
                    return shared, rates, count
            except TrtEngineError as error:  # the engines may not fit together; what one process carries is measured
                log.warning("the cameras are those of one process: of %d, one failed: %s", count, error.one_line)
        return runs, rates, 1


@contextmanager
def _opened_player(engine: InferenceEngine, request: VideoRequest) -> Iterator[ClipPlayer]:
    vision = vision_of(engine.engine)
    assert vision is not None  # checked before the build
    engine.warmup(2, batch=request.policy.max_batch)
    with (
        device_frames(engine.runner, vision, [clip.path for clip in request.clips]) as frames,
        Decoders(frames) as opened,
        nullcontext() if request.then is None else load(Path(request.then), verify=False) as second,
    ):
        if second is not None:
            second.warmup(2, batch=request.crops)
        yield ClipPlayer(engine, vision, request, opened, second)


class Decoders(ExitStack):
    """One decoder a camera, opened once for all runs: an NVDEC session takes a tenth of a second."""

    def __init__(self, frames: DeviceFrames | None) -> None:
        """Opened on the GPU of `frames`, or on the CPU."""
        super().__init__()
        self.frames = frames
        self._opened: dict[str, list[Decoder]] = defaultdict(list)

    def open(self, sources: Sequence[str]) -> list[_Kept]:
        """Decoders at the start of these sources, those of earlier calls first. Raises `UsageError`."""
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

        counts = Counter(sources)
        new = [source for source in counts for _ in range(counts[source] - len(self._opened[source]))]
        with ThreadPoolExecutor(_OPENERS) as pool:
            for source, decoder in zip(new, pool.map(ready, new), strict=True):
                self._opened[source].append(decoder)
        left = {source: iter(self._opened[source]) for source in counts}
        return [_Kept(next(left[source])) for source in sources]


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


@dataclass(frozen=True, slots=True)
class Schedule:
    """When the cameras of a run play, by `time.perf_counter`, which is the same for all processes of a machine."""

    begin_s: float
    spread_s: float
    """The sources start within this time."""
    duration_s: float
    """Length of the measured window, which follows."""

    @property
    def from_s(self) -> float:
        """Begin of the measured window."""
        return self.begin_s + self.spread_s + _SETTLE_S

    @property
    def to_s(self) -> float:
        """Its end."""
        return self.from_s + self.duration_s


@dataclass(frozen=True, slots=True)
class Share:
    """What one process measured of a run."""

    rows: list[tuple[int, float, bool, bool, float]]
    """By frame: camera, arrival in s from the begin of the window, whether answered, whether late, latency in s."""
    spent: dict[str, float]
    """CPU seconds of the window by part, of the process, and of the pools of ONNX Runtime."""
    crops: list[int]
    """By answered frame."""


class ClipPlayer:
    """The cameras of this process: an engine, and decoders that stay open."""

    def __init__(
        self, engine: InferenceEngine, vision: Vision, request: VideoRequest, decoders: Decoders,
        second: InferenceEngine | None = None,
    ) -> None:  # fmt: skip
        """`second` takes crops of the frames."""
        self._engine, self._vision, self._decoders, self._second = engine, vision, decoders, second
        self.request = request
        self.frames = decoders.frames
        """Where frames are decoded on a GPU."""
        self._clips: Sequence[VideoSource] = ()
        self._opened: Sequence[_Kept] = ()

    def open(self, clips: Sequence[VideoSource]) -> None:
        """Decoders of the next run's cameras. Raises `UsageError`."""
        self._clips, self._opened = clips, self._decoders.open([clip.path for clip in clips])

    def play(self, phases_s: Sequence[float], schedule: Schedule) -> Share:
        """The cameras at their phases. Raises `UsageError` for a clip that ends."""
        policy, second = self.request.policy, self._second
        batching = Batching(
            max_batch=policy.max_batch, max_wait_ms=policy.max_wait_ms, workers=policy.contexts,
            max_rows_waiting=max(len(phases_s), 1) + policy.max_batch,
        )  # fmt: skip
        seen: dict[int, list[tuple[float, float | None]]] = defaultdict(list)
        crops: list[int] = []

        def note(source: int, frame: StreamFrame) -> None:
            answered = frame.result is not None and not isinstance(frame.result, BaseException)
            seen[source].append((frame.arrived_s, time.perf_counter() if answered else None))
            if isinstance(frame.result, FrameResult):
                crops.append(len(frame.result.crops))

        settings = StreamSettings(paced=True, loop=True, newest_only=True)
        then = None if second is None else CropStage(second.runner, resolve_spec(second.engine), self.request.crops)
        with FramePipeline(self._engine.runner, self._vision, batching, frames=self.frames, then=then) as pipeline:
            played = [
                VideoStream(clip.path, pipeline, partial(note, index), settings, opener=self._opened[index].open)
                for index, clip in enumerate(self._clips)
            ]
            started: list[VideoStream] = []
            try:
                for stream, phase_s in zip(played, phases_s, strict=True):
                    started.append(stream.start(schedule.begin_s + phase_s))
                _sleep_until(schedule.from_s)
                before = _cpu_times(pipeline, played)
                _sleep_until(schedule.to_s)
                spent = {name: value - before[name] for name, value in _cpu_times(pipeline, played).items()}
                _sleep_until(schedule.to_s + self.request.deadline_ms / 1e3 + 0.05)
            finally:
                for stream in started:
                    stream.stop()
                for stream in started:
                    stream.join()
        for stream in played:
            if stream.error is not None:
                raise UsageError(f"`{stream.source}`: {stream.error}", hint=_PLAYABLE)
        late_s = self.request.deadline_ms / 1e3
        rows = [
            (source, float(arrived_s - schedule.from_s), ended_s is not None,
             bool(ended_s is None or ended_s - arrived_s > late_s), 0.0 if ended_s is None else ended_s - arrived_s)
            for source, clip in enumerate(self._clips)
            for arrived_s, ended_s in [*seen[source], *_unseen(seen[source], 1 / clip.fps, schedule.to_s)]
            if schedule.from_s <= arrived_s < schedule.to_s
        ]  # fmt: skip
        return Share(rows, spent, crops)


class OtherProcess(Closing):
    """A `ClipPlayer` in a process of its own, with its own engine, which ends with this one."""

    def __init__(self, request: WorkerRequest) -> None:
        """Its first `answer` comes when it is ready; then it takes clips to open, and phases and schedule to play."""
        made = multiprocessing.get_context("spawn")
        self._pipe, theirs = made.Pipe()
        self._process = made.Process(target=_play_for_parent, args=(theirs, request), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, *given: Any) -> None:
        """What it shall do next; it answers once."""
        with suppress(OSError):  # it has ended: `answer` has the reason
            self._pipe.send(given)

    def answer(self) -> Any:
        """Its answer. Raises its error, `EngineError` where it has ended."""
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join()
            raise EngineError(
                f"a process that played cameras ended by {exit_name(self._process.exitcode or 0)}",
                hint="`-v` shows its output; it may be out of memory",
            ) from None
        if isinstance(answer, ErrorMessage):
            raise restore_error(answer.kind, answer.message, answer.hint)
        return answer

    def close(self) -> None:
        """End the process, whatever it does. Idempotent."""
        self._pipe.close()
        self._process.terminate()
        self._process.join()


def _play_for_parent(pipe: Connection, request: WorkerRequest) -> None:
    """Entry point of `OtherProcess`."""
    exit_with_parent(reads_stdin=True)
    errors.in_shell = True  # as written: the parent has the caller
    try:
        assert request.video is not None
        with load(Path(request.engine), config=request.runtime, verify=False) as engine:
            if isinstance(request.runtime.graphs, tuple):
                warm_up(engine, request.runtime.graphs)
            with _opened_player(engine, request.video) as player:
                pipe.send(None)
                while True:
                    player.open(*pipe.recv())
                    pipe.send(None)
                    pipe.send(player.play(*pipe.recv()))
    except EOFError:  # the parent needs it no more
        pass
    except BaseException as error:  # every error is reported
        pipe.send(error_message(error, "with several processes", interrupted=INTERRUPTED, log_hint="`-v` shows more"))


def play_clips(
    player: ClipPlayer, streams: int, duration_s: float, *, seed: int, others: Sequence[OtherProcess] = ()
) -> VideoRun:
    """`streams` cameras for `duration_s`, each at a phase drawn with `seed`, shared with other processes.

    Raises `UsageError` for a clip that ends, `EngineError` for a process that does.
    """
    clips = [player.request.clips[index % len(player.request.clips)] for index in range(streams)]
    bounds = [streams * number // (len(others) + 1) for number in range(len(others) + 2)]
    spans = [slice(*pair) for pair in pairwise(bounds)]
    for other, span in zip(others, spans[1:], strict=True):
        other.send(clips[span])
    player.open(clips[spans[0]])
    for other in others:
        other.answer()
    spread_s = min([_SPREAD_S, duration_s, *(clip.frames / clip.fps for clip in clips if clip.frames)])
    schedule = Schedule(time.perf_counter() + _START_S, spread_s, duration_s)
    phases_s = np.random.default_rng([seed, streams]).uniform(0, spread_s, streams).tolist()
    for other, span in zip(others, spans[1:], strict=True):
        other.send(phases_s[span], schedule)
    busy: list[float] = []
    watch = threading.Thread(target=lambda: busy.append(_busy_cores(schedule)), daemon=True)
    watch.start()
    shares = [player.play(phases_s[spans[0]], schedule), *(other.answer() for other in others)]
    watch.join()
    rows = [
        (span.start + source, *rest) for span, share in zip(spans, shares, strict=True) for source, *rest in share.rows
    ]
    spent = {name: sum(share.spent[name] for share in shares) for name in shares[0].spent}
    crops = [count for share in shares for count in share.crops]
    record = _run_record(streams, rows, duration_s, spent, busy[0])
    return replace(record, crops=sum(crops) / max(1, len(crops)))


def _busy_cores(schedule: Schedule) -> float:
    """Cores of the machine that are busy in the measured window."""
    _sleep_until(schedule.from_s)
    psutil.cpu_times_percent()  # counts from here
    _sleep_until(schedule.to_s)
    machine = psutil.cpu_times_percent()
    return float(100 - machine.idle - getattr(machine, "iowait", 0.0)) / 100 * (psutil.cpu_count() or 1)


def _sleep_until(time_s: float) -> None:
    time.sleep(max(0.0, time_s - time.perf_counter()))


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

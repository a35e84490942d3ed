"""Child process that drives the batcher: full batches for the latency curve, or paced frames.

The engine is loaded once with the most contexts needed. Frames are rows of host arrays, as callers of `te.load` submit them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.config.streams import BatchPolicy
from trt_engine.errors import Overloaded
from trt_engine.protocols import RunnerBase
from trt_engine.records.infer import VideoSource
from trt_engine.records.streams import VideoRun
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.runtime.metered_runner import MeteredRunner
from trt_engine.verbs.load import load
from trt_engine.workers.crash import is_out_of_memory
from trt_engine.workers.messages import ErrorMessage, LogMessage, error_message, receive_request
from trt_engine.workers.process import StopSignal

log = logging.getLogger("trt_engine.verbs.size.stream_worker")  # this module is `__main__` in the child

_MIN_BATCHES = 8
"""Full batches of one turn at least, by worker."""
_START_S = 0.1
"""Time from the start of a drive to its first arrival."""
INTERRUPTED = ("interrupted before the measurement ended", "the same command measures again")


class CurveRequest(msgspec.Struct):
    """Full batches of each size with each number of workers, interleaved."""

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    turns: int
    turn_s: float
    longest_ms: float
    """Batches larger than the first that takes longer are left out."""


class DriveRequest(msgspec.Struct):
    """Frames at these times in s, ascending."""

    policy: BatchPolicy
    times_s: tuple[float, ...]
    max_rows_waiting: int


class VideoRequest(msgspec.Struct):
    """Clips as cameras, until their largest number is found."""

    policy: BatchPolicy
    clips: tuple[VideoSource, ...]
    deadline_ms: float
    late: float
    """Allowed share of late or dropped frames."""
    duration_s: float
    """Duration of each run."""
    then: str | None = None
    """Engine that takes `crops` boxes of each frame."""
    crops: int = 0


class WorkerRequest(msgspec.Struct):
    """The request to the child: one of the three."""

    engine: str
    runtime: RuntimeConfig
    log_level: int
    curve: CurveRequest | None = None
    drive: DriveRequest | None = None
    video: VideoRequest | None = None


class CurveCell(msgspec.Struct):
    """Times in ms of full batches, by turn."""

    batch: int
    contexts: int
    turns_ms: list[list[float]]


class CurveMessage(msgspec.Struct, tag="curve"):
    """The curve; sizes that ran out of memory or take too long are left out."""

    cells: list[CurveCell]
    graphs: str
    """`graphs` of `runtime_info` after the measurement."""


class DriveMessage(msgspec.Struct, tag="drive"):
    """What paced frames and their batches took."""

    latencies_s: list[float | None]
    """By frame, from the planned arrival to the result; None for a dropped frame."""
    batches: list[tuple[int, float]]
    """Rows and time in s of each batch."""


class VideoMessage(msgspec.Struct, tag="video"):
    """The runs in the order measured."""

    runs: tuple[VideoRun, ...]
    rates: dict[str, float]
    """Frames/s of the parts alone, on a GPU."""
    processes: int
    """How many played the cameras."""


Message = LogMessage | CurveMessage | DriveMessage | VideoMessage | ErrorMessage


def random_rows(batcher: Batcher, rows: int = 1) -> dict[str, Any]:
    """Random inputs, at the profile's optimum but for the rows."""
    profile = batcher.profiles[0] if batcher.profiles else None
    return random_feeds(batcher.signature, shapes_of(batcher.signature, profile, batch=rows))


def warm_up(engine: InferenceEngine, sizes: Iterable[int]) -> None:
    """Two runs of each batch size in each context, the first of which captures its graph.

    The largest first: a buffer that grows drops the graphs that use it. Sizes that are out of memory are left out.
    """
    for size in sorted(sizes, reverse=True):
        try:
            engine.warmup(2, batch=size)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.info("batch %d is out of memory in the warm-up", size)


def measure_curve(runner: RunnerBase, request: CurveRequest) -> list[CurveCell]:
    """All sizes once in each turn; the first turn decides which are left out."""
    cells: dict[tuple[int, int], CurveCell] = {}
    for turn in range(request.turns):
        for contexts in request.contexts:
            for batch in request.batches:
                if turn and (batch, contexts) not in cells:
                    continue
                try:
                    times_ms = full_batches_ms(runner, batch, contexts, request.turn_s)
                except Exception as error:
                    if turn or not is_out_of_memory(error):
                        raise
                    log.warning("batch %d with contexts %d is out of memory and left out", batch, contexts)
                    break
                cell = cells.setdefault((batch, contexts), CurveCell(batch, contexts, []))
                cell.turns_ms.append(times_ms)
                middle = median(times_ms)
                log.info("turn %d: batch %d, contexts %d: %.3f ms", turn + 1, batch, contexts, middle)
                if middle > request.longest_ms:
                    break
    return list(cells.values())


def full_batches_ms(runner: RunnerBase, batch: int, contexts: int, duration_s: float) -> list[float]:
    """Cycle times of the batcher's workers while more than enough frames wait, in ms."""
    timed = MeteredRunner(runner)
    waiting = (contexts + 2) * batch
    settings = Batching(max_batch=batch, max_wait_ms=1e4, workers=contexts, max_rows_waiting=waiting + batch)
    slots = threading.Semaphore(waiting)
    with Batcher(timed, settings, profiles=timed.profiles) as batcher:
        feeds = random_rows(batcher)
        warm = [batcher.submit(feeds) for _ in range(batch * contexts)]
        for future in warm:
            future.result()
        timed.starts.clear()
        ends_s = time.perf_counter() + duration_s
        submitted, least = 0, (_MIN_BATCHES + 3) * batch * contexts
        while timed.failure is None and (submitted < least or submitted % batch or time.perf_counter() < ends_s):
            slots.acquire()
            batcher.submit(feeds).add_done_callback(lambda future: slots.release())
            submitted += 1
    if timed.failure is not None:
        raise timed.failure
    return timed.cycles_ms(batch)


def drive(runner: RunnerBase, request: DriveRequest) -> DriveMessage:
    """Submit frames at their times and wait for all results. Raises the first error of a batch."""
    policy = request.policy
    settings = Batching(
        max_batch=policy.max_batch, max_wait_ms=policy.max_wait_ms, workers=policy.contexts,
        max_rows_waiting=request.max_rows_waiting,
    )  # fmt: skip
    ended: list[float | None] = [None] * len(request.times_s)

    timed = MeteredRunner(runner)
    with Batcher(timed, settings, profiles=runner.profiles) as batcher:
        feeds = random_rows(batcher)
        batcher.run(random_rows(batcher, policy.max_batch))
        timed.batches.clear()
        start_s = time.perf_counter() + _START_S
        for index, time_s in enumerate(request.times_s):
            if (left_s := start_s + time_s - time.perf_counter()) > 0:
                time.sleep(left_s)
            try:
                future = batcher.submit(feeds)
            except Overloaded:
                continue
            future.add_done_callback(partial(_note_end, ended, index))
    if timed.failure is not None:
        raise timed.failure
    return DriveMessage(
        [None if end is None else end - start_s - time_s for end, time_s in zip(ended, request.times_s, strict=True)],
        [(rows, seconds) for rows, seconds, _ in timed.batches],
    )


def _note_end(ended: list[float | None], index: int, future: Future[dict[str, Any]]) -> None:
    if future.exception() is None:
        ended[index] = time.perf_counter()


def _answer(request: WorkerRequest) -> CurveMessage | DriveMessage | VideoMessage:
    with load(Path(request.engine), config=request.runtime, verify=False) as engine:
        if isinstance(request.runtime.graphs, tuple):
            warm_up(engine, request.runtime.graphs)
        if request.curve is not None:
            cells = measure_curve(engine.runner, request.curve)
            return CurveMessage(cells, engine.runtime_info.get("graphs", ""))
        if request.video is not None:
            from trt_engine.verbs.size import video_run  # with PyAV

            return VideoMessage(*video_run.measure_clips(engine, request))
        assert request.drive is not None
        return drive(engine.runner, request.drive)


def main() -> None:
    """Entry point of the child: one request, one reply."""
    StopSignal()
    pipe, raw = receive_request()
    request = msgspec.json.decode(raw, type=WorkerRequest, dec_hook=lambda kind, value: kind(value))
    logging.getLogger("trt_engine").setLevel(request.log_level)
    answer: Message
    try:
        answer = _answer(request)
    except BaseException as error:  # every error is reported
        doing = f"while driving `{request.engine}`"
        answer = error_message(error, doing, interrupted=INTERRUPTED, log_hint="`-v` shows its output")
    pipe.send(answer)


if __name__ == "__main__":
    main()

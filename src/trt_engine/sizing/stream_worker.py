"""Child process that drives the batcher: full batches for the latency curve, or paced frames.

The engine is loaded once with the most contexts needed. Frames are rows of host arrays, as callers of `te.load` submit them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from trt_engine.config.runtime import Batching, RuntimeConfig
from trt_engine.config.streams import BatchPolicy
from trt_engine.errors import Overloaded
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.batch_rows import row_count
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Tensors
from trt_engine.verbs.load import load
from trt_engine.workers.crash import is_out_of_memory
from trt_engine.workers.messages import ErrorMessage, LogMessage, error_message, receive_request
from trt_engine.workers.process import StopSignal

log = logging.getLogger("trt_engine.sizing.stream_worker")  # this module is `__main__` in the child

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


class WorkerRequest(msgspec.Struct):
    """The request to the child: one of the two."""

    engine: str
    runtime: RuntimeConfig
    log_level: int
    curve: CurveRequest | None = None
    drive: DriveRequest | None = None


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


Message = LogMessage | CurveMessage | DriveMessage | ErrorMessage


class TimedRunner(RunnerBase):
    """Another runner, kept open, that notes when each thread starts a batch, and what it takes."""

    def __init__(self, runner: RunnerBase) -> None:
        self._runner = runner
        self.signature, self.profiles, self.device = runner.signature, runner.profiles, runner.device
        self.width, self.can_batch = runner.width, runner.can_batch
        self.starts: dict[int, list[tuple[float, int]]] = {}
        """Start times in s and rows of the batches, by thread."""
        self.batches: list[tuple[int, float]] = []
        """Rows and time in s of the batches, in the order of their ends."""
        self.failure: BaseException | None = None
        """The first error of a batch."""

    def run(self, feeds: Tensors) -> dict[str, Any]:
        return self._timed(row_count(feeds), lambda: self._runner.run(feeds))

    def run_batched(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        return self._timed(sum(map(row_count, parts)), lambda: self._runner.run_batched(parts, size))

    def _timed(self, rows: int, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        start_s = time.perf_counter()
        self.starts.setdefault(threading.get_ident(), []).append((start_s, rows))
        try:
            found = run()
            self.batches.append((rows, time.perf_counter() - start_s))
            return found
        except BaseException as error:
            self.failure = self.failure or error  # the batcher would split the batch and go on
            raise

    def cycles_ms(self, rows: int) -> list[float]:
        """Times between the starts of two batches of `rows` rows on one thread."""
        return [
            (after - before) * 1e3
            for starts in self.starts.values()
            for (before, size), (after, _) in pairwise(starts)
            if size == rows
        ]

    def close(self) -> None:
        """Nothing: the runner has another owner."""


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
    timed = TimedRunner(runner)
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

    timed = TimedRunner(runner)
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
        timed.batches,
    )


def _note_end(ended: list[float | None], index: int, future: Future[dict[str, Any]]) -> None:
    if future.exception() is None:
        ended[index] = time.perf_counter()


def _answer(request: WorkerRequest) -> CurveMessage | DriveMessage:
    with load(Path(request.engine), config=request.runtime, verify=False) as engine:
        if isinstance(request.runtime.graphs, tuple):
            warm_up(engine, request.runtime.graphs)
        if request.curve is not None:
            cells = measure_curve(engine.runner, request.curve)
            return CurveMessage(cells, engine.runtime_info.get("graphs", ""))
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

"""How requests of a served version reach its engine: joined by the runtime's batcher, or one by one by urgency."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from trt_engine.device import parse_device
from trt_engine.errors import DeadlineExpired, Overloaded, TrtEngineError
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.tensors import Tensors
from trt_engine.verbs.serve.statistics import VersionStatistics

log = logging.getLogger(__name__)

Done = Callable[[Future[dict[str, Any]]], None]


class RequestQueue(Protocol):
    """What a `Batcher` and a `DirectQueue` have in common."""

    def submit(
        self, feeds: Tensors, *, priority: int = 0, deadline_ms: float | None = None, done: Done | None = None
    ) -> Future[dict[str, Any]]:
        """A future of the outputs; raises `Overloaded` where too much waits. `done` runs in the thread that resolves it."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Run:
    """One run of the engine: when it began and ended, and how long all contexts had been busy until it began."""

    started_ns: int
    ended_ns: int
    all_busy_ns: int
    cost_ns: int
    """What the run took of its thread: processor time where the engine runs on a CPU, else its duration."""


class TimedRunner(RunnerBase):
    """The engine with each run timed; the thread that ran can read the times of its last run."""

    def __init__(self, engine: InferenceEngine, statistics: VersionStatistics) -> None:
        self._engine = engine
        below = engine.runner
        self._statistics = statistics
        self.signature, self.profiles, self.width = engine.signature, engine.profiles, max(below.width, 1)
        self.can_batch = below.can_batch
        self._lock = threading.Lock()
        self._busy = 0
        self._all_busy_ns = self._all_busy_since_ns = 0
        self._thread = threading.local()
        on_cpu = parse_device(engine.engine.passport.device)[0] == "cpu"
        self._clock_ns = time.thread_time_ns if on_cpu else time.perf_counter_ns

    def run(self, feeds: Tensors) -> dict[str, Any]:
        started = self._begin()
        try:
            return self._engine.run(feeds)
        finally:
            self._end(*started, row_count(feeds))

    def run_batched(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        started = self._begin()
        try:
            return self._engine.runner.run_batched(parts, size)
        finally:
            rows = sum(map(row_count, parts))
            self._end(*started, size or rows, padding=(size or rows) - rows)

    def _begin(self) -> tuple[int, int, int]:
        """The time now, the time until now in which every context was busy, and the clock of `cost_ns`."""
        started_ns = time.perf_counter_ns()
        with self._lock:
            all_busy_ns = self._all_busy_until(started_ns)
            self._busy += 1
            if self._busy == self.width:
                self._all_busy_since_ns = started_ns
        return started_ns, all_busy_ns, self._clock_ns()

    def _end(self, started_ns: int, all_busy_ns: int, clock_ns: int, rows: int, padding: int = 0) -> None:
        cost_ns, ended_ns = self._clock_ns() - clock_ns, time.perf_counter_ns()
        with self._lock:
            self._all_busy_ns = self._all_busy_until(ended_ns)
            self._all_busy_since_ns = ended_ns
            self._busy -= 1
        self._thread.run = Run(started_ns, ended_ns, all_busy_ns, cost_ns)
        self._statistics.count_run(rows, ended_ns - started_ns, padding)

    def _all_busy_until(self, now_ns: int) -> int:
        busy = self._busy >= self.width
        return self._all_busy_ns + (now_ns - self._all_busy_since_ns if busy else 0)

    def all_busy_ns(self, now_ns: int) -> int:
        """Time until now in which every context was busy."""
        with self._lock:
            return self._all_busy_until(now_ns)

    def last_run(self) -> Run | None:
        """The last run of the calling thread."""
        return getattr(self._thread, "run", None)

    def close(self) -> None:
        self._engine.close()


def row_count(feeds: Tensors) -> int:
    """Rows of the first input."""
    for array in feeds.values():
        return array.shape[0] if array.shape else 1
    return 1


@dataclass(slots=True)
class _Job:
    feeds: Tensors
    deadline_s: float | None
    future: Future[dict[str, Any]]


class DirectQueue(ProcessBound):
    """Requests that are not joined: one run each, the highest priority first, then in order of arrival."""

    def __init__(self, runner: RunnerBase, *, max_waiting: int) -> None:
        self.runner = runner
        self._max_waiting = max_waiting
        self._jobs: list[tuple[int, int, _Job]] = []
        self._numbers = itertools.count()
        self._ready = threading.Condition()
        self._closed = False
        names = (f"direct-{id(self):x}-{number}" for number in range(runner.width))
        self._workers = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        try:
            for worker in self._workers:
                worker.start()
        except RuntimeError as error:  # thread limit of the process
            self._workers = [worker for worker in self._workers if worker.ident is not None]
            self._end_workers()
            raise TrtEngineError(
                f"{runner.width} contexts need as many threads: {error}", hint="fewer of them"
            ) from error

    @property
    def waiting(self) -> int:
        return len(self._jobs)

    def submit(
        self, feeds: Tensors, *, priority: int = 0, deadline_ms: float | None = None, done: Done | None = None
    ) -> Future[dict[str, Any]]:
        """A future of the outputs. Raises `Overloaded` if the queue is full or closed."""
        deadline_s = None if deadline_ms is None else time.monotonic() + deadline_ms / 1e3
        job = _Job(feeds, deadline_s, Future())
        if done is not None:
            job.future.add_done_callback(done)
        with self._ready:
            if self._closed:
                raise Overloaded("the model is being closed", hint="retry later")
            if len(self._jobs) >= self._max_waiting:
                raise Overloaded(
                    f"{len(self._jobs)} requests wait already", hint="retry later; `--max-queue` sets the limit"
                )
            heapq.heappush(self._jobs, (-priority, next(self._numbers), job))
            self._ready.notify()
        return job.future

    def _work(self) -> None:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                _, _, job = heapq.heappop(self._jobs)
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                outputs = self._run(job)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(outputs)
            del job

    def _run(self, job: _Job) -> dict[str, Any]:
        if job.deadline_s is not None and (late_s := time.monotonic() - job.deadline_s) > 0:
            raise DeadlineExpired(
                f"the deadline passed {late_s * 1e3:.3g} ms ago and the request had not started",
                hint="a longer `timeout`, or fewer requests at once",
            )
        try:
            return self.runner.run(job.feeds)
        except TrtEngineError:
            raise
        except Exception as error:
            raise TrtEngineError(f"the engine failed: {error}") from error

    def close(self) -> None:
        """Finish what waits, then close the runner. Idempotent."""
        if self._forked:
            return
        self._end_workers()
        self.runner.close()

    def _end_workers(self) -> None:
        with self._ready:
            self._closed = True
            self._ready.notify_all()
        for worker in self._workers:
            worker.join()

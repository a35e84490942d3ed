"""Requests by blocking calls, one thread for each in flight: for gRPC and for an engine in this process; or as futures,
where the engine joins them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any

from trt_engine.errors import DeadlineExpired, TrtEngineError, UsageError
from trt_engine.verbs.loadtest.generator import TICK_NS, TIMEOUT, LoadWindow, OnTick, SampleArrays, Samples

RETRY_S = 0.05
"""Pause of a closed loop after a failed request: a server that is away is not called as fast as possible."""
_STOP_S = 1.0
"""How long the end waits for calls after Ctrl-C."""
_clock = time.perf_counter_ns


class RequestFailed(Exception):
    """A request without a good answer: the kind of failure, and a message."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(kind, text)
        self.kind, self.text = kind, text


class ThreadedLoop:
    """Load of several threads, closed (`schedule` is None) or at the times of a schedule, in ns.

    A request is a call, which returns when the answer is here or raises `RequestFailed`.
    """

    def __init__(self, call: Callable[[], None], *, threads: int, timeout_s: float) -> None:
        self._call, self._threads, self._timeout_ns = call, threads, round(timeout_s * 1e9)
        self._samples: list[Samples] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._next = 0
        self._unexpected: BaseException | None = None

    def collect(self) -> SampleArrays:
        """The samples so far."""
        return SampleArrays.join(samples.pack() for samples in self._samples)

    def run(self, window: LoadWindow, schedule: Sequence[int] | None, on_tick: OnTick) -> None:
        """Send until the window ends, then wait for what is in flight. Raises what a call raised unexpectedly."""
        self._next = 0
        self._samples = [Samples() for _ in range(self._threads)]
        threads = [
            threading.Thread(target=self._run_thread, args=(window, schedule, samples), name="load", daemon=True)
            for samples in self._samples
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while True:  # not `while condition`, whose jump back Python 3.13.0 leaves out of the `try`
                    if not thread.is_alive():
                        break
                    thread.join(TICK_NS / 1e9)
                    on_tick(_clock(), *self._samples)
        finally:
            self._stop.set()
            until = time.monotonic() + _STOP_S
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(until - time.monotonic(), 0))
        if self._unexpected is not None:
            raise self._unexpected

    def _run_thread(self, window: LoadWindow, schedule: Sequence[int] | None, samples: Samples) -> None:
        try:
            self._pause(window.start)
            if schedule is None:
                while not self._stop.is_set() and (now := _clock()) < window.end:
                    if not self._send(now, samples):
                        self._stop.wait(RETRY_S)
                return
            while (intended := self._take(schedule)) is not None and not self._stop.is_set():
                self._pause(intended)
                if _clock() - intended > self._timeout_ns:
                    samples.fail(intended, TIMEOUT, "all connections were busy")
                elif not self._stop.is_set():
                    self._send(intended, samples)
        except BaseException as error:  # a thread that ends so would be a measurement with fewer threads
            self._unexpected = self._unexpected or error
            self._stop.set()

    def _take(self, schedule: Sequence[int]) -> int | None:
        """The next request's time; None after the last."""
        with self._lock:
            if self._next >= len(schedule):
                return None
            self._next += 1
            return schedule[self._next - 1]

    def _pause(self, until: int) -> None:
        if (left := until - _clock()) > 0:
            self._stop.wait(left / 1e9)

    def _send(self, intended: int, samples: Samples) -> bool:
        sent = _clock()
        try:
            self._call()
        except RequestFailed as error:
            samples.fail(intended, error.kind, error.text)
            return False
        end = _clock()
        samples.intended.append(intended)
        samples.sent.append(sent)
        samples.ends.append(end)
        return True


class FutureLoop:
    """Load of at most `limit` requests in flight, closed (`schedule` is None) or at the times of a schedule, in ns."""

    def __init__(self, submit: Callable[[], Future[Any]], *, limit: int, timeout_s: float) -> None:
        self._submit, self._limit, self._timeout_ns = submit, limit, round(timeout_s * 1e9)
        self._samples, self._pending = Samples(), set[Future[Any]]()
        self._ended: SimpleQueue[tuple[int, int, int, Future[Any]]] = SimpleQueue()
        self._resting: deque[int] = deque()  # when requests failed whose places are not free again

    def collect(self) -> SampleArrays:
        """The samples so far."""
        return self._samples.pack()

    def run(self, window: LoadWindow, schedule: Sequence[int] | None, on_tick: OnTick) -> None:
        """Send until the window ends, then wait for what is in flight. Raises what a request raised unexpectedly."""
        times = iter(schedule or ())
        due: int | None = window.start if schedule is None else next(times, None)
        tick, free, rest_ns = 0, self._limit, round(RETRY_S * 1e9) if schedule is None else 0
        try:
            while due is not None or free < self._limit:
                if (now := _clock()) >= tick:
                    on_tick(now, self._samples)
                    tick = now + TICK_NS
                while self._resting and self._resting[0] + rest_ns <= now:
                    self._resting.popleft()
                    free += 1
                due = None if schedule is None and now >= window.end else due
                while free and due is not None and due <= now:
                    free -= self._send(now if schedule is None else due, now)
                    due, now = due if schedule is None else next(times, None), _clock()
                first = [self._resting[0] + rest_ns] if self._resting else []
                wakes = [tick, *first, *([due] if free and due is not None else ())]
                free += self._take_ended(min(wakes))
        finally:
            for future in [*self._pending]:
                future.cancel()

    def _send(self, intended: int, now: int) -> bool:
        """Whether a place is taken by the request."""
        if now - intended > self._timeout_ns:
            self._samples.fail(intended, TIMEOUT, "all connections were busy")
            return False
        try:
            self._pending.add(future := self._submit())
            future.add_done_callback(lambda done: self._ended.put((intended, now, _clock(), done)))
        except TrtEngineError as error:
            self._fail(intended, error)
        return True

    def _fail(self, intended: int, error: TrtEngineError) -> None:
        kind = TIMEOUT if isinstance(error, DeadlineExpired) else type(error).__name__
        self._samples.fail(intended, kind, error.message)
        self._resting.append(_clock())

    def _take_ended(self, until: int) -> int:
        """The number of places that are free again, after waiting for the first until then."""
        found, wait_s = 0, max(until - _clock(), 0) / 1e9
        try:
            while True:
                *times, future = self._ended.get(timeout=wait_s)
                wait_s = 0.0
                self._pending.discard(future)
                error = UsageError("the engine was closed") if future.cancelled() else future.exception()
                if error is None:
                    for name, at in zip(("intended", "sent", "ends"), times, strict=True):
                        getattr(self._samples, name).append(at)
                    found += 1
                elif isinstance(error, TrtEngineError):
                    self._fail(times[0], error)
                else:
                    raise error
        except Empty:
            return found

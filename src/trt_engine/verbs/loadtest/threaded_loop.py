"""Requests by blocking calls, one thread for each in flight: for gRPC and for an engine in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from trt_engine.verbs.loadtest.samples import TICK_NS, TIMEOUT, LoadWindow, OnTick, SampleArrays, Samples

Call = Callable[[], None]
"""One request: it returns when the answer is here, or raises `RequestFailed`."""
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
    """Load of several threads, closed (`schedule` is None) or at the times of a schedule, in ns."""

    def __init__(self, call: Call, *, threads: int, timeout_s: float) -> None:
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

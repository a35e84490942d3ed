"""How far a build is, and how it is stopped: TensorRT's progress monitor, and the build in a thread of its own.

A build is one native call of minutes. It runs beside the main thread, which stays free to take Ctrl-C: a signal is only
seen between Python's own steps, and TensorRT calls back from whichever thread it likes, or for minutes not at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import tensorrt as trt

__all__ = ["Progress", "run_beside"]

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOOK_S = 0.1
"""How often the waiting thread wakes to take a signal."""


class Progress(trt.IProgressMonitor):  # type: ignore[misc]
    """What TensorRT is at, by phase, and the word that stops it. Called from several threads."""

    def __init__(self, doing: Callable[[str], None] = lambda text: None) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._phases: dict[str, tuple[int, int, float]] = {}
        self._stop = threading.Event()
        self._doing = doing
        self.error: BaseException | None = None
        """What a callback raised: kept here, because TensorRT would print it and go on."""
        self.seconds: dict[str, float] = {}
        """How long each finished phase took, repeated ones together."""
        self.steps = 0

    def cancel(self) -> None:
        """Stop the build at its next step; it then gives None."""
        self._stop.set()

    @property
    def cancelled(self) -> bool:
        return self._stop.is_set()

    def phase(self) -> str:
        """`Building Engine 3/40, Tactic timing 12/100`: the phases TensorRT is in, outermost first; empty before."""
        with self._lock:
            return ", ".join(f"{name} {done}/{count}" for name, (done, count, _) in self._phases.items())

    # -------------------------------------------------------------------------------- called by TensorRT

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        self._guarded(self._started, phase_name, num_steps)

    def step_complete(self, phase_name: str, step: int) -> bool:
        self._guarded(self._stepped, phase_name, step)
        return not (self._stop.is_set() or self.error is not None)

    def phase_finish(self, phase_name: str) -> None:
        self._guarded(self._finished, phase_name)

    def _guarded(self, take: Callable[..., None], *args: object) -> None:
        try:
            take(*args)
            self._doing(self.phase())
        except BaseException as error:
            self.error = self.error or error

    def _started(self, name: str, count: int) -> None:
        with self._lock:
            self._phases[name] = (0, count, time.monotonic())
        log.debug("%s: %d steps", name, count)

    def _stepped(self, name: str, step: int) -> None:
        with self._lock:
            self.steps += 1
            _, count, started = self._phases.get(name, (0, 0, time.monotonic()))
            self._phases[name] = (step + 1, count, started)

    def _finished(self, name: str) -> None:
        with self._lock:
            _, _, started = self._phases.pop(name, (0, 0, time.monotonic()))
            spent = time.monotonic() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
        log.debug("%s: done in %.1f s", name, spent)


def run_beside(work: Callable[[], T], progress: Progress) -> T:
    """The result of `work`, run in another thread; Ctrl-C here cancels it and is raised once it has stopped.

    A second Ctrl-C does not wait: TensorRT can be silent for minutes, and the process is about to end.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    entered, done = threading.Event(), threading.Event()

    def run() -> None:
        entered.set()
        try:
            if not progress.cancelled:
                results.append(work())
        except BaseException as error:  # raised again in the thread that waits
            errors.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="tensorrt-build", daemon=True).start()
        _wait(done)
    except BaseException:  # Ctrl-C may fall into the start of the thread
        progress.cancel()
        if entered.is_set():  # if not, it will find itself cancelled and begin nothing
            log.info("stopping at TensorRT's next step (Ctrl-C again does not wait for it)")
            _wait(done)
        raise
    if progress.error is not None:
        raise progress.error
    if errors:
        raise errors[0]
    return results[0]


def _wait(done: threading.Event) -> None:
    """Until it is set. Not `Thread.join`: before Python 3.13 a signal in it makes a running thread look ended."""
    while not done.wait(_LOOK_S):
        pass

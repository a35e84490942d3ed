"""Progress and cancellation of a build: TensorRT's progress monitor, and the build in a separate thread.

A build is one native call of minutes. It runs in another thread so that the main thread can handle Ctrl-C: Python
handles signals between bytecodes only, and TensorRT calls back from any thread, or not for minutes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")
_POLL_S = 0.1
"""How often the waiting thread wakes to take a signal."""
_SILENT_S = 1.0
"""Seconds after Ctrl-C until a warning names the phase being waited for."""


class BuildProgress:
    """TensorRT's build phases, and their cancellation. Called from several threads."""

    native_base = "IProgressMonitor"

    def __init__(self, on_status: Callable[[str], None] = lambda text: None) -> None:
        self._lock = threading.Lock()
        self._phases: dict[str, _Phase] = {}
        self._stop = threading.Event()
        self._on_status = on_status
        self.error: BaseException | None = None
        """A callback's exception, which TensorRT would only print."""
        self.seconds: dict[str, float] = {}
        """Seconds of each finished phase without its nested phases, summed by name."""
        self.steps = 0

    def cancel(self) -> None:
        """Stop the build at its next step; it then returns None."""
        self._stop.set()

    @property
    def cancelled(self) -> bool:
        return self._stop.is_set()

    def phase(self) -> str:
        """`Building Engine 3/40, Tactic timing 12/100`: the current phases, outermost first; empty before the build."""
        with self._lock:
            return ", ".join(f"{name} {phase.steps_done}/{phase.steps}" for name, phase in self._phases.items())

    def slowest_phases(self) -> str:
        """`Building engine 3.2 s, Timing tactics 0.4 s`: the four longest phases, without nested ones."""
        ranked = sorted(self.seconds.items(), key=lambda item: -item[1])
        shown = [f"{name} {seconds:.1f} s" for name, seconds in ranked[:4] if seconds >= 0.05]
        return ", ".join(shown) or f"{ranked[0][0]} {ranked[0][1]:.1f} s"

    # -------------------------------------------------------------------------------- called by TensorRT

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        self._call_safely(self._started, phase_name, parent_phase, num_steps)

    def step_complete(self, phase_name: str, step: int) -> bool:
        self._call_safely(self._stepped, phase_name, step)
        return not (self._stop.is_set() or self.error is not None)

    def phase_finish(self, phase_name: str) -> None:
        self._call_safely(self._finished, phase_name)

    def _call_safely(self, take: Callable[..., None], *args: object) -> None:
        try:
            take(*args)
            self._on_status(self.phase())
        except BaseException as error:
            self.error = self.error or error

    def _started(self, name: str, parent: str | None, count: int) -> None:
        with self._lock:
            self._phases[name] = _Phase(time.monotonic(), count, parent)
        log.debug("%s: %d steps", name, count)

    def _stepped(self, name: str, step: int) -> None:
        with self._lock:
            self.steps += 1
            self._phases.setdefault(name, _Phase(time.monotonic())).steps_done = step + 1

    def _finished(self, name: str) -> None:
        with self._lock:
            now = time.monotonic()
            phase = self._phases.pop(name, None) or _Phase(now)
            spent = now - phase.started
            if phase.parent in self._phases:
                self._phases[phase.parent].children_s += spent
            # nested phases of several threads can add up to more than their parent
            self.seconds[name] = self.seconds.get(name, 0.0) + max(0.0, spent - phase.children_s)
        log.debug("%s: done in %.1f s", name, spent)


@dataclass(slots=True)
class _Phase:
    """A running phase."""

    started: float
    steps: int = 0
    parent: str | None = None
    steps_done: int = 0
    children_s: float = 0.0
    """Seconds of its finished nested phases."""


def run_in_thread(work: Callable[[], T], progress: BuildProgress) -> T:
    """The result of `work`, run in another thread; Ctrl-C here cancels it and is raised once it has stopped.

    A second Ctrl-C does not wait, as the builder may not call back for minutes. The thread is not a daemon: the interpreter
    waits for it at exit, because the library would call into destroyed objects.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    entered, done = threading.Event(), threading.Event()

    def run() -> None:
        entered.set()
        try:
            if not progress.cancelled:
                results.append(work())
        except BaseException as error:  # raised again in the waiting thread
            errors.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="tensorrt-build").start()
        _wait(done)
    except BaseException:  # Ctrl-C may interrupt the start of the thread
        progress.cancel()
        if entered.is_set():  # if not, it finds the build cancelled and does not start
            log.info("stopping the build at its next step (Ctrl-C again does not wait for it)")
            _wait(done, progress)
        raise
    if progress.error is not None:
        raise progress.error
    if errors:
        raise errors[0]
    return results[0]


def _wait(done: threading.Event, stopping: BuildProgress | None = None) -> None:
    """Wait for `done`. Not `Thread.join`: before Python 3.13 a signal in it makes a running thread look ended."""
    warns_at = time.monotonic() + _SILENT_S
    while not done.wait(_POLL_S):
        if stopping is not None and time.monotonic() >= warns_at:
            log.warning(
                "the build has not stopped yet: it is in `%s`, and the compiler reports no progress there; it stops at its "
                "next step, Ctrl-C again ends it now",
                stopping.phase() or "its preparation",
            )
            stopping = None

"""Progress of a long call: log lines and counters, for a terminal or a callback."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

from trt_engine.errors import UsageError
from trt_engine.logs import attach_handler

log = logging.getLogger(__name__)

LOG_EVERY_S = 10.0
"""How often a counter writes a line to the log."""


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a long call: a step that begins or ends (`done` is None), or a counter a few times a second."""

    text: str
    """As a person reads it: `measuring: 20 of 201 s`."""
    elapsed_s: float
    """Since the call began."""
    level: Literal["info", "warning", "error"] = "info"
    done: float | None = None
    """How much of `total` is done, in `unit`."""
    total: float | None = None
    """None where it is not known beforehand."""
    unit: str | None = None
    """`s`, `images`, `frames`, `batches` or `cells`; None for a step that is not counted."""


ProgressOption = bool | Callable[[Progress], object]
"""`progress=` of a public function: True for lines on stderr, or a function that is called with each `Progress`."""


class _ProgressHandler(logging.Handler):
    """The log lines of one call, and its counters, given to one function."""

    def __init__(self, callback: Callable[[Progress], object], *, counters: bool) -> None:
        super().__init__(logging.INFO)
        self._receive, self.counters = callback, counters
        self._started = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if _current_handler.get() is not self:  # of another call, in another thread
            return
        if self.counters and record.name == __name__:  # the function has it as a counter
            return
        level: Literal["info", "warning", "error"] = "info"
        if record.levelno >= logging.WARNING:
            level = "error" if record.levelno >= logging.ERROR else "warning"
        self.report(record.getMessage(), level=level)

    def report(self, text: str, **fields: Any) -> None:
        self._receive(Progress(text, time.monotonic() - self._started, **fields))


_current_handler: ContextVar[_ProgressHandler | None] = ContextVar("trt_engine_progress", default=None)


@contextlib.contextmanager
def report_progress(progress: ProgressOption) -> Iterator[None]:
    """Report what is done inside as `progress` wants it; with False nothing changes, also for a call around this one."""
    if progress is None or progress is False:
        yield
        return
    receive = _write_line if progress is True else progress
    if not callable(receive):
        raise UsageError(
            f"`progress` is {progress!r}, expected True, False or a function", hint="`progress=True` writes to stderr"
        )
    receiver = _ProgressHandler(receive, counters=progress is not True)
    token = _current_handler.set(receiver)
    try:
        with attach_handler(receiver):
            yield
    finally:
        _current_handler.reset(token)


def _write_line(progress: Progress) -> None:
    mark = "" if progress.level == "info" else f"{progress.level}: "
    text = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in progress.text)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed
        sys.stderr.write(f"[{progress.elapsed_s:7.1f} s] {mark}{text}\n")
        sys.stderr.flush()


def progress_counter(step: str, unit: str) -> Callable[..., None]:
    """A function of how much is done and planned, and a note: a log line every ten seconds, and each call to `progress=`."""
    written_s = time.monotonic()

    def count(done: float, total: float | None = None, note: str = "") -> None:
        nonlocal written_s
        now_s = time.monotonic()
        receiver = _current_handler.get()
        due = now_s - written_s >= LOG_EVERY_S
        if not due and (receiver is None or not receiver.counters):
            return
        known = None if total is None else max(done, total)
        of = "" if known is None else f" of {known:.0f}"
        text = f"{step}: {done:.0f}{of} {unit}{', ' if note else ''}{note}"
        if receiver is not None and receiver.counters:
            receiver.report(text, done=done, total=known, unit=unit)
        if due:
            written_s = now_s
            log.info("%s", text)

    return count

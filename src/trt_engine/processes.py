"""Both sides of a child process: one that has to go is waited for, killed with all it started, and told what it ended by;
the child hears signals, speaks on a pipe, one JSON message a line, and never outlives its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

import msgspec

__all__ = ["Ended", "Mouth", "Stop", "die_with_parent", "read_line", "reap", "spawned"]

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, negative for the number of a signal, and the most memory it had."""

    code: int
    peak_bytes: int


def spawned(module: str, request: bytes, noise: int | IO[bytes]) -> tuple[subprocess.Popen[bytes], int]:
    """A module of ours as a process that was told one line, and the end of the pipe it answers on.

    Its standard input stays open: it ends when that does. What it prints goes to `noise`.
    """
    ours, theirs = os.pipe()
    try:
        # a session of its own, so that Ctrl-C in a terminal comes here and the child is asked to stop in order;
        # -P, so that a folder `onnx` where the user stands is not imported
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(theirs)],
            stdin=subprocess.PIPE, stdout=noise, stderr=noise, pass_fds=(theirs,), start_new_session=True,
        )  # fmt: skip
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once; the pipe's end says so
        process.stdin.write(request + b"\n")
        process.stdin.flush()
    return process, ours


def reap(process: subprocess.Popen[Any], grace_s: float) -> Ended:
    """What the process ended by, at the latest `grace_s` from now: then it and its process group are killed.

    The process leads a group of its own (`start_new_session=True`), and nobody has waited for it before.
    """
    if not _ended_within(process.pid, grace_s):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Ended(process.returncode, usage.ru_maxrss << 10)


def _ended_within(pid: int, seconds: float) -> bool:
    """Whether the child has ended by then; it is left to be waited for."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):  # no Linux, or one that is older than 5.3
        return _polled(pid, seconds)
    try:
        return bool(select.select([handle], [], [], max(seconds, 0))[0])
    finally:
        os.close(handle)


def _polled(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


# ------------------------------------------------------------------------------------------------ the child's side


class Stop:
    """SIGINT and SIGTERM: once `measuring` they ask to stop in order, before it they end the process."""

    def __init__(self) -> None:
        self.asked = self.measuring = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.measuring:
            raise KeyboardInterrupt


class Mouth(logging.Handler):
    """The child's answers to the pipe, and its log lines, as the messages that `said` makes of them."""

    def __init__(self, pipe: int, said: Callable[[logging.LogRecord], object], level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._file = os.fdopen(pipe, "wb", buffering=0)
        self._said = said

    def say(self, message: object) -> None:
        raw = memoryview(msgspec.json.encode(message) + b"\n")
        with self.lock if self.lock is not None else contextlib.nullcontext():
            while raw:
                raw = raw[self._file.write(raw) :]

    def emit(self, record: logging.LogRecord) -> None:
        self.say(self._said(record))


def read_line() -> bytes:
    """The first line of stdin, read without a buffer: what follows is for `die_with_parent`, which comes after this."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            os._exit(1)
        parts.append(chunk)
    return b"".join(parts)


def die_with_parent() -> None:
    """End with the parent: by the kernel on Linux, and by the end of stdin everywhere."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()

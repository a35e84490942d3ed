"""A child process that has to go: waited for, killed with all it started, and told what it ended by."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import Any

__all__ = ["Ended", "reap"]

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: its exit code, negative for the number of a signal, and the most memory it had."""

    code: int
    peak_bytes: int


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

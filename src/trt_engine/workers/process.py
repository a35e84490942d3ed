"""Both sides of a child process: the parent waits for it, kills it with its descendants and reports how it ended;
the child handles signals, and never outlives its parent. Its messages are in `messages`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import IO, Any

from trt_engine.atomic_io import os_errors

_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Exit code of a process (negative: signal number) and its peak memory."""

    code: int
    peak_bytes: int


class ChildProcess:
    """A child that gets requests on its standard input and replies on a pipe, one JSON line each.

    Its command ends with the pipe's number. Its standard input stays open: it ends when that does.
    """

    def __init__(
        self, command: Sequence[str], output: int | IO[bytes], environment: Mapping[str, str] | None = None
    ) -> None:
        self._pipe, theirs = os.pipe()
        try:
            # a separate session, so that Ctrl-C in a terminal comes here and the child is stopped in order
            self.process = subprocess.Popen(
                [*command, str(theirs)],
                stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=(theirs,), start_new_session=True,
                env=None if environment is None else os.environ | environment,
            )  # fmt: skip
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(theirs)
        self._lines: deque[bytes] = deque()
        self._parts: list[bytes] = []  # of an incomplete line
        self._ended: ExitStatus | None = None
        self._closed = False

    def send(self, request: bytes) -> None:
        """Send one line; a child that has ended is seen when its reply is read."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(request + b"\n")
            self.process.stdin.flush()

    def read_line(self, timeout_s: float) -> bytes | None:
        """The next line, None when the child has closed the pipe. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN | select.POLLHUP)
        while not self._lines:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(self._pipe, 1 << 20)
            if not chunk:
                return None
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                self._lines.append(b"".join([*self._parts, end]))
                self._parts.clear()
            self._parts.append(rest)
        return self._lines.popleft()

    def interrupt(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGINT)

    def wait(self, grace_s: float) -> ExitStatus:
        """How it ended; after `grace_s` seconds it is killed."""
        if self._ended is None:
            self._ended = wait_or_kill(self.process, grace_s)
        return self._ended

    def close(self, grace_s: float = 0.0) -> ExitStatus:
        """End its input, `wait`, and close the pipe; idempotent."""
        try:
            with contextlib.suppress(OSError):
                assert self.process.stdin is not None
                self.process.stdin.close()
            return self.wait(grace_s)
        finally:
            if not self._closed:
                self._closed = True
                os.close(self._pipe)


def spawn_worker(
    module: str, request: bytes, output: int | IO[bytes], environment: Mapping[str, str] | None = None
) -> ChildProcess:
    """Run a module of this package as a child with its first request; `environment` adds to this process's own."""
    # -P, so that a folder `onnx` where the user stands is not imported
    child = ChildProcess([sys.executable, "-P", "-m", module], output, environment)
    child.send(request)
    return child


def open_raw_log(path: Path, command: str) -> FileIO:
    """The log of a program's raw output, opened unbuffered for appending, with its command line written."""
    with os_errors(path):
        file = path.open("ab", buffering=0)
        file.write(f"# {command}\n".encode(errors="replace"))
    return file


def wait_or_kill(process: subprocess.Popen[Any], grace_s: float) -> ExitStatus:
    """Exit status of the process; after `grace_s` seconds it and its process group are killed.

    The process leads a group (`start_new_session=True`) and has not been waited for.
    """
    if not _exits_within(process.pid, grace_s):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return ExitStatus(process.returncode, usage.ru_maxrss << 10)


def _exits_within(pid: int, seconds: float) -> bool:
    """Whether the child has ended by then; it is left to be waited for."""
    try:
        handle = os.pidfd_open(pid)
    except (OSError, AttributeError):  # no Linux, or one that is older than 5.3
        return _poll_exit(pid, seconds)
    try:
        return bool(select.select([handle], [], [], max(seconds, 0))[0])
    finally:
        os.close(handle)


def _poll_exit(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


# ------------------------------------------------------------------------------------------------ the end of all


class _ShutdownDeadline:
    until = 0.0


def extend_shutdown(seconds: float) -> None:
    """After a signal the command line ends within 5 s; a step that waits for another program's end may take longer.

    A further signal ends it all the same.
    """
    _ShutdownDeadline.until = max(_ShutdownDeadline.until, time.monotonic() + seconds)


def shutdown_deadline() -> float:
    """The monotonic time until which steps of an orderly end may take; 0 without one."""
    return _ShutdownDeadline.until


_STOP_INFERENCES_S = 1.0
"""An inference that runs so long after a signal is stopped, so that the records of those before it are written."""
_stop_callbacks: list[Callable[[], None]] = []


def add_stop_callback(stop: Callable[[], None]) -> None:
    """Let `stop` be called, in any thread, where the process is to end and inferences still run."""
    _stop_callbacks.append(stop)


def stop_inferences() -> None:
    """Stop the inferences that run now, where their library can do that; they raise, and so do all that follow."""
    for stop in _stop_callbacks:
        with contextlib.suppress(Exception):
            stop()


def kill_descendants(spare: int | None = None) -> None:
    """Kill every process that this one started but `spare`, with all of theirs, whatever their groups and sessions."""
    import psutil

    family = [one for one in psutil.Process().children(recursive=True) if one.pid != spare]
    for one in family:
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(one.pid) == one.pid != os.getpgrp():
                os.killpg(one.pid, signal.SIGKILL)  # its group too: orphans are not children of this process
        with contextlib.suppress(psutil.Error):
            one.kill()
    psutil.wait_procs(family, timeout=0.2)


# ------------------------------------------------------------------------------------------------ the child's side


def stop_inferences_after_signals() -> None:
    """Stop the inferences that still run some time after a signal: Python's handler runs only after them."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def watch() -> None:
        os.read(reader, 1)
        time.sleep(_STOP_INFERENCES_S)
        stop_inferences()

    threading.Thread(target=watch, name="watch-signals", daemon=True).start()


class StopSignal:
    """SIGINT and SIGTERM: while `measuring` they request an orderly stop, before it they end the process.

    An inference that takes longer is stopped.
    """

    def __init__(self) -> None:
        self.asked = self.measuring = False
        stop_inferences_after_signals()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.measuring:
            raise KeyboardInterrupt


def read_first_line() -> bytes:
    """The first line of stdin, read without a buffer: what follows is for `exit_with_parent`, which comes after this."""
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            os._exit(1)
        parts.append(chunk)
    return b"".join(parts)


def exit_with_parent(*, reads_stdin: bool = False) -> None:
    """End with the parent: by the kernel on Linux, and by the end of stdin everywhere.

    With `reads_stdin` the caller reads stdin line after line itself: `read_line` ends the process with it.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if reads_stdin:
        return

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()

"""Watchdog process that kills the command where no Python thread can, because a library holds the GIL.

Python's signal handler writes the signal number to a pipe without the GIL. The watchdog passes it to the watching thread,
and kills the command when that thread does not answer or misses its deadline. It also reports crashes of the command.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

NO_ANSWER_S = 3.8
"""Time after an unanswered signal at which the command is killed."""
FORCED_S = 1.5
"""Time after the requested deadline, or after a second signal to a verb that ends itself, at which the command is killed."""
PRESS_WINDOW_S = 0.25
"""Signals within this time count as one Ctrl-C: a parent program may send its own as well."""
_HAND_OVER = b"handed-over"
_KILLED = "error: interrupted\nhint: a library blocked the shutdown: the command was killed\n"
_CRASHED = "error: a library crashed the command: {}\nhint: the model or its inputs trigger a bug in it; {}\n"
_AT_RUN = "`PYTHONFAULTHANDLER=1` shows where"
_AT_LOAD = "`-O graph_optimization=extended`, or `basic`, rewrites the graph less"
_LOADING = b"onnxruntime_inference_collection.py"
"""The file of ONNX Runtime that makes sessions, in the lines of `faulthandler`."""
_FATAL = b"Fatal Python error: "
"""Prefix of `faulthandler` output, before the signal name."""


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Handle of the watchdog in the command."""

    pid: int
    signals: int
    """Pipe of signal numbers, one byte each."""
    _deadline_pipe: int

    @classmethod
    def start(cls, wakeup: int, numbers: Collection[int]) -> Watchdog | None:
        """Fork a watchdog that reads signals from the pipe `wakeup`; None where it cannot be forked.

        No other thread may run yet. About 0.5 ms.
        """
        if not hasattr(os, "fork") or threading.active_count() > 1:
            return None
        signals, relay = os.pipe()
        theirs, orders = os.pipe()
        command = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # permanently in the watchdog, which gets Ctrl-C too
        try:
            if (pid := os.fork()) == 0:
                _main(command, wakeup, theirs, relay, numbers)
        except OSError:  # out of processes or memory
            for pipe in (signals, orders):
                os.close(pipe)
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for pipe in (relay, theirs):
                os.close(pipe)
        if not faulthandler.is_enabled():
            faulthandler.enable(orders, all_threads=False)
        return cls(pid, signals, orders)

    def set_deadline(self, deadline: float) -> None:
        """Kill this process `FORCED_S` after `deadline` (monotonic)."""
        with contextlib.suppress(OSError):
            os.write(self._deadline_pipe, b"%f\n" % deadline)

    def hand_over(self) -> None:
        """From now on a first signal has no deadline, and a second one is answered within `FORCED_S` or kills."""
        with contextlib.suppress(OSError):
            os.write(self._deadline_pipe, _HAND_OVER + b"\n")

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _main(command: int, wakeup: int, orders: int, relay: int, numbers: Collection[int]) -> NoReturn:
    """Main function of the watchdog, which ends with the command."""
    try:
        handle = _prepare(command, orders, wakeup, relay)
        _watch(command, wakeup, orders, relay, handle, numbers)
    finally:
        os._exit(0)


def _prepare(command: int, orders: int, *pipes: int) -> int | None:
    """Close all descriptors but the pipes and stderr; returns the pidfd of the command, if supported."""
    low = 3
    for pipe in sorted((orders, *pipes)):
        os.closerange(low, pipe)
        low = pipe + 1
    os.closerange(low, min(os.sysconf("SC_OPEN_MAX"), 1 << 16))
    os.set_blocking(orders, False)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    try:
        return os.pidfd_open(command)
    except (OSError, AttributeError):  # not Linux 5.3 or later: EOF of the pipe shows the end
        return None


def _watch(command: int, wakeup: int, orders: int, relay: int, handle: int | None, numbers: Collection[int]) -> None:
    poll = select.poll()
    for pipe in (wakeup, orders, *(() if handle is None else (handle,))):
        poll.register(pipe, select.POLLIN)
    deadline: float | None = None
    first: float | None = None
    answered = handed_over = False
    received = b""
    while True:
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = [pipe for pipe, _ in poll.poll(None if wait_s is None else wait_s * 1000 + 1)]
        ended = os.getppid() != command or handle in ready
        if orders in ready or ended:
            received += (raw := _read_all(orders))
            if ended or not raw:
                _report_crash(received)
                return
            if _FATAL not in received:
                handed_over = _HAND_OVER in received
                if (order := received.split()[-1]) != _HAND_OVER:
                    deadline, answered = float(order) + FORCED_S, True
        if wakeup in ready:
            found = bytes(number for number in os.read(wakeup, 512) if number in numbers)
            if found:
                os.write(relay, found)
                now = time.monotonic()
                if not handed_over:
                    deadline = deadline or now + NO_ANSWER_S
                elif first is not None and now - first >= PRESS_WINDOW_S:
                    deadline = now + FORCED_S if deadline is None else min(deadline, now + FORCED_S)
                first = first or now
        if deadline is not None and time.monotonic() >= deadline:
            _kill(command, answered)
            return


def _read_all(pipe: int) -> bytes:
    """Read all available bytes."""
    raw = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(pipe, 1 << 16):
            raw += part
    return raw


def _report_crash(received: bytes) -> None:
    _, crashed, text = received.partition(_FATAL)
    if crashed:
        signal_name = text.partition(b"\n")[0].decode("ascii", "replace").lower()
        makes_session = _LOADING in text and b"_create_inference_session" in text
        _print(_CRASHED.format(signal_name, _AT_LOAD if makes_session else _AT_RUN))


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, ("\r\x1b[K" if os.isatty(2) else "").encode() + text.encode())


def _kill(command: int, answered: bool) -> None:
    """Kill the command and its descendants; the next command removes its staged files."""
    family = _descendants(command)
    with contextlib.suppress(OSError):
        os.kill(command, signal.SIGKILL)
    for pid in family:
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
    if not answered:  # else the command has reported it
        _print(_KILLED)


def _descendants(command: int) -> list[int]:
    """Descendants of the command without this process; empty without `/proc`."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    handle = os.open(f"/proc/{name}/stat", os.O_RDONLY)
                    try:
                        parent = int(os.read(handle, 4096).rpartition(b")")[2].split()[1])
                    finally:
                        os.close(handle)
                    children.setdefault(parent, []).append(int(name))
    found, left = [], [command]
    while left:
        for pid in children.get(left.pop(), []):
            if pid != os.getpid():
                found.append(pid)
                left.append(pid)
    return found

"""SIGINT, SIGTERM and SIGHUP in the command line: orderly shutdown, forced after a timeout.

Python runs signal handlers between bytecodes, not during native calls. A thread therefore reads signals from the wake-up
pipe, which is written without Python, and ends the process at the deadline. If that thread does not run either, the
watchdog process kills this one, also where a library holds the GIL. It reports crashes of the command too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPT_INTERVAL_S = 1.0
"""Minimum time between KeyboardInterrupts, so that a second press does not interrupt the shutdown."""
NATIVE_CALL_S = 2.5
"""Time for a native call after the first signal."""
STOP_RUNS_S = 1.0
"""Time for a stoppable inference; earlier records are written."""
SHUTDOWN_S = 3.2
"""Time for the orderly shutdown after the first signal; longer steps call `workers.process.extend_shutdown`."""
SECOND_PRESS_S = 0.4
"""Time for either after a further press, so that the process ends within a second."""
_CLEANUP_S, _REPORT_S = 0.4, 1.0
_POLL_S = 0.1


class _State:
    """State shared by the handler and the watching thread."""

    handled = False
    """Whether Python's handler ran and started the shutdown."""
    interrupted = False
    """Whether KeyboardInterrupt was raised."""
    own_end_s: float | None = None
    """Seconds that a verb which ends itself after a first signal may take."""
    watched = False
    sentinel: Watchdog | None = None


def install_handlers() -> None:
    """Raise KeyboardInterrupt on the three signals, and force the exit after a timeout.

    Signals ignored by the parent (`nohup`, background jobs) stay ignored.
    """
    burst = -INTERRUPT_INTERVAL_S

    def interrupt(number: int, frame: object) -> None:
        nonlocal burst
        _State.handled = True
        now = time.monotonic()
        if now - burst >= INTERRUPT_INTERVAL_S:
            burst = now  # of its first signal: a key held down starts a new one each second
            _State.interrupted = True
            raise KeyboardInterrupt

    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    if threading.current_thread() is threading.main_thread():
        _State.sentinel = Watchdog.start(reader, SIGNALS)
    try:
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, interrupt)
    except ValueError:  # not in the main thread: leave signals to the host program
        os.close(reader)
        os.close(writer)
        return
    _State.watched = True
    threading.Thread(target=_watch, args=(reader,), name="watch-signals", daemon=True).start()


def was_interrupted() -> bool:
    """Whether a signal raised KeyboardInterrupt."""
    return _State.interrupted


def hand_over(end: Callable[[], None], *, within_s: float) -> None:
    """From now on the first signal calls `end`, and the verb has that time to return. A second one ends the process within
    2 s, whatever runs: the watching thread does it, the watchdog where that does not run.
    """
    pressed = False

    def handle(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True
        end()

    if threading.current_thread() is not threading.main_thread():
        return
    _State.own_end_s = within_s
    if _State.sentinel is not None:
        _State.sentinel.hand_over()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)
    _State.handled = True


def ignore_signals() -> None:
    """Ignore further signals while the process ends."""
    for number in SIGNALS:
        try:
            signal.signal(number, signal.SIG_IGN)
        except ValueError:
            return


def end_process(code: int) -> NoReturn:
    """Exit with that code; after a signal without interpreter finalization.

    A library still running in another thread would crash or block it.
    """
    ignore_signals()
    if _State.sentinel is not None:
        _State.sentinel.stop()
    if not (_State.watched and _State.handled):
        sys.exit(code)
    _cleanup()
    output = sys.modules.get("trt_engine.command_line.output")
    for stream in (sys.stdout if output is None else output.result_stream(), sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _watch(wakeup: int) -> None:
    first = again = named = None
    stopped = False
    sentinel = _State.sentinel
    reader = wakeup if sentinel is None else sentinel.signals
    while True:
        ready, _, _ = select.select([reader], [], [], None if first is None else _POLL_S)
        now = time.monotonic()
        numbers = os.read(reader, 512) if ready else b""
        if ready and not numbers:  # the watchdog was killed
            reader, sentinel = wakeup, None
        presses = sum(number in SIGNALS for number in numbers)
        if presses and first is None:
            first, presses = now, presses - 1
            threading.Thread(target=_import_for_forced_exit, name="forced-end", daemon=True).start()
        if presses and first is not None and now - first >= PRESS_WINDOW_S:
            again = again or now  # also where a busy machine delivers both presses at once
        if first is not None:
            deadline = _deadline(first, again)
            if sentinel is not None and deadline != named:
                named = deadline
                sentinel.set_deadline(deadline)
            if now >= deadline:
                _force_exit()
            if not stopped and now >= first + STOP_RUNS_S and (again or _State.own_end_s is None):
                stopped = True
                _stop_runs()


def _deadline(first: float, again: float | None) -> float:
    latest = first + (SHUTDOWN_S if _State.handled else NATIVE_CALL_S)
    processes = sys.modules.get("trt_engine.workers.process")
    if _State.own_end_s is not None:
        latest = first + _State.own_end_s
    elif _State.handled and (allowed := getattr(processes, "shutdown_deadline", None)):  # none while it is imported
        latest = max(latest, allowed())
    return latest if again is None else min(latest, again + SECOND_PRESS_S)


def _stop_runs() -> None:
    if (processes := sys.modules.get("trt_engine.workers.process")) is not None:
        with contextlib.suppress(AttributeError):  # while it is imported
            processes.stop_inferences()


def _import_for_forced_exit() -> None:
    """Import modules for a forced exit in advance."""
    with contextlib.suppress(Exception):
        import psutil  # noqa: F401

        from trt_engine.command_line import output  # noqa: F401
        from trt_engine.records import base  # noqa: F401
        from trt_engine.workers import process  # noqa: F401


def _force_exit() -> NoReturn:
    """Exit with 130 regardless of locks held by other threads."""
    _run_bounded(_cleanup, _CLEANUP_S)
    _run_bounded(_print_interrupted, _REPORT_S)
    if _State.sentinel is not None:
        _State.sentinel.stop()
    os._exit(130)


def _run_bounded(work: Callable[[], None], seconds: float) -> None:
    thread = threading.Thread(target=work, name="forced-end", daemon=True)
    with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
        thread.start()
        thread.join(seconds)


def _cleanup() -> None:
    """Kill all children, then remove unfinished files; in this order, because children write them."""
    if "subprocess" in sys.modules:
        from trt_engine.workers.process import kill_descendants

        with contextlib.suppress(Exception):
            kill_descendants(spare=None if _State.sentinel is None else _State.sentinel.pid)
    if (files := sys.modules.get("trt_engine.atomic_io")) is not None:
        with contextlib.suppress(Exception):
            files.remove_staged()


def _print_interrupted() -> None:
    """Print the error unless the orderly shutdown did."""
    from trt_engine.command_line.output import OutputOptions, error_was_printed, print_error
    from trt_engine.errors import Interrupted

    if error_was_printed():
        return
    error = Interrupted("interrupted", hint="finished work is kept; run the same command again")
    with contextlib.suppress(Exception):
        print_error(error, OutputOptions.from_args(sys.argv[1:]), command=" ".join(["trt-engine", *sys.argv[1:]]))


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
        _guard(command, wakeup, orders, relay, handle, numbers)
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


def _guard(command: int, wakeup: int, orders: int, relay: int, handle: int | None, numbers: Collection[int]) -> None:
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

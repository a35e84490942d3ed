"""How tests wait: for the event, however slow or busy the machine is; a limit of time only tells a hang from patience."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

HANG_S = 240.0
"""Nothing that a test waits for takes so long on a machine that stops for seconds; pytest's own limit is above it."""


PATIENT_COMMAND = (sys.executable, "-c", """
from trt_engine.cli import main; from trt_engine.command_line import signals
for name in ('NATIVE_CALL_S', 'SHUTDOWN_S', 'SECOND_PRESS_S', '_CLEANUP_S', '_REPORT_S', 'NO_ANSWER_S', 'FORCED_S'):
    setattr(signals, name, 4 * getattr(signals, name))
main.main()
""")  # fmt: skip
"""`trt-engine`, with four times the time to end in after a signal: a busy machine may need more than the product allows."""


def until(true: Callable[[], object], what: str, *, pause_s: float = 0.01) -> None:
    """Back as soon as it is true; a failure that says what never was where that looks like a hang."""
    gives_up_s = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < gives_up_s, f"never: {what}"
        time.sleep(pause_s)


def text_of(path: Path) -> str:
    """What a file holds that another process writes; nothing where it is not there, or not any more."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def runs(pid: int) -> bool:
    """Whether a process of that number runs; one that is dead and not yet waited for does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False

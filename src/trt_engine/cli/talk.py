"""The talk of a verb: the package's log lines on stderr, as a person reads them."""

from __future__ import annotations

import logging
import os
import sys
import time

__all__ = ["StderrHandler"]


class StderrHandler(logging.Handler):
    """Log lines with the time since the start, warnings marked; colour on a terminal unless NO_COLOR is set."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.monotonic()
        self.colour = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            mark = "error: " if record.levelno >= logging.ERROR else "warning: "
            text = f"\x1b[33m{mark}\x1b[0m{text}" if self.colour else mark + text
        clock = f"[{time.monotonic() - self.started:7.1f} s] "
        try:
            print(f"\x1b[2m{clock}\x1b[0m{text}" if self.colour else clock + text, file=sys.stderr, flush=True)  # noqa: T201
        except (OSError, ValueError):  # stderr was closed under us; a log line is not worth a crash
            return

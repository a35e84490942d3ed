"""The log handler for stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings

from trt_engine.escapes import escape_lines
from trt_engine.installed_from import installable
from trt_engine.logs import start_command

_CONTINUATION = " " * 12 + "| "
"""Prefix of continuation lines."""


class StderrHandler(logging.Handler):
    """Writes log lines with elapsed time and severity, in colour on a terminal unless NO_COLOR is set."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.monotonic()
        self.command = start_command()
        self.colour = sys.stderr is not None and sys.stderr.isatty() and not os.environ.get("NO_COLOR")

    def emit(self, record: logging.LogRecord) -> None:
        said = installable(record.getMessage())
        if record.levelno == logging.WARNING:
            self.command.warnings.append(said)
        text = escape_lines(said, _CONTINUATION)
        if record.levelno >= logging.WARNING:
            mark = "error: " if record.levelno >= logging.ERROR else "warning: "
            text = f"\x1b[33m{mark}\x1b[0m{text}" if self.colour else mark + text
        clock = f"[{time.monotonic() - self.started:7.1f} s] "
        try:
            # one write: Ctrl-C must not separate the text from its newline
            sys.stderr.write(f"\x1b[2m{clock}\x1b[0m{text}\n" if self.colour else f"{clock}{text}\n")
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # stderr was closed: drop the line
            return


def escape_warnings() -> None:
    """Escape terminal control characters in Python warnings, which may quote a file."""
    plain = warnings.formatwarning

    def escaped(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return escape_lines(plain(message, category, filename, lineno, line).rstrip("\n"), _CONTINUATION) + "\n"

    warnings.formatwarning = escaped

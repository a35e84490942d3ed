"""`log_to`: the package's log on the console or in a file, by one call. The root logger is never touched."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from trt_engine.atomic_io import os_errors
from trt_engine.closing import Closing
from trt_engine.errors import UsageError, in_callers_language
from trt_engine.escapes import escape_lines

LEVELS = {
    "internal error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
}
"""TensorRT's five severities, most severe first. TensorRT's INFO messages appear at `verbose`: they are that many."""
_LEVEL_LETTERS = ((logging.CRITICAL, "F"), (logging.ERROR, "E"), (logging.WARNING, "W"), (logging.INFO, "I"), (0, "V"))
_COLOURS = {"F": "\x1b[1;31m", "E": "\x1b[31m", "W": "\x1b[33m", "I": "", "V": "\x1b[2m"}
_PACKAGE = logging.getLogger("trt_engine")


def log_to(target: Path | str | TextIO | None = None, *, level: str = "info", colour: bool | None = None) -> LogOutput:
    """Let the package's log, TensorRT's messages in it, go to a file or a stream (stderr unless named) until it is closed.

        `level` is the lowest severity written: `internal error`, `error`, `warning`, `info`, `verbose`. A line has
    milliseconds, the severity's letter and the logger; files are appended to. Colour is for terminals and off with NO_COLOR.
    Several outputs may be open at once, each at its own level. A library that imports this package logs nothing by default.

    Raises `UsageError` for an unknown `level`, or a `target` without `write`.
    """
    name = level.strip().lower().replace("_", " ") if isinstance(level, str) else level
    if not isinstance(name, str) or name not in LEVELS:
        raise UsageError(f"unknown log level {level!r}", hint="one of " + ", ".join(f"`{known}`" for known in LEVELS))
    if target is not None and not isinstance(target, Path | str) and not hasattr(target, "write"):
        raise UsageError(
            f"the log cannot go to {target!r}",
            hint="the path of a file, or something with `write` such as `sys.stdout`",
        )
    if not isinstance(target, Path | str):
        stream = target if target is not None else sys.stderr
        return LogOutput(stream, LEVELS[name], _wants_colour(stream) if colour is None else colour, ours=False)
    path = Path(target)
    with os_errors(path, by="log_to"):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    return LogOutput(stream, LEVELS[name], bool(colour), ours=True)


class LogOutput(Closing):
    """A place the log goes to, from now until `close`. Safe from many threads."""

    def __init__(self, stream: TextIO | None, level: int, colour: bool, *, ours: bool) -> None:
        self._stream, self._ours = stream, ours
        self._handler = _Handler(stream, colour)
        self._handler.setLevel(level)
        _outputs.add(self._handler)

    def close(self) -> None:
        """Stop logging here; closes a file, leaves the caller's stream open. Idempotent."""
        if _outputs.remove(self._handler):
            self._handler.close()
            if self._ours and self._stream is not None:
                self._stream.close()


class CommandLog:
    """The warnings that a command of the command line has logged, and the documents that it has written."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.documents: dict[Path, tuple[str, dict[str, Any]]] = {}
        """Path, to the verb whose command completes it and the document."""

    def with_logged(self, warnings: Sequence[str]) -> tuple[str, ...]:
        """`warnings`, then what has been logged beyond them."""
        return (*warnings, *(text for text in dict.fromkeys(self.warnings) if text not in warnings))


_command: CommandLog | None = None


def start_command() -> CommandLog:
    """The log of a command that starts, which `running_command` returns from now on."""
    global _command
    _command = CommandLog()
    return _command


def running_command() -> CommandLog | None:
    """The log of the command of this process, None where the package is used from Python."""
    return _command


class _OutputRegistry:
    """The open outputs; the package's logger has the most verbose of their levels, and its former one when
    the last is closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[logging.Handler] = []
        self._before = logging.NOTSET

    def add(self, handler: logging.Handler) -> None:
        with self._lock:
            if not self._open:
                self._before = _PACKAGE.level
            self._open.append(handler)
            _PACKAGE.addHandler(handler)
            self._update_level()

    def remove(self, handler: logging.Handler) -> bool:
        with self._lock:
            if handler not in self._open:
                return False
            self._open.remove(handler)
            _PACKAGE.removeHandler(handler)
            self._update_level()
            return True

    def _update_level(self) -> None:
        if not self._open:
            _PACKAGE.setLevel(self._before)
            return
        wanted = [handler.level for handler in self._open]
        if self._before != logging.NOTSET:  # a level set by the application is not raised
            wanted.append(self._before)
        _PACKAGE.setLevel(min(wanted))


_outputs = _OutputRegistry()


@contextlib.contextmanager
def attach_handler(handler: logging.Handler) -> Iterator[None]:
    """The package's log also goes to `handler`, at its level, while this is open."""
    _outputs.add(handler)
    try:
        yield
    finally:
        _outputs.remove(handler)


class _CallersLanguage(logging.Handler):
    """The first handler of the package: the others, and those of the application, have messages in the caller's language.

    Where there are no others, warnings go to stderr as Python's `logging.lastResort` writes them.
    """

    def handle(self, record: logging.LogRecord) -> bool:
        try:
            record.msg, record.args = in_callers_language(record.getMessage()), ()
        except (TypeError, ValueError):  # a message that does not fit its arguments; the next handler reports it
            return False
        others = len(_PACKAGE.handlers) > 1 or (_PACKAGE.propagate and logging.getLogger().handlers)
        if (last := logging.lastResort) is not None and not others and record.levelno >= last.level:
            last.handle(record)
        return True


_CALLERS_LANGUAGE = _CallersLanguage()


def use_callers_language() -> None:
    """Log messages in the caller's language from now on. Idempotent."""
    if _CALLERS_LANGUAGE not in _PACKAGE.handlers:
        _PACKAGE.handlers.insert(0, _CALLERS_LANGUAGE)


class _Handler(logging.Handler):
    """One line for a message; further lines are indented."""

    def __init__(self, stream: TextIO | None, colour: bool) -> None:
        super().__init__()
        self._stream, self._colour = stream, colour

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self._line(record)
            if self._stream is not None:
                self._stream.write(line + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # the stream was closed under us, the disk is full: no reason to fail a request
            return
        except Exception:  # a message that does not fit its arguments; logging reports it
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        letter = next(letter for least, letter in _LEVEL_LETTERS if record.levelno >= least)
        speaker = record.name.removeprefix("trt_engine").lstrip(".") or "trt_engine"
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        text = escape_lines(text, "    ")
        if self._colour and (paint := _COLOURS[letter]):
            return f"{at} {paint}[{letter}] {speaker}: {text}\x1b[0m"
        return f"{at} [{letter}] {speaker}: {text}"


def _wants_colour(stream: TextIO | None) -> bool:
    try:
        terminal = stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # a stream that is closed, or no more than `write`
        return False
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

"""`log_to`: the package's log on the console or in a file, by one call. The root logger is never touched."""

from __future__ import annotations

import datetime
import logging
import os
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TextIO

from trt_engine.errors import UsageError
from trt_engine.files import explain

__all__ = ["LEVELS", "LogOutput", "log_to"]

LEVELS = {
    "internal error": logging.CRITICAL,
    "error": logging.ERROR,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "verbose": logging.DEBUG,
}
"""TensorRT's five severities, the gravest first. What TensorRT itself says at INFO is in our `verbose`: it is that much."""

_LETTERS = ((logging.CRITICAL, "F"), (logging.ERROR, "E"), (logging.WARNING, "W"), (logging.INFO, "I"), (0, "V"))
_COLOURS = {"F": "\x1b[1;31m", "E": "\x1b[31m", "W": "\x1b[33m", "I": "", "V": "\x1b[2m"}
_PACKAGE = logging.getLogger("trt_engine")


def log_to(target: Path | str | TextIO | None = None, *, level: str = "info", colour: bool | None = None) -> LogOutput:
    """Let the package's log, TensorRT's messages in it, go to a file or a stream (stderr unless named) until it is closed.

    `level` is the least that is said: `internal error`, `error`, `warning`, `info`, `verbose`. Lines carry milliseconds, the
    severity's letter and who speaks; a file is added to. Colour is for terminals and off with NO_COLOR. Several outputs may
    be open at once, each at its own level. A library that imports this package hears nothing unless somebody asks.
    """
    name = level.strip().lower().replace("_", " ") if isinstance(level, str) else level
    if not isinstance(name, str) or name not in LEVELS:
        raise UsageError(
            f"there is no log level {level!r}", hint="one of " + ", ".join(f"`{known}`" for known in LEVELS)
        )
    if target is not None and not isinstance(target, Path | str) and not hasattr(target, "write"):
        raise UsageError(
            f"the log cannot go to {target!r}",
            hint="the path of a file, or something with `write` such as `sys.stdout`",
        )
    if not isinstance(target, Path | str):
        stream = target if target is not None else sys.stderr
        return LogOutput(stream, LEVELS[name], _wants_colour(stream) if colour is None else colour, ours=False)
    path = Path(target)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
    except OSError as error:
        raise explain(error, path, by="log_to") from error
    return LogOutput(stream, LEVELS[name], bool(colour), ours=True)


class LogOutput:
    """A place the log goes to, from now until `close`. Safe from many threads."""

    def __init__(self, stream: TextIO | None, level: int, colour: bool, *, ours: bool) -> None:
        self._stream, self._ours = stream, ours
        self._handler = _Handler(stream, colour)
        self._handler.setLevel(level)
        _outputs.add(self._handler)

    def close(self) -> None:
        """Say no more here; a file is closed, a stream of the caller's is left open. Twice is once."""
        if _outputs.remove(self._handler):
            self._handler.close()
            if self._ours and self._stream is not None:
                self._stream.close()

    def __enter__(self) -> LogOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Outputs:
    """The open outputs; the package's logger lets through what the most talkative of them wants, and is as it was when
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
            self._let_through()

    def remove(self, handler: logging.Handler) -> bool:
        with self._lock:
            if handler not in self._open:
                return False
            self._open.remove(handler)
            _PACKAGE.removeHandler(handler)
            self._let_through()
            return True

    def _let_through(self) -> None:
        if not self._open:
            _PACKAGE.setLevel(self._before)
            return
        wanted = [handler.level for handler in self._open]
        if self._before != logging.NOTSET:  # somebody has set one: it is not raised
            wanted.append(self._before)
        _PACKAGE.setLevel(min(wanted))


_outputs = _Outputs()


class _Handler(logging.Handler):
    """One line for a message; what is said in several lines is indented."""

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
        except Exception:  # a message that does not fit its arguments; logging has its own way to say so
            self.handleError(record)

    def _line(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        letter = next(letter for least, letter in _LETTERS if record.levelno >= least)
        speaker = record.name.removeprefix("trt_engine").lstrip(".") or "trt_engine"
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        text = text.replace("\n", "\n    ")
        if self._colour and (paint := _COLOURS[letter]):
            return f"{at} {paint}[{letter}] {speaker}: {text}\x1b[0m"
        return f"{at} [{letter}] {speaker}: {text}"


def _wants_colour(stream: TextIO | None) -> bool:
    try:
        terminal = stream is not None and stream.isatty()
    except (AttributeError, ValueError):  # a stream that is closed, or no more than `write`
        return False
    return terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

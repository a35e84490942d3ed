"""TensorRT's messages: kept in memory, written to the raw log, and forwarded to Python's logging.

A failed call only returns None; the reason is here.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TextIO

from trt_engine.atomic_io import os_errors
from trt_engine.backends.tensorrt.binding import TENSORRT, Binding
from trt_engine.errors import BuildError, TrtEngineError
from trt_engine.format import shorten_middle
from trt_engine.trt.failure_causes import error_texts, find_cause, main_error, make_error
from trt_engine.trt.known_warnings import find_known_warning
from trt_engine.trt.parser_messages import drop_driver_errors, plain_text

log = logging.getLogger("trt_engine.tensorrt")

_LEVELS = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.DEBUG + 5,  # a build logs hundreds of lines: the raw log has them, `-v` shows them
    "VERBOSE": logging.DEBUG,
}
_LETTERS = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W", "INFO": "I", "VERBOSE": "V"}
_PROBLEM_LEVELS = ("INTERNAL_ERROR", "ERROR", "WARNING")
_CANCELED_TEXT = "BuildCanceled"
"""In the error of a cancelled build, which the command reports."""
_MAX_MESSAGES = 2000
"""Messages kept of each kind (problems, others): a build can log a hundred thousand lines."""
_OPEN_LOGGERS: list[TensorRtLogger] = []
"""TensorRT keeps using its first logger for global messages; destroying that one would crash."""


@dataclass(frozen=True, slots=True)
class LogMessage:
    """One message of TensorRT."""

    time: datetime.datetime
    severity: str
    """`INTERNAL_ERROR`, `ERROR`, `WARNING`, `INFO`, `VERBOSE`."""
    text: str

    def __str__(self) -> str:
        clock = self.time.strftime("%m/%d/%Y-%H:%M:%S")
        start = f"[{clock}.{self.time.microsecond // 1000:03d}] [{_LETTERS[self.severity]}] [TRT] "
        return "\n".join(f"{start}{part}" for part in self.text.split("\n"))


class TensorRtLogger:
    """The logger given to builder, runtime, parser and refitter. Called from any thread.

    `path` receives every message at once, VERBOSE ones only if Python's logging is enabled for them; a failed build loses
    nothing. `close` closes the file and drops the messages; TensorRT may still call a closed logger, whose warnings and
    errors then go to the open ones.
    """

    native_base = "ILogger"

    def __init__(self, path: Path | None = None, *, binding: Binding = TENSORRT) -> None:
        self.binding = binding
        self.path = path
        self._lock = threading.Lock()
        self._problems: deque[LogMessage] = deque(maxlen=_MAX_MESSAGES)
        self._other: deque[LogMessage] = deque(maxlen=_MAX_MESSAGES)
        self._problem_count = 0
        self._file: TextIO | None = None
        self._closed = False
        self._suppressed: list[str] | None = None
        self.error: BaseException | None = None
        """Why the raw log could not be written; reported once."""
        if path is not None:
            with os_errors(path):
                self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)
        self.native: Any = binding.wrap_callback(self)
        """The library's logger object."""
        _OPEN_LOGGERS.append(self)

    def log(self, severity: Any, msg: str) -> None:
        """Called by TensorRT, which would only print an exception."""
        try:
            self._record(severity.name, msg)
        except Exception as error:
            self.error = error

    def _record(self, severity: str, text: str) -> None:
        level = _LEVELS.get(severity, logging.INFO)
        if severity == "VERBOSE" and not log.isEnabledFor(level):
            return
        message = LogMessage(datetime.datetime.now(), severity, text)
        loggers = [self]
        if self._closed and severity in _PROBLEM_LEVELS:  # TensorRT keeps sending global messages to the first logger
            loggers = [one for one in list(_OPEN_LOGGERS) if not one._closed and one.binding is self.binding]
        for logger in loggers:
            logger._store(message)
        known = find_known_warning(text)
        if (known is not None and known.silent) or _CANCELED_TEXT in text:
            level = logging.DEBUG
        elif severity == "ERROR" and self._suppressed is not None:
            self._suppressed.append(text)
            level = _LEVELS["INFO"]
        log.log(level, "%s", text)

    def _store(self, message: LogMessage) -> None:
        severity = message.severity
        with self._lock:
            (self._problems if severity in _PROBLEM_LEVELS else self._other).append(message)
            self._problem_count += severity in _PROBLEM_LEVELS
            if self._file is not None:
                try:
                    self._file.write(f"{message}\n")
                except OSError as error:  # a full disk must not stop the build
                    self.error, self._file = error, None

    @contextlib.contextmanager
    def suppress_errors(self) -> Iterator[None]:
        """ERROR records go to the raw log and `-v` alone, as an exception repeats them; without one they are logged."""
        withheld: list[str] = []
        self._suppressed = withheld
        try:
            yield
        finally:
            self._suppressed = None
        for text in withheld:
            log.error("%s", text)

    @property
    def messages(self) -> tuple[LogMessage, ...]:
        """The messages still in memory, in order."""
        with self._lock:
            return tuple(sorted((*self._problems, *self._other), key=lambda message: message.time))

    @property
    def problem_count(self) -> int:
        """Number of warnings and errors so far: an argument for `since`."""
        with self._lock:
            return self._problem_count

    def problems(self, since: int = 0) -> list[str]:
        """Texts of warnings and errors after the first `since`, with trtexec's severity
        letters: the input of cause detection."""
        with self._lock:
            forgotten = self._problem_count - len(self._problems)
            kept = list(self._problems)[max(0, since - forgotten) :]
        return [f"[{_LETTERS[message.severity]}] {message.text}" for message in kept]

    def had_errors(self, since: int = 0) -> bool:
        """True if an error was logged after the first `since` warnings and errors."""
        return bool(self.errors(since))

    def errors(self, since: int = 0) -> list[str]:
        """Texts of errors after the first `since` warnings and errors, oldest first."""
        return [text.partition("] ")[2] for text in self.problems(since) if not text.startswith("[W]")]

    def warnings(self) -> tuple[str, ...]:
        """Texts of warnings, each once, without irrelevant ones."""
        with self._lock:
            texts = dict.fromkeys(item.text for item in self._problems if item.severity == "WARNING")
        return tuple(text for text in texts if (known := find_known_warning(text)) is None or not known.silent)

    def plain_reasons(self, since: int = 0) -> str:
        """The messages after the first `since` warnings and errors, without internals; empty if none."""
        texts = (text.partition("] ")[2] for text in self.problems(since))
        shown = drop_driver_errors(
            text for text in texts if (known := find_known_warning(text)) is None or not known.silent
        )
        return "; ".join(dict.fromkeys(plain_text(text, self.binding.product) for text in shown))

    def make_error(self, subject: str, kind: type[TrtEngineError] = BuildError, since: int = 0) -> TrtEngineError:
        """The exception for a failed call: of the known cause in the messages, else of type `kind`."""
        texts = self.problems(since)
        cause = find_cause(texts)
        if cause is not None:
            return make_error(cause, subject, product=self.binding.product)
        warned = texts[-1].partition("] ")[2] if texts else f"{self.binding.product} gave no reason"
        main = main_error(error_texts(texts), crashed=True) or warned
        reason = shorten_middle(plain_text(main, self.binding.product), 400)
        return kind(f"{subject} failed: {reason}", hint=f"`-v` shows all messages of {self.binding.product}")

    def close(self) -> None:
        """Close the file and drop the messages. Idempotent."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            self._file = None
            self._problems.clear()
            self._other.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

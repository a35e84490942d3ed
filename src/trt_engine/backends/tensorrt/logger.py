"""What TensorRT says: kept, written down raw, and told on through Python's logging.

A failed call only returns None; the reason is here.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import tensorrt as trt

from trt_engine.errors import BuildError, TrtEngineError
from trt_engine.files import explain
from trt_engine.plans.causes import cause_of, error_of, errors_of, telling_error

__all__ = ["Message", "TensorRtLogger"]

log = logging.getLogger("trt_engine.tensorrt")

_LEVELS = {
    "INTERNAL_ERROR": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARNING": logging.WARNING,
    "INFO": logging.DEBUG + 5,  # a build says hundreds of lines: the raw log has them, `-v` shows them
    "VERBOSE": logging.DEBUG,
}
_LETTERS = {"INTERNAL_ERROR": "F", "ERROR": "E", "WARNING": "W", "INFO": "I", "VERBOSE": "V"}
_GRAVE = ("INTERNAL_ERROR", "ERROR", "WARNING")
_KEPT = 2000
"""Messages kept of each kind (grave ones, others): a build can say a hundred thousand lines."""
_ALIVE: list[TensorRtLogger] = []
"""TensorRT goes on using the first logger it was given for what belongs to no builder; a dead one would be a crash."""


@dataclass(frozen=True, slots=True)
class Message:
    """One thing TensorRT said."""

    at: datetime.datetime
    severity: str
    """`INTERNAL_ERROR`, `ERROR`, `WARNING`, `INFO`, `VERBOSE`."""
    text: str

    def __str__(self) -> str:
        clock = self.at.strftime("%m/%d/%Y-%H:%M:%S")
        return f"[{clock}.{self.at.microsecond // 1000:03d}] [{_LETTERS[self.severity]}] [TRT] {self.text}"


class TensorRtLogger(trt.ILogger):  # type: ignore[misc]
    """The logger given to builder, runtime, parser and refitter. Called from any thread.

    `path` gets every message as it is said, VERBOSE ones only where Python's logging wants them; nothing is lost when a
    build fails. `close` ends the file and forgets the messages; TensorRT may go on calling a closed one, whose warnings and
    errors then go to those that are open.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self.path = path
        self._lock = threading.Lock()
        self._grave: deque[Message] = deque(maxlen=_KEPT)
        self._other: deque[Message] = deque(maxlen=_KEPT)
        self._graves = 0
        self._file: TextIO | None = None
        self._closed = False
        self.last_said: datetime.datetime | None = None
        self.error: BaseException | None = None
        """Why the raw log could not be written; said once."""
        if path is not None:
            try:
                self._file = path.open("a", encoding="utf-8", errors="replace", buffering=1)
            except OSError as error:
                raise explain(error, path) from error
        _ALIVE.append(self)

    def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
        """Called by TensorRT. What is raised in here would be printed and lost."""
        try:
            self._take(severity.name, msg)
        except Exception as error:
            self.error = error

    def _take(self, severity: str, text: str) -> None:
        level = _LEVELS.get(severity, logging.INFO)
        wanted = log.isEnabledFor(level)
        if severity == "VERBOSE" and not wanted:
            return
        message = Message(datetime.datetime.now(), severity, text)
        for logger in _open_ones() if self._closed and severity in _GRAVE else (self,):
            logger._keep(message)
        if wanted:
            log.log(_DIFFERS if _BENIGN in text else level, "%s", text)

    def _keep(self, message: Message) -> None:
        severity = message.severity
        with self._lock:
            self.last_said = message.at
            (self._grave if severity in _GRAVE else self._other).append(message)
            self._graves += severity in _GRAVE
            if self._file is not None:
                try:
                    self._file.write(f"{message}\n")
                except OSError as error:  # a full disk must not stop the build
                    self.error, self._file = error, None

    @property
    def messages(self) -> tuple[Message, ...]:
        """What was said and is still kept, in order."""
        with self._lock:
            return tuple(sorted((*self._grave, *self._other), key=lambda message: message.at))

    @property
    def said(self) -> int:
        """How many warnings and errors there were until now: what `since` takes."""
        with self._lock:
            return self._graves

    def grave(self, since: int = 0) -> list[str]:
        """Texts of warnings and errors after the first `since`, with their severities as trtexec writes them: what a
        cause is found in."""
        with self._lock:
            forgotten = self._graves - len(self._grave)
            kept = list(self._grave)[max(0, since - forgotten) :]
        return [f"[{_LETTERS[message.severity]}] {message.text}" for message in kept]

    def complained(self, since: int = 0) -> bool:
        """True when an error was said after the first `since` grave messages; warnings are none."""
        return any(not text.startswith("[W]") for text in self.grave(since))

    def errors(self) -> list[str]:
        """Texts of errors, oldest first."""
        with self._lock:
            return [message.text for message in self._grave if message.severity != "WARNING"]

    def warnings(self) -> tuple[str, ...]:
        """Texts of warnings, each once."""
        with self._lock:
            texts = [item.text for item in self._grave if item.severity == "WARNING" and _BENIGN not in item.text]
        return tuple(dict.fromkeys(texts))

    def failure(self, subject: str, kind: type[TrtEngineError] = BuildError, since: int = 0) -> TrtEngineError:
        """The error for a call that failed: of the cause in the messages where it is known, else of `kind`."""
        texts = self.grave(since)
        cause = cause_of(texts)
        if cause is not None:
            return error_of(cause, subject)
        warned = texts[-1].partition("] ")[2] if texts else "TensorRT gave no reason"
        reason = (telling_error(errors_of(texts), ended=True) or warned)[:400]
        return kind(f"{subject} failed: {reason}", hint="`-v` shows all TensorRT said")

    def close(self) -> None:
        """End the file and forget the messages; a second call does nothing."""
        with self._lock:
            self._closed = True
            if self._file is not None:
                with contextlib.suppress(OSError):
                    self._file.close()
            self._file = None
            self._grave.clear()
            self._other.clear()

    def __enter__(self) -> TensorRtLogger:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_ones() -> list[TensorRtLogger]:
    """Who may want to know what a closed logger is told: TensorRT's global messages go to the first one for ever."""
    return [logger for logger in list(_ALIVE) if not logger._closed]


_BENIGN = "differs from one already provided for an existing builder, runtime, or refitter"
_DIFFERS = logging.DEBUG

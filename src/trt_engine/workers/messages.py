"""Messages of child processes, one JSON line each: the child's log records and its error; `MessagePipe` sends them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys

import msgspec

from trt_engine import errors
from trt_engine.errors import Explained
from trt_engine.workers.crash import is_out_of_memory
from trt_engine.workers.process import exit_with_parent, read_first_line


class LogMessage(msgspec.Struct, tag="log"):
    """A log record of the child."""

    name: str
    level: int
    text: str


class ErrorMessage(msgspec.Struct, tag="error"):
    """The error of the child: class name in `errors`, message and hint."""

    kind: str
    message: str
    hint: str | None = None


def error_message(error: BaseException, doing: str, *, interrupted: tuple[str, str], log_hint: str) -> ErrorMessage:
    """The message for an error of the child; out-of-memory texts of libraries become `MemoryExhausted` while `doing`."""
    if is_out_of_memory(error):
        return ErrorMessage("MemoryExhausted", f"out of memory {doing}", "a smaller batch")
    if isinstance(error, Explained):
        return ErrorMessage(type(error).__name__, error.message, error.hint)
    if isinstance(error, KeyboardInterrupt):
        return ErrorMessage("Interrupted", *interrupted)
    return ErrorMessage("TrtEngineError", f"unexpected {type(error).__name__}: {error}", log_hint)


class MessagePipe(logging.Handler):
    """The child's end of the message pipe; as a log handler it sends records too."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self._file = os.fdopen(pipe, "wb", buffering=0)

    def send(self, message: object) -> None:
        raw = memoryview(msgspec.json.encode(message) + b"\n")
        with self.lock if self.lock is not None else contextlib.nullcontext():
            while raw:
                raw = raw[self._file.write(raw) :]

    def emit(self, record: logging.LogRecord) -> None:
        self.send(LogMessage(record.name, record.levelno, record.getMessage()))


def receive_request() -> tuple[MessagePipe, bytes]:
    """The child's message pipe, which the package's log records take too, and its request; it ends with its parent."""
    errors.in_shell = True  # as written: the parent has the caller
    pipe = MessagePipe(int(sys.argv[1]))
    request = read_first_line()
    exit_with_parent()
    logging.getLogger("trt_engine").addHandler(pipe)
    return pipe, request

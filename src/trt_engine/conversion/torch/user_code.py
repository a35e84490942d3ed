"""Runs the user's code and reports its errors at the user's line."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from trt_engine.errors import MemoryExhausted, ModelError, TrtEngineError
from trt_engine.escapes import escape_control
from trt_engine.format import library_reason


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect output of user code to stderr: stdout is for results."""
    with contextlib.redirect_stdout(_PrefixedStderr()):
        yield


class _PrefixedStderr(io.TextIOBase):
    """stderr for user code: escaped and with a prefix on every line, to differ from our own lines."""

    _begins = True

    def write(self, text: str) -> int:
        for line in text.splitlines(keepends=True):
            sys.stderr.write(("| " if self._begins else "") + escape_control(line, keep="\n\t"))
            self._begins = line.endswith("\n")
        return len(text)

    def flush(self) -> None:
        sys.stderr.flush()


@contextlib.contextmanager
def user_code_errors(what: str, *, hint: str | Callable[[BaseException], str] | None = None) -> Iterator[None]:
    """Convert exceptions of user code to a `ModelError` with the user's line."""
    try:
        with stdout_to_stderr():
            yield
    except (TrtEngineError, KeyboardInterrupt):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise MemoryExhausted(
            f"{what} needs more memory than there is", hint="give a smaller example `--input`"
        ) from error
    except BaseException as error:  # a SystemExit of user code must not end this program
        shown = hint(error) if callable(hint) else hint
        raise ModelError(
            f"{what} failed: {describe_error(error)}", hint=shown or "`-vv` shows the whole stack"
        ) from error


def describe_error(error: BaseException) -> str:
    line = library_reason(error) if str(error).strip() else ""
    place = user_location(error)
    return f"{type(error).__name__}: {line}" + (f" ({place})" if place else "")


def user_location(error: BaseException) -> str | None:
    """Innermost user frame of a traceback: `detector.py:41 in forward`."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    found = None
    libraries = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith((*libraries, "<")) and f"{os.sep}lib{os.sep}python" not in frame.filename:
            found = f"{frame.filename}:{frame.lineno} in `{frame.name}`"
    return found


@contextlib.contextmanager
def quiet_loggers(*names: str, level: int = logging.ERROR) -> Iterator[None]:
    """Log only errors of these loggers, or what is above `level`: torch logs what it raises as well."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [item.level for item in loggers]
    for item in loggers:
        item.setLevel(level)
    try:
        yield
    finally:
        for item, before in zip(loggers, levels, strict=True):
            item.setLevel(before)


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables in the block; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

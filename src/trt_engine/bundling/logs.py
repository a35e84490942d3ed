"""`build_logs/COMPONENT.log`: the command first, then what the library or tool said, or what our own build did."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trt_engine.files import write_whole

__all__ = ["BuildLog"]


class BuildLog:
    """The log of one component's build, whole on disk when `with` ends, however it ends.

    A backend that writes a raw log writes it to the same path while it builds, so that it can be followed; head and tail
    are put around it afterwards, each line behind a `#`.
    """

    def __init__(self, path: Path, head: Sequence[str]) -> None:
        self.path = path
        self.head = [f"# {line}" for text in head for line in text.splitlines()]
        self.tail: list[str] = []
        self.said: list[str] = []

    def add(self, text: str) -> None:
        """One more line at the end."""
        self.tail += [f"# {line}" for line in text.splitlines()]

    @contextlib.contextmanager
    def open(self) -> Iterator[BuildLog]:
        self.path.unlink(missing_ok=True)  # an earlier build's; the raw log of this one starts empty
        try:
            with _heard(_Listener(self.said)):
                yield self
        finally:
            self._write()

    def _write(self) -> None:
        raw = self.path.read_bytes() if self.path.is_file() else b""
        ours = [f"# {line}" for line in self.said] if raw else self.said
        text = "\n".join(self.head) + "\n"
        end = "".join(f"{line}\n" for line in (*ours, *self.tail))
        if raw and not raw.endswith(b"\n"):
            raw += b"\n"
        write_whole(self.path, text.encode(errors="replace") + raw + end.encode(errors="replace"))


@contextlib.contextmanager
def _heard(listener: logging.Handler) -> Iterator[None]:
    """The listener hears what the package says from INFO on; everybody else hears what they heard before."""
    logger = logging.getLogger("trt_engine")
    before, heard = logger.level, logger.getEffectiveLevel()
    others = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else ())]
    no_more = _NoMore(heard)
    if heard > logging.INFO:
        for handler in others:
            handler.addFilter(no_more)
        logger.setLevel(logging.INFO)
    logger.addHandler(listener)
    try:
        yield
    finally:
        logger.removeHandler(listener)
        if heard > logging.INFO:
            logger.setLevel(before)
            for handler in others:
                handler.removeFilter(no_more)


class _NoMore(logging.Filter):
    """Keeps from a handler what the package's level would have kept from it."""

    def __init__(self, level: int) -> None:
        super().__init__()
        self.level = level

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self.level or record.name.partition(".")[0] != "trt_engine"


class _Listener(logging.Handler):
    """Keeps what this thread's build says, with the time since its start."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines, self.thread, self.started = lines, threading.get_ident(), time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self.thread:
            mark = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
            self.lines += [
                f"[{time.monotonic() - self.started:7.1f} s] {mark}{line}" for line in record.getMessage().splitlines()
            ]

"""What a verb says: the result on stdout, the talk on stderr."""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_engine.errors import TrtEngineError

__all__ = ["Talk", "document", "emit", "fail"]


@dataclass(frozen=True, slots=True)
class Talk:
    """How a verb talks: one JSON document or text, and how much on stderr (-1 quiet, 0, 1, 2)."""

    json: bool = False
    verbosity: int = 0

    @classmethod
    def from_args(cls, args: Sequence[str]) -> Talk:
        """Read from raw arguments, for errors met before they are parsed."""
        loud = sum(arg.count("v") for arg in args if arg in ("-v", "-vv", "-vvv")) + args.count("--verbose")
        return cls(json="--json" in args, verbosity=-1 if {"-q", "--quiet"} & set(args) else loud)

    def start(self) -> None:
        """Send the package's log to stderr for this command; the root logger is left alone."""
        logger = logging.getLogger("trt_engine")
        logger.handlers = [_Handler()]
        logger.propagate = False
        logger.setLevel({-1: logging.WARNING, 0: logging.INFO}.get(self.verbosity, logging.DEBUG))


class _Handler(logging.Handler):
    """Log lines as a person reads them: the time since the start, warnings marked."""

    def __init__(self) -> None:
        super().__init__()
        self.started = time.monotonic()
        self.colour = sys.stderr.isatty() and not os.environ.get("NO_COLOR")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING:
            mark = "error: " if record.levelno >= logging.ERROR else "warning: "
            text = f"\x1b[33m{mark}\x1b[0m{text}" if self.colour else mark + text
        clock = f"[{time.monotonic() - self.started:7.1f} s] "
        try:
            print(f"\x1b[2m{clock}\x1b[0m{text}" if self.colour else clock + text, file=sys.stderr, flush=True)  # noqa: T201
        except (OSError, ValueError):  # stderr was closed under us; a log line is not worth a crash
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        return


def document(verb: str, body: Any, *, command: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The verb's JSON document: the common keys, then the verb's own.

    `body` is one of the `...Report` records or a mapping.
    """
    import msgspec

    from trt_engine.environment import version_of

    own = body if isinstance(body, Mapping) else msgspec.to_builtins(body)
    common = {
        "schema": f"trt-engine/{verb}",
        "schema_version": 1,
        "tool": {"name": "trt-engine", "version": version_of("trt-engine")},
        "command": command,
        "warnings": list(warnings),
    }
    return common | {name: value for name, value in own.items() if name not in common}


def emit(talk: Talk, doc: Mapping[str, Any], text: str) -> None:
    """Print the result: the document as JSON, or the text."""
    if talk.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(doc), indent=2).decode(), flush=True)  # noqa: T201
    else:
        print(text, flush=True)  # noqa: T201


def fail(error: TrtEngineError, talk: Talk, cause: BaseException | None = None) -> int:
    """Print an error as a person reads it (and as JSON with `--json`); its exit code."""
    if talk.verbosity >= 2:
        traceback.print_exception(cause or error)
    print(f"error: {error.message}", file=sys.stderr)  # noqa: T201
    if error.hint:
        print(f"hint: {error.hint}", file=sys.stderr, flush=True)  # noqa: T201
    if talk.json:
        import json

        told = {
            "type": type(error).__name__,
            "message": error.message,
            "hint": error.hint,
            "exit_code": error.exit_code,
        }
        print(json.dumps({"schema": "trt-engine/error", "schema_version": 1, "error": told}), flush=True)  # noqa: T201
    return error.exit_code

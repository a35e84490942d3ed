"""What a verb says: the result on stdout, the talk on stderr."""

from __future__ import annotations

import contextlib
import errno
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trt_engine.cli.origin import installable
from trt_engine.errors import SetupError, TrtEngineError

__all__ = ["Talk", "document", "emit", "fail", "full_stdout", "spelled_out", "start_command"]


@dataclass(frozen=True, slots=True)
class Talk:
    """How a verb talks: one JSON document or text, and how much on stderr (-1 quiet, 0, 1, 2)."""

    json: bool = False
    verbosity: int = 0

    @classmethod
    def from_args(cls, args: Sequence[str]) -> Talk:
        """Read from raw arguments, for errors met before they are parsed."""
        own = list(args[: list(args).index("--")] if "--" in args else args)
        short = "".join(arg[1:] for arg in own if len(arg) > 1 and arg[0] == "-" and set(arg[1:]) <= set("qv"))
        quiet = "q" in short or "--quiet" in own
        return cls(json="--json" in own, verbosity=-1 if quiet else short.count("v") + own.count("--verbose"))

    def start(self) -> None:
        """Send the package's log to stderr for this command; the root logger is left alone."""
        import logging

        from trt_engine.cli.talk import StderrHandler

        logger = logging.getLogger("trt_engine")
        logger.handlers = [StderrHandler()]
        logger.propagate = False
        logger.setLevel({-1: logging.WARNING, 0: logging.INFO}.get(self.verbosity, logging.DEBUG))


class _Stdout:
    """Whether this command has given its JSON document: a second one would make the first unreadable."""

    given = False


def start_command() -> None:
    """Forget what an earlier command of this process printed."""
    _Stdout.given = False


def document(verb: str, body: Any, *, command: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """The verb's JSON document: the common keys, then the verb's own.

    `body` is one of the `...Report` records or a mapping.
    """
    from trt_engine import records

    return records.document(verb, body, command=command, warnings=warnings)


def emit(talk: Talk, doc: Mapping[str, Any], text: str) -> None:
    """Print the result: the document as JSON, or the text."""
    if not talk.json:
        _print(text)
        return
    import msgspec

    from trt_engine.files import json_bytes

    _print(_as_stdout_takes_it(msgspec.json.format(json_bytes(doc), indent=2).decode()))
    _Stdout.given = True


def _print(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:
        raise
    except OSError as error:
        raise full_stdout(error) from error


def spelled_out(line: str) -> str:
    """The line with control characters and lone surrogates as escapes: names in a file may hold anything."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in line
    )


def full_stdout(error: OSError) -> SetupError:
    """The error of a stdout that takes no more."""
    import os

    reason = "the disk is full" if error.errno == errno.ENOSPC else os.strerror(error.errno or 0).lower()
    return SetupError(f"cannot write to stdout: {reason}", hint="free some space, or send it elsewhere with `>`")


def _as_stdout_takes_it(text: str) -> str:
    """JSON is UTF-8, or escaped where stdout is not: never with a sign replaced."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        import json

        return json.dumps(json.loads(text), indent=2)
    return text


def fail(error: TrtEngineError, talk: Talk, cause: BaseException | None = None, *, command: str = "") -> int:
    """Print an error as a person reads it, and as the JSON document with `--json`; its exit code.

    A verb that gave its document and then failed (a gate, `--strict`) keeps it as the only one.
    """
    if talk.verbosity >= 2:
        import traceback

        with contextlib.suppress(OSError, ValueError, AttributeError):
            _write_error("".join(traceback.format_exception(cause or error)))
    hint = installable(error.hint) if error.hint else error.hint
    lines = f"error: {error.message}\n" + (f"hint: {hint}\n" if hint else "")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr closed or gone; the exit code still tells
        _write_error(lines)
    if talk.json and not _Stdout.given:
        told = {
            "type": type(error).__name__,
            "message": error.message,
            "hint": hint,
            "exit_code": error.exit_code,
        }
        emit(talk, document("error", {"error": told}, command=command), "")
    return error.exit_code


def _write_error(text: str) -> None:
    try:
        sys.stderr.write(text)
    except UnicodeEncodeError:
        sys.stderr.write(text.encode("ascii", "backslashreplace").decode())
    sys.stderr.flush()

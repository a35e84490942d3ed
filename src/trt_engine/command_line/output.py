"""Output of a verb: the result on stdout, the log and errors on stderr."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from trt_engine.errors import Explained, SetupError
from trt_engine.escapes import escape_control, escape_json, escape_lines, join_lines
from trt_engine.installed_from import installable


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Output options of a verb: JSON or text, and log verbosity (-1 quiet, 0, 1, 2)."""

    json: bool = False
    verbosity: int = 0

    @classmethod
    def from_args(cls, args: Sequence[str]) -> OutputOptions:
        """Parse raw arguments, for errors before the real parsing."""
        own = list(args[: list(args).index("--")] if "--" in args else args)
        short = "".join(arg[1:] for arg in own if len(arg) > 1 and arg[0] == "-" and set(arg[1:]) <= set("qv"))
        quiet = "q" in short or "--quiet" in own
        return cls(json="--json" in own, verbosity=-1 if quiet else short.count("v") + own.count("--verbose"))

    def start_log(self) -> None:
        """Log the package to stderr for this command; the root logger is unchanged."""
        import logging

        from trt_engine.command_line.stderr_log import StderrHandler

        logger = logging.getLogger("trt_engine")
        logger.handlers = [StderrHandler()]
        logger.propagate = False
        logger.setLevel({-1: logging.WARNING, 0: logging.INFO}.get(self.verbosity, logging.DEBUG))


class _Stdout:
    """State of stdout in this command."""

    document_printed = False
    """Whether the JSON document was printed; a second one would be invalid."""
    error_printed = False
    """Whether the error was printed."""
    owns_process = False
    results: TextIO | None = None
    """The result stream once stdout is reserved."""
    options = OutputOptions()
    verb = ""


def begin(options: OutputOptions, verb: str) -> None:
    """Start the log of this command, whose result follows these options; later output goes to stderr."""
    _Stdout.options, _Stdout.verb = options, verb
    reserve_stdout()
    options.start_log()


def as_json() -> bool:
    """Whether this command prints a JSON document."""
    return _Stdout.options.json


def is_quiet() -> bool:
    """Whether this command prints only warnings on stderr."""
    return _Stdout.options.verbosity < 0


def claim_process() -> None:
    """Declare that this process runs one command, so that its descriptors may be redirected."""
    _Stdout.owns_process = True


def reserve_stdout() -> None:
    """Reserve stdout for the result; other output goes to stderr.

    Descriptor 1 is redirected to stderr for native code and child processes; results go to a duplicate of the original. It
    stays redirected until exit, when C libraries flush their buffers. Only in the command's own process.
    """
    if not _Stdout.owns_process or _Stdout.results is not None:
        return
    stdout = sys.stdout
    try:
        stdout.flush()
        results = os.dup(1)
        os.dup2(2, 1)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_error(error) from error
    _Stdout.results = os.fdopen(results, "w", encoding=stdout.encoding, errors=stdout.errors, closefd=False)
    sys.stdout = sys.stderr


def result_stream() -> TextIO:
    """The stream for results: `sys.stdout`, or its duplicate once reserved."""
    return sys.stdout if _Stdout.results is None else _Stdout.results


def reset_output_state() -> None:
    """Reset the state of an earlier command in this process."""
    _Stdout.document_printed = _Stdout.error_printed = False
    _Stdout.options, _Stdout.verb = OutputOptions(), ""


def error_was_printed() -> bool:
    """Whether the command's error was printed."""
    return _Stdout.error_printed


def document(verb: str, body: Any, *, command: str | None = None, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """`records.base.verb_document`, without its imports for errors and help; `command` is the line as typed."""
    from trt_engine.records.base import verb_document

    return verb_document(verb, body, command=command_line() if command is None else command, warnings=warnings)


def command_line() -> str:
    """The command line as typed, quoted for a shell."""
    return shlex.join(["trt-engine", *sys.argv[1:]])


def result_text(record: Any, **shown: Any) -> str:
    """The record as text, from the blocks that reports share; wrapped on a terminal."""
    from trt_engine.reporting import results

    return wrap_for_terminal(installable(results.result_text(record, width=terminal_width(), **shown)))


def print_result(report: Any, *, warnings: Sequence[str] = (), **shown: Any) -> None:
    """Print the verb's record as its JSON document or as text; `shown` goes to the blocks of its type."""
    text = "" if as_json() else result_text(report, **shown)
    emit(document(_Stdout.verb, report, warnings=warnings), text)


def emit(doc: Mapping[str, Any], text: str, *, json: bool | None = None) -> None:
    """Print the document as JSON (`json`; by default with `--json`), or the text, terminal control characters escaped.

    Join texts with file names by `format.join_lines`, which escapes newlines in names.
    """
    doc = _complete_documents(doc)
    if not (as_json() if json is None else json):
        _print(escape_control(text, keep="\n\t"))
        return
    import msgspec

    from trt_engine.atomic_io import encode_json

    text = msgspec.json.format(encode_json(doc), indent=2).decode()
    _print(_encode_for_stdout(escape_json(text)))
    _Stdout.document_printed = True


def _complete_documents(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """The document with every warning of this command; those that its verb wrote into files get the same."""
    from trt_engine.logs import running_command

    running = running_command()
    if running is None or "schema" not in doc:
        return doc
    doc = {**doc, "warnings": list(running.with_logged(doc.get("warnings") or ()))}
    for path, (verb, written) in running.documents.items():
        if doc["schema"] == f"trt-engine/{verb}" and written["warnings"] != doc["warnings"]:
            from trt_engine.atomic_io import write_json

            written["warnings"] = doc["warnings"]
            write_json(path, written)
    return doc


_MIN_COLUMNS = 60
"""Minimum width in columns: table columns do not fit in less."""


def wrap_for_terminal(text: str) -> str:
    """Wrap the text to the terminal of the result stream, if it is one."""
    width = terminal_width()
    return text if width is None else wrap_lines(text, width)


def terminal_width() -> int | None:
    """Columns of the terminal of the result stream; None for a file or a pipe."""
    stream = result_stream()
    if stream is None or not stream.isatty():
        return None
    import shutil

    size = os.terminal_size((80, 24))
    with contextlib.suppress(OSError, ValueError):
        size = os.get_terminal_size(stream.fileno())
    return max(shutil.get_terminal_size(size).columns, _MIN_COLUMNS)


def wrap_lines(text: str, width: int) -> str:
    """Break wider lines at blanks, aligned with the last column that starts in the left half."""
    import textwrap

    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        columns = [found.end() for found in re.finditer(r"\S {2,}(?=\S)", line) if found.end() <= width // 2]
        indent = " " * (columns[-1] if columns else len(line) - len(line.lstrip()) + 2)
        head = line[: len(indent)] if columns else ""
        parts = textwrap.wrap(
            line[len(head) :], width - len(head), subsequent_indent="" if head else indent, break_long_words=False,
            break_on_hyphens=False,
        )  # fmt: skip
        lines += [head + parts[0], *((indent if head else "") + part for part in parts[1:])]
    return "\n".join(lines)


def _print(text: str) -> None:
    try:
        print(text, flush=True, file=result_stream())
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_error(error) from error


def stdout_error(error: OSError) -> SetupError:
    """The error for a failed write to stdout."""
    reason = "the disk is full" if error.errno == errno.ENOSPC else os.strerror(error.errno or 0).lower()
    return SetupError(f"cannot write to stdout: {reason}", hint="free some space, or redirect it with `>`")


def _encode_for_stdout(text: str) -> str:
    """JSON in UTF-8, or escaped where stdout is not UTF-8."""
    try:
        text.encode(getattr(result_stream(), "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        import json

        return json.dumps(json.loads(text), indent=2)
    return text


def print_error(
    error: Explained, output_options: OutputOptions, cause: BaseException | None = None, *, command: str = ""
) -> int:
    """Print an error, also as JSON document with `--json`, and return its exit code.

    A verb that printed its document before failing (a gate, `--strict`) gets no second one.
    """
    if output_options.verbosity >= 2:
        import traceback

        with contextlib.suppress(OSError, ValueError, AttributeError):
            _write_error(escape_lines("| " + "".join(traceback.format_exception(cause or error)).rstrip(), "| ") + "\n")
    lines = f"{join_lines([f'error: {error.message}', *([f'hint: {error.hint}'] if error.hint else [])])}\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed; the exit code remains
        _Stdout.error_printed = True
        _write_error(lines)
    if output_options.json and not _Stdout.document_printed:
        emit(document("error", {"error": describe_error(error)}, command=command), "", json=True)
    return error.exit_code


def describe_error(error: Explained) -> dict[str, Any]:
    """The `error` object of an error document."""
    return {"type": type(error).__name__, "message": error.message, "hint": error.hint, "exit_code": error.exit_code}


def _write_error(text: str) -> None:
    try:
        sys.stderr.write(text)
    except UnicodeEncodeError:
        sys.stderr.write(text.encode("ascii", "backslashreplace").decode())
    sys.stderr.flush()

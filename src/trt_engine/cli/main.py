"""`trt-engine`: the table of verbs and the help from it; other imports are deferred."""

from __future__ import annotations

import os
import sys

from trt_engine.cli.verbs_table import help_text

TYPE_CHECKING = False  # type checkers read it as true; importing `typing` is slow
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line and return the exit code. Errors are printed with a hint, without traceback."""
    args = list(sys.argv[1:] if args is None else args)
    if args in (["--help"], ["-h"]):  # without the slow import of click
        try:
            sys.stdout.write(help_text() + "\n")
            sys.stdout.flush()
            return 0
        except OSError:
            pass  # a closed pipe, a full disk: reported below, as for every verb
    from trt_engine.cli.click_app import run_verb

    return run_verb(args)


def main() -> NoReturn:
    """The console script."""
    code = 130
    try:
        code = _start()
    except KeyboardInterrupt:  # before the verb's module was imported
        sys.stderr.write("error: interrupted\n")
    if (signals := sys.modules.get("trt_engine.command_line.signals")) is not None:
        signals.end_process(code)
    sys.exit(code)


def _start() -> int:
    if not _repair_stdio():
        return 3
    if instruction := os.environ.get("_TRT_ENGINE_COMPLETE"):  # set by the shell's completion function
        from trt_engine.cli.click_app import complete

        return complete(instruction)
    if sys.argv[1:] not in (["--help"], ["-h"]):
        from trt_engine.command_line.signals import install_handlers

        install_handlers()
        from trt_engine.command_line.output import claim_process
        from trt_engine.command_line.stderr_log import escape_warnings

        claim_process()
        escape_warnings()
    return run()


def _repair_stdio() -> bool:
    """Reopen closed standard streams; False, after an error message, without stdout.

    Otherwise the next opened file would take the closed descriptor and receive the output.
    """
    has_stdout = sys.stdout is not None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")  # characters the terminal lacks must not fail
    if not has_stdout:
        sys.stderr.write("error: stdout is closed\nhint: `> /dev/null` discards the result\n")
    return has_stdout

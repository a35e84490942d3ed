"""`trt-engine`: the table of verbs and the help made from it alone. Nothing is imported before it is known to be needed."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

__all__ = ["PROG", "VERBS", "help_text", "main", "run"]

PROG = "trt-engine"

# verb -> (module under trt_engine.cli, one line of help); `--help` is made from this table alone
VERBS: dict[str, tuple[str, str]] = {
    "size": ("size", "how many video streams a model sustains: the main job"),
    "lint": ("lint", "what is worth changing in a model before anyone builds it"),
    "inspect": ("inspect", "what is in a model, an engine, a TensorRT plan or a run folder"),
    "convert": ("convert", "ONNX from PyTorch, TensorFlow or a hub, compared with its source"),
    "build": ("build", "an engine and its passport from an ONNX model"),
    "bundle": ("bundle", "all engines of a model of several components, in one folder"),
    "bench": ("bench", "latency and throughput under a named protocol"),
    "profile": ("profile", "where the time of an engine goes, and what to try next"),
    "compare": ("compare", "how much slower one engine is than another, with an interval"),
    "diff": ("diff", "how two engines differ: fusions, kernels, types, reformats"),
    "infer": ("infer", "one inference from .npy or .npz files, or from a picture"),
    "evaluate": ("evaluate", "AP or top-1 of an engine on a dataset, beside a baseline"),
    "run": ("run", "models x precisions x backends x batches, from one YAML"),
    "cast": ("cast", "a model in FP16 or BF16, its types consistent everywhere"),
    "quantize": ("quantize", "a model in INT8, FP8, INT4, NVFP4 or MXFP8, written as Q/DQ"),
    "search": ("search", "which layers may be INT8 or FP8 within an accuracy budget"),
    "ranges": ("ranges", "which tensors leave the range of FP16, BF16 and FP8"),
    "report": ("report", "text, markdown or HTML from the records of a run"),
    "pack": ("pack", "one archive of a run, read back with the core package alone"),
    "doctor": ("doctor", "what is installed, what works together, what to do"),
    "cache": ("cache", "the store of engines: list, prune"),
    "completion": ("completion", "shell completion for bash, zsh or fish"),
}

_HELP = """\
Usage: trt-engine [OPTIONS] VERB ...

  From an ONNX file to an engine that is built, proved, measured and sized.

  The main job:   trt-engine size model.onnx
  Any verb:       trt-engine VERB --help

Options:
  --version   Versions and exit.
  -h, --help  Show this message and exit.

Verbs:
{verbs}

  Exit codes: 0 ok, 1 unexpected, 2 usage, 3 environment, 4 model, 5 build,
  6 precision, 7 accuracy, 8 speed, 9 unstable, 10 engine, 11 memory,
  12 capacity, 130 interrupted."""


def help_text() -> str:
    """What `trt-engine --help` prints."""
    widest = max(map(len, VERBS))
    return _HELP.format(verbs="\n".join(f"  {name:<{widest}}  {line}" for name, (_, line) in VERBS.items()))


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. Errors are printed as found / expected / hint, never as a stack trace."""
    args = list(sys.argv[1:] if args is None else args)
    if args in (["--help"], ["-h"]):  # without click, which takes longer to import than this to answer
        try:
            sys.stdout.write(help_text() + "\n")
            sys.stdout.flush()
            return 0
        except OSError:
            pass  # a closed pipe, a full disk: told below, as for every other verb
    from trt_engine.cli.shell import run_verb

    return run_verb(args)


def main() -> NoReturn:
    """The console script."""
    code = 130
    try:
        code = _started()
        _deaf()
    except KeyboardInterrupt:  # before the verb's module was there to say it better
        _deaf()
        sys.stderr.write("error: interrupted\n")
    sys.exit(code)


def _started() -> int:
    if not _streams():
        return 3
    if instruction := os.environ.get("_TRT_ENGINE_COMPLETE"):  # set by the shell's completion function
        from trt_engine.cli.shell import complete

        return complete(instruction)
    if sys.argv[1:] not in (["--help"], ["-h"]):
        _listen()
    return run()


def _streams() -> bool:
    """Make the streams fit to be written to, whatever the shell handed over; False, told, without a stdout.

    A closed one would be taken by the next file that is opened, and what is printed would go into it.
    """
    has_stdout = sys.stdout is not None
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - for as long as the process lives
    for stream in (sys.stdout, sys.stderr):
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")  # a name or a sign that the terminal lacks is no reason to fail
    if not has_stdout:
        sys.stderr.write("error: stdout is closed, the result has nowhere to go\nhint: `> /dev/null` drops it\n")
    return has_stdout


_ONE_BURST_S = 1.0
"""Signals within this time are one: an impatient second Ctrl-C must not break the ending that the first began."""


def _listen() -> None:
    """SIGTERM and SIGHUP end as Ctrl-C does, so that locks go and partial records are written.

    What the program around us had ignored (`nohup`, a shell's background job) stays ignored.
    """
    import signal
    import time

    last = -_ONE_BURST_S

    def told_to_stop(signum: int, frame: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before >= _ONE_BURST_S:
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        try:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, told_to_stop)
        except ValueError:  # not in the main thread: the program around us decides
            return


def _deaf() -> None:
    """What comes while we end changes nothing any more."""
    if (signal := sys.modules.get("signal")) is None:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        try:
            signal.signal(number, signal.SIG_IGN)
        except ValueError:
            return

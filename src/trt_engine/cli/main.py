"""`trt-engine`: the table of verbs, errors turned into exit codes, and nothing heavy."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from trt_engine.cli.output import Talk, fail
from trt_engine.errors import Interrupted, MemoryExhausted, TrtEngineError, UsageError
from trt_engine.tensors import closest

__all__ = ["VERBS", "main", "run"]

# verb -> (module under trt_engine.cli, one line of help); `--help` is made from this table alone
VERBS: dict[str, tuple[str, str]] = {
    "size": ("size", "how many video streams a model sustains: inspect, build, measure, double, report"),
    "inspect": ("inspect", "what is in a model, an engine, a TensorRT plan or a run folder"),
    "build": ("build", "an engine and its passport from an ONNX model"),
    "bench": ("bench", "latency and throughput under a named protocol"),
    "infer": ("infer", "one inference from .npy or .npz files"),
    "report": ("report", "text, markdown or HTML from the records of a run"),
    "doctor": ("doctor", "what is installed, what works together, what to do"),
    "cache": ("cache", "the store of engines: list, prune"),
    "completion": ("completion", "shell completion for bash, zsh or fish"),
}


class Verbs(click.Group):
    """The group of verbs; a verb's module is imported when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"trt_engine.cli.{VERBS[cmd_name][0]}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UsageError(f"unknown verb `{args[0]}`", hint=closest(args[0], list(VERBS)))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, line) for name, (_, line) in VERBS.items()])


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value:
        return
    from trt_engine.environment import version_of

    parts = [f"trt-engine {version_of('trt-engine')}", f"Python {sys.version.split()[0]}"]
    for name in ("onnxruntime", "onnxruntime-gpu", "tensorrt", "onnx"):
        if version := version_of(name):
            parts.append(f"{name} {version}")
    click.echo(" · ".join(parts))
    ctx.exit()


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 ok, 2 usage, 3 environment, 4 model, 5 build, 6 precision, 7 accuracy, 9 unstable, "
    "10 engine, 11 memory, 12 capacity, 130 interrupted.",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Versions and exit."
)
def cli() -> None:
    """From an ONNX file to an engine that is built, proved, measured and sized.

    \b
    The main job:   trt-engine size model.onnx
    Any verb:       trt-engine VERB --help
    """


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. Errors are printed as found / expected / hint, never as a stack trace."""
    args = list(sys.argv[1:] if args is None else args)
    talk = Talk.from_args(args)
    try:
        with contextlib.redirect_stdout(sys.stdout):
            result: Any = cli.main(args=args, prog_name="trt-engine", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except TrtEngineError as error:
        return fail(error, talk)
    except click.exceptions.Exit as error:
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return fail(Interrupted("interrupted", hint="what was finished is kept; run the same command to go on"), talk)
    except click.UsageError as error:
        verb = error.ctx.command_path if error.ctx else "trt-engine"
        text = error.format_message().rstrip(".")
        return fail(UsageError(text[:1].lower() + text[1:], hint=f"`{verb} --help`"), talk)
    except click.ClickException as error:
        return fail(TrtEngineError(error.format_message()), talk)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - the reader left; the interpreter must not flush to it
        return 141
    except MemoryError as error:
        return fail(MemoryExhausted("out of memory", hint="a smaller `--batch` or `--max-batch`"), talk, error)
    except Exception as error:  # the last guard: a person gets a sentence, and the trace with -vv
        return fail(
            TrtEngineError(f"unexpected {type(error).__name__}: {error}", hint="`-vv` shows where"), talk, error
        )


def main() -> NoReturn:
    """The console script."""
    with contextlib.suppress(ValueError, AttributeError):  # not in the main thread, or not on this platform
        signal.signal(signal.SIGTERM, _terminated)
    sys.exit(run())


def _terminated(signum: int, frame: object) -> None:
    """SIGTERM ends as Ctrl-C does, so that locks go and partial records are written."""
    raise KeyboardInterrupt

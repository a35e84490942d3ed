"""The verbs as click commands, and whatever they raise turned into an error, a hint and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import click

from trt_engine.cli.main import PROG, VERBS, help_text
from trt_engine.cli.output import Talk, fail, full_stdout, start_command
from trt_engine.errors import Interrupted, MemoryExhausted, ModelError, SetupError, TrtEngineError, UsageError

__all__ = ["COMPLETE", "cli", "complete", "run_verb"]

COMPLETE = "_TRT_ENGINE_COMPLETE"
"""Set by the shell's completion function."""
BROKEN_PIPE = 141
"""What a shell reports for a program that the end of its reader stopped: 128 + SIGPIPE."""


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
            raise UsageError(f"unknown verb `{args[0]}`", hint=_instead_of(args))
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, _in_kebab_case(command, rest) if command else rest

    def get_help(self, ctx: click.Context) -> str:
        return help_text()

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Verbs from the table: pressing Tab imports no verb."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=line) for name, (_, line) in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]


def _instead_of(args: Sequence[str]) -> str:
    """What to type when the first word is no verb: a path wants one in front, a typo the nearest."""
    from trt_engine.tensors import closest

    if args[0].endswith((".onnx", ".engine", ".plan", ".trt")):
        verb = "size" if args[0].endswith(".onnx") else "inspect"
        return f"a verb comes first: `{shlex.join([PROG, verb, *args])}`"
    return closest(args[0], list(VERBS))


def _option_names(command: click.Command) -> set[str]:
    own = {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
    return own.union(*map(_option_names, command.commands.values())) if isinstance(command, click.Group) else own


def _in_kebab_case(command: click.Command, args: Sequence[str]) -> list[str]:
    """The arguments with `--maxBatch=8` spelled `--max-batch=8` where the verb has only the latter."""
    known = _option_names(command) | {"--help"}
    told, taken = [], False
    for arg in args:
        name, equals, value = arg.partition("=")
        taken = taken or arg == "--"
        if not taken and name.startswith("--") and name not in known:
            kebab = re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name).lower()
            name = kebab if kebab in known else name
        told.append(f"{name}{equals}{value}")
    return told


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value:
        return
    from trt_engine.environment import version_of

    parts = [f"{PROG} {version_of(PROG)}", f"Python {sys.version.split()[0]}"]
    for name in ("onnxruntime", "onnxruntime-gpu", "tensorrt", "onnx"):
        if version := version_of(name):
            parts.append(f"{name} {version}")
    click.echo(" · ".join(parts))
    ctx.exit()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version)
def cli() -> None:
    """`trt-engine`; its help is `help_text`."""


def run_verb(args: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    talk = Talk.from_args(args)
    command = shlex.join([PROG, *args])
    start_command()
    try:
        code = _invoke(args)
        _flush()  # what a verb printed without flushing must not fail after us, with a trace
        return code
    except BrokenPipeError:
        return _reader_left()
    except BaseException as error:
        told = _told(error, args)
        try:
            fail(told, talk, error, command=command)
            _flush()
        except BrokenPipeError:
            return _reader_left()
        except (OSError, SetupError):  # stdout is full: the error has gone to stderr, and the exit code tells
            _drop_stdout()
        return told.exit_code


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise full_stdout(error) from error


def _invoke(args: Sequence[str]) -> int:
    try:
        with cli.make_context(PROG, list(args)) as ctx:
            result: Any = cli.invoke(ctx)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except _NoArguments as error:  # `trt-engine` alone: the help is the answer
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return error.exit_code


# click 8.2 and later raise it; before, the help is printed and the exit code is 0
_NoArguments: type[click.UsageError] = getattr(
    click.exceptions, "NoArgsIsHelpError", type("_", (click.UsageError,), {})
)


def _told(error: BaseException, args: Sequence[str]) -> TrtEngineError:
    """The error a person reads for whatever was raised."""
    if isinstance(error, TrtEngineError):
        return error
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return Interrupted("interrupted", hint="what was finished is kept; run the same command to go on")
    if isinstance(error, click.UsageError):
        return _usage(error, args)
    if isinstance(error, click.ClickException):
        return TrtEngineError(error.format_message())
    if isinstance(error, MemoryError):
        return MemoryExhausted("out of memory", hint="a smaller `--batch` or `--max-batch`")
    if isinstance(error, OSError) and (told := _place(error)) is not None:
        return told
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        from trt_engine.files import printable

        return ModelError(f"the name `{printable(error.object)[:200]}` is not UTF-8", hint="rename the file or folder")
    # the last guard: a person gets a sentence, and the trace with -vv
    return TrtEngineError(f"unexpected {type(error).__name__}: {error}".rstrip(": "), hint="`-vv` shows where")


def _place(error: OSError) -> TrtEngineError | None:
    """The error of a place that cannot be used, met outside files.py; without a file name the place is not known."""
    import errno
    from pathlib import Path

    from trt_engine.files import explain

    known = (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP,
        errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE,
    )  # fmt: skip
    if error.errno not in known:
        return None
    if isinstance(error.filename, str | bytes) and error.filename:
        return explain(error, Path(os.fsdecode(error.filename)), "use")
    if _is_clicks_own(error):  # help and completion, which click prints
        return full_stdout(error)
    told = explain(error, Path())
    return SetupError(f"cannot write: {told.message.partition(': ')[2]}", hint=told.hint)


def _is_clicks_own(error: OSError) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("click.")


def _usage(error: click.UsageError, args: Sequence[str]) -> UsageError:
    """click's complaint in our words, with the nearest thing that exists."""
    from trt_engine.tensors import closest

    # click's parser has no context for an option without its value
    verb = error.ctx.command_path if error.ctx else " ".join([PROG, *(arg for arg in args[:1] if arg in VERBS)])
    if isinstance(error, click.NoSuchOption):
        if error.ctx and isinstance(error.ctx.command, click.Group):
            own = {"--help", *(name for item in error.ctx.command.params for name in item.opts)}
            if error.option_name not in own and error.option_name in _option_names(error.ctx.command):
                action = next(
                    name for name, one in error.ctx.command.commands.items() if error.option_name in _option_names(one)
                )
                return UsageError(
                    f"`{verb}` has no option `{error.option_name}`",
                    hint=f"options come after the action: `{verb} {action} {error.option_name}`",
                )
        known = sorted(_option_names(error.ctx.command) | {"--help"}) if error.ctx else []
        nearest = closest(error.option_name, known)
        hint = nearest if nearest.startswith("did you mean") else f"`{verb} --help` lists the options"
        return UsageError(f"`{verb}` has no option `{error.option_name}`", hint=hint)
    text = re.sub(r"'([^']*)'", r"`\1`", error.format_message()).rstrip(".")
    text = text[:1].lower() + text[1:]
    hint = f"`{verb} --help`"
    if isinstance(error, click.MissingParameter) and error.ctx:
        usage = " ".join(error.ctx.command.collect_usage_pieces(error.ctx))
        return UsageError(text, hint=f"`{verb} {usage}`")
    if isinstance(error, click.BadParameter) and error.param and isinstance(error.param.type, click.Choice):
        given = re.search(r"`([^`]*)` is not", text)
        if given:
            text = f"`{error.param.opts[0]}` cannot be `{given[1]}`"
            hint = closest(given[1], [str(choice) for choice in error.param.type.choices])
    group = error.ctx.command if error.ctx else None
    given = re.match(r"no such command `([^`]*)`", text)
    if error.ctx and given and isinstance(group, click.Group):
        text = f"`{verb}` has no `{given[1]}`"
        hint = closest(given[1], group.list_commands(error.ctx))
    return UsageError(text, hint=hint)


def _reader_left() -> int:
    """The reader of our stdout has gone (`| head`): nothing to say."""
    _drop_stdout()
    return BROKEN_PIPE


def _drop_stdout() -> None:
    """Send what is still in stdout's buffer nowhere, so that the interpreter does not fail on it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complete(instruction: str) -> int:
    """Answer the shell's completion function; the exit code."""
    from click.shell_completion import shell_complete

    return shell_complete(cli, {}, PROG, COMPLETE, instruction)

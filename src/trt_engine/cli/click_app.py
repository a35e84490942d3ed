"""The click application: verbs, and exceptions turned into error, hint and exit code."""

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

from trt_engine import errors
from trt_engine.cli.verbs_table import VERBS, command_module, help_text
from trt_engine.command_line import COMPLETE, PROG
from trt_engine.command_line.output import OutputOptions, print_error, reset_output_state, result_stream, stdout_error
from trt_engine.command_line.verb_command import HELP_OPTIONS
from trt_engine.errors import (
    Explained,
    Interrupted,
    MemoryExhausted,
    ModelError,
    SetupError,
    TrtEngineError,
    UsageError,
)

BROKEN_PIPE = 141
"""Exit code after SIGPIPE: 128 + 13."""


class VerbGroup(click.Group):
    """The group of verbs, imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(command_module(cmd_name))
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            raise UsageError(f"unknown verb `{args[0]}`", hint=_verb_hint(args))
        name, command, rest = super().resolve_command(ctx, args)
        return name, command, _to_kebab_case(command, rest) if command else rest

    def get_help(self, ctx: click.Context) -> str:
        return help_text()

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Complete verbs from the table, without importing them."""
        from click.shell_completion import CompletionItem

        verbs = [CompletionItem(name, help=line) for name, line in VERBS.items() if name.startswith(incomplete)]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]


def _verb_hint(args: Sequence[str]) -> str:
    """Hint for an unknown verb: a missing verb before a path, or the nearest verb."""
    from trt_engine.tensors import suggest

    if args[0].endswith((".onnx", ".engine", ".plan", ".trt")):
        verb = "size" if args[0].endswith(".onnx") else "inspect"
        return f"the verb is missing: `{shlex.join([PROG, verb, *args])}`"
    return suggest(args[0], list(VERBS))


def _option_names(command: click.Command) -> set[str]:
    own = {name for item in command.params for name in (*item.opts, *item.secondary_opts)}
    return own.union(*map(_option_names, command.commands.values())) if isinstance(command, click.Group) else own


def _to_kebab_case(command: click.Command, args: Sequence[str]) -> list[str]:
    """Replace `--maxBatch=8` by `--max-batch=8` where the verb has only the latter."""
    known = _option_names(command) | {"--help"}
    translated, taken = [], False
    for arg in args:
        name, equals, value = arg.partition("=")
        taken = taken or arg == "--"
        if not taken and name.startswith("--") and name not in known:
            kebab = re.sub(r"(?<=[a-z0-9])([A-Z])", r"-\1", name).lower()
            name = kebab if kebab in known else name
        translated.append(f"{name}{equals}{value}")
    return translated


def _version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value:
        return
    from trt_engine.environment import distribution_version

    parts = [f"{PROG} {distribution_version(PROG)}", f"Python {sys.version.split()[0]}"]
    for name in ("onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-rtx", "onnx"):
        if version := distribution_version(name):
            parts.append(f"{name} {version}")
    click.echo(" · ".join(parts))
    ctx.exit()


@click.group(cls=VerbGroup, context_settings={"help_option_names": list(HELP_OPTIONS), "max_content_width": 110})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version)
def cli() -> None:
    """`trt-engine`; its help is `help_text`."""


def run_verb(args: Sequence[str]) -> int:
    """Run one command line and return the exit code."""
    before, errors.in_shell = errors.in_shell, True
    try:
        return _run_verb(args)
    finally:
        errors.in_shell = before


def _run_verb(args: Sequence[str]) -> int:
    output_options = OutputOptions.from_args(args)
    command = shlex.join([PROG, *args])
    reset_output_state()
    try:
        code = _invoke(args)
        _flush()  # unflushed output must not fail later with a traceback
        return code
    except BrokenPipeError:
        return _end_broken_pipe()
    except BaseException as error:
        converted = _explain(error, args)
        try:
            print_error(converted, output_options, error, command=command)
            _flush()
        except BrokenPipeError:
            return _end_broken_pipe()
        except (OSError, SetupError):  # stdout is full: the error is on stderr
            _drop_stdout()
        return converted.exit_code


def _flush() -> None:
    try:
        result_stream().flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise stdout_error(error) from error


def _invoke(args: Sequence[str]) -> int:
    try:
        with cli.make_context(PROG, list(args)) as ctx:
            result: Any = cli.invoke(ctx)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as error:
        return error.exit_code
    except _NoArguments as error:  # `trt-engine` alone prints the help
        click.echo(error.ctx.get_help() if error.ctx else "", err=True)
        return error.exit_code


# click 8.2 and later raise it; before, the help is printed and the exit code is 0
_NoArguments: type[click.UsageError] = getattr(
    click.exceptions, "NoArgsIsHelpError", type("_", (click.UsageError,), {})
)


def _explain(error: BaseException, args: Sequence[str]) -> Explained:
    """Any exception as one with a message, a hint and an exit code."""
    if isinstance(error, Explained):
        return error
    interrupted = Interrupted("interrupted", hint="finished work is kept; run the same command again")
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return interrupted
    if isinstance(error, click.UsageError):
        return _usage_error(error, args)
    if isinstance(error, click.ClickException):
        return TrtEngineError(error.format_message())
    if isinstance(error, MemoryError):
        return MemoryExhausted("out of memory", hint="a smaller `--batch` or `--max-batch`")
    if isinstance(error, RecursionError):
        return UsageError("a path or a document is nested too deeply", hint="`-vv` shows which")
    if isinstance(error, OSError) and (converted := _path_error(error)) is not None:
        return converted
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, UnicodeEncodeError) and error.reason == "surrogates not allowed":
        from trt_engine.atomic_io import replace_surrogates

        return ModelError(
            f"the name `{replace_surrogates(error.object)[:200]}` is not UTF-8", hint="rename the file or folder"
        )
    signals = sys.modules.get("trt_engine.command_line.signals")
    if signals is not None and signals.was_interrupted():
        return interrupted  # an import of compiled code replaces KeyboardInterrupt by an error of its own
    # unexpected: one sentence, with the traceback under -vv
    return TrtEngineError(f"unexpected {type(error).__name__}: {error}".rstrip(": "), hint="`-vv` shows where")


def _path_error(error: OSError) -> TrtEngineError | None:
    """The error for a failed file operation outside files.py, with the path where known."""
    import errno
    from pathlib import Path

    from trt_engine.atomic_io import os_error

    known = (
        errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP,
        errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ESTALE,
    )  # fmt: skip
    if error.errno not in known:
        return None
    if isinstance(error.filename, str | bytes) and error.filename:
        return os_error(error, Path(os.fsdecode(error.filename)), "use")
    if _raised_in_click(error):  # help and completion, printed by click
        return stdout_error(error)
    converted = os_error(error, Path())
    return SetupError(f"cannot write: {converted.message.partition(': ')[2]}", hint=converted.hint)


def _raised_in_click(error: OSError) -> bool:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith("click.")


def _usage_error(error: click.UsageError, args: Sequence[str]) -> UsageError:
    """Convert an error of click, with the nearest valid name as hint."""
    from trt_engine.tensors import suggest

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
            from trt_engine.command_line.trtexec_options import find_option

            if error.ctx.parent is None and find_option(error.option_name) is not None:
                verbs = "bench" if any(arg.startswith("--loadEngine") for arg in args) else "build"
                return UsageError(
                    f"`{verb}` has no option `{error.option_name}`",
                    hint=f"trtexec's options belong to `build` and `bench`: `{shlex.join([PROG, verbs, *args])}`",
                )
        known = _option_names(error.ctx.command) | {"--help"} if error.ctx else set()
        hint = _nearest_option(error.option_name, known) or f"`{verb} --help` lists the options"
        return UsageError(f"`{verb}` has no option `{error.option_name}`", hint=hint)
    message = " ".join(error.format_message().split())  # choices stand on lines of their own
    text = re.sub(r"'([^']*)'", r"`\1`", message).rstrip(".")
    text = text[:1].lower() + text[1:]
    hint = f"`{verb} --help`"
    if isinstance(error, click.MissingParameter) and error.ctx:
        usage = " ".join(error.ctx.command.collect_usage_pieces(error.ctx))
        return UsageError(text, hint=f"`{verb} {usage}`")
    if isinstance(error, click.BadParameter) and error.param and isinstance(error.param.type, click.Choice):
        given = re.search(r"`([^`]*)` is not", text)
        if given:
            text = f"`{error.param.opts[0]}` cannot be `{given[1]}`"
            hint = suggest(given[1], [str(choice) for choice in error.param.type.choices])
    extra = re.match(r"got unexpected extra arguments? \((.*)\)", text)
    if error.ctx and extra and any("-o" in item.opts for item in error.ctx.command.params):
        name = "PATH" if " " in extra[1] else extra[1]
        hint = f"an output is named by an option, `-o {name}` or `--outdir {name}`: `{verb} --help`"
    group = error.ctx.command if error.ctx else None
    given = re.match(r"no such command `([^`]*)`", text)
    if error.ctx and given and isinstance(group, click.Group):
        text = f"`{verb}` has no `{given[1]}`"
        hint = suggest(given[1], group.list_commands(error.ctx))
    return UsageError(text, hint=hint)


_OTHER_NAMES = {
    "-o": ("output", "out-dir", "output-dir", "save", "to-file"), "--overwrite": ("overwrite", "force"),
    "--device": ("gpu", "cuda", "cpu", "gpu-id"), "--batch": ("batch-size", "batchsize", "bs"), "-O": ("opt", "set"),
    "--providers": ("provider", "ep", "execution-provider"), "--precision": ("fp32", "tf32", "half", "dtype", "type"),
    "--iterations": ("repeat", "runs", "num-runs", "loops", "iters"), "--inferences": ("repeat", "runs", "iterations"),
    "--warmup-iterations": ("warmup-runs",), "--profiler": ("layers", "nsys", "instrument"),
    "--to": ("precision", "type", "format"),
    "--calib-data": ("data", "calib-data", "calibration-data", "calibration"), "--shapes": ("input-shape", "imgsz", "size"),
    "--json": ("format",), "--duration": ("time", "seconds"), "--image": ("picture",), "--inputs": ("input",),
}  # fmt: skip
"""Names of our options in other tools, used for hints."""
_MIN_SIMILARITY = 0.75


def _nearest_option(typed: str, known: set[str]) -> str | None:
    """The most similar option of this verb as a hint, or None."""
    from difflib import SequenceMatcher

    name = typed.lstrip("-").lower().replace("_", "-")
    bare = {option.lstrip("-"): option for option in known if option.startswith("--")}
    if name in bare:
        return f"did you mean `{bare[name]}`?"
    for option, others in _OTHER_NAMES.items():
        if option in known and name in others:
            return f"did you mean `{option}`?"
    if len(name) < 3:
        return None
    alike = max(bare, key=lambda other: SequenceMatcher(None, name, other).ratio(), default="")
    if SequenceMatcher(None, name, alike).ratio() >= _MIN_SIMILARITY:
        return f"did you mean `{bare[alike]}`?"
    begun = [option for other, option in sorted(bare.items()) if other.startswith(name)]
    return f"did you mean `{begun[0]}`?" if len(begun) == 1 else None


def _end_broken_pipe() -> int:
    """Exit code after the reader of stdout closed the pipe (`| head`)."""
    _drop_stdout()
    return BROKEN_PIPE


def _drop_stdout() -> None:
    """Discard the buffer of stdout, so that the interpreter does not fail on it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), result_stream().fileno())


def complete(instruction: str) -> int:
    """Print shell completions and return the exit code."""
    from click.shell_completion import shell_complete

    return shell_complete(cli, {}, PROG, COMPLETE, instruction)

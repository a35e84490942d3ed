"""The click command of a verb: grouped options, terminal-wide help, trtexec options."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import click

from trt_engine.errors import UsageError

GROUPS = ("Options", "Input", "Build", "Candidates", "Measure", "Streams within a deadline", "Output", "Advanced")
"""Headings of the help, in order; `Options` is the default."""
HELP_OPTIONS = ("-h", "--help")
NOTES = "trt_engine.notes"
"""Context key: (log level, text) pairs to log once logging is set up."""
SET_BY_TRTEXEC = "trt_engine.spelled"
"""Context key: names of parameters set by trtexec options."""
_FIRST_COLUMN = 30
_EXAMPLE = "trt-engine "


class Option(click.Option):
    """An option with its help heading."""

    def __init__(self, *args: Any, group: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if group not in GROUPS:
            raise ValueError(f"no heading `{group}` in the help")
        self.group = group


class SuggestedValues(click.ParamType):  # type: ignore[type-arg]  # click before 8.5 takes none
    """Free text with suggested values in help and completion: `cpu|cuda:N`, or the values of a function.

    `source` is `module:function`, imported when needed. The setting's parser validates the text.
    """

    name = "text"

    def __init__(self, shown: str = "", *, source: str | None = None) -> None:
        self.text, self.source = shown, source

    def values(self) -> list[str]:
        if self.source is not None:
            module, _, function = self.source.partition(":")
            return list(getattr(importlib.import_module(module), function)())
        found = re.split(r"[|,]", self.text)
        return [word.removesuffix("N") + "0" * word.endswith(":N") for word in found if not word.isupper()]

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"[{'|'.join(self.values())}]" if self.source is not None else self.text

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[Any]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(word) for word in self.values() if word.startswith(incomplete)]


class Verb(click.Command):
    """One verb."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        ctx.help_option_names = list(HELP_OPTIONS)  # also without the context of the group
        return super().get_help_option_names(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        from trt_engine.command_line import trtexec_options

        reading = trtexec_options.translate_args(ctx.info_name or "", self.get_params(ctx), args)
        ctx.meta[NOTES], ctx.meta[SET_BY_TRTEXEC] = reading.notes, reading.names
        if not ctx.resilient_parsing:
            self._reject_values(ctx, list(reading.args))
        try:
            return super().parse_args(ctx, reading.args)
        except click.UsageError as error:
            if reading.files and "unexpected extra argument" in error.message:
                spelling = reading.files[0]
                raise UsageError(
                    f"the file is given by `{spelling}` and by an argument", hint=f"leave out `{spelling}`"
                ) from error
            raise

    def _reject_values(self, ctx: click.Context, args: list[str]) -> None:
        """`UsageError` for an empty value, and for an option that takes one value and is given two different ones: click
        keeps the last, and an empty path is the working folder."""
        parser = self.make_parser(ctx)
        params = {param.name: param for param in self.get_params(ctx)}
        single = {
            name: param
            for name, param in params.items()
            if isinstance(param, click.Option) and not (param.multiple or param.is_flag or param.count)
        }
        for name, param in single.items():
            parser.add_option(param, opts=param.opts, dest=name, action="append", nargs=param.nargs)
        try:
            found, _, _ = parser.parse_args(args)
        except click.UsageError:
            return  # reported by the parser itself
        for name, item in params.items():
            if "" in _flatten(found.get(name)):
                raise empty_value(_spelling(item, ctx))
        for name, param in single.items():
            typed = [(value,) if isinstance(value, str) else value for value in found.get(name) or ()]
            values = [" ".join(words) for words in dict.fromkeys(typed) if isinstance(words, tuple)]
            if len(values) > 1:
                raise UsageError(
                    f"`{_spelling(param, ctx)}` takes one value and is given {len(values)}: "
                    f"{', '.join(f'`{value}`' for value in values)}",
                    hint="leave out all but one",
                )

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.help:
            formatter.write_paragraph()
            with formatter.indentation():
                width = formatter.width - formatter.current_indent
                formatter.write_text(_wrap_help(inspect.cleandoc(self.help).partition("\f")[0], width))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                group = "Output" if "--help" in param.opts else getattr(param, "group", "Options")
                rows.setdefault(group, []).append(record)
        for group in GROUPS:
            if group in rows:
                with formatter.section(group):
                    _write_rows(formatter, rows[group])


def empty_value(spelling: str) -> UsageError:
    """The error for an option or an argument whose value is empty."""
    return UsageError(
        f"`{spelling}` is given an empty value", hint=f"is a variable of the shell not set? else leave `{spelling}` out"
    )


def _spelling(param: click.Parameter, ctx: click.Context) -> str:
    """An option's long name, an argument's name in the usage."""
    if isinstance(param, click.Argument):
        return param.make_metavar(ctx).strip("[].")
    return next((name for name in reversed(param.opts) if len(name) > 2), param.opts[0])


def _flatten(value: Any) -> list[Any]:
    """The words of a parsed value: one, those of an option with several, those of a repeated option."""
    if isinstance(value, list | tuple):
        return [word for item in value for word in _flatten(item)]
    return [value]


def _write_rows(formatter: click.HelpFormatter, rows: Sequence[tuple[str, str]]) -> None:
    """Write two columns; wide first cells go on their own line, wrapped between values."""
    left = min(max(len(first) for first, _ in rows), _FIRST_COLUMN, formatter.width // 3) + 2
    indent = formatter.current_indent
    for first, text in rows:
        lines = textwrap.wrap(text, formatter.width - indent - left, break_on_hyphens=False)
        if len(first) > left - 2:
            names = _split_values(first, formatter.width - indent)
            lines = [*names, *(" " * left + line for line in lines)]
        else:
            lines = [f"{first:<{left}}{lines[0] if lines else ''}", *(" " * left + line for line in lines[1:])]
        for line in lines:
            formatter.write(" " * indent + line.rstrip() + "\n")


def _split_values(first: str, width: int) -> list[str]:
    """Wrap `--precision [fp32|tf32|...]` between values."""
    lines = [""]
    for piece in re.findall(r"[^|]*\||[^|]+", first):
        if lines[-1] and len(lines[-1]) + len(piece) > width:
            lines.append("    ")
        lines[-1] += piece
    return lines


def _wrap_help(text: str, width: int) -> str:
    """Wrap long lines of verbatim paragraphs (examples)."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        "\n".join(piece for line in part.splitlines() for piece in _wrap_command(line, width))
        if part.startswith("\b")
        else part
        for part in paragraphs
    )


def _wrap_command(line: str, width: int) -> list[str]:
    """Wrap a command with trailing backslashes."""
    if len(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    if not line.lstrip().startswith(_EXAMPLE):
        return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False)
    room = width - len(indent) - 6
    whole = re.sub(  # an option stays with its value
        r"(?<= )(-\S+) ([^-\s]\S*)",
        lambda found: found[0].replace(" ", "\0") if len(found[0]) <= room else found[0],
        line,
    )
    lines = textwrap.wrap(
        whole, width - 2, subsequent_indent=f"{indent}    ", break_long_words=False, break_on_hyphens=False
    )
    return [one.replace("\0", " ") for one in (*(f"{one} \\" for one in lines[:-1]), lines[-1])]

"""Options from settings: what every verb has, and the flags of a config class, read from its `opt` lines."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from trt_engine.cli.output import Talk
from trt_engine.config import Setting, from_values, settings

__all__ = ["common", "config_from", "of", "out_option", "spelled_command", "yes_option"]

F = TypeVar("F", bound=Callable[..., Any])


def spelled_command() -> str:
    """The command line as it was typed, to be repeated by paste."""
    return shlex.join(["trt-engine", *sys.argv[1:]])


def common(function: F) -> F:
    """`--json`, `-q`, `-v` on a verb; the verb gets them as its first argument, a `Talk`, already started."""

    @click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
    @click.option("-q", "--quiet", is_flag=True, help="Only warnings on stderr.")
    @click.option("-v", "--verbose", count=True, help="More on stderr; -vv with stack traces.")
    @functools.wraps(function)
    def verb(*args: Any, as_json: bool, quiet: bool, verbose: int, **kwargs: Any) -> Any:
        talk = Talk(json=as_json, verbosity=-1 if quiet else verbose)
        talk.start()
        return function(talk, *args, **kwargs)

    return verb  # type: ignore[return-value]


def out_option(help: str) -> Callable[[F], F]:
    """`-o/--out` (and its alias `--outdir`): where the verb writes."""
    return click.option("-o", "--out", "--outdir", "out", type=click.Path(path_type=Path), help=help)


yes_option = click.option("--yes", is_flag=True, help="Overwrite what is there.")
dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")


def of(config: type, *, leave_out: Sequence[str] = (), defaults: dict[str, Any] | None = None) -> Callable[[F], F]:
    """The options of a config class; the verb gets their raw values by setting name, None where not given."""

    def decorate(function: F) -> F:
        for item in reversed(settings(config)):
            if item.name not in leave_out:
                function = _option(item, (defaults or {}).get(item.name, item.default))(function)
        return function

    return decorate


def _option(item: Setting, default: Any) -> Callable[[F], F]:
    shown = _shown(default)
    text = f"{item.help[:1].upper()}{item.help[1:]}{f' [{shown}]' if shown and '(default' not in item.help else ''}."
    flags = list(item.flags)
    if item.is_flag and default is True and "/" not in flags[0]:
        flags = [f"{flags[0]}/--no-{flags[0][2:]}"]
    spelled = [*flags, item.name]
    if item.is_flag or "/" in flags[0]:
        return click.option(*spelled, is_flag=True, default=None, help=text)
    kind: Any = click.Choice(item.choices) if item.choices else _kind(item)
    return click.option(*spelled, type=kind, default=None, multiple=item.multiple, metavar=item.metavar, help=text)


def _kind(item: Setting) -> Any:
    if item.parse is not None or isinstance(item.default, str) or item.default is None:
        return int if item.name in ("batch", "iterations") and item.parse is None else str
    if isinstance(item.default, dict | tuple):
        return str
    return type(item.default)


def _shown(default: Any) -> str:
    if default is None or default in ((), {}, "", True, False):
        return ""
    if isinstance(default, tuple):
        return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in default)
    return f"{default:g}" if isinstance(default, float) else str(default)


def config_from(config: type[Any], values: dict[str, Any]) -> Any:
    """The config of what was typed; what was not typed keeps its default. Takes its settings out of `values`."""
    names = [item.name for item in settings(config)]
    typed = {name: values.pop(name) for name in names if name in values}
    return from_values(config, {name: value for name, value in typed.items() if value is not None and value != ()})

"""Decorator of public functions: lists their settings, rejects unknown arguments and handles `progress`."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trt_engine.atomic_io import os_error
from trt_engine.errors import UsageError
from trt_engine.progress import report_progress
from trt_engine.tensors import suggest

F = TypeVar("F", bound=Callable[..., Any])


def public_function(function: F) -> F:
    """The function as users call it.

    Its signature and its docstring list the settings by name, as `verbs/settings_types.pyi` has them. A keyword argument
    that it does not have is a `UsageError` with the nearest name, a positional one too many a `TypeError` with a hint.
    Where it has `progress`, what the call does is reported that way (`trt_engine.progress`); the function itself need not
    look at it.
    """
    signature = inspect.signature(function)
    shown, text = _with_settings(function, signature)
    plain = {name for name, item in shown.parameters.items() if item.kind is not item.VAR_POSITIONAL}
    by_position = [item.name for item in signature.parameters.values() if item.kind is item.POSITIONAL_OR_KEYWORD]
    most = len(by_position) if all(item.kind is not item.VAR_POSITIONAL for item in shown.parameters.values()) else None

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := kwargs.keys() - plain:
            raise _unknown_argument(function, sorted(unknown)[0], plain)
        if most is not None and len(args) > most:
            raise _positional_argument(function, by_position, shown, args)
        try:
            if "progress" not in plain:
                return function(*args, **kwargs)
            with report_progress(kwargs.get("progress", False)):
                return function(*args, **kwargs)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG or not error.filename:
                raise
            raise os_error(error, Path(os.fsdecode(error.filename))) from error

    call.__doc__ = text
    call.__signature__ = shown  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _with_settings(function: Callable[..., Any], signature: inspect.Signature) -> tuple[inspect.Signature, str]:
    """The signature and the docstring with each setting in place of `**settings`."""
    text = inspect.getdoc(function) or ""
    *named, last = signature.parameters.values()
    named = [item.replace(annotation=str(item.annotation).replace("AnyModel", _ANY_MODEL)) for item in named]
    settings = _typed_settings().get(str(last.annotation).removeprefix("Unpack[").removesuffix("]"))
    if last.kind is not last.VAR_KEYWORD or settings is None:
        return signature.replace(parameters=[*named, last]), text
    kinds = [part for item in named for part in str(item.annotation).split(" | ") if part.endswith("Config")]
    configs = [getattr(sys.modules[function.__module__], kind) for kind in kinds]
    known = {item.name: item for config in configs for item in dataclasses.fields(config)}
    lines = ["", "", "Settings, by name:", ""]
    for name, (annotation, help) in settings.items():
        item = known[name]
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        named.append(inspect.Parameter(name, last.KEYWORD_ONLY, default=default, annotation=annotation))
        lines += [f"{name}: {annotation} = {default!r}", *(f"    {line}" for line in help.splitlines())]
    return signature.replace(parameters=named), text + "\n".join(lines)


@functools.cache
def _typed_settings() -> dict[str, dict[str, tuple[str, str]]]:
    """The classes of settings: name -> the annotation and the help of each setting, inherited ones last."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    types = Path(__file__).parent / "verbs" / "settings_types.pyi"
    if not types.is_file():  # frozen applications leave such files out
        return found
    for block in types.read_text(encoding="utf-8").split("\nclass ")[1:]:
        name, bases = re.match(r"(\w+)\((.*), total", block).groups()  # type: ignore[union-attr]
        own = {item[0]: (" ".join(item[1].split()), inspect.cleandoc(item[2])) for item in _SETTING.findall(block)}
        found[name] = own | {key: value for base in bases.split(", ") for key, value in found.get(base, {}).items()}
    return found


_SETTING = re.compile(
    r'^    (\w+): (Literal\[\n.*?\n    \][^\n]*|[^\n]+)(?:\n    """(.*?)""")?', re.MULTILINE | re.DOTALL
)


_ANY_MODEL = "Path | str | bytes | BinaryIO | onnx.ModelProto | torch.nn.Module | torch.export.ExportedProgram"
"""`verbs.given_model.AnyModel`, as help shows it."""


def _positional_argument(
    function: Callable[..., Any], names: list[str], shown: inspect.Signature, args: tuple[Any, ...]
) -> TypeError:
    """What to write in place of the first argument that has no place."""
    verb, extra = function.__name__, args[len(names)]
    takes = f"takes {', '.join(f'`{name}`' for name in names) or 'nothing'} by position"
    text = repr(extra) if isinstance(extra, str | int | float) else "..."
    named = "out" if isinstance(extra, str | Path) and "out" in shown.parameters else "NAME"
    return TypeError(
        f"`te.{verb}` {takes}, found {len(args)}\n"
        f"hint: name the others, as `te.{verb}({', '.join([*names, f'{named}={text}'])})`; `help(te.{verb})` lists them"
    )


def _unknown_argument(function: Callable[..., Any], name: str, known: set[str]) -> UsageError:
    verb = function.__name__
    nearest = suggest(name, sorted(known))
    hint = nearest if nearest.startswith("did you mean") else f"`help(te.{verb})` lists the arguments"
    return UsageError(f"`te.{verb}` has no argument `{name}`", hint=hint)

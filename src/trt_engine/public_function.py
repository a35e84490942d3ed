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
from trt_engine.tensors import PRECISION_NAMES, suggest

F = TypeVar("F", bound=Callable[..., Any])


def public_function(function: F) -> F:
    """The function as users call it.

    Its signature and its docstring list the settings by name, as `verbs/settings_types.pyi` has them. A keyword argument
    that it does not have is a `UsageError` with the nearest name; so is a positional one too many, and one that is missing.
    Where it has `progress`, what the call does is reported that way (`trt_engine.progress`); the function itself need not
    look at it.
    """
    verb, signature = function.__name__, inspect.signature(function)
    shown, text = _with_settings(function, signature)
    plain = {name for name, item in shown.parameters.items() if "VAR" not in item.kind.name}
    is_open = any(item.kind is item.VAR_KEYWORD for item in shown.parameters.values())
    required = [
        item for item in signature.parameters.values() if item.default is item.empty and "VAR" not in item.kind.name
    ]
    words = [item.name if item.kind is item.POSITIONAL_OR_KEYWORD else f"{item.name}=..." for item in required]
    words += ["out=..."] if "out" in shown.parameters and "out" not in {item.name for item in required} else []

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (unknown := kwargs.keys() - plain) and not is_open:
            raise _unknown_argument(function, sorted(unknown)[0], plain)
        try:
            shown.bind(*args, **kwargs)
        except TypeError as error:
            hint = f"`te.{verb}({', '.join(words)})`; `help(te.{verb})` lists the arguments"
            raise UsageError(f"`te.{verb}`: {error}", hint=hint) from None
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


_OTHER_NAMES = {
    "max_batch": ("batching=te.Batching(max_batch=8)", "batch=(1, 8, 64)"),
    "dynamic": ("batch=(1, 8, 64)",),
}
"""Arguments of other tools -> what to write, the first that a function has."""


def _unknown_argument(function: Callable[..., Any], name: str, known: set[str]) -> UsageError:
    verb = function.__name__
    kind = PRECISION_NAMES.get(name.lower())
    codes = [f'{one}="{kind}"' for one in ("precision", "to")] if kind else _OTHER_NAMES.get(name, ())
    code = next((code for code in codes if code.partition("=")[0] in known), None)
    nearest = f"did you mean `{code}`?" if code else suggest(name, sorted(known))
    hint = nearest if nearest.startswith("did you mean") else f"`help(te.{verb})` lists the arguments"
    return UsageError(f"`te.{verb}` has no argument `{name}`", hint=hint)

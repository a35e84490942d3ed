"""Decorators of public functions and methods: they list settings, reject arguments that do not fit, handle `progress`."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import numbers
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trt_engine.atomic_io import found_instead, os_error
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
    shown, text = _with_settings(function, inspect.signature(function))
    plain, label = shown.parameters.keys(), f"te.{function.__name__}"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_call(label, shown, args, kwargs)
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


def public_method(function: F) -> F:
    """The method as users call it: arguments that do not fit its signature are a `UsageError`.

    They are looked at once Python has refused them, so that a call costs what it did.
    """
    shown, label = inspect.signature(function), f"te.{function.__qualname__.removesuffix('.__init__')}"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (TypeError, AttributeError, ValueError):
            try:
                check_call(label, shown, args, kwargs)
            except UsageError as error:
                raise error from None  # the cause is the same fault in Python's words
            raise

    return call  # type: ignore[return-value]


def check_call(label: str, shown: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`UsageError` for an argument that the signature does not have, one too many or missing, and one of a foreign type."""
    plain = {name for name, item in shown.parameters.items() if "VAR" not in item.kind.name}
    is_open = any(item.kind is item.VAR_KEYWORD for item in shown.parameters.values())
    if (unknown := kwargs.keys() - plain) and not is_open:
        raise _unknown_argument(label, sorted(unknown)[0], plain)
    try:
        given = shown.bind(*args, **kwargs).arguments
    except TypeError as error:
        items = [shown.parameters[name] for name in shown.parameters if name in plain - {"self", "cls"}]
        words = [
            item.name if item.kind is item.POSITIONAL_OR_KEYWORD else f"{item.name}=..."
            for item in items
            if item.default is item.empty or item.name == "out"
        ]
        hint = f"`{label}({', '.join(words)})`; `help({label})` lists the arguments"
        raise UsageError(f"`{label}`: {error}", hint=hint) from None
    for name, value in given.items():
        kinds = _named_kinds(str(shown.parameters[name].annotation))
        if kinds and not any(_is_of(value, kind) for kind in kinds):
            config = next((kind for kind in kinds if kind.endswith("Config")), None)
            hint = f"a `{config}`, or its settings by name" if config else f"`help({label})` lists the arguments"
            hint = f"`str({name})`" if isinstance(value, os.PathLike) and "str" in kinds else _HINTS.get(name, hint)
            expected = " or ".join(_EXPECTED.get(kind, f"a `{kind}`") for kind in kinds if kind != "None")
            raise UsageError(f"`{name}` is {found_instead(value)}, expected {expected}", hint=hint)


_HINTS = {
    "device": 'as `device="cuda:0"`',
    "calib_data": "a path of such data; functions like `te.build` and `te.quantize` take arrays",
    "inputs": 'put them in one file by name: `numpy.savez("inputs.npz", name=array)`',
}
_TYPES: dict[str, Any] = {
    "bool": None, "float": numbers.Real, "int": numbers.Integral, "str": str, "Literal": str, "Path": os.PathLike | str,
    "Mapping": Mapping, "Tensors": Mapping, "Sequence": Iterable, "Iterable": Iterable, "bytes": bytes,
    "PreprocessFunction": Callable, "None": type(None),
}  # fmt: skip
_EXPECTED = {
    "bool": "`True` or `False`", "float": "a number", "int": "a whole number", "str": "text", "Literal": "text",
    "Mapping": "a mapping", "Tensors": "arrays by name", "Sequence": "a list", "Iterable": "a list", "Path": "a path",
    "PreprocessFunction": "a function", "bytes": "bytes",
}  # fmt: skip


@functools.cache
def _named_kinds(annotation: str) -> tuple[str, ...]:
    """The types of an annotation by name; none where one of them is not known here."""
    annotation = annotation.replace("VisionSource", "Vision | Preprocess | Path | str")
    while (plain := re.sub(r"\[[^][]*\]", "", annotation)) != annotation:  # from the innermost brackets on
        annotation = plain
    kinds = tuple(annotation.split(" | "))
    return kinds if all(kind in _TYPES or _CLASS.search(kind) for kind in kinds) else ()


_CLASS = re.compile(r"^(Store|Vision|Preprocess|Machine)$|(Config|Report|Result)$")
"""Classes of this package that arguments may be, by the ends of their names."""


def _is_of(value: Any, kind: str) -> bool:
    if kind not in _TYPES:
        return kind in {one.__name__ for one in type(value).__mro__}
    if kind == "bool":
        return type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1))
    return isinstance(value, _TYPES[kind]) and not isinstance(value, bool)


def _with_settings(function: Callable[..., Any], signature: inspect.Signature) -> tuple[inspect.Signature, str]:
    """The signature and the docstring with each setting in place of `**settings`."""
    text = inspect.getdoc(function) or ""
    *named, last = signature.parameters.values()
    named = [item.replace(annotation=str(item.annotation).replace("AnyModel", _ANY_MODEL)) for item in named]
    settings = _typed_settings().get(str(last.annotation).removeprefix("Unpack[").removesuffix("]"))
    if last.kind is not last.VAR_KEYWORD or settings is None:
        return signature.replace(parameters=[*named, last]), text
    more = {"inputs": " | ExampleInputs", "calib_data": " | Arrays"} if hasattr(function, "__wrapped__") else {}
    for name in {"inputs", "calib_data"} & settings.keys():  # `takes_model` wraps those that take arrays
        annotation, help = settings[name]
        settings = settings | {name: (annotation.replace(" | Tensors", more.get(name, "")), help)}
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


_ANY_MODEL = "os.PathLike | str | bytes | BinaryIO | onnx.ModelProto | torch.nn.Module | torch.export.ExportedProgram"
"""`verbs.given_model.AnyModel`, as help shows it."""


_OTHER_NAMES = {
    "max_batch": ("batching=te.Batching(max_batch=8)", "batch=(1, 8, 64)"),
    "dynamic": ("batch=(1, 8, 64)",),
}
"""Arguments of other tools -> what to write, the first that a function has."""


def _unknown_argument(label: str, name: str, known: set[str]) -> UsageError:
    kind = PRECISION_NAMES.get(name.lower())
    codes = [f'{one}="{kind}"' for one in ("precision", "to")] if kind else _OTHER_NAMES.get(name, ())
    code = next((code for code in codes if code.partition("=")[0] in known), None)
    nearest = f"did you mean `{code}`?" if code else suggest(name, sorted(known))
    hint = nearest if nearest.startswith("did you mean") else f"`help({label})` lists the arguments"
    return UsageError(f"`{label}` has no argument `{name}`", hint=hint)

"""Modules from the user's factory function, with its arguments."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trt_engine.conversion.sources import Source
from trt_engine.conversion.torch.user_code import describe_error, stdout_to_stderr, user_code_errors, user_location
from trt_engine.errors import ModelError, SetupError, TrtEngineError, UsageError
from trt_engine.tensors import suggest


def parse_option(text: Any) -> Any:
    """`3`, `0.5`, `True`, `(1, 2)` as Python literals; anything else is text."""
    if not isinstance(text, str):
        return text
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def reject_unused_options(options: Mapping[str, Any], source: Source) -> None:
    if options:
        raise UsageError(
            f"`-O {next(iter(options))}=...` is for what a factory or a name makes, and `{source.text}` is a {source.kind}",
            hint="leave it out",
        )


def call_factory(source: Source, options: dict[str, Any]) -> Any:
    """Call the factory: returns a module, or a module and its example inputs."""
    assert source.factory is not None
    made = _find_function(source.path, source.name, source.factory, source.text)
    if isinstance(made, torch.nn.Module):
        reject_unused_options(options, source)
        return made
    if not callable(made):
        raise UsageError(
            f"`{source.text}` is a {type(made).__name__}, expected a function or a module", hint="name its factory"
        )
    _check_options(made, options, source.text)
    with user_code_errors(f"`{source.text}`"):
        return made(**options)


def _find_function(path: Path | None, name: str | None, factory: str, text: str) -> Any:
    module = _import_file(path) if path is not None else _import_module(str(name), text)
    value: Any = module
    for part in factory.split("."):
        if not hasattr(value, part):
            known = [item for item in vars(value) if not item.startswith("_")] if hasattr(value, "__dict__") else []
            raise UsageError(f"`{text}`: no attribute `{part}`", hint=suggest(part, known))
        value = getattr(value, part)
    return value


def _import_module(name: str, text: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    with _import_errors(name, text):
        return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    whole = path.resolve()
    name = whole.stem if whole.stem.isidentifier() else f"source_{abs(hash(str(whole)))}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(whole):
        name = f"trt_engine_source_{name}"
    if str(whole.parent) not in sys.path:
        sys.path.insert(0, str(whole.parent))
    spec = importlib.util.spec_from_file_location(name, whole)
    if spec is None or spec.loader is None:
        raise UsageError(f"`{path}` cannot be read as Python", hint="name a `.py` file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look it up there
    try:
        with _import_errors(str(path), str(path)):
            spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


@contextlib.contextmanager
def _import_errors(name: str, text: str) -> Iterator[None]:
    """Errors of importing `name`, a module or a file, with what is missing or the user's line."""
    try:
        with stdout_to_stderr():
            yield
    except (KeyboardInterrupt, TrtEngineError):
        raise
    except ModuleNotFoundError as error:
        named = not name.endswith(".py") and error.name
        if named and (name == named or name.startswith(f"{named}.")):
            raise UsageError(
                f"`{text}`: no Python module `{error.name}`",
                hint=f"run it in the folder that holds `{name.split('.')[0]}`, or write `path/to/file.py:factory`",
            ) from error
        raise _missing_module_error(text, error) from error
    except BaseException as error:
        raise ModelError(
            f"importing `{name}` failed: {describe_error(error)}", hint="`-vv` shows the whole stack"
        ) from error


def _missing_module_error(text: str, error: ModuleNotFoundError) -> SetupError:
    where = user_location(error)
    if error.name is None:  # lazy imports of libraries raise their own message
        return SetupError(f"`{text}` cannot be imported: {describe_error(error)}", hint="install what it names")
    return SetupError(
        f"`{text}` needs the package `{error.name}`, which is not installed" + (f" ({where})" if where else ""),
        hint=f"`pip install {str(error.name).split('.')[0].replace('_', '-')}`, or the package that provides it",
    )


def _check_options(function: Callable[..., Any], options: Mapping[str, Any], text: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    items = signature.parameters.values()
    known = [item.name for item in items if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)]
    free = any(item.kind is item.VAR_KEYWORD for item in items)
    for name in options:
        if name not in known and not free:
            raise UsageError(f"`{text}` takes no argument `{name}`", hint=suggest(name, known))
    given = {*options, *(item.name for item in items if item.default is not item.empty)}
    lacking = [name for name in known if name not in given]
    if lacking:
        raise UsageError(
            f"`{text}` needs the argument{'s' if len(lacking) > 1 else ''} {', '.join(f'`{name}`' for name in lacking)}",
            hint=" ".join(f"-O {name}=..." for name in lacking),
        )

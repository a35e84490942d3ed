"""Decorator of public functions: rejects unknown keyword arguments and handles `progress`."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.progress import report_progress

F = TypeVar("F", bound=Callable[..., Any])


def public_function(function: F) -> F:
    """The function as users call it.

    A keyword argument that it does not have is a `UsageError` with the nearest name. Where it has `progress`, what the call
    does is reported that way (`trt_engine.progress`); the function itself need not look at it.
    """
    parameters = inspect.signature(function).parameters
    plain = {name for name, item in parameters.items() if item.kind in (item.KEYWORD_ONLY, item.POSITIONAL_OR_KEYWORD)}

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if (unknown := kwargs.keys() - plain) and (unknown := unknown - _settings_names(function, parameters)):
            raise _unknown_argument(function, sorted(unknown)[0], plain | _settings_names(function, parameters))
        try:
            if "progress" not in plain:
                return function(*args, **kwargs)
            with report_progress(kwargs.get("progress", False)):
                return function(*args, **kwargs)
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG or not error.filename:
                raise
            raise _long_name(error) from error

    return call  # type: ignore[return-value]


def _long_name(error: OSError) -> TrtEngineError:
    from trt_engine.atomic_io import os_error

    return os_error(error, Path(os.fsdecode(error.filename)))


def _settings_names(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> set[str]:
    """The names that `**settings` takes: the fields of the config classes among the parameters."""
    if not any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
        return set()
    kinds = {part for item in parameters.values() for part in str(item.annotation).split(" | ")}
    configs = [getattr(sys.modules[function.__module__], name) for name in kinds if name.endswith("Config")]
    return {item.name for config in configs for item in dataclasses.fields(config)}


def _unknown_argument(function: Callable[..., Any], name: str, known: set[str]) -> UsageError:
    from trt_engine.tensors import suggest

    verb = function.__name__
    nearest = suggest(name, sorted(known))
    hint = nearest if nearest.startswith("did you mean") else f"`help(te.{verb})` lists the arguments"
    return UsageError(f"`te.{verb}` has no argument `{name}`", hint=hint)

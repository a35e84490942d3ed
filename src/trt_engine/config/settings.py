"""`opt` and what is derived from it: flags, parsers, defaults, keys."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import numbers
import os
import re
import shlex
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from trt_engine.atomic_io import as_path, found_instead
from trt_engine.config.parse import SCALAR_PARSERS, parse_options
from trt_engine.config.profiles import quote_name
from trt_engine.errors import UsageError
from trt_engine.tensors import format_shape, suggest

C = TypeVar("C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Metadata of one field made with `opt`."""

    name: str = ""
    help: str
    flags: tuple[str, ...] = ()
    default: Any
    in_key: bool = True
    """Whether the engine's key has it."""
    parse: Callable[[Any], Any] | None = None
    choices: Sequence[str] = ()
    metavar: str | None = None
    """A metavar with `|` names values that Tab completes."""
    multiple: bool = False
    is_flag: bool = False
    type: str = ""
    """The annotation's first name: `int` of `int | None`; a value for `Any` is parsed by the verb."""
    ge: float | None = None
    gt: float | None = None
    to_text: Callable[[Any], str] | None = None
    """The text a value is typed as, where `str` is not it."""
    group: str = ""
    """Heading of the help text where it is not that of the class (`GROUP`)."""
    value_help: str | None = None
    """`module:function` that lists the words it may be, where they are not known here."""
    accepts: str = "Any"
    """What Python callers may give for a setting of type `Any`, as an annotation."""


def opt(default: Any, help: str, *, flags: str | None = None, **metadata: Any) -> Any:
    """A setting: a dataclass field with its help, flags (blank separated), and fields of `Setting`.

    `flags=""` is a setting of Python alone, which no command offers. A number below `ge` or not above `gt` is refused
    wherever the config is made (`check_limits`).
    """
    made = Setting(help=help, default=default, is_flag=isinstance(default, bool), **metadata)
    marks = {"setting": made, "flags": flags}
    if isinstance(default, dict | list):
        return field(default_factory=lambda: type(default)(default), metadata=marks)
    return field(default=default, metadata=marks)


def settings(config: type | object) -> tuple[Setting, ...]:
    """The settings of a config class, in order."""
    return _settings(config if isinstance(config, type) else type(config))


@functools.cache
def _settings(kind: type) -> tuple[Setting, ...]:
    return tuple(
        dataclasses.replace(
            made,
            name=item.name,
            flags=("--" + re.sub(r"_(s|ms|mib)$", "", item.name).replace("_", "-"),)
            if item.metadata["flags"] is None
            else tuple(item.metadata["flags"].split()),
            type=item.type.__name__ if isinstance(item.type, type) else str(item.type).partition(" ")[0],
            group=made.group or getattr(kind, "GROUP", "Options"),
        )
        for item in dataclasses.fields(kind)
        if (made := item.metadata.get("setting")) is not None
    )


def setting_names(*configs: type | object) -> set[str]:
    return {item.name for config in configs for item in settings(config)}


def take_settings(values: dict[str, Any], config: type | object) -> dict[str, Any]:
    """Remove the settings of the config from `values`."""
    return {name: values.pop(name) for name in setting_names(config) & values.keys()}


def inputs_option(help: str = "values of inputs, a .npz by name or a .npy of one [default: seeded random]") -> Any:
    """The setting `inputs` of a verb that runs a model: a file with the values of some inputs or of all."""
    return opt(None, help, flags="--inputs", parse=Path, metavar="FILE", group="Input", in_key=False)


def path_text(value: Path | str) -> str:
    """A path, or a word in its place, as text."""
    return os.fsdecode(value)


class Config:
    """Base of the config classes: their limits are checked wherever one is made."""

    __slots__ = ()

    def __new__(cls, *args: Any, **values: Any) -> Self:
        if args or values:
            from trt_engine.public_function import check_call  # with logging

            check_call(f"te.{cls.__name__}", _init_signature(cls), (None, *args), values)  # type: ignore[arg-type]
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_limits(self)


@functools.cache
def _init_signature(kind: type) -> inspect.Signature:
    return inspect.signature(kind.__init__)  # type: ignore[misc]


_LONGEST = {"_ms": 1e12, "_s": 1e9}  # by unit, about 31 years: clocks and waits of a platform cannot have much more


def check_limits(config: Any) -> None:
    """`UsageError` for a setting that is not a number or is outside its limits."""
    for item in settings(config):
        value = getattr(config, item.name)
        if value is not None and item.type in _NUMBER_NAMES and not _is_number(value, item.type):
            raise UsageError(f"`{item.name}` is {value!r}, expected {_NUMBER_NAMES[item.type]}", hint=item.help)
        if value is None or (item.ge is None and item.gt is None):
            continue
        fits = value >= item.ge if item.ge is not None else value > item.gt
        unit, most = next(((unit, most) for unit, most in _LONGEST.items() if item.name.endswith(unit)), ("", math.inf))
        if not (fits and value < math.inf and value <= most):
            limit = f"{item.ge:g} or more" if item.ge is not None else f"more than {item.gt:g}"
            limit = f"{most:g} {unit[1:]} or less" if most < value < math.inf else limit
            raise UsageError(f"`{(*item.flags, item.name)[0]}` is {value}, expected {limit}", hint=item.help)


_NUMBER_NAMES = {"int": "a whole number", "float": "a number", "tuple[int,": "whole numbers"}
_EXPECTED = _NUMBER_NAMES | {"str": "text", "bool": "`True` or `False`", "dict[str,": "a mapping", "Path": "a path"}


def _is_number(value: Any, kind: str) -> bool:
    if kind == "tuple[int,":
        return isinstance(value, tuple | list) and all(_is_number(one, "int") for one in value)
    return isinstance(value, numbers.Integral if kind == "int" else numbers.Real) and not isinstance(value, bool)


def followed(config: object, *names: str) -> str:
    """Those of these settings that are text and not their defaults, for a command that is shown: ` --shapes x:1x8`."""
    shown = [name for name in names if isinstance(getattr(config, name, None), str | Path | int | float | tuple | dict)]
    return "".join(f" {shlex.quote(word)}" for word in to_argv(config, shown))


def to_argv(config: object, only: Container[str] | None = None) -> list[str]:
    """The settings that are not their defaults, as the words of a command line that makes the same config again."""
    found: list[str] = []
    for item in settings(config):
        if only is not None and item.name not in only:
            continue
        value = getattr(config, item.name)
        if not item.flags or value is None or value == item.default:
            continue
        flag = item.flags[0]
        if isinstance(value, bool):
            yes, _, no = flag.partition("/")
            found.append(yes if value else no or f"--no-{yes[2:]}")
        elif item.multiple and isinstance(value, dict):
            found += [word for name, text in value.items() for word in (flag, f"{name}={text}")]
        elif item.multiple:
            found += [word for one in value for word in (flag, str(one))]
        else:
            found += [flag, (item.to_text or _format_value)(value)]
    return found


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{quote_name(name)}:{format_shape(shape)}" for name, shape in value.items())
    if isinstance(value, tuple):
        return ",".join(map(_format_value, value))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def _parse_scalar(item: Setting, text: str) -> Any:
    """The number or switch behind the text of `-O name=value`."""
    try:
        return SCALAR_PARSERS[item.type](text.strip().lower())
    except (ValueError, KeyError):
        kind = {"int": "a whole number", "float": "a number", "bool": "`true` or `false`"}[item.type]
        raise UsageError(f"`{item.name}` is `{text}`, expected {kind}", hint=item.help) from None


def _format_options(values: Mapping[str, Any]) -> dict[str, str]:
    """A backend's settings given as values, in the spelling `-O` gives them: equal settings are one engine key."""
    return {
        str(name).replace("-", "_"): str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in values.items()
    }


def _read(item: Setting, value: Any) -> Any:
    """A value of a setting from plain Python, through its parser. Raises `TypeError` for one of a foreign type."""
    if item.type == "Any":
        pass
    elif item.parse is Path:
        value = as_path(value, f"`{item.name}`")
    elif item.parse is not None and item.multiple:
        value = tuple(item.parse(one) for one in (value if isinstance(value, list | tuple) else [value]))
    elif item.parse is not None:
        value = item.parse(value)
    elif item.multiple:
        value = _format_options(value) if isinstance(value, Mapping) else parse_options(value)
    elif isinstance(value, str) and item.type in SCALAR_PARSERS:
        value = _parse_scalar(item, value)
    elif (item.type == "bool" and value not in (True, False)) or (item.type == "str" and not isinstance(value, str)):
        raise TypeError
    if item.choices and value not in item.choices and (item.type != "Any" or isinstance(value, str)):
        raise UsageError(f"`{item.name}` cannot be `{value}`", hint=suggest(str(value), item.choices))
    return value


def from_values(config: type[Any], values: Mapping[str, Any]) -> Any:
    """A config made from plain Python values, each passed through its setting's parser; None is the default, and
    unknown names are refused."""
    known = {item.name: item for item in settings(config)}
    extra = {item.name for item in dataclasses.fields(config)} - set(known)
    made = {}
    for name, value in values.items():
        if name not in known and name in (absent := getattr(config, "UNSUPPORTED", {})):
            raise UsageError(absent[name][0], hint=absent[name][1])
        if name not in known and name not in extra:
            raise UsageError(f"unknown setting `{name}`", hint=suggest(name, list(known)))
        item = known.get(name)
        if item is not None:
            try:
                value = copy.copy(item.default) if value is None else _read(item, value)
            except (TypeError, AttributeError, ValueError) as error:
                raise UsageError(
                    f"`{name}` is {found_instead(value)}, expected {_EXPECTED.get(item.type, 'a list')}", hint=item.help
                ) from error
        made[name] = value
    config = config(**made)
    check_limits(config)  # a backend's settings class has no `__post_init__` that checks
    return config


def replace_values(config: C, values: Mapping[str, Any]) -> C:
    """The config with these settings in place, given as `from_values` takes them."""
    made = from_values(type(config), values)
    return dataclasses.replace(config, **{name: getattr(made, name) for name in values})  # type: ignore[type-var]

"""Reads a YAML file into a dataclass, with the location of every value; tools/schemas.py makes its JSON Schema.

The file is composed, never constructed: no tag creates an object. Scalars are converted by the type of their key, so
`1:8:64`, `no` and `1e-3` stay strings where a string is expected. Every error names the location:
`plan.yaml:12:5: models[0].precisions[1] is ...`.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from trt_engine.atomic_io import open_regular, replace_surrogates
from trt_engine.config.caller_language import in_plan
from trt_engine.config.settings import Setting, from_values, settings
from trt_engine.errors import UsageError
from trt_engine.tensors import suggest

_MAX_BYTES = 1 << 18
_MAX_VALUES = 20_000
"""Counted with anchors expanded: ten lines can expand to a billion values."""
_MAX_DEPTH = 32
_MAX_SHOWN = 60


def key(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    aliases: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    config: type | None = None,
    exclude: tuple[str, ...] = (),
) -> Any:
    """A dataclass field for one YAML key: help, aliases, limits of numbers.

    With `config` the value is a mapping of that config's settings, by name or flag, except `exclude`.
    """
    made: dict[str, Any] = {
        "help": help, "also": aliases, "least": least, "most": most, "config": config, "leave_out": exclude,
    }  # fmt: skip
    if config is not None:
        return field(default_factory=dict, metadata=made)
    if default is dataclasses.MISSING:
        return field(metadata=made)
    return field(default=default, metadata=made)


@dataclass(frozen=True, slots=True)
class SourceLocation:
    """File, line and column of a value."""

    file: str
    line: int
    column: int
    path: str = ""
    """`models[0].path`; empty for the whole file."""

    def error(self, message: str, hint: str | None = None) -> UsageError:
        """`UsageError` for the value at this location; `message` follows the key: `is 0, expected 1 or more`."""
        subject = f"`{self.path}` " if self.path else ""
        return UsageError(f"{self.file}:{self.line}:{self.column}: {subject}{replace_surrogates(message)}", hint=hint)


@dataclass(frozen=True, slots=True)
class ParsedYaml:
    """A parsed file: its value, its bytes, and the location of each value by key path."""

    value: Any
    raw: bytes
    locations: Mapping[str, SourceLocation]

    def location(self, path: str) -> SourceLocation:
        """Location of a key path, or of its nearest parent in the file."""
        while path and path not in self.locations:
            path = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", path)
        return self.locations[path]


def read_yaml(path: Path, form: type) -> ParsedYaml:
    """Read the file into the dataclass `form`; `UsageError` if it does not match."""
    try:
        with open_regular(path) as file:
            raw = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a NUL in the name is the latter
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise UsageError(
            f"cannot read `{replace_surrogates(str(path))}`: {why}", hint="give the path of a plan in YAML"
        ) from error
    if len(raw) > _MAX_BYTES:
        raise UsageError(f"`{path}` is larger than {_MAX_BYTES >> 10} KiB", hint="give the path of a plan in YAML")
    reader = _Reader(replace_surrogates(path.name))
    node = reader.compose(raw)
    return ParsedYaml(reader.read(node, form, "", 0), raw, reader.locations)


class _Reader:
    """Reads one file into its dataclass."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.locations: dict[str, SourceLocation] = {}
        self.value_count = 0
        self.open_nodes: list[int] = []

    def compose(self, raw: bytes) -> yaml.Node:
        whole = SourceLocation(self.file, 1, 1)
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise SourceLocation(self.file, line, 1).error("the file is not UTF-8", "save it as UTF-8") from error
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = SourceLocation(self.file, mark.line + 1, mark.column + 1) if mark else whole
            said = " ".join(part for part in (error.context, error.problem) if part)
            raise place.error(
                f"this is not YAML: {said}", "indent with spaces, quote strings with `: ` or `#`"
            ) from error
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            place = SourceLocation(self.file, before.count("\n") + 1, len(before) - before.rfind("\n"))
            raise place.error("a character YAML does not allow", "remove or escape it") from error
        except (RecursionError, ValueError, OverflowError) as error:  # brackets by the thousand; a `\U` beyond Unicode
            raise whole.error(f"this cannot be read as YAML ({type(error).__name__})", "nest it less deeply") from error
        if node is None:
            raise whole.error("the file is empty", "a plan needs `models:` (`trt-engine docs run`)")
        return node

    # -------------------------------------------------------------------------------- values

    def read(self, node: yaml.Node, kind: Any, path: str, depth: int, limits: Mapping[str, Any] | None = None) -> Any:
        """Convert the node to a value of that type."""
        place = self._check_node(node, path, depth)
        limits = limits or {}
        self.open_nodes.append(id(node))
        try:
            members = union_members(kind)
            if isinstance(node, yaml.MappingNode):
                return self._read_mapping(node, members, place, depth)
            if isinstance(node, yaml.SequenceNode):
                return self._read_sequence(node, members, place, depth, limits)
            assert isinstance(node, yaml.ScalarNode)
            return self._read_scalar(node, members, place, limits)
        finally:
            self.open_nodes.pop()

    def _location(self, node: yaml.Node, path: str) -> SourceLocation:
        return SourceLocation(self.file, node.start_mark.line + 1, node.start_mark.column + 1, path)

    def _check_node(self, node: yaml.Node, path: str, depth: int) -> SourceLocation:
        place = self._location(node, path)
        self.locations.setdefault(path, place)
        self.value_count += 1
        if id(node) in self.open_nodes:
            raise place.error("contains itself through an anchor", "write it out")
        if self.value_count > _MAX_VALUES:
            raise place.error(f"the file has more than {_MAX_VALUES} values with anchors expanded", "write fewer")
        if depth > _MAX_DEPTH:
            raise place.error(f"is more than {_MAX_DEPTH} levels deep", "nest it less deeply")
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            raise place.error(f"has the tag `{_truncate(node.tag)}`, but tags are not allowed", "leave the tag out")
        return place

    def _read_mapping(self, node: yaml.MappingNode, members: list[Any], location: SourceLocation, depth: int) -> Any:
        for kind in members:
            if dataclasses.is_dataclass(kind):
                return self._read_dataclass(node, kind, location, depth)  # type: ignore[arg-type]
            if typing.get_origin(kind) is dict:
                inner = typing.get_args(kind)[1]
                return {
                    name: self.read(value, inner, at.path, depth + 1)
                    for name, at, value in self._iter_pairs(node, location.path, depth)
                }
        raise self._type_error(location, "a mapping", members)

    def _read_dataclass(self, node: yaml.MappingNode, form: type, location: SourceLocation, depth: int) -> Any:
        hints = typing.get_type_hints(form)
        known = {item.name: item for item in dataclasses.fields(form)}
        spelled = {also: item.name for item in known.values() for also in item.metadata.get("also", ())}
        given: dict[str, Any] = {}
        said: dict[str, str] = {}
        for name, at, value in self._iter_pairs(node, location.path, depth):
            if name.startswith("x-"):  # holds anchors
                continue
            own = spelled.get(name, name)
            if own not in known:
                bare = name.lstrip("-").replace("-", "_")
                where = next((section.name for section in known.values() if bare in _settings_in(section)), None)
                hint = f"`{where}: {{{bare}: ...}}`" if where else suggest(bare, [*known])
                raise at.error("is not a key of a plan" if not location.path else "is not a key here", hint)
            if own in said:
                raise at.error(f"duplicates `{said[own]}`", "leave one of them out")
            said[own] = name
            meta, path = known[own].metadata, _join_path(location.path, own)
            if meta.get("config") is not None:
                given[own] = self._read_settings(value, meta["config"], meta["leave_out"], path, depth + 1)
            else:
                given[own] = self.read(value, hints[own], path, depth + 1, meta)
        for name, item in known.items():
            if name not in given and item.default is item.default_factory is dataclasses.MISSING:
                raise location.error(f"lacks the key `{name}`: {item.metadata['help']}", f"add `{name}:`")
        return form(**given)

    def _iter_pairs(
        self, node: yaml.MappingNode, path: str, depth: int
    ) -> Iterator[tuple[str, SourceLocation, yaml.Node]]:
        """Keys, locations and values; values merged by `<<` follow unless already set."""
        seen: dict[str, SourceLocation] = {}
        merged: list[yaml.Node] = []
        for name_node, value in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                raise self._location(name_node, path).error(
                    "has a key that is not a string", "write keys as plain words"
                )
            name = str(name_node.value)
            at = self._location(name_node, _join_path(path, name))
            if name_node.tag == "tag:yaml.org,2002:merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            if name in seen:
                raise at.error(f"is set twice, first in line {seen[name].line}", "leave one of them out")
            seen[name] = at
            yield name, at, value
        for other in merged:
            place = self._check_node(other, path, depth + 1)
            if not isinstance(other, yaml.MappingNode):
                raise place.error("merges a value that is not a mapping", "`<<: *name` takes a mapping")
            self.open_nodes.append(id(other))
            for name, at, value in self._iter_pairs(other, path, depth + 1):
                if name not in seen:
                    seen[name] = at
                    yield name, at, value
            self.open_nodes.pop()

    def _read_sequence(
        self,
        node: yaml.SequenceNode,
        members: list[Any],
        location: SourceLocation,
        depth: int,
        limits: Mapping[str, Any],
    ) -> Any:
        for kind in members:
            if typing.get_origin(kind) is tuple:
                inner = typing.get_args(kind)[0]
                if not node.value:
                    raise location.error("is an empty list", "name at least one, or leave the key out")
                return tuple(
                    self.read(item, inner, f"{location.path}[{index}]", depth + 1, limits)
                    for index, item in enumerate(node.value)
                )
        raise self._type_error(location, "a list", members)

    def _read_scalar(
        self, node: yaml.ScalarNode, members: list[Any], location: SourceLocation, limits: Mapping[str, Any]
    ) -> Any:
        text, plain = str(node.value), node.style is None
        if plain and text.lower() in ("", "~", "null"):
            if type(None) in members:
                return None
            raise self._type_error(location, "nothing", members)
        for kind in members:
            if typing.get_origin(kind) is Literal:
                if text in typing.get_args(kind):
                    return text
                continue
            made = _PARSERS[kind](text, plain) if kind in _PARSERS else None
            if made is not None:
                return _check_limits(made, location, limits)
        for kind in members:  # a single value for a list
            if typing.get_origin(kind) is tuple:
                return (self._read_scalar(node, union_members(typing.get_args(kind)[0]), location, limits),)
        shown = f"`{_truncate(text)}`"
        words = [word for kind in members if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
        if words:
            raise location.error(f"is {shown}, expected {_expected_text(members)}", suggest(text, words))
        raise self._type_error(location, shown, members)

    def _read_settings(self, node: yaml.Node, config: type, exclude: tuple[str, ...], path: str, depth: int) -> Any:
        """Settings of a config class by name, each validated by its parser."""
        place = self._check_node(node, path, depth)
        if not isinstance(node, yaml.MappingNode):
            raise place.error(
                "is not a mapping, expected settings by name", f"as `{_setting_names(config, exclude)[0]}: VALUE`"
            )
        known = [item for item in settings(config) if item.name not in exclude]
        names = {name: item.name for item in known for name in setting_aliases(item)}
        made: dict[str, Any] = {}
        for name, at, value in self._iter_pairs(node, path, depth):
            own = names.get(name.replace("-", "_"))
            if own is None:
                raise at.error("is not a setting", suggest(name, _setting_names(config, exclude)))
            if own in made:
                raise at.error(f"duplicates `{own}`", "leave one of them out")
            made[own] = self._read_untyped(value, at.path, depth + 1)
            try:
                from_values(config, {own: made[own]})
            except UsageError as error:
                said, hint = error.translated(in_plan)
                raise at.error(f"cannot be read: {said}", hint) from error
        return made

    def _read_untyped(self, node: yaml.Node, path: str, depth: int) -> Any:
        """An untyped value: strings, numbers, lists and mappings of them."""
        place = self._check_node(node, path, depth)
        self.open_nodes.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return {
                    name: self._read_untyped(value, at.path, depth + 1)
                    for name, at, value in self._iter_pairs(node, path, depth)
                }
            if isinstance(node, yaml.SequenceNode):
                return [
                    self._read_untyped(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)
                ]
            assert isinstance(node, yaml.ScalarNode)
            return self._read_scalar(node, [bool, int, float, str, type(None)], place, {})
        finally:
            self.open_nodes.pop()

    def _type_error(self, location: SourceLocation, found: str, members: list[Any]) -> UsageError:
        return location.error(
            f"is {found}, expected {_expected_text(members)}", "`trt-engine docs run` lists the keys of a plan"
        )


def _join_path(path: str, name: str) -> str:
    name = _truncate(name)
    return f"{path}.{name}" if path else name


def _truncate(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def union_members(kind: Any) -> list[Any]:
    """The member types of a union, or the type itself."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return list(typing.get_args(kind))
    return [kind]


_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3})?")
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_PARSERS: dict[Any, Callable[[str, bool], Any]] = {
    int: lambda text, plain: int(text) if plain and _INTEGER.fullmatch(text) else None,
    float: lambda text, plain: float(text) if plain and _NUMBER.fullmatch(text) else None,
    bool: lambda text, plain: _BOOLEANS.get(text.lower()) if plain else None,
    str: lambda text, plain: text,
}
"""The value of a scalar, None if it is not of that type; `plain` is without quotes."""
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "`true` or `false`", str: "a string"}


def _check_limits(value: Any, location: SourceLocation, limits: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        if not value.strip() or "\0" in value:
            raise location.error("is an empty string" if not value.strip() else "contains a NUL", "give a value")
        return value
    least, most = limits.get("least"), limits.get("most")
    if least is not None and value < least:
        raise location.error(f"is {value}, expected {least:g} or more", limits.get("help"))
    if most is not None and value > most:
        raise location.error(f"is {value}, expected at most {most:g}", limits.get("help"))
    return value


def _expected_text(members: list[Any]) -> str:
    """The expected types, for an error message."""
    said: list[str] = []
    for kind in members:
        origin = typing.get_origin(kind)
        if kind is type(None):
            continue
        if origin is Literal:
            said.append("one of " + ", ".join(f"`{word}`" for word in typing.get_args(kind)))
        elif origin is tuple:
            said.append("a list")
        elif origin is dict:
            said.append("a mapping")
        elif dataclasses.is_dataclass(kind):
            names = [f"`{item.name}`" for item in dataclasses.fields(kind)]
            said.append(f"a mapping of {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}")
        else:
            said.append(_TYPE_NAMES.get(kind, str(kind)))
    return " or ".join(dict.fromkeys(said)) or "nothing"


def setting_aliases(item: Setting) -> list[str]:
    """The setting's name and its flags as keys: `duration_s` and `duration`."""
    flags = [flag.partition("/")[0] for flag in item.flags if flag.startswith("--")]
    return list(dict.fromkeys([item.name, *(flag[2:].replace("-", "_") for flag in flags)]))


def _settings_in(section: dataclasses.Field[Any]) -> set[str]:
    """Names of the settings below a key of a plan; none below a key without settings."""
    left_out = section.metadata.get("leave_out", ())
    own = settings(section.metadata["config"]) if section.metadata.get("config") else ()
    return {name for item in own if item.name not in left_out for name in setting_aliases(item)}


def _setting_names(config: type, exclude: tuple[str, ...]) -> list[str]:
    return [item.name for item in settings(config) if item.name not in exclude]

"""A YAML file whose form is a dataclass: read with the place of every value, and its JSON Schema.

The file is composed, never constructed: no tag makes an object. What is read is the text of a scalar, turned into the type
its key has, so that `1:8:64`, `no` and `1e-3` mean what they say wherever a text is expected. Every error names the place:
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

from trt_engine.config import Setting, from_values, settings
from trt_engine.errors import UsageError
from trt_engine.files import printable
from trt_engine.tensors import closest

__all__ = ["Place", "Read", "json_schema", "key", "read_form"]

_MOST_BYTES = 1 << 18
_MOST_VALUES = 20_000
"""After anchors are followed: a plan of ten lines can name a billion."""
_DEEPEST = 32
_SHOWN = 60


def key(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    also: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    config: type | None = None,
    leave_out: tuple[str, ...] = (),
) -> Any:
    """One key of a form: its help, the other spellings it is known by, limits of its numbers.

    With `config` its value is a mapping of that config's settings, by name or flag, without those left out.
    """
    made: dict[str, Any] = {
        "help": help, "also": also, "least": least, "most": most, "config": config, "leave_out": leave_out,
    }  # fmt: skip
    if config is not None:
        return field(default_factory=dict, metadata=made)
    if default is dataclasses.MISSING:
        return field(metadata=made)
    return field(default=default, metadata=made)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value stands."""

    file: str
    line: int
    column: int
    path: str = ""
    """`models[0].path`; empty for the whole file."""

    def error(self, said: str, hint: str | None = None) -> UsageError:
        """The error of the value here; `said` goes on after the key: `is 0, expected 1 or more`."""
        subject = f"`{self.path}` " if self.path else ""
        return UsageError(f"{self.file}:{self.line}:{self.column}: {subject}{printable(said)}", hint=hint)


@dataclass(frozen=True, slots=True)
class Read:
    """A file that was read: its value, its text, and where each value stands, by key path."""

    value: Any
    raw: bytes
    places: Mapping[str, Place]

    def place(self, path: str) -> Place:
        """Where the value of that path stands, or the nearest one around it that the file has."""
        while path and path not in self.places:
            path = re.sub(r"(\.[^.\[]*|\[\d+\]|^[^.\[]*)$", "", path)
        return self.places[path]


def read_form(path: Path, form: type) -> Read:
    """The file as that dataclass; `UsageError` for anything it is not."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # a NUL in the name is the latter
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise UsageError(
            f"cannot read `{printable(str(path))}`: {why}", hint="give the path of a plan in YAML"
        ) from error
    if len(raw) > _MOST_BYTES:
        raise UsageError(
            f"`{path}` is larger than {_MOST_BYTES >> 10} KiB, no plan is", hint="give the path of a plan in YAML"
        )
    reader = _Reader(printable(path.name))
    node = reader.compose(raw)
    return Read(reader.read(node, form, "", 0), raw, reader.places)


class _Reader:
    """One file on its way to its form."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.places: dict[str, Place] = {}
        self.values = 0
        self.open: list[int] = []

    def compose(self, raw: bytes) -> yaml.Node:
        whole = Place(self.file, 1, 1)
        try:
            text = raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = raw.count(b"\n", 0, error.start) + 1
            raise Place(self.file, line, 1).error("the file is not UTF-8", "save it as UTF-8") from error
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = Place(self.file, mark.line + 1, mark.column + 1) if mark else whole
            said = " ".join(part for part in (error.context, error.problem) if part)
            raise place.error(
                f"this is not YAML: {said}", "indent with blanks, quote texts with `: ` or `#`"
            ) from error
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            place = Place(self.file, before.count("\n") + 1, len(before) - before.rfind("\n"))
            raise place.error("a character YAML does not allow", "take it out, or write it as an escape") from error
        except (RecursionError, ValueError, OverflowError) as error:  # brackets by the thousand; a `\U` beyond Unicode
            raise whole.error(f"this cannot be read as YAML ({type(error).__name__})", "write it flatter") from error
        if node is None:
            raise whole.error("the file is empty", "`models:` is what a plan begins with (docs/run.md)")
        return node

    # -------------------------------------------------------------------------------- values

    def read(self, node: yaml.Node, kind: Any, path: str, depth: int, limits: Mapping[str, Any] | None = None) -> Any:
        """The node as a value of that type."""
        place = self._enter(node, path, depth)
        limits = limits or {}
        self.open.append(id(node))
        try:
            members = _members(kind)
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, members, place, depth)
            if isinstance(node, yaml.SequenceNode):
                return self._sequence(node, members, place, depth, limits)
            assert isinstance(node, yaml.ScalarNode)  # there is no fourth kind
            return self._scalar(node, members, place, limits)
        finally:
            self.open.pop()

    def _enter(self, node: yaml.Node, path: str, depth: int) -> Place:
        place = Place(self.file, node.start_mark.line + 1, node.start_mark.column + 1, path)
        self.places.setdefault(path, place)
        self.values += 1
        if id(node) in self.open:
            raise place.error("holds itself by an anchor", "write it out")
        if self.values > _MOST_VALUES:
            raise place.error(f"the file has more than {_MOST_VALUES} values, anchors followed", "write fewer")
        if depth > _DEEPEST:
            raise place.error(f"lies more than {_DEEPEST} levels deep", "write it flatter")
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            raise place.error(f"has the tag `{_short(node.tag)}`, and none is allowed here", "leave the tag out")
        return place

    def _mapping(self, node: yaml.MappingNode, members: list[Any], place: Place, depth: int) -> Any:
        for kind in members:
            if dataclasses.is_dataclass(kind):
                return self._form(node, kind, place, depth)  # type: ignore[arg-type]
            if typing.get_origin(kind) is dict:
                inner = typing.get_args(kind)[1]
                return {
                    name: self.read(value, inner, _under(place.path, name), depth + 1)
                    for name, _, value in self._pairs(node, place.path, depth)
                }
        raise self._other(place, "a mapping", members)

    def _form(self, node: yaml.MappingNode, form: type, place: Place, depth: int) -> Any:
        hints = _hints(form)
        known = {item.name: item for item in dataclasses.fields(form)}
        spelled = {also: item.name for item in known.values() for also in item.metadata.get("also", ())}
        given: dict[str, Any] = {}
        said: dict[str, str] = {}
        for name, at, value in self._pairs(node, place.path, depth):
            if name.startswith("x-"):  # a place for anchors
                continue
            own = spelled.get(name, name)
            where = Place(self.file, at.line, at.column, _under(place.path, name))
            if own not in known:
                raise where.error(
                    "is no key of a plan" if not place.path else "is not a key here", closest(name, [*known])
                )
            if own in said:
                raise where.error(f"says the same as `{said[own]}`", "leave one of them out")
            said[own] = name
            meta, path = known[own].metadata, _under(place.path, own)
            if meta.get("config") is not None:
                given[own] = self._settings(value, meta["config"], meta["leave_out"], path, depth + 1)
            else:
                given[own] = self.read(value, hints[own], path, depth + 1, meta)
        for name, item in known.items():
            if name not in given and item.default is item.default_factory is dataclasses.MISSING:
                raise place.error(f"lacks the key `{name}`: {item.metadata['help']}", f"add `{name}:`")
        return form(**given)

    def _pairs(self, node: yaml.MappingNode, path: str, depth: int) -> Iterator[tuple[str, Place, yaml.Node]]:
        """Keys, their places and values; what `<<` brings in comes after, where it is not there already."""
        seen: dict[str, Place] = {}
        merged: list[yaml.Node] = []
        for name_node, value in node.value:
            at = Place(self.file, name_node.start_mark.line + 1, name_node.start_mark.column + 1, path)
            if not isinstance(name_node, yaml.ScalarNode):
                raise at.error("has a key that is no text", "write keys as plain words")
            name = str(name_node.value)
            if name_node.tag == "tag:yaml.org,2002:merge":
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            if name in seen:
                first = seen[name]
                raise Place(self.file, at.line, at.column, _under(path, name)).error(
                    f"is given twice, first in line {first.line}", "leave one of them out"
                )
            seen[name] = at
            yield name, at, value
        for other in merged:
            place = self._enter(other, path, depth + 1)
            if not isinstance(other, yaml.MappingNode):
                raise place.error("merges what is no mapping", "`<<: *name` takes a mapping")
            self.open.append(id(other))
            for name, at, value in self._pairs(other, path, depth + 1):
                if name not in seen:
                    seen[name] = at
                    yield name, at, value
            self.open.pop()

    def _sequence(
        self, node: yaml.SequenceNode, members: list[Any], place: Place, depth: int, limits: Mapping[str, Any]
    ) -> Any:
        for kind in members:
            if typing.get_origin(kind) is tuple:
                inner = typing.get_args(kind)[0]
                if not node.value:
                    raise place.error("is an empty list", "name at least one, or leave the key out")
                return tuple(
                    self.read(item, inner, f"{place.path}[{index}]", depth + 1, limits)
                    for index, item in enumerate(node.value)
                )
        raise self._other(place, "a list", members)

    def _scalar(self, node: yaml.ScalarNode, members: list[Any], place: Place, limits: Mapping[str, Any]) -> Any:
        text, plain = str(node.value), node.style is None
        if plain and text.lower() in ("", "~", "null"):
            if type(None) in members:
                return None
            raise self._other(place, "nothing", members)
        for kind in members:
            if typing.get_origin(kind) is Literal:
                if text in typing.get_args(kind):
                    return text
                continue
            made = _READERS[kind](text, plain) if kind in _READERS else None
            if made is not None:
                return _limited(made, place, limits)
        for kind in members:  # one value where a list of them may stand
            if typing.get_origin(kind) is tuple:
                return (self._scalar(node, _members(typing.get_args(kind)[0]), place, limits),)
        shown = f"`{_short(text)}`"
        words = [word for kind in members if typing.get_origin(kind) is Literal for word in typing.get_args(kind)]
        if words:
            raise place.error(f"is {shown}, expected {_wanted(members)}", closest(text, words))
        raise self._other(place, shown, members)

    def _settings(self, node: yaml.Node, config: type, leave_out: tuple[str, ...], path: str, depth: int) -> Any:
        """Settings of a config class, each tried through its own parser; plain values by name."""
        place = self._enter(node, path, depth)
        if not isinstance(node, yaml.MappingNode):
            raise place.error(
                "is no mapping, expected settings by name", f"as `{_setting_names(config, leave_out)[0]}: VALUE`"
            )
        known = [item for item in settings(config) if item.name not in leave_out]
        names = {name: item.name for item in known for name in _spellings(item)}
        made: dict[str, Any] = {}
        for name, at, value in self._pairs(node, path, depth):
            where = Place(self.file, at.line, at.column, _under(path, name))
            own = names.get(name.replace("-", "_"))
            if own is None:
                raise where.error("is no setting", closest(name, _setting_names(config, leave_out)))
            if own in made:
                raise where.error(f"says the same as `{own}`", "leave one of them out")
            made[own] = self._plain(value, _under(path, name), depth + 1)
            try:
                from_values(config, {own: made[own]})
            except UsageError as error:
                raise where.error(f"cannot be read: {error.message}", error.hint) from error
            except (TypeError, ValueError, AttributeError) as error:
                raise where.error(
                    f"is {_short(repr(made[own]))}, which does not fit", f"`{own}` is written as its flag"
                ) from error
        return made

    def _plain(self, node: yaml.Node, path: str, depth: int) -> Any:
        """A value without a form: text, numbers, lists and mappings of them."""
        place = self._enter(node, path, depth)
        self.open.append(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return {
                    name: self._plain(value, _under(path, name), depth + 1)
                    for name, _, value in self._pairs(node, path, depth)
                }
            if isinstance(node, yaml.SequenceNode):
                return [self._plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]
            assert isinstance(node, yaml.ScalarNode)
            return self._scalar(node, [bool, int, float, str, type(None)], place, {})
        finally:
            self.open.pop()

    def _other(self, place: Place, found: str, members: list[Any]) -> UsageError:
        return place.error(f"is {found}, expected {_wanted(members)}", "docs/run.md has every key of a plan")


def _under(path: str, name: str) -> str:
    name = _short(name)
    return f"{path}.{name}" if path else name


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _hints(form: type) -> dict[str, Any]:
    return typing.get_type_hints(form)


def _members(kind: Any) -> list[Any]:
    """The types of a union, or the one it is."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return list(typing.get_args(kind))
    return [kind]


_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,3})?")
_YES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _int(text: str, plain: bool) -> int | None:
    return int(text) if plain and _WHOLE.fullmatch(text) else None


def _float(text: str, plain: bool) -> float | None:
    return float(text) if plain and _NUMBER.fullmatch(text) else None


def _bool(text: str, plain: bool) -> bool | None:
    return _YES.get(text.lower()) if plain else None


_READERS: dict[Any, Callable[[str, bool], Any]] = {int: _int, float: _float, bool: _bool, str: lambda text, plain: text}
_SPOKEN = {int: "a whole number", float: "a number", bool: "`true` or `false`", str: "a text"}


def _limited(value: Any, place: Place, limits: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        if not value.strip() or "\0" in value:
            raise place.error("is an empty text" if not value.strip() else "has a NUL in it", "write what is meant")
        return value
    least, most = limits.get("least"), limits.get("most")
    if least is not None and value < least:
        raise place.error(f"is {value}, expected {least:g} or more", limits.get("help"))
    if most is not None and value > most:
        raise place.error(f"is {value}, expected at most {most:g}", limits.get("help"))
    return value


def _wanted(members: list[Any]) -> str:
    """What was expected, in words."""
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
            said.append(_SPOKEN.get(kind, str(kind)))
    return " or ".join(dict.fromkeys(said)) or "nothing"


def _spellings(item: Setting) -> list[str]:
    """A setting's name, and its flags as keys: `duration_s` and `duration`."""
    flags = [flag.partition("/")[0] for flag in item.flags if flag.startswith("--")]
    return list(dict.fromkeys([item.name, *(flag[2:].replace("-", "_") for flag in flags)]))


def _setting_names(config: type, leave_out: tuple[str, ...]) -> list[str]:
    return [item.name for item in settings(config) if item.name not in leave_out]


# ------------------------------------------------------------------------------------------------ the schema


def json_schema(form: type, *, title: str) -> dict[str, Any]:
    """The JSON Schema of a form, from the same types and keys it is read by."""
    definitions: dict[str, Any] = {}
    whole = _object(form, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        "description": (form.__doc__ or "").strip().splitlines()[0],
        **whole,
        "$defs": dict(sorted(definitions.items())),
    }


def _object(form: type, definitions: dict[str, Any]) -> dict[str, Any]:
    hints, properties, required = _hints(form), {}, []
    for item in dataclasses.fields(form):
        meta = item.metadata
        if meta.get("config") is not None:
            made: dict[str, Any] = {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    name: {"description": one.help} | ({"enum": [*one.choices]} if one.choices else {})
                    for one in settings(meta["config"])
                    if one.name not in meta["leave_out"]
                    for name in _spellings(one)
                },
            }
        else:
            made = _schema(hints[item.name], definitions, meta)
        properties[item.name] = {**made, "description": meta["help"]}
        for also in meta.get("also", ()):
            properties[also] = {**made, "description": f"Another spelling of `{item.name}`."}
        if item.default is item.default_factory is dataclasses.MISSING:
            names = [item.name, *meta.get("also", ())]
            required.append(
                {"required": names} if len(names) == 1 else {"oneOf": [{"required": [name]} for name in names]}
            )
    told = {"type": "object", "additionalProperties": False, "properties": properties}
    return told | ({"allOf": required} if required else {})


def _schema(kind: Any, definitions: dict[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    members = _members(kind)
    if len(members) > 1:
        return {"anyOf": [_schema(one, definitions, limits) for one in members]}
    origin = typing.get_origin(kind)
    if origin is Literal:
        return {"enum": list(typing.get_args(kind))}
    if origin is tuple:
        inner = _members(typing.get_args(kind)[0])
        many = {"type": "array", "minItems": 1, "items": _schema(typing.get_args(kind)[0], definitions, limits)}
        alone = [_schema(one, definitions, limits) for one in inner if not dataclasses.is_dataclass(one)]
        return {"anyOf": [many, *alone]}  # a list of one may stand as that one
    if origin is dict:
        inner = typing.get_args(kind)[1]  # a text there may look like a number: `optimization_level: 4`
        values = {"type": ["string", "number", "boolean"]} if inner is str else _schema(inner, definitions, {})
        return {"type": "object", "additionalProperties": values}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        name = kind.__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = {
                "description": (kind.__doc__ or "").strip().splitlines()[0],
                **_object(kind, definitions),
            }
        return {"$ref": f"#/$defs/{name}"}
    made = {"type": {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}[kind]}
    if kind in (int, float):
        made |= {"minimum": limits["least"]} if limits.get("least") is not None else {}
        made |= {"maximum": limits["most"]} if limits.get("most") is not None else {}
    return made

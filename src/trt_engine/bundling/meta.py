"""`model_meta.json` read and checked: components, their files and dimension names, ranges, and what feeds what.

The keys that are read stand in docs/bundle.md and docs/model_meta.schema.json; an exporter's other keys are its own. A file
without `components` describes an RNNT-TDT: `encoder.onnx`, `predictor.onnx` and `joint.onnx` beside it.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from trt_engine.bundling.places import Places, under
from trt_engine.config import BuildConfig, Setting, from_values, settings
from trt_engine.errors import ModelError, TrtEngineError
from trt_engine.files import digest, explain
from trt_engine.tensors import closest

__all__ = ["RNNT", "ComponentMeta", "Link", "Meta", "Range", "read_meta"]

log = logging.getLogger(__name__)

Range = tuple[int, int, int]
"""Smallest, usual and largest size of a dimension."""

RNNT = ("encoder", "predictor", "joint")
"""The components of an RNNT-TDT; a bundle of exactly these has defaults for its dimensions and connections."""

_OURS = ("name", "version", "components", "dimensions", "connections", "features")
_LARGEST = (1 << 31) - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_OF_THE_WHOLE = {"backend", "device", "profiles", "batch", "shapes", "timing_cache"}
_OWN_BUILD = {item.name: item for item in settings(BuildConfig) if item.name not in _OF_THE_WHOLE}
"""What a component may set for itself; the rest is one for the whole bundle."""


@dataclass(frozen=True, slots=True)
class Link:
    """An output that feeds an input; `transpose` is how the application turns its axes on the way."""

    producer: str
    output: str
    consumer: str
    input: str
    transpose: tuple[int, ...] = ()
    declared: bool = True
    place: str = ""
    """Where it stands in the file, for errors."""

    def __str__(self) -> str:
        return f"{self.producer}.{self.output} -> {self.consumer}.{self.input}"


@dataclass(frozen=True, slots=True)
class ComponentMeta:
    """One component as the file describes it."""

    name: str
    file: str
    """The ONNX file, relative to the file's folder."""
    inputs: dict[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    """The dimensions of inputs: a size, a name, or None for one that is not described."""
    outputs: dict[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    dimensions: dict[str, Range] = field(default_factory=dict)
    fills: dict[str, int | str] = field(default_factory=dict)
    """Inputs that are no random numbers in a smoke run: a number, or a dimension whose size it is."""
    build: dict[str, Any] = field(default_factory=dict)
    """Build settings of this component alone."""


@dataclass(frozen=True, slots=True)
class Meta:
    """A bundle as its file describes it."""

    path: Path
    digest: str
    folder: Path
    """Where the ONNX files lie."""
    name: str
    version: str | None
    components: tuple[ComponentMeta, ...]
    dimensions: dict[str, Range]
    links: tuple[Link, ...]
    mels: int | None
    """`features.n_mels` of a speech model."""
    places: Places

    @property
    def rnnt(self) -> bool:
        """True for encoder, predictor and joint, and nothing else."""
        return {item.name for item in self.components} == set(RNNT)

    def error(self, place: str, message: str, hint: str) -> ModelError:
        """A `ModelError` that names the file, the key and its line."""
        return self.places.error(place, message, hint)


def read_meta(path: Path, *, onnx_dir: Path | None = None) -> Meta:
    """The file, checked; `ModelError` naming key and line for what cannot be read."""
    text = _text(path)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(
            f"`{path}` is no JSON: {error.msg.lower()} at line {error.lineno}, column {error.colno}",
            hint="compare it with docs/model_meta.schema.json; a comma too many or too few is the usual reason",
        ) from error
    except RecursionError as error:
        raise ModelError(
            f"`{path}` is nested too deeply to be a model's description", hint="export it again"
        ) from error
    except ValueError as error:  # Python reads no number of more digits than it would print
        raise ModelError(f"`{path}` has a number of thousands of digits", hint="export it again") from error
    places = Places(path, text)
    if not isinstance(document, dict):
        raise places.error("", f"it is {_kind(document)}, expected an object", "`{}` alone describes an RNNT-TDT")
    for place, line in places.again.items():
        if re.split(r"[.\[]", place)[0] in _OURS:
            raise places.error(place, f"line {line} says it once more", "leave one of the two out")
    reader = _Reader(places)
    components = reader.components(document)
    return Meta(
        path=path,
        digest=digest(path),
        folder=onnx_dir or path.parent,
        name=reader.name(document) or path.absolute().parent.name,
        version=reader.text(document, "version"),
        components=components,
        dimensions=reader.ranges(document.get("dimensions", {}), "dimensions"),
        links=reader.links(document.get("connections", []), "connections", components),
        mels=reader.mels(document),
        places=places,
    )


def _text(path: Path) -> str:
    try:
        if path.is_dir():
            inside = path / "model_meta.json"
            raise ModelError(
                f"`{path}` is a folder, expected a `model_meta.json`",
                hint=f"`trt-engine bundle {inside}`" if inside.is_file() else "name the file itself",
            )
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        near = sorted(item.name for item in path.parent.glob("*.json"))[:3] if path.parent.is_dir() else []
        raise ModelError(
            f"no such file `{path}`",
            hint=f"in that folder: {', '.join(near)}" if near else "the exporter writes it beside the ONNX files",
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(
            f"`{path}` is no text: byte {error.start} is not UTF-8", hint="give the `model_meta.json`"
        ) from error
    except OSError as error:
        raise explain(error, path, "read") from error


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST


_EXPECTED: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool),
    "a text": lambda value: isinstance(value, str),
    "a number": _is_number,
    "a size": lambda value: isinstance(value, str) or (_is_number(value) and isinstance(value, int)),
    "a list of names": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "an object of names and values": lambda value: (
        isinstance(value, dict) and all(isinstance(item, str | bool) or _is_number(item) for item in value.values())
    ),
}
"""What a build setting may be in JSON."""


def _json_kind(setting: Setting) -> str:
    kinds = {"bool": "true or false", "int": "a size", "float": "a number", "tuple": "a list of names",
             "dict": "an object of names and values"}  # fmt: skip
    return kinds.get(setting.type.partition("[")[0], "a text")


class _Reader:
    """Values of the document, each checked where it stands."""

    def __init__(self, places: Places) -> None:
        self.places = places

    def name(self, document: Mapping[str, Any]) -> str | None:
        return self.text(document, "name") or self.text(document, "model_name")

    def text(self, document: Mapping[str, Any], key: str) -> str | None:
        value = document.get(key)
        if value is None or isinstance(value, str):
            return value
        if key == "version" and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        raise self.places.error(key, f"it is {_kind(value)}, expected a text", f'`"{key}": "..."`')

    def mels(self, document: Mapping[str, Any]) -> int | None:
        features = document.get("features")
        value = features.get("n_mels") if isinstance(features, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    # -------------------------------------------------------------------------------------------- components

    def components(self, document: Mapping[str, Any]) -> tuple[ComponentMeta, ...]:
        given = document.get("components")
        if given is None:
            self.unknown(document, "", ("components", "connections", "dimensions"))
            return tuple(ComponentMeta(name, f"{name}.onnx") for name in RNNT)
        if isinstance(given, list):
            pairs = []
            for index, item in enumerate(given):
                place = f"components[{index}]"
                name = item if isinstance(item, str) else item.get("name") if isinstance(item, dict) else None
                if not isinstance(name, str):
                    raise self.places.error(place, "it has no name", 'write it as `{"name": "encoder", ...}`')
                pairs.append((name, {} if isinstance(item, str) else item, place))
        elif isinstance(given, dict):
            pairs = [(name, item, f"components.{name}") for name, item in given.items()]
        else:
            raise self.places.error(
                "components", f"it is {_kind(given)}, expected an object", '`{"encoder": {"file": "encoder.onnx"}}`'
            )
        if not pairs:
            raise self.places.error("components", "it is empty", "name the components, or leave the key out")
        made = [self.component(name, item, place) for name, item, place in pairs]
        for index, item in enumerate(made):
            if item.name.lower() in {other.name.lower() for other in made[:index]}:
                raise self.places.error(pairs[index][2], f"`{item.name}` is there twice", "give each its own name")
        return tuple(made)

    def component(self, name: str, value: Any, place: str) -> ComponentMeta:
        if not _NAME.fullmatch(name) or len(name) > 100:
            raise self.places.error(
                place, f"`{name}` cannot be a component's name, which names files", "letters, digits, `.`, `_` and `-`"
            )
        if isinstance(value, str):
            value = {"file": value}
        if not isinstance(value, dict):
            raise self.places.error(place, f"it is {_kind(value)}, expected an object", f'`{{"file": "{name}.onnx"}}`')
        known = ("name", "file", "inputs", "outputs", "dimensions", "build")
        self.unknown(value, place, known)
        inputs, fills = self.tensors(value.get("inputs", {}), f"{place}.inputs")
        outputs, _ = self.tensors(value.get("outputs", {}), f"{place}.outputs")
        return ComponentMeta(
            name=name,
            file=self.file(value.get("file", value.get("onnx", f"{name}.onnx")), f"{place}.file"),
            inputs=inputs,
            outputs=outputs,
            dimensions=self.ranges(value.get("dimensions", {}), f"{place}.dimensions"),
            fills=fills,
            build=self.build(value.get("build", {}), f"{place}.build"),
        )

    def unknown(self, value: Mapping[str, Any], place: str, known: tuple[str, ...]) -> None:
        """Other keys are the exporter's own; one that is nearly ours is said."""
        for key in value:
            if key not in known and (near := difflib.get_close_matches(key, known, n=1, cutoff=0.8)):
                log.warning("`%s` of `%s` is not read; was `%s` meant?", under(place, key), self.places.path, near[0])

    def file(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not value:
            raise self.places.error(place, f"it is {_kind(value)}, expected a file name", '`"file": "encoder.onnx"`')
        try:
            os.fsencode(value)
        except UnicodeEncodeError as error:
            raise self.places.error(place, f"{value!r} can be no file's name", '`"file": "encoder.onnx"`') from error
        parts = PureWindowsPath(value)
        if value.startswith("/") or "\x00" in value or parts.is_absolute() or parts.drive or ".." in parts.parts:
            raise self.places.error(
                place,
                f"`{value}` leaves the folder of the file",
                "put the ONNX file beside it, or name the folder of all of them with `--onnx-dir`",
            )
        return value

    def tensors(self, value: Any, place: str) -> tuple[dict[str, tuple[int | str | None, ...]], dict[str, int | str]]:
        if isinstance(value, list):  # [{"name": "audio_signal", "dims": ["B", 128, "T"]}]
            if not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value):
                raise self.places.error(place, "its items have no names", '`[{"name": "x", "dims": ["B", 128]}]`')
            value = {item["name"]: item for item in value}
        if not isinstance(value, dict):
            raise self.places.error(place, f"it is {_kind(value)}, expected an object", '`{"x": ["B", 128, "T"]}`')
        found: dict[str, tuple[int | str | None, ...]] = {}
        fills: dict[str, int | str] = {}
        for name, item in value.items():
            where = f"{place}.{name}"
            dims = item
            if isinstance(item, dict):
                dims = item.get("dims", item.get("shape"))
                if (fill := item.get("fill")) is not None:
                    if isinstance(fill, bool) or not isinstance(fill, int | str):
                        raise self.places.error(
                            f"{where}.fill",
                            f"it is {fill if isinstance(fill, float) else _kind(fill)}, expected a whole number or a "
                            "dimension",
                            '`"fill": "T"`',
                        )
                    fills[name] = fill
            if dims is not None:
                found[name] = self.dims(dims, where)
        return found, fills

    def dims(self, value: Any, place: str) -> tuple[int | str | None, ...]:
        if not isinstance(value, list):
            raise self.places.error(place, f"it is {_kind(value)}, expected its dimensions", '`["B", 128, "T"]`')
        dims: list[int | str | None] = []
        for index, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, int | str | None) or item == "":
                raise self.places.error(
                    f"{place}[{index}]", f"it is {_kind(item)}, expected a size or a name", '`["B", 128, "T"]`'
                )
            dims.append(None if item in ("?", -1) else item)
            if isinstance(item, int) and item < -1:
                raise self.places.error(f"{place}[{index}]", f"the size {item} is negative", "a size is 0 or more")
            if isinstance(item, int) and item > _LARGEST:
                raise self.places.error(f"{place}[{index}]", f"no dimension has the size {item}", '`["B", 128, "T"]`')
        return tuple(dims)

    def ranges(self, value: Any, place: str) -> dict[str, Range]:
        if not isinstance(value, dict):
            raise self.places.error(place, f"it is {_kind(value)}, expected an object", '`{"T": [16, 64, 256]}`')
        return {name: self.range(item, f"{place}.{name}") for name, item in value.items()}

    def range(self, value: Any, place: str) -> Range:
        """`8`, `[16, 64, 256]`, `"16:64:256"` or `{"min": 16, "opt": 64, "max": 256}`."""
        parts: Any = value
        if isinstance(value, dict):
            parts = [value.get(which) for which in ("min", "opt", "max")]
        elif isinstance(value, str):
            parts = [int(part) if re.fullmatch(r"\s*[0-9]{1,12}\s*", part) else part for part in value.split(":")]
        elif isinstance(value, int):
            parts = [value]
        if (
            not isinstance(parts, list)
            or len(parts) not in (1, 3)
            or not all(isinstance(part, int) and not isinstance(part, bool) for part in parts)
        ):
            raise self.places.error(
                place, f"`{str(value)[:80]}` is no range", "`[16, 64, 256]` (min, opt, max) or one number"
            )
        low, best, high = parts * 3 if len(parts) == 1 else parts
        if not 0 <= low <= best <= high:
            raise self.places.error(place, f"{low}, {best}, {high} are not min <= opt <= max", "order them")
        if high > _LARGEST:
            raise self.places.error(place, f"no dimension has the size {high}", f"{_LARGEST} is the largest there is")
        return low, best, high

    def build(self, value: Any, place: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.places.error(place, f"it is {_kind(value)}, expected an object", '`{"precision": "fp32"}`')
        made = {}
        for name, given in value.items():
            where = f"{place}.{name}"
            if name not in _OWN_BUILD:
                raise self.places.error(where, "a component cannot set this", closest(name, sorted(_OWN_BUILD)))
            expected = _json_kind(_OWN_BUILD[name])
            if not _EXPECTED[expected](given) and not (given is None and _OWN_BUILD[name].default is None):
                raise self.places.error(where, f"it is {_kind(given)}, expected {expected}", _OWN_BUILD[name].help)
            try:
                made[name] = getattr(from_values(BuildConfig, {name: given}), name)
            except TrtEngineError as error:
                raise self.places.error(where, error.message, error.hint or "see `trt-engine build --help`") from error
        return made

    # -------------------------------------------------------------------------------------------- connections

    def links(self, value: Any, place: str, components: tuple[ComponentMeta, ...]) -> tuple[Link, ...]:
        if not isinstance(value, list):
            raise self.places.error(place, f"it is {_kind(value)}, expected a list", '`["a.y -> b.x"]`')
        return tuple(self.link(item, f"{place}[{index}]", components) for index, item in enumerate(value))

    def link(self, value: Any, place: str, components: tuple[ComponentMeta, ...]) -> Link:
        turned: Any = ()
        source: Any
        target: Any
        if isinstance(value, str):
            source, arrow, target = (part.strip() for part in value.partition("->"))
        elif isinstance(value, dict):
            source, target, turned = value.get("from"), value.get("to"), value.get("transpose", ())
            arrow = "->" if isinstance(source, str) and isinstance(target, str) else ""
        else:
            source = target = arrow = ""
        if not arrow:
            raise self.places.error(
                place, "it does not say what feeds what", '`"encoder.y -> joint.x"` or `{"from": ..., "to": ...}`'
            )
        if (
            not isinstance(turned, list | tuple)
            or any(isinstance(axis, bool) or not isinstance(axis, int) for axis in turned)
            or sorted(turned) != list(range(len(turned)))
        ):
            raise self.places.error(f"{place}.transpose", f"`{turned}` are no axes", '`"transpose": [0, 2, 1]`')
        (producer, output), (consumer, taken) = (self.end(end, place, components) for end in (source, target))
        return Link(producer, output, consumer, taken, tuple(turned), place=place)

    def end(self, text: str, place: str, components: tuple[ComponentMeta, ...]) -> tuple[str, str]:
        names = [item.name for item in components]
        for name in sorted(names, key=len, reverse=True):  # names have dots too: the longest that fits
            if text.startswith(f"{name}.") and len(text) > len(name) + 1:
                return name, text[len(name) + 1 :]
        raise self.places.error(
            place, f"`{text}` does not begin with a component and a dot", closest(text.partition(".")[0], names)
        )

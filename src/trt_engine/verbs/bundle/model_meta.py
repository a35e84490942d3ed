"""Reads and validates `model_meta.json`: components, files, dimension names, ranges and connections.

The keys are documented in docs/bundle.md and docs/model_meta.schema.json; other keys are ignored. A file without
`components` describes an RNNT-TDT: `encoder.onnx`, `predictor.onnx` and `joint.onnx` in the same folder.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from trt_engine.atomic_io import file_digest, os_error, read_bounded
from trt_engine.backend import code_options
from trt_engine.config.build import BuildConfig
from trt_engine.config.settings import Setting, from_values, settings
from trt_engine.errors import ModelError, TrtEngineError
from trt_engine.records.bundle import BundleLink
from trt_engine.tensors import suggest

log = logging.getLogger(__name__)

Range = tuple[int, int, int]
"""Min, opt and max size of a dimension."""

RNNT = ("encoder", "predictor", "joint")
"""Components of an RNNT-TDT; a bundle of exactly these has default dimensions and connections."""
_KNOWN_KEYS = ("name", "version", "components", "dimensions", "connections", "features")
_MAX_SIZE = (1 << 31) - 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BUNDLE_SETTINGS = {"backend", "device", "profiles", "batch", "shapes", "timing_cache"}
_COMPONENT_SETTINGS = {item.name: item for item in settings(BuildConfig) if item.name not in _BUNDLE_SETTINGS}
"""Build settings that a component may override; the others apply to the whole bundle."""


@dataclass(frozen=True, slots=True)
class Link(BundleLink):
    """A connection between models, and where the file declares it."""

    json_path: str = ""
    """JSON path, for errors."""


@dataclass(frozen=True, slots=True)
class ComponentMeta:
    """One component as the file describes it."""

    name: str
    file: str
    """The ONNX file, relative to the file's folder."""
    inputs: dict[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    """Dimensions of inputs: a size, a name, or None if not described."""
    outputs: dict[str, tuple[int | str | None, ...]] = field(default_factory=dict)
    dimensions: dict[str, Range] = field(default_factory=dict)
    fills: dict[str, int | str] = field(default_factory=dict)
    """Inputs not filled at random in a smoke run: a number, or the dimension whose size to use."""
    build: dict[str, Any] = field(default_factory=dict)
    """Build settings of this component."""


@dataclass(frozen=True, slots=True)
class ModelMeta:
    """The contents of a `model_meta.json`."""

    path: Path
    digest: str
    folder: Path
    """Folder of the ONNX files."""
    name: str
    version: str | None
    components: tuple[ComponentMeta, ...]
    dimensions: dict[str, Range]
    links: tuple[Link, ...]
    n_mels: int | None
    """`features.n_mels` of a speech model."""
    positions: JsonPositions

    @property
    def is_rnnt(self) -> bool:
        """True if the components are exactly encoder, predictor and joint."""
        return {item.name for item in self.components} == set(RNNT)

    def error(self, json_path: str, message: str, hint: str) -> ModelError:
        """A `ModelError` with file, key and line."""
        return self.positions.error(json_path, message, hint)


def read_meta(path: Path, *, onnx_dir: Path | None = None) -> ModelMeta:
    """Read and validate the file; `ModelError` names key and line."""
    text = _read_text(path)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ModelError(
            f"`{path}` is not JSON: {error.msg.lower()} at line {error.lineno}, column {error.colno}",
            hint="check for a missing or extra comma; the schema is `trt-engine docs model_meta.schema.json`",
        ) from error
    except RecursionError as error:
        raise ModelError(f"`{path}` is nested too deeply", hint="export it again") from error
    except ValueError as error:  # a number beyond Python's limit of digits
        raise ModelError(f"`{path}` has a number of thousands of digits", hint="export it again") from error
    places = JsonPositions(path, text)
    if not isinstance(document, dict):
        raise places.error("", f"it is {_value_kind(document)}, expected an object", "`{}` alone describes an RNNT-TDT")
    for place, line in places.duplicates.items():
        if re.split(r"[.\[]", place)[0] in _KNOWN_KEYS:
            raise places.error(place, f"duplicate key in line {line}", "leave one of the two out")
    reader = _Reader(places)
    components = reader.components(document)
    return ModelMeta(
        path=path,
        digest=file_digest(path),
        folder=onnx_dir or path.parent,
        name=reader.name(document) or path.absolute().parent.name,
        version=reader.text(document, "version"),
        components=components,
        dimensions=reader.ranges(document.get("dimensions", {}), "dimensions"),
        links=reader.links(document.get("connections", []), "connections", components),
        n_mels=reader.n_mels(document),
        positions=places,
    )


def _read_text(path: Path) -> str:
    try:
        if path.is_dir():
            inside = path / "model_meta.json"
            raise ModelError(
                f"`{path}` is a folder, expected a `model_meta.json`",
                hint=f"`trt-engine bundle {inside}`" if inside.is_file() else "name the file itself",
            )
        return read_bounded(path, error=ModelError).decode("utf-8-sig")
    except FileNotFoundError as error:
        near = sorted(item.name for item in path.parent.glob("*.json"))[:3] if path.parent.is_dir() else []
        raise ModelError(
            f"no such file `{path}`",
            hint=f"in that folder: {', '.join(near)}" if near else "the exporter writes it beside the ONNX files",
        ) from error
    except UnicodeDecodeError as error:
        raise ModelError(
            f"`{path}` is not text: byte {error.start} is not UTF-8", hint="give the `model_meta.json`"
        ) from error
    except OSError as error:
        raise os_error(error, path, "read") from error


def _value_kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_SIZE


_JSON_CHECKS: dict[str, Callable[[Any], bool]] = {
    "true or false": lambda value: isinstance(value, bool),
    "a string": lambda value: isinstance(value, str),
    "a number": _is_number,
    "a size": lambda value: isinstance(value, str) or (_is_number(value) and isinstance(value, int)),
    "a list of names": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "an object of names and values": lambda value: (
        isinstance(value, dict) and all(isinstance(item, str | bool) or _is_number(item) for item in value.values())
    ),
}
"""Checks of build settings by JSON type."""


def _setting_kind(setting: Setting) -> str:
    kinds = {"bool": "true or false", "int": "a size", "float": "a number", "tuple": "a list of names",
             "dict": "an object of names and values"}  # fmt: skip
    return kinds.get(setting.type.partition("[")[0], "a string")


class _Reader:
    """Reads and validates values of the document."""

    def __init__(self, places: JsonPositions) -> None:
        self.positions = places

    def expect(self, value: object, kind: type, json_path: str, expected: str, example: str) -> None:
        """Raise an error with `example` for a value of another type."""
        if not isinstance(value, kind):
            raise self.positions.error(json_path, f"it is {_value_kind(value)}, expected {expected}", example)

    def name(self, document: Mapping[str, Any]) -> str | None:
        return self.text(document, "name") or self.text(document, "model_name")

    def text(self, document: Mapping[str, Any], key: str) -> str | None:
        value = document.get(key)
        if value is None or isinstance(value, str):
            return value
        if key == "version" and isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
        raise self.positions.error(key, f"it is {_value_kind(value)}, expected a string", f'`"{key}": "..."`')

    def n_mels(self, document: Mapping[str, Any]) -> int | None:
        features = document.get("features")
        value = features.get("n_mels") if isinstance(features, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    # -------------------------------------------------------------------------------------------- components

    def components(self, document: Mapping[str, Any]) -> tuple[ComponentMeta, ...]:
        given = document.get("components")
        if given is None:
            self.warn_unknown(document, "", ("components", "connections", "dimensions"))
            return tuple(ComponentMeta(name, f"{name}.onnx") for name in RNNT)
        if isinstance(given, list):
            pairs = []
            for index, item in enumerate(given):
                place = f"components[{index}]"
                name = item if isinstance(item, str) else item.get("name") if isinstance(item, dict) else None
                if not isinstance(name, str):
                    raise self.positions.error(place, "it has no name", 'write it as `{"name": "encoder", ...}`')
                pairs.append((name, {} if isinstance(item, str) else item, place))
        else:
            self.expect(given, dict, "components", "an object", '`{"encoder": {"file": "encoder.onnx"}}`')
            pairs = [(name, item, f"components.{name}") for name, item in given.items()]
        if not pairs:
            raise self.positions.error("components", "it is empty", "name the components, or leave the key out")
        made = [self.component(name, item, place) for name, item, place in pairs]
        for index, item in enumerate(made):
            if item.name.lower() in {other.name.lower() for other in made[:index]}:
                raise self.positions.error(pairs[index][2], f"duplicate component `{item.name}`", "use unique names")
        return tuple(made)

    def component(self, name: str, value: Any, json_path: str) -> ComponentMeta:
        if not _NAME.fullmatch(name) or len(name) > 100:
            raise self.positions.error(
                json_path,
                f"`{name}` is not valid as a component and file name",
                "use letters, digits, `.`, `_` and `-`",
            )
        if isinstance(value, str):
            value = {"file": value}
        self.expect(value, dict, json_path, "an object", f'`{{"file": "{name}.onnx"}}`')
        known = ("name", "file", "inputs", "outputs", "dimensions", "build")
        self.warn_unknown(value, json_path, known)
        inputs, fills = self.tensors(value.get("inputs", {}), f"{json_path}.inputs")
        outputs, _ = self.tensors(value.get("outputs", {}), f"{json_path}.outputs")
        return ComponentMeta(
            name=name,
            file=self.file(value.get("file", value.get("onnx", f"{name}.onnx")), f"{json_path}.file"),
            inputs=inputs,
            outputs=outputs,
            dimensions=self.ranges(value.get("dimensions", {}), f"{json_path}.dimensions"),
            fills=fills,
            build=self.build(value.get("build", {}), f"{json_path}.build"),
        )

    def warn_unknown(self, value: Mapping[str, Any], json_path: str, known: tuple[str, ...]) -> None:
        """Warn about an unknown key similar to a known one."""
        for key in value:
            if key not in known and (near := difflib.get_close_matches(key, known, n=1, cutoff=0.8)):
                log.warning(
                    "`%s` of `%s` is not read; was `%s` meant?",
                    child_path(json_path, key),
                    self.positions.path,
                    near[0],
                )

    def file(self, value: Any, json_path: str) -> str:
        example = '`"file": "encoder.onnx"`'
        if not isinstance(value, str) or not value:
            raise self.positions.error(json_path, f"it is {_value_kind(value)}, expected a file name", example)
        try:
            os.fsencode(value)
        except UnicodeEncodeError as error:
            raise self.positions.error(json_path, f"{value!r} is not a file name", example) from error
        parts = PureWindowsPath(value)
        if value.startswith("/") or "\x00" in value or parts.is_absolute() or parts.drive or ".." in parts.parts:
            raise self.positions.error(
                json_path,
                f"`{value}` is outside the folder of the file",
                "put the ONNX file into it, or name the folder of the ONNX files with `--onnx-dir`",
            )
        return value

    def tensors(
        self, value: Any, json_path: str
    ) -> tuple[dict[str, tuple[int | str | None, ...]], dict[str, int | str]]:
        if isinstance(value, list):  # [{"name": "audio_signal", "dims": ["B", 128, "T"]}]
            if not all(isinstance(item, dict) and isinstance(item.get("name"), str) for item in value):
                raise self.positions.error(
                    json_path, "its items have no `name`", '`[{"name": "x", "dims": ["B", 128]}]`'
                )
            value = {item["name"]: item for item in value}
        self.expect(value, dict, json_path, "an object", '`{"x": ["B", 128, "T"]}`')
        found: dict[str, tuple[int | str | None, ...]] = {}
        fills: dict[str, int | str] = {}
        for name, item in value.items():
            where = f"{json_path}.{name}"
            dims = item
            if isinstance(item, dict):
                dims = item.get("dims", item.get("shape"))
                if (fill := item.get("fill")) is not None:
                    if isinstance(fill, bool) or not isinstance(fill, int | str):
                        raise self.positions.error(
                            f"{where}.fill",
                            f"it is {fill if isinstance(fill, float) else _value_kind(fill)}, expected a whole number or a "
                            "dimension",
                            '`"fill": "T"`',
                        )
                    fills[name] = fill
            if dims is not None:
                found[name] = self.dims(dims, where)
        return found, fills

    def dims(self, value: Any, json_path: str) -> tuple[int | str | None, ...]:
        self.expect(value, list, json_path, "its dimensions", '`["B", 128, "T"]`')
        dims: list[int | str | None] = []
        for index, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, int | str | None) or item == "":
                raise self.positions.error(
                    f"{json_path}[{index}]",
                    f"it is {_value_kind(item)}, expected a size or a name",
                    '`["B", 128, "T"]`',
                )
            dims.append(None if item in ("?", -1) else item)
            if isinstance(item, int) and item < -1:
                raise self.positions.error(
                    f"{json_path}[{index}]", f"the size {item} is negative", "a size is 0 or more"
                )
            if isinstance(item, int) and item > _MAX_SIZE:
                raise self.positions.error(
                    f"{json_path}[{index}]", f"the size {item} is too large", '`["B", 128, "T"]`'
                )
        return tuple(dims)

    def ranges(self, value: Any, json_path: str) -> dict[str, Range]:
        self.expect(value, dict, json_path, "an object", '`{"T": [16, 64, 256]}`')
        return {name: self.range(item, f"{json_path}.{name}") for name, item in value.items()}

    def range(self, value: Any, json_path: str) -> Range:
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
            raise self.positions.error(
                json_path, f"`{str(value)[:80]}` is not a range", "`[16, 64, 256]` (min, opt, max) or one number"
            )
        low, best, high = parts * 3 if len(parts) == 1 else parts
        if not 0 <= low <= best <= high:
            raise self.positions.error(json_path, f"{low}, {best}, {high} are not min <= opt <= max", "order them")
        if high > _MAX_SIZE:
            raise self.positions.error(json_path, f"the size {high} is too large", f"the maximum is {_MAX_SIZE}")
        return low, best, high

    def build(self, value: Any, json_path: str) -> dict[str, Any]:
        self.expect(value, dict, json_path, "an object", '`{"precision": "fp32"}`')
        made = {}
        for name, given in value.items():
            where = f"{json_path}.{name}"
            if name not in _COMPONENT_SETTINGS:
                raise self.positions.error(
                    where, "a component cannot set this", suggest(name, sorted(_COMPONENT_SETTINGS))
                )
            if name == "options" and isinstance(given, dict) and (code := code_options(given)):
                raise self.positions.error(
                    f"{where}.{code[0]}", "it loads code or names a file, which a model description may not",
                    f"if you trust it: `-O {shlex.quote(f'{code[0]}={given[code[0]]}')}` on the command line",
                )  # fmt: skip
            expected = _setting_kind(_COMPONENT_SETTINGS[name])
            if not _JSON_CHECKS[expected](given) and not (given is None and _COMPONENT_SETTINGS[name].default is None):
                raise self.positions.error(
                    where, f"it is {_value_kind(given)}, expected {expected}", _COMPONENT_SETTINGS[name].help
                )
            try:
                made[name] = getattr(from_values(BuildConfig, {name: given}), name)
            except TrtEngineError as error:
                raise self.positions.error(
                    where, error.message, error.hint or "see `trt-engine build --help`"
                ) from error
        return made

    # -------------------------------------------------------------------------------------------- connections

    def links(self, value: Any, json_path: str, components: tuple[ComponentMeta, ...]) -> tuple[Link, ...]:
        self.expect(value, list, json_path, "a list", '`["a.y -> b.x"]`')
        return tuple(self.link(item, f"{json_path}[{index}]", components) for index, item in enumerate(value))

    def link(self, value: Any, json_path: str, components: tuple[ComponentMeta, ...]) -> Link:
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
            raise self.positions.error(
                json_path, "it is not a connection", '`"encoder.y -> joint.x"` or `{"from": ..., "to": ...}`'
            )
        if (
            not isinstance(turned, list | tuple)
            or any(isinstance(axis, bool) or not isinstance(axis, int) for axis in turned)
            or sorted(turned) != list(range(len(turned)))
        ):
            raise self.positions.error(f"{json_path}.transpose", f"`{turned}` are not axes", '`"transpose": [0, 2, 1]`')
        (producer, output), (consumer, taken) = (self.endpoint(end, json_path, components) for end in (source, target))
        return Link(producer, output, consumer, taken, tuple(turned), json_path=json_path)

    def endpoint(self, text: str, json_path: str, components: tuple[ComponentMeta, ...]) -> tuple[str, str]:
        names = [item.name for item in components]
        for name in sorted(names, key=len, reverse=True):  # names may contain dots: longest match first
            if text.startswith(f"{name}.") and len(text) > len(name) + 1:
                return name, text[len(name) + 1 :]
        raise self.positions.error(
            json_path, f"`{text}` does not begin with a component and a dot", suggest(text.partition(".")[0], names)
        )


class JsonPositions:
    """Line numbers in a JSON text by path: `components.encoder.inputs.audio_signal[1]`."""

    _TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\],:\n]|[^\s{}\[\],:"]+')

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines = {"": 1}
        self.duplicates: dict[str, int] = {}
        """Duplicate keys of an object, and the line of the second."""
        stack: list[tuple[bool, Any]] = []  # is it an object; its key or index now
        keys: list[set[str]] = []
        line, key_next = 1, False
        for match in self._TOKENS.finditer(text):
            token = match[0]
            if token == "\n":
                line += 1
            elif token == ",":
                is_object, step = stack.pop()
                key_next = is_object
                stack.append((is_object, step if is_object else step + 1))
            elif token in "}]":
                stack.pop()
                keys.pop()
            elif key_next and token[0] == '"':
                key = json.loads(token)
                stack[-1] = True, key
                key_next = False
                if key in keys[-1]:
                    self.duplicates.setdefault(self._join_path(stack), line)
                keys[-1].add(key)
                self.lines.setdefault(self._join_path(stack), line)
            elif token != ":":  # a value begins
                if stack and not stack[-1][0]:
                    self.lines.setdefault(self._join_path(stack), line)
                if token in "{[":
                    key_next = token == "{"
                    stack.append((key_next, None if key_next else 0))
                    keys.append(set())

    @staticmethod
    def _join_path(stack: list[tuple[bool, Any]]) -> str:
        path = ""
        for is_object, step in stack:
            if step is not None:
                path = child_path(path, step) if is_object else f"{path}[{step}]"
        return path

    def line(self, json_path: str) -> int:
        """Line of a path, or of its nearest existing parent."""
        while json_path not in self.lines:
            json_path = json_path[: max(json_path.rfind("."), json_path.rfind("["), 0)]
        return self.lines[json_path]

    def error(self, json_path: str, message: str, hint: str) -> ModelError:
        where = f"`{json_path}` of " if json_path else ""
        return ModelError(f"{where}`{self.path}` (line {self.line(json_path)}): {message}", hint=hint)


def child_path(json_path: str, key: str) -> str:
    return f"{json_path}.{key}" if json_path else key

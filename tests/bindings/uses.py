"""What our backend's sources use of TensorRT, held against the bindings that are imported here.

`problems(folder)` reads every module of the backend and follows TensorRT's objects through it: what
`binding.trt.Builder(...)` makes, what its methods return by their published signatures, what our own functions hand on,
and parameters without a type of ours by their names (`PARAMETERS`). Every name reached on such an object must exist in
this release or be outside its range in `API_TABLE`, must stand in `API_TABLE`, and must be called with parameters it has.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import datetime
import functools
import importlib
import inspect
import io
import logging
import mmap
import os
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trt_engine.backends.tensorrt.api_table import API_TABLE, ApiEntry
from trt_engine.backends.tensorrt.binding import TENSORRT, TENSORRT_RTX

trt: Any = importlib.import_module(os.environ.get("TRT_ENGINE_TEST_MODULE", "tensorrt"))

BINDING = TENSORRT_RTX if trt.__name__ == TENSORRT_RTX.module else TENSORRT
VERSION = BINDING.version
TABLE = (*API_TABLE, *TENSORRT_RTX.extra_entries)
"""Every name that some release of either library has; `present` says which of them this one has."""

PARAMETERS = {
    "builder": "Builder", "network": "INetworkDefinition", "config": "IBuilderConfig", "parser": "OnnxParser",
    "engine": "ICudaEngine", "runtime": "Runtime", "refitter": "Refitter", "inspector": "EngineInspector",
    "native": "IExecutionContext", "registry": "IPluginRegistry", "tensor": "ITensor", "runtime_config": "IRuntimeConfig",
}  # fmt: skip
"""Classes of parameters that are annotated `Any`, or not at all."""

OVERRIDDEN = {"IStreamReaderV2.read": ("num_bytes", "stream")}
"""Parameters an override is called with, where they are not the published ones: it returns what it read."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A value of the bindings: an object of a class, a class itself, a method of an object, a list of objects."""

    kind: str
    """`object`, `class`, `method`, `list`, `module`, `call` (of a function of ours: its result)."""
    name: str = ""


def present(use: ApiEntry) -> bool:
    """True when the library that is imported here has the name."""
    return (use not in TENSORRT_RTX.extra_entries or use in BINDING.extra_entries) and BINDING.has_api(use.name)


# ------------------------------------------------------------------------------------------------ signatures


class Parameter(NamedTuple):
    """One parameter as a docstring publishes it."""

    name: str
    type: str
    optional: bool


def overloads(function: Any, name: str) -> list[list[Parameter]]:
    """The parameters after `self`, of each overload a docstring publishes."""
    doc = getattr(function, "__doc__", "") or ""
    found = []
    for inner in re.findall(rf"^(?:\d+\. )?{re.escape(name)}\((.*)\) -> ", doc, re.MULTILINE):
        parts = [part.split(": ", 1) for part in re.split(r", (?=\w+: )", inner) if ": " in part]
        found.append([
            Parameter(part[0].strip(), part[1].split(" = ")[0], " = " in part[1])
            for part in parts if part[0].strip() != "self"
        ])  # fmt: skip
    return found


def returned(function: Any) -> str | None:
    """The class of the bindings a method or a property gives, by its docstring."""
    doc = getattr(function, "__doc__", "") or ""
    match = re.search(r"\) -> (.+?)\s*$", doc, re.MULTILINE)
    return _class_in(match[1]) if match else None


def _class_in(text: str) -> str | None:
    short = text.split("[")[0].split(" | ")[0].split(".")[-1].split("::")[-1].strip()
    short = {"IParserError": "ParserError", "IPluginRegistry": "IPluginRegistry"}.get(short, short)
    return short if isinstance(getattr(trt, short, None), type) else None


def find(dotted: str) -> Any:
    found: Any = trt
    for part in dotted.split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


def is_enum(dotted: str) -> bool:
    return hasattr(find(dotted), "__members__")


def surface_problems() -> list[str]:
    """Entries of the table that are not in these bindings as it says."""
    bad = []
    for use in (
        *API_TABLE,
        *BINDING.extra_entries,
    ):  # some of TensorRT-RTX's are in TensorRT too, where nothing uses them
        obj = find(use.name)
        expected = present(use)
        if (obj is not None) != expected:
            bad.append(f"{use.name}: {'there' if obj is not None else 'not there'}, the table says the contrary")
        elif expected and use.parameters is not None:
            known = overloads(obj, use.name.rpartition(".")[2])
            if not any(set(use.parameters) <= {item.name for item in one} for one in known):
                bad.append(f"{use.name}: parameters {list(use.parameters)} are not those of {known}")
    return bad


# ------------------------------------------------------------------------------------------------ following objects


def problems(*folders: Path) -> list[str]:
    """What the modules of these folders use that these bindings do not have, each with its place."""
    reading = _read(*folders)
    return sorted({*reading.found, *_unknown_names(reading.modules), *_unknown_texts(reading.modules)})


def followed(*folders: Path) -> list[str]:
    """The names of the bindings those modules were seen to reach."""
    return sorted(_read(*folders).checked)


@functools.cache
def _read(*folders: Path) -> _Reading:
    reading = _Reading(
        {
            path.stem if folder == folders[0] else f"{folder.name}/{path.stem}": ast.parse(path.read_text())
            for folder in folders
            for path in sorted(folder.glob("*.py"))
        }
    )
    for _ in range(5):  # what a function hands on is known to those that call it in the next round
        reading.found.clear()
        for name, tree in reading.modules.items():
            _Scope(reading, name).module(tree)
    return reading


@dataclass
class _Reading:
    """What is known of all modules: results of functions, attributes of our classes, uses that are wrong."""

    modules: dict[str, ast.Module]
    results: dict[str, Bound] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Bound] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)
    surface: dict[str, ApiEntry] = field(default_factory=lambda: {use.name: use for use in TABLE})
    arguments: dict[tuple[str, int | str], Bound] = field(default_factory=dict)
    """What a function of ours was called with, by its name and the parameter's place or name."""
    checked: set[str] = field(default_factory=set)
    defined: Counter[str] = field(default_factory=Counter)
    """How many functions of ours have a name: what two share tells nothing of their parameters."""
    borrowed: dict[str, set[str]] = field(default_factory=dict)
    """By module, the names it imports from outside the backends: functions of these modules may have them too."""

    def __post_init__(self) -> None:
        self.borrowed = {
            module: {
                item.asname or item.name
                for node in ast.walk(tree)
                if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("trt_engine.backends.")
                for item in node.names
            }
            for module, tree in self.modules.items()
        }
        every = (node for tree in self.modules.values() for node in ast.walk(tree))
        self.defined.update(node.name for node in every if isinstance(node, ast.FunctionDef))


class _Scope:
    """One function (or module) being read, top to bottom."""

    def __init__(self, reading: _Reading, module: str, owner: str = "", names: dict[str, Bound] | None = None) -> None:
        self.reading, self.module_name, self.owner = reading, module, owner
        self.names: dict[str, Bound] = dict(names or {})
        self.result: Bound | None = None

    def module(self, tree: ast.Module) -> None:
        self.block(tree.body)

    def say(self, node: ast.AST, text: str) -> None:
        self.reading.found.append(f"{self.module_name}.py:{getattr(node, 'lineno', 0)}: {text}")

    # -------------------------------------------------------------------------------- statements

    def block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.function(node)
        elif isinstance(node, ast.ClassDef):
            inner = _Scope(self.reading, self.module_name, node.name, self.names)
            for base in node.bases:
                inner.type_of(base)
            inner.block(node.body)
            for base in node.bases:
                self.overrides(node, self.type_of(base))
            self.overrides(node, _stands_for(node))
        elif isinstance(node, ast.Import):
            if any(item.name == trt.__name__ for item in node.names):
                self.names["trt"] = Bound("module")
        elif isinstance(node, ast.Assign):
            value = self.type_of(node.value)
            for target in node.targets:
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    for one, part in zip(target.elts, node.value.elts, strict=False):
                        self.bind(one, self.type_of(part, quiet=True), part)
                else:
                    self.bind(target, value, node.value)
        elif isinstance(node, ast.AnnAssign):
            value = self.type_of(node.value) if node.value else None
            self.bind(node.target, value or self.annotated(node.annotation), node.value)
        elif isinstance(node, ast.AugAssign):
            self.type_of(node.value)
            self.type_of(node.target)
        elif isinstance(node, ast.Return):
            value = self.type_of(node.value) if node.value else None
            self.result = value or self.result
        elif isinstance(node, ast.For):
            listed = self.type_of(node.iter)
            if listed is not None and listed.kind == "list":
                self.bind(node.target, Bound("object", listed.name), None)
            self.block([*node.body, *node.orelse])
        elif isinstance(node, ast.With):
            for item in node.items:
                value = self.type_of(item.context_expr)
                if item.optional_vars is not None:
                    self.bind(item.optional_vars, value, None)
            self.block(node.body)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.stmt):
                    self.statement(child)
                elif isinstance(child, ast.expr):
                    self.type_of(child)
                elif isinstance(child, ast.ExceptHandler | ast.match_case):
                    self.block(child.body)

    def function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        inner = _Scope(self.reading, self.module_name, self.owner, self.names)
        given = [item for item in [*node.args.posonlyargs, *node.args.args] if item.arg not in ("self", "cls")]
        for place, argument in enumerate([*given, *node.args.kwonlyargs]):
            inner.names.pop(argument.arg, None)
            bound = self.annotated(argument.annotation)
            if bound is None and _untyped(argument.annotation):
                known = self.reading.arguments if self.reading.defined[node.name] == 1 else {}
                bound = known.get((node.name, argument.arg)) or known.get((node.name, place))
            if bound is None and _untyped(argument.annotation) and argument.arg in PARAMETERS:
                bound = Bound("object", PARAMETERS[argument.arg])
            if bound is not None:
                inner.names[argument.arg] = bound
        inner.block(node.body)
        if inner.result is not None:
            self.reading.results[f"{self.owner}.{node.name}" if self.owner else node.name] = inner.result

    def overrides(self, node: ast.ClassDef, base: Bound | None) -> None:
        """What TensorRT calls on a class of ours: every method the table lists, with as many parameters."""
        if base is None or base.kind != "class":
            return
        own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        for kind in [item.__name__ for item in find(base.name).__mro__]:
            for use in self.reading.surface.values():
                owner, _, name = use.name.rpartition(".")
                if owner != kind or name == "__init__" or use.parameters is None or not present(use):
                    continue
                self.reading.checked.add(use.name)
                if name not in own:
                    self.say(node, f"`{node.name}` has no `{name}`, which TensorRT calls on an `{kind}`")
                elif len(own[name].args.args) - 1 != len(OVERRIDDEN.get(use.name, use.parameters)):
                    self.say(own[name], f"`{node.name}.{name}` does not take {list(use.parameters)}")

    def annotated(self, annotation: ast.expr | None) -> Bound | None:
        """The class of an annotation `trt.X`; a wrong one is said."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        if annotation is None:
            return None
        found = [self.type_of(part) for part in ast.walk(annotation) if isinstance(part, ast.Attribute)]
        return next((Bound("object", item.name) for item in found if item and item.kind == "class"), None)

    def bind(self, target: ast.expr, value: Bound | None, source: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            if value is not None:
                self.names[target.id] = value
            else:
                self.names.pop(target.id, None)
        elif isinstance(target, ast.Attribute):
            owner = self.type_of(target.value, quiet=True)
            if owner is not None and owner.kind == "object":
                self.reach(owner, target)
                self.no_number(f"{owner.name}.{target.attr}", source)
            elif isinstance(target.value, ast.Name) and target.value.id == "self" and value is not None:
                self.reading.attributes[self.owner, target.attr] = value

    # -------------------------------------------------------------------------------- expressions

    def type_of(self, node: ast.expr | None, *, quiet: bool = False) -> Bound | None:
        """What an expression is of the bindings; every use in it is checked on the way."""
        match node:
            case None:
                return None
            case ast.Name():
                return self.names.get(node.id)
            case ast.Attribute(attr="trt"):  # `binding.trt`
                return Bound("module")
            case ast.Attribute():
                owner = self.type_of(node.value, quiet=quiet)
                if owner is not None:
                    return self.reach(owner, node)
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    return self.reading.attributes.get((self.owner, node.attr))
                return None
            case ast.Call():
                return self.call(node)
            case ast.Lambda():
                inner = _Scope(self.reading, self.module_name, self.owner, self.names)
                made = inner.type_of(node.body)
                return Bound("call", made.name) if made is not None and made.kind == "object" else None
            case ast.IfExp():
                self.type_of(node.test)
                return self.type_of(node.body) or self.type_of(node.orelse)
            case ast.BoolOp():
                kinds = [self.type_of(value) for value in node.values]
                return next((kind for kind in reversed(kinds) if kind is not None), None)
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                return self.comprehension(node)
            case ast.NamedExpr():
                value = self.type_of(node.value)
                self.bind(node.target, value, node.value)
                return value
            case ast.Subscript():
                listed = self.type_of(node.value)
                self.type_of(node.slice)
                return Bound("object", listed.name) if listed is not None and listed.kind == "list" else None
            case ast.Tuple() | ast.List():
                kinds = [self.type_of(item) for item in node.elts]
                known = {kind.name for kind in kinds if kind is not None and kind.kind == "object"}
                return Bound("list", known.pop()) if len(known) == 1 else None
            case _:
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.expr):
                        self.type_of(child)
                return None

    def comprehension(self, node: Any) -> Bound | None:
        inner = _Scope(self.reading, self.module_name, self.owner, self.names)
        for generator in node.generators:
            listed = inner.type_of(generator.iter)
            if listed is not None and listed.kind == "list":
                inner.bind(generator.target, Bound("object", listed.name), None)
            for test in generator.ifs:
                inner.type_of(test)
        if isinstance(node, ast.DictComp):
            inner.type_of(node.key)
            inner.type_of(node.value)
            return None
        made = inner.type_of(node.elt)
        return Bound("list", made.name) if made is not None and made.kind == "object" else None

    def reach(self, owner: Bound, node: ast.Attribute) -> Bound | None:
        """An attribute of a value of the bindings: it must exist here and stand in the table."""
        if owner.kind not in ("module", "class", "object"):
            return None
        dotted = f"{owner.name}.{node.attr}" if owner.name else node.attr
        known = self.reading.surface.get(dotted)
        found = find(dotted)
        below = [use for name, use in self.reading.surface.items() if name.startswith(f"{dotted}.")]
        leads = known is not None or below
        if found is None:
            if not leads or any(present(use) for use in (known, *below) if use is not None):
                self.say(node, f"`{dotted}` is not in TensorRT {trt.__version__}")
            return None
        if is_enum(owner.name) and node.attr in ("name", "__members__"):
            return None
        if not leads and not _exception(found):
            self.say(node, f"`{dotted}` is used and not in API_TABLE")
        self.reading.checked.add(dotted)
        if owner.kind == "object" and isinstance(found, property):
            kind = returned(found.fget)
            return Bound("object", kind) if kind else None
        if isinstance(found, type):
            return Bound("class", dotted)
        if owner.kind == "class" and not callable(found):
            return None  # a member of an enum
        return Bound("method", dotted) if callable(found) else None

    def call(self, node: ast.Call) -> Bound | None:
        for argument in [*node.args, *(item.value for item in node.keywords)]:
            self.type_of(argument.value if isinstance(argument, ast.Starred) else argument)
        called = self.type_of(node.func)
        if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
            owner = self.type_of(node.args[0], quiet=True)  # `_set_checked(config, "max_aux_streams", ...)`
            if owner is not None and owner.kind == "object" and ast.unparse(node.func) == "_set_checked":
                self.reach(owner, ast.copy_location(ast.Attribute(node.args[0], node.args[1].value), node))
        if called is not None and called.kind == "method":
            self.fits(called.name, node, find(called.name))
            kind = returned(find(called.name))
            return Bound("object", kind) if kind else None
        if called is not None and called.kind == "class":
            if is_enum(called.name):
                self.say(node, f"`{called.name}(...)` makes a member out of a number")
                return None
            self.fits(f"{called.name}.__init__", node, find(called.name).__init__)
            self.reading.checked.add(f"{called.name}.__init__")
            return Bound("object", called.name)
        if called is not None and called.kind == "call":
            return Bound("object", called.name)
        first = self.type_of(node.args[0]) if node.args else None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for key, value in [*enumerate(node.args), *((item.arg or "", item.value) for item in node.keywords)]:
            bound = self.type_of(value, quiet=True)
            if bound is not None and bound.kind in ("object", "list"):
                self.reading.arguments[name, key] = bound
        if name in ("map", "list", "tuple", "reversed", "sorted") and first is not None:
            if first.kind == "method":
                kind = returned(find(first.name))
                return Bound("list", kind) if kind else None
            return first if first.kind == "list" else None
        own = self.reading.results.get(f"{self.owner}.{name}") or self.reading.results.get(name)
        elsewhere = isinstance(node.func, ast.Name) and name in self.reading.borrowed[self.module_name]
        if own is not None and not elsewhere:
            return own
        if first is not None and first.kind in ("method", "call"):  # a function of ours that calls what it is given
            kind = first.name if first.kind == "call" else returned(find(first.name))
            return Bound("object", kind) if kind else None
        return None

    def fits(self, dotted: str, node: ast.Call, function: Any) -> None:
        """The call's parameters are those of an overload, in number and by name; no enum is given as a number."""
        if any(isinstance(item, ast.Starred) for item in node.args) or any(item.arg is None for item in node.keywords):
            return
        known = overloads(function, dotted.rpartition(".")[2])
        if not known:
            return
        keywords = {item.arg for item in node.keywords}
        fitting = [one for one in known if _takes(one, len(node.args), keywords)]
        if not fitting:
            self.say(node, f"`{dotted}` is called with {len(node.args)} parameters and {sorted(map(str, keywords))}, "
                     f"it has {[[item.name for item in one] for one in known]}")  # fmt: skip
            return
        given = [*zip((item.name for item in fitting[0]), node.args, strict=False)]
        given += [(str(item.arg), item.value) for item in node.keywords]
        types = {item.name: item.type for item in fitting[0]}
        for name, value in given:
            kind = _class_in(types.get(name, ""))
            number = isinstance(value, ast.Constant) and type(value.value) is int
            if (kind and is_enum(kind) and number) or (dotted == "Builder.create_network" and _all_numbers(value)):
                self.say(node, f"`{dotted}` is given a number for `{name}`: enum values moved between majors")

    def no_number(self, dotted: str, value: ast.expr | None) -> None:
        found = find(dotted)
        if not isinstance(found, property) or value is None:
            return
        kind = returned(found.fget)
        if kind and is_enum(kind) and isinstance(value, ast.Constant) and type(value.value) is int:
            self.say(value, f"`{dotted}` is given a number: enum values moved between majors")


def _stands_for(node: ast.ClassDef) -> Bound | None:
    """The class of the bindings whose calls are handed on to a class of ours; None where this release lacks it."""
    for item in node.body:
        if isinstance(item, ast.Assign) and getattr(item.targets[0], "id", "") == "native_base":
            name = ast.literal_eval(item.value)
            return Bound("class", name) if find(name) is not None else None
    return None


def _takes(parameters: list[Parameter], positional: int, keywords: set[str | None]) -> bool:
    """True when the overload can be called so: every parameter is known, and those without a default are given."""
    left = parameters[positional:]
    needed = {item.name for item in left if not item.optional}
    return positional <= len(parameters) and needed <= keywords <= {item.name for item in left}


def _all_numbers(node: ast.expr) -> bool:
    """True for a literal number, or an expression of such."""
    return all(
        isinstance(part, ast.Constant | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop) for part in ast.walk(node)
    )


def _untyped(annotation: ast.expr | None) -> bool:
    return annotation is None or (isinstance(annotation, ast.Name) and annotation.id == "Any")


def _exception(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)


_LIBRARY = (
    contextlib.ExitStack, ctypes.CDLL.__init__, ctypes.CFUNCTYPE(None), datetime.datetime, io.FileIO, logging.getLogger(),
    logging.makeLogRecord({}), mmap.mmap, np.ndarray, os.stat_result, Path, threading.Event,
)  # fmt: skip
"""Classes of objects our modules hold, beside those of Python's builtins."""
_FOREIGN = re.compile(r"cu[A-Z]|getInferLibVersion$")
"""Entry points of libcuda and libnvinfer, reached through ctypes."""


def _unknown_names(modules: dict[str, ast.Module]) -> list[str]:
    """Attributes that nobody has, a net under `_Scope`, for objects it lost sight of."""
    reached: list[tuple[str, ast.Attribute]] = []
    for name, tree in modules.items():
        imported = _imported(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr not in _libraries() and not _FOREIGN.match(node.attr):
                root: ast.expr = node
                while isinstance(root, ast.Attribute | ast.Call):
                    root = root.value if isinstance(root, ast.Attribute) else root.func
                if not (isinstance(root, ast.Name) and root.id in imported):
                    reached.append((name, node))
    unknown = _nobodys({node.attr for _, node in reached})
    return [f"{name}.py:{at.lineno}: nobody has an attribute `{at.attr}`" for name, at in reached if at.attr in unknown]


@functools.cache
def _libraries() -> set[str]:
    """Names of attributes: of the bindings of any release we know, and of Python."""
    known = {part for use in TABLE for part in use.name.split(".")}
    for name in dir(trt):
        known.update(dir(getattr(trt, name)))
    for item in (*vars(builtins).values(), *_LIBRARY):
        known.update(dir(item))
    return known


def _nobodys(names: set[str]) -> set[str]:
    """Those of the names that no module of trt_engine defines."""
    rest = set(names)
    for path in sorted(
        Path(inspect.getfile(ApiEntry)).parents[2].rglob("*.py"), key=lambda item: "tensorrt" not in str(item)
    ):
        if not rest:
            break
        text = path.read_text()
        if rest.isdisjoint(re.findall(r"\w+", text)):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                rest.discard(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                rest.discard(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
                rest.discard(node.attr)
    return rest


def _unknown_texts(modules: dict[str, ast.Module]) -> list[str]:
    """Names written as text, for `binding` to look up: those below a class of the table must stand in it."""
    names = {use.name for use in TABLE}
    owners = {name.partition(".")[0] for name in names if "." in name}
    found = []
    for module, tree in modules.items():
        for node in ast.walk(tree) if module != "api_table" else ():
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            owner, dot, rest = node.value.partition(".")
            if dot and owner in owners and re.fullmatch(r"[\w.]*\w", rest) and node.value not in names:
                found.append(f'{module}.py:{node.lineno}: "{node.value}" is not in API_TABLE')
    return found


def _imported(tree: ast.Module) -> set[str]:
    """Names of modules and objects of other packages: their attributes are not ours to judge."""
    return {
        (item.asname or item.name).split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for item in node.names
        if not (isinstance(node, ast.Import) and item.name == "tensorrt")
    }

"""Public docstrings: do they name the errors raised, the axes and dtypes of arrays, and the units of numbers?

    python tools/docstrings.py [ROOT] [--list | --names]

Checked: `te.*`, and all public functions and methods in `runtime/`, `graph/` and `precision/`. By rule:

- `errors`: a docstring names in backticks each error of `trt_engine.errors` (or one above it in the tree) that its
  function raises itself, or through a function or a method of its class that it calls, one level down, uncaught.
- `arrays`: a function that takes or returns arrays names their axes or shapes, and their dtypes.
- `units`: a function that takes or returns a float says what it counts, in the name (`wait_ms`) or in the docstring.

With `--names`, of all docstrings of the package:

- `stale`: a word in backticks, lower-case letters alone, stands in the code of its module or is defined somewhere.
- `headless`: none begins with "Of".

Prints the share of docstrings that do, by rule and area; the exit code is 1 when one does not.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import keyword
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_NEVER = {
    "trt_engine.graph.dtype_breakdown.Parameters.__init__": "types that ONNX does not define are left out before",
    "trt_engine.graph.quant_placement.QuantizedGraph.title": "its targets are those of the table",
    "trt_engine.precision.formats.Format.bits": "the formats of the table have known dtypes",
    "trt_engine.precision.formats.QuantizedArray.nbytes": "the formats of the table have known dtypes",
}
"""Functions whose callees raise for values that they do not pass, and why they do not."""
AREAS = ("te", "runtime", "graph", "precision")
RULES = ("errors", "arrays", "units")
Function = ast.FunctionDef | ast.AsyncFunctionDef

_ARRAY = re.compile(r"\b(ndarray|NDArray\w*|Tensors|DeviceArray|Array|\w+Array)\b")
_AXES = re.compile(
    r"`\[[^\]`]+\]`|`\([A-Z][^)`]*\)`|`[A-Z0-9?]+(x[A-Z0-9?]+)+`|\b(shapes?|ax[ei]s|rows?|columns?|batch|channels?|dimensions?"
    r"|scalars?|flat|1-D|2-D|rank|signature)\b",
    re.IGNORECASE,
)
_DTYPES = re.compile(
    r"\b(dtypes?|u?int(4|8|16|32|64)?|b?float(8|16|32|64)?|fp(4|8|16|32)|bool(ean)?|signature)\b", re.IGNORECASE
)
_UNIT = re.compile(
    r"\b(ns|us|ms|seconds?|s|min|minutes|bytes?|[KMGT]i?B|bits?|Hz|FPS|per second|per cent|percentage|percentile|fractions?"
    r"|shares?|between 0 and 1|0 to 1|ratios?|factors?|relative|times|FLOPs?|FLOP/s|MACs?|multiply-adds|counts?|number of"
    r"|absolute values?|magnitudes?|units? of|scales?|tolerance|amax|exponents?)\b|%"
)
_SUFFIX = re.compile(
    r"(^|_)(ns|us|ms|s|seconds|bytes|nbytes|kib|mib|gib|pct|percent|fps|qps|hz|flops|macs|share|ratio|factor)$"
)


@dataclass(frozen=True)
class Name:
    """A public function or method, its documentation, and what each rule requires of it."""

    area: str
    place: str
    title: str
    doc: str
    errors: frozenset[str]
    has_arrays: bool
    has_units: bool

    def applies(self, rule: str) -> bool:
        return {"errors": bool(self.errors), "arrays": self.has_arrays, "units": self.has_units}[rule]

    def missing(self, rule: str, tree: dict[str, tuple[str, ...]]) -> str:
        """What the docstring does not say; empty where nothing is missing or the rule does not apply."""
        if not self.applies(rule):
            return ""
        if rule == "errors":
            named = set(re.findall(r"`(\w+)`", self.doc))
            return ", ".join(sorted(error for error in self.errors if not named & set(tree[error])))
        if rule == "arrays":
            wanted = [("axes or shape", _AXES), ("dtype", _DTYPES)]
            return ", ".join(what for what, pattern in wanted if not pattern.search(self.doc))
        return "" if _UNIT.search(self.doc) else "unit"


class Source:
    """The package's modules, as syntax trees."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = {
            ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__"): path
            for path in root.rglob("*.py")
        }
        self._parsed: dict[str, Module] = {}

    def module(self, name: str) -> Module | None:
        if name not in self.modules:
            return None
        if name not in self._parsed:
            self._parsed[name] = Module(self, self.modules[name])
        return self._parsed[name]

    @cached_property
    def errors(self) -> dict[str, tuple[str, ...]]:
        """The project's errors: name -> itself and what is above it."""
        module = self.module("trt_engine.errors")
        assert module is not None
        found: dict[str, tuple[str, ...]] = {}
        for name, node in module.classes.items():
            base = next((one.id for one in node.bases if isinstance(one, ast.Name)), "")
            if base == "Explained" or base in found:  # what TrtEngineError and Interrupted are
                found[name] = (name, *found.get(base, ()))
        return found


class Module:
    """Functions, classes and imports of one module."""

    def __init__(self, source: Source, path: Path) -> None:
        self.source, self.path = source, path
        self._raised: dict[tuple[Function, int], set[str]] = {}
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, Function)}
        self.classes = {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}
        self.imports = {
            alias.asname or alias.name: (node.module or "", alias.name)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }

    def resolve(
        self, call: ast.expr, owner: ast.ClassDef | None
    ) -> tuple[Module, Function, ast.ClassDef | None] | None:
        """The function that an expression calls, where its definition is clear from the text."""
        if isinstance(call, ast.Name):
            return self._member(call.id)
        if not isinstance(call, ast.Attribute) or not isinstance(call.value, ast.Name):
            return None
        if call.value.id in ("self", "cls") and owner is not None:
            found = _methods(owner).get(call.attr)
            return (self, found, owner) if found is not None else None
        if call.value.id in self.imports:
            module = self.source.module(".".join(self.imports[call.value.id]))
            return module._member(call.attr) if module is not None else None
        return None

    def _member(self, name: str) -> tuple[Module, Function, ast.ClassDef | None] | None:
        if name in self.functions:
            return self, self.functions[name], None
        if name in self.classes:
            owner = self.classes[name]
            made = _methods(owner).get("__init__") or _methods(owner).get("__post_init__")
            return (self, made, owner) if made is not None else None
        if name in self.imports:
            place, original = self.imports[name]
            module = self.source.module(place)
            return module._member(original) if module is not None and module is not self else None
        return None

    def raised(self, function: Function, owner: ast.ClassDef | None, depth: int = 1) -> set[str]:
        """The project's errors that leave a function."""
        if (function, depth) not in self._raised:
            found = self._raised[function, depth] = set()
            for statement in function.body:
                self._visit(statement, owner, depth, (), found)
        return self._raised[function, depth]

    def _visit(
        self, node: ast.AST, owner: ast.ClassDef | None, depth: int, caught: tuple[str, ...], found: set[str]
    ) -> None:
        if isinstance(node, Function | ast.ClassDef | ast.Lambda):
            return
        if isinstance(node, ast.Try):
            inside = caught + tuple(name for one in node.handlers if not _re_raises(one) for name in _caught(one.type))
            for statement in node.body:
                self._visit(statement, owner, depth, inside, found)
            for part in (*node.handlers, *node.orelse, *node.finalbody):
                self._visit(part, owner, depth, caught, found)
            return
        if isinstance(node, ast.With):
            for item in node.items:
                if isinstance(item.context_expr, ast.Call) and "suppress" in ast.unparse(item.context_expr.func):
                    caught += tuple(name for one in item.context_expr.args for name in _caught(one))
        errors: set[str] = set()
        if isinstance(node, ast.Raise) and node.exc is not None:
            errors = self._raised_by(node.exc, owner)
        elif isinstance(node, ast.Call) and depth and (called := self.resolve(node.func, owner)):
            module, function, other = called
            if function.name != "__post_init__" or node.args or node.keywords:  # settings by default contradict nothing
                errors = module.raised(function, other, depth - 1)
        found |= {name for name in errors if not {*self.source.errors[name], "Exception", "BaseException"} & {*caught}}
        for child in ast.iter_child_nodes(node):
            self._visit(child, owner, depth, caught, found)

    def _raised_by(self, raised: ast.expr, owner: ast.ClassDef | None) -> set[str]:
        """The class in `raise Class(...)` or `raise make_error(...)`."""
        what = raised.func if isinstance(raised, ast.Call) else raised
        if isinstance(what, ast.Name) and what.id in self.source.errors:
            return {what.id}
        called = self.resolve(what, owner)
        returned = ast.unparse(called[1].returns) if called is not None and called[1].returns is not None else ""
        return {returned} & self.source.errors.keys()


def _methods(owner: ast.ClassDef) -> dict[str, Function]:
    return {node.name: node for node in owner.body if isinstance(node, Function)}


def _caught(expression: ast.expr | None) -> Iterator[str]:
    """The names of exceptions in a handler: `except (A, B)`."""
    if expression is None:
        yield "BaseException"
        return
    for node in ast.walk(expression):
        if isinstance(node, ast.Name):
            yield node.id


def _re_raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) and node.exc is None for node in ast.walk(handler))


def _decorators(function: Function) -> set[str]:
    return {ast.unparse(one).rpartition(".")[2] for one in function.decorator_list}


def _is_public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__call__")


def public_names(source: Source) -> Iterator[Name]:
    """All public functions and methods of the checked areas."""
    package = source.module("trt_engine")
    assert package is not None
    given = {ast.unparse(node.targets[0]): node.value for node in package.tree.body if isinstance(node, ast.Assign)}
    verbs = {f"verbs.{verb}.run": verb for verb in ast.literal_eval(given["_VERBS"]).split()}
    table: dict[str, str] = ast.literal_eval(given["_NAMES"]) | verbs
    seen: set[str] = set()
    for place, names in table.items():
        for name in names.split():
            for found in _names_of(source, f"trt_engine.{place}", "te", {name}):
                seen.add(found.title)
                yield found
    for place in sorted(source.modules):
        area = place.split(".")[1] if "." in place else ""
        if area in AREAS:
            yield from (found for found in _names_of(source, place, area) if found.title not in seen)


def _names_of(source: Source, place: str, area: str, only: set[str] | None = None) -> Iterator[Name]:
    module = source.module(place) or source.module(f"{place}.__init__")
    assert module is not None, place
    for node in module.tree.body:
        if (
            not isinstance(node, Function | ast.ClassDef)
            or node.name.startswith("_")
            or (only and node.name not in only)
        ):
            continue
        if isinstance(node, Function):
            yield _name(module, place, area, node, None)
            continue
        for method in _methods(node).values():
            if _is_public(method.name) and not _decorators(method) & {"overload", "setter"}:
                yield _name(module, place, area, method, node)


def _name(module: Module, place: str, area: str, function: Function, owner: ast.ClassDef | None) -> Name:
    doc = ast.get_docstring(function) or ""
    if owner is not None and not doc:
        doc = _inherited(module, owner, function.name)
    if owner is not None and function.name in ("__init__", "__call__"):
        doc += f"\n{ast.get_docstring(owner) or ''}"
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    typed = [(one.arg, ast.unparse(one.annotation)) for one in arguments if one.annotation is not None]
    returned = ast.unparse(function.returns) if function.returns is not None else ""
    floats = [name for name, kind in typed if re.search(r"\bfloat\b", kind) and not _SUFFIX.search(name)]
    if re.search(r"\bfloat\b", returned) and not _SUFFIX.search(function.name):
        floats.append("return")
    title = f"{place}.{f'{owner.name}.' if owner is not None else ''}{function.name}"
    return Name(
        area, f"{module.path}:{function.lineno}", title, doc,
        frozenset() if title in _NEVER else frozenset(module.raised(function, owner)),
        any(_ARRAY.search(kind) for kind in (*(kind for _, kind in typed), returned)), bool(floats),
    )  # fmt: skip


def _inherited(module: Module, owner: ast.ClassDef, method: str) -> str:
    """The docstring of the method in a base class."""
    for base in owner.bases:
        name = ast.unparse(base)
        place, original = module.imports.get(name, ("", name))
        home = module.source.module(place) if place else module
        node = home.classes.get(original) if home is not None else None
        if node is not None and method in _methods(node):
            return ast.get_docstring(_methods(node)[method]) or ""
    return ""


def findings(source: Source, names: list[Name]) -> Iterator[str]:
    """`path:line: name: rule: what is missing`."""
    for name in names:
        for rule in RULES:
            if missing := name.missing(rule, source.errors):
                yield f"{name.place}: {name.title.removeprefix('trt_engine.')}: {rule}: {missing}"


_FOREIGN = {
    "dyn", "ftrt", "vtrt", "tensorrt_onnxparser_rtx", "get_converted_buffer", "resize_", "set_", "nohup", "h_out",
    "report_md", "audio_signal", "ast", "convert_to_mixed_precision", "ptrt", "stride", "launch__func_cache_config",
}  # fmt: skip
"""Names of other projects, and examples of names that users choose."""


def docstring_findings(source: Source) -> Iterator[str]:
    """`path:line: stale: name` and `path:line: headless: first words`, for every docstring of the package."""
    defined = (
        {part for name in source.modules for part in name.split(".")} | _FOREIGN | {*dir(builtins), *keyword.kwlist}
    )
    found: list[tuple[str, int, str, set[str]]] = []
    for path in source.modules.values():
        own: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Function | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute):
                defined.add(node.attr)
            elif isinstance(node, ast.AnnAssign):
                defined.add(ast.unparse(node.target))
            elif isinstance(node, ast.Name):
                own.add(node.id)
            elif isinstance(node, ast.arg | ast.keyword):
                own.add(node.arg or "")
            elif isinstance(node, ast.alias):
                own.update(f"{node.name}.{node.asname}".split("."))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                found.append((str(path), node.lineno, str(node.value.value), own))
                node.value.value = None  # the walk comes to it next, and it defines nothing
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 60:
                defined.update(re.findall(r"\w+", node.value))
    for place, line, text, own in found:
        for word in re.findall(r"(?<!`)`([a-z_]{3,})`(?!`)", text):
            if word not in own and word not in defined:
                yield f"{place}:{line}: stale: {word}"
        if text.startswith("Of "):
            yield f"{place}:{line}: headless: {text.splitlines()[0]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parents[1] / "src" / "trt_engine"
    parser.add_argument("root", nargs="?", type=Path, default=default)
    parser.add_argument("--list", action="store_true", help="every docstring that says too little")
    parser.add_argument("--names", action="store_true", help="`stale` and `headless` alone")
    args = parser.parse_args()
    source = Source(args.root)
    if args.names:
        found = list(docstring_findings(source))
        sys.stdout.write("".join(f"{line}\n" for line in found))
        return int(bool(found))
    names = list(public_names(source))
    found = list(findings(source, names))
    if args.list:
        sys.stdout.write("".join(f"{line}\n" for line in found))
    for area in (*AREAS, "all"):
        parts = []
        for rule in RULES:
            due = [one for one in names if area in (one.area, "all") and one.applies(rule)]
            done = sum(not one.missing(rule, source.errors) for one in due)
            parts.append(f"{rule} {done}/{len(due)}")
        sys.stdout.write(f"{area:10} {', '.join(parts)}\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

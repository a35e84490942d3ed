"""What expressions of a Python file may be, without running it: texts, and the words of command lines in any form;
and the precision that a library in front of TensorRT (Ultralytics, mmdeploy, torch2trt, Holoscan) requests.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trt_engine.verbs.migrate.rules import RuleSet
from trt_engine.verbs.migrate.shell import is_said
from trt_engine.verbs.migrate.source import Hit, line_before
from trt_engine.verbs.migrate.version_guards import last_name

_MOST, _DEPTH, _STEPS = 24, 6, 400_000
"""Values of one expression that are looked at, names that are followed one after the other, and steps in one file."""
_NONE: frozenset[str] = frozenset()
_SAME = frozenset(
    "str Path PurePath fspath which expanduser expandvars realpath abspath quote resolve as_posix".split()
)
"""Calls whose result stands for their argument, or the object they belong to, in a command."""
_STRIPS = ("strip", "rstrip", "lstrip", "replace", "lower", "substitute", "safe_substitute")
_LISTS = frozenset("Template dedent list tuple sorted split copy chain filter reversed set".split())
_CHANGES = frozenset("append extend insert extendleft appendleft add push".split())
_SUBCOMMANDS = ("convert", "run", "build", "inspect", "debug", "data", "template", "surgeon")
_FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Piece = tuple[str, ast.expr]
"""A text, and the expression it is written in."""


class Values:
    """The values that names are assigned anywhere in their function, or in the file; fields by their name alone."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: dict[tuple[int, str], list[ast.expr]] = defaultdict(list)
        """Scope and name -> what it is assigned; lists also what is appended."""
        self.fields: dict[str, list[ast.expr]] = defaultdict(list)
        self.functions: dict[str, list[ast.expr]] = defaultdict(list)
        """Function -> what it returns."""
        self.calls: dict[str, list[ast.Call]] = defaultdict(list)
        self.parameters: dict[tuple[int, str], tuple[str, int]] = {}
        """Scope and name -> its function, and its place in the call (-1: it takes all that are left)."""
        self.scopes: dict[ast.AST, tuple[int, ...]] = {}
        """The functions a name is used in, the inner one first, and the file (0)."""
        self._steps = 0
        self._known: dict[object, list[str]] = {}
        self._walk(tree, (0,), None, owner=False)

    def _walk(self, node: ast.AST, scope: tuple[int, ...], function: str | None, *, owner: bool) -> None:
        match node:
            case ast.Name() | ast.Attribute() | ast.Subscript():
                self.scopes[node] = scope
            case ast.Assign(targets, value):
                for target in targets:
                    self._assign(target, value, scope, owner)
            case ast.AnnAssign(target, _, ast.expr() as value) | ast.AugAssign(target, _, value):
                self._assign(target, value, scope, owner)
            case ast.NamedExpr(target, value):
                self._assign(target, value, scope, owner)
            case ast.For(target, value) | ast.comprehension(target, value):
                self._assign(target, value, scope, False)
            case ast.Return(ast.expr() as value) if function:
                self.functions[function].append(value)
            case ast.Call(func):
                self.calls[last_name(func) or ""].append(node)
                if isinstance(func, ast.Attribute) and func.attr in _CHANGES:
                    for value in node.args:
                        self._assign(func.value, value, scope, False)
        if isinstance(node, _FUNCTION):
            for item in ast.iter_child_nodes(node.args):
                self._walk(item, scope, function, owner=False)
            scope = (id(node), *scope)
            function = getattr(node, "name", None)
            self._parameters(node, scope[0], function or "", owner)
        for child in ast.iter_child_nodes(node):
            self._walk(child, scope, function, owner=isinstance(node, ast.ClassDef))

    def _assign(self, target: ast.expr, value: ast.expr, scope: tuple[int, ...], field: bool) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            same = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for at, item in enumerate(target.elts):
                self._assign(item, value.elts[at] if same else value, scope, field)  # type: ignore[attr-defined]
        elif isinstance(target, ast.Name):
            held = next((one for one in scope if (one, target.id) in self.names), scope[0])
            self.names[held, target.id].append(value)
            if field:
                self.fields[target.id].append(value)
        elif isinstance(target, ast.Attribute):
            self.fields[target.attr].append(value)

    def _parameters(self, node: _FUNCTION, scope: int, function: str, method: bool) -> None:
        places = [*node.args.posonlyargs, *node.args.args]
        for at, one in enumerate(places):
            self.parameters[scope, one.arg] = (function, at - method)
        for one, value in zip(places[::-1], node.args.defaults[::-1], strict=False):
            self.names[scope, one.arg].append(value)
        for one, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            self.parameters[scope, one.arg] = (function, 999)
            self.names[scope, one.arg] += [default] if default is not None else []
        if node.args.vararg is not None:
            self.parameters[scope, node.args.vararg.arg] = (function, -2 - len(places) + method)

    def of(self, node: ast.expr) -> list[ast.expr]:
        """What the name or field is assigned: in the nearest function, by its defaults, by calls."""
        if isinstance(node, ast.Attribute):
            return self.fields.get(node.attr, [])[:_MOST]
        if not isinstance(node, ast.Name):
            return []
        for scope in self.scopes.get(node, (0,)):
            found = list(self.names.get((scope, node.id), ()))
            if (place := self.parameters.get((scope, node.id))) is not None:
                for call in self.calls.get(place[0], ()) if place[0] else ():
                    found += [item.value for item in call.keywords if item.arg == node.id]
                    found += call.args[-2 - place[1] :] if place[1] <= -2 else call.args[place[1] :][: place[1] >= 0]
                return found[:_MOST]
            if found:
                return found[:_MOST]
        return []

    # -------------------------------------------------------------------------------- texts

    def _follow(self, node: ast.expr, seen: frozenset[str]) -> list[ast.expr]:
        """What a name stands for, once in a chain of names."""
        return [] if (last_name(node) or "") in seen or len(seen) >= _DEPTH else self.of(node)

    def texts(self, node: ast.expr, seen: frozenset[str] = _NONE) -> list[str]:
        """The texts that an expression may be; `{}` for what is not known."""
        self._steps += 1
        key = (
            (self.scopes.get(node), ast.dump(node)) if not seen and isinstance(node, ast.Name | ast.Attribute) else None
        )
        if key not in self._known or key is None:
            found = self._texts(node, seen) if self._steps < _STEPS else ["{}"]
            self._known[key] = list(dict.fromkeys(itertools.islice(found, 20 * _MOST)))[:_MOST] or ["{}"]
        return self._known[key]

    def _texts(self, node: ast.expr, seen: frozenset[str]) -> Iterable[str]:
        def both(left: ast.expr, right: ast.expr, sign: str = "") -> Iterator[str]:
            pairs = itertools.product(self.texts(left, seen), self.texts(right, seen))
            return (f"{one}{sign}{other}" for one, other in itertools.islice(pairs, _MOST))

        match node:
            case ast.Constant(value):
                return [str(value)]
            case ast.FormattedValue(value) | ast.Await(value) | ast.Starred(value):
                return self.texts(value, seen)
            case ast.JoinedStr(values):
                parts = [self.texts(value, seen)[:3] for value in values]
                return map("".join, itertools.islice(itertools.product(*parts), _MOST))
            case ast.BinOp(left, ast.Add(), right):
                return both(left, right)
            case ast.BinOp(left, ast.Div(), right):
                return both(left, right, "/")
            case ast.BinOp(left, ast.Mod(), _):
                return (re.sub(r"%[-\d.]*[a-z]", "{}", text) for text in self.texts(left, seen))
            case ast.IfExp(_, body, other):
                return [*self.texts(body, seen), *self.texts(other, seen)]
            case ast.BoolOp(_, values):
                return [text for value in values for text in self.texts(value, seen)]
            case ast.Name() | ast.Attribute() if found := self._follow(node, seen):
                inner = seen | {last_name(node) or ""}
                return [text for value in found for text in self._item_texts(value, inner)]
            case ast.Subscript(value) if len(seen) < _DEPTH:
                inner = seen | {f"[{len(seen)}]"}
                return [text for one in self._items(value) for text in self.texts(one, inner)] or ["{}"]
            case ast.Call(func, args):
                return self._call_texts(func, args, seen)
        return ["{}"]

    def _item_texts(self, node: ast.expr, seen: frozenset[str]) -> list[str]:
        """Those of the items, where the name is one of a loop."""
        items = list(self._items(node)) if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict) else [node]
        if isinstance(node, ast.Name | ast.Call | ast.Subscript):
            items = [*self._items(node)] or items
        return [text for item in items for text in self.texts(item, seen)]

    def _call_texts(self, func: ast.expr, args: Sequence[ast.expr], seen: frozenset[str]) -> Iterable[str]:
        name, owner = last_name(func) or "", func.value if isinstance(func, ast.Attribute) else None
        if name in self.functions and name not in seen and len(seen) < _DEPTH:
            return [text for value in self.functions[name] for text in self.texts(value, seen | {name})]
        if name == "join" and owner is not None and isinstance(owner, ast.Attribute | ast.Name):  # os.path.join
            return ["/".join(self.texts(item, seen)[0] for item in args)]
        if name in ("upper", "lower", "strip", "title") and owner is not None:
            return [str(getattr(text, name)()) for text in self.texts(owner, seen)]
        if name in ("get", "getenv", "pop", "setdefault"):
            inner = seen | {f"[{len(seen)}]"}
            few = owner is not None and len(seen) < _DEPTH
            held = [text for one in self._items(owner) for text in self.texts(one, inner)] if few and owner else []
            return [*held, *(text for item in args[1:2] for text in self.texts(item, seen))] or ["{}"]
        if name == "format" and owner is not None:
            return self.texts(owner, seen)
        if name in _SAME and (args or owner is not None):
            return self.texts(args[0] if args else owner, seen)  # type: ignore[arg-type]
        return ["{}"]

    def _items(self, node: ast.expr, names: int = 3, *, keys: bool = True) -> Iterator[ast.expr]:
        """The items of a list and the values of a dictionary, also its `keys`, by whatever name."""
        self._steps += 1
        names = names if self._steps < _STEPS else 0
        match node:
            case ast.List(items) | ast.Tuple(items) | ast.Set(items):
                yield from items
            case ast.Dict(names_of, values):
                yield from (item for item in (*(names_of if keys else ()), *values) if item is not None)
            case ast.Subscript(value) if names:
                for one in self._items(value, names - 1, keys=False):
                    yield from [*self._items(one, names - 1, keys=keys)] or [one]
            case ast.Call(ast.Name("dict"), _, keywords):
                yield from (item.value for item in keywords)
            case ast.Call(ast.Attribute(owner), _) | ast.Call(_, [owner]) if names:
                yield from self._items(owner, names - 1, keys=keys)
            case ast.Name() | ast.Attribute() if names:
                for value in self.of(node):
                    yield from self._items(value, names - 1, keys=keys)

    # -------------------------------------------------------------------------------- commands

    def pieces(self, node: ast.expr, seen: frozenset[str] = _NONE, *, within: bool = False) -> Iterator[Piece]:
        """The command that a list or a text gives, in order: each piece with the expression it is written in; every choice
        one after the other, a blank between the items of a list. `within` a text, nothing separates them."""
        self._steps += 1
        if self._steps > _STEPS:
            return
        match node:
            case ast.Constant(str(text)):
                yield text, node
            case ast.JoinedStr([ast.Constant(str(first)), *_]) if first.startswith("-") and " " not in first:
                yield from ((f"{text} ", node) for text in self.texts(node, seen))
            case ast.JoinedStr(values):
                for value in values:
                    yield from self.pieces(value, seen, within=True)
            case ast.FormattedValue(value) | ast.Starred(value) | ast.Await(value):
                yield from self.pieces(value, seen, within=within)
            case ast.BinOp(left, ast.Add(), right):
                yield from self.pieces(left, seen, within=True)
                if _is_list(left) or _is_list(right):
                    yield " ", node
                yield from self.pieces(right, seen, within=True)
            case ast.BinOp(left, ast.Mod(), right):
                given = right.elts if isinstance(right, ast.Tuple) else [right]
                yield from self._filled(left, r"%()[-\d.]*[a-z]", given, {}, seen)
            case ast.BinOp(left, ast.Mult(), right):
                yield from self.pieces(left if _is_list(left) else right, seen)
            case ast.BinOp(left, ast.Div(), right):
                yield self.texts(node)[0], node
            case ast.List(items) | ast.Tuple(items) | ast.Set(items):
                yield from self._apart(items, seen)
            case ast.Dict(_, values) | ast.BoolOp(_, values):
                yield from self._apart(values, seen)
            case ast.IfExp(_, body, other):
                yield from self._apart([body, other], seen)
            case ast.ListComp(item) | ast.GeneratorExp(item) | ast.SetComp(item):
                yield from self.pieces(item, seen)
            case ast.Name() | ast.Attribute():
                found = self._follow(node, seen)
                if found:
                    yield from self._choices(found, seen | {last_name(node) or ""})
                elif (last_name(node) or "") not in seen:
                    yield "trtexec" if re.search("trtexec", last_name(node) or "", re.IGNORECASE) else "{}", node
            case ast.Subscript(value):
                found = list(self._items(value, keys=False))
                few = found and len(seen) < _DEPTH
                yield from self._apart(found, seen | {f"[{len(seen)}]"}) if few else iter([("{}", node)])
            case ast.Call(func, args):
                name, owner = last_name(func) or "", func.value if isinstance(func, ast.Attribute) else None
                if name in self.functions and name not in (*_LISTS, *seen) and len(seen) < _DEPTH:
                    yield from self._choices(self.functions[name], seen | {name})
                elif name == "join" and isinstance(owner, ast.Constant) and args:
                    yield from self.pieces(args[0], seen)
                elif name == "format" and owner is not None:
                    named = {item.arg: item.value for item in node.keywords if item.arg is not None}
                    yield from self._filled(owner, r"\{(\w*)[^{}]*\}", args, named, seen)
                elif name in _STRIPS and owner is not None:
                    yield from self.pieces(owner, seen, within=True)
                elif name in _LISTS and (args or owner is not None):
                    inner = owner if owner is not None and (name == "split" or not args) else args[0]
                    inner = args[0] if last_name(owner) == "shlex" and args else inner
                    yield from self.pieces(inner, seen) if inner is not None else ()
                else:
                    texts = self.texts(node, seen)
                    yield next((text for text in texts if tool_of(text)), texts[0]), node
            case _:
                yield "{}", node

    def _filled(
        self, text: ast.expr, hole: str, given: Sequence[ast.expr], named: Mapping[str, ast.expr], seen: frozenset[str]
    ) -> Iterator[Piece]:
        """A text with what is put into its holes, in order or by name."""
        at = 0
        for part, node in self.pieces(text, seen):
            for place, one in enumerate(re.split(hole, part)):
                if place % 2 == 0:
                    yield one, node
                    continue
                value = named.get(one) or next(iter(given[int(one) if one.isdecimal() else at :]), None)
                at += not one
                yield from self.pieces(value, seen, within=True) if value is not None else iter([("{}", node)])

    def _choices(self, nodes: Sequence[ast.expr], seen: frozenset[str]) -> Iterator[Piece]:
        """What is assigned to a name, one after the other: commands of their own, or more words of the first."""
        for node in nodes[: 4 * _MOST]:
            found = list(itertools.islice(self.pieces(node, seen), 400))
            first, _, rest = "".join(text for text, _ in found).strip().partition(" ")
            own = re.match(r"[\w./~]", first) and rest.strip() and first not in _SUBCOMMANDS
            yield (" ; " if own else " "), node
            yield from found[:-1]
            yield from ((text.rstrip(), one) for text, one in found[-1:])

    def _apart(self, nodes: Iterable[ast.expr], seen: frozenset[str]) -> Iterator[Piece]:
        for node in itertools.islice(nodes, 4 * _MOST):
            yield " ", node
            yield from self.pieces(node, seen)


def tool_of(word: str) -> str | None:
    """The program that a word names, by itself or with its path."""
    name = re.split(r"[\\/]", word.strip("\"'"))[-1].lower().removesuffix(".exe")
    return name if name in ("trtexec", "polygraphy") else None


def _is_list(node: ast.expr) -> bool:
    return isinstance(node, ast.List | ast.Tuple | ast.ListComp) or (
        isinstance(node, ast.BinOp) and (_is_list(node.left) or _is_list(node.right))
    )


_YOLO = re.compile(
    r"\byolo\s[^\n;&|]*\bformat=[\"']?(?:engine|tensorrt)\b[^\n;&|]*"
    r"|\bexport\.py\s[^\n;&|]*--include[ =][^\n;&|]*\b(?:engine|trt)\b[^\n;&|]*"
    r"|\bbuild_image_encoder_engine\s[^\n;&|]*"
)
_WORD = re.compile(r"(?<!\S)(?:--)?(half|int8|fp16_mode)(?:=(\w+))?(?!\S)", re.IGNORECASE)
_HOLOSCAN = re.compile(r"^[ \t]*enable_fp16[ \t]*:[ \t]*[\"']?true\b", re.MULTILINE | re.IGNORECASE)
_OPTION = re.compile(
    r"\b(trt_(?:fp16|bf16|int8)_enable|ORT_TENSORRT_(?:FP16|BF16|INT8)_ENABLE)[\"']?"
    r"(?:\s*[|=:]|[ \t]*(?:\n[ \t]*|,[ \t]*)[\"']?value[\"']?:)\s*[\"']?(?:1|true)\b",
    re.I,
)
_OFF = ("0", "false", "none", "no")


def scan_wrappers(text: str, rules: RuleSet) -> Iterator[Hit]:
    """What command lines and configurations ask of such a library."""
    rule = rules.by_id.get("wrapper-precision")
    if rule is not None:
        for command in _YOLO.finditer(text):
            if "predict" not in command[0] and not is_said(line_before(text, command.start())):
                for found in _WORD.finditer(text, *command.span()):
                    if (found[2] or "true").lower() not in _OFF:
                        yield Hit(rule, *found.span())
        if re.search(r"backend[ \t]*:[ \t]*[\"']?(?:trt|tensorrt)\b", text):
            for found in _HOLOSCAN.finditer(text):
                yield Hit(rule, found.start() + len(found[0]) - len(found[0].lstrip()), found.end())
    yield from scan_options(text, rules)


def scan_options(text: str, rules: RuleSet) -> Iterator[Hit]:
    """Options of ONNX Runtime's provider that are set in a text of any language."""
    if (option := rules.by_id.get("ort-precision-option")) is not None:
        for found in _OPTION.finditer(text):
            said = is_said(line_before(text, found.start()))
            if "value" in found[0] or not said:  # `- name: OPTION`, and its value below
                yield Hit(option, *found.span())


def asked_precision(call: ast.Call, text: str) -> ast.keyword | None:
    """The argument of a call that requests a lower precision; `text` is the whole file."""
    name = last_name(call.func)
    given = {item.arg: item for item in call.keywords if item.arg is not None}
    if (found := given.get("enabled_precisions")) is not None and "torch_tensorrt" in text:
        low = {"half", "float16", "bfloat16", "int8", "float8_e4m3fn", "fp16"}
        return found if any(last_name(one) in low for one in ast.walk(found.value)) else None
    for key in ("half", "int8"):
        if _format(given.get("format")) in ("engine", "tensorrt") and _is_set(given.get(key)):
            return given[key]
    for key in [name for name in ("fp16_mode", "int8_mode") if _is_set(given.get(name))]:
        near = (
            name in ("torch2trt", "TRTModule")
            or "import torch2trt as" in text
            or re.search(rf"^\s*from [\w.]*(?:tensorrt|trt)\b[\w.]* import [^\n]*\b{name}\b", text, re.MULTILINE)
            or (name == "dict" and re.search(r"[\"']tensorrt|tensorrt_config", text))
        )
        if near:
            return given[key]
    if "holoscan" in text and _format(given.get("backend")) == "trt" and _is_set(given.get("enable_fp16")):
        return given["enable_fp16"]
    found = given.get("precision_mode")
    if found is not None and re.search("Trt|CONVERSION_PARAMS", ast.unparse(call.func)):
        return None if "FP32" in (last_name(found.value), _text(found.value).upper()) else found
    for key in ("trt_fp16_enable", "trt_bf16_enable", "trt_int8_enable"):
        if _is_set(given.get(key)):
            return given[key]
    return None


def _text(node: ast.AST) -> str:
    return str(node.value).lower() if isinstance(node, ast.Constant) else ""


def _format(item: ast.keyword | None) -> str:
    return _text(item.value) if item is not None else ""


def _is_set(item: ast.keyword | None) -> bool:
    return item is not None and isinstance(item.value, ast.Constant) and bool(item.value.value)

"""Removed names in Python, through import aliases and the types of objects; command lines and options in its strings."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping

from trt_engine.migration import requirements, shell, wrappers
from trt_engine.migration.api_types import AMBIGUOUS, owner_classes, returned_type, type_of_name
from trt_engine.migration.rules import Rule, RuleSet
from trt_engine.migration.source import Edit, Hit, Source
from trt_engine.migration.version_guards import VersionGuards, last_name

_MODULES = ("tensorrt", "tensorrt_bindings", "tensorrt_lean", "tensorrt_dispatch")
_OTHER = "another library's"
"""In place of a class of TensorRT."""
_LAZY = ("import_module", "lazy_import", "__import__", "try_import", "importorskip", "LazyImport")
_NOT_OBJECTS = frozenset("self cls args opt opts FLAGS flags params options kwargs hparams".split())
_OTHERS = frozenset("torch torchvision tensorflow keras onnxruntime numpy sqlalchemy transformers argparse".split())
"""Libraries whose objects have members of the same names, and are never TensorRT's."""
_SAY = frozenset("print debug info warning error exception critical echo secho write".split())
"""Calls whose text is for people."""
_SWITCHED = frozenset(
    "trt_fp16_enable trt_bf16_enable trt_int8_enable "
    "trt_int8_use_native_calibration_table trt_layer_norm_fp32_fallback".split()
)
_EXPLICIT_BATCH = "NetworkDefinitionCreationFlag.EXPLICIT_BATCH"


_UNDECODED = {0xDC00 + byte: "?" for byte in range(128, 256)}
"""Bytes that are not UTF-8, as `surrogateescape` keeps them: one character and one byte each, as what is parsed for them."""


def scan_python(source: Source, rules: RuleSet) -> list[Hit]:
    """What the rules find in a Python file; `SyntaxError` for one that does not parse."""
    if not rules.concern("python", source.text):
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # escapes in people's strings
        tree = ast.parse(source.text.translate(_UNDECODED))
    scan = _Scan(source, rules, tree)
    scan.visit(tree)  # learns what attributes of `self` hold
    scan.hits.clear()
    scan.visit(tree)
    return list(scan.hits.values())


class _Scan(ast.NodeVisitor):
    """One pass; types are those of the last assignment before, attributes those of any."""

    def __init__(self, source: Source, rules: RuleSet, tree: ast.Module) -> None:
        self.tree = tree
        self.source, self.rules, self.hits = source, rules, dict[tuple[str, int], Hit]()
        self.modules: set[str] = set()
        """Names that the module is bound to: `trt`."""
        self.imported: dict[str, str] = {}
        """Names bound to members of it: `Flag` -> `BuilderFlag`."""
        self.polygraphy: set[str] = set()
        self.others: set[str] = set()
        """Names bound to other libraries and their members."""
        self.aliases: dict[str, str] = {}
        """Names assigned to its classes, `F = trt.BuilderFlag`, and to the module itself (empty)."""
        self.types: dict[str, str] = {}
        self.attributes: dict[str, str] = {}
        self.handled: set[ast.AST] = set()
        self.own_methods = {
            item.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body
            if isinstance(item, ast.FunctionDef)
        }  # fmt: skip
        self.calls_trtexec = bool(re.search(r"^[^#\n]*trtexec", source.text, re.IGNORECASE | re.MULTILINE))
        self.own_classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        known = " ".join(rule.replacement for rule in rules.rules)
        self.guards = VersionGuards(tree, rules.target, rules.owners["python"], known)

    # -------------------------------------------------------------------------------- imports, scopes, branches

    def visit_Import(self, node: ast.Import) -> None:
        for item in node.names:
            if _first_part(item.name) in _OTHERS:
                self.others.add(_first_part(item.asname or item.name))
            if item.name in _MODULES:
                self.modules.add(item.asname or item.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if _first_part(node.module or "") in _OTHERS and not node.level:
            self.others |= {item.asname or item.name for item in node.names}
            return
        for item in node.names:
            name = item.asname or item.name
            if item.name == "*" and node.module in _MODULES:
                self.imported |= {
                    one: one for one in map(_first_part, self.rules.python) if one not in self.own_classes
                }
            elif item.name in _MODULES:  # from polygraphy.mod import tensorrt
                self.modules.add(name)
            elif node.module in _MODULES:
                self.imported[name] = item.name
                if (rule := self.rules.python.get(item.name)) is not None:
                    self._add(rule, item)
            elif (
                node.module
                and node.module.split(".")[0] == "polygraphy"
                and item.name in ("CreateConfig", "create_config", "Calibrator")
            ):
                self.polygraphy.add(name)
            elif item.name == "trt" and node.module != "polygraphy.backend":
                self.modules.add(name)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self.types, self.aliases
        self.types, self.aliases = dict(self.types), dict(self.aliases)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.types.pop(argument.arg, None)
            self.aliases.pop(argument.arg, None)
            kind = self._api_name(argument.annotation) if argument.annotation is not None else None
            if kind is not None:
                self.types[argument.arg] = kind
        self.generic_visit(node)
        self.types, self.aliases = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        result = self.guards.evaluate(node.test)
        self.visit(node.test)
        for value, branch in ((True, node.body), (False, node.orelse)):
            if result is not (not value):
                for item in branch if isinstance(branch, list) else [branch]:
                    self.visit(item)

    visit_IfExp = visit_If  # noqa: N815

    def visit_Try(self, node: ast.Try) -> None:
        caught = {name for handler in node.handlers if handler.type is not None for name in _names(handler.type)}
        both = "AttributeError" in caught  # one way for each of two releases
        for item in (*(() if both else (*node.body, *node.handlers)), *node.orelse, *node.finalbody):
            self.visit(item)

    def visit_With(self, node: ast.With) -> None:
        if any("suppress" in (names := _names(item.context_expr)) and "AttributeError" in names for item in node.items):
            return
        self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> None:
        """Statements in order; those after a branch that always leaves the block do not run."""
        for _, value in ast.iter_fields(node):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):
                    self.visit(item)
                    if isinstance(item, ast.If) and self.guards.evaluate(item.test) and _leaves(item.body):
                        break

    # -------------------------------------------------------------------------------- types

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._learn(target, node.value)
            if isinstance(target, ast.Attribute):
                self._check_write(node, target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if (kind := self._api_name(node.annotation)) is not None:
            self._set_type(node.target, kind)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._learn(node.optional_vars, node.context_expr)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        if self._type(node.iter) == "INetworkDefinition":
            self._set_type(node.target, "ILayer")
        self.generic_visit(node)

    def _learn(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(value, ast.Call) and last_name(value.func) in _LAZY:
            if any(
                isinstance(item, ast.Constant) and str(item.value).startswith("tensorrt") and item.value in _MODULES
                for item in value.args
            ):
                self.modules |= set(_names(target))
            return
        if isinstance(target, ast.Name):
            name = self._api_name(value) if isinstance(value, ast.Name | ast.Attribute) else None
            self.aliases.pop(target.id, None)
            if name is not None and (not name or name[0].isupper()):
                self.aliases[target.id] = name
        other = isinstance(value, ast.Call) and _root(value.func) in self.others
        self._set_type(target, _OTHER if other else self._type(value, hint=False))

    def _set_type(self, target: ast.expr, kind: str | None) -> None:
        if isinstance(target, ast.Name):
            if kind is None:
                self.types.pop(target.id, None)
            else:
                self.types[target.id] = kind
        elif isinstance(target, ast.Attribute) and kind == _OTHER:
            self.attributes.setdefault(target.attr, kind)
        elif isinstance(target, ast.Attribute) and kind is not None:
            self.attributes[target.attr] = kind

    def _type(self, node: ast.expr, *, hint: bool = True) -> str | None:
        """The class of TensorRT that a value is of; `hint` also by its name."""
        match node:
            case ast.Name(name):
                return self.types.get(name) or (type_of_name(name) if hint else None)
            case ast.Attribute(_, name):
                return self.attributes.get(name) or (type_of_name(name) if hint else None)
            case ast.Call(func):
                api = self._api_name(func)
                if api is not None:
                    return returned_type(api) or (api if "." not in api else None)
                if isinstance(func, ast.Attribute) and (
                    self._type(func.value) not in (None, _OTHER) or func.attr == "create_execution_context"
                ):
                    return returned_type(func.attr)
                return None
            case ast.Subscript(value) if self._type(value) == "INetworkDefinition":
                return "ILayer"
            case ast.BoolOp(_, values):
                return self._type(values[-1], hint=hint)
        return None

    def _api_name(self, node: ast.expr) -> str | None:
        """`BuilderFlag.FP16` of `trt.BuilderFlag.FP16`, by whatever names."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # an annotation in quotes
            head, _, rest = node.value.partition(".")
            return rest if head in self.modules else None
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id in self.aliases:
            return ".".join(filter(None, (self.aliases[node.id], *parts)))
        if isinstance(node, ast.Name) and node.id in self.modules:
            return ".".join(parts)
        if isinstance(node, ast.Name) and node.id in self.imported:
            return ".".join((self.imported[node.id], *parts))
        if len(parts) > 1 and parts[0] in self.modules:  # mod.trt.BuilderFlag
            return ".".join(parts[1:])
        return None

    # -------------------------------------------------------------------------------- rules

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node in self.handled or not (self.modules or self.imported):
            self.visit(node.value)
            return
        name = self._api_name(node)
        rule = self.rules.python.get(name) if name is not None else None
        if rule is not None and name is not None:
            self._add(rule, node, edits=self._rename(rule, node, name))
        elif name is None and (found := self._member(node)) is not None:
            rule, name = found
            self._add(rule, node, edits=self._rename(rule, node, name))
        self.visit(node.value)

    def _member(self, node: ast.Attribute) -> tuple[Rule, str] | None:
        """The rule of a removed member, and its full name, where the object may have it."""
        owners = self.rules.owners["python"].get(node.attr)
        if owners is None or (isinstance(node.value, ast.Name) and node.value.id in _NOT_OBJECTS):
            return None
        kind = self._type(node.value, hint=False)
        if kind is None:
            kind = self._type(node.value)
            if kind is None or not set(owner_classes(kind)) & set(owners):
                if node.attr in AMBIGUOUS or node.attr in self.own_methods:
                    return None
                kind = owners[0]
        owner = next((one for one in owner_classes(kind) if one in owners), None)
        return (self.rules.python[f"{owner}.{node.attr}"], f"{owner}.{node.attr}") if owner else None

    def _check_write(self, statement: ast.Assign, target: ast.Attribute) -> None:
        """Assignments: properties that can only be read now, and those that a call replaces."""
        for name, rule in self.rules.python_writes.items():
            owner, _, member = name.partition(".")
            typed = owner in owner_classes(self._type(target.value) or "")
            value = self._api_name(statement.value) or ""
            by_value = member == "dtype" and bool(re.fullmatch(r"(DataType\.\w+|b?float\w+|u?int\w+|fp\w+)", value))
            if member == target.attr and (
                typed or (by_value and self._type(target.value) is None and _is_tensor(target.value))
            ):
                self._add(rule, target)
        found = self._member(target) if self.modules else None
        if found is not None and found[0].id == "workspace-size" and len(statement.targets) == 1:
            start, end = self._end(target.value), self._start(statement.value)
            module = sorted(self.modules)[0]
            call = f".set_memory_pool_limit({module}.MemoryPoolType.WORKSPACE, "
            close = self._end(statement)
            self._add(found[0], target, edits=(Edit(start, end, call), Edit(close, close, ")")))
            self.handled.add(target)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        inner = node.right.args[0] if isinstance(node.right, ast.Call) and len(node.right.args) == 1 else node.right
        rule = self.rules.python.get(_EXPLICIT_BATCH)
        if rule is not None and isinstance(node.op, ast.LShift) and self._api_name(inner) == _EXPLICIT_BATCH:
            self._add(rule, inner, edits=(Edit(self._start(node), self._end(node), "0"),))
            self.handled.add(inner)
        if isinstance(node.op, ast.Mod) and shell.is_command(_text_of(node.left)):
            self._check_options([node.right, *self._values_of([node.right])])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if last_name(node.func) in _SAY:
            self.handled |= set(node.args)
        if (asked := wrappers.asked_precision(node, self.source.text)) is not None:
            of_provider = (asked.arg or "").startswith("trt_")
            self._add_id("ort-precision-option" if of_provider else "wrapper-precision", asked)
        if method in ("append", "extend") and self.calls_trtexec:
            self._check_options([*node.args, *self._values_of(node.args)])
        elif self.calls_trtexec:  # what is passed on to a wrapper of trtexec
            self._check_options(self._values_of(item for item in node.args if isinstance(item, ast.Starred)))
        if method == "format" and isinstance(node.func, ast.Attribute) and shell.is_command(_text_of(node.func.value)):
            self._check_options([*node.args, *self._values_of(node.args)])
        trt = bool(self.modules or self.imported)
        if trt and method == "create_network" and node.args and _literal_mask(node.args[0]) > 1:
            self._add_id("network-flag-literal", node.args[0])
        if trt and method in ("add_quantize", "add_dequantize") and len(node.args) == 2 and not node.keywords:
            self._add_id("quantize-output-type", node)
        if trt and isinstance(node.func, ast.Attribute) and method == "create_execution_context_without_device_memory":
            self._check_context(node, node.func)
        if method in ("get_creator", "get_plugin_creator") and node.args and isinstance(node.args[0], ast.Constant):
            self._check_string(node.args[0], shipped=True)
        if trt and isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2:
            enum, name = self._api_name(node.args[0]), node.args[1]
            values = [name.value] if isinstance(name, ast.Constant) else self._loop_values(name)
            for value in values if enum else ():
                if (rule := self.rules.python.get(f"{enum}.{value!s}")) is not None:
                    self._add(rule, name)
        if self.polygraphy and last_name(node.func) in self.polygraphy:
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                rule = self.rules.create_config.get(keyword.arg or "")
                if rule is not None and not off:
                    self._add(rule, keyword)
            if last_name(node.func) == "Calibrator":
                self._add_id("int8-calibrator", node.func)
        self.generic_visit(node)

    def _loop_values(self, name: ast.expr) -> list[object]:
        """The constants that a loop variable takes, in any loop of the file."""
        if not isinstance(name, ast.Name):
            return []
        loops = (node for node in ast.walk(self.tree) if isinstance(node, ast.For | ast.comprehension))
        items = [
            item
            for loop in loops
            if isinstance(loop.target, ast.Name) and loop.target.id == name.id
            for item in (loop.iter.elts if isinstance(loop.iter, ast.Tuple | ast.List | ast.Set) else ())
        ]
        return [item.value for item in items if isinstance(item, ast.Constant)]

    def _check_context(self, node: ast.Call, func: ast.Attribute) -> None:
        rule = self.rules.by_id.get("context-without-device-memory")
        if rule is None or not self.modules or node.args:
            return
        strategy = f"{sorted(self.modules)[0]}.ExecutionContextAllocationStrategy.USER_MANAGED"
        text = f"create_execution_context({strategy})"
        self._add(rule, func, edits=(Edit(self._end(func) - len(func.attr), self._end(node), text),))
        self.handled.add(func)

    # -------------------------------------------------------------------------------- strings

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if self.calls_trtexec:
            self._check_options([node.value, *self._values_of([node.value])])
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else None
            off = isinstance(value, ast.Constant) and str(value.value) in ("False", "0", "false")
            removed = re.search("cublas|cudnn", _text_of(value), re.IGNORECASE)
            if key is not None and ((name in _SWITCHED and off) or (name == "trt_tactic_sources" and not removed)):
                self.handled.add(key)
            low = {"half", "float16", "bfloat16", "int8"} & set(_names(value))
            if name == "enabled_precisions" and low and "torch_tensorrt" in self.source.text:
                self._add_id("wrapper-precision", value)
        self.generic_visit(node)

    def _values_of(self, nodes: Iterable[ast.expr], depth: int = 2) -> list[ast.expr]:
        """What the variables and fields in these places are assigned anywhere in the file, and what those are made of."""
        names = {
            last_name(one) for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name | ast.Attribute)
        }
        names -= {None, "self"}
        assigned = [
            node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and node.value is not None
            and any(
                last_name(one) in names for one in (node.targets if isinstance(node, ast.Assign) else [node.target])
            )
        ]
        return assigned + (self._values_of(assigned, depth - 1) if depth and assigned else [])

    def _check_options(self, nodes: Iterable[ast.expr]) -> None:
        """Options that a list or a text of a trtexec command gets later."""
        for node in nodes:
            for item in _items(node):
                texts = [
                    one.value for one in ast.walk(item) if isinstance(one, ast.Constant) and isinstance(one.value, str)
                ]
                for word in (word for text in texts for word in text.split()):
                    if word.startswith("--") and (rule := self.rules.trtexec.get(word.partition("=")[0])) is not None:
                        self._add(rule, item)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        self.handled |= {one for one in sides if isinstance(one, ast.Constant) and "--" in str(one.value)}
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._check_string(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._check_command(node, _text_of(node))
        if shell.is_command(_text_of(node)):
            held = [value for value in node.values if isinstance(value, ast.FormattedValue)]
            self._check_options([*held, *self._values_of(held)])
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.visit(node.value)

    def visit_List(self, node: ast.List | ast.Tuple) -> None:
        words = [_text_of(item) for item in node.elts]
        words = [
            "trtexec" if word == "{}" and _is_trtexec(item) else word
            for word, item in zip(words, node.elts, strict=True)
        ]
        command = shell.command_of_words(words, self._start(node), self._end(node))
        for hit in shell.scan_command(command, self.rules) if command else ():
            self._add(hit.rule, node, values=hit.values)
        if command is not None:
            self._check_options(item for item in node.elts if isinstance(item, ast.IfExp))
            self._check_options(self._values_of(item for item in node.elts if isinstance(item, ast.Starred)))
        joined = " ".join(words)
        if "pip install" in joined or "uv add" in joined:
            for hit in requirements.scan_installs(joined, self.rules):
                self._add(hit.rule, node, values=hit.values)
        self.generic_visit(node)

    visit_Tuple = visit_List  # noqa: N815

    def _check_string(self, node: ast.Constant, *, shipped: bool = False) -> None:
        rule = self.rules.strings.get(str(node.value)) if node not in self.handled else None
        if rule is not None and shipped is (rule.id == "shipped-plugin"):
            self._add(rule, node)
        self._check_command(node, str(node.value))

    def _check_command(self, node: ast.expr, text: str) -> None:
        if node in self.handled:
            return
        if (
            "install" in text
            and "tensorrt" in text
            and re.match(r"[!%\s]*(?:\S*(?:pip|uv|conda|python)\S*\s|install\s)", text)
        ):
            full = text if not text.startswith("install") else f"pip {text}"
            for hit in requirements.scan_installs(full, self.rules):
                self._add(hit.rule, node, values=hit.values)
        if "tensorrt" in text and re.search(r"\btensorrt[-_](?:fp16|int8)\S*\.py$", text):
            self._add_id("wrapper-precision", node)
        if "--" in text and shell.is_command(text):
            for hit in shell.scan_text(text, self.rules):
                self._add(hit.rule, node, values=hit.values)

    # -------------------------------------------------------------------------------- places

    def _add_id(self, rule: str, node: ast.expr | ast.keyword) -> None:
        if rule in self.rules.by_id:
            self._add(self.rules.by_id[rule], node)

    def _add(
        self, rule: Rule, node: ast.expr | ast.alias | ast.keyword, *, edits: tuple[Edit, ...] = (),
        values: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        start = self._start(node)
        if isinstance(node, ast.Attribute):
            start = self._end(node) - len(node.attr)
        hit = Hit(rule, start, self._end(node), edits if self.rules.can_fix(rule) else (), values or {})
        self.hits.setdefault((rule.id, hit.start), hit)

    def _rename(self, rule: Rule, node: ast.Attribute, name: str) -> tuple[Edit, ...]:
        new = rule.new_name(name)
        end = self._end(node)
        return (Edit(end - len(node.attr), end, new),) if new is not None else ()

    def _start(self, node: ast.expr | ast.alias | ast.keyword) -> int:
        return self.source.offset(node.lineno, node.col_offset)

    def _end(self, node: ast.expr | ast.alias | ast.keyword | ast.stmt) -> int:
        return self.source.offset(node.end_lineno or node.lineno, node.end_col_offset or 0)


def _items(node: ast.expr) -> Iterator[ast.expr]:
    """The items of lists and the values of dictionaries in an expression, each by itself."""
    if isinstance(node, ast.List | ast.Tuple | ast.Dict):
        for item in node.values if isinstance(node, ast.Dict) else node.elts:
            yield from _items(item)
    else:
        yield node


def _is_trtexec(node: ast.expr) -> bool:
    """Whether a variable, or the text of one, is named for the program."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    return bool(re.search(r"trtexec", last_name(node) or "", re.IGNORECASE))


def _root(node: ast.expr) -> str | None:
    """The name that a chain of attributes begins with."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _first_part(name: str) -> str:
    return name.partition(".")[0]


def _names(node: ast.AST) -> list[str]:
    return [
        one.id if isinstance(one, ast.Name) else one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Name | ast.Attribute)
    ][::-1]


def _leaves(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)


def _is_tensor(node: ast.expr) -> bool:
    return bool(re.search(r"tensor|input|output", last_name(node) or "", re.I))


def _literal_mask(node: ast.expr) -> int:
    """The value of a mask written in numbers; 0 for any other."""
    match node:
        case ast.Constant(int(value)):
            return value
        case ast.BinOp(ast.Constant(int(left)), ast.LShift(), ast.Constant(int(right))) if right < 64:
            return left << right
    return 0


def _text_of(node: ast.expr) -> str:
    """The text of a string; what is filled in later is `{}`."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(_text_of(value) for value in values)
        case ast.BinOp(left, ast.Add(), right):
            return _text_of(left) + _text_of(right)
    return "{}"

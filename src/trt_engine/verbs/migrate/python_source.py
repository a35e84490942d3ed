"""Removed names in Python, through import aliases and the types of objects; command lines and options in its strings."""

from __future__ import annotations

import ast
import itertools
import re
import warnings
from collections.abc import Iterable, Mapping

from trt_engine.verbs.migrate import python_values, requirements, shell
from trt_engine.verbs.migrate.api_types import AMBIGUOUS, owner_classes, returned_type, type_of_name
from trt_engine.verbs.migrate.python_values import Piece, Values, tool_of
from trt_engine.verbs.migrate.rules import Rule, RuleSet
from trt_engine.verbs.migrate.source import Edit, Hit, Source
from trt_engine.verbs.migrate.version_guards import VersionGuards, last_name

_LEAVES = ast.Return | ast.Raise | ast.Continue | ast.Break
_MODULES = frozenset(
    f"tensorrt{end}{inner}" for end in ("", "_bindings", "_lean", "_dispatch") for inner in ("", ".tensorrt")
)
_OTHER = "another library's"
"""In place of a class of TensorRT."""
_LAZY = ("import_module", "lazy_import", "__import__", "try_import", "importorskip", "LazyImport")
_TABLES = ("__members__", "__dict__")
_MAKERS = frozenset(
    "create_execution_context create_builder_config create_network create_optimization_profile deserialize_cuda_engine "
    "add_convolution_nd add_deconvolution_nd add_pooling_nd add_padding_nd add_normalization get_plugin_registry".split()
)
"""Methods that only objects of TensorRT have."""
_TYPED = ("precision", "dtype", "compute_precision", "dynamic_range", "int8_calibrator", "algorithm_selector")
_LAYERS_OF_OTHERS = frozenset("layers modules children named_modules named_children parameters".split())
_NOT_OBJECTS = frozenset("self cls args opt opts FLAGS flags params options kwargs hparams".split())
_OTHERS = frozenset("torch torchvision tensorflow keras onnxruntime numpy sqlalchemy transformers argparse".split())
"""Libraries whose objects have members of the same names, and are never TensorRT's."""
_SAY = frozenset("print debug info warning error exception critical echo secho write".split())
"""Calls whose text is for people."""
_SAID = frozenset("help description epilog usage prog msg message reason match".split())
"""Arguments whose text is for people."""
_BOXES = frozenset(
    "list List Sequence Iterable Iterator tuple Tuple set Set dict Dict Mapping deque Collection".split()
)
_INSTALLS = re.compile(r"install|yolo|export\.py")
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
    known = " ".join(rule.replacement for rule in rules.rules)
    tree = _Live(VersionGuards(tree, rules.target, rules.owners["python"], known)).visit(tree)
    scan = _Scan(source, rules, tree)
    scan.visit(tree)  # learns what attributes of `self` hold
    scan.hits.clear()
    scan.commands.clear()
    scan.expanded.clear()
    scan.visit(tree)
    return list(scan.hits.values())


class _Live(ast.NodeTransformer):
    """Takes out what does not run with the target release."""

    def __init__(self, guards: VersionGuards) -> None:
        self.guards = guards

    def visit_If(self, node: ast.If) -> ast.AST:
        if (result := self.guards.evaluate(node.test)) is not None:
            node.body, node.orelse = (node.body if result else [ast.Pass()]), ([] if result else node.orelse)
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        if (result := self.guards.evaluate(node.test)) is not None:
            return self.visit(node.body if result else node.orelse)  # type: ignore[no-any-return]
        return self.generic_visit(node)

    def visit_Try(self, node: ast.Try) -> ast.AST:
        caught = {name for handler in node.handlers if handler.type is not None for name in _names(handler.type)}
        if "AttributeError" in caught:  # one way for each of two releases
            node.body, node.handlers = [ast.Pass()], []
        return self.generic_visit(node)

    def visit_With(self, node: ast.With) -> ast.AST:
        if any("suppress" in (names := _names(item.context_expr)) and "AttributeError" in names for item in node.items):
            node.body = [ast.Pass()]
        return self.generic_visit(node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Statements after a branch that always leaves the block do not run."""
        body = getattr(node, "body", None)
        for at, item in enumerate(body if isinstance(body, list) else ()):
            if isinstance(item, ast.If) and self.guards.evaluate(item.test) and isinstance(item.body[-1], _LEAVES):
                node.body = body[: at + 1]  # type: ignore[attr-defined, index]
                break
        return super().generic_visit(node)


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
        self.commands: set[ast.AST] = set()
        """Expressions that are part of a command that was read."""
        self.expanded: set[tuple[int, ...]] = set()
        self.own_methods = {
            item.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body
            if isinstance(item, ast.FunctionDef)
        }  # fmt: skip
        self.calls_tool = bool(re.search(r"^[^#\n]*(?:trtexec|polygraphy)", source.text, re.IGNORECASE | re.MULTILINE))
        self.has_commands = self.calls_tool or any(word in source.text for word in ("install", "yolo", "export.py"))
        self.own_classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
        self.values = Values(tree)
        self.asked_for = {
            ast.unparse(node.args[1]) for node in ast.walk(tree)
            if isinstance(node, ast.Call) and last_name(node.func) == "hasattr" and len(node.args) == 2
        }  # fmt: skip
        """Names that the file tests with `hasattr` before it uses them."""
        self.fields: dict[str, str] = {}
        """Fields that hold the module or a class of it."""
        self.returned: dict[str, str] = {}
        """Function of this file -> the class of what it returns."""
        self.function: str | None = None
        self.in_class = False

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
            elif item.name == "*":  # of a project's own module that has imported it: nothing else is named so
                self.modules.add("trt")
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

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self.in_class = self.in_class, True
        self.generic_visit(node)
        self.in_class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer = self.types, self.aliases, self.function, self.in_class
        if (made := self._annotated(node.returns)) is not None:
            self.returned[node.name] = made
        if (
            any((last_name(one) or "").endswith("property") for one in node.decorator_list)
            and node.name in self.returned
        ):
            self.attributes[node.name] = self.returned[node.name]
        self.types, self.aliases, self.function, self.in_class = dict(self.types), dict(self.aliases), node.name, False
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self.types.pop(argument.arg, None)
            self.aliases.pop(argument.arg, None)
            if (kind := self._annotated(argument.annotation)) is not None:
                self.types[argument.arg] = kind
        self.generic_visit(node)
        self.types, self.aliases, self.function, self.in_class = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    # -------------------------------------------------------------------------------- types

    def visit_Return(self, node: ast.Return) -> None:
        if self.function is not None and node.value is not None and (kind := self._type(node.value, hint=False)):
            self.returned.setdefault(self.function, kind)
        self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        self._visit_annotation(node.annotation)

    def _visit_annotation(self, node: ast.expr | None) -> None:
        if isinstance(node, ast.Constant):
            if (rule := self.rules.python.get(self._api_name(node) or "")) is not None:
                self._add(rule, node)
        elif node is not None:
            self.visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self._command(target)
            self._learn(target, node.value)
            untyped = isinstance(node.value, ast.Constant)
            if isinstance(target, ast.Attribute) and untyped and target.attr in _TYPED:
                self.handled.add(target)  # a type of TensorRT is neither text nor a number
            elif isinstance(target, ast.Attribute):
                self._check_write(node, target)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if (kind := self._annotated(node.annotation)) is not None:
            self._set_type(node.target, kind)
        elif node.value is not None:
            self._learn(node.target, node.value)
        self._command(node.target)
        self._visit_annotation(node.annotation)
        if node.value is not None:
            self.visit(node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self._learn(node.target, node.value)
        self.generic_visit(node)

    def visit_withitem(self, node: ast.withitem) -> None:
        if node.optional_vars is not None:
            self._learn(node.optional_vars, node.context_expr)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        of = node.iter.func if isinstance(node.iter, ast.Call) else node.iter
        kind = self._item_type(node.iter)
        if kind is None and isinstance(of, ast.Attribute) and of.attr in _LAYERS_OF_OTHERS:
            kind = _OTHER
        if kind is not None:
            last = node.target.elts[-1] if isinstance(node.target, ast.Tuple) and node.target.elts else node.target
            self._set_type(last, kind)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        if (kind := self._item_type(node.iter)) is not None:
            self._set_type(node.target, kind)
        self.generic_visit(node)

    def _visit_generators(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for one in node.generators:
            self.visit(one)
        self.generic_visit(node)

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _visit_generators  # noqa: N815

    def _item_type(self, node: ast.expr) -> str | None:
        """The class of the items of a list, or of the layers of a network."""
        if isinstance(node, ast.Call) and last_name(node.func) in ("values", "items", "enumerate", "list", "reversed"):
            node = node.args[0] if node.args else node.func.value if isinstance(node.func, ast.Attribute) else node
        kind = self._type(node) or ""
        return kind[:-2] if kind.endswith("[]") else "ILayer" if kind == "INetworkDefinition" else None

    def _annotated(self, node: ast.expr | None) -> str | None:
        """The class that an annotation names; `[]` behind it for a list of them."""
        match node:
            case ast.Constant(str(text)):
                try:
                    return self._annotated(ast.parse(text, mode="eval").body)
                except SyntaxError:
                    return None
            case ast.BinOp(left, ast.BitOr(), right):
                return self._annotated(left) or self._annotated(right)
            case ast.Subscript(value, inner):
                items = inner.elts[::-1] if isinstance(inner, ast.Tuple) else [inner]
                kind = next((kind for item in items if (kind := self._annotated(item))), None)
                return f"{kind}[]" if kind is not None and last_name(value) in _BOXES else kind
            case ast.Name() | ast.Attribute():
                return self._api_name(node)
        return None

    def _learn(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(value, ast.Call) and last_name(value.func) in _LAZY:
            if any(
                isinstance(item, ast.Constant) and str(item.value).startswith("tensorrt") and item.value in _MODULES
                for item in value.args
            ):
                self.modules |= set(_names(target))
            return
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._learn(one, other)
            return
        name = self._api_name(value) if isinstance(value, ast.Name | ast.Attribute | ast.Call) else None
        whole = name is not None and (not name or (name[0].isupper() and "." not in name))
        bound = whole and (not isinstance(value, ast.Call) or last_name(value.func) == "getattr")
        if isinstance(target, ast.Name):
            self.aliases.pop(target.id, None)
            if bound and name is not None:
                self.aliases[target.id] = name
        if bound and name is not None and (self.in_class or isinstance(target, ast.Attribute)):
            self.fields[last_name(target) or ""] = name
        foreign = isinstance(value, ast.Call) and _root(value.func) in self.others | _OTHERS
        self._set_type(target, _OTHER if foreign else self._type(value, hint=False))

    def _set_type(self, target: ast.expr, kind: str | None) -> None:
        if isinstance(target, ast.Name):
            if kind is None:
                self.types.pop(target.id, None)
            else:
                self.types[target.id] = kind
            if self.in_class and kind is not None:
                self.attributes[target.id] = kind
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
            case ast.Call(func, args):
                name, api = last_name(func) or "", self._api_name(func)
                if api:
                    return returned_type(api) or (api if "." not in api else None)
                owner = func.value if isinstance(func, ast.Attribute) else None
                if name in self.returned and (owner is None or last_name(owner) in ("self", "cls", *self.own_classes)):
                    return self.returned[name]
                if name in ("cast", "getattr") and args and (kind := self._annotated(args[0])) is not None:
                    return kind
                if owner is not None and (
                    (name in _MAKERS and self._type(owner) != _OTHER) or self._type(owner) not in (None, _OTHER)
                ):
                    return returned_type(name)
                return None
            case ast.Subscript(value):
                return self._item_type(value)
            case ast.List([first, *_]) | ast.Tuple([first, *_]) | ast.Set([first, *_]) | ast.Dict(_, [first, *_]):
                return f"{kind}[]" if (kind := self._type(first, hint=False)) else None
            case ast.ListComp(first) | ast.GeneratorExp(first) | ast.DictComp(_, first):
                return f"{kind}[]" if (kind := self._type(first, hint=False)) else None
            case ast.BoolOp(_, values):
                return next((kind for one in values if (kind := self._type(one, hint=hint))), None)
            case ast.IfExp(_, body, other):
                return self._type(body, hint=False) or self._type(other, hint=hint)
            case ast.NamedExpr(_, value):
                return self._type(value, hint=hint)
        return None

    def _api_name(self, node: ast.expr) -> str | None:
        """`BuilderFlag.FP16` of `trt.BuilderFlag.FP16`, by whatever names."""
        return next(iter(self._api_names(node)), None)

    def _api_names(self, node: ast.expr) -> list[str]:
        """All that the expression may be: a name that `getattr` gets may be one of several."""
        match node:
            case ast.Constant(str(text)) if re.fullmatch(r"[\w.]+", text):  # an annotation in quotes
                head, _, rest = text.partition(".")
                return [rest] if head in self.modules else [text] if text in self.imported else []
            case ast.Call(ast.Name("getattr"), [owner, name]):  # with a default it is a guard
                return self._named(owner, self.values.texts(name))
            case ast.Call(func, [ast.Constant(str(name)), *_]) if last_name(func) in _LAZY:
                return [""] if name in _MODULES else []
            case ast.Subscript(value, index):
                inner = value.value if isinstance(value, ast.Attribute) and value.attr in _TABLES else value
                if isinstance(value, ast.Call) and last_name(value.func) == "vars" and value.args:
                    inner = value.args[0]
                return self._named(inner, self.values.texts(index)) if inner is not value else []
            case ast.Attribute(value, attr):
                if last_name(value) in ("self", "cls", *self.own_classes) and attr in self.fields:
                    return [self.fields[attr]]
                if inner_names := self._api_names(value):
                    return [_joined(one, attr) for one in inner_names]
                if isinstance(value, ast.Attribute) and value.attr in self.modules:  # mod.trt.BuilderFlag
                    return [attr]
            case ast.Name(name):
                held = {name: ""} if name in self.modules else {}
                held = held | self.imported | self.aliases
                return [held[name]] if name in held else []
        return []

    def _named(self, owner: ast.expr, names: Iterable[str]) -> list[str]:
        return [_joined(one, name) for one in self._api_names(owner) for name in names]

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

    def visit_Name(self, node: ast.Name) -> None:
        if (
            isinstance(node.ctx, ast.Load)
            and (rule := self.rules.python.get(self.imported.get(node.id, ""))) is not None
        ):
            self._add(rule, node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        for name in self._api_names(node):
            if (rule := self.rules.python.get(name)) is not None:
                self._add(rule, node.slice)
        self.generic_visit(node)

    def _check_getattr(self, node: ast.Call) -> None:
        """`getattr` and `setattr`: of an enum or the module, else of an object."""
        owner, name = node.args[:2]
        guarded = not isinstance(name, ast.Constant) and ast.unparse(name) in self.asked_for
        for text in () if guarded else self.values.texts(name):
            found = [self.rules.python.get(one) for one in self._named(owner, [text])]
            if not found and text.isidentifier():
                member = self._member(ast.copy_location(ast.Attribute(owner, text, ast.Load()), node))
                found = [member[0]] if member is not None else []
            for rule in found:
                if rule is not None:
                    self._add(rule, name)

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
        self._command(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else None
        if (name := last_name(node.func) or "") in _SAY or name.endswith(("Error", "Exception", "Warning")):
            self.handled |= {one for one in node.args if isinstance(one, ast.Constant | ast.JoinedStr | ast.BinOp)}
        if (asked := python_values.asked_precision(node, self.source.text)) is not None:
            of_provider = (asked.arg or "").startswith("trt_")
            self._add_id("ort-precision-option" if of_provider else "wrapper-precision", asked)
        self.handled |= {item.value for item in node.keywords if item.arg in _SAID}
        self._command_call(node)
        trt = bool(self.modules or self.imported)
        given = {item.arg: item.value for item in node.keywords}
        flags = [*node.args[:1], *(value for name, value in given.items() if name == "flags")]
        if trt and method == "create_network" and flags and _literal_mask(flags[0]) > 1:
            self._add_id("network-flag-literal", flags[0])
        both = trt and method in ("add_quantize", "add_dequantize") and None not in given
        if both and len(node.args) + len(given) == 2 and "output_type" not in given:
            self._add_id("quantize-output-type", node)
        if trt and isinstance(node.func, ast.Attribute) and method == "create_execution_context_without_device_memory":
            self._check_context(node, node.func)
        if method in ("get_creator", "get_plugin_creator") and node.args and isinstance(node.args[0], ast.Constant):
            self._check_string(node.args[0], shipped=True)
        if trt and (last_name(node.func), len(node.args)) in (("getattr", 2), ("setattr", 3)):
            self._check_getattr(node)
        if (
            trt
            and last_name(node.func) == "isinstance"
            and len(node.args) == 2
            and (kind := self._api_name(node.args[1]))
        ):
            self._set_type(node.args[0], kind)
        if self.polygraphy and last_name(node.func) in self.polygraphy:
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                rule = self.rules.create_config.get(keyword.arg or "")
                if rule is not None and not off:
                    self._add(rule, keyword)
            if last_name(node.func) == "Calibrator":
                self._add_id("int8-calibrator", node.func)
        self.generic_visit(node)

    def _check_context(self, node: ast.Call, func: ast.Attribute) -> None:
        rule = self.rules.by_id.get("context-without-device-memory")
        if rule is None or not self.modules or node.args:
            return
        strategy = f"{sorted(self.modules)[0]}.ExecutionContextAllocationStrategy.USER_MANAGED"
        text = f"create_execution_context({strategy})"
        self._add(rule, func, edits=(Edit(self._end(func) - len(func.attr), self._end(node), text),))
        self.handled.add(func)

    # -------------------------------------------------------------------------------- strings

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            name = key.value if isinstance(key, ast.Constant) else None
            off = isinstance(value, ast.Constant) and str(value.value) in ("False", "0", "false")
            if key is not None and (
                (name in _SWITCHED and off)
                or (
                    name == "trt_tactic_sources"
                    and not re.search("cublas|cudnn", " ".join(self.values.texts(value)), re.IGNORECASE)
                )
            ):
                self.handled.add(key)
            low = {"half", "float16", "bfloat16", "int8"} & set(_names(value))
            if name == "enabled_precisions" and low and "torch_tensorrt" in self.source.text:
                self._add_id("wrapper-precision", value)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        self.handled |= {one for one in sides if isinstance(one, ast.Constant) and "--" in str(one.value)}
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._check_string(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._command(node)
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.visit(node.value)

    def visit_List(self, node: ast.List | ast.Tuple) -> None:
        self._command(node)
        self.generic_visit(node)

    visit_Tuple = visit_List  # noqa: N815

    def _check_string(self, node: ast.Constant, *, shipped: bool = False) -> None:
        rule = self.rules.string(str(node.value), self.source.text) if node not in self.handled else None
        if rule is not None and shipped is (rule.id == "shipped-plugin"):
            self._add(rule, node)
        if "tensorrt" in (text := str(node.value)) and re.search(r"\btensorrt[-_](?:fp16|int8)\S*\.py$", text):
            self._add_id("wrapper-precision", node)
        self._command(node)

    def _command_call(self, node: ast.Call) -> None:
        """A call whose arguments are the words of a command, or that changes a list of options."""
        if isinstance(node.func, ast.Attribute) and node.func.attr in ("append", "extend", "insert"):
            self._command(node.func.value, loose=self.calls_tool)
        elif any(isinstance(item, ast.Starred) or any(map(tool_of, self.values.texts(item))) for item in node.args[:3]):
            self._command(ast.copy_location(ast.Tuple(node.args, ast.Load()), node))
        elif "trtexec" in (last_name(node.func) or "").lower():
            self._command(ast.copy_location(ast.Tuple([node.func, *node.args], ast.Load()), node))
        elif last_name(node.func) == "format" and isinstance(node.func, ast.Attribute):
            self._command(node)

    def _command(self, node: ast.expr, *, loose: bool = False) -> None:
        """What the rules find in the command line that an expression gives; `loose` also in options alone."""
        if node in self.handled or node in self.commands or not self.has_commands:
            return
        if not self.calls_tool and not any(_INSTALLS.search(str(getattr(one, "value", ""))) for one in ast.walk(node)):
            return
        if isinstance(node, ast.Name | ast.Attribute):
            held = (loose, *map(id, self.values.of(node)))
            if held in self.expanded:
                return
            self.expanded.add(held)
        pieces = list(itertools.islice(self.values.pieces(node), 2000))
        text = "".join(part for part, _ in pieces)
        if "install" in text and "tensorrt" in text:
            start = re.match(r"[!%\s]*(?:\S*(?:pip|uv|conda|python)\S*\s|install\s)", text)
            if start or isinstance(node, ast.List | ast.Tuple):
                full = (
                    text
                    if "pip" in text or not text.lstrip().startswith("install")
                    else text.replace("install", "pip install", 1)
                )
                for hit in requirements.scan_installs(full, self.rules):
                    self._add(hit.rule, node, values=hit.values)
        if "yolo" in text or "export.py" in text:
            for hit in python_values.scan_wrappers(text, self.rules):
                self._place_hit(hit, pieces, text)
        if "--" not in text:
            return
        if not any(tool_of(part) for part, _ in pieces) and not shell.is_command(text):
            if loose and re.match(r"\s*(?:-|$|\{\}(?=.*--(?:onnx=|saveEngine|loadEngine)))", text):
                pieces, text = [("trtexec ", node), *pieces], f"trtexec {text}"
            else:
                return
        if not (isinstance(node, ast.Constant) or shell.is_command(text)):  # a list: nothing in it is the shell's
            text = re.sub(r"[|()`\n\"'#<>]|(?<!\s)[;&]", "_", text)
        self.commands |= {one for _, part in pieces for one in ast.walk(part)} | set(ast.walk(node))
        for hit in shell.scan_text(text, self.rules):
            self._place_hit(hit, pieces, text)

    def _place_hit(self, hit: Hit, pieces: list[Piece], text: str) -> None:
        """A finding at the expression that its word is written in."""
        ends = itertools.accumulate(len(part) for part, _ in pieces)
        node = next((one for end, (_, one) in zip(ends, pieces, strict=True) if end > hit.start), pieces[-1][1])
        start, end = self._start(node), self._end(node)
        found = self.source.text.find(re.split(r"[={\s]", text[hit.start : hit.end])[0], start, end)
        start = found if found >= 0 else start
        self.hits.setdefault((hit.rule.id, start), Hit(hit.rule, start, end, (), hit.values))

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


def _joined(owner: str, name: str) -> str:
    return ".".join(filter(None, (owner, name))).removeprefix("tensorrt.")


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

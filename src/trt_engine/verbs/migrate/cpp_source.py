"""Removed names in C++ and CUDA, found in the syntax tree of tree-sitter (extra `migrate`)."""

from __future__ import annotations

import bisect
import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from trt_engine.verbs.migrate import shell
from trt_engine.verbs.migrate.api_types import AMBIGUOUS, owner_classes, returned_cpp_type, type_of_name
from trt_engine.verbs.migrate.python_values import tool_of
from trt_engine.verbs.migrate.rules import Rule, RuleSet
from trt_engine.verbs.migrate.source import MAX_BYTES, Edit, Hit, Source
from trt_engine.verbs.migrate.version_guards import dead_spans

_QUERY = """
(field_expression argument: (_) @object field: (field_identifier) @field) @member
(qualified_identifier) @qualified
(type_identifier) @type
(call_expression function: (identifier) @function)
(function_declarator declarator: [(field_identifier) (qualified_identifier)] @declared)
(string_literal (string_content) @string)
(raw_string_literal (raw_string_content) @string)
(preproc_include path: (_) @include)
(preproc_arg) @macro
(identifier) @identifier
"""
_USES_TENSORRT = re.compile(
    r"nvinfer1|NvInfer|NvOnnxParser|nvonnxparser|NvCaffeParser|NvUffParser|trt_(?:fp16|bf16|int8)_|trtexec|polygraphy"
    r"|\bI(?:CudaEngine|BuilderConfig|ExecutionContext|NetworkDefinition|OptimizationProfile|Int8\w*Calibrator\w*|PluginV2\w*)\b"
    r"|BuilderFlag::k|AcrossBatch\(|[gs]et(?:Nb)?Binding|enqueueV2\(|MaxWorkspaceSize\(|platformHasFast|buildEngineWithConfig"
    r"|createNetworkV2\(|deserializeCudaEngine\(|createExecutionContext|getPluginRegistry\(|nv(?:caffe|uff)parser"
)
_DECLARED = re.compile(
    r"\b(I[A-Z]\w+)\b\s*(?:,[^<>;={}()]{0,200})?[\s>*&]*(?:const\s+)?(\w+)\s*(?=[=;,)({\[:]|$)", re.MULTILINE
)
_AUTO = re.compile(r"\bauto\s*(?:const\b)?\s*[*&]*\s*(\w+)\s*[={(]([^;]{0,300})")
_LOOP = re.compile(r"\bfor\s*\(\s*(?:const\s+)?auto\b[\s*&]*(?:const\s+)?(\w+)\s*:\s*\*?(?:this->)?(\w+)")
_WRAPS = re.compile(r"^$|ptr|unique|shared|wrap|obj|move|hold|check|adopt|own|guard|make|[A-Z]{2}", re.IGNORECASE)
"""Functions that give their argument back: smart pointers, checks."""
_SAME = re.compile(r"\s*[*&]?\s*(?:this->)?(\w+)(?:\s*\.\s*get\s*\(\s*\)|\s*\([^()]*\))?\s*[)}]?\s*$")
_GENERIC = re.compile(
    r"#[ \t]*define[ \t]+(?P<macro>\w+)\((?P<of>\w+)"
    r"|\b(?P<function>\w+)\s*\(\s*(?:const\s+)?(?:T|auto)\b[\s*&]*(?P<argument>\w+)\s*[,)]"
)
_ALIAS = re.compile(
    r"\busing\s+(?P<name>\w+)\s*=\s*(?P<type>[^;{}()]{1,400});|\btypedef\s+(?P<of>[^;{}()]{1,400}?)[\s*&]+(?P<as>\w+)\s*;"
)
_SAID = re.compile(r"\b(?:cout|cerr|clog|\w*(?:print|log|usage|help|LOG|INFO|WARN|ERR|throw)\w*)\b", re.IGNORECASE)
"""In a statement whose text is for people."""
_COMMANDS = re.compile(r"\bs(?:n?w?)printf")
_CALLED = re.compile(r"(\w+)\s*\(")
_FIRST_ARGUMENT = re.compile(r"\b(\w+)\s*\(\s*(?:this->)?(\w+)\s*[,)]")
_MAX_DEPTH, _MAX_NESTED = 50, 500
_MASK = re.compile(r"\(\s*(?:1U?\s*<<\s*([1-9])|([2-9]|1[0-9]))\s*U?\s*\)")
_SHIFT = re.compile(
    r"1U?L?\s*<<\s*(?:static_cast<\s*\w+\s*>|\(?\s*(?:int|uint32_t|unsigned(?: int)?)\s*\)?)\s*\(?\s*(?:nvinfer1::)?"
    r"NetworkDefinitionCreationFlag::kEXPLICIT_BATCH\s*\)?"
)


def is_available() -> bool:
    """Whether the parser of the extra `migrate` is installed."""
    return find_spec("tree_sitter") is not None and find_spec("tree_sitter_cpp") is not None


def may_concern(text: str) -> bool:
    """Whether a C++ file uses TensorRT: by its headers, or by names of its own where a project's header includes them."""
    return bool(_USES_TENSORRT.search(text))


@functools.cache
def _parser() -> tuple[Any, Any]:
    import tree_sitter
    import tree_sitter_cpp

    language = tree_sitter.Language(tree_sitter_cpp.language())
    return tree_sitter.Parser(language), tree_sitter.Query(language, _QUERY)


def _is_deep(root: Any) -> bool:
    cursor = root.walk()
    while True:
        if cursor.goto_first_child():
            if cursor.depth > _MAX_NESTED:
                return True
            continue
        while not cursor.goto_next_sibling():
            if not cursor.goto_parent():
                return False


def scan_cpp(source: Source, rules: RuleSet) -> list[Hit]:
    """What the rules find in a C++ file that uses TensorRT, outside `#if` branches of other releases."""
    if not rules.concern("cpp", source.text):
        return []
    import tree_sitter

    parser, query = _parser()

    outer: dict[str, str] = {}

    def scan_part(part: Source) -> Iterator[Hit]:
        raw = part.text.encode("utf-8", "surrogateescape")
        root = parser.parse(raw).root_node
        if _is_deep(root):  # what is above a node is found from the root
            raise ValueError(f"more than {_MAX_NESTED} expressions inside each other")
        found = tree_sitter.QueryCursor(query).captures(root)
        scan = _Scan(part, rules, found, raw)
        if part is source:
            outer.update(scan.types)
        scan.types = outer | scan.types
        yield from scan.hits()
        for node in found.get("macro", ()) if part is source else ():
            head, at = "void f() { ", scan.offset(node.start_byte)
            for hit in scan_part(Source(source.path, f"{head}{scan.text(node)}; }}")):
                yield Hit(hit.rule, hit.start - len(head) + at, hit.end - len(head) + at, (), hit.values)

    dead = dead_spans(source.text, rules.target)
    hits: dict[tuple[str, int], Hit] = {}
    for hit in scan_part(source):
        at = bisect.bisect_right(dead, (hit.start, len(source.text))) - 1
        if at < 0 or hit.start >= dead[at][1]:
            hits.setdefault((hit.rule.id, hit.end), hit)
    return list(hits.values())


class _Scan:
    def __init__(self, source: Source, rules: RuleSet, captures: dict[str, list[Any]], raw: bytes) -> None:
        self.source, self.rules, self.captures, self.raw = source, rules, captures, raw
        self.ascii = len(raw) == len(source.text)
        self.aliases = {
            found["name"] or found["as"]: kind
            for found in _ALIAS.finditer(source.text)
            if (kind := (re.findall(r"\b(?!std\b)([A-Z]\w+)", found["type"] or found["of"]) or [""])[0])
        }
        self.types = _declared_types(source.text, self.aliases)
        self.own_methods = {self.text(node).rpartition("::")[2] for node in captures.get("declared", ())}

    def hits(self) -> Iterator[Hit]:
        for node in self.captures.get("qualified", ()):
            if node.parent is None or node.parent.type != "qualified_identifier":
                yield from self._qualified(node)
        for kind in ("type", "function"):
            for node in self.captures.get(kind, ()):
                name = self.text(node)
                rule = self.rules.cpp.get(name)
                if rule is not None:
                    yield self._hit(rule, node, name)
        for node in self.captures.get("include", ()):
            rule = self.rules.by_id.get("caffe-uff-parser")
            if rule is not None and re.search(r"\bNv(?:Caffe|Uff)Parser\.h", self.text(node)):
                yield self._hit(rule, node, "")
        enums = {*re.findall(r"\busing\s+enum\s+(?:\w*::)*(\w+)\s*;", self.source.text)}
        for enum in sorted(enums & {name.partition("::")[0] for name in self.rules.cpp}):
            for node in self.captures.get("identifier", ()):
                if (rule := self.rules.cpp.get(f"{enum}::{self.text(node)}")) is not None:
                    yield self._hit(rule, node, "")
        yield from self._commands()
        for node in self.captures.get("member", ()):
            yield from self._member(node)
        for node in self.captures.get("declared", ()):
            owner = f"IPluginV2Ext::{self.text(node).rpartition('::')[2]}"
            if (rule := self.rules.cpp.get(owner)) is not None:
                yield self._hit(rule, node, owner)
        for node in self.captures.get("string", ()):
            rule = self.rules.string(self.text(node, MAX_BYTES), self.source.text)
            if rule is not None and (rule.id != "shipped-plugin" or self._names_creator(node)):
                yield self._hit(rule, node, "")

    def _qualified(self, node: Any) -> Iterator[Hit]:
        """`nvinfer1::BuilderFlag::kFP16`, and classes by their full name."""
        parts = [part.strip() for part in self.text(node).split("::")]
        if len(parts) > 1:
            parts[-2] = self.aliases.get(parts[-2], parts[-2])
        name = "::".join(parts[-2:])
        if (rule := self.rules.cpp.get(name)) is not None:
            mask = self._explicit_batch(node) if name.endswith("::kEXPLICIT_BATCH") else ()
            last = self._last(node, len(parts[-1]))
            yield self._hit(rule, node, name, last=last, edits=mask)
        elif (rule := self.rules.cpp.get(parts[-1])) is not None:  # nvinfer1::IInt8Calibrator, a function of a parser
            yield self._hit(rule, node, parts[-1])
        elif len(parts) > 1 and (rule := self.rules.cpp.get(parts[-2])) is not None:  # ResizeMode::kLINEAR
            new = rule.new_name(parts[-2])
            start, end = self._last(node, len(parts[-1]))
            start, end = start - 2 - len(parts[-2]), start - 2
            same = new is not None and self.source.text[start:end] == parts[-2]
            yield Hit(rule, self.offset(node.start_byte), end, (Edit(start, end, new),) if same and new else ())

    def _explicit_batch(self, node: Any) -> tuple[Edit, ...]:
        """The whole `1U << static_cast<uint32_t>(...kEXPLICIT_BATCH)` becomes 0."""
        end = self.offset(node.end_byte)
        for found in _SHIFT.finditer(self.source.text, max(0, end - 200), end + 2):
            if found.end() >= end:
                return (Edit(found.start(), found.end(), "0U"),)
        return ()

    def _member(self, node: Any) -> Iterator[Hit]:
        target, field = node.child_by_field_name("argument"), node.child_by_field_name("field")
        name = self.text(field)
        call = node.parent if node.parent is not None and node.parent.type == "call_expression" else None
        yield from self._arguments(name, call)
        owners = self.rules.owners["cpp"].get(name)
        if owners is None or call is None:
            return
        kind = self._type(target)
        if kind is None:
            hinted = type_of_name(self._last_word(target), cpp=True)
            if hinted is None and name == "destroy" and self._last_word(target) in self._deleted:
                kind = hinted = owners[0]  # what a deleter gets: a `unique_ptr` of TensorRT's objects has it
        if kind is None:
            if hinted is None or not set(owner_classes(hinted)) & set(owners):
                if name in AMBIGUOUS or name in self.own_methods or self.text(target) == "this":
                    return
                hinted = owners[0]
            kind = hinted
        owner = next((one for one in owner_classes(kind) if one in owners), None)
        if owner is None:
            return
        rule = self.rules.cpp[f"{owner}::{name}"]
        if (
            name == "destroy"
            and self.source.text[self.offset(target.end_byte) : self.offset(field.start_byte)].strip() == "."
        ):
            return  # the objects of TensorRT are pointers
        yield self._hit(rule, field, f"{owner}::{name}", edits=self._rewrite(rule, name, target, field, call))

    def _rewrite(self, rule: Rule, name: str, target: Any, field: Any, call: Any) -> tuple[Edit, ...]:
        """Edits that are more than another name."""
        arguments = call.child_by_field_name("arguments")
        start = self.offset(field.start_byte)
        if name == "setMaxWorkspaceSize" and arguments is not None:
            open_ = self.offset(arguments.start_byte) + 1
            return (Edit(start, open_, "setMemoryPoolLimit(nvinfer1::MemoryPoolType::kWORKSPACE, "),)
        if name == "createExecutionContextWithoutDeviceMemory" and arguments is not None:
            strategy = "nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED"
            return (Edit(start, self.offset(call.end_byte), f"createExecutionContext({strategy})"),)
        statement = call.parent is not None and call.parent.type == "expression_statement"
        plain = target.type in ("identifier", "field_expression") and self._last_word(target) not in self._owned
        if name == "destroy" and statement and plain:
            begin, end = self.offset(target.start_byte), self.offset(target.end_byte)
            return (Edit(begin, begin, "delete "), Edit(end, self.offset(call.end_byte), ""))
        return ()

    @functools.cached_property
    def _deleted(self) -> set[str]:
        """Arguments of deleters."""
        deleter = r"operator\s*\(\)\s*\([^)]{0,400}\*\s*(?:const\s+)?(\w+)\s*\)"
        return {*re.findall(deleter, self.source.text)}

    @functools.cached_property
    def _owned(self) -> set[str]:
        """Smart pointers, which cannot be deleted."""
        statements = re.split("[;{}]", self.source.text)
        parts = (found for one in statements if (found := re.search(r"ptr\s*<", one, re.IGNORECASE)))
        return {name for found in parts for name in re.findall(r">\s*(\w+)", found.string[found.end() :])}

    def _arguments(self, name: str, call: Any) -> Iterator[Hit]:
        """Calls that changed by their arguments alone."""
        rules = self.rules.by_id
        arguments = call.child_by_field_name("arguments") if call is not None else None
        if arguments is None:
            return
        if name == "createNetworkV2" and "network-flag-literal" in rules and _MASK.fullmatch(self.text(arguments)):
            yield self._hit(rules["network-flag-literal"], arguments, "")
        if (
            name in ("addQuantize", "addDequantize")
            and "quantize-output-type" in rules
            and arguments.named_child_count == 2
        ):
            yield self._hit(rules["quantize-output-type"], arguments, "")
        if name == "deserializeCudaEngine" and "plugin-factory" in rules and arguments.named_child_count == 3:
            third = arguments.named_children[2]
            start, end = self.offset(arguments.named_children[1].end_byte), self.offset(third.end_byte)
            yield Hit(rules["plugin-factory"], self.offset(third.start_byte), end, (Edit(start, end, ""),))

    def _commands(self) -> Iterator[Hit]:
        """Command lines in strings: of one statement, and of all that add to one variable."""
        if not re.search("trtexec|polygraphy", self.source.text):
            return
        texts: dict[object, list[tuple[str, Any]]] = {}
        last: Any = None
        for node in sorted(self.captures.get("string", ()), key=lambda node: node.start_byte):
            statement = node.parent
            for _ in range(_MAX_DEPTH):
                if statement.parent is None or re.search("statement|^(field_)?declaration$", statement.type):
                    break
                statement = statement.parent
            before = re.split(r"[\"<(=+]", self.text(statement), maxsplit=1)[0]
            written = self.text(statement).partition('"')[0]
            if _SAID.search(written) and not _COMMANDS.search(written):
                continue
            grown = re.match(
                r"[^\"]*?(\w+)\s*(?:\+?=|<<|[.]\s*(?:append|push_back|emplace_back|insert)\b|\{|\[)", written
            )
            group: object = grown[1] if grown else (before, statement.start_byte)
            pieces = texts.setdefault(group, [])
            if pieces:
                joint = self.raw[last.end_byte : node.start_byte].decode(errors="replace") if last is not None else ","
                apart = "," in joint or ";" in joint
                pieces.append((" " if apart else "" if not joint.strip('"uLR \t\r\n\\') else "{}", node))
            pieces.append((self.text(node, MAX_BYTES).replace("%s", "{}"), node))
            last = node
        for pieces in texts.values():
            text = "".join(part for part, _ in pieces)
            if any(tool_of(part.strip()) for part, _ in pieces):
                text = re.sub(r"[;&|()`\n\"'#<>]", "_", text)
            elif not shell.is_command(text):
                continue
            ends = [*itertools.accumulate(len(part) for part, _ in pieces)]
            for hit in shell.scan_text(text, self.rules):
                if (at := bisect.bisect_right(ends, hit.start)) < len(pieces):
                    node = pieces[at][1]
                    yield Hit(hit.rule, self.offset(node.start_byte), self.offset(node.end_byte), (), hit.values)

    def _names_creator(self, node: Any) -> bool:
        before = self.source.text[max(0, self.offset(node.start_byte) - 40) : self.offset(node.start_byte)]
        return bool(re.search(r"get(?:Plugin)?Creator\(\s*\"$", before))

    def _type(self, node: Any) -> str | None:
        """The class of TensorRT an expression points to, by its declaration or the call that made it."""
        text = self.text(node)
        if (cast := re.match(r"\(*\s*\w+_cast\s*<\s*(?:const\s+)?(?:\w+::)?(I[A-Z]\w+)", text)) is not None:
            return cast[1]
        if node.type == "call_expression" and (called := _CALLED.findall(text)):
            outer = node.child_by_field_name("function")
            name = self._last_word(outer) if outer is not None else called[-1]
            return returned_cpp_type(name) or self.types.get(self._last_word(node) if name == "get" else name)
        return self.types.get(self._last_word(node))

    def _last_word(self, node: Any) -> str:
        words = re.findall(r"[A-Za-z_]\w*", self.text(node).partition("[")[0]) or [""]
        return str(words[-2] if words[-1] == "get" and len(words) > 1 else words[-1])

    def _last(self, node: Any, length: int) -> tuple[int, int]:
        end = self.offset(node.end_byte)
        return end - length, end

    def _hit(
        self, rule: Rule, node: Any, name: str, *, last: tuple[int, int] | None = None, edits: tuple[Edit, ...] = ()
    ) -> Hit:
        start, end = self.offset(node.start_byte), self.offset(node.end_byte)
        new = rule.new_name(name) if name and not edits else None
        if new is not None:
            place = last or (end - len(name.rpartition("::")[2]), end)
            edits = (Edit(*place, new),)
        return Hit(rule, start, end, edits if self.rules.can_fix(rule) else ())

    def text(self, node: Any, most: int = 4000) -> str:
        """The text of a node, and no more than its beginning: nodes are inside each other."""
        raw: bytes = self.raw[node.start_byte : min(node.end_byte, node.start_byte + most)]
        return raw.decode(errors="replace")

    def offset(self, at: int) -> int:
        return at if self.ascii else self._offsets[bisect.bisect_right(self._bytes, at) - 1]

    @functools.cached_property
    def _offsets(self) -> range:
        return range(len(self.source.text) + 1)

    @functools.cached_property
    def _bytes(self) -> list[int]:
        """The offset in bytes of each character."""
        found, at = [], 0
        for char in self.source.text:
            found.append(at)
            at += len(char.encode("utf-8", "surrogateescape"))
        return [*found, at]


def _outer(text: str) -> str:
    """The function whose result an expression is."""
    kept, opened = list[str](), list[int]()
    for letter in text:
        if letter == ")" and opened:
            del kept[opened.pop() :]
            letter = "\0"
        elif letter == "(":
            opened.append(len(kept))
        kept.append(letter)
    text = "".join(kept)
    names = re.findall(r"(\w+)\s*(?:<[^<>;]*>)?\s*[(\0]", text)
    return str(names[-1]) if names else ""


def _declared_types(text: str, aliases: dict[str, str]) -> dict[str, str]:
    """Variable -> class, of declarations and of `auto` with a call or a variable that is known."""
    types: dict[str, str] = {}
    for found in _AUTO.finditer(text):
        called = _CALLED.findall(found[2])
        names = called if _WRAPS.search(outer := _outer(found[2])) else [outer]
        kinds = [kind for name in names if (kind := returned_cpp_type(name))]
        pointer = re.search(r"<\s*(?:\w+::)?(I[A-Z]\w+)", found[2])
        if pointer or kinds:
            types[found[1]] = pointer[1] if pointer else kinds[0]
    for found in _DECLARED.finditer(text):
        types[found[2]] = found[1]
    if aliases:
        short = "|".join(map(re.escape, aliases))
        for found in re.finditer(
            rf"\b({short})\b(?:<\s*(?:\w+::)?(I[A-Z]\w+))?[\s>*&]+(?:const\s+)?(\w+)\s*(?=[=;,)({{\[:])", text
        ):
            if (kind := found[2] or aliases[found[1]])[:1] == "I":
                types[found[3]] = kind
    generic: dict[str, list[str]] = defaultdict(list)
    for found in _GENERIC.finditer(text):
        if len(arguments := generic[found["macro"] or found["function"]]) < _MAX_DEPTH:
            arguments.append(found["of"] or found["argument"])
    for name, use in _FIRST_ARGUMENT.findall(text) if generic else ():
        if name in generic and (kind := types.get(use) or type_of_name(use, cpp=True)):
            for argument in generic[name]:  # the arguments of a macro or template are what it is called with
                types.setdefault(argument, kind)
    for pattern in (_LOOP, _AUTO):
        for found in pattern.finditer(text):
            same = _SAME.match(found[2])
            if (kind := types.get(same[1] if same is not None else _outer(found[2]))) is not None:
                types.setdefault(found[1], kind)
    return types

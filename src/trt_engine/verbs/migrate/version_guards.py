"""Conditions on the release of TensorRT: which branch runs with the target release."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping

from trt_engine.verbs.migrate.rules import Release

_COMPARE = {
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}  # fmt: skip
_VERSION_NAME = re.compile(
    r"(?:.*_)?(?:trt|tensorrt).*ver.*|.*(?:trt|tensorrt)_?(?:major|v)|__version__|_?major(?:_version)?|trt_?version",
    re.I,
)
_MAX_NAME = 200
_SINCE_NAME = re.compile(
    r"(?:is_|has_|use_|.*_)?(?:trt|tensorrt)_?(?:ge_?|v)?(8|9|10|11)(?:_?\d*)?(?:_or_(?:later|newer)|_plus)?", re.I
)


class VersionGuards:
    """Evaluates conditions of a Python file for a target release.

    `old` and `new` are the member names that the target lacks and has, for `hasattr`.
    """

    def __init__(self, tree: ast.Module, target: Release, old: Mapping[str, object], new: str) -> None:
        self.target, self.old, self.new = target, old, new
        self.names: dict[str, ast.expr] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                name = last_name(node.targets[0])
                if name is not None and isinstance(
                    node.value, ast.Compare | ast.Call | ast.Attribute | ast.BoolOp | ast.Subscript
                ):
                    self.names[name] = node.value

    def evaluate(self, test: ast.expr, depth: int = 0) -> bool | None:
        """Whether the condition holds with the target release; None where it does not depend on it alone."""
        match test:
            case ast.BoolOp(op, values):
                results = [self.evaluate(value, depth) for value in values]
                decided = isinstance(op, ast.Or)
                return decided if decided in results else None if None in results else not decided
            case ast.UnaryOp(ast.Not(), operand):
                result = self.evaluate(operand, depth)
                return None if result is None else not result
            case ast.Call(ast.Name("hasattr"), [_, ast.Constant(str(name))]):
                return False if name in self.old else True if re.search(rf"\b{re.escape(name)}\b", self.new) else None
            case ast.Call(ast.Attribute(value, "startswith"), [ast.Constant(str(start))]) if self._is_version(value):
                return f"{self.target[0]}.{self.target[1]}.".startswith(start)
            case ast.Compare(left, [op], [right]) if type(op) in _COMPARE:
                return self._compare(left, op, right)
            case ast.Name() | ast.Attribute():
                return self._evaluate_name(last_name(test) or "", depth)
        return None

    def _evaluate_name(self, name: str, depth: int) -> bool | None:
        value = self.names.get(name)
        if value is not None and depth < 3 and (result := self.evaluate(value, depth + 1)) is not None:
            return result
        since = _SINCE_NAME.fullmatch(name) if len(name) < _MAX_NAME else None
        return self.target[0] >= int(since[1]) if since else None

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> bool | None:
        release = _constant_release(right)
        if release is None or not self._is_version(left):
            return None
        result: bool = _COMPARE[type(op)](self.target[: len(release)], release)
        return result

    def _is_version(self, node: ast.expr, depth: int = 0) -> bool:
        """Whether the value is made from the version of TensorRT."""
        for one in ast.walk(node):
            name = last_name(one)
            if name == "__version__":
                return any(re.search("trt|tensorrt", text, re.I) for text in _names_in(one))
            if name is not None and len(name) < _MAX_NAME and _VERSION_NAME.fullmatch(name):
                value = self.names.get(name)
                return value is None or depth > 2 or self._is_version(value, depth + 1)
        return False


def _names_in(node: ast.AST) -> Iterator[str]:
    return (name for one in ast.walk(node) if (name := one.id if isinstance(one, ast.Name) else None))


def last_name(node: ast.AST | None) -> str | None:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def _constant_release(node: ast.expr) -> tuple[int, ...] | None:
    """`(10,)` of 10, "10", Version("10"); `(8, 5)` of 8.5, "8.5", (8, 5), [8, 5]."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    if isinstance(node, ast.Tuple | ast.List):
        texts = [str(item.value) for item in node.elts if isinstance(item, ast.Constant)]
    elif isinstance(node, ast.Constant) and not isinstance(node.value, bool):
        texts = str(node.value).split(".")
    else:
        return None
    numbers = tuple(int(text) for text in texts[:2] if text.isdecimal())
    return numbers if numbers and numbers[0] < 100 else None


_PREPROCESSOR = re.compile(r"^[ \t]*#[ \t]*(if|ifdef|ifndef|elif|else|endif)\b((?:\\\r?\n|[^\n])*)", re.MULTILINE)
_MAJOR = re.compile(
    r"\b(\w*(?:NV_TENSORRT_MAJOR|TENSORRT_MAJOR|TRT_MAJOR|NV_TENSORRT_VERSION|TENSORRT_VERSION|TRT_VERSION)\w*)\s*(>=|<=|==|!=|>|<)\s*(\d+)"
)
_DEFINED = re.compile(r"(!?)\s*defined\s*\(?\s*(?:USE_|IS_|HAS_)?(?:TRT|TENSORRT)_?(8|10|11)(?:_\w*)?\s*\)?")
_OPERATORS = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt,
}  # fmt: skip


def dead_spans(text: str, target: Release) -> list[tuple[int, int]]:
    """The parts of a C++ file that `#if` on the release leaves out with the target, in order and apart."""
    spans: list[tuple[int, int]] = []
    stack: list[
        tuple[bool | None, bool, int]
    ] = []  # of the open branch: its value, whether one before it held, its start
    for found in _PREPROCESSOR.finditer(text):
        word, condition = found[1], found[2]
        if word.startswith("if"):
            value = _evaluate_condition(
                {"ifdef": "defined ", "ifndef": "!defined "}.get(word, "") + condition.strip(), target
            )
            stack.append((value, value is True, found.end()))
            continue
        if not stack:
            continue
        value, held, start = stack.pop()
        if value is False:
            spans.append((start, found.start()))
        if word == "elif":
            new = False if held else _evaluate_condition(condition.strip(), target)
            stack.append((new, held or new is True, found.end()))
        elif word == "else":
            stack.append((False if held else None if value is None else True, True, found.end()))
    merged = list[tuple[int, int]]()
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            start, end = merged[-1][0], max(end, merged.pop()[1])
        merged.append((start, end))
    return merged


def _evaluate_condition(text: str, target: Release) -> bool | None:
    if "||" in text:
        results = [_evaluate_condition(part, target) for part in text.split("||")]
        return True if True in results else None if None in results else False
    results = []
    for part in text.split("&&"):
        result = None
        if found := _MAJOR.search(part):
            limit, value = int(found[3]), target[0]
            if limit >= 1000:  # major * 1000 (to 9.x) or 10000, + minor * 100
                value = target[0] * (10_000 if target[0] >= 10 else 1000) + target[1] * 100
            elif limit >= 80:
                value = target[0] * 10 + target[1]
            result = _OPERATORS[found[2]](value, limit)
        elif found := _DEFINED.search(part):
            result = (target[0] >= int(found[2])) != bool(found[1])
        results.append(result)
    return False if False in results else None if None in results else True

"""Whether the JSON of a `torch.export` program contains only a graph of operators and nothing that Python evaluates.

`torch.export.load` resolves targets as attributes of `torch`, evaluates size expressions with SymPy, imports classes
named in tree descriptions, and writes names into Python source. Anything not on the lists below is reported.
"""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from trt_engine.errors import ModelError
from trt_engine.format import library_reason, shorten_middle

_OPERATOR = re.compile(
    r"torch\.ops\.(?P<space>aten|prims|quantized|quantized_decomposed|_quantized|torchvision|torchaudio|torch_scatter|torchao)"
    r"\.(?P<name>(?!__)[A-Za-z_]\w*|__i?(and|or|xor|lshift|rshift)__)(\.[A-Za-z]\w*)?",
    re.ASCII,
)
FILE_OPERATORS = frozenset(("from_file", "save", "load", "open"))
"""PyTorch operators that read or write a named file."""


def _names(text: str, before: str = "") -> frozenset[str]:
    return frozenset(f"{before}{name}" for name in text.split())


_FUNCTIONS = frozenset().union(
    _names("abs add and_ eq floordiv ge getitem gt invert le lshift lt mod mul ne neg not_ or_ pos pow rshift sub truediv "
           "xor", "_operator."),
    _names("ceil floor trunc sqrt pow log log2 exp cos sin tan cosh sinh tanh acos asin atan fabs", "math."),
    _names("sym_float sym_fresh_size sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum _sym_sqrt _sym_ceil "
           "_sym_floor _sym_trunc", "torch."),
    _names("cond while_loop map_impl scan associative_scan wrap_with_set_grad_enabled wrap_with_autocast",
           "torch.ops.higher_order."),
)  # fmt: skip
_EXPRESSIONS = _names(
    "Symbol Integer Float Rational Add Mul Pow Mod Max Min Abs floor ceiling sqrt And Or Not Eq Ne Lt Le Gt Ge Equality "
    "Unequality LessThan GreaterThan StrictLessThan StrictGreaterThan Piecewise ExprCondPair BooleanTrue BooleanFalse "
    "FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural FloatPow "
    "FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt RoundDecimal ToFloat "
    "Identity TruncToInt OpaqueUnaryFn_sqrt OpaqueUnaryFn_log2"
)
_SYMBOL = re.compile(r"([suzfib]|zuf|zf)\d{1,6}|true|false|True|False|oo|int_oo|Half|One|Zero|NegativeOne")
_POWERS = _names("Pow PowByNatural FloatPow LShift RShift")
_PLAIN = re.compile(r"[\w.+\- /]*")
_TEXT = re.compile(r"[^\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]*")
_TYPE = re.compile(
    r"builtins\.(tuple|list|dict|slice)|collections\.(OrderedDict|deque|namedtuple)|(transformers|torch)\.[\w.]+"
)
_MAX_EXPRESSION_LENGTH = 20_000
_MAX_EXPONENT = 64
_MAX_POWERS = 2
"""Nested powers: six of them produce gigabytes."""


def code_in_program(raw: bytes, what: str) -> str | None:
    """What this JSON evaluates beyond a graph; None if nothing. `ModelError` for invalid JSON."""
    try:
        root = json.loads(raw)
        return _code(root)
    except (ValueError, RecursionError) as error:
        raise ModelError(
            f"the JSON in {what} cannot be read: {library_reason(error)}", hint="save the program again"
        ) from error


def pickled_members(raw: bytes, what: str) -> list[str]:
    """Files of a list of weights or constants that are pickles."""
    try:
        root = json.loads(raw)
        return [str(item["path_name"]) for item in root["config"].values() if item.get("use_pickle", True)]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"the JSON in {what} cannot be read: {shorten_middle(repr(error), 400)}", hint="save the program again"
        ) from error


def _code(root: Any) -> str | None:
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        key, value = left.pop()
        if key == "metadata" and isinstance(value, dict):
            if not all(isinstance(item, str) and _TEXT.fullmatch(item) for item in value.values()):
                return "the metadata of a node is not text"
        elif isinstance(value, dict):
            for name in value:
                if not (_is_expression(name) if key == "range_constraints" else _PLAIN.fullmatch(name)):
                    return f"it uses the name {name[:80]!r}"
            left += value.items()
        elif isinstance(value, list):
            left += [(key, item) for item in value]
        elif isinstance(value, str) and (found := _code_in_text(key, value)):
            return found
    return None


def _code_in_text(key: str, text: str) -> str | None:
    if key in ("target", "as_operator"):
        return None if _is_operator(text) else f"its graph calls `{text[:80]}`"
    if key == "expr_str":
        return None if _is_expression(text) else f"a size in it is the expression {text[:80]!r}"
    if key in ("in_spec", "out_spec"):
        return None if _is_tree(text) else f"its inputs or outputs are described by {text[:80]!r}"
    if key in ("as_string", "as_strings", "guards_code"):  # literals; guards are cleared before they are compiled
        return None
    return None if _PLAIN.fullmatch(text) else f"its `{key[:40]}` is {text[:80]!r}"


def _is_operator(target: str) -> bool:
    if target in _FUNCTIONS:
        return True
    found = _OPERATOR.fullmatch(target)
    if found is None:  # a target of a parameter or buffer is its name
        return not target.startswith(("torch", "_operator", "math", "#")) and bool(_PLAIN.fullmatch(target))
    return found["name"] not in FILE_OPERATORS


def _is_expression(text: str) -> bool:
    """Known functions of SymPy, symbols, numbers and operators, with small exponents and few powers in each other."""
    if len(text) > _MAX_EXPRESSION_LENGTH:
        return False
    try:
        return _powers(ast.parse(text, mode="eval").body) <= _MAX_POWERS
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _powers(node: ast.expr) -> int:
    """How many powers are inside of each other; `ValueError` for what is not such an expression."""
    match node:
        case ast.Call(func=ast.Name("Symbol"), args=[ast.Constant(str(name))]) if _SYMBOL.fullmatch(name):
            inside: list[ast.expr] = []
        case ast.Call(func=ast.Name("Float")):
            inside = []
            if not all(_is_number(item) for item in [*node.args, *(word.value for word in node.keywords)]):
                raise ValueError("a Float of something else")
        case ast.Call(func=ast.Name(name)) if name in _EXPRESSIONS and name != "Symbol":
            inside = node.args
        case ast.BinOp(op=op) if not isinstance(op, ast.MatMult):
            inside = [node.left, node.right]
        case ast.UnaryOp():
            inside = [node.operand]
        case ast.Compare():
            inside = [node.left, *node.comparators]
        case ast.BoolOp():
            inside = node.values
        case ast.Name(name) if _SYMBOL.fullmatch(name):
            inside = []
        case ast.Constant(value) if _is_number(node) and not isinstance(value, str):
            inside = []
        case _:
            raise ValueError("not part of an expression of sizes")
    if isinstance(node, ast.Call) and not all(isinstance(word.value, ast.Constant) for word in node.keywords):
        raise ValueError("a computed keyword")
    is_power = (isinstance(node, ast.Call) and ast.unparse(node.func) in _POWERS) or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift | ast.RShift)
    )
    if is_power and (len(inside) != 2 or not _is_small(inside[1])):
        raise ValueError("a large exponent")
    return is_power + max(map(_powers, inside), default=0)


def _is_number(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant):
        return False
    if isinstance(node.value, str):
        return bool(re.fullmatch(r"-?[0-9.]{1,40}(e[+-]?[0-9]{1,3})?", node.value))
    return isinstance(node.value, bool | float) or (isinstance(node.value, int) and abs(node.value) < 1 << 64)


def _is_small(node: ast.expr) -> bool:
    """An exponent: a small number, bare or as `Integer(2)`."""
    match node:
        case ast.Call(func=ast.Name("Integer" | "Float"), args=[only]):
            return _is_small(only)
        case ast.Call(func=ast.Name("Rational")):
            return all(_is_small(item) for item in node.args)
        case ast.UnaryOp(op=ast.USub()):
            return _is_small(node.operand)
        case ast.Constant(int(value) | float(value)):
            return abs(value) <= _MAX_EXPONENT
    return False


def _is_tree(text: str) -> bool:
    """A description of nested containers; `context` may name a class to import."""
    if not text:
        return True
    try:
        parts = json.loads(text)
        left = [parts[1]]
        while left:
            spec = left.pop()
            kind, context = spec["type"], spec["context"]
            if kind is not None and not _TYPE.fullmatch(kind):
                return False
            if context is not None and not _is_context(json.loads(context) if isinstance(context, str) else context):
                return False
            left += spec["children_spec"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return False
    return True


def _is_context(context: Any) -> bool:
    """Keys, sizes, field names: mappings are rejected, as they may name a class to import."""
    if isinstance(context, list):
        return all(_is_context(item) for item in context)
    if isinstance(context, str):
        return bool(_PLAIN.fullmatch(context))
    return context is None or isinstance(context, bool | int | float)

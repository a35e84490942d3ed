"""Checks ZIP archives of models before opening them: one directory, bounded sizes, every pickle inspected.

Members are classified by content: pickles, archives and code are detected whatever their names. Members that PyTorch
unpickles by name must be pickles.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from trt_engine.conversion.torch.pickle_check import code_in_pickles
from trt_engine.errors import ModelError
from trt_engine.format import library_reason
from trt_engine.limits import ARCHIVE_MEMBERS, ARCHIVE_RATIO, PROGRAM_SIZE

_DAMAGED = "copy or download the file again"
_MAX_DEPTH = 4
_SLACK = 1 << 20
_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ZIP = b"PK\x03\x04"


@contextlib.contextmanager
def open_checked_archive(file: BinaryIO, what: str) -> Iterator[zipfile.ZipFile]:
    """The opened archive if every reader sees the same bounded members; `ModelError` otherwise."""
    try:
        _check_directory(file, what)
        with zipfile.ZipFile(file) as archive:
            _members(archive, file, what)
            yield archive
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError, zlib.error) as error:
        raise ModelError(f"{what} is a damaged ZIP archive: {error}", hint=_DAMAGED) from error


def _rejection(what: str, reason: str, hint: str = _DAMAGED) -> ModelError:
    return ModelError(f"{what} is a damaged ZIP archive: {reason}", hint=hint)


def _check_directory(file: BinaryIO, what: str) -> None:
    """Require the directory at the end of the file, as readers locate it differently."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 98))
    tail = file.read(98)
    wide = tail[-42:-38] == _LOCATOR64
    if len(tail) < 22 or tail[-22:-18] != _END or tail[-2:] != b"\0\0" or (wide and tail[:4] != _END64):
        raise _rejection(what, "its directory is not at its end")
    place, length, start = size - 22, int.from_bytes(tail[-10:-6], "little"), int.from_bytes(tail[-6:-2], "little")
    if wide:
        place, length, start = size - 98, int.from_bytes(tail[40:48], "little"), int.from_bytes(tail[48:56], "little")
    if start + length != place:
        raise _rejection(what, "its directory is not at its recorded offset")
    if length > 46 * ARCHIVE_MEMBERS.value * 4:
        raise _rejection(what, f"its directory has {length} bytes", ARCHIVE_MEMBERS.hint)
    file.seek(0)


def _members(archive: zipfile.ZipFile, file: BinaryIO, what: str) -> None:
    infos = archive.infolist()
    if len(infos) > ARCHIVE_MEMBERS.value:
        raise _rejection(what, f"it has {len(infos)} members", ARCHIVE_MEMBERS.hint)
    seen: set[str] = set()
    end = 0
    for info in sorted(infos, key=lambda item: item.header_offset):
        name, stored = info.filename, info.compress_type == zipfile.ZIP_STORED
        if name.casefold() in seen:
            raise _rejection(what, f"it has two members `{name}`")
        seen.add(name.casefold())
        if not name or name.startswith("/") or "\\" in name or ".." in name.split("/"):
            raise _rejection(what, f"its member `{name}` leaves the archive")
        if info.flag_bits & 0x1:
            raise _rejection(what, f"its member `{name}` is encrypted", "unpack it, and pack it without a password")
        if not (stored or info.compress_type == zipfile.ZIP_DEFLATED):
            raise _rejection(what, f"its member `{name}` is compressed in a way that models do not use")
        if stored and info.file_size != info.compress_size:
            raise _rejection(what, f"its member `{name}` has two sizes")
        if info.header_offset < end:
            raise _rejection(what, f"its member `{name}` overlaps another")
        end = info.header_offset + 30 + info.compress_size
    size = file.seek(0, os.SEEK_END)
    total = sum(info.file_size for info in infos)
    if end > size or total > ARCHIVE_RATIO.value * size + _SLACK:
        raise _rejection(what, f"it has {size} bytes and would grow to {total}", ARCHIVE_RATIO.hint)


# ------------------------------------------------------------------------------------------------ contents


def code_in_archive(archive: zipfile.ZipFile, what: str, *, kind: str, depth: int = 1) -> list[str]:
    """Executable content of a PyTorch archive: foreign globals, code that accesses files, compiled code."""
    found: list[str] = []
    script = kind == "torchscript"
    strict = _pickles_by_name(archive, what, kind)
    for info in [item for item in archive.infolist() if not item.is_dir()]:
        inner = info.filename.split("/", 1)[-1].casefold()  # PyTorch finds members case-insensitively
        member = f"`{info.filename}` of {what}"
        with archive.open(info) as raw:
            head = raw.read(4)
        if kind == "exported-program" and (native := _native(inner)):
            found.append(f"its member `{info.filename}` is {native}")
        elif script and inner.startswith("code/") and not inner.endswith((".debug_pkl", ".pkl")):
            if reaches := _code_in_script(_read_member(archive, info, what)):
                found.append(reaches)
        elif kind == "exported-program" and (
            inner.startswith("models/") or (inner.endswith(".json") and not inner.startswith("extra/"))
        ):  # JSON by name, and all that PyTorch reads as programs
            if evaluated := code_in_program(_read_member(archive, info, what), member):
                found.append(evaluated)
        elif head == _ZIP:
            found += _nested(archive, info, what, depth)
        elif (by_name := info.filename in strict and head != b"") or re.match(rb"\x80[\x02-\x05]", head):
            with archive.open(info) as opened:
                found += code_in_pickles(_buffered(opened), member, strict=by_name, script=script)
    return found


def _buffered(opened: object) -> BinaryIO:
    return io.BufferedReader(opened, 1 << 16)  # type: ignore[type-var]


def _native(inner: str) -> str | None:
    if inner.startswith(("data/aotinductor/", "aotinductor/")) or inner.endswith((".so", ".dll", ".dylib", ".pyd")):
        return "compiled code"
    name = inner.rsplit("/", 1)[-1]
    if name.startswith("custom_obj_"):
        return "an object of a class of TorchScript"
    return "a pickled object" if name.startswith("opaque_obj_") else None


def _pickles_by_name(archive: zipfile.ZipFile, what: str, kind: str) -> set[str]:
    """Members that PyTorch unpickles by name."""
    names: set[str] = set()
    for info in archive.infolist():
        inner = info.filename.split("/", 1)[-1].casefold()
        last = inner.rsplit("/", 1)[-1]
        if last.endswith((".pkl", ".pickle", ".debug_pkl")):
            names.add(info.filename)
        elif kind == "exported-program":
            if last.endswith((".pt", ".pth", ".bin")) and not inner.startswith("extra/"):
                names.add(info.filename)
            elif last.endswith(("weights_config.json", "constants_config.json")):
                folder = info.filename.rsplit("/", 1)[0]
                listed = pickled_members(_read_member(archive, info, what), f"`{info.filename}` of {what}")
                names |= {f"{folder}/{name}" for name in listed}
    return names


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str) -> bytes:
    if info.file_size > PROGRAM_SIZE.value:
        raise ModelError(f"`{info.filename}` of {what} has {info.file_size} bytes", hint=PROGRAM_SIZE.hint)
    return archive.read(info)


def _nested(archive: zipfile.ZipFile, info: zipfile.ZipInfo, what: str, depth: int) -> list[str]:
    member = f"`{info.filename}` of {what}"
    if depth >= _MAX_DEPTH:
        raise _rejection(what, f"it has archives in archives, {depth} deep")
    stored = info.compress_type == zipfile.ZIP_STORED
    raw: BinaryIO = _buffered(archive.open(info)) if stored else io.BytesIO(_read_member(archive, info, what))
    with raw, open_checked_archive(raw, member) as inside:
        return code_in_archive(inside, member, kind="nested", depth=depth + 1)


# ------------------------------------------------------------------------------------------------ TorchScript

_REACHING = re.compile(r"from_file|save|rpc_(a?sync|remote)|load_tensor")
"""`aten::from_file` maps a file, `aten::save` writes one, the others start work in other processes."""
_IN_TEXT = re.compile(rb"from_file|rpc_a?sync|rpc_remote|\bsave[\"'\s]*[(,]")
"""The same in raw bytes, however PyTorch parses them; `def save(` is a method of the archive."""
_SPACES = frozenset(
    "aten prim prims quantized _quantized quantization mkldnn mkldnn_prepacked onednn sparse torchvision torchaudio "
    "profiler static_runtime".split()
)
_CLASSES = frozenset("quantized xnnpack mkldnn rnn sparse".split())
"""Allowed in `torch.classes`: packed weights."""


def _code_in_script(raw: bytes) -> str | None:
    """What TorchScript accesses beyond computation, from its text before PyTorch compiles it; None if nothing.

    It has no `import`: it can use PyTorch operators and classes of its archive. Two operators take a file name and a few
    communicate with other processes; methods of the archive run while it is opened.
    """
    if word := _IN_TEXT.search(re.sub(rb"\bdef\s+save\s*\(", b"def (", raw)):
        return f"its code uses `{word[0].decode().strip(chr(34) + ' (,')}`"
    try:
        nodes = list(ast.walk(ast.parse(raw)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "its code cannot be read"
    for node in nodes:
        name = None
        if isinstance(node, ast.Attribute):
            name = node.attr if _REACHING.fullmatch(node.attr) else _foreign_namespace(node)
        elif isinstance(node, ast.Name) and _REACHING.fullmatch(node.id):
            name = node.id
        elif isinstance(node, ast.Call) and _dotted(node.func) in ("getattr", "hasattr", "setattr"):
            named = node.args[1] if len(node.args) > 1 else None
            if not isinstance(named, ast.Constant) or _REACHING.fullmatch(str(named.value)):
                name = ast.unparse(node)[:60]
        if name is not None:
            return f"its code uses `{name}`"
    return None


def _foreign_namespace(node: ast.Attribute) -> str | None:
    """`ops.NAME` and `torch.classes.NAME` outside the computing namespaces; None otherwise."""
    space = _dotted(node.value)
    if space in ("ops", "torch.ops"):
        return None if node.attr in _SPACES else f"ops.{node.attr}"
    return f"torch.classes.{node.attr}" if space == "torch.classes" and node.attr not in _CLASSES else None


def _dotted(node: ast.expr) -> str:
    """`torch.classes` of the expression that is this; other expressions end in an empty name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *names[::-1]])


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
    with _json_errors(what):
        return _code(json.loads(raw))


def pickled_members(raw: bytes, what: str) -> list[str]:
    """Files of a list of weights or constants that are pickles."""
    with _json_errors(what):
        return [str(item["path_name"]) for item in json.loads(raw)["config"].values() if item.get("use_pickle", True)]


@contextlib.contextmanager
def _json_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        reason = library_reason(error if isinstance(error, ValueError) else repr(error))
        raise ModelError(f"the JSON in {what} cannot be read: {reason}", hint="save the program again") from error


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

"""One mutation for each kind of file, chosen by its suffix.

Each takes a `random.Random`, so that a seed gives the same input again.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import pickle
import random
import re
import sqlite3
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import numpy as np
import onnx
import yaml
from google.protobuf.message import Message
from onnx import ModelProto, TensorProto, helper, numpy_helper

FORGED = "FORGED_LINE"
"""Follows a newline inside a name: a line of the output that begins with it was forged by the name."""
MARKUP = "<script>FUZZ</script>"
"""Must never stand unescaped in a page."""

_TEXTS = (
    "", " ", "a", "images", "0", "-1", "None", "nan", "x" * 5000, f"x\n{FORGED}: 1", f"x\r\n{FORGED}: 2",
    "\x1b]0;t\x07\x1b[31m",
    "\x00", "\x9b31m", "\u202egnp.exe", "\ud800", "\udcff", "é\u0301", "模型", "../../outside/secret.bin", "/etc/hostname",
    "a/b", "..", ".", "-o", "--help", "%s%n", "{0}", "$(touch x)", "`x`", MARKUP, "](javascript:alert(1))", "|*_`", "'\"",
    "float32", "int64", "cpu", "cuda:0", "1x3x8x8", "1e999", "1" * 400, "2026-13-45T99:99:99", "sha256:" + "0" * 64,
    "\ufeff",
    "a" * 300 + ".json", "\t", "\x7f", "\u2028x", "\u0085", "::", "@x", "#", "\\", "NaN", "Infinity", "true", "[]", "{}",
)  # fmt: skip
_WHOLE = (
    0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63,
    -(2**63), 2**64, 10**18, 10**30, 10**400, -(10**400),
)  # fmt: skip
_REAL = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e-9, 1e18, 1e300, 1.7e308, float("inf"), float("-inf"), float("nan"))
_DEEP = "@deep@"
"""Stands for brackets nested far deeper than any reader recurses; put in when the tree is written."""


def number(rng: random.Random) -> int | float:
    """A number that readers may not have expected."""
    return rng.choice(_WHOLE) if rng.random() < 0.7 else rng.choice(_REAL)


def hostile_text(rng: random.Random) -> str:
    """A text that readers and terminals may not have expected."""
    return rng.choice(_TEXTS)


# ------------------------------------------------------------------------------------------------ bytes


def mutate_bytes(rng: random.Random, raw: bytes, changes: int | None = None) -> bytes:
    """A few bytes flipped, inserted, deleted, repeated or cut off."""
    made = bytearray(raw)
    for _ in range(changes or rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange((len(made) if rng.random() < 0.6 else min(len(made), 64)) + 1)  # the head states sizes
        length = min(rng.choice((1, 1, 2, 4, 8, 32, 256)), len(made) - at)
        act = rng.randrange(7)
        if act == 0 and at < len(made):
            made[at] ^= 1 << rng.randrange(8)
        elif act == 1 and at < len(made):
            made[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x1B, 0x0A, 0x22, 0x7B, 0x5B, rng.randrange(256)))
        elif act == 2:
            made[at:at] = rng.randbytes(max(1, length))
        elif act == 3:
            del made[at : at + length]
        elif act == 4:
            made[at:at] = made[at : at + length] * rng.choice((1, 2, 50))
        elif act == 5:
            source = rng.randrange(len(made) + 1)
            made[at : at + length] = made[source : source + length]
        elif rng.random() < 0.3:
            del made[at:]
        else:
            made[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\0\0\0\x80"))
    return bytes(made)


# ------------------------------------------------------------------------------------------------ text

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def _text(rng: random.Random, raw: bytes) -> bytes:
    """Lines and numbers changed, moved, repeated or left out; sometimes bytes on top of that."""
    lines = raw.decode(errors="replace").split("\n")
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        at = rng.randrange(len(lines))
        act = rng.randrange(10)
        if act == 0:
            del lines[at]
        elif act == 1:
            lines[at:at] = [lines[at]] * rng.choice((1, 2, 40))
        elif act == 2:
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
        elif act == 3:
            lines[at] = lines[at][: rng.randrange(len(lines[at]) + 1)]
        elif act in (4, 5, 6):
            found = list(_NUMBER.finditer(lines[at]))
            if found:
                hit = rng.choice(found)
                lines[at] = lines[at][: hit.start()] + _spelled(number(rng)) + lines[at][hit.end() :]
        elif act == 7:
            where = rng.randrange(len(lines[at]) + 1)
            lines[at] = lines[at][:where] + hostile_text(rng) + lines[at][where:]
        elif act == 8:
            lines[at] = lines[at].replace(
                rng.choice(",:=;\"'. []()%"), rng.choice(("", ",", ";", "\t", "\r", '"', "::"))
            )
        else:
            lines = lines[:at]
        lines = lines or [""]
    made = "\n".join(lines)
    return made.encode("utf-16", "replace") if rng.random() < 0.05 else made.encode("utf-8", "surrogatepass")


def _spelled(value: int | float) -> str:
    return str(value) if isinstance(value, float) or abs(value) < 10**300 else f"{'-' * (value < 0)}1{'0' * 400}"


# ------------------------------------------------------------------------------------------------ trees of JSON or YAML

_Place = tuple[Any, Any]
"""A container and the key or index in it."""


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """A copy of the tree with values, keys and branches changed; a leaf may be the mark of a nest (`_json`)."""
    made = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        places = _places(made)
        if not places:
            return _value(rng)
        holder, key = rng.choice(places)
        _change(rng, holder, key, places)
    return made


def _change(rng: random.Random, holder: Any, key: Any, places: list[_Place]) -> None:
    old = holder[key]
    act = rng.randrange(12)
    if act <= 2:
        holder[key] = _value(rng)
    elif act <= 4:
        holder[key] = _alike(rng, old)
    elif act == 5:
        del holder[key]
    elif act == 6 and isinstance(holder, dict):
        holder[hostile_text(rng)] = holder.pop(key) if rng.random() < 0.5 else _value(rng)
    elif act == 6:
        holder.insert(key, copy.deepcopy(old))
    elif act == 7:
        other, name = rng.choice(places)
        holder[key] = copy.deepcopy(other[name])
    elif act == 8:
        holder[key] = [old] if rng.random() < 0.5 else {"a": old}
    elif act == 9 and isinstance(old, list):
        holder[key] = old[: rng.randrange(len(old) + 1)] if rng.random() < 0.5 else old * rng.choice((0, 2, 30))
    elif act == 10 and isinstance(old, dict):
        holder[key] = list(old.values()) if rng.random() < 0.5 else {}
    elif rng.random() < 0.08:
        holder[key] = _DEEP
    else:
        holder[key] = hostile_text(rng)


def _alike(rng: random.Random, old: Any) -> Any:
    """Another value of the same kind: this is what passes a reader and meets the code behind it."""
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return number(rng) if rng.random() < 0.6 else old + rng.choice((-1, 1, 2))
    if isinstance(old, float):
        return rng.choice((*_REAL, -old, old * 1e9))
    if isinstance(old, str):
        return old[: rng.randrange(len(old) + 1)] + hostile_text(rng)
    if isinstance(old, list):
        return [*reversed(old)] if rng.random() < 0.5 else [*old, _value(rng)]
    return _value(rng)


def _value(rng: random.Random) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: None, lambda: True, lambda: number(rng), lambda: number(rng), lambda: hostile_text(rng),
        lambda: hostile_text(rng), list, dict, lambda: [number(rng), hostile_text(rng)],
        lambda: {hostile_text(rng): number(rng)}, lambda: [[number(rng)]],
    )  # fmt: skip
    return rng.choice(makers)()


def _places(tree: Any) -> list[_Place]:
    """Every value of the tree by where it stands, without the tree itself."""
    found: list[_Place] = []
    todo = [tree]
    while todo:
        holder = todo.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            todo.append(holder[key])
    return found


def _json(rng: random.Random, raw: bytes, nest: int = 100_000) -> bytes:
    """The document mutated, sometimes with bytes changed on top of that."""
    tree = mutate_tree(rng, json.loads(raw))
    text = json.dumps(tree, ensure_ascii=rng.random() < 0.7, indent=rng.choice((None, 1)))
    if _DEEP in text:
        one = rng.choice(("[", '{"a":'))
        deep = one * nest + "1" + ("]" if one == "[" else "}") * nest * (rng.random() < 0.5)
        text = text.replace(f'"{_DEEP}"', deep)
    raw = text.encode("utf-8", "surrogatepass")
    return mutate_bytes(rng, raw) if rng.random() < 0.12 else raw


def _json_lines(rng: random.Random, raw: bytes) -> bytes:
    lines = raw.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = _json(rng, lines[at], nest=3000).replace(b"\n", b" ")
    return b"\n".join(lines) + b"\n" * rng.randrange(2)


_YAML_PARTS = (
    "\n? [a, b]\n: c\n", "\n<<: *x\n", "\nx: &x [*x]\n",
    "\nx: !!python/object/apply:os.system ['touch CODE_WAS_RUN']\n",
    "\nmodels: &m [m.onnx]\nb: *m\n", "\n---\na: 1\n", "\nbatches: [1, 1, 1]\n", "\ntitle: \"\\e[31m\\nx\"\n",
    "\nx: 0o17\n", "\n\t- a\n", "\nx: !!binary aGk=\n", "\nbatches: [1, 2" * 3, "\nx: " + "[" * 5000,
)  # fmt: skip


def _yaml(rng: random.Random, raw: bytes) -> bytes:
    try:
        text = yaml.safe_dump(mutate_tree(rng, yaml.safe_load(raw)), allow_unicode=True, sort_keys=False)
    except (yaml.YAMLError, ValueError, OverflowError):
        text = raw.decode()
    text += rng.choice(_YAML_PARTS) if rng.random() < 0.3 else ""
    made = text.encode("utf-8", "surrogatepass")
    return _text(rng, made) if rng.random() < 0.3 else made


# ------------------------------------------------------------------------------------------------ archives and arrays

_NAMES = (
    "../evil", "/evil", "a/../../evil", "a\\b", "x" * 300, "\x1b[31m.json", "size.json", "run/size.json", "", ".", "..",
    "a\nb", "con", "run/cells/../size.json", "run//size.json", "run/", "\u202ex", "data.pkl", "PACK.json", "arr_0.npy",
)  # fmt: skip


class _Payload:
    """Would run a command if anything unpickled it."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch CODE_WAS_RUN",)


def evil_pickle(rng: random.Random) -> bytes:
    """A pickle that runs a command when it is loaded."""
    return pickle.dumps(_Payload(), protocol=rng.choice((0, 2, 4)))


def _members(rng: random.Random, members: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
    """The members, some of them added, renamed, left out, repeated, cut, replaced by a pickle or mutated."""
    made = list(members)
    for _ in range(rng.choice((0, 1, 1, 2)) if made else 0):
        at = rng.randrange(len(made))
        name, raw = made[at]
        made[at : at + 1] = rng.choice((
            [(name, raw), (rng.choice(_NAMES), rng.randbytes(20))], [(rng.choice(_NAMES), raw)], [], [(name, raw)] * 2,
            [(name, raw[: len(raw) // 2])], [(name, evil_pickle(rng))], [(name, mutate(rng, name, raw))],
            [(name, mutate(rng, name, raw))],
        ))  # fmt: skip
        if not made:
            break
    return made


def _zip(rng: random.Random, raw: bytes) -> bytes:
    """The archive with members, their headers or its directory changed."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # names that come twice
        for name, member in _members(rng, members):
            info = zipfile.ZipInfo(name.encode(errors="replace").decode() or "x")
            info.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
            if rng.random() < 0.05:
                info.external_attr = rng.choice((0o120777, 0o010644, 0o040755)) << 16
            archive.writestr(info, member)
    made = bytearray(buffer.getvalue())
    mark = rng.choice((b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04"))
    if rng.random() < 0.25 and (spots := [item.start() for item in re.finditer(re.escape(mark), bytes(made))]):
        at = rng.choice(spots) + rng.randrange(4, 46)
        made[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\x63\0\0\0"))
    return bytes(made)


def _tar(rng: random.Random, raw: bytes) -> bytes:
    """The gzipped archive with members, their kinds or a block changed."""
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        members = [(item.name, archive.extractfile(item).read()) for item in archive if item.isfile()]  # type: ignore[union-attr]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as archive:
        for name, member in _members(rng, members):
            info = tarfile.TarInfo(name)
            info.size = len(member)
            if rng.random() < 0.06:
                info.type = rng.choice((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, b"9"))
                info.linkname = rng.choice(("/etc/passwd", "../x", "size.json", ""))
                info.size = 0
            archive.addfile(info, io.BytesIO(member))
    made = bytearray(buffer.getvalue())
    if rng.random() < 0.15:
        at = 512 * rng.randrange(len(made) // 512) + rng.choice((100, 124, 136, 148, 156, 257, 329))
        made[at : at + 8] = rng.choice((b"77777777", b"\x80\0\0\0\x7f\xff\xff\xff", b"-1      ", b"\xff" * 8))
    return gzip.compress(bytes(made), 1, mtime=0)


_HEADERS = (
    "", "(" * 5000, "{" * 300, "[]", "{'descr': '<f4'}", "__import__('os')", "\0", "1" * 9000,
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 70 + ")}",
)  # fmt: skip


def _npy(rng: random.Random, raw: bytes) -> bytes:
    """The array as another one, or with another header."""
    array = np.load(io.BytesIO(raw))
    if rng.random() < 0.4:
        return _saved(rng.choice((
            lambda: array.astype(rng.choice(("float16", "float64", "int8", "int64", "bool", "complex64", "<U4", "S3"))),
            lambda: array.reshape(-1), lambda: array[:0], lambda: np.asfortranarray(array),
            lambda: np.full_like(array, rng.choice((np.inf, np.nan, -1)) if array.dtype.kind == "f" else 1),
            lambda: np.array([{"a": 1}, _Payload()], dtype=object), lambda: np.concatenate([array] * 5),
            lambda: np.zeros(tuple(rng.choice((0, 1, 2, 9)) for _ in range(rng.randrange(6))), np.float32),
        ))())  # fmt: skip
    header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
    header[rng.choice(list(header))] = rng.choice((
        number(rng), hostile_text(rng), (number(rng),), (1 << 40, 1 << 40), (-1, 3), "|O", "<c16", "|V0", [("a", "<f4")],
        None, (1,) * 100,
    ))  # fmt: skip
    text = (rng.choice(_HEADERS) if rng.random() < 0.2 else repr(header)) + "\n"
    packed = text.encode("utf-8", "surrogatepass")[:65_000]
    return raw[:8] + struct.pack("<H", len(packed)) + packed + raw[10 + struct.unpack("<H", raw[8:10])[0] :]


def _saved(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _png(rng: random.Random, raw: bytes) -> bytes:
    """The picture with a chunk changed under a right checksum: the first, of its sizes, in half of the cases."""
    chunks, at = [], 8
    while at + 8 <= len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        chunks.append([raw[at + 4 : at + 8], raw[at + 8 : at + 8 + length]])
        at += 12 + length
    pick = chunks[0] if rng.random() < 0.5 else rng.choice(chunks)
    if rng.random() < 0.3:
        pick[1] = struct.pack(">I", rng.choice((0, 1, 7, 2**16, 2**31 - 1, 2**32 - 1))) + pick[1][4:]
    elif rng.random() < 0.8:
        pick[1] = mutate_bytes(rng, pick[1])
    else:
        kinds = (b"tEXt", b"zTXt", b"iCCP", b"acTL", b"eXIf", b"PLTE", b"tRNS")
        chunks.insert(rng.randrange(len(chunks) + 1), [rng.choice(kinds), rng.randbytes(30)])
    packed = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    return raw[:8] + b"".join(packed)


def _sqlite(rng: random.Random, raw: bytes) -> bytes:
    """The database with values of a column, or a table, changed."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.deserialize(raw)
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for _ in range(rng.choice((1, 1, 2, 3))):
            table = rng.choice(tables)
            column = rng.choice([row[1] for row in database.execute(f'PRAGMA table_info("{table}")')] or ["x"])
            change = rng.choice((
                f'UPDATE "{table}" SET "{column}" = ?', f'UPDATE "{table}" SET "{column}" = ? WHERE rowid % 2',
                f'UPDATE "{table}" SET "{column}" = ? WHERE rowid = 1', f'ALTER TABLE "{table}" DROP COLUMN "{column}"',
                f'DELETE FROM "{table}" WHERE rowid % 2', f'DROP TABLE "{table}"',
            ))  # fmt: skip
            value = number(rng) if rng.random() < 0.7 else hostile_text(rng)
            with contextlib.suppress(sqlite3.Error, OverflowError, UnicodeError):
                database.execute(change, (value,) * change.count("?"))
        database.commit()
        return database.serialize()


# ------------------------------------------------------------------------------------------------ networks

_INTS = (0, 1, -1, 2, 3, 4, 7, 9, 10, 13, 16, 17, 21, 22, 23, 24, 99, 255, 1 << 16, 1 << 24, (1 << 31) - 1, 1 << 31, 1 << 40,
         (1 << 62), (1 << 63) - 1, -(1 << 31), -(1 << 63))  # fmt: skip
_OPS = (
    "Relu", "Conv", "LayerNormalization", "Range", "Concat", "Expand", "Tile", "ConstantOfShape", "Pad", "Resize", "OneHot",
    "Loop", "If", "Scan", "Einsum", "TopK", "NonMaxSuppression", "QuantizeLinear", "DequantizeLinear", "BatchNormalization",
    "GroupNormalization", "Attention", "RandomNormal", "Dropout", "NoSuchOp", "Reshape", "Split", "Constant",
    "Identity", "Where",
    "GridSample", "StringNormalizer", "SequenceConstruct", "Optional", "ArgMax", "CumSum", "GatherND", "ScatterND",
    "MaxPool", "LSTM",
)  # fmt: skip


def _network(rng: random.Random, raw: bytes) -> bytes:
    """The model with messages, fields or wires changed."""
    model = ModelProto.FromString(raw)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 4))):
        try:
            _change_model(rng, model)
        except (ValueError, TypeError, OverflowError, IndexError):  # what this model has not, or this field cannot hold
            continue
    try:
        return model.SerializeToString()
    except ValueError:  # a text that UTF-8 has no bytes for
        return mutate_bytes(rng, raw)


def _change_model(rng: random.Random, model: ModelProto) -> None:
    if rng.random() < 0.35:
        _rewire(rng, model)
        return
    messages = list(_messages(model))
    message = rng.choice(messages)
    present = message.ListFields()
    field, value = (
        (rng.choice(present)) if present and rng.random() < 0.8 else (rng.choice(message.DESCRIPTOR.fields), None)
    )
    if _is_repeated(field):
        _change_list(rng, getattr(message, field.name), field, messages)
    elif rng.random() < 0.12:
        message.ClearField(field.name)
    elif field.message_type is not None:
        others = [one for one in messages if one.DESCRIPTOR is field.message_type]
        if others:
            getattr(message, field.name).CopyFrom(_copy(rng.choice(others)))
    else:
        setattr(message, field.name, _scalar(rng, field, value))


def _messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for item in value if _is_repeated(field) else (value,):
                yield from _messages(item)


def _is_repeated(field: Any) -> bool:
    known = getattr(field, "is_repeated", None)
    return bool(known) if known is not None else field.label == field.LABEL_REPEATED


def _copy(message: Message) -> Message:
    made = type(message)()
    made.CopyFrom(message)
    return made


def _change_list(rng: random.Random, items: Any, field: Any, messages: list[Message]) -> None:
    act = rng.randrange(6)
    if act == 0 and len(items):
        del items[rng.randrange(len(items))]
    elif act == 1 and len(items):
        again = items[rng.randrange(len(items))]
        items.extend([_copy(again) if field.message_type is not None else again])
    elif act == 2 and len(items) > 1:
        order = [_copy(item) if field.message_type is not None else item for item in items]
        rng.shuffle(order)
        del items[:]
        items.extend(order)
    elif field.message_type is not None:
        others = [one for one in messages if one.DESCRIPTOR is field.message_type]
        if others:
            items.extend([_copy(rng.choice(others))])
    elif act == 3 or not len(items):
        items.extend([_scalar(rng, field, None)])
    else:
        at = rng.randrange(len(items))
        items[at] = _scalar(rng, field, items[at])


def _scalar(rng: random.Random, field: Any, old: Any) -> Any:
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        if field.type == field.TYPE_BYTES:
            raw = old if isinstance(old, bytes) else b""
            return rng.choice((b"", raw[:-1], raw + b"\0", raw * 2, b"\xff\x1b[31m", mutate_bytes(rng, raw)))
        if isinstance(old, str) and old.startswith(("{", "[")):  # metadata that holds a document
            with contextlib.suppress(ValueError):
                return _json(rng, old.encode(), nest=300).decode("utf-8", "replace")
        return hostile_text(rng).encode("utf-8", "replace").decode()
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -1.0, 1e38, 1e-45, float("inf"), float("nan")))
    if kind == field.CPPTYPE_ENUM:
        return rng.choice((0, 1, 2, 6, 7, 10, 16, 17, 22, 99))
    if kind == field.CPPTYPE_BOOL:
        return not old
    return rng.choice(_INTS) if rng.random() < 0.8 or not isinstance(old, int) else old + rng.choice((-1, 1))


def _rewire(rng: random.Random, model: ModelProto) -> None:
    """A change that keeps every message whole: wires, operators, constants, dimensions."""
    graphs = [one for one in _messages(model) if isinstance(one, onnx.GraphProto)]
    graph = rng.choice(graphs)
    names = [*(item.name for item in graph.input), *(item.name for item in graph.initializer),
             *(name for item in graph.node for name in item.output), ""]  # fmt: skip
    act = rng.randrange(10)
    nodes = list(graph.node)
    if act <= 1 and nodes:
        pick = rng.choice(nodes)
        if pick.input:
            pick.input[rng.randrange(len(pick.input))] = rng.choice(names)  # may close a cycle
    elif act == 2 and nodes:
        rng.choice(nodes).op_type = rng.choice(_OPS)
    elif act == 3 and nodes:
        pick = rng.choice(nodes)
        made = _copy(pick)
        if pick.output:
            made.output[0] = f"{pick.output[0]}_more"
            graph.node.insert(rng.randrange(len(nodes) + 1), made)
    elif act == 4 and graph.initializer:
        pick = rng.choice(graph.initializer)
        if pick.data_type == TensorProto.INT64:
            shape = [rng.choice((1, 1, 2, 4))] if pick.dims else []
            value = np.full(shape, rng.choice((*_INTS, 1, 2, 4, 3, -1)), np.int64)
            pick.CopyFrom(numpy_helper.from_array(value, pick.name))
        else:
            pick.dims[:] = [rng.choice((0, 1, 2, 3, 4, -1, 1 << 31, 1 << 62)) for _ in range(rng.randrange(5))]
    elif act == 5:
        values = [*graph.input, *graph.output, *graph.value_info]
        if values:
            shape = rng.choice(values).type.tensor_type.shape
            for dim in shape.dim[: rng.randrange(1, 5)]:
                dim.dim_value = rng.choice((0, 1, 2, 3, 4, 8, -1, 1 << 20, 1 << 31, 1 << 62))
    elif act == 6 and nodes:
        pick = rng.choice(nodes)
        pick.attribute.extend([helper.make_attribute(
            rng.choice(("axis", "to", "perm", "pads", "group", "kernel_shape", "strides", "value", "epsilon",
            "keepdims", "mode")),
            rng.choice((0, -1, 99, 1 << 40, [1, 2], [0, 0, 0, 0], 0.5, "x", [1 << 40])))])  # fmt: skip
    elif act == 7:
        for item in model.opset_import[:1]:
            item.version = rng.choice((1, 6, 7, 9, 11, 13, 17, 18, 19, 21, 22, 25, 26, 99, 0, -1, 1 << 62))
    elif act == 8 and graph.initializer:
        pick = rng.choice(graph.initializer)
        pick.data_location = TensorProto.EXTERNAL
        del pick.external_data[:]
        for key, value in (("location", rng.choice(("../outside/secret.bin", "/etc/hostname", "weights.bin", "", ".",
        "a\0b"))),
                           ("offset", rng.choice(("0", "-1", "x", "9" * 30))), ("length", rng.choice(("4", "0", "-4",
                           str(1 << 50))))):  # fmt: skip
            if rng.random() < 0.8:
                pick.external_data.add(key=key, value=value)
    elif graph.node and act == 9:
        item = rng.choice([*graph.input, *graph.output])
        item.name = rng.choice(names) or hostile_text(rng).encode("utf-8", "replace").decode()


# ------------------------------------------------------------------------------------------------ by suffix

_BY_SUFFIX: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": _json, ".jsonl": _json_lines, ".yaml": _yaml, ".log": _text, ".csv": _text, ".txt": _text, ".onnx": _network,
    ".npy": _npy, ".npz": _zip, ".zip": _zip, ".pt": _zip, ".gz": _tar, ".png": _png, ".sqlite": _sqlite,
}  # fmt: skip


def mutate(rng: random.Random, name: str, raw: bytes) -> bytes:
    """The file changed as its suffix says what it is; one in seven, and what is none of its kind, by its bytes alone."""
    change = _BY_SUFFIX.get(PurePath(name).suffix, mutate_bytes)
    if rng.random() < 0.15 or not raw:
        return mutate_bytes(rng, raw)
    try:
        return change(rng, raw)
    except Exception:  # it was damaged already
        return mutate_bytes(rng, raw)

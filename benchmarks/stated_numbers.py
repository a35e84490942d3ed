"""Every integer that a file states of itself, by kind of file, and the file with another number in its place.

A number that a stranger states is compared with the file before it is used: sizes, counts, offsets, versions, types.
"""

from __future__ import annotations

import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import ModelProto

from fuzz.seeds import Seeds

VALUES = (0, -1, 1 << 31, 1 << 62)
LENGTH = 100_000
"""Of the list that takes the place of a number, where the format has lists."""
Put = Callable[[int, bool], bytes]
"""The file with this number at the place, or with a list of it."""
Places = dict[str, Put]


@dataclass(frozen=True)
class Kind:
    """One kind of file: the seed, where its numbers are, and the calls that read it."""

    name: str
    files: Callable[[Seeds], Mapping[str, bytes]]
    file: str
    places: Callable[[bytes], Places]
    calls: tuple[str, ...]


# ------------------------------------------------------------------------------------------------ text and messages


def _json_places(raw: bytes) -> Places:
    """Numbers of a JSON document, or of the first line of JSONL."""
    first, newline, rest = raw.partition(b"\n")
    try:
        document = json.loads(raw)
        newline = rest = b""
    except ValueError:
        document = json.loads(first)

    def put(path: tuple[Any, ...]) -> Put:
        def made(value: int, many: bool) -> bytes:
            copy = json.loads(json.dumps(document))
            holder = copy
            for step in path[:-1]:
                holder = holder[step]
            holder[path[-1]] = [value] * LENGTH if many else value
            return json.dumps(copy).encode() + newline + rest

        return made

    return {".".join(map(str, path)): put(path) for path in _numbers(document, ())}


def _numbers(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _numbers(item, (*path, key))


_INTEGERS = {
    FieldDescriptor.TYPE_INT32: 32, FieldDescriptor.TYPE_INT64: 64, FieldDescriptor.TYPE_UINT64: 64,
    FieldDescriptor.TYPE_ENUM: 32,
}  # fmt: skip


def _onnx_places(raw: bytes) -> Places:
    proto = ModelProto.FromString(raw)
    return {name: _onnx_put(raw, index) for index, (name, _, _) in enumerate(_fields(proto, ""))}


def _fields(message: Message, path: str) -> Iterator[tuple[str, Message, FieldDescriptor]]:
    """The integer fields that are there, and those of shapes and tensors that might be."""
    stated = {field.name for field, _ in message.ListFields()}
    for field in message.DESCRIPTOR.fields:
        if field.type in _INTEGERS and (field.name in stated or field.name in ("dims", "data_type", "dim_value", "i")):
            yield f"{path}{field.name}", message, field
        elif field.message_type is not None and field.name in stated:
            held = getattr(message, field.name)
            for at, item in enumerate(held if hasattr(held, "add") else [held]):
                yield from _fields(item, f"{path}{field.name}.{at}.")


def _onnx_put(raw: bytes, index: int) -> Put:
    def made(value: int, many: bool) -> bytes:
        proto = ModelProto.FromString(raw)
        _, message, field = list(_fields(proto, ""))[index]
        bits = _INTEGERS[field.type]
        low = 0 if field.type == FieldDescriptor.TYPE_UINT64 else -(1 << bits - 1)
        value = max(low, min(value, (1 << bits - 1) - 1))
        held = getattr(message, field.name)
        try:
            if hasattr(held, "extend"):
                count = LENGTH if many else max(len(held), 1)
                del held[:]
                held.extend([value] * count)
            else:
                setattr(message, field.name, value)
        except ValueError:  # no such member of an enumeration: as an unknown field
            message.MergeFromString(_varint(field.number << 3) + _varint(value & (1 << 64) - 1))
        return proto.SerializeToString()

    return made


def _varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found, value = found + bytes([value & 127 | 128]), value >> 7
    return found + bytes([value])


# ------------------------------------------------------------------------------------------------ bytes


def _packed(raw: bytes, fields: Mapping[str, tuple[int, str]], finish: Callable[[bytes], bytes] = bytes) -> Places:
    """Numbers at offsets, each cut to its width."""

    def put(at: int, kind: str) -> Put:
        size = struct.calcsize(kind)

        def made(value: int, many: bool) -> bytes:
            value = (1 << 8 * size) - 1 if many else value & (1 << 8 * size) - 1
            return finish(raw[:at] + struct.pack(kind.upper(), value) + raw[at + size :])

        return made

    return {name: put(*field) for name, field in fields.items() if field[0] + struct.calcsize(field[1]) <= len(raw)}


def _npy_places(raw: bytes) -> Places:
    shape = np.load(io.BytesIO(raw)).shape
    start = raw[:10]

    def header(text: str) -> bytes:
        return (
            start[:8]
            + struct.pack("<H", len(text))
            + text.encode("latin1")
            + raw[10 + int.from_bytes(raw[8:10], "little") :]
        )

    def put(axis: int) -> Put:
        def made(value: int, many: bool) -> bytes:
            sizes = (value,) * 1000 if many else (*shape[:axis], value, *shape[axis + 1 :])
            text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {sizes!r}, }}\n"
            return header(text)

        return made

    return {f"shape.{axis}": put(axis) for axis in range(len(shape))} | _packed(
        raw, {"version": (6, "<H"), "length": (8, "<H")}
    )


def _zip_places(raw: bytes) -> Places:
    """Counts, sizes and offsets of the local headers, of the directory and of its end."""
    fields: dict[str, tuple[int, str]] = {}
    layouts = {
        b"PK\x03\x04": {"flags": (6, "<H"), "method": (8, "<H"), "packed": (18, "<I"), "size": (22, "<I"),
                        "name": (26, "<H"), "extra": (28, "<H")},
        b"PK\x01\x02": {"flags": (8, "<H"), "method": (10, "<H"), "packed": (20, "<I"), "size": (24, "<I"),
                        "name": (28, "<H"), "extra": (30, "<H"), "comment": (32, "<H"), "offset": (42, "<I")},
        b"PK\x05\x06": {"here": (8, "<H"), "entries": (10, "<H"), "directory": (12, "<I"), "start": (16, "<I"),
                        "comment": (20, "<H")},
    }  # fmt: skip
    for mark, layout in layouts.items():
        at = raw.find(mark)
        while at >= 0:
            fields |= {f"{mark[2:].hex()}.{at}.{name}": (at + place, kind) for name, (place, kind) in layout.items()}
            at = raw.find(mark, at + 4)
    return _packed(raw, fields)


def _tar_places(raw: bytes) -> Places:
    def put(at: int, size: int) -> Put:
        def made(value: int, many: bool) -> bytes:
            value = (1 << 80) if many else value
            field = (value & (1 << 8 * size) - 1 | 1 << 8 * size - 1).to_bytes(size, "big")
            block = raw[:at] + field + raw[at + size :]
            total = sum(block[:148]) + 8 * 32 + sum(block[156:512])
            return block[:148] + f"{total:06o}\0 ".encode() + block[156:]

        return made

    return {
        name: put(at, size)
        for name, (at, size) in {"mode": (100, 8), "uid": (108, 8), "size": (124, 12), "mtime": (136, 12)}.items()
    }


def _png_places(raw: bytes) -> Places:
    def finish(made: bytes) -> bytes:
        return made[:29] + zlib.crc32(made[12:29]).to_bytes(4, "big") + made[33:]

    head = {"length": (8, ">I"), "width": (16, ">I"), "height": (20, ">I"), "depth": (24, ">B"), "color": (25, ">B"),
            "compression": (26, ">B"), "filter": (27, ">B"), "interlace": (28, ">B")}  # fmt: skip
    data = raw.find(b"IDAT")
    return _packed(raw, head, finish) | _packed(raw, {"data": (data - 4, ">I")})


def _jpeg_places(raw: bytes) -> Places:
    fields: dict[str, tuple[int, str]] = {}
    at = 2
    while at + 4 < len(raw) and raw[at] == 0xFF and raw[at + 1] != 0xDA:
        mark = raw[at + 1]
        fields[f"{mark:x}.{at}.length"] = (at + 2, ">H")
        if mark in (0xC0, 0xC1, 0xC2):
            names = (("precision", 4, ">B"), ("height", 5, ">H"), ("width", 7, ">H"), ("components", 9, ">B"))
            fields |= {name: (at + place, kind) for name, place, kind in names}
        at += 2 + int.from_bytes(raw[at + 2 : at + 4], "big")
    return _packed(raw, fields)


def _words(count: int, start: int = 0, kind: str = "<I") -> Callable[[bytes], Places]:
    """All words of a head of so many bytes, by offset."""
    size = struct.calcsize(kind)
    return lambda raw: _packed(raw, {str(at): (at, kind) for at in range(start, count, size)})


def _safetensors_places(raw: bytes) -> Places:
    length = int.from_bytes(raw[:8], "little")
    inner = _json_places(raw[8 : 8 + length])

    def put(found: Put) -> Put:
        def made(value: int, many: bool) -> bytes:
            head = found(value, many)
            return len(head).to_bytes(8, "little") + head + raw[8 + length :]

        return made

    return _packed(raw, {"length": (0, "<Q")}) | {name: put(found) for name, found in inner.items()}


# ------------------------------------------------------------------------------------------------ the table


def _engine_and(name: str, raw: Callable[[], bytes]) -> Callable[[Seeds], Mapping[str, bytes]]:
    return lambda seeds: dict(seeds.engine) | {name: raw()}


def _array(pack: bool) -> Callable[[], bytes]:
    def made() -> bytes:
        buffer = io.BytesIO()
        array = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
        np.savez(buffer, x=array) if pack else np.save(buffer, array)
        return buffer.getvalue()

    return made


def _picture(name: str) -> Callable[[Seeds], Mapping[str, bytes]]:
    return lambda seeds: {name: seeds.pictures.get(name, seeds.pictures["x.png"])}


def _run_pack(kind: str) -> Callable[[Seeds], Mapping[str, bytes]]:
    def made(seeds: Seeds) -> Mapping[str, bytes]:
        buffer = io.BytesIO()
        files = {f"run/{file}": raw for file, raw in seeds.runs["bench"].items()}
        if kind == "zip":
            with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, raw in files.items():
                    archive.writestr(zipfile.ZipInfo(name), raw)
        else:
            with tarfile.open(fileobj=buffer, mode="w") as tar:
                for name, raw in files.items():
                    info = tarfile.TarInfo(name)
                    info.size = len(raw)
                    tar.addfile(info, io.BytesIO(raw))
        return {f"x.{kind}": buffer.getvalue()}

    return made


def _source(name: str, start: bytes) -> Callable[[Seeds], Mapping[str, bytes]]:
    """The first source of that name whose bytes from the start, or from the ninth on, are these."""
    return lambda seeds: next(
        files for files in seeds.sources if name in files and files[name].startswith(start, 8 * (start[:1] == b"{"))
    )


_PLAN = b"ftrt" + (96).to_bytes(4, "little") + bytes(16) + bytes((10, 3, 0, 26)) + bytes(200)
_RTX = (
    b"vtrt\0\0\0\0"
    + b"".join(
        word.to_bytes(8, "little")
        for word in (2, 64, int.from_bytes(bytes((1, 7, 1, 116)) + b"vtrt", "little"), 1, 0, 0, 7)
    )
    + bytes(136)
)
_DETECT = ("@detect x", "convert x --dry-run --offline -o out.onnx")
_ONNX = ("inspect m.onnx", "lint m.onnx", "cast m.onnx --to fp16 --no-parity -o out.onnx", "infer m.onnx --random",
         "build m.onnx --no-parity -o out.engine.onnx", "convert m.onnx -o out.onnx",
         "quantize m.onnx --to int8 --calib-data random -o out.onnx", "ranges m.onnx")  # fmt: skip


def _networks() -> Iterator[Kind]:
    from fuzz.networks import NETWORKS

    for name in NETWORKS:
        if name != "loop":
            yield Kind(f"onnx {name}", lambda seeds, name=name: seeds.networks[name], "m.onnx", _onnx_places, _ONNX)


KINDS: tuple[Kind, ...] = (
    *_networks(),
    Kind("passport", lambda seeds: seeds.engine, "m.engine.onnx.json", _json_places,
         ("inspect m.engine.onnx", "infer m.engine.onnx --random", "bench m.engine.onnx --dry-run",
          "diff m.engine.onnx m.engine.onnx")),
    Kind("npy", _engine_and("x.npy", _array(False)), "x.npy", _npy_places,
         ("infer m.engine.onnx --input x.npy", "@dataset x.npy", "ranges m.onnx --calib-data x.npy")),
    Kind("npz", _engine_and("x.npz", _array(True)), "x.npz", _zip_places,
         ("infer m.engine.onnx --input x.npz", "@dataset x.npz")),
    Kind("png", _picture("x.png"), "x.png", _png_places, ("@image x.png",)),
    Kind("jpeg", _picture("x.jpeg"), "x.jpeg", _jpeg_places, ("@image x.jpeg",)),
    Kind("bmp", _picture("x.bmp"), "x.bmp", _words(54, 2), ("@image x.bmp",)),
    Kind("gif", _picture("x.gif"), "x.gif", _words(20, 6, "<H"), ("@image x.gif",)),
    Kind("tiff", _picture("x.tiff"), "x.tiff", _words(250, 4), ("@image x.tiff",)),
    Kind("webp", _picture("x.webp"), "x.webp", _words(40, 4), ("@image x.webp",)),
    Kind("coco", lambda seeds: {f"val/{name}": raw for name, raw in seeds.coco[1].items()}
         | {"val/annotations.json": json.dumps(seeds.coco[0]).encode()}, "val/annotations.json", _json_places,
         ("@dataset val",)),
    Kind("records", lambda seeds: {f"run/{name}": raw for name, raw in seeds.runs["bench"].items()}, "run/records.jsonl",
         _json_places, ("report run", "report run --format html", "inspect run")),
    Kind("baseline", lambda seeds: dict(seeds.engine) | {"b.json": json.dumps(seeds.baseline).encode()}, "b.json",
         _json_places, ("compare m.engine.onnx --baseline b.json --dry-run",)),
    Kind("plan", lambda seeds: {"m.onnx": seeds.engine["m.onnx"], "plan.yaml": json.dumps(seeds.plans[0]).encode(),
                                "x.npz": seeds.calibration["x.npz"]}, "plan.yaml", _json_places,
         ("run plan.yaml -o out --dry-run",)),
    Kind("bundle", lambda seeds: dict(seeds.bundle[1]) | {"model_meta.json": json.dumps(seeds.bundle[0][0]).encode()},
         "model_meta.json", _json_places, ("bundle model_meta.json -o out --dry-run",)),
    Kind("calibration", lambda seeds: seeds.calibration, "cache.json", _json_places, ("@calibrate cache.json",)),
    Kind("kineto", lambda seeds: {"trace.json": json.dumps(seeds.kineto).encode()}, "trace.json", _json_places,
         ("@kineto trace.json",)),
    Kind("layers", lambda seeds: {"a.json": json.dumps(seeds.layer_documents[0]).encode()}, "a.json", _json_places,
         ("diff a.json a.json",)),
    Kind("zip of a run", _run_pack("zip"), "x.zip", _zip_places, ("report x.zip", "inspect x.zip")),
    Kind("tar of a run", _run_pack("tar"), "x.tar", _tar_places, ("report x.tar", "inspect x.tar")),
    Kind("checkpoint", _source("x.pt", b"PK"), "x.pt", _zip_places,
         ("@detect x.pt", "convert x.pt --dry-run --offline -o out.onnx")),
    Kind("safetensors", _source("x", b"{"), "x", _safetensors_places, _DETECT),
    Kind("tflite", _source("x", b"\x1c\0\0\0TFL3"), "x", _words(60), _DETECT),
    Kind("hdf5", _source("x", b"\x89HDF"), "x", _words(90), _DETECT),
    Kind("plan of TensorRT", lambda seeds: {"m.engine": _PLAN}, "m.engine", _words(60, 4), ("inspect m.engine",)),
    Kind("plan of RTX", lambda seeds: {"m.engine": _RTX}, "m.engine", _words(64, 4), ("inspect m.engine",)),
)  # fmt: skip


def draw(rng: random.Random, seeds: Seeds) -> tuple[dict[str, bytes], str]:
    """The files of one kind with one number changed, and a call that reads them."""
    kind = rng.choice(KINDS)
    files = dict(kind.files(seeds))
    places = kind.places(files[kind.file])
    put = places[rng.choice(list(places))]
    files[kind.file] = put(rng.choice(VALUES), rng.random() < 0.2)
    return files, rng.choice(kind.calls)

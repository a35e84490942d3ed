"""Mutations of ZIP and tar archives, of `.npy` and `.npz` arrays, of pickles and of PNG chunks."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fuzz.mutate import hostile_text, mutate_bytes, number

__all__ = ["evil_pickle", "mutate_npy", "mutate_npz", "mutate_png", "tar_of", "zip_of"]

_NAMES = (
    "../evil", "/evil", "a/../../evil", "a\\b", "x" * 300, "\x1b[31m.json", "size.json", "run/size.json", "", ".",
    "..", "a\nb",
    "con", "run/cells/../size.json", "run//size.json", "run/", "\u202ex", "data.pkl", "PACK.json",
)  # fmt: skip


class _Payload:
    """Would run a command if anything unpickled it."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch CODE_WAS_RUN",)


def evil_pickle(rng: random.Random) -> bytes:
    """A pickle that runs a command when it is loaded."""
    return pickle.dumps(_Payload(), protocol=rng.choice((0, 2, 4)))


def _members(rng: random.Random, files: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    """The members, some of them renamed, left out, repeated, emptied or mutated."""
    made = list(files.items())
    for _ in range(rng.choice((0, 1, 1, 2))):
        at = rng.randrange(len(made)) if made else -1
        act = rng.randrange(7)
        if at < 0 or act == 0:
            made.append((rng.choice(_NAMES), rng.randbytes(20)))
        elif act == 1:
            made[at] = (rng.choice(_NAMES), made[at][1])
        elif act == 2:
            del made[at]
        elif act == 3:
            made.append(made[at])
        elif act == 4:
            made[at] = (made[at][0], made[at][1][: rng.randrange(len(made[at][1]) + 1)])
        elif act == 5:
            made[at] = (made[at][0], evil_pickle(rng))
        else:
            made[at] = (made[at][0], mutate_bytes(rng, made[at][1]))
    return made


def zip_of(rng: random.Random, files: Mapping[str, bytes]) -> bytes:
    """A ZIP archive of these files with members, headers or bytes changed."""
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # names that come twice
        for name, raw in _members(rng, files):
            info = zipfile.ZipInfo(name.encode(errors="replace").decode()[:20_000] or "x")
            info.compress_type = rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED))
            if rng.random() < 0.05:
                info.external_attr = rng.choice((0o120777, 0o010644, 0o040755)) << 16
            archive.writestr(info, raw)
    made = bytearray(buffer.getvalue())
    if rng.random() < 0.25:
        mark = rng.choice((b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04"))
        spots = [at for at in range(len(made) - 4) if made[at : at + 4] == mark]
        if spots:
            at = rng.choice(spots) + rng.randrange(4, 46)
            made[at : at + 4] = rng.choice(
                (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\x01\0\0\0", b"\x63\0\0\0")
            )
    return mutate_bytes(rng, bytes(made)) if rng.random() < 0.2 else bytes(made)


def tar_of(rng: random.Random, files: Mapping[str, bytes]) -> bytes:
    """A gzipped tar archive of these files with members, headers or bytes changed."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=rng.choice((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT))) as archive:
        for name, raw in _members(rng, files):
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            if rng.random() < 0.06:
                info.type = rng.choice(
                    (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE, b"9")
                )
                info.linkname = rng.choice(("/etc/passwd", "../x", "size.json", ""))
                info.size = 0 if rng.random() < 0.7 else info.size
            archive.addfile(info, io.BytesIO(raw))
    made = buffer.getvalue()
    if rng.random() < 0.15:
        block = bytearray(made)
        at = 512 * rng.randrange(len(block) // 512) + rng.choice((100, 124, 136, 148, 156, 257, 329))
        block[at : at + 8] = rng.choice((b"77777777", b"\x80\0\0\0\x7f\xff\xff\xff", b"-1      ", b"\xff" * 8))
        made = bytes(block)
    packed = gzip.compress(made, 1, mtime=0)
    return mutate_bytes(rng, packed) if rng.random() < 0.2 else packed


# ------------------------------------------------------------------------------------------------ arrays


_HEADERS = (
    "", "(" * 5000, "{" * 300, "[]", "{'descr': '<f4'}", "__import__('os')", "\0", "1" * 9000,
    "{'descr': '<f4', 'fortran_order': False, 'shape': (" + "1," * 70 + ")}",
)  # fmt: skip


def mutate_npy(rng: random.Random, array: Any) -> bytes:
    """A `.npy` file whose array, header or bytes were changed."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    raw = buffer.getvalue()
    act = rng.randrange(6)
    if act == 0:
        return mutate_bytes(rng, raw)
    if act == 1:
        return _plain(_other_array(rng, array))
    if act == 2:
        header = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}
        key = rng.choice(list(header))
        header[key] = rng.choice((
            number(rng), hostile_text(rng), (number(rng),), (1 << 40, 1 << 40), (-1, 3), "|O", "<f8", "<c16", "|V0", "<U9",
            [("a", "<f4")], "<M8[s]", None, True, (1,) * 100,
        ))  # fmt: skip
        return _with_header(raw, repr(header))
    if act == 3:
        return _with_header(raw, rng.choice(_HEADERS))
    if act == 4:
        return raw[:6] + bytes((rng.randrange(5), rng.randrange(3))) + raw[8:]
    return raw if rng.random() < 0.5 else raw[: rng.randrange(len(raw))]


def _plain(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=True)
    return buffer.getvalue()


def _other_array(rng: random.Random, array: Any) -> Any:
    act = rng.randrange(8)
    if act == 0:
        return array.astype(
            rng.choice(("float16", "float64", "int8", "int64", "uint8", "bool", "complex64", "<U4", "S3"))
        )
    if act == 1:
        return array.reshape(-1)
    if act == 2:
        return array[:0]
    if act == 3:
        return np.full_like(array, rng.choice((np.inf, np.nan, 3e38, -1)) if array.dtype.kind == "f" else 1)
    if act == 4:
        return np.asfortranarray(array)
    if act == 5:
        return np.array([{"a": 1}, _Payload()], dtype=object)
    if act == 6:
        return np.zeros(tuple(rng.choice((0, 1, 2, 3, 9)) for _ in range(rng.randrange(6))), np.float32)
    return np.concatenate([array] * rng.choice((2, 5)))


def _with_header(raw: bytes, header: str) -> bytes:
    start = 10 + struct.unpack("<H", raw[8:10])[0]
    text = (header + "\n").encode("utf-8", "surrogatepass")[:65_000]
    return raw[:8] + struct.pack("<H", len(text)) + text + raw[start:]


def mutate_npz(rng: random.Random, arrays: Mapping[str, Any]) -> bytes:
    """An `.npz` archive whose arrays, names, members or bytes were changed."""
    files = {f"{name}.npy": _plain(array) for name, array in arrays.items()}
    if rng.random() < 0.6:
        name = rng.choice(list(arrays))
        files[f"{name}.npy"] = mutate_npy(rng, arrays[name])
    if rng.random() < 0.2:
        name = rng.choice(list(files))
        files[rng.choice((f"{hostile_text(rng)[:200]}.npy", "x", f"{name}.npy", "arr_0.npy"))] = files.pop(name)
    return zip_of(rng, files)


# ------------------------------------------------------------------------------------------------ pictures


def mutate_png(rng: random.Random, raw: bytes) -> bytes:
    """A PNG with one chunk changed under a right checksum."""
    chunks, at = [], 8
    while at + 8 <= len(raw):
        (length,) = struct.unpack(">I", raw[at : at + 4])
        chunks.append([raw[at + 4 : at + 8], raw[at + 8 : at + 8 + length]])
        at += 12 + length
    pick = rng.choice(chunks)
    act = rng.randrange(5)
    if act <= 1 and pick is not chunks[0]:
        pick = chunks[0]
    if act == 0:
        pick[1] = struct.pack(">I", rng.choice((0, 1, 7, 2**16, 2**31 - 1, 2**32 - 1))) + pick[1][4:]
    elif act == 1:
        pick[1] = pick[1][:8] + mutate_bytes(rng, pick[1][8:], 1)
    elif act == 2:
        pick[1] = mutate_bytes(rng, pick[1])
    elif act == 3:
        chunks.insert(
            rng.randrange(len(chunks) + 1),
            [rng.choice((b"tEXt", b"zTXt", b"iCCP", b"acTL", b"eXIf", b"PLTE", b"tRNS")), rng.randbytes(30)],
        )
    else:
        chunks.remove(pick)
    made = raw[:8]
    for kind, body in chunks:
        made += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return made

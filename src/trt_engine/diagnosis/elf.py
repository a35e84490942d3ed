"""What a shared library links, read from the file: nothing is loaded, and no `readelf` is needed."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

__all__ = ["needed"]

_LOAD, _DYNAMIC = 1, 2  # program header types, elf.h
_NULL, _NEEDED, _STRTAB, _STRSZ = 0, 1, 5, 10  # entries of the dynamic section
_MOST = 1 << 20
"""Bytes of a table at most: a damaged header must not ask for gigabytes."""


def needed(path: Path) -> tuple[str, ...]:
    """The libraries a 64-bit ELF file says it needs (`libnvinfer.so.10`), in its order; empty for anything else."""
    try:
        with path.open("rb") as file:
            return _needed(file)
    except (OSError, struct.error, ValueError, UnicodeDecodeError):
        return ()


def _needed(file: BinaryIO) -> tuple[str, ...]:
    head = file.read(64)
    if head[:5] != b"\x7fELF\x02" or head[5:6] not in (b"\x01", b"\x02"):
        return ()
    order = "<" if head[5:6] == b"\x01" else ">"
    (table,) = struct.unpack_from(f"{order}Q", head, 32)
    size, count = struct.unpack_from(f"{order}HH", head, 54)
    segments = []
    for index in range(count):
        kind, _, offset, address, _, nbytes = struct.unpack_from(f"{order}IIQQQQ", _at(file, table + index * size, 56))
        segments.append((kind, offset, address, nbytes))
    dynamic = next(((offset, nbytes) for kind, offset, _, nbytes in segments if kind == _DYNAMIC), None)
    if dynamic is None:
        return ()
    raw = _at(file, *dynamic)
    entries = []
    for tag, value in struct.iter_unpack(f"{order}QQ", raw[: len(raw) // 16 * 16]):
        if tag == _NULL:
            break
        entries.append((tag, value))
    strings = next((value for tag, value in entries if tag == _STRTAB), None)
    nbytes = next((value for tag, value in entries if tag == _STRSZ), 0)
    where = next(
        (
            offset + strings - address
            for kind, offset, address, length in segments
            if kind == _LOAD and strings is not None and address <= strings < address + length
        ),
        None,
    )
    if where is None:
        return ()
    text = _at(file, where, nbytes)
    return tuple(text[at : text.index(b"\0", at)].decode() for tag, at in entries if tag == _NEEDED)


def _at(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    if nbytes > _MOST or offset > 1 << 62:
        raise ValueError("a table of this size is damage")
    file.seek(offset)
    return file.read(nbytes)

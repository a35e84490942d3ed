"""Read the dependencies of a shared library from its ELF file, without loading it."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_LOAD, _DYNAMIC = 1, 2  # program header types, elf.h
_NULL, _NEEDED, _STRTAB, _STRSZ = 0, 1, 5, 10  # entries of the dynamic section
_MAX_READ_BYTES = 1 << 20
"""Limit for one table, so that a damaged header cannot cause a huge read."""


def needed_libraries(path: Path) -> tuple[str, ...]:
    """DT_NEEDED entries of a 64-bit ELF file (`libnvinfer.so.10`), in order; empty for any other file."""
    try:
        with path.open("rb") as file:
            return _read_needed(file)
    except (OSError, struct.error, ValueError, UnicodeDecodeError):
        return ()


def _read_needed(file: BinaryIO) -> tuple[str, ...]:
    head = file.read(64)
    if head[:5] != b"\x7fELF\x02" or head[5:6] not in (b"\x01", b"\x02"):
        return ()
    order = "<" if head[5:6] == b"\x01" else ">"
    (table,) = struct.unpack_from(f"{order}Q", head, 32)
    size, count = struct.unpack_from(f"{order}HH", head, 54)
    segments = []
    for index in range(count):
        kind, _, offset, address, _, nbytes = struct.unpack_from(
            f"{order}IIQQQQ", _read_at(file, table + index * size, 56)
        )
        segments.append((kind, offset, address, nbytes))
    dynamic = next(((offset, nbytes) for kind, offset, _, nbytes in segments if kind == _DYNAMIC), None)
    if dynamic is None:
        return ()
    raw = _read_at(file, *dynamic)
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
    text = _read_at(file, where, nbytes)
    return tuple(text[at : text.index(b"\0", at)].decode() for tag, at in entries if tag == _NEEDED)


def _read_at(file: BinaryIO, offset: int, nbytes: int) -> bytes:
    if nbytes > _MAX_READ_BYTES or offset > 1 << 62:
        raise ValueError("the table is too large: damaged file")
    file.seek(offset)
    return file.read(nbytes)

"""Numbers in the headers of input files are compared with the file before use: planning ends, reading is bounded."""

from __future__ import annotations

import io
import os
import struct
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from trt_engine.tensors import TensorSpec

pytestmark = pytest.mark.full
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from trt_engine.verbs.batch.sources import Parts, list_files, read_rows  # noqa: E402

ROW = TensorSpec("x", "float32", (-1, 3), ("batch", None))
OPEN = TensorSpec("x", "float32", (-1, -1), ("batch", "n"))
IMAGE = TensorSpec("pixels", "float32", (-1, 3, 8, 8), ("batch", None, None, None))
NUMBERS = (0, -1, 1 << 31, 1 << 40, 1 << 62, 10**15)
COUNT = 12345


def npy_of(shape: str) -> bytes:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + bytes(120)


def varint(value: int) -> bytes:
    """As the footer of a Parquet file has it."""
    left, found = (value << 1) ^ (value >> 63), b""
    while left > 127:
        found, left = found + bytes([left & 127 | 128]), left >> 7
    return found + bytes([left])


def parquet_of(number: int, places: slice) -> bytes:
    """A file of 12,345 rows, which says `number` in these of the places where it says so."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"x": pa.array([[1.0, 2.0, 3.0]] * COUNT, pa.list_(pa.float32(), 3))}), buffer)
    raw = buffer.getvalue()
    length = int.from_bytes(raw[-8:-4], "little")
    start = len(raw) - 8 - length
    pieces = raw[start:-8].split(varint(COUNT))
    new = [varint(COUNT)] * (len(pieces) - 1)
    new[places] = [varint(number)] * len(new[places])
    footer = b"".join(piece + (new[at] if at < len(new) else b"") for at, piece in enumerate(pieces))
    return raw[:start] + footer + struct.pack("<I", len(footer)) + b"PAR1"


def packed_images() -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table({"image": [bytes(20 << 20)] * 6}), buffer, compression="zstd")
    return buffer.getvalue()


def tar_of(size: int) -> bytes:
    info = tarfile.TarInfo("a.x.npy")
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + bytes(1024)


def files() -> Iterator[tuple[str, str, bytes, TensorSpec]]:
    for number in NUMBERS:
        yield f"npy rows {number}", "a.npy", npy_of(f"({number}, 3)"), ROW
        yield f"npy empty rows {number}", "a.npy", npy_of(f"({number}, 0)"), OPEN
        yield f"npy both {number}", "a.npy", npy_of(f"({number}, {number})"), OPEN
        for name, places in {"rows": slice(1), "last": slice(-1, None), "all": slice(None)}.items():
            yield f"parquet {name} {number}", "a.parquet", parquet_of(number, places), ROW
        yield f"tar {number}", "a.tar", tar_of(number), ROW
    yield "tar back", "a.tar", tar_of(-512), ROW
    yield "tar far", "a.tar", tar_of(1 << 80), ROW
    yield "npy many axes", "a.npy", npy_of("(" + "1," * 2000 + ")"), ROW
    yield "images", "a.parquet", packed_images(), IMAGE


FILES = [*files()]


@pytest.mark.parametrize(("name", "raw", "spec"), [item[1:] for item in FILES], ids=[item[0] for item in FILES])
def test_counts_of_a_header_are_compared_with_the_file(tmp_path: Path, name: str, raw: bytes, spec: TensorSpec) -> None:
    (tmp_path / name).write_bytes(raw)
    tracemalloc.start()
    try:
        found = list_files([tmp_path], [spec])
        parts = Parts(found, 64)
        rows = [row for at in range(min(len(parts), 3)) for one in parts[at].ranges for row in read_rows(one, [spec])]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert parts.rows <= COUNT and peak < 64 << 20
    assert all((row.error is None) != (row.feeds is None and row.image is None) for row in rows)


def test_a_column_that_run_lengths_encode_is_read(tmp_path: Path) -> None:
    rows = 1_100_000
    pq.write_table(pa.table({"x": np.ones(rows, np.float32)}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 84_000
    (found,) = list_files([tmp_path], [TensorSpec("x", "float32", (-1,), ("batch",))])
    assert (found.rows, found.failure) == (rows, "")


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.parquet", "a.tar", "a.png"])
def test_a_sparse_giant_is_one_failed_row(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.write(npy_of("(1, 3)"))
        file.truncate(1 << 40)
        os.fsync(file.fileno())
    if (tmp_path / name).stat().st_blocks == 0:
        pytest.skip("the file system does not tell what a file takes")
    (found,) = list_files([tmp_path], [ROW])
    assert found.rows == 1 and "sparse" in found.failure


def test_parts_are_made_on_access() -> None:
    from trt_engine.verbs.batch.sources import InputFile

    given = [InputFile(name, name, "arrays", rows, "") for name, rows in (("a", 5), ("b", 0), ("c", 1 << 50), ("d", 2))]
    parts = Parts(given, 4)
    assert (len(parts), parts.rows) == ((1 << 48) + 2, (1 << 50) + 7)
    assert [(one.file.name, one.start, one.stop) for one in parts[1].ranges] == [("a", 4, 5), ("c", 0, 3)]
    last = [(one.file.name, one.start, one.stop) for one in parts[-1].ranges]
    assert last == [("c", (1 << 50) - 1, 1 << 50), ("d", 0, 2)]

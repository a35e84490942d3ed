"""Arrays in `.npy` and `.npz` files: the headers are read and checked before any data, and pickles never are."""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from trt_engine.atomic_io import failed_download, open_regular
from trt_engine.errors import FeedError
from trt_engine.format import library_reason
from trt_engine.limits import ARRAY_SIZE
from trt_engine.units import count_elements

Array = npt.NDArray[Any]

_NPY, _ZIP = b"\x93NUMPY", b"PK"
_LONGEST_HEADER = 10_000  # numpy's own bound for files of others
_MAX_MEMBERS = 100_000
_MAX_RATIO = 10
"""Arrays of images and activations unpack to at most this many times their bytes; what is beyond is bounded."""
_READ_ERRORS = (
    OSError, ValueError, EOFError, KeyError, MemoryError, RuntimeError, NotImplementedError, OverflowError, TypeError,
    SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip


class ArrayFileError(ValueError):
    """A damaged file, unsupported contents, or more than the size limit."""

    def __init__(self, text: str, hint: str = "write it again with `numpy.save` or `numpy.savez`") -> None:
        super().__init__(text)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ArrayHeader:
    """The header of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        return count_elements(self.shape) * self.dtype.itemsize


def npz_bytes(arrays: Mapping[str, Array]) -> bytes:
    """An `.npz` of arrays of numbers or fixed-length text. Any name: `numpy.savez` takes `file` for an argument, and
    `allow_pickle` for an argument or an array, by release.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return buffer.getvalue()


class ArrayFile:
    """The arrays of an open file by name, `""` for the one of an `.npy`. `open_arrays` makes it."""

    def __init__(self, file: IO[bytes], archive: zipfile.ZipFile | None, headers: Mapping[str, ArrayHeader]) -> None:
        self.headers = headers
        self._file, self._archive = file, archive
        self._on_disk = _allocated_bytes(file)
        self._held = 0

    def read(self, name: str) -> Array:
        """The array; `ArrayFileError` above the size limit, before memory is allocated."""
        self._held += self.headers[name].nbytes
        self._check_size(name, self._held)
        with _translate_errors():
            if self._archive is None:
                self._file.seek(0)
                return np.lib.format.read_array(self._file, allow_pickle=False)
            with self._archive.open(f"{name}.npy") as member:
                return np.lib.format.read_array(member, allow_pickle=False)

    def check_sizes(self) -> None:
        """`ArrayFileError` where all arrays together are above the size limit; reads none."""
        total = 0
        for name, header in self.headers.items():
            total += header.nbytes
            self._check_size(name, total)

    def _check_size(self, name: str, total: int) -> None:
        if total > max(ARRAY_SIZE.value, self._on_disk * _MAX_RATIO):
            what = f"`{name}`" if name else "the array"
            raise ArrayFileError(
                f"{what} has {self.headers[name].nbytes} bytes in a file of {self._on_disk} bytes on disk",
                ARRAY_SIZE.hint,
            )

    def read_all(self) -> dict[str, Array]:
        """Every array, in the file's order."""
        return {name: self.read(name) for name in self.headers}


@contextlib.contextmanager
def open_arrays(path: Path) -> Iterator[ArrayFile]:
    """The arrays of an `.npy` or `.npz`, headers read and checked; `ArrayFileError` for a file that is neither or damaged.

    `FeedError` for a device or a pipe; an `OSError` of the path itself passes.
    """
    with open_regular(path, error=FeedError) as file, read_arrays(file) as found:
        yield found


@contextlib.contextmanager
def read_arrays(file: IO[bytes]) -> Iterator[ArrayFile]:
    """As `open_arrays`, of an `.npy` or `.npz` that is open or in memory (`io.BytesIO`)."""
    head = file.read(64)
    file.seek(0)
    if head.startswith(_NPY):
        yield ArrayFile(file, None, {"": _header(file, _allocated_bytes(file, holes=True))})
        return
    if head[:2] != _ZIP:
        if (other := failed_download(head)) is not None:
            raise ArrayFileError(f"it is {other[0]}", other[1])
        raise ArrayFileError("it is neither .npy nor .npz (pickles are never read)")
    with contextlib.ExitStack() as stack:
        with _translate_errors():
            archive = stack.enter_context(zipfile.ZipFile(file))
            headers = dict(_headers(archive))
        yield ArrayFile(file, archive, headers)


def _headers(archive: zipfile.ZipFile) -> Iterator[tuple[str, ArrayHeader]]:
    members = archive.infolist()
    if len(members) > _MAX_MEMBERS:
        raise ArrayFileError(f"it has {len(members)} members, more than {_MAX_MEMBERS}")
    for info in members:
        if not info.filename.endswith(".npy"):
            raise ArrayFileError(f"its member `{info.filename}` is not an array")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArrayFileError(f"its member `{info.filename}` is packed in a way that numpy does not write")
        with archive.open(info) as member:
            yield info.filename.removesuffix(".npy"), _header(member, info.file_size)


def _header(file: IO[bytes], nbytes: int) -> ArrayHeader:
    """The header at the start of the file, checked against the size of its data."""
    with _translate_errors():
        start = file.read(12)
        version = (start[6], start[7]) if len(start) >= 8 and start.startswith(_NPY) else None
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ArrayFileError("it is damaged: no header of an array")
        wide = 2 if version == (1, 0) else 4
        length = int.from_bytes(start[8 : 8 + wide], "little")
        if length > _LONGEST_HEADER:
            raise ArrayFileError(f"it is damaged: a header of {length} bytes, more than {_LONGEST_HEADER}")
        whole = io.BytesIO(start[8:] + file.read(length + wide - 4))
        read = np.lib.format.read_array_header_1_0 if wide == 2 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(whole)
        if dtype.hasobject:
            raise ArrayFileError(
                "it holds pickled objects, which are never read",
                "save plain arrays: numbers, booleans or fixed-length strings",
            )
        if any(size < 0 for size in shape):
            raise ArrayFileError("it is damaged: a size in its header is below zero")
        found = ArrayHeader(tuple(shape), dtype)
        if nbytes - (8 + wide + length) < found.nbytes:
            raise ArrayFileError(f"it is damaged: cut off, its header declares {found.nbytes} bytes of data")
        return found


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except ArrayFileError:
        raise
    except _READ_ERRORS as error:
        text = library_reason(error, whole=True)
        raise ArrayFileError(f"it is damaged: {text}") from error


def _allocated_bytes(file: IO[bytes], *, holes: bool = False) -> int:
    """The bytes the file takes, with or without its holes."""
    if isinstance(file, io.BytesIO):
        return file.getbuffer().nbytes
    found = os.fstat(file.fileno())
    return found.st_size if holes or not hasattr(found, "st_blocks") else min(found.st_size, found.st_blocks * 512)

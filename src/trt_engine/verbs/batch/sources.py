"""Input rows of a batch job: which there are, in a fixed order, and how each is read."""

from __future__ import annotations

import bisect
import io
import itertools
import logging
import math
import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trt_engine.arrayfiles import Array, ArrayFileError, open_arrays, read_arrays
from trt_engine.atomic_io import file_digest, open_regular, read_bounded
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.format import library_reason
from trt_engine.limits import ARCHIVE_RATIO, ARRAY_SIZE, RECORD_SIZE
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.tensors import TensorSpec

log = logging.getLogger(__name__)

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")
_KINDS = {**dict.fromkeys(IMAGES, "image"), ".npy": "arrays", ".npz": "arrays", ".parquet": "parquet", ".tar": "tar"}
_HINT = "images, .npy, .npz, .parquet, .tar of WebDataset, or a folder of them"
BAD_DATA = (
    TrtEngineError,
    ArrayFileError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    OverflowError,
    MemoryError,
    EOFError,
    tarfile.TarError,
    pa.ArrowException,
)
"""What a row that cannot be read raises."""
_MIN_ROW_NBYTES, _SMALL_NBYTES = 16, 16 << 20
"""Least bytes that a row counts as, and encoded bytes of all rows up to which any compression is accepted."""


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside a shard: where its bytes are."""

    suffix: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of a WebDataset shard: its key and its files."""

    key: str
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class InputFile:
    """One input file: its rows as far as its headers show them."""

    name: str
    """In ids: relative to the folder that was given, or the file's name."""
    path: str
    kind: str
    rows: int
    digest: str
    single: bool = False
    """Whether the file as a whole is a row, whose id has no number."""
    samples: tuple[Sample, ...] = ()
    failure: str = ""
    """Why the rows cannot be counted: such a file is one failed row."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start` to `stop` of an input file."""

    file: InputFile
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Part:
    """What one task reads, runs and writes."""

    index: int
    first_row: int
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        return sum(item.stop - item.start for item in self.ranges)


@dataclass(slots=True)
class Row:
    """One input row: the bytes of an image or arrays by input name, or why there is neither."""

    id: str
    image: bytes | None = None
    feeds: dict[str, Array] | None = None
    error: str | None = None


def list_files(inputs: Sequence[Path], signature: Sequence[TensorSpec]) -> list[InputFile]:
    """Every input file in order; of a folder those with a known suffix, sorted. `UsageError` for what is not there."""
    found: list[tuple[str, Path]] = []
    for path in inputs:
        if path.is_dir():
            inside = [
                item
                for item in sorted(path.rglob("*"))
                if item.is_file() and not any(part.startswith(".") for part in item.relative_to(path).parts)
            ]
            known = [item for item in inside if item.suffix.lower() in _KINDS]
            if len(known) < len(inside):
                log.warning("`%s`: %d files of other kinds are left out", path, len(inside) - len(known))
            found += [(item.relative_to(path).as_posix(), item) for item in known]
        elif not path.exists():
            raise UsageError(f"no such file `{path}`", hint=_HINT)
        elif path.suffix.lower() not in _KINDS:
            raise UsageError(f"`{path}` is not a known kind of input", hint=_HINT)
        else:
            found.append((path.name, path))
    if not found:
        raise UsageError("no input files found", hint=_HINT)
    if len(names := {name for name, _ in found}) < len(found):  # ids are unique
        found = [(path.as_posix(), path) for _, path in found]
        names = {name for name, _ in found}
    if len(names) < len(found):
        raise UsageError("an input is given twice", hint="name each file once")
    return [_describe(name, path, signature) for name, path in found]


def _describe(name: str, path: Path, signature: Sequence[TensorSpec]) -> InputFile:
    kind, where, digest = _KINDS[path.suffix.lower()], str(path.absolute()), ""
    rows, single, samples, failure = 1, True, tuple[Sample, ...](), ""
    try:
        _check_holes(path)
        digest = file_digest(path)
        if kind == "parquet":
            rows, single = _count_parquet(path, signature), False
        elif kind == "tar":
            samples, failure = _list_samples(path)
            rows, single = len(samples) + bool(failure), False
        elif kind == "arrays":
            rows, single = _count_rows(path, signature)
        return InputFile(name, where, kind, rows, digest, single, samples, failure)
    except BAD_DATA as error:
        return InputFile(name, where, kind, 1, digest, single=True, failure=reason_of(error))


def _check_holes(path: Path) -> None:
    """`ValueError` for a file that has far fewer bytes than it states: reading one of terabytes would not end."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
    on_disk = getattr(found, "st_blocks", 0) * 512  # 0 on some file systems
    if found.st_size > max(ARRAY_SIZE.value, 10 * on_disk) and on_disk:
        raise ValueError(f"it is sparse: {found.st_size} bytes, {on_disk} of them on disk; {ARRAY_SIZE.hint}")


def reason_of(error: BaseException) -> str:
    """The error as one line."""
    text = error.one_line if isinstance(error, TrtEngineError) else str(error)
    return library_reason(text, whole=True) or type(error).__name__


def _count_rows(path: Path, signature: Sequence[TensorSpec]) -> tuple[int, bool]:
    """Rows of an array file, and whether it is one row without the axis of the batch."""
    with open_arrays(path) as arrays:
        arrays.check_sizes()
        counts = set()
        for name, header in arrays.headers.items():
            spec = _spec_of(name, signature)
            if len(header.shape) == len(spec.shape) - 1:
                counts.add(-1)
            elif len(header.shape) == len(spec.shape):
                counts.add(header.shape[0])
                if header.shape[0] and not header.nbytes:
                    raise ValueError(f"`{name or path.name}` has rows of no elements")
            else:
                raise ValueError(f"`{name or path.name}` has {len(header.shape)} axes, `{spec.name}` {len(spec.shape)}")
    if missing := {spec.name for spec in signature} - {_spec_of(name, signature).name for name in arrays.headers}:
        raise ValueError(f"no array for input `{min(missing)}`")
    if len(counts) != 1:
        raise ValueError("its arrays have different numbers of rows")
    rows = counts.pop()
    return (1, True) if rows < 0 else (rows, False)


def _count_parquet(path: Path, signature: Sequence[TensorSpec]) -> int:
    """Rows of a Parquet file as its footer states them, compared with its bytes."""
    with open_regular(path) as file:
        found = pq.read_metadata(file)
    groups = [found.row_group(index) for index in range(found.num_row_groups)]
    rows, size = int(found.num_rows), path.stat().st_size
    if rows != sum(group.num_rows for group in groups) or any(group.num_rows < 0 for group in groups):
        raise ValueError(f"it is damaged: its footer states {rows} rows, its row groups others")
    names = {spec.name for spec in signature} | {"image"}
    stated = [_stated_nbytes(group, names) for group in groups]
    columns = {spec.name for spec in signature} & {*found.schema.to_arrow_schema().names}
    row = sum(_row_nbytes(spec) for spec in signature if spec.name in columns)
    encoded, nbytes = sum(item[0] for item in stated), sum(item[1] for item in stated)
    nbytes = max(nbytes, rows * max(row, _MIN_ROW_NBYTES))
    for total, least in ((encoded, _SMALL_NBYTES), (nbytes, ARRAY_SIZE.value)):  # run lengths take next to nothing
        if total > max(least, ARCHIVE_RATIO.value * size):
            raise ValueError(f"it states {total} bytes in {rows} rows, in a file of {size}; {ARCHIVE_RATIO.hint}")
    return rows


def _row_nbytes(spec: TensorSpec) -> int:
    sizes = [size for size in spec.shape[1:] if size > 0]
    return math.prod(sizes) * (4 if spec.dtype == "string" else numpy_dtype(spec.dtype).itemsize)


_PHYSICAL_NBYTES = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4}


def _stated_nbytes(group: pq.RowGroupMetaData, names: set[str]) -> tuple[int, int]:
    """Bytes that the columns of these names take encoded and in memory, as the footer states them."""
    encoded = decoded = 0
    for index in range(group.num_columns):
        column = group.column(index)
        if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
            width = _PHYSICAL_NBYTES.get(column.physical_type, 8)
            if column.num_values < 0 or column.total_uncompressed_size < 0 or column.total_compressed_size < 0:
                raise ValueError("it is damaged: a size in its footer is below zero")
            encoded += column.total_uncompressed_size
            decoded += column.num_values * width
    return encoded, decoded


def _spec_of(name: str, signature: Sequence[TensorSpec]) -> TensorSpec:
    if not name and len(signature) == 1:
        return signature[0]
    found = [spec for spec in signature if spec.name == name]
    if not found:
        raise ValueError(f"an array named `{name}`, expected " + ", ".join(f"`{spec.name}`" for spec in signature))
    return found[0]


def _list_samples(path: Path) -> tuple[tuple[Sample, ...], str]:
    """Samples of a shard, files of the same key next to each other; and what ended the reading, where it was not the end."""
    grouped: list[tuple[str, list[Member]]] = []
    size, failure = path.stat().st_size, ""
    try:
        with open_regular(path) as raw, tarfile.open(fileobj=raw, mode="r:") as archive:
            for info in archive:
                if info.size < 0 or info.issparse():
                    raise tarfile.ReadError("a member is sparse, or its size is below zero")
                folder, _, file = info.name.rpartition("/")
                if not info.isfile() or file.startswith("."):
                    continue
                stem, _, suffix = file.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                if not grouped or grouped[-1][0] != key:
                    grouped.append((key, []))
                grouped[-1][1].append(Member(f".{suffix.lower()}", info.offset_data, info.size))
                if info.offset_data + info.size > size:
                    raise tarfile.ReadError("the shard is cut off")
    except BAD_DATA as error:
        failure = reason_of(error)
        if grouped and any(item.offset + item.size > size for item in grouped[-1][1]):
            grouped.pop()  # it is the failed row
    return tuple(Sample(key, tuple(members)) for key, members in grouped), failure


class Parts(Sequence[Part]):
    """The rows of the files in order, in parts of `part_rows`; each is made on access."""

    def __init__(self, files: Sequence[InputFile], part_rows: int) -> None:
        self._files, self._part_rows = files, part_rows
        self._ends = [*itertools.accumulate(file.rows for file in files)]
        self.rows = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return -(-self.rows // self._part_rows)

    @overload
    def __getitem__(self, index: int) -> Part: ...
    @overload
    def __getitem__(self, index: slice) -> list[Part]: ...
    def __getitem__(self, index: int | slice) -> Part | list[Part]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index += len(self) if index < 0 else 0
        if not 0 <= index < len(self):
            raise IndexError(index)
        first = at = index * self._part_rows
        stop, ranges = min(first + self._part_rows, self.rows), []
        number = bisect.bisect_right(self._ends, first)
        while at < stop:
            file, end = self._files[number], self._ends[number]
            if file.rows:
                begin = end - file.rows
                ranges.append(RowRange(file, at - begin, min(stop, end) - begin))
                at = min(stop, end)
            number += 1
        return Part(index, first, tuple(ranges))


def read_rows(wanted: RowRange, signature: Sequence[TensorSpec]) -> Iterator[Row]:
    """Each row of the range, once; a row that cannot be read has its error."""
    file, given = wanted.file, 0
    ids = [file.name if file.single else f"{file.name}#{number}" for number in range(wanted.start, wanted.stop)]
    if file.kind == "tar":
        yield from _read_samples(wanted)
        return
    if file.failure:
        yield from (Row(one, error=file.failure) for one in ids)
        return
    try:
        if file.kind == "image":
            yield Row(ids[0], image=read_bounded(Path(file.path)))
            return
        read = _read_parquet if file.kind == "parquet" else _read_arrays
        for row in read(wanted, ids, signature):
            given += 1
            yield row
    except BAD_DATA as error:
        yield from (Row(one, error=reason_of(error)) for one in ids[given:])


def _read_arrays(wanted: RowRange, ids: list[str], signature: Sequence[TensorSpec]) -> list[Row]:
    path = Path(wanted.file.path)
    if path.suffix.lower() == ".npy":
        with open_arrays(path):  # its header is checked before numpy maps it
            loaded: dict[str, Array] = {"": np.lib.format.open_memmap(path, mode="r")}
    else:
        with open_arrays(path) as arrays:
            loaded = arrays.read_all()
    named = {_spec_of(name, signature).name: value for name, value in loaded.items()}
    if wanted.file.single:
        return [Row(ids[0], feeds={name: np.asarray(value) for name, value in named.items()})]
    cut = {name: np.asarray(value[wanted.start : wanted.stop]) for name, value in named.items()}
    return [Row(one, feeds={name: value[index] for name, value in cut.items()}) for index, one in enumerate(ids)]


def _read_parquet(wanted: RowRange, ids: list[str], signature: Sequence[TensorSpec]) -> Iterator[Row]:
    with pq.ParquetFile(wanted.file.path) as file:
        known = file.schema_arrow.names
        names = [spec.name for spec in signature if spec.name in known] or [
            name for name in ("image",) if name in known
        ]
        if not names or (names != ["image"] and len(names) < len(signature)):
            listed = ", ".join(f"`{spec.name}`" for spec in signature)
            raise ValueError(
                f"no columns for {listed}, nor one of images named `image`; it has {', '.join(known)[:200]}"
            )
        specs = {spec.name: spec for spec in signature}
        first, groups, skipped = 0, [], 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows <= wanted.start:
                skipped += rows
            elif first < wanted.stop:
                groups.append(group)
            first += rows
        row = sum(_row_nbytes(specs[name]) if name in specs else _SMALL_NBYTES for name in names)
        left, most = iter(ids), max(ARRAY_SIZE.value, 10 * Path(wanted.file.path).stat().st_size)
        at, held = skipped, 0
        for table in file.iter_batches(
            max(1, min(1024, _SMALL_NBYTES // max(row, 1))), row_groups=groups, columns=names
        ):
            held += table.nbytes if at + table.num_rows > wanted.start else 0
            if held > most:
                raise ValueError(
                    f"its rows {wanted.start} to {wanted.stop} have more than {most} bytes; {ARRAY_SIZE.hint}"
                )
            for index in range(max(wanted.start - at, 0), min(wanted.stop - at, table.num_rows)):
                values = {name: table.column(name)[index].as_py() for name in names}
                yield _parquet_row(next(left), values, specs)
            at += table.num_rows
            if at >= wanted.stop:
                break


def _parquet_row(id: str, values: dict[str, object], specs: dict[str, TensorSpec]) -> Row:
    try:
        if (empty := next((name for name, value in values.items() if value is None), None)) is not None:
            raise ValueError(f"`{empty}` is null")
        if "image" in values and (image := values["image"]) is not None and "image" not in specs:
            found = image.get("bytes") if isinstance(image, dict) else image
            if not isinstance(found, bytes):
                raise ValueError("`image` does not hold the bytes of an image")
            return Row(id, image=found)
        if any(isinstance(value, bytes | dict) and specs[name].dtype != "string" for name, value in values.items()):
            if len(values) > 1:
                raise ValueError("bytes where an array is expected")
            (image,) = values.values()
            found = image.get("bytes") if isinstance(image, dict) else image
            return Row(id, image=found if isinstance(found, bytes) else b"")
        return Row(id, feeds={name: as_row(np.asarray(value), specs[name]) for name, value in values.items()})
    except BAD_DATA as error:
        return Row(id, error=reason_of(error))


def as_row(value: Array, spec: TensorSpec) -> Array:
    """The value in the input's shape and dtype, less the axis of the batch; a flat list is folded where that is clear."""
    shape = spec.shape[1:]
    if value.ndim != len(shape) and sum(size < 0 for size in shape) <= 1:
        value = value.reshape(shape)
    return value if spec.dtype == "string" else value.astype(numpy_dtype(spec.dtype), copy=False)


def _read_samples(wanted: RowRange) -> Iterator[Row]:
    file = wanted.file
    try:
        opened = open_regular(Path(file.path))
    except BAD_DATA as error:
        for number in range(wanted.start, wanted.stop):
            yield Row(f"{file.name}#{number}", error=reason_of(error))
        return
    with opened as raw:
        for number in range(wanted.start, wanted.stop):
            if number >= len(file.samples):
                yield Row(f"{file.name}#{number}", error=file.failure)
                continue
            sample = file.samples[number]
            yield _read_sample(raw, f"{file.name}#{sample.key}", sample)


def _read_sample(raw: IO[bytes], id: str, sample: Sample) -> Row:
    feeds: dict[str, Array] = {}
    try:
        for member in sample.members:
            if member.suffix not in IMAGES and not member.suffix.endswith((".npy", ".npz")):
                continue
            if member.size > RECORD_SIZE.value:
                raise ValueError(f"a file of {member.size} bytes; {RECORD_SIZE.hint}")
            raw.seek(member.offset)
            data = raw.read(member.size)
            if member.suffix in IMAGES:
                return Row(id, image=data)
            name = member.suffix.removeprefix(".").removesuffix("npy").removesuffix("npz").rstrip(".")
            with read_arrays(io.BytesIO(data)) as arrays:
                feeds |= {key or name: value for key, value in arrays.read_all().items()}
    except BAD_DATA as error:
        return Row(id, error=reason_of(error))
    return Row(id, feeds=feeds) if feeds else Row(id, error="the sample has neither an image nor arrays")

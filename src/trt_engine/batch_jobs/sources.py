"""Input rows of a batch job: which there are, in a fixed order, and how each is read."""

from __future__ import annotations

import io
import logging
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trt_engine.arrayfiles import Array, ArrayFileError, open_arrays, read_arrays
from trt_engine.atomic_io import file_digest, open_regular
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.format import library_reason
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
    tarfile.TarError,
    pa.ArrowException,
)
"""What a row that cannot be read raises."""


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
            inside = [item for item in sorted(path.rglob("*")) if item.is_file() and not _hidden(item, path)]
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


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _describe(name: str, path: Path, signature: Sequence[TensorSpec]) -> InputFile:
    kind, where, digest = _KINDS[path.suffix.lower()], str(path.absolute()), ""
    try:
        digest = file_digest(path)
        if kind == "image":
            return InputFile(name, where, kind, 1, digest, single=True)
        if kind == "parquet":
            return InputFile(name, where, kind, pq.read_metadata(path).num_rows, digest)
        if kind == "tar":
            samples, failure = _list_samples(path)
            return InputFile(name, where, kind, len(samples) + bool(failure), digest, samples=samples, failure=failure)
        rows, single = _count_rows(path, signature)
        return InputFile(name, where, kind, rows, digest, single=single)
    except BAD_DATA as error:
        return InputFile(name, where, kind, 1, digest, single=True, failure=reason_of(error))


def reason_of(error: BaseException) -> str:
    """The error as one line."""
    text = error.one_line if isinstance(error, TrtEngineError) else str(error)
    return library_reason(text, whole=True) or type(error).__name__


def _count_rows(path: Path, signature: Sequence[TensorSpec]) -> tuple[int, bool]:
    """Rows of an array file, and whether it is one row without the axis of the batch."""
    with open_arrays(path) as arrays:
        counts = set()
        for name, header in arrays.headers.items():
            spec = _spec_of(name, signature)
            if len(header.shape) == len(spec.shape) - 1:
                counts.add(-1)
            elif len(header.shape) == len(spec.shape):
                counts.add(header.shape[0])
            else:
                raise ValueError(f"`{name or path.name}` has {len(header.shape)} axes, `{spec.name}` {len(spec.shape)}")
    if missing := {spec.name for spec in signature} - {_spec_of(name, signature).name for name in arrays.headers}:
        raise ValueError(f"no array for input `{min(missing)}`")
    if len(counts) != 1:
        raise ValueError("its arrays have different numbers of rows")
    rows = counts.pop()
    return (1, True) if rows < 0 else (rows, False)


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
    except (tarfile.TarError, OSError, EOFError) as error:
        failure = reason_of(error)
        if grouped and any(item.offset + item.size > size for item in grouped[-1][1]):
            grouped.pop()  # it is the failed row
    return tuple(Sample(key, tuple(members)) for key, members in grouped), failure


def split(files: Sequence[InputFile], part_rows: int) -> list[Part]:
    """The rows in order, in parts of `part_rows`."""
    parts: list[Part] = []
    ranges: list[RowRange] = []
    first = held = 0
    for file in files:
        start = 0
        while start < file.rows:
            stop = min(file.rows, start + part_rows - held)
            ranges.append(RowRange(file, start, stop))
            held, start = held + stop - start, stop
            if held == part_rows:
                parts.append(Part(len(parts), first, tuple(ranges)))
                first, held, ranges = first + held, 0, []
    if ranges:
        parts.append(Part(len(parts), first, tuple(ranges)))
    return parts


def read_rows(wanted: RowRange, signature: Sequence[TensorSpec]) -> Iterator[Row]:
    """Each row of the range, once; a row that cannot be read has its error."""
    file = wanted.file
    ids = [file.name if file.single else f"{file.name}#{number}" for number in range(wanted.start, wanted.stop)]
    if file.kind == "tar":
        yield from _read_samples(wanted)
        return
    if file.failure:
        yield from (Row(one, error=file.failure) for one in ids)
        return
    try:
        if file.kind == "image":
            with open_regular(Path(file.path)) as image:
                yield Row(ids[0], image=image.read())
            return
        read = _read_parquet if file.kind == "parquet" else _read_arrays
        yield from read(wanted, ids, signature)
    except BAD_DATA as error:
        yield from (Row(one, error=reason_of(error)) for one in ids)


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


def _read_parquet(wanted: RowRange, ids: list[str], signature: Sequence[TensorSpec]) -> list[Row]:
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
        first, groups, skipped = 0, [], 0
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if first + rows <= wanted.start:
                skipped += rows
            elif first < wanted.stop:
                groups.append(group)
            first += rows
        table = file.read_row_groups(groups, columns=names).slice(wanted.start - skipped, wanted.stop - wanted.start)
    columns = {name: table.column(name).to_pylist() for name in names}
    specs = {spec.name: spec for spec in signature}
    return [_parquet_row(one, {name: column[index] for name, column in columns.items()}, specs)
            for index, one in enumerate(ids)]  # fmt: skip


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


def _read_sample(raw: object, id: str, sample: Sample) -> Row:
    feeds: dict[str, Array] = {}
    try:
        for member in sample.members:
            if member.suffix not in IMAGES and not member.suffix.endswith((".npy", ".npz")):
                continue
            raw.seek(member.offset)  # type: ignore[attr-defined]
            data = raw.read(member.size)  # type: ignore[attr-defined]
            if member.suffix in IMAGES:
                return Row(id, image=data)
            name = member.suffix.removeprefix(".").removesuffix("npy").removesuffix("npz").rstrip(".")
            with read_arrays(io.BytesIO(data)) as arrays:
                feeds |= {key or name: value for key, value in arrays.read_all().items()}
    except BAD_DATA as error:
        return Row(id, error=reason_of(error))
    return Row(id, feeds=feeds) if feeds else Row(id, error="the sample has neither an image nor arrays")

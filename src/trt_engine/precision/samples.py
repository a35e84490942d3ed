"""Data for calibration and ranges: files, folders and Python iterables, as batches that fit the model.

A folder's files are taken in the order of their names. A damaged file is skipped, counted and said; a file of the wrong
shape is an error, because the rest will be wrong as well.
"""

from __future__ import annotations

import logging
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.equivalence.random_inputs import random_inputs
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.model import Model
from trt_engine.runtime.feeds import numpy_dtype, random_feeds
from trt_engine.tensors import Shape, Signature, TensorSpec, closest, dtype, format_shape

__all__ = [
    "ARRAYS",
    "IMAGES",
    "RAW",
    "Batch",
    "Preprocess",
    "Rows",
    "Samples",
    "open_samples",
    "random_samples",
    "rows_of",
    "single_input",
]

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
Preprocess = Callable[[Path], Any]
"""Makes one input array of an image file, with or without the batch dimension."""

IMAGES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
ARRAYS = frozenset({".npy", ".npz"})
RAW = frozenset({".bin", ".raw"})
_BROKEN = (OSError, ValueError, EOFError, KeyError, MemoryError, SyntaxError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True, slots=True)
class Batch:
    """One set of feeds, and where they came from."""

    feeds: dict[str, Array]
    source: str

    @property
    def rows(self) -> int:
        """Size of the first dimension of the first input that has any."""
        return next((int(array.shape[0]) for array in self.feeds.values() if array.ndim), 1)

    def digest(self, into: Any) -> None:
        """Add the arrays to a hash."""
        for name in sorted(self.feeds):
            array = self.feeds[name]
            into.update(f"{name} {array.dtype.name} {format_shape(array.shape)}".encode())
            into.update(array.astype(str).tobytes() if array.dtype.kind == "O" else np.ascontiguousarray(array).data)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of feeds, and their sources, for `open_samples` to put together to batches; as often as one likes."""

    describe: str
    make: Callable[[dict[str, str]], Iterator[tuple[dict[str, Array], str]]]
    """Feeds with a batch dimension; what it leaves out it writes into the dictionary, with the reason."""
    count: int | None = None
    """Rows, where each of `make`'s feeds is one and their number is known."""


@dataclass(slots=True)
class Samples:
    """Batches to go through, once or as often as one likes."""

    describe: str
    make: Callable[[Samples], Iterator[Batch]]
    again: bool = True
    """False for an iterator: it is used up after one pass."""
    total: int | None = None
    """Batches, where known."""
    random: bool = False
    skipped: dict[str, str] = field(default_factory=dict)
    """Files left out of the latest pass, and why."""
    dropped_rows: int = 0
    """Rows left over at the end that do not fill a batch of the model's fixed size."""

    def __iter__(self) -> Iterator[Batch]:
        self.skipped.clear()
        self.dropped_rows = 0
        return self.make(self)

    def say_what_was_left_out(self) -> list[str]:
        """One sentence for each kind of thing left out, for the log and the report."""
        said = []
        if self.skipped:
            names = list(self.skipped)
            shown = "; ".join(f"`{name}`: {self.skipped[name]}" for name in names[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            said.append(f"{len(names)} damaged file{'s' if len(names) > 1 else ''} skipped ({shown}{more})")
        if self.dropped_rows:
            said.append(f"{self.dropped_rows} rows left out that fill no batch of the model's fixed size")
        return said


def open_samples(
    data: Any,
    signature: Signature,
    *,
    batch: int = 1,
    limit: int | None = None,
    preprocess: Preprocess | None = None,
) -> Samples:
    """The samples in a file, a folder, or a Python iterable of feeds (dictionaries, or arrays for a model of one input).

    Rows of files are put together to batches of `batch`, or of the model's own fixed size; what an iterable gives is used as
    it is. A function that returns an iterable is called for each pass, so that several passes are possible. `limit` is the
    number of rows of files, or of an iterable's items, to take.
    """
    if isinstance(data, Samples):
        return data
    if limit is not None and limit < 1:
        raise UsageError(f"the limit is {limit}, expected at least one sample", hint="leave it out to take all")
    if isinstance(data, str | Path):
        data = rows_of(Path(data), signature, preprocess)
    if isinstance(data, Rows):
        return _in_batches(data, signature, max(1, batch), limit)
    if callable(data):
        return Samples("a Python function", lambda _: _items(data(), signature, limit))
    if isinstance(data, Mapping):
        return Samples("one set of feeds", lambda _: _items([data], signature, limit), total=1)
    if not isinstance(data, Iterable):
        raise UsageError(
            f"samples cannot come from a {type(data).__name__}", hint="a path, an iterable of feeds, or a function"
        )
    once = isinstance(data, Iterator)
    total = len(data) if isinstance(data, Sized) else None
    if total is not None and limit is not None:
        total = min(total, limit)
    return Samples(f"a Python {type(data).__name__}", lambda _: _items(data, signature, limit), not once, total)


def random_samples(model: Model, shapes: Mapping[str, Shape], count: int, seed: int = 0) -> Samples:
    """Seeded random feeds: they run the model and say little about real values."""

    def make(_: Samples) -> Iterator[Batch]:
        yield Batch(random_inputs(model.path, model.signature, shapes, seed), f"random feeds, seed {seed}")
        for index in range(seed + 1, seed + count):
            yield Batch(random_feeds(model.signature, shapes, index), f"random feeds, seed {index}")

    described = ", ".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items())
    return Samples(f"{count} random feeds, seed {seed} ({described})", make, total=count, random=True)


# ------------------------------------------------------------------------------------------------ iterables


def _items(items: Iterable[Any], signature: Signature, limit: int | None) -> Iterator[Batch]:
    for index, item in enumerate(items):
        if limit is not None and index >= limit:
            return
        source = f"item {index}"
        if isinstance(item, Mapping):
            feeds = {name: _fit(np.asarray(value), signature.input(name), source) for name, value in item.items()}
        else:
            spec = single_input(signature, "an array")
            feeds = {spec.name: _fit(np.asarray(item), spec, source)}
        signature.check(feeds)
        yield Batch(feeds, source)


def single_input(signature: Signature, what: str) -> TensorSpec:
    """The model's one input; `FeedError` when it has several."""
    if len(signature.inputs) != 1:
        names = ", ".join(f"`{spec.name}`" for spec in signature.inputs)
        raise FeedError(
            f"{what} is one input and the model has {len(signature.inputs)}: {names}",
            hint="give dictionaries by input name, or .npz files",
        )
    return signature.inputs[0]


def _fit(array: Array, spec: TensorSpec, source: str) -> Array:
    """The array in the input's type and rank; `FeedError` naming the source when it does not fit."""
    wanted = numpy_dtype(spec.dtype)
    if array.dtype != wanted:
        both_floats = array.dtype.kind == "f" and spec.dtype in ("float16", "float32", "float64")
        whole = array.dtype.kind in "iu" and wanted.kind in "iu" and np.can_cast(array.dtype, wanted)
        if not (both_floats or whole):
            raise FeedError(
                f"{source} is {array.dtype.name} for input `{spec.name}`, expected {spec.dtype}",
                hint=f"convert and scale it as the model expects, then save it as {spec.dtype}",
            )
        array = array.astype(wanted)
    if array.ndim + 1 == len(spec.shape) and spec.shape[0] in (-1, 1):
        array = array[None]
    fits = array.ndim == len(spec.shape) and all(
        want in (-1, got) or at == 0 for at, (got, want) in enumerate(zip(array.shape, spec.shape, strict=True))
    )
    if not fits:
        raise FeedError(
            f"{source} is {format_shape(array.shape)} for input `{spec.name}`, expected {spec.describe()}",
            hint="resize and pad it to the input's size",
        )
    return np.asarray(array, order="C")  # `ascontiguousarray` makes one dimension of none


# ------------------------------------------------------------------------------------------------ files


class _Damaged(Exception):
    """One file cannot be read; the others may."""


def rows_of(path: Path, signature: Signature, preprocess: Preprocess | None = None) -> Rows:
    """The rows of a file or of a folder's files, which are looked at now and read when they are asked for."""
    files = _files(path)
    kinds = {file.suffix.lower() for file in files}
    if kinds & IMAGES and preprocess is None:
        raise UsageError(
            f"`{path}` holds images, and nothing says how they become inputs",
            hint="give the inputs themselves as .npy or .npz files, or a model that declares it (docs/vision.md)",
        )
    if kinds & (IMAGES | RAW):
        single_input(signature, "an image" if kinds & IMAGES else "a raw file")
    noun = f"{len(files)} file{'s' if len(files) > 1 else ''}"

    def make(skipped: dict[str, str]) -> Iterator[tuple[dict[str, Array], str]]:
        return _rows(files, signature, preprocess, skipped)

    exact = kinds <= (IMAGES | RAW)  # one row each
    return Rows(f"{noun} of `{path.name}`", make, len(files) if exact else None)


def _in_batches(given: Rows, signature: Signature, batch: int, limit: int | None) -> Samples:
    size = _batch_size(signature, batch)

    def make(samples: Samples) -> Iterator[Batch]:
        return _batches(given.make(samples.skipped), signature, size, limit, samples)

    rows = given.count
    if rows is not None and limit is not None:
        rows = min(rows, limit)
    return Samples(given.describe, make, total=-(-rows // size) if rows is not None else None)


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            known = ARRAYS | RAW | IMAGES
            found = sorted(
                item for item in path.iterdir() if item.suffix.lower() in known and not item.name.startswith(".")
            )
            if not found:
                others = sum(1 for _ in path.iterdir())
                raise FeedError(
                    f"`{path}` holds no samples: {f'{others} files of other kinds' if others else 'it is empty'}",
                    hint="put .npy, .npz, .bin, .raw or image files directly into it",
                )
            return found
        if not path.exists():
            raise FeedError(f"no such file or folder `{path}`", hint="check the path of the data")
    except OSError as error:
        raise FeedError(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}", hint="check it") from error
    if path.suffix.lower() not in ARRAYS | RAW | IMAGES:
        raise FeedError(
            f"`{path}` is no file of samples", hint="give an .npy, .npz, .bin or .raw file, or a folder of them"
        )
    return [path]


def _batch_size(signature: Signature, batch: int) -> int:
    fixed = {spec.shape[0] for spec in signature.inputs if spec.shape and spec.shape[0] >= 0}
    return fixed.pop() if len(fixed) == 1 else batch


def _rows(
    files: list[Path], signature: Signature, preprocess: Preprocess | None, skipped: dict[str, str]
) -> Iterator[tuple[dict[str, Array], str]]:
    """Each file's arrays with a batch dimension; damaged ones are noted."""
    good = 0
    for file in files:
        try:
            yield _read(file, signature, preprocess), file.name
            good += 1
        except _Damaged as error:
            skipped[file.name] = str(error)
            log.debug("skipped `%s`: %s", file, error)
    if not good:
        name, why = next(iter(skipped.items()))
        raise FeedError(
            f"not one of {len(files)} files could be read; the first, `{name}`: {why}", hint="write the files again"
        )


def _read(file: Path, signature: Signature, preprocess: Preprocess | None) -> dict[str, Array]:
    suffix = file.suffix.lower()
    if suffix in RAW:
        return _read_raw(file, single_input(signature, f"`{file.name}`"))
    if suffix in IMAGES:
        assert preprocess is not None  # seen to when the folder was opened
        spec = single_input(signature, f"`{file.name}`")
        try:
            array = np.asarray(preprocess(file))
        except TrtEngineError:
            raise
        except _BROKEN as error:
            raise _Damaged(str(error) or type(error).__name__) from error
        return {spec.name: _fit(array, spec, f"`{file.name}`")}
    try:
        with file.open("rb") as opened:
            loaded = np.load(opened, allow_pickle=False)
            arrays = dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else {"": loaded}
    except _BROKEN as error:
        raise _Damaged(str(error) or type(error).__name__) from error
    if "" in arrays and len(arrays) == 1:
        arrays = {single_input(signature, f"`{file.name}`").name: arrays[""]}
    names = [spec.name for spec in signature.inputs]
    for name in arrays:
        if name not in names:
            raise FeedError(f"`{file.name}` holds `{name}`, which is no input", hint=closest(name, names))
    for name in names:
        if name not in arrays:
            raise FeedError(f"`{file.name}` does not hold the input `{name}`", hint="save every input by its name")
    return {spec.name: _fit(arrays[spec.name], spec, f"`{file.name}`") for spec in signature.inputs}


def _read_raw(file: Path, spec: TensorSpec) -> dict[str, Array]:
    """One sample of exactly the input's shape; a dynamic first dimension counts 1."""
    shape = tuple(1 if at == 0 and size < 0 else size for at, size in enumerate(spec.shape))
    if any(size < 0 for size in shape):
        raise FeedError(
            f"`{file.name}` has no shape of its own, and input `{spec.name}` is {spec.describe()}",
            hint="save it as .npy, which keeps the shape",
        )
    expected = dtype(spec.dtype).nbytes(shape)
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise _Damaged((error.strerror or str(error)).lower()) from error
    if len(raw) != expected:
        raise FeedError(
            f"`{file.name}` has {len(raw)} bytes, expected {expected}: {format_shape(shape)} of {spec.dtype}",
            hint="write one sample to a file, in the input's type and shape",
        )
    return {spec.name: np.frombuffer(raw, numpy_dtype(spec.dtype)).reshape(shape)}


def _batches(
    rows: Iterator[tuple[dict[str, Array], str]], signature: Signature, size: int, limit: int | None, samples: Samples
) -> Iterator[Batch]:
    """The rows in batches of `size`, sources named from first to last."""
    waiting: list[tuple[dict[str, Array], str]] = []
    taken = 0
    for feeds, source in rows:
        if _is_whole(feeds, signature):
            signature.check(feeds)
            yield Batch(feeds, f"`{source}`")
            taken += 1
            continue
        for row in _split(feeds, source):
            if limit is not None and taken >= limit:
                break
            if waiting and not _go_together(waiting[-1][0], row):
                if _batch_size(signature, 0):
                    samples.dropped_rows += len(waiting)
                else:
                    yield _joined(waiting, signature)
                waiting = []
            taken += 1
            waiting.append((row, source))
            if len(waiting) == size:
                yield _joined(waiting, signature)
                waiting = []
        if limit is not None and taken >= limit:
            break
    if waiting and _batch_size(signature, 0):  # a fixed size, and too few rows for it
        if taken < size:
            raise FeedError(
                f"there are {taken} rows, and the model takes {size} at a time",
                hint="give more data, or export the model with a dynamic batch",
            )
        samples.dropped_rows += len(waiting)
    elif waiting:
        yield _joined(waiting, signature)


def _is_whole(feeds: dict[str, Array], signature: Signature) -> bool:
    """Whether the feeds are one batch as they are: some inputs have a batch and others a size of their own in its place."""
    counts = {array.shape[0] for array in feeds.values() if array.ndim}
    return len(counts) > 1 and len({spec.shape[0] for spec in signature.inputs if spec.shape}) > 1


def _go_together(one: dict[str, Array], other: dict[str, Array]) -> bool:
    """Whether two rows may share a batch: inputs without dimensions are the same for all of it."""
    return all(np.array_equal(one[name], array) for name, array in other.items() if not array.ndim)


def _split(feeds: dict[str, Array], source: str) -> Iterator[dict[str, Array]]:
    counts = {array.shape[0] for array in feeds.values() if array.ndim}
    if len(counts) > 1:
        raise FeedError(
            f"`{source}` has inputs of {' and '.join(map(str, sorted(counts)))} rows",
            hint="give every input the same number of rows",
        )
    for row in range(counts.pop() if counts else 1):
        yield {name: array[row : row + 1] if array.ndim else array for name, array in feeds.items()}


def _joined(waiting: list[tuple[dict[str, Array], str]], signature: Signature) -> Batch:
    sources = list(dict.fromkeys(source for _, source in waiting))
    source = f"`{sources[0]}`" if len(sources) == 1 else f"`{sources[0]}` to `{sources[-1]}`"
    feeds = {}
    for spec in signature.inputs:
        arrays = [row[spec.name] for row, _ in waiting]
        try:
            feeds[spec.name] = np.concatenate(arrays) if arrays[0].ndim and len(arrays) > 1 else arrays[0]
        except ValueError as error:
            raise FeedError(
                f"{source}: samples of `{spec.name}` have different sizes and cannot share a batch",
                hint="take them one at a time: a batch of 1",
            ) from error
    signature.check(feeds)
    return Batch(feeds, source)

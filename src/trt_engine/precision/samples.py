"""Data for calibration and ranges: files, folders and Python iterables, as batches that fit the model.

A folder's files are read in name order. A damaged file is skipped and reported; a file of the wrong shape is an error.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.arrayfiles import ArrayFile, ArrayFileError, open_arrays
from trt_engine.atomic_io import found_instead, open_regular, os_error
from trt_engine.backends.onnxruntime import session
from trt_engine.backends.onnxruntime.ort_values import run_arrays
from trt_engine.equivalence.output_error import compare_output
from trt_engine.equivalence.parity import open_with_outputs
from trt_engine.equivalence.random_inputs import runnable_signature
from trt_engine.equivalence.tolerance import TOLERANCES
from trt_engine.errors import FeedError, TrtEngineError, UsageError
from trt_engine.format import join_names
from trt_engine.model import Model
from trt_engine.runtime.feeds import at_shapes, complete_shapes, numpy_dtype, random_feeds, set_values
from trt_engine.tensors import Shape, Signature, Tensors, TensorSpec, dtype, format_shape, suggest

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]
PreprocessFunction = Callable[[Path], Any]
"""Converts an image file to one input array, with or without the batch dimension."""

IMAGE_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"})
ARRAY_SUFFIXES = frozenset({".npy", ".npz"})
RAW_SUFFIXES = frozenset({".bin", ".raw"})
_ROWS_TRIED = 16
_READ_ERRORS = (OSError, ValueError, EOFError, KeyError, MemoryError, SyntaxError)


@dataclass(frozen=True, slots=True)
class Batch:
    """One set of feeds and its source."""

    feeds: dict[str, Array]
    source: str

    @property
    def rows(self) -> int:
        """Size of the first dimension of the first non-scalar input."""
        return next((int(array.shape[0]) for array in self.feeds.values() if array.ndim), 1)

    def update_digest(self, digest: Any) -> None:
        """Add the arrays to a hash."""
        for name in sorted(self.feeds):
            array = self.feeds[name]
            digest.update(f"{name} {array.dtype.name} {format_shape(array.shape)}".encode())
            digest.update(array.astype(str).tobytes() if array.dtype.kind == "O" else np.ascontiguousarray(array).data)


@dataclass(frozen=True, slots=True)
class RowSource:
    """Repeatable rows of feeds with their sources, which `open_samples` batches."""

    description: str
    iterate: Callable[[dict[str, str]], Iterator[tuple[dict[str, Array], str]]]
    """Yields feeds with a batch dimension; writes skipped files with the reason into the dictionary."""
    count: int | None = None
    """Number of rows, if known."""


@dataclass(slots=True)
class Samples:
    """Iterable batches, repeatable unless they come from an iterator."""

    description: str
    iterate: Callable[[Samples], Iterator[Batch]]
    repeatable: bool = True
    """False for an iterator, which allows one pass."""
    total: int | None = None
    """Number of batches, if known."""
    random: bool = False
    skipped: dict[str, str] = field(default_factory=dict)
    """Files skipped in the latest pass, with the reason."""
    dropped_rows: int = 0
    """Rows at the end that do not fill a batch of the model's fixed size."""

    def __iter__(self) -> Iterator[Batch]:
        self.skipped.clear()
        self.dropped_rows = 0
        return self.iterate(self)

    def first(self) -> Batch:
        """Return the first batch; raise `UsageError` if there are none."""
        batch = next(iter(self), None)
        if batch is None:
            left_out = "; ".join(self.omission_messages())
            raise UsageError(
                f"{self.description} has no sample for this model" + (f": {left_out}" if left_out else ""),
                hint="give at least one sample (a row of the array, a file of the folder)",
            )
        return batch

    def omission_messages(self) -> list[str]:
        """One sentence for the skipped files and one for the dropped rows."""
        said = []
        if self.skipped:
            shown = join_names([f"`{name}`: {reason}" for name, reason in self.skipped.items()], 3, "; ")
            said.append(f"{len(self.skipped)} damaged file{'s' if len(self.skipped) > 1 else ''} skipped ({shown})")
        if self.dropped_rows:
            said.append(f"{self.dropped_rows} rows left out that fill no batch of the model's fixed size")
        return said


def open_samples(
    data: Any,
    signature: Signature,
    *,
    batch: int = 1,
    limit: int | None = None,
    preprocess: PreprocessFunction | None = None,
    given: Tensors | None = None,
    model: Model | None = None,
) -> Samples:
    """Open samples from a file, a folder, or a Python iterable of feeds (dictionaries, or arrays for a model of one input).

    Rows of files are batched to `batch` or to the model's fixed size, and kept together where `model` shows that they are
    one sample (frames of a recording); items of an iterable are used as they are. A function that returns an iterable is
    called for each pass. `limit` is the maximum number of rows, files kept together, or items. Inputs that the data does
    not have are those of `given` (in the inputs' dtypes), their rows repeated to the batch. Raises `UsageError` for a
    `limit` below 1, other data, or images without preprocessing; `FeedError` for files that cannot be read.
    """
    if isinstance(data, Samples):
        return data
    if given and (missing := given.keys() - _names_in(data)):
        rest = replace(signature, inputs=tuple(spec for spec in signature.inputs if spec.name not in missing))
        samples = open_samples(data, rest, batch=batch, limit=limit, preprocess=preprocess)
        return _complete(samples, signature, {name: given[name] for name in missing})
    if limit is not None and limit < 1:
        raise UsageError(f"the limit is {limit}, expected at least one sample", hint="leave it out to take all")
    if isinstance(data, str | Path):
        data = open_rows(Path(data), signature, preprocess)
    if isinstance(data, RowSource):
        return _batch_rows(data, signature, max(1, batch), limit, model)
    if callable(data):
        return Samples("a Python function", lambda _: _iter_items(data(), signature, limit))
    if isinstance(data, Mapping):
        return Samples("one set of feeds", lambda _: _iter_items([data], signature, limit), total=1)
    if not isinstance(data, Iterable):
        raise UsageError(
            f"samples cannot come from a {type(data).__name__}", hint="a path, an iterable of feeds, or a function"
        )
    once = isinstance(data, Iterator)
    total = min(len(data), limit or len(data)) if isinstance(data, Sized) else None
    return Samples(f"a Python {type(data).__name__}", lambda _: _iter_items(data, signature, limit), not once, total)


def _names_in(data: Any) -> set[str]:
    """The inputs by whose names the data has arrays, as far as its first sample shows."""
    if isinstance(data, str | Path):
        first = next((file for file in _list_files(Path(data)) if file.suffix.lower() == ".npz"), None)
        try:
            with contextlib.ExitStack() as at_end:
                return set(at_end.enter_context(open_arrays(first)).headers) if first is not None else set()
        except (ArrayFileError, OSError):
            return set()  # reported when it is read
    first_item = data[0] if isinstance(data, Sequence) and data else data
    return set(first_item) if isinstance(first_item, Mapping) else set()


def _complete(samples: Samples, signature: Signature, given: Tensors) -> Samples:
    """The samples with the `given` inputs, which they do not have."""

    def make(made: Samples) -> Iterator[Batch]:
        for batch in samples:
            there = {name: tuple(array.shape) for name, array in batch.feeds.items()}
            rows = {
                there[spec.name][axis]
                for spec in signature.inputs
                if spec.name in there
                for axis in signature.batch_axes(spec)
            }
            own = {name: tuple(np.shape(array)) for name, array in given.items()}
            shapes = complete_shapes(signature, there | own, given, rows.pop() if len(rows) == 1 else None)
            feeds = at_shapes(signature, given, shapes) | batch.feeds
            signature.check(feeds)
            yield replace(batch, feeds=feeds)
        made.skipped |= samples.skipped
        made.dropped_rows += samples.dropped_rows

    return replace(samples, iterate=make, skipped={})


def shapes_in(data: Any, model: Model) -> dict[str, Shape]:
    """The shapes of the first sample of a file or folder of arrays; none of other data."""
    with contextlib.suppress(TrtEngineError, TypeError):  # of what is no path
        first = open_samples(Path(data), model.signature, limit=1, model=model).first()
        return {name: array.shape for name, array in first.feeds.items()}
    return {}


def random_samples(
    model: Model, shapes: Mapping[str, Shape], count: int, seed: int = 0, given: Tensors | None = None
) -> Samples:
    """Seeded random feeds, which do not represent real data, of the inputs that are not `given`: arrays of these shapes in
    the inputs' dtypes.
    """
    shapes = complete_shapes(model.signature, shapes, given or {})
    values = at_shapes(model.signature, given or {}, shapes)

    def make(_: Samples) -> Iterator[Batch]:
        signature = set_values(model.signature, values)
        signature = runnable_signature(model.path, signature, shapes, seed, values)
        for index in range(seed, seed + count):
            yield Batch(random_feeds(signature, shapes, index, values), f"random feeds, seed {index}")

    described = ", ".join(f"{name}:{format_shape(shape)}" for name, shape in shapes.items())
    random = len(values) < len(model.signature.inputs)
    return Samples(f"{count} random feeds, seed {seed} ({described})", make, total=count, random=random)


# ------------------------------------------------------------------------------------------------ iterables


def _iter_items(items: Iterable[Any], signature: Signature, limit: int | None) -> Iterator[Batch]:
    for index, item in enumerate(items):
        if limit is not None and index >= limit:
            return
        source = f"item {index}"
        if isinstance(item, Mapping):
            feeds = {
                name: _convert_array(_as_array(value, source), signature.input(name), source)
                for name, value in item.items()
            }
        else:
            spec = require_single_input(signature, "an array")
            feeds = {spec.name: _convert_array(_as_array(item, source), spec, source)}
        signature.check(feeds)
        yield Batch(feeds, source)


def _as_array(value: Any, source: str) -> Array:
    try:
        return np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # images with their labels, a tensor that needs its gradient
        raise FeedError(
            f"{source} is {found_instead(value)}, expected one array of numbers",
            hint="without labels: `(images for images, labels in loader)`; a tensor of PyTorch on the host, detached",
        ) from error


_GIVEN_HINT = "`--inputs FILE.npz` has those that are the same for every sample, as a state or a rate"


def require_single_input(signature: Signature, what: str) -> TensorSpec:
    """Return the model's only input; raise `FeedError` if it has several."""
    if len(signature.inputs) != 1:
        names = ", ".join(f"`{spec.name}`" for spec in signature.inputs)
        raise FeedError(
            f"{what} is one input and the model has {len(signature.inputs)}: {names}",
            hint=f"give dictionaries by input name, or .npz files; {_GIVEN_HINT}",
        )
    return signature.inputs[0]


def _convert_array(array: Array, spec: TensorSpec, source: str) -> Array:
    """Convert the array to the input's dtype and rank; raise `FeedError` if it does not fit."""
    _check_array(array.shape, array.dtype, spec, source)
    array = array.astype(numpy_dtype(spec.dtype), copy=False)
    if array.ndim + 1 == len(spec.shape):
        array = array[None]
    return np.asarray(array, order="C")  # `ascontiguousarray` makes one dimension of none


def _check_array(shape: tuple[int, ...], kind: np.dtype[Any], spec: TensorSpec, source: str) -> None:
    """Raise `FeedError` unless an array of that shape and dtype can be converted to the input's."""
    wanted = numpy_dtype(spec.dtype)
    if kind != wanted:
        both_floats = kind.kind == "f" and spec.dtype in ("float16", "float32", "float64")
        whole = kind.kind in "iu" and wanted.kind in "iu" and np.can_cast(kind, wanted)
        if not (both_floats or whole):
            raise FeedError(
                f"{source} is {kind.name} for input `{spec.name}`, expected {spec.dtype}",
                hint=f"convert and scale it as the model expects, then save it as {spec.dtype}",
            )
    if len(shape) + 1 == len(spec.shape) and spec.shape[0] in (-1, 1):
        shape = (1, *shape)
    fits = len(shape) == len(spec.shape) and all(
        want in (-1, got) or at == 0 for at, (got, want) in enumerate(zip(shape, spec.shape, strict=True))
    )
    if not fits:
        raise FeedError(
            f"{source} is {format_shape(shape)} for input `{spec.name}`, expected {spec.format_symbolic()}",
            hint="resize and pad it to the input's size"
            if spec.image_layout is not None
            else "a file of rows has the batch first; else a folder of one .npz for each sample, or `--inputs FILE.npz` for "
            "what is the same in all",
        )


# ------------------------------------------------------------------------------------------------ files


class _UnreadableFile(Exception):
    """One file cannot be read."""


def open_rows(path: Path, signature: Signature, preprocess: PreprocessFunction | None = None) -> RowSource:
    """The rows of a file or of a folder's files, listed now and read lazily.

    Raises `UsageError` for images without preprocessing, `FeedError` for a path without samples, or images for a model of
    several inputs.
    """
    files = _list_files(path)
    kinds = {file.suffix.lower() for file in files}
    if kinds & IMAGE_SUFFIXES and preprocess is None:
        raise UsageError(
            f"`{path}` holds images, and the model declares no preprocessing",
            hint="give the inputs themselves as .npy or .npz files, or a model that declares it (`trt-engine docs vision`)",
        )
    if kinds & (IMAGE_SUFFIXES | RAW_SUFFIXES):
        require_single_input(signature, "an image" if kinds & IMAGE_SUFFIXES else "a raw file")
    noun = f"{len(files)} file{'s' if len(files) > 1 else ''}"

    def make(skipped: dict[str, str]) -> Iterator[tuple[dict[str, Array], str]]:
        return _iter_rows(files, signature, preprocess, skipped)

    exact = kinds <= (IMAGE_SUFFIXES | RAW_SUFFIXES)  # one row each
    return RowSource(f"{noun} of `{path.name}`", make, len(files) if exact else None)


def _batch_rows(source: RowSource, signature: Signature, batch: int, limit: int | None, model: Model | None) -> Samples:
    size, joined = _batch_size(signature, batch), dict[str, bool]()

    def make(samples: Samples) -> Iterator[Batch]:
        rows = source.iterate(samples.skipped)
        for first in itertools.islice(rows, 1):
            if model is not None and "rows" not in joined:
                joined["rows"] = _depend_on_each_other(model, first[0])
            at_once = 0 if joined.get("rows") else size
            yield from _iter_batches(itertools.chain([first], rows), signature, at_once, limit, samples)

    total = None if source.count is None else -(-min(source.count, limit or source.count) // size)
    return Samples(source.description, make, total=total)


def _list_files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            known = ARRAY_SUFFIXES | RAW_SUFFIXES | IMAGE_SUFFIXES
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
        if error.errno == errno.ENAMETOOLONG:
            raise os_error(error, path) from error
        raise FeedError(f"cannot read `{path}`: {(error.strerror or str(error)).lower()}", hint="check it") from error
    if path.suffix.lower() not in ARRAY_SUFFIXES | RAW_SUFFIXES | IMAGE_SUFFIXES:
        raise FeedError(
            f"`{path}` is not a sample file", hint="give an .npy, .npz, .bin or .raw file, or a folder of them"
        )
    return [path]


def _batch_size(signature: Signature, batch: int) -> int:
    """The inputs' fixed size; 1 where an output has a fixed one, so does not follow the batch; else `batch`."""
    if any(spec.shape and spec.shape[0] >= 0 for spec in signature.outputs):
        batch = 1
    fixed = {spec.shape[0] for spec in signature.inputs if spec.shape and spec.shape[0] >= 0}
    return fixed.pop() if len(fixed) == 1 else batch


def _depend_on_each_other(model: Model, feeds: dict[str, Array]) -> bool:
    """Whether the rows of a file are one sample: a row in the middle gives another result alone, or none."""
    signature, rows = model.signature, {len(array) for array in feeds.values() if array.ndim}
    other = any(len(spec.shape) > 3 or spec.shape[:1] not in ((), (-1,)) for spec in signature.inputs)
    if other or len(rows) != 1 or 1 in rows:  # images, a fixed batch
        return False
    count = min(_ROWS_TRIED, rows.pop())
    few = {name: array[:count] if array.ndim else array for name, array in feeds.items()}
    one = {name: array[count // 2 :][:1] if array.ndim else array for name, array in few.items()}
    names = [spec.name for spec in signature.outputs]
    try:
        loaded = open_with_outputs(model.path, names)
    except TrtEngineError:
        return False  # reported by what needs it
    results: list[list[Any]] = []
    for given in (one, few):
        try:
            results.append(run_arrays(loaded, names, given))
        except session.ERRORS:
            return given is one
    tolerance = TOLERANCES["fp32"].for_graph(model.proto)
    return not all(
        len(whole) == count and len(row) == 1 and tolerance.accepts(compare_output(row, whole[count // 2 :][:1]))
        for row, whole in zip(*results, strict=True) if np.ndim(whole) and np.ndim(row)
    )  # fmt: skip


def _iter_rows(
    files: list[Path], signature: Signature, preprocess: PreprocessFunction | None, skipped: dict[str, str]
) -> Iterator[tuple[dict[str, Array], str]]:
    """Yield each file's arrays with a batch dimension; record unreadable files in `skipped`."""
    good = 0
    for file in files:
        try:
            yield _read_file(file, signature, preprocess), file.name
            good += 1
        except _UnreadableFile as error:
            skipped[file.name] = str(error)
            log.debug("skipped `%s`: %s", file, error)
    if not good:
        name, why = next(iter(skipped.items()))
        raise FeedError(
            f"not one of {len(files)} files could be read; the first, `{name}`: {why}", hint="write the files again"
        )


def _read_file(file: Path, signature: Signature, preprocess: PreprocessFunction | None) -> dict[str, Array]:
    suffix = file.suffix.lower()
    if suffix in RAW_SUFFIXES:
        return _read_raw(file, require_single_input(signature, f"`{file.name}`"))
    if suffix in IMAGE_SUFFIXES:
        assert preprocess is not None  # checked when the folder was opened
        spec = require_single_input(signature, f"`{file.name}`")
        try:
            array = np.asarray(preprocess(file))
        except TrtEngineError:
            raise
        except _READ_ERRORS as error:
            raise _UnreadableFile(str(error) or type(error).__name__) from error
        return {spec.name: _convert_array(array, spec, f"`{file.name}`")}
    try:
        with open_arrays(file) as opened:
            return _read_arrays(opened, file, signature)
    except (ArrayFileError, OSError) as error:
        raise _UnreadableFile(str(error) or type(error).__name__) from error


def _read_arrays(opened: ArrayFile, file: Path, signature: Signature) -> dict[str, Array]:
    """Read the inputs' arrays, checking each header first."""
    arrays = {name: name for name in opened.headers}
    if "" in arrays and len(arrays) == 1:
        arrays = {require_single_input(signature, f"`{file.name}`").name: ""}
    names = [spec.name for spec in signature.inputs]
    for name in arrays:
        if name not in names:
            raise FeedError(f"`{file.name}` holds `{name}`, which is not an input", hint=suggest(name, names))
    for name in names:
        if name not in arrays:
            raise FeedError(
                f"`{file.name}` does not hold the input `{name}`", hint=f"save every input by its name; {_GIVEN_HINT}"
            )
    for spec in signature.inputs:
        header = opened.headers[arrays[spec.name]]
        _check_array(header.shape, header.dtype, spec, f"`{file.name}`")
    return {
        spec.name: _convert_array(opened.read(arrays[spec.name]), spec, f"`{file.name}`") for spec in signature.inputs
    }


def _read_raw(file: Path, spec: TensorSpec) -> dict[str, Array]:
    """Read one sample of exactly the input's shape; a dynamic first dimension is 1."""
    shape = tuple(1 if at == 0 and size < 0 else size for at, size in enumerate(spec.shape))
    if any(size < 0 for size in shape):
        raise FeedError(
            f"`{file.name}` records no shape, and input `{spec.name}` is {spec.format_symbolic()}",
            hint="save it as .npy, which keeps the shape",
        )
    expected = dtype(spec.dtype).nbytes(shape)
    try:
        with open_regular(file, error=FeedError) as opened:
            nbytes = os.fstat(opened.fileno()).st_size
            raw = opened.read(expected) if nbytes == expected else b""
    except OSError as error:
        raise _UnreadableFile((error.strerror or str(error)).lower()) from error
    if len(raw) != expected:
        raise FeedError(
            f"`{file.name}` has {nbytes} bytes, expected {expected}: {format_shape(shape)} of {spec.dtype}",
            hint="write one sample to a file, in the input's type and shape",
        )
    return {spec.name: np.frombuffer(raw, numpy_dtype(spec.dtype)).reshape(shape)}


def _iter_batches(
    rows: Iterator[tuple[dict[str, Array], str]], signature: Signature, size: int, limit: int | None, samples: Samples
) -> Iterator[Batch]:
    """Batch the rows to `size` (0: those of a file), naming the first and last source."""
    waiting: list[tuple[dict[str, Array], str]] = []
    taken, batches = 0, len({spec.shape[0] for spec in signature.inputs if spec.shape})
    for feeds, source in rows:
        if limit is not None and taken >= limit:
            break
        counts = {array.shape[0] for array in feeds.values() if array.ndim}
        if not size or (len(counts) > 1 and batches > 1):  # no batch dimension in some inputs: one complete batch
            signature.check(feeds)
            yield Batch(feeds, f"`{source}`")
            taken += 1
            continue
        if len(counts) > 1:
            raise FeedError(
                f"`{source}` has inputs of {' and '.join(map(str, sorted(counts)))} rows",
                hint="give every input the same number of rows",
            )
        for at in range(counts.pop() if counts else 1):
            if limit is not None and taken >= limit:
                break
            row = {name: array[at : at + 1] if array.ndim else array for name, array in feeds.items()}
            scalars = {name: array for name, array in row.items() if not array.ndim}  # equal in all rows of a batch
            if waiting and not all(np.array_equal(waiting[-1][0][name], array) for name, array in scalars.items()):
                if _batch_size(signature, 0):
                    samples.dropped_rows += len(waiting)
                else:
                    yield _concat_rows(waiting, signature)
                waiting = []
            taken += 1
            waiting.append((row, source))
            if len(waiting) == size:
                yield _concat_rows(waiting, signature)
                waiting = []
    if waiting and _batch_size(signature, 0):  # a fixed size, and too few rows for it
        if taken < size:
            raise FeedError(
                f"there are {taken} rows, and the model takes {size} at a time",
                hint="give more data, or export the model with a dynamic batch",
            )
        samples.dropped_rows += len(waiting)
    elif waiting:
        yield _concat_rows(waiting, signature)


def _concat_rows(waiting: list[tuple[dict[str, Array], str]], signature: Signature) -> Batch:
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

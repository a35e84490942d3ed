"""Example inputs from shapes or files, and their variants at other sizes."""

from __future__ import annotations

import contextlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trt_engine.arrayfiles import Array, ArrayFileError, open_arrays
from trt_engine.atomic_io import found_instead
from trt_engine.config.parse import parse_shapes
from trt_engine.conversion.axes import Axes
from trt_engine.errors import FeedError, MemoryExhausted, UsageError
from trt_engine.runtime.feeds import numpy_dtype
from trt_engine.tensors import DTYPES, Shape, dtype, format_shape, suggest

_HINT = "write it as `--input images:2x3x640x640`, `--input ids:2x128:int64@0..30521`, or name an .npy or .npz file"
_KIND = re.compile(r"([a-z]\w*)(?:@(-?\d+(?:\.\d+)?)\.\.(-?\d+(?:\.\d+)?))?")
_MASK = re.compile(r"mask", re.IGNORECASE)


@dataclass(frozen=True)
class Example:
    """An input: optional name, shape, dtype, and value range or array."""

    name: str | None
    shape: Shape
    dtype: str = "float32"
    low: float | None = None
    high: float | None = None
    """Inclusive for integers."""
    array: Array | None = None
    """Array from a file; None for seeded random values."""


_FIXED = re.compile(r"([A-Za-z_]\w*)=(.*)")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "none": None}


def split_fixed(given: Any) -> tuple[Any, dict[str, Any]]:
    """What is given without `NAME=VALUE`, and these: arguments that are numbers, flags or None, not tensors."""
    if isinstance(given, Mapping) or given is None:
        return given, {}
    items = _items(given)
    matches = [_FIXED.fullmatch(item) if isinstance(item, str) else None for item in items]
    fixed = {found[1]: _fixed_value(found[0], found[2]) for found in matches if found is not None}
    return [item for item, found in zip(items, matches, strict=True) if found is None] or None, fixed


def _items(given: Any) -> list[Any]:
    """What is given as a list: one array, one shape, one text or path is one item."""
    one = isinstance(given, str | Path | Example) or hasattr(given, "dtype")
    shape = isinstance(given, tuple | list) and bool(given) and all(isinstance(size, int) for size in given)
    if not one and not isinstance(given, Iterable):
        raise UsageError(
            f"`--input` is {found_instead(given)}, expected shapes or arrays", hint="`--input x:1x3x224x224`"
        )
    return [given] if one or shape else list(given)


def _fixed_value(text: str, value: str) -> int | float | bool | None:
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(value)
    raise UsageError(
        f"`{text}` is not a number, true, false or none",
        hint="`--input steps=3` gives an argument that is not a tensor",
    )


def parse_inputs(given: Any) -> list[Example]:
    """Examples from text, .npy and .npz paths, or arrays and shapes by name."""
    if given is None:
        return []
    if isinstance(given, Mapping):
        return [_example_from_value(str(name), value) for name, value in given.items()]
    found: list[Example] = []
    for item in _items(given):
        if isinstance(item, Example):
            found.append(item)
        elif isinstance(item, tuple | list) or hasattr(item, "dtype"):
            found.append(_example_from_value(None, item))
        elif isinstance(item, Path) or (isinstance(item, str) and Path(item).suffix.lower() in (".npy", ".npz")):
            found += _example_from_file(Path(item))
        else:
            found += _example_from_text(str(item))
    names = [item.name for item in found if item.name is not None]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"input `{name}` is given twice", hint="one `--input` for each")
    return found


def _example_from_value(name: str | None, value: Any) -> Example:
    if isinstance(value, str):
        return _example_from_text(f"{name}:{value}")[0]
    if isinstance(value, Example):
        return replace(value, name=name)
    if isinstance(value, tuple | list) and all(isinstance(size, int) for size in value):
        return Example(name, tuple(value))
    return _example_from_array(name, np.asarray(value.detach().cpu() if hasattr(value, "detach") else value))


def _example_from_array(name: str | None, array: Array) -> Example:
    if array.dtype.name not in DTYPES:
        raise FeedError(f"the example of `{name or 'the input'}` is {array.dtype}, expected numbers", hint=_HINT)
    return Example(name, array.shape, array.dtype.name, array=array)


def _example_from_file(path: Path) -> list[Example]:
    try:
        with open_arrays(path) as file:
            arrays = file.read_all()
    except FileNotFoundError as error:
        raise FeedError(f"no such file `{path}`", hint="check the path of `--input`") from error
    except ArrayFileError as error:
        raise FeedError(f"`{path}` cannot be read: {error}", hint=error.hint) from error
    return [_example_from_array(name or None, array) for name, array in arrays.items()]


def _example_from_text(text: str) -> list[Example]:
    found = []
    for part in text.split():
        body, kind, low, high = part, "float32", None, None
        head, colon, tail = part.rpartition(":")
        match = _KIND.fullmatch(tail) if colon else None
        if match is not None and tail != "scalar":
            if match[1] not in DTYPES:
                raise UsageError(f"`{part}` names the unknown type `{match[1]}`", hint=_HINT)
            body, kind = head, match[1]
            low = float(match[2]) if match[2] is not None else None
            high = float(match[3]) if match[3] is not None else None
            if low is not None and high is not None and low > high:
                raise UsageError(f"the range of `{part}` is empty", hint=_HINT)
            _check_range(kind, low, high, part)
        if ":" not in body:
            try:
                shapes: dict[str | None, Shape] = {None: parse_shapes(f"x:{body}")["x"]}
            except UsageError:
                raise UsageError(f"cannot read the input `{part}`", hint=_HINT) from None
        else:
            shapes = dict(parse_shapes(body).items())
        for name, shape in shapes.items():
            if any(size < 0 for size in shape):
                raise UsageError(f"the example `{part}` has an open size", hint="give sizes; `--dynamic` opens them")
            found.append(Example(name, shape, dtype(kind).name, low, high))
    return found


def _check_range(kind: str, low: float | None, high: float | None, part: str) -> None:
    numbers = numpy_dtype(kind)
    for end in (low, high):
        if end is not None and numbers.kind in "iu" and not np.iinfo(numbers).min <= end <= np.iinfo(numbers).max:
            raise UsageError(f"{end:g} in `{part}` is not a valid {kind}", hint=_HINT)


def match_examples(names: Sequence[str], given: Sequence[Example], owner: str) -> dict[str, Example]:
    """The examples by input name, those without one by position; `UsageError` for one that the `owner` does not have."""
    if len(given) > len(names):
        raise UsageError(
            f"{len(given)} inputs are given, and {owner} has {len(names)}: {', '.join(names)}", hint="one for each"
        )
    found = {}
    for at, item in enumerate(given):
        name = names[at] if item.name is None else item.name
        if name not in names:
            raise UsageError(f"{owner} has no input `{name}`", hint=suggest(name, names))
        found[name] = item
    return found


def fit_example(item: Example, name: str, kind: str, shape: Shape | None, stated: str, owner: str) -> Example:
    """The example as an input of dtype `kind`, which it gets where only its shape is given.

    `shape` has -1 for open sizes, and is None for an unknown rank; `stated` is how it is shown. Raises `UsageError` for
    another shape, `FeedError` for another dtype.
    """
    if shape is not None and (
        len(item.shape) != len(shape)
        or any(mine >= 0 and mine != size for mine, size in zip(shape, item.shape, strict=True))
    ):
        usual = format_shape(tuple(2 if size < 0 else size for size in shape))
        raise UsageError(
            f"the example of `{name}` is {format_shape(item.shape)}, and {owner} takes {stated}",
            hint=f"`--input {name}:{usual}`",
        )
    if item.dtype != kind and (item.array is not None or item.dtype != "float32"):
        raise FeedError(
            f"the example of `{name}` is {item.dtype}, and {owner} takes {kind}",
            hint=f"leave the type to {owner}" if item.array is None else f"save it as {kind}: `.astype(numpy.{kind})`",
        )
    return replace(item, name=name, dtype=kind)


def with_batch_2(examples: Mapping[str, Example], axes: Axes) -> tuple[dict[str, Example], list[str]]:
    """The examples with every dynamic size of 1 changed to 2, and notes on the changes.

    Exporters treat a size of 1 as a constant: a graph traced at batch 1 is often frozen there silently.
    """
    found, said = dict(examples), []
    for name, positions in axes.items():
        shape = list(found[name].shape)
        for at, axis in positions.items():
            if shape[at] == 1:
                size = 2 if axis.step == 1 else axis.step
                if not axis.contains(size):
                    continue
                shape[at] = size
                said.append(f"`{axis.symbol}` of the example `{name}` was raised from 1 to {size}")
        if tuple(shape) != found[name].shape:
            example = found[name]
            array = None if example.array is None else resize_example(example.array, tuple(shape))
            found[name] = replace(example, shape=tuple(shape), array=array)
    return found, said


def resize_example(array: Array, shape: Shape) -> Array:
    """The array at another shape of its rank, cropped or repeated."""
    for at, size in enumerate(shape):
        if array.shape[at] != size:
            array = np.take(array, np.arange(size) % max(array.shape[at], 1), axis=at)
    return np.asarray(array, order="C")  # `ascontiguousarray` would make a scalar a vector


def array_of(name: str, example: Example, shape: Shape, seed: int = 0) -> Array:
    """Values of the example at a shape: from a file, cropped or repeated, or seeded random.

    Floats are normal (or uniform in a given range), integers 0 or 1 unless a range is given. A mask of two or more
    dimensions is 1 for a prefix of every row, never empty.
    """
    try:
        return _array_of(name, example, shape, seed)
    except (MemoryError, ValueError, OverflowError) as error:  # NumPy: too many bytes, or too many to count
        raise MemoryExhausted(
            f"an example of `{name}` of {format_shape(shape)} does not fit into memory", hint="a smaller `--input`"
        ) from error


def _array_of(name: str, example: Example, shape: Shape, seed: int) -> Array:
    if example.array is not None:
        return resize_example(example.array, shape)
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    wanted = numpy_dtype(example.dtype)
    given = example.low is not None or example.high is not None
    if example.dtype == "string":
        raise UsageError(f"the input `{name}` is a string, and strings cannot be generated", hint="give an .npz file")
    if not given and _MASK.search(name) and len(shape) > 1 and wanted.kind in "iub" and shape[-1]:
        lengths = rng.integers((shape[-1] + 1) // 2, shape[-1] + 1, size=shape[:-1])
        return np.asarray(np.arange(shape[-1]) < lengths[..., None]).astype(wanted)
    if wanted.kind == "b":
        return rng.integers(0, 2, size=shape).astype(np.bool_)
    if wanted.kind in "iu":
        low = int(example.low) if example.low is not None else 0
        high = int(example.high) if example.high is not None else low + 1
        return rng.integers(low, high, size=shape, endpoint=True).astype(wanted)
    if given:
        low_f, high_f = example.low or 0.0, 1.0 if example.high is None else example.high
        return np.asarray(rng.uniform(low_f, high_f, size=shape)).astype(wanted)
    return np.asarray(rng.standard_normal(size=shape)).astype(wanted)

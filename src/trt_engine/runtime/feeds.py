"""Feeds from seeds and from files, and outputs to files: numpy's `.npy` and `.npz`, never a pickle."""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from trt_engine.config import Profile
from trt_engine.device import host
from trt_engine.errors import FeedError, ShapeError, UsageError
from trt_engine.files import write_whole
from trt_engine.tensors import Role, Shape, Signature, Tensors, TensorSpec, closest, dtype, format_shape

__all__ = ["numpy_dtype", "random_feeds", "read_feeds", "shapes_of", "write_outputs"]

Array = npt.NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of one of our type names, `ml_dtypes` for those numpy lacks; strings are object arrays."""
    dtype(name)
    return np.dtype(object) if name == "string" else host.numpy_dtype(name)


# ------------------------------------------------------------------------------------------------ shapes


def shapes_of(
    signature: Signature,
    profile: Profile | None,
    *,
    batch: int | None = None,
    which: Literal["min", "opt", "max"] = "opt",
    overrides: Mapping[str, Shape] | None = None,
) -> dict[str, Shape]:
    """One shape for each input: the profile's `which`, with the batch and the given shapes in place of its own.

    Raises `ShapeError` for a size nobody gave or a batch the model does not have, `ProfileError` outside the profile.
    """
    overrides = dict(overrides or {})
    for name in overrides:
        signature.input(name)
    if batch is not None and batch < 1:
        raise ShapeError(f"the batch cannot be {batch}", hint="`--batch 1`")
    shapes = {spec.name: _shape(spec, profile, batch, which, overrides.get(spec.name)) for spec in signature.inputs}
    movable = [spec.name for spec in signature.inputs if spec.shape and spec.shape[0] < 0]
    if batch is not None and not any(shape and shape[0] == batch for shape in shapes.values()):
        given = [name for name in movable if name in overrides]
        fixed = "`--shapes` says otherwise" if given else "no input of this model has a dynamic batch"
        raise ShapeError(f"the batch is {batch}, but {fixed}", hint="leave `--batch` out")
    if profile is not None:
        profile.check({name: SimpleNamespace(shape=shape) for name, shape in shapes.items()})
    return shapes


def _shape(spec: TensorSpec, profile: Profile | None, batch: int | None, which: str, given: Shape | None) -> Shape:
    if given is not None:
        if len(given) != len(spec.shape) or any(
            got != want if want >= 0 else got < 0 for got, want in zip(given, spec.shape, strict=True)
        ):
            raise ShapeError(
                f"the shape {format_shape(given)} does not fit input `{spec.name}`, which is {spec.describe()}",
                hint="write shapes as `images:1x3x640x640`",
            )
        return given
    base: Shape = spec.shape
    if profile is not None and spec.name in profile.ranges:
        base = getattr(profile.ranges[spec.name], which)
    sizes = list(base)
    if spec.shape and spec.shape[0] < 0:
        sizes[0] = batch if batch is not None else max(sizes[0], 1) if profile is None else sizes[0]
    if any(size < 0 for size in sizes):
        usual = [size if size >= 0 else 1 if position == 0 else 640 for position, size in enumerate(sizes)]
        raise ShapeError(
            f"input `{spec.name}` is {spec.describe()}: its dynamic sizes must be given",
            hint=f"add `--shapes {spec.name}:{format_shape(usual)}` with the sizes this model expects",
        )
    return tuple(sizes)


# ------------------------------------------------------------------------------------------------ random


def random_feeds(
    signature: Signature,
    shapes: Mapping[str, Shape],
    seed: int = 0,
    values: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Array]:
    """Seeded inputs of these shapes; the same name, shape and seed give the same array everywhere.

    Floats are uniform in [0, 1). `int32` and `int64` are 0 or 1, because they are often indices; other integers are
    0 to 127 (0 or 1 below 8 bits). Row `i` does not depend on the number of rows. An input with a role (sizes, steps, axes,
    divisors) gets values that can be. `values` are given instead of drawn.
    """
    given = values or {}
    return {
        spec.name: _given(spec, shapes[spec.name], given[spec.name])
        if spec.name in given
        else _random(spec, shapes[spec.name], seed)
        for spec in signature.inputs
    }


def _given(spec: TensorSpec, shape: Shape, values: Sequence[int]) -> Array:
    array = np.array(values, numpy_dtype(spec.dtype))
    if array.size != math.prod(shape):
        raise FeedError(
            f"input `{spec.name}` is {format_shape(shape)}, and {array.size} values are given for it",
            hint="one value for each of its elements",
        )
    return array.reshape(shape)


_SIZE = 4
_FILLS: dict[Role | None, Callable[[int], Array]] = {
    "one": np.ones,
    "size": lambda count: np.full(count, _SIZE),
    "first": np.zeros,
    "axes": np.arange,
    "reshape": lambda count: np.array([-1] + [1] * (count - 1)),
}


def _random(spec: TensorSpec, shape: Shape, seed: int) -> Array:
    if spec.role in _FILLS:
        return np.resize(_FILLS[spec.role](math.prod(shape)), shape).astype(numpy_dtype(spec.dtype))
    rng = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    kind = dtype(spec.dtype)
    wanted = numpy_dtype(spec.dtype)
    if spec.dtype == "string":
        numbers = rng.integers(0, 1000, size=shape)
        return np.asarray(numbers.astype(str), dtype=object).reshape(shape)
    if spec.dtype == "bool":
        return rng.integers(0, 2, size=shape, dtype=np.uint8).astype(np.bool_)
    if "int" in spec.dtype:
        low = int(spec.role == "positive")
        top = 2 + low if spec.dtype in ("int32", "int64") else 2 if kind.bits < 8 else 128
        return rng.integers(low, top, size=shape, dtype=np.uint8).astype(wanted)
    if spec.dtype == "float64":
        return rng.random(shape, dtype=np.float64)
    return rng.random(shape, dtype=np.float32).astype(wanted, copy=False)


# ------------------------------------------------------------------------------------------------ files

_NPY, _ZIP = b"\x93NUMPY", b"PK"
_BROKEN = (ValueError, EOFError, KeyError, OSError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)


def read_feeds(path: Path, signature: Signature) -> dict[str, Array]:
    """The feeds in a `.npy` (a model of one input) or `.npz` (by input name), checked against the signature.

    Types numpy lacks (bfloat16, float8) are read from their bits: unsigned integers of the same width.
    """
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FeedError(f"cannot read the inputs `{path}`: {reason}", hint="give an .npy or .npz file") from error
    if head == _NPY:
        found = _read_npy(path, signature)
    elif head[:2] == _ZIP:
        found = _read_npz(path, signature)
    else:
        raise FeedError(
            f"`{path}` is neither .npy nor .npz (pickles are never read)",
            hint="write it with `numpy.save` or `numpy.savez`, without objects in it",
        )
    feeds = {name: _as_spec(array, signature.input(name)) for name, array in found.items()}
    signature.check(feeds)
    return feeds


def _read_npy(path: Path, signature: Signature) -> dict[str, Array]:
    if len(signature.inputs) != 1:
        names = ", ".join(f"`{spec.name}`" for spec in signature.inputs)
        raise FeedError(
            f"`{path}` is one array and the engine has {len(signature.inputs)} inputs: {names}",
            hint="put them in one .npz by name: `numpy.savez(file, name=array, ...)`",
        )
    try:
        with path.open("rb") as file:
            array = np.load(file, allow_pickle=False)
    except _BROKEN as error:
        raise _broken(path, error) from error
    return {signature.inputs[0].name: array}


def _read_npz(path: Path, signature: Signature) -> dict[str, Array]:
    known = [spec.name for spec in signature.inputs]
    feeds = {}
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            for name in archive.files:
                if name not in known:
                    raise FeedError(
                        f"`{path}` holds `{name}`, which is no input of the engine", hint=closest(name, known)
                    )
                feeds[name] = archive[name]
    except _BROKEN as error:
        raise _broken(path, error) from error
    return feeds


def _broken(path: Path, error: BaseException) -> FeedError:
    if "allow_pickle" in str(error):
        return FeedError(
            f"`{path}` holds pickled objects, which are never read",
            hint="save plain arrays: numbers, booleans or fixed-length strings",
        )
    return FeedError(f"`{path}` is damaged: {error or type(error).__name__}", hint="write it again")


def _as_spec(array: Any, spec: TensorSpec) -> Array:
    """The same values as the engine reads them: native byte order, C order, bits of types numpy lacks."""
    if not isinstance(array, np.ndarray):
        raise FeedError(f"`{spec.name}` is no array in the file", hint="write it again with `numpy.savez`")
    kind = dtype(spec.dtype)
    if hasattr(ml_dtypes, spec.dtype) and array.dtype.kind in "uV" and array.dtype.itemsize == max(kind.bits // 8, 1):
        array = array.view(numpy_dtype(spec.dtype))
    elif spec.dtype == "string" and array.dtype.kind in "US":
        array = array.astype(np.str_).astype(object)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.asarray(array, order="C")


def write_outputs(path: Path, outputs: Tensors) -> Path:
    """Write outputs whole: one array to `.npy`, any number by name to `.npz`.

    Types numpy lacks are written as their bits, in unsigned integers of the same width; strings as fixed-length text.
    """
    arrays = {name: _as_stored(np.asarray(value)) for name, value in outputs.items()}
    buffer = io.BytesIO()
    if path.suffix == ".npy":
        if len(arrays) != 1:
            names = ", ".join(f"`{name}`" for name in arrays)
            raise UsageError(
                f"`{path}` can hold one array, there are {len(arrays)}: {names}",
                hint=f"`-o {path.with_suffix('.npz')}`, or choose one with `--output NAME`",
            )
        np.save(buffer, next(iter(arrays.values())), allow_pickle=False)
    elif path.suffix == ".npz":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:  # numpy.savez forbids the name `file`
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
    else:
        raise UsageError(f"outputs cannot be written to `{path}`", hint="give a name that ends in .npz or .npy")
    return write_whole(path, buffer.getvalue())


def _as_stored(array: Array) -> Array:
    if array.dtype.kind == "O":
        text = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
        return np.array(text, dtype=np.str_).reshape(array.shape)
    if hasattr(ml_dtypes, array.dtype.name):
        return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")
    return array

"""Random feeds, and reading feeds and writing outputs as `.npy` and `.npz` without pickles."""

from __future__ import annotations

import io
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from trt_engine.arrayfiles import Array, ArrayFile, ArrayFileError, ArrayHeader, npz_bytes, open_arrays
from trt_engine.atomic_io import write_atomic
from trt_engine.config.profiles import Profile, shapes_hint
from trt_engine.device import Device, host
from trt_engine.errors import FeedError, ModelError, ShapeError
from trt_engine.format import join_names
from trt_engine.limits import RECORD_VALUES, RUN_SIZE
from trt_engine.tensors import Choice, Shape, Signature, Tensors, TensorSpec, dtype, format_shape, no_array, suggest


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy or `ml_dtypes` dtype for a type name; strings are object arrays. Raises `UsageError` for an unknown name."""
    dtype(name)
    return np.dtype(object) if name == "string" else host.numpy_dtype(name)


def shapes_of(
    signature: Signature,
    profile: Profile | None,
    *,
    batch: int | None = None,
    which: Literal["min", "opt", "max"] = "opt",
    overrides: Mapping[str, Shape] | None = None,
) -> dict[str, Shape]:
    """The shape of each input: the profile's `which`, overridden by `batch` and `overrides`.

    Raises `ShapeError` for a missing dynamic size or an impossible batch, `ProfileError` outside the profile.
    """
    overrides = dict(overrides or {})
    for name in overrides:
        signature.input(name)
    if batch is not None and batch < 1:
        raise ShapeError(f"the batch cannot be {batch}", hint="`--batch 1`")
    axes = {spec.name: signature.batch_axes(spec) for spec in signature.inputs}
    following = signature.following_sizes(overrides, batch=batch is None)
    shapes = {
        spec.name: _shape(
            spec, axes[spec.name], profile, batch, which, overrides.get(spec.name), following.get(spec.name, {})
        )
        for spec in signature.inputs
    }
    for spec in signature.inputs:
        if any(size < 0 for size in shapes[spec.name]):
            raise ShapeError(
                f"input `{spec.name}` is {spec.format_symbolic()}: its dynamic dimensions must be given",
                hint=shapes_hint(signature, overrides, batch=batch or 1),
            )
    if batch is not None and not any(
        shape[axis] == batch for name, shape in shapes.items() for axis in axes[name] or range(len(shape))[:1]
    ):
        given = [name for name in overrides if axes[name]]
        fixed = "`--shapes` gives another" if given else "no input of this model has a dynamic batch"
        raise ShapeError(f"the batch is {batch}, but {fixed}", hint="leave `--batch` out")
    if profile is not None:
        profile.check({name: SimpleNamespace(shape=shape) for name, shape in shapes.items()})
    return shapes


def _shape(
    spec: TensorSpec,
    batch_axes: Sequence[int],
    profile: Profile | None,
    batch: int | None,
    which: str,
    override: Shape | None,
    follows: Mapping[int, int],
) -> Shape:
    if override is not None:
        if len(override) != len(spec.shape) or any(
            got != want if want >= 0 else got < 0 for got, want in zip(override, spec.shape, strict=True)
        ):
            raise ShapeError(
                f"the shape {format_shape(override)} does not fit input `{spec.name}`, which is {spec.format_symbolic()}",
                hint="write shapes as `images:1x3x640x640`",
            )
        return override
    base: Shape = spec.shape
    if profile is not None and spec.name in profile.ranges:
        base = getattr(profile.ranges[spec.name], which)
    sizes = [follows.get(axis, size) for axis, size in enumerate(base)]
    for axis in set(batch_axes) - set(follows):
        sizes[axis] = batch if batch is not None else max(sizes[axis], 1) if profile is None else sizes[axis]
    return tuple(sizes)


def random_feeds(
    signature: Signature,
    shapes: Mapping[str, Shape],
    seed: int = 0,
    values: Mapping[str, Sequence[int] | Array] | None = None,
) -> dict[str, Array]:
    """Seeded inputs of these shapes, determined by name, shape and seed alone.

    Floats are uniform in [0, 1). `int32` and `int64` are 0 or 1, because they are often indices; other integers are 0 to 127
    (0 or 1 below 8 bits). Row `i` does not depend on the number of rows. An input with a role (sizes, steps, axes, divisors)
    gets valid values for it, a switch the first of its `choices`. `values` replaces random values by input name. Raises
    `FeedError` for `values` of another count, `ShapeError` for shapes that do not fit in memory, `ModelError` for an input
    of too many dimensions and for inputs that are too large together.
    """
    given = values or {}
    total = sum(_check_size(spec, shapes[spec.name]) for spec in signature.inputs)
    if total > (most := RUN_SIZE.value):
        raise ModelError(
            f"the inputs have {total} bytes together, more than {RUN_SIZE.format_value(most)}", hint=RUN_SIZE.hint
        )
    return {
        spec.name: _from_values(spec, shapes[spec.name], given[spec.name])
        if spec.name in given
        else _random(spec, shapes[spec.name], seed)
        for spec in signature.inputs
    }


_MAX_RANK = 64  # numpy's own
_STRING_NBYTES = 64
"""A short text and its place, in memory."""


def _check_size(spec: TensorSpec, shape: Shape) -> int:
    """The bytes of an input by its static dimensions: `ModelError` beyond the size limit, `ShapeError` for too large given
    shapes."""
    own = dtype(spec.dtype).nbytes(known := tuple(size or 1 for size in spec.shape if size >= 0))  # numpy's rule too
    own = max(own, _STRING_NBYTES * math.prod(known)) if spec.dtype == "string" else own
    if len(spec.shape) > _MAX_RANK:
        raise ModelError(f"input `{spec.name}` has {len(spec.shape)} dimensions", hint=f"numpy has up to {_MAX_RANK}")
    if own > (most := RUN_SIZE.value):
        raise ModelError(
            f"input `{spec.name}` has {own} bytes, more than {RUN_SIZE.format_value(most)}", hint=RUN_SIZE.hint
        )
    if dtype(spec.dtype).nbytes(tuple(size or 1 for size in shape)) >= 1 << 62:
        raise ShapeError(
            f"input `{spec.name}` of {format_shape(shape)} does not fit in memory", hint="give smaller shapes"
        )
    return own


def _from_values(spec: TensorSpec, shape: Shape, values: Sequence[int] | Array) -> Array:
    array = np.array(values, numpy_dtype(spec.dtype))
    if array.size != math.prod(shape):
        raise FeedError(
            f"input `{spec.name}` is {format_shape(shape)}, and {array.size} values are given for it",
            hint="one value for each of its elements",
        )
    return array.reshape(shape)


_SIZE = 4
_FILLS: dict[str | None, Callable[[int], Array]] = {
    "one": np.ones,
    "size": lambda count: np.full(count, _SIZE),
    "first": np.zeros,
    "axes": np.arange,
    "reshape": lambda count: np.array([-1] + [1] * (count - 1)),
}


def _random(spec: TensorSpec, shape: Shape, seed: int) -> Array:
    if spec.choices and spec.choices[0] is not None:
        return np.full(shape, spec.choices[0], numpy_dtype(spec.dtype))
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


def read_feeds(path: Path, signature: Signature, *, partial: bool = False) -> dict[str, Array]:
    """Feeds from `.npy` (a single input) or `.npz` (by input name), checked against the signature.

    With `partial`, of some inputs alone. Types numpy lacks (bfloat16, float8) are stored as unsigned integers of the same
    width. Raises `FeedError` for a file that cannot be read, holds objects, or does not fit the signature.
    """
    try:
        with open_arrays(path) as file:
            feeds = dict(_read_checked(path, file, signature))
    except ArrayFileError as error:
        raise FeedError(f"`{path}` cannot be read: {error}", hint=error.hint) from error
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FeedError(f"cannot read the inputs `{path}`: {reason}", hint="give an .npy or .npz file") from error
    if partial:
        signature = Signature(tuple(spec for spec in signature.inputs if spec.name in feeds), ())
    signature.check(feeds)
    return feeds


def read_values(path: Path | None, signature: Signature) -> dict[str, Array]:
    """The values that a file has for some inputs or all, in the inputs' shapes and dtypes; none without a file.

    Raises `FeedError` for a file that cannot be read or does not fit.
    """
    return {} if path is None else read_feeds(path, signature, partial=True)


def describe_inputs(signature: Signature, path: Path | None, given: Tensors, others: str) -> str:
    """The origin of feeds: the file for the inputs of it (whatever their shapes and dtypes), `others` for the rest."""
    if path is None:
        return others
    rest = [f"`{spec.name}`" for spec in signature.inputs if spec.name not in given]
    return path.name + (f"; {join_names(rest, 3)} {others}" if rest else "")


def set_values(signature: Signature, given: Tensors) -> Signature:
    """The signature whose switches, and inputs of one value that no batch moves, have the value that is given alone:
    generated inputs have it then."""

    def choices(spec: TensorSpec) -> tuple[Choice, ...]:
        values = np.asarray(given[spec.name]).ravel() if spec.name in given else np.empty(0)
        fixed = spec.choices or (not signature.batch_axes(spec) and (values.size == 1 or values.dtype.kind in "iub"))
        return (values[0].item(),) if fixed and values.size and (values == values[0]).all() else spec.choices

    return replace(signature, inputs=tuple(replace(spec, choices=choices(spec)) for spec in signature.inputs))


def complete_shapes(
    signature: Signature, shapes: Mapping[str, Shape], given: Tensors, batch: int | None = None
) -> dict[str, Shape]:
    """The shapes with those of the arrays (of any dtype) in place, their batch `batch`; other inputs follow these where
    symbols are equal.
    """
    found = {name: list(shape) for name, shape in shapes.items()}
    for spec in signature.inputs:
        if spec.name in given:
            shape = found[spec.name] = list(np.shape(given[spec.name]))
            for axis in signature.batch_axes(spec):
                shape[axis] = shape[axis] if batch is None else batch
    for name, sizes in signature.following_sizes({name: tuple(found[name]) for name in given if name in found}).items():
        for axis, size in sizes.items():
            found[name][axis] = size
    return {name: tuple(shape) for name, shape in found.items()}


def at_shapes(signature: Signature, given: Tensors, shapes: Mapping[str, Shape]) -> dict[str, Array]:
    """Those of the arrays that have the shapes but for the batch, in their dtypes: their rows are repeated, or the first of
    them taken.
    """
    made = {}
    for spec in signature.inputs:
        if spec.name not in given:
            continue
        array, wanted = np.asarray(given[spec.name]), shapes[spec.name]
        for axis in signature.batch_axes(spec):
            if array.shape[axis] and array.shape[axis] != wanted[axis]:
                array = np.take(array, np.arange(wanted[axis]) % array.shape[axis], axis)
        if array.shape == tuple(wanted):
            made[spec.name] = np.asarray(array, order="C")
    return made


def _read_checked(path: Path, file: ArrayFile, signature: Signature) -> Iterator[tuple[str, Array]]:
    """The arrays by input name; headers are checked before data is read."""
    known = [spec.name for spec in signature.inputs]
    for name, header in file.headers.items():
        if not name and len(known) != 1:
            names = ", ".join(f"`{name}`" for name in known)
            raise FeedError(
                f"`{path}` is one array and the engine has {len(known)} inputs: {names}",
                hint="put them in one .npz by name: `numpy.savez(file, name=array, ...)`",
            )
        if name and name not in known:
            raise FeedError(
                f"`{path}` contains `{name}`, which is not an input of the engine", hint=suggest(name, known)
            )
        spec = signature.input(name or known[0])
        _check_header(header, spec)
        yield spec.name, as_spec(file.read(name), spec)


def _check_header(header: ArrayHeader, spec: TensorSpec) -> None:
    """`FeedError` unless dtype, rank and static dimensions match the input."""
    if spec.dtype == "string" and math.prod(header.shape) > RECORD_VALUES.value:
        raise FeedError(f"`{spec.name}` has {math.prod(header.shape)} texts", hint=RECORD_VALUES.hint)
    name = spec.dtype if _holds_bits_of(header.dtype, spec) else header.dtype.newbyteorder("=").name
    spec.check(SimpleNamespace(shape=header.shape, dtype=SimpleNamespace(name=name)))


def _holds_bits_of(found: np.dtype[Any], spec: TensorSpec) -> bool:
    """Whether the array stores the bits of a type that numpy lacks."""
    width = max(dtype(spec.dtype).bits // 8, 1)
    return hasattr(ml_dtypes, spec.dtype) and found.kind in "uV" and found.itemsize == width


def as_spec(array: Array, spec: TensorSpec) -> Array:
    """The array in the engine's dtype, native byte order and C order. The shape stays."""
    if _holds_bits_of(array.dtype, spec):
        array = array.view(numpy_dtype(spec.dtype))
    elif spec.dtype == "string" and array.dtype.kind in "US":
        array = array.astype(np.str_).astype(object)
    elif not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.asarray(array, order="C")


def write_outputs(path: Path, outputs: Tensors) -> Path:
    """Write outputs atomically: the only array to `.npy`, or arrays by name to `.npz`.

    Types numpy lacks are written as unsigned integers of the same width, strings as fixed-length text. Arrays of any shape
    and dtype.
    """
    arrays = {name: _to_storable(np.asarray(value)) for name, value in outputs.items()}
    if path.suffix == ".npy":
        (only,) = arrays.values()
        buffer = io.BytesIO()
        np.save(buffer, only, allow_pickle=False)
        data = buffer.getvalue()
    else:
        data = npz_bytes(arrays)
    return write_atomic(path, data)


def _to_storable(array: Array) -> Array:
    if array.dtype.kind == "O":
        text = [item.decode() if isinstance(item, bytes) else str(item) for item in array.ravel().tolist()]
        return np.array(text, dtype=np.str_).reshape(array.shape)
    if hasattr(ml_dtypes, array.dtype.name):
        return np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")
    return array


_ON_HOST = (1, 3)
"""DLPack's device types kDLCPU and kDLCUDAHost (dlpack.h)."""


def as_feed(name: str, value: Any, device: Device | None) -> Any:
    """The value as a numpy array, or unchanged if it is a device array; `FeedError` for anything else. No copies."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    try:
        on_device = is_device_array(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:  # a tensor without memory: `meta`, sparse
        raise FeedError(f"input `{name}` cannot be read: {error}", hint="pass an array on the host") from error
    if on_device:
        if device is None:
            raise FeedError(
                f"input `{name}` is a device array, expected a host array",
                hint="copy it to the host: `.detach().cpu()`",
            )
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            raise FeedError(
                f"input `{name}` is a {type(value).__name__} without shape and dtype",
                hint="pass an array of torch, cupy or jax",
            )
        return value
    if not hasattr(value, "__dlpack__"):
        raise no_array(name, value)
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise FeedError(
            f"input `{name}` cannot be read in place: {error}", hint="copy it to the host: `.detach().cpu()`"
        ) from error


def is_device_array(value: Any) -> bool:
    """Whether an array is in device memory, by its DLPack or CUDA array interface."""
    if isinstance(value, np.ndarray):
        return False
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) not in _ON_HOST
    return hasattr(value, "__cuda_array_interface__")

"""Read and convert constants in chunks, so that weights larger than memory can be cast."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_engine import atomic_io
from trt_engine.arrayfiles import Array
from trt_engine.graph import external_data

_CHUNK_ELEMENTS = 1 << 22
"""Elements per chunk."""
_PLACEHOLDER = "#"
_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}


@dataclass(frozen=True, slots=True)
class DeferredCast:
    """An external weight and its target type."""

    tensor: TensorProto
    elem: int
    limit: float | None


@dataclass(slots=True)
class CastLoss:
    """Effects of a smaller type on a constant."""

    nonzero: int = 0
    overflowed: int = 0
    """Number of finite values beyond the limit."""
    underflowed: int = 0
    """Number of values that would become 0."""
    largest: float = 0.0
    """Signed finite value of the largest magnitude."""
    smallest: float = math.inf
    """Smallest nonzero magnitude."""
    max_rel_error: float = 0.0
    """Largest relative error within the limit."""
    one_sided: bool = True
    """All values beyond the limit have the same sign, as in a mask."""


def cast_loss(tensor: TensorProto, folder: Path, low: Any, limit: float) -> CastLoss:
    """Compute the effects of storing the tensor in the dtype `low`; magnitudes above `limit`, in units of the tensor,
    overflow.
    """
    found = CastLoss()
    signs: set[bool] = set()
    smallest_normal = _SMALLEST_NORMAL[np.dtype(low).name]
    for piece in iter_chunks(tensor, folder):
        sizes = np.abs(piece)
        if not np.isfinite(sizes.max()):
            piece = piece[np.isfinite(piece)]
            sizes = np.abs(piece)
        count = int(np.count_nonzero(sizes))
        if not count:
            continue
        found.nonzero += count
        at = int(sizes.argmax())
        if sizes[at] > abs(found.largest):
            found.largest = float(piece[at])
        found.smallest = min(found.smallest, float(sizes.min(where=sizes > 0, initial=math.inf)))
        if sizes[at] > limit:
            outside = sizes > limit
            found.overflowed += int(np.count_nonzero(outside))
            signs.update((piece[outside] > 0).tolist())
        if found.smallest < smallest_normal:
            small = sizes[(sizes < smallest_normal) & (sizes > 0)]
            if small.size:
                rounded = small.astype(low).astype(np.float32)
                found.underflowed += int(np.count_nonzero(rounded == 0))
                found.max_rel_error = max(found.max_rel_error, float((np.abs(rounded - small) / small).max()))
    found.one_sided = len(signs) < 2
    return found


def iter_chunks(tensor: TensorProto, folder: Path) -> Iterator[Array]:
    """Yield the FP32 tensor's values as flat chunks of bounded size."""
    if tensor.data_location == TensorProto.EXTERNAL:
        entries = {item.key: item.value for item in tensor.external_data}
        count = math.prod(tensor.dims)
        if not count:
            return
        numbers: Array = np.memmap(
            folder / entries["location"], np.dtype("<f4"), "r", int(entries.get("offset") or 0), (count,)
        )
    else:
        numbers = numpy_helper.to_array(tensor).reshape(-1)
    for start in range(0, numbers.size, _CHUNK_ELEMENTS):
        yield np.asarray(numbers[start : start + _CHUNK_ELEMENTS])


def _encode(piece: Array, elem: int, limit: float | None) -> bytes:
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(elem))
    if limit is not None:
        piece = np.clip(piece, -limit, limit)
    with np.errstate(over="ignore"):
        return piece.astype(kind).tobytes()


def convert(
    tensor: TensorProto, name: str, elem: int, limit: float | None, folder: Path, deferred: list[DeferredCast]
) -> TensorProto:
    """Convert an FP32 tensor to another type; an external one is added to `deferred` and converted by `write_model`.

    `limit`, in units of the tensor, bounds magnitudes; None for no bound.
    """
    made = TensorProto(name=name, data_type=elem, dims=tensor.dims, doc_string=tensor.doc_string)
    if tensor.data_location == TensorProto.EXTERNAL:
        made.data_location = TensorProto.EXTERNAL
        made.external_data.add(key="location", value=f"{_PLACEHOLDER}{len(deferred)}")
        deferred.append(DeferredCast(deepcopy(tensor), elem, limit))
    else:
        made.raw_data = b"".join(_encode(piece, elem, limit) for piece in iter_chunks(tensor, folder))
    return made


def external_data_path(target: Path) -> Path:
    """Path of the external data file of a model."""
    return target.with_name(f"{target.name}.data")


def write_model(
    proto: ModelProto,
    target: Path,
    deferred: Sequence[DeferredCast],
    folder: Path,
    *,
    external: bool,
    validate: Callable[[Path], None],
) -> int:
    """Write the model atomically, with external data if `external` or too large for one file; return the size in bytes.

    `validate` checks the finished file before it replaces the target.
    """

    def encoded(tensor: TensorProto) -> Iterator[bytes] | None:
        location = next((item.value for item in tensor.external_data if item.key == "location"), "")
        if not location.startswith(_PLACEHOLDER):
            return None
        source = deferred[int(location.removeprefix(_PLACEHOLDER))]
        return (_encode(piece, source.elem, source.limit) for piece in iter_chunks(source.tensor, folder))

    weights = external_data_path(target).name
    with atomic_io.staging_folder(target) as staging:
        draft = staging / target.name
        with atomic_io.os_errors(target):
            external_data.write_draft(proto, draft, folder, weights, external=external, encode=encoded)
            validate(draft)
            return publish(draft, target)


def publish(draft: Path, target: Path) -> int:
    """Move a staged model and its external data to `target`; return the size in bytes."""
    weights, beside = external_data_path(draft), external_data_path(target)
    nbytes = draft.stat().st_size + (weights.stat().st_size if weights.exists() else 0)
    if weights.exists():
        atomic_io.move_into_place(weights, beside)
    else:
        atomic_io.remove_replaced(beside)
    atomic_io.move_into_place(draft, target)
    return nbytes


def written_files(target: Path) -> dict[str, Path]:
    """A written model and its external data, by kind of artifact."""
    beside = external_data_path(target)
    return {"model": target} | ({"weights": beside} if beside.exists() else {})

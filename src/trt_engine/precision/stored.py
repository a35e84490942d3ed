"""Stored tensors read, judged and converted piece by piece, so that weights larger than memory can be cast."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, helper, numpy_helper

from trt_engine import files
from trt_engine.errors import ModelError
from trt_engine.graph import walk

__all__ = ["Facts", "Source", "array", "converted", "facts", "side_file", "write"]

Array = npt.NDArray[Any]

_PIECE = 1 << 22
"""Elements handled at a time."""
_ALIGNED = 4096
_OUTSIDE_FROM = 1024
"""Bytes of a tensor from which it goes to the side file, where there is one."""
_INLINE_UP_TO = 1 << 30
"""Bytes of weights up to which one file holds them: a protobuf ends at 2 GiB."""
_MARK = "#"
_SMALLEST_NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}


@dataclass(frozen=True, slots=True)
class Source:
    """A weight in an external file, and what it is to become."""

    tensor: TensorProto
    elem: int
    limit: float | None


@dataclass(slots=True)
class Facts:
    """What a smaller type would do to a constant."""

    nonzero: int = 0
    beyond: int = 0
    """Finite numbers larger than the limit."""
    vanish: int = 0
    """Numbers that would become 0."""
    largest: float = 0.0
    """The finite number of the largest size, with its sign."""
    smallest: float = math.inf
    """The smallest size that is not 0."""
    error: float = 0.0
    """The largest relative error of a number within the limit."""
    one_sided: bool = True
    """All numbers beyond the limit have one sign, as a mask's have."""


def facts(tensor: TensorProto, folder: Path, low: Any, limit: float) -> Facts:
    """What storing the tensor in the type `low` would do."""
    found = Facts()
    signs: set[bool] = set()
    smallest_normal = _SMALLEST_NORMAL[np.dtype(low).name]
    for piece in pieces(tensor, folder):
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
            found.beyond += int(np.count_nonzero(outside))
            signs.update((piece[outside] > 0).tolist())
        if found.smallest < smallest_normal:
            small = sizes[(sizes < smallest_normal) & (sizes > 0)]
            if small.size:
                rounded = small.astype(low).astype(np.float32)
                found.vanish += int(np.count_nonzero(rounded == 0))
                found.error = max(found.error, float((np.abs(rounded - small) / small).max()))
    found.one_sided = len(signs) < 2
    return found


def pieces(tensor: TensorProto, folder: Path) -> Iterator[Array]:
    """The FP32 tensor's numbers in order, a bounded number at a time."""
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
    for start in range(0, numbers.size, _PIECE):
        yield np.asarray(numbers[start : start + _PIECE])


def array(tensor: TensorProto, folder: Path) -> Array:
    """All the numbers of a tensor of any type, wherever they lie."""
    return numpy_helper.to_array(tensor, base_dir=str(folder))


def _as(piece: Array, elem: int, limit: float | None) -> bytes:
    kind = np.dtype(helper.tensor_dtype_to_np_dtype(elem))
    if limit is not None:
        piece = np.clip(piece, -limit, limit)
    with np.errstate(over="ignore"):
        return piece.astype(kind).tobytes()


def converted(
    tensor: TensorProto, name: str, elem: int, limit: float | None, folder: Path, later: list[Source]
) -> TensorProto:
    """The FP32 tensor in another type; one that lies outside is put down in `later` and converted by `write`."""
    made = TensorProto(name=name, data_type=elem, dims=tensor.dims, doc_string=tensor.doc_string)
    if tensor.data_location == TensorProto.EXTERNAL:
        made.data_location = TensorProto.EXTERNAL
        made.external_data.add(key="location", value=f"{_MARK}{len(later)}")
        source = TensorProto()
        source.CopyFrom(tensor)
        later.append(Source(source, elem, limit))
    else:
        made.raw_data = b"".join(_as(piece, elem, limit) for piece in pieces(tensor, folder))
    return made


def side_file(target: Path) -> Path:
    """Where the weights of a model too large for one file lie."""
    return target.with_name(f"{target.name}.data")


def write(
    proto: ModelProto,
    target: Path,
    sources: Sequence[Source],
    folder: Path,
    *,
    external: bool,
    prove: Callable[[Path], None],
) -> int:
    """Write the model whole, its weights beside it where they were or where one file would be too large; the bytes.

    `prove` looks at the finished file before it takes its place.
    """
    beside = side_file(target)
    outside = external or sum(_nbytes(tensor) for tensor in walk.tensors(proto)) > _INLINE_UP_TO
    with files.staging_folder(target) as staging:
        draft, weights = staging / target.name, staging / beside.name
        try:
            if outside:
                _write_outside(proto, weights, sources, folder)
            draft.write_bytes(proto.SerializeToString())
            prove(draft)
            total = draft.stat().st_size
            if weights.exists():
                total += weights.stat().st_size
                weights.replace(beside)
            else:
                beside.unlink(missing_ok=True)
            draft.replace(target)
        except OSError as error:
            raise files.explain(error, target) from error
    return total


def _nbytes(tensor: TensorProto) -> int:
    if tensor.data_location == TensorProto.EXTERNAL:
        return int(math.prod(tensor.dims)) * 4
    nbytes: int = len(tensor.raw_data) or tensor.ByteSize()
    return nbytes


def _write_outside(proto: ModelProto, path: Path, sources: Sequence[Source], folder: Path) -> None:
    with path.open("wb") as file:
        for tensor in walk.tensors(proto):
            at = -(-file.tell() // _ALIGNED) * _ALIGNED
            if tensor.data_location == TensorProto.EXTERNAL:
                entries = {item.key: item.value for item in tensor.external_data}
                _skip_to(file, at)
                if entries["location"].startswith(_MARK):
                    source = sources[int(entries["location"][len(_MARK) :])]
                    for piece in pieces(source.tensor, folder):
                        file.write(_as(piece, source.elem, source.limit))
                else:
                    _copy(folder, entries, tensor, file)
            elif len(tensor.raw_data) >= _OUTSIDE_FROM:
                _skip_to(file, at)
                file.write(tensor.raw_data)
                tensor.ClearField("raw_data")
            else:
                continue
            tensor.data_location = TensorProto.EXTERNAL
            del tensor.external_data[:]
            for key, value in (("location", path.name), ("offset", at), ("length", file.tell() - at)):
                tensor.external_data.add(key=key, value=str(value))
        file.flush()
        os.fsync(file.fileno())
    if not path.stat().st_size:
        path.unlink()


def _skip_to(file: Any, at: int) -> None:
    file.write(bytes(at - file.tell()))


def _copy(folder: Path, entries: dict[str, str], tensor: TensorProto, file: Any) -> None:
    left = int(entries.get("length") or 0)
    with contextlib.ExitStack() as stack:
        source = stack.enter_context((folder / entries["location"]).open("rb"))
        source.seek(int(entries.get("offset") or 0))
        if not left:
            left = (folder / entries["location"]).stat().st_size - source.tell()
        while left:
            piece = source.read(min(left, 1 << 24))
            if not piece:
                raise ModelError(
                    f"the external data file `{entries['location']}` ends inside the tensor `{tensor.name}`",
                    hint="copy or download it again, and compare its size",
                )
            file.write(piece)
            left -= len(piece)

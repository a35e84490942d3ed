"""Keeps weights in files while a graph is rewritten: detached from the rewriter, copied in chunks, published by rename.

A weight is detached by making it a graph input, so that nothing folds, fuses or copies it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, external_data_helper, helper, numpy_helper

from trt_engine import atomic_io
from trt_engine.errors import ModelError, TrtEngineError, UsageError
from trt_engine.format import library_reason
from trt_engine.graph import walk
from trt_engine.graph.edit_graph import count_reads, retain_items
from trt_engine.graph.load import open_model, read_proto
from trt_engine.model import Model
from trt_engine.tensors import dtype

MAX_INLINE_NBYTES = 1 << 30
"""Total bytes of weights kept in one file or message: a protobuf ends at 2 GiB."""
_MIN_EXTERNAL_NBYTES = 1024
"""Tensor size in bytes from which it goes to the side file, if there is one."""
_ALIGNMENT = 4096
_CHUNK_NBYTES = 1 << 24
_VALUE_FIELDS = ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def nbytes_of(tensor: TensorProto) -> int:
    """Size of a tensor in bytes by shape and type; its data need not be loaded."""
    if tensor.data_type == TensorProto.STRING:
        return sum(len(item) for item in tensor.string_data)
    try:
        return dtype(tensor.data_type).nbytes(tensor.dims)
    except UsageError:
        return int(tensor.ByteSize())


def total_nbytes(proto: ModelProto) -> int:
    """Bytes of all stored tensors, internal and external."""
    return sum(nbytes_of(tensor) for tensor in walk.tensors(proto))


# ------------------------------------------------------------------------------------------------ detaching


def detach_weights(proto: ModelProto, names: Collection[str]) -> dict[str, TensorProto]:
    """Turn these initializers of the main graph into inputs, in place; returns the tensors for `attach_weights`."""
    graph = proto.graph
    hidden = {item.name: deepcopy(item) for item in reversed(graph.initializer) if item.name in names}
    retain_items(graph.initializer, lambda item: item.name not in names)
    for name, tensor in reversed(hidden.items()):
        graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    return hidden


def attach_weights(proto: ModelProto, detached: dict[str, TensorProto]) -> None:
    """Turn detached tensors that are still used back into initializers, in place."""
    graph = proto.graph
    read = count_reads(proto)
    retain_items(graph.input, lambda item: item.name not in detached)
    graph.initializer.extend(tensor for name, tensor in detached.items() if name in read)


def load_external(proto: ModelProto, folder: Path) -> None:
    """Load every external tensor into the message, in place. The caller has checked the size.

    Raises `ModelError` for a tensor that cannot be read.
    """
    for tensor in walk.tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            try:
                external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            except (OSError, ValueError, onnx.checker.ValidationError) as error:
                reason = library_reason(error)
                raise ModelError(
                    f"the tensor `{tensor.name}` cannot be read: {reason}", hint="copy or download it again"
                ) from error
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]


def fingerprint(tensor: TensorProto, folder: Path) -> str | None:
    """Hash of type, shape and bytes, wherever stored; None for string tensors.

    Raises `ModelError` if its bytes cannot be read.
    """
    if tensor.data_type == TensorProto.STRING:
        return None
    total = hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)}".encode())
    for piece in _read_pieces(tensor, folder):
        total.update(piece)
    return total.hexdigest()


def _read_pieces(tensor: TensorProto, folder: Path) -> Iterator[bytes]:
    """The tensor's bytes, inline or external, in chunks of bounded size."""
    if tensor.data_location != TensorProto.EXTERNAL:
        raw = tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
        yield from (raw[at : at + _CHUNK_NBYTES] for at in range(0, len(raw), _CHUNK_NBYTES))
        return
    entries = {item.key: item.value for item in tensor.external_data}
    left = int(entries.get("length") or 0) or nbytes_of(tensor)
    with (folder / entries["location"]).open("rb") as file:
        file.seek(int(entries.get("offset") or 0))
        while left:
            piece = file.read(min(left, _CHUNK_NBYTES))
            if not piece:
                raise ModelError(
                    f"the external data file `{entries['location']}` ends inside the tensor `{tensor.name}`",
                    hint="copy or download it again, and compare its size",
                )
            yield piece
            left -= len(piece)


# ------------------------------------------------------------------------------------------------ writing


def check_target(out: Path, model: Model) -> Path:
    """Resolved output path of a rewritten model; `UsageError` for a folder or a side file of the model."""
    if out.is_dir():
        raise UsageError(f"`{out}` is a folder, expected a file", hint=f"`-o {out / model.path.name}`")
    if out.resolve() in {item.path.resolve() for item in model.external}:
        raise UsageError(f"`{out}` holds the model's weights", hint="name another `-o`")
    return atomic_io.resolve_link(out)


def free_side_file(target: Path) -> str:
    """Unused name for a side file beside `target`."""
    name, count = f"{target.name}.data", 1
    while os.path.lexists(target.with_name(name)):
        count += 1
        name = f"{target.name}.{count}.data"
    return name


def write_draft(
    proto: ModelProto,
    draft: Path,
    folder: Path,
    weights: str,
    *,
    external: bool,
    encode: Callable[[TensorProto], Iterator[bytes] | None] = lambda _: None,
) -> int:
    """Write the model to `draft` and return its bytes; weights go beside it as `weights` if they are large or `external` is
    set. `folder` contains its external tensors, except those `encode` yields the bytes of. `proto` is changed: its large
    tensors refer to the new file.

    Raises `ModelError` for a tensor that cannot be read.
    """
    beside = draft.with_name(weights)
    if external or total_nbytes(proto) > MAX_INLINE_NBYTES:
        _write_weights(proto, beside, folder, encode)
    else:
        load_external(proto, folder)
    draft.write_bytes(proto.SerializeToString())
    return draft.stat().st_size + (beside.stat().st_size if beside.exists() else 0)


def save_model(
    proto: ModelProto, target: Path, model: Model, *, external: bool, check: Callable[[Path], Any]
) -> tuple[int, Path | None]:
    """Write the model to `target` (staged, checked by `check`, then renamed); returns its bytes and side file.

    The side file gets a new name, so that readers of the previous model never see new weights.
    """
    weights = free_side_file(target)
    with atomic_io.staging_folder(target) as staging, atomic_io.os_errors(target):
        nbytes = write_draft(proto, staging / target.name, model.path.parent, weights, external=external)
        check(staging / target.name)
        return nbytes, _publish(staging, target, weights, model)


def copy_model(model: Model, target: Path) -> tuple[int, Path | None]:
    """Copy the model with its weights to `target`; does nothing if it is already there."""
    if target.resolve() == model.path.resolve():
        return model.nbytes, None
    return save_model(read_proto(model.path), target, model, external=bool(model.external), check=lambda _: None)


def _publish(staging: Path, target: Path, weights: str, model: Model) -> Path | None:
    """Publish the staged files, weights first; deletes replaced side files."""
    old = _replaced_side_files(target, model)
    beside = None
    if (staging / weights).exists():
        beside = target.with_name(weights)
        _publish_new(staging / weights, beside)
    with (staging / target.name).open("rb+") as file:
        os.fsync(file.fileno())
    atomic_io.move_into_place(staging / target.name, target)
    for path in old:
        atomic_io.remove_replaced(path)
    return beside


def _publish_new(made: Path, place: Path) -> None:
    """Move a file to a name that was free; `UsageError` if it was taken meanwhile."""
    try:
        atomic_io.move_into_place(made, place, new=True)
    except FileExistsError as error:
        raise UsageError(
            f"`{place}` was written by another process meanwhile",
            hint="run again when it has finished, or name another `-o`",
        ) from error


def _replaced_side_files(target: Path, model: Model) -> list[Path]:
    """Side files of the model at `target` that carry its name and that `model` does not use."""
    if not target.exists():
        return []
    try:
        before = open_model(target).external
    except TrtEngineError:  # not a model
        return []
    used = set() if target.resolve() == model.path.resolve() else {item.path.resolve() for item in model.external}
    return [
        item.path
        for item in before
        if item.path.parent == target.parent
        and item.location.startswith(f"{target.name}.")
        and item.location.endswith(".data")
        and item.path.resolve() not in used
    ]


def _write_weights(
    proto: ModelProto, path: Path, folder: Path, encode: Callable[[TensorProto], Iterator[bytes] | None]
) -> None:
    with path.open("wb") as file:
        end = 0
        for tensor in walk.tensors(proto):
            pieces = encode(tensor)
            if pieces is None:
                small = nbytes_of(tensor) < _MIN_EXTERNAL_NBYTES or tensor.data_type == TensorProto.STRING
                if small and tensor.data_location != TensorProto.EXTERNAL:
                    continue
                pieces = _read_pieces(tensor, folder)
            start = file.seek(-(-end // _ALIGNMENT) * _ALIGNMENT)
            for piece in pieces:
                _write_sparse(file, piece)
            end = file.tell()
            for field in _VALUE_FIELDS:
                tensor.ClearField(field)
            tensor.data_location = TensorProto.EXTERNAL
            del tensor.external_data[:]
            for key, value in (("location", path.name), ("offset", start), ("length", end - start)):
                tensor.external_data.add(key=key, value=str(value))
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    if not path.stat().st_size:
        path.unlink()


def _write_sparse(into: BinaryIO, piece: bytes) -> None:
    """Write a chunk; zeros are skipped, so that sparse files stay sparse."""
    if np.frombuffer(piece, np.uint8).any():
        into.write(piece)
    else:
        into.seek(len(piece), os.SEEK_CUR)

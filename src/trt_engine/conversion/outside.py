"""Weights that stay in files while a graph is rewritten: hidden from the rewriter, copied piece by piece, sealed by rename.

A weight is hidden by making it an input of the graph: nothing folds, fuses or copies what it cannot see.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, external_data_helper, helper, numpy_helper

from trt_engine import files
from trt_engine.errors import ModelError, TrtEngineError, UsageError
from trt_engine.graph import walk
from trt_engine.graph.load import open_model, read_proto
from trt_engine.model import Model
from trt_engine.tensors import dtype

__all__ = [
    "INLINE_UP_TO", "copy", "draft_of", "fingerprint", "hide", "load", "nbytes_of", "place_for", "save", "show",
    "total_nbytes", "writable",
]  # fmt: skip

log = logging.getLogger(__name__)

INLINE_UP_TO = 1 << 30
"""Bytes of weights up to which one file, and one message in memory, holds them: a protobuf ends at 2 GiB."""
_OUTSIDE_FROM = 1024
"""Bytes of a tensor from which it goes to the side file, where there is one."""
_ALIGNED = 4096
_PIECE = 1 << 24


def nbytes_of(tensor: TensorProto) -> int:
    """Bytes of the tensor's values, by its shape and type: they need not be here."""
    if tensor.data_type == TensorProto.STRING:
        return sum(len(item) for item in tensor.string_data)
    try:
        return dtype(tensor.data_type).nbytes(tensor.dims)
    except UsageError:
        return int(tensor.ByteSize())


def total_nbytes(proto: ModelProto) -> int:
    """Bytes of all stored tensors, inside and outside."""
    return sum(nbytes_of(tensor) for tensor in walk.tensors(proto))


# ------------------------------------------------------------------------------------------------ hiding


def hide(proto: ModelProto, names: Collection[str]) -> dict[str, TensorProto]:
    """These initializers of the main graph as inputs, in place; the tensors, for `show`."""
    hidden: dict[str, TensorProto] = {}
    graph = proto.graph
    for at in reversed(range(len(graph.initializer))):
        tensor = graph.initializer[at]
        if tensor.name in names:
            kept = TensorProto()
            kept.CopyFrom(tensor)
            hidden[tensor.name] = kept
            del graph.initializer[at]
    for name, tensor in reversed(hidden.items()):
        graph.input.append(helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims)))
    return hidden


def show(proto: ModelProto, hidden: dict[str, TensorProto]) -> None:
    """The hidden tensors that are still read, initializers again, in place."""
    graph = proto.graph
    read = {name for place in walk.nodes(proto) for name in place.node.input}
    read.update(item.name for inner in walk.graphs(proto) for item in inner.output)
    for at in reversed(range(len(graph.input))):
        if graph.input[at].name in hidden:
            del graph.input[at]
    graph.initializer.extend(tensor for name, tensor in hidden.items() if name in read)


def load(proto: ModelProto, folder: Path) -> None:
    """Every stored tensor with its values in the message, in place. The caller has seen that they are few enough."""
    for tensor in walk.tensors(proto):
        if tensor.data_location == TensorProto.EXTERNAL:
            try:
                external_data_helper.load_external_data_for_tensor(tensor, str(folder))
            except (OSError, ValueError, onnx.checker.ValidationError) as error:
                raise ModelError(
                    f"the tensor `{tensor.name}` cannot be read: {_line(error)}", hint="copy or download it again"
                ) from error
            tensor.data_location = TensorProto.DEFAULT
            del tensor.external_data[:]


def _line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def fingerprint(tensor: TensorProto, folder: Path) -> str | None:
    """Equal for tensors of the same type, shape and bytes, wherever they lie; None for one that is not compared."""
    total = hashlib.sha256(f"{tensor.data_type} {list(tensor.dims)}".encode())
    if tensor.data_location == TensorProto.EXTERNAL:
        place, offset, length = _range(tensor, folder)
        with place.open("rb") as file:
            file.seek(offset)
            while length > 0 and (piece := file.read(min(length, _PIECE))):
                total.update(piece)
                length -= len(piece)
    elif tensor.HasField("raw_data"):
        total.update(tensor.raw_data)
    elif tensor.data_type == TensorProto.STRING:
        return None
    else:
        total.update(_raw(tensor))
    return total.hexdigest()


def _raw(tensor: TensorProto) -> bytes:
    made: bytes = numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
    return made


def _range(tensor: TensorProto, folder: Path) -> tuple[Path, int, int]:
    entries = {item.key: item.value for item in tensor.external_data}
    return (
        folder / entries["location"],
        int(entries.get("offset") or 0),
        int(entries.get("length") or 0) or nbytes_of(tensor),
    )


# ------------------------------------------------------------------------------------------------ writing


def writable(out: Path, model: Model) -> Path:
    """Where a rewritten model goes; `UsageError` for a folder, or for a side file of the model itself."""
    if out.is_dir():
        raise UsageError(f"`{out}` is a folder, expected a file", hint=f"`-o {out / model.path.name}`")
    if out.resolve() in {item.path.resolve() for item in model.external}:
        raise UsageError(f"`{out}` holds the model's weights", hint="name another `-o`")
    return files.end_of_links(out)


def place_for(target: Path) -> str:
    """The name of a side file beside `target` that nobody has yet."""
    name, count = f"{target.name}.data", 1
    while os.path.lexists(target.with_name(name)):
        count += 1
        name = f"{target.name}.{count}.data"
    return name


def draft_of(proto: ModelProto, draft: Path, folder: Path, weights: str, *, outside: bool) -> int:
    """The model at `draft`, its weights beside it under the name `weights` where they are many or `outside` asks; the
    bytes. `folder` is where its external tensors lie. `proto` is changed: its large tensors point to the new file."""
    if outside or total_nbytes(proto) > INLINE_UP_TO:
        _write_weights(proto, draft.with_name(weights), folder)
    else:
        load(proto, folder)
    draft.write_bytes(proto.SerializeToString())
    beside = draft.with_name(weights)
    return draft.stat().st_size + (beside.stat().st_size if beside.exists() else 0)


def save(
    proto: ModelProto, target: Path, model: Model, *, outside: bool, prove: Callable[[Path], Any]
) -> tuple[int, Path | None]:
    """The model whole at `target`, staged, looked at by `prove`, then renamed; its bytes and its side file.

    The side file has a name of its own, so that a reader of the model before never sees the weights of the new one.
    """
    weights = place_for(target)
    with files.staging_folder(target) as staging:
        try:
            nbytes = draft_of(proto, staging / target.name, model.path.parent, weights, outside=outside)
            prove(staging / target.name)
            return nbytes, _put(staging, target, weights, model)
        except OSError as error:
            raise files.explain(error, target) from error


def copy(model: Model, target: Path) -> tuple[int, Path | None]:
    """The model as it is at `target`, with its weights; nothing happens where it is there already."""
    if target.resolve() == model.path.resolve():
        return model.nbytes, None
    return save(read_proto(model.path), target, model, outside=bool(model.external), prove=lambda _: None)


def _put(staging: Path, target: Path, weights: str, model: Model) -> Path | None:
    """The finished files in their place, weights first; our own weights of the model that stood there go."""
    old = _own_weights(target, model)
    beside = None
    if (staging / weights).exists():
        beside = target.with_name(weights)
        _put_anew(staging / weights, beside)
    with (staging / target.name).open("rb+") as file:
        os.fsync(file.fileno())
    (staging / target.name).replace(target)
    for path in old:
        path.unlink(missing_ok=True)
    return beside


def _put_anew(made: Path, place: Path) -> None:
    """The file at a place that was free when its name was chosen; `UsageError` when somebody took it meanwhile."""
    try:
        os.link(made, place)
    except FileExistsError as error:
        raise UsageError(
            f"`{place}` was written by somebody else meanwhile",
            hint="run it again when they are done, or name another `-o`",
        ) from error
    except OSError:  # a disk without hard links
        made.replace(place)
    else:
        made.unlink()


def _own_weights(target: Path, model: Model) -> list[Path]:
    """Side files of the model at `target` that carry its name and that `model`, unless it is the same, does not read."""
    if not target.exists():
        return []
    try:
        before = open_model(target).external
    except TrtEngineError:  # it was no model
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


def _write_weights(proto: ModelProto, path: Path, folder: Path) -> None:
    with path.open("wb") as file:
        end = 0
        for tensor in walk.tensors(proto):
            start = -(-end // _ALIGNED) * _ALIGNED
            if tensor.data_location == TensorProto.EXTERNAL:
                place, offset, length = _range(tensor, folder)
                file.seek(start)
                _copy_range(place, offset, length, file, tensor.name)
            elif nbytes_of(tensor) >= _OUTSIDE_FROM and tensor.data_type != TensorProto.STRING:
                raw = tensor.raw_data or _raw(tensor)
                for field in ("raw_data", "float_data", "int32_data", "int64_data", "double_data", "uint64_data"):
                    tensor.ClearField(field)
                file.seek(start)
                for at in range(0, len(raw), _PIECE):
                    _put_down(file, raw[at : at + _PIECE])
                length = len(raw)
            else:
                continue
            end = start + length
            tensor.data_location = TensorProto.EXTERNAL
            del tensor.external_data[:]
            for key, value in (("location", path.name), ("offset", start), ("length", length)):
                tensor.external_data.add(key=key, value=str(value))
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    if not path.stat().st_size:
        path.unlink()


def _copy_range(place: Path, offset: int, length: int, into: BinaryIO, name: str) -> None:
    """A bounded number of bytes at a time; pieces of zeros are skipped over, so that a sparse file stays one."""
    with place.open("rb") as source:
        source.seek(offset)
        while length:
            piece = source.read(min(length, _PIECE))
            if not piece:
                raise ModelError(
                    f"the external data file `{place.name}` ends inside the tensor `{name}`",
                    hint="copy or download it again, and compare its size",
                )
            _put_down(into, piece)
            length -= len(piece)


def _put_down(into: BinaryIO, piece: bytes) -> None:
    if np.frombuffer(piece, np.uint8).any():
        into.write(piece)
    else:
        into.seek(len(piece), os.SEEK_CUR)

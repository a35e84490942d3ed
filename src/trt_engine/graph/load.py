"""The one safe door for ONNX files: whole or not at all, and nothing outside the model's folder is read.

Weights in external files are located, sized and digested, never loaded, unless `read_proto(..., weights=True)` asks.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PureWindowsPath

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto

from trt_engine import files
from trt_engine.engine import plan_header
from trt_engine.errors import ModelError, UsageError
from trt_engine.graph import operators, walk
from trt_engine.graph.operators import Beyond, trt_only
from trt_engine.graph.roles import roles
from trt_engine.graph.sound import check_sound
from trt_engine.model import ExternalFile, Model
from trt_engine.tensors import Signature, TensorSpec, dtype

__all__ = [
    "ENGINE_MARK",
    "Beyond",
    "beyond_onnxruntime",
    "check",
    "check_onnxruntime",
    "external_files",
    "legible",
    "open_model",
    "read_proto",
    "signature",
    "trt_only",
]

ENGINE_MARK = "trt_engine.engine"
"""The name of the metadata our ONNX Runtime engines carry: whose work a graph is when its passport is gone."""
_INNER_DOMAINS = ("com.microsoft.nchwc", "com.ms.internal.nhwc")
"""Operators ONNX Runtime puts into a graph as it optimises it; no exporter writes them."""
_LARGEST = (1 << 31) - 1  # protobuf's limit for one message


def open_model(path: Path | str) -> Model:
    """The model at `path`, found whole, with its digest, signature and external files; `ModelError` otherwise."""
    path = Path(path)
    proto = _parse(path)
    with legible(path):
        external = external_files(proto, path)
        return Model(
            path=path,
            digest=_digest(path, external),
            nbytes=path.stat().st_size + sum(item.nbytes for item in external),
            signature=signature(proto, path),
            opsets=walk.opsets_of(proto),
            ir_version=proto.ir_version,
            external=external,
            optimised=_optimised(proto),
        )


def _optimised(proto: ModelProto) -> str | None:
    for item in proto.metadata_props:
        if item.key == ENGINE_MARK:
            return f"its metadata says so: {item.value[:80]}"
    for place in walk.nodes(proto):
        if place.node.domain in _INNER_DOMAINS:
            return f"it has `{place.node.op_type}` of the domain `{place.node.domain}`"
    return None


def read_proto(path: Path | str, *, weights: bool = False) -> ModelProto:
    """The model's graph; with `weights` the external weights too, after the same checks as `open_model`."""
    path = Path(path)
    proto = _parse(path)
    if weights:
        with legible(path):
            external_files(proto, path)
            onnx.load_external_data_for_model(proto, str(path.parent))
    return proto


def check(model: Model | Path | str, proto: ModelProto | None = None) -> None:
    """`ModelError` unless every operator is known and used as its schema says.

    Known are the ONNX standard's operators at the model's opset, ONNX Runtime's own domains, the model's local functions,
    and TensorRT's plugins; whether a backend runs the last ones is the backend's to say (`check_onnxruntime`).
    """
    path = model.path if isinstance(model, Model) else Path(model)
    proto = proto if proto is not None else read_proto(path)
    with legible(path):
        for found in operators.unknown(proto):
            raise found.error(path)
        operators.check_nodes(proto, path)


def check_onnxruntime(model: Model, proto: ModelProto | None = None) -> None:
    """`check`, and `ModelError` with the remedy for what only TensorRT runs or what this ONNX Runtime is too old for."""
    proto = proto if proto is not None else read_proto(model.path)
    with legible(model.path):
        if only := trt_only(proto):
            raise ModelError(
                f"`{model.path}` has operators that only TensorRT runs ({', '.join(f'`{name}`' for name in only)}), "
                "ONNX Runtime does not",
                hint="use a TensorRT backend with the plugin library, or export (quantize) again from the plain model",
            )
        if beyond := beyond_onnxruntime(model):
            raise ModelError(
                f"`{model.path}` is {beyond.describe()}",
                hint="export again with `opset_version=20`, or lower it with `onnx.version_converter`, or upgrade: "
                "`pip install -U onnxruntime`",
            )
    check(model, proto)


def beyond_onnxruntime(model: Model) -> Beyond:
    """What of the model's opset and IR version the installed ONNX Runtime does not take; falsy when it takes all."""
    return operators.beyond_onnxruntime(model.opsets.get(""), model.ir_version)


@contextlib.contextmanager
def legible(path: Path) -> Iterator[None]:
    """Turns what a damaged protobuf does to its readers into a `ModelError`.

    A bit flipped in a name is found when the name is read, one in a count when it is used; the parser lets both pass.
    """
    try:
        yield
    except (UnicodeError, OverflowError, IndexError, KeyError, DecodeError) as error:
        raise ModelError(
            f"`{path}` is damaged: {type(error).__name__} while reading it ({_first_line(error)})",
            hint="copy or download the file again, and compare its size",
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:120]


# ------------------------------------------------------------------------------------------------ the file

_FOREIGN = (  # first bytes, what they are, what to do
    (b"version https://git-lfs", "a Git LFS pointer, not the model", "fetch the file itself: `git lfs pull`"),
    (b"<!DOCTYPE", "a web page, not a model", "download the raw file, not the page that shows it"),
    (b"<html", "a web page, not a model", "download the raw file, not the page that shows it"),
    (b"PK\x03\x04", "a ZIP archive (a PyTorch checkpoint is one)", "export it: `torch.onnx.export(..., dynamo=True)`"),
    (b"\x80\x02", "a Python pickle (an old PyTorch checkpoint)", "export it: `torch.onnx.export(..., dynamo=True)`"),
    (b"\x89HDF", "an HDF5 file (Keras weights)", "convert it to ONNX first (`tf2onnx`)"),
    (b"\x1f\x8b", "a gzip archive", "unpack it: `gunzip`"),
    (b"ORTM", "an ONNX Runtime `.ort` model", "use the `.onnx` file it was made from"),
)


def _parse(path: Path) -> ModelProto:
    """The parsed file, with a graph and operator sets; `ModelError` saying what it is instead."""
    raw = _read(path)
    proto = ModelProto()
    try:
        proto.ParseFromString(raw)
    except DecodeError as error:
        raise _not_onnx(path, raw) from error
    if not proto.HasField("graph"):
        raise _not_onnx(path, raw)
    if not proto.opset_import:
        raise ModelError(
            f"`{path}` has a graph but no operator set (opset_import): it is cut short or was never finished",
            hint="copy or download the file again, and compare its size",
        )
    if not (proto.graph.node or proto.graph.output or proto.graph.input):
        raise ModelError(f"`{path}` has an empty graph", hint="export the model again")
    with legible(path):
        for name in _names(proto):
            if not isinstance(name, str):  # protobuf gives bytes for a string that is no UTF-8
                raise ModelError(
                    f"`{path}` is damaged: the name {name!r} in it is no text",
                    hint="copy or download the file again, and compare its size",
                )
        check_sound(proto, path)
    return proto


def _names(proto: ModelProto) -> Iterator[object]:
    """Every string of the model that something is looked up by or that is shown."""
    yield from (proto.producer_name, proto.producer_version)
    for opset in proto.opset_import:
        yield opset.domain
    for item in proto.metadata_props:
        yield from (item.key, item.value)
    for graph in walk.graphs(proto):
        for value in (*graph.input, *graph.output):
            yield value.name
            for dim in value.type.tensor_type.shape.dim:
                yield dim.dim_param
        for tensor in graph.initializer:
            yield tensor.name
    for tensor in walk.tensors(proto):
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)
    for function in proto.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
        for opset in function.opset_import:
            yield opset.domain
    for place in walk.nodes(proto):
        node = place.node
        yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
        for attribute in node.attribute:
            yield attribute.name


def _read(path: Path) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            inside = sorted(item.name for item in path.glob("*.onnx"))
            raise ModelError(
                f"`{path}` is a folder, expected an `.onnx` file",
                hint=f"name the file: `{path / inside[0]}`" if inside else "name the `.onnx` file itself",
            )
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"`{path}` is no ordinary file", hint="copy the model to a file first")
        if status.st_size == 0:
            raise ModelError(f"`{path}` is empty", hint="copy or download the file again")
        if plan := plan_header(path):
            raise ModelError(
                f"`{path}` is a TensorRT {plan.version} plan (an engine), expected an ONNX model",
                hint=f"`trt-engine inspect {path.with_suffix('.engine')}` after renaming it reads its header; "
                "building starts from the `.onnx` it was made of",
            )
        if status.st_size > _LARGEST:
            raise ModelError(
                f"`{path}` has {status.st_size} bytes, and one ONNX file ends at 2 GiB",
                hint="save the weights beside it: `onnx.save(model, path, save_as_external_data=True)`",
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        near = sorted(item.name for item in path.parent.glob("*.onnx"))[:3] if path.parent.is_dir() else []
        raise ModelError(
            f"no such file `{path}`",
            hint=f"in that folder: {', '.join(near)}" if near else "check the path: `ls -lh` on its folder",
        ) from error
    except NotADirectoryError as error:
        raise ModelError(f"no such file `{path}`", hint="a part of the path is a file, not a folder") from error
    except OSError as error:
        raise files.explain(error, path, "read") from error


def _not_onnx(path: Path, raw: bytes) -> ModelError:
    for magic, what, remedy in _FOREIGN:
        if raw.lstrip()[: len(magic)].lower() == magic.lower():
            return ModelError(f"`{path}` is {what}, expected an ONNX model", hint=remedy)
    if raw[:4] == b"ftrt":
        return ModelError(
            f"`{path}` begins as a TensorRT plan and ends after {len(raw)} bytes, expected an ONNX model",
            hint="give the `.onnx` file the engine was built from",
        )
    if raw[4:8] == b"TFL3":
        return ModelError(f"`{path}` is a TensorFlow Lite model, expected ONNX", hint="convert it first: `tf2onnx`")
    if _is_text(raw[:4096]):
        return ModelError(f"`{path}` is text, expected an ONNX model", hint="give the `.onnx` file itself")
    if raw[:1] == b"\x08":  # field 1, ir_version: it began as a model
        return ModelError(
            f"`{path}` is cut short or damaged: it begins as an ONNX model and cannot be read to its end "
            f"({len(raw)} bytes)",
            hint="copy or download the file again, and compare its size",
        )
    return ModelError(
        f"`{path}` is not an ONNX model: its {len(raw)} bytes are no ONNX protobuf",
        hint="give the `.onnx` file itself, or export the network to ONNX first",
    )


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # not merely a character cut in two
            return False
        text = head[: error.start].decode("utf-8")
    return all(character.isprintable() or character in "\r\n\t\f" for character in text)


def _digest(path: Path, external: Iterable[ExternalFile]) -> str:
    try:
        return files.digest(path, *(item.path for item in external))
    except OSError as error:
        raise files.explain(error, path, "read") from error


# ------------------------------------------------------------------------------------------------ external data


def external_files(proto: ModelProto, path: Path) -> tuple[ExternalFile, ...]:
    """The side files that hold weights, sorted by location; `ModelError` for one that is missing, too short for its
    tensors, or not inside the model's folder."""
    found: dict[str, ExternalFile] = {}
    for tensor in walk.tensors(proto):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {item.key: item.value for item in tensor.external_data}
        location = entries.get("location", "")
        if location not in found:
            found[location] = _side_file(location, tensor.name, path)
        _must_hold(found[location], tensor, entries, path)
    return tuple(found[location] for location in sorted(found))


def _side_file(location: str, tensor: str, path: Path) -> ExternalFile:
    refused = f"`{path}` keeps the tensor `{tensor}` in `{location}`"
    windows = PureWindowsPath(location)
    if not location or "\x00" in location:
        raise ModelError(f"`{path}` keeps the tensor `{tensor}` outside but does not say where", hint="export it again")
    if location.startswith("/") or windows.is_absolute() or windows.drive:
        raise ModelError(
            f"{refused}, an absolute path; expected one inside the model's folder",
            hint="save it again with the weights beside the model (`save_as_external_data=True`)",
        )
    if ".." in windows.parts:
        raise ModelError(
            f"{refused}, which leaves the model's folder",
            hint="copy the weights beside the model and save it again with that location",
        )
    target = path.parent / location
    try:
        inside = target.resolve().is_relative_to(path.parent.resolve())
    except (OSError, RuntimeError) as error:  # a loop of links
        raise ModelError(f"{refused}, which cannot be followed: {error}", hint="copy the file itself there") from error
    if not inside:
        raise ModelError(
            f"{refused}, a link that leads outside the model's folder",
            hint="copy model and weights into one folder with the links followed: `cp -rL`",
        )
    try:
        status = target.stat()
    except FileNotFoundError as error:
        raise ModelError(
            f"`{path}` needs the external data file `{location}`, which is not beside it",
            hint=f"copy `{location}` into `{path.parent}`, or download it as well: the weights are in it",
        ) from error
    except OSError as error:
        raise files.explain(error, target, "read") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{refused}, which is no ordinary file", hint=f"copy the weights to `{location}`")
    return ExternalFile(location, target, status.st_size)


def _must_hold(file: ExternalFile, tensor: TensorProto, entries: dict[str, str], path: Path) -> None:
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or -1)
    except ValueError as error:
        raise ModelError(
            f"`{path}` has no readable place for the tensor `{tensor.name}` in `{file.location}`",
            hint="the file is damaged; copy or download it again",
        ) from error
    needed = _nbytes(tensor, path)
    if offset < 0 or (0 <= length < needed):
        raise ModelError(
            f"`{path}` gives the tensor `{tensor.name}` {length} bytes at {offset} of `{file.location}`, "
            f"and its shape and type need {needed}",
            hint="the file is damaged; copy or download it again",
        )
    end = offset + max(length, needed)
    if end > file.nbytes:
        raise ModelError(
            f"the external data file `{file.location}` is too short: it has {file.nbytes} bytes, and the tensor "
            f"`{tensor.name}` ends at {end}",
            hint=f"copy or download `{file.location}` again, and compare its size",
        )


def _nbytes(tensor: TensorProto, path: Path) -> int:
    if any(size < 0 for size in tensor.dims):
        raise ModelError(f"`{path}` has a tensor `{tensor.name}` with a negative size", hint="export it again")
    try:
        return dtype(tensor.data_type).nbytes(tensor.dims)
    except UsageError as error:
        raise ModelError(
            f"`{path}` has a tensor `{tensor.name}` of the unknown type {tensor.data_type}",
            hint="a newer trt-engine may know it; or the file is damaged",
        ) from error


# ------------------------------------------------------------------------------------------------ the signature


def signature(proto: ModelProto, path: Path | str) -> Signature:
    """The model's inputs (initializers left out) and outputs."""
    graph = proto.graph
    stored = {item.name for item in graph.initializer} | {item.values.name for item in graph.sparse_initializer}
    inputs = [item for item in graph.input if item.name not in stored]
    outputs = list(graph.output)
    if any(not _has_rank(item) for item in outputs):
        outputs = _inferred(proto, outputs)
    if not outputs:
        raise ModelError(f"`{path}` has no outputs", hint="export the model again")
    decided = roles(proto)
    return Signature(
        inputs=tuple(replace(_spec(item, "input", path), role=decided.get(item.name)) for item in inputs),
        outputs=tuple(_spec(item, "output", path) for item in outputs),
    )


def _has_rank(value: ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind not in (None, "tensor_type") or value.type.tensor_type.HasField("shape")


def _inferred(proto: ModelProto, outputs: list[ValueInfoProto]) -> list[ValueInfoProto]:
    """The outputs with the types and shapes ONNX's shape inference finds for those that state none."""
    try:
        found = {item.name: item for item in onnx.shape_inference.infer_shapes(proto, data_prop=True).graph.output}
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, TypeError):
        return outputs
    return [found.get(item.name, item) for item in outputs]


def _spec(value: ValueInfoProto, side: str, path: Path | str) -> TensorSpec:
    kind = value.type.WhichOneof("value")
    if kind is None and side == "output":
        raise ModelError(
            f"`{path}` does not say the type of its output `{value.name}`, and it cannot be inferred",
            hint="export it again, or add the type with `onnx.shape_inference`",
        )
    if kind != "tensor_type":
        word = (kind or "").removesuffix("_type").replace("_", " ") or "untyped"
        raise ModelError(
            f"`{path}` has the {side} `{value.name}` of kind {word}, expected a tensor",
            hint=_OTHER_KINDS.get(word, "export the model with tensors as inputs and outputs"),
        )
    return _tensor_spec(value.name, value.type.tensor_type, side, path)


_OTHER_KINDS = {
    "sequence": "export it with one tensor instead of a list of tensors",
    "map": "export a scikit-learn model with `zipmap=False`",
    "optional": "export it with the input always given",
    "sparse tensor": "export it with a dense input",
}


def _tensor_spec(name: str, tensor: TypeProto.Tensor, side: str, path: Path | str) -> TensorSpec:
    try:
        element = dtype(tensor.elem_type).name
    except UsageError as error:
        raise ModelError(
            f"`{path}` has the {side} `{name}` of the unknown element type {tensor.elem_type}",
            hint="export the model again; a newer trt-engine may know the type",
        ) from error
    if not tensor.HasField("shape"):
        if side == "input":
            raise ModelError(
                f"`{path}` does not say the rank of its input `{name}`",
                hint="export it again with the input's shape (dynamic sizes may stay open)",
            )
        return TensorSpec(
            name, element, (-1,), (None,)
        )  # rank unknown until it has run: one open dimension stands for it
    shape, symbols = [], []
    for dim in tensor.shape.dim:
        fixed = dim.HasField("dim_value") and dim.dim_value >= 0
        shape.append(dim.dim_value if fixed else -1)
        symbols.append(dim.dim_param or None if not fixed else None)
    return TensorSpec(name, element, tuple(shape), tuple(symbols))

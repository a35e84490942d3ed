"""Opens ONNX files safely: complete or not at all, without reading anything outside the model's folder.

External weights are located, sized and hashed, but loaded only by `read_proto(..., weights=True)`.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto

from trt_engine import atomic_io
from trt_engine.errors import ModelError, UsageError
from trt_engine.format import library_reason, quoted
from trt_engine.graph import operators, walk
from trt_engine.graph.input_choices import input_choices
from trt_engine.graph.input_roles import input_layouts, input_roles
from trt_engine.graph.operators import trt_only
from trt_engine.graph.resource_estimate import check_resource_limits, infer_shapes
from trt_engine.graph.shape_inference import Trace, declared_shapes, trace
from trt_engine.graph.structure_check import InvalidModel, check_names, check_part_limits, check_structure
from trt_engine.model import ExternalFile, GraphIndex, Model
from trt_engine.plan_header import NATIVE_PACKAGE, NATIVE_PACKAGE_HINT, plan_product, read_plan_header
from trt_engine.tensors import Shape, Signature, TensorSpec, dimension_symbol, dtype

ENGINE_MAGIC = "trt_engine.engine"
"""Metadata key of ONNX Runtime engines built here: identifies a graph that lost its passport."""
_INNER_DOMAINS = ("com.microsoft.nchwc", "com.ms.internal.nhwc")
"""Domains of operators that ONNX Runtime's optimiser inserts; no exporter writes them."""
_MAX_MESSAGE_NBYTES = (1 << 31) - 1  # protobuf's limit for one message
_MAX_SINGLE_READ_NBYTES = 64 << 20
"""File size in bytes up to which the whole file is read before parsing."""
_OUTER_FIELDS = 100_000
"""Fields of a file that are looked at."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model and the trace of its size estimate."""

    model: Model
    trace: Trace

    def trace_at(self, shapes: Mapping[str, Shape]) -> Trace:
        """The trace at these shapes of all inputs; reused if they are the declared ones."""
        stated = declared_shapes(self.model.proto)
        same = all(shapes.get(spec.name) == stated.get(spec.name) for spec in self.model.signature.inputs)
        return self.trace if same else trace(self.model.proto, shapes)


def open_model(path: Path | str) -> Model:
    """The complete model at `path` with its digest, signature and external files; `ModelError` otherwise."""
    return _open(Path(path))[0]


def open_graph(path: Path | str) -> OpenedModel:
    """`open_model` with the trace of its size estimate."""
    return OpenedModel(*_open(Path(path)))


def _open(path: Path) -> tuple[Model, Trace]:
    with parse_errors(path):
        raw = _read_file(path)
        graph = _parse(raw)
        external = external_files(graph.tensors, path)
        nbytes = len(raw) + sum(item.nbytes for item in external)
        traced = trace(graph.proto, declared_shapes(graph.proto))
        check_resource_limits(graph, traced, nbytes)
        with atomic_io.os_errors(path, "read"):
            digest = atomic_io.file_digest(*(item.path for item in external), before=raw)
        model = Model(
            path=path,
            digest=digest,
            nbytes=nbytes,
            graph=graph,
            opsets=graph.opsets,
            ir_version=graph.proto.ir_version,
            external=external,
            optimised=_optimised_by(graph),
            signature=_read_signature(graph, traced),
        )
        return model, traced


def _optimised_by(graph: GraphIndex) -> str | None:
    for item in graph.proto.metadata_props:
        if item.key == ENGINE_MAGIC:
            return f"by its metadata: {item.value[:80]}"
    for node, *_ in graph.nodes:
        if node.domain in _INNER_DOMAINS:
            return f"it has `{node.op_type}` of the domain `{node.domain}`"
    return None


def read_proto(path: Path | str, *, weights: bool = False) -> ModelProto:
    """The model's graph, and with `weights` its external weights, after the checks of `open_model`.

    Raises `ModelError` for a file that is missing, damaged or refused.
    """
    path, graph = Path(path), read_graph(path)
    if weights:
        with parse_errors(path):
            external_files(graph.tensors, path)
            onnx.load_external_data_for_model(graph.proto, str(path.parent))
    return graph.proto


def read_graph(path: Path | str) -> GraphIndex:
    """The model's graph, after the checks of `open_model` that need no side file.

    Raises `ModelError` for a file that is missing, damaged or refused.
    """
    path = Path(path)
    with parse_errors(path):
        return _parse(_read_file(path))


def check_operators(graph: GraphIndex, path: Path) -> None:
    """`ModelError` unless every operator is known and valid by its schema.

    Known operators: the ONNX standard at the model's opset, ONNX Runtime's own domains, local functions, and TensorRT's
    plugins. Whether a backend runs the plugins is checked by `check_onnxruntime`.
    """
    with parse_errors(path):
        operators.require_valid_operators(graph)


def check_onnxruntime(model: Model) -> None:
    """`check_operators`, plus `ModelError` with a remedy for TensorRT-only operators and for versions too new for ONNX
    Runtime."""
    with parse_errors(model.path):
        if only := trt_only(model.graph):
            raise ModelError(
                f"`{model.path}` has operators that only TensorRT runs ({', '.join(f'`{name}`' for name in only)}), "
                "ONNX Runtime does not",
                hint="use a TensorRT backend with the plugin library, or export (quantize) again from the plain model",
            )
        if beyond := operators.onnxruntime_version_gap(model.opsets.get(""), model.ir_version):
            raise ModelError(
                f"`{model.path}` is {beyond.describe()}",
                hint="export again with `opset_version=20`, or lower it with `onnx.version_converter`, or upgrade: "
                "`pip install -U onnxruntime`",
            )
        operators.require_valid_operators(model.graph)


@contextlib.contextmanager
def parse_errors(path: Path) -> Iterator[None]:
    """Convert what is wrong with the model, and exceptions caused by a damaged protobuf, to `ModelError` with its name.

    The parser accepts flipped bits in names and counts; they fail when read.
    """
    try:
        yield
    except InvalidModel as error:
        raise ModelError(f"`{path}` {error.message}", hint=error.hint) from error
    except (UnicodeError, OverflowError, IndexError, KeyError, DecodeError) as error:
        raise ModelError(
            f"`{path}` is damaged: {type(error).__name__} while reading it ({library_reason(error)})",
            hint="copy or download the file again, and compare its size",
        ) from error


# ------------------------------------------------------------------------------------------------ the file

_EXPORT = "export it: `torch.onnx.export(..., dynamo=True)`"
_FOREIGN = (  # first bytes, format, remedy
    (rb"PK\x03\x04", "a ZIP archive (a PyTorch checkpoint is one)", _EXPORT),
    (rb"\x80[\x02-\x05]", "a Python pickle (an old PyTorch checkpoint)", _EXPORT),
    (rb"\x89HDF", "an HDF5 file (Keras weights)", "convert it to ONNX first (`tf2onnx`)"),
    (rb"(.{4})?ORTM", "an ONNX Runtime `.ort` model", "use the `.onnx` file it was made from"),
    (rb".{4}TFL3", "a TensorFlow Lite model", "convert it first: `trt-engine convert`"),
    (rb".{8}\{", "a safetensors file: weights without a network", "export the network with them to ONNX"),
    (rb"GGUF", "a GGUF file: weights for llama.cpp", "export the network that they belong to to ONNX"),
    (rb"RKNN", "a model for Rockchip's NPU", "use the `.onnx` file it was made from"),
    (rb"TRT-\d+-\w*Calibration", "a calibration cache of TensorRT", "name the model that it is of"),
    (rb"\s*(<\?xml[^>]*>\s*)?<net\b", "an OpenVINO model", "use the `.onnx` file it was made from"),
    (rb"\x89PNG|\xff\xd8\xff", "an image", "name the model"),
)


def foreign_format(head: bytes) -> tuple[str, str] | None:
    """The format of another tool, or the failed download, that a file with these first bytes is, and the remedy; None for
    an unknown one."""
    if (other := atomic_io.failed_download(head)) is not None:
        return other
    return next(((what, remedy) for magic, what, remedy in _FOREIGN if re.match(magic, head, re.DOTALL)), None)


def _parse(raw: bytes) -> GraphIndex:
    """The parsed file with a graph and opset imports; `InvalidModel` identifying another format."""
    proto = ModelProto()
    try:
        proto.ParseFromString(raw)
    except DecodeError as error:
        raise _other_format_error(raw) from error
    if not proto.HasField("graph"):
        raise _other_format_error(raw)
    if not proto.opset_import:
        raise InvalidModel(
            "has a graph but no operator set (opset_import): it is truncated",
            hint="copy or download the file again, and compare its size",
        )
    if not (proto.graph.node or proto.graph.output or proto.graph.input):
        raise InvalidModel("has an empty graph", hint="export the model again")
    check_part_limits(proto)
    if b"ai.onnx" in raw:
        # the default domain's other name, which ONNX's checker lacks
        for node in walk.all_nodes(proto):
            node.domain = walk.domain_of(node)
    graph = walk.index_of(proto)
    check_names(graph)
    check_structure(graph)
    return graph


def _read_file(path: Path) -> bytes:
    """The bytes of the file, read once; `ModelError` unless it is an ordinary file of at most 2 GiB."""
    try:
        if path.is_dir():
            inside = sorted(item.name for item in path.glob("*.onnx"))
            raise ModelError(
                f"`{path}` is a folder, expected an `.onnx` file",
                hint=f"name the file: `{path / inside[0]}`" if inside else "name the `.onnx` file itself",
            )
        with atomic_io.open_regular(path, error=ModelError) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelError(f"`{path}` is empty", hint="copy or download the file again")
            plan = read_plan_header(file)
            file.seek(0)
            if plan is not None:
                named = path.suffix.lower() == ".onnx"
                reader = f"`trt-engine inspect {quoted(path.with_suffix('.engine') if named else path)}`"
                raise ModelError(
                    f"`{path}` is a {plan.title} (an engine), expected an ONNX model",
                    hint=f"{reader}{' after renaming it' if named else ''} reads its header; "
                    "building starts from the `.onnx` it was made of",
                )
            if size > _MAX_MESSAGE_NBYTES:
                raise ModelError(
                    f"`{path}` has {size} bytes, and one ONNX file ends at 2 GiB",
                    hint="save the weights beside it: `onnx.save(model, path, save_as_external_data=True)`",
                )
            if size > _MAX_SINGLE_READ_NBYTES and protobuf_fields(file, size) is None:
                raise _other_format_error(file.read(4096), size)
            return file.read(size)
    except FileNotFoundError as error:
        near = sorted(item.name for item in path.parent.glob("*.onnx"))[:3] if path.parent.is_dir() else []
        raise ModelError(
            f"no such file `{path}`",
            hint=f"in that folder: {', '.join(near)}" if near else "check the path: `ls -lh` on its folder",
        ) from error
    except NotADirectoryError as error:
        raise ModelError(f"no such file `{path}`", hint="a part of the path is a file, not a folder") from error
    except OSError as error:
        raise atomic_io.os_error(error, path, "read") from error


def protobuf_fields(file: BinaryIO, size: int) -> set[tuple[int, int]] | None:
    """Numbers and wire types of the top-level fields of a file of this size, reading a few bytes of each; None if it is not
    a protobuf. Rewinds the file."""
    found: set[tuple[int, int]] = set()
    at = 0
    for _ in range(_OUTER_FIELDS):
        if at >= size:
            break
        file.seek(at)
        head = file.read(20)
        tag, used = _varint(head)
        if tag is None or not tag >> 3:
            return None
        found.add((tag >> 3, tag & 7))
        length, more = _varint(head[used:]) if tag & 7 in (0, 2) else ({1: 8, 5: 4}.get(tag & 7), 0)
        if length is None:
            return None
        at += used + more + (0 if tag & 7 == 0 else length)
    file.seek(0)
    return found if at <= size else None


def _varint(raw: bytes) -> tuple[int | None, int]:
    """A protobuf varint and its bytes; None if it does not end."""
    value = 0
    for at, byte in enumerate(raw[:10]):
        value |= (byte & 127) << 7 * at
        if byte < 128:
            return value, at + 1
    return None, 0


def _other_format_error(raw: bytes, size: int | None = None) -> InvalidModel:
    size = len(raw) if size is None else size
    if raw[:4] == b"PK\x03\x04" and b"/data/aotinductor/" in raw[:1024]:
        return InvalidModel(f"is {NATIVE_PACKAGE}", hint=NATIVE_PACKAGE_HINT)
    if (other := foreign_format(raw[:128])) is not None:
        return InvalidModel(f"is {other[0]}, expected an ONNX model", hint=other[1])
    if product := plan_product(raw):
        return InvalidModel(
            f"begins as a plan of {product} and ends after {len(raw)} bytes, expected an ONNX model",
            hint="give the `.onnx` file the engine was built from",
        )
    if _is_text(raw[:4096]):
        return InvalidModel("is text, expected an ONNX model", hint="give the `.onnx` file itself")
    if raw[:1] == b"\x08":  # field 1, ir_version: a truncated model
        return InvalidModel(
            f"is truncated or damaged: it begins as an ONNX model and cannot be read to its end ({size} bytes)",
            hint="copy or download the file again, and compare its size",
        )
    return InvalidModel(
        f"is not an ONNX model: its {size} bytes are not an ONNX protobuf",
        hint="give the `.onnx` file itself, or export the network to ONNX first",
    )


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # more than a truncated UTF-8 character
            return False
        text = head[: error.start].decode("utf-8")
    return all(character.isprintable() or character in "\r\n\t\f" for character in text)


# ------------------------------------------------------------------------------------------------ external data


def external_files(tensors: Iterable[TensorProto], path: Path) -> tuple[ExternalFile, ...]:
    """Side files with the tensors of the model at `path`, sorted by location; `ModelError` for a file that is missing, too
    short, or outside the model's folder."""
    found: dict[str, ExternalFile] = {}
    for tensor in tensors:
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        entries = {item.key: item.value for item in tensor.external_data}
        if len(entries) != len(tensor.external_data):
            raise ModelError(f"`{path}` locates the tensor `{tensor.name}` twice", hint="export it again")
        location = entries.get("location", "")
        if location not in found:
            found[location] = _side_file(location, tensor.name, path)
        _check_byte_range(found[location], tensor, entries, path)
    return tuple(found[location] for location in sorted(found))


def _side_file(location: str, tensor: str, path: Path) -> ExternalFile:
    refused = f"`{path}` keeps the tensor `{tensor}` in `{location}`"
    windows = PureWindowsPath(location)
    if not location or "\x00" in location:
        raise ModelError(f"`{path}` has the external tensor `{tensor}` without a location", hint="export it again")
    if location.startswith("/") or windows.is_absolute() or windows.drive or ".." in windows.parts:
        raise ModelError(
            f"{refused}, which leaves the model's folder",
            hint="save it again with the weights beside the model (`save_as_external_data=True`)",
        )
    target = path.parent / location
    try:
        inside = target.resolve().is_relative_to(path.parent.resolve())
    except (OSError, RuntimeError) as error:  # a symlink loop
        raise ModelError(f"{refused}, which cannot be followed: {error}", hint="copy the file itself there") from error
    if not inside:
        raise ModelError(
            f"{refused}, a link that leads outside the model's folder",
            hint="copy model and weights into one folder with the links followed: `cp -rL`",
        )
    try:
        with atomic_io.open_regular(target, error=ModelError) as file:
            return ExternalFile(location, target, os.fstat(file.fileno()).st_size)
    except FileNotFoundError as error:
        raise ModelError(
            f"`{path}` needs the external data file `{location}`, which is not beside it",
            hint=f"copy `{location}` into `{path.parent}`, or download it as well: the weights are in it",
        ) from error
    except OSError as error:
        raise atomic_io.os_error(error, target, "read") from error


def _check_byte_range(file: ExternalFile, tensor: TensorProto, entries: dict[str, str], path: Path) -> None:
    try:
        offset, length = int(entries.get("offset") or 0), int(entries.get("length") or -1)
    except ValueError as error:
        raise ModelError(
            f"`{path}` has no valid location for the tensor `{tensor.name}` in `{file.location}`",
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


def _read_signature(graph: GraphIndex, traced: Trace) -> Signature:
    """The model's inputs (initializers excluded) and outputs."""
    main = graph.graphs[0]
    stored = {item.name for item in main.initializer} | {item.values.name for item in main.sparse_initializer}
    inputs = [item for item in main.input if item.name not in stored]
    outputs = _infer_outputs(graph.proto, list(main.output), traced)
    if not outputs:
        raise InvalidModel("has no outputs", hint="export the model again")
    decided = input_roles(graph)
    specs = [replace(_value_spec(item, "input"), role=decided.get(item.name)) for item in inputs]
    choices, layouts = input_choices(specs, traced), input_layouts(specs, traced)
    return Signature(
        inputs=tuple(
            replace(spec, choices=choices.get(spec.name, ()), layout=layouts.get(spec.name)) for spec in specs
        ),
        outputs=tuple(_value_spec(item, "output") for item in outputs),
    )


def _has_rank(value: ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind not in (None, "tensor_type") or len(value.type.tensor_type.shape.dim) > 0


def _infer_outputs(proto: ModelProto, outputs: list[ValueInfoProto], traced: Trace) -> list[ValueInfoProto]:
    """The outputs, with types and shapes from ONNX's shape inference where none are declared."""
    unknown = [item for item in outputs if not _has_rank(item)]
    scalars = [item.type.tensor_type for item in unknown if item.type.tensor_type.HasField("shape")]
    for tensor in scalars:
        tensor.ClearField("shape")
    try:
        found = {item.name: item for item in infer_shapes(proto, traced).graph.output} if unknown else {}
    except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, RuntimeError, ValueError, TypeError):
        return outputs
    finally:
        for tensor in scalars:
            tensor.shape.SetInParent()
    return [found.get(item.name, item) for item in outputs]


def _value_spec(value: ValueInfoProto, side: str) -> TensorSpec:
    kind = value.type.WhichOneof("value")
    if kind is None and side == "output":
        raise InvalidModel(
            f"does not declare the type of its output `{value.name}`, and it cannot be inferred",
            hint="export it again, or add the type with `onnx.shape_inference`",
        )
    if kind != "tensor_type":
        word = (kind or "").removesuffix("_type").replace("_", " ") or "untyped"
        raise InvalidModel(
            f"has the {side} `{value.name}` of kind {word}, expected a tensor",
            hint=_OTHER_KINDS.get(word, "export the model with tensors as inputs and outputs"),
        )
    return _tensor_spec(value.name, value.type.tensor_type, side)


_OTHER_KINDS = {
    "sequence": "export it with one tensor instead of a list of tensors (scikit-learn: `options={'zipmap': False}`, or the "
    "input of ZipMap as the output)",
    "map": "export a scikit-learn model with `options={'zipmap': False}`",
    "optional": "export it with the input always given",
    "sparse tensor": "export it with a dense input",
}


def _tensor_spec(name: str, tensor: TypeProto.Tensor, side: str) -> TensorSpec:
    try:
        element = dtype(tensor.elem_type).name
    except UsageError as error:
        raise InvalidModel(
            f"has the {side} `{name}` of the unknown element type {tensor.elem_type}",
            hint="export the model again; a newer trt-engine may know the type",
        ) from error
    if not tensor.HasField("shape"):
        if side == "input":
            raise InvalidModel(
                f"does not declare the rank of its input `{name}`",
                hint="export it again with the input's shape (dynamic sizes may stay open)",
            )
        return TensorSpec(name, element, (-1,), (None,))  # rank unknown before a run: use one dynamic dimension
    shape, symbols = [], []
    for dim in tensor.shape.dim:
        fixed = dim.HasField("dim_value") and dim.dim_value >= 0
        shape.append(dim.dim_value if fixed else -1)
        symbols.append(None if fixed else dimension_symbol(dim.dim_param))
    return TensorSpec(name, element, tuple(shape), tuple(symbols))

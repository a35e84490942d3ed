"""Inference over HTTP: JSON with tensors in it, or after it as bytes (the binary tensor extension)."""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any

import msgspec

from trt_engine.arrayfiles import Array
from trt_engine.errors import FeedError, UsageError
from trt_engine.open_inference.wire_tensors import (
    NUMPY_DTYPES,
    PART,
    decode_tensor,
    encode_tensor,
    flatten,
    from_values,
    to_values,
)
from trt_engine.tensors import Shape
from trt_engine.verbs.serve.inference import (
    BinaryHead,
    InferRequest,
    RequestedOutput,
    Service,
    check_input,
    distinct,
    presented,
    region_of,
    requested_output,
    take_options,
)
from trt_engine.verbs.serve.served_model import ServedVersion

Size = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Scalar = bool | Size | float | str | None


class _Input(msgspec.Struct, gc=False):  # half a million of them fit into a request
    name: str
    shape: tuple[Size, ...]
    datatype: str
    parameters: dict[str, Scalar] | None = None
    data: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct, gc=False):
    name: str
    parameters: dict[str, Scalar] | None = None


class _Request(msgspec.Struct):
    inputs: list[_Input]
    id: str = ""
    parameters: dict[str, Scalar] | None = None
    outputs: list[_Output] | None = None


_decode = msgspec.json.Decoder(_Request).decode
encode_document = msgspec.json.Encoder().encode
_MAX_HEAD, _MAX_HEADS = 4096, 256
"""Bytes and number of the JSON parts of binary requests that are kept decoded, for each version."""
_ELEMENTS: dict[str, Any] = {"BOOL": bool, "BYTES": str} | {
    name: float | None if dtype.kind == "f" else int for name, dtype in NUMPY_DTYPES.items() if name != "BOOL"
}


@functools.lru_cache(maxsize=1024)
def _list_decoder(element: Any, depth: int) -> msgspec.json.Decoder[Any]:
    """A decoder of lists nested `depth` deep."""
    return msgspec.json.Decoder(functools.reduce(lambda inner, _: list[inner], range(depth), element))  # type: ignore[valid-type]


def decode_json(raw: Any, decode: Any = msgspec.json.decode) -> Any:
    """The JSON document; `UsageError` for anything else."""
    try:
        return decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"the request is not valid: {error}", hint="JSON as the Open Inference Protocol has it"
        ) from None


def decode_infer(service: Service, served: ServedVersion, body: memoryview, header: int | None) -> InferRequest:
    """The request in this body, whose JSON takes `header` bytes; None: all of it, 0: nothing, the tensor alone."""
    if header == 0:
        return _decode_raw(served, body)
    length = len(body) if header is None else header
    raw = bytes(body[:length]) if length <= _MAX_HEAD else b""
    if (head := served.heads.get(raw)) is not None:
        return _decode_known(head, body, length)
    parsed: _Request = decode_json(body[:length], _decode)
    request = InferRequest(parsed.id)
    binary, inputs = False, list[tuple[str, str, Shape, int]]()
    if parsed.parameters:
        take_options(request, parsed.parameters)
        binary = bool(parsed.parameters.get("binary_data_output"))
    position = length
    for item in parsed.inputs:
        parameters = item.parameters or {}
        shape = check_input(served, item.name, item.datatype, item.shape, request.feeds)
        size = parameters.get("binary_data_size")
        if (part := region_of(parameters)) is not None:
            request.feeds[item.name] = service.check_region(served, item.name, item.datatype, shape, part)
            continue
        if size is not None:
            if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(body) - position:
                raise FeedError(
                    f"input `{item.name}` has {size!r:.40} bytes, {len(body) - position} are there",
                    hint="`binary_data_size` in the order of the inputs",
                )
            data = body[position : position + size]
            position += size
            inputs.append((item.name, item.datatype, shape, size))
        elif len(bytes(item.data)):
            request.feeds[item.name] = _decode_values(item, item.shape).reshape(shape)
            continue
        else:
            raise FeedError(f"input `{item.name}` has no data", hint="`data`, or `binary_data_size`")
        request.feeds[item.name] = decode_tensor(item.name, item.datatype, shape, data)
    if position != len(body):
        raise FeedError(f"{len(body) - position} bytes follow the last input", hint="`binary_data_size` of each input")
    if parsed.outputs:
        request.outputs = distinct(
            requested_output(served, item.name, item.parameters, binary) for item in parsed.outputs
        )
    else:
        request.outputs = tuple(RequestedOutput(name, binary) for name in served.outputs)
    plain = all(
        output.binary and not output.classes and output.region is None and served.outputs[output.name] != "BYTES"
        for output in request.outputs
    )
    if raw and plain and len(inputs) == len(parsed.inputs):
        if len(served.heads) >= _MAX_HEADS:  # clients that number their requests
            served.heads.clear()
        request.head = served.heads[raw] = BinaryHead(
            request.id, request.priority, request.timeout_us, tuple(inputs), request.outputs
        )
    return request


def _decode_known(head: BinaryHead, body: memoryview, position: int) -> InferRequest:
    """A request with a JSON that was decoded before; its tensors begin at `position`."""
    feeds = {}
    for name, datatype, shape, size in head.inputs:
        feeds[name] = decode_tensor(name, datatype, shape, body[position : position + size])
        position += size
    if position != len(body):
        raise FeedError(f"{len(body) - position} bytes follow the last input", hint="`binary_data_size` of each input")
    return InferRequest(head.id, feeds, head.outputs, head.priority, head.timeout_us, head)


def _decode_raw(served: ServedVersion, body: memoryview) -> InferRequest:
    """The request whose body is the one input's bytes; its dynamic size follows from their number."""
    if len(served.inputs) != 1:
        raise UsageError(f"the model has {len(served.inputs)} inputs, a raw body is one", hint="JSON, then the tensors")
    ((name, (spec, datatype)),) = served.inputs.items()
    dynamic = spec.dynamic
    if len(dynamic) > 1 or datatype == "BYTES":
        raise UsageError(f"the shape of `{name}` does not follow from its size: {spec}", hint="JSON, then the tensors")
    known = functools.reduce(operator.mul, (size for size in spec.shape if size >= 0), NUMPY_DTYPES[datatype].itemsize)
    shape = tuple(len(body) // max(known, 1) if size < 0 else size for size in spec.shape)
    array = decode_tensor(name, datatype, shape, body)
    return InferRequest("", {name: array}, tuple(RequestedOutput(name) for name in served.outputs))


def _decode_values(item: _Input, shape: tuple[int, ...]) -> Array:
    if item.datatype in ("FP16", "BF16"):
        raise FeedError(f"input `{item.name}` is {item.datatype}, which has no JSON form", hint="as binary data")
    raw, depth = bytes(item.data), max(len(shape), 1)
    element = _ELEMENTS[item.datatype]
    nested = depth > 1 and raw.lstrip()[1:].lstrip()[:1] == b"["
    values = decode_json(raw, _list_decoder(element, depth if nested else 1).decode)
    if nested and not _is_regular(values, shape):
        raise FeedError(
            f"`data` of input `{item.name}` is nested differently from its shape", hint=f"{[*shape]}, or flat"
        )
    return from_values(item.name, item.datatype, shape, [*flatten(values, depth if nested else 1)])


def _is_regular(values: list[Any], shape: tuple[int, ...]) -> bool:
    """Whether lists are nested as the shape has it."""
    for size in shape[:-1]:
        if any(len(row) != shape[1] for row in values) or size < 0:
            return False
        values, shape = [item for row in values for item in row], shape[1:]
    return True


def encode_infer(
    service: Service, served: ServedVersion, request: InferRequest, outputs: dict[str, Any]
) -> tuple[bytes, list[memoryview | bytes]]:
    """The JSON of a response, and the tensors that follow it."""
    described, buffers = list[dict[str, Any]](), list[memoryview | bytes]()
    head, shapes = request.head, ()
    if head is not None:
        shapes = tuple([outputs[output.name].shape for output in head.outputs])
        if (document := head.documents.get(shapes)) is not None:
            return document, [
                encode_tensor(outputs[output.name], served.outputs[output.name]) for output in head.outputs
            ]
    for output in request.outputs:
        array, datatype = presented(served, output, outputs[output.name])
        item: dict[str, Any] = {"name": output.name, "datatype": datatype, "shape": array.shape}
        if output.region is not None:
            data = encode_tensor(array, datatype)
            region = output.region
            service.write_region(region, data)
            item["parameters"] = {
                "shared_memory_region": region.name,
                "shared_memory_byte_size": len(data),
                "shared_memory_offset": region.offset,
            }
        elif output.binary:
            buffers.append(encode_tensor(array, datatype))
            item["parameters"] = {"binary_data_size": len(buffers[-1])}
        else:
            parts = to_values(output.name, array, datatype)
            if array.size <= PART:
                item["data"] = next(parts, [])
            else:
                item["data"] = msgspec.Raw(b"[%s]" % b",".join([encode_document(part)[1:-1] for part in parts]))
        described.append(item)
    answer: dict[str, Any] = {"model_name": served.name, "model_version": served.version, "outputs": described}
    if request.id:
        answer["id"] = request.id
    document = encode_document(answer)
    if head is not None and len(head.documents) < _MAX_HEADS:
        head.documents[shapes] = document
    return document, buffers

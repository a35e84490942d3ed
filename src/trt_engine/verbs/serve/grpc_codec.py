"""Inference over gRPC: tensors as raw bytes or as typed contents."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from trt_engine.arrayfiles import Array
from trt_engine.errors import FeedError, UsageError
from trt_engine.open_inference.messages import message
from trt_engine.open_inference.wire_tensors import decode_tensor, encode_tensor, from_values
from trt_engine.verbs.serve.inference import (
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

_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""The field of typed contents by datatype; FP16 and BF16 are sent as raw bytes alone."""
_Request, _Response = message("ModelInferRequest"), message("ModelInferResponse")
_RAW_CONTENTS = 7 << 3 | 2
"""The tag of `raw_input_contents`, of which each tensor is one field."""
_RAW_OUTPUTS, _INFER_RESPONSE = 6 << 3 | 2, 2 << 3 | 2
_SMALL = 1 << 14
_MAX_FIELDS = 1 << 14
"""Fields of a request: an empty input is two bytes on the wire and a hundred in memory."""


@dataclass(slots=True)
class WireRequest:
    """A `ModelInferRequest` as it came: of one larger than 16 KiB the tensors are views of it, and no copies."""

    message: Any
    """The message; a large one without `raw_input_contents`."""
    contents: list[Any]
    """`raw_input_contents`, as bytes or views."""
    nbytes: int
    counted: bool = False
    """Whether its bytes count already: it came compressed."""


def parse_infer(raw: bytes | bytearray, most: int = sys.maxsize) -> WireRequest:
    """The request of these bytes; `UsageError` for bytes that are not one, or one of too many fields.

    Beside `raw_input_contents` it has at most `most` bytes: eight times as much is needed to read typed contents.
    """
    if len(raw) <= _SMALL:
        parsed = _parse(bytes(raw))
        return WireRequest(parsed, [*parsed.raw_input_contents], len(raw))
    view, contents, rest = memoryview(raw), list[memoryview](), list[memoryview]()
    start = position = fields = 0
    while position < len(raw):
        fields += 1
        if fields > _MAX_FIELDS:
            raise UsageError(f"the request has more than {_MAX_FIELDS} inputs, outputs and parameters")
        before = position
        tag, position = _varint(raw, position)
        kind = tag & 7
        if kind == 2:
            size, position = _varint(raw, position)
            if tag == _RAW_CONTENTS:
                rest.append(view[start:before])
                contents.append(view[position : position + size])
                start = position + size
            position += size
        elif kind == 0:
            _, position = _varint(raw, position)
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
        else:
            position = len(raw) + 1
    if position > len(raw):
        raise UsageError("the request is not a `ModelInferRequest`: it ends inside a field")
    rest.append(view[start:])
    if (size := sum(map(len, rest))) > most:
        raise UsageError(
            f"the request has {size} bytes beside `raw_input_contents`, {most} are allowed",
            hint="send tensors as `raw_input_contents`; `--max-json` sets the limit",
        )
    return WireRequest(_parse(b"".join(rest)), contents, len(raw))


def _parse(raw: bytes) -> Any:
    try:
        return _Request.FromString(raw)
    except DecodeError as error:
        raise UsageError(f"the request is not a `ModelInferRequest`: {error}") from None


def _varint(raw: bytes | bytearray, position: int) -> tuple[int, int]:
    """The number at this position, and where it ends; behind the end of the bytes where it has none."""
    value = 0
    for shift, byte in enumerate(raw[position : position + 10]):
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value, position + shift + 1
    return 0, len(raw) + 1


def read_model_name(raw: bytes) -> tuple[str, str]:
    """Model and version that the first bytes of a request name; empty where they name none."""
    found, position = ["", ""], 0
    for index, tag in enumerate((1 << 3 | 2, 2 << 3 | 2)):
        if raw[position : position + 1] == bytes([tag]):
            size, position = _varint(raw, position + 1)
            found[index] = raw[position : position + size].decode("utf-8", "replace")
            position += size
    return found[0], found[1]


def read_parameters(parameters: Any) -> dict[str, Any]:
    """The values of a parameter map."""
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param") for key, value in parameters.items()
    }


def decode_infer(service: Service, served: ServedVersion, wire: WireRequest) -> InferRequest:
    """The request in a `ModelInferRequest`; its tensors keep the memory of `wire`."""
    message, raw = wire.message, wire.contents
    request = InferRequest(message.id)
    if message.parameters:
        take_options(request, read_parameters(message.parameters))
    position = 0
    for item in message.inputs:
        shape = check_input(served, item.name, item.datatype, tuple(item.shape), request.feeds)
        part = region_of(read_parameters(item.parameters)) if item.parameters else None
        if part is not None:
            request.feeds[item.name] = service.check_region(served, item.name, item.datatype, shape, part)
            continue
        if raw:
            if item.HasField("contents"):
                raise FeedError(f"input `{item.name}` has typed and raw contents", hint="one of them for all inputs")
            if position == len(raw):
                raise FeedError(f"input `{item.name}` has no data", hint="one of `raw_input_contents` for each input")
            data = raw[position]
            position += 1
        else:
            request.feeds[item.name] = _decode_contents(item, shape)
            continue
        request.feeds[item.name] = decode_tensor(item.name, item.datatype, shape, data)
    if position != len(raw):
        raise FeedError(f"{len(raw) - position} of `raw_input_contents` belong to no input", hint="one for each input")
    if message.outputs:
        request.outputs = distinct(
            requested_output(served, item.name, read_parameters(item.parameters) if item.parameters else None, True)
            for item in message.outputs
        )
    else:
        request.outputs = tuple(RequestedOutput(name) for name in served.outputs)
    return request


def _decode_contents(item: Any, shape: tuple[int, ...]) -> Array:
    field = _CONTENTS.get(item.datatype)
    if field is None:
        raise FeedError(f"input `{item.name}` is {item.datatype}, which has no typed contents", hint="as raw contents")
    filled = [descriptor.name for descriptor, _ in item.contents.ListFields()]
    if filled not in ([field], []):
        raise FeedError(f"input `{item.name}` has {' and '.join(filled)}, expected {field}", hint=item.datatype)
    return from_values(item.name, item.datatype, shape, getattr(item.contents, field))


def encode_infer(
    join: Callable[[list[Any]], bytes],
    service: Service,
    served: ServedVersion,
    request: InferRequest,
    outputs: dict[str, Any],
) -> bytes:
    """The parts of a `ModelInferResponse`, joined: every tensor as raw bytes, or in its region."""
    response = _Response(model_name=served.name, model_version=served.version, id=request.id)
    contents: list[Any] = []
    for output in request.outputs:
        array, datatype = presented(served, output, outputs[output.name])
        item = response.outputs.add(name=output.name, datatype=datatype, shape=array.shape)
        data = encode_tensor(array, datatype)
        if output.region is not None:
            region = output.region
            service.write_region(region, data)
            item.parameters["shared_memory_region"].string_param = region.name
            item.parameters["shared_memory_byte_size"].int64_param = len(data)
            item.parameters["shared_memory_offset"].int64_param = region.offset
            data = b""
        contents += [_field_head(_RAW_OUTPUTS, len(data)), data]
    return join([response.SerializeToString(), *contents])


def join_in_stream(parts: list[Any]) -> bytes:
    """A `ModelStreamInferResponse` of the parts of its `infer_response`."""
    return b"".join([_field_head(_INFER_RESPONSE, sum(map(len, parts))), *parts])


def _field_head(tag: int, size: int) -> bytes:
    """What stands before the `size` bytes of a field."""
    found = bytearray([tag])
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)


def statistics_message(rows: list[dict[str, Any]]) -> Any:
    """`ModelStatisticsResponse` of the statistics extension's rows."""
    from google.protobuf import json_format

    try:
        return json_format.ParseDict({"model_stats": rows}, message("ModelStatisticsResponse")())
    except json_format.ParseError as error:  # a field that the service description lacks
        raise UsageError(f"the statistics cannot be sent: {error}") from error

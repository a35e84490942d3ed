"""Inference over gRPC: tensors as raw bytes or as typed contents."""

from __future__ import annotations

from typing import Any

from trt_engine.errors import FeedError, UsageError
from trt_engine.serving.inference import (
    InferRequest,
    RequestedOutput,
    Service,
    check_distinct,
    check_input,
    region_of,
    requested_output,
    take_options,
)
from trt_engine.serving.messages import message
from trt_engine.serving.served_model import ServedVersion
from trt_engine.serving.wire_tensors import Array, decode_tensor, encode_tensor, from_values

_CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip
"""The field of typed contents by datatype; FP16 and BF16 are sent as raw bytes alone."""
_Response = message("ModelInferResponse")


def read_parameters(parameters: Any) -> dict[str, Any]:
    """The values of a parameter map."""
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param") for key, value in parameters.items()
    }


def decode_infer(service: Service, served: ServedVersion, message: Any) -> InferRequest:
    """The request in a `ModelInferRequest`."""
    request = InferRequest(message.id)
    if message.parameters:
        take_options(request, read_parameters(message.parameters))
    raw = message.raw_input_contents
    position = 0
    for item in message.inputs:
        shape = tuple(item.shape)
        check_input(served, item.name, item.datatype, shape, request.feeds)
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
        request.outputs = check_distinct(
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


def encode_infer(service: Service, served: ServedVersion, request: InferRequest, outputs: dict[str, Any]) -> Any:
    """The `ModelInferResponse`: every tensor as raw bytes, or in its region."""
    response = _Response(model_name=served.name, model_version=served.version, id=request.id)
    for output in request.outputs:
        array, datatype = outputs[output.name], served.outputs[output.name]
        item = response.outputs.add(name=output.name, datatype=datatype, shape=array.shape)
        data = encode_tensor(array, datatype)
        if output.region is None:
            response.raw_output_contents.append(bytes(data))
            continue
        region = output.region
        service.write_region(region, data)
        item.parameters["shared_memory_region"].string_param = region.name
        item.parameters["shared_memory_byte_size"].int64_param = len(data)
        item.parameters["shared_memory_offset"].int64_param = region.offset
        response.raw_output_contents.append(b"")
    return response


def tensor_metadata(container: Any, rows: list[dict[str, Any]]) -> None:
    """Add tensors to a metadata message."""
    for row in rows:
        container.add(name=row["name"], datatype=row["datatype"], shape=row["shape"])


def statistics_message(rows: list[dict[str, Any]]) -> Any:
    """`ModelStatisticsResponse` of the statistics extension's rows."""
    from google.protobuf import json_format

    try:
        return json_format.ParseDict({"model_stats": rows}, message("ModelStatisticsResponse")())
    except json_format.ParseError as error:  # a field that the service description lacks
        raise UsageError(f"the statistics cannot be sent: {error}") from error

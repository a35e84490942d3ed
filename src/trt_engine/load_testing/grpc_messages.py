"""The four gRPC messages a load generator needs, in protobuf's wire format: no generated code, no protobuf library.

Source: `inference.GRPCInferenceService` of the Open Inference Protocol v2, field numbers of its grpc_service.proto;
encoding by protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from collections.abc import Iterator

from trt_engine.load_testing.inference_request import raw_tensor, wire_dtype
from trt_engine.tensors import Signature, Tensors

SERVICE = "/inference.GRPCInferenceService/"
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}
Field = tuple[int, int | bytes]


def infer_request(
    model: str, version: str | None, signature: Signature, feeds: Tensors, *, timeout_us: int | None
) -> bytes:
    """A ModelInferRequest: tensors as raw contents, the deadline as parameter `timeout` in us."""
    parts = [_text(1, model), _text(2, version or "")]
    if timeout_us is not None:
        parts.append(_message(4, _text(1, "timeout") + _message(2, _number(2, timeout_us))))
    for spec in signature.inputs:
        array = feeds[spec.name]
        sizes = b"".join(map(_varint, array.shape))
        parts.append(_message(5, _text(1, spec.name) + _text(2, wire_dtype(spec)) + _message(3, sizes)))
    parts += [_message(7, raw_tensor(feeds[spec.name])) for spec in signature.inputs]
    return b"".join(parts)


def metadata_request(model: str, version: str | None) -> bytes:
    """A ModelMetadataRequest."""
    return _text(1, model) + _text(2, version or "")


def read_fields(data: bytes) -> Iterator[Field]:
    """Numbers and values of a message's fields. Raises `ValueError` for bytes that are not a message."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _read_varint(data, at)
        elif kind in _FIXED:
            size = _FIXED[kind]
        else:
            raise ValueError(f"field {number} has the wire type {kind}")
        if at + size > len(data):
            raise ValueError(f"field {number} ends after the message")
        yield number, data[at : at + size]
        at += size


def read_text(value: int | bytes) -> str:
    """A string field. Raises `ValueError`."""
    if isinstance(value, int):
        raise ValueError("a number, expected a string")
    return value.decode()


def read_tensor(value: int | bytes) -> tuple[str, str, list[int]]:
    """Name, datatype and shape of a TensorMetadata. Raises `ValueError`."""
    name, datatype, shape = "", "", list[int]()
    for number, part in read_fields(value if isinstance(value, bytes) else b""):
        if number == 1:
            name = read_text(part)
        elif number == 2:
            datatype = read_text(part)
        elif number == 3:
            shape += [_signed(part)] if isinstance(part, int) else _packed(part)
    return name, datatype, shape


def _packed(data: bytes) -> list[int]:
    values, at = [], 0
    while at < len(data):
        value, at = _read_varint(data, at)
        values.append(_signed(value))
    return values


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number has no end")


def _message(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _message(number, value.encode()) if value else b""


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3 | _VARINT) + _varint(value)

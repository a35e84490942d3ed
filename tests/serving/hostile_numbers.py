"""Every integer that a request to `serve` can state, as a table of requests with one of them replaced."""

from __future__ import annotations

import copy
import json
import re
import socket
import struct
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from trt_engine.open_inference.messages import INFERENCE_SERVICE, message

VALUES: dict[str, Any] = {
    "0": 0, "-1": -1, "2^31": 2**31, "2^62": 2**62, "2^64": 2**64, "4,000 digits": 10**4000, "10,000 digits": "9" * 10_000,
    "10^5 of 2^62": [2**62] * 100_000, "10^5 of 0": [0] * 100_000, "10^5 of -1": [-1] * 100_000,
}  # fmt: skip
"""What each integer is replaced with; a text of digits is written without quotes."""
REGION = "trt_engine_numbers"
_X = np.ones(4, np.float32).tobytes()
_REGION_AT = {"shared_memory_region": REGION, "shared_memory_byte_size": 16, "shared_memory_offset": 0}
_INFER = "/v2/models/double/infer"
_INPUT = {"name": "x", "shape": [1, 4], "datatype": "FP32"}
_DOCUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "binary": (_INFER, {
        "inputs": [_INPUT | {"parameters": {"binary_data_size": 16}}],
        "outputs": [{"name": "y", "parameters": {"binary_data": True, "classification": 0}}],
        "parameters": {"priority": 1, "timeout": 1_000_000, "sequence_id": 0, "binary_data_output": True},
    }),
    "JSON": (_INFER, {"inputs": [_INPUT | {"data": [1, 2, 3, 4]}], "parameters": {"unknown": 1}}),
    "region": (_INFER, {
        "inputs": [_INPUT | {"parameters": _REGION_AT}], "outputs": [{"name": "y", "parameters": dict(_REGION_AT)}]
    }),
    "register": (f"/v2/systemsharedmemory/region/{REGION}_2/register", {"key": REGION, "offset": 0, "byte_size": 16}),
    "CUDA": ("/v2/cudasharedmemory/region/c/register",
             {"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 16}),
    "load": ("/v2/repository/models/double/load", {"parameters": {"unload_dependents": 0}}),
    "index": ("/v2/repository/index", {"ready": 0}),
}  # fmt: skip
_HEADERS = {"Content-Length": 0, "Inference-Header-Content-Length": 0, "Host": 0}
_PARAMETERS = ("priority", "timeout", "sequence_id")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: an HTTP status or gRPC's code, the text, the time."""

    status: str
    text: str
    wall_s: float

    @property
    def wrong(self) -> str:
        """What a server must not do; empty where it did not."""
        if self.status in ("INTERNAL", "UNKNOWN") or (self.status[:1] == "5" and self.status not in ("503", "504")):
            return "failed"
        if len(self.text) > 2000 or re.search(r"\d{41}", self.text):
            return "the number is printed whole"
        return "no answer within 1 s" if self.wall_s > 1.0 else ""


Request = Callable[["Sender", Any], Answer]
"""Sends the request with this value in its place."""


class Sender:
    """Sends requests to one server."""

    def __init__(self, http: str, grpc_address: str) -> None:
        host, _, port = http.rpartition(":")
        self._address = (host, int(port))
        self._channel = grpc.insecure_channel(grpc_address)

    def http(self, path: str, headers: dict[str, Any], body: bytes) -> Answer:
        """POST the body; `waits` where the server waits for more of it."""
        lines = {"Host": "localhost", "Content-Length": len(body), "Connection": "close"} | headers
        head = f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        started, found = time.perf_counter(), b""
        with socket.create_connection(self._address, 10) as connection:
            try:
                connection.sendall(head.encode() + b"\r\n" + body)
                connection.settimeout(0.2 if "Content-Length" in headers else 1.5)
                while part := connection.recv(1 << 16):
                    found += part
            except TimeoutError:
                if not found:
                    return Answer("waits", "", 0.0 if "Content-Length" in headers else time.perf_counter() - started)
            except OSError:
                pass
        text = found.partition(b"\r\n\r\n")[2].decode("utf-8", "replace")
        return Answer(found[9:12].decode() or "closed", text, time.perf_counter() - started)

    def grpc(self, method: str, raw: bytes) -> Answer:
        started = time.perf_counter()
        status, text = "OK", ""
        try:
            self._channel.unary_unary(f"/{INFERENCE_SERVICE}/{method}")(raw, timeout=10)
        except grpc.RpcError as error:
            status, text = error.code().name, error.details() or ""
        return Answer(status, text, time.perf_counter() - started)

    def close(self) -> None:
        self._channel.close()


def encode(document: Any) -> bytes:
    """JSON with texts of digits as numbers."""
    return re.sub(rb'"(\d{5000,})"', rb"\1", json.dumps(document).encode())


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of every integer and every list of them."""
    if isinstance(value, dict | list):
        keys = range(len(value)) if isinstance(value, list) else value
        found = [place for key in keys for place in _places(value[key], (*path, key))]
        return [path, *found] if isinstance(value, list) and all(type(item) is int for item in value) else found
    return [path] if isinstance(value, int) else []


def _replaced(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(document)
    where = made
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    return made


def _json_request(kind: str, path: tuple[Any, ...]) -> Request:
    url, document = _DOCUMENTS[kind]

    def send(sender: Sender, value: Any) -> Answer:
        head = encode(_replaced(document, path, value))
        if url != _INFER or kind != "binary":
            return sender.http(url, {}, head)
        return sender.http(url, {"Inference-Header-Content-Length": len(head)}, head + _X)

    return send


def _header_request(name: str) -> Request:
    body = encode(_DOCUMENTS["JSON"][1])

    def send(sender: Sender, value: Any) -> Answer:
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        return sender.http(_INFER, {name: f"localhost:{text}" if name == "Host" else text}, body)

    return send


def _version_request(sender: Sender, value: Any) -> Answer:
    text = "/".join(map(str, value)) if isinstance(value, list) else str(value)
    return sender.http(f"/v2/models/double/versions/{text}/infer", {}, encode(_DOCUMENTS["JSON"][1]))


def _image_request(sender: Sender, value: Any) -> Answer:
    """A PNG whose width is the value."""
    size = struct.pack(">II", int(str(value)[:20]) % 2**32 if not isinstance(value, list) else 2**31 - 1, 2**16)
    head = b"IHDR" + size + b"\x08\x02\0\0\0"
    chunks = struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head))
    data = b"IDAT" + zlib.compress(bytes(1 << 16))
    chunks += struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    return sender.http("/v2/models/double/image", {}, b"\x89PNG\r\n\x1a\n" + chunks)


def _signed(value: Any) -> int:
    """The 64 bits of a value, as protobuf takes them."""
    return (int(str(value)[:30]) + 2**63) % 2**64 - 2**63


def _grpc_infer(set_value: Callable[[Any, list[int]], None]) -> Request:
    def send(sender: Sender, value: Any) -> Answer:
        made = message("ModelInferRequest")(model_name="double", raw_input_contents=[_X])
        made.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        set_value(made, [_signed(one) for one in (value if isinstance(value, list) else [value])])
        return sender.grpc("ModelInfer", made.SerializeToString())

    return send


def _set_shape(made: Any, values: list[int]) -> None:
    made.inputs[0].shape[:] = values if len(values) > 1 else [values[0], 4]


def _set_contents(made: Any, values: list[int]) -> None:
    del made.raw_input_contents[:]
    made.inputs[0].contents.int64_contents.extend(values)


def _set_parameter(name: str) -> Callable[[Any, list[int]], None]:
    def set_value(made: Any, values: list[int]) -> None:
        if not name.startswith("shared"):
            made.parameters[name].int64_param = values[0]
            return
        for item in (made.inputs[0], made.outputs.add(name="y")):
            item.parameters["shared_memory_region"].string_param = REGION
            item.parameters["shared_memory_byte_size"].int64_param = 16
            item.parameters[name].int64_param = values[0]
        del made.raw_input_contents[:]

    return set_value


def _set_many(made: Any, values: list[int]) -> None:
    made.raw_input_contents.extend([b""] * len(values))
    for _ in values:
        made.inputs.add()


def _grpc_register(method: str, field: str) -> Request:
    def send(sender: Sender, value: Any) -> Answer:
        made = message(f"{method}Request")(name="n", byte_size=16)
        if method.startswith("System"):
            made.key = REGION
        number = _signed(value[0] if isinstance(value, list) else value)
        setattr(made, field, number % 2**64 if field != "device_id" else (number + 2**31) % 2**32 - 2**31)
        answer = sender.grpc(method, made.SerializeToString())
        sender.grpc(
            "SystemSharedMemoryUnregister", message("SystemSharedMemoryUnregisterRequest")(name="n").SerializeToString()
        )
        return answer

    return send


PLACES: dict[str, Request] = {
    **{
        f"HTTP {kind}: {'.'.join(map(str, path))}": _json_request(kind, path)
        for kind, (_, document) in _DOCUMENTS.items()
        for path in _places(document)
    },
    **{f"HTTP header: {name}": _header_request(name) for name in _HEADERS},
    "HTTP path: version": _version_request,
    "HTTP image: width": _image_request,
    "gRPC: shape": _grpc_infer(_set_shape),
    "gRPC: contents": _grpc_infer(_set_contents),
    "gRPC: inputs and raw contents": _grpc_infer(_set_many),
    **{
        f"gRPC: {name}": _grpc_infer(_set_parameter(name))
        for name in (*_PARAMETERS, "shared_memory_byte_size", "shared_memory_offset")
    },
    **{
        f"gRPC: {method}.{field}": _grpc_register(method, field)
        for method, fields in (
            ("SystemSharedMemoryRegister", ("offset", "byte_size")),
            ("CudaSharedMemoryRegister", ("device_id", "byte_size")),
        )
        for field in fields
    },
}  # fmt: skip
"""What sends a request with a value in its place, by the name of the place."""

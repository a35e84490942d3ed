"""tritonclient as it comes, over HTTP and gRPC by one name."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http

from patience import HANG_S
from trt_engine.verbs.serve.server import Server

MODULES: dict[str, ModuleType] = {"http": tritonclient.http, "grpc": tritonclient.grpc}


class Client:
    """A client of one protocol."""

    def __init__(self, protocol: str, server: Server, **options: Any) -> None:
        self.protocol = protocol
        self.module = MODULES[protocol]
        address = server.http_address if protocol == "http" else server.grpc_address
        more = {"concurrency": 4} if protocol == "http" else {}
        self.raw = self.module.InferenceServerClient(address, **(more | options))

    def input(self, name: str, array: Any, datatype: str = "FP32", **options: Any) -> Any:
        made = self.module.InferInput(name, list(array.shape), datatype)
        made.set_data_from_numpy(array, **options)
        return made

    def output(self, name: str, **options: Any) -> Any:
        return self.module.InferRequestedOutput(name, **options)

    def infer(self, model: str, feeds: dict[str, Any], datatype: str = "FP32", **options: Any) -> Any:
        return self.raw.infer(model, [self.input(name, array, datatype) for name, array in feeds.items()], **options)

    def as_dict(self, answer: Any) -> Any:
        """A gRPC message as the JSON that HTTP has; 64-bit numbers as numbers."""
        if self.protocol == "http":
            return answer
        from google.protobuf import json_format

        return _numbers(json_format.MessageToDict(answer, preserving_proto_field_name=True))


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return int(value) if isinstance(value, str) and value.lstrip("-").isdigit() and len(value) > 0 else value


def ones(rows: int = 1) -> Any:
    return np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)


def fetch(server: Server, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and JSON (or text) of a GET, or of a POST of a body."""
    url = path if path.startswith("http") else f"http://{server.http_address}{path}"
    request = urllib.request.Request(url, body, {name.replace("_", "-"): value for name, value in headers.items()})
    try:
        answer = urllib.request.urlopen(request, timeout=HANG_S)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        raw = answer.read().decode()
        return answer.status, answer.headers, json.loads(raw) if raw.startswith(("{", "[")) else raw

"""HTTP as it is sent: JSON and binary tensors, statuses, limits, slow and broken clients."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patience import HANG_S, until
from serving.conftest import ECHO
from serving.triton import fetch, ones
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.verbs.serve.config import ServeConfig
from trt_engine.verbs.serve.http_app import Answer, HttpApp, find_route
from trt_engine.verbs.serve.inference import Admission, Service
from trt_engine.verbs.serve.model_config import server_settings
from trt_engine.verbs.serve.repository import Repository
from trt_engine.verbs.serve.served_model import Mailbox
from trt_engine.verbs.serve.server import Server
from trt_engine.verbs.serve.shared_memory import CudaMemory, SharedMemory

INFER = "/v2/models/double/infer"


@pytest.fixture(scope="module")
def server(engines: dict[str, Path], serve: Callable[..., Server]) -> Server:
    return serve(
        *(engines[name] for name in ("double", *ECHO)), grpc_port=-1, max_request="64KiB", max_json="16KiB",
        max_header="4KiB", request_timeout_s=HANG_S, max_connections=40, shared_memory_prefix="/trt_engine_test_",
    )  # fmt: skip


@pytest.fixture(scope="module")
def impatient(engines: dict[str, Path], serve: Callable[..., Server]) -> Server:
    """A server that waits two seconds for a request: a busy client would be late at any that answers."""
    return serve(engines["double"], grpc_port=-1, request_timeout_s=2.0)


def body_of(data: Any, shape: list[int] | None = None, datatype: str = "FP32", name: str = "x", **more: Any) -> bytes:
    shape = [1, 4] if shape is None else shape
    return json.dumps({"inputs": [{"name": name, "shape": shape, "datatype": datatype, "data": data}], **more}).encode()


@pytest.mark.parametrize("data", [[0, 1, 2, 3], [[0, 1.0, 2, 3]]], ids=["flat", "nested"])
def test_json_tensors_are_flat_or_nested(server: Server, data: list[Any]) -> None:
    status, headers, answer = fetch(server, INFER, body_of(data, id="a"))
    assert status == 200 and headers["content-type"] == "application/json"
    assert answer == {
        "model_name": "double", "model_version": "1", "id": "a",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [0, 2, 4, 6]}],
    }  # fmt: skip


def test_a_raw_body_is_the_one_input(server: Server) -> None:
    request = ones(3).tobytes()
    with socket.create_connection(address(server), HANG_S) as raw:
        head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(request)}\r\nConnection: close\r\n"
        raw.sendall(head.encode() + b"Inference-Header-Content-Length: 0\r\n\r\n" + request)
        answer = b"".join(iter(lambda: raw.recv(1 << 16), b""))
    header, _, body = answer.partition(b"\r\n\r\n")
    length = int(header.lower().split(b"inference-header-content-length: ")[1].split(b"\r\n")[0])
    described = json.loads(body[:length])["outputs"][0]
    assert described["shape"] == [3, 4] and described["parameters"] == {"binary_data_size": 48}
    np.testing.assert_array_equal(np.frombuffer(body[length:], np.float32).reshape(3, 4), ones(3) * 2)


WRONG: list[tuple[str, bytes, dict[str, str], int, str]] = [
    ("not JSON", b"{", {}, 400, "not valid"),
    ("no inputs", b"{}", {}, 400, "inputs"),
    ("a list", b"[]", {}, 400, "not valid"),
    ("deep JSON", b"[" * 9000, {}, 400, "not valid"),
    ("a deep parameter", body_of([0] * 4, parameters={"a": [[[]]]}), {}, 400, "parameters"),
    ("unknown fields nested deeply", b'{"x":' + b"[" * 9000 + b"]" * 9000 + b',"inputs":[]}', {}, 413, "are allowed"),
    ("JSON over the limit", body_of([0] * 9000, [2250, 4]), {}, 413, "are allowed"),
    ("a body over the limit", b"0" * 70000, {}, 413, "are allowed"),
    ("too few values", body_of([1, 2, 3]), {}, 400, "has 3 values, expected 4"),
    ("ragged rows", body_of([[1, 2], [3, 4]], [1, 4]), {}, 400, "nested differently"),
    ("text for a number", body_of(["a", 1, 2, 3]), {}, 400, "not valid"),
    ("text for a number", body_of(["1", 1, 2, 3]), {}, 400, "not valid"),
    ("NaN", b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[NaN,1,2,3]}]}', {}, 400, "not valid"),
    ("a negative size", body_of([], [-1, 4]), {}, 400, "sizes of 0 or more"),
    ("a size beyond all memory", body_of([1], [2**60, 2**60]), {}, 400, "more than 2^63 bytes"),
    ("a fractional size", body_of([1], [1.5, 4]), {}, 400, "not valid"),
    ("forty dimensions", body_of([1], [1] * 40), {}, 400, "40 dimensions"),
    ("sizes without end", body_of([1], [2**62] * 600), {}, 400, "600 dimensions"),
    ("a large size", body_of([1], [0, 2**62]), {}, 400, "more than 2^63 bytes"),
    ("a size of many digits", body_of([1], [10**400, 4]), {}, 400, "not valid"),
    ("no data", b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32"}]}', {}, 400, "has no data"),
    ("bytes that are missing", b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32",'
     b'"parameters":{"binary_data_size":16}}]}', {}, 400, "has 16 bytes, 0 are there"),
    ("bytes that follow", body_of([0] * 4) + b"1234", {"Inference_Header_Content_Length": str(len(body_of([0] * 4)))},
     400, "4 bytes follow"),
    ("a header length that is no number", b"{}", {"Inference_Header_Content_Length": "-1"}, 400, "not a number"),
    ("a header length beyond the body", b"{}", {"Inference_Header_Content_Length": "99"}, 400, "of JSON were announced"),
    ("the input twice", json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0] * 4}] * 2})
     .encode(), {}, 400, "comes twice"),
    ("no input", b'{"inputs":[]}', {}, 400, "is not fed"),
    ("a priority that is no number", body_of([0] * 4, parameters={"priority": "a"}), {}, 400, "`priority`"),
    ("a negative timeout", body_of([0] * 4, parameters={"timeout": -1}), {}, 400, "`timeout`"),
    ("no such region", body_of([0] * 4, outputs=[{"name": "y", "parameters": {"shared_memory_region": "r"}}]), {},
     404, "unknown region"),
    ("an encoding that is unknown", b"{}", {"Content_Encoding": "br"}, 415, "not supported"),
    ("damaged gzip", b"{}", {"Content_Encoding": "gzip"}, 400, "not valid gzip"),
    ("gzip that ends early", gzip.compress(body_of([0] * 4))[:-4], {"Content_Encoding": "gzip"}, 400, "whole gzip"),
    ("a bomb", gzip.compress(bytes(1 << 24)), {"Content_Encoding": "gzip"}, 413, "without its encoding"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "headers", "status", "text"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_what_is_wrong_is_refused_with_what_was_found(
    server: Server, body: bytes, headers: dict[str, str], status: int, text: str
) -> None:
    found, _, answer = fetch(server, INFER, body, **headers)
    assert (found, isinstance(answer, dict) and text in answer["error"]) == (status, True), answer


@pytest.mark.parametrize(
    ("datatype", "values", "text"),
    [
        ("INT8", [1, 2, 128], "outside INT8"), ("UINT8", [-1, 0, 1], "outside UINT8"), ("INT32", [1, 2, 2.5], "not valid"),
        ("BOOL", [0, 1, 1], "not valid"), ("INT64", [True, 1, 2], "not valid"), ("FP16", [1, 2, 3], "no JSON form"),
        ("FP32", [1, 2, 1e39], "outside FP32"),
    ],
)  # fmt: skip
def test_values_are_never_converted(server: Server, datatype: str, values: list[Any], text: str) -> None:
    model = "halves" if datatype == "FP16" else "types"
    status, _, answer = fetch(server, f"/v2/models/{model}/infer", body_of(values, [1, 3], datatype, f"in_{datatype}"))
    assert status == 400 and text in answer["error"]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\1\0\0", "3 bytes for 3 strings"), (b"\xff\xff\xff\xff" * 3, "ends inside string 0"),
        (b"\0" * 11, "11 bytes for 3"),
        (b"\0" * 13, "1 bytes after its last string"), (b"\1\0\0\0\xff" + b"\0" * 8, "not UTF-8"),
    ],
)  # fmt: skip
def test_strings_that_are_not_as_long_as_they_claim(server: Server, raw: bytes, text: str) -> None:
    item = {"name": "in_BYTES", "shape": [1, 3], "datatype": "BYTES", "parameters": {"binary_data_size": len(raw)}}
    head = json.dumps({"inputs": [item]}).encode()
    status, _, answer = fetch(
        server, "/v2/models/words/infer", head + raw, Inference_Header_Content_Length=str(len(head))
    )
    assert status == 400 and text in answer["error"]


def test_requests_with_the_same_json_have_tensors_of_their_own(server: Server) -> None:
    """The JSON of a binary request is decoded once, its answer's too: what differs between requests must differ."""

    def infer(x: Any, size: int | None = None, body: bytes | None = None, **more: Any) -> tuple[int, Any, Any]:
        item = {
            "name": "x",
            "shape": [*x.shape],
            "datatype": "FP32",
            "parameters": {"binary_data_size": size or x.nbytes},
        }
        head = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}, **more}).encode()
        data = x.tobytes() if body is None else body
        request = urllib.request.Request(
            f"http://{server.http_address}{INFER}", head + data, {"Inference-Header-Content-Length": str(len(head))}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                raw, length = answer.read(), int(answer.headers["inference-header-content-length"])
                return answer.status, json.loads(raw[:length]), np.frombuffer(raw[length:], np.float32)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read()), None

    for repeat in range(3):
        for rows in (1, 2, 3):
            status, document, y = infer(ones(rows) + repeat)
            assert status == 200 and document["outputs"][0]["shape"] == [rows, 4] and "id" not in document
            assert (y.reshape(rows, 4) == 2 * (ones(rows) + repeat)).all()
        assert infer(ones(), id=f"n{repeat}")[1]["id"] == f"n{repeat}"
        for body, text in (
            (b"", "has 0 bytes|bytes, 0 are there"),
            (ones(2).tobytes(), "16 bytes follow the last input"),
        ):
            status, document, _ = infer(ones(), body=body)
            assert status == 400 and re.search(text, document["error"])
        status, document, _ = infer(ones(), parameters={"binary_data_output": True, "sequence_id": 3})
        assert status == 400 and "sequences" in document["error"]
    for number in range(300):
        assert infer(ones() + number, id=str(number))[2][1] == 2 * (1 + number)


def test_null_is_nan_both_ways(server: Server) -> None:
    status, _, answer = fetch(server, INFER, body_of([None, 1, 2, 3]))
    assert status == 200 and answer["outputs"][0]["data"][0] is None


def test_other_paths_and_methods(server: Server) -> None:
    for path, status in (
        ("/", 200), ("/v3", 404), ("/v2/models", 404), ("/v2/models/double/versions/1", 200), ("/v2/models/nothing", 404),
        ("/v2/models/double/versions/1/ready", 200), ("/v2/models/double/versions/2/ready", 404),
        ("/v2/models/double/explain", 404), (INFER, 405), ("/v2/repository/any/index", 405), ("/v2/health/live", 200),
        ("/v2/models/stats", 200), ("/v2/cudasharedmemory/status", 200), ("/v2/systemsharedmemory/status", 200),
        ("/v2/models/double/stats", 200), ("/v2/models/double/versions/1/config", 200), ("/v2/trace/setting", 404),
    ):  # fmt: skip
        assert fetch(server, path)[0] == status, path
    assert find_route("HEAD", "/v2/health/live").name == "live"


# ------------------------------------------------------------------------------------------------ slow and broken clients


def address(server: Server) -> tuple[str, int]:
    assert server.http_address is not None
    host, _, port = server.http_address.rpartition(":")
    return host, int(port)


@pytest.fixture
def raw(server: Server) -> Iterator[Callable[[bytes], socket.socket]]:
    opened: list[socket.socket] = []

    def connect(text: bytes) -> socket.socket:
        opened.append(socket.create_connection(address(server), HANG_S))
        opened[-1].sendall(text)
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


def received(connection: socket.socket) -> bytes:
    """All that comes until the end; a reset is an end."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            found += chunk
    return found


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"POST ",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 20,
    ],
    ids=["nothing", "a method", "half a header", "no end"],
)
def test_a_connection_whose_header_does_not_come_is_closed(impatient: Server, text: bytes) -> None:
    with socket.create_connection(address(impatient), HANG_S) as connection:
        connection.sendall(text)
        assert received(connection) == b""


def test_a_body_that_does_not_come_is_an_error_in_time_and_costs_nobody_else(
    impatient: Server,
) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50000\r\n\r\n".encode()
    with contextlib.ExitStack() as opened:
        slow = [opened.enter_context(socket.create_connection(address(impatient), HANG_S)) for _ in range(10)]
        for one in slow:
            one.sendall(head + b"1" * 10)
        assert fetch(impatient, INFER, body_of([1] * 4))[0] == 200
        assert all(received(one).startswith(b"HTTP/1.1 408") for one in slow)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 8000 + b"\r\n\r\n", 431),
        (b"GET /v2 HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 8000, 431),
        (b"GET /" + b"y" * 8000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", 431),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST /v2 HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
    ],
    ids=["header", "endless header", "path", "TLS", "negative length", "length of many digits"],
)
def test_what_the_parser_refuses_is_answered_in_json_and_ends_the_connection(
    raw: Callable[[bytes], socket.socket], sent: bytes, status: int
) -> None:
    head, _, body = received(raw(sent)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status) and b"connection: close" in head and json.loads(body)["error"]


def test_a_chunked_body_over_the_limit_is_refused(raw: Callable[[bytes], socket.socket]) -> None:
    head = (
        f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    )
    small = body_of([1] * 4)
    assert received(raw(head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(small), small))).startswith(b"HTTP/1.1 200")
    connection = raw(head)
    with pytest.raises(OSError):  # refused, and closed while it is still sending
        for _ in range(4096):
            connection.sendall(b"4000\r\n" + b"0" * 0x4000 + b"\r\n")
    assert connection


def test_connections_beyond_the_limit_are_closed_and_the_others_stay(
    raw: Callable[[bytes], socket.socket], server: Server
) -> None:
    opened = [raw(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(60)]
    kept = 0
    for one in opened:
        with contextlib.suppress(ConnectionResetError):
            kept += one.recv(1 << 12).startswith(b"HTTP/1.1 200")
    assert 20 <= kept <= 40
    for one in opened:
        one.close()
    until(lambda: _answers(server), "the server answers again")


def _answers(server: Server) -> bool:
    try:
        return fetch(server, "/v2/health/live")[0] == 200
    except OSError:
        return False


def test_an_input_in_a_region_that_gives_a_binary_size_too_is_read_there_each_time(server: Server) -> None:
    path = Path(f"/dev/shm/trt_engine_test_{os.getpid()}")
    path.write_bytes(ones().tobytes())

    def post(where: str, document: dict[str, Any]) -> Any:
        request = urllib.request.Request(f"http://{server.http_address}{where}", json.dumps(document).encode())
        with urllib.request.urlopen(request) as answer:
            return answer.read(), answer.headers["inference-header-content-length"]

    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": 16, "binary_data_size": 16}
    item = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": parameters}
    try:
        post("/v2/systemsharedmemory/region/r/register", {"key": path.name, "offset": 0, "byte_size": 16})
        for _ in range(2):
            raw, length = post(INFER, {"inputs": [item], "parameters": {"binary_data_output": True}})
            assert (np.frombuffer(raw[int(length) :], np.float32) == 2 * ones()).all()
    finally:
        post("/v2/systemsharedmemory/region/r/unregister", {})
        path.unlink()


@pytest.mark.parametrize("headers", [[(b"content-length", b"10")], []], ids=["announced", "chunked"])
def test_a_request_whose_body_a_proxy_lost_is_to_be_sent_again(headers: list[tuple[bytes, bytes]]) -> None:
    """Behind Ray's proxy the client is still there: 4xx would tell it that its request was wrong."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def answer() -> tuple[Answer, Admission]:
        config = ServeConfig(shared_memory=False)
        service = Service(
            repository=Repository(None, {}, server_settings(config, RuntimeConfig())),
            memory=SharedMemory(False), cuda_memory=CudaMemory(False), admission=Admission(2, 1 << 30),
            mailbox=Mailbox(asyncio.get_running_loop()), explicit=False, strict=True,
        )  # fmt: skip
        service.admission.started = True
        app = HttpApp(service, config, None, lambda: (b"", b""))
        return await app.respond("POST", INFER.encode(), headers, receive), service.admission

    (status, found, _), admission = asyncio.run(answer())
    assert status == 503 and (b"retry-after", b"1") in found
    assert (admission.requests, admission.nbytes) == (0, 0)

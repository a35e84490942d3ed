"""Requests as a connection receives and answers them: cut anywhere, in pipelines, late, large, unread."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from http.client import HTTPResponse, HTTPSConnection
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import numpy as np
import pytest

from patience import HANG_S, until
from serving.triton import fetch
from trt_engine.open_inference.messages import INFERENCE_SERVICE, message
from trt_engine.verbs.serve.http_app import HttpApp
from trt_engine.verbs.serve.http_server import Connection
from trt_engine.verbs.serve.server import Server

INFER = "/v2/models/double/infer"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}).encode()
LARGE = BODY + b" " * 300_000
"""The same with spaces behind it."""


@pytest.fixture(scope="module")
def server(engines: dict[str, Path], serve: Callable[..., Server]) -> Server:
    made = serve(engines["double"], grpc_port=-1)
    assert fetch(made, INFER, BODY)[0] == 200
    return made


def connect(server: Server) -> socket.socket:
    assert server.http_address is not None
    host, _, port = server.http_address.rpartition(":")
    return socket.create_connection((host, int(port)), HANG_S)


def head_of(length: int, *more: str) -> bytes:
    return "\r\n".join(
        [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *more, "", ""]
    ).encode()


def read(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer, and not a byte more."""
    answer = HTTPResponse(connection)
    answer.fp = connection.makefile("rb", 0)
    answer.begin()
    return answer.status, answer.read()


def outputs(body: bytes) -> Any:
    return json.loads(body)["outputs"][0]["data"]


@pytest.mark.parametrize("body", [BODY, LARGE, LARGE[:40_000]], ids=["small", "large", "middle"])
@pytest.mark.parametrize("cut", [1, 10, 60, 90, 120, -100, -1])
def test_a_request_is_complete_at_its_last_byte_however_it_is_cut(server: Server, body: bytes, cut: int) -> None:
    whole = head_of(len(body)) + body
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(2):
            connection.sendall(whole[:cut])
            connection.settimeout(0.02)
            with pytest.raises(TimeoutError):
                connection.recv(1)
            connection.settimeout(HANG_S)
            connection.sendall(whole[cut:])
            status, found = read(connection)
            assert (status, outputs(found)) == (200, [2.0] * 4)


def test_binary_tensors_follow_the_json(server: Server) -> None:
    rows = np.arange(32, dtype=np.float32).reshape(8, 4)
    item = {"name": "x", "shape": [8, 4], "datatype": "FP32", "parameters": {"binary_data_size": rows.nbytes}}
    document = json.dumps({"inputs": [item], "parameters": {"binary_data_output": True}}).encode()
    for spaces in (0, 1, 90_003):
        head = document + b" " * spaces
        sent = head_of(len(head) + rows.nbytes, f"Inference-Header-Content-Length: {len(head)}")
        with connect(server) as connection:
            connection.sendall(sent + head + rows.tobytes())
            status, body = read(connection)
        assert status == 200
        np.testing.assert_array_equal(np.frombuffer(body[-rows.nbytes :], np.float32).reshape(8, 4), 2 * rows)


def test_requests_sent_at_once_are_answered_in_their_order(server: Server) -> None:
    metadata = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    one = head_of(len(BODY)) + BODY
    with connect(server) as connection:
        connection.sendall(one + metadata + one + one + metadata + head_of(len(LARGE)) + LARGE + one)
        found = [read(connection) for _ in range(7)]
    assert [status for status, _ in found] == [200] * 7
    assert [b"live" in body for _, body in found] == [False, True, False, False, True, False, False]


def test_an_error_leaves_the_connection_for_the_next_request(server: Server) -> None:
    wrong = BODY.replace(b'"x"', b'"z"')
    with connect(server) as connection:
        for body, expected in ((wrong, 400), (b"", 400), (b"{" * 100_000, 400), (BODY, 200)):
            connection.sendall(head_of(len(body)) + body)
            status, found = read(connection)
            assert status == expected, found


PLAIN = {
    "HTTP/1.0": ("GET /v2/health/live HTTP/1.0", [], b"", [200]),
    "HTTP/1.0 that stays": ("GET /v2/health/live HTTP/1.0", ["Connection: keep-alive"], b"", [200, 200]),
    "the last": ("GET /v2/health/live HTTP/1.1", ["Connection: close"], b"", [200]),
    "an upgrade": ("GET /v2/health/live HTTP/1.1", ["Connection: Upgrade", "Upgrade: websocket"], b"", [200, 200]),
    "an upgrade with a body": (f"POST {INFER} HTTP/1.1", ["Connection: Upgrade", "Upgrade: h2c"], BODY, [200, 200]),
    "a large one": (f"POST {INFER} HTTP/1.1", ["Connection: Upgrade", "Upgrade: h2c"], LARGE, [200, 200]),
    "one that is refused": ("POST /nothing HTTP/1.1", ["Connection: Upgrade", "Upgrade: h2c"], BODY, [404]),
    "an unknown path": ("POST /nothing HTTP/1.1", [], BODY, [404, 404]),
    "no path": ("CONNECT localhost:80 HTTP/1.1", [], b"", [400]),
    "a star": ("OPTIONS * HTTP/1.1", [], b"", [404, 404]),
    "a whole URL": ("GET http://localhost/v2/health/live HTTP/1.1", [], b"", [200, 200]),
    "a path with escapes": ("GET /v2/models/d%6Fuble HTTP/1.1", [], b"", [200, 200]),
}


@pytest.mark.parametrize(("line", "headers", "body", "statuses"), PLAIN.values(), ids=[*PLAIN])
@pytest.mark.parametrize("cut", [1, 50, 130, 1000])
def test_a_connection_stays_or_ends_as_the_request_has_it(
    server: Server, line: str, headers: list[str], body: bytes, statuses: list[int], cut: int
) -> None:
    length = [f"Content-Length: {len(body)}"] if body else []
    one = "\r\n".join([line, "Host: localhost", *headers, *length, "", ""]).encode() + body
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for status in statuses:
            connection.sendall(one[:cut])
            connection.sendall(one[cut:])
            assert read(connection)[0] == status
        if len(statuses) == 1:
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_an_answer_to_head_has_its_length_and_no_body_and_trailers_are_no_headers(server: Server) -> None:
    chunked = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    trailer = b"%x\r\n%s\r\n0\r\nContent-Encoding: br\r\nHost: evil.example\r\n\r\n" % (len(BODY), BODY)
    with connect(server) as connection:
        connection.sendall(b"HEAD /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = connection.recv(1 << 12)
        assert head.startswith(b"HTTP/1.1 200") and b"content-length: 13" in head and head.endswith(b"\r\n\r\n")
        connection.sendall(chunked + trailer)
        assert read(connection)[0] == 200
        connection.sendall(chunked.replace(b"Host", b"Upgrade: h2c\r\nConnection: upgrade\r\nHost") + trailer)
        assert read(connection)[0] == 400


def test_a_request_that_is_refused_leaves_the_connection_for_the_next(
    engines: dict[str, Path], serve: Callable[..., Server], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    server = serve(engines["double"], grpc_port=-1, token_file=token, max_request="64KiB")
    bearer = "Authorization: Bearer secret"
    with connect(server) as connection:
        for length, more, expected in (
            (len(BODY), [bearer], 200), (len(BODY), [bearer], 200), (len(BODY), [], 401), (len(BODY), [bearer], 200),
            (len(BODY), [bearer, "Content-Encoding: br"], 415), (len(LARGE), [bearer], 413),
        ):  # fmt: skip
            connection.sendall(head_of(length, *more) + BODY)
            assert read(connection)[0] == expected, more


def test_a_client_that_goes_inside_a_body_holds_nothing(server: Server) -> None:
    with connect(server) as connection:
        connection.sendall(head_of(len(LARGE)) + LARGE[:100_000])
        until(lambda: bytes_held(server) == 100_000, "it is being received")
    until(lambda: bytes_held(server) == 0, "it is forgotten")
    assert fetch(server, INFER, BODY)[0] == 200


def bytes_held(server: Server) -> int:
    assert server._service is not None
    return server._service.admission.nbytes


def test_bodies_that_do_not_come_take_no_place_of_other_requests(
    engines: dict[str, Path], serve: Callable[..., Server]
) -> None:
    server = serve(engines["double"], grpc_port=-1, max_in_flight=2, max_in_flight_size="1MiB")
    assert fetch(server, INFER, BODY)[0] == 200
    with ExitStack() as opened:
        for more in ((), ("Content-Encoding: gzip",)):  # as they are, and compressed
            for _ in range(10):
                opened.enter_context(connect(server)).sendall(head_of(10 << 20, *more) + b"1234")
        until(lambda: bytes_held(server) == 80, "all have begun")
        assert fetch(server, INFER, BODY)[0] == 200
        with connect(server) as other:
            other.sendall(head_of(len(BODY)) + BODY)
            assert read(other)[0] == 200


def test_a_body_larger_than_the_inputs_of_the_model_is_refused_before_it_comes(server: Server) -> None:
    most = (16 << 20) + 8 * 16  # JSON, and the tensors of the largest batch
    for length in (200 << 20, most + 1):
        with connect(server) as connection:
            connection.sendall(head_of(length))
            found, body = read(connection)
            assert found == 413 and f"{most} are allowed" in json.loads(body)["error"]
    bomb = gzip.compress(bytes(20 << 20))
    with connect(server) as connection:
        connection.sendall(head_of(len(bomb), "Content-Encoding: gzip") + bomb)
        assert read(connection)[0] == 413


@pytest.mark.parametrize(
    "more", [(), ("Content-Encoding: identity", "Expect: 100-continue")], ids=["at once", "on request"]
)
def test_bytes_beyond_the_limit_are_refused_while_they_come(
    engines: dict[str, Path], serve: Callable[..., Server], more: tuple[str, ...]
) -> None:
    server = serve(engines["double"], grpc_port=-1, max_in_flight_size="100KiB")
    assert fetch(server, INFER, BODY)[0] == 200
    with connect(server) as first, connect(server) as second:
        first.sendall(head_of(len(LARGE)) + LARGE[:90_000])
        until(lambda: bytes_held(server) == 90_000, "the first is being received")
        second.sendall(head_of(len(LARGE), *more) + LARGE[:60_000])
        found = second.recv(1 << 16)
        if found.startswith(b"HTTP/1.1 100"):
            found = found.partition(b"\r\n\r\n")[2] or second.recv(1 << 16)
        assert found.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in found
    until(lambda: bytes_held(server) == 0, "both are forgotten")
    assert fetch(server, INFER, BODY)[0] == 200


def test_a_body_that_does_not_come_is_answered_in_time(engines: dict[str, Path], serve: Callable[..., Server]) -> None:
    server = serve(engines["double"], grpc_port=-1, request_timeout_s=1.0)
    with connect(server) as connection:
        for _ in range(2):
            connection.sendall(head_of(len(BODY)) + BODY)
            assert read(connection)[0] == 200
        connection.sendall(head_of(len(LARGE)) + LARGE[:100_000])
        assert read(connection)[0] == 408
    until(lambda: bytes_held(server) == 0, "it is forgotten")


def test_an_answer_that_is_not_read_counts_its_bytes_and_no_request(server: Server) -> None:
    name = "a" * 15_000_000  # returned in the answer, and more than sockets hold
    body = BODY.replace(b"{", b'{"id": "%s", ' % name.encode(), 1)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(HANG_S)
        assert server.http_address is not None
        host, _, port = server.http_address.rpartition(":")
        connection.connect((host, int(port)))
        connection.sendall(head_of(len(body)) + body)
        assert server._service is not None
        admission = server._service.admission
        until(lambda: admission.requests == 0 and 0 < admission.nbytes - len(name) < 1000, "it is answered")
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200 and json.loads(answer.read())["id"] == name
        until(lambda: bytes_held(server) == 0, "it is read")


@pytest.mark.parametrize(
    "more",
    [(), ("Content-Encoding: gzip",), ("Content-Encoding: gzip", "Connection: close")],
    ids=["plain", "compressed", "the last of a connection"],
)
def test_a_client_that_never_reads_its_answer_is_dropped(
    engines: dict[str, Path],
    serve: Callable[..., Server],
    monkeypatch: pytest.MonkeyPatch,
    more: tuple[str, ...],
) -> None:
    server = serve(engines["double"], grpc_port=-1, request_timeout_s=2.0)
    assert fetch(server, INFER, BODY)[0] == 200
    body = BODY.replace(b"{", b'{"id": "%s", ' % (b"a" * 15_000_000), 1)
    ends: list[Connection] = []
    lost = Connection.connection_lost
    monkeypatch.setattr(Connection, "connection_lost", lambda *given: (lost(*given), ends.append(given[0])))
    with connect(server) as connection:
        body = gzip.compress(body, 1) if more else body
        connection.sendall(head_of(len(body), *more) + body)
        until(lambda: ends and bytes_held(server) == 0, "it is closed and forgotten")


def test_answers_over_grpc_that_are_not_read_count_for_a_time_and_then_against_grpc_alone(
    engines: dict[str, Path], serve: Callable[..., Server]
) -> None:
    server = serve(engines["double"], request_timeout_s=2.0, max_in_flight_size="10MiB")
    request = message("ModelInferRequest")(model_name="double", id="a" * 15_000_000)
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1] * 4)
    with grpc.insecure_channel(server.grpc_address) as channel:
        infer = channel.stream_stream(
            f"/{INFERENCE_SERVICE}/ModelStreamInfer", request_serializer=lambda each: each.SerializeToString()
        )
        call = infer(iter([request] * 3))
        assert server._service is not None
        admission = server._service.admission
        until(lambda: admission.requests == 0 and admission.nbytes > 3 * len(request.id), "two answers wait")
        until(lambda: admission.nbytes == 0 and admission.overdue > 3 * len(request.id), "they are overdue")
        assert call.is_active() and fetch(server, INFER, BODY)[0] == 200
        other = channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")
        with pytest.raises(grpc.RpcError, match="have not read"):
            other(b"\x0a\x06double")
        call.cancel()
        until(lambda: admission.overdue == 0, "they are forgotten")


def test_requests_that_end_in_one_read_are_no_large_header(server: Server) -> None:
    one, count = "GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n", 10_000
    text = ((one + "\r\n") * (count - 1) + one + "Connection: close\r\n\r\n").encode()
    with connect(server) as connection:
        sender = Thread(target=connection.sendall, args=(text,))
        sender.start()
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        sender.join()
    assert answers.count(b"HTTP/1.1 200") == count


def test_servers_of_a_process_read_into_memory_of_their_own(
    server: Server, engines: dict[str, Path], serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_here: list[Connection] = []
    made = Connection.connection_made

    def noted(self: Connection, transport: Any) -> None:
        made_here.append(self)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", noted)
    for each in (server, serve(engines["triple"], grpc_port=-1)):
        assert fetch(each, "/v2/health/live")[0] == 200
    first, second = (np.frombuffer(receiver.get_buffer(-1), np.uint8) for receiver in made_here)
    assert not np.shares_memory(first, second)


@pytest.mark.parametrize("more", [(), ("Expect: 100-continue",)], ids=["at once", "on request"])
def test_a_body_that_does_not_come_is_not_the_answer_of_the_request_before(
    engines: dict[str, Path], serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    server = serve(engines["double"], grpc_port=-1, request_timeout_s=0.5)
    assert fetch(server, INFER, BODY)[0] == 200

    async def wait(*_: Any) -> Any:
        await asyncio.sleep(HANG_S)

    monkeypatch.setattr(HttpApp, "_run_inference", wait)
    with connect(server) as connection:
        connection.sendall(head_of(len(BODY), *more) + BODY + head_of(len(BODY)) + BODY[:1])
        found = b""
        with suppress(ConnectionResetError):
            while chunk := connection.recv(100):
                found += chunk
    assert found in (b"", b"HTTP/1.1 100 Continue\r\n\r\n")
    until(lambda: bytes_held(server) == 0, "it is forgotten")


def test_large_requests_over_tls(
    engines: dict[str, Path], serve: Callable[..., Server], certificate: tuple[Path, Path]
) -> None:
    server = serve(engines["double"], grpc_port=-1, tls_cert=certificate[0], tls_key=certificate[1])
    assert server.http_address is not None
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with closing(HTTPSConnection(server.http_address, timeout=HANG_S, context=context)) as connection:
        for _ in range(3):
            connection.request("POST", INFER, LARGE)
            answer = connection.getresponse()
            assert (answer.status, outputs(answer.read())) == (200, [2.0] * 4)

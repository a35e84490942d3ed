"""`loadtest` on our own server: inputs in system shared memory."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import trt_engine as te
from serving.triton import fetch
from trt_engine.errors import DeadlineExpired, EngineError, ModelError, SetupError, UsageError
from trt_engine.open_inference.messages import message
from trt_engine.verbs.loadtest import subjects
from trt_engine.verbs.loadtest.http_response import HttpMetadata
from trt_engine.verbs.loadtest.target import parse_target, served_signature, tensor_triples
from trt_engine.verbs.serve import shared_memory
from trt_engine.verbs.serve.server import Server

BRIEF = {"warmup_s": 0.0, "duration_s": 0.2}


@pytest.fixture(scope="module")
def server(engines: dict[str, Path], serve: Callable[..., Server]) -> Server:
    return serve(engines["double"], shared_memory_prefix="/trt-engine-load-")


@pytest.mark.parametrize("processes", [1, 2])
def test_inputs_in_shared_memory(server: Server, processes: int) -> None:
    url = f"http://{server.http_address}/v2/models/double"
    record = te.loadtest(url, shared_memory=True, batch=8, concurrency=2, processes=processes, **BRIEF)
    assert record.requests and not record.failed, record.error_messages
    assert record.inputs.endswith("in shared memory") and record.batch == 8
    plain = te.loadtest(url, batch=8, **BRIEF)
    assert plain.request_bytes - record.request_bytes > 0 and not plain.inputs.endswith("memory")
    assert fetch(server, "/v2/systemsharedmemory/status")[2] == []
    assert not [*Path("/dev/shm").glob("trt-engine-load-*")]


def test_a_server_without_shared_memory(engines: dict[str, Path], serve: Callable[..., Server]) -> None:
    other = serve(engines["double"], shared_memory=False)
    with pytest.raises(UsageError, match="does not use shared memory"):
        te.loadtest(f"http://{other.http_address}/v2/models/double", shared_memory=True, **BRIEF)
    assert not [*Path("/dev/shm").glob("trt-engine-load-*")]


def test_a_machine_without_a_folder_of_shared_memory(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://{server.http_address}/v2/models/double"
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "_FOLDER", tmp_path / "none")
        with pytest.raises(UsageError, match="cannot be opened"):
            te.loadtest(url, shared_memory=True, **BRIEF)
    monkeypatch.setattr(subjects, "_FOLDER", tmp_path / "none")
    with pytest.raises(SetupError, match="cannot write shared memory"):
        te.loadtest(url, shared_memory=True, **BRIEF)
    assert te.loadtest(url, **BRIEF).requests


# ------------------------------------------------------------------------------------------------ a hostile server

HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"), (HEAD, b"X: y\r\n"), (HEAD + b"X: ", b"a"),
        (HEAD + b"Content-Length: 1000\r\n\r\n", b" "), (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\naaaaa\r\n"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"), (HEAD + b"\r\n", b"a"), (b"", b""),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n-5\r\n{}", b""),
        (HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n", b""),
    ],
)  # fmt: skip
def test_metadata_that_does_not_end_is_given_up_in_time(first: bytes, piece: bytes) -> None:
    ended = threading.Event()

    def answer(listener: socket.socket) -> None:
        connection = listener.accept()[0]
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(first)
            while not ended.wait(0.02):
                connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v2/models/m"
        try:
            with pytest.raises(SetupError, match="no answer"):
                HttpMetadata(parse_target(url, None, None), None, None, 0.5).read(parse_target(url, None, None))
        finally:
            ended.set()


@pytest.mark.parametrize(
    "tensor",
    [{"name": 5}, {"name": ["x"]}, {"name": None}, {"shape": [1.5]}, {"shape": [float("inf")]}, {"shape": "abc"},
     {"shape": 4}, {"datatype": None}, {"datatype": ["FP32"]}],
    ids=str,
)  # fmt: skip
def test_metadata_of_other_types_are_none(tensor: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        tensor_triples([{"name": "x", "datatype": "FP32", "shape": [1]} | tensor])


@pytest.mark.parametrize(
    "side",
    [[("x" * 10**6, "FP32", [1])], [("x", "y" * 10**6, [1])], [("x", "FP32", [1] * 65)], [("x", "FP32", [1])] * 5000],
    ids=["name", "type", "rank", "count"],
)
@pytest.mark.parametrize("is_input", [True, False])
def test_tensors_that_no_model_has_are_an_error_of_one_line(side: Any, is_input: bool) -> None:
    with pytest.raises(EngineError) as caught:
        served_signature(side if is_input else [], [] if is_input else side)
    assert len(caught.value.one_line) < 1000 and caught.value.hint


def _message(name: str, *inputs: tuple[str, list[int]]) -> bytes:
    made: Any = message(name)(name="m")
    for own, shape in inputs:
        made.inputs.add(name=own, datatype="FP32", shape=shape)
    raw: bytes = made.SerializeToString()
    return raw


def _abort(context: Any) -> bytes:
    context.abort(grpc.StatusCode.INTERNAL, "no\x1b[31m\n" * 100)
    return b""


@pytest.mark.parametrize(
    ("method", "answer", "error", "match"),
    [
        ("ServerMetadata", b"\xff" * 100, EngineError, "protocol v2"),
        ("ModelMetadata", bytes((1 << 24) + 1), EngineError, "larger than max"),
        ("ModelMetadata", gzip.compress(bytes(1 << 26), mtime=0), EngineError, "protocol v2"),
        ("ModelMetadata", _abort, EngineError, "INTERNAL: no"),
        ("ModelMetadata", _message("ModelMetadataResponse", ("x", [2**62] * 3)), ModelError, "bytes, more than"),
        ("ModelMetadata", _message("ModelMetadataResponse", ("x", [0, 2**62, 2**62])), ModelError, "bytes, more than"),
        ("ModelMetadata", _message("ModelMetadataResponse", *((f"x{at}", [1 << 22]) for at in range(99))), ModelError,
         "bytes together"),
        ("ModelInfer", _abort, SetupError, "INTERNAL, no"),
        ("ModelInfer", None, DeadlineExpired, "no request was sent"),
        ("ModelInfer", b"", None, ""),
        ("ModelMetadata", gzip.compress(_message("ModelMetadataResponse", ("x", [1])), mtime=0), None, ""),
    ],
)  # fmt: skip
def test_a_hostile_server_over_grpc_is_an_error_in_one_line(
    method: str, answer: Any, error: type[Exception] | None, match: str
) -> None:
    ended = threading.Event()

    class Handler(grpc.GenericRpcHandler):
        def service(self, call: Any) -> Any:
            name = call.method.rpartition("/")[2]

            def respond(_: bytes, context: Any) -> bytes:
                if name != method:
                    return _message(f"{name}Response", ("x", [1])) if name == "ModelMetadata" else b""
                if answer is None:
                    ended.wait()
                return answer(context) if callable(answer) else answer or b""

            return grpc.unary_unary_rpc_method_handler(respond)

    options = [("grpc.max_send_message_length", -1)]
    server = grpc.server(ThreadPoolExecutor(8), handlers=[Handler()], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    url = f"grpc://127.0.0.1:{port}/v2/models/m"
    try:
        if error is None:
            assert te.loadtest(url, **BRIEF).requests
            return
        with pytest.raises(error, match=match) as caught:
            te.loadtest(url, timeout_s=1.0, **BRIEF | {"warmup_s": 0.2})
        assert len(str(caught.value)) < 500 and "\x1b" not in str(caught.value)
    finally:
        ended.set()
        server.stop(None)


def test_shared_memory_is_for_http_and_a_server(server: Server, engines: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="for HTTP"):
        te.loadtest(f"grpc://{server.grpc_address}/v2/models/double", shared_memory=True, **BRIEF)
    with pytest.raises(UsageError, match="`--shared-memory` is for a server"):
        te.loadtest(engines["double"], shared_memory=True, **BRIEF)

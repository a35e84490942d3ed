"""A signal under load: what was accepted is answered, everything else is refused in a way that clients send elsewhere."""

from __future__ import annotations

import json
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, RemoteDisconnected
from pathlib import Path
from typing import Any

import grpc
import pytest

from patience import HANG_S
from trt_engine.open_inference.messages import INFERENCE_SERVICE, message

ANSWERED, REFUSED = "answered", "refused"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}).encode()
SLOW = json.dumps({"inputs": [{"name": "count", "shape": [1], "datatype": "INT64", "data": [300]}]}).encode()


def grpc_request(slow: bool) -> Any:
    made = message("ModelInferRequest")(model_name="slow" if slow else "double")
    if slow:
        made.inputs.add(name="count", datatype="INT64", shape=[1]).contents.int64_contents.append(300)
    else:
        made.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1] * 4)
    return made


def call_http(address: str, slow: bool, keep: bool, wait: Callable[[], None]) -> Iterator[str]:
    """Outcomes of requests one after another, on one connection or each on its own; ends where nobody listens."""
    connection = HTTPConnection(address, timeout=HANG_S)
    path, body = ("slow", SLOW) if slow else ("double", BODY)
    headers = {} if keep else {"Connection": "close"}
    while True:
        wait()
        try:
            if connection.sock is None:
                connection.connect()
        except ConnectionRefusedError:
            return
        try:
            connection.request("POST", f"/v2/models/{path}/infer", body, headers)
            answer = connection.getresponse()
            answer.read()
            yield {200: ANSWERED, 503: REFUSED}.get(answer.status, f"HTTP {answer.status}")
        except (RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
            yield type(error).__name__
            connection.close()


def call_grpc(address: str, slow: bool, keep: bool, wait: Callable[[], None]) -> Iterator[str]:
    request = grpc_request(slow)
    with grpc.insecure_channel(address) as channel:
        infer = channel.unary_unary(
            f"/{INFERENCE_SERVICE}/ModelInfer", request_serializer=lambda each: each.SerializeToString()
        )
        refused = 0
        while refused < 20:
            wait()
            try:
                infer(request, timeout=HANG_S)
                yield ANSWERED
            except grpc.RpcError as error:
                unavailable = error.code() == grpc.StatusCode.UNAVAILABLE
                refused += 1
                yield REFUSED if unavailable else error.code().name


def call_stream(address: str, slow: bool, keep: bool, wait: Callable[[], None]) -> Iterator[str]:
    request, sent = grpc_request(slow), queue.SimpleQueue[Any]()
    with grpc.insecure_channel(address) as channel:
        infer = channel.stream_stream(
            f"/{INFERENCE_SERVICE}/ModelStreamInfer", request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=message("ModelStreamInferResponse").FromString,
        )  # fmt: skip
        call = infer(iter(sent.get, None), timeout=HANG_S)
        try:
            while True:
                wait()
                sent.put(request)
                answer = next(call)
                yield REFUSED if "shutting down" in answer.error_message else answer.error_message or ANSWERED
        except grpc.RpcError as error:
            yield REFUSED if error.code() == grpc.StatusCode.UNAVAILABLE else f"stream {error.code().name}"


def end_under_load(engines: dict[str, Path], seed: int) -> Counter[str]:
    """Outcomes of all requests to a server that gets SIGTERM, or SIGINT, while 16 clients load it; none may be lost."""
    rng = random.Random(seed)
    command = [
        sys.executable,
        "-m",
        "trt_engine",
        "serve",
        str(engines["slow"]),
        str(engines["double"]),
        "--json",
        "-q",
    ]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "-1"]
    with subprocess.Popen([*command, *ports, "--drain-delay", f"{seed % 3 * 0.1}"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = list[bytes]()
        while not lines or lines[-1] != b"}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], "it ended early"
        document = json.loads(b"".join(lines))
        found = Counter[str]()
        kinds: list[tuple[Callable[..., Iterator[str]], str]] = [
            (call_http, document["http"].removeprefix("http://")), (call_grpc, document["grpc"]),
            (call_stream, document["grpc"]), (call_http, document["http"].removeprefix("http://")),
        ]  # fmt: skip

        def load(number: int, pause_s: float) -> None:
            call, address = kinds[number % 4]
            found.update(
                f"{call.__name__} {outcome}"
                for outcome in call(address, number % 8 > 3, number % 4 == 0, lambda: time.sleep(pause_s))
            )

        clients = [
            threading.Thread(target=load, args=(number, rng.choice((0, 0, 0.003, 0.02)))) for number in range(16)
        ]
        for client in clients:
            client.start()
        time.sleep(rng.uniform(0.3, 0.8))
        process.send_signal(signal.SIGINT if seed else signal.SIGTERM)
        for client in clients:
            client.join(HANG_S)
            assert not client.is_alive()
        assert process.wait(HANG_S) == 0
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_a_server_that_ends_under_load_loses_no_request(engines: dict[str, Path], seed: int) -> None:
    found = end_under_load(engines, seed)
    assert {outcome.rpartition(" ")[2] for outcome in found} <= {ANSWERED, REFUSED}, found
    assert min(found[f"call_{kind} answered"] for kind in ("http", "grpc", "stream")) > 0, found

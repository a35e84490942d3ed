"""A full server refuses, an ending one answers what it accepted; tokens and TLS."""

from __future__ import annotations

import gc
import json
import os
import socket
import ssl
import threading
import tracemalloc
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import trt_engine as te
from onnx_models import node, save
from patience import HANG_S, until
from serving.conftest import place, start
from serving.triton import Client, fetch, ones
from trt_engine.errors import SetupError, UsageError
from trt_engine.verbs.serve.config import is_loopback
from trt_engine.verbs.serve.execution import TimedRunner
from trt_engine.verbs.serve.server import Server
from trt_engine.verbs.serve.shared_memory import SharedMemory


def long_call(server: Server, protocol: str = "http", times: int = 4_000) -> Any:
    client = Client(protocol, server, **({"network_timeout": HANG_S} if protocol == "http" else {}))
    try:
        return client.infer("slow", {"count": np.array([times])}, "INT64").as_numpy("y")
    finally:
        client.raw.close()


def in_flight(server: Server) -> float:
    text = fetch(server, f"http://{server.metrics_address}/metrics")[2]
    (row,) = [row for row in text.splitlines() if row.startswith("trt_engine_requests_in_flight ")]
    return float(row.split()[1])


@pytest.mark.parametrize("limits", [{"max_in_flight": 1}, {"max_in_flight_size": 1}], ids=["requests", "bytes"])
def test_a_full_server_refuses_and_says_when_to_come_back(
    engines: dict[str, Path], serve: Callable[..., Server], limits: dict[str, int]
) -> None:
    server = serve(engines["slow"], engines["double"], **limits)
    with ThreadPoolExecutor(1) as callers:
        first = callers.submit(long_call, server)
        until(lambda: in_flight(server) == 1, "the first request runs")
        body = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[0,1,2,3]}]}'
        status, headers, answer = fetch(server, "/v2/models/double/infer", body)
        assert status == 503 and headers["retry-after"] == "1" and "the server has" in answer["error"]
        assert "--max-in-flight" in answer["error"]
        client = Client("grpc", server)
        with pytest.raises(InferenceServerException) as caught:
            client.infer("double", {"x": ones()})
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        client.raw.close()
        assert first.result(HANG_S) == 1.0
    assert fetch(server, "/v2/models/double/infer", body)[0] == 200
    assert "trt_engine_refused_requests_total 2.0" in fetch(server, "/metrics")[2]


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_answer_counts_before_it_is_computed(
    engines: dict[str, Path], serve: Callable[..., Server], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, gate = serve(engines["double"], max_in_flight_size=20_000), threading.Event()
    for name in ("run", "run_batched"):
        run = getattr(TimedRunner, name)
        monkeypatch.setattr(TimedRunner, name, lambda *given, run=run: gate.wait(HANG_S) and run(*given))
    assert server._service is not None
    (served,) = server._service.repository.models["double"].versions.values()
    monkeypatch.setattr(served, "small_answers", False)
    monkeypatch.setattr(served, "answer_nbytes", lambda feeds: 15_000)
    clients = [Client(protocol, server) for _ in range(2)]
    with ThreadPoolExecutor(2) as callers:
        calls = [callers.submit(client.infer, "double", {"x": ones()}) for client in clients]
        until(lambda: any(call.done() for call in calls), "one has no room")
        gate.set()
        assert sorted(call.exception() is None for call in calls) == [False, True]
    assert server._service.admission.nbytes == 0


def test_an_answer_of_a_size_that_no_input_tells_counts_as_the_largest_so_far(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    x = np.ones((4, 4), np.float32)
    path = save(tmp_path / "m.onnx", [node("NonZero", "x", "y")], {"x": (1, [4, 4])}, {"y": (7, [2, None])})
    server = serve(te.build(path, out=tmp_path / "m.engine.onnx", parity=False).path)
    assert server._service is not None
    ((served,),) = (model.versions.values() for model in server._service.repository.models.values())
    for number in (1, 16, 16):
        assert not served.small_answers and served.answer_nbytes({"x": x}) == 2 * 8 * number
        Client("http", server).infer(served.name, {"x": x})


@pytest.mark.parametrize("model", ["slow", "double"], ids=["one by one", "joined"])
def test_a_full_queue_names_the_flag_of_its_limit(
    engines: dict[str, Path], serve: Callable[..., Server], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(engines[model], grpc_port=-1, max_queue=1, contexts=1)
    gate = threading.Event()
    for name in ("run", "run_batched"):
        run = getattr(TimedRunner, name)
        monkeypatch.setattr(TimedRunner, name, lambda *given, run=run: gate.wait(HANG_S) and run(*given))
    name, shape, datatype = ("count", [1], "INT64") if model == "slow" else ("x", [1, 4], "FP32")
    item = {"name": name, "shape": shape, "datatype": datatype, "data": [1] * shape[-1]}
    body = json.dumps({"inputs": [item]}).encode()
    with ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(fetch, server, f"/v2/models/{model}/infer", body) for _ in range(4)]
        try:
            until(lambda: any(call.done() for call in calls), "one is refused")
            (status, _, answer), *_ = (call.result() for call in calls if call.done())
            assert status == 503 and "`--max-queue`" in answer["error"], answer
        finally:
            gate.set()


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_request_that_waits_is_dropped_when_its_client_goes(
    engines: dict[str, Path], serve: Callable[..., Server], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve(engines["slow"], contexts=1)
    run, gate = TimedRunner.run, threading.Event()
    monkeypatch.setattr(TimedRunner, "run", lambda self, feeds: gate.wait(HANG_S) and run(self, feeds))
    with ThreadPoolExecutor(1) as callers:
        try:
            running = callers.submit(long_call, server, "http", 1)
            until(lambda: in_flight(server) == 1, "the first request runs")
            go = wait_in_queue(server, protocol)
            until(lambda: in_flight(server) == 2, "the second request waits")
            go()
            until(lambda: in_flight(server) == 1, "the second request is dropped")
        finally:
            gate.set()
        assert running.result(HANG_S) == 1.0
    stats = server_stats(server)
    assert (stats["execution_count"], stats["inference_stats"]["fail"]["count"]) == (1, 1)
    assert (
        'nv_inference_request_failure{model="slow",reason="CANCELED",version="1"} 1.0' in fetch(server, "/metrics")[2]
    )


def wait_in_queue(server: Server, protocol: str) -> Callable[[], object]:
    """Send a request and do not wait for its answer; returns what makes the client go away."""
    if protocol == "grpc":
        client = Client(protocol, server)
        inputs = [client.input("count", np.array([1]), "INT64")]
        return client.raw.async_infer("slow", inputs, lambda result, error: None).cancel
    connection = connect(server)
    body = b'{"inputs":[{"name":"count","shape":[1],"datatype":"INT64","data":[1]}]}'
    connection.sendall(
        b"POST /v2/models/slow/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )
    return connection.close


def connect(server: Server) -> socket.socket:
    assert server.http_address is not None
    host, _, port = server.http_address.rpartition(":")
    return socket.create_connection((host, int(port)), HANG_S)


def test_clients_that_send_slowly_or_not_at_all_cost_nobody_else(
    engines: dict[str, Path], serve: Callable[..., Server]
) -> None:
    server = serve(engines["double"], request_timeout_s=HANG_S, max_in_flight=8)
    head = b"POST /v2/models/double/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 80\r\n"
    connections = []
    for start_of_request in (b"", b"P", head, head + b"X-Header: "):
        for _ in range(50):
            connections.append(connect(server))
            connections[-1].sendall(start_of_request)
    half_open = connect(server)
    half_open.sendall(head[:20])
    half_open.shutdown(socket.SHUT_WR)
    idle_grpc = [socket.create_connection(server.grpc_address.rsplit(":", 1)) for _ in range(50)]  # type: ignore[union-attr, arg-type]
    for connection in idle_grpc[::2]:
        connection.sendall(b"PRI * HTTP/2.0\r\n")
    for protocol in ("http", "grpc"):
        client = Client(protocol, server)
        for _ in range(20):
            np.testing.assert_array_equal(client.infer("double", {"x": ones()}).as_numpy("y"), ones() * 2)
        client.raw.close()
    assert half_open.recv(1) == b"", "a half-open connection is closed at once"
    assert in_flight(server) == 0, "a request that has no body yet holds nothing of others"
    for connection in (*connections, *idle_grpc, half_open):
        connection.close()


@pytest.mark.slow
def test_an_ending_server_is_not_ready_first_and_answers_everything_that_it_accepted(engines: dict[str, Path]) -> None:
    server = start(engines["slow"], drain_delay_s=0.3)
    client = Client("grpc", server)
    with ThreadPoolExecutor(4) as callers:
        calls = [callers.submit(long_call, server, protocol) for protocol in ("http", "grpc", "http", "grpc")]
        until(lambda: in_flight(server) == 4, "all requests were accepted")
        server.drain()
        until(lambda: not client.raw.is_server_ready() and not client.raw.is_model_ready("slow"), "not ready")
        assert [call.result(HANG_S).item() for call in calls] == [1.0] * 4
    client.raw.close()
    assert server.wait(HANG_S)
    with pytest.raises(OSError):
        fetch(server, "/v2/health/live")
    server.close()
    server.close()


def test_close_ends_callers_that_wait_for_nothing(engines: dict[str, Path]) -> None:
    server = start(engines["double"])
    idle = Client("http", server)
    assert idle.raw.is_server_live()
    done = threading.Thread(target=server.close)
    done.start()
    done.join(HANG_S)
    assert not done.is_alive()
    idle.raw.close()


def server_stats(server: Server) -> dict[str, Any]:
    (found,) = fetch(server, "/v2/models/stats")[2]["model_stats"]
    return found


# ------------------------------------------------------------------------------------------------ security


def test_only_this_machine_reaches_it_unless_configured() -> None:
    assert is_loopback("127.0.0.1") and is_loopback("localhost") and is_loopback("::1")
    assert is_loopback("::ffff:127.0.0.1") and not is_loopback("::ffff:192.168.1.2")
    assert not is_loopback("0.0.0.0") and not is_loopback("192.168.1.2")


def test_addresses_of_ipv6_are_as_clients_take_them(engines: dict[str, Path], serve: Callable[..., Server]) -> None:
    try:
        server = serve(engines["double"], host="::1")
    except SetupError as error:
        pytest.skip(str(error))
    for protocol in ("http", "grpc"):
        client = Client(protocol, server)
        np.testing.assert_array_equal(client.infer("double", {"x": ones()}).as_numpy("y"), ones() * 2)
        client.raw.close()


def test_shared_memory_is_off_beyond_loopback(engines: dict[str, Path], serve: Callable[..., Server]) -> None:
    server = serve(engines["double"], host="0.0.0.0")
    body = b'{"key": "/a", "byte_size": 4}'
    assert server.http_address is not None
    url = f"http://127.0.0.1:{server.http_address.rpartition(':')[2]}"
    assert "system_shared_memory" not in fetch(server, f"{url}/v2")[2]["extensions"]
    status, _, answer = fetch(server, f"{url}/v2/systemsharedmemory/region/a/register", body)
    assert status == 400 and "does not use shared memory" in answer["error"]


@pytest.mark.parametrize("key", ["../etc/passwd", "/../etc/passwd", "/a/b", "", ".", "..", "a\0"])
def test_keys_of_shared_memory_cannot_be_paths(
    engines: dict[str, Path], serve: Callable[..., Server], key: str
) -> None:
    with pytest.raises(UsageError, match="is not a key"):
        SharedMemory(enabled=True).register("r", key, 0, 4)


@pytest.fixture
def region() -> Iterator[Path]:
    path = Path(f"/dev/shm/trt_engine_{os.getpid()}_region")
    path.write_bytes(np.ones(256, np.float32).tobytes())
    yield path
    path.unlink()


def infer_region(server: Server, nbytes: int, shape: list[int]) -> tuple[int, Any]:
    parameters = {"shared_memory_region": "r", "shared_memory_byte_size": nbytes}
    item = {"name": "x", "shape": shape, "datatype": "FP32", "parameters": parameters}
    status, _, answer = fetch(server, "/v2/models/double/infer", json.dumps({"inputs": [item]}).encode())
    return status, answer


def test_shared_memory_is_for_callers_with_a_token_or_for_regions_that_the_server_names(
    engines: dict[str, Path],
    serve: Callable[..., Server],
    region: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def register(server: Server, **headers: str) -> tuple[int, str]:
        body = json.dumps({"key": region.name, "byte_size": 16}).encode()
        status, _, answer = fetch(server, "/v2/systemsharedmemory/region/r/register", body, **headers)
        return status, str(answer)

    status, answer = register(serve(engines["double"], grpc_port=-1))
    assert status == 400 and "`--shared-memory-prefix /app_` or `--token-file FILE`" in answer
    status, answer = register(serve(engines["double"], grpc_port=-1, shared_memory_prefix="/other_"))
    assert status == 400 and "does not begin with `/other_`" in answer
    server = serve(engines["double"], grpc_port=-1, shared_memory_prefix="/trt_engine_")
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 12345)
        status, answer = register(server)
    assert status == 400 and "belongs to another user" in answer
    assert register(server)[0] == 200
    (tmp_path / "token").write_text("s3cret")
    server = serve(engines["double"], grpc_port=-1, token_file=tmp_path / "token")
    assert register(server)[0] == 401 and register(server, Authorization="Bearer s3cret")[0] == 200
    with pytest.raises(UsageError, match="gives the memory of this user to every client"):
        start(engines["double"], shared_memory=True)


def test_shared_memory_is_compared_and_counted_before_it_is_read(
    engines: dict[str, Path], serve: Callable[..., Server], region: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.truncate(region, 1 << 40)  # takes no memory
    server = serve(engines["double"], grpc_port=-1, shared_memory_prefix="/trt_engine_")
    body = json.dumps({"key": region.name, "byte_size": 1 << 40}).encode()
    assert fetch(server, "/v2/systemsharedmemory/region/r/register", body)[0] == 200
    assert server._service is not None
    server._service.max_request = 64
    read = SharedMemory.read
    monkeypatch.setattr(SharedMemory, "read", lambda *_: pytest.fail("it was read"))
    for nbytes, shape, text in (
        (1 << 32, [1 << 28, 4], "profile 0 spans 1x4 to 8x4"), (64, [1, 4], "has 64 bytes, expected 16"),
        (128, [8, 4], "64 are allowed"), (1 << 41, [1, 4], "expected 16"),
    ):  # fmt: skip
        status, answer = infer_region(server, nbytes, shape)
        assert status == 400 and text in answer["error"], answer
    seen = []
    monkeypatch.setattr(
        SharedMemory, "read", lambda *given: seen.append(server._service.admission.nbytes) or read(*given)
    )
    before = len(json.dumps({}))
    assert infer_region(server, 64, [4, 4])[0] == 200 and seen[0] > before + 64
    assert server._service.admission.nbytes == 0


def test_a_name_or_a_page_from_elsewhere_does_not_use_a_server_of_this_machine(
    engines: dict[str, Path], serve: Callable[..., Server], tmp_path: Path
) -> None:
    server = serve(engines["double"], grpc_port=-1, allowed_host=["models.example"])
    body = b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[0,1,2,3]}]}'
    port = str(server.http_address).rpartition(":")[2]
    for path, data in (("/", None), ("/v2/models/double/infer", body), ("/metrics", None), ("/v2/health/live", None)):
        for host, origin, status in (
            (f"localhost:{port}", None, 200), ("evil.example", None, 421), (f"evil.example:{port}", None, 421),
            ("127.0.0.1.evil.example", None, 421), ("[::1]:80", None, 200), ("models.example", None, 200),
            ("localhost:9", "http://localhost:9", 200), ("localhost:9", "http://localhost:10", 403),
            ("localhost", "http://evil.example", 403), ("localhost", "null", 403),
            ("localhost", "https://models.example", 200), ("models.example.", None, 200), ("evil.example.", None, 421),
            (f"localhost.:{port}", f"http://localhost.:{port}", 200), (f"[::ffff:127.0.0.1]:{port}", None, 200),
            ("localhost", "http://localhost:80", 200), ("localhost:443", "https://localhost", 200),
            ("localhost", "http://localhost:443", 403),
        ):  # fmt: skip
            for _ in range(2):  # the first to a path, and one that follows
                headers = {"Host": host} | ({"Origin": origin} if origin else {})
                assert fetch(server, path, data, **headers)[0] == status, (path, host, origin)
    assert fetch(server, f"http://{server.metrics_address}/metrics", Host="evil.example")[0] == 421


def test_clients_without_a_token_load_no_models_unless_that_is_configured(
    engines: dict[str, Path], repository: Path, serve: Callable[..., Server], tmp_path: Path
) -> None:
    place(engines["double"], repository, "net")
    control = {"model_repository": repository, "model_control_mode": "explicit"}
    server = serve(**control)
    for protocol in ("http", "grpc"):
        client = Client(protocol, server)
        for call in (client.raw.load_model, client.raw.unload_model):
            with pytest.raises(InferenceServerException, match="without a token may not load"):
                call("net")
        client.raw.close()
    (tmp_path / "token").write_text("s3cret")
    server = serve(**control, token_file=tmp_path / "token")
    assert fetch(server, "/v2/repository/models/net/load", b"")[0] == 401
    assert fetch(server, "/v2/repository/models/net/load", b"", Authorization="Bearer s3cret")[0] == 200


def test_a_region_that_shrinks_is_an_error(engines: dict[str, Path]) -> None:
    path = Path(f"/dev/shm/trt_engine_{os.getpid()}_shrinks")
    path.write_bytes(bytes(64))
    memory = SharedMemory(enabled=True)
    try:
        memory.register("r", path.name, 0, 64)
        assert bytes(memory.read("r", 8, 8)) == bytes(8)
        os.truncate(path, 4)
        with pytest.raises(UsageError, match="has shrunk"):
            memory.read("r", 0, 8)
        with pytest.raises(UsageError, match="has shrunk"):
            memory.write("r", 0, 8, bytes(8))
    finally:
        path.unlink()
        memory.close()


def test_what_grpc_refuses_leaves_no_memory(engines: dict[str, Path], serve: Callable[..., Server]) -> None:
    server, raw = serve(engines["double"]), bytes(4 << 20)
    gc.disable()  # a large server collects rarely
    tracemalloc.start()
    with grpc.insecure_channel(server.grpc_address) as channel:
        for _ in range(8):
            with pytest.raises(grpc.RpcError, match="the request has more than"):
                channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(raw)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    gc.enable()
    assert held < 3 * len(raw)


def test_a_token_is_needed_where_one_is_set(
    engines: dict[str, Path],
    serve: Callable[..., Server],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    token.chmod(0o644)
    server = serve(engines["double"], token_file=token)
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert fetch(server, path)[0] == 200
    assert "may read or write" in caplog.text, "the mode of the file"
    assert server._service is not None
    monkeypatch.setattr(type(server._service), "not_ready", lambda _: {"double": f"no such file `{tmp_path}/x`"})
    assert fetch(server, "/v2/health/ready")[::2] == (503, {"ready": False})
    assert str(tmp_path) in str(fetch(server, "/v2/health/ready", Authorization="Bearer s3cret")[2])
    monkeypatch.undo()
    for path in ("/v2", "/metrics", "/v2/models/double", "/v2/models/stats"):
        for wrong in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}):
            status, headers, _ = fetch(server, path, **wrong)
            assert (status, headers["www-authenticate"]) == (401, "Bearer")
    right = {"Authorization": "bearer  s3cret"}  # the scheme has no case
    assert fetch(server, "/v2", **right)[0] == fetch(server, "/metrics", **right)[0] == 200
    for protocol in ("http", "grpc"):
        client = Client(protocol, server)
        assert client.raw.is_server_live() and client.raw.is_server_ready()
        with pytest.raises(InferenceServerException, match="token"):
            client.infer("double", {"x": ones()})
        headers = {"authorization": "Bearer s3cret"}
        np.testing.assert_array_equal(client.infer("double", {"x": ones()}, headers=headers).as_numpy("y"), ones() * 2)
        client.raw.close()
    client = Client("grpc", server)
    with pytest.raises(Exception, match=r"token|UNAUTHENTICATED"):
        client.raw.get_model_repository_index()
    client.raw.close()


def test_tls_over_both_protocols(
    engines: dict[str, Path], serve: Callable[..., Server], certificate: tuple[Path, Path]
) -> None:
    cert, key = certificate
    server = serve(engines["double"], tls_cert=cert, tls_key=key)
    assert server.report.http is not None and server.report.http.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(cert))
    with urllib.request.urlopen(f"{server.report.http}/v2/health/ready", context=trusted) as answer:
        assert answer.status == 200
    client = Client("grpc", server, ssl=True, root_certificates=str(cert))
    np.testing.assert_array_equal(client.infer("double", {"x": ones()}).as_numpy("y"), ones() * 2)
    client.raw.close()
    with grpc.insecure_channel(server.grpc_address) as channel, pytest.raises(grpc.RpcError):
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=2)


def test_a_model_with_a_token_file_that_is_empty_is_refused(engines: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "token").write_text(" \n")
    with pytest.raises(UsageError, match="has no token"):
        start(engines["double"], token_file=tmp_path / "token")

"""Load over gRPC, against a server whose messages are those of Triton's client."""

from __future__ import annotations

import builtins
import time
from concurrent import futures
from pathlib import Path

import numpy as np
import pytest

import trt_engine as te
from trt_engine.errors import EngineError, Overloaded, SetupError, UsageError
from trt_engine.tensors import Signature, TensorSpec
from trt_engine.verbs.loadtest.clients import infer_request
from trt_engine.verbs.loadtest.config import LoadtestConfig

grpc = pytest.importorskip("grpc")
service_pb2 = pytest.importorskip("tritonclient.grpc").service_pb2

BRIEF = {"warmup_s": 0.0, "duration_s": 0.5}


class GrpcServer:
    """The service with one model `net`; `on_infer` gets the decoded request and its context."""

    def __init__(self, on_infer=None, models: tuple[str, ...] = ("net",)) -> None:
        self.requests: list = []
        self.metadata: list = []
        self._on_infer, self._models = on_infer, models

    def __enter__(self) -> GrpcServer:
        methods = {
            "ServerMetadata": lambda raw, context: service_pb2.ServerMetadataResponse(name="small", version="3"),
            "ModelMetadata": self._describe,
            "RepositoryIndex": lambda raw, context: service_pb2.RepositoryIndexResponse(
                models=[{"name": name, "state": "READY"} for name in self._models]
            ),
            "ModelInfer": self._infer,
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                call, response_serializer=lambda found: found if isinstance(found, bytes) else found.SerializeToString()
            )
            for name, call in methods.items()
        }
        self._server = grpc.server(futures.ThreadPoolExecutor(32))
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),)
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def _describe(self, raw: bytes, context):
        request = service_pb2.ModelMetadataRequest.FromString(raw)
        if request.name == "loading":
            context.abort(grpc.StatusCode.UNAVAILABLE, "not ready")
        if request.name != "net":
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown model")
        tensor = service_pb2.ModelMetadataResponse.TensorMetadata
        return service_pb2.ModelMetadataResponse(
            name="net", versions=["1"], platform="tensorrt_plan",
            inputs=[tensor(name="x", datatype="FP16", shape=[-1, 300])],
            outputs=[tensor(name="y", datatype="BF16", shape=[-1])],
        )  # fmt: skip

    def _infer(self, raw: bytes, context):
        self.requests.append(raw)
        self.metadata.append(dict(context.invocation_metadata()))
        return b"" if self._on_infer is None else self._on_infer(len(self.requests) - 1, context)


@pytest.mark.parametrize("settings", [{"concurrency": 3}, {"rate": 100.0, "connections": 8}])
def test_requests_are_the_messages_of_the_protocol(settings: dict, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("word")
    with GrpcServer() as server:
        record = te.loadtest(server.url, batch=2, deadline_ms=5000, token_file=tmp_path / "token", **settings, **BRIEF)
    assert record.requests == len(server.requests) > 3 and not record.errors
    assert (record.server, record.model, record.runtime_info) == ("small 3", "net", {"platform": "tensorrt_plan"})
    assert server.metadata[0]["authorization"] == "Bearer word"
    request = service_pb2.ModelInferRequest.FromString(server.requests[0])
    assert request.model_name == "net" and not request.model_version
    ((name, datatype, shape),) = ((one.name, one.datatype, list(one.shape)) for one in request.inputs)
    assert (name, datatype, shape) == ("x", "FP16", [2, 300])
    assert len(np.frombuffer(request.raw_input_contents[0], np.float16)) == 600
    assert {key: value.int64_param for key, value in request.parameters.items()} == {"timeout": 5_000_000}


@pytest.mark.slow
def test_failures_are_counted_by_kind() -> None:
    def fail(number: int, context):
        if number % 3 == 1:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
        if number == 5:
            time.sleep(4)  # longer than its timeout, which the other answers keep also on a busy machine
        return b""

    with GrpcServer(fail) as server:
        record = te.loadtest(server.url, rate=50, arrivals="constant", timeout_s=3.0, warmup_s=0.0, duration_s=0.4)
    assert set(record.errors) == {"status RESOURCE_EXHAUSTED", "timeout"}
    assert record.error_messages["status RESOURCE_EXHAUSTED"] == "queue is full"
    assert record.requests + record.failed == 20


def test_a_server_that_refuses_everything_is_overloaded() -> None:
    refuse = lambda number, context: context.abort(grpc.StatusCode.UNAVAILABLE, "full")  # noqa: E731
    with GrpcServer(refuse) as server, pytest.raises(Overloaded, match="full"):
        te.loadtest(server.url, **BRIEF)


def test_what_is_wrong_before_the_first_request_is_named() -> None:
    with GrpcServer(models=("a", "b")) as server:
        with pytest.raises(UsageError, match="has 2 models"):
            te.loadtest(server.url)
        with pytest.raises(UsageError, match="NOT_FOUND"):
            te.loadtest(server.url, model="a")
        with pytest.raises(SetupError, match="gives UNAVAILABLE: not ready"):
            te.loadtest(server.url, model="loading")
        with pytest.raises(UsageError, match="no JSON"):
            te.loadtest(server.url, model="net", binary=False)
        port = server.port
    with pytest.raises(SetupError, match=f"no answer from 127.0.0.1:{port}"):
        te.loadtest(f"grpc://127.0.0.1:{port}", model="net")


def test_without_grpcio_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name == "grpc":
            raise ImportError(name)
        return usual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SetupError) as caught:
        te.loadtest("grpc://127.0.0.1:1", model="net", config=LoadtestConfig())
    assert caught.value.hint == "`pip install 'trt-engine[serve]'`" and caught.value.exit_code == 3


def test_a_request_with_every_field_is_what_protobuf_reads() -> None:
    signature = Signature((TensorSpec("a", "int64", (2,)), TensorSpec("b", "string", (2,))), ())
    feeds = {"a": np.array([-1, 1 << 40]), "b": np.array(["x", "yz"], object)}
    raw = infer_request("name", "12", signature, feeds, timeout_us=None)
    request = service_pb2.ModelInferRequest.FromString(raw)
    assert (request.model_name, request.model_version) == ("name", "12") and not request.parameters
    assert np.frombuffer(request.raw_input_contents[0], "<i8").tolist() == [-1, 1 << 40]
    assert request.raw_input_contents[1] == b"\1\0\0\0x\2\0\0\0yz"


def test_an_answer_of_another_service_is_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrpcServer, "_describe", lambda *_: b"\xff")
    with GrpcServer() as server, pytest.raises(EngineError, match="does not answer in the protocol v2"):
        te.loadtest(server.url, model="net")

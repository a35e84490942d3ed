"""The load generator for each kind of target, and a server over gRPC: its metadata, and requests that are encoded once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import read_bounded
from trt_engine.errors import EngineError, SetupError, TrtEngineError, UsageError
from trt_engine.open_inference.messages import INFERENCE_SERVICE, message
from trt_engine.open_inference.wire_tensors import encode_tensor, protocol_dtype
from trt_engine.reporting.document import clean_text
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Signature, Tensors
from trt_engine.verbs.loadtest.generator import CONNECTION, REFUSED, STATUS, TIMEOUT, Loop
from trt_engine.verbs.loadtest.http_loop import HttpLoop
from trt_engine.verbs.loadtest.http_response import HttpMetadata, choose_model, unreachable
from trt_engine.verbs.loadtest.target import MAX_TEXT, ServedModel, Target, served_signature, tls_context
from trt_engine.verbs.loadtest.threaded_loop import FutureLoop, RequestFailed, ThreadedLoop

METADATA_TIMEOUT_S = 3.0
"""For each of the up to three questions before the load: no server makes the verb wait for ten seconds."""


@contextlib.contextmanager
def open_loop(
    target: Target, request: bytes, *, concurrency: int, timeout_s: float, token: str | None, ca_file: Path | None
) -> Iterator[Loop]:
    """A generator that sends this request to a server."""
    if target.interface == "http":
        family, address = resolve(target)
        tls = tls_context(target, ca_file)
        yield HttpLoop(
            family, address, request, connections=concurrency, timeout_s=timeout_s, host=target.host, tls=tls
        )
        return
    client = GrpcClient(target, ca_file=ca_file, token=token, timeout_s=timeout_s)
    try:
        yield ThreadedLoop(functools.partial(client.infer, request), threads=concurrency, timeout_s=timeout_s)
    finally:
        client.close()


def resolve(target: Target) -> tuple[int, object]:
    """Address family and address of the server: the first that accepts a connection. Raises `SetupError`."""
    reason = "no address"
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(f"cannot find the host `{target.host}`: {error.strerror}", hint="check its name") from error
    for family, kind, number, _, address in found:
        try:
            with socket.socket(family, kind, number) as trial:
                trial.settimeout(METADATA_TIMEOUT_S)
                trial.connect(address)
                return family, address
        except OSError as error:
            reason = error.strerror or str(error)
    raise SetupError(f"no answer from {target.address}: {reason.lower()}", hint="is the server started, at this port?")


def read_model(target: Target, token: str | None, ca_file: Path | None) -> tuple[Target, ServedModel]:
    """The target with its model's name, and its metadata. Raises `SetupError`, `UsageError`, `EngineError`."""
    if target.interface == "http":
        return _read_metadata(HttpMetadata(target, tls_context(target, ca_file), token, METADATA_TIMEOUT_S), target)
    client = GrpcClient(target, ca_file=ca_file, token=token, timeout_s=METADATA_TIMEOUT_S, most=MAX_METADATA)
    try:
        return _read_metadata(client, target)
    finally:
        client.close()


def _read_metadata(client: HttpMetadata | GrpcClient, target: Target) -> tuple[Target, ServedModel]:
    if target.model is None:
        target = dataclasses.replace(target, model=client.only_model())
    return target, client.read(target)


def engine_loop(
    runner: InferenceEngine, feeds: Tensors, *, concurrency: int, timeout_s: float, deadline_ms: float | None
) -> Loop:
    """A generator that calls an engine in this process; as futures where its requests are joined."""
    if isinstance(runner.runner, Batcher):
        submit = functools.partial(runner.infer_async, feeds, deadline_ms=deadline_ms)
        return FutureLoop(submit, limit=concurrency, timeout_s=timeout_s)

    def call() -> None:
        try:
            runner.infer(feeds)
        except TrtEngineError as error:
            raise RequestFailed(type(error).__name__, error.message) from None

    return ThreadedLoop(call, threads=concurrency, timeout_s=timeout_s)


_CALLER_ERRORS = ("NOT_FOUND", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED")
_HINTS = dict.fromkeys(("UNAUTHENTICATED", "PERMISSION_DENIED"), "`--token-file FILE` has the bearer token")
_REFUSED_WORDS = ("connection refused", "failed to connect")
MAX_METADATA, _MAX_ANSWER = 1 << 22, 1 << 30
_BROKEN_WORDS = ("socket closed", "connection reset", "goaway", "broken pipe")


class GrpcClient:
    """One channel to a server; `close` ends it. Answers have at most `most` bytes, also when expanded."""

    def __init__(
        self, target: Target, *, ca_file: Path | None, token: str | None, timeout_s: float, most: int = _MAX_ANSWER
    ) -> None:
        try:
            import grpc
        except ImportError as error:
            raise SetupError(
                "gRPC needs the package `grpcio`, which is not installed", hint="`pip install 'trt-engine[serve]'`"
            ) from error
        self._grpc: Any = grpc
        self._target, self._timeout_s = target, timeout_s
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        options = [
            ("grpc.max_receive_message_length", most), ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500),
            ("grpc.per_message_decompression", 0),  # it takes memory before a limit is compared
        ]  # fmt: skip
        if target.tls:
            roots = None if ca_file is None else read_bounded(ca_file)
            self._channel = grpc.secure_channel(target.address, grpc.ssl_channel_credentials(roots), options)
        else:
            self._channel = grpc.insecure_channel(target.address, options)
        self._infer = self._channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")

    def infer(self, request: bytes) -> None:
        """One request. Raises `RequestFailed`."""
        try:
            self._infer(request, timeout=self._timeout_s, metadata=self._metadata)
        except self._grpc.RpcError as error:
            raise RequestFailed(*_describe(error.code().name, error.details() or "")) from None

    def only_model(self) -> str:
        """The name of the server's model, where it has one alone. Raises `UsageError`."""
        return choose_model([model.name for model in self._fetch("RepositoryIndex").models if model.name])

    def read(self, target: Target) -> ServedModel:
        """The server and the model of the target. Raises `SetupError`, `UsageError`, `EngineError`."""
        server = self._fetch("ServerMetadata")
        model = self._fetch("ModelMetadata", name=target.model or "", version=target.version or "")
        sides = ([(one.name, one.datatype, one.shape) for one in side] for side in (model.inputs, model.outputs))
        return ServedModel(
            f"{server.name} {server.version}".strip()[:MAX_TEXT] or "unknown",
            tuple(server.extensions),
            tuple(model.versions),
            served_signature(*sides),
            {"platform": model.platform[:MAX_TEXT]} if model.platform else {},
        )

    def close(self) -> None:
        self._channel.close()

    def _fetch(self, method: str, **fields: str) -> Any:
        """The response of a method of the service."""
        from google.protobuf.message import DecodeError

        request = message(f"{method}Request")(**fields).SerializeToString()
        call = self._channel.unary_unary(f"/{INFERENCE_SERVICE}/{method}")
        try:
            answer = call(request, timeout=self._timeout_s, metadata=self._metadata)
        except self._grpc.RpcError as error:
            code, text = error.code().name, clean_text((error.details() or "")[:MAX_TEXT])
            if _describe(code, text)[0] in (REFUSED, CONNECTION, TIMEOUT):
                raise unreachable(self._target, OSError(0, text or code)) from error
            kind = UsageError if code in _CALLER_ERRORS else SetupError if code == "UNAVAILABLE" else EngineError
            hint = _HINTS.get(code, "`--model NAME` names a loaded model")
            raise kind(f"`{method}` at {self._target.address} gives {code}: {text}", hint=hint) from error
        try:
            if answer[:1] in (b"\x1f", b"\x78"):  # gzip or deflate: no response of the protocol begins so
                answer = zlib.decompressobj(47).decompress(answer, MAX_METADATA)
            return message(f"{method}Response").FromString(answer)
        except (DecodeError, zlib.error) as error:
            raise EngineError(
                f"{self._target.address} does not answer in the protocol v2: {error}", hint="is the port a gRPC one?"
            ) from error


def infer_request(
    model: str, version: str | None, signature: Signature, feeds: Tensors, *, timeout_us: int | None
) -> bytes:
    """A ModelInferRequest: tensors as raw contents, the deadline as parameter `timeout` in us."""
    request = message("ModelInferRequest")(model_name=model, model_version=version or "")
    if timeout_us is not None:
        request.parameters["timeout"].int64_param = timeout_us
    for spec in signature.inputs:
        array, datatype = feeds[spec.name], protocol_dtype(spec)
        request.inputs.add(name=spec.name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(bytes(encode_tensor(array, datatype)))
    raw: bytes = request.SerializeToString()
    return raw


def _describe(code: str, text: str) -> tuple[str, str]:
    """Kind and message of a failed call."""
    words = text.lower()
    if code == "DEADLINE_EXCEEDED":
        return TIMEOUT, text
    if code == "UNAVAILABLE" and any(word in words for word in _REFUSED_WORDS):
        return REFUSED, text
    if code == "UNAVAILABLE" and any(word in words for word in _BROKEN_WORDS):
        return CONNECTION, text
    return f"{STATUS} {code}", text

"""A server over gRPC: its metadata, and requests as bytes that were encoded once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.atomic_io import read_bounded
from trt_engine.errors import EngineError, SetupError, UsageError
from trt_engine.load_testing.grpc_messages import SERVICE, metadata_request, read_fields, read_tensor, read_text
from trt_engine.load_testing.http_metadata import choose_model, unreachable
from trt_engine.load_testing.inference_request import ServedModel, spec_of
from trt_engine.load_testing.samples import CONNECTION, REFUSED, STATUS, TIMEOUT
from trt_engine.load_testing.target import Target
from trt_engine.load_testing.threaded_loop import RequestFailed
from trt_engine.tensors import Signature

_CALLER_ERRORS = ("NOT_FOUND", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED")
_REFUSED_WORDS = ("connection refused", "failed to connect")
_BROKEN_WORDS = ("socket closed", "connection reset", "goaway", "broken pipe")


def import_grpc() -> Any:
    """The module `grpc`. Raises `SetupError`."""
    try:
        import grpc
    except ImportError as error:
        raise SetupError(
            "gRPC needs the package `grpcio`, which is not installed", hint="`pip install 'trt-engine[serve]'`"
        ) from error
    return grpc


class GrpcClient:
    """One channel to a server; `close` ends it."""

    def __init__(self, target: Target, *, ca_file: Path | None, token: str | None, timeout_s: float) -> None:
        self._grpc = grpc = import_grpc()
        self._target, self._timeout_s = target, timeout_s
        self._metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        options = [
            ("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 500),
        ]  # fmt: skip
        if target.tls:
            roots = None if ca_file is None else read_bounded(ca_file)
            self._channel = grpc.secure_channel(target.address, grpc.ssl_channel_credentials(roots), options)
        else:
            self._channel = grpc.insecure_channel(target.address, options)
        self._infer = self._channel.unary_unary(f"{SERVICE}ModelInfer")
        self.response_bytes = 0

    def infer(self, request: bytes) -> None:
        """One request. Raises `RequestFailed`."""
        try:
            self._infer(request, timeout=self._timeout_s, metadata=self._metadata)
        except self._grpc.RpcError as error:
            raise RequestFailed(*_describe(error.code().name, error.details() or "")) from None

    def only_model(self) -> str:
        """The name of the server's model, where it has one alone. Raises `UsageError`."""
        with self._decoding():
            index = [value for number, value in self._fetch("RepositoryIndex", b"") if number == 1]
            parts = [dict(read_fields(value)) for value in index if isinstance(value, bytes)]
            return choose_model([read_text(part[1]) for part in parts if 1 in part])

    def read(self, target: Target) -> ServedModel:
        """The server and the model of the target. Raises `SetupError`, `UsageError`, `EngineError`."""
        with self._decoding():
            server = list(self._fetch("ServerMetadata", b""))
            model = list(self._fetch("ModelMetadata", metadata_request(target.model or "", target.version)))
            names = {number: read_text(value) for number, value in model if number in (1, 3)}
            inputs, outputs = (
                tuple(spec_of(*read_tensor(value)) for number, value in model if number == wanted) for wanted in (4, 5)
            )
            server_name = " ".join(read_text(value) for number, value in server if number in (1, 2))
            return ServedModel(
                server_name or "unknown",
                tuple(read_text(value) for number, value in server if number == 3),
                names.get(1, ""),
                tuple(read_text(value) for number, value in model if number == 2),
                Signature(inputs, outputs),
                {"platform": names[3]} if names.get(3) else {},
            )

    def close(self) -> None:
        self._channel.close()

    def _fetch(self, method: str, request: bytes) -> Iterator[tuple[int, int | bytes]]:
        try:
            answer = self._channel.unary_unary(SERVICE + method)(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
        except self._grpc.RpcError as error:
            code, text = error.code().name, error.details() or ""
            if _describe(code, text)[0] in (REFUSED, CONNECTION, TIMEOUT):
                raise unreachable(self._target, OSError(0, text or code)) from error
            kind = UsageError if code in _CALLER_ERRORS else SetupError if code == "UNAVAILABLE" else EngineError
            raise kind(
                f"`{method}` at {self._target.address} gives {code}: {text}", hint="`--model NAME` names a loaded model"
            ) from error
        return read_fields(answer)

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise EngineError(
                f"{self._target.address} does not answer in the protocol v2: {error}", hint="is the port a gRPC one?"
            ) from error


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

"""The load generator for each kind of target."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trt_engine.errors import DeadlineExpired, SetupError, TrtEngineError
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.tensors import Tensors
from trt_engine.verbs.loadtest.generator import Loop
from trt_engine.verbs.loadtest.grpc_client import MAX_METADATA, GrpcClient
from trt_engine.verbs.loadtest.http_loop import HttpLoop
from trt_engine.verbs.loadtest.http_response import HttpMetadata
from trt_engine.verbs.loadtest.inference_request import ServedModel
from trt_engine.verbs.loadtest.samples import TIMEOUT
from trt_engine.verbs.loadtest.target import Target, tls_context
from trt_engine.verbs.loadtest.threaded_loop import RequestFailed, ThreadedLoop

METADATA_TIMEOUT_S = 10.0


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
        tls = tls_context(target, ca_file)
        return _read_metadata(HttpMetadata(target, tls, token, METADATA_TIMEOUT_S), target)
    client = GrpcClient(target, ca_file=ca_file, token=token, timeout_s=METADATA_TIMEOUT_S, most=MAX_METADATA)
    try:
        return _read_metadata(client, target)
    finally:
        client.close()


def _read_metadata(client: HttpMetadata | GrpcClient, target: Target) -> tuple[Target, ServedModel]:
    if target.model is None:
        target = Target(
            target.interface, target.tls, target.host, target.port, target.base, client.only_model(), target.version
        )
    return target, client.read(target)


def engine_loop(
    runner: InferenceEngine, feeds: Tensors, *, concurrency: int, timeout_s: float, deadline_ms: float | None
) -> ThreadedLoop:
    """A generator that calls an engine in this process."""

    def call() -> None:
        try:
            if deadline_ms is None:
                runner.infer(feeds)
            else:
                runner.infer_async(feeds, deadline_ms=deadline_ms).result()
        except DeadlineExpired as error:
            raise RequestFailed(TIMEOUT, error.message) from None
        except TrtEngineError as error:
            raise RequestFailed(type(error).__name__, error.message) from None

    return ThreadedLoop(call, threads=concurrency, timeout_s=timeout_s)


def engine_facts(runner: Any) -> dict[str, str]:
    """What ran: provider, threads, precision."""
    return {str(name): str(value) for name, value in runner.runtime_info.items()}

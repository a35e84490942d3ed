"""`loadtest` on our own server: inputs in system shared memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import trt_engine as te
from serving.triton import fetch
from trt_engine.errors import UsageError
from trt_engine.serving.server import Server

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


def test_shared_memory_is_for_http_and_a_server(server: Server, engines: dict[str, Path]) -> None:
    with pytest.raises(UsageError, match="for HTTP"):
        te.loadtest(f"grpc://{server.grpc_address}/v2/models/double", shared_memory=True, **BRIEF)
    with pytest.raises(UsageError, match="`--shared-memory` is for a server"):
        te.loadtest(engines["double"], shared_memory=True, **BRIEF)

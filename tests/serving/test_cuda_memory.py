"""The CUDA shared memory extension, over the fake device: tritonclient registers, infers, reads back.

Handles are keys of buffers of the engine's device; tests/gpu/test_cuda_shared_memory.py has real ones.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

import trt_engine as te
from serving.conftest import double_model
from serving.triton import Client, fetch, ones
from trt_engine.device import Buffer, Device
from trt_engine.errors import FeedError, UnknownModel, UsageError
from trt_engine.verbs.serve import shared_memory as cuda_memory
from trt_engine.verbs.serve.inference import InferRequest, RegionPart, Service
from trt_engine.verbs.serve.server import Server


class Gpu:
    """The engine's fake device as a client sees it: memory by handle."""

    def __init__(self) -> None:
        self.device: Device
        self.buffers: dict[bytes, Buffer] = {}

    def allocate(self, nbytes: int) -> bytes:
        """A client's allocation; its handle."""
        handle = len(self.buffers).to_bytes(64, "little")
        self.buffers[handle] = self.device.allocate(nbytes)
        return handle

    def put(self, handle: bytes, array: Any, offset: int = 0) -> None:
        stream = self.device.stream()
        self.device.upload(array, self.buffers[handle].view(offset, array.nbytes), stream)
        stream.synchronize()

    def get(self, handle: bytes, nbytes: int, offset: int = 0) -> Any:
        stream, found = self.device.stream(), np.zeros(nbytes, np.uint8)
        self.device.download(self.buffers[handle].view(offset, nbytes), found, stream)
        stream.synchronize()
        return found.view(np.float32)

    def __call__(self, number: int, handle: bytes, size: int) -> tuple[Device, Buffer]:
        if number or handle not in self.buffers or size > self.buffers[handle].nbytes:
            raise UsageError("the handle cannot be opened", hint="another one")
        return self.device, self.buffers[handle]


@pytest.fixture(scope="module")
def gpu() -> Iterator[Gpu]:
    made = Gpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_memory, "RegionOpener", lambda: made)
        yield made


@pytest.fixture(scope="module")
def server(gpu: Gpu, serve: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Server:
    folder = tmp_path_factory.mktemp("fake")
    engine = te.build(
        double_model(folder / "double.onnx"), out=folder / "double.fake", backend="fake", device="fake:0",
        batch=(1, 2, 8), parity=False, store=te.Store(folder / "store"),
    )  # fmt: skip
    server = serve(f"double={engine.path}", shared_memory_prefix="/own_")
    device = service_of(server).repository.models["double"].versions["1"].device
    assert device is not None
    gpu.device = device
    return server


def service_of(server: Server) -> Service:
    assert server._service is not None
    return server._service


@pytest.fixture(params=["http", "grpc"])
def client(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    yield Client(request.param, server)
    service_of(server).cuda_memory.unregister()


def register(client: Client, name: str, handle: bytes, nbytes: int, device_id: int = 0) -> None:
    client.raw.register_cuda_shared_memory(name, base64.b64encode(handle), device_id, nbytes)


def infer(client: Client, name: str, rows: int, offset: int = 0, out: int = 128) -> Any:
    """`double` of rows at `offset` of the region, its output at `out` of it."""
    given = client.module.InferInput("x", [rows, 4], "FP32")
    given.set_shared_memory(name, 16 * rows, offset=offset)
    wanted = client.output("y")
    wanted.set_shared_memory(name, 16 * rows, offset=out)
    return client.raw.infer("double", [given], outputs=[wanted])


def test_inputs_and_outputs_in_gpu_memory(client: Client, gpu: Gpu) -> None:
    handle = gpu.allocate(256)
    gpu.put(handle, ones(2))
    register(client, "both", handle, 256)
    status = client.as_dict(client.raw.get_cuda_shared_memory_status())
    if client.protocol == "http":
        assert status == [{"name": "both", "device_id": 0, "byte_size": 256}]
    else:
        assert status == {"regions": {"both": {"name": "both", "byte_size": 256}}}  # JSON of protobuf leaves a 0 out
    for _ in range(20):  # more than the short runs after which others are made on the event loop
        infer(client, "both", 2)
    assert (gpu.get(handle, 32, 128).reshape(2, 4) == 2 * ones(2)).all()
    gpu.put(handle, ones(2) + 1)
    infer(client, "both", 2)
    assert (gpu.get(handle, 32, 128).reshape(2, 4) == 2 * (ones(2) + 1)).all()


def test_the_extension_is_advertised_where_an_engine_runs_on_a_gpu(
    client: Client, serve: Callable[..., Server], engines: dict[str, Path]
) -> None:
    found = client.as_dict(client.raw.get_server_metadata())["extensions"]
    assert "cuda_shared_memory" in found
    other = serve(engines["double"])
    assert "cuda_shared_memory" not in fetch(other, "/v2")[2]["extensions"]
    with pytest.raises(InferenceServerException, match="no loaded model runs on a GPU"):
        register(Client(client.protocol, other), "a", bytes(64), 64)


def test_an_input_is_used_in_place_where_it_is_aligned(server: Server, gpu: Gpu) -> None:
    service, handle = service_of(server), gpu.allocate(1024)
    served = service.repository.models["double"].versions["1"]
    gpu.put(handle, ones(2), 256)
    gpu.put(handle, ones(3), 512 + 16)
    service.cuda_memory.register("region", handle, 0, 1024)

    def read(shape: tuple[int, ...], part: RegionPart) -> tuple[Any, int]:
        request = InferRequest(feeds={"x": service.check_region(served, "x", "FP32", shape, part)})
        held = asyncio.run(service.read_regions(served, request))
        service.admission.forget(held)
        return request.feeds["x"], held

    found, held = read((2, 4), RegionPart("region", 32, 256))
    assert not isinstance(found, np.ndarray) and found.shape == (2, 4) and held == 0
    found, held = read((3, 4), RegionPart("region", 48, 528))
    assert isinstance(found, np.ndarray) and (found == ones(3)).all() and held == 48, "what is copied counts"
    with pytest.raises(FeedError, match="has 32 bytes, expected 48"):
        read((3, 4), RegionPart("region", 32, 256))
    service.cuda_memory.unregister("region")


def test_a_region_stays_as_long_as_a_request_uses_it(server: Server, gpu: Gpu) -> None:
    memory, handle = service_of(server).cuda_memory, gpu.allocate(256)
    memory.register("region", handle, 0, 256)
    array = memory.array("region", 0, 32, "float32", (2, 4), gpu.device)
    memory.unregister("region")
    assert array.buffer.pointer == gpu.buffers[handle].pointer
    with pytest.raises(UnknownModel, match="unknown region"):
        memory.read("region", 0, 32)


@pytest.mark.parametrize(
    ("size", "offset", "out", "text"),
    [(256, 256, 0, "outside the region"), (16, 0, 0, "outside the region"), (256, 0, 240, "outside the region")],
    ids=["input behind it", "input larger", "output behind it"],
)
def test_parts_outside_of_a_region(client: Client, gpu: Gpu, size: int, offset: int, out: int, text: str) -> None:
    handle = gpu.allocate(256)
    register(client, "small", handle, size)
    with pytest.raises(InferenceServerException, match=text):
        infer(client, "small", 2, offset, out)


def test_regions_that_cannot_be_registered(client: Client, gpu: Gpu) -> None:
    handle = gpu.allocate(64)
    register(client, "taken", handle, 64)
    for name, used, nbytes, device_id, text in (
        ("taken", handle, 64, 0, "registered already"), ("other", os.urandom(64), 64, 0, "cannot be opened"),
        ("other", handle, 65, 0, "cannot be opened"), ("other", handle, 64, 3, "cannot be opened"),
        ("other", handle, 0, 0, "0 bytes"),
    ):  # fmt: skip
        with pytest.raises(InferenceServerException, match=text):
            register(client, name, used, nbytes, device_id)
    with pytest.raises(InferenceServerException, match="registered already"):
        client.raw.register_system_shared_memory("taken", "/nothing", 64)
    client.raw.unregister_cuda_shared_memory("taken")
    register(client, "taken", handle, 64)


def test_a_handle_over_http_is_base64(server: Server) -> None:
    path = "/v2/cudasharedmemory/region/a/register"
    for body, text in (
        (b'{"raw_handle": {"b64": "?"}, "byte_size": 4}', "not base64"), (b'{"raw_handle": "AA"}', "needs a name"),
    ):  # fmt: skip
        status, _, answer = fetch(server, path, body)
        assert status == 400 and text in answer["error"]

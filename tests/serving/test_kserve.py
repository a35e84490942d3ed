"""KServe's own Python client, as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("kserve", reason="kserve is not installed")

import kserve

from serving.triton import ones
from trt_engine.verbs.serve.server import Server


@pytest.mark.parametrize("binary", [False, True])
def test_its_rest_client(engines: dict[str, Path], serve: Callable[..., Server], binary: bool) -> None:
    server = serve(engines["double"])

    async def call() -> None:
        client = kserve.InferenceRESTClient(config=kserve.RESTConfig(protocol="v2"))
        url = f"http://{server.http_address}"
        assert await client.is_server_live(url) and await client.is_server_ready(url)
        assert await client.is_model_ready(url, "double")
        given = kserve.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(ones(), binary_data=binary)
        request = kserve.InferRequest("double", [given], request_id="1")
        answer = await client.infer(url, request, model_name="double")
        np.testing.assert_array_equal(answer.outputs[0].as_numpy().reshape(1, 4), ones() * 2)
        await client.close()

    asyncio.run(call())


def test_its_grpc_client(engines: dict[str, Path], serve: Callable[..., Server]) -> None:
    server = serve(engines["double"])

    async def call() -> None:
        client = kserve.InferenceGRPCClient(server.grpc_address)
        assert await client.is_server_ready() and await client.is_model_ready("double")
        given = kserve.InferInput("x", [1, 4], "FP32")
        given.set_data_from_numpy(ones(), binary_data=True)
        answer = await client.infer(kserve.InferRequest("double", [given]))
        np.testing.assert_array_equal(answer.outputs[0].as_numpy().reshape(1, 4), ones() * 2)
        await client.close()

    asyncio.run(call())

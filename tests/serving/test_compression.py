"""What a request becomes in memory is bounded and counted: compressed ones, typed contents, strings; a lone one has room."""

from __future__ import annotations

import asyncio
import gzip
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from patience import HANG_S, until
from serving.triton import Client, fetch
from trt_engine.errors import FeedError, Overloaded, UsageError
from trt_engine.open_inference.messages import INFERENCE_SERVICE, message
from trt_engine.open_inference.wire_tensors import decode_tensor
from trt_engine.verbs.serve.grpc_codec import parse_infer
from trt_engine.verbs.serve.inference import Admission, count_bytes, decompress
from trt_engine.verbs.serve.server import Server

Request: Any = message("ModelInferRequest")


def request_of(model: str, values: np.ndarray[Any, Any], **more: Any) -> Any:
    made = Request(model_name=model, **more)
    made.inputs.add(name="x", datatype="FP32", shape=values.shape)
    made.raw_input_contents.append(values.tobytes())
    return made


def call(server: Server, request: Any, compression: grpc.Compression, stream: bool = False) -> list[Any]:
    """The answers to a request, or to a stream that has it twice."""
    answer = message("ModelStreamInferResponse" if stream else "ModelInferResponse")
    with grpc.insecure_channel(server.grpc_address) as channel:
        made: Any = (channel.stream_stream if stream else channel.unary_unary)(
            f"/{INFERENCE_SERVICE}/{'ModelStreamInfer' if stream else 'ModelInfer'}",
            request_serializer=lambda each: each.SerializeToString(),
            response_deserializer=answer.FromString,
        )
        if stream:
            return [each.infer_response for each in made(iter([request] * 2), compression=compression, timeout=HANG_S)]
        return [made(request, compression=compression, timeout=HANG_S)]


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate], ids=["gzip", "deflate"])
def test_a_compressed_message_is_answered_and_grows_no_further_than_its_model_takes(
    engines: dict[str, Path], serve: Callable[..., Server], compression: grpc.Compression, stream: bool
) -> None:
    server = serve(engines["double"], max_json="1MiB")
    for answer in call(
        server, request_of("double", np.ones((8, 4), np.float32), id="a" * 100_000), compression, stream
    ):
        assert (len(answer.id), answer.raw_output_contents[0]) == (100_000, np.full(32, 2, np.float32).tobytes())
    assert server._service is not None
    admission = server._service.admission
    admission.take_peak()
    for model in ("double", "none"):
        bomb = request_of(model, np.zeros((1 << 20, 4), np.float32))
        if stream:
            made = call(server, bomb, compression, stream)
            assert len(made) == 2 and not any(each.raw_output_contents for each in made)
        else:
            with pytest.raises(grpc.RpcError) as caught:
                call(server, bomb, compression)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "without its encoding" in caught.value.details()
        assert admission.take_peak() < 2 << 20 and admission.nbytes == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_answers_are_compressed_for_clients_that_accept_it(
    engines: dict[str, Path], serve: Callable[..., Server], encoding: str
) -> None:
    server, values = serve(engines["double"]), np.ones((8, 4), np.float32)
    plain = fetch(server, "/metrics")[2]
    for accepted, expected in ((f"br, {encoding};q=0.5", encoding), (f"{encoding};q=0", None), ("br", None)):
        request = urllib.request.Request(f"http://{server.http_address}/metrics", headers={"Accept-Encoding": accepted})
        with urllib.request.urlopen(request) as answer:
            raw = answer.read()
        assert answer.headers["vary"] == (expected and "accept-encoding")
        assert answer.headers["content-encoding"] == expected and int(answer.headers["content-length"]) == len(raw)
        text = zlib.decompress(raw, 31 if encoding == "gzip" else 15) if expected else raw
        assert text[:99] == plain[:99].encode() and (len(raw) < len(plain) / 2) is (expected is not None)
    client = Client("http", server)
    inputs = [client.input("x", values)]
    found = client.raw.infer("double", inputs, request_id="a" * 5000, response_compression_algorithm=encoding)
    np.testing.assert_array_equal(found.as_numpy("y"), 2 * values)
    client.raw.close()
    request, kind = request_of("double", values), getattr(grpc.Compression, encoding.capitalize())
    request.id, seen = "a" * 5000, {}
    with grpc.insecure_channel(server.grpc_address, [("grpc.per_message_decompression", 0)]) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", Request.SerializeToString, bytes)
        for asked in (grpc.Compression.NoCompression, kind):  # gRPC: as the request came
            seen[asked] = ask(request, compression=asked)
    assert zlib.decompress(seen.pop(kind), 47) == seen[grpc.Compression.NoCompression]


def test_a_crowd_of_requests_that_grow_as_no_data_does_takes_an_eighth_of_the_memory() -> None:
    admission, size = Admission(100, 1 << 30), 100 << 20
    bomb = gzip.compress(bytes(size))

    async def receive() -> int:
        found, counted = await decompress(b"gzip", bomb, size, admission)
        assert len(found) == size
        return counted

    counted = asyncio.run(receive())
    assert admission.nbytes == counted > 7 * size
    with pytest.raises(Overloaded, match="no room"):
        asyncio.run(receive())
    assert admission.nbytes == counted
    for sent, nbytes in ((1 << 20, 16 << 20), (100, 4 << 20)):
        assert count_bytes(nbytes, sent) == nbytes, "as data may"


def test_typed_contents_and_strings_take_no_more_memory_than_json_may() -> None:
    typed = Request(model_name="m")
    typed.inputs.add(name="x").contents.int64_contents.extend([0] * 20_000)
    assert parse_infer(typed.SerializeToString(), 30_000).nbytes > 20_000
    with pytest.raises(UsageError, match="beside `raw_input_contents`, 10000 are allowed") as caught:
        parse_infer(typed.SerializeToString(), 10_000)
    assert "--max-json" in str(caught.value.hint)
    for count, nbytes in ((1 << 22, 1 << 24), (1, (1 << 26) + 4)):
        with pytest.raises(FeedError, match="are allowed"):
            decode_tensor("x", "BYTES", (count,), bytes(nbytes))


def test_the_only_request_is_answered_however_many_reads_it_takes(
    engines: dict[str, Path], serve: Callable[..., Server]
) -> None:
    server = serve(engines["double"], grpc_port=-1, max_in_flight_size="1KiB")
    path = "/v2/models/double/infer"
    body = b'{"id": "%s", "inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,1,1,1]}]}' % (
        b"a" * 2_000_000
    )
    for _ in range(2):
        assert fetch(server, path, body)[0] == 200
    assert fetch(server, path, gzip.compress(body), Content_Encoding="gzip")[0] == 200
    assert server._service is not None
    admission = server._service.admission
    until(lambda: admission.nbytes == 0, "nothing counts any more")

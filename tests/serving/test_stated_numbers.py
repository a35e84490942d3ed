"""Every integer that a request states is compared before it is used: one table of them for HTTP and gRPC."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from serving.hostile_numbers import PLACES, REGION, VALUES, Sender
from serving.triton import fetch
from trt_engine.errors import UsageError
from trt_engine.open_inference.messages import message
from trt_engine.verbs.serve.grpc_codec import parse_infer, read_model_name
from trt_engine.verbs.serve.inference import find_encoding
from trt_engine.verbs.serve.server import Server

Request: Any = message("ModelInferRequest")


def drawn_request(pick: random.Random) -> Any:
    made = Request(model_name=pick.choice(("", "m", "m" * 300)), id="7")
    for _ in range(pick.randrange(4)):
        item = made.inputs.add(name="x", datatype="FP32", shape=[pick.choice((-1, 0, 4, 2**62))] * pick.randrange(3))
        item.parameters["a"].int64_param = -1
        made.raw_input_contents.append(pick.randbytes(pick.choice((0, 1, 127, 128, 70_000))))
    return made


def test_a_grpc_request_taken_apart_is_the_one_that_protobuf_reads() -> None:
    pick = random.Random(0)
    for _ in range(300):
        made = drawn_request(pick)
        fields = [made.SerializeToString(), b"\x98\x06\x01", b"\xa1\x06" + bytes(8), b"\xa5\x06" + bytes(4)]
        raw = b"".join(pick.sample(fields, len(fields)))  # unknown fields of each kind before and behind
        found = parse_infer(raw)
        assert not find_encoding(made.SerializeToString()), "it is not taken for a compressed one"
        assert read_model_name(made.SerializeToString()[:4096])[0] == made.model_name
        assert [bytes(view) for view in found.contents] == [*made.raw_input_contents]
        del made.raw_input_contents[:]
        assert (found.message.inputs, found.message.id, found.nbytes) == (made.inputs, "7", len(raw))


def test_damaged_grpc_requests_and_those_of_endless_fields_are_refused() -> None:
    pick = random.Random(1)
    for _ in range(500):
        raw = bytearray(drawn_request(pick).SerializeToString()[:400] or b"\0")
        for _ in range(pick.randrange(1, 4)):
            raw[pick.randrange(len(raw))] = pick.randrange(256)
        try:
            parse_infer(bytes(raw))
        except UsageError as error:
            assert "is not a `ModelInferRequest`" in error.message
    for field in (b"\x2a\x00", b"\x3a\x00", b"\x32\x00", b"\x22\x00", b"\x98\x06\x01"):
        with pytest.raises(UsageError, match="more than 16384"):
            parse_infer(field * 20_000)


@pytest.fixture(scope="module")
def server(engines: dict[str, Path], serve: Callable[..., Server]) -> Server:
    return serve(engines["double"], shared_memory_prefix=f"/{REGION}")


def wrong_answers(server: Server, cases: Iterable[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Place, value and fault of what the server answers wrongly."""
    region = Path("/dev/shm") / REGION
    region.write_bytes(bytes(1 << 12))
    sender, wrong = Sender(str(server.http_address), str(server.grpc_address)), []
    try:
        body = json.dumps({"key": REGION, "byte_size": 4096}).encode()
        assert fetch(server, f"/v2/systemsharedmemory/region/{REGION}/register", body)[0] == 200
        for place, value in cases:
            answer = PLACES[place](sender, VALUES[value])
            if answer.wrong:
                wrong.append((place, value, answer.wrong, answer.status, answer.text[:200]))
        assert fetch(server, "/v2/health/ready")[0] == 200
    finally:
        fetch(server, "/v2/systemsharedmemory/unregister", b"")
        region.unlink()
        sender.close()
    return wrong


CASES = [*itertools.product(PLACES, VALUES)]
GRAVEST = [("HTTP binary: inputs.0.shape", "10^5 of 2^62"), ("gRPC: shape", "10^5 of 2^62")]


@pytest.mark.parametrize(
    "cases",
    [GRAVEST + random.Random(0).sample(CASES, 50), pytest.param(CASES, marks=pytest.mark.slow)],
    ids=["sample", "all"],
)
def test_no_number_that_a_request_states_is_used_before_it_is_compared(
    server: Server, cases: list[tuple[str, str]]
) -> None:
    before = psutil.Process().memory_info().rss
    assert wrong_answers(server, cases) == []
    assert server._service is not None and server._service.admission.nbytes == 0
    assert psutil.Process().memory_info().rss - before < 300 << 20

"""Every integer that a request states is compared before it is used: one table of them for HTTP and gRPC."""

from __future__ import annotations

import random
from typing import Any

import pytest

from trt_engine.errors import UsageError
from trt_engine.serving.grpc_codec import parse_infer
from trt_engine.serving.messages import message

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
        assert [bytes(view) for view in found.contents] == [*made.raw_input_contents]
        del made.raw_input_contents[:]
        assert (found.message.inputs, found.message.id, found.nbytes) == (made.inputs, "7", len(raw))


def test_damaged_grpc_requests_and_those_of_endless_fields_are_refused() -> None:
    pick = random.Random(1)
    for _ in range(2000):
        raw = bytearray(drawn_request(pick).SerializeToString()[:400] or b"\0")
        for _ in range(pick.randrange(1, 4)):
            raw[pick.randrange(len(raw))] = pick.randrange(256)
        try:
            parse_infer(bytes(raw))
        except UsageError as error:
            assert "is not a `ModelInferRequest`" in error.message
    for field in (b"\x2a\x00", b"\x3a\x00", b"\x32\x00", b"\x22\x00", b"\x98\x06\x01"):
        with pytest.raises(UsageError, match="more than 16384"):
            parse_infer(field * 1_000_000)

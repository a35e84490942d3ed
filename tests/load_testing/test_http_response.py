"""Responses are framed by RFC 9112, however the bytes arrive."""

from __future__ import annotations

import pytest

from trt_engine.verbs.loadtest.http_response import MAX_HEAD_BYTES, BadResponse, ResponseReader

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A: b\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;name=value\r\nhello\r\n00A\r\n0123456789\r\n0\r\nX-T: 1\r\n\r\n"
)
RESPONSES = {
    "plain": (PLAIN, 200, True),
    "empty": (b"HTTP/1.1 200 OK\r\ncontent-length:0\r\n\r\n", 200, True),
    "chunked": (CHUNKED, 200, True),
    "chunked, no trailer": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n", 200, True),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, True),
    "interim first": (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, 200, True),
    "error": (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 4\r\n\r\nfull", 503, True),
    "closes": (b"HTTP/1.1 200 OK\r\nConnection: Close\r\nContent-Length: 1\r\n\r\nx", 200, False),
    "1.0": (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", 200, False),
    "1.0 kept": (b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 1\r\n\r\nx", 200, True),
    "no reason": (b"HTTP/1.1 200 \r\nContent-Length: 1\r\n\r\nx", 200, True),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_complete_at_its_last_byte_however_it_is_cut(name: str) -> None:
    raw, status, keep = RESPONSES[name]
    for cut in range(1, len(raw)):
        reader = ResponseReader()
        assert not reader.feed(raw[:cut])
        assert reader.feed(raw[cut:])
        assert (reader.status, reader.keep_alive, reader.nbytes) == (status, keep, len(raw))
    reader = ResponseReader()
    assert [reader.feed(bytes([byte])) for byte in raw] == [False] * (len(raw) - 1) + [True]


def test_without_a_length_the_end_of_the_connection_is_the_end() -> None:
    reader = ResponseReader()
    assert not reader.feed(b"HTTP/1.1 200 OK\r\n\r\nany") and not reader.feed(b"thing")
    assert reader.end() and not reader.keep_alive
    cut = ResponseReader()
    cut.feed(PLAIN[:-1])
    assert not cut.end()


def test_the_text_of_an_error_is_kept() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 9\r\n\r\nbad shape")
    assert reader.text == "bad shape"
    reader.reset()
    assert reader.text == "" and not reader.nbytes


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 4 4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 2000,
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * MAX_HEAD_BYTES,
        PLAIN + b"more",
    ],
)
def test_what_is_not_a_response_is_refused(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseReader().feed(raw)

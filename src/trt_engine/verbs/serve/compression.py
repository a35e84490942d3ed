"""Requests without their compression, counted as they grow; answers in the one that their client accepts."""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import Iterable
from typing import Any

from trt_engine.errors import Overloaded, UsageError
from trt_engine.verbs.serve.admission import Admission

_STEP = 1 << 22
"""Bytes between two looks at the limits."""
_SMALL = 1 << 16
_GROWTH, _WEIGHT = 16, 8
_REFUSED = re.compile(rb"\s*q\s*=\s*0(\.0*)?\s*")
_LEVEL = 1
"""zlib's fastest: an answer waits for it."""
_FULL = "the server has no room for the request"


class RequestTooLarge(UsageError):
    """A request that is larger without its encoding than the server takes."""

    http_status = 413


def find_encoding(raw: bytes) -> bytes:
    """`gzip` or `deflate` of a gRPC message that is compressed, else nothing: no message of a protocol begins so."""
    if raw[:2] == b"\x1f\x8b":
        return b"gzip"
    return b"deflate" if raw[:1] == b"\x78" and int.from_bytes(raw[:2], "big") % 31 == 0 else b""


def accepted_encoding(value: bytes) -> bytes:
    """The first of `gzip` and `deflate` in an `Accept-Encoding`; nothing where it has neither."""
    for item in value.lower().split(b","):
        name, _, weight = item.partition(b";")
        if name.strip() in (b"gzip", b"deflate") and not _REFUSED.fullmatch(weight):
            return name.strip()
    return b""


def compress(encoding: bytes, parts: Iterable[Any]) -> bytes:
    """The parts of an answer as one `gzip` or `deflate` stream."""
    deflater = zlib.compressobj(_LEVEL, zlib.DEFLATED, _window(encoding))
    return b"".join([*map(deflater.compress, parts), deflater.flush()])


def peek(encoding: bytes, body: bytes | memoryview, nbytes: int) -> bytes:
    """The first bytes of the body without its encoding; fewer, or none, of a damaged one."""
    try:
        return _inflater(encoding).decompress(body[:nbytes], nbytes)
    except zlib.error:
        return b""


def count_bytes(nbytes: int, sent: int) -> int:
    """What a body of `nbytes` counts that came as `sent`: one that grows as no data does pays for its answer as well.

    Bytes beyond 4 MiB and 16 times what was sent count eight times: a crowd of small requests, whose answers may be
    as large, stays well below `--max-in-flight-size`.
    """
    return nbytes + (_WEIGHT - 1) * max(0, nbytes - max(_GROWTH * sent, _STEP))


async def decompress(
    encoding: bytes, body: bytes | memoryview, most: int, admission: Admission, held: int = 0
) -> tuple[bytearray, int]:
    """The body without its encoding, and how many bytes count for it (`count_bytes`): the caller forgets them.

    `held` are the bytes of this request that count already. Raises an error, with nothing counted, for a body that is
    damaged, has more than `most` bytes, or more than the server has room for.
    """
    inflater, found, counted = _inflater(encoding), bytearray(), 0
    try:
        while not inflater.eof:
            step = min(_STEP if found else _SMALL, most + 1 - len(found))
            rest = inflater.unconsumed_tail if found else body
            if found:
                piece = await asyncio.to_thread(inflater.decompress, rest, step)
            else:
                piece = inflater.decompress(rest, step)
            if len(found) + len(piece) > most:
                raise RequestTooLarge(f"the request has more than {most} bytes without its encoding")
            if not piece and not inflater.eof:
                break
            more = count_bytes(len(found) + len(piece), len(body)) - counted
            if not admission.receive(more, held + counted):
                raise Overloaded(_FULL, hint="retry later; `--max-in-flight-size` sets the limit")
            counted += more
            found += piece
        if not inflater.eof or inflater.unused_data:
            raise UsageError(f"the body is not one whole {encoding.decode()} stream")
    except zlib.error as error:
        admission.forget(counted)
        raise UsageError(f"the body is not valid {encoding.decode()}: {error}") from None
    except BaseException:
        admission.forget(counted)
        raise
    return found, counted


def _inflater(encoding: bytes) -> zlib._Decompress:
    return zlib.decompressobj(_window(encoding))


def _window(encoding: bytes) -> int:
    return 31 if encoding == b"gzip" else 15

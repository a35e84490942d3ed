"""HTTP/1.1 responses, read from a stream in pieces of any size: status, length of the body, whether the connection stays.

The body is counted and dropped. Framing by RFC 9112, section 6: no body for 1xx, 204 and 304, else chunks, else
`Content-Length`, else the end of the connection.
"""

from __future__ import annotations

import re
from typing import Literal

MAX_HEAD_BYTES = 1 << 16
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?:[ \r]|$)")
_CHUNK = re.compile(rb"(?:\r\n)?([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_MAX_CHUNK_LINE = 1 << 10
_MAX_TEXT = 300


class BadResponse(Exception):
    """Bytes that are not an HTTP/1.1 response."""


class ResponseReader:
    """One response after another from one connection."""

    __slots__ = ("_buffer", "_left", "_stage", "head", "keep_alive", "length", "nbytes", "status", "text")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin the next response."""
        self.status = self.nbytes = self._left = 0
        self.keep_alive = True
        self.head = b""
        """The head with its empty line, once it is complete."""
        self.length: int | None = None
        """`Content-Length`; None for a response that is framed otherwise."""
        self.text = ""
        """The beginning of the body of an error response."""
        self._buffer = b""
        self._stage: Literal["head", "body", "chunk", "chunk end", "trailer", "until close", "done"] = "head"

    @property
    def begun(self) -> bool:
        return bool(self.nbytes)

    def feed(self, data: bytes) -> bool:
        """True once the response is complete. Raises `BadResponse`, also for bytes after its end."""
        self.nbytes += len(data)
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        while data and self._stage != "done":
            rest = self._step(data)
            if rest is None:
                self._buffer = data
                return False
            data = rest
        if data:
            raise BadResponse(f"{len(data)} bytes after the end of the response")
        return self._stage == "done"

    def end(self) -> bool:
        """The connection was closed: whether that completes the response."""
        return self._stage == "until close"

    def _step(self, data: bytes) -> bytes | None:
        """Consume one part; what follows it, or None where it is not complete."""
        if self._stage == "head":
            return self._read_head(data)
        if self._stage == "until close":
            return b""
        if self._stage in ("body", "chunk"):
            taken = min(self._left, len(data))
            self._left -= taken
            if self.status != 200 and len(self.text) < _MAX_TEXT:
                self.text += data[: min(taken, _MAX_TEXT)].decode(errors="replace")
            if not self._left:
                self._stage = "done" if self._stage == "body" else "chunk end"
            return data[taken:]
        if self._stage == "trailer":
            return self._read_trailer(data)
        return self._read_chunk_size(data)

    def _read_head(self, data: bytes) -> bytes | None:
        at = data.find(b"\r\n\r\n")
        if at < 0:
            if len(data) > MAX_HEAD_BYTES or not data.startswith(b"HTTP/1."[: len(data)]):
                raise BadResponse(f"expected the head of a response, found {data[:20]!r}")
            return None
        head = data[: at + 4]
        match = _STATUS.match(head)
        if match is None:
            raise BadResponse(f"expected a status line, found {head[:20]!r}")
        self.head, self.status = head, int(match[2])
        fields = _fields(head)
        options = fields.get(b"connection", b"").lower()
        self.keep_alive = b"close" not in options and (match[1] == b"1" or b"keep-alive" in options)
        if 100 <= self.status < 200:
            return data[at + 4 :]  # an interim response: the real one follows
        if self.status in (204, 304):
            self.length, self._stage = 0, "done"
        elif b"chunked" in fields.get(b"transfer-encoding", b"").lower():
            self._stage = "chunk end"
        elif b"content-length" in fields:
            if not fields[b"content-length"].isdigit() or len(fields[b"content-length"]) > 18:
                raise BadResponse(f"`Content-Length` is {fields[b'content-length'][:20]!r}")
            self.length = self._left = int(fields[b"content-length"])
            self._stage = "body" if self._left else "done"
        else:
            self.keep_alive, self._stage = False, "until close"
        return data[at + 4 :]

    def _read_chunk_size(self, data: bytes) -> bytes | None:
        match = _CHUNK.match(data)
        if match is None:
            if len(data) > _MAX_CHUNK_LINE or b"\n" in data.lstrip(b"\r\n"):
                raise BadResponse(f"expected the size of a chunk, found {data[:20]!r}")
            return None
        self._left = int(match[1], 16)
        self._stage = "chunk" if self._left else "trailer"
        return data[match.end() :]

    def _read_trailer(self, data: bytes) -> bytes | None:
        """Header fields after the last chunk, up to an empty line."""
        end = 0 if data.startswith(b"\r\n") else data.find(b"\r\n\r\n") + 2
        if end == 1:
            if len(data) > MAX_HEAD_BYTES:
                raise BadResponse("the trailer has no end")
            return None
        self._stage = "done"
        return data[end + 2 :]


def _fields(head: bytes) -> dict[bytes, bytes]:
    pairs = (field.partition(b":") for field in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}

"""A request over HTTP: its header, and its body in the memory that its tensors are used in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trt_engine.open_inference.wire_tensors import aligned_buffer

Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, list[Any]]
"""Status, headers, and the parts of the body."""
_NOTHING = memoryview(b"")


@dataclass(slots=True)
class Route:
    """Where a request goes, and the names in its path."""

    name: str
    model: str = ""
    version: str = ""
    memory: str = ""
    """`system` or `cuda`."""

    @property
    def is_inference(self) -> bool:
        return self.name in ("infer", "image")


@dataclass(slots=True)
class HttpRequest:
    """A request whose header has come, and its body as far as it has come."""

    headers: Headers
    route: Route = field(default_factory=lambda: Route(""))
    length: int | None = None
    """Bytes of the body; None where they are not announced."""
    json_length: int | None = None
    """Bytes of JSON before the tensors; None: all of the body."""
    encoding: bytes = b""
    accepts: bytes = b""
    """The encoding that the answer may have."""
    most: int = 0
    """Bytes that the body may have."""
    begun: bool = True
    """Whether it came before the server refused new requests."""
    is_head: bool = False
    """Whether the answer is its header alone."""
    is_old: bool = False
    """Whether it is one of HTTP/1.0."""
    keep_alive: bool = True
    """Whether the connection stays after the answer."""
    awaits_continue: bool = False
    """Whether the client waits for leave to send the body."""
    is_complete: bool = False
    refusal: Answer | None = None
    """The answer to a request that is refused before its body has come."""
    filled: int = 0
    """Bytes that count: those of the body that have come, and what counts for their expansion."""
    entered: bool = False
    """Whether it is counted as a request."""
    _memory: memoryview = _NOTHING
    _chunks: bytearray | None = None

    def add(self, chunk: bytes) -> None:
        """Put the next bytes behind the `filled` ones; a body in one piece is not copied."""
        if self.length is None:
            self._chunks = self._chunks or bytearray()
            self._chunks += chunk
        elif len(chunk) == self.length:
            self._memory = memoryview(chunk)
        else:
            self.rest()[: len(chunk)] = chunk

    def rest(self) -> memoryview:
        """Where the bytes of an announced body that have not come go; the tensor after the JSON is aligned."""
        assert self.length is not None
        if not self._memory:
            self._memory = self._aligned(self.length)
        return self._memory[self.filled :]

    def _aligned(self, nbytes: int) -> memoryview:
        return aligned_buffer(nbytes, min(self.json_length or 0, nbytes))

    def take(self) -> memoryview:
        """The whole body, which is not kept here."""
        if self._chunks is not None:
            self._memory = self._aligned(len(self._chunks))
            self._memory[:] = self._chunks
            self._chunks = None
        found, self._memory = self._memory, _NOTHING
        return found

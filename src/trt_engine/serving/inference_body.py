"""The body of an inference over HTTP, received into the memory that its tensors are used in."""

from __future__ import annotations

from dataclasses import dataclass

from trt_engine.serving.wire_tensors import aligned_buffer

_NOTHING = memoryview(b"")


@dataclass(slots=True)
class InferenceBody:
    """A request's path and headers, and its body as far as it has come."""

    path: str
    headers: list[tuple[bytes, bytes]]
    length: int
    header: int | None
    """Bytes of JSON before the tensors; None: all of it."""
    filled: int = 0
    entered: bool = False
    """Whether it is counted as a request."""
    _memory: memoryview = _NOTHING

    def add(self, chunk: bytes) -> None:
        """Put the next bytes behind the `filled` ones; a body in one piece is not copied."""
        if len(chunk) == self.length:
            self._memory = memoryview(chunk)
        else:
            self.rest()[: len(chunk)] = chunk

    def rest(self) -> memoryview:
        """Where the bytes that have not come go; the tensor after the JSON is aligned."""
        if not self._memory:
            self._memory = aligned_buffer(self.length, min(self.header or 0, self.length))
        return self._memory[self.filled :]

    @property
    def complete(self) -> bool:
        return self.filled == self.length

    def take(self) -> memoryview:
        """The whole body, which is not kept here."""
        found, self._memory = self._memory, _NOTHING
        return found

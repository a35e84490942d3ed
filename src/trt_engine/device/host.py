"""The host as a device: aligned memory, a stream that works at once, graphs that are recorded closures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.device import Event, Graph, Stream
from trt_engine.errors import MemoryExhausted, UsageError

__all__ = ["HostBuffer", "HostDevice", "HostEvent", "HostGraph", "HostStream", "bytes_of"]

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load of today's processors."""

Bytes = npt.NDArray[np.uint8]


def bytes_of(array: Any) -> Bytes:
    """The bytes of a C-contiguous array, without a copy; `UsageError` for anything a device cannot copy as it lies."""
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(f"a {kind} array cannot be copied to a device", hint="numbers and booleans can")
    if not array.flags.c_contiguous:
        raise UsageError("a strided array cannot be copied as it lies", hint="numpy.ascontiguousarray")
    return array.reshape(-1).view(np.uint8)


class HostBuffer:
    """Host memory that begins on a cache line."""

    def __init__(self, nbytes: int) -> None:
        try:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        except MemoryError as error:
            raise MemoryExhausted(
                f"the host has no {nbytes} bytes left for a buffer", hint="a smaller batch, or fewer contexts"
            ) from error
        start = -raw.ctypes.data % ALIGNMENT
        self._memory: Bytes | None = raw[start : start + nbytes]
        self._nbytes = nbytes
        self._pointer = int(raw.ctypes.data) + start

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def pointer(self) -> int:
        self.memory()
        return self._pointer

    def memory(self) -> Bytes:
        """The bytes themselves; `UsageError` after `close`."""
        if self._memory is None:
            raise UsageError("a closed buffer was used", hint="allocate another")
        return self._memory

    def close(self) -> None:
        self._memory = None


class HostEvent:
    """The host's clock at a point of the stream's work."""

    def __init__(self) -> None:
        self.at_ns: int | None = None

    def elapsed_ms(self, since: Event) -> float:
        if not isinstance(since, HostEvent) or self.at_ns is None or since.at_ns is None:
            raise UsageError("an event of a graph has no time before a replay", hint="replay the graph first")
        return (self.at_ns - since.at_ns) / 1e6

    def _mark(self) -> None:
        self.at_ns = time.perf_counter_ns()


class HostGraph:
    """Recorded work; `replay` runs it again."""

    def __init__(self, work: list[Callable[[], None]]) -> None:
        self._work: list[Callable[[], None]] | None = work

    def replay(self, stream: Stream) -> None:
        if self._work is None:
            raise UsageError("a closed graph was replayed", hint="capture another")
        if not isinstance(stream, HostStream):
            raise UsageError("a graph of the host was replayed on another device", hint="capture it there")
        for step in self._work:
            stream.enqueue(step)

    def close(self) -> None:
        self._work = None


class HostStream:
    """A stream whose work is done before `enqueue` returns, except while a graph is captured."""

    def __init__(self) -> None:
        self._recording: list[Callable[[], None]] | None = None
        self._closed = False

    def enqueue(self, step: Callable[[], None]) -> None:
        """Run `step` now, or record it for the graph that is being captured."""
        if self._closed:
            raise UsageError("a closed stream was used", hint="open another")
        if self._recording is not None:
            self._recording.append(step)
        else:
            step()

    def synchronize(self) -> None:
        if self._recording is not None:
            raise UsageError("a stream cannot be waited for while it is captured", hint="synchronize after the capture")

    def record(self) -> HostEvent:
        event = HostEvent()
        self.enqueue(event._mark)
        return event

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        if self._recording is not None:
            raise UsageError("a capture is under way on this stream", hint="one capture at a time")
        recorded: list[Callable[[], None]] = []
        self._recording = recorded
        try:
            work(self)
        finally:
            self._recording = None
        return HostGraph(recorded)

    def close(self) -> None:
        self._closed = True


class HostDevice:
    """The processor and its memory."""

    name = "cpu"

    def allocate(self, nbytes: int) -> HostBuffer:
        return HostBuffer(nbytes)

    def stream(self) -> HostStream:
        return HostStream()

    def upload(self, array: Any, buffer: Any, stream: Any) -> None:
        source = bytes_of(array)
        if source.nbytes > buffer.nbytes:
            raise UsageError(
                f"{source.nbytes} bytes do not fit a buffer of {buffer.nbytes}", hint="allocate a larger one"
            )
        stream.enqueue(lambda: np.copyto(buffer.memory()[: source.nbytes], source))

    def download(self, buffer: Any, array: Any, stream: Any) -> None:
        target = bytes_of(array)
        if target.nbytes > buffer.nbytes:
            raise UsageError(
                f"{target.nbytes} bytes cannot be read from a buffer of {buffer.nbytes}", hint="a smaller array"
            )
        stream.enqueue(lambda: np.copyto(target, buffer.memory()[: target.nbytes]))

    def close(self) -> None:
        """Nothing to give back: buffers own their memory."""

"""A device that does not exist and keeps the rules of one that does, so that breaking them shows on any machine.

Fresh memory is 0xCD and freed memory raises; what a stream is given happens at `synchronize` and not before, copies
included; a graph replays the closures it captured, and refuses when what it holds has changed or gone; nothing is
allocated during a capture; memory ends at a limit; what was not given back can be counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trt_engine.device import Event, Graph, Stream
from trt_engine.device.host import Bytes, bytes_of
from trt_engine.errors import MemoryExhausted, UsageError

__all__ = ["FakeBuffer", "FakeDevice", "FakeEvent", "FakeGraph", "FakeStream"]

FRESH, FREED = 0xCD, 0xDD
_PAGE = 256
"""Addresses are multiples of this, as CUDA's are."""

log = logging.getLogger(__name__)


class FakeBuffer:
    """Memory of a fake device."""

    def __init__(self, device: FakeDevice, nbytes: int, pointer: int) -> None:
        self.device = device
        self._nbytes = nbytes
        self._pointer = pointer
        self._bytes: Bytes | None = np.full(nbytes, FRESH, np.uint8)

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def pointer(self) -> int:
        """An address that means nothing to the host; `UsageError` after `close`."""
        self.memory()
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._bytes is None

    def memory(self) -> Bytes:
        """The bytes, for the device's own work alone; `UsageError` after `close`."""
        if self._bytes is None:
            raise UsageError("a freed buffer was used", hint="keep it open until the stream is done with it")
        return self._bytes

    def close(self) -> None:
        if self._bytes is not None:
            self._bytes[:] = FREED
            self._bytes = None
            self.device._give_back(self._nbytes)


@dataclass(frozen=True, slots=True)
class _Work:
    """One thing a stream was given: what to do, the buffers it touches, and whether it may still be done."""

    step: Callable[[], None]
    buffers: tuple[FakeBuffer, ...]
    stale: Callable[[], str | None] | None


class FakeEvent:
    """A point in a fake stream's work."""

    def __init__(self, stream: FakeStream) -> None:
        self._stream = stream
        self.at_ns: int | None = None

    def elapsed_ms(self, since: Event) -> float:
        if not isinstance(since, FakeEvent):
            raise UsageError("two events of different devices were compared", hint="record both on one device")
        return (self._wait() - since._wait()) / 1e6

    def _wait(self) -> int:
        if self.at_ns is None:
            self._stream.synchronize()
        if self.at_ns is None:
            raise UsageError("an event was never reached: its work failed or was captured", hint="record another")
        return self.at_ns

    def _mark(self) -> None:
        self.at_ns = time.perf_counter_ns()


class FakeGraph:
    """Captured work of a fake device."""

    def __init__(self, work: Sequence[_Work]) -> None:
        self._work: Sequence[_Work] | None = work

    def replay(self, stream: Stream) -> None:
        """Put the captured work on the stream; `UsageError` when a buffer is gone or a context was prepared again."""
        if self._work is None:
            raise UsageError("a closed graph was replayed", hint="capture another")
        if not isinstance(stream, FakeStream):
            raise UsageError("a graph of the fake device was replayed on another device", hint="capture it there")
        for work in self._work:
            if any(buffer.closed for buffer in work.buffers):
                raise UsageError("a graph holds the address of a freed buffer", hint="capture it again")
            if work.stale is not None and (reason := work.stale()):
                raise UsageError(f"a graph is out of date: {reason}", hint="capture it again")
        for work in self._work:
            stream._put(work)

    def close(self) -> None:
        self._work = None


class FakeStream:
    """Work in order, done when somebody waits for it and not earlier."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._pending: deque[_Work] = deque()
        self._recording: list[_Work] | None = None
        self._running = threading.RLock()  # a stream does one thing at a time, whoever waits for it
        self._closed = False

    def enqueue(
        self,
        step: Callable[[], None],
        buffers: Sequence[FakeBuffer] = (),
        stale: Callable[[], str | None] | None = None,
    ) -> None:
        """Put `step` on the stream. `stale` says why a graph that captured it may not replay it any more."""
        self._put(_Work(step, tuple(buffers), stale))

    def _put(self, work: _Work) -> None:
        if self._closed:
            raise UsageError("a closed stream was used", hint="open another")
        if self._recording is not None:
            self._recording.append(work)
        else:
            self._pending.append(work)

    def synchronize(self) -> None:
        """Do what is pending, in order. What fails takes the rest of the pending work with it, as a real device does."""
        if self._recording is not None:
            raise UsageError("a stream cannot be waited for while it is captured", hint="synchronize after the capture")
        with self._running:
            try:
                while self._pending:
                    self._pending.popleft().step()
            except BaseException:
                self._pending.clear()
                raise

    def record(self) -> FakeEvent:
        event = FakeEvent(self)
        self.enqueue(event._mark)
        return event

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        if self._recording is not None:
            raise UsageError("a capture is under way on this stream", hint="one capture at a time")
        recorded: list[_Work] = []
        self._recording = recorded
        self._device._capturing.add(threading.get_ident())
        try:
            work(self)
        finally:
            self._recording = None
            self._device._capturing.discard(threading.get_ident())
        return FakeGraph(recorded)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._pending:
                log.warning("a stream was closed with %d pieces of work undone", len(self._pending))
                self._pending.clear()


class FakeDevice:
    """The fake device `fake:N`, with a memory of `memory_bytes`."""

    def __init__(self, number: int = 0, *, memory_bytes: int = 1 << 30) -> None:
        self.name = f"fake:{number}"
        self.memory_bytes = memory_bytes
        self.allocated_bytes = 0
        self.allocated_count = 0
        self.peak_bytes = 0
        self._addresses = itertools.count(0x7F00_0000_0000, _PAGE)
        self._capturing: set[int] = set()
        self._counting = threading.Lock()
        self._closed = False

    def allocate(self, nbytes: int) -> FakeBuffer:
        if self._closed:
            raise UsageError(f"the device `{self.name}` is closed", hint="open it again")
        if threading.get_ident() in self._capturing:
            raise UsageError("memory cannot be allocated while a graph is captured", hint="allocate before the capture")
        with self._counting:
            free = self.memory_bytes - self.allocated_bytes
            if nbytes > free:
                raise MemoryExhausted(
                    f"`{self.name}` was asked for {nbytes} bytes and has {free} of {self.memory_bytes} left",
                    hint="a smaller batch, or fewer contexts",
                )
            self.allocated_bytes += nbytes
            self.allocated_count += 1
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return FakeBuffer(self, nbytes, next(self._addresses))

    def _give_back(self, nbytes: int) -> None:
        with self._counting:
            self.allocated_bytes -= nbytes
            self.allocated_count -= 1

    def stream(self) -> FakeStream:
        if self._closed:
            raise UsageError(f"the device `{self.name}` is closed", hint="open it again")
        return FakeStream(self)

    def upload(self, array: Any, buffer: Any, stream: Any) -> None:
        source, target = bytes_of(array), self._own(buffer)
        if source.nbytes > target.nbytes:
            raise UsageError(
                f"{source.nbytes} bytes do not fit a buffer of {target.nbytes}", hint="allocate a larger one"
            )
        stream.enqueue(lambda: np.copyto(target.memory()[: source.nbytes], source), [target])

    def download(self, buffer: Any, array: Any, stream: Any) -> None:
        target, source = bytes_of(array), self._own(buffer)
        if target.nbytes > source.nbytes:
            raise UsageError(
                f"{target.nbytes} bytes cannot be read from a buffer of {source.nbytes}", hint="a smaller array"
            )
        stream.enqueue(lambda: np.copyto(target, source.memory()[: target.nbytes]), [source])

    def _own(self, buffer: Any) -> FakeBuffer:
        """The buffer, if it is one of this device and open; a real device would answer with an illegal address."""
        if not isinstance(buffer, FakeBuffer) or buffer.device is not self:
            raise UsageError(f"a buffer of another device was used on `{self.name}`", hint="allocate it there")
        buffer.memory()
        return buffer

    def close(self) -> None:
        """Close the device; buffers nobody gave back are said, not freed."""
        if not self._closed:
            self._closed = True
            if self.allocated_count:
                log.warning(
                    "`%s` was closed with %d buffers (%d bytes) still allocated",
                    self.name, self.allocated_count, self.allocated_bytes,
                )  # fmt: skip

"""A device that does not exist and keeps the rules of one that does, so that breaking them shows on any machine.

Fresh memory is 0xCD and freed memory raises; what a stream is given happens when somebody waits for it and not before,
copies included, and streams follow each other only where one was told to wait; a graph replays the closures it captured,
and refuses when what it holds has changed or gone; nothing is allocated during a capture; memory ends at a limit; what was
not given back can be counted; an illegal access or a lost device ends everything but `close`.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trt_engine.device import Event, Graph, MemoryStats, Properties, Stream, dlpack
from trt_engine.device.host import Bytes, Holding, address_of, bytes_of, check_part, typed, unpinned
from trt_engine.device.ledger import Ledger, Ranges, exhausted
from trt_engine.errors import DeviceLost, UsageError

__all__ = ["FakeBuffer", "FakeDevice", "FakeEvent", "FakeGraph", "FakeHostBuffer", "FakeStream"]

FRESH, FREED = 0xCD, 0xDD
_PAGE = 256
"""Addresses are multiples of this, as CUDA's are."""

log = logging.getLogger(__name__)

_buffers: Ranges[weakref.ref[FakeBuffer]] = Ranges()
_streams: weakref.WeakValueDictionary[int, FakeStream] = weakref.WeakValueDictionary()
_handles = itertools.count(0x5_0000_0000, 16)


class _Space:
    """Addresses that nobody has twice, over all fake devices of a process; two buffers never touch."""

    def __init__(self) -> None:
        self._next = 0x7F00_0000_0000
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> int:
        with self._lock:
            start = self._next
            self._next += (nbytes // _PAGE + 2) * _PAGE
            return start


_space = _Space()


class FakeBuffer:
    """Memory of a fake device."""

    def __init__(self, device: FakeDevice, memory: Bytes, pointer: int, stream: FakeStream | None = None) -> None:
        self.device = device
        self.stream = stream
        self._nbytes = memory.nbytes
        self._pointer = pointer
        self._bytes: Bytes | None = memory
        self._closed = False
        self.readers: set[int] = set()
        self._lent: weakref.finalize[..., FakeBuffer] | None = None

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def pointer(self) -> int:
        """An address that means nothing to the host; `UsageError` after `close`."""
        self.check_open()
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def on_host(self) -> bool:
        return False

    def check_open(self) -> None:
        if self.closed:
            raise UsageError("a freed buffer was used", hint="keep it open until the stream is done with it")

    def memory(self) -> Bytes:
        """The bytes, for the device's own work alone; `UsageError` when they are freed."""
        if self._bytes is None:
            raise UsageError("a freed buffer was used", hint="keep it open until the stream is done with it")
        return self._bytes

    def view(self, offset: int, nbytes: int, then: Callable[[], None] | None = None) -> FakeBuffer:
        check_part(offset, nbytes, self._nbytes)
        return _FakeView(self, offset, nbytes, then)

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Any:
        """An array that lends its memory by DLPack, as of a device no library knows: numpy refuses it."""
        self.check_open()
        self.lend()
        return dlpack.device_array(self, dtype, shape, dlpack.FAKE, self.device.number)

    def lend(self) -> None:
        """Somebody has an array of it: dropped with the array, the memory is given back and no leak."""
        if self._lent is None:
            self._lent = weakref.finalize(self, self._forget, self.device, self._pointer, self._nbytes)
            self._lent.atexit = False

    @staticmethod
    def _forget(device: FakeDevice, pointer: int, nbytes: int) -> None:
        _buffers.remove(pointer)
        device._ledger.give(nbytes)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.stream is not None and self.stream.alive and not self.device.lost:
            self.stream.behind(self._free)
        else:
            self._free()

    def _free(self) -> None:
        if self._bytes is not None:
            self._bytes[:] = FREED
            self._bytes = None
            if self._lent is not None:
                self._lent.detach()
            self._forget(self.device, self._pointer, self._nbytes)


class _FakeView(FakeBuffer):
    """A part of a buffer; it ends with it."""

    def __init__(self, parent: FakeBuffer, offset: int, nbytes: int, then: Callable[[], None] | None) -> None:
        super().__init__(
            parent.device, parent.memory()[offset : offset + nbytes], parent.pointer + offset, parent.stream
        )
        self.readers = parent.readers
        self._parent = parent
        self._then = then

    @property
    def closed(self) -> bool:
        return self._closed or self._parent.closed

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Any:
        self.check_open()
        if not self.on_host:
            return super().array(dtype, shape)
        self.lend()
        return _numpy_of(self, dtype, shape)

    def lend(self) -> None:
        self._parent.lend()

    @property
    def on_host(self) -> bool:
        return self._parent.on_host

    def memory(self) -> Bytes:
        self._parent.memory()
        return super().memory()

    def close(self) -> None:
        self._closed = True
        then, self._then = self._then, None
        if then is not None:
            then()


class FakeHostBuffer(FakeBuffer):
    """Pinned memory of a fake device: the host's, read and written by the device when its turn comes."""

    def __init__(self, device: FakeDevice, nbytes: int) -> None:
        memory = np.full(nbytes, FRESH, np.uint8)
        super().__init__(device, memory, address_of(memory))
        device._pinned.add(self._pointer, max(nbytes, 1), weakref.ref(self))

    @property
    def on_host(self) -> bool:
        return True

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        self.check_open()
        self.lend()
        return _numpy_of(self, dtype, shape)

    @staticmethod
    def _forget(device: FakeDevice, pointer: int, nbytes: int) -> None:
        device._pinned.remove(pointer)
        device._pinned_ledger.give(nbytes)


def _numpy_of(buffer: FakeBuffer, dtype: str, shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
    return typed(np.asarray(Holding(buffer, buffer.memory())), dtype, shape)


@dataclass(frozen=True, slots=True)
class _Work:
    """One thing a stream was given: what to do, the buffers it touches, and whether it may still be done."""

    step: Callable[[], None]
    buffers: tuple[FakeBuffer, ...]
    stale: Callable[[], str | None] | None


class FakeEvent:
    """A point in a fake stream's work."""

    def __init__(self, stream: FakeStream, captured: bool) -> None:
        self._stream = stream
        self.captured = captured
        self.at_ns: int | None = None
        self.failed: BaseException | None = None
        self.reached = threading.Event()

    @property
    def device(self) -> FakeDevice:
        return self._stream.device

    def done(self) -> bool:
        """Whether it is reached. Each look lets the device do one more piece of the work before it."""
        self._check()
        if not self.reached.is_set():
            self._stream._advance()
        return self.reached.is_set()

    def synchronize(self) -> None:
        self._check()
        while not self.reached.is_set():
            if not self._stream._until(self):
                self.reached.wait(0.001)  # another thread is at the work before it
        self._check()

    def elapsed_ms(self, since: Event) -> float:
        if not isinstance(since, FakeEvent) or since.device is not self.device:
            raise UsageError("two events of different devices were compared", hint="record both on one device")
        since.synchronize()
        self.synchronize()
        assert self.at_ns is not None and since.at_ns is not None
        return (self.at_ns - since.at_ns) / 1e6

    def _check(self) -> None:
        self.device._check()
        if self.captured:
            raise UsageError("an event of a capture has no time", hint="record it before and after the replay")
        if self.failed is not None:
            raise UsageError("an event was never reached: the work before it failed", hint="record another")

    def _mark(self) -> None:
        self.at_ns = time.perf_counter_ns()
        self.reached.set()

    def _fail(self, error: BaseException) -> None:
        self.failed = error
        self.reached.set()


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
        self.device = device
        self._handle = next(_handles)
        self._pending: deque[_Work] = deque()
        self._recording: list[_Work] | None = None
        self._running = threading.RLock()  # a stream does one thing at a time, whoever waits for it
        self._closed = False
        _streams[self._handle] = self

    @property
    def handle(self) -> int:
        """A number no other stream of this process has; `FakeDevice.stream_of` finds the stream by it."""
        self._check_open()
        return self._handle

    @property
    def capturing(self) -> bool:
        return self._recording is not None

    @property
    def alive(self) -> bool:
        return not self._closed and not self.capturing

    def enqueue(
        self,
        step: Callable[[], None],
        buffers: Sequence[FakeBuffer] = (),
        stale: Callable[[], str | None] | None = None,
    ) -> None:
        """Put `step` on the stream. `stale` says why a graph that captured it may not replay it any more."""
        self._put(_Work(step, tuple(buffers), stale))

    def fault(self) -> None:
        """Put an illegal access on the stream: when its turn comes the device is lost, as a real one is."""

        def access() -> None:
            self.device.lose("an illegal memory access was met in the work of a stream")
            self.device._check()

        self.enqueue(access)

    def behind(self, step: Callable[[], None]) -> None:
        """Do `step` after what is pending, whatever becomes of that; at once where nothing is."""
        if self._pending:
            self._pending.append(_Work(step, (), _always))
        else:
            step()

    def _put(self, work: _Work) -> None:
        self._check_open()
        for buffer in work.buffers:
            if buffer.stream is not None and buffer.stream is not self:
                raise UsageError(
                    "a buffer allocated for another stream was used", hint="allocate it without naming a stream"
                )
        if self._recording is not None:
            self._recording.append(work)
        else:
            self._pending.append(work)

    def synchronize(self) -> None:
        """Do what is pending, in order. What fails takes the rest of the pending work with it, as a real device does."""
        self._check_open()
        if self._recording is not None:
            raise UsageError("a stream cannot be waited for while it is captured", hint="synchronize after the capture")
        with self._running:
            while self._pending:
                self._step()
        self.device._check()

    def record(self) -> FakeEvent:
        event = FakeEvent(self, captured=self._recording is not None)
        if event.captured:
            self._check_open()
        else:
            self._put(_Mark(event._mark, (), None, event))
        return event

    def wait(self, event: Event) -> None:
        self._check_open()
        if not isinstance(event, FakeEvent) or event.device is not self.device:
            raise UsageError("an event of another device was waited for", hint="record it on this device")
        if self._recording is not None:
            raise UsageError("a stream cannot wait for an event while it is captured", hint="wait before the capture")
        event._check()
        if event._stream is not self:  # behind its own work it is anyway
            self._put(_Work(event.synchronize, (), None))

    def follow(self, readers: Collection[int]) -> bool:
        for handle in readers:
            reader = _streams.get(handle)
            if reader is not None and reader.alive and reader.device is self.device:
                self.wait(reader.record())
        return True

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        self._check_open()
        if self._recording is not None:
            raise UsageError("a capture is under way on this stream", hint="one capture at a time")
        recorded: list[_Work] = []
        self._recording = recorded
        self.device._capturing.add(threading.get_ident())
        try:
            work(self)
        finally:
            self._recording = None
            self.device._capturing.discard(threading.get_ident())
        return FakeGraph(recorded)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _streams.pop(self._handle, None)
            undone = [work for work in self._pending if work.stale is not _always]
            if undone and not self.device.lost:
                log.warning("a stream was closed with %d pieces of work undone", len(undone))
            self._drop(UsageError("the stream was closed", hint="synchronize it first"))

    # ---------------------------------------------------------------------------------------- as time goes by

    def _advance(self) -> None:
        """Do one piece of work, if nobody else is at it."""
        if self._running.acquire(blocking=False):
            try:
                if self._pending:
                    self._step()
            finally:
                self._running.release()

    def _until(self, event: FakeEvent) -> bool:
        """Work until `event` is reached; False where another thread is at work here."""
        if not self._running.acquire(blocking=False):
            return False
        try:
            while self._pending and not event.reached.is_set():
                self._step()
            if not event.reached.is_set():
                event._fail(UsageError("the stream dropped it"))
            return True
        finally:
            self._running.release()

    def _step(self) -> None:
        try:
            self.device._check()
            self._pending.popleft().step()
        except BaseException as error:
            self._drop(error)
            raise

    def _drop(self, error: BaseException) -> None:
        """Forget what is pending: events are never reached, memory that waited for its turn is given back."""
        while self._pending:
            work = self._pending.popleft()
            if isinstance(work, _Mark):
                work.event._fail(error)
            elif work.stale is _always:
                work.step()

    def _check_open(self) -> None:
        self.device._check()
        if self._closed:
            raise UsageError("a closed stream was used", hint="open another")


@dataclass(frozen=True, slots=True)
class _Mark(_Work):
    """An event's turn."""

    event: FakeEvent


def _always() -> None:
    """Marks work that is done even when the work before it failed."""


class FakeDevice:
    """The fake device `fake:N`, with a memory of `memory_bytes` of which at most `limit_bytes` may be taken."""

    def __init__(self, number: int = 0, *, memory_bytes: int = 1 << 30, limit_bytes: int | None = None) -> None:
        self.name = f"fake:{number}"
        self.number = number
        self.memory_bytes = memory_bytes
        self.limit_bytes = limit_bytes
        self.lost: str | None = None
        self._ledger, self._pinned_ledger = Ledger(), Ledger()
        self._pinned: Ranges[weakref.ref[FakeHostBuffer]] = Ranges()
        self._open: weakref.WeakSet[FakeStream] = weakref.WeakSet()
        self._opening = threading.Lock()
        self._capturing: set[int] = set()
        self._closed = False

    # ---------------------------------------------------------------------------------------- looked up by tests

    @staticmethod
    def stream_of(handle: int) -> FakeStream:
        """The open stream with that handle, of any fake device; `UsageError` for a number that is none."""
        if (found := _streams.get(handle)) is None:
            raise UsageError(
                f"no stream has the handle {handle:#x}", hint="it was closed, or belongs to no fake device"
            )
        return found

    @staticmethod
    def buffer_at(pointer: int) -> FakeBuffer:
        """The memory at that device address, of any fake device: a buffer, or the rest of one; `UsageError` for none."""
        found = _buffers.find(pointer)
        buffer = found[1]() if found is not None else None
        if found is None or buffer is None or buffer.closed:
            raise UsageError(f"no memory is at {pointer:#x}", hint="it was freed, or was never of a fake device")
        offset = pointer - found[0]
        return buffer.view(offset, buffer.nbytes - offset) if offset else buffer

    @property
    def allocated_bytes(self) -> int:
        return self._ledger.read().nbytes

    @property
    def allocated_count(self) -> int:
        return self._ledger.read().count

    @property
    def peak_bytes(self) -> int:
        return self._ledger.read().peak_bytes

    def lose(self, reason: str = "the GPU has fallen off the bus") -> None:
        """From now on everything raises `DeviceLost`, `close` alone does not."""
        self.lost = self.lost or reason

    # ---------------------------------------------------------------------------------------- a Device

    def properties(self) -> Properties:
        self._check()
        return Properties(name="fake", memory_bytes=self.memory_bytes, multiprocessors=1)

    def memory(self) -> MemoryStats:
        self._check()
        held, pinned = self._ledger.read(), self._pinned_ledger.read()
        return MemoryStats(
            self.memory_bytes, self._most - held.nbytes, held.nbytes, held.peak_bytes, held.count, self.limit_bytes,
            pinned.nbytes, pinned.peak_bytes, pinned.count, held.served,
        )  # fmt: skip

    @property
    def _most(self) -> int:
        return self.memory_bytes if self.limit_bytes is None else min(self.limit_bytes, self.memory_bytes)

    def allocate(self, nbytes: int, stream: Any = None) -> FakeBuffer:
        self._check_open()
        self._check_no_capture()
        if stream is not None:
            stream._check_open()
        if (free := self._ledger.take(nbytes, self._most)) is not None:
            raise exhausted(self.name, nbytes, free, self.memory_bytes, self.limit_bytes)
        pointer = _space.take(nbytes)
        buffer = FakeBuffer(self, np.full(nbytes, FRESH, np.uint8), pointer, stream)
        _buffers.add(pointer, max(nbytes, 1), weakref.ref(buffer))
        return buffer

    def pinned(self, nbytes: int) -> FakeHostBuffer:
        self._check_open()
        self._check_no_capture()
        self._pinned_ledger.take(nbytes)
        return FakeHostBuffer(self, nbytes)

    def borrow(self, array: Any, stream: Any) -> FakeBuffer:
        """The memory of an array that this device lent."""
        self._check_open()
        stream._check_open()
        if stream.capturing:
            raise UsageError("an array was borrowed while a graph is captured", hint="borrow it before the capture")
        if isinstance(array, dlpack.DeviceArray):
            stream.follow(array.buffer.readers)
        lent = dlpack.read(array, None)
        if (lent.device_type, lent.device_id) != (dlpack.FAKE, self.number):
            raise UsageError(f"an array of another device was given to `{self.name}`", hint="copy it there first")
        buffer = self.buffer_at(lent.pointer)
        if buffer.device is not self:
            raise UsageError(f"an array of another device was given to `{self.name}`", hint="copy it there first")
        return buffer.view(0, lent.nbytes)

    def stream(self) -> FakeStream:
        self._check_open()
        made = FakeStream(self)
        with self._opening:
            self._open.add(made)
        return made

    def upload(self, array: Any, buffer: Any, stream: Any) -> None:
        source, target = bytes_of(array), self._own(buffer)
        if source.nbytes > target.nbytes:
            raise UsageError(
                f"{source.nbytes} bytes do not fit a buffer of {target.nbytes}", hint="allocate a larger one"
            )
        pinned = self._pinned_at(source)
        if pinned is None:
            if stream.capturing:
                raise unpinned()
            kept = source.copy()  # an ordinary array belongs to the caller again when this returns
            stream.enqueue(lambda: np.copyto(target.memory()[: kept.nbytes], kept), [target])
        else:

            def read() -> None:
                pinned.memory()
                np.copyto(target.memory()[: source.nbytes], source)

            stream.enqueue(read, [target, pinned])

    def download(self, buffer: Any, array: Any, stream: Any) -> None:
        target, source = bytes_of(array, written=True), self._own(buffer)
        if target.nbytes > source.nbytes:
            raise UsageError(
                f"{target.nbytes} bytes cannot be read from a buffer of {source.nbytes}", hint="a smaller array"
            )
        pinned = self._pinned_at(target)
        if pinned is None and stream.capturing:
            raise unpinned()

        def write() -> None:
            if pinned is not None:
                pinned.memory()
            np.copyto(target, source.memory()[: target.nbytes])

        stream.enqueue(write, [source] if pinned is None else [source, pinned])

    def copy(self, source: Any, target: Any, nbytes: int, stream: Any) -> None:
        left, right = self._own(source), self._own(target)
        check_part(0, nbytes, left.nbytes)
        check_part(0, nbytes, right.nbytes)
        stream.enqueue(lambda: np.copyto(right.memory()[:nbytes], left.memory()[:nbytes].copy()), [left, right])

    def synchronize(self) -> None:
        self._check_open()
        self._check_no_capture()
        with self._opening:
            streams = list(self._open)
        for stream in streams:
            if stream.alive:
                stream.synchronize()

    def close(self) -> None:
        """Close the device; buffers nobody gave back are said, not freed."""
        if not self._closed:
            self._closed = True
            held, pinned = self._ledger.read(), self._pinned_ledger.read()
            if held.count or pinned.count:
                log.warning(
                    "`%s` was closed with %d buffers (%d bytes) still allocated",
                    self.name, held.count + pinned.count, held.nbytes + pinned.nbytes,
                )  # fmt: skip

    # ---------------------------------------------------------------------------------------- checks

    def _own(self, buffer: Any) -> FakeBuffer:
        """The buffer, if it is one of this device and open; a real device would answer with an illegal address."""
        self._check()
        if not isinstance(buffer, FakeBuffer) or buffer.device is not self:
            raise UsageError(f"a buffer of another device was used on `{self.name}`", hint="allocate it there")
        buffer.check_open()
        return buffer

    def _pinned_at(self, array: Bytes) -> FakeHostBuffer | None:
        found = self._pinned.find(address_of(array)) if array.nbytes else None
        return found[1]() if found is not None else None

    def _check(self) -> None:
        if self.lost is not None:
            raise DeviceLost(f"`{self.name}` is lost: {self.lost}", hint="close it and start the process again")

    def _check_open(self) -> None:
        self._check()
        if self._closed:
            raise UsageError(f"the device `{self.name}` is closed", hint="open it again")

    def _check_no_capture(self) -> None:
        if threading.get_ident() in self._capturing:
            raise UsageError("memory cannot be allocated while a graph is captured", hint="allocate before the capture")

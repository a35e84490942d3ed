"""A simulated device that enforces the rules of a real one on any machine.

Fresh memory is 0xCD and freed memory raises; stream work, including copies, runs lazily on synchronization, and streams are
ordered only by explicit waits; a graph replays its captured closures and raises if they are stale; allocation fails during
a capture and above a limit; leaks are counted; after a lost device everything but `close` raises.
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
from functools import partial
from typing import Any

import numpy as np

from trt_engine.device import Event, Graph, MemoryStats, Properties, Stream, dlpack, host
from trt_engine.device.accounting import AddressRanges, MemoryAccounting, memory_exhausted
from trt_engine.errors import DeviceLost, UsageError

FRESH, FREED = 0xCD, 0xDD
_PAGE = 256
"""Address alignment in bytes, as with CUDA."""

log = logging.getLogger(__name__)

_buffers: AddressRanges[weakref.ref[FakeBuffer]] = AddressRanges()
_streams: weakref.WeakValueDictionary[int, FakeStream] = weakref.WeakValueDictionary()
_handles = itertools.count(0x5_0000_0000, 16)
_next_address = 0x7F00_0000_0000
_address_lock = threading.Lock()


def _take_addresses(nbytes: int) -> int:
    """A unique address over all fake devices of the process, with a gap behind the memory."""
    global _next_address
    with _address_lock:
        start = _next_address
        _next_address += (nbytes // _PAGE + 2) * _PAGE
        return start


class FakeBuffer(host.ProcessBuffer):
    """Fake device memory; its addresses are invalid on the host."""

    on_host = False

    def __init__(self, device: FakeDevice, memory: host.Bytes, pointer: int, stream: FakeStream | None = None) -> None:
        super().__init__(device, memory, pointer)
        self.stream = stream
        self._closed = False
        self._finalizer: weakref.finalize[..., FakeBuffer] | None = None

    @property
    def closed(self) -> bool:
        return self._closed

    def _closed_error(self) -> UsageError:
        return UsageError("a freed buffer was used", hint="keep it open until the stream is done with it")

    def view(self, offset: int, nbytes: int) -> FakeBuffer:
        host.check_range(offset, nbytes, self._nbytes)
        return _FakeView(self, offset, nbytes)

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Any:
        """A numpy array of pinned memory, else a DLPack array on a device type unknown to other libraries."""
        self.check_open()
        self.mark_exported()
        if self.on_host:
            return host.view_as(np.asarray(host.BufferOwner(self, self.memory())), dtype, shape)
        return dlpack.device_array(self, dtype, shape, dlpack.FAKE, self.device.number)

    def mark_exported(self) -> None:
        """Mark as exported: dropping it with its arrays frees the memory and is not a leak."""
        if self._finalizer is None:
            self._finalizer = weakref.finalize(self, self._release, self.device, self._pointer, self._nbytes)
            self._finalizer.atexit = False

    @staticmethod
    def _release(device: FakeDevice, pointer: int, nbytes: int) -> None:
        _buffers.remove(pointer)
        device._accounting.release(nbytes)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.stream is not None and self.stream.alive and not self.device.lost:
            self.stream.enqueue_cleanup(self._free)
        else:
            self._free()

    def _free(self) -> None:
        if self._bytes is not None:
            self._bytes[:] = FREED
            self._bytes = None
            if self._finalizer is not None:
                self._finalizer.detach()
            self._release(self.device, self._pointer, self._nbytes)


class _FakeView(host.BufferView, FakeBuffer):
    _parent: FakeBuffer

    def __init__(self, parent: FakeBuffer, offset: int, nbytes: int) -> None:
        memory = parent.memory()[offset : offset + nbytes]
        FakeBuffer.__init__(self, parent.device, memory, parent.pointer + offset, parent.stream)
        self._parent = parent
        self.external_streams, self.on_host = parent.external_streams, parent.on_host

    def mark_exported(self) -> None:
        self._parent.mark_exported()

    def close(self) -> None:
        self._closed = True


class FakeHostBuffer(FakeBuffer):
    """Pinned host memory of a fake device, accessed asynchronously."""

    on_host = True

    def __init__(self, device: FakeDevice, nbytes: int) -> None:
        memory = np.full(nbytes, FRESH, np.uint8)
        super().__init__(device, memory, host.address_of(memory))
        device._pinned_ranges.add(self._pointer, max(nbytes, 1), weakref.ref(self))

    @staticmethod
    def _release(device: FakeDevice, pointer: int, nbytes: int) -> None:
        device._pinned_ranges.remove(pointer)
        device._pinned_accounting.release(nbytes)


@dataclass(frozen=True, slots=True)
class _StreamWork:
    """One piece of stream work: closure, buffers it accesses, and staleness check."""

    step: Callable[[], None]
    buffers: tuple[FakeBuffer, ...]
    stale_reason: Callable[[], str | None] | None


class FakeEvent:
    """An event of a fake stream."""

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
        """Whether it is reached. Each call runs one more piece of the preceding work."""
        self._check()
        if not self.reached.is_set():
            self._stream._run_one()
        return self.reached.is_set()

    def synchronize(self) -> None:
        self._check()
        while not self.reached.is_set():
            if not self._stream._run_until(self):
                self.reached.wait(0.001)  # another thread runs the preceding work
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

    def _reach(self) -> None:
        self.at_ns = time.perf_counter_ns()
        self.reached.set()

    def _fail(self, error: BaseException) -> None:
        self.failed = error
        self.reached.set()


class FakeGraph(host.RecordedGraph[_StreamWork]):
    """A graph of a fake device."""

    def replay(self, stream: Stream) -> None:
        """Enqueue the captured work; `UsageError` if a buffer is freed or a context was prepared again."""
        recorded = self._recorded(stream, FakeStream, "the fake device")
        assert isinstance(stream, FakeStream)
        for work in recorded:
            if any(buffer.closed for buffer in work.buffers):
                raise UsageError("a graph holds the address of a freed buffer", hint="capture it again")
            if work.stale_reason is not None and (reason := work.stale_reason()):
                raise UsageError(f"a graph is out of date: {reason}", hint="capture it again")
        for work in recorded:
            stream._append(work)

    def launcher(self, stream: Stream) -> Callable[[], None]:
        return partial(self.replay, stream)


class FakeStream(host.RecordingStream[_StreamWork]):
    """A lazy stream: work runs in order when something waits for it."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__(next(_handles))
        self.device = device
        self._pending: deque[_StreamWork] = deque()
        self._run_lock = threading.RLock()  # one piece of work at a time
        _streams[self._handle] = self

    @property
    def alive(self) -> bool:
        return not self._closed and not self.capturing

    def enqueue(
        self,
        step: Callable[[], None],
        buffers: Sequence[FakeBuffer] = (),
        stale_reason: Callable[[], str | None] | None = None,
    ) -> None:
        """Enqueue `step`. `stale_reason` returns why a graph may no longer replay it, or None."""
        self._append(_StreamWork(step, tuple(buffers), stale_reason))

    def enqueue_cleanup(self, step: Callable[[], None]) -> None:
        """Run `step` after pending work, even if that fails; immediately if there is none."""
        if self._pending:
            self._pending.append(_StreamWork(step, (), _run_always))
        else:
            step()

    def _append(self, work: _StreamWork) -> None:
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
        """Run pending work in order. A failure drops the rest, as on a real device."""
        self._check_can_synchronize()
        with self._run_lock:
            while True:  # not `while condition`, whose jump back Python 3.13.0 leaves out of the `with`
                if not self._pending:
                    break
                self._run_next()
        self.device._check()

    def record(self) -> FakeEvent:
        event = FakeEvent(self, captured=self._recording is not None)
        if event.captured:
            self._check_open()
        else:
            self._append(_EventWork(event._reach, (), None, event))
        return event

    def wait(self, event: Event) -> None:
        self._check_can_wait(isinstance(event, FakeEvent) and event.device is self.device)
        assert isinstance(event, FakeEvent)
        event._check()
        if event._stream is not self:  # its own work is ordered already
            self._append(_StreamWork(event.synchronize, (), None))

    def wait_for_external(self, external_streams: Collection[int]) -> bool:
        for handle in external_streams:
            reader = _streams.get(handle)
            if reader is not None and reader.alive and reader.device is self.device:
                self.wait(reader.record())
        return True

    def order_after(self, handle: int) -> None:
        self.wait(self.device.stream_by_handle(handle).record())

    def order_before(self, handle: int) -> None:
        self.device.stream_by_handle(handle).wait(self.record())

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        def mark_thread(stream: Stream) -> None:
            self.device._capturing_threads.add(threading.get_ident())
            try:
                work(stream)
            finally:
                self.device._capturing_threads.discard(threading.get_ident())

        return FakeGraph(self._record_work(mark_thread))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _streams.pop(self._handle, None)
            undone = [work for work in self._pending if work.stale_reason is not _run_always]
            if undone and not self.device.lost:
                log.warning("a stream was closed with %d pieces of work undone", len(undone))
            self._discard_pending(UsageError("the stream was closed", hint="synchronize it first"))

    # ---------------------------------------------------------------------------------------- execution

    def _run_one(self) -> None:
        """Run one piece of work unless another thread does."""
        if self._run_lock.acquire(blocking=False):
            try:
                if self._pending:
                    self._run_next()
            finally:
                self._run_lock.release()

    def _run_until(self, event: FakeEvent) -> bool:
        """Run work until `event` is reached; False if another thread is running this stream."""
        if not self._run_lock.acquire(blocking=False):
            return False
        try:
            while True:
                if not self._pending or event.reached.is_set():
                    break
                self._run_next()
            if not event.reached.is_set():
                event._fail(UsageError("the stream dropped it"))
            return True
        finally:
            self._run_lock.release()

    def _run_next(self) -> None:
        try:
            self.device._check()
            self._pending.popleft().step()
        except BaseException as error:
            self._discard_pending(error)
            raise

    def _discard_pending(self, error: BaseException) -> None:
        """Drop pending work: events fail, stream-ordered frees are executed."""
        while self._pending:
            work = self._pending.popleft()
            if isinstance(work, _EventWork):
                work.event._fail(error)
            elif work.stale_reason is _run_always:
                work.step()

    def _check_open(self) -> None:
        self.device._check()
        super()._check_open()


@dataclass(frozen=True, slots=True)
class _EventWork(_StreamWork):
    """Work that reaches an event."""

    event: FakeEvent


def _run_always() -> None:
    """Marks work that runs even after preceding work failed."""


class FakeDevice:
    """The fake device `fake:N` with `memory_bytes` of memory, of which at most `limit_bytes` may be allocated."""

    def __init__(self, number: int = 0, *, memory_bytes: int = 1 << 30, limit_bytes: int | None = None) -> None:
        self.name = f"fake:{number}"
        self.number = number
        self.memory_bytes = memory_bytes
        self.limit_bytes = limit_bytes
        self.lost: str | None = None
        self._accounting, self._pinned_accounting = MemoryAccounting(), MemoryAccounting()
        self._pinned_ranges: AddressRanges[weakref.ref[FakeHostBuffer]] = AddressRanges()
        self._open_streams: weakref.WeakSet[FakeStream] = weakref.WeakSet()
        self._streams_lock = threading.Lock()
        self._capturing_threads: set[int] = set()
        self._closed = False

    # ---------------------------------------------------------------------------------------- for tests

    @staticmethod
    def stream_by_handle(handle: int) -> FakeStream:
        """The open stream with this handle on any fake device; `UsageError` if there is none."""
        if (found := _streams.get(handle)) is None:
            raise UsageError(
                f"no stream has the handle {handle:#x}", hint="it was closed, or belongs to another device"
            )
        return found

    @staticmethod
    def buffer_at(pointer: int) -> FakeBuffer:
        """The buffer, or its remainder, at a device address of any fake device; `UsageError` if there is none."""
        found = _buffers.find(pointer)
        buffer = found[1]() if found is not None else None
        if found is None or buffer is None or buffer.closed:
            raise UsageError(f"no memory is at {pointer:#x}", hint="it was freed, or belongs to another device")
        offset = pointer - found[0]
        return buffer.view(offset, buffer.nbytes - offset) if offset else buffer

    @property
    def allocated_bytes(self) -> int:
        return self._accounting.usage().nbytes

    @property
    def allocated_count(self) -> int:
        return self._accounting.usage().count

    @property
    def peak_bytes(self) -> int:
        return self._accounting.usage().peak_bytes

    def lose(self) -> None:
        """Lose the device: everything but `close` raises `DeviceLost`."""
        self.lost = "the GPU has fallen off the bus"

    # ---------------------------------------------------------------------------------------- a Device

    def properties(self) -> Properties:
        self._check()
        return Properties(name="fake", memory_bytes=self.memory_bytes, multiprocessors=1)

    def memory(self) -> MemoryStats:
        self._check()
        held, pinned = self._accounting.usage(), self._pinned_accounting.usage()
        return MemoryStats(
            self.memory_bytes, self._capacity_bytes - held.nbytes, held.nbytes, held.peak_bytes, held.count,
            self.limit_bytes, pinned.nbytes, pinned.peak_bytes, pinned.count, held.total_allocations,
        )  # fmt: skip

    @property
    def _capacity_bytes(self) -> int:
        return self.memory_bytes if self.limit_bytes is None else min(self.limit_bytes, self.memory_bytes)

    def allocate(self, nbytes: int, stream: Any = None) -> FakeBuffer:
        self._check_open()
        self._check_no_capture()
        if stream is not None:
            stream._check_open()
        if (free := self._accounting.charge(nbytes, self._capacity_bytes)) is not None:
            raise memory_exhausted(self.name, nbytes, free, self.memory_bytes, self.limit_bytes)
        pointer = _take_addresses(nbytes)
        buffer = FakeBuffer(self, np.full(nbytes, FRESH, np.uint8), pointer, stream)
        _buffers.add(pointer, max(nbytes, 1), weakref.ref(buffer))
        return buffer

    def pinned(self, nbytes: int) -> FakeHostBuffer:
        self._check_open()
        self._check_no_capture()
        self._pinned_accounting.charge(nbytes)
        return FakeHostBuffer(self, nbytes)

    def borrow(self, array: Any, stream: Any) -> FakeBuffer:
        """The memory of an array exported by this device."""
        self._check_open()
        stream._check_open()
        if stream.capturing:
            raise UsageError("an array was borrowed while a graph is captured", hint="borrow it before the capture")
        if isinstance(array, dlpack.DeviceArray):
            stream.wait_for_external(array.buffer.external_streams)
        lent = dlpack.import_array(array, None)
        if (lent.device_type, lent.device_id) != (dlpack.FAKE, self.number):
            raise UsageError(f"an array of another device was given to `{self.name}`", hint="copy it there first")
        buffer = self.buffer_at(lent.pointer)
        if buffer.device is not self:
            raise UsageError(f"an array of another device was given to `{self.name}`", hint="copy it there first")
        return buffer.view(0, lent.nbytes)

    def reader(self, kind: type, stream: Any) -> Callable[[Any], int | None]:
        return lambda array: self.borrow(array, stream).pointer

    def stream(self) -> FakeStream:
        self._check_open()
        made = FakeStream(self)
        with self._streams_lock:
            self._open_streams.add(made)
        return made

    def upload(self, array: Any, buffer: Any, stream: Any) -> None:
        target = self._checked_buffer(buffer)
        source = host.upload_bytes(array, target)
        pinned = self._pinned_at(source, stream)
        if not pinned:
            source = source.copy()  # the caller may change a pageable array afterwards
        self._enqueue_copy(stream, lambda: np.copyto(target.memory()[: source.nbytes], source), target, pinned)

    def download(self, buffer: Any, array: Any, stream: Any) -> None:
        source = self._checked_buffer(buffer)
        target = host.download_bytes(array, source)
        pinned = self._pinned_at(target, stream)
        self._enqueue_copy(stream, lambda: np.copyto(target, source.memory()[: target.nbytes]), source, pinned)

    def gather(self, arrays: Sequence[Any], buffer: Any, stream: Any) -> bool:
        starts = itertools.accumulate((array.nbytes for array in arrays), initial=0)
        for start, array in zip(starts, arrays, strict=False):
            self.upload(array, buffer.view(start, array.nbytes), stream)
        return True

    @staticmethod
    def _enqueue_copy(
        stream: FakeStream, copy: Callable[[], None], buffer: FakeBuffer, pinned: tuple[FakeHostBuffer, ...]
    ) -> None:
        def step() -> None:
            for memory in pinned:
                memory.memory()  # not freed
            copy()

        stream.enqueue(step, [buffer, *pinned])

    def copy(self, source: Any, target: Any, nbytes: int, stream: Any) -> None:
        left, right = self._checked_buffer(source), self._checked_buffer(target)
        host.check_range(0, nbytes, left.nbytes)
        host.check_range(0, nbytes, right.nbytes)
        stream.enqueue(lambda: np.copyto(right.memory()[:nbytes], left.memory()[:nbytes].copy()), [left, right])

    def synchronize(self) -> None:
        self._check_open()
        self._check_no_capture()
        with self._streams_lock:
            streams = list(self._open_streams)
        for stream in streams:
            if stream.alive:
                stream.synchronize()

    def close(self) -> None:
        """Close the device; open buffers are logged, not freed."""
        if not self._closed:
            self._closed = True
            held, pinned = self._accounting.usage(), self._pinned_accounting.usage()
            if held.count or pinned.count:
                log.warning(
                    "`%s` was closed with %d buffers (%d bytes) still allocated",
                    self.name, held.count + pinned.count, held.nbytes + pinned.nbytes,
                )  # fmt: skip

    # ---------------------------------------------------------------------------------------- checks

    def _checked_buffer(self, buffer: Any) -> FakeBuffer:
        """The buffer; `UsageError` unless it is open and on this device."""
        self._check()
        if not isinstance(buffer, FakeBuffer) or buffer.device is not self:
            raise UsageError(f"a buffer of another device was used on `{self.name}`", hint="allocate it there")
        buffer.check_open()
        return buffer

    def _pinned_at(self, array: host.Bytes, stream: FakeStream) -> tuple[FakeHostBuffer, ...]:
        """The pinned buffer that holds the array; `UsageError` for other memory in a capture."""
        found = self._pinned_ranges.find(host.address_of(array)) if array.nbytes else None
        buffer = found[1]() if found is not None else None
        if buffer is None and stream.capturing:
            raise host.unpinned_error()
        return () if buffer is None else (buffer,)

    def is_pinned(self, array: Any) -> bool:
        return not array.nbytes or self._pinned_ranges.find(host.address_of(array)) is not None

    def _check(self) -> None:
        if self.lost is not None:
            raise DeviceLost(f"`{self.name}` is lost: {self.lost}", hint="close it and start the process again")

    def _check_open(self) -> None:
        self._check()
        if self._closed:
            raise UsageError(f"the device `{self.name}` is closed", hint="open it again")

    def _check_no_capture(self) -> None:
        if threading.get_ident() in self._capturing_threads:
            raise UsageError("memory cannot be allocated while a graph is captured", hint="allocate before the capture")

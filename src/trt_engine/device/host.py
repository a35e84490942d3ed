"""The host as a device: aligned memory, a stream that works at once, graphs that are recorded closures."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import psutil

from trt_engine.device import Event, Graph, MemoryStats, Properties, Stream, dlpack, info
from trt_engine.device.ledger import Ledger, Ranges, exhausted
from trt_engine.errors import MemoryExhausted, UsageError

__all__ = [
    "Holding",
    "HostBuffer",
    "HostDevice",
    "HostEvent",
    "HostGraph",
    "HostStream",
    "address_of",
    "bytes_of",
    "check_part",
    "numpy_dtype",
    "typed",
    "unpinned",
]

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load of today's processors."""

Bytes = npt.NDArray[np.uint8]
log = logging.getLogger(__name__)


def bytes_of(array: Any, *, written: bool = False) -> Bytes:
    """The bytes of a C-contiguous array, without a copy; `UsageError` for anything a device cannot copy as it lies, or for a
    read-only array that is to be `written`.
    """
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(f"a {kind} array cannot be copied to a device", hint="numbers and booleans can")
    if not array.flags.c_contiguous:
        raise UsageError("a strided array cannot be copied as it lies", hint="numpy.ascontiguousarray")
    if written and not array.flags.writeable:
        raise UsageError("a read-only array cannot be downloaded into", hint="a copy of it can")
    return array.reshape(-1).view(np.uint8)


def address_of(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def numpy_dtype(name: str) -> np.dtype[Any]:
    """numpy's dtype of one of our type names, `ml_dtypes` for those numpy lacks."""
    return np.dtype(getattr(ml_dtypes, name, name))


def typed(memory: Bytes, dtype: str, shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
    """The beginning of `memory` as an array of that type and shape, or all of it in one dimension."""
    kind = numpy_dtype(dtype)
    if shape is None:
        shape = (memory.nbytes // kind.itemsize,)
    if (need := int(np.prod(shape, dtype=np.int64)) * kind.itemsize) > memory.nbytes:
        raise UsageError(
            f"an array of {shape} {dtype} takes {need} bytes, the buffer has {memory.nbytes}", hint="a larger buffer"
        )
    return memory[:need].view(kind).reshape(shape)


class HostBuffer:
    """Host memory that begins on a cache line."""

    def __init__(
        self, device: HostDevice, memory: Bytes, nbytes: int, on_close: Callable[[], None] | None = None
    ) -> None:
        self.device = device
        self._memory: Bytes | None = memory[:nbytes]
        self._nbytes = nbytes
        self.readers: set[int] = set()
        self._pointer = address_of(memory)
        self._on_close = weakref.finalize(self, on_close) if on_close is not None else None

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def pointer(self) -> int:
        self.memory()
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._memory is None

    def memory(self) -> Bytes:
        """The bytes themselves; `UsageError` after `close`."""
        if self._memory is None:
            raise UsageError("a closed buffer was used", hint="allocate another")
        return self._memory

    def view(self, offset: int, nbytes: int, then: Callable[[], None] | None = None) -> HostBuffer:
        check_part(offset, nbytes, self._nbytes)
        return _HostView(self, offset, nbytes, then)

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        return typed(np.asarray(Holding(self, self.memory())), dtype, shape)

    def close(self) -> None:
        if self._memory is not None:
            self._memory = None
            if self._on_close is not None:
                self._on_close()


class _HostView(HostBuffer):
    """A part of a buffer."""

    def __init__(self, parent: HostBuffer, offset: int, nbytes: int, then: Callable[[], None] | None) -> None:
        super().__init__(parent.device, parent.memory()[offset : offset + nbytes], nbytes)
        self._parent = parent
        self._then = then
        self._pointer = parent.pointer + offset  # numpy would say another for no bytes

    @property
    def closed(self) -> bool:
        return self._parent.closed or super().closed

    def memory(self) -> Bytes:
        self._parent.memory()
        return super().memory()

    def close(self) -> None:
        super().close()
        then, self._then = self._then, None
        if then is not None:
            then()


class Holding:
    """What a numpy array of a buffer is based on: it keeps the buffer, so that nobody else gets its memory."""

    def __init__(self, buffer: Any, memory: Bytes) -> None:
        self._kept = buffer, memory
        self.__array_interface__ = memory.__array_interface__


def check_part(offset: int, nbytes: int, whole: int) -> None:
    """`UsageError` unless the part lies within a buffer of `whole` bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > whole:
        raise UsageError(
            f"bytes {offset} to {offset + nbytes} are not all in a buffer of {whole}", hint="offsets count from 0"
        )


class HostEvent:
    """The host's clock at a point of the stream's work."""

    def __init__(self, captured: bool) -> None:
        self.at_ns = None if captured else time.perf_counter_ns()

    def done(self) -> bool:
        self.reached_ns()
        return True

    def synchronize(self) -> None:
        self.reached_ns()

    def elapsed_ms(self, since: Event) -> float:
        if not isinstance(since, HostEvent):
            raise UsageError("two events of different devices were compared", hint="record both on one device")
        return (self.reached_ns() - since.reached_ns()) / 1e6

    def reached_ns(self) -> int:
        if self.at_ns is None:
            raise UsageError("an event of a capture has no time", hint="record it before and after the replay")
        return self.at_ns


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

    _handles = itertools.count(1)

    def __init__(self) -> None:
        self._recording: list[Callable[[], None]] | None = None
        self._closed = False
        self._handle = next(self._handles)

    @property
    def handle(self) -> int:
        """A number of its own; no library knows it."""
        self._check_open()
        return self._handle

    @property
    def capturing(self) -> bool:
        return self._recording is not None

    def enqueue(self, step: Callable[[], None]) -> None:
        """Run `step` now, or record it for the graph that is being captured."""
        self._check_open()
        if self._recording is not None:
            self._recording.append(step)
        else:
            step()

    def synchronize(self) -> None:
        self._check_open()
        if self._recording is not None:
            raise UsageError("a stream cannot be waited for while it is captured", hint="synchronize after the capture")

    def record(self) -> HostEvent:
        self._check_open()
        return HostEvent(captured=self._recording is not None)

    def wait(self, event: Event) -> None:
        self._check_open()
        if not isinstance(event, HostEvent):
            raise UsageError("an event of another device was waited for", hint="record it on this device")
        if self._recording is not None:
            raise UsageError("a stream cannot wait for an event while it is captured", hint="wait before the capture")
        event.reached_ns()

    def follow(self, readers: Collection[int]) -> bool:
        return True

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        self._check_open()
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

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("a closed stream was used", hint="open another")


class HostDevice:
    """The processor and its memory."""

    name = "cpu"

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._ledger, self._pinned_ledger = Ledger(), Ledger()
        self._pinned: Ranges[None] = Ranges()

    def properties(self) -> Properties:
        cpu = info.cpu()
        return Properties(name=cpu.name, memory_bytes=psutil.virtual_memory().total, multiprocessors=cpu.cores)

    def memory(self) -> MemoryStats:
        machine, held, pinned = psutil.virtual_memory(), self._ledger.read(), self._pinned_ledger.read()
        free = machine.available if self.limit_bytes is None else min(machine.available, self.limit_bytes - held.nbytes)
        return MemoryStats(
            machine.total, free, held.nbytes, held.peak_bytes, held.count, self.limit_bytes,
            pinned.nbytes, pinned.peak_bytes, pinned.count, held.served,
        )  # fmt: skip

    def allocate(self, nbytes: int, stream: Any = None) -> HostBuffer:
        ledger = self._ledger
        if (free := ledger.reserve(nbytes, self.limit_bytes)) is not None:
            raise exhausted(self.name, nbytes, free, psutil.virtual_memory().total, self.limit_bytes)
        try:
            memory = _aligned(nbytes)
        except BaseException:
            ledger.undo(nbytes)
            raise
        ledger.keep(nbytes)
        return HostBuffer(self, memory, nbytes, lambda: ledger.give(nbytes))

    def pinned(self, nbytes: int) -> HostBuffer:
        """Ordinary memory: there is nobody to hold it still for. Counted, and known again in a capture."""
        ledger, ranges = self._pinned_ledger, self._pinned
        ledger.reserve(nbytes)
        try:
            memory = _aligned(nbytes)
        except BaseException:
            ledger.undo(nbytes)
            raise
        start = address_of(memory)
        ledger.keep(nbytes)
        ranges.add(start, nbytes, None)

        def forget() -> None:
            ranges.remove(start)
            ledger.give(nbytes)

        return HostBuffer(self, memory, nbytes, forget)

    def borrow(self, array: Any, stream: Any) -> HostBuffer:
        """The memory of a numpy array, or of an array with DLPack on the host."""
        if not isinstance(array, np.ndarray):
            lent = dlpack.read(array, None)
            if lent.device_type not in dlpack.ON_HOST:
                raise UsageError("an array of another device was given to `cpu`", hint="copy it to the host first")
            array = np.asarray(lent)
        memory = bytes_of(array)
        return HostBuffer(self, memory, memory.nbytes)

    def stream(self) -> HostStream:
        return HostStream()

    def upload(self, array: Any, buffer: Any, stream: Any) -> None:
        source = bytes_of(array)
        if source.nbytes > buffer.nbytes:
            raise UsageError(
                f"{source.nbytes} bytes do not fit a buffer of {buffer.nbytes}", hint="allocate a larger one"
            )
        self._check_capture(source, stream)
        stream.enqueue(lambda: np.copyto(buffer.memory()[: source.nbytes], source))

    def download(self, buffer: Any, array: Any, stream: Any) -> None:
        target = bytes_of(array, written=True)
        if target.nbytes > buffer.nbytes:
            raise UsageError(
                f"{target.nbytes} bytes cannot be read from a buffer of {buffer.nbytes}", hint="a smaller array"
            )
        self._check_capture(target, stream)
        stream.enqueue(lambda: np.copyto(target, buffer.memory()[: target.nbytes]))

    def copy(self, source: Any, target: Any, nbytes: int, stream: Any) -> None:
        check_part(0, nbytes, source.nbytes)
        check_part(0, nbytes, target.nbytes)
        stream.enqueue(lambda: np.copyto(target.memory()[:nbytes], source.memory()[:nbytes]))

    def _check_capture(self, array: Bytes, stream: HostStream) -> None:
        if stream.capturing and array.nbytes and self._pinned.find(address_of(array)) is None:
            raise unpinned()

    def synchronize(self) -> None:
        """Nothing to wait for: a stream's work is done when it is enqueued."""

    def close(self) -> None:
        """Nothing to give back: buffers own their memory."""


def unpinned() -> UsageError:
    """A copy of ordinary memory in a capture: every replay would read it again, wherever it is by then."""
    return UsageError(
        "an ordinary array was copied while a graph is captured",
        hint="copy from and to `device.pinned(nbytes).array()`",
    )


def _aligned(nbytes: int) -> Bytes:
    """Fresh memory that begins on a cache line."""
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise MemoryExhausted(
            f"the host has no {nbytes} bytes left for a buffer", hint="a smaller batch, or fewer contexts"
        ) from error
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + max(nbytes, 1)]  # numpy would not move the address of no bytes

"""The host as a device: aligned memory, synchronous streams, graphs of recorded closures;
and the free memory of the machine or its cgroups.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
import psutil

from trt_engine.device import Event, Graph, MemoryStats, Properties, Stream, dlpack, info
from trt_engine.device.accounting import AddressRanges, MemoryAccounting, memory_exhausted
from trt_engine.errors import MemoryExhausted, UsageError

ALIGNMENT = 64
"""Alignment in bytes: a cache line and the widest vector load."""

Bytes = npt.NDArray[np.uint8]
Work = TypeVar("Work")
"""A piece of stream work."""


def as_bytes(array: Any, *, written: bool = False) -> Bytes:
    """The bytes of a C-contiguous array without a copy; `UsageError` for other arrays, or a read-only one if `written`."""
    if not isinstance(array, np.ndarray) or array.dtype.hasobject:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise UsageError(f"a {kind} array cannot be copied to a device", hint="numbers and booleans can")
    if not array.flags.c_contiguous:
        raise UsageError("a strided array cannot be copied in place", hint="numpy.ascontiguousarray")
    if written and not array.flags.writeable:
        raise UsageError("a read-only array cannot be downloaded into", hint="a copy of it can")
    return array.reshape(-1).view(np.uint8)


def upload_bytes(array: Any, buffer: Any) -> Bytes:
    """The bytes of an array to copy into `buffer`; `UsageError` for more than it holds."""
    source = as_bytes(array)
    if source.nbytes > buffer.nbytes:
        raise UsageError(f"{source.nbytes} bytes do not fit a buffer of {buffer.nbytes}", hint="allocate a larger one")
    return source


def download_bytes(array: Any, buffer: Any) -> Bytes:
    """The bytes of an array to fill from `buffer`; `UsageError` for more than it holds."""
    target = as_bytes(array, written=True)
    if target.nbytes > buffer.nbytes:
        raise UsageError(
            f"{target.nbytes} bytes cannot be read from a buffer of {buffer.nbytes}", hint="a smaller array"
        )
    return target


def address_of(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy or `ml_dtypes` dtype for a type name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def view_as(memory: Bytes, dtype: str, shape: tuple[int, ...] | None) -> npt.NDArray[Any]:
    """The first bytes of `memory` as an array, or the whole memory as a vector."""
    kind = numpy_dtype(dtype)
    if shape is None:
        shape = (memory.nbytes // kind.itemsize,)
    if (need := int(np.prod(shape, dtype=np.int64)) * kind.itemsize) > memory.nbytes:
        raise UsageError(
            f"an array of {shape} {dtype} takes {need} bytes, the buffer has {memory.nbytes}", hint="a larger buffer"
        )
    return memory[:need].view(kind).reshape(shape)


class ProcessBuffer:
    """Memory of this process as a buffer of a device."""

    def __init__(self, device: Any, memory: Bytes, pointer: int) -> None:
        self.device = device
        self._bytes: Bytes | None = memory
        self._nbytes = memory.nbytes
        self._pointer = pointer
        self.external_streams: set[int] = set()

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def pointer(self) -> int:
        """The address; `UsageError` after `close`."""
        self.check_open()
        return self._pointer

    @property
    def closed(self) -> bool:
        return self._bytes is None

    def check_open(self) -> None:
        if self.closed:
            raise self._closed_error()

    def memory(self) -> Bytes:
        """The bytes, for device work; `UsageError` when they are freed."""
        if self._bytes is None:
            raise self._closed_error()
        return self._bytes

    def close(self) -> None:
        self._bytes = None

    def _closed_error(self) -> UsageError:
        return UsageError("a closed buffer was used", hint="allocate another")


class BufferView(ProcessBuffer):
    """A slice of a buffer, valid as long as it."""

    _parent: ProcessBuffer

    @property
    def closed(self) -> bool:
        return self._parent.closed or super().closed

    def memory(self) -> Bytes:
        self._parent.memory()
        return super().memory()


class HostBuffer(ProcessBuffer):
    """Host memory aligned to a cache line."""

    def __init__(
        self, device: HostDevice, memory: Bytes, nbytes: int, on_close: Callable[[], None] | None = None
    ) -> None:
        super().__init__(device, memory[:nbytes], address_of(memory))
        self._on_close = weakref.finalize(self, on_close) if on_close is not None else None

    def view(self, offset: int, nbytes: int) -> HostBuffer:
        check_range(offset, nbytes, self._nbytes)
        return _HostView(self, offset, nbytes)

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        return view_as(np.asarray(BufferOwner(self, self.memory())), dtype, shape)

    def close(self) -> None:
        super().close()
        if self._on_close is not None:
            self._on_close()


class _HostView(BufferView, HostBuffer):
    def __init__(self, parent: HostBuffer, offset: int, nbytes: int) -> None:
        HostBuffer.__init__(self, parent.device, parent.memory()[offset : offset + nbytes], nbytes)
        self._parent = parent
        self._pointer = parent.pointer + offset  # numpy gives another address for empty slices


class BufferOwner:
    """Base object of a numpy view that keeps the buffer alive."""

    def __init__(self, buffer: Any, memory: Bytes) -> None:
        self._references = buffer, memory
        self.__array_interface__ = memory.__array_interface__


def check_range(offset: int, nbytes: int, whole: int) -> None:
    """`UsageError` unless the range is within a buffer of `whole` bytes."""
    if offset < 0 or nbytes < 0 or offset + nbytes > whole:
        raise UsageError(
            f"bytes {offset} to {offset + nbytes} are not all in a buffer of {whole}", hint="offsets count from 0"
        )


class HostEvent:
    """A host timestamp."""

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


class RecordedGraph(Generic[Work]):
    """The work that a stream of this process recorded."""

    def __init__(self, work: Sequence[Work]) -> None:
        self._work: Sequence[Work] | None = work

    def _recorded(self, stream: Stream, wanted: type, owner: str) -> Sequence[Work]:
        """The work to replay on `stream`; `UsageError` for a closed graph or another device's stream."""
        if self._work is None:
            raise UsageError("a closed graph was replayed", hint="capture another")
        if not isinstance(stream, wanted):
            raise UsageError(f"a graph of {owner} was replayed on another device", hint="capture it there")
        return self._work

    def close(self) -> None:
        self._work = None


class HostGraph(RecordedGraph[Callable[[], None]]):
    """Recorded closures."""

    def replay(self, stream: Stream) -> None:
        work = self._recorded(stream, HostStream, "the host")
        assert isinstance(stream, HostStream)
        for step in work:
            stream.enqueue(step)

    def launcher(self, stream: Stream) -> Callable[[], None]:
        return partial(self.replay, stream)


class RecordingStream(Generic[Work]):
    """A stream of this process, whose captures record its work."""

    def __init__(self, handle: int) -> None:
        self._recording: list[Work] | None = None
        self._closed = False
        self._handle = handle

    @property
    def handle(self) -> int:
        """A unique number, unknown to other libraries."""
        self._check_open()
        return self._handle

    @property
    def capturing(self) -> bool:
        return self._recording is not None

    def _record_work(self, work: Callable[[Any], None]) -> list[Work]:
        """The work that `work(stream)` enqueues, none of it run."""
        self._check_open()
        if self._recording is not None:
            raise UsageError("a capture is under way on this stream", hint="one capture at a time")
        recorded: list[Work] = []
        self._recording = recorded
        try:
            work(self)
        finally:
            self._recording = None
        return recorded

    def _check_can_synchronize(self) -> None:
        self._check_open()
        if self._recording is not None:
            raise UsageError("a stream cannot be waited for while it is captured", hint="synchronize after the capture")

    def _check_can_wait(self, same_device: bool) -> None:
        self._check_open()
        if not same_device:
            raise UsageError("an event of another device was waited for", hint="record it on this device")
        if self._recording is not None:
            raise UsageError("a stream cannot wait for an event while it is captured", hint="wait before the capture")

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("a closed stream was used", hint="open another")


class HostStream(RecordingStream[Callable[[], None]]):
    """A synchronous stream, except during a capture."""

    _handles = itertools.count(1)

    def __init__(self) -> None:
        super().__init__(next(self._handles))

    def enqueue(self, step: Callable[[], None]) -> None:
        """Run `step` now, or record it during a capture."""
        self._check_open()
        if self._recording is not None:
            self._recording.append(step)
        else:
            step()

    def synchronize(self) -> None:
        self._check_can_synchronize()

    def record(self) -> HostEvent:
        self._check_open()
        return HostEvent(captured=self._recording is not None)

    def wait(self, event: Event) -> None:
        self._check_can_wait(isinstance(event, HostEvent))
        assert isinstance(event, HostEvent)
        event.reached_ns()

    def wait_for_external(self, external_streams: Collection[int]) -> bool:
        return True

    def order_after(self, handle: int) -> None:
        """Does nothing: work on the host is done when it is enqueued."""

    order_before = order_after

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        return HostGraph(self._record_work(work))

    def close(self) -> None:
        self._closed = True


class HostDevice:
    """The CPU and its memory."""

    name = "cpu"

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._accounting, self._pinned_accounting = MemoryAccounting(), MemoryAccounting()
        self._pinned_ranges: AddressRanges[None] = AddressRanges()

    def properties(self) -> Properties:
        cpu = info.cpu()
        return Properties(name=cpu.name, memory_bytes=psutil.virtual_memory().total, multiprocessors=cpu.cores)

    def memory(self) -> MemoryStats:
        machine, held, pinned = psutil.virtual_memory(), self._accounting.usage(), self._pinned_accounting.usage()
        free = machine.available if self.limit_bytes is None else min(machine.available, self.limit_bytes - held.nbytes)
        return MemoryStats(
            machine.total, free, held.nbytes, held.peak_bytes, held.count, self.limit_bytes,
            pinned.nbytes, pinned.peak_bytes, pinned.count, held.total_allocations,
        )  # fmt: skip

    def allocate(self, nbytes: int, stream: Any = None) -> HostBuffer:
        ledger = self._accounting
        if (free := ledger.reserve(nbytes, self.limit_bytes)) is not None:
            raise memory_exhausted(self.name, nbytes, free, psutil.virtual_memory().total, self.limit_bytes)
        memory = _allocate_aligned(nbytes, ledger)
        return HostBuffer(self, memory, nbytes, lambda: ledger.release(nbytes))

    def pinned(self, nbytes: int) -> HostBuffer:
        """Pageable memory, counted as pinned and accepted in a capture."""
        ledger, ranges = self._pinned_accounting, self._pinned_ranges
        ledger.reserve(nbytes)
        memory = _allocate_aligned(nbytes, ledger)
        start = address_of(memory)
        ranges.add(start, nbytes, None)

        def forget() -> None:
            ranges.remove(start)
            ledger.release(nbytes)

        return HostBuffer(self, memory, nbytes, forget)

    def borrow(self, array: Any, stream: Any) -> HostBuffer:
        """The memory of a numpy array, or of an array with DLPack on the host."""
        if not isinstance(array, np.ndarray):
            lent = dlpack.import_array(array, None)
            if lent.device_type not in dlpack.ON_HOST:
                raise UsageError("an array of another device was given to `cpu`", hint="copy it to the host first")
            array = np.asarray(lent)
        memory = as_bytes(array)
        return HostBuffer(self, memory, memory.nbytes)

    def reader(self, kind: type, stream: Any) -> Callable[[Any], int | None]:
        return lambda array: self.borrow(array, stream).pointer

    def stream(self) -> HostStream:
        return HostStream()

    def upload(self, array: Any, buffer: Any, stream: Any) -> None:
        source = upload_bytes(array, buffer)
        self._check_capture(source, stream)
        stream.enqueue(lambda: np.copyto(buffer.memory()[: source.nbytes], source))

    def download(self, buffer: Any, array: Any, stream: Any) -> None:
        target = download_bytes(array, buffer)
        self._check_capture(target, stream)
        stream.enqueue(lambda: np.copyto(target, buffer.memory()[: target.nbytes]))

    def gather(self, arrays: Sequence[Any], buffer: Any, stream: Any) -> bool:
        return False

    def copy(self, source: Any, target: Any, nbytes: int, stream: Any) -> None:
        check_range(0, nbytes, source.nbytes)
        check_range(0, nbytes, target.nbytes)
        stream.enqueue(lambda: np.copyto(target.memory()[:nbytes], source.memory()[:nbytes]))

    def is_pinned(self, array: Any) -> bool:
        return True  # copies are done when they are enqueued

    def _check_capture(self, array: Bytes, stream: HostStream) -> None:
        if stream.capturing and array.nbytes and self._pinned_ranges.find(address_of(array)) is None:
            raise unpinned_error()

    def synchronize(self) -> None:
        """Does nothing: streams are synchronous."""

    def close(self) -> None:
        """Does nothing: buffers own their memory."""


def unpinned_error() -> UsageError:
    """The error of a copy from pageable memory in a capture: replays would access freed memory."""
    return UsageError(
        "an ordinary array was copied while a graph is captured",
        hint="copy from and to `device.pinned(nbytes).array()`",
    )


def _allocate_aligned(nbytes: int, ledger: MemoryAccounting) -> Bytes:
    """New memory aligned to a cache line, for a reservation of the ledger."""
    try:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    except BaseException as error:
        ledger.cancel(nbytes)
        if isinstance(error, MemoryError):
            raise MemoryExhausted(
                f"the host has no {nbytes} bytes left for a buffer", hint="a smaller batch, or fewer contexts"
            ) from error
        raise
    ledger.commit(nbytes)
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + max(nbytes, 1)]  # at least one byte, for the address


_RESERVE_BYTES = 256 << 20
"""Bytes reserved for the rest of the machine where no limit is given."""


def available_memory() -> int:
    """Bytes a new process may allocate: free memory of the machine or its cgroups, less a reserve."""
    free: int = psutil.virtual_memory().available
    for limit, used in _cgroup_limits():
        free = min(free, limit - used)
    return max(free - max(_RESERVE_BYTES, free // 20), 0)


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """Limit and usage in bytes of the memory cgroups of this process, outermost last, without droppable cache."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds == "":
                root, names = Path("/sys/fs/cgroup"), ("memory.max", "memory.current")
                cache = ("inactive_file", "active_file")
            elif "memory" in kinds.split(","):
                root = Path("/sys/fs/cgroup/memory")
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                cache = ("total_inactive_file", "total_active_file")
            else:
                continue
            folder = root / path.lstrip("/")
            for place in (folder, *folder.parents):
                if not place.is_relative_to(root):
                    break
                with contextlib.suppress(OSError, ValueError):  # `max`: unlimited
                    limit = int((place / names[0]).read_text())
                    used = int((place / names[1]).read_text())
                    for row in (place / "memory.stat").read_text().splitlines():
                        name, _, nbytes = row.partition(" ")
                        if name in cache:
                            used -= int(nbytes)
                    yield limit, used

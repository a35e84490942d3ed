"""`StagedArray`: pinned host memory of one tensor, between numpy arrays and device buffers.

Large arrays go in chunks: a few threads copy between pageable and pinned memory while the device copies the chunks before.
One thread moves some 10 GB/s on a server processor, the bus of a GPU 50.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeAlias

import numpy as np

from trt_engine.arrayfiles import Array
from trt_engine.device import Buffer, Device, Event, HostBuffer, Stream, info
from trt_engine.device.dlpack import DeviceArray
from trt_engine.tensors import Shape

Copy: TypeAlias = tuple[Array, Array]
"""Target and source of one numpy copy."""

CHUNK_BYTES, CHUNKED_BYTES = 2 << 20, 4 << 20
"""Size of a chunk, and of the smallest array that is copied in chunks."""
GATHERED, GATHERED_BYTES = 16, 64 << 10
"""Number and mean size of a batch's arrays from which on the driver copies them in one call: numpy takes the GIL again after
each of its copies, and waits for it among many callers. The driver alone takes three times as long (H200)."""
_MAX_THREADS = 4


class CopyThreads:
    """Threads that copy numpy arrays, started by the first large array; numpy copies without the GIL.

    The caller is one of them: it copies as the others do, so that a thread is woken once for an array and not for a chunk.
    """

    def __init__(self, count: int | None = None) -> None:
        """`count` threads, the caller among them; by default half of this process's cores, at most four."""
        self._count = count if count is not None else min(_MAX_THREADS, info.core_count() // 2)
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def run(self, works: Sequence[Callable[[], None]], then: Callable[[int], None]) -> None:
        """Run `works` in threads, and `then(number)` here after each, in any order; none is running when this returns."""
        numbers, done = iter(range(len(works))), deque[int]()  # each `next` gives one number to one thread

        def help() -> None:
            for number in numbers:
                works[number]()
                done.append(number)

        helpers = self._start(help, min(self._count, len(works)) - 1)
        try:
            for number in numbers:
                works[number]()
                then(number)
                _call_each(then, done)
            for helper in helpers:
                if not helper.cancel():  # one that has not begun, behind those of other calls, has nothing left to do
                    helper.result()
            _call_each(then, done)
        finally:
            deque(numbers, 0)  # none is begun after an error
            wait([helper for helper in helpers if not helper.cancel()])

    def _start(self, work: Callable[[], None], count: int) -> list[Future[None]]:
        if count < 1:
            return []
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._count - 1, "copy")
            return [self._threads.submit(work) for _ in range(count)]

    def close(self) -> None:
        with self._lock:
            if self._threads is not None:
                self._threads.shutdown()
                self._threads = None


def _call_each(then: Callable[[int], None], numbers: deque[int]) -> None:
    """Call it with each number, those that arrive meanwhile too; a loop of its own, as Python 3.13.0 leaves the jump of
    `while condition` out of a `try`."""
    while numbers:
        then(numbers.popleft())


class StagedArray:
    """A numpy array over pinned memory: copies from and to it are asynchronous."""

    __slots__ = ("_device", "_events", "_nbytes", "_pinned", "_threads", "array", "chunked")

    def __init__(self, device: Device, pinned: HostBuffer, array: Array, threads: CopyThreads) -> None:
        """`array` is `pinned` seen in the dtype and shape of the tensor, C-contiguous."""
        self._device, self._pinned, self._threads = device, pinned, threads
        self._nbytes = array.nbytes
        self._events: list[Event] = []
        self.array = array
        self.chunked = self._nbytes >= CHUNKED_BYTES
        """Whether `read` and `read_into` wait for the download by themselves."""

    def upload(self, source: Array, target: Buffer, stream: Stream) -> None:
        """Copy an array of the same shape and dtype to the device; it may be changed when this returns."""
        if self.chunked:
            self._upload_pieces(list(_pieces(self.array, source)), target, stream)
        else:
            np.copyto(self.array, source)
            self._device.copy(self._pinned, target, self._nbytes, stream)

    def upload_rows(self, parts: Sequence[Array], target: Buffer, stream: Stream) -> None:
        """Copy arrays joined along the first dimension, and fill the rest with the last row. Dtypes are the same."""
        if len(parts) >= GATHERED and self._nbytes >= GATHERED_BYTES * len(parts):
            missing = self.array.shape[0] - sum([part.shape[0] for part in parts])
            arrays = [np.ascontiguousarray(part) for part in (*parts, *[parts[-1][-1:]] * missing)]
            if self._device.gather(arrays, target, stream):
                return
        pieces: list[Copy] = []
        start = 0
        for part in parts:
            pieces += _pieces(self.array[start : start + part.shape[0]], part)
            start += part.shape[0]
        if start < self.array.shape[0]:
            pieces.append((self.array[start:], parts[-1][-1]))
        self._upload_pieces(pieces, target, stream)

    def _upload_pieces(self, pieces: Sequence[Copy], target: Buffer, stream: Stream) -> None:
        """Copy consecutive parts of the array, and each group of about a chunk to the device as soon as it is copied."""
        groups: list[list[Copy]] = [[]]
        ends: list[int] = []
        end = 0
        for piece in pieces:
            groups[-1].append(piece)
            end += piece[0].nbytes
            if end - (ends[-1] if ends else 0) >= CHUNK_BYTES:
                ends.append(end)
                groups.append([])
        if groups[-1]:
            ends.append(end)
        else:
            groups.pop()

        def send(number: int) -> None:
            start = ends[number - 1] if number else 0
            size = ends[number] - start
            self._device.copy(self._pinned.view(start, size), target.view(start, size), size, stream)

        if len(groups) == 1:
            _copy(groups[0])
            send(0)
        else:
            self._threads.run([partial(_copy, group) for group in groups], send)

    def download(self, source: Buffer, stream: Stream) -> None:
        """Start to copy from the device; `read` gives the values once the stream is synchronized."""
        if not self.chunked:
            self._device.copy(source, self._pinned, self._nbytes, stream)
            return
        self._events = []
        for start in range(0, self._nbytes, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self._nbytes - start)
            self._device.copy(source.view(start, size), self._pinned.view(start, size), size, stream)
            self._events.append(stream.record())

    def read(self) -> Array:
        """The downloaded values as a new array of the same shape and dtype."""
        if not self.chunked:
            return self.array.copy()
        found = np.empty(self.array.shape, self.array.dtype)
        self.read_into(found)
        return found

    def read_into(self, target: Array) -> None:
        """Copy the downloaded values to a C-contiguous array of the same shape and dtype."""
        if not self.chunked:
            np.copyto(target, self.array)
            return
        copies = zip(self._events, _chunks(target, self.array), strict=True)
        self._threads.run([partial(_copy, [copy], event) for event, copy in copies], lambda number: None)


def _copy(copies: Sequence[Copy], event: Event | None = None) -> None:
    """Numpy copies, after an event."""
    if event is not None:
        event.synchronize()
    for target, source in copies:
        np.copyto(target, source)


def _pieces(target: Array, source: Array) -> Iterator[Copy]:
    """The copy, in chunks if it is large; a strided source by rows."""
    if target.nbytes <= CHUNK_BYTES:
        yield target, source
    elif source.flags.c_contiguous:
        yield from _chunks(target, source)
    else:
        for number in range(target.shape[0]):
            yield target[number], source[number]


def _chunks(target: Array, source: Array) -> Iterator[Copy]:
    """The copy of a C-contiguous array in chunks of bytes."""
    into, out = target.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8)
    for start in range(0, into.nbytes, CHUNK_BYTES):
        yield into[start : start + CHUNK_BYTES], out[start : start + CHUNK_BYTES]


_MAX_FREE, _MAX_BLOCK_BYTES, _ALIGNMENT = 8, 1 << 20, 256
"""Large blocks kept free, and slices per small block; maximum size of a block that is sliced; slice alignment in bytes."""


class _Slice:
    """Memory of one output."""

    __slots__ = ("block", "external_streams", "offset", "pointer", "reference")

    def __init__(self, block: Buffer, offset: int) -> None:
        self.block, self.offset, self.pointer = block, offset, block.pointer + offset
        self.reference: _Reference | None = None
        """To the buffer of the latest array."""
        self.external_streams: set[int] = set()
        """Streams that use that buffer; not shared with the block's other slices."""

    @property
    def part(self) -> _Slice:
        return self


class _Reference(weakref.ref[Buffer]):
    __slots__ = ("part",)
    part: _Slice


class OutputPool:
    """Memory for device outputs of one size; a slice returns when its buffer is garbage. Thread-safe.

    An allocation costs about 20 us on a GPU, and a new address must be bound again: the slice returned last is reused first.
    """

    def __init__(self, device: Device, stream: Stream, nbytes: int) -> None:
        self._device, self._stream, self._nbytes = device, stream, nbytes
        self._size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._per_block = _MAX_FREE if self._size * _MAX_FREE <= _MAX_BLOCK_BYTES else 1
        self._slices: set[_Slice] = set()
        self._free: deque[_Slice | _Reference] = deque()
        """Free slices, as dead references where they were in use: appended at any point of any thread."""
        self._place = (0, 0)

    def acquire(self, dtype: str, shape: Shape) -> tuple[int, DeviceArray]:
        """A new array of that dtype and shape, and its address; work on the stream is ordered after what other libraries
        have queued on it.
        """
        while len(self._free) > _MAX_FREE and self._per_block == 1:
            self._slices.discard(self._free.popleft().part)  # keep few large blocks
        try:
            part = self._free.pop().part
        except IndexError:
            part = self._allocate_block()
        if part.external_streams:
            if self._stream.wait_for_external(part.external_streams):
                part.external_streams = set()
            else:
                self._free.appendleft(part)
                part = self._allocate_block()
        buffer = part.block.view(part.offset, self._nbytes)
        buffer.external_streams = part.external_streams
        part.reference = reference = _Reference(buffer, self._free.append)
        reference.part = part
        return part.pointer, DeviceArray(buffer, dtype, shape, self._place)

    def _allocate_block(self) -> _Slice:
        block = self._device.allocate(self._size * self._per_block)
        self._place = block.array().device  # exported: slices keep it alive, and nothing closes it
        first, *others = [_Slice(block, number * self._size) for number in range(self._per_block)]
        self._slices.update((first, *others))
        self._free.extend(others)
        return first

    def close(self) -> None:
        """Free unreferenced blocks; others are freed with the callers' arrays."""
        free = {item.part for item in list(self._free)}  # a snapshot: other threads append
        kept = {id(part.block) for part in self._slices if part not in free or part.external_streams}
        for block in {id(part.block): part.block for part in free}.values():
            if id(block) not in kept:
                block.close()
        self._free.clear()
        self._slices.clear()

"""`Pool`: buffers of a device that are kept and handed out again by size, with a limit and statistics."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from dataclasses import dataclass

from trt_engine.device import Buffer, Device
from trt_engine.device.ledger import Ledger, check_size, exhausted
from trt_engine.errors import MemoryExhausted, UsageError

__all__ = ["Pool", "PoolStats", "size_class"]

_SMALLEST, _FINE = 512, 1 << 20

log = logging.getLogger(__name__)


def size_class(nbytes: int) -> int:
    """The size a request is rounded up to: a power of two up to 1 MiB, then eighths of one (at most 12.5 % more)."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    power = 1 << (nbytes - 1).bit_length()
    step = power if power <= _FINE else power // 16  # between two powers lie eight sizes
    return -(-nbytes // step) * step


@dataclass(frozen=True, slots=True)
class PoolStats:
    """What a pool holds and what it has done."""

    total_bytes: int
    """Taken from the device: in use and idle."""
    used_bytes: int
    idle_bytes: int
    peak_bytes: int
    """The most that was taken from the device at once."""
    count: int
    """Buffers in use."""
    served: int
    """Requests answered."""
    reused: int
    """Of these, with memory that was there already."""


class Pool:
    """Buffers of `device`, or pinned ones, that go back to the pool when they are closed. Safe from many threads.

    A buffer is closed when the streams that use it are done with it: the next request may get the same memory at once.
    One that is dropped without that does not come back; its memory goes the way of all dropped buffers of the device.
    """

    def __init__(self, device: Device, limit_bytes: int | None = None, *, pinned: bool = False) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._pinned = pinned
        self._lock = threading.Lock()
        self._idle: dict[int, list[Buffer]] = {}
        self._taken = Ledger()
        self._used_bytes = self._used_count = self._served = self._reused = 0
        self._dropped: deque[int] = deque()
        self._closed = False

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes`; `MemoryExhausted` when neither the idle memory nor the device has as much."""
        size = size_class(check_size(nbytes))
        with self._lock:
            if self._closed:
                raise UsageError("a closed pool was used", hint="make another")
            idle = self._idle.get(size)
            block = idle.pop() if idle else None
        fresh = block is None
        if block is None:
            block = self._take(nbytes, size)
        with self._lock:
            self._used_bytes += size
            self._used_count += 1
            self._served += 1
            self._reused += not fresh
        end: list[weakref.finalize[..., Buffer]] = []

        def back() -> None:
            if end[0].detach() is not None:
                self._give_back(block)

        buffer = block.view(0, nbytes, back)
        end.append(weakref.finalize(buffer, self._lost, size))
        end[0].atexit = False
        return buffer

    def _take(self, nbytes: int, size: int) -> Buffer:
        """Fresh memory; what lies idle is given back to the device before an error is."""
        for last in (False, True):
            free = self._taken.reserve(size, self._limit_bytes)
            if free is None:
                try:
                    block = self._device.pinned(size) if self._pinned else self._device.allocate(size)
                except BaseException as error:
                    self._taken.undo(size)
                    if not isinstance(error, MemoryExhausted) or last or not self.trim():
                        raise
                else:
                    self._taken.keep(size)
                    return block
            elif last or not self.trim():
                assert self._limit_bytes is not None
                name = f"a {'pinned ' if self._pinned else ''}pool of {self._device.name}"
                raise exhausted(name, nbytes, free, self._limit_bytes, self._limit_bytes)
        raise AssertionError("the second attempt returns or raises")

    def stats(self) -> PoolStats:
        with self._lock:
            self._settle()
            taken, idle = self._taken.read(), sum(size * len(blocks) for size, blocks in self._idle.items())
            return PoolStats(
                taken.nbytes, self._used_bytes, idle, taken.peak_bytes, self._used_count, self._served, self._reused
            )

    def trim(self, keep_bytes: int = 0) -> int:
        """Give idle memory back to the device, the largest first, until at most `keep_bytes` of it are left; how much."""
        doomed: list[tuple[int, Buffer]] = []
        with self._lock:
            left = sum(size * len(blocks) for size, blocks in self._idle.items())
            for size in sorted(self._idle, reverse=True):
                blocks = self._idle[size]
                while blocks and left > keep_bytes:
                    doomed.append((size, blocks.pop()))
                    left -= size
        for size, block in doomed:
            self._free(size, block)
        return sum(size for size, _ in doomed)

    def close(self) -> None:
        """Give everything idle back; buffers still in use follow when they are closed. Never raises."""
        with self._lock:
            self._closed, before = True, self._closed
            self._settle()
            in_use = self._used_count
        if not before and in_use:
            log.warning("a pool of `%s` was closed with %d buffers in use", self._device.name, in_use)
        self.trim()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_back(self, block: Buffer) -> None:
        size = block.nbytes
        with self._lock:
            self._used_bytes -= size
            self._used_count -= 1
            if not self._closed:
                self._idle.setdefault(size, []).append(block)
                return
        self._free(size, block)

    def _lost(self, size: int) -> None:
        """The collector may call this in the middle of anything here: it waits for no lock."""
        log.warning("a buffer of %d bytes of a pool was dropped without `close`", size)
        self._dropped.append(size)
        self._taken.give(size)

    def _settle(self) -> None:
        while self._dropped:
            self._used_bytes -= self._dropped.popleft()
            self._used_count -= 1

    def _free(self, size: int, block: Buffer) -> None:
        try:
            block.close()
        except Exception as error:  # `close` and `trim` never raise
            log.warning("a buffer of a pool could not be given back: %s", error)
        self._taken.give(size)

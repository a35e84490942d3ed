"""Memory accounting of a device: bytes with a limit, and owners by address.

`MemoryAccounting.release` and `AddressRanges.remove` may be called by the garbage collector at any point, also inside this
module: they never block, and are applied by the current or next lock holder.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from trt_engine.errors import MemoryExhausted, UsageError

Owner = TypeVar("Owner")


def memory_exhausted(
    name: str, nbytes: int, free_bytes: int, total_bytes: int, limit_bytes: int | None
) -> MemoryExhausted:
    """The error of a failed allocation, with requested, free and limit bytes."""
    below = "" if limit_bytes is None else f" (its limit is {limit_bytes})"
    return MemoryExhausted(
        f"`{name}` cannot allocate {nbytes} bytes: {max(free_bytes, 0)} of {total_bytes} are free{below}",
        hint="a smaller batch, or fewer contexts" + ("" if limit_bytes is None else ", or a higher limit"),
    )


def check_size(nbytes: int) -> int:
    """`nbytes`; `UsageError` if negative."""
    if nbytes < 0:
        raise UsageError(f"the size of a buffer is {nbytes} bytes", hint="sizes are not negative")
    return nbytes


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Memory use, a snapshot."""

    nbytes: int
    count: int
    peak_bytes: int
    total_allocations: int


class MemoryAccounting:
    """Counts allocated bytes, their peak and number; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._released: deque[int] = deque()
        self._nbytes = self._count = self._peak = self._total_allocations = self._reserved = 0

    def usage(self) -> MemoryUsage:
        with self._lock:
            self._apply_pending()
            return MemoryUsage(self._nbytes, self._count, self._peak, self._total_allocations)

    def reserve(self, nbytes: int, limit_bytes: int | None = None) -> int | None:
        """Reserve `nbytes` until `commit` or `cancel`; returns None, or the free bytes if the limit would be exceeded."""
        check_size(nbytes)
        with self._lock:
            self._apply_pending()
            if limit_bytes is not None and nbytes > (left := limit_bytes - self._nbytes - self._reserved):
                return left
            self._reserved += nbytes
            return None

    def commit(self, nbytes: int) -> None:
        """Count a reservation as allocated."""
        with self._lock:
            self._apply_pending()
            self._reserved -= nbytes
            self._nbytes += nbytes
            self._count += 1
            self._total_allocations += 1
            self._peak = max(self._peak, self._nbytes)

    def cancel(self, nbytes: int) -> None:
        """Cancel a reservation."""
        with self._lock:
            self._reserved -= nbytes

    def charge(self, nbytes: int, limit_bytes: int | None = None) -> int | None:
        """`reserve`, then `commit`."""
        left = self.reserve(nbytes, limit_bytes)
        if left is None:
            self.commit(nbytes)
        return left

    def release(self, nbytes: int) -> None:
        """Count `nbytes` as freed; never blocks."""
        self._released.append(nbytes)
        _run_unless_locked(self._lock, self._apply_pending)

    def _apply_pending(self) -> None:
        while self._released:
            self._nbytes -= self._released.popleft()
            self._count -= 1


class AddressRanges(Generic[Owner]):
    """Maps address ranges to owners. `find` is lock-free: it reads an immutable snapshot."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._removed: deque[int] = deque()
        self._ranges: tuple[list[int], list[tuple[int, Owner]]] = ([], [])

    def add(self, start: int, nbytes: int, owner: Owner) -> None:
        with self._lock:
            self._apply_pending()
            starts, owners = self._ranges
            at = bisect_right(starts, start)
            self._ranges = ([*starts[:at], start, *starts[at:]], [*owners[:at], (start + nbytes, owner), *owners[at:]])

    def remove(self, start: int) -> None:
        """Remove the range at `start`; never blocks. Free the memory afterwards, not before."""
        self._removed.append(start)
        _run_unless_locked(self._lock, self._apply_pending)

    def find(self, address: int) -> tuple[int, Owner] | None:
        """Start and owner of the range that contains `address`."""
        if self._removed:
            _run_unless_locked(self._lock, self._apply_pending)
        starts, owners = self._ranges
        at = bisect_right(starts, address) - 1
        if at < 0 or address >= owners[at][0]:
            return None
        return starts[at], owners[at][1]

    def _apply_pending(self) -> None:
        while self._removed:
            start = self._removed.popleft()
            starts, owners = self._ranges
            at = bisect_right(starts, start) - 1
            if at >= 0 and starts[at] == start:
                self._ranges = (starts[:at] + starts[at + 1 :], owners[:at] + owners[at + 1 :])


def _run_unless_locked(lock: threading.Lock, apply_pending: Callable[[], None]) -> None:
    """Run `apply_pending` now, or leave it to the lock holder; called by finalizers.

    `acquire(blocking=False)` could leak the lock on Ctrl-C. A thread that takes the lock in between holds it briefly.
    """
    if not lock.locked():
        with lock:
            apply_pending()


_MIN_SIZE_CLASS, _POWER_OF_TWO_LIMIT = 512, 1 << 20


def size_class(nbytes: int) -> int:
    """The size a request is rounded up to: a power of two up to 1 MiB, then eighths of one (at most 12.5 % more)."""
    if nbytes <= _MIN_SIZE_CLASS:
        return _MIN_SIZE_CLASS
    power = 1 << (nbytes - 1).bit_length()
    step = power if power <= _POWER_OF_TWO_LIMIT else power // 16  # between two powers lie eight sizes
    return -(-nbytes // step) * step

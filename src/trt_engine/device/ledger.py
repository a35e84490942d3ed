"""What a device has given out: `Ledger` counts bytes and refuses past a limit, `Ranges` finds who owns an address.

What gives back (`Ledger.give`, `Ranges.remove`) may be called by the garbage collector, in the middle of anything this very
thread does here: it never waits for its own thread, and is counted in by whoever has the lock, or comes next.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from trt_engine.errors import MemoryExhausted, UsageError

__all__ = ["Ledger", "Ranges", "Tally", "check_size", "exhausted"]

Owner = TypeVar("Owner")


def exhausted(name: str, nbytes: int, free_bytes: int, total_bytes: int, limit_bytes: int | None) -> MemoryExhausted:
    """The error of an allocation that does not fit: what was asked for, what is free, and the limit if there is one."""
    below = "" if limit_bytes is None else f" (its limit is {limit_bytes})"
    return MemoryExhausted(
        f"`{name}` was asked for {nbytes} bytes and has {max(free_bytes, 0)} of {total_bytes} left{below}",
        hint="a smaller batch, or fewer contexts" + ("" if limit_bytes is None else ", or a higher limit"),
    )


def check_size(nbytes: int) -> int:
    """The size, which must be a number from 0 on."""
    if nbytes < 0:
        raise UsageError(f"a buffer of {nbytes} bytes was asked for", hint="a number from 0 on")
    return nbytes


@dataclass(frozen=True, slots=True)
class Tally:
    """What is given out at one moment."""

    nbytes: int
    count: int
    peak_bytes: int
    served: int


class Ledger:
    """Bytes given out, the most there ever were, and how many pieces; safe from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_back: deque[int] = deque()
        self._nbytes = self._count = self._peak = self._served = self._reserved = 0

    def read(self) -> Tally:
        with self._lock:
            self._settle()
            return Tally(self._nbytes, self._count, self._peak, self._served)

    def reserve(self, nbytes: int, limit_bytes: int | None = None) -> int | None:
        """Set `nbytes` aside until `keep` or `undo`; where they would pass the limit the bytes left come back instead."""
        check_size(nbytes)
        with self._lock:
            self._settle()
            if limit_bytes is not None and nbytes > (left := limit_bytes - self._nbytes - self._reserved):
                return left
            self._reserved += nbytes
            return None

    def keep(self, nbytes: int) -> None:
        """Count what was reserved as given out: the memory is there."""
        with self._lock:
            self._settle()
            self._reserved -= nbytes
            self._nbytes += nbytes
            self._count += 1
            self._served += 1
            self._peak = max(self._peak, self._nbytes)

    def undo(self, nbytes: int) -> None:
        """Forget a `reserve` whose memory could not be had."""
        with self._lock:
            self._reserved -= nbytes

    def take(self, nbytes: int, limit_bytes: int | None = None) -> int | None:
        """`reserve` and `keep` at once."""
        left = self.reserve(nbytes, limit_bytes)
        if left is None:
            self.keep(nbytes)
        return left

    def give(self, nbytes: int) -> None:
        """Count `nbytes` as given back; may be called in the middle of anything."""
        self._given_back.append(nbytes)
        _unless_busy(self._lock, self._settle)

    def _settle(self) -> None:
        while self._given_back:
            self._nbytes -= self._given_back.popleft()
            self._count -= 1


class Ranges(Generic[Owner]):
    """Address ranges and their owners. `find` takes no lock: it reads a tuple that is replaced, never changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gone: deque[int] = deque()
        self._held: tuple[list[int], list[tuple[int, Owner]]] = ([], [])

    def add(self, start: int, nbytes: int, owner: Owner) -> None:
        with self._lock:
            self._settle()
            starts, owners = self._held
            at = bisect_right(starts, start)
            self._held = ([*starts[:at], start, *starts[at:]], [*owners[:at], (start + nbytes, owner), *owners[at:]])

    def remove(self, start: int) -> None:
        """Forget the range that begins there; in the middle of anything. The memory is given back after this, not before."""
        self._gone.append(start)
        _unless_busy(self._lock, self._settle)

    def find(self, address: int) -> tuple[int, Owner] | None:
        """Where the range that holds `address` begins, and whose it is."""
        if self._gone:
            _unless_busy(self._lock, self._settle)
        starts, owners = self._held
        at = bisect_right(starts, address) - 1
        if at < 0 or address >= owners[at][0]:
            return None
        return starts[at], owners[at][1]

    def _settle(self) -> None:
        while self._gone:
            start = self._gone.popleft()
            starts, owners = self._held
            at = bisect_right(starts, start) - 1
            if at >= 0 and starts[at] == start:
                self._held = (starts[:at] + starts[at + 1 :], owners[:at] + owners[at + 1 :])


def _unless_busy(lock: threading.Lock, settle: Callable[[], None]) -> None:
    """Settle now, or leave it to whoever has the lock: finalisers call this, which the collector runs at any time.

    Not by `acquire(blocking=False)`: in the instant behind it Ctrl-C would keep the lock taken for ever. Who takes the lock
    between the two lines has it for a few steps, and waits for nobody.
    """
    if not lock.locked():
        with lock:
            settle()

"""Memory for outputs that stay on the device, given out again once nobody has it any more."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from sys import getrefcount
from typing import Any, TypeAlias

from trt_engine.device import Buffer, Device, Stream
from trt_engine.device.dlpack import DeviceArray
from trt_engine.runtime.counting import ONE_AT_A_TIME

__all__ = ["Lying", "LyingSet", "Slots"]

_SLOTS, _BLOCK, _ALIGNED = 8, 1 << 20, 256
"""Small outputs on the device come from blocks of so many, and of so many bytes at most; where one may begin."""

_COUNTED = sys.implementation.name == "cpython" and ONE_AT_A_TIME
"""Whether the references to an object are counted, all of them and at once."""


class Lying:
    """Sets of arrays on the device that outputs go to. One that nobody has any more is given out again as it is: to make
    one anew takes 6 microseconds and more, which a fast model's caller sees.

    Nobody has an array that has no references but those it had before it was given out, which CPython counts: who wants
    its memory keeps the array, its buffer, or a capsule, and each of them counts.
    """

    def __init__(self, stream: Stream, make: Callable[[], LyingSet]) -> None:
        self._stream, self._make = stream, make
        self.sets: deque[LyingSet] = deque()
        """The one given out longest ago stands first."""

    def take(self) -> LyingSet:
        """A set that nobody has: who takes it hands out a copy of its `arrays`."""
        sets = self.sets
        if sets:
            oldest = sets[0]
            if oldest.is_free(self._stream):
                sets.rotate(-1)
                return oldest
            if len(sets) == _SLOTS:
                sets.popleft()  # kept by somebody for long
        made = self._make()
        if _COUNTED and made.is_ours and all(type(array) is DeviceArray for array in made.arrays.values()):
            sets.append(made)
        return made


class LyingSet:
    """Arrays by name, their memory, and what runs an inference into it.

    Somebody who closes one of the buffers is in `ended`.
    """

    __slots__ = ("_held", "addresses", "arrays", "buffers", "ended", "fed", "is_ours", "run")

    def __init__(self, arrays: dict[str, Any], buffers: tuple[Buffer, ...], ended: list[None]) -> None:
        self.arrays, self.buffers, self.ended = arrays, buffers, ended
        self.addresses = [buffer.pointer for buffer in buffers]
        self.fed: list[int] | None = None
        """Where the inputs lie that `run` reads."""
        self.run: Callable[[], None] | None = None
        self._held: list[Any] = [[*pair, 0, 0] for pair in zip(arrays.values(), buffers, strict=True)]
        for one in self._held:
            array, buffer, _, _ = one  # counted with the two names, as `is_free` will
            one[2:] = getrefcount(array), getrefcount(buffer)
        self.is_ours = all(one[2:] == _OURS for one in self._held)
        """Nobody else had one while it was counted, as a debugger may that looks at a frame's variables."""

    def is_free(self, stream: Stream) -> bool:
        """Whether work on that stream may write into it from now on."""
        for array, buffer, arrays, buffers in self._held:
            if getrefcount(array) != arrays or getrefcount(buffer) != buffers:
                return False
            if buffer.readers:
                if not stream.follow(buffer.readers):
                    return False
                buffer.readers.clear()
        return not self.ended


@dataclass(slots=True)
class _Like:
    buffer: Any = None
    pointer: int = 0


def _ours() -> list[int]:
    """How many references to an array, and to its buffer, are a set's own."""
    like: Any = _Like()
    one = LyingSet({"": _Like(like)}, (like,), [])
    del like
    array, buffer, _, _ = one._held[0]
    return [getrefcount(array), getrefcount(buffer)]


_OURS: list[int] = []
_OURS = _ours()

_Part: TypeAlias = tuple[Buffer, int, set[int]]
"""Of which block, from which byte on, and who was told to read there."""


class Slots:
    """Memory for outputs of one size that stay on the device: a part that nobody has any more is given out again, the one
    that has been free for longest first. An allocation for each would cost some 20 microseconds on a GPU, and give every
    inference another address, of which a library must be told.
    """

    def __init__(self, device: Device, stream: Stream, nbytes: int) -> None:
        self._device, self._stream, self._nbytes = device, stream, nbytes
        self._size = -(-nbytes // _ALIGNED) * _ALIGNED
        self._most = _SLOTS if self._size * _SLOTS <= _BLOCK else 1
        self._free: deque[_Part] = deque()
        self._out: dict[weakref.ref[Buffer], _Part] = {}

    def take(self, then: Callable[[], None] | None = None) -> Buffer:
        """A part; `then` is called when somebody closes it."""
        try:
            block, start, readers = self._free.popleft()
        except IndexError:
            block, start = self._new()
        else:
            if readers and not self._stream.follow(readers):
                self._free.append((block, start, readers))
                block, start = self._new()
        part = block.view(start, self._nbytes, then)
        part.readers = set()  # whoever reads it reads nothing of the block's other parts
        self._out[weakref.ref(part, self._back)] = block, start, part.readers
        return part

    def _new(self) -> tuple[Buffer, int]:
        block = self._device.allocate(self._size * self._most)
        block.array()  # lent from the start: whoever holds a part keeps it, and nobody closes it
        self._free.extend((block, number * self._size, set()) for number in range(1, self._most))
        return block, 0

    def _back(self, gone: weakref.ref[Buffer]) -> None:
        """The collector calls this in the middle of anything."""
        slot = self._out.get(gone)
        if slot is not None:
            self._free.append(slot)  # before it is taken out there: `close` of another thread must find it
            self._out.pop(gone, None)
            if self._most == 1 and len(self._free) > _SLOTS:
                self._free.popleft()  # of large ones few are kept

    def close(self) -> None:
        """Give back what nobody has; the rest is given back with the callers' arrays, or once it has been read."""
        out, free = list(self._out.values()), list(self._free)  # at once: others are given back meanwhile
        kept = {id(block) for block, _, _ in out} | {id(block) for block, _, to in free if to}
        for block, start, _ in free:
            if start == 0 and id(block) not in kept:
                block.close()
        self._free.clear()
        self._out.clear()

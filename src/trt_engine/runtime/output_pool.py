"""`OutputPool`: recycles the memory of device outputs that no array refers to any more."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TypeAlias

from trt_engine.device import Buffer, Device, Stream

_MAX_FREE, _MAX_BLOCK_BYTES, _ALIGNMENT = 8, 1 << 20, 256
"""Large blocks kept free, and slices per small block; maximum size of a block that is sliced; slice alignment in bytes."""

_Slice: TypeAlias = tuple[Buffer, int, set[int]]
"""Block, offset in bytes, external streams."""


class OutputPool:
    """Memory for device outputs of one size; a slice returns when its buffer is garbage. Thread-safe.

    An allocation costs about 20 us on a GPU, and a new address must be bound again: the slice returned last is reused first.
    """

    def __init__(self, device: Device, stream: Stream, nbytes: int) -> None:
        self._device, self._stream, self._nbytes = device, stream, nbytes
        self._size = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._per_block = _MAX_FREE if self._size * _MAX_FREE <= _MAX_BLOCK_BYTES else 1
        self._free: deque[_Slice] = deque()
        self._in_use: dict[weakref.ref[Buffer], _Slice] = {}

    def acquire(self) -> Buffer:
        """A slice; work on the stream is ordered after what other libraries have queued on it."""
        try:
            block, start, readers = self._free.pop()
        except IndexError:
            block, start = self._allocate_block()
        else:
            if readers and not self._stream.wait_for_external(readers):
                self._free.appendleft((block, start, readers))
                block, start = self._allocate_block()
        part = block.view(start, self._nbytes)
        part.external_streams = set()  # not shared with the block's other slices
        self._in_use[weakref.ref(part, self._release)] = block, start, part.external_streams
        return part

    def _allocate_block(self) -> tuple[Buffer, int]:
        block = self._device.allocate(self._size * self._per_block)
        block.array()  # exported: slices keep it alive, and nothing closes it
        self._free.extend((block, number * self._size, set()) for number in range(1, self._per_block))
        return block, 0

    def _release(self, reference: weakref.ref[Buffer]) -> None:
        """Weakref callback: may run at any point of any thread."""
        slot = self._in_use.get(reference)
        if slot is not None:
            self._free.append(slot)  # before the pop, so that a concurrent `close` finds it
            self._in_use.pop(reference, None)
            if self._per_block == 1 and len(self._free) > _MAX_FREE:
                self._free.popleft()  # keep few large blocks

    def close(self) -> None:
        """Free unreferenced blocks; others are freed with the callers' arrays."""
        out, free = list(self._in_use.values()), list(self._free)  # snapshot: other threads release concurrently
        kept = {id(block) for block, _, _ in out} | {id(block) for block, _, to in free if to}
        for block, start, _ in free:
            if start == 0 and id(block) not in kept:
                block.close()
        self._free.clear()
        self._in_use.clear()

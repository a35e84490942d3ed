"""`OutputPool`: recycles the memory of device outputs that no array refers to any more."""

from __future__ import annotations

import weakref
from collections import deque

from trt_engine.device import Buffer, Device, Stream
from trt_engine.device.dlpack import DeviceArray
from trt_engine.tensors import Shape

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

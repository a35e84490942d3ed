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
        """To the buffer that is in use."""
        self.external_streams: set[int] = set()
        """Of that buffer; not shared with the block's other slices."""


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
        self._free: deque[_Slice] = deque()
        self._in_use: set[_Slice] = set()
        self._place = (0, 0)

    def acquire(self, dtype: str, shape: Shape) -> tuple[int, DeviceArray]:
        """A new array and its address; work on the stream is ordered after what other libraries have queued on it."""
        try:
            part = self._free.pop()
        except IndexError:
            part = self._allocate_block()
        else:
            if part.external_streams:
                if self._stream.wait_for_external(part.external_streams):
                    part.external_streams = set()
                else:
                    self._free.appendleft(part)
                    part = self._allocate_block()
        buffer = part.block.view(part.offset, self._nbytes)
        buffer.external_streams = part.external_streams
        part.reference = reference = _Reference(buffer, self._release)
        reference.part = part
        self._in_use.add(part)
        return part.pointer, DeviceArray(buffer, dtype, shape, self._place)

    def _allocate_block(self) -> _Slice:
        block = self._device.allocate(self._size * self._per_block)
        self._place = block.array().device  # exported: slices keep it alive, and nothing closes it
        self._free.extend(_Slice(block, number * self._size) for number in range(1, self._per_block))
        return _Slice(block, 0)

    def _release(self, reference: weakref.ref[Buffer]) -> None:
        """Weakref callback: may run at any point of any thread."""
        part = reference.part  # type: ignore[attr-defined]
        if part in self._in_use:
            self._free.append(part)  # before it is discarded, so that a concurrent `close` finds it
            self._in_use.discard(part)
            if self._per_block == 1 and len(self._free) > _MAX_FREE:
                self._free.popleft()  # keep few large blocks

    def close(self) -> None:
        """Free unreferenced blocks; others are freed with the callers' arrays."""
        out, free = list(self._in_use), list(self._free)  # snapshot: other threads release concurrently
        kept = {id(part.block) for part in out} | {id(part.block) for part in free if part.external_streams}
        for block in {id(part.block): part.block for part in free}.values():
            if id(block) not in kept:
                block.close()
        self._free.clear()
        self._in_use.clear()

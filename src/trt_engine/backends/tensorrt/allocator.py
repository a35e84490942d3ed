"""TensorRT's own device memory, counted: what it takes while it builds or runs goes through one of our devices."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import tensorrt as trt

from trt_engine.errors import MemoryExhausted

__all__ = ["Allocated", "CountingAllocator", "Memory", "let_go"]

log = logging.getLogger(__name__)


class Block(Protocol):
    """Memory of a GPU."""

    @property
    def pointer(self) -> int: ...
    def close(self) -> None: ...


class Memory(Protocol):
    """Where it comes from: a `Device`, or `driver.Memory`."""

    def allocate(self, nbytes: int) -> Block:
        """`MemoryExhausted` where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Allocated:
    """Device memory TensorRT asked for, in bytes."""

    now: int
    peak: int
    total: int
    """Of all allocations, freed or not."""
    count: int
    refused: int
    """Requests the device had no memory for."""

    def __str__(self) -> str:
        return f"peak {self.peak >> 20} MiB, total {self.total >> 20} MiB in {self.count} allocations"


class CountingAllocator(trt.IGpuAsyncAllocator):  # type: ignore[misc]
    """Gives TensorRT memory of `memory` and counts it. Called from any thread; never raises.

    Memory given back in a stream's order is freed when that stream is done (`synchronize(stream)`), other memory when
    everything is (`synchronize(0)`), as CUDA's own `cudaFree` does. What TensorRT still holds at `close` is freed then and
    said.
    """

    def __init__(self, memory: Memory, synchronize: Callable[[int], None]) -> None:
        super().__init__()
        self._memory = memory
        self._synchronize = synchronize
        self._lock = threading.Lock()
        self._buffers: dict[int, tuple[Block, int]] = {}
        self._now = self._peak = self._total = self._count = self._refused = 0
        self.error: BaseException | None = None
        """What went wrong in a callback other than having no memory: TensorRT would only print it."""

    @property
    def allocated(self) -> Allocated:
        """The counts until now."""
        with self._lock:
            return Allocated(self._now, self._peak, self._total, self._count, self._refused)

    # -------------------------------------------------------------------------------- called by TensorRT

    def allocate(self, size: int, alignment: int, flags: int) -> int:
        return self._take(size, alignment)

    def allocate_async(self, size: int, alignment: int, first: int, second: int) -> int:
        # flags and stream, in an order that 11.2 turned around
        return self._take(size, alignment)  # there at once, so before anything the stream will do

    def reallocate(self, address: int, alignment: int, new_size: int) -> int:
        return 0  # TensorRT then allocates anew; None is printed as an error in the bindings

    def deallocate(self, memory: int) -> bool:
        return self._give(memory, 0)

    def deallocate_async(self, memory: int, stream: int) -> bool:
        return self._give(memory, stream)

    def _take(self, size: int, alignment: int) -> int:
        if size == 0:
            return 0
        try:
            buffer = self._memory.allocate(size)
        except MemoryExhausted:
            with self._lock:
                self._refused += 1
            return 0
        except Exception as error:
            self.error = self.error or error
            return 0
        pointer = buffer.pointer
        if alignment and pointer % alignment:
            buffer.close()
            self.error = self.error or ValueError(f"an address is not a multiple of {alignment}")
            return 0
        with self._lock:
            self._buffers[pointer] = (buffer, size)
            self._count += 1
            self._total += size
            self._now += size
            self._peak = max(self._peak, self._now)
        return pointer

    def _give(self, memory: int, stream: int) -> bool:
        if not memory:
            return True
        try:
            self._synchronize(stream)
        except Exception as error:  # freed all the same: the alternative is a leak
            self.error = self.error or error
        with self._lock:
            held = self._buffers.pop(memory, None)
            if held is None:
                return False
            self._now -= held[1]
        try:
            held[0].close()
        except Exception as error:
            self.error = self.error or error
            return False
        return True

    def close(self) -> None:
        """Free what TensorRT still holds; call it after the objects that used it are gone."""
        with self._lock:
            left, self._buffers, held, self._now = list(self._buffers.values()), {}, self._now, 0
        if left:
            log.warning("TensorRT kept %d allocations (%d bytes) of its own; freed now", len(left), held)
        for buffer, _ in left:
            with contextlib.suppress(Exception):  # an interpreter that ends: nothing can be done about it
                buffer.close()


def let_go(error: BaseException) -> None:
    """Drop what the frames of a failure hold: TensorRT's objects give their memory back before their allocator ends."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)  # frames that still run are left as they are
        one = one.__cause__ or one.__context__

"""Counts the device memory that TensorRT allocates during builds and inference, through our device."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from trt_engine.errors import MemoryExhausted

log = logging.getLogger(__name__)


class DeviceAllocation(Protocol):
    """Memory of a GPU."""

    @property
    def pointer(self) -> int: ...
    def close(self) -> None: ...


class DeviceMemory(Protocol):
    """The source of device memory: a `Device`, or `driver.Memory`."""

    def allocate(self, nbytes: int) -> DeviceAllocation:
        """`MemoryExhausted` if there is not enough."""
        ...


@dataclass(frozen=True, slots=True)
class AllocationStats:
    """Device memory requested by TensorRT, in bytes."""

    current_bytes: int
    peak_bytes: int
    total_bytes: int
    """Sum of all allocations, freed or not."""
    count: int
    failed: int
    """Number of failed requests."""

    def __str__(self) -> str:
        return f"peak {self.peak_bytes >> 20} MiB, total {self.total_bytes >> 20} MiB in {self.count} allocations"


class CountingAllocator:
    """Allocates memory for TensorRT from `memory` and counts it. Called from any thread; never raises.

    Stream-ordered frees wait for that stream (`synchronize(stream)`), others for the device (`synchronize(0)`), as
    `cudaFree` does. What TensorRT has not freed by `close` is freed then, with a warning.
    """

    native_base = "IGpuAsyncAllocator"

    def __init__(self, memory: DeviceMemory, synchronize: Callable[[int], None]) -> None:
        self._memory = memory
        self._synchronize = synchronize
        self._lock = threading.Lock()
        self._buffers: dict[int, tuple[DeviceAllocation, int]] = {}
        self._now = self._peak = self._total = self._count = self._failed = 0
        self.error: BaseException | None = None
        """A callback's error other than out of memory: TensorRT would only print it."""

    @property
    def stats(self) -> AllocationStats:
        """The counts so far."""
        with self._lock:
            return AllocationStats(self._now, self._peak, self._total, self._count, self._failed)

    # -------------------------------------------------------------------------------- called by TensorRT

    def allocate(self, size: int, alignment: int, flags: int) -> int:
        return self._allocate(size, alignment)

    def allocate_async(self, size: int, alignment: int, first: int, second: int) -> int:
        # flags and stream, in an order that 11.2 turned around
        return self._allocate(size, alignment)  # available at once, before any work of the stream

    def reallocate(self, address: int, alignment: int, new_size: int) -> int:
        return 0  # TensorRT then allocates again; None is printed as an error in the bindings

    def deallocate(self, memory: int) -> bool:
        return self._free(memory, 0)

    def deallocate_async(self, memory: int, stream: int) -> bool:
        return self._free(memory, stream)

    def _allocate(self, size: int, alignment: int) -> int:
        if size == 0:
            return 0
        try:
            buffer = self._memory.allocate(size)
        except MemoryExhausted:
            with self._lock:
                self._failed += 1
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

    def _free(self, memory: int, stream: int) -> bool:
        if not memory:
            return True
        try:
            self._synchronize(stream)
        except Exception as error:  # freed anyway: the alternative is a leak
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
            log.warning("TensorRT did not free %d allocations (%d bytes); freed now", len(left), held)
        for buffer, _ in left:
            with contextlib.suppress(Exception):  # an interpreter that ends: nothing can be done about it
                buffer.close()


def clear_frames(error: BaseException) -> None:
    """Clear the frames of an error, so that TensorRT's objects free their memory before their allocator closes."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)  # running frames are skipped
        one = one.__cause__ or one.__context__

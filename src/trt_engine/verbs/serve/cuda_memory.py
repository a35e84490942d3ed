"""CUDA shared memory of clients: GPU memory registered by IPC handle, used in place by engines on that GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from trt_engine.device import Buffer, Device, Stream, open_device
from trt_engine.errors import UsageError
from trt_engine.open_inference.wire_tensors import aligned_buffer
from trt_engine.tensors import Shape
from trt_engine.verbs.serve.shared_memory import Regions

_ALIGNMENT = 256
"""Bytes that memory is aligned to which an engine reads in place, as `cudaMalloc` aligns it."""

OpenRegion: TypeAlias = Callable[[int, bytes, int], tuple[Device, Buffer]]
"""GPU, IPC handle and size in bytes to the open device and the memory."""


@dataclass(frozen=True, slots=True)
class CudaRegion:
    """One registered region: the first `size` bytes of a client's allocation."""

    name: str
    device_id: int
    size: int
    device: Device
    buffer: Buffer

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "device_id": self.device_id, "byte_size": self.size}


class RegionOpener:
    """Opens regions on devices that stay open."""

    def __init__(self) -> None:
        self._devices: dict[int, Device] = {}

    def __call__(self, number: int, handle: bytes, size: int) -> tuple[Device, Buffer]:
        from trt_engine.device.cuda.ipc import open_shared

        if number not in self._devices:
            self._devices[number] = open_device(f"cuda:{number}")
        device: Any = self._devices[number]
        return device, open_shared(device, handle, size)


class CudaMemory(Regions[CudaRegion]):
    """The CUDA regions of a server. One that is unregistered stays mapped until the last request that uses it has ended."""

    def __init__(self, enabled: bool, open_region: OpenRegion | None = None) -> None:
        super().__init__(enabled)
        self._open = open_region or RegionOpener()
        self._streams: dict[str, Stream] = {}
        self._lock = threading.Lock()
        """Held while a stream is used."""

    def register(self, name: str, handle: bytes, device_id: int, size: int) -> None:
        """Register a region; `UsageError` where the handle is not of one, or the name is taken."""
        self._check_name(name)
        if size < 1 or device_id < 0:
            raise UsageError(f"a region of {size} bytes on GPU {device_id}", hint="`byte_size` of 1 or more")
        device, buffer = self._open(device_id, handle, size)
        if device.name not in self._streams:
            self._streams[device.name] = device.stream()
        self._regions[name] = CudaRegion(name, device_id, size, device, buffer)

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them; one that is not registered is fine."""
        for known in [name] if name else [*self._regions]:
            self._regions.pop(known, None)

    def array(self, name: str, offset: int, size: int, dtype: str, shape: Shape, device: Device | None) -> Any:
        """A part of a region as an array on its GPU; None where an engine on `device` cannot read it in place."""
        region = self.check(name, offset, size)
        part = region.buffer.view(offset, size)
        if device is None or device.name != region.device.name or part.pointer % _ALIGNMENT:
            return None
        return part.array(dtype, shape)

    def read(self, name: str, offset: int, size: int) -> memoryview:
        """A copy on the host of `size` bytes at `offset` of the region."""
        region = self.check(name, offset, size)
        found = aligned_buffer(size)
        with self._lock:
            stream = self._streams[region.device.name]
            region.device.download(region.buffer.view(offset, size), np.frombuffer(found, np.uint8), stream)
            stream.synchronize()
        return found

    def write(self, name: str, offset: int, size: int, data: memoryview | bytes) -> None:
        """Copy an output into its part of the region; `UsageError` where it does not fit."""
        region = self.check(name, offset, size, len(data))
        with self._lock:
            stream = self._streams[region.device.name]
            region.device.upload(np.frombuffer(data, np.uint8), region.buffer.view(offset, len(data)), stream)
            stream.synchronize()

    def close(self) -> None:
        self.unregister()
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()

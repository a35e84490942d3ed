"""System shared memory of clients: POSIX regions registered by name, read and written by position;
and CUDA shared memory: GPU memory registered by IPC handle, used in place by engines on that GPU.

Regions are read with `pread` and not mapped: a client that shrinks its region gets an error; a mapping would end the server.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from trt_engine.device import Buffer, Device, Stream, open_device
from trt_engine.errors import FeedError, UnknownModel, UsageError
from trt_engine.open_inference.wire_tensors import aligned_buffer
from trt_engine.tensors import Shape

_FOLDER = Path("/dev/shm")
_KEY = re.compile(r"/?[A-Za-z0-9_.-]{1,250}")
MAX_REGIONS = 1024


class AnyRegion(Protocol):
    """A registered region."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    def as_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=AnyRegion)


class Regions(Generic[R]):
    """Regions by name."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self._regions: dict[str, R] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._regions

    def status(self, name: str = "") -> list[R]:
        """The regions, or the one of that name; `UnknownModel` where it is not registered."""
        return [self._find(name)] if name else [*self._regions.values()]

    def _find(self, name: str) -> R:
        self._check_enabled()
        region = self._regions.get(name)
        if region is None:
            raise UnknownModel(f"unknown region `{name[:80]}`", hint="register it first")
        return region

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise UsageError(
                "this server does not use shared memory",
                hint="`--shared-memory-prefix /app_` or `--token-file FILE` of `trt-engine serve`",
            )

    def _check_name(self, name: str) -> None:
        """`UsageError` for a name that no further region can have."""
        if name in self._regions:
            raise UsageError(f"the region `{name[:80]}` is registered already", hint="unregister it first")
        if not name or len(name) > 250:
            raise UsageError(f"`{name[:80]}` cannot be the name of a region", hint="1 to 250 characters")
        if len(self._regions) >= MAX_REGIONS:
            raise UsageError(f"{MAX_REGIONS} regions are registered already", hint="unregister some")

    def check(self, name: str, offset: int, size: int, written: int = 0) -> R:
        """The region; `UsageError` for a part that is outside of it or smaller than `written` bytes, `UnknownModel` for one
        that is not registered."""
        region = self._find(name)
        if offset < 0 or size < 0 or offset + size > region.size:
            raise UsageError(
                f"bytes {offset} to {offset + size} are outside the region `{name}`, which has {region.size}"
            )
        if written > size:
            raise UsageError(f"an output has {written} bytes, its part of the region `{name}` {size}")
        return region


@dataclass(frozen=True, slots=True)
class Region:
    """One registered region: `size` bytes from `offset` of the POSIX object `key`."""

    name: str
    key: str
    offset: int
    size: int
    handle: int

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.size}


class SharedMemory(Regions[Region]):
    """The regions of a server; large requests read them in other threads."""

    def __init__(self, enabled: bool, prefix: str | None = None, *, own_only: bool = False) -> None:
        """`prefix`: what keys must begin with; `own_only`: regions must belong to the user of this process."""
        super().__init__(enabled)
        self._prefix, self._own_only = (prefix or "").lstrip("/"), own_only
        self._lock = threading.RLock()
        """Held while a handle is used, so that none is closed meanwhile."""

    def register(self, name: str, key: str, offset: int, size: int) -> None:
        """Register a region; `UsageError` where it is not one, or the name is taken."""
        self._check_enabled()
        self._check_name(name)
        if not _KEY.fullmatch(key) or key.strip("/") in (".", ".."):
            raise UsageError(f"`{key[:80]}` is not a key of shared memory", hint="as `/input_region`")
        if not key.lstrip("/").startswith(self._prefix):
            raise UsageError(
                f"`{key}` does not begin with `/{self._prefix}`", hint="`--shared-memory-prefix` of `trt-engine serve`"
            )
        try:
            handle = os.open(_FOLDER / key.lstrip("/"), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UsageError(f"the shared memory `{key}` cannot be opened: {os.strerror(error.errno or 0)}") from error
        found = os.fstat(handle)
        there = found.st_size
        if not stat.S_ISREG(found.st_mode) or (self._own_only and found.st_uid != os.geteuid()):
            os.close(handle)
            raise UsageError(
                f"the shared memory `{key}` belongs to another user", hint="`--token-file` of `trt-engine serve`"
            )
        if offset < 0 or size < 1 or offset + size > there:
            os.close(handle)
            raise UsageError(f"bytes {offset} to {offset + size} are outside `{key}`, which has {there}")
        self._regions[name] = Region(name, key, offset, size, handle)

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them; one that is not registered is fine."""
        with self._lock:
            for region in [item for item in self._regions.values() if name in ("", item.name)]:
                del self._regions[region.name]
                os.close(region.handle)

    def read(self, name: str, offset: int, size: int) -> memoryview:
        """A copy of `size` bytes at `offset` of the region."""
        with self._lock:
            region = self.check(name, offset, size)
            buffer, done = aligned_buffer(size), 0
            while done < size:
                count = os.preadv(region.handle, [buffer[done:]], region.offset + offset + done)
                if count < 1:
                    raise FeedError(f"the region `{name}` has shrunk", hint="register it again")
                done += count
            return buffer

    def write(self, name: str, offset: int, size: int, data: memoryview | bytes) -> None:
        """Write an output into its part of the region; `UsageError` where it does not fit."""
        with self._lock:
            region = self.check(name, offset, size, len(data))
            if os.fstat(region.handle).st_size < region.offset + offset + len(data):
                raise UsageError(f"the region `{name}` has shrunk", hint="register it again")
            done, view = 0, memoryview(data)
            while done < len(view):
                done += os.pwrite(region.handle, view[done:], region.offset + offset + done)

    def close(self) -> None:
        self.unregister()


# ------------------------------------------------------------------------------------------------ CUDA

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

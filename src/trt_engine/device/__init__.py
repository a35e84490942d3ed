"""The little of a device we use: memory, streams, events, graphs; the host, the fake one, and CUDA.

`Device`, `Buffer`, `HostBuffer`, `Stream`, `Event` and `Graph` are the protocols; `open_device("cpu")` gives the real thing.

Three rules hold on every device, and the fake one enforces them:

- **Ordinary arrays are free again when `upload` returns**: what is copied is what they held at the call. Memory from
  `Device.pinned` (or pinned by anybody else) is read when its turn comes: leave it as it is until the stream, or an event
  recorded behind the upload, is done. What `download` writes is there after that as well.
- **Memory outlives the work that uses it**: a buffer is closed when its streams are done with it. A buffer allocated *for*
  a stream may be closed as soon as its last work is enqueued there.
- **A capture is one stream's**: during it that stream is not waited for, nothing is allocated by its thread, and only pinned
  memory is copied (a replay reads and writes it again).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Protocol

from trt_engine.errors import UsageError

__all__ = [
    "Buffer",
    "Device",
    "Event",
    "Graph",
    "HostBuffer",
    "MemoryStats",
    "Properties",
    "Stream",
    "open_device",
    "parse_device",
]


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The memory of a device at one moment, in bytes, as this `Device` sees it."""

    total_bytes: int
    """What the device has; other processes share it."""
    free_bytes: int
    """What an allocation may still take: of the device, and below the limit where one is set."""
    allocated_bytes: int
    """In open buffers of this `Device`."""
    peak_bytes: int
    """The most that was in open buffers at once."""
    allocated_count: int
    """Open buffers."""
    limit_bytes: int | None = None
    """The most this `Device` may allocate; None for no limit but the device's own."""
    pinned_bytes: int = 0
    """In open pinned buffers, which are the host's memory."""
    pinned_peak_bytes: int = 0
    pinned_count: int = 0
    served_count: int = 0
    """Allocations answered since the device was opened, pinned ones not counted."""


@dataclass(frozen=True, slots=True)
class Properties:
    """What a device is."""

    name: str
    """As the vendor writes it: `NVIDIA H200`."""
    memory_bytes: int
    multiprocessors: int
    """Streaming multiprocessors; the cores this process may use on a host."""
    compute_capability: tuple[int, int] | None = None
    """As (9, 0); None where the device is no CUDA device."""


class Buffer(Protocol):
    """Memory on a device. Contents are undefined until something is written."""

    @property
    def nbytes(self) -> int: ...
    @property
    def pointer(self) -> int:
        """Address on the device; `UsageError` after `close`."""
        ...

    @property
    def closed(self) -> bool: ...

    readers: set[int]
    """Handles of the streams that other libraries said, when they were lent an array of it, they would read it on. A view
    has its buffer's.
    """

    def view(self, offset: int, nbytes: int, then: Callable[[], None] | None = None) -> Buffer:
        """A part of this memory, without a copy. Closing a view gives nothing back, but calls `then`, once; it ends with
        its buffer.
        """
        ...

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Any:
        """The memory as an array of `dtype`, without a copy: numpy on the host, else an object with DLPack (and
        `__cuda_array_interface__`). It keeps the memory: the buffer is not given back while the array is in use, unless
        somebody closes it. Dropped with the array, it is given back some time after the streams are done with it, and other
        libraries' default stream, which nobody waits for. Order your work on it behind the stream's.
        """
        ...

    def close(self) -> None:
        """Give the memory back; a second time does nothing."""
        ...


class HostBuffer(Buffer, Protocol):
    """Pinned memory of the host: `array()` is a numpy array, and copies from it and to it do not hold up the caller."""


class Event(Protocol):
    """A point in a stream's work, with a time."""

    def done(self) -> bool:
        """Whether the work before it is done; does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait until the work before it is done; raises what that work raised."""
        ...

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from `since` to here; waits for both."""
        ...


class Graph(Protocol):
    """Captured work that runs again with one call."""

    def replay(self, stream: Stream) -> None: ...
    def close(self) -> None: ...


class Stream(Protocol):
    """Work in order. Nothing enqueued is certain to be done before `synchronize` returns."""

    @property
    def handle(self) -> int:
        """The stream as other libraries take it (a `cudaStream_t` as a number); `UsageError` after `close`."""
        ...

    def synchronize(self) -> None:
        """Wait for everything enqueued; raises what failed in it."""
        ...

    def record(self) -> Event: ...
    def wait(self, event: Event) -> None:
        """Let what is enqueued here from now on begin after `event`, of this stream or another; the caller does not wait."""
        ...

    def follow(self, readers: Collection[int]) -> bool:
        """Let what is enqueued here from now on begin after what other libraries' streams with these handles have now;
        False where that could not be said. Streams that may be gone by now are left out.
        """
        ...

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """The graph of what `work` enqueues; a failed capture leaves the stream clean and raises."""
        ...

    def close(self) -> None:
        """Give the stream back; what it still has to do is waited for, or dropped and said. Never raises."""
        ...


class Device(Protocol):
    """One device: allocates memory, opens streams, copies. Safe from many threads; a stream is one thread's at a time."""

    @property
    def name(self) -> str:
        """As `open_device` takes it: `cuda:0`."""
        ...

    def properties(self) -> Properties: ...
    def memory(self) -> MemoryStats: ...
    def allocate(self, nbytes: int, stream: Stream | None = None) -> Buffer:
        """Memory for any stream; with `stream` for that one alone: then `close` takes its turn there.

        `MemoryExhausted` says what was asked for and what is left; the device stays usable.
        """
        ...

    def pinned(self, nbytes: int) -> HostBuffer:
        """Memory of the host that the device reads and writes by itself."""
        ...

    def borrow(self, array: Any, stream: Stream) -> Buffer:
        """Another library's array on this device as a buffer, without a copy; work enqueued on `stream` from now on sees
        what the array's owner has enqueued. Takes DLPack and `__cuda_array_interface__`; C-contiguous arrays only.
        """
        ...

    def stream(self) -> Stream: ...
    def upload(self, array: Any, buffer: Buffer, stream: Stream) -> None:
        """Copy a C-contiguous host array into the buffer, in the stream's order.

        An ordinary array may be changed when this returns, for which a large one waits until its turn has come; a pinned
        one when the stream is done with it.
        """
        ...

    def download(self, buffer: Buffer, array: Any, stream: Stream) -> None:
        """Copy the buffer into a C-contiguous host array; it is there after `stream.synchronize()`."""
        ...

    def copy(self, source: Buffer, target: Buffer, nbytes: int, stream: Stream) -> None:
        """Copy the first `nbytes` of `source` to `target`, in the stream's order; either may be pinned memory."""
        ...

    def synchronize(self) -> None:
        """Wait for every stream of this device; raises what failed. Streams that are being captured are left alone."""
        ...

    def close(self) -> None:
        """Give back what nobody holds, and serve no more; what is still held is said in the log and given back as it is
        closed. Never raises; a second time does nothing.
        """
        ...


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()  # "²" is a digit, and no number


def parse_device(text: str | int) -> tuple[str, int]:
    """`cpu`, `cuda:0`, `cuda`, `fake:1` or a bare number (a CUDA device) as kind and number."""
    if isinstance(text, int):
        kind, number = "cuda", str(text)
    else:
        kind, _, number = text.strip().lower().partition(":")
        if _is_number(kind) and not number:
            kind, number = "cuda", kind
    if (
        kind not in ("cpu", "cuda", "fake")
        or (number and not _is_number(number))
        or (kind == "cpu" and int(number or 0))
    ):
        raise UsageError(f"unknown device `{text}`", hint="expected `cpu`, `cuda:0`, `cuda:1`, ...")
    return kind, int(number or 0)


def open_device(text: str | int, *, limit_bytes: int | None = None) -> Device:
    """The device of that name, ready to allocate at most `limit_bytes`; `SetupError` where it cannot be had."""
    kind, number = parse_device(text)
    if limit_bytes is not None and limit_bytes <= 0:
        raise UsageError(
            f"a memory limit of {limit_bytes} bytes leaves nothing", hint="give a positive number of bytes"
        )
    if kind == "cpu":
        from trt_engine.device.host import HostDevice

        return HostDevice(limit_bytes=limit_bytes)
    if kind == "fake":
        from trt_engine.device.fake import FakeDevice

        return FakeDevice(number, limit_bytes=limit_bytes)
    from trt_engine.device.setup import cuda_device

    return cuda_device(number, limit_bytes)

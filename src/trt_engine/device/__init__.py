"""Memory, streams, events and graphs of a device: protocols, and `open_device` for host, fake and CUDA devices.

Three rules apply to every device; the fake device enforces them:

- **`upload` reads pageable arrays before it returns.** Pinned memory (from `Device.pinned` or another library) is read
  asynchronously: do not change it until the stream, or an event recorded after the upload, is done. `download` results are
  valid at the same point.
- **Memory outlives the work that uses it.** Close a buffer when its streams are done with it. A buffer allocated *for* a
  stream may be closed once its last work is enqueued.
- **During a capture** its stream is not synchronized, its thread allocates nothing, and only pinned memory is copied (a
  replay accesses it again).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trt_engine.errors import UsageError


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Memory of a device in bytes, a snapshot."""

    total_bytes: int
    """Total memory, shared with other processes."""
    free_bytes: int
    """Memory available to allocations, considering the limit."""
    allocated_bytes: int
    """Memory in open buffers of this `Device`."""
    peak_bytes: int
    """Maximum of `allocated_bytes`."""
    allocated_count: int
    """Open buffers."""
    limit_bytes: int | None = None
    """Allocation limit of this `Device`; None for none."""
    pinned_bytes: int = 0
    """Host memory in open pinned buffers."""
    pinned_peak_bytes: int = 0
    pinned_count: int = 0
    total_allocations: int = 0
    """Device allocations since the device was opened."""


@dataclass(frozen=True, slots=True)
class Properties:
    """Static device properties."""

    name: str
    """Vendor name: `NVIDIA H200`."""
    memory_bytes: int
    multiprocessors: int
    """Streaming multiprocessors; for a host, the cores available to this process."""
    compute_capability: tuple[int, int] | None = None
    """For example (9, 0); None for other devices than CUDA."""


class Buffer(Protocol):
    """Device memory, uninitialized."""

    @property
    def nbytes(self) -> int: ...
    @property
    def pointer(self) -> int:
        """Address on the device; `UsageError` after `close`."""
        ...

    @property
    def closed(self) -> bool: ...

    external_streams: set[int]
    """Handles of the streams on which other libraries use exported arrays of it. Views share the set of their buffer."""

    def view(self, offset: int, nbytes: int) -> Buffer:
        """A slice of this memory without a copy, valid as long as the buffer; closing it frees nothing."""
        ...

    def array(self, dtype: str = "uint8", shape: tuple[int, ...] | None = None) -> Any:
        """The memory as an array of `dtype` without a copy: numpy on the host, else an object with DLPack (and
        `__cuda_array_interface__`). The array keeps the buffer alive unless it is closed. A buffer dropped with its arrays
        is freed after all streams and the default stream are done with it, without waiting. Order your work after the
        stream's.
        """
        ...

    def close(self) -> None:
        """Free the memory. Idempotent."""
        ...


class HostBuffer(Buffer, Protocol):
    """Pinned host memory: `array()` is a numpy array; copies from and to it are asynchronous."""


class Event(Protocol):
    """A timed point in a stream."""

    def done(self) -> bool:
        """Whether preceding work is done; does not wait."""
        ...

    def synchronize(self) -> None:
        """Wait for preceding work; raises its errors."""
        ...

    def elapsed_ms(self, since: Event) -> float:
        """Time since `since` in ms; waits for both events."""
        ...


class Graph(Protocol):
    """Captured work for replay."""

    def replay(self, stream: Stream) -> None: ...
    def launcher(self, stream: Stream) -> Callable[[], None]:
        """`replay` on that stream, for repeated calls: the caller keeps the graph, its buffers and the stream open."""
        ...

    def close(self) -> None: ...


class Stream(Protocol):
    """A queue of work in order. Work is only guaranteed to be done when `synchronize` returns."""

    @property
    def handle(self) -> int:
        """The native handle (a `cudaStream_t` as an integer); `UsageError` after `close`."""
        ...

    def synchronize(self) -> None:
        """Wait for all enqueued work; raises its errors."""
        ...

    def record(self) -> Event: ...
    def wait(self, event: Event) -> None:
        """Order later work of this stream after `event`, of any stream; does not block the caller."""
        ...

    def wait_for_external(self, external_streams: Collection[int]) -> bool:
        """Order later work after the present work of these external streams; False if that failed. Streams that may have
        been destroyed are skipped.
        """
        ...

    def order_after(self, handle: int) -> None:
        """Order later work after the present work of another library's stream, which exists; does not block."""
        ...

    def order_before(self, handle: int) -> None:
        """Order later work of another library's stream after the present work of this one; does not block."""
        ...

    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """Capture what `work` enqueues as a graph; a failed capture raises and leaves the stream usable."""
        ...

    def close(self) -> None:
        """Close the stream; pending work is finished, or dropped with a warning. Never raises."""
        ...


class Device(Protocol):
    """One device: memory, streams, copies. Thread-safe; a stream is for one thread at a time."""

    @property
    def name(self) -> str:
        """The name accepted by `open_device`: `cuda:0`."""
        ...

    def properties(self) -> Properties: ...
    def memory(self) -> MemoryStats: ...
    def allocate(self, nbytes: int, stream: Stream | None = None) -> Buffer:
        """Memory for any stream, or for `stream` only: then `close` frees it in stream order.

        Raises `MemoryExhausted` with requested and free bytes; the device stays usable.
        """
        ...

    def pinned(self, nbytes: int) -> HostBuffer:
        """Page-locked host memory for asynchronous copies."""
        ...

    def borrow(self, array: Any, stream: Stream) -> Buffer:
        """Another library's array on this device as a buffer without a copy; later work on `stream` is ordered after the
        owner's. Accepts C-contiguous arrays with DLPack or `__cuda_array_interface__`.
        """
        ...

    def reader(self, kind: type, stream: Stream) -> Callable[[Any], int | None]:
        """The address of an array of that type on a device, as `borrow` finds it, for repeated calls; None where `borrow`
        has to. The caller keeps the array until the work is done.
        """
        ...

    def stream(self) -> Stream: ...
    def upload(self, array: Any, buffer: Buffer, stream: Stream) -> None:
        """Copy a C-contiguous host array into the buffer, stream-ordered.

        A pageable array may be changed when this returns (a large one blocks until then); a pinned one when the stream is
        done with it.
        """
        ...

    def gather(self, arrays: Sequence[Any], buffer: Buffer, stream: Stream) -> bool:
        """Copy C-contiguous host arrays into the buffer, one behind the other, in one call; as `upload` of each. False, and
        nothing is copied, where the device has no such call.
        """
        ...

    def download(self, buffer: Buffer, array: Any, stream: Stream) -> None:
        """Copy the buffer into a C-contiguous host array; valid after `stream.synchronize()`."""
        ...

    def is_pinned(self, array: Any) -> bool:
        """Whether copies from and to this host array are asynchronous."""
        ...

    def copy(self, source: Buffer, target: Buffer, nbytes: int, stream: Stream) -> None:
        """Copy the first `nbytes` of `source` to `target`, stream-ordered; either may be pinned memory."""
        ...

    def synchronize(self) -> None:
        """Wait for all streams of this device except those in capture; raises their errors."""
        ...

    def close(self) -> None:
        """Free unused memory and refuse new work; open buffers are logged, freed when closed. Never raises. Idempotent."""
        ...


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()  # "²" is a digit but not a number


def parse_device(text: str | int) -> tuple[str, int]:
    """Kind and index of `cpu`, `cuda:0`, `cuda`, `fake:1` or a bare number (a CUDA device)."""
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
    """Open a device that allocates at most `limit_bytes`; `SetupError` if it is not available."""
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
    from trt_engine.device.cuda.libcuda import open_cuda_device

    return open_cuda_device(number, limit_bytes)

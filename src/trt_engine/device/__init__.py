"""The little of a device we use: memory, streams, events, graphs; the host, the fake one, and (later) CUDA.

`Device`, `Buffer`, `Stream`, `Event` and `Graph` are the protocols; `open_device("cpu")` gives the real thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trt_engine.errors import SetupError, UsageError

__all__ = ["Buffer", "Device", "Event", "Graph", "Stream", "open_device", "parse_device"]


class Buffer(Protocol):
    """Memory on a device. Contents are undefined until something is written."""

    @property
    def nbytes(self) -> int: ...
    @property
    def pointer(self) -> int:
        """Address on the device."""
        ...

    def close(self) -> None: ...


class Event(Protocol):
    """A point in a stream's work, with a time."""

    def elapsed_ms(self, since: Event) -> float:
        """Milliseconds from `since` to here; waits for both."""
        ...


class Graph(Protocol):
    """Captured work that runs again with one call."""

    def replay(self, stream: Stream) -> None: ...
    def close(self) -> None: ...


class Stream(Protocol):
    """Work in order. Nothing enqueued is done before `synchronize` returns."""

    def synchronize(self) -> None: ...
    def record(self) -> Event: ...
    def capture(self, work: Callable[[Stream], None]) -> Graph:
        """The graph of what `work` enqueues; a failed capture leaves the stream clean and raises."""
        ...

    def close(self) -> None: ...


class Device(Protocol):
    """One device: allocates memory, opens streams, copies."""

    name: str

    def allocate(self, nbytes: int) -> Buffer: ...
    def stream(self) -> Stream: ...
    def upload(self, array: Any, buffer: Buffer, stream: Stream) -> None:
        """Copy a C-contiguous host array into the buffer, in the stream's order."""
        ...

    def download(self, buffer: Buffer, array: Any, stream: Stream) -> None:
        """Copy the buffer into a C-contiguous host array; it is there after `stream.synchronize()`."""
        ...

    def close(self) -> None: ...


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


def open_device(text: str | int) -> Device:
    """The device of that name, ready to allocate; `SetupError` where it cannot be had."""
    kind, number = parse_device(text)
    if kind == "cpu":
        from trt_engine.device.host import HostDevice

        return HostDevice()
    if kind == "fake":
        from trt_engine.device.fake import FakeDevice

        return FakeDevice(number)
    raise SetupError(
        f"direct memory on `cuda:{number}` is not available yet",
        hint="use `--backend onnxruntime --device cuda:0`, which moves its own memory, or `--device cpu`",
    )

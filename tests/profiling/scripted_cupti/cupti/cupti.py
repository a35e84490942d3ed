"""CUPTI as `cupti-python` 13 offers it, over a device that is a script: one subscriber, records in buffers asked for first,
handed over from another thread in the order the kinds were written, gone as soon as the callback returns.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from types import SimpleNamespace
from typing import Any


class ActivityKind(enum.IntEnum):
    MEMCPY = 1
    MEMSET = 2
    KERNEL = 3
    DRIVER = 4
    RUNTIME = 5
    CONCURRENT_KERNEL = 10
    MARKER = 12
    MEMCPY2 = 22


class CallbackDomain(enum.IntEnum):
    DRIVER_API = 1
    RUNTIME_API = 2


class Result(enum.IntEnum):
    SUCCESS = 0
    ERROR_INVALID_KIND = 21
    ERROR_HARDWARE_BUSY = 26
    ERROR_NOT_COMPATIBLE = 14
    ERROR_INSUFFICIENT_PRIVILEGES = 35
    ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 39
    ERROR_UNKNOWN = 999


class cuptiError(Exception):  # noqa: N801
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"{Result(status).name} ({status})")


CALLS = {
    211: "cudaLaunchKernel_v7000",
    41: "cudaMemcpyAsync_v3020",
    51: "cudaMemsetAsync_v3020",
    131: "cudaStreamSynchronize",
}
ROOM = 40
"""Records in one buffer of ours, however large."""


class _Machine:
    """What the script did, and what CUPTI would have written of it."""

    def __init__(self) -> None:
        self.now = 1_795_000_000_000_000_000
        self.subscribers = 0
        self.enabled: set[int] = set()
        self.callbacks: tuple[Any, Any] | None = None
        self.buffer: list[Any] | None = None
        self.dropped = 0
        self.correlation = 0
        self.marks = 0
        self.unreadable = False
        self.stuck = False
        self.refused: dict[int, int] = {}
        """The status a kind is refused with."""

    # -- the script's side

    def launch(self, name: str, ns: int, *, stream: int = 7, done: bool = True) -> None:
        number = self._call(211)
        start = self.now + 500
        self._write(ActivityKind.CONCURRENT_KERNEL, start=start, end=start + ns if done else 0, name=name,
                    correlation_id=number, stream_id=stream, grid=(4, 2, 1), block_size=(128, 1, 1))  # fmt: skip
        self.now = start + ns

    def copy(self, kind: int, nbytes: int, ns: int) -> None:
        number = self._call(41)
        start = self.now + 500
        self._write(
            ActivityKind.MEMCPY, start=start, end=start + ns, correlation_id=number, copy_kind=kind, bytes=nbytes
        )
        self.now = start + ns

    def fill(self, nbytes: int) -> None:
        number = self._call(51)
        self._write(ActivityKind.MEMSET, start=self.now, end=self.now + 5, correlation_id=number, bytes=nbytes)
        self.now += 5

    def wait(self) -> None:
        self._call(131)

    def open(self, name: str) -> int:
        self.marks += 1
        self.now += 1
        self._mark(self.marks, 2, name)
        return self.marks

    def shut(self, number: int) -> None:
        self.now += 1
        self._mark(number, 4, None)
        self.now += 1

    # -- CUPTI's side

    def _mark(self, number: int, flags: int, name: str | None) -> None:
        owner = SimpleNamespace(pt=SimpleNamespace(process_id=1, thread_id=3))
        self._write(ActivityKind.MARKER, id=number, flags_=flags, name=name, timestamp=self.now, object_id=owner)

    def _call(self, number: int) -> int:
        self.correlation += 1
        self._write(ActivityKind.RUNTIME, start=self.now, end=self.now + 100, cbid=number, thread_id=3,
                    correlation_id=self.correlation)  # fmt: skip
        self.now += 100
        return self.correlation

    def _write(self, kind: ActivityKind, **told: Any) -> None:
        if kind not in self.enabled or self.callbacks is None:
            return
        if self.buffer is not None and len(self.buffer) >= ROOM:
            self.deliver()
        if self.buffer is None:
            size, _ = self.callbacks[0]()
            if not size:
                self.dropped += 1
                return
            self.buffer = []
        grid, block = told.pop("grid", (0, 0, 0)), told.pop("block_size", (0, 0, 0))
        shape = dict(zip(("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z"), (*grid, *block), strict=True))
        common = {"device_id": 0, "stream_id": 7, "graph_node_id": 0, "registers_per_thread": 32,
                  "static_shared_memory": 16, "dynamic_shared_memory": 8}  # fmt: skip
        record = SimpleNamespace(kind=int(kind), **(common | shape | told))
        if self.unreadable:
            del record.kind
            self.unreadable = False
        self.buffer.insert(0, record)  # the newest first: nothing promises an order

    def deliver(self) -> None:
        if self.callbacks is None or self.buffer is None:
            return
        records, self.buffer = self.buffer, None
        thread = threading.Thread(target=self.callbacks[1], args=(records,))
        thread.start()
        thread.join()
        for record in records:
            vars(record).clear()  # the buffer is CUPTI's again


machine = _Machine()


def subscribe(callback: Any, userdata: Any) -> int:
    if machine.subscribers:
        raise cuptiError(Result.ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED)
    machine.subscribers += 1
    return 77


def unsubscribe(subscriber: int) -> None:
    assert subscriber == 77 and machine.subscribers == 1
    machine.subscribers = 0


def activity_register_callbacks(requested: Any, completed: Any) -> None:
    machine.callbacks = requested, completed


def activity_enable(kind: int) -> None:
    if kind in machine.refused:
        raise cuptiError(machine.refused[kind])
    machine.enabled.add(kind)


def activity_disable(kind: int) -> None:
    machine.enabled.discard(kind)


def activity_flush_all(flag: int) -> None:
    if machine.stuck:
        raise cuptiError(Result.ERROR_UNKNOWN)
    if flag or all(getattr(record, "end", 1) for record in machine.buffer or ()):
        machine.deliver()  # without force, a buffer waits for the last of its records


def activity_get_num_dropped_records(context: int, stream: int, address: int) -> None:
    ctypes.c_size_t.from_address(address).value = machine.dropped
    machine.dropped = 0


def get_timestamp() -> int:
    machine.now += 10
    return machine.now


def get_callback_name(domain: int, number: int) -> str:
    assert domain in (1, 2)
    if number not in CALLS:
        raise cuptiError(Result.ERROR_UNKNOWN)
    return CALLS[number]

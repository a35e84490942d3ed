"""Timestamps of queries in preallocated arrays, with progress and stop requests between queries."""

from __future__ import annotations

import array
import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from trt_engine.records.bench import Protocol

Progress = Callable[[float, float], None]
"""Called between queries, a few times a second, with seconds done and seconds planned, warm-up included."""


class ProgressMonitor:
    """Reports progress and checks for a stop request between queries."""

    def __init__(
        self, protocol: Protocol, on_progress: Progress | None, should_stop: Callable[[], bool] | None
    ) -> None:
        self.planned_s = protocol.warmup_s + protocol.duration_s
        self.on_progress = on_progress
        self.should_stop = should_stop
        self.stopped = False

    def poll(self, done_s: float) -> bool:
        """True when the loop must end."""
        if self.on_progress is not None:
            self.on_progress(done_s, self.planned_s)
        if self.should_stop is not None and self.should_stop():
            self.stopped = True
        return self.stopped


class GrowingArray:
    """A preallocated array that doubles."""

    def __init__(self, kind: str, room: int) -> None:
        self.values = array.array(kind, bytes(room * array.array(kind).itemsize))

    def grow(self) -> None:
        self.values.frombytes(bytes(len(self.values) * self.values.itemsize))


@dataclass(slots=True)
class QueryTrace:
    """Timestamps of one loop; `compute_times` derives the times of the queries after warm-up."""

    protocol: Protocol
    capacity: int = 1 << 14
    count: int = 0
    starts_ns: GrowingArray = field(init=False)
    ends_ns: GrowingArray = field(init=False)
    event_times: list[tuple[float, float, float, float, float, float]] = field(default_factory=list)
    """Event timing: start, end, h2d, compute, d2h, enqueue in ms."""
    compute_ms: list[float] = field(default_factory=list)
    latency_ms: list[float] = field(default_factory=list)
    enqueue_ms: list[float] = field(default_factory=list)
    h2d_ms: list[float] = field(default_factory=list)
    d2h_ms: list[float] = field(default_factory=list)
    warmup_queries: int = 0
    wall_s: float = 0.0
    origin_ns: int = 0

    def __post_init__(self) -> None:
        self.starts_ns, self.ends_ns = GrowingArray("q", self.capacity), GrowingArray("q", self.capacity)

    def compute_times(self) -> None:
        """Compute the times, without queries that started during warm-up."""
        if self.count:
            starts, ends = self.starts_ns.values, self.ends_ns.values
            first = bisect.bisect_left(starts, self.origin_ns + to_ns(self.protocol.warmup_s), 0, self.count)
            first = min(max(first, self.protocol.min_warmup), self.count)
            self.warmup_queries = first
            self.compute_ms = [(ends[index] - starts[index]) / 1e6 for index in range(first, self.count)]
            if first < self.count:
                self.wall_s = (ends[self.count - 1] - starts[first]) / 1e9
        elif self.event_times:
            self.event_times.sort(key=lambda part: part[0])  # concurrent streams finish in any order
            warm_ms = self.protocol.warmup_s * 1e3
            first = next(
                (i for i, part in enumerate(self.event_times) if part[0] + part[2] >= warm_ms), len(self.event_times)
            )
            first = min(max(first, self.protocol.min_warmup * self.protocol.streams), len(self.event_times))
            self.warmup_queries = first
            kept = self.event_times[first:]
            self.compute_ms = [part[3] for part in kept]
            if kept:
                self.wall_s = (max(part[1] for part in kept) - kept[0][0]) / 1e3
            if self.protocol.clock == "device events":
                self.enqueue_ms = [part[5] for part in kept]
                self.latency_ms = [part[2] + part[3] + part[4] for part in kept]
                if self.protocol.transfers:
                    self.h2d_ms = [part[2] for part in kept]
                    self.d2h_ms = [part[4] for part in kept]


def to_ns(seconds: float) -> int:
    return round(seconds * 1e9)

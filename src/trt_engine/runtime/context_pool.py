"""`ContextPool`: execution contexts on one device with a FIFO wait queue."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Device, Event, MemoryStats, Stream
from trt_engine.errors import TrtEngineError, UsageError
from trt_engine.protocols import RunnerBase, Session
from trt_engine.runtime.bound_call import BoundCall
from trt_engine.runtime.cuda_graph_policy import GraphPolicy, GraphStats
from trt_engine.runtime.executor import Events, Executor
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.runtime.staging import CopyThreads
from trt_engine.runtime.stats import LatencySummary
from trt_engine.runtime.wait_queue import Slot, WaitQueue
from trt_engine.tensors import Tensors


@dataclass(frozen=True, slots=True)
class PoolStats:
    """State of a context pool and wait times for a context."""

    contexts: int = 0
    busy: int = 0
    waiting: int = 0
    rejected: int = 0
    """Requests rejected because the wait queue was full."""
    timeouts: int = 0
    """Requests that exceeded `wait_timeout_s`."""
    wait: LatencySummary = field(default_factory=LatencySummary)
    """Wait times of all requests, including zero waits."""
    graphs: GraphStats = field(default_factory=GraphStats)
    memory: MemoryStats | None = None


class ContextPool(ProcessBound, RunnerBase):
    """A runner with one inference in flight per context; further requests wait in FIFO order.

    Raises `Overloaded` when `max_waiting` requests wait, `DeadlineExpired` after `wait_timeout_s`. Streams are assigned to
    contexts round robin; contexts that share a stream run one after another.
    """

    can_batch = True

    def __init__(self, session: Session, profiles: Sequence[Profile] = (), config: RuntimeConfig | None = None) -> None:
        """Raises `UsageError` for batch sizes in `graphs` that the engine does not take."""
        config = config or RuntimeConfig()
        self.signature = session.signature
        self.profiles = tuple(profiles)
        self.width = config.contexts
        self.device: Device = session.device
        self._session = session
        self._policy = GraphPolicy(config.graphs, config.max_graphs, signature=session.signature, profiles=profiles)
        self._released = False
        self._copy_threads = CopyThreads()
        self._bound_calls: set[BoundCall] = set()
        self._wait_queue = WaitQueue(config.max_waiting, config.wait_timeout_s)
        self._streams: list[Stream] = []
        self._executors: list[Executor] = []
        self._close_lock, self._warm_up_lock = threading.Lock(), threading.Lock()
        try:
            count = min(config.streams or config.contexts, config.contexts)
            self._streams = [session.stream() for _ in range(count)]
            for number in range(config.contexts):
                stream = self._streams[number % count]
                self._executors.append(
                    Executor(
                        session,
                        profiles,
                        stream,
                        self._policy,
                        copy_threads=self._copy_threads,
                        exclusive_stream=count == config.contexts,
                    )
                )
        except BaseException:
            self._release_resources()
            raise
        self._wait_queue.open(self._executors)

    def run(self, feeds: Tensors, on_device: bool = False) -> dict[str, Any]:
        """The outputs, on the host or the device. Feeds and outputs by name, in the dtypes and shapes of the signature.

        Raises `UsageError` once closed.
        """
        queue = self._wait_queue
        slot = queue.acquire(feeds)
        try:
            with slot.running:
                if self._released:
                    self._require_open()
                return slot.executor.run(feeds, on_device)
        finally:
            queue.release(slot)

    def run_on_device(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs on the device. Feeds and outputs by name, in the dtypes and shapes of the signature."""
        return self.run(feeds, True)

    def run_batched(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        """The outputs of several requests, arrays `[rows, ...]` in the dtypes of the signature, concatenated in the staging
        or device buffers.
        """
        if len(parts) == 1 and size is None:
            return self.run(parts[0])
        return self._run_parts(parts, size=size)

    def bind(self, inputs: Tensors, outputs: Tensors) -> BoundCall:
        """A call on fixed memory; arrays by name, in the dtypes and shapes of the signature.

        Raises `UsageError` once closed, and for arrays that do not fit.
        """
        slot = self._wait_queue.acquire(inputs)
        try:
            with slot.running:
                self._require_open()
                return slot.executor.bind(inputs, outputs, partial(self._run_on_slot, slot), self._bound_calls)
        finally:
            self._wait_queue.release(slot)

    def _run_on_slot(self, slot: Slot, work: Callable[[], object], unlimited: bool) -> None:
        """Run a bound call's work while its context's stream is not in use."""
        queue = self._wait_queue
        queue.acquire({}, wanted=slot, unlimited=unlimited)
        try:
            with slot.running:
                work()
        finally:
            queue.release(slot)

    def run_timed(self, feeds: Tensors, *, on_device: bool = False) -> tuple[dict[str, Any], float]:
        """The outputs, and the time from upload to download in ms, by device events.

        Arrays by name, in the dtypes and shapes of the signature.
        """
        events: list[Event] = []
        outputs = self._run_parts([feeds], events, on_device)
        return outputs, events[1].elapsed_ms(events[0])

    def warm_up(self, feeds: Tensors) -> None:
        """Run once in every context; other requests wait.

        Feeds by name, in the dtypes and shapes of the signature. Raises `UsageError` once closed.
        """
        queue, taken = self._wait_queue, list[Slot]()
        with self._warm_up_lock:  # concurrent warm-ups would deadlock
            try:
                for _ in range(self.width):
                    taken.append(queue.acquire(feeds, unlimited=True, keep=taken))
                for slot in taken:
                    with slot.running:
                        self._require_open()
                        slot.executor.run(feeds)
            finally:
                for slot in taken:
                    queue.release(slot)

    def is_captured(self, feeds: Tensors) -> bool:
        """Whether any context has a graph for feeds of these shapes, in the dtypes of the signature."""
        return any(executor.is_captured(feeds) for executor in self._executors)

    def reset_graphs(self) -> None:
        """Drop all graphs; shapes are captured again on their next run."""
        self._policy.reset()

    def runtime_info(self) -> dict[str, str]:
        info = {"device": self.device.name} | self._session.runtime_info()
        info |= {"contexts": str(self.width), "streams": str(len(self._streams))}
        graphs = self._policy.stats()
        if self._policy.enabled:
            info["graphs"] = f"none: {graphs.disabled_reason}" if graphs.disabled_reason else "on"
        return info

    def stats(self) -> PoolStats:
        try:
            memory = self.device.memory()
        except TrtEngineError:  # a lost or closed device has no statistics
            memory = None
        queue = self._wait_queue
        return PoolStats(
            contexts=len(queue.slots), busy=queue.busy, waiting=queue.waiting, rejected=queue.rejected,
            timeouts=queue.timeouts, wait=queue.wait_summary(), memory=memory,
            graphs=self._policy.stats(sum(slot.executor.replayed for slot in queue.slots)),
        )  # fmt: skip

    def reject_waiting(self) -> None:
        """Reject all waiting requests with `UsageError`; running ones finish."""
        self._wait_queue.reject_waiting()

    def close(self) -> None:
        """Reject new requests, finish waiting ones, free resources, close the session. Idempotent."""
        if self._forked:
            return
        with self._close_lock:
            self._wait_queue.close()
            self._release_resources()

    def _run_parts(
        self, parts: Sequence[Tensors], events: Events = None, on_device: bool = False, size: int | None = None
    ) -> dict[str, Any]:
        queue = self._wait_queue
        slot = queue.acquire(parts[0], size)
        try:
            with slot.running:
                self._require_open()
                return slot.executor.run_parts(parts, events, on_device, size)
        finally:
            queue.release(slot)

    def _require_open(self) -> None:
        """For a request that was granted its context while `close` took the context for lost."""
        if self._released:
            raise UsageError("the pool of contexts is closed", hint="load the engine again")

    def _release_resources(self) -> None:
        self._released = True
        with contextlib.ExitStack() as stack:
            for slot in self._wait_queue.slots:
                stack.enter_context(slot.running)
            for call in [*self._bound_calls]:
                call.release()
            for executor in self._executors:
                executor.close()
        self._copy_threads.close()
        for stream in self._streams:
            stream.close()
        self._executors, self._streams = [], []
        self._session.close()

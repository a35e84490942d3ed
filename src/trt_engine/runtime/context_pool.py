"""`ContextPool`: execution contexts on one device with a FIFO wait queue (`WaitQueue`)."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from threading import get_ident
from typing import Any

from trt_engine.config.profiles import Profile
from trt_engine.config.runtime import RuntimeConfig
from trt_engine.device import Device, Event, MemoryStats, Stream
from trt_engine.errors import DeadlineExpired, Overloaded, TrtEngineError, UsageError
from trt_engine.protocols import RunnerBase, Session
from trt_engine.runtime.bound_call import BoundCall
from trt_engine.runtime.cuda_graph_policy import GraphPolicy, GraphStats
from trt_engine.runtime.executor import Events, Executor
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.runtime.staging import CopyThreads
from trt_engine.runtime.stats import Histogram, LatencySummary
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


_RECLAIM_S = 0.2
"""`close` takes back an executor that was granted this long and is not running."""


class Slot:
    """An executor in the queue: `owner` is who it was granted to, `running` is held while it runs."""

    __slots__ = ("executor", "granted_at", "number", "owner", "released_at", "running")

    def __init__(self, number: int, executor: Executor) -> None:
        self.number, self.executor = number, executor
        self.owner: int | None = None
        """A thread's identifier; None while it is free."""
        self.granted_at = self.released_at = 0
        self.running = threading.Lock()
        """Taken by `with` around each run, so that no exception at any point leaves it locked: the owner of a slot that is
        not running was interrupted before or after its request."""


class _Waiter:
    """A waiting request; `granted` is released when `slot` is assigned or the request is rejected."""

    __slots__ = ("granted", "rejected", "slot", "thread", "wanted")

    def __init__(self, thread: int, wanted: Slot | None) -> None:
        self.thread, self.wanted = thread, wanted
        self.slot: Slot | None = None
        self.rejected = False
        self.granted = threading.Lock()
        self.granted.acquire()


_released_at = attrgetter("released_at")


class WaitQueue:
    """FIFO queue: a released executor goes to the request that waits longest.

    A KeyboardInterrupt between grant and release leaves a slot with its owner. It is free again at the thread's next
    `acquire`, or at `close`. Taking back too much does no harm: `Slot.running` excludes two runs.
    """

    def __init__(self, max_waiting: int | None, timeout_s: float | None) -> None:
        self._max_waiting, self._timeout_s = max_waiting, timeout_s
        self._lock = threading.Lock()
        self._released = threading.Event()
        self.slots: list[Slot] = []
        self._single: Slot | None = None
        """The slot of a queue with one."""
        self._waiters: deque[_Waiter] = deque()
        self._order = itertools.count(1)
        self._closed = True
        self._immediate = self.rejected = self.timeouts = 0
        self._wait_times = Histogram()

    def open(self, executors: Sequence[Executor]) -> None:
        self.slots = [Slot(number, executor) for number, executor in enumerate(executors)]
        self._single = self.slots[0] if len(self.slots) == 1 else None
        self._closed = False

    @property
    def busy(self) -> int:
        return sum(slot.owner is not None for slot in self.slots)

    @property
    def waiting(self) -> int:
        return len(self._waiters)

    def wait_summary(self) -> LatencySummary:
        with self._lock:
            return self._wait_times.summary(self._immediate)

    def acquire(
        self,
        feeds: Tensors,
        size: int | None = None,
        *,
        unlimited: bool = False,
        keep: Sequence[Slot] = (),
        wanted: Slot | None = None,
    ) -> Slot:
        """A slot for feeds of these shapes, or the `wanted` one; waits for it. The caller runs under `Slot.running`.

        `unlimited` ignores `max_waiting` and the timeout; the calling thread holds the slots of `keep` as well. Feeds have
        the dtypes of the signature. Raises `Overloaded` where `max_waiting` wait already, `DeadlineExpired` after the
        timeout, `UsageError` once closed.
        """
        thread, waiter = get_ident(), None
        try:
            with self._lock:
                slot = self._single
                if slot is None or slot.owner is not None or self._closed or self._waiters:
                    self._check_open(thread, keep, wanted)
                    slot = None if self._waiters else self._choose(feeds, size, wanted)
                if slot is not None:
                    self._immediate += 1
                    slot.granted_at = next(self._order)
                    slot.owner = thread
                    return slot
                if not unlimited and self._max_waiting is not None and len(self._waiters) >= self._max_waiting:
                    self.rejected += 1
                    raise Overloaded(
                        f"{len(self._waiters)} requests wait for a context, the limit is {self._max_waiting}",
                        hint="retry later; `max_waiting` sets the limit",
                    )
                waiter = _Waiter(thread, wanted)
                self._waiters.append(waiter)
                self._dispatch()
            return self._wait(waiter, -1 if self._timeout_s is None or unlimited else self._timeout_s)
        except BaseException:  # also Ctrl-C: pass on a slot that was granted meanwhile
            if waiter is not None and not self._remove(waiter) and waiter.slot is not None:
                self.release(waiter.slot)
            raise

    def _check_open(self, thread: int, keep: Sequence[Slot], wanted: Slot | None) -> None:
        """Take back what an interrupted request of this thread has left; refuse what could never be granted."""
        held = 0
        for slot in self.slots:
            if slot.owner == thread:
                if slot.running.locked() or slot in keep:
                    held += wanted is None or slot is wanted
                else:
                    slot.owner = None
        if self._closed:
            self._dispatch()
            raise UsageError("the pool of contexts is closed", hint="load the engine again")
        if held == (len(self.slots) if wanted is None else 1):
            raise UsageError(
                "a nested inference needs a free context, and this thread already uses all of them",
                hint="load it with more `contexts`",
            )
        if self._waiters:
            self._dispatch()

    def _wait(self, waiter: _Waiter, timeout_s: float) -> Slot:
        since_s = time.monotonic()
        granted = waiter.granted.acquire(timeout=timeout_s)
        late = not granted and self._remove(waiter)
        waited_s = time.monotonic() - since_s
        with self._lock:
            self.timeouts += late
            self._wait_times.add(waited_s)
        if waiter.rejected:
            raise UsageError("the engine was closed while the request waited", hint="load it again with `te.load`")
        if late:
            raise DeadlineExpired(
                f"no context was free for {waited_s:.3g} s",
                hint="more `contexts`, fewer concurrent requests, or a longer `wait_timeout_s`",
            )
        assert waiter.slot is not None
        return waiter.slot

    def release(self, slot: Slot) -> None:
        with self._lock:
            slot.released_at = next(self._order)
            slot.owner = None
            if self._waiters:
                self._dispatch()
        if self._closed:
            self._released.set()

    def _dispatch(self) -> None:
        """Grant free slots to the requests that wait longest."""
        place = 0
        while place < len(self._waiters):
            waiter = self._waiters[place]
            slot = self._choose(None, None, waiter.wanted)
            if slot is None:
                if waiter.wanted is None:
                    return
                place += 1
                continue
            slot.granted_at = next(self._order)  # Ctrl-C arrives only after calls: none from here to `release`
            waiter.slot = slot
            slot.owner = waiter.thread
            del self._waiters[place]
            waiter.granted.release()

    def _choose(self, feeds: Tensors | None, size: int | None, wanted: Slot | None) -> Slot | None:
        """A free slot: one prepared for these shapes, else the least recently used.

        Shapes thus stick to executors; changing shapes can cost more than an inference.
        """
        free = [slot for slot in (self.slots if wanted is None else (wanted,)) if slot.owner is None]
        if len(free) < 2:
            return free[0] if free else None
        if feeds is not None:
            key = free[0].executor.key(feeds, size)
            if prepared := [slot for slot in free if slot.executor.is_prepared(key)]:
                return max(prepared, key=_released_at)
        return min(free, key=_released_at)

    def _remove(self, waiter: _Waiter) -> bool:
        """Whether the request was still queued."""
        with self._lock:
            try:
                self._waiters.remove(waiter)
            except ValueError:
                return False
            return True

    def reject_waiting(self) -> None:
        with self._lock:
            for _ in range(len(self._waiters)):
                waiter = self._waiters[0]
                waiter.rejected = True  # Ctrl-C arrives only after calls: none from here to `release`
                del self._waiters[0]
                waiter.granted.release()

    def close(self) -> None:
        """Reject new requests, and wait until all queued ones have finished."""
        self._closed = True
        idle: dict[int, int] = {}
        while True:
            with self._lock:
                for slot in self.slots:
                    if (
                        slot.owner is not None
                        and not slot.running.locked()
                        and idle.get(slot.number) == slot.granted_at
                    ):
                        slot.owner = None  # granted as long ago as the last look, and not running
                self._dispatch()
                if not self._waiters and all(slot.owner is None for slot in self.slots):
                    return
                idle = {slot.number: slot.granted_at for slot in self.slots if not slot.running.locked()}
                self._released.clear()
            self._released.wait(_RECLAIM_S)

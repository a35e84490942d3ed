"""`ContextPool`: several inferences in flight on one device, and a fair line in front of them."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from trt_engine.config import Profile, RuntimeConfig
from trt_engine.device import Device, Event, MemoryStats, Stream
from trt_engine.errors import DeadlineExpired, Overloaded, TrtEngineError, UsageError
from trt_engine.protocols import Session
from trt_engine.runtime.counting import Histogram, Times
from trt_engine.runtime.graphs import GraphPolicy, GraphStats
from trt_engine.runtime.lane import Key, Lane
from trt_engine.tensors import Signature, Tensors

__all__ = ["ContextPool", "PoolStats"]


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool of contexts, and how long callers waited for one."""

    contexts: int = 0
    busy: int = 0
    waiting: int = 0
    refused: int = 0
    """Callers turned away: too many waited already."""
    timeouts: int = 0
    """Callers that waited longer than they may."""
    wait: Times = field(default_factory=Times)
    """Of every request, those that did not wait included."""
    graphs: GraphStats = field(default_factory=GraphStats)
    memory: MemoryStats | None = None


class ContextPool:
    """A Runner over the contexts of a session: as many inferences at once as there are contexts; others wait in order.

    At most `max_waiting` callers wait, at most `wait_timeout_s` each: then `Overloaded` and `DeadlineExpired`. Streams are
    shared out to the contexts in turn; with fewer streams than contexts, inferences on one stream follow each other.
    """

    def __init__(
        self,
        session: Session,
        profiles: Sequence[Profile] = (),
        config: RuntimeConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        config = config or RuntimeConfig()
        self.signature: Signature = session.signature
        self.profiles = tuple(profiles)
        self.width = config.contexts
        self.device: Device = session.device
        self._session = session
        self._policy = GraphPolicy(config.graphs, config.max_graphs, signature=session.signature, profiles=profiles)
        self._line: _Line = _Line(config.max_waiting, config.wait_timeout_s, clock)
        self._streams: list[Stream] = []
        self._lanes: list[Lane] = []
        self._closing, self._warming = threading.Lock(), threading.Lock()
        try:
            count = min(config.streams or config.contexts, config.contexts)
            made = getattr(session, "stream", session.device.stream)  # a library may have its own way with streams
            self._streams = [made() for _ in range(count)]
            for number in range(config.contexts):
                stream = self._streams[number % count]
                self._lanes.append(Lane(session, profiles, stream, self._policy, alone=count == config.contexts))
        except BaseException:
            self._give_back()
            raise
        self._line.open(self._lanes)

    def run(self, feeds: Tensors) -> dict[str, Any]:
        return self._with_lane([feeds])

    def run_parts(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        """The outputs of several requests' rows, one below the other; they meet in the memory the device reads.

        They run as a batch of `size`, filled up with the last row there; the outputs have the requests' rows alone.
        """
        return self._with_lane(parts, size=size)

    def run_on_device(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs as arrays on the device: they speak DLPack, and their memory is nobody else's."""
        return self._with_lane([feeds], on_device=True)

    def timed(self, feeds: Tensors, *, on_device: bool = False) -> tuple[dict[str, Any], float]:
        """The outputs, and the milliseconds from the upload to the download by the device's events."""
        events: list[Event] = []
        outputs = self._with_lane([feeds], events, on_device)
        return outputs, events[1].elapsed_ms(events[0])

    def warm(self, feeds: Tensors) -> None:
        """Run once in every context; others wait meanwhile."""
        taken: list[Lane] = []
        with self._warming:  # two that each held some would wait for each other
            try:
                while len(taken) < self.width:
                    taken.append(self._line.enter(feeds, patient=True))
                for lane in taken:
                    lane.run([feeds])
            finally:
                for lane in taken:
                    self._line.leave(lane)

    def is_captured(self, feeds: Tensors) -> bool:
        """Whether some context replays a graph for feeds of these shapes."""
        return any(lane.captured(feeds) for lane in self._lanes)

    def reset(self) -> None:
        """Forget all graphs; they are captured again as shapes come."""
        self._policy.reset()

    def facts(self) -> dict[str, str]:
        told = {"device": self.device.name} | self._session.facts()
        told |= {"contexts": str(self.width), "streams": str(len(self._streams))}
        graphs = self._policy.read()
        if self._policy.on:
            told["graphs"] = f"none: {graphs.refused}" if graphs.refused else "on"
        return told

    def stats(self) -> PoolStats:
        try:
            memory = self.device.memory()
        except TrtEngineError:  # a device that is lost or closed has none to tell of
            memory = None
        return self._line.read(self._policy.read(), memory)

    def turn_away(self) -> None:
        """Tell everybody in line that it is over: `UsageError`. Those with a context go on."""
        self._line.turn_away()

    def close(self) -> None:
        """Refuse new callers, answer those in line, give everything back, close the session. Twice is once."""
        with self._closing:
            self._line.close()
            self._give_back()

    def _with_lane(
        self,
        parts: Sequence[Tensors],
        events: list[Event] | None = None,
        on_device: bool = False,
        size: int | None = None,
    ) -> dict[str, Any]:
        line = self._line
        lane = line.enter(parts[0], size=size)
        try:
            return lane.run(parts, events, on_device, size)
        finally:
            line.leave(lane)

    def _give_back(self) -> None:
        for lane in self._lanes:
            lane.close()
        for stream in self._streams:
            stream.close()
        self._lanes, self._streams = [], []
        self._session.close()


class _Caller:
    """Somebody in line; `turn` is released when `lane` is there, or when nothing will come."""

    __slots__ = ("away", "lane", "thread", "turn")

    def __init__(self, thread: int | None) -> None:
        self.thread = thread
        self.lane: Lane | None = None
        self.away = False
        self.turn = threading.Lock()
        self.turn.acquire()


class _Line:
    """First come, first served: a lane that is given back goes to whoever has waited longest, past all who come now.

    It is known which thread has which lane. Ctrl-C may fall between any two steps of a caller, also where the lane is his
    already and nobody gives it back yet: it is found again when that thread comes back, or when the pool is closed.
    """

    def __init__(self, max_waiting: int | None, timeout_s: float | None, clock: Callable[[], float]) -> None:
        self._max_waiting, self._timeout_s, self._clock = max_waiting, timeout_s, clock
        self._lock = threading.Lock()
        self._all_back = threading.Condition(self._lock)
        self._free: list[Lane] = []
        self._held: dict[int, Lane] = {}
        self._callers: deque[_Caller] = deque()
        self._count = 0
        self._closed = True
        self._refused = self._timeouts = 0
        self._waits = Histogram()

    def open(self, lanes: Sequence[Lane]) -> None:
        self._free, self._count, self._closed = list(lanes), len(lanes), False

    def enter(self, feeds: Tensors, *, patient: bool = False, size: int | None = None) -> Lane:
        """A lane, at once or when it is this caller's turn; a `patient` one waits however many do and however long."""
        thread = threading.get_ident()
        caller: _Caller | None = None
        try:
            with self._lock:
                if self._closed:
                    raise UsageError("the pool of contexts is closed", hint="load the engine again")
                if thread in self._held and not self._inside(sys._getframe(1).f_back):
                    self._take_back(thread)
                holder = None if patient or thread in self._held else thread
                if self._free:
                    self._waits.at_once += 1
                    return self._pick(feeds, size, holder)
                if not patient and self._max_waiting is not None and len(self._callers) >= self._max_waiting:
                    self._refused += 1
                    raise Overloaded(
                        f"{len(self._callers)} callers wait for a context, of {self._max_waiting} that may",
                        hint="ask again later; `max_waiting` sets the limit",
                    )
                caller = _Caller(holder)
                self._callers.append(caller)
            since_s = self._clock()
            timeout_s = -1 if self._timeout_s is None or patient else min(self._timeout_s, threading.TIMEOUT_MAX)
            caller.turn.acquire(timeout=timeout_s)
        except BaseException:  # Ctrl-C: a lane that was handed over meanwhile goes to the next
            if caller is not None and not self._step_out(caller) and caller.lane is not None:
                self.leave(caller.lane)
            raise
        if caller.away:
            with self._lock:
                self._waits.add(self._clock() - since_s)
            raise UsageError("the engine was closed before its turn", hint="load it again with `te.load`")
        if caller.lane is None and self._step_out(caller):
            waited_s = self._clock() - since_s
            with self._lock:
                self._timeouts += 1
                self._waits.add(waited_s)
            raise DeadlineExpired(
                f"no context was free for {waited_s:.3g} s",
                hint="more `contexts`, fewer callers, or a longer `wait_timeout_s`",
            )
        with self._lock:
            self._waits.add(self._clock() - since_s)
        assert caller.lane is not None
        return caller.lane

    def leave(self, lane: Lane) -> None:
        thread = threading.get_ident()
        with self._lock:
            self._pass_on(lane, thread if self._held.get(thread) is lane else None)

    def _pass_on(self, lane: Lane, holder: int | None) -> None:
        """To who has waited longest. Between the steps nothing is called, and so nothing can be interrupted."""
        if self._callers:
            caller = self._callers[0]
            caller.lane = lane
            if caller.thread is not None:
                self._held[caller.thread] = lane
            if holder is not None:
                del self._held[holder]
            del self._callers[0]
            caller.turn.release()
        else:
            if holder is not None:
                del self._held[holder]
            self._free.append(lane)
            if self._closed and len(self._free) == self._count:
                self._all_back.notify_all()

    def _take_back(self, thread: int) -> None:
        """The lane of a caller who was interrupted and is gone."""
        lane = self._held[thread]
        if lane in self._free:
            del self._held[thread]
        else:
            self._pass_on(lane, thread)

    def _inside(self, frame: FrameType | None) -> bool:
        """Whether somebody on this stack is at work in a lane of this line."""
        while frame is not None:
            if frame.f_code is _WITH_LANE and frame.f_locals.get("line", self) is self:
                return True
            frame = frame.f_back
        return False

    def turn_away(self) -> None:
        with self._lock:
            while self._callers:
                caller = self._callers.popleft()
                caller.away = True
                caller.turn.release()

    def close(self) -> None:
        """Refuse who comes now, and wait until everybody in line has been answered."""
        with self._lock:
            self._closed = True
            while len(self._free) < self._count:
                frames = sys._current_frames()
                for thread in [one for one in self._held if not self._inside(frames.get(one))]:
                    self._take_back(thread)
                if len(self._free) < self._count:
                    self._all_back.wait(1.0)  # nobody says that he was interrupted

    def read(self, graphs: GraphStats, memory: MemoryStats | None) -> PoolStats:
        with self._lock:
            return PoolStats(
                contexts=self._count,
                busy=self._count - len(self._free),
                waiting=len(self._callers),
                refused=self._refused,
                timeouts=self._timeouts,
                wait=self._waits.read(),
                graphs=graphs,
                memory=memory,
            )

    def _pick(self, feeds: Tensors, size: int | None, holder: int | None) -> Lane:
        """A free lane: one that has these shapes prepared, else the one that has rested longest.

        So each shape comes to stay in a lane of its own: to change shapes can cost more than an inference.
        """
        free, found, last = self._free, 0, len(self._free) - 1
        if last:
            key: Key = free[last].key(feeds, size)
            found = next((place for place in range(last, -1, -1) if free[place].ready(key)), 0)
        lane = free[found]
        if holder is not None:
            self._held[holder] = lane
        del free[found]
        return lane

    def _step_out(self, caller: _Caller) -> bool:
        """True when the caller was still in line."""
        with self._lock:
            try:
                self._callers.remove(caller)
            except ValueError:
                return False
            return True


_WITH_LANE = ContextPool._with_lane.__code__

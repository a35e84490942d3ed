"""`ContextPool`: several inferences in flight on one device, and a fair line in front of them."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import FrameType
from typing import Any

from trt_engine.config import Profile, RuntimeConfig
from trt_engine.device import Device, Event, MemoryStats, Stream
from trt_engine.errors import DeadlineExpired, Overloaded, TrtEngineError, UsageError
from trt_engine.protocols import Session
from trt_engine.runtime.counting import ONE_AT_A_TIME, Histogram, Times
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
        line = self._line
        lane = line.enter(feeds)
        try:
            return lane.run_on_device(feeds)
        finally:
            line.leave(lane)

    def timed(self, feeds: Tensors, *, on_device: bool = False) -> tuple[dict[str, Any], float]:
        """The outputs, and the milliseconds from the upload to the download by the device's events."""
        events: list[Event] = []
        outputs = self._with_lane([feeds], events, on_device)
        return outputs, events[1].elapsed_ms(events[0])

    def warm(self, feeds: Tensors) -> None:
        """Run once in every context; others wait meanwhile."""
        line, taken = self._line, list[Lane]()
        with self._warming:  # two that each held some would wait for each other
            try:
                while len(taken) < self.width:
                    taken.append(line.enter(feeds, patient=True))
                for lane in taken:
                    lane.run([feeds])
            finally:
                for lane in taken:
                    line.leave(lane)

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
        lane = line.enter(parts[0], size)
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

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.lane: int | None = None
        self.away = False
        self.turn = threading.Lock()
        self.turn.acquire()


class _Line:
    """First come, first served: a lane that is given back goes to whoever has waited longest, past all who come now.

    It is known which thread has which lane. Ctrl-C may fall between any two steps of a caller, also where the lane is his
    already and nobody gives it back yet: it is found again when that thread comes back, or when the pool is closed.

    A lane belongs to the thread that stands in `_held`, and to nobody where none does: `setdefault` there, one operation
    that nothing interrupts, takes it and says whose it is. So a lane that is the only one and free is taken without the
    lock, and given back without it where nobody waits. Who queues looks for a free lane once more afterwards, and who gives
    one back looks for who has queued: one of the two sees the other.
    """

    def __init__(self, max_waiting: int | None, timeout_s: float | None, clock: Callable[[], float]) -> None:
        self._max_waiting, self._timeout_s, self._clock = max_waiting, timeout_s, clock
        self._lock = threading.Lock()
        self._all_back = threading.Lock()  # released when the last lane is back after a `close`
        self._all_back.acquire()
        self._lanes: list[Lane] = []
        self._held: dict[int, int] = {}
        self._left: list[int] = []  # for each lane when it was given back last, as a count
        self._leaving = itertools.count(1)
        self._callers: deque[_Caller] = deque()
        self._only = False
        self._closed = True
        self._at_once: list[int] = []  # for each lane, counted by who has it
        self._refused = self._timeouts = 0
        self._waits = Histogram()

    def open(self, lanes: Sequence[Lane]) -> None:
        self._lanes, self._only = list(lanes), len(lanes) == 1 and ONE_AT_A_TIME
        self._at_once, self._left = [0] * len(lanes), [0] * len(lanes)
        self._closed = False

    def enter(self, feeds: Tensors, size: int | None = None, patient: bool = False) -> Lane:
        """A lane, at once or when it is this caller's turn; a `patient` one waits however many do and however long."""
        thread, held = get_ident(), self._held
        if self._only and not held and not self._callers and held.setdefault(0, thread) == thread:
            if not self._closed:
                self._at_once[0] += 1
                return self._lanes[0]
            with self._lock:
                if held.get(0) == thread:  # not so where `close` took it for lost, and handed it on
                    del held[0]
        caller: _Caller | None = None
        try:
            with self._lock:
                if self._closed:
                    self._hand_on()
                    raise UsageError("the pool of contexts is closed", hint="load the engine again")
                if thread in held.values():
                    asks = sys._getframe(1)  # it has none yet, but for who warms up one after the other
                    if not self._inside(asks if patient and asks.f_locals.get("taken") else asks.f_back):
                        self._take_back(thread)
                    elif not patient and len(held) == len(self._lanes) and set(held.values()) == {thread}:
                        raise UsageError(
                            "an engine was asked from inside its own inference, and all its contexts are this thread's",
                            hint="load it with more `contexts`",
                        )
                if not self._callers and (found := self._pick(feeds, size, thread)) is not None:
                    self._at_once[found] += 1
                    return self._lanes[found]
                if not patient and self._max_waiting is not None and len(self._callers) >= self._max_waiting:
                    self._refused += 1
                    raise Overloaded(
                        f"{len(self._callers)} callers wait for a context, of {self._max_waiting} that may",
                        hint="ask again later; `max_waiting` sets the limit",
                    )
                caller = _Caller(thread)
                self._callers.append(caller)
                self._hand_on()
            since_s = self._clock()
            timeout_s = -1 if self._timeout_s is None or patient else min(self._timeout_s, threading.TIMEOUT_MAX)
            came = caller.turn.acquire(timeout=timeout_s)
            late = not came and self._step_out(caller)
        except BaseException:  # Ctrl-C: a lane that was handed over meanwhile goes to the next
            if caller is not None and not self._step_out(caller) and caller.lane is not None:
                self.leave(self._lanes[caller.lane])
            raise
        if caller.away:
            with self._lock:
                self._waits.add(self._clock() - since_s)
            raise UsageError("the engine was closed before its turn", hint="load it again with `te.load`")
        if late:
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
        return self._lanes[caller.lane]

    def leave(self, lane: Lane) -> None:
        if self._only:
            self._held.pop(0, None)
            if self._callers or self._closed:
                with self._lock:
                    self._hand_on()
        else:
            with self._lock:
                number = self._lanes.index(lane)
                self._left[number] = next(self._leaving)
                self._held.pop(number, None)
                self._hand_on()

    def _hand_on(self) -> None:
        """Free lanes to those who have waited longest."""
        callers, held = self._callers, self._held
        for number in range(len(self._lanes)):
            if not callers:
                break
            if number in held:
                continue
            caller = callers[0]
            caller.lane = number
            try:
                held.setdefault(number, caller.thread)
            finally:  # Ctrl-C falls behind it: nothing from here to `release` is a call, after which it could fall
                try:
                    taken = held[number] == caller.thread
                except KeyError:  # and is gone again
                    taken = False
                if taken:
                    del callers[0]
                    caller.turn.release()
                else:  # somebody was quicker who came when nobody waited
                    caller.lane = None
        if self._closed and not held and self._all_back.locked():
            self._all_back.release()

    def _take_back(self, thread: int) -> None:
        """The lanes of a caller who was interrupted and is gone."""
        for number, holder in [*self._held.items()]:
            if holder == thread:
                self._held.pop(number, None)
        self._hand_on()

    def _inside(self, frame: FrameType | None) -> bool:
        """Whether somebody on this stack is at work in a lane of this line."""
        while frame is not None:
            if frame.f_code in _WITH_LANE and frame.f_locals.get("line", self) is self:
                return True
            frame = frame.f_back
        return False

    def turn_away(self) -> None:
        with self._lock:
            while self._callers:
                caller = self._callers[0]
                caller.away = True  # nothing from here to `release` is a call, after which Ctrl-C could fall
                del self._callers[0]
                caller.turn.release()

    def close(self) -> None:
        """Refuse who comes now, and wait until everybody in line has been answered."""
        self._closed = True
        while True:
            with self._lock:
                frames = sys._current_frames()
                for thread in {one for one in [*self._held.values()] if not self._inside(frames.get(one))}:
                    self._take_back(thread)
                self._hand_on()
                if not self._held and not self._callers:
                    return
            self._all_back.acquire(timeout=1.0)  # nobody says that he was interrupted

    def read(self, graphs: GraphStats, memory: MemoryStats | None) -> PoolStats:
        with self._lock:
            return PoolStats(
                contexts=len(self._lanes),
                busy=len(self._held),
                waiting=len(self._callers),
                refused=self._refused,
                timeouts=self._timeouts,
                wait=self._waits.read(sum(self._at_once)),
                graphs=graphs,
                memory=memory,
            )

    def _pick(self, feeds: Tensors, size: int | None, thread: int) -> int | None:
        """A free lane, now this thread's: one that has these shapes prepared, else the one that has rested longest.

        So each shape comes to stay in a lane of its own: to change shapes can cost more than an inference.
        """
        held, lanes = self._held, self._lanes
        free = sorted((number for number in range(len(lanes)) if number not in held), key=self._left.__getitem__)
        if not free:
            return None
        found = free[0]
        if len(free) > 1:
            key: Key = lanes[found].key(feeds, size)
            found = next((number for number in reversed(free) if lanes[number].ready(key)), found)
        return found if held.setdefault(found, thread) == thread else None

    def _step_out(self, caller: _Caller) -> bool:
        """True when the caller was still in line."""
        with self._lock:
            try:
                self._callers.remove(caller)
            except ValueError:
                return False
            return True


_WITH_LANE = {call.__code__ for call in (ContextPool._with_lane, ContextPool.run_on_device, ContextPool.warm)}

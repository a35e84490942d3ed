"""`Replicas`: one engine on several devices with load balancing and failover."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trt_engine.device import info, parse_device
from trt_engine.errors import DeadlineExpired, DeviceLost, Overloaded, TrtEngineError, UsageError
from trt_engine.format import library_reason
from trt_engine.protocols import RunnerBase
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.tensors import Tensors, suggest

log = logging.getLogger(__name__)

Output = TypeVar("Output")

_REQUEST_ERRORS = (UsageError, Overloaded, DeadlineExpired)
"""Errors of the request, not of the replica."""
_MAX_BACKOFF = 32
"""Maximum backoff, in multiples of `pause_s`."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """Statistics of one replica."""

    device: str
    requests: int
    failures: int
    """Failures attributed to the replica: another replica succeeded, or its device was lost."""
    in_flight: int
    serving: bool
    message: str = ""
    """Why it is suspended."""
    utilization: float | None = None
    runner: Any = None
    """Statistics of the underlying runner, if any."""


class Replicas(ProcessBound, RunnerBase):
    """A runner over runners of the same engine; `balance` selects one per request.

    A failed request is retried on another replica. If that succeeds, the first replica is suspended for `pause_s`, doubled
    each time, and a warning is logged. If it fails too, the request gets the first error. If all replicas are suspended,
    the one due first is used.
    """

    def __init__(
        self,
        runners: Sequence[RunnerBase],
        *,
        devices: Sequence[str] | None = None,
        balance: str | Strategy = "least busy",
        pause_s: float = 5.0,
        utilization: UtilizationMonitor | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` returns seconds. Raises `UsageError` without runners, or for an unknown `balance`."""
        if not runners:
            raise UsageError("there are no replicas", hint="name at least one device")
        self.signature = runners[0].signature
        self.profiles = runners[0].profiles
        self.width = sum(runner.width for runner in runners)
        self._strategy = resolve_strategy(balance)
        names = list(devices or (f"replica {number}" for number in range(len(runners))))
        if utilization is None and devices is not None and isinstance(self._strategy, LeastUtilized):
            utilization = UtilizationMonitor(names)
        self._utilization = utilization
        self._clock, self._pause_s = clock, pause_s
        self._lock = threading.Lock()
        self._entries = [
            _ReplicaEntry(number, runner, name)
            for number, (runner, name) in enumerate(zip(runners, names, strict=True))
        ]
        self.can_batch = all(runner.can_batch for runner in runners)
        self.runners = list(runners)
        self._close_lock = threading.Lock()
        self._closed = False

    def run(self, feeds: Tensors) -> dict[str, Any]:
        """The outputs of one replica. Feeds and outputs by name, in the dtypes and shapes of the signature."""
        return self._dispatch(lambda runner: runner.run(feeds))

    def run_batched(self, parts: Sequence[Tensors], size: int | None = None) -> dict[str, Any]:
        """The outputs of one replica; arrays `[rows, ...]` in the dtypes of the signature."""
        return self._dispatch(lambda runner: runner.run_batched(parts, size))

    def run_timed(self, feeds: Tensors, *, on_device: bool = False) -> tuple[dict[str, Any], float]:
        """The outputs, and the time reported by the replica in ms.

        Arrays by name, in the dtypes and shapes of the signature.
        """
        if on_device:
            self.run_on_device(feeds)  # refuses: the device is selected for each request
        return self._dispatch(lambda runner: runner.run_timed(feeds))

    def runtime_info(self) -> dict[str, str]:
        infos = [member.runner.runtime_info() for member in self._entries]
        shared = {name: value for name, value in infos[0].items() if all(one.get(name) == value for one in infos)}
        differing = {
            f"{name} of {member.device}": one[name]
            for member, one in zip(self._entries, infos, strict=True)
            for name in one
            if name not in shared and name != "device"
        }
        out = [f"{stats.device}: {stats.message}" for stats in self.stats() if not stats.serving]
        named = {"device": ",".join(member.device for member in self._entries)}
        return (
            named
            | shared
            | differing
            | {"replicas": str(len(infos))}
            | ({"not serving": "; ".join(out)} if out else {})
        )

    def stats(self) -> tuple[ReplicaStats, ...]:
        use = self._utilization.current if self._utilization is not None else (None,) * len(self._entries)
        with self._lock:
            return tuple(
                ReplicaStats(
                    device=member.device,
                    requests=member.requests,
                    failures=member.failures,
                    in_flight=member.in_flight,
                    serving=member.retry_at_s is None,
                    message=member.message,
                    utilization=use[member.number],
                    runner=member.runner.stats(),
                )
                for member in self._entries
            )

    def close(self) -> None:
        """Close all replicas, even if one fails; no thread may be inside `run`. Idempotent."""
        if self._forked:
            return
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            if self._utilization is not None:
                self._utilization.close()
            for member in self._entries:
                try:
                    member.runner.close()
                except TrtEngineError as error:
                    log.warning("the replica on `%s` did not close: %s", member.device, error.message)

    # -------------------------------------------------------------------------------------------- dispatch

    def _dispatch(self, call: Callable[[RunnerBase], Output]) -> Output:
        first = self._select()
        try:
            answer = self._call(first, call)
        except _REQUEST_ERRORS:
            raise
        except Exception as error:
            if isinstance(error, DeviceLost):
                self._suspend(first, error)
            other = self._select(exclude=first)
            if other is first:
                raise
            answer = self._retry(other, error, call)
            if not isinstance(error, DeviceLost):
                self._suspend(first, error)
            self._resume(other)
            return answer
        self._resume(first)
        return answer

    def _retry(self, member: _ReplicaEntry, error: Exception, call: Callable[[RunnerBase], Output]) -> Output:
        """Retry on another replica; raises the first error if that fails too."""
        try:
            return self._call(member, call)
        except _REQUEST_ERRORS:
            raise error from None
        except Exception as again:
            if isinstance(again, DeviceLost):
                self._suspend(member, again)
            raise error from again

    def _call(self, member: _ReplicaEntry, call: Callable[[RunnerBase], Output]) -> Output:
        with self._lock:
            member.in_flight += 1
            member.requests += 1
        try:
            return call(member.runner)
        finally:
            with self._lock:
                member.in_flight -= 1

    def _select(self, exclude: _ReplicaEntry | None = None) -> _ReplicaEntry:
        members, use = self._entries, self._utilization.current if self._utilization is not None else None
        if len(members) == 1:
            return members[0]
        now_s = self._clock()
        with self._lock:
            due = [member for member in members if member.retry_at_s is not None and member.retry_at_s <= now_s]
            if due and due[0] is not exclude:  # one request probes it; the others use working replicas
                due[0].retry_at_s = now_s + self._pause_s * due[0].backoff
                return due[0]
            serving = [member for member in members if member.retry_at_s is None and member is not exclude]
            if not serving:
                others = [member for member in members if member is not exclude]
                return min(others, key=lambda member: member.retry_at_s or 0.0)
            seen = [
                ReplicaState(member.number, member.device, member.in_flight, use[member.number] if use else None)
                for member in serving
            ]
        number = self._strategy(seen)  # user code: no lock held
        chosen = next((member for member in serving if member.number == number), None)
        if chosen is None:
            raise UsageError(
                f"the load balancing strategy chose replica {number!r} of {[replica.number for replica in seen]}",
                hint="return the `number` of one of these replicas",
            )
        return chosen

    def _suspend(self, member: _ReplicaEntry, error: Exception) -> None:
        with self._lock:
            first = member.retry_at_s is None
            member.failures += 1
            member.backoff = min(member.backoff * 2, _MAX_BACKOFF) if member.backoff else 1
            member.retry_at_s = self._clock() + self._pause_s * member.backoff
            member.message = library_reason(error)
        if first:
            log.warning("the replica on `%s` failed and is suspended: %s", member.device, member.message)

    def _resume(self, member: _ReplicaEntry) -> None:
        if member.retry_at_s is None:
            return
        with self._lock:
            was_out, member.retry_at_s, member.backoff, member.message = member.retry_at_s is not None, None, 0, ""
        if was_out:
            log.warning("the replica on `%s` is in use again", member.device)


class _ReplicaEntry:
    """A replica and its counters."""

    def __init__(self, number: int, runner: RunnerBase, device: str) -> None:
        self.number, self.runner, self.device = number, runner, device
        self.in_flight = self.requests = self.failures = 0
        self.retry_at_s: float | None = None
        """Time of the next attempt; None while not suspended."""
        self.backoff = 0
        self.message = ""


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """Replica state passed to a strategy."""

    number: int
    device: str
    in_flight: int
    utilization: float | None
    """Recent GPU utilization, 0 to 1; None if unknown."""


Strategy = Callable[[Sequence[ReplicaState]], int]
"""Maps the available replicas (at least one) to the `number` of the next. Must be thread-safe."""


class RoundRobin:
    """Replicas in rotation."""

    def __init__(self) -> None:
        self._next: Callable[[], int] = itertools.count().__next__

    def __call__(self, replicas: Sequence[ReplicaState]) -> int:
        return replicas[self._next() % len(replicas)].number


class LeastBusy(RoundRobin):
    """The replica with the fewest requests in flight; rotation among equals."""

    def __call__(self, replicas: Sequence[ReplicaState]) -> int:
        turn = self._next() % len(replicas)
        return min((*replicas[turn:], *replicas[:turn]), key=lambda replica: replica.in_flight).number


class LeastUtilized:
    """The replica with the lowest GPU utilization, other processes included; then the fewest requests in flight."""

    def __init__(self) -> None:
        self._least_busy = LeastBusy()

    def __call__(self, replicas: Sequence[ReplicaState]) -> int:
        least = min(_rounded_utilization(replica) for replica in replicas)
        return self._least_busy([replica for replica in replicas if _rounded_utilization(replica) == least])


def _rounded_utilization(replica: ReplicaState) -> int:
    """Utilization in steps of 0.1, because samples are noisy and old."""
    return 0 if replica.utilization is None else int(replica.utilization * 10)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "round robin": RoundRobin,
    "least busy": LeastBusy,
    "by use": LeastUtilized,
}


def resolve_strategy(choice: str | Strategy) -> Strategy:
    """The strategy of that name, or the given function.

    Raises `UsageError` for an unknown name or something that is not a function.
    """
    if not isinstance(choice, str):
        if not callable(choice):
            raise UsageError(f"`balance` is a {type(choice).__name__}", hint="a name, or a function of the replicas")
        return choice
    name = choice.replace("-", " ").replace("_", " ").strip().lower()
    if name not in STRATEGIES:
        raise UsageError(f"unknown load balancing strategy `{choice}`", hint=suggest(name, list(STRATEGIES)))
    return STRATEGIES[name]()


class UtilizationMonitor:
    """Samples GPU utilization of devices in a background thread; the hot path reads the last sample."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        interval_s: float = 0.2,
        sample: Callable[[int], float | None] | None = None,
    ) -> None:
        """`sample` returns the busy fraction of a GPU by its number, None if unknown."""
        self.current: tuple[float | None, ...] = (None,) * len(devices)
        self._numbers = [number if kind == "cuda" else None for kind, number in map(parse_device, devices)]
        self._sample = sample or info.utilisation
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if sample is not None or any(number is not None for number in self._numbers):
            watch = (weakref.ref(self), self._stop, interval_s)
            self._thread = threading.Thread(target=_watch, args=watch, name=f"use-{id(self):x}", daemon=True)
            self._thread.start()

    def _take_sample(self) -> None:
        try:
            self.current = tuple(None if number is None else self._sample(number) for number in self._numbers)
        except Exception as error:  # keep sampling if a GPU does not respond
            log.debug("GPU utilization could not be read: %s", error)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


def _watch(this: weakref.ref[UtilizationMonitor], stop: threading.Event, interval_s: float) -> None:
    """Sample until the monitor is closed or freed."""
    while not stop.is_set():
        monitor = this()
        if monitor is None:
            return
        monitor._take_sample()
        del monitor
        stop.wait(interval_s)

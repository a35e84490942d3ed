"""Load balancing strategies: `round robin`, `least busy`, `by use`, or a custom function."""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trt_engine.device import info, parse_device
from trt_engine.errors import UsageError
from trt_engine.tensors import suggest

log = logging.getLogger(__name__)


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

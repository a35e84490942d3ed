"""Which replica answers next: `round robin`, `least busy`, `by use`, or a function of your own."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trt_engine.device import info, parse_device
from trt_engine.errors import UsageError
from trt_engine.tensors import closest

__all__ = ["STRATEGIES", "Replica", "Strategy", "Use", "strategy"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica as a strategy sees it."""

    number: int
    device: str
    in_flight: int
    use: float | None
    """Share of the last moments its GPU was busy, 0 to 1; None where nobody can tell."""


Strategy = Callable[[Sequence[Replica]], int]
"""Takes the replicas that serve (one at least) and gives the `number` of the one to ask. Called from many threads."""


class RoundRobin:
    """Each in turn."""

    def __init__(self) -> None:
        self._next: Callable[[], int] = itertools.count().__next__

    def __call__(self, replicas: Sequence[Replica]) -> int:
        return replicas[self._next() % len(replicas)].number


class LeastBusy:
    """The one with the fewest requests in flight; among equals each in turn."""

    def __init__(self) -> None:
        self._next: Callable[[], int] = itertools.count().__next__

    def __call__(self, replicas: Sequence[Replica]) -> int:
        turn = self._next() % len(replicas)
        return min((*replicas[turn:], *replicas[:turn]), key=lambda replica: replica.in_flight).number


class ByUse:
    """The one whose GPU is used least, other processes included; among equals the one with fewer requests in flight."""

    def __init__(self) -> None:
        self._least_busy = LeastBusy()

    def __call__(self, replicas: Sequence[Replica]) -> int:
        least = min(_tenths(replica) for replica in replicas)
        return self._least_busy([replica for replica in replicas if _tenths(replica) == least])


def _tenths(replica: Replica) -> int:
    """Use is a sample and some moments old: what differs by less than a tenth is equal."""
    return 0 if replica.use is None else int(replica.use * 10)


STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "round robin": RoundRobin,
    "least busy": LeastBusy,
    "by use": ByUse,
}


def strategy(asked: str | Strategy) -> Strategy:
    """The strategy of that name, or the function itself."""
    if not isinstance(asked, str):
        if not callable(asked):
            raise UsageError(f"`balance` is a {type(asked).__name__}", hint="a name, or a function of the replicas")
        return asked
    name = asked.replace("-", " ").replace("_", " ").strip().lower()
    if name not in STRATEGIES:
        raise UsageError(f"there is no way to balance called `{asked}`", hint=closest(name, list(STRATEGIES)))
    return STRATEGIES[name]()


class Use:
    """How much the GPUs of some devices are used, sampled by a thread of its own; the hot path reads what was found last."""

    def __init__(
        self,
        devices: Sequence[str],
        *,
        every_s: float = 0.2,
        sample: Callable[[int], float | None] | None = None,
    ) -> None:
        self.now: tuple[float | None, ...] = (None,) * len(devices)
        self._numbers = [number if kind == "cuda" else None for kind, number in map(parse_device, devices)]
        self._sample = sample or info.utilisation
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if sample is not None or any(number is not None for number in self._numbers):
            self._thread = threading.Thread(target=self._watch, name=f"use-{id(self):x}", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                self.now = tuple(None if number is None else self._sample(number) for number in self._numbers)
            except Exception as error:  # a GPU that does not answer must not end the looking
                log.debug("the use of the GPUs could not be read: %s", error)
            self._stop.wait(self._every_s)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

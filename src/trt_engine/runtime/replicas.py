"""`Replicas`: one engine on several devices, each request answered by one of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trt_engine.errors import DeadlineExpired, DeviceLost, Overloaded, TrtEngineError, UsageError
from trt_engine.protocols import Runner
from trt_engine.runtime.balance import ByUse, Replica, Strategy, Use, strategy
from trt_engine.tensors import Signature, Tensors

__all__ = ["ReplicaStats", "Replicas"]

log = logging.getLogger(__name__)

_NOT_ITS_FAULT = (UsageError, Overloaded, DeadlineExpired)
"""Errors that say nothing about the replica."""
_LONGEST_PAUSE = 32
"""Times the first pause."""


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One replica: what it has done and whether it serves."""

    device: str
    requests: int
    failures: int
    """Requests it failed on that another replica answered, or its device was lost with."""
    in_flight: int
    serving: bool
    message: str = ""
    """Why it pauses."""
    use: float | None = None
    runner: Any = None
    """The statistics of the runner under it, where it keeps some."""


class Replicas:
    """A Runner over Runners of the same engine: `balance` says who is asked.

    A request that fails on one replica is tried on another. If that one answers, the first is at fault: it is left out,
    which is said, and tried again after `pause_s`, each time twice as late. If the other fails too, the request is at fault
    and gets its error. When all pause, the one that is due first is asked.
    """

    def __init__(
        self,
        runners: Sequence[Runner],
        *,
        devices: Sequence[str] | None = None,
        balance: str | Strategy = "least busy",
        pause_s: float = 5.0,
        use: Use | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not runners:
            raise UsageError("there are no replicas", hint="name one device or more")
        self.signature: Signature = runners[0].signature
        self.profiles = getattr(runners[0], "profiles", ())
        self.width = sum(int(getattr(runner, "width", 1)) for runner in runners)
        self.device = None
        """None: feeds are taken from the host, as nobody knows who will be asked."""
        self._strategy = strategy(balance)
        names = list(devices or (f"replica {number}" for number in range(len(runners))))
        if use is None and devices is not None and isinstance(self._strategy, ByUse):
            use = Use(names)
        self._use = use
        self._clock, self._pause_s = clock, pause_s
        self._lock = threading.Lock()
        self._members = [
            _Member(number, runner, name) for number, (runner, name) in enumerate(zip(runners, names, strict=True))
        ]
        self.run_parts: Callable[[Sequence[Tensors], int | None], dict[str, Any]] | None = None
        """The outputs of several requests' rows, one below the other; None where a runner cannot."""
        if all(getattr(runner, "run_parts", None) for runner in runners):
            self.run_parts = lambda parts, size=None: self._ask("run_parts", parts, size)
        self._ending = threading.Lock()
        self._ended = False

    def run(self, feeds: Tensors) -> dict[str, Any]:
        return self._ask("run", feeds)  # type: ignore[no-any-return]

    def timed(self, feeds: Tensors, *, on_device: bool = False) -> tuple[dict[str, Any], float]:
        """The outputs, and the milliseconds the replica tells."""
        if on_device:
            raise UsageError("outputs on the device of one of several replicas are of no use", hint="load one device")
        return self._ask("timed", feeds)  # type: ignore[no-any-return]

    @property
    def runners(self) -> list[Runner]:
        return [member.runner for member in self._members]

    def facts(self) -> dict[str, str]:
        told: list[dict[str, str]] = [getattr(member.runner, "facts", dict)() for member in self._members]
        shared = {name: value for name, value in told[0].items() if all(one.get(name) == value for one in told)}
        differing = {
            f"{name} of {member.device}": one[name]
            for member, one in zip(self._members, told, strict=True)
            for name in one
            if name not in shared and name != "device"
        }
        out = [f"{stats.device}: {stats.message}" for stats in self.stats() if not stats.serving]
        named = {"device": ",".join(member.device for member in self._members)}
        return (
            named | shared | differing | {"replicas": str(len(told))} | ({"not serving": "; ".join(out)} if out else {})
        )

    def stats(self) -> tuple[ReplicaStats, ...]:
        use = self._use.now if self._use is not None else (None,) * len(self._members)
        with self._lock:
            return tuple(
                ReplicaStats(
                    device=member.device,
                    requests=member.requests,
                    failures=member.failures,
                    in_flight=member.in_flight,
                    serving=member.until_s is None,
                    message=member.message,
                    use=use[member.number],
                    runner=getattr(member.runner, "stats", lambda: None)(),
                )
                for member in self._members
            )

    def close(self) -> None:
        """Close every replica, also when one of them cannot; nobody may be inside `run`. Twice is once."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            if self._use is not None:
                self._use.close()
            for member in self._members:
                try:
                    member.runner.close()
                except TrtEngineError as error:
                    log.warning("the replica on `%s` did not close: %s", member.device, error.message)

    # -------------------------------------------------------------------------------------------- who is asked

    def _ask(self, call: str, *given: Any) -> Any:
        first = self._choose()
        try:
            answer = self._call(first, call, *given)
        except _NOT_ITS_FAULT:
            raise
        except Exception as error:
            if isinstance(error, DeviceLost):
                self._leave_out(first, error)
            other = self._choose(but=first)
            if other is first:
                raise
            answer = self._second(other, error, call, *given)
            if not isinstance(error, DeviceLost):
                self._leave_out(first, error)
            self._serves(other)
            return answer
        self._serves(first)
        return answer

    def _second(self, member: _Member, error: Exception, call: str, *given: Any) -> Any:
        """The other replica's answer; the first error where it fails too."""
        try:
            return self._call(member, call, *given)
        except _NOT_ITS_FAULT:
            raise error from None
        except Exception as again:
            if isinstance(again, DeviceLost):
                self._leave_out(member, again)
            raise error from again

    def _call(self, member: _Member, call: str, *given: Any) -> Any:
        with self._lock:
            member.in_flight += 1
            member.requests += 1
        try:
            return getattr(member.runner, call)(*given)
        finally:
            with self._lock:
                member.in_flight -= 1

    def _choose(self, but: _Member | None = None) -> _Member:
        members, use = self._members, self._use.now if self._use is not None else None
        if len(members) == 1:
            return members[0]
        now_s = self._clock()
        with self._lock:
            due = [member for member in members if member.until_s is not None and member.until_s <= now_s]
            if due and due[0] is not but:  # one request finds out; the others go where it is sure
                due[0].until_s = now_s + self._pause_s * due[0].pauses
                return due[0]
            serving = [member for member in members if member.until_s is None and member is not but]
            if not serving:
                others = [member for member in members if member is not but]
                return min(others, key=lambda member: member.until_s or 0.0)
            seen = [
                Replica(member.number, member.device, member.in_flight, use[member.number] if use else None)
                for member in serving
            ]
        number = self._strategy(seen)  # somebody else's code: no lock is held
        chosen = next((member for member in serving if member.number == number), None)
        if chosen is None:
            raise UsageError(
                f"the way to balance chose replica {number!r} of {[replica.number for replica in seen]}",
                hint="return the `number` of one of the replicas given",
            )
        return chosen

    def _leave_out(self, member: _Member, error: Exception) -> None:
        with self._lock:
            first = member.until_s is None
            member.failures += 1
            member.pauses = min(member.pauses * 2, _LONGEST_PAUSE) if member.pauses else 1
            member.until_s = self._clock() + self._pause_s * member.pauses
            member.message = str(error).partition("\n")[0]
        if first:
            log.warning("the replica on `%s` fails and is left out for now: %s", member.device, member.message)

    def _serves(self, member: _Member) -> None:
        if member.until_s is None:
            return
        with self._lock:
            was_out, member.until_s, member.pauses, member.message = member.until_s is not None, None, 0, ""
        if was_out:
            log.warning("the replica on `%s` serves again", member.device)


class _Member:
    """One replica and how it fares."""

    def __init__(self, number: int, runner: Runner, device: str) -> None:
        self.number, self.runner, self.device = number, runner, device
        self.in_flight = self.requests = self.failures = 0
        self.until_s: float | None = None
        """When it is tried again; None while it serves."""
        self.pauses = 0
        self.message = ""

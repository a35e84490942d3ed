"""What a server takes at once, and its end: new requests are refused, accepted ones are answered."""

from __future__ import annotations

import asyncio

from trt_engine.errors import Overloaded

_QUIET_S, _MAX_QUIET_S = 0.1, 1.0
"""At the end: time without a new request after which the ports are closed, and the longest wait for it."""


class Admission:
    """Counts requests and their bytes. Belongs to the event loop."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self._max_requests, self.max_bytes = max_requests, max_bytes
        self.requests = self.nbytes = self.refused = 0
        self.overdue = 0
        """Bytes of answers that clients of gRPC did not read in time, and that can not be dropped."""
        self._peak = 0
        self.started = False
        """Whether the models of the start are loaded."""
        self.draining = False
        """Whether the server is ending: not ready, connections are closed after their answer."""
        self.closed = False
        """Whether new requests are refused."""
        self.shut = asyncio.Event()
        """Set when the ports are closed: requests that come while the server ends are refused then (`wait_for_end`)."""
        self._holding, self._late_s = False, 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    def receive(self, nbytes: int, held: int = 0) -> bool:
        """Count bytes of a request that is coming in; False, and refused, where they do not fit.

        There is always room for a request whose `held` bytes are all that count.
        """
        if self.nbytes > held and self.nbytes + nbytes > self.max_bytes:
            self.refused += 1
            return False
        self.hold(nbytes)
        return True

    def hold(self, nbytes: int) -> None:
        """Count bytes whatever the limit is, as of an answer that its client has not read yet."""
        self.nbytes += nbytes
        if self.nbytes > self._peak:
            self._peak = self.nbytes

    def take_peak(self) -> int:
        """The most bytes at once since the last call."""
        found, self._peak = self._peak, self.nbytes
        return found

    def forget(self, nbytes: int) -> None:
        """Bytes that were counted and are not here any more."""
        self.nbytes -= nbytes

    def check_overdue(self) -> None:
        """`Overloaded` where answers that their clients do not read take `max_bytes`."""
        if self.overdue > self.max_bytes:
            self.refused += 1
            raise Overloaded(
                f"clients have not read {self.overdue} bytes of their answers",
                hint="read them or close the connection; `--max-in-flight-size` sets the limit",
            )

    def enter(self, nbytes: int = 0, *, begun: bool = False) -> None:
        """Count a whole request in; `Overloaded` where the server is full, or ending and the request had not `begun`."""
        ending = self.closed and not begun
        if ending or self.requests >= self._max_requests or (self.requests and self.nbytes + nbytes > self.max_bytes):
            self.refused += 1
            raise Overloaded(
                "the server is shutting down" if ending else f"the server has {self.requests} requests already",
                hint="retry later"
                if ending
                else "retry later; `--max-in-flight` and `--max-in-flight-size` set the limits",
            )
        self.requests += 1
        self.hold(nbytes)
        self._idle.clear()

    def leave(self, nbytes: int = 0) -> None:
        self.requests -= 1
        self.nbytes -= nbytes
        if not self.requests:
            self._idle.set()

    async def wait_for_end(self) -> None:
        """For a request that the ending server refuses: back at once, but from `quiet` on when the ports are closed.

        A client that is refused asks again at once, and a request that reaches a port as it is closed has no answer.
        """
        if self._holding:
            self._late_s = asyncio.get_running_loop().time()
            await self.shut.wait()

    async def quiet(self) -> None:
        """Back when no new request has come for a moment: all clients wait for an answer."""
        loop, self._holding = asyncio.get_running_loop(), True
        give_up_s = loop.time() + _MAX_QUIET_S
        self._late_s = max(self._late_s, loop.time() - _QUIET_S / 2)
        while (now_s := loop.time()) < min(self._late_s + _QUIET_S, give_up_s):
            await asyncio.sleep(min(self._late_s + _QUIET_S, give_up_s) - now_s)

    async def idle(self, timeout_s: float) -> bool:
        """Whether no request is left, after waiting for it that long."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

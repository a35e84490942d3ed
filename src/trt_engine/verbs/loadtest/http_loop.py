"""Requests over HTTP/1.1 from one thread: the same bytes again and again, on sockets in one epoll set.

A closed loop sends the next request on a connection when the last one is answered. An open loop sends at the times of a
schedule, on the connection that was idle last; where all are busy a request waits, and its latency counts from the time
it was meant for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Literal

from trt_engine.verbs.loadtest.generator import (
    CONNECTION,
    REFUSED,
    STATUS,
    TICK_NS,
    TIMEOUT,
    LoadWindow,
    OnTick,
    SampleArrays,
    Samples,
)
from trt_engine.verbs.loadtest.http_response import BadResponse, ResponseReader

RETRY_NS = 50_000_000
"""Pause of a closed loop before a refused connection is tried again."""
_MAX_HEADS = 64
"""Heads of responses that are recognized without being parsed again; most servers send one a second."""
_SPIN_NS = 60_000
"""`select` wakes up this much late: the rest of a wait is a poll."""

_clock = time.perf_counter_ns


class HttpLoop:
    """Load of one thread on one address, closed (`schedule` is None) or at the times of a schedule, in ns."""

    def __init__(
        self,
        family: int,
        address: object,
        request: bytes,
        *,
        connections: int,
        timeout_s: float,
        host: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.samples = Samples()
        self._request = request
        self._timeout_ns = round(timeout_s * 1e9)
        self._epoll = select.epoll()
        self._connections = [HttpConnection(self._epoll, family, address, tls, host) for _ in range(connections)]
        self._by_fd: dict[int, HttpConnection] = {}
        self._heads: dict[bytes, int] = {}
        self._plain = tls is None
        self._in_flight = 0
        self._schedule: Sequence[int] | None = None
        self._next = 0
        self._idle: list[HttpConnection] = []
        self._resting: list[HttpConnection] = []
        self._window = LoadWindow(0, 0, 0)

    def collect(self) -> SampleArrays:
        """The samples so far."""
        return self.samples.pack()

    def run(self, window: LoadWindow, schedule: Sequence[int] | None, on_tick: OnTick) -> None:
        """Send until the window ends, then wait for what is in flight. `schedule`: times in ns, ascending."""
        self._window, self._schedule, self._next = window, schedule, 0
        self._idle = list(self._connections)
        try:
            time.sleep(max(window.start - _clock(), 0) / 1e9)
            if schedule is None:
                self._idle, self._resting = [], self._idle
            self._loop(on_tick)
        finally:
            for connection in self._connections:
                self._close(connection)
            self._epoll.close()

    def _loop(self, on_tick: OnTick) -> None:
        tick = 0
        while True:
            now = _clock()
            if now >= tick:
                self._expire(now)
                on_tick(now, self.samples)
                tick = now + min(TICK_NS, max(self._timeout_ns // 4, 1_000_000))
            until = tick
            if self._schedule is not None:
                until = min(tick, self._send_due(now))
            elif self._resting and now < self._window.end:
                self._restart(now)
            if not self._in_flight and self._is_over(now):
                return
            events = self._poll(until)
            if self._plain:
                events = self._answer_plain(events, tick)
            for fd, mask in events:
                connection = self._by_fd.get(fd)
                if connection is not None:
                    self._handle(connection, mask)

    def _is_over(self, now: int) -> bool:
        if self._schedule is not None:
            return self._next >= len(self._schedule)
        return now >= self._window.end

    def _poll(self, until: int) -> list[tuple[int, int]]:
        """Events, at the latest at that time: `epoll` counts whole milliseconds, `select` on it microseconds."""
        if self._schedule is None or self._next >= len(self._schedule):
            return self._epoll.poll(max(until - _clock(), 0) / 1e9)
        left = until - _clock() - _SPIN_NS
        if left > 0:
            select.select((self._epoll,), (), (), left / 1e9)
        return self._epoll.poll(0)

    # -------------------------------------------------------------------------------------------- the usual case

    def _answer_plain(self, events: list[tuple[int, int]], until: int) -> list[tuple[int, int]]:
        """Take whole responses with a known head, and in a closed loop send the next request and go on until that time.

        Returns the events of other cases.
        """
        left: list[tuple[int, int]] = []
        heads, by_fd, request, idle = self._heads, self._by_fd, self._request, self._idle
        samples, readable, end = self.samples, select.EPOLLIN, 0
        intended, sent, ends = samples.intended.append, samples.sent.append, samples.ends.append
        finish, closed, clock, poll = self._window.end, self._schedule is None, _clock, self._epoll.poll
        while events:
            for event in events:
                connection = by_fd.get(event[0])
                if connection is None or event[1] != readable or connection.stage != "busy" or connection.reader.nbytes:
                    left.append(event)
                    continue
                try:
                    data = connection.recv(RECEIVE_BYTES)
                    body = data.find(b"\r\n\r\n") + 4
                    if heads.get(data[:body]) != len(data) - body:
                        self._take(connection, data)
                        continue
                    end = clock()
                    intended(connection.intended)
                    sent(connection.sent)
                    ends(end)
                    if closed and end < finish:
                        connection.intended = connection.sent = end
                        connection.begin(request)
                        continue
                except BlockingIOError:
                    continue
                except OSError as error:
                    self._lose(connection, error)
                    continue
                connection.stage = "idle"
                self._in_flight -= 1
                idle.append(connection)
            if not closed or left or self._resting or not 0 < end < until:
                break
            events = poll(TICK_NS / 1e9)
        return left

    # -------------------------------------------------------------------------------------------- all cases

    def _send_due(self, now: int) -> int:
        """Send the requests whose time has come; when to look again."""
        schedule, index = self._schedule, self._next
        assert schedule is not None
        while index < len(schedule) and (due := schedule[index]) <= now:
            if self._idle:
                self._begin(self._idle.pop(), due)
            elif now - due <= self._timeout_ns:
                self.samples.request_waits += 1
                break
            else:
                self.samples.fail(due, TIMEOUT, "all connections were busy")
            index += 1
            now = _clock()
        self._next = index
        return schedule[index] if index < len(schedule) and self._idle else now + TICK_NS

    def _begin(self, connection: HttpConnection, intended: int) -> None:
        """Give the connection a request that was meant for that time; it is opened first where it is closed."""
        connection.intended = intended
        self._in_flight += 1
        try:
            if connection.stage == "closed":
                connection.open()
                self._by_fd[connection.fd] = connection
            else:
                self._start(connection)
        except OSError as error:
            self._lose(connection, error)

    def _start(self, connection: HttpConnection) -> None:
        connection.sent = _clock()
        connection.begin(self._request)

    def _handle(self, connection: HttpConnection, mask: int) -> None:
        """Go on with a connection after an event."""
        try:
            if connection.stage in ("connecting", "handshake"):
                if connection.advance():
                    self._start(connection)
                return
            if mask & select.EPOLLOUT:
                connection.flush()
            if mask & ~select.EPOLLOUT:
                while (data := connection.receive()) is not None:
                    self._take(connection, data)
                    if not connection.has_decrypted:
                        break
        except OSError as error:
            self._lose(connection, error)

    def _take(self, connection: HttpConnection, data: bytes) -> None:
        """Bytes from the server; none at the end of the connection."""
        reader = connection.reader
        if connection.stage == "idle":  # the server ends an idle connection
            self._close(connection)
        elif not data and not reader.end():
            found = f"{reader.nbytes} bytes of its answer" if reader.nbytes else "an answer"
            self._fail(connection, CONNECTION, f"the server closed the connection after {found}")
        else:
            try:
                done = not data or reader.feed(data)
            except BadResponse as error:
                self._fail(connection, CONNECTION, str(error))
                return
            if done:
                self._complete(connection)

    def _complete(self, connection: HttpConnection) -> None:
        reader, end = connection.reader, _clock()
        if reader.status == 200:
            for times, value in (("intended", connection.intended), ("sent", connection.sent), ("ends", end)):
                getattr(self.samples, times).append(value)
            if reader.keep_alive and reader.length is not None and reader.nbytes == len(reader.head) + reader.length:
                if len(self._heads) >= _MAX_HEADS:
                    self._heads.clear()
                self._heads[reader.head] = reader.length
        else:
            self.samples.fail(connection.intended, f"{STATUS} {reader.status}", reader.text)
        if not reader.keep_alive or connection.stage == "sending":  # an answer before the end of the request
            self._close(connection)
        else:
            connection.stage = "idle"
        reader.reset()
        self._release(connection)

    def _release(self, connection: HttpConnection, retry_at: int = 0) -> None:
        """The connection is free for another request."""
        self._in_flight -= 1
        connection.retry_at = retry_at
        (self._resting if self._schedule is None else self._idle).append(connection)

    def _restart(self, now: int) -> None:
        """Send the next requests of a closed loop."""
        ready = [connection for connection in self._resting if connection.retry_at <= now]
        self._resting = [connection for connection in self._resting if connection.retry_at > now]
        for connection in ready:
            self._begin(connection, now)

    def _lose(self, connection: HttpConnection, error: OSError) -> None:
        refused = isinstance(error, ConnectionRefusedError)
        text = error.strerror or str(error)
        self._fail(connection, REFUSED if refused else CONNECTION, text, _clock() + RETRY_NS if refused else 0)

    def _fail(self, connection: HttpConnection, kind: str, text: str, retry_at: int = 0) -> None:
        self._close(connection)
        self.samples.fail(connection.intended, kind, text)
        self._release(connection, retry_at)

    def _expire(self, now: int) -> None:
        """Give up requests that take too long."""
        for connection in self._connections:
            if connection.stage not in ("closed", "idle") and now - connection.intended > self._timeout_ns:
                self._fail(connection, TIMEOUT, "no answer in time")

    def _close(self, connection: HttpConnection) -> None:
        self._by_fd.pop(connection.fd, None)
        connection.close()


Stage = Literal["closed", "connecting", "handshake", "idle", "sending", "busy"]
RECEIVE_BYTES = 1 << 16
_INCOMPLETE = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class HttpConnection:
    """A connection that is opened when its first request is sent, and again after it was closed."""

    __slots__ = (
        "_address", "_epoll", "_family", "_registered", "_tls", "_unsent", "fd", "host", "intended", "reader", "recv",
        "retry_at", "send", "sent", "socket", "stage",
    )  # fmt: skip

    def __init__(
        self, epoll: select.epoll, family: int, address: object, tls: ssl.SSLContext | None, host: str
    ) -> None:
        self._epoll, self._family, self._address, self._tls, self.host = epoll, family, address, tls, host
        self.reader = ResponseReader()
        self.stage: Stage = "closed"
        self.socket: socket.socket | None = None
        self.intended = self.sent = 0
        self.retry_at = 0
        """When a refused connection is tried again."""
        self.fd = -1
        self._unsent: memoryview | None = None

    def open(self) -> None:
        """Begin to connect. Raises `OSError`."""
        made = socket.socket(self._family, socket.SOCK_STREAM)
        made.setblocking(False)
        with contextlib.suppress(OSError):  # a Unix socket has none
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.fd, self.stage = made, made.fileno(), "connecting"
        code = made.connect_ex(self._address)  # type: ignore[arg-type]
        if code not in (0, errno.EINPROGRESS, errno.EAGAIN):
            self.close()
            raise OSError(code, os.strerror(code))
        self._registered = select.EPOLLOUT
        self._epoll.register(self.fd, self._registered)

    def advance(self) -> bool:
        """Go on with connecting after an event; True once requests can be sent. Raises `OSError`."""
        assert self.socket is not None
        if self.stage == "connecting":
            if code := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            if self._tls is not None:
                self.socket = self._tls.wrap_socket(
                    self.socket, server_hostname=self.host, do_handshake_on_connect=False
                )
            self.stage = "handshake"
        if isinstance(self.socket, ssl.SSLSocket):
            try:
                self.socket.do_handshake()
            except ssl.SSLWantReadError:
                self._wait_for(select.EPOLLIN)
                return False
            except ssl.SSLWantWriteError:
                self._wait_for(select.EPOLLOUT)
                return False
        self.recv, self.send = self.socket.recv, self.socket.send
        self.stage = "idle"
        self._wait_for(select.EPOLLIN)
        return True

    def begin(self, request: bytes) -> None:
        """Send a request, or as much of it as fits; the rest goes with `flush`. Raises `OSError`."""
        self.stage = "busy"
        try:
            count = self.send(request)
        except _INCOMPLETE:
            count = 0
        if count < len(request):
            self.stage = "sending"
            self._unsent = memoryview(request)[count:]
            self._wait_for(select.EPOLLIN | select.EPOLLOUT)

    def flush(self) -> None:
        """Send what is left of the request. Raises `OSError`."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self.send(self._unsent) :]
        except _INCOMPLETE:
            return
        self.stage = "busy"
        self._wait_for(select.EPOLLIN)

    def receive(self) -> bytes | None:
        """Bytes that are here, empty at the end of the connection; None where there are none yet. Raises `OSError`."""
        try:
            return self.recv(RECEIVE_BYTES)
        except _INCOMPLETE:
            return None

    @property
    def has_decrypted(self) -> bool:
        """Whether bytes are waiting that the kernel does not report any more."""
        return isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()  # leaves the epoll set too
        self.socket, self.fd, self.stage, self._unsent = None, -1, "closed", None
        self.reader.reset()

    def _wait_for(self, events: int) -> None:
        if events != self._registered:
            self._registered = events
            self._epoll.modify(self.fd, events)

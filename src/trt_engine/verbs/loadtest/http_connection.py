"""One non-blocking connection of a load generator, plain or TLS, with at most one request in flight."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
from typing import Literal

from trt_engine.verbs.loadtest.http_response import ResponseReader

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

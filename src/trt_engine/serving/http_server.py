"""uvicorn with httptools in front of the application, with limits on headers and connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from trt_engine.config.serve import ServeConfig

_KEEP_ALIVE_S = 75
_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: 44\r\nconnection: close\r\n\r\n"
    b'{"error":"the request did not come in time"}'
)


class _HeaderTooLarge(Exception):
    """The header of a request is over the limit."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, that drops connections which send headers too large, or a header or a body too slowly."""

    max_header = max_connections = 0
    request_timeout_s = 0.0
    _header_bytes = _unfinished_bytes = 0
    _in_header = True
    _in_message = True
    """Whether more of a request must come; true from the start, for a connection that sends nothing."""
    _timer: asyncio.TimerHandle | None = None
    running: asyncio.Task[Any] | None = None
    """The inference of this connection: cancelled when the client closes it."""
    lost = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.connections.discard(self)
            transport.abort()
            return
        self._timer = self.loop.call_later(self.request_timeout_s, self._expire)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_message:
            return
        if self._timer is None:
            self._timer = self.loop.call_later(self.request_timeout_s, self._expire)
        if self._in_header:  # the parser keeps it all
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > self.max_header:
                self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_header or self.cycle.response_started:
            self.transport.abort()
            return
        self.transport.write(_TIMEOUT)
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.lost = True
        super().connection_lost(exc)
        if self.running is not None:
            self.running.cancel()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._header_bytes = 0
        self._in_header = self._in_message = True

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > self.max_header:
            raise _HeaderTooLarge("the header is too large")

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_header = False
        self._unfinished_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_message = False
        super().on_message_complete()


class HttpServer(uvicorn.Server):
    """The server of the application on sockets that listen already; signals are left to the caller."""

    def __init__(self, app: Any, config: ServeConfig) -> None:
        tls: dict[str, Any] = {}
        if config.tls_cert is not None:
            tls = {"ssl_certfile": str(config.tls_cert), "ssl_keyfile": str(config.tls_key)}
        limits = {name: getattr(config, name) for name in ("max_header", "max_connections", "request_timeout_s")}
        protocol = type("ServerProtocol", (LimitedProtocol,), limits)
        super().__init__(
            uvicorn.Config(
                app, http=protocol, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
                server_header=False, proxy_headers=False, timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=int(config.drain_timeout_s) + 1, **tls,
            )
        )  # fmt: skip

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `OSError` where the address is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener

"""uvicorn with httptools in front of the application, with limits on headers and connections."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from trt_engine.atomic_io import encode_json
from trt_engine.config.serve import ServeConfig
from trt_engine.serving.http_app import HttpApp
from trt_engine.serving.inference_body import InferenceBody

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_MIN_READ_RATE = 1 << 10
"""Bytes/s of an answer that its client must read."""
_IDLE_BYTES, _READ_BYTES = 16 << 10, 256 << 10
"""Read at once between requests, and inside one."""
_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: 44\r\nconnection: close\r\n\r\n"
    b'{"error":"the request did not come in time"}'
)

_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 50\r\nretry-after: 1\r\n"
    b'connection: close\r\n\r\n{"error":"the server has no room for the request"}'
)


_BEING_ANSWERED = cast(Any, SimpleNamespace(response_complete=False))
"""Stands for the request that is answered without ASGI."""


class _HeaderTooLarge(Exception):
    """The header of a request is over the limit."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol, that drops connections which send headers too large, or a header or a body too slowly.

    It receives the body of an inference where its tensors are used, and answers it without ASGI: half of the time of a small
    request would be there. What `HttpApp.accept` does not take, and everything else, goes the usual way.
    """

    http_app: HttpApp
    max_header = max_connections = 0
    request_timeout_s = 0.0
    _header_bytes = _unfinished_bytes = 0
    _in_header = True
    _ended = False
    """Whether a request ended in the bytes that came last."""
    in_message = True
    """Whether more of a request must come; true from the start, for a connection that sends nothing."""
    _timer: asyncio.TimerHandle | None = None
    running: asyncio.Task[Any] | None = None
    """The inference of this connection: cancelled when the client closes it."""
    lost = False
    inference: InferenceBody | None = None
    """The inference that is being received or answered without ASGI."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self.connections.discard(self)
            transport.abort()
            return
        transport.set_write_buffer_limits(1, 0)  # what is unsent keeps the memory of the whole answer
        self._timer = self.loop.call_later(self.request_timeout_s, self._expire)

    def data_received(self, data: bytes) -> None:
        self._ended = False
        super().data_received(data)
        if not self.in_message:
            return
        if self._timer is None:
            self._timer = self.loop.call_later(self.request_timeout_s, self._expire)
        if self._in_header and not self._ended:  # the parser keeps it all
            self._unfinished_bytes += len(data)
            if self._unfinished_bytes > self.max_header and not self.transport.is_closing():
                self._refuse(431)

    def body_received(self, body: InferenceBody, nbytes: int) -> None:
        """Take note of `nbytes` more in `body.rest()`, past the parser."""
        if self._has_room(body, nbytes) and body.complete:
            self.parser = httptools.HttpRequestParser(self)  # the old one waits for these bytes
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.on_message_complete()

    def _has_room(self, body: InferenceBody, nbytes: int) -> bool:
        """Count bytes that came; the connection ends where the server has no room for them."""
        if self.http_app.receive(body, nbytes):
            return True
        self.transport.write(_FULL)
        self.transport.close()
        return False

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this where the parser fails."""
        self._refuse(431 if self._header_bytes > self.max_header else 400)

    def _refuse(self, status: int) -> None:
        """Answer a request that cannot be parsed, and close the connection."""
        texts = {
            400: "this is not a valid HTTP request",
            431: f"the header is over {self.max_header} bytes, `--max-header`",
        }
        body = encode_json({"error": texts[status]})
        self.transport.write(
            STATUS_LINE[status] + b"content-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        behind = self.pipeline  # another request, whose answer this would be
        if self._in_header or behind or (self.inference is None and self.cycle.response_started):
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
        elif self.inference is not None:
            self.http_app.leave(self.inference)
            self.inference = None

    def shutdown(self) -> None:
        if self.inference is None:  # else it closes after the answer
            super().shutdown()

    # -------------------------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._header_bytes = self._unfinished_bytes = 0
        self._in_header = self.in_message = True

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        name = name.lower()
        if name == b"expect":
            self.expect_100_continue = value.lower() == b"100-continue"
        self.headers.append((name, value))

    def _count(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > self.max_header:
            raise _HeaderTooLarge("the header is too large")

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_header = False
        if self.inference is None and self._is_alone():
            self.inference = self.http_app.accept(self.url.decode("latin-1"), self.headers)
            if self.inference is not None:
                return
        before = self.cycle
        if self.inference is not None:  # uvicorn queues what comes behind a request that has no answer yet
            self.cycle = _BEING_ANSWERED
        try:
            super().on_headers_complete()
        finally:
            if self.cycle is _BEING_ANSWERED:
                self.cycle = before

    def _is_alone(self) -> bool:
        """Whether the request can be answered without ASGI: none before it is left, and nothing but a body follows."""
        parser = self.parser
        return (
            (self.cycle is None or self.cycle.response_complete)
            and not self.expect_100_continue
            and parser.get_method() == b"POST"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and parser.get_http_version() == "1.1"
            and self.server is not None
            and self.server[1] not in self.http_app.metrics_ports
        )

    def on_body(self, body: bytes) -> None:
        if self.inference is not None and self.running is None:
            if not self.transport.is_closing():
                self.inference.add(body)
                self._has_room(self.inference, len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self.in_message, self._ended = False, True
        if self.inference is None or self.running is not None:
            super().on_message_complete()
            return
        if self.transport.is_closing():
            return
        self.running = self.loop.create_task(self._answer(self.inference))
        self.tasks.add(self.running)
        self.running.add_done_callback(functools.partial(self._end, self.inference))

    def _end(self, body: InferenceBody, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.http_app.leave(body)
        if task.cancelled():
            self.transport.close()
        elif (error := task.exception()) is not None:
            log.error("an answer could not be sent", exc_info=error)
            self.transport.abort()

    async def _answer(self, body: InferenceBody) -> None:
        """Answer an inference."""
        status, headers, parts = await self.http_app.answer(body)
        self.http_app.leave(body)  # a client that reads slowly takes no place of others
        lines = [STATUS_LINE[status]]
        for name, value in (*self.server_state.default_headers, *headers):
            lines += (name, b": ", value, b"\r\n")
        lines.append(b"\r\n")
        if len(parts) == 1:
            self.transport.write(b"".join([*lines, *parts]))
        else:
            self.transport.writelines([b"".join(lines), *parts])
        if self.flow.write_paused:
            nbytes = sum(map(len, parts))
            self.http_app.hold(nbytes)
            try:
                await self.drain()  # the next request waits until then
            finally:
                self.http_app.hold(-nbytes)
        self.inference = self.running = None
        if self.http_app.draining:
            self.transport.close()
        self.on_response_complete()

    async def drain(self) -> None:
        """Wait until the client has read; one slower than `_MIN_READ_RATE` for `request_timeout_s` is dropped."""
        unread = self.transport.get_write_buffer_size()
        while self.flow.write_paused:
            try:
                await asyncio.wait_for(self.flow.drain(), self.request_timeout_s)
            except TimeoutError:
                before, unread = unread, self.transport.get_write_buffer_size()
                if before - unread < _MIN_READ_RATE * self.request_timeout_s:
                    self.transport.abort()
                    return

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():  # to close would wait until the client reads
            self.transport.abort()
        super().timeout_keep_alive_handler()


class Receiver(asyncio.BufferedProtocol):
    """Reads a connection for a `LimitedProtocol`: the body of an inference into its place, everything else by the parser."""

    def __init__(self, protocol: LimitedProtocol, memory: memoryview) -> None:
        """`memory` is where to read what the parser gets; the event loop takes it at once, so its connections share it."""
        self._protocol = protocol
        self._into: InferenceBody | None = None
        self._idle, self._body = memory[:_IDLE_BYTES], memory
        self._buffer = self._idle
        self.connection_lost = protocol.connection_lost  # type: ignore[method-assign]
        self.pause_writing = protocol.pause_writing  # type: ignore[method-assign]
        self.resume_writing = protocol.resume_writing  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._protocol.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        protocol = self._protocol
        body = protocol.inference
        if body is not None and protocol.in_message and protocol.running is None:
            self._into = body
            return body.rest()
        self._into = None
        self._buffer = self._body if protocol.in_message else self._idle
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._into is not None:
            self._protocol.body_received(self._into, nbytes)
        else:
            self._protocol.data_received(bytes(self._buffer[:nbytes]))


class HttpServer(uvicorn.Server):
    """The server of the application on sockets that listen already; signals are left to the caller."""

    def __init__(self, app: HttpApp, config: ServeConfig) -> None:
        tls: dict[str, Any] = {}
        if config.tls_cert is not None:
            tls = {"ssl_certfile": str(config.tls_cert), "ssl_keyfile": str(config.tls_key)}
        limits = {name: getattr(config, name) for name in ("max_header", "max_connections", "request_timeout_s")}
        protocol = type("ServerProtocol", (LimitedProtocol,), limits | {"http_app": app})
        memory = memoryview(bytearray(_READ_BYTES))

        def connect(**given: Any) -> Receiver:
            return Receiver(protocol(**given), memory)

        super().__init__(
            uvicorn.Config(
                app, http=cast(Any, connect), ws="none", lifespan="off", log_config=None, log_level="error",
                access_log=False, server_header=False, proxy_headers=False, timeout_keep_alive=_KEEP_ALIVE_S,
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

"""HTTP/1.1 in front of the application: httptools parses, one request of a connection is answered at a time."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import http
import logging
import math
import socket
import ssl
from collections import deque
from collections.abc import Callable

import httptools

from trt_engine.verbs.serve.config import ServeConfig
from trt_engine.verbs.serve.http_app import HttpApp, HttpRequest, refuse

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75.0
_MIN_READ_RATE = 1 << 10
"""Bytes/s of an answer that its client must read."""
_IDLE_BYTES, _READ_BYTES = 16 << 10, 256 << 10
"""Read at once of headers (a crowd of requests in one pipe keeps others waiting), and of a body in chunks."""
_LINGER_S, _LINGER_BYTES = 2.0, 1 << 20
"""After a refusal that ends a connection: time, and bytes of the rest of its request, until it is reset."""
_LAST_READ_S = 0.05
"""Between the end of listening and that of connections without a request."""
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in http.HTTPStatus}
_TEXTS = {400: "this is not a valid HTTP request", 408: "the request did not come in time"}
_SMALL, _PIECE = 1 << 16, 1 << 18
"""Answers up to this are sent in one piece, larger ones in such pieces: no client waits while all of one is copied."""
_BACKLOG = 2048
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class _HeaderTooLarge(Exception):
    """The header of a request is over the limit."""


class Connection(asyncio.BufferedProtocol):
    """Reads requests and answers them in their order; the body of a request goes past the parser into its place.

    Requests that come behind one that is being answered wait here; nothing further is read while a whole one waits.
    """

    def __init__(self, server: HttpServer, *, metrics_alone: bool) -> None:
        self._server, self._app, self._metrics_alone = server, server.app, metrics_alone
        self._loop = server.loop
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # until `connection_made`
        self._parser = httptools.HttpRequestParser(self)
        self._buffer = server.memory
        self._requests: deque[HttpRequest] = deque()
        """Requests without an answer; the last one may still be coming."""
        self._incoming: HttpRequest | None = None
        """The request whose body is coming; it may have an answer already, as one that is refused."""
        self._direct = False
        """Whether the next bytes are read into the place of the body."""
        self._task: asyncio.Task[None] | None = None
        """The answer to the first request."""
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()
        self._header_bytes = self._unfinished_bytes = self._dropped_bytes = 0
        self._in_header = self.in_message = True
        """Whether more of a header, and of a request, must come; true of a connection that has sent nothing."""
        self._ended = False
        """Whether a request ended in the bytes that came last."""
        self._last = False
        """Whether no further request is taken."""
        self._reading_paused = False
        self._writable: asyncio.Future[None] | None = None
        """Resolved when all that was written is sent; None where it is."""
        self._unsent = 0
        self._write_deadline_s = 0.0
        self._deadline_s = server.loop.time() + server.timeout_s
        """When the client is late, by the clock of the loop."""
        self._lost = False

    # -------------------------------------------------------------------------------------------- the transport's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        if len(self._server.connections) >= self._server.max_connections:
            self._last = True
            transport.abort()
            return
        self._server.connections.add(self)
        transport.set_write_buffer_limits(1, 0)  # what is unsent keeps the memory of the whole answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._server.connections.discard(self)
        self.resume_writing()
        waiting = [*self._requests]
        if self._task is not None and waiting.pop(0).route.is_inference:
            self._task.cancel()  # a model that is being loaded is loaded
        for request in waiting:
            self._app.release(request)

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()
        self._unsent = self._transport.get_write_buffer_size()
        self._write_deadline_s = self._loop.time() + self._server.timeout_s

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    def get_buffer(self, sizehint: int) -> memoryview:
        request = self._incoming
        self._direct = request is not None and request.length is not None and request.refusal is None
        if request is not None and self._direct:
            return request.rest()
        self._buffer = self._server.memory if self._incoming else self._server.memory[:_IDLE_BYTES]
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        request = self._incoming
        if request is not None and self._direct:
            self._app.receive(request, nbytes)
            self._check_body(request)
            if request.filled == request.length:
                self._parser = httptools.HttpRequestParser(self)  # the old one waits for these bytes
                self._complete()
        elif self._last and request is None:
            self._drop(nbytes)
        else:
            self._parse(bytes(self._buffer[:nbytes]))
        self._pace()

    # -------------------------------------------------------------------------------------------- what comes in

    def _parse(self, data: bytes) -> None:
        self._ended = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._last:
                self._fail(431 if self._header_bytes > self._server.max_header else 400)
        else:
            if self._in_header and self.in_message and not self._ended:  # the parser keeps it all
                self._unfinished_bytes += len(data)
                if self._unfinished_bytes > self._server.max_header and not self._last:
                    self._fail(431)

    def _decline_upgrade(self, data: bytes) -> None:
        """Go on behind the header of a request that wanted another protocol: it is an ordinary one."""
        self._parser = httptools.HttpRequestParser(self)
        request = self._incoming
        length = (request.length or 0) if request is not None else 0
        if length:
            self.on_body(data[:length])
        if request is not None and len(data) >= length:
            self._complete()
            if len(data) > length:
                self._parse(data[length:])

    def _check_body(self, request: HttpRequest) -> None:
        """End the connection where a body that is coming was refused."""
        if request.refusal is not None:
            self._last, self._incoming = True, None
            self._advance()

    def _fail(self, status: int) -> None:
        """Refuse what cannot be parsed, or does not come; nothing behind it is read."""
        text = (
            f"the header is over {self._server.max_header} bytes, `--max-header`" if status == 431 else _TEXTS[status]
        )
        request = self._incoming
        if request is None:
            request = HttpRequest([])
            self._requests.append(request)
        request.refusal = refuse(status, text)
        request.keep_alive = False
        self._check_body(request)

    def _drop(self, nbytes: int) -> None:
        self._dropped_bytes += nbytes
        if self._dropped_bytes > _LINGER_BYTES:
            self._transport.abort()

    def _pace(self) -> None:
        """Read no further while a whole request waits behind another one."""
        wait = len(self._requests) > 1 and self._incoming is None and not self._last
        if wait != self._reading_paused and not self._transport.is_closing():
            self._reading_paused = wait
            if wait:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def check_time(self, now_s: float) -> None:
        """Drop a client that is late with its request, or reads its answer too slowly."""
        if self._writable is not None and now_s >= self._write_deadline_s:
            before, self._unsent = self._unsent, self._transport.get_write_buffer_size()
            self._write_deadline_s = now_s + self._server.timeout_s
            if before - self._unsent < _MIN_READ_RATE * self._server.timeout_s:
                self._transport.abort()
        if now_s < self._deadline_s:
            return
        request = self._incoming
        if request is None or request.refusal is not None or self._requests[0] is not request:
            self._transport.abort()
        else:
            self._fail(408)

    # -------------------------------------------------------------------------------------------- the parser's calls

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._header_bytes = self._unfinished_bytes = 0
        self._in_header = self.in_message = True
        self._deadline_s = self._loop.time() + self._server.timeout_s

    def on_url(self, url: bytes) -> None:
        self._count_header(len(url))
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_header(len(name) + len(value) + 4)
        if self._in_header:  # else it is a trailer
            self._headers.append((name.lower(), value))

    def _count_header(self, nbytes: int) -> None:
        self._header_bytes += nbytes
        if self._header_bytes > self._server.max_header:
            raise _HeaderTooLarge

    def on_headers_complete(self) -> None:
        self._in_header = False
        if self._last:
            return
        parser = self._parser
        request = self._app.accept(parser.get_method().decode(), self._url, self._headers, self._metrics_alone)
        request.keep_alive = request.keep_alive and parser.should_keep_alive()
        if parser.should_upgrade():  # the parser does not read its body
            if any(name == b"transfer-encoding" for name, _ in self._headers):
                request.refusal = refuse(400, "an upgrade with a chunked body")
            request.keep_alive = request.keep_alive and request.refusal is None
        request.is_old = parser.get_http_version() == "1.0"
        self._last = not request.keep_alive
        self._incoming = request
        self._requests.append(request)
        self._deadline_s = self._loop.time() + self._server.timeout_s
        if request.refusal is not None or request.awaits_continue:
            self._advance()

    def on_body(self, body: bytes) -> None:
        request = self._incoming
        if request is not None and request.refusal is None:
            request.add(body)
            self._app.receive(request, len(body))
            self._check_body(request)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._complete()

    def _complete(self) -> None:
        self._ended, self.in_message = True, False
        self._deadline_s = math.inf
        request, self._incoming = self._incoming, None
        if request is not None:
            request.is_complete = True
            self._advance()
        if not self._requests:
            self._deadline_s = self._loop.time() + _KEEP_ALIVE_S

    # -------------------------------------------------------------------------------------------- what goes out

    def _advance(self) -> None:
        """Begin to answer the first request, where it is whole or refused."""
        if self._task is not None or not self._requests or self._transport.is_closing():
            return
        request = self._requests[0]
        if request.is_complete or request.refusal is not None:
            self._task = self._loop.create_task(self._answer(request))
            self._server.tasks.add(self._task)
            self._task.add_done_callback(functools.partial(self._note_end, request))
        elif request.awaits_continue:
            request.awaits_continue = False
            self._transport.write(_CONTINUE)

    async def _answer(self, request: HttpRequest) -> None:
        status, headers, parts = request.refusal or await self._app.answer(request)
        self._app.release(request)  # a client that reads slowly takes no place of others
        if self._lost:
            return
        nbytes = sum(map(len, parts))
        lines = [_STATUS_LINES[status], b"date: ", self._server.date, b"\r\n"]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        last = not request.keep_alive or (self._app.admission.draining and len(self._requests) == 1)
        lines.append(b"connection: close\r\n" if last else b"connection: keep-alive\r\n" if request.is_old else b"")
        lines.append(b"content-length: %d\r\n\r\n" % nbytes)
        if request.is_head:
            parts = []
        parts = [b"".join([*lines, *parts])] if nbytes <= _SMALL else [b"".join(lines), *parts]
        await self._send(parts, nbytes)
        self._requests.popleft()
        self._task = None
        if last:
            self._finish(request)
            return
        if not self._requests and not self.in_message:
            self._deadline_s = self._loop.time() + _KEEP_ALIVE_S
        self._advance()
        self._pace()

    async def _send(self, parts: list[bytes | memoryview], nbytes: int) -> None:
        """Write an answer; while its client does not read it, its bytes count."""
        self._transport.write(parts[0])
        if self._writable is None and len(parts) == 1:
            return
        self._app.admission.hold(nbytes)
        try:
            await (self._writable or asyncio.sleep(0))
            for part in parts[1:]:
                for start in range(0, len(part), _PIECE):
                    if self._lost:
                        return
                    self._transport.write(memoryview(part)[start : start + _PIECE])
                    await (self._writable or asyncio.sleep(0))
        finally:
            self._app.admission.hold(-nbytes)

    def _finish(self, request: HttpRequest) -> None:
        """Close the connection; behind a refusal read on for a moment, as a reset would overtake the answer."""
        self._last, self._incoming = True, None
        if request.is_complete or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._transport.write_eof()
        self._deadline_s = self._loop.time() + _LINGER_S
        self._pace()

    def _note_end(self, request: HttpRequest, task: asyncio.Task[None]) -> None:
        self._server.tasks.discard(task)
        self._app.release(request)
        if task.cancelled():
            self._transport.close()
        elif (error := task.exception()) is not None:
            log.error("an answer could not be sent", exc_info=error)
            self._transport.abort()

    def close(self) -> None:
        """End the connection, unless a request of it is to be answered."""
        if not self._requests:
            self._transport.close()

    def abort(self) -> None:
        """End the connection, whatever is unsent."""
        self._transport.abort()


class HttpServer:
    """The server of the application on sockets that listen already. Belongs to the event loop that starts it."""

    def __init__(self, app: HttpApp, config: ServeConfig) -> None:
        """Raises `OSError` or `ValueError` for a certificate or key that cannot be read."""
        self.app, self.loop = app, asyncio.get_running_loop()
        self.max_header, self.max_connections = config.max_header, config.max_connections
        self.timeout_s = config.request_timeout_s
        self.memory = memoryview(bytearray(_READ_BYTES))
        """Where connections read what the parser gets; the event loop takes it at once."""
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.date = b""
        self._ssl: ssl.SSLContext | None = None
        if config.tls_cert is not None:
            self._ssl = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._ssl.load_cert_chain(config.tls_cert, config.tls_key)
        self._listeners: list[tuple[asyncio.Server, socket.socket, Callable[[], Connection]]] = []
        self._clock: asyncio.Task[None] | None = None

    async def start(self, listener: socket.socket, *, metrics_alone: bool = False) -> None:
        """Take connections of a socket, which `stop` closes."""
        if self._clock is None:
            self._clock = asyncio.create_task(self._tick())
        connect = functools.partial(Connection, self, metrics_alone=metrics_alone)
        server = await self.loop.create_server(
            connect, sock=listener.dup(), ssl=self._ssl, backlog=_BACKLOG,
            ssl_handshake_timeout=self.timeout_s if self._ssl else None,
        )  # fmt: skip
        self._listeners.append((server, listener, connect))

    async def _tick(self) -> None:
        """The date, and the time limits of all connections: a timer of each would cost a small request a tenth."""
        while True:
            self.date = email.utils.formatdate(usegmt=True).encode()
            now_s = self.loop.time()
            for connection in [*self.connections]:
                connection.check_time(now_s)
            await asyncio.sleep(min(1.0, self.timeout_s / 8))

    async def stop(self, timeout_s: float) -> None:
        """Take no new connections, answer what has come, and close all, those that take no answer in `timeout_s`."""
        for server, listener, connect in self._listeners:
            server.close()
            with listener:  # what the kernel has accepted would be reset
                while (accepted := _accept(listener)) is not None:
                    with contextlib.suppress(OSError):
                        await self.loop.connect_accepted_socket(connect, accepted, ssl=self._ssl)
        await self.app.admission.shut.wait()
        await asyncio.sleep(_LAST_READ_S if self.connections else 0)  # what has come is read
        for connection in [*self.connections]:
            connection.close()
        give_up_s = self.loop.time() + timeout_s
        while self.connections and self.loop.time() < give_up_s:
            await asyncio.sleep(_LAST_READ_S / 2)
        for connection in [*self.connections]:
            connection.abort()
        for task in [*self.tasks]:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._clock is not None:
            self._clock.cancel()


def _accept(listener: socket.socket) -> socket.socket | None:
    """A connection that waits; None where none does."""
    try:
        accepted, _ = listener.accept()
    except OSError:
        return None
    accepted.setblocking(False)
    return accepted


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; `OSError` where the address is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener

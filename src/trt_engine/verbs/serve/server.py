"""A running server: its event loop in a thread, its listeners, its end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trt_engine.display import RichDisplay
from trt_engine.errors import SetupError, UsageError
from trt_engine.format import format_address
from trt_engine.records.serve import ServedModel, ServeReport
from trt_engine.runtime.process_bound import ProcessBound
from trt_engine.verbs.serve.config import ServeConfig, is_loopback
from trt_engine.verbs.serve.http_app import HttpApp
from trt_engine.verbs.serve.http_server import HttpServer, listen
from trt_engine.verbs.serve.inference import Admission, Service
from trt_engine.verbs.serve.repository import Repository
from trt_engine.verbs.serve.served_model import Mailbox
from trt_engine.verbs.serve.shared_memory import CudaMemory, SharedMemory

if TYPE_CHECKING:
    from trt_engine.verbs.serve.grpc_server import GrpcServer
    from trt_engine.verbs.serve.tracing import Tracing

log = logging.getLogger(__name__)

_TRIM_S, _TRIM_BYTES = 2.0, 4 << 20
"""How often memory is looked at, and the bytes of requests after which the allocator keeps some."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the server listens: `host:port`, None for what is not served."""

    http: str | None
    grpc: str | None
    metrics: str | None


class Server(ProcessBound, RichDisplay):
    """Models behind HTTP and gRPC, until `close`. Made by `te.serve`; works in `with`."""

    def __init__(
        self, repository: Callable[[], Repository], config: ServeConfig, token: bytes | None, tracing: Tracing | None
    ) -> None:
        self._make_repository, self._config, self._token, self._tracing = repository, config, token, tracing
        self._sockets: list[socket.socket] = []
        self._http_socket = self._listen("http_port")
        self._metrics_socket = self._listen("metrics_port")
        if (grpc := self._listen("grpc_port")) is not None:  # an error of gRPC has no reason
            self._sockets.remove(grpc)
            grpc.close()
        self._addresses: Addresses | None = None
        self._models: tuple[ServedModel, ...] = ()
        self._failure: BaseException | None = None
        self._started, self._loop_ready, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end: asyncio.Event | None = None
        self._service: Service | None = None
        self._thread = threading.Thread(target=self._serve, name="serve", daemon=True)

    def _listen(self, name: str) -> socket.socket | None:
        port = getattr(self._config, name)
        if port < 0:
            return None
        flag = f"--{name.replace('_', '-')}"
        try:
            made = listen(self._config.host, port)
        except (OSError, UnicodeError) as error:
            self._close_sockets()
            number = (error.errno or 0) if isinstance(error, OSError) else 0  # not positive where the address is wrong
            reason = os.strerror(number).lower() if number > 0 else "this is not an address of this machine"
            foreign = number <= 0 or number == errno.EADDRNOTAVAIL
            hint = "`--host 0.0.0.0` is every address" if foreign else f"`{flag} 0` takes any free port"
            address = format_address(self._config.host, port)
            raise SetupError(f"cannot listen at {address}: {reason}", hint=hint) from error
        self._sockets.append(made)
        return made

    def _close_sockets(self) -> None:
        for item in self._sockets:
            item.close()

    # -------------------------------------------------------------------------------------------- for any thread

    def start(self) -> Server:
        """Listen and load the models; back when every model of the start is ready or has a reason why not."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise self._failure
        return self

    @property
    def report(self) -> ServeReport:
        """Addresses, and the models as they were when the server had started."""
        assert self._addresses is not None
        scheme = "https" if self._config.tls_cert is not None else "http"
        http, metrics = (
            f"{scheme}://{address}" if address else None for address in (self._addresses.http, self._addresses.metrics)
        )
        return ServeReport(http, self._addresses.grpc, metrics and f"{metrics}/metrics", self._models)

    @property
    def http_address(self) -> str | None:
        """`host:port` of HTTP, as tritonclient takes it."""
        return self._addresses.http if self._addresses else None

    @property
    def grpc_address(self) -> str | None:
        """`host:port` of gRPC."""
        return self._addresses.grpc if self._addresses else None

    @property
    def metrics_address(self) -> str | None:
        """`host:port` of the metrics."""
        return self._addresses.metrics if self._addresses else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the server has ended; whether it has. Raises what ended it, where that was a failure."""
        self._thread.join(timeout_s)
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    def drain(self) -> None:
        """Begin to end: not ready at once, then no new connections, then accepted requests are answered. Does not wait."""
        self._closing.set()
        if self._loop is not None and self._end is not None:
            with contextlib.suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._end.set)

    def close(self) -> None:
        """`drain`, and wait for the end. Idempotent."""
        if self._forked:
            return
        if threading.current_thread() is self._thread:
            raise UsageError("`close` was called from inside a request", hint="close from the thread that started it")
        self.drain()
        if self._thread.ident is not None:
            self._thread.join()
        self._close_sockets()

    # -------------------------------------------------------------------------------------------- the server's thread

    def _serve(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._failure = error
            if self._started.is_set():
                log.exception("the server failed")
        finally:
            self._started.set()
            self._close_sockets()

    async def _main(self) -> None:
        config, loop = self._config, asyncio.get_running_loop()
        self._loop, self._end = loop, asyncio.Event()
        if self._closing.is_set():
            self._end.set()
        trusted = self._token is not None
        shared = config.shared_memory
        if shared is None:
            shared = is_loopback(config.host) and (trusted or config.shared_memory_prefix is not None)
        service = self._service = Service(
            repository=self._make_repository(),
            memory=SharedMemory(shared, config.shared_memory_prefix, own_only=not trusted),
            cuda_memory=CudaMemory(shared),
            admission=Admission(config.max_in_flight, config.max_in_flight_size),
            mailbox=Mailbox(loop),
            explicit=config.model_control_mode == "explicit",
            max_request=config.max_request,
            open_control=trusted or config.control_without_token,
            strict=config.strict_readiness,
            tracing=self._tracing,
        )
        try:
            await self._run(service)
        finally:
            await service.repository.close()
            service.memory.close()
            service.cuda_memory.close()
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)

    async def _run(self, service: Service) -> None:
        assert self._end is not None
        admission, now, given_up = service.admission, asyncio.get_running_loop().time, 0.0
        servers: list[HttpServer | GrpcServer] = []
        try:
            await self._start_http(service, servers)
            grpc = await self._start_grpc(service, servers)
            self._addresses = Addresses(_address(self._http_socket), grpc, _address(self._metrics_socket))
            await self._load_models(service)
            admission.started = True
            self._models = await _models(service)
            self._started.set()
            tasks = [asyncio.create_task(self._poll(service)), asyncio.create_task(_trim_memory(admission))]
            await self._end.wait()
            for task in tasks:
                task.cancel()
            admission.draining = True
            log.info("not ready any more; %d requests are being answered", admission.requests)
            await asyncio.sleep(self._config.drain_delay_s)
            admission.closed = True
            given_up = now() + self._config.drain_timeout_s
            if not await admission.idle(self._config.drain_timeout_s):
                log.warning("%d requests were not answered in time", admission.requests)
            await admission.quiet()
        finally:
            left = max(given_up - now(), 1.0)  # an answer that is not read has a second more, not the whole time again
            stops = [asyncio.create_task(server.stop(left)) for server in servers]
            await asyncio.sleep(0.02)  # the ports are closed
            admission.shut.set()
            await asyncio.gather(*stops)

    async def _start_http(self, service: Service, servers: list[HttpServer | GrpcServer]) -> None:
        if self._http_socket is None and self._metrics_socket is None:
            return
        from trt_engine.verbs.serve.metrics import make_exposition

        app = HttpApp(service, self._config, self._token, make_exposition(service))
        try:
            server = HttpServer(app, self._config)
        except (OSError, ValueError) as error:
            raise SetupError(
                f"TLS cannot be set up: {error}", hint="`--tls-cert` and `--tls-key` are PEM files"
            ) from error
        servers.append(server)
        if self._http_socket is not None:
            await server.start(self._http_socket)
        if self._metrics_socket is not None:
            await server.start(self._metrics_socket, metrics_alone=True)

    async def _start_grpc(self, service: Service, servers: list[HttpServer | GrpcServer]) -> str | None:
        if self._config.grpc_port < 0:
            return None
        from trt_engine.verbs.serve.grpc_server import GrpcServer

        server = GrpcServer(service, self._config, self._token)
        port = await server.start()
        servers.append(server)
        return format_address(self._config.host, port)

    async def _load_models(self, service: Service) -> None:
        if self._config.model_control_mode != "explicit" or "*" in self._config.load_model:
            return await service.repository.load_all()
        for name in [*service.repository.engines, *self._config.load_model]:
            await service.repository.load_quietly(name)
        return None

    async def _poll(self, service: Service) -> None:
        while self._config.model_control_mode == "poll":
            await asyncio.sleep(self._config.poll_interval_s)
            try:
                await service.repository.poll()
            except Exception as error:  # the next look may succeed
                log.warning("the repository cannot be read: %s", error)


async def _trim_memory(admission: Admission) -> None:
    """Give freed memory back to the system once large requests have ended and nothing runs."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return
    peak = 0
    while True:
        await asyncio.sleep(_TRIM_S)
        peak = max(peak, admission.take_peak())
        if peak > _TRIM_BYTES and not admission.nbytes:
            await asyncio.to_thread(trim, 0)
            peak = 0


def _address(listener: socket.socket | None) -> str | None:
    if listener is None:
        return None
    return format_address(*listener.getsockname()[:2])


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop where it is installed: half the time of a small request."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _models(service: Service) -> tuple[ServedModel, ...]:
    rows: list[dict[str, Any]] = await service.repository.index()
    found = []
    for row in rows:
        version = row.get("version", "")
        model = service.repository.models.get(row["name"])
        served = model.versions.get(version) if model else None
        found.append(
            ServedModel(
                row["name"], version, row.get("state", "UNAVAILABLE"), row.get("reason", ""),
                served.truth.as_dict() if served else {},
            )
        )  # fmt: skip
    return tuple(found)

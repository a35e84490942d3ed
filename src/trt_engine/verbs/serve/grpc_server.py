"""The gRPC side of the protocol, and gRPC's own health check, on grpc.aio."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from trt_engine.atomic_io import read_bounded
from trt_engine.environment import distribution_version
from trt_engine.errors import SetupError, TrtEngineError, UnknownModel, UsageError
from trt_engine.format import format_address
from trt_engine.open_inference.messages import HEALTH_SERVICE, INFERENCE_SERVICE, message, service
from trt_engine.verbs.serve.config import Callers, ServeConfig
from trt_engine.verbs.serve.grpc_codec import (
    WireRequest,
    decode_infer,
    encode_infer,
    join_in_stream,
    parse_infer,
    read_model_name,
    read_parameters,
    statistics_message,
)
from trt_engine.verbs.serve.inference import Service, decompress, find_encoding, peek
from trt_engine.verbs.serve.served_model import ServedVersion

log = logging.getLogger(__name__)

Handler = Callable[[Any, Any], Awaitable[Any]]
Parse = Callable[[bytes | bytearray], Any]
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.FAILED_PRECONDITION,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""gRPC's code by an error's HTTP status; INTERNAL for others."""
_OPEN = ("ServerLive", "ServerReady", "Check", "Watch")
"""Methods that need no token."""
_ENCODED = ("ModelInfer", "ModelStreamInfer")
"""Methods whose answers are bytes: those of large tensors are made in another thread."""
_WATCH_S = 0.5
_LARGE_FRAME = 1 << 20
_LARGE, _LARGE_ANSWER = 1 << 20, 1 << 16
"""Requests of more bytes are decoded in another thread, and answers count until they are sent."""
_SMALL_ANSWER = 1 << 10
_COPIES = 2
"""An answer in memory: the outputs and its bytes, or these and what gRPC sends."""
_COMPRESSIONS = {b"gzip": grpc.Compression.Gzip, b"deflate": grpc.Compression.Deflate}
_AHEAD = 32
"""Requests of a stream that run at once."""
_MAX_CONTROL = 1 << 20
"""Largest request that is not inference, without its compression."""
_HEAD = 1 << 12
"""Bytes in which a compressed request names its model."""
_StreamResponse = message("ModelStreamInferResponse")
_HealthResponse = message("grpc.health.v1.HealthCheckResponse")


class GrpcServer:
    """The gRPC services on a port. Belongs to the event loop that starts it."""

    def __init__(self, shared: Service, config: ServeConfig, token: bytes | None) -> None:
        self._service, self._config = shared, config
        self._callers = Callers(config, token)
        self._encoder = ThreadPoolExecutor(1, "encode")  # the memory of several would be scattered
        most = config.max_request + _LARGE_FRAME
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", min(most, 2**31 - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", config.max_header),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", max(int(config.request_timeout_s * 1000), 1000)),  # while a call is open
                ("grpc.per_message_decompression", 0),  # it would take memory before a limit is compared
            ],
            maximum_concurrent_rpcs=config.max_connections,
        )
        for name in (INFERENCE_SERVICE, HEALTH_SERVICE):
            self._server.add_generic_rpc_handlers((self._handlers(name),))

    async def start(self) -> int:
        """Listen; the port. Raises `SetupError` where the address is not free."""
        address = format_address(self._config.host, self._config.grpc_port)
        try:
            if self._config.tls_cert is not None and self._config.tls_key is not None:
                pair = (read_bounded(self._config.tls_key), read_bounded(self._config.tls_cert))
                port = self._server.add_secure_port(address, grpc.ssl_server_credentials([pair]))
            else:
                port = self._server.add_insecure_port(address)
        except (RuntimeError, OSError) as error:
            raise SetupError(
                f"cannot listen at {address}: {error}", hint="`--grpc-port 0` takes any free port"
            ) from error
        if not port:
            raise SetupError(f"cannot listen at {address}", hint="`--grpc-port 0` takes any free port")
        await self._server.start()
        return int(port)

    async def stop(self, timeout_s: float) -> None:
        """Refuse new calls and wait for those that run."""
        await self._server.stop(timeout_s)
        self._encoder.shutdown(wait=False)

    def _handlers(self, name: str) -> Any:
        methods = {}
        for method in service(name).methods:
            parse = self._parse_infer if method.name == "ModelInfer" else _parser(message(method.input_type.full_name))
            encode = None if method.name in _ENCODED else message(method.output_type.full_name).SerializeToString
            handler: Any = getattr(self, f"_{method.name}")
            if method.name == "ModelStreamInfer":
                made = grpc.stream_stream_rpc_method_handler(self._guard_stream(handler, method.name), None, encode)
            elif method.name == "Watch":
                made = grpc.unary_stream_rpc_method_handler(
                    self._guard_stream(handler, method.name, parse), None, encode
                )
            else:
                made = grpc.unary_unary_rpc_method_handler(self._guard(handler, method.name, parse), None, encode)
            methods[method.name] = made
        return grpc.method_handlers_generic_handler(name, methods)

    def _parse_infer(self, raw: bytes | bytearray) -> WireRequest:
        return parse_infer(raw, self._config.max_json)

    async def _read(self, raw: bytes, name: str, parse: Parse) -> tuple[Any, int]:
        """The request of a method, and the bytes of a compressed one, which count until the caller forgets them.

        Compressed ones are expanded here: gRPC itself would do it before any limit is compared.
        """
        encoding = find_encoding(raw)
        if not encoding:
            return parse(raw), 0
        most, admission = _MAX_CONTROL, self._service.admission
        if name in ("ModelInfer", "ModelStreamInfer"):
            served = self._service.repository.find(*read_model_name(peek(encoding, raw, _HEAD)))
            most = self._config.max_json if served is None else served.max_body(self._config)
        found, counted = await decompress(encoding, raw, most, admission)
        try:
            request = parse(found)
            if isinstance(request, WireRequest):
                request.counted = True
            return request, counted
        except BaseException:
            admission.forget(counted)
            raise

    def _guard(self, handler: Handler, name: str, parse: Parse) -> Handler:
        """The handler, with the token checked and our errors turned into status codes."""

        async def guarded(raw: bytes, context: Any) -> Any:
            if not self._may_call(name, context):
                return None
            counted, request, encoding = 0, None, find_encoding(raw)
            try:
                request, counted = await self._read(raw, name, parse)
                answer = await handler(request, context)
                size = len(answer) if name in _ENCODED else answer.ByteSize()
                if encoding and size >= _SMALL_ANSWER:  # as the client compresses, so it is answered
                    context.set_compression(_COMPRESSIONS[encoding])
                    await context.send_initial_metadata(())  # grpc.aio forgets it where it sends them itself
                return answer
            except TrtEngineError as error:
                code, text = _STATUS.get(error.http_status, grpc.StatusCode.INTERNAL), error.one_line
            except (asyncio.CancelledError, grpc.RpcError, grpc.aio.BaseError):
                raise
            except Exception:
                log.exception("a request failed")
                code, text = grpc.StatusCode.INTERNAL, "internal error; the server's log has it"
            finally:
                request = None  # its memory is free before the answer is sent
                self._service.admission.forget(counted)
            return _refuse(context, code, text)

        return guarded

    def _guard_stream(self, handler: Callable[[Any, Any], AsyncIterator[Any]], name: str, parse: Parse = bytes) -> Any:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            if not self._may_call(name, context):
                return
            try:
                if isinstance(request, bytes):
                    request, counted = await self._read(request, name, parse)
                    self._service.admission.forget(counted)
            except TrtEngineError as error:
                _refuse(context, _STATUS[error.http_status], error.one_line)
                return
            async for answer in handler(request, context):
                yield answer

        return guarded

    def _may_call(self, name: str, context: Any) -> bool:
        given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
        if name in _OPEN or self._callers.has_token(given if isinstance(given, bytes) else given.encode()):
            return True
        _refuse(context, grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")
        return False

    # -------------------------------------------------------------------------------------------- inference

    async def _infer(
        self, wire: WireRequest, context: Any, remaining_s: float | None, join: Callable[[list[Any]], bytes]
    ) -> tuple[bytes, ServedVersion]:
        shared, nbytes = self._service, 0 if wire.counted else wire.nbytes
        metadata = context.invocation_metadata() or () if shared.tracing is not None else ()
        if shared.admission.closed:
            await shared.admission.wait_for_end()
        shared.admission.check_overdue()
        shared.admission.enter(nbytes)
        try:
            with shared.inference(wire.message.model_name, wire.message.model_version, metadata) as (served, timing):
                if wire.nbytes > _LARGE:
                    decoded = await asyncio.to_thread(decode_infer, shared, served, wire)
                else:
                    decoded = decode_infer(shared, served, wire)
                wire.contents.clear()  # of what is used by now none is kept in memory
                if remaining_s is not None and remaining_s < 1e6:
                    limit_us = max(int(remaining_s * 1e6), 1)
                    decoded.timeout_us = min(decoded.timeout_us or limit_us, limit_us)
                outputs, room = await shared.run(served, decoded, timing, _COPIES)
                try:
                    encode = functools.partial(encode_infer, join, shared, served, decoded, outputs)
                    if sum(array.nbytes for array in outputs.values()) <= _LARGE:
                        return encode(), served
                    return await asyncio.get_running_loop().run_in_executor(self._encoder, encode), served
                finally:
                    shared.admission.forget(room)
        finally:
            shared.admission.leave(nbytes)

    async def _ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        response, served = await self._infer(request, context, context.time_remaining(), b"".join)
        context.set_trailing_metadata(served.metadata_pair)
        if len(response) > _LARGE_ANSWER:
            context.add_done_callback(self._hold(_COPIES * len(response)))
        return response

    def _hold(self, nbytes: int) -> Callable[..., None]:
        """Count bytes of an answer until the result is called; after `request_timeout_s` as overdue.

        grpc.aio does not report what a client has read, and has no method by which a server cancels a call.
        """
        admission, held, overdue = self._service.admission, nbytes, 0

        def expire() -> None:
            nonlocal held, overdue
            admission.forget(held)
            held, overdue = 0, held
            admission.overdue += overdue

        def forget(*_: Any) -> None:
            nonlocal held, overdue
            timer.cancel()
            admission.forget(held)
            admission.overdue -= overdue
            held = overdue = 0

        timer = asyncio.get_running_loop().call_later(self._config.request_timeout_s, expire)
        admission.hold(nbytes)
        return forget

    async def _ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """One answer for each request, in their order; small requests run while earlier ones do."""
        ahead = max(1, min(_AHEAD, self._config.max_in_flight // 8))
        running: asyncio.Queue[asyncio.Task[Any] | None] = asyncio.Queue(ahead)
        tasks = set[asyncio.Task[Any]]()

        async def read() -> None:
            try:
                async for raw in requests:
                    tasks.add(task := asyncio.create_task(self._answer_in_stream(raw, context)))
                    await running.put(task)
                    if len(raw) > _LARGE_ANSWER:  # of large ones one at a time is in memory
                        await asyncio.wait([task])
            finally:
                await running.put(None)

        async def end() -> None:
            await self._service.admission.shut.wait()
            await running.put(None)

        reader, ender = asyncio.create_task(read()), asyncio.create_task(end())
        try:
            while (task := await running.get()) is not None:
                answer, forget = await task
                yield answer  # back when it is sent
                forget()
                tasks.discard(task)
            if self._service.admission.shut.is_set():  # clients send elsewhere
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            await reader
        finally:  # the call may have ended
            for one in (reader, ender, *tasks):
                one.cancel()
                if one in tasks and one.done() and not one.cancelled():
                    one.result()[1]()

    async def _answer_in_stream(self, raw: bytes, context: Any) -> tuple[bytes, Callable[..., None]]:
        """The answer, and what is called when it is sent: it counts from now on."""
        wire, counted = None, 0
        try:
            wire, counted = await self._read(raw, "ModelStreamInfer", self._parse_infer)
            made, _ = await self._infer(wire, context, None, join_in_stream)
        except Exception as error:
            text = error.one_line if isinstance(error, TrtEngineError) else "internal error; the server's log has it"
            if not isinstance(error, TrtEngineError):
                log.exception("a request failed")
            failed = _StreamResponse(error_message=text)
            failed.infer_response.id = wire.message.id if wire is not None else ""
            made = failed.SerializeToString()
        finally:
            self._service.admission.forget(counted)
        return made, self._hold(_COPIES * len(made))

    # -------------------------------------------------------------------------------------------- health, metadata

    async def _ServerLive(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return message("ServerLiveResponse")(live=True)

    async def _ServerReady(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        return message("ServerReadyResponse")(ready=not self._service.not_ready())

    async def _ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        try:
            reason = self._service.repository.not_ready(request.name, request.version)
        except UnknownModel as error:  # of an unknown version clients expect an answer
            if request.name not in self._service.repository.models:
                raise
            reason = error.one_line
        if self._service.admission.draining:
            reason = "the server is shutting down"
        if reason is not None:
            context.set_trailing_metadata(
                (("trt-engine-reason", reason.encode("ascii", "replace").decode().replace("\n", " ")),)
            )
        return message("ModelReadyResponse")(ready=reason is None)

    async def _ServerMetadata(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        version = distribution_version("trt-engine") or "unknown"
        return message("ServerMetadataResponse")(
            name="trt-engine", version=version, extensions=self._service.extensions()
        )

    async def _ModelMetadata(self, request: Any, _context: Any) -> Any:  # noqa: N802
        served = self._service.repository.require(request.name, request.version)
        versions = sorted(self._service.repository.models[request.name].versions, key=int)
        return message("ModelMetadataResponse")(**served.metadata(versions))

    async def _ModelConfig(self, request: Any, _context: Any) -> Any:  # noqa: N802
        served = self._service.repository.require(request.name, request.version)
        return message("ModelConfigResponse")(config=served.config())

    async def _ModelStatistics(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return statistics_message(self._service.statistics(request.name, request.version))

    # -------------------------------------------------------------------------------------------- control

    async def _RepositoryIndex(self, request: Any, _context: Any) -> Any:  # noqa: N802
        rows = await self._service.repository.index()
        made = message("RepositoryIndexResponse")()
        for row in rows:
            if not request.ready or row.get("state") == "READY":
                made.models.add(**row)
        return made

    async def _RepositoryModelLoad(self, request: Any, _context: Any) -> Any:  # noqa: N802
        config = self._service.check_control(read_parameters(request.parameters), known="config")
        await self._service.load(request.model_name, config)
        return message("RepositoryModelLoadResponse")()

    async def _RepositoryModelUnload(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.check_control(read_parameters(request.parameters))
        await self._service.repository.unload(request.model_name)
        return message("RepositoryModelUnloadResponse")()

    async def _SystemSharedMemoryStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return self._region_status(message("SystemSharedMemoryStatusResponse")(), "system", request.name)

    async def _SystemSharedMemoryRegister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.check_new_region("system", request.name)
        self._service.memory.register(request.name, request.key, request.offset, request.byte_size)
        return message("SystemSharedMemoryRegisterResponse")()

    async def _SystemSharedMemoryUnregister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.memory.unregister(request.name)
        return message("SystemSharedMemoryUnregisterResponse")()

    async def _CudaSharedMemoryStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return self._region_status(message("CudaSharedMemoryStatusResponse")(), "cuda", request.name)

    async def _CudaSharedMemoryRegister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.check_new_region("cuda", request.name)
        self._service.cuda_memory.register(request.name, request.raw_handle, request.device_id, request.byte_size)
        return message("CudaSharedMemoryRegisterResponse")()

    async def _CudaSharedMemoryUnregister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.regions("cuda").unregister(request.name)
        return message("CudaSharedMemoryUnregisterResponse")()

    def _region_status(self, made: Any, kind: str, name: str) -> Any:
        for region in self._service.regions(kind).status(name):
            made.regions[region.name].MergeFrom(type(made.regions[region.name])(**region.as_dict()))
        return made

    # -------------------------------------------------------------------------------------------- grpc.health.v1

    def _health(self, name: str) -> int:
        """`SERVING` or `NOT_SERVING` of the server (no name, or the service's) or of a model."""
        if name in ("", INFERENCE_SERVICE, HEALTH_SERVICE):
            ready = not self._service.not_ready()
        else:
            ready = self._service.repository.not_ready(name) is None and not self._service.admission.draining
        return int(_HealthResponse.SERVING if ready else _HealthResponse.NOT_SERVING)

    async def _Check(self, request: Any, _context: Any) -> Any:  # noqa: N802
        return _HealthResponse(status=self._health(request.service))

    async def _Watch(self, request: Any, _context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """The status now and at each change."""
        before = None
        while not self._service.admission.closed:
            try:
                now = self._health(request.service)
            except UnknownModel:
                now = int(_HealthResponse.SERVICE_UNKNOWN)
            if now != before:
                before = now
                yield _HealthResponse(status=now)
            await asyncio.sleep(_WATCH_S)


def _refuse(context: Any, code: grpc.StatusCode, text: str) -> None:
    """The status of a call without an answer: `context.abort` would keep the request until a collection of garbage."""
    context.set_code(code)
    context.set_details(text)


def _parser(kind: Any) -> Parse:
    """A function that reads a message, with our error for bytes that are not one."""

    def parse(raw: bytes | bytearray) -> Any:
        try:
            return kind.FromString(bytes(raw))
        except DecodeError as error:
            raise UsageError(f"the request is not a `{kind.DESCRIPTOR.name}`: {error}") from None

    return parse

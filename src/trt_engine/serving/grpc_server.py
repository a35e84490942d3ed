"""The gRPC side of the protocol, and gRPC's own health check, on grpc.aio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from trt_engine.atomic_io import read_bounded
from trt_engine.config.serve import ServeConfig
from trt_engine.environment import distribution_version
from trt_engine.errors import SetupError, TrtEngineError, UnknownModel, UsageError
from trt_engine.format import format_address
from trt_engine.serving.callers import Callers
from trt_engine.serving.grpc_codec import (
    WireRequest,
    decode_infer,
    encode_infer,
    parse_infer,
    read_parameters,
    statistics_message,
    tensor_metadata,
)
from trt_engine.serving.inference import InferRequest, Service, start_timing
from trt_engine.serving.messages import HEALTH_SERVICE, INFERENCE_SERVICE, message, service
from trt_engine.serving.served_model import ServedVersion

log = logging.getLogger(__name__)

Handler = Callable[[Any, Any], Awaitable[Any]]
Parse = Callable[[bytes], Any]
_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    422: grpc.StatusCode.FAILED_PRECONDITION,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""gRPC's code by an error's HTTP status; INTERNAL for others."""
_OPEN = ("ServerLive", "ServerReady", "Check", "Watch")
"""Methods that need no token."""
_WATCH_S = 0.5
_LARGE_FRAME = 1 << 20
_LARGE = 1 << 20
"""Requests of more bytes are decoded in another thread, and answers count until they are sent."""
_HealthResponse = message("grpc.health.v1.HealthCheckResponse")


class GrpcServer:
    """The gRPC services on a port. Belongs to the event loop that starts it."""

    def __init__(self, shared: Service, config: ServeConfig, token: bytes | None) -> None:
        self._service, self._config = shared, config
        self._callers = Callers(config, token)
        most = config.max_request + _LARGE_FRAME
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", min(most, 2**31 - 1)),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_metadata_size", config.max_header),
                ("grpc.so_reuseport", 0),
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

    async def stop(self) -> None:
        """Refuse new calls and wait for those that run."""
        await self._server.stop(self._config.drain_timeout_s)

    def _handlers(self, name: str) -> Any:
        methods = {}
        for method in service(name).methods:
            parse = parse_infer if method.name == "ModelInfer" else _parser(message(method.input_type.full_name))
            encode = message(method.output_type.full_name).SerializeToString
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

    def _guard(self, handler: Handler, name: str, parse: Parse) -> Handler:
        """The handler, with the token checked and our errors turned into status codes."""

        async def guarded(raw: bytes, context: Any) -> Any:
            await self._check_token(name, context)
            try:
                return await handler(parse(raw), context)
            except TrtEngineError as error:
                await context.abort(_STATUS.get(error.http_status, grpc.StatusCode.INTERNAL), error.one_line)
            except (asyncio.CancelledError, grpc.RpcError, grpc.aio.BaseError):
                raise
            except Exception:
                log.exception("a request failed")
                await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has it")

        return guarded

    def _guard_stream(self, handler: Callable[[Any, Any], AsyncIterator[Any]], name: str, parse: Parse = bytes) -> Any:
        async def guarded(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._check_token(name, context)
            try:
                request = parse(request) if isinstance(request, bytes) else request
            except UsageError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, error.one_line)
            async for answer in handler(request, context):
                yield answer

        return guarded

    async def _check_token(self, name: str, context: Any) -> None:
        if name in _OPEN:
            return
        given = next((value for key, value in context.invocation_metadata() or () if key == "authorization"), "")
        if not self._callers.has_token(given if isinstance(given, bytes) else given.encode()):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")

    # -------------------------------------------------------------------------------------------- inference

    async def _infer(self, wire: WireRequest, context: Any, remaining_s: float | None) -> tuple[Any, ServedVersion]:
        shared = self._service
        metadata = context.invocation_metadata() or () if shared.tracing is not None else ()
        shared.admission.enter(wire.nbytes)
        timing = start_timing()
        served: ServedVersion | None = None
        decoded: InferRequest | None = None
        try:
            served = shared.repository.acquire(wire.message.model_name, wire.message.model_version)
            if wire.nbytes > _LARGE:
                decoded = await asyncio.to_thread(decode_infer, shared, served, wire)
            else:
                decoded = decode_infer(shared, served, wire)
            await shared.read_regions(served, decoded)
            if remaining_s is not None and remaining_s < 1e6:
                limit_us = max(int(remaining_s * 1e6), 1)
                decoded.timeout_us = min(decoded.timeout_us or limit_us, limit_us)
            outputs = await shared.run(served, decoded, timing)
            response = encode_infer(shared, served, decoded, outputs)
            shared.count_success(served, timing, metadata)
            return response, served
        except BaseException as error:
            shared.count_failure(served, timing, metadata, error)
            raise
        finally:
            shared.admission.leave(wire.nbytes)
            if decoded is not None:
                shared.forget(decoded)
            if served is not None:
                served.leave()

    async def _ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802 - the protocol's name
        response, served = await self._infer(request, context, context.time_remaining())
        context.set_trailing_metadata(served.metadata_pair)
        if (nbytes := sum(map(len, response.raw_output_contents))) > _LARGE:
            context.add_done_callback(self._hold(nbytes))
        return response

    def _hold(self, nbytes: int) -> Callable[..., None]:
        """Count bytes of an answer until the result is called, and no longer than `request_timeout_s`.

        grpc.aio does not report what a client has read, and has no method by which a server cancels a call.
        """
        admission, held = self._service.admission, nbytes

        def forget(*_: Any) -> None:
            nonlocal held
            timer.cancel()
            admission.forget(held)
            held = 0

        timer = asyncio.get_running_loop().call_later(self._config.request_timeout_s, forget)
        admission.hold(nbytes)
        return forget

    async def _ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """One answer for each request, in their order."""
        answer = message("ModelStreamInferResponse")
        async for raw in requests:
            wire = forget = None
            try:
                wire = parse_infer(raw)
                response, _ = await self._infer(wire, context, None)
                forget = self._hold(response.ByteSize())
                yield answer(infer_response=response)  # back when it is sent
            except TrtEngineError as error:
                failed = answer(error_message=error.one_line)
                failed.infer_response.id = wire.message.id if wire is not None else ""
                yield failed
            except asyncio.CancelledError:
                raise
            except Exception:
                log.exception("a request failed")
                yield answer(error_message="internal error; the server's log has it")
            finally:
                if forget is not None:
                    forget()

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
            context.set_trailing_metadata((("trt-engine-reason", _ascii(reason)),))
        return message("ModelReadyResponse")(ready=reason is None)

    async def _ServerMetadata(self, _request: Any, _context: Any) -> Any:  # noqa: N802
        version = distribution_version("trt-engine") or "unknown"
        return message("ServerMetadataResponse")(
            name="trt-engine", version=version, extensions=self._service.extensions()
        )

    async def _ModelMetadata(self, request: Any, _context: Any) -> Any:  # noqa: N802
        served = self._service.repository.acquire(request.name, request.version)
        try:
            versions = sorted(self._service.repository.models[request.name].versions, key=int)
            found = served.metadata(versions)
            made = message("ModelMetadataResponse")(
                name=found["name"], versions=versions, platform=found["platform"], properties=found["properties"]
            )
            tensor_metadata(made.inputs, found["inputs"])
            tensor_metadata(made.outputs, found["outputs"])
            return made
        finally:
            served.leave()

    async def _ModelConfig(self, request: Any, _context: Any) -> Any:  # noqa: N802
        served = self._service.repository.acquire(request.name, request.version)
        try:
            return message("ModelConfigResponse")(config=served.config())
        finally:
            served.leave()

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
        self._service.check_control(read_parameters(request.parameters))
        await self._service.repository.load(request.model_name)
        return message("RepositoryModelLoadResponse")()

    async def _RepositoryModelUnload(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.check_control(read_parameters(request.parameters))
        await self._service.repository.unload(request.model_name)
        return message("RepositoryModelUnloadResponse")()

    async def _SystemSharedMemoryStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802
        made = message("SystemSharedMemoryStatusResponse")()
        for region in self._service.memory.status(request.name):
            made.regions[region.name].MergeFrom(type(made.regions[region.name])(**region.as_dict()))
        return made

    async def _SystemSharedMemoryRegister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.check_region_name(request.name)
        self._service.memory.register(request.name, request.key, request.offset, request.byte_size)
        return message("SystemSharedMemoryRegisterResponse")()

    async def _SystemSharedMemoryUnregister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.memory.unregister(request.name)
        return message("SystemSharedMemoryUnregisterResponse")()

    async def _CudaSharedMemoryStatus(self, request: Any, _context: Any) -> Any:  # noqa: N802
        made = message("CudaSharedMemoryStatusResponse")()
        for region in self._service.cuda_regions().status(request.name):
            made.regions[region.name].MergeFrom(type(made.regions[region.name])(**region.as_dict()))
        return made

    async def _CudaSharedMemoryRegister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        memory = self._service.cuda_regions()
        self._service.check_region_name(request.name)
        memory.register(request.name, request.raw_handle, request.device_id, request.byte_size)
        return message("CudaSharedMemoryRegisterResponse")()

    async def _CudaSharedMemoryUnregister(self, request: Any, _context: Any) -> Any:  # noqa: N802
        self._service.cuda_regions().unregister(request.name)
        return message("CudaSharedMemoryUnregisterResponse")()

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


def _parser(kind: Any) -> Parse:
    """A function that reads a message, with our error for bytes that are not one."""

    def parse(raw: bytes) -> Any:
        try:
            return kind.FromString(raw)
        except DecodeError as error:
            raise UsageError(f"the request is not a `{kind.DESCRIPTOR.name}`: {error}") from None

    return parse


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode().replace("\n", " ")

"""The HTTP side of the protocol: routes, limits and answers, as an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import logging
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from trt_engine.atomic_io import encode_json
from trt_engine.config.serve import ServeConfig
from trt_engine.environment import distribution_version
from trt_engine.errors import Overloaded, TrtEngineError, UsageError
from trt_engine.serving.callers import Callers
from trt_engine.serving.http_codec import decode_infer, decode_json, encode_document, encode_infer
from trt_engine.serving.image_requests import infer_image
from trt_engine.serving.inference import InferRequest, Service, integer, start_timing
from trt_engine.serving.inference_body import InferenceBody
from trt_engine.serving.page import POLICY, read_page
from trt_engine.serving.served_model import ServedVersion
from trt_engine.serving.wire_tensors import aligned_buffer

log = logging.getLogger(__name__)

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, list[Any]]
"""Status, headers, and the parts of the body."""
_JSON, _BINARY = (b"content-type", b"application/json"), (b"content-type", b"application/octet-stream")
_SMALL = 1 << 16
"""Bodies up to this are sent in one piece."""
_LARGE_JSON = 1 << 18
"""Requests with more JSON than this are decoded in another thread."""
_MAX_CONTROL = 1 << 20
"""Largest body of requests that are not inference."""
_ROUTES: dict[tuple[str, ...], str] = {
    ("",): "GET page",
    ("v2",): "GET server",
    ("v2", "health", "live"): "GET live",
    ("v2", "health", "ready"): "GET ready",
    ("v2", "models", "stats"): "GET stats",
    ("v2", "repository", "index"): "POST index",
    ("metrics",): "GET metrics",
}
_MEMORY = {"systemsharedmemory": "memory", "cudasharedmemory": "cuda-memory"}
_OPEN = ("live", "ready", "page")
"""Routes that need no token."""


class _HttpError(Exception):
    """An answer other than 200, with its own status."""

    def __init__(self, status: int, text: str, headers: Headers | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers or []


@dataclass(slots=True)
class Route:
    """Where a request goes: `name` with its method, and the names in its path."""

    name: str
    model: str = ""
    version: str = ""


def find_route(method: str, path: str) -> Route:
    """The route of a path; an error 404 or 405 otherwise."""
    parts = tuple(path.strip("/").split("/"))
    if len(parts) > 3 and parts[:2] == ("v2", "models"):
        route = _model_route(parts)
    elif len(parts) == 3 and parts[:2] == ("v2", "models") and parts not in _ROUTES:
        route = ("GET metadata", parts[2], "")
    elif len(parts) == 5 and parts[:3] == ("v2", "repository", "models") and parts[4] in ("load", "unload"):
        route = (f"POST {parts[4]}", parts[3], "")
    elif len(parts) in (3, 5) and parts[:1] == ("v2",) and parts[1] in _MEMORY:
        known = parts[-1] in ("status", "register", "unregister") and parts[2:3] in (("region",), parts[-1:])
        verb = "GET" if parts[-1] == "status" else "POST"
        route = (f"{verb} {_MEMORY[parts[1]]}-{parts[-1]}" if known else "", parts[3] if len(parts) == 5 else "", "")
    else:
        route = (_ROUTES.get(parts, ""), "", "")
    verb, _, name = route[0].partition(" ")
    if not name:
        raise _HttpError(404, f"there is no `{path[:200]}` here; `/v2` describes the server")
    if method != verb and not (verb == "GET" and method == "HEAD"):
        raise _HttpError(405, f"`{path[:200]}` takes {verb}", [(b"allow", verb.encode())])
    return Route(name, route[1], route[2])


_ACTIONS = {
    "ready": "GET model-ready",
    "infer": "POST infer",
    "image": "POST image",
    "config": "GET config",
    "stats": "GET stats",
}


def _model_route(parts: tuple[str, ...]) -> tuple[str, str, str]:
    if parts[3] == "versions" and len(parts) in (5, 6):
        return (_ACTIONS.get(parts[5], "") if len(parts) == 6 else "GET metadata", parts[2], parts[4])
    return (_ACTIONS.get(parts[3], "") if len(parts) == 4 else "", parts[2], "")


class HttpApp:
    """The ASGI application of a server, behind `LimitedProtocol`, whose connection is in each scope's `state`."""

    def __init__(
        self, service: Service, config: ServeConfig, token: bytes | None, metrics: Callable[[], tuple[bytes, bytes]]
    ) -> None:
        self._service = service
        self._config = config
        self._callers = Callers(config, token)
        self._metrics = metrics
        self.metrics_ports: set[int] = set()
        """Ports that have the metrics alone."""
        self._inference_routes: dict[str, Route] = {}

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        connection = scope["state"]["connection"]

        async def paced(event: dict[str, Any]) -> None:
            await connection.drain()  # the server would wait without limit
            await send(event)

        try:
            await self._answer(scope, receive, paced)
        except asyncio.CancelledError:
            if not connection.lost:
                raise
            log.debug("a client closed its connection; its request is dropped")
        except Exception as error:
            status, headers, parts = describe_error(error)
            await self._send_parts(paced, parts, headers, status)

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self._check_caller(scope["headers"], needs_token=False)
        path = scope["path"]
        if scope["server"] is not None and scope["server"][1] in self.metrics_ports and path != "/metrics":
            raise _HttpError(404, "this port has `/metrics` alone")
        route = self._inference_routes.get(path) if scope["method"] == "POST" else None
        if route is None:
            route = find_route(scope["method"], path)
            if route.name == "infer" and len(self._inference_routes) < 1024:
                self._inference_routes[path] = route
        if route.name not in _OPEN:
            self._check_caller(scope["headers"], needs_token=True)
        if route.name in ("infer", "image"):
            connection = scope["state"]["connection"]
            connection.running = asyncio.current_task()
            try:
                await self._infer(route, scope["headers"], receive, send)
            finally:
                connection.running = None
            return
        handler: Callable[..., Awaitable[None]] = getattr(self, f"_get_{route.name.replace('-', '_')}")
        await handler(route, scope["headers"], receive, send)

    def _check_caller(self, headers: Headers, *, needs_token: bool) -> None:
        if (found := self._callers.refusal(headers, needs_token=needs_token)) is not None:
            raise _HttpError(*found, [(b"www-authenticate", b"Bearer")] if found[0] == 401 else None)

    # -------------------------------------------------------------------------------------------- inference

    @property
    def draining(self) -> bool:
        """Whether connections are to be closed after their answer."""
        return self._service.admission.draining

    def accept(self, path: str, headers: Headers) -> InferenceBody | None:
        """Where the body of an inference goes, which `answer` takes; None where the request has to come by ASGI.

        Those are the first to a path, and every one that may be refused.
        """
        admission = self._service.admission
        if path not in self._inference_routes or admission.draining:
            return None
        try:
            self._check_caller(headers, needs_token=True)
            length, header, encoding = _body_headers(headers)
        except (_HttpError, UsageError):
            return None
        if length is None or encoding or length > self._config.max_request:
            return None
        if length > _SMALL and length > self._max_body(self._inference_routes[path]):
            return None
        return InferenceBody(path, headers, length, header)

    def receive(self, body: InferenceBody, nbytes: int) -> bool:
        """Count `nbytes` more of a body; False where the server has no room for them."""
        if not self._service.admission.receive(nbytes):
            return False
        body.filled += nbytes
        return True

    def hold(self, nbytes: int) -> None:
        """Count bytes of an answer that its client has not read yet; a negative number is of those that it has."""
        self._service.admission.hold(nbytes)

    def leave(self, body: InferenceBody) -> None:
        """For an inference that was accepted, once its answer is there or its client has gone. Idempotent."""
        self._service.admission.forget(body.filled)
        if body.entered:
            self._service.admission.leave()
        body.filled, body.entered = 0, False

    async def answer(self, body: InferenceBody) -> Answer:
        """The answer to an inference whose body is complete."""
        try:
            self._service.admission.enter(begun=True)
            body.entered = True
            answer = await self._run_inference(
                self._inference_routes[body.path], body.headers, body.take(), body.header
            )
        except Exception as error:
            answer = describe_error(error)
        return self._finished(*answer)

    async def _infer(self, route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        length, header, encoding = _body_headers(headers)
        admission, received, most = self._service.admission, 0, self._max_body(route)
        if length is not None:
            self._check_length(length, most)

        async def counted() -> dict[str, Any]:
            nonlocal received
            event = await receive()
            nbytes = len(event.get("body", b""))
            if not admission.receive(nbytes):
                raise Overloaded(
                    "the server has no room for the request", hint="retry later; `--max-in-flight-size` sets the limit"
                )
            received += nbytes
            return event

        begun, reserved = not admission.closed, most if encoding else 0
        try:
            body = await _receive_body(counted, length, header or 0, most)
            admission.enter(reserved, begun=begun)
            try:
                if encoding:
                    body = await asyncio.to_thread(_decompress, encoding, body, most)
                status, more, parts = await self._run_inference(route, headers, body, header)
            finally:
                admission.leave(reserved)
        finally:
            admission.forget(received)
        held = sum(map(len, parts))
        admission.hold(held)
        try:
            await self._send_parts(send, parts, more, status)
        finally:
            admission.forget(held)

    async def _run_inference(self, route: Route, headers: Headers, body: memoryview, header: int | None) -> Answer:
        served: ServedVersion | None = None
        request: InferRequest | None = None
        buffers: list[memoryview | bytes] = []
        timing = start_timing()
        try:
            served = self._service.repository.acquire(route.model, route.version)
            if route.name == "image":
                document = encode_document(await infer_image(self._service, served, bytes(body), timing))
            else:
                request = await self._decode(served, body, header)
                del body
                await self._service.read_regions(served, request)
                outputs = await self._service.run(served, request, timing)
                document, buffers = encode_infer(self._service, served, request, outputs)
            self._service.count_success(served, timing, headers)
        except BaseException as error:
            self._service.count_failure(served, timing, headers, error)
            raise
        finally:
            if request is not None:
                self._service.forget(request)
            if served is not None:
                served.leave()
        truth = (b"trt-engine", served.header)
        if not buffers:
            return 200, [_JSON, truth], [document]
        length = (b"inference-header-content-length", b"%d" % len(document))
        return 200, [_BINARY, truth, length], [document, *buffers]

    async def _decode(self, served: ServedVersion, body: memoryview, header: int | None) -> InferRequest:
        size = len(body) if header is None else header
        if size > self._config.max_json:
            raise _HttpError(
                413, f"the JSON has {size} bytes, {self._config.max_json} are allowed; send tensors as binary data"
            )
        if size > len(body):
            raise UsageError(f"the body has {len(body)} bytes, {size} of JSON were announced")
        if size > _LARGE_JSON or (served.has_text and len(body) > _LARGE_JSON):
            return await asyncio.to_thread(decode_infer, self._service, served, body, header)
        return decode_infer(self._service, served, body, header)

    def _check_length(self, length: int, most: int) -> None:
        if length > most:
            raise _HttpError(413, f"the request has {length} bytes, {most} are allowed", [(b"connection", b"close")])

    def _max_body(self, route: Route) -> int:
        """Bytes that an inference may have: `max_request`, and no more than JSON and the model's largest inputs."""
        served = self._service.repository.find(route.model, route.version) if route.name == "infer" else None
        if served is None or served.max_nbytes is None:
            return self._config.max_request
        return min(self._config.max_request, served.max_nbytes + self._config.max_json)

    # -------------------------------------------------------------------------------------------- other routes

    async def _json_body(self, headers: Headers, receive: Receive) -> dict[str, Any]:
        length, _, _ = _body_headers(headers)
        if length is not None and length > _MAX_CONTROL:
            raise _HttpError(
                413, f"the request has {length} bytes, {_MAX_CONTROL} are allowed", [(b"connection", b"close")]
            )
        raw = await _receive_body(receive, length, 0, _MAX_CONTROL)
        found = decode_json(raw) if len(raw) else {}
        if not isinstance(found, dict):
            raise UsageError("the request is not a JSON object")
        return found

    async def _get_live(self, _route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        await self._send_json(send, {"live": True})

    async def _get_ready(self, _route: Route, headers: Headers, _receive: Receive, send: Send) -> None:
        reasons = self._service.not_ready()
        found: dict[str, Any] = {"ready": not reasons}
        if self._callers.refusal(headers, needs_token=True) is None:  # they have paths of the server
            found["reasons"] = reasons
        await self._send_json(send, found, 503 if reasons else 200)

    async def _get_server(self, _route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        version = distribution_version("trt-engine") or "unknown"
        await self._send_json(
            send, {"name": "trt-engine", "version": version, "extensions": self._service.extensions()}
        )

    async def _get_metadata(self, route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        served = self._service.repository.acquire(route.model, route.version)
        try:
            versions = sorted(self._service.repository.models[route.model].versions, key=int)
            await self._send_json(send, served.metadata(versions), served=served)
        finally:
            served.leave()

    async def _get_model_ready(self, route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        reason = self._service.repository.not_ready(route.model, route.version)
        if self._service.admission.draining:
            reason = "the server is shutting down"
        body: dict[str, Any] = {"name": route.model, "ready": reason is None}
        if reason is not None:
            await self._send_json(send, body | {"reason": reason}, 503)
            return
        served = self._service.repository.acquire(route.model, route.version)
        try:
            await self._send_json(send, body | {"properties": served.truth.as_dict()}, served=served)
        finally:
            served.leave()

    async def _get_config(self, route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        from google.protobuf import json_format

        served = self._service.repository.acquire(route.model, route.version)
        try:
            found = json_format.MessageToDict(served.config(), preserving_proto_field_name=True)
            found.setdefault("max_batch_size", 0)
            for item in (*found.get("input", ()), *found.get("output", ())):
                item["dims"] = [int(size) for size in item.get("dims", ())]
            await self._send_json(send, found, served=served)
        finally:
            served.leave()

    async def _get_stats(self, route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        await self._send_json(send, {"model_stats": self._service.statistics(route.model, route.version)})

    async def _get_index(self, _route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        wanted = (await self._json_body(headers, receive)).get("ready")
        rows = await self._service.repository.index()
        await self._send_json(send, [row for row in rows if not wanted or row.get("state") == "READY"])

    async def _check_control(self, headers: Headers, receive: Receive) -> None:
        parameters = (await self._json_body(headers, receive)).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise UsageError("`parameters` is not a JSON object", hint="leave it out")
        self._service.check_control(parameters)

    async def _get_load(self, route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        await self._check_control(headers, receive)
        await self._service.repository.load(route.model)
        await self._send(send, b"", [_JSON])

    async def _get_unload(self, route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        await self._check_control(headers, receive)
        await self._service.repository.unload(route.model)
        await self._send(send, b"", [_JSON])

    async def _get_memory_status(self, route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        await self._send_json(send, [region.as_dict() for region in self._service.memory.status(route.model)])

    async def _get_memory_register(self, route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        body = await self._json_body(headers, receive)
        key, offset, size = body.get("key"), integer(body, "offset"), integer(body, "byte_size")
        if not isinstance(key, str) or not route.model:
            raise UsageError("a region needs a name, `key` and `byte_size`", hint='{"key": "/region", "byte_size": 64}')
        self._service.check_region_name(route.model)
        self._service.memory.register(route.model, key, offset, size)
        await self._send(send, b"", [_JSON])

    async def _get_memory_unregister(self, route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        await self._json_body(headers, receive)
        self._service.memory.unregister(route.model)
        await self._send(send, b"", [_JSON])

    async def _get_cuda_memory_status(self, route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        regions = self._service.cuda_regions().status(route.model)
        await self._send_json(send, [region.as_dict() for region in regions])

    async def _get_cuda_memory_register(self, route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        memory, body = self._service.cuda_regions(), await self._json_body(headers, receive)
        raw, device, size = body.get("raw_handle"), integer(body, "device_id"), integer(body, "byte_size")
        encoded = raw.get("b64") if isinstance(raw, dict) else None
        if not isinstance(encoded, str) or not route.model:
            raise UsageError(
                "a region needs a name, `raw_handle`, `device_id` and `byte_size`",
                hint='{"raw_handle": {"b64": "..."}, "device_id": 0, "byte_size": 64}',
            )
        try:
            handle = base64.b64decode(encoded, validate=True)
        except ValueError as error:
            raise UsageError(f"`raw_handle` is not base64: {error}") from None
        self._service.check_region_name(route.model)
        memory.register(route.model, handle, device, size)
        await self._send(send, b"", [_JSON])

    async def _get_cuda_memory_unregister(self, route: Route, headers: Headers, receive: Receive, send: Send) -> None:
        await self._json_body(headers, receive)
        self._service.cuda_regions().unregister(route.model)
        await self._send(send, b"", [_JSON])

    async def _get_metrics(self, _route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        kind, body = self._metrics()
        await self._send(send, body, [(b"content-type", kind)])

    async def _get_page(self, _route: Route, _headers: Headers, _receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", POLICY)]
        await self._send(send, read_page(), headers)

    # -------------------------------------------------------------------------------------------- answers

    async def _send_json(
        self, send: Send, value: Any, status: int = 200, *, served: ServedVersion | None = None
    ) -> None:
        headers = [_JSON, (b"trt-engine", served.header)] if served is not None else [_JSON]
        await self._send(send, encode_document(value), headers, status)

    async def _send(self, send: Send, body: bytes, headers: Headers, status: int = 200) -> None:
        await self._send_parts(send, [body], headers, status)

    def _finished(self, status: int, headers: Headers, parts: list[Any]) -> Answer:
        """The answer with its length, and whether the connection is to be closed; a small one in one part."""
        length = sum(map(len, parts))
        headers.append((b"content-length", b"%d" % length))
        if self._service.admission.draining:
            headers.append((b"connection", b"close"))
        return status, headers, [b"".join(parts)] if length <= _SMALL else parts

    async def _send_parts(self, send: Send, parts: list[Any], headers: Headers, status: int = 200) -> None:
        status, headers, parts = self._finished(status, headers, parts)
        try:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})  # once all is read
        except RuntimeError as error:  # the connection is closed already
            log.debug("an answer could not be sent: %s", error)


def describe_error(error: Exception) -> Answer:
    """The answer to a request that failed."""
    headers: Headers = [_JSON]
    if isinstance(error, _HttpError):
        status, text = error.status, error.text
        headers += error.headers
    elif isinstance(error, TrtEngineError):
        status, text = error.http_status, error.one_line
    else:
        log.error("a request failed", exc_info=error)
        status, text = 500, "internal error; the server's log has it"
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return status, headers, [encode_json({"error": text})]


def _body_headers(headers: Headers) -> tuple[int | None, int | None, bytes]:
    """The body's length, the length of its JSON, and its encoding."""
    length = header = None
    encoding = b""
    for name, value in headers:
        if name == b"content-length":
            length = int(value)  # checked by the parser
        elif name == b"inference-header-content-length":
            if not value.isdigit() or len(value) > 18:
                raise UsageError("`Inference-Header-Content-Length` is not a number of bytes")
            header = int(value)
        elif name == b"content-encoding":
            encoding = value.strip().lower()
    if encoding not in (b"", b"identity", b"gzip", b"deflate"):
        raise _HttpError(
            415, f"the encoding `{encoding[:40].decode('ascii', 'replace')}` is not supported; `gzip` or `deflate`"
        )
    return length, header, b"" if encoding == b"identity" else encoding


async def _receive_body(receive: Receive, length: int | None, header: int, most: int) -> memoryview:
    """The body, in memory where the tensor after the JSON is aligned. The server ends connections that are too slow."""
    if length is None:
        chunks, total = [], 0
        while True:
            event = await receive()
            chunk = _chunk(event)
            chunks.append(chunk)
            total += len(chunk)
            if total > most:
                raise _HttpError(413, f"the request has more than {most} bytes", [(b"connection", b"close")])
            if not event.get("more_body"):
                break
        whole = b"".join(chunks)
        buffer = aligned_buffer(total, min(header, total))
        buffer[:] = whole
        return buffer
    event = await receive()
    chunk = _chunk(event)
    if length <= _SMALL and not event.get("more_body"):
        return memoryview(chunk)
    buffer, position = aligned_buffer(length, min(header, length)), 0
    while True:
        buffer[position : position + len(chunk)] = chunk
        position += len(chunk)
        if not event.get("more_body"):
            return buffer
        event = await receive()
        chunk = _chunk(event)


def _chunk(event: dict[str, Any]) -> bytes:
    if event["type"] == "http.disconnect":  # only a proxy of Ray that lost the body reads this
        raise _HttpError(503, "the connection was lost inside the request")
    chunk: bytes = event.get("body", b"")
    return chunk


def _decompress(encoding: bytes, body: memoryview, most: int) -> memoryview:
    """The body without its encoding; an error for one that is damaged or grows beyond the limit."""
    inflater = zlib.decompressobj(31 if encoding == b"gzip" else 15)
    try:
        raw = inflater.decompress(body, most + 1)
    except zlib.error as error:
        raise UsageError(f"the body is not valid {encoding.decode()}: {error}") from None
    if len(raw) > most:
        raise _HttpError(413, f"the request has more than {most} bytes without its encoding")
    if not inflater.eof or inflater.unused_data:
        raise UsageError(f"the body is not one whole {encoding.decode()} stream")
    return memoryview(raw)

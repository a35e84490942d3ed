"""The HTTP side of the protocol: requests with their bodies, routes, limits and answers."""

from __future__ import annotations

import asyncio
import base64
import functools
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httptools

from trt_engine.atomic_io import encode_json, read_bounded
from trt_engine.environment import distribution_version
from trt_engine.errors import Overloaded, TrtEngineError, UsageError
from trt_engine.open_inference.messages import all_fields
from trt_engine.open_inference.wire_tensors import aligned_buffer
from trt_engine.verbs.serve.config import Callers, ServeConfig
from trt_engine.verbs.serve.http_codec import decode_infer, decode_json, encode_document, encode_infer
from trt_engine.verbs.serve.inference import InferRequest, Service, accepted_encoding, compress, decompress, integer
from trt_engine.verbs.serve.served_model import ServedVersion
from trt_engine.verbs.serve.statistics import Timing

log = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]
Answer = tuple[int, Headers, list[Any]]
"""Status, headers, and the parts of the body."""
_NO_BYTES = memoryview(b"")


@dataclass(slots=True)
class Route:
    """Where a request goes, and the names in its path."""

    name: str
    model: str = ""
    version: str = ""
    memory: str = ""
    """`system` or `cuda`."""

    @property
    def is_inference(self) -> bool:
        return self.name in ("infer", "image")


@dataclass(slots=True)
class HttpRequest:
    """A request whose header has come, and its body as far as it has come."""

    headers: Headers
    route: Route = field(default_factory=lambda: Route(""))
    length: int | None = None
    """Bytes of the body; None where they are not announced."""
    json_length: int | None = None
    """Bytes of JSON before the tensors; None: all of the body."""
    encoding: bytes = b""
    accepts: bytes = b""
    """The encoding that the answer may have."""
    most: int = 0
    """Bytes that the body may have."""
    begun: bool = True
    """Whether it came before the server refused new requests."""
    is_head: bool = False
    """Whether the answer is its header alone."""
    is_old: bool = False
    """Whether it is one of HTTP/1.0."""
    keep_alive: bool = True
    """Whether the connection stays after the answer."""
    awaits_continue: bool = False
    """Whether the client waits for leave to send the body."""
    is_complete: bool = False
    refusal: Answer | None = None
    """The answer to a request that is refused before its body has come."""
    filled: int = 0
    """Bytes that count: those of the body that have come, and what counts for their expansion."""
    entered: bool = False
    """Whether it is counted as a request."""
    _memory: memoryview = _NO_BYTES
    _chunks: bytearray | None = None

    def add(self, chunk: bytes) -> None:
        """Put the next bytes behind the `filled` ones; a body in one piece is not copied."""
        if self.length is None:
            self._chunks = self._chunks or bytearray()
            self._chunks += chunk
        elif len(chunk) == self.length:
            self._memory = memoryview(chunk)
        else:
            self.rest()[: len(chunk)] = chunk

    def rest(self) -> memoryview:
        """Where the bytes of an announced body that have not come go; the tensor after the JSON is aligned."""
        assert self.length is not None
        if not self._memory:
            self._memory = self._aligned(self.length)
        return self._memory[self.filled :]

    def _aligned(self, nbytes: int) -> memoryview:
        return aligned_buffer(nbytes, min(self.json_length or 0, nbytes))

    def take(self) -> memoryview:
        """The whole body, which is not kept here."""
        if self._chunks is not None:
            self._memory = self._aligned(len(self._chunks))
            self._memory[:] = self._chunks
            self._chunks = None
        found, self._memory = self._memory, _NO_BYTES
        return found


Receive = Callable[[], Awaitable[dict[str, Any]]]
_JSON, _BINARY = (b"content-type", b"application/json"), (b"content-type", b"application/octet-stream")
_LARGE_JSON = 1 << 18
"""Requests with more JSON than this are decoded in another thread; answers with more bytes of outputs are encoded in one."""
_JSON_COPIES = 16
"""Bytes of an output as JSON over its own: the objects of Python, and the text."""
_SMALL_ANSWER, _LARGE_ANSWER = 1 << 10, 1 << 15
"""Bytes from which an answer is compressed where its client accepts it, and from which on in another thread."""
_PAGE_POLICY = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    b"form-action 'none'; frame-ancestors 'none'"
)
"""What a browser may do for the page at `/`: its own script and style, and calls to this server."""
_MIN_SCORE, _TOP = 0.25, 5
_MAX_PATHS = 1024
_MAX_CONTROL = 1 << 20
"""Largest body of requests that are not inference."""
_OPEN = ("live", "ready", "page")
"""Routes that need no token."""
_MODEL = r"v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?"
_REGION = r"v2/(?P<memory>system|cuda)sharedmemory(?:/region/(?P<model>[^/]+))?"
_ROUTES = [
    (name, method, re.compile(path))
    for name, method, path in (
        ("page", "GET", ""),
        ("server", "GET", "v2"),
        ("live", "GET", "v2/health/live"),
        ("ready", "GET", "v2/health/ready"),
        ("metrics", "GET", "metrics"),
        ("infer", "POST", f"{_MODEL}/infer"),
        ("image", "POST", f"{_MODEL}/image"),
        ("stats", "GET", f"v2/models/stats|{_MODEL}/stats"),
        ("metadata", "GET", _MODEL),
        ("model_ready", "GET", f"{_MODEL}/ready"),
        ("config", "GET", f"{_MODEL}/config"),
        ("index", "POST", "v2/repository(?:/[^/]+)?/index"),
        ("load", "POST", "v2/repository/models/(?P<model>[^/]+)/load"),
        ("unload", "POST", "v2/repository/models/(?P<model>[^/]+)/unload"),
        ("region_status", "GET", f"{_REGION}/status"),
        ("register", "POST", f"{_REGION}/register"),
        ("unregister", "POST", f"{_REGION}/unregister"),
    )
]
"""Names, methods and paths, the first that matches."""


class _HttpError(Exception):
    """An answer other than 200, with its own status."""

    def __init__(self, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(text)
        self.status, self.text, self.headers = status, text, headers


def find_route(method: str, path: str) -> Route:
    """The route of a path; an error 404 or 405 otherwise."""
    for name, verb, pattern in _ROUTES:
        if (match := pattern.fullmatch(path.strip("/"))) is None:
            continue
        if method != verb and not (verb == "GET" and method == "HEAD"):
            raise _HttpError(405, f"`{path[:200]}` takes {verb}", (b"allow", verb.encode()))
        return Route(name, **{key: value or "" for key, value in match.groupdict().items()})
    raise _HttpError(404, f"there is no `{path[:200]}` here; `/v2` describes the server")


class HttpApp:
    """What answers the requests of a server; `accept` has the life of one."""

    def __init__(
        self, service: Service, config: ServeConfig, token: bytes | None, metrics: Callable[[], tuple[bytes, bytes]]
    ) -> None:
        self._service = service
        self.admission = service.admission
        self._config = config
        self._callers = Callers(config, token)
        self._metrics = metrics
        self._inference_routes: dict[bytes, Route] = {}
        """By path as it was sent, of requests that came before."""
        self._handlers: dict[str, Callable[[HttpRequest], Awaitable[Answer]]] = {
            "page": self._page,
            "server": self._server,
            "live": self._live,
            "ready": self._ready,
            "metrics": self._get_metrics,
            "stats": self._stats,
            "metadata": self._metadata,
            "model_ready": self._model_ready,
            "config": self._model_config,
            "index": self._index,
            "load": self._load,
            "unload": self._unload,
            "region_status": self._region_status,
            "register": self._register,
            "unregister": self._unregister,
        }

    # -------------------------------------------------------------------------------------------- requests

    def accept(self, method: str, url: bytes, headers: Headers, metrics_alone: bool = False) -> HttpRequest:
        """The request with this header, whose names are lower case; one that is refused has its answer already.

        Its body goes to `HttpRequest.add` or `rest` and is counted by `receive`; then `answer`, and `release` in any case.
        `metrics_alone`: it came to the port of the metrics.
        """
        request = HttpRequest(headers, is_head=method == "HEAD", begun=not self._service.admission.closed)
        try:
            route = self._inference_routes.get(url) if method == "POST" and not metrics_alone else None
            if route is None:
                route = self._find_route(method, url, headers, metrics_alone)
            else:
                self._check_caller(headers, needs_token=True)
            request.route = route
            _read_headers(request)
            request.most = self._max_body(route, compressed=bool(request.encoding))
            if request.length is not None and request.length > request.most:
                request.keep_alive = False
                raise _HttpError(413, f"the request has {request.length} bytes, {request.most} are allowed")
        except Exception as error:
            request.refusal = describe_error(error)
        return request

    def _find_route(self, method: str, url: bytes, headers: Headers, metrics_alone: bool) -> Route:
        """The route of a request whose caller is allowed to use it."""
        self._check_caller(headers, needs_token=False)
        try:
            path = unquote(httptools.parse_url(url).path.decode("ascii"))
        except (httptools.HttpParserError, UnicodeDecodeError, AttributeError):
            raise _HttpError(400, "this is not a path") from None
        if metrics_alone and path != "/metrics":
            raise _HttpError(404, "this port has `/metrics` alone")
        route = find_route(method, path)
        if route.name not in _OPEN:
            self._check_caller(headers, needs_token=True)
        if route.name == "infer" and len(self._inference_routes) < _MAX_PATHS:
            self._inference_routes[url] = route
        return route

    def _check_caller(self, headers: Headers, *, needs_token: bool) -> None:
        if (found := self._callers.refusal(headers, needs_token=needs_token)) is not None:
            raise _HttpError(*found, *([(b"www-authenticate", b"Bearer")] if found[0] == 401 else []))

    def _max_body(self, route: Route, *, compressed: bool) -> int:
        """Bytes that a body may have."""
        if not route.is_inference:
            return _MAX_CONTROL
        if route.name != "infer":
            return self._config.max_request
        served = self._service.repository.find(route.model, route.version)
        if served is None:  # to be refused; what is compressed does not grow before
            return self._config.max_json if compressed else self._config.max_request
        return served.max_body(self._config)

    def receive(self, request: HttpRequest, nbytes: int) -> None:
        """Count `nbytes` more of a body; the request is refused where they are too many, or the server has no room."""
        admission = self._service.admission
        if not request.route.is_inference:  # never refused for want of room
            admission.hold(nbytes)
        elif not admission.receive(nbytes, request.filled):
            request.refusal = describe_error(
                Overloaded(
                    "the server has no room for the request", hint="retry later; `--max-in-flight-size` sets the limit"
                )
            )
            request.keep_alive = False
            return
        request.filled += nbytes
        if request.filled > request.most:
            request.refusal = refuse(413, f"the request has more than {request.most} bytes")
            request.keep_alive = False

    async def answer(self, request: HttpRequest) -> Answer:
        """The answer to a request whose body is complete."""
        try:
            if request.route.is_inference:
                answer = await self._infer(request)
            else:
                answer = await self._handlers[request.route.name](request)
            return await _encoded(answer, request.accepts) if request.accepts else answer
        except Exception as error:
            return describe_error(error)

    def release(self, request: HttpRequest) -> None:
        """For every accepted request, once its answer is there or its client has gone. Idempotent."""
        self._service.admission.forget(request.filled)
        if request.entered:
            self._service.admission.leave()
        request.filled, request.entered = 0, False

    async def respond(self, method: str, url: bytes, headers: Headers, receive: Receive) -> Answer:
        """The answer to a request behind a proxy that hands on its body as ASGI's `receive`."""
        request = self.accept(method, url, headers)
        request.length = None  # what comes is what there is
        try:
            more = request.refusal is None
            while more:
                event = await receive()
                if event["type"] == "http.disconnect":
                    return refuse(503, "the connection was lost inside the request")
                chunk, more = event.get("body", b""), event.get("more_body", False)
                request.add(chunk)
                self.receive(request, len(chunk))
                more = more and request.refusal is None
            return request.refusal or await self.answer(request)
        finally:
            self.release(request)

    # -------------------------------------------------------------------------------------------- inference

    async def _infer(self, request: HttpRequest) -> Answer:
        admission = self._service.admission
        if not request.begun:
            await admission.wait_for_end()
        admission.enter(begun=request.begun)
        request.entered = True
        body = request.take()
        if request.encoding:
            found, counted = await decompress(request.encoding, body, request.most, admission, request.filled)
            request.filled += counted
            body = memoryview(found)
            del found
        return await self._run_inference(request.route, request.headers, body, request.json_length)

    async def _run_inference(self, route: Route, headers: Headers, body: memoryview, header: int | None) -> Answer:
        buffers: list[memoryview | bytes] = []
        with self._service.inference(route.model, route.version, headers) as (served, timing):
            if route.name == "image":
                document = encode_document(await _infer_image(self._service, served, bytes(body), timing))
            else:
                request = await self._decode(served, body, header)
                del body
                as_json = request.head is None and not all(one.binary or one.region for one in request.outputs)
                outputs, room = await self._service.run(served, request, timing, _JSON_COPIES if as_json else 1)
                try:
                    encode = functools.partial(encode_infer, self._service, served, request, outputs)
                    large = as_json and room > _LARGE_JSON * _JSON_COPIES
                    document, buffers = await asyncio.to_thread(encode) if large else encode()
                finally:
                    self._service.admission.forget(room)
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

    # -------------------------------------------------------------------------------------------- other routes

    def _json_body(self, request: HttpRequest) -> dict[str, Any]:
        raw = request.take()
        found = decode_json(raw) if len(raw) else {}
        if not isinstance(found, dict):
            raise UsageError("the request is not a JSON object")
        return found

    async def _live(self, _request: HttpRequest) -> Answer:
        return _json({"live": True})

    async def _ready(self, request: HttpRequest) -> Answer:
        reasons = self._service.not_ready()
        found: dict[str, Any] = {"ready": not reasons}
        if self._callers.refusal(request.headers, needs_token=True) is None:  # they have paths of the server
            found["reasons"] = reasons
        return _json(found, 503 if reasons else 200)

    async def _server(self, _request: HttpRequest) -> Answer:
        version = distribution_version("trt-engine") or "unknown"
        return _json({"name": "trt-engine", "version": version, "extensions": self._service.extensions()})

    async def _metadata(self, request: HttpRequest) -> Answer:
        name = request.route.model
        served = self._service.repository.require(name, request.route.version)
        versions = sorted(self._service.repository.models[name].versions, key=int)
        return _json(served.metadata(versions), served=served)

    async def _model_ready(self, request: HttpRequest) -> Answer:
        name, version = request.route.model, request.route.version
        reason = self._service.repository.not_ready(name, version)
        if self._service.admission.draining:
            reason = "the server is shutting down"
        body: dict[str, Any] = {"name": name, "ready": reason is None}
        if reason is not None:
            return _json(body | {"reason": reason}, 503)
        served = self._service.repository.require(name, version)
        return _json(body | {"properties": served.truth.as_dict()}, served=served)

    async def _model_config(self, request: HttpRequest) -> Answer:
        served = self._service.repository.require(request.route.model, request.route.version)
        return _json(all_fields(served.config()), served=served)

    async def _stats(self, request: HttpRequest) -> Answer:
        return _json({"model_stats": self._service.statistics(request.route.model, request.route.version)})

    async def _index(self, request: HttpRequest) -> Answer:
        wanted = (self._json_body(request)).get("ready")
        rows = await self._service.repository.index()
        rows = [row for row in rows if not wanted or row.get("state") == "READY"]
        return _json([{key: value for key, value in row.items() if value or key != "reason"} for row in rows])

    def _check_control(self, request: HttpRequest, known: str = "unload_dependents") -> str:
        parameters = (self._json_body(request)).get("parameters") or {}
        if not isinstance(parameters, dict):
            raise UsageError("`parameters` is not a JSON object", hint="leave it out")
        return self._service.check_control(parameters, known=known)

    async def _load(self, request: HttpRequest) -> Answer:
        config = self._check_control(request, "config")
        await self._service.load(request.route.model, config)
        return _NOTHING

    async def _unload(self, request: HttpRequest) -> Answer:
        self._check_control(request)
        await self._service.repository.unload(request.route.model)
        return _NOTHING

    async def _region_status(self, request: HttpRequest) -> Answer:
        regions = self._service.regions(request.route.memory).status(request.route.model)
        return _json([region.as_dict() for region in regions])

    async def _register(self, request: HttpRequest) -> Answer:
        name, cuda = request.route.model, request.route.memory == "cuda"
        memory: Any = self._service.regions(request.route.memory)
        body = self._json_body(request)
        size = integer(body, "byte_size")
        if cuda:
            given: tuple[Any, ...] = _ipc_handle(body), integer(body, "device_id"), size
            example = '{"raw_handle": {"b64": "..."}, "device_id": 0, "byte_size": 64}'
        else:
            key = body.get("key")
            given = key if isinstance(key, str) else None, integer(body, "offset"), size
            example = '{"key": "/region", "byte_size": 64}'
        if given[0] is None or not name:
            raise UsageError(
                f"a region needs a name, {'`raw_handle`, `device_id`' if cuda else '`key`'} and `byte_size`",
                hint=example,
            )
        self._service.check_new_region(request.route.memory, name)
        memory.register(name, *given)
        return _NOTHING

    async def _unregister(self, request: HttpRequest) -> Answer:
        self._json_body(request)
        self._service.regions(request.route.memory).unregister(request.route.model)
        return _NOTHING

    async def _get_metrics(self, _request: HttpRequest) -> Answer:
        kind, body = self._metrics()
        return 200, [(b"content-type", kind)], [body]

    async def _page(self, _request: HttpRequest) -> Answer:
        headers = [(b"content-type", b"text/html; charset=utf-8"), (b"content-security-policy", _PAGE_POLICY)]
        return 200, headers, [_read_page()]


_NOTHING: Answer = 200, [_JSON], [b""]


async def _encoded(answer: Answer, encoding: bytes) -> Answer:
    """The answer in an encoding; a small one as it is."""
    status, headers, parts = answer
    if (nbytes := sum(map(len, parts))) < _SMALL_ANSWER:
        return answer
    large = nbytes >= _LARGE_ANSWER
    body = await asyncio.to_thread(compress, encoding, parts) if large else compress(encoding, parts)
    return status, [*headers, (b"content-encoding", encoding), (b"vary", b"accept-encoding")], [body]


def _json(value: Any, status: int = 200, *, served: ServedVersion | None = None) -> Answer:
    headers = [_JSON, (b"trt-engine", served.header)] if served is not None else [_JSON]
    return status, headers, [encode_document(value)]


@functools.cache
def _read_page() -> bytes:
    """The page at `/` for people. It has no data itself and loads nothing from elsewhere."""
    return read_bounded(Path(__file__).with_name("page.html"))


async def _infer_image(service: Service, served: ServedVersion, raw: bytes, timing: Timing) -> dict[str, Any]:
    """Detections in pixels of the image, or the best classes; `UsageError` for what is not an image, or without pillow."""
    from trt_engine.vision.image_inference import ImageRunner

    if served.vision is None:
        raise UsageError(
            f"`{served.name}` does not declare how an image becomes its input", hint="tensors, at `/infer`"
        )
    nbytes = await asyncio.to_thread(ImageRunner.decoded_nbytes, raw)
    if nbytes > service.admission.max_bytes:
        raise UsageError(
            f"the image takes {nbytes} bytes decoded, {service.admission.max_bytes} are allowed",
            hint="a smaller one, or `--max-in-flight-size` of `trt-engine serve`",
        )
    service.take(nbytes)
    try:
        image = await asyncio.to_thread(ImageRunner.parse, raw, served.vision, served.signature)
        outputs, room = await service.run(served, InferRequest(feeds=image.feeds), timing)
        nbytes += room
        return (await asyncio.to_thread(image.decode, outputs, _MIN_SCORE, _TOP)).fields
    finally:
        service.admission.forget(nbytes)


def _ipc_handle(body: dict[str, Any]) -> bytes | None:
    """The CUDA IPC handle of a registration; None where it has none."""
    raw = body.get("raw_handle")
    encoded = raw.get("b64") if isinstance(raw, dict) else None
    if not isinstance(encoded, str):
        return None
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise UsageError(f"`raw_handle` is not base64: {error}") from None


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


def refuse(status: int, text: str) -> Answer:
    """The answer to a request that is refused with this text."""
    return describe_error(_HttpError(status, text))


def _read_headers(request: HttpRequest) -> None:
    """Take the length of the body, that of its JSON, its encoding and `Expect` from the header."""
    encoding = b""
    for name, value in request.headers:
        if name == b"content-length":
            request.length = int(value)  # checked by the parser
        elif name == b"inference-header-content-length":
            if not value.isdigit() or len(value) > 18:
                raise UsageError("`Inference-Header-Content-Length` is not a number of bytes")
            request.json_length = int(value)
        elif name == b"content-encoding":
            encoding = value.strip().lower()
        elif name == b"accept-encoding":
            request.accepts = accepted_encoding(value)
        elif name == b"expect":
            request.awaits_continue = value.lower() == b"100-continue"
    if encoding not in (b"", b"identity", b"gzip", b"deflate"):
        raise _HttpError(
            415, f"the encoding `{encoding[:40].decode('ascii', 'replace')}` is not supported; `gzip` or `deflate`"
        )
    request.encoding = b"" if encoding == b"identity" else encoding

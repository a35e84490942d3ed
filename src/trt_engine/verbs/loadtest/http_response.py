"""HTTP/1.1 responses, read from a stream in pieces of any size: status, length of the body, whether the connection stays.

The body is counted and dropped. Framing by RFC 9112, section 6: no body for 1xx, 204 and 304, else chunks, else
`Content-Length`, else the end of the connection. Also the server's metadata: its name, its models, the tensors of one.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import socket
import ssl
import threading
from typing import Any, Literal

import msgspec

from trt_engine.errors import EngineError, SetupError, UsageError
from trt_engine.tensors import suggest
from trt_engine.verbs.loadtest.target import MAX_TEXT, ServedModel, Target, served_signature, tensor_triples

MAX_HEAD_BYTES = 1 << 16
_STATUS = re.compile(rb"HTTP/1\.([01]) (\d{3})(?:[ \r]|$)")
_CHUNK = re.compile(rb"(?:\r\n)?([0-9a-fA-F]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")
_MAX_CHUNK_LINE = 1 << 10


class BadResponse(Exception):
    """Bytes that are not an HTTP/1.1 response."""


class ResponseReader:
    """One response after another from one connection."""

    __slots__ = ("_buffer", "_left", "_stage", "head", "keep_alive", "length", "nbytes", "status", "text")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin the next response."""
        self.status = self.nbytes = self._left = 0
        self.keep_alive = True
        self.head = b""
        """The head with its empty line, once it is complete."""
        self.length: int | None = None
        """`Content-Length`; None for a response that is framed otherwise."""
        self.text = ""
        """The beginning of the body of an error response."""
        self._buffer = b""
        self._stage: Literal["head", "body", "chunk", "chunk end", "trailer", "until close", "done"] = "head"

    def feed(self, data: bytes) -> bool:
        """True once the response is complete. Raises `BadResponse`, also for bytes after its end."""
        self.nbytes += len(data)
        data = self._buffer + data if self._buffer else data
        self._buffer = b""
        while data and self._stage != "done":
            rest = self._step(data)
            if rest is None:
                self._buffer = data
                return False
            data = rest
        if data:
            raise BadResponse(f"{len(data)} bytes after the end of the response")
        return self._stage == "done"

    def end(self) -> bool:
        """The connection was closed: whether that completes the response."""
        return self._stage == "until close"

    def _step(self, data: bytes) -> bytes | None:
        """Consume one part; what follows it, or None where it is not complete."""
        if self._stage == "head":
            return self._read_head(data)
        if self._stage == "until close":
            return b""
        if self._stage in ("body", "chunk"):
            taken = min(self._left, len(data))
            self._left -= taken
            if self.status != 200 and len(self.text) < MAX_TEXT:
                self.text += data[: min(taken, MAX_TEXT)].decode(errors="replace")
            if not self._left:
                self._stage = "done" if self._stage == "body" else "chunk end"
            return data[taken:]
        if self._stage == "trailer":
            return self._read_trailer(data)
        return self._read_chunk_size(data)

    def _read_head(self, data: bytes) -> bytes | None:
        at = data.find(b"\r\n\r\n")
        if at < 0:
            if len(data) > MAX_HEAD_BYTES or not data.startswith(b"HTTP/1."[: len(data)]):
                raise BadResponse(f"expected the head of a response, found {data[:20]!r}")
            return None
        head = data[: at + 4]
        match = _STATUS.match(head)
        if match is None:
            raise BadResponse(f"expected a status line, found {head[:20]!r}")
        self.head, self.status = head, int(match[2])
        fields = _fields(head)
        options = fields.get(b"connection", b"").lower()
        self.keep_alive = b"close" not in options and (match[1] == b"1" or b"keep-alive" in options)
        if 100 <= self.status < 200:
            return data[at + 4 :]  # an interim response: the real one follows
        if self.status in (204, 304):
            self.length, self._stage = 0, "done"
        elif b"chunked" in fields.get(b"transfer-encoding", b"").lower():
            self._stage = "chunk end"
        elif b"content-length" in fields:
            if not fields[b"content-length"].isdigit() or len(fields[b"content-length"]) > 18:
                raise BadResponse(f"`Content-Length` is {fields[b'content-length'][:20]!r}")
            self.length = self._left = int(fields[b"content-length"])
            self._stage = "body" if self._left else "done"
        else:
            self.keep_alive, self._stage = False, "until close"
        return data[at + 4 :]

    def _read_chunk_size(self, data: bytes) -> bytes | None:
        match = _CHUNK.match(data)
        if match is None:
            if len(data) > _MAX_CHUNK_LINE or b"\n" in data.lstrip(b"\r\n"):
                raise BadResponse(f"expected the size of a chunk, found {data[:20]!r}")
            return None
        self._left = int(match[1], 16)
        self._stage = "chunk" if self._left else "trailer"
        return data[match.end() :]

    def _read_trailer(self, data: bytes) -> bytes | None:
        """Header fields after the last chunk, up to an empty line."""
        end = 0 if data.startswith(b"\r\n") else data.find(b"\r\n\r\n") + 2
        if end == 1:
            if len(data) > MAX_HEAD_BYTES:
                raise BadResponse("the trailer has no end")
            return None
        self._stage = "done"
        return data[end + 2 :]


def _fields(head: bytes) -> dict[bytes, bytes]:
    pairs = (field.partition(b":") for field in head.split(b"\r\n")[1:])
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


_MAX_BYTES = 1 << 22
_MAX_NAMES, _MAX_FACTS = 20, 100
_LATE = "the answer did not end in time"
_REFUSED = {
    401: "`--token-file FILE` has the bearer token",
    403: "`--token-file FILE` has the bearer token",
    404: "the names are in `POST /v2/repository/index`",
}


class HttpMetadata:
    """Questions to one server, each on a connection of its own."""

    def __init__(self, target: Target, tls: ssl.SSLContext | None, token: str | None, timeout_s: float) -> None:
        self._target, self._tls, self._timeout_s = target, tls, timeout_s
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def only_model(self) -> str:
        """The name of the server's model, where it has one alone. Raises `UsageError`."""
        index = self._fetch("POST", f"{self._target.base}/v2/repository/index", b"{}")
        names = [item.get("name") for item in index if isinstance(item, dict)] if isinstance(index, list) else []
        return choose_model([name for name in names if isinstance(name, str)])

    def read(self, target: Target) -> ServedModel:
        """The server and the model of the target. Raises `SetupError`, `UsageError`, `EngineError`."""
        server = self._fetch("GET", f"{target.base}/v2")
        found = self._fetch("GET", target.model_path())
        try:
            sides = tensor_triples(found["inputs"]), tensor_triples(found.get("outputs", ()))
            versions = tuple(str(version)[:MAX_TEXT] for version in found.get("versions", ()))
            extensions = tuple(map(str, server.get("extensions", ())))
            words = found.get("parameters")
            texts = {"platform": found.get("platform")} | (words if isinstance(words, dict) else {})
            server_name = f"{server.get('name', 'unknown')} {server.get('version', '')}".strip()[:MAX_TEXT]
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"`{target}` does not answer with a model's metadata: {error!r}", hint="expected the protocol v2"
            ) from error
        known = itertools.islice(texts.items(), _MAX_FACTS)
        facts = {str(key)[:MAX_TEXT]: str(value)[:MAX_TEXT] for key, value in known if value}
        return ServedModel(server_name, extensions, versions, served_signature(*sides), facts)

    def change_region(self, action: Literal["register", "unregister"], name: str, **fields: Any) -> None:
        """Register or unregister system shared memory. Raises `SetupError`, `UsageError`."""
        self._ask(
            "POST", f"{self._target.base}/v2/systemsharedmemory/region/{name}/{action}", msgspec.json.encode(fields)
        )

    def _fetch(self, method: str, path: str, body: bytes | None = None) -> Any:
        """The answer's JSON document."""
        try:
            return msgspec.json.decode(self._ask(method, path, body))
        except msgspec.DecodeError as error:
            raise EngineError(
                f"`{method} {path}` at {self._target.address} is not JSON: {error}",
                hint="expected a server of the protocol v2",
            ) from error

    def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
        """The answer's body."""
        target = self._target
        connection = http.client.HTTPConnection(target.host, target.port)
        late = threading.Event()

        def give_up() -> None:
            late.set()
            with contextlib.suppress(OSError):  # it has ended
                twin.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(self._timeout_s, give_up)  # the socket's own is of each read
        timer.daemon = True
        try:
            opened = socket.create_connection((target.host, target.port), self._timeout_s)
            with opened.dup() as twin:  # stays where TLS takes the other and where the answer ends it
                timer.start()
                connection.sock = self._tls.wrap_socket(opened, server_hostname=target.host) if self._tls else opened
                connection.request(method, path, body, self._headers)
                answer = connection.getresponse()
                data = answer.read(_MAX_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise unreachable(target, TimeoutError(_LATE) if late.is_set() else error) from error
        finally:
            timer.cancel()
            connection.close()
        if late.is_set():
            raise unreachable(target, TimeoutError(_LATE))
        if answer.status != 200:
            text = data[:300].decode(errors="replace").strip()
            found = f"{answer.status} {answer.reason[:MAX_TEXT]}: {text or 'no text'}"
            raise (UsageError if 400 <= answer.status < 500 else SetupError)(
                f"`{method} {path}` at {target.address} gives {found}",
                hint=_REFUSED.get(answer.status, "is the model loaded and ready?"),
            )
        return data


def unreachable(target: Target, error: BaseException) -> SetupError:
    reason = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return SetupError(
        f"no answer from {target.address}: {reason[:1].lower()}{reason[1:]}",
        hint="is the server started, at this port?",
    )


def choose_model(names: list[str]) -> str:
    """The only model. Raises `UsageError` where there are several or none."""
    known = list(dict.fromkeys(name[:MAX_TEXT] for name in names))
    if len(known) != 1:
        raise UsageError(
            f"the server has {len(known)} models, and none is named",
            hint=f"`--model NAME`: {suggest('', known[:_MAX_NAMES])}" if known else "load one first",
        )
    return known[0]

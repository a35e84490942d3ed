"""Metadata of a server over HTTP: its name and extensions, its models, the tensors of one."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
from typing import Any

import msgspec

from trt_engine.errors import EngineError, SetupError, UsageError
from trt_engine.tensors import Signature, suggest
from trt_engine.verbs.loadtest.inference_request import ServedModel, tensor_specs
from trt_engine.verbs.loadtest.target import Target

_MAX_BYTES = 1 << 24
_MAX_NAMES = 20
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
            signature = Signature(tensor_specs(found["inputs"]), tensor_specs(found.get("outputs", ())))
            name, versions = str(found["name"]), tuple(map(str, found.get("versions", ())))
            extensions = tuple(map(str, server.get("extensions", ())))
            server_name = f"{server.get('name', 'unknown')} {server.get('version', '')}".strip()
        except (KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"`{target}` does not answer with a model's metadata: {error!r}", hint="expected the protocol v2"
            ) from error
        return ServedModel(server_name, extensions, name, versions, signature, describe_metadata(found))

    def register_region(self, name: str, key: str, nbytes: int) -> None:
        """Register system shared memory. Raises `SetupError`, `UsageError`."""
        body = msgspec.json.encode({"key": key, "byte_size": nbytes})
        self._ask("POST", f"{self._target.base}/v2/systemsharedmemory/region/{name}/register", body)

    def unregister_region(self, name: str) -> None:
        """Unregister system shared memory. Raises `SetupError`, `UsageError`."""
        self._ask("POST", f"{self._target.base}/v2/systemsharedmemory/region/{name}/unregister", b"{}")

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
        host, port, timeout_s = target.host, target.port, self._timeout_s
        connection = (
            http.client.HTTPConnection(host, port, timeout_s)
            if self._tls is None
            else http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
        )
        late = threading.Event()

        def give_up() -> None:
            late.set()
            with contextlib.suppress(OSError):  # it is closed
                opened.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(timeout_s, give_up)  # the connection's own is of each read
        timer.daemon = True
        try:
            connection.connect()
            opened = connection.sock  # the connection forgets it where the answer ends it
            timer.start()
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
            problem = (
                f"`{method} {path}` at {target.address} gives {answer.status} {answer.reason}: {text or 'no text'}"
            )
            kind_of_error = UsageError if 400 <= answer.status < 500 else SetupError
            raise kind_of_error(problem, hint=_REFUSED.get(answer.status, "is the model loaded and ready?"))
        return data


def unreachable(target: Target, error: BaseException) -> SetupError:
    reason = str(getattr(error, "strerror", None) or error or type(error).__name__)
    return SetupError(
        f"no answer from {target.address}: {reason[:1].lower()}{reason[1:]}",
        hint="is the server started, at this port?",
    )


def choose_model(names: list[str]) -> str:
    """The only model. Raises `UsageError` where there are several or none."""
    known = list(dict.fromkeys(names))
    if len(known) != 1:
        raise UsageError(
            f"the server has {len(known)} models, and none is named",
            hint=f"`--model NAME`: {suggest('', known[:_MAX_NAMES])}" if known else "load one first",
        )
    return known[0]


def describe_metadata(found: dict[str, Any]) -> dict[str, str]:
    """The texts of the metadata: platform and parameters."""
    parameters = found.get("parameters")
    words = parameters if isinstance(parameters, dict) else {}
    return {str(key): str(value) for key, value in ({"platform": found.get("platform")} | words).items() if value}

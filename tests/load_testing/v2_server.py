"""A small server of the Open Inference Protocol v2 over HTTP, whose answers a test chooses; a program too."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METADATA = {
    "name": "net", "versions": ["1"], "platform": "onnxruntime_onnx", "parameters": {"provider": "cpu"},
    "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
}  # fmt: skip
CERTIFICATE = Path(__file__).with_name("localhost.pem")


@dataclass
class Request:
    number: int
    """Of its kind, from 0."""
    path: str
    headers: dict[str, str]
    body: bytes


def answer(body: bytes = b'{"outputs":[]}', status: str = "200 OK", *fields: str) -> bytes:
    head = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *fields, "", ""]
    return "\r\n".join(head).encode() + body


@dataclass
class V2Server:
    """Serves until it is closed. `on_infer` gives the bytes of an answer; None closes the connection without one."""

    on_infer: Callable[[Request], Awaitable[bytes | None]] | None = None
    metadata: dict[str, Any] = field(default_factory=lambda: METADATA)
    extensions: tuple[str, ...] = ("binary_tensor_data",)
    models: tuple[str, ...] = ("net",)
    token: str | None = None
    tls: bool = False
    stop_after: int | None = None
    """Go away after so many answers."""
    requests: list[Request] = field(default_factory=list)
    connections: int = 0

    def __enter__(self) -> V2Server:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # it went away by itself
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http{'s' * self.tls}://127.0.0.1:{self.port}"

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve(started))
        self._loop.close()

    async def _serve(self, started: threading.Event) -> None:
        context = None
        if self.tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
        self._stop = asyncio.Event()
        self._open: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=context)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await self._stop.wait()
        server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while await self._exchange(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            found: bytes | None = answer(b'{"error": "no token"}', "401 Unauthorized")
        elif method == "POST" and path.endswith("/infer"):
            if len(self.requests) == self.stop_after:
                self._stop.set()
                return False
            request = Request(len(self.requests), path, headers, body)
            self.requests.append(request)
            found = answer() if self.on_infer is None else await self.on_infer(request)
        else:
            found = self._describe(path)
        if found is None:
            return False
        writer.write(found)
        await writer.drain()
        head_of_answer, _, sent = found.partition(b"\r\n\r\n")
        size = int(head_of_answer.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        return b"connection: close" not in head_of_answer and (size <= len(sent) or b"chunked" in head_of_answer)

    def _describe(self, path: str) -> bytes:
        known = {
            "/v2": {"name": "small", "version": "7", "extensions": self.extensions},
            "/v2/repository/index": [{"name": name} for name in self.models],
            "/v2/models/net": self.metadata,
            "/v2/models/net/versions/1": self.metadata,
        }
        if path not in known:
            return answer(b'{"error": "unknown"}', "404 Not Found")
        return answer(json.dumps(known[path]).encode())


async def _stop_once(request: Request) -> bytes:
    """Stop this process as a whole before the answer whose number is its argument."""
    if request.number == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    return answer()


if __name__ == "__main__":
    with V2Server(on_infer=_stop_once) as server:
        print(server.url, flush=True)
        threading.Event().wait()

"""Clients that do not read, end or begin: memory, file descriptors and `live` of `serve` at its default limits.

python benchmarks/serve_hostile.py [--only WORD] [--seconds N] [--record]      prints the table; writes the record

For each row a new server of one model, whose answer is 16,384 times its input, and clients of one kind for some seconds.
Measured are the server's memory and descriptors before, at most, and after the clients have gone, the slowest answer of
`/v2/health/live` meanwhile, and the time from SIGTERM, with the clients still there, to the end. No request has over 10 MB.
The exit code is 1 where one client's request takes over 1 GiB, all of them more than the 2 GiB of `--max-in-flight-size` and
a GiB, descriptors stay, `live` takes over a second, or the server outlives twice its `--drain-timeout` of 5 s by 3 s.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import json
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.open_inference.messages import INFERENCE_SERVICE, message

RESULTS = Path(__file__).parent / "results" / "serve-hostile-cpu.jsonl"
WIDTH, ROWS = 16384, 256
MIB = 1 << 20


class Server:
    """The command in a process of its own."""

    def __init__(self, engine: Path) -> None:
        words = [sys.executable, "-m", "trt_engine", "serve", f"m={engine}", "--http-port", "0", "--grpc-port", "0",
                 "--metrics-port", "-1", "--drain-timeout", "5s", "--drain-delay", "0s", "--json"]  # fmt: skip
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.child = subprocess.Popen(words, stdout=self.log, stderr=subprocess.STDOUT)
        self.process = psutil.Process(self.child.pid)
        self.asker, far = multiprocessing.Pipe()
        multiprocessing.get_context("spawn").Process(target=_ask, args=(far,), daemon=True).start()
        end = time.monotonic() + 90
        while True:
            ports = sorted(
                one.laddr.port for one in self.process.net_connections("tcp") if one.status == psutil.CONN_LISTEN
            )
            for http_port in ports:
                with contextlib.suppress(OSError, http.client.HTTPException):
                    if len(ports) > 1 and self._ready(http_port):
                        self.http, self.grpc = http_port, next(port for port in ports if port != http_port)
                        return
            if time.monotonic() > end or self.child.poll() is not None:
                self.log.seek(0)
                raise RuntimeError(self.log.read()[-2000:])
            time.sleep(0.1)

    @staticmethod
    def _ready(port: int) -> bool:
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
        asked.request("GET", "/v2/health/ready")
        return asked.getresponse().status == 200

    def memory(self) -> int:
        return int(self.process.memory_info().rss)

    def live_s(self) -> float:
        """How long `live` takes, 10 s at most; a refused connection is 10. Another process asks."""
        self.asker.send(self.http)
        return float(self.asker.recv())


def _ask(ends: Connection) -> None:
    with contextlib.suppress(EOFError):
        while port := ends.recv():
            began = time.monotonic()
            try:
                asked = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
                asked.request("GET", "/v2/health/live")
                alive = asked.getresponse().status == 200
                asked.close()
            except (OSError, http.client.HTTPException):
                alive = False
            ends.send(time.monotonic() - began if alive else 10.0)


# ------------------------------------------------------------------------------------------------ clients

Clients = Callable[[Server, threading.Event, list[Any]], None]
"""Opens connections and keeps them in the list until the event is set."""


def _request(path: str, body: bytes, *headers: str, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def _document(rows: int, binary: bool) -> bytes:
    document: dict[str, Any] = {
        "inputs": [{"name": "x", "shape": [rows, 1], "datatype": "FP32", "data": [0.123456] * rows}],
        "outputs": [{"name": "y", "parameters": {"binary_data": binary}}],
    }
    return json.dumps(document).encode()


INFER = "/v2/models/m/infer"


def _sent(
    count: int, raw: bytes, *, then: Callable[[socket.socket], object] = lambda s: None, buffer: int = 4096
) -> Clients:
    """Connections that each send these bytes, and then do something."""

    def clients(server: Server, over: threading.Event, held: list[Any]) -> None:
        for _ in range(count):
            if over.is_set():
                return
            opened = socket.socket()
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            opened.settimeout(2)
            with contextlib.suppress(OSError):
                opened.connect(("127.0.0.1", server.http))
                held.append(opened)
                opened.sendall(raw)
                then(opened)

    return clients


def _trickled(count: int, first: bytes, piece: bytes, *, read: int = 0) -> Clients:
    """Connections that send, or read, a little again and again."""

    def clients(server: Server, over: threading.Event, held: list[Any]) -> None:
        _sent(count, first)(server, over, held)
        while not over.wait(0.05):
            for opened in held:
                with contextlib.suppress(OSError):
                    opened.setblocking(False)
                    opened.recv(read) if read else opened.send(piece)

    return clients


def _reset(opened: socket.socket) -> None:
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    opened.close()


def _answered(opened: socket.socket) -> None:
    opened.recv(1 << 16)


def _infer_message(rows: int, raw: bytes | None = None, width: int = 1) -> bytes:
    made: Any = message("ModelInferRequest")(model_name="m")
    made.inputs.add(name="x", datatype="FP32", shape=[rows, width])
    made.raw_input_contents.append(np.ones((rows, width), np.float32).tobytes() if raw is None else raw)
    packed: bytes = made.SerializeToString()
    return packed


def _streams(count: int, messages: int, **options: Any) -> Clients:
    """gRPC streams of requests whose answers nobody reads."""

    def clients(server: Server, over: threading.Event, held: list[Any]) -> None:
        raw = _infer_message(ROWS)

        def requests() -> Any:
            for _ in range(messages):
                if over.is_set():
                    return
                yield raw
            over.wait()

        for _ in range(count):
            channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc}", [("grpc.use_local_subchannel_pool", 1)])
            call = channel.stream_stream(f"/{INFERENCE_SERVICE}/ModelStreamInfer")
            held.append((channel, call(requests(), **options)))
        over.wait()

    return clients


def _unary(count: int, raw: bytes, **options: Any) -> Clients:
    """gRPC requests, one after the other on each channel, whatever the answer is."""

    def clients(server: Server, over: threading.Event, held: list[Any]) -> None:
        def ask() -> None:
            limits = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
            with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", limits) as channel:
                call = channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")
                while not over.is_set():
                    with contextlib.suppress(grpc.RpcError):
                        call(raw, timeout=5, **options)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return clients


def _to_grpc(count: int, raw: bytes) -> Clients:
    """Bytes to the port of gRPC, and nothing else."""

    def clients(server: Server, over: threading.Event, held: list[Any]) -> None:
        for _ in range(count):
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", server.grpc), 2))
                held[-1].sendall(raw)

    return clients


ZEROS = _infer_message(1, bytes(200 * MIB))
BINARY, TEXT = _request(INFER, _document(ROWS, True)), _request(INFER, _document(ROWS, False))
PACKED = _request(INFER, _document(ROWS, False), "Accept-Encoding: gzip")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)
LARGE = json.dumps(
    {"inputs": [{"name": "x", "shape": [ROWS, 1], "datatype": "FP32", "data": [0] * 3_000_000}]}
).encode()
CASES: dict[str, tuple[int, Callable[[], Clients]]] = {
    "HTTP infer: one binary answer": (1, lambda: _sent(1, BINARY)),
    "HTTP infer: one JSON answer": (1, lambda: _sent(1, TEXT)),
    "HTTP infer: one JSON answer, gzip": (1, lambda: _sent(1, PACKED)),
    "HTTP infer: one JSON request of 9 MB": (1, lambda: _sent(1, _request(INFER, LARGE))),
    "HTTP infer: one gzip bomb of 2 MB": (1, lambda: _sent(1, _request(INFER, _bomb(), "Content-Encoding: gzip"))),
    "HTTP infer: nobody reads, binary": (256, lambda: _sent(256, BINARY)),
    "HTTP infer: nobody reads, JSON": (64, lambda: _sent(64, TEXT)),
    "HTTP infer: nobody reads, gzip": (32, lambda: _sent(32, PACKED)),
    "HTTP infer: nobody reads, 50 in each pipe": (32, lambda: _sent(32, BINARY * 50)),
    "HTTP infer: half closed": (128, lambda: _sent(128, BINARY, then=lambda s: s.shutdown(socket.SHUT_WR))),
    "HTTP infer: slow reader": (128, lambda: _trickled(128, BINARY, b"", read=512)),
    "HTTP infer: reset at once": (1000, lambda: _sent(1000, BINARY, then=_reset)),
    "HTTP infer: chunks of one byte": (500, lambda: _trickled(500, _chunked(), b"1\r\n \r\n")),
    "HTTP infer: header alone, 9 MB stated": (2000, lambda: _sent(2000, _stated(9_000_000))),
    "HTTP infer: gzip bombs": (8, lambda: _sent(8, _request(INFER, _bomb(), "Content-Encoding: gzip"))),
    "HTTP config, 2,000 in each pipe": (64, lambda: _sent(64, _get("/v2/models/m/config") * 2000)),
    "HTTP statistics, 2,000 in each pipe": (64, lambda: _sent(64, _get("/v2/models/stats") * 2000)),
    "HTTP index, 2,000 in each pipe": (64, lambda: _sent(64, _request("/v2/repository/index", b"{}") * 2000)),
    "HTTP: idle, kept alive": (2000, lambda: _sent(2000, _get("/v2"), then=_answered)),
    "HTTP: half a header": (2000, lambda: _sent(2000, b"GET /v2 HTTP/1.1\r\nX: ")),
    "HTTP: header without end": (200, lambda: _trickled(200, b"GET /v2 HTTP/1.1\r\n", b"X: y\r\n")),
    "HTTP: connections that say nothing": (4000, lambda: _sent(4000, b"")),
    "gRPC infer: one answer": (1, lambda: _unary(1, _infer_message(ROWS))),
    "gRPC infer: one request of 9 MB": (1, lambda: _unary(1, _infer_message(2_250_000))),
    "gRPC infer: one gzip bomb": (1, lambda: _unary(1, ZEROS, compression=grpc.Compression.Gzip)),
    "gRPC infer: gzip bombs": (8, lambda: _unary(8, ZEROS, compression=grpc.Compression.Gzip)),
    "gRPC stream: nobody reads": (16, lambda: _streams(16, 200)),
    "gRPC stream: 20,000 messages": (4, lambda: _streams(4, 20_000)),
    "gRPC: half a handshake": (1000, lambda: _to_grpc(1000, PREFACE[:10])),
    "gRPC: idle": (1000, lambda: _to_grpc(1000, PREFACE)),
}  # fmt: skip


def _get(path: str) -> bytes:
    return _request(path, b"", method="GET")


@functools.cache
def _bomb() -> bytes:
    """Two GiB of zeros in 2 MB."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(2048)) + packer.flush()


def _chunked() -> bytes:
    return f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


def _stated(length: int) -> bytes:
    return f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{{".encode()


# ------------------------------------------------------------------------------------------------ the table


def measure(name: str, engine: Path, seconds: float) -> dict[str, Any]:
    count, make = CASES[name]
    server = Server(engine)
    try:
        clients = make()
        server.live_s()
        before, files = server.memory(), server.process.num_fds()
        most, most_files, slowest = before, files, 0.0
        for _ in range(2):  # they come, go, and come again; the second time they are there at the end
            over, held = threading.Event(), list[Any]()
            thread = threading.Thread(target=clients, args=(server, over, held), daemon=True)
            thread.start()
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                slowest = max(slowest, server.live_s())
                most, most_files = max(most, server.memory()), max(most_files, server.process.num_fds())
                time.sleep(0.02)
            if _:
                break
            _let_go(over, held, thread)
            after_s = time.monotonic()
            while server.process.num_fds() > files + 4 and time.monotonic() < after_s + 15:
                time.sleep(0.1)
            after, after_files = server.memory(), server.process.num_fds()
        began = time.monotonic()
        server.child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.child.wait(30)
        ended_s = time.monotonic() - began
        _let_go(over, held, thread)
    finally:
        server.child.kill()
        server.child.wait()
    bound = 1024 if count == 1 else 3072
    faults = [
        *([f"{(most - before) / MIB:.0f} MiB"] if (most - before) / MIB > bound else []),
        *([f"{after_files - files} descriptors stay"] if after_files > files + 4 else []),
        *([f"live took {slowest:.1f} s"] if slowest > 1 else []), *(["SIGTERM"] if ended_s > 8 else []),
    ]  # fmt: skip
    return {
        "case": name, "clients": count, "memory_mib": [round(value / MIB) for value in (before, most, after)],
        "descriptors": [files, most_files, after_files], "live_s": round(slowest, 3), "ended_s": round(ended_s, 2),
        "code": server.child.returncode, "faults": faults,
    }  # fmt: skip


def _let_go(over: threading.Event, held: list[Any], thread: threading.Thread) -> None:
    over.set()
    thread.join(20)
    for item in held:
        with contextlib.suppress(OSError):
            item.close() if isinstance(item, socket.socket) else (item[1].cancel(), item[0].close())


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| clients | memory before / most / after, MiB | descriptors | live, s | SIGTERM, s | faults |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        memory, files = (" / ".join(map(str, row[key])) for key in ("memory_mib", "descriptors"))
        lines.append(
            f"| {row['case']} ({row['clients']}) | {memory} | {files} | {row['live_s']:.2f} | {row['ended_s']:.1f} |"
            f" {', '.join(row['faults']) or '-'} |"
        )
    return "\n".join(lines)


def write_engine(folder: Path) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "c"], ["y"])], "wide",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", WIDTH])],
        [numpy_helper.from_array(np.linspace(0, 1, WIDTH, dtype=np.float32)[None], "c")],
    )  # fmt: skip
    path = folder / "wide.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return te.build(path, out=folder / "wide.engine.onnx", batch=(1, 64, ROWS), parity=False).path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each case, twice")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRT_ENGINE_STORE"] = str(Path(folder) / "store")
        engine = write_engine(Path(folder))
        for name in CASES:
            if options.only in name:
                rows.append(measure(name, engine, options.seconds))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(table(rows))
    if options.record:
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

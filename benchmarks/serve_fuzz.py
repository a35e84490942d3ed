"""Malformed HTTP and gRPC against a running server, for minutes: no 5xx that is not meant, no crash, memory flat.

python benchmarks/serve_fuzz.py [--minutes N] [--seed N] [--out FILE]

Valid requests (JSON, binary tensors, protobuf) are cut, repeated, spliced, given wrong numbers and random bytes, and sent
to every route in random order; some connections are left half open. Each round also replaces some of the integers
that a request states (`tests/serving/hostile_numbers.py`), each answered within a second. 503, 504 and (of gRPC) UNAVAILABLE
and DEADLINE_EXCEEDED are meant; other failures end the run with exit code 1. After each round a valid request
must be answered rightly. The server's memory is read every second: the median of the last quarter may not be 10 % above that
of the second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import trt_engine as te
from serving.hostile_numbers import PLACES, REGION, VALUES, Sender
from trt_engine.open_inference.messages import INFERENCE_SERVICE, message, service

MEANT = {503, 504}
FAILED_CODES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
ROUTES = (
    "GET /v2", "GET /v2/health/ready", "GET /v2/models/m", "GET /v2/models/m/config", "GET /v2/models/m/stats",
    "GET /v2/models/stats", "POST /v2/repository/index", "POST /v2/repository/models/m/load",
    "POST /v2/repository/models/m/unload", "POST /v2/models/m/infer", "POST /v2/models/m/versions/1/infer",
    "GET /v2/systemsharedmemory/status", "POST /v2/systemsharedmemory/region/r/register",
    "POST /v2/systemsharedmemory/region/r/unregister", "GET /metrics",
)  # fmt: skip
ODD: tuple[Any, ...] = (
    -1, 0, 1, 2**31, 2**63, 2**64, 1e308, 0.5, None, True, "", "x", "é\0", "../..", [], {}, [[]], [None], "FP64",
    "BYTES", [2**62],
)  # fmt: skip


def serve(model: str, ends: Connection) -> None:
    settings: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "metrics_port": -1, "max_request": "4MiB"}
    settings |= {"shared_memory_prefix": f"/{REGION}", "control_without_token": True}
    with te.serve([f"m={model}", f"double={model}"], request_timeout_s=2.0, drain_delay_s=0, **settings) as server:
        ends.send((server.http_address, server.grpc_address))
        ends.recv()


def write_model(path: Path) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])], "twice",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


class Fuzzer:
    """One stream of malformed requests."""

    def __init__(self, seed: int, http: str, grpc_address: str) -> None:
        self.random = random.Random(seed)
        host, _, port = http.rpartition(":")
        self.address = (host, int(port))
        self.channel = grpc.insecure_channel(grpc_address)
        self.numbers = Sender(http, grpc_address)
        self.open: list[socket.socket] = []
        self.seen: Counter[str] = Counter()
        self.failures: list[str] = []

    # ---------------------------------------------------------------- HTTP

    def document(self) -> dict[str, Any]:
        return {
            "id": "1", "parameters": {"priority": 1, "timeout": 1_000_000, "binary_data_output": True},
            "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}],
            "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
        }  # fmt: skip

    def spoil(self, value: Any) -> Any:
        """The value with one of its parts replaced, removed or repeated."""
        pick = self.random
        if isinstance(value, dict) and value and pick.random() < 0.8:
            key = pick.choice([*value])
            made = dict(value)
            how = pick.random()
            if how < 0.2:
                del made[key]
            elif how < 0.4:
                made[pick.choice(("data", "shape", "shared_memory_region", "classification", "sequence_id"))] = (
                    pick.choice(ODD)
                )
            else:
                made[key] = self.spoil(value[key])
            return made
        if isinstance(value, list) and value and pick.random() < 0.8:
            index = pick.randrange(len(value))
            return [*value[:index], self.spoil(value[index]), *value[index:]] if pick.random() < 0.3 else (
                [*value[:index], self.spoil(value[index]), *value[index + 1 :]]
            )  # fmt: skip
        return pick.choice(ODD)

    def damage(self, raw: bytes) -> bytes:
        """The bytes cut, flipped, repeated, or as they are."""
        pick, how = self.random, self.random.random()
        if how < 0.4 or not raw:
            return raw
        index = pick.randrange(len(raw))
        if how < 0.55:
            return raw[:index]
        if how < 0.75:
            return raw[:index] + pick.randbytes(pick.randrange(1, 9)) + raw[index + 1 :]
        return raw[:index] + raw[index:] * pick.randrange(2, 5) if how < 0.9 else pick.randbytes(pick.randrange(200))

    def http_request(self) -> bytes:
        pick = self.random
        method, path = pick.choice(ROUTES).split() if pick.random() < 0.6 else ["POST", "/v2/models/m/infer"]
        document = self.document()
        for _ in range(pick.randrange(3)):
            document = self.spoil(document)
        head = json.dumps(document).encode()
        body = self.damage(head + np.ones(4, np.float32).tobytes()) if method == "POST" else b""
        headers = {
            "Host": "localhost",
            "Content-Length": str(len(body)),
            "Inference-Header-Content-Length": str(len(head)),
        }
        if pick.random() < 0.2:
            headers[pick.choice([*headers, "Content-Encoding", "Transfer-Encoding", "Expect", "Upgrade"])] = (
                pick.choice(("", "-1", "0", "5", "9" * 30, "gzip", "chunked", "100-continue", "websocket", "x"))
            )
        if pick.random() < 0.1:
            parts = ("v2", "models", "m", "..", "%2e%2e", "%00", "é", "", "infer", "versions", "99" * 40)
            path = "/" + "/".join(pick.choice(parts) for _ in range(pick.randrange(1, 8)))
        text = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        raw = text.encode() + b"\r\n" + body
        return self.damage(raw) if pick.random() < 0.1 else raw

    def send_http(self) -> None:
        raw = self.http_request()
        connection = socket.create_connection(self.address, 10)
        with contextlib.suppress(OSError):
            connection.sendall(raw)
        if self.random.random() < 0.03:
            self.open.append(connection)
            self.seen["http left open"] += 1
            if len(self.open) > 100:
                self.open.pop(0).close()
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(0.15)
            answer = connection.recv(1 << 16)
            status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
            self.seen[f"http {status or 'closed'}"] += 1
            if status >= 500 and status not in MEANT:
                self.failures.append(f"{status}: {raw!r} -> {answer!r}")
            return
        self.seen["http waits for more"] += 1

    # ---------------------------------------------------------------- gRPC

    def grpc_request(self) -> tuple[str, bytes]:
        pick = self.random
        method = pick.choice([one for one in service(INFERENCE_SERVICE).methods if one.name != "ModelStreamInfer"])
        if pick.random() < 0.6:
            made = message("ModelInferRequest")(model_name=pick.choice(("m", "m", "m", "n")), id="1")
            for _ in range(pick.choice((0, 1, 1, 1, 2))):
                datatype = pick.choice(("FP32", "FP32", "FP32", "BYTES", "BF16", "?"))
                item = made.inputs.add(name=pick.choice(("x", "x", "x", "z")), datatype=datatype)
                item.shape.extend(pick.choice(([1, 4], [1, 4], [2, 4], [-1, 4], [2**62, 2**62], [], [1] * 40)))
                if pick.random() < 0.2:
                    item.contents.fp32_contents.extend([1, 2, 3, 4])
                if pick.random() < 0.1:
                    item.parameters["shared_memory_region"].string_param = "r"
            for _ in range(pick.choice((0, 1, 1, 1, 2))):
                made.raw_input_contents.append(pick.randbytes(pick.choice((16, 16, 16, 0, 15, 32))))
            if pick.random() < 0.2:
                made.parameters[pick.choice(("priority", "timeout", "sequence_id"))].int64_param = pick.choice(
                    (-1, 0, 1, 2**60)
                )
            return "ModelInfer", self.damage(made.SerializeToString())
        return method.name, self.damage(pick.randbytes(pick.randrange(64)))

    def send_grpc(self) -> None:
        name, raw = self.grpc_request()
        try:
            self.channel.unary_unary(f"/{INFERENCE_SERVICE}/{name}")(raw, timeout=5)
            self.seen["grpc ok"] += 1
        except grpc.RpcError as error:
            code = error.code()
            self.seen[f"grpc {code.name}"] += 1
            damaged = (
                "deserializ" in (error.details() or "").lower()
            )  # the library's answer to bytes that are no message
            if code in FAILED_CODES and not damaged:
                self.failures.append(f"{code.name}: {name} {raw!r} -> {error.details()}")

    def send_number(self) -> None:
        """One of the integers that a request states, replaced; of a list also by a list of random ones."""
        pick = self.random
        place, value = pick.choice([*PLACES]), pick.choice([*VALUES.values()])
        if pick.random() < 0.3:
            value = pick.choice((1, -1)) * pick.getrandbits(pick.choice((7, 15, 31, 33, 62, 63, 64, 130)))
        elif isinstance(value, list) and pick.random() < 0.5:
            value = [pick.choice((0, 1, -1, 2**31, 2**62)) for _ in range(pick.randrange(1, 1000))]
        answer = PLACES[place](self.numbers, value)
        self.seen[f"number {answer.status}"] += 1
        if answer.wrong:
            self.failures.append(f"{place} {str(value)[:80]}: {answer.wrong} {answer.status} {answer.text[:200]}")

    def check(self) -> None:
        """A valid request must be answered rightly."""
        made = message("ModelInferRequest")(model_name="m", raw_input_contents=[np.ones(4, np.float32).tobytes()])
        made.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        raw = self.channel.unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")(made.SerializeToString(), timeout=30)
        (answer,) = message("ModelInferResponse").FromString(raw).raw_output_contents
        if np.frombuffer(answer, np.float32).tolist() != [2.0] * 4:
            self.failures.append("a valid request was answered wrongly")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "m.onnx")
        engine = te.build(model, out=Path(folder) / "m.engine.onnx", batch=(1, 1, 8), parity=False)
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(str(engine.path), theirs), daemon=True)
        process.start()
        fuzzer = Fuzzer(options.seed, *ours.recv())
        watched, memory_mib = psutil.Process(process.pid), []
        started = time.monotonic()
        while (now := time.monotonic() - started) < options.minutes * 60 and not fuzzer.failures and process.is_alive():
            for _ in range(100):
                fuzzer.send_http()
                fuzzer.send_grpc()
            for _ in range(10):
                fuzzer.send_number()
            fuzzer.check()
            if now > len(memory_mib):
                memory_mib.append(watched.memory_info().rss / 2**20)
        alive = process.is_alive()
        if alive:
            ours.send("end")
            process.join(60)
        report(fuzzer, memory_mib, alive and process.exitcode == 0, options.out)


def report(fuzzer: Fuzzer, memory_mib: list[float], ended: bool, out: Path | None) -> None:
    quarter = max(len(memory_mib) // 4, 1)
    before, after = (
        statistics.median(part or memory_mib) for part in (memory_mib[quarter : 2 * quarter], memory_mib[-quarter:])
    )
    flat = after <= before * 1.1
    total = sum(fuzzer.seen.values())
    print(f"{total} requests: {', '.join(f'{name} {count}' for name, count in fuzzer.seen.most_common())}")
    print(f"memory {before:.0f} MiB in the second quarter, {after:.0f} MiB in the last")
    print(*fuzzer.failures[:5], sep="\n", end="\n" if fuzzer.failures else "")
    print("the server ended as it should" if ended else "the server crashed or did not end")
    if out is not None:
        found = {"requests": total, "seen": fuzzer.seen, "failures": fuzzer.failures, "memory_mib": memory_mib}
        out.write_text(json.dumps(found) + "\n")
    sys.exit(bool(fuzzer.failures) or not ended or not flat)


if __name__ == "__main__":
    main()

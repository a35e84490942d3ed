"""Rolling reload under load, with faults: nothing lost, nothing mixed up, memory flat.

python benchmarks/serve_soak.py [--requests N] [--minutes N] [--callers N] [--out FILE]

Callers over HTTP and gRPC send rows of their own to a model whose repository gains and loses versions all the time; every
answer must be the caller's rows times the factor of the version it names. In between, requests are cancelled (gRPC), left
by closing the connection (HTTP) or given a timeout that they cannot meet. It ends after both, that many answers and that
much time. A failure is any other error, or a wrong answer; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import InferenceServerException

import trt_engine as te

MEANT = ("deadline", "Deadline", "cancelled", "Cancelled", "expected")


def serve(repository: str, ends: Connection) -> None:
    settings: dict[str, Any] = {
        "control_without_token": True,
        "http_port": 0,
        "grpc_port": 0,
        "metrics_port": -1,
        "drain_delay_s": 0,
    }
    with te.serve(model_repository=repository, model_control_mode="explicit", load_model=["m"], **settings) as server:
        ends.send((server.http_address, server.grpc_address))
        ends.recv()


def build(folder: Path, factor: int) -> Path:
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])], "times",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 64])],
        [numpy_helper.from_array(np.float32(factor), "factor")],
    )  # fmt: skip
    path = folder / f"{factor}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return te.build(path, out=folder / f"{factor}.engine.onnx", batch=(1, 4, 32), parity=False).path


class Load:
    """What all callers share."""

    def __init__(self, requests: int, minutes: float) -> None:
        self.left = requests
        self.end_s = time.monotonic() + minutes * 60
        self.lock = threading.Lock()
        self.seen: Counter[str] = Counter()
        self.failures: list[str] = []

    def take(self) -> bool:
        with self.lock:
            self.left -= 1
            return (self.left >= 0 or time.monotonic() < self.end_s) and not self.failures

    def count(self, name: str) -> None:
        with self.lock:
            self.seen[name] += 1

    def call(self, module: Any, address: str, number: int) -> None:
        random = np.random.default_rng(number)
        client = module.InferenceServerClient(address)
        while self.take():
            x = random.random((int(random.integers(1, 5)), 64), np.float32)
            given = module.InferInput("x", [*x.shape], "FP32")
            given.set_data_from_numpy(x)
            fault = random.random() < 0.02
            timeout = 1 if fault else 30_000_000
            try:
                answer = client.infer("m", [given], timeout=timeout)
            except Exception as error:  # every kind is counted
                if not fault or not any(word in str(error) for word in MEANT):
                    self.failures.append(repr(error))
                self.count("refused as it should be")
                continue
            found = answer.get_response()
            version = found["model_version"] if isinstance(found, dict) else found.model_version
            if not np.array_equal(answer.as_numpy("y"), x * (int(version) + 1)):
                self.failures.append(f"a wrong answer of version {version}")
            self.count(f"version {version}")
        client.close()

    def disturb(self, http: str, grpc_address: str, stop: threading.Event) -> None:
        """Requests that are cancelled, and connections that are closed, on the way."""
        client = tritonclient.grpc.InferenceServerClient(grpc_address)
        host, _, port = http.rpartition(":")
        head = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nInference-Header-Content-Length: 0\r\n"
        given = tritonclient.grpc.InferInput("x", [4, 64], "FP32")
        given.set_data_from_numpy(np.zeros((4, 64), np.float32))
        while not stop.wait(0.02):
            call = client.async_infer("m", [given], lambda result, error: None)
            call.cancel()
            self.count("cancelled")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head + b"Content-Length: 1024\r\n\r\n" + bytes(1024))
            self.count("connection closed")
        client.close()


def roll(repository: Path, engines: list[Path], address: str, stop: threading.Event, load: Load) -> None:
    """Versions come and go; each is loaded as a client does it."""
    client = tritonclient.grpc.InferenceServerClient(address)
    number = 1
    while not stop.wait(0.2):
        number = number % len(engines) + 1
        folder = repository / "m" / str(number)
        if folder.exists() and number > 1:
            shutil.rmtree(folder)
        elif not folder.exists():
            staged = repository / f".{number}"
            staged.mkdir()
            te.Engine.open(engines[number - 1]).copy_to(staged / "model.onnx")
            staged.rename(folder)
        try:
            client.load_model("m")
        except InferenceServerException as error:
            load.failures.append(f"reload: {error}")
        load.count("reloads")
    client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--callers", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder, repository = Path(name), Path(name) / "models"
        (repository / "m" / "1").mkdir(parents=True)
        engines = [build(folder, factor) for factor in (2, 3, 4)]
        te.Engine.open(engines[0]).copy_to(repository / "m" / "1" / "model.onnx")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=serve, args=(str(repository), theirs), daemon=True)
        process.start()
        http, grpc_address = ours.recv()
        load, stop, started = Load(options.requests, options.minutes), threading.Event(), time.monotonic()
        clients = ((tritonclient.grpc, grpc_address), (tritonclient.http, http))
        callers = [
            threading.Thread(target=load.call, args=(*clients[number % 2], number)) for number in range(options.callers)
        ]
        others = [
            threading.Thread(target=roll, args=(repository, engines, grpc_address, stop, load)),
            threading.Thread(target=load.disturb, args=(http, grpc_address, stop)),
        ]
        for thread in (*callers, *others):
            thread.start()
        memory_mib = []
        while any(thread.is_alive() for thread in callers) and process.is_alive():
            time.sleep(1)
            with contextlib.suppress(psutil.NoSuchProcess):
                memory_mib.append(psutil.Process(process.pid).memory_info().rss / 2**20)
        stop.set()
        for thread in (*callers, *others):
            thread.join()
        ours.send("end")
        process.join(60)
    seconds = time.monotonic() - started
    quarter = max(len(memory_mib) // 4, 1)
    before, after = (
        statistics.median(part or [0.0]) for part in (memory_mib[quarter : 2 * quarter], memory_mib[-quarter:])
    )
    answers = sum(count for name, count in load.seen.items() if name.startswith("version"))
    print(f"{answers} answers in {seconds:.0f} s: {dict(load.seen.most_common())}; {len(load.failures)} failures")
    print(f"memory {before:.0f} MiB in the second quarter, {after:.0f} MiB in the last")
    print(*load.failures[:5], sep="\n", end="\n" if load.failures else "")
    if options.out is not None:
        found = {"answers": answers, "seconds": seconds, "seen": load.seen, "failures": load.failures}
        options.out.write_text(json.dumps(found | {"memory_mib": memory_mib}) + "\n")
    sys.exit(bool(load.failures) or process.exitcode != 0)


if __name__ == "__main__":
    main()

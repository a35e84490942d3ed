"""p50 of a small request to `serve` of this tree and of an earlier one, called in turns in one run.

python benchmarks/serve_p50.py TREE [--blocks N] [--requests N] [--path DIR]

TREE is a checkout of the earlier version; DIR has packages that it needs and this environment lacks. Both servers have the
same engine, of a few microseconds, each made by its own version; one connection of a plain socket (HTTP, a JSON and a binary
request) or of grpcio calls them in blocks whose order turns. A figure is the median of all requests; the interval is that of
the difference of the blocks' medians (95 %, bootstrap). The record gets one line for each run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper

from trt_engine.environment import Environment
from trt_engine.open_inference.messages import INFERENCE_SERVICE, message
from trt_engine.records.base import append_record

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "serve-p50-cpu.jsonl"
X = np.ones((1, 4), np.float32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--requests", type=int, default=200, help="of a block")
    parser.add_argument("--path", type=Path, help="a folder of packages for the earlier version")
    options = parser.parse_args()
    trees = {"before": options.tree.resolve(), "after": HERE.parent}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = helper.make_graph(
            [helper.make_node("Add", ["x", "x"], ["y"])], "m",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        )  # fmt: skip
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), folder / "m.onnx"
        )
        servers, callers = {}, dict[str, dict[str, Callable[[], None]]]()
        try:
            for name, tree in trees.items():
                environment = os.environ | {
                    "PYTHONPATH": f"{tree / 'src'}:{options.path or ''}",
                    "TRT_ENGINE_STORE": name,
                }
                engine = folder / f"{name}.engine.onnx"
                ours = [sys.executable, "-m", "trt_engine"]
                subprocess.run([*ours, "build", "m.onnx", "--batch", "1:4:8", "-o", engine], env=environment, cwd=folder,
                               check=True, capture_output=True)  # fmt: skip
                ports = [free_port() for _ in range(2)]
                words = ["serve", f"m={engine}", "--http-port", str(ports[0]), "--grpc-port", str(ports[1]),
                         "--metrics-port", "-1"]  # fmt: skip
                servers[name] = subprocess.Popen(
                    [*ours, *words], env=environment, cwd=folder, stderr=subprocess.DEVNULL
                )
                callers[name] = calls(*ports)
            row = {"trees": {name: commit(tree) for name, tree in trees.items()}, "blocks": options.blocks,
                   "requests": options.requests, "p50_us": measure(callers, options)}  # fmt: skip
        finally:
            for server in servers.values():
                server.terminate()
                server.wait(30)
    append_record(RESULTS, row | {"environment": Environment.detect(), "load_average": os.getloadavg()})
    print(json.dumps(row["p50_us"], indent=1))
    return 0


def measure(callers: dict[str, dict[str, Callable[[], None]]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians by form, and the interval of their difference."""
    found: dict[str, Any] = {}
    for form in callers["after"]:
        samples: dict[str, list[list[float]]] = {name: [] for name in callers}
        for block in range(options.blocks + 2):
            for name in sorted(callers, reverse=bool(block % 2)):
                times = []
                for _ in range(options.requests):
                    start = time.perf_counter_ns()
                    callers[name][form]()
                    times.append((time.perf_counter_ns() - start) / 1e3)
                if block > 1:  # the first warm up
                    samples[name].append(times)
        gaps = [
            statistics.median(after) - statistics.median(before)
            for before, after in zip(samples["before"], samples["after"], strict=True)
        ]
        pick = random.Random(0)
        drawn = sorted(statistics.median(pick.choices(gaps, k=len(gaps))) for _ in range(2000))
        found[form] = {name: round(statistics.median(itertools.chain(*blocks)), 1) for name, blocks in samples.items()}
        found[form]["after - before"] = [round(statistics.median(gaps), 1), round(drawn[50], 1), round(drawn[-50], 1)]
    return found


def calls(http_port: int, grpc_port: int) -> dict[str, Callable[[], None]]:
    """What sends one request of each form and reads its answer."""
    end = time.monotonic() + 120
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{http_port}/v2/health/ready", timeout=5).close()
            break
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    item = {"name": "x", "shape": [1, 4], "datatype": "FP32"}
    text = json.dumps({"inputs": [item | {"data": X.ravel().tolist()}]}).encode()
    head = json.dumps({"inputs": [item | {"parameters": {"binary_data_size": X.nbytes}}],
                       "parameters": {"binary_data_output": True}}).encode()  # fmt: skip
    connection = socket.create_connection(("127.0.0.1", http_port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def http(body: bytes, more: bytes = b"") -> Callable[[], None]:
        raw = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: %d\r\n\r\n" % (more, len(body))

        def call() -> None:
            connection.sendall(raw + body)
            found = connection.recv(65536)
            while b"\r\n\r\n" not in found:
                found += connection.recv(65536)
            start, _, rest = found.partition(b"\r\n\r\n")
            assert start.startswith(b"HTTP/1.1 200"), found
            length = int(start.lower().partition(b"content-length:")[2].split()[0])
            while len(rest) < length:
                rest += connection.recv(65536)

        return call

    request = message("ModelInferRequest")(model_name="m", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    raw = request.SerializeToString()
    method = grpc.insecure_channel(f"127.0.0.1:{grpc_port}").unary_unary(f"/{INFERENCE_SERVICE}/ModelInfer")
    binary = http(head + X.tobytes(), b"Inference-Header-Content-Length: %d\r\n" % len(head))
    return {"HTTP JSON": http(text), "HTTP binary": binary, "gRPC": lambda: method(raw) and None}


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def commit(tree: Path) -> str:
    words = ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())

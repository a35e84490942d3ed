"""`te.batch` over many rows on one node of Ray and on three, and a replica of `deploy ray`, beside a plain loop.

    python benchmarks/batch_rows.py [--rows N]

Nodes are processes of this machine (Ray's own cluster utility), so three nodes share its cores. Order and digest of the
outputs must be those of the loop. Appends one record to benchmarks/results/batch-rows-cpu.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
import pyarrow.parquet as pq
from onnx import TensorProto, helper, numpy_helper

import trt_engine as te

ROOT = Path(__file__).resolve().parent.parent
WIDTH, BATCH, PORT = 64, 8, 8459
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_agent_register_timeout_ms": "120000"}


def make_engine(folder: Path) -> Path:
    """Two fully connected layers of 64 by 64."""
    random = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(random.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32), f"w{n}") for n in (1, 2)
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["a"]), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "w2"], ["y"]),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "rows", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "m.onnx")
    return te.build(folder / "m.onnx", out=folder / "m.engine.onnx", parity=False, batch=(1, BATCH, BATCH)).path


def digest(rows: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows, np.float32)).hexdigest()


@contextlib.contextmanager
def cluster(nodes: int, folder: Path) -> Iterator[Any]:
    import ray
    from ray.cluster_utils import Cluster

    store = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args={"temp_dir": str(folder / f"ray{nodes}"), **store})
    try:
        for _ in range(nodes - 1):
            found.add_node(**store)
        ray.init(address=found.address, log_to_driver=False, configure_logging=False)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


class Peak:
    """The most resident memory, in MiB, of this process's descendants with a title, each alone."""

    def __init__(self, title: str) -> None:
        self.mib, self._title, self._stop = 0.0, title, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(0.5):
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if self._title in " ".join(process.cmdline()).lower().replace("_", ""):
                        self.mib = max(self.mib, process.memory_info().rss / 2**20)


def run_batch(nodes: int, engine: Path, rows: Path, expected: str, folder: Path) -> dict[str, object]:
    out = folder / f"out{nodes}"
    with cluster(nodes, folder), Peak("mapworker") as peak:
        report = te.batch(engine, rows, out, batch=BATCH)
    tables = [pq.read_table(part, columns=["row", "error", "y"]) for part in sorted(out.glob("part-*.parquet"))]
    order = np.concatenate([table.column("row").to_numpy() for table in tables])
    values = np.concatenate([table.column("y").combine_chunks().flatten().to_numpy() for table in tables])
    assert np.array_equal(order, np.arange(len(order))) and report.failed == 0
    assert digest(values) == expected, "outputs differ from those of the plain loop"
    return {
        "nodes": report.nodes, "workers": report.workers, "rows": report.rows, "seconds": report.seconds,
        "rows_per_s": report.rows_per_s, "worker_peak_mib": round(peak.mib), "equal_to_loop": True,
    }  # fmt: skip


def run_loop(engine: Path, rows: np.ndarray) -> tuple[str, float]:
    with te.load(engine) as runner:
        began = time.perf_counter()
        parts = [runner.infer({"x": rows[at : at + BATCH]})["y"] for at in range(0, len(rows), BATCH)]
        return digest(np.concatenate(parts)), time.perf_counter() - began


def clients(count: int, seconds: float, body: bytes) -> float:
    """Answers a second, of clients that keep their connections."""
    answered, ends = [0] * count, time.perf_counter() + seconds

    def run(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", PORT)
        while time.perf_counter() < ends:
            connection.request("POST", "/v2/models/m/infer", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            answered[number] += answer.status == 200

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(answered) / seconds


def run_replica(engine: Path, row: np.ndarray, folder: Path, seconds: float) -> dict[str, object]:
    """One replica behind Ray's proxy, and one bare runner in this process, one row a request."""
    with te.load(engine) as runner:
        calls, ends = 0, time.perf_counter() + seconds
        while time.perf_counter() < ends:
            runner.infer({"x": row})
            calls += 1
    tensor = {"name": "x", "shape": list(row.shape), "datatype": "FP32", "data": row.ravel().tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    with cluster(1, folder / "served") as _, Peak("servereplica") as peak:
        from ray import serve

        from trt_engine.verbs.deploy.ray_app import build_app

        serve.start(http_options={"port": PORT})
        serve.run(build_app({"folder": str(folder), "models": {"m": engine.name}}))
        clients(1, 1.0, body)
        found = {str(count): clients(count, seconds, body) for count in (1, 8)}
        time.sleep(1)
        serve.shutdown()
    return {"runner_calls_per_s": calls / seconds, "requests_per_s": found, "replica_peak_mib": round(peak.mib)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/batch-rows-cpu.jsonl")
    given = parser.parse_args()
    record: dict[str, object] = {
        "schema": "trt-engine/batch-rows", "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": f"two layers of {WIDTH} by {WIDTH}", "batch": BATCH, "cpus": os.cpu_count(),
        "load_before": [round(value, 2) for value in os.getloadavg()],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="te-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ["TRT_ENGINE_STORE"] = str(folder / "store")
        engine = make_engine(folder)
        rows = np.random.default_rng(1).normal(size=(given.rows, WIDTH)).astype(np.float32)
        np.save(folder / "rows.npy", rows)
        expected, seconds = run_loop(engine, rows)
        record["loop"] = {"seconds": seconds, "rows_per_s": given.rows / seconds, "digest": expected}
        record["batch"] = [run_batch(nodes, engine, folder / "rows.npy", expected, folder) for nodes in (1, 3)]
        record["served"] = run_replica(engine, rows[:1], folder, given.seconds)
    record["load_after"] = [round(value, 2) for value in os.getloadavg()]
    with given.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

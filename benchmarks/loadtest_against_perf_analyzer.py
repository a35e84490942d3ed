"""`trt-engine loadtest` in an open loop beside NVIDIA's perf_analyzer, on the same server at the same rate.

    python benchmarks/loadtest_against_perf_analyzer.py --perf-analyzer PROGRAM [--rates 100 300] [--rounds 5] [--out FILE]

perf_analyzer is the wheel `perf-analyzer` 2.60, for glibc 2.38 or newer; elsewhere PROGRAM begins with a newer loader
(`"LOADER --library-path DIR perf_analyzer"`). Both send constant arrivals of a 4 KB tensor over HTTP to one server in a
process of its own, in turns. perf_analyzer counts latency from when it sent a request, `loadtest` from when it was meant to
be sent: where a client is late, only the second counts it, so medians are compared, and p99 stands beside the send lag.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import os
import shlex
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from serve_overhead import serve_ours, write_model

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.records.base import append_record


def theirs(program: list[str], address: str, rate: int, seconds: float) -> dict[str, float]:
    """Requests/s, p50 and p99 in ms by perf_analyzer."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.csv"
        options = ["-m", "net", "-u", address, "-i", "http", "--request-rate-range", str(rate), "--percentile", "99"]
        options += ["--request-distribution", "constant", "--measurement-interval", str(round(seconds * 1e3 / 3))]
        options += ["--stability-percentage", "1000", "--max-trials", "3", "-f", str(table)]
        subprocess.run([*program, *options], check=True, capture_output=True, timeout=30 * seconds)
        with table.open() as file:
            (row,) = csv.DictReader(file)
    return {
        "requests_per_s": float(row["Inferences/Second"]), "p50_ms": float(row["p50 latency"]) / 1e3,
        "p99_ms": float(row["p99 latency"]) / 1e3,
    }  # fmt: skip


def ours(address: str, rate: int, seconds: float) -> dict[str, Any]:
    found = te.loadtest(f"http://{address}", rate=rate, arrivals="constant", duration_s=seconds, warmup_s=0.5)
    return {
        "requests_per_s": found.requests_per_s, "p50_ms": found.latency_percentile(50),
        "p99_ms": found.latency_percentile(99), "lag_p99_ms": found.lag_ms.p99 if found.lag_ms else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--perf-analyzer", required=True, help="how it is started")
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 300])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    program = shlex.split(options.perf_analyzer)
    version = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "net.onnx", 1024)
        engine = te.build(model, out=Path(folder) / "net.engine.onnx", batch=(1, 1, 8), parity=False).path
        ends, end = spawn.Pipe()
        server = spawn.Process(target=serve_ours, args=([engine], end), daemon=True)
        server.start()
        address, _ = ends.recv()
        for rate in options.rates:
            samples: dict[str, list[dict[str, Any]]] = {"perf_analyzer": [], "loadtest": []}
            for _ in range(options.rounds):
                samples["perf_analyzer"].append(theirs(program, address, rate, options.seconds))
                samples["loadtest"].append(ours(address, rate, options.seconds))
            for name, items in samples.items():
                medians = {key: statistics.median(item[key] for item in items) for key in items[0]}
                print(
                    f"{rate}/s {name:14}", ", ".join(f"{key} {value:.3f}" for key, value in medians.items()), flush=True
                )
            if options.out is not None:
                made = {
                    "schema": "trt-engine/loadtest-perf-analyzer",
                    "rate": rate,
                    "version": version,
                    "samples": samples,
                }
                append_record(
                    options.out, made | {"environment": Environment.detect(), "load_average": os.getloadavg()}
                )
        ends.send("end")
        server.join()


if __name__ == "__main__":
    main()

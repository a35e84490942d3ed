"""ViT-B/16 behind `trt-engine serve`, loaded by `loadtest` from the same host: its share of the bare engine's throughput.

The bare engine first, in this process: full batches from as many threads as contexts, and single images from many threads
through the batcher, both with CUDA graphs, as the server has by default. Then the server, a process of its own, with the
same engine, batch and contexts; single images (or `--rows`) over HTTP, HTTP with system shared memory, and gRPC. For each:
short closed loops from 1 and more client processes choose the number that is not the limit, a longer one gives the
throughput, and Poisson arrivals at 50 and 80 % of it give p50 and p99. What the server's busiest thread, all its threads
and each client process used of a core stands beside it, and the rows of its batches and the share of the time that a batch
ran.

One line of JSON for each cell is appended to `serve.jsonl` in the folder given by `--out`, as it comes; cells that failed
have their error.

    python benchmarks/gpu/serve.py --out results --folder /tmp/serve
    python benchmarks/gpu/serve.py --out results --device cpu --seconds 1 --max-batch 8 --concurrency 16
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

import networks

import trt_engine as te

SMALL = {"width": 64, "depth": 2, "heads": 4, "size": 32}
WAYS = ("http", "http-shared-memory", "grpc")
LOADS = (0.5, 0.8)
PROBE_S, WARMUP_S, START_S = 1.5, 0.5, 180.0
CAPTURE_S = 5.0
"""Warm-up of the bare batcher on a GPU: each size is captured by its first batch."""
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class Records:
    """The file of the cells, and what all of them share."""

    def __init__(self, args: argparse.Namespace) -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        self.path = args.out / "serve.jsonl"
        self.shared: dict[str, Any] = {
            "schema": "trt-engine/gpu-serve", "command": command(), "device": args.device, "max_batch": args.max_batch,
            "contexts": args.contexts, "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "host_cores": len(os.sched_getaffinity(0)), "versions": versions(),
        }  # fmt: skip

    def add(self, cell: str, **fields: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.shared | {"cell": cell} | fields) + "\n")
        shown = {name: value for name, value in fields.items() if not isinstance(value, list | dict)}
        print(f"{cell:28}", ", ".join(f"{name} {value}" for name, value in shown.items()), flush=True)

    @contextlib.contextmanager
    def keeping(self, cell: str) -> Iterator[None]:
        """A failure of this cell is recorded and does not end the others."""
        try:
            yield
        except Exception as error:
            self.add(cell, error=f"{type(error).__name__}: {error}")


def command() -> str:
    """What was typed, without the places of this machine."""
    kept, rest = [], iter(sys.argv[1:])
    for item in rest:
        if item in ("--folder", "--out"):
            next(rest, None)
        else:
            kept.append(item)
    return shlex.join(["python", "benchmarks/gpu/serve.py", *kept])


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "trt_engine": te.__version__}
    for name in ("onnxruntime-gpu", "onnxruntime", "httptools", "uvloop", "grpcio", "protobuf"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ------------------------------------------------------------------------------------------------ the bare engine


def full_batches(engine: te.Engine, args: argparse.Namespace) -> float:
    """Rows per second of full batches of host arrays, from a thread for each context."""
    spec = engine.signature.inputs[0]
    rows = np.random.default_rng(0).standard_normal((args.max_batch, *spec.shape[1:]), np.float32).astype(spec.dtype)
    counts = [0] * args.contexts
    with te.load(engine, contexts=args.contexts, graphs=args.device != "cpu") as runner:
        runner.warmup(3, batch=args.max_batch)
        start = time.perf_counter()

        def call(index: int) -> None:
            while time.perf_counter() < start + args.seconds:
                runner.infer({spec.name: rows})
                counts[index] += 1

        threads = [threading.Thread(target=call, args=(index,)) for index in range(args.contexts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return args.max_batch * sum(counts) / (time.perf_counter() - start)


def measure_bare(engine: te.Engine, args: argparse.Namespace, records: Records) -> float:
    """Both figures of the bare engine; the higher one in rows per second."""
    rates = [0.0]
    with records.keeping("bare full batches"):
        rates.append(full_batches(engine, args))
        records.add("bare full batches", rows_per_s=round(rates[-1], 1))
    with records.keeping("bare batcher"):
        batching, graphs = te.Batching(max_batch=args.max_batch, max_wait_ms=0.0), args.device != "cpu"
        found = te.loadtest(
            engine, concurrency=args.concurrency, duration_s=args.seconds, warmup_s=CAPTURE_S if graphs else WARMUP_S,
            batch=1, runtime=te.RuntimeConfig(contexts=args.contexts, batching=batching, graphs=graphs),
        )  # fmt: skip
        records.shared["environment"] = dataclasses.asdict(found.environment)
        records.shared["gpu"] = found.environment.gpu
        records.add("bare batcher", **summarize(found))
        rates.append(found.requests_per_s)
    return max(rates)


def summarize(found: te.LoadtestRecord) -> dict[str, Any]:
    return {
        "rows_per_s": round(found.requests_per_s * found.batch, 1), "requests": found.requests, "failed": found.failed,
        "p50_ms": rounded(found.latency_percentile(50)), "p99_ms": rounded(found.latency_percentile(99)),
        "concurrency": found.concurrency, "processes": found.processes, "rows_per_request": found.batch,
        "request_bytes": found.request_bytes, "errors": found.errors, "error_messages": found.error_messages,
        "warnings": [*found.warnings],
    }  # fmt: skip


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


# ------------------------------------------------------------------------------------------------ the server


class Served:
    """`trt-engine serve` in a process of its own; `switch_s` is the interpreter's switch interval, None its default."""

    def __init__(self, engine: te.Engine, args: argparse.Namespace, switch_s: float | None = None) -> None:
        given = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "-1", "--max-batch", str(args.max_batch)]
        given += [
            "--contexts",
            str(args.contexts),
            "--drain-delay",
            "0s",
            "--shared-memory-prefix",
            "/trt-engine-load-",
        ]
        given += ["--json", f"vit={engine.path}"]
        start = ["-m", "trt_engine"]
        if switch_s is not None:
            run = "runpy.run_module('trt_engine', run_name='__main__')"
            start = ["-c", f"import runpy, sys; sys.setswitchinterval({switch_s}); {run}"]
        self.process = subprocess.Popen([sys.executable, *start, "serve", *given], stdout=subprocess.PIPE, text=True)
        timer = threading.Timer(START_S, self.process.kill)
        timer.start()
        lines: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if line.startswith("}"):
                break
        timer.cancel()
        if not lines:
            raise RuntimeError(f"the server ended by {self.process.wait()}")
        report = json.loads("".join(lines))
        report = report.get("result", report)
        self.http, self.grpc = report["http"], f"grpc://{report['grpc']}"
        self.models = report["models"]

    def url(self, way: str) -> str:
        return f"{self.grpc if way == 'grpc' else self.http}/v2/models/vit"

    def batches(self) -> tuple[int, int, float]:
        """Rows, runs and seconds of all runs until now, by the protocol's statistics."""
        with urllib.request.urlopen(f"{self.http}/v2/models/vit/stats") as answer:
            (found,) = json.load(answer)["model_stats"]
        runs = [(item["batch_size"], item["compute_infer"]) for item in found.get("batch_stats", ())]
        counts = [(int(size), int(run["count"])) for size, run in runs]
        run_s = sum(int(run["ns"]) for _, run in runs) / 1e9
        return sum(size * count for size, count in counts), sum(count for _, count in counts), run_s

    def threads_s(self) -> dict[str, float]:
        """Processor time of each thread in s."""
        found = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended
                fields = (task / "stat").read_text().rpartition(")")[2].split()
                found[task.name] = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
        return found

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def load(
    served: Served, way: str, args: argparse.Namespace, **settings: Any
) -> tuple[te.LoadtestRecord, dict[str, Any]]:
    """One load, with what server and clients used meanwhile."""
    if way == "http-shared-memory":
        settings["shared_memory"] = True
    before, threads, batches, start = os.times(), served.threads_s(), served.batches(), time.perf_counter()
    found = te.loadtest(served.url(way), warmup_s=WARMUP_S, batch=args.rows, timeout_s=20.0, **settings)
    wall_s, after, now = time.perf_counter() - start, os.times(), served.batches()
    busy = sorted((value - threads.get(name, 0.0) for name, value in served.threads_s().items()), reverse=True)
    sent_s = found.wall_s + WARMUP_S  # processes start and end besides
    own_s = after.user + after.system - before.user - before.system
    clients_s = after.children_user + after.children_system - before.children_user - before.children_system
    runs = max(now[1] - batches[1], 1)
    return found, {
        "server_busiest_thread": round(busy[0] / sent_s, 3),
        "server_cores": round(sum(busy) / sent_s, 3),
        "client_cores": round((clients_s if found.processes > 1 else own_s) / found.processes / sent_s, 3),
        "rows_per_run": round((now[0] - batches[0]) / runs, 2),
        "running": round((now[2] - batches[2]) / sent_s, 3),
        "whole_s": round(wall_s, 2),
    }


def measure_way(served: Served, way: str, args: argparse.Namespace, bare: float, records: Records) -> None:
    """Client processes chosen, the throughput, and the latency at parts of it."""
    probes: dict[int, float] = {}
    for processes in args.processes if len(args.processes) > 1 else ():
        with records.keeping(f"{way} {processes} processes"):
            found, used = load(served, way, args, concurrency=args.concurrency, processes=processes, duration_s=PROBE_S)
            probes[processes] = found.requests_per_s
            records.add(f"{way} {processes} processes", **summarize(found), **used)
    best = max(probes, key=lambda many: probes[many]) if probes else args.processes[0]
    found, used = load(served, way, args, concurrency=args.concurrency, processes=best, duration_s=args.seconds)
    highest = found.requests_per_s
    share = round(highest * args.rows / bare, 4) if bare else None
    records.add(f"{way} throughput", share_of_bare=share, **summarize(found), **used, limit=limit(used))
    for part in LOADS:
        rate, of_bare = part * highest, round(part * highest * args.rows / bare, 4) if bare else None
        with records.keeping(f"{way} at {part:.0%}"):
            found, used = load(
                served, way, args, rate=rate, connections=args.concurrency, processes=best, duration_s=args.seconds
            )
            lag = found.lag_ms
            records.add(
                f"{way} at {part:.0%}", rate=round(rate, 1), rate_of_bare=of_bare,
                **summarize(found), **used, lag_ms=None if lag is None else dataclasses.asdict(lag),
                latency_ms=[round(value, 2) for value in found.latency_ms],
            )  # fmt: skip


def compare_switch_interval(served: Served, engine: te.Engine, args: argparse.Namespace, records: Records) -> None:
    """Closed loops over HTTP in turns: the server as it is, and one whose interpreter switches threads more often."""
    other = Served(engine, args, args.switch_interval_s)
    samples: dict[str, list[dict[str, Any]]] = {"as it is": [], "other": []}
    try:
        for _ in range(4):
            for name, one in (("as it is", served), ("other", other)):
                found, used = load(
                    one, args.ways[0], args, concurrency=args.concurrency, processes=max(args.processes),
                    duration_s=PROBE_S,
                )  # fmt: skip
                samples[name].append(summarize(found) | used)
    finally:
        other.close()
    rates = {name: [item["rows_per_s"] for item in items] for name, items in samples.items()}
    records.add(
        "switch interval", switch_interval_s=args.switch_interval_s, as_it_is=str(rates["as it is"]),
        other=str(rates["other"]), samples=samples,
    )  # fmt: skip


def limit(used: dict[str, Any]) -> str:
    """What was nearly always busy."""
    found = [
        name
        for name, share in (
            ("a thread of the server", used["server_busiest_thread"]), ("each client process", used["client_cores"]),
            ("the engine", used["running"]),
        )
        if share > 0.9
    ]  # fmt: skip
    return " and ".join(found) or "none of them alone"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--device", default="cuda:0", help="`cpu` tries the program out on a small network")
    options.add_argument("--max-batch", type=int, default=64)
    options.add_argument("--contexts", type=int, default=2)
    options.add_argument("--concurrency", type=int, default=256, help="requests in flight [256]")
    options.add_argument("--processes", nargs="+", type=int, default=[1, 4, 8], help="client processes to try [1 4 8]")
    options.add_argument("--rows", type=int, default=1, help="images in one request [1]")
    options.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options.add_argument("--switch-interval-s", type=float, help="also compare with a server with this switch interval")
    options.add_argument("--seconds", type=float, default=6.0, help="of each cell [6]")
    options.add_argument("--out", type=Path, required=True, help="the folder of the record")
    options.add_argument("--folder", type=Path, help="where network and engine are kept between runs")
    args = options.parse_args()
    records = Records(args)
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        on_gpu = args.device != "cpu"
        path = folder / f"vit-{'fp16' if on_gpu else 'small'}.onnx"
        if not path.exists():
            networks.vit(path, half=on_gpu, **({} if on_gpu else SMALL))
        start = time.perf_counter()
        batch = (1, args.max_batch, args.max_batch)
        engine = te.build(path, device=args.device, batch=batch, parity=False, store=te.Store(folder / "store"))
        records.shared["build_s"] = round(time.perf_counter() - start, 1)
        bare = measure_bare(engine, args, records)
        served = Served(engine, args)
        stack.callback(served.close)
        records.add("server", models=served.models)
        for way in args.ways:
            with records.keeping(f"{way} throughput"):
                measure_way(served, way, args, bare, records)
        if args.switch_interval_s is not None:
            with records.keeping("switch interval"):
                compare_switch_interval(served, engine, args, records)
    return 0


if __name__ == "__main__":
    sys.exit(main())

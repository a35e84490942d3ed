"""What share of an engine's full batches single requests reach: through the batcher in this process, and over HTTP.

The engine is a stand-in that copies its rows into a buffer and then sleeps, without the interpreter's lock, as a GPU would
compute: `--batch-ms` for a full batch, one batch at a time, while the other contexts copy. Inputs are 3x224x224 FP16, as
those of a ViT. Full batches come from a thread for each context; single images from `--concurrency` callers in this
process, from as many connections over HTTP in binary form, and by the server's own engine in an earlier version (`before`,
a checkout of the sources). They are loaded in turns, `--rounds` times; a figure is the median of the rounds' shares. Beside
it the processor time for a request, of this process or of the server.

    python benchmarks/full_batches.py --out benchmarks/results/full-batches-cpu.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import psutil
from onnx import TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.protocols import RunnerBase
from trt_engine.records.base import append_record
from trt_engine.runtime.batcher import Batcher
from trt_engine.runtime.inference_engine import InferenceEngine
from trt_engine.verbs.loadtest.clients import engine_loop
from trt_engine.verbs.loadtest.generator import Timing, run_loop
from trt_engine.verbs.serve import command, served_model

SHAPE, CLASSES = (3, 224, 224), 1000
WARMUP_S, START_S = 0.5, 60.0


class StandIn(RunnerBase):
    """Runs full batches at a given speed; `width` is the number of batches that are copied at once."""

    can_batch = True

    def __init__(self, engine: te.Engine, contexts: int, batch_ms: float) -> None:
        self.signature, self.profiles, self.width = engine.signature, engine.passport.profiles, contexts
        self._rows = max(profile.ranges["x"].max[0] for profile in self.profiles)
        self._batch_s, self._device = batch_ms / 1e3, threading.Lock()
        self._free = [np.empty((self._rows, *SHAPE), np.float16) for _ in range(contexts)]

    def run(self, feeds: Any) -> dict[str, Any]:
        return self.run_batched([feeds])

    def run_batched(self, parts: Sequence[Any], size: int | None = None) -> dict[str, Any]:
        memory, end = self._free.pop(), 0
        for part in parts:
            rows = part["x"]
            memory[end : end + len(rows)] = rows
            end += len(rows)
        with self._device:
            time.sleep(self._batch_s)
        self._free.append(memory)
        return {"y": np.repeat(memory[: size or end, 0, 0, :1], CLASSES, axis=1)}

    def runtime_info(self) -> dict[str, str]:
        return {}

    def close(self) -> None: ...


def build(folder: Path, rows: int) -> te.Engine:
    """An engine with the inputs and outputs of the stand-in."""
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("Slice", ["flat", "from", "to", "axis"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes, "classes", [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["batch", *SHAPE])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["batch", CLASSES])],
        [numpy_helper.from_array(np.array([value]), name) for name, value in (("from", 0), ("to", CLASSES), ("axis", 1))],
    )  # fmt: skip
    path = folder / "classes.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return te.build(path, out=folder / "classes.engine.onnx", batch=(1, rows, rows), parity=False)


def serve(engine: te.Engine, contexts: int, batch_ms: float) -> None:
    """The server, with the stand-in for its engine, until its input ends."""
    served_model._load_engine = lambda *_, **__: InferenceEngine(StandIn(engine, contexts, batch_ms), engine)  # type: ignore[assignment]
    with te.serve([f"m={engine.path}"], http_port=0, grpc_port=0, metrics_port=-1, drain_delay_s=0.0) as server:
        print(server.http_address, flush=True)
        getattr(command, "tune_interpreter", lambda: None)()  # an earlier version has none
        sys.stdin.read()


@contextlib.contextmanager
def served(args: argparse.Namespace, engine: te.Engine, sources: Path | None) -> Iterator[tuple[str, psutil.Process]]:
    command = [sys.executable, __file__, "--serve", str(engine.path), "--batch-ms", str(args.batch_ms)]
    command += ["--contexts", str(args.contexts)]
    environment = os.environ | ({} if sources is None else {"PYTHONPATH": str(sources / "src")})
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip(), psutil.Process(process.pid)
        process.stdin.close()


def full_batches(runner: RunnerBase, rows: int, args: argparse.Namespace) -> tuple[float, float]:
    batch, counts = np.zeros((rows, *SHAPE), np.float16), [0] * args.contexts
    start = time.perf_counter()

    def call(index: int) -> None:
        while time.perf_counter() < start + args.seconds:
            runner.run({"x": batch})
            counts[index] += 1

    before_s = time.process_time()
    threads = [threading.Thread(target=call, args=(index,)) for index in range(args.contexts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = rows * sum(counts)
    return done / (time.perf_counter() - start), (time.process_time() - before_s) / done * 1e6


def in_process(engine: te.Engine, args: argparse.Namespace) -> tuple[float, float]:
    """Requests/s of callers in this process, and its processor time for one, us."""
    batcher = Batcher(
        StandIn(engine, args.contexts, args.batch_ms), te.Batching(max_wait_ms=0.0), profiles=engine.passport.profiles
    )
    with InferenceEngine(batcher, engine) as loaded:
        feeds = {"x": np.zeros((1, *SHAPE), np.float16)}
        loop = engine_loop(loaded, feeds, concurrency=args.concurrency, timeout_s=30.0, deadline_ms=None)
        before_s = time.process_time()
        found = run_loop(loop, Timing(WARMUP_S, args.seconds, None), lambda *_: None)
        used_s, ends = time.process_time() - before_s, np.asarray(found.samples.ends)
        counted = int(((ends >= found.window.measured) & (ends < found.window.end)).sum())
        return counted / args.seconds, used_s / len(ends) * 1e6


def over_http(address: str, process: psutil.Process, args: argparse.Namespace) -> tuple[float, float]:
    before_s = sum(process.cpu_times()[:2])
    found = te.loadtest(
        f"http://{address}/v2/models/m", concurrency=args.concurrency, duration_s=args.seconds, warmup_s=WARMUP_S, batch=1
    )  # fmt: skip
    used_s = sum(process.cpu_times()[:2]) - before_s
    return found.requests_per_s, used_s / (found.requests + found.warmup_requests) * 1e6


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--max-batch", type=int, default=42)
    options.add_argument("--batch-ms", type=float, default=20.0)
    options.add_argument("--contexts", type=int, default=2)
    options.add_argument("--concurrency", type=int, default=256)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=3.0)
    options.add_argument("--before", type=Path, help="a checkout of an earlier version")
    options.add_argument("--out", type=Path)
    options.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.serve is not None:
        serve(te.Engine.open(args.serve), args.contexts, args.batch_ms)
        return
    with contextlib.ExitStack() as stack:
        engine = build(Path(stack.enter_context(tempfile.TemporaryDirectory())), args.max_batch)
        bare = StandIn(engine, args.contexts, args.batch_ms)
        http, process = stack.enter_context(served(args, engine, None))
        ways = {
            "full batches": lambda: full_batches(bare, args.max_batch, args),
            "in process": lambda: in_process(engine, args),
            "http": lambda: over_http(http, process, args),
        }
        if args.before is not None:
            old = stack.enter_context(served(args, engine, args.before))
            ways["http before"] = lambda: over_http(*old, args)
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(args.rounds):
            for name, way in ways.items():
                runs[name].append(way())
    draw = random.Random(0)
    for name, found in runs.items():
        shares = [one / whole for (one, _), (whole, _) in zip(found, runs["full batches"], strict=True)]
        drawn = sorted(statistics.median(draw.choices(shares, k=len(shares))) for _ in range(1000))
        cell = {
            "way": name, "share": round(statistics.median(shares), 4),
            "interval": [round(drawn[25], 4), round(drawn[974], 4)],
            "rows_per_s": round(statistics.median(rate for rate, _ in found), 1),
            "cpu_us": round(statistics.median(used for _, used in found), 1), "runs": found,
        }  # fmt: skip
        print({key: value for key, value in cell.items() if key != "runs"}, flush=True)
        if args.out is not None:
            rest = iter(sys.argv[1:])
            kept = [item for item in rest if item not in ("--before", "--out") or next(rest, None) is None]
            typed = shlex.join(["python", "benchmarks/full_batches.py", *kept])
            more = {"command": typed, "commit": commit(), "load_average": os.getloadavg()}
            append_record(args.out, cell | more | {"environment": Environment.detect()})


def commit() -> str:
    """The commit of these sources."""
    folder = Path(__file__).parent
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()

"""What `InferenceEngine.infer` costs over `onnxruntime.InferenceSession.run`, measured.

Both call the same session object: the same graph, the same options, the same threads. Every round times ours, raw, and raw
again, in an order that changes from round to round; the difference between raw and raw again (A/A) says how much of a
difference this machine makes out of nothing. Throughput is counted in short blocks, ours and raw alternating, with 1 to 8
threads calling. Records are appended to `benchmarks/results/overhead-cpu.jsonl`, samples included.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --model other.onnx --batch 4 --check
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import trt_engine as te
from trt_engine.device.info import Clocks, clocks
from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.records.percentiles import percentile
from trt_engine.runtime.feeds import random_feeds, shapes_of
from trt_engine.store import Store

ROOT = Path(__file__).resolve().parents[1]
ALLOWED_US, ALLOWED_PCT, LEAST_RATIO = 15.0, 2.0, 0.97
WAYS = ("ours", "raw", "raw_again")

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Latency:
    """One thread: microseconds of every call, round by round."""

    ours_us: tuple[float, ...]
    raw_us: tuple[float, ...]
    raw_again_us: tuple[float, ...]
    raw_p50_us: float
    overhead_p50_us: float
    overhead_pct: float
    a_a_p50_us: float
    """p50 of raw again minus p50 of raw: what the same call differs from itself."""
    paired_us: float
    """Median over the rounds of ours minus the mean of the two raw calls beside it."""
    a_a_paired_us: float
    """Median over the rounds of raw again minus raw."""
    met: bool


@dataclass(frozen=True, slots=True)
class Throughput:
    """Calls per second of each block, with so many threads calling."""

    threads: int
    ours_per_s: tuple[float, ...]
    raw_per_s: tuple[float, ...]
    raw_again_per_s: tuple[float, ...]
    ratio: float
    """Median over the rounds of ours over the mean of the two raw blocks beside it."""
    a_a_ratio: float
    """Median over the rounds of raw again over raw."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """One model measured."""

    schema: str
    started: str
    command: str
    model: str
    model_digest: str
    batch: int
    options: dict[str, str]
    facts: dict[str, str]
    environment: Environment
    clocks: tuple[Clocks, ...]
    """Before, and after."""
    latency: Latency
    throughput: tuple[Throughput, ...]


def main() -> int:
    parser = argparse.ArgumentParser(description="What `infer` costs over `InferenceSession.run`.")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/digits/model.onnx", help="the real model")
    parser.add_argument("--batch", type=int, default=1, help="rows in one call [1]")
    parser.add_argument("--rounds", type=int, default=2000, help="timed rounds of three calls [2000]")
    parser.add_argument("--blocks", type=int, default=24, help="rounds of throughput blocks [24]")
    parser.add_argument("--block-s", type=float, default=0.1, help="length of one block in seconds [0.1]")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8], help="callers at once [1 2 4 8]")
    parser.add_argument("-O", "--option", action="append", metavar="NAME=VALUE", help="[intra_op_threads=1]")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/overhead-cpu.jsonl")
    parser.add_argument("--check", action="store_true", help="exit 8 when a limit is not kept")
    args = parser.parse_args()
    options = dict(
        option.split("=", 1) for option in args.option or ["intra_op_threads=1"]
    )  # callers compete, not operators
    print(f"{'model':<14}{'raw p50':>11}{'ours adds':>11}{'':>9}{'A/A':>11}{'paired':>11}   ours/raw (A/A) by threads")
    kept = True
    with tempfile.TemporaryDirectory() as folder:
        for path in (tiny(Path(folder)), args.model):
            record = measured(path, args, options, Path(folder))
            append_record(args.out, record)
            print(line(record), flush=True)
            kept &= record.latency.met
            # a call of a few microseconds has no room for 3 %: the ratio is asked of the real model
            kept &= path.parent == Path(folder) or all(item.ratio >= LEAST_RATIO for item in record.throughput)
    print(f"limits: {ALLOWED_US:g} us or {ALLOWED_PCT:g} % at p50, ratio {LEAST_RATIO:g} on the real model: ", end="")
    print("kept" if kept else "NOT kept")
    return 8 if args.check and not kept else 0


def tiny(folder: Path) -> Path:
    """A model of a few microseconds: y = x w + b with eight numbers."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])],
        "tiny",
        [value("x", TensorProto.FLOAT, ["batch", 8])],
        [value("y", TensorProto.FLOAT, ["batch", 8])],
        initializer=[
            helper.make_tensor("w", TensorProto.FLOAT, [8, 8], [i / 64 for i in range(64)]),
            helper.make_tensor("b", TensorProto.FLOAT, [8], [1.0] * 8),
        ],
    )
    path = folder / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def measured(path: Path, args: argparse.Namespace, options: dict[str, str], folder: Path) -> Overhead:
    """Build, load, measure."""
    engine = te.build(path, batch=(1, args.batch, args.batch), options=options, store=Store(folder / "store"))
    before = clocks()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with te.load(engine, options=options) as runner:
        shapes = shapes_of(runner.signature, engine.passport.profiles[0], batch=args.batch)
        calls = ways(runner, random_feeds(runner.signature, shapes))
        for call in calls.values():
            for _ in range(50):
                call()
        latency = timed(calls, args.rounds)
        throughput = tuple(counted(calls, threads, args.blocks, args.block_s) for threads in args.threads)
        facts = runner.runtime_info
    return Overhead(
        schema="trt-engine/overhead",
        started=started,
        command=shlex.join(["python", "benchmarks/overhead.py", *sys.argv[1:]]),
        model=path.stem if path.parent == folder else f"{path.resolve().parent.name}/{path.name}",
        model_digest=engine.passport.model.digest,
        batch=args.batch,
        options=options,
        facts=facts,
        environment=Environment.detect(),
        clocks=(before, clocks()),
        latency=latency,
        throughput=throughput,
    )


def ways(runner: te.InferenceEngine, feeds: dict[str, Any]) -> dict[str, Call]:
    """The same inference three ways, on the session that `runner` holds."""
    session = runner.runner.session._loaded
    assert isinstance(session, ort.InferenceSession)
    names, run, infer = [spec.name for spec in runner.outputs], session.run, runner.infer
    return {
        "ours": lambda: infer(feeds),
        "raw": lambda: run(names, feeds),
        "raw_again": lambda: run(names, feeds),
    }


def timed(calls: dict[str, Call], rounds: int) -> Latency:
    """Every call timed by itself; all six orders of the three ways take turns."""
    clock = time.perf_counter_ns
    samples: dict[str, list[float]] = {way: [] for way in WAYS}
    orders = list(itertools.permutations([(calls[way], samples[way]) for way in WAYS]))
    for number in range(rounds):
        for call, into in orders[number % len(orders)]:
            start = clock()
            call()
            into.append((clock() - start) / 1e3)
    p50 = {way: percentile(sorted(values), 50, "linear") for way, values in samples.items()}
    raw = p50["raw"]
    added = p50["ours"] - raw
    rows = list(zip(*(samples[way] for way in WAYS), strict=True))
    return Latency(
        **{f"{way}_us": tuple(round(value, 2) for value in values) for way, values in samples.items()},
        raw_p50_us=raw,
        overhead_p50_us=added,
        overhead_pct=100 * added / raw,
        a_a_p50_us=p50["raw_again"] - raw,
        paired_us=median(ours - (one + other) / 2 for ours, one, other in rows),
        a_a_paired_us=median(other - one for _, one, other in rows),
        met=added <= max(ALLOWED_US, raw * ALLOWED_PCT / 100),
    )


def counted(calls: dict[str, Call], threads: int, blocks: int, block_s: float) -> Throughput:
    """Calls per second in alternating blocks."""
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    orders = list(itertools.permutations(WAYS))
    for number in range(blocks):
        for way in orders[number % len(orders)]:
            found[way].append(block(calls[way], threads, block_s))
    rows = list(zip(*(found[way] for way in WAYS), strict=True))
    return Throughput(
        threads=threads,
        **{f"{way}_per_s": tuple(round(value, 1) for value in values) for way, values in found.items()},
        ratio=median(ours / ((raw + again) / 2) for ours, raw, again in rows),
        a_a_ratio=median(again / raw for _, raw, again in rows),
    )


def block(call: Call, threads: int, block_s: float) -> float:
    """Calls per second of so many threads, from the first start to the last end."""
    gate, counts, ends = threading.Barrier(threads + 1), [0] * threads, [0.0] * threads

    def caller(index: int) -> None:
        gate.wait()
        until, count = time.perf_counter() + block_s, 0
        while time.perf_counter() < until:
            call()
            count += 1
        counts[index], ends[index] = count, time.perf_counter()

    crowd = [threading.Thread(target=caller, args=(index,)) for index in range(threads)]
    for thread in crowd:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in crowd:
        thread.join()
    return sum(counts) / (max(ends) - start)


def line(record: Overhead) -> str:
    latency = record.latency
    ratios = "  ".join(f"{item.threads}: {item.ratio:.3f} ({item.a_a_ratio:.3f})" for item in record.throughput)
    return (
        f"{record.model:<14.14}{latency.raw_p50_us:>8.1f} us{latency.overhead_p50_us:>8.2f} us"
        f"{latency.overhead_pct:>7.2f} %{latency.a_a_p50_us:>+8.2f} us{latency.paired_us:>8.2f} us   {ratios}"
    )


if __name__ == "__main__":
    sys.exit(main())

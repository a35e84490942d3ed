"""What the batcher makes of many callers of one row on a CPU: against full batches made by hand, and against Ray Serve's.

By hand: batches put together from single rows, run through ONNX Runtime's own `run`, and parted again. The batcher, and
`ray.serve.batch` where Ray is installed, get the same rows from the same closed loop of callers, in asyncio for all: each
caller asks again as soon as it is answered. `ray.serve.batch` is used as its users do, on an async method, in this
process, without a cluster; its batches run in a thread, as ours do. The ways take turns, part by part, in one run. Each part
gives a throughput and its callers' latencies; the demand is 0.90 of the throughput by hand, and a p99 of at most the wait
and (callers / batch + 1) batch times. Then an open loop: Poisson arrivals at 50 % and 80 % of the batcher's own throughput.

    pip install "ray[serve]"  # beside this package, for the peer; without it that way is left out, and the record says so
    python benchmarks/batcher.py
    python benchmarks/batcher.py --callers 256 --batch 64 --seconds 4 --check
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

import trt_engine as te
from trt_engine.device.info import Clocks, clocks
from trt_engine.environment import Environment, distribution_version
from trt_engine.records.base import append_record
from trt_engine.records.percentiles import percentile
from trt_engine.store import Store

ROOT = Path(__file__).resolve().parents[1]
LEAST_RATIO = 0.90

Ask = Callable[[Any], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Part:
    """One stretch of one way."""

    rows_per_s: float
    p50_ms: float
    p99_ms: float
    mean_batch: float
    latencies_ms: tuple[float, ...]
    """Of single requests, evenly chosen; empty for batches made by hand."""


@dataclass(frozen=True, slots=True)
class Load:
    """Poisson arrivals."""

    share: float
    """Of the batcher's throughput in the closed loop."""
    asked_per_s: float
    answered_per_s: float
    refused: int
    p50_ms: float
    p99_ms: float
    latencies_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatcherRecord:
    schema: str
    started: str
    command: str
    model: str
    model_digest: str
    callers: int
    batch: int
    wait_ms: float
    contexts: int
    options: dict[str, str]
    facts: dict[str, str]
    environment: Environment
    peer: str
    """`ray 2.x`, or why it is not there."""
    clocks: tuple[Clocks, ...]
    batch_ms: float
    """A full batch by hand, one after the other: the median."""
    parts: dict[str, tuple[Part, ...]]
    """`by hand`, `batcher`, `ray`; they took turns."""
    loads: dict[str, tuple[Load, ...]]
    ratio: float
    """Median over the rounds of the batcher's throughput over that by hand."""
    peer_ratio: float | None
    """The same for Ray's over that by hand."""
    p99_allowed_ms: float
    met: bool


def main() -> int:
    parser = argparse.ArgumentParser(description="Dynamic batches against batches by hand, and against Ray Serve's.")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/digits/model.onnx")
    parser.add_argument("--callers", type=int, default=64, help="[64]")
    parser.add_argument("--batch", type=int, default=16, help="most rows in a batch [16]")
    parser.add_argument("--wait-ms", type=float, default=5.0, help="longest wait for company [5]")
    parser.add_argument("--contexts", type=int, default=2, help="batches at work at once, in every way [2]")
    parser.add_argument("--rounds", type=int, default=5, help="[5]")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one way in one round [4]")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.8], help="[0.5 0.8]")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/batcher-cpu.jsonl")
    parser.add_argument("--check", action="store_true", help="exit 8 when a limit is not kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record = asyncio.run(measured(args, Store(Path(folder) / "store")))
    append_record(args.out, record)
    print(told(record))
    return 8 if args.check and not record.met else 0


async def measured(args: argparse.Namespace, store: Store) -> BatcherRecord:
    options = {"intra_op_threads": "1"}  # batches compete for the cores, not operators
    engine = te.build(args.model, batch=(1, args.batch, args.batch), options=options, store=store)
    started, before = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), clocks()
    batching = te.Batching(max_batch=args.batch, max_wait_ms=args.wait_ms, max_rows_waiting=10 * args.callers)
    with (
        te.load(engine, options=options) as raw,
        te.load(engine, options=options, contexts=args.contexts, batching=batching) as batched,
        ThreadPoolExecutor(args.contexts) as threads,
    ):
        run = raw.runner.session._loaded.run
        (spec,) = raw.inputs
        names = [item.name for item in raw.outputs]
        draw = np.random.default_rng(0)
        rows = [
            draw.random((1, *(size if size > 0 else 1 for size in spec.shape[1:]))).astype(spec.dtype)
            for _ in range(max(args.batch, 64))
        ]

        def batch_of(parts: list[Any]) -> list[dict[str, Any]]:
            """What the batcher does for its callers, by hand."""
            outputs = run(names, {spec.name: np.concatenate(parts)})
            return [
                {name: np.array(array[number : number + 1]) for name, array in zip(names, outputs, strict=True)}
                for number in range(len(parts))
            ]

        async def ours(x: Any) -> Any:
            return await asyncio.wrap_future(batched.infer_async({spec.name: x}))

        batches: list[int] = []
        ray, peer = peered(batch_of, args, threads, batches)
        asks: dict[str, Ask] = {"batcher": ours} | ({"ray": ray} if ray is not None else {})
        full = rows[: args.batch]
        for _ in range(5):
            batch_of(full)
        alone_ms = [timed_ms(lambda: batch_of(full)) for _ in range(30)]
        for ask in asks.values():
            await closed_loop(ask, rows, args.callers, 0.5)
        parts: dict[str, list[Part]] = {way: [] for way in ("by hand", *asks)}
        for number in range(args.rounds):
            ways = list(parts)
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                if way == "by hand":
                    per_s = await asyncio.to_thread(by_hand, batch_of, full, args.contexts, args.seconds)
                    parts[way].append(Part(per_s, 0.0, 0.0, float(args.batch), ()))
                    continue
                counted = batched.stats().batching
                batches.clear()
                per_s, latencies = await closed_loop(asks[way], rows, args.callers, args.seconds)
                since = batched.stats().batching
                mean = (
                    (since.rows - counted.rows) / max(since.batches - counted.batches, 1)
                    if way == "batcher"
                    else sum(batches) / max(len(batches), 1)
                )
                parts[way].append(Part(per_s, *quantiles(latencies), round(mean, 2), chosen(latencies)))
        closed = median(part.rows_per_s for part in parts["batcher"])
        loads = {
            way: tuple(
                [await open_loop(ask, rows, share, share * closed, 2 * args.seconds, number)
                 for number, share in enumerate(args.loads)]
            )
            for way, ask in asks.items()
        }  # fmt: skip
        facts = batched.runtime_info
    ratio = ratio_of(parts["batcher"], parts["by hand"])
    # a batch beside another one takes as long as the throughput by hand says, not as long as one alone
    batch_ms = args.contexts * args.batch / median(part.rows_per_s for part in parts["by hand"]) * 1e3
    allowed_ms = args.wait_ms + (args.callers / (args.batch * args.contexts) + 1) * batch_ms
    p99_ms = median(part.p99_ms for part in parts["batcher"])
    return BatcherRecord(
        schema="trt-engine/batcher",
        started=started,
        command=shlex.join(["python", "benchmarks/batcher.py", *sys.argv[1:]]),
        model=f"{args.model.resolve().parent.name}/{args.model.name}",
        model_digest=engine.passport.model.digest,
        callers=args.callers,
        batch=args.batch,
        wait_ms=args.wait_ms,
        contexts=args.contexts,
        options=options,
        facts=facts,
        environment=Environment.detect(),
        peer=peer,
        clocks=(before, clocks()),
        batch_ms=median(alone_ms),
        parts={way: tuple(found) for way, found in parts.items()},
        loads=loads,
        ratio=ratio,
        peer_ratio=ratio_of(parts["ray"], parts["by hand"]) if "ray" in parts else None,
        p99_allowed_ms=allowed_ms,
        met=ratio >= LEAST_RATIO and p99_ms <= allowed_ms,
    )


def peered(
    batch_of: Callable[[list[Any]], list[Any]], args: argparse.Namespace, threads: ThreadPoolExecutor, sizes: list[int]
) -> tuple[Ask | None, str]:
    """Ray Serve's batching of the same function, and its version; None where it is not installed."""
    try:
        from ray import serve
        from ray.serve._private.common import DeploymentID, ReplicaID
        from ray.serve.context import _set_internal_replica_context
    except ImportError:
        return None, "ray is not installed: `pip install ray[serve]` beside this package"
    # its queue asks the deployment it is in for a limit and a name, and there is no deployment here
    _set_internal_replica_context(
        replica_id=ReplicaID("here", DeploymentID("batch", "benchmark")),
        servable_object=None,
        _deployment_config=SimpleNamespace(max_ongoing_requests=1 << 30),
        rank=None,
        world_size=1,
    )

    @serve.batch(  # type: ignore[untyped-decorator]
        max_batch_size=args.batch, batch_wait_timeout_s=args.wait_ms / 1e3, max_concurrent_batches=args.contexts
    )
    async def joined(parts: list[Any]) -> list[Any]:
        sizes.append(len(parts))
        return await asyncio.get_running_loop().run_in_executor(threads, batch_of, parts)

    return joined, f"ray {distribution_version('ray')}"


def by_hand(batch_of: Callable[[list[Any]], object], rows: list[Any], threads: int, seconds: float) -> float:
    """Rows per second of so many threads that make full batches."""

    def one(until_s: float) -> int:
        count = 0
        while time.perf_counter() < until_s:
            batch_of(rows)
            count += len(rows)
        return count

    began_s = time.perf_counter()
    with ThreadPoolExecutor(threads) as crowd:
        total = sum(crowd.map(one, [began_s + seconds] * threads))
    return total / (time.perf_counter() - began_s)


async def closed_loop(ask: Ask, rows: list[Any], callers: int, seconds: float) -> tuple[float, list[float]]:
    """Requests per second and milliseconds of each, of callers that ask again when they are answered."""
    began_s = time.perf_counter()
    latencies: list[float] = []

    async def caller(number: int) -> None:
        while (asked_s := time.perf_counter()) < began_s + seconds:
            await ask(rows[number % len(rows)])
            latencies.append((time.perf_counter() - asked_s) * 1e3)

    await asyncio.gather(*(caller(number) for number in range(callers)))
    return len(latencies) / (time.perf_counter() - began_s), latencies


async def open_loop(ask: Ask, rows: list[Any], share: float, per_s: float, seconds: float, seed: int) -> Load:
    """Poisson arrivals; a request's time counts from when it should have been asked, so nothing is left out."""
    draw, latencies, tasks, refused = random.Random(seed), [], set(), 0
    began_s = due_s = time.perf_counter()

    async def one(due_s: float, number: int) -> None:
        nonlocal refused
        try:
            await ask(rows[number % len(rows)])
            latencies.append((time.perf_counter() - due_s) * 1e3)
        except te.TrtEngineError:
            refused += 1

    number = 0
    while due_s < began_s + seconds:
        if (left_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)
        task = asyncio.create_task(one(due_s, number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        due_s += draw.expovariate(per_s)
        number += 1
    await asyncio.gather(*tasks)
    took_s = time.perf_counter() - began_s
    return Load(share, per_s, len(latencies) / took_s, refused, *quantiles(latencies), chosen(latencies))


def timed_ms(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def quantiles(latencies: list[float]) -> tuple[float, float]:
    found = sorted(latencies) or [0.0]
    return percentile(found, 50, "linear"), percentile(found, 99, "linear")


def chosen(latencies: list[float]) -> tuple[float, ...]:
    step = max(len(latencies) // 2000, 1)
    return tuple(round(value, 3) for value in latencies[::step])


def ratio_of(ours: list[Part], theirs: list[Part]) -> float:
    return median(one.rows_per_s / other.rows_per_s for one, other in zip(ours, theirs, strict=True))


def told(record: BatcherRecord) -> str:
    lines = [
        f"{record.model}, {record.callers} callers, up to {record.batch} rows, {record.wait_ms:g} ms, {record.peer}"
    ]
    for way, parts in record.parts.items():
        per_s, p50, p99, mean = (
            median(getattr(part, name) for part in parts) for name in ("rows_per_s", "p50_ms", "p99_ms", "mean_batch")
        )
        lines.append(f"  {way:<8}{per_s:>9.1f} rows/s  p50 {p50:>8.2f} ms  p99 {p99:>8.2f} ms  mean batch {mean:.1f}")
    for way, loads in record.loads.items():
        lines += [
            f"  {way:<8}at {load.share:.0%} ({load.asked_per_s:.0f}/s): {load.answered_per_s:.0f}/s, "
            f"p50 {load.p50_ms:.2f} ms, p99 {load.p99_ms:.2f} ms, refused {load.refused}"
            for load in loads
        ]
    peer = f", ray/by hand {record.peer_ratio:.3f}" if record.peer_ratio is not None else ""
    lines.append(
        f"  batcher/by hand {record.ratio:.3f} (at least {LEAST_RATIO:g}){peer}, p99 up to {record.p99_allowed_ms:.1f} ms: "
        + ("kept" if record.met else "NOT kept")
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""What the batcher makes of many callers of one image, against full batches made by hand that pay the same host copies.

By hand: 64 images put below each other in one array, run through ONNX Runtime's own `run` (upload, inference, download), by
one and by two threads with a session each, and through our own `infer` in full batches; the best counts. The batcher:
256 callers in a closed loop, one image each: 256 threads in `infer`, and 256 futures of `infer_async` renewed by four
threads, which leaves out what threads cost Python. Demanded of the better: at least 0.90 of the best by hand, and a p99 of
at most the wait and (callers / batch + 1) batch times. Then an open loop: Poisson arrivals at 50 % and 80 % of the batcher's
own throughput, with the histogram of latencies.

    python benchmarks/gpu_batcher.py --models vit --seconds 24
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections import Counter

import numpy as np
from gpu_common import Bench, p, parser, rate

import trt_engine as te

LEAST = 0.90


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.set_defaults(models=["vit"])
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--callers", type=int, default=256)
    options.add_argument("--wait-ms", type=float, default=5.0)
    options.add_argument("--contexts", type=int, default=3)
    options.add_argument(
        "--streams", type=int, default=1, help="one: batches follow each other, as each fills the GPU [1]"
    )
    options.add_argument(
        "--buckets", type=int, nargs="+", help="sizes batches are filled up to [the full one: see docs/backends.md]"
    )
    options.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8])
    options.add_argument(
        "--graphs", action="store_true", help="capture the full batch; needs a stream for each context"
    )
    args = options.parse_args()
    bench, kept = Bench(args, "gpu_batcher"), True
    for model in args.models:
        kept &= one(bench, args, model)
    return 0 if kept else 8


def one(bench: Bench, args, model: str) -> bool:
    engine = bench.engine(model, most=args.batch)
    images = bench.feeds(engine, args.batch)
    (name, rows), logits = next(iter(images.items())), engine.signature.outputs[0].name
    singles = [rows[number : number + 1].copy() for number in range(args.batch)]
    graphs = (args.batch,) if bench.on_gpu and args.graphs else False
    part_s = args.seconds / 8
    sessions = [bench.raw(engine) for _ in range(2)]

    def by_hand(session):
        def call() -> object:
            found = session.run([logits], {name: np.concatenate(singles)})[0]
            return [found[number : number + 1].copy() for number in range(args.batch)]

        return call

    calls = [by_hand(session) for session in sessions]
    loaded = {"options": bench.options, "contexts": args.contexts, "streams": args.streams, "graphs": graphs}
    buckets = tuple(args.buckets or (args.batch,))
    batching = te.Batching(max_batch=args.batch, max_wait_ms=args.wait_ms, buckets=buckets)
    with bench.measuring() as (before, started):
        for call in calls:
            call(), call()
        with (
            te.load(engine, **loaded) as plain,
            te.load(engine, **loaded, batching=batching) as runner,
        ):
            plain.warmup(2, batch=args.batch)
            for size in buckets:
                runner.warmup(2, batch=size)

            def full() -> object:
                found = plain.infer({name: np.concatenate(singles)})[logits]
                return [found[number : number + 1].copy() for number in range(args.batch)]

            hand = {"1 session": [], "2 sessions": [], "our full batches": []}
            ours, latencies, others, other_latencies = [], [], [], []
            batch_ms = 0.0
            crowd(runner, name, singles, args.callers, 0.5, [])
            for _ in range(2):
                hand["1 session"].append(rate(calls[:1], part_s / 3, args.batch))
                hand["2 sessions"].append(rate(calls, part_s / 3, args.batch))
                hand["our full batches"].append(rate([full] * args.contexts, part_s / 3, args.batch))
                ours.append(crowd(runner, name, singles, args.callers, part_s, latencies))
                others.append(futures(runner, name, singles, args.callers, part_s, other_latencies))
            start = time.perf_counter()
            for _ in range(10):
                full()
            batch_ms = (time.perf_counter() - start) * 100
            by_threads, by_futures = float(np.mean(ours)), float(np.mean(others))
            capacity = max(by_threads, by_futures)
            if by_futures > by_threads:
                latencies, other_latencies = other_latencies, latencies
            best_way = max(hand, key=lambda way: float(np.mean(hand[way])))
            best = float(np.mean(hand[best_way]))
            bound_ms = args.wait_ms + (args.callers / args.batch + 1) * batch_ms
            p99_ms = p(latencies, 99)
            met = capacity / best >= LEAST and p99_ms <= bound_ms
            stats = runner.stats().batching
            print(
                f"{model}: by hand " + ", ".join(f"{way} {np.mean(values):.0f}/s" for way, values in hand.items())
                + f"; batcher, {args.callers} threads {by_threads:.0f}/s = {by_threads / best:.3f}, {args.callers} futures "
                f"{by_futures:.0f}/s = {by_futures / best:.3f} of {best_way}; the better: "
                f"p50 {p(latencies, 50):.1f} ms, p99 {p99_ms:.1f} ms of {bound_ms:.1f} allowed (one batch {batch_ms:.2f} "
                f"ms); mean batch {getattr(stats, 'mean_batch', float('nan')):.1f}  {'kept' if met else 'NOT kept'}",
                flush=True,
            )  # fmt: skip
            samples = {f"hand {way}_per_s": values for way, values in hand.items()} | {
                "threads_per_s": ours, "futures_per_s": others, "latency_ms": latencies[:: max(len(latencies) // 5000, 1)],
            }  # fmt: skip
            results = {
                "ratio": capacity / best, "ratio_threads": by_threads / best, "ratio_futures": by_futures / best,
                "best_by_hand": best_way, "p99_ms": p99_ms, "p99_bound_ms": bound_ms,
                "p50_ms": p(latencies, 50), "batch_ms": batch_ms, "other_p99_ms": p(other_latencies, 99),
                "batching": str(stats), "open": {},
            }  # fmt: skip
            for load in args.loads:
                found, late_ms = poisson(runner, name, singles, load * capacity, part_s)
                told = Counter(int(value // 2) * 2 for value in found)
                results["open"][f"{load:g}"] = {
                    "rate_per_s": load * capacity, "answered": len(found), "late_p99_ms": p(late_ms, 99),
                    "p50_ms": p(found, 50), "p90_ms": p(found, 90), "p99_ms": p(found, 99), "max_ms": max(found),
                    "histogram_2ms": {str(key): told[key] for key in sorted(told)},
                }  # fmt: skip
                print(
                    f"  Poisson at {load:.0%} ({load * capacity:.0f}/s): p50 {p(found, 50):.1f}, p90 {p(found, 90):.1f}, "
                    f"p99 {p(found, 99):.1f}, max {max(found):.1f} ms; sent late at p99 by {p(late_ms, 99):.2f} ms\n"
                    + "".join(
                        f"    {key:>4} ms {'#' * round(60 * told[key] / max(told.values()))} {told[key]}\n"
                        for key in sorted(told)[:24]
                    ),
                    end="", flush=True,
                )  # fmt: skip
            facts = runner.runtime_info
    settings = {
        "batch": args.batch, "callers": args.callers, "wait_ms": args.wait_ms,
        "contexts": args.contexts, "streams": args.streams, "buckets": list(buckets),
        "graphs": list(graphs) if graphs else False, "options": bench.options,
    }  # fmt: skip
    bench.write(model, engine, before, started, facts, settings, samples, results, met)
    return met


def crowd(runner, name: str, singles, callers: int, seconds: float, latencies: list[float]) -> float:
    """Images per second of so many callers in a closed loop."""
    taken: list[list[float]] = [[] for _ in range(callers)]

    def call(number: int):
        image, into, infer = {name: singles[number % len(singles)]}, taken[number], runner.infer

        def once() -> object:
            start = time.perf_counter()
            found = infer(image)
            into.append((time.perf_counter() - start) * 1e3)
            return found

        return once

    found = rate([call(number) for number in range(callers)], seconds)
    for item in taken:
        latencies += item
    return found


def futures(runner, name: str, singles, callers: int, seconds: float, latencies: list[float]) -> float:
    """Images per second with so many futures out at once; each that is done is asked again by one of four threads."""
    done: queue.SimpleQueue = queue.SimpleQueue()
    clock = time.perf_counter
    start = clock()
    until, count, failed = start + seconds, [0] * 4, []

    def ask(number: int) -> None:
        at = clock()

        def answered(future) -> None:
            if future.exception() is not None:
                failed.append(future.exception())
            latencies.append((clock() - at) * 1e3)
            done.put(number)

        runner.infer_async({name: singles[number % len(singles)]}).add_done_callback(answered)

    def renew(index: int) -> None:
        while (number := done.get()) is not None:
            count[index] += 1
            if clock() < until:
                ask(number)

    for number in range(callers):
        ask(number)
    threads = [threading.Thread(target=renew, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(max(until - clock(), 0) + 1.0)
    for _ in threads:
        done.put(None)
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return (sum(count) - callers) / seconds  # those that were out at the end are not counted


def poisson(runner, name: str, singles, per_s: float, seconds: float) -> tuple[list[float], list[float]]:
    """Latencies from each request's due time, and how late it was sent, in milliseconds."""
    draw, clock = random.Random(0), time.perf_counter
    latencies: list[float] = []
    late: list[float] = []
    left = threading.Semaphore(0)
    due, count, start = 0.0, 0, clock()
    while due < seconds:
        due += draw.expovariate(per_s)
        at = start + due
        while (rest := at - clock()) > 0:
            time.sleep(rest)  # a spin would take the interpreter from those who answer
        late.append((clock() - at) * 1e3)

        def done(future, at: float = at) -> None:
            if future.exception() is None:
                latencies.append((clock() - at) * 1e3)
            left.release()

        runner.infer_async({name: singles[count % len(singles)]}).add_done_callback(done)
        count += 1
    for _ in range(count):
        left.acquire()
    return latencies, late


if __name__ == "__main__":
    sys.exit(main())

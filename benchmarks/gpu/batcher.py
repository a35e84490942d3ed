"""What the batcher makes of many callers of one image, beside full batches made by hand that pay the same host copies.

By hand: 64 images concatenated into one array, run through ONNX Runtime's own `run` by one and by two threads with a
session each, and through our own `infer`; the best counts. The batcher: 256 callers in a closed loop, one image each, as
256 threads in `infer`, and as 256 futures of `infer_async` renewed by four threads. Demanded of the better: at least 0.90
of the best by hand, and a p99 of at most the wait and (callers / batch + 1) batch times. Then an open loop: Poisson
arrivals at 50 % and 80 % of the batcher's own throughput, with the histogram of latencies.

    python benchmarks/gpu/batcher.py --seconds 16
    python benchmarks/gpu/batcher.py --seconds 16 -O cuda.cudnn_conv_algo_search=DEFAULT --buckets 1 2 4 8 16 32 64
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

import numpy as np
from common import Bench, Call, Crowd, each_model, kept, parser, rate, rounded

import trt_engine as te

LEAST = 0.90


def percentiles_ms(values: list[float]) -> dict[str, float]:
    p50, p90, p99, largest = (float(value) for value in np.percentile(values, (50, 90, 99, 100)))
    return {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99, "max_ms": largest}


class Callers:
    """Requests of one image each to a runner, and their latencies in milliseconds."""

    def __init__(self, runner: te.InferenceEngine, singles: list[dict[str, np.ndarray]]) -> None:
        self.engine, self.singles = runner, singles

    def threads(self, count: int) -> tuple[list[Call], list[list[float]]]:
        """A call for each thread, and where it notes its latencies."""
        taken: list[list[float]] = [[] for _ in range(count)]

        def caller(number: int) -> Call:
            image, note, infer = self.singles[number % len(self.singles)], taken[number].append, self.engine.infer

            def call() -> None:
                start = time.perf_counter()
                infer(image)
                note((time.perf_counter() - start) * 1e3)

            return call

        return [caller(number) for number in range(count)], taken

    def ask(self, number: int, due: float, note: list[float], done: Callable[[Future[Any]], None]) -> None:
        def answered(future: Future[Any]) -> None:
            note.append((time.perf_counter() - due) * 1e3)
            done(future)

        self.engine.infer_async(self.singles[number % len(self.singles)]).add_done_callback(answered)

    def futures(self, count: int, seconds: float, note: list[float]) -> float:
        """Images per second with so many futures in flight; each that is done is renewed by one of four threads."""
        done: queue.SimpleQueue[Future[Any] | None] = queue.SimpleQueue()
        start, clock, failed, counts = time.perf_counter(), time.perf_counter, [], [0] * 4

        def renew(index: int) -> None:
            while (future := done.get()) is not None:
                if (error := future.exception()) is not None:
                    failed.append(error)
                elif clock() < start + seconds:
                    counts[index] += 1
                    self.ask(counts[index], clock(), note, done.put)

        for number in range(count):
            self.ask(number, clock(), note, done.put)
        threads = [threading.Thread(target=renew, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(max(start + seconds - clock(), 0) + 1.0)  # the last ones are answered, and not counted
        for _ in threads:
            done.put(None)
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        return sum(counts) / seconds

    def poisson(self, per_s: float, seconds: float) -> tuple[list[float], list[float]]:
        """Latencies from each request's due time, and how late each was sent, in milliseconds."""
        draw, clock, answered = random.Random(0), time.perf_counter, threading.Semaphore(0)
        latencies: list[float] = []
        late: list[float] = []
        failed: list[BaseException] = []

        def done(future: Future[Any]) -> None:
            if (error := future.exception()) is not None:
                failed.append(error)
            answered.release()

        due = start = clock()
        while (due := due + draw.expovariate(per_s)) < start + seconds:
            while (rest := due - clock()) > 0:
                time.sleep(rest)  # a spin would take the interpreter from those who answer
            late.append((clock() - due) * 1e3)
            self.ask(len(late), due, latencies, done)
        for _ in late:
            answered.acquire()
        if failed:
            raise failed[0]
        return latencies, late


def by_hand(singles: list[dict[str, np.ndarray]], run: Callable[[dict[str, np.ndarray]], np.ndarray]) -> Call:
    """One full batch as a caller makes it: images concatenated, run, and each answer copied out."""
    name = next(iter(singles[0]))

    def call() -> object:
        rows = run({name: np.concatenate([image[name] for image in singles])})
        return [rows[number : number + 1].copy() for number in range(len(singles))]

    return call


def measure(bench: Bench, model: str) -> bool:
    args = bench.args
    engine = bench.engine(model, args.batch, usual=args.batch)
    ((name, rows),) = bench.feeds(engine, args.batch).items()
    singles, output = (
        [{name: rows[number : number + 1].copy()} for number in range(args.batch)],
        engine.signature.outputs,
    )
    buckets = tuple(args.buckets or (args.batch,))
    settings = {
        "contexts": args.contexts, "streams": args.streams, "graphs": (args.batch,) if args.graphs else False,
    }  # fmt: skip
    batching = te.Batching(max_batch=args.batch, max_wait_ms=args.wait_ms, buckets=buckets)
    with ExitStack() as stack:
        plain = stack.enter_context(te.load(engine, **settings))
        runner = stack.enter_context(te.load(engine, **settings, batching=batching))
        plain.warmup(2, batch=args.batch)
        for size in buckets:
            runner.warmup(2, batch=size)
        wanted = [output[0].name]
        sessions = [bench.session(engine) for _ in range(2)]
        raw = [by_hand(singles, lambda feeds, run=session.run: run(wanted, feeds)[0]) for session in sessions]
        full = by_hand(singles, lambda feeds: plain.infer(feeds)[wanted[0]])
        ways = {"1 session": raw[:1], "2 sessions": raw, "our full batches": [full] * args.contexts}
        bench.begin()
        samples, latencies, batch_ms = closed_loops(bench, Callers(runner, singles), ways, full)
        means = {way: float(np.mean(values)) for way, values in samples.items()}
        best_way = max(ways, key=lambda way: means[way])
        better = max(("threads", "futures"), key=lambda way: means[way])
        bound_ms = args.wait_ms + (args.callers / args.batch + 1) * batch_ms
        taken = percentiles_ms(latencies[better])
        met = means[better] >= LEAST * means[best_way] and taken["p99_ms"] <= bound_ms
        results = {
            "ratio": means[better] / means[best_way], "better": better, "best_by_hand": best_way, **taken,
            **{f"ratio_{way}": means[way] / means[best_way] for way in ("threads", "futures")},
            "p99_bound_ms": bound_ms, "batch_ms": batch_ms, "batching": str(runner.stats().batching),
        }  # fmt: skip
        print(
            f"{model}: " + ", ".join(f"{way} {value:.0f}/s" for way, value in means.items())
            + f"; {better} {results['ratio']:.3f} of {best_way}, p50 {taken['p50_ms']:.1f} ms, p99 {taken['p99_ms']:.1f} of "
            f"{bound_ms:.1f} ms (one batch {batch_ms:.2f} ms)  {kept(met)}", flush=True,
        )  # fmt: skip
        results["open"] = open_loops(bench, Callers(runner, singles), means[better])
        facts = runner.runtime_info
    given = {key: getattr(args, key) for key in ("batch", "callers", "wait_ms")} | settings | {"buckets": buckets}
    recorded = {f"{way}_per_s": values for way, values in samples.items()}
    recorded |= {f"{way}_ms": rounded(values) for way, values in latencies.items()}
    bench.write(model=model, facts=facts, settings=given, samples=recorded, results=results, met=met)
    return met


def closed_loops(
    bench: Bench, callers: Callers, ways: dict[str, list[Call]], full: Call
) -> tuple[dict[str, list[float]], dict[str, list[float]], float]:
    """Images per second of each way, latencies of the batcher's two, and the milliseconds of one full batch."""
    args, part_s = bench.args, bench.args.seconds / 8
    samples: dict[str, list[float]] = {way: [] for way in (*ways, "threads", "futures")}
    calls, taken = callers.threads(args.callers)
    futures_ms: list[float] = []
    with Crowd(calls, warm=1) as crowd:
        crowd.rate(0.5)
        for values in taken:
            values.clear()
        for _ in range(2):
            for way, own in ways.items():
                samples[way].append(rate(own, part_s / 3, args.batch))
            samples["threads"].append(crowd.rate(part_s))
            samples["futures"].append(callers.futures(args.callers, part_s, futures_ms))
    start = time.perf_counter()
    for _ in range(10):
        full()
    batch_ms = (time.perf_counter() - start) * 100
    return samples, {"threads": [value for values in taken for value in values], "futures": futures_ms}, batch_ms


def open_loops(bench: Bench, callers: Callers, capacity: float) -> dict[str, dict[str, Any]]:
    """The latencies under Poisson arrivals, by the share of the capacity."""
    found = {}
    for load in bench.args.loads:
        latencies, late = callers.poisson(load * capacity, bench.args.seconds / 8)
        counts = Counter(int(value // 2) * 2 for value in latencies)
        taken = percentiles_ms(latencies)
        found[f"{load:g}"] = {
            "rate_per_s": load * capacity, "answered": len(latencies), "late_p99_ms": percentiles_ms(late)["p99_ms"],
            **taken, "histogram_2ms": {str(key): counts[key] for key in sorted(counts)},
        }  # fmt: skip
        print(
            f"  Poisson at {load:.0%} ({load * capacity:.0f}/s): " + ", ".join(f"{k} {v:.1f}" for k, v in taken.items())
        )
    return found


def main() -> int:
    options = parser(__doc__, "vit")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--callers", type=int, default=256)
    options.add_argument("--wait-ms", type=float, default=5.0)
    options.add_argument("--contexts", type=int, default=3)
    options.add_argument("--streams", type=int, default=1, help="one: each batch fills the GPU [1]")
    options.add_argument("--buckets", type=int, nargs="+", help="sizes that batches are padded to [the full one]")
    options.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8])
    options.add_argument("--graphs", action="store_true", help="capture full batches; give each context a stream")
    return each_model(options.parse_args(), "gpu-batcher", measure)


if __name__ == "__main__":
    sys.exit(main())

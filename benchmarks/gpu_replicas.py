"""How throughput grows with GPUs: one `InferenceEngine` over 1, 2, 4, ... of them, inputs in pinned memory.

Each GPU has `--contexts` contexts, and twice as many callers ask, with batches that lie in pinned memory; outputs come back
to the host. The sizes take turns. Demanded: at least 0.97 of linear. Beside it, what may limit it: the rate at which the
GPUs take pinned copies, alone and all at once.

    python benchmarks/gpu_replicas.py --gpus 1 2 --models vit
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from statistics import median

import numpy as np
from gpu_common import Bench, parser, rate

import trt_engine as te
from trt_engine.device import open_device

LEAST = 0.97


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--contexts", type=int, default=2)
    args = options.parse_args()
    bench, kept = Bench(args, "gpu_replicas"), True
    for model in args.models:
        kept &= one(bench, args, model)
    return 0 if kept else 8


def one(bench: Bench, args, model: str) -> bool:
    engine = bench.engine(model, most=max(args.batch, 64))
    feeds = bench.feeds(engine, args.batch)
    sizes = args.gpus if bench.on_gpu else [1]
    copies = {str(count): copying(count) for count in sizes} if bench.on_gpu else {}
    with bench.measuring() as (before, started), ExitStack() as stack:
        runners, calls, held = {}, {}, []
        for count in sizes:
            where = {"devices": [f"cuda:{number}" for number in range(count)]} if bench.on_gpu else {}
            graphs = (args.batch,) if bench.on_gpu else False
            runner = stack.enter_context(
                te.load(engine, options=bench.options, contexts=args.contexts, graphs=graphs, **where)
            )
            runner.warmup(2, batch=args.batch)
            runners[count], calls[count] = runner, []
            for _ in range(2 * args.contexts * count):
                mine, more = pinned(feeds, bench.on_gpu)
                held.append(more)
                calls[count].append(lambda runner=runner, mine=mine: runner.infer(mine))
        rows: dict[int, list[float]] = {count: [] for count in sizes}
        for _ in range(3):
            for count in sizes:
                rows[count].append(rate(calls[count], args.seconds / (3 * len(sizes)), args.batch))
        facts = runners[sizes[-1]].runtime_info
    found = {count: median(values) for count, values in rows.items()}
    linear = {count: found[count] / (found[sizes[0]] / sizes[0] * count) for count in sizes}
    met = all(value >= LEAST for value in linear.values())
    for count in sizes:
        moved = found[count] * next(iter(feeds.values())).nbytes / args.batch / 1e9
        print(
            f"{model} batch {args.batch}, {count} GPU: {found[count]:.0f} images/s, {linear[count]:.3f} of linear; "
            f"{moved:.2f} GB/s of inputs, pinned copies alone reach {copies.get(str(count), float('nan')):.1f} GB/s",
            flush=True,
        )
    settings = {"batch": args.batch, "contexts": args.contexts, "gpus": sizes, "options": bench.options}
    results = {"linear": {str(key): value for key, value in linear.items()}, "copy_gb_per_s": copies}
    samples = {f"{count}_gpu_per_s": values for count, values in rows.items()}
    bench.write(model, engine, before, started, facts, settings, samples, results, met)
    return met


def pinned(feeds: dict, on_gpu: bool) -> tuple[dict, object]:
    """The feeds in pinned memory, and what keeps it."""
    if not on_gpu:
        return feeds, None
    device, made, held = open_device("cuda:0"), {}, []
    for name, array in feeds.items():
        buffer = device.pinned(array.nbytes)
        made[name] = buffer.array(array.dtype.name, array.shape)
        np.copyto(made[name], array)
        held.append(buffer)
    return made, (device, held)


def copying(count: int, seconds: float = 0.5, nbytes: int = 19 << 20) -> float:
    """GB/s of pinned memory to so many GPUs at once."""
    moved = [0] * count

    def work(number: int) -> None:
        device = open_device(f"cuda:{number}")
        stream, source, target = device.stream(), device.pinned(nbytes), device.allocate(nbytes)
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            for _ in range(8):
                device.copy(source, target, nbytes, stream)
            stream.synchronize()
            moved[number] += 8 * nbytes
        for item in (source, target, stream, device):
            item.close()

    crowd = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    start = time.perf_counter()
    for thread in crowd:
        thread.start()
    for thread in crowd:
        thread.join()
    return sum(moved) / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    sys.exit(main())

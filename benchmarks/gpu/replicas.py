"""How throughput grows with GPUs: one engine over 1, 2, 4, ... of them, inputs in pinned memory.

Each GPU has `--contexts` contexts, and twice as many callers ask, each with a batch in pinned memory of torch's; outputs
come back to the host. The sizes take turns. Demanded: at least 0.97 of linear. Beside it, what may limit it: the rate at
which the GPUs take pinned copies all at once.

    python benchmarks/gpu/replicas.py --gpus 1 2 --models vit
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from statistics import median

import numpy as np
from common import Bench, Crowd, each_model, kept, parser, rate

import trt_engine as te

LEAST = 0.97


def pinned(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The feeds as numpy arrays in pinned memory of torch's."""
    import torch

    return {name: torch.from_numpy(array).pin_memory().numpy() for name, array in feeds.items()}


def copies_gb_per_s(count: int, seconds: float = 0.5, nbytes: int = 19 << 20) -> float:
    """GB/s of pinned memory to so many GPUs at once, one thread each."""
    import torch

    def copier(number: int):
        source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        target, stream = torch.empty_like(source, device=f"cuda:{number}"), torch.cuda.Stream(number)

        def copy() -> None:
            with torch.cuda.stream(stream):
                for _ in range(8):
                    target.copy_(source, non_blocking=True)
            stream.synchronize()

        return copy

    return rate([copier(number) for number in range(count)], seconds, 8 * nbytes) / 1e9


def measure(bench: Bench, model: str) -> bool:
    args, sizes = bench.args, bench.args.gpus if bench.on_gpu else [1]
    engine = bench.engine(model, max(args.batch, 64), usual=args.batch)
    feeds = bench.feeds(engine, args.batch)
    copies = {count: copies_gb_per_s(count) for count in sizes} if bench.on_gpu else {}
    rows: dict[int, list[float]] = {count: [] for count in sizes}
    bench.begin()
    with ExitStack() as stack:
        crowds = {}
        for count in sizes:
            where = {"devices": [f"cuda:{number}" for number in range(count)]} if bench.on_gpu else {}
            graphs = (args.batch,) if bench.on_gpu else False
            runner = stack.enter_context(te.load(engine, contexts=args.contexts, graphs=graphs, **where))
            runner.warmup(2, batch=args.batch)
            own = [pinned(feeds) if bench.on_gpu else feeds for _ in range(2 * args.contexts * count)]
            calls = [lambda runner=runner, mine=mine: runner.infer(mine) for mine in own]
            crowds[count] = stack.enter_context(Crowd(calls))
            facts = runner.runtime_info
        for _ in range(3):
            for count, crowd in crowds.items():
                rows[count].append(crowd.rate(args.seconds / (3 * len(sizes)), args.batch))
    found = {count: median(values) for count, values in rows.items()}
    linear = {count: found[count] / (found[sizes[0]] / sizes[0] * count) for count in sizes}
    for count in sizes:
        moved = found[count] * next(iter(feeds.values())).nbytes / args.batch / 1e9
        print(
            f"{model} batch {args.batch}, {count} GPU: {found[count]:.0f} images/s, {linear[count]:.3f} of linear "
            f"({kept(linear[count] >= LEAST)}); {moved:.2f} GB/s of inputs, pinned copies alone "
            f"{copies.get(count, float('nan')):.1f} GB/s",
            flush=True,
        )
    met = min(linear.values()) >= LEAST
    bench.write(
        model=model, facts=facts, settings={"batch": args.batch, "contexts": args.contexts, "gpus": sizes},
        samples={f"{count}_gpu_per_s": values for count, values in rows.items()},
        results={"linear": linear, "copy_gb_per_s": copies}, met=met,
    )  # fmt: skip
    return met


def main() -> int:
    options = parser(__doc__, "vit", "resnet50")
    options.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--contexts", type=int, default=2)
    return each_model(options.parse_args(), "gpu-replicas", measure)


if __name__ == "__main__":
    sys.exit(main())

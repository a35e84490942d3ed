"""How much of the best that ONNX Runtime's sessions and threads reach one engine reaches, with one image in a call.

A sweep of raw ONNX Runtime finds the best: sessions times threads, with and without the provider's own CUDA graphs (a
graph belongs to the thread that captured it: a session for each thread). Then one `te.load(contexts=8)` and the best of
the sweep take turns, with 1 to 64 callers. Tensors on the device, in and out. Demanded: at least 0.95 of the best of as
many threads or fewer.

    python benchmarks/gpu/pool.py --models vit --seconds 20
"""

from __future__ import annotations

import itertools
import sys
from statistics import median

from common import Bench, Call, Crowd, each_model, kept, parser

import trt_engine as te

LEAST = 0.95


def sweep(bench: Bench, engine: te.Engine) -> dict[str, Crowd]:
    """A crowd of callers for each way to use ONNX Runtime, by its name."""
    args, feeds = bench.args, bench.feeds(engine, 1)
    ways: dict[str, list[Call]] = {}
    plain = [bench.session(engine) for _ in range(max(args.sessions))]
    for count, threads in itertools.product(args.sessions, args.callers):
        if threads >= count:
            calls = [bench.bound(engine, plain[number % count], feeds) for number in range(threads)]
            ways[f"{count} sessions x {threads} threads"] = calls
    if bench.on_gpu and not args.no_graphs:
        captured = [bench.session(engine, enable_cuda_graph="1") for _ in range(max(args.sessions))]
        for count in args.sessions:
            calls = [bench.bound(engine, session, feeds) for session in captured[:count]]
            ways[f"{count} sessions x {count} threads, graphs"] = calls
    return {name: Crowd(calls) for name, calls in ways.items()}


def measure(bench: Bench, model: str) -> bool:
    args = bench.args
    engine = bench.engine(model)
    feeds = bench.feeds(engine, 1)
    crowds = sweep(bench, engine)
    bench.begin()
    found = {}
    for name, crowd in crowds.items():
        crowd.rate(0.1)
        found[name] = crowd.rate(args.seconds / (2 * len(crowds)))
    print(f"{model}: raw, images/s")
    for name in sorted(found, key=lambda name: -found[name])[:8]:
        print(f"  {name:<36}{found[name]:>10.1f}")
    graphs = bench.on_gpu and not args.no_graphs
    samples, results, met = {}, {}, True
    with te.load(engine, contexts=args.contexts, graphs=graphs) as runner:
        runner.warmup(2, batch=1)
        for callers in args.callers:
            best = max((name for name in crowds if len(crowds[name].calls) <= callers), key=lambda name: found[name])
            rows = []
            with Crowd([bench.ours(runner, feeds) for _ in range(callers)]) as mine:
                mine.rate(0.1)
                block_s = max(args.seconds / (2 * 2 * 3 * len(args.callers)), 0.1)
                for _ in range(3):
                    rows.append((mine.rate(block_s), crowds[best].rate(block_s)))
            ratio, of_all = median(ours / raw for ours, raw in rows), median(ours for ours, _ in rows)
            samples |= {f"ours_{callers}_per_s": [ours for ours, _ in rows]}
            samples |= {f"raw_{callers}_per_s": [raw for _, raw in rows]}
            results[str(callers)] = {"raw": best, "ratio": ratio, "of_all": of_all / max(found.values())}
            met &= ratio >= LEAST
            print(
                f"  {callers:>2} callers: ours {of_all:>9.1f}/s, best raw {median(raw for _, raw in rows):>9.1f}/s "
                f"({best}): {ratio:.3f}  {kept(ratio >= LEAST)}",
                flush=True,
            )
        facts = runner.runtime_info
    for crowd in crowds.values():
        crowd.close()
    bench.write(
        model=model, facts=facts, settings={"contexts": args.contexts, "graphs": graphs}, samples=samples,
        results={"sweep_per_s": found, "callers": results}, met=met,
    )  # fmt: skip
    return met


def main() -> int:
    options = parser(__doc__, "vit")
    options.add_argument("--sessions", type=int, nargs="+", default=[1, 4, 8])
    options.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    options.add_argument("--contexts", type=int, default=8)
    options.add_argument("--no-graphs", action="store_true")
    return each_model(options.parse_args(), "gpu-pool", measure)


if __name__ == "__main__":
    sys.exit(main())

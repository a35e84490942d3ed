"""How much of the best that ONNX Runtime's sessions and threads reach one `InferenceEngine` reaches, one image a call.

First a sweep of raw ONNX Runtime finds the best: sessions times threads, with and without the provider's own graphs (a
graph belongs to the thread that captured it, so those have a session for each thread). Then our pool and the best of the
sweep take turns, with 1 to 64 callers. Arrays lie on the device, in and out. Demanded: at least 0.95 of the best of as many
threads or fewer; the ratio to the best of all is told as well.

    python benchmarks/gpu_pool.py --models vit --seconds 30
"""

from __future__ import annotations

import itertools
import sys
from statistics import median

from gpu_common import Bench, Call, Crowd, parser

import trt_engine as te

LEAST = 0.95


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--callers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64])
    options.add_argument("--contexts", type=int, default=8)
    options.add_argument("--no-graphs", action="store_true")
    args = options.parse_args()
    bench, kept = Bench(args, "gpu_pool"), True
    for model in args.models:
        kept &= one(bench, args, model)
    return 0 if kept else 8


def one(bench: Bench, args, model: str) -> bool:
    engine = bench.engine(model)
    feeds = bench.feeds(engine, 1)
    sessions = [bench.raw(engine) for _ in range(max(args.sessions))]
    graphs = bench.on_gpu and not args.no_graphs
    captured = [bench.raw(engine, enable_cuda_graph="1") for _ in range(max(args.sessions) if graphs else 0)]
    cells: dict[str, tuple[int, list[Call]]] = {}
    for count, threads in itertools.product(args.sessions, args.callers):
        if threads >= count:
            calls = [bench.bound(sessions[number % count], feeds) for number in range(threads)]
            cells[f"{count} sessions x {threads} threads"] = (threads, calls)
    for count in args.sessions if graphs else ():
        calls = [bench.bound(captured[number], feeds) for number in range(count)]
        cells[f"{count} sessions x {count} threads, graphs"] = (count, calls)
    slice_s = args.seconds / (2 * len(cells))
    print(f"{model}: raw, images/s")
    found: dict[str, float] = {}
    with bench.measuring() as (before, started):
        crowds = {name: Crowd(calls) for name, (_, calls) in cells.items()}
        for name, crowd in crowds.items():
            crowd.rate(0.1)
            found[name] = crowd.rate(slice_s)
        for name in sorted(found, key=lambda name: -found[name])[:8]:
            print(f"  {name:<36}{found[name]:>10.1f}")
        wanted = {"contexts": args.contexts, "options": bench.options, "graphs": graphs}
        with te.load(engine, **wanted) as runner:
            runner.warmup(2, batch=1)
            block_s = max(args.seconds / (2 * 2 * 3 * len(args.callers)), 0.1)
            samples, results, kept = {}, {}, True
            overall = max(found.values())
            for callers in args.callers:
                best = max((n for n in cells if cells[n][0] <= callers), key=lambda n: found[n])
                mine = Crowd([bench.ours(runner, feeds) for _ in range(callers)])
                mine.rate(0.1)
                rows = []
                for _ in range(3):
                    rows.append((mine.rate(block_s), crowds[best].rate(block_s)))
                mine.close()
                ratio = median(ours / raw for ours, raw in rows)
                samples[f"ours_{callers}_per_s"] = [ours for ours, _ in rows]
                samples[f"raw_{callers}_per_s"] = [raw for _, raw in rows]
                results[str(callers)] = {
                    "raw": best, "ratio": ratio, "of_all": median(ours for ours, _ in rows) / overall,
                }  # fmt: skip
                kept &= ratio >= LEAST
                print(
                    f"  {callers:>2} callers: ours {median(o for o, _ in rows):>9.1f}/s, best raw of as many threads "
                    f"{median(r for _, r in rows):>9.1f}/s ({best}): {ratio:.3f}; of the best of all "
                    f"{results[str(callers)]['of_all']:.3f}  {'kept' if ratio >= LEAST else 'NOT kept'}",
                    flush=True,
                )
            facts = runner.runtime_info
        for crowd in crowds.values():
            crowd.close()
    settings = {"contexts": args.contexts, "graphs": graphs, "options": bench.options}
    bench.write(
        model, engine, before, started, facts, settings, samples, {"sweep_per_s": found, "callers": results}, kept
    )
    return kept


if __name__ == "__main__":
    sys.exit(main())

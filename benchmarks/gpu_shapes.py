"""What a change of shape costs on ONNX Runtime's CUDA provider: four batch sizes, each again and again, and in turn.

Both call the same session with the same four batches; "again" stays with one size, "in turn" changes it from call to call.
Every round times both. The difference is what ONNX Runtime does when a convolution sees another shape than last time.

    python benchmarks/gpu_shapes.py
    python benchmarks/gpu_shapes.py -O cuda.cudnn_conv_algo_search=DEFAULT
"""

from __future__ import annotations

import sys
import time
from statistics import median

from gpu_common import Bench, parser

import trt_engine as te


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    args = options.parse_args()
    bench = Bench(args, "gpu_shapes")
    print(
        f"{'model':<10}{'again':>12}{'in turn':>12}{'a change':>12}   ms for {len(args.batches)} batches of {args.batches}"
    )
    for model in args.models:
        engine = bench.engine(model, most=max(args.batches))
        batches = [bench.feeds(engine, size) for size in args.batches]
        with bench.measuring() as (before, started), te.load(engine, options=bench.options) as runner:
            for feeds in batches:
                runner.infer(feeds), runner.infer(feeds)
            samples: dict[str, list[float]] = {"again_ms": [], "in_turn_ms": []}
            until = time.perf_counter() + args.seconds
            while time.perf_counter() < until or len(samples["again_ms"]) < 3:
                again = 0.0
                for feeds in batches:
                    runner.infer(feeds)  # the change itself is not counted
                    start = time.perf_counter()
                    runner.infer(feeds)
                    again += time.perf_counter() - start
                start = time.perf_counter()
                for feeds in batches:
                    runner.infer(feeds)
                samples["in_turn_ms"].append((time.perf_counter() - start) * 1e3)
                samples["again_ms"].append(again * 1e3)
            facts = runner.runtime_info
        again_ms, in_turn_ms = median(samples["again_ms"]), median(samples["in_turn_ms"])
        results = {
            "again_ms": again_ms, "in_turn_ms": in_turn_ms, "change_ms": (in_turn_ms - again_ms) / len(batches),
        }  # fmt: skip
        settings = {"batches": args.batches, "options": bench.options}
        bench.write(model, engine, before, started, facts, settings, samples, results, None)
        print(f"{model:<10}{again_ms:>12.1f}{in_turn_ms:>12.1f}{results['change_ms']:>12.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a change of shape costs on ONNX Runtime's CUDA provider: four batch sizes, each again and again, and in turn.

Both call the same engine with the same four batches of numpy arrays; "again" stays with one size, "in turn" changes it
from call to call. The difference is what ONNX Runtime does when a convolution sees another shape than last time.

    python benchmarks/gpu/shapes.py
    python benchmarks/gpu/shapes.py -O cuda.cudnn_conv_algo_search=DEFAULT
"""

from __future__ import annotations

import sys
import time
from statistics import median

from common import Bench, each_model, parser, rounded

import trt_engine as te


def measure(bench: Bench, model: str) -> bool:
    sizes, clock = bench.args.batches, time.perf_counter
    engine = bench.engine(model, max(sizes), time_budget_s=0.0)  # with the options given, not with measured ones
    batches = [bench.feeds(engine, size) for size in sizes]
    again_ms, in_turn_ms = [], []
    bench.begin()
    with te.load(engine) as runner:
        until = clock() + bench.args.seconds
        while clock() < until or len(again_ms) < 4:
            taken_s = 0.0
            for feeds in batches:
                runner.infer(feeds)  # the change itself is not counted
                start = clock()
                runner.infer(feeds)
                taken_s += clock() - start
            start = clock()
            for feeds in batches:
                runner.infer(feeds)
            again_ms.append(taken_s * 1e3)
            in_turn_ms.append((clock() - start) * 1e3)
        facts = runner.runtime_info
    again, in_turn = median(again_ms[1:]), median(in_turn_ms[1:])  # the first round is the warm-up
    results = {"again_ms": again, "in_turn_ms": in_turn, "change_ms": (in_turn - again) / len(sizes)}
    samples = {"again_ms": rounded(again_ms), "in_turn_ms": rounded(in_turn_ms)}
    bench.write(model=model, facts=facts, settings={"batches": sizes}, samples=samples, results=results, met=None)
    print(
        f"{model:<10} {sizes}: again {again:.1f} ms, in turn {in_turn:.1f} ms, {results['change_ms']:.2f} ms a change"
    )
    return True


def main() -> int:
    options = parser(__doc__, "vit", "resnet50")
    options.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32, 64])
    return each_model(options.parse_args(), "gpu-shapes", measure)


if __name__ == "__main__":
    sys.exit(main())

"""Replaying a graph through `infer`, against ONNX Runtime replaying a graph of its own, measured.

Ours: `te.load(graphs=True)`. Raw: a session with `enable_cuda_graph`, io binding, run until it replays. Batch 1, where a
graph matters most. Two pairs: arrays of the host in and out (raw: `update_inplace`, replay, `numpy`), and arrays on the
device, where raw replays on the same memory again and again and ours copies another's array in and hands an array of its
own out. Demanded: the median at most 1.02 of raw, in both pairs. Raw without a graph is measured beside.

    python benchmarks/gpu_graphs.py
    python benchmarks/gpu_graphs.py -O cuda.prefer_nhwc=1 --models resnet50
"""

from __future__ import annotations

import functools
import sys

import numpy as np
from gpu_common import Bench, interleaved, p, parser

import trt_engine as te

ALLOWED = 1.02


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--batches", type=int, nargs="+", default=[1])
    args = options.parse_args()
    bench, kept = Bench(args, "gpu_graphs"), True
    print(
        "microseconds at the median; host arrays: raw, ours, ratio, A/A; device arrays: the same; raw without a graph"
    )
    for model in args.models:
        engine = bench.engine(model)
        for batch in args.batches:
            feeds = bench.feeds(engine, batch)
            raw, plain = bench.raw(engine, enable_cuda_graph="1"), bench.raw(engine)
            with (
                bench.measuring() as (before, started),
                te.load(engine, options=bench.options, graphs=bench.on_gpu) as runner,
            ):
                host = runner.infer(feeds)
                runner.infer(feeds)  # the second replays what the first captured
                captured = bench.on_gpu and runner.is_captured(feeds)
                call, other, without = bench.ours(runner, feeds), bench.bound(raw, feeds), bench.bound(plain, feeds)
                same = float(np.abs(_host(call(), host) - host["logits"].astype(np.float32)).max())
                ours, hosted = functools.partial(runner.infer, feeds), bench.bound(raw, feeds, from_host=True)
                samples = interleaved(
                    {
                        "ours_host_us": ours, "raw_host_us": hosted, "raw_host_again_us": hosted, "ours_device_us": call,
                        "raw_device_us": other, "raw_device_again_us": other, "no_graph_device_us": without,
                    }, args.seconds,
                )  # fmt: skip
                facts, stats = runner.runtime_info, runner.stats().pool
            middle = {way: p(values, 50) for way, values in samples.items()}
            ratio = middle["ours_host_us"] / middle["raw_host_us"]
            device = middle["ours_device_us"] / middle["raw_device_us"]
            met = max(ratio, device) <= ALLOWED and (captured or not bench.on_gpu)
            kept &= met
            results = {way.replace("_us", "_p50_us"): value for way, value in middle.items()} | {
                "ratio_host": ratio, "ratio_device": device,
                "a_a_host": middle["raw_host_again_us"] / middle["raw_host_us"],
                "a_a_device": middle["raw_device_again_us"] / middle["raw_device_us"],
                "captured": captured, "refused": stats.graphs.disabled_reason if stats else None, "largest_difference": same,
            }  # fmt: skip
            settings = {"batch": batch, "options": bench.options}
            bench.write(model, engine, before, started, facts, settings, samples, results, met)
            print(
                f"{model:<10}{batch:>6}{middle['raw_host_us']:>11.1f}{middle['ours_host_us']:>10.1f}{ratio:>8.3f}"
                f"{results['a_a_host']:>8.3f}{middle['raw_device_us']:>13.1f}{middle['ours_device_us']:>10.1f}{device:>8.3f}"
                f"{results['a_a_device']:>8.3f}{middle['no_graph_device_us']:>11.1f}  {'kept' if met else 'NOT kept'}"
                f"{'' if captured else ' (no graph: ' + str(results['refused']) + ')'}",
                flush=True,
            )
            del raw, plain, other, without
    return 0 if kept else 8


def _host(outputs: dict, like: dict) -> np.ndarray:
    """A device output's values, through DLPack where it is no numpy array."""
    found = outputs["logits"]
    if isinstance(found, np.ndarray):
        return found.astype(np.float32)
    from trt_engine.device import open_device

    device = open_device("cuda:0")
    stream, made = device.stream(), np.empty(like["logits"].shape, like["logits"].dtype)
    device.download(device.borrow(found, stream), made, stream)
    stream.synchronize()
    return made.astype(np.float32)


if __name__ == "__main__":
    sys.exit(main())

"""What the GPU does in an inference, held against what an inference takes without a profiler, measured.

ViT-B/16 in FP16 at batch 64 with ONNX Runtime's CUDA provider, on arrays that stay on the GPU. First the time of an
inference with nothing watching, by the device's events and by the host's clock; then a capture by each rung that works in
this process. Demanded of each: the union of the intervals in which the GPU worked, at the median over inferences, within 5 %
of the time by events. Then ONNX Runtime's own profiler runs inside a capture, and its nodes name the kernels of the first.

    python benchmarks/gpu_profile.py
    python benchmarks/gpu_profile.py --models resnet50 --timeline vit.json
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import onnxruntime as ort
from gpu_common import Bench, Call, p, parser

import trt_engine as te
from trt_engine.config.bench import BenchConfig
from trt_engine.profiling.attribution import Attribution, attribute, onnxruntime_node_spans, transfer_attribution
from trt_engine.profiling.instruments.capture import Capture, ProfilerUnavailable, capture, instrument_status
from trt_engine.profiling.kernels import busy_ns, category_shares, kernel_rows, split_by_inference, time_breakdown
from trt_engine.profiling.timeline import write_timeline
from trt_engine.records.profile import ProfilerName

ALLOWED_PCT = 5.0


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.set_defaults(models=["vit"])
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--inferences", type=int, default=30)
    options.add_argument("--rungs", nargs="+", default=["cupti", "torch"])
    options.add_argument("--timeline", type=Path, help="where the timeline of CUPTI's capture goes")
    args = options.parse_args()
    bench, kept = Bench(args, "gpu_profile"), True
    for rung in instrument_status():
        print(f"{rung.name}: {rung.reason}" + (f" ({rung.fix})" if rung.fix else ""))
    if len(args.rungs) > 1:  # a process has one instrument
        codes = [subprocess.run([sys.executable, *sys.argv, "--rungs", rung]).returncode for rung in args.rungs]
        return max(codes)
    (name,) = args.rungs
    for model in args.models:
        engine = bench.engine(model, most=args.batch)
        kept &= one(bench, model, engine, name, timeline=args.timeline if name == "cupti" else None)
    return 0 if kept else 8


def one(bench: Bench, model: str, engine: te.Engine, rung: ProfilerName, timeline: Path | None) -> bool:
    args = bench.args
    feeds = bench.feeds(engine, args.batch)
    call = bench.bound(bench.raw(engine), feeds)
    with bench.measuring() as (before, started):
        wall_us = walls(call, args.seconds)
        events_ms = by_events(engine, feeds, bench)
        try:
            found = capture(lambda: void(call), inferences=args.inferences, warmup=5, instrument=rung)
        except ProfilerUnavailable as error:
            print(f"{model:<6}{rung} is not to be had: {error}")
            return False
        wall_again_us = walls(call, args.seconds / 4)
    named = layers_by_nodes(bench, engine, feeds, found, rung)
    if timeline is not None:
        write_timeline(
            timeline, activities=found.activities, windows=found.inferences, launches=found.launches,
            layers_of=named.layers, title=f"{model} batch {args.batch}, {found.instrument}",
        )  # fmt: skip
    return told(bench, model, engine, before, started, found, wall_us, wall_again_us, events_ms, named)


def void(call: Call) -> None:
    call()


def walls(call: Call, seconds: float) -> list[float]:
    """Microseconds of each call by the host's clock; a call returns when the device is done."""
    clock, found = time.perf_counter_ns, []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(found) < 10:
        start = clock()
        call()
        found.append((clock() - start) / 1e3)
    return found[5:]


def by_events(engine: te.Engine, feeds: dict[str, Any], bench: Bench) -> list[float]:
    """Milliseconds of the computation by the device's events, on a stream of ours; empty without a GPU."""
    if not bench.on_gpu:
        return []
    from trt_engine.backend import get_backend
    from trt_engine.benchmark.closed_loop import effective_protocol, stage_times
    from trt_engine.config.runtime import RuntimeConfig

    session = get_backend("onnxruntime").load_component("runtime")().load(engine, RuntimeConfig(options=bench.options))
    with contextlib.closing(session):
        _, protocol = effective_protocol(session, BenchConfig())
        return [part.compute_ms for part in stage_times(session, engine, feeds, protocol, queries=100, warmup=10)]


def layers_by_nodes(
    bench: Bench, engine: te.Engine, feeds: dict[str, Any], known: Capture, rung: ProfilerName
) -> Attribution:
    """The node of each kernel: ONNX Runtime's profiler and the capture watch the same inferences of another session."""
    loaded = bench.raw(engine)
    given = loaded.get_provider_options()
    providers = [(name, given[name]) for name in loaded.get_providers()]
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "nodes")
        watched = ort.InferenceSession(str(engine.path), options, providers=providers)
        call = bench.bound(watched, feeds)
        both = capture(lambda: void(call), inferences=5, warmup=5, instrument=rung)
        profile = Path(watched.end_profiling())
        spans = onnxruntime_node_spans(profile, both.inferences, both.launches)
    found = attribute(both, spans=spans)
    carried = transfer_attribution(both, found, known)
    print(f"  nodes: {len(spans)} spans, {found.method} {found.share:.1%} {found.note}; carried over {carried.share:.1%}"
          f" {carried.note}")  # fmt: skip
    return carried


def told(bench: Bench, model: str, engine: te.Engine, before: Any, started: str, found: Capture, wall_us: list[float],
         wall_again_us: list[float], events_ms: list[float], named: Attribution) -> bool:  # fmt: skip
    args = bench.args
    unions_ms = [busy_ns(items) / 1e6 for items in split_by_inference(found)]
    union, wall = statistics.median(unions_ms), p(wall_us, 50) / 1e3
    event = statistics.median(events_ms) if events_ms else None
    against = wall if event is None else event
    ratio = union / against
    rows = kernel_rows(found.activities, args.inferences, named.layers)
    parted = time_breakdown(found, wall_ms=wall, gpu_ms=event)
    windows_ms = [(end - start) / 1e6 for start, end in found.inferences]
    met = abs(ratio - 1) * 100 <= ALLOWED_PCT
    print(
        f"{model:<6}{found.instrument:<28} union {union:.3f} ms, events {event or float('nan'):.3f} ms, wall {wall:.3f} ms"
        f" (watched {statistics.median(windows_ms):.3f}); ratio {ratio:.4f}  {'kept' if met else 'NOT kept'}"
    )
    print(f"  {parted}")
    for warning in found.warnings:
        print(f"  warning: {warning}")
    for share in category_shares(rows, args.inferences):
        print(f"  {share.category:<14}{share.ms:8.3f} ms {share.share:7.1%} {share.count:5d} kernels")
    for row in rows[:12]:
        print(f"  {row.share:6.1%} {row.per_inference:6.1f} x {row.mean_us:8.1f} us  {row.category:<14}{row.short_name[:60]}"
              f"  {', '.join(row.layers[:1])}")  # fmt: skip
    each = args.inferences
    results = {
        "instrument": found.instrument, "union_ms": union, "events_ms": event, "wall_ms": wall, "ratio": ratio,
        "union_over_wall": union / wall, "watched_ms": statistics.median(windows_ms),
        "wall_after_ms": p(wall_again_us, 50) / 1e3, "named_share": named.share, "named_by": named.method,
        "warnings": list(found.warnings),
        "split": {name: getattr(parted, name) for name in (
            "wall_ms", "compute_ms", "busy_ms", "idle_ms", "launch_ms", "kernels", "overlap_ms", "gpu_ms")},
        "categories": {share.category: share.ms for share in category_shares(rows, args.inferences)},
        "kernels": [{"name": row.name, "category": row.category, "calls": row.per_inference, "ms": row.total_ms / each,
                     "share": row.share, "layers": list(row.layers[:3])} for row in rows],
    }  # fmt: skip
    samples = {"union_ms": unions_ms, "watched_ms": windows_ms, "wall_us": wall_us[:500], "events_ms": events_ms}
    settings = {"batch": args.batch, "inferences": args.inferences}
    bench.write(model, engine, before, started, {}, settings, samples, results, met)
    return met


if __name__ == "__main__":
    sys.exit(main())

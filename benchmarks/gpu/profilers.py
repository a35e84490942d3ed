"""What `te.profile` states about the GPU by each profiler, beside the time of the same inference without one.

ViT-B/16 in FP16 at batch 64 with ONNX Runtime's CUDA provider. Demanded of each: the time in which the GPU worked (the
union of its kernels) is within 5 % of the time by the device's events without a profiler. Beside it ONNX Runtime's own io
binding on the same graph, by the host's clock. A process has one profiler, so each runs in its own.

    python benchmarks/gpu/profilers.py --seconds 2
    python benchmarks/gpu/profilers.py --device cpu --profilers layers
"""

from __future__ import annotations

import subprocess
import sys
from statistics import median

from common import Bench, each_model, interleaved, kept, parser, rounded

import trt_engine as te

ALLOWED_PCT = 5.0


def measure(bench: Bench, model: str) -> bool:
    args, (profiler,) = bench.args, bench.args.profilers
    engine = bench.engine(model, args.batch, usual=args.batch)
    bench.begin()
    found = te.profile(
        engine, batch=args.batch, profiler=profiler, inferences=args.inferences, overwrite=True,
        duration_s=args.seconds, out=bench.folder / f"profile-{model}-{profiler}",
    )  # fmt: skip
    call = bench.bound(engine, bench.session(engine), bench.feeds(engine, args.batch))
    wall_us = interleaved({"wall": call}, args.seconds)["wall"]
    parts = found.time_breakdown
    union = parts.working_ms if parts.working_ms is not None else parts.busy_ms
    against = parts.wall_ms if parts.gpu_ms is None else parts.gpu_ms
    ratio = None if union is None else union / against
    met = None if ratio is None else abs(ratio - 1) * 100 <= ALLOWED_PCT
    wall = median(wall_us) / 1e3
    used = next(item.reason for item in found.instruments if item.name == profiler)
    print(
        f"{model} by {profiler} ({used}): union {union or float('nan'):.3f} ms, events {against:.3f} ms, ONNX Runtime's io "
        f"binding {wall:.3f} ms; ratio {ratio or float('nan'):.4f}  {'no demand' if met is None else kept(met)}"
    )
    for warning in found.warnings:
        print(f"  warning: {warning}")
    for share in found.categories:
        print(f"  {share.category:<14}{share.ms:8.3f} ms {share.share:7.1%} {share.count:5d} kernels")
    for row in found.kernels[:8]:
        print(
            f"  {row.share:6.1%} {row.per_inference:6.1f} x {row.mean_us:8.1f} us  {row.category:<14}{row.short_name[:60]}"
        )
    results = {
        "instrument": used, "union_ms": union, "events_ms": parts.gpu_ms, "wall_ms": wall, "ratio": ratio,
        "named_share": sum(row.share for row in found.kernels if row.layers), "warnings": found.warnings,
        "split": {name: getattr(parts, name) for name in (
            "wall_ms", "compute_ms", "busy_ms", "idle_ms", "launch_ms", "kernels", "overlap_ms", "gpu_ms", "working_ms")},
        "categories": {share.category: share.ms for share in found.categories},
        "kernels": [
            {"name": row.name, "category": row.category, "calls": row.per_inference, "share": row.share,
             "ms": row.total_ms / args.inferences, "layers": row.layers[:3]} for row in found.kernels
        ],
    }  # fmt: skip
    settings = {"batch": args.batch, "inferences": args.inferences}
    samples = {"wall_us": rounded(wall_us, 500)}
    bench.write(model=model, facts=found.runtime_info, settings=settings, samples=samples, results=results, met=met)
    return met is not False


def main() -> int:
    options = parser(__doc__, "vit")
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--inferences", type=int, default=30)
    options.add_argument("--profilers", nargs="+", default=["cupti", "torch"])
    args = options.parse_args()
    if len(args.profilers) > 1:
        command = [sys.executable, *sys.argv, "--profilers"]
        return max(subprocess.run([*command, name], check=False).returncode for name in args.profilers)
    return each_model(args, "gpu-profile", measure)


if __name__ == "__main__":
    sys.exit(main())

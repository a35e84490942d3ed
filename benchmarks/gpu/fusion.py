"""Engines as `te.build` makes them for a GPU, fused and with measured settings, beside ONNX Runtime and torch.

ViT-B/16 and ResNet-50 in FP16 (`benchmarks/networks.py`) at batch 1 and 64. Ours: an engine built for that batch, loaded
with `graphs=True` and fed a tensor on the GPU, by `infer` and by `bind`. Peers, in turns: ONNX Runtime with its defaults,
without our fusions, replaying its CUDA graph through io binding; the same architectures in torch, eager and compiled with a
CUDA graph, with packed projections and `scaled_dot_product_attention`, the convolutions channels-last. Errors are against
the same weights in FP32 on the CPU, at batch 1. Demanded: not slower than 1.02 of ONNX Runtime, and within 2e-3 of FP32.

    python benchmarks/gpu/fusion.py --out fusion.jsonl
    python benchmarks/gpu/fusion.py --device cpu --seconds 0.5 --no-torch
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import networks
import numpy as np
import onnxruntime as ort
from gpu_common import Bench, interleaved, p, parser

import trt_engine as te

ALLOWED_RATIO, ALLOWED_ERROR = 1.02, 2e-3


def torch_vit(torch: Any) -> Any:
    """ViT-B/16 with a packed QKV product and `scaled_dot_product_attention`."""
    nn, width, heads = torch.nn, 768, 12

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            q, k, v = self.qkv(self.first(x)).view(batch, tokens, 3, heads, -1).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
            x = x + self.out(mixed)
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, width, 16, 16)
            self.token = nn.Parameter(torch.zeros(1, 1, width))
            self.position = nn.Parameter(torch.randn(1, 197, width) * 0.02)
            self.blocks = nn.Sequential(*[Block() for _ in range(12)])
            self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 1000)

        def forward(self, images: Any) -> Any:
            x = self.patch(images).flatten(2).transpose(1, 2)
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
            return self.head(self.norm(self.blocks(x))[:, 0])

    return Vit()


def torch_resnet50(torch: Any) -> Any:
    """ResNet-50 v1.5 with its batch normalisation folded into the biases of the convolutions."""
    nn = torch.nn

    class Block(nn.Module):
        def __init__(self, before: int, inner: int, stride: int) -> None:
            super().__init__()
            self.parts = nn.Sequential(
                nn.Conv2d(before, inner, 1), nn.ReLU(), nn.Conv2d(inner, inner, 3, stride, 1), nn.ReLU(),
                nn.Conv2d(inner, 4 * inner, 1),
            )  # fmt: skip
            same = before == 4 * inner and stride == 1
            self.skip = nn.Identity() if same else nn.Conv2d(before, 4 * inner, 1, stride)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.parts(x) + self.skip(x))

    layers: list[Any] = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Block(before, 64 << stage, 2 if stage and not block else 1))
            before = 4 * (64 << stage)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


def peers(model: str, feeds: dict[str, np.ndarray]) -> dict[str, Callable[[], object]]:
    """Calls of torch, eager and compiled, that end when the GPU is done."""
    import torch

    torch.manual_seed(0)
    layout = torch.channels_last if model == "resnet50" else torch.contiguous_format
    made = {"vit": torch_vit, "resnet50": torch_resnet50}[model](torch)
    made = made.eval().half().cuda().to(memory_format=layout)
    images = torch.from_numpy(feeds["images"]).cuda().to(memory_format=layout)
    torch.compiler.reset()
    compiled = torch.compile(made, mode="reduce-overhead", dynamic=False)

    def call(run: Any) -> Callable[[], object]:
        def once() -> object:
            with torch.inference_mode():
                out = run(images)
            torch.cuda.synchronize()
            return out

        return once

    return {"torch_eager_us": call(made), "torch_compiled_us": call(compiled)}


def on_gpu(feeds: dict[str, np.ndarray]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array).cuda() for name, array in feeds.items()}


def fp32_error(
    bench: Bench, model: str, runners: dict[str, te.InferenceEngine], feeds: dict[str, Any]
) -> dict[str, float]:
    """Largest difference of each engine from the same weights in FP32 on the CPU, of the largest output."""
    path = bench.folder / f"{model}-fp32.onnx"
    if not path.exists():
        networks.NETWORKS[model](path, half=False)
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {name: array.astype(np.float32) for name, array in feeds.items()})
    found = {name: runner.infer(feeds)["logits"].astype(np.float64) for name, runner in runners.items()}
    return {name: float(np.abs(array - expected).max() / np.abs(expected).max()) for name, array in found.items()}


def measure(bench: Bench, model: str, batch: int, args: argparse.Namespace) -> bool:
    engines = {
        "built": bench.engine(model, usual=batch),
        "plain": bench.engine(model, fuse=False, time_budget_s=0.0),
    }
    feeds = bench.feeds(engines["built"], batch)
    given = on_gpu(feeds) if bench.on_gpu else feeds
    graphs = {"enable_cuda_graph": "1", "use_tf32": "1"} if bench.on_gpu else {}
    ways: dict[str, Callable[[], object]] = {"ort_graph_us": bench.bound(bench.raw(engines["plain"], **graphs), feeds)}
    with bench.measuring() as (before, started), contextlib.ExitStack() as stack:
        runners = {name: stack.enter_context(te.load(engine, graphs=bench.on_gpu)) for name, engine in engines.items()}
        runner = runners["built"]
        ways["infer_us"] = lambda: runner.infer(given, **({"on_device": True} if bench.on_gpu else {}))
        ways["bind_us"] = stack.enter_context(runner.bind(inputs=given))
        if not args.no_torch:
            ways |= peers(model, feeds)
        errors = fp32_error(bench, model, runners, feeds) if bench.on_gpu and batch == 1 else {}
        samples = interleaved(ways, args.seconds)
        facts = runner.runtime_info
    build = engines["built"].passport.build
    middle = {name.replace("_us", "_p50_us"): p(values, 50) for name, values in samples.items()}
    ratio = middle["infer_p50_us"] / middle["ort_graph_p50_us"]
    results = middle | {
        "ratio": ratio, "fp32_error": errors, "fusions": build.notes.get("fusions"), "tuning": build.tuning,
        "parity": {name: engine.passport.parity for name, engine in engines.items()},
    }  # fmt: skip
    met = ratio <= ALLOWED_RATIO and errors.get("built", 0.0) <= ALLOWED_ERROR
    bench.write(model, engines["built"], before, started, facts, {"batch": batch}, samples, results, met)
    print(f"{model:<10}{batch:>4}  fused: {results['fusions']}  FP32 error {errors}  {'kept' if met else 'NOT kept'}")
    if build.tuning is not None:
        print(f"    {build.tuning.summary}")
        for item in build.tuning.candidates:
            print(f"      {item.label} {item.median_ms} {item.slower_pct} {item.interval_pct} {item.note or ''}")
    for name, value in middle.items():
        print(f"    {name.removesuffix('_p50_us'):<20}{value:>12.1f} us", flush=True)
    return met


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    options.add_argument("--no-torch", action="store_true", help="leave torch out")
    args = options.parse_args()
    bench = Bench(args, "gpu_fusion")
    kept = [measure(bench, model, batch, args) for model in args.models for batch in args.batches]
    return 0 if all(kept) else 8


if __name__ == "__main__":
    sys.exit(main())

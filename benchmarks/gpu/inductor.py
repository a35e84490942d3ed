"""Engines of the backend `inductor` beside torch.compile and ONNX Runtime, each with a CUDA graph, in turns.

ViT-B/16 and ResNet-50 in FP16, batches 1 and 64. Ours: the ONNX graph of `networks.py`, `te.build(backend="inductor")`
for that batch alone, `te.load(graphs=True)`, CUDA tensors in, device arrays out. torch.compile: the same architectures
written in PyTorch as it likes them best (packed QKV and its attention kernels; channels last), replayed in one CUDA graph
on fixed memory. ONNX Runtime: the same ONNX graph on its CUDA provider, its graph replayed on fixed memory (ResNet-50 with
`prefer_nhwc`). Each call ends when the device is done.

    python benchmarks/gpu/inductor.py --out inductor.jsonl
    python benchmarks/gpu/inductor.py -O autotune_s=240 --models vit --batches 64
    python benchmarks/gpu/inductor.py --device cpu --seconds 1
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import networks
from gpu_common import Bench, interleaved, p, parser

import trt_engine as te

NHWC = {"resnet50": {"prefer_nhwc": "1"}}
"""Options of ONNX Runtime's CUDA provider, where they make it faster."""
SMALL = {"vit": {"width": 64, "depth": 2, "heads": 4, "size": 32}, "resnet50": {"size": 32}}


class Block(nn.Module):
    """A transformer block with one product for Q, K and V."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        packed = self.qkv(self.before(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Vit(nn.Module):
    """ViT-B/16, as `networks.vit`."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12, size: int = 224) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16, bias=False)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (size // 16) ** 2 + 1, width) / width**0.5)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut, batch normalisation folded."""

    def __init__(self, before: int, inner: int, stride: int, shortcut: bool) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(before, inner, 1), nn.Conv2d(inner, inner, 3, stride, 1)
        self.last = nn.Conv2d(inner, 4 * inner, 1)
        self.shortcut = nn.Conv2d(before, 4 * inner, 1, stride) if shortcut else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.relu(self.three(torch.relu(self.one(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 v1.5, as `networks.resnet50`."""

    def __init__(self, size: int = 224) -> None:
        super().__init__()
        blocks, before = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            inner = 64 << stage
            for at in range(count):
                blocks.append(Bottleneck(before, inner, 2 if stage and not at else 1, not at))
                before = 4 * inner
        self.stem, self.blocks, self.head = nn.Conv2d(3, 64, 7, 2, 3), nn.Sequential(*blocks), nn.Linear(before, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.stem(x)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def graph_of(call: Callable[[], Any]) -> Callable[[], None]:
    """A replay of the call's CUDA graph that ends when the device is done."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def compiled(model: str, batch: int, on_gpu: bool) -> Callable[[], object]:
    """torch.compile's code for this batch, without Python between the kernels."""
    torch.manual_seed(0)
    made: nn.Module = {"vit": Vit, "resnet50": ResNet}[model](**({} if on_gpu else SMALL[model]))
    made = made.eval().requires_grad_(False)
    size = 224 if on_gpu else 32
    x = torch.randn(batch, 3, size, size)
    if on_gpu:
        made, x = made.cuda().half(), x.cuda().half()
    if model == "resnet50":
        made, x = made.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    torch.compiler.reset()
    fast = torch.compile(made, dynamic=False)
    with torch.no_grad():
        fast(x)
        return graph_of(functools.partial(fast, x)) if on_gpu else functools.partial(fast, x)


def build(bench: Bench, model: str, batch: int, path: Path) -> tuple[te.Engine, float]:
    """The engine for this batch alone, and the seconds its build took."""
    started = time.perf_counter()
    engine = te.build(
        path, backend="inductor", device=bench.args.device, batch=(batch, batch, batch), options=bench.options,
        store=te.Store(bench.folder / "store"),
    )  # fmt: skip
    return engine, time.perf_counter() - started


def compare(bench: Bench, model: str, batch: int, engine: te.Engine, seconds: float) -> None:
    """One record: the three ways in turns."""
    feeds = bench.feeds(engine, batch)
    resident = {name: torch.from_numpy(array).to(bench.args.device) for name, array in feeds.items()}
    reference = bench.raw_engine(model)
    other = bench.raw(reference).run(None, feeds)[0].astype(np.float32)
    provider = {"enable_cuda_graph": "1"} | NHWC.get(model, {})
    raw = bench.raw(reference, **(provider if bench.on_gpu else {}))
    with (
        torch.no_grad(),
        bench.measuring() as (before, started),
        te.load(engine, graphs=bench.on_gpu) as runner,
    ):
        if bench.on_gpu:
            call = functools.partial(runner.infer, resident, on_device=True)
        else:
            call = functools.partial(runner.infer, feeds)
        first = runner.infer(feeds)["logits"]
        for _ in range(5):
            call()
        captured = bench.on_gpu and runner.is_captured(feeds)
        ways = {
            "ours_us": call, "ours_host_us": functools.partial(runner.infer, feeds),
            "compile_us": compiled(model, batch, bench.on_gpu), "onnxruntime_us": bench.bound(raw, feeds),
        }  # fmt: skip
        samples = interleaved(ways, bench.args.seconds)
        facts, stats = runner.runtime_info, runner.stats().pool
    middle = {way.removesuffix("_us"): p(values, 50) for way, values in samples.items()}
    scale = float(np.abs(other).max())
    results = {f"{way}_p50_us": value for way, value in middle.items()} | {
        "ratio_to_compile": middle["ours"] / middle["compile"],
        "ratio_to_onnxruntime": middle["ours"] / middle["onnxruntime"],
        "captured": captured, "refused": stats.graphs.disabled_reason if stats else None, "build_s": seconds,
        "difference_of_scale": float(np.abs(first.astype(np.float32) - other).max()) / scale,
    }  # fmt: skip
    settings = {"batch": batch, "options": bench.options, "notes": engine.passport.build.notes}
    bench.write(
        model, engine, before, started, facts | {"torch": str(torch.__version__)}, settings, samples, results, None
    )
    print(
        f"{model:<10}{batch:>6}{middle['ours']:>12.1f}{middle['compile']:>12.1f}{middle['onnxruntime']:>12.1f}"
        f"{results['ratio_to_compile']:>9.3f}{results['ratio_to_onnxruntime']:>9.3f}{seconds:>9.1f}"
        f"{'' if captured or not bench.on_gpu else '  no graph: ' + str(results['refused'])}",
        flush=True,
    )


class InductorBench(Bench):
    """Networks once, and ONNX Runtime's optimised graphs of them."""

    def network(self, model: str) -> Path:
        path = self.folder / f"{model}-{'fp16' if self.on_gpu else 'small'}.onnx"
        if not path.exists():
            networks.NETWORKS[model](path, half=self.on_gpu, **({} if self.on_gpu else SMALL[model]))
        return path

    def raw_engine(self, model: str) -> te.Engine:
        """ONNX Runtime's engine, without the proof that is made of ours."""
        options = {f"cuda.{name}": value for name, value in NHWC.get(model, {}).items()} if self.on_gpu else {}
        return te.build(
            self.network(model), device=self.args.device, batch=(1, 64, 64), parity=False, options=options,
            store=te.Store(self.folder / "store"),
        )  # fmt: skip


def main() -> int:
    options = parser(__doc__.partition("\n")[0])
    options.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    options.add_argument("--cxx", default="/usr/bin/g++", help="the C++ compiler of both compilers [/usr/bin/g++]")
    args = options.parse_args()
    os.environ["CXX"] = args.cxx
    bench, failed = InductorBench(args, "gpu_inductor"), False
    cells = [(model, batch, bench.network(model)) for model in args.models for batch in args.batches]
    # builds that measure kernels have the device to themselves
    with ThreadPoolExecutor(1 if bench.options.get("autotune_s") or not bench.on_gpu else len(cells)) as threads:
        builds = {cell[:2]: threads.submit(build, bench, *cell) for cell in cells}
    print("microseconds at the median: ours, torch.compile, ONNX Runtime; ratios to both; seconds of the build")
    for (model, batch), made in builds.items():
        try:
            compare(bench, model, batch, *made.result())
        except Exception:  # the other cells are measured all the same
            failed = True
            print(f"{model} b{batch} failed:", flush=True)
            traceback.print_exc()
    return 5 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

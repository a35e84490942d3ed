"""Fused against unfused engines on a CPU: a small ViT, encoders of the sizes of BERT base and Whisper base, a small Llama.

The ViT is the trained one of `examples/classifiers`; the encoders have random weights (`benchmarks/networks.py` has the
blocks) and two of their layers, as all layers of one are alike. Engines by `te.build` with and without `fuse`, called in
turns; their threads do not spin, so that those of one engine do not take a core from the next. Demanded: fused at most 1.02
of unfused, at the median.

    python benchmarks/fusion_cpu.py
    python benchmarks/fusion_cpu.py --threads 1 --seconds 5 --networks bert
"""

from __future__ import annotations

import argparse
import datetime
import functools
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from networks import IR_VERSION, OPSET, Graph
from onnx import helper

import trt_engine as te
from trt_engine.environment import Environment
from trt_engine.records.base import append_record
from trt_engine.records.percentiles import percentile
from trt_engine.store import Store

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "fusion-cpu.jsonl"
ALLOWED = 1.02


def encoder(
    path: Path, *, width: int, heads: int, layers: int, mask: bool, norm_first: bool, rotary: bool = False
) -> Path:
    """`x` (batch x tokens x width) through transformer layers, with a mask (batch x tokens) of the keys or without.

    With `rotary`, queries and keys are rotated and norms are those of the root mean square, both in primitive operators.
    """
    graph, head = Graph(half=False), width // heads
    inputs = [helper.make_tensor_value_info("x", 1, ["batch", "tokens", width])]
    bias = ""
    if mask:
        inputs.append(helper.make_tensor_value_info("mask", 7, ["batch", "tokens"]))
        kept = graph.add("Unsqueeze", graph.add("Cast", "mask", to=1), graph.integers(1, 2))
        bias = graph.add("Mul", graph.add("Sub", graph.scalar(1.0), kept), graph.scalar(-10000.0))

    if rotary:
        length = graph.add("Gather", graph.add("Shape", "x"), graph.constant(np.array(1, np.int64)), axis=0)
        zero, one = (graph.constant(np.array(at, np.int64)) for at in (0, 1))
        rows = graph.add("Unsqueeze", graph.add("Cast", graph.add("Range", zero, length, one), to=1), graph.integers(1))
        angles = graph.add("Mul", rows, graph.constant(10000.0 ** -np.linspace(0, 1, head // 2, dtype=np.float32)))
        angles = graph.add("Concat", angles, angles, axis=-1)
        cos, sin = graph.add("Cos", angles), graph.add("Sin", angles)

    def rotated(value: str) -> str:
        ends = [(0, head // 2), (head // 2, head)]
        first, second = (graph.add("Slice", value, *(graph.integers(at) for at in (*end, -1))) for end in ends)
        turned = graph.add("Concat", graph.add("Neg", second), first, axis=-1)
        return graph.add("Add", graph.add("Mul", value, cos), graph.add("Mul", turned, sin))

    def norm(value: str) -> str:
        if rotary:
            mean = graph.add("ReduceMean", graph.add("Pow", value, graph.scalar(2.0)), graph.integers(-1), keepdims=1)
            root = graph.add("Reciprocal", graph.add("Sqrt", graph.add("Add", mean, graph.scalar(1e-6))))
            return graph.add("Mul", graph.constant(np.ones(width, np.float32)), graph.add("Mul", value, root))
        ones, zeros = graph.constant(np.ones(width, np.float32)), graph.constant(np.zeros(width, np.float32))
        return graph.add("LayerNormalization", value, ones, zeros, axis=-1, epsilon=1e-6)

    def linear(value: str, before: int, after: int) -> str:
        made = graph.add("MatMul", value, graph.random(before, after, fan_in=before))
        return graph.add("Add", made, graph.random(after, fan_in=before))

    def split(value: str, perm: list[int]) -> str:
        return graph.add("Transpose", graph.add("Reshape", value, graph.integers(0, 0, heads, head)), perm=perm)

    def attention(value: str) -> str:
        keys = [0, 2, 1, 3] if rotary else [0, 2, 3, 1]
        q, k, v = (split(linear(value, width, width), perm) for perm in ([0, 2, 1, 3], keys, [0, 2, 1, 3]))
        if rotary:
            q, k = rotated(q), graph.add("Transpose", rotated(k), perm=[0, 1, 3, 2])
        scores = graph.add("Mul", graph.add("MatMul", q, k), graph.scalar(head**-0.5))
        scores = graph.add("Add", scores, bias) if bias else scores
        mixed = graph.add("Transpose", graph.add("MatMul", graph.add("Softmax", scores, axis=-1), v), perm=[0, 2, 1, 3])
        return linear(graph.add("Reshape", mixed, graph.integers(0, 0, width)), width, width)

    def feed_forward(value: str) -> str:
        return linear(graph.add("Gelu", linear(value, width, 4 * width)), 4 * width, width)

    x = "x"
    for _ in range(layers):
        for part in (attention, feed_forward):
            x = graph.add("Add", x, part(norm(x))) if norm_first else norm(graph.add("Add", x, part(x)))
    graph.nodes[-1].output[0] = "y"
    outputs = [helper.make_tensor_value_info("y", 1, ["batch", "tokens", width])]
    made = helper.make_graph(graph.nodes, path.stem, inputs, outputs, graph.weights)
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION), path)
    return path


Network = tuple[Callable[[Path], Path], dict[str, tuple[int, ...]]]
NETWORKS: dict[str, Network] = {
    "vit": (lambda path: ROOT / "examples" / "classifiers" / "vit.onnx", {}),
    "bert": (
        lambda path: encoder(path, width=768, heads=12, layers=2, mask=True, norm_first=False),
        {"x": (1, 128, 768), "mask": (1, 128)},
    ),
    "bert-b4": (
        lambda path: encoder(path, width=768, heads=12, layers=2, mask=True, norm_first=False),
        {"x": (4, 384, 768), "mask": (4, 384)},
    ),
    "llama": (
        lambda path: encoder(path, width=768, heads=12, layers=2, mask=False, norm_first=True, rotary=True),
        {"x": (1, 128, 768)},
    ),
    "llama-b4": (
        lambda path: encoder(path, width=768, heads=12, layers=2, mask=False, norm_first=True, rotary=True),
        {"x": (4, 384, 768)},
    ),
    "whisper": (
        lambda path: encoder(path, width=512, heads=8, layers=2, mask=False, norm_first=True), {"x": (1, 1500, 512)},
    ),
}  # fmt: skip


def feeds(engine: te.Engine, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    random, made = np.random.default_rng(0), {}
    for spec in engine.signature.inputs:
        shape = shapes.get(spec.name) or tuple(1 if size < 0 else size for size in spec.shape)
        made[spec.name] = random.standard_normal(shape).astype(spec.dtype)
        if spec.dtype == "int64":  # a mask whose last quarter is padding
            made[spec.name] = (np.arange(shape[-1]) < shape[-1] * 3 // 4).astype(np.int64) * np.ones(shape, np.int64)
    return made


def in_turns(
    calls: dict[str, Callable[[], object]], seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Milliseconds of every call, the order turned from round to round."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    names, until, number = list(calls), time.perf_counter() + seconds, 0
    while time.perf_counter() < until or number < 6:
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            start = clock()
            calls[name]()
            samples[name].append((clock() - start) * 1e3)
        number += 1
    return samples


def _arguments() -> list[str]:
    """What was typed, without the places of this machine."""
    at = sys.argv.index("--out") if "--out" in sys.argv else len(sys.argv)
    return sys.argv[1:at] + sys.argv[at + 2 :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each comparison is measured [20]")
    parser.add_argument(
        "--processor-time", action="store_true", help="count the processor time of all threads, on a busy machine"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    clock, kept = time.process_time if args.processor_time else time.perf_counter, True
    options = {"intra_op_threads": str(args.threads), "spinning": "off"}
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.networks:
            make, shapes = NETWORKS[name]
            path, store = make(Path(temporary) / f"{name}.onnx"), Store(Path(temporary) / "store")
            engines = {
                way: te.build(path, shapes=shapes, options=options, store=store, fuse=way == "fused")
                for way in ("fused", "unfused")
            }
            started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            given = feeds(engines["fused"], shapes)
            with (
                te.load(engines["fused"]) as fused,
                te.load(engines["unfused"]) as plain,
                te.load(engines["unfused"]) as again,
            ):
                runners = {"fused_ms": fused, "unfused_ms": plain, "unfused_again_ms": again}
                calls = {way: functools.partial(runner.infer, given) for way, runner in runners.items()}
                samples = in_turns(calls, args.seconds, clock)
            middle = {way: percentile(sorted(values), 50, "linear") for way, values in samples.items()}
            ratio = middle["fused_ms"] / middle["unfused_ms"]
            met = ratio <= ALLOWED
            kept &= met
            append_record(args.out, {
                "schema": "trt-engine/fusion-cpu", "started": started, "network": name,
                "command": shlex.join(["python", "benchmarks/fusion_cpu.py", *_arguments()]),
                "shapes": shapes, "threads": args.threads, "processor_time": args.processor_time,
                "environment": Environment.detect(None), "fusions": engines["fused"].passport.build.fusions,
                "samples": {way: [round(value, 4) for value in values] for way, values in samples.items()},
                "results": middle | {"ratio": ratio, "a_a": middle["unfused_again_ms"] / middle["unfused_ms"]}, "met": met,
            })  # fmt: skip
            print(
                f"{name:<10}{middle['fused_ms']:>10.2f} ms fused{middle['unfused_ms']:>10.2f} ms unfused  ratio {ratio:.3f}"
                f"  A/A {middle['unfused_again_ms'] / middle['unfused_ms']:.3f}  {engines['fused'].passport.build.fusions}"
                f"  {'kept' if met else 'NOT kept'}",
                flush=True,
            )
    return 0 if kept else 8


if __name__ == "__main__":
    sys.exit(main())

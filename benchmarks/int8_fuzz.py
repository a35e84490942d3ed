"""Random graphs through `build --precision int8` for ONNX Runtime's CPU provider, judged by plain ONNX Runtime.

A graph is a chain of three to eight blocks, drawn by seed: convolutions (plain, grouped, strided, transposed), MatMul and
Gemm with biases of every shape, activations behind and between them, residual Adds, Concat, Split, pooling, norms, layout
operators, ranks 2 to 4, batches named or fixed, opsets 11 to 21. Its data is drawn once and calibrates it. The oracle is the
graph itself without any optimisation. A graph is

- right: built, and within 0.25 of its signal (noise of the worst output), every layer with pairs in an integer kernel;
- slow: built, but a layer with pairs computes in FP32, or its share of INT8 is not weighed by multiply-adds;
- refused: no layer is left to quantise, said so (exit 4), or a channel is dead, said so (exit 7), that
  moves by two of the 255 steps of its tensor at most;
- wrong, or failed: anything else.

    python benchmarks/int8_fuzz.py --graphs 1000
    python benchmarks/int8_fuzz.py --graphs 1 --seed 4711 --keep DIR
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import NodeProto, TensorProto, helper, numpy_helper

import trt_engine as te
from trt_engine.benchmark import speed_check
from trt_engine.environment import Environment
from trt_engine.errors import TrtEngineError
from trt_engine.records.base import append_record
from trt_engine.store import Store

ALLOWED_NOISE = 0.25
ROWS = 16
Array = npt.NDArray[Any]


@dataclass
class Drawn:
    """A graph that is being drawn: its nodes, its weights, and the shape of the tensor at its end, batch first."""

    rng: np.random.Generator
    opset: int
    shape: tuple[int, ...]
    nodes: list[NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    last: str = "x"

    def weight(self, *shape: int, scale: float | None = None) -> str:
        name = f"w{len(self.weights)}"
        fan = max(int(np.prod(shape[1:])) if len(shape) > 2 else shape[0] if shape else 1, 1)
        values = self.rng.standard_normal(shape) * (fan**-0.5 if scale is None else scale)
        self.weights[name] = np.asarray(values, np.float32)
        return name

    def constant(self, values: Any, dtype: Any = np.float32) -> str:
        name = f"w{len(self.weights)}"
        self.weights[name] = np.asarray(values, dtype)
        return name

    def add(self, op: str, *inputs: str, shape: tuple[int, ...] | None = None, outputs: int = 1, **attrs: Any) -> str:
        at = len(self.nodes)
        names = [f"t{at}" if index == 0 else f"t{at}_{index}" for index in range(outputs)]
        label = f"n{at}" if self.rng.random() < 0.7 else ""
        self.nodes.append(helper.make_node(op, list(inputs), names, name=label, **attrs))
        self.last = names[0]
        if shape is not None:
            self.shape = shape
        return names[0]


def convolution(graph: Drawn) -> None:
    rng = graph.rng
    batch, channels, *sizes = graph.shape
    out, kernel = int(rng.choice([channels, 2 * channels, 8, 12])), int(rng.choice([1, 3, 5]))
    groups = int(rng.choice([1, 1, 1, channels])) if out % channels == 0 else 1
    stride = int(rng.choice([1, 1, 2])) if min(sizes) > 4 else 1
    bias = [graph.weight(out, scale=0.1)] if rng.random() < 0.6 else []
    pads = [kernel // 2] * (2 * len(sizes))
    if rng.random() < 0.1:
        made = graph.weight(channels, out, *[2] * len(sizes))
        graph.add("ConvTranspose", graph.last, made, *bias, strides=[2] * len(sizes),
                  shape=(batch, out, *(2 * size for size in sizes)))  # fmt: skip
        return
    weight = graph.weight(out, channels // groups, *[kernel] * len(sizes))
    graph.add("Conv", graph.last, weight, *bias, pads=pads, strides=[stride] * len(sizes), group=groups,
              shape=(batch, out, *(-(-size // stride) for size in sizes)))  # fmt: skip
    if rng.random() < 0.2:
        scale, mean = (graph.weight(out, scale=0.1) for _ in range(2))
        graph.weights[scale] += 1
        variance = graph.constant(rng.uniform(0.5, 2, out))
        graph.add("BatchNormalization", graph.last, scale, mean, mean, variance)


def product(graph: Drawn) -> None:
    rng, width = graph.rng, graph.shape[-1]
    out = int(rng.choice([width, 2 * width, 16, 24]))
    shape = (*graph.shape[:-1], out)
    if len(graph.shape) == 2 and rng.random() < 0.4:
        across = int(rng.integers(2))
        weight = graph.weight(*((out, width) if across else (width, out)), scale=width**-0.5)
        bias = [[], [graph.weight(out, scale=0.2)], [graph.weight(1, out, scale=0.2)]][int(rng.integers(3))]
        alpha = {"alpha": 0.5} if rng.random() < 0.1 else {}
        graph.add("Gemm", graph.last, weight, *bias, transB=across, shape=shape, **alpha)
        return
    graph.add("MatMul", graph.last, graph.weight(width, out, scale=width**-0.5), shape=shape)
    ways: list[tuple[int, ...]] = [(out,), (out,), (1, out), (1,), (), (1, *shape[1:])]
    if rng.random() < 0.7:
        bias_shape = ways[int(rng.integers(len(ways)))]
        pair = [graph.last, graph.weight(*bias_shape, scale=0.2)]
        graph.add("Add", *(pair if rng.random() < 0.7 else pair[::-1]))


def activation(graph: Drawn) -> None:
    rng, x = graph.rng, graph.last
    kind = rng.choice("Relu Relu Clip Clip6 Sigmoid Tanh LeakyRelu HardSigmoid HardSwish SiLU Gelu Softmax Elu".split())
    if kind == "Clip":
        graph.add("Clip", x, graph.constant(rng.uniform(-1, 0.2)), graph.constant(rng.uniform(0.5, 2)))
    elif kind == "Clip6":
        graph.add("Clip", x, graph.constant(0), graph.constant(6))
    elif kind == "SiLU":
        graph.add("Mul", x, graph.add("Sigmoid", x))
    elif kind == "HardSwish" and rng.random() < 0.5:  # as paddle and torch write it out
        shifted = graph.add("Add", x, graph.constant(3))
        gate = graph.add("Clip", shifted, graph.constant(0), graph.constant(6))
        first, second = ("Mul", x), ("Div", graph.constant(6))
        for op, other in (first, second) if rng.random() < 0.5 else (second, first):
            gate = graph.add(op, gate, other)
    elif kind == "HardSwish" and graph.opset < 14:
        graph.add("Mul", x, graph.add("HardSigmoid", x, alpha=1 / 6, beta=0.5))
    elif kind == "Gelu":
        inner = graph.add("Erf", graph.add("Div", x, graph.constant(2**0.5)))
        graph.add("Mul", graph.add("Mul", x, graph.add("Add", inner, graph.constant(1))), graph.constant(0.5))
    elif kind == "Softmax":
        graph.add("Softmax", x, axis=len(graph.shape) - 1)
    else:
        graph.add(str(kind), x)


def residual(graph: Drawn) -> None:
    shape, before = graph.shape, graph.last
    linear(graph)
    if graph.shape == shape:
        pair = [before, graph.last] if graph.rng.random() < 0.5 else [graph.last, before]
        graph.add("Add", *pair)


def joined(graph: Drawn) -> None:
    before, shape, axis = graph.last, graph.shape, 1 if len(graph.shape) == 4 else len(graph.shape) - 1
    linear(graph)
    others = [at for at in range(len(shape)) if at != axis]
    if [graph.shape[at] for at in others] == [shape[at] for at in others]:
        sizes = list(shape)
        sizes[axis] += graph.shape[axis]
        graph.add("Concat", before, graph.last, axis=axis, shape=tuple(sizes))


def moved(graph: Drawn) -> None:
    rng, shape, x = graph.rng, graph.shape, graph.last
    if len(shape) == 4 and min(shape[2:]) >= 4:
        kind = rng.choice("MaxPool AveragePool GlobalAveragePool Flatten Resize Transpose".split())
        half = (*shape[:2], shape[2] // 2, shape[3] // 2)
        if kind in ("MaxPool", "AveragePool"):
            graph.add(str(kind), x, kernel_shape=[2, 2], strides=[2, 2], shape=half)
        elif kind == "GlobalAveragePool":
            graph.add("Flatten", graph.add(str(kind), x), shape=shape[:2])
        elif kind == "Flatten":
            graph.add("Flatten", x, shape=(shape[0], int(np.prod(shape[1:]))))
        elif kind == "Resize":
            scales = graph.constant([1, 1, 2, 2])
            none = graph.constant(np.zeros(0)) if graph.opset < 13 else ""
            graph.add("Resize", x, none, scales, mode=str(rng.choice(["nearest", "linear"])),
                      shape=(*shape[:2], 2 * shape[2], 2 * shape[3]))  # fmt: skip
        else:
            tokens = graph.add("Reshape", x, graph.constant([0, shape[1], -1], np.int64))
            graph.add("Transpose", tokens, perm=[0, 2, 1], shape=(shape[0], shape[2] * shape[3], shape[1]))
    elif len(shape) == 3:
        if rng.random() < 0.5:
            weights = [graph.weight(shape[-1], scale=0.1) for _ in range(2)]
            graph.weights[weights[0]] += 1
            if graph.opset >= 17:
                graph.add("LayerNormalization", x, *weights, axis=-1)
        else:
            graph.add("ReduceMean", x, axes=[1], keepdims=0, shape=(shape[0], shape[2])) if graph.opset < 18 else None
    elif shape[-1] % 2 == 0:
        half = shape[-1] // 2
        sizes = [graph.constant([half, half], np.int64)] if graph.opset >= 13 else []
        extra = {} if graph.opset >= 13 else {"split": [half, half]}
        first = graph.add("Split", x, *sizes, axis=len(shape) - 1, outputs=2, shape=(*shape[:-1], half), **extra)
        graph.add("Mul", first, f"{first}_1")


def linear(graph: Drawn) -> None:
    if len(graph.shape) == 4:
        convolution(graph)
    else:
        product(graph)


BLOCKS = (linear, linear, activation, activation, residual, joined, moved)


def draw(seed: int) -> tuple[onnx.ModelProto, Array]:
    """The model of a seed, and `ROWS` samples for it, float32."""
    rng = np.random.default_rng(seed)
    shapes: Sequence[tuple[int, ...]] = [(0, 16), (0, 24), (0, 6, 16), (0, 4, 8, 8), (0, 8, 8, 8), (0, 3, 12, 12)]
    graph = Drawn(rng, int(rng.choice([11, 13, 13, 17, 17, 18, 21])), shapes[int(rng.integers(len(shapes)))])
    given = graph.shape
    linear(graph)
    for _ in range(int(rng.integers(2, 8))):
        BLOCKS[int(rng.integers(len(BLOCKS)))](graph)
    batch: str | int = "batch" if rng.random() < 0.7 else 1
    outputs = [graph.last]
    inner = [name for node in graph.nodes[:-1] for name in node.output]
    if inner and rng.random() < 0.2:
        outputs.append(str(rng.choice(inner)))
    read = {name for node in graph.nodes for name in node.input}
    model = helper.make_model(
        helper.make_graph(
            graph.nodes, f"seed {seed}",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, *given[1:]])],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in dict.fromkeys(outputs)],
            [numpy_helper.from_array(array, name) for name, array in graph.weights.items() if name in read],
        ),
        opset_imports=[helper.make_opsetid("", graph.opset)], ir_version=8,
    )  # fmt: skip
    return model, rng.standard_normal((ROWS, *given[1:])).astype(np.float32)


def plain(path: Path, data: Array, fixed: bool) -> dict[str, Array]:
    """What plain ONNX Runtime computes without optimisation, for all rows."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_outputs()]
    parts = [session.run(None, {"x": rows}) for rows in (np.split(data, ROWS) if fixed else [data])]
    return {name: np.concatenate(arrays) for name, arrays in zip(names, zip(*parts, strict=True), strict=True)}


def noise(got: Array, wanted: Array) -> float:
    """Root mean square of the difference over that of the output's variation."""
    return float(np.sqrt(np.mean((got - wanted) ** 2)) / max(float(np.std(wanted)), 1e-6))


def within_a_step(message: str, wanted: dict[str, Array]) -> bool:
    """Whether the channel that the message calls dead moves by two steps of its tensor at most."""
    found = re.match(r"channel (\d+) of \d+ \(axis (\d+)\) of `(\w+)` is dead", message)
    if found is None:
        return False
    whole = wanted[found[3]]
    channel = whole.take(int(found[1]), int(found[2]))
    return float(np.ptp(channel)) <= 2 * float(np.ptp(np.append(whole, 0))) / 255


def judge(seed: int, folder: Path) -> dict[str, Any]:
    """The verdict on one graph: `verdict`, and `reason` where it is not right."""
    model, data = draw(seed)
    path, calibration = folder / "model.onnx", folder / "data.npy"
    onnx.save(model, path)
    np.save(calibration, data)
    fixed = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value == 1
    try:
        wanted = plain(path, data, fixed)
    except Exception as error:
        return {"seed": seed, "verdict": "no graph", "reason": str(error)[:200]}
    batches: dict[str, Any] = {} if fixed else {"batch": f"1:4:{ROWS}"}
    try:
        built = te.build(path, out=folder / "model.engine.onnx", precision="int8", calib_data=str(calibration),
                         overwrite=True, store=Store(folder / "store"), **batches)  # fmt: skip
    except TrtEngineError as error:
        nothing = error.exit_code == 4 and "nothing to quantise" in error.message
        verdict = "refused" if nothing or within_a_step(error.message, wanted) else "failed"
        return {"seed": seed, "verdict": verdict, "reason": f"exit {error.exit_code}: {error.message}"[:300]}
    except Exception as error:
        return {"seed": seed, "verdict": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
    with te.load(folder / "model.engine.onnx") as engine:
        parts = [engine.infer({"x": rows}) for rows in (np.split(data, ROWS) if fixed else [data])]
    found = {name: noise(np.concatenate([np.asarray(part[name]) for part in parts]), wanted[name]) for name in wanted}
    worst = max(found.values())
    cell: dict[str, Any] = {"seed": seed, "noise": round(worst, 4)}
    unfused = built.passport.build.not_fused
    unweighed = all(share.macs is None for share in built.passport.precision.shares.values())
    if not worst <= ALLOWED_NOISE:
        return cell | {"verdict": "wrong", "reason": f"noise {worst:.3g} of the signal"}
    if unfused or unweighed:
        return cell | {"verdict": "slow", "reason": f"not fused: {unfused}" if unfused else "no multiply-adds counted"}
    return cell | {"verdict": "right"}


def cells(seeds: Sequence[int], keep: Path | None) -> Iterator[dict[str, Any]]:
    for seed in seeds:
        if keep is not None:
            keep.mkdir(parents=True, exist_ok=True)
            yield judge(seed, keep)
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield judge(seed, Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first graph")
    parser.add_argument("--keep", type=Path, help="leave the files of the last graph here")
    parser.add_argument("--out", type=Path, help="append the counts to this file of records")
    args = parser.parse_args()
    logging.getLogger("trt_engine").setLevel(logging.ERROR)
    speed_check._SECONDS = 0.0  # the time beside FP32 is no part of a verdict
    counts: Counter[str] = Counter()
    for cell in cells(range(args.seed, args.seed + args.graphs), args.keep):
        counts[cell["verdict"]] += 1
        if cell["verdict"] not in ("right", "refused"):
            print(json.dumps(cell), flush=True)
    print(dict(counts))
    if args.out:
        command = shlex.join(
            ["python", "benchmarks/int8_fuzz.py", "--graphs", str(args.graphs), "--seed", str(args.seed)]
        )
        append_record(args.out, {"command": command, **counts, "environment": Environment.detect()})
    return 8 if counts["wrong"] + counts["failed"] + counts["slow"] else 0


if __name__ == "__main__":
    sys.exit(main())

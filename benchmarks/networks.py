"""ViT-B/16 and ResNet-50 as ONNX graphs, written node by node with seeded random weights.

What a GPU benchmark runs where no model hub can be reached: the architectures of the papers (Dosovitskiy et al. 2020; He
et al. 2015, v1.5 with the stride in the 3x3 convolution), batch normalisation folded into weights and biases, FP16
throughout or FP32, the batch dynamic.
Times do not depend on the values of the weights, none of which is zero; they are scaled to keep activations in FP16's range.

    python benchmarks/networks.py vit out.onnx --fp16
    python benchmarks/networks.py resnet50 out.onnx --fp16
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

__all__ = ["NETWORKS", "Graph", "resnet50", "vit"]

OPSET, IR_VERSION = 20, 10


class Graph:
    """Nodes and weights as they are added; names count up."""

    def __init__(self, half: bool, seed: int = 0) -> None:
        self.type = np.float16 if half else np.float32
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(seed)
        self._count = 0

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        """The one output of a new node."""
        self._count += 1
        out = f"{op.lower()}_{self._count}"
        self.nodes.append(helper.make_node(op, list(inputs), [out], name=f"/{out}", **attributes))
        return out

    def constant(self, array: np.ndarray) -> str:
        self._count += 1
        name = f"w_{self._count}"
        self.weights.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def random(self, *shape: int, fan_in: int) -> str:
        """Weights that keep the variance of what goes through them."""
        values = self._random.standard_normal(shape, np.float32) / math.sqrt(fan_in)
        return self.constant(values.astype(self.type))

    def scalar(self, value: float) -> str:
        return self.constant(np.asarray(value, self.type))

    def integers(self, *values: int) -> str:
        return self.constant(np.asarray(values, np.int64))

    def save(self, path: Path, name: str, given: tuple[Any, ...], made: str, out: tuple[Any, ...]) -> Path:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.type))
        self.nodes.append(helper.make_node("Identity", [made], ["logits"], name="/logits"))
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("images", kind, given)],
            [helper.make_tensor_value_info("logits", kind, out)],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path


def vit(path: Path, *, half: bool = True, width: int = 768, depth: int = 12, heads: int = 12, size: int = 224) -> Path:
    """ViT-B/16 (the default sizes): `images` batch x 3 x 224 x 224 to `logits` batch x 1000."""
    graph = Graph(half)
    patch, tokens, head = 16, (size // 16) ** 2, width // heads
    x = graph.add(
        "Conv", "images", graph.random(width, 3, patch, patch, fan_in=3 * patch * patch), kernel_shape=[patch, patch],
        strides=[patch, patch],
    )  # fmt: skip
    x = graph.add("Transpose", graph.add("Reshape", x, graph.integers(0, width, tokens)), perm=[0, 2, 1])
    # a row in front for the class token, whose values are in the first row of what is added: no operator asks for the batch
    x = graph.add("Pad", x, graph.integers(0, 1, 0, 0, 0, 0), graph.scalar(0.0))
    x = graph.add("Add", x, graph.random(1, tokens + 1, width, fan_in=width))

    def norm(value: str) -> str:
        ones, zeros = graph.constant(np.ones(width, graph.type)), graph.constant(np.zeros(width, graph.type))
        return graph.add("LayerNormalization", value, ones, zeros, axis=-1, epsilon=1e-6)

    def linear(value: str, before: int, after: int) -> str:
        made = graph.add("MatMul", value, graph.random(before, after, fan_in=before))
        return graph.add("Add", made, graph.random(after, fan_in=before))

    def split(value: str, perm: list[int]) -> str:
        return graph.add("Transpose", graph.add("Reshape", value, graph.integers(0, 0, heads, head)), perm=perm)

    for _ in range(depth):
        y = norm(x)
        q = split(linear(y, width, width), [0, 2, 1, 3])
        k = split(linear(y, width, width), [0, 2, 3, 1])
        v = split(linear(y, width, width), [0, 2, 1, 3])
        scores = graph.add("Mul", graph.add("MatMul", q, k), graph.scalar(head**-0.5))
        mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), v)
        mixed = graph.add("Reshape", graph.add("Transpose", mixed, perm=[0, 2, 1, 3]), graph.integers(0, 0, width))
        x = graph.add("Add", x, linear(mixed, width, width))
        y = graph.add("Gelu", linear(norm(x), width, 4 * width))
        x = graph.add("Add", x, linear(y, 4 * width, width))
    first = graph.add("Gather", norm(x), graph.constant(np.asarray(0, np.int64)), axis=1)
    logits = linear(first, width, 1000)
    return graph.save(path, "vit", ("batch", 3, size, size), logits, ("batch", 1000))


def resnet50(path: Path, *, half: bool = True, size: int = 224) -> Path:
    """ResNet-50 v1.5: `images` batch x 3 x 224 x 224 to `logits` batch x 1000."""
    graph = Graph(half)

    def conv(value: str, before: int, after: int, kernel: int, stride: int = 1) -> str:
        pad = kernel // 2
        return graph.add(
            "Conv", value, graph.random(after, before, kernel, kernel, fan_in=2 * before * kernel * kernel),
            graph.random(after, fan_in=100), kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[pad] * 4,
        )  # fmt: skip

    def relu(value: str) -> str:
        return graph.add("Relu", value)

    x = relu(conv("images", 3, 64, 7, 2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    before = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = relu(conv(x, before, inner, 1))
            y = relu(conv(y, inner, inner, 3, stride))
            y = conv(y, inner, 4 * inner, 1)
            skip = x if block else conv(x, before, 4 * inner, 1, stride)
            x = relu(graph.add("Add", y, skip))
            before = 4 * inner
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    x = graph.add("Gemm", x, graph.random(before, 1000, fan_in=before), graph.constant(np.zeros(1000, graph.type)))
    return graph.save(path, "resnet50", ("batch", 3, size, size), x, ("batch", 1000))


NETWORKS = {"vit": vit, "resnet50": resnet50}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=NETWORKS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fp16", action="store_true")
    args = parser.parse_args()
    made = NETWORKS[args.network](args.out, half=args.fp16)
    print(f"{made}: {made.stat().st_size >> 20} MiB")


if __name__ == "__main__":
    main()

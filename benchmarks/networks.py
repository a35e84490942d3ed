"""ViT-B/16, ResNet-50, YOLOv10m and BERT-base as ONNX graphs, written node by node with seeded random weights.

What a GPU benchmark runs where no model hub can be reached: the architectures of the papers (Dosovitskiy et al. 2020; He
et al. 2015, v1.5 with the stride in the 3x3 convolution; Wang et al. 2024; Devlin et al. 2018), batch normalisation folded
into weights and biases, FP16 throughout or FP32, the batch dynamic.
Times do not depend on the values of the weights, none of which is zero; they are scaled to keep activations in FP16's range.
`fused=True` writes ViT and BERT with ONNX Runtime's own operators of the domain com.microsoft, for its CUDA provider.

    python benchmarks/networks.py vit out.onnx --fp16
    python benchmarks/networks.py resnet50 out.onnx --fp16
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET, IR_VERSION = 20, 10

Shapes = dict[str, tuple[int, ...]]
"""Shapes without the batch, by the tensor's name."""


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

    def draw(self, *shape: int, fan_in: int) -> np.ndarray:
        """Weights that keep the variance of what goes through them."""
        return (self._random.standard_normal(shape, np.float32) / math.sqrt(fan_in)).astype(self.type)

    def random(self, *shape: int, fan_in: int) -> str:
        return self.constant(self.draw(*shape, fan_in=fan_in))

    def scalar(self, value: float) -> str:
        return self.constant(np.asarray(value, self.type))

    def integers(self, *values: int) -> str:
        return self.constant(np.asarray(values, np.int64))

    def conv(self, value: str, before: int, after: int, kernel: int = 1, stride: int = 1, *, group: int = 1) -> str:
        """A convolution with bias that keeps the size at stride 1."""
        fan_in = 2 * before // group * kernel * kernel
        return self.add(
            "Conv", value, self.random(after, before // group, kernel, kernel, fan_in=fan_in),
            self.random(after, fan_in=100), kernel_shape=[kernel] * 2,
            strides=[stride] * 2, pads=[kernel // 2] * 4, group=group,
        )  # fmt: skip

    def linear(self, value: str, before: int, after: int) -> str:
        made = self.add("MatMul", value, self.random(before, after, fan_in=before))
        return self.add("Add", made, self.random(after, fan_in=before))

    def norm(self, value: str, width: int, epsilon: float) -> str:
        return self.add("LayerNormalization", value, *self.ones_zeros(width), axis=-1, epsilon=epsilon)

    def ones_zeros(self, width: int) -> tuple[str, str]:
        return self.constant(np.ones(width, self.type)), self.constant(np.zeros(width, self.type))

    def attention(self, value: str, width: int, heads: int, mask: str | None = None) -> str:
        """Multi-head attention with the product behind it; `mask` is added to the scores."""
        head = width // heads

        def split(perm: list[int]) -> str:
            parts = self.add("Reshape", self.linear(value, width, width), self.integers(0, 0, heads, head))
            return self.add("Transpose", parts, perm=perm)

        q, k, v = split([0, 2, 1, 3]), split([0, 2, 3, 1]), split([0, 2, 1, 3])
        scores = self.add("Mul", self.add("MatMul", q, k), self.scalar(head**-0.5))
        if mask is not None:
            scores = self.add("Add", scores, mask)
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), v)
        mixed = self.add("Reshape", self.add("Transpose", mixed, perm=[0, 2, 1, 3]), self.integers(0, 0, width))
        return self.linear(mixed, width, width)

    # ------------------------------------------------------------------ the same in ONNX Runtime's own operators

    def contrib(self, op: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> list[str]:
        """The outputs of a node of the domain com.microsoft, the first and the last of which are used."""
        self._count += 1
        names = [f"{op.lower()}_{self._count}" + (f"_{at}" if at else "") for at in range(outputs)]
        names[1:-1] = [""] * len(names[1:-1])
        node = helper.make_node(op, [*inputs], names, name=f"/{names[0]}", domain="com.microsoft", **attributes)
        self.nodes.append(node)
        return names

    def packed_attention(self, value: str, width: int, heads: int, mask: str = "") -> tuple[str, str]:
        """As `attention`, with one product for Q, K and V; gives the last product and its bias apart."""
        drawn = [(self.draw(width, width, fan_in=width), self.draw(width, fan_in=width)) for _ in range(3)]
        weights, biases = (self.constant(np.concatenate(parts, -1)) for parts in zip(*drawn, strict=True))
        (mixed,) = self.contrib("Attention", [value, weights, biases, mask], num_heads=heads)
        return self.product(mixed, width, width)

    def product(self, value: str, before: int, after: int) -> tuple[str, str]:
        """A product and its bias, which another node adds."""
        made = self.add("MatMul", value, self.random(before, after, fan_in=before))
        return made, self.random(after, fan_in=before)

    def skip_norm(self, value: str, bias: str, skip: str, width: int, epsilon: float) -> tuple[str, str]:
        """The normalised sum of all three, and the sum."""
        inputs = [value, skip, *self.ones_zeros(width), bias]
        out = self.contrib("SkipLayerNormalization", inputs, 4, epsilon=epsilon)
        return out[0], out[-1]

    def gelu(self, value: str, before: int, after: int, *, fused: bool) -> str:
        if fused:
            return self.contrib("BiasGelu", self.product(value, before, after))[0]
        return self.add("Gelu", self.linear(value, before, after))

    # ------------------------------------------------------------------

    def save(self, path: Path, name: str, inputs: Shapes, outputs: Shapes) -> Path:
        """Write the model. `inputs` and `outputs` are shapes by name; inputs named `*ids` or `*mask` are INT64, an output's
        value is the node output of the same name."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.type))

        def infos(shapes: Shapes) -> list[onnx.ValueInfoProto]:
            return [
                helper.make_tensor_value_info(
                    item, onnx.TensorProto.INT64 if item.endswith(("ids", "mask")) else kind, ("batch", *shape)
                )
                for item, shape in shapes.items()
            ]  # fmt: skip

        graph = helper.make_graph(self.nodes, name, infos(inputs), infos(outputs), self.weights)
        opsets = [helper.make_opsetid("", OPSET)]
        if any(node.domain for node in self.nodes):
            opsets.append(helper.make_opsetid("com.microsoft", 1))
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
        onnx.checker.check_model(model)
        onnx.save(model, path)
        return path

    def output(self, value: str, name: str) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"/{name}"))


def vit(
    path: Path, *, half: bool = True, fused: bool = False, width: int = 768, depth: int = 12, heads: int = 12,
    size: int = 224,
) -> Path:  # fmt: skip
    """ViT-B/16 (the default sizes): `images` batch x 3 x 224 x 224 to `logits` batch x 1000."""
    graph = Graph(half)
    patch, tokens, epsilon = 16, (size // 16) ** 2, 1e-6
    x = graph.add(
        "Conv", "images", graph.random(width, 3, patch, patch, fan_in=3 * patch * patch), kernel_shape=[patch, patch],
        strides=[patch, patch],
    )  # fmt: skip
    x = graph.add("Transpose", graph.add("Reshape", x, graph.integers(0, width, tokens)), perm=[0, 2, 1])
    # a row in front for the class token, whose values are in the first row of what is added: no operator asks for the batch
    x = graph.add("Pad", x, graph.integers(0, 1, 0, 0, 0, 0), graph.scalar(0.0))
    x = graph.add("Add", x, graph.random(1, tokens + 1, width, fan_in=width))
    y = graph.norm(x, width, epsilon)
    for _ in range(depth):
        if fused:
            y, x = graph.skip_norm(*graph.packed_attention(y, width, heads), x, width, epsilon)
            y = graph.gelu(y, width, 4 * width, fused=True)
            y, x = graph.skip_norm(*graph.product(y, 4 * width, width), x, width, epsilon)
        else:
            x = graph.add("Add", x, graph.attention(y, width, heads))
            y = graph.gelu(graph.norm(x, width, epsilon), width, 4 * width, fused=False)
            x = graph.add("Add", x, graph.linear(y, 4 * width, width))
            y = graph.norm(x, width, epsilon)
    first = graph.add("Gather", y, graph.constant(np.asarray(0, np.int64)), axis=1)
    graph.output(graph.linear(first, width, 1000), "logits")
    return graph.save(path, "vit", {"images": (3, size, size)}, {"logits": (1000,)})


def bert(
    path: Path, *, half: bool = True, fused: bool = False, width: int = 768, depth: int = 12, heads: int = 12,
    tokens: int = 128, words: int = 30522,
) -> Path:  # fmt: skip
    """BERT-base's encoder (the default sizes): `input_ids` and `attention_mask` batch x 128 to `hidden` 128 x 768."""
    graph = Graph(half)
    epsilon = 1e-12
    x = graph.add("Gather", graph.random(words, width, fan_in=1), "input_ids")
    x = graph.norm(graph.add("Add", x, graph.random(1, tokens, width, fan_in=1)), width, epsilon)
    mask = graph.add("Cast", "attention_mask", to=onnx.TensorProto.INT32)
    if not fused:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(graph.type))
        mask = graph.add("Unsqueeze", graph.add("Cast", "attention_mask", to=kind), graph.integers(1, 2))
        mask = graph.add("Mul", graph.add("Sub", graph.scalar(1.0), mask), graph.scalar(-1e4))
    for _ in range(depth):
        if fused:
            x, _sum = graph.skip_norm(*graph.packed_attention(x, width, heads, mask), x, width, epsilon)
            y = graph.gelu(x, width, 4 * width, fused=True)
            x, _sum = graph.skip_norm(*graph.product(y, 4 * width, width), x, width, epsilon)
        else:
            x = graph.norm(graph.add("Add", x, graph.attention(x, width, heads, mask)), width, epsilon)
            y = graph.gelu(x, width, 4 * width, fused=False)
            x = graph.norm(graph.add("Add", x, graph.linear(y, 4 * width, width)), width, epsilon)
    graph.output(x, "hidden")
    return graph.save(
        path, "bert", {"input_ids": (tokens,), "attention_mask": (tokens,)}, {"hidden": (tokens, width)}
    )  # fmt: skip


def resnet50(path: Path, *, half: bool = True, size: int = 224) -> Path:
    """ResNet-50 v1.5: `images` batch x 3 x 224 x 224 to `logits` batch x 1000."""
    graph = Graph(half)

    def relu(value: str) -> str:
        return graph.add("Relu", value)

    x = relu(graph.conv("images", 3, 64, 7, 2))
    x = graph.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    before = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inner = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            y = relu(graph.conv(x, before, inner, 1))
            y = relu(graph.conv(y, inner, inner, 3, stride))
            y = graph.conv(y, inner, 4 * inner, 1)
            skip = x if block else graph.conv(x, before, 4 * inner, 1, stride)
            x = relu(graph.add("Add", y, skip))
            before = 4 * inner
    x = graph.add("Flatten", graph.add("GlobalAveragePool", x))
    x = graph.add("Gemm", x, graph.random(before, 1000, fan_in=before), graph.constant(np.zeros(1000, graph.type)))
    graph.output(x, "logits")
    return graph.save(path, "resnet50", {"images": (3, size, size)}, {"logits": (1000,)})


def yolo(path: Path, *, half: bool = True, size: int = 640, divide: int = 1, classes: int = 80) -> Path:
    """YOLOv10m's one-to-one branch: `images` batch x 3 x 640 x 640 to `boxes` batch x 4 x 8400 (x1 y1 x2 y2 in pixels) and
    `scores` batch x 80 x 8400, before the best 300 are chosen. `divide` makes every width a part of the real one."""
    net = _Yolo(half, divide)
    pyramid = net.neck(*net.backbone("images"), size)
    boxes, scores = zip(
        *(net.head(value, width, classes, (size // s) ** 2) for value, width, s in pyramid), strict=True
    )
    graph = net.graph
    points = sum((size // s) ** 2 for _, _, s in pyramid)
    # the expected distance to each side, over 16 bins
    bins = graph.add("Reshape", graph.add("Concat", *boxes, axis=2), graph.integers(0, 4, 16, points))
    shares = graph.add("Softmax", graph.add("Transpose", bins, perm=[0, 1, 3, 2]), axis=-1)
    far = graph.add("MatMul", shares, graph.constant(np.arange(16, dtype=graph.type).reshape(16, 1)))
    far = graph.add("Reshape", far, graph.integers(0, 4, points))
    grids = [np.stack(np.meshgrid(*[np.arange(size // s) + 0.5] * 2), 0).reshape(2, -1) for _, _, s in pyramid]
    centres = np.concatenate(grids, 1).astype(graph.type)[None]
    strides = np.concatenate([np.full((size // s) ** 2, s) for _, _, s in pyramid]).astype(graph.type)[None, None]
    sides = [graph.add("Slice", far, graph.integers(at), graph.integers(at + 2), graph.integers(1)) for at in (0, 2)]
    middle = graph.constant(centres)
    corners = [graph.add("Sub", middle, sides[0]), graph.add("Add", middle, sides[1])]
    graph.output(graph.add("Mul", graph.add("Concat", *corners, axis=1), graph.constant(strides)), "boxes")
    graph.output(graph.add("Sigmoid", graph.add("Concat", *scores, axis=2)), "scores")
    shapes: Shapes = {"boxes": (4, points), "scores": (classes, points)}
    return graph.save(path, "yolo", {"images": (3, size, size)}, shapes)


class _Yolo:
    """The blocks of YOLOv10 (Wang et al. 2024) at the widths and depths of its model M; each gives its output's name."""

    def __init__(self, half: bool, divide: int) -> None:
        self.graph = Graph(half)
        self.widths = [width // divide for width in (48, 96, 192, 384, 576)]

    def act(self, value: str, before: int, after: int, kernel: int = 1, stride: int = 1, *, group: int = 1) -> str:
        """A convolution and SiLU."""
        made = self.graph.conv(value, before, after, kernel, stride, group=group)
        return self.graph.add("Mul", made, self.graph.add("Sigmoid", made))

    def down(self, value: str, before: int, after: int) -> str:
        """Widen by 1x1, then halve the size channel by channel."""
        return self.graph.conv(self.act(value, before, after), after, after, 3, 2, group=after)

    def stage(self, value: str, before: int, after: int, count: int, *, compact: bool = False, add: bool = True) -> str:
        """C2f: half of the channels through `count` blocks, whose outputs are all joined. `compact`: depthwise blocks."""
        half = after // 2
        made = self.act(value, before, after)
        parts = [
            self.graph.add("Slice", made, *(self.graph.integers(at) for at in (start, start + half, 1)))
            for start in (0, half)
        ]
        for _ in range(count):
            y = parts[-1]
            if compact:
                y = self.act(y, half, half, 3, group=half)
                y = self.act(self.act(y, half, 2 * half), 2 * half, 2 * half, 3, group=2 * half)
                y = self.act(self.act(y, 2 * half, half), half, half, 3, group=half)
            else:
                y = self.act(self.act(y, half, half, 3), half, half, 3)
            parts.append(self.graph.add("Add", parts[-1], y) if add else y)
        return self.act(self.graph.add("Concat", *parts, axis=1), (2 + count) * half, after)

    def pool(self, value: str, width: int) -> str:
        """SPPF: three 5x5 maxima, one after the other."""
        parts = [self.act(value, width, width // 2)]
        for _ in range(3):
            parts.append(self.graph.add("MaxPool", parts[-1], kernel_shape=[5, 5], strides=[1, 1], pads=[2] * 4))
        return self.act(self.graph.add("Concat", *parts, axis=1), 2 * width, width)

    def attend(self, value: str, width: int, cells: int) -> str:
        """PSA: attention over the `cells` squared positions of one half of the channels; keys are half as wide as values."""
        graph, half = self.graph, width // 2
        heads = max(half // 64, 1)
        head = half // heads
        key = head // 2
        made = self.act(value, width, width)
        still, moved = (
            graph.add("Slice", made, *(graph.integers(at) for at in (start, start + half, 1))) for start in (0, half)
        )
        packed = graph.conv(moved, half, half + 2 * heads * key)
        packed = graph.add("Reshape", packed, graph.integers(0, heads, 2 * key + head, cells * cells))
        bounds = ((0, key), (key, 2 * key), (2 * key, 2 * key + head))
        q, k, v = (graph.add("Slice", packed, *(graph.integers(at) for at in (*ends, 2))) for ends in bounds)
        scores = graph.add("MatMul", graph.add("Transpose", q, perm=[0, 1, 3, 2]), k)
        shares = graph.add("Softmax", graph.add("Mul", scores, graph.scalar(key**-0.5)), axis=-1)
        mixed = graph.add("MatMul", v, graph.add("Transpose", shares, perm=[0, 1, 3, 2]))
        shape = graph.integers(0, half, cells, cells)
        places = graph.conv(graph.add("Reshape", v, shape), half, half, 3, group=half)
        mixed = graph.conv(graph.add("Add", graph.add("Reshape", mixed, shape), places), half, half)
        moved = graph.add("Add", moved, mixed)
        moved = graph.add("Add", moved, graph.conv(self.act(moved, half, width), width, half))
        return self.act(graph.add("Concat", still, moved, axis=1), width, width)

    def backbone(self, images: str) -> tuple[str, str, str]:
        """Features at strides 8, 16 and 32, before the last attention."""
        a, b, c, d, e = self.widths
        x = self.stage(self.act(self.act(images, 3, a, 3, 2), a, b, 3, 2), b, b, 2)
        third = self.stage(self.act(x, b, c, 3, 2), c, c, 4)
        fourth = self.stage(self.down(third, c, d), d, d, 4)
        return third, fourth, self.pool(self.stage(self.down(fourth, d, e), e, e, 2, compact=True), e)

    def neck(self, third: str, fourth: str, fifth: str, size: int) -> list[tuple[str, int, int]]:
        """Value, channels and stride of each of the three maps that boxes come from."""
        graph, (_, _, c, d, e) = self.graph, self.widths
        fifth = self.attend(fifth, e, size // 32)

        def up(value: str) -> str:
            twice = graph.constant(np.asarray([1, 1, 2, 2], np.float32))
            return graph.add(
                "Resize", value, "", twice, mode="nearest", coordinate_transformation_mode="asymmetric",
                nearest_mode="floor",
            )  # fmt: skip

        fourth = self.stage(graph.add("Concat", up(fifth), fourth, axis=1), e + d, d, 2, add=False)
        third = self.stage(graph.add("Concat", up(fourth), third, axis=1), d + c, c, 2, add=False)
        joined = graph.add("Concat", self.act(third, c, c, 3, 2), fourth, axis=1)
        fourth = self.stage(joined, c + d, d, 2, compact=True)
        joined = graph.add("Concat", self.down(fourth, d, d), fifth, axis=1)
        return [(third, c, 8), (fourth, d, 16), (self.stage(joined, d + e, e, 2, compact=True), e, 32)]

    def head(self, value: str, width: int, classes: int, points: int) -> tuple[str, str]:
        """Bins of the boxes' sides, batch x 64 x points, and logits of the classes."""
        graph, sides, inner = self.graph, max(self.widths[2] // 4, 64), max(self.widths[2], classes)
        box = graph.conv(self.act(self.act(value, width, sides, 3), sides, sides, 3), sides, 64)
        kind = self.act(self.act(value, width, width, 3, group=width), width, inner)
        kind = graph.conv(self.act(self.act(kind, inner, inner, 3, group=inner), inner, inner), inner, classes)
        return (
            graph.add("Reshape", box, graph.integers(0, 64, points)),
            graph.add("Reshape", kind, graph.integers(0, classes, points)),
        )


NETWORKS = {"vit": vit, "resnet50": resnet50, "yolo": yolo, "bert": bert}


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

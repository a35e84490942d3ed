"""Networks shaped like those that get quantised, as FP32 ONNX graphs with seeded random weights, batch 1 to any.

ResNet-18 (He et al. 2015), YOLOv8n (the layers of its published configuration, boxes decoded), MobileNetV3-Large (Howard et
al. 2019), ViT-tiny (Touvron et al. 2020: width 192) and BERT-base (Devlin et al. 2018). Batch normalisation is folded, as
PyTorch's exporters do; times do not depend on the weights' values, which keep the variance of what goes through them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from networks import IR_VERSION, OPSET, Graph, vit
from onnx import TensorProto, helper

_TOKENS = 128


class Net(Graph):
    """Layers of convolutional networks."""

    def conv(
        self, x: str, before: int, after: int, kernel: int, stride: int = 1, *, groups: int = 1, gain: float = 2.0
    ) -> str:
        fan_in = before // groups * kernel * kernel
        return self.add(
            "Conv", x, self.random(after, before // groups, kernel, kernel, fan_in=max(1, round(fan_in / gain))),
            self.random(after, fan_in=100), kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[kernel // 2] * 4,
            group=groups,
        )  # fmt: skip

    def gemm(self, x: str, before: int, after: int) -> str:
        return self.add("Gemm", x, self.random(after, before, fan_in=before), self.random(after, fan_in=100), transB=1)

    def silu(self, x: str) -> str:
        return self.add("Mul", x, self.add("Sigmoid", x))


def resnet18(path: Path, size: int = 224) -> Path:
    """`images` batch x 3 x 224 x 224 to `logits` batch x 1000."""
    net = Net(half=False)
    x = net.add("Relu", net.conv("images", 3, 64, 7, 2))
    x = net.add("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    before = 64
    for stage in range(4):
        width = 64 << stage
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = net.add("Relu", net.conv(x, before, width, 3, stride))
            y = net.conv(y, width, width, 3, gain=0.5)
            skip = x if stride == 1 and before == width else net.conv(x, before, width, 1, stride, gain=1.0)
            x = net.add("Relu", net.add("Add", y, skip))
            before = width
    x = net.gemm(net.add("Flatten", net.add("GlobalAveragePool", x)), before, 1000)
    return net.save(path, "resnet18", ("batch", 3, size, size), x, ("batch", 1000))


def mobilenetv3(path: Path, size: int = 224) -> Path:
    """MobileNetV3-Large: `images` batch x 3 x 224 x 224 to `logits` batch x 1000."""
    net = Net(half=False)

    def act(x: str, hard: bool) -> str:
        return net.add("HardSwish" if hard else "Relu", x)

    x, before = act(net.conv("images", 3, 16, 3, 2), True), 16
    layers = (
        (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
        (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
        (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
        (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
        (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
    )  # fmt: skip
    for kernel, inner, after, squeeze, hard, stride in layers:
        y = act(net.conv(x, before, inner, 1), hard) if inner != before else x
        y = act(net.conv(y, inner, inner, kernel, stride, groups=inner), hard)
        if squeeze:
            few = -(-inner // 4 // 8) * 8
            pooled = net.add("Relu", net.conv(net.add("GlobalAveragePool", y), inner, few, 1))
            y = net.add("Mul", y, net.add("HardSigmoid", net.conv(pooled, few, inner, 1), alpha=1 / 6, beta=0.5))
        y = net.conv(y, inner, after, 1, gain=1.0)
        x = net.add("Add", x, y) if stride == 1 and before == after else y
        before = after
    x = act(net.conv(x, before, 960, 1), True)
    x = act(net.gemm(net.add("Flatten", net.add("GlobalAveragePool", x)), 960, 1280), True)
    return net.save(path, "mobilenetv3", ("batch", 3, size, size), net.gemm(x, 1280, 1000), ("batch", 1000))


def yolov8n(path: Path, size: int = 320, classes: int = 80) -> Path:
    """`images` batch x 3 x size x size to `logits` batch x (4 + classes) x anchors, boxes decoded."""
    net = Net(half=False)

    def conv(x: str, before: int, after: int, kernel: int = 1, stride: int = 1) -> str:
        return net.silu(net.conv(x, before, after, kernel, stride))

    def c2f(x: str, before: int, after: int, count: int, shortcut: bool) -> str:
        half = after // 2
        x = conv(x, before, after)
        net._count += 1
        parts = [f"split_{net._count}_{at}" for at in range(2)]
        node = helper.make_node("Split", [x, net.integers(half, half)], parts, name=f"/split_{net._count}", axis=1)
        net.nodes.append(node)
        for _ in range(count):
            y = conv(conv(parts[-1], half, half, 3), half, half, 3)
            parts.append(net.add("Add", parts[-1], y) if shortcut else y)
        return conv(net.add("Concat", *parts, axis=1), len(parts) * half, after)

    def upsample(x: str) -> str:
        return net.add(
            "Resize", x, "", net.constant(np.array([1, 1, 2, 2], np.float32)), mode="nearest",
            coordinate_transformation_mode="asymmetric", nearest_mode="floor",
        )  # fmt: skip

    x = conv(conv("images", 3, 16, 3, 2), 16, 32, 3, 2)
    x = conv(c2f(x, 32, 32, 1, True), 32, 64, 3, 2)
    p3 = c2f(x, 64, 64, 2, True)
    p4 = c2f(conv(p3, 64, 128, 3, 2), 128, 128, 2, True)
    x = c2f(conv(p4, 128, 256, 3, 2), 256, 256, 1, True)
    pools = [conv(x, 256, 128)]
    for _ in range(3):
        pools.append(net.add("MaxPool", pools[-1], kernel_shape=[5, 5], strides=[1, 1], pads=[2, 2, 2, 2]))
    p5 = conv(net.add("Concat", *pools, axis=1), 512, 256)
    n4 = c2f(net.add("Concat", upsample(p5), p4, axis=1), 384, 128, 1, False)
    n3 = c2f(net.add("Concat", upsample(n4), p3, axis=1), 192, 64, 1, False)
    m4 = c2f(net.add("Concat", conv(n3, 64, 64, 3, 2), n4, axis=1), 192, 128, 1, False)
    m5 = c2f(net.add("Concat", conv(m4, 128, 128, 3, 2), p5, axis=1), 384, 256, 1, False)
    boxes, scores, anchors, steps = [], [], [], []
    for x, width, step in ((n3, 64, 8), (m4, 128, 16), (m5, 256, 32)):
        side = size // step
        box = net.conv(conv(conv(x, width, 64, 3), 64, 64, 3), 64, 64, 1, gain=1.0)
        score = net.conv(conv(conv(x, width, 80, 3), 80, 80, 3), 80, classes, 1, gain=1.0)
        boxes.append(net.add("Reshape", box, net.integers(0, 64, side * side)))
        scores.append(net.add("Reshape", score, net.integers(0, classes, side * side)))
        grid = np.stack(np.meshgrid(*[np.arange(side) + 0.5] * 2)).reshape(2, -1)
        anchors.append(grid.astype(np.float32))
        steps.append(np.full((1, side * side), step, np.float32))
    whole = sum(grid.shape[1] for grid in anchors)
    box = net.add("Reshape", net.add("Concat", *boxes, axis=2), net.integers(0, 4, 16, whole))
    box = net.add("Softmax", net.add("Transpose", box, perm=[0, 2, 1, 3]), axis=1)
    net.weights.append(onnx.numpy_helper.from_array(np.arange(16, dtype=np.float32).reshape(1, 16, 1, 1), "bins"))
    box = net.add("Reshape", net.add("Conv", box, "bins", kernel_shape=[1, 1]), net.integers(0, 4, whole))
    near, far = (net.add("Slice", box, net.integers(low), net.integers(low + 2), net.integers(1)) for low in (0, 2))
    centres = net.constant(np.concatenate(anchors, 1)[None])
    low, high = net.add("Sub", centres, near), net.add("Add", centres, far)
    middle = net.add("Mul", net.add("Add", low, high), net.scalar(0.5))
    box = net.add("Concat", middle, net.add("Sub", high, low), axis=1)
    box = net.add("Mul", box, net.constant(np.concatenate(steps, 1)[None]))
    made = net.add("Concat", box, net.add("Sigmoid", net.add("Concat", *scores, axis=2)), axis=1)
    return net.save(path, "yolov8n", ("batch", 3, size, size), made, ("batch", 4 + classes, whole))


def bert_base(path: Path, *, width: int = 768, depth: int = 12, heads: int = 12, words: int = 2000) -> Path:
    """`input_ids` and `attention_mask` batch x tokens to `logits` batch x 2; the vocabulary is small."""
    net, head = Net(half=False), width // heads

    def norm(x: str) -> str:
        ones, zeros = net.constant(np.ones(width, np.float32)), net.constant(np.zeros(width, np.float32))
        return net.add("LayerNormalization", x, ones, zeros, axis=-1, epsilon=1e-12)

    def linear(x: str, before: int, after: int) -> str:
        made = net.add("MatMul", x, net.random(before, after, fan_in=before))
        return net.add("Add", net.random(after, fan_in=before), made)

    def split(x: str, perm: list[int]) -> str:
        return net.add("Transpose", net.add("Reshape", x, net.integers(0, 0, heads, head)), perm=perm)

    mask = net.add("Cast", net.add("Unsqueeze", "attention_mask", net.integers(1, 2)), to=TensorProto.FLOAT)
    mask = net.add("Mul", net.add("Sub", net.scalar(1.0), mask), net.scalar(-10000.0))
    x = net.add("Gather", net.random(words, width, fan_in=1), "input_ids")
    x = norm(net.add("Add", x, net.random(1, _TOKENS, width, fan_in=1)))
    for _ in range(depth):
        q = split(linear(x, width, width), [0, 2, 1, 3])
        k = split(linear(x, width, width), [0, 2, 3, 1])
        v = split(linear(x, width, width), [0, 2, 1, 3])
        scores = net.add("Div", net.add("MatMul", q, k), net.scalar(math.sqrt(head)))
        mixed = net.add("MatMul", net.add("Softmax", net.add("Add", scores, mask), axis=-1), v)
        mixed = net.add("Reshape", net.add("Transpose", mixed, perm=[0, 2, 1, 3]), net.integers(0, 0, width))
        x = norm(net.add("Add", linear(mixed, width, width), x))
        y = linear(x, width, 4 * width)
        half = net.add("Add", net.add("Erf", net.add("Div", y, net.scalar(math.sqrt(2)))), net.scalar(1.0))
        y = net.add("Mul", net.add("Mul", y, half), net.scalar(0.5))
        x = norm(net.add("Add", linear(y, 4 * width, width), x))
    first = net.add("Gather", x, net.constant(np.asarray(0, np.int64)), axis=1)
    pooled = net.add("Tanh", net.gemm(first, width, width))
    net.nodes.append(helper.make_node("Identity", [net.gemm(pooled, width, 2)], ["logits"], name="/logits"))
    given = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ("batch", _TOKENS))
        for name in ("input_ids", "attention_mask")
    ]
    made = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("batch", 2))]
    graph = helper.make_graph(net.nodes, "bert", given, made, net.weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def vit_tiny(path: Path) -> Path:
    """`images` batch x 3 x 224 x 224 to `logits` batch x 1000."""
    return vit(path, half=False, width=192, quantize_outputs=3)


NETWORKS: dict[str, Callable[[Path], Path]] = {
    "resnet18": resnet18, "yolov8n": yolov8n, "mobilenetv3": mobilenetv3, "vit-tiny": vit_tiny, "bert-base": bert_base,
}  # fmt: skip


def feeds(model: Path, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Random feeds of batch 1 for one of these networks."""
    rng = np.random.default_rng(seed)
    proto = onnx.load(str(model), load_external_data=False)
    made = []
    for _ in range(count):
        feed: dict[str, Any] = {}
        for item in proto.graph.input:
            shape = [size.dim_value or 1 for size in item.type.tensor_type.shape.dim]
            if item.type.tensor_type.elem_type == TensorProto.INT64:
                feed[item.name] = rng.integers(1, 2000, shape) if item.name == "input_ids" else np.ones(shape, np.int64)
            else:
                feed[item.name] = rng.standard_normal(shape, np.float32)
        made.append(feed)
    return made

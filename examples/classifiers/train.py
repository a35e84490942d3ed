"""Trains a small ViT or a small ResNet on scikit-learn's digits and writes it as ONNX.

The recipe was fixed before the validation digits were looked at, and they choose nothing: one run, one evaluation.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import data
import numpy as np
import onnx
import onnxruntime
import torch
from data import CLASSES, SIDE_PX
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger("train")

OPSET = 18
IR_VERSION = 10


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run, besides the machine."""

    seed: int = 0
    steps: int = 2000
    batch: int = 32
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.05
    warmup_steps: int = 150
    label_smoothing: float = 0.1
    ema: float = 0.995
    turn_deg: float = 10.0  # of the augmentation, to either side, as are the next three
    stretch: float = 0.12
    slant: float = 0.12
    shift_px: float = 2.0


# --- networks


class Attention(nn.Module):
    """Multi-head attention written out, so that the graph keeps its MatMuls and its Softmax."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.depth = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens, width = x.shape[1:]
        q, k, v = (part.view(-1, tokens, self.heads, self.depth).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        weights = (q @ k.transpose(2, 3) * self.depth**-0.5).softmax(3)
        return self.out((weights @ v).transpose(1, 2).reshape(-1, tokens, width))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Images [n, 1, 32, 32] to logits [n, 10]: 64 patches of 4 x 4, mean of the tokens at the end."""

    def __init__(self, width: int = 64, blocks: int = 4, heads: int = 2, patch_px: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch_px, patch_px)
        self.position = nn.Parameter(0.02 * torch.randn(1, (SIDE_PX // patch_px) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(tokens)).mean(1))


class Conv(nn.Sequential):
    """Convolution and batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = Conv(inputs, outputs, 3, stride), Conv(outputs, outputs)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else Conv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first(x))
        return functional.relu(self.second(y) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [n, 1, 32, 32] to logits [n, 10]: three stages of two basic blocks, at strides 2, 4 and 8."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.stem = Conv(1, widths[0], 3, 2)
        stages: list[nn.Module] = []
        inputs = widths[0]
        for number, width in enumerate(widths):
            stages += [BasicBlock(inputs, width, 1 if number == 0 else 2), BasicBlock(width, width, 1)]
            inputs = width
        self.stages, self.head = nn.Sequential(*stages), nn.Linear(inputs, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(functional.relu(self.stem(images))).mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"vit": ViT, "resnet": ResNet}
RECIPES = {"vit": Recipe(), "resnet": Recipe(steps=1600, learning_rate=3e-3)}


# --- training


def train(network: nn.Module, recipe: Recipe) -> nn.Module:
    """The moving average of the network's weights over its training, in eval mode."""
    pixels, targets = data.pictures("train")
    images, labels = torch.from_numpy(data.inputs(pixels)), torch.from_numpy(targets)
    network.train()
    average = copy.deepcopy(network).eval().requires_grad_(False)
    decayed = [p for p in network.parameters() if p.ndim > 1]
    free = [p for p in network.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": free, "weight_decay": 0.0}],
        lr=recipe.learning_rate,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _pace(step, recipe))

    live = [x for x in network.state_dict().values() if x.is_floating_point()]
    kept = [x for x in average.state_dict().values() if x.is_floating_point()]
    began, total, right = time.perf_counter(), 0.0, 0
    queue = torch.empty(0, dtype=torch.long)
    for step in range(1, recipe.steps + 1):
        if len(queue) < recipe.batch:
            queue = torch.cat([queue, torch.randperm(len(images))])
        chosen, queue = queue[: recipe.batch], queue[recipe.batch :]
        truth = labels[chosen]
        logits = network(augmented(images[chosen], recipe))
        loss = functional.cross_entropy(logits, truth, label_smoothing=recipe.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        torch._foreach_lerp_(kept, live, 1 - min(recipe.ema, step / (step + 20)))
        total += loss.item()
        right += int((logits.argmax(1) == truth).sum())
        if step % 100 == 0 or step == recipe.steps:
            since = (step - 1) % 100 + 1
            share, wall_s = right / (since * recipe.batch), time.perf_counter() - began
            log.info(
                "step %4d/%d  loss %.4f  right in training %.4f  %.0f s",
                step, recipe.steps, total / since, share, wall_s,
            )  # fmt: skip
            total, right = 0.0, 0
    return average


def _pace(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def augmented(images: Tensor, recipe: Recipe) -> Tensor:
    """The digits turned, stretched, slanted and moved a little, in another contrast, with noise."""
    n = len(images)

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(n).uniform_(low, high)

    angle = uniform(-recipe.turn_deg, recipe.turn_deg) * (math.pi / 180)
    wide, tall = (1 + uniform(-recipe.stretch, recipe.stretch) for _ in range(2))
    slant = uniform(-recipe.slant, recipe.slant)
    far = 2 * recipe.shift_px / SIDE_PX
    rows = [
        torch.stack([wide * angle.cos(), slant - angle.sin(), uniform(-far, far)], 1),
        torch.stack([angle.sin(), tall * angle.cos(), uniform(-far, far)], 1),
    ]
    grid = functional.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, align_corners=False)
    light = moved * uniform(0.8, 1.0)[:, None, None, None]
    return (light + torch.randn_like(light) * uniform(0, 0.04)[:, None, None, None]).clamp(0, 1)


# --- export

# what trt-engine reads from the file: how a picture goes in (data.enlarged, data.inputs) and what the output means
DECLARATION = {
    "preprocess": {
        "size": [SIDE_PX, SIDE_PX], "resize": "stretch", "interpolation": "bilinear", "channels": "L",
        "layout": "NCHW", "scale": 1 / 255, "dtype": "float32", "input": "images",
    },
    "postprocess": {
        "decode": "classify", "classes": list(CLASSES), "activation": "softmax", "output": "logits",
    },
}  # fmt: skip


def export(network: nn.Module, name: str, path: Path) -> None:
    """One ONNX file with batch norms folded, a free batch, plain names and nothing of the exporter's diary."""
    network = _folded(network)
    example = torch.rand(2, 1, SIDE_PX, SIDE_PX)  # two: with one the exporter freezes the batch, silently
    program = torch.onnx.export(
        network, (example,), dynamo=True, opset_version=OPSET, verbose=False,
        input_names=["images"], output_names=["logits"], dynamic_shapes=({0: torch.export.Dim("batch")},),
    )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    _clean(proto, name, network)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)
    _agrees(network, path)


def _folded(network: nn.Module) -> nn.Module:
    network = copy.deepcopy(network).eval()
    for module in network.modules():
        if isinstance(module, Conv):
            fused = torch.nn.utils.fusion.fuse_conv_bn_eval(module[0], module[1])
            module[0], module[1] = fused, nn.Identity()
    return network


def _clean(proto: onnx.ModelProto, name: str, network: nn.Module) -> None:
    """Drop what only a debugger reads, and number the nodes of each kind in order."""
    proto.ir_version = IR_VERSION
    proto.doc_string = f"handwritten digits, a small {name}; see README.md beside this file"
    del proto.metadata_props[:]
    proto.metadata_props.add(key="trt_engine.vision", value=json.dumps(DECLARATION, separators=(",", ":")))
    graph = proto.graph
    graph.name = name
    del graph.value_info[:]
    for thing in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        thing.doc_string = ""
        del thing.metadata_props[:]

    # a Linear on tokens becomes a MatMul with the transposed weight, and the exporter forgets whose it was
    turned = {p.detach().numpy().T.tobytes(): key for key, p in network.named_parameters() if p.ndim == 2}
    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    kept = {"images", "logits"}
    for initializer in graph.initializer:
        kept.add(initializer.name)
        if initializer.name.startswith("val_"):
            owner = turned.get(onnx.numpy_helper.to_array(initializer).tobytes())
            counts["constant"] = counts.get("constant", -1) + (owner is None)
            renamed[initializer.name] = owner or f"constant_{counts['constant']}"
            initializer.name = renamed[initializer.name]
    for node in graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
        node.name = f"{node.op_type}_{counts[node.op_type] - 1}"
        for place, output in enumerate(node.output):
            if output not in kept:
                renamed[output] = node.name if place == 0 else f"{node.name}_{place}"
        node.input[:] = [renamed.get(item, item) for item in node.input]
        node.output[:] = [renamed.get(item, item) for item in node.output]


def _agrees(network: nn.Module, path: Path) -> None:
    """Refuse a file that is not the network: batch must be free, and the answers the same at any batch."""
    graph = onnx.load(path).graph
    for value in (graph.input[0], graph.output[0]):
        if value.type.tensor_type.shape.dim[0].dim_param != "batch":
            raise SystemExit(f"`{value.name}` lost its free batch")
    infer = classifier(path)
    images = data.inputs(data.pictures("train")[0])
    for batch in (1, 2, 5):
        got = infer(images[:batch])
        with torch.inference_mode():
            want = network(torch.from_numpy(images[:batch])).numpy()
        gap = float(np.abs(got - want).max())
        log.info("onnx against torch at batch %d: %s, largest difference %.2g", batch, got.shape, gap)
        if gap > 1e-4:
            raise SystemExit(f"ONNX Runtime and torch differ by {gap} at batch {batch}")


def classifier(path: Path) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """An ONNX file as a function from images to logits."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def infer(images: NDArray[np.float32]) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = session.run(None, {"images": images})[0]
        return logits

    return infer


def evaluate(path: Path) -> None:
    """Log the accuracy of an ONNX file on both sides of the split."""
    infer = classifier(path)
    for split in data.SPLITS:
        images, labels = data.pictures(split)
        right = infer(data.inputs(images)).argmax(1) == labels
        log.info("%s, %d digits: accuracy %.4f, %d wrong", split, len(labels), right.mean(), (~right).sum())


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description="train a small classifier of digits and write it as ONNX")
    parser.add_argument("--model", choices=sorted(NETWORKS), required=True)
    parser.add_argument("-o", "--out", type=Path, help="the ONNX file [MODEL.onnx beside this script]")
    parser.add_argument("--log", type=Path, help="[train_MODEL.log beside this script]")
    parser.add_argument("--weights", type=Path, help="keep the trained weights here, or with --export read them")
    parser.add_argument("--export", action="store_true", help="train nothing: write the ONNX from --weights")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    recipe = RECIPES[args.model]
    out = args.out or here / f"{args.model}.onnx"

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    log.setLevel(logging.INFO)
    written = logging.FileHandler(args.log or here / f"train_{args.model}.log", mode="a" if args.export else "w")
    written.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(written)

    torch.set_num_threads(args.threads)
    log.info(
        "%s on CPU, %d threads; python %s, torch %s, onnx %s, onnxruntime %s, numpy %s",
        args.model, args.threads, platform.python_version(), torch.__version__, onnx.__version__,
        onnxruntime.__version__, np.__version__,
    )  # fmt: skip
    torch.manual_seed(recipe.seed)
    network = NETWORKS[args.model]()
    if args.export:
        network.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    else:
        log.info("%s", asdict(recipe))
        network = train(network, recipe)
        if args.weights is not None:
            torch.save(network.state_dict(), args.weights)
    export(network, args.model, out)
    used = sum(p.numel() for p in _folded(network).parameters())
    log.info("%d parameters, file %d bytes", used, out.stat().st_size)
    evaluate(out)


if __name__ == "__main__":
    main()

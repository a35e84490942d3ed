"""Trains the digit detector and writes model.onnx.

The network follows YOLOv10 in small: C2f backbone, pyramid at strides 8, 16 and 32, box and class
branches per level. Two heads learn together. One may answer a digit many times and is the better
teacher; the other must answer it once. Only the second is exported, so nothing has to suppress double answers.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import multiprocessing
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import detect
import numpy as np
import onnx
import scenes
import torch
from detect import GREY, SIDE_PX
from numpy.typing import NDArray
from onnxscript import ir, opset18
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

log = logging.getLogger("train")

STRIDES = (8, 16, 32)
BINS = 16  # of the distance from an anchor to each side of its box, in strides
CLASSES = len(scenes.CLASSES)
FOUND = 300  # rows of the output
OPSET = 18
IR_VERSION = 10


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a training run, besides the machine."""

    seed: int = 0
    scenes: int = 40_000
    steps: int = 8_000
    batch: int = 256
    learning_rate: float = 2e-3
    weight_decay: float = 0.03
    warmup_steps: int = 300
    ema: float = 0.9995
    box_weight: float = 7.5
    class_weight: float = 0.5
    bin_weight: float = 1.5
    many: int = 10  # anchors per digit in the one-to-many head


# --- network


class Conv(nn.Sequential):
    """Convolution, batch norm, SiLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03),
            nn.SiLU(inplace=True),
        )


class Bottleneck(nn.Module):
    def __init__(self, channels: int, shortcut: bool) -> None:
        super().__init__()
        self.first, self.second = Conv(channels, channels, 3), Conv(channels, channels, 3)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return x + y if self.shortcut else y


class C2f(nn.Module):
    """Half of the channels pass through bottlenecks; every stage is kept and mixed at the end."""

    def __init__(self, inputs: int, outputs: int, depth: int = 1, shortcut: bool = False) -> None:
        super().__init__()
        half = outputs // 2
        self.enter = Conv(inputs, outputs)
        self.stages = nn.ModuleList(Bottleneck(half, shortcut) for _ in range(depth))
        self.leave = Conv((2 + depth) * half, outputs)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.enter(x).chunk(2, 1))
        for stage in self.stages:
            parts.append(stage(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class SPPF(nn.Module):
    """Max over growing neighbourhoods, so that the coarsest level sees the whole picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enter, self.leave = Conv(channels, channels // 2), Conv(2 * channels, channels)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class Body(nn.Module):
    """Features at strides 8, 16 and 32 with `widths` channels, from images [n, 3, side, side]."""

    widths = (64, 64, 64)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv(3, 16, 3, 2), Conv(16, 32, 3, 2), C2f(32, 32, 1, True))
        self.down8 = nn.Sequential(Conv(32, 64, 3, 2), C2f(64, 64, 1, True))
        self.down16 = nn.Sequential(Conv(64, 96, 3, 2), C2f(96, 96, 1, True))
        self.down32 = nn.Sequential(Conv(96, 128, 3, 2), C2f(128, 128, 1, True), SPPF(128))
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        self.top16, self.top8 = C2f(128 + 96, 64), C2f(64 + 64, 64)
        self.shrink8, self.out16 = Conv(64, 64, 3, 2), C2f(64 + 64, 64)
        self.shrink16, self.out32 = Conv(64, 64, 3, 2), C2f(64 + 128, 64)

    def forward(self, x: Tensor) -> list[Tensor]:
        c8 = self.down8(self.stem(x))
        c16 = self.down16(c8)
        c32 = self.down32(c16)
        t16 = self.top16(torch.cat([self.up(c32), c16], 1))
        p8 = self.top8(torch.cat([self.up(t16), c8], 1))
        p16 = self.out16(torch.cat([self.shrink8(p8), t16], 1))
        p32 = self.out32(torch.cat([self.shrink16(p16), c32], 1))
        return [p8, p16, p32]


class Head(nn.Module):
    """Bins of the four distances and class logits per anchor: [n, 4 * BINS, anchors], [n, CLASSES, anchors]."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.box = nn.ModuleList(
            nn.Sequential(Conv(w, 32, 3), Conv(32, 32, 3), nn.Conv2d(32, 4 * BINS, 1)) for w in widths
        )
        self.cls = nn.ModuleList(nn.Sequential(Conv(w, 64, 3), Conv(64, 64), nn.Conv2d(64, CLASSES, 1)) for w in widths)
        for box, cls, stride in zip(self.box, self.cls, STRIDES, strict=True):
            nn.init.constant_(box[-1].bias, 1.0)
            nn.init.constant_(cls[-1].bias, math.log(5 / CLASSES / (SIDE_PX / stride) ** 2))

    def forward(self, features: list[Tensor]) -> tuple[Tensor, Tensor]:
        boxes = [branch(x).flatten(2) for branch, x in zip(self.box, features, strict=True)]
        logits = [branch(x).flatten(2) for branch, x in zip(self.cls, features, strict=True)]
        return torch.cat(boxes, 2), torch.cat(logits, 2)


class Detector(nn.Module):
    """The network in training: images to the raw answers of both heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Body()
        self.once, self.many = Head(Body.widths), Head(Body.widths)

    def forward(self, images: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        # YOLOv10 detaches the features before the once head; here, teaching the body too gave 0.006 more AP
        features = self.body(images)
        return self.once(features), self.many(features)


class Exported(nn.Module):
    """The network in use: images [n, 3, side, side] to [n, 300, 6] = x1, y1, x2, y2, score, class."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.body, self.once = detector.body, detector.once
        centres, strides = anchors()
        self.register_buffer("centres", centres.T.contiguous()[None])  # [1, 2, anchors]
        self.register_buffer("strides", strides[None, None])  # [1, 1, anchors]
        self.register_buffer("bins", torch.arange(BINS, dtype=torch.float32).view(1, 1, BINS, 1))

    def forward(self, images: Tensor) -> Tensor:
        raw, logits = self.once(self.body(images))
        count = raw.shape[2]
        spread = raw.view(-1, 4, BINS, count).softmax(2)
        distances = (spread * self.bins).sum(2) * self.strides
        near, far = distances.split(2, 1)
        boxes = torch.cat([self.centres - near, self.centres + far], 1).transpose(1, 2)
        scores = logits.sigmoid().transpose(1, 2).flatten(1)
        best, place = scores.topk(FOUND)
        anchor = place // CLASSES
        label = place - anchor * CLASSES
        chosen = boxes.gather(1, anchor[..., None].expand(-1, -1, 4))
        return torch.cat([chosen, best[..., None], label[..., None].to(best.dtype)], 2)


def anchors() -> tuple[Tensor, Tensor]:
    """Centres [anchors, 2] in pixels and strides [anchors], finest level first."""
    centres, strides = [], []
    for stride in STRIDES:
        middle = (torch.arange(SIDE_PX // stride) + 0.5) * stride
        y, x = torch.meshgrid(middle, middle, indexing="ij")
        centres.append(torch.stack([x, y], -1).reshape(-1, 2))
        strides.append(torch.full((len(middle) ** 2,), float(stride)))
    return torch.cat(centres), torch.cat(strides)


# --- scenes for training


def cached_scenes(recipe: Recipe) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Letterboxed scenes uint8 [n, 3, side, side] and rows [n, MAX_DIGITS, 5] = class, box; class -1 is none."""
    with multiprocessing.get_context("spawn").Pool() as pool:
        made = pool.starmap(_square, [(recipe.seed, index) for index in range(recipe.scenes)], chunksize=64)
    return np.stack([image for image, _ in made]), np.stack([rows for _, rows in made])


def _square(seed: int, index: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """One scene as `detect.letterbox` puts it, but anywhere in the square, of varied size and filter."""
    rng = np.random.default_rng([seed, index, 77])
    item = scenes.scene("train", seed, index)
    picture = Image.fromarray(item.image)
    factor = SIDE_PX / max(picture.size) * (1.0 if rng.random() < 0.6 else rng.uniform(0.75, 1.0))
    width, height = (round(side * factor) for side in picture.size)
    left, top = int(rng.integers(SIDE_PX - width + 1)), int(rng.integers(SIDE_PX - height + 1))
    filters = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.BOX)
    resized = picture.resize((width, height), filters[rng.choice(3, p=[0.7, 0.15, 0.15])])
    square = Image.new("RGB", (SIDE_PX, SIDE_PX), (GREY, GREY, GREY))
    square.paste(resized, (left, top))

    rows = np.full((scenes.MAX_DIGITS, 5), -1, np.float32)
    for row, digit in zip(rows, item.digits, strict=False):
        scale = np.array([width / picture.width, height / picture.height] * 2)
        row[0], row[1:] = digit.label, np.array(digit.box) * scale + [left, top, left, top]
    return np.asarray(square).transpose(2, 0, 1).copy(), rows


def augmented(images: Tensor) -> Tensor:
    """Bytes [n, 3, side, side] as floats from 0 to 1 with new light, colours and noise."""
    n, device = len(images), images.device

    def uniform(low: float, high: float, channels: int = 1) -> Tensor:
        return torch.empty(n, channels, 1, 1, device=device).uniform_(low, high)

    x = images.float() / 255
    x = (x - 0.5) * uniform(0.7, 1.3) + 0.5 + uniform(-0.12, 0.12)
    grey = x.mean(1, keepdim=True)
    x = grey + (x - grey) * uniform(0.3, 1.3)
    x = x * uniform(0.88, 1.12, 3)
    x = torch.where(uniform(0, 1) < 0.15, 1 - x, x)
    x = torch.where(uniform(0, 1) < 0.2, x[:, torch.randperm(3, device=device)], x)
    return (x + torch.randn_like(x) * uniform(0, 0.03)).clamp(0, 1)


# --- loss


def loss_of(
    raw: Tensor, logits: Tensor, truth: Tensor, centres: Tensor, strides: Tensor, per_digit: int, recipe: Recipe
) -> tuple[Tensor, Tensor]:
    """The loss of one head and its three parts (box, class, bins); `truth` is [n, digits, 5]."""
    n, _, count = raw.shape
    raw = raw.float().view(n, 4, BINS, count).permute(0, 3, 1, 2)  # [n, anchors, 4, BINS]
    logits = logits.float().transpose(1, 2)
    bins = torch.arange(BINS, device=raw.device, dtype=torch.float32)
    distances = (raw.softmax(3) * bins).sum(3) * strides[:, None]
    boxes = torch.cat([centres - distances[..., :2], centres + distances[..., 2:]], 2)
    digit, quality = assign(logits.detach().sigmoid(), boxes.detach(), truth, centres, strides, per_digit)

    taken = quality > 0
    own = truth.gather(1, digit[..., None].expand(-1, -1, 5))  # [n, anchors, 5]
    labels = own[..., 0].long().clamp(min=0)
    targets = functional.one_hot(labels, CLASSES) * quality[..., None]
    total = targets.sum().clamp(min=1)
    class_loss = functional.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / total

    weight = quality * taken
    box_loss = ((1 - ciou(boxes, own[..., 1:])) * weight).sum() / total

    gap = torch.cat([centres - own[..., 1:3], own[..., 3:] - centres], 2) / strides[:, None]
    gap = gap.clamp(0, BINS - 1.01)
    low = gap.floor().long()
    share = gap - low
    log_spread = raw.log_softmax(3)
    low_log = log_spread.gather(3, low[..., None])[..., 0]
    high_log = log_spread.gather(3, low[..., None] + 1)[..., 0]
    bin_loss = (-(low_log * (1 - share) + high_log * share).mean(2) * weight).sum() / total

    loss = recipe.box_weight * box_loss + recipe.class_weight * class_loss + recipe.bin_weight * bin_loss
    return loss, torch.stack([box_loss, class_loss, bin_loss]).detach()


@torch.no_grad()
def assign(
    scores: Tensor, boxes: Tensor, truth: Tensor, centres: Tensor, strides: Tensor, per_digit: int
) -> tuple[Tensor, Tensor]:
    """For each anchor its digit [n, anchors] and how good an answer it is, 0 for none [n, anchors].

    An answer's worth is score^0.5 * IoU^6 in both heads, so the anchor that must answer alone is also the
    best of the many.
    """
    labels, own = truth[..., 0].long(), truth[..., 1:]
    real = labels >= 0
    # a thin digit can lie between anchors: for this test its box is at least 1.2 fine strides wide and high
    middle, half = (own[..., :2] + own[..., 2:]) / 2, (own[..., 2:] - own[..., :2]) / 2
    half = half.clamp(min=0.6 * STRIDES[0])
    offset = (centres[None, None] - middle[:, :, None]).abs()
    inside = (offset < half[:, :, None]).all(3) & real[..., None]  # [n, digits, anchors]

    overlap = iou(own[:, :, None], boxes[:, None]).clamp(min=0)
    score = scores.transpose(1, 2).gather(1, labels.clamp(min=0)[..., None].expand(-1, -1, scores.shape[1]))
    worth = (score.sqrt() * overlap**6 + 1e-9) * inside

    best, place = worth.topk(per_digit, dim=2)
    picked = torch.zeros_like(worth).scatter_(2, place, (best > 0).float())
    # one anchor answers one digit: the one it overlaps most
    contested = picked.sum(1, keepdim=True) > 1
    favourite = functional.one_hot((overlap * picked).argmax(1), truth.shape[1]).transpose(1, 2)
    picked = torch.where(contested, picked * favourite, picked)

    worth = worth * picked
    top_worth = worth.amax(2, keepdim=True)
    top_overlap = (overlap * picked).amax(2, keepdim=True)
    quality = (worth / (top_worth + 1e-12) * top_overlap).amax(1)
    return picked.argmax(1), quality


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of boxes [..., 4] that broadcast."""
    size = (torch.minimum(a[..., 2:], b[..., 2:]) - torch.maximum(a[..., :2], b[..., :2])).clamp(min=0)
    shared = size.prod(-1)
    areas = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1)
    return shared / (areas - shared + 1e-7)


def ciou(a: Tensor, b: Tensor) -> Tensor:
    """IoU less the distance of the centres and the difference of the shapes (Zheng et al., 2020)."""
    plain = iou(a, b)
    hull = torch.maximum(a[..., 2:], b[..., 2:]) - torch.minimum(a[..., :2], b[..., :2])
    apart = ((a[..., :2] + a[..., 2:] - b[..., :2] - b[..., 2:]) ** 2).sum(-1) / 4
    size_a, size_b = a[..., 2:] - a[..., :2], b[..., 2:] - b[..., :2]
    shape_a = torch.atan(size_a[..., 0] / (size_a[..., 1] + 1e-7))
    shape_b = torch.atan(size_b[..., 0] / (size_b[..., 1] + 1e-7))
    shape = 4 / math.pi**2 * (shape_a - shape_b) ** 2
    with torch.no_grad():
        trade = shape / (1 - plain + shape + 1e-7)
    return plain - apart / ((hull**2).sum(-1) + 1e-7) - trade * shape


# --- training


def train(recipe: Recipe, device: torch.device) -> Detector:
    """A trained detector: the moving average of its weights, on the CPU, in eval mode."""
    began = time.perf_counter()
    pixels, rows = cached_scenes(recipe)
    log.info("composed %d training scenes in %.0f s", len(pixels), time.perf_counter() - began)
    torch.manual_seed(recipe.seed)
    images, truths = torch.from_numpy(pixels).to(device), torch.from_numpy(rows).to(device)
    centres, strides = (x.to(device) for x in anchors())

    model = Detector().to(device, memory_format=torch.channels_last).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    free = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": free, "weight_decay": 0.0}],
        lr=recipe.learning_rate, fused=device.type == "cuda",
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _pace(step, recipe))

    live = [x for x in model.state_dict().values() if x.is_floating_point()]
    kept = [x for x in average.state_dict().values() if x.is_floating_point()]
    parts = torch.zeros(2, 3, device=device)
    began = time.perf_counter()
    for step in range(1, recipe.steps + 1):
        chosen = torch.randint(len(images), (recipe.batch,), device=device)
        batch = augmented(images[chosen]).contiguous(memory_format=torch.channels_last)
        truth = truths[chosen]
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            once, many = model(batch)
        once_loss, once_parts = loss_of(*once, truth, centres, strides, 1, recipe)
        many_loss, many_parts = loss_of(*many, truth, centres, strides, recipe.many, recipe)
        optimizer.zero_grad(set_to_none=True)
        (once_loss + many_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        keep = min(recipe.ema, step / (step + 200))
        torch._foreach_lerp_(kept, live, 1 - keep)
        parts += torch.stack([once_parts, many_parts])
        if step % 500 == 0 or step == recipe.steps:
            _report(step, recipe, parts / ((step - 1) % 500 + 1), time.perf_counter() - began)
            parts.zero_()
    return average.to("cpu", memory_format=torch.contiguous_format)


def _pace(step: int, recipe: Recipe) -> float:
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _report(step: int, recipe: Recipe, means: Tensor, wall_s: float) -> None:
    (b1, c1, d1), (b2, c2, d2) = means.tolist()
    log.info(
        "step %5d/%d  once: box %.4f class %.4f bins %.4f  many: box %.4f class %.4f bins %.4f  %.0f s",
        step, recipe.steps, b1, c1, d1, b2, c2, d2, wall_s,
    )  # fmt: skip


# --- export

# what trt-engine reads from the file: how a picture goes in (detect.letterbox) and what a row of the output means
DECLARATION = {
    "preprocess": {
        "size": [SIDE_PX, SIDE_PX], "resize": "letterbox", "interpolation": "bilinear", "pad_value": [GREY] * 3,
        "pad_placement": "center", "channels": "RGB", "layout": "NCHW", "scale": 1 / 255, "input": "images",
    },
    "postprocess": {
        "decode": "yolov10", "classes": list(scenes.CLASSES), "min_score": detect.MIN_SCORE, "output": "output0",
    },
}  # fmt: skip


def export(detector: Detector, path: Path) -> None:
    """model.onnx with batch norms folded, a free batch, plain names and nothing of the exporter's diary."""
    model = Exported(_folded(detector)).eval()
    example = torch.rand(2, 3, SIDE_PX, SIDE_PX)  # two: with one the exporter freezes the batch, silently
    program = torch.onnx.export(
        model, (example,), dynamo=True, opset_version=OPSET, verbose=False,
        input_names=["images"], output_names=["output0"], dynamic_shapes=({0: torch.export.Dim("batch")},),
        custom_translation_table={torch.ops.aten.floor_divide.default: _whole_quotient},
    )  # fmt: skip
    assert program is not None
    proto = program.model_proto
    _clean(proto)
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)
    _agrees(model, path)


def _whole_quotient(place: ir.Value, by: int) -> ir.Value:
    """An integer Div: the exporter's own goes through floats, which FP16 engines round to the wrong anchor."""
    return opset18.Div(place, by)


def _folded(detector: Detector) -> Detector:
    detector = copy.deepcopy(detector).eval()
    for module in detector.modules():
        if isinstance(module, Conv):
            fused = torch.nn.utils.fusion.fuse_conv_bn_eval(module[0], module[1])
            module[0], module[1] = fused, nn.Identity()
    return detector


def _clean(proto: onnx.ModelProto) -> None:
    """Drop what only a debugger reads, and number the nodes of each kind in order."""
    proto.ir_version = IR_VERSION
    proto.doc_string = "handwritten digits over photographs; YOLOv10-style detector; see README.md beside this file"
    del proto.metadata_props[:]
    proto.metadata_props.add(key="trt_engine.vision", value=json.dumps(DECLARATION, separators=(",", ":")))
    graph = proto.graph
    graph.name = "digits"
    del graph.value_info[:]
    for thing in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        thing.doc_string = ""
        del thing.metadata_props[:]

    renamed: dict[str, str] = {}
    counts: dict[str, int] = {}
    kept = {"images", "output0"}
    for initializer in graph.initializer:
        kept.add(initializer.name)
        if initializer.name.startswith("val_"):
            renamed[initializer.name] = f"constant_{len(renamed)}"
            initializer.name = renamed[initializer.name]
    for node in graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
        node.name = f"{node.op_type}_{counts[node.op_type] - 1}"
        for place, name in enumerate(node.output):
            if name not in kept:
                renamed[name] = node.name if place == 0 else f"{node.name}_{place}"
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]


def _agrees(model: Exported, path: Path) -> None:
    """Refuse a file that is not the network: batch must be free, and the answers the same at any batch."""
    graph = onnx.load(path).graph
    for value in (graph.input[0], graph.output[0]):
        if value.type.tensor_type.shape.dim[0].dim_param != "batch":
            raise SystemExit(f"`{value.name}` lost its free batch")
    detector = detect.onnx_detector(path)
    for batch in (1, 2, 5):
        pictures = [scenes.scene("train", 999, index).image for index in range(batch)]
        images = np.stack([detect.letterbox(Image.fromarray(picture))[0] for picture in pictures])
        got = detector(images)
        with torch.inference_mode():
            want = model(torch.from_numpy(images)).numpy()
        sure = want[..., 4] > 0.05  # below, near-equal scores may swap places
        gap = float(np.abs(got - want)[sure].max(initial=0))
        log.info("onnx against torch at batch %d: %s, largest difference %.2g", batch, got.shape, gap)
        if gap > 1e-2:
            raise SystemExit(f"ONNX Runtime and torch differ by {gap} at batch {batch}")


def evaluate(path: Path, seed: int, count: int, folder: Path | None = None) -> None:
    """Log the AP of an ONNX file over `folder`, or over fresh validation scenes."""
    with tempfile.TemporaryDirectory() as temporary:
        if folder is None:
            folder = Path(temporary)
            scenes.write("val", seed, count, folder)
        scores = detect.average_precision(detect.onnx_detector(path), folder)
    log.info(
        "val, %d scenes of seed %d: AP50-95 %.4f  AP50 %.4f  AP75 %.4f",
        count, seed, scores.ap50_95, scores.ap50, scores.ap75,
    )  # fmt: skip


def main() -> None:
    here = Path(__file__).parent
    default = Recipe()
    parser = argparse.ArgumentParser(description="train the digit detector and write it as ONNX")
    parser.add_argument("-o", "--out", type=Path, default=here / "model.onnx")
    parser.add_argument("--log", type=Path, default=here / "train.log")
    parser.add_argument("--weights", type=Path, help="keep the trained weights here, or with --export read them")
    parser.add_argument("--export", action="store_true", help="train nothing: write the ONNX from --weights")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--scenes", type=int, default=default.scenes)
    parser.add_argument("--batch", type=int, default=default.batch)
    args = parser.parse_args()
    recipe = Recipe(steps=args.steps, scenes=args.scenes, batch=args.batch)

    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    log.setLevel(logging.INFO)
    written = logging.FileHandler(args.log, mode="a" if args.export else "w")
    written.setFormatter(logging.Formatter("%(message)s"))
    log.addHandler(written)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    log.info(
        "%s; python %s, torch %s, onnx %s, numpy %s",
        name, platform.python_version(), torch.__version__, onnx.__version__, np.__version__,
    )  # fmt: skip
    if args.export:
        detector = Detector().eval()
        detector.load_state_dict(torch.load(args.weights, map_location="cpu", weights_only=True))
    else:
        log.info("%s", asdict(recipe))
        detector = train(recipe, device)
        if args.weights is not None:
            torch.save(detector.state_dict(), args.weights)
    export(detector, args.out)
    used = sum(p.numel() for part in (detector.body, detector.once) for p in part.parameters())
    log.info("%d parameters with batch norms, file %d bytes", used, args.out.stat().st_size)
    evaluate(args.out, 0, 64, here / "val")
    evaluate(args.out, 1, 512)


if __name__ == "__main__":
    main()

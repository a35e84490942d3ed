"""A detector as Ultralytics exports them: C2f, SPPF, FPN-PAN, DFL; `images` in, `output0` [batch, 4 + classes, anchors] out.

The network is our own code and its weights are random numbers: boxes mean nothing, sizes and times do. Anchors are worked
out of the feature maps, so the file follows every size that 32 divides; the row of `output0` is centre x, centre y, width,
height in pixels of the input, then one score a class. NMS stays outside.

python yolo.py -o FOLDER
"""

from __future__ import annotations

import sys

import steps
import torch
from torch import Tensor, nn

SCALES = {"n": (0.33, 0.25, 1024), "s": (0.33, 0.5, 1024), "m": (0.67, 0.75, 768), "l": (1.0, 1.0, 512)}
"""Depth, width, and the most channels, of YOLOv8."""
STRIDES = (8, 16, 32)
BINS = 16


def yolo(scale: str = "n", classes: int = 80) -> nn.Module:
    torch.manual_seed(0)
    depth, width, most = SCALES[scale]
    network = Yolo([int(min(c, most) * width) for c in (64, 128, 256, 512, 1024)], depth, classes)
    for module in network.modules():
        if isinstance(module, nn.Conv2d):  # random weights that keep the signal's size, so that every layer counts
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    nn.init.constant_(network.head.project.weight, 0)
    network.head.project.weight.data[0, :, 0, 0] = torch.arange(BINS, dtype=torch.float32)
    return network


class Yolo(nn.Module):
    def __init__(self, widths: list[int], depth: float, classes: int) -> None:
        super().__init__()
        one, two, three, four, five = widths
        few, more = max(1, round(3 * depth)), max(1, round(6 * depth))
        self.stem = nn.Sequential(Conv(3, one, 3, 2), Conv(one, two, 3, 2), C2f(two, two, few, skip=True))
        self.stage_3 = nn.Sequential(Conv(two, three, 3, 2), C2f(three, three, more, skip=True))
        self.stage_4 = nn.Sequential(Conv(three, four, 3, 2), C2f(four, four, more, skip=True))
        self.stage_5 = nn.Sequential(Conv(four, five, 3, 2), C2f(five, five, few, skip=True), Sppf(five))
        self.up = nn.Upsample(scale_factor=2)
        self.top_4, self.top_3 = C2f(five + four, four, few), C2f(four + three, three, few)
        self.down_3, self.down_4 = Conv(three, three, 3, 2), Conv(four, four, 3, 2)
        self.out_4, self.out_5 = C2f(three + four, four, few), C2f(four + five, five, few)
        self.head = Head((three, four, five), classes)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        p3 = self.stage_3(self.stem(images))
        p4 = self.stage_4(p3)
        p5 = self.stage_5(p4)
        t4 = self.top_4(torch.cat([self.up(p5), p4], 1))
        n3 = self.top_3(torch.cat([self.up(t4), p3], 1))
        n4 = self.out_4(torch.cat([self.down_3(n3), t4], 1))
        n5 = self.out_5(torch.cat([self.down_4(n4), p5], 1))
        return {"output0": self.head([n3, n4, n5])}


class Conv(nn.Sequential):
    def __init__(self, inside: int, outside: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outside, eps=1e-3),
            nn.SiLU(),
        )


class Bottleneck(nn.Module):
    def __init__(self, width: int, skip: bool) -> None:
        super().__init__()
        self.body, self.skip = nn.Sequential(Conv(width, width, 3), Conv(width, width, 3)), skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.skip else self.body(x)


class C2f(nn.Module):
    """Half of the channels goes through bottlenecks; what each gives is kept."""

    def __init__(self, inside: int, outside: int, count: int, skip: bool = False) -> None:
        super().__init__()
        half = outside // 2
        self.split, self.join = Conv(inside, 2 * half), Conv((2 + count) * half, outside)
        self.blocks = nn.ModuleList(Bottleneck(half, skip) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.split(x).chunk(2, 1))
        for block in self.blocks:
            parts.append(block(parts[-1]))
        return self.join(torch.cat(parts, 1))


class Sppf(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.enter, self.leave = Conv(width, width // 2), Conv(2 * width, width)
        self.pool = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.enter(x)]
        for _ in range(3):
            parts.append(self.pool(parts[-1]))
        return self.leave(torch.cat(parts, 1))


class Head(nn.Module):
    """Each side of a box is the mean of a distribution over 16 distances, in strides."""

    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        sides, scores = max(16, widths[0] // 4, 4 * BINS), max(widths[0], min(classes, 100))
        self.sides = nn.ModuleList(
            nn.Sequential(Conv(w, sides, 3), Conv(sides, sides, 3), nn.Conv2d(sides, 4 * BINS, 1)) for w in widths
        )
        self.scores = nn.ModuleList(
            nn.Sequential(Conv(w, scores, 3), Conv(scores, scores, 3), nn.Conv2d(scores, classes, 1)) for w in widths
        )
        self.project = nn.Conv2d(BINS, 1, 1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        boxes, scores = [], []
        for x, side, score, stride in zip(features, self.sides, self.scores, STRIDES, strict=True):
            rows, columns = x.shape[-2:]
            y = (torch.arange(rows, dtype=x.dtype, device=x.device) + 0.5)[:, None].expand(rows, columns)
            x_centre = (torch.arange(columns, dtype=x.dtype, device=x.device) + 0.5)[None].expand(rows, columns)
            centre = torch.stack([x_centre, y]).flatten(1)[None]
            spread = side(x).flatten(2).unflatten(1, (4, BINS)).transpose(1, 2).softmax(1)
            near, far = self.project(spread).flatten(1, 2).chunk(2, 1)
            boxes.append(torch.cat([centre + (far - near) / 2, near + far], 1) * stride)
            scores.append(score(x).flatten(2).sigmoid())
        return torch.cat([torch.cat(boxes, 2), torch.cat(scores, 2)], 1)


USUAL = steps.Recipe("yolo", ("images:2x3x640x640",), ("images:0=batch@1..64",), ("scale=n", "classes=80"))
SMALL = steps.Recipe("yolo", ("images:2x3x64x96",), ("images:0=batch@1..64",), ("scale=n", "classes=4"))

if __name__ == "__main__":
    sys.exit(steps.main(__file__, USUAL, SMALL))

"""The architectures of `benchmarks/networks.py` in torch, as its compiler likes them best: one product for Q, K and V,
`scaled_dot_product_attention`, batch normalisation folded into the convolutions. Weights are random.
"""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Multi-head attention over batch x tokens x width; `mask` is true where a token is attended to."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        batch, tokens, width = x.shape
        packed = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


class Block(nn.Module):
    """A transformer block, normalised before (ViT) or after (BERT) each half."""

    def __init__(self, width: int, heads: int, epsilon: float, *, before: bool) -> None:
        super().__init__()
        self.before = before
        self.attention = Attention(width, heads)
        self.first, self.second = nn.LayerNorm(width, epsilon), nn.LayerNorm(width, epsilon)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if self.before:
            x = x + self.attention(self.first(x), mask)
            return x + self.feed_forward(self.second(x))
        x = self.first(x + self.attention(x, mask))
        return self.second(x + self.feed_forward(x))


class Vit(nn.Module):
    """ViT-B/16: batch x 3 x 224 x 224 to logits, batch x 1000."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12, size: int = 224) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16, bias=False)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, (size // 16) ** 2 + 1, width) / width**0.5)
        self.blocks = nn.ModuleList(Block(width, heads, 1e-6, before=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Bert(nn.Module):
    """BERT-base's encoder: token ids and mask, batch x 128, to the last hidden state, batch x 128 x 768."""

    def __init__(
        self, width: int = 768, depth: int = 12, heads: int = 12, tokens: int = 128, words: int = 30522
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(1, tokens, width))
        self.norm = nn.LayerNorm(width, 1e-12)
        self.blocks = nn.ModuleList(Block(width, heads, 1e-12, before=False) for _ in range(depth))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask.bool()[:, None, None, :]
        x = self.norm(self.words(input_ids) + self.position)
        for block in self.blocks:
            x = block(x, mask)
        return x


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut."""

    def __init__(self, before: int, inner: int, stride: int, *, shortcut: bool) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(before, inner, 1), nn.Conv2d(inner, inner, 3, stride, 1)
        self.last = nn.Conv2d(inner, 4 * inner, 1)
        self.shortcut = nn.Conv2d(before, 4 * inner, 1, stride) if shortcut else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(torch.relu(self.three(torch.relu(self.one(x)))))
        return torch.relu(y + self.shortcut(x))


class ResNet50(nn.Module):
    """ResNet-50 v1.5: batch x 3 x 224 x 224 to logits, batch x 1000."""

    def __init__(self, size: int = 224) -> None:
        super().__init__()
        blocks, before = [], 64
        for stage, count in enumerate((3, 4, 6, 3)):
            inner = 64 << stage
            for at in range(count):
                blocks.append(Bottleneck(before, inner, 2 if stage and not at else 1, shortcut=not at))
                before = 4 * inner
        self.stem, self.blocks, self.head = nn.Conv2d(3, 64, 7, 2, 3), nn.Sequential(*blocks), nn.Linear(before, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.stem(images)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


def conv(before: int, after: int, kernel: int = 1, stride: int = 1, group: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=group)


def act(before: int, after: int, kernel: int = 1, stride: int = 1, group: int = 1) -> nn.Sequential:
    return nn.Sequential(conv(before, after, kernel, stride, group), nn.SiLU())


def down(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(act(before, after), conv(after, after, 3, 2, after))


class Stage(nn.Module):
    """C2f: half of the channels through `count` blocks, whose outputs are all joined. `compact`: depthwise blocks."""

    def __init__(self, before: int, after: int, count: int, *, compact: bool = False, add: bool = True) -> None:
        super().__init__()
        half, self.add = after // 2, add
        self.open, self.close = act(before, after), act((2 + count) * half, after)
        self.blocks = nn.ModuleList(self.block(half, compact) for _ in range(count))

    @staticmethod
    def block(half: int, compact: bool) -> nn.Sequential:
        if not compact:
            return nn.Sequential(act(half, half, 3), act(half, half, 3))
        return nn.Sequential(
            act(half, half, 3, 1, half), act(half, 2 * half), act(2 * half, 2 * half, 3, 1, 2 * half), act(2 * half, half),
            act(half, half, 3, 1, half),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = list(self.open(x).chunk(2, 1))
        for block in self.blocks:
            y = block(parts[-1])
            parts.append(parts[-1] + y if self.add else y)
        return self.close(torch.cat(parts, 1))


class Pool(nn.Module):
    """SPPF: three 5x5 maxima, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.open, self.close = act(width, width // 2), act(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.open(x)]
        for _ in range(3):
            parts.append(nn.functional.max_pool2d(parts[-1], 5, 1, 2))
        return self.close(torch.cat(parts, 1))


class Attend(nn.Module):
    """PSA: attention over all positions of one half of the channels; keys are half as wide as values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.heads = max(half // 64, 1)
        self.key = half // self.heads // 2
        self.open, self.close = act(width, width), act(width, width)
        self.qkv, self.out = conv(half, half + 2 * self.heads * self.key), conv(half, half)
        self.places = conv(half, half, 3, 1, half)
        self.feed_forward = nn.Sequential(act(half, width), conv(width, half))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        still, moved = self.open(x).chunk(2, 1)
        batch, half, high, wide = moved.shape
        packed = self.qkv(moved).reshape(batch, self.heads, -1, high * wide)
        q, k, v = packed.split([self.key, self.key, half // self.heads], 2)
        mixed = nn.functional.scaled_dot_product_attention(*(part.transpose(2, 3) for part in (q, k, v)))
        mixed = mixed.transpose(2, 3).reshape(batch, half, high, wide)
        moved = moved + self.out(mixed + self.places(v.reshape(batch, half, high, wide)))
        return self.close(torch.cat([still, moved + self.feed_forward(moved)], 1))


class Head(nn.Module):
    """Bins of the boxes' sides, batch x 64 x points, and logits of the classes."""

    def __init__(self, width: int, sides: int, inner: int, classes: int) -> None:
        super().__init__()
        self.box = nn.Sequential(act(width, sides, 3), act(sides, sides, 3), conv(sides, 64))
        self.kind = nn.Sequential(
            act(width, width, 3, 1, width), act(width, inner), act(inner, inner, 3, 1, inner), act(inner, inner),
            conv(inner, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.box(x).flatten(2), self.kind(x).flatten(2)


class Yolo(nn.Module):
    """YOLOv10m's one-to-one branch: batch x 3 x 640 x 640 to boxes, batch x 4 x 8400, and scores, batch x 80 x 8400."""

    def __init__(self, size: int = 640, divide: int = 1, classes: int = 80) -> None:
        super().__init__()
        a, b, c, d, e = (width // divide for width in (48, 96, 192, 384, 576))
        self.third = nn.Sequential(
            act(3, a, 3, 2), act(a, b, 3, 2), Stage(b, b, 2), act(b, c, 3, 2), Stage(c, c, 4)
        )  # fmt: skip
        self.fourth = nn.Sequential(down(c, d), Stage(d, d, 4))
        self.fifth = nn.Sequential(down(d, e), Stage(e, e, 2, compact=True), Pool(e), Attend(e))
        self.to_fourth, self.to_third = Stage(e + d, d, 2, add=False), Stage(d + c, c, 2, add=False)
        self.from_third, self.out_fourth = act(c, c, 3, 2), Stage(c + d, d, 2, compact=True)
        self.from_fourth, self.out_fifth = down(d, d), Stage(d + e, e, 2, compact=True)
        self.heads = nn.ModuleList(Head(width, max(c // 4, 64), max(c, classes), classes) for width in (c, d, e))
        axes = [(torch.arange(size // stride) + 0.5, stride) for stride in (8, 16, 32)]
        grids = [torch.stack(torch.meshgrid(axis, axis, indexing="xy")).flatten(1) for axis, _ in axes]
        self.register_buffer("centres", torch.cat(grids, 1)[None])
        self.register_buffer(
            "strides", torch.cat([torch.full((len(axis) ** 2,), float(s)) for axis, s in axes])[None, None]
        )
        self.register_buffer("bins", torch.arange(16.0))

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        third = self.third(images)
        fourth = self.fourth(third)
        fifth = self.fifth(fourth)
        fourth = self.to_fourth(torch.cat([nn.functional.interpolate(fifth, scale_factor=2.0), fourth], 1))
        third = self.to_third(torch.cat([nn.functional.interpolate(fourth, scale_factor=2.0), third], 1))
        fourth = self.out_fourth(torch.cat([self.from_third(third), fourth], 1))
        fifth = self.out_fifth(torch.cat([self.from_fourth(fourth), fifth], 1))
        found = [head(x) for head, x in zip(self.heads, (third, fourth, fifth), strict=True)]
        boxes, kinds = (torch.cat(parts, 2) for parts in zip(*found, strict=True))
        far = boxes.reshape(len(boxes), 4, 16, -1).transpose(2, 3).softmax(-1) @ self.bins
        corners = torch.cat([self.centres - far[:, :2], self.centres + far[:, 2:]], 1)
        return corners * self.strides, kinds.sigmoid()


TORCH_NETWORKS: dict[str, type[nn.Module]] = {"vit": Vit, "resnet50": ResNet50, "yolo": Yolo, "bert": Bert}

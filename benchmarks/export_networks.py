"""The networks of the export table: small ones of ten kinds, random weights, written as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, hidden), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(hidden), nn.Linear(hidden, 10)
        )

    def forward(self, features: Tensor) -> Tensor:
        return self.layers(features)


class Cnn(nn.Module):
    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.SiLU(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(32, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(1)).softmax(-1)


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
        )
        self.two = nn.Sequential(nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside))
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or inside != outside:
            self.skip = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.two(self.one(x)) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        sizes = [width, width, width * 2, width * 4, width * 8]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    Block(sizes[at], sizes[at + 1], 1 if at == 0 else 2), Block(sizes[at + 1], sizes[at + 1], 1)
                )
                for at in range(4)
            )
        )
        self.head = nn.Linear(sizes[-1], 100)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(images)).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        return x + self.mlp(self.norm_2(x))


class Vit(nn.Module):
    def __init__(self, size: int = 64, patch: int = 16, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.position = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * 0.02)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x[:, 0])


class UNet(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down_1, self.down_2 = Block(3, width, 1), Block(width, 2 * width, 2)
        self.middle = Block(2 * width, 4 * width, 2)
        self.up_2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.join_2 = Block(4 * width, 2 * width, 1)
        self.join_1 = Block(3 * width, width, 1)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, images: Tensor) -> Tensor:
        one = self.down_1(images)
        two = self.down_2(one)
        x = self.join_2(torch.cat([self.up_2(self.middle(two)), two], 1))
        x = functional.interpolate(x, size=one.shape[-2:], mode="bilinear", align_corners=False)
        return self.head(self.join_1(torch.cat([x, one], 1)))


class Detector(nn.Module):
    """Two scales, anchors worked out from the feature maps, the best 20 by TopK: no NMS."""

    def __init__(self, classes: int = 4, best: int = 20) -> None:
        super().__init__()
        self.best, self.classes = best, classes
        self.stem = nn.Sequential(Block(3, 16, 2), Block(16, 32, 2), Block(32, 32, 2))
        self.next = Block(32, 64, 2)
        self.heads = nn.ModuleList([nn.Conv2d(32, 4 + classes, 1), nn.Conv2d(64, 4 + classes, 1)])

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        small = self.stem(images)
        found = []
        for stride, head, features in zip((8, 16), self.heads, (small, self.next(small)), strict=True):
            out = head(features)
            rows, columns = out.shape[-2:]
            y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            centre = (torch.stack([x, y], -1).reshape(1, -1, 2).to(out.dtype) + 0.5) * stride
            raw = out.flatten(2).transpose(1, 2)
            sides = functional.softplus(raw[..., :4]) * stride
            boxes = torch.cat([centre - sides[..., :2], centre + sides[..., 2:]], -1)
            found.append(torch.cat([boxes, raw[..., 4:].sigmoid()], -1))
        every = torch.cat(found, 1)
        scores, labels = every[..., 4:].max(-1)
        best, index = scores.topk(self.best, dim=1)
        boxes = every[..., :4].gather(1, index.unsqueeze(-1).expand(-1, -1, 4))
        return {"boxes": boxes, "scores": best, "labels": labels.gather(1, index)}


class Encoder(nn.Module):
    def __init__(self, vocabulary: int = 200, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(128, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]))[None]
        seen = attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, seen)
        x = self.norm(x)
        weight = attention_mask.unsqueeze(-1).to(x.dtype)
        return x, (x * weight).sum(1) / weight.sum(1)


class Recurrent(nn.Module):
    """One step of a stream: the state goes in and comes out."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, frames: Tensor, hidden: Tensor, cell: Tensor) -> dict[str, Tensor]:
        x, (next_hidden, next_cell) = self.lstm(frames, (hidden, cell))
        return {"logits": self.head(x), "next_hidden": next_hidden, "next_cell": next_cell}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.words = nn.Embedding(50, 16)
        self.join = nn.Linear(32, 8)

    def forward(self, images: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        image, text = self.image(images), self.words(tokens).mean(1)
        similarity = functional.normalize(image, dim=-1) @ functional.normalize(text, dim=-1).T
        return {"joined": self.join(torch.cat([image, text], -1)), "similarity": similarity}


class Branching(nn.Module):
    """What runs depends on the data: `torch.cond`, as the dynamo exporter wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.quiet = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, signal: Tensor) -> Tensor:
        def loud(x: Tensor) -> Tensor:
            return torch.tanh(self.loud(x))

        def quiet(x: Tensor) -> Tensor:
            return self.quiet(x) * 0.5

        return torch.cond(signal.sum() > 0, loud, quiet, (signal,))


def mlp(hidden: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return Mlp(hidden)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    return Cnn()


def resnet(width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return ResNet(width)


def vit() -> nn.Module:
    torch.manual_seed(0)
    return Vit()


def unet() -> nn.Module:
    torch.manual_seed(0)
    return UNet()


def detector() -> nn.Module:
    torch.manual_seed(0)
    return Detector()


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder()


def recurrent() -> nn.Module:
    torch.manual_seed(0)
    return Recurrent()


def two_inputs() -> nn.Module:
    torch.manual_seed(0)
    return TwoInputs()


def branching() -> nn.Module:
    torch.manual_seed(0)
    return Branching()

"""Networks with one defect each, and their clean twins: what a person writes without thinking of an export."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class IntBatch(nn.Module):
    """The batch is taken as a Python int: exporters keep the number."""

    def forward(self, x: Tensor) -> Tensor:
        batch = int(x.shape[0])
        return x.reshape(batch, -1) * 2


class IntBatchClean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) * 2


class Anchors(nn.Module):
    """A grid made once, for one size."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.register_buffer("grid", torch.randn(1, 4, 16 * 16))

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images).flatten(2) + self.grid


class AnchorsClean(Anchors):
    def forward(self, images: Tensor) -> Tensor:
        x = self.body(images)
        rows = torch.arange(x.shape[2], dtype=x.dtype)[None, None, :, None]
        return (x + rows).flatten(2)


class Scaled(nn.Module):
    """The height goes into the numbers as a Python int: shapes are right, values are those of one size."""

    def forward(self, images: Tensor) -> Tensor:
        return images / int(images.shape[2])


class ScaledClean(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images / images.shape[2]


class Dropping(nn.Module):
    """`dropout` without `training=`: it drops in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5)


class DroppingClean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=self.training) * 1.5


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


class NoiseClean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x)


class Training(nn.Module):
    """Statistics of the batch at hand: `training=True` is written into the call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean.clone(), self.variance.clone(), training=True)


class TrainingClean(Training):
    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.variance, training=self.training)


class Decomposed(nn.Module):
    """Statistics of the batch, which the dynamo exporter writes as plain means."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, None, None, training=True)


class DecomposedClean(nn.Module):
    """Statistics of each row: what InstanceNorm is made of is a batch normalisation in training mode too."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.instance_norm(x)


class Centred(nn.Module):
    """Each row less the mean of the batch, as some networks are made."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class LostBatch(nn.Module):
    """The batch goes into another axis: no output has it first any more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(2, -1)


class LostBatchClean(LostBatch):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).reshape(-1, 2, 2)


class Unused(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * 2


class UnusedClean(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


class Branch(nn.Module):
    """A Python `if` on a value: no exporter can follow both ways."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x - 1


class RareBranch(nn.Module):
    """A Python `if` that goes the same way for all ordinary inputs: no comparison can see it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if y.abs().max() > 50:
            y = y * 0
        return y


class RareBranchClean(RareBranch):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.where(y.abs().max() > 50, y * 0, y)


class WholeReads(nn.Module):
    """Values read into Python in every way that a trace freezes; each such line says so."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e6:  # frozen
            x = x + 1
        x = x * (2 if x.mean() > 1e6 else 1)  # frozen
        for _ in range((x > 1e6).sum()):  # frozen
            x = x + 1
        while x.max() > 1e6:  # frozen
            x = x / 2
        x = x + int(x.min() > 1e6)  # frozen
        x = x + (x.min() > 1e6).float().item()  # frozen
        x = x + len((x > 1e6).sum(1).tolist())  # frozen
        x = x + (x.detach().numpy() > 1e6).sum()  # frozen
        x = x + torch.tensor(x.max() > 1e6)  # frozen
        x = x + [0, 1][(x.max() > 1e6).long()]  # frozen
        if torch.equal(x, x * 2):  # frozen
            x = x + 1
        if 1e6 in x:  # frozen
            x = x + 1
        if (x > 1e6).nonzero().shape[0]:  # frozen
            x = x + 1
        if x[x > 1e6].numel() > 3:  # frozen
            x = x + 1
        return x


class SizeReads(nn.Module):
    """Sizes, buffers and guards: nothing here depends on the values of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("times", torch.tensor(2))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] != 77 or x.numel() == 0:
            x = x + len(x) * 0
        if self.times > 1:
            x = x * int(self.times)
        if torch.ones_like(x).all() and torch.arange(x.shape[1]).max() > 1:
            x = x + torch.tensor(x.shape[1] ** -0.5)
        for _ in range(x.shape[1]):
            x = x + 1
        first = (x[0] > -1e6).sum()
        assert (x > -1e6).all(), "far too small"
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return x[:, :first]


class Head(nn.Module):
    """As Ultralytics writes heads: features for training beside the result, a grid kept from the last size."""

    export = False
    dynamic = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3, padding=1)
        self.shape: object = None
        self.grid = torch.zeros(1)

    def forward(self, images: Tensor) -> object:
        found = self.layer(images)
        if self.dynamic or self.shape != images.shape:
            self.grid = torch.arange(images.shape[2] * images.shape[3], dtype=images.dtype)
            self.shape = images.shape
        result = found.flatten(2) + self.grid
        return result if self.export else (result, {"feats": [found, found * 2]})


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, images: Tensor) -> object:
        return self.head(images)


class Rows(nn.Module):
    """The batch by `len`, which Python makes a number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1) * 2


class Looked(nn.Module):
    """Token indices, by an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30522, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids)


class Sorting(nn.Module):
    """Best scores and their rows; every score is there twice, but for the rounding."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = torch.cat([x.sigmoid(), 1 / (1 + torch.exp(-x))], dim=1)
        best, places = scores.topk(6, dim=1)
        marks = torch.arange(16, dtype=x.dtype)[None, :, None].expand(x.shape[0], 16, 4)
        return {"scores": best, "rows": torch.gather(marks, 1, places[..., None].expand(-1, -1, 4))}


class Raising(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("the camera is not there")


class Leaving(nn.Module):
    def __init__(self, code: int = 5) -> None:
        super().__init__()
        raise SystemExit(code)


class Talking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        print("a word on stdout")
        return x + 1


class Linear(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def linear(width: int = 4, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Linear(width)


def with_example(width: int = 4) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return linear(width), (torch.randn(3, 8),)


def no_module() -> str:
    return "not a module"


ready = Linear()


class Block(nn.Module):
    """Two convolutions with normalisations and one activation that is called twice."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.relu = nn.ReLU()
        self.down = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.down(x))


class Residual(nn.Module):
    """The names of a ResNet: `layer1.0.conv1`, `layer2.0.down.0`, `fc`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(3, 8, 1))
        self.layer2 = nn.Sequential(Block(8, 16, 2))
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(x)).mean((2, 3)))


def residual() -> nn.Module:
    torch.manual_seed(0)
    network = Residual()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)
            module.running_var.uniform_(0.5, 1.5)
    return network.eval()


class _Repeated(nn.Module):
    """An argument that is not a tensor, between two that are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, times: int, y: torch.Tensor, negate: bool = False) -> torch.Tensor:
        for _ in range(times):
            x = self.linear(x)
        return y - x if negate else x + y


def repeated() -> nn.Module:
    return _Repeated()


def reads(kind: str = "linear") -> nn.Module:
    """A module whose first layer says what it reads."""
    layers: dict[str, nn.Module] = {
        "linear": nn.Linear(40, 4),
        "conv1d": nn.Conv1d(80, 4, 3),
        "conv2d": nn.Conv2d(1, 4, 3),
        "embedding": nn.Embedding(50, 4),
        "recurrent": nn.GRU(24, 4, batch_first=True),
    }
    return nn.Sequential(layers[kind])

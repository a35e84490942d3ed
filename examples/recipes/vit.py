"""A vision transformer of transformers' configuration with random weights: `pixel_values` in, `logits` out.

The usual one is ViT-B/16 at 224 x 224. Its positions belong to one size of picture, so the batch alone is open.

python vit.py -o FOLDER
"""

from __future__ import annotations

import sys

import steps
import torch
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification


def vit(size: int = 224, patch: int = 16, width: int = 768, depth: int = 12, heads: int = 12) -> nn.Module:
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=size, patch_size=patch, hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        intermediate_size=4 * width, num_labels=1000, initializer_range=0.1, attn_implementation="eager",
    )  # fmt: skip
    return Vit(ViTForImageClassification(config))


class Vit(nn.Module):
    def __init__(self, network: ViTForImageClassification) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.network(pixel_values).logits}


USUAL = steps.Recipe("vit", ("pixel_values:2x3x224x224",), ("pixel_values:0=batch@1..64",))
SMALL = steps.Recipe(
    "vit", ("pixel_values:2x3x32x32",), ("pixel_values:0=batch@1..64",),
    ("size=32", "patch=8", "width=64", "depth=2", "heads=4"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(steps.main(__file__, USUAL, SMALL))

"""A BERT encoder of transformers' configuration with random weights: `input_ids` and `attention_mask` (INT64) in.

Batch and sequence are open. Out come `last_hidden_state` and `pooled`, the mean over the tokens that are no padding.

python bert.py -o FOLDER
"""

from __future__ import annotations

import sys

import steps
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel


def bert(width: int = 768, depth: int = 12, heads: int = 12, words: int = 30522, longest: int = 512) -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=words, hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        intermediate_size=4 * width, max_position_embeddings=longest, initializer_range=0.1,
    )  # fmt: skip
    return Bert(BertModel(config, add_pooling_layer=False))


class Bert(nn.Module):
    def __init__(self, network: BertModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        x = self.network(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(x.dtype)
        return {"last_hidden_state": x, "pooled": (x * weight).sum(1) / weight.sum(1).clamp(min=1)}


def recipe(words: int, length: int, options: tuple[str, ...] = ()) -> steps.Recipe:
    names = ("input_ids", "attention_mask")
    return steps.Recipe(
        "bert",
        (f"input_ids:2x{length // 4}:int64@0..{words - 1}", f"attention_mask:2x{length // 4}:int64"),
        tuple(f"{name}:0=batch@1..64,1=sequence@1..{length}" for name in names),
        options,
        ("--profile", " ".join(f"{name}:1x1,4x{length // 4},16x{length}" for name in names)),
        ("--shapes", " ".join(f"{name}:1x{length // 4}" for name in names)),
    )


USUAL = recipe(30522, 512)
SMALL = recipe(200, 64, ("width=64", "depth=2", "heads=4", "words=200", "longest=64"))

if __name__ == "__main__":
    sys.exit(steps.main(__file__, USUAL, SMALL))

"""RT-DETR of transformers' configuration with random weights: `pixel_values` in, `logits` and `pred_boxes` out.

It has no mask path: its `pixel_mask` is taken by transformers and read by nobody, so it is left out here. What it has is
deformable attention, written out with GridSample; `lint` says what that costs a builder.

python rtdetr.py -o FOLDER
"""

from __future__ import annotations

import sys

import steps
import torch
from torch import Tensor, nn
from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig


def rtdetr(
    width: int = 256, layers: int = 6, queries: int = 300, backbone: int = 64, classes: int = 80, size: int = 640
) -> nn.Module:
    torch.manual_seed(0)
    stages = [backbone, 2 * backbone, 4 * backbone, 8 * backbone]
    config = RTDetrConfig(
        backbone_config=RTDetrResNetConfig(
            embedding_size=backbone, hidden_sizes=stages, depths=[2, 2, 2, 2], layer_type="basic", out_indices=[2, 3, 4]
        ),
        encoder_in_channels=stages[1:], encoder_hidden_dim=width, encoder_ffn_dim=4 * width, d_model=width,
        decoder_in_channels=[width] * 3, decoder_ffn_dim=4 * width, decoder_layers=layers, num_queries=queries,
        num_labels=classes, anchor_image_size=[size, size],
    )  # fmt: skip
    network = _awake(RTDetrForObjectDetection(config), size)
    return RtDetr(network)


def _awake(network: RTDetrForObjectDetection, size: int) -> RTDetrForObjectDetection:
    """Weights under which places differ: as they are set at first all score alike, and the best of them are chance."""
    network.eval()
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            module.train()
            module.momentum = None
        elif isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)
    nn.init.normal_(network.model.enc_score_head.weight)
    with torch.no_grad():
        network(torch.randn(2, 3, size, size))  # what BatchNorm has seen
    return network.eval()


class RtDetr(nn.Module):
    def __init__(self, network: RTDetrForObjectDetection) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        found = self.network(pixel_values)
        return {"logits": found.logits, "pred_boxes": found.pred_boxes}


USUAL = steps.Recipe("rtdetr", ("pixel_values:2x3x640x640",), ("pixel_values:0=batch@1..64",))
SMALL = steps.Recipe(
    "rtdetr", ("pixel_values:2x3x96x96",), ("pixel_values:0=batch@1..64",),
    ("width=32", "layers=2", "queries=20", "backbone=16", "classes=4", "size=96"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(steps.main(__file__, USUAL, SMALL))

"""DETR of transformers' configuration with random weights: `pixel_values` in, `logits` and `pred_boxes` out.

Its mask says which pixels are picture and which are padding. Pictures that all have the network's size have no padding: the
mask is ones, and everything made of it is a constant. transformers makes it all the same, and resizes it in the graph (Cast,
Resize, CumSum); that is the subgraph TensorRT 10 fuses into a ForeignNode it cannot build. Without `mask` the network here
is called without that path, and is equal to transformers' own with a mask of ones. With `-O mask=true` it has the input
`pixel_mask` and the path, for pictures of several sizes in one batch, and `lint` says what that needs.

python detr.py -o FOLDER
"""

from __future__ import annotations

import sys

import steps
import torch
from torch import Tensor, nn
from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig


def detr(
    mask: bool = False, width: int = 256, layers: int = 6, queries: int = 100, backbone: int = 64, classes: int = 91
) -> nn.Module:
    torch.manual_seed(0)
    config = DetrConfig(
        backbone_config=ResNetConfig(
            embedding_size=backbone, hidden_sizes=[4 * backbone, 8 * backbone, 16 * backbone, 32 * backbone],
            depths=[3, 4, 6, 3], out_features=["stage4"],
        ),
        attn_implementation="eager", d_model=width, encoder_layers=layers, decoder_layers=layers, encoder_ffn_dim=8 * width,
        decoder_ffn_dim=8 * width, num_queries=queries, num_labels=classes,
    )  # fmt: skip
    network = DetrForObjectDetection(config)
    return Masked(network) if mask else Unmasked(network)


class Masked(nn.Module):
    """As transformers has it."""

    def __init__(self, network: DetrForObjectDetection) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> dict[str, Tensor]:
        found = self.network(pixel_values, pixel_mask=pixel_mask)
        return {"logits": found.logits, "pred_boxes": found.pred_boxes}


class Unmasked(nn.Module):
    """The same with a mask of ones, which nobody has to make."""

    def __init__(self, network: DetrForObjectDetection) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        body = self.network.model
        features = body.backbone.model(pixel_values).feature_maps[-1]
        x = body.input_projection(features).flatten(2).transpose(1, 2)
        one = torch.Size((1, *features.shape[1:]))  # every picture has the same places
        places = body.position_embedding(shape=one, device=x.device, dtype=x.dtype).flatten(2).transpose(1, 2)
        asked = body.query_position_embeddings.weight.unsqueeze(0).expand(x.shape[0], -1, -1)
        memory = body.encoder(inputs_embeds=x, spatial_position_embeddings=places).last_hidden_state
        seen = body.decoder(
            inputs_embeds=torch.zeros_like(asked), spatial_position_embeddings=places,
            object_queries_position_embeddings=asked, encoder_hidden_states=memory,
        ).last_hidden_state  # fmt: skip
        return {
            "logits": self.network.class_labels_classifier(seen),
            "pred_boxes": self.network.bbox_predictor(seen).sigmoid(),
        }


USUAL = steps.Recipe("detr", ("pixel_values:2x3x800x800",), ("pixel_values:0=batch@1..16",))
SMALL = steps.Recipe(
    "detr", ("pixel_values:2x3x64x96",), ("pixel_values:0=batch@1..16",),
    ("width=32", "layers=2", "queries=10", "backbone=4", "classes=4"),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(steps.main(__file__, USUAL, SMALL))

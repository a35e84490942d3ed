"""Networks for `parity_check.py`, written to a folder as ONNX files with random weights (PyTorch, transformers).

.venv-full/bin/python benchmarks/parity_networks.py FOLDER [--seed 0] [--only yolo]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import export_networks as small


class Yolo(nn.Module):
    """A YOLO-shaped detector: three scales, boxes in pixels and 80 sigmoid scores side by side, `[N, 84, anchors]`."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()

        def conv(inside: int, outside: int, stride: int = 1) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.SiLU()
            )

        self.stem = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2), conv(32, 32))
        self.stages = nn.ModuleList(
            [nn.Sequential(conv(32 << at, 64 << at, 2), conv(64 << at, 64 << at)) for at in range(3)]
        )
        self.boxes = nn.ModuleList([nn.Sequential(conv(64 << at, 32), nn.Conv2d(32, 4, 1)) for at in range(3)])
        self.scores = nn.ModuleList([nn.Sequential(conv(64 << at, 64), nn.Conv2d(64, classes, 1)) for at in range(3)])

    def forward(self, images: Tensor) -> Tensor:
        x, found = self.stem(images), []
        for at, stage in enumerate(self.stages):
            x, step = stage(x), 8 << at
            rows = torch.arange(x.shape[2]).view(1, 1, -1, 1).float() + 0.5
            columns = torch.arange(x.shape[3]).view(1, 1, 1, -1).float() + 0.5
            box = self.boxes[at](x)
            boxes = torch.cat(
                [(box[:, :1].tanh() + columns) * step, (box[:, 1:2].tanh() + rows) * step, box[:, 2:].exp() * 4 * step],
                1,
            )
            found.append(torch.cat([boxes, self.scores[at](x).sigmoid()], 1).flatten(2))
        return torch.cat(found, 2)


class First(nn.Module):
    """A transformers model with its outputs as a tuple."""

    def __init__(self, model: nn.Module, *names: str, takes: str = "pixel_values") -> None:
        super().__init__()
        self.model, self.names, self.takes = model, names, takes

    def forward(self, x: Tensor) -> Any:
        made = self.model(**{self.takes: x})
        return tuple(made[name] for name in self.names)


def images(size: int) -> Tensor:
    return torch.rand(2, 3, size, size)


def tokens(length: int = 24) -> Tensor:
    return torch.randint(0, 200, (2, length))


def _vision(make: Callable[..., Any], config: Any, size: int, *names: str) -> tuple[nn.Module, Tensor]:
    return First(make(config), *(names or ("logits",))), images(size)


SMALL = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 192}
NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "yolo": lambda: (Yolo(), images(160)),
    "resnet": lambda: (small.ResNet(), images(64)),
    "unet": lambda: (small.unet(), images(64)),
    "vit": lambda: _vision(
        hf.ViTForImageClassification, hf.ViTConfig(**SMALL, image_size=64, patch_size=8, num_labels=100), 64
    ),
    "mobilenet": lambda: _vision(hf.MobileNetV2ForImageClassification, hf.MobileNetV2Config(num_labels=100), 64),
    "convnext": lambda: _vision(
        hf.ConvNextForImageClassification,
        hf.ConvNextConfig(hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 2, 1], num_labels=100), 64,
    ),
    "segformer": lambda: _vision(
        hf.SegformerForSemanticSegmentation,
        hf.SegformerConfig(hidden_sizes=[16, 32, 64, 96], decoder_hidden_size=64, num_labels=20), 64,
    ),
    "yolos": lambda: _vision(
        hf.YolosForObjectDetection,
        hf.YolosConfig(**SMALL, image_size=[64, 64], patch_size=8, num_detection_tokens=30, num_labels=20), 64,
        "logits", "pred_boxes",
    ),
    "bert": lambda: (First(hf.BertModel(hf.BertConfig(**SMALL, vocab_size=200)), "last_hidden_state", "pooler_output",
                           takes="input_ids"), tokens()),
    "distilbert": lambda: (
        First(hf.DistilBertForTokenClassification(hf.DistilBertConfig(dim=96, n_layers=4, n_heads=4, hidden_dim=192,
                                                                      vocab_size=200, num_labels=9)),
              "logits", takes="input_ids"), tokens()),
    "electra": lambda: (First(hf.ElectraModel(hf.ElectraConfig(**SMALL, embedding_size=64, vocab_size=200)),
                              "last_hidden_state", takes="input_ids"), tokens()),
    "whisper": lambda: (
        First(hf.WhisperModel(hf.WhisperConfig(d_model=96, encoder_layers=3, encoder_attention_heads=4, encoder_ffn_dim=192,
              decoder_layers=1, decoder_attention_heads=4, max_source_positions=100, num_mel_bins=40)).encoder,
              "last_hidden_state", takes="input_features"), torch.randn(2, 40, 200)),
    "swin": lambda: _vision(
        hf.SwinForImageClassification,
        hf.SwinConfig(image_size=64, patch_size=4, embed_dim=24, depths=[1, 1, 2], num_heads=[2, 4, 8], window_size=4,
                      num_labels=100), 64,
    ),
}  # fmt: skip


def settle(net: nn.Module, x: Tensor) -> nn.Module:
    """Batch normalisation with statistics of its own input, as training leaves it: random weights keep their signal."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
            module.train()
    with torch.no_grad():
        for _ in range(4):
            net(x)
    return net.eval()


def write(name: str, folder: Path, seed: int) -> Path:
    """The network as `FOLDER/NAME-SEED.onnx`, its batch open."""
    path = folder / f"{name}-{seed}.onnx"
    if path.exists():
        return path
    torch.manual_seed(seed)
    net, x = NETWORKS[name]()
    net = settle(net.eval(), x)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net, (x,), path, input_names=["x"], dynamic_axes={"x": {0: "batch"}}, opset_version=17, dynamo=False
        )
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=NETWORKS)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in NETWORKS if given.only is None else [given.only]:
        print(write(name, given.folder, given.seed), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

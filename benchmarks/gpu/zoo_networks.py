"""Architectures that the GPU suite has not, with random weights from a seed: factories of `convert`, and their inputs.

    trt-engine convert benchmarks/gpu/zoo_networks.py:from_timm -O name=regnety_032 --input images:2x3x224x224 -o net.onnx

They were chosen by family from what torchvision, timm and transformers list.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

IMAGES = ("images:2x3x224x224",)
WORDS = ("ids:2x128:int64@0..999", "mask:2x128:int64")


@dataclass(frozen=True)
class Network:
    """A network of one of the families, and how `convert` is called for it."""

    family: str
    factory: str
    """A function of this file and its arguments."""
    inputs: tuple[str, ...] = IMAGES
    """As `--input` takes them, two rows each."""


def _timm(family: str, name: str, size: int = 224, more: str = "") -> Network:
    return Network(family, f"from_timm name={name}{more}", (f"images:2x3x{size}x{size}",))


def _vision(family: str, name: str, size: int = 224) -> Network:
    return Network(family, f"from_torchvision name={name}", (f"images:2x3x{size}x{size}",))


NETWORKS = {
    "resnet18": _vision("cnn", "resnet18"),
    "resnext50": _vision("cnn", "resnext50_32x4d"),
    "vgg16_bn": _vision("cnn", "vgg16_bn"),
    "densenet121": _vision("cnn", "densenet121"),
    "inception_v3": _timm("cnn", "inception_v3", 299),
    "res2net50": _timm("cnn", "res2net50_26w_4s"),
    "convnext_tiny": _timm("new cnn", "convnext_tiny"),
    "convnextv2_nano": _timm("new cnn", "convnextv2_nano"),
    "regnety_032": _timm("new cnn", "regnety_032"),
    "hgnetv2_b2": _timm("new cnn", "hgnetv2_b2"),
    "repvgg_a2": _timm("new cnn", "repvgg_a2"),
    "cspdarknet53": _timm("new cnn", "cspdarknet53", 256),
    "efficientnet_b0": _timm("depthwise", "efficientnet_b0"),
    "efficientnetv2_s": _timm("depthwise", "tf_efficientnetv2_s", 300),
    "mobilenetv2": _timm("depthwise", "mobilenetv2_100"),
    "mobilenetv3_large": _timm("depthwise", "mobilenetv3_large_100"),
    "mnasnet": _timm("depthwise", "mnasnet_100"),
    "ghostnet": _timm("depthwise", "ghostnet_100"),
    "shufflenet_v2": _vision("depthwise", "shufflenet_v2_x1_0"),
    "mobileone_s1": _timm("depthwise", "mobileone_s1"),
    "vit_small": _timm("transformer", "vit_small_patch16_224"),
    "deit3_small": _timm("transformer", "deit3_small_patch16_224"),
    "dinov2_vits14": _timm("transformer", "vit_small_patch14_dinov2", 518, " size=518"),
    "beit_base": _timm("transformer", "beit_base_patch16_224"),
    "cait_xxs24": _timm("transformer", "cait_xxs24_224"),
    "mixer_s16": _timm("transformer", "mixer_s16_224"),
    "swin_tiny": _timm("windows", "swin_tiny_patch4_window7_224"),
    "swinv2_tiny": _timm("windows", "swinv2_tiny_window8_256", 256),
    "maxvit_tiny": _timm("windows", "maxvit_tiny_tf_224"),
    "mobilevit_s": _timm("windows", "mobilevit_s", 256),
    "poolformer_s12": _timm("windows", "poolformer_s12"),
    "pvt_v2_b1": _timm("windows", "pvt_v2_b1"),
    "yolos_tiny": Network("detector", "yolos_tiny", ("images:2x3x512x512",)),
    "rtdetr_r18": Network("detector", "rtdetr_r18", ("images:2x3x640x640",)),
    "detr_r50": Network("detector", "detr_r50", ("images:2x3x512x512",)),
    "unet": Network("segmentation", "unet", ("images:2x3x256x256",)),
    "deeplabv3_resnet50": _vision("segmentation", "deeplabv3_resnet50", 512),
    "lraspp_mobilenetv3": _vision("segmentation", "lraspp_mobilenet_v3_large", 512),
    "segformer_b0": Network("segmentation", "segformer_b0", ("images:2x3x512x512",)),
    "distilbert": Network("text", "text name=DistilBert", WORDS),
    "electra_small": Network(
        "text",
        "text name=Electra hidden_size=256 embedding_size=128 num_attention_heads=4 intermediate_size=1024",
        WORDS,
    ),
    "minilm": Network("text", "text name=Bert hidden_size=384 num_hidden_layers=6 intermediate_size=1536", WORDS),
    "mpnet_base": Network("text", "text name=MPNet", WORDS),
    "modernbert_base": Network("text", "text name=ModernBert", WORDS),
    "whisper_base_encoder": Network("speech", "whisper_base_encoder", ("features:2x80x3000",)),
    "wav2vec2_base": Network("speech", "wav2vec2_base", ("samples:2x16000",)),
    "ast_base": Network("speech", "ast_base", ("features:2x1024x128",)),
    "gru_tagger": Network("recurrent", "recurrent kind=GRU", ("features:2x128x80",)),
    "lstm_tagger": Network("recurrent", "recurrent kind=LSTM", ("features:2x128x80",)),
    "crnn": Network("recurrent", "crnn", ("images:2x1x32x128",)),
}


def made(network: Network) -> Any:
    """The module, as `convert` gets it."""
    name, *given = network.factory.split()
    return globals()[name](**{key: value for key, _, value in (item.partition("=") for item in given)})


def from_timm(name: str, size: int | str = 0) -> Any:
    import timm
    import torch

    torch.manual_seed(0)
    return timm.create_model(name, pretrained=False, **({"img_size": int(size)} if size else {}))


def from_torchvision(name: str) -> Any:
    import torch
    import torchvision

    torch.manual_seed(0)
    if name.startswith(("deeplab", "lraspp")):
        return _outputs(
            torchvision.models.get_model(name, weights=None, weights_backbone=None), lambda found: found["out"]
        )
    return torchvision.models.get_model(name, weights=None)


def _outputs(network: Any, chosen: Any, *names: str) -> Any:
    """The network with inputs by these names, its result as tensors."""
    import torch

    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, *given: torch.Tensor) -> Any:
            return chosen(self.network(**dict(zip(names, given, strict=True))) if names else self.network(*given))

    return Chosen()


def _of_transformers(kind: str, names: tuple[str, ...], chosen: Any, **config: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    configured = getattr(transformers, f"{kind.removesuffix('Model').partition('For')[0]}Config")(**config)
    return _outputs(getattr(transformers, kind)(configured), chosen, *names)


def _states(found: Any) -> Any:
    return found.last_hidden_state


def text(name: str, **config: int | str) -> Any:
    return _of_transformers(
        f"{name}Model", ("input_ids", "attention_mask"), _states, **{key: int(value) for key, value in config.items()}
    )


def whisper_base_encoder() -> Any:
    import torch
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    base = {"d_model": 512, "encoder_layers": 6, "encoder_attention_heads": 8, "encoder_ffn_dim": 2048}
    return _outputs(WhisperEncoder(WhisperConfig(num_mel_bins=80, **base)), _states, "input_features")


def wav2vec2_base() -> Any:
    return _of_transformers("Wav2Vec2Model", ("input_values",), _states)


def ast_base() -> Any:
    return _of_transformers("ASTModel", ("input_values",), _states)


def segformer_b0() -> Any:
    return _of_transformers("SegformerForSemanticSegmentation", ("pixel_values",), lambda found: found.logits)


def _boxes(found: Any) -> Any:
    return found.logits, found.pred_boxes


def yolos_tiny() -> Any:
    sizes = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "image_size": [512, 512]}
    return _of_transformers("YolosForObjectDetection", ("pixel_values",), _boxes, **sizes)


def detr_r50() -> Any:
    return _of_transformers("DetrForObjectDetection", ("pixel_values",), _boxes, **_resnet([3, 4, 6, 3], "bottleneck"))


def rtdetr_r18() -> Any:
    from transformers import RTDetrResNetConfig

    backbone = RTDetrResNetConfig(
        depths=[2, 2, 2, 2],
        hidden_sizes=[64, 128, 256, 512],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    widths = {"encoder_in_channels": [128, 256, 512], "decoder_layers": 3}
    return _of_transformers("RTDetrForObjectDetection", ("pixel_values",), _boxes, backbone_config=backbone, **widths)


def _resnet(depths: list[int], kind: str) -> dict[str, Any]:
    from transformers import ResNetConfig

    backbone = ResNetConfig(depths=depths, layer_type=kind, out_features=["stage4"])
    return {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "backbone_config": backbone}


def unet(width: int = 64) -> Any:
    import torch
    from torch import nn

    def double(inside: int, outside: int) -> Any:
        convs = [(inside, outside), (outside, outside)]
        return nn.Sequential(*(m for a, b in convs for m in (nn.Conv2d(a, b, 3, 1, 1), nn.BatchNorm2d(b), nn.ReLU())))

    class UNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [width << level for level in range(5)]
            self.down = nn.ModuleList(double(a, b) for a, b in zip([3, *widths], widths, strict=False))
            self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in widths[-2::-1])
            self.join = nn.ModuleList(double(2 * w, w) for w in widths[-2::-1])
            self.head = nn.Conv2d(width, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept: list[torch.Tensor] = []
            for level, block in enumerate(self.down):
                x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
                kept.append(x)
            for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
                x = join(torch.cat([skip, up(x)], 1))
            return self.head(x)

    torch.manual_seed(0)
    return UNet()


def recurrent(kind: str, width: int = 256) -> Any:
    """Two layers in both directions and a classifier of each step."""
    import torch
    from torch import nn

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = getattr(nn, kind)(80, width, 2, batch_first=True, bidirectional=True)
            self.head = nn.Linear(2 * width, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(x)[0])

    torch.manual_seed(0)
    return Tagger()


def crnn() -> Any:
    """A recogniser of text lines: convolutions, then an LSTM over the columns."""
    import torch
    from torch import nn

    class Crnn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths, layers = (1, 64, 128, 256, 512), []
            for level, (a, b) in enumerate(itertools.pairwise(widths)):
                layers += [nn.Conv2d(a, b, 3, 1, 1), nn.BatchNorm2d(b), nn.ReLU()]
                layers.append(nn.MaxPool2d(2) if level < 2 else nn.MaxPool2d((2, 1)))
            self.convs = nn.Sequential(*layers)
            self.steps = nn.LSTM(2 * 512, 256, bidirectional=True, batch_first=True)
            self.head = nn.Linear(512, 97)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.convs(x)
            return self.head(self.steps(x.flatten(1, 2).transpose(1, 2))[0])

    torch.manual_seed(0)
    return Crnn()

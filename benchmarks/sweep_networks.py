"""The architectures of benchmarks/convert_sweep.py: random weights from a seed, small sizes, code of the libraries as it is.

torchvision, timm, transformers and ultralytics are guests here: nothing of trt-engine needs them. A torchvision whose C++
operators do not load beside a PyTorch for CPUs alone is imported with their schemas: no network below calls them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    """One architecture: what makes it, and the inputs `convert` is called with."""

    family: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    wrong: bool = False
    """It has a defect: the right answer is a refusal."""


NETWORKS: dict[str, Network] = {}
_KEPT: list[Any] = []


def _add(family: str, name: str, build: Callable[[], nn.Module], *inputs: str, wrong: bool = False) -> None:
    NETWORKS[name] = Network(family, build, inputs, wrong)


def make(name: str) -> nn.Module:
    """The network in evaluation mode; weights that are set to zero at first are made random, so that every layer counts."""
    _vision()  # transformers and ultralytics import it too
    torch.manual_seed(0)
    module = NETWORKS[name].build().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return module


def _vision() -> None:
    """torchvision, with the schemas of its operators where its library does not load."""
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [item for item in sys.modules if item.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


# ------------------------------------------------------------------------------------------------ torchvision


class _Part(nn.Module):
    """A part of a detector that no operator of torchvision's own follows: features and heads."""

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images: Tensor) -> Any:
        return self.head(list(self.backbone(images).values()))


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision import models

        folder, _, function = name.rpartition(".")
        owner = getattr(models, folder) if folder else models
        plain = {"weights": None} | ({"weights_backbone": None} if folder else {})
        network: nn.Module = getattr(owner, function)(**plain, **options)
        return _Part(network) if folder == "detection" else network

    return build


def _vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(64, 16, 2, 4, 64, 128, num_classes=10)


def _swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=10)


def _maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=10)


for _name in ("resnet18", "mobilenet_v3_small", "efficientnet_b0", "densenet121", "shufflenet_v2_x0_5", "regnet_y_400mf",
              "squeezenet1_1", "mnasnet0_5", "convnext_tiny"):  # fmt: skip
    _add("torchvision", _name, _torchvision(_name), "images:2x3x64x64")
_add("torchvision", "googlenet", _torchvision("googlenet", init_weights=False), "images:2x3x96x96")
_add("torchvision", "tv_vit", _vit, "images:2x3x64x64")
_add("torchvision", "tv_swin", _swin, "images:2x3x64x64")
_add("torchvision", "tv_maxvit", _maxvit, "images:2x3x64x64")
_add("torchvision", "deeplabv3_mobilenet", _torchvision("segmentation.deeplabv3_mobilenet_v3_large"), "x:2x3x64x64")
_add("torchvision", "lraspp", _torchvision("segmentation.lraspp_mobilenet_v3_large"), "x:2x3x64x64")
_add("torchvision", "retinanet_heads", _torchvision("detection.retinanet_resnet50_fpn_v2"), "images:2x3x64x64")
_add("torchvision", "ssdlite_heads", _torchvision("detection.ssdlite320_mobilenet_v3_large"), "images:2x3x128x128")

# ------------------------------------------------------------------------------------------------ timm


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        made: nn.Module = timm.create_model(name, pretrained=False, num_classes=10, **options)
        return made

    return build


for _name, _size, _options in (
    ("vit_tiny_patch16_224", 64, {"img_size": 64, "depth": 3}),
    ("deit3_small_patch16_224", 64, {"img_size": 64, "depth": 2}),
    ("eva02_tiny_patch14_224", 56, {"img_size": 56, "depth": 2}),
    ("mixer_s32_224", 64, {"img_size": 64}),
    ("resmlp_12_224", 64, {"img_size": 64}),
    ("swinv2_cr_tiny_224", 64, {"img_size": 64, "window_size": 2}),
    ("levit_128s", 224, {}),
    ("mobilevit_xxs", 64, {}),
    ("poolformerv2_s12", 64, {}),
    ("pvt_v2_b0", 64, {}),
    ("ghostnet_050", 64, {}),
    ("repvgg_a0", 64, {}),
    ("fastvit_t8", 64, {}),
    ("xcit_nano_12_p16_224", 64, {"img_size": 64, "depth": 2}),
    ("hrnet_w18_small", 64, {}),
    ("edgenext_xx_small", 64, {}),
):
    _add("timm", _name, _timm(_name, **_options), f"x:2x3x{_size}x{_size}")

# ------------------------------------------------------------------------------------------------ transformers


def _hugging(model: str, config: str, part: str | None = None, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        made.config.use_cache = False
        return getattr(made, part) if part is not None else made

    return build


_SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT: dict[str, Any] = _SMALL | {"vocab_size": 99, "max_position_embeddings": 64}
_PICTURE: dict[str, Any] = _SMALL | {"image_size": 32, "patch_size": 8}
_IDS = "input_ids:2x16:int64@3..98"
_MASKED = (_IDS, "attention_mask:2x16:int64")
_PIXELS = "pixel_values:2x3x32x32"
_LLAMA = _TEXT | {"num_key_value_heads": 2}

for _name, _model, _config, _settings, _inputs in (
    ("bert", "BertForSequenceClassification", "BertConfig", _TEXT, _MASKED),
    ("roberta", "RobertaForMaskedLM", "RobertaConfig", _TEXT | {"max_position_embeddings": 80}, _MASKED),
    ("distilbert", "DistilBertModel", "DistilBertConfig",
     {"vocab_size": 99, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}, _MASKED),
    ("albert", "AlbertModel", "AlbertConfig", _TEXT | {"embedding_size": 16}, _MASKED),
    ("deberta_v2", "DebertaV2Model", "DebertaV2Config",
     _TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, _MASKED),
    ("gpt2", "GPT2LMHeadModel", "GPT2Config", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}, (_IDS,)),
    ("llama", "LlamaForCausalLM", "LlamaConfig", _LLAMA, _MASKED),
    ("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _LLAMA, (_IDS,)),
    ("mixtral", "MixtralForCausalLM", "MixtralConfig", _LLAMA | {"num_local_experts": 4}, (_IDS,)),
    ("vit", "ViTForImageClassification", "ViTConfig", _PICTURE, (_PIXELS,)),
    ("dinov2", "Dinov2Model", "Dinov2Config", _PICTURE, (_PIXELS,)),
    ("beit", "BeitModel", "BeitConfig", _PICTURE, (_PIXELS,)),
    ("yolos", "YolosForObjectDetection", "YolosConfig", _PICTURE | {"image_size": [32, 32], "num_detection_tokens": 5},
     (_PIXELS,)),
    ("clip_vision", "CLIPVisionModel", "CLIPVisionConfig", _PICTURE, (_PIXELS,)),
    ("clip_text", "CLIPTextModel", "CLIPTextConfig", _TEXT, (_IDS,)),
    ("swin", "SwinModel", "SwinConfig",
     {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
     (_PIXELS,)),
    ("convnextv2", "ConvNextV2Model", "ConvNextV2Config", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
     (_PIXELS,)),
    ("segformer", "SegformerForSemanticSegmentation", "SegformerConfig",
     {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 24, 32], "decoder_hidden_size": 16,
      "num_attention_heads": [1, 2, 2, 4]}, ("pixel_values:2x3x64x64",)),
    ("mobilevit", "MobileViTModel", "MobileViTConfig", {"image_size": 64}, ("pixel_values:2x3x64x64",)),
    ("dpt", "DPTForDepthEstimation", "DPTConfig",
     _PICTURE | {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 16, 16],
                 "fusion_hidden_size": 16}, (_PIXELS,)),
):  # fmt: skip
    _add("transformers", f"hf_{_name}", _hugging(_model, _config, **_settings), *_inputs)

_add("transformers", "hf_t5_encoder", _hugging("T5EncoderModel", "T5Config", vocab_size=99, d_model=32, d_kv=8, d_ff=64,
     num_layers=2, num_heads=4), *_MASKED)  # fmt: skip
_add("transformers", "hf_whisper_encoder", _hugging("WhisperModel", "WhisperConfig", "encoder", d_model=32, encoder_layers=2,
     encoder_attention_heads=4, encoder_ffn_dim=64, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=64,
     num_mel_bins=16, max_source_positions=50, vocab_size=99, pad_token_id=1, bos_token_id=2, eos_token_id=3,
     decoder_start_token_id=2), "input_features:2x16x100")  # fmt: skip
_add("transformers", "hf_wav2vec2", _hugging("Wav2Vec2Model", "Wav2Vec2Config", **_SMALL, conv_dim=(8, 8),
     conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, vocab_size=32),
     "input_values:2x1600")  # fmt: skip


def _detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    body = ResNetConfig(embedding_size=4, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage4"])
    return DetrForObjectDetection(
        DetrConfig(
            backbone_config=body,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            num_queries=10,
            num_labels=4,
        )
    )


def _rtdetr() -> nn.Module:
    from transformers import RTDetrConfig, RTDetrForObjectDetection, RTDetrResNetConfig

    stages = [16, 32, 64, 128]
    body = RTDetrResNetConfig(
        embedding_size=16, hidden_sizes=stages, depths=[1, 1, 1, 1], layer_type="basic", out_indices=[2, 3, 4]
    )
    return RTDetrForObjectDetection(
        RTDetrConfig(
            backbone_config=body,
            encoder_in_channels=stages[1:],
            encoder_hidden_dim=32,
            encoder_ffn_dim=64,
            d_model=32,
            decoder_in_channels=[32] * 3,
            decoder_ffn_dim=64,
            decoder_layers=2,
            num_queries=20,
            num_labels=4,
        )
    )


_add("transformers", "hf_detr", _detr, "pixel_values:2x3x64x64")
_add("transformers", "hf_rtdetr", _rtdetr, "pixel_values:2x3x96x96")

# ------------------------------------------------------------------------------------------------ ultralytics


def _ultralytics(file: str, kind: str = "DetectionModel") -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from ultralytics.nn import tasks

        made: nn.Module = getattr(tasks, kind)(file, nc=4, verbose=False)
        return made

    return build


for _name, _kind in (("yolov5n", "DetectionModel"), ("yolov8n", "DetectionModel"), ("yolo11n", "DetectionModel"),
                     ("yolov10n", "DetectionModel"), ("yolov8n-seg", "SegmentationModel"),
                     ("yolov8n-pose", "PoseModel"), ("yolov8n-cls", "ClassificationModel"),
                     ("yolov8n-obb", "OBBModel")):  # fmt: skip
    _add("ultralytics", f"ul_{_name}", _ultralytics(f"{_name}.yaml", _kind), "images:2x3x64x64")

# ------------------------------------------------------------------------------------------------ planted defects


class _Plain(nn.Module):
    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.rule = rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.layer(x))


def _branch(x: Tensor) -> Tensor:
    if x.abs().max() > 50:
        x = x * 0
    return x


def _loop(x: Tensor) -> Tensor:
    for _ in range(int((x > 50).sum())):
        x = x + 1
    return x


def _item(x: Tensor) -> Tensor:
    scale = 2.0 if x.max().item() > 50 else 1.0
    return x * scale


def _equal(x: Tensor) -> Tensor:
    return x * 0 if torch.equal(x, x.abs()) else x


def _batch_norm(x: Tensor) -> Tensor:
    return nn.functional.batch_norm(x, None, None, training=True)


for _name, _rule in (
    ("branch", _branch),
    ("loop", _loop),
    ("item", _item),
    ("equal", _equal),
    ("batch_norm", _batch_norm),
):
    _add("planted", f"planted_{_name}", lambda rule=_rule: _Plain(rule), "x:4x8", wrong=True)  # type: ignore[misc]

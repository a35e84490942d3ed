"""Forty architectures of torchvision, timm and transformers with random weights, as sources of `trt-engine convert`.

trt-engine convert benchmarks/world_networks.py:make -O name=timm/lcnet_050 -o lcnet.onnx
"""

from __future__ import annotations

from typing import Any

import torch

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_WIDE = _SMALL | {"vocab_size": 1000}
_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Bert": _WIDE,
    "Albert": _WIDE | {"embedding_size": 32},
    "Electra": _WIDE | {"embedding_size": 32},
    "ModernBert": _WIDE
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    "MPNet": _WIDE,
    "Llama": _WIDE | {"num_key_value_heads": 2},
    "Qwen2": _WIDE | {"num_key_value_heads": 2},
    "GPT2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    "Dinov2": _SMALL | {"image_size": 56, "patch_size": 14},
    "Segformer": {"hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]},
    "Wav2Vec2": _WIDE | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
    "Yolos": _SMALL | {"image_size": [64, 96], "patch_size": 16, "num_detection_tokens": 10},
}


class _LastState(torch.nn.Module):
    """The hidden states alone, without the class of transformers around them."""

    def __init__(self, module: torch.nn.Module, named: str) -> None:
        super().__init__()
        self._module, self._named = module, named

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._module(**{self._named: x}).last_hidden_state  # type: ignore[no-any-return]


def make(name: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """The network and its example input, the same at each call."""
    torch.manual_seed(0)
    library, _, kind = name.partition("/")
    image = torch.rand(2, 3, 224, 224)
    _without_compiled_torchvision()
    if library == "torchvision":
        import torchvision

        if kind.startswith("lraspp"):
            made = torchvision.models.get_model(kind, weights=None, weights_backbone=None, num_classes=21)
            return _Out(made).eval(), (image,)
        options = {"init_weights": False, "aux_logits": False} if kind == "googlenet" else {}
        return torchvision.models.get_model(kind, weights=None, **options).eval(), (image,)
    if library == "timm":
        import timm

        network = timm.create_model(kind, pretrained=False)
        size = network.pretrained_cfg["input_size"][-1]
        return network.eval(), (torch.rand(2, 3, size, size),)
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_TRANSFORMERS[kind])
    network = getattr(transformers, f"{kind}Model")(config)
    if kind == "Wav2Vec2":
        return _LastState(network, "input_values").eval(), (torch.randn(2, 8000),)
    if kind in ("Dinov2", "Segformer", "Yolos"):
        size = {"Dinov2": (56, 56), "Segformer": (64, 64), "Yolos": (64, 96)}[kind]
        return _LastState(network, "pixel_values").eval(), (torch.rand(2, 3, *size),)
    return _LastState(network, "input_ids").eval(), (torch.randint(3, 1000, (2, 16)),)


class _Out(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._module(x)["out"]  # type: ignore[no-any-return]


def _without_compiled_torchvision() -> None:
    """Its compiled operators, which a CPU build of PyTorch cannot load, are declared: no network here uses them."""
    global _declared
    if _declared is None:
        _declared = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                _declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_declared: torch.library.Library | None = None

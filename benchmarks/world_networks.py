"""Architectures of torchvision, timm, transformers and Ultralytics with random weights, as sources of `trt-engine convert`.

trt-engine convert benchmarks/world_networks.py:make -O name=timm/lcnet_050 -o lcnet.onnx
"""

from __future__ import annotations

import os
from typing import Any

import torch

_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
          "initializer_range": 0.2}  # fmt: skip
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
    "GPT2": {"initializer_range": 0.2, "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000},
    "Dinov2": _SMALL | {"image_size": 56, "patch_size": 14},
    "Segformer": {"initializer_range": 0.2, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1]},
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
    _without_compiled_torchvision()
    if library == "transformers":
        return _transformer(kind)
    size = (224, 224)
    if library == "torchvision":
        import torchvision

        options: dict[str, Any] = {"init_weights": False, "aux_logits": False} if kind == "googlenet" else {}
        if kind.startswith("lraspp"):
            options = {"weights_backbone": None, "num_classes": 21}
        network = torchvision.models.get_model(kind, weights=None, **options)
        network = _Out(network) if kind.startswith("lraspp") else network
    elif library == "timm":
        import timm

        network = timm.create_model(kind, pretrained=False)
        size = network.pretrained_cfg["input_size"][1:]
    else:
        os.environ.setdefault("YOLO_OFFLINE", "true")
        from ultralytics.nn import tasks

        detector = getattr(tasks, "SegmentationModel" if kind.endswith("-seg") else "DetectionModel")
        network, size = detector(f"{kind}.yaml", nc=4, verbose=False), (96, 128)
    _enliven(network, _images(8, size))
    return network.eval(), (_images(2, size),)


def _transformer(kind: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_TRANSFORMERS[kind])
    network = getattr(transformers, f"{kind}Model")(config)
    if kind == "Wav2Vec2":
        return _LastState(network, "input_values").eval(), (torch.randn(2, 8000),)
    if kind in ("Dinov2", "Segformer", "Yolos"):
        size = {"Dinov2": (56, 56), "Segformer": (64, 64), "Yolos": (64, 96)}[kind]
        return _LastState(network, "pixel_values").eval(), (_images(2, size),)
    return _LastState(network, "input_ids").eval(), (torch.randint(3, 1000, (2, 16)),)


def _images(count: int, size: tuple[int, int]) -> torch.Tensor:
    """`[count, 3, *size]` in [0, 1]: spots and noise. Of noise alone every image has the same means."""
    spots = torch.nn.functional.interpolate(torch.rand(count, 3, 6, 6), size, mode="bilinear")
    return 0.8 * spots + 0.2 * torch.rand(count, 3, *size)


def _enliven(network: torch.nn.Module, images: torch.Tensor) -> None:
    """Weights and statistics with which the result depends on the image, as it does after training.

    As constructed, layer scales of 0 or 1e-6, zero biases and unfitted BatchNorm make results of 0 to 1e-8, or the same
    for all images: a wrong conversion would compute them too.
    """
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=(1.5 / max(parameter[0].numel(), 1)) ** 0.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.0)
    norms = [module for module in network.eval().modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.inference_mode():
        network(images)


def results(value: Any) -> list[torch.Tensor]:
    """The tensors that a network computes; of Ultralytics' pair of result and maps for training, those of the result."""
    if isinstance(value, tuple) and isinstance(value[-1], dict):
        value = value[0]
    return list(value) if isinstance(value, tuple) else [value]


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

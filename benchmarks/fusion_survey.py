"""Which attention the fusions find in exports of transformers and timm, counted.

Small networks of each architecture with random weights, exported by both of torch's exporters, are fused and run on
ONNX Runtime's CPU provider beside the unfused graph. A record has the fusions found, every Softmax left with the reason,
and the largest difference of an output relative to its largest value. Needs torch, transformers and timm.

    python benchmarks/fusion_survey.py
    python benchmarks/fusion_survey.py --only bert swin --out survey.jsonl
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import timm
import torch
import transformers as hf

from trt_engine.atomic_io import encode_json
from trt_engine.environment import Environment
from trt_engine.graph.fusion import fuse_model

RESULTS = Path(__file__).resolve().parent / "results" / "fusion-survey.jsonl"
_BATCH, _TOKENS = 2, 12
_ALLOWED = 1e-4
_LIMIT_S = 240

Made = tuple[torch.nn.Module, dict[str, torch.Tensor], dict[str, dict[int, str]]]
"""A network, its inputs by name, and the names of their dynamic dimensions."""


class Adapter(torch.nn.Module):
    """A network with positional inputs and one tensor as its output."""

    def __init__(self, network: torch.nn.Module, names: tuple[str, ...], output: str) -> None:
        super().__init__()
        self.network, self.names, self.output = network, names, output

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        found = self.network(**dict(zip(self.names, given, strict=True)))
        return getattr(found, self.output)


def text(network: torch.nn.Module, output: str = "last_hidden_state", mask: bool = True, **more: Any) -> Made:
    inputs = {"input_ids": torch.randint(3, 90, (_BATCH, _TOKENS))}
    if mask:
        inputs["attention_mask"] = torch.ones(_BATCH, _TOKENS, dtype=torch.long)
        inputs["attention_mask"][1, _TOKENS // 2 :] = 0
    inputs |= more
    dynamic = {name: {0: "batch", 1: "tokens"} for name in inputs if name != "pixel_values"}
    return Adapter(network, tuple(inputs), output), inputs, dynamic


def image(network: torch.nn.Module, size: int, output: str | None = None) -> Made:
    name = "pixel_values" if output else "x"
    made = Adapter(network, (name,), output) if output else network
    return made, {name: torch.randn(_BATCH, 3, size, size)}, {name: {0: "batch"}}


SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip


def whisper() -> Made:
    config = hf.WhisperConfig(
        vocab_size=99, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_source_positions=20, max_target_positions=32, num_mel_bins=16,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    features = torch.randn(_BATCH, 16, 40)
    ids = torch.randint(3, 90, (_BATCH, 7))
    made = Adapter(hf.WhisperModel(config), ("input_features", "decoder_input_ids"), "last_hidden_state")
    dynamic = {"input_features": {0: "batch"}, "decoder_input_ids": {0: "batch", 1: "tokens"}}
    return made, {"input_features": features, "decoder_input_ids": ids}, dynamic


def t5() -> Made:
    config = hf.T5Config(vocab_size=99, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4)
    return text(hf.T5EncoderModel(config))


def detr() -> Made:
    config = hf.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, d_model=64, encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_queries=9,
        backbone_config=hf.ResNetConfig(
            embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        ),
    )  # fmt: skip
    return image(hf.DetrModel(config), 64, "last_hidden_state")


def torch_encoder() -> Made:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 96, batch_first=False, norm_first=True)
    network = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return network, {"src": torch.randn(_TOKENS, _BATCH, 64)}, {"src": {0: "tokens", 1: "batch"}}


def torch_decoder() -> Made:
    network = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(64, 4, 96, batch_first=True), 2)
    inputs = {"tgt": torch.randn(_BATCH, 7, 64), "memory": torch.randn(_BATCH, _TOKENS, 64)}
    return network, inputs, {"tgt": {0: "batch", 1: "tokens"}, "memory": {0: "batch", 1: "sources"}}


def vision_tower(kind: str) -> Made:
    config = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 96,
        "image_size": 32,
    }
    made = getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**config, patch_size=8))
    return image(made, 32, "last_hidden_state")


def causal(kind: str, **more: Any) -> Made:
    config = getattr(hf, f"{kind}Config")(**SIZES | {"use_cache": False, "pad_token_id": 0} | more)
    return text(getattr(hf, f"{kind}Model")(config))


def encoder(kind: str, **more: Any) -> Made:
    return text(getattr(hf, f"{kind}Model")(getattr(hf, f"{kind}Config")(**SIZES | more)))


def timm_image(name: str, size: int, **more: Any) -> Made:
    return image(timm.create_model(name, num_classes=10, **more), size)


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "albert": lambda: encoder("Albert", embedding_size=32),
    "bert": lambda: encoder("Bert"),
    "bert-eager": lambda: encoder("Bert", attn_implementation="eager"),
    "deberta-v2": lambda: encoder(
        "DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, max_relative_positions=16
    ),
    "distilbert": lambda: text(
        hf.DistilBertModel(hf.DistilBertConfig(vocab_size=99, dim=64, n_layers=2, n_heads=4, hidden_dim=96))
    ),
    "electra": lambda: encoder("Electra", embedding_size=32),
    "roberta": lambda: encoder("Roberta"),
    "modernbert": lambda: encoder("ModernBert", global_attn_every_n_layers=2, local_attention=8, pad_token_id=0),
    "t5-encoder": t5,
    "gpt2": lambda: text(
        hf.GPT2Model(hf.GPT2Config(vocab_size=99, n_positions=64, n_embd=64, n_layer=2, n_head=4, use_cache=False))
    ),
    "gpt-neox": lambda: causal("GPTNeoX"),
    "llama": lambda: causal("Llama", num_key_value_heads=4),
    "llama-grouped": lambda: causal("Llama", num_key_value_heads=2),
    "qwen3": lambda: causal("Qwen3", num_key_value_heads=2, head_dim=16),
    "gptj": lambda: text(
        hf.GPTJModel(hf.GPTJConfig(
            vocab_size=99, n_positions=64, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, use_cache=False,
        ))
    ),
    "cohere": lambda: causal("Cohere", num_key_value_heads=4),
    "gemma": lambda: causal("Gemma", num_key_value_heads=4, head_dim=16),
    "phi": lambda: causal("Phi"),
    "opt": lambda: text(
        hf.OPTModel(hf.OPTConfig(
            vocab_size=99, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=96, word_embed_proj_dim=64,
            max_position_embeddings=64, use_cache=False,
        ))
    ),
    "clip-vision": lambda: vision_tower("CLIPVision"),
    "siglip-vision": lambda: vision_tower("SiglipVision"),
    "dinov2": lambda: vision_tower("Dinov2"),
    "vit-transformers": lambda: vision_tower("ViT"),
    "detr": detr,
    "whisper": whisper,
    "torch-encoder": torch_encoder,
    "torch-decoder": torch_decoder,
    "timm-vit": lambda: timm_image("vit_tiny_patch16_224", 64, depth=2, img_size=64),
    "timm-deit": lambda: timm_image("deit_tiny_distilled_patch16_224", 64, depth=2, img_size=64),
    "timm-beit": lambda: timm_image("beit_base_patch16_224", 64, depth=2, img_size=64, embed_dim=64, num_heads=4),
    "timm-eva02": lambda: timm_image("eva02_tiny_patch14_224", 56, depth=2, img_size=56),
    "timm-swin": lambda: timm_image(
        "swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=32, depths=(2, 2), num_heads=(2, 4)
    ),
    "timm-cait": lambda: timm_image("cait_xxs24_224", 64, img_size=64, depth=2),
    "timm-xcit": lambda: timm_image("xcit_nano_12_p16_224", 64, depth=2),
    "timm-levit": lambda: timm_image("levit_128s", 224),
    "timm-maxvit": lambda: timm_image("maxvit_pico_rw_256", 256),
    "timm-mobilevit": lambda: timm_image("mobilevit_xxs", 64),
    "timm-pvt": lambda: timm_image("pvt_v2_b0", 64),
    "timm-convnext": lambda: timm_image("convnext_atto", 64),
}  # fmt: skip


def randomize(network: torch.nn.Module) -> None:
    """Weights that leave no part without effect: new networks have zero biases, layer scales and heads."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


EXPORTERS = {"dynamo": None, "torchscript": 17, "torchscript-14": 14}
"""Opset of each exporter; dynamo chooses. At opset 14 a norm is written in primitive operators."""


def export(made: Made, path: Path, *, exporter: str) -> None:
    network, inputs, dynamic = made
    dynamo = exporter == "dynamo"
    given: dict[str, Any] = {"dynamic_axes": dynamic, "opset_version": EXPORTERS[exporter]}
    if dynamo:
        shapes = tuple(dict.fromkeys(dynamic.get(name, {}), torch.export.Dim.DYNAMIC) for name in inputs)
        if isinstance(network, Adapter):
            shapes = (shapes,)
        given = {"dynamic_shapes": shapes, "external_data": False, "verbose": False}
    torch.onnx.export(network, tuple(inputs.values()), path, dynamo=dynamo, input_names=list(inputs), **given)


def outputs(proto: onnx.ModelProto, inputs: dict[str, torch.Tensor]) -> list[np.ndarray]:
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = {item.name for item in session.get_inputs()}
    found: list[np.ndarray] = session.run(
        None, {name: array.numpy() for name, array in inputs.items() if name in names}
    )
    return found


def survey(name: str, exporter: str, folder: Path) -> dict[str, Any]:
    made = ARCHITECTURES[name]()
    made[0].eval()
    randomize(made[0])
    path = folder / f"{name}-{exporter}.onnx"
    record: dict[str, Any] = {"architecture": name, "exporter": exporter}
    try:
        with Path(os.devnull).open("w") as quiet:  # the exporters write their progress to stdout
            stdout, sys.stdout = sys.stdout, quiet
            try:
                if not path.exists():
                    export(made, path, exporter=exporter)
            finally:
                sys.stdout = stdout
    except Exception as error:
        reason = str(error.__cause__ or error).splitlines() or [""]
        return record | {"failed": f"{type(error).__name__}: {re.sub(chr(27) + '[^m]*m', '', reason[0])[:160]}"}
    proto = onnx.load(path)
    fused = fuse_model(proto, path.parent, on_gpu=True)
    before, after = outputs(proto, made[1]), outputs(fused.proto, made[1])
    error = max(float(np.abs(a - b).max() / (np.abs(a).max() or 1)) for a, b in zip(before, after, strict=True))
    operators = Counter(node.op_type for node in fused.proto.graph.node)
    return record | {
        "fusions": dict(fused.counts), "softmax_before": sum(node.op_type == "Softmax" for node in proto.graph.node),
        "softmax_left": operators["Softmax"], "unfused": dict(Counter(fused.unfused.values())),
        "nodes": [len(proto.graph.node), len(fused.proto.graph.node)], "difference": error, "kept": error <= _ALLOWED,
    }  # fmt: skip


def quiet() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    ort.set_default_logger_severity(4)


def in_child(name: str, exporter: str, folder: Path) -> dict[str, Any]:
    """The record of one export, from a process of its own: exporters crash."""
    out = folder / f"{name}-{exporter}.json"
    command = [
        sys.executable,
        __file__,
        "--only",
        name,
        "--exporters",
        exporter,
        "--record",
        str(out),
        "--folder",
        str(folder),
    ]
    try:
        code = subprocess.run(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return {"architecture": name, "exporter": exporter, "failed": f"no export in {_LIMIT_S} s"}
    if code:
        return {"architecture": name, "exporter": exporter, "failed": f"the process ended with {code}"}
    return json.loads(out.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--exporters", nargs="+", choices=EXPORTERS, default=list(EXPORTERS))
    parser.add_argument("--folder", type=Path, help="where exports are kept, and taken from")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        quiet()
        args.record.write_bytes(encode_json(survey(args.only[0], args.exporters[0], args.folder)))
        return 0
    versions = {module.__name__: str(module.__version__) for module in (torch, hf, timm, onnx, ort)}
    environment, kept = Environment.detect(None), True
    with tempfile.TemporaryDirectory() as temporary, args.out.open("w") as out:
        folder = args.folder or Path(temporary)
        for name in args.only:
            for exporter in args.exporters:
                record = in_child(name, exporter, folder)
                kept &= record.get("kept", True)
                facts = {"schema": "trt-engine/fusion-survey", "versions": versions, "environment": environment}
                out.write(encode_json(facts | record).decode() + "\n")
                out.flush()
                print(
                    f"{name:<18}{exporter:<12}"
                    + (record["failed"] if "failed" in record else
                       f"{record['fusions']} softmax {record['softmax_before']} -> {record['softmax_left']} "
                       f"{record['unfused'] or ''} difference {record['difference']:.1e}"),
                    flush=True,
                )  # fmt: skip
    return 0 if kept else 8


if __name__ == "__main__":
    sys.exit(main())
